//! What `top` shows of the jobs of a store: read again each second, journals only from the position reached.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use crate::published::{Persisting, Published};
use crate::report::history::{History, Kind, between};
use crate::report::model::{Times, Told};
use crate::report::{self};
use crate::telemetry::tail::Tail;
use rekindle_store::{JobFolder, JobName, Store};

/// So many events of a job are kept.
const EVENTS: usize = 500;
/// So many freezes are shown.
const FREEZES: usize = 32;
/// What a job takes on the disk is looked up so often: it means a look at each of its files.
const DISK: Duration = Duration::from_secs(10);

/// A job, as it is shown.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    pub(super) job: String,
    /// What its supervisor does, or how its last run ended.
    pub(super) state: String,
    /// How long this life of it is.
    pub(super) up_us: Option<u64>,
    pub(super) goodput_ppm: Option<u64>,
    pub(super) lost_us: u64,
    /// The last ones, oldest first.
    pub(super) freezes: Vec<u64>,
    /// How long ago the last snapshot was.
    pub(super) age_us: Option<u64>,
    /// In how long the next is due.
    pub(super) next_us: Option<u64>,
    pub(super) persisting: Option<Persisting>,
    pub(super) restoring: Option<Persisting>,
    pub(super) disk: u64,
    pub(super) restarts: usize,
    pub(super) failures: usize,
    /// What is wrong just now.
    pub(super) trouble: Option<String>,
    pub(super) command: String,
    pub(super) events: Vec<Told>,
}

/// The jobs of a store.
#[derive(Debug)]
pub(super) struct Watch {
    store: Store,
    jobs: BTreeMap<JobName, Followed>,
}

#[derive(Debug)]
struct Followed {
    folder: JobFolder,
    tail: Tail,
    history: History,
    events: VecDeque<Told>,
    disk: Option<(Instant, u64)>,
}

impl Watch {
    pub(super) fn of(store: Store) -> Watch {
        Watch { store, jobs: BTreeMap::new() }
    }

    /// All jobs as they are now, by name. An error for one job is shown in its row.
    pub(super) fn look(&mut self) -> anyhow::Result<Vec<Row>> {
        let names = self.store.jobs()?;
        self.jobs.retain(|name, _| names.contains(name));
        let mut rows = Vec::new();
        for name in names {
            let followed = match self.jobs.remove(&name) {
                Some(followed) => Ok(followed),
                None => self.store.job(&name).map(Followed::new),
            };
            match followed {
                Ok(mut followed) => {
                    rows.push(followed.look(Utc::now()));
                    self.jobs.insert(name, followed);
                }
                Err(error) => rows.push(Row {
                    job: name.to_string(),
                    state: "?".into(),
                    trouble: Some(error.to_string()),
                    ..Row::default()
                }),
            }
        }
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
                self.events.extend(events.iter().skip(events.len().saturating_sub(EVENTS)).map(Told::of));
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
            "?".into()
        });
        if self.disk.is_none_or(|(looked, _)| looked.elapsed() > DISK) {
            self.disk = Some((Instant::now(), report::allocated(self.folder.path())));
        }
        let history = &self.history;
        let times = Times::new(history.sums(live.as_ref().map(|_| now)));
        let micros = now.timestamp_micros();
        let until = |at: DateTime<Utc>| between(micros, at.timestamp_micros());
        let snapshots = history.snapshots();
        let freezes = snapshots.iter().skip(snapshots.len().saturating_sub(FREEZES)).map(|it| it.freeze_us).collect();
        let wrong = live.as_ref().and_then(|live| {
            let all = [&live.last_failure, &live.persist_failure, &live.replica_failure, &live.rehearsal_failure];
            all.into_iter().flatten().next().cloned()
        });
        Row {
            job: self.folder.name().to_string(),
            state,
            up_us: history.up_since().filter(|_| live.is_some()).map(|since| between(since, micros)),
            goodput_ppm: times.goodput_ppm,
            lost_us: times.of(Kind::Lost),
            freezes,
            age_us: snapshots.last().map(|last| between(last.at, micros)),
            next_us: live.as_ref().and_then(|live| live.next).map(until),
            disk: self.disk.map_or(0, |(_, bytes)| bytes),
            restarts: history.restarts().len(),
            failures: history.failures().iter().filter(|failure| failure.what.is_death()).count(),
            trouble: trouble.or(wrong),
            command: history.setting().0.join(" "),
            events: self.events.iter().cloned().collect(),
            persisting: live.as_ref().and_then(|live| live.persisting.clone()),
            restoring: live.and_then(|live| live.restoring),
        }
    }
}

/// The way of an image, for people.
pub(super) fn moving(moving: &Persisting) -> String {
    format!("{} % {}/s", moving.percent(), rekindle_base::units::size(moving.rate))
}
