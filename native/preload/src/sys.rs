//! The system calls of the interposer. They bypass libc: its wrappers set errno, and some are cancellation points.

use core::arch::asm;
use core::ffi::CStr;
use core::mem::MaybeUninit;
use core::sync::atomic::AtomicU32;

pub(crate) use rekindle_abi::runtime::Errno;
use rekindle_abi::runtime::{argument as arg, checked};

pub(crate) const EINVAL: Errno = Errno(22);
const EINTR: Errno = Errno(4);

pub(crate) const PROT_NONE: i32 = 0;
pub(crate) const PROT_READ: i32 = 1;
pub(crate) const PROT_WRITE: i32 = 2;
pub(crate) const PROT_EXEC: i32 = 4;
pub(crate) const MAP_SHARED: i32 = 1;
pub(crate) const MAP_PRIVATE: i32 = 2;
pub(crate) const MAP_FIXED: i32 = 0x10;
pub(crate) const MAP_ANONYMOUS: i32 = 0x20;
pub(crate) const MAP_NORESERVE: i32 = 0x4000;
pub(crate) const MAP_POPULATE: i32 = 0x8000;

const TMPFS_MAGIC: usize = 0x0102_1994;

fn call(number: usize, args: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: the kernel checks the arguments; callers pass pointers that outlive the call.
    checked(unsafe { rekindle_abi::runtime::call(number, args) })
}

/// ioctl(2).
pub(crate) fn ioctl(fd: i32, request: usize, argument: usize) -> Result<i32, Errno> {
    call(16, [arg(fd), request, argument, 0, 0, 0]).map(|result| result as i32)
}

/// The id of the calling thread, as the process sees it.
pub(crate) fn thread() -> i32 {
    call(186, [0; 6]).map_or(0, |tid| tid as i32)
}

/// Creates a memfd of zeros with this name, mapped shared, but not in forked children; returns its address. The size is
/// sealed, because a reader must not be killed by a process that cuts the file.
pub(crate) fn shared_memory(name: &CStr, length: usize) -> Result<usize, Errno> {
    if length > file_size_limit() {
        return Err(EINVAL);
    }
    let file = call(319, [name.as_ptr().addr(), 3, 0, 0, 0, 0])?; // MFD_CLOEXEC | MFD_ALLOW_SEALING
    let file = File(file as i32);
    file.truncate(length)?;
    call(72, [arg(file.0), 1033, 6, 0, 0, 0])?; // F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW
    let address = file.map(0, length, PROT_READ | PROT_WRITE, MAP_SHARED)?;
    if let Err(errno) = call(28, [address, length, 10, 0, 0, 0]) {
        let _ = unmap(address, length); // MADV_DONTFORK
        return Err(errno);
    }
    Ok(address)
}

/// A page of zero bytes, which is zero again in a forked child.
pub(crate) fn unforked_page(length: usize) -> Result<usize, Errno> {
    let address = map(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)?;
    if let Err(errno) = call(28, [address, length, 18, 0, 0, 0]) {
        let _ = unmap(address, length); // MADV_WIPEONFORK
        return Err(errno);
    }
    Ok(address)
}

/// Sleeps as long as `word` is `value`, or a little less.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32) {
    let _ = call(202, [word.as_ptr().addr(), 0, value as usize, 0, 0, 0]); // FUTEX_WAIT, between processes
}

/// Creates a pair of sockets for packets.
pub(crate) fn socket_pair() -> Result<[File; 2], Errno> {
    let mut pair = [-1_i32; 2];
    // AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC.
    call(53, [1, 5 | 0o2_000_000, 0, pair.as_mut_ptr().addr(), 0, 0])?;
    Ok(pair.map(File))
}

/// struct msghdr, for one packet and one descriptor.
#[repr(C)]
struct Message {
    name: usize,
    name_length: usize,
    parts: usize,
    part_count: usize,
    control: usize,
    control_length: usize,
    flags: usize,
}

/// struct cmsghdr with one descriptor, SCM_RIGHTS, and what aligns it.
#[repr(C)]
struct Control {
    length: usize,
    level: i32,
    kind: i32,
    descriptor: i32,
    unused: i32,
}

/// Length of a [`Control`] without padding.
const CONTROL_LENGTH: usize = 20;

