//! A model of one machine: its clock, its supervisor, its job with the cable, its images.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::documents::{End, Goal, Part, Progress, Replicated, Rewound, Stored};
use crate::ids::{Epoch, Incarnation, Number, Rank};
use crate::machine::Machine;
use crate::options::{ColdStart, Limits, Options, Restart};

/// One part, with facts that only the simulator knows.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) part: Part,
    pub(super) epoch: Epoch,
    pub(super) origin: Incarnation,
    /// The group image was recorded: a new supervisor counts this as a part.
    pub(super) recorded: bool,
}

/// The job on one machine.
#[derive(Debug)]
pub(super) struct Job {
    /// Another one for each start. `epoch`, `origin` and `from` never change: see [`super::nodes::Nodes`].
    pub(super) id: u64,
    pub(super) epoch: Epoch,
    pub(super) origin: Incarnation,
    /// The group image that it was restored from.
    pub(super) from: Option<(Number, Part)>,
    pub(super) cable: Cable,
    /// The snapshot in progress: late steps of an earlier one do nothing.
    pub(super) snapshot: Option<Number>,
    pub(super) killed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cable {
    In,
    /// Since then.
    Out(Instant),
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) rank: Rank,
    /// Its clock runs at this speed.
    rate: f64,
    zero: Instant,
    /// The supervisor: a number for each of its processes.
    pub(super) process: u64,
    pub(super) machine: Option<Machine>,
    pub(super) session: Option<Incarnation>,
    pub(super) trouble: Trouble,
    pub(super) images: Images,
    pub(super) job: Option<Job>,
    pub(super) kept: Kept,
    /// Whether its supervisor was told to start from the beginning.
    pub(super) fresh: bool,
    /// The next tick of this supervisor.
    pub(super) tick: Option<Tick>,
    /// Views arrive in order.
    pub(super) last_view: Instant,
    /// How its last supervisor ended.
    pub(super) finished: Option<End>,
}

/// A tick that was planned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tick {
    /// Of this supervisor.
    pub(super) process: u64,
    /// The supervisor's deadline, on its own clock.
    pub(super) deadline: Instant,
    pub(super) at: Instant,
}

/// What a machine remembers on its disk.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The last epoch that ran here.
    pub(super) epoch: Epoch,
    /// Group images before this one are not used.
    pub(super) floor: Number,
    /// What rewinds have abandoned.
    pub(super) rewound: Option<Rewound>,
}

/// A machine's faults.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    pub(super) paused_until: Option<Instant>,
    pub(super) cut_off: bool,
    /// Another machine has taken its place, although this one still runs.
    pub(super) replaced: bool,
    /// A job that was killed does not end before.
    pub(super) stuck_until: Option<Instant>,
    /// The coordinator refuses what it writes.
    pub(super) mute: bool,
    /// It cannot start the job.
    pub(super) hindered: bool,
    /// Since when it waits for the next run, as it has seen.
    pub(super) waits_since: Option<Instant>,
}

/// The parts on a machine.
#[derive(Debug, Default)]
pub(super) struct Images {
    pub(super) memory: BTreeMap<Number, Piece>,
    pub(super) disk: BTreeMap<Number, Piece>,
    pub(super) disk_full: bool,
}

impl Node {
    pub(super) fn new(rank: Rank, rate: f64, zero: Instant) -> Node {
        Node {
            rank,
            rate,
            zero,
            process: 0,
            machine: None,
            session: None,
            trouble: Trouble::default(),
            images: Images::default(),
            job: None,
            kept: Kept::default(),
            fresh: false,
            tick: None,
            last_view: zero,
            finished: None,
        }
    }

    /// The time on its own clock.
    pub(super) fn clock(&self, now: Instant) -> Instant {
        self.zero + now.saturating_duration_since(self.zero).mul_f64(self.rate)
    }

    /// The time at which its own clock shows this.
    pub(super) fn when(&self, clock: Instant) -> Instant {
        self.zero + clock.saturating_duration_since(self.zero).div_f64(self.rate) + Duration::from_micros(1)
    }

    /// Its supervisor starts.
    pub(super) fn boot(&mut self, options: Options, fresh: bool) {
        self.process += 1;
        self.fresh = fresh;
        self.finished = None;
        self.session = None;
        self.images.memory.retain(|_, piece| piece.recorded);
        let machine = Machine::new(options, self.kept.epoch);
        self.machine = Some(machine.starting(fresh, self.kept.floor).remembering(self.kept.rewound.clone()));
    }

