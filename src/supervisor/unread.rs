//! An end that waits until the images can be read. If a file server is temporarily unavailable, that must not look like
//! a job without images: it would end the run, and a suspended job would start from the beginning.

use std::time::{Duration, Instant};

use super::state::{Ending, State};

/// After this time the end is reported without images.
pub(super) const PATIENCE: Duration = crate::policy::STORE_PATIENCE;

/// How long an end in this state waits; `None` if there is no limit. A job that is suspended needs nothing until it is
/// resumed, and without the images it would be resumed from what it started with.
pub(super) fn patience(state: &State) -> Option<Duration> {
    match state {
        State::Ending { stop: Ending::Suspend, .. } => None,
        _ => Some(PATIENCE),
    }
}

/// Interval of the tries.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

/// Whether an end is waiting.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unread {
    /// When the life ended, and when to try again.
    since: Option<(Instant, Instant)>,
}

impl Unread {
    /// Whether an end may wait, now that the images cannot be read.
    pub(super) fn waits(&self, state: &State, stopping: bool, now: Instant) -> bool {
        let waited = self.since.map_or(Duration::ZERO, |(since, _)| now.saturating_duration_since(since));
        state.needs_images() && !stopping && patience(state).is_none_or(|patience| waited < patience)
    }

    /// It waits. Returns whether it only starts to wait now.
    pub(super) fn begins(&mut self, now: Instant) -> bool {
        let before = self.since;
        self.since = Some((before.map_or(now, |(since, _)| since), now + AGAIN));
        before.is_none()
    }

    /// It is reported. Returns when the life ended, if it had to wait.
    pub(super) fn over(&mut self) -> Option<Instant> {
        self.since.take().map(|(since, _)| since)
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.since.is_some()
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.since.is_some_and(|(_, again)| again <= now)
    }

    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.since.map(|(_, again)| again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::StartPoint;
    use crate::supervisor::state::{Life, Stop};

    #[test]
    fn an_end_waits_for_the_images_while_there_is_hope_and_use() {
        let now = Instant::now();
        let life = Life { from: StartPoint::Cold, since: now, next: None, failures: 0, missed: 0 };
        let ending = |stop| State::Ending { stop, deadline: None, life: life.clone() };
        let running = State::Running(life.clone());
        let mut unread = Unread::default();
        assert!(unread.waits(&running, false, now) && unread.waits(&ending(Ending::Suspend), false, now));
        assert!(!unread.waits(&ending(Ending::Stop(Stop::Requeue)), true, now), "a stop needs none");
        assert!(!unread.waits(&running, true, now));
        assert!(unread.begins(now) && !unread.begins(now + AGAIN), "it is said once");
        assert!(unread.is_waiting() && !unread.is_due(now + AGAIN) && unread.is_due(now + AGAIN * 2));
        assert!(
            unread.waits(&running, false, now + PATIENCE - AGAIN) && !unread.waits(&running, false, now + PATIENCE)
        );
        let later = now + PATIENCE * 100;
        assert!(unread.waits(&ending(Ending::Suspend), false, later), "or it would be resumed from an old image");
        assert!(
            !unread.waits(&ending(Ending::Suspend), true, later) && !unread.waits(&ending(Ending::Lost), false, later)
        );
        assert_eq!((unread.over(), unread.over()), (Some(now), None));
    }
}
