//! What can go wrong in the store.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::id::{ImageId, JobName};
use super::lock::Holder;
use super::trust::Untrusted;

/// The result of most calls on the store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A file or folder could not be made, read, written or removed.
#[derive(Debug, Error)]
#[error("cannot {what} {}{}", path.display(), Failing(source))]
pub struct FileError {
    /// What was tried.
    pub what: &'static str,
    /// On what.
    pub path: PathBuf,
    /// The kernel's answer.
    #[source]
    pub source: io::Error,
}

/// What an error of the disk itself means, and what to do about it: to be said before the kernel's words. Nothing for other
/// errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failing<'a>(pub(crate) &'a io::Error);

impl std::fmt::Display for Failing<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match is_failing(self.0) {
            true => f.write_str(
                ", because the disk is failing (see the kernel log, and replace the disk; no image is marked as bad)",
            ),
            false => Ok(()),
        }
    }
}

/// Whether the disk itself has failed: what it did not deliver may be intact all the same.
pub(crate) fn is_failing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// This was tried, and has failed.
pub fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError + use<> {
    let path = path.to_owned();
    move |source| FileError { what, path, source }
}

/// Why a call on the store failed. Nothing was deleted then, unless it was [`Error::Remove`].
#[derive(Debug, Error)]
pub enum Error {
    /// Opened for reading, and it does not exist.
    #[error("there is no store at {}; `rekindle run` creates one, --store chooses another", .0.display())]
    NoStore(PathBuf),
    /// A file in place of the store or of one of its folders.
    #[error("{} is not a folder; move it away, or choose another store with --store", .0.display())]
    NotAFolder(PathBuf),
    /// We are root and others can write the folder: they could make us restore what they like.
    #[error("{} can be written by others, and its content is run as root; check its content, then run `chmod 0700 '{}'`", .0.display(), .0.display())]
    OthersCanWrite(PathBuf),
    /// We are root and the folder belongs to somebody else.
    #[error("{} belongs to user {owner}, and its content is run as root; check its content, then run `chown root '{}' && chmod 0700 '{}'`, or choose another store with --store", .path.display(), .path.display(), .path.display())]
    OtherOwner {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// No job of that name.
    #[error("there is no job \"{name}\" in {}; {}", .store.display(), naming("jobs", .known))]
    UnknownJob {
        /// The name that was asked for.
        name: JobName,
        /// The store.
        store: PathBuf,
        /// Those that are there.
        known: Vec<JobName>,
    },
    /// No image of that name.
    #[error("job \"{job}\" has no image \"{wanted}\"; {}", naming("images", .known))]
    UnknownImage {
        /// The job.
        job: JobName,
        /// The text that was asked for.
        wanted: String,
        /// Those that are there, newest first.
        known: Vec<ImageId>,
    },
    /// A prefix of several.
    #[error("\"{wanted}\" matches several images of job \"{job}\"; {}", naming("they", .matching))]
    AmbiguousImage {
        /// The job.
        job: JobName,
        /// The text that was asked for.
        wanted: String,
        /// Those that it could be, newest first.
        matching: Vec<ImageId>,
    },
    /// `latest` of a job without a good image.
    #[error("job \"{job}\" has no good image; {}", naming("images", .known))]
    NoGoodImage {
        /// The job.
        job: JobName,
        /// Those that are there, newest first.
        known: Vec<ImageId>,
    },
    /// Another process is the job's supervisor.
    #[error("job \"{job}\" is supervised by {}; stop that supervisor first, or choose another --name", supervisor(.holder.as_deref()))]
    Supervised {
        /// The job.
        job: JobName,
        /// Who it is, if it said so.
        holder: Option<Box<Holder>>,
    },
    /// The lock was free, and the file names one who may be alive, on a machine to which our locks do not reach.
    #[error(
        "job \"{job}\" may be supervised by {holder}, whose last heartbeat was {} ago; stop that supervisor first. If it is dead, try again when its heartbeat is {} old, or empty {} to continue at once",
        humantime::format_duration(std::time::Duration::from_secs(silent.as_secs())), humantime::format_duration(super::lock::STALE), .file.display()
    )]
    PerhapsSupervised {
        /// The job.
        job: JobName,
        /// Who it may be.
        holder: Box<Holder>,
        /// How long that one has said nothing.
        silent: std::time::Duration,
        /// The lock file.
        file: PathBuf,
    },
    /// The lock is another process's, who took us for dead.
    #[error("job \"{job}\" was taken over by {holder} because this process stalled; it stops here")]
    TakenOver {
        /// The job.
        job: JobName,
        /// Who has it now.
        holder: Box<Holder>,
    },
    /// The name of the lock leads to another file than the one that is locked.
    #[error(
        "{} was replaced by another file, so job \"{job}\" may have another supervisor; this process stops here. If `rekindle status` shows no supervisor, run the same command again", .file.display()
    )]
    LockReplaced {
        /// The job.
        job: JobName,
        /// The lock file.
        file: PathBuf,
    },
    /// A writer's call with the lock of another job.
    #[error("the lock does not belong to job \"{0}\"")]
    WrongLock(JobName),
    /// 4,294,967,295 images.
    #[error("job \"{0}\" has used all image numbers; continue under another --name")]
    NumbersUsedUp(JobName),
    /// A tag or a pin for an image in memory.
    #[error(
        "image {0} is only in memory, and only a stored image can be pinned or tagged: try again when `rekindle list` shows it as stored"
    )]
    NotStored(ImageId),
    /// The tags of an image cannot be read, and would be lost.
    #[error("{} cannot be read ({why}), so the image counts as pinned; remove the file to remove all tags", .path.display())]
    UnreadableTags {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// More tags than an image may have.
    #[error("image {0} would have more than {most} tags: remove some with `rekindle untag`", most = super::Tags::MOST)]
    TooManyTags(ImageId),
    /// The image went while it was pinned or tagged.
    #[error("image {0} is being removed now: check with `rekindle list` whether it still exists, and try again")]
    RemovedMeanwhile(ImageId),
    /// Somebody has pinned the image that was to go.
    #[error("image {0} is pinned; `rekindle unpin` removes the pin")]
    Pinned(ImageId),
    /// Reading failed.
    #[error("cannot read {}{}", .path.display(), Failing(.source))]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Creating a folder failed.
    #[error("cannot create {}{}", .path.display(), Failing(.source))]
    Create {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Writing failed.
    #[error("cannot write {}{}", .path.display(), Failing(.source))]
    Write {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Locking failed, not because of another holder.
    #[error("cannot lock {}; the file system must support flock", .path.display())]
    Lock {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Removing failed; what remains is removed at the next start.
    #[error("cannot remove {}{}", .path.display(), Failing(.source))]
    Remove {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The record of a job is damaged.
    #[error("{} is damaged; the images are not affected: remove the file to continue without it", .path.display())]
    ParseRecord {
        /// The file.
        path: PathBuf,
        /// Where and how.
        source: serde_json::Error,
    },
    /// With the key only we could have written it, and it has no valid signature.
    #[error("{} {source}", .path.display())]
    UntrustedRecord {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Untrusted,
    },
    /// The record of a job was written by a newer rekindle.
    #[error("{} has version {version}, which this rekindle cannot read; use the rekindle that wrote it, or a newer one", .path.display())]
    NewerRecord {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

/// Enough to recognise one, not so many that the message is lost.
const LISTED: usize = 12;

fn naming<T: ToString>(what: &str, all: &[T]) -> String {
    if all.is_empty() {
        return format!("there are no {what}");
    }
    let listed = all.iter().take(LISTED).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let rest = match all.len().saturating_sub(LISTED) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    format!("{what} are {listed}{rest}")
}

fn supervisor(holder: Option<&Holder>) -> String {
    holder.map_or_else(|| "another process".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_base::chain;

    #[test]
    fn a_failing_disk_is_told_as_that_with_the_file_and_what_to_do() {
        let eio = || io::Error::from_raw_os_error(libc::EIO);
        let path = Path::new("/s/j/packs/x.pack");
        let told = [
            chain(&failed("write", path)(eio())),
            chain(&Error::Read { path: path.to_owned(), source: eio() }),
            chain(&Error::Write { path: path.to_owned(), source: eio() }),
            chain(&super::super::format::ReadError::Read { path: path.to_owned(), source: eio() }),
        ];
        for text in told {
            assert!(text.contains("/s/j/packs/x.pack, because the disk is failing (see the kernel log"), "{text}");
            assert!(text.ends_with("Input/output error (os error 5)"), "{text}");
        }
        let other = chain(&failed("write", path)(io::ErrorKind::PermissionDenied.into()));
        assert!(!other.contains("disk"), "{other}");
    }
}
