//! The values for the interval "auto": a share of the time, and a mean time between failures.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::value::Malformed;

/// The mean time between two failures of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum MeanTime {
    /// Taken from the job's own history ([`rekindle_base::interval::Failures`]).
    #[default]
    Observed,
    /// This time.
    Known(Duration),
}

impl TryFrom<String> for MeanTime {
    type Error = Malformed;

    fn try_from(text: String) -> Result<MeanTime, Malformed> {
        match text.as_str() {
            "observed" => Ok(MeanTime::Observed),
            other => humantime::parse_duration(other).map(MeanTime::Known).map_err(|_| Malformed),
        }
    }
}

impl From<MeanTime> for String {
    fn from(time: MeanTime) -> String {
        match time {
            MeanTime::Observed => "observed".to_owned(),
            MeanTime::Known(time) => humantime::format_duration(time).to_string(),
        }
    }
}
