//! Takes the CUDA processes of a tree through the driver's checkpoint together.
//!
//! From the checkpoint to the restore all threads of these processes are stopped, except the driver's own while it
//! works ([`rekindle_os::ptrace`] says why). They are stopped in the image too: after a restart they continue once
//! their GPU is restored. The programs above them are stopped first and continue last: `su`, `sudo` or a shell with job
//! control would see that their child is stopped, and stop themselves or go on without it.
//!
//! Invariants: the undo uses the state that this module has recorded for each process. A process that the driver could
//! not restore is `Lost`, because there is no second try, and is never touched again. A process whose state can no
//! longer be asked is `Lost` too, because it may be locked. A process that ended is `Gone` and does not stop the
//! others: the job decides whether it continues without it.

mod cut;
mod lock;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cut::{Cut, NotReached};
pub use cut::{Elsewhere, Operations};
use lock::Resting;
use rekindle_base::chain;
use rekindle_cuda::sharing::{self, Own, Sharing, Staying};
use rekindle_cuda::{self as cuda, Process, State};
use rekindle_os::descriptors::Room;
use rekindle_os::{parallel, process, ptrace};
use rekindle_store::staging::Area;

use crate::parts::landing::gate::Gate;

/// Why the GPUs of a job could not be frozen, or not be resumed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call of the CUDA driver failed.
    #[error("{phase}: {source}")]
    Cuda {
        /// The phase.
        phase: &'static str,
        /// The driver's answer.
        #[source]
        source: cuda::Error,
    },
    /// The set of CUDA processes changed at every attempt to lock it.
    #[error(
        "lock: the job starts and ends CUDA processes too fast: each of {attempts} attempts met a new one. The \
             snapshot is tried again at the next interval"
    )]
    Restless {
        /// How often it was tried.
        attempts: u32,
    },
    /// A process ended after it was locked.
    #[error("checkpoint: process {pid} ended while the job was being stopped")]
    Ended {
        /// The process, as it sees itself.
        pid: i32,
    },
    /// A process is in the middle of cuInit.
    #[error(
        "process {pid} ({name}) is initialising CUDA (cuInit), which would fail in a restored process: the snapshot has to \
         wait until it is done"
    )]
    Initializing {
        /// The process, as it sees itself.
        pid: i32,
        /// Its name.
        name: String,
    },
    /// CUDA processes have memory of each other that they cannot release.
    #[error("shared GPU memory: {0}")]
    Sharing(#[from] sharing::Error),
    /// A CUDA process is not running after everything succeeded.
    #[error("check: process {pid} is {state} after the snapshot")]
    NotRunning {
        /// The process.
        pid: i32,
        /// Its state.
        state: State,
    },
    /// A process could not be looked at or stopped.
    #[error("{what}")]
    Io {
        /// What was done.
        what: String,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// The ranks did not reach one point of their communicators.
    #[error(
        "lock: the ranks did not reach a common point of their NCCL communicators within {timeout:?}: {who}. If steps \
             take longer than that, set REKINDLE_LOCK_TIMEOUT to more"
    )]
    Late {
        /// The time limit.
        timeout: Duration,
        /// The missing rank, and what it has not started.
        who: String,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// It failed, and its undo failed too: the job cannot continue.
    #[error("{cause}; and the job could not be resumed: {undo}")]
    Lost {
        /// The first failure.
        cause: Box<Error>,
        /// The failure of the undo.
        undo: String,
    },
}

/// What the driver has done with a process, as far as we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GpuState {
    Running,
    Locked,
    Checkpointed,
    Lost,
    Gone,
    /// Somebody else has locked or checkpointed it, maybe the job itself: we leave it as it is.
    Foreign,
}

impl GpuState {
    /// The state after this answer of the driver.
    fn after(self, answer: &Result<State, cuda::Error>, has_ended: bool) -> GpuState {
        match answer {
            Ok(State::Running) => GpuState::Running,
            Ok(State::Locked) => GpuState::Locked,
            Ok(State::Checkpointed) => GpuState::Checkpointed,
            _ if has_ended => GpuState::Gone,
            // It has executed another program, which nothing was done to. While it is checkpointed it cannot: it is stopped.
            Err(error) if error.is_not_cuda() && self != GpuState::Checkpointed => GpuState::Gone,
            // Failed, or its state is unknown and it may be locked or in transition.
            _ => GpuState::Lost,
        }
    }
}

#[derive(Debug)]
struct Member {
    process: Process,
    inner: i32,
    /// The driver's thread in the process, as we see it.
    thread: i32,
    /// The same, as the job sees it. The image is described when the process may be dead.
    inner_thread: i32,
    /// Where its program has its stack: another one that it executes has another.
    stack: Option<u64>,
    state: GpuState,
    /// Stopped by us, and to be resumed.
    stopped: bool,
}

