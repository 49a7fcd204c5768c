//! How long a last snapshot will take, by what was measured. Pure: events come in, a [`Forecast`] comes out.

use std::collections::VecDeque;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::published::{Forecast, Persisting};
use crate::telemetry::events::{Event, What};
use rekindle_store::ImageId;

/// So many are remembered of each, and the slowest of them counts: being early costs seconds, being late the work since the
/// image before.
const REMEMBERED: usize = 5;

/// Bytes in a microsecond for a way that was never measured: 100 MB/s, a slow disk or a network file system.
const UNKNOWN_RATE: u64 = 100;

/// Where an image goes that is to outlive this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Route {
    /// A replica is kept.
    pub(super) replica: bool,
}

/// An image that went from one place to another.
#[derive(Debug, Clone, Copy)]
struct Trip {
    bytes: u64,
    took: Duration,
}

/// What was measured so far.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// When the snapshot under way was begun.
    began: Option<DateTime<Utc>>,
    /// The newest image, and its size.
    newest: Option<(ImageId, u64)>,
    snapshots: VecDeque<Duration>,
    stored: VecDeque<Trip>,
    replicated: VecDeque<Trip>,
}

impl Measured {
    /// Learns from what happened.
    pub(super) fn observe(&mut self, event: &Event) {
        match &event.what {
            What::SnapshotBegan { .. } => self.began = Some(event.time),
            What::SnapshotTaken { image, bytes, freeze_us, .. } => {
                let took = self.began.take().and_then(|began| (event.time - began).to_std().ok());
                // Not less than the freeze: the clock on the wall may be put back.
                remember(&mut self.snapshots, took.unwrap_or_default().max(Duration::from_micros(*freeze_us)));
                self.newest = Some((*image, *bytes));
            }
            What::SnapshotFailed { .. } => self.began = None,
            What::Stored { image, took_us, .. } => {
                let trip = self.trip(*image, *took_us);
                trip.into_iter().for_each(|trip| remember(&mut self.stored, trip));
            }
            What::Replicated { image, took_us, .. } => {
                let trip = self.trip(*image, *took_us);
                trip.into_iter().for_each(|trip| remember(&mut self.replicated, trip));
            }
            _ => {}
        }
    }

    fn trip(&self, image: ImageId, took_us: u64) -> Option<Trip> {
        let (_, bytes) = self.newest.filter(|(newest, _)| *newest == image)?;
        Some(Trip { bytes, took: Duration::from_micros(took_us) })
    }

    /// What a last snapshot will take; none where there was no snapshot yet.
    pub(super) fn forecast(&self, route: Route) -> Option<Forecast> {
        let snapshot = self.snapshots.iter().max().copied()?;
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

/// How long so many bytes take on the slowest of the trips.
fn slowest(trips: &VecDeque<Trip>, bytes: u64) -> Duration {
    let scaled = |trip: &Trip| {
        let micros = trip.took.as_micros().saturating_mul(u128::from(bytes)) / u128::from(trip.bytes.max(1));
        // A trip has costs that do not shrink with the image.
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)).max(trip.took)
    };
    trips.iter().map(scaled).max().unwrap_or_else(|| Duration::from_micros(bytes / UNKNOWN_RATE))
}

/// What an image that is on its way to the store still needs, where all of it is expected to take so long.
pub(super) fn left_of(seen: &Persisting, whole: Duration) -> Duration {
    let left = seen.total.saturating_sub(seen.done);
    let micros = whole.as_micros().saturating_mul(u128::from(left)) / u128::from(seen.total.max(1));
    let expected = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
    // Its own rate says nothing at its begin.
    let is_telling = seen.done.saturating_mul(4) >= seen.total;
    let at_its_rate = left.checked_div(seen.rate).filter(|_| is_telling).map(Duration::from_secs);
    expected.max(at_its_rate.unwrap_or_default())
}

/// For people: whole seconds, rounded up.
pub(super) fn in_seconds(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(time.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX)))
}

/// Where a last snapshot stands between the begin of a run and its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// When it is begun.
    pub(super) at: DateTime<Utc>,
    /// Whether the time is enough for it.
    pub(super) room: Room,
}

/// Whether the time until a deadline is enough for a last snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// It is.
    Enough,
    /// It would take more than half of it. The job runs for the other half all the same: stopped earlier each time, it would
    /// never get anywhere.
    Short,
}

/// Plans the last snapshot of a run that began at `begun` and must be gone at `deadline`.
pub(super) fn plan(begun: DateTime<Utc>, deadline: DateTime<Utc>, lead: Duration) -> Plan {
    let half = begun + (deadline - begun).max(chrono::TimeDelta::zero()) / 2;
    let lead = chrono::TimeDelta::from_std(lead).unwrap_or(chrono::TimeDelta::MAX);
    match deadline.checked_sub_signed(lead) {
        Some(at) if at >= half => Plan { at, room: Room::Enough },
        _ => Plan { at: half, room: Room::Short },
    }
}

/// Who decides what a stop must fit into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attended {
    /// A scheduler or an orchestrator, who kills us when the grace is over.
    Yes,
    /// Nobody: after the last snapshot there is all the time of the world.
    No,
}

/// What is wrong with a grace that cannot hold a last snapshot, and what to do.
pub(super) fn too_short(forecast: &Forecast, grace: Duration, attended: Attended) -> Option<String> {
    let advice = format!(
        "Set it to what there is (--grace), and see that there is enough: {} or more as terminationGracePeriodSeconds, TimeoutStopSec, or N in Slurm's --signal=B:USR2@N",
        in_seconds(forecast.lead())
    );
    let (snapshot, given) = (in_seconds(forecast.snapshot), in_seconds(grace));
    if forecast.snapshot > grace {
        return Some(format!(
            "a last snapshot is expected to take {snapshot}, and snapshot.grace is {given}: a stop would end the job without one. {advice}"
        ));
    }
    if attended == Attended::No || forecast.total() <= grace {
        return None;
    }
    let way = in_seconds(forecast.store.saturating_add(forecast.replica));
    Some(format!(
        "a last snapshot is expected to take {snapshot}, and then {way} to where it is safe; snapshot.grace is {given}: whoever kills us then leaves it in memory only. {advice}"
    ))
}

#[cfg(test)]
mod tests;
