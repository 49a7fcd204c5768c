//! Reads processes from /proc: the tree, pids inside a namespace, memory.
//!
//! A process may end between two reads; functions that list skip processes that have ended.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use rekindle_base::Ended;
use std::fmt::Display;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sched::CloneFlags;
use procfs_core::FromRead;
use procfs_core::process::Stat;
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open, setpriority_process, test_kill_process,
};

use super::maps;

/// Opens a pidfd.
///
/// # Errors
/// When there is no such process.
pub fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    let pid = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw).ok_or(rustix::io::Errno::INVAL)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// A descriptor of another process, as one of ours (Linux 5.6).
///
/// # Errors
/// When there is no such descriptor or process, or we may not trace it.
pub fn fetch_descriptor(pidfd: &OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    // The number may be a job's, and rustix asserts that it can be one.
    if number < 0 {
        return Err(rustix::io::Errno::BADF.into());
    }
    Ok(pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?)
}

/// The children of a process, of all its threads (kernel option CONFIG_PROC_CHILDREN, which CRIU needs too).
#[must_use]
pub fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let texts = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    texts.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>()).collect()
}

/// The parent of a process.
#[must_use]
pub fn parent(pid: i32) -> Option<i32> {
    stat(pid).map(|stat| stat.ppid).filter(|pid| *pid > 0)
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

/// A file of /proc/PID as text. What is not UTF-8 is replaced: the kernel shows names as they are, and a process may
/// give itself and its files any.
///
/// # Errors
/// When the process is gone (ENOENT, or ESRCH from one that ends while it is read), or belongs to somebody else.
pub fn text(pid: impl Display, file: &str) -> io::Result<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/{file}"))?;
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

fn stat(pid: i32) -> Option<Stat> {
    Stat::from_file(format!("/proc/{pid}/stat")).ok()
}

/// How a process is related to others, as we see their pids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relations {
    /// The process that it is a child of.
    pub parent: i32,
    /// Its process group.
    pub group: i32,
    /// Its session.
    pub session: i32,
    /// The signal that its parent gets when it ends; 0 for none.
    pub exit_signal: i32,
}

/// How a process is related to others, also one that is dead and not reaped.
#[must_use]
pub fn relations(pid: i32) -> Option<Relations> {
    let stat = stat(pid)?;
    let exit_signal = stat.exit_signal.unwrap_or(libc::SIGCHLD);
    Some(Relations { parent: stat.ppid, group: stat.pgrp, session: stat.session, exit_signal })
}

/// Whether a thread or process is on its way to its end (`PF_EXITING` of the kernel's linux/sched.h), dead, or gone. From
/// the first on, it gives back what it shares with others.
#[must_use]
pub fn is_leaving(tid: i32) -> bool {
    const PF_EXITING: u32 = 0x4;
    stat(tid).is_none_or(|stat| stat.flags & PF_EXITING != 0)
}

/// A field of /proc/PID/status.
#[must_use]
pub fn status(pid: impl Display, field: &str) -> Option<String> {
    let text = text(pid, "status").ok()?;
    text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).map(|value| value.trim().to_string())
}

/// The thread of `pid` that has the id `inner` in the innermost namespace of the process. Another one can have that number as we
/// see it.
#[must_use]
pub fn thread_by_inner(pid: i32, inner: i32) -> Option<i32> {
    threads(pid).into_iter().find(|outer| inner_pid(*outer) == Some(inner))
}

/// The thread of `pid` that has the id `tid` as we see it. If it has none, the one with this id in the innermost namespace of
/// the process.
#[must_use]
pub fn thread_by_outer_or_inner(pid: i32, tid: i32) -> Option<i32> {
    threads(pid).into_iter().find(|outer| *outer == tid).or_else(|| thread_by_inner(pid, tid))
}

/// The pid in the innermost namespace of the process.
#[must_use]
pub fn inner_pid(pid: i32) -> Option<i32> {
    status(pid, "NSpid")?.split_whitespace().last()?.parse().ok()
}

/// The command name, at most 15 bytes.
#[must_use]
pub fn name(pid: i32) -> Option<String> {
    Some(text(pid, "comm").ok()?.trim_end().to_string())
}

