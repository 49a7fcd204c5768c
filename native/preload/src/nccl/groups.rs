//! Group calls (`ncclGroupStart` to `ncclGroupEnd`) in progress, by thread.
//!
//! A thread is identified by its thread pointer, because this object has no thread-local variables.

use core::arch::asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Most threads that are in a group at the same time.
const MOST: usize = 64;
/// Most operations of one group: an all-to-all of 2048 ranks.
const LONGEST: usize = 4096;

/// The calls of a thread since its group began.
pub(super) struct Group {
    /// The thread pointer; 0 if the place is free.
    thread: AtomicUsize,
    /// Only the thread itself uses the next fields.
    depth: UnsafeCell<u32>,
    count: UnsafeCell<usize>,
    operations: [AtomicU32; LONGEST],
}

// SAFETY: see `depth`; the rest is atomics.
unsafe impl Sync for Group {}

static GROUPS: [Group; MOST] = [const {
    Group {
        thread: AtomicUsize::new(0),
        depth: UnsafeCell::new(0),
        count: UnsafeCell::new(0),
        operations: [const { AtomicU32::new(0) }; LONGEST],
    }
}; MOST];

/// Number of used places: mostly 0.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// The address of the thread's control block, which is in the block's first word (psABI).
fn this_thread() -> usize {
    let thread;
    // SAFETY: every thread of a program with a libc has one.
    unsafe { asm!("mov {}, fs:0", out(reg) thread, options(nostack, pure, readonly, preserves_flags)) };
    thread
}

impl Group {
    /// The group that this thread is in.
    pub(super) fn of_this_thread() -> Option<&'static Group> {
        if TAKEN.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let thread = this_thread();
        GROUPS.iter().find(|group| group.thread.load(Ordering::Relaxed) == thread)
    }

    /// Enters one level. Returns whether there was a place.
    pub(super) fn begin() -> bool {
        if let Some(group) = Group::of_this_thread() {
            // SAFETY: of this thread.
            unsafe { *group.depth.get() += 1 };
            return true;
        }
        let thread = this_thread();
        let take =
            |group: &&Group| group.thread.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let Some(group) = GROUPS.iter().find(take) else { return false };
        TAKEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: of this thread from here on.
        unsafe {
            *group.depth.get() = 1;
            *group.count.get() = 0;
        }
        true
    }

    pub(super) fn is_outermost(&self) -> bool {
        // SAFETY: of this thread.
        unsafe { *self.depth.get() == 1 }
    }

    /// Leaves one level.
    pub(super) fn end(&self) {
        // SAFETY: of this thread.
        let depth = unsafe { &mut *self.depth.get() };
        *depth -= 1;
        if *depth == 0 {
            TAKEN.fetch_sub(1, Ordering::Relaxed);
            self.thread.store(0, Ordering::Relaxed);
        }
    }

    /// Adds an operation. Returns whether there was room.
    pub(super) fn add(&self, counter: u32) -> bool {
        // SAFETY: of this thread.
        let count = unsafe { &mut *self.count.get() };
        let Some(place) = self.operations.get(*count) else { return false };
        place.store(counter, Ordering::Relaxed);
        *count += 1;
        true
    }

    pub(super) fn operations(&self) -> &[AtomicU32] {
        // SAFETY: of this thread.
        self.operations.get(..unsafe { *self.count.get() }).unwrap_or(&[])
    }
}
