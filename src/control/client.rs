//! The client side of a control socket.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::address;
use super::protocol::{self, Answer, Fault, Request};

/// Maximum size of an answer; the largest is a `state.json` of some KiB.
const MAX_ANSWER: usize = 4 << 20;

/// Why there is no answer, or a wrong one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// There is no supervisor.
    #[error("no supervisor listens at {}", .0.display())]
    Gone(PathBuf),
    /// The request could not be sent.
    #[error("cannot reach the supervisor at {}", path.display())]
    Io {
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It did not answer in time.
    #[error(
        "the supervisor at {} does not answer: it may be stopped (SIGSTOP), in a frozen control group, or on an \
        overloaded machine",
        .0.display()
    )]
    Silent(PathBuf),
    /// It ended in the meantime.
    #[error("the supervisor ended before it answered")]
    Ended,
    /// The answer cannot be parsed: the supervisor has another version.
    #[error("cannot read the supervisor's answer")]
    Odd(#[source] serde_json::Error),
    /// The supervisor refused.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Client {
    stream: UnixStream,
    path: PathBuf,
    input: Vec<u8>,
}

impl Client {
    /// Connects without waiting.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Silent`], [`Error::Io`].
    pub(crate) fn connect(path: &Path) -> Result<Client, Error> {
        match address::reach(path) {
            Ok(stream) => Ok(Client { stream, path: path.to_owned(), input: Vec::new() }),
            Err(error) if address::is_gone(&error) => Err(Error::Gone(path.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Error::Silent(path.to_owned())),
            Err(source) => Err(Error::Io { path: path.to_owned(), source }),
        }
    }

    /// Sends a request.
    ///
    /// # Errors
    /// [`Error::Ended`], [`Error::Io`].
    pub(crate) fn send(&mut self, request: &Request) -> Result<(), Error> {
        // A request is shorter than a socket's empty buffer: it is written at once or not at all.
        let written = self.stream.write_all(&request.to_line());
        written.map_err(|source| self.failed(source))
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// All but [`Error::Gone`].
    pub(crate) fn answer(&mut self, until: Option<Instant>) -> Result<Answer, Error> {
        loop {
            if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let rest = self.input.split_off(end + 1);
                let line = std::mem::replace(&mut self.input, rest);
                return Ok(protocol::parse_answer(&line).map_err(Error::Odd)??);
            }
            if !self.is_ready(until)? {
                return Err(Error::Silent(self.path.clone()));
            }
            let mut buffer = [0; 16 << 10];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Error::Ended),
                Ok(_) if self.input.len() > MAX_ANSWER => return Err(Error::Silent(self.path.clone())),
                Ok(count) => self.input.extend(buffer.iter().take(count)),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(source) => return Err(self.failed(source)),
            }
        }
    }

    fn is_ready(&self, until: Option<Instant>) -> Result<bool, Error> {
        loop {
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                let left = if left.is_zero() { left } else { left + Duration::from_millis(1) };
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            });
            match poll(&mut [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(self.failed(error.into())),
            }
        }
    }

    fn failed(&self, source: io::Error) -> Error {
        match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Error::Ended,
            _ => Error::Io { path: self.path.clone(), source },
        }
    }
}

/// Asks one supervisor, and waits until `until`, or without a limit.
///
/// # Errors
/// Any other error.
pub(crate) fn ask(path: &Path, request: &Request, until: Option<Instant>) -> Result<Answer, Error> {
    let mut client = Client::connect(path)?;
    match client.send(request) {
        // It may have sent the reason before it closed the connection.
        Err(Error::Ended) => client.answer(until),
        Err(error) => Err(error),
        Ok(()) => client.answer(until),
    }
}

/// Asks one supervisor for something that takes as long as it takes. Before, it has to show within `patience` that it runs:
/// one that is stopped (SIGSTOP) or in a frozen control group would be waited for in vain.
///
/// # Errors
/// Any.
pub(crate) fn ask_one_that_runs(path: &Path, request: &Request, patience: Duration) -> Result<Answer, Error> {
    // The thread that answers this waits for nobody.
    match ask(path, &Request::Status, Some(Instant::now() + patience)) {
        Err(error @ Error::Silent(_)) => Err(error),
        // It runs, or the request says what is wrong.
        _ => ask(path, request, None),
    }
}

/// Asks all of them the same at once. The time limit is for all together.
pub(crate) fn ask_all(
    paths: &[Option<PathBuf>],
    request: &Request,
    patience: Duration,
) -> Vec<Option<Result<Answer, Error>>> {
    let until = Instant::now() + patience;
    let connect = |path: &PathBuf| {
        let mut client = Client::connect(path)?;
        client.send(request)?;
        Ok::<_, Error>(client)
    };
    let asked: Vec<_> = paths.iter().map(|path| path.as_ref().map(connect)).collect();
    asked.into_iter().map(|client| client.map(|client| client?.answer(Some(until)))).collect()
}
