//! The place of every chunk, in memory: 32 bytes for each chunk, so that a terabyte of chunks needs 128 MiB.
//!
//! Half of the name is enough to tell chunks apart: two of 16 bytes are not equal by chance, and making an equal pair
//! takes 2^64 tries. (With 8 bytes a pair could be made within an hour, and the second chunk would then never be
//! stored.) A reader of a record compares the whole name.
//!
//! Entries read from files are in one sorted list; entries added later, for one image, are in a map beside it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::path::Path;

use super::name::PackName;
use super::{Lost, PackIndex, Problem};
use crate::chunk::{ChunkId, Key};
use crate::file_error::again;
use crate::format::{FormatError, ReadError};
use crate::pack::index::Entry;
use crate::pack::record::{HEADER_BYTES, PackHeader};
use rekindle_os::parallel;

/// The place of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// The pack.
    pub pack: PackName,
    /// Its offset in the pack, in bytes.
    pub offset: u64,
    /// Raw bytes of the chunk.
    pub(crate) raw_len: u32,
    /// Bytes of the record after its header.
    pub stored_len: u32,
}

impl Location {
    /// The place of an entry in the index of that pack.
    #[must_use]
    pub(crate) fn of(pack: PackName, entry: &Entry) -> Location {
        Location { pack, offset: entry.offset, raw_len: entry.raw_len, stored_len: entry.stored_len }
    }

    /// The size of the complete record with its header, in bytes.
    #[must_use]
    pub fn record_len(&self) -> u64 {
        HEADER_BYTES + u64::from(self.stored_len)
    }
}

/// A pack in an [`Index`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackInfo {
    pub(crate) name: PackName,
    /// Its bytes, up to the last complete record.
    pub pack_len: u64,
    /// The id of the key that it is encrypted with.
    pub(crate) key: Option<[u8; 16]>,
    /// Whether it is marked, because no image needed it at the last round.
    pub(crate) gone: bool,
}

impl PackInfo {
    /// As [`PackHeader::key_for`].
    ///
    /// # Errors
    /// [`FormatError::NoKey`], [`FormatError::OtherKey`], [`FormatError::Plain`].
    pub(crate) fn key_for<'k>(&self, key: Option<&'k Key>) -> Result<Option<&'k Key>, FormatError> {
        PackHeader { key: self.key }.key_for(key)
    }
}

type Prefix = [u8; 16];

/// With fewer entries threads cost more than they save.
const SORTED_ALONE: usize = 1 << 16;

#[derive(Debug, Clone, Copy)]
struct Slot {
    prefix: Prefix,
    /// Index of its pack among the packs.
    pack: u32,
    offset: u32,
    raw_len: u32,
    stored_len: u32,
}

/// The places of all chunks.
#[derive(Debug, Default)]
pub struct Index {
    packs: Vec<PackInfo>,
    places: HashMap<PackName, u32>,
    /// Sorted by prefix.
    slots: Vec<Slot>,
    pub(super) problems: Vec<Problem>,
}

fn prefix(id: &ChunkId) -> Prefix {
    id.as_bytes().first_chunk().copied().unwrap_or_default()
}

impl Index {
    /// The place of the chunk. Of several places, one in a pack that is not marked.
    #[must_use]
    pub fn get(&self, id: &ChunkId) -> Option<Location> {
        let mut all = self.all(id);
        let first = all.next()?;
        if !self.is_gone(first.pack) {
            return Some(first);
        }
        Some(all.find(|other| !self.is_gone(other.pack)).unwrap_or(first))
    }

    /// The places that stay if content is stored in this many packs. A marked pack counts only if no other has the
    /// chunk: content that was copied out of it must not be used there again.
    pub(crate) fn kept(&self, id: &ChunkId, copies: usize) -> impl Iterator<Item = Location> {
        let stays = self.all(id).filter(|at| !self.is_gone(at.pack)).take(copies.max(1));
        let any = self.all(id).any(|at| !self.is_gone(at.pack));
        stays.chain(self.all(id).take(if any { 0 } else { 1 }))
    }

    /// All places of the chunk: if one is damaged, another may be intact.
    pub fn all(&self, id: &ChunkId) -> impl Iterator<Item = Location> {
        let prefix = prefix(id);
        let from = self.slots.partition_point(|slot| slot.prefix < prefix);
        let sorted = self.slots.get(from..).unwrap_or_default().iter().take_while(move |slot| slot.prefix == prefix);
        sorted.filter_map(|slot| self.location(slot))
    }