/// The single-letter state ('R', 'S', 't' for stopped by a tracer, 'Z' for dead and not reaped).
#[must_use]
pub fn state(pid: i32) -> Option<char> {
    status(pid, "State")?.chars().next()
}

/// Whether it is dead, even if it is not reaped yet. A process whose state cannot be read, for want of a descriptor, is
/// not taken for dead while its pid exists.
#[must_use]
pub fn has_ended(pid: i32) -> bool {
    match state(pid) {
        Some(state) => matches!(state, 'Z' | 'X'),
        None => Pid::from_raw(pid).is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH)),
    }
}

/// Whether it has given back its memory: it is dead, or runs only kernel code any more on its way to be.
#[must_use]
pub fn is_ending(pid: i32) -> bool {
    has_ended(pid) || text(pid, "statm").is_ok_and(|text| text.starts_with("0 "))
}

/// How a process ended that is dead and not reaped yet, which only root may read.
#[must_use]
pub fn ended(pid: i32) -> Option<Ended> {
    let stat = stat(pid).filter(|stat| matches!(stat.state, 'Z' | 'X'))?;
    let status = stat.exit_code?;
    Some(match status & 0x7f {
        0 => Ended::Exit(status >> 8 & 0xff),
        signal => Ended::Signal(signal),
    })
}

/// Processor time of a process and of the children that it has waited for, in clock ticks.
#[must_use]
pub fn cpu_ticks(pid: i32) -> Option<u64> {
    let stat = stat(pid)?;
    Some(stat.utime + stat.stime + stat.cutime.cast_unsigned() + stat.cstime.cast_unsigned())
}

/// Processor time of a process, without that of its children.
#[must_use]
pub fn cpu_time(pid: i32) -> Option<Duration> {
    let stat = stat(pid)?;
    let ticks = u128::from(stat.utime) + u128::from(stat.stime);
    let ms = ticks * 1000 / u128::from(rustix::param::clock_ticks_per_second()).max(1);
    Some(Duration::from_millis(u64::try_from(ms).unwrap_or(u64::MAX)))
}

/// The pid of the tracer of a process or thread, 0 without one.
#[must_use]
pub fn tracer(pid: i32) -> Option<i32> {
    status(pid, "TracerPid")?.parse().ok()
}

/// The pid of the first tracer that any thread of the process has.
#[must_use]
pub fn tracer_of_any_thread(pid: i32) -> Option<i32> {
    threads(pid).into_iter().find_map(|thread| tracer(thread).filter(|tracer| *tracer > 0))
}

/// Lowers the priority for the processor; applies to this thread and those that it starts (setpriority(2), NPTL).
pub fn be_nice() {
    let _ = setpriority_process(None, 10);
}

/// Gives the calling thread real-time priority, before all normal threads: only for a thread that does little at a time
/// and that others wait for. Needs CAP_SYS_NICE or RLIMIT_RTPRIO; without them nothing changes.
pub fn be_prompt() {
    let first = libc::sched_param { sched_priority: 1 };
    // SAFETY: a number, a policy and a struct that lives until the call is over; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const first) };
}

/// The processes that we see.
pub fn all() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
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

/// The effective capabilities as a bit set.
#[must_use]
pub fn effective_capabilities(pid: impl Display) -> Option<u64> {
    u64::from_str_radix(&status(pid, "CapEff")?, 16).ok()
}

/// Whether the process has mapped a file of this name.
#[must_use]
pub fn has_mapped(pid: i32, name: &str) -> bool {
    let maps = maps::read(pid).unwrap_or_default();
    maps::mappings(&maps).any(|mapping| mapping.file_name() == name.as_bytes())
}

/// The descriptors of a process: their numbers, and what they lead to, as the kernel calls it. None of a process that
/// has ended.
pub fn descriptors(pid: i32) -> impl Iterator<Item = (RawFd, PathBuf)> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, std::fs::read_link(entry.path()).ok()?))
    })
}

