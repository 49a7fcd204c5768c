//! Runs one thread of a stopped process alone.
//!
//! While the device memory of a CUDA process is checkpointed, none of its own threads may run: they can read memory
//! that the driver has unmapped (seen with JAX on driver 580: a thread dies by SIGSEGV inside libcuda within a second).
//! So its threads are stopped (SIGSTOP) for that time. The driver's work is done by one thread of the process, which
//! has to run. A tracer can let a single thread of a stopped process run; when it detaches, the thread stops again with
//! the others (ptrace(2), group-stop; kernel/ptrace.c, `__ptrace_unlink`).
//!
//! A thread that is created in a stopped process stops before its first instruction (kernel/signal.c,
//! `task_join_group_stop`). Threads that the running thread creates, above all the helpers of our interposer, are
//! therefore traced from their start, and run too. The helpers end by themselves. They must not be in an image, so the
//! end of [`Alone`] waits for them.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

mod guest;
mod lock;
mod settings;
mod turns;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::process;
pub use lock::{PosixLock, take_lock};
pub use settings::{Setting, set};
pub use turns::lend;

/// The running thread. If this is dropped, it stops again with the others.
#[derive(Debug)]
pub struct Alone {
    over: Arc<AtomicBool>,
    tracer: Option<JoinHandle<()>>,
}

impl Alone {
    /// Lets thread `tid` of a stopped process run. Another tracer, such as a profiler that looks at the process, and a
    /// shortage of threads may pass: tries for `limit`.
    ///
    /// # Errors
    /// When it cannot be traced: it has ended, it has another tracer, or a right is missing.
    pub fn run(tid: i32, limit: Duration) -> io::Result<Alone> {
        let deadline = Instant::now() + limit;
        loop {
            match Alone::with(tid, Signals::Wait) {
                Err(error) if error.raw_os_error() != Some(libc::ESRCH) && Instant::now() < deadline => {
                    std::thread::sleep(AGAIN);
                }
                outcome => return outcome,
            }
        }
    }

    /// Lets it run for a moment, with signals delivered as usual: the thread may be about to change its signal mask,
    /// and would then save and restore ours.
    ///
    /// # Errors
    /// When it cannot be traced now.
    pub fn turn(tid: i32) -> io::Result<Alone> {
        Alone::with(tid, Signals::Come)
    }

    fn with(tid: i32, signals: Signals) -> io::Result<Alone> {
        let over = Arc::new(AtomicBool::new(false));
        let (begun, result) = mpsc::sync_channel(1);
        let until = Arc::clone(&over);
        // Only the thread that seized may make requests, and it must watch its tracee all the time.
        let trace = move || match Tracee::seize(tid, signals) {
            Ok(mut tracee) => {
                let _ = begun.send(Ok(()));
                tracee.keep_running(&until);
            }
            Err(error) => drop(begun.send(Err(error))),
        };
        let tracer = std::thread::Builder::new().name("tracer".into()).spawn(trace)?;
        result.recv().unwrap_or_else(|_| Err(io::Error::other("the tracing thread ended")))?;
        Ok(Alone { over, tracer: Some(tracer) })
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(tracer) = self.tracer.take() {
            let _ = tracer.join();
        }
    }
}

