//! The events of a job, added up: what the time went to, moment by moment, and what was lost.
//!
//! Every moment from the first event on belongs to one [`Kind`]. Which is known when the next event comes, with one
//! exception: work is [`Kind::Useful`] until the job goes back to an image that is older, and [`Kind::Lost`] from then on.
//!
//! The clock on the wall may be set back between two events: what comes after is then counted from the event before, so
//! that no time is negative and none is counted twice. A clock that was put forward cannot be told from a long wait.
//! Lines may be missing (a power cut, a journal that was moved): each event is taken for what it says, whatever was before.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::words;
use crate::telemetry::events::{Event, What};
use rekindle_base::cause::Cause;
use rekindle_store::ImageId;
use rekindle_store::manifest::{Phase, Reason};

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

/// A snapshot that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// The image.
    pub image: ImageId,
    /// When the job ran again.
    pub at: i64,
    /// Why it was taken.
    pub reason: Reason,
    /// The length of the freeze.
    pub freeze_us: u64,
    /// All phases, those before the freeze too.
    pub phases: Vec<Phase>,
    /// Bytes of the image.
    pub bytes: u64,
    /// How long the job had run since the snapshot or the start before.
    pub ran_us: u64,
    /// Whether it was the first of its life: the wait for it says nothing of the interval.
    pub first: bool,
    /// How long storing took, when it is stored.
    pub stored_us: Option<u64>,
    /// Bytes that were written for it.
    pub written: Option<u64>,
}

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trouble {
    /// The job ended and had to be restarted.
    Crash,
    /// The supervisor was killed, or the machine went down.
    Supervisor,
    /// A snapshot failed.
    Snapshot,
    /// An image cannot be used.
    Image,
    /// An image did not get to the store.
    Store,
    /// An image did not get to the replica.
    Replica,
    /// The job was given up.
    GivenUp,
}

impl Trouble {
    /// Whether the job was dead then.
    #[must_use]
    pub fn is_death(self) -> bool {
        matches!(self, Trouble::Crash | Trouble::Supervisor | Trouble::GivenUp)
    }
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// When.
    pub at: i64,
    /// What.
    pub what: Trouble,
    /// As text.
    pub why: String,
    /// How long it took until the job ran again, once it did.
    pub back_us: Option<u64>,
    /// The work that was lost, once it is known.
    pub lost_us: Option<u64>,
    /// The image that it was restored from; none if it started from the beginning.
    pub image: Option<ImageId>,
}

/// What is going on at the end of what was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Now {
    #[default]
    Nothing,
    Down,
    Up,
}

/// An end of the job.
#[derive(Debug, Clone)]
struct End {
    at: i64,
    why: String,
    /// It was requested: a restart from there is no failure.
    asked: bool,
}

impl End {
    fn of(at: i64, exit_code: Option<i32>, signal: Option<i32>, cause: Option<&Cause>) -> End {
        let asked = matches!(cause, Some(Cause::Completed | Cause::Requested | Cause::Suspended | Cause::Rewound));
        let how = words::end(exit_code, signal);
        let why = match cause {
            // The same, as another type.
            None | Some(Cause::Exit { .. } | Cause::Signal { .. } | Cause::Unknown) => how,
            Some(cause) => format!("{cause} ({how})"),
        };
        End { at, why, asked }
    }
}

/// The events of a job, added up.
#[derive(Debug, Clone, Default)]
pub struct History {
    run: String,
    now: Now,
    /// The time of the last event.
    at: Option<i64>,
    /// What was added to the times since the clock was set back.
    skew: i64,
    set_back: u32,
    spans: Vec<Span>,
    /// When the run began, until the job runs in it.
    new_run: Option<i64>,
    /// Nothing before it is lost by a restart: a run started from the beginning there, or was completed.
    floor: i64,
    /// When each image's state was that of the job.
    states: HashMap<ImageId, i64>,
    /// Where each image's snapshot is.
    places: HashMap<ImageId, usize>,
    /// How the job ended last, while it is unknown what follows.
    ended: Option<End>,
    /// The failure that the next start makes good.
    open: Option<usize>,
    /// How long the job has run since the last snapshot or start.
    ran: u64,
    first: bool,
    life_began: Option<i64>,
    persists: Vec<(i64, i64)>,
    snapshots: Vec<Snapshot>,
    failures: Vec<Failure>,
    restarts: Vec<i64>,
    command: Vec<String>,
    interval: String,
}

