//! A session with the keeper of one process.
#![allow(unsafe_code, reason = "memory that is shared with the job; each block says why it is sound")]

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::time::{Duration, Instant};

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{ReceiveTimeout, SendTimeout};
use nix::sys::time::{TimeVal, TimeValLike};
use rustix::thread::futex;

use super::table::{self, Reply, Request, Sharing};
use super::{Error, Own};
use crate::packet;
use rekindle_os::process;
use rekindle_os::ptrace::{self, Alone};

/// Time limit for one answer of the keeper that is about one piece, before anything is released: then a late answer costs
/// one snapshot.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time limit for all answers together once something is released: a late one costs the job, and the driver's calls can wait
/// while it initialises GPUs for another process. The keeper itself waits for 120 s.
pub(super) const ONCE_RELEASED: Duration = Duration::from_secs(100);

/// For a time limit that is over: for a socket, zero would be no limit at all.
const NO_TIME: Duration = Duration::from_millis(1);

/// What an import is, in errors.
pub(super) const IMPORT_AGAIN: &str = "import memory again";

/// More for each piece, where the keeper does all at once. The driver needs 0.1 ms for one; releasing 112 of them takes 7 ms.
const FOR_EACH: Duration = Duration::from_millis(2);

/// More for host memory, which it copies: at a GB/s, a tenth of what is usual. The job can write any number.
const MOST_FOR_HOST: Duration = Duration::from_secs(60);

/// Time limit for what the keeper does with all that the process has: at most 163 s.
pub(super) fn patience(sharing: &Sharing) -> Duration {
    let table = sharing.table();
    let used = [&table.exports_used, &table.imports_used, &table.mappings_used];
    // The job can write any number.
    let pieces = used.map(|used| used.load(Relaxed).min(u32::try_from(table::MOST).unwrap_or(u32::MAX)));
    let host = Duration::from_nanos(sharing.host_bytes().unwrap_or(0)).min(MOST_FOR_HOST);
    PATIENCE + FOR_EACH * pieces.iter().sum::<u32>() + host
}

/// How often to check for the keeper's socket.
const PAUSE: Duration = Duration::from_micros(100);

