//! The staging areas in memory of this machine: what its mount table and their notes show, never what a store names.
//!
//! Whoever can write a store can put any link there. So a tmpfs is an area of ours only if it was mounted as one, its
//! folder is root's alone, and its note, which only root can write, names the job. Nothing else is mounted on, unmounted
//! or changed.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde::{Deserialize, Serialize};

use super::{Error, make};
use crate::error::Result as StoreResult;
use crate::folder::JobFolder;
use crate::holder::Holder;
use crate::id::JobName;
use crate::rights;
use crate::store::{Access, Store};
use crate::trust::Trust;
use crate::{FileError, failed};
use rekindle_os::beneath::{Beneath, Owners};
use rekindle_os::{durable, mounts};

/// The source of our mounts in a mount table.
pub const SOURCE: &str = "rekindle";
/// The note about its owner, in an area in memory.
const OWNER: &str = "owner.json";
/// Maximum size of that note.
const MAX_BYTES: u64 = 64 << 10;

/// Whose area it is.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Owner {
    pub(super) job: JobName,
    /// The job's folder.
    pub(super) folder: PathBuf,
    /// The supervisor that opened the area last.
    pub(super) supervisor: Holder,
}

impl Owner {
    /// This process, as the supervisor of the job.
    pub(super) fn of(folder: &JobFolder) -> Owner {
        let (job, path) = (folder.name().clone(), folder.path().to_owned());
        Owner { job, folder: path, supervisor: Holder::this_process() }
    }

    /// Replaces the note in an area. It need not be durable: the area is not, either.
    pub(super) fn write(&self, area: &Beneath) -> io::Result<()> {
        durable::replace_file(&area.join(OWNER), &serde_json::to_vec_pretty(self)?, 0o600)
    }

    pub(super) fn read(area: &Beneath) -> Option<Owner> {
        serde_json::from_slice(&area.join(OWNER).content(MAX_BYTES).ok()?).ok()
    }

    /// Whether the area is of this job, also while its folder is being removed and has another name.
    pub(super) fn is_of(&self, folder: &JobFolder) -> bool {
        self.job == *folder.name() && self.folder == folder.store().join(folder.name().as_str())
    }

    /// Whether the supervisor may be alive. One in another PID namespace cannot be seen from here.
    pub(super) fn may_live(&self) -> bool {
        self.supervisor.may_live()
    }

    /// Whether nothing can be found out about it: its supervisor cannot be seen from here, nor can its job's folder.
    pub(super) fn is_out_of_sight(&self) -> bool {
        let elsewhere = self.supervisor.pid_namespace != Holder::this_process().pid_namespace;
        elsewhere && self.open(&Trust::default()).is_err()
    }

    pub(super) fn store(&self) -> &Path {
        self.folder.parent().unwrap_or(&self.folder)
    }

    pub(super) fn open(&self, trust: &Trust) -> StoreResult<JobFolder> {
        Store::open(self.store(), Access::Read)?.with_trust(trust.clone()).job(&self.job)
    }
}

/// All areas that are mounted, in the order in which they were.
pub(super) fn all() -> Vec<Beneath> {
    let ours = mounts::of("self").unwrap_or_default().into_iter();
    let ours = ours.filter(|it| it.source == SOURCE && it.kind == "tmpfs" && it.root == Path::new("/"));
    ours.filter_map(|mount| opened(&mount)).collect()
}

/// The area of this mount. Another file system may hide it.
fn opened(mount: &mounts::Mount) -> Option<Beneath> {
    let dir = Beneath::root(&mount.point, Owners::Any).ok()?;
    let meta = dir.metadata().ok()?;
    let we = nix::unistd::geteuid().as_raw();
    let is_roots_alone = (meta.uid() == 0 || meta.uid() == we) && meta.mode() & 0o022 == 0;
    (meta.dev() == mount.device && is_roots_alone).then_some(dir)
}

/// The area of a job.
pub(super) fn of(folder: &JobFolder) -> Option<Beneath> {
    all().into_iter().find(|dir| Owner::read(dir).is_some_and(|owner| owner.is_of(folder)))
}

/// The area at this path, if it is one.
pub(super) fn at(path: &Path) -> Option<Beneath> {
    all().into_iter().find(|dir| dir.path() == path)
}

/// Mounts an area of this name below `base`. One that a run left there before it wrote its note is taken over.
pub(super) fn new(base: &Path, name: &str, size: u64) -> Result<Beneath, Error> {
    let missing: Vec<&Path> = base.ancestors().take_while(|folder| !folder.exists()).collect();
    for folder in missing.into_iter().rev() {
        make(&Beneath::at(folder).map_err(failed("make", folder))?, 0o755)?;
    }
    // As the mount table will have it.
    let base = base.canonicalize().map_err(failed("look at", base))?;
    let base = Beneath::root(&base, Owners::Any).map_err(failed("look at", &base))?;
    rights::check(&base)?;
    let place = base.join(name);
    let (above, there) = (device(&base).map_err(failed("look at", &base))?, device(&place).ok());
    if there.is_some_and(|there| there != above) {
        let unnamed = at(place.path()).filter(|dir| Owner::read(dir).is_none());
        return unnamed.ok_or_else(|| Error::Foreign(place.path().to_owned()));
    }
    make(&place, 0o711)?;
    mount_tmpfs(place.path(), size).map_err(failed("mount a tmpfs at", &place))?;
    Ok(Beneath::root(place.path(), Owners::Any).map_err(failed("look at", &place))?)
}

/// The device of the file system of a folder.
pub(super) fn device(dir: &Beneath) -> io::Result<u64> {
    Ok(dir.metadata()?.dev())
}

/// Unmounts what is at the path of an area, and removes its folder.
pub(super) fn unmount(path: &Path, flags: MntFlags) -> Result<(), FileError> {
    let unmounted = umount2(path, flags | MntFlags::UMOUNT_NOFOLLOW);
    unmounted.map_err(|error| failed("unmount", path)(error.into()))?;
    Beneath::at(path).and_then(|place| place.remove_dir()).map_err(failed("remove", path))
}

/// Whether tmpfs supports the mount option for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// It supports the option.
    Taken,
    /// The kernel does not support it.
    Absent,
}

/// Checks whether [`super::Area::open`] would work in `base`: mounts a small tmpfs in a temporary folder there, or in the
/// nearest existing folder above, and unmounts it.
///
/// # Errors
/// When it cannot be mounted, or others could write there.
pub fn try_mount(base: &Path) -> Result<HugePages, Error> {
    let there = base.ancestors().find(|path| path.exists()).unwrap_or(base);
    let above = Beneath::root(there, Owners::Any).map_err(failed("look at", there))?;
    if there == base {
        rights::check(&above)?;
    }
    let folder = above.join(durable::unforeseen(".rekindle-doctor".as_ref()));
    folder.make_dir(0o700).map_err(failed("make a folder in", there))?;
    let mounted = mount_tmpfs(folder.path(), 1 << 20).map_err(failed("mount a tmpfs at", &folder));
    match mounted {
        Ok(huge) => unmount(folder.path(), MntFlags::MNT_DETACH).map(|()| huge).map_err(Error::from),
        Err(error) => {
            // The other error tells more.
            let _ = folder.remove_dir();
            Err(error.into())
        }
    }
}

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
