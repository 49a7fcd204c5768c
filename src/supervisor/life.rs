//! The supervised job: a start in progress, the running job, and its end until that is reported.
//!
//! Lives are counted, so that a report about an earlier one is not taken for this one's. An end is kept until it is
//! reported: a snapshot may be under way, or the images may be unreadable for a moment ([`Unread`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::state::State;
use super::unread::Unread;
use rekindle_engine::launch::Job;
use rekindle_engine::snapshot::{Deaths, Queues};
use rekindle_os::spawn::Ended;

/// How an end waits while the images cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waits {
    /// It begins to wait.
    Begins,
    /// It continues to wait.
    Still,
    /// It no longer waits, and is reported without images.
    No,
}

/// The life of the job. `J` is another type in tests only.
#[derive(Debug)]
pub(super) struct JobLife<J = Job> {
    job: Option<Arc<J>>,
    /// Signals for the job that arrived while it was being started.
    unsent: Vec<i32>,
    /// Number of this life; 0 before the first.
    number: u32,
    /// How this life ended, if it has.
    ended: Option<Ended>,
    /// Whether its end waits until the images can be read.
    unread: Unread,
    /// Set to cancel the start or the snapshot in progress; each has its own flag.
    cancel: Arc<AtomicBool>,
    /// When the start in progress began.
    started: Instant,
    /// When the snapshot in progress began.
    snapshot: Option<Instant>,
    /// Processes of the job that were killed and not waited for, as seen by snapshots.
    deaths: Arc<Deaths>,
    /// Connections that the job had not accepted, as seen by snapshots.
    queues: Arc<Queues>,
}

impl<J> JobLife<J> {
    pub(super) fn new(now: Instant) -> JobLife<J> {
        JobLife {
            job: None,
            unsent: Vec::new(),
            number: 0,
            ended: None,
            unread: Unread::default(),
            cancel: Arc::default(),
            started: now,
            snapshot: None,
            deaths: Arc::default(),
            queues: Arc::default(),
        }
    }

    // ---- a start, a snapshot ----

    /// A start begins. Setting the returned flag cancels it.
    pub(super) fn start_begins(&mut self, now: Instant) -> Arc<AtomicBool> {
        self.started = now;
        self.new_cancel()
    }

    /// A snapshot of this job begins. Setting the returned flag cancels it.
    pub(super) fn snapshot_begins(&mut self) -> Option<(Arc<J>, Arc<AtomicBool>)> {
        let job = self.job.clone()?;
        self.snapshot = Some(Instant::now());
        Some((job, self.new_cancel()))
    }

    pub(super) fn snapshot_ends(&mut self) {
        self.snapshot = None;
    }

    /// When the snapshot in progress began.
    pub(super) fn snapshot_begun(&self) -> Option<Instant> {
        self.snapshot
    }

    fn new_cancel(&mut self) -> Arc<AtomicBool> {
        self.cancel = Arc::default();
        Arc::clone(&self.cancel)
    }

