//! The health of the running job, the causes of ends, and what the rules decide about both.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::deaths::ProcessDeaths;
use super::events::image_of;
use super::finding::Finding;
use super::gpus::{Gpus, Said, named};
use super::line::Target;
use super::notices::Notices;
use super::state::{Ending, Event, State, Stop, Verdict};
use super::times::{micros, shown};
use super::work::Work;
use super::{Message, Owner};
use crate::config::{HangAction, Rule, RuleAction};
use crate::policy::StartPoint;
use crate::policy::rules::{self, Case};
use crate::published::LastEnd;
use crate::telemetry::events::What;
use crate::watch::deaths::Noticed;
use crate::watch::gpu::{self, Fault};
use crate::watch::hang_detector::{self, HangDetector, Order};
use crate::watch::kmsg::Listener;
use crate::watch::lines::{self, Hit, Turn};
use crate::watch::witness::Witness;
use rekindle_base::cause::{Cause, Facts, Missing, judge};
use rekindle_base::chain;
use rekindle_base::xid;
use rekindle_engine::launch::Job;
use rekindle_group::Number;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

/// What is known about the job's health.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// What the kernel's log says, if we can read it.
    pub(super) log: Option<Listener>,
    /// The witness of this life.
    witness: Option<Witness>,
    /// Why we end the job, if the reason is a rule or a hang.
    blame: Option<Cause>,
    /// What to do once the job runs again: nothing is done while a snapshot is taken.
    pending: Option<Verdict>,
    /// The thread that watches for hangs, and whether its clocks count.
    detector: Option<mpsc::Sender<Order>>,
    going: bool,
    /// How often the clocks were started.
    pub(super) starts: u64,
    output: Output,
    /// Deaths of single processes of the job.
    pub(super) deaths: ProcessDeaths,
    pub(super) gpus: Gpus,
    /// What clouds announce about the machine.
    pub(super) notices: Notices,
    pub(super) work: Work,
    /// How often each rule has rewound the job, by its number from 0.
    rewinds: BTreeMap<usize, u32>,
    /// While a hang is handled: the images since which the job has made no progress.
    stuck: BTreeSet<ImageId>,
}

/// Which part of the output files belongs to the present life.
#[derive(Debug, Default)]
struct Output {
    /// Tells the reading thread which life it is.
    turn: Turn,
    /// Length of the files when the previous life had ended.
    from: [u64; 2],
}

/// What follows from a hang, if this is to be done. The job has made no progress since the images `stuck` were taken or
/// restored.
fn of_a_hang(verdict: Verdict, restored: Option<StartPoint>, stuck: BTreeSet<ImageId>) -> Verdict {
    let since_its_restore = matches!(restored, Some(StartPoint::Image(image)) if stuck.contains(&image));
    match verdict {
        Verdict::Restart => Verdict::Hung(stuck),
        // Another final image would hang like this one, and so would every further run.
        Verdict::Stop if since_its_restore => {
            tracing::warn!("no final snapshot is taken: the job has made no progress since it was restored");
            Verdict::Hung(stuck)
        }
        other => other,
    }
}

/// The Nth newest of these images, from before a hang; 1 is the newest. If there are fewer, the oldest one.
fn target(good: &[ImageId], stuck: &BTreeSet<ImageId>, n: usize) -> Option<ImageId> {
    let before: Vec<ImageId> = good.iter().copied().filter(|image| !stuck.contains(image)).collect();
    let of = if before.is_empty() { good } else { &before };
    of.get(n.saturating_sub(1)).or_else(|| of.last()).copied()
}

/// How often a group goes back to the image that its job was restored from, if it hangs again and takes images meanwhile.
const SAME_IMAGE: u32 = 4;

/// What a member of a group does when its job hangs.
#[derive(Debug, PartialEq, Eq)]
enum OutOfHang {
    Restart,
    Back(Number),
    GiveUp { why: String },
}

