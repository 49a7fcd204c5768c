//! Checks a packed image: its map, and whether the packs have every chunk of it.

use std::path::PathBuf;

use super::{Finding, PartReport};
use crate::chunk::{ChunkMap, map};
use crate::format::{FormatError, ReadError, What};
use crate::image::Image;
use crate::manifest::Manifest;
use crate::pack::{Index, Packs, ReadChunkError, Want};
use crate::unpack::{Place, Planned, plan};

/// The problems of each part.
pub(super) struct Wrong {
    /// Number of chunks, offset of the first, and its problem.
    parts: Vec<Option<(u64, u64, String)>>,
}

impl Wrong {
    pub(super) fn none(parts: usize) -> Wrong {
        Wrong { parts: vec![None; parts] }
    }

    pub(super) fn note(&mut self, place: Place, why: &dyn std::error::Error) {
        let Some(part) = usize::try_from(place.part).ok().and_then(|part| self.parts.get_mut(part)) else { return };
        match part {
            Some((count, offset, _)) if *offset <= place.offset => *count += 1,
            other => {
                let count = other.take().map_or(1, |(count, ..)| count + 1);
                *other = Some((count, place.offset, rekindle_base::chain(why)));
            }
        }
    }

    pub(super) fn report(self, manifest: &Manifest) -> Vec<PartReport> {
        let finding = |wrong| match wrong {
            Some((count, offset, why)) => Finding::Chunks { count, offset, why },
            None => Finding::Ok,
        };
        let reports = manifest.parts.iter().zip(self.parts);
        reports
            .map(|(part, wrong)| PartReport { path: PathBuf::from(part.path.as_str()), finding: finding(wrong) })
            .collect()
    }
}

/// Checks everything that needs no content.
pub(super) fn check(image: &Image, manifest: &Manifest) -> Vec<PartReport> {
    match look(image) {
        Ok((map, index)) => wants(manifest, &map, &index).0.report(manifest),
        Err(report) => vec![report],
    }
}

/// The packs that an image in the store needs, found from its folder.
pub(super) fn packs_of(image: &Image) -> Packs {
    let job = image.dir.parent().and_then(|images| images.parent());
    Packs::new(job.as_ref().unwrap_or(&image.dir).join("packs"))
}

/// The map of the image and the index of the packs, or the problem with them.
pub(super) fn look(image: &Image) -> Result<(ChunkMap, Index), PartReport> {
    let broken = |error: &dyn std::error::Error| Finding::Broken { why: rekindle_base::chain(error) };
    let unreadable = |error: &dyn std::error::Error| Finding::Unreadable { why: rekindle_base::chain(error) };
    let map = image.chunk_map().map_err(|error| PartReport {
        path: map::FILE_NAME.into(),
        finding: match &error {
            ReadError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => Finding::Missing,
            ReadError::Read { .. } => unreadable(&error),
            ReadError::Format { .. } => broken(&error),
        },
    })?;
    let packs = packs_of(image);
    let index = packs
        .index()
        .map_err(|error| PartReport { path: packs.dir().path().to_owned(), finding: unreadable(&error) })?;
    Ok((map.unwrap_or_default(), index))
}

/// The chunks to read for the complete image, and those that cannot be read.
pub(super) fn wants(manifest: &Manifest, map: &ChunkMap, index: &Index) -> (Wrong, Vec<Want<Place>>) {
    let mut wrong = Wrong::none(manifest.parts.len());
    let mut wants = Vec::new();
    let Ok(()) = plan(map, index, |planned| {
        match planned {
            Planned::Want(want) if want.location.raw_len == want.target.len => wants.push(want),
            Planned::Want(want) => {
                wrong.note(want.target, &FormatError::Field { what: What::Map, field: "length of an extent" });
            }
            Planned::Missing(id, place) => wrong.note(place, &ReadChunkError::missing(id, index)),
            Planned::Zeros(_) => {}
        }
        Ok::<_, std::convert::Infallible>(())
    });
    (wrong, wants)
}
