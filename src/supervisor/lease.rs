//! Whether the job's folder is still ours: the heartbeat of the store's lock, and the results of checking it.
//!
//! A lost lock remains lost. Another supervisor may have the job then, so the owner starts nothing more, writes nothing
//! more, and ends.

use std::time::{Duration, Instant};

use rekindle_store::{Error, HEARTBEAT, Result};

/// State of the lock.
#[derive(Debug)]
pub(super) struct Lease {
    /// The last heartbeat.
    renewed: Instant,
    /// How it was lost.
    lost: Option<Error>,
}

impl Lease {
    pub(super) fn new(now: Instant) -> Lease {
        Lease { renewed: now, lost: None }
    }

    pub(super) fn is_held(&self) -> bool {
        self.lost.is_none()
    }

    /// Whether the heartbeat is due. `unconfirmed` is the time since the lock was last seen to be ours, including sleep
    /// of the machine, which others count too.
    pub(super) fn is_due(&self, unconfirmed: Duration, now: Instant) -> bool {
        self.next_wake() <= now || unconfirmed >= HEARTBEAT
    }

    pub(super) fn next_wake(&self) -> Instant {
        self.renewed + HEARTBEAT
    }

    /// Records the result of a heartbeat.
    ///
    /// # Errors
    /// A failure that may pass.
    pub(super) fn renewed(&mut self, look: Result<()>, now: Instant) -> Result<()> {
        self.renewed = now;
        self.looked(look)
    }

    /// Records that a check found the lock lost.
    ///
    /// # Errors
    /// Any other failure of the check.
    pub(super) fn looked(&mut self, look: Result<()>) -> Result<()> {
        match look {
            Err(error @ (Error::TakenOver { .. } | Error::LockReplaced { .. })) => {
                self.lost = Some(error);
                Ok(())
            }
            other => other,
        }
    }

    /// How the lock was lost, if it was.
    pub(super) fn into_lost(self) -> Option<Error> {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replaced() -> Error {
        Error::LockReplaced { job: "j".parse().unwrap(), file: "lock".into() }
    }

    #[test]
    fn the_heartbeat_is_due_by_either_clock() {
        let now = Instant::now();
        let mut lease = Lease::new(now);
        let short = HEARTBEAT / 2;
        assert!(!lease.is_due(short, now + short));
        assert!(lease.is_due(short, now + HEARTBEAT) && lease.is_due(HEARTBEAT, now + short));
        lease.renewed(Ok(()), now + HEARTBEAT).unwrap();
        assert!(!lease.is_due(short, now + HEARTBEAT + short));
        assert_eq!(lease.next_wake(), now + HEARTBEAT * 2);
    }

    #[test]
    fn a_lock_that_is_lost_stays_lost_and_a_failed_look_is_no_loss() {
        let now = Instant::now();
        let mut lease = Lease::new(now);
        assert!(lease.renewed(Err(Error::NoStore("s".into())), now).is_err() && lease.is_held());
        assert!(lease.looked(Err(replaced())).is_ok() && !lease.is_held());
        lease.renewed(Ok(()), now).unwrap();
        assert!(!lease.is_held());
        assert!(matches!(lease.into_lost(), Some(Error::LockReplaced { .. })));
    }
}
