//! Snapshots, and storing their images.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError, mpsc};
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use chrono::Utc;

use super::destination::Destination;
use super::finding::Finding;
use super::memory;
use super::remarks::{self, Repeats};
use super::signals::STOPS;
use super::state::{Event, Finish, Harm, State};
use super::times::{micros, shown};
use super::transfers::{self, PROGRESS, Source};
use super::{Message, Owner, Setup};
use crate::control::protocol::Snapped;
use crate::notifications::Passed;
use crate::telemetry::events::What;
use rekindle_base::chain;
use rekindle_criu::Log;
use rekindle_engine::snapshot::{self, Barrier, Launch, Subject, Taken};
use rekindle_os::{cgroup, durable, process};
use rekindle_store::gc;
use rekindle_store::manifest::Reason;
use rekindle_store::persist::{self, Progress, Unstored};
use rekindle_store::retention::survey::{self, NoRoom};
use rekindle_store::staging::{Area, Medium, Slot};
use rekindle_store::{Form, Image, ImageId, Place, Seen};

/// How often the free memory is checked.
pub(super) const LOOK: Duration = Duration::from_secs(2);

/// What follows if snapshots end the job again and again.
pub(super) const NO_MORE: &str = "the snapshots before this one ended the job, too. So that it gets further, no more are taken at the \
    interval, and the job runs on without new images. Find out why it cannot be resumed: it may use CUDA IPC without the \
    interposer (snapshot.interposer), or another program may take the GPU memory that it gives up for a moment. Then try with \
    `rekindle snapshot`: once one succeeds, the interval goes on";

/// The result of storing an image.
pub(super) struct Outcome {
    image: ImageId,
    /// The place of the image before.
    place: Place,
    source: Source,
    result: Result<Image, PersistError>,
    /// Without the removal of older images.
    took: Duration,
    /// Bytes.
    written: u64,
}

