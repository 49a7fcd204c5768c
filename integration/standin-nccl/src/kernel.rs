//! Operations on their way: begun when their turn comes, over when all sides have begun.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::room::{MOST, RING};
use crate::{Communicator, driver};

/// Bytes of a number.
const WORD: usize = 8;

/// What an operation does; addresses of device memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    AllReduce { from: usize, to: usize },
    Broadcast { from: usize, to: usize, root: usize },
    AllGather { from: usize, to: usize },
    ReduceScatter { from: usize, to: usize },
    Send { from: usize, peer: usize },
    Receive { to: usize, peer: usize },
}

/// Operations of one channel go one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Channel {
    Collective,
    To(usize),
    From(usize),
}

/// How many of each kind a rank has begun.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    collectives: u64,
    sent: [u64; MOST],
    received: [u64; MOST],
}

/// One call.
#[derive(Debug)]
pub(crate) struct Operation {
    communicator: &'static Communicator,
    what: What,
    /// Once begun: which of its channel it is, from 1.
    number: Option<u64>,
    is_over: bool,
}

/// The calls of a group, or one.
#[derive(Debug)]
pub(crate) struct Kernel(Vec<Operation>);

impl Kernel {
    pub(crate) fn new(operations: Vec<Operation>) -> Kernel {
        Kernel(operations)
    }

    /// Goes as far as the other sides let it. Returns whether all of it is over.
    pub(crate) fn advance(&mut self) -> bool {
        for at in 0..self.0.len() {
            let (before, rest) = self.0.split_at_mut(at);
            let Some(operation) = rest.first_mut() else { break };
            let is_same = |other: &Operation| {
                std::ptr::eq(other.communicator, operation.communicator) && other.channel() == operation.channel()
            };
            if !before.iter().any(|other| !other.is_over && is_same(other)) {
                operation.advance();
            }
        }
        self.0.iter().all(|operation| operation.is_over)
    }
}

impl Operation {
    pub(crate) fn new(communicator: &'static Communicator, what: What) -> Operation {
        Operation { communicator, what, number: None, is_over: false }
    }

    pub(crate) fn communicator(&self) -> &'static Communicator {
        self.communicator
    }

    fn channel(&self) -> Channel {
        match self.what {
            What::Send { peer, .. } => Channel::To(peer),
            What::Receive { peer, .. } => Channel::From(peer),
            _ => Channel::Collective,
        }
    }

    fn advance(&mut self) {
        if self.is_over {
            return;
        }
        let number = match self.number {
            Some(number) => number,
            None => *self.number.insert(self.begin()),
        };
        if self.communicator.has_ended.load(Ordering::SeqCst) {
            self.is_over = true;
        } else if self.has_all_sides(number) {
            self.finish(number);
            self.is_over = true;
        }
    }

    /// Puts what the others need where they find it, and tells that it is there.
    fn begin(&self) -> u64 {
        let Communicator { room, rank, ranks, .. } = *self.communicator;
        let mut begun = self.communicator.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let count = match self.channel() {
            Channel::Collective => &mut begun.collectives,
            Channel::To(peer) => &mut begun.sent[peer],
            Channel::From(peer) => &mut begun.received[peer],
        };
        *count += 1;
        let number = *count;
        let slot = slot(number);
        let put = |for_rank: usize, number: u64| room.values[slot][rank][for_rank].store(number, Ordering::SeqCst);
        let told = match self.what {
            What::AllReduce { from, .. } | What::Broadcast { from, .. } | What::AllGather { from, .. } => {
                let value = driver::load(from);
                (0..ranks).for_each(|to| put(to, value));
                &room.begun[rank]
            }
            What::ReduceScatter { from, .. } => {
                (0..ranks).for_each(|to| put(to, driver::load(from + to * WORD)));
                &room.begun[rank]
            }
            What::Send { from, peer } => {
                room.carried[slot][rank][peer].store(driver::load(from), Ordering::SeqCst);
                &room.sent[rank][peer]
            }
            What::Receive { peer, .. } => &room.received[rank][peer],
        };
        told.store(number, Ordering::SeqCst);
        number
    }

    fn has_all_sides(&self, number: u64) -> bool {
        let Communicator { room, rank, ranks, .. } = *self.communicator;
        match self.channel() {
            Channel::Collective => room.begun[..ranks].iter().all(|begun| begun.load(Ordering::SeqCst) >= number),
            Channel::To(peer) => room.received[peer][rank].load(Ordering::SeqCst) >= number,
            Channel::From(peer) => room.sent[peer][rank].load(Ordering::SeqCst) >= number,
        }
    }

    fn finish(&self, number: u64) {
        let Communicator { room, rank, ranks, .. } = *self.communicator;
        let slot = slot(number);
        let of = |other: usize| room.values[slot][other][rank].load(Ordering::SeqCst);
        match self.what {
            What::AllReduce { to, .. } | What::ReduceScatter { to, .. } => {
                driver::store(to, (0..ranks).fold(0, |sum, other| sum.wrapping_add(of(other))));
            }
            What::Broadcast { to, root, .. } => driver::store(to, of(root)),
            What::AllGather { to, .. } => (0..ranks).for_each(|other| driver::store(to + other * WORD, of(other))),
            What::Receive { to, peer } => driver::store(to, room.carried[slot][peer][rank].load(Ordering::SeqCst)),
            What::Send { .. } => {}
        }
    }
}

/// A rank is at most one operation ahead of what another still reads.
fn slot(number: u64) -> usize {
    usize::try_from(number % RING as u64).unwrap_or(0)
}
