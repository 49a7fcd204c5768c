//! Unpacks packed images to plain files, for a restart or for whoever inspects an image.
//!
//! Every chunk is checked against its name, and the chunk map against the manifest, so the files are exactly what was
//! published. Zeros are left out: they are holes. Nothing is synced, because the files are temporary.
//!
//! A chunk that is damaged or unreadable is taken from another pack that has it. If no pack here has it intact, it is
//! fetched from the replica ([`super::heal`]), if the caller allows that, and then read normally.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::chunk::{ChunkId, ChunkMap, Extent, Key};
use super::file_error::is_failing;
use super::folder::JobFolder;
use super::format::{FormatError, ReadError, What, size_of};
use super::heal::{self, Healed, Healing};
use super::id::ImageId;
use super::image::Image;
use super::manifest::Manifest;
use super::pack::Index;
use super::pack::reader::{ReadChunkError, Reading, Visit, Want};
use super::persist::Progress;
use rekindle_base::chain;
use rekindle_os::beneath::Beneath;
use rekindle_os::direct::Way;
use rekindle_os::pages::Writer;

/// Number of threads for a restart, when the job needs no processor: more than processors, because each thread also
/// waits for the disk.
#[must_use]
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(4, |cores| (2 * cores.get()).clamp(4, 16))
}

/// Why an image cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its parts are plain files, or its manifest cannot be used.
    #[error("image {0} is not packed")]
    NotPacked(ImageId),
    /// The chunk map cannot be used.
    #[error("image {id} cannot be unpacked: its chunk map cannot be used")]
    Map {
        /// The image.
        id: ImageId,
        /// The cause.
        source: ReadError,
    },
    /// The packs cannot be listed.
    #[error(transparent)]
    Store(#[from] super::Error),
    /// A chunk cannot be read.
    #[error("image {id} cannot be unpacked: byte {offset} of \"{part}\" cannot be read")]
    Chunk {
        /// The image.
        id: ImageId,
        /// The part.
        part: String,
        /// The offset in the part.
        offset: u64,
        /// The pack, the place and the problem.
        source: Box<ReadChunkError>,
    },
    /// A chunk has no intact copy here, and may be in the replica, or could not be stored again.
    #[error("image {id} cannot be unpacked now: some of its content is damaged and was not replaced: {why}")]
    NotHealed {
        /// The image.
        id: ImageId,
        /// Why it was not replaced.
        why: String,
        /// The problem of the first chunk.
        source: Box<Error>,
    },
    /// A file cannot be written.
    #[error("cannot write {}{}", path.display(), super::file_error::Failing(source))]
    Write {
        /// The path.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Whether the image is damaged permanently: not a wrong key, a full disk or a cancellation.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Error::Map { source: ReadError::Format { source, .. }, .. } => !source.is_not_for_us(),
            Error::Map { source: ReadError::Read { source, .. }, .. } => source.kind() == io::ErrorKind::NotFound,
            Error::Chunk { source, .. } => source.is_damage(),
            _ => false,
        }
    }

    /// Whether the disk has failed: the image may be intact, and must not be marked for it.
    #[must_use]
    pub(crate) fn is_failing_disk(&self) -> bool {
        match self {
            Error::Map { source: ReadError::Read { source, .. }, .. } => is_failing(source),
            Error::Chunk { source, .. } => source.is_failing_disk(),
            _ => false,
        }
    }

    /// Whether the content may be readable another time: the disk or the replica does not deliver it now.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Error::NotHealed { .. }) || self.is_failing_disk()
    }

    /// Whether the image is intact, but cannot be read here: it is encrypted with another key, or newer than this
    /// version.
    #[must_use]
    pub fn is_not_for_us(&self) -> bool {
        match self {
            Error::Map { source: ReadError::Format { source, .. }, .. } => source.is_not_for_us(),
            Error::Chunk { source, .. } => {
                matches!(&**source, ReadChunkError::Format { source, .. } if source.is_not_for_us())
            }
            _ => false,
        }
    }
}

impl From<ReadChunkError> for Error {
    fn from(error: ReadChunkError) -> Error {
        match error {
            ReadChunkError::Store(error) => Error::Store(error),
            // Errors of a chunk are reported with their part.
            _ => Error::Cancelled,
        }
    }
}

/// The place of a chunk in the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) part: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// How an image is unpacked.
#[derive(Clone, Copy)]
pub struct Unpacking<'a> {
    /// The key of the packs.
    pub key: Option<&'a Key>,
    /// Threads that read.
    pub threads: usize,
    /// Reports the progress.
    pub progress: &'a Progress,
    /// Tells whether it is cancelled.
    pub cancelled: &'a (dyn Fn() -> bool + Sync),
    /// What is needed to heal damaged chunks; without it they are an error.
    pub healing: Option<&'a Healing<'a>>,
}

