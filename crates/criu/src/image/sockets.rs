//! The TCP sockets of an image: lists them, and closes those to the outside before a restore.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use prost::encoding::encode_varint;

use super::rewrite::{rewrite, with_fields, without_number};
use super::{Error, FILES, Records, damaged};
use crate::proto::{FileEntry, InetSocketEntry};
use rekindle_os::beneath::Beneath;

/// `IPPROTO_TCP`.
const TCP: u32 = 6;
/// `TCP_LISTEN` of the kernel's `tcp_states.h`.
const LISTEN: u32 = 10;

/// The field of `inet_sk_entry` that says how it was shut down.
const SHUTDOWN: u64 = 19;

/// A TCP socket that a restore creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpSocket {
    /// It listens for connections.
    Listening(SocketAddr),
    /// It is connected.
    Connected {
        /// The address of this end.
        local: SocketAddr,
        /// The address of the other end.
        remote: SocketAddr,
    },
}

impl TcpSocket {
    pub(super) fn of(entry: &FileEntry) -> Option<TcpSocket> {
        let socket = entry.inet.as_ref().filter(|socket| socket.protocol == TCP)?;
        let end = |words: &[u32], port: u32| Some(SocketAddr::new(address(words)?, u16::try_from(port).ok()?));
        let local = end(&socket.source, socket.source_port)?;
        match socket {
            InetSocketEntry { state: LISTEN, .. } => Some(TcpSocket::Listening(local)),
            InetSocketEntry { destination_port: 0, .. } => None,
            InetSocketEntry { destination, destination_port, .. } => {
                Some(TcpSocket::Connected { local, remote: end(destination, *destination_port)? })
            }
        }
    }
}

/// An address from words in network byte order, as the kernel stores them. An IPv4-mapped IPv6 address becomes the IPv4
/// address.
fn address(words: &[u32]) -> Option<IpAddr> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    if let Ok(bytes) = <[u8; 16]>::try_from(bytes.as_slice()) {
        return Some(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical());
    }
    <[u8; 4]>::try_from(bytes.as_slice()).ok().map(|bytes| IpAddr::V4(Ipv4Addr::from(bytes)))
}

/// The TCP sockets of files.img.
///
/// # Errors
/// When it is missing or damaged.
pub fn tcp_sockets(dir: &Beneath) -> Result<Vec<TcpSocket>, Error> {
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    Ok(entries.iter().filter_map(TcpSocket::of).collect())
}

/// Disconnects the sockets whose other end is not in the image, as CRIU's `tcp_close` does with all sockets, and
/// returns how many. Keeps connections between two addresses that `kept` accepts: their other end is in another
/// image. The job sees a closed connection as reset: reads and writes fail.
///
/// CRIU (4.2) can only keep all connections or close all.
///
/// # Errors
/// When files.img is missing or damaged, or cannot be written.
pub fn close_connections_outwards(dir: &Beneath, kept: &dyn Fn(IpAddr) -> bool) -> Result<usize, Error> {
    let all = tcp_sockets(dir)?;
    let known: HashSet<(SocketAddr, SocketAddr)> = all.iter().filter_map(ends).collect();
    let inside = |local: SocketAddr, remote: SocketAddr| kept(local.ip()) && kept(remote.ip());
    close_connections(dir, &|local, remote| !known.contains(&(remote, local)) && !inside(local, remote))
}

/// Disconnects the sockets with these ends, and returns how many. The job sees a closed connection as reset.
///
/// # Errors
/// When files.img is missing or damaged, or cannot be written.
pub fn close_connections(dir: &Beneath, closes: &dyn Fn(SocketAddr, SocketAddr) -> bool) -> Result<usize, Error> {
    let path = dir.join("files.img");
    let mut closed = 0;
    rewrite(&path, FILES, |entry: FileEntry, record| {
        let ends = TcpSocket::of(&entry).as_ref().and_then(ends);
        if !ends.is_some_and(|(local, remote)| closes(local, remote)) {
            return Ok(None);
        }
        closed += 1;
        without_connection(record).map(Some).ok_or_else(|| damaged(&path, format!("the record of file {}", entry.id)))
    })?;
    Ok(closed)
}

