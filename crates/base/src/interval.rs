//! `snapshot.interval = "auto"`: computes the time until the next snapshot from measurements.
//!
//! A snapshot costs its freeze, d. A failure costs the work since the last image, which is half an interval on average.
//! M is the mean time between failures. The sum of both costs is smallest near Young's T = sqrt(2 d M) (CACM 17(9),
//! 1974). Daly refined it (FGCS 22(3), 2006): for d < 2M
//!
//! ```text
//! T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d,    else T = M
//! ```
//!
//! T is the time that the job runs between two snapshots: from the end of one freeze to the beginning of the next. T is
//! then adjusted, in this order:
//!
//! 1. T is limited to between [`SHORTEST`] and [`LONGEST`].
//! 2. T is raised until freezes take at most `snapshot.max-overhead` of the time, d / (T + d).
//! 3. T is raised to the time that storing an image takes, at most [`LONGEST`], because only one image is stored at a
//!    time.
//!
//! Step 2 may exceed [`LONGEST`]: the user asked for it.
//!
//! - d is the median of the last [`FREEZES`] freezes. For an even number it is the larger one of the middle, because a
//!   first image is often taken before the job has all its memory. A freeze of zero was not measured and does not
//!   count.
//! - M is configured, or it is (run time of the job + [`PRIOR`]) / (failures + 1): the inverse of the mean rate of a
//!   Gamma distribution that starts with one failure in [`PRIOR`]. [`Failures`] says what counts as a failure.
//! - While no freeze is known, the first snapshot is taken after [`FIRST`], or after a tenth of M if that is sooner.
//!
//! Everything here is pure: facts go in, and a [`Choice`] that can show its arithmetic comes out.

mod shown;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Percentage;
use crate::micros;

/// Below this, the other costs of a snapshot (finding the processes, hashing, syncing) are not negligible any more.
pub const SHORTEST: Duration = Duration::from_secs(1);
/// Losing more work than this at once is not acceptable, however rare failures are.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// A hundred years: sums with the clock's time stay within its range.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// An interval, and the values that it was chosen from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// From the end of one snapshot to the beginning of the next.
    #[serde(rename = "interval_us", with = "micros")]
    pub interval: Duration,
    /// How long a snapshot freezes the job: the median of the last freezes.
    #[serde(rename = "freeze_us", with = "micros")]
    pub freeze: Duration,
    /// Mean time between failures.
    #[serde(rename = "mtbf_us", with = "micros")]
    pub mtbf: Duration,
    /// The source of that.
    pub mtbf_source: MtbfSource,
    /// How long a copy of an image to the store takes: the shorter one of the last two.
    #[serde(rename = "persist_us", default, with = "micros::optional", skip_serializing_if = "Option::is_none")]
    pub persist: Option<Duration>,
    /// `snapshot.max-overhead`.
    #[serde(rename = "max_overhead_ppm", with = "ppm")]
    pub max_overhead: Percentage,
    /// The share of the time that freezes take: d / (T + d).
    #[serde(rename = "expected_overhead_ppm", with = "ppm")]
    pub expected_overhead: Percentage,
    /// The share of the work that failures cost, T / 2M, at most all of it.
    #[serde(rename = "expected_loss_ppm", with = "ppm")]
    pub expected_loss: Percentage,
    /// What determined the interval.
    pub bound: Bound,
}

/// The source of a mean time between failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MtbfSource {
    /// `snapshot.mean-time-between-failures`.
    Configured,
    /// The job's own history, with [`PRIOR`].
    Observed {
        /// How long the job has run in total.
        #[serde(rename = "uptime_us", with = "micros")]
        uptime: Duration,
        /// How often it failed.
        failures: u32,
    },
}

/// What determined an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// Daly's formula.
    Daly,
    /// `snapshot.max-overhead`, which the freeze would exceed.
    MaxOverhead,
    /// The copy to the store, which takes longer.
    Persist,
    /// [`SHORTEST`].
    Minimum,
    /// [`LONGEST`].
    Maximum,
}

/// Percentages in JSON, as integers in millionths.
mod ppm {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::Percentage;

    pub(super) fn serialize<S: Serializer>(share: &Percentage, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(share.as_millionths())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Percentage, D::Error> {
        u32::deserialize(deserializer).map(Percentage::millionths)
    }
}

/// The first interval, while no freeze is known: by then a job has loaded its libraries and its data, and has not done
/// much work that could be lost.
pub const FIRST: Duration = Duration::from_secs(60);
/// Number of freezes remembered. A single slow one does not change their median.
pub const FREEZES: usize = 5;
/// The time in which one failure is assumed before anything was observed. Llama 3 was interrupted every 3 hours on
/// 16,384 GPUs (arXiv 2407.21783, section 3.3.4), which means months for a machine with eight; but preemptions, full
/// memory and the job's own faults come on top. Because of the square root, an error here has little effect.
pub(crate) const PRIOR: Duration = Duration::from_secs(24 * 3600);

/// How often the job failed in how much time. A failure is a death that costs work: an end by itself with another exit
/// code than 0, a snapshot that it did not survive, the end of the supervisor or the machine while the job ran. A death
/// within `restart.min-uptime` does not count, because it is the fault of the image or the command; neither does a
/// requested stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Failures {
    /// How long the job has run in total.
    pub uptime: Duration,
    /// How often it failed.
    pub failures: u32,
}

