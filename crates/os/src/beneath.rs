//! The one door to a folder whose content others may change at any moment: a store, a staging area.
//!
//! A [`Beneath`] is a place below a folder that is held open. Every access starts at that descriptor and is resolved by
//! the kernel (openat2(2)) without leaving the folder, without following any symbolic link, and without a magic link of
//! /proc. What is found is looked at before it is opened, so a FIFO makes nobody wait and a device is never opened; the
//! file that was looked at is the one that is opened. Its kind and its owner are checked; before it is written to, also
//! that it has no name elsewhere.
//!
//! What is not what it should be is an [`Unexpected`], inside of the [`io::Error`]: it names the path, what is there and
//! what should be.
//!
//! Mounts below the folder are crossed: only root of this machine can make them.

mod removal;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File, Metadata};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, RenameFlags, ResolveFlag, open, openat, openat2, renameat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};

use super::blocks::Medium;
use super::sparse;

/// Something below a folder is not what it should be. It was neither followed, opened nor changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} is {is}, and should be {want}", path.display())]
pub struct Unexpected {
    /// Where.
    pub path: PathBuf,
    /// What is there.
    pub is: String,
    /// What should be there.
    pub want: &'static str,
}

impl Unexpected {
    /// The one inside of an error of the kernel's calls here, if that is its cause.
    #[must_use]
    pub fn in_error(error: &io::Error) -> Option<&Unexpected> {
        error.get_ref()?.downcast_ref()
    }

    /// Whether only its owner is wrong.
    #[must_use]
    pub fn is_owner(&self) -> bool {
        [ROOTS, OURS].contains(&self.want)
    }

    /// What to do about it, for the end of a message.
    #[must_use]
    pub fn advice(&self) -> String {
        let path = self.path.display();
        match self.want {
            ROOTS => format!("check its content, then run `chown root {path}`"),
            OURS => format!("check its content, then have root run `chown {} {path}`", nix::unistd::geteuid()),
            _ => "remove it, or make it what it should be".to_owned(),
        }
    }
}

impl From<Unexpected> for io::Error {
    fn from(unexpected: Unexpected) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidInput, unexpected)
    }
}

/// Who may own what is opened below a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owners {
    /// We and root: a store.
    Ours,
    /// Anybody: memory that belongs to the job's user.
    Any,
}

/// An open folder, whose path is only for messages.
#[derive(Debug)]
struct Root {
    fd: OwnedFd,
    path: PathBuf,
    owners: Owners,
}

/// A place below an open folder. The place itself need not exist.
#[derive(Clone)]
pub struct Beneath {
    root: Arc<Root>,
    /// Relative to the root; empty for the root itself.
    inside: PathBuf,
    /// For messages.
    full: PathBuf,
}

impl fmt::Debug for Beneath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.full.fmt(f)
    }
}

impl PartialEq for Beneath {
    fn eq(&self, other: &Beneath) -> bool {
        self.full == other.full
    }
}

impl Eq for Beneath {}

impl PartialEq<Path> for Beneath {
    fn eq(&self, other: &Path) -> bool {
        self.full == other
    }
}

impl PartialEq<PathBuf> for Beneath {
    fn eq(&self, other: &PathBuf) -> bool {
        self.full == *other
    }
}

/// The path, for messages and for tests. `layers::doors` checks that no product code opens it by its path.
impl AsRef<Path> for Beneath {
    fn as_ref(&self) -> &Path {
        &self.full
    }
}

/// A regular file, in messages.
const FILE: &str = "a regular file";
/// A folder, in messages.
const FOLDER: &str = "a folder";
/// Whose it should be for root, in messages.
const ROOTS: &str = "root's";
/// The same for other users.
const OURS: &str = "yours or root's";
/// A file that is also elsewhere, in messages.
const LINKED: &str = "a file with another name elsewhere (a hard link)";
/// What it should be.
const OF_ONE_NAME: &str = "one with this name only";
/// The most data of such a file that is copied: our logs are smaller, and others may have linked anything.
const MOST_COPIED: u64 = 1 << 30;
/// Prefix of the name of such a copy while it is incomplete.
pub const OWN_PREFIX: &str = ".tmp-own-";
/// The longest path that the kernel takes.
const LONGEST: usize = 4095;

