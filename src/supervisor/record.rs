//! What a run leaves for later runs: the job's record in the store. Later runs use it and the images to choose the
//! interval.
//!
//! The record is written when the run begins, with each snapshot, at each end of a life, and when the run ends. If a
//! run is killed, its last record remains.

use std::time::{Duration, Instant};

use super::pace::Pace;
use super::state::State;
use super::{Owner, Setup};
use rekindle_base::chain;
use rekindle_store::{Image, JobRecord, Outcome};

/// Observations of earlier runs, to choose the interval. Unreadable ones are collected again.
pub(super) fn recall(setup: &Setup) -> Pace {
    let read = setup.folder.record().and_then(|record| Ok((record, setup.folder.images()?)));
    let (record, images) = read.unwrap_or_else(|error| {
        tracing::warn!("records of earlier runs are not used for the interval: {}", chain(&error));
        (None, Vec::new())
    });
    let ours = images.iter().rev().filter_map(Image::manifest).filter(|m| m.lineage == setup.program.launch.lineage);
    let freezes = ours.map(|m| Duration::from_micros(m.freeze_us));
    Pace::recalled(record.as_ref().map(JobRecord::seen_so_far).unwrap_or_default(), freezes)
}

impl Owner<'_> {
    /// Records this outcome, and the observations so far.
    pub(super) fn record(&self, outcome: Outcome, exit_code: Option<i32>) -> Result<(), rekindle_store::Error> {
        let observed = self.machine.failures(Instant::now());
        let record = JobRecord {
            command: self.setup.program.launch.command.clone(),
            directory: self.setup.program.launch.directory.clone(),
            lineage: self.line.lineage.clone(),
            base: self.line.base,
            created: self.reporting.published.begun,
            outcome,
            exit_code,
            uptime: observed.uptime,
            failures: observed.failures,
            restores: self.clients.job_api.restores(),
        };
        self.setup.folder.write_record(&self.setup.lock, &record)
    }

    /// Records the present state for the case that this run is killed. A run that is about to end records it at its
    /// end.
    pub(super) fn remember(&self) {
        if matches!(self.machine.state(), State::Running(_) | State::Waiting { .. } | State::Suspended { .. })
            && let Err(error) = self.record(Outcome::Running, None)
        {
            tracing::warn!("cannot record how long the job ran: {}", chain(&error));
        }
    }
}
