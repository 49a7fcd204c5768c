//! One copy, cut into chunks that any thread can take.
//!
//! No thread is relied on: a helper that never runs takes no chunk, and the others do its share. `ticket` contains the
//! number of the copy and its next chunk in one word. A thread reads the parameters of the copy and then takes a chunk
//! by a compare-and-swap of exactly the ticket that it saw. Before the parameters of the next copy are written, the
//! ticket is replaced by a closed one, which has no chunks. Numbers of copies repeat after 2^32 of them, which no thread
//! sleeps through.

use core::hint::spin_loop;
use core::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use crate::stream::{self, Way};
use crate::sys;

/// 32 KiB: 64 chunks per piece of the driver, so that eight threads finish within 6 us (one chunk) of each other; and a
/// multiple of the page size, so that the prefetchers of two cores do not overlap.
const CHUNK: usize = 32 << 10;

/// The next chunk of a copy whose parameters are being written: 128 TiB from its beginning.
const CLOSED: u64 = 0xffff_ffff;

/// Parameters of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to: usize,
    pub(crate) from: usize,
    pub(crate) length: usize,
    pub(crate) way: Way,
}

/// A word on its own cache line, because each is written by one side and polled by others.
#[derive(Debug)]
#[repr(align(64))]
struct Line<T>(T);

/// The copy in progress.
#[derive(Debug)]
pub(crate) struct Job {
    ticket: Line<AtomicU64>,
    /// Number of finished chunks, whose stores are visible.
    done: Line<AtomicUsize>,
    to: Line<AtomicUsize>,
    from: AtomicUsize,
    length: AtomicUsize,
    way: AtomicUsize,
}

impl Job {
    pub(crate) const fn new() -> Job {
        Job {
            ticket: Line(AtomicU64::new(0)),
            done: Line(AtomicUsize::new(0)),
            to: Line(AtomicUsize::new(0)),
            from: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
            way: AtomicUsize::new(0),
        }
    }

    /// Begins a copy. The previous one must be finished; there is one caller at a time.
    ///
    /// # Safety
    /// Memory as for memcpy(3), untouched by others until [`Job::finish`] has returned.
    pub(crate) unsafe fn publish(&self, copy: Copy) {
        let number = self.prepare(copy);
        self.ticket.0.store(number << 32, Ordering::Release);
    }

    /// Writes the parameters of a copy; returns its number. Nobody can take a chunk yet.
    fn prepare(&self, copy: Copy) -> u64 {
        let number = (self.ticket.0.load(Ordering::Relaxed) >> 32).wrapping_add(1) & 0xffff_ffff;
        self.ticket.0.store(number << 32 | CLOSED, Ordering::Relaxed);
        // A thread that sees a new parameter sees that the old ticket is over: the other fence is in `take_one`.
        fence(Ordering::Release);
        self.done.0.store(0, Ordering::Relaxed);
        self.to.0.store(copy.to, Ordering::Relaxed);
        self.from.store(copy.from, Ordering::Relaxed);
        self.length.store(copy.length, Ordering::Relaxed);
        self.way.store(copy.way.to_word(), Ordering::Relaxed);
        number
    }

    /// Copies chunks until none is left. Returns whether there was one.
    pub(crate) fn work(&self) -> bool {
        let mut count = 0;
        while self.take_one() {
            count += 1;
        }
        if count > 0 {
            stream::settle();
            self.done.0.fetch_add(count, Ordering::Release);
        }
        count > 0
    }

    fn take_one(&self) -> bool {
        loop {
            let ticket = self.ticket.0.load(Ordering::Acquire);
            let at = (ticket & 0xffff_ffff) as usize * CHUNK;
            let (to, from) = (self.to.0.load(Ordering::Relaxed), self.from.load(Ordering::Relaxed));
            let length = self.length.load(Ordering::Relaxed);
            let way = Way::from_word(self.way.load(Ordering::Relaxed));
            if at >= length {
                return false;
            }
            fence(Ordering::Acquire);
            if self.ticket.0.compare_exchange(ticket, ticket + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                let (to, from) = (with_exposed_provenance_mut(to + at), with_exposed_provenance(from + at));
                // SAFETY: the promise made to `publish`; this chunk is ours alone, and the copy is not over before it
                // is done.
                unsafe { stream::copy(way, to, from, CHUNK.min(length - at)) };
                return true;
            }
        }
    }

    /// Waits until all chunks taken by others are done. Each of these threads runs: in a stopped process, the only
    /// threads that do not are those that have not started, or that were stopped together with this one.
    pub(crate) fn finish(&self) {
        let chunks = self.length.load(Ordering::Relaxed).div_ceil(CHUNK);
        while self.done.0.load(Ordering::Acquire) < chunks {
            for _ in 0..64 {
                spin_loop();
            }
            // If there are more threads than CPUs, let another one run.
            sys::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::cpu;

    #[test]
    fn nothing_is_copied_while_the_parameters_are_written() {
        let (job, from, mut to) = (Job::new(), vec![7; 4 * CHUNK], vec![0; 4 * CHUNK]);
        let mut copy = |length| Copy {
            to: to.as_mut_ptr().expose_provenance(),
            from: from.as_ptr().expose_provenance(),
            length,
            way: Way { level: cpu::level(), flush_source: false },
        };
        // SAFETY: both vectors outlive the copy.
        unsafe { job.publish(copy(2 * CHUNK)) };
        assert!(job.work());
        job.finish();
        // A helper comes while a longer one begins: it would be the third chunk of the first one.
        job.prepare(copy(4 * CHUNK));
        assert!(!job.work());
        assert!(to[2 * CHUNK..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn every_copy_is_whole_with_helpers_that_come_and_go() {
        let (job, over) = (Job::new(), AtomicBool::new(false));
        let from: Vec<u8> = (0..5 * CHUNK + 777).map(|at| (at * 31 % 251) as u8).collect();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        job.work();
                    }
                });
            }
            for round in 0..2000 {
                let length = (round * 977) % from.len();
                let mut to = vec![0; length + 1];
                let (way, start) = (Way { level: cpu::level(), flush_source: round % 2 == 0 }, from.len() - length);
                let copy = Copy {
                    to: to.as_mut_ptr().expose_provenance(),
                    from: from.as_ptr().expose_provenance() + start,
                    length,
                    way,
                };
                // SAFETY: both vectors outlive the copy.
                unsafe { job.publish(copy) };
                job.work();
                job.finish();
                assert!(to[..length] == from[start..] && to[length] == 0, "round {round}");
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
