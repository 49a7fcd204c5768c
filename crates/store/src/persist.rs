//! From memory to the packs of the store, while the job runs.
//!
//! The parts of an image are cut into chunks. Chunks that are in no pack yet are added to new packs, within limits that
//! leave disk and processors to the job. The steps, in this order:
//!
//! 1. to 4. new packs are written, synced, named and indexed (`pack/disk.rs`), several at a time; if content of a pack
//!    that is marked for removal is needed again, the mark is removed durably before that content is used;
//! 5. the chunk map is written into `images/.tmp-ID` and synced;
//! 6. the manifest is written there durably;
//! 7. the draft gets its final name, or exchanges names with the loose image that it replaces;
//! 8. `images/` is synced; the loose image, which is the `.tmp-ID` now, is removed.
//!
//! Step 8 removes the files of a loose image: the caller must make sure that nobody restores from it meanwhile.
//!
//! The image in memory is only read. After a power cut before step 7 there are a draft, which the next start removes,
//! and packs that no image needs, which the next try uses or garbage collection removes. If only this process ends, the
//! next supervisor starts again from the staged image.

mod known;
mod pace;
mod reserve;
mod room;
mod stretches;
mod worker;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytesize::ByteSize;

use self::known::Known;
use self::pace::Pace;
use self::reserve::Reserve;
use self::stretches::Stretches;
use self::worker::{Packed, Work};
use super::FileError;
use super::chunk::map::{self, ChunkMap};
use super::chunk::{Compression, Key};
use super::draft::PublishError;
use super::folder::JobFolder;
use super::gc::Needed;
use super::image::{Form, Image, Place};
use super::lock::WriterLock;
use super::manifest::Chunks;
use super::options::Copies;
use super::pack::{Making, Unread, strike};
use rekindle_os::parallel;

pub use self::pace::Progress;
pub use self::room::{Unstored, store};

/// Limits of the work beside the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum bytes per second written to the disk.
    pub rate: Option<u64>,
    /// Threads that read, hash and compress. Each has a second thread that writes.
    pub threads: usize,
}

/// How many threads pack beside a job on this machine, and look for damage in packs.
#[must_use]
pub fn threads() -> usize {
    threads_among(parallel::cores())
}

/// How many threads that is for this number of processors. The job needs most processors, so it is one
/// thread for four of them. At least two: one hashes while the other waits for the disk. At most eight: one thread
/// hashes some 2.5 GB/s, and no disk is faster than eight.
fn threads_among(processors: usize) -> usize {
    (processors / 4).clamp(2, 8).min(processors)
}

/// How an image is packed.
#[derive(Debug, Clone)]
pub struct Packing {
    /// How chunks are compressed.
    pub compression: Compression,
    /// The key to encrypt with.
    pub key: Option<Arc<Key>>,
    /// Limits of the work.
    pub bounds: Bounds,
    /// In how many packs chunks are kept that several images use.
    pub copies: Copies,
    /// Places that the disk cannot read: their content is written again.
    pub unread: Unread,
}

