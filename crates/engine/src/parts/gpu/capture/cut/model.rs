//! Random programs under the cut: ranks that start collectives, sends, receives and groups of them on several
//! communicators, run ahead of their GPUs or wait for them, compute, and wait for each other without NCCL. Communicators
//! are made, split and destroyed meanwhile. A process may have two threads that share a lock, and calls that return
//! before NCCL has started the operation. The counts are read piece by piece while they change. The processes are on one
//! machine or on several, which learn what the others tell late, but in one order.
//!
//! A program is one random order of operations. Each rank has a part of it, so it cannot block itself. When the cut
//! says that all ranks are at one point, all started operations must end without another start, and the program must
//! then complete. `REKINDLE_CUT_PROGRAMS` sets how many programs are tried, `REKINDLE_CUT_FIRST` the seed of the first.

#![allow(clippy::cast_possible_truncation, reason = "ranks and processes of a test are few")]

use std::collections::{BTreeSet, VecDeque};

use rekindle_cuda::nccl::{Communicator, Counter, Counts, Kind};

use super::Operations;
use super::search::{Look, Search};

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

/// An operation, and its number in its channel.
type Numbered = (Item, u64);

#[derive(Debug, Clone)]
enum Action {
    /// One call, or the calls of a group: started together.
    Start(Vec<Item>),
    /// Computes for this many turns.
    Compute(usize),
    /// Waits until all operations that this thread has started have ended.
    Synchronise,
    /// Waits for all ranks, without NCCL, at the barrier with this number.
    Meet(usize),
    /// Takes the lock that the threads of the process share, or gives it back.
    Take,
    Give,
    /// Makes a communicator together with others: all its ranks, or all those of the one that it is split from.
    Make(usize),
    /// Destroys a communicator.
    End(usize),
    /// The place of a communicator that was destroyed is used for something else.
    Forget(usize),
    /// The process ends.
    Leave,
}

#[derive(Default)]
struct Thread {
    program: Vec<Action>,
    at: usize,
    computing: usize,
    /// Started operations that have not ended.
    queue: VecDeque<Vec<Numbered>>,
    /// Counted, before the look at the gate.
    entering: Option<Vec<Numbered>>,
    /// Counted, but not started on the GPU yet.
    launching: Option<Vec<Numbered>>,
    /// In a call that makes a communicator.
    is_making: bool,
}

struct Process {
    threads: Vec<Thread>,
    /// The thread that has the lock.
    lock: Option<usize>,
    counts: Counts,
    limits: Vec<u64>,
    met: usize,
    /// Calls return before NCCL has started the operations.
    is_nonblocking: bool,
    /// Nothing of it can be read.
    has_left: bool,
}

/// A communicator: its ranks, by process.
struct Members {
    ranks: Vec<usize>,
    /// The processes that make it.
    makers: Vec<usize>,
    /// Those of them that have come.
    come: BTreeSet<usize>,
    /// The thread of each process that uses it.
    thread: usize,
}

struct World {
    members: Vec<Members>,
    processes: Vec<Process>,
    is_closed: bool,
    /// Calls that the gates have let pass.
    passed: usize,
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

    /// Counts the items, before the look at the gate.
    fn enter(&mut self, thread: usize, items: &[Item]) {
        let mut numbered = Vec::new();
        for item in items {
            let at = self.counter(*item);
            numbered.push((*item, self.counts.counters[at].started));
            self.counts.counters[at].started += 1;
        }
        self.counts.inside += 1;
        self.threads[thread].entering = Some(numbered);
    }

    /// Looks at the gate. Returns whether it lets the call pass; if not, the items are not counted any more.
    fn pass(&mut self, thread: usize, is_closed: bool) -> bool {
        let Some(numbered) = self.threads[thread].entering.take() else { return false };
        let places: Vec<usize> = numbered.iter().map(|(item, _)| self.counter(*item)).collect();
        let counters = &mut self.counts.counters;
        if is_closed && places.iter().any(|at| counters[*at].started > self.limits[*at]) {
            places.iter().for_each(|at| counters[*at].wanted = Some(counters[*at].started));
            places.iter().for_each(|at| counters[*at].started -= 1);
            self.counts.inside -= 1;
            return false;
        }
        places.iter().for_each(|at| counters[*at].wanted = None);
        if self.is_nonblocking {
            self.counts.inside -= 1;
            self.counts.pending += 1;
        }
        self.threads[thread].launching = Some(numbered);
        true
    }

