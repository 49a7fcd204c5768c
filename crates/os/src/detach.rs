//! Continues in the background: a copy of this process in a session of its own, so that closing the terminal does not
//! end it.
#![allow(unsafe_code, reason = "fork; the block says why it is sound")]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

use nix::fcntl::OFlag;
use nix::unistd::{ForkResult, Pid, dup2_stderr, dup2_stdin, dup2_stdout, fork, pipe2, setsid};

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Side {
    /// The one that was called.
    Here {
        /// The copy, a child of this process.
        copy: Pid,
        /// What the copy writes, until it closes its end.
        from: File,
    },
    /// The copy. It still has the output of the caller.
    Copy {
        /// For a message to the other process.
        to: File,
    },
}

/// Makes a copy of this process, which must have one thread only. The copy reads nothing from the terminal.
///
/// # Errors
/// When there are other threads, or the kernel refuses; in the copy, when it has no session of its own.
pub fn split() -> io::Result<Side> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("this process has other threads"));
    }
    let (from, to) = pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: this process has one thread, so the copy is complete: no lock is held by a thread that it does not have.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Side::Here { copy: child, from: from.into() }),
        ForkResult::Child => {
            setsid()?;
            // A file can be the job's input; a terminal would be that of another session.
            if !fs::metadata("/proc/self/fd/0").is_ok_and(|input| input.is_file()) {
                dup2_stdin(File::open("/dev/null")?)?;
            }
            Ok(Side::Copy { to: to.into() })
        }
    }
}

/// Sends standard error to this file from now on, and standard output nowhere.
///
/// # Errors
/// When the kernel refuses.
pub fn redirect(log: impl AsFd) -> io::Result<()> {
    dup2_stdout(File::options().write(true).open("/dev/null")?)?;
    Ok(dup2_stderr(log)?)
}
