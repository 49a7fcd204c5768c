//! Restores a job: compare, put the files back, restore the processes.
//!
//! `policy` decides and [`compat`] compares, and both change nothing; [`restore`] does the work. Invariants: an image
//! is read and verified, never changed. If a restore fails, nothing of the half-restored job remains. Files of the user
//! are cut only after the tail was copied beside them. After a power cut, the next run starts again with the same
//! image, and finds the files that were already put back in the right state.

pub mod compat;
mod error;
mod own;
mod plain;
pub mod rehearsal;
mod user;

use std::time::{Duration, Instant};

use crate::launch::identity::Identity;
use crate::launch::world::{self, Network, World};
use crate::launch::{Job, Privileges, embedded, output, plugin};
use crate::parts::files::moved::{self, Logs};
use crate::parts::files::put_back as rollback;
use crate::parts::gpu::placement::{Plan, Relocation, Wishes};
use crate::parts::gpu::{placement, put_back as gpu};
use crate::parts::{access, groups, landing, locks, tcp};
use crate::snapshot::CRIU_DIR;
use compat::{Difference, Here};
use rekindle_base::Moved;
use rekindle_criu::image::LostLocks;
use rekindle_criu::{self as criu, Criu, Hooks, Notify, Place, Plugin, RestoreOptions};
use rekindle_os::spawn::Ended;
use rekindle_os::{process, ptrace};
use rekindle_store::chunk::Key;
use rekindle_store::heal::Healing;
use rekindle_store::manifest::PidNamespace;
use rekindle_store::persist::Progress;
use rekindle_store::staging::Area;
use rekindle_store::{Image, JobFolder, Manifest};

pub use crate::parts::files::put_back::{ChangedFiles, PutBack, RollbackError, RolledBack};
pub use crate::parts::landing::put_back::Error as LandingError;
pub use crate::parts::locks::Error as LockError;
pub use error::{Blame, Error};
pub use plain::Unpacked;
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
    /// This version's reaper, for the init of the new world.
    pub reaper: &'a std::path::Path,
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
    /// What to do if a file changed whose content is not in the image.
    pub changed_files: ChangedFiles,
    /// The GPUs that the user asked for, if any.
    pub wishes: &'a Wishes,
    /// Creates what must exist before CRIU connects to it.
    pub prepare: Prepare<'a>,
    /// How a packed image is unpacked.
    pub unpacking: Unpacking<'a>,
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

/// A restored job.
#[derive(Debug)]
pub struct Restored {
    /// The running job.
    pub job: Job,
    /// Files that were put back to their size or content at the snapshot.
    pub put_back: Vec<PutBack>,
    /// GPUs that were replaced, each with its replacement.
    pub moved: Vec<Moved>,
    /// CUDA_VISIBLE_DEVICES of a process that was moved: it still names the old GPUs.
    pub visible: Option<String>,
    /// How long each part took, in order.
    pub timings: Vec<(&'static str, Duration)>,
}

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
    let mut timings = Vec::new();
    let mut timed = Timer(&mut timings);

