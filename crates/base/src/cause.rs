//! Why a life of the job ended: one value, decided from facts by a pure function.
//!
//! The value is for people, rules (`[[rules]]`), hooks and the result file. The policy of the supervisor and the rules
//! decide what happens next.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Ended;
use super::notice::{Cloud, Kind};
use super::xid::{self, Remedy};

/// Why a life ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Cause {
    /// It exited with 0.
    Completed,
    /// It exited with another code.
    Exit {
        /// The exit code.
        code: i32,
    },
    /// A signal ended it.
    Signal {
        /// The signal number.
        signal: i32,
    },
    /// One of its processes was killed by a signal, and it was ended for that.
    ProcessDied {
        /// The process, as the job sees it.
        pid: i32,
        /// Its name, at most 15 bytes.
        name: String,
        /// The signal number.
        signal: i32,
    },
    /// The kernel killed it, or one of its processes, because memory ran out.
    OutOfMemory,
    /// A GPU that it used failed.
    GpuFault {
        /// The driver's number of the fault (Xid).
        xid: u32,
    },
    /// It made no progress, and was killed for that.
    Hang {
        /// What was missing.
        what: Missing,
    },
    /// It could not be resumed after a snapshot.
    SnapshotLost,
    /// The rest of its memory could not be loaded: only in events of earlier versions, and in rules.
    MemoryLost,
    /// Its output showed that the training went wrong.
    BadTraining {
        /// The matching rule, counted from 1.
        rule: usize,
    },
    /// Its output matched a rule.
    Rule {
        /// The rule, counted from 1.
        rule: usize,
    },
    /// A stop was requested: a signal to the supervisor, or a command.
    Requested,
    /// It was stopped because a cloud announced the end of the machine.
    Interruption {
        /// The cloud.
        cloud: Cloud,
        /// What it announced.
        notice: Kind,
    },
    /// It was suspended, and waits to be resumed.
    Suspended,
    /// A rewind to an older image was requested.
    Rewound,
    /// The supervisor was killed, and the job with it.
    SupervisorKilled,
    /// The machine went down.
    MachineRestart,
    /// A cause of a newer version.
    #[serde(other)]
    Unknown,
}

/// The missing activity of a job that hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Missing {
    /// Output.
    Output,
    /// Work: neither a processor nor a GPU.
    Work,
    /// WATCHDOG=1.
    Notify,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Missing::Output => "it printed nothing",
            Missing::Work => "it used neither a processor nor a GPU",
            Missing::Notify => "it sent no WATCHDOG=1",
        })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Completed => f.write_str("it completed"),
            Cause::Exit { code } => write!(f, "it exited with code {code}"),
            Cause::Signal { signal } => write!(f, "{} ended it", Ended::Signal(*signal)),
            Cause::ProcessDied { pid, name, signal } => {
                write!(f, "its process {pid} ({name}) was killed by {}", Ended::Signal(*signal))
            }
            Cause::OutOfMemory => f.write_str("out of memory: the kernel killed it, or one of its processes"),
            Cause::GpuFault { xid } => write!(f, "a GPU failed: {}", xid::in_words(*xid)),
            Cause::Hang { what } => write!(f, "it hung: {what}"),
            Cause::SnapshotLost => f.write_str("it could not be resumed after a snapshot"),
            Cause::MemoryLost => f.write_str("the rest of its memory could not be loaded"),
            Cause::BadTraining { rule } => write!(f, "its training went wrong, by rule {rule}"),
            Cause::Rule { rule } => write!(f, "its output matched rule {rule}"),
            Cause::Requested => f.write_str("it was asked to stop"),
            Cause::Interruption { cloud, notice } => write!(f, "it was stopped, because {cloud} {notice}"),
            Cause::Suspended => f.write_str("it was suspended"),
            Cause::Rewound => f.write_str("it was rewound to an image"),
            Cause::SupervisorKilled => f.write_str("rekindle was killed"),
            Cause::MachineRestart => f.write_str("the machine went down"),
            Cause::Unknown => f.write_str("a reason unknown to this version of rekindle"),
        }
    }
}

impl Cause {
    /// Whether the job ended as intended: it completed, or rekindle ended it on request or because of a notice.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        matches!(
            self,
            Cause::Completed | Cause::Requested | Cause::Interruption { .. } | Cause::Suspended | Cause::Rewound
        )
    }

    /// Whether it explains an end in such a way that an image is not to blame.
    #[must_use]
    pub fn excuses(&self) -> bool {
        matches!(self, Cause::OutOfMemory | Cause::GpuFault { .. })
    }
}

/// Facts about an end.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// Why rekindle ended it, if it did.
    pub by_us: Option<Cause>,
    /// Evidence for lack of memory.
    pub memory: MemoryFacts,
    /// Faults of the GPUs that it used, shortly before its end; oldest first.
    pub xids: Vec<u32>,
}

/// Evidence for lack of memory in this life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryFacts {
    /// The job's control group counts more kills than at the beginning of the life.
    pub counted: bool,
    /// The kernel's log names a process of the job, or one in its control group. `None` if it cannot be read.
    pub logged: Option<bool>,
}

