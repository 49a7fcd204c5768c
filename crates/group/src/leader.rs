//! What the leader does: compares all reports with the plan, and writes the next one.
//!
//! Nothing but the plan is remembered, so that another member can take the lead at any time. Only times are not in it:
//! a new leader counts them from the beginning, because clocks of machines cannot be compared.

mod failures;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::documents::{
    Aim, Ask, End, Ending, Fresh, Goal, GroupImage, Left, Part, Past, Plan, RefusedRequest, Replica, Report, StartFrom,
    State, Then, View,
};
use crate::events::Write;
use crate::hands::{
    Hand, Loss, behind, dumped, given_up, hands, late, loss, misfit, missing, nothing_runs, refusal, still_running,
};
use crate::ids::{Epoch, Incarnation, Number, Rank};
use crate::images;
use crate::options::{ColdStart, Options};
use crate::reasons::{Failure, Mismatch, Missing, Phase, Reason, RequestRefusal, SnapshotRefusal};
use crate::requests::{admits, completed};
use failures::pause;

/// The longest time for a stop.
const LONGEST_STOP: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// More rewinds to one group image do not make the pause before the next start longer.
const MOST_REWINDS: u32 = 5;

/// The leader's watch: times at which this process first saw something.
#[derive(Debug, Default)]
pub(crate) struct Leading {
    /// The goal, and when it was set. With the plan's origin and the epoch, because the same goal may be set again.
    goal: Option<(Incarnation, Epoch, Goal, Instant)>,
    /// The epoch, and when all of its jobs began to run.
    run: Option<(Epoch, Instant)>,
    /// When the last snapshot of this epoch was undone, if it was aborted. Until then, when its abort began.
    aborted: Option<Instant>,
    /// How many snapshots of this epoch were aborted in a row. Not those that the job blocked, which cost nothing.
    aborts: u32,
    /// The end of the last snapshot, or the beginning of the epoch.
    last: Option<Instant>,
    /// When the job was restarted after failures, and the epoch that had failed.
    restarts: VecDeque<(Epoch, Instant)>,
    /// A snapshot was requested.
    wanted: bool,
    stop: Stop,
    /// The members of the last epoch, and how the lost ones left.
    farewells: BTreeMap<Incarnation, Farewell>,
    /// Since when members have not seen the plan, while the group gathers.
    behind: BTreeMap<Incarnation, Instant>,
    /// Whether a lost member may still run its job.
    runs_elsewhere: bool,
    /// When something is due.
    wake: Option<Instant>,
}

/// A stop that was requested.
#[derive(Debug, Clone, Copy, Default)]
struct Stop {
    /// When it must be complete.
    by: Option<Instant>,
    /// Final snapshots that were aborted.
    tries: u32,
}

/// How a member left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Farewell {
    /// It has reported that nothing runs there.
    Over,
    /// It has not reported that. Lost since then.
    Gone(Instant),
}

