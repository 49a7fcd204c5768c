//! System calls, and access to the process's memory and environment.

use core::arch::global_asm;
use core::ffi::{c_char, c_void};
use core::mem::{MaybeUninit, transmute};
use core::slice::from_raw_parts;
use core::sync::atomic::{AtomicPtr, Ordering};

pub(crate) use rekindle_abi::runtime::{argument, call};

use crate::accept::Device;

/// Numbers of system calls (x86-64).
pub(crate) mod number {
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const FSTAT: usize = 5;
    pub(crate) const GETGROUPS: usize = 115;
    pub(crate) const SETGROUPS: usize = 116;
    pub(crate) const SETRESUID: usize = 117;
    pub(crate) const SETRESGID: usize = 119;
    pub(crate) const SETFSUID: usize = 122;
    pub(crate) const SETFSGID: usize = 123;
    pub(crate) const CAPGET: usize = 125;
    pub(crate) const CAPSET: usize = 126;
    pub(crate) const FSTATFS: usize = 138;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const KEYCTL: usize = 250;
    pub(crate) const OPENAT: usize = 257;
    pub(crate) const UTIMENSAT: usize = 280;
    pub(crate) const FCHOWNAT: usize = 260;
    pub(crate) const UNLINKAT: usize = 263;
    pub(crate) const LINKAT: usize = 265;
    pub(crate) const NEWFSTATAT: usize = 262;
    pub(crate) const FCNTL: usize = 72;
    pub(crate) const FCHDIR: usize = 81;
    pub(crate) const PRLIMIT64: usize = 302;
    pub(crate) const OPEN_BY_HANDLE_AT: usize = 304;
    pub(crate) const OPENAT2: usize = 437;
}

pub(crate) const AT_FDCWD: i32 = -100;
pub(crate) const EPERM: isize = -1;
pub(crate) const EACCES: isize = -13;
pub(crate) const ENOSYS: isize = -38;

/// A system call with numbers only.
pub(crate) fn numbers(number: usize, [a, b, c]: [usize; 3]) -> isize {
    // SAFETY: callers pass it the numbers of calls that touch no memory.
    unsafe { call(number, [a, b, c, 0, 0, 0]) }
}

pub(crate) fn close(fd: i32) {
    numbers(number::CLOSE, [argument(fd), 0, 0]);
}

/// `struct stat` of x86-64.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Stat {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    links: u64,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    /// Group, padding.
    rest_of_owner: [u32; 2],
    rdev: u64,
    rest: [u64; 12],
}

impl Stat {
    /// The type of the file: the upper bits of the mode.
    pub(crate) fn kind(&self) -> u32 {
        self.mode & 0o170_000
    }
}

pub(crate) const DIRECTORY: u32 = 0o040_000;
pub(crate) const REGULAR: u32 = 0o100_000;

pub(crate) fn stat(fd: i32) -> Option<Stat> {
    let mut stat = MaybeUninit::<Stat>::uninit();
    // SAFETY: fstat(2) writes to a struct of its size that lives until the call is over.
    let result = unsafe { call(number::FSTAT, [argument(fd), stat.as_mut_ptr().addr(), 0, 0, 0, 0]) };
    if result != 0 {
        return None;
    }
    // SAFETY: the kernel has filled it in.
    Some(unsafe { stat.assume_init() })
}

/// Whether the descriptor is on a procfs.
pub(crate) fn is_proc(fd: i32) -> bool {
    /// `PROC_SUPER_MAGIC`.
    const PROC: u64 = 0x9fa0;
    // `struct statfs` has 120 bytes; the type comes first.
    let mut statfs = [0u64; 16];
    // SAFETY: fstatfs(2) writes 120 bytes to memory that lives until the call is over.
    let result = unsafe { call(number::FSTATFS, [argument(fd), statfs.as_mut_ptr().addr(), 0, 0, 0, 0]) };
    result == 0 && statfs[0] == PROC
}

/// The device of a descriptor, open or path-only (O_PATH); `None` if it is no device.
pub(crate) fn device(fd: i32) -> Option<Device> {
    let stat = stat(fd)?;
    let kind = match stat.kind() {
        0o020_000 => b'c',
        0o060_000 => b'b',
        _ => return None,
    };
    // The kernel's `new_encode_dev`.
    let (major, minor) = (stat.rdev >> 8 & 0xfff, stat.rdev & 0xff | stat.rdev >> 12 & 0xf_ff00);
    Some(Device { kind, major: major as u32, minor: minor as u32 })
}

global_asm!(
    ".weak getenv",
    ".weak __errno_location",
    ".pushsection .data.rekindle_libc, \"aw\", @progbits",
    ".balign 8",
    ".hidden rekindle_getenv",
    ".globl rekindle_getenv",
    "rekindle_getenv: .quad getenv",
    ".hidden rekindle_errno",
    ".globl rekindle_errno",
    "rekindle_errno: .quad __errno_location",
    ".popsection",
);

rekindle_abi::compiler_functions!();

unsafe extern "C" {
    #[link_name = "rekindle_getenv"]
    static GETENV: AtomicPtr<c_void>;
    #[link_name = "rekindle_errno"]
    static ERRNO: AtomicPtr<c_void>;
}

/// The value of an environment variable.
pub(crate) fn variable(name: &core::ffi::CStr) -> Option<&'static [u8]> {
    // SAFETY: a static of this object, at all times.
    let getenv = unsafe { GETENV.load(Ordering::Relaxed) };
    if getenv.is_null() {
        return None;
    }
    // SAFETY: the loader put the address of getenv(3) there.
    let getenv: unsafe extern "C" fn(*const c_char) -> *const c_char = unsafe { transmute(getenv) };
    // SAFETY: a string that ends with NUL. CRIU has one thread, and does not change these variables.
    let value = unsafe { getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: getenv answers with a string that ends with NUL.
    let length = unsafe { length(value) };
    // SAFETY: these bytes stay in the environment.
    Some(unsafe { from_raw_parts(value.cast(), length) })
}

/// The length of a string.
///
/// # Safety
/// It ends with NUL.
pub(crate) unsafe fn length(text: *const c_char) -> usize {
    let mut length = 0;
    // SAFETY: up to the NUL this is within the string.
    while unsafe { text.add(length).read() } != 0 {
        length += 1;
    }
    length
}

/// Converts a result to the convention of the C library: -1 and errno for an error.
pub(crate) fn answer(result: isize) -> isize {
    if !(-4095..0).contains(&result) {
        return result;
    }
    // SAFETY: a static of this object, at all times.
    let location = unsafe { ERRNO.load(Ordering::Relaxed) };
    if !location.is_null() {
        // SAFETY: the loader put the address of __errno_location there.
        let location: unsafe extern "C" fn() -> *mut i32 = unsafe { transmute(location) };
        // SAFETY: it has no condition.
        let errno = unsafe { location() };
        // SAFETY: it answers with the place of this thread's errno.
        unsafe { errno.write((-result) as i32) };
    }
    -1
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_device_is_told_from_other_files() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(device(null.as_raw_fd()), Some(Device { kind: b'c', major: 1, minor: 3 }));
        let other = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(device(other.as_raw_fd()), None);
        assert_eq!(device(-1), None);
    }

    #[test]
    fn procfs_is_told_from_other_file_systems() {
        let open = |path: &str| std::fs::File::open(path).unwrap();
        assert!(is_proc(open("/proc/self/status").as_raw_fd()));
        assert!(!is_proc(open("/proc/self/exe").as_raw_fd()), "that is a link to a file elsewhere");
        assert!(!is_proc(open("/").as_raw_fd()) && !is_proc(-1));
    }
}
