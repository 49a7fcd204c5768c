//! What has to hold, whatever happens. It keeps its own account of what a supervisor can know, and goes by that and by what is
//! true; it asks the product for no decision.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::model::{End, candidate};
use super::restores::Trouble;
use super::world::World;
use crate::config::ColdStart;
use crate::policy::{Failure, Mark, StartPoint};
use crate::supervisor::line::{Candidate, Line};
use crate::supervisor::state::{Ending, Event, State};
use rekindle_os::spawn::Ended;
use rekindle_store::{BadWhy, ImageId};

/// What was seen of an image in this run.
#[derive(Debug, Clone, Default)]
struct Against {
    /// Failures since the job lived on from it.
    failures: u32,
    /// What each of them was, where it may be the image's own making.
    seen: Vec<Seen>,
    /// There is a reason not to take it now: it was slow, its files are gone, it is damaged.
    passed: bool,
    /// It was marked.
    marked: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Died { ended: Option<Ended>, uptime: Duration },
    Refused(String),
}

impl Seen {
    /// More generous than the policy: what it takes for alike is alike here too.
    fn is_like(&self, other: &Seen) -> bool {
        match (self, other) {
            (Seen::Died { ended, uptime }, Seen::Died { ended: other, uptime: before }) => {
                let near = Duration::from_millis(500).max(*uptime.min(before) / 2);
                ended == other && uptime.abs_diff(*before) <= near
            }
            (Seen::Refused(why), Seen::Refused(other)) => why == other,
            (Seen::Died { .. }, Seen::Refused(_)) | (Seen::Refused(_), Seen::Died { .. }) => false,
        }
    }
}

/// A stop that was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopping {
    first: Instant,
    /// Another request came later than those that are one with it.
    pub(super) again: bool,
    /// The work of the job then, where it ran, and nothing happened since that keeps an image from being taken.
    pub(super) work: Option<Duration>,
}

/// What failed, and how often.
#[derive(Debug, Default)]
pub(super) struct Failures {
    against: BTreeMap<ImageId, Against>,
    /// The last early death, and how many before it were alike, from whichever images.
    row: Option<(Option<Ended>, u32)>,
    /// By when a snapshot that failed for a moment has to be tried again, and how many did so in a row.
    retry: Option<Instant>,
    missed: u32,
    /// The image that failed last, and when.
    failed: Option<(ImageId, Instant)>,
    /// What the machine fails at is the machine's.
    pub(super) machine_failed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    pub(super) violation: Option<String>,
    /// A trouble that waits for the next restore or dump.
    pub(super) armed: Option<Trouble>,
    /// So many of a hundred images are such that CRIU refuses them.
    pub(super) unrestorable: u64,
    /// An image that has a death which the job has yet to hear of.
    pub(super) poisoned: Option<ImageId>,
    /// The image that somebody named, until the job runs.
    pub(super) asked: Option<ImageId>,
    /// Since when the store can be written to.
    pub(super) writable_since: Option<Instant>,
    /// Images that this life goes on from, and since when.
    alive: Vec<(ImageId, Instant)>,
    /// The newest proven image of the line that has to be there.
    expected: Option<ImageId>,
    /// Whether it is in the store.
    expected_stored: bool,
    /// Images that were told to be in the store.
    pub(super) stored: BTreeSet<ImageId>,
    /// The same, with those that were removed in this life.
    ever_stored: BTreeSet<ImageId>,
    /// An image had to go for want of room.
    pub(super) short_of_room: bool,
    pub(super) failures: Failures,
    pub(super) stopping: Option<Stopping>,
}

/// Requests to stop within this time are one.
const TOGETHER: Duration = Duration::from_secs(2);
/// What an image may fail without two failures being alike.
const TRIES: u32 = 4;
/// What a stop takes at most beside its grace: a start that is called off, a kill.
const MARGIN: Duration = Duration::from_secs(5);
/// What a proof takes at most to be written down, from when the store can be written to.
const NOTED: Duration = Duration::from_secs(11);

impl Oracle {
    pub(super) fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(super) fn run_begins(&mut self, named: Option<StartPoint>) {
        self.failures.machine_failed = false;
        self.asked = named.and_then(|from| if let StartPoint::Image(id) = from { Some(id) } else { None });
    }

