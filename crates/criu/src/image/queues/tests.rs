use prost::Message;
use tempfile::TempDir;

use super::super::tests::beneath;
use super::super::tests::write;
use super::super::{COMMON, PSTREE};
use super::*;
use crate::proto::{PstreeEntry, ScmEntry};

const UNIX: u32 = 5;
const PIPE: u32 = 2;
const MEMFD: u32 = 18;

/// An unknown field of a socket: 11, its name.
const UNKNOWN: [u8; 4] = [11 << 3 | 2, 2, b'a', b'b'];

/// An image of processes 1001, 1002 and 1003.
struct Scenery {
    dir: TempDir,
    files: Vec<Vec<u8>>,
    tables: BTreeMap<u32, Vec<u8>>,
    queues: Vec<u8>,
}

impl Scenery {
    fn new() -> Scenery {
        let dir = tempfile::tempdir().unwrap();
        let process = |pid| PstreeEntry { pid, ppid: pid - 1, pgid: 1001, sid: 1001, threads: vec![pid] };
        write(&dir.path().join("pstree.img"), PSTREE, &[1001, 1002, 1003].map(|pid| process(pid).encode_to_vec()));
        for pid in [1001, 1002, 1003] {
            let ids = KobjIds { files: pid - 1000 }.encode_to_vec();
            write(&dir.path().join(format!("ids-{pid}.img")), IDS, &[ids]);
        }
        let queues = [COMMON.to_le_bytes(), QUEUES.to_le_bytes()].concat();
        Scenery { dir, files: Vec::new(), tables: BTreeMap::new(), queues }
    }

    fn file(mut self, id: u32, kind: u32, pids: &[u32]) -> Scenery {
        self.files.push(QueuedFileEntry { kind, id, unix: None }.encode_to_vec());
        self.held(id, kind, pids);
        self
    }

    /// Its inode is 100 more than its id.
    fn socket(self, id: u32, peer: u32, pids: &[u32]) -> Scenery {
        self.socket_of(STREAM, id, peer, pids)
    }

    fn socket_of(mut self, kind: u32, id: u32, peer: u32, pids: &[u32]) -> Scenery {
        let unix = ConnectedEntry { ino: id + 100, kind, marks: 0, peer: if peer == 0 { 0 } else { peer + 100 } };
        let mut record = QueuedFileEntry { kind: UNIX, id, unix: None }.encode_to_vec();
        let mut content = unix.encode_to_vec();
        content.extend(UNKNOWN);
        record.extend([130, 1, u8::try_from(content.len()).unwrap()]);
        record.extend(content);
        self.files.push(record);
        self.held(id, UNIX, pids);
        self
    }

    fn held(&mut self, id: u32, kind: u32, pids: &[u32]) {
        for pid in pids {
            let record = FdinfoEntry { id, kind, fd: id }.encode_to_vec();
            let table = self.tables.entry(pid - 1000).or_default();
            table.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
            table.extend(record);
        }
    }

    fn packet(mut self, receiver: u32, data: &[u8], rights: &[u32]) -> Scenery {
        let scm = ScmEntry { kind: SCM_RIGHTS, rights: rights.to_vec() };
        let scm = if rights.is_empty() { Vec::new() } else { vec![scm] };
        let record = PacketEntry { id_for: receiver, length: u32::try_from(data.len()).unwrap(), scm }.encode_to_vec();
        self.queues.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
        self.queues.extend(record);
        self.queues.extend(data);
        self
    }

    fn written(self) -> TempDir {
        let path = |name: &str| self.dir.path().join(name);
        write(&path("files.img"), FILES, &self.files);
        for (table, entries) in self.tables {
            let head = [COMMON.to_le_bytes(), FDINFO.to_le_bytes()].concat();
            std::fs::write(path(&format!("fdinfo-{table}.img")), [head, entries].concat()).unwrap();
        }
        std::fs::write(path("sk-queues.img"), self.queues).unwrap();
        self.dir
    }
}

fn order(dir: &TempDir) -> Vec<u32> {
    let entries: Vec<QueuedFileEntry> =
        Records::open(beneath(dir.path()).join("files.img"), FILES).unwrap().all().unwrap();
    entries.iter().map(|entry| entry.id).collect()
}

/// Nothing is stuck; returns the order of the files afterwards.
fn kept(scenery: Scenery) -> Vec<u32> {
    let dir = scenery.written();
    assert_eq!(keep_in_flight(&beneath(dir.path())).unwrap().stuck, []);
    let found = order(&dir);
    assert_eq!(keep_in_flight(&beneath(dir.path())).unwrap().stuck, []);
    assert_eq!(order(&dir), found, "once is enough");
    found
}

/// The sockets with stuck descriptors; then nothing is changed.
fn stuck(scenery: Scenery) -> Vec<Stuck> {
    let dir = scenery.written();
    let before = std::fs::read(dir.path().join("files.img")).unwrap();
    let found = keep_in_flight(&beneath(dir.path())).unwrap().stuck;
    assert_eq!(std::fs::read(dir.path().join("files.img")).unwrap(), before);
    found
}

