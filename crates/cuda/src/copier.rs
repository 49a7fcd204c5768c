//! Copies memory that stays on the GPU to files and back, in a process of its own.
//!
//! The process ([`serve()`]) has contexts of its own on the GPUs, which the supervisor must not have: it would have the
//! devices open, and a fault of the driver would end it. It is started for the first snapshot with such memory and stays
//! until the job is suspended ([`Copier::end`]): a context takes 0.2 s to make and 0.5 GiB of GPU memory, and registering the
//! host memory of a file takes 1.4 s for 40 GiB (H100, driver 580). Then a copy runs at the full rate of the bus.
//!
//! What has not changed since an earlier copy is not copied again: the GPU computes hashes that show it (`serve/names.rs`).
//!
//! At a restore it can make the memory itself and fill it while CRIU works ([`Copier::make`]): the processes, which do not
//! exist yet, get it afterwards.
//!
//! A job need not wait for all of a copy out: [`Copying::leave`] moves what is not copied yet to room on the same GPU, if there
//! is any, and the rest is copied from there while the job runs (`serve/course.rs`).
//!
//! Invariants: the process has memory of the job only during a copy, and until the job runs. It has room of its own from then
//! to the end of the copy. If it dies, or does not answer in time, the copy has failed, nothing else, and the next one starts
//! another process. It ends with the supervisor, and the GPU's memory that it had is free then.

mod serve;
mod wire;

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::sockopt::{ReceiveTimeout, SendTimeout};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::GpuUuid;
use crate::sharing::Staying;
use rekindle_os::pages;
use rekindle_os::spawn::{Child, Spawn};
pub use serve::serve;
use wire::{Answer, Ask};

/// The hidden command of `rekindle` that runs [`serve()`].
pub const COMMAND: &str = "copy-gpu-memory";

/// Time limit for contexts and for registering memory, and for a copy beside the time for its bytes.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the process may take to end once it is killed: with 0.5 GiB of contexts and 40 GiB registered 1 s.
const LAST: Duration = Duration::from_secs(10);
/// How long a copy that is given up may take to end: a chunk to a slow disk takes a second. Then the process is ended.
const TO_GIVE_UP: Duration = Duration::from_secs(if cfg!(test) { 10 } else { 3 });
/// Between two looks whether all pieces are sent.
const PAUSE: Duration = Duration::from_micros(200);
/// Milliseconds between two looks whether a copy is cancelled.
const LOOK: u8 = 50;
/// A copy at less than this rate, in bytes per microsecond, is given up: memory that is not registered is copied at 5 GB/s.
const SLOWEST: u64 = 1000;
/// The same for a file on a disk: once too much of it is not written yet, the copy is as fast as the disk.
const SLOWEST_DISK: u64 = 100;

/// Why memory was not copied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process could not be started.
    #[error("cannot start the process that copies GPU memory")]
    Start(#[source] io::Error),
    /// It has ended or does not answer.
    #[error("the process that copies GPU memory does not answer ({doing})")]
    Gone {
        /// What it should have done.
        doing: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It could not do what it was asked for.
    #[error("the process that copies GPU memory cannot {doing}: {why}")]
    Refused {
        /// What it should have done.
        doing: &'static str,
        /// Its words.
        why: String,
    },
    /// The file could not be looked at.
    #[error("cannot look at the file for GPU memory")]
    File(#[source] io::Error),
    /// It was cancelled.
    #[error("the copy of GPU memory was cancelled")]
    Cancelled,
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the GPU to the file.
    Out,
    /// From the file to the GPU.
    In,
}

/// What a copy did.
#[derive(Debug)]
pub struct Copied {
    /// Bytes.
    pub bytes: u64,
    /// How many of them were in a file already, and did not come from the GPU.
    pub same: u64,
    /// From the first piece to the last byte.
    pub took: Duration,
    /// Its pieces, in the order in which they were named.
    pub pieces: Vec<Placed>,
}

/// A piece that was copied.
#[derive(Debug)]
pub struct Placed {
    /// The GPU that it is on.
    pub gpu: GpuUuid,
    /// Its descriptor, if it was made for the copy. Once that is closed, the memory is free, unless a process has imported it.
    pub memory: Option<OwnedFd>,
}

/// What is left of a copy when the job may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// Bytes that are yet to be copied, from room on the GPU or from another file.
    pub bytes: u64,
    /// Bytes of that room.
    pub room: u64,
}

/// What a copy out takes from files that were copied to before, and not from the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reuse {
    /// One of so many copies takes nothing, also not if nothing has changed. With 1 none does.
    pub full_every: u32,
    /// Whether it takes what another file has. That is copied by the processor once [`Copying::leave`] is called.
    pub from_others: bool,
}

