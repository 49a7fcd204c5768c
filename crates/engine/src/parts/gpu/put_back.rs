//! Restores the GPUs of a job before any of its threads runs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::launch::Job;
use crate::parts::kept::put_back::{self as kept, Ahead};
use rekindle_cuda::copier::Copier;
use rekindle_cuda::{self as cuda, sharing};
use rekindle_os::beneath::Beneath;
use rekindle_os::spawn::Ended;
use rekindle_os::{parallel, process, ptrace};
use rekindle_store::Manifest;

/// Why the GPUs of a job were not restored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A process of the image that used CUDA does not exist after the restore.
    #[error("process {0} used CUDA, and ended before its GPU memory was restored")]
    NoProcess(i32),
    /// The image does not say with which thread the driver works, and other threads must not run before the process has
    /// its memory.
    #[error("the image does not say which thread of process {0} belongs to the CUDA driver; restore an older image")]
    NoThread(i32),
    /// The CUDA driver could not restore a process.
    #[error("the CUDA state of process {pid} was not restored: {source}")]
    Cuda {
        /// Its pid as the job sees it.
        pid: i32,
        /// The driver's answer.
        #[source]
        source: cuda::Error,
    },
    /// Shared GPU memory was not mapped again.
    #[error("the GPU memory that the processes share was not restored: {0}")]
    Sharing(#[from] sharing::Error),
    /// Memory that had stayed on the GPU was not filled.
    #[error("the GPU memory of the job was not restored: {0}")]
    Kept(#[from] kept::Error),
    /// The notes about it cannot be read.
    #[error("the GPU memory that the processes share was not restored: {0}")]
    SharingUnread(#[source] std::io::Error),
    /// The CUDA driver did not answer in time.
    #[error(
        "the CUDA driver did not restore the job within {}: raise restart.restore-timeout, or check what uses the GPU",
        humantime::format_duration(*limit)
    )]
    Timeout {
        /// The time limit.
        limit: Duration,
    },
    /// There is no thread for the driver's calls, which could not be ended without one.
    #[error(
        "cannot start a thread for the CUDA driver's calls: {0}. Raise pids.max of the control group, or end other processes"
    )]
    Unwatched(#[source] std::io::Error),
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Time limit for the driver before the other threads are resumed: a minute, plus the time for the image's memory at a
/// seventh of the slowest observed rate (6.8 GB/s from host memory). Eight processes on four GPUs took 4.7 s, with little
/// memory. To resume the threads in the middle of a restore that is only slow can break the process, and
/// `restart.restore-timeout` limits the restore anyway.
fn patience(manifest: &Manifest) -> Duration {
    Duration::from_secs(60) + Duration::from_nanos(manifest.bytes)
}

/// How long the threads of a process may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a driver call in progress is checked.
const WATCH: Duration = Duration::from_millis(20);

/// Runs `work` on another thread. A driver call has no time limit, and can only be cancelled by killing its process:
/// this is done if the restore is cancelled or takes too long. `work` can ask whether it was.
pub(crate) fn watched<T: Send>(
    job: &Job,
    limit: Duration,
    cancelled: &dyn Fn() -> bool,
    work: impl FnOnce(&dyn Fn() -> bool) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    let deadline = Instant::now() + limit;
    let is_given_up = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (done, finished) = mpsc::channel::<()>();
        let flag = &is_given_up;
        let watched = move || {
            // Closed when the work ends, in whatever way.
            let _done = done;
            work(&|| flag.load(Ordering::Relaxed))
        };
        let worker = std::thread::Builder::new().spawn_scoped(scope, watched).map_err(Error::Unwatched)?;
        loop {
            if finished.recv_timeout(WATCH) == Err(mpsc::RecvTimeoutError::Disconnected) {
                return worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            let stop = match (cancelled(), Instant::now() >= deadline) {
                (true, _) => Error::Cancelled,
                (false, true) => Error::Timeout { limit },
                (false, false) => continue,
            };
            is_given_up.store(true, Ordering::Relaxed);
            job.kill();
            return Err(stop);
        }
    })
}

/// CUDA_VISIBLE_DEVICES of a CUDA process of the job, as it was at its start.
pub(crate) fn visible_devices(job: &Job, manifest: &Manifest) -> Option<String> {
    let is_cuda = |pid: &i32| process::inner_pid(*pid).is_some_and(|inner| manifest.tree.cuda.contains(&inner));
    let all = process::tree(job.root.pid()).into_iter().filter(is_cuda);
    all.filter_map(|pid| process::environment(pid, "CUDA_VISIBLE_DEVICES")).find(|value| !value.is_empty())
}

/// The CUDA processes of a job, each with its pid as the job sees it. They do not run yet.
#[derive(Debug, Default)]
pub(crate) struct Stopped {
    processes: Vec<(i32, cuda::Process)>,
    /// Those that somebody had stopped before the image was taken, with the driver's thread as we see it.
    stay: BTreeMap<i32, i32>,
    /// The programs above them that rekindle had stopped, as we see them.
    launchers: Vec<i32>,
    patience: Duration,
}

