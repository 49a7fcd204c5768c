//! Packs: the files that contain chunks.
//!
//! ```text
//! JOB/packs/  0700
//!   NAME.pack   a header and records; never changed under this name, except a damaged header (see [`super::repair`])
//!   NAME.idx    where each chunk is in it; can be rebuilt from the records
//!   NAME.gone   no image needs it any more, since when; a writer removes the mark or the pack
//!   .tmp-*      leftovers of a crash
//! ```
//!
//! This module owns the bytes of packs ([`record`]) and indexes ([`index`]), and the access to the folder ([`set`]). A
//! pack gets its name when it is synced, and its index after that. After a power cut between the two, the records are
//! read instead of the index, and nothing is lost.

mod disk;
pub mod index;
pub mod reader;
pub mod record;
pub mod set;
pub(crate) mod stored;
pub(crate) mod strike;
pub mod writer;

pub use index::{Entry, PackIndex};
pub(crate) use reader::ReadChunkError;
pub(crate) use reader::Want;
pub use reader::{Reading, Visit};
pub use record::{PackHeader, RecordHeader};
pub use set::{Index, Location, PackName, Packs, Problem};
pub(crate) use stored::CopyError;
pub use strike::Unread;
pub use writer::{Making, PackWriter};

/// A pack is closed at about this size: large enough to be read sequentially, small enough to be rewritten when half of
/// it is not needed any more.
pub(crate) const PACK: u64 = 256 << 20;
/// Maximum number of records in a pack; it is closed then, however small they are.
pub(crate) const PACK_RECORDS: u64 = 1 << 20;
/// Larger packs are refused, because offsets have 32 bits.
pub(crate) const PACK_MAX: u64 = u32::MAX as u64;
