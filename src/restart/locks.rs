//! Locks on files that CRIU loses ([`image::lost_locks`]), taken again before the job runs.
//!
//! Each process that held one stands still from the moment that CRIU lets it go until it has its locks back.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::sys::criu::image::LostLock;
use crate::sys::{process, ptrace};

/// How long the threads of a process may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A process could not take a lock again.
#[derive(Debug, thiserror::Error)]
#[error("process {pid} cannot take its lock on {} again: see who holds it (lslocks)", path.display())]
pub struct Error {
    pid: i32,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Has the processes of the tree below `root` that lost locks stand still as soon as CRIU lets them go.
pub(super) fn hold(root: i32, lost: &[LostLock]) {
    let had = |pid: &i32| process::inner_pid(*pid).is_some_and(|inner| lost.iter().any(|lost| lost.pid == inner));
    process::tree(root).into_iter().filter(had).for_each(|pid| drop(ptrace::stop_when_let_go(pid)));
}

/// Has them take their locks. Those that are also `held` for something else stay stopped, the others go on.
pub(super) fn take_again(root: i32, lost: &[LostLock], held: &[i32]) -> Result<(), Error> {
    if lost.is_empty() {
        return Ok(());
    }
    let mut waiting = Vec::new();
    for pid in process::tree(root) {
        let Some(inner) = process::inner_pid(pid) else { continue };
        let own: Vec<_> = lost.iter().filter(|lost| lost.pid == inner).collect();
        if own.is_empty() {
            continue;
        }
        for lost in own {
            let failed = |source| Error { pid: inner, path: lost.path.clone(), source };
            // It runs until the SIGSTOP has come that waits for it.
            ptrace::stop(pid, STOP_TIMEOUT).map_err(failed)?;
            ptrace::take_lock(pid, lost.fd, lost.lock).map_err(failed)?;
        }
        if !held.contains(&inner) {
            waiting.push(pid);
        }
    }
    // Only when all have theirs: one of them would find a lock free that another one holds.
    for pid in waiting {
        let _ = ptrace::go_on(pid);
    }
    Ok(())
}
