//! What every member does: compares the plan with its own job, does what is missing, and reports.

mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::documents::{
    Ask, Asked, Blame, Costs, End, Ending, Fresh, Goal, Plan, Progress, Replica, Replicated, Report, Rewound,
    StartFrom, Stored, View,
};
use crate::events::{Local, Order, Write};
use crate::ids::{Epoch, Incarnation, Number, Rank};
use crate::images;
use crate::job::Job;
use crate::options::Options;
use crate::reasons::{SnapshotRefusal, StartFailure};
use waits::Waits;

/// What this member knows of its lease.
#[derive(Debug, Default)]
struct Fence {
    incarnation: Option<Incarnation>,
    /// The membership before.
    former: Option<Incarnation>,
    /// The lease cannot expire before.
    sure: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listed {
    No,
    Asked,
    Yes,
}

/// Parts on their way.
#[derive(Debug, Default)]
struct Transfers {
    /// Those that are being stored.
    storing: BTreeSet<Number>,
    /// The one that is being fetched from the replica.
    fetching: Option<Number>,
    /// Those that are being sent to the replica.
    sending: BTreeSet<Number>,
    /// The newest group image that is whole in the replica, as far as it was seen.
    whole: Number,
}

/// What the job may start from, as this member was told.
#[derive(Debug, Default, Clone)]
struct Line {
    /// Whether the user wants to start from the beginning.
    fresh: Fresh,
    /// See [`Report::begun`].
    begun: bool,
    /// Group images before this one are not used.
    floor: Number,
    /// See [`Report::rewound`].
    rewound: Option<Rewound>,
}

/// The end of the run here.
#[derive(Debug, Default)]
struct Over {
    /// It was ordered.
    finished: bool,
    /// Everything after it is done.
    done: bool,
}

/// The state of a member.
#[derive(Debug)]
pub(crate) struct Member {
    rank: Rank,
    fence: Fence,
    job: Job,
    /// The epoch of the job.
    epoch: Epoch,
    /// The parts that this member can restore.
    parts: BTreeMap<Number, Progress>,
    /// Whether `parts` is known.
    listed: Listed,
    /// The group images whose record this process has seen. Once a record is removed, its part is not needed.
    recorded: BTreeMap<Number, Recorded>,
    transfers: Transfers,
    costs: Costs,
    asked: Option<Asked>,
    waits: Waits,
    line: Line,
    /// See [`Report::rests`].
    rests: bool,
    over: Over,
}

/// The record of a group image, as it was when it was last seen.
#[derive(Debug)]
struct Recorded {
    /// The origin of the plan then.
    origin: Incarnation,
    committed: bool,
}

impl Member {
    pub(crate) fn new(rank: Rank, epoch: Epoch) -> Member {
        Member {
            rank,
            fence: Fence::default(),
            job: Job::None,
            epoch,
            parts: BTreeMap::new(),
            listed: Listed::No,
            recorded: BTreeMap::new(),
            transfers: Transfers::default(),
            costs: Costs::default(),
            asked: None,
            waits: Waits::default(),
            line: Line::default(),
            rests: false,
            over: Over::default(),
        }
    }

    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        self.fence.incarnation
    }

    pub(crate) fn starts(&mut self, fresh: Fresh, floor: Number) {
        (self.line.fresh, self.line.floor) = (fresh, floor);
    }

    pub(crate) fn remembers(&mut self, rewound: Option<Rewound>) {
        self.line.rewound = rewound;
    }

