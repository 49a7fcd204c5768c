//! Snapshots in the model, and the transfer of their images from memory to the store and to the replica.

use std::time::{Duration, Instant};

use super::model::{Copy, Doom, IMAGE, Image, Slot, candidate};
use super::plants::Plant;
use super::restores::Trouble;
use super::world::{Happening, World, tell};
use crate::policy::StartPoint;
use crate::supervisor::memory::only_there;
use crate::supervisor::state::{Event, Harm, State};
use rekindle_engine::snapshot::{self, dead};
use rekindle_store::ImageId;
use rekindle_store::manifest::Reason;
use rekindle_store::retention::admission::Need;
use rekindle_store::staging::admission::{self, Choice, Memory, SlotFacts, Worth};

/// A snapshot in progress.
#[derive(Debug)]
pub(super) struct Shot {
    pub(super) op: u32,
    /// The slot that it is made in, if there is one.
    slot: Option<usize>,
    id: Option<ImageId>,
    /// When the wait for killed children must be over.
    late: Option<Instant>,
    /// Additional time for a parent that has just learned of a death.
    aftermath: Option<Instant>,
    image: Option<Image>,
    /// Why it failed.
    failed: Option<snapshot::Error>,
    pub(super) cancelled: bool,
    pub(super) trouble: Option<Trouble>,
    freeze: Duration,
}

/// An image that is being stored.
#[derive(Debug)]
pub(super) struct Persist {
    pub(super) op: u32,
    pub(super) image: ImageId,
    pub(super) cancelled: bool,
    /// There was no room.
    refused: bool,
}

impl World {
    // ---- a snapshot ----

    pub(super) fn snapshot(&mut self, reason: Reason) {
        self.oracle.snapshot_begins(reason);
        let op = self.number();
        let id = self.next_id();
        let trouble = self.oracle.armed.take();
        let goes_back = self.run.as_ref().is_some_and(|run| run.ranks.deaths.is_going_back(run.machine.state()));
        let target = self.target();
        let Some(run) = &mut self.run else { return };
        let (slot, failed) = match target {
            Ok(slot) => (Some(slot), None),
            Err(error) => (None, Some(error)),
        };
        let refused = failed.is_some();
        let freeze = self.random.millis(50, 2000);
        run.work.shot = Some(Shot {
            op,
            slot,
            id: Some(id),
            late: None,
            aftermath: None,
            image: None,
            failed,
            cancelled: false,
            trouble,
            freeze,
        });
        tell!(self, "a snapshot ({reason:?}){}", trouble.map(|it| format!(", with {it:?}")).unwrap_or_default());
        if goes_back && self.plant != Some(Plant::ImageWithoutTheRank) {
            self.call_off();
        }
        if refused {
            return self.after(Duration::from_millis(20), Happening::Taken { op });
        }
        let wait = self.random.millis(20, 400);
        self.after(wait, Happening::Dump { op });
    }

    /// As `JobFolder::next_id`.
    fn next_id(&self) -> ImageId {
        let last = self.ground.copies().first().map_or(0, |(image, _)| image.id.sequence());
        ImageId::new(last + 1, self.clock())
    }

    /// Chooses a slot, in memory or on the disk.
    fn target(&mut self) -> Result<usize, snapshot::Error> {
        if self.ground.disk.reads_fail {
            return Err(snapshot::Error::Guard("EIO".into()));
        }
        if !self.ground.area {
            (self.ground.area, self.ground.on_disk) = (true, true);
        }
        let slots = self.slot_facts();
        if self.ground.on_disk {
            return self.target_on_disk(&slots);
        }
        let keep = self.config.snapshot.memory_reserve.bytes();
        let memory = Memory {
            image: IMAGE,
            besides: 0,
            available: Some(self.ground.available_memory()),
            below_limit: None,
            keep,
            keep_beside: self.ground.memory / 16,
        };
        let at = match admission::choose(&slots, &memory, |id| self.ground.is_stored(id))? {
            Choice::Beside(at) => at,
            Choice::Instead(at) => {
                self.ground.slots[1 - at] = Slot::default();
                at
            }
        };
        // The old content of the slot is lost.
        self.ground.slots[at] = Slot { image: None, allocated: IMAGE };
        Ok(at)
    }

