//! Facts about the job before any process is stopped: the phases `preflight` and `find`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::barrier::Barrier;
use super::pages::{Expected, expect};
use super::{Env, Error, preflight};
use crate::parts::backlog::Backlog;
use crate::parts::events::Unread;
use crate::parts::files::capture::{Contents, View};
use crate::parts::files::nameless::{self, nameless};
use crate::parts::gpu::capture::Elsewhere;
use crate::parts::gpu::capture::{self as gpu, Group, Locking};
use crate::parts::terminals::Before;
use crate::parts::{access, fds, pending, tasks, tcp};
use rekindle_base::chain;
use rekindle_criu::Tcp;
use rekindle_cuda::GpuUuid;
use rekindle_cuda::nvml::GpuInventory;
use rekindle_cuda::sharing::Own;
use rekindle_objects::Advice;
use rekindle_os::process;

/// Facts about the processes of the tree.
pub(super) struct Seen {
    /// Pid of the command's process as it sees itself.
    pub(super) job_pid: i32,
    /// The processes' names, by pid as they see themselves.
    pub(super) names: BTreeMap<i32, String>,
    /// The host memory that CRIU would write.
    pub(super) expected: Vec<Expected>,
    /// Bytes of deleted files that CRIU would copy.
    pub(super) nameless: u64,
    /// The files that the job changes in place, and the bytes that their content takes.
    pub(super) contents: Contents,
    pub(super) rewritten: u64,
    pub(super) tcp: Tcp,
    /// Descriptors with events for files that nobody reads.
    pub(super) unread: Unread,
    pub(super) terminals: Before,
    /// What the processes have said of their memory.
    pub(super) advice: Advice,
}

impl Seen {
    /// Examines the tree, and refuses what a dump or a restore would refuse.
    pub(super) fn look(env: &Env<'_>) -> Result<Seen, Error> {
        let (subject, root) = (env.subject, env.root());
        let tree = process::tree(root);
        let name = |pid: &i32| process::inner_pid(*pid).zip(process::name(*pid));
        let names = tree.iter().filter_map(name).collect();
        let job_pid = subject.job.main_pid().and_then(process::inner_pid).ok_or(Error::JobEnded)?;
        env.check_dead()?;
        preflight::check(&tree, subject)?;
        tasks::let_part(&tree, env.cancelled).map_err(preflight::Refusal::from)?;
        access::foresee(root, env.user(), subject.options.privileges).map_err(|why| Error::Guard(chain(&why)))?;
        fds::let_pass(&tree, env.cancelled);
        pending::let_pass(&tree, env.cancelled).map_err(preflight::Refusal::from)?;
        let patience = tcp::waiting::patience(env.reason);
        subject.queues.let_pass(&tree, subject.job.world.subnet(), patience, env.cancelled);
        let backlog = Backlog::let_pass(&tree, patience, env.cancelled);
        if !backlog.is_empty() && !(env.cancelled)() {
            return Err(Error::Backlog(backlog));
        }
        let unread = Unread::let_pass(&tree, env.cancelled);
        let deleted = nameless(&tree);
        nameless::check(&deleted, root, env.user()).map_err(preflight::Refusal::from)?;
        // Of a dump that was killed with its supervisor.
        nameless::remove_names(&deleted, root, env.user());
        let (expected, nameless) = (expect(&tree), nameless::bytes(&deleted));
        let options = subject.options;
        let contents = Contents::new(&options.track, env.folders(), options.file_limit);
        let mut contents = contents.without_store(subject.folder.store());
        let rewritten = contents.foresee(&tree, env.view()).map_err(copied)?;
        let terminals = Before::look(&tree);
        let tcp = tcp::capture::choose(options.tcp, &tree, subject.job.world.subnet());
        let advice = Advice::read(&tree);
        Ok(Seen { job_pid, names, expected, nameless, contents, rewritten, tcp, unread, terminals, advice })
    }

    /// Leaves out files on disk: memory has no room for them beside the job's memory.
    pub(super) fn keep_no_files(&mut self) {
        self.contents.keep_none_of_the_disk();
        self.rewritten = 0;
    }
}

