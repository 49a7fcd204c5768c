//! Evaluates the events of a job: how the time was spent, moment by moment, and what was lost.
//!
//! Every moment from the first event on belongs to one [`Kind`]. The kind is known when the next event comes, with one
//! exception: work is [`Kind::Useful`] until the job goes back to an older image, and becomes [`Kind::Lost`] then.
//!
//! Lines may be missing (a power cut, a journal that was moved): each event is taken for what it says, whatever was
//! before.

mod group;
mod timeline;

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::words;
use crate::telemetry::events::{Event, What};
pub(crate) use group::GroupHistory;
use rekindle_base::cause::Cause;
use rekindle_store::ImageId;
use rekindle_store::manifest::{Phase, Reason};
use timeline::{Clock, Timeline};
pub(crate) use timeline::{Kind, Span, between};

/// A snapshot that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    pub image: ImageId,
    /// When the job ran again.
    pub at: i64,
    /// Why it was taken.
    pub reason: Reason,
    /// The length of the freeze.
    pub freeze_us: u64,
    /// All phases, including those before the freeze.
    pub phases: Vec<Phase>,
    /// Bytes of the image.
    pub bytes: u64,
    /// How long the job had run since the previous snapshot or start.
    pub ran_us: u64,
    /// Whether it was the first of its life: then the time before it says nothing about the interval.
    pub first: bool,
    /// How long storing took, if it is stored.
    pub stored_us: Option<u64>,
    /// Bytes written for it.
    pub written: Option<u64>,
}

/// The kind of failure.
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
    /// An image could not be stored.
    Store,
    /// An image could not be replicated.
    Replica,
    /// The job was given up.
    GivenUp,
}

impl Trouble {
    /// Whether the job was not running then.
    #[must_use]
    pub fn is_death(self) -> bool {
        matches!(self, Trouble::Crash | Trouble::Supervisor | Trouble::GivenUp)
    }
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// When it happened.
    pub at: i64,
    pub what: Trouble,
    /// Its reason as text.
    pub why: String,
    /// How long it took until the job ran again, if it did.
    pub back_us: Option<u64>,
    /// The lost work, once it is known.
    pub lost_us: Option<u64>,
    /// The image that the job was restored from; `None` if it started from the beginning.
    pub image: Option<ImageId>,
}

/// The present state, after the events added so far.
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
    /// It was requested: a restart after it is not a failure.
    asked: bool,
}

impl End {
    fn of(at: i64, exit_code: Option<i32>, signal: Option<i32>, cause: Option<&Cause>) -> End {
        let asked = cause.is_some_and(Cause::is_wanted);
        let how = words::end(exit_code, signal);
        let why = match cause {
            // The same, as another type.
            None | Some(Cause::Exit { .. } | Cause::Signal { .. } | Cause::Unknown) => how,
            Some(cause) => format!("{cause} ({how})"),
        };
        End { at, why, asked }
    }
}

/// The supervisor's run that the events belong to.
#[derive(Debug, Clone, Default)]
struct Run {
    id: String,
    /// When it began, until the job runs in it.
    began: Option<i64>,
    command: Vec<String>,
    interval: String,
}

/// One life of the job.
#[derive(Debug, Clone, Default)]
struct Life {
    began: Option<i64>,
    /// How long it has run since the last snapshot or start.
    ran: u64,
    /// No snapshot was taken of it yet.
    fresh: bool,
}

/// Where a restart may go back to.
#[derive(Debug, Clone, Default)]
struct Origins {
    /// Nothing before it is lost by a restart: a run started from the beginning there, or was completed.
    floor: i64,
    /// When each image's state was that of the job.
    images: HashMap<ImageId, i64>,
}

impl Origins {
    /// When the job was as it is at the image, or at its beginning.
    fn of(&self, image: Option<ImageId>) -> i64 {
        // Taken before what is left of the journal: its name has the time, to the second.
        let of = |id: ImageId| self.images.get(&id).copied().unwrap_or_else(|| id.taken().timestamp_micros());
        image.map_or(self.floor, |id| of(id).max(self.floor))
    }
}

/// The snapshots, oldest first.
#[derive(Debug, Clone, Default)]
struct Snapshots {
    taken: Vec<Snapshot>,
    /// Where each image's snapshot is.
    places: HashMap<ImageId, usize>,
}

impl Snapshots {
    fn add(&mut self, snapshot: Snapshot) {
        self.places.insert(snapshot.image, self.taken.len());
        self.taken.push(snapshot);
    }

    fn stored(&mut self, image: ImageId, took_us: u64, written: u64) {
        if let Some(snapshot) = self.places.get(&image).and_then(|place| self.taken.get_mut(*place)) {
            (snapshot.stored_us, snapshot.written) = (Some(took_us), Some(written));
        }
    }
}

/// What went wrong, oldest first.
#[derive(Debug, Clone, Default)]
struct Failures {
    all: Vec<Failure>,
    /// The one that the next start makes good.
    open: Option<usize>,
}

