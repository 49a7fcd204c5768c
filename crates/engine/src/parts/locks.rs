//! File locks that CRIU loses (`rekindle_criu::image::lost_locks`), taken again before the job runs.
//!
//! Each process that uses a file with a lost lock is stopped from the moment that CRIU resumes it until all such locks
//! are taken. Otherwise another process could take one first.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_criu::image::LostLocks;
use rekindle_os::{process, ptrace};

/// How long the threads of a process may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A process could not take a lock again.
#[derive(Debug, thiserror::Error)]
#[error("process {pid} cannot lock {} again: another process has the lock; find it with lslocks", path.display())]
pub struct Error {
    pid: i32,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Stops the processes of the tree below `root` that use a file with a lost lock, as soon as CRIU resumes them.
pub(crate) fn hold(root: i32, lost: &LostLocks) {
    for pid in users(root, lost) {
        drop(ptrace::stop_when_let_go(pid));
    }
}

/// Takes the locks again for the processes that had them. Those that are also `held` for something else stay stopped, as
/// do those that somebody had stopped before the image was taken; the others are resumed.
pub(crate) fn take_again(root: i32, lost: &LostLocks, held: &[i32]) -> Result<(), Error> {
    let mut waiting = Vec::new();
    for pid in users(root, lost) {
        let Some(inner) = process::inner_pid(pid) else { continue };
        let failed = |path: &Path, source| Error { pid: inner, path: path.into(), source };
        for own in lost.locks.iter().filter(|lock| lock.pid == inner) {
            // The process runs until the pending SIGSTOP arrives.
            ptrace::stop(pid, STOP_TIMEOUT).map_err(|error| failed(&own.path, error))?;
            ptrace::take_lock(pid, own.fd, own.lock).map_err(|error| failed(&own.path, error))?;
        }
        if !held.contains(&inner) {
            waiting.push(pid);
        }
    }
    // Only when all locks are taken: otherwise a process could find a lock free that belongs to another.
    for pid in waiting {
        let _ = ptrace::go_on(pid);
    }
    Ok(())
}

/// The processes that use a file with a lost lock, as we see them.
fn users(root: i32, lost: &LostLocks) -> Vec<i32> {
    if lost.users.is_empty() {
        return Vec::new();
    }
    let uses = |pid: &i32| process::inner_pid(*pid).is_some_and(|inner| lost.users.contains(&inner));
    process::tree(root).into_iter().filter(uses).collect()
}
