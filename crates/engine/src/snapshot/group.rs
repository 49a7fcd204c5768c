//! A snapshot of one member of a group: it waits for the others, and takes its cable out.

use std::time::{Duration, Instant};

use super::barrier::Settled;
use super::phases::{Freeze, Frozen};
use super::{Env, Error};
use rekindle_base::chain;

/// How long a member that has restored its GPU memory waits for the others. Members of one size dump and restore in the same
/// time; four on one host were 4 to 6 s apart while kernels waited. The job is frozen meanwhile, and a member that is later
/// may have lost its coordinator: then it cannot tell.
///
/// The leader's patience for the dumps is not violated. A member that waits here is ready before the one that the leader waits
/// for anyway; and if that one was ready and its word was lost, this is less than the 30 s by which the patience is longer
/// than a dump may take.
const FOR_THE_OTHERS: Duration = Duration::from_secs(10);

/// How often to look whether they are ready.
const NAP: Duration = Duration::from_millis(2);

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

    /// Tells that this member has its GPU memory.
    pub(super) fn tell_restored(&self) {
        if let Some(group) = self.env.subject.group {
            group.restored();
        }
    }

    /// Waits until the GPU memory of all members is restored. Ranks that run before would only wait for the others on their
    /// GPUs. If the members have GPUs of one host, the driver is one for all, and while kernels wait it does not get on
    /// with the other restores: after 4 to 6 s it ends the waiting process (Xid 109; driver 580, measured).
    ///
    /// This is a help, and not needed for an image: it never fails.
    pub(super) fn wait_for_restores(&self) {
        let Some(group) = self.env.subject.group else { return };
        let root = &self.env.subject.job.root;
        let is_over = || (self.env.cancelled)() || group.called_off().is_some() || root.has_ended().unwrap_or(true);
        match wait(FOR_THE_OTHERS, || group.restored(), is_over) {
            Waited::Done | Waited::Over => {}
            Waited::TooLong => tracing::info!(
                "the job runs on, although not all machines have told within {} that their GPU memory is restored",
                humantime::format_duration(FOR_THE_OTHERS)
            ),
        }
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

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waited {
    Done,
    /// It has become useless.
    Over,
    TooLong,
}

fn wait(limit: Duration, is_done: impl Fn() -> bool, is_over: impl Fn() -> bool) -> Waited {
    let end = Instant::now() + limit;
    loop {
        // First: it also tells the others.
        if is_done() {
            return Waited::Done;
        }
        if is_over() {
            return Waited::Over;
        }
        if Instant::now() >= end {
            return Waited::TooLong;
        }
        std::thread::sleep(NAP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_wait_for_the_others_ends_when_they_are_ready_or_it_is_useless_or_too_long() {
        let long = Duration::from_secs(3600);
        let asked = Cell::new(0);
        let after_three = || {
            asked.set(asked.get() + 1);
            asked.get() > 3
        };
        assert_eq!(wait(long, after_three, || false), Waited::Done);
        assert_eq!(asked.replace(0), 4);
        assert_eq!(wait(long, || false, after_three), Waited::Over);
        assert_eq!(wait(NAP, || false, || false), Waited::TooLong);
        let told = Cell::new(false);
        let tell = || !told.replace(true);
        assert_eq!(wait(long, tell, || true), Waited::Done, "it is told in any case");
    }
}
