//! Sets what CRIU lost and the kernel lets us set, before any task runs.
//!
//! The record may come from somebody who can write the store and has no key. So nothing is set that the job's user could
//! not set: a real-time I/O priority is left out, and options of sockets are set without our capabilities, by the caller
//! ([`Rights`]).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::SockaddrStorage;
use rekindle_os::{attributes, process, sockopt, tcp_repair};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};

use crate::compare::Difference;
use crate::table::{Means, OPTIONS, Of, Shape, SocketOption};
use crate::{inotify, multicast};

/// Whose rights what is set must keep to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// Our own: the job runs as we do.
    Ours,
    /// A user's: what needs a capability is not set.
    Users,
}

/// Sets the old values of those differences that can be put back. `tree` are the processes as we see them. What could
/// not be set shows in the next comparison.
pub fn put_back(differences: &[Difference], tree: &[i32], rights: Rights) {
    let wanted: Vec<&Difference> =
        differences.iter().filter(|difference| difference.row.means == Means::PutBack).collect();
    if wanted.is_empty() {
        return;
    }
    let pids: BTreeMap<i32, i32> = tree.iter().filter_map(|pid| Some((process::inner_pid(*pid)?, *pid))).collect();
    for difference in wanted {
        let Some(pid) = pids.get(&difference.process.0) else { continue };
        if set(difference, *pid, &pids, rights).is_none() {
            tracing::debug!("not put back: {difference}");
        }
    }
}

/// Sets it; `None` if it cannot be set.
fn set(difference: &Difference, pid: i32, pids: &BTreeMap<i32, i32>, rights: Rights) -> Option<()> {
    let value = difference.then.as_deref()?;
    match difference.row.of {
        Of::Process => match difference.row.item {
            "core-filter" => write(pid, "coredump_filter", &format!("0x{value}")),
            "oom-score-adj" => {
                let now: i32 = difference.now.as_deref()?.parse().ok()?;
                let score = value.parse().ok().filter(|score: &i32| rights == Rights::Ours || *score >= now)?;
                write(pid, "oom_score_adj", &score.to_string())
            }
            "autogroup" => {
                let (then, now): (i32, i32) = (value.parse().ok()?, difference.now.as_deref()?.parse().ok()?);
                (rights == Rights::Ours || then >= now).then_some(())?;
                write(pid, "autogroup", &then.to_string())
            }
            "limits" => limits(pid, value, difference.now.as_deref()?, rights),
            _ => None,
        },
        Of::Thread => {
            let inner = difference.at?;
            let tid = if inner == difference.process.0 { pid } else { process::thread_by_inner(pid, inner)? };
            match difference.row.item {
                "timer-slack" => write(tid, "timerslack_ns", value),
                "io-priority" => attributes::set_io_priority(tid, io_priority(value, rights)?).ok(),
                _ => None,
            }
        }
        Of::Descriptor => {
            let process = process::open_pidfd(pid).ok()?;
            let opened = process::fetch_descriptor(&process, difference.at?).ok()?;
            match difference.row.item {
                "file" if rights == Rights::Ours => rename(pid, difference.now.as_deref()?, value),
                "file" => None,
                "inotify-nameless" => inotify::watch(&opened, value, difference.now.as_deref(), pids),
                "inotify-flags" => inotify::set_flags(&opened, pid, difference.at?, value),
                _ => descriptor(difference, &opened, value, rights),
            }
        }
        Of::Mapping => None,
    }
}

/// Those that differ. A user cannot raise a hard limit.
fn limits(pid: i32, then: &str, now: &str, rights: Rights) -> Option<()> {
    let now: BTreeMap<u32, (u64, u64)> = now.lines().filter_map(limit).collect();
    for (resource, (soft, hard)) in then.lines().filter_map(limit) {
        let (is_same, most) = now.get(&resource).map(|now| (*now == (soft, hard), now.1))?;
        if !is_same {
            (rights == Rights::Ours || hard <= most).then_some(())?;
            attributes::set_limit(pid, resource, soft, hard).ok()?;
        }
    }
    Some(())
}

/// A line of /proc/PID/limits: which resource (setrlimit(2)), the soft limit, and the hard one.
fn limit(line: &str) -> Option<(u32, (u64, u64))> {
    /// In the order of their numbers.
    const NAMES: [&str; 16] = [
        "cpu time",
        "file size",
        "data size",
        "stack size",
        "core file size",
        "resident set",
        "processes",
        "open files",
        "locked memory",
        "address space",
        "file locks",
        "pending signals",
        "msgqueue size",
        "nice priority",
        "realtime priority",
        "realtime timeout",
    ];
    let line = line.strip_prefix("Max ")?;
    let (resource, values) =
        (0..).zip(NAMES).find_map(|(number, name)| Some((number, line.strip_prefix(name)?.strip_prefix(' ')?)))?;
    let mut values = values.split(' ').map(|value| match value {
        "unlimited" => Some(libc::RLIM64_INFINITY),
        number => number.parse().ok(),
    });
    Some((resource, (values.next()??, values.next()??)))
}

