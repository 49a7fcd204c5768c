//! Numbers about a job for Prometheus: what each is, is in docs/metrics.md.
//!
//! [`Facts`] are learnt from the events that the supervisor tells and from what it publishes; they become text only when
//! somebody asks ([`serve`]) or when they changed ([`textfile`]). Nothing runs in between. All counters begin with the supervisor,
//! as Prometheus expects of a process.

mod render;
pub mod serve;
pub mod textfile;
mod work;

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::events::{Event, What};
use crate::published::Published;
use rekindle_base::cause::Cause;
use rekindle_store::ImageId;
use work::Work;

/// Upper bounds of the buckets of freezes, in seconds.
const BUCKETS: [f64; 14] = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, f64::INFINITY];

/// Of images that wait for the replica.
const MOST_WAITING: usize = 1000;

/// What is known.
#[derive(Debug, Clone)]
pub struct Facts {
    job: String,
    work: Work,
    published: Option<Published>,
    interval: Option<Duration>,
    /// Since when the job runs.
    started: Option<DateTime<Utc>>,
    /// How the supervisor ended.
    outcome: Option<String>,
    failures: u64,
    taken: u64,
    failed: u64,
    hooks_failed: u64,
    bad: u64,
    damaged: u64,
    replaced: u64,
    last: Option<Last>,
    phases: BTreeMap<String, f64>,
    freezes: Freezes,
    stored: u64,
    written: u64,
    not_stored: u64,
    store_seconds: f64,
    replica: Option<Replica>,
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

#[derive(Debug, Clone, Default)]
struct Replica {
    sent: u64,
    replicated: u64,
    failed: u64,
    /// Images in the store that are not there, and since when; the oldest first.
    waiting: VecDeque<(ImageId, DateTime<Utc>)>,
}

/// Whether images are copied to a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replicated {
    /// They are.
    Yes,
    /// There is none.
    No,
}

fn seconds(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64()
}

impl Facts {
    /// Of a supervisor that begins now.
    #[must_use]
    pub fn new(job: &str, replicated: Replicated, now: Instant) -> Facts {
        Facts {
            job: job.into(),
            work: Work::new(now),
            published: None,
            interval: None,
            started: None,
            outcome: None,
            failures: 0,
            taken: 0,
            failed: 0,
            hooks_failed: 0,
            bad: 0,
            damaged: 0,
            replaced: 0,
            last: None,
            phases: BTreeMap::new(),
            freezes: Freezes::default(),
            stored: 0,
            written: 0,
            not_stored: 0,
            store_seconds: 0.0,
            replica: (replicated == Replicated::Yes).then(Replica::default),
        }
    }

    /// Learns from an event.
    pub fn hear(&mut self, event: &Event, now: Instant) {
        match &event.what {
            What::Supervised { .. } => self.work = Work::new(now),
            What::Started { image, .. } => {
                self.started = Some(event.time);
                self.work.started(*image, now);
            }
            What::SnapshotTaken { image, freeze_us, phases, bytes, .. } => {
                self.taken += 1;
                let freeze = seconds(*freeze_us);
                self.freezes.observe(freeze);
                self.last = Some(Last { time: event.time, freeze, bytes: *bytes });
                // One that did not take part this time took none.
                self.phases.values_mut().for_each(|time| *time = 0.0);
                self.phases.extend(phases.iter().map(|phase| (phase.phase.clone(), seconds(phase.took_us))));
                self.work.taken(*image, Duration::from_micros(*freeze_us), now);
            }
            What::SnapshotFailed { .. } => self.failed += 1,
            What::Stored { image, took_us, written } => {
                self.stored += 1;
                self.written = self.written.saturating_add(*written);
                self.store_seconds += seconds(*took_us);
                if let Some(replica) = &mut self.replica {
                    replica.waiting.push_back((*image, event.time));
                    replica.waiting.truncate(MOST_WAITING);
                }
            }
            What::NotStored { .. } => self.not_stored += 1,
            What::Replicated { image, sent, .. } => {
                if let Some(replica) = &mut self.replica {
                    replica.replicated += 1;
                    replica.sent = replica.sent.saturating_add(*sent);
                    // Those between are skipped.
                    replica.waiting.retain(|(waiting, _)| waiting > image);
                }
            }
            What::NotReplicated { .. } => self.replica.iter_mut().for_each(|replica| replica.failed += 1),
            What::Ended { cause, .. } => {
                self.started = None;
                if *cause == Some(Cause::Suspended) {
                    self.work.suspended(now);
                } else {
                    self.work.ended(now);
                }
                let wanted = [Cause::Completed, Cause::Requested, Cause::Suspended, Cause::Rewound];
                if cause.as_ref().is_none_or(|cause| !wanted.contains(cause)) {
                    self.failures += 1;
                }
            }
            What::ImageBad { .. } => self.bad += 1,
            What::StoreDamaged { chunks, replaced, .. } => {
                self.damaged = self.damaged.saturating_add(*chunks);
                self.replaced = self.replaced.saturating_add(*replaced);
            }
            What::Restarting { .. } => self.work.waits(now),
            What::Suspended { .. } => self.work.suspended(now),
            What::HookFailed { .. } => self.hooks_failed += 1,
            What::Finished { outcome, .. } => {
                self.outcome = Some(outcome.clone());
                self.work.finished(now);
            }
            _ => {}
        }
    }

    /// Learns what the supervisor shows of itself, and the interval in force.
    pub fn see(&mut self, published: &Published, interval: Option<Duration>) {
        (self.published, self.interval) = (Some(published.clone()), interval);
    }
}

impl Freezes {
    fn observe(&mut self, freeze: f64) {
        self.sum += freeze;
        if let Some((_, count)) = BUCKETS.iter().zip(&mut self.counts).find(|(bound, _)| freeze <= **bound) {
            *count += 1;
        }
    }
}

#[cfg(test)]
mod tests;
