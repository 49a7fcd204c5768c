//! The invariants. The oracle keeps its own account of what a supervisor can know, and judges by that and by the truth;
//! it uses no decision of the product.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::model::{End, candidate};
use super::ranks::Account;
use super::restores::Trouble;
use super::world::World;
use crate::config::{ColdStart, Snapshot};
use crate::policy::{Failure, HEALTHY_UPTIME, Mark, StartPoint};
use crate::supervisor::line::{Candidate, Line};
use crate::supervisor::state::{Ending, Event, Harm, State, Then};
use rekindle_os::spawn::Ended;
use rekindle_store::manifest::Reason;
use rekindle_store::{BadWhy, ImageId};

/// Observations about an image in this run.
#[derive(Debug, Clone, Default)]
struct Against {
    /// Failures since the job lived on from it.
    failures: u32,
    /// The failures that may be the image's fault.
    seen: Vec<Seen>,
    /// There is a reason not to use it now: it was slow, its files are missing, it is damaged.
    passed: bool,
    /// It was marked.
    marked: bool,
    /// It was to be marked, which may have failed: it is left out of the choice that follows.
    condemned: bool,
    /// The last end of a long life from it, and the number of similar ones in a row.
    late: Option<(Seen, u32)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Died {
        ended: Option<Ended>,
        uptime: Duration,
    },
    /// It hung, and had done nothing since the restore.
    Hung,
    Refused(String),
}

impl Seen {
    /// Nobody would take it for another one.
    fn is_the_same(&self, other: &Seen) -> bool {
        match (self, other) {
            (Seen::Died { ended, uptime }, Seen::Died { ended: other, uptime: before }) => {
                ended == other && uptime.abs_diff(*before) <= Duration::from_millis(250)
            }
            _ => false,
        }
    }

    /// More generous than the policy: failures that the policy treats as alike are alike here too.
    fn is_like(&self, other: &Seen) -> bool {
        match (self, other) {
            (Seen::Died { ended, uptime }, Seen::Died { ended: other, uptime: before }) => {
                let near = Duration::from_millis(500).max(*uptime.min(before) / 2);
                ended == other && uptime.abs_diff(*before) <= near
            }
            (Seen::Refused(why), Seen::Refused(other)) => why == other,
            (Seen::Hung, Seen::Hung) => true,
            (Seen::Died { .. } | Seen::Refused(_) | Seen::Hung, _) => false,
        }
    }
}

/// A requested stop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopping {
    first: Instant,
    /// Its time limit.
    until: Instant,
    /// There was a second request, too late to count as the same.
    pub(super) again: bool,
    /// The job's work at that time, if it ran and nothing happened since that prevents an image.
    pub(super) work: Option<Duration>,
}

/// An image that could not be stored.
#[derive(Debug, Default)]
pub(super) struct Unstored {
    /// When it must have been tried again.
    pub(super) by: Option<Instant>,
    /// How many attempts failed in a row.
    count: u32,
}

/// What is known about hangs.
#[derive(Debug, Default)]
struct Hangs {
    /// Images of hangs for which the job was ended: it did nothing after them.
    images: BTreeSet<ImageId>,
    /// The job was ended for a hang, and had done nothing since it was restored from these.
    stuck: BTreeSet<ImageId>,
    /// The job has lived on from this one of them. Until the policy is asked about that life, it is one of them.
    lived_on: Option<ImageId>,
    /// The job is ended for a hang now.
    by_hang: bool,
    /// It had done nothing since it was restored.
    did_nothing: bool,
    /// The last start of the watch's clocks after which it saw progress.
    moved: Option<Instant>,
}