impl Failures {
    /// The mean time between two failures, with [`PRIOR`] as the initial assumption.
    #[must_use]
    pub fn mean_time_between(&self) -> Duration {
        PRIOR.saturating_add(self.uptime).min(FOREVER) / self.failures.saturating_add(1)
    }
}

/// The values that an interval is chosen from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// How long a snapshot freezes the job.
    pub freeze: Duration,
    /// Mean time between failures.
    pub mtbf: Duration,
    /// The source of that.
    pub mtbf_source: MtbfSource,
    /// The maximum share of the time that freezes may take. Zero means no limit.
    pub max_overhead: Percentage,
    /// How long a copy of an image to the store takes.
    pub persist: Option<Duration>,
}

/// Chooses an interval.
#[must_use]
pub fn choose(facts: &Facts) -> Choice {
    // Rounded as displayed, so that a reader of a choice gets the same result.
    let freeze = whole_micros(facts.freeze);
    let mtbf = whole_micros(facts.mtbf);
    let persist = facts.persist.map(whole_micros);
    let by_formula = daly(freeze, mtbf);
    let (mut interval, mut bound) = match by_formula {
        t if t < SHORTEST => (SHORTEST, Bound::Minimum),
        t if t > LONGEST => (LONGEST, Bound::Maximum),
        t => (whole_micros(t), Bound::Daly),
    };
    let lower = [
        (least_for(freeze, facts.max_overhead), Bound::MaxOverhead),
        (persist.map(|it| it.min(LONGEST)), Bound::Persist),
    ];
    for (least, by) in lower {
        if let Some(least) = least.filter(|least| *least > interval) {
            (interval, bound) = (least, by);
        }
    }
    Choice {
        interval,
        freeze,
        mtbf,
        mtbf_source: facts.mtbf_source,
        persist,
        max_overhead: facts.max_overhead,
        expected_overhead: overhead(interval, freeze),
        expected_loss: loss(interval, mtbf),
        bound,
    }
}

/// The share of the time that freezes take: d / (T + d).
#[must_use]
pub fn overhead(interval: Duration, freeze: Duration) -> Percentage {
    share(freeze, interval.saturating_add(freeze))
}

/// The share of the work that failures cost: T / 2M, at most all of it.
#[must_use]
pub fn loss(interval: Duration, mtbf: Duration) -> Percentage {
    share(interval, mtbf.saturating_mul(2))
}

/// T by Young's formula.
fn young(freeze: Duration, mtbf: Duration) -> Duration {
    seconds((2.0 * freeze.as_secs_f64() * mtbf.as_secs_f64()).sqrt())
}

/// T by Daly's formula.
fn daly(freeze: Duration, mtbf: Duration) -> Duration {
    if freeze >= mtbf.saturating_mul(2) {
        return mtbf;
    }
    let ratio = freeze.as_secs_f64() / (2.0 * mtbf.as_secs_f64());
    let longer = young(freeze, mtbf).as_secs_f64() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0);
    seconds(longer - freeze.as_secs_f64())
}

/// The shortest T with d / (T + d) <= share, if there is one.
fn least_for(freeze: Duration, share: Percentage) -> Option<Duration> {
    let share = u128::from(share.as_millionths());
    let rest = u128::from(ALL).saturating_sub(share);
    let micros = freeze.as_micros().checked_mul(rest)?.checked_add(share.checked_sub(1)?)? / share;
    Some(u64::try_from(micros).map_or(FOREVER, |micros| Duration::from_micros(micros).min(FOREVER)))
}

/// The whole, in millionths.
const ALL: u32 = 1_000_000;

/// `part` as a share of `whole`, at most 100 %.
fn share(part: Duration, whole: Duration) -> Percentage {
    let millionths = part.as_micros().checked_mul(u128::from(ALL)).and_then(|n| n.checked_div(whole.as_micros()));
    Percentage::millionths(millionths.and_then(|n| u32::try_from(n).ok()).unwrap_or(ALL).min(ALL))
}

/// Rounded up, and within `FOREVER`.
#[must_use]
pub fn whole_micros(time: Duration) -> Duration {
    let micros = time.min(FOREVER).as_nanos().div_ceil(1_000);
    u64::try_from(micros).map_or(FOREVER, Duration::from_micros)
}

/// Within 0 and `FOREVER`.
fn seconds(n: f64) -> Duration {
    Duration::try_from_secs_f64(n.max(0.0)).unwrap_or(FOREVER).min(FOREVER)
}

#[cfg(test)]
mod tests;
