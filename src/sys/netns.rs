//! A network namespace that belongs to a user without rights.
//!
//! Whoever is to work in a network namespace needs rights over the user namespace that it was made in (setns(2)). One that is
//! made by root takes root. So this one is made in a user namespace of its own, whose owner is another user: that user has
//! all rights in it (user_namespaces(7)), and none anywhere else.
//!
//! Both are made by a process that is forked for this, and ended: a process with threads can not enter a user namespace.
//! Between fork and end it makes system calls only, because other threads may have held locks.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::fcntl::OFlag;
use nix::sys::signal::Signal;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid};

/// `SECBIT_NO_SETUID_FIXUP` of linux/securebits.h: to become another user takes no capability away. One is needed to make a
/// user namespace where the machine does not let everybody.
const NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;

/// A network namespace, and the user namespace that it belongs to. Both last as long as somebody has them open or is in them.
#[derive(Debug)]
pub struct Owned {
    /// The user namespace.
    pub user: OwnedFd,
    /// The network namespace.
    pub network: OwnedFd,
}

/// Makes both, for that user and group. Needs root.
///
/// # Errors
/// When the kernel refuses a step: user namespaces may be switched off (`user.max_user_namespaces`).
pub fn owned_by(user: u32, group: u32) -> io::Result<Owned> {
    let (report, report_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: the child makes system calls on its own memory only, and never returns.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Child => child(user, group, report_end.as_raw_fd()),
        ForkResult::Parent { child } => {
            drop(report_end);
            let made = open(child, user, group, File::from(report));
            // It only waits for this. Not found: somebody else has reaped it.
            let _ = nix::sys::signal::kill(child, Signal::SIGKILL);
            let _ = waitpid(child, None);
            made
        }
    }
}

fn open(child: Pid, user: u32, group: u32, mut report: File) -> io::Result<Owned> {
    let mut errno = [0; 4];
    report.read_exact(&mut errno)?;
    match i32::from_ne_bytes(errno) {
        0 => {}
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    // Root in there is that user.
    fs::write(format!("/proc/{child}/uid_map"), format!("0 {user} 1\n"))?;
    fs::write(format!("/proc/{child}/gid_map"), format!("0 {group} 1\n"))?;
    let namespace = |name: &str| File::open(format!("/proc/{child}/ns/{name}")).map(OwnedFd::from);
    Ok(Owned { user: namespace("user")?, network: namespace("net")? })
}

/// Reports the error of the first step that failed, or 0, and waits to be killed.
fn child(user: u32, group: u32, report: libc::c_int) -> ! {
    let errno = enter(user, group).err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EINVAL));
    let bytes = errno.to_ne_bytes();
    // SAFETY: `bytes` is valid for its length.
    unsafe { libc::write(report, bytes.as_ptr().cast(), bytes.len()) };
    loop {
        // SAFETY: no memory is involved.
        unsafe { libc::pause() };
    }
}

fn enter(user: u32, group: u32) -> io::Result<()> {
    let check = |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: a system call on numbers.
    check(unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_SECUREBITS, NO_SETUID_FIXUP, 0, 0, 0) })?;
    // The kernel's own calls: those of the C library want to tell threads that this copy does not have.
    // SAFETY: no groups are read.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) })?;
    // SAFETY: a system call on numbers.
    check(unsafe { libc::syscall(libc::SYS_setresgid, group, group, group) })?;
    // SAFETY: a system call on numbers.
    check(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) })?;
    // Its owner is whoever makes it; the next one belongs to it.
    // SAFETY: a system call on numbers.
    check(unsafe { libc::syscall(libc::SYS_unshare, libc::CLONE_NEWUSER) })?;
    // SAFETY: a system call on numbers.
    check(unsafe { libc::syscall(libc::SYS_unshare, libc::CLONE_NEWNET) })?;
    // After the change of user, which takes it back: no such process outlives the thread that made it.
    // SAFETY: a system call on numbers.
    check(unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    nix::ioctl_none_bad!(owner_namespace, nix::request_code_none!(0xb7, 1));

    #[test]
    fn the_network_belongs_to_the_user_namespace_of_that_user() {
        if !crate::test_gate::root() {
            return;
        }
        let owned = owned_by(65534, 65533).unwrap();
        // SAFETY: an ioctl without an argument (ioctl_nsfs(2)), on an open namespace.
        let owner = unsafe { owner_namespace(owned.network.as_raw_fd()) }.unwrap();
        // SAFETY: the ioctl answers a new descriptor, which nobody else owns.
        let owner = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(owner) };
        let inode = |fd: &OwnedFd| File::from(fd.try_clone().unwrap()).metadata().unwrap().ino();
        assert_eq!(inode(&owner), inode(&owned.user));
        assert_ne!(inode(&owner), fs::metadata("/proc/self/ns/user").unwrap().ino());
        let mut uid: libc::uid_t = 0;
        // SAFETY: NS_GET_OWNER_UID (ioctl_nsfs(2)) writes a uid_t.
        let asked = unsafe { libc::ioctl(owned.user.as_raw_fd(), nix::request_code_none!(0xb7, 4), &raw mut uid) };
        assert_eq!((asked, uid), (0, 65534));
    }
}
