//! Memory and disk space of dead supervisors: a staging area remains when its supervisor is killed.
//!
//! The next `run` of the same job takes over its area. The area of a job that is never run again would occupy memory
//! until the machine restarts. Areas of the jobs of a store are found through the jobs' folders ([`find`]); those of
//! other stores, and of jobs whose folder is gone, through the mount table and the note that each area has about its
//! owner ([`elsewhere`]). Invariant: nothing is freed that a job could still continue from, unless the user says so.

use std::path::{Path, PathBuf};

use nix::mount::MntFlags;
use serde::Serialize;

use super::mounted::{self, Owner};
use super::{Area, Medium, Slot};
use crate::error::Result;
use crate::folder::JobFolder;
use crate::holder::Holder;
use crate::id::{ImageId, JobName};
use crate::image::Image;
use crate::lock::Writer;
use crate::manifest::Manifest;
use crate::record::Outcome;
use crate::store::{Access, Store};
use crate::trust::Trust;
use crate::{FileError, links};
use rekindle_os::beneath::Beneath;

/// What to do with memory that has the only copy of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnlyCopies {
    /// It stays.
    Keep,
    /// It is freed, and the image is lost.
    Discard,
}

/// A staging area that no supervisor uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Leftover {
    /// The job.
    pub job: JobName,
    /// The job's store.
    pub store: PathBuf,
    /// The path of the area.
    pub path: PathBuf,
    /// Its medium.
    pub medium: Medium,
    /// Bytes that it occupies there.
    pub bytes: u64,
    /// The newest image in it that exists nowhere else and that the job could continue from.
    pub needed: Option<ImageId>,
}

impl std::fmt::Display for Leftover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (path, bytes) = (self.path.display(), bytesize::ByteSize::b(self.bytes));
        let medium = match self.medium {
            Medium::Memory => "of memory",
            Medium::Disk => "on the disk",
        };
        write!(f, "a dead supervisor left {bytes} {medium} at {path}")?;
        match self.needed {
            Some(image) => write!(f, ", and image {image} is only there"),
            None => f.write_str(", which nobody needs"),
        }
    }
}

impl Leftover {
    /// What to do about it.
    #[must_use]
    pub fn advice(&self) -> String {
        match self.needed {
            Some(_) => format!(
                "run job {} with the store {} again to continue from it; `rekindle prune --discard-memory` gives it up",
                self.job,
                self.store.display()
            ),
            None => "`rekindle prune` frees it".to_owned(),
        }
    }

    /// The leftovers of this job, if it has no supervisor.
    ///
    /// # Errors
    /// When the job's folder cannot be read: then there may be leftovers.
    pub fn of(folder: &JobFolder) -> Result<Vec<Leftover>> {
        let areas = Area::all_of(folder);
        if areas.is_empty() || folder.writer()? != Writer::Nobody {
            return Ok(Vec::new());
        }
        areas.iter().filter(|area| !area.is_in_use()).map(|area| Leftover::judge(folder, area)).collect()
    }

    pub(super) fn judge(folder: &JobFolder, area: &Area) -> Result<Leftover> {
        // A record of an earlier run, put back, says nothing about images of a later one.
        let completed = folder.record()?.filter(|record| record.outcome == Outcome::Completed);
        let is_over = |image: &Image| {
            let (Some(record), Some(manifest)) = (&completed, image.manifest()) else { return false };
            record.has(image.id, &manifest.lineage)
        };
        let stored = folder.images()?.into_iter().find(Image::is_good).map(|image| image.id);
        // An image older than one in the store is of no use. An image that is marked, or that we cannot read, may be of
        // use to others.
        let is_needed =
            |image: &Image| !folder.is_stored_besides(image) && stored.is_none_or(|stored| stored < image.id);
        let needed = area.images().into_iter().find(|image| !is_over(image) && is_needed(image)).map(|image| image.id);
        let store = folder.store();
        Ok(Leftover::new(folder.name(), store, area, needed))
    }

    fn new(job: &JobName, store: &Path, area: &Area, needed: Option<ImageId>) -> Leftover {
        Leftover {
            job: job.clone(),
            store: store.to_owned(),
            path: area.path().to_owned(),
            medium: area.medium(),
            bytes: area.slots().iter().map(Slot::allocated).sum(),
            needed,
        }
    }

    /// The area that is mounted here, unless its supervisor may be alive.
    fn mounted(dir: Beneath, trust: &Trust) -> Option<Leftover> {
        let owner = Owner::read(&dir)?;
        let folder = owner.open(trust);
        if let Ok(folder) = &folder
            && !is_run_elsewhere(folder)
            && mounted::of(folder).is_some_and(|its| its == dir)
        {
            return Leftover::of(folder).ok()?.into_iter().find(|left| left.path == dir.path());
        }
        if owner.may_live() {
            return None;
        }
        let area = Area::of(dir, Medium::Memory, trust).ok()?;
        if let Ok(left) = folder.and_then(|folder| Leftover::judge(&folder, &area)) {
            return Some(left);
        }
        // The job was removed, or its store cannot be read. Any image may be the only copy.
        let needed = area.images().into_iter().map(|image| image.id).next();
        Some(Leftover::new(&owner.job, owner.store(), &area, needed))
    }

