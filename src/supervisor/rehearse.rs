//! Rehearses restores beside the running job, so that an image that cannot be restored is noticed before it is needed.
//!
//! The first image of a run is rehearsed at once, then one every `snapshot.rehearse`, and one whenever the kinds of
//! objects in the image differ from those of the last that was tried. Images are tried where they were made, in memory or
//! in a slot on the disk: those in the store are the same, packed. A rehearsal is a separate process ([`rekindle_engine::restore::rehearsal`]),
//! which is ended as soon as the job does anything but run. It changes nothing and marks no image as bad: it is not
//! a real restore. What it finds is recorded as evidence about the image, and reported in the log, as an event and to
//! hooks.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::images::empty_slots_on_disk;
use super::state::State;
use super::times::shown;
use super::{Message, Owner, Setup};
use crate::policy::form;
use crate::telemetry::events::What;
use rekindle_engine::launch::Privileges;
use rekindle_engine::restore::rehearsal::{Outcome, Script};
use rekindle_os::spawn::Spawn;
use rekindle_store::{Evidence, Image, ImageId};

/// Pause before another look if a rehearsal is due while the job does not just run.
const BUSY: Duration = Duration::from_secs(10);
/// Pause before another try if a rehearsal was impossible.
const AGAIN: Duration = Duration::from_secs(600);
/// Pause before an image that was refused is tried again: the cause may be gone by then.
const SECOND_LOOK: Duration = Duration::from_secs(60);
/// Time limit beyond that of CRIU.
const BESIDES: Duration = Duration::from_secs(60);
/// How often to check whether the rehearsal is over.
const LOOK: Duration = Duration::from_millis(20);

/// The names of the kinds of objects in an image: what a rehearsal of one image says holds for others of the same kinds.
pub(super) type Kinds = BTreeSet<String>;

/// The schedule of rehearsals.
#[derive(Debug)]
pub(super) struct Rehearsals {
    /// The configured interval; `None` if rehearsals are off.
    every: Option<Duration>,
    /// When the next is due; `None` before the first image.
    due: Option<Instant>,
    /// Set to cancel the present one.
    under_way: Option<Arc<AtomicBool>>,
    /// The kinds of objects in the newest image, and in the last one that was tried.
    newest: Kinds,
    tried: Kinds,
    refusals: Refusals,
    /// Whether the slot of the newest image must not be emptied before it was tried.
    needs_slot: Arc<AtomicBool>,
}

/// The refusals since an image was last restored.
#[derive(Debug, Default)]
struct Refusals {
    /// The text of the last one, if its image will be tried again.
    once: Option<String>,
    /// What was told, and the forms of all texts of that failure.
    told: Option<(String, BTreeSet<String>)>,
}

impl Refusals {
    /// The finding about one more. CRIU's words for one failure can differ from one try to the next; it is told with the
    /// same words each time.
    fn add(&mut self, why: String) -> Finding {
        let Some(first) = self.once.take() else {
            self.once = Some(why.clone());
            return Finding::RefusedOnce { why };
        };
        let forms = BTreeSet::from([form(&first), form(&why)]);
        let (words, known) = match self.told.take() {
            Some((words, known)) if !known.is_disjoint(&forms) => (words, &known | &forms),
            _ => (first, forms),
        };
        self.told = Some((words.clone(), known));
        Finding::Refused { why: words }
    }
}

/// The result of a rehearsal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    /// Nothing: it was cancelled, or the image was replaced in the meantime.
    Nothing,
    /// The image can be restored. It took this many milliseconds.
    Restored { took: u64 },
    /// The image was refused. It is tried again, because one refusal can be chance.
    RefusedOnce { why: String },
    /// It was refused twice.
    Refused { why: String },
    /// The rehearsal was impossible.
    NotTried { why: String },
}

impl Rehearsals {
    /// `every` is `snapshot.rehearse`; `None` turns rehearsals off.
    pub(super) fn new(every: Option<Duration>) -> Rehearsals {
        let (newest, tried, refusals) = (Kinds::new(), Kinds::new(), Refusals::default());
        Rehearsals { every, due: None, under_way: None, newest, tried, refusals, needs_slot: Arc::default() }
    }

