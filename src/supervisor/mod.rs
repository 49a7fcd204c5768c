//! The one owner of a job's state: a loop that feeds events to [`state::Machine`] and carries out its actions.
//!
//! One thread owns everything; it waits on one channel. Other threads do what blocks (launching, restoring, taking a
//! snapshot, waiting for the end, receiving signals) and report there. When the supervisor dies, the kernel destroys
//! the job's namespaces ([`rekindle_engine::launch::world`]); the next run removes remnants from the store and
//! continues from the newest image, in memory or in the store.
//!
//! The owner itself decides nothing. It has components, each with its own state: [`state::Machine`] decides what to do
//! with the job, and others decide about the work beside it (`Owner` lists them). A component gets events and answers
//! with actions. The owner carries them out: it starts threads, writes the store and reports events. Each component
//! says when it wants to be woken (`Owner::patience`).

mod checks;
mod clients;
mod control;
mod deadline;
mod end;
mod ends;
mod events;
mod failed;
mod holds;
mod hooks;
mod images;
mod job_api;
mod lease;
mod life;
pub(crate) mod line;
mod memory;
mod metrics;
pub mod notify;
mod pace;
mod proof;
mod publish;
mod record;
mod rehearse;
mod remarks;
mod replicate;
mod reporting;
mod result;
mod rewind;
mod setup;
mod signals;
#[cfg(test)]
mod simulator;
mod start;
pub mod state;
mod stops;
mod transfers;
mod unread;
mod verify;
mod watch;

pub use result::RunResult;
pub(crate) use rewind::new_lineage;
pub use setup::{Origin, Places, Program, Setup, Sockets, TimeLimit};

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use chrono::Utc;
use signal_hook::consts as sig;

use crate::policy::Mark;
use crate::telemetry::events::What;
use checks::Checks;
use clients::Clients;
use deadline::Deadline;
use end::RunEnd;
use lease::Lease;
use life::JobLife;
use line::Line;
use rekindle_base::chain;
use rekindle_engine::launch::output;
use rekindle_engine::snapshot::{self, Taken};
use rekindle_os::clock;
use rekindle_os::inherited;
use rekindle_os::spawn::Ended;
use rekindle_store::Outcome;
use rekindle_store::manifest::Reason;
use reporting::Reporting;
use start::{StartFailure, StartedJob};
use state::{Action, Event, Finish, Machine};
use transfers::Transfers;
use watch::Watch;

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
    Persisted(Box<images::Outcome>),
    Replicated(Box<replicate::Report>),
    Watched(watch::Finding),
    Control(Box<control::Incoming>),
    JobApi(Box<crate::job_api::Call>),
    /// What the scheduler says of the job's end.
    End(deadline::Answer),
    Hook(crate::notifications::Report),
    Verified(Box<verify::Report>),
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
    let setup = Arc::new(setup);
    let files = output::Files::create(&setup.folder.log_dir(), setup.config.log.bounds())?;
    let _rotation =
        output::Rotation::start(&files).map_err(|source| Error::Io { what: "rotating the output", source })?;
    let follower =
        output::Follower::start(&files).map_err(|source| Error::Io { what: "following the output", source })?;
    let (sender, messages) = mpsc::channel();
    let signals = signals::listen(sender.clone()).map_err(|source| Error::Io { what: "handling signals", source })?;
    let (machine, actions) = Machine::new(&setup.config, setup.origin.from);
    let machine = machine.recalling(record::recall(&setup));
    let machine = if setup.origin.named { machine.asked_for() } else { machine };
    let mut owner = Owner {
        setup: &setup,
        reporting: Reporting::new(&setup, &sender),
        sender,
        files,
        machine,
        life: JobLife::new(Instant::now()),
        line: Line::new(setup.program.launch.lineage.clone(), setup.origin.base),
        transfers: Transfers::default(),
        checks: Checks::new(&setup),
        watch: Watch::default(),
        clients: Clients::new(&setup),
        deadline: Deadline::new(&setup),
        lease: Lease::new(Instant::now()),
        end: RunEnd::default(),
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
    owner.checks.open(&setup, &owner.sender);
    while !owner.end.is_there() && owner.holds_the_lock() {
        owner.tick();
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
    owner.checks.close();
    let mut finish = owner.end.take();
    if !owner.lease.is_held() {
        tracing::error!("killing the job: another supervisor may have taken it over");
    }
    owner.end_job();
    if owner.lease.is_held() {
        let left = owner.leave_memory(&finish, &messages);
        finish = finish.with_left_in_memory(left);
        owner.leave_replica(&finish, &messages);
    }
    owner.close_control();
    owner.close_word();
    signals.close();
    if !owner.lease.is_held() {
        // Nothing more is written; what is under way ends with this process.
        return owner.lease.into_lost().map_or(Ok(finish), |error| Err(error.into()));
    }
    // Before the remaining output is shown: a stuck reader must not prevent the end from being recorded.
    let recorded = owner.wrap_up(&finish);
    // All is done but for that reader: whoever does not want to wait for it can end us.
    inherited::let_end_us(&signals::OURS);
    owner.record_in_replica(&finish);
    owner.reporting.listeners.close(Instant::now() + setup.config.hooks.timeout);
    for message in messages.try_iter() {
        if let Message::Hook(report) = message {
            owner.hook_failed(report);
        }
    }
    owner.reporting.listeners.close_metrics();
    drop(follower);
    recorded.map(|()| finish)
}

/// The components of a run, and what is needed to carry out what they decide.
struct Owner<'a> {
    setup: &'a Arc<Setup>,
    /// For threads, which report there.
    sender: mpsc::Sender<Message>,
    /// The job's output.
    files: output::Files,
    /// Decides what is done with the job.
    machine: Machine<'a>,
    /// The job that there is, and its end.
    life: JobLife,
    /// The images that the job may go back to.
    line: Line,
    /// Images that are on their way.
    transfers: Transfers,
    /// Whether images can be restored.
    checks: Checks,
    /// The job's health.
    watch: Watch,
    /// The final snapshot before the job's deadline.
    deadline: Deadline,
    /// Who asks for something.
    clients: Clients,
    /// Recipients of the run's events.
    reporting: Reporting,
    /// Whether the job's folder is still ours.
    lease: Lease,
    /// The end of the run.
    end: RunEnd,
}

