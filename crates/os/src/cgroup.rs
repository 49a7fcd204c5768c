//! Control groups: how much more memory a process may use before the kernel kills something in its group, and which
//! groups a job made.

mod folder;
mod freezer;
mod hierarchy;
mod setting;

use std::io;
use std::path::{Path, PathBuf};

pub use folder::{Folder, NotSet, PROCS};
pub use freezer::{frozen, thaw};
pub use hierarchy::{Hierarchy, hierarchies, memberships};
pub use setting::settings;

use crate::mounts::{self, Mount};
use crate::process;

/// A limit at or above this is none: cgroup v1 writes "unlimited" as the largest page-aligned number.
const UNLIMITED: u64 = 1 << 60;

/// Bytes left below the tightest memory limit of the process's control groups; `None` without a limit.
#[must_use]
pub fn memory_headroom(pid: i32) -> Option<u64> {
    groups_of(pid, &MEMORY).ok()?.iter().filter_map(Group::headroom).min()
}

/// Tasks left below the tightest limit of the process's control groups; `None` without a limit.
#[must_use]
pub fn tasks_headroom(pid: i32) -> Option<u64> {
    groups_of(pid, &TASKS).ok()?.iter().filter_map(Group::headroom).min()
}

/// A resource that a controller limits.
struct Bounded {
    controller: &'static str,
    v2: Names,
    v1: Names,
}

/// What a version of the interface calls the files of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Names {
    limit: &'static str,
    used: &'static str,
    /// A file and its field: what of the used part the kernel takes back before it kills anything.
    reclaimed: Option<(&'static str, &'static str)>,
}

/// Of the file cache, what was not used for a while: what Kubernetes takes off for its "working set", too.
const MEMORY: Bounded = Bounded {
    controller: "memory",
    v2: Names { limit: "memory.max", used: "memory.current", reclaimed: Some(("memory.stat", "inactive_file ")) },
    v1: Names {
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        reclaimed: Some(("memory.stat", "total_inactive_file ")),
    },
};

const PIDS: Names = Names { limit: "pids.max", used: "pids.current", reclaimed: None };
const TASKS: Bounded = Bounded { controller: "pids", v2: PIDS, v1: PIDS };

/// A control group, with the names of its files.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    mount: PathBuf,
    path: PathBuf,
    names: Names,
}

impl Group {
    /// See [`killed_together`]. In a container the mount may begin at the group itself, whatever its path outside is.
    fn killed_together(&self) -> Option<PathBuf> {
        let mut files = self.path.ancestors().map(|path| self.mount.join(path).join("memory.oom.group"));
        files.find(|file| std::fs::read_to_string(file).is_ok_and(|text| text.trim() == "1"))
    }

    /// The least headroom of this group and all above it.
    fn headroom(&self) -> Option<u64> {
        let mut tightest = None;
        let mut path = self.path.as_path();
        loop {
            let dir = self.mount.join(path);
            let text = |name| std::fs::read_to_string(dir.join(name)).ok();
            let read = |name| text(name)?.trim().parse::<u64>().ok();
            let Names { limit, used, reclaimed } = self.names;
            if let (Some(limit), Some(used)) = (read(limit).filter(|l| *l < UNLIMITED), read(used)) {
                let reclaimed = reclaimed.and_then(|(file, field)| count(&text(file)?, field)).unwrap_or(0);
                let left = limit.saturating_sub(used.saturating_sub(reclaimed));
                tightest = Some(tightest.map_or(left, |t: u64| t.min(left)));
            }
            match path.parent() {
                Some(parent) => path = parent,
                None => return tightest,
            }
        }
    }
}

fn groups_of(pid: i32, bounded: &Bounded) -> io::Result<Vec<Group>> {
    Ok(groups(&process::text(pid, "cgroup")?, &mounts::of("self")?, bounded))
}

fn groups(membership: &str, mounts: &[Mount], bounded: &Bounded) -> Vec<Group> {
    let group = |(controllers, path): (&str, &str)| {
        let (controller, names) = match controllers {
            "" => ("", bounded.v2),
            several => (several.split(',').find(|one| *one == bounded.controller)?, bounded.v1),
        };
        let mount = mounts.iter().find(|mount| hierarchy::has(mount, controller))?.point.clone();
        let path = Path::new(path).strip_prefix("/").map(Path::to_path_buf).unwrap_or_default();
        Some(Group { mount, path, names })
    };
    memberships(membership).filter_map(group).collect()
}

/// The files in which the kernel counts processes that it killed because a control group ran out of memory
/// (`oom_kill`). With cgroup v2 this includes all groups below; with v1 (kernel 4.13 and newer) only the group itself.
#[must_use]
pub fn kill_counters(pid: i32) -> Vec<PathBuf> {
    let file = |group: Group| {
        let name = if group.names == MEMORY.v2 { "memory.events" } else { "memory.oom_control" };
        // In a container the mount may begin at the group itself, whatever its path outside is.
        [group.mount.join(&group.path).join(name), group.mount.join(name)].into_iter().find(|file| file.is_file())
    };
    groups_of(pid, &MEMORY).unwrap_or_default().into_iter().filter_map(file).collect()
}

/// The file that makes the kernel kill all processes of the process's control group, or of one above it, if that runs
/// out of memory (`memory.oom.group`); `None` if there is no such group.
#[must_use]
pub fn killed_together(pid: i32) -> Option<PathBuf> {
    groups_of(pid, &MEMORY).unwrap_or_default().iter().find_map(Group::killed_together)
}

/// The sum of the counters; unreadable ones count as zero.
#[must_use]
pub fn kills(counters: &[PathBuf]) -> u64 {
    counters.iter().filter_map(|file| count(&std::fs::read_to_string(file).ok()?, "oom_kill ")).sum()
}

/// The number behind `field` in a file with one field a line.
fn count(text: &str, field: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(field)?.trim().parse().ok())
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
        let mounts = mounts::parse(format!("1 1 0:1 / {} rw - cgroup2 cgroup2 rw\n", dir.path().display()).as_bytes());
        let found = groups("0::/a/b\n", &mounts, &MEMORY);
        assert_eq!(found[0].headroom(), Some(600));
        write("a/memory.stat", "anon 100\ninactive_file 250\nactive_file 50\n");
        assert_eq!(found[0].headroom(), Some(850), "the kernel takes the cache of files back");
        assert_eq!(groups("0::/\n", &mounts, &MEMORY)[0].headroom(), None);
    }

    #[test]
    fn a_group_above_that_is_killed_as_a_whole_is_found() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        let mounts = mounts::parse(format!("1 1 0:1 / {} rw - cgroup2 cgroup2 rw\n", dir.path().display()).as_bytes());
        let found = |membership| groups(membership, &mounts, &MEMORY)[0].killed_together();
        std::fs::write(dir.path().join("a/b/memory.oom.group"), "0\n").unwrap();
        assert_eq!(found("0::/a/b\n"), None);
        let file = dir.path().join("a/memory.oom.group");
        std::fs::write(&file, "1\n").unwrap();
        assert_eq!((found("0::/a/b\n"), found("0::/\n")), (Some(file), None));
        // A container, whose root is the group.
        std::fs::write(dir.path().join("memory.oom.group"), "1\n").unwrap();
        assert!(found("0::/\n").is_some() && found("0::/kubepods/pod7\n").is_some());
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
        let mounts = b"1 1 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                       2 1 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let found = groups("5:memory:/job\n4:cpu:/\n", &mounts::parse(mounts), &MEMORY);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].mount, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(found[0].path, Path::new("job"));
    }
}
