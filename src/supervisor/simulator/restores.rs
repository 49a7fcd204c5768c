//! Launches and restores in the model: whether they succeed, and how the product treats a failure.

use std::time::Duration;

use super::model::candidate;
use super::plants::Plant;
use super::run::Run;
use super::world::{Happening, World, tell};
use crate::policy::{Failure, StartPoint};
use crate::supervisor::failed::{Failed, Lives, without_damaged};
use crate::supervisor::line::Target;
use crate::supervisor::state::{Event, Obstacle, State, Wish};
use rekindle_criu::{Log, RunError};
use rekindle_engine::parts::gpu::put_back as gpu;
use rekindle_engine::restore::{self, RollbackError};
use rekindle_os::spawn::Ended;
use rekindle_store::{BadWhy, ImageId};

/// A launch or a restore under way.
#[derive(Debug)]
pub(super) struct Restore {
    pub(super) op: u32,
    pub(super) from: StartPoint,
    pub(super) cancelled: bool,
    pub(super) trouble: Option<Trouble>,
}

/// Trouble in a restore or a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Somebody kills CRIU.
    CriuKilled,
    /// Somebody kills a process of the job that CRIU works on.
    TaskKilled,
    /// CRIU refuses without a reason.
    NoReason,
    /// CRIU hangs until its time limit.
    Slow,
    /// A step of ours fails.
    OurStep,
    /// The job cannot be resumed. Only in a dump.
    Lost,
    /// CRIU fails for a temporary reason. Only in a dump.
    Moment,
}

const KILLED: Ended = Ended::Signal(libc::SIGKILL);

impl Trouble {
    pub(super) fn error(self) -> RunError {
        let log = Log::default();
        match self {
            Trouble::CriuKilled => RunError::Gone { ended: KILLED, log },
            Trouble::TaskKilled => RunError::TaskDied { pid: 1, ended: KILLED, log },
            Trouble::NoReason => RunError::Refused { log },
            Trouble::Slow => RunError::Timeout { limit: Duration::from_secs(600), log },
            Trouble::OurStep | Trouble::Lost => RunError::Hook { what: "a step of ours failed".into() },
            Trouble::Moment => RunError::Refused {
                log: ["(00.1) Error (criu/cr-dump.c:1): Zombies with threads are not supported"].into_iter().collect(),
            },
        }
    }
}

impl World {
    // ---- a start ----

    pub(super) fn start(&mut self, from: StartPoint) {
        self.check_start(from);
        let op = self.number();
        let trouble = self.oracle.armed.take();
        let Some(run) = &mut self.run else { return };
        run.work.start = Some(Restore { op, from, cancelled: false, trouble });
        if let StartPoint::Image(id) = from {
            run.work.goal = Some(id);
        }
        let takes = match (from, trouble) {
            (StartPoint::Cold, _) => self.random.millis(20, 100),
            (StartPoint::Image(_), Some(Trouble::Slow)) => self.config.restart.restore_timeout,
            (StartPoint::Image(_), _) => self.random.millis(200, 5000),
        };
        tell!(self, "a start from {from}{}", trouble.map(|it| format!(", with {it:?}")).unwrap_or_default());
        self.after(takes, Happening::Restored { op });
    }

    /// Cancels the operation in progress.
    pub(super) fn call_off(&mut self) {
        let wait = self.random.millis(5, 200);
        let Some(run) = &mut self.run else { return };
        if let Some(start) = &mut run.work.start {
            start.cancelled = true;
            let op = start.op;
            self.after(wait, Happening::Restored { op });
        } else if let Some(shot) = &mut run.work.shot {
            shot.cancelled = true;
            let op = shot.op;
            self.after(wait, Happening::Taken { op });
        }
    }

    pub(super) fn start_over(&mut self, op: u32) {
        let Some(start) = self.run.as_mut().and_then(|run| run.work.start.take_if(|start| start.op == op)) else {
            return;
        };
        let result = match start.from {
            StartPoint::Cold => Ok(()),
            StartPoint::Image(id) => self.restore(id, &start),
        };
        match result {
            Ok(()) => self.started(start.from),
            Err(event) => {
                tell!(self, "it failed: {event:?}");
                let images = self.images();
                let Some(run) = &mut self.run else { return };
                let next = run.machine.state().rewinds_next();
                let (missed, event) = run.line.did_not_arrive(start.from, next, *event, || images);
                if missed.is_some() && missed == self.oracle.asked {
                    // Who asked is told. If the job continues from that image after all, it is because of others.
                    self.oracle.asked = None;
                }
                self.oracle_sees_failure(&event, start.trouble.is_some());
                self.step(event);
            }
        }
    }

    /// Whether the restore succeeds; otherwise the resulting event.
    fn restore(&mut self, id: ImageId, start: &Restore) -> Result<(), Box<Event>> {
        // A start that is almost over succeeds all the same.
        if start.cancelled && !self.random.chance(30) {
            return Err(self.failed(id, &restore::Error::Cancelled).into());
        }
        if self.ground.disk.reads_fail {
            return Err(Event::StoreAway { why: "EIO".into() }.into());
        }
        let copies = self.ground.copies();
        let mut of_it = copies.iter().filter(|(image, _)| image.id == id);
        let chosen = of_it.clone().find(|(_, copy)| copy.mark.is_none()).or_else(|| of_it.next());
        let Some((image, copy)) = chosen.map(|(image, copy)| (*image, *copy)) else {
            return Err(self.gone(id).into());
        };
        let refused = image.refused;
        let error = if let Some(trouble) = start.trouble {
            restore::Error::Criu(trouble.error())
        } else if self.ground.driver_silent {
            restore::Error::Gpu(gpu::Error::Timeout { limit: Duration::from_secs(600) })
        } else if self.ground.port_taken {
            let line = "(00.1) Error (criu/sk-inet.c:1): inet: Can't bind inet socket (id 5): Address already in use";
            restore::Error::Criu(RunError::Refused { log: [line].into_iter().collect() })
        } else if self.ground.memory_short {
            restore::Error::Gpu(gpu::Error::NoProcess(1))
        } else if copy.damaged {
            restore::Error::Damaged { id, what: "criu/pages-1.img".into() }
        } else if image.no_files {
            restore::Error::Rollback(RollbackError::Gone("/tmp/x".into()))
        } else if let Some(why) = refused {
            restore::Error::Criu(RunError::Refused { log: [why].into_iter().collect() })
        } else {
            return Ok(());
        };
        Err(self.failed(id, &error).into())
    }

