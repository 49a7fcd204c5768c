//! The one thread that serves all clients of a job's socket.
//!
//! A client sends a line and gets a line, any number of times. Nothing more is read from it before it has its answer.
//! The server never waits for anybody: sockets do not block, a request goes to the owner of the state as a [`Call`]
//! whose answer comes through a channel, and `status` is answered here, from the state published last. Bounds:
//! [`MAX_LINE`] bytes of a request, [`CLIENTS`] clients, [`PATIENCE`] until a line is complete and until an answer is
//! read, [`IDLE`] without a request.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::Call;
use super::address::Bound;
use super::protocol::{self, Answer, Code, Fault, MAX_LINE, Request};
use crate::published::Published;

/// Maximum number of clients at a time.
pub const CLIENTS: usize = 128;
/// Time limit for the rest of a line, and for reading an answer.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// How long a client may be idle.
pub const IDLE: Duration = Duration::from_secs(60);
/// Pause after the kernel could not accept a client (no descriptors are left).
const PAUSE: Duration = Duration::from_secs(1);

/// Delivers a request; returns false if nobody receives it.
type Deliver = Box<dyn Fn(Call) -> bool + Send>;

/// A socket that is served until this is dropped.
#[derive(Debug)]
pub struct Server {
    bound: Arc<Bound>,
    status: Arc<Mutex<Vec<u8>>>,
    wake: Arc<EventFd>,
    ended: Arc<Mutex<bool>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `DIRECTORY/NAME.sock`.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn start(directory: &Path, name: &str, deliver: Deliver) -> io::Result<Server> {
        let bound = Arc::new(Bound::new(directory, name)?);
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let (status, ended) = (Arc::<Mutex<Vec<u8>>>::default(), Arc::<Mutex<bool>>::default());
        let (sender, answers) = mpsc::channel();
        let mut clients = Clients {
            bound: Arc::clone(&bound),
            status: Arc::clone(&status),
            deliver,
            desk: Desk { sender, wake: Arc::clone(&wake) },
            answers,
            clients: BTreeMap::new(),
            next: 0,
            closed_until: None,
        };
        let over = Arc::clone(&ended);
        let run = move || {
            while !*lock(&over) {
                clients.turn();
            }
        };
        let thread = std::thread::Builder::new().name("control".into()).spawn(run)?;
        Ok(Server { bound, status, wake, ended, thread: Some(thread) })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.bound.path()
    }

