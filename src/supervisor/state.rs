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
//! While an image is brought from memory to the store, or the memory of a job that runs already is brought back from one,
//! no snapshot is begun: what asks for one then waits, a stop too.
//!
//! No clock and no I/O: facts come with the events, actions are carried out by [`super`]. Invariants, held by a property
//! test over event sequences: at most one life of the job is started at a time; a snapshot is asked for only while the
//! job runs, with all of its memory, and none is being taken or brought to the store; `Finish` comes exactly once and last; a stop that is asked for ends in `Done`.

mod events;
mod states;

use std::time::{Duration, Instant};

pub use events::{Action, Event, Finish, Harm, Stop};
pub use states::{Ending, Life, State};

use super::interval::{Choice, Failures, Pace};
use crate::config::Config;
use crate::restart::policy::{Death, Decision, From, History};
use crate::store::ImageId;
use crate::store::manifest::Reason;
use crate::sys::spawn::Ended;

/// What waits until the image before it is in the store, and the memory of the job is back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Postponed {
    Snapshot(Reason),
    /// A stop with its last snapshot, and until when that may take.
    Stop(Stop, Instant),
}

/// The state with what it needs to decide.
#[derive(Debug)]
pub struct Machine<'a> {
    config: &'a Config,
    state: State,
    history: History,
    /// Whether an image is on its way from memory to the store.
    persisting: bool,
    /// Whether the memory of this life is still being brought back.
    loading: bool,
    /// Only while the job runs.
    postponed: Option<Postponed>,
    /// See [`Machine::no_interval_from`].
    quiet: Option<Instant>,
    pace: Pace,
}

impl<'a> Machine<'a> {
    /// Begins with `from`; carry out the actions.
    #[must_use]
    pub fn new(config: &'a Config, from: From) -> (Machine<'a>, Vec<Action>) {
        let machine = Machine {
            config,
            state: State::Starting { from, stop: None },
            history: History::default(),
            persisting: false,
            loading: false,
            pace: Pace::default(),
            postponed: None,
            quiet: None,
        };
        (machine, vec![Action::Start(from)])
    }

