//! Ports still used by dead processes of the job: their connections end a minute after them, and a restore needs the
//! same ports now.

use std::io;
use std::net::SocketAddr;

use rekindle_criu::image::{TcpSocket, tcp_sockets};
use rekindle_os::beneath::Beneath;
use rekindle_os::sock_diag::{self, Ending};

/// Closes the connections that would block this image, and returns how many. Only those that no process has:
/// - connections that are in the image, with both ends: they can only be the job's;
/// - connections at an address where the image listens, if the other side has received everything: the job made them
///   after the image. Another program cannot listen there if a restore is to succeed.
pub(crate) fn free(criu_dir: &Beneath) -> io::Result<usize> {
    let wanted = tcp_sockets(criu_dir).map_err(io::Error::other)?;
    if wanted.is_empty() {
        return Ok(0);
    }
    let mut ended = 0;
    for found in sock_diag::ownerless()? {
        if is_in_the_way(found.local, found.remote, found.ending, &wanted) {
            match sock_diag::destroy(&found) {
                Ok(()) => ended += 1,
                // The others may be the ones that block; if this one does, CRIU reports it.
                Err(error) => {
                    tracing::debug!(local = %found.local, remote = %found.remote, "connection not closed: {error}")
                }
            }
        }
    }
    Ok(ended)
}

fn is_in_the_way(local: SocketAddr, remote: SocketAddr, ending: Ending, wanted: &[TcpSocket]) -> bool {
    wanted.iter().any(|socket| match *socket {
        TcpSocket::Connected { local: here, remote: there } => (here, there) == (local, remote),
        TcpSocket::Listening(at) => ending == Ending::Confirmed && covers(at, local),
    })
}

/// Whether a socket that listens at `at` also covers this address. 0.0.0.0 covers only IPv4 addresses; beside it
/// another program may listen at the IPv6 ones.
fn covers(at: SocketAddr, local: SocketAddr) -> bool {
    let any = at.ip().is_unspecified() && (at.is_ipv6() || local.is_ipv4());
    at.port() == local.port() && (any || at.ip() == local.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_the_jobs_is_in_the_way() {
        let end = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let (here, there) = (end("127.0.0.1:40000"), end("127.0.0.1:8000"));
        let image = [
            TcpSocket::Listening(there),
            TcpSocket::Connected { local: here, remote: there },
            TcpSocket::Listening(end("[::]:9000")),
            TcpSocket::Listening(end("0.0.0.0:9001")),
        ];
        let asked = |local: &str, remote: &str, ending| is_in_the_way(end(local), end(remote), ending, &image);
        let (open, done) = (Ending::Unconfirmed, Ending::Confirmed);
        assert!(asked("127.0.0.1:40000", "127.0.0.1:8000", open), "in the image");
        assert!(!asked("127.0.0.1:40000", "127.0.0.1:8001", done), "another program's, from a port that it has now");
        assert!(!asked("127.0.0.1:40001", "127.0.0.1:8000", done), "a client of another program");
        assert!(asked("127.0.0.1:8000", "127.0.0.1:40001", done), "served by the job after the image");
        assert!(!asked("127.0.0.1:8000", "127.0.0.1:40001", open), "somebody waits for the rest of an answer");
        assert!(!asked("192.0.2.1:8000", "192.0.2.2:40001", done), "the job listens elsewhere");
        assert!(asked("192.0.2.1:9000", "192.0.2.2:40001", done));
        assert!(asked("192.0.2.1:9001", "192.0.2.2:40001", done));
        assert!(!asked("[::1]:9001", "[::1]:40001", done), "another program may listen there");
    }
}
