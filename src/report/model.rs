//! What a report says, from events and facts about images; touches nothing.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::history::{Failure, History, Kind, Snapshot, Span, Trouble};
use super::words;
use crate::telemetry::events::Event;
use rekindle_base::Percentage;
use rekindle_base::interval::{self, Choice, Failures, MtbfSource};
use rekindle_store::ImageId;

/// So many events are listed.
const EVENTS: usize = 200;

/// What is known beside the events.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The job.
    pub job: String,
    /// What its supervisor does, or how its last run ended.
    pub state: String,
    /// Whether it has a supervisor: what goes on now is then not over.
    pub supervised: bool,
    /// What the job's folder takes on the disk, in bytes.
    pub disk: u64,
    /// The images, newest first.
    pub images: Vec<ImageSize>,
    /// What is before this is left out.
    pub since: Option<DateTime<Utc>>,
}

/// What an image takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageSize {
    /// Which.
    pub id: ImageId,
    /// Whether it can be restored from.
    pub good: bool,
    /// Where it is.
    pub places: String,
    /// Bytes of its content.
    pub bytes: u64,
    /// Bytes that it added to the store: what no older image had, compressed. None while it is in memory only.
    pub stored: Option<u64>,
}

/// All that a report says. Times are microseconds of UNIX time, lengths of time in microseconds, sizes in bytes, shares
/// in millionths.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// 1.
    pub version: u32,
    /// The job.
    pub job: String,
    /// What its supervisor does, or how its last run ended.
    pub state: String,
    /// When this was made.
    pub made: i64,
    /// The command line, as the last supervisor had it.
    pub command: Vec<String>,
    /// The interval, as configured.
    pub interval: String,
    /// Since when the job runs, if it does.
    pub up_since: Option<i64>,
    /// When what is reported begins; none where there is nothing.
    pub from: Option<i64>,
    /// And ends.
    pub to: Option<i64>,
    /// What the time went to.
    pub times: Times,
    /// How often the job had to be restarted.
    pub restarts: usize,
    /// How often the job or its supervisor died or was given up.
    pub failures: usize,
    /// How often a snapshot failed.
    pub snapshots_failed: usize,
    /// How long the job was frozen for snapshots.
    pub freeze: Option<Freezes>,
    /// What the interval costs; none before there are two snapshots in a row.
    pub cost: Option<Cost>,
    /// What the job's folder takes on the disk.
    pub disk: u64,
    /// The images that there are, newest first.
    pub images: Vec<ImageSize>,
    /// What the time went to, moment by moment.
    pub timeline: Vec<Span>,
    /// When an image was being stored: from, to.
    pub persists: Vec<(i64, i64)>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// What went wrong, oldest first.
    pub troubles: Vec<Failure>,
    /// The newest events, oldest first.
    pub events: Vec<Told>,
    /// How many there are in all.
    pub events_in_all: usize,
    /// How often the clock was set back.
    pub clock_set_back: u32,
    /// By how much in all: later times are later by so much.
    pub clock_set_back_us: i64,
}

/// What the time went to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Times {
    /// All but `idle`: the time in which the job was meant to run.
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
    /// `useful` of `wall`; none where that is nothing.
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

    /// What went to a kind.
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

    /// So much of `wall`, in millionths.
    #[must_use]
    pub fn share(&self, us: u64) -> Option<u64> {
        let ppm = u128::from(us).checked_mul(1_000_000)?.checked_div(u128::from(self.wall_us))?;
        u64::try_from(ppm).ok()
    }
}

/// How long the job was frozen for a snapshot. A freeze of zero was not measured and is not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Freezes {
    /// How many.
    pub count: usize,
    /// Half of them took no longer.
    pub median_us: u64,
    /// 95 of 100 took no longer.
    pub p95_us: u64,
    /// The longest.
    pub max_us: u64,
    /// All together.
    pub sum_us: u64,
}

impl Freezes {
    /// Of these; none where there are none.
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

/// The smallest that so many of a hundred do not exceed.
fn quantile(sorted: &[u64], hundredths: usize) -> Option<u64> {
    let rank = sorted.len().saturating_mul(hundredths).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied()
}

/// What the interval costs, and what the best one would.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// How long the job ran between two snapshots: the median, without the first of each life.
    pub interval_us: u64,
    /// The share of the time that freezes take with it.
    pub overhead_ppm: u32,
    /// The share of the work that failures cost with it, on average.
    pub loss_ppm: u32,
    /// The best, by Young and Daly, and its arithmetic as text.
    pub best: Choice,
    /// The same as text.
    pub arithmetic: String,
}

impl Cost {
    /// Both shares.
    #[must_use]
    pub fn sum_ppm(&self) -> u64 {
        u64::from(self.overhead_ppm) + u64::from(self.loss_ppm)
    }

    /// Both of the best.
    #[must_use]
    pub fn best_sum_ppm(&self) -> u64 {
        let Choice { expected_overhead, expected_loss, .. } = &self.best;
        u64::from(expected_overhead.as_millionths()) + u64::from(expected_loss.as_millionths())
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
            // Of nothing that the user bounds: what it would cost is said beside it.
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

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// An event as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Told {
    /// When.
    pub at: DateTime<Utc>,
    /// Its name.
    pub event: String,
    /// A sentence.
    pub text: String,
}

impl Told {
    /// As text.
    #[must_use]
    pub fn of(event: &Event) -> Told {
        let (name, text) = words::event(&event.what);
        Told { at: event.time, event: name, text }
    }
}

impl Report {
    /// Adds up.
    #[must_use]
    pub fn new(events: &[Event], facts: Facts, now: DateTime<Utc>) -> Report {
        let history = History::of(events);
        let (clock_set_back, clock_set_back_us) = history.set_back();
        // Of all events: work is lost by what comes later, not by where one begins to look.
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
            events: recent.iter().skip(recent.len().saturating_sub(EVENTS)).map(|event| Told::of(event)).collect(),
            events_in_all: recent.len(),
            clock_set_back,
            clock_set_back_us,
        }
    }
}

#[cfg(test)]
mod tests;
