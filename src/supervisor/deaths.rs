//! Deaths of single processes of a job that continues (`restart.on-process-death`).
//!
//! ```text
//!  a process dies ---> a snapshot in progress is cancelled: its image would lack the process
//!        |
//!      MOMENT          the job may end too; then its exit code and the rules decide, as for any end
//!        |
//!     the ledger       did a restore after such a death help before?
//!        |
//!   the job is ended, and restored from its newest image
//! ```
//!
//! Nothing is done while the job is stopped, suspended, started or rewound, and before it has an image.

use std::time::{Duration, Instant};

use super::finding::Finding;
use super::state::{State, Verdict};
use super::{Message, Owner};
use crate::config::{OnProcessDeath, Restart};
use crate::policy::StartPoint;
use crate::policy::deaths::{Answer, Ledger, Victim, Why};
use crate::telemetry::events::What;
use crate::watch::deaths::{Death, Watcher, Who};
use rekindle_base::cause::Cause;
use rekindle_base::chain;
use rekindle_engine::snapshot::Taken;
use rekindle_os::exits::Watched;
use rekindle_os::spawn::Ended;
use rekindle_os::stopped::StoppedProcesses;
use rekindle_store::Manifest;

/// Time for the job to end by itself after the death of a process. A parent that waits for the process and gives up
/// needs some milliseconds. So does a driver that ends the other ranks; their deaths are reported too.
pub(super) const MOMENT: Duration = Duration::from_millis(250);

/// [`MOMENT`], or the seconds that a test of a debug build sets.
fn moment() -> Duration {
    let named = cfg!(debug_assertions).then(|| std::env::var("REKINDLE_TEST_MOMENT").ok()).flatten();
    named.and_then(|seconds| seconds.parse().ok()).map_or(MOMENT, Duration::from_secs)
}

/// How long the launchers of a rank that dies are stopped. With a kernel that waits for ever the driver takes 4.2 s to
/// end a process.
const LAUNCHERS: Duration = Duration::from_secs(5);

/// Deaths that were noticed, and the results of earlier ones.
#[derive(Debug, Default)]
pub(super) struct ProcessDeaths {
    watcher: Option<Watcher>,
    ledger: Ledger,
    /// In the order of arrival.
    waiting: Vec<Death>,
    /// When to decide about them.
    due: Option<Instant>,
    /// Launchers that are stopped until then.
    launchers: Option<Launchers>,
}

/// Those of a process that dies.
#[derive(Debug)]
struct Launchers {
    /// The process, as we see it.
    of: i32,
    stopped: StoppedProcesses,
    /// When they continue at the latest.
    until: Instant,
}

/// Whether a death may take a job in this state back.
fn may_go_back(state: &State) -> bool {
    matches!(state, State::Running(_) | State::Snapshotting { then: None, ended: None, .. })
}

fn victim(death: &Death) -> Victim {
    Victim { pid: death.pid, name: death.name.clone(), signal: death.signal }
}

impl ProcessDeaths {
    /// A process of a job in this state died. The job may end by itself until `decided`. Returns whether a snapshot in
    /// progress is useless.
    pub(super) fn comes(&mut self, death: Death, state: &State, decided: Instant) -> bool {
        if !may_go_back(state) {
            tracing::debug!("{}; rekindle leaves that to the job", victim(&death));
            return false;
        }
        let answer = self.ledger.judge(&victim(&death));
        if let Answer::Left(why @ (Why::Asked | Why::Usual)) = answer {
            tracing::debug!("{}; rekindle leaves that to the job: {why}", victim(&death));
            return false;
        }
        let due = self.due.get_or_insert(decided);
        *due = decided.min(*due);
        self.waiting.push(death);
        answer == Answer::Back
    }

    /// Whether a job in this state may go back because of a waiting death.
    pub(super) fn is_going_back(&self, state: &State) -> bool {
        may_go_back(state) && self.waiting.iter().any(|death| self.ledger.judge(&victim(death)) == Answer::Back)
    }

    pub(super) fn next_wake(&self, state: &State) -> Option<Instant> {
        self.due.filter(|_| !matches!(state, State::Snapshotting { then: None, ended: None, .. }))
    }

    /// Whether the launchers of a dying process are to be stopped: it takes the job back, and none are stopped yet.
    fn may_stop_launchers(&self, death: &Death) -> bool {
        self.launchers.is_none() && self.ledger.judge(&victim(death)) == Answer::Back
    }

    /// When stopped launchers continue.
    pub(super) fn launchers_continue(&self) -> Option<Instant> {
        self.launchers.as_ref().map(|launchers| launchers.until)
    }

    /// Lets stopped launchers continue.
    pub(super) fn release_launchers(&mut self) {
        if let Some(launchers) = self.launchers.take() {
            drop(launchers.stopped);
        }
    }