    /// Frees it, unless it is in use again, or is needed and to be kept. Answers whether it is free now.
    pub fn free(&self, trust: &Trust, only: OnlyCopies) -> bool {
        let may_go = |left: &Leftover| left.needed.is_none() || only == OnlyCopies::Discard;
        let folder = Store::open(&self.store, Access::Read).and_then(|it| it.with_trust(trust.clone()).job(&self.job));
        let area = |folder| Area::all_of(folder).into_iter().find(|area| area.path() == self.path);
        if let Ok(folder) = &folder
            && !is_run_elsewhere(folder)
            && let Some(area) = area(folder)
        {
            // A supervisor may have been started since.
            let Ok(_lock) = folder.lock() else { return false };
            if area.is_in_use() || !Leftover::judge(folder, &area).is_ok_and(|left| may_go(&left)) {
                return false;
            }
            area.slots().iter().for_each(|slot| folder.drop_links(slot));
            return area.close().is_ok();
        }
        match mounted::at(&self.path).and_then(|dir| Leftover::mounted(dir, trust)) {
            Some(left) if may_go(&left) => self.unmount(folder.as_ref().ok(), trust).is_ok(),
            _ => false,
        }
    }

    /// Unmounts an area without a job, or whose job runs elsewhere. Never by force: a file that is open there means that
    /// it is in use. Links that the store's copy of an image needs stay, as in [`JobFolder::drop_links`].
    fn unmount(&self, folder: Option<&JobFolder>, trust: &Trust) -> std::result::Result<(), FileError> {
        let area = mounted::at(&self.path).and_then(|dir| Area::of(dir, Medium::Memory, trust).ok());
        let images = area.map(|area| area.images()).unwrap_or_default().into_iter();
        let images = images.filter(|image| !folder.is_some_and(|folder| folder.is_stored(image.id)));
        // Only the manifests stay: what has the area open is in its way.
        let manifests: Vec<Manifest> = images.filter_map(|image| image.manifest().cloned()).collect();
        mounted::unmount(&self.path, MntFlags::empty())?;
        for manifest in &manifests {
            manifest.saved_links.iter().for_each(|link| links::remove(manifest, link));
        }
        Ok(())
    }
}

/// Whether another machine has continued the job since. Its area there can have the same path as one here.
fn is_run_elsewhere(folder: &JobFolder) -> bool {
    let here = Holder::this_process().boot_id;
    matches!(folder.writer(), Ok(Writer::Known(holder)) if holder.boot_id != here)
}

/// The areas in memory below `base`.
fn areas(base: &Path) -> impl Iterator<Item = Beneath> {
    // A path without links, as the mount table has it.
    let base = base.canonicalize().unwrap_or_else(|_| base.to_owned());
    mounted::all().into_iter().filter(move |dir| dir.path().starts_with(&base))
}

/// The leftovers of all jobs of this store. Jobs whose folder cannot be read are skipped.
#[must_use]
pub fn find(store: &Store) -> Vec<Leftover> {
    let jobs = store.jobs().unwrap_or_default().into_iter();
    jobs.filter_map(|job| Leftover::of(&store.job(&job).ok()?).ok()).flatten().collect()
}

/// Leftovers in memory below `base` that belong to other stores than this one, to jobs that are gone, or to jobs that
/// another machine has continued.
#[must_use]
pub fn elsewhere(base: &Path, store: &Path, trust: &Trust) -> Vec<Leftover> {
    // A store without links in its path, as areas note it.
    let store = store.canonicalize().unwrap_or_else(|_| store.to_owned());
    let is_elsewhere = |left: &Leftover| {
        let folder = Store::open(&left.store, Access::Read).and_then(|it| it.with_trust(trust.clone()).job(&left.job));
        folder.is_ok_and(|folder| is_run_elsewhere(&folder))
    };
    let is_found =
        |left: &Leftover| left.store == store && store.join(left.job.as_str()).is_dir() && !is_elsewhere(left);
    areas(base).filter_map(|dir| Leftover::mounted(dir, trust)).filter(|left| !is_found(left)).collect()
}

/// Frees all leftovers that are not needed, except those of one job. Returns what was freed, and what remains.
#[must_use]
pub fn release(store: &Store, except: &JobName) -> (Vec<Leftover>, Vec<Leftover>) {
    let others = find(store).into_iter().filter(|left| left.job != *except);
    others.partition(|left| left.needed.is_none() && left.free(store.trust(), OnlyCopies::Keep))
}

/// Areas mounted below `base` that belong to no job of this store, and whose owner cannot be judged: those of an
/// earlier version, or of a container.
#[must_use]
pub fn strangers(base: &Path, store: &Store) -> Vec<PathBuf> {
    let jobs = store.jobs().unwrap_or_default().into_iter().filter_map(|job| store.job(&job).ok());
    let known: Vec<Beneath> = jobs.flat_map(|folder| Area::all_of(&folder)).map(|area| area.dir).collect();
    let is_strange = |dir: &Beneath| Owner::read(dir).is_none_or(|owner| owner.is_out_of_sight());
    areas(base).filter(|dir| !known.contains(dir) && is_strange(dir)).map(|dir| dir.path().to_owned()).collect()
}
