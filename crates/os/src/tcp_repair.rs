//! TCP connections that CRIU put into the kernel's repair mode (`TCP_REPAIR`), in which they send nothing, but receive.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{MsgFlags, SockaddrStorage, connect, recv, send};

use super::{process, sockopt};

/// Ends the repair mode of these processes' connections, and returns how many there were. Connections that cannot be
/// reached are skipped.
#[must_use]
pub fn leave(tree: &[i32]) -> usize {
    let mut found = 0;
    for pid in tree {
        let Ok(pidfd) = process::open_pidfd(*pid) else { continue };
        for (number, _) in process::descriptors(*pid).filter(|(_, target)| process::socket(target).is_some()) {
            if let Ok(socket) = process::fetch_descriptor(&pidfd, number)
                && is_on(&socket)
                && switch_off(&socket).is_ok()
            {
                found += 1;
            }
        }
    }
    found
}

/// The first bytes that a connection in repair mode has received and its process has not read, up to `length` of them.
/// They stay in its queue.
///
/// # Errors
/// When it is not in repair mode, or has nothing to read.
pub fn received(socket: &OwnedFd, length: usize) -> io::Result<Vec<u8>> {
    /// `TCP_RECV_QUEUE` of linux/tcp.h: which queue recv(2) looks into.
    const RECEIVED: libc::c_int = 1;
    let before = get(socket, libc::TCP_REPAIR_QUEUE)?;
    set(socket, libc::TCP_REPAIR_QUEUE, RECEIVED)?;
    let mut queue = vec![0; length];
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let found = recv(socket.as_raw_fd(), &mut queue, flags);
    set(socket, libc::TCP_REPAIR_QUEUE, before)?;
    queue.truncate(found?);
    Ok(queue)
}

