//! The chunk map of an image: the file `chunks`, which lists the chunks of each part.
//!
//! ```text
//! 0   magic "REKINDLE CHUNKS\0"  16
//! 16  version                     4
//! 20  parts                       4
//! 24  extents of all parts        8
//! 32  zero                       32
//! 64  for each part, in the order of the manifest: number of its extents (8), then 40 bytes for each:
//!       kind (4: 0 zeros, 1 chunk), length (4), name of the chunk (32, zero for zeros)
//! end BLAKE3 of all before       32
//! ```
//!
//! It names chunks and not their places, so packs can be rewritten without changing an image. It is written once,
//! before the manifest that has its hash, and never changed.

use std::io::Read;

use super::CHUNK_MAX;
use super::id::ChunkId;
use crate::format::{self, Fields, FormatError, HEADER, ReadError, What, size, size_of};
use rekindle_os::beneath::Beneath;

/// Its name in the folder of the image.
pub const FILE_NAME: &str = crate::names::CHUNKS;
/// Larger maps are not read: 4 GiB are 100 million chunks, 25 TiB if all are full.
pub const MAX_BYTES: u64 = 4 << 30;

const MAGIC: &[u8; 16] = b"REKINDLE CHUNKS\0";
const VERSION: u32 = 1;
const EXTENT: usize = 40;
const ZERO: u32 = 0;
const CHUNK: u32 = 1;
/// Maximum number of zeros in one extent.
const MAX_ZEROS: u64 = 1 << 30;

/// A piece of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// At least one byte of zeros.
    Zero {
        /// How many bytes.
        len: u64,
    },
    /// A chunk.
    Chunk {
        /// The chunk.
        id: ChunkId,
        /// Its raw bytes. At least one, at most [`CHUNK_MAX`].
        len: u32,
    },
}

impl Extent {
    /// Its length in bytes.
    #[must_use]
    pub(crate) fn len(&self) -> u64 {
        match self {
            Extent::Zero { len } => *len,
            Extent::Chunk { len, .. } => u64::from(*len),
        }
    }

    /// Whether its length is 0, which occurs in no map.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many extents it takes in the file: a long run of zeros takes several.
    fn written(&self) -> u64 {
        match self {
            Extent::Zero { len } => len.div_ceil(MAX_ZEROS),
            Extent::Chunk { .. } => 1,
        }
    }
}

/// The content of the parts of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChunkMap {
    /// The extents of each part, in the order of [`crate::Manifest::parts`]; zeros never follow zeros (see [`push`]).
    pub parts: Vec<Vec<Extent>>,
}

/// Adds an extent to those of a part; zeros after zeros become one.
pub(crate) fn push(part: &mut Vec<Extent>, extent: Extent) {
    match (part.last_mut(), extent) {
        (Some(Extent::Zero { len }), Extent::Zero { len: more }) => *len = len.saturating_add(more),
        _ => part.push(extent),
    }
}

impl ChunkMap {
    /// The number of extents in the file.
    #[must_use]
    pub fn extents(&self) -> u64 {
        self.parts.iter().flatten().map(Extent::written).sum()
    }

    /// The chunks in the map, with repetitions.
    pub fn chunks(&self) -> impl Iterator<Item = (ChunkId, u32)> {
        self.parts.iter().flatten().filter_map(|extent| match extent {
            Extent::Chunk { id, len } => Some((*id, *len)),
            Extent::Zero { .. } => None,
        })
    }

    /// The bytes of the file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(usize::try_from(self.file_size()).unwrap_or(0));
        bytes.extend_from_slice(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(u32::try_from(self.parts.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(self.extents().to_le_bytes());
        bytes.resize(HEADER, 0);
        for part in &self.parts {
            bytes.extend(part.iter().map(Extent::written).sum::<u64>().to_le_bytes());
            part.iter().for_each(|extent| write(extent, &mut bytes));
        }
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash.as_bytes());
        bytes
    }

    fn file_size(&self) -> u64 {
        file_size(size_of(self.parts.len()), self.extents()).unwrap_or(u64::MAX)
    }

    /// Reads what [`ChunkMap::to_bytes`] wrote.
    ///
    /// # Errors
    /// Each kind of damage has its own error.
    pub fn parse(bytes: &[u8]) -> Result<ChunkMap, FormatError> {
        let what = What::Map;
        let mut fields = Fields::new(what, format::header(what, bytes)?);
        fields.begin(MAGIC, VERSION)?;
        let (parts, extents) = (fields.word()?, fields.long()?);
        fields.reserved::<32>()?;
        let expected = file_size(u64::from(parts), extents).filter(|size| *size <= MAX_BYTES);
        let bound = MAX_BYTES / size_of(EXTENT);
        let expected =
            expected.ok_or(FormatError::OutOfBounds { what, field: "number of extents", found: extents, bound })?;
        format::check_size(what, size(bytes), expected)?;
        let mut fields = Fields::new(what, format::hashed(what, bytes)?);
        let mut read = Vec::with_capacity(usize::try_from(parts).unwrap_or(0));
        for _ in 0..parts {
            read.push(part(&mut fields)?);
        }
        match fields.rest() {
            [] => Ok(ChunkMap { parts: read }),
            rest => Err(FormatError::TooLong { what, extra: size(rest) }),
        }
    }

    /// Reads a file whose hash is in the manifest.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    pub fn read(file: &Beneath, expected: &blake3::Hash) -> Result<ChunkMap, ReadError> {
        let bytes = read_bytes(file)?;
        let is_same = blake3::hash(&bytes) == *expected;
        let checksum = FormatError::Checksum(What::Map);
        // Damage is reported before a mismatch with the manifest. A flipped bit in the version does not make the map a
        // newer one.
        let map = match ChunkMap::parse(&bytes) {
            Err(error) if error.is_not_for_us() && !is_same => Err(checksum),
            Ok(_) if !is_same => Err(checksum),
            parsed => parsed,
        };
        map.map_err(|source| ReadError::Format { path: file.path().to_owned(), source })
    }

