//! Removes content that no image needs: packs are marked, removed after a grace period, and rewritten if they are
//! mostly unneeded.
//!
//! One round ([`collect`]) does these steps. After a crash at any point the next round continues correctly:
//!
//! 1. read from all chunk maps which chunks the images need, and from all indexes which chunks the packs have
//! 2. rebuild an index that is missing or damaged, without damaged records, if all record headers of its pack are
//!    intact and the key of the pack is there
//! 3. remove the mark of a pack that is needed again
//! 4. remove packs whose mark is old enough: index, pack, mark, in this order
//! 5. mark packs that no image needs, with a file `NAME.gone`; without a grace period remove them
//! 6. copy the needed content of packs that are mostly unneeded to new packs, checked on reading; mark the old packs
//!
//! A chunk may be in two packs (`store.copies`). A second copy stays as long as any image needs the chunk, and both are
//! removed when none does. If one copy is enough, the second copy counts as unneeded.
//!
//! Invariants: while any image or pack cannot be read, nothing is marked, removed or copied, because it may be needed.
//! (An image that was read and is damaged still needs what its map names.) A pack with a mark is still read. At least
//! the grace period passes between mark and removal, by the wall clock; if the clock was set back, the mark is renewed.
//!
//! A round needs the writer's lock, and only one thread of a process may run it at a time (`WriterLock::packs`): a
//! persist in parallel could reuse a chunk that is just being removed.

mod mark;
mod needed;
mod repack;

use std::io;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::chunk::{ChunkMap, Key};
use super::error::Error as StoreError;
use super::folder::JobFolder;
use super::folders;
use super::id::ImageId;
use super::lock::WriterLock;
use super::options::Copies;
use super::pack::set::{Index, Lost, Packs};
use super::pack::stored::Stored;
use super::pack::{Location, PACK, PackIndex, PackName};
use super::{FileError, failed};
pub(crate) use needed::{Needed, map_of};
use rekindle_os::durable;

/// How long a pack stays after it was marked: a reader that began before an image was removed, also over a slow network,
/// can read its content for this time.
pub const SWEEP_AFTER: Duration = Duration::from_secs(600);

/// Maximum bytes that one round copies: the job needs the same disk, and this takes at most some minutes of it.
pub const REPACK: u64 = 10_000_000_000;

/// What one round may do.
#[derive(Debug, Clone, Copy)]
pub struct Bounds<'k> {
    /// How long a pack stays after it was marked.
    pub sweep_after: Duration,
    /// Maximum bytes that are copied to new packs; `None`: nothing is copied.
    pub repack: Option<u64>,
    /// The key of the packs.
    pub key: Option<&'k Key>,
    /// In how many packs a chunk is kept. If more packs have it, only the places that a reader prefers count as needed.
    pub copies: Copies,
    /// `store.min-free`, in bytes: copying leaves at least half of it free.
    pub min_free: u64,
}

/// What one round did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Packs that got a new index.
    pub(crate) reindexed: Vec<PackName>,
    /// Packs that got a mark.
    pub marked: Vec<PackName>,
    /// Packs whose mark was removed.
    pub(crate) revived: Vec<PackName>,
    /// Packs that were removed.
    pub(crate) swept: Vec<PackName>,
    /// Bytes of the removed packs.
    pub(crate) freed: u64,
    /// Packs whose needed content was copied.
    pub(crate) repacked: Vec<PackName>,
    /// Bytes that were copied.
    pub(crate) copied: u64,
}

/// Why a round was not started, or not completed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be read, or the lock is another job's.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It is unknown what an image needs.
    #[error(
        "no unneeded content is removed while it is unknown what image {image} needs: {why}; if it is damaged, run `rekindle repair`"
    )]
    Image {
        /// The image.
        image: ImageId,
        /// The reason.
        why: String,
    },
    /// The content of a pack is unknown.
    #[error(
        "no unneeded content is removed while pack {pack} cannot be read: {why}; if it is damaged, run `rekindle repair`"
    )]
    Pack {
        /// The pack.
        pack: PackName,
        /// The reason.
        why: String,
    },
    /// A file cannot be written or removed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The needed content of a pack cannot be copied; the pack stays.
    #[error("cannot copy the needed content of pack {pack}")]
    Copy {
        /// The pack.
        pack: PackName,
        /// The cause.
        #[source]
        source: CopyError,
    },
}

