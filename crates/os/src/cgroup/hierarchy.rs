//! The control group hierarchies, the group of this process in each, and the folder of that group.

use std::io;
use std::path::{Path, PathBuf};

/// A hierarchy, as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its controllers, as /proc/PID/cgroup lists them; empty for cgroup v2.
    pub controllers: String,
    /// The group of this process, as /proc/self/cgroup has it.
    pub own: String,
    /// The folder of that group; None if this hierarchy is mounted nowhere.
    pub folder: Option<PathBuf>,
}

impl Hierarchy {
    /// Whether it is cgroup v2.
    #[must_use]
    pub fn is_two(&self) -> bool {
        self.controllers.is_empty()
    }

    /// What a path of this hierarchy is below the group of this process; None for one that is not below it.
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
    let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}"));
    Ok(parse(&read("cgroup")?, &read("mountinfo")?))
}

/// The group of a process in each hierarchy, from its /proc/PID/cgroup: controllers and path.
pub fn memberships(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some((fields.next()?, fields.next()?))
    })
}

fn parse(membership: &str, mountinfo: &str) -> Vec<Hierarchy> {
    let one = |(controllers, own): (&str, &str)| {
        let folder = mountinfo.lines().find_map(|line| folder_in(line, controllers, own));
        Hierarchy { controllers: controllers.to_owned(), own: own.to_owned(), folder }
    };
    memberships(membership).map(one).collect()
}

/// The folder of a group, if this mount is of its hierarchy and shows it. In a container the mount may begin at the group.
fn folder_in(line: &str, controllers: &str, group: &str) -> Option<PathBuf> {
    // ID PARENT DEVICE ROOT POINT OPTIONS... - TYPE SOURCE OPTIONS (proc_pid_mountinfo(5)); a space in a name is \040.
    let (head, tail) = line.split_once(" - ")?;
    let mut head = head.split(' ').skip(3);
    let (root, point) = (head.next()?.replace("\\040", " "), head.next()?.replace("\\040", " "));
    let mut tail = tail.split(' ');
    let (kind, options) = (tail.next()?, tail.nth(1)?);
    let has = |wanted: &str| options.split(',').any(|option| option == wanted);
    let is_it = match controllers {
        "" => kind == "cgroup2",
        several => kind == "cgroup" && several.split(',').all(has),
    };
    let inside = Path::new(group).strip_prefix(&root).ok().filter(|_| is_it)?;
    Some(if inside == Path::new("") { PathBuf::from(point) } else { Path::new(&point).join(inside) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:5 - cgroup2 cgroup2 rw,nsdelegate
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 /docker/abc /sys/fs/cgroup/pids\\040here rw - cgroup cgroup rw,pids
34 30 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
";

    #[test]
    fn groups_are_found_where_their_hierarchy_is_mounted() {
        let own = "5:name=systemd:/a:b\n4:pids:/docker/abc/job\n3:cpu,cpuacct:/\n2:memory:/x\n0::/user.slice/job\n";
        let found = parse(own, MOUNTS);
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
        assert_eq!(parse("4:pids:/docker/other\n", MOUNTS)[0].folder, None);
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
