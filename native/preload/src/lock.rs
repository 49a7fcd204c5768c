//! A lock that nobody waits for, or only for a moment.

use core::sync::atomic::{AtomicI32, Ordering};

use crate::sys;

/// Contains the pid of the process that took it: a lock copied by a fork while it was taken is free for the child.
#[derive(Debug)]
pub(crate) struct Lock(AtomicI32);

/// The lock, taken; free when dropped.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Lock);

/// Tries after the second is over, and the pause between two.
const TRIES: u32 = 100;
const PAUSE_NS: u64 = 1_000_000;

impl Lock {
    pub(crate) const fn new() -> Lock {
        Lock(AtomicI32::new(0))
    }

    /// `None` if it is taken: by another thread, or by this one, which a signal handler interrupted.
    pub(crate) fn take(&self, pid: i32) -> Option<Held<'_>> {
        let now = self.0.load(Ordering::Relaxed);
        let taken = now != pid && self.0.compare_exchange(now, pid, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Not then_some: it would make a Held for an attempt that failed, and drop it.
        taken.then(|| Held(self))
    }

    /// Waits for a holder that needs it for a moment only. None after a second: a signal handler has interrupted it.
    pub(crate) fn wait(&self) -> Option<Held<'_>> {
        self.wait_until(sys::now() + 1_000_000_000, || sys::sleep(PAUSE_NS))
    }

    fn wait_until(&self, deadline: u64, mut pause: impl FnMut()) -> Option<Held<'_>> {
        let pid = sys::pid();
        while sys::now() <= deadline {
            if let Some(held) = self.take(pid) {
                return Some(held);
            }
            sys::yield_now();
        }
        // The process may have been stopped for that second: then the holder gets another moment.
        for _ in 0..TRIES {
            if let Some(held) = self.take(pid) {
                return Some(held);
            }
            pause();
        }
        None
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_stop_of_the_process_its_holder_gets_another_moment() {
        let lock = Lock::new();
        let mut held = lock.take(sys::pid());
        let mut pauses = 0;
        let taken = lock.wait_until(0, || {
            pauses += 1;
            held.take_if(|_| pauses == 3);
        });
        assert!(taken.is_some());
        drop(taken);
        let _held = lock.take(sys::pid());
        assert!(lock.wait_until(0, || {}).is_none());
    }

    #[test]
    fn it_is_held_once_in_a_process_and_not_across_a_fork() {
        let lock = Lock::new();
        let held = lock.take(7).unwrap();
        assert!(lock.take(7).is_none());
        assert!(lock.take(7).is_none(), "an attempt that fails does not free it");
        drop(held);
        core::mem::forget(lock.take(7).unwrap());
        assert!(lock.take(8).is_some(), "the child of 7");
    }
}
