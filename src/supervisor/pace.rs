//! Observations for the choice of the interval: freezes, the last copy to the store, failures.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::config::{Interval, MeanTime, Snapshot};
use rekindle_base::interval::{Choice, FIRST, FREEZES, Facts, Failures, MtbfSource, SHORTEST, choose, whole_micros};

/// Observations for the choice of the interval.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    /// The last freezes, oldest first.
    freezes: VecDeque<Duration>,
    /// The last two copies to the store, oldest first.
    persists: VecDeque<Duration>,
    /// Whether this process was stopped during the snapshot or the copy in progress: then it is not measured.
    stopped: Stopped,
    /// When the present interval began.
    began: Option<Instant>,
    failures: Failures,
    /// How many snapshots in a row ended the job.
    fatal: u32,
    choice: Option<Choice>,
}

/// If so many snapshots in a row end the job, no more are taken at the interval: the job would never get further.
const FATAL: u32 = 3;

/// What was in progress while this process, and the job probably with it, was stopped (`scontrol suspend`, `docker
/// pause`, a virtual machine that was paused).
#[derive(Debug, Clone, Copy, Default)]
struct Stopped {
    snapshot: bool,
    persist: bool,
}

impl Pace {
    /// Starts with the observations of earlier runs: their failures, and the freezes of this lineage, oldest first.
    #[must_use]
    pub(crate) fn recalled(failures: Failures, freezes: impl IntoIterator<Item = Duration>) -> Pace {
        let mut pace = Pace { failures, ..Pace::default() };
        freezes.into_iter().for_each(|freeze| pace.frozen(freeze));
        pace
    }

    /// This process was stopped for a while; `snapshot` and `persist` tell what was in progress.
    pub(crate) fn was_stopped(&mut self, snapshot: bool, persist: bool) {
        self.stopped.snapshot |= snapshot;
        self.stopped.persist |= persist;
    }

    /// The snapshot in progress has failed.
    pub(crate) fn not_frozen(&mut self) {
        self.stopped.snapshot = false;
    }

    /// The snapshot in progress has ended the job.
    pub(crate) fn was_fatal(&mut self) {
        self.fatal = self.fatal.saturating_add(1);
    }

    /// Whether snapshots end the job, so that none may be taken at the interval. The next one that succeeds changes it.
    #[must_use]
    pub(crate) fn is_deadly(&self) -> bool {
        self.fatal >= FATAL
    }

    /// Whether it is so after one more snapshot that ends the job, and is not yet.
    #[must_use]
    pub(crate) fn is_nearly_deadly(&self) -> bool {
        self.fatal + 1 == FATAL
    }

    /// A snapshot froze the job for this long.
    pub(crate) fn frozen(&mut self, freeze: Duration) {
        self.fatal = 0;
        if std::mem::take(&mut self.stopped.snapshot) || freeze.is_zero() {
            return;
        }
        if self.freezes.len() >= FREEZES {
            self.freezes.pop_front();
        }
        self.freezes.push_back(freeze);
    }

    /// An image was copied to the store in this time, while the job ran; `None` if that failed.
    pub(crate) fn persisted(&mut self, took: Option<Duration>) {
        let stopped = std::mem::take(&mut self.stopped.persist);
        let Some(took) = took.filter(|_| !stopped) else { return };
        if self.persists.len() >= 2 {
            self.persists.pop_front();
        }
        self.persists.push_back(took);
    }

