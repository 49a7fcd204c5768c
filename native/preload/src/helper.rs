//! Helper threads: created when a burst of copies begins, ended 2 ms after it.
//!
//! They are created by the bare system call. pthread_create allocates and takes locks of the libc, and the threads that
//! may have those are stopped. A helper has no thread pointer and no signals, and uses only [`JOB`] and the kernel.
//!
//! A thread that is created in a stopped process stops before its first instruction, and one that CRIU restored
//! continues where it was: neither is relied on, and both end once they find nothing to do.

use core::cell::UnsafeCell;
use core::hint::spin_loop;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::job::Job;
use crate::sys;

/// Maximum number of threads: helpers and the driver's own. More than eight are no faster (measured with 12 and 15 on
/// 16 cores).
pub(crate) const MOST_THREADS: usize = 8;

/// How long a helper looks for work. The copies of a snapshot are less than 100 us apart.
const PATIENCE_NS: u64 = 2_000_000;

/// Size of a stack: the loop of a helper needs a few hundred bytes, and it gets no signals.
const STACK: usize = 16 << 10;

#[derive(Debug)]
#[repr(align(4096))]
struct Stack(#[allow(dead_code, reason = "memory for a thread")] UnsafeCell<[MaybeUninit<u8>; STACK]>);

// SAFETY: a stack is used by one thread: the slot beside it says whether it is.
unsafe impl Sync for Stack {}

static STACKS: [Stack; MOST_THREADS - 1] =
    [const { Stack(UnsafeCell::new([MaybeUninit::uninit(); STACK])) }; MOST_THREADS - 1];
/// Nonzero while a thread uses the stack of this number. The kernel sets it to zero when the thread has ended.
static TAKEN: [AtomicU32; MOST_THREADS - 1] = [const { AtomicU32::new(0) }; MOST_THREADS - 1];
/// The process that the helpers belong to: a forked child has none.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// The job of the helpers.
pub(crate) static JOB: Job = Job::new();

/// Starts helpers until there are `count`, as far as possible. Only the thread that holds the copy lock calls it.
pub(crate) fn muster(count: usize, pid: i32) {
    if OWNER.swap(pid, Ordering::Relaxed) != pid {
        TAKEN.iter().for_each(|taken| taken.store(0, Ordering::Relaxed));
    }
    let missing = |taken: &AtomicU32| taken.load(Ordering::Acquire) == 0;
    if !TAKEN.iter().take(count).any(missing) {
        return;
    }
    // A helper inherits the mask, so no signal of the job can be delivered to it.
    let mask = sys::set_signal_mask(u64::MAX);
    for (taken, stack) in TAKEN.iter().zip(&STACKS).take(count) {
        if !missing(taken) {
            continue;
        }
        taken.store(1, Ordering::Relaxed);
        let end = stack.0.get().expose_provenance() + STACK;
        // SAFETY: the slot says that the stack is free; `main` keeps to what it promises.
        if unsafe { sys::start_thread(end, taken.as_ptr().expose_provenance(), main) }.is_err() {
            // There are too many threads, or a filter: fewer helpers are enough.
            taken.store(0, Ordering::Relaxed);
            break;
        }
    }
    sys::set_signal_mask(mask);
}

extern "C" fn main() -> ! {
    sys::name_thread(c"rekindle-copy");
    let mut idle_since = sys::now();
    loop {
        if JOB.work() {
            idle_since = sys::now();
        }
        for _ in 0..64 {
            spin_loop();
        }
        // A helper that was stopped for long ends here too, even if the clock has jumped.
        if sys::now().wrapping_sub(idle_since) > PATIENCE_NS {
            sys::end_thread();
        }
        // If there are fewer CPUs than threads, let another one run.
        sys::yield_now();
    }
}
