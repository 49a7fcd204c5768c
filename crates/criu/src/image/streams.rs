//! The data of TCP connections whose two ends are in the image.
//!
//! CRIU dumps one task after the other, and the kernel goes on with the connections of frozen tasks until CRIU comes to
//! them: it sends what is in their queues, and acknowledges what arrives. If CRIU comes to the receiving end first, data
//! that arrives later is not in its queue in the image. If it is acknowledged before CRIU comes to the sending end, it is
//! in that end's queue no more either, and thus nowhere in the image. The queue of the receiving end still has it: its
//! task is frozen, and the kernel takes in data also in repair mode.

use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};
use std::net::SocketAddr;

use prost::encoding::encode_varint;

use super::sockets::{Open, TcpSocket, ends, open_again};
use super::{COMMON, Error, FILES, Records, damaged, put};
use crate::proto::{FileEntry, TcpStreamEntry};
use rekindle_os::beneath::Beneath;

const STREAM: u32 = 0x5146_5506;

/// States of the kernel's `tcp_states.h`.
const ESTABLISHED: u32 = 1;
const FIN_WAIT1: u32 = 4;
const FIN_WAIT2: u32 = 5;
const CLOSE_WAIT: u32 = 8;
const LAST_ACK: u32 = 9;
const CLOSING: u32 = 11;

/// An end of a connection whose queue in the image lacks what the other end sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behind {
    /// The inode of the socket.
    pub inode: u32,
    /// The address of this end.
    pub local: SocketAddr,
    /// The address of the end that sent it.
    pub remote: SocketAddr,
    /// Bytes in its queue in the image.
    pub received: u32,
    /// Bytes that are missing after those. The end of the connection, if it was closed for writing, counts as a byte.
    pub missing: u32,
}

/// One end, as CRIU found it.
struct End {
    inode: u32,
    state: u32,
    stream: TcpStreamEntry,
}

impl End {
    /// The sequence number up to which the other end has acknowledged what this one sent. CRIU counts the FIN in the number,
    /// but not in the length of the queue (`refresh_sk` in soccr/soccr.c).
    fn acknowledged(&self) -> u32 {
        let waits_for_end = matches!(self.state, FIN_WAIT1 | LAST_ACK | CLOSING);
        self.stream.outq_seq.wrapping_sub(self.stream.outq_len).wrapping_sub(u32::from(waits_for_end))
    }
}

/// The ends of connections inside the image that lack data which is nowhere in the image.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn behind(dir: &Beneath) -> Result<Vec<Behind>, Error> {
    let pairs = pairs(dir)?;
    let lacks = |(&(local, remote), here): (&(SocketAddr, SocketAddr), &End)| {
        // Sequence numbers wrap around; queues are much shorter than half of their range.
        let missing = pairs.get(&(remote, local))?.acknowledged().wrapping_sub(here.stream.inq_seq);
        let end = Behind { inode: here.inode, local, remote, received: here.stream.inq_len, missing };
        (missing != 0 && missing < 1 << 31).then_some(end)
    };
    Ok(pairs.iter().filter_map(lacks).collect())
}

/// Ends of connections inside the image, by their address and that of the other end.
type Pairs = HashMap<(SocketAddr, SocketAddr), End>;

fn pairs(dir: &Beneath) -> Result<Pairs, Error> {
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let mut sockets: HashMap<(SocketAddr, SocketAddr), (u32, u32)> = HashMap::new();
    for entry in &entries {
        // One that was reset has no queues, and another connection can have its addresses by now.
        let Some(inet) = entry
            .inet
            .as_ref()
            .filter(|inet| matches!(inet.state, ESTABLISHED | FIN_WAIT1 | FIN_WAIT2 | CLOSE_WAIT | LAST_ACK | CLOSING))
        else {
            continue;
        };
        if let Some(ends) = TcpSocket::of(entry).as_ref().and_then(ends) {
            sockets.insert(ends, (inet.inode, inet.state));
        }
    }
    let is_known = |ends: &(SocketAddr, SocketAddr)| sockets.contains_key(ends);
    let mut pairs = Pairs::new();
    for (&(local, remote), &(inode, state)) in sockets.iter().filter(|((here, there), _)| is_known(&(*there, *here))) {
        if let Some(stream) = stream(dir, inode)? {
            pairs.insert((local, remote), End { inode, state, stream });
        }
    }
    Ok(pairs)
}

