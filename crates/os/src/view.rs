//! A view of the machine's files in which all writes are lost when its processes end.
//!
//! Each mounted file system gets an overlay (overlayfs) whose upper layer is in memory. Reads see what is on disk now;
//! writes, removals, sockets and locks are visible only to this process and its children. What cannot get an overlay (a
//! single mounted file, a file system that overlayfs does not support) is mounted read-only. The kernel's own file
//! systems are mounted read-only, too. When the last process in the view ends, nothing of it remains: all of it is
//! mounts of a separate mount namespace.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};

use super::mounts::{self, Mount};

/// Why a view cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}")]
pub struct Error {
    what: String,
    #[source]
    source: io::Error,
}

fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    let what = what.into();
    move |source| Error { what, source: source.into() }
}

/// What is done about a mount.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Overlay,
    /// Mounted unchanged, read-only.
    Bind,
}

/// The kernel's own file systems, and file systems whose files refer to something outside of them.
const KERNELS: [&str; 22] = [
    "autofs",
    "binder",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "efivarfs",
    "fuse.lxcfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nfsd",
    "nsfs",
    "proc",
    "pstore",
    "rpc_pipefs",
    "securityfs",
    "sysfs",
    "tracefs",
];

fn plan(point: &Path, kind: &str) -> Plan {
    // These characters mean something in the options of a mount.
    let is_odd = point.as_os_str().as_encoded_bytes().iter().any(|byte| b":,\\".contains(byte));
    if KERNELS.contains(&kind) || is_odd || !point.is_dir() { Plan::Bind } else { Plan::Overlay }
}

/// In the order in which they were mounted; of several at one place the last, which is the one that can be seen.
fn visible(mut found: Vec<Mount>) -> Vec<Mount> {
    let mut seen = BTreeSet::new();
    found.reverse();
    found.retain(|mount| seen.insert(mount.point.clone()));
    // A mount comes after the one that it is below.
    found.sort_by_key(|mount| mount.point.components().count());
    found
}

/// Those of the options of a mount that are kept: a view must not take them away.
fn flags(options: &str) -> MsFlags {
    let of = |option| match option {
        "nosuid" => MsFlags::MS_NOSUID,
        "nodev" => MsFlags::MS_NODEV,
        "noexec" => MsFlags::MS_NOEXEC,
        "noatime" => MsFlags::MS_NOATIME,
        "nodiratime" => MsFlags::MS_NODIRATIME,
        "relatime" => MsFlags::MS_RELATIME,
        _ => MsFlags::empty(),
    };
    options.split(',').map(of).fold(MsFlags::empty(), |all, flag| all | flag)
}

/// Enters a separate view, permanently. `base` is a folder in which it is built, and is not changed; `limit` is how
/// many bytes may be written in it. The process must have only one thread. Returns the mount points without an overlay,
/// except the kernel's: FIFOs, devices, sockets and locks there are those of the machine.
///
/// # Errors
/// When the kernel refuses: this needs CAP_SYS_ADMIN and overlayfs. The process is then in its own mount namespace, and
/// sees the same files as before or fewer.
pub fn enter(base: &Path, limit: u64) -> Result<Vec<PathBuf>, Error> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed("make a mount namespace"))?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).map_err(failed("make mounts private"))?;
    let mounts = visible(mounts::of("self").map_err(failed("read /proc/self/mountinfo"))?);
    let upper = format!("size={limit},mode=0755");
    mount(Some("rekindle"), base, Some("tmpfs"), MsFlags::empty(), Some(upper.as_str()))
        .map_err(failed("mount a tmpfs"))?;
    // The upper layers are named relative to here: a comma in a name would end an option.
    chdir(base).map_err(failed("enter the folder of the view"))?;
    let (root, mut as_they_are) = (base.join("root"), Vec::new());
    for (number, place) in mounts.iter().enumerate() {
        let target = if place.point == Path::new("/") {
            fs::create_dir(&root).map_err(failed("make a folder"))?;
            root.clone()
        } else {
            root.join(place.point.strip_prefix("/").unwrap_or(&place.point))
        };
        // Hidden below a file system that was mounted over it. Looking at an autofs may mount something.
        if place.kind == "autofs"
            || fs::symlink_metadata(&target).is_err()
            || fs::symlink_metadata(&place.point).is_err()
        {
            continue;
        }
        match plan(&place.point, &place.kind) {
            Plan::Overlay if overlay(number, place, &target).is_ok() => {}
            Plan::Overlay if place.point == Path::new("/") => {
                overlay(number, place, &target).map_err(failed("mount an overlay in memory over /"))?;
            }
            _ => {
                bind(place, &target)?;
                if !KERNELS.contains(&place.kind.as_str()) {
                    as_they_are.push(place.point.clone());
                }
            }
        }
    }
    chdir(&root).map_err(failed("enter the view"))?;
    // The old root is mounted over the new one, and then detached (pivot_root(2)).
    pivot_root(".", ".").map_err(failed("enter the view"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(failed("leave the machine's mounts"))?;
    chdir("/").map_err(failed("enter the view"))?;
    Ok(as_they_are)
}

/// Mounts an overlay; the working directory is the folder of the view.
fn overlay(number: usize, place: &Mount, target: &Path) -> io::Result<()> {
    let lower = &place.point;
    let (upper, work) = (format!("upper{number}"), format!("work{number}"));
    for folder in [&upper, &work] {
        match fs::create_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    // The mount point's mode and owner are those of the upper layer.
    let of = fs::metadata(lower)?;
    fs::set_permissions(&upper, of.permissions())?;
    std::os::unix::fs::chown(&upper, Some(of.uid()), Some(of.gid()))?;
    let options = format!("lowerdir={},upperdir={upper},workdir={work}", lower.display());
    Ok(mount(Some("rekindle"), target, Some("overlay"), flags(&place.options), Some(options.as_str()))?)
}

fn bind(place: &Mount, target: &Path) -> Result<(), Error> {
    let (none, name) = (None::<&str>, place.point.display());
    mount(Some(&place.point), target, none, MsFlags::MS_BIND, none).map_err(failed(format!("mount {name}")))?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | flags(&place.options);
    mount(none, target, none, flags, none).map_err(failed(format!("mount {name} for reading only")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_in_the_order_in_which_they_lie_over_each_other() {
        let text = b"22 1 8:1 / / rw - ext4 /dev/sda rw\n\
                    30 22 0:5 / /a/b\\040c rw shared:1 - tmpfs tmpfs rw\n\
                    31 22 0:6 / /proc rw - proc proc rw\n\
                    29 22 0:7 / /a rw - xfs /dev/sdb rw\n\
                    32 22 0:8 / /proc rw - tmpfs none rw\n";
        let found = visible(mounts::parse(text));
        let names: Vec<(&str, &str)> = found.iter().map(|m| (m.point.to_str().unwrap(), m.kind.as_str())).collect();
        assert_eq!(names, [("/", "ext4"), ("/proc", "tmpfs"), ("/a", "xfs"), ("/a/b c", "tmpfs")]);
        assert_eq!(flags("rw,nosuid,nodev,relatime"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RELATIME);
    }

    #[test]
    fn the_kernels_file_systems_are_not_laid_over() {
        let plan = |point: &str, kind: &str| plan(Path::new(point), kind);
        assert_eq!(plan("/", "ext4"), Plan::Overlay);
        assert_eq!(plan("/proc", "proc"), Plan::Bind);
        assert_eq!(plan("/dev/pts", "devpts"), Plan::Bind);
        assert_eq!(plan("/etc/hostname", "ext4"), Plan::Bind, "a file");
    }
}
