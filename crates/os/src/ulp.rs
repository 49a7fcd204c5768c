//! TCP connections with a protocol above them in the kernel (`TCP_ULP`), such as kernel TLS.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};

use super::process;

/// The name of kernel TLS (`tcp_tls_ulp_ops`).
pub const TLS: &str = "tls";

/// The connections of these processes that have this protocol, as local and remote address. An IPv4-mapped IPv6 address becomes the
/// IPv4 address. Connections that cannot be reached are skipped.
#[must_use]
pub fn connections(tree: &[i32], protocol: &str) -> Vec<(SocketAddr, SocketAddr)> {
    let mut found = Vec::new();
    for pid in tree {
        let Ok(pidfd) = process::open_pidfd(*pid) else { continue };
        for (number, _) in process::descriptors(*pid).filter(|(_, target)| process::socket(target).is_some()) {
            let socket = process::fetch_descriptor(&pidfd, number).ok();
            let ends = socket.filter(|socket| of(socket).as_deref() == Some(protocol.as_bytes())).and_then(ends);
            found.extend(ends);
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

fn ends(socket: OwnedFd) -> Option<(SocketAddr, SocketAddr)> {
    let socket = TcpStream::from(socket);
    let plain = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    Some((plain(socket.local_addr().ok()?), plain(socket.peer_addr().ok()?)))
}

/// The name of the protocol; getsockopt fails for every socket that is not TCP.
fn of(socket: &OwnedFd) -> Option<Vec<u8>> {
    // TCP_ULP_NAME_MAX
    let mut name = [0u8; 16];
    let mut length: libc::socklen_t = 16;
    let (fd, level, option) = (socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_ULP);
    // SAFETY: name and length are valid, and length is the name's.
    let result = unsafe { libc::getsockopt(fd, level, option, name.as_mut_ptr().cast(), &raw mut length) };
    let is_some = result == 0 && length > 0;
    is_some.then(|| name.iter().copied().take_while(|byte| *byte != 0).collect())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn become_tls(socket: &TcpStream) -> std::io::Result<()> {
        let (fd, level, option) = (socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_ULP);
        // SAFETY: the name is valid for 3 bytes.
        let result = unsafe { libc::setsockopt(fd, level, option, TLS.as_ptr().cast(), 3) };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    #[test]
    fn a_connection_with_kernel_tls_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        let own = [std::process::id().cast_signed()];
        assert_eq!(connections(&own, TLS), []);
        assert_eq!(of(&client.try_clone().unwrap().into()), None);
        if !rekindle_testing::require("ktls", become_tls(&client).is_ok(), "the kernel has no TLS") {
            return;
        }
        assert_eq!(connections(&own, TLS), [(client.local_addr().unwrap(), server.local_addr().unwrap())]);
    }
}
