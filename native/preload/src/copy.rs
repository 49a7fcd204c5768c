//! The driver's copies between its staging buffers and the landing region.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::helper::{self, JOB, MOST_THREADS};
use crate::job::Copy;
use crate::lock::Lock;
use crate::stream::Way;
use crate::{armed, cpu, landing, libc, sys};

/// Minimum size of a copy that is split. The driver's pieces are 2 MiB, a few of them 0.8 to 6; for smaller ones,
/// splitting costs more than it gains.
const LARGE: usize = 256 << 10;

/// Copies further apart than this are not in one burst: then the machine's features are determined again.
const BURST_NS: u64 = 100_000_000;

/// Held during a copy, because there is only one job at a time.
static COPYING: Lock = Lock::new();
static LAST: AtomicU64 = AtomicU64::new(0);
static THREADS: AtomicUsize = AtomicUsize::new(1);
/// How to copy out of the staging buffers; copying into them is the same without the flush.
static WAY_OUT: AtomicUsize = AtomicUsize::new(0);

/// Replaces libcuda's memcpy while there is a region, for that region and for all other copies.
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

/// Copies on several threads, if the copy is suitable. Returns whether it did.
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
    // If two threads of a driver copy at the same time, the second one copies alone.
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

/// Uses half of the CPUs: the other half are mostly hyperthreads of the same cores, which do not make a copy faster. The
/// processes that copy at the same time divide them.
fn look_at_machine() {
    let threads = match armed::wanted_threads() {
        0 => (sys::cpus() / 2).checked_div(armed::shares()).unwrap_or(0),
        wanted => wanted,
    };
    THREADS.store(threads.clamp(1, MOST_THREADS), Ordering::Relaxed);
    let way = Way { level: cpu::level(), flush_source: cpu::has_flush() };
    WAY_OUT.store(way.to_word(), Ordering::Relaxed);
}