pub(super) fn ends(socket: &TcpSocket) -> Option<(SocketAddr, SocketAddr)> {
    match socket {
        TcpSocket::Connected { local, remote } => Some((*local, *remote)),
        TcpSocket::Listening(_) => None,
    }
}

/// Which directions of a connection are open.
#[derive(Debug, Clone, Copy)]
pub(super) enum Open {
    /// The other end was closed for writing.
    OtherEndClosed,
    /// Both. `again`: the other end is closed for writing again later, so that nothing of it stays.
    Both { again: bool },
}

/// Makes the sockets with these inodes open for writing.
pub(super) fn open_again(dir: &Beneath, open: &HashMap<u32, Open>) -> Result<(), Error> {
    const ESTABLISHED: u32 = 1;
    const CLOSE_WAIT: u32 = 8;
    /// Of what was shut down: reading. The program itself can have done so, too.
    const READ: u32 = 1;
    let path = dir.join("files.img");
    rewrite(&path, FILES, |entry: FileEntry, record| {
        let found = entry.inet.as_ref().and_then(|inet| Some((inet.shutdown.unwrap_or(0), open.get(&inet.inode)?)));
        let Some((shut, open)) = found else { return Ok(None) };
        let (state, shut) = match open {
            Open::OtherEndClosed => (CLOSE_WAIT, READ),
            Open::Both { again: false } => (ESTABLISHED, shut & READ),
            Open::Both { again: true } => (ESTABLISHED, 0),
        };
        let mut numbers = Vec::new();
        // CRIU calls shutdown(2) if the field is there.
        for (field, value) in [(6, Some(state)), (SHUTDOWN, Some(shut).filter(|shut| *shut != 0))] {
            if let Some(value) = value {
                encode_varint(field << 3, &mut numbers);
                encode_varint(value.into(), &mut numbers);
            }
        }
        let change = |content: &[u8]| Some([without_number(content, SHUTDOWN)?, numbers.clone()].concat());
        let changed = with_fields(record, |key, content| match key == INET {
            true => change(content).map(Some),
            false => Some(None),
        });
        changed.map(Some).ok_or_else(|| damaged(&path, format!("the record of file {}", entry.id)))
    })
}

/// `inet_sk_entry` in a `file_entry`: field 4, length-delimited.
const INET: u64 = 4 << 3 | 2;