impl std::fmt::Debug for Unpacking<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacking").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// Writes every part of a packed image as a plain file below `into`, which must exist and contain none of them. Nothing
/// is healed.
///
/// # Errors
/// Errors name the part and the pack. Files written until then stay, and must be removed by the caller.
pub fn unpack(
    image: &Image,
    folder: &JobFolder,
    into: &Beneath,
    key: Option<&Key>,
    threads: usize,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<(), Error> {
    Unpacking { key, threads, progress, cancelled, healing: None }.unpack(image, folder, into).map(drop)
}

impl Unpacking<'_> {
    /// As [`unpack`]. Returns what was healed, if anything.
    ///
    /// # Errors
    /// As [`unpack`]; if healing failed, the problem of the first chunk.
    pub fn unpack(&self, image: &Image, folder: &JobFolder, into: &Beneath) -> Result<Option<Healed>, Error> {
        let wrong = |source| Error::Map { id: image.id, source };
        let map = image.chunk_map().map_err(wrong)?.ok_or(Error::NotPacked(image.id))?;
        let manifest = image.manifest().ok_or(Error::NotPacked(image.id))?;
        let packs = folder.packs();
        let index = packs.index()?;
        self.progress.begin(manifest.bytes);
        make_files(manifest, into)?;
        let mut wants = Vec::with_capacity(map.parts.iter().map(Vec::len).sum());
        let writing = Writing { id: image.id, manifest, into, progress: self.progress, harmed: self.harmed() };
        plan(&map, &index, |want| match want {
            Planned::Want(want) => {
                wants.push(want);
                Ok(())
            }
            Planned::Zeros(len) => {
                self.progress.add(len);
                Ok(())
            }
            Planned::Missing(id, place) => writing.not_had(&[(id, place)], ReadChunkError::missing(id, &index)),
        })?;
        drop(map);
        let Unpacking { key, threads, cancelled, .. } = *self;
        let reading = Reading { packs: &packs, key, threads, way: Way::Direct, cancelled };
        reading.read(&index, wants, &writing)?;
        drop(index);
        let (Some(harmed), Some(healing)) = (writing.harmed, self.healing) else { return Ok(None) };
        let Harmed { mut ids, places, first } = harmed.into_inner().unwrap_or_else(PoisonError::into_inner);
        ids.extend(places.iter().map(|(id, _)| *id));
        if ids.is_empty() {
            return Ok(None);
        }
        let healed = match healing.heal(&ids, cancelled) {
            Ok(healed) => healed,
            Err(heal::Error::Cancelled) => return Err(Error::Cancelled),
            Err(error) => {
                let why = chain(&error);
                let Some(first) = first else {
                    // Everything requested exists already.
                    tracing::warn!("cannot replace damaged content of the store: {why}");
                    return Ok(None);
                };
                return Err(Error::NotHealed { id: image.id, why, source: first.into() });
            }
        };
        if places.iter().any(|(id, _)| healed.lost.contains(id)) {
            let Some(first) = first else { return Ok(Some(healed)) };
            return Err(match healed.replica_failure {
                Some(why) => Error::NotHealed { id: image.id, why, source: first.into() },
                None => first,
            });
        }
        // Fetched content is in new packs.
        let index = packs.index()?;
        let writing = Writing { harmed: None, id: image.id, manifest, into, progress: self.progress };
        let mut wants = Vec::with_capacity(places.len());
        for (id, target) in places {
            match index.get(&id) {
                Some(location) => wants.push(Want { id, location, target }),
                None => writing.not_had(&[(id, target)], ReadChunkError::missing(id, &index))?,
            }
        }
        reading.read(&index, wants, &writing)?;
        Ok(Some(healed))
    }

    fn harmed(&self) -> Option<Mutex<Harmed>> {
        self.healing.map(|_| Mutex::default())
    }
}

/// Chunks that could not be read from their first place.
#[derive(Default)]
struct Harmed {
    /// Chunks that were read from another pack.
    ids: BTreeSet<ChunkId>,
    /// Places of chunks that no pack had.
    places: Vec<(ChunkId, Place)>,
    /// The problem of the first of those.
    first: Option<Error>,
}

/// The content of an extent of a map.
pub(super) enum Planned {
    Want(Want<Place>),
    /// This many zeros.
    Zeros(usize),
    Missing(ChunkId, Place),
}

