//! Finds out what ended a job, as far as the kernel reports it: counters of its control group, and the kernel's log,
//! from the start of a life to its end.

use std::path::PathBuf;
use std::time::Duration;

use super::gpu::Fault;
use super::kin::{Kin, Named, Whose};
use super::kmsg::{KernelLog, Notice};
use rekindle_base::cause::MemoryFacts;
use rekindle_os::{cgroup, clock, process};

/// State at the start of a life, which is compared with that at its end.
#[derive(Debug)]
pub(crate) struct Witness {
    counters: Vec<PathBuf>,
    kills: u64,
    log: Option<KernelLog>,
    /// The job's processes at the last check, as we see them.
    pids: Vec<i32>,
    /// The reaper's pid.
    root: i32,
}

/// Events longer ago did not end the job.
const RECENT: Duration = Duration::from_secs(120);

/// What was seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DeathEvidence {
    /// Evidence for lack of memory.
    pub(crate) memory: MemoryFacts,
    /// Faults of GPUs that the log tells, with the GPU's PCI address.
    pub(crate) faults: Vec<Fault>,
}

impl Witness {
    /// Starts to observe the job with this root.
    #[must_use]
    pub(crate) fn begin(root: i32) -> Witness {
        let counters = cgroup::kill_counters(root);
        let kills = cgroup::kills(&counters);
        Witness { counters, kills, log: KernelLog::from_now().ok(), pids: process::tree(root), root }
    }

    /// Records the present processes of the job. Cheap enough for each snapshot, but not for each second.
    pub(crate) fn look(&mut self) {
        let now = process::tree(self.root);
        if now.len() > 1 {
            self.pids = now;
        }
    }

    /// The findings until now. Reads the kernel's log, which takes some milliseconds if it is full.
    #[must_use]
    pub(crate) fn testify(&mut self, kin: &Kin) -> DeathEvidence {
        let counted = cgroup::kills(&self.counters) > self.kills;
        let now = clock::uptime().unwrap_or_default();
        let fresh = |(at, notice): (Duration, Notice)| (at + RECENT >= now).then_some((at, notice));
        let notices: Option<Vec<(Duration, Notice)>> =
            self.log.as_mut().map(|log| log.read().into_iter().filter_map(fresh).collect());
        evidence(counted, notices.as_deref(), &self.pids, |process| kin.whose(process))
    }
}

fn evidence(
    counted: bool,
    notices: Option<&[(Duration, Notice)]>,
    pids: &[i32],
    whose: impl Fn(Option<Named>) -> Whose,
) -> DeathEvidence {
    let mut logged = notices.map(|_| false);
    let mut faults = Vec::new();
    for (at, notice) in notices.unwrap_or_default() {
        match notice {
            // A process of the job that was started since the last check counts if the group counts it too.
            Notice::OutOfMemory { pid, .. } => {
                logged = Some(logged == Some(true) || counted || pids.contains(pid));
            }
            Notice::Xid { gpu, xid, process } => {
                faults.push(Fault { gpu: gpu.clone(), xid: *xid, whose: whose(process.clone()), at: *at });
            }
        }
    }
    DeathEvidence { memory: MemoryFacts { counted, logged }, faults }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_concerns_the_job_is_told() {
        let killed = |pid| Notice::OutOfMemory { pid, name: "x".into() };
        let at = Duration::from_secs(1);
        let nobody = |_: Option<Named>| Whose::Unknown;
        let logged = |counted, notices: &[Notice]| {
            let notices: Vec<_> = notices.iter().map(|notice| (at, notice.clone())).collect();
            evidence(counted, Some(&notices), &[7], nobody).memory.logged
        };
        assert_eq!(logged(false, &[killed(7)]), Some(true));
        assert_eq!(logged(false, &[killed(8)]), Some(false), "another's");
        assert_eq!(logged(true, &[killed(8)]), Some(true), "counted in its group");
        assert_eq!(logged(true, &[]), Some(false));
        assert_eq!(evidence(true, None, &[], nobody).memory, MemoryFacts { counted: true, logged: None });

        let process = Named { pid: 8, name: None };
        let notice = Notice::Xid { gpu: "0000:3b:00".into(), xid: 31, process: Some(process.clone()) };
        let told =
            evidence(false, Some(&[(at, notice)]), &[7], |named| named.map_or(Whose::Unknown, Whose::Other)).faults;
        assert_eq!(told, [Fault { gpu: "0000:3b:00".into(), xid: 31, whose: Whose::Other(process), at }]);
    }
}
