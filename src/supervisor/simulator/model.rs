//! The model of what a supervisor works with: the job, images and their places, memory, disk and replica. It is the
//! truth, whatever the supervisor believes.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::policy::StartPoint;
use crate::supervisor::line::Candidate;
use rekindle_os::spawn::Ended;
use rekindle_store::{BadWhy, ImageId};

pub(super) const GIB: u64 = 1 << 30;
/// Bytes of an image. All images have the same size and share nothing: sharing is tested with the store.
pub(super) const IMAGE: u64 = 10 * GIB;

/// An end that is caused by the state of the job: after each restore it comes at the same point of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Doom {
    /// The amount of work.
    pub(super) at: Duration,
    pub(super) ended: Ended,
}

/// Properties of an image, which decide whether it restores and what happens to the job then.
#[derive(Debug, Clone)]
pub(super) struct Image {
    pub(super) id: ImageId,
    pub(super) lineage: Rc<str>,
    /// The work that the job had done.
    pub(super) work: Duration,
    pub(super) doom: Option<Doom>,
    /// Whether the job hung.
    pub(super) hung: bool,
    /// CRIU refuses it, for this reason each time.
    pub(super) refused: Option<&'static str>,
    /// The job has removed files that the image needs.
    pub(super) no_files: bool,
    /// Ranks that had died.
    pub(super) gone: BTreeSet<i32>,
    pub(super) stored: Option<Copy>,
    pub(super) replicated: bool,
}

/// A copy of an image.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Copy {
    /// Its bytes differ from what was written.
    pub(super) damaged: bool,
    pub(super) mark: Option<BadWhy>,
    /// It is only in the page cache, not on the disk.
    pub(super) unsynced: bool,
}

/// A place for an image in memory, or on the disk.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Slot {
    pub(super) image: Option<(ImageId, Copy)>,
    pub(super) allocated: u64,
}

/// What a run leaves in the store for the next one.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) lineage: Rc<str>,
    pub(super) base: Option<ImageId>,
    pub(super) completed: bool,
}

/// Everything that outlives a supervisor.
#[derive(Debug, Default)]
pub(super) struct Ground {
    /// Every image that was ever taken, oldest first, even if no copy exists.
    pub(super) images: Vec<Image>,
    pub(super) slots: [Slot; 2],
    /// Whether there are slots.
    pub(super) area: bool,
    /// Whether they are on the disk, and not on a tmpfs.
    pub(super) on_disk: bool,
    pub(super) record: Option<Record>,
    /// What the store says is proven.
    pub(super) proven: BTreeSet<ImageId>,
    pub(super) disk: Disk,
    /// Bytes of memory that are available while both slots are empty.
    pub(super) memory: u64,
    /// Another program uses the memory.
    pub(super) memory_short: bool,
    pub(super) driver_silent: bool,
    pub(super) port_taken: bool,
    pub(super) has_replica: bool,
    pub(super) replica_away: bool,
}

#[derive(Debug, Default)]
pub(super) struct Disk {
    pub(super) total: u64,
    /// Bytes of other users.
    pub(super) foreign: u64,
    pub(super) reads_fail: bool,
    pub(super) writes_fail: bool,
}

impl Ground {
    pub(super) fn image(&self, id: ImageId) -> Option<&Image> {
        self.images.iter().rev().find(|image| image.id == id)
    }

    pub(super) fn image_mut(&mut self, id: ImageId) -> Option<&mut Image> {
        self.images.iter_mut().rev().find(|image| image.id == id)
    }

    /// Images in the store, newest first.
    pub(super) fn stored(&self) -> impl Iterator<Item = (&Image, Copy)> {
        self.images.iter().rev().filter_map(|image| Some((image, image.stored?)))
    }

    /// Images in memory, newest first.
    pub(super) fn staged(&self) -> Vec<(&Image, Copy)> {
        let in_slot = |slot: &Slot| slot.image.and_then(|(id, copy)| Some((self.image(id)?, copy)));
        let mut staged: Vec<(&Image, Copy)> = self.slots.iter().filter(|_| self.area).filter_map(in_slot).collect();
        staged.sort_by_key(|(image, _)| std::cmp::Reverse(image.id));
        staged
    }

