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
//! What is asked for by name goes beside that: a rewind ends the life that there is and starts the next one from an image,
//! without a decision, because nothing failed; a suspension ends it after a snapshot, and the machine rests in Suspended
//! until it is called back, rewound or stopped. What cannot be had in a state is refused ([`Machine::admits`]).
//!
//! While an image is brought from memory to the store, or the memory of a job that runs already is brought back from one,
//! no snapshot is begun: what asks for one then waits, a stop too. The same holds while the job holds snapshots off
//! (`Hold`), which is bounded: what waits for it gets its turn at that bound, a last snapshot while there is time for it.
//!
//! No clock and no I/O: facts come with the events, actions are carried out by [`super`]. Invariants, held by a property
//! test over event sequences: at most one life of the job is started at a time; a snapshot is asked for only while the
//! job runs, with all of its memory, and none is being taken or brought to the store, nor held off; `Finish` comes exactly
//! once and last; a stop that is asked for ends in `Done`.

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
    /// Whether an image is on its way from memory to the store.
    persisting: bool,
    /// Only while the job runs, or its snapshot is taken.
    postponed: Option<Postponed>,
    /// What the end of this life leads to, where that is decided.
    verdict: Option<Verdict>,
    /// Whether the end of this life has a reason that is no fault of an image.
    excused: bool,
    /// Whether the image that the job is to start from was asked for.
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

    /// What it begins with was asked for by name: nothing else is taken in its place.
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

    /// When the next snapshot is due, where it is the clock that says so.
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

    /// What a last snapshot is expected to take, where that is known: a hold leaves so much of the time that a stop has.
    pub fn last_takes(&mut self, time: Option<Duration>) {
        self.last_takes = time;
    }

    /// Takes an event; answers what is to be done, in this order. Events that make no sense in a state change nothing.
    pub fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        // Whatever comes after the bound of a hold finds it over. What has happened by then comes first: no snapshot is
        // begun of a job that has ended, or beside what has begun.
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

    /// While something waits for the job to let go, that is not put off further: two holders in turn could do so for ever.
    fn hold(&mut self, until: Instant) {
        if !matches!(self.state, State::Running(_)) || (self.is_stopping() && self.held.is_none()) {
            return;
        }
        let bound = self.held_off().map_or(until, |(_, bound)| bound);
        self.held = Some(until.min(bound));
    }

    /// When a last snapshot has to begin at the latest, if the stop is to be over by `until`.
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
