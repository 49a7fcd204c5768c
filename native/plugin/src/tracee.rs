//! A process whose threads CRIU has stopped, and a thread of it that executes system calls for us.
//!
//! The thread executes one `syscall` instruction of its own program with registers of ours, and then gets its own registers,
//! its signal mask and the memory at its stack again.

use core::mem::MaybeUninit;

use crate::sys::{self, Text, argument, number};

const PTRACE_GETREGS: usize = 12;
const PTRACE_SETREGS: usize = 13;
const PTRACE_SYSCALL: usize = 24;
const PTRACE_GETSIGMASK: usize = 0x420a;
const PTRACE_SETSIGMASK: usize = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: usize = 0x420f;

/// The instruction `syscall` on x86-64.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The code segment of 64-bit programs.
const SEGMENT: u64 = 0x33;
/// Upper limit of stops: two for the call, and those that come first.
const STOPS: usize = 100;
/// Bytes of a system call's answer, at most.
const ANSWER: usize = 32;

/// `struct user_regs_struct`
#[repr(C)]
#[derive(Clone, Copy)]
struct Registers {
    /// r15 to rbx.
    saved: [u64; 6],
    r11: u64,
    r10: u64,
    r9: u64,
    r8: u64,
    rax: u64,
    rcx: u64,
    rdx: u64,
    rsi: u64,
    rdi: u64,
    orig_rax: u64,
    rip: u64,
    cs: u64,
    flags: u64,
    rsp: u64,
    /// ss, the bases of fs and gs, and the other segments.
    segments: [u64; 7],
}

/// Where a thread has registered its restartable sequences (`struct ptrace_rseq_configuration`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Rseq {
    pub(crate) address: u64,
    pub(crate) size: u32,
    pub(crate) signature: u32,
    flags: u32,
    padding: u32,
}

/// A process whose threads are stopped and traced by us.
pub(crate) struct Tracee {
    pub(crate) pid: i32,
    /// The address of a `syscall` instruction.
    instruction: u64,
}

impl Tracee {
    pub(crate) fn of(pid: i32) -> Option<Tracee> {
        let registers = registers(pid)?;
        // A thread that waits has just executed one, or executes it again.
        let near = [registers.rip.wrapping_sub(2), registers.rip].into_iter().find(|at| {
            let mut bytes = [0; 2];
            read(pid, *at, &mut bytes).is_some() && bytes == SYSCALL
        });
        Some(Tracee { pid, instruction: near.or_else(|| in_vdso(pid))? })
    }
}

/// The kernel maps a small library into each process, in which is one.
pub(crate) fn in_vdso(pid: i32) -> Option<u64> {
    /// The address of that library, in the auxiliary vector.
    const AT_SYSINFO_EHDR: u64 = 33;
    let mut vector = [0; 1024];
    let path = Text::<64>::new().bytes(b"/proc/").decimal(pid.unsigned_abs().into()).bytes(b"/auxv");
    let vector = sys::read_file(path, &mut vector)?;
    let number = |bytes: &[u8]| Some(u64::from_ne_bytes(bytes.try_into().ok()?));
    let base = vector.chunks_exact(16).find_map(|entry| {
        let (kind, value) = entry.split_at_checked(8)?;
        number(value).filter(|_| number(kind) == Some(AT_SYSINFO_EHDR))
    })?;
    let mut chunk = [0; 4096];
    [0, 4096].into_iter().find_map(|from| {
        read(pid, base + from, &mut chunk)?;
        let at = chunk.windows(SYSCALL.len()).position(|bytes| *bytes == SYSCALL)?;
        Some(base + from + at as u64)
    })
}

/// A stopped thread, with what it gets again.
pub(crate) struct Stopped<'a> {
    tracee: &'a Tracee,
    tid: i32,
    registers: Registers,
    mask: u64,
    rseq: Option<Rseq>,
    /// The critical section that it is in. The kernel clears it when it sees the thread elsewhere.
    critical: u64,
    /// Where answers are written: the end of its stack. No thread of the process runs, and the bytes are restored.
    place: u64,
    own: [u8; ANSWER],
    /// A stop signal that it got meanwhile.
    signal: i32,
}

