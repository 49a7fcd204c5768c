//! Records the state at the moment of the image, while CRIU has all tasks stopped.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use chrono::{DateTime, Utc};

use super::dead::Unnoticed;
use super::pages::{Drained, Receivers};
use super::preflight::{self, Refusal};
use super::seen::{Gpus, Seen};
use super::{Dead, Env, Error, Events};
use crate::parts::datagrams::Unsaved as LostDatagrams;
use crate::parts::devices::{Devices, LeftOut, Unsettled};
use crate::parts::events::Unread;
use crate::parts::files::capture::Captured;
use crate::parts::files::record;
use crate::parts::gpu::capture as gpu;
use crate::parts::tcp::waiting::{self, Unaccepted};
use crate::parts::terminals::{Emptied, Unsaved};
use crate::parts::{
    access, affinity, cpu_time, datagrams, eventfds, fds::InFlight, groups, objects::Photographed, pending,
    posix_timers, scheduling, sessions, tasks, tcp, timers,
};
use rekindle_base::chain;
use rekindle_criu as criu;
use rekindle_os::beneath::Beneath;
use rekindle_os::exits::Watched;
use rekindle_os::{process, ptrace, ulp};
use rekindle_store::ImageId;
use rekindle_store::manifest::{
    Binding, ControlGroup, CpuTime, Fifo, Folder, GivenFile, JobRights, OpenFile, SavedLink, Scheduling, Timer,
};

/// How threads are run.
pub(super) struct Threads {
    pub(super) bindings: Vec<Binding>,
    pub(super) scheduling: Vec<Scheduling>,
}

/// What was recorded.
pub(super) struct Moment {
    pub(super) taken: DateTime<Utc>,
    pub(super) open_files: Vec<OpenFile>,
    pub(super) captured: Captured,
    pub(super) given_files: Vec<GivenFile>,
    pub(super) rights: JobRights,
    pub(super) folders: Vec<Folder>,
    pub(super) fifos: Vec<Fifo>,
    pub(super) control_groups: Vec<ControlGroup>,
    pub(super) threads: Threads,
    pub(super) times: Times,
    /// The processes that somebody else had stopped, as they see themselves.
    pub(super) stopped: Vec<i32>,
    /// What the kernel had of the tasks.
    pub(super) objects: Option<(Photographed, LeftOut)>,
    /// What could not be done, in words; none of it makes the image unusable.
    pub(super) notes: Vec<String>,
    /// The processes below the root. One that dies once they run is in the image, and its death must be noticed.
    pub(super) open: Vec<Watched>,
}

/// What a restore needs of the clocks of the processes.
pub(super) struct Times {
    pub(super) timers: Vec<Timer>,
    pub(super) cpu: Option<CpuTime>,
}

/// Why no image may be taken at this moment. Examined after CRIU has ended.
#[derive(Debug)]
pub(super) enum Wrong {
    /// Descriptors in flight could not be restored.
    InFlight(InFlight),
    /// A process was killed, and its parent has not waited for it yet.
    Unnoticed(Unnoticed),
    /// A process is in the middle of cuInit, or one that uses CUDA has ended.
    Gpu(gpu::Error),
    /// A process has NVIDIA devices open, and has just begun.
    Starting(String),
    /// Connections inside the job wait to be accepted.
    Unaccepted(Unaccepted),
    /// A terminal has something that cannot be put back.
    Terminal(Unsaved),
    /// Events for files have come since the preflight.
    Unread(Unread),
    /// A connection inside the job was made since the preflight, when it had none.
    Connected,
    /// Data inside the job was on its way while the tasks were dumped.
    OnItsWay(String),
    /// What the preflight refuses has come about since.
    Refused(Refusal),
}

/// What is done before CRIU looks at the tasks, while they stand still.
#[derive(Default)]
pub(super) struct Before {
    /// What the kernel has of them.
    pub(super) objects: Option<Photographed>,
    /// The terminals of the job, until CRIU has looked at them.
    pub(super) terminals: Emptied,
}

