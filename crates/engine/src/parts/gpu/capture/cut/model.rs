//! Random programs under the cut: ranks that start collectives, sends, receives and groups of them on several
//! communicators, run ahead of their GPUs or wait for them, compute, and wait for each other without NCCL.
//!
//! A program is one random order of operations. Each rank has a part of it, so it cannot block itself. When the cut
//! says that all ranks are at one point, all started operations must end without another start, and the program must
//! then complete. `REKINDLE_CUT_PROGRAMS` sets how many programs are tried.

#![allow(clippy::cast_possible_truncation, reason = "ranks and processes of a test are few")]

use std::collections::VecDeque;

use rekindle_cuda::nccl::{Communicator, Counter, Counts, Kind};

use super::plan::Targets;

/// xorshift64*.
#[derive(Clone, Copy)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }
}

/// The key of one side of a channel: the communicator, the kind, and the other rank.
type Item = (usize, Kind, u32);

#[derive(Debug, Clone)]
enum Action {
    /// One call, or the calls of a group: started together.
    Start(Vec<Item>),
    /// Computes for this many turns.
    Compute(usize),
    /// Waits until all its started operations have ended.
    Synchronise,
    /// Waits for all ranks, without NCCL, at the barrier with this number.
    Meet(usize),
}

struct Process {
    program: Vec<Action>,
    at: usize,
    computing: usize,
    counts: Counts,
    limits: Vec<u64>,
    /// Started operations that have not ended. Each item has its number in its channel.
    queue: VecDeque<Vec<(Item, u64)>>,
    /// Counted, but not started on the GPU yet.
    launching: Option<Vec<(Item, u64)>>,
    met: usize,
}

struct World {
    /// The members of each communicator, by rank.
    members: Vec<Vec<usize>>,
    processes: Vec<Process>,
    is_closed: bool,
}

impl Process {
    fn counter(&mut self, item: Item) -> usize {
        let (communicator, kind, peer) = item;
        let is_it = |c: &Counter| c.communicator == communicator && c.kind == kind && c.peer == peer;
        self.counts.counters.iter().position(is_it).unwrap_or_else(|| {
            let place = self.counts.counters.len();
            self.counts.counters.push(Counter { place, communicator, kind, peer, started: 0, wanted: None });
            self.limits.push(0);
            place
        })
    }

    /// Counts the items, unless the gate prevents it.
    fn start(&mut self, items: &[Item], is_closed: bool) -> bool {
        let mut numbered = Vec::new();
        for item in items {
            let at = self.counter(*item);
            let earlier = numbered.iter().filter(|(other, _)| other == item).count() as u64;
            numbered.push((*item, self.counts.counters[at].started + earlier));
        }
        let beyond = |(item, number): &(Item, u64), process: &mut Process| {
            let at = process.counter(*item);
            *number + 1 > process.limits[at]
        };
        if is_closed && numbered.iter().any(|numbered| beyond(numbered, self)) {
            for (item, number) in &numbered {
                let at = self.counter(*item);
                self.counts.counters[at].wanted = Some(number + 1);
            }
            return false;
        }
        for (item, number) in &numbered {
            let at = self.counter(*item);
            self.counts.counters[at].started = number + 1;
            self.counts.counters[at].wanted = None;
        }
        self.counts.inside = 1;
        self.launching = Some(numbered);
        true
    }

    fn has_ended(&self) -> bool {
        self.at == self.program.len() && self.queue.is_empty()
    }
}

