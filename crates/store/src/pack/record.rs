//! The bytes of a pack: its header, and the records that follow it back to back.
//!
//! ```text
//! pack    0  magic "REKINDLE PACK\0\0\0"  16      record  0  magic "RKCH"             4
//!        16  version                       4              4  codec                    1
//!        20  flags: 1 encrypted            4              5  zero                     3
//!        24  id of the key                16              8  raw length               4
//!        40  zero                         16             12  stored length            4
//!        56  check                         8             16  name of the chunk       32
//!                                                        48  zero                     8
//!                                                        56  check                    8
//!                                                        64  stored length bytes
//! ```
//!
//! A check is the first 8 bytes of the BLAKE3 hash of the 56 bytes before it. The stored bytes are the result of the
//! codec; in an encrypted pack they are then sealed: nonce (24), sealed bytes, tag (16), bound to the first 56 bytes of
//! the record's header. The name of the chunk is the hash of the raw bytes, so each record can be checked by itself.

use std::io;

use crate::chunk::cipher::{PlainPacks, SEAL};
use crate::chunk::codec::{self, Codec};
use crate::chunk::{CHUNK_MAX, ChunkId, Key, chunk_id};
use crate::format::{self, CHECK, Fields, FormatError, HEADER, What, size, size_of};

const MAGIC: &[u8; 16] = b"REKINDLE PACK\0\0\0";
const VERSION: u32 = 1;
const ENCRYPTED: u32 = 1;
const RECORD_MAGIC: &[u8; 4] = b"RKCH";
/// Maximum bytes that a codec and a seal add to the raw bytes.
const OVERHEAD: u32 = 4096;

/// Bytes of the header of a pack, and of the header of a record.
pub const HEADER_BYTES: u64 = 64;

/// The header of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackHeader {
    /// The id of its key; `None` if it is not encrypted.
    pub(crate) key: Option<[u8; 16]>,
}

impl PackHeader {
    /// The header of a pack written with this key, or without one.
    #[must_use]
    pub fn of(key: Option<&Key>) -> PackHeader {
        PackHeader { key: key.map(Key::id) }
    }

    /// Its bytes.
    #[must_use]
    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let flags = if self.key.is_some() { ENCRYPTED } else { 0 };
        let mut bytes = [0; HEADER];
        fill(&mut bytes, &[MAGIC, &VERSION.to_le_bytes(), &flags.to_le_bytes(), &self.key.unwrap_or_default()]);
        format::put_check(&mut bytes);
        bytes
    }

    /// Parses the header of a pack.
    ///
    /// # Errors
    /// Each kind of damage has its own error.
    pub fn parse(bytes: &[u8]) -> Result<PackHeader, FormatError> {
        let what = What::Pack;
        let header = format::header(what, bytes)?;
        let mut fields = Fields::new(what, header);
        fields.begin(MAGIC, VERSION)?;
        if !format::is_check_right(header) {
            return Err(FormatError::Checksum(what));
        }
        let (flags, key) = (fields.word()?, fields.bytes::<16>()?);
        fields.reserved::<16>()?;
        match flags {
            0 if key == [0; 16] => Ok(PackHeader { key: None }),
            ENCRYPTED => Ok(PackHeader { key: Some(key) }),
            _ => Err(FormatError::Field { what, field: "flags" }),
        }
    }

    /// The header that results from flipping one bit back, if its check is right then. A flipped bit in the version or
    /// in the id of the key makes a pack look as if it were not for us.
    #[must_use]
    pub(crate) fn with_one_bit_wrong(bytes: &[u8; HEADER]) -> Option<PackHeader> {
        let turned = (0..HEADER).flat_map(|byte| (0..8).map(move |bit| (byte, 1_u8 << bit)));
        turned.into_iter().find_map(|(byte, bit)| {
            let mut other = *bytes;
            *other.get_mut(byte)? ^= bit;
            PackHeader::parse(&other).ok()
        })
    }

    /// The key for the records of this pack: `None` if it is not encrypted, and if there is no key or such packs are
    /// accepted. A store may contain packs from before it was encrypted; their chunks have other names.
    ///
    /// # Errors
    /// [`FormatError::NoKey`], [`FormatError::OtherKey`], [`FormatError::Plain`].
    pub fn key_for<'k>(&self, key: Option<&'k Key>) -> Result<Option<&'k Key>, FormatError> {
        match (self.key, key) {
            (None, Some(key)) if key.plain_packs() == PlainPacks::Refused => Err(FormatError::Plain),
            (None, _) => Ok(None),
            (Some(wanted), Some(key)) if wanted == key.id() => Ok(Some(key)),
            (Some(wanted), Some(_)) => Err(FormatError::OtherKey(wanted)),
            (Some(_), None) => Err(FormatError::NoKey),
        }
    }
}

/// The header of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHeader {
    /// The codec of the stored bytes.
    pub(crate) codec: Codec,
    /// Raw bytes of the chunk.
    pub raw_len: u32,
    /// Bytes that follow this header.
    pub stored_len: u32,
    /// The name of the chunk.
    pub id: ChunkId,
}

