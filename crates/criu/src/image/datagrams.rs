//! UNIX sockets for datagrams. CRIU (4.2) writes what waits in them without the address of the sender, and nothing from a datagram
//! without data on.

use std::collections::BTreeMap;

use super::descriptors::table_of;
use super::queues::{Waiting, waiting};
use super::{Error, FILES, Records, ids};
use crate::proto::DatagramFileEntry;
use rekindle_os::beneath::Beneath;

/// `SOCK_DGRAM`
const DATAGRAMS: u32 = 2;

/// A UNIX socket for datagrams that a process has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatagramSocket {
    /// The first process that has it, by its pid as it sees itself.
    pub pid: i32,
    /// Its descriptor there.
    pub fd: i32,
    /// Its inode.
    pub inode: u32,
    /// The inode of the socket that it is connected to; 0 if it is not.
    pub peer: u32,
    /// The path that it is bound to, or a zero byte and an abstract name; empty without one. Empty also if it cannot be reached so.
    pub name: Vec<u8>,
    /// How many datagrams the image has in its queue.
    pub waiting: usize,
    /// Whether there are descriptors among them.
    pub has_descriptors: bool,
}

/// Those of the image, also where CRIU has written nothing: it stops at a datagram without data.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn datagram_sockets(dir: &Beneath) -> Result<Vec<DatagramSocket>, Error> {
    let queues = waiting(&dir.join("sk-queues.img"))?;
    let entries: Vec<DatagramFileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let mut left: BTreeMap<u32, DatagramSocket> = BTreeMap::new();
    for DatagramFileEntry { id, unix } in entries {
        let Some(unix) = unix.filter(|unix| unix.kind == DATAGRAMS) else { continue };
        let Waiting { packets, has_descriptors } = queues.get(&id).copied().unwrap_or_default();
        let name = match unix.name.first() {
            Some(0) => unix.name,
            // A path can have zeros after it. One from a folder that is not known, or whose file is gone, leads nowhere.
            Some(b'/') if unix.deleted != Some(true) => {
                unix.name.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
            }
            _ => Vec::new(),
        };
        let (pid, fd, waiting) = (0, 0, packets);
        left.insert(id, DatagramSocket { pid, fd, inode: unix.ino, peer: unix.peer, name, waiting, has_descriptors });
    }
    let mut found = Vec::new();
    if left.is_empty() {
        return Ok(found);
    }
    for pid in ids(dir)?.processes {
        if !dir.join(format!("ids-{pid}.img")).is_there() {
            continue;
        }
        for entry in table_of(dir, pid)? {
            let socket = left.remove(&entry.id);
            found.extend(socket.map(|socket| DatagramSocket { pid, fd: entry.fd.cast_signed(), ..socket }));
        }
    }
    Ok(found)
}
