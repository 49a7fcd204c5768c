//! Mounts that the job makes itself, in its own mount namespace.
//!
//! That namespace is in no image: a restored job gets a new one, with the mounts of the machine at that time. What the job had
//! mounted would be gone, and what it writes there would go to the folder below, without an error. So snapshots are refused as
//! long as there is such a mount.
//!
//! Others appear while the job runs, too: what the machine mounts arrives in the job's namespace, and file systems of the
//! network have parts that the kernel mounts for whoever opens a path. A mount counts as the job's if it was not there when its
//! world was made, and if the machine does not have the same.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use rekindle_os::mounts::{self, Mount};
use rekindle_os::process;

/// File systems with parts that the kernel mounts itself, below one of the same type.
const BY_THEMSELVES: [&str; 7] = ["nfs", "nfs4", "cifs", "smb3", "afs", "ceph", "virtiofs"];

/// The device, the folder of its file system, and where it is.
type Key = (u64, PathBuf, PathBuf);

fn key(mount: &Mount) -> Key {
    (mount.device, mount.root.clone(), mount.point.clone())
}

/// The mounts of a world before the job ran in it.
#[derive(Debug)]
pub struct Before {
    keys: HashSet<Key>,
    by_number: HashMap<u32, Mount>,
}

/// What mountinfo adds to the root of a mount of something that was removed.
const REMOVED: &str = "//deleted";

/// What the job has mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    point: PathBuf,
    kind: String,
    source: String,
    user: Option<(i32, String)>,
}

impl std::fmt::Display for Mounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mounted { point, kind, source, user } = self;
        let point = point.display();
        write!(f, "the job has mounted {kind} ({source}) at {point} itself")?;
        if let Some((pid, name)) = user {
            write!(f, ", and process {pid} ({name}) uses it")?;
        }
        write!(
            f,
            ". A restored job would not have this mount, and write to the folder below it: mount it before rekindle starts, or \
             have the job unmount it before a snapshot"
        )
    }
}

impl Before {
    /// Those that a process of that world sees.
    pub(crate) fn look(pid: i32) -> io::Result<Before> {
        Ok(Before::of(mounts::of(pid)?))
    }

    fn of(mounts: Vec<Mount>) -> Before {
        Before {
            keys: mounts.iter().map(key).collect(),
            by_number: mounts.into_iter().map(|mount| (mount.id, mount)).collect(),
        }
    }

    /// Whether a mount was there under another name: what it shows was removed, or a folder above it was renamed. The machine
    /// does both, and where its mounts are private, the world keeps what it had. A number alone says nothing: the job or
    /// the machine may have unmounted that one, and the next one got it, and with it the number of a device.
    fn was_renamed(&self, now: &Mount) -> bool {
        let Some(before) = self.by_number.get(&now.id) else { return false };
        let same = |mount: &Mount| (mount.parent, mount.device, mount.kind.clone(), mount.source.clone());
        let is_same = same(before) == same(now);
        let shows = |mount: &Mount| mount.root.to_string_lossy().trim_end_matches(REMOVED).to_owned();
        is_same && shows(before) == shows(now)
    }

    /// What a job has mounted since, by the processes in its tree.
    pub(crate) fn since(&self, tree: &[i32]) -> Option<Mounted> {
        let root = tree.first()?;
        let look = || {
            // Before and after: the machine may mount or unmount something just now.
            let before = mounts::of("self").ok()?;
            let now = mounts::of(root).ok()?;
            let machine = before.into_iter().chain(mounts::of("self").ok()?);
            Some(self.fresh(&now, &machine.map(|mount| key(&mount)).collect()))
        };
        let first = look().filter(|found| !found.is_empty())?;
        let still = look()?;
        let found = first.into_iter().find(|mount| still.contains(mount))?;
        let user = tree.iter().find(|pid| uses(**pid, &found.point));
        let user = user.map(|pid| (process::inner_pid(*pid).unwrap_or(*pid), process::name(*pid).unwrap_or_default()));
        Some(Mounted { point: found.point, kind: found.kind, source: found.source, user })
    }

    fn fresh(&self, now: &[Mount], machine: &HashSet<Key>) -> Vec<Mount> {
        let is_known = |mount: &Mount| {
            let key = key(mount);
            self.keys.contains(&key) || machine.contains(&key) || is_automatic(mount, now) || self.was_renamed(mount)
        };
        now.iter().filter(|mount| !is_known(mount)).cloned().collect()
    }
}

/// Whether the kernel has mounted it when somebody opened a path.
fn is_automatic(mount: &Mount, all: &[Mount]) -> bool {
    let around = all.iter().filter(|other| mount.point.starts_with(&other.point) && other.point != mount.point);
    // The last of the deepest is what is seen there.
    let parent = around.max_by_key(|other| other.point.components().count());
    parent.is_some_and(|parent| {
        (mount.kind == parent.kind && BY_THEMSELVES.contains(&&*mount.kind))
            || (mount.kind == "tracefs" && parent.kind == "debugfs")
            || parent.kind == "autofs"
    })
}

