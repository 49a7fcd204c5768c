//! What to do when a cloud announces that the machine is interrupted: pure functions.
//!
//! A notice that ends the machine soon, or at a time that nobody knows, stops the job at once, with a final snapshot.
//! One that leaves more time is a deadline, as a scheduler's time limit is, and a snapshot is taken in case that the
//! machine ends earlier. A notice that the machine survives only causes a snapshot.
//!
//! The answers of a cloud come over a network, so they must not be able to harm the job by their number: snapshots
//! because of notices are at least [`PAUSE`] apart, and a run stops only once.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use rekindle_base::notice::Notice;

/// A machine that ends within this time is left at once: the longest notice of a spot machine is two minutes (AWS), and
/// a job that is queued again loses nothing by leaving early.
const SOON: TimeDelta = TimeDelta::minutes(5);

/// The time that is assumed when the cloud does not say when: the shortest notice that any of them promises (Google
/// Cloud and Azure, for machines that are taken back).
pub(crate) const UNKNOWN: Duration = Duration::from_secs(30);

/// A time that is nearer than this counts as unknown, because this machine's clock may differ from the cloud's.
const NEAR: TimeDelta = TimeDelta::seconds(10);

/// The shortest time between two snapshots because of notices.
const PAUSE: Duration = Duration::from_secs(300);

/// What the job is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Job {
    /// It runs.
    Runs,
    /// It does not run: it is being started, waits for that, or is suspended.
    Rests,
    /// It is being stopped.
    Stops,
}

/// The expected times of a final snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Until the image is complete in memory.
    pub(crate) snapshot: Duration,
    /// To store it, and before it what is being stored.
    pub(crate) store: Duration,
    /// To replicate it; zero without a replica.
    pub(crate) replica: Duration,
}

/// Facts for a decision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    /// What the job does.
    pub(crate) job: Job,
    /// The forecast; none before the first snapshot.
    pub(crate) needs: Option<Needs>,
    /// How long ago a snapshot was taken because of a notice.
    pub(crate) last_snapshot: Option<Duration>,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Stop the job with a final snapshot.
    Stop {
        /// The time until the machine ends, if it is known.
        left: Option<Duration>,
        /// What that time is enough for.
        room: Room,
    },
    /// Take a snapshot now, and the final one before this time.
    Deadline(DateTime<Utc>),
    /// Take a snapshot; the job runs on.
    Snapshot,
    /// Nothing, for this reason.
    Nothing(Idle),
}

/// What the time until the end of the machine is enough for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// Nothing was measured yet.
    Unknown,
    /// For everything.
    Enough,
    /// The image can be stored, but not replicated.
    NotReplicated,
    /// A snapshot can be taken, but not stored.
    NotStored,
    /// Not even for a snapshot.
    NotTaken,
}

/// Why nothing is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idle {
    /// The job is being stopped already.
    Stopping,
    /// The job does not run, so there is nothing to save.
    Resting,
    /// A notice caused a snapshot shortly before.
    JustTaken,
}

impl Idle {
    /// The reason as text.
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Idle::Stopping => "the job is being stopped already",
            Idle::Resting => "the job does not run",
            Idle::JustTaken => "a snapshot was taken for a notice less than 5 minutes ago",
        }
    }
}

/// Decides what to do about a notice at `now`.
pub(crate) fn decide(notice: &Notice, facts: &Facts, now: DateTime<Utc>) -> Decision {
    if facts.job == Job::Stops {
        return Decision::Nothing(Idle::Stopping);
    }
    if notice.kind.ends_the_machine() {
        let left = notice.at.map(|at| at - now).filter(|left| *left >= NEAR);
        return match (left, notice.at) {
            (Some(left), Some(at)) if left > SOON => Decision::Deadline(at),
            _ => {
                let left = left.and_then(|left| left.to_std().ok());
                Decision::Stop { left, room: room(left.unwrap_or(UNKNOWN), facts.needs) }
            }
        };
    }
    match facts.last_snapshot {
        _ if facts.job == Job::Rests => Decision::Nothing(Idle::Resting),
        Some(ago) if ago < PAUSE => Decision::Nothing(Idle::JustTaken),
        _ => Decision::Snapshot,
    }
}