/// What was written to an end of a connection, and not even sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsent {
    /// The address of this end.
    pub local: SocketAddr,
    /// The address of the other end.
    pub remote: SocketAddr,
    /// It, in order.
    pub data: Vec<u8>,
    /// This end is to be closed for writing after it.
    pub is_last: bool,
}

/// Whether an end in this state was closed for writing (the other end was sent a FIN, or is to be), and whether it knows that
/// the other one was.
fn closed(state: u32) -> (bool, bool) {
    let (here, there) = ([FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING], [CLOSE_WAIT, LAST_ACK, CLOSING]);
    (here.contains(&state), there.contains(&state))
}

/// Takes out of connections inside the image what CRIU cannot make as long as it has not made the other end: what was written and
/// not sent, and that an end was closed for writing. Both come again when both ends are there ([`unsent`]). CRIU sends the former
/// as soon as it has made the end that has it, and makes the latter by packets of its own, which the kernel acknowledges. If the
/// other end is not there by then, the kernel answers that there is no such connection: the restore fails with a broken pipe, or
/// the connection is reset. Returns how many ends were changed.
///
/// It goes to the end of the file of the connection, behind the queues, where CRIU does not look, with a byte before it that is 1
/// if the end was closed for writing since. In the image such an end is not closed: it is closed again when all is written.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn set_unsent_apart(dir: &Beneath) -> Result<usize, Error> {
    let pairs = pairs(dir)?;
    let mut opened = HashMap::new();
    let mut count = 0;
    for (&(local, remote), end) in &pairs {
        let (is_last, knows_end) = closed(end.state);
        // The other end will be closed again.
        let is_told_again = knows_end && pairs.get(&(remote, local)).is_some_and(|other| closed(other.state).0);
        let unsent = end.stream.unsq_len.filter(|length| *length <= end.stream.outq_len).unwrap_or(0);
        if unsent == 0 && !is_last && !is_told_again {
            continue;
        }
        let path = path(dir, end.inode);
        let mut records = Records::open(path.clone(), STREAM)?;
        let at = records.at + 4;
        let _: Option<TcpStreamEntry> = records.next()?;
        let record = records.bytes.get(at..records.at).unwrap_or_default();
        let queues = records.bytes.get(records.at..).unwrap_or_default();
        let length = end.stream.outq_len - unsent;
        // CRIU counts the FIN in the numbers of the next bytes, and in no length.
        let mut numbers =
            vec![(3, length), (4, end.stream.outq_seq.wrapping_sub(unsent).wrapping_sub(u32::from(is_last))), (12, 0)];
        if is_told_again {
            let received = end.stream.inq_seq.wrapping_sub(1);
            numbers.push((2, received));
            numbers.extend(end.stream.rcv_wup.filter(|number| *number == end.stream.inq_seq).map(|_| (17, received)));
        }
        let kept = usize::try_from(u64::from(end.stream.inq_len) + u64::from(length)).ok();
        let (queues, unsent) =
            kept.and_then(|kept| queues.split_at_checked(kept)).ok_or_else(|| damaged(&path, "the queue is cut"))?;
        let record = with_numbers(record, &numbers);
        match is_last || !unsent.is_empty() {
            true => write(&path, record, &[queues, &[u8::from(is_last)], unsent])?,
            false => write(&path, record, &[queues])?,
        }
        if is_last || is_told_again {
            let still_knows = knows_end && !is_told_again;
            opened.insert(
                end.inode,
                if still_knows { Open::OtherEndClosed } else { Open::Both { again: is_told_again } },
            );
        }
        count += 1;
    }
    if !opened.is_empty() {
        open_again(dir, &opened)?;
    }
    Ok(count)
}

