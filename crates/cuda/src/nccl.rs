//! The operations that a job's processes have started on NCCL's communicators, and the gate in front of their next
//! calls.
//!
//! The interposer in each process counts (`native/preload/src/nccl.rs`). This module reads the counts and sets the
//! limits. The caller decides with which limits all ranks reach one point.
//!
//! Invariant: the tables are in the job's memory. Their content is only compared and counted, and not trusted
//! otherwise.

use std::fmt::Display;
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use rekindle_abi::nccl::{self as table, Table};
use rekindle_os::{process, ptrace};
use rustix::thread::futex;
use serde::{Deserialize, Serialize};

use crate::job_table::JobTable;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Collectives of a communicator.
    Collective,
    /// Sends to one peer.
    Send,
    /// Receives from one peer.
    Receive,
}

/// A communicator of one process, as one of its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Communicator {
    /// The same number in all ranks.
    pub id: [u64; 2],
    /// The rank of this process.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// The program has destroyed or aborted it.
    pub has_ended: bool,
}

/// The operations of one kind that one rank has started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// Its place in the process's table.
    pub place: usize,
    /// Index in [`Counts::communicators`].
    pub communicator: usize,
    /// What is counted.
    pub kind: Kind,
    /// The other rank of a send or receive.
    pub peer: u32,
    /// Number of started operations.
    pub started: u64,
    /// The number after the call that waits in front of the gate.
    pub wanted: Option<u64>,
}

/// The operations that one process has started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Its communicators, including ended ones.
    pub communicators: Vec<Communicator>,
    /// Its counters.
    pub counters: Vec<Counter>,
    /// Threads that are in a call of NCCL now.
    pub inside: u32,
    /// Of those, threads that make or end a communicator.
    #[serde(default)]
    pub making: u32,
    /// Communicators that do not block, for which NCCL is starting something on a thread of its own, as far as the
    /// program knows.
    #[serde(default)]
    pub pending: u32,
}

/// The counts of one process.
#[derive(Debug)]
pub struct Ranks {
    pid: i32,
    table: JobTable<Table>,
}

impl Ranks {
    /// The counts of process `pid`, as we see it. None if the interposer has seen no NCCL in it.
    ///
    /// # Errors
    /// When its table cannot be read, or is of another version of the interposer.
    pub fn of(pid: i32) -> io::Result<Option<Ranks>> {
        let table = JobTable::of(pid, "rekindle-nccl-", table::NAME)?;
        let table = table.filter(|table: &JobTable<Table>| table.get().pid.load(Acquire) != 0);
        Ok(table.map(|table| Ranks { pid, table }))
    }

    /// The process, as we see it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The process, as it sees itself.
    #[must_use]
    pub fn inner(&self) -> i32 {
        self.table.get().pid.load(Relaxed)
    }

