//! The rights of this process, and what the kernel permits.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;

/// Its bit (linux/capability.h).
pub const CAP_SYS_ADMIN: u32 = 21;

/// The effective capabilities, bit by bit (capabilities(7)); none where /proc does not tell.
#[must_use]
pub fn effective() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(bits.trim(), 16).ok()
}

/// Whether it has this capability, over its own user namespace.
#[must_use]
pub fn has(capability: u32) -> bool {
    effective().is_some_and(|bits| bits >> capability & 1 == 1)
}

/// Whether user 0 here is user 0 of the machine.
#[must_use]
pub fn over_the_machine() -> bool {
    is_whole(&std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

/// The initial user namespace maps every id to itself; no line at all means a kernel without user namespaces.
#[must_use]
pub fn is_whole(map: &str) -> bool {
    let fields: Vec<&str> = map.split_whitespace().collect();
    fields.is_empty() || fields == ["0", "0", "4294967295"]
}

/// Whether io_uring_setup(2) would do something for us: it is in the kernel, and neither `kernel.io_uring_disabled` nor a
/// filter keeps it from us.
#[must_use]
pub fn io_uring_works() -> bool {
    let nowhere: *const libc::c_void = std::ptr::null();
    // SAFETY: the kernel refuses parameters at address 0 before it makes anything.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, nowhere) };
    let refused = io::Error::last_os_error().raw_os_error();
    !(result < 0 && matches!(refused, Some(libc::ENOSYS | libc::EPERM)))
}

/// Whether a seccomp filter that answers for a system call can be set: in the kernel (CONFIG_SECCOMP_FILTER), and not kept
/// from us.
#[must_use]
pub fn filters_work() -> bool {
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the kernel reads one number.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_initial_user_namespace_is_told_by_its_map() {
        assert!(is_whole("         0          0 4294967295\n") && is_whole(""));
        assert!(!is_whole("0 1000 1\n1 100000 65536\n"));
    }
}
