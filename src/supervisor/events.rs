//! What the supervisor tells of a job, for the journal of its events.

use std::time::Duration;

use super::Owner;
use super::state::{Finish, State};
use super::watch::interrupted;
use crate::policy::From;
use crate::telemetry::events::{Event, What};
use rekindle_base::Moved;
use rekindle_engine::launch::Job;
use rekindle_engine::snapshot::Taken;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

impl Owner<'_> {
    /// The one door for what happened.
    pub(super) fn tell(&mut self, what: What) -> Event {
        let event = Event::now(&self.line.lineage, what);
        self.deadline.observe(&event);
        if self.still_holds_the_lock() {
            self.journal.append(&event);
        }
        self.tell_listeners(&event);
        event
    }

    pub(super) fn tell_begin(&mut self) {
        let command = self.shared.launch.command.clone();
        let interval = self.shared.config.snapshot.interval.to_string();
        self.forget_result();
        self.published.last_end = interrupted(self.shared);
        let last_seen = self.shared.lock.last_seen().map(Into::into);
        let before = self.published.last_end.as_ref().map(|end| end.cause.clone());
        self.tell(What::Supervised { supervisor: std::process::id(), command, interval, before, last_seen });
        self.watch_begin();
    }

    pub(super) fn tell_start(&mut self, job: &Job, moved: Vec<Moved>) {
        self.watch_life(job);
        // Before the machine hears of it.
        let image = match self.machine.state() {
            State::Starting { from, .. } => image_of(*from),
            _ => None,
        };
        self.tell(What::Started { pid: job.main_pid(), image, took_us: micros(self.since.elapsed()), moved });
    }

    pub(super) fn tell_snapshot(&mut self, taken: &Taken) {
        self.watch_saved();
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
        self.judge_end(ended, &cause);
    }

    pub(super) fn tell_finish(&mut self, finish: &Finish, exit_code: Option<i32>) {
        let (outcome, why) = match finish {
            Finish::Completed => ("completed", None),
            Finish::Stopped(_) | Finish::StoppedInMemory { .. } => ("stopped", None),
            Finish::Impossible { why, .. } | Finish::Failed { why, .. } | Finish::NoUsableImage { why } => {
                ("failed", Some(why.clone()))
            }
        };
        self.write_result(finish, exit_code);
        self.tell(What::Finished { outcome: outcome.into(), exit_code, why });
    }
}

pub(super) fn image_of(from: From) -> Option<ImageId> {
    match from {
        From::Image(image) => Some(image),
        From::Cold => None,
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
