//! What the supervisor remembers in order to choose: freezes, the last copy to the store, failures.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Choice, FOREVER, Facts, MtbfSource, SHORTEST, choose, whole_micros};
use crate::config::{Interval, MeanTime, Snapshot};

/// The first wait, while no freeze is known: a job has loaded its libraries and its data by then, and has not done much
/// that could be lost.
pub const FIRST: Duration = Duration::from_secs(60);
/// So many freezes are remembered. One that was slow by chance does not move their median.
pub const FREEZES: usize = 5;
/// The time in which one failure is assumed before anything was observed. Llama 3 was interrupted every 3 hours on 16,384
/// GPUs (arXiv 2407.21783, section 3.3.4), which is months for a machine of eight; but preemptions, full memory and the
/// job's own faults come on top. The square root makes little of being wrong.
pub const PRIOR: Duration = Duration::from_secs(24 * 3600);

/// How often the job failed in how much time. A failure is a death that costs work: the job's own end but with exit code
/// 0, a snapshot that it did not survive, the end of the supervisor or the machine under a running job. A death within
/// `restart.min-uptime` is none, it is the image's or the command's fault; nor is a stop that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Failures {
    /// How long the job has run in all.
    pub uptime: Duration,
    /// How often it failed.
    pub failures: u32,
}

impl Failures {
    /// The mean time between two, with [`PRIOR`] for what is not known yet.
    #[must_use]
    pub fn mean_time_between(&self) -> Duration {
        PRIOR.saturating_add(self.uptime).min(FOREVER) / self.failures.saturating_add(1)
    }
}

/// What the supervisor remembers in order to choose.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    /// The last ones, oldest first.
    freezes: VecDeque<Duration>,
    persist: Option<Duration>,
    failures: Failures,
    choice: Option<Choice>,
}

impl Pace {
    /// Goes on from what earlier runs left: their failures, and the freezes of this lineage, oldest first.
    #[must_use]
    pub fn recalled(failures: Failures, freezes: impl IntoIterator<Item = Duration>) -> Pace {
        let mut pace = Pace { failures, ..Pace::default() };
        freezes.into_iter().for_each(|freeze| pace.frozen(freeze));
        pace
    }

    /// A snapshot was taken for which the job stood still so long.
    pub fn frozen(&mut self, freeze: Duration) {
        if freeze.is_zero() {
            return;
        }
        if self.freezes.len() >= FREEZES {
            self.freezes.pop_front();
        }
        self.freezes.push_back(freeze);
    }

    /// An image was copied to the store in so much time, while the job ran.
    pub fn persisted(&mut self, took: Duration) {
        self.persist = Some(took);
    }

    /// A life of the job is over, after so much time.
    pub fn lived(&mut self, uptime: Duration) {
        self.failures.uptime = self.failures.uptime.saturating_add(uptime);
    }

    /// It ended in a failure.
    pub fn failed(&mut self) {
        self.failures.failures = self.failures.failures.saturating_add(1);
    }

    /// What was observed until now, where the life of now is so old.
    #[must_use]
    pub fn failures(&self, age: Duration) -> Failures {
        Failures { uptime: self.failures.uptime.saturating_add(age), ..self.failures }
    }

    /// The choice in force; none where the interval is not chosen here, or nothing is known yet.
    #[must_use]
    pub fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    /// How long from now to the next snapshot, where the life of now is so old; never where snapshots come on request.
    pub fn next(&mut self, config: &Snapshot, age: Duration) -> Option<Duration> {
        match config.interval {
            Interval::Every(interval) => return Some(interval),
            Interval::Off => return None,
            Interval::Auto => {}
        }
        let observed = self.failures(age);
        let (mtbf, mtbf_source) = match config.mean_time_between_failures {
            MeanTime::Known(time) => (time, MtbfSource::Configured),
            MeanTime::Observed => {
                let Failures { uptime, failures } = observed;
                // As it is written.
                (observed.mean_time_between(), MtbfSource::Observed { uptime: whole_micros(uptime), failures })
            }
        };
        let Some(freeze) = self.median() else { return Some((mtbf / 10).clamp(SHORTEST, FIRST)) };
        let facts = Facts { freeze, mtbf, mtbf_source, max_overhead: config.max_overhead, persist: self.persist };
        Some(self.choice.insert(choose(&facts)).interval)
    }

    fn median(&self) -> Option<Duration> {
        let mut sorted: Vec<Duration> = self.freezes.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }
}
