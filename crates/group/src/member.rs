//! What every member does: compares the plan with its own job, does what is missing, and reports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::documents::{
    Ask, Asked, End, Ending, Epoch, From, Goal, Incarnation, Number, Part, Plan, Progress, Rank, Report, State, Stored,
    View,
};
use crate::machine::{Local, Options, Order, Write};

/// The job of this member.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Job {
    None,
    Starting,
    Ready,
    Running,
    /// Runs, after it did not take part in this snapshot.
    Refused(Number, String),
    Preparing(Number),
    Locked(Number),
    Pulling(Number),
    Quiet(Number),
    Dumping(Number),
    Dumped(Number, Part),
    Aborting(Number),
    /// It was told to end.
    Ending,
    Over(Ending),
}

impl Job {
    fn exists(&self) -> bool {
        !matches!(self, Job::None | Job::Over(_))
    }

    /// The snapshot in progress.
    fn snapshot(&self) -> Option<Number> {
        match self {
            Job::Preparing(number) | Job::Locked(number) | Job::Pulling(number) => Some(*number),
            Job::Quiet(number) | Job::Dumping(number) | Job::Dumped(number, _) => Some(*number),
            _ => None,
        }
    }

    fn state(&self) -> State {
        match self {
            Job::None => State::Idle,
            Job::Starting => State::Starting,
            Job::Ready => State::Ready,
            Job::Running | Job::Preparing(_) => State::Running,
            Job::Refused(number, why) => State::Refused(*number, why.clone()),
            Job::Locked(number) | Job::Pulling(number) => State::Locked(*number),
            Job::Quiet(number) | Job::Dumping(number) | Job::Aborting(number) => State::Quiet(*number),
            Job::Dumped(number, part) => State::Dumped(*number, part.clone()),
            Job::Ending => State::Ending,
            Job::Over(ending) => State::Over(ending.clone()),
        }
    }
}

