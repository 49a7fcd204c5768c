//! Takes a slot for an image: what [`super::admission`] decided is done.

use super::admission::{self, Choice, Memory, Refusal, SlotFacts, Worth};
use super::{Area, Error, Filling};
use crate::folder::JobFolder;
use crate::id::ImageId;
use rekindle_os::cgroup;

/// With two images in memory, at least this part of the machine's memory stays free.
const KEPT_BESIDE: u64 = 16;

/// Why there is no slot.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// Memory has no room.
    #[error(transparent)]
    NoRoom(#[from] Refusal),
    /// A slot cannot be emptied or begun.
    #[error(transparent)]
    Area(#[from] Error),
}

/// What an image will take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Bytes of the image.
    pub image: u64,
    /// Bytes that are needed besides, until the job runs.
    pub besides: u64,
    /// Bytes that must stay free.
    pub keep: u64,
}

impl Area {
    /// Takes a slot for the image `id`, for a job in the control group of the process `member`. The newest good image stays,
    /// unless memory has room for one only and the store has that image; then `instead` is told its name.
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
        let (proven, ours) = (folder.proven_in_memory_only(), folder.line());
        let facts = |at: usize| {
            // One that the job went back from is worth nothing beside the one that it went back to.
            let image = slots[at].image().filter(|image| image.is_good() && ours(image)).map(|image| image.id);
            let worth = if image.is_some() && image == proven { Worth::Proven } else { Worth::Older };
            SlotFacts { image, allocated: slots[at].allocated(), worth }
        };
        let memory = Memory {
            image: need.image,
            besides: need.besides,
            available: cgroup::memory_available(),
            below_limit: cgroup::memory_headroom(member),
            keep: need.keep,
            keep_beside: cgroup::memory_total().unwrap_or(0) / KEPT_BESIDE,
        };
        let facts = [facts(0), facts(1)];
        let at = match admission::choose(&facts, &memory, |id| folder.is_stored(id))? {
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
}
