//! Metrics of a job for Prometheus; docs/metrics.md describes each of them.
//!
//! [`Facts`] are collected from the supervisor's events and its published state. They are converted to text only when
//! requested ([`serve`]) or changed ([`textfile`]). All counters start at zero with the supervisor, as Prometheus
//! expects of a process.

mod group;
mod render;
pub(crate) mod serve;
pub(crate) mod textfile;
mod work;

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::events::{Event, What};
use crate::published::Published;
use rekindle_base::cause::Cause;
use rekindle_store::ImageId;
use rekindle_store::manifest::Phase;
use work::Work;

/// Upper bounds of the buckets of freezes, in seconds.
const BUCKETS: [f64; 14] = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, f64::INFINITY];

/// Maximum number of images that wait for the replica.
const MOST_WAITING: usize = 1000;

/// The collected facts.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    job: String,
    work: Work,
    lives: Lives,
    published: Option<Published>,
    interval: Option<Duration>,
    snapshots: Snapshots,
    storing: Storing,
    damage: Damage,
    replica: Option<Replica>,
    hooks_failed: u64,
    group: group::Counts,
}

/// When the job ran, and how it ended.
#[derive(Debug, Clone, Default)]
struct Lives {
    /// Since when it runs.
    started: Option<DateTime<Utc>>,
    failures: u64,
    /// How the supervisor ended.
    outcome: Option<String>,
}

impl Lives {
    fn ended(&mut self, cause: Option<&Cause>) {
        self.started = None;
        if !cause.is_some_and(Cause::is_wanted) {
            self.failures += 1;
        }
    }
}

/// The snapshots, and the images that were made of them.
#[derive(Debug, Clone, Default)]
struct Snapshots {
    taken: u64,
    failed: u64,
    /// Images that were marked.
    bad: u64,
    last: Option<Last>,
    /// How long each phase of the last one took, in seconds.
    phases: BTreeMap<String, f64>,
    freezes: Freezes,
}

impl Snapshots {
    fn taken(&mut self, last: Last, phases: &[Phase]) {
        self.taken += 1;
        self.freezes.observe(last.freeze);
        self.last = Some(last);
        // One that did not take part this time took none.
        self.phases.values_mut().for_each(|time| *time = 0.0);
        self.phases.extend(phases.iter().map(|phase| (phase.phase.clone(), seconds(phase.took_us))));
    }
}

/// The newest image.
#[derive(Debug, Clone, Copy)]
struct Last {
    time: DateTime<Utc>,
    freeze: f64,
    bytes: u64,
}

/// The length of each freeze.
#[derive(Debug, Clone, Default)]
struct Freezes {
    sum: f64,
    counts: [u64; BUCKETS.len()],
}

impl Freezes {
    fn observe(&mut self, freeze: f64) {
        self.sum += freeze;
        if let Some((_, count)) = BUCKETS.iter().zip(&mut self.counts).find(|(bound, _)| freeze <= **bound) {
            *count += 1;
        }
    }
}

/// What it took to store images.
#[derive(Debug, Clone, Default)]
struct Storing {
    stored: u64,
    failed: u64,
    written: u64,
    seconds: f64,
}

impl Storing {
    fn stored(&mut self, took_us: u64, written: u64) {
        self.stored += 1;
        self.written = self.written.saturating_add(written);
        self.seconds += seconds(took_us);
    }
}

/// Chunks that verification found damaged.
#[derive(Debug, Clone, Default)]
struct Damage {
    found: u64,
    replaced: u64,
}

impl Damage {
    fn found(&mut self, chunks: u64, replaced: u64) {
        self.found = self.found.saturating_add(chunks);
        self.replaced = self.replaced.saturating_add(replaced);
    }
}

#[derive(Debug, Clone, Default)]
struct Replica {
    sent: u64,
    replicated: u64,
    failed: u64,
    /// Images in the store that are not replicated, and since when; oldest first.
    waiting: VecDeque<(ImageId, DateTime<Utc>)>,
}

impl Replica {
    fn waits(&mut self, image: ImageId, since: DateTime<Utc>) {
        self.waiting.push_back((image, since));
        self.waiting.truncate(MOST_WAITING);
    }

    fn replicated(&mut self, image: ImageId, sent: u64) {
        self.replicated += 1;
        self.sent = self.sent.saturating_add(sent);
        // Those between are skipped.
        self.waiting.retain(|(waiting, _)| *waiting > image);
    }
}

/// Whether images are copied to a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replicated {
    Yes,
    No,
}

fn seconds(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64()
}

impl Facts {
    /// Facts of a supervisor that starts now.
    #[must_use]
    pub(crate) fn new(job: &str, replicated: Replicated, now: Instant) -> Facts {
        Facts {
            job: job.into(),
            work: Work::new(now),
            lives: Lives::default(),
            published: None,
            interval: None,
            snapshots: Snapshots::default(),
            storing: Storing::default(),
            damage: Damage::default(),
            replica: (replicated == Replicated::Yes).then(Replica::default),
            hooks_failed: 0,
            group: group::Counts::default(),
        }
    }

    /// Updates the facts with an event.
    pub(crate) fn hear(&mut self, event: &Event, now: Instant) {
        match &event.what {
            What::Supervised { .. } => self.work = Work::new(now),
            What::Started { image, .. } => {
                self.lives.started = Some(event.time);
                self.work.started(*image, now);
            }
            What::SnapshotTaken { image, freeze_us, phases, bytes, .. } => {
                let last = Last { time: event.time, freeze: seconds(*freeze_us), bytes: *bytes };
                self.snapshots.taken(last, phases);
                self.work.taken(*image, Duration::from_micros(*freeze_us), now);
            }
            What::SnapshotFailed { .. } => self.snapshots.failed += 1,
            What::Stored { image, took_us, written } => {
                self.storing.stored(*took_us, *written);
                self.replica.iter_mut().for_each(|replica| replica.waits(*image, event.time));
            }
            What::NotStored { .. } => self.storing.failed += 1,
            What::Replicated { image, sent, .. } => {
                self.replica.iter_mut().for_each(|replica| replica.replicated(*image, *sent));
            }
            What::NotReplicated { .. } => self.replica.iter_mut().for_each(|replica| replica.failed += 1),
            What::Ended { cause, .. } => {
                self.lives.ended(cause.as_ref());
                if *cause == Some(Cause::Suspended) {
                    self.work.suspended(now);
                } else {
                    self.work.ended(now);
                }
            }
            What::ImageBad { .. } => self.snapshots.bad += 1,
            What::StoreDamaged { chunks, replaced, .. } => self.damage.found(*chunks, *replaced),
            What::Restarting { .. } => self.work.waits(now),
            What::Suspended { .. } => self.work.suspended(now),
            What::HookFailed { .. } => self.hooks_failed += 1,
            What::Finished { outcome, .. } => {
                self.lives.outcome = Some(outcome.clone());
                self.work.finished(now);
            }
            other => self.group.hear(other),
        }
    }

    /// Updates the facts with the published state, and the present interval.
    pub(crate) fn see(&mut self, published: &Published, interval: Option<Duration>) {
        (self.published, self.interval) = (Some(published.clone()), interval);
    }
}

#[cfg(test)]
mod tests;
