//! Which chunks the images of a job need, and so which packs are needed.

use std::collections::HashSet;
use std::io;

use super::{Error, PackUse};
use crate::chunk::map::{self, ChunkMap};
use crate::folder::JobFolder;
use crate::format::ReadError;
use crate::image::{DamageKind, Image, State};
use crate::pack::set::{Index, Packs};
use rekindle_base::chain;

/// The first half of a chunk's name, which is enough, as in the index.
type Prefix = [u8; 16];

/// All chunks that a set of images needs.
#[derive(Debug, Default)]
pub(crate) struct Needed(HashSet<Prefix>);

impl Needed {
    /// The chunks of all images of the job, including bad ones: a mark may be wrong.
    pub(crate) fn of(folder: &JobFolder) -> Result<Needed, Error> {
        let mut needed = Needed::default();
        for image in folder.images()? {
            needed.add(&image)?;
        }
        Ok(needed)
    }

    /// Adds the chunks of one image.
    fn add(&mut self, image: &Image) -> Result<(), Error> {
        map_of(image)?.iter().for_each(|map| self.add_map(map));
        Ok(())
    }

    pub(super) fn add_map(&mut self, map: &ChunkMap) {
        self.0.extend(map.chunks().filter_map(|(id, _)| prefix(id.as_bytes())));
    }

    pub(crate) fn has(&self, id: &crate::chunk::ChunkId) -> bool {
        prefix(id.as_bytes()).is_some_and(|prefix| self.0.contains(&prefix))
    }

    /// How much of each pack is needed. If a chunk is in more packs than necessary, only the places that a reader
    /// prefers count.
    pub(super) fn of_packs(&self, packs: &Packs, index: &Index, copies: usize) -> Result<Vec<PackUse>, Error> {
        let mut uses = Vec::new();
        for info in index.packs() {
            let pack = packs.pack_index(info.name).map_err(|problem| Error::Pack {
                pack: info.name,
                why: problem.index.as_ref().map_or_else(|| "it is missing".into(), |error| chain(error)),
            })?;
            let from_here = |entry: &&crate::pack::index::Entry| {
                self.has(&entry.id) && index.kept(&entry.id, copies).any(|place| place.pack == info.name)
            };
            let needed = pack.entries().iter().filter(from_here).map(|entry| entry.end() - entry.offset).sum();
            uses.push(PackUse { name: info.name, bytes: pack.pack_len(), needed });
        }
        Ok(uses)
    }
}

/// The map of the chunks that an image needs; `None` if it needs none.
///
/// # Errors
/// [`Error::Image`]: it is unknown what it needs.
pub(crate) fn map_of(image: &Image) -> Result<Option<ChunkMap>, Error> {
    let unknown = |why: String| Error::Image { image: image.id, why };
    let map = match &image.state {
        State::Damaged { why } if !matches!(why.kind, DamageKind::Broken | DamageKind::Untrusted) => {
            return Err(unknown(why.to_string()));
        }
        // The image is unusable, or perhaps only not readable by us. As long as it is kept, so are the chunks in its
        // map.
        State::Damaged { .. } => ChunkMap::read_any(&image.dir.join(map::FILE_NAME)).map(|(map, _)| Some(map)),
        State::Good(_) | State::Bad { .. } => image.chunk_map(),
    };
    match map {
        Ok(map) => Ok(map),
        // The map was read and is damaged, or is missing: the image cannot be restored any more.
        Err(ReadError::Format { source, .. }) if !source.is_not_for_us() => Ok(None),
        Err(ReadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unknown(chain(&error))),
    }
}

fn prefix(id: &[u8; 32]) -> Option<Prefix> {
    id.first_chunk().copied()
}