pub(crate) fn pid() -> i32 {
    call(39, [0; 6]).map_or(0, |pid| pid as i32)
}

/// An open file, closed when dropped.
#[derive(Debug)]
pub(crate) struct File(i32);

impl Drop for File {
    fn drop(&mut self) {
        let _ = call(3, [arg(self.0), 0, 0, 0, 0, 0]);
    }
}

/// Metadata of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Status {
    pub(crate) is_regular: bool,
    pub(crate) device: usize,
    pub(crate) inode: usize,
    pub(crate) size: usize,
    /// Bytes that have memory or disk space allocated.
    pub(crate) allocated: usize,
}

impl File {
    pub(crate) fn read_only(path: &CStr) -> Result<File, Errno> {
        File::open(path.as_ptr().addr(), 0)
    }

    /// Opens for reading and writing, without following a symbolic link. `path` ends with NUL.
    pub(crate) fn open_no_follow(path: *const u8) -> Result<File, Errno> {
        File::open(path.addr(), 2 | 0o400_000) // O_RDWR | O_NOFOLLOW
    }

    fn open(path: usize, flags: usize) -> Result<File, Errno> {
        // openat, because seccomp filters allow it more often than open; relative to AT_FDCWD, with O_CLOEXEC.
        call(257, [arg(-100), path, flags | 0o2_000_000, 0, 0, 0]).map(|fd| File(fd as i32))
    }

    pub(crate) fn read(&self, buffer: *mut u8, length: usize) -> Result<usize, Errno> {
        call(0, [arg(self.0), buffer.addr(), length, 0, 0, 0])
    }

    pub(crate) fn status(&self) -> Result<Status, Errno> {
        // struct stat: st_dev 0, st_ino 8, st_mode 24, st_size 48, st_blocks 64.
        let mut stat = [0_usize; 18];
        call(5, [arg(self.0), stat.as_mut_ptr().addr(), 0, 0, 0, 0])?;
        let is_regular = stat[3] & 0o170_000 == 0o100_000;
        Ok(Status { is_regular, device: stat[0], inode: stat[1], size: stat[6], allocated: stat[8].wrapping_mul(512) })
    }

    /// Whether it is in memory.
    pub(crate) fn is_in_tmpfs(&self) -> bool {
        // struct statfs is 120 bytes; f_type is the first word.
        let mut statfs = [0_usize; 15];
        call(138, [arg(self.0), statfs.as_mut_ptr().addr(), 0, 0, 0, 0]).is_ok() && statfs[0] == TMPFS_MAGIC
    }

    pub(crate) fn truncate(&self, length: usize) -> Result<(), Errno> {
        call(77, [arg(self.0), length, 0, 0, 0, 0]).map(drop)
    }

    pub(crate) fn allocate(&self, length: usize) -> Result<(), Errno> {
        call(285, [arg(self.0), 0, 0, length, 0, 0]).map(drop)
    }

    /// Takes over a descriptor.
    pub(crate) fn from_number(number: i32) -> File {
        File(number)
    }

    pub(crate) fn number(&self) -> i32 {
        self.0
    }

    /// Another descriptor for the same file, with at least this number, which is not inherited by other programs.
    pub(crate) fn duplicate(&self, least: usize) -> Result<File, Errno> {
        call(72, [arg(self.0), 1030, least, 0, 0, 0]).map(|fd| File(fd as i32)) // F_DUPFD_CLOEXEC
    }

    /// The descriptor, which from now on is the caller's to close.
    pub(crate) fn into_number(self) -> i32 {
        let number = self.0;
        core::mem::forget(self);
        number
    }

    /// Sets a time limit for receiving packets.
    pub(crate) fn set_receive_timeout(&self, seconds: usize) -> Result<(), Errno> {
        let time = [seconds, 0];
        call(54, [arg(self.0), 1, 20, time.as_ptr().addr(), size_of_val(&time), 0]).map(drop) // SOL_SOCKET, SO_RCVTIMEO
    }

