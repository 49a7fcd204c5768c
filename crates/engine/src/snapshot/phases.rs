//! The phases in their order, with their undo, and the work they share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use chrono::{DateTime, Utc};

use super::contents::{Captured, Contents, View};
use super::pages::{Drained, Expected, Receivers, expect};
use super::target::Target;
use super::{
    Dead, Error, InFlight, Subject, Unnoticed, devices, files, gpu, groups, in_flight, landing, preflight, prepare, tcp,
};
use crate::guard;
use crate::launch::identity::Identity;
use crate::launch::{Privileges, plugin};
use rekindle_base::chain;
use rekindle_criu::{self as criu, DumpOptions, Hooks, Notify, Place, Plugin, Tcp};
use rekindle_cuda::nvml::GpuInventory;
use rekindle_os::spawn::Ended;
use rekindle_os::{process, ptrace, tcp_repair};
use rekindle_store::ImageId;
use rekindle_store::manifest::{
    ControlGroup, Folder, GivenFile, JobRights, Landing, OpenFile, Phase, Recreate, SavedLink, TreeProcess,
};

/// CRIU's images within an image.
pub(crate) const CRIU_DIR: &str = "criu";

/// A phase of the freeze: what it does, and how it is taken back when a later one fails.
struct Step {
    name: &'static str,
    run: fn(&mut Work<'_>) -> Result<(), Error>,
    /// Tries everything; answers what could not be undone.
    undo: fn(&mut Work<'_>) -> Result<(), String>,
}

const NOTHING: fn(&mut Work<'_>) -> Result<(), String> = |_| Ok(());

/// In this order. A phase that fails is undone too, as it may have done half of its work.
const STEPS: [Step; 9] = [
    Step { name: "preflight", run: |w| w.preflight(), undo: NOTHING },
    Step { name: "find", run: |w| w.find(), undo: NOTHING },
    Step { name: "prepare", run: |w| w.prepare(), undo: |w| w.undo_prepare() },
    Step { name: "lock", run: |w| w.lock(), undo: |w| w.gpu.undo_lock() },
    Step { name: "checkpoint", run: |w| w.checkpoint(), undo: |w| w.gpu.undo_checkpoint() },
    Step { name: "dump", run: |w| w.dump(), undo: |w| w.undo_dump() },
    Step { name: "restore", run: |w| w.gpu.restore(), undo: NOTHING },
    Step { name: "unlock", run: |w| w.gpu.unlock(), undo: NOTHING },
    Step { name: "check", run: |w| w.check(), undo: NOTHING },
];

/// What the phases share.
pub(super) struct Work<'a> {
    pub(super) subject: &'a Subject<'a>,
    cancelled: &'a (dyn Fn() -> bool + Sync),
    begun: Instant,
    pub(super) taken: Option<DateTime<Utc>>,
    pub(super) gpu: gpu::Group,
    pub(super) tcp: Tcp,
    pub(super) target: Option<Target>,
    /// The target's, once there was one.
    id: Option<ImageId>,
    /// What CRIU would write of the host memory, as it was before the freeze.
    pub(super) expected: Vec<Expected>,
    /// Bytes of the files without a name that CRIU would copy.
    pub(super) nameless: u64,
    /// The content of files that the job changes in place, and the bytes that it takes.
    contents: Contents,
    pub(super) rewritten: u64,
    pub(super) captured: Captured,
    /// The GPUs of this machine, where the job uses CUDA.
    pub(super) gpus: GpuInventory,
    /// Bytes of device memory of each CUDA process, in the order of the group.
    pub(super) device_memory: Vec<u64>,
    /// What takes CRIU's page files from it, where the image is made in memory.
    receivers: Option<Receivers>,
    /// The same, with all pages.
    drained: Option<Drained>,
    /// NVIDIA's devices, where this machine has any.
    devices: Option<devices::Devices>,
    /// Landing files that processes find when they look for one.
    pub(super) armed: landing::Armed,
    /// Those that were taken.
    pub(super) landing: Vec<Landing>,
    /// The job's own process, as it sees itself.
    pub(super) job_pid: i32,
    names: BTreeMap<i32, String>,
    pub(super) open_files: Vec<OpenFile>,
    pub(super) given_files: Vec<GivenFile>,
    pub(super) rights: Option<JobRights>,
    pub(super) folders: Vec<Folder>,
    pub(super) control_groups: Vec<ControlGroup>,
    pub(super) saved_links: Vec<SavedLink>,
    pub(super) recreate: Vec<Recreate>,
    pub(super) timings: Vec<Phase>,
    criu_frozen: Duration,
    pub(super) notes: Vec<String>,
    dead: Dead,
}

impl<'a> Work<'a> {
    pub(super) fn new(subject: &'a Subject<'a>, cancelled: &'a (dyn Fn() -> bool + Sync), dead: Dead) -> Work<'a> {
        Work {
            subject,
            cancelled,
            begun: Instant::now(),
            taken: None,
            gpu: gpu::Group::default(),
            tcp: Tcp::Close,
            target: None,
            id: None,
            expected: Vec::new(),
            nameless: 0,
            contents: Contents::default(),
            rewritten: 0,
            captured: Captured::default(),
            gpus: GpuInventory::default(),
            device_memory: Vec::new(),
            receivers: None,
            drained: None,
            devices: None,
            armed: landing::Armed::default(),
            landing: Vec::new(),
            job_pid: 0,
            names: BTreeMap::new(),
            open_files: Vec::new(),
            given_files: Vec::new(),
            rights: None,
            folders: Vec::new(),
            control_groups: Vec::new(),
            saved_links: Vec::new(),
            recreate: Vec::new(),
            timings: Vec::new(),
            criu_frozen: Duration::ZERO,
            notes: Vec::new(),
            dead,
        }
    }

    /// Runs the phases; when one fails, undoes it and all before it.
    pub(super) fn freeze(&mut self) -> Result<(), Error> {
        for (at, step) in STEPS.iter().enumerate() {
            if (self.cancelled)() && at <= CANCELLABLE {
                return Err(self.undo(at, Error::Cancelled));
            }
            if let Err(cause) = self.time(step.name, step.run) {
                return Err(self.undo(at, cause));
            }
        }
        Ok(())
    }

    fn undo(&mut self, failed: usize, cause: Error) -> Error {
        let done = STEPS.iter().take(failed + 1).rev();
        let failures: Vec<String> = done.filter_map(|step| (step.undo)(self).err()).collect();
        // A CUDA process that is in no state to run on, a GPU that was not taken back: only an image helps.
        let stuck = self.gpu.stuck();
        if failures.is_empty() && stuck.is_none() {
            return cause;
        }
        let undo = failures.into_iter().chain(stuck).collect::<Vec<_>>().join("; ");
        Error::Lost { cause: Box::new(cause), undo }
    }

    /// Runs one phase and notes when it began and how long it took.
    pub(super) fn time<T>(&mut self, name: &str, run: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        let started = self.begun.elapsed();
        let result = run(self);
        let took = self.begun.elapsed().saturating_sub(started);
        let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        self.timings.push(Phase { phase: name.into(), started_us: us(started), took_us: us(took) });
        tracing::debug!(phase = name, took = ?took, "snapshot phase");
        result
    }

    /// How long the job stood still: with CUDA from the lock to the last unlock, without it what CRIU measured.
    pub(super) fn frozen(&self) -> Duration {
        if self.gpu.is_empty() {
            return self.criu_frozen;
        }
        let at = |name: &str| self.timings.iter().find(|p| p.phase == name);
        match (at("lock"), at("unlock")) {
            (Some(lock), Some(unlock)) => {
                Duration::from_micros((unlock.started_us + unlock.took_us).saturating_sub(lock.started_us))
            }
            _ => Duration::ZERO,
        }
    }

    pub(super) fn processes(&self, pids: &[i32]) -> Vec<TreeProcess> {
        let name = |pid: &i32| self.names.get(pid).cloned().unwrap_or_default();
        pids.iter().map(|pid| TreeProcess { pid: *pid, name: name(pid) }).collect()
    }

    pub(super) fn root(&self) -> i32 {
        self.subject.job.root.pid()
    }

    fn preflight(&mut self) -> Result<(), Error> {
        let tree = process::tree(self.root());
        for pid in &tree {
            if let (Some(inner), Some(name)) = (process::inner_pid(*pid), process::name(*pid)) {
                self.names.insert(inner, name);
            }
        }
        self.job_pid = self.subject.job.main_pid().and_then(process::inner_pid).ok_or(Error::JobEnded)?;
        self.check_dead().map_err(Error::Unnoticed)?;
        preflight::check(&tree, self.subject)?;
        guard::foresee(self.root(), self.subject.launch.identity.as_ref(), self.privileges())
            .map_err(|why| Error::Guard(chain(&why)))?;
        in_flight::let_pass(&tree, self.cancelled);
        self.expected = expect(&tree);
        self.nameless = files::nameless_bytes(&tree);
        let options = self.subject.options;
        self.contents = Contents::new(&options.track, self.ours(), options.file_limit);
        self.rewritten = self.contents.foresee(&tree, self.view()).map_err(copied)?;
        self.tcp = tcp::choose(options.tcp, &tree);
        Ok(())
    }

    fn view(&self) -> View<'a> {
        View { root: self.root(), user: self.subject.launch.identity.as_ref() }
    }

    /// Folders of ours, in which the job has its output and its device memory.
    fn ours(&self) -> Vec<PathBuf> {
        let staging = self.subject.staging.map(|area| area.path().to_path_buf());
        staging.into_iter().chain([self.subject.folder.path().to_path_buf()]).collect()
    }

    /// Memory has no room for files on disk beside the job's memory.
    pub(super) fn keep_no_files(&mut self) -> bool {
        self.contents.keep_none_of_the_disk();
        let before = std::mem::replace(&mut self.rewritten, 0);
        before > 0
    }

    /// Refuses those that were killed and that their parents have yet to hear of.
    fn check_dead(&mut self) -> Result<(), Unnoticed> {
        match self.subject.deaths.look(self.root()).fresh {
            Some(found) if self.dead == Dead::Refused => Err(found),
            _ => Ok(()),
        }
    }

    fn privileges(&self) -> Privileges {
        self.subject.options.privileges
    }

    fn find(&mut self) -> Result<(), Error> {
        self.gpu = gpu::Group::find(self.root()).map_err(|source| Error::Cuda { phase: "find", source })?;
        let pids = self.gpu.outer_pids();
        if !pids.is_empty() {
            self.gpus = GpuInventory::read();
            preflight::check_gpus(&self.gpus, &pids)?;
            self.device_memory = preflight::device_memory(&self.gpus, &pids);
        }
        preflight::check_nccl(&pids)?;
        self.gpu.check_sharing()
    }

    fn prepare(&mut self) -> Result<(), Error> {
        self.devices = devices::Devices::find();
        let target = prepare::target(self)?;
        let dir = target.dir().join(CRIU_DIR);
        self.id = Some(target.id());
        if let (Target::Slot(slot), Some(area)) = (&target, self.subject.staging) {
            let landers = prepare::landers(self);
            self.receivers = Some(Receivers::start(&dir, &slot.spool(), &prepare::pages(self, &landers))?);
            self.armed = landing::arm(area, slot, &landers)?;
        } else {
            std::fs::create_dir(&dir)
                .map_err(|source| Error::Io { what: format!("cannot make {}", dir.display()), source })?;
        }
        let dir = target.dir().to_path_buf();
        self.target = Some(target);
        let (tree, view) = (process::tree(self.root()), self.view());
        self.contents.copy_ahead(&tree, view, &dir, self.cancelled).map_err(copied)
    }

    fn undo_prepare(&mut self) -> Result<(), String> {
        self.armed = landing::Armed::default();
        self.receivers = None;
        self.drained = None;
        self.target = None;
        Ok(())
    }

    /// The GPUs that each CUDA process had memory on before the freeze.
    pub(super) fn cuda_memory(&self) -> BTreeMap<i32, BTreeMap<String, u64>> {
        preflight::memory_by_gpu(&self.gpus, &self.gpu.inner_pids(), &self.gpu.outer_pids())
    }

    fn checkpoint(&mut self) -> Result<(), Error> {
        self.gpu.checkpoint()?;
        self.landing = self.armed.taken();
        for pid in self.armed.refused() {
            tracing::debug!(
                pid,
                "its device memory is in CRIU's page files: it has no interposer, or could not use it"
            );
        }
        Ok(())
    }

    fn lock(&mut self) -> Result<(), Error> {
        let timeout = self.subject.options.lock_timeout;
        let (root, cancelled) = (self.root(), self.cancelled);
        let known = self.gpu.outer_pids();
        self.gpu.lock(root, timeout, cancelled)?;
        if self.gpu.outer_pids() != known {
            // One that began late has its GPUs too.
            self.gpus = GpuInventory::read();
            preflight::check_gpus(&self.gpus, &self.gpu.outer_pids())?;
        }
        Ok(())
    }

    fn dump(&mut self) -> Result<(), Error> {
        let subject = self.subject;
        let options = subject.options;
        let target = self.target.as_ref().ok_or(Error::Cancelled)?;
        let (id, image_dir) = (target.id(), target.dir().to_path_buf());
        let dir = image_dir.join(CRIU_DIR);
        let io = |what: &str| {
            let what = format!("dump: {what}");
            move |source| Error::Io { what, source }
        };
        let scratch = subject.folder.scratch_dir().map_err(Error::Store)?;
        let place = Place {
            criu: subject.criu,
            init: subject.job.world.init(),
            images: &dir,
            work: &scratch,
            timeout: options.dump_timeout,
        };
        let files = subject.launch.identity.as_ref().and_then(Identity::file_rights);
        let folder = match self.devices.is_some() || files.is_some() {
            true => Some(plugin::unpack(&scratch)?),
            false => None,
        };
        let devices = self.devices.as_ref().map(devices::Devices::list);
        let plugin = folder.as_deref().map(|folder| Plugin { folder, devices, files });
        let dump = DumpOptions {
            root: process::inner_pid(self.root()).ok_or(Error::JobEnded)?,
            tcp: self.tcp,
            ghost_limit: options.ghost_limit,
            freeze_timeout: options.freeze_timeout,
            plugin,
        };
        let (cancelled, root, privileges) = (self.cancelled, self.root(), self.privileges());
        let (mut receivers, mut drained, mut lost) = (self.receivers.take(), None, None);
        let (deaths, mut unnoticed) = (subject.deaths, None);
        let deadline = Instant::now() + options.dump_timeout;
        // What is recorded here belongs to the very moment of the image: all tasks stand still.
        let (view, ours) = (self.view(), self.ours());
        let mut still = |moment| -> Result<(), String> {
            if moment != Notify::PostDump {
                return Ok(());
            }
            // Before anything runs again: what is still on its way are the job's pages themselves, not copies.
            if let Some(receivers) = receivers.take() {
                drained = Some(receivers.drain(deadline).map_err(|e| chain(&e))?);
            }
            // CRIU would send it only after it has let go.
            for pid in self.gpu.stopped_pids() {
                let _ = ptrace::stop_when_let_go(pid);
            }
            lost = InFlight::find(&dir, root, &self.names).map_err(|e| chain(&e))?;
            if let Some(lost) = &lost {
                return Err(lost.to_string());
            }
            let dead = deaths.look(root);
            if let Some(found) = dead.fresh.clone().filter(|_| self.dead == Dead::Refused) {
                let why = found.to_string();
                unnoticed = Some(found);
                return Err(why);
            }
            self.notes
                .extend(dead.fresh.iter().chain(&dead.old).map(|dead| format!("the image has dead processes: {dead}")));
            self.taken = Some(Utc::now());
            self.open_files = files::open_for_writing(&dir, root).map_err(|e| e.to_string())?;
            let mapped = criu::image::written_by_mappings(&dir).map_err(|e| chain(&e))?;
            let contents = &mut self.contents;
            self.captured = contents
                .capture(&mut self.open_files, mapped, view, &image_dir)
                .map_err(|error| format!("cannot copy the files that the job writes to: {error}"))?;
            self.notes.append(&mut self.captured.notes);
            let read = criu::image::checked_files(&dir).map_err(|e| chain(&e))?.into_iter().map(|file| file.path);
            let read = read.filter(|path| !self.open_files.iter().any(|open| open.path == *path)).collect();
            let began = std::fs::metadata(subject.folder.path()).and_then(|folder| folder.created());
            let began = began.unwrap_or_else(|_| SystemTime::now());
            self.captured.read = contents
                .keep_read(read, began, view, &image_dir)
                .map_err(|error| format!("cannot copy the files that the job reads: {error}"))?;
            let corrected = criu::image::correct_access(&dir).map_err(|e| chain(&e))?;
            tracing::debug!(corrected, "mappings of files that CRIU took for read-only");
            let user = subject.launch.identity.as_ref();
            let noted = guard::note(root, user, privileges).map_err(|error| chain(&error))?;
            (self.given_files, self.rights) = (noted.given, Some(noted.rights));
            let groups = groups::find(&dead.tree);
            self.control_groups = groups.groups;
            self.notes.extend(groups.notes);
            let ours: Vec<&Path> = ours.iter().map(PathBuf::as_path).collect();
            let read: Vec<&Path> = self.captured.read.keys().map(PathBuf::as_path).collect();
            self.folders = files::folders(&dir, root, &ours, &read).map_err(|e| e.to_string())?;
            self.saved_links =
                files::save_links(&dir, root, &id, subject.launch.identity.as_ref()).map_err(|e| e.to_string())?;
            files::name_by_saved(&mut self.open_files, &self.saved_links);
            criu::image::adopt_daemons(&dir).map_err(|e| e.to_string())?;
            tcp::close_in_image(options.tcp, self.tcp, &dir).map_err(|e| chain(&e))?;
            if let Some(devices) = &self.devices {
                self.notes.extend(devices.settle(&dir, root, &self.gpu.outer_pids())?);
            }
            if let Err(error) = subject.output.rotate() {
                self.notes.push(format!("the output was not rotated: {}", chain(&error)));
            }
            files::record_sizes_again(&mut self.open_files, root, subject.output);
            Ok(())
        };
        let mut hooks = Hooks { notify: &mut still, cancelled, died: &|| died_traced(root), abandon: &|| {} };
        let log = match criu::dump(&place, dump, &mut hooks) {
            Ok(log) => log,
            Err(criu::RunError::Cancelled) => return Err(Error::Cancelled),
            Err(error) => {
                let found = lost.map(Error::InFlight).or_else(|| unnoticed.map(Error::Unnoticed));
                return Err(found.unwrap_or_else(|| error.into()));
            }
        };
        self.drained = drained;
        self.criu_frozen = criu::image::frozen_time(&scratch).unwrap_or_default();
        std::fs::write(image_dir.join("dump.log"), log.text()).map_err(io("keep CRIU's log"))?;
        let ours = files::ours(subject);
        self.recreate = files::keep_ours(&image_dir, &ours).map_err(io("keep our files"))?;
        Ok(())
    }

    /// The rest of the image, for which the job need not stand still.
    pub(super) fn complete(&mut self) -> Result<(), Error> {
        if let Some(drained) = self.drained.take() {
            drained.place()?;
        }
        let target = self.target.as_ref().ok_or(Error::Cancelled)?;
        self.contents.complete(target.dir()).map_err(copied)?;
        let criu = target.dir().join(CRIU_DIR);
        criu::image::check_pages(&criu)?;
        let dangling = criu::image::dangling_sockets(&criu)?;
        if dangling.is_empty() { Ok(()) } else { Err(Error::Dangling(dangling)) }
    }

    fn undo_dump(&mut self) -> Result<(), String> {
        files::drop_links(&self.saved_links, self.root(), self.subject.launch.identity.as_ref());
        self.saved_links.clear();
        // A CRIU that was killed in the middle has left them as they were then.
        let repaired = tcp_repair::leave(&process::tree(self.root()));
        if repaired > 0 {
            tracing::debug!("{repaired} TCP connections of the job go on, which CRIU had stopped");
        }
        Ok(())
    }

    /// The draft is gone, or has its lasting name and could not be synced: then it is an image and needs its links.
    pub(super) fn undo_publish(&mut self) {
        if !self.id.is_some_and(|id| self.subject.folder.is_stored(id)) {
            files::drop_links(&self.saved_links, self.root(), self.subject.launch.identity.as_ref());
        }
    }

    fn check(&mut self) -> Result<(), Error> {
        self.gpu.check_running()?;
        if self.subject.job.root.has_ended().unwrap_or(true) {
            return Err(Error::JobEnded);
        }
        Ok(())
    }
}

fn copied(source: std::io::Error) -> Error {
    Error::Io { what: "cannot copy the files that the job writes to".into(), source }
}

/// A process of the tree that died in the hands of a tracer, which CRIU is: one that was dead before has none.
fn died_traced(root: i32) -> Option<(i32, Ended)> {
    process::tree(root).into_iter().find_map(|pid| {
        let ended = process::ended(pid)?;
        process::tracer(pid).filter(|tracer| *tracer != 0)?;
        Some((process::inner_pid(pid)?, ended))
    })
}

/// Up to this phase a cancellation is asked for before each; later the job is set going again in any case.
const CANCELLABLE: usize = 4;
