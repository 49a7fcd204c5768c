//! One CUDA process and the calls on it.
#![allow(unsafe_code, reason = "calls of the CUDA driver; each block says why it is sound")]

use std::ffi::{c_int, c_void};
use std::time::Duration;
use std::{io, ptr};

use super::driver::Driver;
use super::error::{Error, Result};
use super::ffi::{GpuPair, LockArgs, RestoreArgs};
use super::function::Function;
use super::state::State;
use super::uuid::GpuMapping;
use rekindle_os::process::{text, threads};
use rekindle_os::{parallel, ptrace};

/// How long the threads of a process may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A process that may use CUDA. The caller of its methods needs root or `CAP_SYS_PTRACE`.
#[derive(Debug, Clone)]
pub struct Process {
    pid: i32,
    driver: Driver,
}

impl Process {
    /// The process `pid`, in the PID namespace of this process; it may itself be in a nested one.
    ///
    /// # Errors
    /// When the number is not a process, or is a thread of one; when there is no driver. [`Process::state`] tells
    /// whether the process uses CUDA.
    pub fn new(pid: i32) -> Result<Self> {
        check(pid)?;
        Ok(Self { pid, driver: Driver::load()? })
    }

    /// Like [`Process::new`], with a driver loaded from elsewhere.
    ///
    /// # Errors
    /// When the number is not a process, or is a thread of one.
    pub fn with_driver(pid: i32, driver: Driver) -> Result<Self> {
        check(pid)?;
        Ok(Self { pid, driver })
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Its state now.
    ///
    /// # Errors
    /// [`Error::is_not_cuda`] for a process that does not use CUDA.
    pub fn state(&self) -> Result<State> {
        let mut value: c_int = -1;
        self.call(Function::GetState, (&raw mut value).cast())?;
        State::from_raw(value).ok_or(Error::UnknownState { pid: self.pid, value })
    }

    /// The id of the thread that must run during a restore, while the others may be stopped. Driver 580.159.04 answers the
    /// id in the PID namespace of the caller, which is not documented.
    ///
    /// # Errors
    /// [`Error::is_not_cuda`] for a process that does not use CUDA.
    pub fn restore_thread_id(&self) -> Result<i32> {
        let mut tid: c_int = 0;
        self.call(Function::GetRestoreThreadId, (&raw mut tid).cast())?;
        Ok(tid)
    }

    /// Blocks its CUDA calls: running to locked. Waits for submitted work, at most `timeout`, rounded up to
    /// milliseconds.
    ///
    /// # Errors
    /// [`Error::is_not_ready`] when the time is over; the process then continues. [`Error::Timeout`] for 0, which would
    /// wait for ever, and for more than a `u32` of milliseconds.
    pub fn lock(&self, timeout: Duration) -> Result<()> {
        let mut args = LockArgs::new(milliseconds(timeout)?);
        self.call(Function::Lock, (&raw mut args).cast())
    }

    /// Copies device memory to its host memory and releases the GPU: locked to checkpointed. Needs as much free host
    /// memory as it has device memory.
    ///
    /// # Errors
    /// After `NOT_SUPPORTED` it is still locked and can be unlocked unharmed.
    pub fn checkpoint(&self) -> Result<()> {
        self.call(Function::Checkpoint, ptr::null_mut())
    }

    /// Acquires a GPU and copies device memory back: checkpointed to locked. `mapping` selects other GPUs of the same
    /// kind; it must then name every GPU of the process.
    ///
    /// # Errors
    /// After a failure the process cannot be restored again: kill it and restore its image. [`Error::NoMapping`] before
    /// driver 580, [`Error::TooManyPairs`] for more than a `u32` of them; both do not change the process.
    pub fn restore(&self, mapping: &[GpuMapping]) -> Result<()> {
        if !mapping.is_empty() {
            self.driver.check_mapping()?;
        }
        let pairs: Vec<GpuPair> = mapping.iter().map(GpuPair::from).collect();
        let count = u32::try_from(pairs.len()).map_err(|_| Error::TooManyPairs(pairs.len()))?;
        let mut args = RestoreArgs::new(&pairs, count);
        self.call(Function::Restore, (&raw mut args).cast())
    }

    /// Resumes its CUDA calls: locked to running.
    ///
    /// # Errors
    /// A failed call, for example in the wrong state.
    pub fn unlock(&self) -> Result<()> {
        self.call(Function::Unlock, ptr::null_mut())
    }

    /// Runs `work` on a process whose threads are stopped. Only `thread` runs in that time, the one that the driver
    /// uses ([`Process::restore_thread_id`], asked while it ran), by its id in the PID namespace of this process. A process
    /// that is not stopped is not changed.
    ///
    /// A stopped thread may have a lock that the work waits for. Then it runs for a moment ([`ptrace::lend`]), and
    /// after `patience` all threads run: at that point they can only break a process that would have to be killed
    /// anyway.
    ///
    /// # Errors
    /// Those of `work`, and [`Error::Thread`] when the thread cannot run.
    pub fn alone<T>(&self, thread: i32, patience: Duration, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if !ptrace::stands(self.pid, STOP_TIMEOUT) {
            return work();
        }
        let failed = |source| Error::Thread { pid: self.pid, tid: thread, source };
        let tid = threads(self.pid).into_iter().find(|tid| *tid == thread);
        let tid = tid.ok_or_else(|| failed(io::Error::from_raw_os_error(libc::ESRCH)))?;
        let alone = ptrace::Alone::run(tid, STOP_TIMEOUT).map_err(failed)?;
        let result = parallel::with_helper(|over| ptrace::lend(self.pid, tid, patience, over), work);
        drop(alone);
        result
    }

    /// Unlocks a process whose threads are stopped, and stay stopped: they must not run before they have all of their GPU
    /// memory. `thread` and `patience` are those of [`Process::alone`].
    ///
    /// # Errors
    /// A failed call, and [`Error::Runs`] when a thread of the process runs, before the call or after it.
    pub fn unlock_stopped(&self, thread: i32, patience: Duration) -> Result<()> {
        self.check_stopped()?;
        self.alone(thread, patience, || self.unlock())?;
        self.check_stopped()
    }

    /// Whether all of its threads are stopped.
    ///
    /// # Errors
    /// [`Error::Runs`] if not.
    pub fn check_stopped(&self) -> Result<()> {
        match ptrace::stands(self.pid, STOP_TIMEOUT) {
            true => Ok(()),
            false => Err(Error::Runs(self.pid)),
        }
    }

    fn call(&self, function: Function, argument: *mut c_void) -> Result<()> {
        // SAFETY: each caller above passes a live local of the type that cuda.h declares for its function, or null
        // where the argument is optional; `pairs` outlives its call.
        unsafe { self.driver.call(function, self.pid, argument) }
    }
}

fn milliseconds(timeout: Duration) -> Result<u32> {
    let ms = timeout.as_nanos().div_ceil(1_000_000);
    match u32::try_from(ms) {
        Ok(ms) if ms > 0 => Ok(ms),
        _ => Err(Error::Timeout(timeout)),
    }
}

fn check(pid: i32) -> Result<()> {
    if pid <= 0 {
        return Err(Error::InvalidPid(pid));
    }
    let status = text(pid, "status").map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::NoProcess(pid),
        // A process that ends between open and read.
        _ if source.raw_os_error() == Some(libc::ESRCH) => Error::NoProcess(pid),
        _ => Error::ReadStatus { pid, source },
    })?;
    let leader = status.lines().find_map(|line| line.strip_prefix("Tgid:")).and_then(|tgid| tgid.trim().parse().ok());
    match leader {
        Some(leader) if leader == pid => Ok(()),
        Some(leader) => Err(Error::ThreadId { tid: pid, pid: leader }),
        None => Err(Error::NoProcess(pid)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn pids_are_checked() {
        let me = i32::try_from(std::process::id()).unwrap();
        check(me).unwrap();
        assert!(matches!(check(0), Err(Error::InvalidPid(0))));
        assert!(matches!(check(-5), Err(Error::InvalidPid(-5))));
        assert!(matches!(check(i32::MAX), Err(Error::NoProcess(_))));
    }

    #[test]
    fn a_thread_is_not_a_process() {
        let (stop, wait) = mpsc::channel::<()>();
        let (send, receive) = mpsc::channel();
        let thread = thread::spawn(move || {
            send.send(nix::unistd::gettid().as_raw()).unwrap();
            let _ = wait.recv();
        });
        let tid = receive.recv().unwrap();
        let error = check(tid).unwrap_err();
        drop(stop);
        thread.join().unwrap();
        assert!(error.to_string().ends_with(&format!("use the pid {}", std::process::id())), "{error}");
    }

    #[test]
    fn timeouts_round_up_and_never_mean_for_ever() {
        assert_eq!(milliseconds(Duration::from_nanos(1)).unwrap(), 1);
        assert_eq!(milliseconds(Duration::from_millis(10)).unwrap(), 10);
        assert_eq!(milliseconds(Duration::from_micros(10_001)).unwrap(), 11);
        assert_eq!(milliseconds(Duration::from_millis(u64::from(u32::MAX))).unwrap(), u32::MAX);
        assert!(matches!(milliseconds(Duration::ZERO), Err(Error::Timeout(_))));
        assert!(matches!(milliseconds(Duration::from_millis(u64::from(u32::MAX) + 1)), Err(Error::Timeout(_))));
        assert!(milliseconds(Duration::MAX).is_err());
    }

    #[test]
    fn states_have_the_names_of_the_driver_tools() {
        let names: Vec<String> = (0..6).map(|raw| State::from_raw(raw).unwrap().to_string()).collect();
        assert_eq!(names, ["running", "locked", "checkpointed", "failed", "checkpointing", "restoring"]);
        assert_eq!(State::from_raw(6), None);
    }
}
