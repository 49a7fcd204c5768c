//! Lets the ranks of a job reach one point of every NCCL communicator, so that all of them can be locked at once.
//!
//! A collective's kernel ends once all ranks have started it. Ranks that are locked at random points block each other
//! ([`super::lock`]). Here the interposer holds each rank in front of its next call of NCCL. Ranks that are behind may
//! continue to the point of the others ([`plan`]). The kernels on the GPUs then end by themselves.
//!
//! In a job over several machines each supervisor does this for its own processes, and tells the others ([`Elsewhere`]).
//! [`search`] is how all come to the same point, although each knows only what the others had started a moment ago.
//!
//! The gate is opened once all threads are stopped, so that no image has it closed. If this supervisor dies, the gate
//! opens by itself.

mod plan;
mod search;

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod model;

use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, Instant};

use plan::{Behind, Channel};
use rekindle_cuda::nccl::{Counts, Ranks};
use rekindle_os::process;
use search::{Look, Search, Stage};
use serde::{Deserialize, Serialize};

/// What the processes of one machine have started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operations {
    /// Of each process that uses NCCL; its gate is closed.
    pub counts: Vec<Counts>,
    /// The limits of each of their counters.
    limits: Vec<Vec<u64>>,
    /// The number of the search, and of its rest.
    search: u64,
    rest: u64,
    stage: Stage,
    /// Not all operations are counted: there is no common point.
    pub are_uncounted: bool,
}

impl Operations {
    /// Not all operations are counted.
    #[must_use]
    pub fn uncounted() -> Operations {
        Operations { are_uncounted: true, ..Operations::default() }
    }
}

/// The other machines of a job.
pub trait Elsewhere {
    /// Tells the other machines what is started here. Returns what is started there, by machine; none if one of them has
    /// not told yet.
    fn exchange(&self, ours: &Operations) -> Option<Vec<Operations>>;
}

/// How often the counts are read.
const PAUSE: Duration = Duration::from_micros(300);

/// If nothing changes for this long, every waiting call is let through: a rank that is behind may wait for another rank
/// without NCCL. The time doubles each time, because the rank may also just be computing.
const PATIENCE: Duration = Duration::from_millis(250);

/// If a rank is in no process for this long, no point is searched for: it has left without ending its communicator, and
/// the others may use NCCL for ever. All calls pass meanwhile.
const MISSING: Duration = Duration::from_secs(2);

/// If nothing changes for this long, NCCL is taken to have started what a call on a communicator that does not block has
/// left to it. It takes less than 1 ms unless there is no CPU for it. If it takes longer, the lock waits.
const TO_START: Duration = Duration::from_millis(20);

/// If nothing changes for this long, checks whether a process has ended: its rank will never arrive, so the others must
/// not wait for it.
const SUSPICION: Duration = Duration::from_millis(10);

/// After the time limit of the cut, an unopened gate stays closed this much longer, for the lock.
const FOR_THE_LOCK: Duration = Duration::from_secs(30);

/// Ranks that wait in front of their gates. A drop lets them continue.
#[derive(Debug)]
pub(super) struct Cut(Vec<Ranks>);

impl Drop for Cut {
    fn drop(&mut self) {
        self.0.iter().for_each(Ranks::open);
    }
}

/// Why the cut was not reached.
#[derive(Debug)]
pub(super) enum NotReached {
    /// No process uses NCCL, or not all operations are counted.
    Counts,
    /// Not all ranks arrived in time, or one has ended. Describes the missing one.
    Late(String),
    /// It was cancelled.
    Cancelled,
}

