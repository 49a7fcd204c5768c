//! Computes the content of a report from events and facts about images. Reads and writes nothing.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::history::{Failure, GroupHistory, History, Kind, Snapshot, Span, Trouble};
use super::words;
use crate::published::ShownState;
use crate::telemetry::events::Event;
use rekindle_base::Percentage;
use rekindle_base::interval::{self, Choice, Failures, MtbfSource};
use rekindle_store::ImageId;

/// Number of events listed.
const EVENTS: usize = 200;

/// Facts besides the events.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The job.
    pub job: String,
    /// The state of its supervisor, or how its last run ended.
    pub state: ShownState,
    /// Whether it has a supervisor: then the present stretch is not over.
    pub supervised: bool,
    /// Bytes that the job's folder occupies on the disk.
    pub disk: u64,
    /// The images, newest first.
    pub images: Vec<ImageSize>,
    /// Earlier times are left out.
    pub since: Option<DateTime<Utc>>,
}

/// The size of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageSize {
    /// The image.
    pub id: ImageId,
    /// Whether it can be restored.
    pub good: bool,
    /// The places of its copies.
    pub places: String,
    /// Bytes of its content.
    pub bytes: u64,
    /// Bytes that it added to the store: new content, compressed. `None` while it is only in memory.
    pub stored: Option<u64>,
}

/// The content of a report. Times are microseconds of UNIX time, durations in microseconds, sizes in bytes, shares in
/// millionths.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of the format: 1.
    pub version: u32,
    /// The job.
    pub job: String,
    /// The state of its supervisor, or how its last run ended.
    pub state: ShownState,
    /// When the report was made.
    pub made: i64,
    /// The command line of the last supervisor.
    pub command: Vec<String>,
    /// The interval, as configured.
    pub interval: String,
    /// Since when the job has been running, if it is.
    pub up_since: Option<i64>,
    /// The beginning of the reported time; `None` if there is none.
    pub from: Option<i64>,
    /// The end of the reported time.
    pub to: Option<i64>,
    /// How the time was spent.
    pub times: Times,
    /// How often the job had to be restarted.
    pub restarts: usize,
    /// How often the job or its supervisor died, or the job was given up.
    pub failures: usize,
    /// How often a snapshot failed.
    pub snapshots_failed: usize,
    /// The freezes of snapshots.
    pub freeze: Option<Freezes>,
    /// The cost of the interval; `None` before there are two snapshots in a row.
    pub cost: Option<Cost>,
    /// Bytes that the job's folder occupies on the disk.
    pub disk: u64,
    /// The existing images, newest first.
    pub images: Vec<ImageSize>,
    /// How the time was spent, moment by moment.
    pub timeline: Vec<Span>,
    /// The times in which an image was being stored: from, to.
    pub persists: Vec<(i64, i64)>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// The failures, oldest first.
    pub troubles: Vec<Failure>,
    /// The group, for a job over several machines: what this machine saw of it.
    pub group: Option<GroupHistory>,
    /// The newest events, oldest first.
    pub events: Vec<EventLine>,
    /// Total number of events.
    pub events_in_all: usize,
    /// How often the clock was set back.
    pub clock_set_back: u32,
    /// By how much in total: later times are corrected by this.
    pub clock_set_back_us: i64,
}

/// How the time was spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Times {
    /// All but `idle`: the time in which the job was supposed to run.
    pub wall_us: u64,
    /// See [`Kind::Useful`].
    pub useful_us: u64,
    /// See [`Kind::Frozen`].
    pub frozen_us: u64,
    /// See [`Kind::Lost`].
    pub lost_us: u64,
    /// See [`Kind::Down`].
    pub down_us: u64,
    /// See [`Kind::Away`].
    pub away_us: u64,
    /// See [`Kind::Idle`].
    pub idle_us: u64,
    /// `useful` as a share of `wall`; `None` if that is zero.
    pub goodput_ppm: Option<u64>,
}

