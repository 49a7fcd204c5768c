//! Recipients of events beside the journal: hooks and the metrics.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::metrics::Metrics;
use super::remarks::Repeats;
use super::{Message, Setup};
use crate::config::Config;
use crate::notifications::{Context, Document, Failures, Gate, Point, Report, Reporter, Runner};
use crate::telemetry::events::{Event, What};

/// If a stop waits for a snapshot, the hook before it gets `snapshot.grace` divided by this, and the snapshot the rest.
const PART_OF_GRACE: u32 = 4;

/// All recipients.
pub(super) struct Listeners {
    context: Context,
    failures: Failures,
    runner: Runner,
    metrics: Option<Metrics>,
}

impl Listeners {
    pub(super) fn new(setup: &Setup, sender: &mpsc::Sender<Message>) -> Listeners {
        let hooks = &setup.config.hooks;
        let context = Context { job: setup.folder.name().to_string(), folder: setup.folder.path().to_path_buf() };
        let sender = Mutex::new(sender.clone());
        let reporter: Reporter = Arc::new(move |report| {
            let _ = sender.lock().map(|sender| sender.send(Message::Hook(report)));
        });
        Listeners {
            failures: Failures::default(),
            runner: Runner::new(hooks, context.clone(), reporter),
            metrics: Metrics::new(setup),
            context,
        }
    }

    pub(super) fn metrics(&self) -> Option<&Metrics> {
        self.metrics.as_ref()
    }

    pub(super) fn hear(&mut self, event: &Event) {
        self.metrics.iter().for_each(|metrics| metrics.hear(event));
        let point = match &event.what {
            What::SnapshotTaken { .. }
            | What::SnapshotFailed { .. }
            | What::GroupCommitted { .. }
            | What::GroupAborted { .. } => Some(Point::AfterSnapshot),
            What::Started { image: Some(_), .. } => Some(Point::AfterRestore),
            What::Finished { outcome, .. } if outcome == "completed" => Some(Point::OnCompletion),
            _ => None,
        };
        let document = |hook| Document::new(hook, &self.context, event);
        if let Some(point) = point.filter(|point| self.runner.has(*point)) {
            self.runner.tell(point, document(point.name()).bytes());
        }
        let Some(failure) = self.failures.hear(&event.what) else { return };
        if self.runner.has(Point::OnFailure) {
            self.runner.tell(Point::OnFailure, document(Point::OnFailure.name()).of_failure(failure).bytes());
        }
    }
}

impl Listeners {
    /// The hook that a snapshot must wait for.
    pub(super) fn before_snapshot(&self, config: &Config, event: &Event, stops: bool) -> Option<Gate> {
        let most = config.hooks.timeout;
        let limit = if stops { most.min(config.snapshot.grace / PART_OF_GRACE) } else { most };
        self.before(Point::BeforeSnapshot, event, limit)
    }

    /// A stop was requested: the snapshot that waits for its hook is the last one, and needs the rest of the grace.
    pub(super) fn hurry(&self, config: &Config) {
        self.runner.hurry(config.snapshot.grace / PART_OF_GRACE);
    }

    /// The hook that a restore must wait for.
    pub(super) fn before_restore(&self, config: &Config, event: &Event) -> Option<Gate> {
        self.before(Point::BeforeRestore, event, config.hooks.timeout)
    }

    fn before(&self, point: Point, event: &Event, limit: Duration) -> Option<Gate> {
        let document = Document::new(point.name(), &self.context, event);
        self.runner.gate(point, document.bytes(), limit)
    }

    /// Waits for the remaining hooks, and no longer when the end `hurries`.
    pub(super) fn close(&mut self, hurries: &dyn Fn() -> bool) {
        self.runner.close(hurries);
    }

    /// Makes the metrics report how the run ended.
    pub(super) fn close_metrics(&self) {
        self.metrics.iter().for_each(Metrics::close);
    }
}

/// Logs that a hook failed. Returns the event for the journal.
pub(super) fn failed(Report { hook, why }: Report, repeats: &Repeats) -> What {
    repeats.warn(hook, &format!("the hook {hook} has failed: {why}"));
    What::HookFailed { hook: hook.into(), why }
}