/// The failures, and how often they occurred.
#[derive(Debug, Default)]
pub(super) struct Failures {
    against: BTreeMap<ImageId, Against>,
    /// The last early death, and the number of similar ones before it, from any image.
    row: Option<(Option<Ended>, u32)>,
    /// When a snapshot that failed temporarily must have been tried again, and how many failed so in a row.
    retry: Option<Instant>,
    missed: u32,
    /// Number of snapshots in a row that ended the job.
    fatal: u32,
    /// The image that failed last, and when.
    failed: Option<(ImageId, Instant)>,
    /// Whether the machine caused a failure.
    pub(super) machine_failed: bool,
    /// Deaths of ranks.
    pub(super) ranks: Account,
    pub(super) unstored: Unstored,
    hangs: Hangs,
    /// Long lives in a row from one image that ended at the same moment, without a newer image.
    streak: Option<(ImageId, Seen, u32)>,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    pub(super) violation: Option<String>,
    /// A trouble that will hit the next restore or dump.
    pub(super) armed: Option<Trouble>,
    /// Percentage of images that CRIU refuses.
    pub(super) unrestorable: u64,
    /// An image with a death that the job has not noticed yet.
    pub(super) poisoned: Option<ImageId>,
    /// The image that a user named, until the job runs.
    pub(super) asked: Option<ImageId>,
    /// Since when the store has been writable.
    pub(super) writable_since: Option<Instant>,
    /// Images that this life continues from, and since when.
    alive: Vec<(ImageId, Instant)>,
    /// The newest proven image of the line, which must exist.
    expected: Option<ImageId>,
    /// Whether it is in the store.
    expected_stored: bool,
    /// Images that were reported as stored.
    pub(super) stored: BTreeSet<ImageId>,
    /// The same, including those removed in this life.
    ever_stored: BTreeSet<ImageId>,
    /// An image was removed for lack of space.
    pub(super) short_of_room: bool,
    pub(super) failures: Failures,
    pub(super) stopping: Option<Stopping>,
}

/// So many snapshots in a row may end the job.
const FATAL: u32 = 3;
/// Requests to stop within this time count as one.
const TOGETHER: Duration = Duration::from_secs(2);
/// How many different failures an image may have.
const TRIES: u32 = 4;
/// Time of a stop beyond its time limit: cancelling a start, a kill.
const MARGIN: Duration = Duration::from_secs(5);
/// Time to record a proof, from when the store is writable.
const NOTED: Duration = Duration::from_secs(11);

impl Oracle {
    pub(super) fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(super) fn run_begins(&mut self, named: Option<StartPoint>) {
        self.failures.machine_failed = false;
        self.asked = named.and_then(|from| if let StartPoint::Image(id) = from { Some(id) } else { None });
    }

    /// What the run knew is lost with it.
    pub(super) fn run_ends(&mut self) {
        self.alive.clear();
        self.failures.against.clear();
        (self.failures.row, self.failures.retry, self.failures.missed, self.failures.failed) = (None, None, 0, None);
        (self.stopping, self.asked, self.poisoned) = (None, None, None);
        self.failures.unstored = Unstored::default();
        self.failures.ranks = Account::default();
        (self.failures.hangs, self.failures.streak, self.failures.fatal) = (Hangs::default(), None, 0);
    }

    /// Something was removed that no supervisor could have kept.
    pub(super) fn excuse(&mut self) {
        self.expected = None;
    }

    pub(super) fn snapshot_begins(&mut self, reason: Reason) {
        self.failures.retry = None;
        if reason == Reason::Interval && self.failures.fatal >= FATAL {
            self.violate("a snapshot is taken at the interval, and those before it ended the job".into());
        }
    }

    pub(super) fn taken(&mut self, id: ImageId, now: Instant) {
        self.alive.push((id, now));
        (self.failures.missed, self.failures.fatal) = (0, 0);
        if self.poisoned.take() == Some(id) {
            self.violate(format!("image {id} has a death that the job has yet to hear of"));
        }
    }

    /// An image was not stored.
    pub(super) fn not_stored(&mut self, config: &Snapshot, now: Instant) {
        let unstored = &mut self.failures.unstored;
        let pause = (config.retry_after * 2_u32.saturating_pow(unstored.count.min(16))).min(config.longest_retry());
        unstored.count += 1;
        unstored.by = Some(now + pause + Duration::from_secs(1));
    }