/// What [`set_unsent_apart`] has taken out of the queues.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn unsent(dir: &Beneath) -> Result<Vec<Unsent>, Error> {
    let mut found = Vec::new();
    for ((local, remote), end) in pairs(dir)? {
        let path = path(dir, end.inode);
        let queues = u64::from(end.stream.inq_len) + u64::from(end.stream.outq_len);
        let mut records = Records::begin(path.clone(), ENTRY, STREAM)?;
        let _: Option<TcpStreamEntry> = records.next()?;
        let behind = u64::try_from(records.at).unwrap_or(u64::MAX).saturating_add(queues);
        let read = |mut file: std::fs::File| {
            let mut data = Vec::new();
            file.seek(SeekFrom::Start(behind))?;
            file.take(LONGEST_QUEUE).read_to_end(&mut data).map(|_| data)
        };
        let data = path.read().and_then(read).map_err(|source| Error::Read { path: path.path().into(), source })?;
        match data.split_first() {
            None => {}
            Some((&mark @ (0 | 1), data)) => {
                found.push(Unsent { local, remote, data: data.to_vec(), is_last: mark == 1 });
            }
            Some(_) => return Err(damaged(&path, "what is behind the queues is not rekindle's")),
        }
    }
    Ok(found)
}

/// More than the kernel lets a queue have.
const LONGEST_QUEUE: u64 = 1 << 30;

/// A message with numbers in these fields: of a field that occurs twice, the last one counts.
fn with_numbers(record: &[u8], numbers: &[(u64, u32)]) -> Vec<u8> {
    let mut record = record.to_vec();
    for (field, value) in numbers {
        encode_varint(field << 3, &mut record);
        encode_varint((*value).into(), &mut record);
    }
    record
}

/// Writes the file of a connection anew.
fn write(path: &Beneath, record: Vec<u8>, queues: &[&[u8]]) -> Result<(), Error> {
    let size = u32::try_from(record.len()).map_err(|error| damaged(path, error.to_string()))?;
    let mut bytes: Vec<u8> = [COMMON, STREAM, size].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(record);
    queues.iter().for_each(|queue| bytes.extend_from_slice(queue));
    put(path, &bytes)
}

/// CRIU's file of a connection. There is none if CRIU was told to close it.
fn path(dir: &Beneath, inode: u32) -> Beneath {
    dir.join(format!("tcp-stream-{inode:x}.img"))
}

/// Length of a connection's entry with what is before it, at most: it has some twenty numbers. The queues follow, which can
/// be long, and the job is frozen.
const ENTRY: u64 = 4096;

fn stream(dir: &Beneath, inode: u32) -> Result<Option<TcpStreamEntry>, Error> {
    let path = path(dir, inode);
    if !path.is_there() {
        return Ok(None);
    }
    let entry: Option<TcpStreamEntry> = Records::begin(path.clone(), ENTRY, STREAM)?.next()?;
    entry.map(Some).ok_or_else(|| damaged(&path, "no entry"))
}

