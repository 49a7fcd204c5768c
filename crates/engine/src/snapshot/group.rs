//! A snapshot of one member of a group: where it waits for the others, and its cable.

use std::fmt::Debug;

use super::phases::{Freeze, Frozen};
use super::{Env, Error};
use crate::parts::gpu::capture::Elsewhere;
use rekindle_base::chain;
use rekindle_store::ImageId;
use rekindle_store::manifest::GroupPart;

/// The other members of a group. Each method reports how far this member is, and returns when all are that far.
///
/// # Errors
/// Why the group does not take this snapshot, in words. The snapshot is then undone.
pub trait Barrier: Elsewhere + Sync + Debug {
    /// What the manifest says about the group image.
    fn part(&self) -> GroupPart;

    /// Why the group does not take this snapshot any more, if it says so before all are locked.
    fn called_off(&self) -> Option<String>;

    /// The job is locked; its cable is in, because other members may need data that is on its way.
    fn locked(&self) -> Result<(), String>;

    /// The cable is out.
    fn quiet(&self) -> Result<(), String>;

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

impl Env<'_> {
    pub(super) fn is_in_group(&self) -> bool {
        self.subject.group.is_some()
    }
}

impl Freeze<'_> {
    pub(super) fn wait_for_locks(&mut self) -> Result<(), Error> {
        self.env.subject.group.map_or(Ok(()), |group| group.locked().map_err(Error::Group))
    }

    pub(super) fn pull_cable(&mut self) -> Result<(), Error> {
        let subject = self.env.subject;
        let Some(group) = subject.group else { return Ok(()) };
        // A job that has no cable has no connections to the others either.
        self.cable = subject.job.world.cable().map(|cable| cable.unplug()).transpose()?;
        group.quiet().map_err(Error::Group)
    }

    pub(super) fn plug_cable(&mut self) -> Result<(), String> {
        self.cable.take().map_or(Ok(()), |cable| cable.plug().map_err(|error| chain(&error)))
    }
}

impl Frozen<'_> {
    /// Waits until all members have dumped. If this fails, the cable is plugged in when `self` is dropped.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        let Some(group) = self.env.subject.group else { return Ok(()) };
        match group.dumped(self.ready.target.id()).map_err(Error::Group)? {
            Settled::RunOn => self.cable.take().map_or(Ok(()), |cable| Ok(cable.plug()?)),
            Settled::End => {
                self.cable.take().into_iter().for_each(|cable| cable.leave_out());
                Ok(())
            }
        }
    }
}
