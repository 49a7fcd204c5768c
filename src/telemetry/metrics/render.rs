//! Facts as OpenMetrics text, which Prometheus and node_exporter read.

use std::fmt;
use std::time::Instant;

use chrono::{DateTime, Utc};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::{BUCKETS, Facts};
use crate::published::JobState;

const OUTCOMES: [&str; 3] = ["completed", "stopped", "failed"];

impl Facts {
    /// All metrics, as of now.
    #[must_use]
    pub(crate) fn text(&self, now: Instant, time: DateTime<Utc>) -> String {
        let labels = [("job".into(), self.job.clone().into())];
        let mut registry = Registry::with_labels(labels.into_iter());
        registry.register_collector(Box::new(Seen { facts: self.clone(), now, time }));
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = text::encode(&mut text, &registry);
        text
    }
}

#[derive(Debug)]
struct Seen {
    facts: Facts,
    now: Instant,
    time: DateTime<Utc>,
}

/// A metric without labels of its own.
#[derive(Clone, Copy)]
pub(super) enum Number {
    Gauge(f64),
    Counter(f64),
    Count(u64),
}

pub(super) struct Sink<'a>(DescriptorEncoder<'a>);

impl Sink<'_> {
    pub(super) fn one(&mut self, name: &str, help: &str, number: Number) -> fmt::Result {
        let kind = if matches!(number, Number::Gauge(_)) { MetricType::Gauge } else { MetricType::Counter };
        let encoder = self.0.encode_descriptor(name, help, None, kind)?;
        match number {
            Number::Gauge(value) => ConstGauge::new(value).encode(encoder),
            Number::Counter(value) => ConstCounter::new(value).encode(encoder),
            Number::Count(value) => ConstCounter::new(value).encode(encoder),
        }
    }

    /// Writes nothing if the value is unknown.
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        value.map_or(Ok(()), |value| self.one(name, help, Number::Gauge(value)))
    }

    fn family<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

pub(super) fn stamp(time: DateTime<Utc>) -> f64 {
    std::time::Duration::from_millis(u64::try_from(time.timestamp_millis()).unwrap_or(0)).as_secs_f64()
}

/// Exact up to 2^53, which no size reaches.
pub(super) fn real(number: u64) -> f64 {
    let (high, low) = (u32::try_from(number >> 32).unwrap_or(u32::MAX), number & u64::from(u32::MAX));
    f64::from(high) * 4_294_967_296.0 + f64::from(u32::try_from(low).unwrap_or(u32::MAX))
}

fn share(done: u64, total: u64) -> f64 {
    if total == 0 { 0.0 } else { (real(done) / real(total)).min(1.0) }
}

pub(super) fn bit(set: bool) -> f64 {
    if set { 1.0 } else { 0.0 }
}

impl Collector for Seen {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (sink, facts) = (&mut Sink(encoder), &self.facts);
        self.state(sink)?;
        self.snapshots(sink)?;
        self.store(sink)?;
        self.replica(sink)?;
        if let Some(group) = facts.published.as_ref().and_then(|published| published.group.as_ref()) {
            facts.group.write(group, sink)?;
        }
        let work = &facts.work;
        sink.one(
            "rekindle_goodput_ratio",
            "Share of this supervisor's time that was useful work",
            Number::Gauge(work.goodput(self.now)),
        )?;
        sink.one(
            "rekindle_useful_seconds",
            "Useful work since this supervisor started",
            Number::Gauge(work.useful(self.now).as_secs_f64()),
        )?;
        sink.one(
            "rekindle_lost_work_seconds",
            "Work that was lost and is repeated",
            Number::Counter(work.lost().as_secs_f64()),
        )?;
        sink.one("rekindle_hooks_failed", "Failed hooks", Number::Count(facts.hooks_failed))
    }
}

impl Seen {
    fn state(&self, sink: &mut Sink<'_>) -> fmt::Result {
        let facts = &self.facts;
        if let Some(published) = &facts.published {
            let labels = [("version", env!("CARGO_PKG_VERSION").to_owned()), ("run", published.lineage.clone())];
            sink.family("rekindle_supervisor", "Always 1, with the version of rekindle and the run", [(labels, 1.0)])?;
            let states =
                JobState::ALL.iter().map(|state| ([("state", state.as_str())], bit(published.state == *state)));
            sink.family("rekindle_state", "1 for the current state of the job", states)?;
            let begun = stamp(published.begun);
            sink.one("rekindle_supervisor_start_time_seconds", "When this supervisor started", Number::Gauge(begun))?;
            let restarts = u64::from(published.restarts);
            sink.one("rekindle_restarts", "Restarts of the job", Number::Count(restarts))?;
        }
        let started = facts.lives.started.map(stamp);
        sink.gauge(
            "rekindle_job_start_time_seconds",
            "When the job started to run; absent while it is not running",
            started,
        )?;
        sink.one("rekindle_failures", "Unexpected ends of the job", Number::Count(facts.lives.failures))?;
        if let Some(outcome) = &facts.lives.outcome {
            let outcomes = OUTCOMES.iter().map(|name| ([("outcome", *name)], bit(outcome == name)));
            sink.family("rekindle_finished", "1 for the outcome of the run; absent before its end", outcomes)?;
        }
        Ok(())
    }

