//! Descriptors in flight: the job's processes have sent them to each other through UNIX sockets, and not received them
//! yet.
//!
//! ```text
//!  preflight   some in flight? most are for microseconds only: wait a little          job runs
//!  dump        CRIU writes them. Those that it would lose or mix up in a restore
//!              fail this attempt; the others are put in order in the image            job is frozen
//!  afterwards  wait until they move, and take the snapshot again                      job runs
//! ```
//!
//! /proc/PID/fdinfo says how many wait in a socket (`scm_fds`, Linux 5.6 and newer).

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use rekindle_criu::image::{self, Queues, Stuck, keep_in_flight};
use rekindle_os::beneath::Beneath;
use rekindle_os::process;

/// Number of attempts for a snapshot; each freezes a CUDA job for a checkpoint and a restore.
pub(crate) const ATTEMPTS: u32 = 5;
/// How long to wait, before a freeze, for descriptors in flight to be received. They may be harmless.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long to wait for descriptors that made an attempt fail.
const MORE_PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);

/// Descriptors that could not be restored correctly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InFlight {
    all: Vec<Stuck>,
    names: BTreeMap<i32, String>,
}

impl std::fmt::Display for InFlight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let process = |pid: Option<i32>| match pid {
            Some(pid) => match self.names.get(&pid) {
                Some(name) => format!("process {pid} ({name})"),
                None => format!("process {pid}"),
            },
            None => "a socket that is itself in flight".to_owned(),
        };
        write!(
            f,
            "file descriptors are in flight in UNIX sockets (SCM_RIGHTS), and CRIU would lose them or mix them up: "
        )?;
        for (at, stuck) in self.all.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{} to {}", stuck.descriptors, process(stuck.receiver))?;
            if stuck.sender.is_some() && stuck.sender != stuck.receiver {
                write!(f, " from {}", process(stuck.sender))?;
            }
        }
        write!(f, "; a snapshot is possible once they are received")
    }
}

impl InFlight {
    /// Inspects the image in `criu_dir`, while all tasks of the tree below `root` are frozen, and repairs the order
    /// where possible. `names` are the processes' names by the pid that they see themselves.
    pub(crate) fn find(
        criu_dir: &Beneath,
        root: i32,
        names: &BTreeMap<i32, String>,
    ) -> Result<Option<InFlight>, image::Error> {
        let mut queues = keep_in_flight(criu_dir)?;
        queues.stuck.extend(missing(&waiting(&process::tree(root)), &queues));
        Ok((!queues.stuck.is_empty()).then(|| InFlight { all: queues.stuck, names: names.clone() }))
    }

    /// Waits until any of them was received, and then a random moment: otherwise a job that sends in step with our
    /// attempts would delay all of them. Returns false if none was received, because then nobody receives them.
    pub(crate) fn moves(&self, root: i32, attempt: u32, cancelled: &dyn Fn() -> bool) -> bool {
        let tree = process::tree(root);
        let was = |stuck: &Stuck| u64::try_from(stuck.descriptors).ok();
        let moved = || {
            let now = waiting(&tree);
            // If the kernel does not say how many there are, or no process has the socket any more, assume that they
            // moved.
            self.all.iter().any(|stuck| now.get(&stuck.inode).map(|waiting| waiting.count) != was(stuck))
        };
        let moved = until(MORE_PATIENCE, || cancelled() || moved());
        if moved {
            std::thread::sleep(Duration::from_millis(RandomState::new().hash_one(attempt) % (20 * u64::from(attempt))));
        }
        moved
    }
}

/// Waits a little for descriptors in flight between these processes. Most of them would do no harm.
pub(crate) fn let_pass(tree: &[i32], cancelled: &dyn Fn() -> bool) {
    if !until(PATIENCE, || cancelled() || waiting(tree).is_empty()) {
        tracing::debug!(sockets = ?waiting(tree), "file descriptors are in flight in UNIX sockets");
    }
}

fn until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Descriptors that wait in a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waiting {
    /// How many descriptors.
    count: u64,
    /// A process that has the socket.
    pid: i32,
}

