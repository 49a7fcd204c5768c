//! Launching and restoring, on a separate thread, and how the result is handled.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use chrono::Utc;

use super::events::image_of;
use super::failed::{Failed, Lives, without_damaged};
use super::remarks::Said;
use super::state::{Event, Obstacle, State};
use super::times::shown;
use super::{Message, Owner, Setup, replicate};
use crate::config::NetworkMode;
use crate::group::StartSignal;
use crate::notifications::{Passed, Refused};
use crate::policy::{Failure, StartPoint};
use crate::telemetry::events::What;
use rekindle_base::Moved;
use rekindle_base::chain;
use rekindle_engine::launch::group::Plan;
use rekindle_engine::launch::world::{FIRST_PID, Network, World};
use rekindle_engine::launch::{self, Job};
use rekindle_engine::parts::gpu::placement::Wishes;
use rekindle_engine::restore;
use rekindle_engine::restore::compat::{self, Difference, Here};
use rekindle_engine::snapshot::{Panicked, guarded};
use rekindle_group::{Blame, Fault};
use rekindle_os::exits::Watched;
use rekindle_os::fence::Fence;
use rekindle_os::spawn::Ended;
use rekindle_replica::OnDemand;
use rekindle_store::heal::Healed;
use rekindle_store::persist::Progress;
use rekindle_store::unpack;
use rekindle_store::{BadMark, BadWhy, Evidence, Image, ImageId, JobName};

pub(super) struct StartedJob {
    job: Job,
    /// Its processes, opened before they ran.
    open: Vec<Watched>,
    /// What was put back, for the log at the level `info`.
    details: Vec<String>,
    notes: Vec<String>,
    moved: Vec<Moved>,
    /// What is not as it was before a restore.
    differences: Vec<String>,
    /// Content of the store that was damaged, and replaced.
    healed: Option<Healed>,
}

pub(super) enum StartFailure {
    Launch(launch::Error),
    World(launch::world::Error),
    Restore(Box<Image>, Box<restore::Error>),
    Store(rekindle_store::Error),
    /// A hook prevented it, or a stop came while the hook ran.
    NotTried(Option<Refused>),
    /// A fault of rekindle. Processes of the job may be left, so that it is not started again beside them.
    Panicked(Panicked),
}

