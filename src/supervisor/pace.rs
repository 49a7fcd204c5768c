//! Observations for the choice of the interval: freezes, the last copy to the store, failures.

use std::collections::VecDeque;
use std::time::Duration;

use crate::config::{Interval, MeanTime, Snapshot};
use rekindle_base::interval::{Choice, FIRST, FREEZES, Facts, Failures, MtbfSource, SHORTEST, choose, whole_micros};

/// Observations for the choice of the interval.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    /// The last freezes, oldest first.
    freezes: VecDeque<Duration>,
    persist: Option<Duration>,
    failures: Failures,
    choice: Option<Choice>,
}

impl Pace {
    /// Starts with the observations of earlier runs: their failures, and the freezes of this lineage, oldest first.
    #[must_use]
    pub(crate) fn recalled(failures: Failures, freezes: impl IntoIterator<Item = Duration>) -> Pace {
        let mut pace = Pace { failures, ..Pace::default() };
        freezes.into_iter().for_each(|freeze| pace.frozen(freeze));
        pace
    }

    /// A snapshot froze the job for this long.
    pub(crate) fn frozen(&mut self, freeze: Duration) {
        if freeze.is_zero() {
            return;
        }
        if self.freezes.len() >= FREEZES {
            self.freezes.pop_front();
        }
        self.freezes.push_back(freeze);
    }

    /// An image was copied to the store in this time, while the job ran.
    pub(crate) fn persisted(&mut self, took: Duration) {
        self.persist = Some(took);
    }

    /// A life of the job ended after this time.
    pub(crate) fn lived(&mut self, uptime: Duration) {
        self.failures.uptime = self.failures.uptime.saturating_add(uptime);
    }

    /// It ended in a failure.
    pub(crate) fn failed(&mut self) {
        self.failures.failures = self.failures.failures.saturating_add(1);
    }

    /// The observations so far; `age` is the time since the present life began.
    #[must_use]
    pub(crate) fn failures(&self, age: Duration) -> Failures {
        Failures { uptime: self.failures.uptime.saturating_add(age), ..self.failures }
    }

    /// The current choice; `None` if the interval is not chosen automatically, or nothing is known yet.
    #[must_use]
    pub(crate) fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    /// The time until the next snapshot; `age` is the time since the present life began. `None` if snapshots are taken
    /// only on request.
    pub(crate) fn next(&mut self, config: &Snapshot, age: Duration) -> Option<Duration> {
        match config.interval {
            Interval::Every(interval) => return Some(interval),
            Interval::Off => return None,
            Interval::Auto => {}
        }
        match automatic(config, self.failures(age), self.median(), self.persist) {
            Ok(choice) => Some(self.choice.insert(choice).interval),
            Err(first) => Some(first),
        }
    }

    /// How long a snapshot freezes the job, and how long storing the last image took, as far as they are known.
    #[must_use]
    pub(crate) fn measured(&self) -> (Option<Duration>, Option<Duration>) {
        (self.median(), self.persist)
    }

    fn median(&self) -> Option<Duration> {
        let mut sorted: Vec<Duration> = self.freezes.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }
}

/// Chooses the interval. While no freeze is known, returns the time until the first snapshot instead.
pub(super) fn automatic(
    config: &Snapshot,
    observed: Failures,
    freeze: Option<Duration>,
    persist: Option<Duration>,
) -> Result<Choice, Duration> {
    let (mtbf, mtbf_source) = match config.mean_time_between_failures {
        MeanTime::Known(time) => (time, MtbfSource::Configured),
        MeanTime::Observed => {
            let Failures { uptime, failures } = observed;
            // In whole microseconds, as it is written to a manifest.
            (observed.mean_time_between(), MtbfSource::Observed { uptime: whole_micros(uptime), failures })
        }
    };
    let freeze = freeze.ok_or_else(|| (mtbf / 10).clamp(SHORTEST, FIRST))?;
    Ok(choose(&Facts { freeze, mtbf, mtbf_source, max_overhead: config.max_overhead, persist }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn millis(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn auto() -> Snapshot {
        Snapshot { interval: Interval::Auto, ..Config::default().snapshot }
    }

    #[test]
    fn the_first_snapshot_comes_soon() {
        let (mut pace, observed) = (Pace::default(), auto());
        assert_eq!(pace.next(&observed, Duration::ZERO), Some(FIRST));
        let known = |time| Snapshot { mean_time_between_failures: MeanTime::Known(time), ..auto() };
        assert_eq!(pace.next(&known(Duration::from_secs(100)), Duration::ZERO), Some(Duration::from_secs(10)));
        assert_eq!(pace.next(&known(Duration::from_secs(2)), Duration::ZERO), Some(SHORTEST));
        // A freeze that was not measured.
        pace.frozen(Duration::ZERO);
        assert_eq!((pace.next(&observed, Duration::ZERO), pace.choice()), (Some(FIRST), None));
        pace.frozen(millis(2200));
        let by_hand = choose(&Facts {
            freeze: millis(2200),
            mtbf: DAY,
            mtbf_source: MtbfSource::Configured,
            max_overhead: auto().max_overhead,
            persist: None,
        });
        assert_eq!(pace.next(&observed, Duration::ZERO), Some(by_hand.interval));
    }

    #[test]
    fn an_interval_that_is_given_is_kept() {
        let mut pace = Pace::recalled(Failures::default(), [millis(2200)]);
        let every = Config::default().snapshot;
        assert_eq!(pace.next(&every, HOUR), Some(Duration::from_secs(600)));
        assert_eq!(pace.next(&Snapshot { interval: Interval::Off, ..every }, HOUR), None);
        assert_eq!(pace.choice(), None);
    }

    #[test]
    fn the_freeze_is_the_median_of_the_last_five() {
        let freeze = |freezes: &[u64]| {
            let mut pace = Pace::recalled(Failures::default(), freezes.iter().map(|n| millis(*n)));
            pace.next(&auto(), Duration::ZERO);
            pace.choice().map(|choice| choice.freeze)
        };
        assert_eq!(freeze(&[]), None);
        assert_eq!(freeze(&[7]), Some(millis(7)));
        assert_eq!(freeze(&[100, 2000]), Some(millis(2000)), "the first is often too small");
        assert_eq!(freeze(&[9000, 1, 3, 2, 4, 5]), Some(millis(3)), "one of six is forgotten");
    }

    #[test]
    fn the_mean_time_is_learnt_from_the_job() {
        let mean = |uptime, failures| Failures { uptime, failures }.mean_time_between();
        assert_eq!(mean(Duration::ZERO, 0), DAY);
        assert_eq!(mean(6 * DAY, 0), 7 * DAY);
        assert_eq!(mean(6 * DAY, 6), DAY);
        // After a long time only the observations count.
        let long = mean(1000 * DAY, 100);
        assert!(long > 9 * DAY && long < 10 * DAY, "{long:?}");
        // The value changes while the job runs, and with every failure.
        let mut pace = Pace::recalled(Failures { uptime: DAY, failures: 1 }, [millis(2200)]);
        let mtbf = |pace: &mut Pace, age| {
            pace.next(&auto(), age);
            pace.choice().unwrap().mtbf
        };
        assert_eq!(mtbf(&mut pace, Duration::ZERO), DAY);
        assert_eq!(mtbf(&mut pace, 2 * DAY), 2 * DAY);
        pace.lived(2 * DAY);
        pace.failed();
        assert_eq!(mtbf(&mut pace, 2 * DAY), 2 * DAY);
        assert_eq!(pace.failures(2 * DAY), Failures { uptime: 5 * DAY, failures: 2 });
    }
}
