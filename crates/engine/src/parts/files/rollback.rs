//! What becomes of the content that a file has before it is put back, and why a file cannot be put back.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytesize::ByteSize;

use super::place::{Astray, Place, Trusted};
use crate::launch::identity;
use crate::launch::output::Kept;
use rekindle_os::durable;
use rekindle_store::manifest::Owner;
use rekindle_store::{JobFolder, Manifest};

/// A file that was put back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileRollback {
    /// The present content that is not in the snapshot is saved beside it.
    Kept(RolledBack),
    /// Output of the job. Only a configured amount of it is saved.
    Cut(PathBuf, Kept),
    /// It was missing, and was created from the image.
    Made(PathBuf),
    /// Output of the job; this many bytes that it had written are missing.
    Begun(PathBuf, u64),
    /// It did not exist at the snapshot, and was moved aside.
    Aside(RolledBack),
    /// A tracked folder.
    Folder {
        path: PathBuf,
        /// Where the content that was too much is now.
        kept: PathBuf,
    },
}

impl FileRollback {
    pub(super) fn is_in(&self, folder: &Path) -> bool {
        match self {
            FileRollback::Kept(RolledBack { path, .. }) | FileRollback::Aside(RolledBack { path, .. }) => {
                path.starts_with(folder)
            }
            FileRollback::Made(path) | FileRollback::Cut(path, _) | FileRollback::Begun(path, _) => {
                path.starts_with(folder)
            }
            FileRollback::Folder { .. } => false,
        }
    }
}

impl fmt::Display for FileRollback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileRollback::Kept(RolledBack { path, kept, .. }) if kept.as_os_str().is_empty() => {
                write!(f, "{} was put back", path.display())
            }
            FileRollback::Kept(RolledBack { path, kept, bytes }) => {
                write!(f, "{} was put back; {bytes} newer bytes are kept in {}", path.display(), kept.display())
            }
            FileRollback::Cut(path, kept) => {
                write!(f, "{} was put back", path.display())?;
                if let Some(file) = &kept.file {
                    write!(f, "; its last {} are kept in {}", ByteSize::b(kept.bytes), file.display())?;
                }
                match kept.lost {
                    0 => Ok(()),
                    lost => write!(f, "; {} is not kept (log.max-size, or a full disk)", ByteSize::b(lost)),
                }
            }
            FileRollback::Made(path) => write!(f, "{} did not exist and was created from the image", path.display()),
            FileRollback::Aside(RolledBack { path, kept, .. }) => {
                write!(f, "{} did not exist at the snapshot: what was there is now {}", path.display(), kept.display())
            }
            FileRollback::Folder { path, kept } => {
                write!(f, "{} was put back; the version before is in {}", path.display(), kept.display())
            }
            FileRollback::Begun(path, bytes) => write!(
                f,
                "{} starts empty: the {} written before the snapshot are not here",
                path.display(),
                ByteSize::b(*bytes)
            ),
        }
    }
}

/// A file with content that was moved elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RolledBack {
    pub(crate) path: PathBuf,
    /// The file that has this content now.
    pub(crate) kept: PathBuf,
    /// Size of this content.
    pub(crate) bytes: u64,
}

