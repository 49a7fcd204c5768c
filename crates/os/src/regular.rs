//! Opens files and folders at paths where another user may put anything at any moment.
//!
//! - An open alone can have effects: it starts a watchdog, rewinds a tape, or waits for the other end of a FIFO. So a
//!   path is first looked up without opening what is there (`O_PATH`). Only what turns out to be a regular file on a
//!   disk or in memory is opened, through its descriptor, so nothing can be exchanged in between.
//! - A thread with the rights of another user ([`super::identity`]) belongs to the supervisor. The kernel lets it pass
//!   the magic links of the supervisor in /proc (`cwd`, `root`, `fd/N`) whatever its rights are, because it is in the
//!   same thread group (`ptrace_may_access`). They lead to files that the user cannot reach. Such a thread passes no
//!   magic link here.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, ReadDir};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, open, openat, openat2, readlinkat};
use nix::sys::stat::Mode;
use nix::unistd::{Uid, geteuid, setfsuid};

use super::blocks::Medium;

/// What happens with a link at the end of a path. Links on the way there are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// It is followed.
    Follow,
    /// It is found itself, and cannot be opened.
    Refuse,
}

/// What is at a path. It is not open: only its metadata can be read.
#[derive(Debug)]
pub struct Found(File);

/// Finds what is at this path.
///
/// # Errors
/// When nothing is there or the path cannot be followed; `ELOOP` for a magic link that this thread must not pass.
pub fn find(path: &Path, links: Links) -> io::Result<Found> {
    let follow = match links {
        Links::Follow => OFlag::empty(),
        Links::Refuse => OFlag::O_NOFOLLOW,
    };
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | follow;
    if !has_others_rights() {
        return Ok(Found(open(path, flags, Mode::empty())?.into()));
    }
    match openat2(AT_FDCWD, path, OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS)) {
        // Linux before 5.6 has no openat2(2), and some sandboxes do not allow it.
        Err(Errno::ENOSYS | Errno::EPERM) => step_by_step(path, links),
        found => Ok(Found(found?.into())),
    }
}

/// Finds the file of this name in a folder. A link is found itself, and cannot be opened.
///
/// # Errors
/// When there is none.
pub fn find_in(folder: &File, name: &OsStr) -> io::Result<Found> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(Found(openat(folder, name, flags, Mode::empty())?.into()))
}

/// Whether this thread works on files with the rights of another user than its process.
fn has_others_rights() -> bool {
    // A call with an invalid id only returns the current one (setfsuid(2)).
    setfsuid(Uid::from_raw(u32::MAX)) != geteuid()
}

/// Does without openat2(2). Refuses every link on a file system of the kernel, because it could be magic.
fn step_by_step(path: &Path, links: Links) -> io::Result<Found> {
    /// As many as the kernel follows (path_resolution(7)).
    const MOST_LINKS: usize = 40;
    let step = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut at: OwnedFd = open(".", step, Mode::empty())?;
    let mut left = parts(path);
    if left.is_empty() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut followed = 0;
    while let Some(part) = left.pop() {
        // A path that begins with "/" has that as its first part.
        let next = File::from(openat(&at, part.as_os_str(), step, Mode::empty())?);
        if next.metadata()?.is_symlink() && (links == Links::Follow || !left.is_empty()) {
            followed += 1;
            if followed > MOST_LINKS || Medium::of(&next)? == Medium::Kernel {
                return Err(Errno::ELOOP.into());
            }
            left.extend(parts(Path::new(&readlinkat(&next, "")?)));
        } else {
            at = next.into();
        }
    }
    Ok(Found(at.into()))
}

/// The parts of a path, the first one last.
fn parts(path: &Path) -> Vec<OsString> {
    path.components().map(Component::as_os_str).map(OsStr::to_owned).rev().collect()
}

impl Found {
    /// Its metadata.
    ///
    /// # Errors
    /// That of fstat(2).
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    /// Where its content is stored.
    ///
    /// # Errors
    /// That of fstatfs(2).
    pub fn medium(&self) -> io::Result<Medium> {
        Medium::of(&self.0)
    }

    /// Opens it for reading.
    ///
    /// # Errors
    /// That of open(2); `ELOOP` for a link, and `InvalidInput` for anything else that is no regular file or that the
    /// kernel makes up: reading that can have effects, too (/proc/kmsg).
    pub fn read(&self) -> io::Result<File> {
        self.open(File::options().read(true))
    }

    /// Opens it for reading and writing.
    ///
    /// # Errors
    /// As [`Found::read`].
    pub fn change(&self) -> io::Result<File> {
        self.open(File::options().read(true).write(true))
    }

    /// Changes its permission bits.
    ///
    /// # Errors
    /// That of chmod(2), which only its owner and root may call.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        fs::set_permissions(own(&self.0), fs::Permissions::from_mode(mode & 0o7777))
    }

    fn open(&self, options: &mut fs::OpenOptions) -> io::Result<File> {
        let kind = self.metadata()?.file_type();
        if kind.is_symlink() {
            return Err(Errno::ELOOP.into());
        }
        if !kind.is_file() || self.medium()? == Medium::Kernel {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // A lease on the file (fcntl(2)) must not make us wait, either.
        options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(own(&self.0))
    }
}