/// Records it, from CRIU's `post-dump` notification.
pub(super) struct Still<'a, 'w> {
    pub(super) env: Env<'a>,
    pub(super) id: ImageId,
    /// The image, and CRIU's part of it.
    pub(super) image: &'w Beneath,
    pub(super) dir: &'w Beneath,
    pub(super) seen: &'w mut Seen,
    pub(super) gpus: &'w Gpus,
    pub(super) devices: Option<&'w Devices>,
    /// When CRIU must have finished.
    pub(super) deadline: Instant,
    pub(super) receivers: Option<Receivers>,
    pub(super) drained: Option<Drained>,
    pub(super) before: Before,
    pub(super) wrong: Option<Wrong>,
    pub(super) moment: Option<Moment>,
    /// Names that were given to deleted files; they are on disk even if a later step fails.
    pub(super) saved_links: &'w mut Vec<SavedLink>,
}

impl Still<'_, '_> {
    /// Before CRIU stops the tasks: what it would do harm to.
    pub(super) fn check_again(&mut self) -> Result<(), String> {
        preflight::check_stop(&process::tree(self.env.root())).map_err(|refusal| self.refuse(refusal))
    }

    /// Before CRIU changes or reads anything: what is in the image is what the tasks have now, or came since.
    pub(super) fn read_objects(&mut self) {
        self.before.objects = Some(Photographed::read(self.env.root(), std::mem::take(&mut self.seen.advice)));
    }

    /// CRIU would lose what waits in sockets, or take it from the job that runs on.
    pub(super) fn check_sockets(&mut self) -> Result<(), String> {
        pending::check(&process::tree(self.env.root())).map_err(|found| self.refuse(found.into()))
    }

    /// CRIU would put what is in them through the line discipline.
    pub(super) fn empty_terminals(&mut self) -> Result<(), String> {
        let emptied = Emptied::take(&process::tree(self.env.root()), &self.seen.terminals);
        self.before.terminals = emptied.map_err(|unsaved| {
            let why = unsaved.to_string();
            self.wrong = Some(Wrong::Terminal(unsaved));
            why
        })?;
        Ok(())
    }

    fn refuse(&mut self, refusal: Refusal) -> String {
        let why = refusal.to_string();
        self.wrong = Some(Wrong::Refused(refusal));
        why
    }

    fn refuse_for_gpus(&mut self, error: gpu::Error) -> String {
        let why = error.to_string();
        self.wrong = Some(Wrong::Gpu(error));
        why
    }