impl RecordHeader {
    /// Its bytes.
    #[must_use]
    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let codec = [self.codec.number(), 0, 0, 0];
        let (raw, stored) = (self.raw_len.to_le_bytes(), self.stored_len.to_le_bytes());
        fill(&mut bytes, &[RECORD_MAGIC, &codec, &raw, &stored, self.id.as_bytes()]);
        format::put_check(&mut bytes);
        bytes
    }

    /// Parses the header of a record.
    ///
    /// # Errors
    /// Each kind of damage has its own error.
    pub(crate) fn parse(bytes: &[u8]) -> Result<RecordHeader, FormatError> {
        let what = What::Record;
        let header = format::header(what, bytes)?;
        let mut fields = Fields::new(what, header);
        if fields.bytes::<4>()? != *RECORD_MAGIC {
            return Err(FormatError::NotOurs(what));
        }
        if !format::is_check_right(header) {
            return Err(FormatError::Checksum(what));
        }
        let codec = Codec::from_number(fields.byte()?).ok_or(FormatError::Field { what, field: "codec" })?;
        fields.reserved::<3>()?;
        let (raw_len, stored_len) = (fields.word()?, fields.word()?);
        check_lengths(what, raw_len, stored_len)?;
        let id = ChunkId::new(fields.bytes()?);
        fields.reserved::<8>()?;
        Ok(RecordHeader { codec, raw_len, stored_len, id })
    }

    /// The size of the complete record in bytes.
    #[must_use]
    pub(crate) fn record_len(&self) -> u64 {
        HEADER_BYTES + u64::from(self.stored_len)
    }

    fn raw_size(&self) -> usize {
        usize::try_from(self.raw_len).unwrap_or(usize::MAX)
    }
}

/// Checks the sizes of a record, before anything is read or allocated.
pub(super) fn check_lengths(what: What, raw_len: u32, stored_len: u32) -> Result<(), FormatError> {
    let wrong = |field, found: u32, bound: u32| FormatError::OutOfBounds {
        what,
        field,
        found: u64::from(found),
        bound: u64::from(bound),
    };
    if raw_len == 0 {
        return Err(FormatError::Field { what, field: "raw length" });
    }
    if raw_len > CHUNK_MAX {
        return Err(wrong("raw length", raw_len, CHUNK_MAX));
    }
    if stored_len > raw_len + OVERHEAD {
        return Err(wrong("stored length", stored_len, raw_len + OVERHEAD));
    }
    Ok(())
}

/// Appends a complete record to `into`: a header, and `stored`, the result of `codec` for `raw_len` bytes, sealed if
/// there is a key.
///
/// # Errors
/// `InvalidInput` if the sizes are out of bounds; when the kernel gives no random bytes.
pub(crate) fn write(
    into: &mut Vec<u8>,
    id: ChunkId,
    codec: Codec,
    raw_len: usize,
    stored: &[u8],
    key: Option<&Key>,
) -> io::Result<RecordHeader> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
    let length = |n: usize| u32::try_from(n).map_err(|error| invalid(error.to_string()));
    let stored_len = length(stored.len() + key.map_or(0, |_| SEAL))?;
    let header = RecordHeader { codec, raw_len: length(raw_len)?, stored_len, id };
    check_lengths(What::Record, header.raw_len, header.stored_len).map_err(|error| invalid(error.to_string()))?;
    let bytes = header.to_bytes();
    let start = into.len();
    into.extend_from_slice(&bytes);
    into.extend_from_slice(stored);
    if let Some(key) = key {
        let sealed = key.seal(bound(&bytes), into, start + HEADER);
        sealed.inspect_err(|_| into.truncate(start))?;
    }
    Ok(header)
}

/// Decodes a complete record and checks it. The raw bytes of the chunk `wanted` replace the content of `into`. `record`
/// is decrypted in place and unusable afterwards.
///
/// # Errors
/// Each kind of damage has its own error.
pub fn read(
    record: &mut [u8],
    wanted: &ChunkId,
    key: Option<&Key>,
    into: &mut Vec<u8>,
) -> Result<RecordHeader, FormatError> {
    let (header, stored) = open(record, wanted, key)?;
    codec::decode(header.codec, stored, header.raw_size(), into)?;
    prove(into, wanted, key).map(|_| header)
}

/// As [`read`], but uncompressed bytes stay in the record, and decompressed ones replace the content of `scratch`.
///
/// # Errors
/// As [`read`].
pub(crate) fn raw<'a>(
    record: &'a mut [u8],
    wanted: &ChunkId,
    key: Option<&Key>,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8], FormatError> {
    let (header, stored) = open(record, wanted, key)?;
    let raw = if header.codec == Codec::Raw && stored.len() == header.raw_size() {
        stored
    } else {
        codec::decode(header.codec, stored, header.raw_size(), scratch)?;
        scratch
    };
    prove(raw, wanted, key)
}

/// The header of a record, and the stored bytes after unsealing.
fn open<'a>(
    record: &'a mut [u8],
    wanted: &ChunkId,
    key: Option<&Key>,
) -> Result<(RecordHeader, &'a [u8]), FormatError> {
    let what = What::Record;
    let header = RecordHeader::parse(record)?;
    if header.id != *wanted {
        return Err(FormatError::OtherChunk);
    }
    format::check_size(what, size(record), header.record_len())?;
    let cut = FormatError::Truncated { what, found: 0, expected: size_of(HEADER) };
    let (head, body) = record.split_first_chunk_mut::<HEADER>().ok_or(cut)?;
    match key {
        Some(key) => Ok((header, key.open(bound(head), body)?)),
        None => Ok((header, body)),
    }
}

fn prove<'a>(raw: &'a [u8], wanted: &ChunkId, key: Option<&Key>) -> Result<&'a [u8], FormatError> {
    match chunk_id(key, raw) == *wanted {
        true => Ok(raw),
        false => Err(FormatError::Checksum(What::Chunk)),
    }
}

/// The bytes that a sealed body is bound to: the header without its check.
fn bound(header: &[u8; HEADER]) -> &[u8] {
    header.get(..HEADER - CHECK).unwrap_or_default()
}

/// Writes the fields one after the other; the rest stays zero.
pub(super) fn fill(bytes: &mut [u8; HEADER], fields: &[&[u8]]) {
    for (to, from) in bytes.iter_mut().zip(fields.iter().copied().flatten()) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests;