impl Leading {
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.wake
    }

    pub(crate) fn decide(&mut self, view: &View, options: &Options, now: Instant) -> Option<Write> {
        self.wake = None;
        let Some(old) = &view.plan else {
            let plan = Box::new(first_plan(view.leader?));
            return Some(Write::Plan { plan, was: None, image: None });
        };
        let plan = &old.value;
        self.watch(plan, now);
        // All before one is committed: a member drops what is older than that and not recorded.
        if matches!(plan.goal, Goal::Gather { .. })
            && let Some(write) = images::rebuilt(view, plan, options)
        {
            return Some(write);
        }
        if let Some(write) = images::commit(view) {
            return Some(write);
        }
        let mut next = plan.clone();
        let image = self.plan(view, plan, &mut next, options, now);
        if let Some((_, since)) = self.run.filter(|(epoch, _)| *epoch == plan.epoch && !next.goal.is_alive())
            && plan.goal.is_alive()
        {
            next.past.ran = next.past.ran.saturating_add(now.saturating_duration_since(since));
        }
        if !matches!(next.goal, Goal::Gather { .. }) {
            next.counted = None;
        }
        if next != *plan {
            next.serial += 1;
            return Some(Write::Plan { plan: Box::new(next), was: Some(old.revision), image });
        }
        images::replicate(view, plan, options).or_else(|| images::unneeded(view, old, options))
    }

    fn watch(&mut self, plan: &Plan, now: Instant) {
        let is_same = |(origin, epoch, goal, _): &(Incarnation, Epoch, Goal, Instant)| {
            (*origin, *epoch, goal) == (plan.origin, plan.epoch, &plan.goal)
        };
        if !self.goal.as_ref().is_some_and(is_same) {
            let was_aborted = self.goal.as_ref().is_some_and(|(.., goal, _)| matches!(goal, Goal::Abort { .. }));
            self.goal = Some((plan.origin, plan.epoch, plan.goal.clone(), now));
            self.behind.clear();
            match &plan.goal {
                Goal::Abort { why, .. } => {
                    self.aborted = Some(now);
                    self.aborts = self.aborts.saturating_add(u32::from(!is_free(why)));
                    self.stop.tries += u32::from(matches!(plan.then, Then::Stop { .. }));
                }
                // To undo it may take as long as the pause.
                Goal::Run if was_aborted => self.aborted = Some(now),
                Goal::Resume(_) => (self.aborted, self.aborts, self.last) = (None, 0, Some(now)),
                Goal::Prepare(_) => self.wanted = false,
                _ => {}
            }
        }
        let runs = plan.goal.is_alive() && !matches!(plan.goal, Goal::Start(_));
        if runs && self.run.is_none_or(|(epoch, _)| epoch != plan.epoch) {
            (self.run, self.last) = (Some((plan.epoch, now)), Some(now));
            (self.aborted, self.aborts) = (None, 0);
        }
    }

    /// When the present goal was set.
    fn since(&self, now: Instant) -> Instant {
        self.goal.as_ref().map_or(now, |(.., since)| *since)
    }

    /// Whether this time has come. If not, wakes us then.
    fn is_due(&mut self, at: Instant, now: Instant) -> bool {
        if at <= now {
            return true;
        }
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
        false
    }

    /// Whether a lost member may still run its job.
    fn may_run_elsewhere(&mut self, hands: &[Hand<'_>], plan: &Plan, options: &Options, now: Instant) -> bool {
        if plan.goal.is_alive() {
            // Earlier reports are not about this epoch.
            self.farewells.clear();
        }
        if plan.goal.is_alive() || !options.leases_end_early {
            return false;
        }
        let present = |incarnation: &Incarnation| hands.iter().any(|hand| hand.incarnation == *incarnation);
        self.farewells.retain(|incarnation, _| present(incarnation));
        for hand in hands {
            let over = hand.report.map(|report| report.seen >= plan.serial && report.state.nothing_runs());
            match over {
                Some(true) => {
                    self.farewells.insert(hand.incarnation, Farewell::Over);
                }
                Some(false) => {}
                None => {
                    self.farewells.entry(hand.incarnation).or_insert(Farewell::Gone(now));
                }
            }
        }
        let gone = self.farewells.values().filter_map(|it| match it {
            Farewell::Gone(since) => Some(*since + options.lease),
            Farewell::Over => None,
        });
        gone.max().is_some_and(|until| !self.is_due(until, now))
    }

    fn plan(
        &mut self,
        view: &View,
        plan: &Plan,
        next: &mut Plan,
        options: &Options,
        now: Instant,
    ) -> Option<(Number, GroupImage)> {
        let hands = hands(view, plan);
        self.runs_elsewhere = self.may_run_elsewhere(&hands, plan, options, now);
        if let Some((why, last)) = given_up(&hands, plan) {
            next.last = last;
            next.goal = end(view, next, End::Failed { why, last });
            return None;
        }
        if let Some(how) = misfit(&hands, plan) {
            next.goal = end(view, next, how);
            return None;
        }
        if plan.goal.is_alive()
            && let Some(loss) = loss(&hands, plan)
        {
            self.gather(next, view, loss, options, now);
            return None;
        }
        if let (Then::Stop { requeue }, true) = (plan.then, self.stop_is_due(now))
            && (plan.goal.is_alive() || plan.goal == Goal::Suspended)
        {
            // The dumped parts are kept: each member stores its part before it leaves.
            next.goal = end(view, next, End::Stopped { requeue });
            return None;
        }
        let since = self.since(now);
        let seen = |report: &Report| report.seen >= plan.serial;
        let all =
            |is: &dyn Fn(&Report) -> bool| hands.iter().all(|hand| hand.report.is_some_and(|it| seen(it) && is(it)));
        match &plan.goal {
            Goal::Gather { .. } => self.gathering(view, plan, next, options, now),
            Goal::Suspended => {
                let is_new = |report: &Arc<Report>| !report.rests;
                let is_lost = |hand: &Hand<'_>| hand.report.is_none();
                let gone = !self.runs_elsewhere && hands.iter().all(is_lost) && view.members.values().all(is_new);
                self.suspended(view, plan, next, gone, options, now);
            }
            Goal::Start(_) => {
                if all(&|it| {
                    it.epoch == plan.epoch && matches!(it.state, State::Ready | State::Over(Ending::Completed))
                }) {
                    next.goal = Goal::Run;
                    next.aim = None;
                } else if self.is_due(since + options.limits.start, now) {
                    self.gather(next, view, Loss::Machine(late(&hands, plan, Phase::Start)), options, now);
                }
                self.asked(view, plan, next, now);
            }
            Goal::Run => self.running(view, plan, next, &hands, options, now),
            Goal::Prepare(number) => {
                let number = *number;
                if let Some(why) = refusal(&hands, number) {
                    next.goal = Goal::Abort { number, why };
                } else if all(&|it| it.state == State::Locked(number)) {
                    next.goal = Goal::Pull(number);
                } else if self.is_due(since + options.limits.prepare, now) {
                    next.goal = Goal::Abort { number, why: late(&hands, plan, Phase::Lock) };
                }
                self.asked(view, plan, next, now);
            }
            Goal::Pull(number) => {
                let number = *number;
                if let Some(why) = refusal(&hands, number) {
                    next.goal = Goal::Abort { number, why };
                } else if all(&|it| it.state == State::Quiet(number)) {
                    next.goal = Goal::Dump(number);
                } else if self.is_due(since + options.limits.prepare, now) {
                    next.goal = Goal::Abort { number, why: late(&hands, plan, Phase::Disconnect) };
                }
                self.asked(view, plan, next, now);
            }
            Goal::Dump(number) => {
                let number = *number;
                let parts: BTreeMap<Rank, Part> = hands.iter().filter_map(|hand| dumped(*hand, number)).collect();
                if let Some(why) = refusal(&hands, number) {
                    next.goal = Goal::Abort { number, why };
                } else if parts.len() == hands.len() {
                    next.goal = if plan.then == Then::RunOn { Goal::Resume(number) } else { Goal::Suspended };
                    return Some((
                        number,
                        GroupImage { epoch: plan.epoch, parts, committed: false, replica: Replica::No },
                    ));
                } else if self.is_due(since + options.limits.dump, now) {
                    next.goal = Goal::Abort { number, why: late(&hands, plan, Phase::Dump) };
                }
                self.asked(view, plan, next, now);
            }
            Goal::Resume(_) | Goal::Abort { .. } => {
                if all(&|it| matches!(it.state, State::Running | State::Refused(..) | State::Over(Ending::Completed))) {
                    if let Goal::Resume(_) = plan.goal {
                        next.fatal = 0;
                    }
                    next.goal = match (plan.then, &plan.goal) {
                        // The run ends without its final image; the images that it has are kept.
                        (Then::Stop { requeue }, Goal::Abort { .. }) if !self.tries_again(view, plan, now) => {
                            end(view, next, End::Stopped { requeue })
                        }
                        _ => Goal::Run,
                    };
                    if plan.then == Then::Suspend {
                        next.then = Then::RunOn;
                    }
                } else if self.is_due(since + options.limits.start, now) {
                    self.gather(next, view, Loss::Machine(late(&hands, plan, Phase::Resume)), options, now);
                }
                self.asked(view, plan, next, now);
            }
            Goal::End(end) => {
                // All earlier members have left: the present ones want to run it again.
                let none = !self.runs_elsewhere && hands.iter().all(|hand| hand.report.is_none());
                if none && (*end != End::Completed || starts_fresh(view, options)) {
                    begin_anew(next);
                }
            }
        }
        None
    }

    fn running(
        &mut self,
        view: &View,
        plan: &Plan,
        next: &mut Plan,
        hands: &[Hand<'_>],
        options: &Options,
        now: Instant,
    ) {
        if hands.iter().all(|hand| hand.report.is_some_and(|it| it.state == State::Over(Ending::Completed))) {
            next.goal = end(view, next, End::Completed);
            return;
        }
        let began = self.run.map_or(now, |(_, since)| since);
        if !plan.healthy && self.is_due(began + options.restart.min_uptime, now) {
            (next.healthy, next.in_a_row, next.lost) = (true, 0, 0);
            next.proven.retain(|number| view.images.contains_key(number));
            if let StartFrom::Image(number) = plan.from {
                next.proven.insert(number);
            }
        }
        self.asked(view, plan, next, now);
        if next.goal != Goal::Run {
            return;
        }
        if let (Then::Suspend, Some(rank)) = (next.then, completed(view, plan)) {
            let number = unused(view, plan);
            (next.goal, next.next) = (Goal::Abort { number, why: Reason::JobCompleted(rank) }, Number(number.0 + 1));
            return;
        }
        let can = |report: &Report| {
            let runs = matches!(report.state, State::Running | State::Refused(..));
            runs && report.epoch == plan.epoch && report.seen >= plan.serial && !report.storing
        };
        let is_quiet = hands.iter().any(|hand| hand.report.is_some_and(|it| it.costs.quiet));
        let interval = options.interval.filter(|_| !is_quiet && !plan.snapshots_end_the_job());
        // After an aborted snapshot, the next one does not wait for a whole interval.
        let due = match (self.aborted, self.last) {
            (Some(aborted), _) => interval.map(|interval| aborted + retry(self.aborts, interval, options)),
            (None, last) => interval.map(|interval| last.unwrap_or(now) + interval),
        };
        let stops = matches!(next.then, Then::Stop { .. });
        if stops && self.aborted.is_some_and(|aborted| !self.is_due(aborted + again(self.stop.tries), now)) {
            return;
        }
        let wanted = self.wanted || next.then != Then::RunOn || due.is_some_and(|at| self.is_due(at, now));
        if wanted && hands.iter().all(|hand| hand.report.is_some_and(can)) {
            let number = unused(view, plan);
            next.goal = Goal::Prepare(number);
            next.next = Number(number.0 + 1);
        }
    }

    /// Whether the final snapshot is tried again after one that was aborted: the job may have blocked it for a moment, or it was
    /// an earlier snapshot.
    fn tries_again(&self, view: &View, plan: &Plan, now: Instant) -> bool {
        let at = now + again(self.stop.tries);
        completed(view, plan).is_none() && self.stop.by.is_some_and(|by| at < by)
    }

    /// Whether the time limit of a stop has passed. It is unknown if another leader has accepted the stop: then the
    /// limits of each step apply.
    fn stop_is_due(&mut self, now: Instant) -> bool {
        self.stop.by.is_some_and(|by| self.is_due(by, now))
    }

    fn gathering(&mut self, view: &View, plan: &Plan, next: &mut Plan, options: &Options, now: Instant) {
        let Goal::Gather { why: last } = &plan.goal else { return };
        let silent = self.silent(view, plan, options, now);
        // Nothing has started yet since the coordinator began.
        if plan.epoch == Epoch::default() && plan.aim.is_none() {
            next.left.clone_from(images::remembered(view).unwrap_or(&plan.left));
        }
        self.asked(view, plan, next, now);
        if let (Goal::Gather { .. }, Then::Stop { requeue }) = (&next.goal, next.then) {
            next.goal = end(view, next, End::Stopped { requeue });
        }
        if !matches!(next.goal, Goal::Gather { .. }) || next.crew != plan.crew {
            return;
        }
        if plan.counted.is_some() && hands(view, plan).iter().any(|hand| hand.report.is_none()) {
            self.take_back(next);
            return;
        }
        let since = self.since(now);
        // A process in an uninterruptible sleep cannot be killed.
        let those = still_running(view);
        if !those.is_empty() {
            if self.is_due(since + options.limits.wait, now) {
                next.goal = end(view, next, End::Missing { why: Missing::JobEnd(those) });
            }
            return;
        }
        if !silent.is_empty() {
            next.goal = end(view, next, End::Missing { why: Missing::Report(silent) });
            return;
        }
        if self.runs_elsewhere || !nothing_runs(view, plan) {
            return;
        }
        let those = missing(view, options);
        if !those.is_empty() {
            if self.is_due(since + options.limits.wait, now) {
                next.goal = end(view, next, End::Missing { why: Missing::Members(those) });
            }
            return;
        }
        // Not before: a machine may have been lost, and what failed because of that is taken back once its lease is over.
        if let Some(why) = self.is_given_up(plan, options, (last, since)) {
            next.goal = end(view, next, End::Failed { why, last: plan.last });
            return;
        }
        // The coordinator is new or has lost its data, with the leases. Another machine may still believe that it has
        // one.
        let leases = if plan.epoch == Epoch::default() { options.lease } else { Duration::ZERO };
        let epochs = |report: &Report| {
            let parts = report.parts.values().map(|progress| progress.epoch).max();
            parts.map_or(report.epoch, |epoch| epoch.max(report.epoch))
        };
        let known = view.members.values().map(|report| epochs(report)).max().unwrap_or_default();
        // A job that hangs after each restore goes back to one image again and again, without a failure.
        let aim = plan.aim.as_ref().filter(|aim| aim.for_hang);
        let rewinds = aim.map_or(0, |aim| times(&plan.left, aim.to).min(MOST_REWINDS));
        let in_a_row = plan.in_a_row.max(plan.lost).max(rewinds);
        if !self.is_due(since + pause(in_a_row, options).max(leases), now) {
            return;
        }
        if starts_fresh(view, options) {
            next.next = unused(view, plan);
            (next.floor, next.aim) = (next.next, None);
            (next.in_a_row, next.early_cold) = (0, 0);
            (next.lost, next.fatal) = (0, 0);
            next.left.clear();
            next.failures.clear();
        } else if view.members.values().any(|it| it.fresh == Fresh::Wanted) && !continues_fresh(view) {
            // Only some were told to start from the beginning: those leave.
            return;
        }
        if let Some((image, parts)) = images::of_another_size(view, next, options) {
            let why = Mismatch::Size { image, parts, size: options.size };
            next.goal = end(view, next, End::Refused { why });
            return;
        }
        // With the changes of a rewind that was just requested.
        let chosen = images::choose(view, next);
        if next.aim.as_ref().is_some_and(|aim| chosen != Ok(StartFrom::Image(aim.to))) {
            next.goal = Goal::Gather { why: missed(next, Reason::PartsGone) };
            return;
        }
        let cold_start = options.restart.cold_start;
        let chosen = match chosen {
            Err(End::Missing { .. } | End::Failed { .. }) if cold_start == ColdStart::Allow => Ok(StartFrom::Beginning),
            chosen => chosen,
        };
        match chosen {
            Ok(StartFrom::Beginning) if cold_start == ColdStart::Never && has_begun(view) => {
                let why = Failure::NoImage { last: last.clone() };
                next.goal = end(view, next, End::Failed { why, last: plan.last });
            }
            Ok(from) if from == StartFrom::Beginning && plan.early_cold >= options.restart.early_deaths => {
                let (times, within) = (plan.early_cold, options.restart.min_uptime);
                let why = Failure::EarlyDeaths { times, within, last: last.clone() };
                next.goal = end(view, next, End::Failed { why, last: plan.last });
            }
            // Each member fetches its part while nothing runs. It says so if it cannot.
            Ok(StartFrom::Image(number)) if !images::is_here(view, number) => {}
            Ok(from) => {
                next.epoch = Epoch(known.max(plan.epoch).0 + 1);
                next.crew = crew(view);
                next.goal = Goal::Start(from);
                (next.from, next.healthy) = (from, false);
            }
            Err(why) => next.goal = end(view, next, why),
        }
    }

    /// The members that have not seen the plan for too long: their supervisors hang, or cannot write. Not counted from the
    /// beginning of the goal, because each request is a new plan, which nobody has seen at first.
    fn silent(&mut self, view: &View, plan: &Plan, options: &Options, now: Instant) -> Vec<Rank> {
        let since = std::mem::take(&mut self.behind);
        let mut late = Vec::new();
        for (rank, incarnation) in behind(view, plan) {
            let since = since.get(&incarnation).copied().unwrap_or(now);
            self.behind.insert(incarnation, since);
            if self.is_due(since + options.limits.wait, now) {
                late.push(rank);
            }
        }
        late
    }

    /// `gone`: no process is there any more that was when the job was suspended.
    fn suspended(&mut self, view: &View, plan: &Plan, next: &mut Plan, gone: bool, options: &Options, now: Instant) {
        self.asked(view, plan, next, now);
        if next.goal != Goal::Suspended {
            return;
        }
        if gone {
            // Everybody was lost, and the same command was started again.
            return begin_anew(next);
        }
        if let Then::Stop { requeue } = next.then {
            let is_stored = view.members.values().all(|report| !report.storing) && nothing_runs(view, plan);
            if is_stored || self.is_due(self.since(now) + options.limits.store, now) {
                next.goal = end(view, next, End::Stopped { requeue });
            }
        }
    }

    /// Carries out the first request that was not carried out and can be now.
    fn asked(&mut self, view: &View, plan: &Plan, next: &mut Plan, now: Instant) {
        let new = view.members.values().filter_map(|report| Some((report.incarnation, report.asked.as_ref()?)));
        let mut new = new.filter(|(who, asked)| plan.served.get(who).is_none_or(|served| *served < asked.number));
        let is_later = |ask: &Ask| match (ask, &plan.goal) {
            // It is served when the job runs.
            (Ask::Snapshot | Ask::Suspend, Goal::Start(_) | Goal::Resume(_) | Goal::Abort { .. }) => true,
            // Then it is known who was there, and no longer who was lost.
            (Ask::Suspend, Goal::Gather { .. }) => self.runs_elsewhere,
            // The snapshot in progress may lack what was done since it began.
            (Ask::Snapshot, Goal::Prepare(_) | Goal::Pull(_) | Goal::Dump(_)) => true,
            _ => false,
        };
        let found = new.find_map(|(who, asked)| {
            let refused = admits(view, &asked.ask).err();
            // Another member's stop does not wait for it.
            (refused.is_some() || !is_later(&asked.ask)).then_some((who, asked, refused))
        });
        let Some((who, asked, refused)) = found else { return };
        if plan.then == Then::RunOn {
            self.stop.tries = 0;
        }
        match (&asked.ask, &plan.goal) {
            _ if refused.is_some() => {}
            (Ask::StopNow { requeue }, _) => next.goal = end(view, next, End::Stopped { requeue: *requeue }),
            (Ask::Stop { requeue, within }, _) => {
                next.then = Then::Stop { requeue: *requeue };
                // Another member says how long: an Instant does not hold every time.
                self.stop = Stop { by: Some(now + (*within).min(LONGEST_STOP)), ..self.stop };
            }
            (Ask::Snapshot, _) => self.wanted = true,
            // As of now: they may have joined since the last epoch.
            (Ask::Suspend, Goal::Gather { .. }) => (next.goal, next.crew) = (Goal::Suspended, crew(view)),
            (Ask::Suspend, _) => next.then = Then::Suspend,
            (Ask::Resume, _) => (next.goal, next.then) = (Goal::Gather { why: Reason::Resumed }, Then::RunOn),
            (ask @ (Ask::Rewind(to) | Ask::LeaveHang(to)), _) => {
                let for_hang = matches!(ask, Ask::LeaveHang(_));
                next.next = unused(view, plan);
                let left = next.aim.take().map_or_else(|| next.left.clone(), |aim| aim.left);
                next.left.clone_from(&left);
                // In a row: otherwise the job has started from another image since.
                let before = if plan.from == StartFrom::Image(*to) { times(&next.left, *to) } else { 0 };
                let times = before + u32::from(for_hang);
                // It may be one that an earlier rewind abandoned: images abandoned since it was taken are usable again.
                next.left.retain(|left| left.before <= *to);
                next.left.push(Left { after: *to, before: next.next, times });
                // Somebody wants it, whatever failed before.
                if !for_hang {
                    next.failures.remove(to);
                }
                next.aim = Some(Aim { to: *to, left, of: (who, asked.number), for_hang });
                next.goal = Goal::Gather { why: Reason::Rewound(*to) };
                next.then = Then::RunOn;
            }
        }
        next.served.retain(|incarnation, _| view.members.values().any(|report| report.incarnation == *incarnation));
        next.refused.retain(|incarnation, _| *incarnation != who && next.served.contains_key(incarnation));
        next.served.insert(who, asked.number);
        if let Some(why) = refused {
            next.refused.insert(who, RefusedRequest { number: asked.number, why });
        }
    }
}

/// How often in a row the job went back to this group image because it hung.
fn times(left: &[Left], to: Number) -> u32 {
    left.iter().find(|left| left.after == to).map_or(0, |left| left.times)
}

/// A number for a snapshot. If the coordinator has lost its data, members may have parts with later numbers.
fn unused(view: &View, plan: &Plan) -> Number {
    let known = view.members.values().flat_map(|report| report.parts.keys()).chain(view.images.keys());
    known.map(|number| Number(number.0 + 1)).max().map_or(plan.next, |unused| unused.max(plan.next))
}

/// The coordinator has no plan: the group is new, or the coordinator has lost its data.
fn first_plan(origin: Incarnation) -> Plan {
    Plan {
        origin,
        serial: 1,
        epoch: Epoch::default(),
        crew: BTreeMap::new(),
        goal: Goal::Gather { why: Reason::Begins },
        then: Then::RunOn,
        next: Number(1),
        from: StartFrom::Beginning,
        healthy: false,
        failures: BTreeMap::new(),
        proven: BTreeSet::new(),
        in_a_row: 0,
        lost: 0,
        fatal: 0,
        counted: None,
        early_cold: 0,
        last: None,
        past: Past::default(),
        aim: None,
        floor: Number::default(),
        left: Vec::new(),
        served: BTreeMap::new(),
        refused: BTreeMap::new(),
    }
}

/// A new run of the same group.
fn begin_anew(next: &mut Plan) {
    (next.goal, next.then) = (Goal::Gather { why: Reason::NewRun }, Then::RunOn);
    next.crew.clear();
    (next.in_a_row, next.early_cold, next.last) = (0, 0, None);
    (next.lost, next.fatal) = (0, 0);
    // What was passed over in a run is tried again in the next.
    next.failures.clear();
}

/// The rewind cannot be carried out: the job continues from where it was. Returns the reason for the next start.
fn missed(next: &mut Plan, why: Reason) -> Reason {
    let Some(Aim { to, left, of: (who, number), .. }) = next.aim.take() else { return why };
    next.left = left;
    let why = Reason::RewindFailed { to, why: Box::new(why) };
    if next.served.get(&who) == Some(&number) {
        next.refused.insert(who, RefusedRequest { number, why: RequestRefusal::Failed(why.clone()) });
    }
    why
}

/// Whether all members were told to start from the beginning, and nobody has started the job since.
fn starts_fresh(view: &View, options: &Options) -> bool {
    let is_there = |rank| view.members.get(&Rank(rank)).is_some_and(|it| it.fresh == Fresh::Wanted);
    (0..options.size).all(is_there)
}

/// Whether the run has started from the beginning already, on request.
fn continues_fresh(view: &View) -> bool {
    view.members.values().any(|it| it.fresh == Fresh::Done)
}

/// Whether the job has begun in this run: a process is there under which it has run.
fn has_begun(view: &View) -> bool {
    view.members.values().any(|report| report.begun)
}

/// Whether a snapshot that was aborted for this reason has cost nothing.
fn is_free(why: &Reason) -> bool {
    matches!(why, Reason::Refused { why: SnapshotRefusal::JobBlocks, .. })
}

/// The goal with which all members leave.
fn end(view: &View, next: &mut Plan, end: End) -> Goal {
    next.crew = crew(view);
    Goal::End(end)
}

/// The present members.
fn crew(view: &View) -> BTreeMap<Rank, Incarnation> {
    view.members.iter().map(|(rank, report)| (*rank, report.incarnation)).collect()
}

/// How long after an aborted snapshot was undone the final one is tried again, if so many were aborted. Longer pauses would leave the
/// end of the time limit unused, when the job may allow a snapshot again.
fn again(tries: u32) -> Duration {
    match tries {
        0 => Duration::ZERO,
        tries => Duration::from_secs(1 << (tries - 1).min(2)),
    }
}

/// The pause after this many aborted snapshots in a row. Not longer than the interval, at which one would be due anyway.
fn retry(aborts: u32, interval: Duration, options: &Options) -> Duration {
    let factor = 1u32.checked_shl(aborts.saturating_sub(1)).unwrap_or(u32::MAX);
    let most = options.retry_max.min(interval.max(options.retry_after));
    options.retry_after.saturating_mul(factor).min(most)
}
