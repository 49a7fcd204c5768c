//! Removes a whole job, in an order that a crash can interrupt:
//!
//! 1. `JOB` becomes `.del-JOB`, and the store is synced. From here on there is no such job. If an image is pinned
//!    (perhaps since a moment ago), it becomes `JOB` again and stays.
//! 2. The hard links that its images have beside the user's files are removed.
//! 3. Its memory is released.
//! 4. Everything else is removed.
//!
//! After a crash the next removal or the next start of a job of that name continues with step 2. Whoever removes holds
//! the lock file in the folder, which moves with it: so a new job of that name does not begin before its predecessor's
//! memory, which has the same place, is released.

use std::io;

use super::remove::remove_links;
use super::tags;
use crate::error::{Error, Result};
use crate::folder::JobFolder;
use crate::folders::{list, remove_all};
use crate::id::{ImageId, JobName};
use crate::lock::{self, WriterLock};
use crate::names::DELETED_PREFIX;
use crate::staging::{Area, Medium};
use crate::store::Store;
use rekindle_os::beneath::Beneath;
use rekindle_os::durable;

/// What to do about pinned images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinned {
    /// The job stays if it has one.
    Keep,
    /// They are removed with the job.
    Remove,
}

impl Store {
    /// Removes a job with its images, its output and its memory. Copies in a replica stay.
    ///
    /// # Errors
    /// [`Error::WrongLock`]; [`Error::Pinned`] and [`Error::Read`], then nothing was removed; [`Error::Remove`].
    pub fn remove_job(&self, folder: &JobFolder, lock: &WriterLock, pinned: Pinned) -> Result<()> {
        let path = folder.path();
        self.finish_removal(folder.name())?;
        folder.check_lock(lock)?;
        keep_pinned(folder, pinned)?;
        let doomed = self.doomed(folder.name());
        let failed = |source| Error::Remove { path: path.to_owned(), source };
        durable::publish_dir(folder.dir(), &doomed).map_err(failed)?;
        if let Err(error) = keep_pinned(&folder.renamed(doomed.clone()), pinned) {
            durable::publish_dir(&doomed, folder.dir())
                .map_err(|source| Error::Write { path: path.to_owned(), source })?;
            return Err(error);
        }
        self.finish(folder.name())
    }

    /// Completes the interrupted removal of a job of this name; answers whether there was one.
    ///
    /// # Errors
    /// [`Error::BeingRemoved`]: another process is at it. [`Error::Remove`], [`Error::Lock`].
    pub fn finish_removal(&self, name: &JobName) -> Result<bool> {
        let doomed = self.doomed(name);
        if !doomed.is_dir() {
            return Ok(false);
        }
        match lock::acquire(&doomed, name) {
            Ok(_lock) => self.finish(name).map(|()| true),
            // Another process has just completed it.
            Err(_) if !doomed.is_dir() => Ok(false),
            Err(Error::Supervised { .. } | Error::PerhapsSupervised { .. }) => Err(Error::BeingRemoved(name.clone())),
            Err(error) => Err(error),
        }
    }

    /// The jobs whose removal was begun and has not ended.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn half_removed(&self) -> Result<Vec<JobName>> {
        let names = list(self.dir())?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(DELETED_PREFIX)?.parse().ok()).collect())
    }

    /// Whether the removal of a job of this name was begun and has not ended.
    #[must_use]
    pub fn is_half_removed(&self, name: &JobName) -> bool {
        self.doomed(name).is_dir()
    }

    fn doomed(&self, name: &JobName) -> Beneath {
        self.dir().join(format!("{DELETED_PREFIX}{name}"))
    }

    /// Steps 2 to 4.
    fn finish(&self, name: &JobName) -> Result<()> {
        let path = self.doomed(name);
        // Anybody who can write the store can make a folder of that name. What a job of this name has is not touched.
        let present = JobFolder::existing(name.clone(), self.dir().join(name.as_str()), self.trust()).ok();
        let others = present.as_ref().map_or_else(|| Ok(Vec::new()), JobFolder::images)?;
        if let Ok(folder) = JobFolder::existing(name.clone(), path.clone(), self.trust()) {
            let is_of_present = present.is_some_and(|present| present.has_run());
            let staged = if is_of_present { Vec::new() } else { folder.staged() };
            for image in folder.images().unwrap_or_default().into_iter().chain(staged) {
                image.manifest().iter().for_each(|manifest| remove_links(manifest, &others));
            }
            let areas = if is_of_present { Vec::new() } else { Area::all_of(&folder) };
            for area in areas.iter().filter(|area| area.medium() == Medium::Memory && !area.is_in_use()) {
                let failed = |error| Error::Remove { path: area.path().to_owned(), source: io::Error::other(error) };
                area.close().map_err(failed)?;
            }
        }
        remove_all(&path)?;
        durable::sync_dir(self.dir()).map_err(|source| Error::Write { path: self.path().to_owned(), source })
    }
}

impl JobFolder {
    /// Bytes of memory that the job's images take.
    #[must_use]
    pub fn memory(&self) -> u64 {
        let areas = Area::all_of(self);
        let in_memory = areas.iter().filter(|area| area.medium() == Medium::Memory);
        in_memory.flat_map(Area::slots).map(|slot| slot.allocated()).sum()
    }

    /// The pinned images, newest first. Tags that cannot be read count as a pin.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn pinned(&self) -> Result<Vec<ImageId>> {
        // The removal may have been interrupted when this was gone already.
        if !self.images_dir().is_there() {
            return Ok(Vec::new());
        }
        let images = self.images()?.into_iter();
        Ok(images.filter(|image| tags::read(&image.dir).is_pinned()).map(|image| image.id).collect())
    }
}

fn keep_pinned(folder: &JobFolder, pinned: Pinned) -> Result<()> {
    match pinned {
        Pinned::Remove => Ok(()),
        Pinned::Keep => folder.pinned()?.first().map_or(Ok(()), |image| Err(Error::Pinned(*image))),
    }
}