/// The name of a descriptor of ours. It is a magic link, and safe: nobody else chooses where it leads.
fn own(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// A folder.
#[derive(Debug)]
pub struct Folder(Found);

impl Folder {
    /// Finds the folder at this path; a link to it is followed.
    ///
    /// # Errors
    /// As [`find`]; `ENOTDIR` if it is no folder.
    pub fn at(path: &Path) -> io::Result<Folder> {
        Folder::try_from(find(path, Links::Follow)?.0)
    }

    /// Its metadata.
    ///
    /// # Errors
    /// That of fstat(2).
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    /// What is in it; nothing if the kernel makes it up (procfs, sysfs, control groups). The paths of the entries are
    /// valid as long as the folder is open.
    ///
    /// # Errors
    /// Those of opendir(3) and fstatfs(2).
    pub fn entries(&self) -> io::Result<Option<ReadDir>> {
        match self.0.medium()? {
            Medium::Kernel => Ok(None),
            Medium::Memory | Medium::Disk => fs::read_dir(own(&self.0.0)).map(Some),
        }
    }

    /// Where the link of this name in it leads.
    ///
    /// # Errors
    /// That of readlink(2).
    pub fn link(&self, name: &str) -> io::Result<OsString> {
        Ok(readlinkat(&self.0.0, name)?)
    }
}

impl TryFrom<File> for Folder {
    type Error = io::Error;

    /// From a descriptor of `O_PATH`.
    fn try_from(file: File) -> io::Result<Folder> {
        if file.metadata()?.is_dir() { Ok(Folder(Found(file))) } else { Err(io::ErrorKind::NotADirectory.into()) }
    }
}

impl AsRef<File> for Folder {
    /// A descriptor of `O_PATH`.
    fn as_ref(&self) -> &File {
        &self.0.0
    }
}

impl From<File> for Found {
    /// From a descriptor of `O_PATH`.
    fn from(file: File) -> Found {
        Found(file)
    }
}

impl From<Found> for OwnedFd {
    fn from(found: Found) -> OwnedFd {
        found.0.into()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;
    use crate::identity::with_file_rights;

    #[test]
    fn devices_and_files_that_the_kernel_makes_up_are_found_but_not_opened() {
        for path in ["/dev/null", "/dev", "/proc/self/status"] {
            let found = find(Path::new(path), Links::Follow).unwrap();
            assert_eq!(found.metadata().unwrap().ino(), fs::metadata(path).unwrap().ino());
            assert_eq!(found.read().unwrap_err().kind(), io::ErrorKind::InvalidInput, "{path}");
            assert_eq!(found.change().unwrap_err().kind(), io::ErrorKind::InvalidInput, "{path}");
        }
    }

    /// A folder that only root can enter, with a folder in it that all can read, and a descriptor of that one.
    fn secret() -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("file"), "secret").unwrap();
        [(folder.join("file"), 0o666), (folder.clone(), 0o755), (dir.path().into(), 0o700)]
            .iter()
            .for_each(|(path, bits)| mode(path, *bits));
        let open = File::open(folder).unwrap();
        (dir, open)
    }

    type Find = fn(&Path, Links) -> io::Result<Found>;

    #[test]
    fn the_magic_links_of_the_process_give_another_user_nothing() {
        if !rekindle_testing::root() {
            return;
        }
        let (dir, open) = secret();
        let public = tempfile::tempdir().unwrap();
        fs::set_permissions(public.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(public.path().join("open"), "for all").unwrap();
        let links = [("link", own(&open)), ("same", "./open".into()), ("around", "around".into())];
        links.iter().for_each(|(name, target)| symlink(target, public.path().join(name)).unwrap());
        let nested: PathBuf = [own(&open).as_str(), "file"].iter().collect();
        let secrets = [nested.clone(), public.path().join("link/file"), public.path().join("link")];
        let cwd = PathBuf::from(format!("/proc/{}/cwd", std::process::id()));
        let seen = with_file_rights(65534, 65534, &[65534], || {
            assert_eq!(fs::read(&nested).unwrap(), b"secret", "the kernel lets it pass: the test is about something");
            for find in [find as Find, step_by_step] {
                for path in secrets.iter().chain([&cwd]) {
                    let error = find(path, Links::Follow).unwrap_err();
                    assert_eq!(error.raw_os_error(), Some(libc::ELOOP), "{}", path.display());
                }
                assert_eq!(
                    find(&public.path().join("around"), Links::Follow).unwrap_err().raw_os_error(),
                    Some(libc::ELOOP)
                );
                assert_eq!(
                    find(&public.path().join("none"), Links::Follow).unwrap_err().kind(),
                    io::ErrorKind::NotFound
                );
                let link = find(&public.path().join("same"), Links::Refuse).unwrap();
                assert_eq!(link.read().unwrap_err().raw_os_error(), Some(libc::ELOOP));
                assert!(find(&public.path().join("../"), Links::Refuse).unwrap().metadata().unwrap().is_dir());
                let there = find(&public.path().join("same"), Links::Follow).unwrap();
                assert_eq!(io::read_to_string(there.read().unwrap()).unwrap(), "for all");
                assert_eq!(there.change().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
                assert_eq!(
                    find(&dir.path().join("folder/file"), Links::Follow).unwrap_err().kind(),
                    io::ErrorKind::PermissionDenied
                );
            }
            Folder::at(public.path()).unwrap().entries().unwrap().unwrap().count()
        });
        assert_eq!(seen.unwrap(), 4);
        assert_eq!(io::read_to_string(find(&nested, Links::Refuse).unwrap().read().unwrap()).unwrap(), "secret");
    }

    #[test]
    fn a_folder_of_the_kernel_has_no_entries() {
        for path in ["/proc", "/proc/self", "/sys"] {
            assert!(Folder::at(Path::new(path)).unwrap().entries().unwrap().is_none(), "{path}");
        }
        assert_eq!(Folder::at(Path::new("/dev/null")).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }
}
