//! Slots on the file system of the store, for a job whose images do not fit into memory.
//!
//! Images in them are packed as those in memory are. Until then nothing is synced: an image counts as long as the machine runs,
//! and one of another boot does not. The file `boot` says in which boot the slots were written. It is written when all
//! that was there before is gone, so a slot of this boot was written in this boot.
//!
//! A page that was written may be read back from the disk, so parts get their hashes when the image is sealed. They are compared
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

/// Whether it was written since the machine was started, and is as safe as it was made.
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

/// Removes slots that were written in another boot. Answers whether there were any.
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
    /// The job's slots on the disk, made where there are none.
    ///
    /// # Errors
    /// When they cannot be made, or others could write there.
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