/// Why an image is only in memory.
#[derive(Debug, thiserror::Error)]
enum PersistError {
    #[error(transparent)]
    Store(#[from] rekindle_store::Error),
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    #[error("packing needs {} temporarily; {} is free, and {} must stay free (store.min-free)", ByteSize::b(*need), ByteSize::b(*free), ByteSize::b(*keep))]
    NotPacked { need: u64, free: u64, keep: u64 },
    #[error(transparent)]
    Persist(#[from] persist::Error),
    #[error(transparent)]
    Panicked(#[from] snapshot::Panicked),
}

impl Owner<'_> {
    pub(super) fn snapshot(&mut self, reason: Reason) {
        let Some((job, cancel)) = self.life.snapshot_begins() else { return };
        let life = self.life.number();
        self.watch.deaths.release_launchers();
        let (setup, sender) = (Arc::clone(self.setup), self.threads.sender.clone());
        if self.watch.deaths.is_going_back(self.machine.state()) {
            self.life.call_off();
        }
        let interval = self.chosen_interval();
        let (deaths, queues) = (Arc::clone(self.life.deaths()), Arc::clone(self.life.queues()));
        let full = self.clients.control.snapshot_begins();
        self.check_holds();
        self.clients.job_api.snapshot_begins();
        self.reporting.remarks.is_asked_for = reason != Reason::Interval;
        let event = self.tell(What::SnapshotBegan { reason });
        let stops = reason == Reason::Final || self.machine.is_stopping();
        let gate = self.reporting.listeners.before_snapshot(&self.setup.config, &event, stops);
        let turn = self.group.as_mut().and_then(|member| member.take_turn());
        let turn = turn.map(|turn| turn.cancelled_by(Arc::clone(&cancel)));
        let launch = Launch { lineage: self.line.lineage.clone(), ..self.setup.program.launch.clone() };
        self.spawn("snapshot", move || {
            let mut options = setup.config.snapshot_options();
            if full {
                options.full_copy_every = 1;
            }
            let criu = setup.criu.again();
            let subject = Subject {
                job: &job,
                folder: &setup.folder,
                lock: &setup.lock,
                options: &options,
                criu: &criu,
                launch: &launch,
                ours: snapshot::Ours { mapped: setup.program.ours(), work: &setup.program.work },
                staging: setup.images.staging.as_ref(),
                output: &setup.output,
                interval: interval.as_ref(),
                deaths: &deaths,
                queues: &queues,
                copier: &setup.copier,
                group: turn.as_ref().map(|turn| turn as &dyn Barrier),
            };
            let cancelled = || cancel.load(Ordering::Relaxed);
            // A phase of the freeze that panics is undone, so the job runs on whatever happens here. Without a message the
            // supervisor would wait for this thread for ever.
            let result =
                snapshot::guarded("the snapshot", || match gate.map_or(Passed::Yes, |gate| gate.pass(&cancelled)) {
                    Passed::Yes => snapshot::take(&subject, reason, &cancelled),
                    Passed::Refused(refused) => Err(snapshot::Error::Hook(Box::new(refused))),
                    Passed::CalledOff => Err(snapshot::Error::Cancelled),
                });
            let result = result.unwrap_or_else(|panicked| Err(panicked.into()));
            drop(job);
            let _ = sender.send(Message::Snapshot { life, result: Box::new(result) });
        });
    }

    /// A snapshot of the job's life with this number is over.
    pub(super) fn snapshot_done(&mut self, life: u32, result: Result<Taken, snapshot::Error>) {
        self.life.snapshot_ends();
        let mut failed = None;
        let event = match result {
            Ok(mut taken) => {
                let news = self.reporting.remarks.news(&taken.notes);
                news.iter().for_each(|note| tracing::warn!("{note}"));
                let bytes = taken.image.manifest().map_or(0, |m| m.bytes);
                let freeze = shown(taken.freeze);
                let size = ByteSize::b(bytes);
                let again = self.reporting.remarks.repeats.succeeded("snapshot");
                let again = again.map(|again| format!("; {again}")).unwrap_or_default();
                crate::routine!("image {}: {size}, the job was frozen for {freeze}{again}", taken.image.id);
                self.reporting.published.taken(&taken);
                self.reporting.tally.snapshot_taken(taken.freeze);
                self.deaths_image(&mut taken);
                self.checks.proofs.expect(taken.image.id, self.watch.starts, self.setup, Instant::now());
                self.tell_snapshot(&taken);
                self.answer_taken(&taken);
                self.clients.job_api.snapshot_ends(None);
                self.group_snapped(taken.image.id);
                self.checks.rehearsals.image_taken(taken.kinds, Instant::now());
                self.persist(taken.image);
                Event::SnapshotTaken { freeze: taken.freeze }
            }
            Err(error) => {
                let stops = self.machine.is_stopping();
                let lost = error.job_is_lost();
                let event = match Event::not_taken(&error) {
                    // Another attempt would be in the way.
                    Event::SnapshotMissed if self.watch.deaths.is_going_back(self.machine.state()) => {
                        Event::SnapshotFailed(Harm::None)
                    }
                    event => event,
                };
                failed = Some(chain(&error));
                self.clients.control.snapshot_failed(&chain(&error));
                self.clients.job_api.snapshot_ends(Some(chain(&error)));
                if !self.life.is_present(life) {
                    // Nothing went wrong: the job was killed, and the next one runs.
                    tracing::info!("no snapshot was taken: the job ended meanwhile ({})", chain(&error));
                } else if self.life.ended().is_none() {
                    let mut why = chain(&error);
                    if lost && !stops && self.machine.is_last_try() {
                        why.push_str("; ");
                        why.push_str(NO_MORE);
                    }
                    self.keep_criu_log("dump", error.criu_log());
                    match error {
                        _ if lost => tracing::error!("the snapshot failed and the job cannot continue: {why}"),
                        snapshot::Error::Cancelled if stops => tracing::info!("the final snapshot was cancelled"),
                        snapshot::Error::Cancelled => tracing::info!("the snapshot was cancelled; the job continues"),
                        _ if stops => tracing::error!("the final snapshot failed: {why}"),
                        snapshot::Error::JobEnded => tracing::info!("no snapshot was taken: {why}"),
                        _ => self.log_failure(&why),
                    }
                    self.reporting.tally.snapshot_failed();
                    self.tell(What::SnapshotFailed { why: why.clone(), job_lost: lost });
                    self.reporting.published.snapshot_failed(why);
                    // Memory may have room for one image only, the one that is not stored yet.
                    self.persist_newest();
                }
                event
            }
        };
        self.step(event);
        if let Some(why) = failed {
            self.group_not_snapped(why);
        }
        self.remember();
        if self.life.ended().is_none() {
            for signal in self.life.take_unsent() {
                self.signal(signal);
            }
        }
        // An end that came during the snapshot was postponed; it is reported with the present images.
        if let Some(ended) = self.life.unreported() {
            self.report_end(ended);
        }
    }

    /// Logs that a snapshot failed. With an interval it may fail for the same reason each time.
    fn log_failure(&self, why: &str) {
        // Its end may be the cause of the failure, and its message comes only after this.
        let is_over = self.life.job().is_none_or(|job| job.main_pid().is_none_or(process::is_ending));
        let text = remarks::of_failed_snapshot(why, is_over);
        let remarks = &self.reporting.remarks;
        let line = remarks.repeats.failed("snapshot", &text, Instant::now());
        match line.or_else(|| remarks.is_asked_for.then(|| text.clone())) {
            Some(line) => tracing::error!("{line}"),
            None => tracing::debug!("{text}"),
        }
    }

    fn answer_taken(&mut self, taken: &Taken) {
        let snapped = Snapped {
            image: taken.image.id,
            freeze_us: micros(taken.freeze),
            bytes: taken.image.manifest().map_or(0, |manifest| manifest.bytes),
            stored: false,
        };
        self.clients.control.snapshot_taken(&snapped);
    }

    /// Records on this machine that the store has the image, to notice later if it is missing.
    fn note_seen(&self, image: &Image) {
        let folder = &self.setup.folder;
        let seen = Seen::of(folder.name(), folder.trust());
        let noted = seen.zip(image.manifest()).map(|(seen, manifest)| seen.note(&manifest.lineage, image.id));
        if let Some(Err(error)) = noted {
            tracing::warn!(
                "cannot note image {} as the newest one, so a replacement by an older state would not be noticed: {}",
                image.id,
                chain(&error)
            );
        }
    }

    // ---- from memory to the store ----

    /// Stores the newest image that is only in memory, unless one is being stored.
    pub(super) fn persist_newest(&mut self) {
        match self.only_in_memory().filter(|image| self.is_usable(image)) {
            Some(image) if !self.transfers.is_storing() => {
                self.group_stores(image.id);
                self.persist(image);
            }
            Some(_) => {}
            None => self.pack_newest(),
        }
    }

    /// Tries again to store an image, if that is due. Nothing else may come that would: a suspended job takes no snapshot.
    pub(super) fn store_again(&mut self) {
        if self.transfers.retry.takes(self.machine.state(), Instant::now()) {
            self.persist_newest();
        }
    }

    /// Packs the newest image if it is plain files. Not while a restart may read those: they are removed when it is
    /// packed.
    pub(super) fn pack_newest(&mut self) {
        if self.transfers.may_pack()
            && let Some(image) = self.newest_loose()
        {
            self.persist(image);
        }
    }

    /// The newest image of the line if it is only in memory; otherwise the newest of all, if that is.
    pub(super) fn only_in_memory(&self) -> Option<Image> {
        let folder = &self.setup.folder;
        let (staged, stored) = (folder.staged(), folder.images().unwrap_or_default());
        let of = |which: &dyn Fn(&Image) -> bool| {
            let newest = staged.iter().find(|image| which(image))?;
            let stored = stored.iter().find(|image| which(image)).map(|image| image.id);
            memory::only_there(newest.id, stored, |_| folder.is_stored_besides(newest)).then(|| newest.clone())
        };
        of(&|image| self.is_usable(image)).or_else(|| of(&Image::is_good))
    }

    /// The newest good image, if it is in the store as plain files.
    fn newest_loose(&self) -> Option<Image> {
        let newest = self.setup.folder.images().ok()?.into_iter().find(Image::is_good)?;
        (newest.form() == Form::Loose).then_some(newest)
    }

    fn persist(&mut self, image: Image) {
        let (setup, sender) = (Arc::clone(self.setup), self.threads.sender.clone());
        let source = if image.is_staged() { Source::Memory } else { Source::PlainFiles };
        let (repeats, needs_slot) = (self.reporting.remarks.repeats.clone(), self.checks.rehearsals.needs_slot());
        let transfers::Store { progress, cancel, files_go } = self.transfers.store_begins(image.id, source);
        self.step(Event::PersistBegan);
        self.spawn("persist", move || {
            process::be_nice();
            let began = Instant::now();
            let result = {
                let _files_go =
                    (source == Source::PlainFiles).then(|| files_go.lock().unwrap_or_else(PoisonError::into_inner));
                let store = || store_image(&setup, &image, &progress, &cancel);
                snapshot::guarded("storing it", store).unwrap_or_else(|panicked| Err(panicked.into()))
            };
            let took = began.elapsed();
            if result.is_ok() {
                empty_slots_on_disk(&setup, &files_go, &needs_slot);
            }
            // Not before it is packed: plain files need extra space only temporarily, and no other image may be removed
            // for that. Also not while a restore reads memory from an image: that is done afterwards.
            if result.is_ok() || source == Source::PlainFiles {
                rotate(&setup, &repeats);
            }
            let _ = sender.send(Message::Persisted(Box::new(Outcome {
                image: image.id,
                place: image.place,
                source,
                result,
                took,
                written: progress.written(),
            })));
        });
    }

    pub(super) fn persisted(&mut self, outcome: Outcome) {
        self.transfers.store_ends(outcome.image);
        let took = outcome.took;
        let stored = outcome.result.is_ok();
        let image = outcome.image;
        let called_off = matches!(outcome.result, Err(PersistError::Persist(persist::Error::Cancelled)));
        if !called_off {
            match stored {
                true => self.transfers.retry.succeeded(),
                false => self.transfers.retry.failed(&self.setup.config.snapshot, Instant::now()),
            }
        }
        match outcome.result {
            Ok(image) => {
                let again = self.reporting.remarks.repeats.succeeded("store");
                let again = again.map(|again| format!("; {again}")).unwrap_or_default();
                crate::routine!("image {} was stored in {}{again}", image.id, shown(took));
                self.note_seen(&image);
                let written = outcome.written;
                self.tell(What::Stored { image: image.id, took_us: micros(took), written });
                self.reporting.published.persist_failure = None;
                self.answer_stored(&image);
                if !self.is_in_group() {
                    self.replicate(image);
                }
                if self.machine.is_postponed() && self.machine.held_off().is_none() {
                    let text = format!(
                        "a snapshot had to wait: storing the image before it took {}, longer than the interval",
                        shown(took)
                    );
                    self.reporting.remarks.repeats.warn("interval", &text);
                }
            }
            Err(PersistError::Persist(persist::Error::Cancelled)) if outcome.source == Source::PlainFiles => {
                tracing::debug!("image {} was not packed: a restart may need it", outcome.image);
            }
            Err(PersistError::Persist(persist::Error::Cancelled)) => {
                let why = format!("image {} was not stored", outcome.image);
                tracing::info!("{why}");
                self.clients.control.not_stored(outcome.image, &why);
            }
            Err(error) => {
                let folder = &self.setup.folder;
                let place = slot_in(outcome.place);
                let what = match folder.staged().iter().any(|image| image.id == outcome.image) {
                    _ if folder.is_stored(outcome.image) => "is in the store, but not packed".to_owned(),
                    true => format!("is only in {place}"),
                    false => format!("is lost, it was only in {place}"),
                };
                let why = format!("image {} {what}: {}", outcome.image, chain(&error));
                match self.reporting.remarks.repeats.failed("store", &why, Instant::now()) {
                    Some(line) => tracing::error!("{line}"),
                    None => tracing::debug!("{why}"),
                }
                self.tell(What::NotStored { image: outcome.image, why: why.clone() });
                self.clients.control.not_stored(outcome.image, &why);
                self.reporting.published.persist_failure = Some(why);
            }
        }
        self.step(Event::PersistEnded(stored.then_some(took)));
        self.group_persisted(image, stored);
        // The restart that packing was cancelled for may be over.
        if outcome.source == Source::PlainFiles && called_off && self.life.job().is_some() {
            self.pack_newest();
        }
    }

    /// Images in memory must not take memory that the job needs: if little is free, the older image is removed, and
    /// then the newest, if it is stored.
    pub(super) fn give_memory_back(&mut self) {
        let Some(area) = &self.setup.images.staging else { return };
        let reserve = self.setup.config.snapshot.memory_reserve.bytes();
        let is_short = || {
            let limit = self.life.job().and_then(|job| cgroup::memory_headroom(job.root.pid()));
            cgroup::memory_available().into_iter().chain(limit).min().is_some_and(|left| left < reserve)
        };
        // In other states an image may be being read or written.
        if !matches!(self.machine.state(), State::Running(_)) || !is_short() || self.checks.rehearsals.call_off() {
            return;
        }
        let newest = area.images().into_iter().find(Image::is_good).map(|image| image.id);
        let needed = memory::Needed {
            only_here: self.only_in_memory().map(|image| image.id),
            proven: self.setup.folder.proven_in_memory_only(),
            persisting: self.transfers.storing(),
        };
        let mut slots = area.slots();
        slots.sort_by_key(|slot| memory::turn(slot.image().map(|image| image.id), newest));
        for slot in slots {
            let image = slot.image().map(|image| image.id);
            if needed.has(image) || slot.allocated() == 0 || !is_short() {
                continue;
            }
            self.setup.folder.drop_links(&slot);
            match slot.empty() {
                Ok(()) => {
                    tracing::warn!(
                        "memory is short (snapshot.memory-reserve): removed {}",
                        image.map_or_else(
                            || "the memory prepared for the next image".into(),
                            |id| format!("image {id} in memory")
                        )
                    );
                    if self.setup.copier.forget() {
                        // That memory is free in a moment: the next check decides about the other slot.
                        return;
                    }
                }
                Err(error) => {
                    let text = format!("memory is short, and memory of images cannot be freed: {}", chain(&error));
                    self.reporting.remarks.repeats.warn("memory", &text);
                }
            }
        }
    }

    /// The job is over: stores the image that is only in memory, and frees memory. A second signal to stop ends the
    /// wait. Returns the image that could not be stored.
    pub(super) fn leave_memory(&mut self, finish: &Finish, messages: &mpsc::Receiver<Message>) -> Option<ImageId> {
        // Memory of an earlier run is freed too, even if this run makes its images elsewhere.
        let ours = self.setup.images.staging.as_ref();
        let mut others = Area::all_of(&self.setup.folder);
        others.retain(|area| Some(area.path()) != ours.map(Area::path));
        if ours.is_none() && others.is_empty() {
            return None;
        }
        match memory::at_the_end(finish, self.end.stops.is_at_once()) {
            memory::AtTheEnd::NotNeeded => self.transfers.call_off(Destination::Store),
            memory::AtTheEnd::LeftThere => {}
            memory::AtTheEnd::Stored => self.persist_newest(),
        }
        self.wait_for(Destination::Store, messages);
        if !self.lease.is_held() {
            return None;
        }
        match self.only_in_memory().filter(|_| *finish != Finish::Completed) {
            Some(image) => {
                let (id, at, store) = (image.id, image.dir.display(), self.setup.folder.path().display());
                let place = slot_in(image.place);
                if self.end.stops.is_at_once() {
                    tracing::warn!(
                        "image {id} is only in {place}, at {at}, and is lost when the machine restarts. The same \
                         command continues from it"
                    );
                    return None;
                }
                let why =
                    self.reporting.published.persist_failure.clone().unwrap_or_else(|| "it was not stored".into());
                tracing::error!(
                    "the job is over, and its last image {id} is only in {place}, at {at} ({why}). It is lost when the \
                     machine restarts, and in memory when its container ends. Free space in {store} and run the same \
                     command again on this machine: it continues from this image"
                );
                Some(id)
            }
            None => {
                for area in ours.into_iter().chain(&others) {
                    area.slots().iter().for_each(|slot| self.setup.folder.drop_links(slot));
                    if let Err(error) = area.close() {
                        tracing::warn!("cannot free {}: {}", area.path().display(), chain(&error));
                    }
                }
                None
            }
        }
    }

    /// The job is over: waits until an image is at its destination. A second signal to stop ends the wait.
    pub(super) fn wait_for(&mut self, destination: Destination, messages: &mpsc::Receiver<Message>) {
        while self.transfers.is_under_way(destination) {
            self.start_waiting_threads();
            if self.end.stops.is_at_once() || !self.holds_the_lock() {
                self.transfers.call_off(destination);
            }
            if destination == Destination::Replica && self.machine_ends() {
                tracing::warn!("the machine ends now: the last image is not in the replica");
                self.transfers.call_off(destination);
            }
            match messages.recv_timeout(PROGRESS) {
                Ok(Message::Persisted(outcome)) if destination == Destination::Store => self.persisted(*outcome),
                Ok(Message::Replicated(report)) => self.replicated(*report),
                Ok(Message::Signal(signal, at)) if STOPS.contains(&signal) => {
                    let _ = self.end.stops.signal(signal, at);
                }
                Ok(Message::Control(incoming)) => self.heard_late(*incoming),
                Ok(Message::Hook(report)) => self.hook_failed(report),
                Ok(Message::Watched(Finding::Notice(change))) => self.announced(change),
                Ok(Message::Group(news)) => self.group_event_after_end(*news),
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => self.publish(),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
    }

    /// Saves CRIU's log of a failure for diagnosis: the last one of each kind.
    pub(super) fn keep_criu_log(&self, kind: &str, log: Option<&Log>) {
        let Some(log) = log else { return };
        let path = self.setup.folder.log_dir().join(format!("criu-{kind}.log"));
        match durable::replace_file(&path, log.text().as_bytes(), 0o600) {
            Ok(()) => tracing::info!("CRIU's log is in {}", path.display()),
            Err(error) => tracing::warn!("cannot save CRIU's log in {}: {error}", path.display()),
        }
    }
}

fn store_image(setup: &Setup, image: &Image, progress: &Progress, cancel: &AtomicBool) -> Result<Image, PersistError> {
    let (store, folder, packing) = (&setup.config.store, &setup.folder, &setup.images.packing);
    let cancelled = || cancel.load(Ordering::Relaxed);
    if image.is_staged() {
        let stored = persist::store(image, folder, &setup.lock, &store.limits(), packing, progress, &cancelled);
        return stored.map_err(|error| match error {
            Unstored::NoRoom(error) => error.into(),
            Unstored::Persist(error) => error.into(),
        });
    }
    // It is stored already; no other image must be removed to pack it. Holes take no space.
    let whole = image.data().unwrap_or_else(|_| image.manifest().map_or(0, |manifest| manifest.bytes));
    let (free, keep) = (survey::free_space(folder.dir())?, store.min_free.bytes());
    if free < whole.saturating_add(keep) {
        return Err(PersistError::NotPacked { need: whole, free, keep });
    }
    Ok(persist::persist(image, folder, &setup.lock, packing, progress, &cancelled)?)
}

fn slot_in(place: Place) -> &'static str {
    if place == Place::Slot { "a slot on the disk" } else { "memory" }
}

/// Empties slots on the disk whose image is stored: the packs take less space, and a restart reads those. Not while a
/// restart may read a slot, nor before a rehearsal that needs one.
pub(super) fn empty_slots_on_disk(setup: &Setup, files_go: &Mutex<()>, is_needed: &AtomicBool) {
    if is_needed.load(Ordering::Relaxed) {
        return;
    }
    let _nobody_reads = match files_go.try_lock() {
        Ok(lock) => lock,
        Err(TryLockError::Poisoned(lock)) => lock.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    for area in Area::all_of(&setup.folder).iter().filter(|area| area.medium() == Medium::Disk) {
        let is_stored = |slot: &Slot| slot.image().is_some_and(|image| setup.folder.is_stored_besides(&image));
        for slot in area.slots().iter().filter(|slot| is_stored(slot)) {
            if let Err(error) = slot.empty() {
                tracing::warn!("{} is not given back: {}", slot.dir().display(), chain(&error));
            }
        }
    }
}

/// Removes the images that retention does not keep; unreadable images are kept. This can take seconds, so it must not
/// run on the thread that owns the state.
pub(super) fn rotate(setup: &Setup, repeats: &Repeats) {
    let store = &setup.config.store;
    match survey::rotate(&setup.folder, &setup.lock, &store.policy(), store.min_free.bytes()) {
        Ok((plan, _)) => {
            (0..).zip(&plan.notes).for_each(|(n, note)| repeats.warn(&format!("rotate {n}"), &note.to_string()));
        }
        Err(error) => repeats.warn("rotate", &format!("old images were not removed: {}", chain(&error))),
    }
    let bounds = store.garbage(setup.images.packing.key.as_deref());
    match gc::collect(&setup.folder, &setup.lock, &bounds, Utc::now(), &|| false) {
        Ok(done) => tracing::debug!(?done, "packs"),
        Err(error) => repeats.warn("sweep", &format!("unneeded content was not swept: {}", chain(&error))),
    }
}
