//! Images that are proven, because the job has lived long enough after they were taken or restored
//! ([`rekindle_store::JobFolder::proven`]). Where the job is watched for hangs, each activity that it is watched for must
//! have been seen since then: otherwise a job that hangs would prove the images of its hang.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Setup;
use super::state::State;
use rekindle_base::cause::Missing;
use rekindle_base::chain;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

/// A proof that could not be written is tried again after this time.
const AGAIN: Duration = Duration::from_secs(10);

/// Images that are not proven yet, and proofs that could not be written.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    /// The activities that the job is watched for. A job that hangs lives on, and proves nothing by that.
    watched: Vec<Missing>,
    /// Images of this life.
    waiting: Vec<Waiting>,
    /// Proven images that are not written yet, and when to try again.
    unwritten: Option<(Vec<ImageId>, Instant)>,
}

/// An image of this life that is not proven yet.
#[derive(Debug)]
struct Waiting {
    image: ImageId,
    /// Since when the job has lived on from it.
    since: Instant,
    /// Number of the last start of the clocks before that.
    after: u64,
    /// The activities that were not seen since then.
    unseen: Vec<Missing>,
}

impl Proofs {
    /// `watched` are the activities whose absence is a hang.
    pub(super) fn new(watched: Vec<Missing>) -> Proofs {
        Proofs { watched, ..Proofs::default() }
    }

    /// The job has continued from this image since `now`. The clocks of the watch have been started so often.
    pub(super) fn wait_for(&mut self, image: ImageId, starts: u64, now: Instant) {
        self.waiting.push(Waiting { image, since: now, after: starts, unseen: self.watched.clone() });
    }

    /// This activity was seen after that start of the clocks.
    pub(super) fn moves(&mut self, start: u64, what: Missing) {
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.after < start) {
            waiting.unseen.retain(|other| *other != what);
        }
    }

    /// The images of this life since which this activity was not seen.
    pub(super) fn since_last(&self, what: Missing) -> BTreeSet<ImageId> {
        self.waiting.iter().filter(|waiting| waiting.unseen.contains(&what)).map(|waiting| waiting.image).collect()
    }

    /// Images that this life may prove, oldest first; before them proven images that are not written yet.
    pub(super) fn waiting(&self) -> Vec<ImageId> {
        let unwritten = self.unwritten.iter().flat_map(|(images, _)| images);
        unwritten.chain(self.waiting.iter().map(|waiting| &waiting.image)).copied().collect()
    }

    /// The life is over. Images that were too late are not proven by it.
    pub(super) fn end_of_life(&mut self) {
        self.waiting.clear();
    }

    /// Writing these failed.
    pub(super) fn not_written(&mut self, images: Vec<ImageId>, now: Instant) {
        self.unwritten = Some((images, now + AGAIN));
    }

    /// When the next proof is due, if the job lives until then.
    pub(super) fn next_wake(&self, min_uptime: Duration) -> Option<Instant> {
        let waiting = self.waiting.iter().filter(|waiting| waiting.unseen.is_empty());
        let waiting = waiting.map(|waiting| waiting.since + min_uptime);
        waiting.chain(self.unwritten.as_ref().map(|(_, again)| *again)).min()
    }

    /// Takes the images that are proven now.
    pub(super) fn due(&mut self, min_uptime: Duration, now: Instant) -> Vec<ImageId> {
        let (due, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting).into_iter().partition(|waiting| {
            waiting.unseen.is_empty() && now.saturating_duration_since(waiting.since) >= min_uptime
        });
        self.waiting = rest;
        let before = self.unwritten.take_if(|(_, again)| *again <= now || !due.is_empty());
        let before = before.map(|(images, _)| images).unwrap_or_default();
        before.into_iter().chain(due.into_iter().map(|waiting| waiting.image)).collect()
    }
}

/// Whether time in this state counts for a proof. It does not while the job is being killed.
pub(super) fn counts(state: &State, ended: Option<Ended>) -> bool {
    matches!(state, State::Running(_) | State::Snapshotting { .. }) && ended.is_none()
}

