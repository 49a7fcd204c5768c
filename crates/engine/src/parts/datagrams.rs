//! Datagrams that wait in UNIX sockets of the job, with the addresses of their senders.
//!
//! CRIU (4.2) saves their data only, and nothing from a datagram without data on. In a restored job a server would not know whom to
//! answer. So such queues are also written to a file of the image. Before a restored job runs, they are emptied and sent again, each
//! datagram by the socket that had sent it. Where that socket is not in the image, because it was closed or is another program's,
//! the datagram has no sender in the restored job, and the snapshot says so.
//!
//! A datagram without data is not seen any more once CRIU has looked at it. It is lost, but what follows is not: where CRIU has
//! written less than there is, and it cannot be sent again, the snapshot fails.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::unrestorable::Unrestorable;
use rekindle_criu::image::{self, DatagramSocket};
use rekindle_os::beneath::Beneath;
use rekindle_os::datagrams::{self, Datagram};
use rekindle_os::process;
use rekindle_os::unix_diag::{self, UnixSocket};

/// The file of an image.
const FILE: &str = "datagrams.json";
/// A larger one is not read.
const LONGEST: u64 = 256 << 20;
/// More bytes are not saved beside CRIU's.
const MOST: usize = 16 << 20;

/// A descriptor of a process, as it sees itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Place {
    pid: i32,
    fd: RawFd,
}

/// What waits in a socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Queue {
    place: Place,
    /// Its address, if it has one that leads to it.
    address: Option<Vec<u8>>,
    datagrams: Vec<Sent>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Sent {
    data: Vec<u8>,
    /// The socket that sent it; none if it had no address.
    sender: Option<Place>,
    /// That socket is connected to this one.
    is_connected: bool,
}

/// Why no image may be taken.
#[derive(Debug)]
pub(crate) enum Unsaved {
    /// Datagrams would be lost.
    Lost(Unrestorable),
    Failed(String),
}

/// Writes what CRIU does not save into the image. The tasks of `tree` are stopped, and CRIU has written its image. Returns notes
/// on what is lost.
pub(crate) fn save(criu_dir: &Beneath, image: &Beneath, tree: &[i32]) -> Result<Vec<String>, Unsaved> {
    let sockets = image::datagram_sockets(criu_dir).map_err(|error| Unsaved::Failed(error.to_string()))?;
    let inner: BTreeMap<i32, i32> = tree.iter().filter_map(|pid| Some((process::inner_pid(*pid)?, *pid))).collect();
    let (mut queues, mut notes) = (Vec::new(), Vec::new());
    for socket in &sockets {
        let Some(pid) = inner.get(&socket.pid) else { continue };
        let waiting = fetch(*pid, socket.fd).and_then(|fd| datagrams::waiting(&fd));
        let waiting = match waiting {
            Ok(waiting) => waiting,
            Err(error) => {
                notes.push(lacks(socket.pid, socket.waiting, &format!("cannot be read: {error}")));
                continue;
            }
        };
        if socket.waiting < waiting.len() {
            notes
                .push(format!("the image lacks a UNIX datagram without data that process {} has not read", socket.pid));
        }
        match queue(socket, &waiting, &sockets) {
            Saved::ByCriu => {}
            Saved::Here(queue, 0) => queues.push(queue),
            Saved::Here(queue, lost) => {
                queues.push(queue);
                notes.push(lacks(
                    socket.pid,
                    lost,
                    "is not a socket of the job any more, or cannot be reached by its address",
                ));
            }
            Saved::Not(_, why) if socket.waiting < waiting.len() => {
                return Err(Unsaved::Lost(behind_an_empty_one(*pid, waiting.len() - socket.waiting, why)));
            }
            Saved::Not(lost, why) => notes.push(lacks(socket.pid, lost, why)),
        }
    }
    if !queues.is_empty() {
        let bytes = serde_json::to_vec(&queues).map_err(|error| Unsaved::Failed(error.to_string()))?;
        let written = image.join(FILE).create_new(0o600).and_then(|mut file| file.write_all(&bytes));
        written.map_err(|error| Unsaved::Failed(format!("cannot write {FILE} of the image: {error}")))?;
    }
    Ok(notes)
}

fn lacks(pid: i32, count: usize, why: &str) -> String {
    format!("the image lacks the senders of {count} UNIX datagrams that process {pid} has not read: the sender {why}")
}

fn behind_an_empty_one(pid: i32, count: usize, why: &str) -> Unrestorable {
    Unrestorable::of(
        pid,
        format!(
            "has not read a UNIX datagram without data and {count} behind it, which CRIU would lose, and rekindle cannot keep: their \
             sender {why}"
        ),
        "let it read them. Snapshots continue then",
    )
}