impl History {
    /// All events of a journal.
    #[must_use]
    pub fn of(events: &[Event]) -> History {
        let mut history = History::default();
        events.iter().for_each(|event| history.add(event));
        history
    }

    /// The next event.
    pub fn add(&mut self, event: &Event) {
        let at = self.moment(event.time);
        if event.run != self.run {
            self.run.clone_from(&event.run);
            self.new_run = Some(at);
        }
        match &event.what {
            What::Supervised { command, interval, before, last_seen, .. } => {
                let seen = last_seen.map(|seen| seen.timestamp_micros().saturating_add(self.skew));
                self.supervised(at, seen, before.as_ref());
                self.command.clone_from(command);
                self.interval.clone_from(interval);
            }
            What::Started { image, took_us, .. } => self.started(at, *image, *took_us),
            What::SnapshotBegan { .. } => self.runs(at),
            What::SnapshotTaken { image, reason, freeze_us, phases, bytes } => {
                self.frozen(at, *image, *freeze_us);
                self.places.insert(*image, self.snapshots.len());
                self.snapshots.push(Snapshot {
                    image: *image,
                    at,
                    reason: *reason,
                    freeze_us: *freeze_us,
                    phases: phases.clone(),
                    bytes: *bytes,
                    ran_us: self.ran,
                    first: std::mem::replace(&mut self.first, false),
                    stored_us: None,
                    written: None,
                });
                self.ran = 0;
            }
            What::SnapshotFailed { why, .. } => {
                self.runs(at);
                self.fail(at, Trouble::Snapshot, why.clone());
            }
            What::Stored { image, took_us, written } => {
                self.pass(at);
                self.persists.push((at.saturating_sub_unsigned(*took_us), at));
                if let Some(snapshot) = self.places.get(image).and_then(|place| self.snapshots.get_mut(*place)) {
                    (snapshot.stored_us, snapshot.written) = (Some(*took_us), Some(*written));
                }
            }
            What::NotStored { why, .. } | What::StoreDamaged { why, .. } => {
                self.pass(at);
                self.fail(at, Trouble::Store, why.clone());
            }
            What::NotReplicated { why, .. } => {
                self.pass(at);
                self.fail(at, Trouble::Replica, why.clone());
            }
            What::ImageBad { image, why } | What::RehearsalFailed { image, why } => {
                self.pass(at);
                self.fail(at, Trouble::Image, format!("image {image}: {why}"));
            }
            What::Ended { exit_code, signal, cause } => {
                self.runs(at);
                let suspended = *cause == Some(Cause::Suspended);
                self.now = if suspended { Now::Nothing } else { Now::Down };
                self.life_began = None;
                self.ended = Some(End::of(at, *exit_code, *signal, cause.as_ref()));
            }
            What::Restarting { .. } => {
                self.pass(at);
                self.restarts.push(at);
                if self.now == Now::Up {
                    // Of how it ended nothing is written.
                    self.ended = Some(End::of(at, None, None, None));
                }
                self.now = Now::Down;
                self.crashed();
            }
            What::Suspended { .. } => {
                self.pass(at);
                self.now = Now::Nothing;
                self.ended = None;
            }
            What::Finished { outcome, exit_code, why } => self.finished(at, outcome, *exit_code, why.as_deref()),
            _ => self.pass(at),
        }
    }

