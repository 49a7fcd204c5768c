//! Events of inotify(7) and fanotify(7) that a process has not read yet.
//!
//! CRIU (4.2) restores the watches and drops the events, with a warning in its log: in a restored job a program would wait for a
//! file that is there already. So a snapshot waits a moment until they are read. If there are new ones when the processes are
//! stopped, it is taken again a few times. A descriptor that nobody reads for that long is left as it is: then the image lacks its
//! events, and a note says so.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::unrestorable::Unrestorable;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rekindle_os::inotify::Watch;
use rekindle_os::{mounts, process};

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

/// Refuses a descriptor of file events with what CRIU dumps and does not restore.
pub(crate) fn check(pid: i32, number: RawFd, target: &Path) -> Result<(), Unrestorable> {
    let info = || process::text(pid, &format!("fdinfo/{number}")).unwrap_or_default();
    let refuse = |what: &str, remedy| {
        Err(Unrestorable::of(pid, format!("has {what}, which CRIU dumps and cannot restore"), remedy))
    };
    match target.to_str() {
        Some("anon_inode:inotify") => match info() {
            info if sends_signals(&info) => {
                refuse("an inotify descriptor that sends signals (O_ASYNC)", "wait for its events with poll or epoll")
            }
            info if watches_link(pid, &info) => {
                refuse("a watch of inotify on a symbolic link (IN_DONT_FOLLOW)", "watch the folder of the link")
            }
            _ => Ok(()),
        },
        Some("anon_inode:[fanotify]") if marks_file_system(&info()) => refuse(
            "a mark of fanotify on a whole file system (FAN_MARK_FILESYSTEM)",
            "mark its mounts (FAN_MARK_MOUNT)",
        ),
        _ => Ok(()),
    }
}

fn sends_signals(info: &str) -> bool {
    let flags = info.lines().find_map(|line| u32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ASYNC.cast_unsigned() != 0)
}

/// The mark of a file system has its device and no file.
fn marks_file_system(info: &str) -> bool {
    info.lines().any(|line| line.starts_with("fanotify sdev:"))
}

fn watches_link(pid: i32, info: &str) -> bool {
    let watches = Watch::all(info);
    let mounts = if watches.is_empty() { Vec::new() } else { mounts::of(pid).unwrap_or_default() };
    let is_link = |watch: &Watch| {
        let file = watch.file(pid, &mounts).map(File::from);
        file.is_some_and(|file| file.metadata().is_ok_and(|metadata| metadata.is_symlink()))
    };
    watches.iter().any(is_link)
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

    #[test]
    fn what_criu_does_not_restore_is_known() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        let pid = std::process::id().cast_signed();
        let of = |inotify: &Inotify| {
            let number = inotify.as_fd().as_raw_fd();
            check(pid, number, Path::new("anon_inode:inotify")).map_err(|error| error.to_string())
        };
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
        inotify.add_watch(dir.path(), AddWatchFlags::IN_CREATE).unwrap();
        assert_eq!(of(&inotify), Ok(()));
        inotify.add_watch(&link, AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_DONT_FOLLOW).unwrap();
        assert!(of(&inotify).unwrap_err().contains("symbolic link"));
        assert!(sends_signals("pos:\t0\nflags:\t020000\n") && !sends_signals("pos:\t0\nflags:\t02004000\n"));
        let marks = "fanotify flags:0 event-flags:0\nfanotify mnt_id:1b mflags:0 mask:8 ignored_mask:0\n";
        assert!(!marks_file_system(marks) && !marks_file_system("fanotify ino:4f969 sdev:800013 mflags:0 mask:3b\n"));
        assert!(marks_file_system(&format!("{marks}fanotify sdev:800013 mflags:0 mask:8 ignored_mask:0\n")));
    }
}
