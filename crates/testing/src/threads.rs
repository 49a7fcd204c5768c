//! A thread that lacks something: it cannot start others, as at the limit of a control group (pids.max), or open files, as
//! at its limit of descriptors.
#![allow(unsafe_code, reason = "a filter for system calls; each block says why it is sound")]

use std::panic::resume_unwind;
use std::thread;

use nix::libc;

/// Runs `work` on a thread on which clone(2) fails with EAGAIN.
///
/// # Panics
/// If the kernel has no filters for system calls, or if `work` panics.
pub fn without_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    with_refused([libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN, work)
}

/// Runs `work` on a thread that, as those that it starts, can open no file: EMFILE.
///
/// # Panics
/// As [`without_threads`].
pub fn without_descriptors<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    with_refused([libc::SYS_open, libc::SYS_openat], libc::EMFILE, work)
}

fn with_refused<T: Send>(calls: [libc::c_long; 2], errno: i32, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            refuse(calls, errno);
            work()
        });
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// For this thread, until it ends.
fn refuse(calls: [libc::c_long; 2], errno: i32) {
    let [one, other] = calls.map(|number| u32::try_from(number).unwrap_or(u32::MAX));
    let code = |code: u32| u16::try_from(code).unwrap_or(u16::MAX);
    let step = |kind, jt, jf, k| libc::sock_filter { code: code(kind), jt, jf, k };
    let (load, equal) = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let mut steps = [
        // The number of the call is the first word of seccomp_data.
        step(load, 0, 0, 0),
        step(equal, 2, 0, one),
        step(equal, 1, 0, other),
        step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW),
        step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ERRNO | errno.unsigned_abs()),
    ];
    let len = u16::try_from(steps.len()).unwrap_or(0);
    let program = libc::sock_fprog { len, filter: steps.as_mut_ptr() };
    // SAFETY: numbers.
    let alone = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the program lives until the kernel has copied it.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!((alone, set), (0, 0), "{}", std::io::Error::last_os_error());
}
