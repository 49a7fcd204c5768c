//! Fills memory of restored processes that had stayed on the GPU, before any of their threads runs.
//!
//! If the process that copies runs, it makes the memory and fills it while CRIU works ([`Ahead`]). The restored processes
//! then import it, as after a snapshot. Whatever is in the way, they make it themselves once they exist, and it is filled then:
//! this takes 0.3 s longer for 16 GiB.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;

use rekindle_base::chain;
use rekindle_cuda::GpuUuid;
use rekindle_cuda::copier::{self, Copier, Copying, Reuse, Way};
use rekindle_cuda::sharing::{self, Sharing, Staying};
use rekindle_os::beneath::Beneath;
use rekindle_os::descriptors::{self, Room};
use rekindle_store::Manifest;
use rekindle_store::manifest::{Kept, KeptPiece};

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
    /// We may not have as many descriptors.
    #[error("there is no room for their descriptors")]
    Room(#[source] io::Error),
}

/// Memory that is being made and filled, and belongs to no process yet. It is free if this is dropped.
#[derive(Debug)]
pub(crate) struct Ahead<'a> {
    copier: &'a Copier,
    copying: Copying<'a>,
    pieces: &'a [KeptPiece],
    /// For the descriptors.
    room: Room,
}

impl<'a> Ahead<'a> {
    /// Begins, if that is possible: the process that copies runs, and the image says which GPU has what.
    pub(crate) fn begin(copier: &'a Copier, dir: &Beneath, manifest: &'a Manifest) -> Option<Ahead<'a>> {
        let kept = manifest.kept.as_ref().filter(|kept| !kept.pieces.is_empty() && copier.can_make())?;
        let pieces = kept.pieces.as_slice();
        let gpu = |piece: &KeptPiece| manifest.gpus.get(piece.gpu?)?.uuid.parse::<GpuUuid>().ok();
        let gpus: Vec<GpuUuid> = pieces.iter().map(gpu).collect::<Option<_>>()?;
        let begin = || -> Result<_, Error> {
            let room = descriptors::room_for(pieces.len()).map_err(Error::Room)?;
            let distinct: BTreeSet<GpuUuid> = gpus.iter().copied().collect();
            copier.prepare(&distinct.into_iter().collect::<Vec<_>>(), false)?;
            let file = open(copier, dir, kept)?;
            let wanted = gpus.iter().zip(pieces).map(|(gpu, piece)| (*gpu, piece.offset, piece.bytes));
            Ok((room, copier.make(&file, wanted)?))
        };
        match begin() {
            Ok((room, copying)) => Some(Ahead { copier, copying, pieces, room }),
            Err(error) => {
                tell_of(&error);
                None
            }
        }
    }

    /// Hands it to the restored processes, which must be as for [`sharing::take_again`]. Returns false if that is not possible
    /// and nothing has changed: then all of it is free again.
    ///
    /// # Errors
    /// Then the processes must not be resumed.
    pub(crate) fn hand_over(self, all: &[Sharing], is_given_up: &dyn Fn() -> bool) -> Result<bool, sharing::Error> {
        let Ahead { copier, copying, pieces, room: _room } = self;
        let copied = match copying.finish(is_given_up) {
            Ok(copied) => copied,
            Err(error) => {
                tell_of(&Error::Copier(error));
                return Ok(false);
            }
        };
        let named = pieces.iter().zip(copied.pieces).filter_map(|(piece, placed)| {
            Some(Staying { pid: piece.pid, index: piece.index, bytes: piece.bytes, memory: placed.memory?.into() })
        });
        let made: Vec<Staying> = named.collect();
        let lacking: BTreeSet<_> = sharing::lacking(all).into_iter().collect();
        // What else is the matter is found out where the processes make it themselves.
        if made.len() != lacking.len() || !made.iter().all(|one| lacking.contains(&(one.pid, one.index, one.bytes))) {
            return Ok(false);
        }
        sharing::take_again(all, &made).inspect_err(|_| copier.makes_no_more())?;
        tracing::debug!(bytes = copied.bytes, took = ?copied.took, "GPU memory was filled while CRIU worked");
        Ok(true)
    }
}

fn tell_of(error: &Error) {
    tracing::debug!("GPU memory was not filled before its processes existed: {}", chain(error));
}

/// Opens the image's file, and has it mapped by the process that copies.
fn open(copier: &Copier, dir: &Beneath, kept: &Kept) -> Result<File, Error> {
    let end = kept.pieces.iter().map(|piece| piece.offset.saturating_add(piece.bytes)).max().unwrap_or(0);
    // A link could lead to a file that the job may not read.
    let file = kept.part.open_for_device(dir).map_err(Error::File)?;
    copier.file(&file, end)?;
    Ok(file)
}

/// Fills new memory from the image in `dir`, unless that is given up.
pub(crate) fn fill(
    copier: &Copier,
    dir: &Beneath,
    kept: Option<&Kept>,
    made: &[Staying],
    is_given_up: &dyn Fn() -> bool,
) -> Result<(), Error> {
    let pieces = kept.map_or(&[][..], |kept| &kept.pieces);
    let known: BTreeMap<_, _> = made.iter().map(|one| ((one.pid, one.index, one.bytes), one)).collect();
    let pairs: Vec<(u64, &Staying)> = pieces
        .iter()
        .filter_map(|piece| Some((piece.offset, *known.get(&(piece.pid, piece.index, piece.bytes))?)))
        .collect();
    if pairs.len() != pieces.len() || known.len() != pieces.len() || made.len() != pieces.len() {
        return Err(Error::Other { there: made.len(), here: pieces.len(), same: pairs.len() });
    }
    let Some(kept) = kept.filter(|kept| !kept.pieces.is_empty()) else { return Ok(()) };
    let file = open(copier, dir, kept)?;
    let copied = copier.begin(Way::In, &file, Reuse::NOTHING, pairs)?.finish(is_given_up)?;
    tracing::debug!(bytes = copied.bytes, took = ?copied.took, "filled GPU memory from the image");
    Ok(())
}
