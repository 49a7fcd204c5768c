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
mod names;
mod process;
mod socket;
mod thread;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};

use rekindle_os::mounts;
use rekindle_os::parallel;
use rekindle_os::process as os_process;

use kind::Kind;

use crate::advice::Advice;
use crate::record::{self, Record};
use crate::signals;

/// What was read, as the kernel gave it.
#[derive(Debug)]
pub struct Raw {
    /// The first process of the tree, as we see it.
    root: i32,
    processes: Vec<process::Raw>,
    sockets: Sockets,
    identity: identity::Identity,
    mounts: names::Mounts,
    advice: Advice,
}

/// Sockets by their name in /proc/PID/fd. One of many descriptors is read once: it has about a hundred options.
type Sockets = HashMap<String, socket::Raw>;

impl Raw {
    /// Reads the processes of a tree, with pids as we see them. None of them may run.
    #[must_use]
    pub fn read(tree: &[i32]) -> Raw {
        let read = |pid: i32| -> Result<process::Raw, Infallible> { Ok(process::Raw::read(pid, tree)) };
        let Ok(mut processes) = parallel::in_parallel(tree.to_vec(), THREADS, read);
        processes.sort_unstable_by_key(|process| process.pid);
        let sockets = descriptors(&mut processes);
        let identity = identity::Identity::find(&open(&processes));
        let (root, advice) = (tree.first().copied().unwrap_or_default(), Advice::default());
        let mounts = names::Mounts::of(&mounts::of(root).unwrap_or_default());
        Raw { root, processes, sockets, identity, mounts, advice }
    }

    /// Adds what was read while the job ran.
    pub fn add(&mut self, advice: Advice) {
        self.advice = advice;
    }

    /// Lets terminals with O_ASYNC send their signals as before: CRIU takes the flag from them and sets it again, so that their
    /// signals would name one of its own descriptors. It does not touch the flag of others, nor do we.
    pub fn send_signals_again(&self) {
        for process in &self.processes {
            let sends = |raw: &&descriptor::Raw| {
                let flags = raw.info.lines().find_map(|line| line.strip_prefix("flags:"));
                Kind::of(&raw.target) == Kind::Terminal && flags.is_some_and(|flags| signals::sends(flags.trim()))
            };
            let numbers: Vec<i32> = process.descriptors.iter().filter(sends).map(|raw| raw.number).collect();
            if !numbers.is_empty() {
                signals::send(process.pid, &numbers);
            }
        }
    }

    /// Makes the record of it.
    #[must_use]
    pub fn record(self, criu: &str) -> Record {
        let pids = self.pids();
        let (identity, opened) = {
            let open = open(&self.processes);
            (self.identity.named(&open, &pids), self.mounts.files(&open))
        };
        let of_root = self.processes.iter().find(|process| process.pid == self.root).and_then(process::Raw::groups);
        let of_root = of_root.unwrap_or_default().to_owned();
        let of_each = |process: process::Raw| {
            let advice = self.advice.of(process.pid, process.maps());
            let (mut record, files) = process.record(&of_root, &pids, &identity, &self.sockets)?;
            record.items.extend(advice.map(|advice| ("memory-advice".to_owned(), advice)));
            Some((record, files))
        };
        let mut processes: Vec<_> = self.processes.into_iter().filter_map(of_each).collect();
        let names = names::find(&mut processes, &opened);
        let mut processes: Vec<record::Process> = processes.into_iter().map(|(process, _)| process).collect();
        processes.sort_unstable_by_key(|process| process.pid);
        let kernel = nix::sys::utsname::uname();
        let kernel = kernel.map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default();
        Record { kernel, criu: criu.to_owned(), processes, names }
    }

    fn pids(&self) -> Pids {
        Pids(self.processes.iter().flat_map(process::Raw::ids).collect())
    }
}

fn open(processes: &[process::Raw]) -> Vec<identity::Open<'_>> {
    let all = processes.iter().flat_map(|process| process.descriptors.iter().map(move |raw| (process.pid, raw)));
    all.map(|(pid, raw)| identity::Open { place: (pid, raw.number), target: &raw.target, info: &raw.info }).collect()
}

/// Reads the descriptors of these processes. One process may have thousands, so the threads share them in pieces.
fn descriptors(processes: &mut [process::Raw]) -> Sockets {
    let known = Mutex::new(HashSet::new());
    let is_new = |name: &str| known.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
    let pieces = processes.iter().enumerate();
    let pieces = pieces.flat_map(|(at, process)| process.table.numbers().chunks(PIECE).map(move |piece| (at, piece)));
    let read = |(at, piece): (usize, &[i32])| -> Result<_, Infallible> {
        let table = processes.get(at).map(|process| &process.table);
        let each = piece.iter().filter_map(|number| table?.read(*number, is_new));
        let (all, sockets): (Vec<_>, Vec<_>) = each.unzip();
        let names = all.iter().map(|raw: &descriptor::Raw| raw.target.clone());
        let sockets: Vec<_> = names.zip(sockets).filter_map(|(name, socket)| Some((name, socket?))).collect();
        Ok((at, all, sockets))
    };
    let Ok(done) = parallel::in_parallel(pieces.collect(), THREADS, read);
    let mut sockets = Sockets::new();
    for (at, all, more) in done {
        if let Some(process) = processes.get_mut(at) {
            process.descriptors.extend(all);
        }
        sockets.extend(more);
    }
    for process in processes {
        process.descriptors.sort_unstable_by_key(|descriptor| descriptor.number);
    }
    sockets
}

/// Descriptors that a thread reads before it asks for more.
const PIECE: usize = 32;

/// Threads that read: each waits for nothing but the kernel.
const THREADS: usize = 16;

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
    std::fs::read(path).ok().map(lossy)
}

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
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