impl Error {
    /// Whether the disk has no room for a file.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let Error::File(FileError { source, .. }) = self else { return false };
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

pub(crate) use super::pack::CopyError;

/// Does one round. The grace period is computed with `now`.
///
/// # Errors
/// If something cannot be read (then only indexes were rebuilt), written or removed.
pub fn collect(
    folder: &JobFolder,
    lock: &WriterLock,
    bounds: &Bounds<'_>,
    now: DateTime<Utc>,
    cancelled: &dyn Fn() -> bool,
) -> Result<Collected, Error> {
    match round(folder, lock, bounds, now, cancelled, None)? {
        (done, None) => Ok(done),
        (_, Some(full)) => Err(full),
    }
}

/// `besides` is the map of an image that is not in the store yet. A disk without room for an index or a mark does not
/// prevent that packs are removed; that error is returned beside what was done.
fn round(
    folder: &JobFolder,
    lock: &WriterLock,
    bounds: &Bounds<'_>,
    now: DateTime<Utc>,
    cancelled: &dyn Fn() -> bool,
    besides: Option<&ChunkMap>,
) -> Result<(Collected, Option<Error>), Error> {
    folder.check_lock(lock)?;
    let _alone = lock.packs();
    let packs = folder.packs();
    let mut done = Collected::default();
    let mut index = packs.index()?;
    let (checked, mut full) = match reindex(&packs, &index, bounds.key, &mut done) {
        Err(error) if error.is_full() => (Checked::No, Some(error)),
        reindexed => (reindexed?, None),
    };
    if !done.reindexed.is_empty() {
        index = packs.index()?;
    }
    let mut needed = Needed::of(folder)?;
    besides.into_iter().for_each(|map| needed.add_map(map));
    // Without a new index, records that were damaged count again: they must not take the place of good ones.
    let copies = if checked == Checked::No { usize::MAX } else { bounds.copies.count() };
    let uses = needed.of_packs(&packs, &index, copies)?;
    for pack in &uses {
        lock.still_held()?;
        let is_gone = index.is_gone(pack.name);
        if is_gone && pack.needed > 0 {
            mark::unmark(&packs, pack.name)?;
            index.set_gone(pack.name, false);
            done.revived.push(pack.name);
        } else if is_gone && mark::is_due(&packs, pack.name, bounds.sweep_after, now)? {
            sweep(&packs, pack.name)?;
            done.swept.push(pack.name);
            done.freed += pack.bytes;
        } else if !is_gone && pack.needed == 0 && bounds.sweep_after.is_zero() {
            // Nobody waits for the mark, and a full disk has no room for it.
            sweep(&packs, pack.name)?;
            done.swept.push(pack.name);
            done.freed += pack.bytes;
        } else if !is_gone && pack.needed == 0 {
            match mark::set(&packs, pack.name, now).map_err(Error::from) {
                Ok(()) => {
                    index.set_gone(pack.name, true);
                    done.marked.push(pack.name);
                }
                Err(error) if error.is_full() => full = Some(error),
                Err(error) => return Err(error),
            }
        }
    }
    sweep_remains(&packs, &index)?;
    if let Some(bound) = bounds.repack.filter(|_| full.is_none()) {
        // What is copied is there twice until the old packs are removed. A store that fills its disk has nothing free but
        // this, and would never get back what it does not need.
        let room = folders::free_space(packs.dir())?.saturating_sub(bounds.min_free / 2).saturating_sub(PACK);
        let bound = bound.min(room);
        repack::run(&packs, &index, &needed, &uses, bounds, bound, lock, now, cancelled, &mut done)?;
    }
    Ok((done, full))
}

/// Removes unneeded content at once, without a grace period, for when space is short. A reader of an image that was
/// just removed finds it damaged.
///
/// # Errors
/// As [`collect`].
pub fn sweep_now(folder: &JobFolder, lock: &WriterLock, copies: Copies) -> Result<u64, Error> {
    sweep_all(folder, lock, copies, None)
}

/// The same for an image with this map that is being fetched: what of its content is here stays, too.
///
/// # Errors
/// As [`collect`].
pub fn sweep_for(folder: &JobFolder, lock: &WriterLock, copies: Copies, map: &ChunkMap) -> Result<u64, Error> {
    sweep_all(folder, lock, copies, Some(map))
}

fn sweep_all(folder: &JobFolder, lock: &WriterLock, copies: Copies, besides: Option<&ChunkMap>) -> Result<u64, Error> {
    let key = folder.trust().key();
    let bounds = Bounds { sweep_after: Duration::ZERO, repack: None, key, copies, min_free: 0 };
    match round(folder, lock, &bounds, Utc::now(), &|| false, besides)? {
        (Collected { freed: 0, .. }, Some(full)) => Err(full),
        (done, _) => Ok(done.freed),
    }
}

/// Whether a round can do anything with these packs.
///
/// # Errors
/// [`Error::Pack`]: the content of one is unknown.
pub(crate) fn check(index: &Index) -> Result<(), Error> {
    for problem in index.problems() {
        let why = match &problem.lost {
            // Step 2.
            Lost::Nothing => continue,
            Lost::From { offset, pack_len, why } => {
                format!("{why}, so {} of its {pack_len} bytes are unusable", pack_len.saturating_sub(*offset))
            }
            Lost::All(why) => rekindle_base::chain(why),
        };
        return Err(Error::Pack { pack: problem.pack, why });
    }
    Ok(())
}

/// Whether all records in the indexes were intact when their index was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Checked {
    Yes,
    /// Those of a pack without an index count as they are.
    No,
}