    /// Whether a call that waits at the gate would pass by now.
    fn has_room(&mut self, items: &[Item]) -> bool {
        let places: Vec<usize> = items.iter().map(|item| self.counter(*item)).collect();
        let counters = &self.counts.counters;
        places.iter().all(|at| counters[*at].wanted.is_none_or(|wanted| wanted <= self.limits[*at]))
    }

    fn has_ended(&self) -> bool {
        self.threads.iter().all(|thread| thread.at == thread.program.len() && thread.queue.is_empty())
    }
}

/// The entry of a communicator that a process does not have. It is never used.
fn none(at: usize, process: usize) -> Communicator {
    Communicator { id: [at as u64, 1000 + process as u64], rank: 0, ranks: 1, has_ended: false }
}

fn entry(at: usize, ranks: &[usize], process: usize) -> Communicator {
    match ranks.iter().position(|member| *member == process) {
        Some(rank) => {
            Communicator { id: [at as u64, 7], rank: rank as u32, ranks: ranks.len() as u32, has_ended: false }
        }
        None => none(at, process),
    }
}

/// What has become of a communicator of a program that is being written.
#[derive(Clone, Copy, PartialEq)]
enum Life {
    Unmade,
    Live,
    Over,
}

impl World {
    fn random(random: &mut Random) -> World {
        let count = 1 + random.below(5);
        let threads = 1 + random.below(2);
        let everybody: Vec<usize> = (0..count).collect();
        let mut sets = vec![everybody.clone()];
        for _ in 0..random.below(4) {
            let some: Vec<_> = (0..count).filter(|_| random.one_in(2)).collect();
            sets.extend((!some.is_empty()).then_some(some));
        }
        let mut members: Vec<Members> = Vec::new();
        let mut lives = Vec::new();
        let add = |random: &mut Random, members: &mut Vec<Members>, lives: &mut Vec<Life>, ranks: Vec<usize>| {
            let makers = if random.one_in(2) { everybody.clone() } else { ranks.clone() };
            let is_there = members.is_empty() || random.one_in(2);
            let thread = if members.is_empty() { 0 } else { random.below(threads) };
            members.push(Members { ranks, makers, come: BTreeSet::new(), thread });
            lives.push(if is_there { Life::Live } else { Life::Unmade });
        };
        for ranks in sets {
            add(random, &mut members, &mut lives, ranks);
        }
        let made: Vec<bool> = lives.iter().map(|life| *life == Life::Live).collect();
        let mut programs: Vec<Vec<Vec<Action>>> = vec![vec![Vec::new(); threads]; count];
        let mut meetings = 0;
        for _ in 0..random.below(40) {
            for program in &mut programs {
                let thread = random.below(threads);
                match random.below(12) {
                    0 => program[thread].push(Action::Compute(random.below(20))),
                    1 => program[thread].push(Action::Synchronise),
                    _ => {}
                }
            }
            let at = random.below(members.len());
            let (thread, ranks) = (members[at].thread, members[at].ranks.clone());
            match lives[at] {
                Life::Live => {}
                Life::Unmade => {
                    members[at].makers.iter().for_each(|process| programs[*process][thread].push(Action::Make(at)));
                    lives[at] = Life::Live;
                    continue;
                }
                Life::Over => continue,
            }
            match random.below(9) {
                0 => {
                    meetings += 1;
                    programs.iter_mut().for_each(|program| program[0].push(Action::Meet(meetings)));
                }
                1 => {
                    let (from, to) = (random.below(ranks.len()), random.below(ranks.len()));
                    if from != to {
                        programs[ranks[from]][thread].push(Action::Start(vec![(at, Kind::Send, to as u32)]));
                        programs[ranks[to]][thread].push(Action::Start(vec![(at, Kind::Receive, from as u32)]));
                    }
                }
                2 => {
                    // All to all, in one group each.
                    for (rank, process) in ranks.iter().enumerate() {
                        let others = (0..ranks.len() as u32).filter(|other| *other as usize != rank);
                        let items: Vec<_> =
                            others.flat_map(|o| [(at, Kind::Send, o), (at, Kind::Receive, o)]).collect();
                        if !items.is_empty() {
                            programs[*process][thread].push(Action::Start(items));
                        }
                    }
                }
                3 => {
                    // Several collectives in one group.
                    let items = vec![(at, Kind::Collective, 0); 2 + random.below(3)];
                    ranks.iter().for_each(|it| programs[*it][thread].push(Action::Start(items.clone())));
                }
                4 if at > 0 && random.one_in(2) => {
                    for process in &ranks {
                        programs[*process][thread].extend([Action::Synchronise, Action::End(at)]);
                        if random.one_in(8) {
                            programs[*process][thread].push(Action::Forget(at));
                        }
                    }
                    lives[at] = Life::Over;
                    add(random, &mut members, &mut lives, ranks);
                    // The new one is not there yet.
                    lives[members.len() - 1] = Life::Unmade;
                }
                _ => {
                    let item = (at, Kind::Collective, 0);
                    ranks.iter().for_each(|it| programs[*it][thread].push(Action::Start(vec![item])));
                }
            }
        }
        if threads == 1 && random.one_in(2) {
            // All communicators end, and some processes leave.
            for (process, programs) in programs.iter_mut().enumerate() {
                programs[0].push(Action::Synchronise);
                let has = |at: &usize| lives[*at] == Life::Live && members[*at].ranks.contains(&process);
                programs[0].extend((0..members.len()).filter(has).map(Action::End));
                if random.one_in(2) {
                    programs[0].push(Action::Leave);
                } else {
                    (0..random.below(3)).for_each(|_| programs[0].push(Action::Compute(random.below(400))));
                }
            }
        }
        let is_nonblocking = random.one_in(3);
        let processes = programs.into_iter().enumerate().map(|(process, programs)| {
            let entries = members.iter().enumerate().map(|(at, it)| match made.get(at) {
                Some(true) => entry(at, &it.ranks, process),
                _ => none(at, process),
            });
            let threads = programs.into_iter().map(|program| Thread {
                program: if threads > 1 { with_lock(random, program) } else { program },
                ..Thread::default()
            });
            Process {
                threads: threads.collect(),
                lock: None,
                counts: Counts { communicators: entries.collect(), ..Counts::default() },
                limits: Vec::new(),
                met: 0,
                is_nonblocking,
                has_left: false,
            }
        });
        let processes = processes.collect();
        World { processes, members, is_closed: false, passed: 0 }
    }