fn of(inode: u32, receiver: i32, sender: i32) -> Stuck {
    Stuck { inode, receiver: Some(receiver), sender: Some(sender), descriptors: 1 }
}

/// Ends 10 in process 1001 and 11 in 1002; `first` comes first in files.img.
fn pair(first: u32) -> Scenery {
    let all = [(10, 11, 1001), (11, 10, 1002)];
    let [one, other] = if first == 10 { all } else { [all[1], all[0]] };
    let scenery = Scenery::new().file(1, 1, &[1001, 1002]).socket(one.0, one.1, &[one.2]);
    scenery.file(2, MEMFD, &[]).socket(other.0, other.1, &[other.2])
}

#[test]
fn the_sending_end_goes_behind_the_other() {
    assert_eq!(kept(pair(10).packet(10, b"x", &[2])), [1, 10, 2, 11]);
    assert_eq!(kept(pair(11).packet(10, b"x", &[2])), [1, 10, 2, 11]);
    assert_eq!(kept(pair(10).packet(11, b"", &[2])), [1, 11, 2, 10]);
    assert_eq!(kept(pair(11).packet(11, b"x", &[2, 2])), [1, 11, 2, 10]);
    // Two packets, data of other sockets before and between them.
    let more = pair(11).packet(11, b"data", &[]).packet(10, b"x", &[2]).packet(10, b"", &[]).packet(10, b"y", &[2]);
    assert_eq!(kept(more), [1, 10, 2, 11]);
    let dir = pair(11).packet(10, b"x", &[2]).written();
    assert_eq!(keep_in_flight(&beneath(dir.path())).unwrap().descriptors, BTreeMap::from([(110, 1)]));
    let written = std::fs::read(dir.path().join("files.img")).unwrap();
    assert_eq!(written.windows(4).filter(|part| *part == UNKNOWN).count(), 2, "what is not read stays");
}

#[test]
fn without_descriptors_in_flight_nothing_is_changed() {
    assert_eq!(kept(pair(11)), [1, 11, 2, 10]);
    assert_eq!(kept(pair(11).packet(10, b"data", &[])), [1, 11, 2, 10]);
    let dir = pair(11).written();
    std::fs::remove_file(beneath(dir.path()).join("sk-queues.img")).unwrap();
    assert_eq!(keep_in_flight(&beneath(dir.path())).unwrap().stuck, []);
}

#[test]
fn in_both_directions_at_once_none_comes_back() {
    let both = pair(10).packet(10, b"x", &[2]).file(3, MEMFD, &[]).packet(11, b"x", &[3]);
    assert_eq!(stuck(both), [of(110, 1001, 1002), of(111, 1002, 1001)]);
    // One process has both ends first, as if it sent to itself.
    let kept_open =
        || Scenery::new().socket(10, 11, &[1001, 1002]).socket(11, 10, &[1001, 1002]).file(2, MEMFD, &[1001]);
    assert_eq!(kept(kept_open().packet(10, b"x", &[2]).packet(11, b"x", &[2])), [10, 11, 2]);
}

#[test]
fn a_file_that_is_not_open_at_once_is_not_sent() {
    let sent = |kind, pids: &[u32]| {
        Scenery::new().socket(10, 11, &[1001]).socket(11, 10, &[1002]).file(2, kind, pids).packet(10, b"x", &[2])
    };
    assert_eq!(kept(sent(MEMFD, &[])), [10, 11, 2]);
    assert_eq!(kept(sent(MEMFD, &[1002])), [10, 11, 2]);
    assert_eq!(kept(sent(1, &[1002, 1003])), [10, 11, 2]);
    // The process that fills the queue opens the file, because its pid is lower.
    assert_eq!(kept(sent(MEMFD, &[1003])), [10, 11, 2]);
    let lost = [of(110, 1001, 1002)];
    assert_eq!(stuck(sent(MEMFD, &[1001])), lost, "the receiver opens it");
    assert_eq!(stuck(sent(PIPE, &[1002])), lost, "it waits for its other end");
    assert_eq!(stuck(sent(UNIX, &[1002])), lost);
    // Another process sends it too, and opens it.
    let other = |pid| sent(MEMFD, &[1002]).socket(20, 21, &[1003]).socket(21, 20, &[pid]).packet(20, b"x", &[2]);
    assert_eq!(kept(other(1002)), [10, 11, 2, 20, 21]);
    assert_eq!(stuck(other(1001)), [of(110, 1001, 1002), of(120, 1003, 1001)]);
    // In a single process too.
    let alone = Scenery::new().socket(10, 11, &[1002]).socket(11, 10, &[1002]).file(2, MEMFD, &[1001]);
    assert_eq!(stuck(alone.packet(10, b"x", &[2])), [of(110, 1002, 1002)]);
}

