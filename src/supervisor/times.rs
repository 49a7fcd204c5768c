//! Times and durations for messages and for the journal.

use std::time::Duration;

use chrono::{DateTime, Utc};

/// For the journal and `state.json`.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Rounded to whole milliseconds, for messages.
pub(super) fn shown(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
}

/// For people: whole seconds, rounded up.
pub(super) fn in_seconds(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(time.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX)))
}

/// A date and a time.
pub(super) fn in_full(time: DateTime<Utc>) -> String {
    rekindle_base::units::moment(time)
}
