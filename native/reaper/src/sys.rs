//! The system calls of the reaper, x86-64, without a libc. Each wrapper only makes its call.

use core::arch::global_asm;
use core::ffi::{CStr, c_char};

pub(crate) use rekindle_abi::runtime::Errno;
use rekindle_abi::runtime::{argument as arg, checked};

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("rekindle runs on Linux, x86-64: the CUDA driver offers process checkpoints nowhere else");

// The kernel enters with the stack 16-byte aligned and no return address.
global_asm!(".globl _start", "_start:", "mov rdi, rsp", "and rsp, -16", "call begin", "ud2");

pub(crate) const ENOENT: Errno = Errno(2);
pub(crate) const E2BIG: Errno = Errno(7);
pub(crate) const ENOEXEC: Errno = Errno(8);
pub(crate) const EACCES: Errno = Errno(13);
const EINTR: Errno = Errno(4);

pub(crate) const SIGKILL: i32 = 9;
pub(crate) const SIGCHLD: i32 = 17;
pub(crate) const SIGSTOP: i32 = 19;
pub(crate) const WNOHANG: usize = 1;
pub(crate) const MS_NOSUID: usize = 2;
pub(crate) const MS_NODEV: usize = 4;
pub(crate) const MS_NOEXEC: usize = 8;
pub(crate) const MS_BIND: usize = 0x1000;
pub(crate) const MS_REC: usize = 0x4000;
pub(crate) const MS_SLAVE: usize = 1 << 19;

/// The side of a fork that this process is on.
pub(crate) enum Process {
    Child,
    Parent(i32),
}

/// A kernel signal set: 64 bits on x86-64.
pub(crate) type SignalSet = u64;

fn call(number: usize, [a, b, c, d, e]: [usize; 5]) -> Result<usize, Errno> {
    // SAFETY: the kernel checks the arguments; callers pass pointers that outlive the call.
    checked(unsafe { rekindle_abi::runtime::call(number, [a, b, c, d, e, 0]) })
}

fn as_pid(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(0)
}

pub(crate) fn exit(code: i32) -> ! {
    loop {
        let _ = call(231, [arg(code), 0, 0, 0, 0]); // exit_group
    }
}

pub(crate) fn write(fd: i32, bytes: &[u8]) -> Result<usize, Errno> {
    call(1, [arg(fd), bytes.as_ptr().addr(), bytes.len(), 0, 0])
}

fn open(path: &CStr, flags: usize) -> Result<i32, Errno> {
    call(2, [path.as_ptr().addr(), flags, 0, 0, 0]).map(as_pid)
}

fn close(fd: i32) {
    let _ = call(3, [arg(fd), 0, 0, 0, 0]);
}

/// Opens a file as standard input. A terminal does not become the controlling one.
pub(crate) fn open_as_input(path: &CStr) -> Result<(), Errno> {
    // The lowest free number is given.
    close(0);
    open(path, 0o400).map(drop) // O_RDONLY | O_NOCTTY
}

/// Closes every descriptor, including the standard ones: the reaper needs none, and would delay readers that wait for
/// the end of a pipe.
pub(crate) fn close_all() -> Result<(), Errno> {
    call(436, [0, u32::MAX as usize, 0, 0, 0]).map(drop) // close_range
}

/// Closes all descriptors but this one.
pub(crate) fn close_all_but(fd: i32) -> Result<(), Errno> {
    if fd > 0 {
        call(436, [0, arg(fd) - 1, 0, 0, 0])?;
    }
    call(436, [arg(fd) + 1, u32::MAX as usize, 0, 0, 0]).map(drop)
}

/// A descriptor that is readable while a signal of `set` waits.
pub(crate) fn signal_file(set: &mut SignalSet) -> Result<i32, Errno> {
    // signalfd4; SFD_NONBLOCK and SFD_CLOEXEC
    call(289, [usize::MAX, core::ptr::from_mut(set).addr(), size_of::<SignalSet>(), 0o2_004_000, 0]).map(as_pid)
}

/// Takes the signals that wait.
pub(crate) fn drain(signals: i32) {
    let mut buffer = [0u8; 128];
    while let Ok(128) = call(0, [arg(signals), buffer.as_mut_ptr().addr(), buffer.len(), 0, 0]) {}
}