/// The programs above the CUDA processes of an image, as we see them and as they see themselves. They are stopped in it
/// (`super::capture`), and those that somebody else had stopped stay so.
pub(crate) fn launchers(root: i32, manifest: &Manifest) -> Vec<(i32, i32)> {
    let tree = &manifest.tree;
    let is_cuda = |pid: &i32| process::inner_pid(*pid).is_some_and(|inner| tree.cuda.contains(&inner));
    let cuda: Vec<i32> = process::tree(root).into_iter().filter(is_cuda).collect();
    let launchers = super::launchers(root, &cuda).into_iter().filter_map(|pid| Some((pid, process::inner_pid(pid)?)));
    launchers.filter(|(_, inner)| !tree.stopped.contains(inner)).collect()
}

/// Restores the GPU memory of all CUDA processes at once; the driver does several in parallel (580, measured). `pairs`
/// name other GPUs, if there are any.
/// Memory that had stayed on the GPU is filled as `filling` says.
pub(crate) fn put_back(
    job: &Job,
    manifest: &Manifest,
    pairs: &[cuda::GpuMapping],
    filling: Filling<'_>,
) -> Result<Stopped, Error> {
    if manifest.tree.cuda.is_empty() {
        return Ok(Stopped::default());
    }
    let tree: Vec<(i32, i32)> =
        process::tree(job.root.pid()).into_iter().filter_map(|pid| Some((process::inner_pid(pid)?, pid))).collect();
    let mut processes = Vec::new();
    let mut ended = Vec::new();
    for inner in &manifest.tree.cuda {
        let outer = tree.iter().find(|(i, _)| i == inner).map(|(_, outer)| *outer);
        let Some(outer) = outer.filter(|outer| !process::is_ending(*outer)) else {
            ended.push(*inner);
            continue;
        };
        let error = |source| Error::Cuda { pid: *inner, source };
        processes.push((*inner, cuda::Process::new(outer).map_err(error)?));
    }
    let restore = |(pid, process): &(i32, cuda::Process)| {
        // The process was stopped in the image, and stays stopped until its GPU memory is restored. CRIU sends it
        // SIGSTOP when it resumes it; until the signal arrives, the process runs.
        let _ = ptrace::stop(process.pid(), STOP_TIMEOUT);
        // Images of early versions do not say it. A process that had released no memory has all of it once the driver is
        // done; one that had is refused below.
        let known = match thread(manifest, *pid, process) {
            Err(Error::NoThread(_)) if manifest.kept.is_none() => process.pid(),
            known => known?,
        };
        process
            .alone(known, patience(manifest), || process.restore(pairs))
            .map_err(|source| Error::Cuda { pid: *pid, source })
    };
    let restored = parallel::at_once(&processes, restore);
    let mut running = Vec::new();
    for (one, outcome) in processes.into_iter().zip(restored) {
        match outcome {
            Err(_) if process::is_ending(one.1.pid()) => ended.push(one.0),
            outcome => {
                outcome?;
                running.push(one);
            }
        }
    }
    let processes = running;
    without(&ended, processes.len(), job, manifest)?;
    take_again(manifest, &processes, filling)?;
    let stays = |(pid, _): &&(i32, cuda::Process)| manifest.tree.stopped.contains(pid);
    let with_thread = |(pid, process): &(i32, cuda::Process)| Ok((*pid, thread(manifest, *pid, process)?));
    let stay = processes.iter().filter(stays).map(with_thread).collect::<Result<_, Error>>()?;
    let launchers = launchers(job.root.pid(), manifest).into_iter().map(|(pid, _)| pid).collect();
    Ok(Stopped { processes, stay, launchers, patience: patience(manifest) })
}

/// What to do without processes of the image that have ended. One that was about to end when the image was taken does so as
/// soon as CRIU lets it: it would have ended in the job, too, and its parent is told. But the job cannot go on without its first
/// process, nor without all of them, and a process that was killed did not end by itself.
fn without(ended: &[i32], left: usize, job: &Job, manifest: &Manifest) -> Result<(), Error> {
    let tree = process::tree(job.root.pid());
    let exit_of = |inner: i32| {
        let outer = tree.iter().find(|pid| process::inner_pid(**pid) == Some(inner));
        outer.and_then(|outer| process::ended(*outer))
    };
    for inner in ended {
        let was_killed = matches!(exit_of(*inner), Some(Ended::Signal(_)));
        if left == 0 || *inner == manifest.tree.job || was_killed {
            return Err(Error::NoProcess(*inner));
        }
        tracing::warn!("process {inner} of the image ended as soon as it was restored: the job continues without it");
    }
    Ok(())
}