impl<'a> Stopped<'a> {
    pub(crate) fn enter(tracee: &'a Tracee, tid: i32) -> Option<Stopped<'a>> {
        let registers = registers(tid).filter(|registers| registers.cs == SEGMENT)?;
        let mask = get::<u64>(PTRACE_GETSIGMASK, tid, 8)?;
        let rseq = get::<Rseq>(PTRACE_GET_RSEQ_CONFIGURATION, tid, size_of::<Rseq>()).filter(|rseq| rseq.address != 0);
        let critical = rseq.and_then(|rseq| {
            let mut bytes = [0; 8];
            read(tid, rseq.address.wrapping_add(CRITICAL), &mut bytes)?;
            Some(u64::from_ne_bytes(bytes))
        });
        let (place, mut own) = (registers.rsp & !15, [0; ANSWER]);
        read(tid, place, &mut own)?;
        // A handler must not run during a call.
        set(PTRACE_SETSIGMASK, tid, 8, &u64::MAX)?;
        let critical = critical.unwrap_or_default();
        Some(Stopped { tracee, tid, registers, mask, rseq, critical, place, own, signal: 0 })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.tracee.pid
    }

    pub(crate) fn rseq(&self) -> Option<Rseq> {
        self.rseq
    }

    /// The result of a system call.
    pub(crate) fn call(&mut self, number: usize, arguments: [usize; 4]) -> Option<isize> {
        let [first, second, third, fourth] = arguments.map(|argument| argument as u64);
        let wanted = Registers {
            rip: self.tracee.instruction,
            rax: number as u64,
            // Not in a system call, so the kernel restarts none.
            orig_rax: u64::MAX,
            rdi: first,
            rsi: second,
            rdx: third,
            r10: fourth,
            // Some calls take no other arguments than zero.
            r8: 0,
            r9: 0,
            ..self.registers
        };
        set(PTRACE_SETREGS, self.tid, 0, &wanted)?;
        let mut has_entered = false;
        for _ in 0..STOPS {
            // Not PTRACE_SINGLESTEP, which forces a SIGTRAP: the kernel takes the handler of a blocked signal away then.
            if ptrace(PTRACE_SYSCALL, self.tid, 0, 0) != 0 {
                return None;
            }
            let stop = wait(self.tid)?;
            let now = registers(self.tid)?;
            match stop {
                Stop::Signal(signal) => self.signal = signal,
                // It stops at the entry and at the exit. Before the instruction it can stop for something else.
                Stop::Trap if now.rip != wanted.rip && has_entered => return Some(now.rax.cast_signed() as isize),
                Stop::Trap => has_entered = now.rip != wanted.rip,
                Stop::Event => {}
            }
        }
        None
    }

    /// The answer that a system call writes to the address that it is given.
    pub(crate) fn ask<const N: usize>(&mut self, which: impl FnOnce(usize) -> (usize, [usize; 4])) -> Option<[u64; N]> {
        let (number, arguments) = which(self.place as usize);
        let result = self.call(number, arguments)?;
        let mut answer = [0; ANSWER];
        read(self.tid, self.place, &mut answer)?;
        let mut words = answer.chunks_exact(8).filter_map(|word| Some(u64::from_ne_bytes(word.try_into().ok()?)));
        (result == 0).then(|| core::array::from_fn(|_| words.next().unwrap_or_default()))
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        let _ = write(self.tid, self.place, &self.own);
        let _ = set(PTRACE_SETREGS, self.tid, 0, &self.registers);
        let _ = set(PTRACE_SETSIGMASK, self.tid, 8, &self.mask);
        if let Some(rseq) = self.rseq.filter(|_| self.critical != 0) {
            let _ = write(self.tid, rseq.address.wrapping_add(CRITICAL), &self.critical.to_ne_bytes());
        }
        if self.signal != 0 {
            sys::numbers(number::TGKILL, [argument(self.tracee.pid), argument(self.tid), argument(self.signal)]);
        }
    }
}

/// Where `struct rseq` has the address of the critical section.
const CRITICAL: u64 = 8;

fn registers(tid: i32) -> Option<Registers> {
    get(PTRACE_GETREGS, tid, 0)
}

fn ptrace(request: usize, tid: i32, address: usize, data: usize) -> isize {
    // SAFETY: callers pass the address of a value of the size that the request has.
    unsafe { sys::call(number::PTRACE, [request, argument(tid), address, data, 0, 0]) }
}

/// Plain numbers that the kernel fills in.
fn get<T: Copy>(request: usize, tid: i32, address: usize) -> Option<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let result = ptrace(request, tid, address, value.as_mut_ptr().addr());
    // SAFETY: numbers, for which zeros are valid, too.
    (result >= 0).then(|| unsafe { value.assume_init() })
}

fn set<T: Copy>(request: usize, tid: i32, address: usize, value: &T) -> Option<()> {
    (ptrace(request, tid, address, core::ptr::from_ref(value).addr()) >= 0).then_some(())
}

/// Why a thread has stopped.
enum Stop {
    /// At a system call; the signal itself is blocked.
    Trap,
    /// What ptrace(2) calls an event.
    Event,
    Signal(i32),
}

fn wait(tid: i32) -> Option<Stop> {
    const TRAP: u32 = 5;
    /// With PTRACE_O_TRACESYSGOOD.
    const AT_CALL: u32 = TRAP | 0x80;
    const ALL: usize = 0x4000_0000;
    const EINTR: isize = -4;
    loop {
        let mut status = 0u32;
        let arguments = [argument(tid), (&raw mut status).addr(), ALL, 0, 0, 0];
        // SAFETY: the kernel writes an `int` that lives until the call is over.
        match unsafe { sys::call(number::WAIT4, arguments) } {
            EINTR => {}
            result if result == tid as isize && status & 0xff == 0x7f => {
                return Some(match status >> 8 {
                    TRAP | AT_CALL => Stop::Trap,
                    signal @ ..=0xff => Stop::Signal(signal.cast_signed()),
                    _ => Stop::Event,
                });
            }
            _ => return None,
        }
    }
}

fn read(tid: i32, at: u64, bytes: &mut [u8]) -> Option<()> {
    copy(number::PROCESS_VM_READV, tid, at, bytes.as_mut_ptr().addr(), bytes.len())
}

fn write(tid: i32, at: u64, bytes: &[u8]) -> Option<()> {
    copy(number::PROCESS_VM_WRITEV, tid, at, bytes.as_ptr().addr(), bytes.len())
}

/// process_vm_readv(2) and process_vm_writev(2), of one piece.
fn copy(which: usize, tid: i32, at: u64, ours: usize, length: usize) -> Option<()> {
    let (ours, theirs) = ([ours, length], [at as usize, length]);
    let arguments = [argument(tid), ours.as_ptr().addr(), 1, theirs.as_ptr().addr(), 1, 0];
    // SAFETY: our piece is memory of that length, which the callers above borrow; the kernel checks the other one.
    let result = unsafe { sys::call(which, arguments) };
    (result == length as isize).then_some(())
}
