//! The life of a job as a pure function: `step(state, event, now)` returns the next state and the actions.
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
mod led;
mod states;
mod transitions;

use std::time::{Duration, Instant};

pub(crate) use admission::Wish;
pub(crate) use events::{Action, Event, Finish, Harm, NO_USABLE_IMAGE, Obstacle, Standing, Stop, Verdict};
pub(crate) use states::{Ending, Life, State, Then};

use transitions::{start, suspended, waiting};

use super::pace::Pace;
use crate::config::{Config, Interval};
use crate::policy::{Death, History, Occupied, StartPoint};
use rekindle_base::interval::{Choice, Failures};
use rekindle_os::spawn::Ended;
use rekindle_store::manifest::Reason;

/// A snapshot that waits until the previous one is over, its image is stored, and the memory of the job is restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Postponed {
    reason: Reason,
    /// What to do after it; never a rewind, which needs no snapshot.
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

/// Why the job starts from an image that the policy has not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// The run started with it (`rekindle restore`).
    Restore,
    /// A rewind to it was requested.
    Rewind,
}

/// Why the end of a life is not the image's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Excuse {
    /// Lack of memory, or a GPU that failed.
    Cause,
    /// A GPU was occupied.
    Occupied(Occupied),
}

/// The state, and everything needed to decide.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    config: &'a Config,
    state: State,
    /// What the group does, if a group decides and not this machine.
    led: Option<Standing>,
    history: History,
    /// Whether an image is being stored.
    persisting: bool,
    /// The postponed snapshot; only while the job is started, runs or is being snapshotted.
    postponed: Option<Postponed>,
    /// What to do after the end of this life, if that is decided.
    verdict: Option<Verdict>,
    /// Why the end of this life is not the image's fault, if it is not.
    excuse: Option<Excuse>,
    /// Whether the start that waits may begin as soon as the GPUs are quiet.
    until_quiet: bool,
    /// Whether and why the image that the job starts from was requested.
    asked: Option<Asked>,
    /// See [`Machine::no_interval_from`].
    quiet: Option<Instant>,
    /// The latest time until which the running job blocks snapshots.
    held: Option<Instant>,
    /// See [`Machine::last_takes`].
    last_takes: Option<Duration>,
    pace: Pace,
}

impl<'a> Machine<'a> {
    /// Starts with `from`; carry out the actions.
    #[must_use]
    pub(crate) fn new(config: &'a Config, from: StartPoint) -> (Machine<'a>, Vec<Action>) {
        let state = State::Starting { from, then: None };
        (Machine::in_state(config, state, History::default(), Pace::default()), vec![Action::Start(from)])
    }

    fn in_state(config: &'a Config, state: State, history: History, pace: Pace) -> Machine<'a> {
        Machine {
            config,
            state,
            led: None,
            history,
            persisting: false,
            pace,
            postponed: None,
            verdict: None,
            excuse: None,
            until_quiet: false,
            asked: None,
            quiet: None,
            held: None,
            last_takes: None,
        }
    }

    /// Records that the user named the image: no other is used instead.
    #[must_use]
    pub(crate) fn asked_for(self) -> Machine<'a> {
        Machine { asked: Some(Asked::Restore), ..self }
    }

