//! `criu lazy-pages`: hands a restored tree its memory while it runs already, first what it touches.
//!
//! Each restored task sends the daemon a userfaultfd and keeps none itself. When the last descriptor of one is closed, the
//! kernel gives the task zeroes for what was not delivered (`userfaultfd_release`): a daemon that died would leave a job
//! that goes on with wrong memory. So each userfaultfd is held here too, before a task runs. Then a fault is never answered
//! when the daemon is gone: the job stands still until it is killed. The caller does that before it drops a [`Daemon`]
//! whose [`Daemon::wait`] did not end with exit code 0.
//!
//! A task that the job forks meanwhile has a userfaultfd of its own, which is held within 2 ms.

use std::ffi::{CString, OsStr};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::log::{Log, Reader};
use super::rpc::Place;
use crate::sys::spawn::{self, Child, Ended, Open, Spawn};

/// Its name in CRIU's work folder (`LAZY_PAGES_SOCK_NAME`, criu/uffd.c).
const SOCKET: &str = "lazy-pages.socket";
/// How long the daemon may take to listen: it takes 30 ms.
const START: Duration = Duration::from_secs(10);
/// How long it may take to receive what the tasks sent it.
const RECEIVE: Duration = Duration::from_secs(10);
/// How often it is looked at, ms.
const LOOK: u8 = 2;
/// What the kernel calls a userfaultfd in /proc.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// Why memory can not be brought back lazily.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no userfaultfd, or does not let us have one.
    #[error("userfaultfd can not be used: it needs CONFIG_USERFAULTFD, and no seccomp filter in the way")]
    Unsupported(#[source] io::Error),
    /// Only a PID namespace takes the job down with the daemon where nobody else can.
    #[error("it needs job.pid-namespace = \"private\"")]
    NoNamespace,
    /// The daemon did not start.
    #[error("can not start CRIU")]
    Start(#[from] spawn::Error),
    /// A pipe, a thread or a file.
    #[error("can not talk to CRIU's lazy-pages daemon: {what}")]
    Talk {
        /// The call.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The daemon was not ready in time, or ended.
    #[error("CRIU's lazy-pages daemon {what}: {}", log.errors().join("; "))]
    Failed {
        /// What it did.
        what: String,
        /// Its log.
        log: Log,
    },
    /// It was not wanted any more.
    #[error("cancelled")]
    Cancelled,
}

fn talk(what: &'static str) -> impl Fn(nix::Error) -> Error {
    move |e| Error::Talk { what, source: e.into() }
}

/// How the delivery ended.
#[derive(Debug)]
pub struct Delivered {
    /// Exit code 0: all memory is where it belongs.
    pub ended: Ended,
    /// CRIU's log.
    pub log: Log,
}

/// A daemon under way; killed and reaped when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    log: Option<Reader>,
    /// The userfaultfds, under the daemon's numbers for them.
    held: Vec<(i32, OwnedFd)>,
    reaped: bool,
}

/// Whether there is a userfaultfd for us.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn check() -> Result<(), Error> {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    owned(fd).map(drop).map_err(Error::Unsupported)
}

