//! Where healing takes a chunk from if no pack here has an intact copy: another copy of the packs, such as a replica.
//! The store does not know what that is or how it is reached.

use std::collections::HashSet;

use crate::FileError;
use crate::chunk::{ChunkId, Key};
use crate::pack::{Packs, RecordHeader};

/// Receives a record: the key of its pack (`None` if that is not encrypted), its header and the stored bytes.
pub type Put<'p> = &'p mut dyn FnMut(Option<&Key>, &RecordHeader, &[u8]) -> Result<(), FileError>;

/// Another copy of the packs. It is reached only when it is asked.
pub trait ChunkSource: Sync {
    /// Passes those of these chunks to `put` that exist there, are intact, and match the key. An index of a pack that
    /// is also `here` need not be fetched.
    ///
    /// # Errors
    /// When it cannot be asked, `put` failed, or `cancelled` answers true. What was put until then is intact.
    fn fetch(
        &self,
        wanted: HashSet<ChunkId>,
        here: &Packs,
        key: Option<&Key>,
        cancelled: &(dyn Fn() -> bool + Sync),
        put: Put<'_>,
    ) -> Result<(), FetchError>;
}

/// Why not all chunks were asked for.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// `put` failed.
    #[error(transparent)]
    Put(#[from] FileError),
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The other copy cannot be asked.
    #[error("{0}")]
    Unavailable(String),
}
