//! Freeze and capture: an ordered list of phases, each timed, each with an undo.
//!
//! ```text
//!  preflight   is a snapshot possible: memory, disk, what CRIU cannot dump          job runs
//!  find        the CUDA processes of the tree                                       job runs
//!  prepare     a place for the image, with its pages          undo: give it up      job runs
//!  lock        all of them, at once                     undo: unlock               ---- freeze begins (CUDA)
//!  barrier     only in a group: all members are locked
//!  cable       only in a group: pull it, until all have         undo: plug it in
//!  checkpoint  device memory to host memory             undo: restore
//!  dump        CRIU writes the tree, lets it run on     undo: drop saved links
//!  restore     host memory to device memory
//!  copy        only with gpu.memory = "kept": wait until the memory that stayed on the GPU is copied,
//!              to the image or to room on the same GPU
//!  others      only in a group, with CUDA: all members have restored theirs, or 10 s are over
//!  unlock
//!  check       every CUDA process is running again                                  ---- freeze ends
//!  complete    what was copied to room on the GPU goes to the image                  job runs
//!  settle      only in a group: all have dumped; plug the cable in
//!  publish     a manifest in memory, or hash, fsync, rename; the job runs
//! ```
//!
//! In a group the job runs on after its own dump, and its cable stays out until all members have dumped. So no packet
//! and no acknowledgement crosses the cut, and nobody waits frozen for a slow member; but for its GPU memory, for some seconds:
//! a rank that runs meanwhile waits on its GPU, and the driver may end it.
//!
//! The snapshot is taken again if the image has descriptors in flight between processes that could not be restored
//! correctly (`in_flight`), a process that was killed and whose exit status was not collected (`dead`), one in the
//! middle of cuInit, or if it lacks a connection inside the job that was not accepted yet (`waiting`) or was made just now, or
//! events for files that were not read (`events`). The job continues, and a moment later this has passed.
//!
//! Invariants:
//! - A phase that fails undoes all phases before it, in reverse order, and the job continues. If that is impossible
//!   (the driver cannot restore a process: there is no second try) the error says so ([`Error::job_is_lost`]), and the
//!   job must be restored from an image.
//! - Nothing is in memory or in the store under an image's name before it is complete ([`rekindle_store`]). After a
//!   power cut at most a draft remains, which the next start removes.

mod barrier;
pub mod dead;
mod group;
mod mapped;
mod moment;
pub mod opened;
pub mod pages;
mod phases;
mod preflight;
mod prepare;
mod seen;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::launch::memory::GpuMemory;
use crate::launch::work::WorkFolder;
use crate::launch::{self, Job, Privileges};
use crate::parts::backlog::Backlog;
use crate::parts::fds;
use crate::parts::files::record;
use crate::parts::gpu::capture::{self as gpu, Group};
use crate::parts::kept::capture as kept;
use crate::parts::terminals::Unsaved;
use crate::parts::unrestorable::Unrestorable;
use rekindle_base::interval::Choice;
use rekindle_criu::image::Dangling;
use rekindle_criu::{self as criu, Criu};
use rekindle_cuda::copier::Copier;
use rekindle_os::exits::Watched;
use rekindle_store::manifest::{self, Manifest, Reason};
use rekindle_store::retention::survey::{Limits, NoRoom};
use rekindle_store::staging::{self, Area, admission};
use rekindle_store::take::TakeError;
use rekindle_store::{Image, JobFolder, JobPath, WriterLock};

pub(crate) use crate::parts::events::Unread;
pub(crate) use crate::parts::fds::InFlight;
pub use crate::parts::gpu::capture::{Elsewhere, Operations};
pub use crate::parts::tcp::capture::TcpChoice;
pub use crate::parts::tcp::waiting::{Queues, Unaccepted};
pub use crate::steps::{Panicked, guarded};
pub use barrier::{Barrier, Settled};
pub use dead::Deaths;
pub(crate) use dead::Unnoticed;
pub(crate) use preflight::Refusal;

/// CRIU's images within an image.
pub(crate) const CRIU_DIR: &str = "criu";

