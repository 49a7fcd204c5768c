//! Which requests each state admits, so that a refused client gets a reason.

use super::{Ending, Machine, Postponed, Standing, State, Then};

/// A request that a client waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// A snapshot.
    Snapshot,
    /// A snapshot, and then the end of the job until it is resumed.
    Suspend,
    /// Resume the job.
    Resume,
    /// Go back to an image.
    Rewind,
    /// Blocks snapshots for some time.
    Hold,
}

const STOPS: &str = "the job is being stopped";
const BACK_SOON: &str = "the job is being restored: try again when it is running";
const HELD_OFF: &str = "a snapshot already waits for the job: try again after it is taken";
const UNDER_WAY: &str = "a snapshot is being taken: try again after it";
const SUSPENDED: &str = "the job is suspended: resume it first";

impl Machine<'_> {
    /// Whether the event for this request would have an effect now, or the requested state is reached already.
    ///
    /// # Errors
    /// The reason, as text.
    pub(crate) fn admits(&self, wish: Wish) -> Result<(), &'static str> {
        match (&self.state, wish) {
            (State::Done, _) => Err("the job is over"),
            _ if self.is_stopping() => Err(STOPS),
            (_, Wish::Rewind) => Ok(()),
            (State::Suspended { .. }, Wish::Suspend | Wish::Resume) => Ok(()),
            (State::Suspended { .. }, Wish::Snapshot) => Err(SUSPENDED),
            (State::Running(_), Wish::Hold) if self.held_off().is_some() => Err(HELD_OFF),
            // The snapshot could freeze the job at any moment.
            (State::Snapshotting { .. }, Wish::Hold) => Err(UNDER_WAY),
            _ if wish == Wish::Suspend && self.is_suspending() => Ok(()),
            (State::Waiting { .. }, Wish::Suspend) => Ok(()),
            (_, Wish::Resume) if self.is_suspending() => Err("the job is being suspended: try again when it is \
                suspended"),
            (_, Wish::Resume) => Err("the job is not suspended"),
            (State::Running(_) | State::Snapshotting { then: None, .. }, _) => Ok(()),
            (_, _) if self.is_suspending() => Err("the job is being suspended"),
            _ => Err(BACK_SOON),
        }
    }

    /// Whether the job will be suspended, unless a snapshot fails.
    #[must_use]
    pub(crate) fn is_suspending(&self) -> bool {
        if let Some(standing) = self.led {
            return matches!(standing, Standing::Suspending | Standing::Suspended(_)) && self.state.life().is_some();
        }
        let waits = |postponed: Postponed| postponed.then == Some(Then::Suspend);
        match &self.state {
            State::Running(_) => self.postponed.is_some_and(waits),
            State::Snapshotting { then: Some(Then::Suspend), .. } | State::Ending { stop: Ending::Suspend, .. } => true,
            State::Snapshotting { then: None, .. } => self.postponed.is_some_and(waits),
            _ => false,
        }
    }
}
