//! The one owner of a job's state: a loop that feeds events to [`state::Machine`] and carries out its actions.
//!
//! One thread owns everything; it waits on one channel. Threads beside it do what blocks (launching, restoring, taking a
//! snapshot, waiting for the end, receiving signals) and report there. When the supervisor dies, the kernel takes the
//! job's namespaces down ([`rekindle_engine::launch::world`]); the next run sweeps what is left in the store and goes on from the
//! newest image, be it in memory or in the store.

mod control;
mod deadline;
mod events;
mod failed;
mod hooks;
mod keep;
pub(crate) mod line;
mod memory;
mod metrics;
pub mod notify;
mod pace;
mod proof;
mod publish;
mod record;
mod rehearse;
mod replicate;
mod rewind;
pub(crate) use rewind::new_lineage;
mod result;
mod rot;
pub use result::RunResult;
#[cfg(test)]
mod simulator;
mod start;
pub mod state;
mod stops;
mod unread;
mod watch;
mod word;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use signal_hook::consts as sig;

use crate::config::{Config, OnSuccess};
use crate::policy::{From, Images, Mark};
use crate::published::Published;
use crate::scheduler::Scheduler;
use crate::telemetry::events::{Journal, What};
use crate::watch::beats::Beats;
use rekindle_base::chain;
use rekindle_criu::Criu;
use rekindle_engine::launch::{Job, JobSpec, output, uplink};
use rekindle_engine::parts::gpu::placement::Wishes;
use rekindle_engine::snapshot::{self, Launch, Taken};
use rekindle_os::clock;
use rekindle_os::inherited;
use rekindle_os::spawn::Ended;
use rekindle_store::gc;
use rekindle_store::manifest::Reason;
use rekindle_store::persist::Packing;
use rekindle_store::staging::Area;
use rekindle_store::{HEARTBEAT, ImageId, JobFolder, Outcome, WriterLock};
use start::{StartFailure, StartedJob};
use state::{Action, Event, Finish, Machine};

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
    /// The way out of the job's network, where it has one of its own and wants one.
    pub uplink: Option<uplink::Plan>,
    /// This version's interposer, unpacked, where the job is to have it.
    pub interposer: Option<PathBuf>,
    /// Where images land in memory.
    pub staging: Option<Area>,
    /// How they are packed.
    pub packing: Packing,
    /// Where the job says that it lives, where it is to.
    pub beats: Option<Beats>,
    /// Where it may ask for something.
    pub word: Option<crate::word::server::Socket>,
    /// What to begin with.
    pub from: From,
    /// Whether that image was asked for by name, and nothing else is to be taken in its place.
    pub named: bool,
    /// An image of another lineage that this one began from, and may go back to.
    pub base: Option<ImageId>,
    /// Which GPUs it shall come back on, where the user said so.
    pub wishes: Wishes,
    /// Who started us.
    pub scheduler: Scheduler,
    /// When the job must be gone, where the user said so.
    pub deadline: Option<DateTime<Utc>>,
}

impl Setup {
    /// Files of ours that a job has mapped.
    fn ours(&self) -> Vec<PathBuf> {
        [Some(&self.reaper), self.interposer.as_ref()].into_iter().flatten().cloned().collect()
    }
}

/// Why the supervisor itself failed. The job is not left behind.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] rekindle_store::Error),
    /// The job's output cannot be kept.
    #[error(transparent)]
    Output(#[from] output::Error),
    /// Signals, threads or pipes.
    #[error("cannot set up the supervisor: {what}")]
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
    Started(Box<Result<StartedJob, StartFailure>>),
    Snapshot(Box<Result<Taken, snapshot::Error>>),
    Persisted(Box<keep::Outcome>),
    Replicated(Box<replicate::Report>),
    Watched(watch::Finding),
    Control(Box<control::Incoming>),
    Word(Box<crate::word::Call>),
    /// What the scheduler says of the job's end.
    End(deadline::Answer),
    Hook(crate::hooks::Report),
    Rot(Box<rot::Report>),
    Rehearsed(Box<rehearse::Rehearsed>),
}

impl Message {
    /// Whether it is about work that needs the lock, and may have found out that it is lost.
    fn is_of_the_store(&self) -> bool {
        matches!(self, Message::Started(_) | Message::Snapshot(_) | Message::Persisted(_) | Message::Replicated(_))
    }
}

