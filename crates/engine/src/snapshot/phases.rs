//! The phases in their order, with their undo, and the data that each passes to the next.
//!
//! Results of the phases before the freeze ([`Seen`], [`Gpus`], [`Ready`]) need no undo: they are dropped. The phases
//! of the freeze are a table with an undo each.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::io::Write;
use std::time::{Duration, Instant};

use super::CRIU_DIR;
use super::mapped;
use super::moment::{Before, Moment, Still, Wrong};
use super::opened::opened;
use super::pages::Drained;
use super::prepare::Ready;
use super::seen::{Gpus, Seen, copied};
use super::{Env, Error};
use crate::launch::group::Unplugged;
use crate::launch::identity::Identity;
use crate::launch::plugin;
use crate::parts::devices::Devices;
use crate::parts::files::{nameless, record};
use crate::parts::kept::capture::{self as kept, Copy};
use crate::parts::{landing, tasks, tcp};
use crate::steps::{self, Failed, Step, Timer};
use rekindle_criu::{self as criu, DumpOptions, Hooks, Notify, Place, Plugin};
use rekindle_cuda::copier;
use rekindle_cuda::sharing::Own;
use rekindle_os::beneath::{Beneath, Owners};
use rekindle_os::spawn::Ended;
use rekindle_os::{process, tcp_repair};
use rekindle_store::manifest::{Kept, Landing, MappedFile, Phase, Recreate, SavedLink, TreeProcess};

