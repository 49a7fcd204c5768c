//! Whose process it is that a line of the kernel's log names: the job's, or another program's on the same GPU.
//!
//! The log has pids of the first PID namespace, also of processes that have ended since. So the pids and names that the
//! job had are remembered.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rekindle_os::process;

/// A process that a line names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    /// Its pid in the first namespace.
    pub(crate) pid: i32,
    /// Its name, at most 15 bytes.
    pub(crate) name: Option<String>,
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.pid)?;
        self.name.as_ref().map_or(Ok(()), |name| write!(f, " ({name})"))
    }
}

/// Whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The job's, of its present life.
    Job,
    /// The job's, of the life before.
    Before,
    /// Another program's.
    Other(Named),
    /// Nobody says.
    Unknown,
}

/// Processes of the present life of the job and of the one before, whose end may be told late.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Seen {
    root: i32,
    before: BTreeSet<i32>,
    pids: BTreeSet<i32>,
    names: BTreeSet<String>,
    /// The last pid that the kernel had given away at the last look.
    last: i32,
}

/// The same, for several threads.
#[derive(Debug, Clone, Default)]
pub(crate) struct Kin(Arc<Mutex<Seen>>);

impl Kin {
    /// A life with this root begins.
    pub(crate) fn life_begins(&self, root: i32) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.root = root;
        seen.before = std::mem::take(&mut seen.pids);
        drop(seen);
        self.look();
    }

    /// Looks what processes there are now. Cheap enough for each snapshot, too dear for each second.
    pub(crate) fn look(&self) {
        let root = self.0.lock().unwrap_or_else(PoisonError::into_inner).root;
        let tree = process::tree(root);
        let last = last_pid();
        let names: Vec<String> = tree.iter().filter_map(|pid| process::name(*pid)).collect();
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.pids.extend(tree);
        seen.last = last;
        seen.names.extend(names);
    }

    /// One that has died.
    pub(crate) fn add(&self, pid: i32, name: &str) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.pids.insert(pid);
        seen.names.insert(name.to_owned());
    }

    /// Whose a process is that the log names.
    pub(crate) fn whose(&self, named: Option<Named>) -> Whose {
        let Some(named) = named else { return Whose::Unknown };
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let pid = named.pid;
        let alive = Path::new(&format!("/proc/{pid}")).exists();
        let in_tree = || process::tree(seen.root).contains(&pid);
        whose(&seen, named, in_first_namespace(), alive, in_tree)
    }
}

fn whose(seen: &Seen, named: Named, first: bool, alive: bool, in_tree: impl FnOnce() -> bool) -> Whose {
    let same_name = named.name.as_ref().is_some_and(|name| seen.names.contains(name));
    if first && seen.before.contains(&named.pid) && !seen.pids.contains(&named.pid) {
        return Whose::Before;
    }
    let known = seen.pids.contains(&named.pid);
    let is_ours = match (first, alive) {
        // Pids of another namespace say nothing here.
        (false, _) if named.name.is_none() => return Whose::Unknown,
        (false, _) => same_name,
        (true, true) => known || in_tree(),
        // The job may have started it since it was looked at.
        (true, false) => known || same_name && named.pid > seen.last,
    };
    if is_ours { Whose::Job } else { Whose::Other(named) }
}

/// The last pid that was given away; 0 if nobody says.
fn last_pid() -> i32 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().last().and_then(|pid| pid.parse().ok()).unwrap_or_default()
}

/// Whether our pids are those of the kernel's log.
fn in_first_namespace() -> bool {
    /// `PROC_PID_INIT_INO` (include/linux/proc_ns.h).
    const FIRST: u64 = 0xEFFF_FFFC;
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(pid: i32, name: &str) -> Named {
        Named { pid, name: Some(name.into()) }
    }

    #[test]
    fn a_process_is_the_jobs_by_its_pid_and_after_its_end_by_its_name() {
        let seen = Seen {
            root: 6,
            before: [3, 7].into(),
            pids: [6, 7].into(),
            names: ["pt_main_thread".into()].into(),
            last: 8,
        };
        let (ours, other) = (named(7, "x"), named(8, "Xorg"));
        let whose = |named: &Named, first, alive, in_tree| whose(&seen, named.clone(), first, alive, || in_tree);
        assert_eq!(whose(&ours, true, true, false), Whose::Job);
        assert_eq!(whose(&ours, true, false, false), Whose::Job, "it has died just now");
        assert_eq!(whose(&other, true, true, true), Whose::Job, "it has begun just now");
        assert_eq!(whose(&other, true, true, false), Whose::Other(other.clone()));
        assert_eq!(whose(&other, true, false, false), Whose::Other(other.clone()));
        assert_eq!(whose(&named(3, "x"), true, false, false), Whose::Before);
        let old = named(5, "pt_main_thread");
        assert_eq!(whose(&old, true, false, false), Whose::Other(old.clone()), "it was there at the last look");
        let young = named(9, "pt_main_thread");
        assert_eq!(whose(&young, true, false, false), Whose::Job, "it began and died since the last look");
        assert_eq!(whose(&young, true, true, false), Whose::Other(young.clone()), "another program of that name");
        // In a container the pids are others.
        assert_eq!(whose(&named(7, "Xorg"), false, true, true), Whose::Other(named(7, "Xorg")));
        assert_eq!(whose(&named(4711, "pt_main_thread"), false, false, false), Whose::Job);
        assert_eq!(whose(&Named { pid: 7, name: None }, false, true, true), Whose::Unknown);
    }

    #[test]
    fn own_processes_are_told_from_others() {
        let kin = Kin::default();
        let own = std::process::id().cast_signed();
        kin.life_begins(own);
        if in_first_namespace() {
            assert_eq!(kin.whose(Some(Named { pid: own, name: None })), Whose::Job);
            assert!(matches!(kin.whose(Some(named(1, "init"))), Whose::Other(_)));
        }
        assert_eq!(kin.whose(None), Whose::Unknown);
        assert_eq!(named(5, "python3").to_string(), "process 5 (python3)");
    }
}
