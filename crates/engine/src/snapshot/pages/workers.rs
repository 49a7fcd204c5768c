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

/// What one thread copies at a time: large enough that handing it over costs nothing, small enough for several to have some.
/// A pipe that a chunk fits into is within the limit for every user (pipe-max-size).
const CHUNK: u64 = 1 << 20;
/// Chunks being copied. CRIU takes at most 8 pipes of 3.2 MiB from a task before it writes them out (criu 4.2,
/// page-pipe.c).
const PIPES: usize = 32;
/// What a thread copies in one call, bytes: the kernel lets others have the processor in between, CRIU and the thread that
/// takes, for which everything waits.
const AT_ONCE: usize = 64 << 10;
/// How soon a waiting thread sees that it must stop, ms.
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
        // If it is gone, so much the better.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// One pages file of CRIU.
#[derive(Debug)]
pub(super) struct Fifo {
    pub(super) name: Name,
    pub(super) read: OwnedFd,
    /// Chosen when CRIU has written to it, or has closed it without.
    pub(super) spool: Option<Spool>,
    /// All was taken out, and CRIU has closed it.
    pub(super) ended: bool,
    /// Bytes taken out.
    pub(super) received: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) fifos: Vec<Fifo>,
    supply: Supply,
    /// The one that was read last.
    active: Option<usize>,
    /// From then on all is thrown away, so that CRIU does not wait: it learns of the failure when it asks.
    pub(super) failure: Option<Error>,
}

/// Until when the threads run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Until {
    /// Until they are stopped.
    Told,
    /// Until every FIFO that is in use is at its end.
    Drained,
    /// Not any more.
    Now,
}

/// A pipe that a chunk is in, or none.
type Pipe = (io::PipeReader, io::PipeWriter);

/// Between the thread that takes and those that copy.
#[derive(Debug, Default)]
struct Lanes {
    free: Vec<Pipe>,
    full: VecDeque<(Pipe, Chunk)>,
    /// Nothing more comes.
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
    /// From the start of the piece.
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
        // It stays readable: every thread sees it.
        let _ = self.wake.write(1);
        // With the lock, or one that is about to wait would miss it.
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

    /// The body of the thread that takes chunks out of FIFOs. CRIU waits until it has, and would otherwise wait for the
    /// copying threads: with 1 MiB for each FIFO, on two processors, a freeze took 0.63 s, and 0.49 s with this thread
    /// (1.5 GiB, kernel 6.18).
    pub(super) fn take_all(&self) {
        process::be_prompt();
        loop {
            // Those who copy give each pipe back, whatever happens.
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
                // What is left in it belongs nowhere; from here on all is thrown away, and one pipe is as good as many.
                empty(&pipe.0, &self.null);
            }
            self.lanes().free.push(pipe);
            self.lanes_changed.notify_all();
        }
    }

    /// Takes the next chunk out of the FIFO whose turn it is; `None` when there is nothing more to do.
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
        let ready: Vec<PollFlags> = fds.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty())).collect();
        let mut seen = false;
        for (n, ready) in open.into_iter().zip(ready).filter(|(_, ready)| !ready.is_empty()) {
            let Some(fifo) = state.fifos.get_mut(n) else { continue };
            seen = true;
            fifo.spool.get_or_insert_with(|| state.supply.take(n + 1));
            if ready.contains(PollFlags::POLLIN) {
                state.active = Some(n);
                break;
            }
            // Closed, and nothing is left in it.
            fifo.ended = true;
        }
        seen || !draining || unfinished
    }
}

impl State {
    /// Moves a chunk out of the active FIFO. `None`: there is nothing in it, or it was thrown away.
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
                // A file that ends where its room does needs no more: this is no error even if there was none.
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

/// Gives a pipe room for `bytes`, or as much as we may: beyond pipe-max-size it takes CAP_SYS_RESOURCE. With less it is
/// only slower.
pub(super) fn enlarge(pipe: impl AsFd, bytes: u64) {
    let mut size = i32::try_from(bytes).unwrap_or(i32::MAX);
    while size > 64 << 10 && fcntl(&pipe, FcntlArg::F_SETPIPE_SZ(size)).is_err() {
        size /= 2;
    }
}
