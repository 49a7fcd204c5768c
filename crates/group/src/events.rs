//! What a member of a group is told, and what it answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::documents::{Ask, Costs, End, Ending, GroupImage, Part, Plan, Progress, Report, StartFrom, Versioned, View};
use crate::ids::{Epoch, Incarnation, Number};
use crate::reasons::{Detail, SnapshotRefusal};

/// An event for the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A newer state of the coordinator.
    View(Arc<View>),
    /// There is a new lease, and a new membership with it.
    Session(Incarnation),
    /// The lease cannot expire before this time.
    Sure(Instant),
    /// The lease is lost.
    SessionLost,
    /// The answer to a [`Write`].
    Wrote(Answer),
    /// News of this member's job.
    Local(Local),
    /// A request of a user of this member. It replaces one that is not served yet; but a request for a snapshot does not
    /// replace another request. With the membership all end, except a stop that is not served yet.
    Asked(Ask),
    /// Time has passed.
    Tick,
}

/// The coordinator's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It is written, in this revision.
    Done(u64),
    /// It is not written: a condition no longer holds.
    Conflict,
    /// It is unknown whether it is written.
    Unknown,
}

/// What the job of this member does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Local {
    /// It was started; its cable is out.
    Started,
    /// It reached the cut and is locked; its cable is in.
    Locked(Number),
    /// It is locked, and its cable is out.
    Quiet(Number),
    /// It was dumped and continues; its cable is still out.
    Dumped(Number, Part),
    /// It cannot take part in this snapshot: everything is undone, and the cable is in.
    Refused(Number, SnapshotRefusal),
    /// The snapshot is undone, and the cable is in.
    Aborted(Number),
    /// It is over, or could not be started. Nothing runs.
    Ended(Ending),
    /// It is tried again to store its part of this group image.
    Storing(Number),
    /// Its part of this group image is stored.
    Stored(Number),
    /// Its part of this group image could not be stored. It may still be in memory.
    NotStored(Number),
    /// Its part of this group image does not exist any more.
    Gone(Number),
    /// Its part of this group image was fetched from the replica.
    Fetched(Number),
    /// The replica has its part of this group image.
    Replicated(Number),
    /// Its part of this group image cannot be sent to the replica.
    NotReplicated(Number),
    /// What snapshots cost here.
    Costs(Costs),
    /// The run is over and everything after it is done; the member stays until the job is queued again.
    Done,
    /// The parts that it can restore: the answer to [`Order::List`].
    Parts(BTreeMap<Number, Progress>),
}

impl Local {
    /// The job cannot take part in this snapshot, for a reason that the machine says.
    #[must_use]
    pub fn refused(number: Number, why: impl Into<Detail>) -> Local {
        Local::Refused(number, SnapshotRefusal::Other(why.into()))
    }
}

/// An answer of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Something to be written in the coordinator. There is one at a time, until its [`Event::Wrote`].
    Write(Write),
    /// Something to be done on this machine.
    Do(Order),
}

/// A transaction: written if its condition holds, else [`Answer::Conflict`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Creates the member's report, bound to its lease. Condition: there is none of this rank.
    Join(Report),
    /// Changes the report. Condition: the report is from this membership.
    Report(Report),
    /// Takes the lead for this membership, bound to its lease. Condition: there is no leader.
    Lead(Incarnation),
    /// Writes the plan. Condition: we lead, and the plan has not changed.
    Plan {
        /// The plan.
        plan: Box<Plan>,
        /// The revision of the one before.
        was: Option<u64>,
        /// A group image, recorded with it.
        image: Option<(Number, GroupImage)>,
    },
    /// Commits a group image, or records it again. Condition: we lead, and its record has not changed.
    Record {
        /// Its number.
        number: Number,
        /// Its record.
        image: GroupImage,
        /// The revision of the one before.
        was: Option<u64>,
    },
    /// Removes the record of a group image that is not kept, and writes the same plan again. The plan then has a new
    /// revision, so only a leader that knows of the removal can write the next plan, which does not use this image.
    /// Condition: we lead, and neither the record nor the plan has changed.
    Remove {
        /// Its number.
        number: Number,
        /// Its revision.
        was: u64,
        /// The plan, which does not need it.
        plan: Box<Versioned<Plan>>,
    },
}

/// What is to be done on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// List the parts that can be restored here. Answer: [`Local::Parts`]. Ordered when no supervisor has the rank:
    /// an earlier list could lack parts that the supervisor before this one stored since.
    List,
    /// Start the job with the cable out. Answer: [`Local::Started`] or [`Local::Ended`].
    Start {
        /// The epoch.
        epoch: Epoch,
        /// The origin of the plan, which is recorded in each part that is taken in this epoch.
        origin: Incarnation,
        /// What the job starts from.
        from: StartFrom,
        /// This member's part, if it starts from a group image.
        part: Option<Part>,
    },
    /// Plug the cable in.
    Plug,
    /// Reach the cut and lock the processes, with the cable in. Answer: [`Local::Locked`] or [`Local::Refused`].
    Prepare(Number),
    /// Pull the cable. Answer: [`Local::Quiet`] or [`Local::Refused`].
    Pull(Number),
    /// Dump. Answer: [`Local::Dumped`] or [`Local::Refused`].
    Dump(Number),
    /// Keep the part, store it in the background, and plug the cable in. Answer, later: [`Local::Stored`] or
    /// [`Local::NotStored`].
    Resume(Number),
    /// Undo the snapshot, drop the part, and plug the cable in. Answer: [`Local::Aborted`].
    Abort(Number),
    /// End the job. Answer: [`Local::Ended`].
    Kill,
    /// Keep the part and store it in the background: the job is ended next. The answers are those of `Resume`.
    Store(Number),
    /// Remove the part, which is no longer needed.
    Forget(Number),
    /// Fetch the part from the replica: the job is to be started from it. Answer: [`Local::Fetched`], or [`Local::Gone`]
    /// if it cannot be used.
    Fetch(Number),
    /// Send the part to the replica. Answer: [`Local::Replicated`] or [`Local::NotReplicated`].
    Replicate(Number),
    /// The run is over.
    Finish(End),
}
