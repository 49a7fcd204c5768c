//! The CUDA processes of a tree, taken through the driver's checkpoint together.
//!
//! From the checkpoint to the restore all threads of these processes are stopped, but for the driver's own while it works
//! ([`crate::sys::ptrace`] says why). In the image they are stopped too: after a restart they go on once their GPU is
//! back.
//!
//! Invariant: what this module believes of each process is what the undo acts on; a process that the driver could not
//! restore is `Lost`, for there is no second try, and is never touched again.

use std::time::{Duration, Instant};

use super::Error;
use crate::sys::cuda::{self, Process, State};
use crate::sys::{process, ptrace};

/// Where a process stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    Running,
    Locked,
    Checkpointed,
    Lost,
}

#[derive(Debug)]
struct Member {
    process: Process,
    inner: i32,
    stand: Stand,
    /// Stopped by us, and to be set going again.
    stopped: bool,
}

/// How long the threads of a process may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The CUDA processes of one job.
#[derive(Debug, Default)]
pub(super) struct Group {
    members: Vec<Member>,
}

/// How often a changing set of processes, or ranks that hold each other up, are tried again.
const ATTEMPTS: u32 = 5;

impl Group {
    /// Looks for CUDA processes in the tree below `root`.
    pub(super) fn find(root: i32) -> Result<Group, cuda::Error> {
        let mut members = Vec::new();
        for pid in process::tree(root) {
            // A process that is gone meanwhile is none.
            if !cuda::is_candidate(pid).unwrap_or(false) {
                continue;
            }
            let Some(inner) = process::inner_pid(pid) else { continue };
            let found = Process::new(pid).and_then(|process| process.state().map(|state| (process, state)));
            match found {
                Ok((process, State::Running)) => {
                    members.push(Member { process, inner, stand: Stand::Running, stopped: false })
                }
                // Left by somebody else's checkpoint: it is not ours to undo, and can not be dumped half done.
                Ok((process, state)) => {
                    return Err(cuda::Error::Busy { pid: process.pid(), state });
                }
                Err(error) if error.is_not_cuda() => {}
                Err(_) if process::state(pid).is_none_or(|s| s == 'Z') => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Group { members })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(super) fn inner_pids(&self) -> Vec<i32> {
        self.members.iter().map(|m| m.inner).collect()
    }

    pub(super) fn outer_pids(&self) -> Vec<i32> {
        self.members.iter().map(|m| m.process.pid()).collect()
    }

    /// Locks all at once, within `timeout` for each attempt. Ranks that talk through collectives hold each other up: when
    /// one can not be locked, all are unlocked and it is tried again. The same when a process began to use CUDA between
    /// the look and the lock.
    pub(super) fn lock(&mut self, root: i32, timeout: Duration) -> Result<(), Error> {
        let error = |source| Error::Cuda { phase: "lock", source };
        for attempt in 1..=ATTEMPTS {
            if let Err(failure) = self.lock_once(timeout) {
                if let Err(undo) = self.undo_lock() {
                    return Err(Error::Lost { cause: Box::new(error(failure)), undo });
                }
                if !failure.is_not_ready() || attempt == ATTEMPTS || self.members.len() < 2 {
                    return Err(error(failure));
                }
                std::thread::sleep(pause(attempt));
                continue;
            }
            if self.is_empty() && attempt == 1 {
                // Nothing is locked: a process that begins with CUDA now is seen by CRIU, which refuses it.
                return Ok(());
            }
            if !self.has_changed(root) {
                return Ok(());
            }
            self.undo_lock()
                .map_err(|undo| Error::Lost { cause: Box::new(Error::Restless { attempts: attempt }), undo })?;
            *self = Group::find(root).map_err(error)?;
        }
        Err(Error::Restless { attempts: ATTEMPTS })
    }

    fn lock_once(&mut self, timeout: Duration) -> Result<(), cuda::Error> {
        let outcomes: Vec<Result<(), cuda::Error>> = match self.members.as_slice() {
            [one] => vec![one.process.lock(timeout)],
            many => std::thread::scope(|scope| {
                let threads: Vec<_> = many.iter().map(|m| scope.spawn(|| m.process.lock(timeout))).collect();
                threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
            }),
        };
        let mut first = Ok(());
        for (member, outcome) in self.members.iter_mut().zip(outcomes) {
            match outcome {
                Ok(()) => member.stand = Stand::Locked,
                Err(error) => first = first.and(Err(error)),
            }
        }
        first
    }

    /// Whether there is a CUDA process that is not in the group.
    fn has_changed(&self, root: i32) -> bool {
        let known = self.outer_pids();
        let unknown = process::tree(root).into_iter().filter(|pid| !known.contains(pid));
        unknown
            .into_iter()
            .any(|pid| cuda::is_candidate(pid).unwrap_or(false) && Process::new(pid).and_then(|p| p.state()).is_ok())
    }

    /// Stops all, then takes device memory to host memory, one process after the other.
    pub(super) fn checkpoint(&mut self) -> Result<(), Error> {
        for member in &mut self.members {
            member.stopped = ptrace::stop(member.process.pid(), STOP_TIMEOUT)
                .map_err(|source| Error::Io { what: format!("checkpoint: stop process {}", member.inner), source })?;
        }
        for member in &mut self.members {
            let began = Instant::now();
            let process = &member.process;
            process.alone(|| process.checkpoint()).map_err(|source| Error::Cuda { phase: "checkpoint", source })?;
            member.stand = Stand::Checkpointed;
            tracing::debug!(pid = member.inner, took = ?began.elapsed(), "CUDA checkpoint");
        }
        Ok(())
    }

    /// Sets the GPUs going again; goes through all even when one fails.
    pub(super) fn restore(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        for member in self.members.iter_mut().filter(|m| m.stand == Stand::Checkpointed) {
            let process = &member.process;
            match process.alone(|| process.restore(&[])) {
                Ok(()) => member.stand = Stand::Locked,
                Err(source) => {
                    member.stand = Stand::Lost;
                    result = result.and(Err(Error::Cuda { phase: "restore", source }));
                }
            }
        }
        result
    }

    /// Lets all go on that have their GPU.
    pub(super) fn unlock(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        for member in self.members.iter_mut().filter(|m| matches!(m.stand, Stand::Locked | Stand::Running)) {
            if std::mem::take(&mut member.stopped) {
                // One that died needs nothing.
                let _ = ptrace::go_on(member.process.pid());
            }
        }
        for member in self.members.iter_mut().filter(|m| m.stand == Stand::Locked) {
            match member.process.unlock() {
                Ok(()) => member.stand = Stand::Running,
                Err(source) => result = result.and(Err(Error::Cuda { phase: "unlock", source })),
            }
        }
        result
    }

    pub(super) fn undo_checkpoint(&mut self) -> Result<(), String> {
        self.sync_with_driver();
        self.restore().map_err(|e| e.to_string())
    }

    pub(super) fn undo_lock(&mut self) -> Result<(), String> {
        self.sync_with_driver();
        self.unlock().map_err(|e| e.to_string())
    }

    /// Takes the driver's word for where a process stands: a call that failed may have done its work, and a process that
    /// died needs no undo.
    fn sync_with_driver(&mut self) {
        for member in self.members.iter_mut().filter(|m| m.stand != Stand::Lost) {
            match member.process.state() {
                Ok(State::Running) => member.stand = Stand::Running,
                Ok(State::Locked) => member.stand = Stand::Locked,
                Ok(State::Checkpointed) => member.stand = Stand::Checkpointed,
                Ok(State::Failed) => member.stand = Stand::Lost,
                Ok(_) => {}
                Err(_) if process::state(member.process.pid()).is_none_or(|s| s == 'Z') => {
                    member.stand = Stand::Running
                }
                Err(_) => {}
            }
        }
    }

    /// Names the processes that are not running and can not be helped.
    pub(super) fn stuck(&self) -> Option<String> {
        let stuck: Vec<String> =
            self.members.iter().filter(|m| m.stand != Stand::Running).map(|m| format!("process {}", m.inner)).collect();
        (!stuck.is_empty()).then(|| format!("{} can not use its GPU again", stuck.join(", ")))
    }

    pub(super) fn check_running(&self) -> Result<(), Error> {
        for member in &self.members {
            match member.process.state() {
                Ok(State::Running) => {}
                Ok(state) => return Err(Error::NotRunning { pid: member.inner, state }),
                // It ended as soon as it was let go; the supervisor sees whether the job goes on.
                Err(_) if process::state(member.process.pid()).is_none_or(|s| s == 'Z') => {}
                Err(source) => return Err(Error::Cuda { phase: "check", source }),
            }
        }
        Ok(())
    }
}

/// Between 50 and 250 ms, longer with each attempt: enough for ranks to leave the collective they were in, and not the
/// same for two jobs side by side.
fn pause(attempt: u32) -> Duration {
    let jitter = Instant::now().elapsed().subsec_nanos() % 7 + std::process::id() % 43;
    Duration::from_millis(u64::from(attempt * 40 + jitter))
}