    /// The order matters: pages are taken before anything runs again, checks that can refuse come before anything is
    /// copied, and CRIU's image is changed after everything that reads it.
    pub(super) fn record(&mut self) -> Result<(), String> {
        self.take_pages()?;
        self.keep_cuda_processes_stopped();
        let saved = self.before.terminals.save(self.image);
        self.before.terminals.fill();
        saved.map_err(|error| format!("cannot save what waits in the job's terminals: {error}"))?;
        let (tree, mut notes) = self.refuse_what_a_restore_would_lose()?;
        let taken = Utc::now();
        let (mut open_files, mut captured) = self.copy_files(&tree, &mut notes)?;
        let noted = self.note_access()?;
        let groups = groups::capture::find(&tree);
        notes.extend(groups.notes);
        let ours = self.gpus.group.stopped_inner_pids();
        let stopped = criu::image::stopped(self.dir).map_err(|e| chain(&e))?;
        let stopped = stopped.into_iter().filter(|pid| !ours.contains(pid)).collect();
        let mut folders = self.name_files(&mut open_files, &captured)?;
        let mut fifos = record::fifos(self.dir, self.env.root()).map_err(|e| e.to_string())?;
        captured
            .add_attributes(&mut folders, &mut fifos, self.env.view())
            .map_err(|error| format!("cannot read the attributes of the job's folders: {error}"))?;
        let left_out = self.correct_image(&tree, &mut notes)?;
        let scheduling = scheduling::capture(&tree);
        // Only then, because it reads the image of each thread.
        if scheduling::is_unknown_to_criu(&scheduling) {
            criu::image::forget_policies(self.dir).map_err(|e| chain(&e))?;
        }
        let places = criu::image::timers(self.dir).map_err(|e| chain(&e))?;
        notes.extend(datagrams::save(self.dir, self.image, &tree).map_err(|unsaved| match unsaved {
            LostDatagrams::Lost(found) => self.refuse(found.into()),
            LostDatagrams::Failed(why) => why,
        })?);
        let output = self.env.subject.output;
        match record::append_again(&open_files, &tree, output) {
            Ok(()) => {
                if let Err(error) = output.rotate() {
                    notes.push(format!("the output was not rotated: {}", chain(&error)));
                }
            }
            Err(error) => notes.push(format!(
                "the output was not rotated: the job has cleared O_APPEND of it, which cannot be set again: {}",
                chain(&error)
            )),
        }
        record::record_sizes_again(&mut open_files, output);
        match &mut self.before.objects {
            Some(had) => had.read_again(self.env.root()),
            // A CRIU that does not say when all tasks stand still.
            none => *none = Some(Photographed::read(self.env.root(), std::mem::take(&mut self.seen.advice))),
        }
        self.moment = Some(Moment {
            taken,
            open_files,
            captured,
            given_files: noted.given,
            rights: noted.rights,
            folders,
            fifos,
            control_groups: groups.groups,
            threads: Threads { bindings: affinity::capture(&tree), scheduling },
            times: Times { timers: timers::capture(&places, &tree), cpu: cpu_time::capture(&tree) },
            stopped,
            objects: self.before.objects.take().map(|had| (had, left_out)),
            notes,
            open: Watched::of(&tree, self.env.root()),
        });
        Ok(())
    }

    /// The FIFOs contain the job's pages themselves, not copies.
    fn take_pages(&mut self) -> Result<(), String> {
        if let Some(receivers) = self.receivers.take() {
            self.drained = Some(receivers.drain(self.deadline).map_err(|e| chain(&e))?);
        }
        Ok(())
    }

    /// CRIU itself would send the signal only after it has resumed the tasks.
    fn keep_cuda_processes_stopped(&self) {
        for pid in self.gpus.group.stopped_pids() {
            let _ = ptrace::stop_when_let_go(pid);
        }
    }

