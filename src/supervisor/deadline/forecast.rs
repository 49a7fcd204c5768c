//! How long the final snapshot will take, from measurements. Pure: events come in, a [`Forecast`] comes out.

use std::collections::VecDeque;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::super::times::in_seconds;
use crate::published::{Forecast, Persisting};
use crate::telemetry::events::{Event, What};
use rekindle_store::ImageId;

/// Number of measurements that are remembered of each kind. The slowest counts: being early costs seconds, being late
/// costs the work since the previous image. But see [`UNUSUAL`].
const REMEMBERED: usize = 5;

/// Of at least three measurements, one that is so many times as long as the median does not count: the machine was
/// stopped, or a file server was away. Otherwise one of them would end each run hours too early.
const UNUSUAL: u32 = 8;

/// Assumed bytes per microsecond for a transfer that was never measured: 100 MB/s, a slow disk or a network file
/// system.
const UNKNOWN_RATE: u64 = 100;

/// Where a final image is copied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Route {
    /// Whether there is a replica.
    pub(super) replica: bool,
}

/// The transfer of an image from one place to another.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    bytes: u64,
    took: Duration,
}

/// What was measured so far.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// When the snapshot in progress began.
    began: Option<DateTime<Utc>>,
    /// The newest image, and its size.
    newest: Option<(ImageId, u64)>,
    snapshots: VecDeque<Duration>,
    stored: VecDeque<Transfer>,
    replicated: VecDeque<Transfer>,
    /// This process was stopped for a while: what was in progress then is not measured.
    stopped: Stopped,
}

#[derive(Debug, Default)]
struct Stopped {
    snapshot: bool,
    store: bool,
    replica: bool,
}

impl Measured {
    /// This process was stopped for a while, and the job probably with it.
    pub(super) fn was_stopped(&mut self) {
        self.stopped = Stopped { snapshot: self.began.is_some(), store: true, replica: true };
    }

    /// Updates the measurements with an event.
    pub(super) fn observe(&mut self, event: &Event) {
        match &event.what {
            What::SnapshotBegan { .. } => (self.began, self.stopped.snapshot) = (Some(event.time), false),
            What::SnapshotTaken { image, bytes, freeze_us, .. } => {
                let took = self.began.take().and_then(|began| (event.time - began).to_std().ok());
                if !std::mem::take(&mut self.stopped.snapshot) {
                    // At least the freeze, because the wall clock may have been set back.
                    remember(&mut self.snapshots, took.unwrap_or_default().max(Duration::from_micros(*freeze_us)));
                }
                self.newest = Some((*image, *bytes));
            }
            What::SnapshotFailed { .. } => self.began = None,
            What::Stored { .. } if std::mem::take(&mut self.stopped.store) => {}
            What::Replicated { .. } if std::mem::take(&mut self.stopped.replica) => {}
            What::Stored { image, took_us, .. } => {
                let transfer = self.transfer(*image, *took_us);
                transfer.into_iter().for_each(|transfer| remember(&mut self.stored, transfer));
            }
            What::Replicated { image, took_us, .. } => {
                let transfer = self.transfer(*image, *took_us);
                transfer.into_iter().for_each(|transfer| remember(&mut self.replicated, transfer));
            }
            _ => {}
        }
    }

    fn transfer(&self, image: ImageId, took_us: u64) -> Option<Transfer> {
        let (_, bytes) = self.newest.filter(|(newest, _)| *newest == image)?;
        Some(Transfer { bytes, took: Duration::from_micros(took_us) })
    }

    /// How long the final snapshot will take; none before the first snapshot.
    pub(super) fn forecast(&self, route: Route) -> Option<Forecast> {
        let snapshot = slowest_usual(self.snapshots.iter().copied().collect())?;
        let bytes = self.newest.map_or(0, |(_, bytes)| bytes);
        let replica = if route.replica { slowest(&self.replicated, bytes) } else { Duration::ZERO };
        Some(Forecast { snapshot, store: slowest(&self.stored, bytes), replica })
    }
}

fn remember<T>(known: &mut VecDeque<T>, new: T) {
    if known.len() >= REMEMBERED {
        known.pop_front();
    }
    known.push_back(new);
}

