//! Files are a part of the state: before a restore they are put back to what they were at the snapshot.
//!
//! A file that grew is cut to its size of then, and the tail kept beside it as NAME.rolled-back.N. A small file that is
//! rewritten in place has its content in the image; the present one is kept as NAME.rolled-back.N and replaced. CRIU
//! refuses a file of another size (but for those opened to append), and a log with lines from a future that did not
//! happen would lie.
//!
//! Work on the user's files is done with the user's rights: the user owns the folders and could otherwise point us, as
//! root, at somebody else's file.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::Request;
use crate::launch::output::Files;
use crate::store::manifest::OpenFile;
use crate::store::{Image, Manifest};
use crate::sys::identity;

/// A file that was put back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RolledBack {
    /// The file.
    pub path: PathBuf,
    /// Where what was taken away is now.
    pub kept: PathBuf,
    /// How many bytes that is.
    pub bytes: u64,
}

/// Why a file could not be put back.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// It is gone.
    #[error("{} was open at the snapshot and is gone now: put it back, or take an older image", .0.display())]
    Gone(PathBuf),
    /// It is no regular file any more.
    #[error("{} was a regular file at the snapshot and is none now", .0.display())]
    NotAFile(PathBuf),
    /// It lost bytes that the image does not have.
    #[error("{} had {had} bytes at the snapshot and has {has} now: what is missing is not in the image", path.display())]
    Shorter {
        /// The file.
        path: PathBuf,
        /// Bytes then.
        had: u64,
        /// Bytes now.
        has: u64,
    },
    /// The kernel refused.
    #[error("can not put {} back: {verb} failed", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The call.
        verb: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

fn failed<'a>(verb: &'static str, path: &'a Path) -> impl Fn(io::Error) -> RollbackError + 'a {
    move |source| RollbackError::Io { path: path.into(), verb, source }
}

/// Puts every file of the image back.
pub(super) fn put_back(
    image: &Image,
    manifest: &Manifest,
    request: &Request<'_>,
) -> Result<Vec<RolledBack>, RollbackError> {
    let mut done = Vec::new();
    let logs = request.folder.log_dir();
    for file in &manifest.open_files {
        let content = match &file.part {
            Some(part) => {
                let path = image.dir.join(part);
                Some(std::fs::read(&path).map_err(failed("read", &path))?)
            }
            None => None,
        };
        let ours = file.path.starts_with(&logs);
        let work = || put_one_back(file, content.as_deref(), ours);
        // Our own folder can only be entered by us.
        let back = match request.identity.filter(|_| !ours) {
            Some(user) => identity::with_file_rights(user.uid, user.gid, &user.groups, work)
                .map_err(failed("switching to the job's user", &file.path))??,
            None if ours => put_output_back(file, request.output, work)?,
            None => work()?,
        };
        done.extend(back);
    }
    Ok(done)
}

/// A terminal shows the output as it is written. It shows what is cut, then what comes in its place.
fn put_output_back(
    file: &OpenFile,
    output: &Files,
    work: impl FnOnce() -> Result<Option<RolledBack>, RollbackError>,
) -> Result<Option<RolledBack>, RollbackError> {
    let mut held = output.hold();
    let back = work()?;
    if let (Some(back), None) = (&back, &file.part) {
        held.was_cut(&back.path, file.size, &back.kept);
    }
    Ok(back)
}

fn put_one_back(file: &OpenFile, content: Option<&[u8]>, ours: bool) -> Result<Option<RolledBack>, RollbackError> {
    let path = &file.path;
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    if ours {
        // Logs that somebody tidied away must not keep a job from coming back.
        options.create(true).mode(0o600);
    }
    let open = options.open(path).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT) => RollbackError::Gone(path.clone()),
        Some(libc::ELOOP | libc::EISDIR | libc::ENXIO) => RollbackError::NotAFile(path.clone()),
        _ => failed("open", path)(source),
    })?;
    let metadata = open.metadata().map_err(failed("stat", path))?;
    if !metadata.is_file() {
        return Err(RollbackError::NotAFile(path.clone()));
    }
    match content {
        Some(content) => replace(open, path, content),
        None if metadata.size() > file.size => cut(open, path, file.size).map(Some),
        // Rotated or emptied by its owner; whoever appends does not mind.
        None if metadata.size() < file.size && !file.append => {
            Err(RollbackError::Shorter { path: path.clone(), had: file.size, has: metadata.size() })
        }
        None => Ok(None),
    }
}

fn cut(mut file: File, path: &Path, size: u64) -> Result<RolledBack, RollbackError> {
    file.seek(SeekFrom::Start(size)).map_err(failed("seek", path))?;
    let (kept, bytes) = keep_rest(&mut file, path)?;
    file.set_len(size).map_err(failed("truncate", path))?;
    Ok(RolledBack { path: path.into(), kept, bytes })
}