#[test]
fn ends_on_their_way_or_in_the_way_are_not_judged_right() {
    // The sender has both ends, the receiver has one, and comes first.
    let both = Scenery::new().socket(10, 11, &[1001, 1002]).socket(11, 10, &[1002]).file(2, MEMFD, &[]);
    assert_eq!(stuck(both.packet(10, b"x", &[2])), [of(110, 1001, 1002)]);
    // An end that is in the queue of another socket.
    let nested = pair(11).socket(20, 21, &[]).socket(21, 20, &[1002]).packet(20, b"x", &[2]).packet(10, b"x", &[20]);
    let nowhere = Stuck { inode: 120, receiver: None, sender: Some(1002), descriptors: 1 };
    assert_eq!(stuck(nested), [of(110, 1001, 1002), nowhere]);
    // A third socket is connected to the receiver.
    let third = pair(11).socket(12, 10, &[1003]).packet(10, b"x", &[2]);
    assert_eq!(stuck(third), [of(110, 1001, 1002)]);
}

#[test]
fn descriptors_behind_data_of_a_stream_are_not_judged_right() {
    let sent = |kind| {
        let ends = Scenery::new().socket_of(kind, 10, 11, &[1001]).socket_of(kind, 11, 10, &[1001]);
        ends.file(2, MEMFD, &[]).packet(10, b"more than one", &[])
    };
    assert_eq!(kept(sent(STREAM).packet(10, b"x", &[2])), [10, 11, 2]);
    assert_eq!(stuck(sent(STREAM).packet(10, b"xy", &[2]).packet(10, b"x", &[])), [of(110, 1001, 1001)]);
    for kind in [2, 5] {
        assert_eq!(kept(sent(kind).packet(10, b"a datagram", &[2])), [10, 11, 2]);
    }
}

#[test]
fn sockets_that_are_no_pair_wait_by_themselves() {
    let loose = |peer| Scenery::new().socket(10, peer, &[1001]).socket(11, 10, &[1002]).file(2, PIPE, &[1003]);
    // Not connected; closed by the sender or outside the image; connected to itself.
    for peer in [0, 99, 10] {
        assert_eq!(kept(loose(peer).packet(10, b"x", &[2])), [10, 11, 2], "{peer}");
    }
}

#[test]
fn processes_with_one_table_are_one() {
    let sent = Scenery::new().socket(11, 10, &[1001]).socket(10, 11, &[1003]).file(2, MEMFD, &[1003]);
    let dir = sent.packet(10, b"x", &[2]).written();
    // 1002 shares the descriptor table of 1003, and comes first.
    write(&dir.path().join("ids-1002.img"), IDS, &[KobjIds { files: 3 }.encode_to_vec()]);
    let scene = holders(&beneath(dir.path())).unwrap();
    assert_eq!(scene[&10], BTreeSet::from([1002]));
    // The receiver has the file too, and comes after the sender.
    assert_eq!(keep_in_flight(&beneath(dir.path())).unwrap().stuck, []);
    assert_eq!(order(&dir), [10, 11, 2]);
    // A dead process has none.
    std::fs::remove_file(beneath(dir.path()).join("ids-1003.img")).unwrap();
    assert_eq!(keep_in_flight(&beneath(dir.path())).unwrap().stuck, []);
}

#[test]
fn damage_is_found() {
    let dir = pair(11).packet(10, b"x", &[2]).packet(11, b"", &[]).written();
    let path = dir.path().join("sk-queues.img");
    let whole = std::fs::read(&path).unwrap();
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        // Cut between two packets, the file looks like a shorter one.
        let left = keep_in_flight(&beneath(dir.path()));
        assert!(left.is_err() || length == 8 || whole.len() - length == 8, "{length}: {left:?}");
    }
    let packet = |length, kind| PacketEntry { id_for: 10, length, scm: vec![ScmEntry { kind, rights: vec![2] }] };
    let says = |packet: PacketEntry| {
        write(&path, QUEUES, &[packet.encode_to_vec()]);
        keep_in_flight(&beneath(dir.path())).unwrap_err().to_string()
    };
    assert!(says(packet(u32::MAX, 1)).contains("is cut"));
    assert!(says(packet(0, 2)).contains("a control message of kind 2"));
    assert!(says(PacketEntry { id_for: 99, ..packet(0, 1) }).contains("no socket 99"));
    assert!(says(PacketEntry { id_for: 1, ..packet(0, 1) }).contains("no socket 1"));
    std::fs::write(&path, [COMMON.to_le_bytes(), QUEUES.to_le_bytes(), [0xff; 4]].concat()).unwrap();
    assert!(keep_in_flight(&beneath(dir.path())).unwrap_err().to_string().contains("a record is cut"));
    write(&path, FILES, &[]);
    assert!(keep_in_flight(&beneath(dir.path())).unwrap_err().to_string().contains("magic"));
}
