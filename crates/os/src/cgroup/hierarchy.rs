//! The control group hierarchies, the group of this process in each, and the folder of that group.

use std::io;
use std::path::{Path, PathBuf};

use crate::mounts::{self, Mount};
use crate::process;

/// A hierarchy, as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its controllers, as /proc/PID/cgroup lists them; empty for cgroup v2.
    pub controllers: String,
    /// The path of this process's group, from /proc/self/cgroup.
    pub own: String,
    /// The folder of that group; `None` if this hierarchy is not mounted.
    pub folder: Option<PathBuf>,
}

impl Hierarchy {
    /// Whether it is cgroup v2.
    #[must_use]
    pub fn is_two(&self) -> bool {
        self.controllers.is_empty()
    }

    /// The part of `path` below the group of this process; `None` for a path that is not below it.
    #[must_use]
    pub fn below<'a>(&self, path: &'a str) -> Option<&'a str> {
        let own = self.own.strip_suffix('/').unwrap_or(&self.own);
        path.strip_prefix(own)?.strip_prefix('/').filter(|rest| !rest.is_empty())
    }
}

/// All hierarchies that this process is in.
///
/// # Errors
/// When /proc cannot be read.
pub fn hierarchies() -> io::Result<Vec<Hierarchy>> {
    Ok(parse(&process::text("self", "cgroup")?, &mounts::of("self")?))
}

/// The group of a process in each hierarchy, from its /proc/PID/cgroup: controllers and path.
pub fn memberships(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some((fields.next()?, fields.next()?))
    })
}

fn parse(membership: &str, mounts: &[Mount]) -> Vec<Hierarchy> {
    let one = |(controllers, own): (&str, &str)| {
        let folder = mounts.iter().find_map(|mount| folder_in(mount, controllers, own));
        Hierarchy { controllers: controllers.to_owned(), own: own.to_owned(), folder }
    };
    memberships(membership).map(one).collect()
}

/// The folder of a group, if this is a mount of its hierarchy that contains the group. In a container the mount may
/// begin at the group.
pub(super) fn folder_in(mount: &Mount, controllers: &str, group: &str) -> Option<PathBuf> {
    let inside = Path::new(group).strip_prefix(&mount.root).ok().filter(|_| has(mount, controllers))?;
    Some(if inside == Path::new("") { mount.point.clone() } else { mount.point.join(inside) })
}

/// Whether this mount is of the hierarchy with these controllers; of version 2, if there are none.
pub(super) fn has(mount: &Mount, controllers: &str) -> bool {
    let has = |wanted: &str| mount.super_options.split(',').any(|option| option == wanted);
    match controllers {
        "" => mount.kind == "cgroup2",
        several => mount.kind == "cgroup" && several.split(',').all(has),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"\
30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:5 - cgroup2 cgroup2 rw,nsdelegate
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 /docker/abc /sys/fs/cgroup/pids\\040here rw - cgroup cgroup rw,pids
34 30 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
";

    #[test]
    fn groups_are_found_where_their_hierarchy_is_mounted() {
        let own = "5:name=systemd:/a:b\n4:pids:/docker/abc/job\n3:cpu,cpuacct:/\n2:memory:/x\n0::/user.slice/job\n";
        let mounts = mounts::parse(MOUNTS);
        let found = parse(own, &mounts);
        let folders: Vec<_> = found.iter().map(|it| it.folder.as_deref().map(|it| it.to_str().unwrap())).collect();
        let expected = [
            Some("/sys/fs/cgroup/systemd/a:b"),
            Some("/sys/fs/cgroup/pids here/job"),
            Some("/sys/fs/cgroup/cpu,cpuacct"),
            None,
            Some("/sys/fs/cgroup/unified/user.slice/job"),
        ];
        assert_eq!(folders, expected);
        assert!(found[4].is_two() && !found[1].is_two());
        // Another container's group is not in this mount.
        assert_eq!(parse("4:pids:/docker/other\n", &mounts)[0].folder, None);
    }

    #[test]
    fn only_what_is_strictly_below_is_below() {
        let of = |own: &str| Hierarchy { controllers: String::new(), own: own.into(), folder: None };
        assert_eq!(of("/a/b").below("/a/b/c/d"), Some("c/d"));
        for outside in ["/a/b", "/a/b/", "/a/bc", "/a", "/", "/x/a/b/c", "a/b/c"] {
            assert_eq!(of("/a/b").below(outside), None, "{outside}");
        }
        assert_eq!(of("/").below("/c/d"), Some("c/d"));
        assert_eq!(of("/").below("/"), None);
    }
}
