//! The job of a member, as its own supervisor sees it, and what of that is reported.

use crate::documents::{Ending, Part, State};
use crate::ids::Number;
use crate::reasons::SnapshotRefusal;

/// The job of this member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Job {
    None,
    Starting,
    Ready,
    Running,
    /// Runs, after it did not take part in this snapshot.
    Refused(Number, SnapshotRefusal),
    Preparing(Number),
    Locked(Number),
    Pulling(Number),
    Quiet(Number),
    Dumping(Number),
    Dumped(Number, Part),
    Aborting(Number),
    /// It was told to end.
    Ending,
    Over(Ending),
}

impl Job {
    pub(crate) fn exists(&self) -> bool {
        !matches!(self, Job::None | Job::Over(_))
    }

    /// The snapshot in progress.
    pub(crate) fn snapshot(&self) -> Option<Number> {
        match self {
            Job::Preparing(number) | Job::Locked(number) | Job::Pulling(number) => Some(*number),
            Job::Quiet(number) | Job::Dumping(number) | Job::Dumped(number, _) => Some(*number),
            _ => None,
        }
    }

    /// Whether a snapshot is in progress, or is being undone: its processes may be locked or frozen.
    pub(crate) fn is_in_snapshot(&self) -> bool {
        self.snapshot().is_some() || matches!(self, Job::Aborting(_))
    }

    pub(crate) fn state(&self) -> State {
        match self {
            Job::None => State::Idle,
            Job::Starting => State::Starting,
            Job::Ready => State::Ready,
            Job::Running | Job::Preparing(_) => State::Running,
            Job::Refused(number, why) => State::Refused(*number, why.clone()),
            Job::Locked(number) | Job::Pulling(number) => State::Locked(*number),
            Job::Quiet(number) | Job::Dumping(number) | Job::Aborting(number) => State::Quiet(*number),
            Job::Dumped(number, part) => State::Dumped(*number, part.clone()),
            Job::Ending => State::Ending,
            Job::Over(ending) => State::Over(ending.clone()),
        }
    }

    /// Whether this is [`Job::state`].
    pub(crate) fn is_reported_as(&self, state: &State) -> bool {
        match (self, state) {
            (Job::Refused(number, why), State::Refused(of, written)) => (number, why) == (of, written),
            (Job::Dumped(number, part), State::Dumped(of, written)) => (number, part) == (of, written),
            (Job::Over(ending), State::Over(written)) => ending == written,
            (Job::Refused(..) | Job::Dumped(..) | Job::Over(_), _) => false,
            // The others are made without a copy.
            _ => self.state() == *state,
        }
    }
}
