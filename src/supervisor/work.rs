//! How much work of the job was lost.

use std::time::{Duration, Instant};

/// The job's work, and how much of it was lost.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Since when work would be lost: the start of the life, or the newest image.
    unsaved_since: Option<Instant>,
    /// Work that was lost when lives ended, since the supervisor started.
    lost: Duration,
    /// How often the job was started or restored.
    lives: u32,
}

impl Work {
    pub(super) fn life_begins(&mut self, now: Instant) {
        self.unsaved_since = Some(now);
        self.lives += 1;
    }

    /// An image was taken now.
    pub(super) fn is_saved(&mut self, now: Instant) {
        self.unsaved_since = Some(now);
    }

    /// The life is over. Unless the job completed, its work since the last image is lost.
    pub(super) fn life_ends(&mut self, completed: bool, now: Instant) {
        if let (Some(since), false) = (self.unsaved_since.take(), completed) {
            self.lost += now.saturating_duration_since(since);
        }
    }

    pub(super) fn lost(&self) -> Duration {
        self.lost
    }

    pub(super) fn lives(&self) -> u32 {
        self.lives
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_lost_since_the_newest_image_and_none_where_the_job_completed() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut work = Work::default();
        work.life_begins(now);
        work.is_saved(at(100));
        work.life_ends(false, at(130));
        assert_eq!((work.lost(), work.lives()), (Duration::from_secs(30), 1));
        work.life_ends(false, at(500));
        assert_eq!(work.lost(), Duration::from_secs(30), "an end counts once");
        work.life_begins(at(200));
        work.life_ends(true, at(900));
        assert_eq!((work.lost(), work.lives()), (Duration::from_secs(30), 2));
    }
}