    pub(super) fn is_stored(&mut self, id: ImageId) {
        self.failures.unstored = Unstored::default();
        self.stored.insert(id);
        self.ever_stored.insert(id);
    }

    pub(super) fn is_removed(&mut self, id: ImageId) {
        self.stored.remove(&id);
    }

    /// Whether there is a reason not to use it now.
    pub(super) fn is_passed(&self, id: ImageId) -> bool {
        self.failures.against.get(&id).is_some_and(|against| against.passed)
    }

    pub(super) fn failed_at(&self) -> Option<Instant> {
        self.failures.failed.map(|(_, at)| at)
    }

    /// Something happened after which no final image can be required.
    pub(super) fn disturb(&mut self) {
        self.stopping.iter_mut().for_each(|stop| stop.work = None);
    }

    fn add(&mut self, id: ImageId, seen: Option<Seen>, now: Instant) {
        let against = self.failures.against.entry(id).or_default();
        against.failures += 1;
        against.seen.extend(seen);
        self.failures.failed = Some((id, now));
        self.failures.streak = None;
    }

    /// The watch has seen progress since this start of its clocks.
    pub(super) fn sees_progress(&mut self, since: Instant) {
        self.failures.hangs.moved = Some(since);
    }

    /// A life from this image was long enough.
    fn lived(&mut self, id: ImageId, seen: Option<Seen>, late: Option<(Seen, u32)>, took_none: bool) {
        let streak = self.failures.streak.take();
        let Some(seen) = seen else { return };
        let count = late.filter(|(before, _)| seen.is_like(before)).map_or(0, |(_, count)| count) + 1;
        let against = Against { late: Some((seen.clone(), count)), passed: count >= TRIES, ..Against::default() };
        self.failures.against.insert(id, against);
        if took_none {
            let before = streak.filter(|(of, before, _)| *of == id && seen.is_the_same(before));
            self.failures.streak = Some((id, seen, before.map_or(0, |(.., count)| count) + 1));
        }
    }

    fn pass(&mut self, id: ImageId) {
        self.failures.against.entry(id).or_default().passed = true;
    }
}

impl World {
    // ---- what the oracle sees ----

    pub(super) fn oracle_sees_life(&mut self, from: StartPoint) {
        let next = self.run.as_ref().and_then(|run| run.machine.state().rewinds_next());
        let asked = self.oracle.asked.take();
        if let Some(id) = asked.filter(|id| from == StartPoint::Image(*id)) {
            self.check_line_after_rewind(id);
        }
        // A rewind that was requested during the start is still to come.
        self.oracle.asked = asked.filter(|id| next == Some(*id));
        self.oracle.failures.failed = None;
        self.oracle.ever_stored.retain(|id| self.ground.is_stored(*id));
        self.oracle.alive.clear();
        self.oracle.failures.missed = 0;
        if let StartPoint::Image(id) = from {
            self.oracle.alive.push((id, self.now));
        }
    }