/// Supervises the job until it is over.
///
/// # Errors
/// When the supervisor itself cannot work; how the job fared is in [`Finish`].
pub fn run(setup: Setup) -> Result<Finish, Error> {
    let shared = Arc::new(setup);
    let files = output::Files::create(&shared.folder.log_dir(), shared.config.log.bounds())?;
    let _rotation =
        output::Rotation::start(&files).map_err(|source| Error::Io { what: "rotating the output", source })?;
    let follower =
        output::Follower::start(&files).map_err(|source| Error::Io { what: "following the output", source })?;
    let (sender, messages) = mpsc::channel();
    let signals = listen(sender.clone()).map_err(|source| Error::Io { what: "handling signals", source })?;
    let (machine, actions) = Machine::new(&shared.config, shared.from);
    let machine = machine.recalling(record::recall(&shared));
    let machine = if shared.named { machine.asked_for() } else { machine };
    let mut owner = Owner {
        shared: &shared,
        listeners: hooks::Listeners::new(&shared, &sender),
        files,
        machine,
        sender,
        job: None,
        unsent: Vec::new(),
        life: 0,
        ended: None,
        unread: unread::Unread::default(),
        cancel: Arc::new(AtomicBool::new(false)),
        stops: stops::Stops::default(),
        published: Published::new(&shared.launch.lineage),
        remarks: Vec::new(),
        proofs: proof::Proofs::default(),
        deaths: Arc::default(),
        persist: None,
        files_go: Arc::default(),
        replication: replicate::Replication::default(),
        rot: None,
        rehearsals: rehearse::Rehearsals::default(),
        restoring: None,
        control: control::Control::default(),
        word: word::Word::new(&shared),
        line: line::Line::new(shared.launch.lineage.clone(), shared.base),
        told: Arc::default(),
        journal: Journal::in_folder(&shared.folder.log_dir()),
        deadline: deadline::Deadline::new(&shared),
        watch: watch::Watch::default(),
        notify: notify::Notify::of(&shared),
        since: Instant::now(),
        heartbeat: Instant::now(),
        taken_over: None,
        finish: None,
    };
    owner.record(Outcome::Running, None)?;
    owner.tell_begin();
    owner.open_control();
    owner.open_word();
    owner.carry_out(actions);
    // What an interrupted run left in memory.
    owner.persist_newest();
    owner.replicate_newest();
    owner.ask_for_the_end();
    owner.open_rot();
    while owner.finish.is_none() && owner.holds_the_lock() {
        owner.mind_the_deadline();
        owner.mind_the_holds();
        owner.mind_the_proofs();
        owner.mind_rot();
        owner.mind_the_rehearsals();
        owner.mind_the_unread();
        owner.beat();
        let (patience, began) = (owner.patience(), clock::since_boot());
        let message = messages.recv_timeout(patience);
        let slept = clock::since_boot().saturating_sub(began) > patience + SLEPT;
        if (slept || message.as_ref().is_ok_and(Message::is_of_the_store)) && !owner.still_holds_the_lock() {
            break;
        }
        match message {
            Ok(message) => owner.receive(message),
            Err(mpsc::RecvTimeoutError::Timeout) => owner.timed_out(),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    owner.close_rot();
    owner.close_rehearsals();
    let finish = owner.finish.take();
    let mut finish =
        finish.unwrap_or_else(|| Finish::Failed { why: "the supervisor lost its threads".into(), last: None });
    if owner.taken_over.is_some() {
        tracing::error!("the job is ended: another supervisor may have it by now");
    }
    owner.end_job();
    if owner.taken_over.is_none() {
        let left = owner.leave_memory(&finish, &messages);
        finish = finish.with_left_in_memory(left);
        owner.leave_replica(&finish, &messages);
    }
    owner.close_control();
    owner.close_word();
    signals.close();
    if let Some(error) = owner.taken_over.take() {
        // Nothing more is written; what is under way ends with this process.
        return Err(error.into());
    }
    // Before the rest of the output is shown: a reader that stands still must not keep the end from being recorded.
    let recorded = owner.wrap_up(&finish);
    // All is done but for that reader: whoever does not want to wait for it can end us.
    inherited::let_end_us(&OURS);
    owner.record_in_replica(&finish);
    owner.leave_hooks(&messages);
    drop(follower);
    recorded.map(|()| finish)
}

/// Signals that are for us.
const OURS: [i32; 5] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP, sig::SIGUSR1, sig::SIGUSR2];
/// Those that ask for an end.
const STOPS: [i32; 4] = [sig::SIGTERM, sig::SIGINT, sig::SIGHUP, sig::SIGUSR2];
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
    listeners: hooks::Listeners,
    files: output::Files,
    machine: Machine<'a>,
    sender: mpsc::Sender<Message>,
    job: Option<Arc<Job>>,
    /// Signals for the job that came while there was none: it was being started, and may have run already.
    unsent: Vec<i32>,
    /// Counts lives, so that a report about an earlier one is not taken for this one's.
    life: u32,
    /// How this life ended, once it did.
    ended: Option<Ended>,
    /// Since when its end waits for the images to be read.
    unread: unread::Unread,
    /// Set to call off the start or the snapshot under way.
    cancel: Arc<AtomicBool>,
    /// Who asked to stop.
    stops: stops::Stops,
    published: Published,
    /// What the last snapshot remarked on, which need not be said of the next one again.
    remarks: Vec<String>,
    /// Processes of the job that were killed and not waited for, as snapshots have seen them.
    deaths: Arc<snapshot::Deaths>,
    /// Images of this life that the job has yet to live on from.
    proofs: proof::Proofs,
    /// The image that is on its way from memory to the store.
    persist: Option<keep::Persist>,
    /// Held while an image of plain files is packed, which ends with their removal.
    files_go: Arc<Mutex<()>>,
    /// What is on its way to the replica.
    replication: replicate::Replication,
    /// What looks through the store for damage.
    rot: Option<rot::Rot>,
    /// Restores that are tried beside the job.
    rehearsals: rehearse::Rehearsals,
    /// The image that a start under way reads.
    restoring: Option<keep::Moving>,
    /// What others ask for.
    control: control::Control,
    /// What the job asks for.
    word: word::Word,
    /// The images that the job may go back to.
    line: line::Line,
    /// Differences between images and this machine that the user knows of.
    told: Arc<Mutex<BTreeSet<String>>>,
    /// What happens is written there.
    journal: Journal,
    /// When the job's time is over, and what a last snapshot takes.
    deadline: deadline::Deadline,
    /// What is known of the job's health.
    watch: watch::Watch,
    /// The service manager, and what it was told.
    notify: notify::Notify,
    /// When the start under way was begun.
    since: Instant,
    /// The last one of the lock.
    heartbeat: Instant,
    /// Once the job's folder is another supervisor's.
    taken_over: Option<rekindle_store::Error>,
    finish: Option<Finish>,
}