    /// A chosen image does not exist any more.
    fn gone(&self, id: ImageId) -> Event {
        if self.plant == Some(Plant::WaitsForWhatIsGone) {
            return Event::StartFailed { why: format!("there is no image {id}") };
        }
        match self.images() {
            Ok(images) => Event::gone(id, images),
            Err(why) => Event::StoreAway { why },
        }
    }

    /// The event that the product derives from the error.
    fn failed(&mut self, id: ImageId, error: &restore::Error) -> Event {
        let why = error.to_string();
        let lives = if self.run.as_ref().is_some_and(|run| run.lives > 0) { Lives::Some } else { Lives::None };
        let falls_back = || {
            let Some(run) = &self.run else { return false };
            let older = self.ground.copies().into_iter().filter(|(image, _)| image.id < id && !image.no_files);
            older.into_iter().any(|copy| run.line.has(&candidate(&copy)))
        };
        let failure = match Failed::of(error, why.clone(), lives, falls_back) {
            Failed::CalledOff | Failed::Machine => return Event::StartFailed { why },
            Failed::Misfit | Failed::NoFiles => return Event::Impossible { why, obstacle: Obstacle::Machine },
            Failed::Configuration => return Event::Impossible { why, obstacle: Obstacle::Configuration },
            Failed::Damaged => {
                let marked = !self.ground.disk.writes_fail && self.mark_damaged(id);
                return match self.images() {
                    Ok(images) => Event::ImageFailed {
                        image: id,
                        failure: Failure::Damaged,
                        images: without_damaged(images, id, marked),
                    },
                    Err(why) => Event::StoreAway { why },
                };
            }
            Failed::Image(failure) => failure,
        };
        match self.images() {
            Ok(images) => Event::ImageFailed { image: id, failure, images },
            Err(why) => Event::StoreAway { why },
        }
    }

    /// Marks the copy that was read: the first good one, in memory before the store.
    fn mark_damaged(&mut self, id: ImageId) -> bool {
        tell!(self, "image {} is marked: damaged", id.sequence());
        let slots = self.ground.slots.iter_mut().filter_map(|slot| slot.image.as_mut()).filter(|(it, _)| *it == id);
        let stored = self.ground.images.iter_mut().filter(|image| image.id == id).filter_map(|it| it.stored.as_mut());
        let copy = slots.map(|(_, copy)| copy).chain(stored).find(|copy| copy.mark.is_none());
        // If all are marked, the copy that was read is.
        let damaged = copy.as_ref().is_none_or(|copy| copy.damaged);
        if !damaged {
            self.oracle.violate(format!("image {id} is marked as damaged, and is not"));
            return false;
        }
        copy.into_iter().for_each(|copy| copy.mark = Some(BadWhy::Damaged));
        true
    }

    fn started(&mut self, from: StartPoint) {
        tell!(self, "the job runs, from {from}");
        let (now, lineage, copies) = (self.now, self.lineage(), self.ground.copies());
        let good = self.run.as_ref().map(|run| run.line.good(copies.iter().map(candidate))).unwrap_or_default();
        self.bring_to_life(from);
        let Some(run) = &mut self.run else { return };
        run.lives += 1;
        run.ended = None;
        run.has_job = true;
        let next = run.machine.state().rewinds_next();
        if run.line.arrived(from, next, || good.first().copied(), || lineage.to_string()).is_some() {
            run.lineage = lineage;
        }
        run.proofs.end_of_life();
        self.ranks_of_life();
        let Some(run) = &mut self.run else { return };
        if let StartPoint::Image(id) = from {
            run.proofs.wait_for(id, run.work.clocks.starts, now);
        }
        run.work.goal = None;
        self.record(false);
        self.oracle_sees_life(from);
        self.step(Event::Started);
    }

    // ---- a way back ----

    pub(super) fn rewind(&mut self) {
        let copies = self.ground.copies();
        let Some(run) =
            self.run.as_ref().filter(|run| run.finish.is_none() && run.machine.admits(Wish::Rewind).is_ok())
        else {
            return;
        };
        let good = run.line.good(copies.iter().map(candidate));
        if good.is_empty() {
            return;
        }
        let image = self.random.pick(&good);
        tell!(self, "a rewind to image {} is asked for", image.sequence());
        let Some(run) = &mut self.run else { return };
        run.line.aim(Target::new(image, good.first() != Some(&image)));
        run.work.goal = Some(image);
        self.oracle.asked = Some(image);
        self.step(Event::Rewind { image });
    }
}

impl Run {
    /// Whether its job is alive, as far as it knows.
    pub(super) fn is_running(&self) -> bool {
        matches!(self.machine.state(), State::Running(_))
    }
}
