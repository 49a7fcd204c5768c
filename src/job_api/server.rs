//! The thread that reads the job's requests from its socket.
//!
//! It answers `state` itself, with the state published last, and passes other requests to the owner of the state.
//! Limits: [`PER_SECOND`] requests are read per second, and the others wait in the socket's short queue, so that the
//! job has to wait; at most [`PENDING`] requests are with the owner; each has at most [`MAX_REQUEST`] bytes. Answers
//! are sent without waiting: a client that does not read loses them.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrLike, UnixAddr, recvmsg, sendto, setsockopt, sockopt};
use nix::unistd::Uid;

use super::protocol::{self, Answer, Datagram, Facts, MAX_REQUEST, Request};
use super::{Call, Reply};
use crate::control::address::SocketPath;
use crate::control::protocol::{Code, Fault};

/// A training loop sends at most one request per step. A full queue of the socket (net.unix.max_dgram_qlen, 512 with
/// systemd) is read in about a second.
pub(crate) const PER_SECOND: u32 = 500;
/// If more requests are pending, the owner of the state is busy.
pub(crate) const PENDING: usize = 64;
/// Buffer size for answers. Unread answers count against our socket, not the receiver's: with the usual 208 KiB a
/// single client that does not read (net.unix.max_dgram_qlen is 512 with systemd) would leave no room for others.
const UNREAD: usize = 8 << 20;
/// Requests are counted in windows of this length, which is short compared with a client's wait.
const WINDOW: Duration = Duration::from_millis(100);
/// Maximum number of requests in a window.
const PER_WINDOW: u32 = PER_SECOND / 10;
/// Pause after the kernel could not deliver a request.
const PAUSE: Duration = Duration::from_secs(1);

/// Length of an address that has only a family.
const NO_NAME: libc::socklen_t = 2;

/// Delivers a request; returns false if nobody receives it.
type Deliver = Box<dyn Fn(Call) -> bool + Send>;

/// The job's socket. It exists from before the job starts until it is over.
#[derive(Debug)]
pub(crate) struct Socket {
    directory: PathBuf,
    name: String,
    /// The user who may send requests, besides root.
    user: Option<u32>,
    path: PathBuf,
    /// Its name in the file system; `None` once it is closed.
    bound: Mutex<Option<SocketPath>>,
    listener: Arc<Listener>,
}

/// What the reading thread waits for.
#[derive(Debug)]
struct Listener {
    socket: Mutex<Arc<UnixDatagram>>,
    wake: EventFd,
}

impl Socket {
    /// Binds `DIRECTORY/NAME.word`.
    ///
    /// # Errors
    /// The step that failed.
    pub(crate) fn bind(directory: &Path, name: &str, user: Option<u32>) -> io::Result<Socket> {
        let (bound, socket) = open(directory, name, user)?;
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let listener = Arc::new(Listener { socket: Mutex::new(socket), wake });
        let (directory, name, path) = (directory.to_owned(), name.to_owned(), bound.path().to_owned());
        Ok(Socket { directory, name, user, path, bound: Mutex::new(Some(bound)), listener })
    }