    /// The parts that it can restore, also those that only the replica has.
    pub(super) fn parts(&self, replica: Option<&BTreeMap<(Rank, Number), Piece>>) -> BTreeMap<Number, Progress> {
        let staged = self.images.memory.iter().filter(|(_, piece)| piece.recorded);
        let staged = staged.map(|(number, piece)| (*number, progress(piece, Stored::Staged)));
        let stored = self.images.disk.iter().map(|(number, piece)| (*number, progress(piece, Stored::Durable)));
        let mut parts: BTreeMap<Number, Progress> = staged.chain(stored).collect();
        for ((_, number), piece) in replica.into_iter().flatten().filter(|((rank, _), _)| *rank == self.rank) {
            match parts.get_mut(number) {
                Some(part) if part.part == piece.part => part.replicated = Replicated::Yes,
                Some(_) => {}
                None => {
                    let progress = progress(piece, Stored::Durable);
                    parts.insert(*number, Progress { replicated: Replicated::Only, ..progress });
                }
            }
        }
        parts
    }

    pub(super) fn piece(&self, number: Number) -> Option<&Piece> {
        self.images.memory.get(&number).or_else(|| self.images.disk.get(&number))
    }

    /// Its supervisor has ended with a result after which the scheduler does not start it again.
    pub(super) fn is_over_for_good(&self) -> bool {
        self.finished.as_ref().is_some_and(|end| !is_started_again(end))
    }

    /// It was killed, and only its processes in the kernel are left.
    pub(super) fn is_stuck(&self) -> bool {
        self.trouble.stuck_until.is_some() && self.job.as_ref().is_some_and(|job| job.killed)
    }

    /// Whether its supervisor waits for the next run: the last one is over, and it was not a part of it.
    pub(super) fn waits_for_a_run(&self) -> bool {
        let Some(machine) = self.machine.as_ref() else { return false };
        let (view, us) = (machine.view(), machine.incarnation());
        let joined = view.members.get(&self.rank).map(|report| report.incarnation);
        let plan = view.plan.as_ref().map(|plan| &plan.value);
        let is_over = plan.is_some_and(|plan| matches!(plan.goal, Goal::End(_)));
        is_over && us.is_some() && joined == us && self.is_out_of_crew()
    }

    /// Whether its supervisor knows that another one has its place.
    pub(super) fn is_out_of_crew(&self) -> bool {
        let Some(machine) = self.machine.as_ref() else { return false };
        let plan = machine.view().plan.as_ref().map(|plan| &plan.value);
        plan.and_then(|plan| plan.crew.get(&self.rank)).copied() != machine.incarnation()
    }

    pub(super) fn is_paused(&self, now: Instant) -> bool {
        // After a pause its supervisor first looks at the time.
        self.trouble.paused_until.is_some_and(|until| now <= until)
    }
}

/// Whether the scheduler starts a supervisor again that has ended with this result.
pub(super) fn is_started_again(end: &End) -> bool {
    matches!(end, End::Missing { .. } | End::Stopped { requeue: true } | End::Refused { .. })
}

fn progress(piece: &Piece, stored: Stored) -> Progress {
    let replicated = Replicated::No;
    Progress { part: piece.part.clone(), epoch: piece.epoch, origin: piece.origin, size: 0, stored, replicated }
}

/// The settings in all histories. The times of the model fit them.
pub(crate) fn options(rank: Rank, size: u32) -> Options {
    let seconds = Duration::from_secs;
    Options {
        rank,
        size,
        limits: Limits {
            wait: seconds(90),
            start: seconds(20),
            prepare: seconds(8),
            dump: seconds(8),
            store: seconds(30),
        },
        interval: Some(seconds(15)),
        retry_after: seconds(3),
        retry_max: seconds(20),
        restart: Restart {
            min_uptime: seconds(10),
            backoff: seconds(1),
            max_backoff: seconds(8),
            max_restarts: 7,
            window: seconds(20),
            healthy_uptime: seconds(60),
            early_deaths: 4,
            cold_start: ColdStart::NoImages,
        },
        keep: 2,
        replicates: false,
        lease: super::coordinator::TTL,
        fence: seconds(3),
        leases_end_early: false,
    }
}
