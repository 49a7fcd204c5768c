//! The events of a history, in the order of their time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use super::Facts;
use super::coordinator::{Coordinator, TTL};
use super::faults::Fault;
use super::node::{Cable, Job, Node, Piece};
use super::oracle::{Oracle, Stores, newest_whole};
use super::plants::Plant;
use crate::documents::{Ask, End, Ending, Epoch, From, Incarnation, Number, Part, Rank};
use crate::images;
use crate::machine::{Action, Answer, Event, Local, Order, Write};
use crate::requests::{Outcome, Pending};
use rekindle_testing::random::Random;

/// After this time without an answer a supervisor takes the request for lost.
const TIMEOUT: Duration = Duration::from_secs(3);
const RENEW: Duration = Duration::from_secs(3);

/// One time for all histories of a process, because traces are compared.
static ZERO: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Once no more faults happen, the job runs or the run is over within this time.
const SETTLED: Duration = Duration::from_secs(900);

/// More events than any correct history has: without a limit, a mistake could run for ever.
const MOST: u64 = 2_000_000;

/// Number of lines of a trace: the last ones.
const LINES: usize = 20000;

#[derive(Debug, Clone)]
pub(super) enum Happening {
    Fault(Fault),
    /// A fault is over.
    Over(Fault, usize),
    /// A supervisor is started.
    Boot(usize),
    /// Something reaches a supervisor.
    Hears(usize, u64, Event),
    /// The supervisor's deadline.
    Tick(usize, u64),
    Renew(usize, u64),
    /// Something reaches the coordinator.
    Asks(usize, u64, Request),
    /// The coordinator's leases.
    Expiry,
    /// Something of the job is done.
    Done(usize, u64, u64, Step),
    /// Storing is done.
    Stored(usize, u64, Number),
    /// A part is in the replica.
    Sent(usize, u64, Number),
    /// A part is fetched from the replica.
    Fetched(usize, u64, Number),
    Resume,
}

#[derive(Debug, Clone)]
pub(super) enum Request {
    Grant { sent: Instant },
    Renew { sent: Instant, session: Incarnation },
    Write { session: Incarnation, write: Box<Write>, answered: bool },
    Revoke(Incarnation),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Start,
    Lock(Number),
    Pull(Number),
    CableOut,
    Dump(Number),
    Abort(Number),
    Killed,
    /// The job dies of its state.
    Dies,
}

pub(super) struct World {
    pub(super) began: Instant,
    pub(super) now: Instant,
    pub(super) random: Random,
    pub(super) faults_until: Instant,
    size: u32,
    /// One for each rank, then the machines that replaced others.
    pub(super) nodes: Vec<Node>,
    pub(super) coordinator: Coordinator,
    pub(super) outside: Outside,
    queue: Queue,
    trouble: Trouble,
    users: Users,
    oracle: Oracle,
    record: Record,
    plant: Option<Plant>,
}

/// Future events, in the order of their time. Events at the same time have the order in which they were planned.
#[derive(Debug, Default)]
struct Queue {
    events: BTreeMap<(Instant, u64), Happening>,
    sequence: u64,
    /// Number of jobs that were started.
    jobs: u64,
}

/// Faults in progress.
#[derive(Debug, Default)]
struct Trouble {
    /// Messages are late or lost.
    slow: bool,
    /// Machines that refuse snapshots.
    refusing: BTreeSet<usize>,
    /// Parts that cannot be restored.
    rotten: BTreeSet<(Rank, Number)>,
    /// Group images of a state that the job dies of.
    doomed: BTreeSet<Number>,
    /// The present state is bad.
    dooms: bool,
}

/// Parts that outlive a machine, in some histories.
#[derive(Debug, Default)]
pub(super) struct Outside {
    /// In a store that all machines have.
    pub(super) shared: Option<BTreeMap<(Rank, Number), Piece>>,
    /// In the replica.
    pub(super) replica: Option<BTreeMap<(Rank, Number), Piece>>,
}

/// What users have requested.
#[derive(Debug, Default)]
struct Users {
    /// Those that wait for an answer, each with the machine and the process that they asked.
    waiting: Vec<(usize, u64, Pending)>,
    /// The ranks whose supervisors are started with the wish to start from the beginning.
    fresh: BTreeSet<Rank>,
}

/// The trace of the history.
#[derive(Debug, Default)]
struct Record {
    facts: Facts,
    trace: Option<Vec<String>>,
}

