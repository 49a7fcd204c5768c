//! Faults of GPUs: whether one struck the job, followed from the death of a process, or is another program's; and the
//! GPUs to avoid.

use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::time::{Duration, Instant};

use crate::watch::gpu::Fault;
use crate::watch::kin::{Kin, Named, Whose};
use rekindle_base::xid;
use rekindle_os::clock;

/// Faults of GPUs.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    /// The pid of the job's root, for the thread that asks for faults.
    pub(super) root: Arc<AtomicI32>,
    /// The faults in this life.
    pub(super) faults: Vec<(Instant, u32)>,
    /// Violent ends of processes of the job, and of lives, since the boot; the oldest first.
    pub(super) deaths: Vec<(Duration, String)>,
    /// Number of `deaths` in earlier lives.
    pub(super) earlier: usize,
    /// Whose processes the kernel's log names.
    pub(super) kin: Kin,
    /// GPUs to avoid until somebody has checked them, by UUID or PCI address, with the fault.
    unfit: Vec<(String, u32)>,
}

/// What a fault of a GPU says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Said {
    /// The GPU failed the job.
    Fault,
    /// It follows from this.
    Follows(String),
    /// It is another program's.
    Others(Named),
}

/// How long after a death its peers may have faults of it: a context switch that never ends takes seconds to be
/// noticed.
const AFTERMATH: Duration = Duration::from_secs(30);
/// A kernel waits for memory of a rank that is dead (Xid 109). Then the death was first, even if this was told earlier: a
/// death is known once all threads of the process have ended and we have read of it.
const NOTICED_LATE: Duration = Duration::from_secs(2);
/// So many deaths are remembered.
const DEATHS: usize = 8;

impl Gpus {
    /// A process of the job, or the whole job, came to a violent end just now.
    pub(super) fn died(&mut self, words: String) {
        if self.deaths.len() >= DEATHS {
            self.deaths.remove(0);
            self.earlier = self.earlier.saturating_sub(1);
        }
        self.deaths.push((clock::since_boot(), words));
    }

    /// The first of the processes that died shortly before now, in this life.
    pub(super) fn first_death(&self) -> Option<&str> {
        let now = clock::since_boot();
        let mut recent = self.deaths.iter().skip(self.earlier).filter(|(at, _)| now <= *at + AFTERMATH);
        recent.next().map(|(_, words)| words.as_str())
    }

    /// One that is dead has this pid, as we see it, and this name.
    pub(super) fn had(&self, pid: i32, name: &str) {
        self.kin.add(pid, name);
    }

    /// What a fault says. Who died first is the cause; what follows within seconds is a consequence.
    pub(super) fn says(&self, fault: &Fault) -> Said {
        if let Whose::Other(named) = &fault.whose {
            return Said::Others(named.clone());
        }
        // A process of this life does not suffer from what was before it.
        let skipped = if fault.whose == Whose::Job { self.earlier } else { 0 };
        let noticed = if fault.xid == xid::SWITCH_TIMEOUT { NOTICED_LATE } else { Duration::ZERO };
        let mut before =
            self.deaths.iter().skip(skipped).filter(|(at, _)| *at <= fault.at + noticed && fault.at <= *at + AFTERMATH);
        match before.next() {
            Some((_, words)) if xid::may_follow_a_death(fault.xid) => Said::Follows(words.clone()),
            _ => Said::Fault,
        }
    }

    /// Learns from a fault. Answers what it says.
    pub(super) fn hears(&mut self, fault: &Fault) -> Said {
        let said = self.says(fault);
        match said {
            Said::Follows(_) => {}
            // Of what its program did the GPU is not to blame.
            Said::Others(_) if xid::may_follow_a_death(fault.xid) => {}
            Said::Fault | Said::Others(_) => self.mark_unfit(&fault.gpu, fault.xid),
        }
        said
    }

