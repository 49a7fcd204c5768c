//! The reasons for what a group does: written into the documents as data, made into words only for people.
//!
//! Code decides from the variants. [`fmt::Display`] of each type has its words: the log, `status`, events and answers to
//! requests show them, and nothing reads them.
//!
//! In JSON, a reason is the name of its variant in kebab-case, with what the variant has: `"new-run"`,
//! `{"member-lost":2}`, `{"timed-out":{"phase":"lock","ranks":[0,2]}}`,
//! `{"refused":{"rank":1,"why":{"other":"no memory"}}}`. Unknown names and unknown fields are refused. What a machine says in
//! its own words is a [`Detail`], the only text, and has a limit.

use std::fmt;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::ids::{Number, Rank, in_words};

/// Why the group ends the job to start it again, or aborts a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Reason {
    /// The coordinator has no plan yet.
    Begins,
    /// The last run is over, and the members are new ones.
    NewRun,
    /// A suspended job continues.
    Resumed,
    /// A rewind to this group image was requested.
    Rewound(Number),
    /// The lease of a member is over.
    MemberLost(Rank),
    /// A member could not renew its lease in time, and has ended its job.
    CoordinatorLost(Rank),
    /// The job of a member failed.
    JobFailed {
        /// The member.
        rank: Rank,
        /// How.
        why: Detail,
    },
    /// The job of a member could not be started.
    NotStarted {
        /// The member.
        rank: Rank,
        /// Why.
        why: StartFailure,
    },
    /// Members did not do in time what was ordered.
    TimedOut {
        /// What was ordered.
        phase: Phase,
        /// The members. Empty if none can be named.
        ranks: Vec<Rank>,
    },
    /// A member cannot take part in a snapshot.
    Refused {
        /// The member.
        rank: Rank,
        /// Why.
        why: SnapshotRefusal,
    },
    /// The job of a member is over in the middle of a snapshot.
    JobOver(Rank),
    /// The job of a member has completed: its part of the job is in no later group image.
    JobCompleted(Rank),
    /// A member lacks its part of a group image.
    PartsGone,
    /// A rewind failed, and the job continues from where it was.
    RewindFailed {
        /// The group image to go back to.
        to: Number,
        /// Why.
        why: Box<Reason>,
    },
}

impl Reason {
    /// Whether the job starts for this reason because something was lost, and not because somebody wants it.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        !matches!(self, Reason::Begins | Reason::NewRun | Reason::Resumed | Reason::Rewound(_))
    }

    /// The members that it names.
    #[must_use]
    pub fn ranks(&self) -> &[Rank] {
        match self {
            Reason::Begins | Reason::NewRun | Reason::Resumed | Reason::Rewound(_) | Reason::PartsGone => &[],
            Reason::MemberLost(rank)
            | Reason::CoordinatorLost(rank)
            | Reason::JobFailed { rank, .. }
            | Reason::NotStarted { rank, .. }
            | Reason::Refused { rank, .. }
            | Reason::JobOver(rank)
            | Reason::JobCompleted(rank) => std::slice::from_ref(rank),
            Reason::TimedOut { ranks, .. } => ranks,
            Reason::RewindFailed { why, .. } => why.ranks(),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Begins => f.write_str("the group begins"),
            Reason::NewRun => f.write_str("a new run"),
            Reason::Resumed => f.write_str("resumed"),
            Reason::Rewound(to) => write!(f, "rewound to {to}"),
            Reason::MemberLost(rank) => write!(f, "{rank} is lost"),
            Reason::CoordinatorLost(rank) => write!(f, "{rank} ended its job: it lost the coordinator"),
            Reason::JobFailed { rank, why } => write!(f, "{rank}: {why}"),
            Reason::NotStarted { rank, why } => write!(f, "{rank}: {why}"),
            Reason::TimedOut { phase, ranks } if ranks.is_empty() => write!(f, "{phase}: the group"),
            Reason::TimedOut { phase, ranks } => write!(f, "{phase}: {}", in_words(ranks)),
            Reason::Refused { rank, why } => write!(f, "{rank}: {why}"),
            Reason::JobOver(rank) => write!(f, "{rank}: its job is over"),
            Reason::JobCompleted(rank) => write!(f, "the job of {rank} has completed, so no snapshot can be taken"),
            Reason::PartsGone => f.write_str("not all of its parts are there any more"),
            Reason::RewindFailed { to, why } => {
                write!(f, "cannot go back to {to}: {why}. The job continues from where it was")
            }
        }
    }
}

