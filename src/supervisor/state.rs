//! The life of a job as a pure function: `step(state, event, now)` gives the next state and what is to be done.
//!
//! ```text
//!            +--> Starting --(started)--> Running <--(done)--> Snapshotting
//!            |       |                      |                      |
//!            |    (failed)                (ended)                (ended)
//!            |       v                      v                      |
//!         Waiting <------------------- decision <------------------+
//!                                           |
//!                  Stopping --(ended)--> Done
//! ```
//!
//! No clock and no I/O: facts come with the events, actions are carried out by [`super`]. Invariants, held by a property
//! test over event sequences: at most one life of the job is started at a time; a snapshot is asked for only while the
//! job runs and none is being taken; `Finish` comes exactly once and last; a stop that is asked for ends in `Done`.

use std::time::{Duration, Instant};

use crate::config::{Config, Interval};
use crate::restart::policy::{Death, Decision, From, History};
use crate::store::ImageId;
use crate::store::manifest::Reason;
use crate::sys::spawn::Ended;

/// Who asked for the end, which decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A signal: 128 plus its number.
    Signal(i32),
    /// To be queued again: 75.
    Requeue,
}

/// How it all ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The job exited with 0.
    Completed,
    /// Stopped as asked; it can be continued.
    Stopped(Stop),
    /// It can not be started here at all.
    Impossible {
        /// Why, in words.
        why: String,
    },
    /// Given up.
    Failed {
        /// Why, in words.
        why: String,
        /// How the job ended last, where it was the job that ended.
        last: Option<Ended>,
    },
}

/// Where the job stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It is being launched or restored.
    Starting {
        /// From what.
        from: From,
        /// A stop that came meanwhile.
        stop: Option<Stop>,
    },
    /// It runs.
    Running(Life),
    /// It runs or stands still while a snapshot is taken.
    Snapshotting {
        /// The life.
        life: Life,
        /// A stop to carry out afterwards, and until when it may take.
        stop: Option<(Stop, Instant)>,
        /// It ended meanwhile.
        ended: Option<Ended>,
    },
    /// It was told to end.
    Ending {
        /// Why.
        stop: Ending,
        /// When it is killed.
        deadline: Option<Instant>,
        /// The life.
        life: Life,
    },
    /// The next try comes later.
    Waiting {
        /// From what.
        from: From,
        /// When.
        until: Instant,
    },
    /// All is over.
    Done,
}

/// Why a job was told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It was asked for.
    Stop(Stop),
    /// It can not go on after a snapshot.
    Lost,
}

/// One life of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    /// What it began with.
    pub from: From,
    /// When it began.
    pub since: Instant,
    /// When the next snapshot is due.
    pub next: Option<Instant>,
    /// Snapshots that failed in a row.
    pub failures: u32,
}

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The job runs.
    Started,
    /// The image can not be restored and was marked; these good ones are left, newest first.
    ImageFailed {
        /// Good images, newest first.
        images: Vec<ImageId>,
    },
    /// It could not be started, by no fault of an image.
    StartFailed {
        /// Why, in words.
        why: String,
    },
    /// It could not be started and never will: the command is wrong.
    Impossible {
        /// Why, in words.
        why: String,
    },
    /// The job ended.
    Ended {
        /// How.
        ended: Ended,
        /// Good images, newest first.
        images: Vec<ImageId>,
    },
    /// A snapshot is in the store.
    SnapshotTaken,
    /// A snapshot failed; the job runs on, unless it is lost.
    SnapshotFailed(Harm),
    /// Take one now.
    SnapshotNow,
    /// Take a last one, then stop.
    Stop(Stop),
    /// Stop at once.
    StopNow(Stop),
    /// A time that [`State::deadline`] named may have come.
    Tick,
}

/// What a snapshot that failed did to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// None.
    None,
    /// It can not go on.
    Lost,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Launch or restore.
    Start(From),
    /// Take a snapshot.
    Snapshot(Reason),
    /// Give up the snapshot or the start that is under way.
    Cancel,
    /// Ask the job to end (SIGTERM).
    Terminate,
    /// End it.
    Kill,
    /// Note that the job dies from this image.
    MarkDiesAgain(ImageId),
    /// Say why it is tried again, and when.
    Announce {
        /// From what.
        from: From,
        /// After this long.
        after: Duration,
    },
    /// The last action.
    Finish(Finish),
}

/// The state with what it needs to decide.
#[derive(Debug)]
pub struct Machine<'a> {
    config: &'a Config,
    state: State,
    history: History,
}

impl State {
    /// When [`Event::Tick`] is wanted.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            State::Running(life) => life.next,
            State::Snapshotting { stop, .. } => stop.map(|(_, at)| at),
            State::Ending { deadline, .. } => *deadline,
            State::Waiting { until, .. } => Some(*until),
            State::Starting { .. } | State::Done => None,
        }
    }

    /// One word for it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            State::Starting { from: From::Cold, .. } => "starting",
            State::Starting { from: From::Image(_), .. } => "restoring",
            State::Running(_) => "running",
            State::Snapshotting { .. } => "snapshotting",
            State::Ending { .. } => "stopping",
            State::Waiting { .. } => "waiting",
            State::Done => "done",
        }
    }
}

