//! Options of a socket as bytes (getsockopt(2), setsockopt(2)): for those who read and write options by a table.
#![allow(unsafe_code, reason = "calls of the C library; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Reads an option into `value`, and returns how many bytes it has.
///
/// # Errors
/// When the socket has no such option (ENOPROTOOPT, EOPNOTSUPP), the descriptor is none of a socket (ENOTSOCK), or the
/// kernel's other reasons.
pub fn get(socket: &impl AsFd, level: i32, name: i32, value: &mut [u8]) -> io::Result<usize> {
    let mut length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the buffer is valid and as long as `length` says.
    match unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut length) } {
        0 => usize::try_from(length).map_err(io::Error::other),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets an option.
///
/// # Errors
/// As [`get`], and when a right is missing (EPERM) or the value is none (EINVAL).
pub fn set(socket: &impl AsFd, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the buffer is valid and as long as `length` says.
    match unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn an_option_is_what_it_was_set_to() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut value = [0; 4];
        set(&socket, libc::SOL_SOCKET, libc::SO_BROADCAST, &1_i32.to_ne_bytes()).unwrap();
        assert_eq!(get(&socket, libc::SOL_SOCKET, libc::SO_BROADCAST, &mut value).unwrap(), 4);
        assert_eq!(i32::from_ne_bytes(value), 1);
        let error = get(&socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, &mut value).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
        let file = std::fs::File::open("/proc/self/stat").unwrap();
        let error = get(&file, libc::SOL_SOCKET, libc::SO_TYPE, &mut value).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTSOCK));
    }
}
