//! One supervisor's side of the protocol: its state, the events that it gets, and its answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::documents::{
    Ask, Asked, Costs, End, Ending, Epoch, Fresh, From, GroupImage, Incarnation, Number, Part, Plan, Progress, Rank,
    Report, Versioned, View,
};
use crate::leader::Leading;
use crate::member::Member;

/// The settings of a group. All members must have the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// This member.
    pub rank: Rank,
    /// Number of members.
    pub size: u32,
    /// Time limits of the steps.
    pub limits: Limits,
    /// Time between group snapshots.
    pub interval: Option<Duration>,
    /// The pause after a group snapshot that was aborted.
    pub retry_after: Duration,
    /// What is done after the job fails.
    pub restart: Restart,
    /// Number of committed group images that are kept.
    pub keep: usize,
    /// Whether the member has a replica.
    pub replicates: bool,
    /// How long a lease lives without a renewal.
    pub lease: Duration,
    /// A member ends its job this long before its lease can expire. Covers the time to end the job, and the error of
    /// its clock.
    pub fence: Duration,
    /// Whether the coordinator may end a lease too early. Then a lost member may run its job for as long as a lease
    /// lives.
    pub leases_end_early: bool,
}

/// Time limits of the steps of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// How long to wait for members that are missing.
    pub wait: Duration,
    /// Until all jobs are ready.
    pub start: Duration,
    /// From the order to reach the cut until all are locked, and as long again until all cables are out.
    pub prepare: Duration,
    /// Until all are dumped.
    pub dump: Duration,
    /// Until the last group image of a stop is stored.
    pub store: Duration,
}

/// What is done after the job of a group fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restart {
    /// After this time an epoch counts as healthy.
    pub min_uptime: Duration,
    /// The pause before the second restart in a row; it doubles with each.
    pub backoff: Duration,
    /// The longest pause.
    pub max_backoff: Duration,
    /// After this many restarts, the next failure ends the run: restarts within `window`, and epochs in a row that
    /// failed before they were healthy.
    pub max_restarts: u32,
    /// The time in which restarts count.
    pub window: Duration,
    /// After an epoch of this time, no earlier restart counts.
    pub healthy_uptime: Duration,
    /// After this many epochs in a row that started from the beginning and failed before they were healthy, the run
    /// ends.
    pub early_deaths: u32,
}

/// An event for the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A newer state of the coordinator.
    View(Arc<View>),
    /// There is a new lease, and a new membership with it.
    Session(Incarnation),
    /// The lease cannot expire before this time.
    Sure(Instant),
    /// The lease is lost.
    SessionLost,
    /// The answer to a [`Write`].
    Wrote(Answer),
    /// News of this member's job.
    Local(Local),
    /// A request of a user of this member. It replaces one that is not served yet; but a request for a snapshot does not
    /// replace another request.
    Asked(Ask),
    /// Time has passed.
    Tick,
}

/// The coordinator's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It is written, in this revision.
    Done(u64),
    /// It is not written: a condition no longer holds.
    Conflict,
    /// It is unknown whether it is written.
    Unknown,
}

/// What the job of this member does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Local {
    /// It was started; its cable is out.
    Started,
    /// It reached the cut and is locked; its cable is in.
    Locked(Number),
    /// It is locked, and its cable is out.
    Quiet(Number),
    /// It was dumped and continues; its cable is still out.
    Dumped(Number, Part),
    /// It cannot take part in this snapshot: everything is undone, and the cable is in.
    Refused(Number, String),
    /// The snapshot is undone, and the cable is in.
    Aborted(Number),
    /// It is over, or could not be started. Nothing runs.
    Ended(Ending),
    /// Its part of this group image is stored.
    Stored(Number),
    /// Its part of this group image could not be stored. It may still be in memory.
    NotStored(Number),
    /// Its part of this group image does not exist any more.
    Gone(Number),
    /// Its part of this group image was fetched from the replica.
    Fetched(Number),
    /// The replica has its part of this group image.
    Replicated(Number),
    /// Its part of this group image cannot be sent to the replica.
    NotReplicated(Number),
    /// What snapshots cost here.
    Costs(Costs),
    /// The run is over and everything after it is done; the member stays until the job is queued again.
    Done,
    /// The parts that it can restore: the answer to [`Order::List`].
    Parts(BTreeMap<Number, Progress>),
}

