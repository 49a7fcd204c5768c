//! The search for the point on one machine, and how the machines of a job find the same one. Pure, as [`super::plan`].
//!
//! What a machine knows of the others is old. So it does not take their counts for a point: they may have let their ranks
//! continue since. Each machine tells its counts, its limits, and its stage:
//!
//! - *moving*: its ranks are not at their limits yet.
//! - *resting*: all its ranks are at their limits, and as far as it knows all others are at the same ones. It may still
//!   raise a limit. Each rest of a machine has a number.
//! - *agreed*: it has seen all others resting or agreed, and tells in which rests. It raises no limit unless it sees that
//!   another machine has left that rest.
//!
//! The point is reached once all have agreed on the same rests. Each machine sees what the others tell in the order in
//! which it was written. So none of them can be the first to leave its rest then.

use std::collections::BTreeMap;

use rekindle_cuda::nccl::Counts;
use serde::{Deserialize, Serialize};

use super::Operations;
use super::plan::{Step, Targets};

/// How far a machine is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Stage {
    #[default]
    Moving,
    Resting,
    /// The rest of each machine.
    Agreed(BTreeMap<u64, u64>),
}

/// The search on this machine.
#[derive(Debug)]
pub(super) struct Search {
    /// The number of this search. No other machine has the same one.
    id: u64,
    /// How many rests it has left.
    rest: u64,
    targets: Targets,
    stage: Stage,
}

/// What is known at one moment.
#[derive(Debug)]
pub(super) struct Look<'a> {
    /// What this machine tells.
    pub(super) ours: &'a Operations,
    /// What the others have told; none if one of them has not told yet.
    pub(super) others: Option<&'a [Operations]>,
    /// Nothing has changed for long: a rank that is behind may wait for something other than NCCL.
    pub(super) is_stuck: bool,
    /// Two reads have found the same, and NCCL has started what calls have left to it.
    pub(super) is_steady: bool,
}

impl Search {
    pub(super) fn new(id: u64) -> Search {
        Search { id, rest: 0, targets: Targets::default(), stage: Stage::Moving }
    }

    /// What this machine tells the others for these counts of its processes.
    pub(super) fn tell(&self, counts: Vec<Counts>) -> Operations {
        let limits = self.targets.of(&counts);
        Operations { counts, limits, search: self.id, rest: self.rest, stage: self.stage.clone(), are_uncounted: false }
    }

    /// The new limits of this machine's ranks, and whether the point is reached.
    pub(super) fn step(&mut self, look: &Look<'_>) -> Step {
        let (ours, others) = (look.ours, look.others.unwrap_or_default());
        let rests = |other: &Operations| other.stage != Stage::Moving;
        if let Stage::Agreed(rest_of) = &self.stage {
            if others.iter().all(|other| rests(other) && rest_of.get(&other.search) == Some(&other.rest)) {
                let is_reached = others.iter().chain([ours]).all(|it| it.stage == self.stage);
                return Step { is_reached, ..Step::default() };
            }
            self.stage = Stage::Resting;
        }
        for other in others {
            self.targets.raise(&other.counts, &other.limits);
        }
        // Ours first, so that the number of a process is its place in `ours`.
        let all: Vec<Counts> = ours.counts.iter().cloned().chain(others.iter().flat_map(within_limits)).collect();
        // If all ranks are at the point, the others only have to say so.
        let waits = self.stage == Stage::Moving || all.iter().any(|counts| counts.inside > 0);
        let mut step = self.targets.step(&all, ours.counts.len(), look.is_stuck && waits);
        let is_unchanged = self.targets.of(&ours.counts) == ours.limits;
        let is_at_rest = look.others.is_some() && look.is_steady && step.is_reached && is_unchanged;
        step.is_reached = is_at_rest && others.is_empty();
        let is_inside = |counts: &Counts| counts.making > 0 || look.is_stuck && counts.inside > 0;
        // A call that tries the gate again does not end the rest.
        let stays = is_unchanged && step.behind.is_empty() && !ours.counts.iter().any(is_inside);
        let have_one_point =
            || others.iter().all(|other| rests(other) && self.targets.of(&other.counts) == other.limits);
        self.stage = match self.stage {
            Stage::Resting if is_at_rest && have_one_point() => {
                Stage::Agreed(others.iter().chain([ours]).map(|it| (it.search, it.rest)).collect())
            }
            Stage::Resting if stays => Stage::Resting,
            Stage::Resting => {
                self.rest += 1;
                Stage::Moving
            }
            _ if is_at_rest => Stage::Resting,
            _ => Stage::Moving,
        };
        step
    }
}

/// The counts of another machine without the calls that have counted and not looked at the gate yet: those wait.
fn within_limits(other: &Operations) -> impl Iterator<Item = Counts> {
    other.counts.iter().zip(&other.limits).map(|(counts, limits)| {
        let mut counts = counts.clone();
        counts
            .counters
            .iter_mut()
            .zip(limits)
            .for_each(|(counter, limit)| counter.started = counter.started.min(*limit));
        counts
    })
}