    /// Why its counts are not complete; none if they are.
    #[must_use]
    pub fn untracked(&self) -> Option<&'static str> {
        let table = self.table.get();
        let mut why = table.untracked.load(Relaxed);
        if table.unregistered.load(Relaxed) != 0 {
            why |= table::FULL;
        }
        for entry in &table.communicators {
            if entry.state.load(Relaxed) == table::LIVE {
                why |= entry.untracked.load(Relaxed);
            }
        }
        let reasons = [
            (table::CAPTURED, "a CUDA graph contains NCCL operations"),
            (table::UNKNOWN, "it uses NCCL in a way that is not counted"),
            (table::FULL, "it has more communicators or peers than can be counted"),
        ];
        reasons.into_iter().find(|(bit, _)| why & bit != 0).map(|(_, reason)| reason)
    }

    /// What it has started until now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let table = self.table.get();
        // Read before the counters: a call that has ended by then has been counted.
        let (inside, changes) = (table.inside.load(SeqCst), table.changes.load(SeqCst));
        let mut indices = Vec::new();
        let mut communicators = Vec::new();
        for entry in &table.communicators {
            let state = entry.state.load(Acquire);
            // A communicator whose rank is not known yet is being made, and has no counts.
            let is_known = match state {
                table::FREE | table::REUSABLE => false,
                table::LIVE => entry.ranks.load(Acquire) != 0,
                _ => true,
            };
            indices.push(if is_known { communicators.len() } else { usize::MAX });
            if is_known {
                let [a, b] = &entry.id;
                communicators.push(Communicator {
                    id: [a.load(Relaxed), b.load(Relaxed)],
                    rank: entry.rank.load(Relaxed),
                    ranks: entry.ranks.load(Relaxed),
                    has_ended: state == table::ENDED,
                });
            }
        }
        let read = |(place, entry): (usize, &table::Counter)| {
            let communicator = *indices.get(usize::try_from(entry.communicator.load(Relaxed)).ok()?)?;
            let kind = match entry.kind.load(Relaxed) {
                table::COLLECTIVE => Kind::Collective,
                table::SEND => Kind::Send,
                table::RECEIVE => Kind::Receive,
                _ => return None,
            };
            let wanted = Some(entry.wanted.load(SeqCst)).filter(|wanted| *wanted != 0);
            let (peer, started) = (entry.peer.load(Relaxed), entry.started.load(SeqCst));
            (communicator < communicators.len()).then_some(Counter { place, communicator, kind, peer, started, wanted })
        };
        let used = usize::try_from(table.counters_used.load(Acquire)).unwrap_or(usize::MAX);
        let counters = table.counters.iter().enumerate().take(used).filter_map(read).collect();
        // After them, too: a call that began meanwhile may have counted where that was read already. The same applies if
        // places were freed meanwhile.
        let is_torn = changes % 2 != 0 || changes != table.changes.load(SeqCst);
        let inside = inside.max(table.inside.load(SeqCst)).max(is_torn.into());
        // Read last: a call that has returned by then has said what it left to NCCL.
        let is_pending =
            |entry: &&table::Communicator| entry.state.load(Acquire) == table::LIVE && entry.pending.load(SeqCst) != 0;
        let pending = table.communicators.iter().filter(is_pending).count();
        let pending = u32::try_from(pending).unwrap_or(u32::MAX);
        Counts { communicators, counters, inside, making: table.making.load(SeqCst), pending }
    }

    /// Closes the gate for at most `time`: calls that would exceed their limits wait. Until [`Ranks::limit`] sets them,
    /// the limits are those of the last time.
    pub fn close(&self, time: Duration) {
        let table = self.table.get();
        let until = now_in(self.pid).saturating_add(time).as_nanos();
        table.until.store(u64::try_from(until).unwrap_or(u64::MAX), SeqCst);
        table.closed.store(1, SeqCst);
    }

    /// Lets the counter at `place` rise to `limit` while the gate is closed.
    pub fn limit(&self, place: usize, limit: u64) {
        if let Some(counter) = self.table.get().counters.get(place) {
            counter.limit.store(limit, SeqCst);
        }
    }

    /// Whether the gate was closed and not opened since. Its time may be over.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.table.get().closed.load(SeqCst) != 0
    }

    /// Opens the gate.
    pub fn open(&self) {
        self.table.get().closed.store(0, SeqCst);
    }

    /// Whether it has a communicator with other processes, or may have one.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        let is_live = |entry: &table::Communicator| entry.state.load(Relaxed) == table::LIVE;
        self.table.get().communicators.iter().any(|entry| is_live(entry) && entry.ranks.load(Relaxed) > 1)
    }

    /// Stops all threads of the process, for good, and calls off what its NCCL kernels wait for on the GPU, so that they
    /// end within milliseconds. Only for a process that is killed next: its communicators can no longer be used, and what
    /// their last operations left in memory is wrong.
    ///
    /// # Errors
    /// When the threads do not stop, when there is no thread of the interposer for this, or none that answers within
    /// `limit`. The process may be stopped then.
    pub fn abort(&self, limit: Duration) -> io::Result<()> {
        let (table, deadline) = (self.table.get(), Instant::now() + limit);
        let aborter = table.aborter.load(Acquire);
        let thread = process::threads(self.pid).into_iter().find(|tid| process::inner_pid(*tid) == Some(aborter));
        let thread = thread.ok_or_else(|| io::Error::other("the interposer has no thread in the process"))?;
        ptrace::stop(self.pid, limit)?;
        let _alone = ptrace::Alone::run(thread, limit)?;
        table.abort.store(1, SeqCst);
        // Not private: the waiter is another process.
        let _ = futex::wake(&table.abort, futex::Flags::empty(), 1);
        while table.aborted.load(Acquire) == 0 {
            if Instant::now() > deadline || process::has_ended(self.pid) {
                return Err(io::Error::other("the interposer's thread does not answer"));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// How often to look whether a request was carried out.
const PAUSE: Duration = Duration::from_micros(200);

/// CLOCK_MONOTONIC as process `pid` reads it. CRIU restores a job into a time namespace, so that this clock continues
/// from where it was in the image; after a reboot it may be ahead of ours by days.
fn now_in(pid: i32) -> Duration {
    let ours = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    let ours = i128::try_from(ours.as_nanos()).unwrap_or(0);
    let nanoseconds = ours - offset(std::process::id()) + offset(pid);
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(0))
}

/// How far that of a process's time namespace is ahead of the machine's, in nanoseconds: 0 where the kernel has no such
/// namespaces.
fn offset(pid: impl Display) -> i128 {
    // The kernel shows the offsets for the children of a process. Only a process that has just asked for a namespace for
    // them is in another one itself.
    let namespace = |name: &str| std::fs::read_link(format!("/proc/{pid}/ns/{name}")).ok();
    if namespace("time") != namespace("time_for_children") {
        return 0;
    }
    let text = process::text(pid, "timens_offsets").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("monotonic "));
    let mut numbers = line.unwrap_or_default().split_whitespace().map(|number| number.parse::<i64>().unwrap_or(0));
    let mut next = || i128::from(numbers.next().unwrap_or(0));
    next() * 1_000_000_000 + next()
}

#[cfg(test)]
mod tests;
