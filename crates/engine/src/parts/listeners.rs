//! UNIX sockets that wait for connections, of a job of another user.
//!
//! The kernel notes at listen(2) who the server is, and tells the clients (`SO_PEERCRED`). CRIU (4.2) calls it before the restored
//! process has its ids: all clients would take the server for root. So it is called again with those of the job's user, before
//! the job runs. The pid that clients see is then ours, or 0 inside the job. Sockets that are connected in the image keep root:
//! their notes cannot be changed.

use std::io;

use nix::sys::socket::{Backlog, listen};

use crate::launch::identity::Identity;
use rekindle_criu::image::UnixListener;
use rekindle_os::{identity, process};

/// Does it for the tree below `root`.
pub(crate) fn own(root: i32, listeners: &[UnixListener], user: Option<&Identity>) {
    let Some(user) = user.filter(|user| user.uid != 0 && !listeners.is_empty()) else { return };
    let tree: Vec<(i32, i32)> =
        process::tree(root).into_iter().filter_map(|pid| Some((process::inner_pid(pid)?, pid))).collect();
    for listener in listeners {
        let Some((_, pid)) = tree.iter().find(|(inner, _)| *inner == listener.pid) else { continue };
        if let Err(error) = own_one(*pid, listener, user) {
            let UnixListener { pid, fd, .. } = listener;
            tracing::warn!("UNIX socket {fd} of process {pid} tells its clients that root is the server: {error}");
        }
    }
}

fn own_one(pid: i32, listener: &UnixListener, user: &Identity) -> io::Result<()> {
    let socket = process::fetch_descriptor(&process::open_pidfd(pid)?, listener.fd)?;
    // The kernel limits it to net.core.somaxconn, as it did before.
    let backlog = Backlog::new(listener.backlog).unwrap_or(Backlog::MAXCONN);
    let again = || listen(&socket, backlog);
    Ok(identity::with_effective_ids(user.uid, user.gid, &user.groups, again)??)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener as Listener, UnixStream};

    use nix::sys::socket::getsockopt;
    use nix::sys::socket::sockopt::PeerCredentials;

    use super::*;

    #[test]
    fn clients_see_the_user_as_the_server() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let server = Listener::bind(dir.path().join("socket")).unwrap();
        let seen = || {
            let client = UnixStream::connect(dir.path().join("socket")).unwrap();
            let seen = getsockopt(&client, PeerCredentials).unwrap();
            server.accept().unwrap();
            (seen.uid(), seen.gid())
        };
        assert_eq!(seen(), (0, 0));
        let pid = std::process::id().cast_signed();
        let listener = UnixListener { pid: process::inner_pid(pid).unwrap(), fd: server.as_raw_fd(), backlog: 7 };
        own(pid, &[listener], None);
        assert_eq!(seen(), (0, 0), "a job of root");
        let user = Identity { uid: 65534, gid: 65533, groups: Vec::new(), home: "/".into(), name: "nobody".into() };
        own(pid, &[listener], Some(&user));
        assert_eq!(seen(), (65534, 65533));
    }
}
