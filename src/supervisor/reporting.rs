//! Publishes the run's events and state: the journal of events, hooks and metrics, `state.json`, the
//! service manager and the log.

use std::cell::Cell;
use std::sync::mpsc;
use std::time::Instant;

use super::event_lines::EventLines;
use super::hooks::Listeners;
use super::notify::{Notify, Phase};
use super::remarks::Remarks;
use super::state::Machine;
use super::tally::Tally;
use super::{Message, Setup};
use crate::config::Interval;
use crate::published::Published;
use crate::telemetry::events::{Event, Journal};

/// All recipients.
pub(super) struct Reporting {
    /// The published state; written by [`Reporting::write`].
    pub(super) published: Published,
    pub(super) listeners: Listeners,
    pub(super) remarks: Remarks,
    pub(super) tally: Tally,
    journal: Journal,
    /// The same for standard output, if it is wanted there.
    pub(super) lines: Option<EventLines>,
    notify: Notify,
}

impl Reporting {
    pub(super) fn new(setup: &Setup, sender: &mpsc::Sender<Message>) -> Reporting {
        Reporting {
            listeners: Listeners::new(setup, sender),
            published: Published::new(&setup.program.launch.lineage)
                .of(&setup.folder, setup.program.launch.identity.as_ref()),
            remarks: Remarks::default(),
            tally: Tally::default(),
            journal: Journal::in_folder(&setup.folder.log_dir()),
            lines: None,
            notify: Notify::of(setup),
        }
    }

    /// Reports an event. The journal is written only while the job's folder `is_ours`.
    pub(super) fn tell(&mut self, event: &Event, is_ours: bool) {
        if is_ours {
            self.journal.append(event);
        }
        self.lines.iter().for_each(|lines| lines.write(event));
        self.listeners.hear(event);
    }

    /// Updates the metrics and `state.json`.
    pub(super) fn write(&mut self, setup: &Setup) {
        let interval = match setup.config.snapshot.interval {
            Interval::Every(interval) => Some(interval),
            Interval::Auto => self.published.interval.as_ref().map(|choice| choice.interval),
            Interval::Off => None,
        };
        if let Some(metrics) = self.listeners.metrics() {
            self.published.metrics = metrics.address();
            metrics.see(&self.published, interval);
        }
        if let Err(error) = self.published.write(&setup.folder.state_file()) {
            tracing::debug!("cannot publish the state: {error}");
        }
    }

    /// Reports changes to the service manager, and that the owner's thread is alive.
    pub(super) fn beat(&mut self, machine: &Machine<'_>, is_over: bool, now: Instant) {
        self.notify.beat(Phase::of(machine, is_over), &self.published, now);
    }

    /// Waits for the hooks of the end. The service manager hears meanwhile that this takes longer: it would kill the hooks, and
    /// start the run again.
    pub(super) fn close(&mut self, hurries: &dyn Fn() -> bool) {
        let said = Cell::new(None);
        let notify = &self.notify;
        let looks = || {
            notify.waits_at_the_end(&said, Instant::now());
            hurries()
        };
        self.listeners.close(&looks);
    }

    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        self.notify.next_wake(now)
    }
}
