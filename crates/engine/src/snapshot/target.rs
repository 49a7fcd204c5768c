//! Where an image is made: in memory, or in the store.

use std::path::Path;

use rekindle_store::manifest::Manifest;
use rekindle_store::staging::Filling;
use rekindle_store::{Draft, Image, ImageId};

use super::Error;

/// An image while it is made. Dropped, it leaves none.
#[derive(Debug)]
pub(super) enum Target {
    /// In memory; it is brought to the store later.
    Slot(Filling),
    /// In the store.
    Draft(Draft),
}

impl Target {
    pub(super) fn id(&self) -> ImageId {
        match self {
            Target::Slot(filling) => filling.id(),
            Target::Draft(draft) => draft.id(),
        }
    }

    pub(super) fn dir(&self) -> &Path {
        match self {
            Target::Slot(filling) => filling.dir(),
            Target::Draft(draft) => draft.dir(),
        }
    }

    /// Makes it an image; in the store with at most so many threads.
    pub(super) fn finish(self, manifest: Manifest, threads: usize) -> Result<Image, Error> {
        Ok(match self {
            Target::Slot(filling) => filling.seal(manifest)?,
            Target::Draft(draft) => draft.publish(manifest, threads)?,
        })
    }
}