    /// One turn of a thread. Returns whether it did something.
    fn turn(&mut self, at: usize, thread: usize) -> bool {
        let is_closed = self.is_closed;
        let process = &mut self.processes[at];
        let own = &mut process.threads[thread];
        if let Some(launched) = own.launching.take() {
            own.queue.push_back(launched);
            let number = if process.is_nonblocking { &mut process.counts.pending } else { &mut process.counts.inside };
            *number -= 1;
            return true;
        }
        if own.computing > 0 {
            own.computing -= 1;
            return true;
        }
        let Some(action) = own.program.get(own.at).cloned() else { return false };
        let moved = match action {
            Action::Start(_) if own.entering.is_some() => {
                let passes = process.pass(thread, is_closed);
                self.passed += usize::from(passes);
                passes
            }
            Action::Start(items) => {
                if is_closed && !process.has_room(&items) {
                    return false;
                }
                process.enter(thread, &items);
                return true;
            }
            Action::Compute(turns) => {
                own.computing = turns;
                true
            }
            Action::Synchronise => own.queue.is_empty(),
            Action::Take if process.lock.is_none() => {
                process.lock = Some(thread);
                true
            }
            Action::Take => false,
            Action::Give => {
                process.lock = None;
                true
            }
            Action::Meet(number) => {
                let comes = process.met < number;
                process.met = number;
                if comes {
                    return true;
                }
                self.processes.iter().all(|process| process.met >= number)
            }
            Action::Make(new) => {
                let it = &mut self.members[new];
                if it.come.insert(at) {
                    process.counts.inside += 1;
                    process.counts.making += 1;
                    process.threads[thread].is_making = true;
                    return true;
                }
                let is_made = it.makers.iter().all(|maker| it.come.contains(maker));
                if is_made {
                    process.counts.communicators[new] = entry(new, &it.ranks, at);
                    process.counts.inside -= 1;
                    process.counts.making -= 1;
                    process.threads[thread].is_making = false;
                }
                is_made
            }
            Action::End(old) => {
                process.counts.communicators[old].has_ended = true;
                true
            }
            Action::Forget(old) => {
                process.counts.communicators[old] = none(old, at);
                let of_it = process.counts.counters.iter_mut().filter(|counter| counter.communicator == old);
                of_it.for_each(|counter| (counter.started, counter.wanted) = (0, None));
                true
            }
            // If one leaves during a cut, that cut is given up.
            Action::Leave => {
                process.has_left = !is_closed;
                process.has_left
            }
        };
        self.processes[at].threads[thread].at += usize::from(moved);
        moved
    }