    pub(super) fn oracle_sees_end(&mut self, end: End, excused: bool) {
        let took_none = self.oracle.alive.len() <= 1;
        self.oracle.alive.clear();
        self.oracle.failures.retry = None;
        self.oracle.failures.hangs.did_nothing = false;
        let by_rank = std::mem::take(&mut self.oracle.failures.ranks.by_rank);
        let by_hang = std::mem::take(&mut self.oracle.failures.hangs.by_hang);
        let stopped = self
            .run
            .as_ref()
            .is_some_and(|run| matches!(run.machine.state(), State::Ending { stop: Ending::Stop(_), .. }));
        if !stopped {
            self.oracle.disturb();
        }
        let (Some(job), Some(run)) = (&self.job, &self.run) else { return };
        let uptime = self.now.saturating_duration_since(job.since);
        let ending = match run.machine.state() {
            State::Ending { stop, .. } => Some(*stop),
            _ => None,
        };
        // These ends are no failures, and the policy is not asked.
        if matches!(ending, Some(Ending::Stop(_) | Ending::Suspend | Ending::Rewind(_))) {
            return;
        }
        let restart = &self.config.restart;
        let StartPoint::Image(id) = job.from else {
            if uptime >= HEALTHY_UPTIME {
                self.oracle.failures.row = None;
            }
            return;
        };
        let from_outside =
            matches!(end.ended, Ended::Signal(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP));
        let seen = match ending {
            Some(Ending::Condemned) if by_rank => None,
            Some(Ending::Condemned) if by_hang => Some(Seen::Hung),
            Some(Ending::Condemned) => Some(Seen::Died { ended: None, uptime }),
            Some(_) => None,
            None if from_outside || excused => None,
            None => Some(Seen::Died { ended: Some(end.ended), uptime }),
        };
        // A life that hung from its beginning is no life; nor is one that did too little to be seen.
        let was_seen = self.oracle.failures.hangs.moved >= Some(job.since);
        let did_nothing = by_hang && job.hung.is_some_and(|hung| hung <= job.since || !was_seen);
        self.oracle.failures.hangs.did_nothing = did_nothing;
        // A life without a newer image came no further than the lives before.
        if uptime >= HEALTHY_UPTIME && !took_none && !did_nothing {
            self.oracle.failures.row = None;
        }
        if did_nothing {
            self.oracle.failures.hangs.stuck.insert(id);
        }
        if uptime >= restart.min_uptime && !did_nothing {
            let late = self.oracle.failures.against.remove(&id).and_then(|against| against.late);
            self.oracle.failures.hangs.lived_on = Some(id);
            self.oracle.failures.row = None;
            let seen = match seen {
                Some(Seen::Hung) => Some(Seen::Died { ended: None, uptime }),
                other => other,
            };
            return self.oracle.lived(id, seen, late, took_none);
        }
        let proven = self.ground.proven.contains(&id);
        match &seen {
            Some(seen @ (Seen::Died { .. } | Seen::Hung)) if !proven => {
                let ended = if let Seen::Died { ended, .. } = seen { *ended } else { None };
                let before = self.oracle.failures.row.take().filter(|(before, _)| *before == ended);
                self.oracle.failures.row = Some((ended, before.map_or(0, |(_, count)| count) + 1));
            }
            _ => self.oracle.failures.row = None,
        }
        self.oracle.add(id, seen.filter(|_| !proven), self.now);
    }

    /// The policy was asked about a long life that had taken a new image: it forgets failures. Hangs do not pass.
    pub(super) fn oracle_sees_health(&mut self, from: Option<ImageId>) {
        let Failures { against, hangs, .. } = &mut self.oracle.failures;
        let all = against.iter_mut().filter(|(id, _)| !(hangs.did_nothing && Some(**id) == from));
        all.for_each(|(id, it)| (it.failures, it.passed) = (0, hangs.images.contains(id)));
    }

    /// The policy was asked about that life.
    pub(super) fn oracle_sees_report_of_life(&mut self) {
        let hangs = &mut self.oracle.failures.hangs;
        if let Some(id) = hangs.lived_on.take() {
            hangs.images.remove(&id);
            hangs.stuck.remove(&id);
        }
    }

    /// Whether the job was ended for a hang, and had done nothing since it was restored.
    pub(super) fn did_nothing(&self) -> bool {
        self.oracle.failures.hangs.did_nothing
    }

    /// The newest of these that is not known to be of a hang.
    pub(super) fn newest_without_hang(&self, good: &[ImageId]) -> Option<ImageId> {
        let hangs = &self.oracle.failures.hangs;
        let is_of_hang = |id: &ImageId| hangs.images.contains(id) || hangs.stuck.contains(id);
        good.iter().copied().find(|id| !is_of_hang(id))
    }

