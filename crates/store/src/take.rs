//! Takes a slot for an image: carries out the decision of [`admission`].

use crate::folder::JobFolder;
use crate::id::ImageId;
use crate::lock::WriterLock;
use crate::retention::survey::{self, Limits, NoRoom, Written};
use crate::staging::admission::{self, Choice, Memory, Refusal, SlotFacts, Worth};
use crate::staging::{Area, Error, Filling, Slot};
use rekindle_os::cgroup;

/// With two images in memory, at least the machine's memory divided by this stays free.
const KEPT_BESIDE: u64 = 16;

/// Why there is no slot.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// Memory has no room.
    #[error(transparent)]
    NoRoom(#[from] Refusal),
    /// The disk has no room.
    #[error(transparent)]
    DiskFull(#[from] NoRoom),
    /// A slot cannot be emptied or begun.
    #[error(transparent)]
    Area(#[from] Error),
}

/// The memory that an image needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Bytes of the image.
    pub image: u64,
    /// Bytes needed additionally until the job runs.
    pub besides: u64,
    /// Bytes that must stay free.
    pub keep: u64,
}

impl Area {
    /// Takes a slot for the image `id`, for a job in the control group of the process `member`. The newest good image
    /// stays, unless memory has room for one image only and the store has that one; then `instead` is called with its
    /// id.
    ///
    /// # Errors
    /// When there is no room, or a slot cannot be emptied.
    pub fn take(
        &self,
        folder: &JobFolder,
        id: ImageId,
        need: Need,
        member: i32,
        instead: impl FnOnce(ImageId),
    ) -> Result<Filling, TakeError> {
        let slots = self.slots();
        let memory = Memory {
            image: need.image,
            besides: need.besides,
            available: cgroup::memory_available(),
            below_limit: cgroup::memory_headroom(member),
            keep: need.keep,
            keep_beside: cgroup::memory_total().unwrap_or(0) / KEPT_BESIDE,
        };
        let facts = self.facts(folder);
        let is_stored = |id| {
            let copy = slots.iter().filter_map(Slot::image).find(|image| image.id == id);
            copy.is_some_and(|image| folder.is_stored_besides(&image))
        };
        let at = match admission::choose(&facts, &memory, is_stored)? {
            Choice::Beside(at) => at,
            Choice::Instead(at) => {
                if let Some(newest) = facts[at].image {
                    instead(newest);
                }
                folder.drop_links(&slots[1 - at]);
                slots[1 - at].empty()?;
                at
            }
        };
        folder.drop_links(&slots[at]);
        Ok(slots[at].begin(id)?)
    }

    /// Takes a slot on the disk for the image `id` of this size: the one without the newest good image. If there is no
    /// space for the image and for packing it, older images are removed from the store.
    ///
    /// # Errors
    /// When there is still no space, or a slot cannot be emptied.
    pub fn take_on_disk(
        &self,
        folder: &JobFolder,
        lock: &WriterLock,
        limits: &Limits,
        id: ImageId,
        bytes: u64,
    ) -> Result<Filling, TakeError> {
        let facts = self.facts(folder);
        let unlimited =
            Memory { image: bytes, besides: 0, available: None, below_limit: None, keep: 0, keep_beside: 0 };
        let (Choice::Beside(at) | Choice::Instead(at)) = admission::choose(&facts, &unlimited, |_| true)?;
        survey::make_room(folder, lock, limits, bytes.saturating_sub(facts[at].allocated), Written::Staged)?;
        let slot = &self.slots()[at];
        folder.drop_links(slot);
        slot.empty()?;
        Ok(slot.begin(id)?)
    }

    fn facts(&self, folder: &JobFolder) -> [SlotFacts; 2] {
        let (proven, ours) = (folder.proven_in_memory_only(), folder.line());
        self.slots().map(|slot| {
            // After a rewind, images that were abandoned have no value beside the image that was rewound to.
            let image = slot.image().filter(|image| image.is_good() && ours(image)).map(|image| image.id);
            let worth = if image.is_some() && image == proven { Worth::Proven } else { Worth::Older };
            SlotFacts { image, allocated: slot.allocated(), worth }
        })
    }
}