fn slowest_usual(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied()?;
    let usual = |time: &&Duration| times.len() < 3 || **time <= median.saturating_mul(UNUSUAL);
    times.iter().rev().find(usual).copied()
}

/// The time to transfer this many bytes at the slowest measured rate.
fn slowest(transfers: &VecDeque<Transfer>, bytes: u64) -> Duration {
    let scaled = |transfer: &Transfer| {
        let micros = transfer.took.as_micros().saturating_mul(u128::from(bytes)) / u128::from(transfer.bytes.max(1));
        // A transfer has fixed costs too.
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)).max(transfer.took)
    };
    slowest_usual(transfers.iter().map(scaled).collect()).unwrap_or_else(|| Duration::from_micros(bytes / UNKNOWN_RATE))
}

/// The time until an image is stored, if storing all of it is expected to take `whole`.
pub(super) fn left_of(seen: &Persisting, whole: Duration) -> Duration {
    let left = seen.total.saturating_sub(seen.done);
    let micros = whole.as_micros().saturating_mul(u128::from(left)) / u128::from(seen.total.max(1));
    let expected = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
    // Its own rate means little at the beginning.
    let is_telling = seen.done.saturating_mul(4) >= seen.total;
    let at_its_rate = left.checked_div(seen.rate).filter(|_| is_telling).map(Duration::from_secs);
    expected.max(at_its_rate.unwrap_or_default())
}

/// When the final snapshot starts, between the start of a run and its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// When it starts.
    pub(super) at: DateTime<Utc>,
    /// Whether there is enough time for it.
    pub(super) room: Room,
}

impl Plan {
    /// Early enough before this time, however long the run was.
    pub(super) fn until(end: DateTime<Utc>, lead: Duration) -> Plan {
        let lead = chrono::TimeDelta::from_std(lead).unwrap_or(chrono::TimeDelta::MAX);
        Plan { at: end.checked_sub_signed(lead).unwrap_or(DateTime::<Utc>::MIN_UTC), room: Room::Enough }
    }
}

/// Whether the time until a deadline is enough for the final snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    Enough,
    /// It would take more than half of the time. The job still runs for the other half: otherwise it would never make
    /// progress.
    Short,
}

/// Plans the final snapshot of a run that started at `begun` and must end by `deadline`.
pub(super) fn plan(begun: DateTime<Utc>, deadline: DateTime<Utc>, lead: Duration) -> Plan {
    let half = begun + (deadline - begun).max(chrono::TimeDelta::zero()) / 2;
    let lead = chrono::TimeDelta::from_std(lead).unwrap_or(chrono::TimeDelta::MAX);
    match deadline.checked_sub_signed(lead) {
        Some(at) if at >= half => Plan { at, room: Room::Enough },
        _ => Plan { at: half, room: Room::Short },
    }
}

/// Whether somebody limits the time of a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attended {
    /// A scheduler or an orchestrator, which kills us when the grace period is over.
    Yes,
    /// Nobody: after the final snapshot there is no time limit.
    No,
}

/// The message for a grace period that is too short for the final snapshot: the problem, and what to do.
pub(super) fn too_short(forecast: &Forecast, grace: Duration, attended: Attended) -> Option<String> {
    let advice = format!(
        "Raise --grace, and allow {} or more for both: terminationGracePeriodSeconds, TimeoutStopSec, or N in Slurm's \
        --signal=B:USR2@N",
        in_seconds(forecast.lead())
    );
    let (snapshot, given) = (in_seconds(forecast.snapshot), in_seconds(grace));
    if forecast.snapshot > grace {
        return Some(format!(
            "the final snapshot is expected to take {snapshot}, and snapshot.grace is {given}: a stop would end the \
            job without one. {advice}"
        ));
    }
    if attended == Attended::No || forecast.total() <= grace {
        return None;
    }
    let way = in_seconds(forecast.store.saturating_add(forecast.replica));
    Some(format!(
        "the final snapshot is expected to take {snapshot}, then {way} to store; snapshot.grace is {given}: the image \
        would be lost in memory. {advice}"
    ))
}

#[cfg(test)]
mod tests;