impl Owner<'_> {
    pub(super) fn start(&mut self, from: StartPoint) {
        let cancel = self.life.start_begins(Instant::now());
        let (setup, sender) = (Arc::clone(self.setup), self.threads.sender.clone());
        let (said, progress) = (self.reporting.remarks.said.clone(), self.transfers.start_begins(from));
        if let StartPoint::Image(image) = from {
            self.transfers.goes_to(self.setup.lock.hold(image));
        }
        let files_go = self.transfers.files_go();
        let (wishes, group) = (self.wishes(), self.group.as_ref().and_then(|member| member.network()));
        let signal = self.group_start_signal();
        let fence = self.group.as_ref().zip(self.setup.group.as_ref()).map(|(member, of)| member.fence(&of.options));
        let fence = match fence.transpose() {
            Ok(fence) => fence,
            Err(error) => {
                let why = StartFailure::World(launch::world::Error::Fence(error));
                return drop(sender.send(Message::Started(Box::new(Err(why)))));
            }
        };
        let gate = match from {
            StartPoint::Image(image) => {
                let event = self.tell(What::RestoreBegan { image });
                self.reporting.listeners.before_restore(&self.setup.config, &event)
            }
            StartPoint::Cold => None,
        };
        let start = move || {
            let cancelled = || cancel.load(Ordering::Relaxed);
            let passed = gate.map_or(Passed::Yes, |gate| gate.pass(&cancelled));
            if let Passed::Refused(refused) = passed {
                return Err(StartFailure::NotTried(Some(refused)));
            }
            match from {
                _ if passed == Passed::CalledOff => Err(StartFailure::NotTried(None)),
                StartPoint::Cold => launch_job(&setup, network(&setup, group.as_deref(), fence.as_ref())),
                StartPoint::Image(id) => {
                    // The restore looks up packed images after taking this lock, and no plain files are removed until
                    // it is over.
                    let _stay = files_go.lock().unwrap_or_else(PoisonError::into_inner);
                    let network = network(&setup, group.as_deref(), fence.as_ref());
                    let course = Course { progress: &progress, cancel: &cancel, signal: signal.as_ref() };
                    restore_job(&setup, id, network, &wishes, &said, &course)
                }
            }
        };
        // Without a message the supervisor would wait for this thread for ever.
        let work = move || {
            let result = guarded("the start", start).unwrap_or_else(|panicked| Err(StartFailure::Panicked(panicked)));
            let _ = sender.send(Message::Started(Box::new(result)));
        };
        self.spawn("start", work);
    }

    /// Facts and wishes about the GPUs.
    pub(super) fn wishes(&self) -> Wishes {
        Wishes { faults: self.watch.gpus.unfit(), ..self.setup.origin.wishes.clone() }
    }

    pub(super) fn started(&mut self, started: StartedJob) {
        self.transfers.start_ends();
        started.details.iter().for_each(|detail| crate::routine!("{detail}"));
        started.notes.iter().for_each(|note| tracing::info!("{note}"));
        let job = self.life.begins(started.job);
        let (life, sender, waiting) = (self.life.number(), self.threads.sender.clone(), Arc::clone(&job));
        if let State::Starting { from, .. } = self.machine.state() {
            let from = *from;
            self.arrived(from);
            self.deaths_life(from, started.open);
            self.word_of_life(image_of(from));
        }
        self.checks.proofs.end_of_life();
        if let State::Starting { from: StartPoint::Image(image), .. } = self.machine.state() {
            let (image, now) = (*image, Instant::now());
            self.checks.proofs.expect(image, self.watch.starts, self.setup, now);
            self.checks.evidence.note(image, Evidence::Restored, self.setup, now);
        }
        // Only now: rotation keeps the image because it is the first one to be proven, and the base of the line.
        self.transfers.arrived();
        self.tell_start(&job, started.moved, started.differences);
        if let Some(healed) = started.healed {
            self.tell(What::StoreDamaged {
                why: format!("found by a restore: {healed}"),
                chunks: healed.found(),
                replaced: healed.from_copies + healed.from_replica,
            });
        }
        for signal in self.life.take_unsent() {
            self.signal(signal);
        }
        self.spawn("wait", move || {
            let _ = waiting.root.wait_for_end();
            // At once, whatever the supervisor is doing: remaining processes of the job must not clean up its files.
            waiting.kill_rest();
            // Also daemons of the job, and a CRIU that works in the same namespace. Here, because a process that waits in the
            // kernel for a disk or a driver ends when that answers: until then the supervisor has other things to do.
            let ended = waiting.end().unwrap_or(Ended::Signal(libc::SIGKILL));
            drop(waiting);
            let _ = sender.send(Message::Ended(life, ended));
        });
        self.step(Event::Started);
        self.group_started();
        self.pack_newest();
    }

    pub(super) fn start_failed(&mut self, failure: StartFailure) {
        self.transfers.start_ends();
        // A group does without this machine, or tries it again: its network and its lease may be there in a moment. An image
        // that is gone is told with the parts.
        let is_here = matches!(failure, StartFailure::World(_) | StartFailure::Launch(_) | StartFailure::Store(_));
        let event = match failure {
            StartFailure::World(error) => impossible(chain(&error)),
            StartFailure::Launch(error) => impossible(chain(&error)),
            StartFailure::Panicked(panicked) => impossible(panicked.to_string()),
            StartFailure::Store(error) => {
                // Before the group is told that the start failed: it must not choose an image that is gone.
                self.look_for_lost_parts();
                self.not_found(&error)
            }
            StartFailure::NotTried(None) => Event::StartFailed { why: "cancelled".into() },
            StartFailure::NotTried(Some(refused)) => {
                tracing::error!("not restored now: {refused}");
                Event::StartFailed { why: refused.to_string() }
            }
            StartFailure::Restore(image, error) => self.restore_failed(*image, &error),
        };
        let event = self.did_not_arrive(event);
        let told = self.group.is_some().then(|| (not_started(&event), blame(&event, is_here)));
        self.step(event);
        if let Some((why, blame)) = told {
            self.group_not_started(why, blame);
        }
    }

    /// The store could not be read, or does not have the image. Waiting would not help.
    fn not_found(&self, error: &rekindle_store::Error) -> Event {
        let failed = || Event::StoreAway { why: chain(error) };
        match (error, self.machine.state()) {
            (rekindle_store::Error::UnknownImage { .. }, State::Starting { from: StartPoint::Image(image), .. }) => {
                self.images_to_go_on_from().map_or_else(|_| failed(), |images| Event::gone(*image, images))
            }
            _ => failed(),
        }
    }

    fn restore_failed(&mut self, image: Image, error: &restore::Error) -> Event {
        let why = chain(error);
        self.keep_criu_log("restore", error.criu_log());
        let id = image.id;
        let lives = if self.life.number() > 0 { Lives::Some } else { Lives::None };
        let failure = match Failed::of(error, why.clone(), lives, || self.can_fall_back(&image)) {
            Failed::CalledOff => return Event::StartFailed { why },
            Failed::Misfit => return impossible(self.advise_misfit(&image, error)),
            Failed::Configuration => {
                let why = format!("{why}. The image is kept");
                return Event::Impossible { why, obstacle: Obstacle::Configuration };
            }
            Failed::Machine => {
                tracing::error!("cannot restore image {} now: {why}", image.id);
                return Event::StartFailed { why };
            }
            Failed::NoFiles => return impossible(self.advise_files(&image, &why)),
            Failed::Damaged => {
                self.tell(What::ImageBad { image: id, why: format!("{}: {why}", BadWhy::Damaged) });
                let marked = mark(self.setup.folder.name(), image, BadWhy::Damaged, &why);
                return match self.images_to_go_on_from() {
                    Ok(images) => {
                        let images = without_damaged(images, id, marked);
                        Event::ImageFailed { image: id, failure: Failure::Damaged, images }
                    }
                    Err(error) => Event::StoreAway { why: chain(&error) },
                };
            }
            Failed::Image(failure) => failure,
        };
        match self.images_to_go_on_from() {
            Ok(images) => Event::ImageFailed { image: id, failure, images },
            Err(error) => Event::StoreAway { why: chain(&error) },
        }
    }

    /// Whether an older image has all its files here. A job that ran here may have removed files that it had open at a
    /// snapshot; then an older image works. If none does, as on a machine that has the image but not the files, a new
    /// run must not start the job from its beginning.
    fn can_fall_back(&self, image: &Image) -> bool {
        let (folder, user) = (&self.setup.folder, self.setup.program.spec.identity.as_ref());
        let changed = self.setup.config.restart.changed_files;
        let older = folder.copies().unwrap_or_default().into_iter().filter(|other| other.id < image.id);
        older.filter(|other| self.is_usable(other)).any(|other| {
            other.manifest().is_some_and(|manifest| restore::has_its_files(manifest, folder, user, changed))
        })
    }

    fn advise_files(&self, image: &Image, why: &str) -> String {
        let job = self.setup.folder.name();
        format!(
            "image {} of job {job} cannot be used: {why}. Copy the file here as it was when the image was taken, with \
            its mode and owner (from the machine that the job ran on, or use a shared file system), and run the same command \
            again; the image is kept. `rekindle run --fresh` starts from the beginning",
            image.id
        )
    }

    /// Advice for an image that does not fit this machine. It is not marked, and nothing else is started automatically:
    /// an older image or the beginning would lose work, so the user decides.
    fn advise_misfit(&self, image: &Image, error: &restore::Error) -> String {
        let job = self.setup.folder.name();
        let older = self.setup.folder.copies().unwrap_or_default().into_iter().filter(|other| other.id < image.id);
        // If this image cannot be unpacked, the others cannot either.
        let older = older.filter(|_| !matches!(error, restore::Error::Unpack(_)));
        let criu = self.setup.criu.again().version;
        let fits = older.filter(|other| self.is_usable(other)).find_map(|other| {
            let manifest = other.manifest()?;
            let here = Here::look(manifest, Some(criu), &self.wishes());
            (!compat::compare(manifest, &here).iter().any(Difference::is_fatal)).then_some(other.id)
        });
        let other = fits.map_or_else(String::new, |id| {
            format!(". The older image {id} fits: `rekindle restore {job}/{id}` continues from it")
        });
        format!(
            "{}. Fix that and run the same command again; the image is kept{other}. `rekindle run --fresh` starts \
            from the beginning",
            chain(error)
        )
    }

    /// Marks the image in memory and in the store, because the copies are equal.
    pub(super) fn mark_copies(&mut self, id: ImageId, why: BadWhy, detail: &str) {
        self.tell(What::ImageBad { image: id, why: format!("{why}: {detail}") });
        let copies = match self.setup.folder.copies() {
            Ok(copies) => copies,
            Err(error) => return tracing::error!("cannot mark image {id} as bad: {}", chain(&error)),
        };
        let mark = BadMark { why, detail: detail.into(), when: Utc::now() };
        for mut image in copies.into_iter().filter(|image| image.id == id) {
            if let Err(error) = image.mark_bad(mark.clone()) {
                tracing::error!("cannot mark image {id} as bad: {}", chain(&error));
            }
        }
        say_marked(self.setup.folder.name(), id, why, detail);
    }
}

