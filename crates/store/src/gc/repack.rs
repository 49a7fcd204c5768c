//! Rewrites packs that are mostly unneeded.
//!
//! Needed records are read, checked as in a restore, and copied one by one. If a record is damaged and another pack has
//! it intact, that one is copied; if none has, the pack stays as it is. Two copies of a chunk go to different packs. The
//! old pack is marked only when the new packs and their indexes are on the disk. After a crash before that, chunks are in
//! more places than before, which costs space until the next round and nothing else.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::{Bounds, Collected, Error, PackUse, mark};
use crate::WriterLock;
use crate::chunk::{ChunkId, Compression, Key};
use crate::options::Copies;
use crate::pack::set::{Index, Packs};
use crate::pack::stored::Stored;
use crate::pack::writer::{Making, PackWriter};
use crate::pack::{Entry, Location, PACK, PackName, RecordHeader};

use super::needed::Needed;

/// The longest time for packs that cannot be copied: a disk that fails can need half a minute for each, and the next image
/// waits. Those that are refused at once do not keep the others from being copied.
const DAMAGED_FOR: Duration = Duration::from_secs(60);

/// A pack is copied if less than one part in this many is needed.
const WORTH: u64 = 2;
/// Smaller packs are merged, as soon as there are [`MANY`]: each costs a file or two, and a seek.
const SMALL: u64 = PACK / 8;
const MANY: usize = 32;

/// The packs worth copying, those first that free most for the bytes copied.
fn choose(uses: &[PackUse], usable: impl Fn(PackName) -> bool) -> Vec<PackUse> {
    let alive = |pack: &&PackUse| pack.needed > 0 && usable(pack.name);
    let small = uses.iter().filter(alive).filter(|pack| pack.bytes < SMALL).count();
    let worth = |pack: &&PackUse| pack.needed * WORTH < pack.bytes || (pack.bytes < SMALL && small >= MANY);
    let mut chosen: Vec<PackUse> = uses.iter().filter(alive).filter(worth).copied().collect();
    // In parts per million: no pack is large enough to make this overflow.
    chosen.sort_by_key(|pack| pack.needed * 1_000_000 / pack.bytes.max(1));
    chosen
}