/// If a wait took so much longer than planned, this process or the machine was stopped.
const SLEPT: Duration = Duration::from_secs(2);

/// Without anything to wait for; any bound will do.
const LONG: Duration = Duration::from_secs(3600);

impl Owner<'_> {
    fn step(&mut self, event: Event) {
        let actions = self.machine.step(event, Instant::now());
        self.carry_out(actions);
    }

    // ---- time ----

    /// Does what is due.
    fn tick(&mut self) {
        self.check_deadline();
        self.check_holds();
        self.checks.note_proofs(self.setup, self.machine.state(), self.life.ended(), Instant::now());
        self.checks.allow_verifier(self.machine.state(), self.transfers.is_idle());
        self.check_rehearsals();
        self.report_late_end();
        self.beat();
    }

    /// How long to wait for a message: until the first component has something to do.
    fn patience(&self) -> Duration {
        let (now, min_uptime) = (Instant::now(), self.setup.config.restart.min_uptime);
        let wakes = [
            self.next_tick(),
            self.life.next_wake(),
            Some(self.lease.next_wake()),
            self.deadline.next_wake(now, Utc::now()),
            self.clients.next_wake(now),
            self.checks.next_wake(min_uptime, self.machine.state(), self.life.ended()),
            self.reporting.next_wake(now),
            self.transfers.next_wake(now),
            self.setup.images.staging.as_ref().map(|_| now + images::LOOK),
        ];
        wakes.into_iter().flatten().min().map_or(LONG, |at| at.saturating_duration_since(now).min(LONG))
    }

    /// When the machine wants to hear of the time. Of a job whose end is still to be reported no snapshot is due.
    fn next_tick(&self) -> Option<Instant> {
        self.machine.deadline().filter(|_| !self.life.is_unread() || self.machine.is_stopping())
    }

    fn timed_out(&mut self) {
        if self.next_tick().is_some_and(|at| at <= Instant::now()) {
            self.step(Event::Tick);
        } else if !self.transfers.is_idle() {
            self.publish();
        }
        self.give_memory_back();
    }

    // ---- the lock ----

    /// Renews the lock's heartbeat when that is due. Answers whether the job's folder is still ours.
    fn holds_the_lock(&mut self) -> bool {
        let (lock, now) = (&self.setup.lock, Instant::now());
        if self.lease.is_due(lock.unconfirmed(), now)
            && let Err(error) = self.lease.renewed(lock.refresh(), now)
        {
            // The next one may work; who waits for us to fall silent waits for ten of them.
            tracing::warn!("cannot renew the store lock's heartbeat: {}", chain(&error));
        }
        self.lease.is_held()
    }

    /// A look at the lock before something that another supervisor would have to suffer from. Answers whether it is held, as
    /// far as can be told; what writes to the store is told more strictly, by the store.
    fn still_holds_the_lock(&mut self) -> bool {
        if self.lease.is_held() {
            // A look that fails says nothing of the lock.
            let _ = self.lease.looked(self.setup.lock.still_held());
        }
        self.lease.is_held()
    }

    // ---- messages and actions ----

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
            Action::Cancel => self.life.call_off(),
            Action::Terminate => self.signal(sig::SIGTERM),
            Action::Kill => {
                if let Some(job) = self.life.job().cloned() {
                    // Takes a while if GPUs are released first.
                    self.spawn("kill", move || job.kill());
                }
            }
            Action::Mark(Mark { image, why, detail }) => self.mark_copies(image, why, &detail),
            Action::NotRestored { image, why } => {
                tracing::error!("image {image} was not restored and is not marked as bad: {why}");
            }
            Action::Announce { from, after } => {
                self.reporting.published.restarts += 1;
                self.tell(What::Restarting { image: events::image_of(from), after_us: events::micros(after) });
                tracing::warn!("continuing from {from} in {}", humantime::format_duration(after));
            }
            Action::Finish(finish) => self.end.comes(finish),
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Signal(signal) => self.signalled(signal),
            Message::Ended(life) if self.life.is_present(life) => self.job_ended(),
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
            Message::JobApi(call) => self.asked(*call),
            Message::End(answer) => self.end_is_known(answer),
            Message::Hook(report) => self.hook_failed(report),
            Message::Verified(report) => {
                if let Some(what) = report.judged(self.setup.folder.name()) {
                    self.tell(what);
                }
            }
            Message::Rehearsed(rehearsed) => {
                self.rehearsed(*rehearsed);
                self.publish();
            }
        }
    }

    fn signalled(&mut self, signal: i32) {
        let event = match signal {
            sig::SIGUSR1 => Event::SnapshotNow(Reason::Signal),
            signal if signals::STOPS.contains(&signal) => self.end.stops.event(signal, Instant::now()),
            other if self.life.receiver(other).is_none() => return,
            other => return self.signal(other),
        };
        tracing::info!("received {}", Ended::Signal(signal).to_string().trim_start_matches("signal "));
        self.step(event);
    }

    fn signal(&self, signal: i32) {
        if let Some(job) = self.life.job()
            && let Err(error) = job.signal(signal)
        {
            tracing::warn!("cannot signal the job: {error}");
        }
    }

    /// Without a thread that cannot be started the run is over.
    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) {
        if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(work) {
            self.end.comes_without_thread(&error);
        }
    }

    // ---- what others see ----

    fn publish(&mut self) {
        if !self.still_holds_the_lock() {
            return;
        }
        self.reporting.published.update(self.machine.state(), self.life.job().map(Arc::as_ref));
        self.transfers.show(&mut self.reporting.published);
        self.reporting.published.chosen(self.machine.choice());
        self.reporting.published.due(self.machine.next_snapshot());
        self.clients.show(self.setup, &self.machine, &self.line, &self.reporting.published);
        self.reporting.write(self.setup, &self.machine);
        self.beat();
    }

    fn beat(&mut self) {
        self.reporting.beat(&self.machine, self.end.is_there(), Instant::now());
    }
}