/// Why the job was not started, in words.
fn not_started(event: &Event) -> String {
    match event {
        Event::StartFailed { why } | Event::StoreAway { why } | Event::Impossible { why, .. } => why.clone(),
        Event::ImageFailed { image, failure, .. } => {
            format!("image {image} was not restored: {}", failure.why().unwrap_or("its content is damaged"))
        }
        _ => "the job was not started".to_owned(),
    }
}

/// What the group is told to be the cause. `is_here`: the machine, whatever the event means for a job without a group.
fn blame(event: &Event, is_here: bool) -> (Blame, Fault) {
    let blame = match event {
        _ if is_here => Blame::Machine,
        // Slow or unreadable storage, which may be so for this image only. It is tried more often than a bad one.
        Event::ImageFailed { failure: Failure::NotNow(_), .. } => return (Blame::Image, Fault::Outside),
        Event::ImageFailed { .. } => Blame::Image,
        Event::Impossible { obstacle: Obstacle::Machine, .. } => Blame::Misfit,
        Event::Impossible { obstacle: Obstacle::Configuration, .. } => Blame::Configuration,
        _ => Blame::Machine,
    };
    (blame, Fault::Job)
}

fn impossible(why: String) -> Event {
    Event::Impossible { why, obstacle: Obstacle::Machine }
}

