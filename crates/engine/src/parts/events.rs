//! Events of inotify(7) and fanotify(7) that a process has not read yet.
//!
//! CRIU (4.2) restores the watches and drops the events, with a warning in its log: in a restored job a program would wait for a
//! file that is there already. So a snapshot waits a moment until they are read. If there are new ones when the processes are
//! stopped, it is taken again a few times. A descriptor that nobody reads for that long is left as it is: then the image lacks its
//! events, and a note says so.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, RawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rekindle_os::process;

/// Most are read at once. Who reads none for this time is busy or does not read.
const PATIENCE: Duration = Duration::from_secs(1);
/// A look reads the descriptors of all processes.
const PAUSE: Duration = Duration::from_millis(10);

/// Descriptors with events, by the process as we see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unread(BTreeSet<(i32, RawFd)>);

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let processes: BTreeSet<i32> = self.0.iter().map(|(pid, _)| *pid).collect();
        let shown = |pid: &i32| {
            let name = process::name(*pid).unwrap_or_default();
            format!("{} ({name})", process::inner_pid(*pid).unwrap_or(*pid))
        };
        let list: Vec<String> = processes.iter().map(shown).collect();
        let many = if list.len() == 1 { "process" } else { "processes" };
        write!(f, "file events (inotify, fanotify) that {many} {} did not read yet", list.join(", "))
    }
}

impl Unread {
    /// Those of these processes.
    pub(crate) fn of(tree: &[i32]) -> Unread {
        Unread(tree.iter().flat_map(|pid| of_process(*pid)).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those that are not among `known`.
    pub(crate) fn besides(&self, known: &Unread) -> Unread {
        Unread(self.0.difference(&known.0).copied().collect())
    }

    /// Waits until the processes, which must be running, have read what is there, for a moment at most. Returns the
    /// descriptors that had events all the time.
    pub(crate) fn let_pass(tree: &[i32], cancelled: &dyn Fn() -> bool) -> Unread {
        let mut left = Unread::of(tree);
        let deadline = Instant::now() + PATIENCE;
        while !left.is_empty() && !cancelled() && Instant::now() < deadline {
            std::thread::sleep(PAUSE);
            let now = Unread::of(tree);
            left.0.retain(|one| now.0.contains(one));
        }
        left
    }
}

fn of_process(pid: i32) -> Vec<(i32, RawFd)> {
    let is_one =
        |target: &std::path::Path| matches!(target.to_str(), Some("anon_inode:inotify" | "anon_inode:[fanotify]"));
    let mut numbers = process::descriptors(pid).filter(|(_, target)| is_one(target)).peekable();
    if numbers.peek().is_none() {
        return Vec::new();
    }
    let Ok(process) = process::open_pidfd(pid) else { return Vec::new() };
    let has_events = |number: RawFd| {
        process::fetch_descriptor(&process, number).is_ok_and(|ours| {
            let mut asked = [PollFd::new(ours.as_fd(), PollFlags::POLLIN)];
            poll(&mut asked, PollTimeout::ZERO) == Ok(1)
        })
    };
    numbers.filter(|(number, _)| has_events(*number)).map(|(number, _)| (pid, number)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

    use super::*;

    #[test]
    fn events_are_seen_until_they_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id().cast_signed();
        let watch = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
        watch.add_watch(dir.path(), AddWatchFlags::IN_CREATE).unwrap();
        // Other tests may have some, too.
        let ours = |unread: &Unread| unread.0.contains(&(own, watch.as_fd().as_raw_fd()));
        assert!(!ours(&Unread::of(&[own])));
        std::fs::write(dir.path().join("new"), "").unwrap();
        let seen = Unread::of(&[own]);
        assert!(ours(&seen) && !ours(&seen.besides(&seen)) && ours(&seen.besides(&Unread::default())));
        assert!(seen.to_string().contains(&format!("process {own} (")), "{seen}");
        assert!(ours(&Unread::let_pass(&[own], &|| false)), "nobody reads them");
        // They are read after the first look: a thread that reads them could come too late on a busy machine.
        let is_read = std::cell::Cell::new(false);
        let reads = || {
            if !is_read.replace(true) {
                watch.read_events().unwrap();
            }
            false
        };
        assert!(!ours(&Unread::let_pass(&[own], &reads)) && is_read.get());
        assert!(Unread::of(&[i32::MAX]).is_empty());
    }
}