    /// The job is ended for a hang. No supervisor can tell whether images that were taken since contain it.
    pub(super) fn oracle_sees_hang(&mut self) {
        let Some((job, hung)) = self.job.as_ref().and_then(|job| Some((job, job.hung?))) else { return };
        let of_it = |(id, since): &(ImageId, Instant)| *since >= hung && job.from != StartPoint::Image(*id);
        let ids: Vec<ImageId> = self.oracle.alive.iter().filter(|it| of_it(it)).map(|(id, _)| *id).collect();
        ids.iter().for_each(|id| self.oracle.pass(*id));
        self.oracle.failures.hangs.images.extend(ids);
        self.oracle.failures.hangs.by_hang = true;
    }

    /// These are about to be proven.
    pub(super) fn check_no_hang(&mut self, due: &[ImageId]) {
        let hangs = |id: &ImageId| self.ground.image(*id).is_some_and(|image| image.hung);
        if let Some(id) = due.iter().copied().find(hangs).filter(|_| self.fate.watch.is_some()) {
            self.oracle.violate(format!("image {id} is proven by a job that hangs, although it is watched for that"));
        }
    }

    /// The end of a life is reported, with the present images.
    pub(super) fn oracle_sees_report(&mut self) {
        let now = self.now;
        self.oracle.failures.failed.iter_mut().for_each(|(_, at)| *at = now);
        if self.oracle.failures.row.is_some_and(|(_, count)| count >= TRIES) {
            // All newer images may contain a state that was already bad.
            let newest = self.newest_proven();
            let ids: Vec<ImageId> = self.ground.copies().iter().map(|(image, _)| image.id).collect();
            ids.into_iter().filter(|id| Some(*id) > newest).for_each(|id| self.oracle.pass(id));
        }
    }

    pub(super) fn oracle_sees_failure(&mut self, event: &Event, troubled: bool) {
        match event {
            Event::ImageFailed { image, failure, .. } => {
                let seen = match failure {
                    Failure::Refused(why) => Some(Seen::Refused(why.clone())),
                    _ => None,
                };
                self.oracle.add(*image, seen, self.now);
                if !matches!(failure, Failure::Refused(_) | Failure::Unexplained(_)) {
                    self.oracle.pass(*image);
                }
            }
            Event::StartFailed { .. } => self.oracle.failures.machine_failed |= troubled || self.is_in_trouble(),
            _ => {}
        }
    }

    pub(super) fn oracle_sees_no_snapshot(&mut self, event: &Event, ended: bool, called_off: bool) {
        // A cancellation is the supervisor's own doing.
        if !called_off {
            self.oracle.disturb();
        }
        self.oracle.poisoned = None;
        self.oracle.failures.fatal += u32::from(*event == Event::SnapshotFailed(Harm::Lost) && !ended);
        if !matches!(event, Event::SnapshotMissed) {
            return;
        }
        self.oracle.failures.missed += 1;
        // A retry is required only if nothing else prevents it.
        let state = self.run.as_ref().map(|run| run.machine.state());
        let deadly = self.oracle.failures.fatal >= FATAL;
        if ended || deadly || !matches!(state, Some(State::Snapshotting { then: None, .. })) {
            return;
        }
        self.oracle.failures.retry = match self.oracle.failures.missed {
            1 => Some(self.now),
            2 => Some(self.now + Duration::from_secs(1)),
            _ => None,
        };
    }

    pub(super) fn oracle_sees_stop(&mut self) {
        self.oracle_sees_stop_by(self.now + self.config.snapshot.grace);
    }

    pub(super) fn oracle_sees_stop_by(&mut self, until: Instant) {
        if self.run.is_none() {
            return;
        }
        let now = self.now;
        let running = self.run.as_ref().is_some_and(|run| matches!(run.machine.state(), State::Running(_)));
        let work = self.job.as_ref().filter(|job| running && job.ended.is_none()).map(|job| job.work(now));
        match &mut self.oracle.stopping {
            Some(stop) => stop.again |= now.saturating_duration_since(stop.first) >= TOGETHER,
            None => self.oracle.stopping = Some(Stopping { first: now, until, again: false, work }),
        }
    }

