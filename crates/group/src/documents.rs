//! The documents in the coordinator: small, and JSON, so that people can read them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{Epoch, Incarnation, Number, Rank};
use crate::reasons::{Detail, Failure, Mismatch, Missing, Reason, RequestRefusal, SnapshotRefusal, StartFailure};

/// One member's part of a group image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The name of the image in the member's store.
    pub image: String,
    /// A random 128-bit mark, made at [`Goal::Prepare`] and kept in the image: another image of the same name is not this
    /// part. A hash of the manifest would not do, because storing an image rewrites its manifest.
    pub digest: String,
}

/// How safe a part is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stored {
    /// In memory or in a slot: lost with the machine.
    Staged,
    /// In the store or in the replica, as the group's settings demand.
    Durable,
}

/// Whether the replica has a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replicated {
    /// It does not, as far as the member knows.
    #[default]
    No,
    /// It does not, and the member cannot send it.
    Failed,
    /// It does.
    Yes,
    /// It does, and the member's store does not: the part must be fetched before the job starts from it.
    Only,
}

/// A part that a member can restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The part.
    pub part: Part,
    /// The epoch in which it was taken.
    pub epoch: Epoch,
    /// The origin of the plan at that time: it tells one group image 3 from another. Epochs and numbers start again if
    /// the coordinator loses its data and no machine has parts.
    pub origin: Incarnation,
    /// Number of members of the group at that time. 0: a version that did not record it has taken the part.
    #[serde(default)]
    pub size: u32,
    /// Where it is. A part that is only in the replica is durable.
    pub stored: Stored,
    /// Whether the replica has it.
    #[serde(default)]
    pub replicated: Replicated,
}

/// What the job of a member starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartFrom {
    /// No image: the job begins.
    Beginning,
    /// This group image.
    Image(Number),
}

impl fmt::Display for StartFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartFrom::Beginning => f.write_str("the beginning"),
            StartFrom::Image(number) => number.fmt(f),
        }
    }
}

/// How the job of a member ended, for the exit code of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Last {
    /// With this exit code.
    Exit(i32),
    /// By this signal.
    Signal(i32),
}

/// How a member's job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// Exit code 0.
    Completed,
    /// It crashed, hung, or a rank of it died.
    Failed {
        /// How.
        why: Detail,
        /// Its exit code or signal.
        #[serde(default)]
        last: Option<Last>,
        /// What its end counts against.
        #[serde(default)]
        fault: Fault,
    },
    /// It failed, and the member's configuration says that it is not to be started again.
    GivenUp {
        /// How.
        why: Detail,
        /// Its exit code or signal.
        #[serde(default)]
        last: Option<Last>,
    },
    /// It could not be started.
    NotStarted {
        /// Why.
        why: StartFailure,
        /// What has to change.
        #[serde(default)]
        blame: Blame,
        /// What it counts against if the image is to blame.
        #[serde(default)]
        fault: Fault,
    },
}

impl Ending {
    /// It failed by itself.
    #[must_use]
    pub fn failed(why: impl Into<Detail>, last: Option<Last>) -> Ending {
        Ending::Failed { why: why.into(), last, fault: Fault::Job }
    }

    /// It could not be started.
    #[must_use]
    pub fn not_started(why: StartFailure, blame: Blame) -> Ending {
        Ending::NotStarted { why, blame, fault: Fault::Job }
    }
}

/// What is at fault when a job fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The job, or the group image that it was restored from.
    #[default]
    Job,
    /// Something outside: lack of memory, a GPU that failed, somebody who killed it.
    Outside,
    /// A snapshot, after which it could not continue.
    Snapshot,
}

/// What prevented the start of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Blame {
    /// The machine, as it is now: the same group image is tried again.
    #[default]
    Machine,
    /// The image. Another one may be restored.
    Image,
    /// The image does not fit the machine, or files of the job are missing there: somebody has to decide what to do.
    Misfit,
    /// The image does not fit the configuration.
    Configuration,
}

