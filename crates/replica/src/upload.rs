//! Sends one image; the protocol is in the parent module.

use std::collections::BTreeSet;
use std::io;

use crate::client::Cancelled;
use crate::error::{Error, Result};
use crate::layout::{self, Found, Inventory, Of, PackFile, RemotePack};
use crate::read_mark;
use crate::replica::Replica;
use crate::send::Flow;
use rekindle_os::beneath::Beneath;
use rekindle_store::chunk::{ChunkId, ChunkMap};
use rekindle_store::image::State;
use rekindle_store::manifest::{self, Manifest};
use rekindle_store::pack::{Index, PackName, Packs};
use rekindle_store::persist::Progress;
use rekindle_store::{BadMark, BadWhy, Image, JobFolder};

/// How often to look for missing packs: the second time for packs that were removed or repacked here, or removed there,
/// in the meantime.
const ROUNDS: u32 = 5;

/// The result of an upload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uploaded {
    /// Packs that were sent.
    pub packs: usize,
    /// Bytes of them.
    pub bytes: u64,
    /// Packs that existed there already.
    pub present: usize,
}

impl Replica {
    /// Sends the missing content of a packed image, so that it can be restored from the replica. If the replica seems to
    /// be full, packs there that no image has needed for long are removed: otherwise that only follows an upload.
    ///
    /// # Errors
    /// [`Error::NotPacked`] for a loose one, [`Error::NotWholeHere`], [`Error::Remote`], [`Error::Read`],
    /// [`Error::Cancelled`]. What was sent until then stays, and the next call continues there.
    pub fn upload(
        &self,
        image: &Image,
        folder: &JobFolder,
        progress: &Progress,
        cancelled: Cancelled<'_>,
    ) -> Result<Uploaded> {
        let map = image.chunk_map()?.ok_or(Error::NotPacked(image.id))?;
        match self.upload_once(image, &map, folder, progress, cancelled) {
            Err(error) if error.may_be_full() => match self.sweep_for(&map, folder, cancelled) {
                Ok(1..) => self.upload_once(image, &map, folder, progress, cancelled),
                _ => Err(error),
            },
            done => done,
        }
    }

    fn upload_once(
        &self,
        image: &Image,
        map: &ChunkMap,
        folder: &JobFolder,
        progress: &Progress,
        cancelled: Cancelled<'_>,
    ) -> Result<Uploaded> {
        // Exactly what was checked is sent: the map is checked with its hash, the manifest with its own.
        let text = read(&image.dir.join(manifest::FILE_NAME), manifest::MAX_BYTES)?;
        if Manifest::parse(&text, folder.trust()).ok().as_ref() != image.manifest() {
            return Err(Error::NotWholeHere(image.id));
        }
        self.client.check_is_not(folder.path())?;
        self.client.prepare()?;
        let mut flow = Flow::new(progress, self.rate, cancelled);
        let uploaded = self.send_packs(image, map, &folder.packs(), &mut flow)?;
        // Looked up by their names: a listing may show what was removed, and not show what is there.
        let find = |file| self.client.head(&layout::of_image(image.id, file), cancelled);
        let put = |file, bytes| self.client.put(&layout::of_image(image.id, file), bytes, cancelled);
        let chunks = map.to_bytes();
        if !find(Of::Chunks)?.is_some_and(|found| u64::try_from(chunks.len()) == Ok(found.size)) {
            put(Of::Chunks, chunks)?;
        }
        self.send_mark(image, find(Of::Mark)?.is_some(), cancelled)?;
        put(Of::Manifest, text)?;
        self.put_last(image.id, cancelled)?;
        Ok(uploaded)
    }