    /// What it knew is gone with it.
    pub(super) fn run_ends(&mut self) {
        self.alive.clear();
        self.failures.against.clear();
        (self.failures.row, self.failures.retry, self.failures.missed, self.failures.failed) = (None, None, 0, None);
        (self.stopping, self.asked, self.poisoned) = (None, None, None);
    }

    /// Something was taken that no supervisor can keep.
    pub(super) fn excuse(&mut self) {
        self.expected = None;
    }

    pub(super) fn snapshot_begins(&mut self) {
        self.failures.retry = None;
    }

    pub(super) fn taken(&mut self, id: ImageId, now: Instant) {
        self.alive.push((id, now));
        self.failures.missed = 0;
        if self.poisoned.take() == Some(id) {
            self.violate(format!("image {id} has a death that the job has yet to hear of"));
        }
    }

    pub(super) fn is_stored(&mut self, id: ImageId) {
        self.stored.insert(id);
        self.ever_stored.insert(id);
    }

    pub(super) fn is_removed(&mut self, id: ImageId) {
        self.stored.remove(&id);
    }

    /// Whether there is a reason not to take it now.
    pub(super) fn is_passed(&self, id: ImageId) -> bool {
        self.failures.against.get(&id).is_some_and(|against| against.passed)
    }

    pub(super) fn failed_at(&self) -> Option<Instant> {
        self.failures.failed.map(|(_, at)| at)
    }

    /// Something came in between that a last image cannot be asked for.
    pub(super) fn disturb(&mut self) {
        self.stopping.iter_mut().for_each(|stop| stop.work = None);
    }

    fn add(&mut self, id: ImageId, seen: Option<Seen>, now: Instant) {
        let against = self.failures.against.entry(id).or_default();
        against.failures += 1;
        against.seen.extend(seen);
        self.failures.failed = Some((id, now));
    }

    fn pass(&mut self, id: ImageId) {
        self.failures.against.entry(id).or_default().passed = true;
    }
}

impl World {
    // ---- what the oracle sees ----

    pub(super) fn oracle_sees_life(&mut self, from: StartPoint) {
        (self.oracle.asked, self.oracle.failures.failed) = (None, None);
        self.oracle.ever_stored.retain(|id| self.ground.is_stored(*id));
        self.oracle.alive.clear();
        self.oracle.failures.missed = 0;
        if let StartPoint::Image(id) = from {
            self.oracle.alive.push((id, self.now));
        }
    }

    pub(super) fn oracle_sees_end(&mut self, end: End, excused: bool) {
        self.oracle.alive.clear();
        self.oracle.failures.retry = None;
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
        // These are nobody's failure, and no policy is asked.
        if matches!(ending, Some(Ending::Stop(_) | Ending::Suspend | Ending::Rewind(_))) {
            return;
        }
        let restart = &self.config.restart;
        if uptime >= restart.healthy_uptime {
            self.oracle.failures.against.values_mut().for_each(|it| (it.failures, it.passed) = (0, false));
            self.oracle.failures.row = None;
        }
        let StartPoint::Image(id) = job.from else { return };
        let from_outside =
            matches!(end.ended, Ended::Signal(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP));
        let seen = match ending {
            Some(Ending::Condemned) => Some(Seen::Died { ended: None, uptime }),
            Some(_) => None,
            None if from_outside || excused => None,
            None => Some(Seen::Died { ended: Some(end.ended), uptime }),
        };
        if uptime >= restart.min_uptime {
            self.oracle.failures.against.remove(&id);
            self.oracle.failures.row = None;
            return;
        }
        let proven = self.ground.proven.contains(&id);
        match &seen {
            Some(Seen::Died { ended, .. }) if !proven => {
                let before =
                    self.oracle.failures.row.take().filter(|(before, _)| before == ended).map_or(0, |(_, count)| count);
                self.oracle.failures.row = Some((*ended, before + 1));
            }
            _ => self.oracle.failures.row = None,
        }
        self.oracle.add(id, seen.filter(|_| !proven), self.now);
    }