    /// Returns the tree, and notes on processes that are dead in the image.
    fn refuse_what_a_restore_would_lose(&mut self) -> Result<(Vec<i32>, Vec<String>), String> {
        if let Some(lost) = InFlight::find(self.dir, self.env.root(), &self.seen.names).map_err(|e| chain(&e))? {
            let why = lost.to_string();
            self.wrong = Some(Wrong::InFlight(lost));
            return Err(why);
        }
        let dead = self.env.subject.deaths.look(self.env.root());
        if let Some(found) = dead.fresh.clone().filter(|_| self.env.dead == Dead::Refused) {
            let why = found.to_string();
            self.wrong = Some(Wrong::Unnoticed(found));
            return Err(why);
        }
        self.gpus.group.check_alive().map_err(|error| self.refuse_for_gpus(error))?;
        // The processes that are not stopped for their CUDA; CRIU has looked at their memory already.
        let names = criu::image::memfd_names(self.dir).map_err(|e| chain(&e))?;
        if names.iter().any(|name| rekindle_cuda::is_init_mark(name.as_bytes()))
            && let Err(error) = gpu::check_initialized(&dead.tree)
        {
            return Err(self.refuse_for_gpus(error));
        }
        let root = self.env.root();
        dead.tree
            .iter()
            .try_for_each(|pid| {
                preflight::check_namespaces(*pid, root)?;
                tasks::check(*pid)?;
                preflight::check_program(*pid)
            })
            .map_err(|refusal| self.refuse(refusal))?;
        let (subject, patience) = (self.env.subject, waiting::patience(self.env.reason));
        let (wanted, subnet) = (subject.options.tcp, subject.job.world.subnet());
        if tcp::capture::has_closed_too_many(wanted, self.seen.tcp, &dead.tree, subnet) {
            self.wrong = Some(Wrong::Connected);
            return Err(Error::Connected.to_string());
        }
        let left_out = subject.queues.look(&dead.tree, subject.job.world.subnet(), patience);
        let left_out = left_out.map_err(|found| {
            let why = found.to_string();
            self.wrong = Some(Wrong::Unaccepted(found));
            why
        })?;
        let unread = Unread::of(&dead.tree);
        let fresh = unread.besides(&self.seen.unread);
        if !fresh.is_empty() && self.env.events == Events::Refused {
            let why = fresh.to_string();
            self.wrong = Some(Wrong::Unread(fresh));
            return Err(why);
        }
        let dropped = (!unread.is_empty()).then(|| format!("the image lacks {unread}"));
        let notes = dead.fresh.iter().chain(&dead.old).map(|dead| format!("the image has dead processes: {dead}"));
        let left_out = left_out.map(|left_out| format!("the image lacks these connections: {left_out}"));
        Ok((dead.tree, notes.chain(left_out).chain(dropped).collect()))
    }

    fn copy_files(&mut self, tree: &[i32], notes: &mut Vec<String>) -> Result<(Vec<OpenFile>, Captured), String> {
        let (dir, view) = (self.dir, self.env.view());
        let mut open_files = record::open_for_writing(dir, self.env.root()).map_err(|e| e.to_string())?;
        let mapped = criu::image::written_by_mappings(dir).map_err(|e| chain(&e))?;
        let contents = &mut self.seen.contents;
        let (cancelled, deadline, root) = (self.env.cancelled, self.deadline, self.env.root());
        // Without CRIU the job runs again.
        let has_criu = || process::tracer(root) != Some(0);
        let stopped = || cancelled() || Instant::now() >= deadline || !has_criu();
        let mut captured = contents.capture(&mut open_files, mapped, view, self.image, &stopped).map_err(|error| {
            let why = match error.kind() {
                io::ErrorKind::Interrupted => "it took longer than snapshot.freeze-limit".to_owned(),
                _ => error.to_string(),
            };
            format!("cannot copy the files that the job writes: {why}")
        })?;
        notes.append(&mut captured.notes);
        captured.owners = record::owners(tree);
        for file in &mut open_files {
            file.owner = captured.owners.get(&*file.path).copied().or(file.owner);
        }
        let read = criu::image::checked_files(dir).map_err(|e| chain(&e))?.into_iter().map(|file| file.path);
        let open: HashSet<&Path> = open_files.iter().map(|file| file.path.as_path()).collect();
        let read = read.filter(|path| !open.contains(path.as_path())).collect();
        let began = std::fs::metadata(self.env.subject.folder.path()).and_then(|folder| folder.created());
        let began = began.unwrap_or_else(|_| SystemTime::now());
        captured.read = contents
            .keep_read(read, began, view, self.image, &mut captured.attributes)
            .map_err(|error| format!("cannot copy the files that the job reads: {error}"))?;
        Ok((open_files, captured))
    }

    fn note_access(&self) -> Result<access::Noted, String> {
        let corrected = criu::image::correct_access(self.dir).map_err(|e| chain(&e))?;
        tracing::debug!(corrected, "corrected file mappings that CRIU recorded as read-only");
        let securebits = criu::image::securebits(self.dir).map_err(|e| chain(&e))?;
        access::check_securebits(&securebits, self.env.user()).map_err(|error| chain(&error))?;
        let privileges = self.env.subject.options.privileges;
        access::note(self.env.root(), self.env.user(), privileges).map_err(|error| chain(&error))
    }

