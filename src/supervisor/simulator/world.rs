//! The clock, the queue of events, and the loop that delivers each event.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use super::faults::Fault;
use super::model::{End, Ground, Job};
use super::oracle::Oracle;
use super::plants::Plant;
use super::run::Run;
use crate::config::Config;
use rekindle_store::ImageId;
use rekindle_testing::random::Random;

/// An event that is due at some time. Numbers name what it belongs to: if that is over by then, the event is dropped.
#[derive(Debug, Clone, Copy)]
pub(super) enum Happening {
    Fault(Fault),
    /// A life of the job ends.
    Ends {
        life: u32,
        end: End,
        /// It is caused by the job's own work, which a hanging job does not do.
        own: bool,
    },
    /// A parent waits for its child.
    Noticed {
        life: u32,
        pid: i32,
    },
    /// The death of a rank is decided on.
    Decide,
    /// The job's watch sees it work, for the first time since its clocks were started.
    Moves {
        life: u32,
        start: u64,
    },
    /// The job's watch notices that it hangs.
    Hangs {
        life: u32,
    },
    /// A start is over.
    Restored {
        op: u32,
    },
    /// The job is frozen, and the dump is made.
    Dump {
        op: u32,
    },
    /// A snapshot is over.
    Taken {
        op: u32,
    },
    /// An image is written to the store.
    Written {
        op: u32,
    },
    /// The image is synced to the disk.
    Synced {
        image: ImageId,
    },
    Replicated {
        op: u32,
    },
    /// An image that could not be stored is tried again.
    Store,
    /// Tries again to read the images that an end waits for.
    Report,
    /// Checks how much memory is left.
    Look,
    /// A user starts a supervisor.
    Begin,
    /// A temporary fault is over.
    Heal(Fault),
}

struct Entry(Reverse<(Instant, u32)>, Happening);

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.0 == other.0
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

/// One history: the truth, the supervisor in it, and the invariants.
pub(super) struct World {
    pub(super) random: Random,
    pub(super) began: Instant,
    pub(super) now: Instant,
    /// Error of the wall clock in seconds.
    pub(super) skew: i64,
    pub(super) config: &'static Config,
    pub(super) plant: Option<Plant>,
    pub(super) ground: Ground,
    pub(super) job: Option<Job>,
    pub(super) run: Option<Run>,
    pub(super) oracle: Oracle,
    pub(super) fate: Fate,
    agenda: Agenda,
    pub(super) trace: Option<Vec<String>>,
}

/// Properties of the whole history.
#[derive(Default)]
pub(super) struct Fate {
    /// The job is complete at this much work.
    pub(super) total: Option<Duration>,
    /// The watch of the job notices a hang after this time.
    pub(super) watch: Option<Duration>,
    /// Whether faults are over.
    pub(super) calm: Option<Calm>,
    pub(super) over: bool,
}

/// The queue of events.
#[derive(Default)]
struct Agenda {
    queue: BinaryHeap<Entry>,
    /// Number of entries so far, which orders those of the same time.
    numbers: u32,
    /// Number of events that have happened.
    events: u64,
}

/// The state after the faults are over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Calm {
    pub(super) since: Instant,
    /// Whether another run was started since.
    pub(super) begun: bool,
    /// A stop is requested once the job runs.
    pub(super) stop: bool,
}

/// Time limit, once there are no more faults, until the job runs: ten restarts (`restart.max-restarts`) with five
/// minutes between them (`Restart::longest_backoff`), and five attempts on a machine that failed before.
const BOUND: Duration = Duration::from_secs(3 * 3600);
/// More than any history needs.
const MOST_EVENTS: u64 = 20_000;

/// Writes a line of the trace, if one is wanted.
macro_rules! tell {
    ($world:expr, $($text:tt)*) => {
        if $world.trace.is_some() {
            let text = format!($($text)*);
            $world.note(text);
        }
    };
}
pub(super) use tell;

impl World {
    pub(super) fn new(seed: u64, config: &'static Config, plant: Option<Plant>, traced: bool) -> World {
        // Only differences count.
        let began = Instant::now();
        World {
            random: Random::new(seed),
            began,
            now: began,
            skew: 0,
            config,
            plant,
            ground: Ground::default(),
            job: None,
            run: None,
            oracle: Oracle::default(),
            fate: Fate::default(),
            agenda: Agenda::default(),
            trace: traced.then(Vec::new),
        }
    }

