//! What an epoch that was lost counts against: its group image, the snapshot in progress, and the restarts.

use std::time::{Duration, Instant};

use super::{Leading, missed};
use crate::documents::{Counted, Fault, Goal, Plan, StartFrom, Then, View};
use crate::hands::Loss;
use crate::ids::{Epoch, Number};
use crate::options::Options;
use crate::reasons::{Failure, Reason};

/// Points against a group image if an epoch that started from it fails, early or later, before a newer one was taken.
const FAILED_EARLY: u32 = 2;
const FAILED_LATE: u32 = 1;

impl Leading {
    /// Why the job is not restarted any more. `last`: why it was lost, and when.
    pub(super) fn is_given_up(
        &self,
        plan: &Plan,
        options: &Options,
        (last, at): (&Reason, Instant),
    ) -> Option<Failure> {
        let restart = &options.restart;
        let is_within =
            |(_, restart_at): &&(Epoch, Instant)| at.saturating_duration_since(*restart_at) <= restart.window;
        let within = self.restarts.iter().filter(is_within).count();
        let most = usize::try_from(restart.max_restarts).unwrap_or(usize::MAX);
        if within > most {
            let (most, within) = (restart.max_restarts, restart.window);
            return Some(Failure::Restarts { most, within, last: last.clone() });
        }
        let is_over = plan.in_a_row > restart.max_restarts;
        is_over.then(|| Failure::InARow { times: plan.in_a_row, last: last.clone() })
    }

    /// Ends the epoch, and counts the points against its group image.
    pub(super) fn gather(&mut self, next: &mut Plan, view: &View, loss: Loss, options: &Options, now: Instant) {
        // One that fails sooner has a bad image or a wrong command, against which more snapshots do not help.
        next.past.failures = next.past.failures.saturating_add(u32::from(next.healthy));
        let ends_job = is_of_snapshot(&loss, next);
        next.fatal = next.fatal.saturating_add(u32::from(ends_job));
        let why = match loss {
            // Only the pause becomes longer: it may be lost each time because of the job, which fills its memory.
            Loss::Member(why) => {
                count_lost(next);
                why
            }
            // A rewind that fails costs the job nothing. But if it hung, it hangs again soon, and would go back again without
            // an end.
            Loss::Job(why, _, fault) if next.aim.is_some() && matches!(next.goal, Goal::Start(_)) => {
                let points = if fault == Fault::Outside { FAILED_LATE } else { FAILED_EARLY };
                self.count_missed(next, points, options, now);
                missed(next, why)
            }
            Loss::Machine(why) if next.aim.is_some() && matches!(next.goal, Goal::Start(_)) => {
                self.count_missed(next, FAILED_LATE, options, now);
                missed(next, why)
            }
            // The restarts have their pauses and their limit, and nothing counts against the group image.
            Loss::Machine(why) => {
                self.count_restart(next, options, now);
                next.last = None;
                why
            }
            Loss::Job(why, last, fault) => {
                let (in_a_row, early_cold) = (next.in_a_row, next.early_cold);
                let points = count_failure(next, view, if ends_job { Fault::Snapshot } else { fault });
                let fatal = next.fatal - u32::from(ends_job);
                next.counted = Some(Counted { points, in_a_row, fatal, early_cold });
                self.count_restart(next, options, now);
                next.last = last;
                why
            }
        };
        next.goal = Goal::Gather { why };
        if next.then == Then::Suspend {
            next.then = Then::RunOn;
        }
    }

    /// Counts a rewind that failed, if the job hung: as a restart, and against the group image.
    fn count_missed(&mut self, next: &mut Plan, points: u32, options: &Options, now: Instant) {
        let Some(to) = next.aim.as_ref().filter(|aim| aim.for_hang).map(|aim| aim.to) else { return };
        *next.failures.entry(to).or_default() += points;
        self.count_restart(next, options, now);
    }

    /// A member was lost, and the failure of the job was its consequence.
    pub(super) fn take_back(&mut self, next: &mut Plan) {
        let Some(Counted { points, in_a_row, fatal, early_cold }) = next.counted.take() else { return };
        if let Some((number, points)) = points {
            let left = next.failures.remove(&number).unwrap_or_default().saturating_sub(points);
            next.failures.extend((left > 0).then_some((number, left)));
        }
        (next.in_a_row, next.fatal, next.early_cold, next.last) = (in_a_row, fatal, early_cold, None);
        self.restarts.retain(|(epoch, _)| *epoch != next.epoch);
        count_lost(next);
    }

    fn count_restart(&mut self, next: &mut Plan, options: &Options, now: Instant) {
        let ran = self.run.filter(|(epoch, _)| *epoch == next.epoch).map(|(_, since)| since);
        if ran.is_some_and(|since| now.saturating_duration_since(since) >= options.restart.healthy_uptime) {
            self.restarts.clear();
        }
        // The plan that says so may be refused, and is decided again.
        if self.restarts.back().is_none_or(|(epoch, _)| *epoch != next.epoch) {
            self.restarts.push_back((next.epoch, now));
        }
        next.in_a_row = if next.healthy { 0 } else { next.in_a_row + 1 };
    }
}

/// Counts the loss of a member, for the pause.
fn count_lost(next: &mut Plan) {
    next.lost = if next.healthy { 0 } else { next.lost.saturating_add(1) };
}

/// Whether a snapshot has ended the job. Its end may be reported after the snapshot was aborted.
fn is_of_snapshot(loss: &Loss, plan: &Plan) -> bool {
    let in_snapshot =
        matches!(plan.goal, Goal::Prepare(_) | Goal::Pull(_) | Goal::Dump(_) | Goal::Resume(_) | Goal::Abort { .. });
    match loss {
        Loss::Member(_) | Loss::Job(_, _, Fault::Outside) => false,
        Loss::Machine(_) | Loss::Job(_, _, Fault::Job) => in_snapshot,
        Loss::Job(_, _, Fault::Snapshot) => true,
    }
}

/// Counts the points of a failure of the job against its group image, or against the beginning. Returns the points. As on
/// one machine, it takes more early deaths to pass an image over if the cause is outside, or if the job has lived on from this
/// image before.
fn count_failure(next: &mut Plan, view: &View, fault: Fault) -> Option<(Number, u32)> {
    if fault == Fault::Snapshot {
        return None;
    }
    next.early_cold = if next.from == StartFrom::Beginning && !next.healthy { next.early_cold + 1 } else { 0 };
    let newer = |from: Number| view.images.iter().any(|(number, it)| *number > from && it.value.epoch == next.epoch);
    let StartFrom::Image(number) = next.from else { return None };
    // A job that has lived on from this image before has another reason to die early. Not so if it cannot be restored.
    let is_proven = next.proven.contains(&number) && !matches!(next.goal, Goal::Start(_));
    let points = match fault {
        _ if newer(number) => 0,
        Fault::Job if next.healthy || is_proven => FAILED_LATE,
        Fault::Job => FAILED_EARLY,
        Fault::Outside if next.healthy => 0,
        Fault::Outside => FAILED_LATE,
        Fault::Snapshot => 0,
    };
    if points == 0 {
        return None;
    }
    *next.failures.entry(number).or_default() += points;
    Some((number, points))
}

/// The pause before the next restart: none before the first.
pub(super) fn pause(in_a_row: u32, options: &Options) -> Duration {
    if in_a_row < 2 {
        return Duration::ZERO;
    }
    let factor = 1u32.checked_shl(in_a_row - 2).unwrap_or(u32::MAX);
    options.restart.backoff.saturating_mul(factor).min(options.restart.max_backoff)
}
