//! The process that copies.
//!
//! One thread does all: while a copy is under way it begins the next chunks and looks for requests in turn.

mod course;
mod gpus;
mod kernel;
mod known;
mod mapped;
mod names;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};

use super::Placed;
use super::wire::{Answer, Ask};
use crate::GpuUuid;
use course::{Copy, Done};
use gpus::{Gpus, Piece};
use mapped::Mapped;

/// How long nothing is begun if no chunk has ended: pieces of 16 MiB, the smallest, take 0.3 ms each, and the GPU has several.
const PAUSE: Duration = Duration::from_micros(300);

/// Serves requests until the socket ends. Returns why it ended, if it was for another reason.
///
/// # Errors
/// In words: there is no driver, or the socket failed.
pub fn serve(socket: &OwnedFd) -> Result<(), String> {
    let mut server = Server { gpus: None, files: Vec::new(), copy: None };
    loop {
        let (is_under_way, has_moved) = server.go_on();
        if is_under_way
            && !has_request(socket, if has_moved { Duration::ZERO } else { PAUSE })
                .map_err(|error| error.to_string())?
        {
            continue;
        }
        let Some((ask, file)) = Ask::receive(socket.as_fd()).map_err(|error| error.to_string())? else { return Ok(()) };
        let mut placed = Vec::new();
        let result = match ask {
            Ask::Gpu(uuid, names) => server.gpu(uuid, names).map(|()| [0; 3]),
            Ask::File(bytes) => server.file(file, bytes).map(|registered| [registered, 0, 0]),
            Ask::Begin(way, file, reused) => {
                // What is left of one that nobody asked for ends first.
                server.copy = None;
                server.copy = Some(Copy::begin(way, file, reused, &mut server.files));
                continue;
            }
            Ask::Piece(offset, bytes) => {
                server.piece(file, offset, bytes);
                continue;
            }
            Ask::Make(uuid, offset, bytes) => {
                server.make(uuid, offset, bytes);
                continue;
            }
            Ask::End => {
                server.copy.iter_mut().for_each(Copy::all_were_sent);
                continue;
            }
            Ask::Pause => {
                server.pause();
                continue;
            }
            Ask::Resume => {
                server.copy.iter_mut().for_each(Copy::resume);
                continue;
            }
            Ask::Leave => server.leave().map(|[bytes, room]| [bytes, room, 0]),
            Ask::Finish(is_right) => server.finish(is_right).map(|(done, all)| {
                placed = all;
                done
            }),
            Ask::Forget => {
                server.forget();
                continue;
            }
        };
        let answer = match result {
            Ok(numbers) => Answer { numbers, why: None },
            Err(why) => Answer { numbers: [0; 3], why: Some(why) },
        };
        answer.send(socket.as_fd(), None).map_err(|error| error.to_string())?;
        for Placed { gpu, memory } in placed {
            let memory = memory.as_ref().map(AsFd::as_fd);
            Answer::piece(gpu).send(socket.as_fd(), memory).map_err(|error| error.to_string())?;
        }
    }
}