/// What a member's job does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Nothing runs.
    Idle,
    /// It is being launched or restored.
    Starting,
    /// It was started and waits for the others; its cable is out.
    Ready,
    /// It runs.
    Running,
    /// It has reached the cut, and its processes are locked. Its cable is still in: another member may need data that
    /// is on its way from here to reach the cut.
    Locked(Number),
    /// It is locked, and its cable is out.
    Quiet(Number),
    /// It was dumped; its cable is still out.
    Dumped(Number, Part),
    /// It cannot take part in this snapshot, and continues.
    Refused(Number, SnapshotRefusal),
    /// It is being ended.
    Ending,
    /// It is over; nothing runs.
    Over(Ending),
}

impl State {
    /// Whether no process of the job exists.
    #[must_use]
    pub fn nothing_runs(&self) -> bool {
        matches!(self, State::Idle | State::Over(_))
    }
}

/// A request, from any member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    /// Take a snapshot.
    Snapshot,
    /// Take a snapshot if there is time, and end the run.
    Stop {
        /// Whether the run is to be queued again.
        requeue: bool,
        /// Time limit.
        within: Duration,
    },
    /// End the run at once.
    StopNow {
        /// Whether the run is to be queued again.
        requeue: bool,
    },
    /// Take a snapshot, and end the job until it is resumed.
    Suspend,
    /// Start the suspended job.
    Resume,
    /// Go back to this group image.
    Rewind(Number),
    /// The same, because the job hangs: it counts, and so does a failure to do it.
    LeaveHang(Number),
}

/// A request with its number, which increases with each request of a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// From 1.
    pub number: u64,
    /// What is wanted.
    pub ask: Ask,
}

/// What snapshots cost on a machine, as its supervisor has measured.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Costs {
    /// How long one freezes the job: the median of the last ones.
    #[serde(default)]
    pub freeze: Option<Duration>,
    /// How long storing the last part took.
    #[serde(default)]
    pub store: Option<Duration>,
    /// How long the final snapshot of a run would take.
    #[serde(default)]
    pub last: Option<LastSnapshot>,
    /// The final snapshot is near, and would have to wait for another one: none is taken at the interval.
    #[serde(default)]
    pub quiet: bool,
}

/// The expected time for the final snapshot of a run on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastSnapshot {
    /// From its start until the part is complete.
    pub snapshot: Duration,
    /// Until it is stored.
    pub store: Duration,
    /// Until it is in the replica.
    pub replica: Duration,
}

/// How long the job of a group has run, and how often something was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Past {
    /// The time for which it ran in epochs that are over. A new leader counts from when it begins to lead.
    pub ran: Duration,
    /// How many epochs were healthy, and ended because a machine or the job failed.
    pub failures: u32,
}

/// A member's report about itself. Only the member writes it; it is removed with its lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The membership.
    pub incarnation: Incarnation,
    /// The plan that it has seen, by its serial number.
    pub seen: u64,
    /// The epoch of `state`.
    pub epoch: Epoch,
    /// What its job does.
    pub state: State,
    /// The parts that it can restore.
    #[serde(default)]
    pub parts: BTreeMap<Number, Progress>,
    /// Whether a part is being stored: until then no other snapshot is taken.
    #[serde(default)]
    pub storing: bool,
    /// What snapshots cost there.
    #[serde(default)]
    pub costs: Costs,
    /// Whether it has done everything after the end of the run, and is there only to have the job queued again.
    #[serde(default)]
    pub done: bool,
    /// Its latest request.
    #[serde(default)]
    pub asked: Option<Asked>,
    /// Whether it was told to start from the beginning.
    #[serde(default)]
    pub fresh: Fresh,
    /// Whether the job has run under this process, in any epoch: a restart from the beginning would repeat what was done. It
    /// has not if another machine could not start it.
    #[serde(default)]
    pub begun: bool,
    /// Group images before this one are not used: the job has started from the beginning since. The plan says the same,
    /// but the coordinator may lose it.
    #[serde(default)]
    pub floor: Number,
    /// The job is suspended, and this process was a member when that happened, or since one was there that says so. It may
    /// have a new membership by now: as long as such a process is there, the job stays suspended.
    #[serde(default)]
    pub rests: bool,
    /// What rewinds have abandoned, as the last plan said in which something had started. The coordinator may lose it.
    #[serde(default)]
    pub rewound: Option<Rewound>,
}

