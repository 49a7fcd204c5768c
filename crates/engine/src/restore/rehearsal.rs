//! A restore that is tried beside the running job, and never runs.
//!
//! A separate process ([`play`], started by the hidden command `rekindle rehearse`) sees the machine's files through a
//! [`view`], in which all its writes are lost. It has its own PID, IPC and network namespaces, in which every address
//! is local. There the image is restored by the same steps as in a real restore, until CRIU has created every process
//! and is about to give them their rights and let them run. Then the restore is cancelled: no instruction of the job is
//! executed, and the kernel removes what was created.
//!
//! A rehearsal cannot show whether the driver restores GPU memory, or what the job does once it runs. Changes on the
//! machine since the snapshot (a missing file) are no fault of the image; only a refusal by CRIU counts against it.
//!
//! A rehearsal needs as much memory again as the job. The kernel's OOM killer chooses it first, and it is not started
//! if memory is short.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::phases::{Until, run_criu};
use super::{ChangedFiles, Compare};
use super::{Cuda, Error, Own, Prepare, Request, Unpacking, landing};
use crate::launch::Privileges;
use crate::launch::identity::Identity;
use crate::launch::output::{self, Bounds};
use crate::launch::work::WorkFolder;
use crate::launch::world::{self, Network, World};
use crate::snapshot::CRIU_DIR;
use rekindle_base::chain;
use rekindle_criu::{self as criu, Criu, Version};
use rekindle_cuda::copier::Copier;
use rekindle_os::leases::WriteLease;
use rekindle_os::spawn::Ended;
use rekindle_os::{cgroup, netns, process, view};
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
    /// The image, which is in memory.
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

/// CRIU's message if a UNIX socket cannot be connected (`open_unixsk_standalone`, `post_open_interconnected`). A socket
/// of the job can be connected; one of another program is not in the view.
const OUTSIDE: &str = "Can't connect";

/// Messages of CRIU that are caused by the rehearsal itself: it shares the machine's limits with the job, has no access
/// to its network devices, and runs at a later time. None of them is a fault of the image.
const NOT_OF_THE_IMAGE: [&str; 12] = [
    "Resource temporarily unavailable",
    "failed with -11",
    "Too many open files",
    "Cannot allocate memory",
    "No space left",
    "Disk quota exceeded",
    "Read-only file system",
    "Address already in use",
    "No such device",
    "ifindex",
    "packet socket",
    // A file that is open for reading was written to by another program since.
    "bad size",
];

enum Failure {
    Refused(String),
    NotTried(String),
}