    /// When [`Event::Tick`] is wanted.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match self.postponed {
            Some(Postponed::Stop(_, until)) => Some(until),
            // Its turn comes with the end of the other one.
            Some(Postponed::Snapshot(_)) => None,
            None => match &self.state {
                State::Running(life) => self.next(life),
                state => state.deadline(),
            },
        }
    }

    /// Whether a snapshot waits for the image before it to be in the store, or for the job's memory.
    #[must_use]
    pub fn is_postponed(&self) -> bool {
        self.postponed.is_some()
    }

    /// Goes on from what earlier runs left.
    #[must_use]
    pub fn recalling(self, pace: Pace) -> Machine<'a> {
        Machine { pace, ..self }
    }

    /// The interval in force, where it is chosen.
    #[must_use]
    pub fn choice(&self) -> Option<&Choice> {
        self.pace.choice()
    }

    /// How long the job has run in all, and how often it failed.
    #[must_use]
    pub fn failures(&self, now: Instant) -> Failures {
        self.pace.failures(self.state.life().map_or(Duration::ZERO, |life| now.saturating_duration_since(life.since)))
    }

    /// Where the job stands.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// From this time on no snapshot is begun by the interval: the last one is near, and would have to wait for it.
    pub fn no_interval_from(&mut self, time: Option<Instant>) {
        self.quiet = time;
    }

    /// Takes an event; answers what is to be done, in this order. Events that make no sense in a state change nothing.
    pub fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let event = match event {
            Event::Stop(stop) => Event::StopBy(stop, now + self.config.snapshot.grace),
            other => other,
        };
        match event {
            Event::PersistBegan => self.persisting = true,
            Event::PersistEnded(took) => {
                self.persisting = false;
                took.into_iter().for_each(|took| self.pace.persisted(took));
            }
            Event::LoadBegan => self.loading = true,
            Event::LoadEnded(_) => self.loading = false,
            _ => {}
        }
        let since = self.state.life().map(|life| life.since);
        let state = std::mem::replace(&mut self.state, State::Done);
        let (next, actions) = match state {
            State::Starting { from, stop } => self.starting(from, stop, event, now),
            State::Running(life) => self.running(life, event, now),
            State::Snapshotting { life, stop, ended } => self.snapshotting(life, stop, ended, event, now),
            State::Ending { stop, deadline, life } => self.ending(stop, deadline, life, event, now),
            State::Waiting { from, until } => waiting(from, until, event, now),
            State::Done => (State::Done, Vec::new()),
        };
        if let (Some(since), None) = (since, next.life()) {
            self.pace.lived(now.saturating_duration_since(since));
        }
        if !matches!(next, State::Running(_)) {
            self.postponed = None;
        }
        if next.life().is_none() {
            self.loading = false;
        }
        if next.name() != self.state.name() || !actions.is_empty() {
            tracing::debug!(to = next.name(), ?actions, "state");
        }
        self.state = next;
        actions
    }

    fn starting(&mut self, from: From, stop: Option<Stop>, event: Event, now: Instant) -> (State, Vec<Action>) {
        match (event, stop) {
            (Event::Started, None) => {
                let life = Life { from, since: now, next: self.due(now, now), failures: 0 };
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
            (Event::StopBy(stop, _) | Event::StopNow(stop), _) => {
                (State::Starting { from, stop: Some(stop) }, vec![Action::Cancel])
            }
            (_, stop) => (State::Starting { from, stop }, vec![]),
        }
    }

    fn running(&mut self, life: Life, event: Event, now: Instant) -> (State, Vec<Action>) {
        let snapshot = |life, stop| State::Snapshotting { life, stop, ended: None };
        match event {
            Event::LoadEnded(Harm::Lost) => {
                let stop = match self.postponed {
                    Some(Postponed::Stop(stop, _)) => Ending::Stop(stop),
                    _ => Ending::Unloaded,
                };
                (State::Ending { stop, deadline: None, life }, vec![Action::Kill])
            }
            Event::Tick | Event::SnapshotNow | Event::StopBy(..) if self.is_busy() => self.postpone(life, event, now),
            Event::PersistEnded(_) | Event::LoadEnded(Harm::None) if !self.is_busy() => match self.postponed.take() {
                Some(Postponed::Snapshot(reason)) => (snapshot(life, None), vec![Action::Snapshot(reason)]),
                Some(Postponed::Stop(stop, until)) => {
                    (snapshot(life, Some((stop, until))), vec![Action::Snapshot(Reason::Final)])
                }
                None => (State::Running(life), vec![]),
            },
            Event::Tick if self.next(&life).is_some_and(|at| at <= now) => {
                (snapshot(life, None), vec![Action::Snapshot(Reason::Interval)])
            }
            Event::SnapshotNow => (snapshot(life, None), vec![Action::Snapshot(Reason::Signal)]),
            Event::StopBy(stop, until) => (snapshot(life, Some((stop, until))), vec![Action::Snapshot(Reason::Final)]),
            Event::StopNow(stop) => {
                (State::Ending { stop: Ending::Stop(stop), deadline: None, life }, vec![Action::Kill])
            }
            Event::Ended { ended, images } => match self.postponed {
                Some(Postponed::Stop(..)) if ended == Ended::Exit(0) => finish(Finish::Completed),
                Some(Postponed::Stop(stop, _)) => finish(Finish::Stopped(stop)),
                _ => self.died(Death::Ended(ended), &life, &images, now),
            },
            _ => (State::Running(life), vec![]),
        }
    }

    /// When this life is due for its next snapshot, if that is to be taken.
    fn next(&self, life: &Life) -> Option<Instant> {
        life.next.filter(|at| self.quiet.is_none_or(|quiet| *at < quiet))
    }

    /// Whether a snapshot can not be begun yet.
    fn is_busy(&self) -> bool {
        self.persisting || self.loading
    }

    /// What would begin a snapshot waits: memory that is not back yet can not be dumped, and there is one slot beside the image that is being brought to the store, and a
    /// snapshot that took it would leave none for the next.
    fn postpone(&mut self, life: Life, event: Event, now: Instant) -> (State, Vec<Action>) {
        match (event, self.postponed) {
            // No time is left for a snapshot; the image that is on its way is the last.
            (_, Some(Postponed::Stop(stop, until))) if until <= now => {
                return (State::Ending { stop: Ending::Stop(stop), deadline: None, life }, vec![Action::Kill]);
            }
            (_, Some(Postponed::Stop(..))) => {}
            (Event::StopBy(stop, until), _) => {
                self.postponed = Some(Postponed::Stop(stop, until));
            }
            (Event::SnapshotNow, _) => self.postponed = Some(Postponed::Snapshot(Reason::Signal)),
            (_, None) if self.next(&life).is_some_and(|at| at <= now) => {
                self.postponed = Some(Postponed::Snapshot(Reason::Interval));
            }
            _ => {}
        }
        (State::Running(life), vec![])
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
            Event::SnapshotTaken { .. } | Event::SnapshotFailed(_) => {
                let taken = matches!(event, Event::SnapshotTaken { .. });
                if let Event::SnapshotTaken { freeze, persist } = event {
                    self.pace.frozen(freeze);
                    persist.into_iter().for_each(|took| self.pace.persisted(took));
                }
                let lost = event == Event::SnapshotFailed(Harm::Lost);
                life.failures = if taken { 0 } else { life.failures + 1 };
                life.next = if taken { self.due(life.since, now) } else { Some(now + self.retry(life.failures)) };
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
            Event::StopBy(wanted, until) => {
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
            (Event::Ended { images, .. }, Ending::Unloaded) => self.died(Death::Unloaded, &life, &images, now),
            (Event::StopBy(wanted, _) | Event::StopNow(wanted), Ending::Lost | Ending::Unloaded) => {
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
        // One that dies sooner has a bad image or a wrong command, against which more snapshots help nothing.
        if decision != Decision::Complete && uptime >= policy.min_uptime {
            self.pace.failed();
        }
        let last = match death {
            Death::Ended(ended) => Some(ended),
            Death::Lost | Death::Unloaded => None,
        };
        decided(decision, last, now)
    }

    /// When a life that began at `since` is due for its next snapshot.
    fn due(&mut self, since: Instant, now: Instant) -> Option<Instant> {
        Some(now + self.pace.next(&self.config.snapshot, now.saturating_duration_since(since))?)
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
        Event::StopBy(stop, _) | Event::StopNow(stop) => finish(Finish::Stopped(stop)),
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
