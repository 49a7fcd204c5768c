//! What is wrong with the job while it runs, why a life ended, and what rules make of both.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::events::micros;
use super::keep::shown;
use super::line::Target;
use super::state::{Ending, Event, State, Stop, Verdict};
use super::{Message, Owner, Setup};
use crate::config::{GpuFaults, HangAction, RuleAction};
use crate::policy::rules::{self, Case};
use crate::published::{LastEnd, Published};
use crate::telemetry::events::What;
use crate::watch::gpu::{self, Fault};
use crate::watch::lines::{self, Hit, Turn};
use crate::watch::vigil::{self, Order, Vigil};
use crate::watch::witness::Witness;
use rekindle_base::cause::{Cause, Facts, Missing, judge};
use rekindle_base::chain;
use rekindle_base::xid;
use rekindle_engine::launch::Job;
use rekindle_os::process;
use rekindle_os::spawn::Ended;

/// What the threads that watch the job report.
pub(super) enum Finding {
    /// Of this life.
    Vigil(u32, vigil::Finding),
    Line(Hit),
    Fault(Fault),
}

/// What the owner knows of the job's health.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Of this life.
    witness: Option<Witness>,
    /// Why it is ended by us, where a rule or a hang is why.
    blame: Option<Cause>,
    /// What is to be done once the job runs again: nothing else is done while a snapshot is taken.
    pending: Option<Verdict>,
    /// The thread that watches for hangs.
    vigil: Option<mpsc::Sender<Order>>,
    /// Whether its clocks count.
    going: bool,
    /// What the thread that reads the output goes by.
    turn: Turn,
    /// What the thread that asks for faults of GPUs goes by: the pid of the job's root.
    root: Arc<AtomicI32>,
    /// The faults of this life.
    faults: Vec<(Instant, u32)>,
    /// GPUs on which nothing should be started before somebody has seen to them, by UUID or PCI address, with the fault.
    pub(super) unfit: Vec<(String, u32)>,
    /// How long the output files were when no life wrote to them last.
    from: [u64; 2],
    /// How often each rule has sent the job back, by its number from 0.
    rewinds: BTreeMap<usize, u32>,
    /// From when on work would be lost: the begin of the life, or the newest image.
    unsaved_since: Option<Instant>,
    /// Work that was lost with lives that ended, since the supervisor began.
    pub(super) lost: Duration,
    /// How often the job was started or brought back.
    pub(super) lives: u32,
}

/// What was longer ago did not end the job.
const RECENT: Duration = Duration::from_secs(120);