fn write(pid: i32, file: &str, value: &str) -> Option<()> {
    std::fs::write(format!("/proc/{pid}/{file}"), value).ok()
}

/// From the words of a record. Real time would let the job starve others at the disk.
fn io_priority(value: &str, rights: Rights) -> Option<u16> {
    let (class, level) = value.split_once(' ')?;
    let class = match class {
        "none" => 0_u16,
        "real-time" if rights == Rights::Ours => 1,
        "best-effort" => 2,
        "idle" => 3,
        _ => return None,
    };
    let level: u16 = level.parse().ok().filter(|level| *level < 1 << 13)?;
    Some(class << 13 | level)
}

fn descriptor(difference: &Difference, descriptor: &OwnedFd, value: &str, rights: Rights) -> Option<()> {
    match difference.row.item {
        // Beyond the limit of users it needs a right, and the limit protects the machine's memory.
        "size" => {
            let size: i32 = value.parse().ok().filter(|size| *size <= pipe_limit(rights))?;
            attributes::set_number(descriptor, libc::F_SETPIPE_SZ, size).ok()
        }
        "seals" => {
            let (then, now): (i32, i32) = (value.parse().ok()?, difference.now.as_deref()?.parse().ok()?);
            attributes::set_number(descriptor, libc::F_ADD_SEALS, then & !now).ok()
        }
        "exclusive" => attributes::make_exclusive(descriptor, value == "1").ok(),
        "error" => tcp_repair::reset(descriptor).ok(),
        "congestion" => sockopt::set(descriptor, libc::IPPROTO_TCP, libc::TCP_CONGESTION, value.as_bytes()).ok(),
        "multicast" => multicast::join(descriptor, value, difference.now.as_deref()),
        "raw-address" => {
            let address: SocketAddr = value.parse().ok()?;
            nix::sys::socket::bind(descriptor.as_raw_fd(), &SockaddrStorage::from(address)).ok()
        }
        "device" => sockopt::set(descriptor, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, value.as_bytes()).ok(),
        name => {
            let option = OPTIONS.iter().find(|option| option.name == name && option.settable)?;
            if rights == Rights::Users && needs_a_right(option, value) {
                return None;
            }
            sockopt::set(descriptor, option.level.number(), option.number, &bytes(option, value)?).ok()
        }
    }
}

/// Renames the file of a UNIX socket as its process has done, within a folder. Another socket may be there, which nobody listens
/// at any more. The paths are the kernel's, so they have no links: whoever can write to a folder of them could put one there, to
/// have something else renamed.
fn rename(pid: i32, now: &str, then: &str) -> Option<()> {
    let (now, then) = (Path::new(now), Path::new(then));
    let folder = now.parent().filter(|folder| Some(*folder) == then.parent())?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(format!("/proc/{pid}/root"), flags, Mode::empty()).ok()?;
    let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let folder = rustix::fs::openat2(&root, folder, flags, Mode::empty(), within).ok()?;
    let kind = |name| match rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Some(Some(FileType::from_raw_mode(found.st_mode))),
        Err(error) => (error == rustix::io::Errno::NOENT).then_some(None),
    };
    let (now, then) = (now.file_name()?, then.file_name()?);
    let is_fit = kind(now)? == Some(FileType::Socket) && matches!(kind(then)?, None | Some(FileType::Socket));
    is_fit.then(|| rustix::fs::renameat(&folder, now, &folder, then).ok())?
}

/// Bytes of a pipe that anybody may have (pipe(7)).
fn pipe_limit(rights: Rights) -> i32 {
    let limit = std::fs::read_to_string("/proc/sys/fs/pipe-max-size").ok().and_then(|text| text.trim().parse().ok());
    if rights == Rights::Ours { i32::MAX } else { limit.unwrap_or(1 << 20) }
}

/// What only CAP_NET_ADMIN or CAP_NET_RAW may set (socket(7), ip(7), ipv6(7), tcp(7)).
fn needs_a_right(option: &SocketOption, value: &str) -> bool {
    match option.name {
        "SO_MARK"
        | "SO_RCVMARK"
        | "IP_TRANSPARENT"
        | "IPV6_TRANSPARENT"
        | "SO_BUSY_POLL_BUDGET"
        | "SO_PREFER_BUSY_POLL"
        | "SO_BUSY_POLL" => value != "0",
        "SO_PRIORITY" => value.parse::<i32>().map_or(true, |priority| !(0..=6).contains(&priority)),
        _ => false,
    }
}

