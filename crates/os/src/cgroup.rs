//! Control groups: how much more memory a process may use before the kernel kills something in its group, and which
//! groups a job made.

mod folder;
mod hierarchy;
mod setting;

use std::path::{Path, PathBuf};

pub use folder::{Folder, NotSet, PROCS};
pub use hierarchy::{Hierarchy, hierarchies, memberships};
pub use setting::settings;

/// A limit at or above this is none: cgroup v1 writes "unlimited" as the largest page-aligned number.
const UNLIMITED: u64 = 1 << 60;

/// Bytes left below the tightest memory limit of the process's control groups; `None` without a limit.
#[must_use]
pub fn memory_headroom(pid: i32) -> Option<u64> {
    let membership = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    groups(&membership, &mounts, &MEMORY).iter().filter_map(Group::headroom).min()
}

/// Tasks left below the tightest limit of the process's control groups; `None` without a limit.
#[must_use]
pub fn tasks_headroom(pid: i32) -> Option<u64> {
    let membership = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    groups(&membership, &mounts, &TASKS).iter().filter_map(Group::headroom).min()
}

/// What a controller bounds: its name, and the files with limit and use in version 2 and in version 1.
struct Bounded {
    controller: &'static str,
    v2: (&'static str, &'static str),
    v1: (&'static str, &'static str),
}

const MEMORY: Bounded = Bounded {
    controller: "memory",
    v2: ("memory.max", "memory.current"),
    v1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
};

const TASKS: Bounded =
    Bounded { controller: "pids", v2: ("pids.max", "pids.current"), v1: ("pids.max", "pids.current") };

/// A control group with the names that its version gives to limit and use.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    mount: PathBuf,
    path: PathBuf,
    limit: &'static str,
    used: &'static str,
}

impl Group {
    /// The tightest of this group and all above it.
    fn headroom(&self) -> Option<u64> {
        let mut tightest = None;
        let mut path = self.path.as_path();
        loop {
            let dir = self.mount.join(path);
            let read = |name| -> Option<u64> { std::fs::read_to_string(dir.join(name)).ok()?.trim().parse().ok() };
            if let (Some(limit), Some(used)) = (read(self.limit).filter(|l| *l < UNLIMITED), read(self.used)) {
                let left = limit.saturating_sub(used);
                tightest = Some(tightest.map_or(left, |t: u64| t.min(left)));
            }
            match path.parent() {
                Some(parent) => path = parent,
                None => return tightest,
            }
        }
    }
}

fn groups(membership: &str, mounts: &str, bounded: &Bounded) -> Vec<Group> {
    let mount = |wanted: &dyn Fn(&str, &str) -> bool| {
        mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (at, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            wanted(kind, options).then(|| PathBuf::from(at))
        })
    };
    let relative = |path: &str| Path::new(path).strip_prefix("/").map(Path::to_path_buf).unwrap_or_default();
    let mut found = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        if controllers.is_empty() {
            if let Some(mount) = mount(&|kind, _| kind == "cgroup2") {
                let (limit, used) = bounded.v2;
                found.push(Group { mount, path: relative(path), limit, used });
            }
        } else if controllers.split(',').any(|c| c == bounded.controller)
            && let Some(mount) =
                mount(&|kind, options| kind == "cgroup" && options.split(',').any(|o| o == bounded.controller))
        {
            let (limit, used) = bounded.v1;
            found.push(Group { mount, path: relative(path), limit, used });
        }
    }
    found
}

/// Where the kernel counts the processes of a control group that it killed because memory ran out (`oom_kill`): for
/// cgroup v2 including all groups below, for v1 (from kernel 4.13 on) the group only.
#[must_use]
pub fn kill_counters(pid: i32) -> Vec<PathBuf> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (membership, mounts) = (read(&format!("/proc/{pid}/cgroup")), read("/proc/self/mounts"));
    let file = |group: Group| {
        let name = if group.limit == "memory.max" { "memory.events" } else { "memory.oom_control" };
        // In a container the mount may begin at the group itself, whatever its path is outside.
        [group.mount.join(&group.path).join(name), group.mount.join(name)].into_iter().find(|file| file.is_file())
    };
    groups(&membership, &mounts, &MEMORY).into_iter().filter_map(file).collect()
}

/// The sum of the counters; what cannot be read counts as nothing.
#[must_use]
pub fn kills(counters: &[PathBuf]) -> u64 {
    let count = |text: String| text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok());
    counters.iter().filter_map(|file| std::fs::read_to_string(file).ok().and_then(count)).sum::<u64>()
}

/// `MemAvailable` of /proc/meminfo, in bytes.
#[must_use]
pub fn memory_available() -> Option<u64> {
    memory_info("MemAvailable:")
}

/// `MemTotal` of /proc/meminfo, in bytes.
#[must_use]
pub fn memory_total() -> Option<u64> {
    memory_info("MemTotal:")
}

fn memory_info(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_above_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/memory.max", "1000\n");
        write("a/memory.current", "400\n");
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "300\n");
        let mounts = format!("cgroup2 {} cgroup2 rw 0 0\n", dir.path().display());
        let found = groups("0::/a/b\n", &mounts, &MEMORY);
        assert_eq!(found[0].headroom(), Some(600));
        assert_eq!(groups("0::/\n", &mounts, &MEMORY)[0].headroom(), None);
    }

    #[test]
    fn kills_are_counted_by_either_version() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(dir.path().join(name), text).unwrap();
            dir.path().join(name)
        };
        let two = write("memory.events", "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n");
        let one = write("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
        assert_eq!(kills(&[two, one, dir.path().join("none")]), 5);
        assert_eq!(kills(&[]), 0);
    }

    #[test]
    fn version_one_is_found_by_its_controller() {
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n";
        let found = groups("5:memory:/job\n4:cpu:/\n", mounts, &MEMORY);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].mount, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(found[0].path, Path::new("job"));
    }
}
