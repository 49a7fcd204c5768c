//! Replaces chunks that are damaged or unreadable with an intact copy from another pack or the replica ([`ChunkSource`]).
//!
//! 1. each chunk is read from every pack that has it, from the disk itself; an intact copy is used
//! 2. if two copies are configured, a chunk with one remaining copy is copied to a new pack
//! 3. a chunk with no intact copy here is fetched from the replica into new packs; each record is checked as in a
//!    fetch: by its name, and with a key by the key
//! 4. the new packs are synced, named and indexed
//! 5. the damaged records are removed from the indexes of their packs (pack/strike.rs), so that readers, repacking and
//!    the next image use intact ones only. A damaged record without an intact copy is removed, too: the next image that
//!    has the chunk stores it again, which completes the older images as well. An unreadable record stays, because it
//!    may be readable when the disk is repaired; it is remembered, and the next image stores the chunk again
//!    ([`Unread`])
//!
//! No content is removed, and no image is marked. After a power cut before step 5, chunks are in more packs than
//! before, and the next run does the remaining steps.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::FileError;
use super::chunk::{ChunkId, Compression, Key};
use super::error::Error as StoreError;
use super::file_error::{Failing, is_failing};
use super::folder::JobFolder;
use super::format::FormatError;
use super::lock::WriterLock;
use super::pack::stored::Stored;
use super::pack::strike::{Place, strike};
use super::pack::{CopyError, Index, Location, Making, PackName, PackWriter, Packs, RecordHeader, Unread};
use crate::options::Copies;

mod source;

pub use source::{ChunkSource, FetchError, Put};

/// What is needed to heal chunks.
#[derive(Clone, Copy)]
pub struct Healing<'a> {
    /// The job.
    pub folder: &'a JobFolder,
    /// Proof that nobody else writes to the store.
    pub lock: &'a WriterLock,
    /// The key of the packs.
    pub key: Option<&'a Key>,
    /// In how many packs shared chunks are kept.
    pub copies: Copies,
    /// Records the places that the disk cannot read.
    pub unread: &'a Unread,
    /// The replica, for chunks without an intact copy here.
    pub replica: Option<&'a dyn ChunkSource>,
}

impl fmt::Debug for Healing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Healing").field("folder", &self.folder).field("copies", &self.copies).finish_non_exhaustive()
    }
}

/// Why chunks could not be healed. What was healed until then stays.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be read or written, or the lock is not ours.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A pack cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// The result of healing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Healed {
    /// Chunks with a damaged place.
    pub damaged: u64,
    /// Chunks with a place that the disk cannot read.
    pub unreadable: u64,
    /// Chunks that no pack had.
    pub missing: u64,
    /// The packs with such places.
    pub(crate) packs: Vec<PathBuf>,
    /// The first problem found.
    pub(crate) why: String,
    /// Chunks replaced from another pack.
    pub from_copies: u64,
    /// Chunks replaced from the replica.
    pub from_replica: u64,
    /// Why the replica could not be asked for some or all chunks.
    pub replica_failure: Option<String>,
    /// Chunks without any intact copy.
    #[serde(skip)]
    pub lost: BTreeSet<ChunkId>,
}

impl Healed {
    /// Number of chunks with a problem.
    #[must_use]
    pub fn found(&self) -> u64 {
        self.damaged + self.unreadable + self.missing
    }
}

/// The problems, and where the content was taken from.
impl fmt::Display for Healed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = [(self.damaged, "damaged"), (self.unreadable, "unreadable"), (self.missing, "missing")];
        let mut found = found.iter().filter(|(count, _)| *count > 0);
        if let Some((count, what)) = found.next() {
            write!(f, "{count} {what}")?;
        }
        found.try_for_each(|(count, what)| write!(f, " and {count} {what}"))?;
        match self.found() {
            0 => {}
            1 => f.write_str(" chunk")?,
            _ => f.write_str(" chunks")?,
        }
        if let Some(first) = self.packs.first() {
            write!(f, " in {}", first.display())?;
        }
        if self.packs.len() > 1 {
            write!(f, " and {} more packs", self.packs.len() - 1)?;
        }
        if !self.why.is_empty() {
            write!(f, " ({})", self.why)?;
        }
        let outcomes = [
            (self.from_copies, "taken from another pack"),
            (self.from_replica, "taken from the replica and stored again"),
            (u64::try_from(self.lost.len()).unwrap_or(u64::MAX), "lost: no intact copy was found"),
        ];
        let said: Vec<String> =
            outcomes.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        if !said.is_empty() {
            write!(f, "{}{}", if self.found() > 0 { ": " } else { "" }, said.join(", "))?;
        }
        match &self.replica_failure {
            Some(why) => write!(f, "; the replica could not replace it: {why}"),
            None => Ok(()),
        }
    }
}

