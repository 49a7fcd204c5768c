//! Connections inside the job, by UNIX sockets, that nobody has accepted yet.
//!
//! CRIU (4.2) saves them, as long as nothing was sent over them and they were not closed: no call shows the data of a connection
//! that is not accepted. With data it refuses the whole dump. So a snapshot waits until the job, which runs meanwhile, has
//! accepted them. If one waits for longer, the snapshot is not tried.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use rekindle_os::process;
use rekindle_os::unix_diag::{self, UnixSocket};

/// A look reads the descriptors of all processes.
const PAUSE: Duration = Duration::from_millis(25);

/// Connections that CRIU cannot save.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Backlog(BTreeMap<String, Place>);

/// A socket at which some wait.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    count: usize,
    /// The process that is to accept them, as it sees itself; `None` if it is not one of the job.
    process: Option<(i32, String)>,
}

impl std::fmt::Display for Backlog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, (path, Place { count, process })) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            let many = if *count == 1 { "a connection of the job waits" } else { "connections of the job wait" };
            write!(f, "{comma}{many} to be accepted at the UNIX socket {path} of ")?;
            match process {
                Some((pid, name)) => write!(f, "process {pid} ({name})")?,
                None => write!(f, "a program outside the job")?,
            }
        }
        write!(
            f,
            ", with data or closed by the other end, which CRIU cannot save. A snapshot is possible once that process has called \
             accept(2), or has closed the socket"
        )
    }
}

impl Backlog {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits until these processes, which must be running, have accepted what waits. Returns what is there after `patience`.
    pub(crate) fn let_pass(tree: &[i32], patience: Duration, cancelled: &dyn Fn() -> bool) -> Backlog {
        let deadline = Instant::now() + patience;
        let mut is_told = false;
        loop {
            let found = Backlog::of(tree);
            if found.is_empty() || cancelled() || Instant::now() >= deadline {
                return found;
            }
            if !is_told {
                tracing::info!("the snapshot waits a moment: {found}");
                is_told = true;
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn of(tree: &[i32]) -> Backlog {
        let mut owners: HashMap<u32, i32> = HashMap::new();
        for pid in tree.iter().rev() {
            let inodes = process::descriptors(*pid).filter_map(|(_, target)| process::socket(&target));
            owners.extend(inodes.filter_map(|inode| Some((u32::try_from(inode).ok()?, *pid))));
        }
        let Some(root) = tree.first().filter(|_| !owners.is_empty()) else { return Backlog::default() };
        // Without it, CRIU works neither.
        let all = unix_diag::of(*root).unwrap_or_default();
        let shown = |pid: i32| (process::inner_pid(pid).unwrap_or(pid), process::name(pid).unwrap_or_default());
        Backlog(
            find(&all, &owners)
                .into_iter()
                .map(|(name, count, owner)| (name, Place { count, process: owner.map(shown) }))
                .collect(),
        )
    }
}

/// The name, the number of connections, and the process.
fn find(all: &[UnixSocket], owners: &HashMap<u32, i32>) -> Vec<(String, usize, Option<i32>)> {
    let sent: HashMap<u32, u32> = all.iter().map(|socket| (socket.inode, socket.sent)).collect();
    let counted = all.iter().filter(|socket| socket.listens).filter_map(|socket| {
        let owner = owners.get(&socket.inode).copied();
        let is_one = |waiting: &&u32| match waiting {
            0 => owner.is_some(),
            waiting => owners.contains_key(waiting) && sent.get(waiting).is_some_and(|sent| *sent > 0),
        };
        let count = socket.waiting.iter().filter(is_one).count();
        let name = String::from_utf8_lossy(&socket.name).trim_end_matches('\0').replace('\0', "@");
        (count > 0).then_some((name, count, owner))
    });
    counted.collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn only_what_criu_cannot_save_counts() {
        let socket = |inode, sent| UnixSocket { inode, sent, ..UnixSocket::default() };
        let listener = |inode, name: &[u8], waiting: &[u32]| UnixSocket {
            inode,
            listens: true,
            name: name.into(),
            waiting: waiting.into(),
            ..UnixSocket::default()
        };
        let all = [
            listener(1, b"/a\0", &[10, 11, 12]),
            listener(2, b"\0b", &[0]),
            listener(3, b"/outside", &[0, 13]),
            listener(4, b"/silent", &[10]),
            socket(10, 0),
            socket(11, 768),
            socket(12, 768),
            socket(13, 768),
        ];
        // 12 is of somebody else: CRIU leaves it out.
        let owners = HashMap::from([(1, 5), (2, 6), (4, 5), (10, 5), (11, 5), (13, 6)]);
        let found = find(&all, &owners);
        assert_eq!(found, [("/a".into(), 1, Some(5)), ("@b".into(), 1, Some(6)), ("/outside".into(), 1, None)]);
    }

    #[test]
    fn a_snapshot_waits_until_it_is_accepted() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        let own = [std::process::id().cast_signed()];
        let is_there = || Backlog::of(&own).0.contains_key(path.to_str().unwrap());
        assert!(!is_there());
        client.write_all(b"words").unwrap();
        let text = Backlog::let_pass(&own, Duration::ZERO, &|| false).to_string();
        assert!(text.contains(&format!("at the UNIX socket {} of process ", path.display())), "{text}");
        let accepted = listener.accept().unwrap();
        assert!(!is_there());
        drop(accepted);
    }
}
