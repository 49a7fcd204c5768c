//! Durable writes: the only place that renames.
//!
//! After a power cut a reader finds either the old state or all of the new one, never a mixture. Once a function here
//! has returned, the reader finds the new one. This takes four steps, in this order: write under a temporary name in
//! the same directory, fsync the file, rename it, fsync the directory. A temporary name starts with [`TEMP_PREFIX`]; a
//! file that a crash left under such a name is rubbish.
//!
//! Every function takes a [`Place`]: below a folder that others can change it is a [`Beneath`]; elsewhere a path will do.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;

use super::beneath::Beneath;
pub use super::beneath::unforeseen;
use super::point::{Step, point};

/// Prefix of the name of a file or folder while it is incomplete.
pub const TEMP_PREFIX: &str = ".tmp-";

/// Ensures that two writers of one process, and two processes, use different temporary names.
static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Where something is written.
pub trait Place {
    /// The place below an open folder.
    ///
    /// # Errors
    /// When the folder of a path cannot be opened.
    fn place(&self) -> io::Result<Cow<'_, Beneath>>;
}

impl Place for Beneath {
    fn place(&self) -> io::Result<Cow<'_, Beneath>> {
        Ok(Cow::Borrowed(self))
    }
}

impl Place for Path {
    fn place(&self) -> io::Result<Cow<'_, Beneath>> {
        Beneath::at(self).map(Cow::Owned)
    }
}

impl Place for PathBuf {
    fn place(&self) -> io::Result<Cow<'_, Beneath>> {
        self.as_path().place()
    }
}

/// Replaces `path` by a file with the content `bytes` and exactly the permission bits `mode` (the umask does not
/// count).
///
/// # Errors
/// The first step that failed. The old file then still exists, unless the last step (fsync of the directory) failed:
/// then the new one exists, but after a power cut the old one may be there again.
pub fn write_file(path: &(impl Place + ?Sized), bytes: &[u8], mode: u32) -> io::Result<()> {
    let path = path.place()?;
    let temp = temp_name(&path)?;
    let written = write_new(&temp, bytes, mode).and_then(|()| point(Step::Write)).and_then(|()| temp.rename(&path));
    if let Err(error) = written {
        // The caller needs the cause of the failure, not the error of this removal.
        let _ = temp.remove_file();
        return Err(error);
    }
    sync_parent(&path)
}

/// Overwrites the file with `bytes` at `offset`, and syncs. Only for a range whose content may be lost: after a power
/// cut, each byte is the old or the new one.
///
/// # Errors
/// The step that failed.
pub fn overwrite(path: &(impl Place + ?Sized), offset: u64, bytes: &[u8]) -> io::Result<()> {
    point(Step::Write)?;
    path.place()?.overwrite(offset, bytes)
}

/// Replaces `path` as [`write_file`] does, so that a reader finds the old or the new file complete, but does not sync:
/// for files that are worthless after a power cut. The umask is ignored here too.
///
/// # Errors
/// The step that failed; the old file is then still there.
pub fn replace_file(path: &(impl Place + ?Sized), bytes: &[u8], mode: u32) -> io::Result<()> {
    let path = path.place()?;
    let temp = temp_name(&path)?;
    let write = |mut file: File| {
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(mode))
    };
    let written = temp.create_new(mode).and_then(write).and_then(|()| temp.rename(&path));
    written.inspect_err(|_| drop(temp.remove_file()))
}

/// Makes the symbolic link `path` lead to `target`, and replaces an existing link.
///
/// # Errors
/// The step that failed; the old link is then still there.
pub fn replace_link(target: &Path, path: &(impl Place + ?Sized)) -> io::Result<()> {
    let path = path.place()?;
    let temp = temp_name(&path)?;
    let made = temp.make_link_to(target).and_then(|()| temp.rename(&path));
    made.inspect_err(|_| drop(temp.remove_file()))
}

/// Waits until the names in the directory are on the disk.
///
/// # Errors
/// Opening it or fsync.
pub fn sync_dir(path: &(impl Place + ?Sized)) -> io::Result<()> {
    point(Step::Other)?;
    path.place()?.sync_dir()
}

/// The same for the directory that it is in.
fn sync_parent(path: &Beneath) -> io::Result<()> {
    sync_dir(&path.parent().ok_or(io::ErrorKind::InvalidInput)?)
}

