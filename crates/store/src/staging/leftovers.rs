//! Memory and disk space that supervisors have left: a staging area stays when its supervisor is killed.
//!
//! The next `run` of the same job takes its own area over. One of a job that is never run again would hold its memory until
//! the machine restarts. Invariant: nothing is given back that a job could still go on from.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Area, Medium, SOURCE, Slot};
use crate::error::Result;
use crate::image::Image;
use crate::lock::Writer;
use crate::{ImageId, JobFolder, JobName, Outcome, Store};

/// A staging area that no supervisor uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Leftover {
    /// The job.
    pub job: JobName,
    /// Where it is.
    pub path: PathBuf,
    /// What it lies on.
    pub medium: Medium,
    /// What it takes there, in bytes.
    pub bytes: u64,
    /// The newest image that is nowhere else, and that the job could go on from.
    pub needed: Option<ImageId>,
}

impl std::fmt::Display for Leftover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (path, bytes) = (self.path.display(), bytesize::ByteSize::b(self.bytes));
        let medium = match self.medium {
            Medium::Memory => "of memory",
            Medium::Disk => "on the disk",
        };
        write!(f, "a supervisor that is gone left {bytes} {medium} at {path}")?;
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
                "the same `rekindle run` of job {} again goes on from it, and brings it to the store; `{} {}` gives it up",
                self.job,
                match self.medium {
                    Medium::Memory => "umount",
                    Medium::Disk => "rm -r",
                },
                self.path.display()
            ),
            None => "the next `rekindle run` with this store gives it back".to_owned(),
        }
    }

    /// Those of this job, if it has no supervisor.
    ///
    /// # Errors
    /// When the job's folder cannot be read: then nothing is known.
    pub fn of(folder: &JobFolder) -> Result<Vec<Leftover>> {
        let areas = Area::all_of(folder);
        if areas.is_empty() || folder.writer()? != Writer::Nobody {
            return Ok(Vec::new());
        }
        areas.iter().map(|area| Leftover::judge(folder, area)).collect()
    }

    fn judge(folder: &JobFolder, area: &Area) -> Result<Leftover> {
        let over = matches!(folder.record()?.map(|record| record.outcome), Some(Outcome::Completed));
        let stored = folder.images()?.into_iter().find(Image::is_good).map(|image| image.id);
        // An older one than the store has is of no use, as for the supervisor that comes next. One that is marked, or cannot
        // be read by us, may be of use to others.
        let is_needed = |id: &ImageId| !folder.is_stored(*id) && stored.is_none_or(|stored| stored < *id);
        let needed = area.images().into_iter().map(|image| image.id).find(|id| !over && is_needed(id));
        let bytes = area.slots().iter().map(Slot::allocated).sum();
        Ok(Leftover { job: folder.name().clone(), path: area.path().to_owned(), medium: area.medium(), bytes, needed })
    }
}

/// What supervisors of the jobs of this store have left. A job whose folder cannot be looked at is left out.
#[must_use]
pub fn find(store: &Store) -> Vec<Leftover> {
    let jobs = store.jobs().unwrap_or_default().into_iter();
    jobs.filter_map(|job| Leftover::of(&store.job(&job).ok()?).ok()).flatten().collect()
}

/// Gives back what is not needed of it, but that of one job. Answers what went, and then what is left.
#[must_use]
pub fn give_back(store: &Store, except: &JobName) -> (Vec<Leftover>, Vec<Leftover>) {
    find(store).into_iter().filter(|left| left.job != *except).partition(|left| give_back_of(store, left).is_some())
}

fn give_back_of(store: &Store, left: &Leftover) -> Option<()> {
    if left.needed.is_some() {
        return None;
    }
    let folder = store.job(&left.job).ok()?;
    let _lock = folder.lock().ok()?;
    // A supervisor may have been there since.
    let area = Area::all_of(&folder).into_iter().find(|area| area.path() == left.path)?;
    Leftover::judge(&folder, &area).ok().filter(|left| left.needed.is_none())?;
    area.slots().iter().for_each(|slot| folder.drop_links(slot));
    area.close().ok()
}

/// Where areas are mounted below `base` that no job of this store knows of: their jobs were removed, or are of another store.
#[must_use]
pub fn strangers(base: &Path, store: &Store) -> Vec<PathBuf> {
    let jobs = store.jobs().unwrap_or_default().into_iter().filter_map(|job| store.job(&job).ok());
    let known: Vec<PathBuf> = jobs.flat_map(|folder| Area::all_of(&folder)).map(|area| area.path).collect();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // ID PARENT DEVICE ROOT POINT OPTIONS... - TYPE SOURCE OPTIONS (proc_pid_mountinfo(5)); a space in a name is \040.
    let ours = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        (kind.split(' ').nth(1)? == SOURCE).then(|| mount.split(' ').nth(4)).flatten()
    });
    let ours = ours.map(|point| PathBuf::from(point.replace("\\040", " ")));
    ours.filter(|point| point.starts_with(base) && !known.contains(point)).collect()
}