impl<'a> Machine<'a> {
    /// Begins with `from`; carry out the actions.
    #[must_use]
    pub fn new(config: &'a Config, from: From) -> (Machine<'a>, Vec<Action>) {
        let machine = Machine { config, state: State::Starting { from, stop: None }, history: History::default() };
        (machine, vec![Action::Start(from)])
    }

    /// Where the job stands.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Takes an event; answers what is to be done, in this order. Events that make no sense in a state change nothing.
    pub fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let state = std::mem::replace(&mut self.state, State::Done);
        let (next, actions) = match state {
            State::Starting { from, stop } => self.starting(from, stop, event, now),
            State::Running(life) => self.running(life, event, now),
            State::Snapshotting { life, stop, ended } => self.snapshotting(life, stop, ended, event, now),
            State::Ending { stop, deadline, life } => self.ending(stop, deadline, life, event, now),
            State::Waiting { from, until } => waiting(from, until, event, now),
            State::Done => (State::Done, Vec::new()),
        };
        if next.name() != self.state.name() || !actions.is_empty() {
            tracing::debug!(to = next.name(), ?actions, "state");
        }
        self.state = next;
        actions
    }

    fn starting(&mut self, from: From, stop: Option<Stop>, event: Event, now: Instant) -> (State, Vec<Action>) {
        match (event, stop) {
            (Event::Started, None) => {
                let life = Life { from, since: now, next: self.due(now), failures: 0 };
                (State::Running(life), vec![])
            }
            // Asked to stop while it was coming up: nothing was done since the image, so there is nothing to save.
            (Event::Started, Some(stop)) => {
                let life = Life { from, since: now, next: None, failures: 0 };
                (State::Ending { stop: Ending::Stop(stop), deadline: None, life }, vec![Action::Kill])
            }
            (
                Event::ImageFailed { .. } | Event::StartFailed { .. } | Event::Impossible { .. } | Event::Ended { .. },
                Some(stop),
            ) => finish(Finish::Stopped(stop)),
            (Event::ImageFailed { images }, None) => {
                let decision = self.history.after_bad_image(&images, &self.config.restart, now);
                decided(decision, None, now)
            }
            (Event::StartFailed { why }, None) => {
                let decision = self.history.after_machine_failure(from, &why, &self.config.restart);
                decided(decision, None, now)
            }
            (Event::Impossible { why }, None) => finish(Finish::Impossible { why }),
            (Event::Stop(stop) | Event::StopNow(stop), _) => {
                (State::Starting { from, stop: Some(stop) }, vec![Action::Cancel])
            }
            (_, stop) => (State::Starting { from, stop }, vec![]),
        }
    }

    fn running(&mut self, life: Life, event: Event, now: Instant) -> (State, Vec<Action>) {
        let snapshot = |life, stop| State::Snapshotting { life, stop, ended: None };
        match event {
            Event::Tick if life.next.is_some_and(|at| at <= now) => {
                (snapshot(life, None), vec![Action::Snapshot(Reason::Interval)])
            }
            Event::SnapshotNow => (snapshot(life, None), vec![Action::Snapshot(Reason::Signal)]),
            Event::Stop(stop) => {
                let until = now + self.config.snapshot.grace;
                (snapshot(life, Some((stop, until))), vec![Action::Snapshot(Reason::Final)])
            }
            Event::StopNow(stop) => {
                (State::Ending { stop: Ending::Stop(stop), deadline: None, life }, vec![Action::Kill])
            }
            Event::Ended { ended, images } => self.died(Death::Ended(ended), &life, &images, now),
            _ => (State::Running(life), vec![]),
        }
    }

    fn snapshotting(
        &mut self,
        mut life: Life,
        stop: Option<(Stop, Instant)>,
        ended: Option<Ended>,
        event: Event,
        now: Instant,
    ) -> (State, Vec<Action>) {
        match event {
            Event::SnapshotTaken | Event::SnapshotFailed(_) => {
                let taken = event == Event::SnapshotTaken;
                let lost = event == Event::SnapshotFailed(Harm::Lost);
                life.failures = if taken { 0 } else { life.failures + 1 };
                life.next = if taken { self.due(now) } else { Some(now + self.retry(life.failures)) };
                match (stop, ended) {
                    // Its end is still to be reported, with the images of then.
                    (None, Some(_)) if !lost => (State::Running(Life { next: None, ..life }), vec![]),
                    (None, None) if !lost => (State::Running(life), vec![]),
                    (None, _) => (State::Ending { stop: Ending::Lost, deadline: None, life }, vec![Action::Kill]),
                    // All is saved: whatever the job would still do would be done twice.
                    (Some((stop, _)), _) if taken || lost => {
                        (State::Ending { stop: Ending::Stop(stop), deadline: None, life }, vec![Action::Kill])
                    }
                    (Some(_), Some(Ended::Exit(0))) => finish(Finish::Completed),
                    (Some((stop, until)), _) => {
                        let ending = State::Ending { stop: Ending::Stop(stop), deadline: Some(until), life };
                        (ending, vec![Action::Terminate])
                    }
                }
            }
            Event::Stop(wanted) => {
                let until = now + self.config.snapshot.grace;
                (State::Snapshotting { life, stop: stop.or(Some((wanted, until))), ended }, vec![])
            }
            Event::StopNow(wanted) => {
                let ending = State::Ending { stop: Ending::Stop(wanted), deadline: None, life };
                (ending, vec![Action::Cancel, Action::Kill])
            }
            // Out of time: what was frozen is let go or killed with the rest.
            Event::Tick if stop.is_some_and(|(_, until)| until <= now) => {
                let wanted = stop.map_or(Stop::Signal(libc::SIGTERM), |(stop, _)| stop);
                let ending = State::Ending { stop: Ending::Stop(wanted), deadline: None, life };
                (ending, vec![Action::Cancel, Action::Kill])
            }
            Event::Ended { ended, .. } => {
                (State::Snapshotting { life, stop, ended: Some(ended) }, vec![Action::Cancel])
            }
            _ => (State::Snapshotting { life, stop, ended }, vec![]),
        }
    }

    fn ending(
        &mut self,
        stop: Ending,
        deadline: Option<Instant>,
        life: Life,
        event: Event,
        now: Instant,
    ) -> (State, Vec<Action>) {
        match (event, stop) {
            // It was at its end when it was to be killed. After a SIGTERM an exit with 0 says nothing of the kind: many
            // programs end so when they are told to, and their work is not done.
            (Event::Ended { ended: Ended::Exit(0), .. }, _) if deadline.is_none() => finish(Finish::Completed),
            (Event::Ended { .. }, Ending::Stop(stop)) => finish(Finish::Stopped(stop)),
            (Event::Ended { images, .. }, Ending::Lost) => self.died(Death::Lost, &life, &images, now),
            (Event::Stop(wanted) | Event::StopNow(wanted), Ending::Lost) => {
                (State::Ending { stop: Ending::Stop(wanted), deadline, life }, vec![Action::Kill])
            }
            (Event::StopNow(_), _) => (State::Ending { stop, deadline: None, life }, vec![Action::Kill]),
            (Event::Tick, _) if deadline.is_some_and(|at| at <= now) => {
                (State::Ending { stop, deadline: None, life }, vec![Action::Kill])
            }
            _ => (State::Ending { stop, deadline, life }, vec![]),
        }
    }

    fn died(&mut self, death: Death, life: &Life, images: &[ImageId], now: Instant) -> (State, Vec<Action>) {
        let uptime = now.saturating_duration_since(life.since);
        let policy = &self.config.restart;
        let decision = self.history.after_death(death, life.from, uptime, images, policy, now);
        let last = match death {
            Death::Ended(ended) => Some(ended),
            Death::Lost => None,
        };
        decided(decision, last, now)
    }

    fn due(&self, now: Instant) -> Option<Instant> {
        match self.config.snapshot.interval {
            Interval::Every(interval) => Some(now + interval),
            Interval::Off => None,
        }
    }

    /// The pause after so many failures in a row.
    fn retry(&self, failures: u32) -> Duration {
        let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        let snapshot = &self.config.snapshot;
        snapshot.retry_after.saturating_mul(factor).min(snapshot.retry_max)
    }
}

fn waiting(from: From, until: Instant, event: Event, now: Instant) -> (State, Vec<Action>) {
    match event {
        Event::Tick if until <= now => (State::Starting { from, stop: None }, vec![Action::Start(from)]),
        Event::Stop(stop) | Event::StopNow(stop) => finish(Finish::Stopped(stop)),
        _ => (State::Waiting { from, until }, vec![]),
    }
}

fn decided(decision: Decision, last: Option<Ended>, now: Instant) -> (State, Vec<Action>) {
    let marked = |mark: Option<ImageId>| mark.map(Action::MarkDiesAgain);
    match decision {
        Decision::Complete => finish(Finish::Completed),
        Decision::Again { from, after, mark } => {
            let actions = marked(mark).into_iter().chain([Action::Announce { from, after }]).collect();
            (State::Waiting { from, until: now + after }, actions)
        }
        Decision::GiveUp { why, mark } => {
            let end = Action::Finish(Finish::Failed { why, last });
            (State::Done, marked(mark).into_iter().chain([end]).collect())
        }
    }
}

fn finish(how: Finish) -> (State, Vec<Action>) {
    (State::Done, vec![Action::Finish(how)])
}

#[cfg(test)]
mod tests;