impl Beneath {
    /// Opens a folder. Links on the way to it and at its end are followed: who names it, decides. The folder itself may
    /// belong to anybody; that is the caller's to check.
    ///
    /// # Errors
    /// That of open(2); `ENOTDIR`.
    pub fn root(path: &Path, owners: Owners) -> io::Result<Beneath> {
        let fd = open(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(Beneath::of(fd, path, owners))
    }

    /// A place in an ordinary folder, which is opened now as [`Beneath::root`] does.
    ///
    /// # Errors
    /// As [`Beneath::root`]; `InvalidInput` if the path has no file name.
    pub fn at(path: &Path) -> io::Result<Beneath> {
        let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no file name"))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        let root = Beneath::root(parent, Owners::Any)?;
        let full = if parent == Path::new(".") { PathBuf::from(name) } else { path.to_owned() };
        Ok(Beneath { inside: name.into(), full, ..root })
    }

    fn of(fd: OwnedFd, path: &Path, owners: Owners) -> Beneath {
        let root = Root { fd, path: path.to_owned(), owners };
        Beneath { root: root.into(), inside: PathBuf::new(), full: path.to_owned() }
    }

    /// The same place, beneath the folder that is at the path of its root now: what was opened before leads around
    /// another mount namespace that was entered since.
    ///
    /// # Errors
    /// As [`Beneath::root`].
    pub fn again(&self) -> io::Result<Beneath> {
        let root = Beneath::root(&self.root.path, self.root.owners)?;
        Ok(if self.inside.as_os_str().is_empty() { root } else { root.join(&self.inside) })
    }

    /// A place below this one.
    #[must_use]
    pub fn join(&self, name: impl AsRef<Path>) -> Beneath {
        let name = name.as_ref();
        // An absolute path would replace what is before it; it is refused when the place is used.
        let (inside, full) = (self.inside.join(name), self.full.join(name));
        Beneath { root: self.root.clone(), inside, full }
    }

    /// Another name in the same folder.
    #[must_use]
    pub fn with_file_name(&self, name: impl AsRef<OsStr>) -> Beneath {
        let (inside, full) = (self.inside.with_file_name(&name), self.full.with_file_name(&name));
        Beneath { root: self.root.clone(), inside, full }
    }

    /// The folder that this place is in; none for the root.
    #[must_use]
    pub fn parent(&self) -> Option<Beneath> {
        let inside = self.inside.parent()?.to_owned();
        let full = if inside.as_os_str().is_empty() { self.root.path.clone() } else { self.root.path.join(&inside) };
        Some(Beneath { root: self.root.clone(), inside, full })
    }

    /// Its name in that folder.
    #[must_use]
    pub fn file_name(&self) -> Option<&OsStr> {
        self.full.file_name()
    }

    /// Its path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.full
    }