    /// Copies the marks of these images to the replica: bad, or not. Those that are not in the replica are skipped. A
    /// mark for damage is not copied.
    ///
    /// # Errors
    /// [`Error::Remote`], [`Error::Cancelled`].
    pub fn upload_marks(&self, images: &[Image], cancelled: Cancelled<'_>) -> Result<()> {
        if images.is_empty() {
            return Ok(());
        }
        let there = self.inventory(cancelled)?;
        for image in images {
            match there.images.get(&image.id) {
                Some(files) if files.manifest.is_some() => self.send_mark(image, files.mark.is_some(), cancelled)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn send_mark(&self, image: &Image, is_there: bool, cancelled: Cancelled<'_>) -> Result<()> {
        let name = layout::of_image(image.id, Of::Mark);
        match there(&image.state) {
            There::Marked(mark) => {
                let bytes = serde_json::to_vec_pretty(mark).map_err(io::Error::from);
                let bytes = bytes.map_err(|source| Error::Read { path: image.dir.path().to_owned(), source })?;
                let same =
                    is_there && self.client.get(&name, read_mark::MAX_BYTES, cancelled)?.as_ref() == Some(&bytes);
                if same { Ok(()) } else { self.client.put(&name, bytes, cancelled) }
            }
            There::Unmarked if is_there => self.client.delete(&name, cancelled),
            There::Unmarked | There::AsItIs => Ok(()),
        }
    }

    /// Steps 1 to 3.
    fn send_packs(&self, image: &Image, map: &ChunkMap, packs: &Packs, flow: &mut Flow<'_>) -> Result<Uploaded> {
        let mut uploaded = Uploaded::default();
        let mut index = packs.index()?;
        for round in 1.. {
            let mut there = self.inventory(flow.cancelled)?;
            let needed = needed(map, &index, &there).ok_or(Error::NotWholeHere(image.id));
            let needed = match needed {
                Err(error) if round >= ROUNDS => return Err(error),
                Err(_) => {
                    // Packs were rewritten after the indexes were read.
                    index = packs.index()?;
                    continue;
                }
                Ok(needed) => needed,
            };
            for name in &needed {
                self.correct(&mut there, &index, *name, flow.cancelled)?;
            }
            let mut missing: Vec<PackName> =
                needed.iter().copied().filter(|name| !is_whole(&index, &there, *name)).collect();
            uploaded.present = needed.len().saturating_sub(uploaded.packs + missing.len());
            if missing.is_empty() {
                return Ok(uploaded);
            }
            if round > ROUNDS {
                let why = format!("{} of its packs were sent and are not there", missing.len());
                return Err(self.not_whole(image.id, why));
            }
            let size = |name: &PackName| index.pack(*name).map_or(0, |info| info.pack_len);
            // Small ones first, so that more of them are complete if the connection fails.
            missing.sort_by_key(size);
            flow.progress.expect(missing.iter().map(size).sum());
            for name in missing {
                match self.send_pack(name, packs, flow) {
                    Ok(bytes) => {
                        uploaded.packs += 1;
                        uploaded.bytes += bytes;
                    }
                    // Removed after the indexes were read: its needed content is in another pack now.
                    Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound && round < ROUNDS => {
                        index = packs.index()?;
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Err(Error::NotWholeHere(image.id))
    }

    /// Looks up a pack that is needed, unless the listing shows it whole and without a mark. A mark is removed: the pack
    /// is needed from now on.
    fn correct(&self, there: &mut Inventory, index: &Index, name: PackName, cancelled: Cancelled<'_>) -> Result<()> {
        let is_marked = there.packs.get(&name).is_some_and(|pack| pack.gone.is_some());
        if is_marked {
            self.client.delete(&layout::of_pack(name, PackFile::Gone), cancelled)?;
        } else if is_whole(index, there, name) {
            return Ok(());
        }
        let find = |file| -> Result<Option<Found>> {
            Ok(self.client.head(&layout::of_pack(name, file), cancelled)?.map(Found::from))
        };
        let pack = find(PackFile::Pack)?;
        let index = if pack.is_some() { find(PackFile::Index)? } else { None };
        there.packs.insert(name, RemotePack { pack, index, gone: None });
        Ok(())
    }

    fn send_pack(&self, name: PackName, packs: &Packs, flow: &mut Flow<'_>) -> Result<u64> {
        let pack = packs.pack_path(name);
        let path = || pack.path().to_owned();
        let size = pack.metadata().map_err(|source| Error::Read { path: path(), source })?.len();
        let index = packs.pack_index(name).map_err(|problem| {
            let source = io::Error::new(io::ErrorKind::NotFound, format!("its records cannot be read: {problem:?}"));
            Error::Read { path: path(), source }
        })?;
        self.client.send(&layout::of_pack(name, PackFile::Pack), &pack, size, flow)?;
        self.client.put(&layout::of_pack(name, PackFile::Index), index.to_bytes(), flow.cancelled)?;
        Ok(size)
    }
}

/// What the replica's copy of an image is to be, as far as the copy here tells.
#[derive(Debug, PartialEq, Eq)]
enum There<'a> {
    /// It has this mark.
    Marked(&'a BadMark),
    /// It has none.
    Unmarked,
    /// It stays as it is.
    AsItIs,
}

/// Damage is in one copy: the other one may be intact.
fn there(state: &State) -> There<'_> {
    match state {
        State::Good(_) => There::Unmarked,
        State::Bad { mark, .. } if mark.why == BadWhy::Damaged => There::AsItIs,
        State::Bad { mark, .. } => There::Marked(mark),
        State::Damaged { .. } => There::AsItIs,
    }
}

/// The packs with all chunks of the map. If a chunk has several places, one in a pack is used that is already in the
/// replica, or needed for another chunk. `None` if a chunk is in no pack.
fn needed(map: &ChunkMap, index: &Index, there: &Inventory) -> Option<BTreeSet<PackName>> {
    let mut needed = BTreeSet::new();
    let has_choice = |id: &ChunkId| index.all(id).nth(1).is_some();
    // Chunks that are in only one pack come first.
    let ids = || map.chunks().map(|(id, _)| id);
    for id in ids().filter(|id| !has_choice(id)).chain(ids().filter(has_choice)) {
        let is_there = |name: PackName| needed.contains(&name) || is_whole(index, there, name);
        let place = index.all(&id).find(|place| is_there(place.pack)).or_else(|| index.get(&id))?;
        needed.insert(place.pack);
    }
    Some(needed)
}

/// Whether the pack in the replica is complete and has the same size as here.
fn is_whole(index: &Index, there: &Inventory, name: PackName) -> bool {
    let here = index.pack(name).map(|info| info.pack_len);
    match there.packs.get(&name) {
        Some(RemotePack { pack: Some(pack), index: Some(_), .. }) => here == Some(pack.size),
        _ => false,
    }
}

fn read(file: &Beneath, max: u64) -> Result<Vec<u8>> {
    file.content(max).map_err(|source| Error::Read { path: file.path().to_owned(), source })
}
