//! A child that was started or adopted, until it is reaped.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use rekindle_base::Ended;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sched::CloneFlags;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::{World, register};
use crate::process;

/// A child of this process, by pidfd, so that its pid cannot be confused with a later process.
#[derive(Debug)]
pub struct Child {
    pub(super) pid: i32,
    pub(super) pidfd: OwnedFd,
}

/// Its pidfd, which is readable when it has ended.
impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Child {
    /// Adopts a process that CRIU restored as our child.
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

    /// What is needed to start a child in the PID and mount namespaces of this one, and in its namespaces of the kinds
    /// `also` that differ from ours. Entering a namespace needs rights over it, which a container may lack for the
    /// host's network.
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
        // rustix's own takes no real-time signal.
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
            match self.wait_with(WaitIdOptions::EXITED) {
                Ok(Some(ended)) => return Ok(ended),
                Ok(None) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Waits for the end; does not reap.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn wait_for_end(&self) -> io::Result<()> {
        let flags = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        loop {
            match self.wait_id(flags) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(drop),
            }
        }
    }

    /// Reaps the child if it has ended.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn try_wait(&self) -> io::Result<Option<Ended>> {
        self.wait_with(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
    }

    /// Whether it has ended; does not reap.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn has_ended(&self) -> io::Result<bool> {
        Ok(self.ended()?.is_some())
    }

    /// How it ended, if it has; does not reap.
    ///
    /// # Errors
    /// When it was reaped before.
    pub fn ended(&self) -> io::Result<Option<Ended>> {
        self.wait_id(WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT)
    }

    fn wait_with(&self, flags: WaitIdOptions) -> io::Result<Option<Ended>> {
        let ended = self.wait_id(flags)?;
        if ended.is_some() {
            register().remove(&self.pid);
        }
        Ok(ended)
    }

    /// waitid(2). nix's version has no value for a child that a real-time signal ended, and returns EINVAL after the
    /// kernel has reaped it.
    fn wait_id(&self, flags: WaitIdOptions) -> io::Result<Option<Ended>> {
        let Some(status) = waitid(WaitId::PidFd(self.pidfd.as_fd()), flags)? else { return Ok(None) };
        Ok(status.exit_status().map(Ended::Exit).or_else(|| status.terminating_signal().map(Ended::Signal)))
    }
}
