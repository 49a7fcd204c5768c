//! How far each rank has to go, so that all stop at one point of every communicator. Pure: it neither reads a clock nor
//! touches a process, and it does not assume that all ranks are on one machine.
//!
//! A channel is a set of operations that its members do equally often: the collectives of a communicator, or the sends
//! from one rank to another and the receives there. Its target is the highest count of any member. The others must
//! reach it, or the kernels of the members ahead never end. If a rank is behind and waits at the target of another
//! channel, that target is raised, and all members of that channel must follow. A target is raised only if an operation
//! that has already started needs it. So this ends whenever the program itself would continue.

use std::collections::{BTreeMap, BTreeSet};

use rekindle_cuda::nccl::{Communicator, Counter, Counts, Kind};

/// A set of operations that its members do equally often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Channel {
    /// All ranks of this communicator.
    Collective([u64; 2]),
    /// Sends of one rank, and receives of another.
    Pair { id: [u64; 2], from: u32, to: u32 },
}

/// One side of a channel.
#[derive(Debug, Clone)]
struct Member {
    /// None: no process has this rank.
    process: Option<usize>,
    rank: u32,
    /// Its counter in the process's table, once it has one.
    place: Option<usize>,
    started: u64,
    wanted: Option<u64>,
    /// Its communicator was destroyed: it starts no more operations.
    has_ended: bool,
}

/// The limits of all channels. A limit never falls.
#[derive(Debug, Default)]
pub(super) struct Targets(BTreeMap<Channel, u64>);

/// A rank that others wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Behind {
    pub(super) channel: Channel,
    /// Index of its process; None if no process has this rank.
    pub(super) process: Option<usize>,
    pub(super) rank: u32,
    pub(super) started: u64,
    pub(super) target: u64,
}

/// The next step.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// Process, counter, and its new limit.
    pub(super) limits: Vec<(usize, usize, u64)>,
    /// All counts are equal, and no call is in progress.
    pub(super) is_reached: bool,
    /// The ranks that have not arrived yet.
    pub(super) behind: Vec<Behind>,
}

impl Targets {
    /// The next step, for these counts of all processes. The first `own` are this machine's. A target is raised only where
    /// one of these is a member: the other machines raise theirs. With `raise_all` every waiting call may be
    /// made: the ranks that are behind may wait for something other than NCCL.
    pub(super) fn step(&mut self, all: &[Counts], own: usize, raise_all: bool) -> Step {
        let channels = channels(all);
        // A table's counters never disappear. A job could change its table all the time, so old ones are forgotten.
        self.0.retain(|channel, _| channels.contains_key(channel));
        for (channel, members) in &channels {
            let highest = members.iter().map(|member| member.started).max().unwrap_or(0);
            let target = self.0.entry(*channel).or_default();
            *target = (*target).max(highest);
        }
        // A communicator is made by all its ranks together, and it is not known which they are.
        let is_making = all.iter().any(|counts| counts.making > 0);
        let behind = loop {
            let behind = self.behind(&channels);
            let processes: BTreeSet<_> = behind.iter().filter_map(|behind| behind.process).collect();
            // If no process has the missing rank, any of them may still become it.
            let may_all = raise_all || is_making || behind.iter().any(|behind| behind.process.is_none());
            let may_pass = |member: &&Member| may_all || member.process.is_some_and(|it| processes.contains(&it));
            let mut is_raised = false;
            let is_own =
                |member: &Member| member.place.is_some() && member.process.is_some_and(|process| process < own);
            for (channel, members) in channels.iter().filter(|(_, members)| members.iter().any(is_own)) {
                let target = self.0.entry(*channel).or_default();
                for member in members.iter().filter(may_pass) {
                    if member.wanted.is_some_and(|wanted| wanted > *target) {
                        *target = member.wanted.unwrap_or(*target);
                        is_raised = true;
                    }
                }
            }
            if !is_raised {
                break behind;
            }
        };
        let limit = |(channel, members): (&Channel, &Vec<Member>)| {
            let target = self.0.get(channel).copied().unwrap_or(0);
            members.iter().filter_map(move |member| Some((member.process?, member.place?, target))).collect::<Vec<_>>()
        };
        let limits = channels.iter().flat_map(limit).collect();
        let is_reached = behind.is_empty() && all.iter().all(|counts| counts.inside == 0);
        Step { limits, is_reached, behind }
    }

    /// The limit of each counter.
    pub(super) fn of(&self, all: &[Counts]) -> Vec<Vec<u64>> {
        let limit = |channel| target(&self.0, channel);
        all.iter().map(|counts| channels_of(counts).map(limit).collect()).collect()
    }

