//! What is going to happen in a history, in the order of its time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::faults::Fault;
use crate::events::{Event, Write};
use crate::ids::{Incarnation, Number};

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

/// Future events, in the order of their time.
#[derive(Debug)]
pub(super) struct Queue {
    began: Instant,
    turns: BinaryHeap<Reverse<Turn>>,
    events: Vec<Option<Happening>>,
    /// Places that can be used again.
    free: Vec<usize>,
    sequence: u32,
}

/// When something happens, and its place. What happens at the same time has the order in which it was planned. In one
/// number, which is compared faster than three: nanoseconds since the beginning, sequence, place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Turn(u128);

impl Turn {
    fn new(nanos: u64, sequence: u32, place: u32) -> Turn {
        Turn(u128::from(nanos) << 64 | u128::from(sequence) << 32 | u128::from(place))
    }

    fn nanos(self) -> u64 {
        (self.0 >> 64) as u64
    }

    fn place(self) -> usize {
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d]) as usize
    }
}

impl Queue {
    pub(super) fn new(began: Instant) -> Queue {
        Queue { began, turns: BinaryHeap::new(), events: Vec::new(), free: Vec::new(), sequence: 0 }
    }

    pub(super) fn push(&mut self, time: Instant, what: Happening) {
        let nanos = time.saturating_duration_since(self.began).as_nanos();
        let nanos = u64::try_from(nanos).expect("a history takes hours, not centuries");
        self.sequence = self.sequence.checked_add(1).expect("a history has far fewer events");
        let place = self.free.pop().unwrap_or_else(|| {
            self.events.push(None);
            self.events.len() - 1
        });
        self.events[place] = Some(what);
        let place = u32::try_from(place).expect("there are no more places than events");
        self.turns.push(Reverse(Turn::new(nanos, self.sequence, place)));
    }

    pub(super) fn pop(&mut self) -> Option<(Instant, Happening)> {
        let Reverse(turn) = self.turns.pop()?;
        let what = self.events[turn.place()].take()?;
        self.free.push(turn.place());
        Some((self.began + Duration::from_nanos(turn.nanos()), what))
    }
}
