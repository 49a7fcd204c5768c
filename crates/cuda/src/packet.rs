//! Packets with at most one descriptor, on a socket of the type SEQPACKET.
#![allow(unsafe_code, reason = "descriptors that the kernel has just made; each block says why it is sound")]

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};

pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let rights = descriptor.map(|descriptor| [descriptor.as_raw_fd()]);
    let control: Vec<_> = rights.iter().map(|rights| ControlMessage::ScmRights(rights)).collect();
    let parts = [IoSlice::new(bytes)];
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &parts, &control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// The length of the packet, 0 at the end, and its descriptor.
pub(crate) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; 1]);
    let mut parts = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            // SAFETY: the kernel has just made them, for us alone.
            descriptors.extend(numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }));
        }
    }
    Ok((message.bytes, descriptors.pop()))
}
