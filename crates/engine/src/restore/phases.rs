//! The phases of a restore that make processes, with their undo.
//!
//! What comes before them makes no process and is undone by being dropped. From [`revive`] on there is a world to end,
//! and then a job: the phases are a table with an undo each, run as those of a freeze are.

use std::path::Path;
use std::time::{Duration, Instant};

use super::compat::{self, Here};
use super::{Error, Request};
use crate::launch::group::Cable;
use crate::launch::identity::Identity;
use crate::launch::world::{self, Network, World};
use crate::launch::{Job, plugin};
use crate::parts::files::moved::{self, Logs};
use crate::parts::files::put_back as files;
use crate::parts::gpu::placement::Relocation;
use crate::parts::gpu::put_back as gpu;
use crate::parts::kept::put_back::Ahead;
use crate::parts::objects::{Asked, Now, Recorded};
use crate::parts::settings::Later;
use crate::parts::{
    access, affinity, cpu_time, datagrams, groups, listeners, locks, scheduling, tcp, terminals, timers,
};
use crate::snapshot::CRIU_DIR;
use crate::snapshot::opened::opened;
use crate::steps::{self, Failed, Step, Timer};
use rekindle_base::chain;
use rekindle_criu::image::LostLocks;
use rekindle_criu::{self as criu, Hooks, Notify, Place, Plugin, RestoreOptions};
use rekindle_objects::Rights;
use rekindle_os::beneath::Beneath;
use rekindle_os::exits::Watched;
use rekindle_os::spawn::{Child, Ended};
use rekindle_os::{process, ptrace};
use rekindle_store::Manifest;

