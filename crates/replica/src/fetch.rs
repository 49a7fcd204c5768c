//! Fetches an image, and only what is missing here.
//!
//! 1. the chunk map tells what the image needs, the indexes here what exists; marks on needed packs are removed
//! 2. the missing records are read from the replica's packs, in stretches; each is checked (header, name, length,
//!    decompressed or decrypted content) and put into a new pack here. A pack is closed about every 64 MiB, with its
//!    index: what was fetched so far survives a network failure or a power cut, and the next call does not fetch it
//!    again
//! 3. map and mark are written into a draft `images/.tmp-ID`, then the manifest, durably
//! 4. the draft gets its name; it takes the place of a damaged copy here
//!
//! A record that does not match its index is read once more, then other packs are tried; if that does not help, the
//! image is not fetched.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use crate::client::Cancelled;
use crate::error::{Error, Result};
use crate::layout::{self, Inventory, Of, PackFile};
use crate::read::{HEADER, Indexes, checked};
use crate::replica::{RemoteImage, Replica};
use crate::spans::{Span, spans};
use rekindle_os::beneath::Beneath;
use rekindle_os::direct::Way;
use rekindle_os::durable;
use rekindle_store::FileError;
use rekindle_store::chunk::codec::Compression;
use rekindle_store::chunk::{ChunkId, ChunkMap, Key, map};
use rekindle_store::gc;
use rekindle_store::options::Copies;
use rekindle_store::pack::record::HEADER_BYTES;
use rekindle_store::pack::{Entry, PackHeader, PackName, Packs, RecordHeader};
use rekindle_store::pack::{Making, PackWriter};
use rekindle_store::persist::Progress;
use rekindle_store::retention::survey;
use rekindle_store::{Image, ImageId, JobFolder, State, WriterLock, manifest, mark};

/// A new pack is closed at this size.
const CLOSE: u64 = 64 << 20;
/// Bytes of an extent in the map, plus those of its chunk in an index.
const ENTRIES: u64 = 40 + 56;
/// Maximum size of the manifest and the folders.
const SMALL: u64 = 1 << 20;

impl Replica {
    /// Fetches an image into the store. An encrypted image needs its key: without it, nothing can be checked or
    /// restored.
    ///
    /// # Errors
    /// [`Error::NotWhole`] and [`Error::Damaged`] if it cannot be used, [`Error::Key`], [`Error::NoRoom`],
    /// [`Error::Remote`], [`Error::Write`], [`Error::Store`], [`Error::Cancelled`]. What was fetched until then stays,
    /// and the next call continues there.
    pub fn fetch(
        &self,
        id: ImageId,
        folder: &JobFolder,
        lock: &WriterLock,
        key: Option<&Key>,
        progress: &Progress,
        cancelled: Cancelled<'_>,
    ) -> Result<Image> {
        folder.check_lock(lock)?;
        self.client.check_is_not(folder.path())?;
        let image = self.look(id, cancelled)?.ok_or_else(|| self.not_whole(id, "it does not exist"))?;
        let there = self.inventory(cancelled)?;
        let map = self.map_of(&image, folder, cancelled)?;
        let packs = folder.packs();
        let fetch = || {
            let _alone = lock.packs();
            let places = self.places(&image, &there, &packs, missing(&map, &packs)?, cancelled)?;
            self.check_room(id, places.bytes(), &map, folder)?;
            progress.expect(places.bytes());
            let key = self.key_for(&image, &places, key, cancelled)?;
            let making = Making { compression: Compression::None, key, pack: CLOSE, way: Way::Direct };
            let failed = |error: FileError| Error::Write { path: error.path, source: error.source };
            let mut writer = PackWriter::new(&packs, making).map_err(failed)?;
            for (pack, entries) in &places.first {
                for span in spans(entries) {
                    for (header, stored) in self.read_span(*pack, &span, &places.other, key, cancelled)? {
                        writer.append(&header, &stored).map_err(failed)?;
                        progress.add(HEADER + stored.len());
                    }
                }
            }
            writer.finish().map_err(failed)?;
            self.publish(&image, &map, folder, lock, cancelled)
        };
        match fetch() {
            // Another fetch or an interrupted persist may have left content that no image needs.
            Err(error @ Error::NoRoom { .. }) => match gc::sweep_for(folder, lock, Copies::Two, &map) {
                Ok(1..) => fetch(),
                _ => Err(error),
            },
            fetched => fetched,
        }
    }

