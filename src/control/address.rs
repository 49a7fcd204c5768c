//! The path of a control socket: `DIRECTORY/JOB-HASH.sock`, with the same name as the job's place in memory.
//!
//! A socket is bound under a temporary name and renamed, so a name always leads to a socket that answers, and replaces
//! that of a dead supervisor. The next supervisor that starts removes files of other dead supervisors. `.control.lock`
//! allows only one at a time to do this, because a live supervisor could get the name between the check of a file and
//! its removal.
//!
//! Beside it is `JOB-HASH.word`, the socket for the job ([`crate::job_api`]). It is bound directly to its name, because
//! CRIU reconnects a job's socket to the name that the other end was bound to, and it must answer before the job
//! exists.
//!
//! The path of a socket has at most 107 bytes (sun_path, unix(7)), but the path of a folder may be longer: so the
//! folder is opened, and the socket is named below `/proc/self/fd/N`. A folder that others can write to, or that is
//! below such a folder, is refused (`trust`).

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use super::trust;

/// Suffix of the control socket.
const SUFFIX: &str = ".sock";
/// Suffix of the job's socket.
const WORD_SUFFIX: &str = ".word";
/// Prefix of temporary names.
const TEMPORARY: &str = ".tmp-";
/// Age from which a temporary socket is removed: between its creation and its rename it does not answer either.
const SETTLES: Duration = Duration::from_secs(60);

/// A control socket with its final name.
#[derive(Debug)]
pub(crate) struct Bound {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl Bound {
    /// Creates the folder if needed, removes remnants of dead supervisors from it, and binds `NAME.sock`.
    ///
    /// # Errors
    /// The step that failed.
    pub(crate) fn new(directory: &Path, name: &str) -> io::Result<Bound> {
        let (folder, _lock) = enter(directory)?;
        let temporary = format!("{TEMPORARY}{}{SUFFIX}", std::process::id());
        let (new, path) = (directory.join(&temporary), directory.join(format!("{name}{SUFFIX}")));
        remove(&new)?;
        let listener = UnixListener::bind(below(&folder, &temporary))?;
        // A client that connects before this is checked too.
        let made = fs::set_permissions(&new, fs::Permissions::from_mode(0o600))
            .and_then(|()| listener.set_nonblocking(true))
            .and_then(|()| fs::symlink_metadata(&new))
            .and_then(|meta| fs::rename(&new, &path).map(|()| meta.ino()));
        let inode = made.inspect_err(|_| drop(fs::remove_file(&new)))?;
        Ok(Bound { listener, path, inode })
    }

    /// Its path.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The bound socket.
    #[must_use]
    pub(crate) fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        forget(&self.path, self.inode);
    }
}

/// A socket for the job.
#[derive(Debug)]
pub(crate) struct SocketPath {
    socket: UnixDatagram,
    path: PathBuf,
    inode: u64,
}

impl SocketPath {
    /// Binds `NAME.word` in the folder, as [`Bound::new`] does. Only root and `user` can send there.
    ///
    /// # Errors
    /// The step that failed; a path that is too long for a socket is `InvalidInput`.
    pub(crate) fn new(directory: &Path, name: &str, user: Option<u32>) -> io::Result<SocketPath> {
        let (_folder, _lock) = enter(directory)?;
        let path = directory.join(format!("{name}{WORD_SUFFIX}"));
        remove(&path)?;
        // Bound to its complete path: CRIU must find it under that path.
        let socket = UnixDatagram::bind(&path)?;
        let made = fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            .and_then(|()| std::os::unix::fs::lchown(&path, user, None))
            .and_then(|()| socket.set_nonblocking(true))
            .and_then(|()| fs::symlink_metadata(&path));
        let inode = made.inspect_err(|_| drop(fs::remove_file(&path)))?.ino();
        Ok(SocketPath { socket, path, inode })
    }

    /// Its path.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The bound socket.
    #[must_use]
    pub(crate) fn socket(&self) -> &UnixDatagram {
        &self.socket
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        forget(&self.path, self.inode);
    }
}

/// Creates the folder if needed, and removes remnants of dead supervisors from it; exclusively, until the file is
/// closed.
fn enter(directory: &Path) -> io::Result<(OwnedFd, File)> {
    let missing: Vec<&Path> = directory.ancestors().take_while(|folder| !folder.exists()).collect();
    if let Some(above) = missing.last().and_then(|topmost| topmost.parent()) {
        trust::check_above(above)?;
    }
    DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    // The job's user must be able to reach it, whatever the umask is.
    missing.iter().try_for_each(|folder| fs::set_permissions(folder, fs::Permissions::from_mode(0o755)))?;
    trust::check(directory)?;
    let folder = open(directory)?;
    let lock = lock(directory)?;
    sweep(directory, &folder);
    Ok((folder, lock))
}

/// Removes the name, unless another socket has it now.
fn forget(path: &Path, inode: u64) {
    let _lock = path.parent().map(lock);
    if fs::symlink_metadata(path).is_ok_and(|meta| meta.ino() == inode) {
        let _ = fs::remove_file(path);
    }
}