/// The inode of a socket, if this is what a descriptor leads to.
#[must_use]
pub fn socket(target: &Path) -> Option<u64> {
    target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The flags with which a descriptor was opened (open(2)).
///
/// # Errors
/// When the process is gone or has closed it, or it is of somebody else.
pub fn open_flags(pid: i32, descriptor: RawFd) -> io::Result<i32> {
    let info = text(pid, &format!("fdinfo/{descriptor}"))?;
    let flags = info.lines().find_map(|line| i32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.ok_or_else(|| io::Error::other("/proc/PID/fdinfo has an unexpected form"))
}

/// Memory of a process, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Its own pages, present or swapped out; not file caches.
    pub anonymous: u64,
    /// Present pages of memory that can be shared (anonymous, memfd, tmpfs, System V).
    pub shared: u64,
    /// Huge pages (hugetlbfs), its own and those that can be shared. The other two do not count them.
    pub huge: u64,
}

/// The memory that an image of this process must contain; zero for a process that has ended.
#[must_use]
pub fn memory(pid: i32) -> Memory {
    let bytes = |field| {
        let kib = status(pid, field).and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    };
    Memory { anonymous: bytes("RssAnon") + bytes("VmSwap"), shared: bytes("RssShmem"), huge: bytes("HugetlbPages") }
}

/// Ids and bytes of the System V segments that no process has attached, in the IPC namespace of this process. None if that
/// is our own.
///
/// # Errors
/// When the namespace cannot be entered, or the list cannot be read.
pub fn detached_segments(pid: i32) -> io::Result<Vec<(u64, u64)>> {
    let namespace = std::fs::File::open(format!("/proc/{pid}/ns/ipc"))?;
    let inode = |path: &str| std::fs::metadata(path).map(|namespace| namespace.ino());
    if namespace.metadata()?.ino() == inode("/proc/self/ns/ipc")? {
        return Ok(Vec::new());
    }
    // The list is that of the thread which opens it. This one stays in that namespace until it ends.
    let read = move || {
        nix::sched::setns(&namespace, CloneFlags::CLONE_NEWIPC)?;
        std::fs::read_to_string("/proc/sysvipc/shm")
    };
    let thread = std::thread::Builder::new().spawn(read)?;
    let list = thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))?;
    Ok(detached(&list))
}

/// Of lines with key, shmid, perms, size, cpid, lpid, nattch, uid, gid, cuid, cgid, atime, dtime, ctime, rss and swap.
fn detached(list: &str) -> Vec<(u64, u64)> {
    let segment = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        (number(6)? == 0).then_some((number(1)?, number(14)?.saturating_add(number(15)?)))
    };
    list.lines().filter_map(segment).collect()
}

/// A variable of the environment that the process was started with; its own later changes are not seen.
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

/// Start time in clock ticks since boot: together with the pid it identifies a process until the next boot.
#[must_use]
pub fn start_time(pid: i32) -> Option<u64> {
    Some(stat(pid)?.starttime)
}

/// The same as the time since the boot ([`crate::clock::since_boot`]).
#[must_use]
pub fn began(pid: i32) -> Option<Duration> {
    let per_second = rustix::param::clock_ticks_per_second();
    Some(Duration::from_millis(start_time(pid)?.saturating_mul(1000) / per_second.max(1)))
}

/// Where the stack was made at the last exec, which forks keep; 0 for who may not know it.
#[must_use]
pub fn stack_start(pid: i32) -> Option<u64> {
    Some(stat(pid)?.startstack)
}