/// How often what others see of a persist is renewed.
const PROGRESS: Duration = Duration::from_secs(1);

/// A wait that took so much longer than it may was no wait: this process, or the machine, stood still.
const SLEPT: Duration = Duration::from_secs(2);

/// Without anything to wait for; any bound will do.
const LONG: Duration = Duration::from_secs(3600);

impl Owner<'_> {
    fn step(&mut self, event: Event) {
        let actions = self.machine.step(event, Instant::now());
        self.carry_out(actions);
    }

    /// When the machine wants to hear of the time. Of a job whose end is still to be reported no snapshot is due.
    fn next_tick(&self) -> Option<Instant> {
        self.machine.deadline().filter(|_| !self.unread.is_waiting() || self.machine.is_stopping())
    }

    /// How long to wait for a message.
    fn patience(&self) -> Duration {
        let tick = self.next_tick().map_or(LONG, |at| at.saturating_duration_since(Instant::now()));
        let tick = self.unread.patience(Instant::now()).map_or(tick, |again| tick.min(again));
        let tick = tick
            .min(HEARTBEAT.saturating_sub(self.heartbeat.elapsed()))
            .min(self.deadline.patience())
            .min(self.word.patience());
        let tick = self.rehearsals.patience().map_or(tick, |due| tick.min(due));
        let tick = self.patience_for_proofs().map_or(tick, |proof| tick.min(proof));
        let tick = self.notify.patience(Instant::now()).map_or(tick, |beat| tick.min(beat));
        if self.replication.is_running() {
            return tick.min(PROGRESS);
        }
        match (&self.persist, &self.shared.staging) {
            _ if self.restoring.is_some() => tick.min(PROGRESS),
            (Some(_), _) => tick.min(PROGRESS),
            (None, Some(_)) => tick.min(keep::LOOK),
            (None, None) => tick,
        }
    }

    /// The heartbeat of the lock, when it is due. Answers whether the job's folder is still ours.
    fn holds_the_lock(&mut self) -> bool {
        // By a clock that counts sleep: others count it.
        if self.heartbeat.elapsed() < HEARTBEAT && self.shared.lock.unconfirmed() < HEARTBEAT {
            return self.taken_over.is_none();
        }
        self.heartbeat = Instant::now();
        let look = self.shared.lock.refresh();
        if let Err(error) = self.noted(look) {
            // The next one may work; who waits for us to fall silent waits for ten of them.
            tracing::warn!("cannot renew the store lock's heartbeat: {}", chain(&error));
        }
        self.taken_over.is_none()
    }

    /// A look at the lock before something that another supervisor would have to suffer from. Answers whether it is held, as
    /// far as can be told; what writes to the store is told more strictly, by the store.
    fn still_holds_the_lock(&mut self) -> bool {
        if self.taken_over.is_none() {
            let look = self.shared.lock.still_held();
            let _ = self.noted(look);
        }
        self.taken_over.is_none()
    }

    /// Takes note where the lock is lost.
    ///
    /// # Errors
    /// Any other failure of the look.
    fn noted(&mut self, look: rekindle_store::Result<()>) -> rekindle_store::Result<()> {
        use rekindle_store::Error::{LockReplaced, TakenOver};
        match look {
            Err(error @ (TakenOver { .. } | LockReplaced { .. })) => {
                self.taken_over = Some(error);
                Ok(())
            }
            other => other,
        }
    }

    fn timed_out(&mut self) {
        if self.next_tick().is_some_and(|at| at <= Instant::now()) {
            self.step(Event::Tick);
        } else if self.persist.is_some() || self.restoring.is_some() || self.replication.is_running() {
            self.publish();
        }
        self.give_memory_back();
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.act(action);
        }
        self.watch_follows();
        self.settle();
        self.publish();
    }

    fn act(&mut self, action: Action) {
        // Another supervisor's job may run already, on the same files; it is ended as soon as this returns.
        if matches!(action, Action::Start(_) | Action::Snapshot(_)) && !self.still_holds_the_lock() {
            return;
        }
        match action {
            Action::Start(from) => self.start(from),
            Action::Snapshot(reason) => self.snapshot(reason),
            Action::Cancel => self.cancel.store(true, Ordering::Relaxed),
            Action::Terminate => self.signal(sig::SIGTERM),
            Action::Kill => {
                if let Some(job) = self.job.clone() {
                    // Where GPUs are let go first it takes a while.
                    self.spawn("kill", move || job.kill());
                }
            }
            Action::Mark(Mark { image, why, detail }) => self.mark_copies(image, why, &detail),
            Action::NotRestored { image, why } => {
                tracing::error!("image {image} was not restored, and is not marked as bad: {why}");
            }
            Action::Announce { from, after } => {
                self.published.restarts += 1;
                self.tell(What::Restarting { image: events::image_of(from), after_us: events::micros(after) });
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
            Message::Started(result) => match *result {
                Ok(started) => self.started(started),
                Err(failure) => self.start_failed(failure),
            },
            Message::Snapshot(result) => self.snapshot_done(*result),
            Message::Persisted(outcome) => self.persisted(*outcome),
            Message::Replicated(report) => self.replicated(*report),
            Message::Watched(finding) => self.watched(finding),
            Message::Control(incoming) => self.heard(*incoming),
            Message::Word(call) => self.asked(*call),
            Message::End(answer) => self.end_is_known(answer),
            Message::Hook(report) => self.hook_failed(report),
            Message::Rot(report) => self.rot_found(*report),
            Message::Rehearsed(rehearsed) => {
                self.rehearsed(*rehearsed);
                self.publish();
            }
        }
    }

    fn signalled(&mut self, signal: i32) {
        let event = match signal {
            sig::SIGUSR1 => Event::SnapshotNow(Reason::Signal),
            signal if STOPS.contains(&signal) => self.stops.event(signal, Instant::now()),
            other if self.job.is_none() => return self.unsent.push(other),
            other => return self.signal(other),
        };
        tracing::info!("received {}", Ended::Signal(signal).to_string().trim_start_matches("signal "));
        self.step(event);
    }

    fn signal(&self, signal: i32) {
        if let Some(job) = &self.job
            && let Err(error) = job.signal(signal)
        {
            tracing::warn!("cannot signal the job: {error}");
        }
    }

    /// A thread that cannot be started is the end: nothing can be done without.
    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) {
        if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(work) {
            self.finish = Some(Finish::Failed { why: format!("cannot start a thread: {error}"), last: None });
        }
    }

    // ---- ending ----

    fn job_ended(&mut self) {
        let Some(job) = self.job.clone() else { return };
        // Daemons end with the job; a CRIU at work in the same namespace too.
        let ended = job.end().unwrap_or(Ended::Signal(sig::SIGKILL));
        self.end_of_proofs();
        self.ended = Some(ended);
        if matches!(self.machine.state(), state::State::Running(_) | state::State::Snapshotting { .. }) {
            match ended {
                Ended::Exit(0) => tracing::info!("the job completed"),
                ended => tracing::warn!("the job ended: {ended}"),
            }
        }
        self.tell_end(ended);
        self.report_end(ended);
    }

    fn report_end(&mut self, ended: Ended) {
        let now = Instant::now();
        let images = match self.images_to_go_on_from() {
            Ok(images) => images,
            Err(error) if self.unread.waits(self.machine.state(), self.machine.is_stopping(), now) => {
                if self.unread.begins(now) {
                    tracing::error!(
                        "cannot read the images, and the job waits for that: {}. It is given up after {}",
                        chain(&error),
                        humantime::format_duration(unread::PATIENCE)
                    );
                }
                return;
            }
            Err(error) => {
                tracing::error!("cannot read the images: {}", chain(&error));
                // What cannot be read may be there.
                Images { others: true, ..Images::default() }
            }
        };
        // The life was no longer for that.
        let at = self.unread.over().unwrap_or(now);
        // Before the next life is begun, which may be at once. A snapshot has its own hold on the job.
        if !matches!(self.machine.state(), state::State::Snapshotting { .. }) {
            self.job = None;
        }
        let actions = self.machine.step(Event::Ended { ended, images }, at);
        self.carry_out(actions);
        self.remember();
    }

    /// An end whose images could not be read is reported once they can.
    fn mind_the_unread(&mut self) {
        if let Some(ended) = self.ended.filter(|_| self.unread.is_due(Instant::now())) {
            self.report_end(ended);
        }
    }

    // ---- what others see ----

    fn publish(&mut self) {
        if !self.still_holds_the_lock() {
            return;
        }
        self.published.update(self.machine.state(), self.job.as_deref());
        self.published.persisting = self.persist.as_ref().map(keep::Persist::seen);
        self.published.replicating = self.replication.seen();
        self.published.restoring = self.restoring.as_ref().and_then(keep::Moving::seen);
        self.published.chosen(self.machine.choice());
        self.published.due(self.machine.next_snapshot());
        self.show();
        self.show_word();
        self.show_metrics();
        if let Err(error) = self.published.write(&self.shared.folder.state_file()) {
            tracing::debug!("cannot publish the state: {error}");
        }
        self.beat();
    }

    fn end_job(&mut self) {
        if let Some(job) = self.job.take() {
            job.end();
        }
        // It has ended with the job.
    }

    /// Records how it ended; removes the images of a completed job where that is wanted.
    fn wrap_up(&mut self, finish: &Finish) -> Result<(), Error> {
        let (outcome, code) = match finish {
            Finish::Completed => (Outcome::Completed, Some(0)),
            Finish::Stopped(_) | Finish::StoppedInMemory { .. } => (Outcome::Stopped, None),
            Finish::Impossible { why, .. } => (Outcome::Failed { why: why.clone() }, None),
            Finish::NoUsableImage { why } => (Outcome::Failed { why: why.clone() }, None),
            Finish::Failed { why, last } => {
                let code = last.and_then(|l| if let Ended::Exit(code) = l { Some(code) } else { None });
                (Outcome::Failed { why: why.clone() }, code)
            }
        };
        self.record(outcome, code)?;
        self.tell_finish(finish, code);
        if *finish == Finish::Completed && self.shared.config.store.on_success == OnSuccess::Remove {
            let images = self.shared.folder.images()?;
            for id in self.good_images()?.iter().filter(|id| images.iter().any(|image| image.id == **id)) {
                match self.shared.folder.remove(&self.shared.lock, id) {
                    Err(rekindle_store::Error::Pinned(id)) => tracing::info!("image {id} is pinned and stays"),
                    other => other?,
                }
            }
            // Nobody comes back to sweep when the grace period is over.
            if let Err(error) = gc::sweep_now(&self.shared.folder, &self.shared.lock, self.shared.config.store.copies) {
                tracing::warn!("what no image needs was not swept: {}", chain(&error));
            }
        }
        self.publish();
        Ok(())
    }
}