    /// Takes from the member before what outlives a coordinator that has lost its data.
    pub(crate) fn follows(&mut self, former: &Member, view: &View) {
        self.line = former.line.clone();
        self.costs = former.costs.clone();
        self.asked = former.unserved_stop(view);
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(crate) fn rewound(&self) -> Option<&Rewound> {
        self.line.rewound.as_ref()
    }

    pub(crate) fn floor(&self) -> Number {
        self.line.floor
    }

    pub(crate) fn asked(&self) -> Option<&Asked> {
        self.asked.as_ref()
    }

    /// When this member ends its job if the lease is not renewed.
    fn fenced_at(&self, options: &Options) -> Option<Instant> {
        let sure = self.fence.sure.filter(|_| self.job.exists() && self.job != Job::Ending)?;
        sure.checked_sub(options.fence)
    }

    // ---- the lease ----

    pub(crate) fn joins(&mut self, incarnation: Incarnation, view: &View) -> Option<Order> {
        let kill = self.kill();
        self.asked = self.unserved_stop(view);
        let former = self.fence.incarnation.or(self.fence.former);
        self.fence = Fence { incarnation: Some(incarnation), former, sure: None };
        self.listed = Listed::No;
        kill
    }

    pub(crate) fn sure(&mut self, until: Instant) {
        if self.fence.incarnation.is_some() {
            self.fence.sure = Some(until);
        }
    }

    pub(crate) fn loses_session(&mut self, view: &View) -> Option<Order> {
        self.asked = self.unserved_stop(view);
        let former = self.fence.incarnation.or(self.fence.former);
        self.fence = Fence { former, ..Fence::default() };
        self.kill()
    }

    fn kill(&mut self) -> Option<Order> {
        if !self.job.exists() || self.job == Job::Ending {
            return None;
        }
        self.job = Job::Ending;
        Some(Order::Kill)
    }

    // ---- this machine ----

    /// The number of the latest request of this membership that was served.
    fn served(&self, view: &View) -> u64 {
        let served = view.plan.as_ref().zip(self.fence.incarnation);
        served.and_then(|(plan, us)| plan.value.served.get(&us).copied()).unwrap_or_default()
    }

    /// The request of this member, if it is a stop that was not served yet. It outlives the membership: whoever has made it
    /// does not make it again, and a deadline comes once.
    fn unserved_stop(&self, view: &View) -> Option<Asked> {
        let served = self.served(view);
        let is_stop = |asked: &Asked| matches!(asked.ask, Ask::Stop { .. } | Ask::StopNow { .. });
        self.asked.clone().filter(|asked| asked.number > served && is_stop(asked))
    }

    pub(crate) fn asks(&mut self, ask: Ask, view: &View) {
        let served = self.served(view);
        let waits = |asked: &Asked| asked.number > served && asked.ask != Ask::Snapshot;
        if ask == Ask::Snapshot && self.asked.as_ref().is_some_and(waits) {
            return;
        }
        // A deadline comes once.
        let is_stop = matches!(ask, Ask::Stop { .. } | Ask::StopNow { .. });
        if !is_stop && self.unserved_stop(view).is_some() {
            return;
        }
        self.asked = Some(Asked::after(self.asked.as_ref(), ask));
    }

    pub(crate) fn happened(&mut self, local: Local) {
        match (local, &self.job) {
            (Local::Started, Job::Starting) => self.job = Job::Ready,
            (Local::Locked(number), Job::Preparing(wanted)) if number == *wanted => self.job = Job::Locked(number),
            (Local::Quiet(number), Job::Pulling(wanted)) if number == *wanted => self.job = Job::Quiet(number),
            (Local::Dumped(number, part), Job::Dumping(wanted)) if number == *wanted => {
                self.job = Job::Dumped(number, part);
            }
            (Local::Refused(number, why), job) if job.snapshot() == Some(number) => {
                self.job = Job::Refused(number, why)
            }
            // The member refused it while it was being aborted.
            (Local::Aborted(number) | Local::Refused(number, _), Job::Aborting(wanted)) if number == *wanted => {
                self.job = Job::Running;
            }
            // What decided that may have caused the order.
            (Local::Ended(ending @ Ending::GivenUp { .. }), Job::Ending) => self.job = Job::Over(ending),
            // The job was ended on order; it did not fail.
            (Local::Ended(_), Job::Ending) => self.job = Job::None,
            (Local::Ended(ending), job) if job.exists() => {
                // It did something, if only on this machine.
                self.line.begun |= !matches!(ending, Ending::NotStarted { .. });
                self.job = Job::Over(ending);
            }
            (Local::Stored(number), _) => {
                self.transfers.storing.remove(&number);
                if let Some(part) = self.parts.get_mut(&number) {
                    part.stored = Stored::Durable;
                }
            }
            (Local::Parts(parts), _) if self.listed == Listed::Asked => {
                self.parts = parts;
                self.listed = Listed::Yes;
            }
            (Local::Costs(costs), _) => self.costs = costs,
            (Local::Done, _) => self.over.done = true,
            (Local::Storing(number), _) if self.parts.contains_key(&number) => {
                self.transfers.storing.insert(number);
            }
            (Local::NotStored(number), _) => drop(self.transfers.storing.remove(&number)),
            (Local::Gone(number), _) => {
                self.transfers.storing.remove(&number);
                self.parts.remove(&number);
                self.transfers.fetching = self.transfers.fetching.filter(|fetching| *fetching != number);
            }
            (Local::Fetched(number), _) => {
                self.transfers.fetching = self.transfers.fetching.filter(|fetching| *fetching != number);
                self.replicated(number, Replicated::Yes);
            }
            (Local::Replicated(number), _) => {
                self.transfers.sending.remove(&number);
                // One that is older than the whole one there is removed again.
                let stays = number >= self.transfers.whole;
                self.replicated(number, if stays { Replicated::Yes } else { Replicated::Failed });
            }
            (Local::NotReplicated(number), _) => {
                self.transfers.sending.remove(&number);
                self.replicated(number, Replicated::Failed);
            }
            _ => {}
        }
    }

    fn replicated(&mut self, number: Number, replicated: Replicated) {
        if let Some(part) = self.parts.get_mut(&number) {
            part.replicated = replicated;
        }
    }

    // ---- the plan ----

    /// Does what the plan demands and this member has not done yet.
    pub(crate) fn follow(&mut self, view: &View, options: &Options, now: Instant, orders: &mut Vec<Order>) {
        if self.fenced_at(options).is_some_and(|at| at <= now) {
            orders.extend(self.kill());
        }
        orders.extend(self.leave_if_taken(view, options, now));
        orders.extend(self.leave_if_alone(view, options, now));
        orders.extend(self.list(view));
        match &view.plan {
            Some(plan) => self.follow_plan(view, &plan.value, options, now, orders),
            None => self.waits.rest = None,
        }
        orders.extend(self.leave_if_none_begins(view, options, now));
        orders.extend(self.leave_snapshot(view, options, now));
    }

    fn follow_plan(&mut self, view: &View, plan: &Plan, options: &Options, now: Instant, orders: &mut Vec<Order>) {
        let recorded = |committed| Recorded { origin: plan.origin, committed };
        self.recorded.extend(view.images.iter().map(|(number, image)| (*number, recorded(image.value.committed))));
        self.remember(plan);
        let ours = self.fence.incarnation.is_some() && plan.crew.get(&self.rank) == self.fence.incarnation.as_ref();
        self.rests = self.sees_the_rest(view, plan, options, now);
        self.settle_snapshot(view, plan, options, orders);
        if self.job.exists() && !(ours && plan.goal.is_alive() && plan.epoch == self.epoch) {
            orders.extend(self.kill());
        } else if ours || (self.is_completed(plan) && self.has_joined(view)) {
            // A member that joins after the end leaves too.
            self.obey(view, plan, options, now, orders);
        }
        self.see_replica(view);
        self.forget(view, plan, orders);
        orders.extend(self.fetch(view));
        self.replicate(view, plan, options, orders);
    }

    /// The first plan of a coordinator knows of no rewind until the members have told of it.
    fn remember(&mut self, plan: &Plan) {
        let is_known = |it: &Rewound| it.origin == plan.origin && it.left == plan.left;
        if plan.epoch > Epoch::default() && !self.line.rewound.as_ref().is_some_and(is_known) {
            self.line.rewound = Some(Rewound { origin: plan.origin, left: plan.left.clone() });
        }
    }

    /// The job is to be started from a part that is only in the replica.
    fn fetch(&mut self, view: &View) -> Option<Order> {
        let (number, members) = images::fetching(view)?;
        let is_ours = members.contains(&self.rank) && self.has_joined(view);
        let is_away = self.parts.get(&number).is_some_and(|part| part.replicated == Replicated::Only);
        if !is_ours || !is_away || self.transfers.fetching.is_some() || self.job.exists() {
            return None;
        }
        self.transfers.fetching = Some(number);
        Some(Order::Fetch(number))
    }

    /// Sends its part of the group image that is wanted in the replica. The last one of a run is sent after its end.
    fn replicate(&mut self, view: &View, plan: &Plan, options: &Options, orders: &mut Vec<Order>) {
        if matches!(plan.goal, Goal::End(_)) || !self.has_joined(view) {
            return;
        }
        let is_wanted = |number: &Number| view.images.get(number).is_some_and(|it| it.value.replica == Replica::Wanted);
        self.transfers.sending.retain(is_wanted);
        for (number, image) in view.images.iter().filter(|(_, image)| image.value.replica == Replica::Wanted) {
            let Some(part) = self.parts.get_mut(number) else { continue };
            let is_open = part.replicated == Replicated::No && image.value.parts.get(&self.rank) == Some(&part.part);
            if !is_open || self.transfers.sending.contains(number) {
                continue;
            }
            match options.replicates {
                true => {
                    self.transfers.sending.insert(*number);
                    orders.push(Order::Replicate(*number));
                }
                false => part.replicated = Replicated::Failed,
            }
        }
    }

    fn list(&mut self, view: &View) -> Option<Order> {
        match view.members.get(&self.rank).map(|report| report.incarnation) {
            None if self.listed == Listed::No && self.fence.incarnation.is_some() && !self.job.exists() => {
                self.listed = Listed::Asked;
                Some(Order::List)
            }
            // Another supervisor has the rank, and may be storing parts.
            Some(other) if Some(other) != self.fence.incarnation => {
                self.listed = Listed::No;
                None
            }
            _ => None,
        }
    }

    /// Whether there is nothing to do for this member.
    fn is_completed(&self, plan: &Plan) -> bool {
        plan.goal == Goal::End(End::Completed) && self.line.fresh != Fresh::Wanted
    }

    /// A snapshot that the plan no longer names is over. Its part is kept if the group image was recorded.
    fn settle_snapshot(&mut self, view: &View, plan: &Plan, options: &Options, orders: &mut Vec<Order>) {
        let (Some(number), true) = (self.job.snapshot(), plan.epoch == self.epoch) else { return };
        if matches!(plan.goal, Goal::Prepare(wanted) | Goal::Pull(wanted) | Goal::Dump(wanted) if wanted == number) {
            return;
        }
        let recorded = view.images.get(&number).and_then(|image| image.value.parts.get(&self.rank));
        match (&self.job, recorded) {
            (Job::Dumped(_, part), Some(recorded)) if part == recorded => {
                let (epoch, origin) = (self.epoch, plan.origin);
                let (size, stored, replicated) = (options.size, Stored::Staged, Replicated::No);
                self.parts.insert(number, Progress { part: part.clone(), epoch, origin, size, stored, replicated });
                self.transfers.storing.insert(number);
                if plan.goal.is_alive() {
                    self.job = Job::Running;
                    orders.push(Order::Resume(number));
                } else {
                    // In this order: the end of the job would cancel the snapshot.
                    orders.push(Order::Store(number));
                    orders.extend(self.kill());
                }
            }
            // The job is ended anyway.
            _ if !plan.goal.is_alive() => {}
            _ => {
                self.job = Job::Aborting(number);
                orders.push(Order::Abort(number));
            }
        }
    }

    fn obey(&mut self, view: &View, plan: &Plan, options: &Options, now: Instant, orders: &mut Vec<Order>) {
        match (&plan.goal, &self.job) {
            (Goal::Start(from), Job::None | Job::Over(_)) if plan.epoch > self.epoch => {
                let time_is_left = self.fence.sure.and_then(|sure| sure.checked_sub(options.fence));
                if time_is_left.is_some_and(|until| now < until) {
                    self.epoch = plan.epoch;
                    self.line.floor = self.line.floor.max(plan.floor);
                    if self.line.fresh == Fresh::Wanted {
                        self.line.fresh = Fresh::Done;
                    }
                    orders.extend(self.start(*from, plan.origin, view));
                }
            }
            (Goal::Run, Job::Ready) => {
                self.job = Job::Running;
                self.line.begun = true;
                orders.push(Order::Plug);
            }
            (Goal::Prepare(number), Job::Running | Job::Refused(..)) => {
                let refused = matches!(&self.job, Job::Refused(refused, _) if refused == number);
                if !refused {
                    self.job = Job::Preparing(*number);
                    orders.push(Order::Prepare(*number));
                }
            }
            (Goal::Pull(number), Job::Locked(locked)) if number == locked => {
                self.job = Job::Pulling(*number);
                orders.push(Order::Pull(*number));
            }
            (Goal::Dump(number), Job::Quiet(quiet)) if number == quiet => {
                self.job = Job::Dumping(*number);
                orders.push(Order::Dump(*number));
            }
            (Goal::Pull(number) | Goal::Dump(number), Job::Running) => {
                self.job = Job::Refused(*number, SnapshotRefusal::NotPrepared);
            }
            (Goal::Run, Job::Refused(..)) => self.job = Job::Running,
            (Goal::End(end), Job::None | Job::Over(_)) if !self.over.finished && self.transfers.storing.is_empty() => {
                self.over.finished = true;
                orders.push(Order::Finish(end.clone()));
            }
            _ => {}
        }
    }

    fn start(&mut self, from: StartFrom, origin: Incarnation, view: &View) -> Option<Order> {
        let part = match from {
            StartFrom::Beginning => None,
            StartFrom::Image(number) => {
                let wanted = view.images.get(&number).and_then(|image| image.value.parts.get(&self.rank));
                let ours = self.parts.get(&number).map(|progress| &progress.part);
                let is_away = self.parts.get(&number).is_some_and(|part| part.replicated == Replicated::Only);
                if wanted.is_none() || wanted != ours || is_away {
                    // The next report says which part is there.
                    self.job = Job::Over(Ending::not_started(StartFailure::NoPart(number), Blame::Machine));
                    return None;
                }
                wanted.cloned()
            }
        };
        self.job = Job::Starting;
        Some(Order::Start { epoch: self.epoch, origin, from, part })
    }

    /// Parts that are older than the whole one in the replica may be removed from there, and not only by this process.
    fn see_replica(&mut self, view: &View) {
        let whole = images::whole_in_replica(view).unwrap_or_default();
        if whole > self.transfers.whole {
            let older = self.parts.range_mut(..whole).filter(|(_, part)| part.replicated == Replicated::Yes);
            older.for_each(|(_, part)| part.replicated = Replicated::No);
        }
        self.transfers.whole = whole;
    }

    /// Drops parts of group images whose record the leader has removed. It does so only while there is a newer one that is
    /// committed, or whole if the removed one was not. If there is none, somebody else has removed the record: then the
    /// parts are kept, and the group image is recorded again from them. If the coordinator has lost its data, all parts are
    /// kept: nothing else is left.
    fn forget(&mut self, view: &View, plan: &Plan, orders: &mut Vec<Order>) {
        let committed = view.images.iter().rev().find(|(_, image)| image.value.committed).map(|(number, _)| *number);
        let gone = |number: &Number| {
            let recorded = self.recorded.get(number).filter(|recorded| recorded.origin == plan.origin);
            let Some(recorded) = recorded.filter(|_| !view.images.contains_key(number)) else { return false };
            let is_older = committed.is_some_and(|newest| *number < newest);
            // A machine that is away may have the part of a committed one that the others lack.
            let lacks = || !recorded.committed && view.members.values().any(|it| !it.parts.contains_key(number));
            is_older || images::is_lost(view, *number, lacks)
        };
        let gone: Vec<Number> = self.parts.keys().copied().filter(gone).collect();
        for number in gone {
            // Nothing removes it from the replica while no newer one is whole there. If somebody has removed the record of
            // the one that is whole, it may be all that is left.
            let stays = number > self.transfers.whole;
            match self.parts.get_mut(&number) {
                Some(part) if stays && part.replicated == Replicated::Only => continue,
                Some(part) if stays && part.replicated == Replicated::Yes => part.replicated = Replicated::Only,
                // Storing it may then fail, which does no harm.
                _ => drop(self.parts.remove(&number)),
            }
            // The end of that is not reported: nobody knows the part any more.
            self.transfers.storing.remove(&number);
            orders.push(Order::Forget(number));
        }
    }

    // ---- the report ----

    /// Whether the coordinator has a report of this membership.
    pub(crate) fn has_joined(&self, view: &View) -> bool {
        let incarnation = view.members.get(&self.rank).map(|report| report.incarnation);
        incarnation.is_some() && incarnation == self.fence.incarnation
    }

    pub(crate) fn report(&self, view: &View) -> Option<Report> {
        Some(Report {
            incarnation: self.fence.incarnation?,
            seen: seen(view),
            epoch: self.epoch,
            state: self.job.state(),
            parts: self.parts.clone(),
            storing: !self.transfers.storing.is_empty(),
            costs: self.costs.clone(),
            done: self.over.done,
            asked: self.asked.clone(),
            fresh: self.line.fresh,
            begun: self.line.begun,
            floor: self.line.floor,
            rests: self.rests,
            rewound: self.line.rewound.clone(),
        })
    }

    /// Whether a report of this membership says what [`Member::report`] says now. Each event asks this, and nearly always
    /// it does: so nothing is copied for it.
    fn is_reported(&self, written: &Report, view: &View) -> bool {
        let Report {
            incarnation: _,
            seen: at,
            epoch,
            state,
            parts,
            storing,
            costs,
            done,
            asked,
            fresh,
            begun,
            floor,
            rests,
            rewound,
        } = written;
        (*at, *epoch) == (seen(view), self.epoch)
            && (*fresh, *begun, *floor) == (self.line.fresh, self.line.begun, self.line.floor)
            && (*storing, *done, *rests) == (!self.transfers.storing.is_empty(), self.over.done, self.rests)
            && (parts, costs, asked, rewound) == (&self.parts, &self.costs, &self.asked, &self.line.rewound)
            && self.job.is_reported_as(state)
    }

    /// The next write of the report.
    pub(crate) fn write(&self, view: &View) -> Option<Write> {
        match view.members.get(&self.rank) {
            // A report promises that no process of an earlier member with this rank still runs.
            None if self.job.exists() || self.listed != Listed::Yes => None,
            None => self.report(view).map(Write::Join),
            Some(written) if Some(written.incarnation) != self.fence.incarnation || self.is_reported(written, view) => {
                None
            }
            Some(_) => self.report(view).map(Write::Report),
        }
    }
}

/// The plan of this view, as a report names it.
fn seen(view: &View) -> u64 {
    view.plan.as_ref().map_or(0, |plan| plan.value.serial)
}
