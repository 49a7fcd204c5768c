//! Variables of the environment for emergencies. They are no keys: no user needs them from day to day. CONTRIBUTING.md
//! describes them for those who help a user.

use std::time::Duration;

use super::model::Config;

/// One variable.
#[derive(Debug)]
pub(super) struct Variable {
    pub(super) name: &'static str,
    /// Ends the sentence "must be ...".
    pub(super) expects: &'static str,
    /// Sets what it means; `None` for another value.
    pub(super) set: fn(&mut Config, &str) -> Option<()>,
}

/// All of them.
pub(super) const VARIABLES: &[Variable] = &[
    // The driver takes 0 as no limit, and counts milliseconds in 32 bits.
    Variable {
        name: "REKINDLE_LOCK_TIMEOUT",
        expects: TIME,
        set: |config, text| time(text).map(|time| config.snapshot.lock_timeout = Some(time)),
    },
    Variable {
        name: "REKINDLE_RETRY_AFTER",
        expects: TIME,
        set: |config, text| time(text).map(|time| config.snapshot.retry_after = time),
    },
    Variable {
        name: "REKINDLE_MAX_HOLD",
        expects: TIME,
        set: |config, text| time(text).map(|time| config.snapshot.max_hold = time),
    },
];

/// The variable with that name.
pub(super) fn find(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}

const TIME: &str = "a time from 1ms to 1day, such as \"60s\"";

fn time(text: &str) -> Option<Duration> {
    let range = Duration::from_millis(1)..=Duration::from_secs(24 * 3600);
    humantime::parse_duration(text).ok().filter(|time| range.contains(time))
}