    /// Records a GPU that should be avoided after this fault.
    pub(super) fn mark_unfit(&mut self, gpu: &str, xid: u32) {
        if xid::meaning(xid).1.needs_drain() && !self.unfit.iter().any(|(known, _)| known == gpu) {
            self.unfit.push((gpu.to_owned(), xid));
        }
    }

    /// The GPUs that should be avoided, with the fault of each.
    pub(super) fn unfit(&self) -> Vec<(String, u32)> {
        self.unfit.clone()
    }

    /// The faults that may have ended the job.
    pub(super) fn recent(&self, now: Instant) -> impl Iterator<Item = u32> {
        let is_recent = move |at: Instant| now.saturating_duration_since(at) < RECENT;
        self.faults.iter().filter(move |(at, _)| is_recent(*at)).map(|(_, xid)| *xid)
    }
}

/// Faults longer ago did not end the job.
const RECENT: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_a_death_is_no_fault_of_a_gpu() {
        let mut gpus = Gpus::default();
        let now = clock::since_boot();
        let fault = |xid, after: u64| Fault {
            gpu: format!("GPU-{xid}"),
            xid,
            whose: Whose::Job,
            at: now + Duration::from_secs(after),
        };
        assert_eq!(gpus.hears(&fault(31, 1)), Said::Fault, "before any death");
        gpus.deaths.push((now + Duration::from_secs(2), "process 1003 (python3) was killed by signal SIGKILL".into()));
        gpus.deaths.push((now + Duration::from_secs(4), "process 1004 (python3) was killed by signal SIGABRT".into()));
        let Said::Follows(words) = gpus.hears(&fault(109, 7)) else { panic!("109 follows a death") };
        assert!(words.contains("1003"), "the first is the cause: {words}");
        assert_eq!(gpus.hears(&fault(31, 1)), Said::Fault, "it came before");
        assert!(matches!(gpus.says(&fault(109, 1)), Said::Follows(_)), "the death was noticed late");
        assert_eq!(gpus.unfit(), [], "nothing is wrong with these");
        gpus.earlier = 2;
        assert_eq!(gpus.says(&fault(31, 7)), Said::Fault, "the next life did that itself");
        let late = Fault { whose: Whose::Before, ..fault(109, 7) };
        assert!(matches!(gpus.says(&late), Said::Follows(_)), "told late");
        gpus.earlier = 0;
        // A fault of the hardware does not follow from a death.
        assert_eq!(gpus.hears(&fault(79, 7)), Said::Fault);
        assert_eq!(gpus.hears(&fault(109, 60)), Said::Fault, "long after");
        assert_eq!(gpus.unfit(), [("GPU-79".to_owned(), 79), ("GPU-109".to_owned(), 109)]);
    }

    #[test]
    fn a_fault_of_another_program_is_never_the_jobs() {
        let mut gpus = Gpus::default();
        let other = Named { pid: 4711, name: Some("Xorg".into()) };
        let fault =
            |xid| Fault { gpu: format!("GPU-{xid}"), xid, whose: Whose::Other(other.clone()), at: clock::since_boot() };
        for xid in [13, 31, 43, 109, 95] {
            assert_eq!(gpus.hears(&fault(xid)), Said::Others(other.clone()));
        }
        assert_eq!(gpus.unfit(), [("GPU-95".to_owned(), 95)], "what is broken is broken for all");
    }

    #[test]
    fn a_fault_counts_for_a_while_and_its_gpu_is_left() {
        let now = Instant::now();
        let mut gpus = Gpus::default();
        gpus.faults.extend([(now, 79), (now + RECENT, 31)]);
        assert_eq!(gpus.recent(now + RECENT).collect::<Vec<_>>(), [31]);
        gpus.mark_unfit("GPU-1", 79);
        gpus.mark_unfit("GPU-1", 79);
        assert_eq!(gpus.unfit(), [("GPU-1".to_owned(), 79)]);
    }
}