    /// There is an image with these processes. Dead processes that are not in it died before it.
    pub(super) fn image_taken(&mut self, has: &[i32]) {
        self.ledger.image_taken();
        self.waiting.retain(|death| {
            let is_in_it = has.contains(&death.pid);
            if !is_in_it {
                tracing::warn!("{}: the new image was taken after this death, so the job continues", victim(death));
            }
            is_in_it
        });
    }

    /// Leaves the waiting deaths to the job.
    pub(super) fn forget(&mut self) {
        self.release_launchers();
        self.waiting.clear();
        self.due = None;
    }

    #[cfg(test)]
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Forgets everything that was learnt.
    #[cfg(test)]
    pub(super) fn forget_ledger(&mut self) {
        self.ledger = Ledger::default();
    }

    pub(super) fn life_ends(&mut self) {
        self.forget();
        self.ledger.life_ends();
        if let Some(watcher) = &self.watcher {
            watcher.rest();
        }
    }

    /// Decides about the waiting deaths. Returns the first that takes the job back.
    pub(super) fn decide(&mut self, restart: &Restart, now: Instant) -> (Option<Victim>, Vec<(Victim, Option<Why>)>) {
        self.due = None;
        self.ledger.is_alive(restart.min_uptime, now);
        let (mut first, mut others) = (None, Vec::new());
        for death in self.waiting.drain(..) {
            let victim = victim(&death);
            if first.is_some() {
                others.push((victim, None));
                continue;
            }
            match self.ledger.died(victim.clone(), now) {
                Answer::Back => first = Some(victim),
                Answer::Left(why) => others.push((victim, Some(why))),
            }
        }
        (first, others)
    }
}

