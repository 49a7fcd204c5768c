//! How much of the time was useful work: the goodput of this supervisor.
//!
//! Useful is the time that the job ran, without its freezes and without what it did twice. What it did is done twice when it is
//! brought back: from then on it stands where it stood at that image. An image from before this supervisor stands at nothing,
//! because what was done before is not counted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::store::ImageId;

/// Of images whose place is known.
const MOST: usize = 4096;

#[derive(Debug, Clone)]
pub(super) struct Work {
    begun: Instant,
    /// Useful until this life began, or until it ended where none runs.
    done: Duration,
    life: Option<Life>,
    /// How much was done at each image.
    images: BTreeMap<ImageId, Duration>,
    lost: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Life {
    since: Instant,
    frozen: Duration,
}

impl Work {
    pub(super) fn new(now: Instant) -> Work {
        Work { begun: now, done: Duration::ZERO, life: None, images: BTreeMap::new(), lost: Duration::ZERO }
    }

    pub(super) fn started(&mut self, image: Option<ImageId>, now: Instant) {
        self.goes_back(image);
        self.life = Some(Life { since: now, frozen: Duration::ZERO });
    }

    pub(super) fn taken(&mut self, image: ImageId, freeze: Duration, now: Instant) {
        self.life.iter_mut().for_each(|life| life.frozen += freeze);
        self.images.insert(image, self.useful(now));
        while self.images.len() > MOST {
            self.images.pop_first();
        }
    }

    pub(super) fn ended(&mut self, now: Instant) {
        self.done = self.useful(now);
        self.life = None;
    }

    /// It will stand where it stood at this image, or at its beginning.
    pub(super) fn goes_back(&mut self, image: Option<ImageId>) {
        let place = image.and_then(|image| self.images.get(&image).copied()).unwrap_or_default();
        self.lost += self.done.saturating_sub(place);
        self.done = place;
    }

    /// Useful so far.
    pub(super) fn useful(&self, now: Instant) -> Duration {
        let life = self.life.map(|life| now.saturating_duration_since(life.since).saturating_sub(life.frozen));
        self.done + life.unwrap_or_default()
    }

    /// Done and done again.
    pub(super) fn lost(&self) -> Duration {
        self.lost
    }

    /// The share of the time that was useful, from 0 to 1.
    pub(super) fn goodput(&self, now: Instant) -> f64 {
        let all = now.saturating_duration_since(self.begun).as_secs_f64();
        if all > 0.0 { (self.useful(now).as_secs_f64() / all).min(1.0) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(n: u32) -> ImageId {
        ImageId::new(n, chrono::DateTime::UNIX_EPOCH)
    }

    #[test]
    fn what_is_done_twice_and_freezes_are_not_useful() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let seconds = Duration::from_secs;
        let mut work = Work::new(begun);
        work.started(None, at(10));
        work.taken(image(1), seconds(2), at(32));
        assert_eq!(work.useful(at(32)), seconds(20));
        work.taken(image(2), seconds(2), at(54));
        work.ended(at(64));
        assert_eq!(work.useful(at(70)), seconds(50));
        work.goes_back(Some(image(2)));
        assert_eq!((work.useful(at(70)), work.lost()), (seconds(40), seconds(10)));
        work.started(Some(image(2)), at(70));
        // A second time from the same image costs nothing more than what was done since.
        assert_eq!(work.lost(), seconds(10));
        work.ended(at(80));
        work.started(Some(image(1)), at(100));
        assert_eq!((work.useful(at(100)), work.lost()), (seconds(20), seconds(40)));
        assert!((work.goodput(at(200)) - 0.6).abs() < 1e-9);
    }

    #[test]
    fn what_was_before_this_supervisor_is_not_counted() {
        let begun = Instant::now();
        let mut work = Work::new(begun);
        work.started(Some(image(7)), begun);
        assert_eq!((work.useful(begun), work.lost()), (Duration::ZERO, Duration::ZERO));
        assert!(work.goodput(begun).abs() < 1e-9);
        work.ended(begun + Duration::from_secs(5));
        work.started(Some(image(7)), begun + Duration::from_secs(6));
        assert_eq!(work.lost(), Duration::from_secs(5));
    }
}
