//! `[control]`: the socket of the supervisor.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[control]`: the socket of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Control {
    /// Absolute folder with one socket for each job.
    pub(crate) directory: PathBuf,
}

impl Default for Control {
    fn default() -> Control {
        Control { directory: "/run/rekindle".into() }
    }
}
