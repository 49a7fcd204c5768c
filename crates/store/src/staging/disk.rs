//! Slots on the file system of the store, for a job whose images do not fit into memory.
//!
//! Images in them are packed like those in memory. Until then nothing is synced: an image is valid as long as the
//! machine runs, and an image of another boot is not. The file `boot` contains the boot in which the slots were
//! written. It is written after all older content was removed, so all slots are of that boot.
//!
//! Pages may be read back from the disk, so the parts are hashed when the image is sealed. The hashes are compared
//! before the image is packed or restored.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Area, Error, LINK, Medium, make, slots};
use crate::folder::JobFolder;
use crate::lock::WriterLock;
use crate::rights;
use crate::{FileError, failed};
use rekindle_os::{durable, process};

/// The folder, below that of the job.
const FOLDER: &str = "slots";
/// The boot id, in the folder.
const BOOT: &str = "boot";

pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(FOLDER)
}

/// Whether it was written since the machine was booted, and its permissions are unchanged.
pub(super) fn is_of_this_boot(path: &Path) -> bool {
    let Ok(written) = fs::read_to_string(path.join(BOOT)) else { return false };
    rights::check(path).is_ok() && process::boot_id().is_ok_and(|boot| boot == written)
}

pub(super) fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Removes slots of another boot. Returns whether there were any.
///
/// # Errors
/// When they cannot be removed.
pub fn sweep(folder: &JobFolder, lock: &WriterLock) -> Result<bool, Error> {
    folder.check_lock(lock)?;
    let path = path(folder.path());
    if !path.exists() || is_of_this_boot(&path) {
        return Ok(false);
    }
    slots(&path, Medium::Disk, folder.trust()).iter().for_each(|slot| folder.drop_links(slot));
    remove(&path)?;
    Ok(true)
}

impl Area {
    /// The job's slots on the disk, created if they do not exist.
    ///
    /// # Errors
    /// When they cannot be created, or others could write there.
    pub fn on_disk(folder: &JobFolder, lock: &WriterLock) -> Result<Area, Error> {
        sweep(folder, lock)?;
        let path = path(folder.path());
        make(&path, 0o700)?;
        rights::check(&path)?;
        if !is_of_this_boot(&path) {
            let file = path.join(BOOT);
            let boot = process::boot_id().map_err(failed("read the boot id for", &file))?;
            durable::write_file(&file, boot.as_bytes(), 0o600).map_err(failed("write", &file))?;
        }
        let slots = slots(&path, Medium::Disk, folder.trust());
        slots.iter().try_for_each(|slot| make(slot.dir(), 0o700))?;
        let link = folder.path().join(LINK);
        Ok(Area { path, medium: Medium::Disk, device: 0, link, trust: folder.trust().clone() })
    }
}
