//! Asks each stopped thread what only the thread itself can tell: by system calls that it executes for us.
//!
//! CRIU traces all threads, and a thread has one tracer. So the tracer asks, in a restore, when the threads are complete and have
//! not run (`RESUME_DEVICES_LATE`). Not in a dump: if CRIU is killed while a thread is asked, the thread goes on with registers of
//! ours, which would harm the running job. A restored one is ended then. The answers go to the descriptor that
//! `REKINDLE_ANSWERS` names, as text, which `rekindle_objects` parses:
//!
//! ```text
//! thread 12                                  as CRIU sees it, which is in the job's PID namespace
//! signal 2 55d01e8 14000004 7f2c0 0          handler, flags, restorer and mask of a signal, all hexadecimal
//! ```
//!
//! A thread that cannot be asked is left out: nothing here makes CRIU fail.

use core::mem::offset_of;

use rekindle_abi::variables;

use crate::accept;
use crate::sys::{self, Base, Text, argument, number};
use crate::tracee::{Stopped, Tracee};

/// `CR_PLUGIN_HOOK__RESUME_DEVICES_LATE`.
pub(crate) fn process(pid: i32) {
    let answers = sys::variable(variables::ANSWERS).and_then(accept::number).and_then(|fd| i32::try_from(fd).ok());
    let Some(answers) = answers else { return };
    let Some(tracee) = Tracee::of(pid) else { return };
    sys::each_entry(Text::<64>::new().bytes(b"/proc/").decimal(pid.unsigned_abs().into()).bytes(b"/task"), |name| {
        if let Some(tid) = accept::number(name).and_then(|tid| i32::try_from(tid).ok()) {
            let _ = thread(&tracee, tid, answers);
        }
    });
}

/// One that has not all answers is not written.
fn thread(tracee: &Tracee, tid: i32, answers: i32) -> Option<()> {
    let mut report = Report { text: Text::new(), answers };
    report.line(b"thread", &[tid.unsigned_abs().into()], Base::Decimal);
    let mut thread = Stopped::enter(tracee, tid)?;
    of_thread(&mut thread, &mut report)?;
    if tid == tracee.pid {
        of_process(&mut thread, &mut report, caught(tid)?)?;
        timers(&mut thread, &mut report)?;
    }
    drop(thread);
    report.write();
    Some(())
}

/// `PR_GET_TID_ADDRESS`
const GET_TID_ADDRESS: usize = 40;
/// `MEMBARRIER_CMD_GET_REGISTRATIONS`
const GET_REGISTRATIONS: usize = 1 << 9;

/// `struct kernel_sigaction`.
#[repr(C)]
struct Action {
    handler: u64,
    flags: u64,
    restorer: u64,
    mask: u64,
}

/// `stack_t`.
#[repr(C)]
struct Stack {
    address: u64,
    flags: u64,
    size: u64,
}

fn of_thread(thread: &mut Stopped<'_>, report: &mut Report) -> Option<()> {
    let stack: [u64; 3] = thread.ask(|place| (number::SIGALTSTACK, [0, place, 0, 0]))?;
    // The upper half of the flags is padding.
    let at = |offset: usize| stack.get(offset / 8).copied().unwrap_or_default();
    let flags = at(offset_of!(Stack, flags)) & 0xffff_ffff;
    report.line(
        b"alternate-stack",
        &[at(offset_of!(Stack, address)), flags, at(offset_of!(Stack, size))],
        Base::Hexadecimal,
    );
    report.option(thread, b"parent-death-signal", 2, Given::Memory);
    // A kernel without CONFIG_CHECKPOINT_RESTORE has no such option, but then there is no CRIU.
    let [cleared]: [u64; 1] = thread.ask(|place| (number::PRCTL, [GET_TID_ADDRESS, place, 0, 0]))?;
    report.line(b"clear-at-end", &[cleared], Base::Hexadecimal);
    if let Some(rseq) = thread.rseq() {
        report.line(b"rseq", &[rseq.address, rseq.size.into(), rseq.signature.into()], Base::Hexadecimal);
    }
    Some(())
}

