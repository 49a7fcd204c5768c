//! Records that must not be used any more: removed from the index of their pack, or remembered as unreadable.
//!
//! If no index has a chunk, the next image that has it stores it again, and no reader looks for it at the old place.
//! The record itself stays in its pack until the pack is removed. Indexes are replaced as a whole: after a power cut,
//! each is the old or the new one.
//!
//! A record that the disk does not deliver (EIO) may be intact after the disk is repaired: its entry stays until the
//! chunk is intact elsewhere. Until then this process remembers the place ([`Unread`]), so that no new image relies on
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Location, PackIndex, PackName, Packs};
use crate::chunk::ChunkId;
use crate::error::Result;
use crate::{Error, WriterLock};
use rekindle_os::durable;

/// A record: its pack and its chunk.
pub(crate) type Place = (PackName, ChunkId);

/// Records that could not be read. Shared by readers and writers.
#[derive(Debug, Clone, Default)]
pub struct Unread(Arc<Mutex<BTreeSet<Place>>>);

impl Unread {
    /// Notes a record.
    pub(crate) fn note(&self, place: Place) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(place);
    }

    /// Whether the record is noted.
    #[must_use]
    pub(crate) fn has(&self, id: &ChunkId, at: &Location) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&(at.pack, *id))
    }

    /// Removes records from the notes.
    pub(crate) fn forget(&self, places: &[Place]) {
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.retain(|place| !places.contains(place));
    }
}

/// Rewrites the indexes of packs without these records. An unusable index is left alone: it is not used, and
/// [`super::super::repair`] replaces it. Returns how many records were removed.
///
/// # Errors
/// [`Error::Write`]; those of the lock.
pub(crate) fn strike(packs: &Packs, lock: &WriterLock, places: &[Place]) -> Result<usize> {
    let mut by_pack: BTreeMap<PackName, BTreeSet<ChunkId>> = BTreeMap::new();
    for (pack, id) in places {
        by_pack.entry(*pack).or_default().insert(*id);
    }
    let mut struck = 0;
    for (pack, ids) in by_pack {
        let Ok(index) = packs.read_index(pack) else { continue };
        let stays: Vec<_> = index.entries().iter().filter(|entry| !ids.contains(&entry.id)).copied().collect();
        let count = index.entries().len() - stays.len();
        if count == 0 {
            continue;
        }
        lock.still_held()?;
        let path = packs.index_path(pack);
        let bytes = PackIndex::new(index.pack_len(), stays).to_bytes();
        durable::write_file(&path, &bytes, 0o600)
            .map_err(|source| Error::Write { path: path.path().to_owned(), source })?;
        struck += count;
    }
    Ok(struck)
}
