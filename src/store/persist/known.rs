//! Which chunks are in packs already, or are on their way there.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::store::chunk::ChunkId;
use crate::store::error::Error;
use crate::store::pack::{Index, PackName, Packs};
use crate::sys::durable;

/// More threads than this are rarely at it at once.
const SHARDS: usize = 16;

/// Enough of a name, as in the index: two chunks with the same 128 bits are not found, by chance or on purpose.
type Short = [u8; 16];

/// What is there.
pub(super) struct Known<'a> {
    packs: &'a Packs,
    index: &'a Index,
    /// Those that this run writes.
    claimed: [Mutex<HashSet<Short>>; SHARDS],
    /// The packs whose mark was taken back.
    revived: Mutex<HashSet<PackName>>,
}

impl<'a> Known<'a> {
    pub(super) fn new(packs: &'a Packs, index: &'a Index) -> Known<'a> {
        Known { packs, index, claimed: Default::default(), revived: Mutex::default() }
    }

    /// Whether the caller has to write the chunk: it is in no pack, and nobody else writes it. A pack that is on its way out
    /// is kept, durably, before what is in it counts.
    pub(super) fn claim(&self, id: &ChunkId) -> Result<bool, Error> {
        match self.index.get(id) {
            Some(location) if self.index.is_gone(location.pack) => self.revive(location.pack).map(|()| false),
            Some(_) => Ok(false),
            None => Ok(self.first(id)),
        }
    }

    fn first(&self, id: &ChunkId) -> bool {
        let short = id.as_bytes().first_chunk().copied().unwrap_or_default();
        let shard = usize::from(id.as_bytes()[31]) % SHARDS;
        self.claimed.get(shard).is_none_or(|claimed| lock(claimed).insert(short))
    }

    fn revive(&self, pack: PackName) -> Result<(), Error> {
        // Held meanwhile: who comes second must not go on before the mark is gone.
        let mut revived = lock(&self.revived);
        if !revived.contains(&pack) {
            let path = self.packs.gone_path(pack);
            durable::remove_file(&path).map_err(|source| Error::Remove { path, source })?;
            revived.insert(pack);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
