//! A network namespace that belongs to a user without rights.
//!
//! To work in a network namespace, a process needs rights over the user namespace in which it was created (setns(2)).
//! One created by root needs root. So this one is created in its own user namespace, whose owner is another user: that
//! user has all rights in it (user_namespaces(7)), and none anywhere else.
//!
//! Both are created by a process that is forked for this and then ended, because a process with threads cannot enter a
//! user namespace. Between fork and end it makes only system calls, because other threads may have had locks.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid};
use rustix::thread::{CapabilitiesSecureBits, set_capabilities_secure_bits};

use super::identity::become_user;

/// A network namespace, and the user namespace that it belongs to. Both exist as long as a descriptor for them is open
/// or a process is in them.
#[derive(Debug)]
pub struct Owned {
    /// The user namespace.
    pub user: OwnedFd,
    /// The network namespace.
    pub network: OwnedFd,
    /// The id of the user, and of the user's only group.
    pub owner: u32,
}

/// Creates both, for the user and the group of that number. Needs root.
///
/// # Errors
/// When the kernel refuses a step: user namespaces may be switched off (`user.max_user_namespaces`).
pub fn owned_by(owner: u32) -> io::Result<Owned> {
    let (report, report_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: the child makes system calls on its own memory only, and never returns.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Child => child(owner, &report_end),
        ForkResult::Parent { child } => {
            drop(report_end);
            let made = open(child, owner, File::from(report));
            // The child only waits for this. ESRCH: somebody else has reaped it.
            let _ = nix::sys::signal::kill(child, Signal::SIGKILL);
            let _ = waitpid(child, None);
            made
        }
    }
}

fn open(child: Pid, owner: u32, mut report: File) -> io::Result<Owned> {
    let mut errno = [0; 4];
    report.read_exact(&mut errno)?;
    match i32::from_ne_bytes(errno) {
        0 => {}
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    // Root in the namespace is that user.
    fs::write(format!("/proc/{child}/uid_map"), format!("0 {owner} 1\n"))?;
    fs::write(format!("/proc/{child}/gid_map"), format!("0 {owner} 1\n"))?;
    let namespace = |name: &str| File::open(format!("/proc/{child}/ns/{name}")).map(OwnedFd::from);
    Ok(Owned { user: namespace("user")?, network: namespace("net")?, owner })
}

/// Reports the error of the first step that failed, or 0, and waits to be killed.
fn child(owner: u32, report: &OwnedFd) -> ! {
    let errno = enter(owner).err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EINVAL));
    let _ = nix::unistd::write(report, &errno.to_ne_bytes());
    loop {
        nix::unistd::pause();
    }
}

fn enter(owner: u32) -> io::Result<()> {
    // A change of user keeps the capabilities then. One of them is needed to create a user namespace on machines that
    // do not let everybody do so.
    set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP)?;
    become_user(owner, owner)?;
    // The creator owns the user namespace, and the next namespace belongs to it.
    unshare(CloneFlags::CLONE_NEWUSER)?;
    unshare(CloneFlags::CLONE_NEWNET)?;
    // After the change of user, which would reset this: the child must not outlive the thread that created it.
    Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?)
}

/// Makes a network namespace of a process accept every address as its own: sockets of any address can be bound and
/// connected there, and reach nobody. Needs rights over it.
///
/// # Errors
/// When it cannot be entered, or the kernel takes no route.
pub fn own_all_addresses(pid: i32) -> io::Result<()> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    // A separate thread, which stays in that namespace until it ends.
    let work = move || {
        nix::sched::setns(&namespace, CloneFlags::CLONE_NEWNET)?;
        route_all_to_loopback(libc::AF_INET)?;
        // Without IPv6, no socket of the job uses it.
        let _ = route_all_to_loopback(libc::AF_INET6);
        Ok(())
    };
    let thread = std::thread::Builder::new().spawn(work)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
}

/// `ip route add local default dev lo` (rtnetlink(7)).
fn route_all_to_loopback(family: i32) -> io::Result<()> {
    use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType};
    let socket = nix::sys::socket::socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    // struct rtmsg: family, lengths of destination and source (any), type of service, table, protocol, scope, kind,
    // flags.
    let family = u8::try_from(family).unwrap_or_default();
    let scope = if family == 2 { libc::RT_SCOPE_HOST } else { libc::RT_SCOPE_UNIVERSE };
    let mut body = vec![family, 0, 0, 0, libc::RT_TABLE_LOCAL, libc::RTPROT_BOOT, scope, libc::RTN_LOCAL, 0, 0, 0, 0];
    // struct rtattr: length, RTA_OIF; the loopback device is the first in each namespace.
    body.extend(8u16.to_ne_bytes());
    body.extend(libc::RTA_OIF.to_ne_bytes());
    body.extend(1i32.to_ne_bytes());
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE;
    let mut message = Vec::new();
    message.extend(u32::try_from(16 + body.len()).unwrap_or_default().to_ne_bytes());
    message.extend(libc::RTM_NEWROUTE.to_ne_bytes());
    message.extend(u16::try_from(flags).unwrap_or_default().to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    nix::sys::socket::sendto(socket.as_raw_fd(), &message, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut answer = [0u8; 256];
    let length = nix::sys::socket::recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    // struct nlmsghdr, then the error of struct nlmsgerr, which is 0 for none.
    let error = answer.get(16..20).filter(|_| length >= 20).and_then(|bytes| bytes.try_into().ok());
    match error.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(-error)),
        None => Err(io::Error::other("rtnetlink gave no answer")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    nix::ioctl_none_bad!(owner_namespace, nix::request_code_none!(0xb7, 1));

    #[test]
    fn the_network_belongs_to_the_user_namespace_of_that_user() {
        if !rekindle_testing::root() {
            return;
        }
        let owned = owned_by(65534).unwrap();
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
