//! Bugs that are planted in the model of a machine or of the coordinator, to test that the simulator finds them. They
//! are typical mistakes in an implementation of the protocol.

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plant {
    /// A machine does not end its job when it has lost the coordinator.
    LostFence,
    /// A lease is counted from the answer, not from the request.
    LeaseFromTheAnswer,
    /// A part is reported as durable while it is only in memory.
    CommitBeforeStored,
    /// A machine plugs its cable in as soon as its own dump is over.
    CableInTooEarly,
    /// A machine dumps before its cable is out.
    CableOutTooLate,
    /// A machine pulls its cable as soon as it is locked itself.
    CableOutBeforeLocked,
    /// A machine restores its newest part, not the one of the group image.
    MixedParts,
    /// An order to abort a snapshot is lost.
    LostAbort,
    /// The coordinator writes a plan although another one was written since.
    UnguardedPlan,
    /// A part is removed when its snapshot is not the newest any more.
    EagerRemoval,
    /// Each machine keeps only its newest part in the replica.
    ReplicaForgetsWhole,
    /// A machine sends its newest part to the replica, not the one that is wanted there.
    SendsItsNewest,
    /// A lost member is believed to have ended its job, although the coordinator may end leases early.
    GoneIsOver,
    /// The machines are not told that the job must never start from the beginning again.
    ColdStartIgnored,
}

/// All of them.
pub(super) const ALL: [Plant; 14] = [
    Plant::LostFence,
    Plant::LeaseFromTheAnswer,
    Plant::CommitBeforeStored,
    Plant::CableInTooEarly,
    Plant::CableOutTooLate,
    Plant::CableOutBeforeLocked,
    Plant::MixedParts,
    Plant::LostAbort,
    Plant::UnguardedPlan,
    Plant::EagerRemoval,
    Plant::ReplicaForgetsWhole,
    Plant::SendsItsNewest,
    Plant::GoneIsOver,
    Plant::ColdStartIgnored,
];