/// Looks up all chunks of a map.
pub(super) fn plan<E>(map: &ChunkMap, index: &Index, mut each: impl FnMut(Planned) -> Result<(), E>) -> Result<(), E> {
    for (part, extents) in map.parts.iter().enumerate() {
        let mut offset = 0;
        for extent in extents {
            each(match *extent {
                Extent::Zero { len } => Planned::Zeros(usize::try_from(len).unwrap_or(usize::MAX)),
                Extent::Chunk { id, len } => {
                    let target = Place { part: u32::try_from(part).unwrap_or(u32::MAX), offset, len };
                    match index.get(&id) {
                        Some(location) => Planned::Want(Want { id, location, target }),
                        None => Planned::Missing(id, target),
                    }
                }
            })?;
            offset += extent.len();
        }
    }
    Ok(())
}

fn part_of(manifest: &Manifest, place: Place) -> &str {
    let part = usize::try_from(place.part).ok().and_then(|part| manifest.parts.get(part));
    part.map_or("", |part| part.path.as_str())
}

fn chunk_error(id: ImageId, manifest: &Manifest, place: Place, source: ReadChunkError) -> Error {
    match source {
        ReadChunkError::Cancelled => Error::Cancelled,
        source => {
            Error::Chunk { id, part: part_of(manifest, place).to_owned(), offset: place.offset, source: source.into() }
        }
    }
}

/// Creates the files with their sizes, and their folders.
fn make_files(manifest: &Manifest, into: &Beneath) -> Result<(), Error> {
    for part in &manifest.parts {
        let file = into.join(&part.path);
        let make = || {
            if let Some(folder) = file.parent() {
                folder.make_dirs(0o700)?;
            }
            file.create_new(0o600)?.set_len(part.size)
        };
        make().map_err(|source| Error::Write { path: file.path().to_owned(), source })?;
    }
    Ok(())
}

struct Writing<'a> {
    id: ImageId,
    manifest: &'a Manifest,
    into: &'a Beneath,
    progress: &'a Progress,
    /// Chunks to be replaced; `None` if an unreadable chunk ends the work.
    harmed: Option<Mutex<Harmed>>,
}

impl Writing<'_> {
    /// Handles a chunk without an intact copy: an error, or a chunk to be replaced.
    fn not_had(&self, places: &[(ChunkId, Place)], source: ReadChunkError) -> Result<(), Error> {
        let Some((_, place)) = places.first() else { return Ok(()) };
        let may_be_healed = source.may_be_healed();
        let error = chunk_error(self.id, self.manifest, *place, source);
        match self.harmed.as_ref().filter(|_| may_be_healed) {
            None => Err(error),
            Some(harmed) => {
                let mut harmed = harmed.lock().unwrap_or_else(PoisonError::into_inner);
                harmed.places.extend_from_slice(places);
                harmed.first.get_or_insert(error);
                Ok(())
            }
        }
    }
}

impl Visit<Place> for Writing<'_> {
    /// The file that was written last: neighbours in a pack mostly belong to the same part.
    type Own = Option<(u32, Writer)>;
    type Error = Error;

    fn chunk(
        &self,
        own: &mut Option<(u32, Writer)>,
        wants: &[Want<Place>],
        raw: Result<&[u8], ReadChunkError>,
    ) -> Result<(), Error> {
        let raw = match raw {
            Ok(raw) => raw,
            Err(source) => {
                let places: Vec<(ChunkId, Place)> = wants.iter().map(|want| (want.id, want.target)).collect();
                return self.not_had(&places, source);
            }
        };
        for Want { id, target, .. } in wants {
            let path = || self.into.join(part_of(self.manifest, *target));
            if u64::from(target.len) != size_of(raw.len()) {
                let source = FormatError::Field { what: What::Map, field: "length of an extent" };
                let source = ReadError::Format { path: PathBuf::from(format!("chunk {id}")), source };
                return Err(Error::Map { id: self.id, source });
            }
            let file = match own.take().filter(|(part, _)| *part == target.part) {
                Some((_, file)) => Ok(file),
                None => path().change().and_then(Writer::of),
            };
            let written = file.and_then(|file| {
                let (_, file) = own.insert((target.part, file));
                file.write_at(raw, target.offset)
            });
            written.map_err(|source| Error::Write { path: path().path().to_owned(), source })?;
            self.progress.add(raw.len());
        }
        Ok(())
    }

    fn elsewhere(&self, want: &Want<Place>, _: ReadChunkError) {
        if let Some(harmed) = &self.harmed {
            harmed.lock().unwrap_or_else(PoisonError::into_inner).ids.insert(want.id);
        }
    }
}
