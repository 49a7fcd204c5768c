//! Kernel options that CRIU needs: tried if possible, otherwise read from the kernel's build configuration.

use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::eventfd::EventFd;
use nix::sys::inotify::{InitFlags, Inotify};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::{Check, trial};
use rekindle_criu::kernel_release;

/// Whether the kernel supports something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Has {
    Yes,
    No,
    /// It cannot be tried, and there is no configuration to read.
    Unknown,
}

impl Has {
    fn from_try(worked: bool) -> Has {
        if worked { Has::Yes } else { Has::No }
    }

    /// The result of trying, otherwise that of the configuration: a container may hide the file of an existing option.
    fn or(self, other: Has) -> Has {
        match (self, other) {
            (Has::Yes, _) | (_, Has::Yes) => Has::Yes,
            (Has::Unknown, other) => other,
            (own, _) => own,
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) release: String,
    pub(super) checkpoint_restore: Has,
    pub(super) pid_namespace: Has,
    pub(super) mount_namespace: Has,
    pub(super) children: Has,
    pub(super) map_files: Has,
    /// Which of eventfd, epoll, inotify and file handles are missing.
    pub(super) events_absent: Vec<&'static str>,
    /// `NETLINK_SOCK_DIAG` itself.
    pub(super) sock_diag: Has,
    /// Its parts that are not configured; `None` without a configuration.
    pub(super) diag_absent: Option<Vec<&'static str>>,
    pub(super) time_namespace: Has,
    pub(super) soft_dirty: Has,
}

/// The kinds of sockets that CRIU queries: UNIX, TCP, UDP, packet and netlink.
const DIAG: [&str; 5] = ["UNIX_DIAG", "INET_DIAG", "INET_UDP_DIAG", "PACKET_DIAG", "NETLINK_DIAG"];

pub(super) fn gather() -> Facts {
    let release = kernel_release();
    let config = Config::read(&release);
    let there = |path: &str| Has::from_try(Path::new(path).exists());
    let tried = |worked: bool, option: &str| Has::from_try(worked).or(config.has(option));
    let events = [
        ("eventfd", tried(EventFd::new().is_ok(), "EVENTFD")),
        ("epoll", tried(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).is_ok(), "EPOLL")),
        ("inotify", tried(Inotify::init(InitFlags::IN_CLOEXEC).is_ok(), "INOTIFY_USER")),
        ("file handles", config.has("FHANDLE")),
    ];
    let flags = SockFlag::SOCK_CLOEXEC;
    let diag = socket(AddressFamily::Netlink, SockType::Datagram, flags, SockProtocol::NetlinkSockDiag);
    Facts {
        release,
        // The file exists only if the option is set (kernel/pid_namespace.c).
        checkpoint_restore: there("/proc/sys/kernel/ns_last_pid").or(config.has("CHECKPOINT_RESTORE")),
        pid_namespace: there("/proc/self/ns/pid"),
        mount_namespace: there("/proc/self/ns/mnt"),
        children: there("/proc/thread-self/children"),
        map_files: there("/proc/self/map_files"),
        events_absent: events.into_iter().filter(|(_, has)| *has == Has::No).map(|(name, _)| name).collect(),
        sock_diag: Has::from_try(diag.is_ok()),
        diag_absent: config.0.as_ref().map(|_| DIAG.into_iter().filter(|o| config.has(o) == Has::No).collect()),
        time_namespace: there("/proc/self/ns/time"),
        soft_dirty: config.has("MEM_SOFT_DIRTY"),
    }
}

/// The build configuration of the running kernel, if it is available.
struct Config(Option<String>);

