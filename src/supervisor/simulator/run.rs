//! The supervisor in the model: what its owner does around the state machine, with the decisions of the product and a
//! simulated world.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::model::{End, Image, Job, Record, candidate};
use super::plants::Plant;
use super::ranks::Ranks;
use super::restores::Restore;
use super::snapshots::{Persist, Shot};
use super::world::{Happening, World, tell};
use crate::config::Staging;
use crate::policy::{Images, Mark, StartPoint};
use crate::supervisor::line::{Begin, Line};
use crate::supervisor::memory::{self, AtTheEnd};
use crate::supervisor::proof::{Proofs, counts};
use crate::supervisor::state::{Action, Event, Finish, Harm, Machine, State};
use crate::supervisor::stops::Stops;
use crate::supervisor::transfers::StoreRetry;
use crate::supervisor::unread::{AGAIN, Unread};
use rekindle_base::cause::{self, Facts, MemoryFacts, Missing};
use rekindle_engine::snapshot::Deaths;
use rekindle_os::spawn::Ended;
use rekindle_store::{BadWhy, ImageId};

/// A supervisor.
pub(super) struct Run {
    pub(super) machine: Machine<'static>,
    pub(super) line: Line,
    /// The lineage of the images that it takes.
    pub(super) lineage: Rc<str>,
    pub(super) proofs: Proofs,
    pub(super) stops: Stops,
    pub(super) deaths: Deaths,
    /// Deaths of ranks, and the ranks that are watched.
    pub(super) ranks: Ranks,
    /// How often the job was started.
    pub(super) lives: u32,
    /// Whether it has a job.
    pub(super) has_job: bool,
    pub(super) ended: Option<Ended>,
    /// Whether the end of the job waits until the images can be read.
    pub(super) unread: Unread,
    pub(super) work: Work,
    /// Whether the memory of a suspended job was freed.
    pub(super) emptied: bool,
    pub(super) finish: Option<Finish>,
}

/// The clocks of the job's watch.
#[derive(Default)]
pub(super) struct Clocks {
    /// Since when they run.
    pub(super) since: Option<Instant>,
    /// How often they were started.
    pub(super) starts: u64,
}

/// Operations in progress, and the clocks that run beside them.
#[derive(Default)]
pub(super) struct Work {
    pub(super) clocks: Clocks,
    pub(super) start: Option<Restore>,
    /// The image that the job goes back to, from the request until the job runs.
    pub(super) goal: Option<ImageId>,
    pub(super) shot: Option<Shot>,
    pub(super) persist: Option<Persist>,
    pub(super) retry: StoreRetry,
    /// The number and the image of the upload to the replica.
    pub(super) replicating: Option<(u32, ImageId)>,
    pub(super) next_replicated: Option<ImageId>,
}

impl World {
    // ---- a run begins ----

    /// Starts as `rekindle run` does.
    pub(super) fn begin(&mut self) {
        if self.run.is_some() || self.fate.over {
            return;
        }
        if self.ground.disk.reads_fail {
            tell!(self, "the store cannot be read: no run begins");
            return self.come_back();
        }
        if let Err(why) = self.bring_newest() {
            tell!(self, "no run begins: {why}");
            return self.come_back();
        }
        let record = self.ground.record.clone().filter(|record| !record.completed);
        let Some(record) = record else {
            let lineage = self.lineage();
            return self.supervise(StartPoint::Cold, lineage, None, false);
        };
        let line = Line::new(record.lineage.to_string(), record.base);
        let again: Vec<ImageId> = self
            .ground
            .copies()
            .iter()
            .map(candidate)
            .filter(|it| line.gives_another_chance(it))
            .map(|it| it.id)
            .collect();
        again.into_iter().for_each(|id| self.set_mark(id, None));
        let begin = line.begin(self.ground.copies().iter().map(candidate), self.config.restart.cold_start);
        match begin {
            Begin::With(from) => self.supervise(from, record.lineage, record.base, false),
            Begin::OverImages => self.supervise(StartPoint::Cold, record.lineage, record.base, false),
            Begin::NoUsableImage if self.plant == Some(Plant::ColdOverImages) => {
                self.supervise(StartPoint::Cold, record.lineage, record.base, false);
            }
            Begin::NoUsableImage => {
                tell!(self, "no run begins: no image can be used");
                self.check_none_usable(&line);
                self.come_back();
            }
        }
    }