impl Owner<'_> {
    /// Starts the threads that are needed for what is configured.
    pub(super) fn watch_begin(&mut self) {
        self.watch.from = self.output_lengths();
        let setup = Arc::clone(self.shared);
        let beats = setup.beats.as_ref().map(|beats| beats.count()).unwrap_or_default();
        if let Some(vigil) = Vigil::new(&setup.config.watch, &self.files, setup.folder.log_dir(), beats) {
            let (orders, told) = mpsc::channel();
            self.watch.vigil = Some(orders);
            let sender = self.sender.clone();
            self.spawn("watch", move || {
                vigil.keep(&told, |life, finding| {
                    let _ = sender.send(Message::Watched(Finding::Vigil(life, finding)));
                });
            });
        }
        if setup.config.rules.iter().any(|rule| rule.matches.is_of_output()) {
            let files = [self.files.stdout.clone(), self.files.stderr.clone()];
            let (turn, sender, setup) = (self.watch.turn.clone(), self.sender.clone(), Arc::clone(&setup));
            self.spawn("lines", move || {
                let report = |hit| sender.send(Message::Watched(Finding::Line(hit))).is_ok();
                if let Err(error) = lines::watch(files, &setup.config.rules, &turn, report) {
                    tracing::error!(
                        "rules for the output hold only at the end of the job: it cannot be watched: {error}"
                    );
                }
            });
        }
        if setup.config.watch.gpu_faults == GpuFaults::Auto && Path::new("/dev/nvidiactl").exists() {
            let (root, sender) = (Arc::clone(&self.watch.root), self.sender.clone());
            let report = move |fault| sender.send(Message::Watched(Finding::Fault(fault))).is_ok();
            self.spawn("gpu-faults", move || gpu::watch_faults(&root, report));
        }
    }

    fn output_lengths(&self) -> [u64; 2] {
        [&self.files.stdout, &self.files.stderr].map(|file| std::fs::metadata(file).map_or(0, |meta| meta.len()))
    }

    pub(super) fn watch_life(&mut self, job: &Job) {
        let root = job.root.pid();
        self.watch.witness = Some(Witness::begin(root));
        self.watch.blame = None;
        self.watch.pending = None;
        self.watch.faults.clear();
        self.watch.unsaved_since = Some(Instant::now());
        self.watch.lives += 1;
        self.published.hang = None;
        self.published.gpu_fault = None;
        // A restore has put the files back to what they were at the image.
        let now = self.output_lengths();
        self.watch.from = [0, 1].map(|n| now[n].min(self.watch.from[n]));
        self.watch.turn.set(self.life, self.watch.from);
        self.watch.root.store(root, Ordering::Relaxed);
        self.order(Order::Life(self.life, root));
    }

    fn order(&self, order: Order) {
        if let Some(vigil) = &self.watch.vigil {
            let _ = vigil.send(order);
        }
    }

    /// Lets the clocks count while the job runs, with all of its memory, and no snapshot is taken.
    pub(super) fn watch_follows(&mut self) {
        let going = matches!(self.machine.state(), State::Running(_)) && self.ended.is_none();
        if going != self.watch.going {
            self.watch.going = going;
            self.order(if going { Order::Go } else { Order::Hold });
        }
        if going && let Some(verdict) = self.watch.pending.take() {
            self.step(Event::Condemn(verdict));
        }
    }

    pub(super) fn watched(&mut self, finding: Finding) {
        match finding {
            Finding::Vigil(life, finding) if life == self.life => self.noticed(finding),
            Finding::Line(hit) if hit.life == self.life && self.ended.is_none() => self.matched(&hit),
            Finding::Fault(fault) => self.faulted(&fault),
            Finding::Vigil(..) | Finding::Line(_) => {}
        }
    }

    fn noticed(&mut self, finding: vigil::Finding) {
        match finding {
            vigil::Finding::Silent(idle) => tracing::warn!("the job has printed nothing for {}", shown(idle)),
            vigil::Finding::GoesOn(what) => {
                tracing::info!("the job goes on, of which it was said that {what}");
                self.published.hang = None;
                self.tell(What::GoesOn { what });
                self.publish();
            }
            // A snapshot, or the end, came in between.
            vigil::Finding::Hung { .. } if !matches!(self.machine.state(), State::Running(_)) => {}
            vigil::Finding::Hung { what, idle, stacks } => {
                let name = stacks.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
                self.hung(what, idle, name);
            }
        }
    }

    fn hung(&mut self, what: Missing, idle: Duration, stacks: Option<String>) {
        let cause = Cause::Hang { what };
        let words = format!("{what} for {}", shown(idle));
        let setup = Arc::clone(self.shared);
        let rule = rules::first(&setup.config.rules, &Case { cause: &cause, ended: None, lines: &[] });
        let (action, verdict) = match (rule, setup.config.watch.action) {
            (Some((n, rule)), _) => (rule.action.to_string(), Some(self.by_rule(n, &words))),
            (None, HangAction::Notify) => ("notify".into(), None),
            (None, HangAction::Restart) => ("restart".into(), Some(Verdict::Restart)),
            (None, HangAction::SnapshotAndStop) => ("snapshot-and-stop".into(), Some(Verdict::Stop)),
        };
        let at =
            stacks.as_ref().map_or_else(String::new, |name| format!("; what its processes are at is in log/{name}"));
        tracing::error!("the job hangs: {words} ({action}){at}");
        self.published.hang = Some(words);
        self.tell(What::Hung { what, idle_us: micros(idle), stacks, action });
        match verdict {
            Some(verdict) => self.carry(cause, verdict),
            None => self.publish(),
        }
    }

    /// A line of the output fits a rule.
    fn matched(&mut self, hit: &Hit) {
        let Some(rule) = self.shared.config.rules.get(hit.rule) else { return };
        let number = hit.rule + 1;
        let cause = match rule.action {
            RuleAction::Rewind => Cause::BadTraining { rule: number },
            _ => Cause::Rule { rule: number },
        };
        let verdict = self.by_rule(hit.rule, &hit.line);
        self.carry(cause, verdict);
    }

    fn faulted(&mut self, fault: &Fault) {
        let words = xid::in_words(fault.xid);
        let (_, remedy) = xid::meaning(fault.xid);
        match remedy {
            xid::Remedy::Nothing => tracing::info!("GPU {}: {words}", fault.gpu),
            _ if remedy.needs_drain() => {
                tracing::error!("GPU {}: {words}; no job should be started on it before", fault.gpu)
            }
            _ => tracing::error!("GPU {}: {words}", fault.gpu),
        }
        self.tell(What::GpuFault { gpu: fault.gpu.clone(), xid: fault.xid, words: words.clone() });
        if remedy == xid::Remedy::Nothing || self.ended.is_some() {
            return;
        }
        self.watch.faults.push((Instant::now(), fault.xid));
        self.unfit(&fault.gpu, fault.xid);
        self.published.gpu_fault = Some(words.clone());
        let cause = Cause::GpuFault { xid: fault.xid };
        let rule = rules::first(&self.shared.config.rules, &Case { cause: &cause, ended: None, lines: &[] });
        match rule.map(|(n, _)| n) {
            Some(n) => {
                let verdict = self.by_rule(n, &words);
                self.carry(cause, verdict);
            }
            None => self.publish(),
        }
    }

    /// Remembers a GPU that should be left after this fault.
    fn unfit(&mut self, gpu: &str, xid: u32) {
        if xid::meaning(xid).1.needs_drain() && !self.watch.unfit.iter().any(|(known, _)| known == gpu) {
            self.watch.unfit.push((gpu.to_owned(), xid));
        }
    }

    /// What this rule, counted from 0, leads to now. It counts as carried out.
    fn by_rule(&mut self, n: usize, why: &str) -> Verdict {
        let setup = Arc::clone(self.shared);
        let Some(rule) = setup.config.rules.get(n) else { return Verdict::Restart };
        let number = n + 1;
        tracing::warn!("rule {number} ({}): {why}", rule.action);
        self.tell(What::RuleMatched { rule: number, action: rule.action.to_string(), why: why.into() });
        match rule.action {
            RuleAction::Restart => Verdict::Restart,
            RuleAction::GiveUp => Verdict::GiveUp { why: format!("rule {number}: {why}") },
            RuleAction::SnapshotAndStop => Verdict::Stop,
            RuleAction::Rewind => {
                let done = self.watch.rewinds.entry(n).or_default();
                if *done >= rule.max_rewinds() {
                    let why =
                        format!("rule {number} has sent the job back {done} times (max-rewinds), and again: {why}");
                    return Verdict::GiveUp { why };
                }
                *done += 1;
                self.back_by(rule.images())
            }
        }
    }

    /// To the image that is so many back, the newest being 1. What is newer is of a line that is left.
    fn back_by(&mut self, images: usize) -> Verdict {
        let good = self.good_images().unwrap_or_else(|error| {
            tracing::error!("cannot read the images: {}", chain(&error));
            Vec::new()
        });
        let Some(image) = good.get(images.saturating_sub(1)).or_else(|| good.last()).copied() else {
            tracing::warn!("there is no image to go back to");
            return Verdict::Restart;
        };
        self.line.aim(Target::new(image, good.first() != Some(&image)));
        tracing::warn!("going back to image {image}");
        Verdict::Rewind(image)
    }

    /// Ends the job that runs, for this cause.
    fn carry(&mut self, cause: Cause, verdict: Verdict) {
        self.watch.blame = Some(cause);
        match verdict {
            Verdict::Stop => self.step(Event::Stop(Stop::Requeue)),
            Verdict::Rewind(image) => self.step(Event::Rewind { image }),
            verdict if matches!(self.machine.state(), State::Running(_)) => self.step(Event::Condemn(verdict)),
            verdict => self.watch.pending = Some(verdict),
        }
    }

    /// Lets the rules decide what an end of its own leads to.
    pub(super) fn judge_end(&mut self, ended: Ended, cause: &Cause) {
        let setup = Arc::clone(self.shared);
        let rules = &setup.config.rules;
        let by_itself = match self.machine.state() {
            State::Ending { stop, .. } => *stop == Ending::Lost,
            _ => !self.machine.is_stopping(),
        };
        let lines = if rules.iter().any(|rule| rule.matches.log.is_some()) {
            lines::last([&self.files.stdout, &self.files.stderr], self.watch.from)
        } else {
            Vec::new()
        };
        self.watch.from = self.output_lengths();
        self.watch.turn.set(0, self.watch.from);
        self.watch.root.store(0, Ordering::Relaxed);
        if !by_itself || *cause == Cause::Completed {
            return;
        }
        let case = Case { cause, ended: Some(ended), lines: &lines };
        if let Some((n, _)) = rules::first(rules, &case) {
            let verdict = self.by_rule(n, &cause.to_string());
            self.step(Event::Judged(verdict));
        }
    }

    /// There is an image of now.
    pub(super) fn watch_saved(&mut self) {
        self.watch.unsaved_since = Some(Instant::now());
        if let Some(witness) = &mut self.watch.witness {
            witness.look();
        }
    }

    /// Judges the end of a life; once for each.
    pub(super) fn why_ended(&mut self, ended: Ended) -> Cause {
        let by_us = match self.machine.state() {
            // Killed when it was at its end already.
            State::Ending { deadline: None, stop: Ending::Stop(_) | Ending::Lost | Ending::Condemned, .. }
                if ended == Ended::Exit(0) =>
            {
                None
            }
            State::Ending { stop: Ending::Lost, .. } => Some(Cause::SnapshotLost),
            State::Ending { stop: Ending::Suspend, .. } => Some(Cause::Suspended),
            State::Ending { stop: Ending::Rewind(_), .. } => self.watch.blame.clone().or(Some(Cause::Rewound)),
            State::Ending { .. } => self.watch.blame.clone().or(Some(Cause::Requested)),
            _ => None,
        };
        let mut facts = Facts { by_us, ..Facts::default() };
        if facts.by_us.is_none()
            && ended != Ended::Exit(0)
            && let Some(mut witness) = self.watch.witness.take()
        {
            let testimony = witness.testify();
            facts.memory = testimony.memory;
            let told = self.watch.faults.iter().filter(|(at, _)| at.elapsed() < RECENT).map(|(_, xid)| *xid);
            facts.xids = told.chain(testimony.faults.iter().map(|(_, xid)| *xid)).collect();
            testimony.faults.iter().for_each(|(gpu, xid)| self.unfit(gpu, *xid));
        }
        let cause = judge(ended, &facts);
        if let (Some(since), false) = (self.watch.unsaved_since.take(), cause == Cause::Completed) {
            self.watch.lost += since.elapsed();
        }
        if !matches!(cause, Cause::Completed | Cause::Exit { .. } | Cause::Signal { .. })
            && !matches!(cause, Cause::Requested | Cause::Suspended | Cause::Rewound)
        {
            tracing::warn!("why it ended: {cause}");
        }
        self.published.last_end = Some(LastEnd::now(Some(ended), cause.clone()));
        cause
    }
}

/// Why the supervisor before this one left a job that was not at its end; nothing where it said goodbye.
pub(super) fn interrupted(setup: &Setup) -> Option<LastEnd> {
    let before = Published::read(&setup.folder.state_file()).ok()?;
    if before.state == "done" || before.state == "waiting" || before.state == "suspended" || before.boot_id.is_empty() {
        return None;
    }
    let same_boot = process::boot_id().is_ok_and(|now| now == before.boot_id);
    Some(LastEnd::now(None, if same_boot { Cause::SupervisorKilled } else { Cause::MachineRestart }))
}
