//! Whether two descriptors, also of different processes, are the same open file description (kcmp(2), `KCMP_FILE`),
//! whether one is what an epoll set watches (`KCMP_EPOLL_TFD`), and what two tasks share.
#![allow(unsafe_code, reason = "a system call that the libraries do not have; the block says why it is sound")]

use std::cmp::Ordering;
use std::io;

/// `KCMP_FILE` of linux/kcmp.h.
const FILE: libc::c_long = 0;
/// `KCMP_EPOLL_TFD` of linux/kcmp.h.
const EPOLL: libc::c_long = 7;

/// What tasks can share (linux/kcmp.h). Threads usually share all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i64)]
pub enum Shared {
    /// The memory: `KCMP_VM`.
    Memory = 1,
    /// The table of descriptors: `KCMP_FILES`.
    Descriptors = 2,
    /// Working directory, root directory and umask: `KCMP_FS`.
    Folders = 3,
    /// The handlers of signals: `KCMP_SIGHAND`.
    Handlers = 4,
    /// The undo list of System V semaphores: `KCMP_SYSVSEM`.
    UndoList = 6,
}

/// Whether two tasks (processes or threads) share something. A task that is ending has nothing of it any more, and shares
/// that with all others that are ending.
///
/// # Errors
/// When a task is gone, we may not trace one, or the kernel has no kcmp(2).
pub fn shares(one: i32, other: i32, what: Shared) -> io::Result<bool> {
    let [one, other] = [one, other].map(libc::c_long::from);
    // SAFETY: a system call on numbers.
    match unsafe { libc::syscall(libc::SYS_kcmp, one, other, what as libc::c_long, 0, 0) } {
        0 => Ok(true),
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(false),
    }
}

/// `struct kcmp_epoll_slot` of linux/kcmp.h: one of the files that an epoll set watches.
#[repr(C)]
struct Slot {
    set: u32,
    number: u32,
    /// Which of those with this number.
    index: u32,
}

/// Compares the open file descriptions of two descriptors, each given with its process. The kernel's order means nothing
/// but is the same in each call, so lists can be sorted by it.
///
/// # Errors
/// When a process or descriptor is gone, we may not trace a process, or the kernel has no kcmp(2).
pub fn compare(one: (i32, i32), other: (i32, i32)) -> io::Result<Ordering> {
    let numbers = [one.0, other.0, one.1, other.1].map(libc::c_long::from);
    let [pid, other_pid, fd, other_fd] = numbers;
    // SAFETY: a system call on numbers.
    match unsafe { libc::syscall(libc::SYS_kcmp, pid, other_pid, FILE, fd, other_fd) } {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        -1 => Err(io::Error::last_os_error()),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Whether the descriptor `number` of a process is still the file that its epoll set watches under this number. A set keeps
/// a file whose descriptor was closed as long as the file is open elsewhere, so there can be several with one number:
/// `index` is the one that is meant, in the order of the set's fdinfo.
///
/// # Errors
/// When the process, the descriptor or the set is gone, we may not trace the process, or the kernel has no kcmp(2).
pub fn is_watched(pid: i32, set: i32, number: i32, index: u32) -> io::Result<bool> {
    let slot = Slot { set: set.cast_unsigned(), number: number.cast_unsigned(), index };
    let [of, number] = [pid, number].map(libc::c_long::from);
    // SAFETY: a system call on numbers and a structure that is borrowed for it and only read.
    match unsafe { libc::syscall(libc::SYS_kcmp, of, of, EPOLL, number, &raw const slot) } {
        0 => Ok(true),
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn threads_share_what_processes_do_not() {
        let own = std::process::id().cast_signed();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let other = child.id().cast_signed();
        let thread = std::thread::spawn(|| nix::unistd::gettid().as_raw());
        let all = [Shared::Memory, Shared::Descriptors, Shared::Folders, Shared::Handlers];
        let found = all.map(|what| (shares(own, own, what).unwrap(), shares(own, other, what).unwrap()));
        let _ = child.kill();
        let _ = child.wait();
        assert_eq!(found, [(true, false); 4]);
        let tid = thread.join().unwrap();
        assert!(shares(own, i32::MAX, Shared::Folders).is_err() && tid != own);
    }

    #[test]
    fn a_duplicate_is_the_same_and_another_opening_is_not() {
        let own = std::process::id().cast_signed();
        let file = File::open("/proc/self/stat").unwrap();
        let (twice, other) = (file.try_clone().unwrap(), File::open("/proc/self/stat").unwrap());
        let number = |file: &File| (own, file.as_raw_fd());
        assert_eq!(compare(number(&file), number(&twice)).unwrap(), Ordering::Equal);
        let order = compare(number(&file), number(&other)).unwrap();
        assert_ne!(order, Ordering::Equal);
        assert_eq!(compare(number(&other), number(&twice)).unwrap(), order.reverse());
        assert!(compare(number(&file), (own, -1)).is_err());
    }
}