/// Step 2. Any other problem of a pack ends the round.
fn reindex(packs: &Packs, index: &Index, key: Option<&Key>, done: &mut Collected) -> Result<Checked, Error> {
    check(index)?;
    let mut checked = Checked::Yes;
    for problem in index.problems() {
        match write_index(packs, problem.pack, key)? {
            Checked::Yes => done.reindexed.push(problem.pack),
            Checked::No => checked = Checked::No,
        }
    }
    Ok(checked)
}

/// Rebuilds the index of a pack from its records. Damaged records are left out: they may have been removed from the old
/// index ([`super::heal`]), and must not replace an intact copy. Without the key they cannot be told from others; then
/// no index is written.
fn write_index(packs: &Packs, pack: PackName, key: Option<&Key>) -> Result<Checked, Error> {
    let why = |error: &dyn std::error::Error| Error::Pack { pack, why: rekindle_base::chain(error) };
    let scan = packs.scan(pack).map_err(|error| why(&error))?;
    let Ok(key) = scan.header.key_for(key) else { return Ok(Checked::No) };
    let mut entries = scan.index.entries().to_vec();
    let mut stored = Stored::default();
    entries.retain(|entry| {
        let read = stored.read_from_disk(packs, &entry.id, &Location::of(pack, entry), key);
        !matches!(read, Err(CopyError::Damaged { source, .. }) if !source.is_not_for_us())
    });
    let path = packs.index_path(pack);
    let bytes = PackIndex::new(scan.index.pack_len(), entries).to_bytes();
    durable::write_file(&path, &bytes, 0o600).map_err(failed("write", &path))?;
    Ok(Checked::Yes)
}

/// Step 4.
fn sweep(packs: &Packs, pack: PackName) -> Result<(), Error> {
    for path in [packs.index_path(pack), packs.pack_path(pack), packs.gone_path(pack)] {
        durable::remove_file(&path).map_err(failed("remove", &path))?;
    }
    Ok(())
}

/// Removes marks of packs whose removal was interrupted.
fn sweep_remains(packs: &Packs, index: &Index) -> Result<(), Error> {
    for name in packs.names()? {
        let path = packs.gone_path(name);
        if index.pack(name).is_none() && path.is_there() {
            durable::remove_file(&path).map_err(failed("remove", &path))?;
        }
    }
    Ok(())
}

/// How much of a pack the images need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackUse {
    pub(super) name: PackName,
    /// Size of the pack.
    pub(super) bytes: u64,
    /// Bytes of records that an image needs and that are read from this pack.
    pub(super) needed: u64,
}

/// Bytes that the packs of a job take, and bytes of them that images need.
///
/// # Errors
/// As [`collect`].
#[cfg(test)]
pub(crate) fn usage(folder: &JobFolder, copies: Copies) -> Result<(u64, u64), Error> {
    let packs = folder.packs();
    let uses = Needed::of(folder)?.of_packs(&packs, &packs.index()?, copies.count())?;
    Ok(uses.iter().fold((0, 0), |(bytes, needed), pack| (bytes + pack.bytes, needed + pack.needed)))
}

#[cfg(test)]
mod tests;