impl World {
    pub(super) fn new(
        mut random: Random,
        size: u32,
        leases_end_early: bool,
        plant: Option<Plant>,
        traced: bool,
    ) -> World {
        let began = *ZERO;
        let mut rate = || 0.98 + 0.0004 * f64::from(u32::try_from(random.below(101)).unwrap_or(0));
        let nodes: Vec<Node> = (0..size).map(|rank| Node::new(Rank(rank), rate(), began)).collect();
        let shared = random.chance(50).then(BTreeMap::new);
        let mut world = World {
            began,
            now: began,
            size,
            random,
            faults_until: began,
            coordinator: Coordinator::new(leases_end_early, plant),
            outside: Outside { shared, replica: None },
            queue: Queue::default(),
            trouble: Trouble::default(),
            users: Users::default(),
            oracle: Oracle::new(began),
            record: Record { facts: Facts::default(), trace: traced.then(Vec::new) },
            plant,
            nodes,
        };
        for at in 0..world.nodes.len() {
            let time = world.now + world.random.millis(0, 3000);
            world.at(time, Happening::Boot(at));
        }
        world
    }

    pub(super) fn take_trace(&mut self) -> Vec<String> {
        self.record.trace.take().unwrap_or_default()
    }

    pub(super) fn at(&mut self, time: Instant, what: Happening) {
        self.queue.sequence += 1;
        self.queue.events.insert((time, self.queue.sequence), what);
    }

    fn after(&mut self, from: u64, to: u64, what: Happening) {
        let time = self.now + self.random.millis(from, to);
        self.at(time, what);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        let since = self.now.saturating_duration_since(self.began);
        if let Some(trace) = &mut self.record.trace {
            if trace.len() > 2 * LINES {
                trace.drain(..LINES);
            }
            trace.push(format!("{:9.3} {}", since.as_secs_f64(), text()));
        }
    }

    /// Runs until the job runs after the faults, or the run is over.
    pub(super) fn run(&mut self) -> Result<Facts, String> {
        self.at(self.faults_until, Happening::Resume);
        while let Some(((time, _), what)) = self.queue.events.pop_first() {
            self.now = time;
            self.record.facts.events += 1;
            self.note(|| format!("{what:?}"));
            self.happens(what);
            let stores = Stores { shared: self.outside.shared.as_ref(), replica: self.outside.replica.as_ref() };
            self.oracle.look(self.now, &self.nodes, &self.coordinator, stores, &mut self.record.facts)?;
            if self.record.facts.events > MOST {
                return Err("there is no end of events".into());
            }
            if self.now > self.faults_until {
                if self.is_settled() && (self.is_over() || !self.is_somebody_waiting()) {
                    return Ok(self.record.facts);
                }
                if self.now > self.faults_until + SETTLED {
                    let waiting: Vec<_> =
                        self.users.waiting.iter().map(|(at, _, it)| (*at, it.ask().clone())).collect();
                    let what = "the job does not run again, and the run has not ended, or a user has no answer";
                    return Err(format!("{what}: {waiting:?}"));
                }
            }
        }
        if self.is_over() { Ok(self.record.facts) } else { Err("nothing happens any more".into()) }
    }

    /// Whether a user waits for an answer of a supervisor that can give one.
    fn is_somebody_waiting(&self) -> bool {
        self.users.waiting.iter().any(|(at, process, _)| self.is(*at, *process) && !self.nodes[*at].trouble.replaced)
    }

    fn is_settled(&self) -> bool {
        let runs = |node: &Node| node.job.as_ref().is_some_and(|job| job.cable == Cable::In && !job.killed);
        self.is_over()
            || (0..self.size).all(|rank| self.nodes.iter().any(|node| node.rank == Rank(rank) && runs(node)))
            || self.oracle.is_right_that_parts_are_missing()
    }

    fn is_over(&self) -> bool {
        self.is_over_for_good() && self.nodes.iter().all(|node| node.trouble.replaced || node.machine.is_none())
    }

    /// A supervisor has ended with a result after which the scheduler does not start it again.
    fn is_over_for_good(&self) -> bool {
        self.nodes.iter().any(|node| node.finished.as_ref().is_some_and(|end| !again(end)))
    }

    fn happens(&mut self, what: Happening) {
        let at = match &what {
            Happening::Hears(at, ..) | Happening::Tick(at, _) | Happening::Renew(at, _) => Some(*at),
            Happening::Done(at, ..) | Happening::Stored(at, ..) => Some(*at),
            Happening::Sent(at, ..) | Happening::Fetched(at, ..) => Some(*at),
            _ => None,
        };
        // A paused machine does this later, in the same order.
        if let Some(until) = at.and_then(|at| self.nodes[at].trouble.paused_until.filter(|until| self.now <= *until)) {
            self.at(until, what);
            return;
        }
        match what {
            Happening::Fault(fault) => self.fault(fault),
            Happening::Over(fault, at) => self.over(fault, at),
            Happening::Boot(at) => self.boot(at),
            Happening::Hears(at, process, event) if self.is(at, process) => self.hears(at, event),
            Happening::Tick(at, process) if self.is(at, process) => self.hears(at, Event::Tick),
            Happening::Renew(at, process) if self.is(at, process) => self.renew(at),
            Happening::Asks(at, process, request) => self.asks(at, process, request),
            Happening::Expiry => {
                if self.coordinator.expire(self.now) {
                    self.changed();
                }
                self.watch_leases();
            }
            Happening::Done(at, process, job, step) if self.is(at, process) => self.done(at, job, step),
            Happening::Stored(at, process, number) if self.is(at, process) => self.stored(at, number),
            Happening::Sent(at, process, number) if self.is(at, process) => self.sent(at, number),
            Happening::Fetched(at, process, number) if self.is(at, process) => self.fetched(at, number),
            Happening::Resume => self.everything_is_well_again(),
            _ => {}
        }
    }

