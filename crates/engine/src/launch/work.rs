//! The folder of rekindle's own files for one run: the programs that the job maps, CRIU's plugin, what CRIU writes
//! besides its images.
//!
//! ```text
//! BASE/PLACE.run/    a tmpfs; 0711, because the job may run as another user
//!   owner.json       whose it is
//!   bin/             reaper, interposer, hosts and resolv.conf of the job; 0711
//!   criu/            CRIU's statistics; 0700
//!   plugins/         the plugin that CRIU loads, and nothing else; 0700
//!   view/            where a rehearsal builds its view; 0700
//! ```
//!
//! BASE is `snapshot.staging-directory`, PLACE is [`JobFolder::place_name`]. None of this is in the store, because who
//! can write there would choose what runs here as root. Only root can change anything on the path of this folder.
//!
//! It is made afresh for each run, before the job's mount namespace, which is a copy of ours: CRIU finds files only in
//! mounts that the job has. It is removed at the end of the run. What a supervisor that was killed has left is removed by
//! the next run of the job, and by whoever calls [`remove_left`].
//!
//! A job has these files mapped at their path, so an image names it. Restored from an image of another place, the job needs
//! a folder there as well ([`WorkFolder::also_at`]).

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde::{Deserialize, Serialize};

use super::interposer::{self, UnusablePath};
use rekindle_os::beneath::{Beneath, Owners};
use rekindle_os::durable;
use rekindle_os::mounts::{self, Mount};
use rekindle_store::{Holder, JobFolder, JobName, WriterLock};

/// The source of our mounts in a mount table. Another one than that of staging areas, which may have images.
const SOURCE: &str = "rekindle-run";
/// How its name ends.
const SUFFIX: &str = ".run";
/// The folder of the programs.
const BIN: &str = "bin";
/// The note about the owner.
const OWNER: &str = "owner.json";
/// Maximum size of that note.
const MAX_BYTES: u64 = 64 << 10;
/// The options of the tmpfs. All files in it have less than a MiB.
const OPTIONS: &str = "mode=0711,size=16m";
/// Mounts on top of each other that are removed at most.
const MOST_LEFT: usize = 16;

/// Why there is no such folder.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call failed.
    #[error("cannot {what} {}, rekindle's work folder", path.display())]
    Io {
        /// What was done.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Another file system is mounted there.
    #[error("{} is a mount point of another file system: unmount it, or set snapshot.staging-directory", .0.display())]
    Foreign(PathBuf),
    /// A supervisor that may be alive uses it.
    #[error("{} belongs to a run that has not ended ({owner})", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
        /// The supervisor.
        owner: String,
    },
    /// Somebody else could change what is in it.
    #[error(
        "rekindle's work folder {} {why}. Let only root write there, or set snapshot.staging-directory to another folder",
        path.display()
    )]
    NotRoots {
        /// The folder.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A job could not load the interposer from there, nor CRIU its plugin.
    #[error("snapshot.staging-directory cannot be used")]
    Unusable(#[from] UnusablePath),
    /// The lock is not this job's, or was lost.
    #[error(transparent)]
    Store(#[from] rekindle_store::Error),
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { what, path: path.to_owned(), source }
}

/// Whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    job: JobName,
    supervisor: Holder,
}

impl Owner {
    fn of(job: &JobName) -> Owner {
        Owner { job: job.clone(), supervisor: Holder::this_process() }
    }

    fn read(folder: &Path) -> Option<Owner> {
        let note = Beneath::root(folder, Owners::Ours).ok()?.join(OWNER);
        serde_json::from_slice(&note.content(MAX_BYTES).ok()?).ok()
    }
}

/// What is known of the run whose work folder is already there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Other {
    /// We have the job's lock: it has ended unless its process is seen.
    HasEndedUnlessSeen,
    /// It may be anybody's.
    MayLive,
}

impl Other {
    /// Who uses the folder, if it may not be removed.
    fn uses(self, owner: Option<&Owner>) -> Option<String> {
        let is_alive = match (self, owner) {
            (Other::HasEndedUnlessSeen, owner) => owner.is_some_and(|owner| owner.supervisor.is_seen_alive()),
            (Other::MayLive, owner) => owner.is_none_or(|owner| owner.supervisor.may_live()),
        };
        let text = || {
            owner.map_or_else(|| "of an unknown job".into(), |owner| format!("job {}, {}", owner.job, owner.supervisor))
        };
        is_alive.then(text)
    }
}

/// A work folder, which is removed when this is dropped.
#[derive(Debug)]
pub struct WorkFolder {
    path: PathBuf,
    job: Option<JobName>,
    mounted: Mutex<Vec<Mounted>>,
}

