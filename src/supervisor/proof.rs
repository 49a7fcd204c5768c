//! Which images the job has lived on from for long enough: those are proven ([`crate::store::JobFolder::proven`]).

use std::time::{Duration, Instant};

use super::Owner;
use super::state::State;
use crate::store::ImageId;
use crate::sys::spawn::Ended;
use crate::telemetry::log::chain;

/// Images of this life that are not proven yet, and from when on each has to be lived on.
#[derive(Debug, Default)]
pub(super) struct Proofs(Vec<(ImageId, Instant)>);

impl Proofs {
    /// The job goes on from this image from now on.
    pub(super) fn wait_for(&mut self, image: ImageId, now: Instant) {
        self.0.push((image, now));
    }

    /// How long nothing has to be looked at, if the job lives.
    pub(super) fn patience(&self, min_uptime: Duration, now: Instant) -> Option<Duration> {
        self.0.iter().map(|(_, since)| (*since + min_uptime).saturating_duration_since(now)).min()
    }

    /// Takes those that were lived on for so long.
    pub(super) fn due(&mut self, min_uptime: Duration, now: Instant) -> Vec<ImageId> {
        let (due, rest) = self.0.iter().partition(|(_, since)| now.saturating_duration_since(*since) >= min_uptime);
        self.0 = rest;
        let due: Vec<(ImageId, Instant)> = due;
        due.into_iter().map(|(id, _)| id).collect()
    }
}

/// Whether the job lives on for reasons of its own in this state. One that is being killed does not.
pub(super) fn counts(state: &State, ended: Option<Ended>) -> bool {
    matches!(state, State::Running(_) | State::Snapshotting { .. }) && ended.is_none()
}

impl Owner<'_> {
    /// The job goes on from this image from now on: it was taken, or restored.
    pub(super) fn await_proof(&mut self, image: ImageId) {
        self.proofs.wait_for(image, Instant::now());
    }

    /// How long the job has to live until the next proof.
    pub(super) fn patience_for_proofs(&self) -> Option<Duration> {
        self.proofs.patience(self.shared.config.restart.min_uptime, Instant::now())
    }

    /// Notes what is proven by now.
    pub(super) fn mind_the_proofs(&mut self) {
        if counts(self.machine.state(), self.ended) {
            self.note_proofs();
        }
    }

    /// The life is over. What came too late to be proven by it is not.
    pub(super) fn end_of_proofs(&mut self) {
        self.note_proofs();
        self.proofs = Proofs::default();
    }

    fn note_proofs(&mut self) {
        let due = self.proofs.due(self.shared.config.restart.min_uptime, Instant::now());
        if due.is_empty() {
            return;
        }
        tracing::debug!(?due, "proven");
        if let Err(error) = self.shared.folder.note_proven(&self.shared.lock, due) {
            tracing::warn!("cannot note which images the job has lived on from: {}", chain(&error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_proven_by_a_life_that_is_long_enough_after_it() {
        let (now, min) = (Instant::now(), Duration::from_secs(30));
        let id = |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH);
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut proofs = Proofs(vec![(id(1), at(0)), (id(2), at(20))]);
        assert_eq!(proofs.patience(min, at(10)), Some(Duration::from_secs(20)));
        assert_eq!(proofs.due(min, at(29)), []);
        assert_eq!(proofs.due(min, at(30)), [id(1)]);
        assert_eq!(proofs.due(min, at(30)), [], "once");
        assert_eq!(proofs.patience(min, at(30)), Some(Duration::from_secs(20)));
        assert_eq!(proofs.due(min, at(90)), [id(2)]);
        assert_eq!(proofs.patience(min, at(90)), None);
    }
}
