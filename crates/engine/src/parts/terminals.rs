//! What waits in the job's pseudo-terminals: output that nobody has read yet, and input.
//!
//! CRIU (4.2) reads it during a dump and writes it to the other end again, also if the job runs on, and once more in a restore.
//! So it goes through the line discipline each time: `\r\n` becomes `\r\r\n`, typed lines are echoed again, an end of file is
//! lost. Therefore the terminals are emptied when all processes are stopped, and filled again when CRIU is done with them. What
//! was in them is a file of the image. If the dump fails, CRIU lets the processes run before they are filled: what is written in
//! these milliseconds comes after what was there.
//!
//! Only terminals whose master a process of the job has: CRIU refuses those from outside.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use rekindle_os::beneath::Beneath;
use rekindle_os::process;
use rekindle_os::terminal::{self, Waiting};

/// The file of an image.
const FILE: &str = "terminals.json";
/// A larger one is not read. A terminal has some 20 KiB, and more in JSON.
const LONGEST: u64 = 64 << 20;
/// How many terminals the kernel has.
const COUNT: &str = "/proc/sys/kernel/pty/nr";

/// A terminal that cannot be saved at this moment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("terminal /dev/pts/{number} of process {pid} ({name}) cannot be saved: {why}")]
pub struct Unsaved {
    number: u32,
    pid: i32,
    name: String,
    why: String,
}

/// What was seen of terminals while the job ran, so that not all descriptors are looked at while it does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Before {
    has_some: bool,
    count: Option<String>,
}

impl Before {
    pub(crate) fn look(tree: &[i32]) -> Before {
        // First: one that is opened meanwhile is noticed.
        let count = std::fs::read_to_string(COUNT).ok();
        Before { has_some: tree.iter().any(|pid| masters(*pid).next().is_some()), count }
    }

    fn still_none(&self) -> bool {
        !self.has_some && self.count.is_some() && self.count == std::fs::read_to_string(COUNT).ok()
    }
}

/// A terminal by a descriptor of its master, and what waits in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Terminal {
    /// The process, as it sees itself.
    pid: i32,
    fd: RawFd,
    waiting: Waiting,
}

/// Terminals that were emptied. They are filled again at the latest when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Emptied(Vec<(OwnedFd, Terminal)>);

impl Drop for Emptied {
    fn drop(&mut self) {
        self.fill();
    }
}

impl Emptied {
    /// Empties the terminals of these processes, which are stopped.
    pub(crate) fn take(tree: &[i32], before: &Before) -> Result<Emptied, Unsaved> {
        let mut emptied = Emptied::default();
        if before.still_none() {
            return Ok(emptied);
        }
        let mut seen = BTreeSet::new();
        for (pid, fd) in tree.iter().flat_map(|pid| masters(*pid).map(|fd| (*pid, fd))) {
            let fetched = process::open_pidfd(pid).and_then(|pidfd| process::fetch_descriptor(&pidfd, fd));
            // A process that has just ended has none.
            let Ok(master) = fetched else { continue };
            let Some(number) = terminal::number(&master) else { continue };
            // Several processes can have it. Terminals of another mount can have the same numbers: they are emptied once more.
            if !seen.insert((number, pid)) {
                continue;
            }
            let inner = process::inner_pid(pid).unwrap_or(pid);
            let waiting = terminal::take(&master).map_err(|error| Unsaved {
                number,
                pid: inner,
                name: process::name(pid).unwrap_or_default(),
                why: error.to_string(),
            })?;
            if !waiting.is_empty() {
                emptied.0.push((master, Terminal { pid: inner, fd, waiting }));
            }
        }
        Ok(emptied)
    }

    /// Writes what was in them into the image.
    pub(crate) fn save(&self, image: &Beneath) -> io::Result<()> {
        let all: Vec<&Terminal> = self.0.iter().map(|(_, terminal)| terminal).collect();
        if all.is_empty() {
            return Ok(());
        }
        image.join(FILE).create_new(0o600)?.write_all(&serde_json::to_vec(&all)?)
    }

    /// Fills them again. A failure is reported: the job lacks that.
    pub(crate) fn fill(&mut self) {
        for (master, Terminal { pid, fd, waiting }) in self.0.drain(..) {
            if let Err(error) = terminal::put_back(&master, waiting) {
                tracing::error!("the job lost what waited in the terminal of process {pid}, descriptor {fd}: {error}");
            }
        }
    }
}