impl World {
    fn random(random: &mut Random) -> World {
        let count = 1 + random.below(5);
        let mut members = vec![(0..count).collect::<Vec<_>>()];
        for _ in 0..random.below(4) {
            let some: Vec<_> = (0..count).filter(|_| random.one_in(2)).collect();
            members.extend((!some.is_empty()).then_some(some));
        }
        let mut programs: Vec<Vec<Action>> = vec![Vec::new(); count];
        let mut meetings = 0;
        for _ in 0..random.below(40) {
            for program in &mut programs {
                match random.below(12) {
                    0 => program.push(Action::Compute(random.below(20))),
                    1 => program.push(Action::Synchronise),
                    _ => {}
                }
            }
            let communicator = random.below(members.len());
            let ranks = &members[communicator];
            match random.below(8) {
                0 => {
                    meetings += 1;
                    programs.iter_mut().for_each(|program| program.push(Action::Meet(meetings)));
                }
                1 => {
                    let (from, to) = (random.below(ranks.len()), random.below(ranks.len()));
                    if from != to {
                        programs[ranks[from]].push(Action::Start(vec![(communicator, Kind::Send, to as u32)]));
                        programs[ranks[to]].push(Action::Start(vec![(communicator, Kind::Receive, from as u32)]));
                    }
                }
                2 => {
                    // All to all, in one group each.
                    for (rank, process) in ranks.iter().enumerate() {
                        let others = (0..ranks.len() as u32).filter(|other| *other as usize != rank);
                        let both =
                            others.flat_map(|o| [(communicator, Kind::Send, o), (communicator, Kind::Receive, o)]);
                        let items: Vec<_> = both.collect();
                        if !items.is_empty() {
                            programs[*process].push(Action::Start(items));
                        }
                    }
                }
                3 => {
                    // Several collectives in one group.
                    let items = vec![(communicator, Kind::Collective, 0); 2 + random.below(3)];
                    ranks.iter().for_each(|process| programs[*process].push(Action::Start(items.clone())));
                }
                _ => {
                    let item = (communicator, Kind::Collective, 0);
                    ranks.iter().for_each(|process| programs[*process].push(Action::Start(vec![item])));
                }
            }
        }
        let processes = programs.into_iter().enumerate().map(|(process, program)| {
            let of = |(at, ranks): (usize, &Vec<usize>)| Communicator {
                id: [at as u64, 7],
                rank: ranks.iter().position(|member| *member == process).unwrap_or(0) as u32,
                ranks: ranks.len() as u32,
                has_ended: false,
            };
            // The entry of a communicator without this rank is never used.
            let foreign = |at: usize| Communicator {
                id: [at as u64, 1000 + process as u64],
                rank: 0,
                ranks: 1,
                has_ended: false,
            };
            let communicators = members
                .iter()
                .enumerate()
                .map(|(at, ranks)| if ranks.contains(&process) { of((at, ranks)) } else { foreign(at) });
            Process {
                program,
                at: 0,
                computing: 0,
                counts: Counts { communicators: communicators.collect(), ..Counts::default() },
                limits: Vec::new(),
                queue: VecDeque::new(),
                launching: None,
                met: 0,
            }
        });
        World { processes: processes.collect(), members, is_closed: false }
    }

    /// One turn of a process. Returns whether it did something.
    fn turn(&mut self, at: usize) -> bool {
        let met = self.processes.iter().map(|process| process.met).collect::<Vec<_>>();
        let is_closed = self.is_closed;
        let process = &mut self.processes[at];
        if let Some(launched) = process.launching.take() {
            process.queue.push_back(launched);
            process.counts.inside = 0;
            return true;
        }
        if process.computing > 0 {
            process.computing -= 1;
            return true;
        }
        let Some(action) = process.program.get(process.at).cloned() else { return false };
        let moved = match action {
            Action::Start(items) => process.start(&items, is_closed),
            Action::Compute(turns) => {
                process.computing = turns;
                true
            }
            Action::Synchronise => process.queue.is_empty(),
            Action::Meet(number) => {
                let comes = process.met < number;
                process.met = number;
                if comes {
                    return true;
                }
                met.iter().all(|met| *met >= number)
            }
        };
        process.at += usize::from(moved);
        moved
    }

    /// Whether all other sides of the first operation in a process's queue are first in their queues.
    fn can_end(&self, at: usize) -> bool {
        let Some(first) = self.processes[at].queue.front() else { return false };
        first.iter().all(|((communicator, kind, peer), number)| {
            let ranks = &self.members[*communicator];
            let own = ranks.iter().position(|member| *member == at).unwrap_or(0) as u32;
            let sides: Vec<(usize, Item)> = match kind {
                Kind::Collective => {
                    ranks.iter().map(|member| (*member, (*communicator, Kind::Collective, 0))).collect()
                }
                Kind::Send => vec![(ranks[*peer as usize], (*communicator, Kind::Receive, own))],
                Kind::Receive => vec![(ranks[*peer as usize], (*communicator, Kind::Send, own))],
            };
            sides.into_iter().all(|(member, item)| {
                let (communicator, kind, peer) = item;
                let is_it = |c: &&Counter| (c.communicator, c.kind, c.peer) == (communicator, kind, peer);
                let process = &self.processes[member];
                let started = process.counts.counters.iter().find(is_it).map_or(0, |counter| counter.started);
                // It has ended there, or is first.
                let queued = process.queue.iter().any(|call| call.contains(&(item, *number)));
                let launching = process.launching.as_ref().is_some_and(|call| call.contains(&(item, *number)));
                let at_head = process.queue.front().is_some_and(|call| call.contains(&(item, *number)));
                at_head || started > *number && !queued && !launching
            })
        })
    }

