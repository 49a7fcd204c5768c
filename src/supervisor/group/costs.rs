//! What snapshots cost in a group: the interval that is one for all, and the time for the final snapshot.
//!
//! A group is as slow as its slowest machine. Each machine reports what it measures, and the plan counts how long the job
//! has run and how often it failed. So all machines choose nearly the same interval, and that of the leader counts. Pure.

use std::time::Duration;

use crate::config::Snapshot;
use crate::published::Forecast;
use crate::supervisor::pace::automatic;
use rekindle_base::interval::{Choice, Failures};
use rekindle_group::{Costs, Epoch, LastSnapshot, Number, Rank, View};

/// The interval of a group, if it is chosen automatically.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// What it was chosen from: it is chosen again after each snapshot and each start, as on one machine.
    seen: Option<(Epoch, Number, Vec<Costs>)>,
    interval: Duration,
    choice: Option<Choice>,
}

impl Pace {
    /// The choice, once a freeze was measured.
    pub(super) fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    /// The time until the next group snapshot. `age` is the time since the present epoch began to run.
    pub(super) fn interval(&mut self, view: &View, config: &Snapshot, age: Duration) -> Duration {
        let plan = view.plan.as_ref().map(|plan| &plan.value);
        let costs: Vec<Costs> = view.members.values().map(|report| report.costs.clone()).collect();
        let now =
            (plan.map(|plan| plan.epoch).unwrap_or_default(), plan.map(|plan| plan.next).unwrap_or_default(), costs);
        if self.seen.as_ref() != Some(&now) {
            let past = plan.map(|plan| plan.past).unwrap_or_default();
            let observed = Failures { uptime: past.ran.saturating_add(age), failures: past.failures };
            let slowest = |of: fn(&Costs) -> Option<Duration>| now.2.iter().filter_map(of).max();
            match automatic(config, observed, slowest(|costs| costs.freeze), slowest(|costs| costs.store)) {
                Ok(choice) => (self.interval, self.choice) = (choice.interval, Some(choice)),
                Err(first) => (self.interval, self.choice) = (first, None),
            }
            self.seen = Some(now);
        }
        self.interval
    }
}

/// The time for the final snapshot of the group: each step is as slow as on the slowest machine.
pub(super) fn last_of_all(own: Option<Forecast>, view: &View, us: Rank) -> Option<Forecast> {
    let others = view.members.iter().filter(|(rank, _)| **rank != us).filter_map(|(_, report)| report.costs.last);
    others.fold(own, |slowest, LastSnapshot { snapshot, store, replica }| {
        let slowest = slowest.unwrap_or(Forecast { snapshot, store, replica });
        Some(Forecast {
            snapshot: slowest.snapshot.max(snapshot),
            store: slowest.store.max(store),
            replica: slowest.replica.max(replica),
        })
    })
}

