//! Chunks: the pieces into which the parts of an image are cut. Each chunk is stored once.
//!
//! This module defines what a chunk is: its name ([`id`]), where files are cut ([`cut`]), how its bytes are compressed
//! ([`codec`]) and sealed ([`cipher`]), and the list of chunks of an image ([`map`]). [`super::pack`] knows where
//! chunks are stored. Everything is computed in memory; only the key, the page maps and the chunk map are read from
//! files.

pub(crate) mod cipher;
pub mod codec;
pub mod cut;
pub mod id;
pub mod map;

pub use cipher::{Key, KeyError, PlainPacks, chunk_id};
pub use codec::{Codec, Compression};
pub(crate) use cut::Cutter;
pub use id::ChunkId;
pub use map::{ChunkMap, Extent};

/// Maximum raw bytes of a chunk when written. Large enough that 1 TiB has 4 million chunks, small enough that a few
/// changed pages cost little.
pub(crate) const CHUNK: usize = 256 << 10;
/// Maximum raw bytes of a chunk when read: allows a later version to use larger chunks.
pub(crate) const CHUNK_MAX: u32 = 16 << 20;