// ---- with the store ----

impl Proofs {
    /// The job continues from this image, which was taken or restored just now.
    pub(super) fn expect(&mut self, image: ImageId, starts: u64, setup: &Setup, now: Instant) {
        self.wait_for(image, starts, now);
        setup.lock.wait_for_proof(self.waiting());
    }

    /// The job is alive: records the images that are proven by that.
    pub(super) fn note(&mut self, setup: &Setup, now: Instant) {
        let due = self.due(setup.config.restart.min_uptime, now);
        if due.is_empty() {
            return;
        }
        tracing::debug!(?due, "proven");
        if let Err(error) = setup.folder.note_proven(&setup.lock, due.iter().copied()) {
            tracing::warn!("cannot record which images are proven: {}", chain(&error));
            self.not_written(due, Instant::now());
        }
        setup.lock.wait_for_proof(self.waiting());
    }

    /// The life is over.
    pub(super) fn life_ends(&mut self, setup: &Setup, now: Instant) {
        self.note(setup, now);
        self.end_of_life();
        setup.lock.wait_for_proof(self.waiting());
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
        proofs.wait_for(id(1), 0, at(0));
        proofs.wait_for(id(2), 0, at(20));
        assert_eq!(proofs.next_wake(min), Some(at(30)));
        assert_eq!(proofs.due(min, at(29)), []);
        assert_eq!(proofs.due(min, at(30)), [id(1)]);
        assert_eq!(proofs.due(min, at(30)), [], "once");
        assert_eq!(proofs.next_wake(min), Some(at(50)));
        assert_eq!(proofs.due(min, at(90)), [id(2)]);
        assert_eq!(proofs.next_wake(min), None);
    }

    #[test]
    fn a_job_that_hangs_proves_nothing() {
        let (now, min) = (Instant::now(), Duration::from_secs(30));
        let id = |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH);
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut proofs = Proofs::new(vec![Missing::Output, Missing::Work]);
        proofs.wait_for(id(1), 1, at(0));
        // Reported late: it was before the image.
        proofs.moves(1, Missing::Output);
        assert_eq!(proofs.due(min, at(900)), []);
        assert_eq!(proofs.next_wake(min), None, "nothing to wake up for");
        proofs.moves(2, Missing::Output);
        proofs.wait_for(id(2), 2, at(10));
        assert_eq!(proofs.due(min, at(900)), [], "it prints, and does not work");
        assert_eq!(proofs.since_last(Missing::Output), BTreeSet::from([id(2)]));
        assert_eq!(proofs.since_last(Missing::Work), BTreeSet::from([id(1), id(2)]));
        proofs.moves(2, Missing::Work);
        assert_eq!(proofs.due(min, at(900)), [id(1)]);
        assert_eq!(proofs.waiting(), [id(2)], "rotation keeps it");
    }

    #[test]
    fn a_proof_that_could_not_be_written_down_is_not_forgotten() {
        let (now, min) = (Instant::now(), Duration::from_secs(30));
        let id = |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH);
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut proofs = Proofs::default();
        proofs.wait_for(id(1), 0, at(0));
        let due = proofs.due(min, at(30));
        proofs.not_written(due, at(30));
        // Independent of whether the life continues.
        proofs.end_of_life();
        assert_eq!(proofs.waiting(), [id(1)], "rotation keeps it for so long");
        assert_eq!(proofs.due(min, at(39)), [], "not all the time");
        assert_eq!(proofs.next_wake(min), Some(at(40)));
        assert_eq!(proofs.due(min, at(40)), [id(1)]);
        assert_eq!(proofs.next_wake(min), None);
        // Together with the next one that is due.
        proofs.not_written(vec![id(1)], at(50));
        proofs.wait_for(id(2), 0, at(22));
        assert_eq!(proofs.due(min, at(52)), [id(1), id(2)]);
    }
}
