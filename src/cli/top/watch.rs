//! The data of `top`: all jobs are read again each second, and their journals from the last position.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::super::find::{Finder, Jobs};
use super::super::group;
use crate::published::{Group, Persisting, Published, ShownState};
use crate::report::history::{History, Kind, between};
use crate::report::model::{EventLine, Times};
use crate::report::{self};
use crate::telemetry::tail::Tail;
use rekindle_store::JobFolder;

/// Number of events kept for a job.
const EVENTS: usize = 500;
/// Number of freezes shown.
const FREEZES: usize = 32;
/// How often the disk usage of a job is determined, because this examines each of its files.
const DISK: Duration = Duration::from_secs(10);

/// The row of a job.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    pub(super) job: String,
    /// The state of its supervisor, or how its last run ended.
    pub(super) state: ShownState,
    pub(super) work: Work,
    pub(super) snapshots: Snapshots,
    pub(super) moving: Moving,
    pub(super) disk: u64,
    pub(super) restarts: usize,
    pub(super) failures: usize,
    /// The present problem.
    pub(super) trouble: Option<String>,
    pub(super) command: String,
    pub(super) events: Vec<EventLine>,
    /// The group that it is a part of.
    pub(super) group: Option<Machines>,
}

/// The group of a job.
#[derive(Debug, Clone, Default)]
pub(super) struct Machines {
    pub(super) there: usize,
    pub(super) size: usize,
    pub(super) epoch: u64,
    pub(super) summary: String,
}

impl Machines {
    fn of(group: &Group, now: DateTime<Utc>) -> Machines {
        let size = usize::try_from(group.size).unwrap_or(usize::MAX);
        Machines { there: group.members.len(), size, epoch: group.epoch, summary: group::summary(group, now) }
    }
}

/// What the job got done.
#[derive(Debug, Clone, Default)]
pub(super) struct Work {
    /// How long this life of it is.
    pub(super) up_us: Option<u64>,
    pub(super) goodput_ppm: Option<u64>,
    pub(super) lost_us: u64,
}

/// Those that were taken, and the next.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshots {
    /// The last freezes, oldest first.
    pub(super) freezes: Vec<u64>,
    /// How long ago the last was.
    pub(super) age_us: Option<u64>,
    /// In how long the next is due.
    pub(super) next_us: Option<u64>,
}

impl Snapshots {
    fn of(history: &History, next: Option<DateTime<Utc>>, now: i64) -> Snapshots {
        let taken = history.snapshots();
        Snapshots {
            freezes: taken.iter().skip(taken.len().saturating_sub(FREEZES)).map(|it| it.freeze_us).collect(),
            age_us: taken.last().map(|last| between(last.at, now)),
            next_us: next.map(|at| between(now, at.timestamp_micros())),
        }
    }
}

/// The images on their way.
#[derive(Debug, Clone, Default)]
pub(super) struct Moving {
    persisting: Option<Persisting>,
    restoring: Option<Persisting>,
}

impl Moving {
    /// For people. The job waits for the one that is restored, so that one is shown.
    pub(super) fn text(&self) -> Option<String> {
        let moving = self.restoring.as_ref().or(self.persisting.as_ref())?;
        Some(format!("{} % {}/s", moving.percent(), rekindle_base::units::size(moving.rate)))
    }
}

/// The jobs that are shown, by the paths of their folders: two stores may have jobs of the same name.
#[derive(Debug)]
pub(super) struct Watch {
    finder: Finder,
    jobs: BTreeMap<PathBuf, Followed>,
}

#[derive(Debug)]
struct Followed {
    folder: JobFolder,
    tail: Tail,
    history: History,
    events: VecDeque<EventLine>,
    disk: Option<(Instant, u64)>,
}

impl Watch {
    pub(super) fn of(finder: Finder) -> Watch {
        Watch { finder, jobs: BTreeMap::new() }
    }

    /// Reads all jobs, sorted by name. An error of one job is shown in its row.
    pub(super) fn look(&mut self) -> anyhow::Result<Vec<Row>> {
        let Jobs { folders, refused, .. } = self.finder.jobs()?;
        self.jobs.retain(|path, _| folders.iter().any(|folder| folder.path() == path));
        let now = Utc::now();
        let rows = folders.into_iter().map(|folder| {
            let path = folder.path().to_owned();
            self.jobs.entry(path).or_insert_with(|| Followed::new(folder)).look(now)
        });
        let mut rows: Vec<Row> = rows.collect();
        rows.extend(refused.into_iter().map(|(job, error)| Row {
            job: job.to_string(),
            trouble: Some(error.to_string()),
            ..Row::default()
        }));
        rows.sort_by(|a, b| a.job.cmp(&b.job));
        Ok(rows)
    }
}

impl Followed {
    fn new(folder: JobFolder) -> Followed {
        let tail = Tail::of(&folder.log_dir());
        Followed { folder, tail, history: History::default(), events: VecDeque::new(), disk: None }
    }

    fn look(&mut self, now: DateTime<Utc>) -> Row {
        let mut trouble = None;
        match self.tail.more() {
            Ok(events) => {
                for event in &events {
                    self.history.add(event);
                }
                self.events.extend(events.iter().skip(events.len().saturating_sub(EVENTS)).map(EventLine::of));
                self.events.drain(..self.events.len().saturating_sub(EVENTS));
            }
            Err(error) => trouble = Some(format!("cannot read the events: {error}")),
        }
        let live = Published::live(&self.folder).unwrap_or_else(|error| {
            trouble = Some(error.to_string());
            None
        });
        let state = report::state(&self.folder, live.as_ref()).unwrap_or_else(|error| {
            trouble = Some(error.to_string());
            ShownState::Unreadable
        });
        if self.disk.is_none_or(|(looked, _)| looked.elapsed() > DISK) {
            self.disk = Some((Instant::now(), report::allocated(self.folder.dir())));
        }
        let history = &self.history;
        let times = Times::new(history.sums(live.as_ref().map(|_| now)));
        let micros = now.timestamp_micros();
        let wrong = live.as_ref().and_then(|live| {
            let all = [&live.last_failure, &live.persist_failure, &live.replica_failure, &live.rehearsal_failure];
            all.into_iter().flatten().next().cloned()
        });
        Row {
            job: self.folder.name().to_string(),
            state,
            work: Work {
                up_us: history.up_since().filter(|_| live.is_some()).map(|since| between(since, micros)),
                goodput_ppm: times.goodput_ppm,
                lost_us: times.of(Kind::Lost),
            },
            snapshots: Snapshots::of(history, live.as_ref().and_then(|live| live.next), micros),
            group: live.as_ref().and_then(|live| live.group.as_ref()).map(|group| Machines::of(group, now)),
            moving: live
                .map_or_else(Moving::default, |live| Moving { persisting: live.persisting, restoring: live.restoring }),
            disk: self.disk.map_or(0, |(_, bytes)| bytes),
            restarts: history.restarts().len(),
            failures: history.failures().iter().filter(|failure| failure.what.is_death()).count(),
            trouble: trouble.or(wrong),
            command: history.setting().0.join(" "),
            events: self.events.iter().cloned().collect(),
        }
    }
}
