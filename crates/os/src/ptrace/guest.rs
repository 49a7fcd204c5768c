//! A stopped thread of another process, which executes a system call for us.
//!
//! Some of what a thread has, only itself can set. So it executes one `syscall` instruction of its own program with
//! registers of ours, and then gets its own registers again.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::{PAUSE, ptrace, wait_for_stop};
use crate::{maps, process};

/// The instruction `syscall` on x86-64.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes of a program that are read at a time.
const CHUNK: usize = 1 << 20;
/// How long the thread may take to stop again, on an overloaded machine.
const STOPS_AGAIN: Duration = Duration::from_secs(10);
/// Upper limit of stops: two for the call, and one for each pending one.
const STOPS: usize = 100;

/// A process with stopped threads.
#[derive(Debug)]
pub(super) struct Host {
    pid: i32,
    memory: File,
    /// The address of a `syscall` instruction.
    instruction: u64,
}

impl Host {
    pub(super) fn of(pid: i32) -> io::Result<Host> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let instruction = find_syscall(pid, &memory)?;
        Ok(Host { pid, memory, instruction })
    }

    /// Traces one of its threads.
    pub(super) fn enter(&self, tid: i32, filters: Filters) -> io::Result<Guest<'_>> {
        seize(self.pid, tid, filters)?;
        let prepared = wait_for_stop(tid).and_then(|_| {
            // A signal handler must not run during the call.
            let mut mask = 0_u64;
            ptrace(libc::PTRACE_GETSIGMASK, tid, size_of::<u64>(), (&raw mut mask).addr())?;
            let registers = registers(tid)?;
            let all = u64::MAX;
            ptrace(libc::PTRACE_SETSIGMASK, tid, size_of::<u64>(), (&raw const all).addr())?;
            Ok((mask, registers))
        });
        match prepared {
            Ok((mask, registers)) => Ok(Guest { host: self, tid, mask, registers, critical: self.critical(tid) }),
            Err(error) => {
                let _ = ptrace(libc::PTRACE_DETACH, tid, 0, 0);
                Err(error)
            }
        }
    }
}

impl Host {
    /// The restartable sequence that a thread is in (rseq(2)), with the place where the thread has noted it. The kernel clears
    /// that note when it sees the thread elsewhere, and would not restart the sequence.
    fn critical(&self, tid: i32) -> Option<(u64, [u8; 8])> {
        /// `PTRACE_GET_RSEQ_CONFIGURATION`, since Linux 5.13.
        const CONFIGURATION: u32 = 0x420f;
        /// Where `struct rseq` has it.
        const NOTE: u64 = 8;
        let mut configuration = [0_u64; 3];
        ptrace(CONFIGURATION, tid, size_of_val(&configuration), (&raw mut configuration).addr()).ok()?;
        let place = configuration.first().copied().filter(|address| *address != 0)?.checked_add(NOTE)?;
        let mut note = [0; 8];
        self.memory.read_exact_at(&mut note, place).ok()?;
        (note != [0; 8]).then_some((place, note))
    }
}

/// What becomes of a thread's seccomp filters during the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filters {
    /// They apply: programs make this call themselves.
    Apply,
    /// They are suspended (`PTRACE_O_SUSPEND_SECCOMP`): one of the job's own could kill the process for this call. Nobody may
    /// suspend filters without CAP_SYS_ADMIN, or with filters of its own, as in a container. There the call is made if
    /// the thread has no filter of its own.
    Suspended,
}

fn seize(pid: i32, tid: i32, filters: Filters) -> io::Result<()> {
    const SUSPEND: usize = 1 << 21;
    if filters == Filters::Apply {
        return ptrace(libc::PTRACE_SEIZE, tid, 0, 0);
    }
    match ptrace(libc::PTRACE_SEIZE, tid, 0, SUSPEND) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) && !has_own_filters(pid, tid) => {
            ptrace(libc::PTRACE_SEIZE, tid, 0, 0)
        }
        other => other,
    }
}

/// Whether a thread has more filters than those that it got from us: ours, and up to two that a launch adds.
fn has_own_filters(pid: i32, tid: i32) -> bool {
    const ADDED: u32 = 2;
    let count = |status: io::Result<String>| {
        let count = |line: &str| line.strip_prefix("Seccomp_filters:")?.trim().parse::<u32>().ok();
        status.ok()?.lines().find_map(count)
    };
    let ours = count(process::text("self", "status")).unwrap_or(0);
    count(process::text(pid, &format!("task/{tid}/status"))).is_none_or(|count| count > ours + ADDED)
}

