//! Where the snapshot of a member of a group waits for the others.

use std::fmt::Debug;

use crate::parts::gpu::capture::Elsewhere;
use rekindle_store::ImageId;
use rekindle_store::manifest::GroupPart;

/// The other members of a group. The methods that can fail report how far this member is, and return when all are that far.
///
/// # Errors
/// Why the group does not take this snapshot, in words. The snapshot is then undone.
pub trait Barrier: Elsewhere + Sync + Debug {
    /// What the manifest says about the group image.
    fn part(&self) -> GroupPart;

    /// Why the group does not take this snapshot any more, if it has said so before it is waited for.
    fn called_off(&self) -> Option<String>;

    /// The job is locked; its cable is in, because other members may need data that is on its way.
    fn locked(&self) -> Result<(), String>;

    /// The cable is out.
    fn quiet(&self) -> Result<(), String>;

    /// The GPU memory of this machine is restored, or it has none. Tells it, and returns whether that of all is; does not
    /// wait. Nothing depends on it but the time at which the job runs on.
    fn restored(&self) -> bool;

    /// The job is dumped and runs on, with the cable out. This image is complete, but is not published.
    fn dumped(&self, image: ImageId) -> Result<Settled, String>;

    /// Whether the others wait in the middle of this snapshot, so that it cannot be begun again.
    fn all_wait(&self) -> bool;
}

/// What the group does after all members have dumped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The job continues: its cable is plugged in.
    RunOn,
    /// The job is being ended: its cable stays out.
    End,
}