/// Everything a snapshot needs; nothing in it changes while the job runs.
#[derive(Debug)]
pub struct Subject<'a> {
    /// The running job.
    pub job: &'a Job,
    /// Where its images go.
    pub folder: &'a JobFolder,
    /// Proof that nobody else writes to the store.
    pub lock: &'a WriterLock,
    /// How it is taken.
    pub options: &'a Options,
    /// CRIU.
    pub criu: &'a Criu,
    /// How the job was launched, for the manifest.
    pub launch: &'a Launch,
    /// Files of ours.
    pub ours: Ours<'a>,
    /// Where images are stored in memory; `None`: in a slot on the disk.
    pub staging: Option<&'a Area>,
    /// The job's output, rotated while the job is frozen.
    pub output: &'a launch::output::Files,
    /// The present snapshot interval, if it was chosen automatically.
    pub interval: Option<&'a Choice>,
    /// What earlier snapshots recorded about dead processes of the job.
    pub deaths: &'a Deaths,
    /// What earlier snapshots recorded about connections that the job has not accepted.
    pub queues: &'a Queues,
    /// Copies memory that stays on the GPU.
    pub copier: &'a Copier,
    /// The other members, if the image is a part of a group image.
    pub group: Option<&'a dyn Barrier>,
}

/// Files of ours that a snapshot needs.
#[derive(Debug)]
pub struct Ours<'a> {
    /// Those that the job has mapped, to be kept in the image.
    pub mapped: Vec<PathBuf>,
    /// The folder of our own files, in which CRIU works.
    pub work: &'a WorkFolder,
}

/// Settings for snapshots.
#[derive(Debug, Clone)]
pub struct Options {
    /// Absolute folders whose files are all captured, also those that the job has closed.
    pub track: Vec<PathBuf>,
    /// Maximum bytes of files on disk in an image, for files that the job changes in place.
    pub file_limit: u64,
    /// What happens to established TCP connections.
    pub tcp: TcpChoice,
    /// How long the CUDA driver may wait for running kernels; at least 1 ms, because 0 means for ever to the driver.
    pub lock_timeout: Duration,
    /// How long all attempts of one snapshot to lock CUDA may hold up the job, together.
    pub lock_limit: Duration,
    /// How long CRIU may take to stop all tasks; CRIU counts whole seconds.
    pub stop_limit: Duration,
    /// How long the whole dump may take, while the job is frozen.
    pub freeze_limit: Duration,
    /// Where large allocations of GPU memory are meanwhile.
    pub memory: GpuMemory,
    /// Of memory that stays on the GPU: one of so many snapshots copies all of it and compares nothing.
    pub full_copy_every: u32,
    /// Bytes of host memory that must stay free.
    pub memory_reserve: u64,
    /// Limits that decide whether the store has room.
    pub limits: Limits,
    /// Threads that copy and hash.
    pub threads: usize,
    /// Whether the job's rights can grow.
    pub privileges: Privileges,
}

/// The launch as it is recorded in a manifest.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The command line.
    pub command: Vec<String>,
    /// The working directory.
    pub directory: JobPath,
    /// The job's user, if it is not the supervisor's.
    pub user: Option<String>,
    /// The user that the job runs as, if it is not the supervisor's.
    pub identity: Option<launch::identity::Identity>,
    /// Id of the run that started the job from the beginning.
    pub lineage: String,
}

/// A snapshot that was published.
#[derive(Debug)]
pub struct Taken {
    /// The image.
    pub image: Image,
    /// How long the job was frozen.
    pub freeze: Duration,
    /// What could not be done, in words; none of it makes the image unusable.
    pub notes: Vec<String>,
    /// The kinds of objects in the image, each in a few words.
    pub kinds: BTreeSet<String>,
    /// The processes of the image below the root, opened while they were frozen.
    pub open: Vec<Watched>,
}