    /// Whether all other sides of the first operation in a thread's queue are first in their queues.
    fn can_end(&self, at: usize, thread: usize) -> bool {
        let Some(first) = self.processes[at].threads[thread].queue.front() else { return false };
        first.iter().all(|((communicator, kind, peer), number)| {
            let ranks = &self.members[*communicator].ranks;
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
                let process = &self.processes[member];
                // Its work had ended before that.
                if process.counts.communicators[communicator].has_ended || !self.has(member, communicator) {
                    return self.has_made(member, communicator);
                }
                let is_it = |c: &&Counter| (c.communicator, c.kind, c.peer) == (communicator, kind, peer);
                let started = process.counts.counters.iter().find(is_it).map_or(0, |counter| counter.started);
                let own = &process.threads[self.members[communicator].thread];
                let contains = |call: &Vec<Numbered>| call.contains(&(item, *number));
                // It has ended there, or is first.
                let queued = own.queue.iter().any(contains);
                let launching = own.launching.iter().chain(&own.entering).any(contains);
                let at_head = own.queue.front().is_some_and(contains);
                at_head || started > *number && !queued && !launching
            })
        })
    }

    /// Whether a process has this communicator in its table.
    fn has(&self, process: usize, communicator: usize) -> bool {
        self.processes[process].counts.communicators[communicator].id == [communicator as u64, 7]
    }

    /// Whether it had it, or has it.
    fn has_made(&self, process: usize, communicator: usize) -> bool {
        let mut all = self.processes[process].threads.iter().flat_map(|thread| &thread.program[..thread.at]);
        all.any(|action| matches!(action, Action::End(old) if *old == communicator))
    }

    fn gpu(&mut self, at: usize, thread: usize) -> bool {
        let can = self.can_end(at, thread);
        if can {
            self.processes[at].threads[thread].queue.pop_front();
        }
        can
    }

    fn open(&mut self) {
        self.is_closed = false;
        for process in &mut self.processes {
            process.counts.counters.iter_mut().for_each(|counter| counter.wanted = None);
        }
    }
}

/// Has some of the calls made with the lock of the process: a thread that waits at the gate may have it. No thread waits
/// for its GPU or for another rank with it.
fn with_lock(random: &mut Random, program: Vec<Action>) -> Vec<Action> {
    let (mut locked, mut has_it) = (Vec::new(), false);
    for action in program {
        let is_short = matches!(action, Action::Start(_) | Action::Compute(_));
        if has_it && (!is_short || random.one_in(3)) {
            locked.push(Action::Give);
            has_it = false;
        }
        if !has_it && is_short && random.one_in(2) {
            locked.push(Action::Take);
            has_it = true;
        }
        locked.push(action);
    }
    locked.extend(has_it.then_some(Action::Give));
    locked
}

/// Reads the counts of a machine's processes piece by piece, while they change: `inside`, the communicators, each
/// counter, `inside` again, and what is pending.
#[derive(Default)]
struct Reader {
    all: Vec<Counts>,
    step: usize,
}

impl Reader {
    /// Reads the next piece. Returns the counts once all is read.
    fn read(&mut self, processes: &[Process]) -> Option<Vec<Counts>> {
        if self.step == 0 {
            let process = processes.get(self.all.len())?;
            self.all.push(Counts { inside: process.counts.inside, ..Counts::default() });
            self.step = 1;
            return None;
        }
        let (process, nothing) = (&processes[self.all.len() - 1], Counts::default());
        let counts = if process.has_left { &nothing } else { &process.counts };
        let read = self.all.last_mut()?;
        match self.step {
            1 => read.communicators.clone_from(&counts.communicators),
            at => match counts.counters.get(at - 2) {
                Some(counter) => read.counters.push(counter.clone()),
                None => {
                    read.inside = read.inside.max(counts.inside);
                    (read.making, read.pending) = (counts.making, counts.pending);
                    self.step = 0;
                    return (self.all.len() == processes.len()).then(|| std::mem::take(&mut self.all));
                }
            },
        }
        self.step += 1;
        None
    }
}