impl Reuse {
    /// All comes from the GPU.
    pub const NOTHING: Reuse = Reuse { full_every: 1, from_others: false };
}

/// The same, for one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reused {
    Nothing,
    /// Only what the file itself has.
    File,
    Files,
}

/// The process, started when it is needed.
#[derive(Debug, Default)]
pub struct Copier {
    running: Mutex<Option<Running>>,
    /// The GPUs could not compare: the process would have to be ended each time.
    cannot_compare: AtomicBool,
    /// Processes could not use memory that was made for them.
    cannot_make: AtomicBool,
}

#[derive(Debug)]
struct Running {
    child: Child,
    socket: OwnedFd,
    /// Copies out that it has begun.
    copies: Cell<u32>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.signal(libc::SIGKILL);
        // A GPU that has failed may hold it in the driver, and a job would be frozen meanwhile. It is reaped with us then.
        let deadline = Instant::now() + LAST;
        while Instant::now() < deadline {
            if self.child.has_ended().unwrap_or(true) {
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Running {
    fn start() -> Result<Running, Error> {
        let start = || -> io::Result<Running> {
            let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
            // A GPU that has failed may hold the process in the driver.
            setsockopt(&ours, SendTimeout, &TimeVal::seconds(PATIENCE.as_secs().cast_signed()))?;
            let null = |write: bool| File::options().read(!write).write(write).open("/dev/null");
            // CUDA_VISIBLE_DEVICES would hide GPUs of the job.
            let hidden = ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD"];
            let environment = std::env::vars_os().filter(|(name, _)| !hidden.iter().any(|hidden| name == hidden));
            // The driver would write compiled kernels to the home folder.
            let environment = environment.chain([("CUDA_CACHE_DISABLE".into(), "1".into())]);
            // This program, even if its file was replaced meanwhile.
            let child = Spawn::new(Path::new("/proc/self/exe"), [COMMAND])
                .and_then(|spawn| spawn.environment(environment))
                .and_then(|spawn| spawn.directory(Path::new("/")))
                .map_err(io::Error::other)?
                .fd(theirs, 0)
                .fd(null(true)?.into(), 1)
                .fd(null(true)?.into(), 2)
                .session()
                .dies_with_us()
                .start()
                .map_err(io::Error::other)?;
            Ok(Running { child, socket: ours, copies: Cell::new(0) })
        };
        start().map_err(Error::Start)
    }

    fn send(&self, ask: &Ask, file: Option<BorrowedFd<'_>>, doing: &'static str) -> Result<(), Error> {
        ask.send(self.socket.as_fd(), file).map_err(|source| Error::Gone { doing, source })
    }

    /// Waits for the answer. A request that is cancelled is answered all the same: the process must be ended.
    fn answer_unless(
        &self,
        limit: Duration,
        doing: &'static str,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Answer, Error> {
        let until = Instant::now() + limit;
        let is_there = || {
            let mut sockets = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            // Where it cannot be waited for, `answer` says why.
            poll(&mut sockets, LOOK).map_or_else(|errno| errno != Errno::EINTR, |ready| ready > 0)
        };
        while !is_there() && Instant::now() < until {
            if cancelled() {
                return Err(Error::Cancelled);
            }
        }
        self.answer(until.saturating_duration_since(Instant::now()), doing)
    }

    fn answer(&self, limit: Duration, doing: &'static str) -> Result<Answer, Error> {
        self.answer_with_memory(limit, doing).map(|(answer, _)| answer)
    }

    fn answer_with_memory(&self, limit: Duration, doing: &'static str) -> Result<(Answer, Option<OwnedFd>), Error> {
        let gone = |source| Error::Gone { doing, source };
        let limit = TimeVal::milliseconds(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX).max(1));
        setsockopt(&self.socket, ReceiveTimeout, &limit).map_err(|errno| gone(errno.into()))?;
        let (answer, memory) = Answer::receive(self.socket.as_fd()).map_err(gone)?;
        match answer.why {
            None => Ok((answer, memory)),
            Some(why) => Err(Error::Refused { doing, why }),
        }
    }
}

impl Copier {
    /// Makes it ready for these GPUs; for those it does not know yet this takes 0.2 s each. If it `compares`, the GPUs are also
    /// made ready to compare. Returns why they cannot, once; all is copied then.
    ///
    /// # Errors
    /// When the process cannot be started, or cannot use one of the GPUs.
    pub fn prepare(&self, gpus: &[GpuUuid], compares: bool) -> Result<Option<Error>, Error> {
        let ready = |compares: bool| {
            let doing = "use the GPU";
            self.with(|running| {
                gpus.iter().try_for_each(|gpu| {
                    running.send(&Ask::gpu(*gpu, compares), None, doing)?;
                    running.answer(PATIENCE, doing).map(drop)
                })
            })
        };
        let compares = compares && !self.cannot_compare.load(Ordering::Relaxed);
        match ready(compares) {
            Err(error) if compares => {
                ready(false)?;
                self.cannot_compare.store(true, Ordering::Relaxed);
                Ok(Some(error))
            }
            outcome => outcome.map(|()| None),
        }
    }

    /// Makes it ready to copy to and from the first `bytes` of this file, which must be there. Files that do not exist any
    /// more are forgotten. Memory beyond `bytes` is no longer registered afterwards: before a file is cut, this must be
    /// called. Returns the bytes that are registered, which are copied at the full rate.
    ///
    /// # Errors
    /// When the file cannot be mapped.
    pub fn file(&self, file: &File, bytes: u64) -> Result<u64, Error> {
        let doing = "map the file";
        self.with(|running| {
            running.send(&Ask::file(bytes), Some(file.as_fd()), doing)?;
            Ok(running.answer(PATIENCE, doing)?.numbers[0])
        })
    }

    /// Has it forget files that do not exist any more: their memory is not free before. Does not wait for that, nor for what
    /// the process is doing; whoever works with it tells it again. Returns whether there is a process that was told.
    pub fn forget(&self) -> bool {
        // A process that has ended has forgotten all.
        let slot = self.running.try_lock().ok();
        slot.and_then(|slot| slot.as_ref().map(|running| running.send(&Ask::Forget, None, "forget files").is_ok()))
            .unwrap_or(false)
    }

    /// Ends the process, so that it has nothing on the GPUs: the next one who needs it starts another. Call it only while
    /// nothing is copied. Waits until it has ended, 10 s at most.
    pub fn end(&self) {
        *self.lock() = None;
    }

    /// Begins to copy pieces, each to or from its offset in a file that was named before. What the process has copied to its
    /// files before need not be copied from the GPU again, as far as `reuse` allows. Does not wait until the process has all
    /// pieces: it needs 0.15 ms to import one.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn begin<'p>(
        &self,
        way: Way,
        file: &File,
        reuse: Reuse,
        pieces: impl IntoIterator<Item = (u64, &'p Staying)>,
    ) -> Result<Copying<'_>, Error> {
        let asked = |(offset, piece): (u64, &'p Staying)| Asked {
            ask: Ask::piece(offset, piece.bytes),
            bytes: piece.bytes,
            memory: Some(Arc::clone(&piece.memory)),
        };
        self.begin_with(way, file, reuse, pieces.into_iter().map(asked).collect())
    }

    /// Begins to make memory and to fill it from a file that was named before: pieces on these GPUs, each from its offset and of
    /// so many bytes. [`Copying::finish`] has their descriptors. If it fails, all is free again.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn make(
        &self,
        file: &File,
        pieces: impl IntoIterator<Item = (GpuUuid, u64, u64)>,
    ) -> Result<Copying<'_>, Error> {
        let asked = |(gpu, offset, bytes)| Asked { ask: Ask::make(gpu, offset, bytes), bytes, memory: None };
        self.begin_with(Way::In, file, Reuse::NOTHING, pieces.into_iter().map(asked).collect())
    }

    fn begin_with(&self, way: Way, file: &File, reuse: Reuse, pieces: Vec<Asked>) -> Result<Copying<'_>, Error> {
        let doing = "copy";
        let meta = file.metadata().map_err(Error::File)?;
        let is_in_memory = pages::is_in_memory(file).map_err(Error::File)?;
        let bytes = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.bytes));
        let count = pieces.len();
        let nobody_wants_it = Arc::new(AtomicBool::new(false));
        let sending = self.with(|running| {
            let copies = running.copies.get();
            let reused = match way == Way::Out && copies % reuse.full_every.max(1) != 0 {
                false => Reused::Nothing,
                true if reuse.from_others => Reused::Files,
                true => Reused::File,
            };
            running.copies.set(copies.wrapping_add(u32::from(way == Way::Out)));
            running.send(&Ask::begin(way, meta.dev(), meta.ino(), reused), None, doing)?;
            let gone = |source| Error::Gone { doing, source };
            let socket = running.socket.try_clone().map_err(gone)?;
            let nobody = Arc::clone(&nobody_wants_it);
            let send = move || -> io::Result<()> {
                for Asked { ask, memory, .. } in pieces {
                    if nobody.load(Ordering::Relaxed) {
                        break;
                    }
                    ask.send(socket.as_fd(), memory.as_ref().map(|memory| memory.as_fd()))?;
                }
                Ask::end().send(socket.as_fd(), None)
            };
            std::thread::Builder::new().spawn(send).map_err(gone)
        })?;
        let limit = time_limit(bytes, is_in_memory);
        let begun = Instant::now();
        Ok(Copying {
            copier: self,
            sending: Some(sending),
            nobody_wants_it,
            pieces: count,
            bytes,
            begun,
            limit,
            is_left: false,
            is_over: false,
        })
    }

    /// Whether memory can be made before its processes exist: this is worth while if the process runs already.
    #[must_use]
    pub fn can_make(&self) -> bool {
        self.pid().is_some() && !self.cannot_make.load(Ordering::Relaxed)
    }

    /// No more of it from now on: the processes could not use it.
    pub fn makes_no_more(&self) {
        self.cannot_make.store(true, Ordering::Relaxed);
    }

    /// Whether the process runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.lock().as_ref().map(|running| running.child.pid())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works with the process. After a failure its state is unknown, and it is ended.
    fn with<T>(&self, work: impl FnOnce(&Running) -> Result<T, Error>) -> Result<T, Error> {
        let mut slot = self.lock();
        if slot.as_ref().is_some_and(|running| running.child.has_ended().unwrap_or(true)) {
            *slot = None;
        }
        let running = match &mut *slot {
            Some(running) => running,
            empty => empty.insert(Running::start()?),
        };
        let result = work(running);
        if result.is_err() {
            *slot = None;
        }
        result
    }
}