    /// Whether a slot must not be emptied now. Shared with the threads that store images.
    pub(super) fn needs_slot(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.needs_slot)
    }

    /// An image was taken that has these kinds of objects.
    pub(super) fn image_taken(&mut self, kinds: Kinds, now: Instant) {
        self.newest = kinds;
        // If one is under way, `ends` looks again.
        if self.every.is_some() && self.under_way.is_none() && (self.due.is_none() || self.newest != self.tried) {
            self.due = Some(now);
            self.needs_slot.store(true, Ordering::Relaxed);
        }
    }

    /// One is due, and no slot has an image: those on the disk are emptied. The next image will be rehearsed.
    fn wait_for_an_image(&mut self) {
        self.due = None;
    }

    /// Cancels a rehearsal that is in the way. Returns whether to start one.
    pub(super) fn check(&mut self, state: &State, is_restoring: bool, now: Instant) -> bool {
        let quiet = matches!(state, State::Running(_)) && !is_restoring;
        if self.under_way.is_some() {
            // A snapshot is not disturbed by it.
            if !quiet && !matches!(state, State::Snapshotting { .. }) {
                self.call_off();
            }
            return false;
        }
        if self.due.is_none_or(|due| due > now) {
            return false;
        }
        if !quiet {
            // A time in the past would wake the owner again and again.
            self.due = Some(now + self.every.unwrap_or(BUSY).min(BUSY));
            return false;
        }
        self.due = Some(now + AGAIN);
        true
    }

    /// A rehearsal of the newest image begins. Setting the returned flag cancels it.
    pub(super) fn begins(&mut self) -> Arc<AtomicBool> {
        self.tried.clone_from(&self.newest);
        Arc::clone(self.under_way.insert(Arc::default()))
    }

    /// A rehearsal is over. `is_there` tells whether its image is still in its slot.
    pub(super) fn ends(&mut self, outcome: Outcome, is_there: impl FnOnce() -> bool, now: Instant) -> Finding {
        let called_off = self.under_way.take().is_some_and(|cancel| cancel.load(Ordering::Relaxed));
        let every = self.every.unwrap_or(AGAIN);
        let (wait, finding) = match outcome {
            _ if called_off => (AGAIN.min(every), Finding::Nothing),
            Outcome::Restored { took } => {
                self.refusals = Refusals::default();
                (every, Finding::Restored { took })
            }
            // A later image was being written to its place.
            Outcome::Refused { .. } if !is_there() => (AGAIN.min(every), Finding::Nothing),
            Outcome::Refused { why } => match self.refusals.add(why) {
                once @ Finding::RefusedOnce { .. } => (SECOND_LOOK.min(every), once),
                twice => (every, twice),
            },
            Outcome::NotTried { why } => (AGAIN.min(every), Finding::NotTried { why }),
        };
        // An image with other kinds was taken meanwhile.
        self.due = Some(if self.newest == self.tried { now + wait } else { now });
        finding
    }

    /// Cancels the rehearsal in progress, if any: if memory is short, what it uses is free at once. Returns whether there
    /// was one.
    pub(super) fn call_off(&self) -> bool {
        self.under_way.iter().for_each(|cancel| cancel.store(true, Ordering::Relaxed));
        self.under_way.is_some()
    }

    /// The run ends.
    pub(super) fn close(&mut self) {
        self.due = None;
        self.needs_slot.store(false, Ordering::Relaxed);
        self.call_off();
    }

    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.due.filter(|_| self.under_way.is_none())
    }
}

/// The report of a rehearsal that is over.
pub(super) struct Rehearsed {
    image: ImageId,
    outcome: Outcome,
}