impl Config {
    fn read(release: &str) -> Config {
        let plain = [format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
        let unpacked = || {
            let gzip = Command::new("gzip").args(["-dc", "/proc/config.gz"]).stdin(Stdio::null()).output().ok()?;
            gzip.status.success().then(|| String::from_utf8_lossy(&gzip.stdout).into_owned())
        };
        let text = plain.iter().find_map(|path| std::fs::read_to_string(path).ok()).or_else(unpacked);
        // A text without this line is not a kernel configuration.
        Config(text.filter(|text| text.lines().any(|line| line.starts_with("CONFIG_"))))
    }

    /// Whether the option is built in, or a module, which the kernel loads on demand.
    fn has(&self, option: &str) -> Has {
        let Some(text) = &self.0 else { return Has::Unknown };
        let set = |line: &str| {
            let value =
                line.strip_prefix("CONFIG_").and_then(|l| l.strip_prefix(option)).and_then(|l| l.strip_prefix('='));
            matches!(value, Some("y" | "m"))
        };
        Has::from_try(text.lines().any(set))
    }
}

const OTHER_KERNEL: &str = "boot a kernel built with";

pub(super) fn judge(facts: &Facts, trial: &trial::Outcome) -> Vec<Check> {
    vec![
        needed(
            "kernel.checkpoint-restore",
            facts.checkpoint_restore,
            &format!("CONFIG_CHECKPOINT_RESTORE, kernel {}", facts.release),
            "CONFIG_CHECKPOINT_RESTORE=y, such as a distribution's kernel",
            trial,
        ),
        namespaces(facts, trial),
        needed("kernel.children", facts.children, "/proc/PID/task/TID/children", "CONFIG_PROC_CHILDREN=y", trial),
        needed("kernel.map-files", facts.map_files, "/proc/PID/map_files", "CONFIG_CHECKPOINT_RESTORE=y", trial),
        events(facts),
        sockets(facts),
        time_namespace(facts),
        informational(
            "kernel.soft-dirty",
            facts.soft_dirty,
            "CONFIG_MEM_SOFT_DIRTY (for incremental dumps, which rekindle does not use)",
        ),
    ]
}

fn needed(check: &'static str, has: Has, what: &str, option: &str, trial: &trial::Outcome) -> Check {
    let fix = format!("{OTHER_KERNEL} {option}");
    match has {
        Has::Yes => Check::ok(check, what),
        Has::No => Check::needed(check, trial, format!("no {what}"), fix),
        Has::Unknown => Check::not_here(check, format!("unknown whether there is {what}")),
    }
}

fn namespaces(facts: &Facts, trial: &trial::Outcome) -> Check {
    let name = "kernel.namespaces";
    let absent: Vec<&str> = [("PID", facts.pid_namespace), ("mount", facts.mount_namespace)]
        .into_iter()
        .filter_map(|(kind, has)| (has == Has::No).then_some(kind))
        .collect();
    let absent = absent.join(" and ");
    if absent.is_empty() {
        return Check::ok(name, "PID and mount namespaces");
    }
    Check::needed(
        name,
        trial,
        format!("no {absent} namespaces"),
        format!("{OTHER_KERNEL} CONFIG_NAMESPACES=y and CONFIG_PID_NS=y"),
    )
}

fn events(facts: &Facts) -> Check {
    let name = "kernel.events";
    if facts.events_absent.is_empty() {
        return Check::ok(name, "eventfd, epoll, inotify, file handles");
    }
    Check::warn(
        name,
        format!("no {}: jobs that use them cannot be dumped", facts.events_absent.join(", ")),
        format!("{OTHER_KERNEL} CONFIG_EVENTFD, CONFIG_EPOLL, CONFIG_INOTIFY_USER and CONFIG_FHANDLE"),
    )
}

fn sockets(facts: &Facts) -> Check {
    let name = "kernel.sockets";
    let fix = |options: &[&str]| {
        let options: Vec<String> = options.iter().map(|option| format!("CONFIG_{option}")).collect();
        format!("{OTHER_KERNEL} {}", options.join(", "))
    };
    match (facts.sock_diag, facts.diag_absent.as_deref()) {
        (Has::Yes, Some([])) => Check::ok(name, "SOCK_DIAG for UNIX, TCP, UDP, packet and netlink sockets"),
        (Has::Yes, None) => Check::ok(
            name,
            "SOCK_DIAG; the kernel's configuration is not readable, so the kinds of sockets are \
                unknown",
        ),
        (Has::Yes, Some(absent)) => {
            Check::warn(name, format!("no {}: jobs with such sockets cannot be dumped", absent.join(", ")), fix(absent))
        }
        _ => Check::warn(name, "no SOCK_DIAG: jobs with sockets cannot be dumped", fix(&DIAG)),
    }
}

fn time_namespace(facts: &Facts) -> Check {
    let name = "kernel.time-namespace";
    match facts.time_namespace {
        Has::Yes => Check::ok(name, "CLOCK_MONOTONIC continues without a jump after a restore"),
        _ => Check::warn(
            name,
            "no time namespaces: after a reboot, CLOCK_MONOTONIC of a restored job jumps back, and its timers fire \
            late",
            format!("{OTHER_KERNEL} CONFIG_TIME_NS=y (5.6 or newer)"),
        ),
    }
}

fn informational(check: &'static str, has: Has, what: &str) -> Check {
    match has {
        Has::Yes => Check::ok(check, what),
        Has::No => Check::not_here(check, format!("no {what}")),
        Has::Unknown => Check::not_here(check, format!("not known: {what}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    fn whole() -> Facts {
        Facts {
            release: "6.1.0".into(),
            checkpoint_restore: Has::Yes,
            pid_namespace: Has::Yes,
            mount_namespace: Has::Yes,
            children: Has::Yes,
            map_files: Has::Yes,
            events_absent: Vec::new(),
            sock_diag: Has::Yes,
            diag_absent: Some(Vec::new()),
            time_namespace: Has::Yes,
            soft_dirty: Has::Yes,
        }
    }

    fn state(facts: &Facts, trial: &trial::Outcome, check: &str) -> State {
        let checks = judge(facts, trial);
        checks.iter().find(|c| c.check == check).unwrap().state
    }

    #[test]
    fn a_whole_kernel_is_ok() {
        let trial = trial::Outcome::NotTried("no criu".into());
        assert!(judge(&whole(), &trial).iter().all(|c| c.state == State::Ok));
    }

    #[test]
    fn what_criu_needs_is_missing_unless_it_has_just_worked() {
        let (untried, worked) = (trial::Outcome::NotTried("no criu".into()), trial::worked());
        let lack = |change: fn(&mut Facts)| {
            let mut facts = whole();
            change(&mut facts);
            facts
        };
        for (check, facts) in [
            ("kernel.checkpoint-restore", lack(|f| f.checkpoint_restore = Has::No)),
            ("kernel.namespaces", lack(|f| f.pid_namespace = Has::No)),
            ("kernel.namespaces", lack(|f| f.mount_namespace = Has::No)),
            ("kernel.children", lack(|f| f.children = Has::No)),
            ("kernel.map-files", lack(|f| f.map_files = Has::No)),
        ] {
            assert_eq!(state(&facts, &untried, check), State::Missing, "{check}");
            assert_eq!(state(&facts, &worked, check), State::Warn, "{check}");
        }
        let unknown = lack(|f| f.checkpoint_restore = Has::Unknown);
        assert_eq!(state(&unknown, &untried, "kernel.checkpoint-restore"), State::NotHere);
    }

    #[test]
    fn what_some_jobs_need_is_a_warning_and_what_nobody_needs_is_not() {
        let trial = trial::worked();
        let few = Facts {
            events_absent: vec!["inotify"],
            diag_absent: Some(vec!["UNIX_DIAG"]),
            time_namespace: Has::No,
            soft_dirty: Has::Unknown,
            ..whole()
        };
        let checks = judge(&few, &trial);
        let find = |name: &str| checks.iter().find(|c| c.check == name).unwrap();
        assert_eq!(find("kernel.events").state, State::Warn);
        assert!(find("kernel.events").found.contains("inotify"));
        assert_eq!(find("kernel.sockets").state, State::Warn);
        assert!(find("kernel.sockets").fix.as_ref().unwrap().contains("CONFIG_UNIX_DIAG"));
        assert_eq!(find("kernel.time-namespace").state, State::Warn);
        assert_eq!(find("kernel.soft-dirty").state, State::NotHere);
        assert_eq!(state(&Facts { diag_absent: None, ..whole() }, &trial, "kernel.sockets"), State::Ok);
        let none = Facts { sock_diag: Has::No, diag_absent: None, ..whole() };
        assert_eq!(state(&none, &trial, "kernel.sockets"), State::Warn);
    }

    #[test]
    fn a_configuration_is_read_line_by_line() {
        let config = Config(Some("CONFIG_UNIX_DIAG=m\n# CONFIG_TIME_NS is not set\nCONFIG_PID_NS=y\n".into()));
        assert_eq!(config.has("UNIX_DIAG"), Has::Yes);
        assert_eq!(config.has("PID_NS"), Has::Yes);
        assert_eq!(config.has("TIME_NS"), Has::No);
        assert_eq!(config.has("PID"), Has::No);
        assert_eq!(Config(None).has("PID_NS"), Has::Unknown);
        assert_eq!(Has::No.or(Has::Yes), Has::Yes);
        assert_eq!(Has::No.or(Has::Unknown), Has::No);
        assert_eq!(Has::Unknown.or(Has::No), Has::No);
    }
}