    /// A command requested an immediate stop.
    pub(super) fn oracle_sees_stop_at_once(&mut self) {
        self.oracle_sees_stop();
        self.oracle.stopping.iter_mut().for_each(|stop| stop.again = true);
    }

    // ---- what has to hold ----

    /// Checks the invariants after every event.
    pub(super) fn check(&mut self) {
        self.check_proven();
        self.check_ranks();
        let Some(run) = self.run.as_ref().filter(|run| run.finish.is_none()) else { return };
        let state = run.machine.state();
        let waits = matches!(state, State::Running(_))
            && run.ended.is_none()
            && run.work.persist.is_none()
            && run.machine.held().is_none();
        if !waits {
            self.oracle.failures.retry = None;
        }
        if self.oracle.failures.retry.is_some_and(|at| self.now > at) {
            self.oracle
                .violate("a snapshot that failed for a moment was not tried again at once, then after 1 s".into());
        }
        if let Some(by) = self.oracle.failures.unstored.by {
            // In other states an image is being taken or read.
            let may = matches!(state, State::Running(_) | State::Suspended { .. } | State::Waiting { .. });
            if !may || self.ground.disk.reads_fail {
                self.oracle.failures.unstored.by = Some(by.max(self.now + Duration::from_secs(1)));
            } else if self.now > by && self.only_in_memory().is_some() {
                return self.oracle.violate("an image that could not be stored is not tried again".into());
            }
        }
        let late = |stop: &Stopping| self.now > stop.until + MARGIN;
        if self.oracle.stopping.as_ref().is_some_and(late) {
            self.oracle.violate("a stop does not come to its end".into());
        }
        // A proven image is recorded.
        let alive = matches!(state, State::Running(_) | State::Snapshotting { .. }) && run.ended.is_none();
        let min = self.config.restart.min_uptime;
        // A job that hangs does not live on from the images of its hang.
        let hung = self.job.as_ref().and_then(|job| job.hung).filter(|_| self.fate.watch.is_some());
        // What it does during a snapshot is not seen.
        let lives_on = |since: Instant| hung.is_none() || self.oracle.failures.hangs.moved >= Some(since);
        let lost = self.oracle.alive.iter().filter(|(_, since)| lives_on(*since)).find(|(id, since)| {
            let at = (*since + min).max(self.oracle.writable_since.unwrap_or(*since));
            self.now > at + NOTED && !self.ground.proven.contains(id) && self.ground.has_good(*id)
        });
        let known = |id: &ImageId, since: Instant| {
            let at = (since + min).max(self.oracle.writable_since.unwrap_or(since));
            self.now > at + NOTED && self.oracle.ever_stored.contains(id)
        };
        let any = self.oracle.short_of_room || self.ground.proven.iter().any(|id| self.ground.is_stored(*id));
        let troubled = self.ground.disk.writes_fail || self.ground.disk.reads_fail;
        let in_time = |(id, since): &(ImageId, Instant)| lives_on(*since) && known(id, *since);
        if alive && !any && !troubled && self.oracle.alive.iter().any(in_time) {
            let what = "images come faster than they are proven, and none stays until it is".into();
            return self.oracle.violate(what);
        }
        if let (Some((id, _)), true, false) = (lost, alive, troubled) {
            let what = format!("the job has lived on from image {id}, and it is not noted as proven");
            self.oracle.violate(what);
        }
    }

    /// The job runs from the image that was asked for: a later restart must not use a newer one from before.
    fn check_line_after_rewind(&mut self, id: ImageId) {
        let Some(line) = self.line() else { return };
        let newest = line.good(self.ground.copies().iter().map(candidate)).into_iter().next();
        if let Some(newer) = newest.filter(|newest| *newest > id) {
            let what = format!("the job was rewound to image {id}, and a restart would use image {newer}");
            self.oracle.violate(what);
        }
    }

    pub(super) fn line(&self) -> Option<Line> {
        match (&self.run, &self.ground.record) {
            (Some(run), _) => Some(run.line.clone()),
            (None, Some(record)) => Some(Line::new(record.lineage.to_string(), record.base)),
            (None, None) => None,
        }
    }