/// A restart continues from the newest image, and counts as a failure: after some of these the group uses an older one. A
/// rewind leaves newer images, so the image that the job was restored from is not left at once: the hang may come from
/// outside. `usable`: also those whose part the group would have to fetch.
fn before_hang(usable: &[Number], stuck: &BTreeSet<Number>, restored: Option<Number>, rewinds: u32) -> OutOfHang {
    let Some(newest) = usable.first() else { return OutOfHang::Restart };
    let again = restored.filter(|image| stuck.contains(image) && usable.contains(image));
    let before = usable.iter().find(|image| !stuck.contains(image));
    match (again, before) {
        (Some(again), _) if again == *newest => OutOfHang::Restart,
        (Some(again), _) if rewinds < SAME_IMAGE => OutOfHang::Back(again),
        (_, Some(before)) if before != newest => OutOfHang::Back(*before),
        (Some(_), None) => OutOfHang::GiveUp {
            why: format!(
                "the job hung after each of {rewinds} restores without any progress, and no group image from before the \
                 hang can be used. Find out why it hangs from the stacks in its log folder, or start it from the beginning \
                 with --fresh on all machines"
            ),
        },
        _ => OutOfHang::Restart,
    }
}

/// The result of a rule.
#[derive(Debug, PartialEq, Eq)]
enum Ruled {
    Verdict(Verdict),
    /// Rewind by this many images.
    Back(usize),
}

impl Watch {
    /// A life with this number begins. `lengths` are those of the output files.
    fn life_begins(&mut self, number: u32, root: i32, lengths: [u64; 2], now: Instant) {
        if let Some(log) = &self.log {
            self.gpus.hears_notices(&log.notices());
        }
        self.witness = Some(Witness::begin(root, self.log.clone()));
        self.blame = None;
        self.pending = None;
        self.gpus.life_begins(root);
        self.work.life_begins(now);
        // A restore has cut the files to their length at the snapshot.
        self.output.from = [0, 1].map(|n| lengths[n].min(self.output.from[n]));
        self.output.turn.set(number, self.output.from);
        self.order(Order::Life(number, root));
    }

    /// The life is over. `lengths` are those of the output files.
    fn life_ends(&mut self, lengths: [u64; 2]) {
        self.output.from = lengths;
        self.output.turn.set(0, lengths);
        self.gpus.root.store(0, Ordering::Relaxed);
    }

    fn order(&self, order: Order) {
        if let Some(detector) = &self.detector {
            let _ = detector.send(order);
        }
    }

    /// Starts the clocks while the job `goes`: it runs with all of its memory, and no snapshot is taken. Returns what
    /// to do now, if something was pending.
    fn follow(&mut self, goes: bool) -> Option<Verdict> {
        if goes != self.going {
            self.going = goes;
            self.starts += u64::from(goes);
            self.order(if goes { Order::Go(self.starts) } else { Order::Hold });
        }
        self.pending.take_if(|_| goes)
    }

    /// An image was taken now.
    pub(super) fn is_saved(&mut self, now: Instant) {
        self.work.is_saved(now);
        if let Some(witness) = &mut self.witness {
            witness.look();
            self.gpus.kin.look();
        }
    }

    /// What this rule, counted from 0, decides now. It counts as carried out.
    fn ruled(&mut self, n: usize, rule: &Rule, why: &str) -> Ruled {
        let number = n + 1;
        match rule.action {
            RuleAction::Restart => Ruled::Verdict(Verdict::Restart),
            RuleAction::GiveUp => Ruled::Verdict(Verdict::GiveUp { why: format!("rule {number}: {why}") }),
            RuleAction::SnapshotAndStop => Ruled::Verdict(Verdict::Stop),
            RuleAction::Rewind => {
                let done = self.rewinds.entry(n).or_default();
                if *done >= rule.max_rewinds() {
                    let why = format!(
                        "rule {number} has already rewound the job {done} times (max-rewinds) and matches \
                            again: {why}"
                    );
                    return Ruled::Verdict(Verdict::GiveUp { why });
                }
                *done += 1;
                Ruled::Back(rule.images())
            }
        }
    }

    /// Whether the job can be ended for a hang now. If a snapshot or the end came meanwhile, the hang is reported again
    /// should the job still hang when it runs.
    fn hears_hang(&self, what: Missing, state: &State) -> bool {
        let hears = matches!(state, State::Running(_));
        if !hears {
            self.order(Order::Unheard(what));
        }
        hears
    }

    /// If we end this life, it is for this cause.
    pub(super) fn is_to_end(&mut self, cause: Cause) {
        self.blame = Some(cause);
    }

    /// The job is ended for this cause. Returns the event, unless it has to wait for a snapshot in progress.
    fn condemn(&mut self, cause: Cause, verdict: Verdict, state: &State) -> Option<Event> {
        self.blame = Some(cause);
        match verdict {
            Verdict::Stop => Some(Event::Stop(Stop::Requeue)),
            Verdict::Rewind(image) => Some(Event::Rewind { image }),
            verdict if matches!(state, State::Running(_)) => Some(Event::Condemn(verdict)),
            verdict => {
                self.pending = Some(verdict);
                None
            }
        }
    }

