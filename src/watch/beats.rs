//! A NOTIFY_SOCKET for the job, to which it sends `WATCHDOG=1` as to a service manager (sd_notify(3)).
//!
//! A datagram socket, because CRIU refuses a job with a stream connection to the outside; a file, because its owner and
//! mode decide who may send. A job that opens a socket for each message, as sd_notify does, finds it again after every
//! restore. CRIU connects a socket that stays connected to the same path again, which a new supervisor has created
//! again.

use std::ffi::OsString;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt};
use nix::unistd::Uid;

/// Messages are counted in windows of this length.
const WINDOW: Duration = Duration::from_millis(100);
/// Maximum number of messages in a window. A job sends some in a second at most; all that fit into the socket's queue
/// (net.unix.max_dgram_qlen, 512 with systemd) are read in about a second.
const PER_WINDOW: u32 = 50;
/// Pause after the kernel could not deliver a message.
const RETRY: Duration = Duration::from_secs(1);

/// The socket, and the thread that reads from it; its file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Beats {
    path: PathBuf,
    count: Arc<AtomicU64>,
}

impl Beats {
    /// Listens at `path`, in an existing folder where nobody else can replace files. Only root and `user` may send.
    ///
    /// # Errors
    /// When it cannot be created.
    pub(crate) fn listen(path: &Path, user: Option<u32>) -> io::Result<Beats> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = UnixDatagram::bind(path)?;
        let count = Arc::new(AtomicU64::new(0));
        // If a step fails, this is dropped, which removes the file.
        let beats = Beats { path: path.to_owned(), count: Arc::clone(&count) };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        std::os::unix::fs::lchown(path, user, None)?;
        setsockopt(&socket, sockopt::PassCred, &true)?;
        let run = move || listen(|| receive(&socket, user), &count, std::thread::sleep);
        std::thread::Builder::new().name("beats".into()).spawn(run)?;
        Ok(beats)
    }

    /// The variables for the job's environment: the socket, and how often to send.
    #[must_use]
    pub(crate) fn variables(&self, limit: Duration) -> [(OsString, OsString); 2] {
        [
            ("NOTIFY_SOCKET".into(), self.path.clone().into()),
            ("WATCHDOG_USEC".into(), limit.as_micros().to_string().into()),
        ]
    }

    /// The counter of messages.
    #[must_use]
    pub(crate) fn count(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.count)
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Counts the messages that `receive` waits for, for ever: without them a healthy job would be taken for one that hangs.
fn listen(mut receive: impl FnMut() -> io::Result<bool>, count: &AtomicU64, mut pause: impl FnMut(Duration)) -> ! {
    let (mut since, mut received, mut has_complained) = (Instant::now(), 0, false);
    loop {
        match receive() {
            Ok(is_beat) => drop(count.fetch_add(u64::from(is_beat), Ordering::Relaxed)),
            Err(error) => {
                if !std::mem::replace(&mut has_complained, true) {
                    tracing::warn!("cannot receive the job's WATCHDOG=1: {error}. Trying again every second");
                }
                pause(RETRY);
            }
        }
        if since.elapsed() >= WINDOW {
            (since, received) = (Instant::now(), 0);
        }
        received += 1;
        if received >= PER_WINDOW {
            // Whoever sends more waits, because the queue of the socket is full.
            pause(WINDOW.saturating_sub(since.elapsed()));
            (since, received) = (Instant::now(), 0);
        }
    }
}

/// Waits for a message; returns whether it is a watchdog message of the job.
fn receive(socket: &UnixDatagram, user: Option<u32>) -> io::Result<bool> {
    let mut text = [0; 4096];
    // No room for anything else: descriptors in the message are not received (`scm_detach_fds`).
    let mut space = nix::cmsg_space!(libc::ucred);
    let mut into = [IoSliceMut::new(&mut text)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = match recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut into, Some(&mut space), flags) {
        Err(nix::errno::Errno::EINTR) => return Ok(false),
        other => other?,
    };
    let length = received.bytes;
    // A message with descriptors is truncated, and `cmsgs` returns an error: it has no sender then.
    let sender = received.cmsgs().into_iter().flatten().find_map(|message| match message {
        ControlMessageOwned::ScmCredentials(who) => Some(who.uid()),
        _ => None,
    });
    let may = sender.is_some_and(|uid| uid == 0 || uid == user.unwrap_or_else(|| Uid::effective().as_raw()));
    let text = text.get(..length).unwrap_or_default();
    Ok(may && text.split(|byte| *byte == b'\n').any(|line| line == b"WATCHDOG=1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signs_of_life_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        // The leftover of a supervisor that was killed.
        drop(UnixDatagram::bind(&path).unwrap());
        let beats = Beats::listen(&path, None).unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        for text in ["READY=1", "WATCHDOG=1", "STATUS=x\nWATCHDOG=1\n", "WATCHDOG=10", "", "WATCHDOG=trigger"] {
            sender.send_to(text.as_bytes(), &path).unwrap();
        }
        sender.send_to(b"WATCHDOG=1", &path).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while beats.count.load(Ordering::Relaxed) < 3 {
            assert!(std::time::Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(beats.count.load(Ordering::Relaxed), 3);
        drop(beats);
        assert!(!path.exists());
    }

    #[test]
    fn descriptors_are_not_received() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        setsockopt(&ours, sockopt::PassCred, &true).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().canonicalize().unwrap();
        // Other tests open descriptors too, but not of this file.
        let open = || {
            let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            all.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path)).count()
        };
        for many in (0..100).map(|n| 1 + n % 8) {
            let fds = vec![file.as_raw_fd(); many];
            let text = [std::io::IoSlice::new(b"WATCHDOG=1")];
            let rights = [nix::sys::socket::ControlMessage::ScmRights(&fds)];
            nix::sys::socket::sendmsg::<SockaddrStorage>(theirs.as_raw_fd(), &text, &rights, MsgFlags::empty(), None)
                .unwrap();
            receive(&ours, None).unwrap();
        }
        assert_eq!(open(), 1);
        theirs.send(b"WATCHDOG=1").unwrap();
        assert!(receive(&ours, None).unwrap());
    }

    /// The first pauses, and how many messages were counted before each.
    fn listens(receive: impl FnMut() -> io::Result<bool> + Send + 'static, pauses: usize) -> Vec<(Duration, u64)> {
        let (paused, all) = std::sync::mpsc::channel();
        // It does not end, but when nobody wants to know any more.
        std::thread::spawn(move || {
            let count = AtomicU64::new(0);
            listen(receive, &count, |time| paused.send((time, count.load(Ordering::Relaxed))).unwrap())
        });
        (0..pauses).map(|_| all.recv_timeout(Duration::from_secs(20)).unwrap()).collect()
    }

    #[test]
    fn a_flood_is_read_slowly() {
        let all = listens(|| Ok(true), 3);
        // More only if this machine was too busy to read so many in one window.
        assert!(all.iter().all(|(pause, _)| *pause <= WINDOW) && all[0].1 >= u64::from(PER_WINDOW), "{all:?}");
    }

    #[test]
    fn an_error_is_not_the_end() {
        let mut told = 0;
        let receive = move || {
            told += 1;
            if told <= 2 { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(true) }
        };
        let all = listens(receive, 3);
        assert_eq!(all[..2], [(RETRY, 0); 2]);
        assert!(all[2].0 <= WINDOW && all[2].1 > 0, "{all:?}");
    }
}
