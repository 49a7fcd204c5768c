//! Reads what the kernel has, while no task runs: from /proc, by system calls on descriptors of the tasks, and by those
//! that answer for another thread.
//!
//! Reading is apart from making the record: the job stands still meanwhile. What cannot be read is left out, on both
//! sides, as with a kernel that does not have an item.

mod descriptor;
mod fdinfo;
mod identity;
mod kind;
mod mappings;
mod process;
mod socket;
mod thread;

use std::collections::BTreeMap;

use rekindle_os::parallel;
use rekindle_os::process as os_process;

use crate::record::{self, Record};

/// What was read, as the kernel gave it.
#[derive(Debug)]
pub struct Raw {
    processes: Vec<process::Raw>,
    identity: identity::Identity,
}

impl Raw {
    /// Reads the processes of a tree, with pids as we see them. None of them may run.
    #[must_use]
    pub fn read(tree: &[i32]) -> Raw {
        let read = |pid: i32| -> Result<process::Raw, std::convert::Infallible> { Ok(process::Raw::read(pid)) };
        let Ok(mut processes) = parallel::in_parallel(tree.to_vec(), THREADS, read);
        processes.sort_unstable_by_key(|process| process.pid);
        let identity = identity::Identity::find(&open(&processes));
        Raw { processes, identity }
    }

    /// Makes the record of it.
    #[must_use]
    pub fn record(self, criu: &str) -> Record {
        let pids = self.pids();
        let identity = self.identity.named(&open(&self.processes), &pids);
        let mut processes: Vec<record::Process> =
            self.processes.into_iter().filter_map(|process| process.record(&pids, &identity)).collect();
        processes.sort_unstable_by_key(|process| process.pid);
        let kernel = nix::sys::utsname::uname();
        let kernel = kernel.map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default();
        Record { kernel, criu: criu.to_owned(), processes }
    }

    fn pids(&self) -> Pids {
        Pids(self.processes.iter().flat_map(process::Raw::ids).collect())
    }
}

fn open(processes: &[process::Raw]) -> Vec<identity::Open<'_>> {
    let all = processes.iter().flat_map(|process| process.descriptors.iter().map(move |raw| (process.pid, raw)));
    all.map(|(pid, raw)| identity::Open { place: (pid, raw.number), target: &raw.target, info: &raw.info }).collect()
}

/// Threads that read: each waits for nothing but the kernel.
const THREADS: usize = 4;

/// What a process or thread is called that is none of the job.
const OUTSIDE: &str = "outside";

/// Ids of the job's threads as it sees them, by what we see.
#[derive(Debug)]
struct Pids(BTreeMap<i32, i32>);

impl Pids {
    /// What the job calls a process or thread that we call `outer`.
    fn inner(&self, outer: i32) -> String {
        match self.0.get(&outer) {
            Some(inner) => inner.to_string(),
            None => OUTSIDE.to_owned(),
        }
    }
}

/// A file of /proc; `None` if the kernel has no such file, or the task is gone.
fn text(path: &str) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    Some(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// The value of a field of a `status` file.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The last word of a field: that of the innermost namespace.
fn innermost(status: &str, name: &str) -> Option<i32> {
    field(status, name)?.split_whitespace().last()?.parse().ok()
}

/// Signals that wait, without SIGSTOP: with that CRIU stops a process again that was stopped.
fn pending(mask: &str) -> String {
    const STOP: u64 = 1 << (libc::SIGSTOP - 1);
    u64::from_str_radix(mask, 16).map_or_else(|_| mask.to_owned(), |mask| format!("{:016x}", mask & !STOP))
}

/// Opens another process to fetch its descriptors.
fn pidfd(pid: i32) -> Option<std::os::fd::OwnedFd> {
    os_process::open_pidfd(pid).ok()
}

#[cfg(test)]
mod tests;
