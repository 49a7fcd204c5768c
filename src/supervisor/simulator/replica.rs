//! The replica in the model: images are sent to it, and fetched from it before a run.

use std::rc::Rc;
use std::time::Duration;

use super::model::{Copy, GIB, IMAGE, Record, candidate};
use super::world::{Happening, World, tell};
use rekindle_store::ImageId;

impl World {
    pub(super) fn replicate(&mut self, id: ImageId) {
        let op = self.number();
        let Some(run) = self.run.as_mut().filter(|_| self.ground.has_replica) else { return };
        if run.work.replicating.is_some() {
            run.work.next_replicated = Some(id);
            return;
        }
        run.work.replicating = Some((op, id));
        let takes = self.random.millis(500, 20_000);
        self.after(takes, Happening::Replicated { op });
    }

    pub(super) fn replicate_newest(&mut self) {
        let newest = self.ground.stored().find(|(_, copy)| copy.mark.is_none());
        if let Some(id) = newest.filter(|(image, _)| !image.replicated).map(|(image, _)| image.id) {
            self.replicate(id);
        }
    }

    pub(super) fn replicated(&mut self, op: u32) {
        let Some(run) = &mut self.run else { return };
        let Some((_, id)) = run.work.replicating.filter(|(other, _)| *other == op) else { return };
        if self.ground.replica_away && run.work.next_replicated.is_none() {
            return self.after(Duration::from_secs(30), Happening::Replicated { op });
        }
        run.work.replicating = None;
        let next = run.work.next_replicated.take();
        if !self.ground.replica_away && self.ground.is_stored(id) {
            tell!(self, "image {} is in the replica", id.sequence());
            self.ground.image_mut(id).into_iter().for_each(|image| image.replicated = true);
        }
        next.into_iter().for_each(|id| self.replicate(id));
    }

    /// The job is over, and its last image is sent.
    pub(super) fn replicate_at_the_end(&mut self) {
        let newest = self.ground.stored().find(|(_, copy)| copy.mark.is_none()).map(|(image, _)| image.id);
        if self.ground.has_replica && !self.ground.replica_away {
            newest.and_then(|id| self.ground.image_mut(id)).into_iter().for_each(|image| image.replicated = true);
        }
    }

    /// Before a run: fetches the newest image of the replica if it is newer than all here. As `cli::replica`, without
    /// bytes.
    pub(super) fn bring_newest(&mut self) -> Result<(), &'static str> {
        if !self.ground.has_replica || self.ground.record.as_ref().is_some_and(|record| record.completed) {
            return Ok(());
        }
        let newest = self.ground.copies().iter().map(candidate).find(|copy| copy.good).map(|copy| copy.id);
        if self.ground.replica_away {
            return newest.map(|_| ()).ok_or("whether the replica has an image is not known");
        }
        let theirs = self.ground.images.iter().rev().find(|image| image.replicated && image.stored.is_none());
        let Some(theirs) = theirs.filter(|image| newest.is_none_or(|newest| image.id > newest)) else { return Ok(()) };
        if self.ground.free() < IMAGE + GIB || self.ground.disk.writes_fail {
            return Err("the image of the replica cannot be fetched");
        }
        let (id, lineage) = (theirs.id, Rc::clone(&theirs.lineage));
        tell!(self, "image {} is fetched from the replica", id.sequence());
        if self.ground.record.as_ref().is_none_or(|record| record.lineage != lineage) {
            self.ground.record = Some(Record { lineage, base: None, completed: false });
        }
        self.ground.image_mut(id).into_iter().for_each(|image| image.stored = Some(Copy::default()));
        Ok(())
    }
}