#[derive(Debug, PartialEq, Eq)]
enum Saved {
    /// Nothing is missing.
    ByCriu,
    /// With the number of those whose sender is lost.
    Here(Queue, usize),
    Not(usize, &'static str),
}

fn queue(socket: &DatagramSocket, waiting: &[Datagram], all: &[DatagramSocket]) -> Saved {
    let named = waiting.iter().filter(|datagram| !datagram.sender.is_empty()).count();
    if named == 0 && socket.waiting == waiting.len() {
        return Saved::ByCriu;
    }
    // A socket that is connected takes datagrams of its other end only, whose address its program knows. An end outside
    // the job cannot be made to send.
    let pair = all.iter().find(|other| other.inode == socket.peer && other.peer == socket.inode);
    let sender_of = |datagram: &Datagram| match datagram.sender.as_slice() {
        [] => pair,
        name => all.iter().find(|other| other.name == name),
    };
    if socket.peer != 0 && !waiting.iter().any(|datagram| sender_of(datagram).is_some()) {
        return if socket.waiting < waiting.len() { Saved::Not(named, "is outside the job") } else { Saved::ByCriu };
    }
    let is_of_others = |datagram: &Datagram| sender_of(datagram).is_none_or(|by| by.inode != socket.peer);
    if socket.peer != 0 && waiting.iter().any(is_of_others) {
        return Saved::Not(named, "is not the socket that this one is connected to");
    }
    if socket.has_descriptors {
        return Saved::Not(named, "is not kept beside descriptors in flight");
    }
    if waiting.iter().map(|datagram| datagram.data.len()).sum::<usize>() > MOST {
        return Saved::Not(named, "is not kept for so much data");
    }
    let address = Some(socket.name.clone()).filter(|name| !name.is_empty());
    let mut lost = 0;
    let datagrams = waiting.iter().map(|datagram| {
        let (by, Datagram { sender, data }) = (sender_of(datagram), datagram);
        let is_connected = by.is_some_and(|by| by.peer == socket.inode);
        let by = by.filter(|_| is_connected || address.is_some());
        lost += usize::from(by.is_none() && !sender.is_empty());
        let sender = by.map(|by| Place { pid: by.pid, fd: by.fd });
        Sent { data: data.clone(), sender, is_connected: is_connected && sender.is_some() }
    });
    let datagrams: Vec<Sent> = datagrams.collect();
    // What has no sender is sent by its address.
    if address.is_none() && datagrams.iter().any(|sent| sent.sender.is_none()) {
        return Saved::Not(named, "cannot be given back, because the socket has no address");
    }
    let place = Place { pid: socket.pid, fd: socket.fd };
    Saved::Here(Queue { place, address, datagrams }, lost)
}

/// Fills the queues of the restored tree below `root`, before it runs. A failure does not prevent that, and is reported.
pub(crate) fn put_back(root: i32, image: &Beneath) {
    let path = image.join(FILE);
    if !path.is_there() {
        return;
    }
    let all = path.content(LONGEST).and_then(|bytes| Ok(serde_json::from_slice::<Vec<Queue>>(&bytes)?));
    let filled = all.and_then(|all| {
        let tree = process::tree(root).into_iter().filter_map(|pid| Some((process::inner_pid(pid)?, pid))).collect();
        all.iter().try_for_each(|queue| fill(root, &tree, queue))
    });
    if let Err(error) = filled {
        tracing::warn!("UNIX datagrams that wait in the job have no senders any more, or are lost: {error}");
    }
}

fn fill(root: i32, tree: &BTreeMap<i32, i32>, queue: &Queue) -> io::Result<()> {
    let socket = |place: &Place| {
        let pid = tree.get(&place.pid).ok_or(io::ErrorKind::NotFound)?;
        let socket = fetch(*pid, place.fd)?;
        if datagrams::is_one(&socket) { Ok(socket) } else { Err(io::Error::from(io::ErrorKind::InvalidInput)) }
    };
    // All that can be missing or wrong, before anything is taken out: what is sent comes from us, who are root, and must reach
    // nobody but this socket.
    let receiver = socket(&queue.place)?;
    let inode = inode(&receiver)?;
    let known: BTreeMap<u32, UnixSocket> =
        unix_diag::of(root)?.into_iter().map(|socket| (socket.inode, socket)).collect();
    let own = known.get(&inode).ok_or(io::ErrorKind::NotFound)?;
    let mut senders: BTreeMap<Place, OwnedFd> = BTreeMap::new();
    for Sent { sender, is_connected, .. } in &queue.datagrams {
        let Some(place) = sender else { continue };
        let sender = socket(place)?;
        if *is_connected && known.get(&self::inode(&sender)?).is_none_or(|sender| sender.peer != inode) {
            return Err(io::Error::other("a sender is connected to another socket"));
        }
        senders.insert(*place, sender);
    }
    // Of anybody else it takes nothing (EPERM).
    let is_other_end = |sent: &Sent| {
        let sender = sent.sender.as_ref().and_then(|place| senders.get(place));
        sender.and_then(|sender| self::inode(sender).ok()) == Some(own.peer)
    };
    if own.peer != 0 && !queue.datagrams.iter().all(is_other_end) {
        return Err(io::Error::other("it is connected, and its other end is not in the image"));
    }
    let nameless = queue.datagrams.iter().any(|sent| sent.sender.is_none());
    let nameless = nameless.then(|| datagrams::nameless(root)).transpose()?;
    let opened = queue.address.as_deref().map(|address| Address::open(root, address, own)).transpose()?;
    let address = opened.as_ref().map(Address::bytes);
    datagrams::take(&receiver)?;
    for Sent { data, sender, is_connected } in &queue.datagrams {
        let from = sender.as_ref().map_or(nameless.as_ref(), |place| senders.get(place));
        let from = from.ok_or(io::ErrorKind::NotFound)?;
        datagrams::put(from, address.as_deref().filter(|_| !is_connected), data)?;
    }
    Ok(())
}

/// Where datagrams are sent to.
enum Address {
    Abstract(Vec<u8>),
    /// The file of the socket, as the job sees it. A path in another process' view could be too long for an address.
    File(std::fs::File),
}

impl Address {
    /// Fails if the name does not lead to this socket.
    fn open(root: i32, name: &[u8], socket: &UnixSocket) -> io::Result<Address> {
        let another = || io::Error::other("its address leads to another socket");
        if name.first() == Some(&0) {
            return if socket.name == name { Ok(Address::Abstract(name.to_vec())) } else { Err(another()) };
        }
        let path = Path::new(OsStr::from_bytes(name.strip_prefix(b"/").unwrap_or(name)));
        let within = Path::new(&format!("/proc/{root}/root")).join(path);
        let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(within)?;
        let found = file.metadata()?;
        let is_it = socket.file.is_some_and(|(device, inode)| {
            (device, u64::from(inode)) == (found.dev(), found.ino() & u64::from(u32::MAX))
        });
        if is_it { Ok(Address::File(file)) } else { Err(another()) }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Address::Abstract(name) => name.clone(),
            Address::File(file) => format!("/proc/self/fd/{}", file.as_raw_fd()).into_bytes(),
        }
    }
}