/// Writes to a connection that is not in repair mode, without waiting. Where its queue has no room for all of it, as it had
/// before, the queue is larger meanwhile.
///
/// # Errors
/// When it is closed, or we may not make its queue larger.
pub fn write(socket: &OwnedFd, data: &[u8]) -> io::Result<()> {
    /// `SO_BUF_LOCK` of asm-generic/socket.h: whether the kernel may change the size of the queues.
    const LOCK: libc::c_int = 72;
    let number = |name| {
        let mut value = [0; 4];
        sockopt::get(socket, libc::SOL_SOCKET, name, &mut value).map(|_| i32::from_ne_bytes(value))
    };
    let set = |name, value: i32| sockopt::set(socket, libc::SOL_SOCKET, name, &value.to_ne_bytes());
    let mut left = data;
    let mut before = None;
    while !left.is_empty() {
        match send(socket.as_raw_fd(), left, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) {
            Ok(written) => left = left.get(written..).unwrap_or_default(),
            Err(nix::Error::EAGAIN) if before.is_none() => {
                let size = number(libc::SO_SNDBUF)?;
                before = Some((size, number(LOCK)));
                // Each piece takes more than its length.
                let more = i32::try_from(left.len()).unwrap_or(i32::MAX / 4).saturating_mul(2);
                set(libc::SO_SNDBUFFORCE, size.saturating_add(more))?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    if let Some((size, lock)) = before {
        // The kernel doubles what is set (socket(7)).
        set(libc::SO_SNDBUFFORCE, size / 2)?;
        if let Ok(lock) = lock {
            set(LOCK, lock)?;
        }
    }
    Ok(())
}

/// Whether repair mode is on; getsockopt fails for every socket that is not TCP.
/// Makes a socket of TCP without a connection one whose other end has reset it: its next call fails with ECONNRESET. Nothing
/// leaves the machine: in repair mode the kernel makes a connection without the other end, and this one is to the loopback
/// device.
///
/// # Errors
/// When it has a connection or listens, is none of TCP, or we may not use the repair mode (CAP_NET_ADMIN).
pub fn reset(socket: &OwnedFd) -> io::Result<()> {
    /// Of the discard protocol: the address that is told of the reset.
    const PORT: u16 = 9;
    const CLOSED: u8 = 7;
    /// `TCP_REPAIR_OFF_NO_WP` of linux/tcp.h: without a probe of the other end.
    const OFF: libc::c_int = -1;
    let mut state = [0; 8];
    sockopt::get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut state)?;
    if state.first() != Some(&CLOSED) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut family = [0; 4];
    sockopt::get(socket, libc::SOL_SOCKET, libc::SO_DOMAIN, &mut family)?;
    let loopback: IpAddr = match i32::from_ne_bytes(family) {
        libc::AF_INET => Ipv4Addr::LOCALHOST.into(),
        _ => Ipv6Addr::LOCALHOST.into(),
    };
    // The repair mode changes it.
    let mut reuse = [0; 4];
    sockopt::get(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, &mut reuse)?;
    set(socket, libc::TCP_REPAIR, 1)?;
    let connected = connect(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(loopback, PORT)));
    set(socket, libc::TCP_REPAIR, OFF)?;
    sockopt::set(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, &reuse)?;
    connected?;
    disconnect(socket)
}

/// The kernel takes a connection away that is established as if it had been reset.
fn disconnect(socket: &OwnedFd) -> io::Result<()> {
    // SAFETY: a struct of numbers, for which zeros are valid; AF_UNSPEC is 0.
    let nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
    let length = libc::socklen_t::try_from(size_of_val(&nowhere)).map_err(io::Error::other)?;
    // SAFETY: the address is valid and as long as `length` says.
    match unsafe { libc::connect(socket.as_raw_fd(), &raw const nowhere, length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn is_on(socket: &OwnedFd) -> bool {
    get(socket, libc::TCP_REPAIR).is_ok_and(|value| value != 0)
}

fn switch_off(socket: &OwnedFd) -> io::Result<()> {
    set(socket, libc::TCP_REPAIR, 0)
}

fn get(socket: &OwnedFd, option: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut length: libc::socklen_t = 4;
    let (fd, level) = (socket.as_raw_fd(), libc::IPPROTO_TCP);
    // SAFETY: value and length are valid, and length is the value's.
    let result = unsafe { libc::getsockopt(fd, level, option, (&raw mut value).cast(), &raw mut length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

fn set(socket: &OwnedFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let (fd, level) = (socket.as_raw_fd(), libc::IPPROTO_TCP);
    // SAFETY: the value is valid, of 4 bytes.
    let result = unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), 4) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_socket_without_a_connection_is_as_one_that_was_reset() {
        use nix::sys::socket::{AddressFamily, SockFlag, SockType, shutdown};
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP: only root can use the repair mode");
            return;
        }
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let made = || nix::sys::socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
            let (new, shut) = (made(), made());
            let _ = shutdown(shut.as_raw_fd(), nix::sys::socket::Shutdown::Both);
            sockopt::set(&new, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1_i32.to_ne_bytes()).unwrap();
            let mut stream = TcpStream::from(shut.try_clone().unwrap());
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "as CRIU leaves a connection that it closes");
            for (socket, reuses) in [(new, 1), (shut, 0)] {
                reset(&socket).unwrap();
                let mut reuse = [0; 4];
                sockopt::get(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, &mut reuse).unwrap();
                assert_eq!(i32::from_ne_bytes(reuse), reuses);
                let mut stream = TcpStream::from(socket);
                let error = stream.read(&mut [0]).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET), "{error}");
                assert!(stream.peer_addr().is_err());
                assert_eq!(stream.read(&mut [0]).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(reset(&OwnedFd::from(listener)).is_err());
    }

    /// One test counts the connections of this process that are in repair mode.
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn what_arrives_in_repair_mode_is_seen_and_stays() {
        if !rekindle_testing::root() {
            return;
        }
        let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        server.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        client.write_all(b"early ").unwrap();
        server.peek(&mut [0; 6]).unwrap();
        let socket = OwnedFd::from(server.try_clone().unwrap());
        assert!(received(&socket, 6).is_err(), "it is not in repair mode");
        set(&socket, libc::TCP_REPAIR, 1).unwrap();
        // As CRIU leaves it.
        set(&socket, libc::TCP_REPAIR_QUEUE, 2).unwrap();
        client.write_all(b"late").unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while received(&socket, 20).unwrap().len() < 10 && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(received(&socket, 20).unwrap(), b"early late");
        assert_eq!(received(&socket, 8).unwrap(), b"early la");
        assert_eq!(get(&socket, libc::TCP_REPAIR_QUEUE).unwrap(), 2);
        switch_off(&socket).unwrap();
        let mut heard = [0; 10];
        server.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"early late");
    }

    #[test]
    fn a_connection_in_repair_goes_on() {
        if !rekindle_testing::root() {
            return;
        }
        let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let on: libc::c_int = 1;
        let (level, option) = (libc::IPPROTO_TCP, libc::TCP_REPAIR);
        // SAFETY: the value is valid, of 4 bytes.
        let result = unsafe { libc::setsockopt(client.as_raw_fd(), level, option, (&raw const on).cast(), 4) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let own = [std::process::id().cast_signed()];
        // Other tests of this process may have connections, but none in repair at the same time.
        assert_eq!(leave(&own), 1);
        assert_eq!(leave(&own), 0);
        client.write_all(b"on").unwrap();
        server.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        let mut heard = [0; 2];
        server.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"on");
    }
}