    pub(super) fn note(&mut self, text: String) {
        let at = self.now.saturating_duration_since(self.began);
        self.trace.iter_mut().for_each(|trace| trace.push(format!("{:>10.3} s  {text}", at.as_secs_f64())));
    }

    pub(super) fn number(&mut self) -> u32 {
        self.agenda.numbers += 1;
        self.agenda.numbers
    }

    pub(super) fn lineage(&mut self) -> Rc<str> {
        format!("run-{}", self.number()).into()
    }

    /// What the wall clock shows.
    pub(super) fn clock(&self) -> DateTime<Utc> {
        const BEGIN: i64 = 1_795_000_000;
        let passed = TimeDelta::from_std(self.now.saturating_duration_since(self.began)).unwrap_or_default();
        DateTime::from_timestamp(BEGIN + self.skew, 0).unwrap_or_default() + passed
    }

    pub(super) fn at(&mut self, time: Instant, what: Happening) {
        let number = self.number();
        self.agenda.queue.push(Entry(Reverse((time.max(self.now), number)), what));
    }

    pub(super) fn after(&mut self, wait: Duration, what: Happening) {
        self.at(self.now + wait, what);
    }

    /// Whether such an event is in the queue.
    pub(super) fn is_due(&self, which: impl Fn(&Happening) -> bool) -> bool {
        self.agenda.queue.iter().any(|Entry(_, what)| which(what))
    }

    /// Plays the history to its end. Returns the number of events, or the broken invariant.
    pub(super) fn run(&mut self, faults_until: Instant) -> Result<u64, String> {
        loop {
            self.check_proofs();
            self.store_again();
            self.check();
            if let Some(violation) = self.oracle.violation.take() {
                return Err(violation);
            }
            if self.fate.over || self.has_arrived() {
                return Ok(self.agenda.events);
            }
            let next = self.agenda.queue.peek().map(|Entry(Reverse((at, _)), _)| *at);
            let tick = self.next_tick();
            let wake = [next, tick, self.next_proof(), self.next_goal()].into_iter().flatten().min();
            if self.fate.calm.is_none() && wake.is_none_or(|at| at >= faults_until) {
                self.now = faults_until.max(self.now);
                self.calm_down();
                continue;
            }
            if let Some(calm) = self.fate.calm
                && wake.is_none_or(|at| at > calm.since + BOUND)
            {
                let state = self.run.as_ref().map_or("not supervised", |run| run.machine.state().name());
                return Err(format!("{BOUND:?} after the last fault the job does not run: it is {state}"));
            }
            self.agenda.events += 1;
            if self.agenda.events > MOST_EVENTS {
                return Err("it goes round in circles".into());
            }
            let Some(wake) = wake else { return Err("nothing happens any more".into()) };
            self.now = wake.max(self.now);
            if tick.is_some_and(|tick| tick <= self.now) {
                self.tick();
            } else if next.is_some_and(|next| next <= self.now)
                && let Some(Entry(_, what)) = self.agenda.queue.pop()
            {
                self.happen(what);
            }
        }
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Fault(fault) if self.fate.calm.is_none() => self.fault(fault),
            Happening::Fault(_) => {}
            Happening::Ends { life, end, own } => self.life_ends(life, end, own),
            Happening::Noticed { life, pid } => self.death_noticed(life, pid),
            Happening::Decide => self.decide_on_ranks(),
            Happening::Moves { life, start } => self.watch_looks(life, start),
            Happening::Hangs { life } => self.hang_seen(life),
            Happening::Restored { op } => self.start_over(op),
            Happening::Dump { op } => self.dump(op),
            Happening::Taken { op } => self.snapshot_over(op),
            Happening::Written { op } => self.persist_over(op),
            Happening::Synced { image } => self.synced(image),
            Happening::Replicated { op } => self.replicated(op),
            // Before the next event.
            Happening::Store => {}
            Happening::Report => self.report_again(),
            Happening::Look => self.give_memory_back(),
            Happening::Begin => self.begin(),
            Happening::Heal(fault) => self.heal(fault),
        }
    }
}