    /// The time of an event, never before the one before.
    fn moment(&mut self, time: DateTime<Utc>) -> i64 {
        let at = time.timestamp_micros().saturating_add(self.skew);
        match self.at {
            Some(before) if at < before => {
                self.skew = self.skew.saturating_add(before.saturating_sub(at));
                self.set_back += 1;
                before
            }
            _ => at,
        }
    }

    /// Time passes, up to there.
    fn pass(&mut self, to: i64) {
        let kind = match self.now {
            Now::Nothing => Kind::Idle,
            Now::Down => Kind::Down,
            Now::Up => Kind::Useful,
        };
        self.fill(kind, to);
    }

    fn fill(&mut self, kind: Kind, to: i64) {
        let from = *self.at.get_or_insert(to);
        if to <= from {
            return;
        }
        if kind == Kind::Useful {
            self.ran = self.ran.saturating_add(between(from, to));
        }
        self.at = Some(to);
        match self.spans.last_mut() {
            Some(last) if last.kind == kind && last.to == from => last.to = to,
            _ => self.spans.push(Span { kind, from, to }),
        }
    }

    /// The job ran up to there. If nothing said before that it does, it is not known since when.
    fn runs(&mut self, to: i64) {
        self.pass(to);
        self.now = Now::Up;
    }

    fn frozen(&mut self, at: i64, image: ImageId, freeze_us: u64) {
        let begun = at.saturating_sub_unsigned(freeze_us).max(self.life_began.unwrap_or(i64::MIN));
        let from = begun.max(self.at.unwrap_or(at));
        self.runs(from);
        self.fill(Kind::Frozen, at);
        // Other events may have been written during the freeze.
        self.ran = self.ran.saturating_sub(self.turn(begun, Kind::Frozen));
        self.states.insert(image, begun);
    }

    fn supervised(&mut self, at: i64, seen: Option<i64>, before: Option<&Cause>) {
        if self.now == Now::Nothing {
            self.pass(at);
        } else {
            // By the clock of the file system, which may be another.
            self.pass(seen.unwrap_or(i64::MIN).min(at));
            let died = self.at.unwrap_or(at);
            self.fill(Kind::Away, at);
            let why =
                before.map_or_else(|| "the supervisor was killed, or the machine went down".into(), Cause::to_string);
            self.fail(died, Trouble::Supervisor, why);
            self.open = self.failures.len().checked_sub(1);
        }
        self.ended = None;
        self.now = Now::Down;
        self.life_began = None;
    }

    fn started(&mut self, at: i64, image: Option<ImageId>, took_us: u64) {
        if self.now == Now::Up {
            // The line of its end is missing.
            self.pass(at.saturating_sub_unsigned(took_us).max(self.at.unwrap_or(at)));
        }
        self.fill(if self.now == Now::Nothing { Kind::Idle } else { Kind::Down }, at);
        // A rule restarts the job without another event in between.
        self.crashed();
        // A new run that begins from an image (a rewind, `rekindle restore`) goes back like any other.
        if let (Some(began), None) = (self.new_run.take(), image) {
            self.floor = began;
        }
        let lost = self.go_back(image);
        if let Some(failure) = self.open.take().and_then(|open| self.failures.get_mut(open)) {
            failure.back_us = Some(between(failure.at, at));
            failure.lost_us = Some(lost);
            failure.image = image;
        }
        self.now = Now::Up;
        self.ran = 0;
        self.first = true;
        self.life_began = Some(at);
    }

    /// The job is as it was at the image, or at its beginning. Its work since is lost. Answers how much that is.
    fn go_back(&mut self, image: Option<ImageId>) -> u64 {
        let to = match image {
            // Taken before what is left of the journal: its name has the time, to the second.
            Some(id) => {
                let named = || id.taken().timestamp_micros();
                self.states.get(&id).copied().unwrap_or_else(named).max(self.floor)
            }
            None => self.floor,
        };
        self.turn(to, Kind::Lost)
    }

