//! What only a thread itself can set (personality(2), the memory policy), set by the threads of a restored job before they run.
//!
//! Until it resumes them CRIU traces the tasks, and a task has one tracer. So their processes get a SIGSTOP, stop before
//! their first instruction, and each thread then executes a system call for us.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use rekindle_objects::{Difference, setting};
use rekindle_os::{process, ptrace};

/// How long the threads of a process may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// What differs, by the process as the job sees it.
#[derive(Debug, Default)]
pub(crate) struct Later(BTreeMap<i32, Vec<Difference>>);

impl Later {
    /// Lets the processes of these differences stop when CRIU resumes them.
    pub(crate) fn hold(root: i32, differences: Vec<Difference>) -> Later {
        let mut all: BTreeMap<i32, Vec<Difference>> = BTreeMap::new();
        for difference in differences {
            all.entry(difference.process.0).or_default().push(difference);
        }
        let later = Later(all);
        for (pid, _) in later.processes(root) {
            drop(ptrace::stop_when_let_go(pid));
        }
        later
    }

    /// The processes, as we see them and as the job does.
    fn processes(&self, root: i32) -> Vec<(i32, i32)> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let both = |pid: i32| Some((pid, process::inner_pid(pid)?));
        process::tree(root).into_iter().filter_map(both).filter(|(_, inner)| self.0.contains_key(inner)).collect()
    }

    /// Sets the old values. What cannot be set is told. Processes that are `held` for something else stay stopped, the
    /// others are resumed.
    pub(crate) fn set(&self, root: i32, held: &BTreeSet<i32>) {
        for (pid, inner) in self.processes(root) {
            let stopped = ptrace::stop(pid, STOP_TIMEOUT);
            for difference in self.0.get(&inner).into_iter().flatten() {
                let result = match &stopped {
                    Ok(_) => set(pid, difference),
                    Err(error) => Err(io::Error::other(error.to_string())),
                };
                if let Err(error) = result {
                    tracing::warn!("not as before the restore ({}): {difference}: {error}", difference.row.item);
                }
            }
            if !held.contains(&inner) {
                let _ = ptrace::go_on(pid);
            }
        }
    }
}

fn set(pid: i32, difference: &Difference) -> io::Result<()> {
    let inner = difference.at.unwrap_or(difference.process.0);
    let tid = process::thread_by_inner(pid, inner).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    let wanted = setting(difference).ok_or_else(|| io::Error::other("its value is not known"))?;
    ptrace::set(pid, tid, &wanted)
}
