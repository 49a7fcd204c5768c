//! What can go wrong in the store.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::file_error::Failing;
use super::holder::{Holder, STALE};
use super::id::{ImageId, JobName};
use super::tag::Tags;
use super::trust::Untrusted;

/// The result of most calls on the store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call on the store failed. Nothing was deleted, except with [`Error::Remove`].
#[derive(Debug, Error)]
pub enum Error {
    /// The store was opened for reading and does not exist.
    #[error("there is no store at {}; `rekindle run` creates one, --store chooses another", .0.display())]
    NoStore(PathBuf),
    /// There is a file in place of the store or of one of its folders.
    #[error("{} is not a folder; move it away, or choose another store with --store", .0.display())]
    NotAFolder(PathBuf),
    /// We are root and others can write to the folder: they could make us restore any image.
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
    /// There is no job of that name.
    #[error("there is no job \"{name}\" in {}; {}{}", .store.display(), meant(.name, .known), naming("jobs", .known))]
    UnknownJob {
        /// The requested name.
        name: JobName,
        /// The store.
        store: PathBuf,
        /// The existing jobs.
        known: Vec<JobName>,
    },
    /// There is no image of that name.
    #[error("job \"{job}\" has no image \"{wanted}\"{}; {}", counted(.wanted, .known), naming("images", .known))]
    UnknownImage {
        /// The job.
        job: JobName,
        /// The requested text.
        wanted: String,
        /// The existing images, newest first.
        known: Vec<ImageId>,
    },
    /// The job has fewer images to continue from than `-N` counts.
    #[error("job \"{job}\" has no image {wanted}: {}", to_continue_from(*.count))]
    NoNthImage {
        /// The job.
        job: JobName,
        /// The requested text.
        wanted: String,
        /// How many there are.
        count: usize,
    },
    /// The text is the beginning of several names.
    #[error("\"{wanted}\" matches several images of job \"{job}\"; {}", naming("they", .matching))]
    AmbiguousImage {
        /// The job.
        job: JobName,
        /// The requested text.
        wanted: String,
        /// The possible images, newest first.
        matching: Vec<ImageId>,
    },
    /// `latest` was requested of a job without a good image.
    #[error("{}", no_good(job, known))]
    NoGoodImage {
        /// The job.
        job: JobName,
        /// The existing images, newest first.
        known: Vec<ImageId>,
    },
    /// Another process is the job's supervisor.
    #[error("job \"{job}\" is running, and is supervised by {}: `rekindle logs -f {job}` shows it, `rekindle stop {job}` stops it", supervisor(.holder.as_deref()))]
    Supervised {
        /// The job.
        job: JobName,
        /// The holder, if it is known.
        holder: Option<Box<Holder>>,
    },
    /// The lock was free, but the file names a holder that may be alive, on a machine that our locks do not reach.
    #[error(
        "job \"{job}\" may be supervised by {holder}, whose last heartbeat was {} ago; stop that supervisor first. If it is dead, try again when its heartbeat is {} old, or empty {} to continue at once",
        humantime::format_duration(std::time::Duration::from_secs(silent.as_secs())), humantime::format_duration(STALE), .file.display()
    )]
    PerhapsSupervised {
        /// The job.
        job: JobName,
        /// The possible holder.
        holder: Box<Holder>,
        /// The time since its last heartbeat.
        silent: std::time::Duration,
        /// The lock file.
        file: PathBuf,
    },
    /// Another process took over the lock, because we seemed to be dead.
    #[error("job \"{job}\" was taken over by {holder} because this process stalled; it stops here")]
    TakenOver {
        /// The job.
        job: JobName,
        /// The present holder.
        holder: Box<Holder>,
    },
    /// The lock file was replaced by another file than the one that is locked.
    #[error(
        "{} was replaced by another file, so job \"{job}\" may have another supervisor; this process stops here. If `rekindle status` shows no supervisor, run the same command again", .file.display()
    )]
    LockReplaced {
        /// The job.
        job: JobName,
        /// The lock file.
        file: PathBuf,
    },
    /// A writing call used the lock of another job.
    #[error("the lock does not belong to job \"{0}\"")]
    WrongLock(JobName),
    /// The job has had 4,294,967,295 images.
    #[error("job \"{0}\" has used all image numbers; continue under another --name")]
    NumbersUsedUp(JobName),
    /// A tag or a pin was requested for an image in memory.
    #[error(
        "image {0} is only in memory, and only a stored image can be pinned or tagged: try again when `rekindle list` shows it as stored"
    )]
    NotStored(ImageId),
    /// The tags of an image cannot be read, and a change would lose them.
    #[error("{} cannot be read ({why}), so the image counts as pinned; remove the file to remove all tags", .path.display())]
    UnreadableTags {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The image would have too many tags.
    #[error("image {0} would have more than {most} tags: remove some with `rekindle tag --remove`", most = Tags::MOST)]
    TooManyTags(ImageId),
    /// The image was removed while it was being pinned or tagged.
    #[error("image {0} is being removed now: check with `rekindle list` whether it still exists, and try again")]
    RemovedMeanwhile(ImageId),
    /// The image that was to be removed is pinned.
    #[error("image {0} is pinned; `rekindle pin --remove` removes the pin")]
    Pinned(ImageId),
    /// Another process is removing the job of that name.
    #[error("job \"{0}\" is being removed by another process: try again when that has ended")]
    BeingRemoved(JobName),
    /// Reading failed.
    #[error("cannot read {}{}", .path.display(), Failing(.source))]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The store cannot be created.
    #[error("cannot create the store {}: {source}; choose another folder with --store", .path.display())]
    CreateStore {
        /// The folder.
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
    #[error("cannot lock {}: {source}; the file system must support flock", .path.display())]
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
    #[error("{} is damaged: {source}; the images are not affected: remove the file to continue without it", .path.display())]
    ParseRecord {
        /// The file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// There is a key, but the record has no valid signature of it.
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

/// The similarity, from 0 to 1, from which one name is suggested for another.
const ALIKE: f64 = 0.8;

/// Number of names in a message: enough to recognise one, few enough to keep the message readable.
const LISTED: usize = 12;

/// A typing error has a similar name.
fn meant(name: &JobName, known: &[JobName]) -> String {
    let alike = known.iter().map(|known| (known, strsim::jaro_winkler(name.as_str(), known.as_str())));
    let best = alike.filter(|(_, alike)| *alike >= ALIKE).max_by(|a, b| a.1.total_cmp(&b.1));
    best.map_or_else(String::new, |(known, _)| format!("did you mean {known}? "))
}

/// A number is that of an image, which may have been removed; the user may have meant to count back.
fn counted(wanted: &str, known: &[ImageId]) -> String {
    match wanted.parse::<usize>() {
        Ok(n) if !wanted.starts_with('0') && n <= known.len() => {
            let end = match (n % 10, n % 100) {
                (1, 11) | (2, 12) | (3, 13) => "th",
                (1, _) => "st",
                (2, _) => "nd",
                (3, _) => "rd",
                _ => "th",
            };
            format!(" (-{n} is the {n}{end} newest)")
        }
        _ => String::new(),
    }
}

fn no_good(job: &JobName, known: &[ImageId]) -> String {
    match known {
        [] => format!("job \"{job}\" has no image"),
        known => format!(
            "job \"{job}\" has no good image; {}; `rekindle list {job}` shows what is wrong with each",
            naming("images", known)
        ),
    }
}

fn to_continue_from(count: usize) -> String {
    match count {
        0 => "it has no image to continue from".to_owned(),
        1 => "it has 1 image to continue from, -1".to_owned(),
        n => format!("it has {n} images to continue from, -1 (the newest) to -{n}"),
    }
}

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
    use std::path::Path;

    use super::*;
    use crate::file_error::failed;
    use rekindle_base::chain;

    #[test]
    fn a_failing_disk_is_told_as_that_with_the_file_and_what_to_do() {
        let eio = || io::Error::from_raw_os_error(libc::EIO);
        let path = Path::new("/s/j/packs/x.pack");
        let told = [
            chain(&failed("write", path)(eio())),
            chain(&Error::Read { path: path.to_owned(), source: eio() }),
            chain(&Error::Write { path: path.to_owned(), source: eio() }),
            chain(&crate::format::ReadError::Read { path: path.to_owned(), source: eio() }),
        ];
        for text in told {
            assert!(text.contains("/s/j/packs/x.pack, because the disk is failing (see the kernel log"), "{text}");
            assert!(text.ends_with("Input/output error"), "{text}");
        }
        let other = chain(&failed("write", path)(io::ErrorKind::PermissionDenied.into()));
        assert!(!other.contains("disk"), "{other}");
    }
}