fn replace(mut file: File, path: &Path, content: &[u8]) -> Result<Option<RolledBack>, RollbackError> {
    let mut present = Vec::new();
    let limit = u64::try_from(content.len()).unwrap_or(u64::MAX).saturating_add(1);
    (&file).take(limit).read_to_end(&mut present).map_err(failed("read", path))?;
    if present == content {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(0)).map_err(failed("seek", path))?;
    let (kept, bytes) = keep_rest(&mut file, path)?;
    // In place: other names and open descriptors of the file stay with it.
    file.seek(SeekFrom::Start(0)).map_err(failed("seek", path))?;
    file.write_all(content).map_err(failed("write", path))?;
    file.set_len(u64::try_from(content.len()).unwrap_or(u64::MAX)).map_err(failed("truncate", path))?;
    Ok(Some(RolledBack { path: path.into(), kept, bytes }))
}

/// Copies what follows to a new file beside `path`, on the disk before anything is cut.
fn keep_rest(file: &mut File, path: &Path) -> Result<(PathBuf, u64), RollbackError> {
    let metadata = file.metadata().map_err(failed("stat", path))?;
    for n in 1..=u32::MAX {
        let mut name = path.as_os_str().to_os_string();
        name.push(format!(".rolled-back.{n}"));
        let kept = PathBuf::from(name);
        let mut copy = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&kept) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            other => other.map_err(failed("create", &kept))?,
        };
        let bytes = io::copy(file, &mut copy).map_err(failed("copy", &kept))?;
        // Only its owner's if we may not give it away: then it is the user's already.
        let _ = std::os::unix::fs::fchown(&copy, Some(metadata.uid()), Some(metadata.gid()));
        let mode = Permissions::from_mode(metadata.permissions().mode() & 0o777);
        copy.set_permissions(mode).map_err(failed("chmod", &kept))?;
        copy.sync_all().map_err(failed("fsync", &kept))?;
        return Ok((kept, bytes));
    }
    Err(failed("finding a free name", path)(io::Error::from(io::ErrorKind::AlreadyExists)))
}

/// Gives files that had lost their name the one CRIU wants to open them by.
pub(super) fn put_links_back(manifest: &Manifest) -> Result<(), RollbackError> {
    for link in &manifest.saved_links {
        match std::fs::hard_link(&link.saved, &link.link) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(RollbackError::Gone(link.saved.clone())),
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed("link", &link.link)(e)),
            _ => {}
        }
    }
    Ok(())
}

pub(super) fn drop_links(manifest: &Manifest) {
    for link in &manifest.saved_links {
        let _ = std::fs::remove_file(&link.link);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &Path, size: u64, append: bool) -> OpenFile {
        OpenFile { path: path.into(), size, append, position: size, part: None }
    }

    #[test]
    fn a_tail_is_kept_and_numbered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        for (round, tail) in [(1, "later"), (2, "again")] {
            std::fs::write(&path, format!("before{tail}")).unwrap();
            let back = put_one_back(&file(&path, 6, true), None, false).unwrap().unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "before");
            assert_eq!(back.kept, dir.path().join(format!("log.rolled-back.{round}")));
            assert_eq!((std::fs::read_to_string(back.kept).unwrap().as_str(), back.bytes), (tail, 5));
        }
        assert_eq!(put_one_back(&file(&path, 6, true), None, false).unwrap(), None);
    }

    #[test]
    fn rewritten_content_comes_back_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("progress");
        std::fs::write(&path, "epoch 10, and more").unwrap();
        let inode = std::fs::metadata(&path).unwrap().ino();
        let back = put_one_back(&file(&path, 7, false), Some(b"epoch 7"), false).unwrap().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "epoch 7");
        assert_eq!(std::fs::read_to_string(back.kept).unwrap(), "epoch 10, and more");
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), inode);
        assert_eq!(put_one_back(&file(&path, 7, false), Some(b"epoch 7"), false).unwrap(), None);
    }

    #[test]
    fn what_can_not_be_put_back_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert!(matches!(put_one_back(&file(&path, 6, false), None, false), Err(RollbackError::Gone(_))));
        std::fs::write(&path, "abc").unwrap();
        assert!(matches!(put_one_back(&file(&path, 6, false), None, false), Err(RollbackError::Shorter { .. })));
        assert_eq!(put_one_back(&file(&path, 6, true), None, false).unwrap(), None);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(put_one_back(&file(&link, 1, false), None, false), Err(RollbackError::NotAFile(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "abc", "nothing was cut through the link");
        assert!(matches!(put_one_back(&file(dir.path(), 1, false), None, false), Err(RollbackError::NotAFile(_))));
    }
}
