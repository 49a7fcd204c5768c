//! The UNIX sockets of a network namespace, with what waits in them, by the kernel's sock_diag(7).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{MsgFlags, send};

use super::sock_diag::{
    HEADER, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, SOCK_DIAG_BY_FAMILY, each, error, half, open, word,
};

/// A UNIX socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnixSocket {
    /// Its inode.
    pub inode: u32,
    /// Its type: SOCK_STREAM, SOCK_DGRAM or SOCK_SEQPACKET.
    pub kind: i32,
    /// Whether it accepts connections.
    pub listens: bool,
    /// The path that it is bound to, which a zero byte ends, or with a zero byte at the beginning an abstract name; empty without one.
    pub name: Vec<u8>,
    /// The device and the inode, as far as 32 bits, of the file that it is bound to.
    pub file: Option<(u64, u32)>,
    /// The inode of the socket that it is connected to; 0 without one.
    pub peer: u32,
    /// Of one that accepts connections: the inodes of the sockets that wait; 0 for one that was closed.
    pub waiting: Vec<u32>,
    /// Bytes that it can read; of one for datagrams, those of the first one. Of one that accepts connections: how many wait.
    pub received: u32,
    /// Bytes that it has sent, and that nobody has read, with what the kernel needs for them.
    pub sent: u32,
}

/// `udiag_show` of linux/unix_diag.h: names, files, peers, sockets that wait to be accepted, lengths of queues.
const SHOW: u32 = 1 | 2 | 4 | 8 | 16;
/// Sizes of linux/unix_diag.h.
const REQUEST: usize = HEADER + 24;
const MESSAGE: usize = 16;
/// `TCP_LISTEN` of the kernel's `tcp_states.h`.
const LISTEN: u8 = 10;
/// Attributes.
const NAME: u16 = 0;
const FILE: u16 = 1;
const PEER: u16 = 2;
const ICONS: u16 = 3;
const LENGTHS: u16 = 4;

/// The sockets of the network namespace of a process.
///
/// # Errors
/// When the kernel does not support this (CONFIG_UNIX_DIAG), or the namespace cannot be entered.
pub fn of(pid: i32) -> io::Result<Vec<UnixSocket>> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    // A separate thread, which stays in that namespace until it ends. The socket stays there, too.
    let enter = move || {
        setns(&namespace, CloneFlags::CLONE_NEWNET)?;
        open()
    };
    let thread = std::thread::Builder::new().spawn(enter)?;
    let socket = thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))?;
    list(&socket)
}

fn list(socket: &OwnedFd) -> io::Result<Vec<UnixSocket>> {
    let mut request = Vec::with_capacity(REQUEST);
    request.extend(u32::try_from(REQUEST).map_err(io::Error::other)?.to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    // Sequence number and port, both 0: the socket has one request.
    request.extend([0; 8]);
    request.extend([u8::try_from(libc::AF_UNIX).map_err(io::Error::other)?, 0, 0, 0]);
    // All states, any inode, what is shown, and a cookie that is not used.
    for word in [u32::MAX, 0, SHOW, 0, 0] {
        request.extend(word.to_ne_bytes());
    }
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    let mut found = Vec::new();
    let mut more = true;
    while more {
        more = each(socket, |kind, message| match kind {
            NLMSG_DONE => Ok(false),
            NLMSG_ERROR => error(message).map(|()| false),
            _ => {
                found.extend(read(message));
                Ok(true)
            }
        })?;
    }
    Ok(found)
}

/// Parses `struct unix_diag_msg` with its attributes.
fn read(message: &[u8]) -> Option<UnixSocket> {
    let body = message.get(HEADER..)?;
    let mut socket = UnixSocket {
        inode: word(body, 4)?,
        kind: i32::from(*body.get(1)?),
        listens: *body.get(2)? == LISTEN,
        ..UnixSocket::default()
    };
    let mut left = body.get(MESSAGE..)?;
    while let (Some(length), Some(kind)) = (half(left, 0), half(left, 2)) {
        let Some(content) = left.get(4..usize::from(length)) else { break };
        match kind {
            NAME => socket.name = content.to_vec(),
            FILE => socket.file = word(content, 4).map(device).zip(word(content, 0)),
            PEER => socket.peer = word(content, 0)?,
            ICONS => socket.waiting = content.chunks_exact(4).filter_map(|inode| word(inode, 0)).collect(),
            LENGTHS => (socket.received, socket.sent) = (word(content, 0)?, word(content, 4)?),
            _ => {}
        }
        left = left.get(usize::from(length).next_multiple_of(4)..).unwrap_or_default();
    }
    Some(socket)
}

/// The kernel's number of a device (`MKDEV` of linux/kdev_t.h) as stat(2) has it.
fn device(number: u32) -> u64 {
    nix::sys::stat::makedev(u64::from(number >> 20), u64::from(number & 0xf_ffff))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::linux::fs::MetadataExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn inode(socket: &impl AsRawFd) -> u32 {
        let link = format!("/proc/self/fd/{}", socket.as_raw_fd());
        u32::try_from(std::fs::metadata(link).unwrap().st_ino()).unwrap()
    }

    #[test]
    fn connections_that_wait_are_seen_with_what_they_have_sent() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let [silent, mut talks, closed] = [0; 3].map(|_| UnixStream::connect(&path).unwrap());
        talks.write_all(b"words").unwrap();
        drop(closed);
        let all = of(std::process::id().cast_signed()).unwrap();
        let find = |wanted: u32| all.iter().find(|socket| socket.inode == wanted).unwrap();
        let listening = find(inode(&listener));
        assert_eq!(
            (listening.listens, listening.name.as_slice()),
            (true, [path.as_os_str().as_bytes(), b"\0"].concat().as_slice())
        );
        let mut waiting = listening.waiting.clone();
        waiting.sort_unstable();
        let mut wanted = [0, inode(&silent), inode(&talks)];
        wanted.sort_unstable();
        assert_eq!(waiting, wanted);
        assert_eq!(find(inode(&silent)).sent, 0);
        assert!(find(inode(&talks)).sent > 0);
        let (mut one, other) = UnixStream::pair().unwrap();
        one.write_all(b"words").unwrap();
        let received = |of: &UnixStream| {
            let all = self::of(std::process::id().cast_signed()).unwrap();
            all.iter().find(|socket| socket.inode == inode(of)).map(|found| (found.kind, found.received, found.peer))
        };
        assert_eq!(received(&other), Some((libc::SOCK_STREAM, 5, inode(&one))));
        drop(one);
        assert_eq!(received(&other), Some((libc::SOCK_STREAM, 5, 0)));
    }
}