/// An answer of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Something to be written in the coordinator. There is one at a time, until its [`Event::Wrote`].
    Write(Write),
    /// Something to be done on this machine.
    Do(Order),
}

/// A transaction: written if its condition holds, else [`Answer::Conflict`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Creates the member's report, bound to its lease. Condition: there is none of this rank.
    Join(Report),
    /// Changes the report. Condition: the report is from this membership.
    Report(Report),
    /// Takes the lead, bound to the lease. Condition: there is no leader.
    Lead,
    /// Writes the plan. Condition: we lead, and the plan has not changed.
    Plan {
        /// The plan.
        plan: Box<Plan>,
        /// The revision of the one before.
        was: Option<u64>,
        /// A group image, recorded with it.
        image: Option<(Number, GroupImage)>,
    },
    /// Commits a group image, or records it again. Condition: we lead, and its record has not changed.
    Record {
        /// Its number.
        number: Number,
        /// Its record.
        image: GroupImage,
        /// The revision of the one before.
        was: Option<u64>,
    },
    /// Removes the record of a group image that is not kept, and writes the same plan again. The plan then has a new
    /// revision, so only a leader that knows of the removal can write the next plan, which does not use this image.
    /// Condition: we lead, and neither the record nor the plan has changed.
    Remove {
        /// Its number.
        number: Number,
        /// Its revision.
        was: u64,
        /// The plan, which does not need it.
        plan: Box<Versioned<Plan>>,
    },
}

/// What is to be done on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// List the parts that can be restored here. Answer: [`Local::Parts`]. Ordered when no supervisor has the rank:
    /// an earlier list could lack parts that the supervisor before this one stored since.
    List,
    /// Start the job with the cable out. Answer: [`Local::Started`] or [`Local::Ended`].
    Start {
        /// The epoch.
        epoch: Epoch,
        /// The origin of the plan, which is recorded in each part that is taken in this epoch.
        origin: Incarnation,
        /// What the job starts from.
        from: From,
        /// This member's part, if it starts from a group image.
        part: Option<Part>,
    },
    /// Plug the cable in.
    Plug,
    /// Reach the cut and lock the processes, with the cable in. Answer: [`Local::Locked`] or [`Local::Refused`].
    Prepare(Number),
    /// Pull the cable. Answer: [`Local::Quiet`] or [`Local::Refused`].
    Pull(Number),
    /// Dump. Answer: [`Local::Dumped`] or [`Local::Refused`].
    Dump(Number),
    /// Keep the part, store it in the background, and plug the cable in. Answer, later: [`Local::Stored`] or
    /// [`Local::NotStored`].
    Resume(Number),
    /// Undo the snapshot, drop the part, and plug the cable in. Answer: [`Local::Aborted`].
    Abort(Number),
    /// End the job. Answer: [`Local::Ended`].
    Kill,
    /// Keep the part and store it in the background: the job is ended next. The answers are those of `Resume`.
    Store(Number),
    /// Remove the part, which is no longer needed.
    Forget(Number),
    /// Fetch the part from the replica: the job is to be started from it. Answer: [`Local::Fetched`], or [`Local::Gone`]
    /// if it cannot be used.
    Fetch(Number),
    /// Send the part to the replica. Answer: [`Local::Replicated`] or [`Local::NotReplicated`].
    Replicate(Number),
    /// The run is over.
    Finish(End),
}

/// The state of one supervisor.
#[derive(Debug)]
pub struct Machine {
    options: Options,
    view: Arc<View>,
    member: Member,
    /// Of a member that leads.
    leading: Option<Leading>,
    /// A write has no answer yet.
    is_writing: bool,
    /// Decides nothing from a view before this revision: it lacks our own writes.
    since: u64,
    /// Writes nothing before this time, unless the view has another revision by then.
    pause: Option<(Instant, u64)>,
}

/// The pause after a write that was refused or not answered.
const PAUSE: Duration = Duration::from_secs(1);

