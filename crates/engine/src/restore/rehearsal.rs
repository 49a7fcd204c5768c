//! A restore that is tried beside the running job, and never runs.
//!
//! A separate process ([`play`], started by the hidden command `rekindle rehearse`) sees the machine's files through a
//! [`view`], in which all its writes are lost. It has its own PID, IPC and network namespaces, in which every address
//! is local. There the image is restored by the same steps as in a real restore, until every process is complete and CRIU
//! is about to let them run. Then the restore is cancelled: no instruction of the job is executed, and the kernel removes
//! what was created.
//!
//! Processes that never run need no memory: the image is made [`light`] in the view first. So a rehearsal takes a fraction
//! of a second and some MiB for a job of any size.
//!
//! A rehearsal cannot show whether the driver restores GPU memory, whether the content of memory is right, or what the job
//! does once it runs. Changes on the machine since the snapshot (a missing file) are no fault of the image; only what a
//! restore refuses for the image's sake counts against it.
//!
//! The processes have the rights of the job's user in the end, and that user must not get into the view through them. So
//! only root can look into them, and they are killed before CRIU is: whatever ends CRIU would let them run.

mod failure;
mod harmless;
mod light;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use self::failure::Failure;
use super::phases::{Until, run_criu};
use super::{ChangedFiles, Checks, Compare};
use super::{Cuda, Error, Own, Prepare, Request, Unpacking, landing};
use crate::launch::Privileges;
use crate::launch::identity::Identity;
use crate::launch::output::{self, Bounds};
use crate::launch::work::WorkFolder;
use crate::launch::world::{self, Network, World};
use crate::snapshot::CRIU_DIR;
use rekindle_criu::{self as criu, Criu, Version};
use rekindle_cuda::copier::Copier;
use rekindle_os::{netns, process, view};
use rekindle_store::persist::Progress;
use rekindle_store::staging::{Area, Medium};
use rekindle_store::{Access, Image, ImageId, JobFolder, JobName, Manifest, Store};

/// What is rehearsed, and with what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Script {
    /// The store.
    pub store: PathBuf,
    /// The job.
    pub job: JobName,
    /// The image, which is in a slot.
    pub image: ImageId,
    /// CRIU's executable, and its version.
    pub criu: (PathBuf, (u32, u32, u32)),
    /// The folder of the run's own files.
    pub work: PathBuf,
    /// This version's reaper.
    pub reaper: PathBuf,
    /// The job's /etc/resolv.conf, if it is not the machine's.
    pub names: Option<PathBuf>,
    /// The user that the job runs as.
    pub user: Option<Identity>,
    /// Whether it has the no-new-privileges flag.
    pub no_new_privileges: bool,
    /// Time limit for CRIU, in seconds.
    pub timeout: u64,
    /// Bytes of host memory that must stay free.
    pub reserve: u64,
}

/// The result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Outcome {
    /// Every process was created.
    Restored {
        /// Duration in milliseconds.
        took: u64,
    },
    /// CRIU refused the image.
    Refused {
        /// Its reason.
        why: String,
    },
    /// The rehearsal was impossible, which says nothing about the image.
    NotTried {
        /// What prevented it.
        why: String,
    },
}

/// Runs the rehearsal. For a process started for this purpose: it enters namespaces, and must end afterwards.
#[must_use]
pub fn play(script: &Script) -> Outcome {
    let not_tried = |why: String| Outcome::NotTried { why };
    // Set first, so that this process ends with the supervisor.
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
        return not_tried(format!("cannot tie it to the life of the supervisor: {error}"));
    }
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "1000") {
        return not_tried(format!("cannot make the OOM killer choose it before the job: {error}"));
    }
    process::be_nice();
    match try_it(script) {
        Ok(took) => Outcome::Restored { took: took.as_millis().try_into().unwrap_or(u64::MAX) },
        Err(Failure::Refused(why)) => Outcome::Refused { why },
        Err(Failure::NotTried(why)) => not_tried(why),
    }
}

