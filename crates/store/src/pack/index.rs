//! The index of a pack: the file `NAME.idx`.
//!
//! ```text
//! 0   magic "REKINDLE INDEX\0\0"  16
//! 16  version                      4
//! 20  flags, zero                  4
//! 24  bytes of the pack            8
//! 32  number of entries            8
//! 40  zero                        24
//! 64  entries of 56 bytes, by name: name of the chunk (32), offset of its record in the pack (8), raw length (4),
//!       stored length (4), codec (1), zero (7)
//! end BLAKE3 of all before        32
//! ```
//!
//! It contains nothing that is not in the records of the pack: [`scan`] rebuilds it.

use std::io;

use super::record::{self, HEADER_BYTES, PackHeader, RecordHeader};
use super::{PACK_MAX, PACK_RECORDS};
use crate::chunk::{ChunkId, Codec};
use crate::format::{self, Fields, FormatError, HEADER, What, size, size_of};

const MAGIC: &[u8; 16] = b"REKINDLE INDEX\0\0";
const VERSION: u32 = 1;
const ENTRY: usize = 56;
/// A larger index is not read.
pub const MAX_BYTES: u64 = 64 + PACK_RECORDS * 56 + 32;

/// The place of a chunk in a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The name of the chunk.
    pub id: ChunkId,
    /// The offset of its record in the pack, in bytes.
    pub offset: u64,
    /// Raw bytes of the chunk.
    pub raw_len: u32,
    /// Bytes of the record after its header.
    pub stored_len: u32,
    /// The codec of the stored bytes.
    pub codec: Codec,
}

impl Entry {
    /// The entry of a record at that offset.
    #[must_use]
    pub(crate) fn of(header: &RecordHeader, offset: u64) -> Entry {
        let RecordHeader { codec, raw_len, stored_len, id } = *header;
        Entry { id, offset, raw_len, stored_len, codec }
    }

    /// Where its record ends.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(HEADER_BYTES + u64::from(self.stored_len))
    }
}

/// The content of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackIndex {
    pack_len: u64,
    entries: Vec<Entry>,
}

impl PackIndex {
    /// The index of a pack of this size. The entries can be in any order; of two records of the same chunk the first
    /// one counts.
    #[must_use]
    pub fn new(pack_len: u64, mut entries: Vec<Entry>) -> PackIndex {
        entries.sort_unstable_by_key(|entry| (entry.id, entry.offset));
        entries.dedup_by_key(|entry| entry.id);
        PackIndex { pack_len, entries }
    }

    /// The size of the pack, in bytes.
    #[must_use]
    pub fn pack_len(&self) -> u64 {
        self.pack_len
    }

    /// The chunks, sorted by name.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The bytes of the file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut header = [0; HEADER];
        let count = size_of(self.entries.len()).to_le_bytes();
        record::fill(&mut header, &[MAGIC, &VERSION.to_le_bytes(), &[0; 4], &self.pack_len.to_le_bytes(), &count]);
        let mut bytes = Vec::with_capacity(HEADER + self.entries.len() * ENTRY + format::FOOTER);
        bytes.extend_from_slice(&header);
        for entry in &self.entries {
            bytes.extend_from_slice(entry.id.as_bytes());
            bytes.extend(entry.offset.to_le_bytes());
            bytes.extend(entry.raw_len.to_le_bytes());
            bytes.extend(entry.stored_len.to_le_bytes());
            bytes.extend([entry.codec.number(), 0, 0, 0, 0, 0, 0, 0]);
        }
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash.as_bytes());
        bytes
    }

    /// Reads what [`PackIndex::to_bytes`] wrote.
    ///
    /// # Errors
    /// Each kind of damage has its own error.
    pub fn parse(bytes: &[u8]) -> Result<PackIndex, FormatError> {
        let what = What::Index;
        let mut fields = Fields::new(what, format::header(what, bytes)?);
        fields.begin(MAGIC, VERSION)?;
        let flags = fields.word()?;
        let (pack_len, count) = (fields.long()?, fields.long()?);
        fields.reserved::<24>()?;
        if flags != 0 {
            return Err(FormatError::Field { what, field: "flags" });
        }
        check_pack_size(what, pack_len)?;
        if count > PACK_RECORDS {
            let bound = PACK_RECORDS;
            return Err(FormatError::OutOfBounds { what, field: "number of entries", found: count, bound });
        }
        format::check_size(what, size(bytes), count * size_of(ENTRY) + size_of(HEADER + format::FOOTER))?;
        let mut fields = Fields::new(what, format::hashed(what, bytes)?);
        let mut entries: Vec<Entry> = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        for _ in 0..count {
            let next = entry(&mut fields, pack_len)?;
            if entries.last().is_some_and(|last| last.id >= next.id) {
                return Err(FormatError::Field { what, field: "order" });
            }
            entries.push(next);
        }
        Ok(PackIndex { pack_len, entries })
    }
}

