//! What a member does because of the time: it waits for other supervisors, and for the next plan, with a limit.

use std::time::Instant;

use super::{Member, seen};
use crate::documents::{End, Fresh, Goal, Plan, Report, View};
use crate::events::Order;
use crate::ids::Rank;
use crate::options::Options;
use crate::reasons::{Mismatch, Missing};
use crate::requests::is_of_run;

/// Since when it waits.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// When this process first saw that another supervisor has this rank.
    pub(super) taken: Option<Instant>,
    /// Since when it waits for others that want to start from the beginning too: the last run has completed.
    pub(super) lone: Option<Instant>,
    /// Since when it waits for the next run: the last one is over, and this process was not there.
    pub(super) over: Option<Instant>,
    /// Since when others say that the job is suspended, and this process was not there then.
    pub(super) rest: Option<Instant>,
    /// The plan during a snapshot, and since when it is there.
    pub(super) step: Option<(u64, Instant)>,
}

impl Member {
    /// When this member must do something without an event.
    pub(crate) fn deadline(&self, options: &Options) -> Option<Instant> {
        // With a job it does not leave. The end of that wakes it.
        let taken = self.waits.taken.filter(|_| !self.job.exists());
        let waits = [taken, self.waits.lone, self.waits.over];
        let waits = waits.into_iter().flatten().map(|since| since + options.limits.wait);
        let step = self.waits.step.map(|(_, since)| since + options.longest_step());
        let rest = self.waits.rest.filter(|_| !self.rests).map(|since| since + options.lease);
        self.fenced_at(options).into_iter().chain(waits).chain(rest).chain(step).min()
    }

    /// Another supervisor has this rank. It may be the one before this, whose lease has not expired yet.
    pub(super) fn leave_if_taken(&mut self, view: &View, options: &Options, now: Instant) -> Option<Order> {
        let other = view.members.get(&self.rank).map(|report| report.incarnation);
        if other.is_none() || other == self.fence.incarnation || self.fence.incarnation.is_none() || self.over.finished
        {
            self.waits.taken = None;
            return None;
        }
        let since = *self.waits.taken.get_or_insert(now);
        if now < since + options.limits.wait || self.job.exists() {
            return None;
        }
        (self.over.finished, self.waits.taken) = (true, None);
        Some(Order::Finish(End::Missing { why: Missing::Rank(self.rank) }))
    }

    /// The user wants to start from the beginning, and others do not.
    pub(super) fn leave_if_alone(&mut self, view: &View, options: &Options, now: Instant) -> Option<Order> {
        let is_asked =
            self.line.fresh == Fresh::Wanted && self.has_joined(view) && !self.job.exists() && !self.over.finished;
        if !is_asked {
            self.waits.lone = None;
            return None;
        }
        let plan = view.plan.as_ref().map(|plan| &plan.value);
        // Members of a run that is over are about to leave.
        let leaves = |rank: &Rank, report: &Report| {
            let ended = plan.filter(|plan| matches!(plan.goal, Goal::End(_)));
            ended.is_some_and(|plan| plan.crew.get(rank) == Some(&report.incarnation))
        };
        let others = || view.members.iter().filter(|(rank, report)| !leaves(rank, report));
        let is = |fresh| others().find(|(_, report)| report.fresh == fresh).map(|(rank, _)| *rank);
        if let (Some(other), None) = (is(Fresh::No), is(Fresh::Done)) {
            self.over.finished = true;
            let why = Mismatch::Fresh { with: self.rank, without: other };
            return Some(Order::Finish(End::Refused { why }));
        }
        if plan.is_none_or(|plan| plan.goal != Goal::End(End::Completed)) {
            self.waits.lone = None;
            return None;
        }
        let since = *self.waits.lone.get_or_insert(now);
        if now < since + options.limits.wait {
            return None;
        }
        (self.over.finished, self.waits.lone) = (true, None);
        Some(Order::Finish(End::Missing { why: Missing::FreshMembers }))
    }

    /// The run is over, and the next one does not begin: a member of it has not left, because it cannot end its job or hangs,
    /// or the leader hangs. A supervisor of that run leaves in [`Member::obey`].
    pub(super) fn leave_if_none_begins(&mut self, view: &View, options: &Options, now: Instant) -> Option<Order> {
        let plan = view.plan.as_ref().map(|plan| &plan.value);
        let over = plan.filter(|plan| matches!(plan.goal, Goal::End(_)));
        let of_run = |rank: &Rank| is_of_run(view, *rank);
        if over.is_none() || !self.has_joined(view) || of_run(&self.rank) || self.over.finished {
            self.waits.over = None;
            return None;
        }
        let since = *self.waits.over.get_or_insert(now);
        if now < since + options.limits.wait {
            return None;
        }
        (self.over.finished, self.waits.over) = (true, None);
        let those: Vec<Rank> = view.members.keys().filter(|rank| of_run(rank)).copied().collect();
        let why = if those.is_empty() { Missing::NextRun } else { Missing::Departure(those) };
        Some(Order::Finish(End::Missing { why }))
    }

    /// Ends the job if it is in a snapshot and the plan does not change any more: leases are renewed, but nothing can be
    /// written, not even that the snapshot is aborted. The job would be frozen for ever.
    pub(super) fn leave_snapshot(&mut self, view: &View, options: &Options, now: Instant) -> Option<Order> {
        let plan = seen(view);
        if !self.job.is_in_snapshot() {
            self.waits.step = None;
            return None;
        }
        let since = match self.waits.step {
            Some((known, since)) if known == plan => since,
            _ => now,
        };
        self.waits.step = Some((plan, since));
        if now < since + options.longest_step() {
            return None;
        }
        self.waits.step = None;
        self.kill()
    }

    /// Whether this process is one of those that this plan is for, with the present or the former membership.
    pub(crate) fn was_there(&self, plan: &Plan) -> bool {
        let of_crew = plan.crew.get(&self.rank).copied();
        of_crew.is_some() && [self.fence.incarnation, self.fence.former].contains(&of_crew)
    }

    /// Whether the job is suspended, and this process was a member when that happened, or another one is there that says so.
    pub(super) fn sees_the_rest(&mut self, view: &View, plan: &Plan, options: &Options, now: Instant) -> bool {
        let was_there = self.was_there(plan);
        let is_suspended = plan.goal == Goal::Suspended;
        let is_known = is_suspended && (self.rests || was_there);
        if is_known || !is_suspended || !view.members.values().any(|report| report.rests) {
            self.waits.rest = None;
            return is_known;
        }
        // A process that is lost says so too until its lease expires.
        let since = *self.waits.rest.get_or_insert(now);
        since + options.lease <= now
    }
}