    /// The place of each missing chunk in the replica.
    fn places(
        &self,
        image: &RemoteImage,
        there: &Inventory,
        here: &Packs,
        mut missing: HashSet<ChunkId>,
        cancelled: Cancelled<'_>,
    ) -> Result<Places> {
        let all = missing.clone();
        let mut places = Places::default();
        // In this order, because the indexes of old packs may not be needed.
        let packs = self.whole_packs(there, cancelled)?;
        // Indexes that exist here first, because they need not be fetched. Damaged records are not in them.
        for (indexes, (name, found)) in
            [Indexes::Here, Indexes::There].into_iter().flat_map(|it| packs.iter().map(move |pack| (it, *pack)))
        {
            if missing.is_empty() {
                break;
            }
            let index = match self.index_by(indexes, name, found, here, cancelled) {
                Ok(index) => index,
                // Another pack may have the same chunks.
                Err(Error::Damaged { .. }) => continue,
                Err(error) => return Err(error),
            };
            for entry in index.entries().iter().filter(|entry| all.contains(&entry.id)) {
                match missing.remove(&entry.id) {
                    true => places.first.entry(name).or_default().push(*entry),
                    false => places.other.entry(entry.id).or_default().push((name, *entry)),
                }
            }
        }
        match missing.len() {
            0 => Ok(places),
            n => Err(self.not_whole(image.id, format!("{n} of its chunks are in none of its packs"))),
        }
    }

    /// Checks that the disk has room for this many bytes of records, their indexes and the image's own files.
    fn check_room(&self, image: ImageId, records: u64, map: &ChunkMap, folder: &JobFolder) -> Result<()> {
        let need = records.saturating_add(map.extents().saturating_mul(ENTRIES)).saturating_add(SMALL);
        let (free, keep) = (survey::free_space(folder.dir())?, self.min_free);
        match need.saturating_add(keep) <= free {
            true => Ok(()),
            false => Err(Error::NoRoom { image, need, free, keep, path: folder.path().to_owned() }),
        }
    }

