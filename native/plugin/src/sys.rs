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
    pub(crate) const READ: usize = 0;
    pub(crate) const WRITE: usize = 1;
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const FSTAT: usize = 5;
    pub(crate) const RT_SIGACTION: usize = 13;
    pub(crate) const GETITIMER: usize = 36;
    pub(crate) const WAIT4: usize = 61;
    pub(crate) const PTRACE: usize = 101;
    pub(crate) const GETGROUPS: usize = 115;
    pub(crate) const SETGROUPS: usize = 116;
    pub(crate) const SETRESUID: usize = 117;
    pub(crate) const SETRESGID: usize = 119;
    pub(crate) const SETFSUID: usize = 122;
    pub(crate) const SETFSGID: usize = 123;
    pub(crate) const CAPGET: usize = 125;
    pub(crate) const CAPSET: usize = 126;
    pub(crate) const SIGALTSTACK: usize = 131;
    pub(crate) const FSTATFS: usize = 138;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const GETDENTS64: usize = 217;
    pub(crate) const TIMER_GETTIME: usize = 224;
    pub(crate) const TGKILL: usize = 234;
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
    pub(crate) const PROCESS_VM_READV: usize = 310;
    pub(crate) const MEMBARRIER: usize = 324;
    pub(crate) const PROCESS_VM_WRITEV: usize = 311;
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

/// How a number is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Base {
    Decimal,
    Hexadecimal,
}

/// Text that is made without an allocator. What does not fit spoils it.
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    /// More than `N` if something did not fit.
    length: usize,
}

impl<const N: usize> Text<N> {
    pub(crate) fn new() -> Text<N> {
        Text { bytes: [0; N], length: 0 }
    }

    pub(crate) fn push(&mut self, more: &[u8]) {
        let end = self.length.saturating_add(more.len());
        match self.bytes.get_mut(self.length..end) {
            Some(room) => {
                room.iter_mut().zip(more).for_each(|(to, from)| *to = *from);
                self.length = end;
            }
            None => self.length = usize::MAX,
        }
    }

    pub(crate) fn push_number(&mut self, mut value: u64, base: Base) {
        // The longest has 20 digits.
        let mut digits = [0u8; 20];
        let mut count = 0;
        for slot in digits.iter_mut().rev() {
            let (digit, rest) = match base {
                Base::Decimal => ((value % 10) as u8, value / 10),
                Base::Hexadecimal => ((value & 15) as u8, value >> 4),
            };
            *slot = if digit < 10 { b'0' + digit } else { b'a' + digit - 10 };
            count += 1;
            value = rest;
            if value == 0 {
                break;
            }
        }
        self.push(digits.get(digits.len() - count..).unwrap_or_default());
    }

    pub(crate) fn bytes(mut self, more: &[u8]) -> Text<N> {
        self.push(more);
        self
    }

    pub(crate) fn decimal(mut self, value: u64) -> Text<N> {
        self.push_number(value, Base::Decimal);
        self
    }

    /// `None` if something did not fit.
    pub(crate) fn get(&self) -> Option<&[u8]> {
        self.bytes.get(..self.length)
    }
}

fn open<const N: usize>(path: Text<N>, flags: usize) -> Option<i32> {
    const O_CLOEXEC: usize = 0o2_000_000;
    let path = path.bytes(b"\0");
    let path = path.get()?;
    let arguments = [argument(AT_FDCWD), path.as_ptr().addr(), flags | O_CLOEXEC, 0, 0, 0];
    // SAFETY: the path ends with NUL.
    i32::try_from(unsafe { call(number::OPENAT, arguments) }).ok().filter(|fd| *fd >= 0)
}

/// The content of a file, as much of it as the buffer can take.
pub(crate) fn read_file<const N: usize>(path: Text<N>, buffer: &mut [u8]) -> Option<&[u8]> {
    let fd = open(path, 0)?;
    let mut length = 0;
    while let Some(room) = buffer.get_mut(length..).filter(|room| !room.is_empty()) {
        // SAFETY: the kernel writes so many bytes at most, to memory that is borrowed here.
        let result = unsafe { call(number::READ, [argument(fd), room.as_mut_ptr().addr(), room.len(), 0, 0, 0]) };
        match usize::try_from(result) {
            Ok(read) if read > 0 => length += read,
            _ => break,
        }
    }
    close(fd);
    buffer.get(..length)
}

/// Calls `each` with the name of each entry of a folder.
pub(crate) fn each_entry<const N: usize>(path: Text<N>, mut each: impl FnMut(&[u8])) {
    const O_DIRECTORY: usize = 0o200_000;
    /// Of `struct linux_dirent64`: its length, and its name.
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    let Some(fd) = open(path, O_DIRECTORY) else { return };
    let mut buffer = [0u64; 512];
    loop {
        let size = size_of_val(&buffer);
        // SAFETY: the kernel writes so many bytes at most.
        let result = unsafe { call(number::GETDENTS64, [argument(fd), buffer.as_mut_ptr().addr(), size, 0, 0, 0]) };
        let Ok(filled) = usize::try_from(result) else { break };
        if filled == 0 {
            break;
        }
        // SAFETY: bytes of the buffer, all of which have a value.
        let bytes = unsafe { from_raw_parts(buffer.as_ptr().cast::<u8>(), filled.min(size)) };
        let mut rest = bytes;
        while let Some(&[low, high]) = rest.get(LENGTH..LENGTH + 2) {
            let length = usize::from(u16::from_ne_bytes([low, high]));
            let Some(name) = rest.get(NAME..length) else { break };
            each(name.split(|byte| *byte == 0).next().unwrap_or_default());
            rest = rest.get(length..).unwrap_or_default();
        }
    }
    close(fd);
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
    fn text_is_made_and_read_without_an_allocator() {
        let text = Text::<32>::new().bytes(b"/proc/").decimal(0).bytes(b" ").decimal(u64::MAX);
        assert_eq!(text.get().unwrap(), b"/proc/0 18446744073709551615");
        assert!(text.bytes(b"12345").get().is_none());
        let mut hexadecimal = Text::<32>::new();
        hexadecimal.push_number(0xdead_beef, Base::Hexadecimal);
        assert_eq!(hexadecimal.get().unwrap(), b"deadbeef");
        let open: Vec<_> = (0..500).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let mut names = Vec::new();
        each_entry(Text::<64>::new().bytes(b"/proc/self/fd"), |name| names.push(name.to_owned()));
        names.sort();
        names.dedup();
        assert!(open.iter().all(|file| names.contains(&file.as_raw_fd().to_string().into_bytes())));
        let mut buffer = [0; 4];
        assert_eq!(read_file(Text::<64>::new().bytes(b"/proc/version"), &mut buffer).unwrap(), b"Linu");
        assert!(read_file(Text::<64>::new().bytes(b"/proc/none"), &mut buffer).is_none());
    }

    #[test]
    fn procfs_is_told_from_other_file_systems() {
        let open = |path: &str| std::fs::File::open(path).unwrap();
        assert!(is_proc(open("/proc/self/status").as_raw_fd()));
        assert!(!is_proc(open("/proc/self/exe").as_raw_fd()), "that is a link to a file elsewhere");
        assert!(!is_proc(open("/").as_raw_fd()) && !is_proc(-1));
    }
}
