//! The job's requests to its supervisor, and the answers (docs/job-api.md).
//!
//! A snapshot that the job requests is the next one that begins. It has a number, with which the job asks whether it is
//! over. When a life ends, its holds ([`super::holds`]) end too.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use nix::sys::utsname::uname;

use super::holds::{self, Change, HOLDERS, Holder, Holds, How};
use super::line::Line;
use super::state::{Event, Machine, Wish};
use super::times::{micros, shown};
use super::{Message, Owner, Setup};
use crate::control::protocol::{Code, Fault};
use crate::job_api::protocol::{Answer, Facts, Gpu, Request};
use crate::job_api::server::Server;
use crate::job_api::{Call, Reply};
use crate::published::Published;
use crate::telemetry::events::What;
use rekindle_cuda::nvml::GpuInventory;
use rekindle_store::manifest::Reason;
use rekindle_store::{ImageId, Outcome};

/// A life of the job, as the job knows it.
#[derive(Debug, Default)]
struct Life {
    name: String,
    since: DateTime<Utc>,
    from: Option<ImageId>,
    gpus: Vec<Gpu>,
}

/// Snapshots as the job counts them.
#[derive(Debug, Default)]
struct Count {
    begun: u64,
    over: u64,
    /// Why the last one failed, if it did.
    failed: Option<String>,
}

/// What the job can learn, and what it requested.
#[derive(Debug, Default)]
pub(super) struct JobApi {
    server: Option<Server>,
    life: Life,
    /// How often the run was restored, under all supervisors.
    restores: u32,
    snapshots: Count,
    holds: Holds,
}

/// What to do about a request of the job.
pub(super) enum Todo {
    /// Nothing: it is answered.
    Nothing,
    /// Take a snapshot.
    Snapshot,
    /// Tell the state machine the new time limit of the holds.
    Released,
    /// The same, and answer the job only then, because it relies on the hold.
    Held(Reply, Answer),
}

impl JobApi {
    pub(super) fn new(setup: &Setup) -> JobApi {
        let record = setup.folder.record().ok().flatten();
        let record = record.filter(|record| record.lineage == setup.program.launch.lineage);
        JobApi { restores: record.map_or(0, |record| record.restores), ..JobApi::default() }
    }

    pub(super) fn restores(&self) -> u32 {
        self.restores
    }

    /// A life with this name begins. Returns whether it is a restore.
    fn life_begins(&mut self, name: String, from: Option<ImageId>, gpus: Vec<Gpu>, now: DateTime<Utc>) -> bool {
        self.life = Life { name, since: now, from, gpus };
        self.holds.clear();
        self.restores = self.restores.saturating_add(u32::from(from.is_some()));
        from.is_some()
    }

    pub(super) fn snapshot_begins(&mut self) {
        self.snapshots.begun += 1;
    }

    /// A snapshot is over; `failed` is why it failed, if it did.
    pub(super) fn snapshot_ends(&mut self, failed: Option<String>) {
        self.snapshots.over = self.snapshots.begun;
        self.snapshots.failed = failed;
    }

    /// Updates the answer to `state`.
    pub(super) fn show(&self, setup: &Setup, machine: &Machine<'_>, line: &Line, published: &Published) {
        let Some(server) = &self.server else { return };
        let (life, snapshots) = (&self.life, &self.snapshots);
        let facts = machine.state().life().map(|_| Facts {
            job: setup.folder.name().to_string(),
            run: line.lineage.clone(),
            life: life.name.clone(),
            since: life.since,
            from: life.from,
            restores: self.restores,
            snapshots: snapshots.over,
            failed: snapshots.failed.clone(),
            image: published.last_image.max(life.from),
            host: uname().map(|uname| uname.nodename().to_string_lossy().into_owned()).unwrap_or_default(),
            boot_id: published.boot_id.clone(),
            pid: published.pid,
            gpus: life.gpus.clone(),
        });
        server.show(facts);
    }

