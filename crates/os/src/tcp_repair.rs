//! TCP connections that CRIU left in the kernel's repair mode (`TCP_REPAIR`), in which they send nothing.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::process;

/// Ends the repair mode of these processes' connections, and returns how many there were. Connections that cannot be
/// reached are skipped.
#[must_use]
pub fn leave(tree: &[i32]) -> usize {
    let mut found = 0;
    for pid in tree {
        let Ok(pidfd) = process::open_pidfd(*pid) else { continue };
        for (number, _) in process::descriptors(*pid).filter(|(_, target)| process::socket(target).is_some()) {
            if let Ok(socket) = process::fetch_descriptor(&pidfd, number)
                && is_on(&socket)
                && switch_off(&socket).is_ok()
            {
                found += 1;
            }
        }
    }
    found
}

/// Whether repair mode is on; getsockopt fails for every socket that is not TCP.
fn is_on(socket: &OwnedFd) -> bool {
    let mut value: libc::c_int = 0;
    let mut length: libc::socklen_t = 4;
    let (fd, level, option) = (socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR);
    // SAFETY: value and length are valid, and length is the value's.
    let result = unsafe { libc::getsockopt(fd, level, option, (&raw mut value).cast(), &raw mut length) };
    result == 0 && value != 0
}

fn switch_off(socket: &OwnedFd) -> io::Result<()> {
    let value: libc::c_int = 0;
    let (fd, level, option) = (socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR);
    // SAFETY: the value is valid, of 4 bytes.
    let result = unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), 4) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_in_repair_goes_on() {
        if !rekindle_testing::root() {
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let on: libc::c_int = 1;
        let (level, option) = (libc::IPPROTO_TCP, libc::TCP_REPAIR);
        // SAFETY: the value is valid, of 4 bytes.
        let result = unsafe { libc::setsockopt(client.as_raw_fd(), level, option, (&raw const on).cast(), 4) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let own = [std::process::id().cast_signed()];
        // Other tests of this process may have connections, but none in repair.
        assert_eq!(leave(&own), 1);
        assert_eq!(leave(&own), 0);
        client.write_all(b"on").unwrap();
        server.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        let mut heard = [0; 2];
        server.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"on");
    }
}