fn ptrace(request: u32, tid: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: addresses passed as data belong to live locals of the callers below, and have the size that the request
    // needs; the kernel checks everything else.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Signals for faults of the thread itself.
const FAULTS: [i32; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// Signals that stop a process. It is stopped already, and stays stopped when the thread is detached.
const STOPS: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Polling interval of the tracer. A thread that creates a helper is stopped until the tracer has polled, so for a
/// while after each it polls without a pause.
const PAUSE: Duration = Duration::from_micros(50);
const ATTENTION: Duration = Duration::from_millis(1);

/// How often it is tried to trace a thread.
const AGAIN: Duration = Duration::from_millis(10);

/// How long helpers may take to end; they do within 2 ms of their last work, unless there is no CPU for them.
const HELPERS_END: Duration = Duration::from_millis(100);

/// The name that the interposer gives to its threads.
const HELPER: &str = "rekindle-copy";

/// What happens to signals while the thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signals {
    /// They stay pending until it is detached.
    Wait,
    Come,
}

struct Tracee {
    tid: i32,
    signals: Signals,
    mask: u64,
    /// Threads that it created, directly or indirectly; they are traced too.
    made: Vec<i32>,
}

/// What a check of the tracees found.
#[derive(Clone, Copy)]
enum Seen {
    Nothing,
    /// The thread, and the signal to be delivered or 0.
    Stopped(i32, i32),
    Gone(i32),
}

impl Tracee {
    fn seize(tid: i32, signals: Signals) -> io::Result<Tracee> {
        let options = usize::try_from(libc::PTRACE_O_TRACECLONE).unwrap_or_default();
        ptrace(libc::PTRACE_SEIZE, tid, 0, options)?;
        let mut tracee = Tracee { tid, signals, mask: 0, made: Vec::new() };
        // It is stopped with its process, unless somebody has just resumed the process.
        ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
        wait_for_stop(tid)?;
        if signals == Signals::Come {
            ptrace(libc::PTRACE_CONT, tid, 0, 0)?;
            return Ok(tracee);
        }
        // A signal handler must not run during the driver's work, so signals stay pending until the thread is detached.
        // Fault signals are not blocked: the kernel resets the handler of a blocked one (`force_sig_info_to_task`).
        ptrace(libc::PTRACE_GETSIGMASK, tid, size_of::<u64>(), (&raw mut tracee.mask).addr())?;
        let all = FAULTS.iter().fold(u64::MAX, |mask, signal| mask & !(1 << (signal - 1)));
        ptrace(libc::PTRACE_SETSIGMASK, tid, size_of::<u64>(), (&raw const all).addr())?;
        ptrace(libc::PTRACE_CONT, tid, 0, 0)?;
        Ok(tracee)
    }

    /// Keeps the thread running. CRIU leaves a SIGSTOP pending for a stopped task, and no mask blocks it: this and all
    /// other stop signals are ignored.
    fn keep_running(&mut self, over: &AtomicBool) {
        // The default timer slack, 50 us, would double the pause. The slack belongs to this thread.
        let _ = rustix::thread::set_current_timer_slack(Some(std::num::NonZeroU64::MIN));
        let mut attention = Instant::now();
        while !over.load(Ordering::Relaxed) {
            match self.look() {
                Ok(Seen::Stopped(..)) => attention = Instant::now() + ATTENTION,
                Ok(Seen::Gone(tid)) if tid == self.tid => break,
                Err(_) => return,
                Ok(_) if Instant::now() < attention => std::hint::spin_loop(),
                Ok(_) => std::thread::sleep(PAUSE),
            }
        }
        let deadline = Instant::now() + HELPERS_END;
        while self.has_helper() && Instant::now() < deadline {
            if !matches!(self.look(), Ok(Seen::Stopped(..))) {
                std::thread::sleep(PAUSE);
            }
        }
        // A thread that has ended needs nothing; one that cannot be detached is released when this thread ends.
        for tid in std::mem::take(&mut self.made) {
            let _ = self.let_go(tid);
        }
        let _ = self.let_go(self.tid);
    }

    fn has_helper(&self) -> bool {
        // A new thread has its creator's name until it has run. After the detach it is stopped with the others before
        // its first instruction, and ends when they are resumed.
        self.made.iter().any(|tid| process::name(*tid).is_some_and(|name| name == HELPER))
    }

    /// Inspects all tracees of this thread and resumes one that is stopped.
    fn look(&mut self) -> io::Result<Seen> {
        let seen = wait(-1, libc::__WNOTHREAD | libc::WNOHANG)?;
        match seen {
            Seen::Stopped(tid, signal) => {
                // The stop of a new thread can be reported before the event of its creator.
                if tid != self.tid && !self.made.contains(&tid) {
                    self.made.push(tid);
                }
                // A fault signal is suppressed: the instruction will fault again.
                let comes = self.signals == Signals::Come && !FAULTS.contains(&signal) && !STOPS.contains(&signal);
                let signal = if comes { usize::try_from(signal).unwrap_or_default() } else { 0 };
                // The thread may have been killed since.
                let _ = ptrace(libc::PTRACE_CONT, tid, 0, signal);
            }
            Seen::Gone(tid) => self.made.retain(|made| *made != tid),
            Seen::Nothing => {}
        }
        Ok(seen)
    }

    /// Detaches a thread, with the signal mask of its creator: threads created meanwhile have inherited the blocking
    /// mask.
    fn let_go(&self, tid: i32) -> io::Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
        let signal = wait_for_stop(tid)?;
        if self.signals == Signals::Come {
            let comes = !FAULTS.contains(&signal) && !STOPS.contains(&signal);
            let signal = if comes { usize::try_from(signal).unwrap_or_default() } else { 0 };
            return ptrace(libc::PTRACE_DETACH, tid, 0, signal);
        }
        ptrace(libc::PTRACE_SETSIGMASK, tid, size_of::<u64>(), (&raw const self.mask).addr())?;
        ptrace(libc::PTRACE_DETACH, tid, 0, 0)
    }
}

