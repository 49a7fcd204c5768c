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
//! What rules and the watch of a job decide (`Condemn`, `Judged`) takes the place of the decision for one end.
//!
//! Requests are separate from that: a rewind ends the current life and starts the next one from an image, without a
//! decision, because nothing failed; a suspension ends it after a snapshot, and the machine stays in Suspended until it
//! is resumed, rewound or stopped. A request that a state cannot serve is refused ([`Machine::admits`]).
//!
//! No snapshot starts while an image is being stored, or while memory of a running job is still being restored from
//! one: requests for one wait then, also a stop. The same applies while the job blocks snapshots (`Hold`), which has a
//! time limit: at that limit the waiting snapshot is taken; a final snapshot is taken while there is time for it.
//!
//! No clock and no I/O: facts come with the events, [`super`] carries out actions. Invariants, checked by a property
//! test over event sequences: at most one life of the job is started at a time; a snapshot is requested only while the
//! job runs with all of its memory, none is being taken or stored, and none is blocked; `Finish` comes exactly once and
//! last; a requested stop ends in `Done`.

mod admission;
mod events;
mod states;
mod transitions;

use std::time::{Duration, Instant};

pub use admission::Wish;
pub use events::{Action, Event, Finish, Harm, NO_USABLE_IMAGE, Obstacle, Stop, Verdict};
pub use states::{Ending, Life, State, Then};

use transitions::{suspended, waiting};

use super::pace::Pace;
use crate::config::Config;
use crate::policy::{History, StartPoint};
use rekindle_base::interval::{Choice, Failures};
use rekindle_store::manifest::Reason;

/// A snapshot that waits until the one before it is over, its image is in the store, and the memory of the job is back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Postponed {
    reason: Reason,
    /// What is to be done after it; never a rewind, which needs no snapshot.
    then: Option<Then>,
}

impl Postponed {
    fn stop(self) -> Option<(Stop, Instant)> {
        match self.then {
            Some(Then::Stop(stop, until)) => Some((stop, until)),
            _ => None,
        }
    }
}

/// Why the job is to start from an image that the ladder has not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// The run began with it (`rekindle restore`).
    Restore,
    /// The job was told to go back to it.
    Rewind,
}

/// The state with what it needs to decide.
#[derive(Debug)]
pub struct Machine<'a> {
    config: &'a Config,
    state: State,
    history: History,
    /// Whether an image is being stored.
    persisting: bool,
    /// Only while the job runs, or its snapshot is taken.
    postponed: Option<Postponed>,
    /// What follows the end of this life, if that is decided.
    verdict: Option<Verdict>,
    /// Whether the end of this life has a reason that is no fault of an image.
    excused: bool,
    /// Whether the image that the job starts from was requested.
    asked: Option<Asked>,
    /// See [`Machine::no_interval_from`].
    quiet: Option<Instant>,
    /// Until when the job holds snapshots off at most. Only while it runs.
    held: Option<Instant>,
    /// See [`Machine::last_takes`].
    last_takes: Option<Duration>,
    pace: Pace,
}

impl<'a> Machine<'a> {
    /// Begins with `from`; carry out the actions.
    #[must_use]
    pub fn new(config: &'a Config, from: StartPoint) -> (Machine<'a>, Vec<Action>) {
        let machine = Machine {
            config,
            state: State::Starting { from, then: None },
            history: History::default(),
            persisting: false,
            pace: Pace::default(),
            postponed: None,
            verdict: None,
            excused: false,
            asked: None,
            quiet: None,
            held: None,
            last_takes: None,
        };
        (machine, vec![Action::Start(from)])
    }

