//! Packs that are mostly not needed are written anew.
//!
//! What is needed is read, checked as at a restore, and copied record by record. The old pack gets its mark only when the new
//! packs are on the disk with their indexes: a crash before that leaves chunks in two places, which costs space until the
//! next round and nothing else.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use chrono::{DateTime, Utc};

use super::{Collected, Error, PackUse, mark};
use crate::store::WriterLock;
use crate::store::chunk::{Compression, Key};
use crate::store::format::FormatError;
use crate::store::pack::set::{Index, Packs};
use crate::store::pack::writer::{Making, PackWriter};
use crate::store::pack::{PACK, PackName, RecordHeader, record};
use crate::sys::durable;

use super::needed::Needed;

/// A pack of which less than one part in so many is needed is worth the copy.
const WORTH: u64 = 2;
/// Smaller ones are brought together, as soon as there are [`MANY`]: each costs a file or two, and a seek.
const SMALL: u64 = PACK / 8;
const MANY: usize = 32;

/// Why a record can not be copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// It can not be read.
    #[error("can not read it")]
    Read(#[from] io::Error),
    /// It is not what was written.
    #[error("the record at byte {offset} is damaged; `rekindle repair` says which images suffer")]
    Damaged {
        /// Where it begins.
        offset: u64,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
}

/// Which packs are worth it, those first that give back most for what is copied. `bound` is for the bytes copied.
fn choose(uses: &[PackUse], usable: impl Fn(PackName) -> bool, bound: u64) -> Vec<PackUse> {
    let alive = |pack: &&PackUse| pack.needed > 0 && usable(pack.name);
    let small = uses.iter().filter(alive).filter(|pack| pack.bytes < SMALL).count();
    let worth = |pack: &&PackUse| pack.needed * WORTH < pack.bytes || (pack.bytes < SMALL && small >= MANY);
    let mut chosen: Vec<PackUse> = uses.iter().filter(alive).filter(worth).copied().collect();
    // Parts of a million: no pack has so many bytes that this would overflow.
    chosen.sort_by_key(|pack| pack.needed * 1_000_000 / pack.bytes.max(1));
    let mut sum = 0_u64;
    chosen.retain(|pack| {
        sum = sum.saturating_add(pack.needed);
        sum <= bound
    });
    chosen
}

#[expect(clippy::too_many_arguments, reason = "one step of a round, which has them all")]
pub(super) fn run(
    packs: &Packs,
    index: &Index,
    needed: &Needed,
    uses: &[PackUse],
    bound: u64,
    key: Option<&Key>,
    lock: &WriterLock,
    now: DateTime<Utc>,
    cancelled: &dyn Fn() -> bool,
    done: &mut Collected,
) -> Result<(), Error> {
    // One under another key could be copied but not checked.
    let usable = |name| index.pack(name).is_some_and(|info| !info.gone && info.key == key.map(Key::id));
    let chosen = choose(uses, usable, bound);
    if chosen.is_empty() || cancelled() {
        return Ok(());
    }
    let mut writer = PackWriter::new(packs, Making::new(Compression::None, key))?;
    let mut copied = Vec::new();
    for pack in chosen {
        if cancelled() {
            break;
        }
        let bytes = copy(packs, index, needed, pack.name, key, lock, &mut writer)?;
        copied.push((pack.name, bytes));
    }
    lock.still_held()?;
    writer.finish()?;
    for (name, bytes) in copied {
        lock.still_held()?;
        mark::set(packs, name, now)?;
        done.repacked.push(name);
        done.copied += bytes;
    }
    Ok(())
}

/// Copies what is needed of one pack, in its order.
fn copy(
    packs: &Packs,
    index: &Index,
    needed: &Needed,
    pack: PackName,
    key: Option<&Key>,
    lock: &WriterLock,
    writer: &mut PackWriter<'_>,
) -> Result<u64, Error> {
    let failed = |source: CopyError| Error::Copy { pack, source };
    let unreadable = |source: io::Error| failed(source.into());
    let file: File = durable::open_for_reading(&packs.pack_path(pack)).map_err(unreadable)?;
    let contents = packs.pack_index(pack).map_err(|_| unreadable(io::ErrorKind::NotFound.into()))?;
    let mut entries: Vec<_> = contents.entries().to_vec();
    entries.retain(|entry| needed.has(&entry.id) && index.get(&entry.id).is_some_and(|place| place.pack == pack));
    entries.sort_unstable_by_key(|entry| entry.offset);
    let (mut stored, mut opened, mut raw, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for entry in entries {
        lock.still_held()?;
        let damaged = |source| failed(CopyError::Damaged { offset: entry.offset, source });
        stored.resize(usize::try_from(entry.end() - entry.offset).unwrap_or(usize::MAX), 0);
        file.read_exact_at(&mut stored, entry.offset).map_err(unreadable)?;
        // Opened in place, an encrypted record is worth nothing afterwards.
        opened.clear();
        opened.extend_from_slice(&stored);
        let header: RecordHeader = record::read(&mut opened, &entry.id, key, &mut raw).map_err(damaged)?;
        let body = stored.get(stored.len() - usize::try_from(header.stored_len).unwrap_or(0)..).unwrap_or_default();
        bytes += writer.append(&header, body)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack(n: u8, bytes: u64, needed: u64) -> PackUse {
        PackUse { name: PackName::from([n; 16]), bytes, needed }
    }

    fn chosen(uses: &[PackUse], bound: u64) -> Vec<u8> {
        let number = |pack: &PackUse| u8::from_str_radix(&pack.name.to_string()[..2], 16).unwrap();
        choose(uses, |_| true, bound).iter().map(number).collect()
    }

    #[test]
    fn those_of_which_less_than_half_is_needed_the_emptiest_first() {
        let uses = [pack(1, PACK, PACK / 2), pack(2, PACK, PACK / 3), pack(3, PACK, 1000), pack(4, PACK, 0)];
        assert_eq!(chosen(&uses, u64::MAX), [3, 2], "half is enough to stay, and what nothing is needed of is swept");
        assert_eq!(chosen(&uses, 2000), [3], "within the bound");
        assert!(chosen(&uses, 10).is_empty());
        assert!(choose(&uses, |_| false, u64::MAX).is_empty(), "another key");
    }

    #[test]
    fn small_ones_when_there_are_many() {
        let few: Vec<PackUse> = (0..31).map(|n| pack(n, 1 << 20, 1 << 20)).collect();
        assert!(chosen(&few, u64::MAX).is_empty());
        let many: Vec<PackUse> = (0..32).map(|n| pack(n, 1 << 20, 1 << 20)).collect();
        assert_eq!(chosen(&many, u64::MAX).len(), 32);
    }
}
