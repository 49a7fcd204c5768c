//! The threads that empty the FIFOs.
//!
//! One thread waits for a readable FIFO, moves a chunk of page references from it into a free pipe, records where in
//! the file the chunk belongs, and repeats; the others copy chunks to their place. So CRIU can write one batch of a
//! task's pages while the previous one is copied. This also works if a FIFO cannot be that large: more than
//! pipe-max-size needs CAP_SYS_RESOURCE.
//!
//! Nothing here can hang on CRIU: only poll waits, and it is woken to stop.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::spool::{Piece, Spool};
use super::supply::Supply;
use super::{Error, is_full};
use rekindle_os::pages::splice;
use rekindle_os::process;

/// Bytes that one thread copies at a time: large enough to make the hand-over cheap, small enough to keep several
/// threads busy. A pipe for a chunk is within the limit for every user (pipe-max-size).
const CHUNK: u64 = 1 << 20;
/// Chunks being copied. CRIU takes at most 8 pipes of 3.2 MiB from a task before it writes them out (criu 4.2,
/// page-pipe.c).
const PIPES: usize = 32;
/// Bytes that a thread copies in one call. In between the kernel lets others use the processor: CRIU, and the thread
/// that takes chunks, for which everything else waits.
const AT_ONCE: usize = 64 << 10;
/// How often a waiting thread checks whether it must stop, ms.
const LOOK: u16 = 10;

/// The name of a FIFO, removed when this is dropped.
#[derive(Debug)]
pub(super) struct Name(PathBuf);

impl Name {
    pub(super) fn of(path: PathBuf) -> Name {
        Name(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // It does not matter if it is gone already.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// One pages file of CRIU.
#[derive(Debug)]
pub(super) struct Fifo {
    pub(super) name: Name,
    pub(super) read: OwnedFd,
    /// Chosen when CRIU has written to the FIFO, or has closed it without.
    pub(super) spool: Option<Spool>,
    /// Everything was taken out, and CRIU has closed it.
    pub(super) ended: bool,
    /// Bytes taken out.
    pub(super) received: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) fifos: Vec<Fifo>,
    supply: Supply,
    /// The FIFO that was read last.
    active: Option<usize>,
    /// After a failure all data is discarded, so that CRIU does not block. CRIU learns of the failure when it asks.
    pub(super) failure: Option<Error>,
}

/// How long the threads run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Until {
    /// Until they are stopped.
    Told,
    /// Until CRIU has closed every FIFO in use and all data was taken.
    Drained,
    /// They stop at once.
    Now,
}

/// A pipe; it contains one chunk or nothing.
type Pipe = (io::PipeReader, io::PipeWriter);

/// The queues between the thread that takes chunks and those that copy them.
#[derive(Debug, Default)]
struct Lanes {
    free: Vec<Pipe>,
    full: VecDeque<(Pipe, Chunk)>,
    /// No more chunks will come.
    closed: bool,
}

/// What the threads and their owner share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    lanes: Mutex<Lanes>,
    lanes_changed: Condvar,
    until: AtomicU8,
    wake: EventFd,
    null: File,
}

/// A part of a pages file that is being copied, and where it belongs.
#[derive(Debug)]
struct Chunk {
    path: PathBuf,
    piece: Arc<Piece>,
    /// Offset in the piece.
    at: usize,
    length: usize,
}