    /// As `Area::take_on_disk`.
    fn target_on_disk(&mut self, slots: &[SlotFacts; 2]) -> Result<usize, snapshot::Error> {
        let unlimited =
            Memory { image: IMAGE, besides: 0, available: None, below_limit: None, keep: 0, keep_beside: 0 };
        let (Choice::Beside(at) | Choice::Instead(at)) = admission::choose(slots, &unlimited, |_| true)?;
        let need = Need { lasting: IMAGE, at_first: 2 * IMAGE - slots[at].allocated };
        self.make_room(need).map_err(|()| snapshot::Error::Guard("the disk has no room".into()))?;
        self.ground.slots[at] = Slot { image: None, allocated: IMAGE };
        Ok(at)
    }

    fn slot_facts(&self) -> [SlotFacts; 2] {
        let proven = self.proven_in_memory_only().filter(|_| self.plant != Some(Plant::MemoryIgnoresProof));
        let ours = self.ours(&self.ground.staged());
        self.ground.slots.map(|slot| {
            let image = slot.image.map(|(id, _)| id).filter(|id| ours.contains(id));
            let worth = if image.is_some() && image == proven { Worth::Proven } else { Worth::Older };
            SlotFacts { image, allocated: slot.allocated, worth }
        })
    }

    /// As `JobFolder::proven_in_memory_only`.
    pub(super) fn proven_in_memory_only(&self) -> Option<ImageId> {
        let staged = self.ours(&self.ground.staged());
        let stored = self.ours(&self.ground.stored().collect::<Vec<_>>()).first().copied();
        match self.ground.disk.reads_fail {
            false => admission::proven_only_here(staged, &self.ground.proven, stored),
            true => staged.last().copied(),
        }
    }

    /// The good images of the line.
    fn ours(&self, copies: &[(&Image, Copy)]) -> Vec<ImageId> {
        self.line().map(|line| line.good(copies.iter().map(candidate))).unwrap_or_default()
    }

    /// The job is frozen.
    pub(super) fn dump(&mut self, op: u32) {
        let now = self.now;
        let Some(job) = &self.job else { return };
        let Some(run) = &mut self.run else { return };
        let Some(shot) = run.work.shot.as_mut().filter(|shot| shot.op == op && !shot.cancelled) else { return };
        let failed = match shot.trouble {
            _ if job.ended.is_some() => Some(snapshot::Error::JobEnded),
            Some(Trouble::Lost) => Some(snapshot::Error::Lost {
                cause: Box::new(snapshot::Error::Cancelled),
                undo: "the driver did not restore a process".into(),
            }),
            Some(trouble) => Some(trouble.error().into()),
            None if self.ground.driver_silent => Some(snapshot::Error::Guard("the driver does not answer".into())),
            None => None,
        };
        if let Some(error) = failed {
            shot.failed = Some(error);
            return self.after(Duration::from_millis(10), Happening::Taken { op });
        }
        let keys = job.dead.iter().map(|child| (child.pid, 0));
        let long_dead = run.deaths.long_dead(keys, now);
        let fresh = long_dead.iter().any(|old| !old) && self.plant != Some(Plant::PoisonedImages);
        let late = shot.late.is_some_and(|late| late <= now);
        if fresh && !late {
            shot.late.get_or_insert(now + dead::LIMIT);
            shot.aftermath = Some(now + dead::AFTERMATH);
            tell!(self, "the snapshot waits: a child was killed, and its parent has not heard of it");
            return self.after(Duration::from_millis(200), Happening::Dump { op });
        }
        if let Some(aftermath) = shot.aftermath.filter(|at| *at > now && !late) {
            return self.at(aftermath, Happening::Dump { op });
        }
        let fatal = job
            .dead
            .iter()
            .filter_map(|child| child.noticed)
            .filter_map(|(at, ended)| Some((at, ended?)))
            .min_by_key(|(at, _)| *at);
        let work = job.work(now);
        let poison = fatal.map(|(at, ended)| Doom { at: work + at.saturating_duration_since(now), ended });
        let doom = poison.into_iter().chain(job.doom).min_by_key(|doom| doom.at);
        if poison.is_some() && !late {
            self.oracle.poisoned = shot.id;
        }
        let refused = self
            .random
            .chance(self.oracle.unrestorable)
            .then_some("(00.1) Error (criu/files-reg.c:2211): File tmp/o.txt has bad size 486 (expect 270)");
        shot.image = shot.id.map(|id| Image {
            id,
            lineage: std::rc::Rc::clone(&run.lineage),
            work,
            doom,
            hung: job.hung.is_some(),
            refused,
            no_files: false,
            gone: job.gone.clone(),
            stored: None,
            replicated: false,
        });
        let freeze = shot.freeze;
        self.after(freeze, Happening::Taken { op });
    }

