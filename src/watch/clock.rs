//! A clock that measures how long something has been missing, and that can be stopped.

use std::time::{Duration, Instant};

/// Measures the time without progress; time in which it is stopped does not count.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    limit: Duration,
    /// Time counted before it was last stopped.
    idle: Duration,
    /// Since when it counts; `None` while it is stopped.
    since: Option<Instant>,
    /// Whether it was reported that the limit is over.
    said: bool,
}

impl Clock {
    /// A stopped clock with nothing counted.
    #[must_use]
    pub(crate) fn new(limit: Duration) -> Clock {
        Clock { limit, idle: Duration::ZERO, since: None, said: false }
    }

    /// The time limit.
    #[must_use]
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Resets it to its initial state.
    pub(crate) fn reset(&mut self) {
        *self = Clock::new(self.limit);
    }

    /// Starts counting.
    pub(crate) fn go(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// Stops counting.
    pub(crate) fn hold(&mut self, now: Instant) {
        self.idle = self.idle(now);
        self.since = None;
    }

    /// There was progress. Returns whether the limit had been over before.
    pub(crate) fn progress(&mut self, now: Instant) -> bool {
        self.idle = Duration::ZERO;
        self.since = self.since.map(|_| now);
        std::mem::take(&mut self.said)
    }

    /// It was not heard that the limit is over: it is to be said again.
    pub(crate) fn is_unheard(&mut self) {
        self.said = false;
    }

    /// How long there was no progress.
    #[must_use]
    pub(crate) fn idle(&self, now: Instant) -> Duration {
        self.idle + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Returns the time without progress, if it has reached the limit. Returns it only once until there is progress, or
    /// until it is to be said again.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Duration> {
        let idle = self.idle(now);
        let due = self.since.is_some() && !self.said && idle >= self.limit;
        self.said |= due;
        due.then_some(idle)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn time_that_is_held_does_not_count() {
        let start = Instant::now();
        let mut clock = Clock::new(10 * SECOND);
        assert_eq!(clock.due(start + 100 * SECOND), None, "it was never let go");
        clock.go(start);
        clock.hold(start + 9 * SECOND);
        assert_eq!(clock.due(start + 50 * SECOND), None, "a snapshot of 41 s");
        clock.go(start + 50 * SECOND);
        clock.go(start + 50 * SECOND + SECOND / 2);
        assert_eq!(clock.due(start + 50 * SECOND + SECOND / 2), None);
        assert_eq!(clock.due(start + 51 * SECOND), Some(10 * SECOND));
        assert_eq!(clock.due(start + 99 * SECOND), None, "said once");
        assert!(clock.progress(start + 100 * SECOND));
        assert_eq!(clock.due(start + 109 * SECOND), None);
        assert_eq!(clock.due(start + 110 * SECOND), Some(10 * SECOND));
        clock.is_unheard();
        assert_eq!(clock.due(start + 111 * SECOND), Some(11 * SECOND), "nobody heard it");
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Go,
        Hold,
        Progress,
    }

    proptest! {
        /// Compared with a model that adds up every millisecond.
        #[test]
        fn it_is_due_when_the_counted_time_is_over_and_once(
            steps in proptest::collection::vec((0u64..40, prop_oneof![Just(Step::Go), Just(Step::Hold), Just(Step::Progress)]), 0..60),
        ) {
            let limit = Duration::from_millis(50);
            let mut clock = Clock::new(limit);
            let mut now = Instant::now();
            let (mut going, mut counted, mut said) = (false, Duration::ZERO, false);
            for (wait, step) in steps {
                now += Duration::from_millis(wait);
                if going {
                    counted += Duration::from_millis(wait);
                }
                let expected = going && !said && counted >= limit;
                prop_assert_eq!(clock.due(now), expected.then_some(counted));
                said |= expected;
                match step {
                    Step::Go => { clock.go(now); going = true; }
                    Step::Hold => { clock.hold(now); going = false; }
                    Step::Progress => {
                        prop_assert_eq!(clock.progress(now), said);
                        (counted, said) = (Duration::ZERO, false);
                    }
                }
                prop_assert_eq!(clock.idle(now), counted);
            }
        }
    }
}
