//! `[hooks]` and `[metrics]`: how events of a job are reported.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::value::duration;

/// `[hooks]`: commands that are started. Each is a program and its arguments, without a shell;
/// an empty list means none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Hooks {
    /// Before the job is frozen.
    pub(crate) before_snapshot: Vec<String>,
    /// After the freeze, or after a snapshot that failed.
    pub(crate) after_snapshot: Vec<String>,
    /// Before an image is restored.
    pub(crate) before_restore: Vec<String>,
    /// When the job runs again from an image.
    pub(crate) after_restore: Vec<String>,
    /// When something failed.
    pub(crate) on_failure: Vec<String>,
    /// When the job has completed.
    pub(crate) on_completion: Vec<String>,
    /// Time limit for a command.
    #[serde(with = "duration")]
    pub(crate) timeout: Duration,
    /// What happens if a command before a snapshot or restore fails.
    pub(crate) on_error: OnError,
}

impl Default for Hooks {
    fn default() -> Hooks {
        Hooks {
            before_snapshot: Vec::new(),
            after_snapshot: Vec::new(),
            before_restore: Vec::new(),
            after_restore: Vec::new(),
            on_failure: Vec::new(),
            on_completion: Vec::new(),
            timeout: Duration::from_secs(30),
            on_error: OnError::default(),
        }
    }
}

/// `hooks.on-error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnError {
    /// It is reported, and the snapshot or restore is done.
    #[default]
    Ignore,
    /// It is reported, and the snapshot or restore is not done.
    Refuse,
}

/// `[metrics]`: metrics for Prometheus.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Metrics {
    /// Absolute path of a file that is replaced when the metrics change.
    pub(crate) textfile: Option<PathBuf>,
    /// Address and port that answers `GET /metrics`.
    pub(crate) listen: Option<SocketAddr>,
}

/// `log.format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// JSON objects, one per line.
    Json,
}