/// The places of a chunk.
struct Found {
    whole: Vec<Location>,
    bad: Vec<(Location, Harm)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Harm {
    Damaged,
    Unreadable,
}

impl Healing<'_> {
    /// Inspects these chunks, and replaces what is damaged as far as possible.
    ///
    /// # Errors
    /// When the store cannot be listed or written. A failure of the replica is part of the result.
    pub fn heal(&self, ids: &BTreeSet<ChunkId>, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<Healed, Error> {
        self.folder.check_lock(self.lock)?;
        let _alone = self.lock.packs();
        let packs = self.folder.packs();
        let index = packs.index()?;
        let mut work = Work {
            healing: self,
            packs: &packs,
            index: &index,
            writers: Writers { packs: &packs, key: self.key, plain: None, keyed: None },
            healed: Healed::default(),
            told: BTreeSet::new(),
            strike: Vec::new(),
            wanted: BTreeMap::new(),
        };
        for id in ids {
            if cancelled() {
                return Err(Error::Cancelled);
            }
            work.look(id)?;
        }
        work.fetch(cancelled)?;
        let Work { writers, mut healed, told, strike: damaged, .. } = work;
        self.lock.still_held()?;
        writers.finish()?;
        strike(&packs, self.lock, &damaged)?;
        self.unread.forget(&damaged);
        healed.packs = told.into_iter().map(|pack| packs.pack_path(pack).path().to_owned()).collect();
        Ok(healed)
    }
}

struct Work<'a> {
    healing: &'a Healing<'a>,
    packs: &'a Packs,
    index: &'a Index,
    writers: Writers<'a>,
    healed: Healed,
    told: BTreeSet<PackName>,
    strike: Vec<Place>,
    /// Chunks without an intact copy here, with their damaged places.
    wanted: BTreeMap<ChunkId, Vec<(Location, Harm)>>,
}

impl<'a> Work<'a> {
    /// Steps 1 and 2.
    fn look(&mut self, id: &ChunkId) -> Result<(), Error> {
        let mut stored = Stored::default();
        let Some(Found { whole, bad }) = self.found(id, &mut stored) else { return Ok(()) };
        let has = |harm| bad.iter().any(|(_, other)| *other == harm);
        let is_nowhere = whole.is_empty() && bad.is_empty();
        // The chunk may be in an unreadable pack.
        let unread = self.index.unreadable().filter(|_| is_nowhere);
        self.healed.damaged += u64::from(has(Harm::Damaged));
        self.healed.unreadable += u64::from(has(Harm::Unreadable) || unread.is_some());
        self.healed.missing += u64::from(is_nowhere && unread.is_none());
        if let Some((path, source)) = unread.filter(|_| self.healed.why.is_empty()) {
            self.healed.why = format!("cannot read {}{}: {source}", path.display(), Failing(&source));
        }
        self.told.extend(bad.iter().map(|(at, _)| at.pack));
        let Some(first) = whole.first() else {
            self.wanted.insert(*id, bad);
            return Ok(());
        };
        let stays = whole.iter().filter(|at| !self.index.is_gone(at.pack)).count();
        let mut copied = false;
        if stays < self.healing.copies.count()
            && let Some(key) = self.key_of(first)
            && let Ok(header) = stored.read_from_disk(self.packs, id, first, key)
        {
            self.writers.append(key, &header, stored.body(&header))?;
            copied = true;
        }
        self.healed.from_copies += u64::from(copied || !bad.is_empty());
        self.strike.extend(bad.iter().map(|(at, _)| (at.pack, *id)));
        Ok(())
    }

