//! Places in the table for communicators and counters, and when they are used again.
//!
//! A communicator that one rank has destroyed can still live in another one, whose counts are compared with those of
//! the first. So the place of an ended communicator stays as it is until many others have ended after it. Then all such
//! places are freed together, with their counters. A program that makes a communicator for each step needs no more
//! places than this. If there is no place left, those that have just ended are freed too: a rank that still has such a
//! communicator then finds no other rank of it, and the supervisor locks the ranks by turns.
//!
//! Only a thread that has the right to make entries calls these functions. The supervisor sees by
//! [`Table::changes`] that places were freed while it read.

use core::sync::atomic::{AtomicU32, Ordering};

use super::probe;
use rekindle_abi::nccl::{
    Communicator, ENDED, FREE, LIVE, MOST_COMMUNICATORS, MOST_COUNTERS, NONE, PLACES, REUSABLE, Table,
};

/// Most communicators that live or have ended, before places are freed. A call finds its communicator after few steps
/// as long as a quarter of the table is free.
const MOST_USED: usize = MOST_COMMUNICATORS / 4 * 3;

/// How many others must have ended after a communicator before its place is freed.
const AGE: u32 = 256;

/// Where the search for a free counter begins.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// The number by which a counter is found.
pub(super) fn number(communicator: u32, kind: u32, peer: u32) -> u64 {
    (u64::from(communicator) << 34) | (u64::from(peer) << 2) | u64::from(kind)
}

/// A place for the communicator with this handle.
pub(super) fn free_communicator(table: &'static Table, handle: u64) -> Option<&'static Communicator> {
    let is_used = |entry: &&Communicator| matches!(entry.state.load(Ordering::Relaxed), LIVE | ENDED);
    if table.communicators.iter().filter(is_used).count() >= MOST_USED {
        free(table, AGE);
    }
    let find = || {
        let mut all = probe(handle >> 4, MOST_COMMUNICATORS).filter_map(|at| table.communicators.get(at));
        all.find(|entry| matches!(entry.state.load(Ordering::Relaxed), FREE | REUSABLE))
    };
    find().or_else(|| {
        free(table, 0);
        find()
    })
}

/// Whether there was a communicator with this handle that has ended.
pub(super) fn has_ended(table: &Table, handle: u64) -> bool {
    let state = |entry: &Communicator| entry.state.load(Ordering::Acquire);
    let all = probe(handle >> 4, MOST_COMMUNICATORS).filter_map(|at| table.communicators.get(at));
    all.take_while(|entry| state(entry) != FREE)
        .any(|entry| matches!(state(entry), ENDED | REUSABLE) && entry.handle.load(Ordering::Relaxed) == handle)
}

/// Index of a counter that nobody uses, with the count 0.
pub(super) fn free_counter(table: &Table) -> Option<u32> {
    let new = table.counters_used.load(Ordering::Relaxed);
    if (new as usize) < MOST_COUNTERS {
        let entry = table.counters.get(new as usize)?;
        entry.kind.store(NONE, Ordering::Relaxed);
        table.counters_used.store(new + 1, Ordering::Release);
        return Some(new);
    }
    let find = || {
        let first = NEXT.load(Ordering::Relaxed) as usize;
        let at = (0..MOST_COUNTERS)
            .map(|step| (first + step) & (MOST_COUNTERS - 1))
            .find(|at| table.counters.get(*at).is_some_and(|entry| entry.kind.load(Ordering::Relaxed) == NONE))?;
        NEXT.store(at as u32 + 1, Ordering::Relaxed);
        Some(at as u32)
    };
    find().or_else(|| {
        free(table, 0);
        find()
    })
}

/// Frees the places of communicators that have ended, if at least `age` others have ended since.
fn free(table: &Table, age: u32) {
    let now = table.endings.load(Ordering::Relaxed);
    table.changes.fetch_add(1, Ordering::SeqCst);
    for entry in &table.communicators {
        if entry.state.load(Ordering::Relaxed) == ENDED && now.wrapping_sub(entry.ended.load(Ordering::Relaxed)) >= age
        {
            entry.state.store(REUSABLE, Ordering::Release);
        }
    }
    for place in &table.places {
        place.store(0, Ordering::Relaxed);
    }
    for (at, entry) in table.counters.iter().enumerate().take(table.counters_used.load(Ordering::Relaxed) as usize) {
        let kind = entry.kind.load(Ordering::Relaxed);
        let (owner, peer) = (entry.communicator.load(Ordering::Relaxed), entry.peer.load(Ordering::Relaxed));
        let owned = table.communicators.get(owner as usize).map(|owner| owner.state.load(Ordering::Relaxed));
        if kind == NONE || !matches!(owned, Some(LIVE | ENDED)) {
            entry.kind.store(NONE, Ordering::Release);
            for number in [&entry.started, &entry.wanted, &entry.limit] {
                number.store(0, Ordering::Relaxed);
            }
            continue;
        }
        let mut places = probe(number(owner, kind, peer), PLACES).filter_map(|at| table.places.get(at));
        if let Some(place) = places.find(|place| place.load(Ordering::Relaxed) == 0) {
            place.store(at as u32 + 1, Ordering::Release);
        }
    }
    table.changes.fetch_add(1, Ordering::SeqCst);
}
