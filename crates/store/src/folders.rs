//! Folders of the store: listed, created, and removed in steps that do not block others.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use super::error::{Error, Result};
use super::files::{self, Kind};
use rekindle_os::durable;
use rekindle_os::point::{Step, point};

/// The names in a folder. Names that are not UTF-8 are not ours and are skipped.
pub(super) fn list(dir: &Path) -> Result<Vec<String>> {
    let failed = |source| Error::Read { path: dir.to_owned(), source };
    let entries = fs::read_dir(dir).map_err(failed)?.collect::<io::Result<Vec<_>>>().map_err(failed)?;
    Ok(entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Whether the path exists; an unclear answer counts as yes.
pub(super) fn is_there(path: &Path) -> bool {
    !fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Creates a folder, durably, unless it exists.
pub(super) fn make_folder(path: &Path) -> Result<()> {
    let failed = |source| Error::Create { path: path.to_owned(), source };
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => durable::sync_dir(path.parent().unwrap_or(path)).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(Error::NotAFolder(path.to_owned())),
        Err(source) => Err(failed(source)),
    }
}

/// Bytes by which a file is shortened at a time. Removing a large file at once blocks every writer of the file system
/// for seconds (seen with 18 GB on ext4: a job that logged was blocked for 5 s).
const STEP: u64 = 128 << 20;
/// Pause in which others can write.
const PAUSE: Duration = Duration::from_millis(5);

/// Frees the space of large files in steps. A file that cannot be shortened is removed at once. One that has another name,
/// too (a backup with `cp -al`), is not shortened: it is the same file, and nothing becomes free.
fn shorten(folder: &Path) {
    for entry in files::walk(folder).unwrap_or_default() {
        let Kind::File { size } = entry.kind else { continue };
        if size <= STEP {
            continue;
        }
        let Ok(file) = fs::File::options().write(true).open(folder.join(entry.relative)) else { continue };
        if !file.metadata().is_ok_and(|meta| meta.nlink() == 1) {
            continue;
        }
        let mut left = size;
        while left > STEP && file.set_len(left - STEP).is_ok() {
            left -= STEP;
            std::thread::sleep(PAUSE);
        }
    }
}

/// Removes a file, or a folder with everything below it.
pub(super) fn remove_all(path: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => {
            shorten(path);
            point(Step::Other).and_then(|()| fs::remove_dir_all(path))
        }
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    removed.map_err(|source| Error::Remove { path: path.to_owned(), source })
}

/// Bytes that a user without special rights can still write to the file system of `path`.
///
/// # Errors
/// [`Error::Read`] when the file system cannot be asked.
pub fn free_space(path: &Path) -> Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path);
    let stat = stat.map_err(|source| Error::Read { path: path.to_owned(), source: source.into() })?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_by_hard_links_keeps_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, backup) = (dir.path().join("image"), dir.path().join("backup"));
        fs::create_dir(&folder).unwrap();
        let file = fs::File::create(folder.join("pages")).unwrap();
        // Sparse.
        file.set_len(STEP * 3).unwrap();
        fs::hard_link(folder.join("pages"), &backup).unwrap();
        remove_all(&folder).unwrap();
        assert!(!folder.exists());
        assert_eq!(fs::metadata(&backup).unwrap().len(), STEP * 3);
    }
}