    fn is(&self, at: usize, process: u64) -> bool {
        self.nodes[at].machine.is_some() && self.nodes[at].process == process
    }

    // ---- supervisors ----

    fn boot(&mut self, at: usize) {
        if self.nodes[at].machine.is_some() || self.nodes[at].trouble.replaced || self.is_over_for_good() {
            return;
        }
        let size = self.size;
        let fresh = self.users.fresh.contains(&self.nodes[at].rank);
        let leases_end_early = self.coordinator.leases_end_early && self.plant != Some(Plant::GoneIsOver);
        self.nodes[at].boot(size, leases_end_early, self.outside.replica.is_some(), fresh);
        self.grant(at);
        self.show(at);
    }

    fn grant(&mut self, at: usize) {
        let sent = self.nodes[at].clock(self.now);
        self.send(at, Request::Grant { sent });
    }

    fn renew(&mut self, at: usize) {
        let node = &self.nodes[at];
        let (process, sent) = (node.process, node.clock(self.now));
        match node.session {
            Some(session) => self.send(at, Request::Renew { sent, session }),
            None => self.send(at, Request::Grant { sent }),
        }
        let next = self.now + RENEW;
        self.at(next, Happening::Renew(at, process));
    }

    fn send(&mut self, at: usize, request: Request) {
        let process = self.nodes[at].process;
        let late = self.trouble.slow && self.random.chance(30);
        let (from, to) = if late { (500, 4000) } else { (1, 15) };
        self.after(from, to, Happening::Asks(at, process, request));
    }

    fn answer(&mut self, at: usize, process: u64, event: Event) {
        let late = self.trouble.slow && self.random.chance(30);
        let (from, to) = if late { (500, 4000) } else { (1, 15) };
        self.after(from, to, Happening::Hears(at, process, event));
    }

    fn hears(&mut self, at: usize, event: Event) {
        if self.nodes[at].trouble.cut_off && matches!(event, Event::View(_)) {
            return;
        }
        match &event {
            Event::Session(session) => {
                if self.nodes[at].session.is_some() {
                    return;
                }
                self.nodes[at].session = Some(*session);
                if self.nodes[at].fresh {
                    self.oracle.joins_fresh(*session);
                }
                let process = self.nodes[at].process;
                self.after(1000, 3000, Happening::Renew(at, process));
            }
            Event::SessionLost => self.nodes[at].session = None,
            _ => {}
        }
        let event = match event {
            Event::Sure(until) if self.plant == Some(Plant::LostFence) => {
                Event::Sure(until + Duration::from_secs(3600))
            }
            Event::Sure(_) if self.plant == Some(Plant::LeaseFromTheAnswer) => {
                Event::Sure(self.nodes[at].clock(self.now) + TTL + super::node::options(Rank(0), 2).fence)
            }
            event => event,
        };
        let is_new = matches!(event, Event::Session(_));
        self.step(at, event);
        if is_new {
            self.show(at);
        }
    }

    fn step(&mut self, at: usize, event: Event) {
        let now = self.nodes[at].clock(self.now);
        let process = self.nodes[at].process;
        let Some(machine) = &mut self.nodes[at].machine else { return };
        let (asks, looks) = (matches!(event, Event::Asked(_)), matches!(event, Event::View(_) | Event::SessionLost));
        let actions = machine.step(event, now);
        let deadline = machine.deadline();
        let floor = machine.floor();
        if let (true, Some(asked), Some(report)) = (asks, machine.asked(), machine.report()) {
            self.users.waiting.push((at, process, Pending::new(asked.clone(), report.incarnation)));
        }
        self.nodes[at].kept.floor = floor;
        if looks {
            self.answer_users(at);
        }
        for action in actions {
            self.note(|| format!("    {at} {action:?}"));
            match action {
                Action::Write(write) => self.write(at, Box::new(write)),
                Action::Do(order) => self.obey(at, order),
            }
        }
        if let (Some(deadline), true) = (deadline, self.is(at, process)) {
            let when = self.nodes[at].when(deadline).max(self.now);
            let node = &mut self.nodes[at];
            // An earlier tick is planned: it asks again then.
            if node.tick.is_none_or(|(of, at)| of != process || at <= self.now || when < at) {
                node.tick = Some((process, when));
                self.at(when, Happening::Tick(at, process));
            }
        }
    }