/// Whether a supervisor was told to start the job from the beginning although there are group images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fresh {
    /// It was not told so.
    #[default]
    No,
    /// It was, and has not started the job yet.
    Wanted,
    /// It was, and has started the job since. A restart continues from a group image.
    Done,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Each member's job ended with exit code 0.
    Completed,
    /// A stop was requested.
    Stopped {
        /// Whether the run is to be queued again.
        requeue: bool,
    },
    /// The run has waited in vain for something that another run may find.
    Missing {
        /// What.
        why: Missing,
    },
    /// The job is given up.
    Failed {
        /// Why.
        why: Failure,
        /// How the job ended last.
        #[serde(default)]
        last: Option<Last>,
    },
    /// This member does not fit into the group, and leaves; or, in a plan, the group images do not fit the group, or an
    /// image does not fit the configuration of its machine.
    Refused {
        /// Why.
        why: Mismatch,
    },
    /// A group image does not fit a machine: somebody has to change the machine, or to decide what to start from.
    Misfit {
        /// The machine.
        rank: Rank,
        /// Why.
        why: StartFailure,
    },
}

impl End {
    /// Whether the run is to be queued again.
    #[must_use]
    pub fn is_queued_again(&self) -> bool {
        matches!(self, End::Missing { .. } | End::Stopped { requeue: true })
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Completed => f.write_str("the job completed"),
            End::Stopped { .. } => f.write_str("the run was stopped"),
            End::Missing { why } => why.fmt(f),
            End::Failed { why, .. } => why.fmt(f),
            End::Refused { why } => why.fmt(f),
            End::Misfit { rank, why } => write!(f, "{rank}: {why}"),
        }
    }
}

/// What follows a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Then {
    /// The job continues.
    RunOn,
    /// The run ends.
    Stop {
        /// Whether the run is to be queued again.
        requeue: bool,
    },
    /// The job ends until it is resumed.
    Suspend,
}

/// What all members are to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// End the job. A new epoch begins once all members are there.
    Gather {
        /// The reason.
        why: Reason,
    },
    /// End the job, and wait for a request.
    Suspended,
    /// Start the job, with the cable out.
    Start(StartFrom),
    /// Plug the cable in and run.
    Run,
    /// Reach the cut and lock the processes. The cable stays in.
    Prepare(Number),
    /// All are locked: pull the cable.
    Pull(Number),
    /// Dump.
    Dump(Number),
    /// Keep the part, plug the cable in and run.
    Resume(Number),
    /// Forget the part, plug the cable in and run.
    Abort {
        /// The number of the snapshot.
        number: Number,
        /// The reason.
        why: Reason,
    },
    /// End the job, and leave.
    End(End),
}

impl Goal {
    /// Whether jobs may run.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !matches!(self, Goal::Gather { .. } | Goal::Suspended | Goal::End(_))
    }
}

/// What the leader wants. There is one; it outlives all leases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The member that wrote the first plan. If it changes, the coordinator has lost its data.
    pub origin: Incarnation,
    /// Increases with each plan.
    pub serial: u64,
    /// The epoch.
    pub epoch: Epoch,
    /// The members of the epoch.
    pub crew: BTreeMap<Rank, Incarnation>,
    /// What to do.
    pub goal: Goal,
    /// What follows the snapshot in progress.
    pub then: Then,
    /// The number of the next snapshot.
    pub next: Number,
    /// What the epoch started from.
    pub from: StartFrom,
    /// Whether the epoch has run for long enough to count as healthy.
    pub healthy: bool,
    /// Points against group images: see `leader::failures`.
    #[serde(default)]
    pub failures: BTreeMap<Number, u32>,
    /// The group images from which an epoch was healthy.
    #[serde(default)]
    pub proven: BTreeSet<Number>,
    /// How often in a row epochs failed before they were healthy, or the job could not be started.
    #[serde(default)]
    pub in_a_row: u32,
    /// How often in a row a machine, a supervisor or its connection was lost before the epoch was healthy.
    #[serde(default)]
    pub lost: u32,
    /// How many snapshots in a row ended the job.
    #[serde(default)]
    pub fatal: u32,
    /// What the last failure of the job has counted, while the group gathers.
    #[serde(default)]
    pub counted: Option<Counted>,
    /// How many of the latest epochs started from the beginning and failed before they were healthy.
    #[serde(default)]
    pub early_cold: u32,
    /// How the job ended that failed last.
    #[serde(default)]
    pub last: Option<Last>,
    /// How long the job has run, and how often it failed.
    #[serde(default)]
    pub past: Past,
    /// The rewind that is being carried out.
    #[serde(default)]
    pub aim: Option<Aim>,
    /// Group images before this one are not used: the job has started from the beginning since, on request.
    #[serde(default)]
    pub floor: Number,
    /// Group images that are no longer used after a rewind.
    #[serde(default)]
    pub left: Vec<Left>,
    /// The latest request of each membership that was carried out.
    #[serde(default)]
    pub served: BTreeMap<Incarnation, u64>,
    /// Of these requests, those that were refused.
    #[serde(default)]
    pub refused: BTreeMap<Incarnation, RefusedRequest>,
}