    /// Receives a packet, with its descriptor if there is one; `None` at the end. A packet of another length is an
    /// error.
    pub(crate) fn receive<T: Copy>(&self) -> Result<Option<(T, Option<File>)>, Errno> {
        let mut value = MaybeUninit::<T>::uninit();
        let part = [value.as_mut_ptr().addr(), size_of::<T>()];
        let mut control = Control { length: 0, level: 0, kind: 0, descriptor: -1, unused: 0 };
        let mut message = Message {
            name: 0,
            name_length: 0,
            parts: part.as_ptr().addr(),
            part_count: 1,
            control: (&raw mut control).addr(),
            control_length: size_of::<Control>(),
            flags: 0,
        };
        let received = loop {
            // MSG_CMSG_CLOEXEC.
            match call(47, [arg(self.0), (&raw mut message).addr(), 0x4000_0000, 0, 0, 0]) {
                Err(EINTR) => {}
                other => break other?,
            }
        };
        // SAFETY: the kernel has written what it says.
        let control = unsafe { (&raw const control).read_volatile() };
        let has_one = control.length == CONTROL_LENGTH && (control.level, control.kind) == (1, 1);
        let descriptor = has_one.then_some(File(control.descriptor));
        match received {
            0 => Ok(None),
            // SAFETY: written whole; the types that are received are numbers.
            length if length == size_of::<T>() => Ok(Some((unsafe { value.assume_init() }, descriptor))),
            _ => Err(EINVAL),
        }
    }

    /// Sends a packet, with a descriptor if there is one.
    pub(crate) fn send<T: Copy>(&self, value: &T, descriptor: Option<&File>) -> Result<(), Errno> {
        let part = [core::ptr::from_ref(value).addr(), size_of::<T>()];
        let number = descriptor.map_or(-1, |file| file.0);
        // SOL_SOCKET, SCM_RIGHTS.
        let control = Control { length: CONTROL_LENGTH, level: 1, kind: 1, descriptor: number, unused: 0 };
        let message = Message {
            name: 0,
            name_length: 0,
            parts: part.as_ptr().addr(),
            part_count: 1,
            control: if descriptor.is_some() { (&raw const control).addr() } else { 0 },
            control_length: if descriptor.is_some() { size_of::<Control>() } else { 0 },
            flags: 0,
        };
        // MSG_NOSIGNAL.
        call(46, [arg(self.0), (&raw const message).addr(), 0x4000, 0, 0, 0]).map(drop)
    }

    /// Maps the file from its beginning.
    pub(crate) fn map(&self, address: usize, length: usize, prot: i32, flags: i32) -> Result<usize, Errno> {
        map(address, length, prot, flags, self.0, 0)
    }
}

/// The target of a symbolic link; returns its length, or that of `target` if it is longer. `path` ends with NUL.
pub(crate) fn read_link(path: *const u8, target: &mut [u8]) -> Result<usize, Errno> {
    call(267, [arg(-100), path.addr(), target.as_mut_ptr().addr(), target.len(), 0, 0]) // readlinkat, AT_FDCWD
}

pub(crate) fn map(a: usize, length: usize, prot: i32, flags: i32, fd: i32, offset: isize) -> Result<usize, Errno> {
    call(9, [a, length, arg(prot), arg(flags), arg(fd), offset as usize])
}

pub(crate) fn unmap(address: usize, length: usize) -> Result<(), Errno> {
    call(11, [address, length, 0, 0, 0, 0]).map(drop)
}

pub(crate) fn protect(address: usize, length: usize, prot: i32) -> Result<(), Errno> {
    call(10, [address, length, arg(prot), 0, 0, 0]).map(drop)
}

/// Allocates every page of a mapping now (MADV_POPULATE_READ, Linux 5.14): a lack of memory is an error here instead of
/// a SIGBUS later.
pub(crate) fn populate(address: usize, length: usize) -> Result<(), Errno> {
    call(28, [address, length, 22, 0, 0, 0]).map(drop)
}

/// The maximum size of files that this process may create. A larger one would cause SIGXFSZ, which ends it.
pub(crate) fn file_size_limit() -> usize {
    let mut limit = [0_usize; 2];
    match call(302, [0, 1, 0, limit.as_mut_ptr().addr(), 0, 0]) {
        Ok(_) => limit[0],
        Err(_) => 0,
    }
}

