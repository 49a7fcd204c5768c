//! The name of a chunk: the BLAKE3 hash of its raw bytes, keyed if the store is encrypted.

use std::fmt;

/// The name of a chunk. Chunks with the same name have the same content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId([u8; 32]);

impl ChunkId {
    /// An id with these bytes of the hash.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> ChunkId {
        ChunkId(bytes)
    }

    /// The bytes of the hash.
    #[must_use]
    pub(crate) const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<blake3::Hash> for ChunkId {
    fn from(hash: blake3::Hash) -> ChunkId {
        ChunkId(*hash.as_bytes())
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
