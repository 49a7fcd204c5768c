//! The settings of a control group that a restore sets.
//!
//! This is a fixed list, because a group also has files that do more than set a limit: `release_agent` names a program
//! that root runs, `cgroup.kill` kills, `devices.allow` opens devices.

/// A setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The file in the group's folder.
    pub name: &'static str,
    /// The value in a new group; empty if it is not known.
    pub fresh: &'static str,
}

const fn setting(name: &'static str, fresh: &'static str) -> Setting {
    Setting { name, fresh }
}

/// The file that enables controllers for the groups below.
pub(super) const SUBTREE: &str = "cgroup.subtree_control";

/// The settings of cgroup v2, in the order in which they are written.
const TWO: &[Setting] = &[
    setting("cpuset.cpus", ""),
    setting("cpuset.mems", ""),
    setting("cpu.weight", "100"),
    setting("cpu.max", "max 100000"),
    setting("cpu.max.burst", "0"),
    setting("memory.max", "max"),
    setting("memory.high", "max"),
    setting("memory.low", "0"),
    setting("memory.min", "0"),
    setting("memory.swap.max", "max"),
    setting("memory.oom.group", "0"),
    setting("pids.max", "max"),
    setting("io.weight", "default 100"),
    setting("io.max", ""),
    setting("cgroup.max.depth", "max"),
    setting("cgroup.max.descendants", "max"),
    // After the group's own settings, before any group below is created.
    setting(SUBTREE, ""),
];

/// The largest page-aligned number, which means "no limit" in cgroup v1.
const NO_LIMIT: &str = "9223372036854771712";

/// The settings of cgroup v1.
const ONE: &[Setting] = &[
    setting("cpuset.cpus", ""),
    setting("cpuset.mems", ""),
    setting("cpu.shares", "1024"),
    setting("cpu.cfs_period_us", "100000"),
    setting("cpu.cfs_quota_us", "-1"),
    setting("cpu.cfs_burst_us", "0"),
    setting("memory.limit_in_bytes", NO_LIMIT),
    // After the other limit, because it must not be lower.
    setting("memory.memsw.limit_in_bytes", NO_LIMIT),
    setting("memory.soft_limit_in_bytes", NO_LIMIT),
    setting("pids.max", "max"),
    setting("blkio.weight", ""),
    setting("blkio.bfq.weight", ""),
    setting("blkio.throttle.read_bps_device", ""),
    setting("blkio.throttle.write_bps_device", ""),
    setting("blkio.throttle.read_iops_device", ""),
    setting("blkio.throttle.write_iops_device", ""),
];

/// The settings of a group of cgroup v2, or v1.
#[must_use]
pub fn settings(is_two: bool) -> &'static [Setting] {
    if is_two { TWO } else { ONE }
}

/// The writes that set a setting to `value`: the kernel takes one device or one controller at a time.
pub(super) fn writes(name: &str, value: &str) -> Vec<String> {
    match name {
        SUBTREE => value.split_whitespace().map(|controller| format!("+{controller}")).collect(),
        _ => value.lines().map(str::to_owned).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_and_controller_is_written_by_itself() {
        assert_eq!(writes(SUBTREE, "cpu memory"), ["+cpu", "+memory"]);
        assert_eq!(writes("io.max", "8:0 rbps=1 wbps=max\n8:16 rbps=2"), ["8:0 rbps=1 wbps=max", "8:16 rbps=2"]);
        assert_eq!(writes("cpu.max", "50000 100000"), ["50000 100000"]);
        assert!(writes("cpuset.cpus", "").is_empty());
    }

    #[test]
    fn no_setting_is_a_door() {
        for setting in TWO.iter().chain(ONE) {
            let name = setting.name;
            assert!(!name.contains('/') && name.contains('.'), "{name}");
            for bad in ["release_agent", "notify", "kill", "freeze", "procs", "threads", "devices", "event", "type"] {
                assert!(!name.contains(bad), "{name}");
            }
        }
    }
}