/// Gives the folder `tmp` its final name `to`, in one step and without replacing anything, and makes that durable. The
/// content of the folder must have been synced before.
///
/// # Errors
/// `AlreadyExists` if `to` exists; else the step that failed. If fsync of the parent failed, the folder has its new
/// name already.
pub fn publish_dir(tmp: &(impl Place + ?Sized), to: &(impl Place + ?Sized)) -> io::Result<()> {
    point(Step::Write)?;
    let (tmp, to) = (tmp.place()?, to.place()?);
    match tmp.rename_new(&to) {
        // NFS and some FUSE file systems support no flags (EINVAL). A folder cannot replace a file or a non-empty
        // folder (rename(2): ENOTDIR, ENOTEMPTY), so the plain call destroys nothing either.
        Err(error) if has_no_flags(&error) => {
            let is_free = to.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
            if !is_free {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            tmp.rename(&to)?;
        }
        renamed => renamed?,
    }
    sync_parent(&to)
}

/// Exchanges the names of two folders in one step, and makes that durable. The content of both must have been synced
/// before.
///
/// # Errors
/// `Unsupported` if the file system cannot (NFS, some FUSE); else the step that failed.
pub fn exchange_dirs(a: &(impl Place + ?Sized), b: &(impl Place + ?Sized)) -> io::Result<()> {
    point(Step::Write)?;
    let (a, b) = (a.place()?, b.place()?);
    match a.exchange(&b) {
        Ok(()) => sync_parent(&b),
        Err(error) if has_no_flags(&error) => Err(io::ErrorKind::Unsupported.into()),
        Err(error) => Err(error),
    }
}

/// Whether a file system has no flags for renaming.
fn has_no_flags(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|error| matches!(Errno::from_raw(error), Errno::EINVAL | Errno::ENOSYS))
}

/// Removes a file durably. A missing file counts as removed.
///
/// # Errors
/// The step that failed.
pub fn remove_file(path: &(impl Place + ?Sized)) -> io::Result<()> {
    point(Step::Other)?;
    let path = path.place()?;
    match path.remove_file() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => sync_parent(&path),
    }
}

/// Gives a synced file its final name, which must be unused, and makes that durable.
///
/// # Errors
/// `AlreadyExists` if `to` exists; else the step that failed.
pub fn publish_file(tmp: &(impl Place + ?Sized), to: &(impl Place + ?Sized)) -> io::Result<()> {
    publish_dir(tmp, to)
}

/// A file that is being written under a temporary name. It is removed if this is dropped before the file has its final
/// name.
#[derive(Debug)]
pub struct Unfinished {
    file: File,
    temp: Option<Beneath>,
}

impl Unfinished {
    /// Creates it beside `path`, accessible to its owner only.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn beside(path: &(impl Place + ?Sized)) -> io::Result<Unfinished> {
        Unfinished::create(temp_name(&*path.place()?)?)
    }

    /// Creates it under a fixed name, for places where nobody removes leftovers of a crash: the next call removes them.
    /// What another user has put there and we may not remove (in a folder such as /tmp) stays; then it gets another name.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn in_place_of_leftover(temp: &(impl Place + ?Sized)) -> io::Result<Unfinished> {
        let temp = temp.place()?.into_owned();
        let _ = temp.remove_file();
        match Unfinished::create(temp.clone()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let name = unforeseen(temp.path());
                Unfinished::create(temp.with_file_name(name.file_name().unwrap_or_default()))
            }
            created => created,
        }
    }

    fn create(temp: Beneath) -> io::Result<Unfinished> {
        point(Step::Write)?;
        let file = temp.create_new(0o600)?;
        Ok(Unfinished { file, temp: Some(temp) })
    }

    /// The file to write to.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file, gives it the unused name `to`, and makes that durable. It can be tried again with another name.
    ///
    /// # Errors
    /// `AlreadyExists` if `to` exists; else the step that failed.
    pub fn publish(&mut self, to: &(impl Place + ?Sized)) -> io::Result<()> {
        self.file.sync_all()?;
        let Some(temp) = &self.temp else { return Ok(()) };
        publish_file(temp, &*to.place()?)?;
        self.temp = None;
        Ok(())
    }

    /// Gives it the name `to` and replaces an existing file, without waiting for the disk.
    ///
    /// # Errors
    /// That of rename(2).
    pub fn replace(mut self, to: &(impl Place + ?Sized)) -> io::Result<()> {
        if let Some(temp) = &self.temp {
            temp.rename(&*to.place()?)?;
        }
        self.temp = None;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(temp) = &self.temp {
            let _ = temp.remove_file();
        }
    }
}

