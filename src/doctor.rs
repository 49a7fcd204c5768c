//! Checks what `run` needs on this machine, and suggests fixes.
//!
//! ```text
//!   gather (I/O, a few tries with the kernel, CRIU, NVML) ---> facts ---> judge (pure) ---> checks, each with a fix
//! ```
//!
//! One file for each group of checks, with two halves: `gather` only reads and never fails, because "unknown" is a
//! fact, too; `judge` only decides. The most important check dumps and restores a real job (`trial.rs`): if that works,
//! rights, filters and kernel options that look wrong are accepted.
//!
//! Nothing is changed: the store is not created, files of the trial are in a temporary folder that it removes, and a
//! tmpfs is only mounted for a moment. For a job over several machines, etcd has a key for a moment, which those who
//! follow the group never see.

mod boundaries;
mod cgroup;
mod criu;
mod group;
mod kernel;
mod memory;
mod network;
mod nvidia;
mod rights;
mod scheduler;
mod staging;
mod store;
mod trial;
mod tried;
mod workloads;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::config::Config;
use crate::scheduler::Scheduler;
use rekindle_criu::Criu;
pub(crate) use tried::{Untried, untried};
pub(crate) use workloads::Workload;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// No problem.
    Ok,
    /// It does not apply to this machine, or is not needed.
    NotHere,
    /// Some jobs will not work, or something will be slow or scarce.
    Warn,
    /// `run` cannot work.
    Missing,
}

impl State {
    /// Its name in the output.
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::NotHere => "not-here",
            State::Warn => "warn",
            State::Missing => "missing",
        }
    }
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// Group and name, for example `criu.version`; stable, for scripts.
    pub(crate) check: &'static str,
    pub(crate) state: State,
    pub(crate) found: String,
    /// What to type or to ask an administrator for; always set if the state is warn or missing.
    pub(crate) fix: Option<String>,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>) -> Check {
        Check { check, state: State::Ok, found: found.into(), fix: None }
    }

    fn not_here(check: &'static str, found: impl Into<String>) -> Check {
        Check { check, state: State::NotHere, found: found.into(), fix: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { check, state: State::Warn, found: found.into(), fix: Some(fix.into()) }
    }

    fn missing(check: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { check, state: State::Missing, found: found.into(), fix: Some(fix.into()) }
    }

    /// A check for something that a dump and a restore need; accepted if the trial has worked.
    fn needed(check: &'static str, trial: &trial::Outcome, found: impl Into<String>, fix: impl Into<String>) -> Check {
        match trial {
            trial::Outcome::Worked { .. } => Check::warn(check, found, fix),
            _ => Check::missing(check, found, fix),
        }
    }
}

/// The results of all checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    /// Whether `run` can work here.
    pub(crate) run_works: bool,
    /// The number of checks with each result.
    pub(crate) counts: Counts,
    /// The checks, group by group.
    pub(crate) checks: Vec<Check>,
    /// What can run here.
    pub(crate) workloads: Vec<Workload>,
}

/// How many checks have each result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    pub(crate) ok: usize,
    pub(crate) not_here: usize,
    pub(crate) warn: usize,
    pub(crate) missing: usize,
}

impl Counts {
    pub(crate) fn of(checks: &[Check]) -> Counts {
        let count = |state| checks.iter().filter(|check| check.state == state).count();
        Counts {
            ok: count(State::Ok),
            not_here: count(State::NotHere),
            warn: count(State::Warn),
            missing: count(State::Missing),
        }
    }
}

/// All facts.
#[derive(Debug)]
struct Facts {
    boundaries: boundaries::Facts,
    kernel: kernel::Facts,
    criu: criu::Facts,
    trial: trial::Outcome,
    rights: rights::Facts,
    cgroup: cgroup::Facts,
    network: network::Facts,
    group: group::Facts,
    nvidia: nvidia::Facts,
    memory: memory::Facts,
    staging: staging::Facts,
    store: store::Facts,
    scheduler: Scheduler,
}

/// Looks at everything and judges it. `criu` is the CRIU that the user named, if any. Takes about a second: most of it
/// is the dump and restore of a small job, and NVML.
#[must_use]
pub(crate) fn examine(config: &Config, criu: Option<PathBuf>) -> Report {
    judge(&gather(config, criu), config)
}

/// Makes the trial alone, in this folder, which it leaves empty: whether CRIU dumps and restores a job here. One failure can
/// be chance, so it is tried twice. Takes a fifth of a second.
pub(crate) fn try_criu(criu: &Criu, folder: &Path) -> Check {
    let once = || trial::run_in(Some(criu), || tempfile::tempdir_in(folder).ok());
    match once() {
        trial::Outcome::Failed { .. } => trial::judge(&once()),
        outcome => trial::judge(&outcome),
    }
}

fn gather(config: &Config, named: Option<PathBuf>) -> Facts {
    let kernel = kernel::gather();
    let criu = criu::gather(named.as_deref());
    // NVML takes a second if no persistence daemon keeps the GPUs awake.
    std::thread::scope(|scope| {
        let nvidia = scope.spawn(nvidia::gather);
        let trial = trial::run(criu.found.as_ref().ok(), &config.store.directory);
        Facts {
            boundaries: boundaries::gather(),
            kernel,
            criu,
            trial,
            rights: rights::gather(),
            cgroup: cgroup::gather(),
            network: network::gather(config),
            group: group::gather(config),
            nvidia: nvidia.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            memory: memory::gather(),
            staging: staging::gather(config),
            store: store::gather(&config.store.directory),
            scheduler: scheduler::gather(config),
        }
    })
}

fn judge(facts: &Facts, config: &Config) -> Report {
    let mut checks = Vec::new();
    checks.extend(kernel::judge(&facts.kernel, &facts.trial));
    checks.push(criu::judge(&facts.criu));
    checks.push(trial::judge(&facts.trial));
    checks.extend(rights::judge(&facts.rights, &facts.trial));
    let reserve = config.snapshot.memory_reserve.bytes();
    checks.push(cgroup::judge(&facts.cgroup, reserve));
    checks.push(cgroup::judge_oom(&facts.cgroup));
    checks.extend(network::judge(&facts.network));
    checks.extend(group::judge(&facts.group, &config.group));
    checks.extend(nvidia::judge(&facts.nvidia));
    checks.push(memory::judge_huge_pages(&facts.memory, &facts.nvidia.gpus.gpus));
    checks.push(memory::judge_room(&facts.memory, &facts.nvidia.gpus.gpus, facts.cgroup.headroom, reserve));
    checks.extend(staging::judge(&facts.staging, config, &facts.memory, &facts.nvidia, facts.cgroup.headroom));
    checks.extend(store::judge(&facts.store, config.store.min_free.bytes()));
    checks.extend(scheduler::judge(&facts.scheduler, config.scheduler.requeue));
    checks.extend(boundaries::judge(&facts.boundaries, config));
    checks.extend(criu::judge_boundary(&facts.criu));
    let (counts, workloads) = (Counts::of(&checks), workloads::judge(&checks, &facts.nvidia));
    Report { run_works: counts.missing == 0, counts, checks, workloads }
}

#[cfg(test)]
mod tests;