#[expect(clippy::too_many_arguments, reason = "one step of a round, which has them all")]
pub(super) fn run(
    packs: &Packs,
    index: &Index,
    needed: &Needed,
    uses: &[PackUse],
    bounds: &Bounds<'_>,
    bound: u64,
    lock: &WriterLock,
    now: DateTime<Utc>,
    cancelled: &dyn Fn() -> bool,
    done: &mut Collected,
) -> Result<(), Error> {
    let key = bounds.key;
    // A pack with another key could be copied, but not checked.
    let usable = |name| index.pack(name).is_some_and(|info| !info.gone && info.key == key.map(Key::id));
    let chosen = choose(uses, usable);
    if chosen.is_empty() || cancelled() {
        return Ok(());
    }
    let making = Making::new(Compression::None, key);
    let (first, second, written) = (PackWriter::new(packs, making)?, None, HashSet::new());
    let mut copying = Copying { packs, index, needed, key, copies: bounds.copies, making, first, second, written };
    let (mut copied, mut damaged, mut left) = (Vec::new(), None, bound);
    let mut in_vain = Duration::ZERO;
    for pack in chosen {
        if cancelled() || in_vain >= DAMAGED_FOR {
            break;
        }
        let began = Instant::now();
        // One that cannot be copied takes nothing of what the others may.
        let Some(rest) = left.checked_sub(pack.needed) else { continue };
        match copying.pack(pack.name, lock) {
            Ok(bytes) => {
                copied.push((pack.name, bytes));
                left = rest;
            }
            // That pack stays. The others do not wait until it can be read.
            Err(error @ Error::Copy { .. }) => {
                in_vain += began.elapsed();
                damaged.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    lock.still_held()?;
    copying.first.finish()?;
    copying.second.map(PackWriter::finish).transpose()?;
    for (name, bytes) in copied {
        lock.still_held()?;
        mark::set(packs, name, now)?;
        done.repacked.push(name);
        done.copied += bytes;
    }
    damaged.map_or(Ok(()), Err)
}

struct Copying<'a> {
    packs: &'a Packs,
    index: &'a Index,
    needed: &'a Needed,
    key: Option<&'a Key>,
    copies: Copies,
    making: Making<'a>,
    first: PackWriter<'a>,
    /// For chunks that `first` already has.
    second: Option<PackWriter<'a>>,
    written: HashSet<ChunkId>,
}

impl Copying<'_> {
    /// Copies the needed records of one pack, in their order.
    fn pack(&mut self, pack: PackName, lock: &WriterLock) -> Result<u64, Error> {
        let unreadable = |source: io::Error| Error::Copy { pack, source: source.into() };
        let file: File = self.packs.pack_path(pack).read().map_err(unreadable)?;
        let contents = self.packs.pack_index(pack).map_err(|_| unreadable(io::ErrorKind::NotFound.into()))?;
        let mut entries: Vec<Entry> = contents.entries().to_vec();
        let is_kept = |entry: &Entry| self.index.kept(&entry.id, self.copies.count()).any(|place| place.pack == pack);
        entries.retain(|entry| self.needed.has(&entry.id) && is_kept(entry));
        entries.sort_unstable_by_key(|entry| entry.offset);
        let (mut record, mut bytes) = (Stored::default(), 0);
        // Nothing of a pack with a damaged record is written: each round would write it again.
        for entry in &entries {
            lock.still_held()?;
            self.read(&file, pack, entry, &mut record)?;
        }
        for entry in &entries {
            lock.still_held()?;
            let header = self.read(&file, pack, entry, &mut record)?;
            bytes += self.write(&header, &record)?;
        }
        Ok(bytes)
    }

    /// Reads a record of a pack, or the same chunk from another one.
    fn read(&self, file: &File, pack: PackName, entry: &Entry, record: &mut Stored) -> Result<RecordHeader, Error> {
        let at = Location::of(pack, entry);
        match record.read(|bytes| file.read_exact_at(bytes, at.offset), &entry.id, &at, self.key) {
            Ok(header) => Ok(header),
            Err(source) => self.elsewhere(&entry.id, &at, record).ok_or(Error::Copy { pack, source }),
        }
    }

    /// Reads the same chunk from another pack with the same encryption.
    fn elsewhere(&self, id: &ChunkId, not: &Location, record: &mut Stored) -> Option<RecordHeader> {
        let same_key = |at: &Location| self.index.pack(at.pack).map(|info| info.key) == Some(self.key.map(Key::id));
        let mut others = self.index.all(id).filter(|at| at != not && same_key(at));
        others.find_map(|at| record.read_from_disk(self.packs, id, &at, self.key).ok())
    }

    /// Writes a record to another pack than the one that already has the chunk.
    fn write(&mut self, header: &RecordHeader, record: &Stored) -> Result<u64, Error> {
        let body = record.body(header);
        if self.written.insert(header.id) {
            return Ok(self.first.append(header, body)?);
        }
        if self.second.is_none() {
            self.second = Some(PackWriter::new(self.packs, self.making)?);
        }
        match &mut self.second {
            Some(second) => Ok(second.append(header, body)?),
            None => Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack(n: u8, bytes: u64, needed: u64) -> PackUse {
        PackUse { name: PackName::from([n; 16]), bytes, needed }
    }

    fn chosen(uses: &[PackUse]) -> Vec<u8> {
        let number = |pack: &PackUse| u8::from_str_radix(&pack.name.to_string()[..2], 16).unwrap();
        choose(uses, |_| true).iter().map(number).collect()
    }

    #[test]
    fn those_of_which_less_than_half_is_needed_the_emptiest_first() {
        let uses = [pack(1, PACK, PACK / 2), pack(2, PACK, PACK / 3), pack(3, PACK, 1000), pack(4, PACK, 0)];
        assert_eq!(chosen(&uses), [3, 2], "half is enough to stay, and what nothing is needed of is swept");
        assert!(choose(&uses, |_| false).is_empty(), "another key");
    }

    #[test]
    fn small_ones_when_there_are_many() {
        let few: Vec<PackUse> = (0..31).map(|n| pack(n, 1 << 20, 1 << 20)).collect();
        assert!(chosen(&few).is_empty());
        let many: Vec<PackUse> = (0..32).map(|n| pack(n, 1 << 20, 1 << 20)).collect();
        assert_eq!(chosen(&many).len(), 32);
    }
}