impl Failures {
    fn add(&mut self, at: i64, what: Trouble, why: String) {
        self.all.push(Failure { at, what, why, back_us: None, lost_us: None, image: None });
    }

    /// One that the next start makes good.
    fn add_open(&mut self, at: i64, what: Trouble, why: String) {
        self.open = Some(self.all.len());
        self.add(at, what, why);
    }

    /// The job runs again.
    fn made_good(&mut self, at: i64, image: Option<ImageId>, lost: u64) {
        if let Some(failure) = self.open.take().and_then(|open| self.all.get_mut(open)) {
            failure.back_us = Some(between(failure.at, at));
            failure.lost_us = Some(lost);
            failure.image = image;
        }
    }
}

/// The events of a job, added up.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    run: Run,
    now: Now,
    life: Life,
    /// How the job ended last, while it is unknown what follows.
    ended: Option<End>,
    clock: Clock,
    timeline: Timeline,
    origins: Origins,
    snapshots: Snapshots,
    failures: Failures,
    persists: Vec<(i64, i64)>,
    restarts: Vec<i64>,
    group: GroupHistory,
}

impl History {
    /// Evaluates all events of a journal.
    #[must_use]
    pub(crate) fn of(events: &[Event]) -> History {
        let mut history = History::default();
        events.iter().for_each(|event| history.add(event));
        history
    }