/// The descriptor that a system call answered.
fn owned(answer: libc::c_long) -> io::Result<OwnedFd> {
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(answer).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made it, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Daemon {
    /// Starts it under the pid `pid` of the place's namespace, and waits until it listens.
    ///
    /// # Errors
    /// When it does not, within ten seconds; it is gone then.
    pub fn start(place: &Place<'_>, pid: i32, cancelled: &dyn Fn() -> bool) -> Result<Daemon, Error> {
        check()?;
        let init = place.init.ok_or(Error::NoNamespace)?;
        match std::fs::remove_file(place.work.join(SOCKET)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Talk { what: "removing an old socket", source: e });
            }
            _ => {}
        }
        let (log, log_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(talk("pipe"))?;
        let (ready, ready_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(talk("pipe"))?;
        let log = Reader::start(log).map_err(|source| Error::Talk { what: "log thread", source })?;
        let null = |fd, flags| Open { fd, path: CString::from(c"/dev/null"), flags };
        let path = std::env::var_os("PATH").unwrap_or_default();
        let (images, work) = (place.images.as_os_str(), place.work.as_os_str());
        let [quiet, verb, dir, dir_work] = ["--no-default-config", "lazy-pages", "-D", "-W"].map(OsStr::new);
        let [level, status, fd] = ["-v2", "--status-fd", "3"].map(OsStr::new);
        let child = Spawn::new(&place.criu.path, [quiet, verb, dir, images, dir_work, work, level, status, fd])?
            // CRIU takes options from its environment too: it gets none.
            .environment([("PATH", path.as_os_str())])?
            .open(null(0, libc::O_RDONLY))
            .open(null(1, libc::O_WRONLY))
            .fd(log_end, 2)
            .fd(ready_end, 3)
            .world(super::rpc::world_of(init)?)
            .pid(pid)
            .start()?;
        let mut daemon = Daemon { child, log: Some(log), held: Vec::new(), reaped: false };
        daemon.listens(&ready, cancelled)?;
        Ok(daemon)
    }

    /// It writes a byte when it listens (`status_ready`).
    fn listens(&mut self, ready: &OwnedFd, cancelled: &dyn Fn() -> bool) -> Result<(), Error> {
        let deadline = Instant::now() + START;
        loop {
            if cancelled() {
                return Err(Error::Cancelled);
            }
            if Instant::now() >= deadline {
                return Err(self.failed(format!("was not ready within {}", humantime::format_duration(START))));
            }
            let mut fds = [PollFd::new(ready.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::from(20u8)) {
                Ok(0) | Err(nix::Error::EINTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(talk("poll")(e)),
            }
            let copy = ready.try_clone().map_err(|source| Error::Talk { what: "dup", source })?;
            return match std::fs::File::from(copy).read(&mut [0; 1]) {
                Ok(1) => Ok(()),
                _ => Err(self.failed("ended before it was ready".into())),
            };
        }
    }

    fn failed(&mut self, what: String) -> Error {
        self.kill();
        Error::Failed { what, log: self.take_log() }
    }

    /// Holds the userfaultfds of `tasks` tasks. To be called when all have sent theirs and none runs.
    ///
    /// # Errors
    /// When the daemon has not got as many in time, or they can not be had.
    pub fn hold(&mut self, tasks: usize) -> Result<(), Error> {
        let deadline = Instant::now() + RECEIVE;
        loop {
            self.hold_new().map_err(|source| Error::Talk { what: "pidfd_getfd", source })?;
            if self.held.len() >= tasks {
                return Ok(());
            }
            if Instant::now() >= deadline || self.child.has_ended().unwrap_or(true) {
                let count = self.held.len();
                return Err(self.failed(format!("has the memory of {count} tasks instead of {tasks}")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn hold_new(&mut self) -> io::Result<()> {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{}/fd", self.child.pid())) else { return Ok(()) };
        for entry in entries.flatten() {
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            let is_one = std::fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == USERFAULTFD);
            if !is_one || self.held.iter().any(|(known, fd)| *known == number && self.is_same(number, fd)) {
                continue;
            }
            let pidfd = self.child.pidfd()?;
            // SAFETY: a system call without pointers.
            let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) };
            self.held.push((number, owned(fd)?));
        }
        Ok(())
    }

    /// Whether the daemon's descriptor is the one held: it may have closed that, and have another under its number.
    fn is_same(&self, number: i32, held: &OwnedFd) -> bool {
        const KCMP_FILE: i32 = 0;
        let us = std::process::id().cast_signed();
        // SAFETY: a system call without pointers.
        let order = unsafe { libc::syscall(libc::SYS_kcmp, us, self.child.pid(), KCMP_FILE, held.as_raw_fd(), number) };
        order == 0
    }

    /// Waits until the daemon has ended, and reaps it.
    ///
    /// # Errors
    /// When it can not be waited for.
    pub fn wait(&mut self) -> io::Result<Delivered> {
        let pidfd = self.child.pidfd()?;
        loop {
            // One that is ending lets nobody have its descriptors any more; how it ended is seen below.
            let _ = self.hold_new();
            let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::from(LOOK)) {
                Ok(0) | Err(nix::Error::EINTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(e.into()),
            }
            let ended = self.child.wait()?;
            self.reaped = true;
            return Ok(Delivered { ended, log: self.take_log() });
        }
    }

    fn take_log(&mut self) -> Log {
        self.log.take().map(|log| log.finish(Duration::from_secs(2))).unwrap_or_default()
    }

    fn kill(&mut self) {
        if !self.reaped {
            // Nothing is to be done where that fails: it is gone then.
            let _ = self.child.signal(libc::SIGKILL);
            let _ = self.child.wait();
            self.reaped = true;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}
