//! Time, moment by moment: a clock that does not go back, and what each stretch went to.

use chrono::{DateTime, Utc};
use serde::Serialize;

/// What a stretch of time went to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The job ran, and its work was not lost.
    Useful,
    /// The job was frozen for a snapshot.
    Frozen,
    /// The job ran, and went back to a state from before.
    Lost,
    /// It did not run: it was being started or restored, or waited for that.
    Down,
    /// Unknown: the supervisor was killed, and the next one had not started.
    Away,
    /// It was not meant to run: completed, stopped, given up.
    Idle,
}

impl Kind {
    /// In the order in which they are shown.
    pub const ALL: [Kind; 6] = [Kind::Useful, Kind::Frozen, Kind::Lost, Kind::Down, Kind::Away, Kind::Idle];
}

/// A stretch of time, in microseconds of UNIX time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Span {
    /// What it went to.
    pub kind: Kind,
    /// From here.
    pub from: i64,
    /// To here.
    pub to: i64,
}

impl Span {
    /// How long it is, in microseconds.
    #[must_use]
    pub fn length(&self) -> u64 {
        between(self.from, self.to)
    }
}

/// The time of the events, which never goes back.
///
/// The clock on the wall may be set back between two events: what comes after is then counted from the event before, so
/// that no time is negative and none is counted twice. A clock that was put forward cannot be told from a long wait.
#[derive(Debug, Clone, Default)]
pub(super) struct Clock {
    /// How far the time has come.
    reached: Option<i64>,
    /// What is added to the times since the clock was set back.
    skew: i64,
    /// How often it was set back.
    set_back: u32,
}

impl Clock {
    /// The time of the next event.
    pub(super) fn next(&mut self, time: DateTime<Utc>) -> i64 {
        let at = self.read(time);
        match self.reached {
            Some(before) if at < before => {
                self.skew = self.skew.saturating_add(before.saturating_sub(at));
                self.set_back += 1;
                before
            }
            _ => at,
        }
    }

    /// A time that was written down beside an event, counted as the events are.
    pub(super) fn read(&self, time: DateTime<Utc>) -> i64 {
        time.timestamp_micros().saturating_add(self.skew)
    }

    /// How far the time has come; before the first event, up to `first`.
    pub(super) fn reached_or(&self, first: i64) -> i64 {
        self.reached.unwrap_or(first)
    }

    /// Time passes, up to there. Answers the stretch, if there is one.
    pub(super) fn pass(&mut self, to: i64) -> Option<(i64, i64)> {
        let from = *self.reached.get_or_insert(to);
        if to <= from {
            return None;
        }
        self.reached = Some(to);
        Some((from, to))
    }

    /// From how far the time has come until `now`, if that is later.
    pub(super) fn since(&self, now: DateTime<Utc>) -> Option<(i64, i64)> {
        let to = self.read(now);
        self.reached.filter(|from| *from < to).map(|from| (from, to))
    }

    /// How often it was set back, and by how much in all, in microseconds.
    pub(super) fn set_back(&self) -> (u32, i64) {
        (self.set_back, self.skew)
    }
}

/// What the time went to, without a gap, oldest first.
#[derive(Debug, Clone, Default)]
pub(super) struct Timeline(Vec<Span>);

impl Timeline {
    pub(super) fn spans(&self) -> &[Span] {
        &self.0
    }

    /// The time that passed went to this.
    pub(super) fn fill(&mut self, kind: Kind, (from, to): (i64, i64)) {
        match self.0.last_mut() {
            Some(last) if last.kind == kind && last.to == from => last.to = to,
            _ => self.0.push(Span { kind, from, to }),
        }
    }

    /// What was useful since then was something else. Answers how much that is.
    pub(super) fn turn(&mut self, since: i64, kind: Kind) -> u64 {
        let mut turned = 0_u64;
        let mut at = self.0.len();
        while let Some(before) = at.checked_sub(1) {
            let Some(span) = self.0.get_mut(before) else { break };
            if span.to <= since {
                break;
            }
            at = before;
            if span.kind != Kind::Useful {
                continue;
            }
            let kept = Span { to: since, ..*span };
            span.from = span.from.max(since);
            span.kind = kind;
            turned = turned.saturating_add(span.length());
            if kept.from < since {
                self.0.insert(before, kept);
                break;
            }
        }
        turned
    }

    /// In what begins there or later, the job was not supposed to run.
    pub(super) fn idle_since(&mut self, since: i64) {
        for span in self.0.iter_mut().rev().take_while(|span| span.from >= since) {
            if span.kind == Kind::Down {
                span.kind = Kind::Idle;
            }
        }
    }
}

/// Microseconds from one moment to another; none if the second is earlier.
#[must_use]
pub(crate) fn between(from: i64, to: i64) -> u64 {
    u64::try_from(to.saturating_sub(from)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(micros: i64) -> DateTime<Utc> {
        DateTime::from_timestamp_micros(micros).unwrap()
    }

    #[test]
    fn a_clock_that_is_set_back_goes_on_from_where_it_was() {
        let mut clock = Clock::default();
        assert_eq!(clock.next(time(100)), 100);
        assert_eq!(clock.pass(100), None, "the first event begins the time");
        assert_eq!((clock.next(time(150)), clock.pass(150)), (150, Some((100, 150))));
        assert_eq!((clock.next(time(50)), clock.pass(150)), (150, None));
        assert_eq!((clock.next(time(60)), clock.pass(160)), (160, Some((150, 160))));
        assert_eq!((clock.set_back(), clock.since(time(65))), ((1, 100), Some((160, 165))));
    }

    #[test]
    fn time_does_not_pass_backwards() {
        let mut clock = Clock::default();
        clock.pass(100);
        assert_eq!((clock.pass(90), clock.reached_or(0)), (None, 100));
    }

    #[test]
    fn only_useful_time_turns_into_something_else() {
        let mut timeline = Timeline::default();
        timeline.fill(Kind::Useful, (0, 10));
        timeline.fill(Kind::Frozen, (10, 12));
        timeline.fill(Kind::Useful, (12, 20));
        assert_eq!(timeline.turn(5, Kind::Lost), 13);
        let kinds: Vec<_> = timeline.spans().iter().map(|span| (span.kind, span.from, span.to)).collect();
        let expected = [(Kind::Useful, 0, 5), (Kind::Lost, 5, 10), (Kind::Frozen, 10, 12), (Kind::Lost, 12, 20)];
        assert_eq!(kinds, expected);
    }
}
