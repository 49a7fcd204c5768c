//! What the job asks of its supervisor, and what it is told (docs/word.md).
//!
//! A snapshot that the job asks for is the next one that begins: it has a number, and the job looks whether that one is over.
//! Holds have a name and a bound each; the machine knows only until when the last of them lasts, and what a hold kept
//! waiting is told when it waits and when it does not any more. A life that ends takes its holds with it.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::events::micros;
use super::keep::shown;
use super::state::{Event, State, Wish};
use super::{Message, Owner, Setup};
use crate::control::protocol::{Code, Fault};
use crate::telemetry::events::What;
use crate::word::Call;
use crate::word::protocol::{Answer, Facts, Gpu, Request};
use crate::word::server::Server;
use rekindle_cuda::nvml::GpuInventory;
use rekindle_engine::snapshot::Taken;
use rekindle_os::process;
use rekindle_store::ImageId;
use rekindle_store::manifest::Reason;

/// Of a job. One that wants more has lost count.
const HOLDERS: usize = 64;
/// How often it is looked whether those that a snapshot waits for are still there.
const LOOK: Duration = Duration::from_secs(1);

/// Somebody in the job who holds snapshots off.
#[derive(Debug)]
struct Holder {
    pid: i32,
    /// Against a pid that is another's by now.
    begun: Option<u64>,
    name: String,
    until: Instant,
}

impl Holder {
    /// One that is in a PID namespace which we do not see has no pid, and holds until its bound.
    fn lives(&self) -> bool {
        self.pid == 0
            || self.begun.is_some()
                && process::start_time(self.pid) == self.begun
                && !matches!(process::state(self.pid), Some('Z' | 'X'))
    }
}

/// A snapshot that is held off.
#[derive(Debug, Clone, Copy)]
struct Wait {
    since: Instant,
    reason: Reason,
    until: Instant,
}

/// What is known for the job, and what it asked for.
#[derive(Debug, Default)]
pub(super) struct Word {
    server: Option<Server>,
    /// Of the job, as it knows it.
    life: String,
    since: DateTime<Utc>,
    from: Option<ImageId>,
    gpus: Vec<Gpu>,
    /// How often the run was brought back, under every supervisor.
    restores: u32,
    /// Snapshots that were begun.
    begun: u64,
    /// Snapshots that are over.
    over: u64,
    failed: Option<String>,
    holders: Vec<Holder>,
    wait: Option<Wait>,
    /// Whether one who holds has died since.
    died: bool,
    /// When it was last looked whether those who hold are still there.
    looked: Option<Instant>,
}

impl Word {
    pub(super) fn new(setup: &Setup) -> Word {
        let record = setup.folder.record().ok().flatten();
        let restores =
            record.filter(|record| record.lineage == setup.launch.lineage).map_or(0, |record| record.restores);
        Word { restores, ..Word::default() }
    }

    pub(super) fn restores(&self) -> u32 {
        self.restores
    }

    /// Until when the last of the holders holds.
    fn bound(&self) -> Option<Instant> {
        self.holders.iter().map(|holder| holder.until).max()
    }

    /// How long the owner may sleep.
    pub(super) fn patience(&self) -> Duration {
        if self.wait.is_some() { LOOK } else { Duration::MAX }
    }
}

