//! The one owner of a job's state: a loop that feeds events to [`state::Machine`] and carries out its actions.
//!
//! One thread owns everything; it waits on one channel. Threads beside it do what blocks (launching, restoring, taking a
//! snapshot, waiting for the end, receiving signals) and report there. When the supervisor dies, the kernel takes the
//! job's namespaces down ([`crate::launch::world`]); the next run sweeps what is left in the store and goes on from the
//! newest image.

mod publish;
pub use publish::Published;
pub mod state;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use chrono::Utc;
use signal_hook::consts as sig;

use crate::config::{Config, OnSuccess, PidNamespace};
use crate::launch::world::{FIRST_PID, World};
use crate::launch::{self, Job, JobSpec, output};
use crate::restart::policy::From;
use crate::restart::{self, Blame};
use crate::snapshot::{self, Launch, Subject, Taken};
use crate::store::retention::{self, Facts, Policy};
use crate::store::{BadMark, BadWhy, Image, ImageId, JobFolder, JobRecord, Outcome, WriterLock};
use crate::sys::criu::{Criu, Log};
use crate::sys::inherited;
use crate::sys::spawn::Ended;
use crate::telemetry::log::chain;
use state::{Action, Event, Finish, Harm, Machine, Stop};

/// Everything a run needs, checked before.
#[derive(Debug)]
pub struct Setup {
    /// The configuration.
    pub config: Config,
    /// The job's folder.
    pub folder: JobFolder,
    /// Proof that nobody else writes there.
    pub lock: WriterLock,
    /// CRIU.
    pub criu: Criu,
    /// What to run.
    pub spec: JobSpec,
    /// The same for manifests.
    pub launch: Launch,
    /// This version's reaper, unpacked.
    pub reaper: PathBuf,
    /// What to begin with.
    pub from: From,
    /// An image of another lineage that this one began from, and may go back to.
    pub base: Option<ImageId>,
}

/// Why the supervisor itself failed. The job is not left behind.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    /// The job's output can not be kept.
    #[error(transparent)]
    Output(#[from] output::Error),
    /// Signals, threads or pipes.
    #[error("can not set up the supervisor: {what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

/// What the threads report.
enum Message {
    Signal(i32),
    /// The reaper of this life has ended.
    Ended(u32),
    Started(Result<StartedJob, StartFailure>),
    Snapshot(Box<Result<Taken, snapshot::Error>>),
}

struct StartedJob {
    job: Job,
    notes: Vec<String>,
}

enum StartFailure {
    Launch(launch::Error),
    World(launch::world::Error),
    Restore(Box<Image>, Box<restart::Error>),
    Store(crate::store::Error),
}

/// Supervises the job until it is over.
///
/// # Errors
/// When the supervisor itself can not work; how the job fared is in [`Finish`].
pub fn run(setup: Setup) -> Result<Finish, Error> {
    let shared = Arc::new(setup);
    let files = output::Files::create(&shared.folder.log_dir())?;
    let follower =
        output::Follower::start(&files).map_err(|source| Error::Io { what: "following the output", source })?;
    let (sender, messages) = mpsc::channel();
    let signals = listen(sender.clone()).map_err(|source| Error::Io { what: "handling signals", source })?;
    let (machine, actions) = Machine::new(&shared.config, shared.from);
    let mut owner = Owner {
        shared: &shared,
        files,
        machine,
        sender,
        job: None,
        life: 0,
        ended: None,
        cancel: Arc::new(AtomicBool::new(false)),
        stops: 0,
        published: publish::Published::new(&shared.launch.lineage),
        finish: None,
    };
    owner.record(Outcome::Running, None)?;
    owner.carry_out(actions);
    while owner.finish.is_none() {
        let message = match owner.machine.state().deadline() {
            Some(at) => match messages.recv_timeout(at.saturating_duration_since(Instant::now())) {
                Ok(message) => Some(message),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            },
            None => messages.recv().ok(),
        };
        match message {
            Some(message) => owner.receive(message),
            None => owner.step(Event::Tick),
        }
    }
    signals.close();
    let finish = owner.finish.take();
    let finish = finish.unwrap_or_else(|| Finish::Failed { why: "the supervisor lost its threads".into(), last: None });
    // Before the rest of the output is shown: a reader that stands still must not keep the end from being recorded.
    let recorded = owner.wrap_up(&finish);
    // All is done but for that reader: whoever does not want to wait for it can end us.
    inherited::let_end_us(&OURS);
    drop(follower);
    recorded.map(|()| finish)
}

/// Signals that are for us.
const OURS: [i32; 5] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP, sig::SIGUSR1, sig::SIGUSR2];
/// Signals that are passed on to the job.
const FORWARDED: [i32; 3] = [sig::SIGQUIT, sig::SIGCONT, sig::SIGWINCH];

