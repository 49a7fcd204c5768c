//! Takes a lock on a file for a stopped process, by making the process execute the system call.
//!
//! POSIX locks belong to the process that took them (fcntl(2)): no process can take one for another. So a thread of the
//! process executes one `syscall` instruction of its own program with registers of ours, and then gets its own
//! registers again.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::{PAUSE, ptrace, wait_for_stop};
use crate::{maps, process};

/// A lock as fcntl(2) describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PosixLock {
    /// `F_RDLCK` or `F_WRLCK`.
    pub kind: i16,
    /// The first byte.
    pub start: i64,
    /// How many bytes; 0 is all up to the end, wherever that will be.
    pub length: i64,
}

/// Makes a stopped process take a lock through its descriptor `fd`. It is stopped afterwards as before.
///
/// # Errors
/// `EAGAIN` or `EACCES` if another process has a conflicting lock; else the kernel's error for the tracing or the
/// descriptor.
pub fn take_lock(pid: i32, fd: i32, lock: PosixLock) -> io::Result<()> {
    let is_stopped = |tid: &i32| process::state(*tid) == Some('T');
    let thread = process::threads(pid).into_iter().find(is_stopped);
    let mut guest = Guest::enter(pid, thread.ok_or_else(|| io::Error::other("the process is not stopped"))?)?;
    guest.take_lock(fd, lock)
}

/// The instruction `syscall` on x86-64.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes of a program that are read at a time.
const CHUNK: usize = 1 << 20;
/// How long the thread may take to stop again, on an overloaded machine.
const STOPS_AGAIN: Duration = Duration::from_secs(10);
/// Upper limit of steps: one for the call, and one for each pending stop.
const STEPS: usize = 100;

/// A stopped thread of another process, with the registers to restore.
struct Guest {
    tid: i32,
    mask: u64,
    registers: libc::user_regs_struct,
    memory: File,
    instruction: u64,
}

impl Guest {
    fn enter(pid: i32, tid: i32) -> io::Result<Guest> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let instruction = find_syscall(pid, &memory)?;
        ptrace(libc::PTRACE_SEIZE, tid, 0, 0)?;
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
            Ok((mask, registers)) => Ok(Guest { tid, mask, registers, memory, instruction }),
            Err(error) => {
                let _ = ptrace(libc::PTRACE_DETACH, tid, 0, 0);
                Err(error)
            }
        }
    }

    fn take_lock(&mut self, fd: i32, lock: PosixLock) -> io::Result<()> {
        let mut bytes = [0; size_of::<libc::flock>()];
        let fields: [(usize, &[u8]); 3] = [
            (std::mem::offset_of!(libc::flock, l_type), &lock.kind.to_ne_bytes()),
            (std::mem::offset_of!(libc::flock, l_start), &lock.start.to_ne_bytes()),
            (std::mem::offset_of!(libc::flock, l_len), &lock.length.to_ne_bytes()),
        ];
        for (at, field) in fields {
            bytes.get_mut(at..at + field.len()).unwrap_or_default().copy_from_slice(field);
        }
        // The present end of its stack, which certainly exists. No thread of the process runs, and the bytes there are
        // restored afterwards.
        let place = self.registers.rsp & !15;
        let mut own = [0; size_of::<libc::flock>()];
        self.memory.read_exact_at(&mut own, place)?;
        self.memory.write_all_at(&bytes, place)?;
        let numbers = (u64::try_from(libc::SYS_fcntl), u64::try_from(fd), u64::try_from(libc::F_SETLK));
        let result = match numbers {
            (Ok(number), Ok(fd), Ok(command)) => self.call(number, [fd, command, place]),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        };
        self.memory.write_all_at(&own, place)?;
        result
    }

    fn call(&mut self, number: u64, [first, second, third]: [u64; 3]) -> io::Result<()> {
        let wanted = libc::user_regs_struct {
            rip: self.instruction,
            rax: number,
            // Not in a system call, so the kernel restarts none.
            orig_rax: u64::MAX,
            rdi: first,
            rsi: second,
            rdx: third,
            ..self.registers
        };
        ptrace(libc::PTRACE_SETREGS, self.tid, 0, (&raw const wanted).addr())?;
        for _ in 0..STEPS {
            ptrace(libc::PTRACE_SINGLESTEP, self.tid, 0, 0)?;
            wait_for_stop(self.tid)?;
            let now = registers(self.tid)?;
            // Otherwise it stopped for a signal before it did anything.
            if now.rip != self.instruction {
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

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = ptrace(libc::PTRACE_SETREGS, self.tid, 0, (&raw const self.registers).addr());
        let _ = ptrace(libc::PTRACE_SETSIGMASK, self.tid, size_of::<u64>(), (&raw const self.mask).addr());
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

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::ptrace::{go_on, stop};

    fn is_locked(file: &File) -> bool {
        let mut lock = libc::flock { l_type: 1, l_whence: 0, l_start: 7, l_len: 1, l_pid: 0 };
        // SAFETY: an open descriptor, and a live local.
        let answer = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(file), libc::F_GETLK, &raw mut lock) };
        assert_eq!(answer, 0);
        lock.l_type != 2
    }

    #[test]
    fn another_process_takes_a_lock_and_goes_on_as_before() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "while :; do read line && echo got $line; done"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file.reopen().unwrap())
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        std::thread::sleep(Duration::from_millis(100));
        stop(pid, Duration::from_secs(5)).unwrap();
        let lock = PosixLock { kind: 1, start: 7, length: 1 };
        assert!(!is_locked(file.as_file()));
        take_lock(pid, 2, lock).unwrap();
        assert!(is_locked(file.as_file()));
        assert_eq!(take_lock(pid, 77, lock).unwrap_err().raw_os_error(), Some(libc::EBADF));
        go_on(pid).unwrap();
        io::Write::write_all(child.stdin.as_mut().unwrap(), b"line\n").unwrap();
        let mut answer = [0; 9];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut answer).unwrap();
        assert_eq!(&answer, b"got line\n");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_locked(file.as_file()), "it was the lock of that process");
    }
}
