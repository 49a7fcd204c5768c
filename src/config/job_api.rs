//! `[job-api]`: requests of a job to its supervisor.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::value::duration;

/// `[job-api]`: requests of a job to its supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct JobApi {
    /// Time limit for a hold on snapshots.
    #[serde(with = "duration")]
    pub(crate) max_hold: Duration,
}

impl Default for JobApi {
    fn default() -> JobApi {
        JobApi { max_hold: Duration::from_secs(60) }
    }
}
