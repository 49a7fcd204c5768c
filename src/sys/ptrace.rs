//! One thread of a stopped process that runs alone.
//!
//! While the device memory of a CUDA process is checkpointed, none of its own threads may run: they can read what the
//! driver has unmapped (seen with JAX on driver 580: a thread dies by SIGSEGV inside libcuda within a second). So its
//! threads are stopped (SIGSTOP) for as long. The driver's work is done by one thread of the process, which has to run
//! meanwhile. A tracer can let a single thread of a stopped process go on; when it detaches, the thread stops again with
//! the others (ptrace(2), group-stop; kernel/ptrace.c, `__ptrace_unlink`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::process;

/// The thread, running. Dropped, it stops with the others again.
#[derive(Debug)]
pub struct Alone {
    over: Arc<AtomicBool>,
    tracer: Option<JoinHandle<()>>,
}

impl Alone {
    /// Lets thread `tid` of a stopped process run.
    ///
    /// # Errors
    /// When it can not be traced: another tracer has it, or a right is missing.
    pub fn run(tid: i32) -> io::Result<Alone> {
        let over = Arc::new(AtomicBool::new(false));
        let (begun, result) = mpsc::sync_channel(1);
        let until = Arc::clone(&over);
        // Only the thread that seized may make requests, and it must look after its tracee all the time.
        let trace = move || match Tracee::seize(tid) {
            Ok(tracee) => {
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
    // SAFETY: addresses that are passed as data belong to live locals of the callers below, of the size the request
    // wants; the kernel checks everything else.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

struct Tracee {
    tid: i32,
    mask: u64,
}

/// What a look at a tracee found.
enum Seen {
    Running,
    Stopped,
    Gone,
}

impl Tracee {
    fn seize(tid: i32) -> io::Result<Tracee> {
        ptrace(libc::PTRACE_SEIZE, tid, 0, 0)?;
        let mut tracee = Tracee { tid, mask: 0 };
        tracee.wait_for_stop()?;
        // A signal handler must not run in the middle of the driver's work: signals wait until the thread is let go.
        ptrace(libc::PTRACE_GETSIGMASK, tid, size_of::<u64>(), (&raw mut tracee.mask).addr())?;
        let all = u64::MAX;
        ptrace(libc::PTRACE_SETSIGMASK, tid, size_of::<u64>(), (&raw const all).addr())?;
        ptrace(libc::PTRACE_CONT, tid, 0, 0)?;
        Ok(tracee)
    }

    /// CRIU leaves a SIGSTOP in the queue of a stopped task, which no mask holds back: it and whatever else stops the
    /// thread is passed over.
    fn keep_running(&self, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            match self.look(libc::WNOHANG) {
                Ok(Seen::Stopped) => drop(ptrace(libc::PTRACE_CONT, self.tid, 0, 0)),
                Ok(Seen::Running) => std::thread::sleep(Duration::from_micros(200)),
                Ok(Seen::Gone) | Err(_) => return,
            }
        }
        // A thread that is gone needs nothing; one that can not be detached is let go when this thread ends.
        let _ = self.let_go();
    }

    fn look(&self, options: i32) -> io::Result<Seen> {
        let mut status = 0;
        // SAFETY: `status` is a live local.
        match unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL | options) } {
            0 => Ok(Seen::Running),
            -1 => Err(io::Error::last_os_error()),
            _ if libc::WIFSTOPPED(status) => Ok(Seen::Stopped),
            _ => Ok(Seen::Gone),
        }
    }

    fn wait_for_stop(&self) -> io::Result<()> {
        loop {
            match self.look(0) {
                Ok(Seen::Stopped) => return Ok(()),
                Ok(Seen::Running) => {}
                Ok(Seen::Gone) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn let_go(&self) -> io::Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        self.wait_for_stop()?;
        ptrace(libc::PTRACE_SETSIGMASK, self.tid, size_of::<u64>(), (&raw const self.mask).addr())?;
        ptrace(libc::PTRACE_DETACH, self.tid, 0, 0)
    }
}

/// Stops all threads of a process and waits until they stand. Answers whether it ran before: one that somebody else
/// stopped is to stay so.
///
/// # Errors
/// When the process is gone, or a thread does not stop within `limit` (it waits in the kernel, in a driver).
pub fn stop(pid: i32, limit: Duration) -> io::Result<bool> {
    if is_stopped(pid) {
        return Ok(false);
    }
    signal(pid, libc::SIGSTOP)?;
    let deadline = Instant::now() + limit;
    while !is_stopped(pid) {
        if Instant::now() > deadline || process::state(pid).is_none_or(|state| matches!(state, 'Z' | 'X')) {
            let _ = signal(pid, libc::SIGCONT);
            return Err(io::Error::other(format!("the threads of process {pid} do not stop")));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(true)
}

/// Puts a SIGSTOP into the queue of a process that a tracer holds: it stands before it executes an instruction when the
/// tracer lets it go.
///
/// # Errors
/// When it is gone.
pub fn stop_when_let_go(pid: i32) -> io::Result<()> {
    signal(pid, libc::SIGSTOP)
}

/// Lets a stopped process go on.
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

fn signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: a system call on numbers.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    struct Reaped(Child);

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
        let alone = Alone::run(pid).unwrap();
        until(|| process::state(pid) == Some('R'));
        drop(alone);
        until(|| is_stopped(pid));
        go_on(pid).unwrap();
        until(|| process::state(pid) == Some('R'));
    }

    #[test]
    fn a_thread_that_is_not_there_is_an_error() {
        assert!(Alone::run(i32::MAX).is_err());
        assert!(stop(i32::MAX, Duration::from_secs(1)).is_err());
    }
}