/// Time limit for a call of the driver before the other threads are resumed: twice what it takes to copy the memory
/// of the largest GPUs (140 GB at 2.5 GB/s).
const PATIENCE: Duration = Duration::from_secs(120);

/// How long the threads of a process may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The same for a program above them. One that does not stop by then is left running.
const LAUNCHER_STOPS: Duration = Duration::from_secs(1);

/// How long it is tried to read what processes have released.
const UNREAD: Duration = Duration::from_secs(2);

/// How long CUDA may take to be locked while all threads are stopped and the GPUs are idle. It takes some milliseconds,
/// unless one of the threads has a lock of the driver.
const AT_REST: Duration = Duration::from_secs(2);

impl Member {
    /// The driver knows it no longer once it has given back its memory, which may be long before it is dead.
    fn has_ended(&self) -> bool {
        process::is_ending(self.process.pid())
    }

    /// It has ended, or executed another program, which may use CUDA as well.
    fn is_another(&self) -> bool {
        self.has_ended() || runs_another(self.process.pid(), self.stack, self.thread)
    }

    /// Runs `work` with only the driver's thread running, if the process is stopped.
    fn alone<T>(&self, work: impl FnOnce(&Process) -> Result<T, cuda::Error>) -> Result<T, cuda::Error> {
        self.stop_again();
        self.process.alone(self.thread, PATIENCE, || work(&self.process))
    }

    fn unlock_stopped(&self) -> Result<(), cuda::Error> {
        self.stop_again();
        self.process.unlock_stopped(self.thread, PATIENCE)
    }

    /// CRIU resumes a stopped process and sends it SIGSTOP again; until the signal arrives, the process runs. If it does
    /// not stop, the driver's answer decides.
    fn stop_again(&self) {
        if self.stopped {
            let _ = ptrace::stop(self.process.pid(), STOP_TIMEOUT);
        }
    }

    fn may_run_on(&self) -> bool {
        matches!(self.state, GpuState::Running | GpuState::Gone | GpuState::Foreign)
    }
}

/// The CUDA processes of one job.
#[derive(Debug, Default)]
pub(crate) struct Group {
    members: Vec<Member>,
    /// All are below this process.
    root: i32,
    /// The programs above them that we stopped, as we see them and as they see themselves.
    launchers: Vec<(i32, i32)>,
    /// From the lock until all threads are stopped: all ranks wait at one point.
    cut: Option<Cut>,
    /// The processes, as we see them, that may lack memory: they were told to release some, and do not have it again.
    lacking: Vec<i32>,
    /// While they are checkpointed: their memory that stays on the GPU.
    staying: Vec<Staying>,
    /// For the descriptors of that.
    room: Option<Room>,
    /// From the lock to the unlock: no other process becomes a CUDA process.
    gate: Option<Gate>,
}

/// How CUDA processes are locked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Locking<'a> {
    /// The time limit of each step of each attempt.
    pub(crate) timeout: Duration,
    /// The time limit of all attempts together, for which they may hold up the job.
    pub(crate) limit: Duration,
    /// Where the gate is at which processes wait that begin with cuInit, if there is one.
    pub(crate) area: Option<&'a Area>,
    /// What becomes of the memory that can stay on the GPU.
    pub(crate) own: Own,
}

/// What an attempt to lock may still take.
#[derive(Debug, Clone, Copy)]
struct Budget {
    began: Instant,
    limit: Duration,
    timeout: Duration,
}

impl Budget {
    /// The time limit of the next step: at least a moment, because the driver takes none as no limit.
    fn step(&self, now: Instant) -> Duration {
        let left = self.limit.saturating_sub(now.saturating_duration_since(self.began));
        self.timeout.min(left).max(Duration::from_millis(1))
    }

    /// Whether there may be another attempt.
    fn is_spent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.began) >= self.limit
    }
}

/// As a message says it: what is left for a later attempt is no round number.
fn in_tenths(time: Duration) -> Duration {
    const TENTH: u128 = 100;
    let tenths = (time.as_millis() + TENTH / 2) / TENTH;
    Duration::from_millis(u64::try_from(tenths.max(1) * TENTH).unwrap_or(u64::MAX))
}

/// How often the lock is tried if the set of processes changes, or ranks block each other.
const ATTEMPTS: u32 = 5;

/// All operations that one rank has started were started by all others, so that none waits for a rank that is late.
const WEDGED: &str = "lock: all ranks have started the same NCCL operations, but the GPU of a process does not finish. Is the \
                      job stuck?";

