//! Landing files at a restart: CRIU maps them by their path, and the driver reads the device memory from them.
//!
//! For an image in memory the file is the slot's own, under a second name: nothing is copied. For an image in the store
//! the content is copied to the path in the image. The names are removed when the driver is done.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::shares;
use crate::launch::identity::Identity;
use rekindle_os::beneath::Beneath;
use rekindle_os::cgroup;
use rekindle_os::pages;
use rekindle_os::parallel::in_parallel;
use rekindle_store::manifest::Landing;
use rekindle_store::{Image, Manifest};

/// Files at the paths that the image names. They are removed when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct InPlace(Vec<PathBuf>);

impl Drop for InPlace {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
            shares::forget(path);
        }
    }
}

/// A landing file could not be put where it has to be.
#[derive(Debug, thiserror::Error)]
#[error("cannot put the GPU memory of process {pid} at {}", path.display())]
pub struct Error {
    pid: i32,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Puts all landing files in place.
pub(crate) fn put(image: &Image, manifest: &Manifest, user: Option<&Identity>) -> Result<InPlace, Error> {
    let mut put = InPlace::default();
    // Restored processes may use all CPUs of the machine.
    let all: Vec<(u64, Option<String>)> = manifest.landing.iter().map(|landing| (landing.bytes, None)).collect();
    for (landing, own) in manifest.landing.iter().zip(&all) {
        put.0.push(landing.path.to_path_buf());
        put_one(image, landing, user)
            .and_then(|()| shares::tell(&landing.path, shares::of(own, &all)))
            .map_err(|source| Error { pid: landing.pid, path: landing.path.to_path_buf(), source })?;
    }
    Ok(put)
}

/// Puts empty files of the right size in place: for CRIU, without the driver.
pub(crate) fn put_empty(manifest: &Manifest, user: Option<&Identity>) -> Result<InPlace, Error> {
    let mut put = InPlace::default();
    for landing in &manifest.landing {
        put.0.push(landing.path.to_path_buf());
        let make = || {
            make_room(&landing.path)?;
            File::options().write(true).create_new(true).mode(0o600).open(&landing.path)?.set_len(landing.bytes)?;
            give(&landing.path, user)
        };
        make().map_err(|source| Error { pid: landing.pid, path: landing.path.to_path_buf(), source })?;
    }
    Ok(put)
}

fn put_one(image: &Image, landing: &Landing, user: Option<&Identity>) -> io::Result<()> {
    let from = image.dir.join(&landing.part);
    make_room(&landing.path)?;
    if !(image.is_staged() && fs::hard_link(from.path(), &landing.path).is_ok()) {
        copy(&from, &landing.path)?;
    }
    give(&landing.path, user)
}

/// Creates the folder for a file, and removes a file of that name.
fn make_room(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        // The folder exists, unless the job's store or its staging directory was moved.
        fs::create_dir_all(folder)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The file contains the user's memory. It must belong to the user to pass the check of the restored job's open files.
fn give(path: &Path, user: Option<&Identity>) -> io::Result<()> {
    user.map_or(Ok(()), |user| std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid)))
}

/// Bytes that one thread copies at a time.
const STRETCH: u64 = 256 << 20;

fn copy(from: &Beneath, to: &Path) -> io::Result<()> {
    let source = from.read()?;
    let target = File::options().read(true).write(true).create_new(true).mode(0o600).open(to)?;
    let len = source.metadata()?.size();
    // On a tmpfs as large as the machine's memory, a lack of memory would not be an error: the OOM killer would end a
    // process.
    if cgroup::memory_available().is_some_and(|available| available < len) {
        return Err(io::Error::new(io::ErrorKind::StorageFull, "there is not enough free memory for it"));
    }
    // A tmpfs that is too small must be an error here and not a SIGBUS in the driver.
    pages::make_present(&target, len)?;
    let stretches = (0..len.div_ceil(STRETCH)).collect();
    let copy_one = |n: u64| {
        let (mut source, mut target) = (from.read()?, File::options().write(true).open(to)?);
        let start = n * STRETCH;
        io::Seek::seek(&mut source, io::SeekFrom::Start(start))?;
        io::Seek::seek(&mut target, io::SeekFrom::Start(start))?;
        let wanted = STRETCH.min(len - start);
        match io::copy(&mut io::Read::take(source, wanted), &mut target)? {
            copied if copied == wanted => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    };
    in_parallel(stretches, pages::spare_threads(), copy_one).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{job_path, part_path};
    use rekindle_store::{ImageId, Place, State};

    #[test]
    fn content_is_in_place_until_it_is_not_needed_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("image/gpu/7");
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(&part, vec![3; 5 << 20]).unwrap();
        let path = dir.path().join("elsewhere/landing/7");
        let landing = Landing { pid: 7, path: job_path(path.clone()), part: part_path("gpu/7"), bytes: 5 << 20 };
        let manifest = Manifest { landing: vec![landing], ..crate::samples::manifest() };
        for place in [Place::Staged, Place::Stored] {
            let image = Image {
                id: ImageId::new(1, chrono::DateTime::UNIX_EPOCH),
                dir: crate::samples::beneath(&dir.path().join("image")),
                state: State::Good(Box::new(manifest.clone())),
                place,
                trust: Default::default(),
            };
            let put = put(&image, &manifest, None).unwrap();
            assert_eq!(fs::read(&path).unwrap(), vec![3; 5 << 20]);
            let same = fs::metadata(&path).unwrap().ino() == fs::metadata(&part).unwrap().ino();
            assert_eq!(same, place == Place::Staged, "{place:?}");
            assert_eq!(fs::read_link(path.with_file_name("7.shares")).unwrap(), Path::new("1"));
            drop(put);
            assert!(!path.exists() && part.exists());
            assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        }
        fs::remove_file(&part).unwrap();
        let image = Image {
            id: ImageId::new(1, chrono::DateTime::UNIX_EPOCH),
            dir: crate::samples::beneath(&dir.path().join("image")),
            state: State::Good(Box::new(manifest.clone())),
            place: Place::Stored,
            trust: Default::default(),
        };
        let error = put(&image, &manifest, None).unwrap_err();
        assert!(error.to_string().contains("process 7"), "{error}");
        assert!(!path.exists());
    }
}