/// What this member knows of its lease.
#[derive(Debug, Default)]
struct Fence {
    incarnation: Option<Incarnation>,
    /// The lease cannot expire before.
    sure: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listed {
    No,
    Asked,
    Yes,
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
    /// The group images whose record this process has seen, and the origin of the plan then. Once a record is removed,
    /// its part is not needed.
    recorded: BTreeMap<Number, Incarnation>,
    /// Parts that are being stored.
    storing: BTreeSet<Number>,
    asked: Option<Asked>,
    /// When this process first saw that another supervisor has this rank.
    taken: Option<Instant>,
    finished: bool,
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
            storing: BTreeSet::new(),
            asked: None,
            taken: None,
            finished: false,
        }
    }

    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        self.fence.incarnation
    }

    /// When this member must do something without an event.
    pub(crate) fn deadline(&self, options: &Options) -> Option<Instant> {
        [self.fenced_at(options), self.taken.map(|since| since + options.limits.wait)].into_iter().flatten().min()
    }

    /// When this member ends its job if the lease is not renewed.
    fn fenced_at(&self, options: &Options) -> Option<Instant> {
        let sure = self.fence.sure.filter(|_| self.job.exists() && self.job != Job::Ending)?;
        sure.checked_sub(options.fence)
    }

    // ---- the lease ----

    pub(crate) fn joins(&mut self, incarnation: Incarnation) -> Option<Order> {
        let kill = self.kill();
        self.fence = Fence { incarnation: Some(incarnation), sure: None };
        self.asked = None;
        self.listed = Listed::No;
        kill
    }

    pub(crate) fn sure(&mut self, until: Instant) {
        if self.fence.incarnation.is_some() {
            self.fence.sure = Some(until);
        }
    }

    pub(crate) fn loses_session(&mut self) -> Option<Order> {
        self.fence = Fence::default();
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

    pub(crate) fn asks(&mut self, ask: Ask) {
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
            // The job was ended on order; it did not fail.
            (Local::Ended(_), Job::Ending) => self.job = Job::None,
            (Local::Ended(ending), job) if job.exists() => self.job = Job::Over(ending),
            (Local::Stored(number), _) => {
                self.storing.remove(&number);
                if let Some(part) = self.parts.get_mut(&number) {
                    part.stored = Stored::Durable;
                }
            }
            (Local::Parts(parts), _) if self.listed == Listed::Asked => {
                self.parts = parts;
                self.listed = Listed::Yes;
            }
            (Local::NotStored(number), _) => drop(self.storing.remove(&number)),
            (Local::Gone(number), _) => {
                self.storing.remove(&number);
                self.parts.remove(&number);
            }
            _ => {}
        }
    }

    // ---- the plan ----

    /// Does what the plan demands and this member has not done yet.
    pub(crate) fn follow(&mut self, view: &View, options: &Options, now: Instant) -> Vec<Order> {
        let mut orders = Vec::new();
        if self.fenced_at(options).is_some_and(|at| at <= now) {
            orders.extend(self.kill());
        }
        orders.extend(self.leave_if_taken(view, options, now));
        orders.extend(self.list(view));
        let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return orders };
        self.recorded.extend(view.images.keys().map(|number| (*number, plan.origin)));
        let ours = self.fence.incarnation.is_some() && plan.crew.get(&self.rank) == self.fence.incarnation.as_ref();
        self.settle_snapshot(view, plan, &mut orders);
        if self.job.exists() && !(ours && plan.goal.is_alive() && plan.epoch == self.epoch) {
            orders.extend(self.kill());
        } else if ours || (plan.goal == Goal::End(End::Completed) && self.has_joined(view)) {
            // A member that joins after the end leaves too.
            self.obey(view, plan, options, now, &mut orders);
        }
        self.forget(view, plan, &mut orders);
        orders
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

    /// Another supervisor has this rank. It may be the one before this, whose lease has not expired yet.
    fn leave_if_taken(&mut self, view: &View, options: &Options, now: Instant) -> Option<Order> {
        let other = view.members.get(&self.rank).map(|report| report.incarnation);
        if other.is_none() || other == self.fence.incarnation || self.fence.incarnation.is_none() || self.finished {
            self.taken = None;
            return None;
        }
        let since = *self.taken.get_or_insert(now);
        if now < since + options.limits.wait || self.job.exists() {
            return None;
        }
        (self.finished, self.taken) = (true, None);
        let why = format!("another supervisor runs as {}", self.rank);
        Some(Order::Finish(End::Missing { why }))
    }

    /// A snapshot that the plan no longer names is over. Its part is kept if the group image was recorded.
    fn settle_snapshot(&mut self, view: &View, plan: &Plan, orders: &mut Vec<Order>) {
        let (Some(number), true) = (self.job.snapshot(), plan.epoch == self.epoch) else { return };
        if matches!(plan.goal, Goal::Prepare(wanted) | Goal::Pull(wanted) | Goal::Dump(wanted) if wanted == number) {
            return;
        }
        let recorded = view.images.get(&number).and_then(|image| image.value.parts.get(&self.rank));
        match (&self.job, recorded) {
            (Job::Dumped(_, part), Some(recorded)) if part == recorded => {
                let (epoch, origin) = (self.epoch, plan.origin);
                self.parts.insert(number, Progress { part: part.clone(), epoch, origin, stored: Stored::Staged });
                self.storing.insert(number);
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
                    orders.extend(self.start(*from, plan.origin, view));
                }
            }
            (Goal::Run, Job::Ready) => {
                self.job = Job::Running;
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
                self.job = Job::Refused(*number, "it was not prepared".into());
            }
            (Goal::Run, Job::Refused(..)) => self.job = Job::Running,
            (Goal::End(end), Job::None | Job::Over(_)) if !self.finished && self.storing.is_empty() => {
                self.finished = true;
                orders.push(Order::Finish(end.clone()));
            }
            _ => {}
        }
    }

    fn start(&mut self, from: From, origin: Incarnation, view: &View) -> Option<Order> {
        let part = match from {
            From::Beginning => None,
            From::Image(number) => {
                let wanted = view.images.get(&number).and_then(|image| image.value.parts.get(&self.rank));
                let ours = self.parts.get(&number).map(|progress| &progress.part);
                if wanted.is_none() || wanted != ours {
                    let why = format!("this machine does not have its part of {number}");
                    self.job = Job::Over(Ending::NotStarted { why });
                    return None;
                }
                wanted.cloned()
            }
        };
        self.job = Job::Starting;
        Some(Order::Start { epoch: self.epoch, origin, from, part })
    }

    /// Drops parts of group images whose record the leader has removed. If the coordinator has lost its data, all parts
    /// are kept: nothing else is left.
    fn forget(&mut self, view: &View, plan: &Plan, orders: &mut Vec<Order>) {
        let gone =
            |number: &Number| self.recorded.get(number) == Some(&plan.origin) && !view.images.contains_key(number);
        let gone: Vec<Number> = self.parts.keys().copied().filter(gone).collect();
        for number in gone {
            // Storing it may then fail. That is reported, and does no harm.
            self.parts.remove(&number);
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
            seen: view.plan.as_ref().map_or(0, |plan| plan.value.serial),
            epoch: self.epoch,
            state: self.job.state(),
            parts: self.parts.clone(),
            storing: !self.storing.is_empty(),
            asked: self.asked.clone(),
        })
    }

    /// The next write of the report.
    pub(crate) fn write(&self, view: &View) -> Option<Write> {
        let report = self.report(view)?;
        match view.members.get(&self.rank) {
            // A report promises that no process of an earlier member with this rank still runs.
            None if self.job.exists() || self.listed != Listed::Yes => None,
            None => Some(Write::Join(report)),
            Some(written) if written.incarnation != report.incarnation => None,
            Some(written) => (*written != report).then_some(Write::Report(report)),
        }
    }
}