    pub(super) fn snapshot_over(&mut self, op: u32) {
        let Some(mut shot) = self.run.as_mut().and_then(|run| run.work.shot.take_if(|shot| shot.op == op)) else {
            return;
        };
        // A frozen job is resumed; a complete image is published.
        let called_off = shot.cancelled && (shot.image.is_none() || self.random.chance(50));
        let result = match (shot.failed.take(), shot.image.take()) {
            (Some(error), _) => Err(error),
            _ if called_off => Err(snapshot::Error::Cancelled),
            (None, Some(image)) => self.publish(image, shot.slot),
            (None, None) => Err(snapshot::Error::JobEnded),
        };
        let event = match result {
            Ok(id) => self.taken(id, &shot),
            Err(error) => {
                tell!(self, "no snapshot: {error}");
                let Some(run) = &self.run else { return };
                let ended = run.ended.is_some();
                if !ended {
                    self.persist_newest();
                }
                let Some(run) = &self.run else { return };
                let event = match Event::not_taken(&error) {
                    Event::SnapshotMissed if run.ranks.deaths.is_going_back(run.machine.state()) => {
                        Event::SnapshotFailed(Harm::None)
                    }
                    event => event,
                };
                let called_off = matches!(error, snapshot::Error::Cancelled);
                self.oracle_sees_no_snapshot(&event, ended, called_off);
                event
            }
        };
        self.step(event);
        if self.run.as_ref().is_some_and(|run| run.ended.is_some() && run.has_job && run.finish.is_none()) {
            self.report_end();
        }
    }

    /// The image is complete, in a slot.
    fn publish(&mut self, image: Image, slot: Option<usize>) -> Result<ImageId, snapshot::Error> {
        let id = image.id;
        match slot {
            Some(_) if self.ground.on_disk && self.ground.disk.writes_fail => {
                return Err(snapshot::Error::Guard("EIO".into()));
            }
            Some(at) if self.ground.area => {
                self.ground.slots[at].image = Some((id, Copy::default()));
            }
            _ => return Err(snapshot::Error::Guard("the place for it is gone".into())),
        }
        self.ground.images.push(image);
        Ok(id)
    }

    fn taken(&mut self, id: ImageId, shot: &Shot) -> Event {
        tell!(self, "image {} is taken", id.sequence());
        let now = self.now;
        self.oracle.taken(id, now);
        let Some(run) = &mut self.run else { return Event::Tick };
        run.proofs.wait_for(id, run.work.clocks.starts, now);
        self.ranks_in_image();
        self.persist(id);
        Event::SnapshotTaken { freeze: shot.freeze }
    }

    // ---- from memory to the store ----

    pub(super) fn persist_newest(&mut self) {
        let Some(run) = &self.run else { return };
        let only_here = self
            .only_in_memory()
            .filter(|id| self.ground.staged().iter().map(candidate).any(|copy| copy.id == *id && run.line.has(&copy)));
        match only_here {
            Some(id) if run.work.persist.is_none() => self.persist(id),
            _ => {}
        }
    }

    /// As `Owner::store_again`.
    pub(super) fn store_again(&mut self) {
        let now = self.now;
        let Some(run) = self.run.as_mut().filter(|run| run.finish.is_none() && run.work.persist.is_none()) else {
            return;
        };
        let state = run.machine.state().clone();
        if run.work.retry.takes(&state, now) {
            self.persist_newest();
            // There may be nothing to store any more.
            self.oracle.failures.unstored.by = None;
        }
    }

