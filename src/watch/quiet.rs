//! Waits until GPUs are quiet: none has a process of the dead any more, and the driver tells no new faults.
//!
//! A killed process stays on its GPU until the driver has ended its kernels. What starts there meanwhile may be ended with
//! them.

use std::time::{Duration, Instant};

/// What is seen at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    /// A GPU still has a process of the dead.
    pub(crate) dead: bool,
    /// How many faults the driver has told.
    pub(crate) faults: usize,
}

/// For so long nothing happens on GPUs that are quiet. Faults of one cause come within some 100 ms.
const STILL: Duration = Duration::from_secs(1);
/// How often to look.
const AGAIN: Duration = Duration::from_millis(100);

/// Since when nothing has happened.
#[derive(Debug)]
struct Stillness {
    since: Instant,
    faults: usize,
}

impl Stillness {
    /// Whether it has lasted long enough.
    fn sees(&mut self, look: Look, now: Instant) -> bool {
        if look.dead || look.faults != self.faults {
            *self = Stillness { since: now, faults: look.faults };
        }
        now.saturating_duration_since(self.since) >= STILL
    }
}

/// Waits at most so long. Answers whether they are quiet.
pub(crate) fn wait(limit: Duration, mut look: impl FnMut() -> Look) -> bool {
    let began = Instant::now();
    let mut stillness = Stillness { since: began, faults: look().faults };
    while began.elapsed() < limit {
        std::thread::sleep(AGAIN);
        if stillness.sees(look(), Instant::now()) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_quiet_when_the_dead_are_gone_and_nothing_was_told_for_a_while() {
        let began = Instant::now();
        let at = |tenths: u32| began + AGAIN * tenths;
        let mut stillness = Stillness { since: began, faults: 2 };
        let mut sees = |dead, faults, tenths| stillness.sees(Look { dead, faults }, at(tenths));
        assert!(!sees(true, 2, 5) && !sees(true, 2, 42), "a process is still there");
        assert!(!sees(false, 2, 43) && !sees(false, 2, 51), "it has just gone");
        assert!(!sees(false, 3, 52) && !sees(false, 3, 61), "a new fault");
        assert!(sees(false, 3, 62));
    }

    #[test]
    fn the_wait_has_a_limit() {
        assert!(!wait(AGAIN * 2, || Look { dead: true, faults: 0 }));
    }
}
