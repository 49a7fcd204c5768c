//! File locks that CRIU loses (`rekindle_criu::image::lost_locks`), taken again before the job runs.
//!
//! Each process that uses a file with a lost lock is stopped from the moment that CRIU resumes it until all such locks
//! are taken. Otherwise another process could take one first.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_criu::image::LostLocks;
use rekindle_objects::Difference;
use rekindle_os::ptrace::PosixLock;
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

/// Whether the locks on a file differ only in those that the process takes again.
pub(crate) fn are_taken_again(lost: &LostLocks, difference: &Difference) -> bool {
    let pid = difference.process.0;
    let own: BTreeSet<String> = lost.locks.iter().filter(|lock| lock.pid == pid).map(|own| line(own.lock)).collect();
    let lines = |value: &Option<String>| -> BTreeSet<String> {
        value.iter().flat_map(|value| value.lines()).map(ToOwned::to_owned).collect()
    };
    let (then, now) = (lines(&difference.then), lines(&difference.now));
    now.is_subset(&then) && then.iter().all(|lock| now.contains(lock) || own.contains(lock))
}

/// As /proc/PID/fdinfo has it, without what is the machine's.
fn line(PosixLock { kind, start, length }: PosixLock) -> String {
    let access = if i32::from(kind) == libc::F_WRLCK { "WRITE" } else { "READ" };
    let end = if length == 0 { "EOF".to_owned() } else { start.saturating_add(length - 1).to_string() };
    format!("POSIX ADVISORY {access} {start} {end}")
}

/// The processes that use a file with a lost lock, as we see them.
fn users(root: i32, lost: &LostLocks) -> Vec<i32> {
    if lost.users.is_empty() {
        return Vec::new();
    }
    let uses = |pid: &i32| process::inner_pid(*pid).is_some_and(|inner| lost.users.contains(&inner));
    process::tree(root).into_iter().filter(uses).collect()
}

#[cfg(test)]
mod tests {
    use rekindle_criu::image::LostLock;
    use rekindle_objects::table;

    use super::*;

    #[test]
    fn only_what_the_process_takes_again_is_no_difference() {
        let lock = |kind: i32, start, length| LostLock {
            pid: 7,
            fd: 3,
            path: "/db-shm".into(),
            lock: PosixLock { kind: kind.try_into().unwrap(), start, length },
        };
        let locks = vec![lock(libc::F_RDLCK, 123, 1), lock(libc::F_WRLCK, 0, 0)];
        let lost = LostLocks { locks, users: [7].into() };
        let (read, write) = ("POSIX ADVISORY READ 123 123", "POSIX ADVISORY WRITE 0 EOF");
        let (both, flock) = (format!("{read}\n{write}"), "FLOCK ADVISORY WRITE 0 EOF");
        let row = table::find(table::Of::Descriptor, "locks").unwrap();
        let are_taken_again = |pid, then: &str, now: &str| {
            let [then, now] = [then, now].map(|value| (!value.is_empty()).then(|| value.to_owned()));
            are_taken_again(&lost, &Difference { row, process: (pid, "x".into()), at: Some(3), then, now })
        };
        assert!(are_taken_again(7, &both, "") && are_taken_again(7, &both, read));
        assert!(are_taken_again(7, &format!("{flock}\n{read}"), flock));
        assert!(!are_taken_again(8, &both, "") && !are_taken_again(7, &format!("{flock}\n{read}"), ""));
        assert!(!are_taken_again(7, "POSIX ADVISORY READ 123 124", "") && !are_taken_again(7, "", read));
    }
}