    /// The end of a life is reported, with the images of then.
    pub(super) fn oracle_sees_report(&mut self) {
        let now = self.now;
        self.oracle.failures.failed.iter_mut().for_each(|(_, at)| *at = now);
        if self.oracle.failures.row.is_some_and(|(_, count)| count >= TRIES) {
            // All that is newer may be of a state that has gone wrong earlier.
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
        // What was called off is the supervisor's own doing.
        if !called_off {
            self.oracle.disturb();
        }
        self.oracle.poisoned = None;
        if !matches!(event, Event::SnapshotMissed) {
            return;
        }
        self.oracle.failures.missed += 1;
        // What it has to be tried again for: nothing else keeps the job from it.
        let state = self.run.as_ref().map(|run| run.machine.state());
        if ended || !matches!(state, Some(State::Snapshotting { then: None, .. })) {
            return;
        }
        self.oracle.failures.retry = match self.oracle.failures.missed {
            1 => Some(self.now),
            2 => Some(self.now + Duration::from_secs(1)),
            _ => None,
        };
    }

    pub(super) fn oracle_sees_stop(&mut self) {
        if self.run.is_none() {
            return;
        }
        let now = self.now;
        let running = self.run.as_ref().is_some_and(|run| matches!(run.machine.state(), State::Running(_)));
        let work = self.job.as_ref().filter(|job| running && job.ended.is_none()).map(|job| job.work(now));
        match &mut self.oracle.stopping {
            Some(stop) => stop.again |= now.saturating_duration_since(stop.first) >= TOGETHER,
            None => self.oracle.stopping = Some(Stopping { first: now, again: false, work }),
        }
    }

    /// A stop at once was asked for by a command, which says so.
    pub(super) fn oracle_sees_stop_at_once(&mut self) {
        self.oracle_sees_stop();
        self.oracle.stopping.iter_mut().for_each(|stop| stop.again = true);
    }

    // ---- what has to hold ----

    /// After every event.
    pub(super) fn check(&mut self) {
        self.check_proven();
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
        let late = |stop: &Stopping| self.now > stop.first + self.config.snapshot.grace + MARGIN;
        if self.oracle.stopping.as_ref().is_some_and(late) {
            self.oracle.violate("a stop does not come to its end".into());
        }
        // What was lived on from is noted.
        let alive = matches!(state, State::Running(_) | State::Snapshotting { .. }) && run.ended.is_none();
        let min = self.config.restart.min_uptime;
        let lost = self.oracle.alive.iter().find(|(id, since)| {
            let at = (*since + min).max(self.oracle.writable_since.unwrap_or(*since));
            self.now > at + NOTED && !self.ground.proven.contains(id) && self.ground.has_good(*id)
        });
        let known = |id: &ImageId, since: Instant| {
            let at = (since + min).max(self.oracle.writable_since.unwrap_or(since));
            self.now > at + NOTED && self.oracle.ever_stored.contains(id)
        };
        let any = self.oracle.short_of_room || self.ground.proven.iter().any(|id| self.ground.is_stored(*id));
        let troubled = self.ground.disk.writes_fail || self.ground.disk.reads_fail;
        if alive && !any && !troubled && self.oracle.alive.iter().any(|(id, since)| known(id, *since)) {
            let what = "images come faster than they are proven, and none stays until it is".into();
            return self.oracle.violate(what);
        }
        if let (Some((id, _)), true, false) = (lost, alive, troubled) {
            let what = format!("the job has lived on from image {id}, and it is not noted as proven");
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

    /// Of the line, as far as is known: of damage nobody knows before it is read.
    fn newest_proven(&self) -> Option<ImageId> {
        let line = self.line()?;
        let ours = self.ground.copies();
        let ours = ours.iter().map(candidate).filter(|copy| line.has(copy) && self.ground.proven.contains(&copy.id));
        let mut ids = ours.map(|copy| copy.id);
        // Memory is on the way to the store: what is only there and older than what the store has goes with the next image.
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
            // Memory is on the way to the store: what never got there is no more than what did.
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

    /// A life is about to begin.
    pub(super) fn check_start(&mut self, from: StartPoint) {
        let Some(line) = self.line() else { return };
        let copies = self.ground.copies();
        let chosen = match from {
            StartPoint::Image(id) if self.oracle.asked == Some(id) => return,
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
        // One that had its turn before is at the end of the ladder, from where it begins again after a pause.
        if let (Some(id), Some((failed, at))) = (chosen, self.oracle.failures.failed)
            && id < failed
            && !justified(&id)
            && self.ground.has_good(failed)
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
        // Whether it may be is looked at here.
        self.oracle.expected = self.oracle.expected.filter(|expected| *expected != mark.image);
        let wanted = |seen: &Seen| match mark.why {
            BadWhy::DiesAgain => matches!(seen, Seen::Died { .. }),
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
