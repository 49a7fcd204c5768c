//! Processes that are stopped for a moment.

use std::os::fd::OwnedFd;

use rustix::process::{Signal, pidfd_send_signal};

use super::process;

/// Processes that were stopped. They continue when this is dropped, the last one first.
#[derive(Debug)]
pub struct StoppedProcesses(Vec<(i32, OwnedFd)>);

impl StoppedProcesses {
    /// Stops these, in this order. One that somebody else has stopped is left alone.
    #[must_use]
    pub fn stop(pids: impl IntoIterator<Item = i32>) -> StoppedProcesses {
        let runs = |pid: &i32| process::state(*pid).is_some_and(|state| !matches!(state, 'T' | 't' | 'Z' | 'X'));
        let stopped = pids.into_iter().filter_map(|pid| {
            let pidfd = process::open_pidfd(pid).ok().filter(|_| runs(&pid))?;
            pidfd_send_signal(&pidfd, Signal::STOP).ok()?;
            Some((pid, pidfd))
        });
        StoppedProcesses(stopped.collect())
    }

    /// Their pids, as we see them.
    pub fn pids(&self) -> impl Iterator<Item = i32> {
        self.0.iter().map(|(pid, _)| *pid)
    }
}

impl Drop for StoppedProcesses {
    fn drop(&mut self) {
        for (_, pidfd) in self.0.iter().rev() {
            // It fails if the process has ended.
            let _ = pidfd_send_signal(pidfd, Signal::CONT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    fn comes_to(child: &Child, wanted: impl Fn(char) -> bool) {
        let begun = Instant::now();
        while !process::state(child.id().cast_signed()).is_some_and(&wanted) {
            assert!(begun.elapsed() < Duration::from_secs(5));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn what_was_stopped_continues_and_nothing_else() {
        let sleeper = || Command::new("sleep").arg("60").spawn().unwrap();
        let (mut ours, mut theirs) = (sleeper(), sleeper());
        let pids = [&ours, &theirs].map(|child| child.id().cast_signed());
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pids[1]), nix::sys::signal::Signal::SIGSTOP).unwrap();
        comes_to(&theirs, |state| state == 'T');
        let stopped = StoppedProcesses::stop(pids);
        comes_to(&ours, |state| state == 'T');
        drop(stopped);
        comes_to(&ours, |state| state != 'T');
        comes_to(&theirs, |state| state == 'T');
        for child in [&mut ours, &mut theirs] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