/// Whether there is a request, or the socket has ended.
fn has_request(socket: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let mut sockets = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    match ppoll(&mut sockets, Some(limit.into()), None) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

struct Server {
    /// First, because its threads use the files.
    copy: Option<Copy>,
    files: Vec<Mapped>,
    gpus: Option<Gpus>,
}

impl Server {
    fn gpus(&mut self) -> Result<&mut Gpus, String> {
        match &mut self.gpus {
            Some(gpus) => Ok(gpus),
            none => Ok(none.insert(Gpus::new()?)),
        }
    }

    fn gpu(&mut self, uuid: GpuUuid, names: bool) -> Result<(), String> {
        let gpus = self.gpus()?;
        let device = gpus.device_of(uuid)?;
        gpus.enter(device)?;
        if names { gpus.learn_to_name(device) } else { Ok(()) }
    }

    fn file(&mut self, file: Option<OwnedFd>, bytes: u64) -> Result<u64, String> {
        let file = File::from(file.ok_or("no file came with the request")?);
        let meta = file.metadata().map_err(|error| error.to_string())?;
        let key = [meta.dev(), meta.ino()];
        if self.copy.is_some() {
            return Err("a copy is under way".into());
        }
        if bytes > mapped::MOST {
            return Err(format!("a file of {bytes} bytes is too large: {} are the most", mapped::MOST));
        }
        if bytes > meta.len() {
            return Err(format!("the file has {} bytes and not {bytes}", meta.len()));
        }
        self.gpus()?;
        self.forget();
        let Some(gpus) = &mut self.gpus else { return Err("no GPU".into()) };
        let at = match self.files.iter().position(|known| known.key == key) {
            Some(at) => at,
            None => {
                self.files.push(Mapped::new(file, key)?);
                self.files.len() - 1
            }
        };
        let Some(mapped) = self.files.get_mut(at) else { return Err("no such file".into()) };
        mapped.set_length(gpus, bytes);
        mapped.register(gpus);
        mapped.map_all()?;
        Ok(mapped.registered())
    }

    /// Forgets files that do not exist any more. While a copy is under way, its file is not forgotten.
    fn forget(&mut self) {
        let (Some(gpus), None) = (&mut self.gpus, &self.copy) else { return };
        self.files.retain_mut(|known| {
            let is_there = known.file.metadata().is_ok_and(|meta| meta.nlink() > 0);
            if !is_there {
                known.set_length(gpus, 0);
            }
            is_there
        });
    }

    fn piece(&mut self, memory: Option<OwnedFd>, offset: u64, bytes: u64) {
        self.add(|server| {
            let memory = memory.ok_or("no memory came with the request")?;
            server.gpus()?.import(&memory, offset, bytes)
        });
    }

    fn make(&mut self, gpu: GpuUuid, offset: u64, bytes: u64) {
        self.add(|server| {
            let gpus = server.gpus()?;
            let device = gpus.device_of(gpu)?;
            gpus.make(device, offset, bytes)
        });
    }

    /// Adds a piece. A failure is told when the copy is asked for.
    fn add(&mut self, piece: impl FnOnce(&mut Server) -> Result<Piece, String>) {
        let Some(mut copy) = self.copy.take() else { return };
        copy.or_fails(|copy| {
            let piece = piece(self)?;
            let Server { gpus: Some(gpus), files, .. } = self else { return Err("no GPU".into()) };
            copy.add(gpus, files.iter_mut().find(|known| known.key == copy.file), piece)
        });
        self.copy = Some(copy);
    }

    /// Continues the copy. Returns whether there is one, and whether anything was begun or has ended.
    fn go_on(&mut self) -> (bool, bool) {
        let Server { gpus: Some(gpus), files, copy: Some(copy) } = self else { return (false, false) };
        let has_moved = copy.go_on(gpus, files);
        (copy.is_under_way(), has_moved)
    }

    fn pause(&mut self) {
        if let Server { gpus: Some(gpus), copy: Some(copy), .. } = self {
            copy.pause(gpus);
        }
    }

    /// Copies so much that the job may run. Bytes that are in room on the GPU now, and the size of that room.
    fn leave(&mut self) -> Result<[u64; 2], String> {
        let copy = self.copy.as_mut().ok_or("no copy has begun")?;
        match &mut self.gpus {
            Some(gpus) => copy.leave(gpus, &self.files),
            None => Err(copy.why()),
        }
    }

    /// Copies the rest. If the file has what the memory had at the beginning, its names are known from now on, and the GPU of
    /// each piece is told. Otherwise nobody wants the file, and the job may need the memory: the rest is given up. That fails if the copy or its GPU had failed: a context may be of no use any more.
    fn finish(&mut self, is_right: bool) -> Result<(Done, Vec<Placed>), String> {
        let mut copy = self.copy.take().ok_or("no copy has begun")?;
        let Some(gpus) = &mut self.gpus else { return Err(copy.why()) };
        if !is_right {
            return copy.give_up(gpus, &self.files).map(|()| ([0; 3], Vec::new()));
        }
        let done = copy.finish(gpus, &self.files)?;
        copy.know(&mut self.files);
        let placed =
            copy.placed().into_iter().map(|(device, memory)| Ok(Placed { gpu: gpus.uuid_of(device)?, memory }));
        Ok((done, placed.collect::<Result<_, String>>()?))
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
