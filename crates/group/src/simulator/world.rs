//! The events of a history, in the order of their time.

mod jobs;
mod trouble;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use super::Facts;
use super::coordinator::{Coordinator, TTL};
use super::node::{Node, Piece, Tick, options};
use super::nodes::Nodes;
use super::oracle::{Oracle, Stores};
use super::plants::Plant;
use super::queue::{Happening, Queue, Request};
use crate::events::{Action, Answer, Event, Write};
use crate::ids::{Number, Rank};
use crate::options::{ColdStart, Options};
use crate::requests::{NotDone, Outcome, Pending};
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

pub(super) struct World {
    pub(super) began: Instant,
    pub(super) now: Instant,
    pub(super) random: Random,
    pub(super) faults_until: Instant,
    pub(super) nodes: Nodes,
    pub(super) coordinator: Coordinator,
    pub(super) outside: Outside,
    queue: Queue,
    /// Number of jobs that were started.
    jobs: u64,
    trouble: Trouble,
    users: Users,
    oracle: Oracle,
    record: Record,
    plant: Option<Plant>,
}

/// Faults in progress.
#[derive(Debug, Default)]
struct Trouble {
    /// Messages are late or lost.
    slow: bool,
    /// Machines that refuse snapshots.
    refusing: BTreeSet<usize>,
    /// Machines on which the job does not survive a snapshot.
    fatal: BTreeSet<usize>,
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
    /// `restart.cold-start`.
    cold_start: ColdStart,
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
        (leases_end_early, cold_start): (bool, ColdStart),
        plant: Option<Plant>,
        traced: bool,
    ) -> World {
        let began = *ZERO;
        let mut rate = || 0.98 + 0.0004 * f64::from(u32::try_from(random.below(101)).unwrap_or(0));
        let nodes = Nodes::new((0..size).map(|rank| Node::new(Rank(rank), rate(), began)).collect());
        let shared = random.chance(50).then(BTreeMap::new);
        let mut world = World {
            began,
            now: began,
            random,
            faults_until: began,
            coordinator: Coordinator::new(leases_end_early, plant),
            outside: Outside { shared, replica: None },
            queue: Queue::new(began),
            jobs: 0,
            trouble: Trouble::default(),
            users: Users { cold_start, ..Users::default() },
            oracle: Oracle::new(began, cold_start),
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
        self.queue.push(time, what);
    }

    fn after(&mut self, from: u64, to: u64, what: Happening) {
        let time = self.now + self.random.millis(from, to);
        self.at(time, what);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.record.trace {
            let since = self.now.saturating_duration_since(self.began);
            if trace.len() > 2 * LINES {
                trace.drain(..LINES);
            }
            trace.push(format!("{:9.3} {}", since.as_secs_f64(), text()));
        }
    }

    /// Runs until the job runs after the faults, or the run is over.
    pub(super) fn run(&mut self) -> Result<Facts, String> {
        self.at(self.faults_until, Happening::Resume);
        while let Some((time, what)) = self.queue.pop() {
            self.now = time;
            self.record.facts.events += 1;
            self.note(|| format!("{what:?}"));
            let at = if let Happening::Renew(at, _) = &what { Some(*at) } else { None };
            self.happens(what);
            at.map_or(Ok(()), |at| self.waits_for_a_run(at))?;
            let stores = Stores { shared: self.outside.shared.as_ref(), replica: self.outside.replica.as_ref() };
            let has_changed = self.nodes.look();
            let (nodes, facts) = (&self.nodes, &mut self.record.facts);
            self.oracle.look(self.now, nodes, has_changed, &self.coordinator, stores, facts)?;
            if self.record.facts.events > MOST {
                return Err("there is no end of events".into());
            }
            if self.now > self.faults_until {
                if self.is_settled() && (self.nodes.standing().is_over || !self.is_somebody_waiting()) {
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
        if self.nodes.standing().is_over { Ok(self.record.facts) } else { Err("nothing happens any more".into()) }
    }

    /// A supervisor waits for the next run with a limit. Its clock is up to 2 % wrong, and this looks every 3 s.
    fn waits_for_a_run(&mut self, at: usize) -> Result<(), String> {
        let node = &self.nodes[at];
        let since = node.waits_for_a_run().then(|| node.trouble.waits_since.unwrap_or(self.now));
        if since != node.trouble.waits_since {
            self.nodes[at].trouble.waits_since = since;
        }
        let wait = super::node::options(Rank(0), 2).limits.wait;
        match since.filter(|since| self.now > *since + wait + Duration::from_secs(10)) {
            Some(since) => Err(format!("{} waits for the next run since {:?}", self.nodes[at].rank, self.now - since)),
            None => Ok(()),
        }
    }

    /// Whether a user waits for an answer of a supervisor that can give one.
    fn is_somebody_waiting(&self) -> bool {
        self.users.waiting.iter().any(|(at, process, _)| self.is(*at, *process) && !self.nodes[*at].trouble.replaced)
    }

    fn is_settled(&self) -> bool {
        let standing = self.nodes.standing();
        standing.is_over || standing.all_run || self.oracle.is_right_that_parts_are_missing()
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
        if self.nodes[at].machine.is_some() || self.nodes[at].trouble.replaced || self.nodes.are_over_for_good() {
            return;
        }
        let size = self.nodes.ranks();
        let fresh = self.users.fresh.contains(&self.nodes[at].rank);
        let leases_end_early = self.coordinator.leases_end_early && self.plant != Some(Plant::GoneIsOver);
        let mut options = Options {
            leases_end_early,
            replicates: self.outside.replica.is_some(),
            ..options(self.nodes[at].rank, size)
        };
        if self.plant != Some(Plant::ColdStartIgnored) {
            options.restart.cold_start = self.users.cold_start;
        }
        self.nodes[at].boot(options, fresh);
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
        let (floor, rewound) = (machine.floor(), machine.rewound().cloned());
        if let (true, Some(asked), Some(membership)) = (asks, machine.asked(), machine.incarnation()) {
            self.users.waiting.push((at, process, Pending::new(asked.clone(), membership)));
        }
        (self.nodes[at].kept.floor, self.nodes[at].kept.rewound) = (floor, rewound);
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
            self.plan_tick(at, deadline);
        }
    }

    /// Most events leave the deadline as it is, or move it to a later time.
    fn plan_tick(&mut self, at: usize, deadline: Instant) {
        let (node, now) = (&self.nodes[at], self.now);
        let process = node.process;
        let planned = node.tick.filter(|tick| tick.process == process && tick.at > now);
        // A tick is planned that is not later: it asks again then.
        if planned.is_some_and(|tick| tick.deadline <= deadline) {
            return;
        }
        let when = node.when(deadline).max(now);
        if planned.is_none_or(|tick| when < tick.at) {
            self.nodes[at].tick = Some(Tick { process, deadline, at: when });
            self.at(when, Happening::Tick(at, process));
        }
    }

    /// Answers the users of this machine.
    fn answer_users(&mut self, at: usize) {
        let node = &self.nodes[at];
        let Some(machine) = &node.machine else { return };
        let (membership, process) = (machine.incarnation(), node.process);
        let mut answered = Vec::new();
        self.users.waiting.retain_mut(|(of, by, pending)| {
            if *of != at {
                return true;
            }
            // A client of a supervisor that has died learns that.
            let outcome = match *by == process {
                true => pending.look(machine.view(), membership, machine.asked()),
                false => Outcome::Failed(NotDone::NotAMember),
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
        let is_refused = self.coordinator.full && matches!(request, Request::Grant { .. });
        if self.nodes[at].trouble.cut_off || self.coordinator.away || is_refused {
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
                let answer = match self.nodes[at].trouble.mute {
                    true => Answer::Conflict,
                    false => self.coordinator.write(self.nodes[at].rank, session, *write),
                };
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
}
