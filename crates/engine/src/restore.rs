//! Restores a job: compare, put the files back, restore the processes.
//!
//! `policy` decides and [`compat`] compares, and both change nothing; [`restore`] does the work. Invariants: an image
//! is read and verified, never changed. If a restore fails, nothing of the half-restored job remains. Files of the user
//! are cut only after the tail was copied beside them. After a power cut, the next run starts again with the same
//! image, and finds the files that were already put back in the right state.

pub mod compat;
mod error;
mod own;
mod phases;
mod plain;
pub mod rehearsal;
mod user;

use std::time::{Duration, Instant};

use crate::launch::identity::Identity;
use crate::launch::work::WorkFolder;
use crate::launch::world::{Network, World};
use crate::launch::{Job, Privileges, mapped, output};
use crate::parts::files::put_back as files;
use crate::parts::gpu::placement::{Plan, Relocation, Wishes};
use crate::parts::gpu::{placement, put_back as gpu};
use crate::parts::landing;
use crate::steps::Timer;
use compat::{Difference, Here};
use phases::{Gpus, Revived, Timings};
use rekindle_base::Moved;
use rekindle_criu::Criu;
use rekindle_cuda::copier::Copier;
use rekindle_os::exits::Watched;
use rekindle_store::chunk::Key;
use rekindle_store::heal::{Healed, Healing};
use rekindle_store::persist::Progress;
use rekindle_store::staging::Area;
use rekindle_store::{Image, JobFolder, Manifest};

pub use crate::parts::files::put_back::ChangedFiles;
pub(crate) use crate::parts::files::rollback::FileRollback;
pub use crate::parts::files::rollback::RollbackError;
pub(crate) use crate::parts::landing::put_back::Error as LandingError;
pub(crate) use crate::parts::locks::Error as LockError;
pub use crate::parts::objects::Compare;
pub(crate) use crate::parts::objects::Error as CompareError;
pub use error::{Blame, Error};
pub use user::{OtherUser, check_user};

/// What a restore needs.
#[derive(Debug)]
pub struct Request<'a> {
    /// The image.
    pub image: &'a Image,
    /// The job's folder in the store.
    pub folder: &'a JobFolder,
    /// The installed CRIU.
    pub criu: &'a Criu,
    /// Files of ours.
    pub own: Own<'a>,
    /// The job's output, which is put back with its other files.
    pub output: &'a output::Files,
    /// The user that the job runs as.
    pub identity: Option<&'a Identity>,
    /// Whether the job must have the no-new-privileges flag.
    pub privileges: Privileges,
    /// Time limit for CRIU.
    pub timeout: Duration,
    /// The network that the job sees, if it has its own namespaces.
    pub network: Network<'a>,
    /// What is compared with the image.
    pub checks: Checks,
    /// The GPUs that the user asked for, if any.
    pub wishes: &'a Wishes,
    /// Creates what must exist before CRIU connects to it.
    pub prepare: Prepare<'a>,
    /// How a packed image is unpacked.
    pub unpacking: Unpacking<'a>,
    /// What a job that uses CUDA needs.
    pub cuda: Cuda<'a>,
}

/// What follows if something is not as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checks {
    /// For a file that changed, and whose content is not in the image.
    pub changed_files: ChangedFiles,
    /// For what the restored tasks have.
    pub compare: Compare,
}

/// What a job that uses CUDA needs to run again.
#[derive(Debug, Clone, Copy)]
pub struct Cuda<'a> {
    /// Copies memory to the GPU that had stayed there.
    pub copier: &'a Copier,
    /// Whether memory stays on the GPU at the snapshots to come: then it may be made before the processes exist.
    pub keeps: bool,
    /// What it waits for before it runs.
    pub hold: Option<Hold<'a>>,
}

/// Called when the GPU memory of a restored job is back, and its CUDA processes have not run yet. Returns whether they
/// may run; it returns early if the function that it is given returns true. Then the job's cable is plugged in.
///
/// A rank that runs before the others are back waits for them on the GPU. After some seconds the driver takes that for a
/// fault and ends it (Xid 109; driver 580, measured).
#[derive(Clone, Copy)]
pub struct Hold<'a>(pub &'a (dyn Fn(&dyn Fn() -> bool) -> bool + Sync));

