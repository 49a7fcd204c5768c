//! What a lock closes: every CUDA call of the job passes it. As with the driver it is a lock of libc's, which calls
//! take for reading.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

struct Gate(UnsafeCell<libc::pthread_rwlock_t>);

// SAFETY: only the functions of libc touch it, which are made for several threads.
unsafe impl Sync for Gate {}

static GATE: Gate = Gate(UnsafeCell::new(libc::PTHREAD_RWLOCK_INITIALIZER));

unsafe extern "C" {
    // Not in the crate.
    fn pthread_rwlock_timedwrlock(lock: *mut libc::pthread_rwlock_t, until: *const libc::timespec) -> c_int;
}

/// NVML's own, of a process that initialised NVML first; null if there is none.
static OF_NVML: AtomicPtr<libc::pthread_rwlock_t> = AtomicPtr::new(std::ptr::null_mut());

/// NVML is a library of its own: this file tells libcuda where the lock is.
fn path(folder: &Path) -> PathBuf {
    // SAFETY: no precondition.
    folder.join(format!("{}.nvml", unsafe { libc::getpid() }))
}

/// In NVML's library: calls of NVML take a lock from now on, which libcuda closes with its own.
pub(crate) fn for_nvml(folder: &Path) {
    let lock: &'static mut _ = Box::leak(Box::new(libc::PTHREAD_RWLOCK_INITIALIZER));
    let lock = std::ptr::from_mut(lock);
    if std::fs::write(path(folder), lock.expose_provenance().to_string()).is_ok() {
        OF_NVML.store(lock, Ordering::Release);
    }
}

/// In libcuda: learns of that lock, when CUDA begins.
pub(crate) fn find_nvml(folder: &Path) {
    let text = std::fs::read_to_string(path(folder)).unwrap_or_default();
    if let Ok(address) = text.parse() {
        OF_NVML.store(std::ptr::with_exposed_provenance_mut(address), Ordering::Release);
    }
}

/// A call of NVML: waits while its lock is closed.
pub(crate) fn pass_nvml(work: impl FnOnce()) {
    let lock = OF_NVML.load(Ordering::Acquire);
    if lock.is_null() {
        return work();
    }
    // SAFETY: initialised, and never freed.
    let code = unsafe { libc::pthread_rwlock_rdlock(lock) };
    assert_eq!(code, 0, "pthread_rwlock_rdlock");
    work();
    // SAFETY: this thread has it for reading.
    unsafe { libc::pthread_rwlock_unlock(lock) };
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
    if unsafe { pthread_rwlock_timedwrlock(GATE.0.get(), &raw const until) } != 0 {
        return false;
    }
    let nvml = OF_NVML.load(Ordering::Acquire);
    // SAFETY: as above, if there is one.
    if nvml.is_null() || unsafe { pthread_rwlock_timedwrlock(nvml, &raw const until) } == 0 {
        return true;
    }
    // SAFETY: this thread has it for writing.
    unsafe { libc::pthread_rwlock_unlock(GATE.0.get()) };
    false
}

/// Lets calls pass. By the thread that closed it.
pub(crate) fn open() {
    let nvml = OF_NVML.load(Ordering::Acquire);
    if !nvml.is_null() {
        // SAFETY: this thread has it for writing.
        unsafe { libc::pthread_rwlock_unlock(nvml) };
    }
    // SAFETY: this thread has it for writing.
    unsafe { libc::pthread_rwlock_unlock(GATE.0.get()) };
}