impl Group {
    /// Looks for CUDA processes in the tree below `root`.
    pub(crate) fn find(root: i32) -> Result<Group, cuda::Error> {
        let mut members = Vec::new();
        // A process that has ended meanwhile is skipped.
        let look = |(at, pid): (usize, i32)| {
            // One that begins with cuInit now is not asked: the lock finds it.
            let is_candidate = cuda::is_candidate(pid).unwrap_or(false) && !cuda::is_initializing(pid).unwrap_or(false);
            let inner = is_candidate.then(|| process::inner_pid(pid)).flatten();
            Ok::<_, cuda::Error>((at, pid, inner.map(|inner| (inner, look_at(pid)))))
        };
        let tree = process::tree(root).into_iter().enumerate().collect();
        let mut all = parallel::in_parallel(tree, READERS, look)?;
        all.sort_by_key(|(at, ..)| *at);
        for (_, pid, answer) in all {
            let Some((inner, answer)) = answer else { continue };
            match answer {
                Ok((process, [thread, inner_thread])) => {
                    let (stack, state) = (process::stack_start(pid), GpuState::Running);
                    members.push(Member { process, inner, thread, inner_thread, stack, state, stopped: false });
                }
                Err(error) if error.is_not_cuda() => {}
                Err(_) if process::is_ending(pid) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Group { members, root, ..Group::default() })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn inner_pids(&self) -> Vec<i32> {
        self.members.iter().map(|m| m.inner).collect()
    }

    /// The driver's thread of each process, with pids as the job sees them.
    pub(crate) fn inner_threads(&self) -> BTreeMap<i32, i32> {
        self.members.iter().map(|member| (member.inner, member.inner_thread)).collect()
    }

    /// The processes that we stopped, as we see them.
    pub(crate) fn stopped_pids(&self) -> Vec<i32> {
        let members = self.members.iter().filter(|m| m.stopped).map(|m| m.process.pid());
        self.launchers.iter().map(|(pid, _)| *pid).chain(members).collect()
    }

    pub(crate) fn outer_pids(&self) -> Vec<i32> {
        self.members.iter().map(|m| m.process.pid()).collect()
    }

    /// The same, as they see themselves.
    pub(crate) fn stopped_inner_pids(&self) -> Vec<i32> {
        let members = self.members.iter().filter(|m| m.stopped).map(|m| m.inner);
        self.launchers.iter().map(|(_, inner)| *inner).chain(members).collect()
    }

    /// Refuses if a process has memory of another one that it cannot release. Checked before anything is stopped.
    pub(crate) fn check_sharing(&self) -> Result<(), Error> {
        Ok(sharing::check(&self.sharing()?)?)
    }

    /// Bytes of the memory of each that can stay on the GPU, by pid as we see it. None can if the driver of one of them would
    /// not import it again, unless another one can no longer copy it.
    pub(crate) fn kept_bytes(&self) -> Result<BTreeMap<i32, u64>, Error> {
        let all = self.sharing()?;
        if all.iter().any(Sharing::imports_nothing) && !all.iter().any(Sharing::has_imported) {
            return Ok(BTreeMap::new());
        }
        Ok(all.iter().map(|one| (one.pid(), one.kept_bytes())).collect())
    }

    /// Bytes of host memory that they copy to private memory while they are checkpointed.
    pub(crate) fn host_bytes(&self) -> Result<u64, Error> {
        Ok(self.sharing()?.iter().filter_map(Sharing::host_bytes).fold(0, u64::saturating_add))
    }

    /// A note if they wanted to share such memory by CUDA IPC, which the driver refuses. It is the same each time: the user
    /// is told once.
    pub(crate) fn refused(&self) -> Option<String> {
        let is_any = self.sharing().is_ok_and(|all| all.iter().any(|one| one.ipc_refused() > 0));
        is_any.then(|| {
            "the driver refused the job a handle for CUDA IPC (cudaIpcGetMemHandle, torch.multiprocessing), because \
             gpu.memory = \"kept\" keeps that memory on the GPU. If the job needs it, set gpu.memory = \"copied\" and start \
             the job from the beginning (--fresh)"
                .to_owned()
        })
    }

    /// A note if they could be restored only on the GPUs that they are on now: they share memory, and CUDA_VISIBLE_DEVICES names
    /// only some of `gpus`. The driver (580) then imports no memory on other GPUs, nor on another machine. It is the same each
    /// time: the user is told once.
    pub(crate) fn tied(&self, gpus: usize) -> Option<String> {
        let sharing = self.sharing().ok()?;
        let named = |one: &Sharing| process::environment(one.pid(), "CUDA_VISIBLE_DEVICES");
        let is_some = |value: &String| (1..gpus).contains(&value.split(',').filter(|name| !name.is_empty()).count());
        let value = sharing.iter().filter(|one| one.has_imports()).filter_map(named).find(is_some)?;
        Some(format!(
            "the job's images can be restored on the GPUs that it uses now, and on no others: its processes share GPU memory, as \
             NCCL does, and CUDA_VISIBLE_DEVICES={value} names only some of this machine's {gpus} GPUs. If it must be possible \
             to restore it on other GPUs or on another machine, start it without CUDA_VISIBLE_DEVICES, or set gpu.nccl = \
             \"no-peer\""
        ))
    }

    /// From the lock to the unlock: their memory that stays on the GPU.
    pub(crate) fn staying(&self) -> &[Staying] {
        &self.staying
    }

    fn sharing(&self) -> Result<Vec<Sharing>, Error> {
        let io = |source| Error::Io { what: "cannot read which memory the CUDA processes share".into(), source };
        sharing::of(&self.outer_pids()).map_err(io)
    }

    /// Whether all can be locked within this time now. They are unlocked again at once.
    pub(crate) fn pauses(root: i32, limit: Duration) -> Result<bool, Error> {
        let error = |source| Error::Cuda { phase: "lock", source };
        check_initialized(&process::tree(root))?;
        let mut group = Group::find(root).map_err(error)?;
        let locked = group.lock_once(limit, Resting::Held);
        if let Err(undo) = group.undo_lock() {
            let cause = Box::new(locked.err().map_or(Error::Cancelled, error));
            return Err(Error::Lost { cause, undo });
        }
        match locked {
            Err(source) if !source.is_not_ready() => Err(error(source)),
            outcome => Ok(outcome.is_ok()),
        }
    }

    /// Lets all ranks reach one point ([`cut`]), locks all ([`lock::together`]), and makes
    /// them release each other's memory.
    /// If one cannot be locked, all are unlocked and the lock is tried again. The same happens if a process started or
    /// stopped using CUDA between the listing and the lock.
    pub(crate) fn lock(
        &mut self,
        root: i32,
        elsewhere: Option<&dyn Elsewhere>,
        how: Locking<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let error = |source| Error::Cuda { phase: "lock", source };
        let budget = Budget { began: Instant::now(), limit: how.limit, timeout: how.timeout };
        let mut wedged = false;
        let mut resting = Resting::LetGo;
        for attempt in 1..=ATTEMPTS {
            let mut outcome = if wedged && resting == Resting::Held {
                tracing::debug!("ranks are locked without a common point: at that point a GPU did not finish");
                Ok(())
            } else {
                self.bring_to_rest(elsewhere, budget.step(Instant::now()), cancelled)
            };
            if outcome.is_ok() {
                // Closed before the look: who has not begun with cuInit by then waits.
                self.gate = how.area.and_then(Gate::close);
                outcome = check_initialized(&process::tree(root));
            }
            if outcome.is_ok() {
                let is_at_one_point = self.cut.is_some();
                outcome = self.lock_once(budget.step(Instant::now()), resting).map_err(|source| {
                    wedged |= is_at_one_point && source.is_not_ready();
                    // Each way can lock processes that the other cannot. A failure after the lock says nothing about it.
                    resting = resting.other();
                    Error::Cuda { phase: if wedged { WEDGED } else { "lock" }, source }
                });
            }
            // The others need not be asked again for one that has ended.
            if outcome.is_ok() {
                self.forget_ended();
            }
            if outcome.is_ok() && (self.is_empty() && attempt == 1 || !self.has_changed(root)) {
                outcome = self.let_go(budget.step(Instant::now()), how.own);
                if outcome.is_ok() {
                    // Without CUDA processes nothing is locked. If a process starts to use CUDA now, the dump sees it
                    // and is refused ([`super::devices`]).
                    return Ok(());
                }
            }
            let has_another = self.members.iter().any(Member::is_another);
            let cause = match outcome {
                Err(failure) if !has_another => failure,
                _ => Error::Restless { attempts: attempt },
            };
            tracing::debug!(attempt, error = %chain(&cause), "the attempt to lock failed");
            if let Err(undo) = self.undo_lock() {
                return Err(Error::Lost { cause: Box::new(cause), undo });
            }
            let spent = budget.is_spent(Instant::now());
            match &cause {
                // A new search would lose this state.
                _ if self.stuck().is_some() => return Err(cause),
                Error::Cancelled => return Err(cause),
                // The other machines are at the point that these ranks have left now.
                _ if elsewhere.is_some() => return Err(cause),
                // It is waited for while nothing is locked.
                Error::Initializing { .. } => return Err(cause),
                Error::Cuda { source, .. } if !source.is_not_ready() || self.members.len() < 2 => return Err(cause),
                Error::Sharing(source) if !source.is_busy() => return Err(cause),
                // After the second time it is not worth to delay the others again.
                Error::Late { .. } if attempt == 2 => return Err(cause),
                _ if attempt == ATTEMPTS || spent => return Err(cause),
                _ if cancelled() => return Err(Error::Cancelled),
                Error::Cuda { .. } | Error::Sharing(_) | Error::Late { .. } => std::thread::sleep(pause(attempt)),
                _ => *self = Group::find(root).map_err(error)?,
            }
        }
        Err(Error::Restless { attempts: ATTEMPTS })
    }

    /// Holds all ranks at one point, if their operations are counted.
    fn bring_to_rest(
        &mut self,
        elsewhere: Option<&dyn Elsewhere>,
        timeout: Duration,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        self.cut = match cut::reach(&self.outer_pids(), elsewhere, timeout, cancelled) {
            Ok(cut) => Some(cut),
            Err(NotReached::Counts) => None,
            Err(NotReached::Late(who)) => return Err(Error::Late { timeout: in_tenths(timeout), who }),
            Err(NotReached::Cancelled) => return Err(Error::Cancelled),
        };
        Ok(())
    }

    /// Makes locked processes release each other's memory, and their own that stays on the GPU. They are stopped, and
    /// unlocked while they do so.
    fn let_go(&mut self, timeout: Duration, own: Own) -> Result<(), Error> {
        let sharing = self.sharing()?;
        sharing::check(&sharing)?;
        if !sharing::is_any(&sharing, own) {
            return Ok(());
        }
        sharing::check_announced(&sharing)?;
        let began = Instant::now();
        if own == Own::Stays {
            // That of an earlier attempt first: it lowers the limit again.
            self.room = None;
            self.room = Some(sharing::room(&sharing)?);
        }
        self.stop()?;
        self.unlock_alone()?;
        self.lacking = sharing.iter().map(Sharing::pid).collect();
        sharing::let_go(&sharing, own, &mut self.staying)?;
        let timeout = timeout.min(AT_REST);
        for (member, outcome) in self.at_once(|member| member.alone(|process| process.lock(timeout))) {
            outcome.map_err(|source| Error::Cuda { phase: "lock", source })?;
            member.state = GpuState::Locked;
        }
        let (pieces, bytes) = (self.staying.len(), self.staying.iter().map(|one| one.bytes).sum::<u64>());
        tracing::debug!(took = ?began.elapsed(), pieces, bytes, "released GPU memory of other processes, and what stays");
        Ok(())
    }

    /// Stops all threads of all processes. Their gates are open then: in an image, nobody would open a closed one.
    fn stop(&mut self) -> Result<(), Error> {
        for pid in super::launchers(self.root, &self.outer_pids()) {
            // One that does not stop may miss that its child does.
            if ptrace::stop(pid, LAUNCHER_STOPS).unwrap_or(false)
                && let Some(inner) = process::inner_pid(pid)
            {
                self.launchers.push((pid, inner));
            }
        }
        let stop = |member: &Member| match member.stopped {
            true => Ok(true),
            false => ptrace::stop(member.process.pid(), STOP_TIMEOUT),
        };
        let mut result = Ok(());
        let has_released = !self.lacking.is_empty();
        for (member, outcome) in self.at_once(stop) {
            match outcome {
                Ok(stopped) => member.stopped = stopped,
                // What it has released is being copied to the image.
                Err(_) if member.has_ended() && has_released => {
                    result = result.and(Err(Error::Ended { pid: member.inner }));
                }
                Err(_) if member.has_ended() => member.state = GpuState::Gone,
                Err(source) => {
                    let what = format!("checkpoint: cannot stop process {}", member.inner);
                    result = result.and(Err(Error::Io { what, source }));
                }
            }
        }
        if !has_released {
            self.forget_ended();
        }
        if result.is_ok() {
            self.cut = None;
        }
        result
    }

    /// Those that have ended have nothing on a GPU any more.
    fn forget_ended(&mut self) {
        self.members.retain(|member| {
            let has_ended = member.has_ended();
            if has_ended {
                tracing::debug!(pid = member.inner, "it ended while the job was being locked");
            }
            !has_ended
        });
    }

    /// Unlocks the locked processes; their threads stay stopped.
    fn unlock_alone(&mut self) -> Result<(), Error> {
        let unlock = |member: &Member| match member.state {
            GpuState::Locked => member.unlock_stopped().map(|()| GpuState::Running),
            state => Ok(state),
        };
        let mut result = Ok(());
        for (member, outcome) in self.at_once(unlock) {
            match outcome {
                Ok(state) => member.state = state,
                Err(source) => result = result.and(Err(Error::Cuda { phase: "unlock", source })),
            }
        }
        result
    }

    /// Maps again, in each process, the memory of others that it released, before any of their threads runs.
    fn take_again(&mut self) -> Result<(), Error> {
        if self.lacking.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let taken = self.sharing_again().and_then(|sharing| match sharing::is_let_go(&sharing) {
            true => self.unlock_alone().and_then(|()| Ok(sharing::take_again(&sharing, &self.staying)?)),
            false => Ok(()),
        });
        if taken.is_err() {
            // If they ran, they would use memory that is not mapped.
            for member in self.members.iter_mut().filter(|m| matches!(m.state, GpuState::Locked | GpuState::Running)) {
                member.state = if member.has_ended() { GpuState::Gone } else { GpuState::Lost };
            }
        }
        if taken.is_ok() {
            // The processes have it.
            self.lacking.clear();
            self.staying.clear();
            self.room = None;
        }
        tracing::debug!(took = ?began.elapsed(), "mapped GPU memory again");
        taken
    }

    /// The tables of the processes that may lack memory, and of the others. A failure costs the job its life, so a shortage
    /// of ours, such as of descriptors, may pass.
    fn sharing_again(&self) -> Result<Vec<Sharing>, Error> {
        let began = Instant::now();
        loop {
            let sharing = self.sharing().and_then(|all| {
                let is_missing = |pid: &&i32| !all.iter().any(|one| one.pid() == **pid) && !process::is_ending(**pid);
                match self.lacking.iter().find(is_missing) {
                    None => Ok(all),
                    Some(pid) => Err(Error::Io {
                        what: format!("cannot find the table of the GPU memory that process {pid} released"),
                        source: std::io::Error::from_raw_os_error(libc::ENOENT),
                    }),
                }
            });
            match sharing {
                Err(_) if began.elapsed() < UNREAD => std::thread::sleep(Duration::from_millis(20)),
                sharing => return sharing,
            }
        }
    }

    fn lock_once(&mut self, timeout: Duration, resting: Resting) -> Result<(), cuda::Error> {
        let members = &self.members;
        // What is not told is found when it is locked.
        let tables = parallel::at_once(members, |member| Sharing::of(member.process.pid()).ok().flatten());
        let tell = |at: usize, is_locked| {
            if let Some(Some(table)) = tables.get(at) {
                table.announce(is_locked);
            }
        };
        (0..members.len()).for_each(|at| tell(at, true));
        sharing::let_calls_end(tables.iter().flatten());
        // Locked or checkpointed by somebody else since the look.
        let foreign = Mutex::new(BTreeSet::new());
        let lock = |at: usize, left| {
            tell(at, true);
            let Some(member) = members.get(at) else { return Ok(()) };
            match member.process.lock(left) {
                Err(_) if member.has_ended() => Ok(()),
                Err(error) if error.is_illegal_state() => {
                    foreign.lock().unwrap_or_else(PoisonError::into_inner).insert(at);
                    Err(in_other_hands(&member.process, error))
                }
                outcome => outcome,
            }
        };
        // Its threads wait for as long as it is told that CUDA is locked, and others may wait for what they start then.
        let unlock = |at: usize| {
            let Some(member) = members.get(at) else { return Ok(()) };
            match member.process.unlock() {
                Err(_) if member.has_ended() => {}
                outcome => outcome?,
            }
            tell(at, false);
            Ok(())
        };
        let (locked, result) = lock::together(members.len(), timeout, resting, lock, unlock);
        let foreign = foreign.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (at, (member, locked)) in self.members.iter_mut().zip(locked).enumerate() {
            member.state = match (locked, foreign.contains(&at)) {
                (true, _) => GpuState::Locked,
                (false, true) => GpuState::Foreign,
                (false, false) => member.state,
            };
        }
        result
    }

    /// Whether there is a CUDA process that is not in the group, or one in the group that is not the same any more.
    fn has_changed(&self, root: i32) -> bool {
        if self.members.iter().any(Member::is_another) {
            return true;
        }
        let known = self.outer_pids();
        let unknown = process::tree(root).into_iter().filter(|pid| !known.contains(pid)).collect();
        any(unknown, |pid| {
            let is_candidate = cuda::is_candidate(pid).unwrap_or(false);
            // One in cuInit is not asked.
            is_candidate
                && (cuda::is_initializing(pid).unwrap_or(false) || Process::new(pid).and_then(|p| p.state()).is_ok())
        })
        .is_some()
    }

    /// Stops all processes, then moves device memory to host memory. Fails if one is in cuInit: driver 580 would accept
    /// it, but the call would fail once the process is restored. Driver 580 moves the memory of several processes at
    /// once, on one GPU and on several (measured: two with 8 GiB each in 4.6 s instead of 8.4 s, without the
    /// interposer).
    pub(crate) fn checkpoint(&mut self) -> Result<(), Error> {
        self.stop()?;
        check_initialized(&self.outer_pids())?;
        let mut first = Ok(());
        let has_released = !self.lacking.is_empty();
        let checkpoint = |member: &Member| {
            let began = Instant::now();
            let outcome = member.alone(Process::checkpoint);
            tracing::debug!(pid = member.inner, took = ?began.elapsed(), "CUDA checkpoint");
            outcome
        };
        for (member, outcome) in self.at_once(checkpoint) {
            match outcome {
                Ok(()) => member.state = GpuState::Checkpointed,
                Err(_) if !has_released && is_dead(member) => member.state = GpuState::Gone,
                Err(source) => first = first.and(Err(Error::Cuda { phase: "checkpoint", source })),
            }
        }
        if first.is_ok() && !has_released {
            self.forget_ended();
        }
        first
    }

    /// Restores the GPU memory of all processes at once; a failure of one does not stop the others.
    pub(crate) fn restore(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        let restore = |member: &Member| match member.state {
            GpuState::Checkpointed => Some(member.alone(|process| process.restore(&[]))),
            _ => None,
        };
        for (member, outcome) in self.at_once(restore) {
            match outcome {
                None => {}
                Some(Ok(())) => member.state = GpuState::Locked,
                Some(Err(_)) if is_dead(member) => member.state = GpuState::Gone,
                Some(Err(source)) => {
                    member.state = GpuState::Lost;
                    result = result.and(Err(Error::Cuda { phase: "restore", source }));
                }
            }
        }
        result
    }

    /// Runs `work` for all processes at once, and pairs each with its result, in their order.
    fn at_once<T: Send>(&mut self, work: impl Fn(&Member) -> T + Sync) -> impl Iterator<Item = (&mut Member, T)> {
        let answers = parallel::at_once(&self.members, work);
        self.members.iter_mut().zip(answers)
    }

    /// Unlocks and resumes all processes that have their GPU memory.
    pub(crate) fn unlock(&mut self) -> Result<(), Error> {
        self.cut = None;
        let mut result = self.take_again();
        for member in self.members.iter_mut().filter(|m| m.state == GpuState::Locked || m.may_run_on()) {
            if std::mem::take(&mut member.stopped) {
                // A process that died needs nothing.
                let _ = ptrace::go_on(member.process.pid());
            }
        }
        let unlock = |member: &Member| (member.state == GpuState::Locked).then(|| member.process.unlock());
        for (member, outcome) in self.at_once(unlock) {
            match outcome {
                None => {}
                Some(Ok(())) => member.state = GpuState::Running,
                Some(Err(_)) if is_dead(member) => member.state = GpuState::Gone,
                Some(Err(source)) => result = result.and(Err(Error::Cuda { phase: "unlock", source })),
            }
        }
        super::announce_unlocked(&self.outer_pids());
        self.gate = None;
        // They would see that one is still stopped. The job is killed then.
        if self.stuck().is_none() {
            for (pid, _) in self.launchers.drain(..).rev() {
                let _ = ptrace::go_on(pid);
            }
        }
        result
    }

    pub(crate) fn undo_checkpoint(&mut self) -> Result<(), String> {
        self.sync_with_driver();
        self.restore().map_err(|e| e.to_string())
    }

    pub(crate) fn undo_lock(&mut self) -> Result<(), String> {
        self.sync_with_driver();
        self.unlock().map_err(|e| e.to_string())
    }

    /// Updates the recorded state from the driver: a call that failed may have done its work, and a process that died
    /// needs no undo.
    fn sync_with_driver(&mut self) {
        let is_ours = |member: &Member| !matches!(member.state, GpuState::Lost | GpuState::Foreign);
        let ask = |member: &Member| is_ours(member).then(|| ask_again(member));
        for (member, answer) in self.at_once(ask) {
            let Some(answer) = answer else { continue };
            member.state = member.state.after(&answer, member.has_ended());
        }
    }

    /// Names the processes that are not running and cannot be recovered.
    pub(crate) fn stuck(&self) -> Option<String> {
        let stuck: Vec<String> =
            self.members.iter().filter(|m| !m.may_run_on()).map(|m| format!("process {}", m.inner)).collect();
        (!stuck.is_empty()).then(|| format!("{} cannot use its GPU again", stuck.join(", ")))
    }

    /// Refuses an image that would lack one of them.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        match self.members.iter().find(|member| member.has_ended()) {
            None => Ok(()),
            Some(member) => Err(Error::Ended { pid: member.inner }),
        }
    }