    /// As `JobFolder::copies`: newest first, an image in memory before the same image in the store.
    pub(super) fn copies(&self) -> Vec<(&Image, Copy)> {
        let mut copies: Vec<(&Image, Copy)> = self.staged();
        copies.extend(self.stored());
        copies.sort_by_key(|(image, _)| std::cmp::Reverse(image.id));
        copies
    }

    /// Whether a copy exists that is good as far as anybody knows.
    pub(super) fn has_good(&self, id: ImageId) -> bool {
        self.copies_of(id).any(|copy| copy.mark.is_none())
    }

    /// Whether a copy exists and none is damaged: with a damaged one, nobody can know which copy is kept.
    pub(super) fn is_untouched(&self, id: ImageId) -> bool {
        self.has_good(id) && self.copies_of(id).all(|copy| !copy.damaged)
    }

    fn copies_of(&self, id: ImageId) -> impl Iterator<Item = Copy> {
        let in_slot = move |slot: &Slot| slot.image.filter(|(other, _)| *other == id).map(|(_, copy)| copy);
        let staged = self.slots.iter().filter(|_| self.area).filter_map(in_slot);
        staged.chain(self.image(id).and_then(|image| image.stored))
    }

    pub(super) fn is_stored(&self, id: ImageId) -> bool {
        self.image(id).is_some_and(|image| image.stored.is_some())
    }

    pub(super) fn free(&self) -> u64 {
        let used = self.stored().fold(0_u64, |sum, _| sum + IMAGE);
        let used = if self.on_disk { used + self.in_slots() } else { used };
        self.disk.total.saturating_sub(used).saturating_sub(self.disk.foreign)
    }

    pub(super) fn available_memory(&self) -> u64 {
        if self.memory_short {
            return GIB / 8;
        }
        self.memory.saturating_sub(if self.on_disk { 0 } else { self.in_slots() })
    }

    fn in_slots(&self) -> u64 {
        self.slots.iter().map(|slot| slot.allocated).sum()
    }

    pub(super) fn lose_memory(&mut self) {
        self.slots = [Slot::default(); 2];
        self.area = false;
    }
}

/// What a supervisor can know of a copy.
pub(super) fn candidate<'a>((image, copy): &(&'a Image, Copy)) -> Candidate<'a> {
    Candidate { id: image.id, lineage: Some(&image.lineage), good: copy.mark.is_none(), mark: copy.mark }
}

/// The job's processes.
#[derive(Debug)]
pub(super) struct Job {
    /// Number of the life, counted over all runs.
    pub(super) life: u32,
    pub(super) from: StartPoint,
    pub(super) since: Instant,
    /// The work at the start of this life.
    pub(super) work: Duration,
    pub(super) doom: Option<Doom>,
    /// Since when it has done no work.
    pub(super) hung: Option<Instant>,
    /// Pids of killed children that nobody has waited for.
    pub(super) dead: Vec<DeadChild>,
    /// Ranks that have died.
    pub(super) gone: BTreeSet<i32>,
    pub(super) ended: Option<End>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct DeadChild {
    pub(super) pid: i32,
    /// When the parent waits for it, and whether the job ends then. It may never wait.
    pub(super) noticed: Option<(Instant, Option<Ended>)>,
}

impl Job {
    pub(super) fn work(&self, now: Instant) -> Duration {
        let until = self.hung.map_or(now, |hung| hung.min(now));
        self.work + until.saturating_duration_since(self.since)
    }
}

/// How a life ends, and what the kernel and the driver report about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub(super) ended: Ended,
    pub(super) want_of_memory: bool,
    pub(super) xid: Option<u32>,
}

impl End {
    pub(super) fn by_itself(ended: Ended) -> End {
        End { ended, want_of_memory: false, xid: None }
    }

    pub(super) fn signal(signal: i32) -> End {
        End::by_itself(Ended::Signal(signal))
    }
}
