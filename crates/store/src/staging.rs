//! Staging areas for images that are not in the store yet: a tmpfs for each job, or a folder of the job in the store.
//!
//! ```text
//! /run/rekindle/JOB-HASH/   the tmpfs; 0711, because the job may run as another user
//!   owner.json              whose area it is, for those who do not find the job's folder
//!   landing/                PID: a hard link to a slot's gpu/PID, while that process is checkpointed or restored
//!   slots/                  0700
//!     0/  1/                manifest.json: a whole image is here; criu/ files/ dump.log as in the store
//!       gpu/PID             device memory of a process, as the driver wrote it
//!       spool/N             page files of CRIU; criu/pages-N.img is another name of the same
//! STORE/JOB/staging         a symbolic link to it
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
mod slot;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

pub use slot::{Filling, Slot};

use super::file_error::{FileError, failed};
use super::folder::JobFolder;
use super::image::{Image, Place};
use super::links;
use super::lock::WriterLock;
use super::rights;
use super::trust::Trust;
use rekindle_os::durable;

/// The name of the link in the job's folder.
const LINK: &str = "staging";

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

/// Whether tmpfs supports the mount option for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// It supports the option.
    Taken,
    /// The kernel does not support it.
    Absent,
}

/// Checks whether [`Area::open`] would work in `base`: mounts a small tmpfs in a temporary folder there, or in the
/// nearest existing folder above, and unmounts it.
///
/// # Errors
/// When it cannot be mounted, or others could write there.
pub fn try_mount(base: &Path) -> Result<HugePages, Error> {
    let there = base.ancestors().find(|path| path.exists()).unwrap_or(base);
    if there == base {
        rights::check(base)?;
    }
    let folder = tempfile::Builder::new().prefix(".rekindle-doctor-").tempdir_in(there);
    let folder = folder.map_err(failed("make a folder in", there))?;
    let huge = mount_tmpfs(folder.path(), 1 << 20).map_err(failed("mount a tmpfs at", folder.path()))?;
    umount2(folder.path(), MntFlags::MNT_DETACH).map_err(|e| failed("unmount", folder.path())(e.into()))?;
    Ok(huge)
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
    path: PathBuf,
    medium: Medium,
    device: u64,
    link: PathBuf,
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
        let path = match mounted(folder.path()) {
            Some(path) => path,
            None => {
                let missing: Vec<&Path> = base.ancestors().take_while(|folder| !folder.exists()).collect();
                missing.into_iter().rev().try_for_each(|folder| make(folder, 0o755))?;
                rights::check(base)?;
                base.join(folder.place_name())
            }
        };
        make(&path, 0o711)?;
        if !is_mounted(&path).map_err(failed("look at", &path))? {
            mount_tmpfs(&path, size).map_err(failed("mount a tmpfs at", &path)).map(drop)?;
        } else if statfs(&path).map_err(|e| failed("look at", &path)(e.into()))?.filesystem_type() != TMPFS_MAGIC {
            return Err(Error::Foreign(path));
        }
        rights::check(&path)?;
        make(&path.join("landing"), 0o711)?;
        make(&path.join("slots"), 0o700)?;
        for slot in slots(&path, Medium::Memory, folder.trust()) {
            make(slot.dir(), 0o700)?;
        }
        // Without it the area is only found through the job's folder.
        let _ = leftovers::Owner::of(folder).write(&path);
        let device = fs::metadata(&path).map_err(failed("look at", &path))?.dev();
        let link = folder.path().join(LINK);
        durable::replace_link(&path, &link).map_err(failed("make the link", &link))?;
        let area = Area { path, medium: Medium::Memory, device, link, trust: folder.trust().clone() };
        area.clear_landing();
        Ok(area)
    }

    /// All staging areas of the job, including those that an earlier run left and this one does not use.
    #[must_use]
    pub fn all_of(folder: &JobFolder) -> Vec<Area> {
        let area = |(path, medium): (PathBuf, Medium)| {
            let device = fs::metadata(&path).ok()?.dev();
            Some(Area { path, medium, device, link: folder.path().join(LINK), trust: folder.trust().clone() })
        };
        left(folder.path()).into_iter().filter_map(area).collect()
    }

    /// Its medium.
    #[must_use]
    pub fn medium(&self) -> Medium {
        self.medium
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder in which processes look for their landing files.
    #[must_use]
    pub fn landing_dir(&self) -> PathBuf {
        self.path.join("landing")
    }

    /// Whether a tmpfs is still mounted there, with the folders that were created in it.
    #[must_use]
    pub fn is_there(&self) -> bool {
        let folders = [self.path.join("slots"), self.landing_dir()];
        folders.iter().all(|folder| fs::metadata(folder).is_ok_and(|meta| meta.dev() == self.device))
    }

    /// The two slots.
    #[must_use]
    pub fn slots(&self) -> [Slot; 2] {
        slots(&self.path, self.medium, &self.trust)
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
        for entry in fs::read_dir(self.landing_dir()).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Unmounts it, or removes it from the disk; images that exist only here are lost.
    ///
    /// # Errors
    /// When it cannot be unmounted or removed.
    pub fn close(&self) -> Result<(), Error> {
        if self.medium == Medium::Disk {
            return Ok(disk::remove(&self.path)?);
        }
        let _ = fs::remove_file(&self.link);
        if !is_mounted(&self.path).unwrap_or(false) {
            // Somebody else has unmounted it. A later restart may have written device memory to the folder below.
            let _ = fs::remove_dir(self.landing_dir());
            let _ = fs::remove_dir(&self.path);
            return Ok(());
        }
        // A process with an open file must not prevent the unmount: the memory is freed when the last file is closed.
        let unmounted = umount2(&self.path, MntFlags::empty()).or_else(|_| umount2(&self.path, MntFlags::MNT_DETACH));
        unmounted.map_err(|e| failed("unmount", &self.path)(e.into()))?;
        Ok(fs::remove_dir(&self.path).map_err(failed("remove", &self.path))?)
    }
}

impl JobFolder {
    /// Complete images in the job's staging areas, newest first. Some of them may also be in the store. Empty if there is
    /// no area, or if its permissions were changed.
    #[must_use]
    pub fn staged(&self) -> Vec<Image> {
        let slots = left(self.path()).into_iter().flat_map(|(path, medium)| slots(&path, medium, self.trust()));
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

/// The staging areas of the job's folder.
fn left(folder: &Path) -> Vec<(PathBuf, Medium)> {
    let memory = mounted(folder).map(|path| (path, Medium::Memory));
    let disk = disk::path(folder);
    let disk = disk::is_of_this_boot(&disk).then_some((disk, Medium::Disk));
    memory.into_iter().chain(disk).collect()
}

/// The staging area that the job's folder names, if a tmpfs is mounted there and its permissions are unchanged. The link
/// is on the store's disk, where others may be able to change it, and images in memory have no hashes: so nothing but
/// memory counts, and a disk that is mounted there does not.
fn mounted(folder: &Path) -> Option<PathBuf> {
    let path = fs::read_link(folder.join(LINK)).ok()?;
    let is_memory = || statfs(&path).is_ok_and(|there| there.filesystem_type() == TMPFS_MAGIC);
    (rights::check(&path).is_ok() && is_mounted(&path).unwrap_or(false) && is_memory()).then_some(path)
}

fn slots(path: &Path, medium: Medium, trust: &Trust) -> [Slot; 2] {
    let names = match medium {
        Medium::Memory => ["slots/0", "slots/1"],
        Medium::Disk => ["0", "1"],
    };
    names.map(|name| Slot::new(path.join(name), medium, trust.clone()))
}

fn is_mounted(path: &Path) -> io::Result<bool> {
    let above = path.parent().unwrap_or(path);
    Ok(fs::metadata(path)?.dev() != fs::metadata(above)?.dev())
}

/// The source of our mounts in a mount table.
pub const SOURCE: &str = "rekindle";

/// Mounts a tmpfs, with huge pages for large files if the kernel supports them.
fn mount_tmpfs(path: &Path, size: u64) -> io::Result<HugePages> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let plain = format!("mode=0711,size={size}");
    let huge = format!("{plain},huge=within_size");
    let with = |options: &str| mount(Some(SOURCE), path, Some("tmpfs"), flags, Some(options));
    match with(&huge) {
        Ok(()) => Ok(HugePages::Taken),
        Err(_) => Ok(with(&plain).map(|()| HugePages::Absent)?),
    }
}

/// Creates a folder with this mode, whatever the umask is: a job of another user must be able to enter all folders
/// except the slots.
fn make(path: &Path, mode: u32) -> Result<(), FileError> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed("make", path)(error)),
        _ => {}
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed("set the mode of", path))
}

#[cfg(test)]
mod tests;