    /// Reads a file, whatever manifest it belongs to; and its hash.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    pub(crate) fn read_any(file: &Beneath) -> Result<(ChunkMap, blake3::Hash), ReadError> {
        let bytes = read_bytes(file)?;
        let map = ChunkMap::parse(&bytes);
        let map = map.map_err(|source| ReadError::Format { path: file.path().to_owned(), source })?;
        Ok((map, blake3::hash(&bytes)))
    }
}

fn read_bytes(place: &Beneath) -> Result<Vec<u8>, ReadError> {
    let path = || place.path().to_owned();
    let failed = |source| ReadError::Read { path: path(), source };
    let file = place.read().map_err(failed)?;
    let found = file.metadata().map_err(failed)?.len();
    if found > MAX_BYTES {
        let source = FormatError::OutOfBounds { what: What::Map, field: "size", found, bound: MAX_BYTES };
        return Err(ReadError::Format { path: path(), source });
    }
    let mut bytes = Vec::with_capacity(usize::try_from(found).unwrap_or(0));
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// The size of the file of a map with these numbers of parts and extents, at most [`MAX_BYTES`].
#[must_use]
pub fn bytes_of(parts: usize, extents: u64) -> u64 {
    file_size(size_of(parts), extents).map_or(MAX_BYTES, |size| size.min(MAX_BYTES))
}

/// The size of the file; `None` if it overflows.
fn file_size(parts: u64, extents: u64) -> Option<u64> {
    let content = extents.checked_mul(size_of(EXTENT))?.checked_add(parts.checked_mul(8)?)?;
    content.checked_add(size_of(HEADER + format::FOOTER))
}

fn write(extent: &Extent, bytes: &mut Vec<u8>) {
    let mut put = |kind: u32, len: u32, id: &[u8; 32]| {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend_from_slice(id);
    };
    match extent {
        Extent::Chunk { id, len } => put(CHUNK, *len, id.as_bytes()),
        Extent::Zero { len } => {
            let mut left = *len;
            while left > 0 {
                let len = left.min(MAX_ZEROS);
                put(ZERO, u32::try_from(len).unwrap_or(u32::MAX), &[0; 32]);
                left -= len;
            }
        }
    }
}

fn part(fields: &mut Fields<'_>) -> Result<Vec<Extent>, FormatError> {
    let what = What::Map;
    let (found, bound) = (fields.long()?, size(fields.rest()) / size_of(EXTENT));
    if found > bound {
        return Err(FormatError::OutOfBounds { what, field: "number of extents of a part", found, bound });
    }
    let mut extents = Vec::with_capacity(usize::try_from(found).unwrap_or(0));
    for _ in 0..found {
        let (kind, len, id) = (fields.word()?, fields.word()?, fields.bytes::<32>()?);
        let extent = match kind {
            ZERO if u64::from(len) <= MAX_ZEROS && id == [0; 32] => Extent::Zero { len: u64::from(len) },
            CHUNK if len <= CHUNK_MAX => Extent::Chunk { id: ChunkId::new(id), len },
            _ => return Err(FormatError::Field { what, field: "extent" }),
        };
        if extent.is_empty() {
            return Err(FormatError::Field { what, field: "length of an extent" });
        }
        // The same content is always written in the same form: only a full run of zeros is followed by zeros.
        let full = |last: &Extent| !matches!(last, Extent::Zero { len } if len % MAX_ZEROS != 0);
        if matches!(extent, Extent::Zero { .. }) && !extents.last().is_none_or(full) {
            return Err(FormatError::Field { what, field: "run of zeros" });
        }
        push(&mut extents, extent);
    }
    Ok(extents)
}

#[cfg(test)]
mod tests;