impl std::fmt::Debug for Hold<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hold")
    }
}

/// Work in the job's new world before CRIU runs there.
#[derive(Clone, Copy)]
pub struct Prepare<'a>(pub &'a (dyn Fn(&World) + Sync));

impl std::fmt::Debug for Prepare<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Prepare")
    }
}

/// How a packed image is unpacked.
#[derive(Debug, Clone, Copy)]
pub struct Unpacking<'a> {
    /// The place in memory to unpack to, if there is room.
    pub staging: Option<&'a Area>,
    /// Bytes of memory that must stay free.
    pub memory_reserve: u64,
    /// The key of encrypted packs.
    pub key: Option<&'a Key>,
    /// Number of threads that read.
    pub threads: usize,
    /// Reports the progress.
    pub progress: &'a Progress,
    /// What damaged content is replaced with; None if it is an error.
    pub healing: Option<&'a Healing<'a>>,
}

/// Files of ours that a restore needs.
#[derive(Debug, Clone, Copy)]
pub struct Own<'a> {
    /// The folder of our own files, in which CRIU works.
    pub work: &'a WorkFolder,
    /// This version's reaper, for the init of the new world.
    pub reaper: &'a std::path::Path,
}

/// A restored job.
#[derive(Debug)]
pub struct Restored {
    /// The running job.
    pub job: Job,
    /// Its processes below the root, opened before they ran.
    pub open: Vec<Watched>,
    /// What is not as it was, a line for each item.
    pub differences: Vec<String>,
    /// Content of the store that was damaged, and replaced.
    pub healed: Option<Healed>,
    /// Files that were put back to their size or content at the snapshot.
    pub put_back: Vec<FileRollback>,
    /// GPUs that were replaced, each with its replacement.
    pub moved: Vec<Moved>,
    /// CUDA_VISIBLE_DEVICES of a process that was moved: it still names the old GPUs.
    pub visible: Option<String>,
    /// How long each part took, in order.
    pub timings: Vec<(&'static str, Duration)>,
}

/// How often a restore is tried again at once when CRIU was killed.
const KILLED: u32 = 2;

/// Restores a job from an image. `warn` is called with possible problems before anything is done.
///
/// # Errors
/// When the image is damaged or cannot be restored here. Then no process of the job is left.
pub fn restore(
    request: &Request<'_>,
    warn: &dyn Fn(&Difference),
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Restored, Error> {
    let manifest = request.image.manifest().ok_or(Error::NoManifest(request.image.id))?;
    let mut timings = Timings::default();
    let relocation = timings.run("compare", || -> Result<_, Error> {
        check_image(request, manifest)?;
        let relocation = fits(request, manifest, warn, cancelled)?;
        check_files(request, manifest)?;
        files::warn_of_unknown(manifest, request.folder);
        Ok(relocation)
    })?;
    let plain::Plain { image, folder: _until_it_is_back, healed } =
        timings.run("verify", || plain::make(request, cancelled))?;
    let (image, request) = (&image, &Request { image: &image, ..*request });
    let mut killed = 0;
    let (put_back, revived) = loop {
        // Each time: CRIU may be killed when it has just resumed the job, which then has run for a moment.
        let put_back = timings.run("files", || put_files_back(request, manifest))?;
        // Needed until the driver has read it back, which is before this function returns.
        let _landing = timings.run("landing", || landing::put_back::put(image, manifest, request.identity))?;
        if cancelled() {
            return Err(Error::Cancelled);
        }
        match phases::revive(request, manifest, relocation.as_ref(), &mut timings, cancelled) {
            Err(error) if error.says_criu_killed() && killed < KILLED && !cancelled() => {
                killed += 1;
                tracing::warn!("{error}. The job is restored from the same image at once");
            }
            result => break (put_back, result?),
        }
    };
    let moved = match (revived.gpus, relocation) {
        (Gpus::Back, Some(relocation)) => relocation.moved,
        (Gpus::Back, None) | (Gpus::Gone, _) => Vec::new(),
    };
    let visible = if moved.is_empty() { None } else { gpu::visible_devices(&revived.job, manifest) };
    let Revived { job, open, differences, .. } = revived;
    Ok(Restored { job, open, differences, healed, put_back, moved, visible, timings: timings.0 })
}

/// Checks that the image asks only for what belongs to its job. Changes nothing.
fn check_image(request: &Request<'_>, manifest: &Manifest) -> Result<(), Error> {
    own::check(manifest, request)?;
    Ok(check_user(manifest, request.identity)?)
}

/// Checks that the files of the image's job exist, or can be put back. Changes nothing.
fn check_files(request: &Request<'_>, manifest: &Manifest) -> Result<(), Error> {
    Ok(files::check(manifest, request.folder, request.identity, request.checks.changed_files)?)
}

/// Puts back the files of the unpacked image, its own and the job's.
fn put_files_back(request: &Request<'_>, manifest: &Manifest) -> Result<Vec<FileRollback>, Error> {
    recreate(request, manifest)?;
    let made = files::make_folders(manifest, request.identity)?;
    if made > 0 {
        tracing::info!("created {made} folders that the job had removed since the snapshot");
    }
    let made = files::make_fifos(manifest, request.identity)?;
    if made > 0 {
        tracing::info!("created {made} FIFOs that the job had removed since the snapshot");
    }
    Ok(files::put_back(request.image, manifest, request.folder, request.identity, request.output)?)
}

/// Whether the files that the image's job wrote to exist, or can be put back.
#[must_use]
pub fn has_its_files(manifest: &Manifest, folder: &JobFolder, user: Option<&Identity>, changed: ChangedFiles) -> bool {
    files::check(manifest, folder, user, changed).is_ok()
}

/// How long the memory of a process that was just killed may take to become free. The driver frees it before the
/// process is reaped, so this is for delays.
const SETTLE: Duration = Duration::from_secs(2);

/// How often a GPU is checked in that time.
const LOOK: Duration = Duration::from_millis(100);

/// Checks whether the image can be restored on this machine, and on which GPUs.
fn fits(
    request: &Request<'_>,
    manifest: &Manifest,
    warn: &dyn Fn(&Difference),
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<Relocation>, Error> {
    let id = request.image.id;
    let mut here = Here::look(manifest, Some(request.criu.version), request.wishes);
    let differences = compat::compare(manifest, &here);
    differences.iter().filter(|difference| !difference.is_fatal()).for_each(warn);
    if differences.iter().any(Difference::is_fatal) {
        return Err(Error::Misfit { id, differences });
    }
    let deadline = Instant::now() + SETTLE;
    loop {
        if cancelled() {
            return Err(Error::Cancelled);
        }
        let settles = Instant::now() < deadline;
        match placement::plan(manifest, &here.devices, request.wishes) {
            Plan::Stay { .. } => return Ok(None),
            Plan::Move(relocation) if !(settles && relocation.for_room) => return Ok(Some(relocation)),
            Plan::Wait(why) if !settles => return Err(Error::Busy { id, why }),
            Plan::Refuse(_) => return Err(Error::Misfit { id, differences: compat::compare(manifest, &here) }),
            Plan::Move(_) | Plan::Wait(_) => {}
        }
        std::thread::sleep(LOOK);
        here.look_again(manifest);
    }
}

/// Maximum size of one of rekindle's own files: that of the file system that they are in.
const MAX_OWN_FILE: u64 = 16 << 20;

/// Puts back rekindle's own files that the job has mapped, of whatever version they are.
fn recreate(request: &Request<'_>, manifest: &Manifest) -> Result<(), Error> {
    for file in &manifest.recreate {
        let dir = file.path.parent().unwrap_or(&file.path);
        request.own.work.also_at(dir)?;
        let put = || -> std::io::Result<()> {
            let content = file.part.read(&request.image.dir, MAX_OWN_FILE)?;
            // In a rehearsal the folder of an earlier place may not be there.
            std::fs::create_dir_all(dir)?;
            mapped::recreate(&file.path, &content)
        };
        put().map_err(|source| Error::Recreate { path: file.path.to_path_buf(), source })?;
    }
    Ok(())
}