    /// Its path, for messages.
    pub fn display(&self) -> std::path::Display<'_> {
        self.full.display()
    }

    /// Opens what is here, which may be a link, without opening its content.
    fn find(&self, flags: OFlag) -> io::Result<File> {
        self.open_raw(OFlag::O_PATH | flags, Mode::empty()).map(File::from)
    }

    /// The kernel's open, beneath the root and through no link.
    fn open_raw(&self, flags: OFlag, mode: Mode) -> io::Result<OwnedFd> {
        let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        if !self.inside.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(self.unexpected("a path that leads out of its folder".into(), "a place below it"));
        }
        if self.inside.as_os_str().len() > LONGEST {
            // As openat2(2) says; without it, every step on the way would be made.
            return Err(Errno::ENAMETOOLONG.into());
        }
        let inside = if self.inside.as_os_str().is_empty() { Path::new(".") } else { &self.inside };
        let within =
            ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        let opened = match openat2(&self.root.fd, inside, OpenHow::new().flags(flags).mode(mode).resolve(within)) {
            // Linux before 5.6 has no openat2(2), and some sandboxes do not allow it.
            Err(Errno::ENOSYS | Errno::EPERM) => self.step_by_step(inside, flags, mode),
            opened => opened,
        };
        opened.map_err(|error| self.explain(error))
    }

    /// The same without openat2(2): every folder on the way is opened by its name, and a link there is an error.
    fn step_by_step(&self, inside: &Path, flags: OFlag, mode: Mode) -> nix::Result<OwnedFd> {
        let step = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut at = self.root.fd.try_clone().map_err(|_| Errno::EMFILE)?;
        let name = inside.file_name().unwrap_or_else(|| OsStr::new("."));
        for part in inside.parent().into_iter().flat_map(Path::components) {
            at = openat(&at, part.as_os_str(), step, Mode::empty())?;
        }
        openat(&at, name, flags, mode)
    }

    /// Says which part of the path is not what it should be, if that was the reason.
    fn explain(&self, error: Errno) -> io::Error {
        if !matches!(error, Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV) {
            return error.into();
        }
        let mut at = Beneath::clone(self);
        (at.inside, at.full) = (PathBuf::new(), self.root.path.clone());
        let parts: Vec<OsString> = self.inside.components().map(|part| part.as_os_str().to_owned()).collect();
        for (n, part) in parts.iter().enumerate() {
            at = at.join(part);
            let path = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let Ok(found) = at.step_by_step(&at.inside, path, Mode::empty()) else { break };
            let Ok(metadata) = File::from(found).metadata() else { break };
            let is_last = n + 1 == parts.len();
            if metadata.is_symlink() || (!is_last && !metadata.is_dir()) {
                return at.unexpected(kind(&metadata).into(), if is_last { "no link" } else { FOLDER });
            }
        }
        error.into()
    }

    fn unexpected(&self, is: String, want: &'static str) -> io::Error {
        Unexpected { path: self.full.clone(), is, want }.into()
    }

    /// Refuses what belongs to somebody else.
    fn check_owner(&self, metadata: &Metadata) -> io::Result<()> {
        let (owner, we) = (metadata.uid(), nix::unistd::geteuid().as_raw());
        match self.root.owners {
            Owners::Ours if owner != we && owner != 0 => {
                let want = if we == 0 { ROOTS } else { OURS };
                Err(self.unexpected(format!("the property of user {owner}"), want))
            }
            _ => Ok(()),
        }
    }

    /// Finds a regular file of the right owner, without opening it.
    fn find_file(&self) -> io::Result<(File, Metadata)> {
        let found = self.find(OFlag::empty())?;
        let metadata = found.metadata()?;
        if !metadata.is_file() {
            return Err(self.unexpected(kind(&metadata).into(), FILE));
        }
        if Medium::of(&found)? == Medium::Kernel {
            return Err(self.unexpected("a file that the kernel generates".into(), FILE));
        }
        self.check_owner(&metadata)?;
        Ok((found, metadata))
    }

    /// Opens the folder here.
    fn find_folder(&self) -> io::Result<File> {
        let found = self.find(OFlag::empty())?;
        let metadata = found.metadata()?;
        if !metadata.is_dir() {
            return Err(self.unexpected(kind(&metadata).into(), FOLDER));
        }
        self.check_owner(&metadata)?;
        Ok(found)
    }

    /// A descriptor of the folder here, for calls that take one (`O_PATH`).
    ///
    /// # Errors
    /// As [`Beneath::list`].
    pub fn folder(&self) -> io::Result<OwnedFd> {
        self.find_folder().map(OwnedFd::from)
    }

    /// Opens the folder here for reading, for calls that need that (flock(2), fsync(2)).
    ///
    /// # Errors
    /// As [`Beneath::list`].
    pub fn open_folder(&self) -> io::Result<File> {
        let folder = self.find_folder()?;
        File::options().read(true).custom_flags(libc::O_DIRECTORY).open(own(&folder))
    }

    /// Metadata of what is here; of a link itself.
    ///
    /// # Errors
    /// `NotFound`; an [`Unexpected`] on the way.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.find(OFlag::empty())?.metadata()
    }

    /// Whether there is a folder.
    #[must_use]
    pub fn is_dir(&self) -> bool {
        self.metadata().is_ok_and(|metadata| metadata.is_dir())
    }

    /// Whether something is here, also a link; an unclear answer counts as yes.
    #[must_use]
    pub fn is_there(&self) -> bool {
        !self.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Opens the regular file here for reading.
    ///
    /// # Errors
    /// That of open(2); an [`Unexpected`].
    pub fn read(&self) -> io::Result<File> {
        reopen(&self.find_file()?.0, fs::OpenOptions::new().read(true))
    }

    /// Its content, at most so many bytes.
    ///
    /// # Errors
    /// As [`Beneath::read`]; `FileTooLarge`.
    pub fn content(&self, most: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.read()?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
        let is_too_large = u64::try_from(bytes.len()).is_ok_and(|len| len > most);
        if is_too_large { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(bytes) }
    }

    /// Opens the regular file here for reading and writing.
    ///
    /// # Errors
    /// As [`Beneath::read`]; an [`Unexpected`] if it has another name, which may be anybody's.
    pub fn change(&self) -> io::Result<File> {
        let (found, metadata) = self.find_file()?;
        if metadata.nlink() > 1 && self.root.owners == Owners::Ours {
            return Err(self.unexpected(LINKED.into(), OF_ONE_NAME));
        }
        reopen(&found, fs::OpenOptions::new().read(true).write(true))
    }

    /// Creates a file here, for reading and writing, which must not exist. The umask applies to `mode`.
    ///
    /// # Errors
    /// `AlreadyExists`; that of open(2).
    pub fn create_new(&self, mode: u32) -> io::Result<File> {
        self.create_new_with(OFlag::empty(), mode)
    }

    fn create_new_with(&self, more: OFlag, mode: u32) -> io::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | more;
        self.open_raw(flags, Mode::from_bits_truncate(mode)).map(File::from)
    }

    /// Opens the file here for reading and writing, and creates it if it does not exist.
    ///
    /// # Errors
    /// As [`Beneath::change`] and [`Beneath::create_new`].
    pub fn change_or_create(&self, mode: u32) -> io::Result<File> {
        self.opened_or_created(|| self.change(), || self.create_new(mode))
    }

    /// Opens the file here for appending and reading, and creates it if it does not exist. A file with a name elsewhere
    /// (a backup with `cp -al`, or a trap) is replaced by a copy first, so that the other one does not change.
    ///
    /// # Errors
    /// As [`Beneath::read`] and [`Beneath::create_new`].
    pub fn append(&self, mode: u32) -> io::Result<File> {
        let open = || {
            let (found, metadata) = self.find_file()?;
            let append = || fs::OpenOptions::new().read(true).append(true).clone();
            match metadata.nlink() {
                0 | 1 => reopen(&found, &mut append()),
                _ => self.replace_by_copy(&found, &metadata, MOST_COPIED),
            }
        };
        self.opened_or_created(open, || self.create_new_with(OFlag::O_APPEND, mode))
    }

    fn opened_or_created(
        &self,
        open: impl Fn() -> io::Result<File>,
        create: impl Fn() -> io::Result<File>,
    ) -> io::Result<File> {
        /// Others may create and remove it all the time.
        const TRIES: u32 = 10;
        let mut tries = 0..TRIES;
        loop {
            match open() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                opened => return opened,
            }
            match create() {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries.next().is_some() => {}
                created => return created,
            }
        }
    }

    /// Gives this name to a copy of the file if that has a name elsewhere, as [`Beneath::append`] does.
    ///
    /// # Errors
    /// As [`Beneath::read`] and [`Beneath::create_new`].
    pub fn make_own(&self) -> io::Result<()> {
        let (found, metadata) = self.find_file()?;
        if metadata.nlink() > 1 { self.replace_by_copy(&found, &metadata, MOST_COPIED).map(drop) } else { Ok(()) }
    }

    /// Gives this name to a copy of the file, open for appending. Only its data is copied, and not more than `most`: others
    /// may have made it longer than any disk.
    fn replace_by_copy(&self, found: &File, metadata: &Metadata, most: u64) -> io::Result<File> {
        let from = reopen(found, fs::OpenOptions::new().read(true))?;
        let length = metadata.len();
        let mut data = 0_u64;
        for extent in sparse::data(&from, 0..length) {
            let extent = extent?;
            data = data.saturating_add(extent.end - extent.start);
            if data > most {
                return Err(self.unexpected(LINKED.into(), OF_ONE_NAME));
            }
        }
        let mut name = OsString::from(OWN_PREFIX);
        name.push(self.file_name().unwrap_or_default());
        let copy = self.with_file_name(unforeseen(Path::new(&name)));
        // Not for appending: every write would go to the end, and the holes would be lost.
        let to = match copy.create_new(metadata.mode() & 0o777) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(copy.unexpected("there already".into(), "an unused name"));
            }
            created => created?,
        };
        let copied = sparse::copy(&from, 0..length, &to, 0).and_then(|_| to.set_len(length));
        let replaced = copied
            .and_then(|()| to.sync_data())
            .and_then(|()| reopen(&to, fs::OpenOptions::new().read(true).append(true)))
            .and_then(|to| copy.rename(self).map(|()| to));
        replaced.inspect_err(|_| drop(copy.remove_file()))
    }

    /// Runs a call on the folder that this place is in, and its name there.
    fn in_parent<T>(&self, call: impl FnOnce(BorrowedFd<'_>, &OsStr) -> nix::Result<T>) -> io::Result<T> {
        let parent = self.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let name = self.inside.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(call(parent.find_folder()?.as_fd(), name)?)
    }

    /// Creates a folder with exactly these permission bits, whatever the umask is.
    ///
    /// # Errors
    /// `AlreadyExists`, whatever is there; that of mkdir(2).
    pub fn make_dir(&self, mode: u32) -> io::Result<()> {
        self.in_parent(|folder, name| mkdirat(folder, name, Mode::from_bits_truncate(mode)))?;
        self.set_mode(mode)
    }

    /// The same unless there is a folder, whose mode it gets then.
    ///
    /// # Errors
    /// An [`Unexpected`] if something else is there; that of mkdir(2).
    pub fn make_dir_unless_there(&self, mode: u32) -> io::Result<()> {
        match self.make_dir(mode) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let found = self.find_folder()?;
                match found.metadata()?.mode() & 0o7777 == mode {
                    true => Ok(()),
                    false => fs::set_permissions(own(&found), fs::Permissions::from_mode(mode)),
                }
            }
            made => made,
        }
    }

    /// Creates the missing folders down to this one.
    ///
    /// # Errors
    /// As [`Beneath::make_dir_unless_there`].
    pub fn make_dirs(&self, mode: u32) -> io::Result<()> {
        if self.is_dir() {
            return Ok(());
        }
        if let Some(parent) = self.parent() {
            parent.make_dirs(mode)?;
        }
        self.make_dir_unless_there(mode)
    }

    /// Changes the permission bits of the regular file or folder here.
    ///
    /// # Errors
    /// That of chmod(2); an [`Unexpected`].
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        let found = self.find(OFlag::empty())?;
        let metadata = found.metadata()?;
        if !metadata.is_file() && !metadata.is_dir() {
            return Err(self.unexpected(kind(&metadata).into(), "a regular file or a folder"));
        }
        self.check_owner(&metadata)?;
        if metadata.is_file() && metadata.nlink() > 1 && self.root.owners == Owners::Ours {
            return Err(self.unexpected(LINKED.into(), OF_ONE_NAME));
        }
        fs::set_permissions(own(&found), fs::Permissions::from_mode(mode))
    }

    /// The names in the folder here.
    ///
    /// # Errors
    /// That of opendir(3); an [`Unexpected`] if it is no folder.
    pub fn list(&self) -> io::Result<Vec<OsString>> {
        fs::read_dir(own(&self.find_folder()?))?.map(|entry| Ok(entry?.file_name())).collect()
    }

    /// The names in the folder here, with the metadata of each. What disappears meanwhile is left out.
    ///
    /// # Errors
    /// As [`Beneath::list`].
    pub fn entries(&self) -> io::Result<Vec<(Beneath, Metadata)>> {
        let folder = self.find_folder()?;
        let mut found = Vec::new();
        for entry in fs::read_dir(own(&folder))? {
            let entry = entry?;
            match entry.metadata() {
                Ok(metadata) => found.push((self.join(entry.file_name()), metadata)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Removes the name of a file, a link or anything else that is no folder.
    ///
    /// # Errors
    /// That of unlink(2).
    pub fn remove_file(&self) -> io::Result<()> {
        self.in_parent(|folder, name| unlinkat(folder, name, UnlinkatFlags::NoRemoveDir))
    }

    /// Removes an empty folder.
    ///
    /// # Errors
    /// That of rmdir(2).
    pub fn remove_dir(&self) -> io::Result<()> {
        self.in_parent(|folder, name| unlinkat(folder, name, UnlinkatFlags::RemoveDir))
    }

    /// Removes a folder with everything below it, at any depth. Links in it are removed, and not followed.
    ///
    /// # Errors
    /// The first thing that cannot be removed, or that others put there again and again.
    pub fn remove_dir_all(&self) -> io::Result<()> {
        let parent = self.parent().ok_or(io::ErrorKind::InvalidInput)?.find_folder()?;
        let name = self.inside.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        removal::remove_dir_all(&parent, name)
    }

    /// Renames it to a place below the same folder or another one. What is there is replaced.
    ///
    /// # Errors
    /// That of rename(2).
    pub fn rename(&self, to: &Beneath) -> io::Result<()> {
        self.rename_with(to, RenameFlags::empty())
    }

    /// Renames it to a name that must be unused.
    ///
    /// # Errors
    /// `AlreadyExists`; `EINVAL` or `ENOSYS` where the file system cannot; that of rename(2).
    pub fn rename_new(&self, to: &Beneath) -> io::Result<()> {
        self.rename_with(to, RenameFlags::RENAME_NOREPLACE)
    }

    /// Exchanges two names.
    ///
    /// # Errors
    /// `EINVAL` or `ENOSYS` where the file system cannot; that of rename(2).
    pub fn exchange(&self, with: &Beneath) -> io::Result<()> {
        self.rename_with(with, RenameFlags::RENAME_EXCHANGE)
    }

    fn rename_with(&self, to: &Beneath, how: RenameFlags) -> io::Result<()> {
        let parent = to.parent().ok_or(io::ErrorKind::InvalidInput)?.find_folder()?;
        let new = to.inside.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        self.in_parent(|folder, name| match how.is_empty() {
            // Old kernels and NFS have no flags.
            true => nix::fcntl::renameat(folder, name, &parent, new),
            false => renameat2(folder, name, &parent, new, how),
        })
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// `AlreadyExists`; that of link(2).
    pub fn link(&self, to: &Beneath) -> io::Result<()> {
        let parent = to.parent().ok_or(io::ErrorKind::InvalidInput)?.find_folder()?;
        let new = to.inside.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        self.in_parent(|folder, name| linkat(folder, name, &parent, new, AtFlags::empty()))
    }

    /// Makes a symbolic link here.
    ///
    /// # Errors
    /// `AlreadyExists`; that of symlink(2).
    pub fn make_link_to(&self, target: &Path) -> io::Result<()> {
        self.in_parent(|folder, name| symlinkat(target, folder, name))
    }

    /// Waits until the names in the folder here are on the disk.
    ///
    /// # Errors
    /// Opening it or fsync.
    pub fn sync_dir(&self) -> io::Result<()> {
        self.open_folder()?.sync_all()
    }

    /// Bytes that a user without special rights can still write to the file system of the folder here.
    ///
    /// # Errors
    /// That of statvfs(3).
    pub fn free_space(&self) -> io::Result<u64> {
        let stat = nix::sys::statvfs::fstatvfs(&self.find_folder()?)?;
        Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
    }

    /// Overwrites bytes of the file here, and syncs.
    ///
    /// # Errors
    /// As [`Beneath::change`]; write or fsync.
    pub fn overwrite(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let file = self.change()?;
        file.write_all_at(bytes, offset)?;
        file.sync_all()
    }
}

/// What it is, in a message.
fn kind(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    match () {
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_dir() => FOLDER,
        () if kind.is_file() => FILE,
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () if kind.is_block_device() || kind.is_char_device() => "a device",
        () => "of an unknown kind",
    }
}

/// Opens what was found, and nothing else: by its descriptor.
fn reopen(found: &File, options: &mut fs::OpenOptions) -> io::Result<File> {
    // A lease on the file (fcntl(2)) must not make us wait, either.
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(own(found))
}

/// The name of a descriptor of ours, for calls that take a path (inotify(7)). It is a magic link, and safe: nobody else
/// chooses where it leads.
#[must_use]
pub fn own(file: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// The path with a suffix that nobody knows beforehand.
#[must_use]
pub fn unforeseen(path: &Path) -> PathBuf {
    // Each has new random keys.
    let number = RandomState::new().build_hasher().finish();
    let mut name = path.as_os_str().to_owned();
    name.push(format!("-{number:016x}"));
    name.into()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder with a secret beside it, as others would arrange it.
    fn ground() -> (tempfile::TempDir, Beneath, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let (store, secret) = (dir.path().join("store"), dir.path().join("secret"));
        fs::create_dir(&store).unwrap();
        fs::create_dir(store.join("folder")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(&secret, "root's").unwrap();
        fs::write(dir.path().join("outside/file"), "root's").unwrap();
        let root = Beneath::root(&store, Owners::Ours).unwrap();
        (dir, root, secret)
    }

    fn unexpected(error: &io::Error) -> String {
        Unexpected::in_error(error).unwrap_or_else(|| panic!("{error:?}")).to_string()
    }

    #[test]
    fn what_is_written_is_read() {
        let (_dir, root, _) = ground();
        let file = root.join("folder/file");
        file.create_new(0o600).unwrap().write_all(b"one").unwrap();
        file.append(0o600).unwrap().write_all(b" two").unwrap();
        file.overwrite(0, b"ONE").unwrap();
        assert_eq!(file.content(100).unwrap(), b"ONE two");
        assert_eq!(file.content(6).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(file.create_new(0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        root.join("a/b").make_dirs(0o700).unwrap();
        file.rename(&root.join("a/b/c")).unwrap();
        assert_eq!(root.join("a/b").list().unwrap(), ["c"]);
        assert!(!file.is_there() && root.join("a/b/c").is_there() && root.join("a/b").is_dir());
        root.join("a/b/c").link(&root.join("d")).unwrap();
        root.join("folder").exchange(&root.join("a")).unwrap();
        assert_eq!(root.join("folder/b/c").content(100).unwrap(), b"ONE two");
        root.join("folder").remove_dir_all().unwrap();
        root.join("d").remove_file().unwrap();
        root.join("a").remove_dir().unwrap();
        assert!(root.list().unwrap().is_empty());
    }

    #[test]
    fn no_link_is_followed_and_the_error_says_where_it_is() {
        let (dir, root, secret) = ground();
        symlink(&secret, root.path().join("link")).unwrap();
        symlink("../outside", root.path().join("linked")).unwrap();
        symlink("folder", root.path().join("inner")).unwrap();
        let (link, linked) = (root.join("link"), root.join("linked/file"));
        let calls: [fn(&Beneath) -> io::Result<()>; 7] = [
            |it| it.read().map(drop),
            |it| it.change().map(drop),
            |it| it.append(0o600).map(drop),
            |it| it.change_or_create(0o600).map(drop),
            |it| it.set_mode(0o777),
            |it| it.list().map(drop),
            |it| it.make_dir_unless_there(0o777),
        ];
        for (n, call) in calls.iter().enumerate() {
            let why = unexpected(&call(&link).unwrap_err());
            assert!(why.contains("store/link is a symbolic link, and should be "), "{n}: {why}");
            let why = unexpected(&call(&linked).unwrap_err());
            assert!(why.contains("store/linked is a symbolic link, and should be a folder"), "{n}: {why}");
        }
        for inside in ["inner/new", "linked/new"] {
            let new = root.join(inside);
            for error in [new.create_new(0o600).unwrap_err(), new.make_dir(0o700).unwrap_err()] {
                assert!(unexpected(&error).contains("is a symbolic link"), "{error}");
            }
            root.join("x").change_or_create(0o600).unwrap();
            assert!(root.join("x").rename(&new).is_err() && root.join("x").link(&new).is_err());
        }
        assert!(root.join("linked/file").remove_file().is_err());
        assert!(link.metadata().unwrap().is_symlink());
        assert_eq!(fs::read(&secret).unwrap(), b"root's");
        // The link itself can be removed and replaced.
        root.join("x").rename(&link).unwrap();
        assert!(root.join("link").metadata().unwrap().is_file());
        root.join("linked").remove_file().unwrap();
        assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 1);
    }

    #[test]
    fn a_path_that_leads_out_is_refused() {
        let (_dir, root, secret) = ground();
        for bad in ["../secret", "/etc/passwd", "folder/../../secret", secret.to_str().unwrap()] {
            assert!(root.join(bad).read().is_err(), "{bad}");
            assert!(root.join(bad).metadata().is_err(), "{bad}");
        }
        let link = Path::new("/proc/self/fd").join(root.root.fd.as_raw_fd().to_string());
        symlink(link, root.path().join("magic")).unwrap();
        assert!(root.join("magic/folder").metadata().is_err());
    }

    #[test]
    fn what_would_make_us_wait_or_act_is_not_opened() {
        let (_dir, root, _) = ground();
        nix::unistd::mkfifo(&root.path().join("fifo"), Mode::S_IRWXU).unwrap();
        drop(std::os::unix::net::UnixListener::bind(root.path().join("socket")).unwrap());
        for (name, is) in [("fifo", "a FIFO"), ("socket", "a socket"), ("folder", "a folder")] {
            let place = root.join(name);
            for error in [place.read().unwrap_err(), place.change().unwrap_err(), place.append(0o600).unwrap_err()] {
                let why = unexpected(&error);
                assert!(why.ends_with(&format!("store/{name} is {is}, and should be a regular file")), "{why}");
            }
        }
        root.join("file").create_new(0o600).unwrap();
        let why = unexpected(&root.join("file").list().unwrap_err());
        assert!(why.ends_with("is a regular file, and should be a folder"), "{why}");
        let why = unexpected(&root.join("file/x").read().unwrap_err());
        assert!(why.ends_with("store/file is a regular file, and should be a folder"), "{why}");
    }

    #[test]
    fn a_file_with_a_name_elsewhere_is_not_changed_there() {
        let (_dir, root, secret) = ground();
        let file = root.join("log");
        fs::hard_link(&secret, file.path()).unwrap();
        assert!(unexpected(&file.change().unwrap_err()).contains("a hard link"));
        assert!(file.set_mode(0o777).is_err());
        file.make_own().unwrap();
        file.change().unwrap();
        file.remove_file().unwrap();
        fs::hard_link(&secret, file.path()).unwrap();
        file.append(0o600).unwrap().write_all(b" and more").unwrap();
        assert_eq!(file.content(100).unwrap(), b"root's and more");
        assert_eq!(fs::read(&secret).unwrap(), b"root's");
        assert_eq!(root.list().unwrap().len(), 2);
    }

    /// A chain of folders that no path is long enough for. Some have a file and a link that leads out.
    fn deep(top: &Path, levels: u32) {
        let folder = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let mut at = open(top, folder, Mode::empty()).unwrap();
        for level in 0..levels {
            mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
            at = openat(&at, "d", folder, Mode::empty()).unwrap();
            if level % 64 == 0 {
                fs::write(Path::new(&own(&at)).join("file"), "x").unwrap();
                symlinkat("../../outside", &at, "link").unwrap();
            }
        }
    }

    #[test]
    fn a_folder_of_any_depth_is_removed_and_nothing_outside() {
        let (dir, root, secret) = ground();
        let folder = root.join("folder");
        // No path is as long, and neither this stack nor the usual number of descriptors is enough for one per level.
        deep(folder.path(), 4_000);
        symlink(dir.path().join("outside"), folder.path().join("out")).unwrap();
        fs::hard_link(&secret, folder.path().join("secret")).unwrap();
        fs::create_dir_all(folder.path().join("wide/a/b")).unwrap();
        std::thread::scope(|scope| {
            let small = std::thread::Builder::new().stack_size(256 << 10);
            small.spawn_scoped(scope, || folder.remove_dir_all()).unwrap().join().unwrap().unwrap();
        });
        assert!(root.list().unwrap().is_empty());
        assert_eq!(fs::read(&secret).unwrap(), b"root's");
        assert_eq!(fs::read(dir.path().join("outside/file")).unwrap(), b"root's");
        assert_eq!(folder.remove_dir_all().unwrap_err().kind(), io::ErrorKind::NotFound);
        // A link is removed, and a file is not a folder.
        symlink("../outside", folder.path()).unwrap();
        folder.remove_dir_all().unwrap();
        assert!(!folder.is_there() && dir.path().join("outside/file").exists());
        fs::write(folder.path(), "x").unwrap();
        assert_eq!(folder.remove_dir_all().unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn a_path_that_is_too_long_is_an_error_at_once() {
        let (_dir, root, _) = ground();
        let long = root.join("d/".repeat(20_000));
        for error in [long.read().unwrap_err(), long.list().unwrap_err(), long.remove_dir_all().unwrap_err()] {
            assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
        }
    }

    #[test]
    fn a_copy_of_a_sparse_file_has_its_holes() {
        let (_dir, root, secret) = ground();
        let (file, length) = (root.join("log"), 3_u64 << 30);
        let outside = fs::OpenOptions::new().write(true).open(&secret).unwrap();
        outside.write_all_at(b"end", length - 3).unwrap();
        fs::hard_link(&secret, file.path()).unwrap();
        file.append(0o600).unwrap().write_all(b" and more").unwrap();
        let now = file.metadata().unwrap();
        assert_eq!((now.len(), now.nlink()), (length + 9, 1));
        assert!(now.blocks() * 512 < 8 << 20, "{}", now.blocks());
        let mut ends = ([0; 6], [0; 12]);
        file.read().unwrap().read_exact_at(&mut ends.0, 0).unwrap();
        file.read().unwrap().read_exact_at(&mut ends.1, length - 3).unwrap();
        assert_eq!((&ends.0, &ends.1), (b"root's", b"end and more"));
        assert_eq!(fs::metadata(&secret).unwrap().len(), length);
    }

    #[test]
    fn a_file_with_a_name_elsewhere_that_is_too_large_to_copy_is_refused() {
        let (_dir, root, secret) = ground();
        let file = root.join("log");
        fs::write(&secret, vec![b'x'; 3 << 20]).unwrap();
        fs::hard_link(&secret, file.path()).unwrap();
        let (found, metadata) = file.find_file().unwrap();
        let why = unexpected(&file.replace_by_copy(&found, &metadata, 2 << 20).unwrap_err());
        assert!(
            why.ends_with(
                "log is a file with another name elsewhere (a hard link), and should be one with this name only"
            ),
            "{why}"
        );
        assert_eq!(root.list().unwrap().len(), 2);
        file.replace_by_copy(&found, &metadata, 3 << 20).unwrap();
        assert_eq!(file.content(4 << 20).unwrap(), fs::read(&secret).unwrap());
    }

    #[test]
    fn nobody_can_be_in_the_way_of_a_copy() {
        let (_dir, root, secret) = ground();
        let file = root.join("log");
        fs::hard_link(&secret, file.path()).unwrap();
        root.join(".tmp-own-log/x").make_dirs(0o700).unwrap();
        file.append(0o600).unwrap().write_all(b" and more").unwrap();
        assert_eq!(file.content(100).unwrap(), b"root's and more");
        assert_eq!(root.list().unwrap().len(), 3);
    }

    #[test]
    fn what_belongs_to_another_user_is_not_opened() {
        if !rekindle_testing::root() {
            return;
        }
        let (_dir, root, _) = ground();
        let file = root.join("folder/file");
        file.create_new(0o600).unwrap();
        std::os::unix::fs::chown(file.path(), Some(12345), None).unwrap();
        for error in [file.read().unwrap_err(), file.append(0o600).unwrap_err()] {
            assert!(
                unexpected(&error).ends_with("file is the property of user 12345, and should be root's"),
                "{error}"
            );
        }
        Beneath::root(root.path(), Owners::Any).unwrap().join("folder/file").read().unwrap();
        std::os::unix::fs::chown(root.join("folder").path(), Some(12345), None).unwrap();
        assert!(unexpected(&root.join("folder").list().unwrap_err()).contains("user 12345"));
    }

    #[test]
    fn without_openat2_it_is_the_same() {
        let (_dir, root, secret) = ground();
        let open = |inside: &str, flags| root.step_by_step(Path::new(inside), flags | OFlag::O_NOFOLLOW, Mode::empty());
        fs::write(root.path().join("folder/file"), "x").unwrap();
        symlink("folder", root.path().join("linked")).unwrap();
        symlink(secret, root.path().join("folder/link")).unwrap();
        assert!(open("folder/file", OFlag::O_RDONLY).is_ok() && open(".", OFlag::O_PATH).is_ok());
        for bad in ["linked/file", "folder/link", "folder/file/x"] {
            assert!(open(bad, OFlag::O_RDONLY).is_err(), "{bad}");
        }
    }
}
