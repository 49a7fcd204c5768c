//! Receives the job's memory from CRIU into memory that was prepared before the freeze.
//!
//! CRIU writes the pages of each task into `pages-N.img` with splice(2), task by task, in one thread. Into a tmpfs this
//! runs at 0.3 to 2.5 GB/s, because every page of the file is allocated and zeroed at the same time. So before the dump
//! begins, a FIFO is created instead of each of those files. CRIU opens it with O_WRONLY|O_CREAT|O_TRUNC and does not
//! see the difference (criu 4.2.1, image.c and page-xfer.c write_pages_loc). What it splices are then references to the
//! frozen tasks' pages, and several threads copy these into files whose pages are present and mapped:
//!
//! ```text
//!  task's page --vmsplice--> CRIU's pipe --splice--> FIFO --splice--> pipe of a thread --read--> file
//!              reference                  reference       reference                     copy
//! ```
//!
//! Invariants:
//! - A FIFO contains references to live pages, not copies. [`Receivers::drain`] must return before the tasks run again,
//!   and returns only when every byte was copied: call it in [`PostDump`](rekindle_criu::Notify::PostDump).
//! - CRIU never waits for us for ever: data that cannot be stored is discarded, and `drain` says why.
//! - Whatever is dropped at whatever time, no FIFO and no thread remains, and the files of the spool stay for the next
//!   time.
//! - If CRIU opens a pages file that has no FIFO, it creates a regular one: slower, but correct.
//!
//! CRIU numbers pages files in the order of the dump: shared memory is dumped with the first task that has it, before
//! that task's own pages. CRIU opens the page map first. It says whose pages follow, and so which file of the spool was
//! prepared for them.
//!
//! Files in the spool become part of the image as hard links. The spool belongs to one image at a time, and the next
//! snapshot with it overwrites that image. After a power cut all of it is gone; it is a tmpfs.

mod expect;
mod spool;
mod supply;
mod workers;

#[cfg(test)]
mod tests;

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use bytesize::ByteSize;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::Mode;

pub(crate) use expect::{Expected, Source, expect};
use rekindle_os::beneath::Beneath;
use rekindle_os::descriptors::{self, Room};
use rekindle_os::parallel::cores;
use supply::Supply;
use workers::{Fifo, Name, Shared, Until};

/// FIFOs beyond the expected number, for processes and shared memory that appear meanwhile. No pages are prepared for
/// what comes through these.
pub(crate) const EXTRA: usize = 16;

/// Capacity of a FIFO in bytes; beyond fs.pipe-max-size (1 MiB) it needs CAP_SYS_RESOURCE, and without that we take
/// what we get. CRIU takes up to 26 MiB (8 pipes of 819 pages) from a task, then writes them out, and takes no more
/// until that is done. With room for all of it the threads copy while CRIU takes the next. On two cores, 1.5 GiB: 0.36
/// s, with 1 MiB 0.53 s.
pub const FIFO_ROOM: u64 = 32 << 20;

/// CRIU takes references at 6 to 10 GB/s, for which two or three threads are enough. More are allowed because the cores
/// have other work too.
const MAX_THREADS: usize = 8;