/// Why there is no new image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was not tried; the job never stopped.
    #[error("not tried: {0}")]
    Refused(#[from] Refusal),
    /// The job has rights or files that a restore would refuse.
    #[error("not tried, because the image could not be restored: {0}")]
    Guard(String),
    /// A hook prevented the snapshot.
    #[error("not tried: {0}")]
    Hook(Box<dyn std::error::Error + Send + Sync>),
    /// The GPUs could not be frozen.
    #[error(transparent)]
    Gpu(gpu::Error),
    /// Memory that stays on the GPU was not copied.
    #[error("copy: {0}")]
    Kept(#[from] kept::Error),
    /// CRIU's plugin could not be put in its place.
    #[error(transparent)]
    Plugin(#[from] crate::launch::plugin::Error),
    /// CRIU could not dump the tree.
    #[error("dump: {0}")]
    Dump(#[from] criu::RunError),
    /// A process has ended its first thread.
    #[error("dump: {0}")]
    Ending(Unrestorable),
    /// Descriptors in flight between processes could not be restored.
    #[error("dump: {0}")]
    InFlight(InFlight),
    /// A process has NVIDIA devices open, and has just begun.
    #[error("dump: {0}")]
    Starting(String),
    /// Connections inside the job wait to be accepted.
    #[error("dump: {0}, and the image would not have them")]
    Unaccepted(Unaccepted),
    /// Connections by UNIX sockets wait to be accepted.
    #[error("not tried: {0}")]
    Backlog(Backlog),
    /// CRIU has closed a connection inside the job, because there was none when it was told what to do.
    #[error(
        "dump: processes of the job have connected to each other since the snapshot began, and the image would not have that connection"
    )]
    Connected,
    /// Data between processes of the job was on its way, and could not be added to the image.
    #[error("dump: {0}, and the image would not have it")]
    OnItsWay(String),
    /// Events for files have come since, and CRIU would drop them.
    #[error("dump: the image would not have {0}")]
    Unread(Unread),
    /// A terminal has something that cannot be put back.
    #[error("dump: {0}")]
    Terminal(Unsaved),
    /// What would have prevented the attempt has come about since.
    #[error("dump: {0}")]
    Late(Refusal),
    /// A process was killed, and its parent has not collected its exit status.
    #[error("{0}: the snapshot would lose that status, so it is refused until the parent has it")]
    Unnoticed(Unnoticed),
    /// CRIU would refuse to restore the image.
    #[error("dump: {}", in_words(.0))]
    Dangling(Vec<Dangling>),
    /// The image that CRIU wrote is incomplete or damaged.
    #[error("dump: the image is incomplete or damaged: {0}")]
    Image(#[from] criu::image::Error),
    /// The store could not take it.
    #[error("store: {0}")]
    Store(#[from] rekindle_store::Error),
    /// There is no room for it in memory.
    #[error("not tried: {0}")]
    NoRoom(#[from] admission::Refusal),
    /// There is no room for it in the store.
    #[error("not tried: {0}")]
    NoRoomInStore(#[from] NoRoom),
    /// The place in memory failed.
    #[error("staging: {0}")]
    Staging(#[from] staging::Error),
    /// The job's memory could not be taken from CRIU.
    #[error("dump: {0}")]
    Pages(#[from] pages::Error),
    /// The folder of CRIU's images cannot be given to CRIU.
    #[error("dump: {0}")]
    Images(#[from] opened::Error),
    /// A file of ours could not be read or written.
    #[error("{what}")]
    Io {
        /// What was done.
        what: String,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// A fault of rekindle.
    #[error(transparent)]
    Panicked(#[from] Panicked),
    /// The job ended meanwhile.
    #[error("the job ended during the snapshot")]
    JobEnded,
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The group does not take this snapshot.
    #[error("the group takes no snapshot: {0}")]
    Group(String),
    /// The cable to the group cannot be pulled.
    #[error(transparent)]
    Cable(#[from] launch::group::Error),
    /// A phase failed and so did its undo: the job does not run on.
    #[error("{cause}; and the job could not be resumed: {undo}")]
    Lost {
        /// The first failure.
        cause: Box<Error>,
        /// The failure of the undo.
        undo: String,
    },
}

fn in_words(sockets: &[Dangling]) -> String {
    let one = |socket: &Dangling| match socket.process {
        Some(pid) => format!("UNIX socket {} of process {pid}", socket.inode),
        None => format!("UNIX socket {}", socket.inode),
    };
    let list: Vec<String> = sockets.iter().map(one).collect();
    format!(
        "{} waits for a program outside the job to accept its connection, which cannot be restored: find \
         that program with `ss -xp` and start it inside the job, or close the connection before a snapshot",
        list.join(", ")
    )
}

impl From<gpu::Error> for Error {
    fn from(error: gpu::Error) -> Error {
        match error {
            gpu::Error::Cancelled => Error::Cancelled,
            gpu::Error::Lost { cause, undo } => Error::Lost { cause: Box::new(Error::Gpu(*cause)), undo },
            other => Error::Gpu(other),
        }
    }
}

impl From<TakeError> for Error {
    fn from(error: TakeError) -> Error {
        match error {
            TakeError::NoRoom(error) => Error::NoRoom(error),
            TakeError::DiskFull(error) => Error::NoRoomInStore(error),
            TakeError::Area(error) => Error::Staging(error),
        }
    }
}

impl Error {
    /// Whether the job cannot continue and must be restored from an image.
    #[must_use]
    pub fn job_is_lost(&self) -> bool {
        matches!(self, Error::Lost { .. })
    }

    /// Whether the cause may disappear soon, so that another try is worthwhile.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Error::InFlight(_)
            | Error::Ending(_)
            | Error::Starting(_)
            | Error::Unnoticed(_)
            | Error::Unaccepted(_)
            | Error::Backlog(_)
            | Error::Connected
            | Error::OnItsWay(_)
            | Error::Unread(_)
            | Error::Terminal(_)
            | Error::Dangling(_) => true,
            Error::Gpu(gpu::Error::Restless { .. } | gpu::Error::Initializing { .. } | gpu::Error::Ended { .. }) => {
                true
            }
            Error::Dump(criu::RunError::TaskDied { .. }) => true,
            Error::Dump(error) if error.says_criu_killed() => true,
            Error::Dump(criu::RunError::Refused { log }) => log.says_moment(),
            _ => false,
        }
    }

    /// Whether a process was just beginning or ending, or a connection was just made or closed, so that the next attempt should
    /// be made at once.
    fn passes_at_once(&self) -> bool {
        match self {
            Error::Starting(_)
            | Error::Ending(_)
            | Error::Unaccepted(_)
            | Error::Connected
            | Error::OnItsWay(_)
            | Error::Terminal(_)
            | Error::Gpu(gpu::Error::Ended { .. }) => true,
            Error::Dump(criu::RunError::Refused { log }) => log.says_ending() || log.says_unaccepted(),
            _ => false,
        }
    }

    /// Whether the GPUs had too much work to be locked.
    fn is_busy(&self) -> bool {
        matches!(self, Error::Gpu(gpu::Error::Cuda { source, .. }) if source.is_not_ready())
    }

    /// CRIU's log, if CRIU failed.
    #[must_use]
    pub fn criu_log(&self) -> Option<&criu::Log> {
        match self {
            Error::Dump(error) => error.log(),
            Error::Lost { cause, .. } => cause.criu_log(),
            _ => None,
        }
    }
}

/// Takes a snapshot. `cancelled` is asked while CRIU works; a snapshot that is cancelled is undone.
///
/// # Errors
/// When a phase fails. Unless [`Error::job_is_lost`], the job continues unaffected.
pub fn take(subject: &Subject<'_>, reason: Reason, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<Taken, Error> {
    let mut frozen = frozen(subject, reason, cancelled)?;
    let freeze = frozen.time();
    let manifest = manifest(&mut frozen).and_then(|manifest| {
        frozen.settle()?;
        Ok(manifest)
    });
    match manifest
        .and_then(|manifest| frozen.ready.target.seal(manifest, subject.options.threads).map_err(Error::Staging))
    {
        Ok(image) => {
            // A file of memory that stayed is not in the image if none does any more.
            subject.copier.forget();
            let moment = frozen.dumped.moment;
            let gpus = &frozen.gpus;
            let of_gpus = [gpus.group.refused(), gpus.group.tied(gpus.inventory.gpus.len())];
            let notes = moment.notes.into_iter().chain(of_gpus.into_iter().flatten()).collect();
            Ok(Taken { image, freeze, notes, kinds: frozen.kinds, open: moment.open })
        }
        Err(error) => {
            record::drop_links(&frozen.saved_links, frozen.env.root(), frozen.env.user());
            Err(error)
        }
    }
}

/// Completes the image while the job runs, and returns everything known of it.
fn manifest(frozen: &mut phases::Frozen<'_>) -> Result<Manifest, Error> {
    frozen.complete()?;
    // As soon as it can be: what is described are files, too, and the job may change or remove them.
    let mut manifest = describe(frozen)?;
    frozen.copied()?;
    // Which GPU has what is known only now.
    manifest.kept.clone_from(&frozen.kept);
    frozen.env.subject.lock.confirm()?;
    Ok(manifest)
}

/// Whether an image may contain a process that was killed and not waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dead {
    Refused,
    Taken,
}

/// Whether an image may lack events for files that came just before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Events {
    Refused,
    Dropped,
}

/// Inputs of all phases.
#[derive(Clone, Copy)]
struct Env<'a> {
    subject: &'a Subject<'a>,
    cancelled: &'a (dyn Fn() -> bool + Sync),
    dead: Dead,
    events: Events,
    reason: Reason,
}

/// How often, and after which pause, a snapshot is tried again while a process is in cuInit: that takes 100 to 190 ms
/// (one H200, driver 580), and more with more GPUs.
const INITIALIZING: (u32, Duration) = (30, Duration::from_millis(100));

/// The same while processes begin and end, with a pause that doubles each time.
const COMING_AND_GOING: (u32, Duration) = (4, Duration::from_millis(50));

/// After the lock has timed out: how often, how long each, and for how long it is tried whether the GPUs pause. Kernels that run
/// for longer than the lock may wait, and then pause for seconds, would hardly ever be met by the next snapshot. Each try holds
/// new work of the job up for at most 4 % of the time.
const PROBES: (Duration, Duration, Duration) =
    (Duration::from_millis(250), Duration::from_millis(10), Duration::from_secs(30));

/// How often it is tried again while there are events that were not read.
const EVENTS: u32 = 3;

/// How often, and after which pause, it is tried again at once when CRIU was killed. CRIU's code in the job's processes
/// ends itself when CRIU is gone, in that time.
const KILLED: (u32, Duration) = (2, Duration::from_millis(50));

/// Everything that is done while the job is frozen; more than once if a moment was not one to take an image of.
fn frozen<'a>(
    subject: &'a Subject<'a>,
    reason: Reason,
    cancelled: &'a (dyn Fn() -> bool + Sync),
) -> Result<phases::Frozen<'a>, Error> {
    // It may be reaped, and its pid another process, while others of the job have not ended.
    if subject.job.root.has_ended().unwrap_or(true) {
        return Err(Error::JobEnded);
    }
    let root = subject.job.root.pid();
    let over = || cancelled() || subject.job.root.has_ended().unwrap_or(true);
    let mut attempt = 1;
    let (mut initializing, mut coming_and_going, mut killed) = (0, 0, 0);
    let mut until = None;
    let mut probes_end = None;
    // An attempt that fails fails for the whole group.
    let mut events = if subject.group.is_some() { 0 } else { EVENTS };
    loop {
        let late = until.is_some_and(|until| until <= Instant::now());
        let dead = if late { Dead::Taken } else { Dead::Refused };
        let none_is_ending = dead::let_end(root, &over);
        let unread = if events == 0 { Events::Dropped } else { Events::Refused };
        let result = phases::freeze(Env { subject, cancelled, dead, events: unread, reason });
        // The others are locked or dumped by now: this job cannot reach the cut again.
        if subject.group.is_some_and(Barrier::all_wait) {
            return result;
        }
        match result {
            Err(Error::Unnoticed(found)) => {
                tracing::info!("trying the snapshot again: {found}");
                let until = *until.get_or_insert_with(dead::limit);
                if !subject.deaths.wait(root, until, &over) && over() {
                    return Err(Error::Unnoticed(found));
                }
            }
            Err(Error::Gpu(error @ gpu::Error::Initializing { .. })) if initializing < INITIALIZING.0 && !over() => {
                if initializing == 0 {
                    tracing::info!("trying the snapshot again: {error}");
                }
                initializing += 1;
                std::thread::sleep(INITIALIZING.1);
            }
            Err(error) if error.is_busy() && subject.group.is_none() && !over() => {
                let end = *probes_end.get_or_insert_with(|| Instant::now() + PROBES.2);
                if !pauses(root, end, &over)? {
                    return Err(error);
                }
                tracing::info!("the GPUs pause: trying the snapshot again");
            }
            Err(error)
                if error.passes_at_once() && none_is_ending && coming_and_going < COMING_AND_GOING.0 && !over() =>
            {
                tracing::info!("trying the snapshot again: {error}");
                std::thread::sleep(COMING_AND_GOING.1 * (1 << coming_and_going));
                coming_and_going += 1;
            }
            Err(Error::Dump(error)) if error.says_criu_killed() && killed < KILLED.0 => {
                // If the job was killed with it, that is known soon.
                std::thread::sleep(KILLED.1);
                if over() {
                    return Err(if cancelled() { Error::Cancelled } else { Error::JobEnded });
                }
                tracing::warn!("{error}. The job runs on, and the snapshot is tried again at once");
                killed += 1;
            }
            // What is read meanwhile is waited for by the next preflight.
            Err(error @ Error::Unread(_)) if events > 0 && !over() => {
                tracing::info!("trying the snapshot again: {error}");
                events -= 1;
            }
            Err(Error::InFlight(found)) if attempt < fds::ATTEMPTS && found.moves(root, attempt, cancelled) => {
                tracing::info!("trying the snapshot again: {found}");
                attempt += 1;
            }
            Err(error) => return Err(error),
            Ok(frozen) => return Ok(frozen),
        }
    }
}

/// Waits until the GPUs of the job pause. Returns whether they do.
fn pauses(root: i32, end: Instant, over: &dyn Fn() -> bool) -> Result<bool, Error> {
    let (every, limit, _) = PROBES;
    tracing::info!("the GPUs of the job are busy: waiting until they pause, for at most {:?}", PROBES.2);
    while Instant::now() < end && !over() {
        std::thread::sleep(every);
        match Group::pauses(root, limit) {
            Ok(true) => return Ok(true),
            Err(error @ gpu::Error::Lost { .. }) => return Err(error.into()),
            // A process that has just begun or ended.
            Ok(false) | Err(_) => {}
        }
    }
    Ok(false)
}

/// The manifest without the image's parts, which publishing adds.
fn describe(frozen: &phases::Frozen<'_>) -> Result<Manifest, Error> {
    let (subject, gpus, moment) = (frozen.env.subject, &frozen.gpus, &frozen.dumped.moment);
    let target = &frozen.ready.target;
    let ids = criu::image::ids(&target.dir().join(CRIU_DIR))?;
    let cuda = gpus.group.inner_pids();
    Ok(Manifest {
        id: target.id(),
        job: subject.folder.name().clone(),
        lineage: subject.launch.lineage.clone(),
        taken: moment.taken,
        reason: frozen.env.reason,
        command: subject.launch.command.clone(),
        directory: subject.launch.directory.clone(),
        user: subject.launch.user.clone(),
        rights: Some(moment.rights.clone()),
        host: crate::launch::host::describe(),
        rekindle: env!("CARGO_PKG_VERSION").into(),
        criu: subject.criu.version.to_string(),
        driver: if cuda.is_empty() { None } else { gpus.inventory.driver.clone() },
        gpus: gpus.inventory.gpus.iter().map(manifest::Gpu::from).collect(),
        tree: manifest::JobTree {
            root: ids.processes.first().copied().unwrap_or_default(),
            job: frozen.seen.job_pid,
            processes: frozen.processes(&ids.processes),
            ids: ids.all,
            cuda,
            cuda_threads: gpus.group.inner_threads(),
            stopped: moment.stopped.clone(),
            cuda_memory: gpus.used(),
        },
        open_files: moment.open_files.clone(),
        absent_files: moment.captured.absent.clone(),
        attributes: Some(moment.captured.attributes.all().to_vec()),
        tracked_folders: moment.captured.tracked.clone(),
        given_files: moment.given_files.clone(),
        folders: moment.folders.clone(),
        fifos: moment.fifos.clone(),
        control_groups: moment.control_groups.clone(),
        bindings: moment.threads.bindings.clone(),
        scheduling: moment.threads.scheduling.clone(),
        timers: moment.times.timers.clone(),
        cpu_time: moment.times.cpu,
        saved_links: frozen.saved_links.clone(),
        recreate: frozen.dumped.recreate.clone(),
        log: JobPath::new(subject.folder.log_dir().path()).ok(),
        mapped_files: frozen.mapped_files()?,
        landing: frozen.landing.clone(),
        kept: None,
        tcp: frozen.seen.tcp,
        phases: frozen.timings.phases.clone(),
        freeze_us: u64::try_from(frozen.time().as_micros()).unwrap_or(u64::MAX),
        interval: subject.interval.cloned(),
        group: subject.group.map(|group| group.part()),
        bytes: 0,
        parts: Vec::new(),
        chunks: None,
    })
}
