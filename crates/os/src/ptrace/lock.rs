//! Takes a lock on a file for a stopped process, by making the process execute the system call.
//!
//! POSIX locks belong to the process that took them (fcntl(2)): no process can take one for another.

use std::io;

use super::guest::{Filters, Host};
use crate::process;

/// A lock as fcntl(2) describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PosixLock {
    /// `F_RDLCK` or `F_WRLCK`.
    pub kind: i16,
    /// The first byte.
    pub start: i64,
    /// How many bytes; 0 is all up to the end, wherever that will be.
    pub length: i64,
}

/// Makes a stopped process take a lock through its descriptor `fd`. It is stopped afterwards as before.
///
/// # Errors
/// `EAGAIN` or `EACCES` if another process has a conflicting lock; else the kernel's error for the tracing or the
/// descriptor.
pub fn take_lock(pid: i32, fd: i32, lock: PosixLock) -> io::Result<()> {
    let is_stopped = |tid: &i32| process::state(*tid) == Some('T');
    let thread = process::threads(pid).into_iter().find(is_stopped);
    let thread = thread.ok_or_else(|| io::Error::other("the process is not stopped"))?;
    let mut bytes = [0; size_of::<libc::flock>()];
    let fields: [(usize, &[u8]); 3] = [
        (std::mem::offset_of!(libc::flock, l_type), &lock.kind.to_ne_bytes()),
        (std::mem::offset_of!(libc::flock, l_start), &lock.start.to_ne_bytes()),
        (std::mem::offset_of!(libc::flock, l_len), &lock.length.to_ne_bytes()),
    ];
    for (at, field) in fields {
        bytes.get_mut(at..at + field.len()).unwrap_or_default().copy_from_slice(field);
    }
    let numbers = (u64::try_from(fd), u64::try_from(libc::F_SETLK));
    let (Ok(fd), Ok(command)) = numbers else { return Err(io::ErrorKind::InvalidInput.into()) };
    let host = Host::of(pid)?;
    host.enter(thread, Filters::Apply)?.call_with(&bytes, libc::SYS_fcntl, |place| [fd, command, place])
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use super::*;
    use crate::ptrace::{go_on, stop};

    fn is_locked(file: &File) -> bool {
        let mut lock = libc::flock { l_type: 1, l_whence: 0, l_start: 7, l_len: 1, l_pid: 0 };
        // SAFETY: an open descriptor, and a live local.
        let answer = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(file), libc::F_GETLK, &raw mut lock) };
        assert_eq!(answer, 0);
        lock.l_type != 2
    }

    #[test]
    fn another_process_takes_a_lock_and_goes_on_as_before() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "while :; do read line && echo got $line; done"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file.reopen().unwrap())
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        std::thread::sleep(Duration::from_millis(100));
        stop(pid, Duration::from_secs(5)).unwrap();
        let lock = PosixLock { kind: 1, start: 7, length: 1 };
        assert!(!is_locked(file.as_file()));
        take_lock(pid, 2, lock).unwrap();
        assert!(is_locked(file.as_file()));
        assert_eq!(take_lock(pid, 77, lock).unwrap_err().raw_os_error(), Some(libc::EBADF));
        go_on(pid).unwrap();
        io::Write::write_all(child.stdin.as_mut().unwrap(), b"line\n").unwrap();
        let mut answer = [0; 9];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut answer).unwrap();
        assert_eq!(&answer, b"got line\n");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_locked(file.as_file()), "it was the lock of that process");
    }
}