/// A supervisor, and what it knows of the others.
struct Machine {
    /// Its processes.
    own: std::ops::Range<usize>,
    search: Search,
    reader: Reader,
    before: Vec<Vec<Counts>>,
    told: Option<Operations>,
    /// Not written yet.
    unwritten: Option<Operations>,
    /// What it knows of each machine, and up to where it has read what was written.
    known: Vec<Option<Operations>>,
    read: usize,
    is_done: bool,
}

/// The machines during one cut, and what they have written.
struct Machines {
    all: Vec<Machine>,
    written: Vec<(usize, Operations)>,
    /// How many calls had passed when the first machine reached the point.
    passed: Option<usize>,
}

impl Machines {
    fn new(world: &World, count: usize) -> Machines {
        let processes = world.processes.len();
        let machine = |at| Machine {
            own: at * processes / count..(at + 1) * processes / count,
            search: Search::new(at as u64),
            reader: Reader::default(),
            before: Vec::new(),
            told: None,
            unwritten: None,
            known: vec![None; count],
            read: 0,
            is_done: false,
        };
        Machines { all: (0..count).map(machine).collect(), written: Vec::new(), passed: None }
    }

    /// Something is written, or a machine learns of it. Returns whether a machine has learnt something.
    fn deliver(&mut self, at: usize, writes: bool) -> bool {
        let machine = &mut self.all[at];
        if writes {
            self.written.extend(machine.unwritten.take().map(|operations| (at, operations)));
            return false;
        }
        let Some((from, operations)) = self.written.get(machine.read) else { return false };
        machine.read += 1;
        if *from != at {
            machine.known[*from] = Some(operations.clone());
        }
        *from != at
    }

    /// A machine reads some pieces, and takes a step once it has read all. Returns whether it took one.
    fn step(&mut self, at: usize, world: &mut World, pace: usize, is_stuck: bool) -> bool {
        let machine = &mut self.all[at];
        if machine.is_done {
            return false;
        }
        let processes = &world.processes[machine.own.clone()];
        let Some(counts) = (0..pace).find_map(|_| machine.reader.read(processes)) else { return false };
        let ours = machine.search.tell(counts);
        if machine.told.as_ref() != Some(&ours) {
            machine.told = Some(ours.clone());
            machine.unwritten = Some(ours.clone());
        }
        let others = machine.known.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, known)| known.clone());
        let others: Option<Vec<Operations>> = others.collect();
        let all = std::iter::once(&ours).chain(others.iter().flatten());
        let now: Vec<Vec<Counts>> = all.map(|operations| operations.counts.clone()).collect();
        let is_starting = !is_stuck && ours.counts.iter().any(|counts| counts.pending > 0);
        let is_steady = now == machine.before && !is_starting;
        machine.before = now;
        let step = machine.search.step(&Look { ours: &ours, others: others.as_deref(), is_stuck, is_steady });
        for (process, place, limit) in step.limits {
            if machine.own.contains(&(machine.own.start + process)) {
                world.processes[machine.own.start + process].limits[place] = limit;
            }
        }
        if step.is_reached {
            machine.is_done = true;
            self.passed = self.passed.or(Some(world.passed));
        }
        true
    }

    fn have_the_point(&self, world: &World) -> Result<bool, String> {
        if self.passed.is_some_and(|passed| passed != world.passed) {
            return Err("a call passed after a machine had reached the point".into());
        }
        Ok(self.all.iter().all(|machine| machine.is_done))
    }
}

/// More turns than any program needs.
const MOST_TURNS: usize = 400_000;

