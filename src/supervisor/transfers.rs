//! Images being copied: from memory to the store, from there to the replica, and into a job that is being restored.
//!
//! One image at a time is copied to the store, and one to the replica. When an image is packed, its plain files are
//! removed, so packing and restoring exclude each other: a restore cancels packing, and waits for the lock that packing
//! holds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::destination::Destination;
use super::replicate::Replication;
use super::state::State;
use crate::config::Snapshot;
use crate::policy::StartPoint;
use crate::published::{Persisting, Published};
use rekindle_store::persist::Progress;
use rekindle_store::{Hold, Image, ImageId};

/// How often the progress of a transfer is published.
pub(super) const PROGRESS: Duration = Duration::from_secs(1);

/// Where an image is copied from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Memory,
    /// The store, where it is in plain files: it is only packed, and the files are removed.
    PlainFiles,
}

/// An image that is being copied from one place to another.
#[derive(Debug)]
struct Moving {
    image: ImageId,
    progress: Arc<Progress>,
}

impl Moving {
    fn seen(&self) -> Persisting {
        Persisting::of(self.image, &self.progress)
    }
}

/// An image that is being stored.
#[derive(Debug)]
struct Persist {
    moving: Moving,
    cancel: Arc<AtomicBool>,
    source: Source,
    since: Instant,
}

/// Shared between the thread that stores an image and the owner.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) progress: Arc<Progress>,
    /// Set to cancel it.
    pub(super) cancel: Arc<AtomicBool>,
    /// Held while plain files are removed: loose ones when they are packed, or those of a slot on the disk.
    pub(super) files_go: Arc<Mutex<()>>,
}

/// An image that could not be stored is tried again: no other snapshot may come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StoreRetry {
    /// Number of failures in a row.
    failures: u32,
    /// When it is tried again.
    at: Option<Instant>,
}

impl StoreRetry {
    /// An attempt begins.
    pub(super) fn begins(&mut self) {
        self.at = None;
    }

    /// It failed.
    pub(super) fn failed(&mut self, config: &Snapshot, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        self.at = Some(now + config.retry_wait(self.failures));
    }

    pub(super) fn succeeded(&mut self) {
        *self = StoreRetry::default();
    }

    /// When the next attempt begins, if the job is in this state.
    pub(super) fn at(&self, state: &State) -> Option<Instant> {
        // In others an image is being taken or read, or the next step stores it anyway.
        self.at.filter(|_| matches!(state, State::Running(_) | State::Suspended { .. } | State::Waiting { .. }))
    }

    /// Whether to try now; then that is the attempt.
    pub(super) fn takes(&mut self, state: &State, now: Instant) -> bool {
        let due = self.at(state).is_some_and(|at| at <= now);
        if due {
            self.at = None;
        }
        due
    }
}

/// All transfers in progress. `I` is another type in tests only.
#[derive(Debug)]
pub(super) struct Transfers<I = Image> {
    persist: Option<Persist>,
    pub(super) retry: StoreRetry,
    /// The image that the start in progress reads.
    restoring: Option<Moving>,
    /// Protects the image that the job goes back to, from the request until the job runs.
    goal: Option<Hold>,
    /// Held while plain files may be removed, and while they are read.
    files_go: Arc<Mutex<()>>,
    pub(super) replication: Replication<I>,
}

impl<I> Default for Transfers<I> {
    fn default() -> Transfers<I> {
        let (files_go, replication) = (Arc::default(), Replication::default());
        let retry = StoreRetry::default();
        Transfers { persist: None, retry, restoring: None, goal: None, files_go, replication }
    }
}

impl<I> Transfers<I> {
    // ---- to the store ----

    /// Storing this image begins.
    pub(super) fn store_begins(&mut self, image: ImageId, source: Source) -> Store {
        let (progress, cancel) = (Arc::<Progress>::default(), Arc::<AtomicBool>::default());
        let moving = Moving { image, progress: Arc::clone(&progress) };
        self.persist = Some(Persist { moving, cancel: Arc::clone(&cancel), source, since: Instant::now() });
        self.retry.begins();
        Store { progress, cancel, files_go: self.files_go() }
    }

    /// Storing this image has ended.
    pub(super) fn store_ends(&mut self, image: ImageId) {
        self.persist.take_if(|persist| persist.moving.image == image);
    }

    pub(super) fn is_storing(&self) -> bool {
        self.persist.is_some()
    }

    /// The image that is being stored.
    pub(super) fn storing(&self) -> Option<ImageId> {
        self.persist.as_ref().map(|persist| persist.moving.image)
    }

    /// When storing it began.
    pub(super) fn storing_since(&self) -> Option<Instant> {
        self.persist.as_ref().map(|persist| persist.since)
    }

    /// The progress of storing.
    pub(super) fn stored_so_far(&self) -> Option<Persisting> {
        self.persist.as_ref().map(|persist| persist.moving.seen())
    }

    /// Whether plain files may be packed now, which a restart may be reading.
    pub(super) fn may_pack(&self) -> bool {
        self.persist.is_none() && self.restoring.is_none()
    }

    // ---- into a job ----

