//! A restore that is tried beside the running job, and never runs.
//!
//! A process of its own ([`play`], behind the hidden command `rekindle rehearse`) sees the machine's files through a
//! [`view`], in which all it writes is lost, and has PID, IPC and network namespaces of its own, in which
//! every address is its own. In there the image is restored by the same steps as in earnest, until CRIU has made every
//! process and is about to let them run. There it is called off: not one instruction of the job is executed, and the kernel
//! takes away what was made.
//!
//! What it cannot show: whether the driver takes GPU memory back, and what the job does once it runs. What has changed on
//! the machine since the snapshot (a file that is gone) is no fault of the image; only a refusal of CRIU's speaks against it.
//!
//! It takes as much memory again as the job. It is first in line for the kernel's OOM killer, and is not begun where
//! memory is short.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::{Error, Prepare, Request, Unpacking, Until, landing, run_criu};
use crate::base::chain;
use crate::config::ChangedFiles;
use crate::launch::Privileges;
use crate::launch::identity::Identity;
use crate::launch::output::{self, Bounds};
use crate::launch::world::{self, Network, World};
use crate::store::persist::Progress;
use crate::store::staging::Area;
use crate::store::{Access, Image, ImageId, JobFolder, JobName, Manifest, Store};
use crate::sys::criu::{self, Criu, Version};
use crate::sys::spawn::Ended;
use crate::sys::{cgroup, netns, process, view};

/// What is to be tried, and with what.
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
    /// This version's reaper.
    pub reaper: PathBuf,
    /// What the job has at /etc/resolv.conf, where that is not the machine's.
    pub names: Option<PathBuf>,
    /// Who the job runs as.
    pub user: Option<Identity>,
    /// Whether it has the no-new-privileges flag.
    pub no_new_privileges: bool,
    /// Seconds that CRIU may take.
    pub timeout: u64,
    /// Bytes of host memory that must stay free.
    pub reserve: u64,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Outcome {
    /// Every process was made.
    Restored {
        /// Milliseconds.
        took: u64,
    },
    /// CRIU refuses the image.
    Refused {
        /// Its reason.
        why: String,
    },
    /// It could not be tried, which says nothing about the image.
    NotTried {
        /// What was in the way.
        why: String,
    },
}

/// Tries it. For a process that was made for this: it enters namespaces, and ends after it.
#[must_use]
pub fn play(script: &Script) -> Outcome {
    let not_tried = |why: String| Outcome::NotTried { why };
    // Before the supervisor's end is noticed by anything else.
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
        return not_tried(format!("cannot bind it to the supervisor: {error}"));
    }
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "1000") {
        return not_tried(format!("cannot put it before the job for the OOM killer: {error}"));
    }
    process::be_nice();
    match try_it(script) {
        Ok(took) => Outcome::Restored { took: took.as_millis().try_into().unwrap_or(u64::MAX) },
        Err(Failure::Refused(why)) => Outcome::Refused { why },
        Err(Failure::NotTried(why)) => not_tried(why),
    }
}

/// What CRIU says where a UNIX socket cannot be connected (`open_unixsk_standalone`, `post_open_interconnected`): one of the
/// job's can be, one of another program is not in the view.
const OUTSIDE: &str = "Can't connect";

enum Failure {
    Refused(String),
    NotTried(String),
}

