//! What happened to the group of a job, as one of its machines saw it.

use serde::Serialize;

use crate::published::GroupMember;
use crate::telemetry::events::What;

/// The group snapshots, losses and restarts of a group, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct GroupHistory {
    /// The group images that were committed.
    pub committed: Vec<Committed>,
    /// The group snapshots that were aborted.
    pub aborted: Vec<Aborted>,
    /// The machines that were lost.
    pub lost: Vec<Lost>,
    /// The restarts of all machines because something was lost.
    pub restarts: Vec<Restart>,
}

/// A group image that was committed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Committed {
    pub at: i64,
    pub number: u64,
}

/// A group snapshot that was aborted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Aborted {
    pub at: i64,
    pub number: u64,
    /// The reason as text.
    pub why: String,
    /// The machines that the reason names.
    pub machines: Vec<GroupMember>,
}

/// A machine that was lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lost {
    pub at: i64,
    pub machine: GroupMember,
}

/// A restart of all machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Restart {
    pub at: i64,
    /// From this group image; `None` means from the beginning.
    pub number: Option<u64>,
    pub epoch: u64,
    /// The cause as text.
    pub why: String,
    /// The machines that the cause names.
    pub machines: Vec<GroupMember>,
    /// The machines that were lost before.
    pub lost: Vec<GroupMember>,
}

impl GroupHistory {
    pub(super) fn add(&mut self, at: i64, what: &What) {
        match what.clone() {
            What::GroupCommitted { number, .. } => self.committed.push(Committed { at, number }),
            What::GroupAborted { number, why, machines } => self.aborted.push(Aborted { at, number, why, machines }),
            What::GroupMemberLost { machine } => self.lost.push(Lost { at, machine }),
            What::GroupRestarting { number, epoch, why, machines, lost, .. } => {
                self.restarts.push(Restart { at, number, epoch, why, machines, lost });
            }
            _ => {}
        }
    }

    /// Only what happened since then. `None` if that is nothing.
    #[must_use]
    pub(crate) fn since(&self, since: i64) -> Option<GroupHistory> {
        let mut all = self.clone();
        all.committed.retain(|it| it.at >= since);
        all.aborted.retain(|it| it.at >= since);
        all.lost.retain(|it| it.at >= since);
        all.restarts.retain(|it| it.at >= since);
        (all != GroupHistory::default()).then_some(all)
    }
}
