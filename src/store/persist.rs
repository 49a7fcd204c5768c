//! From memory to the store, while the job runs.
//!
//! A staged image is copied into a draft, file by file, within bounds that keep the job's disk and processors free; then
//! the draft is published by its own protocol (`draft.rs`), which hashes and syncs. The image in memory is only
//! read. When the power goes, a draft is left, which the next start sweeps; when only we go, the next supervisor begins
//! anew from the staged image.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::draft::{Draft, PublishError};
use super::files;
use super::image::Image;

/// Copied at once.
const PIECE: usize = 1 << 20;

/// Bounds on the work beside the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes a second that are written at most.
    pub rate: Option<u64>,
    /// Threads that copy, hash and sync.
    pub threads: usize,
}

/// How far it is; read by others while it goes on.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// So many bytes more are to come.
    pub(super) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many more of them came.
    pub(super) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes copied, and bytes in all.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}

/// Why an image in memory is not in the store. It still is in memory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It has no manifest any more.
    #[error("image {0} is not in memory any more")]
    Gone(super::ImageId),
    /// A part could not be copied.
    #[error("can not copy {} to the store", path.display())]
    Copy {
        /// The part.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The copy could not be published.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// It was not wanted any more.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Whether room is what was missing.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Error::Copy { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            Error::Publish(error) => error.is_full(),
            _ => false,
        }
    }
}

/// Brings `image` to the store as what `draft` becomes.
///
/// # Errors
/// When a part can not be copied, or the draft not be published. The draft is gone then.
pub fn persist(
    image: &Image,
    draft: Draft,
    bounds: Bounds,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Image, Error> {
    let manifest = image.manifest().ok_or(Error::Gone(image.id))?.clone();
    progress.total.store(manifest.bytes, Ordering::Relaxed);
    let pace = Pace { began: Instant::now(), rate: bounds.rate, progress, cancelled };
    let parts = manifest.parts.iter().map(|part| (part.path.clone(), part.size)).collect();
    files::in_parallel(parts, bounds.threads, |part| {
        let failed = |source: io::Error| match cancelled() {
            true => Error::Cancelled,
            false => Error::Copy { path: image.dir.join(&part), source },
        };
        copy(&image.dir.join(&part), &draft.dir().join(&part), &pace).map_err(failed)
    })?;
    // A slot that was begun anew in the meantime would have given parts of two images.
    if image.look_again().manifest() != Some(&manifest) {
        return Err(Error::Gone(image.id));
    }
    Ok(draft.publish(manifest, bounds.threads)?)
}

fn copy(from: &Path, to: &Path, pace: &Pace<'_>) -> io::Result<()> {
    if let Some(folder) = to.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut source = File::open(from)?;
    let mut target = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    let mut buffer = vec![0; PIECE];
    loop {
        let n = match source.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        target.write_all(buffer.get(..n).unwrap_or_default())?;
        pace.wrote(n)?;
    }
}

/// Keeps all threads together below the rate.
struct Pace<'a> {
    began: Instant,
    rate: Option<u64>,
    progress: &'a Progress,
    cancelled: &'a (dyn Fn() -> bool + Sync),
}

/// The longest sleep between two looks at whether it is still wanted.
const NAP: Duration = Duration::from_millis(50);

impl Pace<'_> {
    fn wrote(&self, bytes: usize) -> io::Result<()> {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let done = self.progress.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let due = self.rate.map_or(Duration::ZERO, |rate| time_for(done, rate));
        loop {
            if (self.cancelled)() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            match due.checked_sub(self.began.elapsed()) {
                Some(rest) if !rest.is_zero() => std::thread::sleep(rest.min(NAP)),
                _ => return Ok(()),
            }
        }
    }
}

fn time_for(bytes: u64, rate: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::manifest::Part;
    use crate::store::{Access, ImageId, Place, State, Store};

    /// A store, and an image "in memory", which here is a folder.
    fn ground(dir: &Path) -> (crate::store::JobFolder, Image) {
        let store = Store::open(&dir.join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let slot = dir.join("slot");
        fs::create_dir_all(slot.join("criu")).unwrap();
        let parts = [("criu/a", 3 << 20), ("criu/b", 0), ("dump.log", 10)];
        let mut manifest = crate::store::tests::manifest();
        manifest.id = ImageId::new(7, chrono::DateTime::UNIX_EPOCH);
        for (path, size) in parts {
            fs::write(slot.join(path), vec![7; size]).unwrap();
            manifest.parts.push(Part { path: path.into(), size: size as u64, blake3: None });
            manifest.bytes += size as u64;
        }
        fs::write(slot.join("manifest.json"), manifest.to_bytes().unwrap()).unwrap();
        let image = Image { id: manifest.id, dir: slot, state: State::Good(Box::new(manifest)), place: Place::Staged };
        (folder, image)
    }

    #[test]
    fn what_is_in_memory_becomes_an_image_of_the_store() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, image) = ground(dir.path());
        let lock = folder.lock().unwrap();
        let draft = folder.begin_image_as(&lock, image.id).unwrap();
        let (progress, bounds) = (Progress::default(), Bounds { rate: None, threads: 2 });
        let stored = persist(&image, draft, bounds, &progress, &|| false).unwrap();
        assert_eq!((stored.id, stored.place), (image.id, Place::Stored));
        assert!(stored.is_good() && stored.verify().is_sound());
        assert_eq!(progress.bytes(), ((3 << 20) + 10, (3 << 20) + 10));
        assert!(stored.manifest().unwrap().parts.iter().all(|part| part.blake3.is_some()));
    }

    #[test]
    fn it_keeps_to_its_rate_and_can_be_called_off() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, image) = ground(dir.path());
        let lock = folder.lock().unwrap();
        let draft = folder.begin_image_as(&lock, image.id).unwrap();
        let progress = Progress::default();
        let began = Instant::now();
        let slow = Bounds { rate: Some(10 << 20), threads: 2 };
        persist(&image, draft, slow, &progress, &|| false).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(250), "3 MiB at 10 MiB/s: {:?}", began.elapsed());

        let mut other = image.clone();
        other.id = ImageId::new(8, chrono::DateTime::UNIX_EPOCH);
        let draft = folder.begin_image_as(&lock, other.id).unwrap();
        let slow = Bounds { rate: Some(1), threads: 1 };
        let result = persist(&image, draft, slow, &Progress::default(), &|| true);
        assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        assert_eq!(fs::read_dir(folder.images_dir()).unwrap().count(), 1, "no draft is left");
    }

    #[test]
    fn a_slot_that_was_taken_over_gives_no_image() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, image) = ground(dir.path());
        let lock = folder.lock().unwrap();
        let draft = folder.begin_image_as(&lock, image.id).unwrap();
        fs::remove_file(image.dir.join("manifest.json")).unwrap();
        let bounds = Bounds { rate: None, threads: 1 };
        let result = persist(&image, draft, bounds, &Progress::default(), &|| false);
        assert!(matches!(result, Err(Error::Gone(_))), "{result:?}");
    }
}