    pub(crate) fn check_running(&self) -> Result<(), Error> {
        let states = parallel::at_once(&self.members, |member| member.process.state());
        for (member, state) in self.members.iter().zip(states) {
            match state {
                Ok(State::Running) => {}
                // We have unlocked it: the job itself has locked it since, as one that suspends itself does.
                Ok(State::Locked | State::Checkpointed) => {}
                Ok(state) => return Err(Error::NotRunning { pid: member.inner, state }),
                // It ended as soon as it was resumed; the supervisor sees whether the job continues.
                Err(_) if member.has_ended() => {}
                // Or it executed another program.
                Err(source) if source.is_not_cuda() => {}
                Err(source) => return Err(Error::Cuda { phase: "check", source }),
            }
        }
        Ok(())
    }
}

/// Whether a process does not run the program any more that had its stack here, and this thread.
fn runs_another(pid: i32, stack: Option<u64>, thread: i32) -> bool {
    process::stack_start(pid) != stack || !process::threads(pid).contains(&thread)
}

/// Whether none of these, as we see them, is in cuInit. While they run, the answer is valid for this moment only.
pub(crate) fn check_initialized(pids: &[i32]) -> Result<(), Error> {
    // A process that ended meanwhile does not count.
    match any(pids.to_vec(), |pid| cuda::is_initializing(pid).unwrap_or(false)) {
        None => Ok(()),
        Some(pid) => {
            let name = process::name(pid).unwrap_or_default();
            Err(Error::Initializing { pid: process::inner_pid(pid).unwrap_or(pid), name })
        }
    }
}

