//! Which chunks are in packs already, or are on their way there.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::chunk::ChunkId;
use crate::error::Error;
use crate::gc::Needed;
use crate::pack::strike::Place;
use crate::pack::{Index, PackName, Packs, Unread};
use rekindle_os::durable;

/// More threads than this are rarely at it at once.
const SHARDS: usize = 16;

/// Enough of a name, as in the index: two chunks with the same 128 bits are not found, by chance or on purpose.
type Short = [u8; 16];

/// What is to be written of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Nothing.
    None,
    /// It is new.
    First,
    /// A copy of what another image refers to as well, into another pack.
    Second,
}

/// What is there.
pub(super) struct Known<'a> {
    packs: &'a Packs,
    index: &'a Index,
    /// The chunks that images refer to, where those are to be in two packs.
    shared: Option<&'a Needed>,
    /// Places that do not count.
    unread: &'a Unread,
    /// Those of them whose chunk this run writes.
    again: Mutex<Vec<Place>>,
    /// Those that this run writes.
    claimed: [Mutex<HashSet<Short>>; SHARDS],
    /// The packs whose mark was taken back.
    revived: Mutex<HashSet<PackName>>,
}

impl<'a> Known<'a> {
    pub(super) fn new(packs: &'a Packs, index: &'a Index, shared: Option<&'a Needed>, unread: &'a Unread) -> Known<'a> {
        let (claimed, revived, again) = Default::default();
        Known { packs, index, shared, unread, again, claimed, revived }
    }

    /// What the caller has to do for the chunk: to write it where it is in no pack and nobody else writes it, or a second copy
    /// where another image refers to it and there is one only. A pack that is on its way out is kept, durably, before what is
    /// in it counts.
    pub(super) fn claim(&self, id: &ChunkId) -> Result<Claim, Error> {
        let (mut stays, mut goes) = (0, None);
        for at in self.index.all(id).filter(|at| !self.unread.has(id, at)) {
            match self.index.is_gone(at.pack) {
                false => stays += 1,
                true => goes = goes.or(Some(at.pack)),
            }
        }
        let write = match (stays, goes, self.shared) {
            (0, Some(pack), _) => return self.revive(pack).map(|()| Claim::None),
            (0, None, _) => Claim::First,
            (1, _, Some(shared)) if shared.has(id) => Claim::Second,
            _ => return Ok(Claim::None),
        };
        if !self.first(id) {
            return Ok(Claim::None);
        }
        if write == Claim::First {
            let unread = self.index.all(id).map(|at| (at.pack, *id));
            lock(&self.again).extend(unread);
        }
        Ok(write)
    }

    /// Places that could not be read, of chunks that were written since.
    pub(super) fn written_again(&self) -> Vec<Place> {
        lock(&self.again).clone()
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
