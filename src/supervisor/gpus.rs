//! Faults of GPUs: whether one struck the job, followed from the death of a process, or is another program's; and the
//! GPUs to avoid.
//!
//! A context switch that timed out (Xid 109) may come from outside a life: a kernel of a process that died before, or of
//! another program on the same GPU, did not let go of the GPU. Then neither the GPU nor the image is to blame.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use super::finding::Finding;
use super::{Message, Owner};
use crate::policy::{Occupied, QUIET};
use crate::watch::gpu::{Fault, OnGpus};
use crate::watch::kin::{Kin, Named, Whose};
use crate::watch::kmsg::{Listener, Notice};
use crate::watch::quiet::{self, Look};
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
    /// Faults of other programs that ended them: when, on which GPU, and whose.
    others: Vec<(Duration, String, Named)>,
    /// The last fault of this life that came from outside it, in words.
    outside: Option<(Instant, Occupied, String)>,
}

/// What a fault of a GPU says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Said {
    /// The GPU failed the job.
    Fault,
    /// It follows from this.
    Follows(String),
    /// It struck this life from outside, because of this.
    Outside(Occupied, String),
    /// It is another program's.
    Others(Named),
}

/// A fault's number and name.
pub(super) fn named(number: u32) -> String {
    format!("Xid {number} ({})", xid::meaning(number).0)
}

