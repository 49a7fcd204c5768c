//! Fills memory of restored processes that had stayed on the GPU, before any of their threads runs.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use rekindle_cuda::copier::{self, Copier, Reuse, Way};
use rekindle_cuda::sharing::Staying;
use rekindle_store::manifest::Kept;

/// Why it was not filled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The processes have other memory than the image.
    #[error("the processes have {there} pieces of such memory, and {same} of the {here} in the image are the same")]
    Other {
        /// The number in the processes.
        there: usize,
        /// The number in the image.
        here: usize,
        /// Those that are in both.
        same: usize,
    },
    /// The image's file cannot be opened.
    #[error("cannot open it in the image")]
    File(#[source] io::Error),
    /// The process that copies failed.
    #[error(transparent)]
    Copier(#[from] copier::Error),
}

/// Fills new memory from the image in `dir`.
pub(crate) fn fill(copier: &Copier, dir: &Path, kept: Option<&Kept>, made: &[Staying]) -> Result<(), Error> {
    let pieces = kept.map_or(&[][..], |kept| &kept.pieces);
    let known: BTreeMap<_, _> = made.iter().map(|one| ((one.pid, one.index, one.bytes), one)).collect();
    let pairs: Vec<(u64, &Staying)> = pieces
        .iter()
        .filter_map(|piece| Some((piece.offset, *known.get(&(piece.pid, piece.index, piece.bytes))?)))
        .collect();
    if pairs.len() != pieces.len() || known.len() != pieces.len() || made.len() != pieces.len() {
        return Err(Error::Other { there: made.len(), here: pieces.len(), same: pairs.len() });
    }
    let (Some(kept), Some(end)) = (kept, pieces.iter().map(|piece| piece.offset.saturating_add(piece.bytes)).max())
    else {
        return Ok(());
    };
    // A link could lead to a file that the job may not read.
    let file = kept.part.open_for_device(dir).map_err(Error::File)?;
    copier.file(&file, end)?;
    let copied = copier.begin(Way::In, &file, Reuse::NOTHING, pairs)?.finish(&|| false)?;
    tracing::debug!(bytes = copied.bytes, took = ?copied.took, "filled GPU memory from the image");
    Ok(())
}