    /// Gives names to deleted open files, and returns the folders that a restore needs.
    fn name_files(&mut self, open_files: &mut [OpenFile], captured: &Captured) -> Result<Vec<Folder>, String> {
        let (root, ours) = (self.env.root(), self.env.folders());
        let ours: Vec<&Path> = ours.iter().map(PathBuf::as_path).collect();
        // Files that are only mapped have no descriptor.
        let written = open_files.iter().map(|file| file.path.as_path());
        let put_back: Vec<&Path> = captured.read.keys().map(PathBuf::as_path).chain(written).collect();
        let folders = record::folders(self.dir, root, &ours, &put_back).map_err(|e| e.to_string())?;
        *self.saved_links = record::save_links(self.dir, root, &self.id, self.env.user()).map_err(|e| e.to_string())?;
        record::name_by_saved(open_files, self.saved_links);
        Ok(folders)
    }

    /// Returns which devices are not in it.
    fn correct_image(&mut self, tree: &[i32], notes: &mut Vec<String>) -> Result<LeftOut, String> {
        let mut left_out = LeftOut::default();
        record::name_apart(self.dir, self.saved_links).map_err(|e| e.to_string())?;
        if let Some(torn) = criu::image::adopt_daemons(self.dir).map_err(|e| e.to_string())? {
            let of = |pid: &&i32| process::inner_pid(**pid).and_then(|pid| u32::try_from(pid).ok()) == Some(torn);
            let pid = tree.iter().find(of).copied().unwrap_or_default();
            return Err(self.refuse(sessions::refused(pid).into()));
        }
        let restarted = criu::image::restart_timers(self.dir).map_err(|e| chain(&e))?;
        if restarted > 0 {
            tracing::debug!(restarted, "corrected timers that had fired");
        }
        let signalling = criu::image::open_without_signals(self.dir).map_err(|e| chain(&e))?;
        if signalling > 0 {
            tracing::debug!(signalling, "FIFOs and terminals are opened without O_ASYNC");
        }
        let described = eventfds::describe(self.dir, tree).map_err(|e| chain(&e))?;
        if described > 0 {
            tracing::debug!(described, "described eventfds that CRIU would not make as they are");
        }
        if let Some(unknown) = posix_timers::correct(self.dir).map_err(|e| chain(&e))? {
            let name = self.seen.names.get(&unknown.pid).cloned().unwrap_or_default();
            return Err(self.refuse(Refusal::UnknownTimer { pid: unknown.pid, name, id: unknown.id }));
        }
        let subject = self.env.subject;
        tcp::capture::close_in_image(subject.options.tcp, self.seen.tcp, subject.job.world.subnet(), self.dir)
            .map_err(|e| chain(&e))?;
        let with_tls = ulp::connections(tree, ulp::TLS);
        notes.extend(tcp::capture::close_with_tls(self.seen.tcp, &with_tls, self.dir).map_err(|e| chain(&e))?);
        match tcp::streams::complete(self.dir, tree) {
            Ok(0) => {}
            Ok(completed) => {
                tracing::debug!(completed, "added data to connections that was on its way during the dump")
            }
            Err(error) => {
                let why = chain(&error);
                if let tcp::streams::Error::OnItsWay(_) = error {
                    self.wrong = Some(Wrong::OnItsWay(why.clone()));
                }
                return Err(why);
            }
        }
        if let Some(devices) = self.devices {
            match devices.settle(self.dir, self.env.root(), &self.gpus.group.outer_pids()) {
                Ok(settled) => {
                    notes.extend(settled.notes);
                    left_out = settled.left_out;
                }
                Err(Unsettled::Refused(why)) => return Err(why),
                Err(Unsettled::Starting(why)) => {
                    self.wrong = Some(Wrong::Starting(why.clone()));
                    return Err(why);
                }
            }
        }
        Ok(left_out)
    }
}
