//! The protocol of a group: a job whose processes run on several machines, one supervisor each.
//!
//! The members of a group never talk to each other. Each writes one document, its [`Report`]; one of them, the leader,
//! also writes the [`Plan`]. Both are in a coordinator (etcd), which keeps them consistent and removes what belongs to
//! a lost member. A member compares the plan with its own state and does what is missing. The leader compares
//! all reports with the plan and writes the next one.
//!
//! ```text
//!   Gather ---(all there, nothing runs)---> Start ---(all ready)---> Run <---------------------------+
//!     ^                                       |                       |                              |
//!     |                                   (one failed)        (a snapshot is due)              (all resumed)
//!     |                                       v                       v                              |
//!     +-----(a job or a member is lost)-------+                    Prepare                         Resume
//!     |                                                               |                              ^
//!     +--> End                                                  (all locked)                   (all dumped)
//!                                                                     v                              |
//!                                                                   Pull ----(all cables out)----> Dump
//!
//!   Prepare, Pull, Dump ---(one refused, or took too long)---> Abort ---(all run on)---> Run
//! ```
//!
//! [`Machine::step`] is a pure function of the state, an event and the time. The simulator (in the tests) runs whole
//! groups of it with lost messages, dead and paused machines, and a coordinator that does not answer.
//!
//! Why this is safe:
//!
//! - **One epoch at a time.** All jobs of an epoch start together. A new epoch starts only when each member of the one
//!   before has reported that nothing runs there, or has lost its lease. A member ends its job before its lease can
//!   expire ([`Machine`], `Fence`).
//! - **One leader's plan at a time.** A plan is written in a transaction. It fails if another member leads by then, or
//!   if the plan has changed since the decision.
//! - **No mixture.** A plan names the group image, and the group image names each part with its digest. A member that
//!   does not have exactly this part cannot start.
//! - **A consistent cut.** All members pull the cable before anybody dumps, and nobody plugs it in before all have
//!   dumped. So no packet and no acknowledgement crosses the cut.
//! - **A cut that all reach.** Nobody pulls the cable before all are locked. The GPUs of one machine may be idle while
//!   those of another still wait for data that the first one's processes send. If the first one pulled its cable then,
//!   the other one would never be idle, and its lock would not end. The barrier costs one more plan for each snapshot.
//! - **All or nothing.** A group image is recorded in the same transaction as the decision that all members have dumped,
//!   and committed when each part is stored.
//! - **Whole images in the replica.** All members send the parts of one group image, and of no other until the replica
//!   has all of them. If each sent its newest part, a slow member could skip those that another slow member has sent,
//!   and the replica might never have a whole one.

mod documents;
mod events;
mod hands;
mod ids;
mod images;
mod job;
mod leader;
mod machine;
mod member;
mod options;
mod reasons;
mod requests;
#[cfg(test)]
mod simulator;
#[cfg(test)]
mod tests;

pub use documents::{
    Aim, Ask, Asked, Blame, Costs, Counted, End, Ending, Fault, Fresh, Goal, GroupImage, Last, LastSnapshot, Left,
    Part, Past, Plan, Progress, RefusedRequest, Replica, Replicated, Report, Rewound, StartFrom, State, Stored, Then,
    Versioned, View,
};
pub use events::{Action, Answer, Event, Local, Order, Write};
pub use ids::{Epoch, Incarnation, Number, Rank};
pub use images::{continues_from, fetching, newest_committed, trusted, usable, whole_in_replica};
pub use machine::Machine;
pub use options::{ColdStart, Limits, Options, Restart};
pub use reasons::{Detail, Failure, Mismatch, Missing, Phase, Reason, RequestRefusal, SnapshotRefusal, StartFailure};
pub use requests::{
    NotDone, Outcome, Pending, admits, has_job_queued_again, is_of_run, is_over_for_good, is_suspended,
};