impl Times {
    /// From sums in the order of [`Kind::ALL`].
    #[must_use]
    pub fn new(sums: [u64; 6]) -> Times {
        let [useful_us, frozen_us, lost_us, down_us, away_us, idle_us] = sums;
        let wall_us = [useful_us, frozen_us, lost_us, down_us, away_us].iter().sum();
        let mut times = Times { wall_us, useful_us, frozen_us, lost_us, down_us, away_us, idle_us, goodput_ppm: None };
        times.goodput_ppm = times.share(useful_us);
        times
    }

    /// The time of a kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Useful => self.useful_us,
            Kind::Frozen => self.frozen_us,
            Kind::Lost => self.lost_us,
            Kind::Down => self.down_us,
            Kind::Away => self.away_us,
            Kind::Idle => self.idle_us,
        }
    }

    /// This time as a share of `wall`, in millionths.
    #[must_use]
    pub fn share(&self, us: u64) -> Option<u64> {
        let ppm = u128::from(us).checked_mul(1_000_000)?.checked_div(u128::from(self.wall_us))?;
        u64::try_from(ppm).ok()
    }
}

/// The freezes of snapshots. A freeze of zero was not measured and does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Freezes {
    /// Their number.
    pub count: usize,
    /// The median.
    pub median_us: u64,
    /// The 95th percentile.
    pub p95_us: u64,
    /// The maximum.
    pub max_us: u64,
    /// The sum.
    pub sum_us: u64,
}

impl Freezes {
    /// Statistics of these freezes; `None` if there are none.
    #[must_use]
    pub fn of(freezes: impl Iterator<Item = u64>) -> Option<Freezes> {
        let mut sorted: Vec<u64> = freezes.filter(|freeze| *freeze > 0).collect();
        sorted.sort_unstable();
        Some(Freezes {
            count: sorted.len(),
            median_us: quantile(&sorted, 50)?,
            p95_us: quantile(&sorted, 95)?,
            max_us: *sorted.last()?,
            sum_us: sorted.iter().sum(),
        })
    }
}

/// The smallest value that this percentage does not exceed.
fn quantile(sorted: &[u64], hundredths: usize) -> Option<u64> {
    let rank = sorted.len().saturating_mul(hundredths).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied()
}

/// The cost of the interval, and of the best one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// The median time that the job ran between two snapshots, without the first of each life.
    pub interval_us: u64,
    /// The share of the time that freezes take with this interval.
    pub overhead_ppm: u32,
    /// The average share of the work that failures cost with this interval.
    pub loss_ppm: u32,
    /// The best interval according to Young and Daly.
    pub best: Choice,
    /// Its arithmetic as text.
    pub arithmetic: String,
}

impl Cost {
    /// The sum of both shares, each rounded as it is shown.
    #[must_use]
    pub fn sum_ppm(&self) -> u64 {
        sum_as_shown([self.overhead_ppm, self.loss_ppm])
    }

    /// The sum of both shares with the best interval, each rounded as it is shown.
    #[must_use]
    pub fn best_sum_ppm(&self) -> u64 {
        let Choice { expected_overhead, expected_loss, .. } = &self.best;
        sum_as_shown([expected_overhead, expected_loss].map(|share| share.as_millionths()))
    }

    fn of(snapshots: &[Snapshot], freezes: &Freezes, ran: u64, failures: usize) -> Option<Cost> {
        let mut intervals: Vec<u64> = snapshots.iter().filter(|it| !it.first).map(|it| it.ran_us).collect();
        intervals.sort_unstable();
        let interval = quantile(&intervals, 50)?;
        let observed = Failures { uptime: us(ran), failures: u32::try_from(failures).unwrap_or(u32::MAX) };
        let freeze = us(freezes.median_us);
        let mtbf = observed.mean_time_between();
        let best = interval::choose(&interval::Facts {
            freeze,
            mtbf,
            mtbf_source: MtbfSource::Observed { uptime: observed.uptime, failures: observed.failures },
            // The user's limit is not applied: the cost is shown beside it.
            max_overhead: Percentage::millionths(0),
            persist: None,
        });
        Some(Cost {
            interval_us: interval,
            overhead_ppm: interval::overhead(us(interval), freeze).as_millionths(),
            loss_ppm: interval::loss(us(interval), mtbf).as_millionths(),
            arithmetic: best.to_string(),
            best,
        })
    }
}

