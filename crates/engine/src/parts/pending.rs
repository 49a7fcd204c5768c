//! What waits in sockets and does not survive that CRIU (4.2) looks at it, or is lost without a word.
//!
//! - Urgent data (`MSG_OOB`): of a connection of TCP CRIU reads up to the urgent byte, and loses it and all behind it. Of a UNIX
//!   socket it takes it for ordinary data.
//! - An error of a UNIX socket, such as ECONNRESET after the other end was closed with data that it had not read: CRIU's look takes
//!   it out of the socket, so the running job would not see it any more.
//!
//! Most of it is there for a moment only, so a snapshot waits a little before it is refused. Both are looked for again when all tasks
//! stand still, before CRIU looks at them.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::unrestorable::Unrestorable;
use rekindle_os::{attributes, process, unix_diag};

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

/// Refuses what waits in the sockets of these processes.
pub(crate) fn check(tree: &[i32]) -> Result<(), Unrestorable> {
    let Some(root) = tree.first() else { return Ok(()) };
    let (unix, tcp) = (of_unix(*root), of_tcp(*root));
    // Only now, because it takes longer.
    if unix.is_empty() && tcp.is_empty() {
        return Ok(());
    }
    tree.iter().try_for_each(|pid| check_process(*pid, &unix, &tcp))
}

/// The UNIX sockets in which something can wait: with data, or without another end.
fn of_unix(root: i32) -> BTreeSet<u64> {
    let all = unix_diag::of(root).unwrap_or_default().into_iter().filter(|socket| !socket.listens);
    let can_have = all.filter(|of| of.received > 0 || (of.peer == 0 && of.kind != libc::SOCK_DGRAM));
    can_have.map(|socket| u64::from(socket.inode)).collect()
}

/// The connections of TCP with data that was not read.
fn of_tcp(root: i32) -> BTreeSet<u64> {
    let tables = ["net/tcp", "net/tcp6"].map(|table| process::text(root, table).unwrap_or_default());
    tables.iter().flat_map(|table| table.lines()).filter_map(with_data).collect()
}

/// The inode of a line of /proc/net/tcp, if there is data.
fn with_data(line: &str) -> Option<u64> {
    const LISTENS: &str = "0A";
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, received) = fields.get(4)?.split_once(':')?;
    let is_one = fields.get(3) != Some(&LISTENS) && received.bytes().any(|digit| digit != b'0');
    fields.get(9)?.parse().ok().filter(|inode| is_one && *inode != 0)
}

fn check_process(pid: i32, unix: &BTreeSet<u64>, tcp: &BTreeSet<u64>) -> Result<(), Unrestorable> {
    let is_one =
        |target: &Path| process::socket(target).is_some_and(|inode| unix.contains(&inode) || tcp.contains(&inode));
    let mut sockets = process::descriptors(pid).filter(|(_, target)| is_one(target)).peekable();
    if sockets.peek().is_none() {
        return Ok(());
    }
    let Ok(process) = process::open_pidfd(pid) else { return Ok(()) };
    sockets.try_for_each(|(number, target)| match process::fetch_descriptor(&process, number) {
        Ok(socket) => {
            let is_unix = process::socket(&target).is_some_and(|inode| unix.contains(&inode));
            check_socket(pid, number, &socket, is_unix)
        }
        Err(_) => Ok(()),
    })
}

fn check_socket(pid: i32, number: i32, socket: &OwnedFd, is_unix: bool) -> Result<(), Unrestorable> {
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
                "has urgent data that it has not read on its socket (descriptor {number}; MSG_OOB of send(2)), of which CRIU would \
                 lose the urgent byte, or what follows it"
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
        let inode = process::socket(&std::fs::read_link(format!("/proc/self/fd/{}", receiver.as_raw_fd())).unwrap());
        assert!(of_tcp(own()).contains(&inode.unwrap()));
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

    #[test]
    fn lines_with_data_are_told_from_others() {
        let line = |state: &str, received: &str, inode: u64| {
            format!(
                "   0: 0100007F:8AE2 0100007F:1F90 {state} 00000000:{received} 00:00000000 00000000     0        0 {inode} 1 0 20 4 30 10 -1"
            )
        };
        assert_eq!(with_data(&line("01", "00000007", 99)), Some(99));
        assert_eq!(with_data(&line("01", "00000000", 99)), None);
        assert_eq!(with_data(&line("0A", "00000001", 99)), None, "connections that wait");
        assert_eq!(with_data("  sl  local_address rem_address   st tx_queue rx_queue tr"), None);
    }
}
