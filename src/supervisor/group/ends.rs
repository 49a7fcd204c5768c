//! The end of the job, as the group is told of it, and the end of the run, as the group orders it.

use std::fmt;

use signal_hook::consts::SIGTERM;

use crate::policy::{self, Death};
use crate::supervisor::Owner;
use crate::supervisor::state::{Event, Finish, Obstacle, State, Stop, Verdict};
use rekindle_group::{End, Ending, Fault, Last, Local};
use rekindle_os::spawn::Ended;

impl Owner<'_> {
    /// The job has ended, and this was decided about it. It is reported once nothing of it is left, so not in the middle
    /// of a snapshot.
    pub(in crate::supervisor) fn group_ended(&mut self, ended: Ended, verdict: Option<Verdict>, death: Death) {
        if !matches!(self.machine.state(), State::Idle | State::Suspended { .. }) {
            return;
        }
        let last = Some(match (ended, &verdict) {
            (_, Some(Verdict::Died(signal))) => Last::Signal(*signal),
            (Ended::Exit(code), _) => Last::Exit(code),
            (Ended::Signal(signal), _) => Last::Signal(signal),
        });
        let fault = fault(death);
        let never = policy::never_again(ended).filter(|_| verdict.is_none());
        let ending = match (ended, verdict, never) {
            (Ended::Exit(0), None, _) => Ending::Completed,
            (_, Some(Verdict::GiveUp { why }), _) | (_, None, Some(why)) => Ending::GivenUp { why: why.into(), last },
            (ended, None, None) => Ending::Failed { why: format!("the job ended: {ended}").into(), last, fault },
            (_, Some(verdict), _) => {
                // The request comes first: the group must not restart the job otherwise.
                match &verdict {
                    Verdict::Stop => self.step(Event::Stop(Stop::Requeue)),
                    Verdict::Rewind(image) => self.step(Event::Rewind { image: *image }),
                    _ => {}
                }
                Ending::Failed { why: verdict.in_words().into(), last, fault }
            }
        };
        self.report_to_group(Local::Ended(ending));
    }
}

/// What the group is told to be at fault.
fn fault(death: Death) -> Fault {
    match death {
        Death::Lost => Fault::Snapshot,
        death if policy::is_from_outside(death) => Fault::Outside,
        _ => Fault::Job,
    }
}

/// The end of this run; `stop` was requested here.
pub(super) fn finish(end: End, stop: Option<Stop>) -> Finish {
    match end {
        End::Completed => Finish::Completed,
        End::Stopped { requeue: true } => Finish::Stopped(Stop::Requeue),
        End::Stopped { requeue: false } => {
            Finish::Stopped(stop.filter(|stop| *stop != Stop::Requeue).unwrap_or(Stop::Signal(SIGTERM)))
        }
        End::Missing { why } => queued_again(why),
        End::Failed { why, last } => {
            let last = last.map(|last| match last {
                Last::Exit(code) => Ended::Exit(code),
                Last::Signal(signal) => Ended::Signal(signal),
            });
            Finish::Failed { why: why.to_string(), last }
        }
        End::Refused { .. } => Finish::Impossible { why: end.to_string(), obstacle: Obstacle::Configuration },
        End::Misfit { .. } => Finish::Impossible { why: end.to_string(), obstacle: Obstacle::Machine },
    }
}

/// The end of a run that has waited for something that another run may find.
pub(super) fn queued_again(why: impl fmt::Display) -> Finish {
    tracing::error!("the group's run ends, to be queued again: {why}");
    Finish::Stopped(Stop::Requeue)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Occupied;

    #[test]
    fn a_group_is_told_what_is_at_fault() {
        for (death, expected) in [
            (Death::Ended(Ended::Exit(1)), Fault::Job),
            (Death::Ended(Ended::Signal(libc::SIGSEGV)), Fault::Job),
            (Death::Ended(Ended::Signal(libc::SIGKILL)), Fault::Outside),
            (Death::Excused(Ended::Exit(1)), Fault::Outside),
            (Death::Outside(Ended::Signal(libc::SIGSEGV), Occupied::ByTheDead), Fault::Outside),
            (Death::Judged, Fault::Job),
            (Death::Hung, Fault::Job),
            (Death::Lost, Fault::Snapshot),
        ] {
            assert_eq!(fault(death), expected, "{death:?}");
        }
    }
}