/// A `file_entry` with an `inet_sk_entry`, with appended fields that mark it as closed and without ports: if a field
/// occurs twice, the last one counts.
fn without_connection(record: &[u8]) -> Option<Vec<u8>> {
    /// state = `TCP_CLOSE`, src_port = 0, dst_port = 0: numbers of fields 6, 7 and 8.
    const CLOSED: [u8; 6] = [6 << 3, 7, 7 << 3, 0, 8 << 3, 0];
    with_fields(record, |key, content| Some((key == INET).then(|| [content, &CLOSED].concat())))
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::tests::beneath;
    use super::*;

    /// An entry with an unknown field: 13, as a message.
    fn socket(id: u32, state: u32, source: (&[u32], u32), destination: (&[u32], u32)) -> Vec<u8> {
        let inet = InetSocketEntry {
            inode: id,
            protocol: TCP,
            state,
            source_port: source.1,
            destination_port: destination.1,
            source: source.0.to_vec(),
            destination: destination.0.to_vec(),
            shutdown: None,
        };
        let mut content = inet.encode_to_vec();
        content.extend([13 << 3 | 2, 2, 8, 1]);
        let mut record = vec![1 << 3, 4, 2 << 3, u8::try_from(id).unwrap(), 4 << 3 | 2];
        record.push(u8::try_from(content.len()).unwrap());
        record.extend(content);
        record
    }

    #[test]
    fn connections_within_are_kept_and_others_closed() {
        let dir = tempfile::tempdir().unwrap();
        let word = |a: [u8; 4]| u32::from_ne_bytes(a);
        let lo = [word([127, 0, 0, 1])];
        let mapped = [0, 0, word([0, 0, 0xff, 0xff]), lo[0]];
        let far = [word([192, 0, 2, 1])];
        let records = [
            socket(1, LISTEN, (&lo, 8000), (&[0], 0)),
            // The ends of one connection, one of them as an IPv4-mapped address.
            socket(2, 1, (&mapped, 8000), (&mapped, 40000)),
            socket(3, 1, (&lo, 40000), (&lo, 8000)),
            socket(4, 1, (&lo, 40001), (&far, 443)),
            socket(5, 8, (&lo, 8000), (&lo, 40002)),
        ];
        super::super::tests::write(&dir.path().join("files.img"), FILES, &records);
        assert_eq!(close_connections_outwards(&beneath(dir.path()), &|_| false).unwrap(), 2);
        let end = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        let expected = [
            TcpSocket::Listening(end(8000)),
            TcpSocket::Connected { local: end(8000), remote: end(40000) },
            TcpSocket::Connected { local: end(40000), remote: end(8000) },
        ];
        assert_eq!(tcp_sockets(&beneath(dir.path())).unwrap(), expected);
        let entries: Vec<FileEntry> =
            Records::open(beneath(dir.path()).join("files.img"), FILES).unwrap().all().unwrap();
        let closed = entries[3].inet.as_ref().unwrap();
        assert_eq!((closed.state, closed.source_port, closed.destination_port), (7, 0, 0));
        let written = std::fs::read(dir.path().join("files.img")).unwrap();
        let unknown = written.windows(4).filter(|part| *part == [13 << 3 | 2, 2, 8, 1]);
        assert_eq!(unknown.count(), 5, "what is not read stays");
        assert_eq!(close_connections_outwards(&beneath(dir.path()), &|_| false).unwrap(), 0);
    }

    #[test]
    fn connections_that_are_named_are_closed() {
        let dir = tempfile::tempdir().unwrap();
        let lo = [u32::from_ne_bytes([127, 0, 0, 1])];
        let records = [
            socket(1, LISTEN, (&lo, 8000), (&[0], 0)),
            socket(2, 1, (&lo, 8000), (&lo, 40000)),
            socket(3, 1, (&lo, 40000), (&lo, 8000)),
            socket(4, 1, (&lo, 8000), (&lo, 40001)),
        ];
        super::super::tests::write(&dir.path().join("files.img"), FILES, &records);
        let closes = |one: SocketAddr, other: SocketAddr| [one, other].iter().any(|end| end.port() == 40000);
        assert_eq!(close_connections(&beneath(dir.path()), &closes).unwrap(), 2);
        let end = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        let left = TcpSocket::Connected { local: end(8000), remote: end(40001) };
        assert_eq!(tcp_sockets(&beneath(dir.path())).unwrap(), [TcpSocket::Listening(end(8000)), left]);
    }

    #[test]
    fn connections_with_both_ends_in_the_group_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let word = |a: [u8; 4]| u32::from_ne_bytes(a);
        let (own, other, far) = ([word([10, 213, 0, 1])], [word([10, 213, 0, 2])], [word([192, 0, 2, 1])]);
        let records = [
            socket(1, 1, (&own, 40000), (&other, 8000)),
            socket(2, 1, (&own, 40001), (&far, 443)),
            socket(3, 1, (&far, 40002), (&other, 443)),
        ];
        super::super::tests::write(&dir.path().join("files.img"), FILES, &records);
        let group = |at: IpAddr| matches!(at, IpAddr::V4(at) if at.octets().starts_with(&[10, 213]));
        assert_eq!(close_connections_outwards(&beneath(dir.path()), &group).unwrap(), 2);
        let end = |last, port| SocketAddr::new(Ipv4Addr::new(10, 213, 0, last).into(), port);
        let kept = TcpSocket::Connected { local: end(1, 40000), remote: end(2, 8000) };
        assert_eq!(tcp_sockets(&beneath(dir.path())).unwrap(), [kept]);
    }
}
