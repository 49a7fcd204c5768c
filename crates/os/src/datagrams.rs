//! Datagrams that wait in a UNIX socket, with the address of their senders.
#![allow(unsafe_code, reason = "calls of the kernel; each block says why it is sound")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, getsockopt, send, sendto, socket, sockopt,
};

/// More in one socket are not read.
const MOST: usize = 10_000;

/// A datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datagram {
    /// The address of its sender: a path, or a zero byte and a name; empty if it has none.
    pub sender: Vec<u8>,
    /// Its content.
    pub data: Vec<u8>,
}

/// The datagrams that wait in a socket, the next one first. They stay there. Nobody else may read from it meanwhile.
///
/// # Errors
/// When this is no UNIX socket, or too many wait.
pub fn waiting(socket: &OwnedFd) -> io::Result<Vec<Datagram>> {
    let before = peek_offset(socket)?;
    // From the first one on, each call finds the next.
    set_peek_offset(socket, 0)?;
    let found = read(socket, libc::MSG_PEEK);
    set_peek_offset(socket, before)?;
    found
}

/// The same, and takes them out of it.
///
/// # Errors
/// As [`waiting`].
pub fn take(socket: &OwnedFd) -> io::Result<Vec<Datagram>> {
    read(socket, 0)
}

fn read(socket: &OwnedFd, flags: libc::c_int) -> io::Result<Vec<Datagram>> {
    // A datagram is not longer than the buffer of its sender, which is not known.
    let mut buffer = vec![0; 1 << 20];
    let mut found = Vec::new();
    while let Some((length, sender)) = next(socket, flags, &mut buffer)? {
        let Some(data) = buffer.get(..length).filter(|_| found.len() < MOST) else {
            return Err(io::ErrorKind::FileTooLarge.into());
        };
        found.push(Datagram { sender, data: data.to_vec() });
    }
    Ok(found)
}

/// The length of the next one and its sender; `None` if there is none. nix takes an address without a length for a fault.
fn next(socket: &OwnedFd, flags: libc::c_int, buffer: &mut [u8]) -> io::Result<Option<(usize, Vec<u8>)>> {
    const PATH: usize = std::mem::offset_of!(libc::sockaddr_un, sun_path);
    // SAFETY: it is made of numbers.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let mut size = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    let (into, at) = (buffer.as_mut_ptr().cast(), (&raw mut address).cast());
    // SAFETY: the buffer has this length, and the address this size.
    let length = unsafe { libc::recvfrom(socket.as_raw_fd(), into, buffer.len(), flags, at, &raw mut size) };
    let Ok(length) = usize::try_from(length) else {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
    };
    let size = usize::try_from(size).map_err(io::Error::other)?.saturating_sub(PATH);
    let mut name: Vec<u8> = address.sun_path.iter().take(size).map(|byte| byte.cast_unsigned()).collect();
    if name.first().is_some_and(|first| *first != 0) {
        // Zeros may follow a path.
        name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
    }
    Ok(Some((length, name)))
}

/// Sends a datagram to a path or, after a zero byte, an abstract name; without one to the socket that the sender is connected to.
///
/// # Errors
/// Those of send(2); EAGAIN where it would wait.
pub fn put(sender: &OwnedFd, to: Option<&[u8]>, data: &[u8]) -> io::Result<()> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    match to {
        None => send(sender.as_raw_fd(), data, flags)?,
        Some([0, name @ ..]) => sendto(sender.as_raw_fd(), data, &UnixAddr::new_abstract(name)?, flags)?,
        Some(path) => sendto(sender.as_raw_fd(), data, &UnixAddr::new(path)?, flags)?,
    };
    Ok(())
}

/// A socket without an address, in the network namespace of a process.
///
/// # Errors
/// When the namespace cannot be entered.
pub fn nameless(pid: i32) -> io::Result<OwnedFd> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    // A separate thread, which stays in that namespace until it ends. The socket stays there, too.
    let make = move || {
        setns(&namespace, CloneFlags::CLONE_NEWNET)?;
        Ok(socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?)
    };
    let thread = std::thread::Builder::new().spawn(make)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
}

/// Whether this is a UNIX socket for datagrams.
#[must_use]
pub fn is_one(socket: &OwnedFd) -> bool {
    getsockopt(socket, sockopt::SockType).is_ok_and(|kind| kind == SockType::Datagram) && peek_offset(socket).is_ok()
}

/// -1 if the socket is not read so. Only UNIX sockets have it (before Linux 4.16), and those of UDP.
fn peek_offset(socket: &OwnedFd) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut length: libc::socklen_t = 4;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PEEK_OFF);
    // SAFETY: value and length are valid, and length is the value's.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

fn set_peek_offset(socket: &OwnedFd, value: libc::c_int) -> io::Result<()> {
    let (level, option) = (libc::SOL_SOCKET, libc::SO_PEEK_OFF);
    // SAFETY: the value is valid, of 4 bytes.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), 4) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn datagrams_are_seen_with_their_senders_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let server = UnixDatagram::bind(path("server")).unwrap();
        let client = UnixDatagram::bind(path("client")).unwrap();
        client.send_to(b"one", path("server")).unwrap();
        client.send_to(b"", path("server")).unwrap();
        UnixDatagram::unbound().unwrap().send_to(b"three", path("server")).unwrap();
        let server = OwnedFd::from(server);
        assert!(is_one(&server));
        let bytes = |name: &str| path(name).as_os_str().as_bytes().to_vec();
        let datagram = |sender: &[u8], data: &[u8]| Datagram { sender: sender.into(), data: data.into() };
        let all = [datagram(&bytes("client"), b"one"), datagram(&bytes("client"), b""), datagram(b"", b"three")];
        assert_eq!(waiting(&server).unwrap(), all);
        assert_eq!(peek_offset(&server).unwrap(), -1);
        assert_eq!(take(&server).unwrap(), all);
        assert_eq!(waiting(&server).unwrap(), []);
        put(&OwnedFd::from(client), Some(&bytes("server")), b"four").unwrap();
        assert_eq!(take(&server).unwrap(), [datagram(&bytes("client"), b"four")]);
    }
}