/// A piece that the process is asked to copy.
struct Asked {
    ask: Ask,
    bytes: u64,
    memory: Option<Arc<OwnedFd>>,
}

/// A copy under way. If this is dropped, it is given up; after [`Copying::leave`] with the process.
#[derive(Debug)]
pub struct Copying<'a> {
    copier: &'a Copier,
    /// Sends the pieces, and has their memory until it ends.
    sending: Option<JoinHandle<io::Result<()>>>,
    /// No more pieces are sent.
    nobody_wants_it: Arc<AtomicBool>,
    pieces: usize,
    bytes: u64,
    begun: Instant,
    limit: Duration,
    is_left: bool,
    is_over: bool,
}

fn time_limit(bytes: u64, is_in_memory: bool) -> Duration {
    PATIENCE + Duration::from_micros(bytes / if is_in_memory { SLOWEST } else { SLOWEST_DISK })
}

impl Copying<'_> {
    /// Before the driver restores the job, which takes longer while the bus is busy: nothing is begun until [`Copying::leave`],
    /// if all that is left has room on the GPU. Does not wait.
    pub fn pause(&self) {
        // While pieces are sent nobody knows how much is left.
        if self.sending.as_ref().is_none_or(JoinHandle::is_finished) {
            self.tell(&Ask::Pause);
        }
    }

    /// The job runs. Until then nothing is begun after [`Copying::leave`], because the job maps its memory. Does not wait.
    pub fn resume(&mut self) {
        self.begun = Instant::now();
        self.tell(&Ask::Resume);
    }

    /// If the process has ended, the next request that is answered says so.
    fn tell(&self, ask: &Ask) {
        if let Some(running) = self.copier.lock().as_ref() {
            let _ = running.send(ask, None, "copy");
        }
    }

    /// Waits until all of it is copied, out or to room on the GPU, unless it is cancelled: then the process is ended. Afterwards
    /// the memory may be changed and freed. Call it at most once, for a copy out, and [`Copying::finish`] after it.
    ///
    /// # Errors
    /// As [`Copying::finish`].
    pub fn leave(&mut self, cancelled: &dyn Fn() -> bool) -> Result<Left, Error> {
        // It was paused, and is again until the job runs.
        self.begun = Instant::now();
        let ([bytes, room, _], _) = self.ask(&Ask::Leave, 0, cancelled)?;
        self.is_left = true;
        Ok(Left { bytes, room })
    }

    /// Waits for its end, unless it is cancelled: then the process is ended. Call it before the memory may be changed, or
    /// after [`Copying::leave`].
    ///
    /// # Errors
    /// When something was not copied. Then nothing is known about the file, or about memory on the GPU that was to be filled.
    pub fn finish(mut self, cancelled: &dyn Fn() -> bool) -> Result<Copied, Error> {
        self.wait(true, cancelled)
    }

    fn wait(&mut self, is_right: bool, cancelled: &dyn Fn() -> bool) -> Result<Copied, Error> {
        let asked = self.ask(&Ask::Finish(is_right), if is_right { self.pieces } else { 0 }, cancelled);
        self.is_over = true;
        let ([bytes, took, same], pieces) = asked?;
        if bytes == self.bytes || !is_right {
            return Ok(Copied { bytes, same, took: Duration::from_micros(took), pieces });
        }
        *self.copier.lock() = None;
        Err(Error::Refused { doing: "copy", why: format!("it copied {bytes} bytes and not {}", self.bytes) })
    }

    /// Waits until all pieces are sent, at most until the copy's time is over. None if the thread that sends them has not ended
    /// in its way: then it ends with the process.
    fn wait_for_pieces(&mut self) -> Option<io::Result<()>> {
        let Some(sending) = self.sending.take() else { return Some(Ok(())) };
        while !sending.is_finished() {
            if self.begun.elapsed() > self.limit {
                return None;
            }
            std::thread::sleep(PAUSE);
        }
        sending.join().ok()
    }

    /// Asks the process that the copy was begun with; with its answer come those about so many pieces. After a failure it is
    /// ended.
    fn ask(
        &mut self,
        ask: &Ask,
        pieces: usize,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<([u64; 3], Vec<Placed>), Error> {
        let ended = || io::Error::from(io::ErrorKind::BrokenPipe);
        let sent = self.wait_for_pieces().unwrap_or_else(|| Err(ended()));
        let left = self.limit.saturating_sub(self.begun.elapsed());
        let mut slot = self.copier.lock();
        let running = sent.and_then(|()| slot.as_ref().ok_or_else(ended));
        let result = running.map_err(|source| Error::Gone { doing: "copy", source }).and_then(|running| {
            running.send(ask, None, "copy")?;
            let numbers = running.answer_unless(left, "copy", cancelled)?.numbers;
            let piece = |_| {
                let (answer, memory) = running.answer_with_memory(PATIENCE, "copy")?;
                Ok(Placed { gpu: answer.gpu(), memory })
            };
            Ok((numbers, (0..pieces).map(piece).collect::<Result<_, Error>>()?))
        });
        if result.is_err() {
            *slot = None;
            self.is_over = true;
        }
        result
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let is_left = self.is_left;
            self.nobody_wants_it.store(true, Ordering::Relaxed);
            // The job is stopped meanwhile.
            self.limit = self.limit.min(self.begun.elapsed() + TO_GIVE_UP);
            // The job may have changed its memory meanwhile.
            let _ = self.wait(false, &|| is_left);
        }
    }
}

#[cfg(test)]
mod tests;
