//! How CRIU's process ends, whatever happens.

use std::io;
use std::time::{Duration, Instant};

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

/// Waits for the child to end, and kills it after `limit`.
pub(super) fn wait_bounded(child: &Child, limit: Duration) -> io::Result<Ended> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(ended) = child.try_wait()? {
            return Ok(ended);
        }
        // CRIU exits within a millisecond of its answer.
        std::thread::sleep(Duration::from_micros(500));
    }
    child.signal(libc::SIGKILL)?;
    child.wait()
}