    /// Binds it again in the network namespace of this process, for a job in that namespace: abstract names are looked
    /// up in the sender's network namespace, and CRIU finds the other end of a connected socket only in the job's.
    ///
    /// # Errors
    /// The step that failed; the socket remains where it was.
    pub(crate) fn move_to(&self, pid: i32) -> io::Result<()> {
        let network = std::fs::File::open(format!("/proc/{pid}/ns/net"))?;
        let bind = || -> io::Result<_> {
            setns(&network, CloneFlags::CLONE_NEWNET)?;
            open(&self.directory, &self.name, self.user)
        };
        // A separate thread, because it leaves our network namespace.
        let bound = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("job-api-bind".into()).spawn_scoped(scope, bind)?;
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that binds the socket has died")))
        });
        let (bound, socket) = bound?;
        *lock(&self.listener.socket) = socket;
        *lock(&self.bound) = Some(bound);
        let _ = self.listener.wake.write(1);
        Ok(())
    }

    /// Removes its name, because the job is over, even if this value still exists.
    pub(crate) fn close(&self) {
        *lock(&self.bound) = None;
    }

    /// Its path.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn open(directory: &Path, name: &str, user: Option<u32>) -> io::Result<(SocketPath, Arc<UnixDatagram>)> {
    let path = SocketPath::new(directory, name, user)?;
    setsockopt(path.socket(), sockopt::PassCred, &true)?;
    // If this is not allowed, the kernel uses the default size.
    setsockopt(path.socket(), sockopt::SndBufForce, &UNREAD)
        .or_else(|_| setsockopt(path.socket(), sockopt::SndBuf, &UNREAD))?;
    let socket = Arc::new(path.socket().try_clone()?);
    Ok((path, socket))
}

/// A socket that is served until this is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    facts: Arc<Mutex<Option<Facts>>>,
    listener: Arc<Listener>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the socket.
    ///
    /// # Errors
    /// When there are no descriptors or threads left.
    pub(crate) fn start(socket: &Socket, deliver: Deliver) -> io::Result<Server> {
        let (facts, ended) = (Arc::<Mutex<Option<Facts>>>::default(), Arc::new(AtomicBool::new(false)));
        let mut reader = Reader {
            listener: Arc::clone(&socket.listener),
            user: socket.user.unwrap_or_else(|| Uid::effective().as_raw()),
            facts: Arc::clone(&facts),
            deliver,
            pending: Arc::new(AtomicUsize::new(0)),
            rate: Rate { since: Instant::now(), read: 0 },
            complained: false,
        };
        let over = Arc::clone(&ended);
        let run = move || {
            while !over.load(Ordering::SeqCst) {
                reader.turn();
            }
        };
        let thread = std::thread::Builder::new().name("job-api".into()).spawn(run)?;
        Ok(Server { facts, listener: Arc::clone(&socket.listener), ended, thread: Some(thread) })
    }

    /// Sets the answer to `state`; `None` while there is no job.
    pub(crate) fn show(&self, facts: Option<Facts>) {
        *lock(&self.facts) = facts;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = self.listener.wake.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts the requests read recently.
struct Rate {
    since: Instant,
    read: u32,
}

impl Rate {
    /// How long to wait before the next request may be read.
    fn pause(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.since);
        if passed >= WINDOW {
            *self = Rate { since: now, read: 0 };
        }
        (self.read >= PER_WINDOW).then(|| WINDOW.saturating_sub(passed))
    }
}