/// Why the job's memory was not received.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the spool cannot be used.
    #[error("cannot prepare memory for the image in {}", .path.display())]
    Prepare {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The tmpfs is full, or the machine has not enough memory.
    #[error(
        "no memory left for the image: {} needs {wanted} more; free memory, or set snapshot.staging = \"store\"", .path.display()
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// The size that could not be allocated.
        wanted: ByteSize,
    },
    /// There may not be as many files open as the job has processes.
    #[error("cannot open two files for each process of the job; raise the hard limit (ulimit -Hn, LimitNOFILE=)")]
    Descriptors(#[source] io::Error),
    /// A FIFO cannot be created.
    #[error("cannot make the FIFO {}", .path.display())]
    Fifo {
        /// Its path.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start the threads that receive the job's memory")]
    Threads(#[source] io::Error),
    /// Taking from a FIFO, or copying, failed.
    #[error("cannot receive {}", .path.display())]
    Receive {
        /// The FIFO or the file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// CRIU has not closed a pages file.
    #[error("{} is incomplete: CRIU did not close it, or copying it takes too long; raise snapshot.freeze-limit", .path.display())]
    Undrained {
        /// The FIFO.
        path: PathBuf,
    },
    /// A file cannot be put into the image.
    #[error("cannot put {} into the image", .path.display())]
    Place {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// A pages file that was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Received {
    /// Its place in the image.
    pub(crate) path: PathBuf,
    /// Its length, bytes.
    pub(crate) bytes: u64,
}

/// Makes `spool` contain a file for each of `expected`, with all its pages present, so that [`Receivers::start`] has
/// little to do. As with `start`, an image that uses files of this spool becomes invalid. Takes about 0.3 s for each
/// GiB and thread if pages are missing.
///
/// # Errors
/// [`Error::Full`] if there is no room; files made until then stay.
#[cfg(test)]
pub(crate) fn make_ready(spool: &Path, expected: &[Expected]) -> Result<(), Error> {
    spool::make_ready(spool, expected, threads()).map(drop)
}

/// FIFOs that replace CRIU's pages files, and the threads that empty them. If dropped without [`Receivers::drain`], it
/// removes both.
#[derive(Debug)]
pub(crate) struct Receivers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Nothing is sent: the channel closes when the last thread ends.
    ended: mpsc::Receiver<()>,
    spool: PathBuf,
    /// For the descriptors of the FIFOs and of the spool.
    room: Option<Room>,
}

impl Receivers {
    /// Makes the files of `spool` ready, puts FIFOs into `criu_dir` and waits for CRIU. Both are folders on one tmpfs,
    /// the spool with nothing else in it.
    ///
    /// # Errors
    /// If there is no memory, or a FIFO or thread cannot be created. Then only the files of the spool remain.
    pub(crate) fn start(criu_dir: &Beneath, spool: &Path, expected: &[Expected]) -> Result<Receivers, Error> {
        Receivers::start_with(criu_dir, spool, expected, threads())
    }

    fn start_with(criu_dir: &Beneath, spool: &Path, expected: &[Expected], threads: usize) -> Result<Receivers, Error> {
        let room = room(expected.len() + EXTRA)?;
        let ready = spool::make_ready(spool, expected, threads)?;
        let fifos =
            (1..=expected.len() + EXTRA).map(|n| fifo(criu_dir.join(format!("pages-{n}.img")).path().to_owned()));
        let fifos = fifos.collect::<Result<Vec<Fifo>, Error>>()?;
        let supply = Supply::new(criu_dir, spool, ready);
        let shared = Arc::new(Shared::new(fifos, supply).map_err(Error::Threads)?);
        let (alive, ended) = mpsc::channel::<()>();
        let mut receivers = Receivers { shared, threads: Vec::new(), ended, spool: spool.into(), room: Some(room) };
        for n in 0..=threads.max(1) {
            let (shared, alive) = (Arc::clone(&receivers.shared), alive.clone());
            let body = move || {
                if n == 0 {
                    shared.take_all()
                } else {
                    shared.copy_all()
                }
                drop(alive);
            };
            let thread = thread::Builder::new().name("pages".into()).spawn(body).map_err(Error::Threads)?;
            receivers.threads.push(thread);
        }
        Ok(receivers)
    }

    /// Waits until everything that CRIU has written is copied. Call it while the tasks are frozen and CRIU has closed
    /// its pages files; it then takes about as long as copying what is still in a FIFO, a millisecond.
    ///
    /// # Errors
    /// The first failure since the start, or that `deadline` has passed. FIFOs and threads are gone then.
    pub(crate) fn drain(mut self, deadline: Instant) -> Result<Drained, Error> {
        self.shared.go_on(Until::Drained);
        let left = deadline.saturating_duration_since(Instant::now());
        let in_time = self.ended.recv_timeout(left) != Err(RecvTimeoutError::Timeout);
        self.stop();
        let mut state = self.shared.lock();
        if let Some(error) = state.failure.take() {
            return Err(error);
        }
        let fifos = std::mem::take(&mut state.fifos);
        match fifos.iter().find(|f| f.spool.is_some() && !f.ended) {
            Some(fifo) => Err(Error::Undrained { path: fifo.name.path().into() }),
            // A thread may not have had the chance to look at all.
            None if !in_time => Err(Error::Undrained { path: self.spool.clone() }),
            None => Ok(Drained { fifos, spool: self.spool.clone(), _room: self.room.take() }),
        }
    }

    fn stop(&mut self) {
        self.shared.go_on(Until::Now);
        for thread in self.threads.drain(..) {
            if let Err(panic) = thread.join()
                && !thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        self.stop();
    }
}

/// All pages of the job, copied; the tasks may run. If dropped, it removes the FIFOs and keeps the spool.
#[derive(Debug)]
pub(crate) struct Drained {
    fifos: Vec<Fifo>,
    spool: PathBuf,
    _room: Option<Room>,
}

impl Drained {
    /// Cuts each file to what was received, replaces its FIFO by it, and removes what this image does not use: FIFOs,
    /// and files of the spool. Cutting takes a while (20 ms for each GiB freed), so it is done when the job runs again.
    ///
    /// # Errors
    /// When a file cannot be cut, linked or removed.
    pub(crate) fn place(self) -> Result<Vec<Received>, Error> {
        let mut all = Vec::new();
        let mut kept = Vec::new();
        for fifo in self.fifos {
            let Some(mut spool) = fifo.spool else { continue };
            spool.cut(fifo.received)?;
            let path = fifo.name.path().to_path_buf();
            drop(fifo.name);
            let file = spool.path;
            fs::hard_link(&file, &path).map_err(|source| Error::Place { path: file.clone(), source })?;
            all.push(Received { path, bytes: fifo.received });
            kept.extend(file.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
        spool::remove_others(&self.spool, &kept)?;
        Ok(all)
    }
}

/// Whether no page could be allocated for the file: a read into the mapping then fails with EFAULT.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{OutOfMemory, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | OutOfMemory) || error.raw_os_error() == Some(libc::EFAULT)
}

/// A thread copies 3 to 7 GB/s. CRIU needs a core for itself, if there are several.
fn threads() -> usize {
    cores().min(MAX_THREADS)
}

/// The capacity of a FIFO of ours on this machine, in bytes; [`FIFO_ROOM`] if we have the right to it.
///
/// # Errors
/// When no pipe can be created for the test.
pub fn fifo_room() -> io::Result<u64> {
    let (pipe, _) = io::pipe()?;
    workers::enlarge(&pipe, FIFO_ROOM);
    let room = fcntl(&pipe, FcntlArg::F_GETPIPE_SZ)?;
    u64::try_from(room).map_err(io::Error::other)
}

/// Room for the descriptors that so many FIFOs need while a snapshot is taken.
fn room(fifos: usize) -> Result<Room, Error> {
    // A FIFO and a file of the spool. Then the pipes between the threads, and other parts' pidfds and folders.
    let needed = 2 * fifos;
    let others = 64 + 256;
    descriptors::room_for(needed + others).or_else(|_| descriptors::room_for(needed)).map_err(Error::Descriptors)
}

fn fifo(path: PathBuf) -> Result<Fifo, Error> {
    let failed = |path: &Path, source| Error::Fifo { path: path.into(), source };
    nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|e| failed(&path, e.into()))?;
    let name = Name::of(path);
    // Without O_NONBLOCK this would wait for CRIU.
    let options = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(name.path());
    let read = options.map_err(|source| failed(name.path(), source))?;
    workers::enlarge(&read, FIFO_ROOM);
    Ok(Fifo { name, read: read.into(), spool: None, ended: false, received: 0 })
}