    /// The user named the image: no other is used instead.
    #[must_use]
    pub fn asked_for(self) -> Machine<'a> {
        Machine { asked: Some(Asked::Restore), ..self }
    }

    /// When [`Event::Tick`] is wanted.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match (&self.state, self.postponed) {
            // Its turn comes with the end of the other one, or of a hold.
            (State::Running(_), Some(postponed)) => {
                postponed.stop().map(|(_, until)| until).into_iter().chain(self.held).min()
            }
            (State::Running(life), None) => self.next(life),
            (state, _) => state.deadline(),
        }
    }

    /// When the next snapshot is due, if snapshots are taken at an interval.
    #[must_use]
    pub fn next_snapshot(&self) -> Option<Instant> {
        match &self.state {
            State::Running(life) if self.postponed.is_none() => self.next(life),
            _ => None,
        }
    }

    /// Whether a snapshot waits for the image before it to be in the store, or for the job's memory.
    #[must_use]
    pub fn is_postponed(&self) -> bool {
        self.postponed.is_some()
    }

    /// The snapshot that waits because the job holds it off, and until when at most.
    #[must_use]
    pub fn held_off(&self) -> Option<(Reason, Instant)> {
        self.postponed.map(|postponed| postponed.reason).zip(self.held)
    }

    /// Until when the job holds snapshots off at most.
    #[must_use]
    pub fn held(&self) -> Option<Instant> {
        self.held
    }

    /// Whether it was asked to stop, or is at its end.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.postponed.and_then(Postponed::stop).is_some() || self.state.is_stopping()
    }

    /// Goes on from what earlier runs left.
    #[must_use]
    pub fn recalling(self, pace: Pace) -> Machine<'a> {
        Machine { pace, ..self }
    }

    /// The current interval, if it is chosen automatically.
    #[must_use]
    pub fn choice(&self) -> Option<&Choice> {
        self.pace.choice()
    }

    /// How long the job has run in all, and how often it failed.
    #[must_use]
    pub fn failures(&self, now: Instant) -> Failures {
        self.pace.failures(self.state.life().map_or(Duration::ZERO, |life| now.saturating_duration_since(life.since)))
    }

    /// The state of the job.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// From this time on the interval starts no snapshot: the final one is near, and would have to wait for it.
    pub fn no_interval_from(&mut self, time: Option<Instant>) {
        self.quiet = time;
    }

    /// How long the final snapshot is expected to take, if known: a hold must leave that much of a stop's time.
    pub fn last_takes(&mut self, time: Option<Duration>) {
        self.last_takes = time;
    }

    /// Takes an event; answers what is to be done, in this order. Events that make no sense in a state change nothing.
    pub fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        // An event after the limit of a hold finds it over. The event itself comes first: no snapshot starts of a job
        // that has ended, or beside something that has started.
        let over = |machine: &Machine<'_>| machine.held.is_some_and(|until| until <= now);
        let happened = matches!(event, Event::Ended { .. } | Event::PersistBegan);
        let mut actions = if over(self) && !happened { self.take(Event::Release, now) } else { Vec::new() };
        actions.extend(self.take(event, now));
        if happened && over(self) {
            actions.extend(self.take(Event::Release, now));
        }
        actions
    }

    fn take(&mut self, event: Event, now: Instant) -> Vec<Action> {
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
            Event::Judged(ref verdict) => self.verdict = Some(verdict.clone()),
            Event::Excused => self.excused = true,
            Event::Rewind { .. } if !self.is_stopping() => self.asked = Some(Asked::Rewind),
            Event::Started => self.asked = None,
            Event::Hold(until) => self.hold(until),
            Event::Release => self.held = None,
            _ => {}
        }
        let since = self.state.life().map(|life| life.since);
        let state = std::mem::replace(&mut self.state, State::Done);
        let (next, actions) = match state {
            State::Starting { from, then } => self.starting(from, then, event, now),
            State::Running(life) => self.running(life, event, now),
            State::Snapshotting { life, then, ended } => self.snapshotting(life, then, ended, event, now),
            State::Ending { stop, deadline, life } => self.ending(stop, deadline, life, event, now),
            State::Waiting { from, until } => waiting(from, until, event, now),
            State::Suspended { from } => suspended(from, event),
            State::Done => (State::Done, Vec::new()),
        };
        if let (Some(since), None) = (since, next.life()) {
            self.pace.lived(now.saturating_duration_since(since));
        }
        if !matches!(next, State::Running(_) | State::Snapshotting { .. }) {
            self.postponed = None;
        }
        if !matches!(next, State::Running(_)) {
            self.held = None;
        }
        if next.life().is_none() {
            self.verdict = None;
            self.excused = false;
        }
        if next.name() != self.state.name() || !actions.is_empty() {
            tracing::debug!(to = next.name(), ?actions, "state");
        }
        self.state = next;
        actions
    }

    /// Whether a snapshot cannot be begun yet.
    fn is_busy(&self) -> bool {
        self.persisting || self.held.is_some()
    }

    /// While a snapshot waits for a hold to end, no further hold is accepted: two holders in turn could block it for
    /// ever.
    fn hold(&mut self, until: Instant) {
        if !matches!(self.state, State::Running(_)) || (self.is_stopping() && self.held.is_none()) {
            return;
        }
        let bound = self.held_off().map_or(until, |(_, bound)| bound);
        self.held = Some(until.min(bound));
    }

    /// The latest start of a final snapshot, if the stop must be over by `until`.
    fn last_moment(&self, until: Instant, now: Instant) -> Instant {
        let left = until.saturating_duration_since(now);
        now + self.last_takes.map_or(left / 2, |takes| left.saturating_sub(takes))
    }

    /// When this life is due for its next snapshot, if that is to be taken.
    fn next(&self, life: &Life) -> Option<Instant> {
        life.next.filter(|at| self.quiet.is_none_or(|quiet| *at < quiet))
    }

    /// When a life that began at `since` is due for its next snapshot.
    fn due(&mut self, since: Instant, now: Instant) -> Option<Instant> {
        Some(now + self.pace.next(&self.config.snapshot, now.saturating_duration_since(since))?)
    }
}

#[cfg(test)]
mod tests;