/// The phases from the namespaces to the GPUs.
fn steps<'a>() -> [Step<Restore<'a>, Error>; 8] {
    [
        // First, because it goes on while CRIU works.
        Step::new("memory", |r: &mut Restore<'a>| r.begin_memory())
            .undo(|r| r.drop_memory())
            .only_if(|r| r.manifest.kept.is_some()),
        Step::new("world", |r: &mut Restore<'a>| r.make_world()).undo(|r| r.end_world()),
        // In a network namespace of its own every port is free.
        Step::new("ports", |r: &mut Restore<'a>| r.free_ports())
            .only_if(|r| matches!(r.request.network, Network::Host)),
        Step::new("criu", |r: &mut Restore<'a>| r.run_criu()).undo(|r| r.end_job()),
        Step::new("locks", |r: &mut Restore<'a>| r.take_locks()),
        Step::new("cuda", |r: &mut Restore<'a>| r.put_gpus_back()),
        Step::new("hold", |r: &mut Restore<'a>| r.hold()).only_if(|r| r.request.cuda.hold.is_some() && r.has_cuda()),
        Step::new("go", |r: &mut Restore<'a>| r.go()).only_if(Restore::has_cuda),
    ]
}

/// How long each part of a restore took, in order.
#[derive(Default)]
pub(super) struct Timings(pub(super) Vec<(&'static str, Duration)>);

impl Timer for Timings {
    fn run<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        let took = began.elapsed();
        tracing::debug!(part = name, ?took, "restore");
        self.0.push((name, took));
        result
    }
}

/// What the phases so far have made, and a failure has to end.
enum Made {
    Nothing,
    World(World),
    Job(Job),
}

/// What became of the GPUs of a job whose processes are restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gpus {
    /// They are in use again, if the job has any.
    Back,
    /// The job ended before.
    Gone,
}

/// A job that CRIU has restored, with its locks and GPUs.
pub(super) struct Revived {
    pub(super) job: Job,
    /// Its processes below the root, opened before they ran.
    pub(super) open: Vec<Watched>,
    /// What is not as it was.
    pub(super) differences: Vec<String>,
    pub(super) gpus: Gpus,
}

/// A restore under way.
struct Restore<'a> {
    request: &'a Request<'a>,
    manifest: &'a Manifest,
    relocation: Option<&'a Relocation>,
    lost_locks: LostLocks,
    /// What its threads set before they run.
    later: Later,
    cancelled: &'a (dyn Fn() -> bool + Sync),
    made: Made,
    open: Vec<Watched>,
    differences: Vec<String>,
    gpus: Gpus,
    /// GPU memory that is being filled.
    ahead: Option<Ahead<'a>>,
    stopped: gpu::Stopped,
}

/// Makes the job's processes from the plain files of its image. If a phase fails, nothing that it or the phases before it
/// made is left.
pub(super) fn revive(
    request: &Request<'_>,
    manifest: &Manifest,
    relocation: Option<&Relocation>,
    timings: &mut Timings,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Revived, Error> {
    let lost_locks = criu::image::lost_locks(&request.image.dir.join(CRIU_DIR)).map_err(criu::RunError::Image)?;
    let (made, gpus, stopped) = (Made::Nothing, Gpus::Back, gpu::Stopped::default());
    let (ahead, open, differences) = (None, Vec::new(), Vec::new());
    let later = Later::default();
    let mut restore = Restore {
        request,
        manifest,
        relocation,
        lost_locks,
        later,
        cancelled,
        made,
        open,
        differences,
        gpus,
        ahead,
        stopped,
    };
    // CRIU and the driver look at `cancelled` while they work.
    match steps::run(&steps(), &mut restore, timings, &|| Ok(())) {
        Ok(()) => restore.revived(),
        Err(failed) => Err(restore.failed(failed)),
    }
}

impl Restore<'_> {
    /// On other GPUs the processes make it themselves. They also do if it is to be copied from now on: the memory of another
    /// process stays where it is.
    fn begin_memory(&mut self) -> Result<(), Error> {
        if self.relocation.is_none() && self.request.cuda.keeps {
            self.ahead = Ahead::begin(self.request.cuda.copier, &self.request.image.dir, self.manifest);
        }
        Ok(())
    }

    fn drop_memory(&mut self) -> Result<(), String> {
        self.ahead = None;
        Ok(())
    }

    fn make_world(&mut self) -> Result<(), Error> {
        let last_pid = world::last_pid_for(&self.manifest.tree.ids);
        self.made = Made::World(World::new(self.request.own.reaper, last_pid, self.request.network)?);
        Ok(())
    }

    fn end_world(&mut self) -> Result<(), String> {
        if let Made::World(world) = std::mem::replace(&mut self.made, Made::Nothing) {
            world.end(None);
        }
        Ok(())
    }

    fn free_ports(&mut self) -> Result<(), Error> {
        match tcp::put_back::free(&self.request.image.dir.join(CRIU_DIR)) {
            Ok(0) => {}
            Ok(ended) => tracing::debug!("closed {ended} connections of dead processes of the job"),
            // If a port is in use, CRIU's message names it.
            Err(error) => tracing::debug!("cannot find connections of dead processes of the job: {error}"),
        }
        Ok(())
    }

    fn run_criu(&mut self) -> Result<(), Error> {
        // The world stays where the undo finds it, also if this panics.
        let Made::World(world) = &self.made else { return Err(self.lost()) };
        (self.request.prepare.0)(world);
        match run_criu(self.request, self.manifest, world, &self.lost_locks, Until::ItRuns, self.cancelled) {
            Ok(Some(Run { root, open, differences, later })) => {
                (self.open, self.differences, self.later) = (open, differences, later);
                match std::mem::replace(&mut self.made, Made::Nothing) {
                    Made::World(world) => {
                        self.made = Made::Job(Job::restored(world, root, self.manifest.tree.job));
                        Ok(())
                    }
                    _ => Err(self.lost()),
                }
            }
            Ok(None) => Err(self.lost()),
            Err(Error::Criu(criu::RunError::Cancelled)) => Err(Error::Cancelled),
            Err(other) => Err(other),
        }
    }

    fn end_job(&mut self) -> Result<(), String> {
        match std::mem::replace(&mut self.made, Made::Nothing) {
            Made::Job(job) => {
                // A failed CUDA restore cannot be repeated on the same process.
                job.end();
            }
            other => self.made = other,
        }
        Ok(())
    }

    fn take_locks(&mut self) -> Result<(), Error> {
        let tree = &self.manifest.tree;
        let root = self.job()?.root.pid();
        let launchers = gpu::launchers(root, self.manifest).into_iter().map(|(_, inner)| inner);
        let held: Vec<i32> = tree.cuda.iter().chain(&tree.stopped).copied().chain(launchers).collect();
        // These are resumed when they have their locks.
        let stay = held.iter().chain(&self.lost_locks.users).copied().collect();
        self.later.set(root, &stay);
        Ok(locks::take_again(root, &self.lost_locks, &held)?)
    }

    /// If the job ends from here on, it was restored and ended afterwards: the policy counts early deaths to decide
    /// whether the image is to blame. One kill at this moment must not cost a good image.
    fn put_gpus_back(&mut self) -> Result<(), Error> {
        let pairs = self.relocation.map_or(&[][..], |relocation| &relocation.pairs);
        let (copier, dir) = (self.request.cuda.copier, &self.request.image.dir);
        let ahead = self.ahead.take();
        let put_back = |job: &Job, is_given_up: &dyn Fn() -> bool| {
            gpu::put_back(job, self.manifest, pairs, gpu::Filling { copier, dir, ahead, is_given_up })
        };
        match self.unless_it_ends(put_back)? {
            Some(stopped) => self.stopped = stopped,
            None => self.gpus = Gpus::Gone,
        }
        Ok(())
    }

    fn has_cuda(&self) -> bool {
        self.gpus == Gpus::Back && !self.manifest.tree.cuda.is_empty()
    }

    /// Waits until the job may run.
    fn hold(&mut self) -> Result<(), Error> {
        let job = self.job()?;
        let is_over = || (self.cancelled)() || job.root.has_ended().unwrap_or(false);
        let may_run = self.request.cuda.hold.is_none_or(|hold| (hold.0)(&is_over));
        if !may_run && !job.root.has_ended().unwrap_or(false) {
            return Err(Error::Cancelled);
        }
        // Before it runs: it expects its connections.
        if let Some(Err(error)) = job.world.cable().filter(|_| may_run).map(Cable::plug) {
            tracing::error!("the job does not reach the other machines: {}", chain(&error));
        }
        Ok(())
    }

    fn go(&mut self) -> Result<(), Error> {
        if self.unless_it_ends(|_, _| gpu::go_on(&self.stopped))?.is_none() {
            self.gpus = Gpus::Gone;
        }
        Ok(())
    }

    /// Work with the driver; none if the job has ended.
    fn unless_it_ends<T: Send>(
        &self,
        work: impl FnOnce(&Job, &dyn Fn() -> bool) -> Result<T, gpu::Error> + Send,
    ) -> Result<Option<T>, Error> {
        let job = self.job()?;
        match gpu::watched(job, self.request.timeout, self.cancelled, |is_given_up| work(job, is_given_up)) {
            Ok(result) => Ok(Some(result)),
            Err(gpu::Error::NoProcess(_) | gpu::Error::Cuda { .. } | gpu::Error::Sharing(_) | gpu::Error::Kept(_))
                if job.root.has_ended().unwrap_or(false) =>
            {
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn job(&self) -> Result<&Job, Error> {
        if let Made::Job(job) = &self.made { Ok(job) } else { Err(self.lost()) }
    }

    fn revived(self) -> Result<Revived, Error> {
        let lost = self.lost();
        let Made::Job(job) = self.made else { return Err(lost) };
        cpu_time::tell(self.manifest.cpu_time);
        Ok(Revived { job, open: self.open, differences: self.differences, gpus: self.gpus })
    }

    /// The error of a restore that failed and was undone.
    fn failed(&self, Failed { cause, not_undone }: Failed<Error>) -> Error {
        for what in not_undone {
            tracing::warn!("the failed restore was not undone: {what}");
        }
        match (cause, self.relocation) {
            (Error::Gpu(gpu::Error::Cuda { source, .. }), Some(relocation))
                if relocation.unproven && source.names_no_gpu() =>
            {
                let here = Here::look(self.manifest, Some(self.request.criu.version), self.request.wishes);
                let differences = vec![compat::too_few_gpus(self.manifest, &here)];
                Error::Misfit { id: self.request.image.id, differences }
            }
            (cause, _) => cause,
        }
    }

    fn lost(&self) -> Error {
        criu::RunError::Lost { pid: self.manifest.tree.root }.into()
    }
}

/// How far a restore goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    ItRuns,
    /// Every process is complete and none has run; then all are killed, and the restore is cancelled.
    ItWouldRun,
}

/// A restored tree that runs.
pub(super) struct Run {
    root: Child,
    /// The processes below it, opened before they ran.
    open: Vec<Watched>,
    /// What is not as it was.
    differences: Vec<String>,
    /// What its threads have to set, whose processes are stopped for it.
    later: Later,
}

/// Runs CRIU. Returns the restored tree, if it runs.
pub(super) fn run_criu(
    request: &Request<'_>,
    manifest: &Manifest,
    world: &World,
    lost_locks: &LostLocks,
    until: Until,
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<Run>, Error> {
    let images = request.image.dir.join(CRIU_DIR);
    let (opened, work) = (opened(request.folder, &images)?, request.own.work.criu());
    let place = Place {
        criu: request.criu,
        init: Some(world.init()),
        images: images.path(),
        opened: opened.as_ref(),
        work: &work,
        timeout: request.timeout,
    };
    let abandon = || {
        // Before CRIU, which traces them: whatever a tracer leaves behind runs on.
        if let Some(root) = criu::find_restored(manifest.tree.root, Some(world.init())) {
            world::kill_tree(root);
        }
        world.kill();
    };
    let died = || died_while_restored(&images);
    let output = request.output.identities()?;
    let unnamed = criu::image::UnnamedFiles::read(&images).map_err(criu::RunError::Image)?;
    let (user, privileges) = (request.identity, request.privileges);
    let wanted = access::Wanted { user, privileges, manifest, unnamed: &unnamed, output };
    let descriptors = criu::image::descriptors(&images).map_err(criu::RunError::Image)?;
    let unix_listeners = criu::image::unix_listeners(&images).map_err(criu::RunError::Image)?;
    let securebits = criu::image::securebits(&images).map_err(criu::RunError::Image)?;
    access::check_securebits(&securebits, request.identity)
        .map_err(|why| Error::Refused { id: request.image.id, why })?;
    let recorded = Recorded::of(&request.image.dir, request.checks.compare, until == Until::ItWouldRun)?;
    let asked =
        Asked::new().map_err(|source| criu::RunError::Talk { what: "file for the answers of the threads", source })?;
    let (mut refused, mut differs, mut rehearsed) = (None, None, false);
    let (mut open, mut differences, mut later) = (Vec::new(), Vec::new(), Later::default());
    let mut before_it_runs = |moment| {
        // At the first moment all processes exist and still have our rights, so the user cannot reach them or what they
        // have (CRIU changes the rights after this, `CR_STATE_RESTORE_CREDS`).
        let first = match moment {
            Notify::PostRestore(_) => true,
            Notify::PreResume => false,
            _ => return Ok(()),
        };
        let root =
            criu::find_restored(manifest.tree.root, Some(world.init())).ok_or("the restored tree cannot be found")?;
        if !first && until == Until::ItWouldRun {
            // If CRIU or we are killed before they are, they do not run either.
            process::tree(root).into_iter().for_each(|pid| drop(ptrace::stop_when_let_go(pid)));
        }
        let checked = match first {
            true => access::check_before_it_is_reached(root, &wanted, &descriptors),
            false => access::check(root, &wanted),
        };
        if let Err(error) = checked {
            let why = error.to_string();
            refused = Some(error);
            return Err(why);
        }
        if first {
            return Ok(());
        }
        listeners::own(root, &unix_listeners, request.identity);
        if until == Until::ItRuns {
            locks::hold(root, lost_locks);
            // In a rehearsal the running job is in them.
            groups::put_back::put_back(root, manifest, request.identity);
        }
        tcp::streams::put_back(root, &images)?;
        affinity::put_back(root, manifest);
        scheduling::put_back(root, manifest);
        timers::put_back(root, manifest);
        files::put_names_back(manifest, request.identity);
        datagrams::put_back(root, &request.image.dir);
        terminals::put_back(root, &request.image.dir);
        // Last: what is put back above is compared, too.
        let rights = if request.identity.is_some() { Rights::Users } else { Rights::Ours };
        let (criu, asked) = (&request.criu.version.to_string(), &asked);
        let checked = recorded.check(root, manifest, &Now { criu, asked, rights, locks: lost_locks });
        let checked = checked.map_err(|error| {
            let why = error.to_string();
            differs = Some(error);
            why
        })?;
        differences = checked.told;
        // All tasks are complete here, in a rehearsal, too.
        if until == Until::ItWouldRun {
            rehearsed = true;
            differences.iter().for_each(|line| tracing::warn!("{line}"));
            return Err("this was a rehearsal".into());
        }
        open = Watched::below(root);
        later = Later::hold(root, checked.later);
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
    let mut files = request.identity.and_then(Identity::file_rights);
    // A task without groups keeps those of CRIU.
    if let (Some(files), true) = (&mut files, manifest.rights.as_ref().is_some_and(|rights| rights.groups.is_empty())) {
        files.groups = &[];
    }
    let folder = (files.is_some() || request.criu.loads_plugins()).then(|| request.own.work.plugins());
    folder.as_deref().map(plugin::unpack).transpose()?;
    let answers = Some(asked.to());
    let plugin = folder.as_deref().map(|folder| Plugin { folder, devices: None, answers, files });
    files::put_links_back(manifest, request.identity)?;
    let which = if files.is_some() { Logs::All } else { Logs::Needed };
    let had = criu::image::open_files(&images).map_err(criu::RunError::Image)?;
    let read = |path: &Path| had.iter().any(|file| file.path == path && file.flags & libc::O_ACCMODE != libc::O_WRONLY);
    let instead = moved::instead(manifest, request.folder, (request.output, output), read, which)
        .map_err(|(path, source)| Error::Log { path: path.path().to_owned(), source })?;
    let options = RestoreOptions { tcp: manifest.tcp, instead: &instead, plugin };
    let restored = criu::restore(&place, options, &mut hooks);
    // CRIU removes them when it could use them; after a failure they would remain beside the user's files.
    files::drop_links(manifest, request.identity);
    match (restored, refused, differs) {
        (Ok(restored), _, _) => Ok(Some(Run { root: restored.root, open, differences, later })),
        (Err(_), None, None) if rehearsed => Ok(None),
        (Err(_), Some(why), _) => Err(Error::Refused { id: request.image.id, why }),
        (Err(_), None, Some(why)) => Err(why.into()),
        (Err(error), None, None) => Err(error.into()),
    }
}

/// A process below the restored root that was alive in the image (it has memory there) and is dead.
fn died_while_restored(images: &Beneath) -> Option<(i32, Ended)> {
    let children = process::children(std::process::id().cast_signed());
    let restored = children.into_iter().filter(|pid| !rekindle_os::spawn::is_known(*pid));
    restored.flat_map(process::tree).find_map(|pid| {
        let ended = process::ended(pid)?;
        let inner = process::inner_pid(pid)?;
        images.join(format!("mm-{inner}.img")).is_there().then_some((inner, ended))
    })
}

#[cfg(test)]
mod tests;