    /// Answers the users of this machine.
    fn answer_users(&mut self, at: usize) {
        let node = &self.nodes[at];
        let Some(machine) = &node.machine else { return };
        let (membership, process) = (machine.report().map(|report| report.incarnation), node.process);
        let mut answered = Vec::new();
        self.users.waiting.retain_mut(|(of, by, pending)| {
            if *of != at {
                return true;
            }
            // A client of a supervisor that has died learns that.
            let outcome = match *by == process {
                true => pending.look(machine.view(), membership, machine.asked()),
                false => Outcome::Failed { why: "the supervisor has ended".into() },
            };
            if outcome != Outcome::Open {
                answered.push((pending.ask().clone(), outcome.clone()));
            }
            outcome == Outcome::Open
        });
        for (ask, outcome) in answered {
            self.record.facts.answered += u64::from(outcome == Outcome::Done);
            self.oracle.answers(&ask, &outcome, &self.nodes[at]);
            self.note(|| format!("    {at} {ask:?}: {outcome:?}"));
        }
    }

    fn write(&mut self, at: usize, write: Box<Write>) {
        let Some(session) = self.nodes[at].session else {
            let process = self.nodes[at].process;
            self.after(1, 5, Happening::Hears(at, process, Event::Wrote(Answer::Conflict)));
            return;
        };
        // Sometimes it is carried out after the supervisor has given up waiting.
        let lost = self.trouble.slow && self.random.chance(20);
        if lost {
            let process = self.nodes[at].process;
            if self.random.chance(50) {
                self.after(
                    2000,
                    8000,
                    Happening::Asks(at, process, Request::Write { session, write, answered: false }),
                );
            }
            self.at(self.now + TIMEOUT, Happening::Hears(at, process, Event::Wrote(Answer::Unknown)));
        } else {
            self.send(at, Request::Write { session, write, answered: true });
        }
    }

    // ---- the coordinator ----

    fn asks(&mut self, at: usize, process: u64, request: Request) {
        if self.nodes[at].trouble.cut_off || self.coordinator.away {
            match request {
                Request::Write { answered: true, .. } => {
                    self.at(self.now + TIMEOUT, Happening::Hears(at, process, Event::Wrote(Answer::Unknown)));
                }
                Request::Grant { .. } if self.is(at, process) && self.nodes[at].session.is_none() => {
                    // Asked for again.
                    let sent = self.nodes[at].clock(self.now);
                    let again = self.now + TIMEOUT;
                    self.at(again, Happening::Asks(at, process, Request::Grant { sent }));
                }
                _ => {}
            }
            return;
        }
        match request {
            Request::Grant { sent } => {
                if !self.is(at, process) || self.nodes[at].session.is_some() {
                    return;
                }
                let session = self.coordinator.grant(self.now);
                let time = self.now + self.random.millis(1, 15);
                self.at(time, Happening::Hears(at, process, Event::Session(session)));
                self.at(time, Happening::Hears(at, process, Event::Sure(sent + TTL)));
                self.watch_leases();
            }
            Request::Renew { sent, session } => {
                let lives = self.coordinator.renew(session, self.now);
                if self.nodes[at].session == Some(session) {
                    self.answer(at, process, if lives { Event::Sure(sent + TTL) } else { Event::SessionLost });
                }
                self.watch_leases();
            }
            Request::Write { session, write, answered } => {
                let answer = self.coordinator.write(self.nodes[at].rank, session, *write);
                if answered {
                    self.answer(at, process, Event::Wrote(answer));
                }
                if matches!(answer, Answer::Done(_)) {
                    self.changed();
                }
            }
            Request::Revoke(session) => {
                self.coordinator.revoke(session);
                self.changed();
            }
        }
    }

    fn watch_leases(&mut self) {
        if let Some(at) = self.coordinator.next_expiry() {
            // etcd is never early, and sometimes late.
            let at = at.max(self.now) + self.random.millis(1, 800);
            self.at(at, Happening::Expiry);
        }
    }

    fn changed(&mut self) {
        for at in 0..self.nodes.len() {
            self.show(at);
        }
    }

    /// Sends the present state to a supervisor.
    fn show(&mut self, at: usize) {
        let node = &self.nodes[at];
        if node.machine.is_none() || node.trouble.cut_off {
            return;
        }
        let process = node.process;
        let late = self.trouble.slow && self.random.chance(20);
        let delay = if late { self.random.millis(200, 3000) } else { self.random.millis(1, 15) };
        let time = (self.now + delay).max(self.nodes[at].last_view);
        self.nodes[at].last_view = time;
        let view = Arc::clone(&self.coordinator.view);
        self.at(time, Happening::Hears(at, process, Event::View(view)));
    }

    // ---- jobs ----

