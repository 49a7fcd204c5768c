//! Descriptors in flight in a UNIX socket (`SCM_RIGHTS`): sent, and not received.
//!
//! CRIU writes them into sk-queues.img. In a restore four things go wrong (4.2.1), all observed, all without an error:
//!
//! - Two sockets that are connected with each other (socketpair(2), accept(2)) are created and filled by one process:
//!   the first that has the end which is later in files.img (`interconnected_pair`). The numbers of the descriptors
//!   were chosen before that, for the first process that has the end from which they are sent (`unix_note_scm_rights`).
//!   If these are different processes, the wrong one sends whatever has this number: the receiver gets another file.
//! - If a file is not open yet when such a pair is created, both queues of the pair stay empty: packets are lost
//!   (`post_open_interconnected_master` reports success). This happens if another process has to open the file, or if
//!   the file waits for another one, as the end of a pipe does.
//! - In a stream, data is read together with data that was sent after it with descriptors (`dump_sk_queue_packet`), and
//!   is restored as one packet: a receiver that reads the data alone discards the descriptors.
//! - A datagram without data ends the dump of its queue: neither it, with its descriptors, nor what follows is written.
//!   Only the kernel knows how many there were.
//!
//! The first is repaired by the order: the sending end is moved behind the other. The caller judges the others. These
//! are restored correctly: datagrams of a sender that is not connected, or connected in one direction only, and a queue
//! whose other end is closed.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::rewrite::rewrite;
use super::{Error, FDINFO, FILES, IDS, Records, damaged, ids};
use crate::proto::{ConnectedEntry, FdinfoEntry, KobjIds, PacketEntry, QueuedFileEntry};
use rekindle_os::beneath::Beneath;

const QUEUES: u32 = 0x5626_4026;
const SCM_RIGHTS: u32 = 1;
const STREAM: u32 = 1;

/// `fd_types` that CRIU opens at its first attempt and that a restore sends on: REG, EVENTFD, MEMFD.
const AT_ONCE: [u32; 3] = [1, 6, 18];
/// `fd_types` TIMERFD. CRIU sets such a timer at the end, by the number of its descriptor, and one that was sent on has none.
const TIMER: u32 = 17;

/// Descriptors in the queue of a socket that a restore would lose, or replace by others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// The inode of the socket that they wait in.
    pub inode: u32,
    /// The first process that has that socket, by pid as it sees itself. `None` if the socket is in flight, too.
    pub receiver: Option<i32>,
    /// The first process that has the other end, if known.
    pub sender: Option<i32>,
    /// Number of descriptors.
    pub descriptors: usize,
}

/// The descriptors in the queues of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Queues {
    /// Number of descriptors in each socket, by its inode.
    pub descriptors: BTreeMap<u32, usize>,
    /// Queues that cannot be restored in any order.
    pub stuck: Vec<Stuck>,
}

/// Reorders sockets of files.img so that CRIU restores the descriptors in their queues correctly.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn keep_in_flight(dir: &Beneath) -> Result<Queues, Error> {
    let queues = queues(&dir.join("sk-queues.img"))?;
    if queues.is_empty() {
        return Ok(Queues::default());
    }
    let path = dir.join("files.img");
    let files = Records::open(path.clone(), FILES)?.all()?;
    let scene = Scene { queues, files, holders: holders(dir)? };
    let (mut found, mut behind) = (Queues::default(), Vec::new());
    for (receiver, queue) in &scene.queues {
        let socket = scene.socket(*receiver);
        let socket =
            socket.ok_or_else(|| damaged(&path, format!("it has no socket {receiver}, which has queued data")))?;
        found.descriptors.insert(socket.ino, queue.files.len());
        match scene.judge(*receiver, socket) {
            Verdict::Right => {}
            Verdict::Behind(sender) => behind.push((*receiver, sender)),
            Verdict::Wrong => found.stuck.push(scene.stuck(*receiver, socket)),
        }
    }
    if found.stuck.is_empty() {
        exchange(&path, &behind.into_iter().filter(|pair| scene.is_before(*pair)).collect::<Vec<_>>())?;
    }
    Ok(found)
}

/// The content of a socket's queue.
#[derive(Debug, Default)]
struct Queue {
    /// The files, as ids of files.img.
    files: Vec<u32>,
    /// Bytes of the longest packet with descriptors.
    longest: u32,
}

