//! What waits in sockets and is lost in an image, or taken from the running job when CRIU (4.2) looks at it.
//!
//! - Urgent data (`MSG_OOB`): of a connection of TCP CRIU reads up to the urgent byte, and loses it and all behind it. Of a UNIX
//!   socket it takes it for ordinary data.
//! - An error of a UNIX socket, such as ECONNRESET after the other end was closed with data that it had not read: CRIU's look takes
//!   it out of the socket, so the running job would not see it any more.
//!
//! Most of it is there for a moment only, so a snapshot waits a little before it is refused. Both are looked for again when all tasks
//! stand still, before CRIU looks at them.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::unrestorable::Unrestorable;
use rekindle_os::{attributes, process, sockopt, unix_diag};

/// How long to wait for a process to take what waits.
const PATIENCE: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(5);
/// `SIOCATMARK` of asm-generic/sockios.h: whether the next byte of a connection is the urgent one.
const AT_MARK: libc::Ioctl = 0x8905;

/// Waits a little until these processes, which must be running, have taken what waits. Refuses what stays.
pub(crate) fn let_pass(tree: &[i32], cancelled: &dyn Fn() -> bool) -> Result<(), Unrestorable> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match check(tree) {
            Err(_) if Instant::now() < deadline && !cancelled() => std::thread::sleep(PAUSE),
            found => return found,
        }
    }
}

/// Refuses what waits in the sockets of these processes. The tables of the kernel (/proc/net/tcp) would take longer than the sockets of
/// most jobs: reading both takes 16 ms where they have 262,144 places, also without any connection.
pub(crate) fn check(tree: &[i32]) -> Result<(), Unrestorable> {
    let Some(root) = tree.first() else { return Ok(()) };
    let mut unix = None;
    for pid in tree {
        let sockets =
            process::descriptors(*pid).filter_map(|(number, target)| Some((number, process::socket(&target)?)));
        let mut sockets = sockets.peekable();
        if sockets.peek().is_none() {
            continue;
        }
        let unix = unix.get_or_insert_with(|| of_unix(*root));
        let Ok(process) = process::open_pidfd(*pid) else { continue };
        for (number, inode) in sockets {
            let is_unix = unix.get(&inode).copied();
            if is_unix != Some(Unix::Quiet)
                && let Ok(socket) = process::fetch_descriptor(&process, number)
            {
                check_socket(*pid, number, &socket, is_unix.is_some())?;
            }
        }
    }
    Ok(())
}

/// What a UNIX socket can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unix {
    /// Data, or an error because it has no other end.
    CanHave,
    Quiet,
}

fn of_unix(root: i32) -> HashMap<u64, Unix> {
    let all = unix_diag::of(root).unwrap_or_default().into_iter();
    all.map(|socket| {
        let has_end = socket.listens || socket.peer != 0 || socket.kind == libc::SOCK_DGRAM;
        let is_quiet = socket.listens || (socket.received == 0 && has_end);
        (u64::from(socket.inode), if is_quiet { Unix::Quiet } else { Unix::CanHave })
    })
    .collect()
}

fn is_tcp(socket: &OwnedFd) -> bool {
    let is = |name, wanted: &[i32]| {
        let mut value = [0; 4];
        let got = sockopt::get(socket, libc::SOL_SOCKET, name, &mut value);
        got.is_ok() && wanted.contains(&i32::from_ne_bytes(value))
    };
    is(libc::SO_PROTOCOL, &[libc::IPPROTO_TCP]) && is(libc::SO_DOMAIN, &[libc::AF_INET, libc::AF_INET6])
}

fn check_socket(pid: i32, number: i32, socket: &OwnedFd, is_unix: bool) -> Result<(), Unrestorable> {
    // Of others POLLPRI can mean something else (SO_SELECT_ERR_QUEUE).
    if !is_unix && !is_tcp(socket) {
        return Ok(());
    }
    let mut asked = [PollFd::new(socket.as_fd(), PollFlags::POLLPRI)];
    let found = poll(&mut asked, PollTimeout::ZERO).ok().and_then(|_| asked[0].revents()).unwrap_or(PollFlags::empty());
    if is_unix && found.contains(PollFlags::POLLERR) {
        return Err(Unrestorable::of(
            pid,
            format!(
                "has an error that it has not seen yet on its UNIX socket (descriptor {number}): the other end was closed with data \
                 that it had not read (ECONNRESET), and CRIU would take the error away from the running job"
            ),
            "let it read from the socket or close it, or let the other end read all before it closes. Snapshots continue then",
        ));
    }
    if found.contains(PollFlags::POLLPRI) || attributes::length(socket, AT_MARK).is_ok_and(|is_there| is_there != 0) {
        return Err(Unrestorable::of(
            pid,
            format!(
                "has urgent data that it has not read on its socket (descriptor {number}; MSG_OOB of send(2)), and CRIU would lose \
                 the urgent byte, or what follows it"
            ),
            "let it read the data. Snapshots continue then",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use nix::sys::socket::{MsgFlags, send};

    use super::*;

    fn own() -> i32 {
        std::process::id().cast_signed()
    }

    fn said(socket: &impl AsFd, is_unix: bool) -> String {
        let socket = socket.as_fd().try_clone_to_owned().unwrap();
        check_socket(own(), 7, &socket, is_unix).map_or_else(|found| found.to_string(), |()| String::new())
    }

    #[test]
    fn urgent_data_is_seen_until_it_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        sender.write_all(b"abc").unwrap();
        assert_eq!(said(&receiver, false), "");
        send(sender.as_raw_fd(), b"X", MsgFlags::MSG_OOB).unwrap();
        sender.write_all(b"def").unwrap();
        assert!(said(&receiver, false).contains("has urgent data that it has not read on its socket (descriptor 7;"));
        let mut all = [0; 6];
        receiver.read_exact(&mut all).unwrap();
        assert_eq!((&all, said(&receiver, false).as_str()), (b"abcdef", ""));
    }

    #[test]
    fn an_error_of_a_unix_socket_is_seen_and_stays() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        other.write_all(b"unread").unwrap();
        one.write_all(b"data").unwrap();
        assert_eq!(said(&other, true), "");
        drop(one);
        for _ in 0..2 {
            assert!(
                said(&other, true).contains("has an error that it has not seen yet on its UNIX socket (descriptor 7)")
            );
        }
        let mut all = Vec::new();
        let error = other.read_to_end(&mut all).unwrap_err();
        assert_eq!(
            (error.kind(), all.as_slice(), said(&other, true).as_str()),
            (std::io::ErrorKind::ConnectionReset, &b"data"[..], "")
        );
    }
}
