//! `[scheduler]`: the scheduler that rekindle runs under, and its time limit.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, Local, NaiveDateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

use super::value::Malformed;

/// `[scheduler]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Scheduler {
    /// Which scheduler it is.
    pub(crate) profile: Profile,
    /// How a stopped job is queued again.
    pub(crate) requeue: Requeue,
    /// When the job must have ended; unset means the scheduler's time limit.
    pub(crate) deadline: Option<Deadline>,
}

/// `scheduler.profile`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Profile {
    /// The scheduler that the environment indicates.
    #[default]
    Auto,
    /// Slurm.
    Slurm,
    /// No scheduler.
    None,
}

/// `scheduler.requeue`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Requeue {
    /// The scheduler does it, because of the exit code.
    #[default]
    ExitCode,
    /// `scontrol requeue` does it, for a Slurm without RequeueExit.
    Scontrol,
}

/// When a job must have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum Deadline {
    /// At this time.
    At(DateTime<Utc>),
    /// This long after rekindle was started.
    After(Duration),
}

/// Times without an offset are local times.
const LOCAL: [&str; 4] = ["%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M"];

impl FromStr for Deadline {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Deadline, Malformed> {
        let text = text.trim();
        if let Some(seconds) = text.strip_prefix('@') {
            let time = seconds.parse().ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
            return time.map(Deadline::At).ok_or(Malformed);
        }
        if let Ok(time) = humantime::parse_duration(text) {
            return Ok(Deadline::After(time));
        }
        if let Ok(time) = DateTime::parse_from_rfc3339(text) {
            return Ok(Deadline::At(time.to_utc()));
        }
        let local = LOCAL.iter().find_map(|format| NaiveDateTime::parse_from_str(text, format).ok());
        // When the clock is set back, a time occurs twice: the first one is the safe choice.
        let time = local.and_then(|time| time.and_local_timezone(Local).earliest()).ok_or(Malformed)?;
        Ok(Deadline::At(time.to_utc()))
    }
}

impl fmt::Display for Deadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Deadline::At(time) => f.write_str(&time.to_rfc3339_opts(SecondsFormat::Secs, true)),
            Deadline::After(time) => humantime::format_duration(*time).fmt(f),
        }
    }
}

impl TryFrom<String> for Deadline {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Deadline, Malformed> {
        text.parse()
    }
}

impl From<Deadline> for String {
    fn from(deadline: Deadline) -> String {
        deadline.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_a_time_or_a_duration() {
        let at = |seconds| Ok(Deadline::At(DateTime::from_timestamp(seconds, 0).unwrap()));
        assert_eq!("8h".parse(), Ok(Deadline::After(Duration::from_secs(8 * 3600))));
        assert_eq!("@1795327200".parse(), at(1_795_327_200));
        assert_eq!("2026-11-22T06:00:00Z".parse(), at(1_795_327_200));
        assert_eq!("2026-11-22T07:00:00+01:00".parse(), at(1_795_327_200));
        let before = Utc::now();
        let local = Local::now().naive_local();
        let text = local.format("%Y-%m-%d %H:%M:%S").to_string();
        let Ok(Deadline::At(parsed)) = text.parse() else { panic!("{text}") };
        // Without its fraction of a second.
        let began = before - chrono::TimeDelta::seconds(1);
        assert!(began < parsed && parsed <= Utc::now(), "{text} is {parsed}");
        for text in ["", "8", "@", "@soon", "tomorrow", "06:00", "2026-11-22", "2026-13-01T00:00:00Z"] {
            assert_eq!(text.parse::<Deadline>(), Err(Malformed), "{text}");
        }
    }

    #[test]
    fn a_deadline_survives_its_text() {
        for text in ["8h", "1h 30m", "2026-11-22T06:00:00Z"] {
            assert_eq!(text.parse::<Deadline>().map(|deadline| deadline.to_string()).as_deref(), Ok(text));
        }
    }
}
