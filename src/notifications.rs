//! Commands that are called when something happens to a job.
//!
//! - [`Runner`]: runs the commands in the order of the events, one at a time, on one thread that is started when it is
//!   needed.
//! - [`Gate`]: a command that a snapshot or a restore waits for, on its own thread: never on the thread that owns the
//!   job's state, and never while the job is frozen.
//! - [`Failures`]: decides which events are failures.
//!
//! Nothing here can harm the job: a hook is killed after its time limit, its output is read and limited, and events
//! that do not fit in a queue are dropped and reported. Hooks run as our user, outside the job's namespaces, with a
//! small environment; they are killed when we end.

mod command;
mod document;
mod failure;
mod runner;

use serde::{Deserialize, Serialize};

pub(crate) use document::{Context, Document};
pub(crate) use failure::{Failure, Failures};
pub(crate) use runner::{Gate, Passed, Runner};

use crate::config::Hooks;

/// When a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Point {
    /// Before the job is frozen.
    BeforeSnapshot,
    /// After the freeze, or after a snapshot that failed.
    AfterSnapshot,
    /// Before an image is restored.
    BeforeRestore,
    /// When the job runs again from it.
    AfterRestore,
    /// When something failed.
    OnFailure,
    /// When the job has completed.
    OnCompletion,
}

impl Point {
    /// Its name in the configuration.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Point::BeforeSnapshot => "before-snapshot",
            Point::AfterSnapshot => "after-snapshot",
            Point::BeforeRestore => "before-restore",
            Point::AfterRestore => "after-restore",
            Point::OnFailure => "on-failure",
            Point::OnCompletion => "on-completion",
        }
    }

    /// The command for it; empty if there is none.
    #[must_use]
    pub(crate) fn command(self, hooks: &Hooks) -> &[String] {
        match self {
            Point::BeforeSnapshot => &hooks.before_snapshot,
            Point::AfterSnapshot => &hooks.after_snapshot,
            Point::BeforeRestore => &hooks.before_restore,
            Point::AfterRestore => &hooks.after_restore,
            Point::OnFailure => &hooks.on_failure,
            Point::OnCompletion => &hooks.on_completion,
        }
    }
}

/// A hook failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    /// The name of a [`Point`].
    pub(crate) hook: &'static str,
    /// The reason, as text.
    pub(crate) why: String,
}

/// The receiver of reports.
pub(crate) type Reporter = std::sync::Arc<dyn Fn(Report) + Send + Sync>;

/// A hook prevented a snapshot or a restore (`hooks.on-error = "refuse"`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the hook {hook} has failed, and hooks.on-error is \"refuse\": {why}")]
pub(crate) struct Refused {
    pub(crate) hook: &'static str,
    /// The reason, as text.
    pub(crate) why: String,
}
