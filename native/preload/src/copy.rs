//! The driver's copies between its staging buffers and the landing region.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::helper::{self, JOB, MOST_THREADS};
use crate::job::Copy;
use crate::lock::Lock;
use crate::stream::Way;
use crate::{armed, cpu, landing, libc, sys};

/// The least copy that is split. The driver's pieces are 2 MiB, a few of them 0.8 to 6; below this the handing out costs
/// more than it brings.
const LARGE: usize = 256 << 10;

/// Copies further apart than this are not of one burst: then the machine's features are read again.
const BURST_NS: u64 = 100_000_000;

/// Held during a copy: there is one job at a time.
static COPYING: Lock = Lock::new();
static LAST: AtomicU64 = AtomicU64::new(0);
static THREADS: AtomicUsize = AtomicUsize::new(1);
/// The copy out of the staging buffers, by name; the copy into them is the same without the flush.
static WAY_OUT: AtomicUsize = AtomicUsize::new(0);

/// The memcpy of libcuda while there is a region: of that region, and all others.
///
/// # Safety
/// As for memcpy(3).
pub(crate) unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe {
        if length < LARGE || !split(to, from, length) {
            libc::copy(to, from, length);
        }
    }
    to
}

/// Copies on several threads, where this is a copy for it. Returns whether it did.
///
/// # Safety
/// As for memcpy(3).
unsafe fn split(to: *mut u8, from: *const u8, length: usize) -> bool {
    let pid = sys::pid();
    let Some(region) = landing::region(pid) else { return false };
    let (to, from) = (to.expose_provenance(), from.expose_provenance());
    let holds = |at: usize| region.start <= at && at.checked_add(length).is_some_and(|end| end <= region.end);
    let apart = to.abs_diff(from) >= length;
    if holds(to) == holds(from) || !apart {
        return false;
    }
    // Two threads of a driver that copy at once: the second does it alone.
    let Some(_copying) = COPYING.take(pid) else { return false };
    let now = sys::now();
    if now.wrapping_sub(LAST.swap(now, Ordering::Relaxed)) > BURST_NS {
        look_at_machine();
    }
    let mut way = Way::from_word(WAY_OUT.load(Ordering::Relaxed));
    way.flush_source &= holds(to);
    // SAFETY: the caller's promise; the copy is finished below.
    unsafe { JOB.publish(Copy { to, from, length, way }) };
    helper::muster(THREADS.load(Ordering::Relaxed).saturating_sub(1), pid);
    JOB.work();
    JOB.finish();
    true
}

/// Half of the CPUs, as the other half are their hyperthreads on most machines, which add nothing to a copy.
fn look_at_machine() {
    let threads = match armed::wanted_threads() {
        0 => sys::cpus() / 2,
        wanted => wanted,
    };
    THREADS.store(threads.clamp(1, MOST_THREADS), Ordering::Relaxed);
    let way = Way { level: cpu::level(), flush_source: cpu::has_flush() };
    WAY_OUT.store(way.to_word(), Ordering::Relaxed);
}
