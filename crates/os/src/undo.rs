//! Undo lists of System V semaphores (`SEM_UNDO` of semop(2)).
//!
//! The kernel shows nobody what is in them, but compares whose they are (kcmp(2), `KCMP_SYSVSEM`). A process has none until
//! it needs one: for such an operation, or for a thread, which shares it.
#![allow(unsafe_code, reason = "a system call that the libraries do not have; the block says why it is sound")]

use std::fs::File;
use std::io;

use nix::sched::{CloneFlags, setns};

/// `KCMP_SYSVSEM` of linux/kcmp.h.
const UNDO_LIST: libc::c_long = 6;

/// Whether a process has an undo list. `other` is one that has none.
///
/// # Errors
/// When a process is gone, we may not trace it, or the kernel has no kcmp(2).
pub fn has_list(pid: i32, other: i32) -> io::Result<bool> {
    let [pid, other] = [pid, other].map(libc::c_long::from);
    // SAFETY: a system call on numbers.
    match unsafe { libc::syscall(libc::SYS_kcmp, pid, other, UNDO_LIST, 0, 0) } {
        0 => Ok(false),
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(true),
    }
}

/// Whether there are semaphores in the IPC namespace of a process.
///
/// # Errors
/// When we may not enter the namespace, or no thread can be started.
pub fn has_semaphores(pid: i32) -> io::Result<bool> {
    let namespace = File::open(format!("/proc/{pid}/ns/ipc"))?;
    // A thread of its own: the table is that of the namespace of the thread which opens it.
    let look = move || -> io::Result<bool> {
        setns(&namespace, CloneFlags::CLONE_NEWIPC)?;
        Ok(std::fs::read_to_string("/proc/sysvipc/sem")?.lines().nth(1).is_some())
    };
    let thread = std::thread::Builder::new().name("semaphores".into()).spawn(look)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread has ended")))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    struct Reaped(Child);

    impl Drop for Reaped {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_with_a_thread_has_a_list_and_one_without_has_none() {
        let child = || Reaped(Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap());
        let (one, other) = (child(), child());
        let pid = |of: &Reaped| of.0.id().cast_signed();
        let own = std::process::id().cast_signed();
        std::thread::spawn(|| {}).join().unwrap();
        match has_list(pid(&one), pid(&other)) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {}
            result => {
                assert!(!result.unwrap());
                assert!(has_list(own, pid(&other)).unwrap());
                assert!(has_list(i32::MAX, own).is_err());
            }
        }
    }
}
