//! The lock of the driver's API, as threads of the program take it.
//!
//! In libcuda (580, observed) each API call takes one pthread_rwlock_t for reading, and cuCheckpointProcessLock takes
//! it for writing. glibc hands such a lock over when it is unlocked (`__pthread_rwlock_wrunlock`): all waiting readers
//! have it then, whether they run or not. A snapshot locks CUDA twice ([`crate::sharing`]), and in between all threads
//! are stopped. A stopped thread that was waiting would get the lock and never release it, and the second lock would
//! never succeed.
//!
//! So while the supervisor says that CUDA is locked, threads that find the lock taken do not wait for it but try again
//! at intervals. At any other time they wait normally, including those that began to poll, because a thread that only
//! polls may never find a lock free that others take all the time.
//!
//! A process that initialised NVML before CUDA has one more such lock: calls of NVML take it for reading, and
//! cuCheckpointProcessLock for writing (580, observed: a thread in nvmlDeviceGetTemperature was stopped with it, and the
//! second lock ended with NOT_READY each time). So NVML's library calls us, too. NVML that comes after CUDA has none.

use core::ffi::c_void;
use core::sync::atomic::{AtomicI32, Ordering};

use crate::{got, libc, sharing, sys};

const EBUSY: i32 = 16;

/// Time between two tries while a snapshot has the lock.
const PAUSE_NS: u64 = 100_000;

/// Redirects libcuda's and NVML's calls of pthread_rwlock_rdlock to us, in a process that shares memory.
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
    while sharing::is_locked() {
        sys::sleep(PAUSE_NS);
        // SAFETY: as above.
        match unsafe { libc::try_read_lock(lock) } {
            EBUSY => {}
            code => return code,
        }
    }
    // SAFETY: as above.
    unsafe { libc::read_lock(lock) }
}

/// Whether the calling thread has the lock for writing, from `__cur_writer` of glibc's `struct __pthread_rwlock_arch_t`
/// (x86-64, since 2.25). pthread_rwlock_timedrdlock cannot be used: it counts as a waiter until it notices that its
/// time is over.
fn has_it_for_writing(lock: *mut c_void) -> bool {
    const CUR_WRITER: usize = 24;
    // SAFETY: within the lock, which has 56 bytes, and aligned.
    let writer = unsafe { lock.cast::<AtomicI32>().byte_add(CUR_WRITER).as_ref() };
    writer.is_some_and(|writer| writer.load(Ordering::Relaxed) == sys::thread())
}

#[cfg(test)]
mod tests {
    use core::cell::UnsafeCell;
    use core::ffi::{c_int, c_long};
    use core::sync::atomic::{AtomicU32, Ordering};
    use core::time::Duration;
    use std::thread;
    use std::time::Instant;

    use super::*;

    unsafe extern "C" {
        fn pthread_rwlock_wrlock(lock: *mut c_void) -> c_int;
        fn pthread_rwlock_trywrlock(lock: *mut c_void) -> c_int;
        fn pthread_rwlock_unlock(lock: *mut c_void) -> c_int;
    }

    /// An initialised pthread_rwlock_t of glibc for x86-64: its first word has 8 for each reader that has it or waits
    /// for it.
    struct Lock(UnsafeCell<[c_long; 7]>);

    // SAFETY: only the functions of libc change it, which are made for several threads.
    unsafe impl Sync for Lock {}

    impl Lock {
        fn at(&self) -> *mut c_void {
            self.0.get().cast()
        }

        fn readers(&self) -> u32 {
            // SAFETY: it lives, and all change it in one piece.
            unsafe { AtomicU32::from_ptr(self.0.get().cast()) }.load(Ordering::Relaxed) >> 3
        }
    }

    fn until(is: impl Fn() -> bool) {
        let began = Instant::now();
        while !is() {
            assert!(began.elapsed() < Duration::from_secs(10));
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn those_that_wait_beside_it_do_not_get_it_handed_over_and_wait_in_it_afterwards() {
        let (_guard, table) = sharing::tests::begin();
        let announce = |is_locked: bool| table.is_locked.store(is_locked.into(), Ordering::Relaxed);
        assert!(libc::find_read_locks());
        let lock = &Lock(UnsafeCell::new([0; 7]));
        // SAFETY: of a live lock, here and below, and by threads that have it where they unlock it.
        let (read, unlock) = (|| unsafe { read_lock(lock.at()) }, || unsafe { pthread_rwlock_unlock(lock.at()) });
        // SAFETY: as above.
        let (write, try_write) =
            (|| unsafe { pthread_rwlock_wrlock(lock.at()) }, || unsafe { pthread_rwlock_trywrlock(lock.at()) });

        assert_eq!([read(), read(), unlock(), unlock()], [0; 4], "free, and for the second time");
        announce(true);
        assert_eq!([read(), unlock(), write()], [0; 3]);
        assert_eq!(read(), 35, "EDEADLK: its own");
        thread::scope(|scope| {
            let reader = scope.spawn(|| [read(), unlock()]);
            thread::sleep(Duration::from_millis(20));
            assert_eq!(lock.readers(), 0);
            assert!(!reader.is_finished());
            announce(false);
            until(|| lock.readers() == 1);
            assert_eq!(unlock(), 0);
            assert_eq!(reader.join().unwrap(), [0, 0]);
            assert_eq!([try_write(), unlock()], [0, 0]);

            // The same, and the lock is released while CUDA is announced as locked.
            announce(true);
            assert_eq!(write(), 0);
            let reader = scope.spawn(|| [read(), unlock()]);
            thread::sleep(Duration::from_millis(20));
            assert_eq!(unlock(), 0);
            assert_eq!(reader.join().unwrap(), [0, 0]);
        });
        announce(false);
    }
}