/// The queues with descriptors, by the file ids of their sockets.
fn queues(path: &Beneath) -> Result<BTreeMap<u32, Queue>, Error> {
    let mut all: BTreeMap<u32, Queue> = BTreeMap::new();
    if !path.is_there() {
        return Ok(all);
    }
    let mut records = Records::open(path.clone(), QUEUES)?;
    while let Some(packet) = records.next::<PacketEntry>()? {
        records.skip(packet.length)?;
        for scm in packet.scm {
            if scm.kind != SCM_RIGHTS {
                return Err(damaged(path, format!("a control message of kind {}", scm.kind)));
            }
            let queue = all.entry(packet.id_for).or_default();
            queue.files.extend(scm.rights);
            queue.longest = queue.longest.max(packet.length);
        }
    }
    Ok(all)
}

/// What waits in a socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Waiting {
    /// Number of packets.
    pub(super) packets: usize,
    /// Whether there are descriptors among them.
    pub(super) has_descriptors: bool,
}

/// All queues, by the file ids of their sockets.
pub(super) fn waiting(path: &Beneath) -> Result<BTreeMap<u32, Waiting>, Error> {
    let mut all: BTreeMap<u32, Waiting> = BTreeMap::new();
    if !path.is_there() {
        return Ok(all);
    }
    let mut records = Records::open(path.clone(), QUEUES)?;
    while let Some(packet) = records.next::<PacketEntry>()? {
        records.skip(packet.length)?;
        let queue = all.entry(packet.id_for).or_default();
        queue.packets += 1;
        queue.has_descriptors |= !packet.scm.is_empty();
    }
    Ok(all)
}

/// The processes that have each file open. If several share a descriptor table, only the first, for which CRIU opens
/// the files (`shared_fdt_prepare`).
pub(super) fn holders(dir: &Beneath) -> Result<BTreeMap<u32, BTreeSet<i32>>, Error> {
    let mut all: BTreeMap<u32, BTreeSet<i32>> = BTreeMap::new();
    let mut tables = HashSet::new();
    for pid in ids(dir)?.processes {
        let path = dir.join(format!("ids-{pid}.img"));
        // A dead process has no descriptors.
        if !path.is_there() {
            continue;
        }
        let ids: Option<KobjIds> = Records::open(path.clone(), IDS)?.next()?;
        let table = ids.ok_or_else(|| damaged(&path, "no ids"))?.files;
        let path = dir.join(format!("fdinfo-{table}.img"));
        if !tables.insert(table) || !path.is_there() {
            continue;
        }
        let entries: Vec<FdinfoEntry> = Records::open(path, FDINFO)?.all()?;
        for entry in entries {
            all.entry(entry.id).or_default().insert(pid);
        }
    }
    Ok(all)
}

/// Exchanges the positions of the two files in each pair.
fn exchange(path: &Beneath, pairs: &[(u32, u32)]) -> Result<(), Error> {
    let other = |id: u32| {
        let of = |(one, two): &(u32, u32)| if *one == id { Some(*two) } else { (*two == id).then_some(*one) };
        pairs.iter().find_map(of)
    };
    let mut found = BTreeMap::new();
    rewrite(path, FILES, |file: QueuedFileEntry, record| {
        if let Some(other) = other(file.id) {
            found.insert(other, record.to_vec());
        }
        Ok(None)
    })?;
    rewrite(path, FILES, |file: QueuedFileEntry, _| Ok(found.remove(&file.id)))
}

enum Verdict {
    Right,
    /// The sending end must be moved behind this one.
    Behind(u32),
    Wrong,
}

/// How a socket is connected, from CRIU's point of view.
enum Link {
    /// Not connected, or in one direction only: its queue waits for the files that it needs.
    Loose,
    /// Connected with this socket in both directions.
    Pair(u32),
    /// Connected with one of several that send to it.
    Unclear,
}

/// The parts of an image that matter for queues with descriptors.
struct Scene {
    queues: BTreeMap<u32, Queue>,
    files: Vec<QueuedFileEntry>,
    holders: BTreeMap<u32, BTreeSet<i32>>,
}

