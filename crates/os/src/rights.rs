//! The rights of this process, and what the kernel permits.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;

use super::process;

/// Number of the capability (linux/capability.h).
pub const CAP_SYS_ADMIN: u32 = 21;

/// The effective capabilities as a bit set (capabilities(7)); `None` if /proc does not show them.
#[must_use]
pub fn effective() -> Option<u64> {
    process::effective_capabilities("self")
}

/// Whether this process has the capability over its own user namespace.
#[must_use]
pub fn has(capability: u32) -> bool {
    effective().is_some_and(|bits| bits >> capability & 1 == 1)
}

/// The securebits of this thread (capabilities(7)); 0 where they cannot be read.
#[must_use]
pub fn securebits() -> u32 {
    // SAFETY: a system call on numbers.
    let bits = unsafe { libc::prctl(libc::PR_GET_SECUREBITS) };
    u32::try_from(bits).unwrap_or(0)
}

/// Whether user 0 of this process is user 0 of the machine.
#[must_use]
pub fn over_the_machine() -> bool {
    is_whole(&std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default())
}

/// Whether this is the map of the initial user namespace, which maps every id to itself. An empty map means a kernel
/// without user namespaces.
#[must_use]
pub fn is_whole(map: &str) -> bool {
    let fields: Vec<&str> = map.split_whitespace().collect();
    fields.is_empty() || fields == ["0", "0", "4294967295"]
}

/// Whether the map of a user namespace (its uid_map or gid_map) has this id. An empty map means a kernel without user
/// namespaces.
#[must_use]
pub fn is_mapped(map: &str, id: u32) -> bool {
    let mut ranges = map.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().map(str::parse::<u64>);
        let (first, _, count) = (fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?);
        Some(first..first + count)
    });
    map.trim().is_empty() || ranges.any(|range| range.contains(&u64::from(id)))
}

/// Whether io_uring_setup(2) works: the kernel has it, and neither `kernel.io_uring_disabled` nor a seccomp filter
/// forbids it.
#[must_use]
pub fn io_uring_works() -> bool {
    let nowhere: *const libc::c_void = std::ptr::null();
    // SAFETY: the kernel refuses parameters at address 0 before it creates anything.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, nowhere) };
    let refused = io::Error::last_os_error().raw_os_error();
    !(result < 0 && matches!(refused, Some(libc::ENOSYS | libc::EPERM)))
}

/// Whether the kernel has arch_prctl(ARCH_REQ_XCOMP_PERM), by which a process gets AMX (Linux 5.16). It is the same on a CPU
/// without AMX.
#[must_use]
pub fn amx_can_be_granted() -> bool {
    const ARCH_GET_XCOMP_SUPP: libc::c_int = 0x1021;
    let mut features: u64 = 0;
    // SAFETY: the kernel writes one u64, which lives until the call is over.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_GET_XCOMP_SUPP, &raw mut features) == 0 }
}

/// Whether a seccomp filter that returns an error for a system call can be set: the kernel supports it
/// (CONFIG_SECCOMP_FILTER), and nothing forbids it.
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

    #[test]
    fn a_map_has_the_ids_of_its_ranges() {
        let map = "         0       1000          1\n         1     100000      65536\n";
        assert!([0, 1, 65536].iter().all(|id| is_mapped(map, *id)) && !is_mapped(map, 65537));
        assert!(is_mapped("0 0 4294967295\n", u32::MAX - 1) && is_mapped("", 7));
    }
}