    /// Adds the next event.
    pub(crate) fn add(&mut self, event: &Event) {
        let at = self.clock.next(event.time);
        if event.run != self.run.id {
            self.run.id.clone_from(&event.run);
            self.run.began = Some(at);
        }
        match &event.what {
            What::Supervised { command, interval, before, last_seen, .. } => {
                let seen = last_seen.map(|seen| self.clock.read(seen));
                self.supervised(at, seen, before.as_ref());
                self.run.command.clone_from(command);
                self.run.interval.clone_from(interval);
            }
            What::Started { image, took_us, .. } => self.started(at, *image, *took_us),
            What::SnapshotBegan { .. } => self.runs(at),
            What::SnapshotTaken { image, reason, freeze_us, phases, bytes } => {
                self.frozen(at, *image, *freeze_us);
                self.snapshots.add(Snapshot {
                    image: *image,
                    at,
                    reason: *reason,
                    freeze_us: *freeze_us,
                    phases: phases.clone(),
                    bytes: *bytes,
                    ran_us: std::mem::take(&mut self.life.ran),
                    first: std::mem::take(&mut self.life.fresh),
                    stored_us: None,
                    written: None,
                });
            }
            What::SnapshotFailed { why, .. } => {
                self.runs(at);
                self.failures.add(at, Trouble::Snapshot, why.clone());
            }
            What::Stored { image, took_us, written } => {
                self.pass(at);
                self.persists.push((at.saturating_sub_unsigned(*took_us), at));
                self.snapshots.stored(*image, *took_us, *written);
            }
            What::NotStored { why, .. } | What::StoreDamaged { why, .. } => {
                self.pass(at);
                self.failures.add(at, Trouble::Store, why.clone());
            }
            What::NotReplicated { why, .. } => {
                self.pass(at);
                self.failures.add(at, Trouble::Replica, why.clone());
            }
            What::ImageBad { image, why } | What::RehearsalFailed { image, why } => {
                self.pass(at);
                self.failures.add(at, Trouble::Image, format!("image {image}: {why}"));
            }
            What::Ended { exit_code, signal, cause } => {
                self.runs(at);
                let suspended = *cause == Some(Cause::Suspended);
                self.now = if suspended { Now::Nothing } else { Now::Down };
                self.life.began = None;
                self.ended = Some(End::of(at, *exit_code, *signal, cause.as_ref()));
            }
            What::Restarting { .. } => {
                self.pass(at);
                self.restarts.push(at);
                if self.now == Now::Up {
                    // There is no event about how it ended.
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
            other => {
                self.pass(at);
                self.group.add(at, other);
            }
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
        let Some((from, to)) = self.clock.pass(to) else { return };
        if kind == Kind::Useful {
            self.life.ran = self.life.ran.saturating_add(between(from, to));
        }
        self.timeline.fill(kind, (from, to));
    }

    /// The job ran until then. If no earlier event says so, it is unknown since when.
    fn runs(&mut self, to: i64) {
        self.pass(to);
        self.now = Now::Up;
    }

    fn frozen(&mut self, at: i64, image: ImageId, freeze_us: u64) {
        let begun = at.saturating_sub_unsigned(freeze_us).max(self.life.began.unwrap_or(i64::MIN));
        let from = begun.max(self.clock.reached_or(at));
        self.runs(from);
        self.fill(Kind::Frozen, at);
        // Other events may have been written during the freeze.
        self.life.ran = self.life.ran.saturating_sub(self.timeline.turn(begun, Kind::Frozen));
        self.origins.images.insert(image, begun);
    }

    fn supervised(&mut self, at: i64, seen: Option<i64>, before: Option<&Cause>) {
        if self.now == Now::Nothing {
            self.pass(at);
        } else {
            // `seen` is from the clock of the file system, which may differ from ours.
            self.pass(seen.unwrap_or(i64::MIN).min(at));
            let died = self.clock.reached_or(at);
            self.fill(Kind::Away, at);
            let why =
                before.map_or_else(|| "the supervisor was killed, or the machine went down".into(), Cause::to_string);
            self.failures.add_open(died, Trouble::Supervisor, why);
        }
        self.ended = None;
        self.now = Now::Down;
        self.life.began = None;
    }

    fn started(&mut self, at: i64, image: Option<ImageId>, took_us: u64) {
        if self.now == Now::Up {
            // The line of its end is missing.
            self.pass(at.saturating_sub_unsigned(took_us).max(self.clock.reached_or(at)));
        }
        self.fill(if self.now == Now::Nothing { Kind::Idle } else { Kind::Down }, at);
        // A rule restarts the job without another event in between.
        self.crashed();
        // A new run that begins from an image (a rewind, `rekindle restore`) goes back like any other.
        if let (Some(began), None) = (self.run.began.take(), image) {
            self.origins.floor = began;
        }
        // Its work since then is lost.
        let lost = self.timeline.turn(self.origins.of(image), Kind::Lost);
        self.failures.made_good(at, image, lost);
        self.now = Now::Up;
        self.life = Life { began: Some(at), ran: 0, fresh: true };
    }

    /// Records a failure if the job is restarted after it ended by itself.
    fn crashed(&mut self) {
        if let Some(End { at, why, asked: false }) = self.ended.take() {
            self.failures.add_open(at, Trouble::Crash, why);
        }
    }

    fn finished(&mut self, at: i64, outcome: &str, exit_code: Option<i32>, why: Option<&str>) {
        self.pass(at);
        let since = self.ended.as_ref().map_or(at, |end| end.at);
        if outcome == "completed" {
            self.origins.floor = at;
        }
        if outcome == "failed" {
            self.ended = None;
            let code = exit_code.map(|code| format!(" (exit code {code})")).unwrap_or_default();
            self.failures.add(since, Trouble::GivenUp, format!("{}{code}", why.unwrap_or("given up")));
        }
        // After its end it was not supposed to run: the last image was being stored.
        self.timeline.idle_since(since);
        self.ended = None;
        self.failures.open = None;
        self.now = Now::Nothing;
        self.life.began = None;
    }

    // ---- what it comes to ----

    /// Everything up to the last event; up to `now` if the supervisor still runs.
    #[must_use]
    pub(crate) fn until(&self, now: Option<DateTime<Utc>>) -> Vec<Span> {
        let mut spans = self.timeline.spans().to_vec();
        spans.extend(self.last(now));
        spans
    }

    /// Microseconds of each kind, in the order of [`Kind::ALL`]: [`History::until`] added up.
    #[cfg(test)]
    pub(crate) fn sums(&self, now: Option<DateTime<Utc>>) -> [u64; 6] {
        let spans = self.until(now);
        Kind::ALL.map(|kind| spans.iter().filter(|span| span.kind == kind).map(Span::length).sum())
    }

    /// The stretch that is not over yet.
    fn last(&self, now: Option<DateTime<Utc>>) -> Option<Span> {
        let (from, to) = self.clock.since(now?)?;
        let kind = match self.now {
            Now::Nothing => Kind::Idle,
            Now::Down => Kind::Down,
            Now::Up => Kind::Useful,
        };
        Some(Span { kind, from, to })
    }

    /// The snapshots, oldest first.
    #[must_use]
    pub(crate) fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots.taken
    }

    /// The failures, oldest first.
    #[must_use]
    pub(crate) fn failures(&self) -> &[Failure] {
        &self.failures.all
    }

    /// The times of the restarts.
    #[must_use]
    pub(crate) fn restarts(&self) -> &[i64] {
        &self.restarts
    }

    /// What happened to the group.
    #[must_use]
    pub(crate) fn group(&self) -> &GroupHistory {
        &self.group
    }

    /// The times in which an image was being stored: from, to.
    #[must_use]
    pub(crate) fn persists(&self) -> &[(i64, i64)] {
        &self.persists
    }

    /// How often the clock was set back, and by how many microseconds in total.
    #[must_use]
    pub(crate) fn set_back(&self) -> (u32, i64) {
        self.clock.set_back()
    }

    /// Since when the job has been running, if it is.
    #[must_use]
    pub(crate) fn up_since(&self) -> Option<i64> {
        self.life.began.filter(|_| self.now == Now::Up)
    }

    /// The command and the interval of the last supervisor.
    #[must_use]
    pub(crate) fn setting(&self) -> (&[String], &str) {
        (&self.run.command, &self.run.interval)
    }
}

#[cfg(test)]
mod tests;