/// Why an image could not be packed. It is still in its old place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its manifest does not exist any more.
    #[error("image {0} no longer exists, or another one took its place")]
    Gone(super::ImageId),
    /// A part could not be read.
    #[error("cannot read {} to store it", path.display())]
    Copy {
        /// The part.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A loose image differs from what was published: packed, the damage would be hidden.
    #[error("image {id} is damaged and stays as it is: {what}")]
    Damaged {
        /// The image.
        id: super::ImageId,
        /// The damage.
        what: String,
    },
    /// A loose image cannot be read from the disk.
    #[error("image {id} cannot be read and stays as it is: {what}")]
    Unread {
        /// The image.
        id: super::ImageId,
        /// The unreadable parts.
        what: String,
    },
    /// A pack could not be written.
    #[error(transparent)]
    Pack(#[from] FileError),
    /// The store could not be read, or a mark could not be removed.
    #[error(transparent)]
    Store(#[from] super::Error),
    /// The image could not be published.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// It would take space that must stay free.
    #[error("{free} is free, and {keep} must stay free: free space on the store's disk, or lower store.min-free", free = ByteSize::b(*free), keep = ByteSize::b(*min_free))]
    MinFree {
        /// Bytes free.
        free: u64,
        /// Bytes that must stay free.
        min_free: u64,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Whether the cause is a lack of space.
    #[must_use]
    pub(crate) fn is_full(&self) -> bool {
        matches!(self.kind(), Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }

    /// The kernel's answer to an access to the store.
    fn kind(&self) -> Option<io::ErrorKind> {
        match self {
            Error::Pack(FileError { source, .. })
            | Error::Copy { source, .. }
            | Error::Store(super::Error::Create { source, .. } | super::Error::Write { source, .. })
            | Error::Publish(PublishError::Write { source, .. } | PublishError::Publish { source, .. }) => {
                Some(source.kind())
            }
            Error::MinFree { .. } => Some(io::ErrorKind::StorageFull),
            _ => None,
        }
    }
}

/// Less than this is not worth a separate thread and pack.
const WORTH_A_THREAD: u64 = 64 << 20;

/// Each has some 15 MiB of buffers, and no disk is faster than this many threads hash.
const MAX_WORKERS: usize = 16;

/// Packs a staged or loose image. A packed image is returned unchanged.
///
/// # Errors
/// When a part cannot be read, a pack not be written, or the image not be published. Then there is no draft, and
/// everything else is unchanged; packs that were closed stay, and are used by the next try.
pub fn persist(
    image: &Image,
    folder: &JobFolder,
    lock: &WriterLock,
    packing: &Packing,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Image, Error> {
    persist_within(image, folder, lock, packing, Reserve::none(), progress, cancelled)
}

/// The same, and leaves the reserve free.
fn persist_within(
    image: &Image,
    folder: &JobFolder,
    lock: &WriterLock,
    packing: &Packing,
    reserve: Reserve,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Image, Error> {
    let mut manifest = image.manifest().ok_or(Error::Gone(image.id))?.clone();
    if image.form() == Form::Packed {
        return Ok(image.clone());
    }
    folder.check_lock(lock)?;
    let _alone = lock.packs();
    check_loose(image)?;
    progress.begin(manifest.bytes);
    let draft = folder.begin_image_as(lock, image.id)?;
    let packs = folder.packs();
    let index = packs.index()?;
    // The chunk maps tell which chunks in packs belong to an image. If a map cannot be read, no second copies are made
    // this time.
    let shared = match packing.copies {
        Copies::One => None,
        Copies::Two => Needed::of(folder).ok(),
    };
    let pace = Pace { began: Instant::now(), rate: packing.bounds.rate, progress, cancelled };
    let work = Work {
        image,
        manifest: &manifest,
        packs: &packs,
        making: Making::new(packing.compression, packing.key.as_deref()),
        known: Known::new(&packs, &index, shared.as_ref(), &packing.unread),
        stretches: Mutex::new(Some(Stretches::new(&image.dir, &manifest.parts))),
        pace,
        reserve,
        lock,
    };
    let worth = usize::try_from(manifest.bytes.div_ceil(WORTH_A_THREAD)).unwrap_or(usize::MAX);
    let workers = packing.bounds.threads.min(worth).clamp(1, MAX_WORKERS);
    let packed = parallel::in_parallel(vec![(); workers], workers, |()| work.run())?;
    let again = work.known.written_again();
    let skipped = work.reserve.skipped();
    if skipped > 0 {
        tracing::warn!(
            "{} of image {} has one copy only: there is no room for second copies beside store.min-free \
            (store.copies = 2). Make room on the disk; the next image tries again",
            bytesize::ByteSize::b(skipped),
            image.id
        );
    }
    drop(work);
    drop(index);
    drop(shared);
    // From here on the new place counts, and not the unreadable one.
    strike::strike(&packs, lock, &again)?;
    packing.unread.forget(&again);
    // If the slot was reused in the meantime, the parts would be of two images.
    if image.look_again().manifest() != Some(&manifest) {
        return Err(Error::Gone(image.id));
    }
    let map = in_order(packed.into_iter().flatten().collect(), manifest.parts.len());
    let extents = map.extents();
    let bytes = map.to_bytes();
    drop(map);
    manifest.chunks = Some(Chunks { blake3: blake3::hash(&bytes), extents, stored: progress.written() });
    manifest.parts.iter_mut().for_each(|part| part.blake3 = None);
    if cancelled() {
        return Err(Error::Cancelled);
    }
    folder.check_lock(lock)?;
    Ok(draft.publish_packed(manifest, &bytes, image)?)
}

/// Checks the hashes of an image on a disk.
fn check_loose(image: &Image) -> Result<(), Error> {
    if image.place == Place::Staged {
        return Ok(());
    }
    let report = image.verify();
    if report.is_sound() {
        return Ok(());
    }
    let damage = report.manifest.iter().map(ToString::to_string);
    let what = damage.chain(report.problems().take(5).map(ToString::to_string)).collect::<Vec<_>>().join(", ");
    match report.is_damage() {
        true => Err(Error::Damaged { id: image.id, what }),
        false => Err(Error::Unread { id: image.id, what }),
    }
}

/// Joins the extents of the stretches to those of the parts.
fn in_order(mut packed: Vec<Packed>, parts: usize) -> ChunkMap {
    packed.sort_unstable_by_key(|stretch| stretch.number);
    // Allocated exactly: an image of a terabyte has four million.
    let mut counts = vec![0; parts];
    for stretch in &packed {
        if let Some(count) = counts.get_mut(stretch.part) {
            *count += stretch.extents.len();
        }
    }
    let mut map = ChunkMap { parts: counts.into_iter().map(Vec::with_capacity).collect() };
    for stretch in packed {
        let Some(part) = map.parts.get_mut(stretch.part) else { continue };
        stretch.extents.into_iter().for_each(|extent| map::push(part, extent));
    }
    map
}

#[cfg(test)]
pub(crate) mod tests;
