//! Prepares processes that use GPUs for a kill.
//!
//! A rank whose NCCL kernel waits on the GPU for another rank needs 4.2 s to end, if the driver has checkpointed and
//! restored it before (580.159.04, H100; 0.15 s otherwise). A restore cannot begin until then. So the operations of its
//! communicators are called off first, with all its threads stopped: [`call_off`].
//!
//! Driver 595 (595.71.05, open kernel modules) hangs the whole machine, with nothing in any log, if a process is killed
//! that uses a GPU and was restored by the driver before: NVIDIA/cuda-checkpoint#53. A checkpointed process uses no GPU
//! and can be killed. So with such a driver rekindle locks and checkpoints each CUDA process before it kills the
//! process. This is best effort: a process that refuses or takes too long is killed all the same, and nothing can be
//! done for a process that dies by itself.

use std::ops::RangeInclusive;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rekindle_base::chain;
use rekindle_cuda::nccl::Ranks;
use rekindle_cuda::{self as cuda, DriverVersion, Process, State};
use rekindle_os::parallel;

/// The affected drivers, by major version. No such report is known for 580, with which most was measured, or for 610.
const HANG_THE_HOST: RangeInclusive<u32> = 595..=595;

/// How long a running kernel may delay the lock of a process.
const LOCK: Duration = Duration::from_secs(5);

/// Time limit for all processes together: 80 GiB of device memory are copied to host memory in less, at 5 GB/s.
const LIMIT: Duration = Duration::from_secs(30);

/// Time limit for the calls that end NCCL's kernels, of all processes together. They take 1 to 20 ms.
const CALL_OFF: Duration = Duration::from_millis(200);

/// [`CALL_OFF`], or the seconds that a test of a debug build sets.
fn time_to_call_off() -> Duration {
    let named = cfg!(debug_assertions).then(|| std::env::var("REKINDLE_TEST_CALL_OFF").ok()).flatten();
    named.and_then(|seconds| seconds.parse().ok()).map_or(CALL_OFF, Duration::from_secs)
}

/// How long NCCL's kernels take to notice: they look at the abort flag every 10,000 turns of their loop, so within 10 ms.
const KERNELS_END: Duration = Duration::from_millis(40);

/// The processes that have NCCL communicators with others.
pub(super) fn with_peers(pids: impl IntoIterator<Item = i32>) -> Vec<Ranks> {
    if cuda::installed().is_none() {
        return Vec::new();
    }
    // A table that cannot be read is of another version: such a process ends more slowly.
    let ranks = pids.into_iter().filter_map(|pid| Ranks::of(pid).ok().flatten());
    ranks.filter(Ranks::has_peers).collect()
}

/// Stops these processes, and ends the NCCL kernels that wait for other ranks. They can only be killed then.
pub(super) fn call_off(ranks: &[Ranks]) {
    let (began, limit) = (Instant::now(), time_to_call_off());
    let mut done = 0;
    for (pid, outcome) in parallel::at_once(ranks, |rank| (rank.pid(), rank.abort(limit))) {
        match outcome {
            Ok(()) => done += 1,
            Err(error) => tracing::debug!(pid, "cannot abort the NCCL operations: {}", chain(&error)),
        }
    }
    if done > 0 {
        thread::sleep(KERNELS_END);
        tracing::debug!(processes = done, took = ?began.elapsed(), "aborted the NCCL operations");
    }
}

/// Whether killing a restored process that uses a GPU may hang the machine.
#[must_use]
pub fn hangs_the_host(driver: &DriverVersion) -> bool {
    HANG_THE_HOST.contains(&driver.major())
}

/// Makes processes that use CUDA release their GPUs, if the driver needs that; answers whether it does. Waits at most
/// [`LIMIT`].
pub(super) fn let_go(pids: impl IntoIterator<Item = i32>) -> bool {
    if !cuda::installed().is_some_and(|driver| hangs_the_host(&driver)) {
        return false;
    }
    let deadline = Instant::now() + LIMIT;
    let (done, results) = mpsc::channel();
    for pid in pids.into_iter().filter(|pid| cuda::is_candidate(*pid).unwrap_or(false)) {
        // The reaper stops all processes when the job has ended, but the driver needs a running thread of the process.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGCONT);
        let done = done.clone();
        // A driver call cannot be cancelled: a thread that waits in one for ever ends when its process is killed.
        let work = move || drop(done.send((pid, checkpoint(pid))));
        if let Err(error) = thread::Builder::new().name("let-go".into()).spawn(work) {
            tracing::warn!("killing process {pid} while it may be using a GPU: {error}");
        }
    }
    drop(done);
    loop {
        match results.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((_, Ok(()))) => {}
            Ok((pid, Err(error))) => {
                tracing::warn!("killing process {pid} while it may be using a GPU: {}", chain(&error))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return true,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let limit = humantime::format_duration(LIMIT);
                tracing::warn!("killing the job while it may be using a GPU: the driver took longer than {limit}");
                return true;
            }
        }
    }
}

fn checkpoint(pid: i32) -> cuda::Result<()> {
    let process = Process::new(pid)?;
    let state = match process.state() {
        Err(error) if error.is_not_cuda() => return Ok(()),
        state => state?,
    };
    if state == State::Running {
        process.lock(LOCK)?;
    }
    match state {
        State::Running | State::Locked => process.checkpoint(),
        // It uses no GPU, or somebody else is checkpointing or restoring it.
        State::Checkpointed | State::Failed | State::Checkpointing | State::Restoring => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_that_hang_the_host() {
        let hangs = |text: &str| hangs_the_host(&DriverVersion::parse(text).unwrap());
        assert!(hangs("595.71.05") && hangs("595.1"));
        assert!(!hangs("580.159.04") && !hangs("590.48.01") && !hangs("610.57.04"));
    }
}