/// Waiting descriptors that CRIU has not written.
fn missing(waiting: &BTreeMap<u32, Waiting>, queues: &Queues) -> Vec<Stuck> {
    let stuck = |(inode, Waiting { count, pid }): (&u32, &Waiting)| {
        let written = queues.descriptors.get(inode).copied().unwrap_or(0);
        let descriptors = usize::try_from(*count).ok().filter(|count| *count > written)?;
        let is_known = queues.stuck.iter().any(|stuck| stuck.inode == *inode);
        (!is_known).then(|| Stuck { inode: *inode, receiver: process::inner_pid(*pid), sender: None, descriptors })
    };
    waiting.iter().filter_map(stuck).collect()
}

/// The sockets of the processes in which descriptors wait, by inode.
fn waiting(tree: &[i32]) -> BTreeMap<u32, Waiting> {
    tree.iter().rev().flat_map(|pid| waiting_in(*pid)).collect()
}

fn waiting_in(pid: i32) -> Vec<(u32, Waiting)> {
    let found = process::descriptors(pid).filter_map(|(number, target)| {
        let inode = u32::try_from(process::socket(&target)?).ok()?;
        let text = process::text(pid, &format!("fdinfo/{number}")).ok()?;
        let count = scm_fds(&text).filter(|count| *count > 0)?;
        Some((inode, Waiting { count, pid }))
    });
    found.collect()
}

fn scm_fds(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("scm_fds:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, sendmsg, socketpair};

    use super::*;

    #[test]
    fn what_waits_in_our_sockets_is_seen() {
        let (one, other) = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::empty()).unwrap();
        let inode =
            u32::try_from(std::fs::metadata(format!("/proc/self/fd/{}", other.as_raw_fd())).unwrap().ino()).unwrap();
        let me = std::process::id().cast_signed();
        let count = || waiting(&[me]).get(&inode).map(|waiting| waiting.count);
        assert_eq!(count(), None);
        let file = std::fs::File::open("/dev/null").unwrap();
        let two = [file.as_raw_fd(); 2];
        let send = || {
            let rights = [ControlMessage::ScmRights(&two)];
            sendmsg::<()>(one.as_raw_fd(), &[IoSlice::new(b"x")], &rights, MsgFlags::empty(), None).unwrap()
        };
        send();
        if !rekindle_testing::require("kernel", count().is_some(), "this kernel does not count descriptors in flight") {
            return;
        }
        assert_eq!(count(), Some(2));
        let stuck = Stuck { inode, receiver: Some(7), sender: Some(8), descriptors: 2 };
        let in_flight = InFlight { all: vec![stuck], names: [(7, "a".to_owned())].into() };
        assert!(!in_flight.moves(me, 1, &|| false), "nobody receives it");
        assert!(in_flight.moves(me, 1, &|| true));
        send();
        assert!(in_flight.moves(me, 1, &|| false));
        for _ in 0..2 {
            recv(other.as_raw_fd(), &mut [0], MsgFlags::empty()).unwrap();
        }
        assert_eq!(count(), None);
        assert!(in_flight.moves(me, 2, &|| false));
        let text = in_flight.to_string();
        assert!(text.contains("mix them up: 2 to process 7 (a) from process 8; a snapshot is possible once"), "{text}");
    }

    #[test]
    fn what_criu_did_not_write_is_missed() {
        let me = std::process::id().cast_signed();
        let waiting = [(1, 2), (2, 1), (3, 5), (4, 1)].map(|(inode, count)| (inode, Waiting { count, pid: me }));
        let known = Stuck { inode: 4, receiver: None, sender: Some(9), descriptors: 1 };
        let queues = Queues { descriptors: [(1, 2), (3, 4)].into(), stuck: vec![known] };
        let found = missing(&waiting.into(), &queues);
        let stuck = |inode, descriptors| Stuck { inode, receiver: Some(me), sender: None, descriptors };
        assert_eq!(found, [stuck(2, 1), stuck(3, 5)]);
        assert_eq!(missing(&BTreeMap::new(), &queues), []);
    }

    #[test]
    fn a_socket_of_another_kind_has_none() {
        assert_eq!(scm_fds("pos:\t0\nflags:\t02\nscm_fds: 3\n"), Some(3));
        for text in ["", "pos:\t0\n", "scm_fds: x\n", "scm_fds:\n"] {
            assert_eq!(scm_fds(text), None);
        }
    }
}