/// A stopped thread, with the registers to restore.
#[derive(Debug)]
pub(super) struct Guest<'a> {
    host: &'a Host,
    tid: i32,
    mask: u64,
    registers: libc::user_regs_struct,
    /// Bytes that it gets again, and their address.
    critical: Option<(u64, [u8; 8])>,
}

impl Guest<'_> {
    /// Executes a system call that reads these bytes; the arguments are made from their address.
    pub(super) fn call_with(
        &mut self,
        bytes: &[u8],
        number: libc::c_long,
        arguments: impl FnOnce(u64) -> [u64; 3],
    ) -> io::Result<()> {
        // The present end of its stack, which certainly exists. No thread of the process runs, and the bytes there are
        // restored afterwards.
        let place = self.registers.rsp & !15;
        let mut own = vec![0; bytes.len()];
        self.host.memory.read_exact_at(&mut own, place)?;
        self.host.memory.write_all_at(bytes, place)?;
        let result = self.call(number, arguments(place));
        self.host.memory.write_all_at(&own, place)?;
        result
    }

    /// Executes a system call. What it returns is not needed.
    pub(super) fn call(&mut self, number: libc::c_long, [first, second, third]: [u64; 3]) -> io::Result<()> {
        let number = u64::try_from(number).map_err(io::Error::other)?;
        let wanted = libc::user_regs_struct {
            rip: self.host.instruction,
            rax: number,
            // Not in a system call, so the kernel restarts none.
            orig_rax: u64::MAX,
            rdi: first,
            rsi: second,
            rdx: third,
            // Some calls take no other arguments than zero.
            r10: 0,
            r8: 0,
            r9: 0,
            ..self.registers
        };
        ptrace(libc::PTRACE_SETREGS, self.tid, 0, (&raw const wanted).addr())?;
        let mut has_entered = false;
        for _ in 0..STOPS {
            // Not PTRACE_SINGLESTEP, which forces a SIGTRAP: the kernel takes the handler of a blocked signal away then.
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
            let signal = wait_for_stop(self.tid)?;
            let now = registers(self.tid)?;
            // Otherwise it stopped for something else before it did anything.
            let is_call = signal == libc::SIGTRAP && now.rip != self.host.instruction;
            // It stops at the entry and at the exit.
            if is_call && std::mem::replace(&mut has_entered, true) {
                let result = now.rax.cast_signed();
                return match i32::try_from(-result) {
                    Ok(code) if result < 0 => Err(io::Error::from_raw_os_error(code)),
                    _ => Ok(()),
                };
            }
        }
        Err(io::Error::other("the process does not execute a step"))
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        let _ = ptrace(libc::PTRACE_SETREGS, self.tid, 0, (&raw const self.registers).addr());
        let _ = ptrace(libc::PTRACE_SETSIGMASK, self.tid, size_of::<u64>(), (&raw const self.mask).addr());
        if let Some((place, note)) = self.critical {
            let _ = self.host.memory.write_all_at(&note, place);
        }
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, 0);
        // It stops again with the others before it executes an instruction, but perhaps after this call returns.
        let deadline = Instant::now() + STOPS_AGAIN;
        while !matches!(process::state(self.tid), None | Some('T' | 'Z' | 'X')) && Instant::now() < deadline {
            std::thread::sleep(PAUSE);
        }
    }
}

fn registers(tid: i32) -> io::Result<libc::user_regs_struct> {
    // SAFETY: a struct of numbers, for which zeros are valid.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETREGS, tid, 0, (&raw mut registers).addr())?;
    Ok(registers)
}

/// Address of a `syscall` instruction in the program of the process or in one of its libraries.
fn find_syscall(pid: i32, memory: &File) -> io::Result<u64> {
    let maps = maps::read(pid)?;
    let mut chunk = vec![0; CHUNK];
    let programs = maps::mappings(&maps).filter(|it| it.access.starts_with("r-x") && it.name.starts_with(b"/"));
    for program in programs {
        let mut at = program.start;
        while at < program.end {
            let most = usize::try_from(program.end - at).unwrap_or(CHUNK).min(CHUNK);
            let Ok(count) = memory.read_at(chunk.get_mut(..most).unwrap_or_default(), at) else { break };
            let read = chunk.get(..count).unwrap_or_default();
            if let Some(found) = read.windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL) {
                return Ok(at + found as u64);
            }
            match count {
                0 => break,
                count => at += count as u64,
            }
        }
    }
    Err(io::Error::other("its program has no system call instruction"))
}
