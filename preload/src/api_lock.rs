//! The driver's lock of its API, as threads of the program come to it.
//!
//! In libcuda (580, seen) each call of the API takes one pthread_rwlock_t for reading, and cuCheckpointProcessLock takes it for
//! writing. glibc hands such a lock over as it is unlocked (`__pthread_rwlock_wrunlock`): all readers that wait have it
//! then, whether they run or not. Between the two times that a snapshot locks CUDA ([`crate::sharing`]) all threads are
//! stopped. One that was in the middle of waiting would get the lock, keep it, and the second time never come.
//!
//! So while the supervisor says that CUDA is locked, threads that find the lock taken wait beside it: they look again every
//! now and then. At any other time they wait as they always did.

use core::ffi::c_void;
use core::sync::atomic::{AtomicI32, Ordering};

use crate::{got, libc, sharing, sys};

const EBUSY: i32 = 16;

/// How long until the next look, while a snapshot has the lock.
const PAUSE_NS: u64 = 100_000;

/// Leads libcuda's calls of pthread_rwlock_rdlock to us, in a process that shares memory.
pub(crate) fn watch() {
    if libc::find_read_locks() {
        got::redirect_for_good(b"pthread_rwlock_rdlock\0", (read_lock as *const ()).addr());
    }
}

/// pthread_rwlock_rdlock(3).
unsafe extern "C" fn read_lock(lock: *mut c_void) -> i32 {
    // SAFETY: the caller's lock.
    match unsafe { libc::try_read_lock(lock) } {
        EBUSY if sharing::is_locked() => {}
        // SAFETY: as above.
        EBUSY => return unsafe { libc::read_lock(lock) },
        code => return code,
    }
    if has_it_for_writing(lock) {
        // Is told so.
        // SAFETY: as above.
        return unsafe { libc::read_lock(lock) };
    }
    loop {
        sys::sleep(PAUSE_NS);
        // SAFETY: as above.
        match unsafe { libc::try_read_lock(lock) } {
            EBUSY => {}
            code => return code,
        }
    }
}

/// Whether the calling thread does, by `__cur_writer` of glibc's `struct __pthread_rwlock_arch_t` (x86-64, since 2.25). Not by
/// pthread_rwlock_timedrdlock, which is one more that waits until it sees that its time is over.
fn has_it_for_writing(lock: *mut c_void) -> bool {
    const CUR_WRITER: usize = 24;
    // SAFETY: within the lock, which has 56 bytes, and aligned.
    let writer = unsafe { lock.cast::<AtomicI32>().byte_add(CUR_WRITER).as_ref() };
    writer.is_some_and(|writer| writer.load(Ordering::Relaxed) == sys::thread())
}