fn entry(fields: &mut Fields<'_>, pack_len: u64) -> Result<Entry, FormatError> {
    let what = What::Index;
    let (id, offset) = (ChunkId::new(fields.bytes()?), fields.long()?);
    let (raw_len, stored_len) = (fields.word()?, fields.word()?);
    record::check_lengths(what, raw_len, stored_len)?;
    let codec = Codec::from_number(fields.byte()?).ok_or(FormatError::Field { what, field: "codec" })?;
    fields.reserved::<7>()?;
    let entry = Entry { id, offset, raw_len, stored_len, codec };
    match offset >= HEADER_BYTES && entry.end() <= pack_len {
        true => Ok(entry),
        false => Err(FormatError::Field { what, field: "offset" }),
    }
}

/// Checks the size of a pack.
pub(super) fn check_pack_size(what: What, found: u64) -> Result<(), FormatError> {
    match found > PACK_MAX {
        true => Err(FormatError::OutOfBounds { what, field: "pack size", found, bound: PACK_MAX }),
        false => Ok(()),
    }
}

/// The content of a pack according to its records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    /// The header of the pack.
    pub header: PackHeader,
    /// The records before the first damaged one. Its `pack_len` is where they end.
    pub index: PackIndex,
    /// The first damage; `None` if the pack ends with its last record.
    pub lost: Option<FormatError>,
}

/// Why a pack cannot be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// It does not begin like a pack.
    #[error(transparent)]
    Format(#[from] FormatError),
}

/// Reads the headers of all records of a pack of `pack_len` bytes with `read_at` (offset, bytes to fill). Bodies are
/// skipped: a damaged body is noticed when the record is read.
///
/// # Errors
/// When it cannot be read, or is not a pack of ours. Damage after the header of the pack is part of the result.
pub fn scan(
    pack_len: u64,
    mut read_at: impl FnMut(u64, &mut [u8; HEADER]) -> io::Result<()>,
) -> Result<Scan, ScanError> {
    check_pack_size(What::Pack, pack_len)?;
    format::check_size(What::Pack, pack_len.min(HEADER_BYTES), HEADER_BYTES)?;
    let mut bytes = [0; HEADER];
    read_at(0, &mut bytes)?;
    let header = PackHeader::parse(&bytes)?;
    let (mut at, mut entries, mut lost) = (HEADER_BYTES, Vec::new(), None);
    while at < pack_len {
        match next(at, pack_len, size_of(entries.len()), &mut bytes, &mut read_at)? {
            Ok(entry) => {
                at = entry.end();
                entries.push(entry);
            }
            Err(why) => {
                lost = Some(why);
                break;
            }
        }
    }
    Ok(Scan { header, index: PackIndex::new(at, entries), lost })
}

fn next(
    at: u64,
    pack_len: u64,
    before: u64,
    bytes: &mut [u8; HEADER],
    read_at: &mut impl FnMut(u64, &mut [u8; HEADER]) -> io::Result<()>,
) -> Result<Result<Entry, FormatError>, io::Error> {
    let what = What::Record;
    let found = pack_len - at;
    if before >= PACK_RECORDS {
        let (field, bound) = ("number of records", PACK_RECORDS);
        return Ok(Err(FormatError::OutOfBounds { what: What::Pack, field, found: before + 1, bound }));
    }
    if found < HEADER_BYTES {
        return Ok(Err(FormatError::Truncated { what, found, expected: HEADER_BYTES }));
    }
    read_at(at, bytes)?;
    Ok(RecordHeader::parse(bytes).and_then(|header| match header.record_len() <= found {
        true => Ok(Entry::of(&header, at)),
        false => Err(FormatError::Truncated { what, found, expected: header.record_len() }),
    }))
}

#[cfg(test)]
pub(super) mod tests;
