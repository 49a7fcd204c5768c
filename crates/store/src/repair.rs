//! Repairs a job's damaged packs: reads every record, rebuilds indexes from the intact ones, and names the images that
//! have lost content.
//!
//! Damaged content that is intact in another pack or the replica is replaced ([`super::heal`]) before an image is
//! judged. If the replica cannot be asked, nothing is concluded about the images that may be complete with it.
//!
//! No content is removed. A damaged record is left out of the index, so that the next image with the same content
//! stores it again; it stays in its pack until the pack is removed. A damaged header of a pack is rewritten in place,
//! because it follows from the records. A pack that cannot be read for another reason than its content (EIO: the disk
//! is failing), or that this rekindle cannot judge (a newer format, a missing key), is left as it is, and nothing is
//! concluded from it. An image that has lost content is marked as bad, so that a restart skips it. A marked image that
//! is complete after all stays marked, because other reasons for the mark are not known here.
//!
//! Each pack is repaired separately, the index last. After a power cut some are repaired; the next repair starts again
//! and has nothing to do for those.

mod images;
mod packs;
mod salvage;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::FileError;
use super::chunk::Key;
use super::error::Error as StoreError;
use super::folder::JobFolder;
use super::heal::{self, ChunkSource, Healed, Healing};
use super::id::ImageId;
use super::lock::WriterLock;
use super::pack::set::PackInfo;
use super::pack::{PackName, Unread};
use super::persist::Progress;
use crate::options::Copies;
use images::{Known, NotAsked};
use rekindle_os::parallel;

/// The result of a repair.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Packs with a finding, sorted by name.
    pub packs: Vec<PackRepair>,
    /// Content that was taken from other packs or the replica, if any.
    pub healed: Option<Healed>,
    /// Images that have lost content, or may have; newest first.
    pub images: Vec<AffectedImage>,
}

impl Repaired {
    /// Whether every image is intact, and everything could be checked.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let known = |pack: &PackRepair| matches!(pack.outcome, Outcome::Repaired | Outcome::Lost | Outcome::Unreadable);
        self.images.is_empty() && self.packs.iter().all(known)
    }
}

/// The result for a pack; in a dry run, the expected result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackRepair {
    /// The pack.
    #[serde(serialize_with = "as_text")]
    pub pack: PackName,
    /// The kind of result.
    pub outcome: Outcome,
    /// Records that are intact, as far as they could be checked.
    pub whole: usize,
    /// Details in words.
    pub what: String,
}

/// The kind of result for a pack; in a dry run, the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// All its content is intact again.
    Repaired,
    /// The remaining records can be used again; the others are lost. Whether an image needs those is reported with the
    /// images.
    Lost,
    /// The disk cannot read some records. They stay in its index, because they may be intact. Whether an image needs
    /// them, and cannot get them from elsewhere, is reported with the images.
    Unreadable,
    /// Its records exist, but cannot be checked without another key.
    NotChecked,
    /// It could not be judged, and nothing was changed.
    LeftAlone,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Outcome::Repaired => "repaired",
            Outcome::Lost => "lost some",
            Outcome::Unreadable => "unreadable",
            Outcome::NotChecked => "not checked",
            Outcome::LeftAlone => "left alone",
        })
    }
}

/// An image that cannot be restored any more, or perhaps not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AffectedImage {
    /// The image.
    pub image: ImageId,
    /// Whether the loss is certain.
    pub loss: Loss,
    /// The lost content, in words.
    pub what: String,
}

/// Whether an image has lost content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loss {
    /// Yes: it is marked as bad.
    Certain,
    /// Unknown, because something cannot be read or checked. It is not marked.
    NotKnown,
}

fn as_text<S: serde::Serializer>(name: &PackName, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(name)
}

/// Whether anything is changed.
#[derive(Debug, Clone, Copy)]
pub enum Mode<'l> {
    /// Only reports what would be done. This needs no lock.
    DryRun,
    /// Repairs.
    Repair(&'l WriterLock),
}

/// Why a repair ended early. What was repaired by then stays repaired.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store cannot be listed, an image not be marked, or the lock is not ours (any more).
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file cannot be written or removed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Damaged content could not be replaced.
    #[error(transparent)]
    Heal(#[from] heal::Error),
}