/// Waits until one of two descriptors is readable. Returns whether the first one is.
pub(crate) fn is_readable(first: i32, second: i32) -> bool {
    #[repr(C)]
    struct Poll {
        fd: i32,
        events: i16,
        seen: i16,
    }
    let mut both = [first, second].map(|fd| Poll { fd, events: 1, seen: 0 }); // POLLIN
    let _ = call(7, [both.as_mut_ptr().addr(), 2, usize::MAX, 0, 0]); // poll
    both[0].seen != 0
}

pub(crate) fn write_number(path: &CStr, number: i32) -> Result<(), Errno> {
    let fd = open(path, 1)?; // O_WRONLY
    let mut digits = [0u8; 10];
    let written = write(fd, decimal(number.unsigned_abs(), &mut digits));
    close(fd);
    written.map(drop)
}

pub(crate) fn decimal(mut number: u32, digits: &mut [u8; 10]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 || at == 0 {
            return &digits[at..];
        }
    }
}

pub(crate) fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: usize) -> Result<(), Errno> {
    mount_with(source, target, kind, flags, c"")
}

pub(crate) fn mount_with(source: &CStr, target: &CStr, kind: &CStr, flags: usize, options: &CStr) -> Result<(), Errno> {
    let strings = [source, target, kind].map(|text| text.as_ptr().addr());
    call(165, [strings[0], strings[1], strings[2], flags, options.as_ptr().addr()]).map(drop)
}

/// Sets IFF_UP on `lo`, which then gets its addresses (the kernel's `inetdev_event`, `addrconf_notify`).
pub(crate) fn bring_up_loopback() -> Result<(), Errno> {
    /// `struct ifreq` with flags in its union.
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: u16,
        rest: [u8; 22],
    }
    let mut request = Request { name: *b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0", flags: 1, rest: [0; 22] };
    let any = call(41, [2, 2, 0, 0, 0]).map(as_pid)?; // socket(AF_INET, SOCK_DGRAM, 0)
    let done = call(16, [arg(any), 0x8914, (&raw mut request).addr(), 0, 0]); // ioctl SIOCSIFFLAGS
    close(any);
    done.map(drop)
}

pub(crate) fn fork() -> Result<Process, Errno> {
    Ok(match call(57, [0; 5])? {
        0 => Process::Child,
        pid => Process::Parent(as_pid(pid)),
    })
}

pub(crate) fn exec(path: &CStr, argv: *const *const c_char, envp: *const *const c_char) -> Errno {
    match call(59, [path.as_ptr().addr(), argv.addr(), envp.addr(), 0, 0]) {
        Err(errno) => errno,
        Ok(_) => Errno(0),
    }
}