impl Failure {
    fn of(error: &(dyn std::error::Error + 'static)) -> Failure {
        Failure::NotTried(chain(error))
    }

    /// The failure that counts against the image; errors with any other cause are `NotTried`.
    fn of_restore(error: &Error) -> Failure {
        let log = error.criu_log();
        let says = |mark: &str| log.is_some_and(|log| log.errors().iter().any(|line| line.contains(mark)));
        if says(OUTSIDE) {
            let why = "it is connected to a program outside the job, which a rehearsal must not disturb";
            return Failure::NotTried(why.into());
        }
        if log.is_some_and(criu::Log::says_killed) || NOT_OF_THE_IMAGE.iter().any(|mark| says(mark)) {
            return Failure::of(error);
        }
        match error {
            Error::Criu(criu::RunError::Refused { log }) if !log.errors().is_empty() => Failure::Refused(chain(error)),
            // CRIU found a fault in the image. A CRIU that was killed proves nothing.
            Error::Criu(criu::RunError::Gone {
                ended: Ended::Signal(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS),
                ..
            })
            | Error::Criu(criu::RunError::Image(_))
            | Error::Refused { .. } => Failure::Refused(chain(error)),
            other => Failure::of(other),
        }
    }
}

fn try_it(script: &Script) -> Result<Duration, Failure> {
    let open = || -> rekindle_store::Result<JobFolder> { Store::open(&script.store, Access::Read)?.job(&script.job) };
    let folder = open().map_err(|error| Failure::of(&error))?;
    let image = find(&folder, script.image)?;
    let manifest = image.manifest().ok_or_else(|| Failure::NotTried("the image is gone".into()))?;
    harmless(&image, manifest)?;
    let room = room(manifest, script.reserve)?;
    let work = WorkFolder::of_another_process(script.work.clone());
    let as_they_are = view::enter(&work.view(), room).map_err(|error| Failure::of(&error))?;
    // What was opened before leads around the view: the output of the running job would be cut.
    let folder = open().map_err(|error| Failure::of(&error))?;
    let image = image.seen_from_here().map_err(|error| Failure::of(&error))?;
    let manifest = image.manifest().ok_or_else(|| Failure::NotTried("the image is gone".into()))?;
    out_of_reach(&image, &as_they_are)?;
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
    staged.ok_or_else(|| Failure::NotTried("the image is no longer in memory".into()))
}

/// Checks that a second copy of the job takes only memory and time from the first.
fn harmless(image: &Image, manifest: &Manifest) -> Result<(), Failure> {
    let not_tried = |why: String| Err(Failure::NotTried(why));
    match criu::image::scarce(&image.dir.join(CRIU_DIR)) {
        Ok(None) => {}
        Ok(Some(what)) => {
            return not_tried(format!("it has {what}, and a second copy of the job would take some of them away"));
        }
        Err(error) => return Err(Failure::of_restore(&criu::RunError::Image(error).into())),
    }
    // Processes, threads, groups and sessions: an upper bound for its tasks.
    let tasks = u64::try_from(manifest.tree.ids.len()).unwrap_or(u64::MAX);
    if let Some(left) = cgroup::tasks_headroom(std::process::id().cast_signed()).filter(|left| left / 4 < tasks) {
        return not_tried(format!("it has up to {tasks} tasks, and its control group allows only {left} more"));
    }
    // Copying a file to the view opens it, which breaks a write lease of the job.
    let leases = WriteLease::all();
    let leased = manifest.open_files.iter().map(|file| &file.path).find(|path| {
        let inode = fs::metadata(path.as_path()).map(|metadata| metadata.ino());
        inode.is_ok_and(|inode| leases.iter().any(|lease| lease.is_on(inode)))
    });
    match leased {
        Some(path) => not_tried(format!("there is a write lease on {}", path.display())),
        None => Ok(()),
    }
}

/// Maximum size of one of CRIU's tables of files: some millions of files.
const MAX_TABLE: u64 = 256 << 20;

/// Checks that the job has no files in the places that the view shows unchanged.
fn out_of_reach(image: &Image, as_they_are: &[PathBuf]) -> Result<(), Failure> {
    let tables = ["files.img", "ghost-file.img", "remap-fpath.img"].map(|name| image.dir.join(CRIU_DIR).join(name));
    let mut found = Vec::new();
    for table in tables {
        match table.content(MAX_TABLE) {
            Ok(bytes) => found.push(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::NotTried(format!("{} cannot be read: {error}", table.display()))),
        }
    }
    let names = |path: &&PathBuf| {
        // CRIU writes paths with and without the leading slash.
        let bytes = path.as_os_str().as_bytes();
        let bytes = bytes.strip_prefix(b"/").unwrap_or(bytes);
        found.iter().any(|table| table.windows(bytes.len().max(1)).any(|window| window == bytes))
    };
    match as_they_are.iter().find(names) {
        Some(path) => {
            Err(Failure::NotTried(format!("it has files at {}, where no overlay can be mounted", path.display())))
        }
        None => Ok(()),
    }
}

/// How many bytes may be written in the view; an error if there is too little memory.
fn room(manifest: &Manifest, reserve: u64) -> Result<u64, Failure> {
    /// Kernel memory of the processes, and the growth of files since the snapshot.
    const BESIDES: u64 = 64 << 20;
    let pages = manifest.parts.iter().filter(|part| part.path.starts_with("criu/pages-")).map(|part| part.size);
    let pages = pages.sum::<u64>().saturating_add(BESIDES);
    // A file that is opened for writing is copied to the view, and then overwritten with the content in the image.
    let files = manifest.open_files.iter().map(|file| {
        let metadata = fs::metadata(file.path.as_path());
        let allocated = metadata.map_or(file.size, |metadata| metadata.blocks().saturating_mul(512));
        allocated.saturating_mul(if file.part.is_some() { 2 } else { 1 })
    });
    let need = pages.saturating_add(files.sum::<u64>());
    let machine = cgroup::memory_available().unwrap_or(u64::MAX);
    let group = cgroup::memory_headroom(std::process::id().cast_signed()).unwrap_or(u64::MAX);
    // The job may grow meanwhile.
    let free = machine.min(group).saturating_sub(reserve);
    let free = free.saturating_sub(free / 8);
    if need > free {
        let (need, free) = (bytesize::ByteSize::b(need), bytesize::ByteSize::b(free));
        return Err(Failure::NotTried(format!("it needs {need} of memory, and {free} is available")));
    }
    Ok(free.saturating_sub(pages))
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
        changed_files: ChangedFiles::Warn,
        compare: Compare::default(),
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
    super::put_files_back(&request, manifest).map_err(not_tried)?;
    let _landing = landing::put_back::put_empty(manifest, request.identity).map_err(|error| not_tried(error.into()))?;
    let lost_locks = criu::image::lost_locks(&image.dir.join(CRIU_DIR))
        .map_err(|error| Failure::of_restore(&criu::RunError::Image(error).into()))?;
    let world = World::private(request.own.reaper, world::last_pid_for(&manifest.tree.ids), request.network)
        .map_err(|error| Failure::of(&error))?;
    let result = world
        .init()
        .map_or(Ok(()), |init| netns::own_all_addresses(init.pid()))
        .map_err(|error| Failure::NotTried(format!("cannot set up its network: {error}")))
        .and_then(|()| {
            run_criu(&request, manifest, &world, &lost_locks, Until::BeforeItRuns, &|| false)
                .map(drop)
                .map_err(|error| Failure::of_restore(&error))
        });
    world.end(None);
    result
}