    /// What was useful since then was something else. Answers how much that is.
    fn turn(&mut self, since: i64, kind: Kind) -> u64 {
        let mut turned = 0_u64;
        let mut at = self.spans.len();
        while let Some(before) = at.checked_sub(1) {
            let Some(span) = self.spans.get_mut(before) else { break };
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
                self.spans.insert(before, kept);
                break;
            }
        }
        turned
    }

    /// The job is restarted after its end, if it ended by itself.
    fn crashed(&mut self) {
        if let Some(End { at, why, asked: false }) = self.ended.take() {
            self.fail(at, Trouble::Crash, why);
            self.open = self.failures.len().checked_sub(1);
        }
    }

    fn finished(&mut self, at: i64, outcome: &str, exit_code: Option<i32>, why: Option<&str>) {
        self.pass(at);
        let since = self.ended.as_ref().map_or(at, |end| end.at);
        if outcome == "completed" {
            self.floor = at;
        }
        if outcome == "failed" {
            self.ended = None;
            let code = exit_code.map(|code| format!(" (exit code {code})")).unwrap_or_default();
            self.fail(since, Trouble::GivenUp, format!("{}{code}", why.unwrap_or("given up")));
        }
        // After its end it was not supposed to run: the last image was being stored.
        for span in self.spans.iter_mut().rev().take_while(|span| span.from >= since) {
            if span.kind == Kind::Down {
                span.kind = Kind::Idle;
            }
        }
        self.ended = None;
        self.open = None;
        self.now = Now::Nothing;
        self.life_began = None;
    }

    fn fail(&mut self, at: i64, what: Trouble, why: String) {
        self.failures.push(Failure { at, what, why, back_us: None, lost_us: None, image: None });
    }

    // ---- what it comes to ----

    /// Everything up to the last event; up to `now` if the supervisor still runs.
    #[must_use]
    pub fn until(&self, now: Option<DateTime<Utc>>) -> Vec<Span> {
        let mut spans = self.spans.clone();
        spans.extend(self.last(now));
        spans
    }

    /// Microseconds of each kind, in the order of [`Kind::ALL`]: [`History::until`] added up.
    #[must_use]
    pub fn sums(&self, now: Option<DateTime<Utc>>) -> [u64; 6] {
        Kind::ALL.map(|kind| {
            let of = |span: &&Span| span.kind == kind;
            self.spans.iter().chain(self.last(now).as_ref()).filter(of).map(Span::length).sum()
        })
    }

    /// The stretch that is not over.
    fn last(&self, now: Option<DateTime<Utc>>) -> Option<Span> {
        let to = now?.timestamp_micros().saturating_add(self.skew);
        let kind = match self.now {
            Now::Nothing => Kind::Idle,
            Now::Down => Kind::Down,
            Now::Up => Kind::Useful,
        };
        self.at.filter(|from| *from < to).map(|from| Span { kind, from, to })
    }

    /// The snapshots, oldest first.
    #[must_use]
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// What went wrong, oldest first.
    #[must_use]
    pub fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// When the job had to be restarted.
    #[must_use]
    pub fn restarts(&self) -> &[i64] {
        &self.restarts
    }

    /// When an image was being stored: from, to.
    #[must_use]
    pub fn persists(&self) -> &[(i64, i64)] {
        &self.persists
    }

    /// How often the clock was set back, and by how much in all, in microseconds.
    #[must_use]
    pub fn set_back(&self) -> (u32, i64) {
        (self.set_back, self.skew)
    }

    /// Since when the job runs, if it does.
    #[must_use]
    pub fn up_since(&self) -> Option<i64> {
        self.life_began.filter(|_| self.now == Now::Up)
    }

    /// The command and the interval, as the last supervisor had them.
    #[must_use]
    pub fn setting(&self) -> (&[String], &str) {
        (&self.command, &self.interval)
    }
}

/// Microseconds from one moment to another; none if the second is earlier.
#[must_use]
pub fn between(from: i64, to: i64) -> u64 {
    u64::try_from(to.saturating_sub(from)).unwrap_or(0)
}

#[cfg(test)]
mod tests;