/// How long other machines may still need to store the parts of the last group image: a stop waits for that.
pub(super) fn others_store(view: &View, us: Rank) -> Duration {
    let storing = view.members.iter().filter(|(rank, report)| **rank != us && report.storing);
    storing.filter_map(|(_, report)| Some(report.costs.last?.store)).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Arc;

    use super::*;
    use crate::config::{Config, Interval};
    use rekindle_group::{Fresh, Goal, Incarnation, Past, Plan, Report, StartFrom, State, Then, Versioned};

    const SECOND: Duration = Duration::from_secs(1);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn view(costs: [Costs; 2], past: Past) -> View {
        let report = |costs| Report {
            incarnation: Incarnation(7),
            seen: 1,
            epoch: Epoch(1),
            state: State::Running,
            parts: BTreeMap::new(),
            storing: false,
            costs,
            done: false,
            asked: None,
            fresh: Fresh::No,
            floor: Number(0),
            rests: false,
            rewound: None,
            begun: false,
        };
        let plan = Plan {
            origin: Incarnation(7),
            serial: 1,
            epoch: Epoch(1),
            crew: BTreeMap::new(),
            goal: Goal::Run,
            then: Then::RunOn,
            next: Number(1),
            from: StartFrom::Beginning,
            healthy: true,
            failures: BTreeMap::new(),
            proven: BTreeSet::new(),
            in_a_row: 0,
            lost: 0,
            fatal: 0,
            counted: None,
            early_cold: 0,
            last: None,
            past,
            aim: None,
            floor: Number(0),
            left: Vec::new(),
            served: BTreeMap::new(),
            refused: BTreeMap::new(),
        };
        View {
            plan: Some(Arc::new(Versioned { value: plan, revision: 1 })),
            members: (0..).map(Rank).zip(costs.map(report).map(Arc::new)).collect(),
            ..View::default()
        }
    }

    fn costs(freeze: u64, store: u64) -> Costs {
        Costs {
            freeze: Some(Duration::from_secs(freeze)),
            store: Some(Duration::from_secs(store)),
            last: None,
            quiet: false,
        }
    }

    #[test]
    fn the_interval_is_that_of_the_slowest_freeze_and_of_all_failures() {
        let auto = Snapshot { interval: Interval::Auto, ..Config::default().snapshot };
        let past = Past { ran: 9 * DAY, failures: 4 };
        let chosen = |view: &View, age| {
            let mut pace = Pace::default();
            (pace.interval(view, &auto, age), pace.choice().cloned())
        };
        let first = chosen(&view([Costs::default(), Costs::default()], past), Duration::ZERO);
        assert_eq!(first, (rekindle_base::interval::FIRST, None));
        let (interval, choice) = chosen(&view([costs(2, 10), costs(5, 3)], past), Duration::ZERO);
        let choice = choice.unwrap();
        assert_eq!((choice.freeze, choice.persist, choice.mtbf), (5 * SECOND, Some(10 * SECOND), 2 * DAY));
        assert_eq!(interval, choice.interval);
        // The present epoch counts too.
        assert_eq!(chosen(&view([costs(2, 10), costs(5, 3)], past), 5 * DAY).1.unwrap().mtbf, 3 * DAY);
        // Storing on one machine holds up the snapshots of all.
        assert_eq!(chosen(&view([costs(2, 80_000), costs(5, 3)], past), Duration::ZERO).0, 80_000 * SECOND);
    }

    #[test]
    fn it_is_chosen_again_only_after_a_snapshot_or_a_start() {
        let auto = Snapshot { interval: Interval::Auto, ..Config::default().snapshot };
        let (mut pace, mut view) = (Pace::default(), view([costs(2, 10), costs(2, 10)], Past::default()));
        let first = pace.interval(&view, &auto, Duration::ZERO);
        assert_eq!(pace.interval(&view, &auto, 9 * DAY), first);
        Arc::make_mut(view.plan.as_mut().unwrap()).value.next = Number(2);
        assert!(pace.interval(&view, &auto, 9 * DAY) > first);
    }

    #[test]
    fn the_final_snapshot_is_as_slow_as_each_step_on_the_slowest_machine() {
        let last = |snapshot, store, replica| LastSnapshot {
            snapshot: snapshot * SECOND,
            store: store * SECOND,
            replica: replica * SECOND,
        };
        let own = Forecast { snapshot: 4 * SECOND, store: 5 * SECOND, replica: 6 * SECOND };
        let slow = Costs { last: Some(last(2, 50, 6)), ..Costs::default() };
        let mut view = view([Costs::default(), slow], Past::default());
        let all = Forecast { store: 50 * SECOND, ..own };
        assert_eq!(last_of_all(Some(own), &view, Rank(0)), Some(all));
        // Its own report may be older than what it knows.
        assert_eq!(last_of_all(Some(own), &view, Rank(1)), Some(own));
        // A machine that has no snapshot of its own yet knows of those of the others.
        assert_eq!(last_of_all(None, &view, Rank(0)).unwrap().store, 50 * SECOND);
        assert_eq!(others_store(&view, Rank(0)), Duration::ZERO);
        Arc::make_mut(view.members.get_mut(&Rank(1)).unwrap()).storing = true;
        assert_eq!(others_store(&view, Rank(0)), 50 * SECOND);
        assert_eq!(others_store(&view, Rank(1)), Duration::ZERO);
    }
}
