//! The layout of the table that the interposer and the supervisor share. A process counts in it what it starts on
//! NCCL's communicators, and the supervisor stops it with the table in front of its next call.
//!
//! It is a memfd like [`crate::sharing`]'s, with the same rules: the job can write to it, all zeroes are an empty
//! table, and a change of the layout needs a change of [`NAME`].
#![allow(missing_docs, reason = "fields have the names that NCCL gives them")]

use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// The name of the memfd; in /proc/PID/maps behind `/memfd:`.
pub const NAME: &CStr = c"rekindle-nccl-3";

/// Number of communicators, including those that have just ended. A power of two.
pub const MOST_COMMUNICATORS: usize = 1024;

/// Number of counters: one for each communicator, and two for each peer that it sends to or receives from.
pub const MOST_COUNTERS: usize = 16384;

/// Number of hash places for counters: a power of two, and more than there are counters.
pub const PLACES: usize = 32768;

/// [`Counter::kind`].
pub const COLLECTIVE: u32 = 0;
pub const SEND: u32 = 1;
pub const RECEIVE: u32 = 2;
/// The counter is not used: its communicator is [`REUSABLE`].
pub const NONE: u32 = 3;

/// [`Table::untracked`] and [`Communicator::untracked`]: there is no place for a communicator, a counter or a group call.
pub const FULL: u32 = 1;
/// A CUDA graph holds NCCL operations: its launches are not counted.
pub const CAPTURED: u32 = 2;
/// A communicator of a kind that is not known, or an operation that NCCL did not start.
pub const UNKNOWN: u32 = 4;

/// [`Communicator::state`].
pub const FREE: u32 = 0;
pub const LIVE: u32 = 1;
pub const ENDED: u32 = 2;
/// It ended long ago: the place can be used again.
pub const REUSABLE: u32 = 3;

/// [`Communicator::pending`]: NCCL starts an operation on a thread of its own.
pub const STARTING: u32 = 1;
/// NCCL makes the communicator on a thread of its own.
pub const MAKING: u32 = 2;

/// One rank of a communicator.
#[derive(Debug)]
#[repr(C)]
pub struct Communicator {
    /// ncclComm_t.
    pub handle: AtomicU64,
    /// The same number in all its ranks: from the unique id, or from the communicator that it was split from.
    pub id: [AtomicU64; 2],
    pub rank: AtomicU32,
    /// 0 as long as it is not known.
    pub ranks: AtomicU32,
    pub state: AtomicU32,
    /// Number of splits.
    pub splits: AtomicU32,
    /// Why its counts are not complete, for as long as it lives.
    pub untracked: AtomicU32,
    /// What a call that did not block has left to NCCL; 0 once the program has seen that it is done.
    pub pending: AtomicU32,
    /// [`Table::endings`] when it ended.
    pub ended: AtomicU32,
    pub unused: AtomicU32,
}

/// Operations of one kind that one rank has started on one communicator.
#[derive(Debug)]
#[repr(C)]
pub struct Counter {
    /// Index of the communicator.
    pub communicator: AtomicU32,
    pub kind: AtomicU32,
    /// The other rank, for sends and receives.
    pub peer: AtomicU32,
    pub unused: AtomicU32,
    /// Number of started operations.
    pub started: AtomicU64,
    /// The number after the call that waits; 0 if none waits.
    pub wanted: AtomicU64,
    /// The largest allowed number while the gate is closed.
    pub limit: AtomicU64,
}

/// The whole table.
#[derive(Debug)]
#[repr(C)]
pub struct Table {
    /// The process, as it sees itself; 0 until the table may be read.
    pub pid: AtomicI32,
    pub untracked: AtomicU32,
    /// 0: open. While it is closed, a call that would exceed [`Counter::limit`] waits.
    pub closed: AtomicU32,
    /// Threads that are inside a call of NCCL, and do not wait in front of it.
    pub inside: AtomicU32,
    /// CLOCK_MONOTONIC in nanoseconds. After this time the gate counts as open, because the supervisor may have died.
    pub until: AtomicU64,
    /// The thread that aborts communicators, as the process sees it; 0 where there is none.
    pub aborter: AtomicI32,
    /// 1: the process is about to be killed, and all that its kernels wait for is to be called off. A futex.
    pub abort: AtomicU32,
    /// 1: that was done.
    pub aborted: AtomicU32,
    /// Threads that are inside a call that makes or ends a communicator. They are counted in `inside` too.
    pub making: AtomicU32,
    /// Odd while places are being freed.
    pub changes: AtomicU32,
    /// Number of communicators that have ended.
    pub endings: AtomicU32,
    /// Communicators that live and have no place.
    pub unregistered: AtomicU32,
    pub communicators: [Communicator; MOST_COMMUNICATORS],
    /// Counters in use, without a gap.
    pub counters_used: AtomicU32,
    /// Index of the counter at this place, plus one; 0 if there is none.
    pub places: [AtomicU32; PLACES],
    pub counters: [Counter; MOST_COUNTERS],
}
