//! `[files]`: which files of the job are a part of its state.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[files]`: which files of the job are a part of its state.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Files {
    /// Absolute folders whose files are all captured and put back, also those that the job has closed.
    pub track: Vec<PathBuf>,
}