/// The pid and wait status of a child that has ended, or `None` if none has (WNOHANG). An error if there is no child.
pub(crate) fn wait_any(options: usize) -> Result<Option<(i32, i32)>, Errno> {
    let mut status: i32 = 0;
    loop {
        match call(61, [usize::MAX, (&raw mut status).addr(), options, 0, 0]) {
            Err(EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(0) => return Ok(None),
            Ok(pid) => return Ok(Some((as_pid(pid), status))),
        }
    }
}

pub(crate) fn kill(pid: i32, signal: i32) -> Result<(), Errno> {
    call(62, [arg(pid), arg(signal), 0, 0, 0]).map(drop)
}

pub(crate) fn parent() -> i32 {
    call(110, [0; 5]).map_or(0, as_pid)
}

fn own_pid() -> i32 {
    call(39, [0; 5]).map_or(0, as_pid)
}

/// setpgid(2) of the caller to its own pid.
pub(crate) fn new_group() -> Result<(), Errno> {
    call(109, [0; 5]).map(drop)
}

pub(crate) fn set_groups(groups: &[u32]) -> Result<(), Errno> {
    call(116, [groups.len(), groups.as_ptr().addr(), 0, 0, 0]).map(drop)
}

pub(crate) fn set_gid(gid: i32) -> Result<(), Errno> {
    call(119, [arg(gid), arg(gid), arg(gid), 0, 0]).map(drop)
}

pub(crate) fn set_uid(uid: i32) -> Result<(), Errno> {
    call(117, [arg(uid), arg(uid), arg(uid), 0, 0]).map(drop)
}

fn prctl(option: usize, value: usize) -> Result<(), Errno> {
    call(157, [option, value, 0, 0, 0]).map(drop)
}

pub(crate) fn die_with_parent(signal: i32) -> Result<(), Errno> {
    prctl(1, arg(signal)) // PR_SET_PDEATHSIG
}

pub(crate) fn become_subreaper() -> Result<(), Errno> {
    prctl(36, 1) // PR_SET_CHILD_SUBREAPER
}

pub(crate) fn no_new_privileges() -> Result<(), Errno> {
    prctl(38, 1) // PR_SET_NO_NEW_PRIVS
}

/// Highest priority among ordinary processes, for this process alone: it is not inherited by what it forked before. Needs
/// CAP_SYS_NICE.
pub(crate) fn come_first() -> Result<(), Errno> {
    call(141, [0, 0, arg(-20), 0, 0]).map(drop) // setpriority(PRIO_PROCESS)
}

/// An instruction of a classic BPF program (`struct sock_filter`).
#[repr(C)]
struct Instruction {
    code: u16,
    jump_true: u8,
    jump_false: u8,
    operand: u32,
}

const fn instruction(code: u16, jump_true: u8, jump_false: u8, operand: u32) -> Instruction {
    Instruction { code, jump_true, jump_false, operand }
}

/// Allows every system call except io_uring_setup(2), which fails with ENOSYS as on a kernel without it.
///
/// Its number is the same in every table of system calls that a process of x86-64 or aarch64 can reach, the 32-bit ones
/// included (one table for all since Linux 5.1), and with the bit of x32: so the filter does not check the
/// architecture. Because it depends only on the number, the kernel (5.11 and newer) runs it once for each number and
/// caches the result.
static NO_IO_URING: [Instruction; 5] = [
    instruction(0x20, 0, 0, 0),                 // BPF_LD | BPF_W | BPF_ABS: seccomp_data.nr
    instruction(0x15, 1, 0, 425),               // BPF_JMP | BPF_JEQ | BPF_K: io_uring_setup
    instruction(0x15, 0, 1, 0x4000_0000 | 425), // the same with __X32_SYSCALL_BIT
    instruction(0x06, 0, 0, 0x0005_0000 | 38),  // BPF_RET | BPF_K: SECCOMP_RET_ERRNO, ENOSYS
    instruction(0x06, 0, 0, 0x7fff_0000),       // SECCOMP_RET_ALLOW
];

/// Allows every system call except arch_prctl(2) with ARCH_REQ_XCOMP_PERM, the request for AMX, which fails with
/// EOPNOTSUPP as on a CPU without it.
///
/// The option is an int, so the lower half of the argument is all of it. The kernel (5.11 and newer) runs a filter once for
/// each number and caches the result, if that does not depend on arguments: so only arch_prctl runs it each time.
static NO_AMX: [Instruction; 11] = [
    instruction(0x20, 0, 0, 4),                // BPF_LD | BPF_W | BPF_ABS: seccomp_data.arch
    instruction(0x15, 0, 3, 0xc000_003e),      // BPF_JMP | BPF_JEQ | BPF_K: AUDIT_ARCH_X86_64
    instruction(0x20, 0, 0, 0),                // seccomp_data.nr
    instruction(0x54, 0, 0, !0x4000_0000),     // BPF_ALU | BPF_AND | BPF_K: without __X32_SYSCALL_BIT
    instruction(0x15, 2, 5, 158),              // arch_prctl
    instruction(0x20, 0, 0, 0),                // seccomp_data.nr
    instruction(0x15, 0, 3, 384),              // arch_prctl in the table of i386, which a 64-bit process can reach
    instruction(0x20, 0, 0, 16),               // seccomp_data.args[0], lower half
    instruction(0x15, 0, 1, 0x1023),           // ARCH_REQ_XCOMP_PERM
    instruction(0x06, 0, 0, 0x0005_0000 | 95), // BPF_RET | BPF_K: SECCOMP_RET_ERRNO, EOPNOTSUPP
    instruction(0x06, 0, 0, 0x7fff_0000),      // SECCOMP_RET_ALLOW
];

/// Prevents this process and its children from using io_uring, which CRIU cannot dump. Needs CAP_SYS_ADMIN.
pub(crate) fn refuse_io_uring() -> Result<(), Errno> {
    set_filter(&NO_IO_URING)
}

/// Leaves the session keyring, which setuid(2) and execve(2) keep: the keys in it are root's. Some sandboxes do not allow
/// the call: then nobody in them can use keys.
pub(crate) fn leave_keyring() {
    /// `KEYCTL_JOIN_SESSION_KEYRING`; without a name it is a new one.
    const JOIN: usize = 1;
    let _ = call(250, [JOIN, 0, 0, 0, 0]);
}

/// Prevents this process and its children from using AMX, whose registers and permission CRIU loses. Needs CAP_SYS_ADMIN.
pub(crate) fn refuse_amx() -> Result<(), Errno> {
    set_filter(&NO_AMX)
}

fn set_filter(filter: &'static [Instruction]) -> Result<(), Errno> {
    /// `struct sock_fprog`.
    #[repr(C)]
    struct Program {
        length: u16,
        filter: *const Instruction,
    }
    let program = Program { length: filter.len() as u16, filter: filter.as_ptr() };
    // SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_SPEC_ALLOW: otherwise kernels before 5.16 would disable
    // speculative store bypass for the whole job, which costs far more than the filter.
    call(317, [1, 4, (&raw const program).addr(), 0, 0]).map(drop)
}

/// Drops every capability except CAP_KILL, which is needed to forward signals to a job of another user.
pub(crate) fn keep_only_kill_capability() -> Result<(), Errno> {
    let header: [u32; 2] = [0x2008_0522, 0]; // _LINUX_CAPABILITY_VERSION_3, this thread
    let kill = 1 << 5;
    let data: [u32; 6] = [kill, kill, 0, 0, 0, 0]; // effective, permitted, inheritable; low word, then high word
    call(126, [header.as_ptr().addr(), data.as_ptr().addr(), 0, 0, 0]).map(drop)
}

/// Drops every capability. The ambient ones go with the inheritable ones.
pub(crate) fn drop_capabilities() -> Result<(), Errno> {
    let header: [u32; 2] = [0x2008_0522, 0]; // _LINUX_CAPABILITY_VERSION_3, this thread
    let none = [0u32; 6];
    call(126, [header.as_ptr().addr(), none.as_ptr().addr(), 0, 0, 0]).map(drop)
}

pub(crate) fn forbid_core() {
    let none: [u64; 2] = [0, 0];
    let _ = call(160, [4, none.as_ptr().addr(), 0, 0, 0]); // setrlimit RLIMIT_CORE
    // That limit does not hold for a core that is piped to a program (core(5)), systemd-coredump for one; this does.
    let _ = prctl(4, 0); // PR_SET_DUMPABLE
}

fn set_mask(set: &SignalSet) {
    let _ = call(14, [2, core::ptr::from_ref(set).addr(), 0, size_of::<SignalSet>(), 0]); // SIG_SETMASK
}

/// Blocks every signal and returns the set of all, for [`next_signal`].
pub(crate) fn block_all() -> SignalSet {
    let all = SignalSet::MAX;
    set_mask(&all);
    all
}

pub(crate) fn unblock_all() {
    set_mask(&0);
}

/// Waits for a signal of `set` and returns its number.
pub(crate) fn next_signal(set: &mut SignalSet) -> Result<i32, Errno> {
    call(128, [core::ptr::from_mut(set).addr(), 0, 0, size_of::<SignalSet>(), 0]).map(as_pid) // rt_sigtimedwait
}

/// Ends this process by `signal`, with its default action.
pub(crate) fn raise(signal: i32) {
    unblock_all();
    let _ = kill(own_pid(), signal);
}

rekindle_abi::compiler_functions!();

/// The compiler may call it for texts, and there is no libc that has it.
#[unsafe(no_mangle)]
unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut length = 0;
    // SAFETY: the caller's text is NUL-terminated.
    while unsafe { text.add(length).read_volatile() } != 0 {
        length += 1;
    }
    length
}
