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
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt};
use nix::unistd::Uid;

/// The socket, and the thread that reads from it; its file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Beats {
    path: PathBuf,
    count: Arc<AtomicU64>,
}

impl Beats {
    /// Listens at `path`, in an existing folder. Only root and `user` may send.
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
        std::os::unix::fs::chown(path, user, None)?;
        setsockopt(&socket, sockopt::PassCred, &true)?;
        let run = move || {
            while let Ok(is_beat) = receive(&socket, user) {
                count.fetch_add(u64::from(is_beat), Ordering::Relaxed);
            }
        };
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

fn close(fd: std::os::fd::RawFd) {
    let _ = nix::unistd::close(fd);
}

/// Waits for a message; returns whether it is a watchdog message of the job.
fn receive(socket: &UnixDatagram, user: Option<u32>) -> io::Result<bool> {
    let mut text = [0; 4096];
    let mut space = nix::cmsg_space!(libc::ucred, [i32; 4]);
    let mut into = [IoSliceMut::new(&mut text)];
    // Descriptors in the message are closed on exec, and here at once.
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = match recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut into, Some(&mut space), flags) {
        Err(nix::errno::Errno::EINTR) => return Ok(false),
        other => other?,
    };
    let (length, mut sender) = (received.bytes, None);
    for message in received.cmsgs().into_iter().flatten() {
        match message {
            ControlMessageOwned::ScmCredentials(who) => sender = Some(who.uid()),
            ControlMessageOwned::ScmRights(fds) => fds.into_iter().for_each(close),
            _ => {}
        }
    }
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
}