    let relocation = timed.run("compare", || -> Result<_, Error> {
        check_image(request, manifest)?;
        let relocation = fits(request, manifest, warn, cancelled)?;
        check_files(request, manifest)?;
        rollback::warn_of_unknown(manifest, request.folder);
        Ok(relocation)
    })?;
    let plain::Plain { image, folder: _until_it_is_back } = timed.run("verify", || plain::make(request, cancelled))?;
    let (image, request) = (&image, &Request { image: &image, ..*request });
    let put_back = timed.run("files", || put_files_back(request, manifest))?;
    // Needed until the driver has read it back, which is before this function returns.
    let _landing = timed.run("landing", || landing::put_back::put(image, manifest, request.identity))?;
    if cancelled() {
        return Err(Error::Cancelled);
    }
    let lost_locks = criu::image::lost_locks(&request.image.dir.join(CRIU_DIR)).map_err(criu::RunError::Image)?;
    let world = timed.run("world", || match manifest.tree.pid_namespace {
        PidNamespace::Private => {
            World::private(request.reaper, world::last_pid_for(&manifest.tree.ids), request.network)
        }
        PidNamespace::Host => Ok(World::Host),
    })?;
    // In a network namespace of its own every port is free.
    if request.network == Network::Host {
        match timed.run("ports", || tcp::put_back::free(&request.image.dir.join(CRIU_DIR))) {
            Ok(0) => {}
            Ok(ended) => tracing::debug!("closed {ended} connections of dead processes of the job"),
            // If a port is in use, CRIU's message names it.
            Err(error) => tracing::debug!("cannot find connections of dead processes of the job: {error}"),
        }
    }
    (request.prepare.0)(&world);
    let root = match timed.run("criu", || {
        run_criu(request, manifest, &world, &lost_locks, Until::ItRuns, cancelled)?.ok_or(Error::Cancelled)
    }) {
        Ok(root) => root,
        Err(error) => {
            world.end(None);
            if matches!(world, World::Host) {
                world::end_leftovers(manifest.tree.root, &manifest.tree.ids, cancelled);
            }
            return Err(match error {
                Error::Criu(criu::RunError::Cancelled) => Error::Cancelled,
                Error::Criu(error)
                    if matches!(world, World::Host) && error.log().is_some_and(criu::Log::says_pid_taken) =>
                {
                    Error::PidTaken(error)
                }
                other => other,
            });
        }
    };
    let job = Job::restored(world, root, manifest.tree.job);
    if let Err(error) = timed.run("locks", || locks::take_again(job.root.pid(), &lost_locks, &manifest.tree.cuda)) {
        job.kill();
        job.end();
        return Err(error.into());
    }
    // If the job ends from here on, it was restored and ended afterwards: the policy counts early deaths to decide
    // whether the image is to blame. One kill at this moment must not cost a good image.
    let pairs = relocation.as_ref().map_or(&[][..], |relocation| &relocation.pairs);
    match timed
        .run("cuda", || gpu::watched(&job, request.timeout, cancelled, || gpu::bring_back(&job, manifest, pairs)))
    {
        Err(gpu::Error::NoProcess(_) | gpu::Error::Cuda { .. } | gpu::Error::Sharing(_))
            if job.root.has_ended().unwrap_or(false) =>
        {
            Ok(Restored { job, put_back, moved: Vec::new(), visible: None, timings })
        }
        Ok(()) => {
            let moved = relocation.map(|relocation| relocation.moved).unwrap_or_default();
            let visible = if moved.is_empty() { None } else { gpu::visible_devices(&job, manifest) };
            Ok(Restored { job, put_back, moved, visible, timings })
        }
        Err(error) => {
            job.kill();
            // A failed CUDA restore cannot be repeated on the same process.
            job.end();
            Err(match (error, &relocation) {
                (gpu::Error::Cuda { source, .. }, Some(relocation)) if relocation.unproven && source.names_no_gpu() => {
                    let here = Here::look(manifest, Some(request.criu.version), request.wishes);
                    Error::Misfit { id: request.image.id, differences: vec![compat::too_few_gpus(manifest, &here)] }
                }
                (error, _) => error.into(),
            })
        }
    }
}

/// Checks that the image asks only for what belongs to its job. Changes nothing.
fn check_image(request: &Request<'_>, manifest: &Manifest) -> Result<(), Error> {
    own::check(manifest, request)?;
    Ok(check_user(manifest, request.identity)?)
}

/// Checks that the files of the image's job exist, or can be put back. Changes nothing.
fn check_files(request: &Request<'_>, manifest: &Manifest) -> Result<(), Error> {
    Ok(rollback::check(manifest, request.folder, request.identity, request.changed_files)?)
}

/// Puts back the files of the unpacked image, its own and the job's.
fn put_files_back(request: &Request<'_>, manifest: &Manifest) -> Result<Vec<PutBack>, Error> {
    recreate(request.image, manifest)?;
    let made = rollback::make_folders(manifest, request.identity)?;
    if made > 0 {
        tracing::info!("created {made} folders that the job had removed since the snapshot");
    }
    Ok(rollback::put_back(request.image, manifest, request.folder, request.identity, request.output)?)
}

/// A process below the restored root that was alive in the image (it has memory there) and is dead.
fn died_while_restored(images: &std::path::Path) -> Option<(i32, Ended)> {
    let children = process::children(std::process::id().cast_signed());
    let restored = children.into_iter().filter(|pid| !rekindle_os::spawn::is_known(*pid));
    restored.flat_map(process::tree).find_map(|pid| {
        let ended = process::ended(pid)?;
        let inner = process::inner_pid(pid)?;
        images.join(format!("mm-{inner}.img")).exists().then_some((inner, ended))
    })
}