    /// The newest proven image of the line, as far as is known: damage is unknown until it is read.
    fn newest_proven(&self) -> Option<ImageId> {
        let line = self.line()?;
        let ours = self.ground.copies();
        let ours = ours.iter().map(candidate).filter(|copy| line.has(copy) && self.ground.proven.contains(&copy.id));
        let mut ids = ours.map(|copy| copy.id);
        // An image that is only in memory and older than the newest stored one is replaced by the next.
        let stored = self.newest_stored(&line);
        ids.find(|id| self.ground.is_stored(*id) || Some(*id) > stored)
    }

    fn newest_stored(&self, line: &Line) -> Option<ImageId> {
        self.ground.stored().find(|copy| line.has(&candidate(copy))).map(|(image, _)| image.id)
    }

    fn check_proven(&mut self) {
        if self.ground.proven.is_empty() && self.oracle.expected.is_none() {
            return;
        }
        let newest = self.newest_proven();
        if let Some(expected) = self.oracle.expected.filter(|expected| newest.is_none_or(|newest| newest < *expected)) {
            let of_the_line = self.ground.image(expected).zip(self.line()).is_some_and(|(image, line)| {
                line.has(&Candidate { id: expected, lineage: Some(&image.lineage), good: true, mark: None })
            });
            // An image that was never stored need not exist once a newer one is stored.
            let stored = self.line().and_then(|line| self.newest_stored(&line));
            let outdated = !self.oracle.expected_stored && stored > Some(expected);
            if of_the_line && !outdated {
                let what = format!("the newest proven image {expected} is not there any more");
                self.oracle.violate(what);
            }
        }
        self.oracle.expected = newest.filter(|id| self.ground.is_untouched(*id));
        self.oracle.expected_stored = newest.is_some_and(|newest| self.ground.is_stored(newest));
    }

    /// These images are about to be removed because no rule keeps them.
    pub(super) fn check_rotation(&mut self, gone: &[ImageId]) {
        let Some(run) = &self.run else { return };
        // What a cancelled restore reads is not needed any more.
        let start = run.work.start.as_ref().filter(|start| !start.cancelled);
        let goal = match (run.machine.state(), start.map(|start| &start.from)) {
            (_, Some(StartPoint::Image(id)))
            | (State::Ending { stop: Ending::Rewind(id), .. }, None)
            | (State::Snapshotting { then: Some(Then::Rewind(id)), .. }, None)
            | (State::Waiting { from: StartPoint::Image(id), .. }, None) => *id,
            _ => return,
        };
        if gone.contains(&goal) {
            self.oracle.violate(format!("image {goal} is removed while the job goes back to it"));
        }
    }