/// What members are ordered to do within a time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Start the job.
    Start,
    /// Reach the cut and lock the processes.
    Lock,
    /// Pull the cable.
    Disconnect,
    /// Dump.
    Dump,
    /// Continue after a snapshot.
    Resume,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Start => "not ready in time",
            Phase::Lock => "not locked in time",
            Phase::Disconnect => "not disconnected in time",
            Phase::Dump => "not dumped in time",
            Phase::Resume => "not running again after a snapshot",
        })
    }
}

/// Why a member cannot take part in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotRefusal {
    /// Its job holds snapshots. Another try costs nothing.
    JobBlocks,
    /// It has not seen the order to lock.
    NotPrepared,
    /// Something else, as the machine says it.
    Other(Detail),
}

impl fmt::Display for SnapshotRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SnapshotRefusal::JobBlocks => f.write_str("the job blocks snapshots now"),
            SnapshotRefusal::NotPrepared => f.write_str("it was not prepared"),
            SnapshotRefusal::Other(why) => why.fmt(f),
        }
    }
}

/// Why a member cannot start its job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartFailure {
    /// It does not have its part of this group image.
    NoPart(Number),
    /// Something else, as the machine says it.
    Other(Detail),
}

impl fmt::Display for StartFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartFailure::NoPart(number) => write!(f, "this machine does not have its part of {number}"),
            StartFailure::Other(why) => why.fmt(f),
        }
    }
}

/// What a run has waited for in vain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Missing {
    /// Members whose jobs did not end.
    JobEnd(Vec<Rank>),
    /// Members that did not report that nothing runs there.
    Report(Vec<Rank>),
    /// Members that did not join.
    Members(Vec<Rank>),
    /// The record of this group image, and some of its parts.
    Record(Number),
    /// The group image that the job was rewound to.
    RewoundImage,
    /// Parts of this group image, which is committed.
    Parts(Number),
    /// The rank of this member: another supervisor has it.
    Rank(Rank),
    /// Members that were started with --fresh too.
    FreshMembers,
    /// Members of the run before that did not leave.
    Departure(Vec<Rank>),
    /// The beginning of the next run.
    NextRun,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::JobEnd(ranks) => write!(f, "{} did not end its job in time", in_words(ranks)),
            Missing::Report(ranks) => write!(f, "{} did not report in time that nothing runs", in_words(ranks)),
            Missing::Members(ranks) => write!(f, "{} did not join in time", in_words(ranks)),
            Missing::Record(number) => {
                write!(f, "the coordinator has no record of {number}, and not all of its parts are there")
            }
            Missing::RewoundImage => f.write_str("the group image that the job was rewound to no longer exists"),
            Missing::Parts(number) => write!(
                f,
                "not all parts of {number} or of an older one are there: start the machines that have them, or all \
                with --fresh, from the beginning"
            ),
            Missing::Rank(rank) => write!(
                f,
                "another supervisor runs as {rank}. Stop it, or give this machine another number (--node-rank, \
                group.node-rank)"
            ),
            Missing::FreshMembers => f.write_str("not all machines were started with --fresh in time"),
            Missing::Departure(ranks) => write!(
                f,
                "{} of the run before did not leave the group in time: end the supervisors there",
                in_words(ranks)
            ),
            Missing::NextRun => f.write_str("the group's leader did not begin the next run in time"),
        }
    }
}

/// Why a job is given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Failure {
    /// It was restarted too often.
    Restarts {
        /// The limit.
        most: u32,
        /// The time in which they count.
        within: Duration,
        /// Why it would be restarted again.
        last: Reason,
    },
    /// Epochs in a row failed before they were healthy.
    InARow {
        /// How many.
        times: u32,
        /// Why the last one failed.
        last: Reason,
    },
    /// It must not start from the beginning, and there is no group image.
    NoImage {
        /// Why it would be restarted.
        last: Reason,
    },
    /// It died early after each start from the beginning.
    EarlyDeaths {
        /// How many.
        times: u32,
        /// What is early.
        within: Duration,
        /// Why it would be restarted again.
        last: Reason,
    },
    /// It failed after each group image; this is the newest of them.
    EachImage(Number),
    /// A member's configuration says that it is not to be started again.
    Never {
        /// The member.
        rank: Rank,
        /// How the job ended there.
        why: Detail,
    },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Restarts { most, within, last } => {
                write!(f, "{most} restarts within {within:?} (restart.max-restarts); the last time: {last}")
            }
            Failure::InARow { times, last } => {
                write!(f, "the job failed or could not be started {times} times in a row; the last time: {last}")
            }
            Failure::NoImage { last } => write!(
                f,
                "there is no group image to continue from, and restart.cold-start is \"never\"; the last time: {last}"
            ),
            Failure::EarlyDeaths { times, within, last } => write!(
                f,
                "there is no good group image, and the job died {times} times within {within:?} (restart.min-uptime) \
                after a start from the beginning; the last time: {last}"
            ),
            Failure::EachImage(number) => {
                write!(f, "the job failed again and again after each group image, the newest of them {number}")
            }
            Failure::Never { rank, why } => write!(f, "{rank}: {why}"),
        }
    }
}

