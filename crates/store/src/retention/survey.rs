//! Reads the facts for retention from a job's folder, and executes the plan: the only place that does either.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use chrono::{DateTime, Utc};

use super::admission::{self, Admission, Need, Refusal, Removal};
use super::{FactKind, Facts, Gathering, Line, Plan, Policy, Proof, Room, Sizes, Use, await_proof, plan};
use crate::chunk::ChunkMap;
use crate::error::{Error, Result};
use crate::folder::JobFolder;
pub use crate::folders::free_space;
use crate::gc;
use crate::id::ImageId;
use crate::image::{Form, Image};
use crate::lock::WriterLock;
use crate::options::Copies;
use crate::pack::PackName;
use crate::pack::set::PackInfo;
use rekindle_os::beneath::Beneath;

/// The images of a job in the store, their sizes, and the available space.
#[derive(Debug)]
pub struct Survey {
    facts: Vec<Facts>,
    sizes: Sizes,
    room: Room,
    /// Bytes of the packs that have the mark of unneeded content.
    marked: u64,
    /// Why no content can be removed from the packs.
    stuck: Option<Box<gc::Error>>,
    /// Images without a mark whose chunk map cannot be used, and why: a restart cannot use them either.
    doubtful: Vec<(ImageId, String)>,
}

/// Why there is no space for an image.
#[derive(Debug, thiserror::Error)]
pub enum NoRoom {
    /// Removing all removable images would not be enough; nothing was removed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The store could not be read, or an image could not be removed.
    #[error(transparent)]
    Store(#[from] Error),
    /// Removing images would free no space, so none was removed for that.
    #[error("{refusal}")]
    Stuck {
        /// The missing space.
        refusal: Refusal,
        /// Why their content would stay.
        source: Box<gc::Error>,
    },
    /// Unneeded content could not be removed.
    #[error(transparent)]
    Sweep(#[from] Box<gc::Error>),
}

/// How an image is written to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// Into packs, where only new content takes space.
    Packed,
    /// As plain files in a slot on the same file system, which are removed when it is packed.
    Staged,
}

impl Survey {
    /// Collects the facts about a job's images.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn of(folder: &JobFolder, min_free: u64) -> Result<Survey> {
        let images = folder.images()?;
        let (proven, shown) = (folder.proven()?, folder.evidence()?);
        let proof = |id| if proven.contains(&id) { Proof::Proven } else { Proof::None };
        let ours = folder.line();
        let line = |image: &Image| if ours(image) { Line::Ours } else { Line::Other };
        let facts = images.iter();
        let mut facts: Vec<Facts> = facts
            .map(|image| Facts {
                proof: proof(image.id),
                evidence: shown.recorded(&image.id),
                line: line(image),
                ..Facts::from(image)
            })
            .collect();
        let index = folder.packs().index()?;
        let (mut sizes, mut needed) = (Gathering::<[u8; 16]>::default(), HashSet::<PackName>::new());
        let mut stuck = gc::check(&index).err();
        let mut doubtful = Vec::new();
        // If a pack has a problem, it is not certain that something is in none.
        let is_certain = index.problems().is_empty();
        for (image, facts) in images.iter().zip(&mut facts) {
            sizes.own(image.id, allocated(&image.dir));
            let is_good = facts.kind == FactKind::Good;
            let map = match gc::map_of(image) {
                Ok(map) => map,
                Err(error) => {
                    if is_good {
                        facts.kind = FactKind::Unknown;
                        doubtful.push((image.id, rekindle_base::chain(&error)));
                    }
                    stuck.get_or_insert(error);
                    continue;
                }
            };
            if map.is_none() && is_good && image.form() == Form::Packed {
                facts.kind = FactKind::Incomplete;
                doubtful.push((
                    image.id,
                    "its chunk map is damaged or missing; run `rekindle repair` when the job does not run".to_owned(),
                ));
            }
            for (id, _) in map.iter().flat_map(ChunkMap::chunks) {
                let Some(prefix) = id.as_bytes().first_chunk() else { continue };
                // Including its second copy, if it has one, because both are removed together.
                let (mut bytes, mut is_lost) = (0, true);
                for place in index.kept(&id, Copies::Two.count()) {
                    needed.insert(place.pack);
                    bytes += place.record_len();
                    is_lost = false;
                }
                if is_lost && is_certain && facts.kind == FactKind::Good {
                    facts.kind = FactKind::Incomplete;
                }
                sizes.share(image.id, *prefix, bytes);
            }
        }
        let newest = images.iter().filter_map(Image::manifest).find_map(|manifest| manifest.chunks.as_ref());
        // Marked or not: packs that an interrupted persist left have no mark yet.
        let bytes = |which: &dyn Fn(&PackInfo) -> bool| {
            let unneeded = index.packs().iter().filter(|pack| !needed.contains(&pack.name) && which(pack));
            if stuck.is_none() { unneeded.map(|pack| pack.pack_len).sum() } else { 0 }
        };
        let (pending, marked) = (bytes(&|_| true), bytes(&|pack| pack.gone));
        let free = free_space(folder.dir())?;
        let sizes = sizes.finish(newest.map(|chunks| chunks.stored));
        let sizes = if stuck.is_none() { sizes } else { sizes.stuck() };
        let stuck = stuck.map(Box::new);
        Ok(Survey { facts, sizes, room: Room { free, pending, min_free }, marked, stuck, doubtful })
    }