/// Fills the terminals of the restored tree below `root`, before it runs. A failure does not prevent that, and is reported.
pub(crate) fn put_back(root: i32, image: &Beneath) {
    let path = image.join(FILE);
    if !path.is_there() {
        return;
    }
    let all = path.content(LONGEST).and_then(|bytes| Ok(serde_json::from_slice::<Vec<Terminal>>(&bytes)?));
    let all = match all {
        Ok(all) => all,
        Err(error) => {
            return tracing::warn!("what waited in the job's terminals is lost: {FILE} of the image: {error}");
        }
    };
    let tree = process::tree(root);
    for Terminal { pid, fd, waiting } in all {
        let process = tree.iter().find(|outer| process::inner_pid(**outer) == Some(pid));
        let fetched = process
            .ok_or_else(|| io::ErrorKind::NotFound.into())
            .and_then(|outer| process::fetch_descriptor(&process::open_pidfd(*outer)?, fd));
        let filled = fetched.map_err(terminal::Error::from).and_then(|master| terminal::put_back(&master, waiting));
        if let Err(error) = filled {
            tracing::warn!("what waited in the terminal of process {pid}, descriptor {fd}, is lost: {error}");
        }
    }
}

/// Whether a descriptor leads to a terminal that was hung up (vhangup(2)) although its master is open. CRIU closes the master of
/// one whose master was closed, which hangs it up again.
pub(crate) fn is_hung_up(pid: i32, number: RawFd, target: &Path) -> bool {
    let is_one = target.starts_with("/dev/pts") || target == Path::new("/dev/tty");
    let has_no_master = target.as_os_str().as_bytes().ends_with(b" (deleted)");
    if !is_one || has_no_master {
        return false;
    }
    let fetched = process::open_pidfd(pid).and_then(|pidfd| process::fetch_descriptor(&pidfd, number));
    fetched.is_ok_and(|terminal| {
        let mut asked = [PollFd::new(terminal.as_fd(), PollFlags::empty())];
        poll(&mut asked, PollTimeout::ZERO) == Ok(1)
            && asked[0].revents().is_some_and(|found| found.contains(PollFlags::POLLERR))
    })
}

/// The descriptors of masters.
fn masters(pid: i32) -> impl Iterator<Item = RawFd> {
    let is_one = |target: &std::path::Path| target.file_name().is_some_and(|name| name == "ptmx");
    process::descriptors(pid).filter(move |(_, target)| is_one(target)).map(|(fd, _)| fd)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use rekindle_os::beneath::Owners;

    use super::*;

    #[test]
    fn a_terminal_is_emptied_saved_and_filled() {
        let pid = std::process::id().cast_signed();
        let dir = tempfile::tempdir().unwrap();
        let image = Beneath::root(dir.path(), Owners::Any).unwrap();
        let none = Before { has_some: false, count: std::fs::read_to_string(COUNT).ok() };
        let master = OwnedFd::from(File::options().read(true).write(true).open("/dev/ptmx").unwrap());
        assert!(Before::look(&[pid]).has_some && !none.still_none(), "it was opened since");
        let waiting = Waiting { output: b"one\r\n".into(), ..Waiting::default() };
        // It is locked: nobody can have written to it.
        assert!(terminal::put_back(&master, waiting.clone()).is_err());
        let inner = process::inner_pid(pid).unwrap();
        let terminal = Terminal { pid: inner, fd: master.as_raw_fd(), waiting };
        let emptied = Emptied(vec![(master, terminal.clone())]);
        emptied.save(&image).unwrap();
        let read: Vec<Terminal> = serde_json::from_slice(&image.join(FILE).content(LONGEST).unwrap()).unwrap();
        assert_eq!(read, [terminal]);
        for bytes in [
            &b"[{\"pid\": 1}]"[..],
            b"[{\"pid\":-1,\"fd\":-1,\"waiting\":{\"output\":[1],\"input\":[],\"closed\":true}}]",
        ] {
            std::fs::write(dir.path().join(FILE), bytes).unwrap();
            put_back(pid, &image);
        }
    }
}