/// Why a file could not be put back.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// No space to save what must be cut from the file.
    #[error("cannot put {} back to its state at the snapshot: its file system has no space for a copy of the current content. Free space, or move the file's newest part away", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Too many copies exist that nobody removed.
    #[error("cannot put {} back to its state at the snapshot: {MOST_KEPT} older copies exist (NAME.rolled-back.N). Remove those that you do not need", .0.display())]
    TooMany(PathBuf),
    /// It does not exist any more.
    #[error("{} was open for writing at the snapshot and does not exist now, and its content is not in the image: put it back, or restore an older image", .0.display())]
    Gone(PathBuf),
    /// Its mode changed, so that CRIU would refuse it or could not open it.
    #[error("{} had mode {then:o} at the snapshot and has {now:o} now: change it back", path.display())]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permission bits at the snapshot.
        then: u32,
        /// Its permission bits now.
        now: u32,
    },
    /// It belongs to somebody who may have put it there.
    #[error(
        "{} belongs to user {} and belonged to user {} at the snapshot: somebody may have replaced it. If it is the right file, give it back to user {}; if it is not, put the right file in its place",
        path.display(),
        identity::name_of(*now),
        identity::name_of(*then),
        identity::name_of(*then)
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// The number of its owner now.
        now: u32,
        /// The number of its owner at the snapshot.
        then: u32,
    },
    /// Its path leads through a symbolic link of another user.
    #[error(
        "the path {} leads through {}, a symbolic link of user {}: rekindle follows only links of root and of the job's user. If the link is right, give it to root (`chown -h root LINK`); if it is not, put the original folder or file in its place",
        path.display(),
        link.display(),
        identity::name_of(*owner)
    )]
    Link {
        /// The file.
        path: PathBuf,
        /// The link.
        link: PathBuf,
        /// The number of the link's owner.
        owner: u32,
    },
    /// It must be created, and cannot have its access control list.
    #[error("cannot create {} again: it had an access control list, without which others would have more rights to it. Mount its file system with support for these lists, or put the file back with its list", path.display())]
    Acl {
        /// The file or folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It must be created, and cannot have its owner or group.
    #[error(
        "cannot create {} again with the rights of the job's user: it belonged to user {} and group {}, and with mode {mode:o} it would give others more rights. Put it back with its owner and group",
        path.display(),
        identity::name_of(then.uid),
        then.gid
    )]
    NotItsOwner {
        /// The file or folder.
        path: PathBuf,
        /// Its owner at the snapshot.
        then: Owner,
        /// Its permission bits at the snapshot.
        mode: u32,
    },
    /// It is no regular file any more.
    #[error("{} was a regular file at the snapshot and is not one now", .0.display())]
    NotAFile(PathBuf),
    /// Its content changed, and is not in the image.
    #[error("{} changed after the snapshot and its earlier content is not in the image: the job would continue with a file that does not match its memory. Put the file back, restore an older image, or set restart.changed-files = \"warn\" if this is harmless for the job", .0.display())]
    Changed(PathBuf),
    /// Its content changed, and it cannot be written.
    #[error("{} changed after the snapshot and cannot be written with the rights of the job's user: put its earlier content back, or make it writable for that user", path.display())]
    Protected {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It must be moved aside, and cannot be.
    #[error("{} was not there at the snapshot, or was something else, and cannot be moved with the rights of the job's user: move it away", path.display())]
    Unmovable {
        /// The file or folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Something else has a name that is needed for a moment.
    #[error("{} is in the way: a restore opens a deleted file of the job by this name. If no other job is being restored, move it away", .0.display())]
    InTheWay(PathBuf),
    /// Something is mounted on it.
    #[error("{} was something else at the snapshot, and is a mount point now: unmount it", .0.display())]
    Mounted(PathBuf),
    /// What it replaces cannot be kept.
    #[error("cannot put {} back: what it replaces must be kept, and the job's user may create a folder neither in {} nor beside it. Let that user write to one of the two", path.display(), folder.display())]
    NoPlace {
        /// The file.
        path: PathBuf,
        /// The tracked folder that it is in.
        folder: PathBuf,
    },
    /// What it replaces cannot be kept beside it.
    #[error("cannot put {} back: its current content must be kept, and the job's user may create no file in {}. Let that user write to that folder, or move the file away", path.display(), path.parent().unwrap_or(path).display())]
    NoCopy {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It lost bytes that the image does not have.
    #[error("{} had {had} bytes at the snapshot and has {has} now: the missing bytes are not in the image", path.display())]
    Shorter {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        had: u64,
        /// Bytes now.
        has: u64,
    },
    /// The kernel refused.
    #[error("cannot put {} back: {verb} failed", path.display())]
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

impl RollbackError {
    /// Whether the cause is the machine, not the image or the job: no space, no rights, a failing disk.
    pub(crate) fn is_the_machines(&self) -> bool {
        let RollbackError::Io { verb, source, .. } = self else { return false };
        let codes = [libc::ENOSPC, libc::EDQUOT, libc::EIO, libc::EROFS, libc::ENOMEM, libc::EMFILE, libc::ENFILE];
        *verb == SWITCH || source.raw_os_error().is_some_and(|code| codes.contains(&code))
    }
}

/// The step that gives a thread the user's rights.
pub(super) const SWITCH: &str = "switching to the job's user";

pub(crate) fn failed<'a>(verb: &'static str, path: &'a Path) -> impl Fn(io::Error) -> RollbackError + 'a {
    move |source| RollbackError::Io { path: path.into(), verb, source }
}

/// How many copies of one file are saved. Only the user removes these files, so the next copy is refused. Nobody needs
/// more.
const MOST_KEPT: u32 = 10_000;

/// The error for a copy or a new file that could not be written.
pub(crate) fn no_room(path: &Path) -> impl Fn(io::Error) -> RollbackError + '_ {
    move |source| match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => RollbackError::NoRoom { path: path.into(), source },
        _ => failed("copy", path)(source),
    }
}

/// The error for a copy that could not be created.
pub(super) fn no_copy(path: &Path) -> impl Fn(io::Error) -> RollbackError + '_ {
    move |source| match source.kind() {
        io::ErrorKind::PermissionDenied => RollbackError::NoCopy { path: path.into(), source },
        _ => no_room(path)(source),
    }
}

/// Which older copies a restore removes: all but the newest, and but the first one since this time, that of the newest
/// image. If a restore fails, another image is tried: then that copy has what the job had last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expiry(SystemTime);

impl Expiry {
    /// With the images that there are.
    pub(crate) fn of(manifest: &Manifest, folder: &JobFolder) -> Expiry {
        let stored = folder.images().unwrap_or_default().into_iter().map(|image| image.id.taken());
        Expiry(stored.chain([manifest.taken]).max().unwrap_or(manifest.taken).into())
    }

    #[cfg(test)]
    pub(crate) fn since(time: SystemTime) -> Expiry {
        Expiry(time)
    }