impl Machine {
    /// A supervisor that has not joined. `epoch` is the last one that ran here.
    #[must_use]
    pub fn new(options: Options, epoch: Epoch) -> Machine {
        Machine {
            member: Member::new(options.rank, epoch),
            options,
            view: Arc::default(),
            leading: None,
            is_writing: false,
            since: 0,
            pause: None,
        }
    }

    /// Group images before `floor` are not used, as [`Machine::floor`] said in an earlier process. If `is_fresh`, the user
    /// wants to start from the beginning.
    #[must_use]
    pub fn starting(mut self, is_fresh: bool, floor: Number) -> Machine {
        self.member.starts(if is_fresh { Fresh::Wanted } else { Fresh::No }, floor);
        self
    }

    /// This member for a coordinator that does not know it: it keeps what it knows of itself, and nothing of the group.
    #[must_use]
    pub fn afresh(&self) -> Machine {
        let mut machine = Machine::new(self.options.clone(), self.member.epoch());
        machine.member.starts(self.member.fresh(), self.member.floor());
        machine
    }

    /// Group images before this one are not used.
    #[must_use]
    pub fn floor(&self) -> Number {
        self.member.floor()
    }

    /// Changes the time between group snapshots, for the case that this member leads.
    pub fn set_interval(&mut self, interval: Option<Duration>) {
        self.options.interval = interval;
    }

    /// The latest request of this member.
    #[must_use]
    pub fn asked(&self) -> Option<&Asked> {
        self.member.asked()
    }

    /// When [`Event::Tick`] is needed.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        // While a write has no answer, nothing is decided: its answer wakes us.
        let decides = self.leads() && !self.is_writing && self.pause.is_none() && self.view.revision >= self.since;
        let leading = self.leading.as_ref().filter(|_| decides).and_then(Leading::deadline);
        let pause = self.pause.map(|(until, _)| until);
        [self.member.deadline(&self.options), leading, pause].into_iter().flatten().min()
    }

    /// The newest state of the coordinator.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The report of this member, as it is or will be written.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        self.member.report(&self.view)
    }

    /// The present membership.
    #[must_use]
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.member.incarnation()
    }

    /// Whether this member leads.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.view.leader.is_some() && self.view.leader == self.member.incarnation()
    }

    /// Handles an event and returns what to do, in order. Events that have no meaning in a state change nothing.
    pub fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut orders = Vec::new();
        match event {
            Event::View(view) if view.revision >= self.view.revision => self.view = view,
            Event::View(_) | Event::Tick => {}
            Event::Session(incarnation) => orders.extend(self.member.joins(incarnation)),
            Event::Sure(until) => self.member.sure(until),
            Event::SessionLost => orders.extend(self.member.loses_session()),
            Event::Wrote(answer) => {
                self.is_writing = false;
                match answer {
                    Answer::Done(revision) => self.since = self.since.max(revision),
                    Answer::Conflict | Answer::Unknown => self.pause = Some((now + PAUSE, self.view.revision)),
                }
            }
            Event::Local(local) => self.member.happened(local),
            Event::Asked(ask) => self.member.asks(ask, &self.view),
        }
        self.member.follow(&self.view, &self.options, now, &mut orders);
        let mut actions = Vec::new();
        actions.extend(orders.into_iter().map(Action::Do));
        self.pause = self.pause.filter(|(until, revision)| now < *until && self.view.revision == *revision);
        if !self.leads() {
            // It may have led before: what it saw then is out of date.
            self.leading = None;
        }
        if !self.is_writing && self.pause.is_none() && self.view.revision >= self.since {
            let write = self.next_write(now);
            self.is_writing = write.is_some();
            actions.extend(write.map(Action::Write));
        }
        actions
    }

    /// The own report first: the leader decides from the reports.
    fn next_write(&mut self, now: Instant) -> Option<Write> {
        let write = self.member.write(&self.view);
        if write.is_some() || !self.member.has_joined(&self.view) {
            return write;
        }
        if self.view.leader.is_none() {
            return Some(Write::Lead);
        }
        if !self.leads() {
            return None;
        }
        self.leading.get_or_insert_default().decide(&self.view, &self.options, now)
    }
}

impl Asked {
    pub(crate) fn after(last: Option<&Asked>, ask: Ask) -> Asked {
        Asked { number: last.map_or(0, |last| last.number) + 1, ask }
    }
}