    /// Sets the answer to `status`.
    pub fn show(&self, published: &Published) {
        *lock(&self.status) = protocol::answer_line(Ok(Answer::Status(Box::new(published.clone()))));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        *lock(&self.ended) = true;
        let _ = self.wake.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Receives answers of other threads.
#[derive(Clone)]
struct Desk {
    sender: mpsc::Sender<(u64, Result<Answer, Fault>)>,
    wake: Arc<EventFd>,
}

/// An answer that a client waits for. If it is dropped without one, the supervisor is ending.
struct Owed {
    desk: Desk,
    client: u64,
    given: bool,
}

impl Owed {
    fn give(&mut self, result: Result<Answer, Fault>) {
        self.given = true;
        let _ = self.desk.sender.send((self.client, result));
        let _ = self.desk.wake.write(1);
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if !self.given {
            self.give(Err(Fault::new(Code::Ending, "the supervisor ended before the request was done")));
        }
    }
}

struct Clients {
    bound: Arc<Bound>,
    status: Arc<Mutex<Vec<u8>>>,
    deliver: Deliver,
    desk: Desk,
    answers: mpsc::Receiver<(u64, Result<Answer, Fault>)>,
    clients: BTreeMap<u64, Client>,
    next: u64,
    /// No client is accepted until then.
    closed_until: Option<Instant>,
}

struct Client {
    stream: UnixStream,
    who: String,
    input: Vec<u8>,
    output: Vec<u8>,
    stage: Stage,
    /// When the stage or the line began.
    since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// A line is being read.
    Reads,
    /// The owner has the request.
    Waits,
    /// The answer is being written.
    Writes,
    /// The last answer is being written; then the client is dropped.
    Leaves,
}

/// Whether to keep a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stays {
    Yes,
    No,
}

impl Clients {
    fn turn(&mut self) {
        let now = Instant::now();
        if self.closed_until.is_some_and(|until| until <= now) {
            self.closed_until = None;
        }
        let full = self.clients.len() >= CLIENTS;
        let listener = if self.closed_until.is_some() { PollFlags::empty() } else { PollFlags::POLLIN };
        let mut fds = vec![
            PollFd::new(self.desk.wake.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.bound.listener().as_fd(), listener),
        ];
        fds.extend(self.clients.values().map(|client| PollFd::new(client.stream.as_fd(), client.stage.events())));
        let deadlines = self.clients.values().filter_map(Client::deadline).chain(self.closed_until);
        let timeout = deadlines.min().map_or(PollTimeout::NONE, |at| {
            // Rounded up, so that the time is over after the wait.
            let left = at.saturating_duration_since(now) + Duration::from_millis(1);
            PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
        });
        if let Err(error) = poll(&mut fds, timeout)
            && error != Errno::EINTR
        {
            std::thread::sleep(PAUSE);
            return;
        }
        let woken = fds.first().and_then(PollFd::any).unwrap_or(false);
        let knock = fds.get(1).and_then(PollFd::any).unwrap_or(false);
        let seen: Vec<PollFlags> = fds.iter().skip(2).map(|fd| fd.revents().unwrap_or_else(PollFlags::empty)).collect();
        drop(fds);
        if woken {
            let _ = self.desk.wake.read();
        }
        let ids: Vec<u64> = self.clients.keys().copied().collect();
        for (id, seen) in ids.into_iter().zip(seen) {
            self.serve(id, seen);
        }
        while let Ok((id, result)) = self.answers.try_recv() {
            if let Some(client) = self.clients.get_mut(&id).filter(|client| client.stage == Stage::Waits) {
                client.answer(protocol::answer_line(result), Stage::Writes);
                self.go_on(id);
            }
        }
        if knock {
            self.let_in(full);
        }
        let now = Instant::now();
        let late: Vec<u64> =
            self.clients.iter().filter(|(_, c)| c.deadline().is_some_and(|at| at <= now)).map(|(id, _)| *id).collect();
        for id in late {
            self.expire(id);
        }
    }

    /// Accepts clients. `full`: no place was free before this turn, so accepted clients are told that.
    fn let_in(&mut self, full: bool) {
        let mut room = CLIENTS.saturating_sub(self.clients.len());
        while room > 0 || full {
            let stream = match self.bound.listener().accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::debug!("the control socket cannot accept connections: {error}");
                    self.closed_until = Some(Instant::now() + PAUSE);
                    return;
                }
            };
            let mut client = match Client::new(stream) {
                Ok(client) => client,
                Err(_) => continue,
            };
            if let Err(fault) = client.may_ask() {
                tracing::warn!("refused a connection of {} to the control socket: {fault}", client.who);
                // A client of another user does not take a place.
                client.answer(protocol::answer_line(Err(fault)), Stage::Leaves);
                let _ = client.write();
                continue;
            }
            if room == 0 {
                let fault = Fault::new(Code::Busy, format!("there are {CLIENTS} clients already: try again"));
                client.answer(protocol::answer_line(Err(fault)), Stage::Leaves);
                let _ = client.write();
                continue;
            }
            self.clients.insert(self.next, client);
            self.next += 1;
            room -= 1;
        }
    }

    fn serve(&mut self, id: u64, seen: PollFlags) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if seen.is_empty() {
            return;
        }
        let stays = match client.stage {
            Stage::Reads => client.read(),
            // The client is gone. One that has only closed its sending side still waits for its answer.
            Stage::Waits if seen.intersects(PollFlags::POLLHUP | PollFlags::POLLERR) => Stays::No,
            _ => Stays::Yes,
        };
        if stays == Stays::No {
            self.clients.remove(&id);
            return;
        }
        self.go_on(id);
    }

    /// Does everything for a client that is possible without waiting.
    fn go_on(&mut self, id: u64) {
        loop {
            let Some(client) = self.clients.get_mut(&id) else { return };
            match client.stage {
                Stage::Reads => match client.line() {
                    Some(Ok(line)) => self.asked(id, &line),
                    Some(Err(fault)) => client.answer(protocol::answer_line(Err(fault)), Stage::Leaves),
                    None => return,
                },
                Stage::Waits => return,
                Stage::Writes | Stage::Leaves => match client.write() {
                    Ok(true) if client.stage == Stage::Writes => client.enter(Stage::Reads),
                    Ok(false) => return,
                    _ => {
                        self.clients.remove(&id);
                        return;
                    }
                },
            }
        }
    }

    fn asked(&mut self, id: u64, line: &[u8]) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        match Request::parse(line) {
            Err(fault) => client.answer(protocol::answer_line(Err(fault)), Stage::Writes),
            Ok(Request::Status) => {
                let status = lock(&self.status).clone();
                client.answer(status, Stage::Writes);
            }
            Ok(request) => {
                crate::routine!("{} requests: {}", client.who, request.name());
                client.enter(Stage::Waits);
                let mut owed = Owed { desk: self.desk.clone(), client: id, given: false };
                let reply = Box::new(move |result| owed.give(result));
                // If nobody receives it, dropping the reply sends an answer.
                let _ = (self.deliver)(Call { request, reply });
            }
        }
    }

    fn expire(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.stage == Stage::Reads && !client.input.is_empty() {
            let message = format!("the line was not complete within {} s", PATIENCE.as_secs());
            client.answer(protocol::answer_line(Err(Fault::new(Code::Timeout, message))), Stage::Leaves);
            let _ = client.write();
        }
        self.clients.remove(&id);
    }
}