    /// How long storing an image takes: the shorter one of the last two. A single slow one, while a file server was
    /// away, must not prevent snapshots for hours; if storing has become slow, a snapshot that comes too soon waits.
    fn persist(&self) -> Option<Duration> {
        self.persists.iter().min().copied()
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
    fn interval(&mut self, config: &Snapshot, age: Duration) -> Option<Duration> {
        match config.interval {
            Interval::Every(interval) => return Some(interval),
            Interval::Off => return None,
            Interval::Auto => {}
        }
        match automatic(config, self.failures(age), self.median(), self.persist()) {
            Ok(choice) => Some(self.choice.insert(choice).interval),
            Err(first) => Some(first),
        }
    }

    /// When the next snapshot is due, if an interval begins now in a life that began at `since`.
    pub(crate) fn due(&mut self, config: &Snapshot, since: Instant, now: Instant) -> Option<Instant> {
        self.began = Some(now);
        self.due_now(config, since, now)
    }

    /// The same with what is known now, in the present interval.
    pub(crate) fn due_now(&mut self, config: &Snapshot, since: Instant, now: Instant) -> Option<Instant> {
        let interval = self.interval(config, now.saturating_duration_since(since))?;
        self.began?.checked_add(interval)
    }

    /// How long a snapshot freezes the job, and how long storing the last image took, as far as they are known.
    #[must_use]
    pub(crate) fn measured(&self) -> (Option<Duration>, Option<Duration>) {
        (self.median(), self.persist())
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
        assert_eq!(pace.interval(&observed, Duration::ZERO), Some(FIRST));
        let known = |time| Snapshot { mean_time_between_failures: MeanTime::Known(time), ..auto() };
        assert_eq!(pace.interval(&known(Duration::from_secs(100)), Duration::ZERO), Some(Duration::from_secs(10)));
        assert_eq!(pace.interval(&known(Duration::from_secs(2)), Duration::ZERO), Some(SHORTEST));
        // A freeze that was not measured.
        pace.frozen(Duration::ZERO);
        assert_eq!((pace.interval(&observed, Duration::ZERO), pace.choice()), (Some(FIRST), None));
        pace.frozen(millis(2200));
        let by_hand = choose(&Facts {
            freeze: millis(2200),
            mtbf: DAY,
            mtbf_source: MtbfSource::Configured,
            max_overhead: auto().max_overhead,
            persist: None,
        });
        assert_eq!(pace.interval(&observed, Duration::ZERO), Some(by_hand.interval));
    }

    #[test]
    fn an_interval_that_is_given_is_kept() {
        let mut pace = Pace::recalled(Failures::default(), [millis(2200)]);
        let every = Config::default().snapshot;
        assert_eq!(pace.interval(&every, HOUR), Some(Duration::from_secs(600)));
        assert_eq!(pace.interval(&Snapshot { interval: Interval::Off, ..every }, HOUR), None);
        assert_eq!(pace.choice(), None);
    }

    #[test]
    fn the_freeze_is_the_median_of_the_last_five() {
        let freeze = |freezes: &[u64]| {
            let mut pace = Pace::recalled(Failures::default(), freezes.iter().map(|n| millis(*n)));
            pace.interval(&auto(), Duration::ZERO);
            pace.choice().map(|choice| choice.freeze)
        };
        assert_eq!(freeze(&[]), None);
        assert_eq!(freeze(&[7]), Some(millis(7)));
        assert_eq!(freeze(&[100, 2000]), Some(millis(2000)), "the first is often too small");
        assert_eq!(freeze(&[9000, 1, 3, 2, 4, 5]), Some(millis(3)), "one of six is forgotten");
    }

    #[test]
    fn one_slow_copy_to_the_store_does_not_prevent_snapshots() {
        let interval = |pace: &mut Pace| pace.interval(&auto(), Duration::ZERO).unwrap();
        let mut pace = Pace::recalled(Failures::default(), [millis(2200)]);
        let usual = interval(&mut pace);
        pace.persisted(Some(millis(500)));
        pace.persisted(Some(8 * HOUR));
        assert_eq!(interval(&mut pace), usual, "the one before was quick");
        pace.persisted(Some(millis(500)));
        assert_eq!(interval(&mut pace), usual, "and so is the next");
        // The very first: the next corrects it, in the interval that has begun.
        let mut pace = Pace::recalled(Failures::default(), [millis(2200)]);
        let now = Instant::now();
        pace.persisted(Some(8 * HOUR));
        assert_eq!(pace.due(&auto(), now, now), Some(now + 8 * HOUR));
        pace.persisted(Some(millis(500)));
        let corrected = pace.interval(&auto(), HOUR).unwrap();
        assert_eq!(pace.due_now(&auto(), now, now + HOUR), Some(now + corrected));
        assert!(corrected < usual + HOUR / 60, "{corrected:?}");
        // A disk that is as slow as that: still once a day.
        pace.persisted(Some(40 * HOUR));
        pace.persisted(Some(40 * HOUR));
        assert_eq!(interval(&mut pace), DAY);
    }

    #[test]
    fn what_a_stopped_process_measures_does_not_count() {
        let mut pace = Pace::default();
        pace.was_stopped(true, true);
        pace.frozen(8 * HOUR);
        pace.persisted(Some(8 * HOUR));
        assert_eq!(pace.measured(), (None, None));
        pace.frozen(millis(2200));
        pace.persisted(Some(millis(500)));
        assert_eq!(pace.measured(), (Some(millis(2200)), Some(millis(500))));
        // Only what was in progress.
        pace.was_stopped(true, false);
        pace.not_frozen();
        pace.frozen(millis(2300));
        assert_eq!(pace.measured().0, Some(millis(2300)));
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
            pace.interval(&auto(), age);
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