fn wait(tid: i32, options: i32) -> io::Result<Seen> {
    let mut status = 0;
    // SAFETY: `status` is a live local.
    match unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | options) } {
        0 => Ok(Seen::Nothing),
        -1 => Err(io::Error::last_os_error()),
        tid if libc::WIFSTOPPED(status) => {
            // A ptrace event, which is in the upper half, is not a signal.
            Ok(Seen::Stopped(tid, if status >> 16 == 0 { libc::WSTOPSIG(status) } else { 0 }))
        }
        tid => Ok(Seen::Gone(tid)),
    }
}

/// How long a thread may take to stop: one that waits in the kernel, for a driver or a child of vfork(2), does not
/// stop.
const STOPS_WITHIN: Duration = Duration::from_secs(10);

/// Waits until the thread is stopped; returns the signal that it was about to get, or 0.
fn wait_for_stop(tid: i32) -> io::Result<i32> {
    let deadline = Instant::now() + STOPS_WITHIN;
    loop {
        match wait(tid, libc::WNOHANG) {
            Ok(Seen::Stopped(_, signal)) => return Ok(signal),
            Ok(Seen::Nothing) if Instant::now() > deadline => {
                return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
            }
            Ok(Seen::Nothing) => std::thread::sleep(Duration::from_micros(20)),
            Ok(Seen::Gone(_)) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Stops all threads of a process and waits until they are stopped. Returns whether it ran before: a process that
/// somebody else stopped stays stopped, also after a failure.
///
/// # Errors
/// When the process is gone, or a thread does not stop within `limit` (it waits in the kernel, in a driver).
pub fn stop(pid: i32, limit: Duration) -> io::Result<bool> {
    if is_stopped(pid) {
        return Ok(false);
    }
    // Only a thread of it runs then, for a tracer.
    let was_stopped = process::threads(pid).into_iter().any(|tid| process::state(tid) == Some('T'));
    signal(pid, libc::SIGSTOP)?;
    let deadline = Instant::now() + limit;
    while !is_stopped(pid) {
        if Instant::now() > deadline || process::has_ended(pid) {
            if !was_stopped {
                let _ = signal(pid, libc::SIGCONT);
            }
            return Err(io::Error::other(format!("cannot stop the threads of process {pid}")));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(true)
}

/// Queues a SIGSTOP for a process that a tracer has stopped: when the tracer resumes it, it stops before it executes an
/// instruction.
///
/// # Errors
/// When it is gone.
pub fn stop_when_let_go(pid: i32) -> io::Result<()> {
    signal(pid, libc::SIGSTOP)
}

/// Resumes a stopped process.
///
/// # Errors
/// When it is gone.
pub fn go_on(pid: i32) -> io::Result<()> {
    signal(pid, libc::SIGCONT)
}

/// Whether every thread of the process is stopped by a signal.
#[must_use]
pub fn is_stopped(pid: i32) -> bool {
    let threads = process::threads(pid);
    !threads.is_empty() && threads.iter().all(|tid| process::state(*tid) == Some('T'))
}

/// Whether every thread of the process is stopped. If only some are, the others are expected to stop soon, as a thread
/// does that was just detached: waits for them, at most for `limit`; also while its threads cannot be listed, because we
/// are short of descriptors.
#[must_use]
pub fn stands(pid: i32, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let states = process::threads(pid).into_iter().filter_map(process::state);
        let states: Vec<char> = states.filter(|state| !matches!(state, 'Z' | 'X')).collect();
        let stopped = states.iter().filter(|state| **state == 'T').count();
        let is_known = !states.is_empty() || process::has_ended(pid);
        if is_known && (stopped == 0 || stopped == states.len()) || Instant::now() > deadline {
            return stopped > 0 && stopped == states.len();
        }
        std::thread::sleep(PAUSE);
    }
}

fn signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: a system call on numbers.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    pub(super) struct Reaped(pub(super) Child);

    impl Drop for Reaped {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn until(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !what() {
            assert!(Instant::now() < deadline, "timeout");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn one_thread_runs_while_the_process_is_stopped_and_stops_with_it_again() {
        let child = Reaped(Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap());
        let pid = child.0.id().cast_signed();
        assert!(stop(pid, Duration::from_secs(5)).unwrap());
        assert!(!stop(pid, Duration::from_secs(5)).unwrap(), "it was stopped before");
        let alone = Alone::run(pid, SOON).unwrap();
        until(|| process::state(pid) == Some('R'));
        drop(alone);
        until(|| is_stopped(pid));
        go_on(pid).unwrap();
        until(|| process::state(pid) == Some('R'));
    }

    /// Marks a process of its own: a limit of descriptors is one of all threads.
    const ALONE: &str = "REKINDLE_TEST_NO_DESCRIPTORS";

    /// Whoever takes it for running lets the driver wait for a thread that is stopped.
    #[test]
    fn a_process_whose_threads_cannot_be_listed_for_a_moment_is_not_taken_for_running() {
        if std::env::var_os(ALONE).is_none() {
            let name = "a_process_whose_threads_cannot_be_listed_for_a_moment_is_not_taken_for_running";
            let mut alone = Command::new(std::env::current_exe().unwrap());
            let output = alone.args(["--exact", &format!("ptrace::tests::{name}")]).env(ALONE, "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let child = Reaped(Command::new("sleep").arg("60").spawn().unwrap());
        let pid = child.0.id().cast_signed();
        assert!(stop(pid, SOON).unwrap());
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 3, hard).unwrap();
        assert!(process::threads(pid).is_empty());
        let raise = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        });
        assert!(stands(pid, SOON));
        raise.join().unwrap();
    }

    /// A turn does not change the signals of a thread, and loses none.
    #[test]
    fn signals_come_in_a_turn_and_the_mask_stays() {
        let script = "trap 'echo came' USR1; echo ready; while :; do :; done";
        let mut child = Command::new("sh");
        let mut child = Reaped(child.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap());
        let pid = child.0.id().cast_signed();
        let mut out = child.0.stdout.take().unwrap();
        let mut said = [0; 6];
        out.read_exact(&mut said).unwrap();
        let blocked = || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            status.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()
        };
        let before = blocked();
        assert!(stop(pid, Duration::from_secs(5)).unwrap());
        signal(pid, libc::SIGUSR1).unwrap();
        let turn = Alone::turn(pid).unwrap();
        let mut said = [0; 5];
        out.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"came\n");
        // Not before: in its handler the shell blocks nearly all signals.
        assert_eq!(blocked(), before);
        drop(turn);
        until(|| is_stopped(pid));
        assert_eq!(blocked(), before);
    }

    /// As the interposer does: a thread of a stopped process creates another one, which must run.
    #[test]
    fn a_thread_that_it_makes_runs_and_its_signals_are_not_blocked_afterwards() {
        let script = "import sys, threading, time\n\
                      sys.stdin.read(1)\n\
                      thread = threading.Thread(target=lambda: (print('ran', flush=True), time.sleep(60)))\n\
                      thread.start()\n\
                      time.sleep(60)";
        let mut child = Command::new("python3");
        let child = child.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut child = Reaped(child);
        let pid = child.0.id().cast_signed();
        std::thread::sleep(Duration::from_millis(200));
        let blocked = |tid: i32| {
            let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap();
            status.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()
        };
        let before = blocked(pid);
        assert!(stop(pid, Duration::from_secs(5)).unwrap());
        let alone = Alone::run(pid, SOON).unwrap();
        child.0.stdin.take().unwrap().write_all(b"x").unwrap();
        let mut ran = [0; 4];
        child.0.stdout.take().unwrap().read_exact(&mut ran).unwrap();
        assert_eq!(&ran, b"ran\n");
        drop(alone);
        until(|| is_stopped(pid));
        assert_eq!(process::tracer(pid), Some(0));
        let threads = process::threads(pid);
        assert_eq!(threads.len(), 2);
        go_on(pid).unwrap();
        for tid in threads {
            assert_eq!(process::tracer(tid), Some(0));
            assert_eq!(blocked(tid), before);
        }
    }

    #[test]
    fn a_thread_on_its_way_to_the_others_is_waited_for() {
        let script = "import threading, time\n\
                      threading.Thread(target=time.sleep, args=(60,)).start()\n\
                      while True: pass";
        let child = Reaped(Command::new("python3").args(["-c", script]).spawn().unwrap());
        let pid = child.0.id().cast_signed();
        until(|| process::threads(pid).len() == 2);
        let limit = Duration::from_secs(5);
        assert!(!stands(pid, limit), "it runs");
        assert!(stop(pid, limit).unwrap());
        for _ in 0..200 {
            drop(Alone::run(pid, SOON).unwrap());
            assert!(stands(pid, limit));
        }
        let alone = Alone::run(pid, SOON).unwrap();
        assert!(!stands(pid, Duration::from_millis(20)), "one runs");
        drop(alone);
        go_on(pid).unwrap();
    }

    #[test]
    fn another_tracer_is_waited_for() {
        let child = Reaped(Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap());
        let pid = child.0.id().cast_signed();
        assert!(stop(pid, Duration::from_secs(5)).unwrap());
        let other = Alone::turn(pid).unwrap();
        assert!(Alone::turn(pid).is_err());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                drop(other);
            });
            drop(Alone::run(pid, SOON).unwrap());
        });
        until(|| is_stopped(pid));
        go_on(pid).unwrap();
    }

    #[test]
    fn a_thread_that_is_not_there_is_an_error() {
        assert!(Alone::run(i32::MAX, SOON).is_err());
        assert!(stop(i32::MAX, Duration::from_secs(1)).is_err());
    }
}
