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

/// The number of a network device in the namespace of a socket.
///
/// # Errors
/// When there is none of that name.
pub fn interface_index(socket: &impl AsFd, name: &str) -> io::Result<u32> {
    // SAFETY: a struct of numbers and arrays of them, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // A name ends with a zero.
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the request is a live local.
    match unsafe { libc::ioctl(fd, libc::SIOCGIFINDEX, &raw mut request) } {
        // SAFETY: the kernel has filled in this member.
        0 => u32::try_from(unsafe { request.ifr_ifru.ifru_ifindex }).map_err(io::Error::other),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn a_device_has_a_number() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(interface_index(&socket, "lo").unwrap(), 1);
        assert!(interface_index(&socket, "no-such-device").is_err());
        assert!(interface_index(&socket, "a-name-that-is-too-long").is_err());
    }

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
