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
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};

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

/// A mount, as /proc/self/mountinfo has it (proc_pid_mountinfo(5)).
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    point: PathBuf,
    kind: String,
    /// What it keeps files there from: a view must not take it away.
    flags: MsFlags,
}

/// What is done about a mount.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Overlay,
    /// As it is, for reading only.
    Bind,
}

/// File systems of the kernel's, and such whose files mean something elsewhere.
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

impl Mount {
    fn plan(&self) -> Plan {
        match self.kind.as_str() {
            kind if KERNELS.contains(&kind) => Plan::Bind,
            // These characters mean something in the options of a mount.
            _ if self.point.as_os_str().as_encoded_bytes().iter().any(|byte| b":,\\".contains(byte)) => Plan::Bind,
            _ if !self.point.is_dir() => Plan::Bind,
            _ => Plan::Overlay,
        }
    }
}

/// In the order in which they were mounted; of several at one place the last, which is the one that can be seen.
fn mounts(mountinfo: &str) -> Vec<Mount> {
    let mut seen = BTreeSet::new();
    let parse = |line: &str| {
        let (front, back) = line.split_once(" - ")?;
        let mut fields = front.split(' ').skip(4);
        let (point, options) = (unescaped(fields.next()?), fields.next()?);
        Some(Mount { point, kind: back.split(' ').next()?.to_owned(), flags: flags(options) })
    };
    let mut found: Vec<Mount> = mountinfo.lines().filter_map(parse).collect();
    found.reverse();
    found.retain(|mount| seen.insert(mount.point.clone()));
    // A mount below another comes after it.
    found.sort_by_key(|mount| mount.point.components().count());
    found
}

/// Those of the options of a mount that are kept.
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

/// Blanks and the like are written as three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()).filter(|_| *first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

/// Enters a separate view, permanently. `base` is a folder in which it is built, and is not changed; `limit` is how
/// many bytes may be written in it. The process must have one thread only. Returns the places without an overlay,
/// except the kernel's: what is not a regular file there (a FIFO, a device, a socket, a lock) is the machine's.
///
/// # Errors
/// When the kernel refuses: it takes CAP_SYS_ADMIN and overlayfs. The process is then in a mount namespace of its own, and
/// sees what it saw before or less.
pub fn enter(base: &Path, limit: u64) -> Result<Vec<PathBuf>, Error> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed("make a mount namespace"))?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).map_err(failed("make mounts private"))?;
    let table = fs::read("/proc/self/mountinfo").map_err(failed("read /proc/self/mountinfo"))?;
    // A name that is no text is not found below, and left out.
    let table = String::from_utf8_lossy(&table);
    let upper = format!("size={limit},mode=0755");
    mount(Some("rekindle"), base, Some("tmpfs"), MsFlags::empty(), Some(upper.as_str()))
        .map_err(failed("mount a tmpfs"))?;
    // The upper sides are named from here: a name with a comma ends an option.
    chdir(base).map_err(failed("enter the folder of the view"))?;
    let (root, mut as_they_are) = (base.join("root"), Vec::new());
    for (number, place) in mounts(&table).iter().enumerate() {
        let target = if place.point == Path::new("/") {
            fs::create_dir(&root).map_err(failed("make a folder"))?;
            root.clone()
        } else {
            root.join(place.point.strip_prefix("/").unwrap_or(&place.point))
        };
        // Below a file system that was mounted over it. To look at one of autofs may mount something.
        if place.kind == "autofs"
            || fs::symlink_metadata(&target).is_err()
            || fs::symlink_metadata(&place.point).is_err()
        {
            continue;
        }
        match place.plan() {
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
    // The old root is mounted over the new one, and goes (pivot_root(2)).
    pivot_root(".", ".").map_err(failed("enter the view"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(failed("leave the machine's mounts"))?;
    chdir("/").map_err(failed("enter the view"))?;
    Ok(as_they_are)
}

/// From the folder of the view.
fn overlay(number: usize, place: &Mount, target: &Path) -> io::Result<()> {
    let lower = &place.point;
    let (upper, work) = (format!("upper{number}"), format!("work{number}"));
    for folder in [&upper, &work] {
        match fs::create_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    // The upper side is what a folder that is not changed looks like.
    let of = fs::metadata(lower)?;
    fs::set_permissions(&upper, of.permissions())?;
    std::os::unix::fs::chown(&upper, Some(of.uid()), Some(of.gid()))?;
    let options = format!("lowerdir={},upperdir={upper},workdir={work}", lower.display());
    Ok(mount(Some("rekindle"), target, Some("overlay"), place.flags, Some(options.as_str()))?)
}

fn bind(place: &Mount, target: &Path) -> Result<(), Error> {
    let (none, name) = (None::<&str>, place.point.display());
    mount(Some(&place.point), target, none, MsFlags::MS_BIND, none).map_err(failed(format!("mount {name}")))?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | place.flags;
    mount(none, target, none, flags, none).map_err(failed(format!("mount {name} for reading only")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_in_the_order_in_which_they_lie_over_each_other() {
        let text = "22 1 8:1 / / rw - ext4 /dev/sda rw\n\
                    30 22 0:5 / /a/b\\040c rw shared:1 - tmpfs tmpfs rw\n\
                    31 22 0:6 / /proc rw - proc proc rw\n\
                    29 22 0:7 / /a rw - xfs /dev/sdb rw\n\
                    32 22 0:8 / /proc rw - tmpfs none rw\n";
        let found = mounts(text);
        let names: Vec<(&str, &str)> = found.iter().map(|m| (m.point.to_str().unwrap(), m.kind.as_str())).collect();
        assert_eq!(names, [("/", "ext4"), ("/proc", "tmpfs"), ("/a", "xfs"), ("/a/b c", "tmpfs")]);
        assert_eq!(flags("rw,nosuid,nodev,relatime"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RELATIME);
        assert_eq!(unescaped("\\134x\\9"), Path::new("\\x\\9"));
    }

    #[test]
    fn the_kernels_file_systems_are_not_laid_over() {
        let plan =
            |point: &str, kind: &str| Mount { point: point.into(), kind: kind.into(), flags: MsFlags::empty() }.plan();
        assert_eq!(plan("/", "ext4"), Plan::Overlay);
        assert_eq!(plan("/proc", "proc"), Plan::Bind);
        assert_eq!(plan("/dev/pts", "devpts"), Plan::Bind);
        assert_eq!(plan("/etc/hostname", "ext4"), Plan::Bind, "a file");
    }
}