/// Why a member does not fit the group, or the group images do not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Mismatch {
    /// The newest group image is of a group of another size.
    Size {
        /// The group image.
        image: Number,
        /// Number of its parts.
        parts: u32,
        /// Number of members.
        size: u32,
    },
    /// Only some members were started with --fresh.
    Fresh {
        /// One that was.
        with: Rank,
        /// One that was not.
        without: Rank,
    },
    /// An image does not fit the configuration of its machine.
    Configuration {
        /// The member.
        rank: Rank,
        /// Why.
        why: StartFailure,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Size { image, parts, size } => write!(
                f,
                "{image} has parts of {parts} machines, and the group has {size} (group.nodes): start it with --nodes \
                {parts}, or all machines with --fresh, from the beginning"
            ),
            Mismatch::Fresh { with, without } => {
                write!(f, "{with} was started with --fresh and {without} was not: start all machines with it, or none")
            }
            Mismatch::Configuration { rank, why } => write!(f, "{rank}: {why}"),
        }
    }
}

/// Why a request is not served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum RequestRefusal {
    /// There is no plan yet.
    NotBegun,
    /// The run is over.
    RunOver,
    /// The run is being stopped.
    Stopping,
    /// The job is being suspended, so it cannot be resumed yet.
    StillSuspending,
    /// The job is being suspended.
    Suspending,
    /// The job is suspended, so no snapshot can be taken.
    Suspended,
    /// The job is suspended already.
    SuspendedAlready,
    /// The job is not suspended.
    NotSuspended,
    /// The job waits to be started.
    NotRunning,
    /// There is no such group image.
    NoImage(Number),
    /// This group image is from before a start with --fresh.
    BeforeFresh(Number),
    /// Members lack their parts.
    PartsMissing {
        /// The group image.
        image: Number,
        /// The members.
        ranks: Vec<Rank>,
    },
    /// The group could not do it.
    Failed(Reason),
}

impl fmt::Display for RequestRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RequestRefusal::NotBegun => "the group has not begun",
            RequestRefusal::RunOver => "the run is over",
            RequestRefusal::Stopping => "the run is being stopped",
            RequestRefusal::StillSuspending => "the job is being suspended: try again when it is suspended",
            RequestRefusal::Suspending => "the job is being suspended",
            RequestRefusal::Suspended => "the job is suspended: resume it first",
            RequestRefusal::SuspendedAlready => "the job is suspended already",
            RequestRefusal::NotSuspended => "the job is not suspended",
            RequestRefusal::NotRunning => "the job does not run: it waits to be started",
            RequestRefusal::NoImage(number) => return write!(f, "there is no {number}"),
            RequestRefusal::BeforeFresh(number) => {
                return write!(f, "{number} is from before the job was started from the beginning (--fresh)");
            }
            RequestRefusal::PartsMissing { image, ranks } => {
                return write!(f, "{image} cannot be used: the part of {} is not there", in_words(ranks));
            }
            RequestRefusal::Failed(why) => return why.fmt(f),
        })
    }
}

/// What a machine says in its own words, for people: an error, or how its job ended.
///
/// A longer text is cut when it is made. One that is longer in a document was written by something else, and is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Detail(String);

impl Detail {
    /// The longest text, in bytes. Each plan that names it is written, read and compared by all members; the longest errors
    /// quote some lines of CRIU's log.
    pub const LONGEST: usize = 8 << 10;
}

impl<T: Into<String>> From<T> for Detail {
    fn from(text: T) -> Detail {
        const CUT: &str = "...";
        let mut text = text.into();
        if text.len() > Detail::LONGEST {
            let end = (0..=Detail::LONGEST - CUT.len()).rev().find(|end| text.is_char_boundary(*end));
            text.truncate(end.unwrap_or_default());
            text.push_str(CUT);
        }
        Detail(text)
    }
}

impl<'de> Deserialize<'de> for Detail {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Detail, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.len() <= Detail::LONGEST {
            true => Ok(Detail(text)),
            false => Err(D::Error::invalid_length(text.len(), &"a text of at most 8 KiB")),
        }
    }
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests;
