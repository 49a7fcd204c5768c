//! Reads maps, indexes and records of the replica. Each is checked as if a stranger had written it.

use crate::client::Cancelled;
use crate::error::{Error, Result};
use crate::layout::{self, Found, Inventory, Of, PackFile, RemotePack};
use crate::replica::{RemoteImage, Replica};
use rekindle_store::chunk::{ChunkMap, Key, map};
use rekindle_store::pack::index::MAX_BYTES as INDEX_MAX;
use rekindle_store::pack::record;
use rekindle_store::pack::{Entry, PackIndex, PackName, Packs, RecordHeader};
use rekindle_store::{ImageId, JobFolder, State};

/// Bytes of the header of a record or a pack.
pub(super) const HEADER: usize = 64;

/// Which index of a pack is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Indexes {
    /// The index here, if the pack is here too with the same length: it need not be fetched.
    Here,
    /// The index in the replica: records may have been removed from the index here.
    There,
}

impl Replica {
    /// The chunk map of an image there; read here if it exists here too.
    pub(super) fn map_of(&self, image: &RemoteImage, folder: &JobFolder, cancelled: Cancelled<'_>) -> Result<ChunkMap> {
        let Some((manifest, chunks)) =
            image.manifest().and_then(|manifest| Some((manifest, manifest.chunks.as_ref()?)))
        else {
            let why = match &image.state {
                State::Damaged { why } => why.to_string(),
                _ => "it is not packed".into(),
            };
            return Err(self.not_whole(image.id, why));
        };
        let here = folder.images_dir().join(image.id.to_string()).join(map::FILE_NAME);
        if let Ok(map) = ChunkMap::read(&here, &chunks.blake3)
            && manifest.check_map(chunks, &map).is_ok()
        {
            return Ok(map);
        }
        let name = layout::of_image(image.id, Of::Chunks);
        // What the manifest says: another size would fill the memory before its hash is known to be wrong.
        let most = map::bytes_of(manifest.parts.len(), chunks.extents);
        let bytes = self.client.get(&name, most, cancelled)?;
        let bytes = bytes.ok_or_else(|| self.not_whole(image.id, "its chunk map is missing"))?;
        let damaged = |why: String| Error::Damaged { url: self.client.shown(), what: name.clone(), why };
        if blake3::hash(&bytes) != chunks.blake3 {
            return Err(damaged("it is not the one that the manifest names".into()));
        }
        let map = ChunkMap::parse(&bytes).map_err(|error| damaged(error.to_string()))?;
        manifest.check_map(chunks, &map).map_err(|error| damaged(error.to_string()))?;
        Ok(map)
    }

    /// The complete packs, the newest first: it probably has most of what is wanted. A pack that is marked for removal may
    /// be gone although the listing still shows it.
    pub(super) fn whole_packs(&self, there: &Inventory, cancelled: Cancelled<'_>) -> Result<Vec<(PackName, Found)>> {
        let mut packs = Vec::new();
        for (name, pack) in &there.packs {
            let RemotePack { pack: Some(found), index: Some(_), gone } = pack else { continue };
            let object = layout::of_pack(*name, PackFile::Pack);
            if gone.is_none() || self.client.head(&object, cancelled)?.is_some() {
                packs.push((*name, *found));
            }
        }
        packs.sort_by_key(|(name, found)| (std::cmp::Reverse(found.modified), *name));
        Ok(packs)
    }

    /// The index of a pack there; read here if `indexes` allows it and it exists here too.
    pub(super) fn index_by(
        &self,
        indexes: Indexes,
        name: PackName,
        pack: Found,
        here: &Packs,
        cancelled: Cancelled<'_>,
    ) -> Result<PackIndex> {
        if indexes == Indexes::Here
            && here.index_path(name).is_there()
            && let Ok(index) = here.pack_index(name)
            && index.pack_len() == pack.size
        {
            return Ok(index);
        }
        let object = layout::of_pack(name, PackFile::Index);
        let damaged = |why: String| Error::Damaged { url: self.client.shown(), what: object.clone(), why };
        let bytes = self.client.get(&object, INDEX_MAX, cancelled)?;
        let index = PackIndex::parse(&bytes.ok_or_else(|| damaged("it is missing".into()))?);
        let index = index.map_err(|error| damaged(error.to_string()))?;
        if index.pack_len() == pack.size {
            return Ok(index);
        }
        Err(damaged(format!("it belongs to a pack of {} bytes, and the pack has {}", index.pack_len(), pack.size)))
    }

    pub(super) fn not_whole(&self, image: ImageId, why: impl Into<String>) -> Error {
        Error::NotWhole { url: self.client.shown(), image, why: why.into() }
    }
}

/// The record as stored, if it matches the index.
pub(super) fn checked(
    bytes: &[u8],
    entry: &Entry,
    key: Option<&Key>,
) -> std::result::Result<(RecordHeader, Vec<u8>), String> {
    let stored = bytes.get(HEADER..).unwrap_or_default().to_vec();
    // A copy is opened in place; the stored bytes above are kept.
    let (mut opened, mut raw) = (bytes.to_vec(), Vec::new());
    let header = record::read(&mut opened, &entry.id, key, &mut raw).map_err(|error| error.to_string())?;
    match (header.raw_len, header.stored_len) == (entry.raw_len, entry.stored_len) {
        true => Ok((header, stored)),
        false => Err("its length differs from that in its index".into()),
    }
}
