//! Where the content of a file is stored, and copies that share its blocks.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::sys::statfs::{
    BPF_FS_MAGIC, CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, DEBUGFS_MAGIC, FsType, PROC_SUPER_MAGIC, SECURITYFS_MAGIC,
    SYSFS_MAGIC, TMPFS_MAGIC, TRACEFS_MAGIC, fstatfs,
};

/// Missing in nix: include/uapi/linux/magic.h.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// File systems whose files the kernel generates when they are read, or whose content is settings of the machine. The
/// numbers are those of include/uapi/linux/magic.h, or of the file system's source.
const MADE_UP: [FsType; 21] = [
    // autofs
    FsType(0x0187),
    // binfmt_misc
    FsType(0x4249_4e4d),
    // configfs
    FsType(0x6265_6570),
    // devpts
    FsType(0x1cd1),
    // efivarfs
    FsType(0xde5e_81e4),
    // fusectl
    FsType(0x6573_5543),
    // mqueue
    FsType(0x1980_0202),
    // nfsd
    FsType(0x6e66_7364),
    // nsfs
    FsType(0x6e73_6673),
    // pstore
    FsType(0x6165_676c),
    // rpc_pipefs
    FsType(0x6759_6969),
    // selinuxfs
    FsType(0xf97c_ff8c),
    // smackfs
    FsType(0x4341_5d53),
    BPF_FS_MAGIC,
    CGROUP_SUPER_MAGIC,
    CGROUP2_SUPER_MAGIC,
    DEBUGFS_MAGIC,
    PROC_SUPER_MAGIC,
    SECURITYFS_MAGIC,
    SYSFS_MAGIC,
    TRACEFS_MAGIC,
];

/// Where the content of a file is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// Memory (tmpfs): the content is gone when the machine goes down.
    Memory,
    /// Nothing: a file of procfs, sysfs or a control group.
    Kernel,
    /// A disk, or another machine.
    Disk,
}

impl Medium {
    /// The medium of an open file.
    ///
    /// # Errors
    /// That of fstatfs(2).
    pub fn of(file: &File) -> io::Result<Medium> {
        let kind = fstatfs(file)?.filesystem_type();
        Ok(match kind {
            TMPFS_MAGIC | RAMFS_MAGIC => Medium::Memory,
            kind if MADE_UP.contains(&kind) => Medium::Kernel,
            _ => Medium::Disk,
        })
    }
}

mod call {
    #![allow(missing_docs, reason = "the macro takes no doc comment")]
    // `FICLONE` of include/uapi/linux/fs.h.
    nix::ioctl_write_int!(ficlone, 0x94, 9);
}

/// A file without a name in the folder `beside` that has the content of `file` and shares its blocks: it takes no time
/// and no space until one of the two is changed. XFS and btrfs can do that.
///
/// # Errors
/// `EOPNOTSUPP` or `EINVAL` if the file system cannot; else those of open(2) with `O_TMPFILE`, or of the disk.
pub fn shared_copy(file: &File, beside: &Path) -> io::Result<File> {
    let copy = OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(beside)?;
    let source = u64::try_from(file.as_raw_fd()).map_err(io::Error::other)?;
    // SAFETY: both descriptors are open, and the call takes numbers only.
    unsafe { call::ficlone(copy.as_raw_fd(), source) }?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_are_told_apart() {
        let of = |path: &str| Medium::of(&File::open(path).unwrap()).unwrap();
        assert_eq!(of("/proc/self/status"), Medium::Kernel);
        assert_eq!(of("/sys/kernel"), Medium::Kernel);
        assert_eq!(of("/dev/shm"), Medium::Memory);
        assert_eq!(of(env!("CARGO_MANIFEST_DIR")), Medium::Disk);
    }
}