impl Stage {
    fn events(self) -> PollFlags {
        match self {
            Stage::Reads => PollFlags::POLLIN,
            Stage::Waits => PollFlags::empty(),
            Stage::Writes | Stage::Leaves => PollFlags::POLLOUT,
        }
    }
}

impl Client {
    fn new(stream: UnixStream) -> io::Result<Client> {
        stream.set_nonblocking(true)?;
        let peer = getsockopt(&stream, PeerCredentials)?;
        let who = format!("process {} of user {}", peer.pid(), peer.uid());
        let (input, output) = (Vec::new(), Vec::new());
        Ok(Client { stream, who, input, output, stage: Stage::Reads, since: Instant::now() })
    }

    /// Checks the user who connected, as the kernel reports it.
    fn may_ask(&self) -> Result<(), Fault> {
        let we = nix::unistd::geteuid().as_raw();
        match getsockopt(&self.stream, PeerCredentials).map(|peer| peer.uid()) {
            Ok(uid) if uid == 0 || uid == we => Ok(()),
            Ok(uid) => Err(Fault::new(
                Code::Forbidden,
                format!(
                    "only root and user {we} may use this socket; you are \
                user {uid}"
                ),
            )),
            Err(error) => Err(Fault::new(Code::Forbidden, format!("cannot identify the client: {error}"))),
        }
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.since = Instant::now();
    }

    fn answer(&mut self, line: Vec<u8>, stage: Stage) {
        self.output = line;
        self.enter(stage);
    }

    fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Reads if self.input.is_empty() => Some(self.since + IDLE),
            Stage::Reads | Stage::Writes | Stage::Leaves => Some(self.since + PATIENCE),
            Stage::Waits => None,
        }
    }

    fn read(&mut self) -> Stays {
        let mut buffer = [0; 4096];
        while self.input.len() <= MAX_LINE {
            match self.stream.read(&mut buffer) {
                Ok(0) => return if self.has_line() { Stays::Yes } else { Stays::No },
                Ok(count) => {
                    if self.input.is_empty() {
                        self.since = Instant::now();
                    }
                    self.input.extend(buffer.iter().take(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Stays::No,
            }
        }
        Stays::Yes
    }

    fn has_line(&self) -> bool {
        self.input.contains(&b'\n')
    }

    /// The next complete line, if it is not too long.
    fn line(&mut self) -> Option<Result<Vec<u8>, Fault>> {
        match self.input.iter().position(|byte| *byte == b'\n') {
            Some(end) if end < MAX_LINE => {
                let rest = self.input.split_off(end + 1);
                Some(Ok(std::mem::replace(&mut self.input, rest)))
            }
            None if self.input.len() < MAX_LINE => None,
            _ => Some(Err(Fault::new(Code::TooLong, format!("a request has at most {MAX_LINE} bytes")))),
        }
    }

    /// Returns whether everything is written.
    fn write(&mut self) -> io::Result<bool> {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.output.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