impl Scene {
    fn socket(&self, id: u32) -> Option<ConnectedEntry> {
        self.files.iter().find(|file| file.id == id)?.unix
    }

    fn link(&self, id: u32, socket: ConnectedEntry) -> Link {
        let sockets = || self.files.iter().filter_map(|file| Some((file.id, file.unix?)));
        let other = sockets().find(|(_, other)| socket.peer != 0 && other.ino == socket.peer);
        let Some((sender, _)) = other.filter(|(other, it)| *other != id && it.peer == socket.ino) else {
            return Link::Loose;
        };
        // CRIU fills its queue from only one of the sockets connected to it (`queuer`).
        match sockets().filter(|(_, other)| other.peer == socket.ino).count() {
            1 => Link::Pair(sender),
            _ => Link::Unclear,
        }
    }

    /// The first process that has the file; for CRIU this is the one with the lowest pid.
    fn first(&self, id: u32) -> Option<i32> {
        self.holders.get(&id)?.first().copied()
    }

    fn is_in_flight(&self, id: u32) -> bool {
        self.queues.values().any(|queue| queue.files.contains(&id))
    }

    fn judge(&self, receiver: u32, socket: ConnectedEntry) -> Verdict {
        let Some(queue) = self.queues.get(&receiver) else { return Verdict::Right };
        if queue.files.iter().any(|id| self.files.iter().any(|file| file.id == *id && file.kind == TIMER)) {
            return Verdict::Wrong;
        }
        // One byte was sent alone. If there is more data, it is unknown whether the descriptors came with the first
        // byte.
        if socket.kind == STREAM && queue.longest > 1 {
            return Verdict::Wrong;
        }
        let sender = match self.link(receiver, socket) {
            Link::Loose => return Verdict::Right,
            Link::Unclear => return Verdict::Wrong,
            Link::Pair(sender) => sender,
        };
        let (Some(to), Some(from)) = (self.first(receiver), self.first(sender)) else { return Verdict::Wrong };
        if self.is_in_flight(receiver) || self.is_in_flight(sender) {
            return Verdict::Wrong;
        }
        if !queue.files.iter().all(|file| self.is_opened_at_once_by(from, *file)) {
            return Verdict::Wrong;
        }
        if to == from {
            return Verdict::Right;
        }
        // If the sender has both ends, and the receiver's first process comes before it, CRIU fails with a BUG when it
        // creates them in the sender.
        let has_both = self.holders.get(&receiver).is_some_and(|pids| pids.contains(&from));
        if self.queues.contains_key(&sender) || has_both { Verdict::Wrong } else { Verdict::Behind(sender) }
    }

    /// Whether only this process opens the file, and need not wait for anything.
    fn is_opened_at_once_by(&self, process: i32, id: u32) -> bool {
        let is_of_kind = self.files.iter().any(|file| file.id == id && AT_ONCE.contains(&file.kind));
        // A process that fills a queue with the file has it too.
        let mut queues = self.queues.iter().filter(|(_, queue)| queue.files.contains(&id));
        let is_only_filler = queues.all(|(receiver, _)| self.filler(*receiver) == Some(process));
        is_of_kind && is_only_filler && self.first(id).is_none_or(|first| first >= process)
    }

    /// The process for which the numbers of the descriptors in the queue of a pair are chosen.
    fn filler(&self, receiver: u32) -> Option<i32> {
        match self.link(receiver, self.socket(receiver)?) {
            Link::Pair(sender) => self.first(sender),
            Link::Loose | Link::Unclear => None,
        }
    }

    fn stuck(&self, receiver: u32, socket: ConnectedEntry) -> Stuck {
        let other = self.files.iter().find(|file| file.unix.is_some_and(|it| it.ino == socket.peer));
        Stuck {
            inode: socket.ino,
            receiver: self.first(receiver),
            sender: other.and_then(|other| self.first(other.id)),
            descriptors: self.queues.get(&receiver).map_or(0, |queue| queue.files.len()),
        }
    }

    /// Whether the second socket is before the first.
    fn is_before(&self, (receiver, sender): (u32, u32)) -> bool {
        let at = |id: u32| self.files.iter().position(|file| file.id == id);
        at(sender) < at(receiver)
    }
}

#[cfg(test)]
mod tests;