fn try_it(script: &Script) -> Result<Duration, Failure> {
    let open = || -> rekindle_store::Result<JobFolder> { Store::open(&script.store, Access::Read)?.job(&script.job) };
    let folder = open().map_err(|error| Failure::of(&error))?;
    let image = find(&folder, script.image)?;
    let manifest = image.manifest().ok_or_else(|| Failure::NotTried("the image is gone".into()))?;
    harmless::harmless(&image, manifest)?;
    harmless::room(&image, manifest, script.reserve)?;
    let work = WorkFolder::of_another_process(script.work.clone());
    let as_they_are = view::enter(&work.view(), harmless::VIEW).map_err(|error| Failure::of(&error))?;
    // What was opened before leads around the view: the output of the running job would be cut.
    let folder = open().map_err(|error| Failure::of(&error))?;
    let image = image.seen_from_here().map_err(|error| Failure::of(&error))?;
    let manifest = image.manifest().ok_or_else(|| Failure::NotTried("the image is gone".into()))?;
    harmless::out_of_reach(&image, &as_they_are)?;
    if let Some(names) = &script.names {
        let put = mount(Some(names), "/etc/resolv.conf", None::<&str>, MsFlags::MS_BIND, None::<&str>);
        put.map_err(|error| Failure::NotTried(format!("cannot set up its /etc/resolv.conf: {error}")))?;
    }
    let began = Instant::now();
    let result = restore(script, &folder, &work, &image, manifest);
    let took = began.elapsed();
    // When the slot has a later image, this image's files are gone or replaced.
    match result {
        Err(Failure::Refused(_)) if !image.look_again().is_good() => {
            Err(Failure::NotTried("a newer image replaced it".into()))
        }
        Err(failure) => Err(failure),
        Ok(()) => Ok(took),
    }
}

fn find(folder: &JobFolder, id: ImageId) -> Result<Image, Failure> {
    let staged = folder.staged().into_iter().find(|image| image.id == id && image.is_good());
    staged.ok_or_else(|| Failure::NotTried("the image is no longer in its slot".into()))
}

fn memory_of(folder: &JobFolder) -> Option<Area> {
    Area::all_of(folder).into_iter().find(|area| area.medium() == Medium::Memory)
}

fn restore(
    script: &Script,
    folder: &JobFolder,
    work: &WorkFolder,
    image: &Image,
    manifest: &Manifest,
) -> Result<(), Failure> {
    light::without_memory(&image.dir.join(CRIU_DIR))?;
    light::empty_logs(manifest, folder)?;
    let (path, version) = &script.criu;
    let criu = Criu::known(path.clone(), Version(version.0, version.1, version.2));
    let files = output::Files::create(&folder.log_dir(), Bounds::default()).map_err(|error| Failure::of(&error))?;
    let (staging, wishes, progress) =
        (memory_of(folder), crate::parts::gpu::placement::Wishes::default(), Progress::default());
    let request = Request {
        image,
        folder,
        criu: &criu,
        own: Own { work, reaper: &script.reaper },
        output: &files,
        identity: script.user.as_ref(),
        privileges: if script.no_new_privileges { Privileges::Fixed } else { Privileges::MayGrow },
        timeout: Duration::from_secs(script.timeout),
        network: Network::Private,
        // The job has continued since the snapshot.
        checks: Checks { changed_files: ChangedFiles::Warn, compare: Compare::default() },
        wishes: &wishes,
        prepare: Prepare(&|_| ()),
        unpacking: Unpacking {
            staging: staging.as_ref(),
            memory_reserve: script.reserve,
            key: None,
            threads: 1,
            progress: &progress,
            healing: None,
        },
        // It never comes to the GPUs.
        cuda: Cuda { copier: &Copier::default(), keeps: false, hold: None },
    };
    let not_tried = |error: Error| Failure::of(&error);
    super::check_image(&request, manifest).and_then(|()| super::check_files(&request, manifest)).map_err(not_tried)?;
    light::put_files_in_place(&request, manifest).map_err(|error| Failure::of_restore(&error))?;
    let _landing = landing::put_back::put_empty(manifest, request.identity).map_err(|error| not_tried(error.into()))?;
    let manifest = &light::manifest_in_view(manifest);
    let lost_locks = criu::image::lost_locks(&image.dir.join(CRIU_DIR)).map_err(Failure::of_image)?;
    let world = World::new(request.own.reaper, world::last_pid_for(&manifest.tree.ids), request.network)
        .map_err(|error| Failure::of(&error))?;
    let result = netns::own_all_addresses(world.init().pid())
        .map_err(|error| Failure::NotTried(format!("cannot set up its network: {error}")))
        .and_then(|()| {
            run_criu(&request, manifest, &world, &lost_locks, Until::ItWouldRun, &|| false)
                .map(drop)
                .map_err(|error| Failure::of_restore(&error))
        });
    world.end(None);
    result
}