/// Sources of intact content.
#[derive(Clone, Copy, Default)]
pub struct Sources<'a> {
    /// In how many packs shared chunks are kept.
    pub copies: Copies,
    /// The replica, if there is one.
    pub replica: Option<&'a dyn ChunkSource>,
}

impl std::fmt::Debug for Sources<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sources").field("copies", &self.copies).finish_non_exhaustive()
    }
}

/// Reads everything with this many threads, and repairs what it can. `progress` counts the bytes of the packs.
///
/// # Errors
/// When the store cannot be listed, something not be written, or the lock was taken over.
pub fn repair(
    folder: &JobFolder,
    mode: Mode<'_>,
    key: Option<&Key>,
    sources: &Sources<'_>,
    threads: usize,
    progress: &Progress,
) -> Result<Repaired, Error> {
    if let Mode::Repair(lock) = mode {
        folder.check_lock(lock)?;
    }
    // A dry run looks at a job that may run. What is stored from now on is not looked at: its packs may be missing below.
    let images = folder.images()?;
    let packs = folder.packs();
    let names = packs.names()?;
    let size = |name: &PackName| packs.pack_path(*name).metadata().map_or(0, |meta| meta.len());
    progress.begin(names.iter().map(size).sum());
    let hold = Hold::new(mode);
    let known = Mutex::new(Known::default());
    let repairs = packs::PackRepairs { packs: &packs, key, hold: &hold, known: &known, progress };
    let repaired = parallel::in_parallel(names.clone(), threads, |name| repairs.pack(name))?;
    let mut done = Repaired { packs: repaired.into_iter().flatten().collect(), ..Repaired::default() };
    done.packs.sort_by_key(|report| report.pack);
    let mut known = known.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Mode::Repair(lock) = mode {
        let unread = Unread::default();
        let Sources { copies, replica } = *sources;
        let healing = Healing { folder, lock, key, copies, unread: &unread, replica };
        let mut wanted = std::mem::take(&mut known.harmed);
        wanted.extend(heal::missing(folder)?);
        if !wanted.is_empty() {
            let healed = healing.heal(&wanted, &|| hold.keep().is_err())?;
            let not_asked = |why: &String| NotAsked { chunks: healed.lost.clone(), why: why.clone() };
            known.not_asked = healed.replica_failure.as_ref().map(not_asked);
            done.healed = Some(healed).filter(|healed| healed.from_copies + healed.from_replica > 0);
        }
    }
    // Healed content, or what the supervisor of a job that runs has moved.
    for name in packs.names()?.into_iter().filter(|name| !names.contains(name)) {
        if let Ok(pack) = packs.pack_index(name) {
            let info = PackInfo { name, pack_len: pack.pack_len(), key: None, gone: false };
            known.index.add(info, &pack);
        }
    }
    let known = known.sorted();
    done.images = images::look(&images, &known, &hold)?;
    Ok(done)
}

/// How often the lock is checked while nothing is written: a repair takes hours, and others may think that we are dead.
const LOOK: Duration = Duration::from_secs(10);

/// The permission to change the store, as long as the lock is ours.
struct Hold<'l> {
    lock: Option<&'l WriterLock>,
    last: Mutex<Instant>,
}

impl<'l> Hold<'l> {
    fn new(mode: Mode<'l>) -> Hold<'l> {
        let lock = match mode {
            Mode::DryRun => None,
            Mode::Repair(lock) => Some(lock),
        };
        Hold { lock, last: Mutex::new(Instant::now()) }
    }

    /// Renews the lock; called regularly.
    fn keep(&self) -> Result<(), Error> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() < LOOK {
            return Ok(());
        }
        *last = Instant::now();
        drop(last);
        match self.lock.map(WriterLock::refresh) {
            Some(Err(error @ (StoreError::TakenOver { .. } | StoreError::LockReplaced { .. }))) => Err(error.into()),
            // A heartbeat that fails is repeated long before others think that we are dead.
            _ => Ok(()),
        }
    }

    /// Whether something may be written now; false in a dry run.
    fn may_write(&self) -> Result<bool, Error> {
        self.lock.map_or(Ok(false), |lock| Ok(lock.refresh().map(|()| true)?))
    }
}

#[cfg(test)]
mod tests;