    /// Cancels the start or the snapshot in progress.
    pub(super) fn call_off(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    // ---- the job that runs ----

    /// A start succeeded. Returns the job for the thread that waits for its end.
    pub(super) fn begins(&mut self, job: J) -> Arc<J> {
        let job = Arc::new(job);
        self.number += 1;
        self.ended = None;
        self.job = Some(Arc::clone(&job));
        job
    }

    pub(super) fn job(&self) -> Option<&Arc<J>> {
        self.job.as_ref()
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// When the start of this life began.
    pub(super) fn started(&self) -> Instant {
        self.started
    }

    pub(super) fn deaths(&self) -> &Arc<Deaths> {
        &self.deaths
    }

    pub(super) fn queues(&self) -> &Arc<Queues> {
        &self.queues
    }

    /// Whether this is the number of the present life.
    pub(super) fn is_present(&self, number: u32) -> bool {
        self.number == number
    }

    /// A signal for the job arrived: returns the job that gets it now. Without a job, the signal is kept for the next
    /// one.
    pub(super) fn receiver(&mut self, signal: i32) -> Option<&Arc<J>> {
        if self.job.is_none() {
            self.unsent.push(signal);
        }
        self.job.as_ref()
    }

    /// A signal for the job arrived that it must not get now.
    pub(super) fn keep(&mut self, signal: i32) {
        self.unsent.push(signal);
    }

    /// The signals that were kept, in their order.
    pub(super) fn take_unsent(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.unsent)
    }

    // ---- its end ----

    pub(super) fn ends(&mut self, ended: Ended) {
        self.ended = Some(ended);
    }

    pub(super) fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// The end that was postponed for a snapshot and is reported after it.
    pub(super) fn unreported(&self) -> Option<Ended> {
        self.ended.filter(|_| self.job.is_some())
    }

    /// The images cannot be read: returns whether the end is reported later.
    pub(super) fn images_unread(&mut self, state: &State, stopping: bool, now: Instant) -> Waits {
        match self.unread.waits(state, stopping, now) {
            true if self.unread.begins(now) => Waits::Begins,
            true => Waits::Still,
            false => Waits::No,
        }
    }

    /// Whether the end waits until the images can be read.
    pub(super) fn is_unread(&self) -> bool {
        self.unread.is_waiting()
    }

    /// The end to report, if it is time to try again to read the images.
    pub(super) fn due_again(&self, now: Instant) -> Option<Ended> {
        self.ended.filter(|_| self.unread.is_due(now))
    }

    /// The end is reported now. Returns when the life ended: the wait does not count.
    pub(super) fn reported(&mut self, now: Instant) -> Instant {
        self.unread.over().unwrap_or(now)
    }

    /// Gives up the job, which has ended or is to be ended.
    pub(super) fn take_job(&mut self) -> Option<Arc<J>> {
        self.job.take()
    }

    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.unread.next_wake()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::StartPoint;
    use crate::supervisor::state::Life;
    use crate::supervisor::unread::{AGAIN, PATIENCE};

    #[test]
    fn signals_wait_for_a_job_and_keep_their_order() {
        let mut life = JobLife::new(Instant::now());
        assert_eq!(life.receiver(3), None);
        assert_eq!(life.receiver(28), None);
        life.begins("first");
        assert_eq!((life.take_unsent(), life.take_unsent()), (vec![3, 28], vec![]));
        assert_eq!(life.receiver(18).map(|job| **job), Some("first"));
        assert!(life.take_unsent().is_empty());
    }

    #[test]
    fn each_start_and_each_snapshot_is_called_off_alone() {
        let now = Instant::now();
        let mut life = JobLife::new(now);
        assert!(life.snapshot_begins().is_none(), "there is no job");
        let start = life.start_begins(now);
        life.call_off();
        life.begins(());
        let (_, snapshot) = life.snapshot_begins().unwrap();
        assert!(start.load(Ordering::Relaxed) && !snapshot.load(Ordering::Relaxed));
        assert!(life.snapshot_begun().is_some());
        life.snapshot_ends();
        assert!(life.snapshot_begun().is_none());
        life.call_off();
        assert!(snapshot.load(Ordering::Relaxed));
    }

    #[test]
    fn an_end_is_of_its_life_and_is_kept_until_it_is_reported() {
        let now = Instant::now();
        let mut life = JobLife::new(now);
        life.begins(());
        life.ends(Ended::Exit(1));
        assert_eq!((life.ended(), life.unreported()), (Some(Ended::Exit(1)), Some(Ended::Exit(1))));
        assert_eq!(life.reported(now), now);
        life.take_job();
        assert_eq!((life.ended(), life.unreported()), (Some(Ended::Exit(1)), None));
        life.begins(());
        assert_eq!(life.ended(), None);
        assert!(life.is_present(2) && !life.is_present(1));
    }

    #[test]
    fn an_end_waits_for_the_images_for_a_while() {
        let now = Instant::now();
        let state = State::Running(Life { from: StartPoint::Cold, since: now, next: None, failures: 0, missed: 0 });
        let mut life = JobLife::new(now);
        life.begins(());
        life.ends(Ended::Exit(1));
        assert_eq!(life.images_unread(&state, false, now), Waits::Begins);
        assert_eq!((life.is_unread(), life.next_wake()), (true, Some(now + AGAIN)));
        assert_eq!((life.due_again(now), life.due_again(now + AGAIN)), (None, Some(Ended::Exit(1))));
        assert_eq!(life.images_unread(&state, false, now + AGAIN), Waits::Still);
        assert_eq!(life.images_unread(&state, false, now + PATIENCE), Waits::No);
        assert_eq!(life.reported(now + PATIENCE), now, "the time of the end, not of the report");
        assert_eq!(life.next_wake(), None);
    }
}
