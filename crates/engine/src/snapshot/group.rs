//! A snapshot of one member of a group: it waits for the others, and takes its cable out.

use super::barrier::Settled;
use super::phases::{Freeze, Frozen};
use super::{Env, Error};
use rekindle_base::chain;

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
