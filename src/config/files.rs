//! `[files]`: which files are part of the job's state.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[files]`: which files are part of the job's state.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Files {
    /// Absolute folders whose files are all captured and restored, including those that the job has closed.
    pub(crate) track: Vec<PathBuf>,
}