    /// Raises the targets to limits that another machine has set for these counts.
    pub(super) fn raise(&mut self, all: &[Counts], limits: &[Vec<u64>]) {
        for (counts, limits) in all.iter().zip(limits) {
            for (channel, limit) in channels_of(counts).zip(limits) {
                if let Some(channel) = channel {
                    let target = self.0.entry(channel).or_default();
                    *target = (*target).max(*limit);
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn behind(&self, channels: &BTreeMap<Channel, Vec<Member>>) -> Vec<Behind> {
        let mut behind = Vec::new();
        for (channel, members) in channels {
            let target = self.0.get(channel).copied().unwrap_or(0);
            // A process that has left is in no table. Nobody needs its rank once all who used the channel have ended
            // their communicator: that of the others stays in their tables.
            let is_used = members.iter().any(|member| member.started > 0 && !member.has_ended);
            let is_awaited = |member: &&Member| !member.has_ended && (member.process.is_some() || is_used);
            for member in members.iter().filter(|member| member.started < target).filter(is_awaited) {
                let Member { process, rank, started, .. } = *member;
                behind.push(Behind { channel: *channel, process, rank, started, target });
            }
        }
        behind
    }
}

fn target(targets: &BTreeMap<Channel, u64>, channel: Option<Channel>) -> u64 {
    channel.and_then(|channel| targets.get(&channel)).copied().unwrap_or(0)
}

/// The channel of each counter of a process; none if its communicator is not known.
fn channels_of(counts: &Counts) -> impl Iterator<Item = Option<Channel>> {
    counts.counters.iter().map(|counter| Some(channel_of(counts.communicators.get(counter.communicator)?, counter)))
}

fn channel_of(communicator: &Communicator, counter: &Counter) -> Channel {
    let (id, rank) = (communicator.id, communicator.rank);
    match counter.kind {
        Kind::Collective => Channel::Collective(id),
        Kind::Send => Channel::Pair { id, from: rank, to: counter.peer },
        Kind::Receive => Channel::Pair { id, from: counter.peer, to: rank },
    }
}

/// The members of all channels that have been used.
fn channels(all: &[Counts]) -> BTreeMap<Channel, Vec<Member>> {
    // The process of each rank.
    let mut ranks: BTreeMap<[u64; 2], BTreeMap<u32, (usize, bool)>> = BTreeMap::new();
    let mut sizes: BTreeMap<[u64; 2], u32> = BTreeMap::new();
    for (process, counts) in all.iter().enumerate() {
        for communicator in &counts.communicators {
            ranks.entry(communicator.id).or_default().insert(communicator.rank, (process, communicator.has_ended));
            sizes.insert(communicator.id, communicator.ranks);
        }
    }
    let mut channels: BTreeMap<Channel, Vec<Member>> = BTreeMap::new();
    for (process, counts) in all.iter().enumerate() {
        for counter in &counts.counters {
            let Some(communicator) = counts.communicators.get(counter.communicator) else { continue };
            let rank = communicator.rank;
            channels.entry(channel_of(communicator, counter)).or_default().push(Member {
                process: Some(process),
                // A rank that sends to itself has two members, one for each side.
                rank: if counter.kind == Kind::Receive { rank | RECEIVER } else { rank },
                place: Some(counter.place),
                started: counter.started,
                wanted: counter.wanted,
                has_ended: communicator.has_ended,
            });
        }
    }
    // The members that have not used the channel yet.
    for (channel, members) in &mut channels {
        let (id, wanted) = match channel {
            Channel::Collective(id) => (*id, ranks_of(ranks.get(id), sizes.get(id).copied().unwrap_or(0))),
            Channel::Pair { id, from, to } => (*id, vec![*from, *to | RECEIVER]),
        };
        let have: BTreeSet<u32> = members.iter().map(|member| member.rank).collect();
        for rank in wanted.into_iter().filter(|rank| !have.contains(rank)) {
            let found = ranks.get(&id).and_then(|ranks| ranks.get(&(rank & !RECEIVER)));
            let has_ended = found.is_some_and(|(_, has_ended)| *has_ended);
            let process = found.map(|(process, _)| *process);
            members.push(Member { process, rank, place: None, started: 0, wanted: None, has_ended });
        }
        members.iter_mut().for_each(|member| member.rank &= !RECEIVER);
    }
    channels
}

/// The known ranks of a communicator of this size, and the first unknown one. That one represents all unknown ranks,
/// because the size comes from the job and can be huge.
fn ranks_of(known: Option<&BTreeMap<u32, (usize, bool)>>, size: u32) -> Vec<u32> {
    let Some(known) = known else { return Vec::new() };
    let missing = (0..size).find(|rank| !known.contains_key(rank));
    known.keys().copied().filter(|rank| *rank < size).chain(missing).collect()
}

/// Marks the receiving side of a pair.
const RECEIVER: u32 = 1 << 31;