fn run(seed: u64) -> Result<usize, String> {
    let mut random = Random::new(seed);
    let mut world = World::random(&mut random);
    let count = world.processes.len();
    let threads = world.processes[0].threads.len();
    let cuts_every = 20 + random.below(400);
    // How many pieces are read at a time.
    let pace = [1, 3, 1000][random.below(3)];
    let machine_count = if random.one_in(2) { 1 } else { 1 + random.below(count) };
    // How seldom something is written, and learnt.
    let delays = [1 + random.below(20), 1 + random.below(20)];
    let (mut cuts, mut quiet) = (0, 0);
    let mut machines = Machines::new(&world, machine_count);
    for _ in 0..MOST_TURNS {
        if world.processes.iter().all(Process::has_ended) {
            return Ok(cuts);
        }
        if !world.is_closed && random.one_in(cuts_every) {
            machines = Machines::new(&world, machine_count);
            world.is_closed = true;
        }
        let (at, thread) = (random.below(count), random.below(threads));
        let moved = if random.one_in(2) { world.turn(at, thread) } else { world.gpu(at, thread) };
        quiet = if moved { 0 } else { quiet + 1 };
        if !world.is_closed {
            if quiet > 2000 * count * threads {
                return Err("the program does not get on with the gate open".into());
            }
            continue;
        }
        let at = random.below(machine_count);
        for writes in [true, false] {
            if random.one_in(delays[usize::from(writes)]) && machines.deliver(at, writes) {
                quiet = 0;
            }
        }
        if random.one_in(3) {
            let pieces: usize = world.processes.iter().map(|process| process.counts.counters.len() + 3).sum();
            // Only if nothing has changed for long is what was read true for one moment.
            let is_stuck = quiet > (60 * count * threads + 40 * pieces) * machine_count;
            if machines.step(at, &mut world, pace, is_stuck) && is_stuck {
                quiet = 0;
            }
            if machines.have_the_point(&world)? {
                cuts += 1;
                check_rest(&mut world)?;
                world.open();
            }
        }
    }
    Err(format!("no end after {MOST_TURNS} turns; closed: {}", world.is_closed))
}

/// Checks that all counts are equal, and that all started operations end without another start.
fn check_rest(world: &mut World) -> Result<(), String> {
    // A call that has counted and not looked at the gate yet.
    for at in 0..world.processes.len() {
        for thread in 0..world.processes[at].threads.len() {
            if world.processes[at].threads[thread].entering.is_some() {
                world.turn(at, thread);
            }
        }
    }
    let started = |world: &World, process: usize, item: Item| {
        let (communicator, kind, peer) = item;
        let is_it = |c: &&Counter| (c.communicator, c.kind, c.peer) == (communicator, kind, peer);
        world.processes[process].counts.counters.iter().find(is_it).map_or(0, |counter| counter.started)
    };
    for communicator in 0..world.members.len() {
        // Those that have ended it are not waited for.
        let is_there = |process: usize| {
            world.has(process, communicator) && !world.processes[process].counts.communicators[communicator].has_ended
        };
        let ranks = &world.members[communicator].ranks;
        let counts: Vec<u64> = ranks
            .iter()
            .filter(|process| is_there(**process))
            .map(|process| started(world, *process, (communicator, Kind::Collective, 0)))
            .collect();
        if counts.iter().any(|count| *count != counts[0]) {
            return Err(format!("collectives of {communicator}: {counts:?}"));
        }
        for (from, sender) in ranks.iter().enumerate().filter(|(_, process)| is_there(**process)) {
            for (to, receiver) in ranks.iter().enumerate().filter(|(_, process)| is_there(**process)) {
                let sent = started(world, *sender, (communicator, Kind::Send, to as u32));
                let received = started(world, *receiver, (communicator, Kind::Receive, from as u32));
                if sent != received {
                    return Err(format!("{communicator}: {sent} sent from {from} to {to}, {received} received"));
                }
            }
        }
    }
    let (count, threads) = (world.processes.len(), world.processes[0].threads.len());
    while (0..count).any(|at| (0..threads).any(|thread| world.gpu(at, thread))) {}
    let left = world.processes.iter().flat_map(|process| &process.threads).filter(|it| !it.queue.is_empty()).count();
    if left > 0 {
        return Err(format!("work of {left} threads that does not end"));
    }
    Ok(())
}

#[test]
fn every_program_comes_to_rest_and_goes_on() {
    let read = |name| std::env::var(name).ok().and_then(|number| number.parse().ok());
    let programs: u64 = read("REKINDLE_CUT_PROGRAMS").unwrap_or(2000);
    let first = read("REKINDLE_CUT_FIRST").unwrap_or_else(|| u64::from(std::process::id()) << 32);
    let seeds: Vec<u64> = (first..first + programs).chain(0..200).collect();
    let one = |seed| run(seed).map_err(|why| format!("seed {seed}: {why}"));
    let cuts = rekindle_os::parallel::in_parallel(seeds, usize::MAX, one);
    let cuts: usize = cuts.unwrap_or_else(|why| panic!("{why}")).into_iter().sum();
    assert!(cuts as u64 > programs / 2, "only {cuts} cuts were reached: the programs are too short to test anything");
    println!("{programs} programs from seed {first}, {cuts} cuts");
}