    /// A life is about to begin.
    pub(super) fn check_start(&mut self, from: StartPoint) {
        let Some(line) = self.line() else { return };
        let copies = self.ground.copies();
        let is_asked = matches!(from, StartPoint::Image(id) if self.oracle.asked == Some(id));
        // Lives in a row are from one image, and nobody has asked for it in between.
        let streak = self.oracle.failures.streak.take();
        self.oracle.failures.streak = streak.filter(|(id, ..)| from == StartPoint::Image(*id) && !is_asked);
        let chosen = match from {
            StartPoint::Image(id) if is_asked => {
                // From now on it is one that was restored: it is tried again after a hang.
                drop(copies);
                if self.oracle.failures.hangs.images.remove(&id) {
                    self.oracle_knows_image(id);
                }
                return;
            }
            StartPoint::Image(id) => Some(id),
            StartPoint::Cold => None,
        };
        let justified = |id: &ImageId| {
            self.oracle.failures.against.get(id).is_some_and(|against| against.passed || against.failures >= TRIES)
        };
        let newer = line.good(copies.iter().map(candidate)).into_iter().filter(|id| Some(*id) > chosen);
        let over_images = chosen.is_none() && self.config.restart.cold_start != ColdStart::Allow;
        let better = newer.into_iter().find(|id| over_images || !justified(id));
        let any = copies.iter().map(candidate).any(|copy| line.may_have(&copy));
        let hangs = &self.oracle.failures.hangs.images;
        let mut good = line.good(copies.iter().map(candidate)).into_iter();
        let is_there = |id: &ImageId| copies.iter().any(|(image, _)| image.id == *id && !image.no_files);
        let condemned = |id: &ImageId| self.oracle.failures.against.get(id).is_some_and(|against| against.condemned);
        let before = good.find(|id| !hangs.contains(id) && is_there(id) && !condemned(id) && !justified(id));
        // The first end of a run may count as one after progress.
        let stuck = self.oracle.failures.streak.as_ref().filter(|(id, _, count)| Some(*id) == chosen && *count > TRIES);
        let other = |copy: &&(&super::model::Image, super::model::Copy)| {
            Some(copy.0.id) < chosen && line.has(&candidate(copy)) && !self.oracle.is_passed(copy.0.id)
        };
        if let (Some((id, ..)), Some((other, _))) = (stuck, copies.iter().find(other)) {
            let what = format!("the job comes no further from image {id}, and image {} is not tried", other.id);
            drop(copies);
            return self.oracle.violate(what);
        }
        if let (Some(id), Some(before)) = (chosen.filter(|id| hangs.contains(id)), before) {
            let what = format!("the job hung, and begins from image {id} of the hang, not from image {before}");
            drop(copies);
            return self.oracle.violate(what);
        }
        drop(copies);
        if let Some(better) = better {
            return self
                .oracle
                .violate(format!("the job begins from {from}, and nothing speaks against image {better}"));
        }
        if from == StartPoint::Cold && any && self.config.restart.cold_start == ColdStart::NoImages {
            return self.oracle.violate("the job begins from nothing over its images".into());
        }
        let marked = |id: ImageId| self.oracle.failures.against.get(&id).is_some_and(|against| against.marked);
        if let Some(id) = chosen.filter(|id| marked(*id)) {
            return self.oracle.violate(format!("the job begins from image {id}, which was marked in this run"));
        }
        // The image that failed last is at the end of the ladder, from where the ladder starts again after a pause.
        if let (Some(id), Some((failed, at))) = (chosen, self.oracle.failures.failed)
            && id < failed
            && !justified(&id)
            && self.ground.has_good(failed)
            // One of a hang was passed over before it failed.
            && !self.oracle.failures.hangs.images.contains(&failed)
            && self.oracle.failures.row.is_none_or(|(_, count)| count < TRIES)
            && self.now > at
            && self.oracle.failures.against.get(&failed).is_some_and(|against| (1..=TRIES).contains(&against.failures))
        {
            let waited = self.now.saturating_duration_since(at);
            self.oracle.violate(format!("the way down from image {failed} to image {id} took {waited:?}"));
        }
        self.oracle.failures.failed = None;
    }

    pub(super) fn check_mark(&mut self, mark: &Mark) {
        let against = self.oracle.failures.against.entry(mark.image).or_default();
        against.passed = true;
        against.marked = !self.ground.disk.writes_fail;
        against.condemned = true;
        // Whether the mark is justified is checked here.
        self.oracle.expected = self.oracle.expected.filter(|expected| *expected != mark.image);
        let wanted = |seen: &Seen| match mark.why {
            BadWhy::DiesAgain => matches!(seen, Seen::Died { .. } | Seen::Hung),
            BadWhy::DoesNotRestore => matches!(seen, Seen::Refused(_)),
            BadWhy::Damaged => true,
        };
        let seen: Vec<&Seen> = against.seen.iter().filter(|seen| wanted(seen)).collect();
        let alike = (0..seen.len()).any(|at| seen[at + 1..].iter().any(|other| seen[at].is_like(other)));
        if !alike {
            let what = format!("image {} is marked ({}) without the same failure twice", mark.image, mark.why);
            self.oracle.violate(what);
        }
    }
}