    /// Starts as `rekindle restore JOB/ID` does.
    pub(super) fn begin_from(&mut self, id: ImageId) {
        let newest = self.ground.copies().iter().map(candidate).find(|it| it.good).map(|it| it.id);
        let Some(lineage) = self.ground.image(id).map(|image| Rc::clone(&image.lineage)) else { return };
        self.set_mark(id, None);
        if newest == Some(id) {
            self.supervise(StartPoint::Image(id), lineage, None, true);
        } else {
            let lineage = self.lineage();
            self.supervise(StartPoint::Image(id), lineage, Some(id), true);
        }
    }

    fn supervise(&mut self, from: StartPoint, lineage: Rc<str>, base: Option<ImageId>, named: bool) {
        tell!(self, "a run begins from {from}, of {lineage}{}", if named { ", as asked" } else { "" });
        self.ground.area = true;
        self.ground.on_disk = self.config.snapshot.staging == Staging::Store;
        let (machine, actions) = Machine::new(self.config, from);
        let machine = if named { machine.asked_for() } else { machine };
        let watches = self.fate.watch.is_some() && self.plant != Some(Plant::HangProves);
        let watched = if watches { vec![Missing::Output] } else { Vec::new() };
        self.run = Some(Run {
            machine,
            line: Line::new(lineage.to_string(), base),
            lineage,
            proofs: Proofs::new(watched),
            stops: Stops::default(),
            deaths: Deaths::default(),
            ranks: Ranks::default(),
            lives: 0,
            has_job: false,
            ended: None,
            unread: Unread::default(),
            work: Work::default(),
            emptied: false,
            finish: None,
        });
        self.record(false);
        self.oracle.run_begins(named.then_some(from));
        self.carry_out(actions);
        self.persist_newest();
        self.replicate_newest();
    }

    pub(super) fn record(&mut self, completed: bool) {
        let Some(run) = &self.run else { return };
        self.ground.record = Some(Record { lineage: Rc::clone(&run.lineage), base: run.line.base, completed });
    }

    /// Starts it again, as a service manager does.
    fn come_back(&mut self) {
        match &mut self.fate.calm {
            None => {
                let wait = self.random.millis(500, 60_000);
                self.after(wait, Happening::Begin);
            }
            Some(calm) if !calm.begun => {
                calm.begun = true;
                self.after(Duration::from_secs(1), Happening::Begin);
            }
            Some(_) => self.fate.over = true,
        }
    }

    // ---- the machine ----

    pub(super) fn step(&mut self, event: Event) {
        self.step_at(event, self.now);
    }