impl Shared {
    pub(super) fn new(fifos: Vec<Fifo>, supply: Supply) -> io::Result<Shared> {
        let pipe = || -> io::Result<Pipe> {
            let (from, to) = io::pipe()?;
            enlarge(&to, CHUNK);
            Ok((from, to))
        };
        let free = (0..PIPES).map(|_| pipe()).collect::<io::Result<_>>()?;
        Ok(Shared {
            lanes: Mutex::new(Lanes { free, ..Lanes::default() }),
            lanes_changed: Condvar::new(),
            state: Mutex::new(State { fifos, supply, active: None, failure: None }),
            until: AtomicU8::new(Until::Told as u8),
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            null: File::options().write(true).open("/dev/null")?,
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn go_on(&self, until: Until) {
        self.until.fetch_max(until as u8, Ordering::SeqCst);
        // The byte is never read, so every thread sees it.
        let _ = self.wake.write(1);
        // The lock is taken, because a thread that is about to wait would miss the signal.
        drop(self.lanes());
        self.lanes_changed.notify_all();
    }

    fn is(&self, until: Until) -> bool {
        self.until.load(Ordering::SeqCst) >= until as u8
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `found` finds something.
    fn wait_for<T>(&self, mut found: impl FnMut(&mut Lanes) -> Option<T>) -> T {
        let mut lanes = self.lanes();
        loop {
            if let Some(found) = found(&mut lanes) {
                return found;
            }
            lanes = self.lanes_changed.wait(lanes).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The body of the thread that takes chunks out of FIFOs. CRIU waits until a chunk is taken; without this thread it
    /// would wait for the copies too. With 1 MiB for each FIFO, on two processors, a freeze took 0.63 s without it and
    /// 0.49 s with it (1.5 GiB, kernel 6.18).
    pub(super) fn take_all(&self) {
        process::be_prompt();
        loop {
            // The copying threads return each pipe, whatever happens.
            let free = |lanes: &mut Lanes| match self.is(Until::Now) {
                true => Some(None),
                false => lanes.free.pop().map(Some),
            };
            let Some(pipe) = self.wait_for(free) else { break };
            let Some(chunk) = self.next(&pipe.1) else { break };
            self.lanes().full.push_back((pipe, chunk));
            self.lanes_changed.notify_all();
        }
        self.lanes().closed = true;
        self.lanes_changed.notify_all();
    }

    /// The body of a thread that copies.
    pub(super) fn copy_all(&self) {
        while let Some((pipe, chunk)) = self.wait_for(|lanes| match lanes.full.pop_front() {
            Some(full) => Some(Some(full)),
            None => lanes.closed.then_some(None),
        }) {
            if let Err(source) = copy(&pipe.0, &chunk) {
                self.lock().failure.get_or_insert_with(|| receive_error(&chunk, source));
                // What is left in it is lost. From here on everything is discarded, so one pipe is enough.
                empty(&pipe.0, &self.null);
            }
            self.lanes().free.push(pipe);
            self.lanes_changed.notify_all();
        }
    }

    /// Takes the next chunk out of the FIFO whose turn it is; `None` when no more will come.
    fn next(&self, to: impl AsFd) -> Option<Chunk> {
        let mut state = self.lock();
        loop {
            if self.is(Until::Now) {
                return None;
            }
            match state.take(&to, &self.null) {
                Ok(Some(chunk)) => return Some(chunk),
                Ok(None) => {}
                Err(error) => {
                    state.failure.get_or_insert(error);
                }
            }
            if state.active.is_none() && !self.wait(&mut state) {
                return None;
            }
        }
    }

    /// Waits until a FIFO can be read; `false` when none will be.
    fn wait(&self, state: &mut State) -> bool {
        let draining = self.is(Until::Drained);
        // A FIFO that CRIU has not opened yet is neither readable nor hung up.
        let open: Vec<usize> = (0..).zip(&state.fifos).filter(|(_, f)| !f.ended).map(|(n, _)| n).collect();
        let fds = state.fifos.iter().filter(|f| !f.ended).map(|f| PollFd::new(f.read.as_fd(), PollFlags::POLLIN));
        let mut fds: Vec<PollFd<'_>> = fds.collect();
        let unfinished = state.fifos.iter().any(|f| f.spool.is_some() && !f.ended);
        let timeout = match (draining, unfinished) {
            (false, _) => {
                fds.push(PollFd::new(self.wake.as_fd(), PollFlags::POLLIN));
                PollTimeout::NONE
            }
            (true, true) => PollTimeout::from(LOOK),
            (true, false) => PollTimeout::ZERO,
        };
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                let path = state.fifos.first().map(|f| f.name.path().to_path_buf()).unwrap_or_default();
                state.failure.get_or_insert_with(|| Error::Receive { path, source: error.into() });
                return false;
            }
        }
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        let ready = open.into_iter().zip(&fds).find(|(_, fd)| is_ready(fd)).map(|(n, _)| n);
        if let Some(n) = ready
            && let Some(fifo) = state.fifos.get_mut(n)
        {
            fifo.spool.get_or_insert_with(|| state.supply.take(n + 1));
            // Reads even if poll(2) only says that the pipe is closed. poll(2) checks the content before the writers,
            // without the pipe's lock, so data written between the two is still in the pipe.
            state.active = Some(n);
        }
        ready.is_some() || !draining || unfinished
    }
}

impl State {
    /// Moves a chunk out of the active FIFO. `None` if the FIFO is empty, or the data was discarded.
    fn take(&mut self, to: impl AsFd, null: &File) -> Result<Option<Chunk>, Error> {
        let Some(n) = self.active else { return Ok(None) };
        let Some(fifo) = self.fifos.get_mut(n) else { return Ok(None) };
        let spool = fifo.spool.as_mut().filter(|_| self.failure.is_none());
        let place = spool.map(|spool| spool.piece_at(fifo.received));
        let (place, to, error) = match place {
            Some(Ok(place)) => (Some(place), to.as_fd(), None),
            Some(Err(error)) => (None, null.as_fd(), Some(error)),
            None => (None, null.as_fd(), None),
        };
        let room = place.as_ref().map_or(CHUNK, |(_, left)| CHUNK.min(*left));
        let moved = splice(fifo.read.as_fd(), to, usize::try_from(room).unwrap_or(usize::MAX));
        let length = match moved {
            Ok(0) => {
                fifo.ended = true;
                self.active = None;
                // A file that ends exactly at the end of its room needs no more: this is no error even if there is no
                // more room.
                return Ok(None);
            }
            Ok(length) => length,
            Err(e) => {
                self.active = None;
                return match e.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                    _ => {
                        fifo.ended = true;
                        Err(Error::Receive { path: fifo.name.path().into(), source: e })
                    }
                };
            }
        };
        let begin = fifo.received;
        fifo.received += length as u64;
        if let Some(error) = error {
            return Err(error);
        }
        Ok(place.map(|(piece, _)| {
            let at = usize::try_from(begin - piece.offset).unwrap_or(usize::MAX);
            Chunk { path: fifo.name.path().into(), piece, at, length }
        }))
    }
}

/// Copies a chunk from the thread's own pipe to its place.
fn copy(from: &io::PipeReader, chunk: &Chunk) -> io::Result<()> {
    if !chunk.piece.ready {
        chunk.piece.mapping.populate(chunk.at, chunk.length)?;
    }
    let mut done = 0;
    while done < chunk.length {
        match chunk.piece.mapping.read_from(from, chunk.at + done, AT_ONCE.min(chunk.length - done)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => done += got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn receive_error(chunk: &Chunk, source: io::Error) -> Error {
    let path = chunk.path.clone();
    match is_full(&source) {
        true => Error::Full { path, wanted: bytesize::ByteSize(chunk.length as u64) },
        false => Error::Receive { path, source },
    }
}

/// Discards the content of the pipe.
fn empty(pipe: &io::PipeReader, null: &File) {
    let some = usize::try_from(CHUNK).unwrap_or(usize::MAX);
    while splice(pipe.as_fd(), null.as_fd(), some).is_ok_and(|moved| moved > 0) {}
}

/// Gives a pipe a capacity of `bytes`, or less without CAP_SYS_RESOURCE (beyond pipe-max-size). A smaller pipe is only
/// slower.
pub(super) fn enlarge(pipe: impl AsFd, bytes: u64) {
    let mut size = i32::try_from(bytes).unwrap_or(i32::MAX);
    while size > 64 << 10 && fcntl(&pipe, FcntlArg::F_SETPIPE_SZ(size)).is_err() {
        size /= 2;
    }
}
