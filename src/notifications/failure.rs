//! Decides which events are failures to be reported.

use std::time::Duration;

use serde::Serialize;

use crate::telemetry::events::What;
use rekindle_base::cause::Cause;

/// The kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Failure {
    /// The job ended with an error. Later events say what happens next.
    JobEnded,
    /// The job cannot continue after a snapshot.
    JobLost,
    /// [`IN_A_ROW`] snapshots failed in a row.
    SnapshotsFail,
    /// The job makes no progress.
    Hung,
    /// A GPU that the job uses has a fault.
    GpuFault,
    /// An image cannot be used any more.
    ImageBad,
    /// Content of the store is damaged, or the disk cannot read it.
    StoreDamaged,
    /// An image could not be restored in a rehearsal.
    RehearsalFailed,
    /// A machine of the group is lost.
    MemberLost,
    /// The job was given up.
    GivenUp,
}

impl Failure {
    /// A sentence about the event.
    #[must_use]
    pub(crate) fn in_words(self, what: &What) -> String {
        match (self, what) {
            (Failure::JobLost, What::SnapshotFailed { why, .. }) => {
                format!("it cannot continue after a failed snapshot: {why}")
            }
            (_, What::SnapshotFailed { why, .. }) => format!("its snapshots fail: {why}"),
            (_, What::Ended { cause: Some(cause), .. }) => cause.to_string(),
            (_, What::Hung { what, idle_us, action, .. }) => {
                let idle = humantime::format_duration(Duration::from_secs(idle_us / 1_000_000));
                format!("it hangs: {what} for {idle} (action: {action})")
            }
            (_, What::GpuFault { gpu, words, .. }) => format!("GPU {gpu} has a fault: {words}"),
            (_, What::ImageBad { image, why }) => format!("image {image} is bad: {why}"),
            (_, What::RehearsalFailed { image, why }) => {
                format!("image {image} could not be restored in a rehearsal: {why}")
            }
            (_, What::StoreDamaged { why, .. }) => format!("its store is damaged: {why}"),
            (_, What::GroupMemberLost { machine }) => format!("its group has lost {machine}"),
            (_, What::Finished { why: Some(why), .. }) => format!("given up: {why}"),
            _ => "it failed".into(),
        }
    }
}

/// How many failed snapshots in a row are a failure: one or two may have a reason that passes.
const IN_A_ROW: u32 = 3;

/// Watches the events of a job.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    in_a_row: u32,
}

impl Failures {
    /// The failure that an event is, if it is one.
    pub(crate) fn hear(&mut self, what: &What) -> Option<Failure> {
        match what {
            What::SnapshotTaken { .. } => self.in_a_row = 0,
            What::SnapshotFailed { job_lost: true, .. } => return Some(Failure::JobLost),
            What::SnapshotFailed { .. } => {
                self.in_a_row = self.in_a_row.saturating_add(1);
                // Reported once, until a snapshot succeeds.
                return (self.in_a_row == IN_A_ROW).then_some(Failure::SnapshotsFail);
            }
            What::Ended { cause, .. } => return (!is_wanted(cause.as_ref())).then_some(Failure::JobEnded),
            What::Hung { .. } => return Some(Failure::Hung),
            What::GpuFault { follows: None, .. } => return Some(Failure::GpuFault),
            What::ImageBad { .. } => return Some(Failure::ImageBad),
            What::RehearsalFailed { .. } => return Some(Failure::RehearsalFailed),
            What::StoreDamaged { .. } => return Some(Failure::StoreDamaged),
            What::GroupMemberLost { .. } => return Some(Failure::MemberLost),
            What::Finished { outcome, .. } if outcome == "failed" => return Some(Failure::GivenUp),
            _ => {}
        }
        None
    }
}

/// Whether a life ended as intended.
fn is_wanted(cause: Option<&Cause>) -> bool {
    cause.is_some_and(Cause::is_wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::GroupMember;
    use rekindle_base::cause::Missing;
    use rekindle_base::notice::{Cloud, Kind};
    use rekindle_store::manifest::Reason;

    fn failed(job_lost: bool) -> What {
        What::SnapshotFailed { why: "no room".into(), job_lost }
    }

    fn taken() -> What {
        let image = "000001-20261121T100000Z".parse().unwrap();
        What::SnapshotTaken { image, reason: Reason::Interval, freeze_us: 1, phases: Vec::new(), bytes: 1 }
    }

    fn ended(cause: Cause) -> What {
        What::Ended { exit_code: None, signal: Some(9), cause: Some(cause) }
    }

    #[test]
    fn a_lost_machine_of_a_group_is_a_failure_and_a_restart_after_it_is_none() {
        let machine = GroupMember { rank: 2, host: Some("node-c".into()) };
        let (why, machines) = ("rank 2 is lost".into(), vec![machine.clone()]);
        let lost = machines.clone();
        let restart = What::GroupRestarting { number: None, image: None, epoch: 2, why, machines, lost };
        let loss = What::GroupMemberLost { machine };
        let mut failures = Failures::default();
        assert_eq!((failures.hear(&loss), failures.hear(&restart)), (Some(Failure::MemberLost), None));
        assert_eq!(Failure::MemberLost.in_words(&loss), "its group has lost rank 2 (node-c)");
        assert_eq!(serde_json::to_string(&Failure::MemberLost).unwrap(), "\"member-lost\"");
    }

    #[test]
    fn snapshots_that_fail_are_told_once_a_row() {
        let mut failures = Failures::default();
        let mut heard =
            |events: &[What]| -> Vec<bool> { events.iter().map(|it| failures.hear(it).is_some()).collect() };
        assert_eq!(heard(&[failed(false), failed(false), failed(false), failed(false)]), [false, false, true, false]);
        assert_eq!(heard(&[taken(), failed(false), failed(false), failed(false)]), [false, false, false, true]);
        assert_eq!(failures.hear(&failed(true)), Some(Failure::JobLost));
    }

    #[test]
    fn an_end_that_was_asked_for_or_went_well_is_no_failure() {
        let mut failures = Failures::default();
        let noticed = Cause::Interruption { cloud: Cloud::Google, notice: Kind::Preempt };
        for cause in [Cause::Completed, Cause::Requested, noticed, Cause::Suspended, Cause::Rewound] {
            assert_eq!(failures.hear(&ended(cause)), None);
        }
        let killed = ended(Cause::Signal { signal: 9 });
        assert_eq!(failures.hear(&killed), Some(Failure::JobEnded));
        assert_eq!(Failure::JobEnded.in_words(&killed), "signal SIGKILL ended it");
        assert_eq!(failures.hear(&ended(Cause::OutOfMemory)), Some(Failure::JobEnded));
        let finished =
            |outcome: &str| What::Finished { outcome: outcome.into(), exit_code: None, why: Some("enough".into()) };
        assert_eq!(failures.hear(&finished("stopped")), None);
        assert_eq!(failures.hear(&finished("failed")), Some(Failure::GivenUp));
        assert_eq!(Failure::GivenUp.in_words(&finished("failed")), "given up: enough");
        let hung = What::Hung { what: Missing::Output, idle_us: 60_000_000, stacks: None, action: "notify".into() };
        assert!(
            Failure::Hung.in_words(&hung).ends_with(" for 1m (action: notify)"),
            "{}",
            Failure::Hung.in_words(&hung)
        );
    }
}