    fn obey(&mut self, at: usize, order: Order) {
        let now = self.now;
        match order {
            Order::List => {
                // The store is shared: it has what the previous machine stored.
                if let Some(shared) = &self.outside.shared {
                    let rank = self.nodes[at].rank;
                    let ours = shared.iter().filter(|((of, _), _)| *of == rank);
                    self.nodes[at].images.disk = ours.map(|((_, number), piece)| (*number, piece.clone())).collect();
                }
                let (process, parts) = (self.nodes[at].process, self.nodes[at].parts(self.outside.replica.as_ref()));
                self.after(1, 100, Happening::Hears(at, process, Event::Local(Local::Parts(parts))));
            }
            Order::Start { epoch, origin, from, part } => {
                self.queue.jobs += 1;
                let id = self.queue.jobs;
                let newest = self.nodes[at]
                    .images
                    .disk
                    .iter()
                    .chain(&self.nodes[at].images.memory)
                    .max_by_key(|(number, _)| **number);
                let from = match (from, part) {
                    (From::Image(_), _) if self.plant == Some(Plant::MixedParts) => {
                        newest.map(|(number, piece)| (*number, piece.part.clone()))
                    }
                    (From::Image(number), Some(part)) => Some((number, part)),
                    _ => None,
                };
                let cable = Cable::Out(now);
                let job = Job { id, epoch, origin, from, cable, snapshot: None, killed: false };
                self.nodes[at].job = Some(job);
                self.nodes[at].kept.epoch = epoch;
                self.job_step(at, 100, 3000, Step::Start);
            }
            Order::Plug => self.plug(at, None),
            Order::Prepare(number) => {
                self.nodes[at].job.iter_mut().for_each(|job| job.snapshot = Some(number));
                self.job_step(at, 5, 2000, Step::Lock(number));
            }
            Order::Pull(number) => {
                self.job_step(at, 1, 50, Step::Pull(number));
                if self.plant == Some(Plant::CableOutTooLate) {
                    self.job_step(at, 200, 1500, Step::CableOut);
                }
            }
            Order::Dump(number) => self.job_step(at, 100, 2500, Step::Dump(number)),
            Order::Resume(number) => {
                self.plug(at, Some(number));
                self.store(at, number);
            }
            Order::Store(number) => self.store(at, number),
            Order::Abort(number) => {
                if self.plant != Some(Plant::LostAbort) {
                    self.nodes[at].job.iter_mut().for_each(|job| job.snapshot = None);
                    self.job_step(at, 0, 500, Step::Abort(number));
                }
            }
            Order::Kill => {
                self.nodes[at].job.iter_mut().for_each(|job| job.killed = true);
                self.job_step(at, 0, 1000, Step::Killed);
            }
            Order::Forget(number) => {
                self.oracle.forgets(self.nodes[at].rank, number);
                self.remove(at, number);
            }
            Order::Finish(end) => self.finish(at, end),
            Order::Fetch(number) => {
                let process = self.nodes[at].process;
                self.after(200, 6000, Happening::Fetched(at, process, number));
            }
            Order::Replicate(number) => {
                let process = self.nodes[at].process;
                self.after(200, 25_000, Happening::Sent(at, process, number));
            }
        }
    }

    fn fetched(&mut self, at: usize, number: Number) {
        let rank = self.nodes[at].rank;
        let piece = self.outside.replica.as_ref().and_then(|replica| replica.get(&(rank, number))).cloned();
        let local = match piece {
            Some(piece) => {
                if let Some(shared) = &mut self.outside.shared {
                    shared.insert((rank, number), piece.clone());
                }
                self.nodes[at].images.disk.insert(number, piece);
                Local::Fetched(number)
            }
            None => Local::Gone(number),
        };
        self.hears(at, Event::Local(local));
    }

    fn sent(&mut self, at: usize, number: Number) {
        let local = match self.send_part(at, number) {
            true => Local::Replicated(number),
            false => Local::NotReplicated(number),
        };
        self.hears(at, Event::Local(local));
    }

    /// Puts a part into the replica. What the replica has then of older ones is limited, as in the product: the newest
    /// whole one stays, and all that are newer.
    fn send_part(&mut self, at: usize, number: Number) -> bool {
        let (node, rank) = (&self.nodes[at], self.nodes[at].rank);
        let mine = node.images.disk.get(&number);
        let mine = if self.plant == Some(Plant::SendsItsNewest) { node.images.disk.values().next_back() } else { mine };
        let Some(piece) = mine.cloned() else { return false };
        let size = self.size;
        let whole = node.machine.as_ref().and_then(|machine| images::whole_in_replica(machine.view()));
        let Some(replica) = &mut self.outside.replica else { return false };
        replica.insert((rank, number), piece);
        let newest = newest_whole(replica, size);
        let oldest = if self.plant == Some(Plant::ReplicaForgetsWhole) { Some(number) } else { whole };
        replica.retain(|(of, other), _| *of != rank || oldest.is_none_or(|oldest| *other >= oldest));
        if newest > newest_whole(replica, size) {
            self.oracle.breaks(format!("{rank} removed its part of {newest:?}, the newest whole one in the replica"));
        }
        true
    }

    fn remove(&mut self, at: usize, number: Number) {
        let rank = self.nodes[at].rank;
        self.nodes[at].images.memory.remove(&number);
        self.nodes[at].images.disk.remove(&number);
        self.outside.shared.iter_mut().for_each(|shared| drop(shared.remove(&(rank, number))));
    }

