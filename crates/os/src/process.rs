//! Reads processes from /proc: the tree, pids inside a namespace, memory.
//!
//! A process may end between two reads; functions that list skip processes that have ended.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use super::spawn::Ended;

/// Opens a pidfd.
///
/// # Errors
/// When there is no such process.
pub fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: a system call on numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel returned a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A descriptor of another process, as one of ours (Linux 5.6).
///
/// # Errors
/// When it has none of this number, or is gone, or the right to trace it is missing.
pub fn fetch_descriptor(pidfd: &OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a system call on numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel returned a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The children of a process, of all its threads (kernel option CONFIG_PROC_CHILDREN, which CRIU needs too).
#[must_use]
pub fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let texts = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    texts.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>()).collect()
}

/// The threads of a process.
#[must_use]
pub fn threads(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    threads.flatten().filter_map(|thread| thread.file_name().to_str()?.parse().ok()).collect()
}

/// The process and all below it, parents first.
#[must_use]
pub fn tree(root: i32) -> Vec<i32> {
    let mut all = vec![root];
    let mut at = 0;
    while let Some(pid) = all.get(at).copied() {
        for child in children(pid) {
            // A child that moves to the subreaper during the walk can be seen twice.
            if !all.contains(&child) {
                all.push(child);
            }
        }
        at += 1;
    }
    all
}

/// A field of /proc/PID/status.
fn status(pid: i32, field: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).map(|value| value.trim().to_string())
}

/// The thread of `pid` that is meant by `tid`, which may be numbered as we see it or as the process does.
#[must_use]
pub fn find_thread(pid: i32, tid: i32) -> Option<i32> {
    let threads = threads(pid);
    if threads.contains(&tid) {
        return Some(tid);
    }
    threads.into_iter().find(|outer| inner_pid(*outer) == Some(tid))
}

/// The pid in the innermost namespace of the process.
#[must_use]
pub fn inner_pid(pid: i32) -> Option<i32> {
    status(pid, "NSpid")?.split_whitespace().last()?.parse().ok()
}

/// The command name, at most 15 bytes.
#[must_use]
pub fn name(pid: i32) -> Option<String> {
    Some(std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_string())
}

/// The single-letter state ('R', 'S', 't' for stopped by a tracer, 'Z' for dead and not reaped).
#[must_use]
pub fn state(pid: i32) -> Option<char> {
    status(pid, "State")?.chars().next()
}

/// How a process ended that is dead and not reaped yet (field 52 of /proc/PID/stat, which only root may read).
#[must_use]
pub fn ended(pid: i32) -> Option<Ended> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_whitespace();
    if !matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let status: i32 = fields.nth(48)?.parse().ok()?;
    Some(match status & 0x7f {
        0 => Ended::Exit(status >> 8 & 0xff),
        signal => Ended::Signal(signal),
    })
}

/// Processor time of a process and of the children that it has waited for, in clock ticks.
#[must_use]
pub fn cpu_ticks(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // utime, stime, cutime and cstime are the fields 14 to 17; the third is the first after the name.
    let fields = text.get(text.rfind(')')? + 1..)?.split_whitespace().skip(11).take(4);
    fields.map(|field| field.parse::<u64>().ok()).sum()
}

/// The pid of the tracer, 0 without one.
#[must_use]
pub fn tracer(pid: i32) -> Option<i32> {
    status(pid, "TracerPid")?.parse().ok()
}

/// Lowers the priority for the processor; applies to this thread and those that it starts (setpriority(2), NPTL).
pub fn be_nice() {
    // SAFETY: a system call on numbers; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
}

/// Makes the calling thread read and write only while nobody else uses the disk, if the kernel's scheduler for that
/// disk knows priorities; others ignore it.
pub fn be_last_at_the_disk() {
    const WHO_PROCESS: libc::c_int = 1;
    const IDLE: libc::c_int = 3 << 13;
    // SAFETY: a system call on numbers; 0 is the calling thread.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, IDLE) };
}

/// Makes the calling thread run immediately, before all normal threads: only for a thread that does little at a time
/// and that others wait for. Needs CAP_SYS_NICE or RLIMIT_RTPRIO; without them it is scheduled normally.
pub fn be_prompt() {
    let first = libc::sched_param { sched_priority: 1 };
    // SAFETY: a number, a policy and a struct that lives until the call is over; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const first) };
}

/// Real, effective, saved and file system user id.
#[must_use]
pub fn user_ids(pid: i32) -> Option<Vec<u32>> {
    ids(pid, "Uid")
}

/// Real, effective, saved and file system group id.
#[must_use]
pub fn group_ids(pid: i32) -> Option<Vec<u32>> {
    ids(pid, "Gid")
}

fn ids(pid: i32, field: &str) -> Option<Vec<u32>> {
    status(pid, field)?.split_whitespace().map(|id| id.parse().ok()).collect()
}

/// The effective capabilities, a bit each.
#[must_use]
pub fn effective_capabilities(pid: i32) -> Option<u64> {
    u64::from_str_radix(&status(pid, "CapEff")?, 16).ok()
}

/// Whether the process has mapped a file of this name.
#[must_use]
pub fn has_mapped(pid: i32, name: &str) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().any(|line| line.rsplit('/').next() == Some(name))
}

/// Memory of a process, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Its own pages, present or swapped out; not file caches.
    pub anonymous: u64,
    /// Present pages of memory that can be shared (anonymous, memfd, tmpfs, System V).
    pub shared: u64,
}

/// The memory that an image of this process must contain; nothing for one that has ended.
#[must_use]
pub fn memory(pid: i32) -> Memory {
    let bytes = |field| {
        let kib = status(pid, field).and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    };
    Memory { anonymous: bytes("RssAnon") + bytes("VmSwap"), shared: bytes("RssShmem") }
}

/// A variable of the environment that the process was started with; what it changed there itself is not seen.
#[must_use]
pub fn environment(pid: i32, name: &str) -> Option<String> {
    let all = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value =
        all.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    Some(String::from_utf8_lossy(value).into_owned())
}

/// The executable, or `None` for a process that has ended.
#[must_use]
pub fn executable(pid: i32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/exe")).ok()
}

/// Start time in clock ticks since boot: with the pid it names a process for the life of the machine.
#[must_use]
pub fn start_time(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain spaces; field 22 is the 20th after it.
    text.get(text.rfind(')')? + 1..)?.split_whitespace().nth(19)?.parse().ok()
}

/// Where the stack was made at the last exec, which forks keep (field 28 of /proc/PID/stat); 0 for who may not know it.
#[must_use]
pub fn stack_start(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.get(text.rfind(')')? + 1..)?.split_whitespace().nth(25)?.parse().ok()
}

/// Changes of this id tell reboots.
///
/// # Errors
/// When /proc is not there.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_string())
}

/// A path as the process sees it, reached from here.
#[must_use]
pub fn path_in(pid: i32, path: &Path) -> PathBuf {
    let mut full = PathBuf::from(format!("/proc/{pid}/root"));
    full.push(path.strip_prefix("/").unwrap_or(path));
    full
}