    /// A start begins. It cancels the packing of plain files that it may read.
    pub(super) fn start_begins(&mut self, from: StartPoint) -> Arc<Progress> {
        let progress = Arc::<Progress>::default();
        self.restoring = match from {
            StartPoint::Image(image) => Some(Moving { image, progress: Arc::clone(&progress) }),
            StartPoint::Cold => None,
        };
        if let Some(persist) = self.persist.as_ref().filter(|persist| persist.source == Source::PlainFiles) {
            persist.cancel.store(true, Ordering::Relaxed);
        }
        progress
    }

    /// No rule removes this image until the job runs, or goes back to another one.
    pub(super) fn goes_to(&mut self, image: Hold) {
        self.goal = Some(image);
    }

    /// The job runs.
    pub(super) fn arrived(&mut self) {
        self.goal = None;
    }

    pub(super) fn start_ends(&mut self) {
        self.restoring = None;
    }

    pub(super) fn is_restoring(&self) -> bool {
        self.restoring.is_some()
    }

    /// The lock to hold while reading plain files.
    pub(super) fn files_go(&self) -> Arc<Mutex<()>> {
        Arc::clone(&self.files_go)
    }

    // ---- all ----

    pub(super) fn is_under_way(&self, destination: Destination) -> bool {
        match destination {
            Destination::Store => self.persist.is_some(),
            Destination::Replica => self.replication.is_running(),
        }
    }

    pub(super) fn call_off(&mut self, destination: Destination) {
        match destination {
            Destination::Store => self.persist.iter().for_each(|persist| persist.cancel.store(true, Ordering::Relaxed)),
            Destination::Replica => self.replication.call_off(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.persist.is_none() && self.restoring.is_none() && !self.replication.is_running()
    }

    /// When to publish the progress.
    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        (!self.is_idle()).then(|| now + PROGRESS)
    }

    pub(super) fn show(&self, published: &mut Published) {
        published.persisting = self.stored_so_far();
        published.replicating = self.replication.seen();
        // Not before the amount to read is known.
        published.restoring = self.restoring.as_ref().map(Moving::seen).filter(|seen| seen.total > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_could_not_be_stored_is_tried_again_with_growing_pauses() {
        let (config, now) = (crate::config::Config::default().snapshot, Instant::now());
        let (from, until) = (StartPoint::Cold, now);
        let suspended = State::Suspended { from };
        let mut retry = StoreRetry::default();
        assert_eq!(retry.at(&suspended), None);
        let pauses: Vec<Duration> = (0..9)
            .map(|_| {
                retry.failed(&config, now);
                retry.at(&suspended).unwrap() - now
            })
            .collect();
        let (after, max) = (config.retry_after, config.longest_retry());
        assert_eq!((&pauses[..3], pauses[8]), (&[after, after * 2, after * 4][..], max));
        assert_eq!(retry.at(&State::Starting { from, then: None }), None, "an image is being read");
        assert!(!retry.takes(&suspended, now + max - Duration::from_secs(1)));
        assert!(retry.takes(&State::Waiting { from, until }, now + max));
        assert!(!retry.takes(&suspended, now + max), "once");
        retry.failed(&config, now);
        retry.succeeded();
        retry.failed(&config, now);
        assert_eq!(retry.at(&suspended), Some(now + after));
    }

    fn id(n: u32) -> ImageId {
        ImageId::new(n, chrono::DateTime::UNIX_EPOCH)
    }

    #[test]
    fn a_restart_calls_off_packing_and_nothing_else() {
        let mut transfers = Transfers::<()>::default();
        let staged = transfers.store_begins(id(1), Source::Memory);
        transfers.start_begins(StartPoint::Image(id(1)));
        assert!(!staged.cancel.load(Ordering::Relaxed), "from memory to the store");
        transfers.store_ends(id(1));
        let loose = transfers.store_begins(id(1), Source::PlainFiles);
        transfers.start_begins(StartPoint::Cold);
        assert!(loose.cancel.load(Ordering::Relaxed));
    }

    #[test]
    fn plain_files_are_packed_only_while_nobody_may_read_them() {
        let mut transfers = Transfers::<()>::default();
        assert!(transfers.may_pack());
        transfers.start_begins(StartPoint::Cold);
        assert!(transfers.may_pack() && !transfers.is_restoring(), "no image is read");
        transfers.start_begins(StartPoint::Image(id(1)));
        assert!(!transfers.may_pack() && transfers.is_restoring());
        transfers.start_ends();
        transfers.store_begins(id(1), Source::PlainFiles);
        assert!(!transfers.may_pack());
    }

    #[test]
    fn progress_is_published_while_something_is_on_its_way() {
        let now = Instant::now();
        let mut transfers = Transfers::default();
        assert_eq!((transfers.is_idle(), transfers.next_wake(now)), (true, None));
        transfers.replication.begin(id(1), (), false);
        assert_eq!((transfers.is_idle(), transfers.next_wake(now)), (false, Some(now + PROGRESS)));
        assert!(transfers.is_under_way(Destination::Replica) && !transfers.is_under_way(Destination::Store));
    }
}
