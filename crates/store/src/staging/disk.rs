//! Slots on the file system of the store, for a job whose images do not fit into memory.
//!
//! Images in them are packed like those in memory. Until then nothing is synced: an image is valid as long as the
//! machine runs, and an image of another boot is not. The file `boot` contains the boot in which the slots were
//! written. It is written after all older content was removed, so all slots are of that boot.
//!
//! Pages may be read back from the disk, so the parts are hashed when the image is sealed. The hashes are compared
//! before the image is packed or restored.

use std::io;

use super::{Area, Error, Medium, make, slots};
use crate::folder::JobFolder;
use crate::lock::WriterLock;
use crate::rights;
use crate::{FileError, failed};
use rekindle_os::beneath::Beneath;
use rekindle_os::{durable, process};

/// The folder, below that of the job.
const FOLDER: &str = "slots";
/// The boot id, in the folder.
const BOOT: &str = "boot";
/// Maximum size of that file.
const MAX_BYTES: u64 = 4 << 10;

pub(super) fn dir(folder: &JobFolder) -> Beneath {
    folder.dir().join(FOLDER)
}

/// Whether it was written since the machine was booted, and its permissions are unchanged.
pub(super) fn is_of_this_boot(dir: &Beneath) -> bool {
    let Ok(written) = dir.join(BOOT).content(MAX_BYTES) else { return false };
    rights::check(dir).is_ok() && process::boot_id().is_ok_and(|boot| boot.as_bytes() == written)
}

pub(super) fn remove(dir: &Beneath) -> Result<(), FileError> {
    match dir.remove_dir_all() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", dir)(error)),
        _ => Ok(()),
    }
}

/// Removes slots of another boot. Returns whether there were any.
///
/// # Errors
/// When they cannot be removed.
pub fn sweep(folder: &JobFolder, lock: &WriterLock) -> Result<bool, Error> {
    folder.check_lock(lock)?;
    let dir = dir(folder);
    match dir.folder() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        there => drop(there.map_err(failed("look at", &dir))?),
    }
    if is_of_this_boot(&dir) {
        return Ok(false);
    }
    slots(&dir, Medium::Disk, folder.trust()).iter().for_each(|slot| folder.drop_links(slot));
    remove(&dir)?;
    Ok(true)
}

impl Area {
    /// The job's slots on the disk, created if they do not exist.
    ///
    /// # Errors
    /// When they cannot be created, or others could write there.
    pub fn on_disk(folder: &JobFolder, lock: &WriterLock) -> Result<Area, Error> {
        sweep(folder, lock)?;
        let dir = dir(folder);
        make(&dir, 0o700)?;
        rights::check(&dir)?;
        if !is_of_this_boot(&dir) {
            let file = dir.join(BOOT);
            let boot = process::boot_id().map_err(failed("read the boot id for", &file))?;
            durable::write_file(&file, boot.as_bytes(), 0o600).map_err(failed("write", &file))?;
        }
        slots(&dir, Medium::Disk, folder.trust()).iter().try_for_each(|slot| make(slot.dir(), 0o700))?;
        Ok(Area::of(dir, Medium::Disk, folder.trust())?)
    }
}