impl Owner<'_> {
    /// The run begins: publishes if no image of it will be rehearsed.
    pub(super) fn publish_if_not_rehearsed(&mut self) {
        // Who turned them off knows it, so nothing is logged.
        if self.setup.config.snapshot.rehearse.limit().is_none() {
            self.reporting.published.not_rehearsed = Some("snapshot.rehearse is \"off\"".into());
        }
    }

    /// Starts a rehearsal that is due, and cancels one that is in the way.
    pub(super) fn check_rehearsals(&mut self) {
        let restoring = self.transfers.is_restoring();
        if !self.checks.rehearsals.check(self.machine.state(), restoring, Instant::now()) {
            return;
        }
        let newest = self.setup.folder.staged().into_iter().find(Image::is_good);
        let Some(image) = newest.map(|image| image.id) else { return self.checks.rehearsals.wait_for_an_image() };
        let (needs_slot, files_go) = (self.checks.rehearsals.needs_slot(), self.transfers.files_go());
        let cancel = self.checks.rehearsals.begins();
        let (setup, sender) = (Arc::clone(self.setup), self.threads.sender.clone());
        self.spawn("rehearse", move || {
            let outcome = rehearse(&setup, image, &cancel)
                .unwrap_or_else(|error| Outcome::NotTried { why: format!("the rehearsal's process failed: {error}") });
            needs_slot.store(false, Ordering::Relaxed);
            empty_slots_on_disk(&setup, &files_go, &needs_slot);
            let _ = sender.send(Message::Rehearsed(Box::new(Rehearsed { image, outcome })));
        });
    }

    pub(super) fn rehearsed(&mut self, Rehearsed { image, outcome }: Rehearsed) {
        let is_there = || self.setup.folder.staged().iter().any(|staged| staged.id == image);
        match self.checks.rehearsals.ends(outcome, is_there, Instant::now()) {
            Finding::Nothing => {}
            Finding::Restored { took } => {
                self.reporting.published.rehearsal_failure = None;
                self.reporting.published.not_rehearsed = None;
                crate::routine!(
                    "image {image} was restored in a rehearsal, in {}; no instruction of the job ran",
                    shown(Duration::from_millis(took))
                );
                self.checks.evidence.note(image, Evidence::Rehearsed, self.setup, Instant::now());
                self.tell(What::Rehearsed { image, took_us: took.saturating_mul(1000) });
            }
            Finding::RefusedOnce { why } => tracing::debug!("image {image} was refused in a rehearsal: {why}"),
            Finding::Refused { why } => {
                self.reporting.published.rehearsal_failure = Some(format!("image {image}: {why}"));
                // It is tried again as long as it is the newest one, and told of once.
                if !self.reporting.remarks.said.is_new(format!("rehearsal of {image}: {why}")) {
                    return;
                }
                tracing::error!(
                    "image {image} could not be restored in a rehearsal, twice: {why}. The job continues and its \
                    images are kept, but do not rely on them: a restart would probably fail in the same way. Correct \
                    what is named here, and then request a snapshot: it is rehearsed, too"
                );
                self.checks.evidence.note(image, Evidence::Refused, self.setup, Instant::now());
                self.tell(What::RehearsalFailed { image, why });
            }
            Finding::NotTried { why } => {
                if self.reporting.remarks.said.is_new(format!("rehearsal: {why}")) {
                    tracing::warn!("image {image} was not rehearsed: {why}");
                }
                self.reporting.published.not_rehearsed = Some(why);
            }
        }
    }
}

