//! Snapshots, and the way of their images from memory to the store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use chrono::Utc;

use super::events::micros;
use super::memory;
use super::state::{Event, Finish, State};
use super::{Message, Owner, PROGRESS, Setup};
use crate::hooks::Passed;
use crate::published::Persisting;
use crate::telemetry::events::What;
use rekindle_base::chain;
use rekindle_criu::Log;
use rekindle_engine::snapshot::{self, Launch, Subject, Taken};
use rekindle_os::{cgroup, process};
use rekindle_store::gc;
use rekindle_store::persist::{self, Progress};
use rekindle_store::retention::survey::{self, NoRoom, Written};
use rekindle_store::staging::Area;
use rekindle_store::{Form, Image, ImageId, Seen};

/// How often it is looked at how much memory is left.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// An image on its way from one place to another.
pub(super) struct Moving {
    image: ImageId,
    progress: Arc<Progress>,
}

impl Moving {
    pub(super) fn new(image: ImageId, progress: Arc<Progress>) -> Moving {
        Moving { image, progress }
    }

    /// What others see of it; None before it has begun.
    pub(super) fn seen(&self) -> Option<Persisting> {
        Some(self.now()).filter(|now| now.total > 0)
    }

    fn now(&self) -> Persisting {
        Persisting::of(self.image, &self.progress)
    }
}

/// An image on its way from memory to the store.
pub(super) struct Persist {
    moving: Moving,
    cancel: Arc<AtomicBool>,
    /// Whether it is in the store already, as plain files.
    loose: bool,
}

impl Persist {
    /// What others see of it.
    pub(super) fn seen(&self) -> Persisting {
        self.moving.now()
    }
}

/// How that went.
pub(super) struct Outcome {
    image: ImageId,
    loose: bool,
    result: Result<Image, PersistError>,
    /// Without the removal of older ones.
    took: Duration,
    /// Bytes.
    written: u64,
}