    fn finish(&mut self, at: usize, end: End) {
        self.oracle.finishes(&end);
        if let Some(session) = self.nodes[at].session.take() {
            self.send(at, Request::Revoke(session));
        }
        // The last image is sent after the end, in whatever order.
        let view = self.nodes[at].machine.as_ref().map(|machine| machine.view().clone()).unwrap_or_default();
        if let Some(last) = images::newest_committed(&view)
            .filter(|_| end != End::Completed && self.outside.replica.is_some() && self.random.chance(70))
        {
            self.send_part(at, last);
        }
        self.nodes[at].machine = None;
        if matches!(end, End::Refused { .. }) {
            let rank = self.nodes[at].rank;
            self.users.fresh.remove(&rank);
        }
        if again(&end) {
            self.after(3000, 20_000, Happening::Boot(at));
        }
        self.nodes[at].finished = Some(end);
    }

    fn job_step(&mut self, at: usize, from: u64, to: u64, step: Step) {
        let (process, job) = (self.nodes[at].process, self.nodes[at].job.as_ref().map_or(0, |job| job.id));
        self.after(from, to, Happening::Done(at, process, job, step));
    }

    fn plug(&mut self, at: usize, number: Option<Number>) {
        let rank = self.nodes[at].rank;
        if let Some(job) = &mut self.nodes[at].job {
            job.cable = Cable::In;
            self.oracle.plugs(rank, self.now);
        }
        if let Some(number) = number
            && self.plant == Some(Plant::EagerRemoval)
        {
            let older: Vec<Number> = self.nodes[at].images.disk.keys().copied().filter(|it| *it < number).collect();
            for number in older {
                self.oracle.forgets(rank, number);
                self.remove(at, number);
            }
        }
    }

    fn store(&mut self, at: usize, number: Number) {
        if let Some(piece) = self.nodes[at].images.memory.get_mut(&number) {
            piece.recorded = true;
        }
        let process = self.nodes[at].process;
        if self.plant == Some(Plant::CommitBeforeStored) {
            self.after(1, 10, Happening::Hears(at, process, Event::Local(Local::Stored(number))));
        } else {
            self.after(500, 8000, Happening::Stored(at, process, number));
        }
    }

    fn stored(&mut self, at: usize, number: Number) {
        let rank = self.nodes[at].rank;
        let piece = self.nodes[at].images.memory.get(&number).cloned();
        let local = match piece {
            Some(piece) if !self.nodes[at].images.disk_full => {
                self.oracle.stored(rank, number, &piece.part);
                if let Some(shared) = &mut self.outside.shared {
                    shared.insert((rank, number), piece.clone());
                }
                self.nodes[at].images.disk.insert(number, piece);
                self.nodes[at].images.memory.remove(&number);
                Local::Stored(number)
            }
            _ => Local::NotStored(number),
        };
        self.hears(at, Event::Local(local));
    }

    fn done(&mut self, at: usize, id: u64, step: Step) {
        let rank = self.nodes[at].rank;
        if step == Step::Killed {
            // It may have ended by itself.
            if self.nodes[at].job.as_ref().is_none_or(|job| job.id == id) {
                self.nodes[at].job = None;
                self.hears(at, Event::Local(Local::Ended(Ending::Failed { why: "killed".into(), last: None })));
            }
            return;
        }
        let Some(job) = self.nodes[at].job.as_mut().filter(|job| job.id == id && !job.killed) else { return };
        let (epoch, origin) = (job.epoch, job.origin);
        match step {
            Step::Start => self.started(at),
            Step::Lock(number) if job.snapshot == Some(number) => {
                let local = if self.trouble.refusing.contains(&at) && self.random.chance(60) {
                    Local::Refused(number, "it does not come to rest".into())
                } else {
                    self.oracle.locks(number, &self.nodes[at]);
                    if self.plant == Some(Plant::CableOutBeforeLocked) {
                        self.unplug(at);
                    }
                    Local::Locked(number)
                };
                self.hears(at, Event::Local(local));
            }
            Step::Pull(number) if job.snapshot == Some(number) => {
                let local = if self.trouble.refusing.contains(&at) && self.random.chance(30) {
                    self.plug(at, None);
                    Local::Refused(number, "its cable is stuck".into())
                } else {
                    if self.plant != Some(Plant::CableOutTooLate) {
                        self.unplug(at);
                    }
                    Local::Quiet(number)
                };
                self.hears(at, Event::Local(local));
            }
            Step::CableOut if job.snapshot.is_some() => self.unplug(at),
            Step::Dump(number) if job.snapshot == Some(number) => {
                let full = self.nodes[at].images.memory.values().filter(|piece| piece.recorded).count() > 1;
                if full || (self.trouble.refusing.contains(&at) && self.random.chance(50)) {
                    self.plug(at, None);
                    self.hears(at, Event::Local(Local::Refused(number, "no memory".into())));
                    return;
                }
                let digest = format!("{} {} {id}", number.0, epoch.0);
                let part = Part { image: format!("{rank}-{}", number.0), digest };
                let piece = Piece { part: part.clone(), epoch, origin, recorded: false };
                self.nodes[at].images.memory.insert(number, piece);
                self.oracle.dumps(number, &part, &self.nodes[at], self.now);
                if self.trouble.dooms {
                    self.trouble.doomed.insert(number);
                }
                if self.plant == Some(Plant::CableInTooEarly) {
                    self.plug(at, None);
                }
                self.hears(at, Event::Local(Local::Dumped(number, part)));
            }
            Step::Abort(number) => {
                self.nodes[at].images.memory.remove(&number);
                self.plug(at, None);
                self.hears(at, Event::Local(Local::Aborted(number)));
            }
            Step::Dies => self.job_dies(at, "it dies of its state"),
            _ => {}
        }
    }

