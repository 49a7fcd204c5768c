//! What has shown that an image can be restored, on its way to the store ([`rekindle_store::JobFolder::evidence`]).
//!
//! What cannot be written is tried again, also after the life that it was found in. If the supervisor is killed before, the
//! image counts as only taken, which is what is known then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Setup;
use rekindle_base::chain;
use rekindle_store::{Evidence, ImageId};

/// Evidence that could not be written is tried again after this time.
const AGAIN: Duration = Duration::from_secs(10);

/// Evidence that is not written yet, and when to try again.
#[derive(Debug, Default)]
pub(super) struct Unwritten {
    found: BTreeMap<ImageId, Evidence>,
    again: Option<Instant>,
}

impl Unwritten {
    /// Takes what is to be written now, if anything is due.
    fn due(&mut self, now: Instant) -> Option<BTreeMap<ImageId, Evidence>> {
        self.again.take_if(|again| *again <= now).map(|_| std::mem::take(&mut self.found))
    }

    /// To be written from now on. More evidence replaces less.
    fn add(&mut self, found: impl IntoIterator<Item = (ImageId, Evidence)>, at: Instant) {
        for (image, evidence) in found {
            let known = self.found.entry(image).or_default();
            *known = evidence.max(*known);
        }
        self.again = Some(at);
    }

    /// When the next try is due.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.again
    }

    // ---- with the store ----

    /// An image was rehearsed or restored.
    pub(super) fn note(&mut self, image: ImageId, evidence: Evidence, setup: &Setup, now: Instant) {
        self.add([(image, evidence)], now);
        self.write(setup, now);
    }

    /// Writes what is due.
    pub(super) fn write(&mut self, setup: &Setup, now: Instant) {
        let Some(found) = self.due(now) else { return };
        if let Err(error) = setup.folder.note_evidence(&setup.lock, &found) {
            tracing::warn!("cannot record which images were rehearsed or restored: {}", chain(&error));
            self.add(found, now + AGAIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evidence_that_could_not_be_written_is_not_forgotten() {
        let (now, id) = (Instant::now(), |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH));
        let mut unwritten = Unwritten::default();
        assert_eq!((unwritten.next_wake(), unwritten.due(now)), (None, None));
        unwritten.add([(id(1), Evidence::Restored)], now);
        let found = unwritten.due(now).unwrap();
        assert_eq!(unwritten.due(now), None, "once");
        // Writing it failed.
        unwritten.add(found, now + AGAIN);
        assert_eq!((unwritten.next_wake(), unwritten.due(now)), (Some(now + AGAIN), None), "not all the time");
        unwritten.add([(id(1), Evidence::Rehearsed), (id(2), Evidence::Rehearsed)], now);
        let all = BTreeMap::from([(id(1), Evidence::Restored), (id(2), Evidence::Rehearsed)]);
        assert_eq!(unwritten.due(now), Some(all));
    }
}
