//! Data inside the job that was on its way while CRIU dumped one task after the other, or had not been sent yet.
//!
//! What was not sent yet is written again once CRIU has made both ends ([`image::set_unsent_apart`]).
//!
//! The image can lack data that a task has received since CRIU dumped it ([`image::behind`]). The kernel still has it, as
//! long as the tasks are frozen: it is added to the image.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{Shutdown, SockaddrStorage, getpeername, getsockname, shutdown};
use rekindle_criu::image::{self, Behind, Unsent};
use rekindle_os::beneath::Beneath;
use rekindle_os::{process, tcp_repair};

/// Why a connection could not be completed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Image(#[from] image::Error),
    /// It was closed for writing since, or has urgent data: its state in the image is an old one.
    #[error("data of the job was on its way from {} to {} while its processes were dumped", .0.remote, .0.local)]
    OnItsWay(Behind),
}

/// Completes the connections inside the image, and sets apart what was not sent. Called while all tasks are frozen and their
/// connections in repair mode. Returns how many lacked data. `tree` are pids as we see them.
pub(crate) fn complete(criu_dir: &Beneath, tree: &[i32]) -> Result<usize, Error> {
    image::set_unsent_apart(criu_dir)?;
    let behind = image::behind(criu_dir)?;
    if behind.is_empty() {
        return Ok(0);
    }
    let mut places: HashMap<u64, (i32, i32)> = HashMap::new();
    for pid in tree {
        let sockets =
            process::descriptors(*pid).filter_map(|(number, target)| Some((process::socket(&target)?, number)));
        places.extend(sockets.map(|(inode, number)| (inode, (*pid, number))));
    }
    for end in &behind {
        let queue = places.get(&u64::from(end.inode)).and_then(|place| queue(*place, end));
        if !queue.map_or(Ok(false), |queue| image::complete(criu_dir, end, &queue))? {
            return Err(Error::OnItsWay(*end));
        }
    }
    Ok(behind.len())
}

/// Writes what was not sent to the connections of a restored job, before it runs.
///
/// # Errors
/// With words for the user: the other end would lack the data, and what follows.
pub(crate) fn put_back(root: i32, criu_dir: &Beneath) -> Result<(), String> {
    let unsent = image::unsent(criu_dir).map_err(|error| error.to_string())?;
    if unsent.is_empty() {
        return Ok(());
    }
    let sockets: HashMap<(SocketAddr, SocketAddr), OwnedFd> =
        process::tree(root).into_iter().flat_map(connections).collect();
    for Unsent { local, remote, data, is_last } in &unsent {
        let write = |socket: &OwnedFd| {
            tcp_repair::write(socket, data)?;
            if *is_last { Ok(shutdown(socket.as_raw_fd(), Shutdown::Write)?) } else { Ok(()) }
        };
        let written = match sockets.get(&(canonical(*local), canonical(*remote))) {
            Some(socket) => write(socket).map_err(|error: io::Error| error.to_string()),
            None => Err("it is not there".to_owned()),
        };
        written.map_err(|why| {
            let length = data.len();
            format!("{length} bytes cannot be written again to the connection from {local} to {remote}: {why}")
        })?;
    }
    tracing::debug!(connections = unsent.len(), "wrote again what was not sent yet");
    Ok(())
}

/// The connections of a process, by their addresses.
fn connections(pid: i32) -> Vec<((SocketAddr, SocketAddr), OwnedFd)> {
    let Ok(opened) = process::open_pidfd(pid) else { return Vec::new() };
    let sockets = process::descriptors(pid).filter(|(_, target)| process::socket(target).is_some());
    let connected = sockets.filter_map(|(number, _)| {
        let socket = process::fetch_descriptor(&opened, number).ok()?;
        let local = getsockname::<SockaddrStorage>(socket.as_raw_fd()).ok()?;
        let remote = getpeername::<SockaddrStorage>(socket.as_raw_fd()).ok()?;
        Some(((ip(&local)?, ip(&remote)?), socket))
    });
    connected.collect()
}

fn ip(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|address| SocketAddr::V4((*address).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| SocketAddr::V6((*address).into()))).map(canonical)
}

/// An IPv6 socket can have a connection of IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn queue((pid, number): (i32, i32), end: &Behind) -> Option<Vec<u8>> {
    let length = usize::try_from(end.received.checked_add(end.missing)?).ok()?;
    let socket = process::fetch_descriptor(&process::open_pidfd(pid).ok()?, number).ok()?;
    tcp_repair::received(&socket, length).ok()
}