/// Whether the files that the image's job wrote to exist, or can be put back.
#[must_use]
pub fn has_its_files(manifest: &Manifest, folder: &JobFolder, user: Option<&Identity>, changed: ChangedFiles) -> bool {
    rollback::check(manifest, folder, user, changed).is_ok()
}

struct Timer<'a>(&'a mut Vec<(&'static str, Duration)>);

impl Timer<'_> {
    fn run<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        let took = began.elapsed();
        tracing::debug!(part = name, ?took, "restore");
        self.0.push((name, took));
        result
    }
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

/// Puts back rekindle's own files that the job has mapped, of whatever version they are.
fn recreate(image: &Image, manifest: &Manifest) -> Result<(), Error> {
    for file in &manifest.recreate {
        let put = || -> std::io::Result<()> {
            let content = file.part.read(&image.dir)?;
            if let Some(dir) = file.path.parent() {
                std::fs::create_dir_all(dir)?;
            }
            embedded::put_back(&file.path, &content)
        };
        put().map_err(|source| Error::Recreate { path: file.path.to_path_buf(), source })?;
    }
    Ok(())
}

/// How far a restore goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    ItRuns,
    /// Every process is created and none has run; then the restore is cancelled, and all are removed.
    BeforeItRuns,
}

/// Runs CRIU. Returns the root of the restored tree, if it runs.
fn run_criu(
    request: &Request<'_>,
    manifest: &Manifest,
    world: &World,
    lost_locks: &LostLocks,
    until: Until,
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<rekindle_os::spawn::Child>, Error> {
    let images = request.image.dir.join(CRIU_DIR);
    let scratch = request.folder.scratch_dir()?;
    let place =
        Place { criu: request.criu, init: world.init(), images: &images, work: &scratch, timeout: request.timeout };
    let abandon = || world.kill(None);
    let died = || died_while_restored(&images);
    let log_dir = request.folder.log_dir();
    let wanted = access::Wanted { user: request.identity, privileges: request.privileges, manifest, log_dir: &log_dir };
    let (mut refused, mut rehearsed) = (None, false);
    let mut before_it_runs = |moment| {
        // All processes exist and still have our rights, so the user cannot reach them or what they see (CRIU changes
        // the rights after this, `CR_STATE_RESTORE_CREDS`).
        if let (Notify::PostRestore(_), Until::BeforeItRuns) = (moment, until) {
            rehearsed = true;
            return Err("this was a rehearsal".into());
        }
        if moment != Notify::PreResume {
            return Ok(());
        }
        let root = criu::find_restored(manifest.tree.root).ok_or("the restored tree cannot be found")?;
        if let Err(error) = access::check(root, &wanted) {
            let why = error.to_string();
            refused = Some(error);
            return Err(why);
        }
        locks::hold(root, lost_locks);
        groups::put_back::put_back(root, manifest, request.identity);
        // CRIU would send the signal only after it has resumed the tasks: until then a thread could read memory that is
        // not restored yet, or be stopped while it has a lock of the driver.
        if !manifest.tree.cuda.is_empty() {
            let is_cuda = |pid: &i32| process::inner_pid(*pid).is_some_and(|inner| manifest.tree.cuda.contains(&inner));
            process::tree(root).into_iter().filter(is_cuda).for_each(|pid| drop(ptrace::stop_when_let_go(pid)));
        }
        Ok(())
    };
    let mut hooks = Hooks { notify: &mut before_it_runs, cancelled, died: &died, abandon: &abandon };
    // CRIU works on the files of the job's user with that user's rights. Files that these rights do not reach are
    // opened by us.
    let files = request.identity.and_then(Identity::file_rights);
    let folder = files.map(|_| plugin::unpack(&scratch)).transpose()?;
    let plugin = folder.as_deref().map(|folder| Plugin { folder, devices: None, files });
    rollback::put_links_back(manifest, request.identity)?;
    let instead = moved::instead(manifest, request.folder, if plugin.is_some() { Logs::All } else { Logs::Moved });
    let options = RestoreOptions { tcp: manifest.tcp, instead: &instead, plugin };
    let restored = criu::restore(&place, options, &mut hooks);
    // CRIU removes them when it could use them; after a failure they would remain beside the user's files.
    rollback::drop_links(manifest, request.identity);
    match (restored, refused) {
        (Ok(restored), _) => Ok(Some(restored.root)),
        (Err(_), None) if rehearsed => Ok(None),
        (Err(_), Some(why)) => Err(Error::Refused { id: request.image.id, why }),
        (Err(error), None) => Err(error.into()),
    }
}
