//! What a lock closes: every CUDA call of the job passes it. As with the driver it is a lock of libc's, which calls
//! take for reading.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

struct Gate(UnsafeCell<libc::pthread_rwlock_t>);

// SAFETY: only the functions of libc touch it, which are made for several threads.
unsafe impl Sync for Gate {}

static GATE: Gate = Gate(UnsafeCell::new(libc::PTHREAD_RWLOCK_INITIALIZER));

unsafe extern "C" {
    // Not in the crate.
    fn pthread_rwlock_timedwrlock(lock: *mut libc::pthread_rwlock_t, until: *const libc::timespec) -> c_int;
}

/// A CUDA call under way.
#[derive(Debug)]
pub(crate) struct Inside(());

/// Waits while the gate is closed.
pub(crate) fn enter() -> Inside {
    // SAFETY: initialised, and never destroyed.
    let code = unsafe { libc::pthread_rwlock_rdlock(GATE.0.get()) };
    assert_eq!(code, 0, "pthread_rwlock_rdlock");
    Inside(())
}

impl Drop for Inside {
    fn drop(&mut self) {
        // SAFETY: this thread has it for reading.
        unsafe { libc::pthread_rwlock_unlock(GATE.0.get()) };
    }
}

/// Closes the gate and waits for the calls under way; gives up where they take longer than `timeout` (None: for ever).
/// Returns whether it is closed.
pub(crate) fn close(timeout: Option<Duration>) -> bool {
    let timeout = timeout.unwrap_or(Duration::from_secs(1 << 30));
    let until = (SystemTime::now() + timeout).duration_since(UNIX_EPOCH).unwrap_or_default();
    let until = libc::timespec {
        tv_sec: until.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: until.subsec_nanos().into(),
    };
    // SAFETY: initialised, and never destroyed; a live local.
    unsafe { pthread_rwlock_timedwrlock(GATE.0.get(), &raw const until) == 0 }
}

/// Lets calls pass. By the thread that closed it.
pub(crate) fn open() {
    // SAFETY: this thread has it for writing.
    unsafe { libc::pthread_rwlock_unlock(GATE.0.get()) };
}
