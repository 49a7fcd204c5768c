//! The store: its owner, its file system, and the available space.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::AtFlags;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, faccessat};

use super::Check;
use rekindle_base::chain;
use rekindle_base::units::size;
use rekindle_os::mounts::{self, Mount};
use rekindle_store::{self as store, Access, Store};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// As configured.
    pub(super) path: PathBuf,
    pub(super) folder: Folder,
    /// Whether this process may create files in it, or in the nearest existing folder above.
    pub(super) writable: bool,
    /// `None` if it cannot be determined.
    pub(super) file_system: Option<FileSystem>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Folder {
    /// It exists, with these permissions.
    There { mode: u32 },
    /// `run` creates it.
    NotYet,
    /// `run` would refuse it, with the store's message.
    Refused(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileSystem {
    /// Its name as in mount(8): ext4, nfs4, fuse.sshfs.
    pub(super) kind: String,
    pub(super) mount: PathBuf,
    pub(super) free: u64,
    pub(super) executable: bool,
    pub(super) read_only: bool,
}

pub(super) fn gather(path: &Path) -> Facts {
    let folder = match Store::open(path, Access::Read) {
        Ok(store) => match std::fs::metadata(store.path()) {
            Ok(meta) => Folder::There { mode: meta.permissions().mode() & 0o7777 },
            Err(error) => Folder::Refused(error.to_string()),
        },
        Err(store::Error::NoStore(_)) => Folder::NotYet,
        Err(error) => Folder::Refused(chain(&error)),
    };
    let there = path.ancestors().find_map(|it| std::fs::canonicalize(it).ok()).unwrap_or_else(|| "/".into());
    let rights = AccessFlags::W_OK | AccessFlags::X_OK;
    Facts {
        path: path.to_owned(),
        folder,
        writable: faccessat(nix::fcntl::AT_FDCWD, &there, rights, AtFlags::AT_EACCESS).is_ok(),
        file_system: file_system(&there),
    }
}

fn file_system(path: &Path) -> Option<FileSystem> {
    let stat = statvfs(path).ok()?;
    let Mount { point: mount, kind, .. } = mount_of(path, mounts::of("self").ok()?)?;
    Some(FileSystem {
        kind,
        mount,
        free: stat.blocks_available().saturating_mul(stat.fragment_size()),
        executable: !stat.flags().contains(FsFlags::ST_NOEXEC),
        read_only: stat.flags().contains(FsFlags::ST_RDONLY),
    })
}

/// The longest mount point above `path`, the last of equals as that one covers the others.
fn mount_of(path: &Path, mounts: Vec<Mount>) -> Option<Mount> {
    let above = mounts.into_iter().filter(|mount| path.starts_with(&mount.point));
    above.max_by_key(|mount| mount.point.components().count())
}

/// Types of file systems that are on other machines.
const NETWORK: [&str; 18] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "9p",
    "afs",
    "glusterfs",
    "wekafs",
    "panfs",
    "orangefs",
    "pvfs2",
    "ocfs2",
    "gfs2",
    "virtiofs",
];
/// Types of file systems that are lost at a reboot.
const VOLATILE: [&str; 2] = ["tmpfs", "ramfs"];

pub(super) fn judge(facts: &Facts, min_free: u64) -> Vec<Check> {
    vec![permissions(facts), mounted(facts), space(facts, min_free)]
}

fn permissions(facts: &Facts) -> Check {
    let name = "store.permissions";
    let path = facts.path.display();
    match &facts.folder {
        // The first part of the store's message is followed by advice.
        Folder::Refused(why) => Check::missing(
            name,
            why.clone(),
            format!("make {path} a folder of root's with mode 0700, or use another one with --store"),
        ),
        _ if !facts.writable => Check::missing(
            name,
            format!("this user cannot write {path}"),
            "run as root, or use another store with --store",
        ),
        Folder::NotYet => Check::ok(name, format!("{path} does not exist yet; `run` creates it")),
        Folder::There { mode } if mode & 0o077 != 0 => Check::warn(
            name,
            format!("{path} has mode {mode:04o}: others can read the images, which contain the memory of jobs"),
            format!("sudo chmod 0700 '{path}'"),
        ),
        Folder::There { mode } => Check::ok(name, format!("{path}, mode {mode:04o}")),
    }
}

fn mounted(facts: &Facts) -> Check {
    let name = "store.file-system";
    let elsewhere = "use a store on a local disk, with --store or store.directory";
    let Some(fs) = &facts.file_system else {
        return Check::warn(name, format!("cannot check the file system of {}", facts.path.display()), elsewhere);
    };
    let (kind, mount) = (fs.kind.as_str(), fs.mount.display());
    let remount = |option: &str| format!("sudo mount -o remount,{option} '{mount}', or {elsewhere}");
    if fs.read_only {
        return Check::missing(name, format!("{kind} at {mount} is mounted read-only"), remount("rw"));
    }
    if !fs.executable {
        let found = format!("{kind} at {mount} is mounted noexec, but the job's reaper runs from the store");
        return Check::missing(name, found, remount("exec"));
    }
    if NETWORK.contains(&kind) || kind.starts_with("fuse.") {
        let found = format!("{kind} at {mount}: not a local disk, so storing and restoring images takes long");
        return Check::warn(name, found, elsewhere);
    }
    if VOLATILE.contains(&kind) {
        return Check::warn(
            name,
            format!("{kind} at {mount}: images are in memory and are lost after a reboot"),
            elsewhere,
        );
    }
    if kind == "overlay" {
        let found = format!("{kind} at {mount}: images are lost when the container is removed");
        return Check::warn(
            name,
            found,
            "mount a volume and use it with --store (Docker: -v /var/lib/rekindle:/var/lib/rekindle)",
        );
    }
    Check::ok(name, format!("{kind} at {mount}"))
}

fn space(facts: &Facts, min_free: u64) -> Check {
    let name = "store.space";
    let Some(fs) = &facts.file_system else { return Check::not_here(name, "not known") };
    let found = format!("{} free", size(fs.free));
    if fs.free > min_free {
        return Check::ok(name, found);
    }
    Check::missing(
        name,
        format!("{found}, but store.min-free is {}: no image can be stored", size(min_free)),
        "free space (`rekindle prune --dry-run` shows what can be removed), or lower store.min-free",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    const GIB: u64 = 1 << 30;

    fn disk(kind: &str) -> FileSystem {
        FileSystem { kind: kind.into(), mount: "/var".into(), free: 9 * GIB, executable: true, read_only: false }
    }

    fn facts(file_system: FileSystem) -> Facts {
        let folder = Folder::There { mode: 0o700 };
        Facts { path: "/var/lib/rekindle".into(), folder, writable: true, file_system: Some(file_system) }
    }

    fn states(facts: &Facts) -> Vec<State> {
        judge(facts, GIB).iter().map(|check| check.state).collect()
    }

    #[test]
    fn a_local_disk_of_ones_own_is_ok() {
        assert_eq!(states(&facts(disk("ext4"))), [State::Ok; 3]);
        assert_eq!(states(&Facts { folder: Folder::NotYet, ..facts(disk("xfs")) }), [State::Ok; 3]);
    }

    #[test]
    fn permissions_decide_whether_run_can_work() {
        let judged = |folder, writable| permissions(&Facts { folder, writable, ..facts(disk("ext4")) });
        assert_eq!(judged(Folder::There { mode: 0o750 }, true).state, State::Warn);
        assert_eq!(judged(Folder::There { mode: 0o750 }, true).fix.unwrap(), "sudo chmod 0700 '/var/lib/rekindle'");
        assert_eq!(judged(Folder::There { mode: 0o700 }, false).state, State::Missing);
        assert_eq!(judged(Folder::NotYet, false).state, State::Missing);
        assert_eq!(judged(Folder::Refused("no".into()), true).state, State::Missing);
    }

    #[test]
    fn mounts_that_can_not_hold_a_store_and_those_that_should_not() {
        let judged = |fs| mounted(&facts(fs)).state;
        assert_eq!(judged(FileSystem { executable: false, ..disk("ext4") }), State::Missing);
        assert_eq!(judged(FileSystem { read_only: true, ..disk("ext4") }), State::Missing);
        for kind in ["nfs4", "lustre", "fuse.sshfs", "tmpfs", "overlay"] {
            assert_eq!(judged(disk(kind)), State::Warn, "{kind}");
        }
        let unknown = Facts { file_system: None, ..facts(disk("ext4")) };
        assert_eq!(states(&unknown), [State::Ok, State::Warn, State::NotHere]);
    }

    #[test]
    fn without_room_no_image_can_be_taken() {
        let judged = |free| space(&facts(FileSystem { free, ..disk("ext4") }), GIB).state;
        assert_eq!(judged(GIB + 1), State::Ok);
        assert_eq!(judged(GIB), State::Missing);
    }

    #[test]
    fn the_longest_and_last_mount_counts() {
        let info = b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / /var/my\\040lib rw shared:1 - nfs4 h:/x rw\n\
                    3 1 0:10 / /var/my\\040lib rw - tmpfs none rw\n4 1 0:11 / /var/my rw - xfs /dev/b rw\n";
        let kind = |path: &str| mount_of(Path::new(path), mounts::parse(info)).unwrap().kind;
        assert_eq!(kind("/var/my lib/store"), "tmpfs");
        assert_eq!(kind("/var/my/store"), "xfs");
        assert_eq!(kind("/var/mylib"), "ext4");
        assert_eq!(mount_of(Path::new("/x"), mounts::parse(b"garbage")), None);
    }
}