    /// Adds the images that the writer is reading, and those that the job may prove.
    fn with_held(mut self, lock: &WriterLock) -> Survey {
        if lock.changes_packs() {
            // Packs that a thread is writing belong to no image yet.
            self.room.pending = self.marked;
        }
        let held = lock.held();
        self.facts.iter_mut().filter(|it| held.contains(&it.id)).for_each(|it| it.in_use = Use::Held);
        await_proof(&mut self.facts, &lock.waiting());
        self
    }

    /// The sizes of the images.
    #[must_use]
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The decisions for the images.
    #[must_use]
    pub fn plan(&self, policy: &Policy, now: DateTime<Utc>) -> Plan {
        plan(&self.facts, policy, now, &self.sizes, &self.room)
    }

    /// The space that an image of this size will need.
    #[must_use]
    pub(crate) fn need(&self, whole: u64, written: Written) -> Need {
        let lasting = admission::predict(whole, self.sizes.last_added());
        Need { lasting, at_first: if written == Written::Packed { lasting } else { whole.saturating_add(lasting) } }
    }

    /// Whether there is space for it.
    #[must_use]
    pub(crate) fn admit(&self, need: Need, policy: &Policy, now: DateTime<Utc>, path: &Path) -> Admission {
        admission::admit(need, &self.facts, policy, now, &self.sizes, &self.room, path)
    }
}

/// Removes the images that the policy does not keep, and returns the plan and the removed images. An image that was
/// pinned since the facts were collected stays.
///
/// # Errors
/// [`Error::Read`], [`Error::Remove`], [`Error::WrongLock`].
pub fn rotate(folder: &JobFolder, lock: &WriterLock, policy: &Policy, min_free: u64) -> Result<(Plan, Vec<ImageId>)> {
    let survey = Survey::of(folder, min_free)?.with_held(lock);
    for (id, why) in &survey.doubtful {
        tracing::warn!("image {id} does not count as good when images are removed: {why}");
    }
    let plan = survey.plan(policy, Utc::now());
    let removals: Vec<ImageId> = plan.removals().collect();
    for decision in plan.decisions.iter().filter(|it| it.verdict.is_removal()) {
        tracing::debug!("removing image {}: {}", decision.id, decision.verdict);
    }
    // One may have been held since then.
    let gone = remove_all(folder, lock, removals.into_iter().filter(|id| !lock.held().contains(id)))?;
    Ok((plan, gone))
}

/// The limits that decide whether there is space for an image, and what to remove if not.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The rules for keeping images.
    pub policy: Policy,
    /// Bytes of the file system that must stay free.
    pub min_free: u64,
    /// In how many packs shared content is kept.
    pub copies: Copies,
}

/// What an attempt to store an image has shown: the disk was full.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// Bytes that the image needs, at least.
    pub(crate) least: u64,
    /// Whether less can be written than the file system has free, because of a quota. Then nothing counts as free.
    pub(crate) is_limited: bool,
}

