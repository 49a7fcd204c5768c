//! TCP sockets of our network namespace that no longer belong to a process, found with the kernel's sock_diag(7).
//!
//! A connection that was closed on this side exists for a while and uses its port: a minute in TIME_WAIT, longer if the
//! other side does not answer. `SOCK_DESTROY` ends it at once (CONFIG_INET_DIAG_DESTROY, CAP_NET_ADMIN).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// How far the shutdown of a connection that was closed on this side has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The other side has not confirmed everything that was sent (FIN_WAIT1, CLOSING, LAST_ACK).
    Unconfirmed,
    /// The other side has confirmed everything (FIN_WAIT2, TIME_WAIT).
    Confirmed,
}

/// A TCP connection that belongs to no process. Connections that wait to be accepted are not included: they were not
/// closed on this side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownerless {
    /// The address of this end.
    pub local: SocketAddr,
    /// The address of the other end.
    pub remote: SocketAddr,
    /// The state of its shutdown.
    pub ending: Ending,
    family: u8,
    /// `struct inet_diag_sockid` with the kernel's cookie, which tells it from a later socket with the same addresses.
    id: [u8; ID],
}

/// Sizes of linux/netlink.h and linux/inet_diag.h.
pub(crate) const HEADER: usize = 16;
const ID: usize = 48;
const REQUEST: usize = HEADER + 8 + ID;
const MESSAGE: usize = HEADER + 4 + ID + 20;

pub(crate) const NLMSG_ERROR: u16 = 2;
pub(crate) const NLMSG_DONE: u16 = 3;
pub(crate) const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
pub(crate) const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
pub(crate) const NLM_F_DUMP: u16 = 0x300;

const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const TIME_WAIT: u8 = 6;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;
/// The states that only a connection closed on this side can have.
const CLOSED_HERE: u32 = 1 << FIN_WAIT1 | 1 << FIN_WAIT2 | 1 << TIME_WAIT | 1 << LAST_ACK | 1 << CLOSING;

/// All connections that belong to no process.
///
/// # Errors
/// When the kernel does not support TCP diagnosis, or we may not use it.
pub fn ownerless() -> io::Result<Vec<Ownerless>> {
    let socket = open()?;
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let family = u8::try_from(family).map_err(io::Error::other)?;
        ask(&socket, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, family, &[0; ID])?;
        let mut more = true;
        while more {
            more = each(&socket, |kind, message| match kind {
                NLMSG_DONE => Ok(false),
                NLMSG_ERROR => error(message).map(|()| false),
                _ => {
                    found.extend(read(message));
                    Ok(true)
                }
            })?;
        }
    }
    Ok(found)
}

/// Ends the connection now.
///
/// # Errors
/// When the kernel cannot do it (EOPNOTSUPP), or we may not. A connection that has ended by itself is not an error.
pub fn destroy(connection: &Ownerless) -> io::Result<()> {
    let socket = open()?;
    ask(&socket, SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, connection.family, &connection.id)?;
    let mut result = Ok(());
    each(&socket, |_, message| {
        result = error(message);
        Ok(false)
    })?;
    match result {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

pub(crate) fn open() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Netlink, SockType::Datagram, flags, SockProtocol::NetlinkSockDiag)?;
    // The kernel answers at once, so this time limit is never reached.
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(2))?;
    Ok(socket)
}