/// What this time is enough for.
fn room(left: Duration, needs: Option<Needs>) -> Room {
    let Some(Needs { snapshot, store, replica }) = needs else { return Room::Unknown };
    let stored = snapshot.saturating_add(store);
    match () {
        () if snapshot > left => Room::NotTaken,
        () if stored > left => Room::NotStored,
        () if stored.saturating_add(replica) > left => Room::NotReplicated,
        () => Room::Enough,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rekindle_base::notice::{Cloud, Kind};

    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn notice(kind: Kind, at: Option<DateTime<Utc>>) -> Notice {
        Notice { cloud: Cloud::Azure, kind, id: "1".into(), at }
    }

    const RUNS: Facts = Facts {
        job: Job::Runs,
        needs: Some(Needs {
            snapshot: Duration::from_secs(5),
            store: Duration::from_secs(40),
            replica: Duration::from_secs(60),
        }),
        last_snapshot: None,
    };

    /// The decision about an end of the machine in so many seconds.
    fn end_in(left: i64, facts: &Facts) -> Decision {
        let now = Utc::now();
        decide(&notice(Kind::Terminate, Some(now + TimeDelta::seconds(left))), facts, now)
    }

    #[test]
    fn a_machine_that_ends_soon_is_left_at_once_and_the_room_is_told() {
        for (left, room) in [
            (240_i64, Room::Enough),
            (100, Room::NotReplicated),
            (45, Room::NotReplicated),
            (44, Room::NotStored),
            (10, Room::NotStored),
        ] {
            let left_in = seconds(left.unsigned_abs());
            assert_eq!(end_in(left, &RUNS), Decision::Stop { left: Some(left_in), room }, "{left}");
        }
        let slow =
            Facts { needs: Some(Needs { snapshot: seconds(90), store: seconds(1), replica: seconds(0) }), ..RUNS };
        assert_eq!(end_in(60, &slow), Decision::Stop { left: Some(seconds(60)), room: Room::NotTaken });
        let first = Facts { needs: None, ..RUNS };
        assert_eq!(end_in(60, &first), Decision::Stop { left: Some(seconds(60)), room: Room::Unknown });
    }

    #[test]
    fn a_time_that_is_past_or_missing_is_unknown_and_the_shortest_notice_is_assumed() {
        let unknown = Decision::Stop { left: None, room: Room::NotStored };
        for left in [-86_400, -1, 0, 9] {
            assert_eq!(end_in(left, &RUNS), unknown, "{left}");
        }
        assert_eq!(decide(&notice(Kind::Preempt, None), &RUNS, Utc::now()), unknown);
    }

    #[test]
    fn a_machine_that_ends_later_has_a_deadline() {
        let now = Utc::now();
        let at = now + TimeDelta::minutes(15);
        for job in [Job::Runs, Job::Rests] {
            let facts = Facts { job, ..RUNS };
            assert_eq!(decide(&notice(Kind::Reboot, Some(at)), &facts, now), Decision::Deadline(at));
        }
    }

    #[test]
    fn what_the_machine_survives_causes_a_snapshot_and_not_too_many() {
        for kind in [Kind::Rebalance, Kind::Migrate, Kind::Freeze] {
            let about = |facts: Facts| decide(&notice(kind, None), &facts, Utc::now());
            assert_eq!(about(RUNS), Decision::Snapshot);
            assert_eq!(about(Facts { last_snapshot: Some(seconds(299)), ..RUNS }), Decision::Nothing(Idle::JustTaken));
            assert_eq!(about(Facts { last_snapshot: Some(seconds(300)), ..RUNS }), Decision::Snapshot);
            assert_eq!(about(Facts { job: Job::Rests, ..RUNS }), Decision::Nothing(Idle::Resting));
        }
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![
            Just(Kind::Terminate),
            Just(Kind::Preempt),
            Just(Kind::Hibernate),
            Just(Kind::Rebalance),
            Just(Kind::Freeze),
            Just(Kind::Unknown),
        ]
    }

    proptest! {
        #[test]
        fn only_an_end_of_the_machine_stops_a_job_and_nothing_stops_it_twice(
            kind in kind(),
            at in proptest::option::of(-8_000_000_000_000i64..8_000_000_000_000),
            ago in proptest::option::of(0u64..1000),
        ) {
            let now = Utc::now();
            let at = at.and_then(|seconds| DateTime::from_timestamp(seconds, 0));
            for job in [Job::Runs, Job::Rests, Job::Stops] {
                let facts = Facts { job, last_snapshot: ago.map(seconds), ..RUNS };
                let decision = decide(&notice(kind, at), &facts, now);
                let ends = matches!(decision, Decision::Stop { .. } | Decision::Deadline(_));
                prop_assert_eq!(ends, kind.ends_the_machine() && job != Job::Stops);
                if let Decision::Deadline(at) = decision {
                    prop_assert!(at - now > SOON);
                }
            }
        }
    }
}