/// Signals that are left alone where the caller had them ignored: `nohup` says that a terminal that closes ends nothing.
const MAY_BE_IGNORED: [i32; 3] = [sig::SIGHUP, sig::SIGINT, sig::SIGQUIT];

fn listen(sender: mpsc::Sender<Message>) -> std::io::Result<signal_hook::iterator::Handle> {
    let wanted = OURS.iter().chain(&FORWARDED).filter(|s| !(MAY_BE_IGNORED.contains(s) && inherited::is_ignored(**s)));
    let mut signals = signal_hook::iterator::Signals::new(wanted)?;
    let handle = signals.handle();
    let mut run = move || signals.forever().try_for_each(|signal| sender.send(Message::Signal(signal)));
    std::thread::Builder::new().name("signals".into()).spawn(move || drop(run()))?;
    Ok(handle)
}

struct Owner<'a> {
    shared: &'a Arc<Setup>,
    files: output::Files,
    machine: Machine<'a>,
    sender: mpsc::Sender<Message>,
    job: Option<Arc<Job>>,
    /// Counts lives, so that a report about an earlier one is not taken for this one's.
    life: u32,
    /// How this life ended, once it did.
    ended: Option<Ended>,
    /// Set to call off the start or the snapshot under way.
    cancel: Arc<AtomicBool>,
    /// Signals that asked to stop.
    stops: u32,
    published: publish::Published,
    finish: Option<Finish>,
}

