//! From the packs to plain files: what a restart, or who looks into an image, needs.
//!
//! Every chunk is checked against its name, and the chunk map against the manifest, so that what was written is what was
//! published. Zeros are left out: they are holes. Nothing is synced: the files are for now.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::chunk::{ChunkId, ChunkMap, Extent, Key};
use super::folder::JobFolder;
use super::format::{FormatError, ReadError, What, size_of};
use super::id::ImageId;
use super::image::Image;
use super::manifest::Manifest;
use super::pack::Index;
use super::pack::reader::{ReadChunkError, Reading, Visit, Want};
use super::persist::Progress;
use crate::sys::direct::Way;
use crate::sys::pages::Writer;

/// Threads for a restart, when the job needs no processor: more than there are, because each waits for the disk as well.
#[must_use]
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(4, |cores| (2 * cores.get()).clamp(4, 16))
}

/// Why an image can not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its parts are plain files, or its manifest can not be used.
    #[error("image {0} is not packed")]
    NotPacked(ImageId),
    /// The chunk map can not be used.
    #[error("image {id} can not be unpacked: its chunk map can not be used")]
    Map {
        /// Which.
        id: ImageId,
        /// Why.
        source: ReadError,
    },
    /// The packs can not be listed.
    #[error(transparent)]
    Store(#[from] super::Error),
    /// A chunk can not be had.
    #[error("image {id} can not be unpacked: byte {offset} of \"{part}\" can not be had")]
    Chunk {
        /// Which image.
        id: ImageId,
        /// Which part.
        part: String,
        /// Where in the part.
        offset: u64,
        /// The pack, the place and what differs.
        source: Box<ReadChunkError>,
    },
    /// A file can not be written.
    #[error("can not write {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It was not wanted any more.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Whether it is the image that is damaged, for good: not a wrong key, a full disk or a call-off.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Error::Map { source: ReadError::Format { source, .. }, .. } => !source.is_not_for_us(),
            Error::Map { source: ReadError::Read { source, .. }, .. } => source.kind() == io::ErrorKind::NotFound,
            Error::Chunk { source, .. } => source.is_damage(),
            _ => false,
        }
    }

    /// Whether nothing is wrong with the image, and we can not read it: it is encrypted with another key, or newer than us.
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
            // Those of a chunk come with their part.
            _ => Error::Cancelled,
        }
    }
}

/// Where a chunk belongs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) part: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// Writes every part of a packed image as a plain file below `into`, which exists and has none of them.
///
/// # Errors
/// Damage names the part and the pack. What was written by then stays, for the caller to remove.
pub fn unpack(
    image: &Image,
    folder: &JobFolder,
    into: &Path,
    key: Option<&Key>,
    threads: usize,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<(), Error> {
    let wrong = |source| Error::Map { id: image.id, source };
    let map = image.chunk_map().map_err(wrong)?.ok_or(Error::NotPacked(image.id))?;
    let manifest = image.manifest().ok_or(Error::NotPacked(image.id))?;
    let packs = folder.packs();
    let index = packs.index()?;
    progress.begin(manifest.bytes);
    make_files(manifest, into)?;
    let mut wants = Vec::with_capacity(map.parts.iter().map(Vec::len).sum());
    let chunk = |place: Place, source| chunk_error(image.id, manifest, place, source);
    plan(&map, &index, |want| match want {
        Planned::Want(want) => {
            wants.push(want);
            Ok(())
        }
        Planned::Zeros(len) => {
            progress.add(len);
            Ok(())
        }
        Planned::Missing(id, place) => Err(chunk(place, ReadChunkError::Missing(id))),
    })?;
    drop(map);
    let reading = Reading { packs: &packs, key, threads, way: Way::Direct, cancelled };
    reading.read(&index, wants, &Writing { id: image.id, manifest, into, progress })
}

/// What an extent of a map means.
pub(super) enum Planned {
    Want(Want<Place>),
    /// So many bytes.
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

/// The files in their sizes, and the folders that they lie in.
fn make_files(manifest: &Manifest, into: &Path) -> Result<(), Error> {
    for part in &manifest.parts {
        let path = into.join(&part.path);
        let make = || {
            if let Some(folder) = path.parent() {
                DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            }
            File::options().write(true).create_new(true).mode(0o600).open(&path)?.set_len(part.size)
        };
        make().map_err(|source| Error::Write { path: path.clone(), source })?;
    }
    Ok(())
}

struct Writing<'a> {
    id: ImageId,
    manifest: &'a Manifest,
    into: &'a Path,
    progress: &'a Progress,
}

impl Visit<Place> for Writing<'_> {
    /// The file that was written last: what lies together in a pack mostly belongs to one part.
    type Own = Option<(u32, Writer)>;
    type Error = Error;

    fn chunk(
        &self,
        own: &mut Option<(u32, Writer)>,
        wants: &[Want<Place>],
        raw: Result<&[u8], ReadChunkError>,
    ) -> Result<(), Error> {
        let Some(first) = wants.first() else { return Ok(()) };
        let raw = raw.map_err(|source| chunk_error(self.id, self.manifest, first.target, source))?;
        for Want { id, target, .. } in wants {
            let path = || self.into.join(part_of(self.manifest, *target));
            if u64::from(target.len) != size_of(raw.len()) {
                let source = FormatError::Field { what: What::Map, field: "length of an extent" };
                let source = ReadError::Format { path: PathBuf::from(format!("chunk {id}")), source };
                return Err(Error::Map { id: self.id, source });
            }
            let file = match own.take().filter(|(part, _)| *part == target.part) {
                Some((_, file)) => Ok(file),
                None => Writer::open(&path()),
            };
            let written = file.and_then(|file| {
                let (_, file) = own.insert((target.part, file));
                file.write_at(raw, target.offset)
            });
            written.map_err(|source| Error::Write { path: path(), source })?;
            self.progress.add(raw.len());
        }
        Ok(())
    }
}
