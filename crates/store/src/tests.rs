//! The store as a whole, on real files.

mod damage;
mod evidence;
mod full;
mod killed;
mod leftovers;
mod packed;
mod proven;
mod publish;
mod removal;
mod tags;
mod unreadable;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use chrono::{DateTime, TimeZone, Utc};
use tempfile::TempDir;

use super::manifest::Part;
use super::*;
use crate::draft::Draft;
use rekindle_os::beneath::Beneath;
use rekindle_testing::require;

/// A store with one job.
pub(super) struct Home {
    dir: TempDir,
    store: Store,
    folder: JobFolder,
    lock: WriterLock,
}

impl Home {
    fn new() -> Home {
        Home::below(tempfile::tempdir().unwrap())
    }

    fn below(dir: TempDir) -> Home {
        let store = Store::open(&dir.path().join("a/store"), Access::Write).unwrap();
        let folder = store.create_job(&name("train")).unwrap();
        let lock = folder.lock().unwrap();
        Home { dir, store, folder, lock }
    }

    /// Publishes an image with files at two depths, taken at this second.
    fn publish(&self, seconds: i64) -> Image {
        let draft = self.folder.begin_image(&self.lock, at(seconds)).unwrap();
        fill(draft.dir());
        draft.publish_loose(manifest())
    }

    fn image_path(&self, name: &str) -> Beneath {
        self.folder.images_dir().join(name)
    }

    /// The images as text, newest first.
    fn ids(&self) -> Vec<String> {
        self.folder.images().unwrap().iter().map(|image| image.id.to_string()).collect()
    }
}

impl JobFolder {
    /// Begins an image with the next number.
    pub(crate) fn begin_image(&self, lock: &WriterLock, now: DateTime<Utc>) -> Result<Draft> {
        self.begin_image_as(lock, self.next_id(now)?)
    }
}

impl Draft {
    /// Makes it a loose image, as releases up to 0.1 did: plain files in its folder, with their hashes in the manifest.
    pub(crate) fn publish_loose(self, mut manifest: Manifest) -> Image {
        let part = |entry: files::Entry| {
            let file = fs::File::open(self.dir().join(&entry.relative)).unwrap();
            let (size, blake3) = files::hash(&file).unwrap();
            Part { path: entry.relative.to_str().unwrap().parse().unwrap(), size, blake3: Some(blake3) }
        };
        let entries = files::walk(self.dir()).unwrap().into_iter();
        manifest.parts = entries.filter(|entry| matches!(entry.kind, files::Kind::File { .. })).map(part).collect();
        manifest.parts.sort_by(|a, b| a.path.cmp(&b.path));
        manifest.bytes = manifest.parts.iter().map(|part| part.size).sum();
        let images = self.dir().parent().unwrap();
        let job = images.parent().unwrap();
        let job = job.file_name().unwrap();
        (manifest.id, manifest.job) = (self.id(), job.to_str().unwrap().parse().unwrap());
        let trust = Trust::default().for_job(&manifest.job);
        let bytes = manifest.to_bytes(&trust).unwrap();
        rekindle_os::durable::write_file(&self.dir().join(manifest::FILE_NAME), &bytes, 0o600).unwrap();
        let lasting = images.join(self.id().to_string());
        fs::rename(self.dir(), &lasting).unwrap();
        Image::load(&lasting, self.id(), &trust)
    }
}

/// A place at a path, for tests.
pub(crate) fn beneath(path: &Path) -> Beneath {
    Beneath::at(path).unwrap()
}

fn name(text: &str) -> JobName {
    text.parse().unwrap()
}

pub(super) fn at(seconds: i64) -> DateTime<Utc> {
    Utc.timestamp_opt(1_800_000_000 + seconds, 0).unwrap()
}

fn fill(dir: &Beneath) {
    fs::create_dir_all(dir.join("criu/deep")).unwrap();
    fs::write(dir.join("criu/pages-1.img"), vec![7; (2 << 20) + 5]).unwrap();
    fs::write(dir.join("criu/deep/core-1.img"), b"registers").unwrap();
    fs::write(dir.join("empty"), b"").unwrap();
}

/// A manifest as a snapshot provides it: without parts.
pub(crate) fn manifest() -> Manifest {
    serde_json::from_str(rekindle_testing::MANIFEST).unwrap()
}

/// Everything below a folder with its content, to compare before and after. A symbolic link is its target.
fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let content = |path: &Path| match fs::symlink_metadata(path).unwrap() {
        meta if meta.is_file() => fs::read(path).unwrap(),
        meta if meta.is_symlink() => fs::read_link(path).unwrap().into_os_string().into_encoded_bytes(),
        _ => Vec::new(),
    };
    let all = files::walk(&beneath(dir)).unwrap().into_iter().map(|entry| entry.relative);
    all.map(|relative| (relative.clone(), content(&dir.join(relative)))).collect()
}

/// Repeats until there is a result, for half a minute.
pub(crate) fn eventually<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(answer) = ask() {
            return answer;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("not within half a minute")
}

#[test]
fn a_folder_that_is_gone_is_not_one_without_images() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Access::Write).unwrap();
    let folder = store.create_job(&"j".parse().unwrap()).unwrap();
    std::fs::remove_dir_all(folder.path()).unwrap();
    assert!(matches!(folder.images(), Err(Error::Read { .. })));
    // Somebody has made a folder of that name, and nothing else.
    std::fs::create_dir(folder.path()).unwrap();
    assert!(folder.images().unwrap().is_empty());
    // The records of a job without its images.
    std::fs::create_dir(folder.packs_dir()).unwrap();
    assert!(matches!(folder.images(), Err(Error::Read { .. })));
}