impl Owner<'_> {
    fn step(&mut self, event: Event) {
        let actions = self.machine.step(event, Instant::now());
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.act(action);
        }
        self.publish();
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start(from) => self.start(from),
            Action::Snapshot(reason) => self.snapshot(reason),
            Action::Cancel => self.cancel.store(true, Ordering::Relaxed),
            Action::Terminate => self.signal(sig::SIGTERM),
            Action::Kill => {
                if let Some(job) = &self.job {
                    job.world.kill(Some(&job.root));
                }
            }
            Action::MarkDiesAgain(id) => {
                self.mark(id, BadWhy::DiesAgain, "the job died from it twice within restart.min-uptime")
            }
            Action::Announce { from, after } => {
                self.published.restarts += 1;
                tracing::warn!("going on from {from} in {}", humantime::format_duration(after));
            }
            Action::Finish(finish) => self.finish = Some(finish),
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Signal(signal) => self.signalled(signal),
            Message::Ended(life) if life == self.life => self.job_ended(),
            Message::Ended(_) => {}
            Message::Started(Ok(started)) => self.started(started),
            Message::Started(Err(failure)) => self.start_failed(failure),
            Message::Snapshot(result) => self.snapshot_done(*result),
        }
    }

    fn signalled(&mut self, signal: i32) {
        let event = match signal {
            sig::SIGUSR1 => Event::SnapshotNow,
            sig::SIGTERM | sig::SIGINT | sig::SIGHUP | sig::SIGUSR2 => {
                self.stops += 1;
                let stop = if signal == sig::SIGUSR2 { Stop::Requeue } else { Stop::Signal(signal) };
                if self.stops > 1 && signal != sig::SIGUSR2 { Event::StopNow(stop) } else { Event::Stop(stop) }
            }
            other => return self.signal(other),
        };
        tracing::info!("received {}", Ended::Signal(signal).to_string().trim_start_matches("signal "));
        self.step(event);
    }

    fn signal(&self, signal: i32) {
        if let Some(job) = &self.job
            && let Err(error) = job.signal(signal)
        {
            tracing::warn!("can not signal the job: {error}");
        }
    }

    // ---- starting ----

    fn start(&mut self, from: From) {
        self.cancel = Arc::new(AtomicBool::new(false));
        let (setup, files, cancel, sender) =
            (Arc::clone(self.shared), self.files.clone(), Arc::clone(&self.cancel), self.sender.clone());
        let work = move || {
            let result = match from {
                From::Cold => launch_job(&setup, &files),
                From::Image(id) => restore_job(&setup, id, &cancel),
            };
            let _ = sender.send(Message::Started(result));
        };
        self.spawn("start", work);
    }

    /// A thread that can not be started is the end: nothing can be done without.
    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) {
        if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(work) {
            self.finish = Some(Finish::Failed { why: format!("can not start a thread: {error}"), last: None });
        }
    }

    fn started(&mut self, started: StartedJob) {
        started.notes.iter().for_each(|note| tracing::info!("{note}"));
        let job = Arc::new(started.job);
        self.life += 1;
        self.ended = None;
        let (life, sender, waiting) = (self.life, self.sender.clone(), Arc::clone(&job));
        self.job = Some(job);
        self.spawn("wait", move || {
            let _ = waiting.root.wait_for_end();
            drop(waiting);
            let _ = sender.send(Message::Ended(life));
        });
        self.step(Event::Started);
    }

    fn start_failed(&mut self, failure: StartFailure) {
        let event = match failure {
            StartFailure::World(error) => Event::Impossible { why: chain(&error) },
            StartFailure::Launch(error) => Event::Impossible { why: chain(&error) },
            StartFailure::Store(error) => Event::StartFailed { why: chain(&error) },
            StartFailure::Restore(image, error) => self.restore_failed(*image, &error),
        };
        self.step(event);
    }

    fn restore_failed(&mut self, image: Image, error: &restart::Error) -> Event {
        let why = chain(error);
        self.keep_criu_log("restore", error.criu_log());
        let bad = match error.blame() {
            Blame::Nobody => return Event::StartFailed { why },
            Blame::Machine => {
                tracing::error!("can not restore image {} now: {why}", image.id);
                return Event::StartFailed { why };
            }
            Blame::Damaged => BadWhy::Damaged,
            Blame::Image => BadWhy::DoesNotRestore,
        };
        tracing::error!("image {} does not restore: {why}", image.id);
        self.mark(image.id, bad, &why);
        match self.good_images() {
            Ok(images) => Event::ImageFailed { images: images.into_iter().filter(|id| *id != image.id).collect() },
            Err(error) => Event::StartFailed { why: chain(&error) },
        }
    }

    fn mark(&self, id: ImageId, why: BadWhy, detail: &str) {
        let mark = BadMark { why, detail: detail.into(), when: Utc::now() };
        let marked = self.shared.folder.find(&id.to_string()).and_then(|mut image| image.mark_bad(mark));
        match marked {
            Ok(()) => tracing::warn!("image {id} is marked as bad ({why}); it is kept"),
            Err(error) => tracing::error!("can not mark image {id} as bad: {}", chain(&error)),
        }
    }

    // ---- ending ----

    fn job_ended(&mut self) {
        let Some(job) = self.job.clone() else { return };
        // Daemons end with the job; a CRIU at work in the same namespace too.
        let ended = job.end().unwrap_or(Ended::Signal(sig::SIGKILL));
        self.ended = Some(ended);
        if matches!(self.machine.state(), state::State::Running(_) | state::State::Snapshotting { .. }) {
            match ended {
                Ended::Exit(0) => tracing::info!("the job completed"),
                ended => tracing::warn!("the job ended: {ended}"),
            }
        }
        self.report_end(ended);
    }

    fn report_end(&mut self, ended: Ended) {
        let images = self.good_images().unwrap_or_else(|error| {
            tracing::error!("can not read the images: {}", chain(&error));
            Vec::new()
        });
        self.step(Event::Ended { ended, images });
        if !matches!(self.machine.state(), state::State::Snapshotting { .. }) {
            self.job = None;
        }
    }

    /// The good images of this lineage, newest first.
    fn good_images(&self) -> Result<Vec<ImageId>, crate::store::Error> {
        let images = self.shared.folder.images()?;
        let ours = |image: &Image| {
            let lineage = &self.shared.launch.lineage;
            image.is_good() && image.manifest().is_some_and(|m| m.lineage == *lineage || Some(m.id) == self.shared.base)
        };
        Ok(images.iter().filter(|image| ours(image)).map(|image| image.id).collect())
    }

    // ---- snapshots ----

    fn snapshot(&mut self, reason: crate::store::manifest::Reason) {
        let Some(job) = self.job.clone() else { return };
        self.cancel = Arc::new(AtomicBool::new(false));
        let (setup, files, cancel, sender) =
            (Arc::clone(self.shared), self.files.clone(), Arc::clone(&self.cancel), self.sender.clone());
        self.spawn("snapshot", move || {
            let subject = Subject {
                job: &job,
                folder: &setup.folder,
                lock: &setup.lock,
                config: &setup.config,
                criu: &setup.criu,
                launch: &setup.launch,
                reaper: &setup.reaper,
                output: &files,
            };
            let result = snapshot::take(&subject, reason, &|| cancel.load(Ordering::Relaxed));
            drop(job);
            let _ = sender.send(Message::Snapshot(Box::new(result)));
        });
    }

    fn snapshot_done(&mut self, result: Result<Taken, snapshot::Error>) {
        let event = match result {
            Ok(taken) => {
                taken.notes.iter().for_each(|note| tracing::warn!("{note}"));
                let bytes = taken.image.manifest().map_or(0, |m| m.bytes);
                let freeze = humantime::format_duration(Duration::from_millis(
                    u64::try_from(taken.freeze.as_millis()).unwrap_or(u64::MAX),
                ));
                let size = bytesize::ByteSize::b(bytes);
                tracing::info!("image {}: {size}, the job stood still for {freeze}", taken.image.id);
                self.published.taken(&taken);
                self.rotate();
                Event::SnapshotTaken
            }
            Err(error) => {
                let lost = error.job_is_lost();
                if self.ended.is_none() {
                    let why = chain(&error);
                    self.keep_criu_log("dump", error.criu_log());
                    match error {
                        _ if lost => tracing::error!("the snapshot failed and the job can not go on: {why}"),
                        snapshot::Error::Cancelled => tracing::info!("the snapshot was called off; the job runs on"),
                        snapshot::Error::JobEnded => tracing::info!("no snapshot: {why}"),
                        _ => tracing::error!("the snapshot failed, the job runs on: {why}"),
                    }
                    self.published.snapshot_failed(why);
                }
                Event::SnapshotFailed(if lost { Harm::Lost } else { Harm::None })
            }
        };
        self.step(event);
        // An end that came during the snapshot was put aside; the images of now count.
        if let (Some(ended), true) = (self.ended, self.job.is_some()) {
            self.report_end(ended);
        }
    }

    /// Removes what the plan says. What can not be read stays.
    fn rotate(&self) {
        let folder = &self.shared.folder;
        let policy = Policy { keep_last: self.shared.config.store.keep_last };
        let removed = folder.images().and_then(|images| {
            let facts: Vec<Facts> = images.iter().map(Facts::from).collect();
            retention::plan(&facts, &policy).removals().try_for_each(|id| {
                tracing::debug!("removing image {id}");
                folder.remove(&self.shared.lock, &id)
            })
        });
        if let Err(error) = removed {
            tracing::warn!("old images were not removed: {}", chain(&error));
        }
    }

    /// CRIU's log of a failure, for who has to find out; one for each kind, the last.
    fn keep_criu_log(&self, kind: &str, log: Option<&Log>) {
        let Some(log) = log else { return };
        let path = self.shared.folder.log_dir().join(format!("criu-{kind}.log"));
        match std::fs::write(&path, log.text()) {
            Ok(()) => tracing::info!("CRIU's log is in {}", path.display()),
            Err(error) => tracing::warn!("can not keep CRIU's log in {}: {error}", path.display()),
        }
    }

    // ---- what others see ----

    fn publish(&mut self) {
        self.published.update(self.machine.state(), self.job.as_deref());
        if let Err(error) = self.published.write(&self.shared.folder.state_file()) {
            tracing::debug!("can not publish the state: {error}");
        }
    }

    fn record(&self, outcome: Outcome, exit_code: Option<i32>) -> Result<(), crate::store::Error> {
        let record = JobRecord {
            command: self.shared.launch.command.clone(),
            directory: self.shared.launch.directory.clone(),
            lineage: self.shared.launch.lineage.clone(),
            base: self.shared.base,
            created: self.published.begun,
            outcome,
            exit_code,
        };
        self.shared.folder.write_record(&self.shared.lock, &record)
    }

    /// Records how it ended; removes the images of a completed job where that is wanted.
    fn wrap_up(&mut self, finish: &Finish) -> Result<(), Error> {
        if let Some(job) = self.job.take() {
            job.end();
        }
        let (outcome, code) = match finish {
            Finish::Completed => (Outcome::Completed, Some(0)),
            Finish::Stopped(_) => (Outcome::Stopped, None),
            Finish::Impossible { why } => (Outcome::Failed { why: why.clone() }, None),
            Finish::Failed { why, last } => {
                let code = last.and_then(|l| if let Ended::Exit(code) = l { Some(code) } else { None });
                (Outcome::Failed { why: why.clone() }, code)
            }
        };
        self.record(outcome, code)?;
        if *finish == Finish::Completed && self.shared.config.store.on_success == OnSuccess::Remove {
            for id in self.good_images()? {
                self.shared.folder.remove(&self.shared.lock, &id)?;
            }
        }
        self.publish();
        Ok(())
    }
}

