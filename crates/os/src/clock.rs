//! A clock that also counts the time in which the machine sleeps.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::time::Duration;

/// The time since the boot, including sleep of the machine (`CLOCK_BOOTTIME`). `Instant` does not count that.
#[must_use]
pub fn since_boot() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live local. The clock is there since Linux 2.6.39, and then the call does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or(0))
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
