//! Checks of images: whether the job lives on after them, and whether they can be restored. None of it affects the job.

use std::time::{Duration, Instant};

use super::Setup;
use super::evidence::Unwritten;
use super::images::LOOK;
use super::proof::{Proofs, counts};
use super::rehearse::Rehearsals;
use super::state::State;
use rekindle_os::spawn::Ended;

/// Proofs and rehearsals.
pub(super) struct Checks {
    pub(super) proofs: Proofs,
    pub(super) rehearsals: Rehearsals,
    pub(super) evidence: Unwritten,
    /// When to look next whether memory is short.
    memory: Instant,
}

impl Checks {
    pub(super) fn new(setup: &Setup) -> Checks {
        let rehearsals = Rehearsals::new(setup.config.snapshot.rehearse.limit());
        Checks {
            proofs: Proofs::new(setup.config.watch.watched()),
            rehearsals,
            evidence: Unwritten::default(),
            memory: Instant::now() + LOOK,
        }
    }

    /// Whether it is time to look if memory is short. Not only when nothing else happens: a job may send requests all the
    /// time.
    pub(super) fn looks_at_memory(&mut self, now: Instant) -> bool {
        let is_due = self.memory <= now;
        if is_due {
            self.memory = now + LOOK;
        }
        is_due
    }

    pub(super) fn next_look_at_memory(&self) -> Instant {
        self.memory
    }

    /// Records which images are proven by now.
    pub(super) fn note_proofs(&mut self, setup: &Setup, state: &State, ended: Option<Ended>, now: Instant) {
        if counts(state, ended) {
            self.proofs.note(setup, now);
        }
    }

    /// The run ends: cancels what is in progress.
    pub(super) fn close(&mut self) {
        self.rehearsals.close();
    }

    /// A proof is recorded only while the job lives: the end of a job does not wait for one.
    pub(super) fn next_wake(&self, min_uptime: Duration, state: &State, ended: Option<Ended>) -> Option<Instant> {
        let proofs = self.proofs.next_wake(min_uptime).filter(|_| counts(state, ended));
        proofs.into_iter().chain(self.rehearsals.next_wake()).chain(self.evidence.next_wake()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::StartPoint;
    use crate::supervisor::state::{Ending, Life, Stop};
    use rekindle_store::ImageId;

    fn checks(now: Instant) -> Checks {
        Checks {
            proofs: Proofs::default(),
            rehearsals: Rehearsals::new(None),
            evidence: Unwritten::default(),
            memory: now,
        }
    }

    #[test]
    fn memory_is_looked_at_however_often_messages_come() {
        let (mut now, mut looks) = (Instant::now(), 0);
        let mut checks = checks(now);
        for _ in 0..100 {
            looks += u32::from(checks.looks_at_memory(now));
            assert!(checks.next_look_at_memory() > now && checks.next_look_at_memory() <= now + LOOK);
            now += Duration::from_millis(100);
        }
        assert_eq!(looks, 5);
    }

    #[test]
    fn a_proof_that_falls_due_while_the_job_ends_is_not_waited_for() {
        let (now, min) = (Instant::now(), Duration::from_secs(30));
        let mut checks = checks(now);
        checks.proofs.wait_for(ImageId::new(1, chrono::DateTime::UNIX_EPOCH), 0, now);
        let life = Life { from: StartPoint::Cold, since: now, next: None, failures: 0, missed: 0 };
        let ending = State::Ending { stop: Ending::Stop(Stop::Requeue), deadline: None, life: life.clone() };
        let running = State::Running(life);
        assert_eq!(checks.next_wake(min, &running, None), Some(now + min));
        assert_eq!(checks.next_wake(min, &ending, None), None, "the wait would be over at once, again and again");
        assert_eq!(checks.next_wake(min, &running, Some(Ended::Exit(0))), None);
    }
}