impl WorkFolder {
    /// Makes the folder of this run. An earlier one of the job that was left there is removed.
    ///
    /// # Errors
    /// When it cannot be mounted, somebody else could write there, or another run uses it.
    pub fn make(base: &Path, folder: &JobFolder, lock: &WriterLock) -> Result<WorkFolder, Error> {
        folder.check_lock(lock)?;
        let name = format!("{}{SUFFIX}", folder.place_name());
        interposer::preload_value(&base.join(&name), None)?;
        let mounted = Mounted::make(base, &name, folder.name(), Other::HasEndedUnlessSeen)?;
        let (path, job) = (mounted.path.clone(), Some(folder.name().clone()));
        Ok(WorkFolder { path, job, mounted: Mutex::new(vec![mounted]) })
    }

    /// The folder of a run whose supervisor is another process. It is not removed by this one.
    #[must_use]
    pub fn of_another_process(path: PathBuf) -> WorkFolder {
        WorkFolder { path, job: None, mounted: Mutex::default() }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder for what the job runs or maps.
    #[must_use]
    pub fn bin(&self) -> PathBuf {
        self.path.join(BIN)
    }

    /// The folder for what CRIU writes besides its images; none of it is needed later.
    #[must_use]
    pub fn criu(&self) -> PathBuf {
        self.path.join("criu")
    }

    /// The folder of CRIU's plugin.
    #[must_use]
    pub(crate) fn plugins(&self) -> PathBuf {
        self.path.join("plugins")
    }

    /// An empty folder, in which a rehearsal builds its view.
    #[must_use]
    pub(crate) fn view(&self) -> PathBuf {
        self.path.join("view")
    }

    /// The folders that this run has besides, for jobs of other places.
    #[must_use]
    pub(crate) fn others(&self) -> Vec<PathBuf> {
        let all = self.locked();
        all.iter().map(|mounted| &mounted.path).filter(|path| **path != self.path).cloned().collect()
    }

    /// Makes a work folder at the place that an image names: `bin` is its folder of programs. It exists as long as this one.
    ///
    /// # Errors
    /// As [`WorkFolder::make`].
    pub(crate) fn also_at(&self, bin: &Path) -> Result<(), Error> {
        // In a rehearsal all that is written is lost, and its supervisor has such a folder if the job needs one.
        let Some(job) = &self.job else { return Ok(()) };
        let folder = bin.parent().unwrap_or(bin);
        let mut all = self.locked();
        if all.iter().any(|mounted| mounted.path == folder) {
            return Ok(());
        }
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let base = folder.parent().unwrap_or(folder);
        all.push(Mounted::make(base, &name, job, Other::MayLive)?);
        Ok(())
    }

    /// Removes all that this has made, now.
    pub fn remove(&self) {
        self.locked().clear();
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Mounted>> {
        self.mounted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this is the folder of the programs of a run of this job, wherever it is: `BASE/JOB-HASH.run/bin`.
#[must_use]
pub(crate) fn is_bin(folder: &Path, job: &str) -> bool {
    let work = folder.parent().filter(|_| folder.ends_with(BIN));
    let place =
        work.and_then(Path::file_name).and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(SUFFIX));
    place.is_some_and(|place| is_place(place, job))
}

/// Whether this is a name that [`JobFolder::place_name`] gives to a job of this name.
#[must_use]
pub(crate) fn is_place(name: &str, job: &str) -> bool {
    let hash = name.strip_prefix(job).and_then(|rest| rest.strip_prefix('-'));
    hash.is_some_and(|hash| hash.len() == 8 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
}

/// Removes the work folders on this machine whose supervisors are dead. Returns their paths.
pub fn remove_left() -> Vec<PathBuf> {
    let all = mounts::of("self").unwrap_or_default();
    let is_left = |mount: &&Mount| is_ours(mount) && Other::MayLive.uses(Owner::read(&mount.point).as_ref()).is_none();
    let left = all.iter().filter(is_left).map(|mount| mount.point.clone());
    left.filter(|point| unmount(point).is_ok()).collect()
}

fn is_ours(mount: &Mount) -> bool {
    mount.source == SOURCE && mount.kind == "tmpfs"
}

fn unmount(path: &Path) -> io::Result<()> {
    // A process with an open file does not prevent it: the memory is freed when the last file is closed.
    let plain = umount2(path, MntFlags::UMOUNT_NOFOLLOW);
    plain.or_else(|_| umount2(path, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH))?;
    fs::remove_dir(path)
}

/// One tmpfs of ours, which is unmounted when this is dropped.
#[derive(Debug)]
struct Mounted {
    path: PathBuf,
    device: u64,
}

impl Mounted {
    fn make(base: &Path, name: &str, job: &JobName, other: Other) -> Result<Mounted, Error> {
        let not_roots = |why| Error::NotRoots { path: base.join(name), why };
        is_roots(&base.join(name)).map_err(not_roots)?;
        let missing: Vec<&Path> = base.ancestors().take_while(|folder| !folder.exists()).collect();
        missing.into_iter().rev().try_for_each(|folder| make(folder).map_err(failed("make", folder)))?;
        // As the kernel has it in a mount table, and in the list of files of a process.
        let base = fs::canonicalize(base).map_err(failed("look at", base))?;
        let path = base.join(name);
        remove_earlier(&path, other)?;
        let place = Beneath::root(&base, Owners::Ours).map(|base| base.join(name)).map_err(failed("open", &base))?;
        place.make_dir_unless_there(0o711).map_err(failed("make", &path))?;
        let folder = place.folder().map_err(failed("open", &path))?;
        mount_over(&folder).map_err(failed("mount a tmpfs at", &path))?;
        let device = fs::metadata(&path).map_err(failed("look at", &path))?.dev();
        let mounted = Mounted { path: path.clone(), device };
        let fill = || -> io::Result<()> {
            let root = Beneath::root(&path, Owners::Ours)?;
            durable::replace_file(&root.join(OWNER), &serde_json::to_vec_pretty(&Owner::of(job))?, 0o600)?;
            [(BIN, 0o711), ("criu", 0o700), ("plugins", 0o700), ("view", 0o700)]
                .into_iter()
                .try_for_each(|(name, mode)| root.join(name).make_dir(mode))
        };
        fill().map_err(failed("fill", &path))?;
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Somebody else may have unmounted it.
        if fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.dev() == self.device)
            && let Err(error) = unmount(&self.path)
        {
            tracing::debug!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Unmounts what ended runs have left there.
fn remove_earlier(path: &Path, other: Other) -> Result<(), Error> {
    for _ in 0..MOST_LEFT {
        let all = mounts::of("self").map_err(failed("look for", path))?;
        // Of several at one place the last can be seen.
        let Some(there) = all.into_iter().rfind(|mount| mount.point == path) else { return Ok(()) };
        if !is_ours(&there) {
            return Err(Error::Foreign(path.to_owned()));
        }
        if let Some(owner) = other.uses(Owner::read(path).as_ref()) {
            return Err(Error::InUse { path: path.to_owned(), owner });
        }
        // Its folder remains where another mount is below it.
        match unmount(path) {
            Err(error) if error.kind() != io::ErrorKind::ResourceBusy => return Err(failed("unmount", path)(error)),
            _ => {}
        }
    }
    Err(Error::Foreign(path.to_owned()))
}

/// Mounts a tmpfs over a folder that is open, whatever is at its path by now. Programs in it are run, so without `noexec`,
/// which /run often has.
fn mount_over(folder: &OwnedFd) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(Some(SOURCE), path.as_str(), Some("tmpfs"), flags, Some(OPTIONS))?)
}

/// A folder above; others must be able to enter it, whatever the umask is.
fn make(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Err(_) => Ok(()),
        Ok(()) => fs::set_permissions(folder, fs::Permissions::from_mode(0o755)),
    }
}

/// Checks that only root can change the content of the folder, or replace it. Missing parts of the path are created by
/// root.
///
/// # Errors
/// The rest of a sentence that begins with the path.
pub(crate) fn is_roots(folder: &Path) -> Result<(), String> {
    let there = folder.ancestors().find(|path| fs::symlink_metadata(path).is_ok());
    let there = there.ok_or("is in a folder that cannot be inspected")?;
    let real = fs::canonicalize(there).map_err(|error| format!("is in a folder that cannot be inspected: {error}"))?;
    for path in there.ancestors().chain(real.ancestors()) {
        let place = if path == folder || (path == real && there == folder) { Place::Last } else { Place::Above };
        let meta = fs::symlink_metadata(path).map_err(|error: io::Error| {
            format!("is in a folder that cannot be inspected: {}: {error}", path.display())
        })?;
        judge(&meta, place, nix::unistd::geteuid().as_raw())
            .map_err(|why| format!("is in {}, {why}", path.display()))?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Above,
    Last,
}

fn judge(meta: &fs::Metadata, place: Place, we: u32) -> Result<(), String> {
    const OTHERS_WRITE: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    if meta.uid() != 0 && meta.uid() != we {
        return Err(format!("which belongs to user {}: that user can replace the file", meta.uid()));
    }
    if meta.is_symlink() {
        return Ok(());
    }
    // In a sticky folder nobody can remove root's files.
    let is_safe = meta.mode() & OTHERS_WRITE == 0 || (place == Place::Above && meta.mode() & STICKY != 0);
    if is_safe { Ok(()) } else { Err("which others can write".into()) }
}

#[cfg(test)]
mod tests;