/// How many descriptors this process may have.
pub(crate) fn descriptor_limit() -> usize {
    let mut limit = [0_usize; 2];
    match call(302, [0, 7, 0, limit.as_mut_ptr().addr(), 0, 0]) {
        Ok(_) => limit[0],
        Err(_) => 0,
    }
}

/// CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn now() -> u64 {
    let mut time = [0_u64; 2];
    let _ = call(228, [1, time.as_mut_ptr().addr(), 0, 0, 0, 0]);
    time[0].wrapping_mul(1_000_000_000).wrapping_add(time[1])
}

/// How many CPUs the calling thread may use.
pub(crate) fn cpus() -> usize {
    // Room for 8192 CPUs, the maximum of a kernel. Only the returned bytes are read.
    let mut set = [const { MaybeUninit::<usize>::uninit() }; 128];
    let Ok(bytes) = call(204, [0, 1024, set.as_mut_ptr().addr(), 0, 0, 0]) else { return 1 };
    let words = set.iter().take(bytes / 8);
    // SAFETY: the kernel wrote this many bytes.
    words.map(|word| unsafe { word.assume_init() }.count_ones() as usize).sum()
}

/// Sleeps this many nanoseconds (less than a second), or until a signal.
pub(crate) fn sleep(nanoseconds: u64) {
    let time = [0, nanoseconds];
    let _ = call(35, [time.as_ptr().addr(), 0, 0, 0, 0, 0]);
}

pub(crate) fn yield_now() {
    let _ = call(24, [0; 6]);
}

/// A kernel signal set: 64 bits on x86-64.
pub(crate) type SignalSet = u64;

/// Sets the calling thread's mask and returns the old one.
pub(crate) fn set_signal_mask(set: SignalSet) -> SignalSet {
    let mut old: SignalSet = 0;
    let (new, old_at) = ((&raw const set).addr(), (&raw mut old).addr());
    let _ = call(14, [2, new, old_at, size_of::<SignalSet>(), 0, 0]); // SIG_SETMASK
    old
}

/// The name of the calling thread, at most 15 bytes.
pub(crate) fn name_thread(name: &CStr) {
    let _ = call(157, [15, name.as_ptr().addr(), 0, 0, 0, 0]); // PR_SET_NAME
}

/// Ends the calling thread only.
pub(crate) fn end_thread() -> ! {
    loop {
        let _ = call(60, [0; 6]);
    }
}

/// Starts a thread of this process on this stack. The kernel sets `ended` to zero when it has ended, and wakes nobody.
///
/// It has no thread pointer: a stray use of thread-local storage must not reach another thread's variables.
///
/// # Safety
/// `stack` is the end of memory that nobody else uses until `ended` is zero, aligned to 16; `main` uses neither libc nor
/// thread-local storage.
pub(crate) unsafe fn start_thread(stack: usize, ended: usize, main: extern "C" fn() -> !) -> Result<(), Errno> {
    const VM: usize = 0x100;
    const FS: usize = 0x200;
    const FILES: usize = 0x400;
    const SIGHAND: usize = 0x800;
    const THREAD: usize = 0x1_0000;
    const SYSVSEM: usize = 0x4_0000;
    const SETTLS: usize = 0x8_0000;
    const CHILD_CLEARTID: usize = 0x20_0000;
    let flags = VM | FS | FILES | SIGHAND | THREAD | SYSVSEM | SETTLS | CHILD_CLEARTID;
    let result: isize;
    // SAFETY: the new thread begins behind the instruction with the registers of this one but for the stack pointer, and
    // leaves this code at once; for this one the call is as any.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "call {main}",
            "ud2",
            "2:",
            main = in(reg) main,
            inlateout("rax") 56_usize => result,
            in("rdi") flags, in("rsi") stack, in("rdx") 0, in("r10") ended, in("r8") 0,
            // Not lateout: the address of `main` is still needed after the instruction has overwritten them.
            out("rcx") _, out("r11") _);
    }
    if result < 0 { Err(Errno(-(result as i32))) } else { Ok(()) }
}

/// Copies without a call.
///
/// # Safety
/// `length` readable bytes at `from` and writable ones at `to`, which do not overlap.
pub(crate) unsafe fn copy_bytes(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: copies exactly `length` bytes; the direction flag is clear by the ABI.
    unsafe {
        asm!("rep movsb", inout("rcx") length => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
}