    /// Whether the pack is marked as one that no image needs.
    #[must_use]
    pub fn is_gone(&self, pack: PackName) -> bool {
        self.pack(pack).is_some_and(|info| info.gone)
    }

    /// Records that the mark of a pack was removed, or set.
    pub(crate) fn set_gone(&mut self, pack: PackName, gone: bool) {
        let place = self.places.get(&pack).and_then(|place| usize::try_from(*place).ok());
        if let Some(info) = place.and_then(|place| self.packs.get_mut(place)) {
            info.gone = gone;
        }
    }

    /// All packs that were read.
    #[must_use]
    pub(crate) fn packs(&self) -> &[PackInfo] {
        &self.packs
    }

    /// Facts about a pack.
    #[must_use]
    pub fn pack(&self, name: PackName) -> Option<&PackInfo> {
        self.packs.get(usize::try_from(*self.places.get(&name)?).ok()?)
    }

    /// Problems with packs. As long as there are any, nothing may be removed from the packs.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// An existing pack that could not be read: it may have any chunk.
    #[must_use]
    pub(crate) fn unreadable(&self) -> Option<(&Path, io::Error)> {
        self.problems.iter().find_map(|problem| match &problem.lost {
            Lost::All(ReadError::Read { path, source }) if source.kind() != io::ErrorKind::NotFound => {
                Some((path.as_path(), again(source)))
            }
            _ => None,
        })
    }

    /// Adds a pack, or updates it.
    fn add_pack(&mut self, info: PackInfo) -> u32 {
        let next = u32::try_from(self.packs.len()).unwrap_or(u32::MAX);
        let place = *self.places.entry(info.name).or_insert(next);
        match usize::try_from(place).ok().and_then(|place| self.packs.get_mut(place)) {
            Some(known) => *known = info,
            None => self.packs.push(info),
        }
        place
    }

    /// Adds the content of a pack; call [`Index::sort`] afterwards.
    pub(crate) fn add(&mut self, info: PackInfo, index: &PackIndex) {
        let place = self.add_pack(info);
        let slots = index.entries().iter();
        self.slots.extend(
            slots.filter_map(|entry| slot(prefix(&entry.id), place, entry.offset, entry.raw_len, entry.stored_len)),
        );
    }

    pub(crate) fn sort(&mut self) {
        self.slots.shrink_to_fit();
        if self.slots.len() < SORTED_ALONE {
            return sort(&mut self.slots);
        }
        // First by the first byte, which any value is as likely for as any other. Then the parts are sorted on all cores.
        let part = |slot: &Slot| usize::from(slot.prefix[0]);
        let mut starts = [0_usize; 257];
        self.slots.iter().for_each(|slot| starts[part(slot) + 1] += 1);
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        let (before, mut next) = (self.slots.clone(), starts);
        for slot in before {
            let at = &mut next[part(&slot)];
            self.slots[*at] = slot;
            *at += 1;
        }
        let mut rest = self.slots.as_mut_slice();
        let parts = starts.windows(2).filter_map(|ends| rest.split_off_mut(..ends[1] - ends[0])).collect();
        let sorted = |part: &mut [Slot]| {
            sort(part);
            Ok::<(), Infallible>(())
        };
        let Ok(_) = parallel::in_parallel(parts, usize::MAX, sorted);
    }

    fn location(&self, slot: &Slot) -> Option<Location> {
        let Slot { pack, offset, raw_len, stored_len, .. } = *slot;
        let pack = self.packs.get(usize::try_from(pack).ok()?)?.name;
        Some(Location { pack, offset: u64::from(offset), raw_len, stored_len })
    }
}

fn sort(slots: &mut [Slot]) {
    slots.sort_unstable_by_key(|slot| (slot.prefix, slot.pack, slot.offset));
}

/// `None` only for an offset beyond the largest pack, which no parsed index has.
fn slot(prefix: Prefix, pack: u32, offset: u64, raw_len: u32, stored_len: u32) -> Option<Slot> {
    Some(Slot { prefix, pack, offset: u32::try_from(offset).ok()?, raw_len, stored_len })
}

#[cfg(test)]
mod tests;