/// Why an image stays in memory only.
#[derive(Debug, thiserror::Error)]
enum PersistError {
    #[error(transparent)]
    Store(#[from] rekindle_store::Error),
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    #[error("for as long as it is packed it takes {} more, {} are free, and {} are to stay free (store.min-free)", ByteSize::b(*need), ByteSize::b(*free), ByteSize::b(*keep))]
    NotPacked { need: u64, free: u64, keep: u64 },
    #[error(transparent)]
    Persist(#[from] persist::Error),
}

impl Owner<'_> {
    pub(super) fn snapshot(&mut self, reason: rekindle_store::manifest::Reason) {
        let Some(job) = self.job.clone() else { return };
        self.cancel = Arc::new(AtomicBool::new(false));
        let (setup, files, cancel, sender) =
            (Arc::clone(self.shared), self.files.clone(), Arc::clone(&self.cancel), self.sender.clone());
        let (interval, deaths) = (self.machine.choice().cloned(), Arc::clone(&self.deaths));
        self.attach_askers();
        self.word_of_begin();
        let event = self.tell(What::SnapshotBegan { reason });
        let gate = self.before_snapshot(&event, reason);
        let launch = Launch { lineage: self.line.lineage.clone(), ..self.shared.launch.clone() };
        self.spawn("snapshot", move || {
            let options = setup.config.snapshot_options();
            let subject = Subject {
                job: &job,
                folder: &setup.folder,
                lock: &setup.lock,
                options: &options,
                criu: &setup.criu,
                launch: &launch,
                ours: setup.ours(),
                staging: setup.staging.as_ref(),
                output: &files,
                interval: interval.as_ref(),
                deaths: &deaths,
            };
            let cancelled = || cancel.load(Ordering::Relaxed);
            let result = match gate.map_or(Passed::Yes, |gate| gate.pass(&cancelled)) {
                Passed::Yes => snapshot::take(&subject, reason, &cancelled),
                Passed::Refused(refused) => Err(snapshot::Error::Hook(Box::new(refused))),
                Passed::CalledOff => Err(snapshot::Error::Cancelled),
            };
            drop(job);
            let _ = sender.send(Message::Snapshot(Box::new(result)));
        });
    }

    pub(super) fn snapshot_done(&mut self, result: Result<Taken, snapshot::Error>) {
        let event = match result {
            Ok(taken) => {
                let news = taken.notes.iter().filter(|note| !self.remarks.contains(note));
                news.for_each(|note| tracing::warn!("{note}"));
                self.remarks.clone_from(&taken.notes);
                let bytes = taken.image.manifest().map_or(0, |m| m.bytes);
                let freeze = shown(taken.freeze);
                let size = ByteSize::b(bytes);
                tracing::info!("image {}: {size}, the job was frozen for {freeze}", taken.image.id);
                self.published.taken(&taken);
                self.await_proof(taken.image.id);
                self.tell_snapshot(&taken);
                self.answer_taken(&taken);
                self.word_of_end(Ok(&taken));
                // One that is in the store as plain files is packed, which saves space only.
                let persist = (!taken.image.is_staged()).then_some(taken.persist);
                if persist.is_some() {
                    self.note_seen(&taken.image);
                }
                self.persist(taken.image);
                self.image_to_rehearse();
                Event::SnapshotTaken { freeze: taken.freeze, persist }
            }
            Err(error) => {
                let stops = self.machine.is_stopping();
                let (lost, event) = (error.job_is_lost(), Event::not_taken(&error));
                self.answer_not_taken(&chain(&error));
                self.word_of_end(Err(&chain(&error)));
                if self.ended.is_none() {
                    let why = chain(&error);
                    self.keep_criu_log("dump", error.criu_log());
                    match error {
                        _ if lost => tracing::error!("the snapshot failed and the job cannot go on: {why}"),
                        snapshot::Error::Cancelled if stops => tracing::info!("the last snapshot was called off"),
                        snapshot::Error::Cancelled => tracing::info!("the snapshot was called off; the job runs on"),
                        _ if stops => tracing::error!("the last snapshot failed: {why}"),
                        snapshot::Error::JobEnded => tracing::info!("no snapshot: {why}"),
                        _ => tracing::error!("the snapshot failed, the job runs on: {why}"),
                    }
                    self.tell(What::SnapshotFailed { why: why.clone(), job_lost: lost });
                    self.published.snapshot_failed(why);
                    // It may be that memory has room for the one image only that did not get to the store.
                    self.persist_newest();
                }
                event
            }
        };
        self.step(event);
        self.remember();
        // An end that came during the snapshot was put aside; the images of now count.
        if let (Some(ended), true) = (self.ended, self.job.is_some()) {
            self.report_end(ended);
        }
    }

    /// Notes on this machine that the store has the image, so that it is noticed when it has not any more.
    fn note_seen(&self, image: &Image) {
        let folder = &self.shared.folder;
        let seen = Seen::of(&self.shared.config.store.seen_directory, folder.name(), folder.trust());
        let noted = seen.zip(image.manifest()).map(|(seen, manifest)| seen.note(&manifest.lineage, image.id));
        if let Some(Err(error)) = noted {
            tracing::warn!(
                "it will not be noticed where an older state takes the place of image {}: {}",
                image.id,
                chain(&error)
            );
        }
    }

    // ---- from memory to the store ----

    /// Brings the newest image that is in memory only to the store, unless one is on its way.
    pub(super) fn persist_newest(&mut self) {
        match self.only_in_memory().filter(|image| self.is_usable(image)) {
            Some(image) if self.persist.is_none() => self.persist(image),
            Some(_) => {}
            None => self.pack_newest(),
        }
    }

    /// Packs the newest image where it is plain files. Not while a restart may read those: they go when it is packed.
    pub(super) fn pack_newest(&mut self) {
        if self.persist.is_some() || self.restoring.is_some() {
            return;
        }
        if let Some(image) = self.newest_loose() {
            self.persist(image);
        }
    }

    /// A restart begins: plain files that it may read must not go. What calls off the packing of them; who reads them waits
    /// for the lock besides.
    pub(super) fn stop_packing(&self) {
        if let Some(persist) = self.persist.as_ref().filter(|persist| persist.loose) {
            persist.cancel.store(true, Ordering::Relaxed);
        }
    }

    /// The newest image of the line, where it is in memory only; else the newest of all, where that is.
    pub(super) fn only_in_memory(&self) -> Option<Image> {
        let folder = &self.shared.folder;
        let (staged, stored) = (folder.staged(), folder.images().unwrap_or_default());
        let of = |which: &dyn Fn(&Image) -> bool| {
            let newest = staged.iter().find(|image| which(image))?;
            let stored = stored.iter().find(|image| which(image)).map(|image| image.id);
            memory::only_there(newest.id, stored, |id| folder.is_stored(id)).then(|| newest.clone())
        };
        of(&|image| self.is_usable(image)).or_else(|| of(&Image::is_good))
    }

    /// The newest good image, where it is in the store as plain files.
    fn newest_loose(&self) -> Option<Image> {
        let newest = self.shared.folder.images().ok()?.into_iter().find(Image::is_good)?;
        (newest.form() == Form::Loose).then_some(newest)
    }

    fn persist(&mut self, image: Image) {
        let (setup, sender) = (Arc::clone(self.shared), self.sender.clone());
        let (progress, cancel) = (Arc::new(Progress::default()), Arc::new(AtomicBool::new(false)));
        let moving = Moving::new(image.id, Arc::clone(&progress));
        let loose = !image.is_staged();
        self.persist = Some(Persist { moving, cancel: Arc::clone(&cancel), loose });
        let files_go = Arc::clone(&self.files_go);
        self.step(Event::PersistBegan);
        self.spawn("persist", move || {
            process::be_nice();
            let began = Instant::now();
            let result = {
                let _files_go = loose.then(|| files_go.lock().unwrap_or_else(PoisonError::into_inner));
                bring_to_store(&setup, &image, &progress, &cancel)
            };
            let took = began.elapsed();
            // Not before it is packed: as plain files it takes more for a while, and no other has to go for that. While
            // memory is brought back from an image none is removed: it is done when that is over.
            if result.is_ok() || loose {
                rotate(&setup);
            }
            let _ = sender.send(Message::Persisted(Box::new(Outcome {
                image: image.id,
                loose,
                result,
                took,
                written: progress.written(),
            })));
        });
    }

    pub(super) fn persisted(&mut self, outcome: Outcome) {
        self.persist = None;
        let took = outcome.took;
        let stored = outcome.result.is_ok();
        let called_off = matches!(outcome.result, Err(PersistError::Persist(persist::Error::Cancelled)));
        match outcome.result {
            Ok(image) => {
                tracing::info!("image {} is in the store after {}", image.id, shown(took));
                self.note_seen(&image);
                let written = outcome.written;
                self.tell(What::Stored { image: image.id, took_us: micros(took), written });
                self.published.persist_failure = None;
                self.answer_stored(&image);
                self.replicate(image);
                if self.machine.is_postponed() && self.machine.held_off().is_none() {
                    tracing::warn!(
                        "a snapshot had to wait: bringing the image before it to the store took {}, which is longer than the interval",
                        shown(took)
                    );
                }
            }
            Err(PersistError::Persist(persist::Error::Cancelled)) if outcome.loose => {
                tracing::debug!("image {} was not packed: a restart may read it", outcome.image);
            }
            Err(PersistError::Persist(persist::Error::Cancelled)) => {
                let why = format!("image {} was not brought to the store", outcome.image);
                tracing::info!("{why}");
                self.answer_not_stored(outcome.image, &why);
            }
            Err(error) => {
                let folder = &self.shared.folder;
                let what = match folder.staged().iter().any(|image| image.id == outcome.image) {
                    _ if folder.is_stored(outcome.image) => "is in the store, but not packed",
                    true => "is in memory only",
                    false => "is lost, it was in memory only",
                };
                let why = format!("image {} {what}: {}", outcome.image, chain(&error));
                tracing::error!("{why}");
                self.tell(What::NotStored { image: outcome.image, why: why.clone() });
                self.answer_not_stored(outcome.image, &why);
                self.published.persist_failure = Some(why);
            }
        }
        self.step(Event::PersistEnded(stored.then_some(took)));
        // The restart that it made way for may be over.
        if outcome.loose && called_off && self.job.is_some() {
            self.pack_newest();
        }
    }

    /// Images in memory must not cost the job the memory that it needs: where little is left, the older image goes, and
    /// then the newest, if the store has it.
    pub(super) fn give_memory_back(&mut self) {
        let Some(area) = &self.shared.staging else { return };
        let reserve = self.shared.config.snapshot.memory_reserve.bytes();
        let is_short = || {
            let limit = self.job.as_ref().and_then(|job| cgroup::memory_headroom(job.root.pid()));
            cgroup::memory_available().into_iter().chain(limit).min().is_some_and(|left| left < reserve)
        };
        // At any other time somebody reads or writes there.
        if !matches!(self.machine.state(), State::Running(_)) || !is_short() || self.stop_rehearsal() {
            return;
        }
        let newest = area.images().into_iter().find(Image::is_good).map(|image| image.id);
        let needed = memory::Needed {
            only_here: self.only_in_memory().map(|image| image.id),
            proven: self.shared.folder.proven_in_memory_only(),
            persisting: self.persist.as_ref().map(|persist| persist.moving.image),
        };
        let mut slots = area.slots();
        slots.sort_by_key(|slot| memory::turn(slot.image().map(|image| image.id), newest));
        for slot in slots {
            let image = slot.image().map(|image| image.id);
            if needed.has(image) || slot.allocated() == 0 || !is_short() {
                continue;
            }
            self.shared.folder.drop_links(&slot);
            match slot.empty() {
                Ok(()) => tracing::warn!(
                    "memory is short (snapshot.memory-reserve): {} was given up",
                    image.map_or_else(
                        || "what was ready for the next image".into(),
                        |id| format!("image {id} in memory")
                    )
                ),
                Err(error) => tracing::warn!("memory is short, and cannot be given back: {}", chain(&error)),
            }
        }
    }

    /// The job is over: what is only in memory goes to the store, and memory is given back. A second signal to stop ends
    /// the wait. Answers the image that did not get to the store, though it was waited for.
    pub(super) fn leave_memory(&mut self, finish: &Finish, messages: &mpsc::Receiver<Message>) -> Option<ImageId> {
        // One that an earlier run left is given back too, though this one makes its images elsewhere.
        let left = if self.shared.staging.is_none() { Area::left_behind(&self.shared.folder) } else { None };
        let area = self.shared.staging.as_ref().or(left.as_ref())?;
        match memory::at_the_end(finish, self.stops.is_at_once()) {
            memory::AtTheEnd::NotNeeded => {
                self.persist.iter().for_each(|persist| persist.cancel.store(true, Ordering::Relaxed));
            }
            memory::AtTheEnd::LeftThere => {}
            memory::AtTheEnd::Stored => self.persist_newest(),
        }
        // A second signal means at once.
        while self.persist.is_some() {
            if self.stops.is_at_once() || !self.holds_the_lock() {
                self.persist.iter().for_each(|persist| persist.cancel.store(true, Ordering::Relaxed));
            }
            match messages.recv_timeout(PROGRESS) {
                Ok(Message::Persisted(outcome)) => self.persisted(*outcome),
                Ok(Message::Replicated(report)) => self.replicated(*report),
                Ok(Message::Signal(signal)) if super::STOPS.contains(&signal) => {
                    let _ = self.stops.signal(Instant::now());
                }
                Ok(Message::Control(incoming)) => self.heard_late(*incoming),
                Ok(Message::Hook(report)) => self.hook_failed(report),
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => self.publish(),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        if self.taken_over.is_some() {
            return None;
        }
        match self.only_in_memory().filter(|_| *finish != Finish::Completed) {
            Some(image) => {
                let (id, at, store) = (image.id, area.path().display(), self.shared.folder.path().display());
                if self.stops.is_at_once() {
                    tracing::warn!(
                        "image {id} is in memory only, at {at}: it is lost when the machine restarts; the same command again goes on from it"
                    );
                    return None;
                }
                let why =
                    self.published.persist_failure.clone().unwrap_or_else(|| "it was not brought to the store".into());
                tracing::error!(
                    "the job is over, and its last image {id} is in memory only, at {at} ({why}). It is lost when the machine restarts, and with a container at its end. Make room in {store} and run the same command again on this machine: it goes on from this image"
                );
                Some(id)
            }
            None => {
                area.slots().iter().for_each(|slot| self.shared.folder.drop_links(slot));
                if let Err(error) = area.close() {
                    tracing::warn!("memory is not given back: {}", chain(&error));
                }
                None
            }
        }
    }

    /// CRIU's log of a failure, for who has to find out; one for each kind, the last.
    pub(super) fn keep_criu_log(&self, kind: &str, log: Option<&Log>) {
        let Some(log) = log else { return };
        let path = self.shared.folder.log_dir().join(format!("criu-{kind}.log"));
        match std::fs::write(&path, log.text()) {
            Ok(()) => tracing::info!("CRIU's log is in {}", path.display()),
            Err(error) => tracing::warn!("cannot keep CRIU's log in {}: {error}", path.display()),
        }
    }
}

fn bring_to_store(
    setup: &Setup,
    image: &Image,
    progress: &Progress,
    cancel: &AtomicBool,
) -> Result<Image, PersistError> {
    let store = &setup.config.store;
    let whole = image.manifest().map_or(0, |manifest| manifest.bytes);
    if image.is_staged() {
        survey::make_room(&setup.folder, &setup.lock, &store.limits(), whole, Written::Packed)?;
    } else {
        // It is safe as it is: no other has to go for it.
        let (free, keep) = (survey::free_space(setup.folder.path())?, store.min_free.bytes());
        if free < whole.saturating_add(keep) {
            return Err(PersistError::NotPacked { need: whole, free, keep });
        }
    }
    let cancelled = || cancel.load(Ordering::Relaxed);
    Ok(persist::persist(image, &setup.folder, &setup.lock, &setup.packing, progress, &cancelled)?)
}

/// In whole milliseconds.
pub(super) fn shown(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
}

/// Removes what the plan says. What cannot be read stays. It may take seconds: never on the thread that owns the state.
pub(super) fn rotate(setup: &Setup) {
    let store = &setup.config.store;
    match survey::rotate(&setup.folder, &setup.lock, &store.policy(), store.min_free.bytes()) {
        Ok((plan, _)) => plan.notes.iter().for_each(|note| tracing::warn!("{note}")),
        Err(error) => tracing::warn!("old images were not removed: {}", chain(&error)),
    }
    let bounds = store.garbage(setup.packing.key.as_deref());
    match gc::collect(&setup.folder, &setup.lock, &bounds, Utc::now(), &|| false) {
        Ok(done) => tracing::debug!(?done, "packs"),
        Err(error) => tracing::warn!("what no image needs was not swept: {}", chain(&error)),
    }
}
