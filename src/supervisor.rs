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
mod deaths;
mod destination;
mod early;
mod end;
mod ends;
mod event_lines;
mod events;
mod evidence;
mod failed;
mod finding;
mod gpus;
mod group;
mod holds;
mod hooks;
mod images;
mod job_api;
mod lease;
mod life;
pub(crate) mod line;
mod memory;
mod metrics;
mod notices;
pub(crate) mod notify;
mod oom;
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
pub(crate) mod state;
mod stops;
mod tally;
mod threads;
mod times;
mod transfers;
mod unread;
mod watch;
mod work;

pub(crate) use early::Early;
pub(crate) use group::GroupMember;
pub(crate) use oom::OomKills;
pub use result::RunResult;
pub(crate) use setup::{Origin, Places, Program, Setup, Shown, Sockets, TimeLimit};

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use chrono::Utc;
use signal_hook::consts as sig;

use crate::policy::{Mark, StartPoint};
use crate::telemetry::events::What;
use checks::Checks;
use clients::Clients;
use deadline::Deadline;
use end::RunEnd;
use event_lines::EventLines;
use lease::Lease;
use life::JobLife;
use line::Line;
use rekindle_base::chain;
use rekindle_engine::launch::output;
use rekindle_engine::snapshot::{self, Taken};
use rekindle_os::clock;
use rekindle_os::spawn::Ended;
use rekindle_store::Outcome;
use rekindle_store::manifest::Reason;
use reporting::Reporting;
use start::{StartFailure, StartedJob};
use state::{Action, Event, Finish, Machine};
use threads::Threads;
use transfers::Transfers;
use watch::Watch;

/// Why the supervisor itself failed. The job is ended too.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
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

/// Reports from the threads.
enum Message {
    /// The signal, and when it came: what it means depends on the time between two.
    Signal(i32, Instant),
    /// Nothing of this life is left, and so it ended.
    Ended(u32, Ended),
    Started(Box<Result<StartedJob, StartFailure>>),
    Snapshot {
        life: u32,
        result: Box<Result<Taken, snapshot::Error>>,
    },
    Persisted(Box<images::Outcome>),
    Replicated(Box<replicate::Report>),
    Watched(finding::Finding),
    Control(Box<control::Incoming>),
    JobApi(Box<crate::job_api::Call>),
    /// The scheduler's answer about the end of the job.
    End(deadline::Answer),
    Hook(crate::notifications::Report),
    Rehearsed(Box<rehearse::Rehearsed>),
    Group(Box<group::GroupEvent>),
}

impl Message {
    /// Whether it is about work that needs the lock, and may have found the lock lost.
    fn is_of_the_store(&self) -> bool {
        matches!(self, Message::Started(_) | Message::Snapshot { .. } | Message::Persisted(_) | Message::Replicated(_))
    }
}

