//! Control groups: rekindle creates none, but a memory limit can make a checkpoint of GPU memory fail, and the kernel can
//! kill rekindle together with a job that reaches it.

use std::path::PathBuf;

use super::Check;
use rekindle_base::units::size;
use rekindle_os::cgroup;
use rekindle_os::mounts::{self, Mount};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) version: Version,
    /// Bytes below the tightest memory limit; `None` without a limit.
    pub(super) headroom: Option<u64>,
    /// The setting by which all processes of a group are killed together.
    pub(super) killed_together: Option<PathBuf>,
}

/// Which hierarchy is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    None,
    One,
    Two,
    /// Controllers on version 1, processes on version 2 too.
    Both,
}

pub(super) fn gather() -> Facts {
    let mounts = mounts::of("self").unwrap_or_default();
    let own = std::process::id().cast_signed();
    Facts {
        version: version(&mounts),
        headroom: cgroup::memory_headroom(own),
        killed_together: cgroup::killed_together(own),
    }
}

fn version(mounts: &[Mount]) -> Version {
    let mounted = |kind: &str| mounts.iter().any(|mount| mount.kind == kind);
    match (mounted("cgroup"), mounted("cgroup2")) {
        (false, false) => Version::None,
        (true, false) => Version::One,
        (false, true) => Version::Two,
        (true, true) => Version::Both,
    }
}

/// `reserve` bytes must stay free while GPU memory is copied (snapshot.memory-reserve).
pub(super) fn judge(facts: &Facts, reserve: u64) -> Check {
    let name = "cgroup.memory";
    let version = match facts.version {
        Version::None => return Check::not_here(name, "no control groups are mounted"),
        Version::One => "version 1",
        Version::Two => "version 2",
        Version::Both => "versions 1 and 2",
    };
    match facts.headroom {
        None => Check::ok(name, format!("{version}, no memory limit")),
        Some(left) if left < reserve => Check::warn(
            name,
            format!(
                "{version}, {} free below the memory limit, less than snapshot.memory-reserve ({})",
                size(left),
                size(reserve)
            ),
            "raise the limit (systemd: MemoryMax=, Slurm: --mem, Docker: --memory)",
        ),
        Some(left) => Check::ok(name, format!("{version}, {} free below the memory limit", size(left))),
    }
}

/// The kubelet sets it for all containers.
pub(super) fn judge_oom(facts: &Facts) -> Check {
    let name = "cgroup.oom-group";
    match (facts.version, &facts.killed_together) {
        (Version::None | Version::One, _) => Check::not_here(name, "only version 2 of control groups has it"),
        (_, None) => Check::ok(name, "a process that runs out of memory is killed alone"),
        (_, Some(file)) => Check::warn(
            name,
            format!("{} is 1: if the job runs out of memory, the kernel kills rekindle with it", file.display()),
            "let rekindle be started again after that (Kubernetes: restartPolicy or backoffLimit; systemd: Restart=), or \
             write 0 there (the kubelet: singleProcessOOMKill: true; systemd: OOMPolicy=continue)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn the_mounts_tell_the_version() {
        let version = |table: &str| version(&mounts::parse(table.as_bytes()));
        let one = "30 1 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let two = "31 1 0:2 / /sys/fs/cgroup rw - cgroup2 none rw\n";
        assert_eq!(version(one), Version::One);
        assert_eq!(version(two), Version::Two);
        assert_eq!(version(&format!("{one}{two}")), Version::Both);
        assert_eq!(version("29 1 0:3 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"), Version::None);
    }

    #[test]
    fn a_tight_limit_is_a_warning() {
        let judged = |version, headroom| judge(&Facts { version, headroom, killed_together: None }, 512 << 20).state;
        assert_eq!(judged(Version::Two, None), State::Ok);
        assert_eq!(judged(Version::One, Some(512 << 20)), State::Ok);
        assert_eq!(judged(Version::Both, Some((512 << 20) - 1)), State::Warn);
        assert_eq!(judged(Version::None, None), State::NotHere);
    }
    #[test]
    fn a_group_that_is_killed_as_a_whole_is_a_warning() {
        let judged = |version, file: Option<&str>| {
            judge_oom(&Facts { version, headroom: None, killed_together: file.map(PathBuf::from) })
        };
        let found = judged(Version::Two, Some("/sys/fs/cgroup/memory.oom.group"));
        assert!(found.state == State::Warn && found.found.starts_with("/sys/fs/cgroup/memory.oom.group is 1"));
        assert_eq!(judged(Version::Both, None).state, State::Ok);
        assert_eq!(judged(Version::One, None).state, State::NotHere);
    }
}