/// Returns whether it is marked now.
fn mark(job: &JobName, mut image: Image, why: BadWhy, detail: &str) -> bool {
    let marked = image.mark_bad(BadMark { why, detail: detail.into(), when: Utc::now() });
    match &marked {
        Ok(()) => say_marked(job, image.id, why, detail),
        Err(error) => {
            tracing::error!("image {} {why} ({detail}) and cannot be marked as bad: {}", image.id, chain(error))
        }
    }
    marked.is_ok()
}

fn say_marked(job: &JobName, id: ImageId, why: BadWhy, detail: &str) {
    tracing::error!(
        "image {id} is marked as bad and is kept ({why}: {detail}). `rekindle mark --good {job}/{id}` removes the mark"
    );
}

fn network<'a>(setup: &'a Setup, group: Option<&'a Plan>, fence: Option<&'a Arc<Fence>>) -> Network<'a> {
    if let Some(plan) = group {
        return Network::Group(plan, setup.program.uplink.as_ref(), fence);
    }
    match (setup.config.network.mode, &setup.program.uplink) {
        (NetworkMode::Host, _) => Network::Host,
        (NetworkMode::Private | NetworkMode::Uplink, None) => Network::Private,
        (NetworkMode::Private | NetworkMode::Uplink, Some(plan)) => Network::Uplink(plan),
    }
}

/// Makes the job's socket accessible in this world. The job also runs without it.
fn reach_socket(setup: &Setup, world: &World) {
    let Some(word) = &setup.sockets.job_api else { return };
    if (setup.group.is_some() || setup.config.network.mode != NetworkMode::Host)
        && let Err(error) = word.move_to(world.init().pid())
    {
        tracing::warn!("the job's socket (REKINDLE_SOCKET) does not work: {error}");
    }
}

fn launch_job(setup: &Setup, network: Network<'_>) -> Result<StartedJob, StartFailure> {
    let world = World::new(&setup.program.reaper, FIRST_PID - 1, network).map_err(StartFailure::World)?;
    reach_socket(setup, &world);
    match launch::start(&world, &setup.program.reaper, &setup.program.spec, &setup.output) {
        Ok(root) => {
            let job = Job::new(world, root);
            job.wait_for_main();
            let (open, details, notes, moved, differences, healed) = Default::default();
            Ok(StartedJob { job, open, details, notes, moved, differences, healed })
        }
        Err(error) => {
            world.end(None);
            Err(StartFailure::Launch(error))
        }
    }
}

/// What goes on while a job is restored.
struct Course<'a> {
    progress: &'a Progress,
    cancel: &'a AtomicBool,
    /// What a member of a group waits for.
    signal: Option<&'a StartSignal>,
}