fn of_process(thread: &mut Stopped<'_>, report: &mut Report, caught: u64) -> Option<()> {
    const CHILD: u64 = 17;
    for signal in 1..=64 {
        // One that is not caught has the flags of its default, which mean something only for SIGCHLD.
        if caught & 1 << (signal - 1) == 0 && signal != CHILD {
            continue;
        }
        let action: [u64; 4] = thread.ask(|place| (number::RT_SIGACTION, [signal as usize, 0, place, 8]))?;
        let at = |offset: usize| action.get(offset / 8).copied().unwrap_or_default();
        let [handler, flags, restorer, mask] = [
            offset_of!(Action, handler),
            offset_of!(Action, flags),
            offset_of!(Action, restorer),
            offset_of!(Action, mask),
        ]
        .map(at);
        report.line(b"signal", &[signal, handler, flags, restorer, mask], Base::Hexadecimal);
    }
    for which in 0..3 {
        let timer: [u64; 4] = thread.ask(|place| (number::GETITIMER, [which, place, 0, 0]))?;
        let [interval, interval_us, left, left_us] = timer;
        if timer != [0; 4] {
            report.line(
                b"interval-timer",
                &[which as u64, micros(interval, interval_us), micros(left, left_us)],
                Base::Decimal,
            );
        }
    }
    for (name, option, how) in PROCESS {
        report.option(thread, name, *option, *how);
    }
    if let Some(registered) = thread.call(number::MEMBARRIER, [GET_REGISTRATIONS, 0, 0, 0]).filter(|it| *it > 0) {
        report.line(b"memory-barriers", &[registered.unsigned_abs() as u64], Base::Hexadecimal);
    }
    Some(())
}

/// POSIX timers: how often each has fired since its signal was taken, its interval and the time that is left, in ns.
fn timers(thread: &mut Stopped<'_>, report: &mut Report) -> Option<()> {
    let mut text = [0; 16 << 10];
    let path = Text::<64>::new().bytes(b"/proc/").decimal(thread.pid().unsigned_abs().into()).bytes(b"/timers");
    // A kernel without that file has no timers either.
    let Some(text) = sys::read_file(path, &mut text) else { return Some(()) };
    for line in text.split(|byte| *byte == b'\n') {
        let Some(id) = line.strip_prefix(b"ID: ").and_then(accept::number) else { continue };
        let timer: [u64; 4] = thread.ask(|place| (number::TIMER_GETTIME, [id as usize, place, 0, 0]))?;
        let [interval, interval_ns, left, left_ns] = timer;
        report.line(b"timer", &[id.into(), nanos(interval, interval_ns), nanos(left, left_ns)], Base::Decimal);
    }
    Some(())
}

fn micros(seconds: u64, micros: u64) -> u64 {
    seconds.saturating_mul(1_000_000).saturating_add(micros)
}

fn nanos(seconds: u64, nanos: u64) -> u64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// How prctl(2) gives a value.
#[derive(Clone, Copy)]
enum Given {
    /// As the result of the call.
    Result,
    /// As an `int` in memory.
    Memory,
}

/// Values of prctl(2), with the options that get them. Some are a thread's own: others inherit them, and hardly any program
/// gives its threads different ones.
const PROCESS: &[(&[u8], usize, Given)] =
    &[(b"dumpable", 3, Given::Result), (b"child-subreaper", 37, Given::Memory), (b"secure-bits", 27, Given::Result)];

/// The signals that a process has handlers for.
fn caught(pid: i32) -> Option<u64> {
    let mut text = [0; 4096];
    let path = Text::<64>::new().bytes(b"/proc/").decimal(pid.unsigned_abs().into()).bytes(b"/status");
    caught_in(sys::read_file(path, &mut text)?)
}

fn caught_in(status: &[u8]) -> Option<u64> {
    let mask = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"SigCgt:\t"))?;
    mask.iter().try_fold(0u64, |mask, digit| Some(mask << 4 | u64::from(char::from(*digit).to_digit(16)?)))
}

/// The answers of one thread.
struct Report {
    text: Text<REPORT>,
    answers: i32,
}

/// Enough for all signals and some hundred timers.
const REPORT: usize = 32 << 10;

impl Report {
    fn line(&mut self, name: &[u8], values: &[u64], base: Base) {
        self.text.push(name);
        for value in values {
            self.text.push(b" ");
            self.text.push_number(*value, base);
        }
        self.text.push(b"\n");
    }

    /// A kernel that does not have an option gives no value.
    fn option(&mut self, thread: &mut Stopped<'_>, name: &[u8], option: usize, given: Given) {
        let value = match given {
            Given::Result => {
                thread.call(number::PRCTL, [option, 0, 0, 0]).and_then(|result| u64::try_from(result).ok())
            }
            Given::Memory => {
                thread.ask(|place| (number::PRCTL, [option, place, 0, 0])).map(|[value]: [u64; 1]| value & 0xffff_ffff)
            }
        };
        if let Some(value) = value {
            self.line(name, &[value], Base::Decimal);
        }
    }