fn bytes(option: &SocketOption, value: &str) -> Option<Vec<u8>> {
    match option.shape {
        Shape::Int => Some(value.parse::<i32>().ok()?.to_ne_bytes().to_vec()),
        Shape::Time | Shape::Linger | Shape::Long => {
            let numbers: Option<Vec<u64>> = value.split(' ').map(|number| number.parse().ok()).collect();
            let bytes: Vec<u8> = numbers?.into_iter().flat_map(u64::to_ne_bytes).collect();
            (bytes.len() == option.shape.bytes()).then_some(bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_are_renamed_and_no_link_is_followed() {
        use std::os::unix::net::UnixListener;
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
        let pid = std::process::id().cast_signed();
        std::fs::create_dir(path("real")).unwrap();
        std::os::unix::fs::symlink(path("real"), path("link")).unwrap();
        let _listener = UnixListener::bind(path("real/new")).unwrap();
        std::fs::write(path("real/file"), "").unwrap();
        for (now, then) in
            [("link/new", "link/socket"), ("real/new", "real/file"), ("real/file", "real/socket"), ("real/new", "new")]
        {
            assert_eq!(rename(pid, &path(now), &path(then)), None, "{now} {then}");
        }
        rename(pid, &path("real/new"), &path("real/socket")).unwrap();
        assert!(Path::new(&path("real/socket")).exists() && !Path::new(&path("real/new")).exists());
    }

    #[test]
    fn a_user_gets_no_right_by_a_record() {
        assert_eq!(io_priority("real-time 0", Rights::Users), None);
        assert_eq!(io_priority("real-time 0", Rights::Ours), Some(1 << 13));
        assert_eq!(io_priority("idle 7", Rights::Users), Some(3 << 13 | 7));
        for odd in ["", "idle", "idle 8192", "idle -1", "idle 70000", "7 0"] {
            assert_eq!(io_priority(odd, Rights::Ours), None, "{odd}");
        }
        let option = |name: &str| OPTIONS.iter().find(|option| option.name == name).unwrap();
        assert!(needs_a_right(option("SO_MARK"), "5") && needs_a_right(option("SO_PRIORITY"), "7"));
        assert!(needs_a_right(option("SO_PRIORITY"), "-1") && !needs_a_right(option("SO_PRIORITY"), "6"));
    }

    #[test]
    fn limits_are_those_of_the_kernel() {
        let text = std::fs::read_to_string("/proc/self/limits").unwrap();
        let lines: Vec<String> =
            text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let numbers: Vec<u32> = lines.iter().filter_map(|line| limit(line)).map(|(number, _)| number).collect();
        assert_eq!(numbers, (0..16).collect::<Vec<_>>());
        assert_eq!(limit("Max open files 64 unlimited files"), Some((7, (64, u64::MAX))));
        for odd in ["", "Max", "Max luck 1 2", "Max open files", "Max open files 64", "Max open files -1 5 files"] {
            assert_eq!(limit(odd), None, "{odd}");
        }
    }

    #[test]
    fn limits_and_the_score_are_put_back_and_a_user_raises_nothing() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id().cast_signed();
        let set = |then: &str, now: &str, rights| limits(pid, then, now, rights);
        let of = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
            let line =
                text.lines().find(|line| line.contains(name)).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
            limit(&line).unwrap().1
        };
        let then = "Max core file size 5 7 bytes\nMax open files 64 64 files";
        set(then, "Max core file size 0 9 bytes\nMax open files 64 64 files", Rights::Users).unwrap();
        assert_eq!(of("core file size"), (5, 7));
        assert_eq!(set("Max core file size 5 9 bytes", "Max core file size 5 7 bytes", Rights::Users), None);
        assert_eq!(of("core file size"), (5, 7));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_value_has_the_bytes_of_its_option() {
        let option = |name: &str| OPTIONS.iter().find(|option| option.name == name).unwrap();
        assert_eq!(bytes(option("TCP_NODELAY"), "1").unwrap(), 1_i32.to_ne_bytes());
        assert_eq!(bytes(option("SO_RCVTIMEO"), "5 250000").unwrap().len(), 16);
        for odd in ["", "5", "5 x", "5 6 7"] {
            assert_eq!(bytes(option("SO_RCVTIMEO"), odd), None, "{odd}");
        }
    }
}