impl Owner<'_> {
    /// Serves the job's socket, where it has one.
    pub(super) fn open_word(&mut self) {
        let Some(socket) = &self.shared.word else { return };
        let sender = self.sender.clone();
        let deliver = move |call| sender.send(Message::Word(Box::new(call))).is_ok();
        match Server::start(socket, Box::new(deliver)) {
            Ok(server) => self.word.server = Some(server),
            Err(error) => tracing::warn!("the job cannot ask for anything (REKINDLE_SOCKET): {error}"),
        }
    }

    pub(super) fn close_word(&mut self) {
        self.word.server = None;
        if let Some(socket) = &self.shared.word {
            socket.close();
        }
    }

    /// What `state` answers from now on.
    pub(super) fn show_word(&self) {
        let Some(server) = &self.word.server else { return };
        let word = &self.word;
        let facts = self.machine.state().life().map(|_| Facts {
            job: self.shared.folder.name().to_string(),
            run: self.line.lineage.clone(),
            life: word.life.clone(),
            since: word.since,
            from: word.from,
            restores: word.restores,
            snapshots: word.over,
            failed: word.failed.clone(),
            image: self.published.last_image.max(word.from),
            host: nix::sys::utsname::uname()
                .map(|uname| uname.nodename().to_string_lossy().into_owned())
                .unwrap_or_default(),
            boot_id: self.published.boot_id.clone(),
            pid: self.published.pid,
            gpus: word.gpus.clone(),
        });
        server.show(facts);
    }

    /// A life begins. Before the machine hears of it.
    pub(super) fn word_of_life(&mut self, from: Option<ImageId>) {
        let now = Utc::now();
        let word = &mut self.word;
        word.life = format!("{}-{}-{}", now.format("%Y%m%dT%H%M%S%6fZ"), std::process::id(), self.life);
        word.since = now;
        word.from = from;
        word.holders.clear();
        word.gpus = gpus();
        if from.is_some() {
            word.restores = word.restores.saturating_add(1);
            if let Err(error) = self.record(rekindle_store::Outcome::Running, None) {
                tracing::debug!("the restore was not counted: {error}");
            }
        }
    }

    // ---- snapshots ----

    pub(super) fn word_of_begin(&mut self) {
        self.mind_the_holds();
        self.word.begun += 1;
    }

    pub(super) fn word_of_end(&mut self, result: Result<&Taken, &str>) {
        self.word.over = self.word.begun;
        self.word.failed = result.err().map(ToOwned::to_owned);
    }

    // ---- what the job asks ----

    pub(super) fn asked(&mut self, call: Call) {
        let Call { request, life, pid, reply } = call;
        let alive = self.machine.state().life().is_some();
        if !alive || life != self.word.life {
            return reply(Err(Fault::new(Code::Restored, "the job was brought back since")));
        }
        match request {
            // The thread that reads has answered it.
            Request::State => {}
            Request::Snapshot => match self.machine.admits(Wish::Snapshot) {
                Ok(()) => {
                    // Before the job is frozen for it.
                    reply(Ok(Answer::Snapshot { number: self.word.begun + 1, life }));
                    self.quietly(Event::SnapshotNow(Reason::Request));
                }
                Err(why) => reply(Err(self.not_admitted(why))),
            },
            Request::Hold { holder, time } => {
                reply(self.hold(pid, holder, time).map(|time| Answer::Held { seconds: time.as_secs_f64(), life }))
            }
            Request::Release { holder } => {
                let before = self.word.holders.len();
                self.word.holders.retain(|other| (other.pid, &other.name) != (pid, &holder));
                let held = self.word.holders.len() < before;
                reply(Ok(Answer::Released { held }));
                if held {
                    self.holders_changed();
                }
            }
        }
    }

    /// Whether it is worth asking again.
    fn not_admitted(&self, why: &str) -> Fault {
        Fault::new(if self.machine.is_stopping() { Code::Refused } else { Code::Later }, why)
    }

    fn hold(&mut self, pid: i32, name: String, time: Duration) -> Result<Duration, Fault> {
        self.machine.admits(Wish::Hold).map_err(|why| self.not_admitted(why))?;
        let now = Instant::now();
        let time = time.min(self.shared.config.word.max_hold);
        let holders = &mut self.word.holders;
        holders.retain(|other| other.until > now && (other.pid, &other.name) != (pid, &name));
        if holders.len() >= HOLDERS {
            return Err(Fault::new(Code::Refused, format!("{HOLDERS} hold snapshots off already")));
        }
        holders.push(Holder { pid, begun: process::start_time(pid), name, until: now + time });
        self.holders_changed();
        Ok(time)
    }

    fn holders_changed(&mut self) {
        self.quietly(self.word.bound().map_or(Event::Release, Event::Hold));
    }

    /// The machine is told. What that leads to is carried out, and nothing is published for its own sake: a job may do this at
    /// every step of its own.
    fn quietly(&mut self, event: Event) {
        let actions = self.machine.step(event, Instant::now());
        if !actions.is_empty() {
            self.carry_out(actions);
        }
        self.mind_the_holds();
    }

    /// Forgets who does not hold any more, and says when a snapshot waits for those who do, and when it does not any more.
    pub(super) fn mind_the_holds(&mut self) {
        let now = Instant::now();
        let waits = self.machine.held_off();
        // However much the job asks meanwhile.
        if waits.is_some() && self.word.looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK) {
            self.word.looked = Some(now);
            let before = self.word.holders.len();
            self.word.holders.retain(Holder::lives);
            if self.word.holders.len() < before {
                self.word.died = true;
                return self.holders_changed();
            }
        }
        if self.machine.held().is_none() {
            self.word.holders.clear();
        }
        match (waits, self.word.wait) {
            (Some((reason, until)), None) => {
                self.word.died = false;
                self.word.wait = Some(Wait { since: now, reason, until });
                let bound = until.saturating_duration_since(now);
                let mut pids: Vec<i32> = self.word.holders.iter().map(|holder| holder.pid).collect();
                pids.sort_unstable();
                pids.dedup();
                tracing::info!("{} waits: the job holds it off, for {} at most", named(reason), shown(bound));
                self.tell(What::SnapshotHeld { reason, pids, bound_us: micros(bound) });
                self.published.held =
                    Utc::now().checked_add_signed(chrono::TimeDelta::from_std(bound).unwrap_or_default());
                self.publish();
            }
            // A stop may have put its own reason and time in place of those.
            (Some((reason, until)), Some(wait)) => self.word.wait = Some(Wait { reason, until, ..wait }),
            (None, Some(wait)) => {
                self.word.wait = None;
                self.published.held = None;
                let waited = now.saturating_duration_since(wait.since);
                let how = match self.machine.state() {
                    State::Running(_) | State::Snapshotting { .. } if self.word.died => "holder-died",
                    State::Running(_) | State::Snapshotting { .. } if wait.until <= now => "expired",
                    State::Running(_) | State::Snapshotting { .. } => "released",
                    _ => "job-ended",
                };
                match how {
                    "expired" => tracing::warn!(
                        "the job held a snapshot off for longer than it may, and did not let go: it is taken now"
                    ),
                    how => tracing::info!("the snapshot that the job held off waits no longer: {how}"),
                }
                self.tell(What::HoldOver { reason: wait.reason, how: how.into(), waited_us: micros(waited) });
            }
            (None, None) => {}
        }
    }
}

fn named(reason: Reason) -> &'static str {
    match reason {
        Reason::Interval => "a snapshot",
        Reason::Signal | Reason::Request => "the snapshot that was asked for",
        Reason::Final => "the last snapshot",
    }
}

/// Those that the kernel module tells of, which takes no time.
fn gpus() -> Vec<Gpu> {
    let gpus = GpuInventory::of_kernel_module().gpus;
    gpus.into_iter().map(|gpu| Gpu { uuid: gpu.uuid.to_string(), name: gpu.name }).collect()
}