impl MemoryFacts {
    /// Whether it explains such an end. The counter may include a neighbour in the same control group: if the job
    /// exited by itself, the log must confirm it, if there is one.
    fn explains(self, ended: Ended) -> bool {
        match ended {
            Ended::Signal(libc::SIGKILL) => self.counted || self.logged == Some(true),
            _ => self.logged.unwrap_or(self.counted),
        }
    }
}

/// Determines why it ended.
#[must_use]
pub fn judge(ended: Ended, facts: &Facts) -> Cause {
    // In all cases its work is done.
    if ended == Ended::Exit(0) && facts.by_us.is_none() {
        return Cause::Completed;
    }
    if let Some(cause) = &facts.by_us {
        return cause.clone();
    }
    // A kill causes an Xid 45, which is not the reason; the worst fault counts.
    let worst = facts.xids.iter().copied().max_by_key(|xid| xid::meaning(*xid).1);
    match worst.filter(|xid| xid::meaning(*xid).1 != Remedy::Nothing) {
        _ if facts.memory.explains(ended) => Cause::OutOfMemory,
        Some(xid) => Cause::GpuFault { xid },
        None => match ended {
            Ended::Exit(code) => Cause::Exit { code },
            Ended::Signal(signal) => Cause::Signal { signal },
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KILL: Ended = Ended::Signal(9);

    fn seen(counted: bool, logged: Option<bool>) -> Facts {
        Facts { memory: MemoryFacts { counted, logged }, ..Facts::default() }
    }

    #[test]
    fn each_cause_by_its_facts() {
        let nothing = Facts::default();
        assert_eq!(judge(Ended::Exit(0), &nothing), Cause::Completed);
        assert_eq!(judge(Ended::Exit(3), &nothing), Cause::Exit { code: 3 });
        assert_eq!(judge(Ended::Signal(11), &nothing), Cause::Signal { signal: 11 });
        let hang = Cause::Hang { what: Missing::Output };
        assert_eq!(judge(KILL, &Facts { by_us: Some(hang.clone()), ..seen(true, None) }), hang);
        let xids = |xids: &[u32]| Facts { xids: xids.to_vec(), ..Facts::default() };
        assert_eq!(judge(Ended::Exit(1), &xids(&[31, 45])), Cause::GpuFault { xid: 31 });
        assert_eq!(judge(Ended::Exit(1), &xids(&[45, 63])), Cause::Exit { code: 1 });
        assert_eq!(judge(Ended::Exit(1), &xids(&[45, 79, 31])), Cause::GpuFault { xid: 79 });
        assert_eq!(judge(Ended::Exit(0), &xids(&[79])), Cause::Completed);
    }

    #[test]
    fn want_of_memory_needs_a_witness_and_a_neighbour_is_none() {
        assert_eq!(judge(KILL, &seen(true, None)), Cause::OutOfMemory);
        assert_eq!(judge(KILL, &seen(true, Some(false))), Cause::OutOfMemory, "its pids may be others in a container");
        assert_eq!(judge(KILL, &seen(false, Some(true))), Cause::OutOfMemory, "it is in a group of its own making");
        assert_eq!(judge(KILL, &seen(false, None)), Cause::Signal { signal: 9 });
        // A data loader was killed, and the job reports that with its exit code.
        assert_eq!(judge(Ended::Exit(1), &seen(true, Some(true))), Cause::OutOfMemory);
        assert_eq!(judge(Ended::Exit(1), &seen(true, Some(false))), Cause::Exit { code: 1 });
        assert_eq!(judge(Ended::Exit(1), &seen(true, None)), Cause::OutOfMemory);
    }

    fn cause() -> impl Strategy<Value = Cause> {
        prop_oneof![
            Just(Cause::Requested),
            Just(Cause::Interruption { cloud: Cloud::Aws, notice: Kind::Terminate }),
            Just(Cause::SnapshotLost),
            Just(Cause::Hang { what: Missing::Work }),
            (1usize..9).prop_map(|rule| Cause::BadTraining { rule }),
        ]
    }

    proptest! {
        #[test]
        fn what_we_did_is_never_blamed_on_others_and_all_survives_json(
            code in 0i32..256,
            signalled: bool,
            by_us in proptest::option::of(cause()),
            counted: bool,
            logged: Option<bool>,
            xids in proptest::collection::vec(0u32..200, 0..4),
        ) {
            let ended = if signalled { Ended::Signal(code % 64 + 1) } else { Ended::Exit(code) };
            let facts = Facts { by_us: by_us.clone(), memory: MemoryFacts { counted, logged }, xids };
            let cause = judge(ended, &facts);
            if let Some(by_us) = by_us {
                prop_assert_eq!(&cause, &by_us);
            } else if ended == Ended::Exit(0) {
                prop_assert_eq!(&cause, &Cause::Completed);
            } else {
                prop_assert_ne!(&cause, &Cause::Completed);
            }
            prop_assert!(!cause.to_string().is_empty());
            let json = serde_json::to_string(&cause).unwrap();
            prop_assert_eq!(serde_json::from_str::<Cause>(&json).unwrap(), cause);
        }
    }
}