/// Threads that read /proc. The mappings of a process of PyTorch take about 3 ms, and the kernel reads those of several
/// at once.
const READERS: usize = 8;

/// One of these processes to which it applies.
fn any(pids: Vec<i32>, applies: impl Fn(i32) -> bool + Sync) -> Option<i32> {
    parallel::in_parallel(pids, READERS, |pid| if applies(pid) { Err(pid) } else { Ok(()) }).err()
}

/// The error for a process that somebody else has locked.
fn in_other_hands(process: &Process, error: cuda::Error) -> cuda::Error {
    match process.state() {
        Ok(state) if state != State::Running => cuda::Error::Busy { pid: process.pid(), state },
        // It runs again.
        _ => error,
    }
}

/// A CUDA process that is running, and the thread the driver works with, as we see it and as the process does.
fn look_at(pid: i32) -> Result<(Process, [i32; 2]), cuda::Error> {
    let process = Process::new(pid)?;
    match process.state()? {
        State::Running => {}
        // Another program has checkpointed it: we must not undo that, and cannot dump it.
        state => return Err(cuda::Error::Busy { pid, state }),
    }
    let told = process.restore_thread_id()?;
    // It is not documented to which namespace the number belongs. Driver 580 answers the caller's.
    let thread = process::thread_by_outer_or_inner(pid, told);
    let thread = thread.and_then(|thread| Some([thread, process::inner_pid(thread)?]));
    let gone = || cuda::Error::Thread { pid, tid: told, source: std::io::Error::from_raw_os_error(libc::ESRCH) };
    Ok((process, thread.ok_or_else(gone)?))
}

