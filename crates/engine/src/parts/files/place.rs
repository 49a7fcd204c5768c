//! Where the paths of an image lead now, and whose files are there.
//!
//! The kernel gave these paths at the snapshot, so they had no symbolic links in them. A link that is there now was made
//! since. An administrator may have moved a folder and left a link, so links of root and of the job's user are followed.
//! A link of anybody else is refused: a restore may have root's rights, and would change whatever file the owner of the
//! link chooses. For the same reason a file must belong to its owner at the snapshot, to root, or to the job's user.
//!
//! The folder that was found stays open, and all work on its files goes through this descriptor. So what was checked and
//! what is changed are in the same folder, even if somebody swaps folders meanwhile.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use nix::fcntl::{OFlag, open, openat, readlinkat};
use nix::sys::stat::Mode;

use crate::launch::identity::Identity;
use rekindle_os::durable::Unfinished;
use rekindle_os::{identity, regular};

/// As many links in one path as the kernel follows (`MAXSYMLINKS`).
const MOST_LINKS: u32 = 40;

/// The user that the job runs as. Like root, this user may own what a restore finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trusted(u32);

impl Trusted {
    /// Of a job of `user`; `None` is the supervisor's user.
    pub(crate) fn of(user: Option<&Identity>) -> Trusted {
        Trusted(user.map_or_else(|| nix::unistd::geteuid().as_raw(), |user| user.uid))
    }

    /// Of a job of the user with this number.
    pub(crate) fn user(uid: u32) -> Trusted {
        Trusted(uid)
    }

    /// Whether it is this user.
    pub(crate) fn is(self, uid: u32) -> bool {
        self.0 == uid
    }

    /// Whether what belonged to `then` may belong to `now`.
    pub(crate) fn accepts(self, now: u32, then: Option<u32>) -> bool {
        now == 0 || now == self.0 || then.is_none_or(|then| now == then)
    }
}

/// Finds without opening, and follows no link.
const LOOK: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Why a path cannot be followed.
#[derive(Debug)]
pub(crate) enum Astray {
    /// The kernel refused.
    Io(io::Error),
    /// It leads through a symbolic link of another user.
    Link {
        /// The link.
        link: PathBuf,
        /// Whose it is.
        owner: u32,
    },
}

impl From<nix::Error> for Astray {
    fn from(error: nix::Error) -> Astray {
        Astray::Io(error.into())
    }
}

impl Astray {
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Astray::Io(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// What is at a path, with all links followed: whosever they are, if nobody is named whose links are trusted. It is not
/// opened for reading, because it may be a FIFO or a device.
pub(crate) fn find(path: &Path, trusted: impl Into<Option<Trusted>>) -> Result<File, Astray> {
    find_from(|| open("/", LOOK, Mode::empty()).map(File::from), path, trusted.into())
}

/// The same below another root folder.
pub(super) fn find_below(root: &File, path: &Path, trusted: Trusted) -> Result<File, Astray> {
    find_from(|| openat(root, ".", LOOK, Mode::empty()).map(File::from), path, Some(trusted))
}

fn find_from(root: impl Fn() -> nix::Result<File>, path: &Path, trusted: Option<Trusted>) -> Result<File, Astray> {
    let (mut at, mut shown, mut links) = (root()?, PathBuf::from("/"), 0);
    let mut left: VecDeque<OsString> = steps(path).collect();
    while let Some(step) = left.pop_front() {
        let next = File::from(openat(&at, step.as_os_str(), LOOK, Mode::empty())?);
        let metadata = next.metadata().map_err(Astray::Io)?;
        shown.push(&step);
        if !metadata.is_symlink() {
            at = next;
            continue;
        }
        if trusted.is_some_and(|trusted| !trusted.accepts(metadata.uid(), Some(0))) {
            return Err(Astray::Link { link: shown, owner: metadata.uid() });
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(nix::Error::ELOOP.into());
        }
        let target = PathBuf::from(readlinkat(&next, "")?);
        if target.is_absolute() {
            (at, shown) = (root()?, PathBuf::from("/"));
        } else {
            shown.pop();
        }
        steps(&target).rev().for_each(|step| left.push_front(step));
    }
    Ok(at)
}

fn steps(path: &Path) -> impl DoubleEndedIterator<Item = OsString> {
    path.components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().into())
}

/// The name by which the kernel finds an open file again, whatever happened to its path.
pub(crate) fn reached(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Opens a folder that may be swapped for a link.
pub(super) fn open_folder(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)
}

/// Whether this thread may create a file in a folder.
pub(super) fn may_create_in(folder: &Path) -> io::Result<()> {
    const WRITE: u32 = 2;
    const ENTER: u32 = 1;
    // The dot leads through a link.
    identity::reach(&folder.join("."), WRITE | ENTER).map(drop)
}

/// Creates a folder that only we can enter. `None` if there is something of that name.
pub(super) fn own_folder(path: &Path, trusted: Trusted) -> io::Result<Option<File>> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        made => made?,
    }
    // Another user who may rename what is there can have put a folder in its place.
    let made = open_folder(path)?;
    let metadata = made.metadata()?;
    let is_ours = || match trusted.is(metadata.uid()) {
        true => Ok(true),
        // A file server can give what is root's to somebody else (root_squash of NFS).
        false => Unfinished::beside(path).and_then(|file| Ok(file.file().metadata()?.uid() == metadata.uid())),
    };
    let is_new = metadata.mode() & 0o077 == 0 && fs::read_dir(reached(&made))?.next().is_none();
    Ok((is_new && is_ours()?).then_some(made))
}

/// A name in a folder that stays open. There need not be a file of that name.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    path: Cow<'a, Path>,
    folder: File,
}

impl<'a> Place<'a> {
    /// Finds the folder of `path`. The last part of the path is not followed.
    pub(crate) fn of(path: &'a Path, trusted: Trusted) -> Result<Place<'a>, Astray> {
        Place::find_folder(path.into(), trusted)
    }

    /// The same for a path that nobody else has.
    pub(crate) fn of_own(path: PathBuf, trusted: Trusted) -> Result<Place<'static>, Astray> {
        Place::find_folder(path.into(), trusted)
    }

    fn find_folder(path: Cow<'_, Path>, trusted: Trusted) -> Result<Place<'_>, Astray> {
        // Only the root folder has no parent.
        let folder = find(path.parent().unwrap_or(&path), trusted)?;
        Ok(Place { path, folder })
    }

    /// The path in the image, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The last part of the path.
    pub(crate) fn name(&self) -> &OsStr {
        // Only the root folder has none.
        self.path.file_name().unwrap_or_else(|| OsStr::new("."))
    }

    /// What has this name now. It is not opened.
    pub(crate) fn find(&self) -> io::Result<regular::Found> {
        regular::find_in(&self.folder, self.name())
    }

    /// A path of the file that leads through the open folder.
    pub(crate) fn here(&self) -> PathBuf {
        self.beside(self.name())
    }

    /// Where it is now, without links.
    pub(crate) fn real(&self) -> io::Result<PathBuf> {
        Ok(fs::read_link(reached(&self.folder))?.join(self.name()))
    }

    /// A path of another name in this folder.
    pub(crate) fn beside(&self, name: &OsStr) -> PathBuf {
        reached(&self.folder).join(name)
    }
}

#[cfg(test)]
mod tests;