    #[cfg(test)]
    pub(crate) fn of_all_but_the_newest() -> Expiry {
        Expiry(SystemTime::now() + std::time::Duration::from_secs(3600))
    }

    /// The names of the copies to be removed, beside the newest one.
    pub(super) fn outdated(self, place: &Place<'_>, newest: &OsStr) -> Vec<OsString> {
        let mut older: Vec<_> = present_copies(place)
            .filter(|name| name != newest)
            .map(|name| {
                let made =
                    std::fs::symlink_metadata(place.beside(&name)).map(|found| (found.ctime(), found.ctime_nsec()));
                (made.ok(), name)
            })
            .collect();
        let since = self.0.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let since = (i64::try_from(since.as_secs()).unwrap_or(i64::MAX), i64::from(since.subsec_nanos()));
        let first = older.iter().filter_map(|(made, _)| made.filter(|made| *made >= since)).min();
        older.retain(|(made, _)| made.is_none() || *made != first);
        older.into_iter().map(|(_, name)| name).collect()
    }
}

/// The names for copies of a file or folder.
fn copies<'a>(place: &'a Place<'_>) -> impl Iterator<Item = OsString> + use<'a> {
    (1..=u32::MAX).map(|n| {
        let suffix = format!(".rolled-back.{n}");
        let mut name = shortened(place.name(), suffix.len());
        name.push(suffix);
        name
    })
}

/// As many bytes as a name may have (NAME_MAX of Linux).
const LONGEST_NAME: usize = 255;

/// The name, or if it would be too long with so many bytes more, its beginning and a hash.
pub(super) fn shortened(name: &OsStr, more: usize) -> OsString {
    const HASH: usize = 16;
    let bytes = name.as_bytes();
    if bytes.len() + more <= LONGEST_NAME {
        return name.to_owned();
    }
    let begin = bytes.get(..LONGEST_NAME.saturating_sub(more + HASH + 1)).unwrap_or_default();
    let mut short = OsStr::from_bytes(begin).to_owned();
    let hash = blake3::hash(bytes).to_hex();
    short.push(format!("-{}", hash.get(..HASH).unwrap_or_default()));
    short
}

/// The names of its copies that are there.
pub(super) fn present_copies<'a>(place: &'a Place<'_>) -> impl Iterator<Item = OsString> + use<'a> {
    copies(place).take_while(|name| std::fs::symlink_metadata(place.beside(name)).is_ok())
}

/// Names for a new copy that are not taken. There are none if [`MOST_KEPT`] copies of its owner or of root are there. What
/// other users put there does not count: in a folder such as /tmp they could prevent a restore.
pub(super) fn free_names<'a>(place: &'a Place<'_>) -> impl Iterator<Item = OsString> + use<'a> {
    let owner = place.find().and_then(|found| found.metadata()).map(|metadata| metadata.uid()).ok();
    let mut kept = 0;
    let looked_at = copies(place).map_while(move |name| match std::fs::symlink_metadata(place.beside(&name)) {
        Err(_) => Some(Some(name)),
        Ok(found) => {
            kept += u32::from(found.uid() == 0 || owner.is_none_or(|owner| owner == found.uid()));
            (kept < MOST_KEPT).then_some(None)
        }
    });
    looked_at.flatten()
}

/// What [`durable::unforeseen`] may add to a name, bytes.
pub(super) const UNFORESEEN: usize = 32;

/// The name of a file that becomes the file of this name.
pub(super) fn temporary(name: &OsStr, suffix: &str) -> OsString {
    let mut temp = OsString::from(durable::TEMP_PREFIX);
    temp.push(shortened(name, temp.len() + suffix.len() + UNFORESEEN));
    temp.push(suffix);
    temp
}

impl Trusted {
    /// Refuses a file that somebody else than its owner at the snapshot has put there. Images of earlier versions do not
    /// have all owners.
    pub(crate) fn check(self, path: &Path, now: u32, then: Option<u32>) -> Result<(), RollbackError> {
        match then.filter(|_| !self.accepts(now, then)) {
            Some(then) => Err(RollbackError::Owner { path: path.into(), now, then }),
            None => Ok(()),
        }
    }

    /// The same for a file that is to be changed. If it has another owner than at the snapshot, it must have no other name:
    /// in some kernels anybody can give a file of root a second one (`fs.protected_hardlinks` is 0).
    pub(super) fn check_file(self, path: &Path, now: &Metadata, then: Option<Owner>) -> Result<(), RollbackError> {
        let then = then.map(|owner| owner.uid);
        match then.filter(|then| *then != now.uid() && now.nlink() > 1) {
            Some(then) => Err(RollbackError::Owner { path: path.into(), now: now.uid(), then }),
            None => self.check(path, now.uid(), then),
        }
    }
}

impl Astray {
    /// The error for the file at `path`; `verb` is the call that needed it.
    pub(crate) fn at(verb: &'static str, path: &Path) -> impl Fn(Astray) -> RollbackError {
        move |astray| match astray {
            Astray::Io(error) => failed(verb, path)(error),
            Astray::Link { link, owner } => RollbackError::Link { path: path.into(), link, owner },
        }
    }
}