/// Connects without waiting: the queue of a stuck supervisor may be full.
///
/// # Errors
/// `NotFound` and `ConnectionRefused` if there is no supervisor, `WouldBlock` if its queue is full, `PermissionDenied`
/// if others could have created the socket.
pub(crate) fn reach(path: &Path) -> io::Result<UnixStream> {
    let (directory, name) = match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(directory), Some(name)) => (directory, name),
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    trust::check(directory)?;
    reach_in(&open(directory)?, name, SockType::Stream).map(UnixStream::from)
}

/// The control sockets in a folder, of live and of dead supervisors, sorted. Empty if there is no such folder.
///
/// # Errors
/// `PermissionDenied` if others could have created the sockets; the kernel's error if the folder cannot be read.
pub(crate) fn sockets(directory: &Path) -> io::Result<Vec<PathBuf>> {
    if fs::symlink_metadata(directory).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(Vec::new());
    }
    trust::check(directory)?;
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(|name| name.ends_with(SUFFIX) && !name.starts_with(TEMPORARY));
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn reach_in(folder: &OwnedFd, name: &str, kind: SockType) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, kind, flags, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(&below(folder, name))?)?;
    Ok(socket)
}

fn open(directory: &Path) -> io::Result<OwnedFd> {
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    Ok(OpenOptions::new().read(true).custom_flags(flags).open(directory)?.into())
}

/// How many supervisors have a control socket in the folder that answers.
///
/// # Errors
/// Those of [`sockets`].
pub(crate) fn living(directory: &Path) -> io::Result<usize> {
    let is_living = |path: &PathBuf| reach(path).map_or_else(|error| !is_gone(&error), |_| true);
    Ok(sockets(directory)?.iter().filter(|path| is_living(path)).count())
}

/// A path of at most 16 and 78 bytes: a job's name has at most 64.
fn below(folder: &impl AsFd, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", folder.as_fd().as_raw_fd()))
}

/// Locks a separate file that only root can open: any user who can open the folder could lock it for ever.
fn lock(directory: &Path) -> io::Result<File> {
    let path = directory.join(".control.lock");
    let options = || OpenOptions::new().write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path);
    let file = options()?;
    file.lock()?;
    Ok(file)
}

/// Removes files of dead supervisors. A file that cannot be removed does no harm.
fn sweep(directory: &Path, folder: &OwnedFd) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let kind = match Path::new(name).extension().and_then(|ending| ending.to_str()) {
            Some("sock") => SockType::Stream,
            Some("word") => SockType::Datagram,
            _ => continue,
        };
        let Ok(meta) = fs::symlink_metadata(entry.path()) else { continue };
        let age = meta.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
        let fresh = name.starts_with(TEMPORARY) && age.is_none_or(|age| age < SETTLES);
        if !meta.file_type().is_socket() || fresh {
            continue;
        }
        let dead = reach_in(folder, name, kind).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if dead {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
        _ => Ok(()),
    }
}

/// Whether an error of [`reach`] means that there is no supervisor.
#[must_use]
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
        || error.raw_os_error() == Some(libc::ENOTDIR)
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::{Mode, SFlag, mknod};

    use super::*;

    #[test]
    fn a_socket_replaces_a_dead_one_and_sweeps_the_others() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            // Its file remains, as after SIGKILL. Made without a socket: a child that another test starts would have
            // that for a moment, too, and it would not be dead.
            for kind in ["sock", "word"] {
                let (path, mode) = (dir.path().join(format!("{name}.{kind}")), Mode::from_bits_truncate(0o700));
                mknod(&path, SFlag::S_IFSOCK, mode, 0).unwrap();
            }
        }
        let living = Bound::new(dir.path(), "c").unwrap();
        fs::write(dir.path().join("x.sock"), "a file of somebody").unwrap();
        let (a, words) = (Bound::new(dir.path(), "a").unwrap(), SocketPath::new(dir.path(), "a", None).unwrap());
        UnixDatagram::unbound().unwrap().send_to(b"x", words.path()).unwrap();
        let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [".control.lock", "a.sock", "a.word", "c.sock", "x.sock"]);
        reach(a.path()).unwrap();
        reach(living.path()).unwrap();
        assert_eq!(super::living(dir.path()).unwrap(), 2, "a file that is no socket is not one");
        assert_eq!(sockets(dir.path()).unwrap(), [a.path(), living.path()]);
        assert!(sockets(&dir.path().join("none")).unwrap().is_empty());
        assert_eq!(fs::symlink_metadata(a.path()).unwrap().mode() & 0o777, 0o600);
        let path = a.path().to_owned();
        // A socket that has the name now keeps it.
        let next = Bound::new(dir.path(), "a").unwrap();
        drop(a);
        reach(&path).unwrap();
        drop(next);
        assert!(is_gone(&reach(&path).unwrap_err()));
    }

    #[test]
    fn sockets_that_others_could_have_made_are_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        let _bound = Bound::new(dir.path(), "a").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(sockets(dir.path()).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_long_folder_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(200)).join("e".repeat(200));
        let name = format!("{}-01234567", "n".repeat(64));
        let bound = Bound::new(&deep, &name).unwrap();
        reach(bound.path()).unwrap();
    }
}