/// A request that the owner has not answered yet.
struct Pending(Arc<AtomicUsize>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Reader {
    listener: Arc<Listener>,
    user: u32,
    facts: Arc<Mutex<Option<Facts>>>,
    deliver: Deliver,
    pending: Arc<AtomicUsize>,
    rate: Rate,
    /// Whether it was logged that the job sends too many requests.
    complained: bool,
}

/// A received datagram.
struct Received {
    /// The abstract name of the sender's socket.
    from: Option<Vec<u8>>,
    uid: Option<u32>,
    pid: i32,
    length: usize,
    whole: bool,
}

impl Reader {
    fn turn(&mut self) {
        let pause = self.rate.pause(Instant::now());
        if pause.is_some() && !std::mem::replace(&mut self.complained, true) {
            tracing::warn!("the job sends more than {PER_SECOND} requests a second: further requests are delayed");
        }
        let socket = Arc::clone(&lock(&self.listener.socket));
        let wanted = if pause.is_some() { PollFlags::empty() } else { PollFlags::POLLIN };
        let mut fds = [PollFd::new(self.listener.wake.as_fd(), PollFlags::POLLIN), PollFd::new(socket.as_fd(), wanted)];
        // Rounded up, so that the window is over after the wait.
        let timeout = pause.map_or(PollTimeout::NONE, |pause| {
            PollTimeout::try_from(pause + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return std::thread::sleep(PAUSE),
        }
        // The server is ending, or there is another socket.
        let _ = self.listener.wake.read();
        let readable = fds.get(1).and_then(PollFd::any).unwrap_or(false);
        if !readable || pause.is_some() {
            return;
        }
        self.rate.read += 1;
        let mut text = [0; MAX_REQUEST];
        match receive(&socket, &mut text) {
            Ok(received) => self.serve(&socket, &received, text.get(..received.length).unwrap_or_default()),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => std::thread::sleep(PAUSE),
        }
    }

    fn serve(&self, socket: &Arc<UnixDatagram>, received: &Received, text: &[u8]) {
        if !received.uid.is_some_and(|uid| uid == 0 || uid == self.user) {
            return;
        }
        let letter = match received.whole {
            true => Datagram::read(text),
            false => {
                let message = format!("a request has at most {MAX_REQUEST} bytes");
                Datagram { id: None, life: None, request: Err(Fault::new(Code::TooLong, message)) }
            }
        };
        let reply = self.reply(socket, received, letter.id);
        let request = match letter.request {
            Ok(request) => request,
            Err(fault) => return reply(Err(fault)),
        };
        // The lock is not held while sending.
        let facts = lock(&self.facts).clone();
        let Some(facts) = facts else {
            return reply(Err(Fault::new(Code::Later, "the job is being restored: try again")));
        };
        if letter.life.is_some_and(|life| life != facts.life) {
            return reply(Err(Fault::new(Code::Restored, "the job was restored since")));
        }
        if request == Request::State {
            return reply(Ok(Answer::State(Box::new(facts))));
        }
        if self.pending.load(Ordering::SeqCst) > PENDING {
            return reply(Err(Fault::new(Code::Later, "the supervisor is busy: try again")));
        }
        // If nobody receives it, it is dropped without an answer: the job is over.
        (self.deliver)(Call { request, life: facts.life, pid: received.pid, reply });
    }

    fn reply(&self, socket: &Arc<UnixDatagram>, received: &Received, id: Option<String>) -> Reply {
        let (socket, name) = (Arc::clone(socket), received.from.clone());
        self.pending.fetch_add(1, Ordering::SeqCst);
        let pending = Pending(Arc::clone(&self.pending));
        Box::new(move |result| {
            drop(pending);
            let Some(address) = name.and_then(|name| UnixAddr::new_abstract(&name).ok()) else { return };
            // A client that is gone or does not read loses the answer.
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let _ = sendto(socket.as_raw_fd(), &protocol::answer(id.as_deref(), &result), &address, flags);
        })
    }
}

/// Takes the next datagram, without waiting.
fn receive(socket: &UnixDatagram, text: &mut [u8]) -> nix::Result<Received> {
    // No room for anything else: descriptors in the message are not received (`scm_detach_fds`).
    let mut space = nix::cmsg_space!(libc::ucred);
    let mut into = [IoSliceMut::new(text)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut into, Some(&mut space), flags)?;
    // An address without a name has length 0 here, for which `as_abstract` panics (nix 0.31).
    let named = received.address.filter(|address| address.len() > NO_NAME);
    // A message with descriptors is truncated, and `cmsgs` returns an error: it has no sender then.
    let who = received.cmsgs().into_iter().flatten().find_map(|message| match message {
        ControlMessageOwned::ScmCredentials(who) => Some(who),
        _ => None,
    });
    Ok(Received {
        from: named.as_ref().and_then(UnixAddr::as_abstract).map(<[u8]>::to_vec),
        uid: who.map(|who| who.uid()),
        pid: who.map_or(0, |who| who.pid()),
        length: received.bytes,
        whole: !received.flags.contains(MsgFlags::MSG_TRUNC),
    })
}

#[cfg(test)]
mod tests;