    /// Why the job, or one of its processes, ended so by itself; once for each life.
    pub(super) fn cause_of(&mut self, ended: Ended, now: Instant) -> Cause {
        let mut facts = Facts::default();
        if ended != Ended::Exit(0)
            && let Some(mut witness) = self.witness.take()
        {
            let mut evidence = witness.testify(&self.gpus.kin);
            facts.memory = evidence.memory;
            let switches = evidence.faults.iter_mut().filter(|fault| fault.xid == xid::SWITCH_TIMEOUT);
            switches.for_each(|fault| fault.beside = gpu::other_at(&fault.gpu));
            let ours = evidence.faults.iter().filter(|fault| self.gpus.hears(fault) == Said::Fault);
            let logged: Vec<u32> = ours.map(|fault| fault.xid).collect();
            facts.xids = self.gpus.recent(now).chain(logged).collect();
        }
        judge(ended, &facts)
    }

    /// Determines the cause of an end; called once for each life.
    fn why_ended(&mut self, ended: Ended, state: &State, now: Instant) -> Cause {
        let by_us = match state {
            // It was killed when it had ended already.
            State::Ending { deadline: None, stop: Ending::Stop(_) | Ending::Lost | Ending::Condemned, .. }
                if ended == Ended::Exit(0) =>
            {
                None
            }
            State::Ending { stop: Ending::Lost, .. } => Some(Cause::SnapshotLost),
            State::Ending { stop: Ending::Suspend, .. } => Some(Cause::Suspended),
            State::Ending { stop: Ending::Rewind(_), .. } => self.blame.clone().or(Some(Cause::Rewound)),
            State::Ending { .. } => self.blame.clone().or(Some(Cause::Requested)),
            _ => None,
        };
        let cause = match by_us {
            None => self.cause_of(ended, now),
            by_us => judge(ended, &Facts { by_us, ..Facts::default() }),
        };
        self.work.life_ends(cause == Cause::Completed, now);
        if !matches!(cause, Cause::Completed | Cause::Exit { .. } | Cause::Signal { .. }) && !cause.is_wanted() {
            tracing::warn!("cause of the end: {cause}");
        }
        cause
    }
}