/// Asks for the state several times over 100 ms: one failed call must not cost the job its life. If the driver cannot be
/// asked, that was tried for longer.
fn ask_again(member: &Member) -> Result<State, cuda::Error> {
    let pid = member.process.pid();
    let ask = || member.alone(Process::state);
    let mut answer = ask();
    for _ in 0..5 {
        if matches!(answer, Ok(_) | Err(cuda::Error::Thread { .. })) || process::is_ending(pid) {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        answer = ask();
    }
    answer
}

/// Whether a call has failed because the process died. One that is being killed may take a moment to be seen as dead.
fn is_dead(member: &Member) -> bool {
    let _ = ask_again(member);
    let has_ended = member.has_ended();
    if has_ended {
        tracing::debug!(pid = member.inner, "it ended before its GPU was restored");
    }
    has_ended
}

/// From 40 to 120 ms after the first attempt, from 160 to 480 ms after the fourth: time for ranks to leave the
/// collective they were in. Random, because ranks that begin a collective in step with our attempts would delay all of
/// them.
fn pause(attempt: u32) -> Duration {
    let least = u64::from(attempt) * 40;
    // Each hasher has another random seed.
    let chance = RandomState::new().hash_one(attempt);
    Duration::from_millis(least + chance % (2 * least + 1))
}

#[cfg(test)]
mod tests;
