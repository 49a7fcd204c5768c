//! The states of a job.

use std::time::Instant;

use super::events::Stop;
use crate::policy::StartPoint;
use crate::published::JobState;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

/// The state of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    /// There is no job: the group has not ordered its start.
    Idle,
    /// It is being launched or restored.
    Starting {
        from: StartPoint,
        /// What was requested in the meantime; never a suspension.
        then: Option<Then>,
    },
    /// It runs.
    Running(Life),
    /// It runs, or is frozen, while a snapshot is taken.
    Snapshotting {
        life: Life,
        /// What to do afterwards.
        then: Option<Then>,
        /// It ended in the meantime.
        ended: Option<Ended>,
    },
    /// It was told to end.
    Ending {
        /// The reason.
        stop: Ending,
        /// When to kill it.
        deadline: Option<Instant>,
        life: Life,
    },
    /// It waits for the next try.
    Waiting {
        from: StartPoint,
        /// Until this time.
        until: Instant,
    },
    /// It has released its resources, and waits to be resumed.
    Suspended { from: StartPoint },
    /// The run is over.
    Done,
}

/// A request that waits for the end of the operation in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// A stop, with its time limit.
    Stop(Stop, Instant),
    /// Suspend the job.
    Suspend,
    /// Go back to this image.
    Rewind(ImageId),
    /// End the job: the group ordered it.
    End,
}

/// Why a job was told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// A stop was requested.
    Stop(Stop),
    /// It cannot continue after a snapshot.
    Lost,
    /// It is being suspended, and its image was taken.
    Suspend,
    /// It is rewound to this image.
    Rewind(ImageId),
    /// It hangs, or a rule matched.
    Condemned,
    /// The group ordered it.
    Ordered,
}

/// One life of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Life {
    /// What it started from.
    pub(crate) from: StartPoint,
    /// When it started.
    pub(crate) since: Instant,
    /// When the next snapshot is due.
    pub(crate) next: Option<Instant>,
    /// Number of snapshots that failed in a row.
    pub(crate) failures: u32,
    /// Number of snapshots that failed temporarily since the last successful one.
    pub(crate) missed: u32,
}

impl State {
    /// The image that the job goes to once the start under way is over, because a rewind was requested meanwhile.
    #[must_use]
    pub(crate) fn rewinds_next(&self) -> Option<ImageId> {
        match self {
            State::Starting { then: Some(Then::Rewind(image)), .. } => Some(*image),
            _ => None,
        }
    }

    /// When [`Event::Tick`](super::Event::Tick) is needed.
    #[must_use]
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self {
            State::Running(life) => life.next,
            State::Snapshotting { then: Some(Then::Stop(_, at)), .. } => Some(*at),
            State::Ending { deadline, .. } => *deadline,
            State::Waiting { until, .. } => Some(*until),
            State::Snapshotting { .. }
            | State::Starting { .. }
            | State::Suspended { .. }
            | State::Idle
            | State::Done => None,
        }
    }

    /// Whether the reaction to an end depends on the existing images.
    pub(in crate::supervisor) fn needs_images(&self) -> bool {
        match self {
            State::Running(_) => true,
            State::Ending { stop, .. } => !matches!(stop, Ending::Stop(_) | Ending::Rewind(_)),
            // An end is postponed while a snapshot is taken.
            State::Starting { .. } | State::Snapshotting { .. } | State::Waiting { .. } => false,
            State::Suspended { .. } | State::Idle | State::Done => false,
        }
    }

    /// The life of the job that has not ended yet.
    pub(in crate::supervisor) fn life(&self) -> Option<&Life> {
        match self {
            State::Running(life) | State::Snapshotting { life, .. } | State::Ending { life, .. } => Some(life),
            State::Starting { .. } | State::Waiting { .. } | State::Suspended { .. } | State::Idle | State::Done => {
                None
            }
        }
    }

    /// Whether a stop was requested, or the run is over.
    #[must_use]
    pub(super) fn is_stopping(&self) -> bool {
        match self {
            State::Starting { then, .. } | State::Snapshotting { then, .. } => matches!(then, Some(Then::Stop(..))),
            State::Ending { stop, .. } => matches!(stop, Ending::Stop(_)),
            State::Running(_) | State::Waiting { .. } | State::Suspended { .. } | State::Idle => false,
            State::Done => true,
        }
    }

    /// The state as it is published.
    #[must_use]
    pub(crate) fn published(&self) -> JobState {
        match self {
            State::Starting { from: StartPoint::Cold, .. } => JobState::Starting,
            State::Starting { from: StartPoint::Image(_), .. } => JobState::Restoring,
            State::Running(_) => JobState::Running,
            State::Snapshotting { .. } => JobState::Snapshotting,
            State::Ending { stop: Ending::Suspend, .. } => JobState::Suspending,
            State::Ending { stop: Ending::Rewind(_), .. } => JobState::Rewinding,
            State::Ending { .. } => JobState::Stopping,
            State::Waiting { .. } | State::Idle => JobState::Waiting,
            State::Suspended { .. } => JobState::Suspended,
            State::Done => JobState::Done,
        }
    }

    /// The same as text.
    #[must_use]
    pub(crate) fn name(&self) -> &'static str {
        self.published().as_str()
    }
}