/// An awake keeper of a process whose other threads are stopped. If this is dropped, the keeper sleeps again.
#[derive(Debug)]
pub(super) struct Session<'a> {
    sharing: &'a Sharing,
    socket: ManuallyDrop<OwnedFd>,
    /// Once something is released: when all of it must be done.
    until: Option<Instant>,
    _alone: Alone,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // SAFETY: it is not used any more.
        unsafe { ManuallyDrop::drop(&mut self.socket) };
        // An image must not contain its descriptor, so the keeper may stop with the others only after closing it.
        let deadline = Instant::now() + patience(self.sharing);
        while self.sharing.table().socket.load(Acquire) != -1 && Instant::now() < deadline {
            if process::has_ended(self.sharing.pid()) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl<'a> Session<'a> {
    /// With `until` each answer may take until then, otherwise as long as is usual.
    pub(super) fn open(sharing: &'a Sharing, until: Option<Instant>) -> io::Result<Session<'a>> {
        let table = sharing.table();
        let pid = sharing.pid();
        let keeper = table.keeper.load(Acquire);
        let is_it = |tid: &i32| process::inner_pid(*tid) == Some(keeper);
        let thread = process::threads(pid).into_iter().find(is_it);
        let thread = thread.ok_or_else(|| io::Error::other("the interposer has no thread in the process"))?;
        // The driver's thread may not have stopped with the others yet.
        ptrace::stop(pid, limit(until, PATIENCE))?;
        let alone = Alone::run(thread, limit(until, PATIENCE))?;
        let call = table.calls.fetch_add(1, SeqCst).wrapping_add(1);
        wake(table);
        // It may still do what it was asked for in a session that was given up.
        let deadline = Instant::now() + limit(until, patience(sharing));
        while table.answered.load(Acquire) != call {
            if Instant::now() > deadline || process::has_ended(pid) {
                return Err(io::Error::other("the interposer's thread does not answer"));
            }
            std::thread::sleep(PAUSE);
        }
        let number = table.socket.load(Relaxed);
        if number < 0 {
            return Err(io::Error::other("it cannot open a socket; raise its limit (ulimit -n; job.limits.nofile)"));
        }
        let socket = process::fetch_descriptor(&process::open_pidfd(pid)?, number)?;
        setsockopt(&socket, ReceiveTimeout, &time(limit(until, PATIENCE)))?;
        let session = Session { sharing, socket: ManuallyDrop::new(socket), until, _alone: alone };
        // After this request the keeper has closed its copy of our end, and notices when we close it. The answer does
        // not matter.
        let began = session.send(Request { what: table::BEGIN, index: 0 }, None);
        began.map_err(io::Error::other)?;
        receive(session.socket())?;
        Ok(session)
    }

    /// Makes the keeper do something; `doing` describes it for errors.
    pub(super) fn ask(&self, what: u32, index: u32, doing: &'static str) -> Result<(), Error> {
        let is_about_all = matches!(what, table::RELEASE | table::MAP);
        let usual = if is_about_all { patience(self.sharing) } else { PATIENCE };
        self.send(Request { what, index }, None)?;
        self.receive_within(usual, doing).map(drop)
    }

    /// Whether the keeper can use the driver, and could import again what stays on the GPU.
    pub(super) fn probe(&self, own: Own) -> Result<(), Error> {
        let stays = own == Own::Stays;
        if stays {
            // Of an attempt that ended because of another process.
            self.sharing.table().obstacles.fetch_and(!table::NOT_IMPORTED, Relaxed);
        }
        let outcome = self.ask(table::PROBE, stays.into(), "use memory that has to be released");
        match outcome {
            Err(Error::Driver { pid, code, .. }) if self.sharing.imports_nothing() => {
                Err(Error::NotImported { pid, code })
            }
            outcome => outcome,
        }
    }

    /// Exports these entries again. All requests are sent before the first answer is read, so that the keeper need not
    /// sleep.
    pub(super) fn export(&self, entries: &[u32]) -> Result<Vec<OwnedFd>, Error> {
        self.descriptors(table::EXPORT, entries, "export its memory to other processes again")
    }

    /// The descriptors of these entries, whose memory can stay on the GPU.
    pub(super) fn give(&self, entries: &[u32]) -> Result<Vec<OwnedFd>, Error> {
        let mut all = Vec::new();
        for some in entries.chunks(super::AT_ONCE) {
            all.extend(self.descriptors(table::GIVE, some, "hand over memory that stays on the GPU")?);
        }
        Ok(all)
    }

    fn descriptors(&self, what: u32, entries: &[u32], doing: &'static str) -> Result<Vec<OwnedFd>, Error> {
        entries.iter().try_for_each(|index| self.send(Request { what, index: *index }, None))?;
        let missing = || Error::Driver { pid: self.sharing.inner(), what: doing, code: -1 };
        entries.iter().map(|_| self.receive(doing)?.ok_or_else(missing)).collect()
    }

    /// Imports these entries again, each from its descriptor.
    pub(super) fn import(&self, entries: &[(u32, BorrowedFd<'_>)]) -> Result<(), Error> {
        let request = |index| Request { what: table::IMPORT, index };
        // No more at once than fit into the socket: otherwise both sides would wait for each other.
        for some in entries.chunks(super::AT_ONCE) {
            some.iter().try_for_each(|(index, memory)| self.send(request(*index), Some(*memory)))?;
            some.iter().try_for_each(|_| self.receive(IMPORT_AGAIN).map(drop))?;
        }
        Ok(())
    }

    fn send(&self, Request { what, index }: Request, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        let [a, b] = [what.to_ne_bytes(), index.to_ne_bytes()];
        // The job provides the socket: it may be one that nobody reads from.
        let limit = time(limit(self.until, PATIENCE));
        setsockopt(&self.socket(), SendTimeout, &limit).map_err(|error| self.busy(error.into()))?;
        let sent = packet::send(self.socket(), &[a, b].concat(), descriptor);
        sent.map_err(|source| self.busy(source))?;
        Ok(())
    }

    /// The next answer, with its descriptor.
    fn receive(&self, what: &'static str) -> Result<Option<OwnedFd>, Error> {
        self.receive_within(PATIENCE, what)
    }

    fn receive_within(&self, usual: Duration, what: &'static str) -> Result<Option<OwnedFd>, Error> {
        let limit = time(limit(self.until, usual));
        setsockopt(&self.socket(), ReceiveTimeout, &limit).map_err(|error| self.busy(error.into()))?;
        let (reply, descriptor) = receive(self.socket()).map_err(|source| self.busy(source))?;
        let pid = self.sharing.inner();
        match reply.code {
            0 => Ok(descriptor),
            table::LOST => Err(Error::Closed { pid }),
            table::NO_DESCRIPTOR => Err(Error::NoDescriptor { pid }),
            code => Err(Error::Driver { pid, what, code }),
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn busy(&self, source: io::Error) -> Error {
        Error::Busy { pid: self.sharing.inner(), source }
    }
}

fn limit(until: Option<Instant>, usual: Duration) -> Duration {
    until.map_or(usual, |until| until.saturating_duration_since(Instant::now()).max(NO_TIME))
}

fn time(limit: Duration) -> TimeVal {
    TimeVal::milliseconds(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX))
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<(Reply, Option<OwnedFd>)> {
    let mut bytes = [0; size_of::<Reply>()];
    let (length, descriptor) = packet::receive(socket, &mut bytes)?;
    if length != size_of::<Reply>() {
        return Err(io::Error::other("the interposer's thread has ended"));
    }
    let [[a, b, c, d], [e, f, g, h]] = bytes.as_chunks::<4>().0 else {
        return Err(io::Error::other("the answer has the wrong size"));
    };
    let reply = Reply { code: i32::from_ne_bytes([*a, *b, *c, *d]), count: u32::from_ne_bytes([*e, *f, *g, *h]) };
    Ok((reply, descriptor))
}

fn wake(table: &table::Table) {
    // Not private: the waiter is another process.
    let _ = futex::wake(&table.calls, futex::Flags::empty(), i32::MAX.cast_unsigned());
}