    fn gpu(&mut self, at: usize) -> bool {
        let can = self.can_end(at);
        if can {
            self.processes[at].queue.pop_front();
        }
        can
    }

    fn close(&mut self) {
        self.is_closed = true;
    }

    fn open(&mut self) {
        self.is_closed = false;
        for process in &mut self.processes {
            process.counts.counters.iter_mut().for_each(|counter| counter.wanted = None);
        }
    }
}

/// More turns than any program needs.
const MOST_TURNS: usize = 200_000;

fn run(seed: u64) -> Result<usize, String> {
    let mut random = Random::new(seed);
    let mut world = World::random(&mut random);
    let count = world.processes.len();
    let cuts_every = 20 + random.below(400);
    let (mut targets, mut cuts, mut quiet) = (Targets::default(), 0, 0);
    for _ in 0..MOST_TURNS {
        if world.processes.iter().all(Process::has_ended) {
            return Ok(cuts);
        }
        if !world.is_closed && random.one_in(cuts_every) {
            targets = Targets::default();
            world.close();
        }
        let at = random.below(count);
        let moved = if random.one_in(2) { world.turn(at) } else { world.gpu(at) };
        quiet = if moved { 0 } else { quiet + 1 };
        if world.is_closed && random.one_in(3) {
            let all: Vec<Counts> = world.processes.iter().map(|process| process.counts.clone()).collect();
            let is_stuck = quiet > 40 * count;
            let step = targets.step(&all, is_stuck);
            for (process, place, limit) in step.limits {
                world.processes[process].limits[place] = limit;
            }
            if is_stuck {
                quiet = 0;
            }
            if step.is_reached {
                cuts += 1;
                check_rest(&mut world)?;
                world.open();
            }
        } else if !world.is_closed && quiet > 1000 * count {
            return Err("the program does not get on with the gate open".into());
        }
    }
    Err(format!("no end after {MOST_TURNS} turns; closed: {}", world.is_closed))
}

/// Checks that all counts are equal, and that all started operations end without another start.
fn check_rest(world: &mut World) -> Result<(), String> {
    let started = |world: &World, process: usize, item: Item| {
        let (communicator, kind, peer) = item;
        let is_it = |c: &&Counter| (c.communicator, c.kind, c.peer) == (communicator, kind, peer);
        world.processes[process].counts.counters.iter().find(is_it).map_or(0, |counter| counter.started)
    };
    for (communicator, ranks) in world.members.iter().enumerate() {
        let counts: Vec<u64> =
            ranks.iter().map(|at| started(world, *at, (communicator, Kind::Collective, 0))).collect();
        if counts.iter().any(|count| *count != counts[0]) {
            return Err(format!("collectives of {communicator}: {counts:?}"));
        }
        for (from, sender) in ranks.iter().enumerate() {
            for (to, receiver) in ranks.iter().enumerate() {
                let sent = started(world, *sender, (communicator, Kind::Send, to as u32));
                let received = started(world, *receiver, (communicator, Kind::Receive, from as u32));
                if sent != received {
                    return Err(format!("{communicator}: {sent} sent from {from} to {to}, {received} received"));
                }
            }
        }
    }
    let count = world.processes.len();
    while (0..count).any(|at| world.gpu(at)) {}
    let left: Vec<usize> = world.processes.iter().map(|process| process.queue.len()).collect();
    if left.iter().any(|left| *left > 0) {
        return Err(format!("work that does not end: {left:?}"));
    }
    Ok(())
}

#[test]
fn every_program_comes_to_rest_and_goes_on() {
    let programs = std::env::var("REKINDLE_CUT_PROGRAMS").ok().and_then(|number| number.parse().ok());
    let programs: u64 = programs.unwrap_or(2000);
    let first = u64::from(std::process::id()) << 32;
    let mut cuts = 0;
    for seed in (first..first + programs).chain(0..200) {
        match run(seed) {
            Ok(reached) => cuts += reached,
            Err(why) => panic!("seed {seed}: {why}"),
        }
    }
    assert!(cuts as u64 > programs / 2, "only {cuts} cuts were reached: the programs are too short to test anything");
}