/// Adds to an end of a connection what it lacks. `queue` is its whole queue: what the image has of it, and what is missing.
/// Returns false, and changes nothing, if it is not.
///
/// # Errors
/// When the file of the connection is missing or damaged, or cannot be written.
pub fn complete(dir: &Beneath, end: &Behind, queue: &[u8]) -> Result<bool, Error> {
    let path = path(dir, end.inode);
    let mut records = Records::open(path.clone(), STREAM)?;
    let at = records.at + 4;
    let stream: TcpStreamEntry = records.next()?.ok_or_else(|| damaged(&path, "no entry"))?;
    let record = records.bytes.get(at..records.at).unwrap_or_default();
    let queues = records.bytes.get(records.at..).unwrap_or_default();
    let cut = || damaged(&path, "the queue is cut");
    let (received, sent) =
        usize::try_from(stream.inq_len).ok().and_then(|it| queues.split_at_checked(it)).ok_or_else(cut)?;
    let length = u32::try_from(queue.len()).unwrap_or(u32::MAX);
    if !queue.starts_with(received) || stream.inq_len.checked_add(end.missing) != Some(length) {
        return Ok(false);
    }
    // The window is that of an end that has acknowledged all of it: the other end may send as much again as before.
    let next = stream.inq_seq.wrapping_add(end.missing);
    let window = stream.rcv_wup.map(|_| (17, next));
    let numbers: Vec<(u64, u32)> = [(1, length), (2, next)].into_iter().chain(window).collect();
    write(&path, with_numbers(record, &numbers), &[queue, sent])?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::tests::beneath;
    use super::super::tests::write;
    use super::*;
    use crate::proto::InetSocketEntry;

    /// Of both ends of a connection: the state, the queues, and the numbers of their ends.
    type Ends<'a> = [(u32, &'a [u8], u32, &'a [u8], u32); 2];

    /// An image with the two ends of a connection.
    fn image(ends: Ends<'_>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let address = u32::from_ne_bytes([127, 0, 0, 1]);
        let mut sockets = Vec::new();
        for (at, (state, inq, inq_seq, outq, outq_seq)) in (0_u32..).zip(ends) {
            let inet = InetSocketEntry {
                inode: 0xa0 + at,
                protocol: 6,
                state,
                source_port: 8000 + at,
                destination_port: 8001 - at,
                source: vec![address],
                destination: vec![address],
                shutdown: None,
            };
            sockets.push(FileEntry { id: at + 1, reg: None, inet: Some(inet), unix: None }.encode_to_vec());
            let [inq_len, outq_len] = [inq, outq].map(|queue| u32::try_from(queue.len()).unwrap());
            let stream =
                TcpStreamEntry { inq_len, inq_seq, outq_len, outq_seq, unsq_len: Some(0), rcv_wup: Some(inq_seq) };
            let path = dir.path().join(format!("tcp-stream-a{at}.img"));
            // A field that is not read: 7, a number.
            write(&path, STREAM, &[[stream.encode_to_vec(), vec![7 << 3, 5]].concat()]);
            let image = std::fs::read(&path).unwrap();
            std::fs::write(&path, [&image, inq, outq].concat()).unwrap();
        }
        write(&dir.path().join("files.img"), FILES, &sockets);
        dir
    }

    fn missing(ends: Ends<'_>) -> Vec<(u32, u32, u32)> {
        let found = behind(&beneath(image(ends).path())).unwrap();
        found.into_iter().map(|end| (end.inode, end.received, end.missing)).collect()
    }

    #[test]
    fn what_is_in_no_queue_is_missing() {
        let idle = (ESTABLISHED, &b""[..], 500, &b""[..], 1000);
        assert_eq!(missing([idle, (ESTABLISHED, b"ab", 1000, b"", 500)]), []);
        // The receiving end was dumped first: what the sender still has is sent again.
        let sender = |outq: &'static [u8]| (ESTABLISHED, &b""[..], 500, outq, 1000);
        assert_eq!(missing([sender(b"0123456789"), (ESTABLISHED, b"ab", 990, b"", 500)]), []);
        assert_eq!(missing([sender(b"6789"), (ESTABLISHED, b"ab", 990, b"", 500)]), [(0xa1, 2, 6)]);
        // It was dumped last: it has some of it already.
        assert_eq!(missing([sender(b"0123456789"), (ESTABLISHED, b"0123", 994, b"", 500)]), []);
        // In the other direction, and where the numbers begin again.
        let receiver = (ESTABLISHED, &b""[..], 3, &b""[..], 1000);
        assert_eq!(missing([receiver, (ESTABLISHED, b"", 1000, b"", 10)]), [(0xa0, 0, 7)]);
        let receiver = (ESTABLISHED, &b""[..], u32::MAX - 3, &b""[..], 1000);
        assert_eq!(missing([receiver, (ESTABLISHED, b"", 1000, b"xy", 4)]), [(0xa0, 0, 6)]);
    }

    /// CRIU does not count the FIN in the length of a queue.
    #[test]
    fn the_end_of_a_stream_counts_only_when_it_is_acknowledged() {
        let closed = |state, outq: &'static [u8]| (state, &b""[..], 500, outq, 1001);
        for state in [FIN_WAIT1, LAST_ACK, CLOSING] {
            assert_eq!(missing([closed(state, b"89"), (ESTABLISHED, b"", 998, b"", 500)]), [], "{state}");
            assert_eq!(missing([closed(state, b"9"), (ESTABLISHED, b"", 998, b"", 500)]), [(0xa1, 0, 1)], "{state}");
        }
        assert_eq!(missing([closed(FIN_WAIT2, b""), (CLOSE_WAIT, b"", 1001, b"", 500)]), []);
        assert_eq!(missing([closed(FIN_WAIT2, b""), (ESTABLISHED, b"", 1000, b"", 500)]), [(0xa1, 0, 1)]);
        // A reset one.
        assert_eq!(missing([closed(7, b""), (ESTABLISHED, b"", 900, b"", 500)]), []);
    }

    #[test]
    fn a_queue_is_completed() {
        let ends = [(ESTABLISHED, &b""[..], 500, &b"6789"[..], 1000), (ESTABLISHED, b"ab", 990, b"answer", 506)];
        let dir = image(ends);
        let [end] = behind(&beneath(dir.path())).unwrap().try_into().unwrap();
        for other in [&b"ab01234"[..], b"ab0123456", b"xy012345"] {
            assert!(!complete(&beneath(dir.path()), &end, other).unwrap());
        }
        assert_eq!(behind(&beneath(dir.path())).unwrap(), [end], "nothing has changed");
        assert!(complete(&beneath(dir.path()), &end, b"ab012345").unwrap());
        assert_eq!(behind(&beneath(dir.path())).unwrap(), []);
        let wanted = TcpStreamEntry {
            inq_len: 8,
            inq_seq: 996,
            outq_len: 6,
            outq_seq: 506,
            unsq_len: Some(0),
            rcv_wup: Some(996),
        };
        assert_eq!(stream(&beneath(dir.path()), 0xa1).unwrap(), Some(wanted));
        let written = std::fs::read(dir.path().join("tcp-stream-a1.img")).unwrap();
        assert!(written.ends_with(b"ab012345answer"));
        assert!(written.windows(2).any(|part| part == [7 << 3, 5]), "what is not read stays");
    }

    #[test]
    fn what_was_not_sent_is_set_apart() {
        let dir = image([(ESTABLISHED, b"read me", 500, b"sent.not sent", 4), (ESTABLISHED, b"ab", 990, b"", 500)]);
        let dir = beneath(dir.path());
        let path = dir.join("tcp-stream-a0.img");
        let mut entry = stream(&dir, 0xa0).unwrap().unwrap();
        entry.unsq_len = Some(8);
        super::write(&path, entry.encode_to_vec(), &[b"read me", b"sent.not sent"]).unwrap();
        assert_eq!((unsent(&dir).unwrap(), set_unsent_apart(&dir).unwrap()), (vec![], 1));
        let entry = stream(&dir, 0xa0).unwrap().unwrap();
        assert_eq!((entry.outq_len, entry.outq_seq, entry.unsq_len), (5, u32::MAX - 3, Some(0)));
        assert!(std::fs::read(path.path()).unwrap().ends_with(b"read mesent.\0not sent"));
        let found = unsent(&dir).unwrap();
        assert_eq!((found.len(), found[0].data.as_slice(), found[0].is_last), (1, &b"not sent"[..], false));
        assert_eq!((found[0].local.port(), found[0].remote.port()), (8000, 8001));
        assert_eq!(set_unsent_apart(&dir).unwrap(), 0, "nothing is left");
    }

    #[test]
    fn an_end_that_was_closed_with_unsent_data_is_closed_later() {
        for (state, then) in [(FIN_WAIT1, ESTABLISHED), (LAST_ACK, CLOSE_WAIT), (CLOSING, CLOSE_WAIT)] {
            let dir = image([(state, b"", 500, b"sent.last", 1001), (ESTABLISHED, b"", 991, b"", 500)]);
            let dir = beneath(dir.path());
            let mut entry = stream(&dir, 0xa0).unwrap().unwrap();
            entry.unsq_len = Some(4);
            super::write(&dir.join("tcp-stream-a0.img"), entry.encode_to_vec(), &[b"sent.last"]).unwrap();
            assert_eq!(set_unsent_apart(&dir).unwrap(), 1);
            let entry = stream(&dir, 0xa0).unwrap().unwrap();
            assert_eq!((entry.outq_len, entry.outq_seq), (5, 996));
            let states: Vec<u32> = pairs(&dir).unwrap().into_values().map(|end| end.state).collect();
            assert!(states.contains(&then) && !states.contains(&state), "{states:?}");
            let found = unsent(&dir).unwrap();
            assert_eq!((found[0].data.as_slice(), found[0].is_last), (&b"last"[..], true));
            assert_eq!(behind(&dir).unwrap(), []);
        }
    }

    /// CRIU would send the other end packets that this one acknowledges, perhaps before the other end is there.
    #[test]
    fn an_end_that_was_closed_is_closed_when_both_are_there() {
        let closing = (CLOSING, &b""[..], 1001, &b"b"[..], 502);
        for (ends, last) in [
            ([(FIN_WAIT2, &b""[..], 500, &b""[..], 1001), (CLOSE_WAIT, b"unread", 1001, b"", 500)], 1),
            ([(FIN_WAIT1, b"", 500, b"ab", 1001), (CLOSE_WAIT, b"", 1001, b"", 500)], 1),
            ([(CLOSING, b"", 502, b"a", 1001), closing], 2),
        ] {
            let dir = image(ends);
            let dir = beneath(dir.path());
            assert_eq!(set_unsent_apart(&dir).unwrap(), 2);
            let found = unsent(&dir).unwrap();
            assert!(found.len() == last && found.iter().all(|end| end.data.is_empty() && end.is_last), "{found:?}");
            let [one, other] = [0xa0, 0xa1].map(|inode| stream(&dir, inode).unwrap().unwrap());
            assert_eq!((one.outq_seq, other.inq_seq, other.rcv_wup), (1000, 1000, Some(1000)));
            assert!(pairs(&dir).unwrap().into_values().all(|end| end.state == ESTABLISHED));
            assert_eq!(set_unsent_apart(&dir).unwrap(), 0, "nothing is left");
        }
        // The other end was reset: nobody would close it again.
        let dir = image([(7, b"", 500, b"", 1001), (CLOSE_WAIT, b"", 1001, b"", 500)]);
        assert_eq!(set_unsent_apart(&beneath(dir.path())).unwrap(), 0);
    }

    /// The job is frozen. These are longer than memory.
    #[test]
    fn the_queues_are_not_read_to_compare_their_numbers() {
        let dir = image([(ESTABLISHED, b"", 500, b"6789", 1000), (ESTABLISHED, b"ab", 990, b"", 500)]);
        for name in ["tcp-stream-a0.img", "tcp-stream-a1.img"] {
            let image = std::fs::OpenOptions::new().write(true).open(beneath(dir.path()).join(name)).unwrap();
            image.set_len(1 << 43).unwrap();
        }
        assert_eq!(behind(&beneath(dir.path())).unwrap().len(), 1);
    }
}