    /// Handles a request of the job. `max_hold` is the time limit of a hold.
    fn asked(&mut self, call: Call, machine: &Machine<'_>, max_hold: Duration, now: Instant) -> Todo {
        let Call { request, life, pid, reply } = call;
        if machine.state().life().is_none() || life != self.life.name {
            reply(Err(Fault::new(Code::Restored, "the job was restored since")));
            return Todo::Nothing;
        }
        match request {
            // Answered by the thread that reads requests.
            Request::State => Todo::Nothing,
            Request::Snapshot => match machine.admits(Wish::Snapshot) {
                Ok(()) => {
                    // Answered before the job is frozen for it.
                    reply(Ok(Answer::Snapshot { number: self.snapshots.begun + 1, life }));
                    Todo::Snapshot
                }
                Err(why) => {
                    reply(Err(not_admitted(machine, why)));
                    Todo::Nothing
                }
            },
            Request::Hold { holder, time } => {
                let time = time.min(max_hold);
                let admitted = machine.admits(Wish::Hold).map_err(|why| not_admitted(machine, why));
                let held = admitted.and_then(|()| match self.holds.add(Holder::new(pid, holder, now + time), now) {
                    true => Ok(Answer::Held { seconds: time.as_secs_f64(), life }),
                    false => Err(Fault::new(Code::Refused, format!("{HOLDERS} processes already block snapshots"))),
                });
                match held {
                    Ok(answer) => Todo::Held(reply, answer),
                    Err(fault) => {
                        reply(Err(fault));
                        Todo::Nothing
                    }
                }
            }
            Request::Release { holder } => {
                let held = self.holds.remove(pid, &holder);
                reply(Ok(Answer::Released { held }));
                if held { Todo::Released } else { Todo::Nothing }
            }
        }
    }

    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        self.holds.next_wake(now)
    }
}

/// The error for a refused request; it says whether a later one can succeed.
fn not_admitted(machine: &Machine<'_>, why: &str) -> Fault {
    Fault::new(if machine.is_stopping() { Code::Refused } else { Code::Later }, why)
}

impl Owner<'_> {
    /// Serves the job's socket, if it has one.
    pub(super) fn open_word(&mut self) {
        let Some(socket) = &self.setup.sockets.job_api else { return };
        let sender = self.threads.sender.clone();
        let deliver = move |call| sender.send(Message::JobApi(Box::new(call))).is_ok();
        match Server::start(socket, Box::new(deliver)) {
            Ok(server) => self.clients.job_api.server = Some(server),
            Err(error) => tracing::warn!("the job's socket (REKINDLE_SOCKET) does not work: {error}"),
        }
    }

    pub(super) fn close_word(&mut self) {
        self.clients.job_api.server = None;
        if let Some(socket) = &self.setup.sockets.job_api {
            socket.close();
        }
    }

    /// A life begins. Called before the machine gets the event.
    pub(super) fn word_of_life(&mut self, from: Option<ImageId>) {
        let now = Utc::now();
        let name = format!("{}-{}-{}", now.format("%Y%m%dT%H%M%S%6fZ"), std::process::id(), self.life.number());
        if self.clients.job_api.life_begins(name, from, gpus(), now)
            && let Err(error) = self.record(Outcome::Running, None)
        {
            tracing::debug!("the restore was not counted: {error}");
        }
    }

    pub(super) fn asked(&mut self, call: Call) {
        match self.clients.job_api.asked(call, &self.machine, self.setup.config.snapshot.max_hold, Instant::now()) {
            Todo::Nothing => {}
            Todo::Snapshot => self.step_quietly(Event::SnapshotNow(Reason::Request)),
            Todo::Released => self.holders_changed(),
            Todo::Held(reply, answer) => {
                self.holders_changed();
                reply(Ok(answer));
            }
        }
    }

    fn holders_changed(&mut self) {
        self.step_quietly(self.clients.job_api.holds.bound().map_or(Event::Release, Event::Hold));
    }

    /// Passes an event to the state machine, and carries out its actions. Nothing is published for this alone: a job
    /// may do this at every training step.
    fn step_quietly(&mut self, event: Event) {
        let actions = self.machine.step(event, Instant::now());
        if !actions.is_empty() {
            self.carry_out(actions);
        }
        self.check_holds();
    }

    /// Reports when a snapshot waits for processes that block it, and when it no longer does.
    pub(super) fn check_holds(&mut self) {
        let facts = holds::Facts::of(&self.machine);
        match self.clients.job_api.holds.check(facts, Holder::lives, Instant::now()) {
            None => {}
            Some(Change::Died) => self.holders_changed(),
            Some(Change::Waits { reason, pids, bound }) => {
                crate::routine!("{} waits: the job blocks it, for at most {}", named(reason), shown(bound));
                self.tell(What::SnapshotHeld { reason, pids, bound_us: micros(bound) });
                self.reporting.published.held =
                    Utc::now().checked_add_signed(TimeDelta::from_std(bound).unwrap_or_default());
                self.publish();
            }
            Some(Change::Over { reason, how, waited }) => {
                self.reporting.published.held = None;
                match how {
                    How::Expired => {
                        tracing::warn!("the job blocked a snapshot for as long as it may: the snapshot is taken now")
                    }
                    how => crate::routine!("the blocked snapshot no longer waits: {}", how.as_str()),
                }
                self.tell(What::HoldOver { reason, how: how.as_str().into(), waited_us: micros(waited) });
            }
        }
    }
}

