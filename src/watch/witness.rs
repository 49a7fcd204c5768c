//! Who ended a job, as far as the kernel tells: counters of its control group, and the kernel's log, from the begin of a
//! life to its end.

use std::path::PathBuf;
use std::time::Duration;

use super::kmsg::{KernelLog, Notice};
use rekindle_base::cause::MemoryFacts;
use rekindle_os::{cgroup, process};

/// What is compared at the end of a life with what was at its begin.
#[derive(Debug)]
pub(crate) struct Witness {
    counters: Vec<PathBuf>,
    kills: u64,
    log: Option<KernelLog>,
    /// The job's processes when they were last looked at, as we see them.
    pids: Vec<i32>,
    /// The reaper's pid.
    root: i32,
}

/// What was longer ago did not end the job.
const RECENT: Duration = Duration::from_secs(120);

fn uptime() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/uptime").ok()?;
    Duration::try_from_secs_f64(text.split(' ').next()?.parse().ok()?).ok()
}

/// What was seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DeathEvidence {
    /// Of want of memory.
    pub memory: MemoryFacts,
    /// Faults of GPUs that the log tells, with the GPU's PCI address; not those of processes that are known as others.
    pub faults: Vec<(String, u32)>,
}

impl Witness {
    /// From now on, for the job with this root.
    #[must_use]
    pub(crate) fn begin(root: i32) -> Witness {
        let counters = cgroup::kill_counters(root);
        let kills = cgroup::kills(&counters);
        Witness { counters, kills, log: KernelLog::from_now().ok(), pids: process::tree(root), root }
    }

    /// Remembers what processes the job has now. Cheap enough for each snapshot, too dear for each second.
    pub(crate) fn look(&mut self) {
        let now = process::tree(self.root);
        if now.len() > 1 {
            self.pids = now;
        }
    }

    /// What happened until now. Reads the kernel's log, which takes some milliseconds if it is full.
    #[must_use]
    pub(crate) fn testify(&mut self) -> DeathEvidence {
        let counted = cgroup::kills(&self.counters) > self.kills;
        let now = uptime().unwrap_or_default();
        let fresh = |(at, notice): (Duration, Notice)| (at + RECENT >= now).then_some(notice);
        let notices: Option<Vec<Notice>> =
            self.log.as_mut().map(|log| log.read().into_iter().filter_map(fresh).collect());
        evidence(counted, notices.as_deref(), &self.pids)
    }
}

fn evidence(counted: bool, notices: Option<&[Notice]>, pids: &[i32]) -> DeathEvidence {
    let mut logged = notices.map(|_| false);
    let mut faults = Vec::new();
    for notice in notices.unwrap_or_default() {
        match notice {
            // One of the job that was started since it was looked at last counts where the group counts it too.
            Notice::OutOfMemory { pid, .. } => {
                logged = Some(logged == Some(true) || counted || pids.contains(pid));
            }
            Notice::Xid { gpu, xid, pid } => {
                if pid.is_none_or(|pid| pids.contains(&pid) || !process_exists(pid)) {
                    faults.push((gpu.clone(), *xid));
                }
            }
        }
    }
    DeathEvidence { memory: MemoryFacts { counted, logged }, faults }
}

/// One that has ended may have been the job's.
fn process_exists(pid: i32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_concerns_the_job_is_told() {
        let killed = |pid| Notice::OutOfMemory { pid, name: "x".into() };
        let logged = |counted, notices: &[Notice]| evidence(counted, Some(notices), &[7]).memory.logged;
        assert_eq!(logged(false, &[killed(7)]), Some(true));
        assert_eq!(logged(false, &[killed(8)]), Some(false), "another's");
        assert_eq!(logged(true, &[killed(8)]), Some(true), "counted in its group");
        assert_eq!(logged(true, &[]), Some(false));
        assert_eq!(evidence(true, None, &[]).memory, MemoryFacts { counted: true, logged: None });

        let fault = |xid, pid| Notice::Xid { gpu: "0000:3b:00".into(), xid, pid };
        let alive = i32::try_from(std::process::id()).unwrap();
        let notices = [fault(31, Some(7)), fault(13, Some(alive)), fault(79, None)];
        let told = evidence(false, Some(&notices), &[7]).faults;
        assert_eq!(
            told,
            [("0000:3b:00".into(), 31), ("0000:3b:00".into(), 79)],
            "13 is of a process that is another's"
        );
    }
}