/// The CUDA processes of the tree and the GPUs of this machine.
pub(super) struct Gpus {
    pub(super) group: Group,
    /// Empty if the job does not use CUDA.
    pub(super) inventory: GpuInventory,
    /// Bytes of device memory of each CUDA process, in the order of the group.
    pub(super) memory: Vec<u64>,
}

impl Gpus {
    /// Finds them, and refuses what cannot be checkpointed.
    pub(super) fn find(root: i32) -> Result<Gpus, Error> {
        gpu::check_initialized(&process::tree(root))?;
        let group = Group::find(root).map_err(|source| gpu::Error::Cuda { phase: "find", source })?;
        let pids = group.outer_pids();
        let (mut inventory, mut memory) = (GpuInventory::default(), Vec::new());
        if !pids.is_empty() {
            inventory = GpuInventory::read();
            preflight::check_gpus(&inventory, &pids)?;
            memory = preflight::device_memory(&inventory, &pids);
        }
        preflight::check_nccl(&pids)?;
        group.check_sharing()?;
        Ok(Gpus { group, inventory, memory })
    }

    /// Locks all. Checks the GPUs also of processes that started to use CUDA only now.
    pub(super) fn lock(&mut self, env: &Env<'_>, own: Own) -> Result<(), Error> {
        let known = self.group.outer_pids();
        let elsewhere = env.subject.group.map(|group| group as &dyn Elsewhere);
        let called_off = || env.subject.group.and_then(Barrier::called_off);
        let cancelled = || (env.cancelled)() || called_off().is_some();
        let options = env.subject.options;
        let area = env.subject.staging.filter(|area| area.is_there());
        let how = Locking { timeout: options.lock_timeout, limit: options.lock_limit, area, own };
        let locked = self.group.lock(env.root(), elsewhere, how, &cancelled);
        match (locked, called_off()) {
            (Err(gpu::Error::Cancelled), Some(why)) => return Err(Error::Group(why)),
            (outcome, _) => outcome?,
        }
        if self.group.outer_pids() != known {
            self.inventory = GpuInventory::read();
            preflight::check_gpus(&self.inventory, &self.group.outer_pids())?;
        }
        Ok(())
    }

    /// The GPUs that they have memory on, as far as NVML knows.
    pub(super) fn in_use(&self) -> Vec<GpuUuid> {
        let all: BTreeSet<String> = self.used().into_values().flat_map(BTreeMap::into_keys).collect();
        all.iter().filter_map(|uuid| uuid.parse().ok()).collect()
    }

    /// The GPUs that each CUDA process had memory on before the freeze.
    pub(super) fn used(&self) -> BTreeMap<i32, BTreeMap<String, u64>> {
        preflight::memory_by_gpu(&self.inventory, &self.group.inner_pids(), &self.group.outer_pids())
    }
}

pub(super) fn copied(source: std::io::Error) -> Error {
    Error::Io { what: "cannot copy the files that the job writes".into(), source }
}

impl<'a> Env<'a> {
    pub(super) fn root(&self) -> i32 {
        self.subject.job.root.pid()
    }

    pub(super) fn user(&self) -> Option<&'a crate::launch::identity::Identity> {
        self.subject.launch.identity.as_ref()
    }

    pub(super) fn view(&self) -> View<'a> {
        View { root: self.root(), user: self.user() }
    }

    /// Rekindle's own folders with the job's output and its device memory.
    pub(super) fn folders(&self) -> Vec<PathBuf> {
        let staging = self.subject.staging.map(|area| area.path().to_path_buf());
        let work = self.subject.ours.work;
        let own = [self.subject.folder.path(), work.path()].map(Path::to_path_buf);
        staging.into_iter().chain(own).chain(work.others()).collect()
    }

    /// Refuses if a process was killed and its parent has not learned of it yet.
    fn check_dead(&self) -> Result<(), Error> {
        match self.subject.deaths.look(self.root()).fresh {
            Some(found) if self.dead == super::Dead::Refused => Err(Error::Unnoticed(found)),
            _ => Ok(()),
        }
    }
}
