//! One thread of a stopped process that runs alone.
//!
//! While the device memory of a CUDA process is checkpointed, none of its own threads may run: they can read what the
//! driver has unmapped (seen with JAX on driver 580: a thread dies by SIGSEGV inside libcuda within a second). So its
//! threads are stopped (SIGSTOP) for as long. The driver's work is done by one thread of the process, which has to run
//! meanwhile. A tracer can let a single thread of a stopped process go on; when it detaches, the thread stops again with
//! the others (ptrace(2), group-stop; kernel/ptrace.c, `__ptrace_unlink`).

use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::process;

/// The thread, running. Dropped, it stops with the others again.
///
/// All of ptrace is done by one thread of ours, as the kernel demands; it also sets the thread going again when that
/// stops once more. It does after a CRIU dump that left a stopped process behind: CRIU sends it SIGSTOP again, and each
/// thread takes note of that only when it runs (seen with CRIU 4.2 on kernel 6.18).
#[derive(Debug)]
pub struct Alone {
    /// Dropped, it asks the tracer to let go.
    wanted: Option<mpsc::Sender<()>>,
    tracer: Option<JoinHandle<()>>,
}

impl Alone {
    /// Lets thread `tid` of a stopped process run.
    ///
    /// # Errors
    /// When it can not be traced: another tracer has it, or a right is missing.
    pub fn run(tid: i32) -> io::Result<Alone> {
        let (ready, outcome) = mpsc::sync_channel(1);
        let (wanted, until) = mpsc::channel();
        let trace = move || match Traced::run(tid) {
            Ok(mut traced) => {
                let _ = ready.send(Ok(()));
                traced.keep_running(&until);
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        let tracer = std::thread::Builder::new().name("tracer".into()).spawn(trace)?;
        let alone = Alone { wanted: Some(wanted), tracer: Some(tracer) };
        outcome.recv().unwrap_or_else(|_| Err(io::Error::other("the tracing thread is gone")))?;
        Ok(alone)
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.wanted = None;
        if let Some(tracer) = self.tracer.take() {
            let _ = tracer.join();
        }
    }
}

/// The tracer's side. It must stay on the thread that made it.
struct Traced {
    tid: i32,
    mask: u64,
    ended: bool,
}

/// How often it is looked whether the thread has stopped again.
const LOOK: Duration = Duration::from_micros(500);

fn ptrace(request: u32, tid: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: addresses that are passed as data belong to live locals of the callers below, of the size the request
    // wants; the kernel checks everything else.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

impl Traced {
    fn run(tid: i32) -> io::Result<Traced> {
        ptrace(libc::PTRACE_SEIZE, tid, 0, 0)?;
        let mut traced = Traced { tid, mask: 0, ended: false };
        // A signal would stop it for us in the middle of the driver's work: they wait until it is let go.
        traced.wait_for_stop()?;
        ptrace(libc::PTRACE_GETSIGMASK, tid, size_of::<u64>(), (&raw mut traced.mask).addr())?;
        let all = u64::MAX;
        ptrace(libc::PTRACE_SETSIGMASK, tid, size_of::<u64>(), (&raw const all).addr())?;
        ptrace(libc::PTRACE_CONT, tid, 0, 0)?;
        Ok(traced)
    }

    /// Until the other end of `until` is dropped.
    fn keep_running(&mut self, until: &mpsc::Receiver<()>) {
        while until.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
            match self.wait(libc::WNOHANG) {
                Ok(None) => {}
                Ok(Some(status)) => {
                    // What it can not block and is no stop is a fault of its own, which it has to get.
                    let signal = libc::WSTOPSIG(status);
                    let stop = status >> 16 != 0 || signal == libc::SIGSTOP;
                    let deliver = if stop { 0 } else { usize::try_from(signal).unwrap_or(0) };
                    let _ = ptrace(libc::PTRACE_CONT, self.tid, 0, deliver);
                }
                Err(_) => {
                    self.ended = true;
                    return;
                }
            }
        }
    }

    /// How it stopped; `None` where it runs and WNOHANG is given.
    fn wait(&self, flags: i32) -> io::Result<Option<i32>> {
        let mut status = 0;
        loop {
            // SAFETY: `status` is a live local.
            let pid = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL | flags) };
            match io::Error::last_os_error() {
                _ if pid == 0 => return Ok(None),
                _ if pid == self.tid && libc::WIFSTOPPED(status) => return Ok(Some(status)),
                _ if pid == self.tid => return Err(io::Error::other("the thread ended")),
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            }
        }
    }

    fn wait_for_stop(&self) -> io::Result<()> {
        self.wait(0).map(drop)
    }

    fn let_go(&self) -> io::Result<()> {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        self.wait_for_stop()?;
        ptrace(libc::PTRACE_SETSIGMASK, self.tid, size_of::<u64>(), (&raw const self.mask).addr())?;
        ptrace(libc::PTRACE_DETACH, self.tid, 0, 0)
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // A thread that is gone needs nothing; one that can not be detached is let go when this thread ends.
        if !self.ended {
            let _ = self.let_go();
        }
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
