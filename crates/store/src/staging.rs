//! Staging areas for images that are not in the store yet: a tmpfs for each job, or a folder of the job in the store.
//!
//! ```text
//! /run/rekindle/JOB-HASH/   the tmpfs; 0711, because the job may run as another user
//!   owner.json              whose area it is: the job's folder does not say where it is ([`mounted`])
//!   landing/                PID: a hard link to a slot's gpu/PID, while that process is checkpointed or restored
//!   slots/                  0700
//!     0/  1/                manifest.json: a whole image is here; criu/ files/ dump.log as in the store
//!       gpu/PID             device memory of a process, as the driver wrote it
//!       spool/N             page files of CRIU; criu/pages-N.img is another name of the same
//! STORE/JOB/slots/          on the disk, where there is no tmpfs ([`disk`]); 0700
//!   boot                    the boot of the machine in which the slots were written
//!   0/  1/                  as above, without landing files; the parts have hashes
//! ```
//!
//! Invariants:
//! - A slot with a manifest contains a complete image. The manifest is written last and removed first.
//! - The slot with the newest good image is not written to, unless memory has room for one slot only and that image is
//!   in the store ([`admission`]).
//! - Files of pages (`gpu/`, `spool/`) are kept when their image is removed: writing to existing pages is three times
//!   as fast.
//!
//! After a power cut all of this is lost, and the newest image of the store counts: slots on the disk are of another
//! boot then, and are removed. If only the supervisor ends, the next one finds the slots and continues from their
//! images.

pub mod admission;
pub mod disk;
pub mod leftovers;
mod mounted;
mod slot;

use std::path::{Path, PathBuf};

use nix::mount::MntFlags;

use mounted::Owner;
pub use mounted::{HugePages, SOURCE, try_mount};
pub use slot::{Filling, Slot};

use super::file_error::{FileError, failed};
use super::folder::JobFolder;
use super::image::{Image, Place};
use super::links;
use super::lock::WriterLock;
use super::rights;
use super::trust::Trust;
use rekindle_os::beneath::{Beneath, Owners};

/// The folder of the landing files, in an area in memory.
const LANDING: &str = "landing";
/// The folder of the slots, in an area in memory.
const SLOTS: &str = "slots";

/// Why there is no staging area.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A folder or a file could not be created, read or removed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Other users could write there.
    #[error(transparent)]
    Rights(#[from] super::error::Error),
    /// Another file system is mounted there.
    #[error("{} is a mount point of another file system: unmount it, or set snapshot.staging-directory", .0.display())]
    Foreign(PathBuf),
    /// There is something that is neither a file nor a folder.
    #[error("an image can contain only files and folders, and {} is neither", .0.display())]
    Stray(PathBuf),
}

/// The medium of a staging area.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Medium {
    /// A tmpfs.
    Memory,
    /// The file system of the store.
    Disk,
}

impl Medium {
    /// The place of images in it.
    pub(super) fn place(self) -> Place {
        match self {
            Medium::Memory => Place::Staged,
            Medium::Disk => Place::Slot,
        }
    }
}

/// The staging area of one job.
#[derive(Debug)]
pub struct Area {
    dir: Beneath,
    medium: Medium,
    device: u64,
    trust: Trust,
}

impl Area {
    /// Mounts the job's tmpfs below `base`, or takes over the one of an earlier run, there or elsewhere, which may
    /// contain images. `size` is the maximum size of a new one in bytes; how much is used is decided for each snapshot.
    ///
    /// # Errors
    /// When it cannot be mounted, or others could write there.
    pub fn open(base: &Path, folder: &JobFolder, lock: &WriterLock, size: u64) -> Result<Area, Error> {
        folder.check_lock(lock)?;
        let dir = match mounted::of(folder) {
            Some(dir) => dir,
            None => mounted::new(base, &folder.place_name(), size)?,
        };
        rights::check(&dir)?;
        make(&dir.join(LANDING), 0o711)?;
        make(&dir.join(SLOTS), 0o700)?;
        for slot in slots(&dir, Medium::Memory, folder.trust()) {
            make(slot.dir(), 0o700)?;
        }
        let noted = Owner::of(folder).write(&dir);
        // A full tmpfs has no room for a new note. Without any, nobody would find the area.
        if !Owner::read(&dir).is_some_and(|owner| owner.is_of(folder)) {
            noted.map_err(failed("write a note in", &dir))?;
        }
        let area = Area::of(dir, Medium::Memory, folder.trust())?;
        area.clear_landing();
        Ok(area)
    }

    fn of(dir: Beneath, medium: Medium, trust: &Trust) -> Result<Area, FileError> {
        let device = mounted::device(&dir).map_err(failed("look at", &dir))?;
        Ok(Area { dir, medium, device, trust: trust.clone() })
    }

    /// All staging areas of the job, including those that an earlier run left and this one does not use.
    #[must_use]
    pub fn all_of(folder: &JobFolder) -> Vec<Area> {
        left(folder).into_iter().filter_map(|(dir, medium)| Area::of(dir, medium, folder.trust()).ok()).collect()
    }

