//! Commands and a webhook that are called when something happens to a job.
//!
//! - [`Runner`]: the commands, in the order of what happened, one at a time, on one thread that is not there until it is needed.
//! - [`Gate`]: a command that something waits for, before a snapshot or a restore. It is waited for on the thread of that,
//!   never on the one that owns the job's state, and never while the job stands still.
//! - [`Webhook`]: failures, sent by a thread of its own.
//! - [`Failures`]: which events are one.
//!
//! Nothing here can harm the job: a hook is killed when its time is over, what it writes is read and bounded, and what does not
//! fit in a queue is left out and reported. Hooks run as we do, outside the job's namespaces, with a small environment of their
//! own; they die with us.

mod command;
mod document;
mod failure;
mod runner;
mod webhook;

use serde::{Deserialize, Serialize};

pub(crate) use document::{Context, Document};
pub(crate) use failure::{Failure, Failures};
pub(crate) use runner::{Gate, Passed, Runner};
pub(crate) use webhook::Webhook;

use crate::config::Hooks;

/// When a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Point {
    /// Before the job is frozen.
    BeforeSnapshot,
    /// After it was, or was not.
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
    /// As in the configuration.
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

/// A hook, or the webhook, that did not do what it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    /// Which: the name of a [`Point`], or "webhook".
    pub hook: &'static str,
    /// The reason, as text.
    pub why: String,
}

/// Where reports go.
pub(crate) type Reporter = std::sync::Arc<dyn Fn(Report) + Send + Sync>;

/// A hook did not let something happen (`hooks.on-error = "refuse"`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the hook {hook} has failed, and hooks.on-error is \"refuse\": {why}")]
pub(crate) struct Refused {
    /// Which.
    pub hook: &'static str,
    /// The reason, as text.
    pub why: String,
}