fn launch_job(setup: &Setup, files: &output::Files) -> Result<StartedJob, StartFailure> {
    let world = match setup.config.job.pid_namespace {
        PidNamespace::Private => World::private(&setup.reaper, FIRST_PID - 1).map_err(StartFailure::World)?,
        PidNamespace::Host => World::Host,
    };
    match launch::start(&world, &setup.reaper, &setup.spec, files) {
        Ok(root) => {
            let job = Job::new(world, root);
            job.wait_for_main();
            Ok(StartedJob { job, notes: Vec::new() })
        }
        Err(error) => {
            world.end(None);
            Err(StartFailure::Launch(error))
        }
    }
}

fn restore_job(setup: &Setup, id: ImageId, cancel: &AtomicBool) -> Result<StartedJob, StartFailure> {
    let image = setup.folder.find(&id.to_string()).map_err(StartFailure::Store)?;
    let request = restart::Request {
        image: &image,
        folder: &setup.folder,
        criu: &setup.criu,
        reaper: &setup.reaper,
        identity: setup.spec.identity.as_ref(),
        timeout: setup.config.restart.restore_timeout,
    };
    match restart::restore(&request, &|| cancel.load(Ordering::Relaxed)) {
        Ok(restored) => {
            let mut notes: Vec<String> = restored
                .rolled_back
                .iter()
                .map(|r| {
                    format!("{} was put back; {} bytes are kept in {}", r.path.display(), r.bytes, r.kept.display())
                })
                .collect();
            let took: Duration = restored.timings.iter().map(|(_, took)| *took).sum();
            let took =
                humantime::format_duration(Duration::from_millis(u64::try_from(took.as_millis()).unwrap_or(u64::MAX)));
            notes.push(format!("the job is back from image {id} after {took}"));
            Ok(StartedJob { job: restored.job, notes })
        }
        Err(error) => Err(StartFailure::Restore(Box::new(image), Box::new(error))),
    }
}