    /// `None` if a place cannot be judged (newer version, wrong key): then nothing is known about the chunk.
    fn found(&mut self, id: &ChunkId, stored: &mut Stored) -> Option<Found> {
        let mut found = Found { whole: Vec::new(), bad: Vec::new() };
        for at in self.index.all(id) {
            let key = self.key_of(&at)?;
            let error = match stored.read_from_disk(self.packs, id, &at, key) {
                Ok(_) => {
                    found.whole.push(at);
                    continue;
                }
                Err(error) => error,
            };
            let harm = match &error {
                CopyError::Damaged { source, .. } if source.is_not_for_us() => return None,
                CopyError::Damaged { .. } => Harm::Damaged,
                CopyError::Read(_) => Harm::Unreadable,
            };
            if self.healed.why.is_empty() {
                self.healed.why = self.first_of(&at, &error);
            }
            found.bad.push((at, harm));
        }
        Some(found)
    }

    fn first_of(&self, at: &Location, error: &CopyError) -> String {
        match error {
            CopyError::Read(source) if is_failing(source) => {
                format!("byte {}: {source}: the disk is failing; see the kernel log, and replace the disk", at.offset)
            }
            CopyError::Read(source) => format!("byte {}: {source}", at.offset),
            CopyError::Damaged { source, .. } => format!("byte {}: {source}", at.offset),
        }
    }

    /// The key of the pack; `None` if we cannot open it.
    fn key_of(&self, at: &Location) -> Option<Option<&'a Key>> {
        let key: Result<_, FormatError> = self.index.pack(at.pack)?.key_for(self.healing.key);
        key.ok()
    }

    /// Step 3.
    fn fetch(&mut self, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<(), Error> {
        let wanted: HashSet<ChunkId> = self.wanted.keys().copied().collect();
        let mut left = wanted.clone();
        if let Some(replica) = self.healing.replica.filter(|_| !wanted.is_empty()) {
            let writers = &mut self.writers;
            let mut came = HashSet::new();
            let mut put = |key: Option<&Key>, header: &RecordHeader, stored: &[u8]| {
                came.insert(header.id);
                writers.append(key, header, stored)
            };
            match replica.fetch(wanted, self.packs, self.healing.key, cancelled, &mut put) {
                Ok(()) => {}
                Err(FetchError::Put(error)) => return Err(error.into()),
                Err(FetchError::Cancelled) => return Err(Error::Cancelled),
                Err(FetchError::Unavailable(why)) => self.healed.replica_failure = Some(why),
            }
            left.retain(|id| !came.contains(id));
        }
        for (id, bad) in std::mem::take(&mut self.wanted) {
            if left.contains(&id) {
                self.healed.lost.insert(id);
                for (at, harm) in bad {
                    match harm {
                        Harm::Damaged => self.strike.push((at.pack, id)),
                        Harm::Unreadable => self.healing.unread.note((at.pack, id)),
                    }
                }
            } else {
                self.healed.from_replica += 1;
                self.strike.extend(bad.iter().map(|(at, _)| (at.pack, id)));
            }
        }
        Ok(())
    }
}

/// New packs: a store may have both encrypted and other packs.
struct Writers<'a> {
    packs: &'a Packs,
    key: Option<&'a Key>,
    plain: Option<PackWriter<'a>>,
    keyed: Option<PackWriter<'a>>,
}

impl<'a> Writers<'a> {
    /// Appends a record that is encrypted with our key, or not at all.
    fn append(&mut self, key: Option<&Key>, header: &RecordHeader, stored: &[u8]) -> Result<(), FileError> {
        let key = self.key.filter(|_| key.is_some());
        let writer = if key.is_some() { &mut self.keyed } else { &mut self.plain };
        let mut open = match writer.take() {
            Some(open) => open,
            None => PackWriter::new(self.packs, Making::new(Compression::None, key))?,
        };
        open.append(header, stored)?;
        *writer = Some(open);
        Ok(())
    }

    fn finish(self) -> Result<(), FileError> {
        self.plain.map(PackWriter::finish).transpose()?;
        self.keyed.map(PackWriter::finish).transpose()?;
        Ok(())
    }
}

/// Chunks that images refer to and that no pack has.
///
/// # Errors
/// [`StoreError::Read`].
pub fn missing(folder: &JobFolder) -> Result<BTreeSet<ChunkId>, StoreError> {
    let index = folder.packs().index()?;
    let mut missing = BTreeSet::new();
    for image in folder.images()? {
        let Ok(Some(map)) = image.chunk_map() else { continue };
        missing.extend(map.chunks().map(|(id, _)| id).filter(|id| index.get(id).is_none()));
    }
    Ok(missing)
}

#[cfg(test)]
mod tests;