impl Owner<'_> {
    /// Starts the thread that notices deaths.
    pub(super) fn watch_deaths(&mut self) {
        let mode = self.setup.config.restart.on_process_death;
        let sender = self.threads.sender.clone();
        let report = move |noticed| sender.send(Message::Watched(Finding::Process(noticed))).is_ok();
        let watcher = Watcher::new(|work| self.spawn("deaths", work), report, mode == OnProcessDeath::Any);
        match watcher {
            Ok(watcher) => self.watch.deaths.watcher = Some(watcher),
            Err(error) => tracing::error!(
                "cannot watch the job's processes: {error}. If one of them dies, rekindle acts only when the job itself ends"
            ),
        }
    }

    /// The job was restored from this image, or the image was just taken.
    fn watch_those_of(&self, manifest: &Manifest, open: Vec<Watched>) {
        let (Some(watcher), Some(job)) = (&self.watch.deaths.watcher, self.life.job()) else { return };
        let who = match self.setup.config.restart.on_process_death {
            // Used only to explain a GPU's fault by a death.
            OnProcessDeath::Root | OnProcessDeath::Cuda => Who::These(manifest.tree.cuda.clone()),
            OnProcessDeath::Any => Who::All,
        };
        watcher.watch(self.life.number(), job.root.pid(), who, self.deaths_count() && job.has_ranks(), open);
    }

    /// A life has begun, with these processes.
    pub(super) fn deaths_life(&self, from: StartPoint, open: Vec<Watched>) {
        let StartPoint::Image(id) = from else { return };
        if self.watch.deaths.watcher.is_none() {
            return;
        }
        let image = self.setup.folder.copies().unwrap_or_default().into_iter().find(|image| image.id == id);
        if let Some(manifest) = image.as_ref().and_then(|image| image.manifest()) {
            self.watch_those_of(manifest, open);
        }
    }

    /// There is a new image. A process of it may have died since.
    pub(super) fn deaths_image(&mut self, taken: &mut Taken) {
        let open = std::mem::take(&mut taken.open);
        let Some(manifest) = taken.image.manifest() else { return };
        self.watch.deaths.image_taken(&manifest.tree.ids);
        self.watch_those_of(manifest, open);
    }

    pub(super) fn deaths_end_of_life(&mut self) {
        self.watch.deaths.life_ends();
    }

    pub(super) fn process_died(&mut self, death: Death) {
        self.watch.gpus.had(death.outer, &death.name);
        if !self.life.is_present(death.life) || self.life.ended().is_some() {
            return;
        }
        self.watch.gpus.died(victim(&death).to_string());
        if !self.deaths_count() {
            return;
        }
        // Launchers of ranks need longer than a moment to end, and what they do first, SIGTERM for the other ranks, costs
        // time: the driver then waits for the kernels of those (`rekindle_engine::launch`).
        let has_ranks = self.life.job().is_some_and(|job| job.has_ranks());
        let moment = if has_ranks { Duration::ZERO } else { moment() };
        let is_theirs = self.watch.deaths.launchers.as_ref().is_some_and(|launchers| launchers.of == death.outer);
        let calls_off = self.watch.deaths.comes(death, self.machine.state(), Instant::now() + moment);
        if is_theirs && self.watch.deaths.waiting.is_empty() {
            self.watch.deaths.release_launchers();
        }
        if calls_off && matches!(self.machine.state(), State::Snapshotting { .. }) {
            self.life.call_off();
        }
    }

    /// Whether the death of a process can take the job back.
    fn deaths_count(&self) -> bool {
        let restart = &self.setup.config.restart;
        restart.on_process_death != OnProcessDeath::Root && restart.max_restarts != 0
    }

    /// A process dies, and has not ended yet. A launcher that kills the other ranks as soon as it has would be faster than
    /// we are, and the kernels of those would wait for the dead rank until the driver ends them. While it dies, the other
    /// ranks run: what its own kernel waits for may still arrive.
    pub(super) fn process_dies(&mut self, death: &Death) {
        let is_running = matches!(self.machine.state(), State::Running(_)) && !self.machine.is_stopping();
        let is_present = self.life.is_present(death.life) && self.life.ended().is_none();
        if !is_running || !is_present || !self.deaths_count() || !self.watch.deaths.may_stop_launchers(death) {
            return;
        }
        let Some(stopped) = self.life.job().and_then(|job| job.stop_launchers(death.outer)) else { return };
        let launchers: Vec<i32> = stopped.pids().collect();
        tracing::debug!(
            pid = death.pid,
            ?launchers,
            "a process dies: its launchers are stopped until the job is killed"
        );
        self.watch.deaths.launchers = Some(Launchers { of: death.outer, stopped, until: Instant::now() + LAUNCHERS });
    }

    /// Decides about the deaths that are due.
    pub(super) fn check_deaths(&mut self) {
        let over = self.watch.deaths.launchers_continue().is_some_and(|at| at <= Instant::now());
        // A job that goes back is killed: its launchers stay stopped until then.
        let may_wait = matches!(self.machine.state(), State::Running(_) | State::Ending { .. });
        if over || !may_wait || self.machine.is_stopping() {
            self.watch.deaths.release_launchers();
        }
        if self.watch.deaths.next_wake(self.machine.state()).is_none_or(|due| due > Instant::now()) {
            return;
        }
        let ends =
            self.life.ended().is_some() || self.life.job().is_none_or(|job| job.root.has_ended().unwrap_or(true));
        if ends || !matches!(self.machine.state(), State::Running(_)) || self.machine.is_stopping() {
            return self.watch.deaths.forget();
        }
        let images = self.images_to_go_on_from().inspect_err(|error| {
            tracing::error!("cannot read the images: {}. The death of a process is left to the job", chain(error));
        });
        if !images.is_ok_and(|images| !images.good.is_empty()) {
            return self.watch.deaths.forget();
        }
        let (first, others) = self.watch.deaths.decide(&self.setup.config.restart, Instant::now());
        let goes_back = first.is_some();
        if !goes_back {
            self.watch.deaths.release_launchers();
        }
        if let Some(victim) = &first {
            self.goes_back_for(victim);
        }
        for (victim, why) in others {
            self.tell_left(&victim, why, goes_back);
        }
    }

    fn goes_back_for(&mut self, victim: &Victim) {
        let Victim { pid, name, signal } = victim.clone();
        let cause = self.watch.cause_of(Ended::Signal(signal), Instant::now());
        let cause = match cause {
            Cause::OutOfMemory | Cause::GpuFault { .. } => cause,
            _ => Cause::ProcessDied { pid, name: name.clone(), signal },
        };
        let (action, verdict) = match self.ruled_for(&cause, &victim.to_string()) {
            Some((action, verdict)) => (action, verdict),
            None => ("restart".to_owned(), Verdict::Died(signal)),
        };
        tracing::error!("{victim} ({action})");
        self.tell(What::ProcessDied { pid, name, signal, action, why: None });
        self.carry(cause, verdict);
    }

    fn tell_left(&mut self, victim: &Victim, why: Option<Why>, goes_back: bool) {
        let words = match why {
            Some(why) => why.to_string(),
            None if goes_back => "it died together with the process before it".to_owned(),
            None => return,
        };
        match why {
            Some(why) if why.is_news() => tracing::warn!(
                "{victim}; rekindle leaves that to the job: {words}. If the job kills this process itself, set \
                restart.on-process-death = \"root\""
            ),
            _ => tracing::warn!("{victim} too"),
        }
        let Victim { pid, name, signal } = victim.clone();
        self.tell(What::ProcessDied { pid, name, signal, action: "none".into(), why: Some(words) });
    }
}