/// Another program goes on that uses the GPU.
fn beside(fault: &Fault) -> Option<(Occupied, String)> {
    let words = |named: &Named| {
        format!(
            "{named} of another program uses this GPU, and after a snapshot kernels of a job are not interrupted for others \
            (docs/gpus.md, \"A GPU that other programs use too\")"
        )
    };
    fault.beside.as_ref().map(|named| (Occupied::ByOthers, words(named)))
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
        if !xid::may_follow_a_death(fault.xid) {
            return Said::Fault;
        }
        let (is_ours, is_switch) = (fault.whose == Whose::Job, fault.xid == xid::SWITCH_TIMEOUT);
        let noticed = if is_switch { NOTICED_LATE } else { Duration::ZERO };
        let before = |noticed: Duration| {
            let is_before = move |at: Duration| at <= fault.at + noticed && fault.at <= at + AFTERMATH;
            self.deaths.iter().enumerate().filter(move |(_, (at, _))| is_before(*at))
        };
        let in_this_life = |noticed| before(noticed).find(|(n, _)| !is_ours || *n >= self.earlier);
        // Of what was before it, a process of this life suffers only by kernels that do not let go of the GPU. Those end
        // the process, too, so its own death may be noticed at the same time.
        let from_outside = || {
            let dead = || before(Duration::ZERO).next().map(|(_, (_, words))| (Occupied::ByTheDead, words.clone()));
            is_switch.then(|| beside(fault).or_else(dead).or_else(|| self.after_others(fault))).flatten()
        };
        if let Some((_, (_, words))) = in_this_life(Duration::ZERO) {
            return Said::Follows(words.clone());
        }
        if let Some((by, words)) = from_outside() {
            return Said::Outside(by, words);
        }
        in_this_life(noticed).map_or(Said::Fault, |(_, (_, words))| Said::Follows(words.clone()))
    }

    /// Whether the driver has just ended another program on this GPU.
    fn after_others(&self, fault: &Fault) -> Option<(Occupied, String)> {
        let is_it = |at: Duration, gpu: &str| {
            at <= fault.at + NOTICED_LATE && fault.at <= at + AFTERMATH && fault.place.as_deref() == Some(gpu)
        };
        let (_, _, named) = self.others.iter().find(|(at, gpu, _)| is_it(*at, gpu))?;
        let words = format!("the driver ended {named} on this GPU, which does not belong to this run");
        Some((Occupied::ByTheDead, words))
    }

    /// Why this life ended, if faults from outside it explain that.
    pub(super) fn ended_from_outside(&self, now: Instant) -> Option<(Occupied, &str)> {
        let recent = self.outside.as_ref().filter(|(at, ..)| now.saturating_duration_since(*at) < RECENT);
        recent.map(|(_, by, words)| (*by, words.as_str()))
    }

    /// The log has told this while no life of the job was there. It may be of an earlier run, whose supervisor was killed.
    pub(super) fn hears_notices(&mut self, notices: &[(Duration, Notice)]) {
        for (at, notice) in notices {
            let Notice::Xid { gpu, xid, process: Some(named) } = notice else { continue };
            if let whose @ Whose::Other(_) = self.kin.whose(Some(named.clone()))
                && xid::may_follow_a_death(*xid)
            {
                let (gpu, place) = (gpu.clone(), Some(gpu.clone()));
                self.hears(&Fault { gpu, place, xid: *xid, whose, beside: None, at: *at });
            }
        }
    }

    /// A life begins.
    pub(super) fn life_begins(&mut self, root: i32) {
        self.faults.clear();
        self.outside = None;
        self.kin.life_begins(root);
        self.earlier = self.deaths.len();
        self.root.store(root, Ordering::Relaxed);
    }

    /// Learns from a fault. Answers what it says.
    pub(super) fn hears(&mut self, fault: &Fault) -> Said {
        let said = self.says(fault);
        match &said {
            Said::Follows(_) => {}
            Said::Outside(by, words) => {
                self.outside = Some((Instant::now(), *by, format!("{}, because {words}", named(fault.xid))));
            }
            // Of what its program did the GPU is not to blame.
            Said::Others(named) if xid::may_follow_a_death(fault.xid) => {
                if self.others.len() >= DEATHS {
                    self.others.remove(0);
                }
                self.others.extend(fault.place.clone().map(|gpu| (fault.at, gpu, named.clone())));
            }
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

impl Owner<'_> {
    /// Finds out when the GPUs are quiet.
    pub(super) fn await_quiet(&mut self) {
        tracing::warn!(
            "the job ended twice for that: it is started when the processes that died are off the GPUs and the driver tells no \
            new faults, or after the pause"
        );
        let (kin, log) = (self.watch.gpus.kin.clone(), self.watch.log.clone());
        let sender = self.threads.sender.clone();
        self.spawn("gpus-quiet", move || {
            let (on_gpus, dead) = (OnGpus::look(), kin.dead());
            let is_ours = |notice: &Notice| matches!(notice, Notice::Xid { gpu, .. } if kin.may_use(gpu));
            let look = || Look {
                dead: on_gpus.have_any(&dead),
                faults: log.iter().flat_map(Listener::notices).filter(|(_, notice)| is_ours(notice)).count(),
            };
            // Where they are not quiet, the pause ends by itself.
            if quiet::wait(QUIET, look) {
                let _ = sender.send(Message::Watched(Finding::Quiet));
            }
        });
    }
}

/// Faults longer ago did not end the job.
const RECENT: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at: Duration) -> Fault {
        Fault { gpu: "GPU-1".into(), place: Some("0000:3b:00".into()), xid: 109, whose: Whose::Job, beside: None, at }
    }

    #[test]
    fn what_follows_a_death_is_no_fault_of_a_gpu() {
        let mut gpus = Gpus::default();
        let now = clock::since_boot();
        let fault = |xid, after: u64| Fault { gpu: format!("GPU-{xid}"), xid, ..at(now + Duration::from_secs(after)) };
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
    fn a_switch_that_times_out_may_come_from_outside_the_life() {
        let (mut gpus, now) = (Gpus::default(), clock::since_boot());
        let fault = |after| at(now + Duration::from_secs(after));
        let is_outside = |gpus: &Gpus, after| matches!(gpus.says(&fault(after)), Said::Outside(..));
        gpus.deaths.push((now, "process 1003 (python3) was killed by signal SIGKILL".into()));
        assert!(matches!(gpus.says(&fault(3)), Said::Follows(_)), "a rank waits for a dead one");
        // The next life: kernels of the dead are still there.
        gpus.life_begins(0);
        let Said::Outside(Occupied::ByTheDead, words) = gpus.hears(&fault(5)) else {
            panic!("it is from the life before")
        };
        assert!(words.contains("1003"), "{words}");
        let (by, why) = gpus.ended_from_outside(Instant::now()).unwrap();
        assert_eq!(by, Occupied::ByTheDead);
        assert!(why.starts_with("Xid 109") && why.contains("1003"), "{why}");
        // The driver ends the process for it, which is noticed a little later.
        gpus.deaths.push((now + Duration::from_secs(6), "process 1005 (python3) was killed by signal SIGSEGV".into()));
        assert!(is_outside(&gpus, 5), "its own death is no cause");
        assert!(matches!(gpus.says(&fault(7)), Said::Follows(_)), "a peer of the one that died");
        assert_eq!(gpus.says(&Fault { xid: 13, ..fault(5) }), Said::Fault, "the program's own error");
        assert!(!is_outside(&gpus, 60), "long after");
        assert_eq!(gpus.unfit(), []);
        gpus.life_begins(0);
        assert_eq!(gpus.ended_from_outside(Instant::now()), None, "of the life before");
    }

    #[test]
    fn the_end_of_another_program_on_the_same_gpu_explains_a_switch_that_times_out() {
        let (mut gpus, now) = (Gpus::default(), clock::since_boot());
        let other = Named { pid: 4711, name: Some("python3".into()) };
        let fault = |after| at(now + Duration::from_secs(after));
        assert_eq!(gpus.says(&fault(2)), Said::Fault, "nobody else is there");
        let beside = Fault { beside: Some(other.clone()), ..fault(2) };
        let Said::Outside(Occupied::ByOthers, words) = gpus.says(&beside) else { panic!("another uses the GPU") };
        assert!(words.starts_with("process 4711 (python3) of another program uses"), "{words}");
        let killed = Fault { xid: 45, whose: Whose::Other(other.clone()), ..fault(1) };
        assert_eq!(gpus.hears(&killed), Said::Others(other));
        let Said::Outside(Occupied::ByTheDead, words) = gpus.says(&fault(2)) else { panic!("another one ended there") };
        assert!(words.starts_with("the driver ended process 4711"), "{words}");
        // Told before the life began.
        let (mut late, gpu) = (Gpus::default(), "0000:3b:00".to_owned());
        let process = Some(Named { pid: i32::MAX, name: Some("cuda".into()) });
        late.hears_notices(&[(now, Notice::Xid { gpu, xid: 109, process })]);
        assert!(matches!(late.says(&fault(2)), Said::Outside(..)));
        let elsewhere = Fault { place: Some("0000:3c:00".into()), ..fault(2) };
        assert_eq!(gpus.says(&elsewhere), Said::Fault, "on another GPU");
        assert_eq!(gpus.says(&fault(60)), Said::Fault, "long after");
        // A life before died of it, too.
        gpus.deaths.push((now, "process 1003 (python3) was killed by signal SIGSEGV".into()));
        gpus.life_begins(0);
        assert!(matches!(gpus.says(&beside), Said::Outside(Occupied::ByOthers, _)), "it goes on");
    }

    #[test]
    fn a_fault_of_another_program_is_never_the_jobs() {
        let mut gpus = Gpus::default();
        let other = Named { pid: 4711, name: Some("Xorg".into()) };
        let fault = |xid| Fault {
            gpu: format!("GPU-{xid}"),
            xid,
            whose: Whose::Other(other.clone()),
            ..at(clock::since_boot())
        };
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