    fn unplug(&mut self, at: usize) {
        if let Some(job) = &mut self.nodes[at].job {
            job.cable = Cable::Out(self.now);
        }
        self.oracle.unplugs(self.size, &self.nodes[at]);
    }

    fn started(&mut self, at: usize) {
        let rank = self.nodes[at].rank;
        let from = self.nodes[at].job.as_ref().and_then(|job| job.from.clone());
        let broken = match &from {
            Some((number, part)) if self.nodes[at].piece(*number).is_none_or(|piece| piece.part != *part) => {
                Some("its part is not there")
            }
            Some((number, _)) if self.trouble.rotten.contains(&(rank, *number)) => Some("its part cannot be restored"),
            _ => None,
        };
        if let Some(why) = broken {
            self.nodes[at].job = None;
            self.oracle.job_fails();
            self.hears(at, Event::Local(Local::Ended(Ending::NotStarted { why: why.into() })));
            return;
        }
        match from {
            Some((number, _)) if self.trouble.doomed.contains(&number) => self.job_step(at, 4000, 8000, Step::Dies),
            _ => self.trouble.dooms = false,
        }
        self.hears(at, Event::Local(Local::Started));
    }

    fn job_dies(&mut self, at: usize, why: &str) {
        if self.nodes[at].job.as_ref().is_some_and(|job| !job.killed) {
            self.nodes[at].job = None;
            self.oracle.job_fails();
            self.hears(at, Event::Local(Local::Ended(Ending::Failed { why: why.into(), last: None })));
        }
    }

    // ---- faults ----

    fn some(&mut self) -> usize {
        usize::try_from(self.random.below(self.nodes.len() as u64)).unwrap_or_default()
    }

    fn supervisor_dies(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        (node.machine, node.job, node.session) = (None, None, None);
        node.finished = None;
        self.after(1500, 15_000, Happening::Boot(at));
    }

