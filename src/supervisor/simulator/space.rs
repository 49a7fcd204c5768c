//! Removals in the model: from the store, for the next image, and from memory. The product decides.

use std::path::Path;

use super::model::{IMAGE, Slot, candidate};
use super::plants::Plant;
use super::world::{World, tell};
use crate::supervisor::memory::{Needed, turn};
use crate::supervisor::state::State;
use rekindle_store::retention::admission::{self as room, Admission, Need};
use rekindle_store::retention::{self, FactKind, Facts, Gathering, Line, Pin, Proof, Room, Sizes, Use, Whole};
use rekindle_store::{Evidence, ImageId};

impl World {
    fn facts(&self) -> (Vec<Facts>, Sizes, Room) {
        let held = self.held();
        let ignores_proof = self.plant == Some(Plant::RotationIgnoresProof);
        let line = self.line().filter(|_| self.plant != Some(Plant::RotationIgnoresTheLine));
        let mut sizes = Gathering::<u8>::default();
        let facts = self.ground.stored().map(|(image, copy)| {
            sizes.own(image.id, IMAGE);
            let proven = self.ground.proven.contains(&image.id) && !ignores_proof;
            Facts {
                id: image.id,
                taken: image.id.taken(),
                kind: if copy.mark.is_some() { FactKind::Bad } else { FactKind::Good },
                pin: Pin::None,
                in_use: if held.contains(&Some(image.id)) { Use::Held } else { Use::None },
                proof: if proven { Proof::Proven } else { Proof::None },
                evidence: Evidence::Taken,
                line: if line.as_ref().is_none_or(|line| line.may_have(&candidate(&(image, copy)))) {
                    Line::Ours
                } else {
                    Line::Other
                },
                whole: Whole::Itself,
            }
        });
        let mut facts: Vec<Facts> = facts.collect();
        let waiting = self.run.as_ref().map(|run| run.proofs.waiting()).unwrap_or_default();
        if self.plant != Some(Plant::RotationIgnoresWhatIsNext) {
            retention::await_proof(&mut facts, &waiting);
        }
        let room = Room { free: self.ground.free(), pending: 0, min_free: self.config.store.min_free.bytes() };
        (facts, sizes.finish(None), room)
    }

    /// The images that are being replicated or restored.
    fn held(&self) -> [Option<ImageId>; 2] {
        let Some(run) = &self.run else { return [None; 2] };
        let goal = run.work.goal.filter(|_| self.plant != Some(Plant::RotationIgnoresTheRestore));
        [run.work.replicating.map(|(_, id)| id), goal]
    }

    pub(super) fn rotate(&mut self) {
        if self.ground.disk.reads_fail || self.ground.disk.writes_fail {
            return;
        }
        let (facts, sizes, room) = self.facts();
        let plan = retention::plan(&facts, &self.config.store.policy(), self.clock(), &sizes, &room);
        let gone: Vec<ImageId> = plan.removals().collect();
        self.check_rotation(&gone);
        self.remove(&gone);
    }

    /// As `survey::make_room`.
    pub(super) fn make_room(&mut self, need: Need) -> Result<(), ()> {
        if self.ground.disk.reads_fail {
            return Err(());
        }
        let policy = self.config.store.policy();
        let mut asked = false;
        loop {
            let (facts, sizes, room) = self.facts();
            let admission = room::admit(need, &facts, &policy, self.clock(), &sizes, &room, Path::new("/"));
            self.oracle.short_of_room |= admission != Admission::Admit;
            match admission {
                Admission::Admit => return Ok(()),
                Admission::AfterRemoving(removals) if !asked && !self.ground.disk.writes_fail => {
                    self.remove(&removals.iter().map(|removal| removal.id).collect::<Vec<_>>());
                    asked = true;
                }
                Admission::AfterRemoving(_) | Admission::Refuse(_) => return Err(()),
            }
        }
    }

    fn remove(&mut self, ids: &[ImageId]) {
        for id in ids {
            tell!(self, "image {} is removed", id.sequence());
            self.oracle.is_removed(*id);
            self.ground.image_mut(*id).into_iter().for_each(|image| image.stored = None);
        }
    }

    /// Memory is short.
    pub(super) fn give_memory_back(&mut self) {
        let reserve = self.config.snapshot.memory_reserve.bytes();
        let short = !self.ground.on_disk && self.ground.available_memory() < reserve;
        let Some(run) = self.run.as_ref().filter(|run| run.is_running() && short) else {
            return;
        };
        let newest = self.ground.staged().into_iter().find(|(_, copy)| copy.mark.is_none()).map(|(image, _)| image.id);
        let persisting = run.work.persist.as_ref().map(|persist| persist.image);
        let proven = self.proven_in_memory_only();
        let needed = Needed { only_here: self.only_in_memory(), proven, persisting };
        let mut order = [0, 1];
        let image = |at: usize| self.ground.slots[at].image.map(|(id, _)| id);
        order.sort_by_key(|at| turn(image(*at), newest));
        for at in order {
            if !needed.has(self.ground.slots[at].image.map(|(id, _)| id)) {
                tell!(self, "the memory of slot {at} is given back");
                self.ground.slots[at] = Slot::default();
            }
        }
    }

    /// The memory of a suspended job is freed once its image is stored.
    pub(super) fn settle_suspension(&mut self) {
        let Some(run) = &mut self.run else { return };
        if !matches!(run.machine.state(), State::Suspended { .. }) {
            run.emptied = false;
            return;
        }
        if run.work.persist.is_some() || run.emptied {
            return;
        }
        run.emptied = true;
        let proven = self.proven_in_memory_only();
        let needed = Needed { only_here: self.only_in_memory(), proven, persisting: None };
        for slot in &mut self.ground.slots {
            if !needed.has(slot.image.map(|(id, _)| id)) {
                *slot = Slot::default();
            }
        }
    }
}
