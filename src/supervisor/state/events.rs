//! Inputs and outputs of a step.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::policy::{Failure, Images, Mark, Occupied, StartPoint};
use rekindle_engine::snapshot;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;
use rekindle_store::manifest::Reason;

/// Who requested the stop, which decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A signal: exit code 128 plus its number.
    Signal(i32),
    /// A scheduler, to queue the job again: exit code 75.
    Requeue,
}

impl Stop {
    /// Whether a job that exits with 0 while it is being stopped may have been told to. Schedulers send SIGTERM to all
    /// processes, and many programs then exit with 0 before their work is done; USR2 is for rekindle only.
    pub(crate) fn may_reach_the_job(self) -> bool {
        matches!(self, Stop::Signal(_))
    }
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The job exited with 0.
    Completed,
    /// Stopped on request; it can be continued.
    Stopped(Stop),
    /// Stopped on request, but the last image could not be stored: it is lost if the machine restarts.
    StoppedInMemory {
        /// Who requested it.
        stop: Stop,
        image: ImageId,
    },
    /// The job cannot be started here at all.
    Impossible {
        /// The reason, as text.
        why: String,
        /// What has to change.
        obstacle: Obstacle,
    },
    /// The job was given up.
    Failed {
        /// The reason, as text.
        why: String,
        /// How the job ended last, if it ended.
        last: Option<Ended>,
    },
    /// There are images, but none can be used; the job is not started from the beginning over them.
    NoUsableImage {
        /// The reason, as text.
        why: String,
    },
}

impl Finish {
    /// Whether the scheduler is to queue the job again.
    #[must_use]
    pub(crate) fn is_queued_again(&self) -> bool {
        matches!(self, Finish::Stopped(Stop::Requeue) | Finish::StoppedInMemory { stop: Stop::Requeue, .. })
    }

    /// The same, if this image was not stored.
    #[must_use]
    pub(crate) fn with_left_in_memory(self, image: Option<ImageId>) -> Finish {
        match (image, self) {
            (Some(image), Finish::Stopped(stop)) => Finish::StoppedInMemory { stop, image },
            (_, finish) => finish,
        }
    }
}

/// Why a run ended with [`Finish::NoUsableImage`], as text.
pub(crate) const NO_USABLE_IMAGE: &str = "the run has images and none can be used, and restart.cold-start does not allow a \
    start from the beginning";

/// A decision by a rule or the watch of a job, which replaces that of the policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Restart the job, whatever its exit code; it counts as a failure.
    Restart,
    /// It hangs. It has made no progress since these images were taken or restored, so a restart passes over them.
    Hung(BTreeSet<ImageId>),
    /// One of its processes was killed by this signal: it goes back to its newest image.
    Died(i32),
    /// Give up.
    GiveUp {
        /// The reason, as text.
        why: String,
    },
    /// Stop the run, to be queued again.
    Stop,
    /// Go back to this image.
    Rewind(ImageId),
}

impl Verdict {
    /// Why the job did not end well, in words.
    #[must_use]
    pub(crate) fn in_words(&self) -> String {
        match self {
            Verdict::Died(signal) => format!("one of its processes was killed by {}", Ended::Signal(*signal)),
            Verdict::GiveUp { why } => why.clone(),
            Verdict::Hung(_) => "it hangs".into(),
            Verdict::Restart => "it hangs, or a rule matched".into(),
            Verdict::Stop | Verdict::Rewind(_) => "a rule matched".into(),
        }
    }
}