    fn fault(&mut self, fault: Fault) {
        let at = self.some();
        let long = self.random.millis(500, 25_000);
        let (until, requeue) = (self.now + long, long.as_millis().is_multiple_of(2));
        if fault.delays() {
            self.oracle.disturbed(until);
        }
        let is_there = self.nodes[at].machine.is_some();
        let process = self.nodes[at].process;
        let ask = |world: &mut World, ask: Ask| world.at(world.now, Happening::Hears(at, process, Event::Asked(ask)));
        match fault {
            Fault::JobDies if !self.nodes[at].is_paused(self.now) => self.job_dies(at, "killed by signal 9"),
            Fault::Completed => {
                let runs = |node: &Node| node.job.as_ref().is_some_and(|job| job.cable == Cable::In && !job.killed);
                let members: Vec<usize> =
                    (0..self.nodes.len()).filter(|at| !self.nodes[*at].trouble.replaced).collect();
                if members.iter().all(|at| runs(&self.nodes[*at]) && !self.nodes[*at].is_paused(self.now)) {
                    self.oracle.completes(&self.nodes);
                    for at in members {
                        self.nodes[at].job = None;
                        self.hears(at, Event::Local(Local::Ended(Ending::Completed)));
                    }
                }
            }
            Fault::SupervisorDies if is_there => self.supervisor_dies(at),
            Fault::MachineDies if is_there => {
                self.nodes[at].images.memory.clear();
                self.oracle.loses_memory();
                self.supervisor_dies(at);
            }
            Fault::MachineReplaced if is_there => {
                self.nodes[at].images.memory.clear();
                self.oracle.loses_memory();
                self.nodes[at].images.disk.clear();
                self.nodes[at].kept.epoch = Epoch::default();
                if self.outside.shared.is_none() {
                    self.nodes[at].kept.floor = Number::default();
                    self.oracle.loses_disk();
                }
                self.supervisor_dies(at);
            }
            Fault::AllReplaced => {
                for at in 0..self.nodes.len() {
                    self.nodes[at].images.memory.clear();
                    self.nodes[at].images.disk.clear();
                    self.outside.shared.iter_mut().for_each(BTreeMap::clear);
                    (self.nodes[at].kept.epoch, self.nodes[at].kept.floor) = (Epoch::default(), Number::default());
                    if self.nodes[at].machine.is_some() {
                        self.supervisor_dies(at);
                    }
                }
                self.oracle.loses_memory();
                self.oracle.loses_disk();
            }
            Fault::Pause => {
                self.nodes[at].trouble.paused_until = Some(until);
                self.at(until, Happening::Over(fault, at));
            }
            Fault::CutOff => {
                self.nodes[at].trouble.cut_off = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::CutOffAndReplaced
                if is_there && !self.nodes[at].trouble.cut_off && !self.nodes[at].trouble.replaced =>
            {
                self.nodes[at].trouble.cut_off = true;
                self.nodes[at].trouble.replaced = true;
                self.at(until, Happening::Over(fault, at));
                let rate = 0.98 + 0.0004 * f64::from(u32::try_from(self.random.below(101)).unwrap_or(0));
                self.nodes.push(Node::new(self.nodes[at].rank, rate, self.began));
                self.oracle.loses_memory();
                if self.outside.shared.is_none() {
                    self.oracle.loses_disk();
                }
                self.after(1000, 10_000, Happening::Boot(self.nodes.len() - 1));
            }
            Fault::Away => {
                self.coordinator.away = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::LeaseEndsEarly => {
                self.coordinator.ends_early(at);
                self.changed();
            }
            Fault::CoordinatorForgets => {
                self.coordinator.forget();
                self.oracle.loses_records();
                self.changed();
            }
            Fault::SlowNetwork => {
                self.trouble.slow = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::DiskFull => {
                self.nodes[at].images.disk_full = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::Refuses => {
                self.trouble.refusing.insert(at);
                self.at(until, Happening::Over(fault, at));
            }
            Fault::Rotten => {
                let newest = self.coordinator.view.images.keys().next_back().copied();
                let rank = self.nodes[at].rank;
                self.trouble.rotten.extend(newest.map(|number| (rank, number)));
            }
            Fault::Doomed => {
                self.trouble.dooms = true;
                self.job_dies_soon(at);
            }
            Fault::Snapshot => ask(self, Ask::Snapshot),
            Fault::Stop => ask(self, Ask::Stop { requeue, within: long }),
            Fault::StopNow => ask(self, Ask::StopNow { requeue }),
            Fault::Suspend => ask(self, Ask::Suspend),
            Fault::Resume => ask(self, Ask::Resume),
            Fault::FreshRun => {
                self.users.fresh = self.nodes.iter().map(|node| node.rank).collect();
                ask(self, Ask::StopNow { requeue: true });
            }
            Fault::Rewind => {
                if let Some(number) = self.coordinator.view.images.keys().next().copied() {
                    self.oracle.rewinds();
                    ask(self, Ask::Rewind(number));
                }
            }
            _ => {}
        }
    }

    fn job_dies_soon(&mut self, at: usize) {
        if self.nodes[at].job.is_some() {
            self.job_step(at, 4000, 20_000, Step::Dies);
        }
    }

    fn over(&mut self, fault: Fault, at: usize) {
        self.oracle.disturbed(self.now);
        match fault {
            Fault::Pause => {
                self.nodes[at].trouble.paused_until = None;
                // After a pause a supervisor first looks at the time. Its job was paused too, and is killed before it
                // does anything.
                self.step(at, Event::Tick);
                if self.nodes[at].job.as_ref().is_some_and(|job| job.killed) {
                    self.nodes[at].job = None;
                    self.hears(at, Event::Local(Local::Ended(Ending::Failed { why: "killed".into(), last: None })));
                }
            }
            Fault::CutOff | Fault::CutOffAndReplaced => {
                self.nodes[at].trouble.cut_off = false;
                self.show(at);
            }
            Fault::Away => {
                self.coordinator.is_back(self.now);
                self.watch_leases();
            }
            Fault::SlowNetwork => self.trouble.slow = false,
            Fault::DiskFull => self.nodes[at].images.disk_full = false,
            Fault::Refuses => drop(self.trouble.refusing.remove(&at)),
            _ => {}
        }
    }

    /// No more faults: a suspended job is resumed, through a supervisor that is there.
    fn everything_is_well_again(&mut self) {
        let there: Vec<_> = (0..self.nodes.len()).filter(|at| self.nodes[*at].machine.is_some()).collect();
        let one = self.some();
        if let Some(&at) = there.get(one % there.len().max(1)) {
            let process = self.nodes[at].process;
            self.at(self.now, Happening::Hears(at, process, Event::Asked(Ask::Resume)));
        }
        if self.now < self.faults_until + SETTLED {
            self.at(self.now + Duration::from_secs(20), Happening::Resume);
        }
    }
}

/// Whether the scheduler starts it again.
fn again(end: &End) -> bool {
    matches!(end, End::Missing { .. } | End::Stopped { requeue: true } | End::Refused { .. })
}
