//! Finds out what ended a job, as far as the kernel reports it: counters of its control group, and the kernel's log,
//! from the start of a life to its end.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::gpu::Fault;
use super::kin::{Kin, Named, Whose};
use super::kmsg::{Listener, Notice, RECENT};
use rekindle_base::cause::MemoryFacts;
use rekindle_os::{cgroup, process};

/// The state at the start of a life and at each of its images, which is compared with that at its end.
#[derive(Debug)]
pub(crate) struct Witness {
    counters: Vec<PathBuf>,
    looks: Looks,
    log: Option<Listener>,
    /// The reaper's pid.
    root: i32,
}

/// What was seen at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Look {
    at: Instant,
    /// Kills that the control group had counted.
    kills: u64,
    /// The job's processes, as we see them.
    pids: Vec<i32>,
}

/// All since [`RECENT`], and the last one before: what was seen earlier did not end the job, but what was seen shortly
/// before an image may have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Looks(Vec<Look>);

impl Looks {
    fn add(&mut self, look: Look) {
        self.0.push(look);
    }

    /// Those that count now.
    fn until(&mut self, now: Instant) -> &[Look] {
        let is_old = |look: &Look| now.saturating_duration_since(look.at) > RECENT;
        let old = self.0.iter().take_while(|look| is_old(look)).count();
        self.0.drain(..old.saturating_sub(1));
        &self.0
    }
}

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
    pub(crate) fn begin(root: i32, log: Option<Listener>) -> Witness {
        log.iter().for_each(Listener::forget);
        let mut witness = Witness { counters: cgroup::kill_counters(root), looks: Looks::default(), log, root };
        witness.note(process::tree(root));
        witness
    }

    /// Records the present state of the job. Cheap enough for each snapshot, but not for each second.
    pub(crate) fn look(&mut self) {
        let pids = process::tree(self.root);
        if pids.len() > 1 {
            self.note(pids);
        }
    }

    fn note(&mut self, pids: Vec<i32>) {
        let now = Instant::now();
        self.looks.add(Look { at: now, kills: cgroup::kills(&self.counters), pids });
        self.looks.until(now);
    }

    /// The findings until now.
    #[must_use]
    pub(crate) fn testify(&mut self, kin: &Kin) -> DeathEvidence {
        let looks = self.looks.until(Instant::now());
        let counted = looks.first().is_some_and(|look| cgroup::kills(&self.counters) > look.kills);
        let pids: Vec<i32> = looks.iter().flat_map(|look| &look.pids).copied().collect();
        let notices = self.log.as_ref().map(Listener::notices);
        evidence(counted, notices.as_deref(), &pids, |gpu, process| kin.struck(gpu, process))
    }
}

fn evidence(
    counted: bool,
    notices: Option<&[(Duration, Notice)]>,
    pids: &[i32],
    whose: impl Fn(&str, Option<Named>) -> Option<Whose>,
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
                let whose = whose(gpu, process.clone());
                let (gpu, place) = (gpu.clone(), Some(gpu.clone()));
                faults.extend(whose.map(|whose| Fault { gpu, place, xid: *xid, whose, beside: None, at: *at }));
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
        let nobody = |_: &str, _: Option<Named>| Some(Whose::Unknown);
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
        let notices = [(at, notice)];
        let whose = |_: &str, named: Option<Named>| named.map(Whose::Other);
        let told = evidence(false, Some(&notices), &[7], whose).faults;
        let gpu = "0000:3b:00".to_owned();
        let place = Some(gpu.clone());
        assert_eq!(told, [Fault { gpu, place, xid: 31, whose: Whose::Other(process), beside: None, at }]);
        assert_eq!(evidence(false, Some(&notices), &[7], |_, _| None).faults, [], "of another job's GPU");
    }

    #[test]
    fn a_kill_long_before_the_end_did_not_cause_it() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let look = |seconds, kills, pid| Look { at: at(seconds), kills, pids: vec![1, pid] };
        let mut looks = Looks::default();
        looks.add(look(0, 0, 7));
        assert_eq!(looks.until(at(36_000)), [look(0, 0, 7)], "there is no image");
        // A worker was killed meanwhile.
        looks.add(look(36_000, 1, 8));
        assert_eq!(looks.until(at(36_005)).len(), 2, "it may have been shortly before the image");
        looks.add(look(36_060, 1, 9));
        assert_eq!(looks.until(at(36_100)).first(), Some(&look(0, 0, 7)));
        assert_eq!(looks.until(at(36_125)).first(), Some(&look(36_000, 1, 8)));
        assert_eq!(looks.until(at(40_000)), [look(36_060, 1, 9)]);
    }
}