/// Makes space for an image of this size, by removing older ones if necessary. Returns the removed images.
///
/// # Errors
/// [`NoRoom`].
pub fn make_room(
    folder: &JobFolder,
    lock: &WriterLock,
    limits: &Limits,
    whole: u64,
    written: Written,
) -> Result<Vec<Removal>, NoRoom> {
    make(folder, lock, limits, whole, written, None)
}

/// The same for an image to be packed for which there was not enough space.
///
/// # Errors
/// [`NoRoom`].
pub(crate) fn make_room_again(
    folder: &JobFolder,
    lock: &WriterLock,
    limits: &Limits,
    whole: u64,
    seen: &Seen,
) -> Result<Vec<Removal>, NoRoom> {
    make(folder, lock, limits, whole, Written::Packed, Some(seen))
}

fn make(
    folder: &JobFolder,
    lock: &WriterLock,
    limits: &Limits,
    whole: u64,
    written: Written,
    seen: Option<&Seen>,
) -> Result<Vec<Removal>, NoRoom> {
    let policy = &limits.policy;
    let is_limited = seen.is_some_and(|seen| seen.is_limited);
    let need_of = |survey: &Survey| match seen {
        Some(seen) => Need::from(seen.least.max(survey.need(whole, written).lasting)),
        None => survey.need(whole, written),
    };
    let look = || -> Result<(Survey, Admission)> {
        let mut survey = Survey::of(folder, limits.min_free)?.with_held(lock);
        if is_limited {
            (survey.room.free, survey.room.min_free) = (0, 0);
        }
        let admission = survey.admit(need_of(&survey), policy, Utc::now(), folder.path());
        Ok((survey, admission))
    };
    let (stuck, removals) = match look()? {
        (_, Admission::Admit) => return Ok(Vec::new()),
        (survey, Admission::Refuse(refusal)) => return Err(refused(refusal, survey.stuck)),
        (survey, Admission::AfterRemoving(removals)) => (survey.stuck, removals),
    };
    for Removal { id, why } in &removals {
        tracing::info!("removing image {id}: {why}");
    }
    let gone = remove_all(folder, lock, removals.iter().map(|removal| removal.id))?;
    if stuck.is_none() {
        // Space is short, so unneeded content is removed without a grace period.
        gc::sweep_now(folder, lock, limits.copies).map_err(Box::new)?;
    }
    if is_limited {
        // Only the next attempt shows what the quota allows now.
        return Ok(removals.into_iter().filter(|removal| gone.contains(&removal.id)).collect());
    }
    // Only once: a file system may free space late (btrfs does), and more images would be removed for nothing.
    match look()? {
        (_, Admission::Admit) => Ok(removals.into_iter().filter(|removal| gone.contains(&removal.id)).collect()),
        (survey, Admission::Refuse(refusal)) => Err(refused(refusal, survey.stuck)),
        (survey, Admission::AfterRemoving(_)) => {
            let need = need_of(&survey).at_first;
            let Room { free, min_free: keep, .. } = survey.room;
            Err(Refusal::NotYetFree { need, free, keep, path: folder.path().to_owned() }.into())
        }
    }
}

fn refused(refusal: Refusal, stuck: Option<Box<gc::Error>>) -> NoRoom {
    match (&refusal, stuck) {
        (Refusal::Disk { .. }, Some(source)) => NoRoom::Stuck { refusal, source },
        _ => refusal.into(),
    }
}

fn remove_all(folder: &JobFolder, lock: &WriterLock, ids: impl IntoIterator<Item = ImageId>) -> Result<Vec<ImageId>> {
    let mut gone = Vec::new();
    for id in ids {
        // Removing large images takes a while.
        lock.refresh()?;
        match folder.remove(lock, &id) {
            Ok(()) => gone.push(id),
            Err(Error::Pinned(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(gone)
}

/// Bytes that a folder occupies on the disk. What cannot be examined counts as zero, so the freed space is never
/// overestimated.
fn allocated(dir: &Beneath) -> u64 {
    let mut open = vec![dir.clone()];
    let mut sum = 0_u64;
    while let Some(folder) = open.pop() {
        for (entry, meta) in folder.entries().unwrap_or_default() {
            // In units of 512 bytes, whatever the block size of the file system is (stat(2)).
            sum = sum.saturating_add(meta.blocks().saturating_mul(512));
            if meta.is_dir() {
                open.push(entry);
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests;
