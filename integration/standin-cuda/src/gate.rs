//! What a lock closes: every CUDA call of the job passes it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Inner {
    closed: bool,
    inside: u32,
}

static GATE: Mutex<Inner> = Mutex::new(Inner { closed: false, inside: 0 });
static CHANGED: Condvar = Condvar::new();

fn gate() -> MutexGuard<'static, Inner> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A CUDA call under way.
#[derive(Debug)]
pub(crate) struct Inside(());

/// Waits while the gate is closed.
pub(crate) fn enter() -> Inside {
    let mut gate = CHANGED.wait_while(gate(), |gate| gate.closed).unwrap_or_else(PoisonError::into_inner);
    gate.inside += 1;
    Inside(())
}

impl Drop for Inside {
    fn drop(&mut self) {
        gate().inside -= 1;
        CHANGED.notify_all();
    }
}

/// Closes the gate and waits for the calls under way; opens it again where they take longer than `timeout` (None: for
/// ever). Returns whether it is closed.
pub(crate) fn close(timeout: Option<Duration>) -> bool {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut gate = gate();
    gate.closed = true;
    while gate.inside > 0 {
        let wait = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            Some(Duration::ZERO) => {
                gate.closed = false;
                drop(gate);
                CHANGED.notify_all();
                return false;
            }
            Some(left) => left,
            None => Duration::from_secs(3600),
        };
        gate = CHANGED.wait_timeout(gate, wait).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

/// Lets calls pass.
pub(crate) fn open() {
    gate().closed = false;
    CHANGED.notify_all();
}