/// A table with these shares and their sum must add up: a hundredth of a percent is the last digit.
fn sum_as_shown(shares: [u32; 2]) -> u64 {
    shares.into_iter().map(|ppm| (u64::from(ppm) + 50) / 100 * 100).sum()
}

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// An event as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EventLine {
    /// The time of the event.
    pub at: DateTime<Utc>,
    /// Its name.
    pub event: String,
    /// A sentence about it.
    pub text: String,
}

impl EventLine {
    /// Converts an event to text.
    #[must_use]
    pub fn of(event: &Event) -> EventLine {
        let (name, text) = words::event(&event.what);
        EventLine { at: event.time, event: name, text }
    }
}

impl Report {
    /// Computes a report.
    #[must_use]
    pub fn new(events: &[Event], facts: Facts, now: DateTime<Utc>) -> Report {
        let history = History::of(events);
        let (clock_set_back, clock_set_back_us) = history.set_back();
        // Of all events, because later events decide whether work was lost, not the start of the report.
        let mut timeline = history.until(facts.supervised.then_some(now));
        let mut snapshots = history.snapshots().to_vec();
        let mut troubles = history.failures().to_vec();
        let mut persists = history.persists().to_vec();
        let mut restarts = history.restarts().to_vec();
        if let Some(since) = facts.since.map(|since| since.timestamp_micros()) {
            timeline.retain(|span| span.to > since);
            timeline.iter_mut().for_each(|span| span.from = span.from.max(since));
            snapshots.retain(|snapshot| snapshot.at >= since);
            troubles.retain(|trouble| trouble.at >= since);
            persists.retain(|(_, to)| *to >= since);
            restarts.retain(|at| *at >= since);
        }
        let sum = |kind| timeline.iter().filter(|span| span.kind == kind).map(Span::length).sum();
        let times = Times::new(Kind::ALL.map(sum));
        let count = |what: &[Trouble]| troubles.iter().filter(|it| what.contains(&it.what)).count();
        let failures = count(&[Trouble::Crash, Trouble::Supervisor, Trouble::GivenUp]);
        let freeze = Freezes::of(snapshots.iter().map(|snapshot| snapshot.freeze_us));
        let ran = times.useful_us.saturating_add(times.lost_us);
        let recent: Vec<&Event> =
            events.iter().filter(|event| facts.since.is_none_or(|since| event.time >= since)).collect();
        let (command, interval) = history.setting();
        Report {
            version: 1,
            job: facts.job,
            state: facts.state,
            made: now.timestamp_micros(),
            command: command.to_vec(),
            interval: interval.to_owned(),
            up_since: history.up_since().filter(|_| facts.supervised),
            from: timeline.first().map(|span| span.from),
            to: timeline.last().map(|span| span.to),
            times,
            restarts: restarts.len(),
            failures,
            snapshots_failed: count(&[Trouble::Snapshot]),
            cost: freeze.as_ref().and_then(|freezes| Cost::of(&snapshots, freezes, ran, failures)),
            freeze,
            disk: facts.disk,
            images: facts.images,
            timeline,
            persists,
            snapshots,
            troubles,
            group: history.group().since(facts.since.map_or(i64::MIN, |since| since.timestamp_micros())),
            events: recent.iter().skip(recent.len().saturating_sub(EVENTS)).map(|event| EventLine::of(event)).collect(),
            events_in_all: recent.len(),
            clock_set_back,
            clock_set_back_us,
        }
    }
}

#[cfg(test)]
mod tests;
