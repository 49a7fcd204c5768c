//! How CRIU's process ends, whatever happens.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use rekindle_os::spawn::{Child, Ended};

/// CRIU's process. It is killed and reaped when this is dropped before its end, as by a panic: a CRIU that only sees its
/// socket closed resumes the tasks.
pub(super) struct Process(pub(super) Child);

impl Process {
    /// Also kills what it has started, which is in its process group. If it has ended itself, it has not been waited for yet, so
    /// the number is no other group's.
    pub(super) fn kill(&self) -> io::Result<()> {
        let _ = killpg(Pid::from_raw(self.0.pid()), Signal::SIGKILL);
        self.0.signal(libc::SIGKILL)
    }

    /// Waits until it has ended by itself, for at most `limit`. It is not reaped: its process group keeps its number.
    pub(super) fn end_within(&self, limit: Duration) -> io::Result<Option<Ended>> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let wait = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], wait) {
                Err(nix::Error::EINTR) => {}
                Err(error) => return Err(error.into()),
                Ok(0) if left.is_zero() => return Ok(None),
                Ok(_) => match self.0.ended()? {
                    None => {}
                    ended => return Ok(ended),
                },
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it was waited for.
        if self.0.has_ended().is_ok() {
            let _ = self.kill();
            let _ = self.0.wait();
        }
    }
}

/// Kills what a restore has made if one of our own steps panics.
pub(super) struct AbandonOnPanic<'a>(pub(super) &'a dyn Fn());

impl Drop for AbandonOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.0)();
        }
    }
}
