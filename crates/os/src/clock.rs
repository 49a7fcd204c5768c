//! A clock that also counts the time in which the machine sleeps.

use std::time::Duration;

use procfs_core::{FromRead, Uptime};
use rustix::time::{ClockId, clock_gettime};

/// The time since the boot, including sleep of the machine (`CLOCK_BOOTTIME`). `Instant` does not count that.
#[must_use]
pub fn since_boot() -> Duration {
    clock_gettime(ClockId::Boottime).try_into().unwrap_or_default()
}

/// The time since the boot, as /proc/uptime has it: that of the container, where /proc is made up for one (lxcfs).
#[must_use]
pub fn uptime() -> Option<Duration> {
    Some(Uptime::from_file("/proc/uptime").ok()?.uptime_duration())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on() {
        let before = since_boot();
        std::thread::sleep(Duration::from_millis(2));
        assert!(since_boot() >= before + Duration::from_millis(2) && before > Duration::from_secs(1));
    }
}
