//! `[job-api]`: what a job may ask of its supervisor.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::value::duration;

/// `[job-api]`: what a job may ask of its supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct JobApi {
    /// How long a job may have snapshots wait at a time.
    #[serde(with = "duration")]
    pub max_hold: Duration,
}

impl Default for JobApi {
    fn default() -> JobApi {
        JobApi { max_hold: Duration::from_secs(60) }
    }
}