/// Lets all ranks of these processes reach one point within `timeout`.
pub(super) fn reach(
    pids: &[i32],
    elsewhere: Option<&dyn Elsewhere>,
    timeout: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Cut, NotReached> {
    let result = reach_with(pids, elsewhere, timeout, cancelled);
    if let (Some(elsewhere), Err(NotReached::Counts)) = (elsewhere, &result) {
        // The others must not wait for a point that cannot be.
        elsewhere.exchange(&Operations::uncounted());
    }
    result
}

fn reach_with(
    pids: &[i32],
    elsewhere: Option<&dyn Elsewhere>,
    timeout: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Cut, NotReached> {
    let began = Instant::now();
    let mut all = Vec::new();
    for pid in pids {
        match Ranks::of(*pid) {
            Ok(None) => {}
            Ok(Some(ranks)) => {
                if let Some(why) = ranks.untracked() {
                    tracing::debug!(pid = ranks.inner(), "ranks are locked without a common point: {why}");
                    return Err(NotReached::Counts);
                }
                all.push(ranks);
            }
            Err(error) => {
                tracing::debug!(pid, "ranks are locked without a common point: {error}");
                return Err(NotReached::Counts);
            }
        }
    }
    if all.is_empty() && elsewhere.is_none() {
        return Err(NotReached::Counts);
    }
    let cut = Cut(all);
    cut.0.iter().for_each(|ranks| ranks.close(timeout + FOR_THE_LOCK));
    let mut search = Search::new(std::hash::RandomState::new().build_hasher().finish());
    let mut seen: Vec<Operations> = Vec::new();
    let (mut changed, mut patience, mut raised) = (Instant::now(), PATIENCE, 0_u32);
    let mut missing = Missing::default();
    loop {
        let ours = search.tell(cut.0.iter().map(Ranks::counts).collect());
        let others = elsewhere.map_or_else(|| Some(Vec::new()), |elsewhere| elsewhere.exchange(&ours));
        if others.iter().flatten().any(|operations| operations.are_uncounted) {
            return Err(NotReached::Counts);
        }
        let all_told = others.is_some();
        let mut now = vec![ours];
        now.extend(others.unwrap_or_default());
        if all_told && now.iter().all(|operations| operations.counts.is_empty()) {
            return Err(NotReached::Counts);
        }
        // A call counts before it looks at the gate, and takes that back if it has to wait. One read can have seen such
        // counts, of several ranks, and no call in progress. If the next one sees the same, they are true: by then the
        // limits of the first have let these calls pass.
        let is_confirmed =
            now.len() == seen.len() && now.iter().zip(&seen).all(|(now, seen)| now.counts == seen.counts);
        if !is_confirmed {
            changed = Instant::now();
        }
        let is_stuck = all_told && changed.elapsed() > patience;
        let [ours, others @ ..] = now.as_slice() else { return Err(NotReached::Counts) };
        // The program asks NCCL whether it has started an operation before it calls the next one, and may never do so
        // after the last one.
        let is_starting = ours.counts.iter().any(|counts| counts.pending > 0) && changed.elapsed() < TO_START;
        let is_steady = is_confirmed && !is_starting;
        let step = search.step(&Look { ours, others: all_told.then_some(others), is_stuck, is_steady });
        for (process, place, limit) in step.limits {
            if let Some(ranks) = cut.0.get(process) {
                ranks.limit(place, limit);
            }
        }
        if cut.0.iter().any(|ranks| ranks.untracked().is_some()) {
            return Err(NotReached::Counts);
        }
        if step.is_reached {
            tracing::debug!(took = ?began.elapsed(), raised, "all ranks wait at one point");
            return Ok(cut);
        }
        // What the others have not told yet may have the rank, and so may a communicator that is being made.
        let is_making = || now.iter().flat_map(|operations| &operations.counts).any(|counts| counts.making > 0);
        let lacks_rank = step.behind.iter().any(|behind| behind.process.is_none());
        let is_missing = missing.lasts(lacks_rank && all_told && !is_making(), Instant::now());
        seen = now;
        if cancelled() {
            return Err(NotReached::Cancelled);
        }
        if changed.elapsed() > SUSPICION
            && let Some(dead) = cut.0.iter().find(|ranks| process::has_ended(ranks.pid()))
        {
            return Err(NotReached::Late(format!("process {} has ended", dead.inner())));
        }
        if began.elapsed() > timeout {
            if all_told && step.behind.is_empty() && are_being_made(&seen) {
                tracing::debug!(
                    "ranks are locked without a common point: a communicator is being made, and one of its ranks is late"
                );
                return Err(NotReached::Counts);
            }
            return Err(NotReached::Late(describe(&step.behind, &cut.0)));
        }
        if is_missing || is_stuck && lacks_rank {
            tracing::debug!("ranks are locked without a common point: {}", describe(&step.behind, &cut.0));
            return Err(NotReached::Counts);
        }
        if is_stuck {
            (changed, patience, raised) = (Instant::now(), patience * 2, raised + 1);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether the only calls of NCCL that have not returned make or end communicators. They wait for a rank that may be busy with
/// something else for minutes. The GPUs do not wait for it: every operation was started by all of its ranks.
fn are_being_made(all: &[Operations]) -> bool {
    let all = || all.iter().flat_map(|operations| &operations.counts);
    all().any(|counts| counts.making > 0) && all().all(|counts| counts.inside == counts.making)
}

/// Since when a rank is in no process, without a pause.
#[derive(Debug, Default)]
struct Missing(Option<Instant>);

impl Missing {
    /// Whether that has lasted for [`MISSING`], if a rank is missing now. The counts of the others may change all the time.
    fn lasts(&mut self, is_missing: bool, now: Instant) -> bool {
        self.0 = self.0.or(Some(now)).filter(|_| is_missing);
        self.0.is_some_and(|since| now.duration_since(since) > MISSING)
    }
}

/// Describes the first rank that others wait for.
fn describe(behind: &[Behind], all: &[Ranks]) -> String {
    let Some(first) = behind.first() else {
        return "a call of NCCL has not returned (a communicator is being made, or a connection), or another machine does \
                not answer"
            .into();
    };
    let Behind { channel, process, rank, started, target } = first;
    let what = match channel {
        Channel::Collective(_) => "collective",
        Channel::Pair { .. } => "send or receive",
    };
    let who = match process.and_then(|process| all.get(process)) {
        Some(ranks) => format!("rank {rank} (process {})", ranks.inner()),
        None if process.is_some() => format!("rank {rank} on another machine"),
        None => format!("rank {rank}, which is in no known process,"),
    };
    let others = behind.len() - 1;
    let others = if others > 0 { format!("; {others} more are behind") } else { String::new() };
    format!("{who} has not started {what} {target} of a communicator; it has started {started}{others}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_missing_only_after_a_time_without_a_pause() {
        let (mut missing, began) = (Missing::default(), Instant::now());
        let at = |tenths: u32| began + MISSING * tenths / 10;
        assert!(!missing.lasts(true, at(0)) && !missing.lasts(true, at(9)));
        assert!(!missing.lasts(false, at(9)), "it was found");
        assert!(!missing.lasts(true, at(11)) && !missing.lasts(true, at(20)));
        assert!(missing.lasts(true, at(22)));
    }
}