fn named(reason: Reason) -> &'static str {
    match reason {
        Reason::Interval => "a snapshot",
        Reason::Signal | Reason::Request => "the requested snapshot",
        Reason::Final => "the final snapshot",
        Reason::Group => "the snapshot of the group",
    }
}

/// The GPUs that the kernel module lists, which takes no time.
fn gpus() -> Vec<Gpu> {
    let gpus = GpuInventory::of_kernel_module().gpus;
    gpus.into_iter().map(|gpu| Gpu { uuid: gpu.uuid.to_string(), name: gpu.name }).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::config::Config;
    use crate::policy::StartPoint;

    type Said = Result<Answer, Fault>;

    fn call(request: Request, life: &str) -> (Call, mpsc::Receiver<Said>) {
        let (sender, said) = mpsc::channel();
        let reply: Reply = Box::new(move |answer| drop(sender.send(answer)));
        (Call { request, life: life.into(), pid: 0, reply }, said)
    }

    /// Sends a request to a job's supervisor in the life "l". Returns the immediate answer, if any.
    fn ask(word: &mut JobApi, machine: &Machine<'_>, request: Request, life: &str) -> (Todo, Option<Said>) {
        let (call, said) = call(request, life);
        let todo = word.asked(call, machine, Duration::from_secs(60), Instant::now());
        (todo, said.try_recv().ok())
    }

    #[test]
    fn a_request_is_of_a_life_that_runs() {
        let config = Config::default();
        let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
        let mut word = JobApi::default();
        assert!(!word.life_begins("l".into(), None, Vec::new(), Utc::now()));
        let refused = |said: Option<Said>| said.unwrap().unwrap_err().code;
        let (todo, said) = ask(&mut word, &machine, Request::Snapshot, "l");
        assert!(matches!(todo, Todo::Nothing) && refused(said) == Code::Restored, "it does not run");
        machine.step(Event::Started, Instant::now());
        let (todo, said) = ask(&mut word, &machine, Request::Snapshot, "k");
        assert!(matches!(todo, Todo::Nothing) && refused(said) == Code::Restored, "it is another life");
        word.snapshot_begins();
        let (todo, said) = ask(&mut word, &machine, Request::Snapshot, "l");
        assert!(matches!(todo, Todo::Snapshot));
        assert!(matches!(said, Some(Ok(Answer::Snapshot { number: 2, .. }))), "{said:?}");
    }

    #[test]
    fn a_hold_is_bounded_and_confirmed_after_the_machine_knows_of_it() {
        let config = Config::default();
        let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
        machine.step(Event::Started, Instant::now());
        let mut word = JobApi::default();
        let hold = Request::Hold { holder: "h".into(), time: Duration::from_secs(600) };
        let (todo, said) = ask(&mut word, &machine, hold, "");
        assert!(matches!(todo, Todo::Held(_, Answer::Held { seconds: 60.0, .. })) && said.is_none());
        let release = || Request::Release { holder: "h".into() };
        let (todo, said) = ask(&mut word, &machine, release(), "");
        assert!(matches!(todo, Todo::Released) && matches!(said, Some(Ok(Answer::Released { held: true }))));
        let (todo, said) = ask(&mut word, &machine, release(), "");
        assert!(matches!(todo, Todo::Nothing) && matches!(said, Some(Ok(Answer::Released { held: false }))));
    }
}
