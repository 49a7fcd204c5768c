//! A child that was started or adopted, until it is reaped.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use rekindle_base::Ended;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sched::CloneFlags;
use nix::sys::wait::WaitPidFlag;

use super::{World, register};
use crate::process;

/// A child of this process, by pidfd, so that its pid cannot be mistaken for another's.
#[derive(Debug)]
pub struct Child {
    pub(super) pid: i32,
    pub(super) pidfd: OwnedFd,
}

impl Child {
    /// Takes charge of a child that CRIU restored as ours.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn adopt(pid: i32) -> io::Result<Child> {
        let pidfd = process::open_pidfd(pid)?;
        register().insert(pid);
        Ok(Child { pid, pidfd })
    }

    /// The pid as this process sees it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// How another is born into the PID and the mount namespace of this one, and into those of `also` that are not ours
    /// already: to enter one takes rights over it, which a container may not have over the host's network.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn entrance(&self, also: CloneFlags) -> io::Result<World> {
        let is_ours = |kind: &str| {
            let link = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
            link(&self.pid.to_string()) == link("self")
        };
        let kinds = [(CloneFlags::CLONE_NEWNET, "net"), (CloneFlags::CLONE_NEWIPC, "ipc")];
        let other =
            kinds.into_iter().filter(|(flag, kind)| also.contains(*flag) && !is_ours(kind)).map(|(flag, _)| flag);
        Ok(World::Join(self.pidfd()?, other.collect()))
    }

    /// Another descriptor for the same process.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Sends a signal; a child that has ended already is not an error.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        // SAFETY: a system call on an open descriptor; a null siginfo means the default one.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        match io::Error::last_os_error() {
            _ if result == 0 => Ok(()),
            e if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            e => Err(e),
        }
    }

    /// Waits for the end and reaps.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn wait(&self) -> io::Result<Ended> {
        loop {
            match self.wait_with(WaitPidFlag::WEXITED) {
                Ok(Some(ended)) => return Ok(ended),
                Ok(None) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Waits for the end; leaves it to be reaped.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn wait_for_end(&self) -> io::Result<()> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        loop {
            match self.wait_id(flags) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(drop),
            }
        }
    }

    /// Reaps if it has ended.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn try_wait(&self) -> io::Result<Option<Ended>> {
        self.wait_with(WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG)
    }

    /// Whether it has ended; leaves it to be reaped.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn has_ended(&self) -> io::Result<bool> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        Ok(self.wait_id(flags)?.is_some())
    }

    fn wait_with(&self, flags: WaitPidFlag) -> io::Result<Option<Ended>> {
        let ended = self.wait_id(flags)?;
        if ended.is_some() {
            register().remove(&self.pid);
        }
        Ok(ended)
    }

    /// waitid(2). Not nix's: that one has no value for a child that a real-time signal ended, and answers EINVAL after the
    /// kernel has reaped it.
    fn wait_id(&self, flags: WaitPidFlag) -> io::Result<Option<Ended>> {
        // SAFETY: siginfo_t is plain numbers, for which all zeroes is valid.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let fd = self.pidfd.as_raw_fd().cast_unsigned();
        // SAFETY: a system call on an open descriptor; `info` is valid for writes.
        if unsafe { libc::waitid(libc::P_PIDFD, fd, &raw mut info, flags.bits()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: waitid fills the fields of a SIGCHLD, or leaves zeroes.
        let status = unsafe { info.si_status() };
        Ok(match info.si_code {
            libc::CLD_EXITED => Some(Ended::Exit(status)),
            libc::CLD_KILLED | libc::CLD_DUMPED => Some(Ended::Signal(status)),
            _ => None,
        })
    }
}