/// Supervises the job until it is over. `early` has the signals until the loop has them.
///
/// # Errors
/// When the supervisor itself fails; the result of the job is in [`Finish`].
pub(crate) fn run(setup: Setup, early: Early) -> Result<Finish, Error> {
    let setup = Arc::new(setup);
    let files = &setup.output;
    let _rotation =
        output::Rotation::start(files).map_err(|source| Error::Io { what: "rotating the output", source })?;
    let follower = match setup.shown {
        Shown::Output => output::Follower::start(files),
        Shown::Events | Shown::Nothing => output::Follower::silent(files),
    };
    let follower = follower.map_err(|source| Error::Io { what: "following the output", source })?;
    let (sender, messages) = mpsc::channel();
    let signals = signals::listen(sender.clone()).map_err(|source| Error::Io { what: "handling signals", source })?;
    // A signal in between goes to both: no job runs yet, so the process may end.
    drop(early);
    let (machine, actions) = match &setup.group {
        Some(_) => (Machine::led(&setup.config), Vec::new()),
        None => Machine::new(&setup.config, setup.origin.from),
    };
    let group = group::Member::start(&setup, &sender)?;
    let machine = machine.recalling(record::recall(&setup));
    let machine = if setup.origin.named { machine.asked_for() } else { machine };
    let mut owner = Owner {
        setup: &setup,
        reporting: Reporting::new(&setup, &sender),
        threads: Threads::new(sender),
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
        group,
    };
    owner.record(Outcome::Running, None)?;
    if setup.shown == Shown::Events {
        let lines = EventLines::start().map_err(|source| Error::Io { what: "writing events", source })?;
        owner.reporting.lines = Some(lines);
    }
    owner.tell_begin();
    owner.publish_if_not_rehearsed();
    owner.open_control();
    owner.open_word();
    owner.carry_out(actions);
    // An image that an interrupted run left in memory.
    owner.persist_newest();
    owner.replicate_newest();
    owner.ask_for_the_end();
    while !owner.end.is_there() && owner.holds_the_lock() {
        owner.tick();
        let (patience, began) = (owner.patience(), clock::since_boot());
        let message = messages.recv_timeout(patience);
        let slept = clock::since_boot().saturating_sub(began) > patience + SLEPT;
        if slept {
            // Before a message about what was measured meanwhile.
            owner.deadline.was_stopped();
            owner.step(Event::WasStopped);
        }
        if (slept || message.as_ref().is_ok_and(Message::is_of_the_store)) && !owner.still_holds_the_lock() {
            break;
        }
        match message {
            Ok(message) => owner.receive(message),
            Err(mpsc::RecvTimeoutError::Timeout) => owner.timed_out(),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    owner.group_is_at_the_end();
    owner.checks.close();
    let mut finish = owner.end.take();
    if !owner.lease.is_held() {
        tracing::error!("killing the job: another supervisor may have taken it over");
    }
    owner.end_job();
    if owner.lease.is_held() {
        if let Err(error) = files.settle() {
            tracing::warn!("space that the job reserved may stay taken: {}", chain(&error));
        }
        let left = owner.leave_memory(&finish, &messages);
        finish = finish.with_left_in_memory(left);
        owner.leave_replica(&finish, &messages);
    }
    let queues_again = owner.queues_again(&finish);
    if !queues_again {
        owner.leave_group(&messages);
    }
    owner.close_control();
    owner.close_word();
    // A signal that comes from now on ends the waiting, or us.
    let hurried = signals::hurry_up();
    let hurries = || hurried.load(Ordering::Relaxed);
    signals.close();
    if !owner.lease.is_held() {
        // Nothing more is written; work in progress ends with this process.
        return owner.lease.into_lost().map_or(Ok(finish), |error| Err(error.into()));
    }
    // Before the remaining output is shown: a stuck reader must not prevent the end from being recorded.
    owner.wrap_up(&finish);
    // Whoever queues a job again goes by our exit code or our request: then a signal only ends the waiting.
    if !finish.is_queued_again() {
        signals::let_end_us();
    }
    owner.record_in_replica(&finish, &hurries);
    let at_once = owner.end.stops.is_at_once();
    owner.reporting.close(&|| at_once || hurries());
    for message in messages.try_iter() {
        match message {
            Message::Hook(report) => owner.hook_failed(report),
            Message::Group(news) => owner.group_event_after_end(*news),
            _ => {}
        }
    }
    owner.reporting.listeners.close_metrics();
    owner.acknowledge(&finish);
    show_rest((follower, owner.reporting.lines.take()), &hurries);
    if queues_again {
        // The last thing: it ends this process. Slurm does that with a signal, and another machine takes our place if it
        // comes too soon. The job may begin again on other machines, which must not wait for this one.
        let (lock, work) = (setup.lock.release_at_exit(), Arc::clone(&setup.program.work));
        let ends_us = Early::after_the_loop(lock, work, setup.time.scheduler.clone());
        if let Err(error) = &ends_us {
            tracing::debug!("the lock is not given back when Slurm ends this process: {error}");
            signals::let_end_us();
        }
        owner.queue_again(&messages);
        owner.leave_etcd(&messages);
    }
    owner.lease.into_lost().map_or(Ok(finish), |error| Err(error.into()))
}

/// Waits until the remaining output is shown. `hurries` ends the wait for a reader that is stuck: the output is in its
/// files.
fn show_rest(shown: impl Send + 'static, hurries: &dyn Fn() -> bool) {
    let (ends, is_shown) = mpsc::channel::<()>();
    let show = move || {
        drop(shown);
        drop(ends);
    };
    // Without a thread it is shown here.
    if std::thread::Builder::new().name("show".into()).spawn(show).is_ok() {
        while is_shown.recv_timeout(LAST_LOOK) == Err(mpsc::RecvTimeoutError::Timeout) && !hurries() {}
    }
}

/// How often the wait for the output looks whether it must end.
const LAST_LOOK: Duration = Duration::from_millis(500);

/// The components of a run, and what their decisions are carried out with.
struct Owner<'a> {
    setup: &'a Arc<Setup>,
    /// What does not have to be done at once.
    threads: Threads,
    /// Decides what to do with the job.
    machine: Machine<'a>,
    /// The job, and its end.
    life: JobLife,
    /// The images that the job can go back to.
    line: Line,
    /// Images being copied.
    transfers: Transfers,
    /// Whether images can be restored.
    checks: Checks,
    /// The job's health.
    watch: Watch,
    /// The final snapshot before the job's deadline.
    deadline: Deadline,
    /// The clients that send requests.
    clients: Clients,
    /// Recipients of the run's events.
    reporting: Reporting,
    /// Whether the job's folder is still ours.
    lease: Lease,
    /// The end of the run.
    end: RunEnd,
    /// The group that decides about the job, if it runs on several machines.
    group: Option<group::Member>,
}

/// If a wait took so much longer than planned, this process or the machine was stopped.
const SLEPT: Duration = Duration::from_secs(2);

/// Wait time if there is nothing to wait for; any value works.
const LONG: Duration = Duration::from_secs(3600);

impl Owner<'_> {
    fn step(&mut self, event: Event) {
        let Some(event) = self.ask_group(event) else { return };
        let actions = self.machine.step(event, Instant::now());
        self.carry_out(actions);
    }

    // ---- time ----

    /// Does everything that is due.
    fn tick(&mut self) {
        self.start_waiting_threads();
        self.check_deadline();
        self.check_holds();
        if self.machine.is_stopping() {
            self.reporting.listeners.hurry(&self.setup.config);
        }
        self.checks.note_proofs(self.setup, self.machine.state(), self.life.ended(), Instant::now());
        self.checks.evidence.write(self.setup, Instant::now());
        self.check_rehearsals();
        self.store_again();
        self.check_deaths();
        self.check_group();
        self.report_late_end();
        self.report_slow_work();
        if self.checks.looks_at_memory(Instant::now()) {
            self.give_memory_back();
        }
        self.beat();
    }

    /// How long to wait for a message: until the first component has something to do.
    fn patience(&self) -> Duration {
        let (now, min_uptime) = (Instant::now(), self.setup.config.restart.min_uptime);
        let wakes = [
            self.next_tick(),
            self.life.next_wake(),
            self.watch.deaths.next_wake(self.machine.state()),
            self.watch.deaths.launchers_continue(),
            Some(self.lease.next_wake()),
            self.deadline.next_wake(now, Utc::now()),
            self.clients.next_wake(now),
            self.checks.next_wake(min_uptime, self.machine.state(), self.life.ended()),
            self.reporting.next_wake(now),
            self.transfers.next_wake(now),
            self.threads.next_wake(),
            self.transfers.retry.at(self.machine.state()),
            self.group.as_ref().and_then(group::Member::deadline),
            self.setup.images.staging.as_ref().map(|_| self.checks.next_look_at_memory()),
        ];
        wakes.into_iter().flatten().min().map_or(LONG, |at| at.saturating_duration_since(now).min(LONG))
    }

    /// When the machine wants the next tick. While an end waits to be reported, no snapshot is due.
    fn next_tick(&self) -> Option<Instant> {
        self.machine.deadline().filter(|_| !self.life.is_unread() || self.machine.is_stopping())
    }

    fn timed_out(&mut self) {
        if self.next_tick().is_some_and(|at| at <= Instant::now()) {
            self.step(Event::Tick);
        } else if !self.transfers.is_idle() {
            self.publish();
        }
    }

    // ---- the lock ----

    /// Renews the lock's heartbeat if it is due. Returns whether the job's folder is still ours.
    fn holds_the_lock(&mut self) -> bool {
        let (lock, now) = (&self.setup.lock, Instant::now());
        if self.lease.is_due(lock.unconfirmed(), now)
            && let Err(error) = self.lease.renewed(lock.refresh(), now)
        {
            // The next heartbeat may succeed; other supervisors wait for ten missing ones.
            let text = format!("cannot renew the store lock's heartbeat: {}", chain(&error));
            self.reporting.remarks.repeats.warn("heartbeat", &text);
        }
        self.lease.is_held()
    }

    /// Checks the lock before an action that could harm another supervisor's job. Returns whether it is held, as far as
    /// can be told; the store itself checks more strictly before it writes.
    fn still_holds_the_lock(&mut self) -> bool {
        if self.lease.is_held() {
            // A check that fails says nothing about the lock.
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
        // If the lock is lost, another supervisor's job may already run on the same files; ours is ended as soon as
        // this returns.
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
                    // In a thread, because it takes a while if GPUs are released first.
                    self.spawn("kill", move || job.kill());
                }
            }
            Action::Mark(Mark { image, why, detail }) => self.mark_copies(image, why, &detail),
            Action::NotRestored { image, why } => {
                tracing::error!("image {image} was not restored and is not marked as bad: {why}");
            }
            Action::AwaitQuiet => self.await_quiet(),
            Action::Announce { from, after } => {
                self.reporting.published.restarts += 1;
                if let StartPoint::Image(image) = from {
                    // A rotation during the pause must not remove it.
                    self.transfers.goes_to(self.setup.lock.hold(image));
                }
                self.tell(What::Restarting { image: events::image_of(from), after_us: times::micros(after) });
                let after = humantime::format_duration(after);
                match from {
                    StartPoint::Image(_) => tracing::warn!("continuing from {from} in {after}"),
                    StartPoint::Cold => tracing::warn!("starting again from {from} in {after}"),
                }
            }
            Action::Finish(finish) => self.end.comes(finish),
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Signal(signal, at) => self.signalled(signal, at),
            Message::Ended(life, ended) if self.life.is_present(life) => self.job_ended(ended),
            Message::Ended(..) => {}
            Message::Started(result) => match *result {
                Ok(started) => self.started(started),
                Err(failure) => self.start_failed(failure),
            },
            Message::Snapshot { life, result } => self.snapshot_done(life, *result),
            Message::Persisted(outcome) => self.persisted(*outcome),
            Message::Replicated(report) => self.replicated(*report),
            Message::Watched(finding) => self.watched(finding),
            Message::Control(incoming) => self.heard(*incoming),
            Message::JobApi(call) => self.asked(*call),
            Message::End(answer) => self.end_is_known(answer),
            Message::Hook(report) => self.hook_failed(report),
            Message::Group(news) => self.group_event(*news),
            Message::Rehearsed(rehearsed) => {
                self.rehearsed(*rehearsed);
                self.publish();
            }
        }
    }

    fn signalled(&mut self, signal: i32, at: Instant) {
        let event = match signal {
            sig::SIGUSR1 => Event::SnapshotNow(Reason::Signal),
            signal if signals::STOPS.contains(&signal) => self.end.stops.event(signal, at),
            other if self.life.receiver(other).is_none() => return,
            // A SIGCONT would resume processes that the snapshot has stopped, and any other would be in the image, and
            // come again after each restore.
            other if matches!(self.machine.state(), state::State::Snapshotting { .. }) => return self.life.keep(other),
            other => return self.signal(other),
        };
        let name = Ended::Signal(signal).to_string();
        let name = name.trim_start_matches("signal ");
        match signal {
            sig::SIGUSR1 => crate::routine!("received {name}"),
            _ => tracing::info!("received {name}"),
        }
        self.step(event);
    }

    fn signal(&self, signal: i32) {
        if let Some(job) = self.life.job()
            && let Err(error) = job.signal(signal)
        {
            tracing::warn!("cannot signal the job: {error}");
        }
    }

    // ---- what others see ----

    fn publish(&mut self) {
        if !self.still_holds_the_lock() {
            return;
        }
        self.reporting.published.update(self.machine.state(), self.life.job().map(Arc::as_ref));
        self.transfers.show(&mut self.reporting.published);
        let choice = self.chosen_interval();
        self.reporting.published.chosen(choice.as_ref());
        self.reporting.published.due(self.machine.next_snapshot());
        self.clients.show(self.setup, &self.machine, &self.line, &self.reporting.published);
        self.reporting.write(self.setup);
        self.beat();
    }

    fn beat(&mut self) {
        self.reporting.beat(&self.machine, self.end.is_there(), Instant::now());
    }
}
