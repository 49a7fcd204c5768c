//! UNIX sockets that CRIU (4.2) dumps and cannot restore.
//!
//! If a job has called connect(2) on a stream socket of another program, and that program has not called accept(2) yet,
//! the image says that the job is connected to the listening socket, which is not in the image ("FATAL: Peer 123
//! unresolved for 124", criu/sk-unix.c). Once the connection is accepted, CRIU itself refuses the dump.

use super::queues::holders;
use super::{Error, FILES, Records};
use crate::proto::QueuedFileEntry;
use rekindle_os::beneath::Beneath;

/// `USK_CALLBACK` and `USK_INHERIT`: another component restores it.
const NOT_BY_CRIU: u32 = 1 << 2 | 1 << 3;

/// A socket whose other end is not in the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dangling {
    /// Its inode.
    pub inode: u32,
    /// The first process that has it, by pid as it sees itself. `None` if the socket is in flight between processes.
    pub process: Option<i32>,
}

/// The sockets whose other end is not in the image.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn dangling_sockets(dir: &Beneath) -> Result<Vec<Dangling>, Error> {
    let files: Vec<QueuedFileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let is_there = |ino: u32| files.iter().filter_map(|file| file.unix).any(|socket| socket.ino == ino);
    let found = files.iter().filter_map(|file| {
        let socket = file.unix.filter(|it| it.peer != 0 && it.marks & NOT_BY_CRIU == 0)?;
        (!is_there(socket.peer)).then_some((file.id, socket.ino))
    });
    let found: Vec<(u32, u32)> = found.collect();
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let holders = holders(dir)?;
    let process = |id: u32| holders.get(&id).and_then(|pids| pids.first().copied());
    Ok(found.into_iter().map(|(id, inode)| Dangling { inode, process: process(id) }).collect())
}