/// The thread of a process that the driver works with, as we see it. The image has its number as the job sees it.
fn thread(manifest: &Manifest, pid: i32, process: &cuda::Process) -> Result<i32, Error> {
    let inner = manifest.tree.cuda_threads.get(&pid).copied().ok_or(Error::NoThread(pid))?;
    process::thread_by_inner(process.pid(), inner).ok_or_else(|| {
        let source = cuda::Error::Thread {
            pid: process.pid(),
            tid: inner,
            source: std::io::Error::from_raw_os_error(libc::ESRCH),
        };
        Error::Cuda { pid, source }
    })
}

/// Lets the CUDA processes run, but those that somebody had stopped.
pub(crate) fn go_on(Stopped { processes, stay, launchers, patience }: &Stopped) -> Result<(), Error> {
    for (_, process) in processes.iter().filter(|(pid, _)| !stay.contains_key(pid)) {
        // A process that died is noticed below.
        let _ = ptrace::go_on(process.pid());
    }
    let unlock = |(pid, process): &(i32, cuda::Process)| match process.state() {
        Ok(cuda::State::Running) => Ok(()),
        _ => match stay.get(pid) {
            Some(thread) => process.unlock_stopped(*thread, *patience),
            None => process.unlock(),
        }
        .map_err(|source| Error::Cuda { pid: *pid, source }),
    };
    parallel::at_once(processes, unlock).into_iter().collect::<Result<(), Error>>()?;
    for pid in launchers.iter().rev() {
        let _ = ptrace::go_on(*pid);
    }
    // In the image, CUDA is announced as locked.
    let pids: Vec<i32> = processes.iter().map(|(_, process)| process.pid()).collect();
    super::announce_unlocked(&pids);
    let check = |(pid, process): &(i32, cuda::Process)| {
        let error = |source| Error::Cuda { pid: *pid, source };
        match process.state().map_err(error)? {
            cuda::State::Running => Ok(()),
            state => Err(error(cuda::Error::Busy { pid: *pid, state })),
        }
    };
    parallel::at_once(processes, check).into_iter().collect()
}

/// Where the content of memory comes from that had stayed on the GPU.
pub(crate) struct Filling<'a> {
    /// The process that copies it.
    pub(crate) copier: &'a Copier,
    /// The image.
    pub(crate) dir: &'a Beneath,
    /// What is being filled already.
    pub(crate) ahead: Option<Ahead<'a>>,
    /// Whether the restore has failed meanwhile. A copy is given up then: the end of the job does not end it.
    pub(crate) is_given_up: &'a dyn Fn() -> bool,
}

/// Maps again in each process the other processes' memory that it had released for the image, and makes and fills its own
/// that had stayed on the GPU. Their other threads are stopped; processes without such memory stay locked.
fn take_again(
    manifest: &Manifest,
    processes: &[(i32, cuda::Process)],
    Filling { copier, dir, ahead, is_given_up }: Filling<'_>,
) -> Result<(), Error> {
    let pids: Vec<i32> = processes.iter().map(|(_, process)| process.pid()).collect();
    let sharing = sharing::of(&pids).map_err(Error::SharingUnread)?;
    if !sharing::is_let_go(&sharing) {
        return Ok(kept::fill(copier, dir, manifest.kept.as_ref(), &[], is_given_up)?);
    }
    let unlock = |(pid, process): &(i32, cuda::Process)| {
        // They run if the driver had to wait for one of them. Until the unlock they cannot use the GPU.
        let _ = ptrace::stop(process.pid(), STOP_TIMEOUT);
        let unlocked = process.unlock_stopped(thread(manifest, *pid, process)?, patience(manifest));
        unlocked.map_err(|source| Error::Cuda { pid: *pid, source })
    };
    parallel::at_once(processes, unlock).into_iter().collect::<Result<(), Error>>()?;
    let began = Instant::now();
    let is_handed_over = ahead.map_or(Ok(false), |ahead| ahead.hand_over(&sharing, is_given_up))?;
    if !is_handed_over {
        let _room = sharing::room(&sharing)?;
        let made = sharing::make_again(&sharing)?;
        tracing::debug!(took = ?began.elapsed(), pieces = made.len(), "mapped GPU memory again");
        if sharing.iter().any(sharing::Sharing::imports_nothing) {
            tracing::warn!(
                "GPU memory of the job cannot stay on the GPU any more (gpu.memory = \"kept\"): the driver copies all of it in \
                 each snapshot, and host memory needs room for it. So it is with jobs that were restored on other GPUs, if \
                 CUDA_VISIBLE_DEVICES names only some of a machine's GPUs"
            );
        }
        kept::fill(copier, dir, manifest.kept.as_ref(), &made, is_given_up)?;
    }
    // Anybody can have sent a SIGCONT meanwhile.
    let check = |(pid, process): &(i32, cuda::Process)| {
        process.check_stopped().map_err(|source| Error::Cuda { pid: *pid, source })
    };
    processes.iter().try_for_each(check)
}