impl Failure {
    fn of(error: &(dyn std::error::Error + 'static)) -> Failure {
        Failure::NotTried(chain(error))
    }

    /// What CRIU said of the image, and nothing that has another reason.
    fn of_restore(error: &Error) -> Failure {
        match error {
            Error::Criu(criu::RunError::Refused { log }) if log.errors().iter().any(|line| line.contains(OUTSIDE)) => {
                Failure::NotTried("it is connected to a program outside of the job, which must not hear of it".into())
            }
            Error::Criu(criu::RunError::Refused { log }) if !log.errors().is_empty() => Failure::Refused(chain(error)),
            // It found itself wrong about the image. Killed it may have been by anybody.
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
    let open = || -> crate::store::Result<JobFolder> { Store::open(&script.store, Access::Read)?.job(&script.job) };
    let folder = open().map_err(|error| Failure::of(&error))?;
    let image = find(&folder, script.image)?;
    let manifest = image.manifest().ok_or_else(|| Failure::NotTried("the image is gone".into()))?;
    let room = room(manifest, script.reserve)?;
    let scratch = folder.scratch_dir().map_err(|error| Failure::of(&error))?;
    view::enter(&scratch, room).map_err(|error| Failure::of(&error))?;
    if let Some(names) = &script.names {
        let put = fs::copy(names, "/etc/resolv.conf");
        put.map_err(|error| Failure::NotTried(format!("cannot write its /etc/resolv.conf: {error}")))?;
    }
    let began = Instant::now();
    let result = restore(script, &folder, &image, manifest);
    let took = began.elapsed();
    // Its files are gone or others once the slot holds a later image.
    match result {
        Err(Failure::Refused(_)) if find(&folder, script.image).is_err() => {
            Err(Failure::NotTried("a later image has taken its place".into()))
        }
        Err(failure) => Err(failure),
        Ok(()) => Ok(took),
    }
}

fn find(folder: &JobFolder, id: ImageId) -> Result<Image, Failure> {
    let staged = folder.staged().into_iter().find(|image| image.id == id && image.is_good());
    staged.ok_or_else(|| Failure::NotTried("the image is not in memory any more".into()))
}

/// How many bytes may be written in the view; an error where there is too little memory.
fn room(manifest: &Manifest, reserve: u64) -> Result<u64, Failure> {
    let pages = manifest.parts.iter().filter(|part| part.path.starts_with("criu/pages-")).map(|part| part.size);
    // A file that is written to is copied to the view when it is opened.
    let files = manifest.open_files.iter().map(|file| file.size).sum::<u64>();
    // Kernel memory of the processes, and what the files grew by since.
    let need = pages.sum::<u64>().saturating_add(files.saturating_mul(2)).saturating_add(64 << 20);
    let machine = cgroup::memory_available().unwrap_or(u64::MAX);
    let group = cgroup::memory_headroom(std::process::id().cast_signed()).unwrap_or(u64::MAX);
    let free = machine.min(group).saturating_sub(reserve);
    if need > free {
        let (need, free) = (bytesize::ByteSize::b(need), bytesize::ByteSize::b(free));
        return Err(Failure::NotTried(format!("it needs {need} of memory, and {free} may be used")));
    }
    Ok(free)
}

fn restore(script: &Script, folder: &JobFolder, image: &Image, manifest: &Manifest) -> Result<(), Failure> {
    let (path, version) = &script.criu;
    let criu = Criu { path: path.clone(), version: Version(version.0, version.1, version.2) };
    let files = output::Files::create(&folder.log_dir(), Bounds::default()).map_err(|error| Failure::of(&error))?;
    let (staging, wishes, progress) = (Area::left_behind(folder), super::gpus::Wishes::default(), Progress::default());
    let request = Request {
        image,
        folder,
        criu: &criu,
        reaper: &script.reaper,
        output: &files,
        identity: script.user.as_ref(),
        privileges: if script.no_new_privileges { Privileges::Fixed } else { Privileges::MayGrow },
        timeout: Duration::from_secs(script.timeout),
        network: Network::Private,
        // The job has gone on since.
        changed_files: ChangedFiles::Warn,
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
    };
    let not_tried = |error: Error| Failure::of(&error);
    super::check_image(&request, manifest).and_then(|()| super::check_files(&request, manifest)).map_err(not_tried)?;
    super::put_files_back(&request, manifest).map_err(not_tried)?;
    let _landing = landing::put_empty(manifest, request.identity).map_err(|error| not_tried(error.into()))?;
    let lost_locks = criu::image::lost_locks(&image.dir.join("criu"))
        .map_err(|error| Failure::of_restore(&criu::RunError::Image(error).into()))?;
    let world = World::private(request.reaper, world::last_pid_for(&manifest.tree.ids), request.network)
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