fn restore_job(
    setup: &Setup,
    id: ImageId,
    network: Network<'_>,
    wishes: &Wishes,
    said: &Said,
    course: &Course<'_>,
) -> Result<StartedJob, StartFailure> {
    let Course { progress, cancel, signal } = course;
    let may_run = |is_over: &dyn Fn() -> bool| signal.is_none_or(|signal| signal.wait(is_over));
    let copies = setup.folder.copies().map_err(StartFailure::Store)?;
    let wanted = copies.into_iter().find(|image| image.id == id && image.is_good());
    let image = match wanted {
        Some(image) => image,
        None => setup.folder.find(&id.to_string()).map_err(StartFailure::Store)?,
    };
    let replica = OnDemand(|| replicate::needed(setup));
    let healing = setup.healing(&replica);
    let criu = setup.criu.again();
    let request = restore::Request {
        image: &image,
        folder: &setup.folder,
        criu: &criu,
        own: restore::Own { work: &setup.program.work, reaper: &setup.program.reaper },
        output: &setup.output,
        identity: setup.program.spec.identity.as_ref(),
        privileges: setup.program.spec.privileges,
        timeout: setup.config.restart.restore_timeout,
        network,
        checks: restore::Checks {
            changed_files: setup.config.restart.changed_files,
            compare: setup.config.restart.compare,
        },
        wishes,
        prepare: restore::Prepare(&|world| reach_socket(setup, world)),
        unpacking: restore::Unpacking {
            staging: setup.images.staging.as_ref(),
            memory_reserve: setup.config.snapshot.memory_reserve.bytes(),
            key: setup.images.packing.key.as_deref(),
            threads: unpack::threads(),
            progress,
            healing: Some(&healing),
        },
        cuda: restore::Cuda {
            copier: &setup.copier,
            keeps: setup.config.gpu.memory == launch::memory::GpuMemory::Kept,
            hold: signal.map(|_| restore::Hold(&may_run)),
        },
    };
    let cancelled = || cancel.load(Ordering::Relaxed);
    // Logged once, not at every restart.
    let warn = |difference: &Difference| {
        let text = difference.to_string();
        if said.is_new(text.clone()) {
            tracing::warn!("this machine differs from the one of image {id}: {text}");
        }
    };
    match restore::restore(&request, &warn, &cancelled) {
        Ok(restored) => {
            let details = restored.put_back.iter().map(ToString::to_string).collect();
            let took: Duration = restored.timings.iter().map(|(_, took)| *took).sum();
            let mut notes = vec![format!("the job was restored from image {id} after {}", shown(took))];
            let moved = restored.moved;
            notes.extend(moved.iter().map(|m| format!("moved the job's data from {} to {}: {}", m.old, m.new, m.why)));
            notes.extend(restored.visible.map(|value| {
                format!(
                    "CUDA_VISIBLE_DEVICES={value} in the job's environment still names the old GPUs: processes that \
                    the job starts from now on will use it"
                )
            }));
            // Logged once, not at every restart.
            let differences = restored.differences;
            for line in differences.iter().filter(|line| said.is_new((*line).clone())) {
                tracing::warn!("{line}");
            }
            let (job, open, healed) = (restored.job, restored.open, restored.healed);
            Ok(StartedJob { job, open, details, notes, moved, differences, healed })
        }
        Err(error) => Err(StartFailure::Restore(Box::new(image), Box::new(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Images;

    #[test]
    fn a_group_is_told_what_is_to_blame() {
        let misfit = || impossible("another driver".into());
        let configuration = Event::Impossible { why: "another user".into(), obstacle: Obstacle::Configuration };
        let image = "000001-20260101T000000Z".parse().unwrap();
        let failed = |failure| Event::ImageFailed { image, failure, images: Images::default() };
        for (event, is_here, expected) in [
            (Event::StartFailed { why: "no room".into() }, false, Blame::Machine),
            (misfit(), false, Blame::Misfit),
            // The network of the group, or its lease.
            (misfit(), true, Blame::Machine),
            (configuration, false, Blame::Configuration),
            (failed(Failure::Damaged), false, Blame::Image),
            (failed(Failure::Unexplained("CRIU failed".into())), false, Blame::Image),
            (failed(Failure::FilesGone("a file is missing".into())), false, Blame::Image),
            (Event::gone(image, Images::default()), true, Blame::Machine),
        ] {
            assert_eq!(blame(&event, is_here), (expected, Fault::Job), "{event:?}");
        }
        let slow = failed(Failure::NotNow("CRIU did not finish".into()));
        assert_eq!(blame(&slow, false), (Blame::Image, Fault::Outside), "it may be the image");
    }
}