/// Flags for a path at which another user may have put anything: not through a link, without waiting for the other end
/// of a FIFO. A terminal does not become that of our session: when it hung up, SIGHUP would stop the supervisor.
pub const NO_SURPRISE: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;

/// Opens a regular file for reading. Refuses a symbolic link, and opens nothing but a regular file.
///
/// # Errors
/// That of open(2); `InvalidInput` if it is no regular file.
pub fn open_for_reading(path: &(impl Place + ?Sized)) -> io::Result<File> {
    path.place()?.read()
}

fn write_new(path: &Beneath, bytes: &[u8], mode: u32) -> io::Result<()> {
    point(Step::Write)?;
    let mut file = path.create_new(0o600)?;
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    point(Step::Other)?;
    file.sync_all()
}

fn temp_name(path: &Beneath) -> io::Result<Beneath> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name"))?;
    let mut temp = OsString::from(TEMP_PREFIX);
    temp.push(name);
    temp.push(format!("-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
    Ok(path.with_file_name(temp))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn write_file_replaces_and_sets_the_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_file(&path, b"one", 0o600).unwrap();
        write_file(&path, b"two", 0o755).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn a_failed_write_leaves_the_old_and_no_rubbish() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), b"x").unwrap();
        assert!(write_file(&path, b"new", 0o600).is_err());
        assert_eq!(names(dir.path()), ["taken"]);
        assert_eq!(names(&path), ["inside"]);
    }

    #[test]
    fn overwrite_changes_those_bytes_of_a_file_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        assert_eq!(overwrite(&path, 0, b"x").unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, "0123456").unwrap();
        overwrite(&path, 2, b"ab").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"01ab456");
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        overwrite(&dir.path().join("link"), 0, b"x").unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"01ab456");
    }

    #[test]
    fn what_is_not_finished_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (path, temp) = (dir.path().join("a"), dir.path().join(".tmp-a"));
        fs::write(&temp, "of a crash").unwrap();
        drop(Unfinished::in_place_of_leftover(&temp).unwrap());
        assert!(names(dir.path()).is_empty());
        // What cannot be removed.
        fs::create_dir_all(temp.join("folder")).unwrap();
        let unfinished = [(); 2].map(|()| Unfinished::in_place_of_leftover(&temp).unwrap());
        assert_eq!(names(dir.path()).len(), 3);
        drop(unfinished);
        assert_eq!(names(dir.path()), [".tmp-a"]);
        fs::remove_dir_all(&temp).unwrap();
        fs::write(&path, "taken").unwrap();
        let mut unfinished = Unfinished::beside(&path).unwrap();
        unfinished.file().write_all_at(b"new", 0).unwrap();
        assert_eq!(unfinished.publish(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        unfinished.publish(&dir.path().join("b")).unwrap();
        drop(unfinished);
        let unfinished = Unfinished::beside(&path).unwrap();
        unfinished.replace(&path).unwrap();
        assert_eq!(names(dir.path()), ["a", "b"]);
        assert_eq!((fs::read(path).unwrap().len(), fs::read(dir.path().join("b")).unwrap().len()), (0, 3));
    }

    #[test]
    fn publish_dir_never_replaces() {
        let dir = tempfile::tempdir().unwrap();
        let (tmp, to) = (dir.path().join(".tmp-a"), dir.path().join("a"));
        fs::create_dir(&tmp).unwrap();
        fs::create_dir(&to).unwrap();
        assert_eq!(publish_dir(&tmp, &to).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(names(dir.path()), [".tmp-a", "a"]);
        fs::remove_dir(&to).unwrap();
        publish_dir(&tmp, &to).unwrap();
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn what_is_no_regular_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, fifo) = (dir.path().join("f"), dir.path().join("l"), dir.path().join("p"));
        fs::write(&file, b"x").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [&link, &fifo, &dir.path().to_path_buf()] {
            assert!(open_for_reading(path).is_err(), "{}", path.display());
        }
    }
}