    /// When [`Event::Tick`] is needed.
    #[must_use]
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match (&self.state, self.postponed) {
            // It starts when the other snapshot or the hold ends.
            (State::Running(_), Some(postponed)) => {
                postponed.stop().map(|(_, until)| until).into_iter().chain(self.held).min()
            }
            (State::Running(life), None) => self.next(life),
            (state, _) => state.deadline(),
        }
    }

    /// When the next snapshot is due, if snapshots are taken at an interval.
    #[must_use]
    pub(crate) fn next_snapshot(&self) -> Option<Instant> {
        match &self.state {
            State::Running(life) if self.postponed.is_none() => self.next(life),
            _ => None,
        }
    }

    /// Whether a snapshot waits until the previous image is stored or the job's memory is restored.
    #[must_use]
    pub(crate) fn is_postponed(&self) -> bool {
        self.postponed.is_some()
    }

    /// The snapshot that waits because the job blocks it, and its time limit.
    #[must_use]
    pub(crate) fn held_off(&self) -> Option<(Reason, Instant)> {
        self.postponed.map(|postponed| postponed.reason).zip(self.held)
    }

    /// Until when at most the job blocks snapshots.
    #[must_use]
    pub(crate) fn held(&self) -> Option<Instant> {
        self.held
    }

    /// Whether a stop was requested, or the run is ending.
    #[must_use]
    pub(crate) fn is_stopping(&self) -> bool {
        let group_stops = self.led == Some(Standing::Stopping);
        group_stops || self.postponed.and_then(Postponed::stop).is_some() || self.state.is_stopping()
    }

    /// Starts with the observations of earlier runs.
    #[must_use]
    pub(crate) fn recalling(self, pace: Pace) -> Machine<'a> {
        Machine { pace, ..self }
    }

    /// The current interval, if it is chosen automatically.
    #[must_use]
    pub(crate) fn choice(&self) -> Option<&Choice> {
        self.pace.choice()
    }

    /// How long the job has run in total, and how often it failed.
    #[must_use]
    pub(crate) fn failures(&self, now: Instant) -> Failures {
        self.pace.failures(self.state.life().map_or(Duration::ZERO, |life| now.saturating_duration_since(life.since)))
    }

    /// How long a snapshot freezes the job, and how long storing the last image took, as far as they are known.
    #[must_use]
    pub(crate) fn measured(&self) -> (Option<Duration>, Option<Duration>) {
        self.pace.measured()
    }

    /// Whether the interval is over if this snapshot ends the job, because those before it did.
    #[must_use]
    pub(crate) fn is_last_try(&self) -> bool {
        self.led.is_none() && self.config.snapshot.interval != Interval::Off && self.pace.is_nearly_deadly()
    }

    /// What is decided about the end of this life.
    #[must_use]
    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref()
    }

    /// How the present life ends if its processes end so.
    #[must_use]
    pub(crate) fn death(&self, ended: Ended) -> Death {
        let ended = match (&self.state, &self.verdict) {
            (State::Ending { stop: Ending::Lost, .. }, _) => return Death::Lost,
            // As if the whole job had died of it.
            (_, Some(Verdict::Died(signal))) => Ended::Signal(*signal),
            (_, Some(_)) => return Death::Judged,
            (_, None) => ended,
        };
        self.ended_so(ended)
    }

    /// A life that ended so by itself.
    fn ended_so(&self, ended: Ended) -> Death {
        match self.excuse {
            Some(Excuse::Occupied(by)) => Death::Outside(ended, by),
            Some(Excuse::Cause) => Death::Excused(ended),
            None => Death::Ended(ended),
        }
    }

    /// The state of the job.
    #[must_use]
    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// From this time on the interval starts no snapshot: the final one is near, and would have to wait for it.
    pub(crate) fn no_interval_from(&mut self, time: Option<Instant>) {
        self.quiet = time;
    }

    /// Whether the interval starts no snapshot now, for that reason.
    #[must_use]
    pub(crate) fn is_quiet(&self, now: Instant) -> bool {
        self.quiet.is_some_and(|from| from <= now)
    }

    /// How long the final snapshot is expected to take, if known: a hold must leave that much of a stop's time.
    pub(crate) fn last_takes(&mut self, time: Option<Duration>) {
        self.last_takes = time;
    }

    /// Handles an event and returns the actions, in order. Events that make no sense in a state change nothing.
    pub(crate) fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        // After its time limit a hold is over. The event itself comes first, so that no snapshot starts of a job that
        // has ended, or beside another operation.
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
                self.pace.persisted(took);
                self.recompute(now);
            }
            Event::WasStopped => {
                let snapshot = matches!(self.state, State::Snapshotting { .. });
                self.pace.was_stopped(snapshot, self.persisting);
            }
            Event::SnapshotFailed(_) | Event::SnapshotMissed => self.pace.not_frozen(),
            Event::SnapshotTaken { freeze } if self.led.is_some() => self.pace.frozen(freeze),
            Event::Judged(ref verdict) => self.verdict = Some(verdict.clone()),
            Event::Excused => self.excuse = Some(Excuse::Cause),
            Event::Outside(by) => self.excuse = Some(Excuse::Occupied(by)),
            Event::Rewind { .. } if !self.is_stopping() => self.asked = Some(Asked::Rewind),
            Event::Started => {
                self.asked = None;
                self.history.has_started();
            }
            Event::Hold(until) => self.hold(until),
            Event::Release => self.held = None,
            Event::Group(standing) => self.led = self.led.map(|_| standing),
            _ => {}
        }
        let since = self.state.life().map(|life| life.since);
        let was_starting = matches!(self.state, State::Starting { .. });
        let state = std::mem::replace(&mut self.state, State::Done);
        let (next, actions) = match state {
            state if self.led.is_some() => {
                let (state, actions) = self.obey(state, event, now);
                (self.stands(state), actions)
            }
            State::Starting { from, then } => self.starting(from, then, event, now),
            State::Running(life) => self.running(life, event, now),
            State::Snapshotting { life, then, ended } => self.snapshotting(life, then, ended, event, now),
            State::Ending { stop, deadline, life } => self.ending(stop, deadline, life, event, now),
            State::Waiting { from, .. } if self.until_quiet && event == Event::Quiet => start(from),
            State::Waiting { from, until } => waiting(from, until, event, now),
            State::Suspended { from } => suspended(from, event),
            State::Idle | State::Done => (state, Vec::new()),
        };
        if let (Some(since), None) = (since, next.life()) {
            self.pace.lived(now.saturating_duration_since(since));
        }
        let may_wait = match next {
            State::Running(_) | State::Snapshotting { .. } => true,
            // One of the life before is over.
            State::Starting { .. } => was_starting,
            _ => false,
        };
        if !may_wait {
            self.postponed = None;
        }
        if !matches!(next, State::Running(_)) {
            self.held = None;
        }
        if next.life().is_none() {
            self.verdict = None;
            self.excuse = None;
        }
        if !matches!(next, State::Waiting { .. }) {
            self.until_quiet = false;
        }
        if next.name() != self.state.name() || !actions.is_empty() {
            tracing::debug!(to = next.name(), ?actions, "state");
        }
        self.state = next;
        actions
    }

    /// Whether a snapshot cannot start yet.
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

    /// When the next snapshot of this life is due, unless the interval is suspended, or snapshots end the job.
    fn next(&self, life: &Life) -> Option<Instant> {
        life.next.filter(|at| !self.pace.is_deadly() && self.quiet.is_none_or(|quiet| *at < quiet))
    }

    /// When the next snapshot is due of a life that started at `since`.
    fn due(&mut self, since: Instant, now: Instant) -> Option<Instant> {
        self.pace.due(&self.config.snapshot, since, now)
    }

    /// When the next snapshot is due may depend on how long storing the last image took.
    fn recompute(&mut self, now: Instant) {
        if let State::Running(life) = &mut self.state
            && life.next.is_some()
            && (life.failures, life.missed) == (0, 0)
        {
            life.next = self.pace.due_now(&self.config.snapshot, life.since, now);
        }
    }
}

#[cfg(test)]
mod tests;