    /// All or nothing: a reader must not take a part for the whole.
    fn write(&self) {
        if let Some(text) = self.text.get() {
            // SAFETY: the kernel reads so many bytes, which live until the call is over.
            unsafe { sys::call(number::WRITE, [argument(self.answers), text.as_ptr().addr(), text.len(), 0, 0, 0]) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As CRIU stops it: by PTRACE_SEIZE and PTRACE_INTERRUPT.
    fn stopped(pid: i32) -> bool {
        const SEIZE: usize = 0x4206;
        const INTERRUPT: usize = 0x4207;
        const ALL: usize = 0x4000_0000;
        let done = [SEIZE, INTERRUPT].map(|request| sys::numbers(number::PTRACE, [request, argument(pid), 0]));
        let status = 0u32;
        // SAFETY: the kernel writes an `int`, which nobody reads.
        unsafe { sys::call(number::WAIT4, [argument(pid), (&raw const status).addr(), ALL, 0, 0, 0]) };
        done == [0, 0]
    }

    #[test]
    fn a_stopped_process_answers_and_goes_on() {
        use std::io::{BufRead, BufReader, Read, Write};
        use std::os::fd::AsRawFd;
        use std::process::{Command, Stdio};
        let script = "import ctypes, signal, sys, threading\n\
            libc = ctypes.CDLL(None)\n\
            libc.prctl(1, 9)\n\
            [signal.signal(number, lambda *_: None) for number in (signal.SIGUSR1, signal.SIGTRAP)]\n\
            signal.setitimer(signal.ITIMER_REAL, 5000)\n\
            timer = ctypes.c_void_p()\n\
            libc.timer_create(1, None, ctypes.byref(timer))\n\
            threading.Thread(target=threading.Event().wait, daemon=True).start()\n\
            for line in sys.stdin: print(line, end='', flush=True)\n";
        let mut child =
            Command::new("python3").args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut to, mut from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut echo = || {
            to.write_all(b"line\n").unwrap();
            let mut line = String::new();
            from.read_line(&mut line).unwrap();
            assert_eq!(line, "line\n");
        };
        echo();
        let pid = child.id().cast_signed();
        let threads: Vec<i32> = std::fs::read_dir(format!("/proc/{pid}/task"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .collect();
        assert_eq!(threads.len(), 2);
        assert!(threads.iter().all(|tid| stopped(*tid)));
        let tracee = Tracee::of(pid).unwrap();
        assert!(super::super::tracee::in_vdso(pid).is_some());
        let (mut answers, write) = std::io::pipe().unwrap();
        for _ in 0..2 {
            for tid in &threads {
                thread(&tracee, *tid, write.as_raw_fd()).unwrap();
            }
        }
        drop(write);
        let mut text = String::new();
        answers.read_to_string(&mut text).unwrap();
        for tid in threads {
            // PTRACE_DETACH
            assert_eq!(sys::numbers(number::PTRACE, [17, argument(tid), 0]), 0);
        }
        echo();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(text.lines().filter(|line| line.starts_with("thread ")).count(), 4, "{text}");
        let has = |line: &str| text.lines().any(|it| it.starts_with(line));
        // The handler of SIGTRAP, too: the kernel takes that of a blocked signal away if it forces the signal.
        assert_eq!(text.lines().filter(|line| line.starts_with("signal 5 ")).count(), 2, "{text}");
        let lines = ["parent-death-signal 9", "signal a ", "signal 11 0 ", "interval-timer 0 0 4", "timer 0 0 0"];
        assert!(lines.into_iter().all(has), "{text}");
        assert!(
            ["alternate-stack 0 2 0", "dumpable 1", "child-subreaper 0", "secure-bits 0"].into_iter().all(has),
            "{text}"
        );
    }

    #[test]
    fn the_signals_with_handlers_are_found() {
        let text = b"Name:\tx\nSigBlk:\t0000000000000000\nSigCgt:\t0000000100000002\nCapInh:\t0\n";
        assert_eq!(caught_in(text), Some(0x1_0000_0002));
        assert!([&b""[..], b"Name:\tSigCgt:\t1", b"SigCgt:\txx"].into_iter().all(|text| caught_in(text).is_none()));
    }
}