/// An input of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The job runs.
    Started,
    /// An image was not restored.
    ImageFailed {
        image: ImageId,
        failure: Failure,
        /// The images to continue from.
        images: Images,
    },
    /// The start failed, and no image is to blame.
    StartFailed {
        /// The reason, as text.
        why: String,
    },
    /// The start failed because the store could not be read.
    StoreAway {
        /// The reason, as text.
        why: String,
    },
    /// The start failed and always will: the command is wrong.
    Impossible {
        /// The reason, as text.
        why: String,
        /// What has to change.
        obstacle: Obstacle,
    },
    /// The job ended.
    Ended {
        /// How it ended.
        ended: Ended,
        /// The images to continue from.
        images: Images,
    },
    /// A snapshot was taken.
    SnapshotTaken {
        /// How long the job was frozen for it.
        freeze: Duration,
    },
    /// An image is being stored.
    PersistBegan,
    /// It is stored, after this time; `None` if that failed.
    PersistEnded(Option<Duration>),
    /// A snapshot failed; the job continues, unless it is lost.
    SnapshotFailed(Harm),
    /// A snapshot failed for a temporary reason; the job continues.
    SnapshotMissed,
    /// Take a snapshot now.
    SnapshotNow(Reason),
    /// Take a snapshot, then end the job until it is resumed.
    Suspend,
    /// Resume a suspended job.
    Resume,
    /// The job blocks snapshots until then. Admitted by [`Wish::Hold`](super::Wish::Hold), or an earlier time than
    /// before.
    Hold(Instant),
    /// The job no longer blocks snapshots.
    Release,
    /// End the job and start it from this image. This was requested, so it is no failure.
    Rewind { image: ImageId },
    /// End the running job, for this decision. It is no request: a requested stop or rewind has priority.
    Condemn(Verdict),
    /// The decision about the end that is reported next.
    Judged(Verdict),
    /// The end that is reported next is not the image's fault: lack of memory, a GPU that failed.
    Excused,
    /// The end that is reported next has this reason: a GPU was occupied.
    Outside(Occupied),
    /// The GPUs are quiet, for which [`Action::AwaitQuiet`] asked.
    Quiet,
    /// Take a final snapshot within `snapshot.grace`, then stop.
    Stop(Stop),
    /// Take a final snapshot until then, then stop.
    StopBy(Stop, Instant),
    /// Stop at once.
    StopNow(Stop),
    /// The group orders the start of the job.
    Launch(StartPoint),
    /// The group orders the end of the job.
    End,
    /// This process was stopped for a while, and the job probably with it.
    WasStopped,
    /// What the group does has changed.
    Group(Standing),
    /// The group's run is over.
    Over(Finish),
    /// A time that [`Machine::deadline`](super::Machine::deadline) named may have come.
    Tick,
}

impl Event {
    /// The image of a start was lost while the start waited: with the memory that it was in, or because it was
    /// replaced.
    #[must_use]
    pub(crate) fn gone(image: ImageId, images: Images) -> Event {
        Event::ImageFailed { image, failure: Failure::NotNow("it no longer exists".into()), images }
    }

    /// The event for a failed snapshot.
    #[must_use]
    pub(crate) fn not_taken(error: &snapshot::Error) -> Event {
        match (error.job_is_lost(), error.may_pass()) {
            (true, _) => Event::SnapshotFailed(Harm::Lost),
            (false, true) => Event::SnapshotMissed,
            (false, false) => Event::SnapshotFailed(Harm::None),
        }
    }
}

/// What an operation that ended did to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Harm {
    /// Nothing.
    None,
    /// It cannot continue.
    Lost,
}

/// An output of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Launch or restore.
    Start(StartPoint),
    /// Take a snapshot.
    Snapshot(Reason),
    /// Cancel the snapshot or the start in progress.
    Cancel,
    /// Ask the job to end (SIGTERM).
    Terminate,
    /// Kill it.
    Kill,
    /// Mark this image as bad, and report it.
    Mark(Mark),
    /// Report that this image was not restored, and is not marked.
    NotRestored {
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// Find out when no process of the dead is on a GPU, and the driver tells no new faults. The start that is announced next
    /// waits for it.
    AwaitQuiet,
    /// Report why it is tried again, and when.
    Announce {
        from: StartPoint,
        /// After this long.
        after: Duration,
    },
    /// The last action.
    Finish(Finish),
}

/// What has to change before a job can be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The machine, or the command.
    Machine,
    /// The configuration.
    Configuration,
}

/// What the group does with its job, beside its orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It runs the job, or gathers to start it.
    Usual,
    /// It takes a snapshot, to suspend the job.
    Suspending,
    /// It ends the job until it is resumed from here.
    Suspended(StartPoint),
    /// It takes a last snapshot, and ends the run.
    Stopping,
}