    /// As the product does: not while a restart may read a slot.
    fn empty_slots_on_disk(&mut self) {
        let restoring = self.run.as_ref().is_some_and(|run| run.work.start.is_some());
        if !self.ground.on_disk || restoring {
            return;
        }
        for at in 0..2 {
            if self.ground.slots[at].image.is_some_and(|(id, _)| self.ground.is_stored(id)) {
                self.ground.slots[at] = Slot::default();
            }
        }
    }

    pub(super) fn only_in_memory(&self) -> Option<ImageId> {
        let of = |staged: Option<ImageId>, stored: Option<ImageId>| {
            staged.filter(|newest| only_there(*newest, stored, |id| self.ground.is_stored(id)))
        };
        let (staged, stored) = (self.ground.staged(), self.ground.stored().collect::<Vec<_>>());
        let good = |copies: &[(&Image, Copy)]| copies.iter().find(|(_, copy)| copy.mark.is_none()).map(|(it, _)| it.id);
        let ours = |copies: &[(&Image, Copy)]| self.ours(copies).first().copied();
        of(ours(&staged), ours(&stored)).or_else(|| of(good(&staged), good(&stored)))
    }

    fn persist(&mut self, image: ImageId) {
        let op = self.number();
        let Some(run) = &mut self.run else { return };
        run.work.persist = Some(Persist { op, image, cancelled: false, refused: false });
        run.work.retry.begins();
        self.oracle.failures.unstored.by = None;
        self.step(Event::PersistBegan);
        let refused = self.make_room(IMAGE.into()).is_err();
        if let Some(persist) = self.run.as_mut().and_then(|run| run.work.persist.as_mut()) {
            persist.refused = refused;
        }
        let takes = if refused { Duration::from_millis(20) } else { self.random.millis(300, 8000) };
        self.after(takes, Happening::Written { op });
    }

    pub(super) fn persist_over(&mut self, op: u32) {
        let Some(persist) = self.run.as_ref().and_then(|run| run.work.persist.as_ref()).filter(|it| it.op == op) else {
            return;
        };
        let id = persist.image;
        let fails = persist.cancelled || persist.refused || self.ground.disk.writes_fail;
        let staged = self.ground.slots.iter().filter(|_| self.ground.area).filter_map(|slot| slot.image);
        let copy = staged.into_iter().find(|(other, _)| *other == id).map(|(_, copy)| copy);
        // An image on a disk is compared with its hashes.
        let copy = copy.filter(|copy| !(copy.damaged && self.ground.on_disk));
        let room = self.ground.free() >= IMAGE;
        let stored = copy.filter(|_| !fails && room);
        if let Some(copy) = stored {
            let unsynced = self.plant == Some(Plant::StoredBeforeSync);
            if unsynced {
                self.after(Duration::from_secs(5), Happening::Synced { image: id });
            }
            let mark = if self.plant == Some(Plant::MarkLeftBehind) { None } else { copy.mark };
            if let Some(image) = self.ground.image_mut(id) {
                image.stored = Some(Copy { unsynced, mark, damaged: copy.damaged });
            }
            self.oracle.is_stored(id);
        }
        tell!(self, "image {} {}", id.sequence(), if stored.is_some() { "is in the store" } else { "is not stored" });
        if self.run.is_none() {
            return;
        }
        if stored.is_some() {
            self.empty_slots_on_disk();
            self.rotate();
        }
        let now = self.now;
        let Some(run) = &mut self.run else { return };
        let cancelled = run.work.persist.take().is_some_and(|persist| persist.cancelled);
        match stored {
            _ if cancelled => {}
            Some(_) => run.work.retry.succeeded(),
            None => {
                run.work.retry.failed(&self.config.snapshot, now);
                let due = run.work.retry.at(&State::Suspended { from: StartPoint::Cold });
                if self.plant == Some(Plant::StoreIsGivenUp) {
                    run.work.retry.begins();
                }
                self.oracle.not_stored(&self.config.snapshot, now);
                due.into_iter().for_each(|due| self.at(due, Happening::Store));
            }
        }
        if stored.is_some() {
            self.replicate(id);
        }
        self.step(Event::PersistEnded(stored.map(|_| Duration::from_secs(1))));
        self.settle_suspension();
        self.conclude();
    }

    pub(super) fn synced(&mut self, id: ImageId) {
        if let Some(Image { stored: Some(copy), .. }) = self.ground.image_mut(id) {
            copy.unsynced = false;
        }
    }
}