/// What a failure of the job has counted. If a member of its epoch is lost too before the next start, it is taken back: the
/// connections of the job broke with that member, and the coordinator tells of its end only when its lease expires.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// The points against this group image.
    pub points: Option<(Number, u32)>,
    /// `in_a_row` of the plan before.
    pub in_a_row: u32,
    /// `fatal` of the plan before.
    pub fatal: u32,
    /// `early_cold` of the plan before.
    pub early_cold: u32,
}

/// If so many snapshots in a row end the job, no more are taken at the interval: the job would never get further.
const FATAL: u32 = 3;

impl Plan {
    /// Whether snapshots end the job, so that none is taken at the interval. The next one that succeeds changes it.
    #[must_use]
    pub fn snapshots_end_the_job(&self) -> bool {
        self.fatal >= FATAL
    }
}

/// A request that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedRequest {
    /// Its number.
    pub number: u64,
    /// Why.
    pub why: RequestRefusal,
}

/// A rewind until the job runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aim {
    /// The group image to go back to.
    pub to: Number,
    /// The group images that were abandoned before: if the job cannot be restored from `to`, it continues from where it
    /// was.
    pub left: Vec<Left>,
    /// Who has requested it, and the number of the request.
    pub of: (Incarnation, u64),
    /// Whether it is because the job hangs.
    #[serde(default)]
    pub for_hang: bool,
}

/// Group images that a rewind has abandoned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The group image that the job went back to.
    pub after: Number,
    /// The first number after the rewind.
    pub before: Number,
    /// How often in a row the job went back to that group image because it hung.
    #[serde(default)]
    pub times: u32,
}

impl Left {
    /// Whether this group image is one of them.
    #[must_use]
    pub fn has(self, number: Number) -> bool {
        self.after < number && number < self.before
    }
}

/// What rewinds have abandoned, as a member remembers it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rewound {
    /// The origin of the plan. Numbers begin again if the coordinator loses its data and no machine has parts.
    pub origin: Incarnation,
    /// The same as in the plan.
    pub left: Vec<Left>,
}

/// Whether the replica has a group image, or is to have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replica {
    /// Neither, as far as is known.
    #[default]
    No,
    /// All members send their parts.
    Wanted,
    /// It has all parts.
    Whole,
}

/// A group image: one part for each rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupImage {
    /// The epoch in which it was taken.
    pub epoch: Epoch,
    /// All parts.
    pub parts: BTreeMap<Rank, Part>,
    /// Whether each part is durable.
    pub committed: bool,
    /// Whether it is in the replica.
    #[serde(default)]
    pub replica: Replica,
}

/// A value of the coordinator, and the revision of its last change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned<T> {
    /// The value.
    pub value: T,
    /// The revision.
    pub revision: u64,
}

/// Everything in the coordinator, at one revision. Two views share what is the same in both.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// The revision.
    pub revision: u64,
    /// Who leads.
    pub leader: Option<Incarnation>,
    /// The plan.
    pub plan: Option<Arc<Versioned<Plan>>>,
    /// The members.
    pub members: BTreeMap<Rank, Arc<Report>>,
    /// The group images.
    pub images: BTreeMap<Number, Arc<Versioned<GroupImage>>>,
}
