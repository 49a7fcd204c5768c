//! How much of the time was useful work: the goodput of this supervisor, by the definitions of docs/report.md.
//!
//! Useful time is the time that the job ran, without freezes and without repeated work. Work is repeated after a
//! restore: the job is then where it was at that image. An image from before this supervisor counts as zero, because
//! earlier work is not counted. Time in which the job should not run (suspended, or over) is not counted at all.
//!
//! [`History`](crate::report::history::History) computes the same from a whole journal, moment by moment; a supervisor
//! that runs for weeks keeps only sums. A test compares the two.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rekindle_store::ImageId;

/// Maximum number of images whose position is known.
const MOST: usize = 4096;

#[derive(Debug, Clone)]
pub(super) struct Work {
    begun: Instant,
    /// Useful time until this life began, or until it ended if none runs.
    done: Duration,
    now: Now,
    /// When the job ended, while the consequence is unknown.
    ended: Option<Instant>,
    /// How long it was not supposed to run, before now.
    idle: Duration,
    /// The useful time at each image.
    images: BTreeMap<ImageId, Duration>,
    lost: Duration,
}

#[derive(Debug, Clone, Copy)]
enum Now {
    Up {
        since: Instant,
        frozen: Duration,
    },
    Down,
    /// It is not supposed to run.
    Idle {
        since: Instant,
    },
}

impl Work {
    pub(super) fn new(now: Instant) -> Work {
        Work {
            begun: now,
            done: Duration::ZERO,
            now: Now::Down,
            ended: None,
            idle: Duration::ZERO,
            images: BTreeMap::new(),
            lost: Duration::ZERO,
        }
    }

    pub(super) fn started(&mut self, image: Option<ImageId>, now: Instant) {
        self.becomes(Now::Up { since: now, frozen: Duration::ZERO }, now);
        let place = image.and_then(|image| self.images.get(&image).copied()).unwrap_or_default();
        self.lost += self.done.saturating_sub(place);
        self.done = place;
        // Work between that image and later ones is lost for these too.
        self.images.values_mut().for_each(|later| *later = place.min(*later));
    }

    pub(super) fn taken(&mut self, image: ImageId, freeze: Duration, now: Instant) {
        if let Now::Up { frozen, .. } = &mut self.now {
            *frozen += freeze;
        }
        self.images.insert(image, self.useful(now));
        while self.images.len() > MOST {
            self.images.pop_first();
        }
    }

    pub(super) fn ended(&mut self, now: Instant) {
        self.becomes(Now::Down, now);
        self.ended = Some(now);
    }

    /// It will be restarted.
    pub(super) fn waits(&mut self, now: Instant) {
        self.becomes(Now::Down, now);
    }

    pub(super) fn suspended(&mut self, now: Instant) {
        self.becomes(Now::Idle { since: now }, now);
    }

    /// After its end it was not supposed to run: the last image was being stored.
    pub(super) fn finished(&mut self, now: Instant) {
        let since = self.ended.unwrap_or(now);
        self.becomes(Now::Idle { since }, now);
    }

    fn becomes(&mut self, next: Now, now: Instant) {
        (self.done, self.idle) = (self.useful(now), self.idle(now));
        (self.now, self.ended) = (next, None);
    }

    /// Useful time so far.
    pub(super) fn useful(&self, now: Instant) -> Duration {
        let Now::Up { since, frozen } = self.now else { return self.done };
        self.done + now.saturating_duration_since(since).saturating_sub(frozen)
    }

    /// Repeated work.
    pub(super) fn lost(&self) -> Duration {
        self.lost
    }

    fn idle(&self, now: Instant) -> Duration {
        let Now::Idle { since } = self.now else { return self.idle };
        self.idle + now.saturating_duration_since(since)
    }

    /// The time in which the job was supposed to run.
    pub(super) fn wall(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.begun).saturating_sub(self.idle(now))
    }

    /// The share of it that was useful, from 0 to 1.
    pub(super) fn goodput(&self, now: Instant) -> f64 {
        let wall = self.wall(now).as_secs_f64();
        if wall > 0.0 { (self.useful(now).as_secs_f64() / wall).min(1.0) } else { 0.0 }
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
        work.started(Some(image(2)), at(70));
        assert_eq!((work.useful(at(70)), work.lost()), (seconds(40), seconds(10)));
        work.ended(at(70));
        work.started(Some(image(2)), at(70));
        // Restoring the same image again loses only the work since.
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