    /// The key of the records, checked before they are fetched; `None` if the image is from before there was a key. All
    /// chunks of an image have the same key, because their names depend on it.
    fn key_for<'k>(
        &self,
        image: &RemoteImage,
        places: &Places,
        key: Option<&'k Key>,
        cancelled: Cancelled<'_>,
    ) -> Result<Option<&'k Key>> {
        let (mut found, mut damaged) = (None, None);
        for (name, entries) in &places.first {
            let object = layout::of_pack(*name, PackFile::Pack);
            let bytes = match self.client.get_range(&object, 0..HEADER_BYTES, cancelled) {
                Err(Error::Damaged { .. }) => Vec::new(),
                bytes => bytes?,
            };
            // The records may be intact: each of them is checked.
            let Ok(header) = PackHeader::parse(&bytes) else {
                damaged = damaged.or_else(|| entries.first().map(|entry| (object, entry)));
                continue;
            };
            let wrong = |why: String| Error::Key { url: self.client.shown(), image: image.id, why };
            found = Some(header.key_for(key).map_err(|error| wrong(error.to_string()))?);
        }
        if let (None, Some(_), Some((object, entry))) = (found, key, damaged)
            && PackHeader::of(None).key_for(key).is_ok()
        {
            // Plain records would be accepted. One of them tells whether they are.
            let bytes = self.client.get_range(&object, entry.offset..entry.end(), cancelled)?;
            return Ok(key.filter(|_| checked(&bytes, entry, None).is_err()));
        }
        Ok(found.unwrap_or(key))
    }

    /// Reads the records of a stretch, and checks each.
    fn read_span(
        &self,
        pack: PackName,
        span: &Span,
        other: &HashMap<ChunkId, Vec<(PackName, Entry)>>,
        key: Option<&Key>,
        cancelled: Cancelled<'_>,
    ) -> Result<Vec<(RecordHeader, Vec<u8>)>> {
        let bytes = self.client.get_range(&layout::of_pack(pack, PackFile::Pack), span.range(), cancelled)?;
        let mut records = Vec::with_capacity(span.entries.len());
        for entry in &span.entries {
            let of = span.record(entry).and_then(|range| bytes.get(range)).unwrap_or_default();
            records.push(match checked(of, entry, key) {
                Ok(record) => record,
                Err(_) => self.read_again(pack, entry, other.get(&entry.id), key, cancelled)?,
            });
        }
        Ok(records)
    }

    /// Reads one record again that was wrong.
    fn read_again(
        &self,
        pack: PackName,
        entry: &Entry,
        other: Option<&Vec<(PackName, Entry)>>,
        key: Option<&Key>,
        cancelled: Cancelled<'_>,
    ) -> Result<(RecordHeader, Vec<u8>)> {
        let mut why = String::new();
        for (pack, entry) in std::iter::once(&(pack, *entry)).chain(other.into_iter().flatten()) {
            let object = layout::of_pack(*pack, PackFile::Pack);
            let bytes = self.client.get_range(&object, entry.offset..entry.end(), cancelled)?;
            match checked(&bytes, entry, key) {
                Ok(record) => return Ok(record),
                Err(error) => why = error,
            }
        }
        let what = format!("chunk {:?} in {}", entry.id, layout::of_pack(pack, PackFile::Pack));
        Err(Error::Damaged { url: self.client.shown(), what, why })
    }

    /// Steps 3 and 4.
    fn publish(
        &self,
        image: &RemoteImage,
        map: &ChunkMap,
        folder: &JobFolder,
        lock: &WriterLock,
        cancelled: Cancelled<'_>,
    ) -> Result<Image> {
        // The original text: a newer rekindle may have written fields that are unknown here.
        let name = layout::of_image(image.id, Of::Manifest);
        let text = self.client.get(&name, manifest::MAX_BYTES, cancelled)?;
        let text = text.ok_or_else(|| self.not_whole(image.id, "it was removed in the meantime"))?;
        if manifest::Manifest::parse(&text, &self.trust).ok().as_ref() != image.manifest() {
            return Err(self.not_whole(image.id, "its manifest changed in the meantime"));
        }
        let draft = folder.begin_image_as(lock, image.id)?;
        let write = |name: &str, bytes: &[u8]| {
            let file = draft.dir().join(name);
            let failed = |source| Error::Write { path: file.path().to_owned(), source };
            durable::write_file(&file, bytes, 0o600).map_err(failed)
        };
        write(map::FILE_NAME, &map.to_bytes())?;
        if let State::Bad { mark: bad, .. } = &image.state {
            let path = draft.dir().join(mark::FILE_NAME).path().to_owned();
            let bytes = serde_json::to_vec_pretty(bad).map_err(io::Error::from);
            write(mark::FILE_NAME, &bytes.map_err(|source| Error::Write { path, source })?)?;
        }
        write(manifest::FILE_NAME, &text)?;
        folder.check_lock(lock)?;
        draft.publish_copy().map_err(|FileError { path, source, .. }| Error::Write { path, source })
    }
}

/// The places of the missing chunks.
#[derive(Default)]
struct Places {
    /// Each chunk once.
    first: BTreeMap<PackName, Vec<Entry>>,
    /// Further places.
    other: HashMap<ChunkId, Vec<(PackName, Entry)>>,
}

impl Places {
    /// Bytes of the records to be fetched.
    fn bytes(&self) -> u64 {
        self.first.values().flatten().map(|entry| u64::from(entry.stored_len) + HEADER_BYTES).sum()
    }
}

/// The chunks that are missing here. The packs of the other chunks are needed from now on: their marks are removed
/// first, durably.
fn missing(map: &ChunkMap, packs: &Packs) -> Result<HashSet<ChunkId>> {
    let index = packs.index()?;
    let (mut missing, mut marked) = (HashSet::new(), HashSet::new());
    for (id, _) in map.chunks() {
        match index.get(&id) {
            None => drop(missing.insert(id)),
            Some(place) if index.is_gone(place.pack) => drop(marked.insert(place.pack)),
            Some(_) => {}
        }
    }
    for name in &marked {
        remove_mark(&packs.gone_path(*name))?;
    }
    if !marked.is_empty() {
        let dir = packs.dir();
        durable::sync_dir(dir).map_err(|source| Error::Write { path: dir.path().to_owned(), source })?;
    }
    Ok(missing)
}

fn remove_mark(mark: &Beneath) -> Result<()> {
    match mark.remove_file() {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(Error::Write { path: mark.path().to_owned(), source })
        }
        _ => Ok(()),
    }
}