/// An id that changes with each boot.
///
/// # Errors
/// When /proc cannot be read.
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

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_cannot_be_looked_at_has_not_ended() {
        let own = std::process::id().cast_signed();
        assert!(!has_ended(own) && has_ended(i32::MAX) && has_ended(0));
        let seen = rekindle_testing::threads::without_descriptors(|| (state(own), has_ended(own), has_ended(i32::MAX)));
        assert_eq!(seen, (None, false, true));
    }

    #[test]
    fn a_descriptor_that_cannot_be_one_is_an_error() {
        let own = open_pidfd(std::process::id().cast_signed()).unwrap();
        for number in [-1, i32::MIN, i32::MAX] {
            let error = fetch_descriptor(&own, number).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBADF), "{number}: {error}");
        }
    }

    #[test]
    fn a_process_may_have_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(OsStr::from_bytes(b"a) Z 7 (\xff\n:b"));
        // By another process: what a child of another test has open for writing cannot be executed (ETXTBSY).
        assert!(Command::new("cp").arg("/bin/sh").arg(&program).status().unwrap().success());
        let mut child = Command::new(&program).args(["-c", "read line; exit 3"]).stdin(Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        // The exec may still be under way.
        let is_there = || name(pid).as_deref() == Some("a) Z 7 (\u{fffd}\n:b") && state(pid) == Some('S');
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !is_there() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert!(is_there(), "{:?} {:?}", name(pid), state(pid));
        assert_eq!((ended(pid), tracer(pid), inner_pid(pid).is_some()), (None, Some(0), true));
        assert_eq!(status(pid, "Tgid"), Some(pid.to_string()));
        assert!(!is_ending(pid));
        assert!(start_time(pid) >= start_time(std::process::id().cast_signed()));
        assert!(cpu_time(pid).is_some_and(|time| time < Duration::from_secs(10)));
        assert!(cpu_ticks(pid).is_some_and(|ticks| ticks < 1000) && stack_start(pid).is_some());
        let (_, input) = descriptors(pid).find(|(number, _)| *number == 0).unwrap();
        assert!(input.to_str().unwrap().starts_with("pipe:["), "{}", input.display());
        assert_eq!(open_flags(pid, 0).unwrap() & libc::O_ACCMODE, libc::O_RDONLY);
        assert_eq!(open_flags(pid, 999).unwrap_err().kind(), io::ErrorKind::NotFound);

        drop(child.stdin.take());
        child_is_dead(pid);
        assert_eq!((state(pid), ended(pid)), (Some('Z'), Some(Ended::Exit(3))));
        // As soon as its memory is gone, not only when it is dead.
        assert!(is_ending(pid) && text(pid, "statm").unwrap().starts_with("0 "));
        child.wait().unwrap();
    }

    fn child_is_dead(pid: i32) {
        let pid = nix::unistd::Pid::from_raw(pid);
        let flags = nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT;
        nix::sys::wait::waitid(nix::sys::wait::Id::Pid(pid), flags).unwrap();
    }

    /// Starts a second thread that has in its PID namespace the id that the first one has for us.
    const SAME_NUMBER_TWICE: &str = "
import os, sys, threading
found, over = [], threading.Event()
def run():
    found.append(int(os.readlink('/proc/thread-self').split('/')[-1]))
    over.wait()
def start():
    before = len(found)
    threading.Thread(target=run, daemon=True).start()
    while len(found) == before: pass
start()
open('/proc/sys/kernel/ns_last_pid', 'w').write(str(found[0] - 1))
start()
print(os.readlink('/proc/self'), *found, flush=True)
sys.stdin.read()
";

    #[test]
    fn a_thread_is_found_by_the_number_that_its_process_sees() {
        if !rekindle_testing::require("root", nix::unistd::geteuid().is_root(), "not root") {
            return;
        }
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "python3", "-c", SAME_NUMBER_TWICE]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        let numbers: Vec<i32> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let [pid, first, second] = numbers[..] else { panic!("{line:?}") };
        assert_eq!(inner_pid(second), Some(first), "the numbers are the same");
        assert_eq!(thread_by_inner(pid, first), Some(second));
        assert_eq!((thread_by_inner(pid, 1), thread_by_inner(pid, second)), (Some(pid), None));
        assert_eq!(thread_by_outer_or_inner(pid, first), Some(first), "as we see it");
        assert_eq!(thread_by_outer_or_inner(pid, 1), Some(pid));
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn of_a_process_that_is_gone_nothing_is_known() {
        assert_eq!(text(i32::MAX, "status").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(open_pidfd(i32::MAX).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(open_pidfd(0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!((start_time(i32::MAX), ended(i32::MAX), state(i32::MAX)), (None, None, None));
        assert_eq!(descriptors(i32::MAX).count(), 0);
    }

    #[test]
    fn sockets_are_known_by_what_the_kernel_calls_them() {
        assert_eq!(socket(Path::new("socket:[12]")), Some(12));
        assert_eq!(["pipe:[12]", "socket:[x]", "/tmp/socket:[12]"].map(|name| socket(Path::new(name))), [None; 3]);
    }
}
