//! The state of a job as lists and the report show it: also that of a job without a supervisor.

use std::fmt;

use serde::{Serialize, Serializer};

use super::{JobState, Published};
use rekindle_store::Outcome;

/// What its supervisor does with a job, or how its last run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShownState {
    /// It has a supervisor.
    Live(JobState),
    /// It has not run yet.
    New,
    /// Its supervisor was killed.
    Interrupted,
    /// The job exited with 0.
    Completed,
    /// It was given up.
    Failed,
    /// It was stopped, to be continued.
    Stopped,
    /// Its files cannot be read.
    #[default]
    Unreadable,
}

/// What a state means for those who look at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    /// It runs, or has reached its end.
    Good,
    /// Somebody has to look at it.
    Bad,
    /// Nothing happens.
    Idle,
    /// It is on its way to another state.
    Passing,
}

impl ShownState {
    pub(crate) fn of(live: Option<&Published>, last: Option<&Outcome>) -> ShownState {
        match (live, last) {
            (Some(live), _) => ShownState::Live(live.state),
            (None, Some(Outcome::Running)) => ShownState::Interrupted,
            (None, Some(Outcome::Completed)) => ShownState::Completed,
            (None, Some(Outcome::Failed { .. })) => ShownState::Failed,
            (None, Some(Outcome::Stopped)) => ShownState::Stopped,
            (None, None) => ShownState::New,
        }
    }

    pub(crate) fn condition(self) -> Condition {
        match self {
            ShownState::Live(JobState::Running | JobState::Snapshotting) | ShownState::Completed => Condition::Good,
            ShownState::Failed | ShownState::Interrupted | ShownState::Unreadable => Condition::Bad,
            ShownState::Stopped | ShownState::New => Condition::Idle,
            ShownState::Live(_) => Condition::Passing,
        }
    }

    /// The name in tables and in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ShownState::Live(state) => state.as_str(),
            ShownState::New => "new",
            ShownState::Interrupted => "interrupted",
            ShownState::Completed => "completed",
            ShownState::Failed => "failed",
            ShownState::Stopped => "stopped",
            ShownState::Unreadable => "?",
        }
    }
}

impl fmt::Display for ShownState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for ShownState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