fn inode(socket: &OwnedFd) -> io::Result<u32> {
    let found = nix::sys::stat::fstat(socket)?;
    u32::try_from(found.st_ino).map_err(io::Error::other)
}

fn fetch(pid: i32, fd: RawFd) -> io::Result<OwnedFd> {
    process::fetch_descriptor(&process::open_pidfd(pid)?, fd)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use rekindle_os::beneath::Owners;

    use super::*;

    fn socket(fd: RawFd, name: &str, waiting: usize) -> DatagramSocket {
        let (inode, name) = (u32::try_from(fd).unwrap(), name.as_bytes().to_vec());
        DatagramSocket { pid: 1001, fd, inode, peer: 0, name, waiting, has_descriptors: false }
    }

    fn datagram(sender: &str, data: &str) -> Datagram {
        Datagram { sender: sender.into(), data: data.into() }
    }

    #[test]
    fn what_criu_saves_is_left_to_it() {
        let server = socket(3, "/server", 2);
        let all = [server.clone(), socket(4, "/client", 0)];
        let plain = [datagram("", "a"), datagram("", "b")];
        assert_eq!(queue(&server, &plain, &all), Saved::ByCriu);
        let Saved::Here(found, 0) = queue(&server, &[datagram("", "a"), datagram("", ""), datagram("", "b")], &all)
        else {
            panic!("CRIU has not written all")
        };
        assert_eq!(found.datagrams.len(), 3);
        let Saved::Here(found, 1) = queue(&server, &[datagram("/client", "a"), datagram("/gone", "b")], &all) else {
            panic!("one sender is gone")
        };
        assert_eq!(found.address.as_deref(), Some(&b"/server"[..]));
        assert_eq!(
            found.datagrams.iter().map(|sent| sent.sender).collect::<Vec<_>>(),
            [Some(Place { pid: 1001, fd: 4 }), None]
        );
        let with_descriptors = DatagramSocket { has_descriptors: true, ..server };
        assert!(matches!(queue(&with_descriptors, &[datagram("/client", "a")], &all), Saved::Not(1, _)));
    }

    #[test]
    fn one_that_is_connected_to_a_program_outside_is_left_to_criu() {
        let job = DatagramSocket { peer: 99, ..socket(3, "/job", 1) };
        assert_eq!(queue(&job, &[datagram("/supervisor", "a")], std::slice::from_ref(&job)), Saved::ByCriu);
    }

    #[test]
    fn one_without_an_address_is_reached_only_by_who_is_connected_to_it() {
        let server = socket(3, "", 1);
        let client = DatagramSocket { peer: 3, ..socket(4, "/client", 0) };
        let sent = [datagram("/client", "a")];
        let Saved::Here(found, 0) = queue(&server, &sent, &[client]) else { panic!("it is connected") };
        assert!(found.datagrams[0].is_connected && found.address.is_none());
        assert!(matches!(queue(&server, &sent, &[socket(4, "/client", 0)]), Saved::Not(1, _)));
    }

    #[test]
    fn what_waits_in_a_socketpair_is_sent_by_its_other_end() {
        let receiver = DatagramSocket { peer: 4, ..socket(3, "", 1) };
        let sender = DatagramSocket { peer: 3, ..socket(4, "", 0) };
        // Behind an empty one, which CRIU has not written.
        let sent = [datagram("", "one"), datagram("", "two")];
        let Saved::Here(found, 0) = queue(&receiver, &sent, &[receiver.clone(), sender]) else {
            panic!("it is a pair")
        };
        let by: Vec<_> = found.datagrams.iter().map(|sent| (sent.sender, sent.is_connected)).collect();
        assert_eq!(by, [(Some(Place { pid: 1001, fd: 4 }), true); 2]);
        // The other end is outside or closed.
        assert!(matches!(queue(&receiver, &sent, std::slice::from_ref(&receiver)), Saved::Not(0, _)));
        let complete = DatagramSocket { waiting: 2, ..receiver };
        assert_eq!(queue(&complete, &sent, std::slice::from_ref(&complete)), Saved::ByCriu);
    }

    /// As CRIU has restored it, and what is in a hostile image.
    #[test]
    fn a_queue_is_sent_again_by_its_senders() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let image = Beneath::root(dir.path(), Owners::Any).unwrap();
        let path = |name: &str| dir.path().join(name);
        let server = UnixDatagram::bind(path("server")).unwrap();
        let client = UnixDatagram::bind(path("client")).unwrap();
        let stranger = UnixDatagram::unbound().unwrap();
        stranger.send_to(b"one", path("server")).unwrap();
        let own = std::process::id().cast_signed();
        let place = |fd: RawFd| Place { pid: process::inner_pid(own).unwrap(), fd };
        let sent = |data: &[u8], sender| Sent { data: data.into(), sender, is_connected: false };
        let queue = Queue {
            place: place(server.as_raw_fd()),
            address: Some(path("server").as_os_str().as_bytes().to_vec()),
            datagrams: vec![sent(b"one", Some(place(client.as_raw_fd()))), sent(b"", None)],
        };
        let put = |queue: &Queue| {
            std::fs::write(dir.path().join(FILE), serde_json::to_vec(&[queue]).unwrap()).unwrap();
            put_back(own, &image);
        };
        for wrong in [place(-1), place(0), Place { pid: -7, fd: 0 }] {
            put(&Queue { place: wrong, ..queue.clone() });
            put(&Queue { datagrams: vec![sent(b"x", Some(wrong))], ..queue.clone() });
        }
        put(&Queue { address: Some(b"/nowhere".to_vec()), ..queue.clone() });
        let other = UnixDatagram::bind(path("other")).unwrap();
        put(&Queue { address: Some(path("other").as_os_str().as_bytes().to_vec()), ..queue.clone() });
        let mut connected = queue.clone();
        connected.datagrams[0].is_connected = true;
        client.connect(path("other")).unwrap();
        put(&connected);
        assert!(datagrams::take(&OwnedFd::from(other)).unwrap().is_empty(), "an image reaches nobody else");
        put(&queue);
        server.set_nonblocking(true).unwrap();
        let receive = || {
            let mut buffer = [0; 10];
            let (length, from) = server.recv_from(&mut buffer)?;
            io::Result::Ok((buffer[..length].to_vec(), from.as_pathname().map(Path::to_owned)))
        };
        assert_eq!(receive().unwrap(), (b"one".to_vec(), Some(path("client"))));
        assert_eq!(receive().unwrap(), (Vec::new(), None));
        assert!(receive().is_err());
    }
}