impl Owner<'_> {
    /// Starts the threads that the configuration needs.
    pub(super) fn watch_begin(&mut self) {
        self.watch.output.from = self.output_lengths();
        self.watch.log = Listener::new(|work| self.spawn("kernel-log", work)).ok();
        let setup = Arc::clone(self.setup);
        let beats = setup.sockets.beats.as_ref().map(|beats| beats.count()).unwrap_or_default();
        let detector = HangDetector::new(&setup.config.watch, &self.setup.output, setup.folder.log_dir(), beats);
        let (orders, told) = mpsc::channel();
        self.watch.detector = Some(orders);
        let sender = self.threads.sender.clone();
        self.spawn("watch", move || {
            detector.keep(&told, |life, finding| {
                let _ = sender.send(Message::Watched(Finding::HangDetector(life, finding)));
            });
        });
        if setup.config.rules.iter().any(|rule| rule.matches.is_of_output()) {
            let files = self.setup.output.clone();
            let (turn, sender, setup) =
                (self.watch.output.turn.clone(), self.threads.sender.clone(), Arc::clone(&setup));
            self.spawn("lines", move || {
                let report = |hit| sender.send(Message::Watched(Finding::Line(hit))).is_ok();
                if let Err(error) =
                    files.open().and_then(|files| lines::watch(files, &setup.config.rules, &turn, report))
                {
                    tracing::error!(
                        "cannot watch the job's output, so rules for it apply only at the job's end: {error}"
                    );
                }
            });
        }
        if Path::new("/dev/nvidiactl").exists() {
            let (root, kin, sender) =
                (Arc::clone(&self.watch.gpus.root), self.watch.gpus.kin.clone(), self.threads.sender.clone());
            let report = move |fault| sender.send(Message::Watched(Finding::Fault(Box::new(fault)))).is_ok();
            self.spawn("gpu-faults", move || gpu::watch_faults(&root, &kin, report));
        }
        self.watch_deaths();
        self.watch_notices();
    }

    fn output_lengths(&self) -> [u64; 2] {
        self.setup.output.lengths()
    }

    pub(super) fn watch_life(&mut self, job: &Job) {
        let lengths = self.output_lengths();
        self.watch.life_begins(self.life.number(), job.root.pid(), lengths, Instant::now());
        self.reporting.published.hang = None;
        self.reporting.published.gpu_fault = None;
    }

    /// Called after every step: findings during a snapshot are handled when the job runs.
    pub(super) fn watch_follows(&mut self) {
        let goes = matches!(self.machine.state(), State::Running(_)) && self.life.ended().is_none();
        if let Some(verdict) = self.watch.follow(goes) {
            self.step(Event::Condemn(verdict));
        }
    }

    pub(super) fn watched(&mut self, finding: Finding) {
        match finding {
            Finding::HangDetector(life, finding) if self.life.is_present(life) => self.noticed(finding),
            Finding::Line(hit) if self.life.is_present(hit.life) && self.life.ended().is_none() => self.matched(&hit),
            Finding::Fault(fault) => self.faulted(&fault),
            Finding::Process(Noticed::Dying(death)) => self.process_dies(&death),
            Finding::Process(Noticed::Died(death)) => self.process_died(death),
            Finding::Notice(change) => self.announced(change),
            Finding::Quiet => self.step(Event::Quiet),
            Finding::HangDetector(..) | Finding::Line(_) => {}
        }
    }

    fn noticed(&mut self, finding: hang_detector::Finding) {
        match finding {
            hang_detector::Finding::Moves(start, what) => self.checks.proofs.moves(start, what),
            hang_detector::Finding::Silent(idle) => tracing::warn!("the job has printed nothing for {}", shown(idle)),
            hang_detector::Finding::GoesOn(what) => {
                tracing::info!("the job is making progress again (was: {what})");
                self.reporting.published.hang = None;
                self.tell(What::GoesOn { what });
                self.publish();
            }
            hang_detector::Finding::Hung { what, .. } if !self.watch.hears_hang(what, self.machine.state()) => {}
            hang_detector::Finding::Hung { what, idle, stacks } => {
                let name = stacks.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
                self.hung(what, idle, name);
            }
        }
    }

    fn hung(&mut self, what: Missing, idle: Duration, stacks: Option<String>) {
        let cause = Cause::Hang { what };
        let words = format!("{what} for {}", shown(idle));
        self.watch.stuck = self.checks.proofs.since_last(what);
        let setup = Arc::clone(self.setup);
        let (action, verdict) = match (self.ruled_for(&cause, &words), setup.config.watch.action) {
            (Some((action, verdict)), _) => (action, Some(verdict)),
            (None, HangAction::Notify) => ("notify".into(), None),
            (None, HangAction::Restart) => ("restart".into(), Some(Verdict::Restart)),
            (None, HangAction::SnapshotAndStop) => ("snapshot-and-stop".into(), Some(Verdict::Stop)),
        };
        let stuck = std::mem::take(&mut self.watch.stuck);
        let restored = self.machine.state().life().map(|life| life.from);
        let verdict = verdict.map(|verdict| of_a_hang(verdict, restored, stuck));
        let of_group = match &verdict {
            Some(Verdict::Hung(stuck)) => self.back_before(stuck, restored.and_then(image_of)),
            _ => None,
        };
        let at = stacks.as_ref().map_or_else(String::new, |name| format!("; stacks are in log/{name}"));
        tracing::error!("the job hangs: {words} ({action}){at}");
        self.reporting.published.hang = Some(words);
        self.tell(What::Hung { what, idle_us: micros(idle), stacks, action });
        if let Some(Verdict::Hung(images)) = verdict.as_ref().filter(|_| of_group.is_none()) {
            let names: Vec<String> = images.iter().map(ToString::to_string).collect();
            if !names.is_empty() {
                tracing::warn!(
                    "the images {} were taken during the hang: restarts use older ones first",
                    names.join(", ")
                );
            }
        }
        match (of_group, verdict) {
            (Some(OutOfHang::Restart), _) => self.carry(cause, Verdict::Restart),
            (Some(OutOfHang::GiveUp { why }), _) => self.carry(cause, Verdict::GiveUp { why }),
            (Some(OutOfHang::Back(number)), _) => {
                tracing::warn!(
                    "asking the group to go back to {number}: newer group images were taken during the hang"
                );
                self.watch.is_to_end(cause);
                self.leave_hang(number);
            }
            (None, Some(verdict)) => self.carry(cause, verdict),
            (None, None) => self.publish(),
        }
    }

    /// What the first rule for this cause leads to, in a job that runs.
    pub(super) fn ruled_for(&mut self, cause: &Cause, why: &str) -> Option<(String, Verdict)> {
        let setup = Arc::clone(self.setup);
        let (n, rule) = rules::first(&setup.config.rules, &Case { cause, ended: None, lines: &[] })?;
        Some((rule.action.to_string(), self.by_rule(n, why)))
    }

    /// A line of the output matched a rule.
    fn matched(&mut self, hit: &Hit) {
        let Some(rule) = self.setup.config.rules.get(hit.rule) else { return };
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
        let follows = match self.watch.gpus.hears(fault) {
            Said::Fault => None,
            Said::Follows(death) | Said::Outside(_, death) => Some(death),
            Said::Others(named) if remedy.needs_drain() && !xid::may_follow_a_death(fault.xid) => {
                return tracing::error!(
                    "GPU {}: {words}. It struck {named}, which does not belong to the job",
                    fault.gpu
                );
            }
            Said::Others(named) => {
                return tracing::info!(
                    "GPU {}: {words}. It was caused by {named}, which does not belong to the job",
                    fault.gpu
                );
            }
        };
        if let Some(death) = follows {
            tracing::info!("GPU {}: {}, because {death}", fault.gpu, named(fault.xid));
            let gpu = fault.gpu.clone();
            self.tell(What::GpuFault { gpu, xid: fault.xid, words, follows: Some(death) });
            return;
        }
        match remedy {
            xid::Remedy::Nothing => tracing::info!("GPU {}: {words}", fault.gpu),
            _ if remedy.needs_drain() => {
                tracing::error!("GPU {}: {words}; do not start a job on it until that is done", fault.gpu)
            }
            _ => tracing::error!("GPU {}: {words}", fault.gpu),
        }
        self.tell(What::GpuFault { gpu: fault.gpu.clone(), xid: fault.xid, words: words.clone(), follows: None });
        if remedy == xid::Remedy::Nothing || self.life.ended().is_some() {
            return;
        }
        self.watch.gpus.faults.push((Instant::now(), fault.xid));
        self.reporting.published.gpu_fault = Some(words.clone());
        let cause = Cause::GpuFault { xid: fault.xid };
        let rule = rules::first(&self.setup.config.rules, &Case { cause: &cause, ended: None, lines: &[] });
        match rule.map(|(n, _)| n) {
            Some(n) => {
                let verdict = self.by_rule(n, &words);
                self.carry(cause, verdict);
            }
            None => self.publish(),
        }
    }

    /// What this rule, counted from 0, decides now. It counts as carried out.
    fn by_rule(&mut self, n: usize, why: &str) -> Verdict {
        let setup = Arc::clone(self.setup);
        let Some(rule) = setup.config.rules.get(n) else { return Verdict::Restart };
        let number = n + 1;
        tracing::warn!("rule {number} ({}): {why}", rule.action);
        self.tell(What::RuleMatched { rule: number, action: rule.action.to_string(), why: why.into() });
        match self.watch.ruled(n, rule, why) {
            Ruled::Verdict(verdict) => verdict,
            Ruled::Back(images) => self.back_by(images),
        }
    }

    /// Rewinds to the Nth newest image; 1 is the newest. Images of a hang do not count. Newer images then belong to an
    /// abandoned line.
    fn back_by(&mut self, images: usize) -> Verdict {
        let of_group = self.group.as_ref().map(|member| Ok(member.usable()));
        let good = of_group.unwrap_or_else(|| self.good_images()).unwrap_or_else(|error| {
            tracing::error!("cannot read the images: {}", chain(&error));
            Vec::new()
        });
        let Some(image) = target(&good, &self.watch.stuck, images) else {
            tracing::warn!("there is no image to rewind to");
            return Verdict::Restart;
        };
        if !self.is_in_group() {
            self.line.aim(Target::new(image, good.first() != Some(&image)));
        }
        tracing::warn!("rewinding to image {image}");
        Verdict::Rewind(image)
    }

    /// What a member of a group does when its job hangs: the group would use its newest image.
    fn back_before(&self, stuck: &BTreeSet<ImageId>, restored: Option<ImageId>) -> Option<OutOfHang> {
        let member = self.group.as_ref()?;
        let stuck = stuck.iter().filter_map(|image| member.group_image_of(*image)).collect();
        let restored = restored.and_then(|image| member.group_image_of(image));
        let rewinds = restored.map_or(0, |number| member.rewinds_to(number));
        Some(before_hang(&member.trusted(), &stuck, restored, rewinds))
    }

    /// Ends the running job, for this cause.
    pub(super) fn carry(&mut self, cause: Cause, verdict: Verdict) {
        if let Some(event) = self.watch.condemn(cause, verdict, self.machine.state()) {
            self.step(event);
        }
    }

    /// Lets the rules decide about an end that we did not cause.
    pub(super) fn judge_end(&mut self, ended: Ended, cause: &Cause) {
        let setup = Arc::clone(self.setup);
        let rules = &setup.config.rules;
        let by_itself = match self.machine.state() {
            State::Ending { stop, .. } => *stop == Ending::Lost,
            _ => !self.machine.is_stopping(),
        };
        let lines = if rules.iter().any(|rule| rule.matches.log.is_some()) {
            self.setup.output.open().map_or_else(|_| Vec::new(), |files| lines::last(files, self.watch.output.from))
        } else {
            Vec::new()
        };
        self.watch.life_ends(self.output_lengths());
        if !by_itself || *cause == Cause::Completed {
            return;
        }
        let case = Case { cause, ended: Some(ended), lines: &lines };
        if let Some((n, _)) = rules::first(rules, &case) {
            let verdict = self.by_rule(n, &cause.to_string());
            self.step(Event::Judged(verdict));
        }
    }

    /// Determines the cause of an end; called once for each life.
    pub(super) fn why_ended(&mut self, ended: Ended) -> Cause {
        let cause = self.watch.why_ended(ended, self.machine.state(), Instant::now());
        self.reporting.published.last_end = Some(LastEnd::now(Some(ended), cause.clone()));
        cause
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::state::Life;

    fn life(now: Instant) -> Life {
        Life { from: StartPoint::Cold, since: now, next: None, failures: 0, missed: 0 }
    }

    fn ending(stop: Ending, now: Instant) -> State {
        State::Ending { stop, deadline: None, life: life(now) }
    }

    fn rule(text: &str) -> Rule {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn what_is_found_during_a_snapshot_waits_for_its_end() {
        let now = Instant::now();
        let hang = || Cause::Hang { what: Missing::Output };
        let snapshot = State::Snapshotting { life: life(now), then: None, ended: None };
        let mut watch = Watch::default();
        assert_eq!(watch.condemn(hang(), Verdict::Restart, &snapshot), None);
        assert_eq!((watch.follow(false), watch.follow(true)), (None, Some(Verdict::Restart)));
        assert_eq!(watch.follow(true), None, "once");
        let running = State::Running(life(now));
        assert_eq!(watch.condemn(hang(), Verdict::Restart, &running), Some(Event::Condemn(Verdict::Restart)));
        assert_eq!(
            watch.condemn(hang(), Verdict::Stop, &snapshot),
            Some(Event::Stop(Stop::Requeue)),
            "it can wait itself"
        );
        assert_eq!(watch.why_ended(Ended::Signal(9), &ending(Ending::Condemned, now), now), hang());
    }

    #[test]
    fn a_hang_that_is_found_as_a_snapshot_begins_is_not_forgotten() {
        let now = Instant::now();
        let (orders, told) = mpsc::channel();
        let watch = Watch { detector: Some(orders), ..Watch::default() };
        assert!(watch.hears_hang(Missing::Output, &State::Running(life(now))));
        assert!(told.try_recv().is_err());
        let snapshot = State::Snapshotting { life: life(now), then: None, ended: None };
        assert!(!watch.hears_hang(Missing::Work, &snapshot));
        assert!(matches!(told.try_recv(), Ok(Order::Unheard(Missing::Work))));
    }

    #[test]
    fn an_end_by_us_has_our_cause_unless_the_job_was_at_its_end() {
        let now = Instant::now();
        let image = ImageId::new(1, chrono::DateTime::UNIX_EPOCH);
        let why = |stop, ended| Watch::default().why_ended(ended, &ending(stop, now), now);
        assert_eq!(why(Ending::Lost, Ended::Signal(9)), Cause::SnapshotLost);
        assert_eq!(why(Ending::Lost, Ended::Exit(0)), Cause::Completed);
        assert_eq!(why(Ending::Suspend, Ended::Signal(9)), Cause::Suspended);
        assert_eq!(why(Ending::Rewind(image), Ended::Signal(9)), Cause::Rewound);
        assert_eq!(why(Ending::Stop(Stop::Requeue), Ended::Signal(9)), Cause::Requested);
        assert_eq!(why(Ending::Stop(Stop::Requeue), Ended::Exit(0)), Cause::Completed);
    }

    #[test]
    fn a_group_does_not_leave_the_image_that_it_was_restored_from_at_once() {
        let all = [4, 3, 2, 1].map(Number);
        let stuck = |ids: &[u64]| ids.iter().map(|n| Number(*n)).collect::<BTreeSet<_>>();
        let to = |stuck: &BTreeSet<Number>, restored: Option<u64>, rewinds| {
            before_hang(&all, stuck, restored.map(Number), rewinds)
        };
        let back = |number| OutOfHang::Back(Number(number));
        // The job was restored from 2, went on, and hung after 3.
        assert_eq!(to(&stuck(&[4]), Some(2), 0), back(3));
        // It came no further: only what it took since then is left.
        assert_eq!(to(&stuck(&[4, 3, 2]), Some(2), 0), back(2));
        assert_eq!(to(&stuck(&[4, 3, 2]), Some(2), SAME_IMAGE), back(1));
        assert!(
            matches!(to(&stuck(&[4, 3, 2, 1]), Some(1), SAME_IMAGE), OutOfHang::GiveUp { .. }),
            "there is no other"
        );
        assert_eq!(to(&stuck(&[4, 3, 2]), Some(9), 0), back(1), "it cannot be used any more");
        // It took nothing: a restart, which counts as a failure.
        assert_eq!(to(&stuck(&[4]), Some(4), 0), OutOfHang::Restart);
        assert_eq!(to(&stuck(&[4]), Some(4), SAME_IMAGE), OutOfHang::Restart);
        // It hangs since its first start.
        assert_eq!(to(&stuck(&[4, 3]), None, 0), back(2));
        assert_eq!(to(&stuck(&[4, 3, 2, 1]), None, 0), OutOfHang::Restart, "the newest one comes first");
        assert_eq!(before_hang(&[], &stuck(&[1]), None, 0), OutOfHang::Restart);
    }

    #[test]
    fn a_hang_is_not_restored_from_an_image_of_it() {
        let image = |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH);
        let stuck = || BTreeSet::from([image(4), image(5)]);
        let from = |n| Some(StartPoint::Image(image(n)));
        assert_eq!(of_a_hang(Verdict::Restart, from(3), stuck()), Verdict::Hung(stuck()));
        assert_eq!(of_a_hang(Verdict::Stop, from(3), stuck()), Verdict::Stop);
        assert_eq!(of_a_hang(Verdict::Stop, Some(StartPoint::Cold), stuck()), Verdict::Stop);
        assert_eq!(of_a_hang(Verdict::Stop, from(4), stuck()), Verdict::Hung(stuck()), "or every run stops so");
        // A rule that rewinds, and a group.
        let good = [5, 4, 3, 2].map(image);
        assert_eq!(target(&good, &stuck(), 1), Some(image(3)));
        assert_eq!(target(&good, &stuck(), 2), Some(image(2)));
        assert_eq!(target(&good, &stuck(), 9), Some(image(2)));
        assert_eq!(target(&good, &BTreeSet::new(), 1), Some(image(5)));
        assert_eq!(target(&good[..2], &stuck(), 1), Some(image(5)), "there is no other");
        assert_eq!(target(&[], &stuck(), 1), None);
    }

    #[test]
    fn a_rule_sends_the_job_back_so_often_and_no_more() {
        let mut watch = Watch::default();
        let back = rule("match = { log = \"nan\" }\naction = \"rewind\"\nmax-rewinds = 2\nimages = 3");
        assert_eq!(watch.ruled(0, &back, "nan"), Ruled::Back(3));
        assert_eq!(watch.ruled(0, &back, "nan"), Ruled::Back(3));
        assert!(matches!(watch.ruled(0, &back, "nan"), Ruled::Verdict(Verdict::GiveUp { .. })));
        assert_eq!(watch.ruled(1, &back, "nan"), Ruled::Back(3), "another rule has its own count");
    }
}