    fn step_at(&mut self, event: Event, at: Instant) {
        let event = match event {
            Event::SnapshotMissed if self.plant == Some(Plant::LateRetry) => Event::SnapshotFailed(Harm::None),
            event => event,
        };
        tell!(self, "    event {}", in_a_trace(&event, self.now));
        let Some(run) = &mut self.run else { return };
        let actions = run.machine.step(event, at);
        let state = run.machine.state().name();
        tell!(self, "    state {state} {actions:?}");
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.act(action);
        }
        self.watch_follows();
        self.settle_suspension();
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start(from) => self.start(from),
            Action::Snapshot(reason) => self.snapshot(reason),
            Action::Cancel => self.call_off(),
            Action::Terminate => self.terminate(),
            Action::Kill => self.kill(),
            Action::Mark(mark) => self.mark(&mark),
            Action::NotRestored { image, .. } => {
                if self.plant == Some(Plant::MarkAfterOneFailure) {
                    let mark = Mark { image, why: BadWhy::DoesNotRestore, detail: String::new() };
                    self.mark(&mark);
                }
            }
            // Its GPUs fail by themselves only.
            Action::AwaitQuiet => {}
            Action::Announce { from, after } => {
                if let (StartPoint::Image(id), Some(run)) = (from, &mut self.run) {
                    run.work.goal = Some(id);
                }
                self.check_wait(after);
            }
            Action::Finish(finish) => self.finish(finish),
        }
    }

    pub(super) fn next_tick(&self) -> Option<Instant> {
        let run = self.run.as_ref().filter(|run| run.finish.is_none())?;
        let tick = run.machine.deadline().filter(|_| !run.unread.is_waiting() || run.machine.is_stopping())?;
        let late =
            self.plant == Some(Plant::BackOffOnTheWayDown) && matches!(run.machine.state(), State::Waiting { .. });
        Some(if late {
            tick.max(self.oracle.failed_at().map_or(tick, |at| at + self.config.restart.backoff))
        } else {
            tick
        })
    }

    pub(super) fn tick(&mut self) {
        self.step(Event::Tick);
    }

    // ---- proofs ----

    pub(super) fn next_proof(&self) -> Option<Instant> {
        let run = self.run.as_ref().filter(|run| run.finish.is_none() && counts(run.machine.state(), run.ended))?;
        run.proofs.next_wake(self.config.restart.min_uptime).map(|at| at.max(self.now))
    }

    pub(super) fn check_proofs(&mut self) {
        if self.run.as_ref().is_some_and(|run| run.finish.is_none() && counts(run.machine.state(), run.ended)) {
            self.note_proofs();
        }
    }

    fn note_proofs(&mut self) {
        let Some(run) = &mut self.run else { return };
        let due = run.proofs.due(self.config.restart.min_uptime, self.now);
        if due.is_empty() {
            return;
        }
        if self.ground.disk.writes_fail || self.ground.disk.reads_fail {
            if self.plant != Some(Plant::ProofForgotten) {
                run.proofs.not_written(due, self.now);
            }
            return;
        }
        self.check_no_hang(&due);
        tell!(self, "proven: {}", due.iter().map(|id| id.sequence().to_string()).collect::<Vec<_>>().join(", "));
        let there: BTreeSet<ImageId> = self.ground.copies().iter().map(|(image, _)| image.id).collect();
        self.ground.proven.extend(due);
        self.ground.proven.retain(|id| there.contains(id));
    }

    // ---- the end of a life ----

    pub(super) fn life_ends(&mut self, life: u32, end: End, own: bool) {
        let Some(job) = self.job.as_mut().filter(|job| job.life == life && job.ended.is_none()) else { return };
        if own && job.hung.is_some() {
            return;
        }
        job.ended = Some(end);
        tell!(self, "the job ends: {}{}", end.ended, if end.want_of_memory { ", for want of memory" } else { "" });
        self.note_proofs();
        let Some(run) = &mut self.run else { return };
        run.proofs.end_of_life();
        run.ranks.deaths.life_ends();
        run.ended = Some(end.ended);
        let ours = matches!(run.machine.state(), State::Ending { .. });
        let facts = Facts {
            by_us: None,
            memory: MemoryFacts { counted: end.want_of_memory, logged: None },
            xids: end.xid.into_iter().collect(),
        };
        let excused = !ours && cause::judge(end.ended, &facts).excuses();
        self.oracle_sees_end(end, excused);
        if excused {
            self.step(Event::Excused);
        }
        self.report_end();
    }

    pub(super) fn report_end(&mut self) {
        let Some(ended) = self.run.as_ref().and_then(|run| run.ended) else { return };
        let (now, images) = (self.now, self.images());
        let Some(run) = &mut self.run else { return };
        let images = match images {
            Ok(images) => images,
            Err(_)
                if self.plant != Some(Plant::UnreadIsNone)
                    && run.unread.waits(run.machine.state(), run.machine.is_stopping(), now) =>
            {
                run.unread.begins(now);
                return self.after(AGAIN, Happening::Report);
            }
            Err(_) => Images { unread: true, ..Images::default() },
        };
        let at = run.unread.over().unwrap_or(now);
        if !matches!(run.machine.state(), State::Snapshotting { .. }) {
            run.has_job = false;
        }
        let newest = self.newest_without_hang(&images.good);
        self.oracle_sees_report();
        self.oracle_sees_progress(newest, at);
        self.step_at(Event::Ended { ended, images }, at);
    }

    /// Reports an end whose images could not be read before.
    pub(super) fn report_again(&mut self) {
        if self.run.as_ref().is_some_and(|run| run.unread.is_due(self.now) && run.ended.is_some()) {
            self.report_end();
        }
    }

    /// The images that the job can continue from.
    pub(super) fn images(&self) -> Result<Images, String> {
        let Some(run) = &self.run else { return Err("there is no run".into()) };
        if self.ground.disk.reads_fail {
            return Err("EIO".into());
        }
        let copies = self.ground.copies();
        let mut images = run.line.images(copies.iter().map(candidate), self.ground.proven.clone());
        if self.plant == Some(Plant::SecondNewest) && images.good.len() > 1 {
            images.good.remove(0);
        }
        Ok(images)
    }

    fn kill(&mut self) {
        if let Some(job) = &self.job {
            let life = job.life;
            self.after(
                Duration::from_millis(20),
                Happening::Ends { life, end: End::signal(libc::SIGKILL), own: false },
            );
        }
    }

    fn terminate(&mut self) {
        let Some(life) = self.job.as_ref().map(|job| job.life) else { return };
        if self.random.chance(20) {
            tell!(self, "the job ignores SIGTERM");
            return;
        }
        let ended = if self.random.chance(30) { Ended::Exit(0) } else { Ended::Signal(libc::SIGTERM) };
        let wait = self.random.millis(20, 3000);
        self.after(wait, Happening::Ends { life, end: End::by_itself(ended), own: true });
    }

    fn mark(&mut self, mark: &Mark) {
        tell!(self, "image {} is marked: {}", mark.image.sequence(), mark.why);
        self.check_mark(mark);
        if !self.ground.disk.writes_fail {
            self.set_mark(mark.image, Some(mark.why));
        }
    }

    /// Sets the mark on every copy.
    pub(super) fn set_mark(&mut self, id: ImageId, mark: Option<BadWhy>) {
        for slot in &mut self.ground.slots {
            slot.image.iter_mut().filter(|(other, _)| *other == id).for_each(|(_, copy)| copy.mark = mark);
        }
        if let Some(Image { stored: Some(copy), .. }) = self.ground.image_mut(id) {
            copy.mark = mark;
        }
    }

    // ---- the end ----

    fn finish(&mut self, finish: Finish) {
        tell!(self, "finish: {finish:?}");
        self.job = None;
        self.check_finish(&finish);
        let Some(run) = &mut self.run else { return };
        (run.has_job, run.work.start, run.work.shot) = (false, None, None);
        let left = memory::at_the_end(&finish, run.stops.is_at_once());
        run.finish = Some(finish);
        match left {
            AtTheEnd::NotNeeded => run.work.persist.iter_mut().for_each(|persist| persist.cancelled = true),
            AtTheEnd::LeftThere => {}
            AtTheEnd::Stored => self.persist_newest(),
        }
        self.conclude();
    }

    /// Ends the run once nothing is being stored.
    pub(super) fn conclude(&mut self) {
        let Some(run) = self.run.as_ref().filter(|run| run.finish.is_some() && run.work.persist.is_none()) else {
            return;
        };
        let (Some(finish), at_once) = (run.finish.clone(), run.stops.is_at_once()) else { return };
        let completed = finish == Finish::Completed;
        let only_here = self.only_in_memory().filter(|_| !completed);
        let left = only_here.filter(|_| !at_once);
        let told = if self.plant == Some(Plant::MemoryIsSuccess) { finish } else { finish.with_left_in_memory(left) };
        tell!(self, "the run is over: {told:?}");
        self.check_told(&told, at_once);
        if only_here.is_none() {
            if completed {
                // Nobody continues from these images.
                self.oracle.excuse();
            }
            self.ground.lose_memory();
        }
        self.replicate_at_the_end();
        self.record(completed);
        self.run = None;
        self.oracle.run_ends();
        if completed {
            self.fate.over = true;
        } else {
            self.come_back();
        }
    }

    /// The supervisor is gone, and its job with it.
    pub(super) fn supervisor_dies(&mut self) {
        self.run = None;
        self.job = None;
        self.oracle.run_ends();
    }

    /// A life of the job begins.
    pub(super) fn bring_to_life(&mut self, from: StartPoint) {
        let life = self.number();
        let image = match from {
            StartPoint::Image(id) => self.ground.image(id).cloned(),
            StartPoint::Cold => None,
        };
        let work = image.as_ref().map_or(Duration::ZERO, |image| image.work);
        let doom = image.as_ref().and_then(|image| image.doom);
        let hung = image.as_ref().filter(|image| image.hung).map(|_| self.now);
        let gone = image.map(|image| image.gone).unwrap_or_default();
        self.job = Some(Job { life, from, since: self.now, work, doom, hung, dead: Vec::new(), gone, ended: None });
        if let Some(doom) = doom {
            let end = End::by_itself(doom.ended);
            self.after(doom.at.saturating_sub(work), Happening::Ends { life, end, own: true });
        }
        if let Some(total) = self.fate.total {
            let end = End::by_itself(Ended::Exit(0));
            self.after(total.saturating_sub(work), Happening::Ends { life, end, own: true });
        }
        if let (Some(_), Some(watch)) = (hung, self.fate.watch) {
            self.after(watch, Happening::Hangs { life });
        }
    }
}

/// An event for the trace. Times are shown as the time left until then, because the clock differs in each process.
fn in_a_trace(event: &Event, now: Instant) -> String {
    let left = |until: &Instant| until.saturating_duration_since(now);
    match event {
        Event::Hold(until) => format!("Hold({:?})", left(until)),
        Event::StopBy(stop, until) => format!("StopBy({stop:?}, {:?})", left(until)),
        other => format!("{other:?}"),
    }
}
