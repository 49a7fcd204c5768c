//! A lock that nobody waits for.

use core::sync::atomic::{AtomicI32, Ordering};

/// Holds the pid of the process that took it: what a fork copied in the taken state is free for the child.
#[derive(Debug)]
pub(crate) struct Lock(AtomicI32);

/// The lock, taken; free when dropped.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Lock);

impl Lock {
    pub(crate) const fn new() -> Lock {
        Lock(AtomicI32::new(0))
    }

    /// None if it is taken: by another thread, or by this one, which a signal handler interrupted.
    pub(crate) fn take(&self, pid: i32) -> Option<Held<'_>> {
        let now = self.0.load(Ordering::Relaxed);
        let taken = now != pid && self.0.compare_exchange(now, pid, Ordering::Acquire, Ordering::Relaxed).is_ok();
        taken.then_some(Held(self))
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
    fn it_is_held_once_in_a_process_and_not_across_a_fork() {
        let lock = Lock::new();
        let held = lock.take(7).unwrap();
        assert!(lock.take(7).is_none());
        drop(held);
        core::mem::forget(lock.take(7).unwrap());
        assert!(lock.take(8).is_some(), "the child of 7");
    }
}
