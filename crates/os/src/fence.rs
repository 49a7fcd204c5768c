//! The moment at which a job must have ended, kept by the kernel: a timer that the supervisor moves ahead, and whose
//! expiry the job's init waits for. So the job ends in time even if the supervisor is stopped or swapped out.
//!
//! A timer and not shared memory: it is set in one step, it counts the time in which the machine sleeps, and it has no
//! file through which a job that runs as root could open it again and set it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::clock::since_boot;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// The moment, as time since the boot ([`crate::clock::since_boot`]).
#[derive(Debug)]
pub struct Fence {
    timer: TimerFd,
    until: Mutex<Duration>,
}

impl Fence {
    /// One for this moment.
    ///
    /// # Errors
    /// When the kernel gives no timer.
    pub fn new(until: Duration) -> io::Result<Fence> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        let timer = TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)?;
        set(&timer, until)?;
        Ok(Fence { timer, until: Mutex::new(until) })
    }

    /// Moves the moment ahead, never back, and not once it has passed: then the job is over.
    ///
    /// # Errors
    /// When the kernel refuses. Then the earlier moment holds.
    pub fn extend(&self, until: Duration) -> io::Result<()> {
        let mut present = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if until > *present && since_boot() <= *present {
            set(&self.timer, until)?;
            *present = until;
        }
        Ok(())
    }

    /// Whether the moment has passed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        since_boot() > *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor of the timer for the job's init.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn timer(&self) -> io::Result<OwnedFd> {
        self.timer.as_fd().try_clone_to_owned()
    }
}

fn set(timer: &TimerFd, until: Duration) -> io::Result<()> {
    // Zero would switch the timer off.
    let until = TimeSpec::from_duration(until.max(Duration::from_nanos(1)));
    Ok(timer.set(Expiration::OneShot(until), TimerSetTimeFlags::TFD_TIMER_ABSTIME)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    fn is_over(timer: &OwnedFd, within: u8) -> bool {
        let mut fds = [PollFd::new(timer.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(within)).unwrap() == 1
    }

    #[test]
    fn the_moment_moves_ahead_only() {
        // Far enough away for a machine that is busy.
        let first = since_boot() + Duration::from_secs(8);
        let fence = Fence::new(first).unwrap();
        let timer = fence.timer().unwrap();
        assert!(!is_over(&timer, 0));
        fence.extend(since_boot() + Duration::from_secs(3600)).unwrap();
        fence.extend(Duration::ZERO).unwrap();
        std::thread::sleep(first.saturating_sub(since_boot()));
        assert!(!is_over(&timer, 250) && !fence.is_over());
        let past = Fence::new(Duration::ZERO).unwrap();
        assert!(past.is_over() && is_over(&past.timer().unwrap(), 250), "none is none at all");
        past.extend(since_boot() + Duration::from_secs(3600)).unwrap();
        assert!(past.is_over() && is_over(&past.timer().unwrap(), 250), "what has passed stays so");
    }
}
