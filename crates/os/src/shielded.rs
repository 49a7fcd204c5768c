//! A folder that others can change, for a program that opens what is in it by name.
//!
//! [`Beneath`](super::beneath::Beneath) is for our own code. A program such as CRIU, which creates and opens files in a
//! folder as root, gets a mount of that folder instead, in which the kernel follows no symbolic link, opens no device
//! and runs no program. The mount is in no mount namespace: it is passed on as a descriptor, and is gone with the last
//! one.
//!
//! Hard links are not links to the kernel: who can make one there can have a file of the same file system overwritten.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `struct mount_attr` (linux/mount.h).
#[repr(C)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

const OPEN_TREE_CLONE: libc::c_uint = 1;
const OPEN_TREE_CLOEXEC: libc::c_uint = libc::O_CLOEXEC.cast_unsigned();
const MOUNT_ATTR_NOSUID: u64 = 0x2;
const MOUNT_ATTR_NODEV: u64 = 0x4;
const MOUNT_ATTR_NOEXEC: u64 = 0x8;
const MOUNT_ATTR_NOSYMFOLLOW: u64 = 0x20_0000;

/// Such a mount of this folder.
///
/// # Errors
/// `ENOSYS` before Linux 5.12; `EPERM` without CAP_SYS_ADMIN over the mount namespace; `EINVAL` where the folder's mount
/// cannot be copied.
pub fn shielded(folder: &impl AsFd) -> io::Result<OwnedFd> {
    let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH.cast_unsigned();
    // SAFETY: an open descriptor, an empty C string, and a number.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, folder.as_fd().as_raw_fd(), c"".as_ptr(), flags) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just given us this descriptor.
    let mount = unsafe { OwnedFd::from_raw_fd(fd) };
    let set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC | MOUNT_ATTR_NOSYMFOLLOW;
    let attributes = Attributes { set, clear: 0, propagation: 0, userns_fd: 0 };
    let size = size_of::<Attributes>();
    // SAFETY: an open descriptor, an empty C string, and a structure of the size that is given.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size,
        )
    };
    if answer == 0 { Ok(mount) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::path::PathBuf;

    use nix::sys::stat::{Mode, SFlag, makedev, mknod};

    #[test]
    fn nothing_in_it_leads_elsewhere() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (inside, victim) = (dir.path().join("inside"), dir.path().join("victim"));
        fs::create_dir(&inside).unwrap();
        fs::write(&victim, "whole").unwrap();
        std::os::unix::fs::symlink(&victim, inside.join("link")).unwrap();
        mknod(&inside.join("zero"), SFlag::S_IFCHR, Mode::S_IRUSR, makedev(1, 5)).unwrap();
        let mount = shielded(&File::open(&inside).unwrap()).unwrap();
        let through = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
        fs::write(through.join("new"), "content").unwrap();
        assert_eq!(fs::read_to_string(inside.join("new")).unwrap(), "content", "it is the same folder");
        let written = fs::write(through.join("link"), "overwritten").unwrap_err();
        assert_eq!(written.raw_os_error(), Some(libc::ELOOP));
        assert_eq!(File::open(through.join("zero")).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(fs::read_to_string(&victim).unwrap(), "whole");
        // Without the mount the link is followed.
        fs::write(inside.join("link"), "overwritten").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "overwritten");
        drop(mount);
        fs::remove_dir_all(&inside).unwrap();
    }
}
