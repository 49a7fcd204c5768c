//! Which images the job has lived on from for long enough: those are proven ([`rekindle_store::JobFolder::proven`]).

use std::time::{Duration, Instant};

use super::Owner;
use super::state::State;
use rekindle_base::chain;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

/// A proof that could not be written down is tried again after this time.
const AGAIN: Duration = Duration::from_secs(10);

/// Images that are not proven yet, and what could not be written down of those that are.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    /// Images of this life, and from when on each has to be lived on.
    waiting: Vec<(ImageId, Instant)>,
    /// Those that were lived on, and when to try again to write that down.
    unwritten: Option<(Vec<ImageId>, Instant)>,
}

impl Proofs {
    /// The job goes on from this image from now on.
    pub(super) fn wait_for(&mut self, image: ImageId, now: Instant) {
        self.waiting.push((image, now));
    }

    /// Those that this life may prove, the oldest first, and before them what is proven and not written down.
    pub(super) fn waiting(&self) -> Vec<ImageId> {
        let unwritten = self.unwritten.iter().flat_map(|(images, _)| images);
        unwritten.chain(self.waiting.iter().map(|(id, _)| id)).copied().collect()
    }

    /// The life is over. What came too late to be proven by it is not.
    pub(super) fn end_of_life(&mut self) {
        self.waiting.clear();
    }

    /// These could not be written down.
    pub(super) fn not_written(&mut self, images: Vec<ImageId>, now: Instant) {
        self.unwritten = Some((images, now + AGAIN));
    }

    /// How long nothing has to be looked at, if the job lives.
    pub(super) fn patience(&self, min_uptime: Duration, now: Instant) -> Option<Duration> {
        let waiting = self.waiting.iter().map(|(_, since)| *since + min_uptime);
        let next = waiting.chain(self.unwritten.as_ref().map(|(_, again)| *again)).min();
        next.map(|at| at.saturating_duration_since(now))
    }

    /// Takes those that were lived on for so long.
    pub(super) fn due(&mut self, min_uptime: Duration, now: Instant) -> Vec<ImageId> {
        let (due, rest): (Vec<_>, Vec<_>) =
            self.waiting.iter().partition(|(_, since)| now.saturating_duration_since(*since) >= min_uptime);
        self.waiting = rest;
        let before = self.unwritten.take_if(|(_, again)| *again <= now || !due.is_empty());
        let before = before.map(|(images, _)| images).unwrap_or_default();
        before.into_iter().chain(due.into_iter().map(|(id, _)| id)).collect()
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
        self.shared.lock.wait_for_proof(self.proofs.waiting());
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
        self.proofs.end_of_life();
        self.shared.lock.wait_for_proof(self.proofs.waiting());
    }

    fn note_proofs(&mut self) {
        let due = self.proofs.due(self.shared.config.restart.min_uptime, Instant::now());
        if due.is_empty() {
            return;
        }
        tracing::debug!(?due, "proven");
        if let Err(error) = self.shared.folder.note_proven(&self.shared.lock, due.iter().copied()) {
            tracing::warn!("cannot note which images the job has lived on from: {}", chain(&error));
            self.proofs.not_written(due, Instant::now());
        }
        self.shared.lock.wait_for_proof(self.proofs.waiting());
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
        let mut proofs = Proofs::default();
        proofs.wait_for(id(1), at(0));
        proofs.wait_for(id(2), at(20));
        assert_eq!(proofs.patience(min, at(10)), Some(Duration::from_secs(20)));
        assert_eq!(proofs.due(min, at(29)), []);
        assert_eq!(proofs.due(min, at(30)), [id(1)]);
        assert_eq!(proofs.due(min, at(30)), [], "once");
        assert_eq!(proofs.patience(min, at(30)), Some(Duration::from_secs(20)));
        assert_eq!(proofs.due(min, at(90)), [id(2)]);
        assert_eq!(proofs.patience(min, at(90)), None);
    }

    #[test]
    fn a_proof_that_could_not_be_written_down_is_not_forgotten() {
        let (now, min) = (Instant::now(), Duration::from_secs(30));
        let id = |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH);
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut proofs = Proofs::default();
        proofs.wait_for(id(1), at(0));
        let due = proofs.due(min, at(30));
        proofs.not_written(due, at(30));
        // Whether the life goes on or not.
        proofs.end_of_life();
        assert_eq!(proofs.waiting(), [id(1)], "rotation keeps it for so long");
        assert_eq!(proofs.due(min, at(39)), [], "not all the time");
        assert_eq!(proofs.patience(min, at(39)), Some(Duration::from_secs(1)));
        assert_eq!(proofs.due(min, at(40)), [id(1)]);
        assert_eq!(proofs.patience(min, at(40)), None);
        // With the next one that is due.
        proofs.not_written(vec![id(1)], at(50));
        proofs.wait_for(id(2), at(22));
        assert_eq!(proofs.due(min, at(52)), [id(1), id(2)]);
    }
}