    fn snapshots(&self, sink: &mut Sink<'_>) -> fmt::Result {
        let Facts { snapshots, damage, published, interval, .. } = &self.facts;
        sink.one("rekindle_snapshots_taken", "Snapshots that were taken", Number::Count(snapshots.taken))?;
        sink.one("rekindle_snapshots_failed", "Snapshots that failed", Number::Count(snapshots.failed))?;
        sink.one("rekindle_images_bad", "Images that were marked as bad", Number::Count(snapshots.bad))?;
        let damaged = "Chunks of the store that verification found damaged or unreadable";
        sink.one("rekindle_store_damaged_chunks", damaged, Number::Count(damage.found))?;
        let replaced = "Of those, chunks that were replaced from an intact copy";
        sink.one("rekindle_store_replaced_chunks", replaced, Number::Count(damage.replaced))?;
        sink.gauge(
            "rekindle_last_snapshot_timestamp_seconds",
            "When the newest image was complete",
            snapshots.last.map(|last| stamp(last.time)),
        )?;
        sink.gauge(
            "rekindle_last_freeze_seconds",
            "How long the job was frozen for the newest image",
            snapshots.last.map(|last| last.freeze),
        )?;
        sink.gauge(
            "rekindle_last_image_bytes",
            "Size of the newest image",
            snapshots.last.map(|last| real(last.bytes)),
        )?;
        if !snapshots.phases.is_empty() {
            let phases = snapshots.phases.iter().map(|(name, time)| ([("phase", name.clone())], *time));
            sink.family("rekindle_last_freeze_phase_seconds", "Duration of the phases of that freeze", phases)?;
        }
        let help = "How long the job was frozen for snapshots";
        let mut encoder = sink.0.encode_descriptor("rekindle_freeze_seconds", help, None, MetricType::Histogram)?;
        let buckets: Vec<(f64, u64)> = BUCKETS.into_iter().zip(snapshots.freezes.counts).collect();
        encoder.encode_histogram::<NoLabelSet>(
            snapshots.freezes.sum,
            snapshots.freezes.counts.iter().sum(),
            &buckets,
            None,
        )?;
        let next = published.as_ref().and_then(|published| published.next);
        sink.gauge("rekindle_next_snapshot_timestamp_seconds", "When the next snapshot is due", next.map(stamp))?;
        let interval = interval.map(|interval| interval.as_secs_f64());
        sink.gauge("rekindle_interval_seconds", "The current interval between two snapshots", interval)
    }

    fn store(&self, sink: &mut Sink<'_>) -> fmt::Result {
        let Facts { storing, published, .. } = &self.facts;
        sink.one("rekindle_stored_images", "Images that were stored", Number::Count(storing.stored))?;
        sink.one("rekindle_store_written_bytes", "Bytes written to store them", Number::Count(storing.written))?;
        sink.one("rekindle_store_seconds", "How long storing them took", Number::Counter(storing.seconds))?;
        sink.one("rekindle_store_failed_images", "Images that could not be stored", Number::Count(storing.failed))?;
        let persisting = published.as_ref().and_then(|published| published.persisting.as_ref());
        let progress = persisting.map(|persisting| share(persisting.done, persisting.total));
        sink.gauge(
            "rekindle_persist_progress_ratio",
            "Progress of storing an image; absent while none is being stored",
            progress,
        )?;
        let restoring = published.as_ref().and_then(|published| published.restoring.as_ref());
        let progress = restoring.map(|restoring| share(restoring.done, restoring.total));
        sink.gauge("rekindle_restore_progress_ratio", "Progress of reading an image for a restart", progress)
    }

    fn replica(&self, sink: &mut Sink<'_>) -> fmt::Result {
        let Some(replica) = &self.facts.replica else { return Ok(()) };
        sink.one("rekindle_replicated_images", "Images that were replicated", Number::Count(replica.replicated))?;
        sink.one("rekindle_replica_sent_bytes", "Bytes sent to the replica", Number::Count(replica.sent))?;
        sink.one(
            "rekindle_replica_failed_images",
            "Images that could not be replicated",
            Number::Count(replica.failed),
        )?;
        let oldest = replica.waiting.front().map(|(_, since)| (self.time - since).to_std().unwrap_or_default());
        let help = "How long the oldest image that is not in the replica has been in the store";
        sink.one("rekindle_replica_lag_seconds", help, Number::Gauge(oldest.unwrap_or_default().as_secs_f64()))
    }
}