/// Runs the rehearsal in a separate process.
fn rehearse(setup: &Setup, image: ImageId, cancel: &AtomicBool) -> io::Result<Outcome> {
    let criu = setup.criu.again();
    let version = criu.version;
    let script = Script {
        store: setup.folder.path().parent().map(Path::to_path_buf).unwrap_or_default(),
        job: setup.folder.name().clone(),
        image,
        criu: (criu.path, (version.0, version.1, version.2)),
        work: setup.program.work.path().to_owned(),
        reaper: setup.program.reaper.clone(),
        names: setup.program.uplink.as_ref().and_then(|plan| plan.names().ok()),
        user: setup.program.spec.identity.clone(),
        no_new_privileges: setup.program.spec.privileges == Privileges::Fixed,
        timeout: setup.config.restart.restore_timeout.as_secs().max(1),
        reserve: setup.config.snapshot.memory_reserve.bytes(),
    };
    let (mut input, mut output) = (tempfile::tempfile()?, tempfile::tempfile()?);
    input.write_all(&serde_json::to_vec(&script)?)?;
    input.rewind()?;
    let quiet = File::options().write(true).open("/dev/null")?;
    let fds = (OwnedFd::from(input), OwnedFd::from(output.try_clone()?), OwnedFd::from(quiet));
    // This program, even if its file was replaced meanwhile.
    let child = Spawn::new(Path::new("/proc/self/exe"), ["rehearse"])
        .and_then(|spawn| spawn.directory(Path::new("/")))
        .map_err(io::Error::other)?
        .fd(fds.0, 0)
        .fd(fds.1, 1)
        .fd(fds.2, 2)
        .session()
        .dies_with_us()
        .start()
        .map_err(io::Error::other)?;
    let limit = setup.config.restart.restore_timeout.saturating_add(BESIDES);
    let began = Instant::now();
    while !child.has_ended()? {
        if cancel.load(Ordering::Relaxed) || began.elapsed() > limit {
            // Its namespaces end with it.
            child.signal(libc::SIGKILL)?;
        }
        std::thread::sleep(LOOK);
    }
    let ended = child.wait()?;
    if began.elapsed() > limit {
        return Err(io::Error::other(format!("it did not finish within {}", humantime::format_duration(limit))));
    }
    let mut text = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(|_| io::Error::other(format!("it ended with {ended} and without a message")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::StartPoint;
    use crate::supervisor::state::{Ending, Life};

    const HOUR: Duration = Duration::from_secs(3600);

    fn life(now: Instant) -> Life {
        Life { from: StartPoint::Cold, since: now, next: None, failures: 0, missed: 0 }
    }

    fn refused() -> Outcome {
        Outcome::Refused { why: "a port".into() }
    }

    fn kinds(names: &[&str]) -> Kinds {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_first_image_is_rehearsed_at_once_and_none_where_none_is_wanted() {
        let now = Instant::now();
        let running = State::Running(life(now));
        let mut off = Rehearsals::new(None);
        off.image_taken(kinds(&["pipe"]), now);
        assert_eq!(off.next_wake(), None);
        let mut rehearsals = Rehearsals::new(Some(HOUR));
        assert!(!rehearsals.check(&running, false, now + HOUR), "there is no image");
        rehearsals.image_taken(Kinds::new(), now);
        rehearsals.image_taken(Kinds::new(), now + BUSY);
        assert_eq!(rehearsals.next_wake(), Some(now));
        assert!(rehearsals.check(&running, false, now));
        assert_eq!(rehearsals.next_wake(), Some(now + AGAIN), "where no image is in a slot");
        rehearsals.begins();
        assert_eq!(rehearsals.next_wake(), None);
        assert_eq!(rehearsals.ends(Outcome::Restored { took: 5 }, || true, now), Finding::Restored { took: 5 });
        assert_eq!(rehearsals.next_wake(), Some(now + HOUR));
    }

    #[test]
    fn an_image_with_other_kinds_of_objects_is_rehearsed_at_once() {
        let now = Instant::now();
        let later = now + AGAIN / 2;
        let mut rehearsals = Rehearsals::new(Some(HOUR));
        rehearsals.image_taken(kinds(&["pipe", "timer"]), now);
        rehearsals.begins();
        rehearsals.ends(Outcome::Restored { took: 1 }, || true, now);
        rehearsals.image_taken(kinds(&["timer", "pipe"]), later);
        assert_eq!(rehearsals.next_wake(), Some(now + HOUR), "the same kinds");
        for other in [kinds(&["pipe", "timer", "socket"]), kinds(&["socket"])] {
            rehearsals.image_taken(other, later);
            assert_eq!(rehearsals.next_wake(), Some(later));
            rehearsals.begins();
            rehearsals.ends(Outcome::NotTried { why: "memory".into() }, || true, later);
            assert_eq!(rehearsals.next_wake(), Some(later + AGAIN));
        }
        rehearsals.begins();
        rehearsals.image_taken(kinds(&["inotify"]), later);
        assert_eq!(rehearsals.next_wake(), None, "one is under way");
        rehearsals.ends(Outcome::Restored { took: 1 }, || true, later);
        assert_eq!(rehearsals.next_wake(), Some(later));
    }

    #[test]
    fn one_waits_for_a_job_that_runs_and_gives_way() {
        let now = Instant::now();
        let (running, snapshot) =
            (State::Running(life(now)), State::Snapshotting { life: life(now), then: None, ended: None });
        let ending = State::Ending { stop: Ending::Lost, deadline: None, life: life(now) };
        let mut rehearsals = Rehearsals::new(Some(HOUR));
        rehearsals.image_taken(Kinds::new(), now);
        assert!(!rehearsals.check(&snapshot, false, now), "it waits");
        assert_eq!(rehearsals.next_wake(), Some(now + BUSY));
        assert!(!rehearsals.check(&running, true, now + BUSY), "memory is being restored");
        assert!(rehearsals.check(&running, false, now + BUSY * 2));
        let cancel = rehearsals.begins();
        rehearsals.check(&snapshot, false, now);
        assert!(!cancel.load(Ordering::Relaxed), "a snapshot does not mind it");
        rehearsals.check(&ending, false, now);
        assert!(cancel.load(Ordering::Relaxed));
        assert_eq!(rehearsals.ends(refused(), || true, now), Finding::Nothing);
        assert_eq!(rehearsals.next_wake(), Some(now + AGAIN));
    }

    #[test]
    fn an_image_is_refused_only_when_it_is_refused_twice() {
        let now = Instant::now();
        let why = || "a port".to_owned();
        let mut rehearsals = Rehearsals::new(Some(HOUR));
        rehearsals.begins();
        assert_eq!(rehearsals.ends(refused(), || false, now), Finding::Nothing, "a later image has its place");
        assert_eq!(rehearsals.ends(refused(), || true, now), Finding::RefusedOnce { why: why() });
        assert_eq!(rehearsals.next_wake(), Some(now + SECOND_LOOK));
        assert_eq!(rehearsals.ends(refused(), || true, now), Finding::Refused { why: why() });
        assert_eq!(rehearsals.next_wake(), Some(now + HOUR));
        assert_eq!(rehearsals.ends(refused(), || true, now), Finding::RefusedOnce { why: why() });
        rehearsals.ends(Outcome::Restored { took: 1 }, || true, now);
        assert_eq!(rehearsals.ends(refused(), || true, now), Finding::RefusedOnce { why: why() });
    }

    #[test]
    fn one_failure_is_told_with_the_same_words_each_time() {
        let now = Instant::now();
        let mut rehearsals = Rehearsals::new(Some(HOUR));
        let mut twice = |texts: [&str; 2]| {
            let mut end = |why: &str| rehearsals.ends(Outcome::Refused { why: why.into() }, || true, now);
            assert!(matches!(end(texts[0]), Finding::RefusedOnce { .. }));
            match end(texts[1]) {
                Finding::Refused { why } => why,
                other => panic!("{other:?}"),
            }
        };
        let object = |at: &str| format!("cannot unpack object {at} of slots/{}/pagemap.img", at.len() % 2);
        let (first, second) = (object("0x5555b1c0"), object("0x7f00ea0"));
        assert_eq!(twice([&first, "the task 7 was killed"]), first);
        assert_eq!(twice(["the task 12 was killed", &second]), first, "the same two texts in another order");
        assert_eq!(twice([&second, &second]), first);
        assert_eq!(twice(["a port is in use", "a port is in use"]), "a port is in use", "another failure");
        assert_eq!(twice([&second, &second]), second);
    }
}