fn uses(pid: i32, point: &Path) -> bool {
    let is_below = |path: &Path| path.starts_with(point);
    let link = |name: &str| std::fs::read_link(format!("/proc/{pid}/{name}")).is_ok_and(|path| is_below(&path));
    link("cwd") || process::descriptors(pid).any(|(_, target)| is_below(&target))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:5 / /proc rw - proc proc rw
3 1 0:40 / /data rw - nfs4 server:/ rw
4 1 0:6 / /sys/kernel/debug rw - debugfs debugfs rw
5 1 0:7 / /net rw - autofs auto rw
";

    fn found(lines: &str, machine: &str) -> Vec<String> {
        let before = Before::of(mounts::parse(TABLE.as_bytes()));
        let now = mounts::parse(format!("{TABLE}{lines}").as_bytes());
        let machine = mounts::parse(format!("{TABLE}{machine}").as_bytes()).iter().map(key).collect();
        before.fresh(&now, &machine).into_iter().map(|mount| mount.point.display().to_string()).collect()
    }

    #[test]
    fn only_what_the_job_has_mounted_counts() {
        let tmpfs = "9 1 0:50 / /scratch rw - tmpfs none rw\n";
        assert_eq!(found("", ""), [""; 0]);
        assert_eq!(found(tmpfs, ""), ["/scratch"]);
        assert_eq!(found(tmpfs, tmpfs), [""; 0], "the machine has mounted it");
        // The same place, and something else.
        assert_eq!(found(tmpfs, "9 1 0:51 / /scratch rw - tmpfs none rw\n"), ["/scratch"]);
        let bind = "9 1 8:1 /home/data /mnt rw - ext4 /dev/sda rw\n";
        let over = "10 2 0:5 / /proc rw,nosuid - proc proc rw\n11 1 0:52 / / rw - overlay overlay rw\n";
        assert_eq!(found(&format!("{bind}{over}"), ""), ["/mnt", "/"]);
        assert_eq!(found("", tmpfs), [""; 0], "what the job has unmounted is not its concern");
    }

    /// The machine removes or renames what a mount of the world shows, or a folder above it.
    #[test]
    fn a_mount_whose_names_change_is_the_same() {
        let table = |line: &str| mounts::parse(format!("{TABLE}{line}").as_bytes());
        let found = |line: &str| {
            let before = Before::of(table("9 1 8:1 /srv/hosts /etc/hosts rw - ext4 /dev/sda rw\n"));
            before.fresh(&table(line), &HashSet::new()).len()
        };
        assert_eq!(found("9 1 8:1 /srv/hosts//deleted /etc/hosts rw - ext4 /dev/sda rw\n"), 0);
        assert_eq!(found("9 1 8:1 /srv/hosts /etc.old/hosts rw - ext4 /dev/sda rw\n"), 0);
        // The job has unmounted it, and mounted something else: the kernel gives the number again.
        assert_eq!(found("9 1 8:1 /home/x /etc/hosts rw - ext4 /dev/sda rw\n"), 1);
        assert_eq!(found("10 1 8:1 /srv/hosts /mnt rw - ext4 /dev/sda rw\n"), 1);
        assert_eq!(found("9 1 8:2 /srv/hosts//deleted /etc/hosts rw - ext4 /dev/sdb rw\n"), 1);
        // Both numbers were given again: a temporary file system of the machine was unmounted.
        let before = Before::of(table("9 1 0:50 / /run/other rw - tmpfs other rw\n"));
        let now = table("9 1 0:50 / /srv/groups rw - cgroup none rw,net_prio\n");
        assert_eq!(before.fresh(&now, &HashSet::new()).len(), 1);
        assert_eq!(found("9 4 8:1 /srv/hosts//deleted /etc/hosts rw - ext4 /dev/sda rw\n"), 1);
    }

    #[test]
    fn parts_that_the_kernel_mounts_do_not_count() {
        let parts = "\
9 3 0:60 / /data/export rw - nfs4 server:/export rw
10 4 0:61 / /sys/kernel/debug/tracing rw - tracefs tracefs rw
11 5 0:62 / /net/server rw - nfs4 server:/ rw
12 11 0:63 / /net/server/export rw - nfs4 server:/export rw
";
        assert_eq!(found(parts, ""), [""; 0]);
        let own = "9 1 0:60 / /mnt rw - nfs4 server:/export rw\n10 3 0:61 / /data/tmp rw - tmpfs none rw\n";
        assert_eq!(found(own, ""), ["/mnt", "/data/tmp"]);
    }

    #[test]
    fn what_this_process_sees_is_not_made_by_a_job() {
        let own = std::process::id().cast_signed();
        assert_eq!(Before::of(Vec::new()).since(&[own]), None, "all of it is the machine's");
    }
}