    /// Whether the supervisor that opened it last is alive, as its note says. Only root can write that note, while the job's
    /// folder in the store, its lock included, may be anything.
    pub(crate) fn is_in_use(&self) -> bool {
        let owner = (self.medium == Medium::Memory).then(|| mounted::Owner::read(self.dir())).flatten();
        let others = owner.filter(|owner| owner.supervisor.pid != std::process::id());
        others.is_some_and(|owner| owner.supervisor.is_seen_alive())
    }

    /// Its medium.
    #[must_use]
    pub fn medium(&self) -> Medium {
        self.medium
    }

    /// Its folder: all access to what is in it goes through this.
    #[must_use]
    pub fn dir(&self) -> &Beneath {
        &self.dir
    }

    /// Its path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The folder in which processes look for their landing files.
    #[must_use]
    pub fn landing_dir(&self) -> Beneath {
        self.dir.join(LANDING)
    }

    /// Whether a tmpfs is still mounted there, with the folders that were created in it.
    #[must_use]
    pub fn is_there(&self) -> bool {
        // What is open here lasts when it is unmounted, so this looks at the path again.
        let Ok(now) = Beneath::root(self.path(), Owners::Any) else { return false };
        let has = |name: &str| mounted::device(&now.join(name)).is_ok_and(|device| device == self.device);
        has(SLOTS) && has(LANDING)
    }

    /// The two slots.
    #[must_use]
    pub fn slots(&self) -> [Slot; 2] {
        slots(&self.dir, self.medium, &self.trust)
    }

    /// Complete images in it, newest first.
    #[must_use]
    pub fn images(&self) -> Vec<Image> {
        let mut images: Vec<Image> = self.slots().iter().filter_map(Slot::image).collect();
        images.sort_by_key(|image| std::cmp::Reverse(image.id));
        images
    }

    /// Removes all landing files, so that memory that a process maps now is not in a file.
    pub(crate) fn clear_landing(&self) {
        for (file, _) in self.landing_dir().entries().unwrap_or_default() {
            let _ = file.remove_file();
        }
    }

    /// Unmounts it, or removes it from the disk; images that exist only here are lost.
    ///
    /// # Errors
    /// When it cannot be unmounted or removed.
    pub fn close(&self) -> Result<(), Error> {
        if self.medium == Medium::Disk {
            return Ok(disk::remove(&self.dir)?);
        }
        let is_mounted = mounted::at(self.path()).is_some_and(|dir| mounted::device(&dir).ok() == Some(self.device));
        if !is_mounted {
            // Somebody else has unmounted it. A later restart may have written device memory to the folder below.
            if let Ok(place) = Beneath::at(self.path()) {
                let _ = place.join(LANDING).remove_dir();
                let _ = place.remove_dir();
            }
            return Ok(());
        }
        // A process with an open file must not prevent the unmount: the memory is freed when the last file is closed. We
        // have its folder open ourselves.
        Ok(mounted::unmount(self.path(), MntFlags::MNT_DETACH)?)
    }
}

impl JobFolder {
    /// Complete images in the job's staging areas, newest first. Some of them may also be in the store. Empty if there is
    /// no area, or if its permissions were changed.
    #[must_use]
    pub fn staged(&self) -> Vec<Image> {
        let slots = left(self).into_iter().flat_map(|(dir, medium)| slots(&dir, medium, self.trust()));
        let mut images: Vec<Image> = slots.filter_map(|slot| slot.image()).collect();
        images.sort_by_key(|image| std::cmp::Reverse(image.id));
        images
    }

    /// Removes the hard links beside the user's files that belong to the image in a slot, unless the store has that
    /// image and still needs them. Call it before the slot is emptied or overwritten.
    pub fn drop_links(&self, slot: &Slot) {
        let image = slot.image().filter(|image| !self.is_stored(image.id));
        if let Some(manifest) = image.as_ref().and_then(Image::manifest) {
            manifest.saved_links.iter().for_each(|link| links::remove(manifest, link));
        }
    }
}

/// The staging areas of the job.
fn left(folder: &JobFolder) -> Vec<(Beneath, Medium)> {
    let memory = mounted::of(folder).map(|dir| (dir, Medium::Memory));
    let disk = disk::dir(folder);
    let disk = disk::is_of_this_boot(&disk).then_some((disk, Medium::Disk));
    memory.into_iter().chain(disk).collect()
}

fn slots(dir: &Beneath, medium: Medium, trust: &Trust) -> [Slot; 2] {
    let names = match medium {
        Medium::Memory => ["slots/0", "slots/1"],
        Medium::Disk => ["0", "1"],
    };
    names.map(|name| Slot::new(dir.join(name), medium, trust.clone()))
}

/// Creates a folder with this mode, whatever the umask is: a job of another user must be able to enter all folders
/// except the slots.
fn make(dir: &Beneath, mode: u32) -> Result<(), FileError> {
    dir.make_dir_unless_there(mode).map_err(failed("make", dir))
}

#[cfg(test)]
mod tests;