fn ask(socket: &OwnedFd, kind: u16, flags: u16, family: u8, id: &[u8; ID]) -> io::Result<()> {
    let tcp = u8::try_from(libc::IPPROTO_TCP).map_err(io::Error::other)?;
    let length = u32::try_from(REQUEST).map_err(io::Error::other)?;
    let mut request = Vec::with_capacity(REQUEST);
    request.extend(length.to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Sequence number and port, both 0: each socket has one request at a time.
    request.extend([0; 8]);
    request.extend([family, tcp, 0, 0]);
    request.extend(CLOSED_HERE.to_ne_bytes());
    request.extend(id);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    Ok(())
}

/// Reads the available messages; returns whether `take` wants more.
pub(crate) fn each(socket: &OwnedFd, mut take: impl FnMut(u16, &[u8]) -> io::Result<bool>) -> io::Result<bool> {
    // The kernel fills at most 32 KiB at once (`netlink_dump`).
    let mut buffer = vec![0; 64 << 10];
    let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
    let mut left = buffer.get(..length).unwrap_or_default();
    let mut more = true;
    while let (Some(size), Some(kind)) = (word(left, 0), half(left, 4)) {
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let Some(message) = left.get(..size).filter(|message| message.len() >= HEADER) else { break };
        more = take(kind, message)?;
        left = left.get(size.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(more)
}

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// `struct nlmsgerr` begins with the error as a negative number, or 0.
pub(crate) fn error(message: &[u8]) -> io::Result<()> {
    match word(message, HEADER).map(u32::cast_signed) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        None => Err(io::Error::other("netlink: an answer is truncated")),
    }
}

/// Parses `struct inet_diag_msg`; `None` for a connection that belongs to a process.
fn read(message: &[u8]) -> Option<Ownerless> {
    let body = message.get(HEADER..MESSAGE)?;
    let (family, state) = (*body.first()?, *body.get(1)?);
    let id: [u8; ID] = body.get(4..4 + ID)?.try_into().ok()?;
    let ending = match state {
        FIN_WAIT2 | TIME_WAIT => Ending::Confirmed,
        FIN_WAIT1 | LAST_ACK | CLOSING => Ending::Unconfirmed,
        _ => return None,
    };
    let inode = word(body, 4 + ID + 16)?;
    let port = |at: usize| Some(u16::from_be_bytes(id.get(at..at + 2)?.try_into().ok()?));
    let address = |at: usize| -> Option<IpAddr> {
        if i32::from(family) == libc::AF_INET {
            return Some(IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(id.get(at..at + 4)?).ok()?)));
        }
        Some(IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(id.get(at..at + 16)?).ok()?)).to_canonical())
    };
    let local = SocketAddr::new(address(4)?, port(0)?);
    let remote = SocketAddr::new(address(20)?, port(2)?);
    (inode == 0).then_some(Ownerless { local, remote, ending, family, id })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_connection_in_time_wait_is_found_and_ended_and_one_with_an_owner_is_not_seen() {
        if !rekindle_testing::root() {
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let pair = || (TcpStream::connect(at).unwrap(), listener.accept().unwrap().0);
        // By both ends: on loopback the kernel lends a port to several connections at a time.
        let of = |end: SocketAddr| {
            let is_it = |c: &Ownerless| (c.local, c.remote) == (end, at) || (c.local, c.remote) == (at, end);
            ownerless().unwrap().into_iter().find(is_it)
        };

        let (kept, mut other) = pair();
        kept.shutdown(Shutdown::Write).unwrap();
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        // FIN_WAIT2, but a process has a descriptor for it.
        assert_eq!(of(kept.local_addr().unwrap()), None);
        let waiting = TcpStream::connect(at).unwrap();
        assert_eq!(of(waiting.local_addr().unwrap()), None, "it waits to be accepted");
        drop(listener.accept().unwrap());

        let (client, server) = pair();
        let end = client.local_addr().unwrap();
        drop(client);
        // A child that another test starts has it for a moment, too: it is closed when the other end hears so.
        assert_eq!((&server).read(&mut [0]).unwrap(), 0);
        drop(server);
        let told = |found: &Ownerless| (found.local, found.remote, found.ending);
        let until = Instant::now() + Duration::from_secs(10);
        let found = loop {
            let found = of(end);
            match found {
                // A busy kernel confirms it a moment later.
                Some(found) if told(&found) == (end, at, Ending::Confirmed) => break found,
                found => assert!(Instant::now() < until, "{found:?}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        destroy(&found).unwrap();
        assert_eq!(of(end), None);
        destroy(&found).unwrap();
    }
}
