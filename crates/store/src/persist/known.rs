//! Which chunks are in packs already, or are being written by this run.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::chunk::ChunkId;
use crate::error::Error;
use crate::gc::Needed;
use crate::pack::strike::Place;
use crate::pack::{Index, PackName, Packs, Unread};
use rekindle_os::durable;

/// More threads rarely use it at once.
const SHARDS: usize = 16;

/// The part of a name that is compared. It is enough, as in the index: two chunks with the same 128 bits do not occur
/// by chance and cannot be made on purpose.
type Short = [u8; 16];

/// What to write for a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Nothing.
    None,
    /// The first copy: it is new.
    First,
    /// A second copy, into another pack: another image uses the chunk too.
    Second,
}

/// The existing chunks.
pub(super) struct Known<'a> {
    packs: &'a Packs,
    index: &'a Index,
    /// The chunks that images use, if shared ones are to be in two packs.
    shared: Option<&'a Needed>,
    /// Unreadable places, which do not count.
    unread: &'a Unread,
    /// Unreadable places whose chunk this run writes again.
    again: Mutex<Vec<Place>>,
    /// Chunks that this run writes.
    claimed: [Mutex<HashSet<Short>>; SHARDS],
    /// Packs whose mark was removed.
    revived: Mutex<HashSet<PackName>>,
}

impl<'a> Known<'a> {
    pub(super) fn new(packs: &'a Packs, index: &'a Index, shared: Option<&'a Needed>, unread: &'a Unread) -> Known<'a> {
        let (claimed, revived, again) = Default::default();
        Known { packs, index, shared, unread, again, claimed, revived }
    }

    /// What the caller must write for the chunk: a first copy if it is in no pack and no other thread writes it; a
    /// second copy if another image uses it and there is only one. If the only copy is in a pack that is marked for
    /// removal, the mark is removed durably first.
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

    /// Unreadable places of chunks that were written again.
    pub(super) fn written_again(&self) -> Vec<Place> {
        lock(&self.again).clone()
    }

    fn first(&self, id: &ChunkId) -> bool {
        let short = id.as_bytes().first_chunk().copied().unwrap_or_default();
        let shard = usize::from(id.as_bytes()[31]) % SHARDS;
        self.claimed.get(shard).is_none_or(|claimed| lock(claimed).insert(short))
    }

    fn revive(&self, pack: PackName) -> Result<(), Error> {
        // Held until the mark is removed: a second thread must not continue before.
        let mut revived = lock(&self.revived);
        if !revived.contains(&pack) {
            let path = self.packs.gone_path(pack);
            durable::remove_file(&path).map_err(|source| Error::Remove { path: path.path().to_owned(), source })?;
            revived.insert(pack);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
