//! What goes into a step and what comes out of it.

use std::time::{Duration, Instant};

use crate::policy::{Failure, Images, Mark, StartPoint};
use rekindle_engine::snapshot;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;
use rekindle_store::manifest::Reason;

/// Who asked for the end, which decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A signal: 128 plus its number.
    Signal(i32),
    /// To be queued again: 75.
    Requeue,
}

/// How it all ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The job exited with 0.
    Completed,
    /// Stopped as asked; it can be continued.
    Stopped(Stop),
    /// The same, and its last image is lost if the machine restarts: it could not be stored.
    StoppedInMemory {
        /// Who asked for it.
        stop: Stop,
        /// The image.
        image: ImageId,
    },
    /// It cannot be started here at all.
    Impossible {
        /// The reason, as text.
        why: String,
        /// What has to change.
        obstacle: Obstacle,
    },
    /// Given up.
    Failed {
        /// The reason, as text.
        why: String,
        /// How the job ended last, if it was the job that ended.
        last: Option<Ended>,
    },
    /// There are images and none can be used; the job is not started from nothing over them.
    NoUsableImage {
        /// The same as text.
        why: String,
    },
}

impl Finish {
    /// The same, if this image was not stored.
    #[must_use]
    pub fn with_left_in_memory(self, image: Option<ImageId>) -> Finish {
        match (image, self) {
            (Some(image), Finish::Stopped(stop)) => Finish::StoppedInMemory { stop, image },
            (_, finish) => finish,
        }
    }
}

/// Why a run ended with [`Finish::NoUsableImage`], as text.
pub const NO_USABLE_IMAGE: &str = "the run has images and none can be used, and restart.cold-start does not allow a \
    start from the beginning";

/// What a rule or the watch of a job decides in place of the policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is restarted, whatever its exit code; it counts as a failure.
    Restart,
    /// It is given up.
    GiveUp {
        /// The reason, as text.
        why: String,
    },
    /// It is left as it is, to be queued again.
    Stop,
    /// It goes back to this image.
    Rewind(ImageId),
}

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The job runs.
    Started,
    /// An image was not restored.
    ImageFailed {
        /// Which.
        image: ImageId,
        /// Why.
        failure: Failure,
        /// The images to continue from.
        images: Images,
    },
    /// It could not be started, by no fault of an image.
    StartFailed {
        /// The reason, as text.
        why: String,
    },
    /// It could not be started and never will: the command is wrong.
    Impossible {
        /// The reason, as text.
        why: String,
        /// What has to change.
        obstacle: Obstacle,
    },
    /// The job ended.
    Ended {
        /// How.
        ended: Ended,
        /// The images to continue from.
        images: Images,
    },
    /// A snapshot is in a slot.
    SnapshotTaken {
        /// How long the job was frozen for it.
        freeze: Duration,
    },
    /// An image is being stored.
    PersistBegan,
    /// It is stored, after so long, or it failed.
    PersistEnded(Option<Duration>),
    /// A snapshot failed; the job runs on, unless it is lost.
    SnapshotFailed(Harm),
    /// A snapshot failed for a reason that may be gone in a moment; the job runs on.
    SnapshotMissed,
    /// Take one now.
    SnapshotNow(Reason),
    /// Take one, then end the job until it is called back.
    Suspend,
    /// Call a suspended job back.
    Resume,
    /// The job holds snapshots off until then. Admitted by [`Wish::Hold`](super::Wish::Hold), or an earlier time than before.
    Hold(Instant),
    /// It does not any more.
    Release,
    /// End the job and start it from this image. It was requested, so it is no failure.
    Rewind {
        /// Which.
        image: ImageId,
    },
    /// End the running job, for this. It is no request: a requested stop or rewind comes first.
    Condemn(Verdict),
    /// What the end that is reported next leads to.
    Judged(Verdict),
    /// The end that is reported next has a reason that is no fault of an image: want of memory, a GPU that failed.
    Excused,
    /// Take a last one within `snapshot.grace`, then stop.
    Stop(Stop),
    /// Take a last one until then, then stop.
    StopBy(Stop, Instant),
    /// Stop at once.
    StopNow(Stop),
    /// A time that [`Machine::deadline`](super::Machine::deadline) named may have come.
    Tick,
}

impl Event {
    /// The image of a start went while it waited for its turn: with the memory that it was in, or another came in its place.
    #[must_use]
    pub fn gone(image: ImageId, images: Images) -> Event {
        Event::ImageFailed { image, failure: Failure::NotNow("it no longer exists".into()), images }
    }

    /// What a snapshot that failed comes to.
    #[must_use]
    pub fn not_taken(error: &snapshot::Error) -> Event {
        match (error.job_is_lost(), error.may_pass()) {
            (true, _) => Event::SnapshotFailed(Harm::Lost),
            (false, true) => Event::SnapshotMissed,
            (false, false) => Event::SnapshotFailed(Harm::None),
        }
    }
}

/// What something that ended did to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// None.
    None,
    /// It cannot continue.
    Lost,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Launch or restore.
    Start(StartPoint),
    /// Take a snapshot.
    Snapshot(Reason),
    /// Give up the snapshot or the start that is under way.
    Cancel,
    /// Ask the job to end (SIGTERM).
    Terminate,
    /// End it.
    Kill,
    /// Note that this image is of no use, and say so.
    Mark(Mark),
    /// Say that this image was not restored, and is not marked.
    NotRestored {
        /// Which.
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// Say why it is tried again, and when.
    Announce {
        /// From what.
        from: StartPoint,
        /// After this long.
        after: Duration,
    },
    /// The last action.
    Finish(Finish),
}

/// What has to change before a job can be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// The machine, or the command.
    Machine,
    /// The configuration.
    Configuration,
}
