//! Control groups: rekindle creates none, but a memory limit can make a checkpoint of GPU memory fail.

use super::Check;
use rekindle_base::units::size;
use rekindle_os::cgroup;
use rekindle_os::mounts::{self, Mount};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) version: Version,
    /// Bytes below the tightest memory limit; `None` without a limit.
    pub(super) headroom: Option<u64>,
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
    Facts { version: version(&mounts), headroom: cgroup::memory_headroom(std::process::id().cast_signed()) }
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
        let judged = |version, headroom| judge(&Facts { version, headroom }, 512 << 20).state;
        assert_eq!(judged(Version::Two, None), State::Ok);
        assert_eq!(judged(Version::One, Some(512 << 20)), State::Ok);
        assert_eq!(judged(Version::Both, Some((512 << 20) - 1)), State::Warn);
        assert_eq!(judged(Version::None, None), State::NotHere);
    }
}