/// The phases of the freeze. After the last cancellable one the job is resumed in any case.
fn steps<'a>() -> [Step<Freeze<'a>, Error>; 10] {
    [
        Step::new("lock", |f: &mut Freeze<'a>| f.lock()).cancellable().undo(|f| f.undo_lock()),
        Step::new("barrier", |f: &mut Freeze<'a>| f.wait_for_locks()).cancellable().only_if(|f| f.env.is_in_group()),
        Step::new("cable", |f: &mut Freeze<'a>| f.pull_cable())
            .cancellable()
            .only_if(|f| f.env.is_in_group())
            .undo(|f| f.plug_cable()),
        Step::new("checkpoint", |f: &mut Freeze<'a>| f.checkpoint()).cancellable().undo(|f| f.undo_checkpoint()),
        Step::new("dump", |f: &mut Freeze<'a>| f.dump()).undo(|f| f.undo_dump()),
        Step::new("restore", |f: &mut Freeze<'a>| f.restore()),
        Step::new("copy", |f: &mut Freeze<'a>| f.leave_copy()).only_if(|f| f.copying.is_some()),
        Step::new("others", |f: &mut Freeze<'a>| {
            f.wait_for_restores();
            Ok(())
        })
        .only_if(|f| f.env.is_in_group() && !f.gpus.group.is_empty()),
        Step::new("unlock", |f: &mut Freeze<'a>| f.unlock()),
        Step::new("check", |f: &mut Freeze<'a>| f.check()),
    ]
}

/// Largest deleted but open file that CRIU copies into the image, in bytes: the largest value that its protocol has room
/// for, in MiB. Shared memory is in deleted files, of tens of MB each with NCCL, or the size of a batch with DataLoader: a
/// longer freeze is better than no image.
const GHOST_LIMIT: u32 = 4095 << 20;

/// How long the copy behind the job may take once the snapshot is cancelled. If the job has died, it is restored from this
/// image: at 53 GB/s the memory of the largest GPUs (141 GB) takes 2.7 s. On a slow disk it would take minutes, and what is copied
/// from another file may take longer, too.
const FOR_THE_REST: Duration = Duration::from_secs(5);

/// When each phase began, and how long it took.
pub(super) struct Timings {
    begun: Instant,
    pub(super) phases: Vec<Phase>,
}

impl Timings {
    pub(super) fn new() -> Timings {
        Timings { begun: Instant::now(), phases: Vec::new() }
    }

    /// The time from the lock to the last unlock.
    fn locked(&self) -> Duration {
        let at = |name: &str| self.phases.iter().find(|p| p.phase == name);
        match (at("lock"), at("unlock")) {
            (Some(lock), Some(unlock)) => {
                Duration::from_micros((unlock.started_us + unlock.took_us).saturating_sub(lock.started_us))
            }
            _ => Duration::ZERO,
        }
    }
}

impl Timer for Timings {
    fn run<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let started = self.begun.elapsed();
        let result = work();
        let took = self.begun.elapsed().saturating_sub(started);
        let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        self.phases.push(Phase { phase: name.into(), started_us: us(started), took_us: us(took) });
        tracing::debug!(phase = name, took = ?took, "snapshot phase");
        result
    }
}

/// The results of the dump.
pub(super) struct Dumped {
    pub(super) moment: Moment,
    /// All of the job's pages, if they were received through FIFOs.
    drained: Option<Drained>,
    frozen: Duration,
    pub(super) recreate: Vec<Recreate>,
}

/// A freeze under way.
pub(super) struct Freeze<'a> {
    pub(super) env: Env<'a>,
    seen: Seen,
    gpus: Gpus,
    ready: Ready<'a>,
    landing: Vec<Landing>,
    /// The memory that stays on the GPU, and its copy under way.
    kept: Option<Kept>,
    copying: Option<Copy<'a>>,
    saved_links: Vec<SavedLink>,
    dumped: Option<Dumped>,
    /// The cable to the group, while it is out.
    pub(super) cable: Option<Unplugged<'a>>,
}

/// A freeze that is over: the job runs, and the image is yet to be completed and published.
pub(super) struct Frozen<'a> {
    pub(super) env: Env<'a>,
    /// The kinds of objects in the image.
    pub(super) kinds: BTreeSet<String>,
    /// The copy of the memory that stayed on the GPU. Before the slot, to which it writes: what is dropped first is over first.
    copying: Option<Copy<'a>>,
    pub(super) seen: Seen,
    pub(super) gpus: Gpus,
    pub(super) ready: Ready<'a>,
    pub(super) landing: Vec<Landing>,
    /// The memory that stayed on the GPU.
    pub(super) kept: Option<Kept>,
    pub(super) saved_links: Vec<SavedLink>,
    pub(super) dumped: Dumped,
    pub(super) timings: Timings,
    /// The cable to the group, while it is out.
    pub(super) cable: Option<Unplugged<'a>>,
}

/// Runs all phases up to the moment at which the job runs again. When one fails, it and all before it are undone.
pub(super) fn freeze<'a>(env: Env<'a>) -> Result<Frozen<'a>, Error> {
    let mut timings = Timings::new();
    let go_on = || if (env.cancelled)() { Err(Error::Cancelled) } else { Ok(()) };
    go_on()?;
    let mut seen = timings.run("preflight", || Seen::look(&env))?;
    go_on()?;
    let gpus = timings.run("find", || Gpus::find(env.root()))?;
    go_on()?;
    let ready = timings.run("prepare", || Ready::make(&env, &mut seen, &gpus))?;
    let (landing, saved_links) = (Vec::new(), Vec::new());
    let (kept, copying, dumped, cable) = (None, None, None, None);
    let mut freeze = Freeze { env, seen, gpus, ready, landing, kept, copying, saved_links, dumped, cable };
    if let Err(failed) = steps::run(&steps(), &mut freeze, &mut timings, &go_on) {
        return Err(freeze.failed(failed));
    }
    let Freeze { env, seen, gpus, mut ready, landing, kept, copying, saved_links, dumped, cable } = freeze;
    let dumped = dumped.ok_or_else(silent)?;
    // The driver has read its memory back, so the names are not needed any more.
    ready.armed = landing::capture::Armed::default();
    let kinds = BTreeSet::new();
    Ok(Frozen { env, kinds, copying, seen, gpus, ready, landing, kept, saved_links, dumped, timings, cable })
}

/// The error of a dump, with the process where CRIU names none.
fn by_name(error: criu::RunError, root: i32) -> Error {
    let says_ending = error.log().is_some_and(criu::Log::says_ending);
    let found = says_ending.then(|| tasks::without_first_thread(&process::tree(root))).flatten();
    found.map_or_else(|| error.into(), Error::Ending)
}

impl Freeze<'_> {
    /// The error of a freeze that failed and was undone.
    fn failed(&self, Failed { cause, not_undone }: Failed<Error>) -> Error {
        // A CUDA process that cannot run, or whose GPU memory was not restored, can only be restored from an image.
        let stuck = self.gpus.group.stuck();
        if not_undone.is_empty() && stuck.is_none() {
            return cause;
        }
        let undo = not_undone.into_iter().chain(stuck).collect::<Vec<_>>().join("; ");
        Error::Lost { cause: Box::new(cause), undo }
    }

    /// Locks all, and begins to copy the memory that stays on the GPU.
    fn lock(&mut self) -> Result<(), Error> {
        let own = if self.ready.kept.is_some() { Own::Stays } else { Own::IsCopied };
        self.gpus.lock(&self.env, own)?;
        let staying = self.gpus.group.staying();
        if let Some(room) = self.ready.kept.as_mut().filter(|_| !staying.is_empty()) {
            let (copying, kept) = room.begin(staying)?;
            (self.copying, self.kept) = (Some(copying), Some(kept));
        }
        Ok(())
    }

    fn undo_lock(&mut self) -> Result<(), String> {
        // Before the job runs and may free the memory.
        self.copying = None;
        self.gpus.group.undo_lock()
    }

    fn restore(&mut self) -> Result<(), Error> {
        // The machines of a group wait for the whole copy.
        if let Some(copying) = self.copying.as_ref().filter(|_| !self.env.is_in_group()) {
            copying.pause();
        }
        Ok(self.gpus.group.restore()?)
    }

    fn unlock(&mut self) -> Result<(), Error> {
        let unlocked = self.gpus.group.unlock();
        self.copying.iter_mut().for_each(Copy::resume);
        Ok(unlocked?)
    }

    /// Waits until the processes may change that memory again. The copy may continue while the job runs.
    fn leave_copy(&mut self) -> Result<(), Error> {
        // Until the network of a group is back, ranks would wait for each other on their GPUs, and the driver ends a
        // process that it has restored if it waits so for some seconds.
        if self.env.subject.group.is_some() {
            return wait_for_copy(&mut self.copying, self.kept.as_mut(), &self.gpus, &self.env);
        }
        let asked = OnceCell::new();
        let is_late = || is_late(&self.env, &asked);
        match self.copying.as_mut().map_or(Ok(()), |copying| copying.leave(&is_late)) {
            Err(kept::Error::Copier(copier::Error::Cancelled)) => Err(Error::Cancelled),
            outcome => Ok(outcome?),
        }
    }

    fn checkpoint(&mut self) -> Result<(), Error> {
        // Without CUDA there is nothing to restore, and the others must not wait for the dump.
        if self.gpus.group.is_empty() {
            self.tell_restored();
        }
        self.gpus.group.checkpoint()?;
        let landed = self.ready.armed.landed();
        self.landing = landed.taken;
        for pid in landed.refused {
            tracing::debug!(
                pid,
                "its device memory is in CRIU's page files: it has no interposer, or could not use it"
            );
        }
        Ok(())
    }

    /// The ranks must not run before the memory of the other machines is restored either: they may be past this step.
    fn undo_checkpoint(&mut self) -> Result<(), String> {
        let undone = self.gpus.group.undo_checkpoint();
        if !self.gpus.group.is_empty() {
            self.wait_for_restores();
        }
        undone
    }

    fn dump(&mut self) -> Result<(), Error> {
        let (env, subject, options) = (self.env, self.env.subject, self.env.subject.options);
        let image = self.ready.target.dir().clone();
        let dir = image.join(CRIU_DIR);
        let io = |what: &str| {
            let what = format!("dump: cannot {what}");
            move |source| Error::Io { what, source }
        };
        let (opened, work) = (opened(subject.folder, &dir)?, subject.ours.work.criu());
        let place = Place {
            criu: subject.criu,
            init: Some(subject.job.world.init()),
            images: dir.path(),
            opened: opened.as_ref(),
            work: &work,
            timeout: options.freeze_limit,
        };
        let files = env.user().and_then(Identity::file_rights);
        let folder = (self.ready.devices.is_some() || files.is_some()).then(|| subject.ours.work.plugins());
        folder.as_deref().map(plugin::unpack).transpose()?;
        let devices = self.ready.devices.as_ref().map(Devices::list);
        let dump = DumpOptions {
            root: process::inner_pid(env.root()).ok_or(Error::JobEnded)?,
            tcp: self.seen.tcp,
            ghost_limit: GHOST_LIMIT,
            freeze_timeout: options.stop_limit,
            plugin: folder.as_deref().map(|folder| Plugin { folder, devices, answers: None, files }),
        };
        let mut still = Still {
            env,
            id: self.ready.target.id(),
            image: &image,
            dir: &dir,
            seen: &mut self.seen,
            gpus: &self.gpus,
            devices: self.ready.devices.as_ref(),
            deadline: Instant::now() + options.freeze_limit,
            receivers: self.ready.receivers.take(),
            drained: None,
            before: Before::default(),
            wrong: None,
            moment: None,
            saved_links: &mut self.saved_links,
        };
        let mut notify = |notify| match notify {
            Notify::PreDump => still.check_again(),
            Notify::Stopped => {
                still.check_sockets()?;
                still.read_objects();
                still.empty_terminals()
            }
            Notify::PostDump => still.record(),
            Notify::PostRestore(_) | Notify::PreResume => Ok(()),
        };
        let died = || died_traced(env.root());
        let mut hooks = Hooks { notify: &mut notify, cancelled: env.cancelled, died: &died, abandon: &|| {} };
        let log = criu::dump(&place, dump, &mut hooks);
        let Still { drained, wrong, moment, before, .. } = still;
        // Those of a dump that failed, first: the job runs again.
        drop(before);
        let log = match (log, wrong) {
            (Ok(log), _) => log,
            (Err(criu::RunError::Cancelled), _) => return Err(Error::Cancelled),
            (Err(_), Some(Wrong::InFlight(lost))) => return Err(Error::InFlight(lost)),
            (Err(_), Some(Wrong::Unnoticed(found))) => return Err(Error::Unnoticed(found)),
            (Err(_), Some(Wrong::Gpu(error))) => return Err(error.into()),
            (Err(_), Some(Wrong::Starting(why))) => return Err(Error::Starting(why)),
            (Err(_), Some(Wrong::Unaccepted(found))) => return Err(Error::Unaccepted(found)),
            (Err(_), Some(Wrong::Terminal(unsaved))) => return Err(Error::Terminal(unsaved)),
            (Err(_), Some(Wrong::Unread(found))) => return Err(Error::Unread(found)),
            (Err(_), Some(Wrong::Connected)) => return Err(Error::Connected),
            (Err(_), Some(Wrong::OnItsWay(why))) => return Err(Error::OnItsWay(why)),
            (Err(_), Some(Wrong::Refused(refusal))) => return Err(Error::Late(refusal)),
            (Err(criu::RunError::Hook { .. }), None) if (env.cancelled)() => return Err(Error::Cancelled),
            (Err(error), None) => return Err(by_name(error, env.root())),
        };
        let moment = moment.ok_or_else(silent)?;
        let frozen = Beneath::root(&work, Owners::Any).map(|dir| criu::image::frozen_time(&dir).unwrap_or_default());
        let frozen = frozen.unwrap_or_default();
        let saved = image.join("dump.log").create_new(0o600);
        saved.and_then(|mut file| file.write_all(log.text().as_bytes())).map_err(io("save CRIU's log"))?;
        let ours = record::ours(&subject.ours.mapped, subject.ours.work, &dir, env.root())?;
        let recreate = record::keep_ours(&image, &ours).map_err(io("save rekindle's own files"))?;
        self.dumped = Some(Dumped { moment, drained, frozen, recreate });
        Ok(())
    }

    fn undo_dump(&mut self) -> Result<(), String> {
        record::drop_links(&self.saved_links, self.env.root(), self.env.user());
        self.saved_links.clear();
        // A CRIU that was killed during the dump has left names of deleted files, and connections in repair mode.
        let tree = process::tree(self.env.root());
        nameless::remove_names(&nameless::nameless(&tree), self.env.root(), self.env.user());
        let repaired = tcp_repair::leave(&tree);
        if repaired > 0 {
            tracing::debug!("restarted {repaired} TCP connections of the job that CRIU had stopped");
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), Error> {
        if self.gpus.group.is_empty() {
            // Once more: what was told before may not have arrived.
            self.tell_restored();
        }
        self.gpus.group.check_running()?;
        if self.env.subject.job.root.has_ended().unwrap_or(true) {
            return Err(Error::JobEnded);
        }
        Ok(())
    }
}

impl Frozen<'_> {
    /// How long the job was frozen: with CUDA from the lock to the last unlock, without it what CRIU measured.
    pub(super) fn time(&self) -> Duration {
        if self.gpus.group.is_empty() { self.dumped.frozen } else { self.timings.locked() }
    }

    /// Completes the parts of the image for which the job need not be frozen.
    pub(super) fn complete(&mut self) -> Result<(), Error> {
        if let Some(drained) = self.dumped.drained.take() {
            drained.place()?;
        }
        let image = self.ready.target.dir();
        if let Some((had, left_out)) = self.dumped.moment.objects.take() {
            let what = "write the record of what the job had".to_owned();
            let version = self.env.subject.criu.version.to_string();
            let told = criu::image::told(&image.join(CRIU_DIR))?;
            let connections = tcp::capture::connections_in(&image.join(CRIU_DIR), self.seen.tcp)?;
            let written = had.write(&version, &told, &left_out, &connections, image);
            self.kinds = written.map_err(|source| Error::Io { what, source })?;
        }
        self.seen.contents.complete(image).map_err(copied)?;
        let criu = image.join(CRIU_DIR);
        criu::image::check_pages(&criu)?;
        let dangling = criu::image::dangling_sockets(&criu)?;
        if !dangling.is_empty() {
            return Err(Error::Dangling(dangling));
        }
        Ok(())
    }

    /// Waits until the memory that stayed on the GPU is in the image.
    pub(super) fn copied(&mut self) -> Result<(), Error> {
        wait_for_copy(&mut self.copying, self.kept.as_mut(), &self.gpus, &self.env)
    }

    /// The files that a restore needs unchanged.
    pub(super) fn mapped_files(&self) -> Result<Vec<MappedFile>, Error> {
        let put_back = mapped::Recreated {
            open: &self.dumped.moment.open_files,
            recreate: &self.dumped.recreate,
            landing: &self.landing,
        };
        mapped::files(&self.ready.target.dir().join(CRIU_DIR), put_back, &self.dumped.moment.captured)
    }

    pub(super) fn processes(&self, pids: &[i32]) -> Vec<TreeProcess> {
        let name = |pid: &i32| self.seen.names.get(pid).cloned().unwrap_or_default();
        pids.iter().map(|pid| TreeProcess { pid: *pid, name: name(pid) }).collect()
    }
}

/// Whether a copy is given up: it was cancelled, and had time to end since.
fn is_late(env: &Env<'_>, asked: &OnceCell<Instant>) -> bool {
    (env.cancelled)() && asked.get_or_init(Instant::now).elapsed() >= FOR_THE_REST
}

/// Waits for the end of a copy of `kept`, if there is one, and notes which GPU has what. After it was cancelled, it has a moment
/// more.
fn wait_for_copy(
    copying: &mut Option<kept::Copy<'_>>,
    kept: Option<&mut Kept>,
    gpus: &Gpus,
    env: &Env<'_>,
) -> Result<(), Error> {
    let Some(copying) = copying.take() else { return Ok(()) };
    let asked = OnceCell::new();
    let places = match copying.finish(&|| is_late(env, &asked)) {
        Err(kept::Error::Copier(copier::Error::Cancelled)) => return Err(Error::Cancelled),
        outcome => outcome?,
    };
    for (piece, place) in kept.into_iter().flat_map(|kept| &mut kept.pieces).zip(places) {
        piece.gpu = gpus.inventory.gpus.iter().position(|gpu| gpu.uuid == place);
    }
    Ok(())
}

/// CRIU reported success, but never the end of the dump (post-dump): the state at the moment of the image was not
/// recorded.
fn silent() -> Error {
    Error::Guard("CRIU ended the dump and did not report the point at which the job was frozen".into())
}

/// A process of the tree that died while it was traced, by CRIU: a process that was dead before the dump has no tracer.
fn died_traced(root: i32) -> Option<(i32, Ended)> {
    process::tree(root).into_iter().find_map(|pid| {
        let ended = process::ended(pid)?;
        process::tracer(pid).filter(|tracer| *tracer != 0)?;
        Some((process::inner_pid(pid)?, ended))
    })
}
