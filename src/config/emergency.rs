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
pub(super) const VARIABLES: &[Variable] = &[Variable {
    name: "REKINDLE_LOCK_TIMEOUT",
    // The driver takes 0 as no limit, and counts milliseconds in 32 bits.
    expects: "a time from 1ms to 1day, such as \"60s\"",
    set: |config, text| {
        let time = duration(text, Duration::from_millis(1), Duration::from_secs(24 * 3600))?;
        config.snapshot.lock_timeout = Some(time);
        Some(())
    },
}];

/// The variable with that name.
pub(super) fn find(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|variable| variable.name == name)
}

fn duration(text: &str, least: Duration, most: Duration) -> Option<Duration> {
    humantime::parse_duration(text).ok().filter(|time| (least..=most).contains(time))
}
