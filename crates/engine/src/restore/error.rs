//! Why an image was not restored, and what the cause is.

use std::path::PathBuf;

use super::compat::{self, Difference};
use crate::launch::world;
use crate::parts::access::{Fault, Refused};
use crate::parts::files::rollback::RollbackError;
use crate::parts::gpu::put_back as gpu;
use crate::parts::kept::put_back as kept;
use crate::steps::Panicked;
use rekindle_criu as criu;
use rekindle_cuda::sharing;
use rekindle_os::beneath::Unexpected;
use rekindle_os::spawn::Ended;

/// Why an image was not restored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image has no readable manifest.
    #[error("image {0} cannot be used: its manifest is damaged")]
    NoManifest(rekindle_store::ImageId),
    /// Files of the image differ from what was written.
    #[error("image {id} is damaged: {what}")]
    Damaged {
        /// The image.
        id: rekindle_store::ImageId,
        /// The parts.
        what: String,
    },
    /// Files of the image cannot be read from the disk.
    #[error("image {id} cannot be read: {what}")]
    Unread {
        /// The image.
        id: rekindle_store::ImageId,
        /// The parts.
        what: String,
    },
    /// The image does not fit this machine; nothing was started.
    #[error("image {id} cannot be restored on this machine: {}", compat::summary(differences))]
    Misfit {
        /// The image.
        id: rekindle_store::ImageId,
        /// What differs, the worst first.
        differences: Vec<Difference>,
    },
    /// The image was taken of another user than the job is to run as; nothing was started.
    #[error(transparent)]
    OtherUser(#[from] super::OtherUser),
    /// A restored process has rights or files that the job must not have; it did not run.
    #[error("image {id} is refused, and none of it has run: {why}")]
    Refused {
        /// The image.
        id: rekindle_store::ImageId,
        /// What was found.
        #[source]
        why: Refused,
    },
    /// The GPUs that it needs are in use.
    #[error("image {id} cannot be restored now")]
    Busy {
        /// The image.
        id: rekindle_store::ImageId,
        /// What the image needs and what is available.
        #[source]
        why: crate::parts::gpu::placement::NoPlace,
    },
    /// It could not be unpacked from the store, for a reason that is not the image's fault.
    #[error(transparent)]
    Unpack(rekindle_store::unpack::Error),
    /// Writing the unpacked image to memory failed.
    #[error(transparent)]
    Staging(rekindle_store::staging::Error),
    /// The image asks for a file at a path where rekindle creates none; nothing was done.
    #[error("the image would create {}, which {why}", path.display())]
    NotOurs {
        /// The path.
        path: PathBuf,
        /// The rule that it breaks.
        why: String,
    },
    /// A file of rekindle that the job runs could not be written.
    #[error("cannot put {} back", path.display())]
    Recreate {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// A process could not take a lock on a file again.
    #[error(transparent)]
    Lock(#[from] super::LockError),
    /// The restored tasks are not what they were, or it is not known what they were.
    #[error(transparent)]
    Compared(#[from] super::CompareError),
    /// Device memory could not be put where the driver looks for it.
    #[error(transparent)]
    Landing(#[from] super::LandingError),
    /// A file of the job could not be put back.
    #[error(transparent)]
    Rollback(#[from] RollbackError),
    /// CRIU's plugin could not be put in its place.
    #[error(transparent)]
    Plugin(#[from] crate::launch::plugin::Error),
    /// The job's output cannot be written.
    #[error(transparent)]
    Output(#[from] crate::launch::output::Error),
    /// A file of the job's log folder cannot be given to it.
    #[error("cannot open {} for the job", path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// There is no folder for rekindle's own files at the place that the image names.
    #[error(transparent)]
    Work(#[from] crate::launch::work::Error),
    /// The folder of CRIU's images cannot be given to CRIU.
    #[error(transparent)]
    Images(#[from] crate::snapshot::opened::Error),
    /// The world could not be made.
    #[error(transparent)]
    World(#[from] world::Error),
    /// CRIU could not restore the tree.
    #[error("{0}")]
    Criu(#[from] criu::RunError),
    /// The job's folder cannot be used.
    #[error(transparent)]
    Store(#[from] rekindle_store::Error),
    /// The GPUs were not restored.
    #[error(transparent)]
    Gpu(gpu::Error),
    /// A fault of rekindle.
    #[error(transparent)]
    Panicked(#[from] Panicked),
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl From<gpu::Error> for Error {
    fn from(error: gpu::Error) -> Error {
        match error {
            gpu::Error::Cancelled => Error::Cancelled,
            other => Error::Gpu(other),
        }
    }
}

const KILLED: Ended = Ended::Signal(libc::SIGKILL);

/// The cause of a failed restore, which decides whether the image is skipped from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Files of the image differ from what was written.
    Damaged,
    /// The image, as far as is known: it was refused for a reason in it.
    Image,
    /// Unknown, or somebody outside: this is no evidence against the image. After some attempts an older one is used.
    Unknown,
    /// It took too long, which says nothing about the image; another try would take as long.
    Slow,
    /// The disk, or the replica of the damaged content, does not deliver what the image needs. Another image may not
    /// need it. As far as is known, this image is not damaged permanently.
    Unread,
    /// The machine: another image would fail too, and this one is still good.
    Machine,
    /// Files that the job had are missing or changed: an older image may not need them.
    Files,
    /// The image does not fit this machine: another try would not help, and another image would lose work without the
    /// user's consent.
    Here,
    /// The image does not fit the configuration; like [`Blame::Here`], it is still good.
    Configuration,
    /// No fault: it was cancelled.
    Nobody,
}

impl Error {
    /// The cause of this error.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Error::NoManifest(_) | Error::Damaged { .. } => Blame::Damaged,
            Error::Criu(criu::RunError::Image(_)) => Blame::Damaged,
            Error::Criu(criu::RunError::Start(_) | criu::RunError::Talk { .. }) => Blame::Machine,
            Error::Criu(criu::RunError::Cancelled) | Error::Cancelled => Blame::Nobody,
            Error::Misfit { .. } | Error::NotOurs { .. } => Blame::Here,
            Error::OtherUser(_) => Blame::Configuration,
            // Others changed the store: another attempt finds the same, and somebody must look at it.
            Error::Unpack(_)
            | Error::Store(_)
            | Error::Staging(_)
            | Error::Recreate { .. }
            | Error::Output(_)
            | Error::Log { .. }
            | Error::Images(_)
                if self.is_about_others() =>
            {
                Blame::Configuration
            }
            Error::Refused { why, .. } => match why.fault() {
                Fault::Image => Blame::Image,
                Fault::Files => Blame::Files,
                Fault::Configuration => Blame::Configuration,
                Fault::Ours => Blame::Machine,
            },
            Error::Compared(super::CompareError::NoRecord { .. }) => Blame::Configuration,
            // The same comes of each attempt with this kernel and this CRIU, which may be to blame; an older image may be
            // right.
            Error::Compared(_) => Blame::Unknown,
            // Steps of ours during the restore failed, such as finding the tree or receiving its memory.
            Error::Criu(criu::RunError::Hook { .. }) => Blame::Machine,
            Error::Unread { .. } => Blame::Unread,
            Error::Unpack(error) if error.may_pass() => Blame::Unread,
            // A wrong key stays wrong.
            Error::Unpack(error) if error.is_not_for_us() => Blame::Here,
            // The processes that use the GPUs may end.
            Error::Busy { .. } => Blame::Machine,
            // Another image would fail too with this CRIU.
            Error::Criu(criu::RunError::Unrestricted { .. }) => Blame::Here,
            Error::World(_)
            | Error::Store(_)
            | Error::Plugin(_)
            | Error::Output(_)
            | Error::Log { .. }
            | Error::Work(_)
            | Error::Images(_)
            | Error::Unpack(_)
            | Error::Staging(_)
            | Error::Recreate { .. }
            | Error::Lock(_)
            | Error::Landing(_)
            | Error::Panicked(_) => Blame::Machine,
            // It may be a zombie of the previous life, which pid 1 has not reaped yet.
            Error::Gpu(gpu::Error::NoThread(_)) => Blame::Image,
            // The processes of the image have other memory than it says, or miss some: the same comes of each attempt, and
            // an older image may be right.
            Error::Gpu(gpu::Error::Kept(kept::Error::Other { .. })) => Blame::Unknown,
            Error::Gpu(gpu::Error::Sharing(sharing::Error::Unmanaged { .. } | sharing::Error::Missing { .. })) => {
                Blame::Unknown
            }
            // It may pass, or have its cause in what the image had the driver do.
            Error::Gpu(gpu::Error::Sharing(error)) if error.is_busy() || error.is_refusal() => Blame::Unknown,
            // No driver, no permission, a GPU that is full or missing, a process killed meanwhile: the image cannot
            // cause any of these.
            Error::Gpu(_) => Blame::Machine,
            // By the kernel for lack of memory, or by a user: an older image would not change that.
            Error::Criu(error) if error.says_criu_killed() => Blame::Machine,
            // The same for a task of it. A task that the image has asked to be killed ends this way, too.
            Error::Criu(criu::RunError::TaskDied { ended: KILLED, .. }) => Blame::Unknown,
            Error::Criu(criu::RunError::Refused { log }) if log.says_killed() || log.errors().is_empty() => {
                Blame::Unknown
            }
            // A capability, a seccomp filter, a security module: an older image is denied the same.
            Error::Criu(criu::RunError::Refused { log }) if log.says_denied() => Blame::Machine,
            Error::Criu(criu::RunError::Lost { .. }) => Blame::Unknown,
            Error::Criu(criu::RunError::Timeout { .. }) => Blame::Slow,
            // Another program uses the port and may release it; the job's own dead connections were closed before.
            Error::Criu(criu::RunError::Refused { log }) if log.says_port_taken() => Blame::Machine,
            Error::Rollback(error) if error.is_the_machines() => Blame::Machine,
            Error::Rollback(RollbackError::Io { .. }) => Blame::Unknown,
            // A user can free space.
            Error::Rollback(RollbackError::NoRoom { .. } | RollbackError::TooMany(_)) => Blame::Machine,
            // A restore of another job may have it there for a moment.
            Error::Rollback(RollbackError::InTheWay(_)) => Blame::Machine,
            // An older image does not have its content either, and would lose work.
            Error::Rollback(
                RollbackError::Changed(_)
                | RollbackError::Protected { .. }
                | RollbackError::NoPlace { .. }
                | RollbackError::NoCopy { .. }
                | RollbackError::Unmovable { .. }
                | RollbackError::Mounted(_),
            ) => Blame::Here,
            Error::Rollback(_) => Blame::Files,
            Error::Criu(_) => Blame::Image,
        }
    }

    /// Whether something is not what it should be, which others must have put there.
    fn is_about_others(&self) -> bool {
        let mut chain = std::iter::successors(Some(self as &(dyn std::error::Error + 'static)), |error| error.source());
        chain.any(|error| error.downcast_ref().and_then(Unexpected::in_error).is_some())
    }

    /// Whether CRIU was killed from outside, so that the next attempt may succeed at once.
    pub(super) fn says_criu_killed(&self) -> bool {
        matches!(self, Error::Criu(error) if error.says_criu_killed())
    }

    /// Whether the only obstacle to a restore here are files that the job had mapped or open.
    #[must_use]
    pub fn is_about_files(&self) -> bool {
        let Error::Misfit { differences, .. } = self else { return false };
        differences.iter().filter(|difference| difference.is_fatal()).all(Difference::is_a_file)
    }

    /// CRIU's log, if CRIU failed.
    #[must_use]
    pub fn criu_log(&self) -> Option<&criu::Log> {
        match self {
            Error::Criu(error) => error.log(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An older image would lose work, and its CRIU could be killed the same way.
    #[test]
    fn a_killed_criu_does_not_count_against_the_image_and_one_that_crashes_does() {
        let gone = |ended| Error::Criu(criu::RunError::Gone { ended, log: criu::Log::default() });
        let of = |ended| (gone(ended).blame(), gone(ended).says_criu_killed());
        assert_eq!(of(KILLED), (Blame::Machine, true));
        assert_eq!(of(Ended::Signal(libc::SIGSEGV)), (Blame::Image, false));
        assert_eq!(of(Ended::Exit(1)), (Blame::Image, false));
        let task = Error::Criu(criu::RunError::TaskDied { pid: 1, ended: KILLED, log: criu::Log::default() });
        assert_eq!((task.blame(), task.says_criu_killed()), (Blame::Unknown, false));
    }

    #[test]
    fn only_what_the_driver_refuses_because_of_the_image_counts_against_it() {
        let of = |what, code| Error::Gpu(gpu::Error::Sharing(sharing::Error::Driver { pid: 1, what, code })).blame();
        let blame = |code| of("", code);
        assert_eq!(of("import memory again", 3), Blame::Machine, "of a job that was moved");
        for code in [2, 46, 100, 214, 800, 802, 803] {
            assert_eq!(blame(code), Blame::Machine, "{code}");
        }
        for code in [-1, 1, 3, 101, 304, 401, 801, 999] {
            assert_eq!(blame(code), Blame::Unknown, "{code}");
        }
    }

    #[test]
    fn what_others_put_in_the_place_of_a_pack_is_a_matter_of_the_configuration() {
        let of = |source: std::io::Error| {
            let source = rekindle_store::format::ReadError::Read { path: "/s/j/packs/p".into(), source };
            let id = "000001-20261121T104210Z".parse().unwrap();
            let error = Error::Unpack(rekindle_store::unpack::Error::Map { id, source });
            (error.blame(), rekindle_base::chain(&error))
        };
        let fifo = Unexpected { path: "/s/j/packs/p".into(), is: "a FIFO".into(), want: "a regular file" };
        let (blame, told) = of(fifo.into());
        assert_eq!(blame, Blame::Configuration);
        assert!(told.ends_with("/s/j/packs/p is a FIFO, and should be a regular file"), "{told}");
        assert_ne!(of(std::io::ErrorKind::InvalidInput.into()).0, Blame::Configuration);
    }
}
