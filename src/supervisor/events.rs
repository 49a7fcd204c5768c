//! Events about the job for its journal.

use std::time::Instant;

use super::result::RunResult;
use super::state::{Finish, State};
use super::times::{micros, shown};
use super::{Owner, Setup, hooks, result};
use crate::notifications::Report;
use crate::policy::StartPoint;
use crate::published::{JobState, LastEnd, Published};
use crate::telemetry::events::{Event, What};
use rekindle_base::Moved;
use rekindle_base::cause::Cause;
use rekindle_engine::launch::Job;
use rekindle_engine::snapshot::Taken;
use rekindle_os::process;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

impl Owner<'_> {
    /// Passes an event to all recipients.
    pub(super) fn tell(&mut self, what: What) -> Event {
        let event = Event::now(&self.line.lineage, what);
        self.deadline.observe(&event);
        let is_ours = self.still_holds_the_lock();
        self.reporting.tell(&event, is_ours);
        event
    }

    pub(super) fn tell_begin(&mut self) {
        let command = self.setup.program.launch.command.clone();
        let interval = self.setup.config.snapshot.interval.to_string();
        result::forget(&self.setup.folder);
        self.reporting.published.last_end = interrupted(self.setup);
        let last_seen = self.setup.lock.last_seen().map(Into::into);
        let before = self.reporting.published.last_end.as_ref().map(|end| end.cause.clone());
        self.tell(What::Supervised { supervisor: std::process::id(), command, interval, before, last_seen });
        self.watch_begin();
    }

    pub(super) fn tell_start(&mut self, job: &Job, moved: Vec<Moved>, differences: Vec<String>) {
        self.watch_life(job);
        // Determined before the machine gets the event.
        let image = match self.machine.state() {
            State::Starting { from, .. } => image_of(*from),
            _ => None,
        };
        let took_us = micros(self.life.started().elapsed());
        self.tell(What::Started { pid: job.main_pid(), image, took_us, moved, differences });
    }

    pub(super) fn tell_snapshot(&mut self, taken: &Taken) {
        self.watch.is_saved(Instant::now());
        let Some(manifest) = taken.image.manifest() else { return };
        self.tell(What::SnapshotTaken {
            image: manifest.id,
            reason: manifest.reason,
            freeze_us: micros(taken.freeze),
            phases: manifest.phases.clone(),
            bytes: manifest.bytes,
        });
    }

    pub(super) fn tell_end(&mut self, ended: Ended) {
        let (exit_code, signal) = match ended {
            Ended::Exit(code) => (Some(code), None),
            Ended::Signal(signal) => (None, Some(signal)),
        };
        let cause = self.why_ended(ended);
        self.tell(What::Ended { exit_code, signal, cause: Some(cause.clone()) });
        if cause.excuses() {
            self.step(super::state::Event::Excused);
        }
        let outside = self.watch.gpus.ended_from_outside(Instant::now()).filter(|_| ended != Ended::Exit(0));
        if let Some((by, why)) = outside {
            tracing::warn!("the job had {why}. Neither the GPU nor an image is to blame");
            self.step(super::state::Event::Outside(by));
        }
        self.judge_end(ended, &cause);
    }

    pub(super) fn hook_failed(&mut self, report: Report) {
        let what = hooks::failed(report, &self.reporting.remarks.repeats);
        self.tell(what);
    }

    pub(super) fn tell_finish(&mut self, finish: &Finish, exit_code: Option<i32>) {
        let folder = &self.setup.folder;
        let images = folder.images().unwrap_or_default();
        let images = images.iter().filter(|image| self.is_usable(image)).map(|image| image.id).collect();
        let (published, work) = (&self.reporting.published, &self.watch.work);
        let result = RunResult::now(self.setup, published, work, finish, exit_code, images);
        result::write(folder, &result);
        let (outcome, why) = result::in_words(finish);
        self.summarize(&result);
        self.tell(What::Finished { outcome: outcome.into(), exit_code, why });
    }

    /// The run in one line.
    fn summarize(&self, result: &RunResult) {
        if result.runs == 0 {
            return;
        }
        let ran = shown((result.ended - result.begun).to_std().unwrap_or_default());
        let (job, outcome) = (&result.job, &result.outcome);
        let more = match result.images.first() {
            Some(image) if outcome == "stopped" => format!("; `rekindle run` continues from image {image}"),
            _ => String::new(),
        };
        tracing::info!("job {job} {outcome} after {ran}: {}{more}", self.reporting.tally.in_words(result.restarts));
    }
}

pub(super) fn image_of(from: StartPoint) -> Option<ImageId> {
    match from {
        StartPoint::Image(image) => Some(image),
        StartPoint::Cold => None,
    }
}

/// Why the previous supervisor left a job that had not ended; `None` if it ended normally.
fn interrupted(setup: &Setup) -> Option<LastEnd> {
    let before = Published::read(&setup.folder.state_file()).ok()?;
    let was_at_its_end = matches!(before.state, JobState::Done | JobState::Waiting | JobState::Suspended);
    if was_at_its_end || before.boot_id.is_empty() {
        return None;
    }
    let same_boot = process::boot_id().is_ok_and(|now| now == before.boot_id);
    Some(LastEnd::now(None, if same_boot { Cause::SupervisorKilled } else { Cause::MachineRestart }))
}
