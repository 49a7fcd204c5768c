//! From memory to the packs of the store, while the job runs.
//!
//! The parts of an image are cut into chunks; those that are in no pack yet are added to new ones, within bounds that keep
//! the job's disk and processors free. The steps; each begins when the one before is done:
//!
//! 1. to 4. new packs are written, synced, named and indexed (`pack/disk.rs`), several at a time; a mark on a pack that
//!    is on its way out, and of which something is needed again, is taken back durably before that counts;
//! 5. the chunk map is written into `images/.tmp-ID` and synced;
//! 6. the manifest is written there durably;
//! 7. the draft gets its lasting name, or changes names with the loose image that it takes the place of;
//! 8. `images/` is synced; the loose image, which is the `.tmp-ID` now, is removed.
//!
//! In 8 the files of a loose image go: who packs one sees to it that nobody restores from it meanwhile.
//!
//! The image in memory is only read. When the power goes before 7 there are a draft, which the next start sweeps, and packs
//! that no image needs, which are found again by the next try or go as such packs go. When only we go, the next supervisor begins
//! anew from the staged image.

mod known;
mod pace;
mod stretches;
mod worker;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use self::known::Known;
use self::pace::Pace;
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

/// Bounds on the work beside the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes a second that are written to the disk at most.
    pub rate: Option<u64>,
    /// Threads that read, hash and compress. Each has one beside it that writes.
    pub threads: usize,
}

/// How many threads pack beside a job, for a number of processors. The job needs most processors, so it is one thread for four of
/// them. At least two: one hashes while the other waits for the disk. At most eight: one thread hashes some 2.5 GB/s, and no disk
/// is faster than eight.
#[must_use]
pub fn threads_beside(processors: usize) -> usize {
    (processors / 4).clamp(2, 8).min(processors)
}

/// How an image is packed.
#[derive(Debug, Clone)]
pub struct Packing {
    /// How chunks are compressed.
    pub compression: Compression,
    /// What they are encrypted with.
    pub key: Option<Arc<Key>>,
    /// How much of the machine may be used.
    pub bounds: Bounds,
    /// In how many packs chunks are kept that more than one image refers to.
    pub copies: Copies,
    /// Places that the disk does not give: what is in them is written again.
    pub unread: Unread,
}

/// Why an image is not in the packs of the store. It still is where it was.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It has no manifest any more.
    #[error("image {0} is not there any more, or another one took its place")]
    Gone(super::ImageId),
    /// A part could not be read.
    #[error("cannot read {} to bring it to the store", path.display())]
    Copy {
        /// The part.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A loose image is not what was published: packed, it would look sound.
    #[error("image {id} is damaged and stays as it is: {what}")]
    Damaged {
        /// Which.
        id: super::ImageId,
        /// What is wrong with it.
        what: String,
    },
    /// The disk does not give a loose image.
    #[error("image {id} cannot be read and stays as it is: {what}")]
    Unread {
        /// Which.
        id: super::ImageId,
        /// What cannot be read.
        what: String,
    },
    /// A pack could not be written.
    #[error(transparent)]
    Pack(#[from] FileError),
    /// The store could not be read, or a mark not be taken back.
    #[error(transparent)]
    Store(#[from] super::Error),
    /// The image could not be published.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// It was not wanted any more.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Whether room is what was missing.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Error::Pack(FileError { source, .. })
            | Error::Copy { source, .. }
            | Error::Store(super::Error::Create { source, .. } | super::Error::Write { source, .. }) => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            Error::Publish(error) => error.is_full(),
            _ => false,
        }
    }
}

/// Less than this is not worth a thread, and a pack, of its own.
const WORTH_A_THREAD: u64 = 64 << 20;

/// Each has some 15 MiB of buffers, and no disk is faster than so many hash.
const MAX_WORKERS: usize = 16;

/// Brings a staged or loose image into the packs of the job. One that is packed is answered as it is.
///
/// # Errors
/// When a part cannot be read, a pack not be written, or the image not be published. There is no draft then, and what was
/// there before is as it was; packs that were closed stay, and are found by the next try.
pub fn persist(
    image: &Image,
    folder: &JobFolder,
    lock: &WriterLock,
    packing: &Packing,
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
    // Which chunks have no image, though they are in a pack, is told by the maps. Where one of those cannot be read, no
    // second copies are made this time.
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
        lock,
    };
    let worth = usize::try_from(manifest.bytes.div_ceil(WORTH_A_THREAD)).unwrap_or(usize::MAX);
    let workers = packing.bounds.threads.min(worth).clamp(1, MAX_WORKERS);
    let packed = parallel::in_parallel(vec![(); workers], workers, |()| work.run())?;
    let again = work.known.written_again();
    drop(work);
    drop(index);
    drop(shared);
    // From here on the new place counts, and not the one that the disk does not give.
    strike::strike(&packs, lock, &again)?;
    packing.unread.forget(&again);
    // A slot that was begun anew in the meantime would have given parts of two images.
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

/// What is on a disk has hashes, and they are right.
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

/// The extents of the parts, from those of the stretches.
fn in_order(mut packed: Vec<Packed>, parts: usize) -> ChunkMap {
    packed.sort_unstable_by_key(|stretch| stretch.number);
    // Exactly as much as it takes: an image of a terabyte has four million.
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
