//! Keeps what others see of the job ([`Published`]) up to date.

use std::io;
use std::time::Instant;

use chrono::{TimeDelta, Utc};
use nix::unistd::Uid;

use super::state::State;
use crate::published::{JobState, Published};
use rekindle_base::interval::Choice;
use rekindle_engine::launch::Job;
use rekindle_engine::launch::identity::Identity;
use rekindle_engine::snapshot::Taken;
use rekindle_os::beneath::Beneath;
use rekindle_os::{durable, process};
use rekindle_store::JobFolder;

impl Published {
    pub(crate) fn new(lineage: &str) -> Published {
        let now = Utc::now();
        Published {
            version: 1,
            job: None,
            store: None,
            state: JobState::Starting,
            since: now,
            begun: now,
            supervisor: std::process::id(),
            lineage: lineage.into(),
            uid: None,
            pid: None,
            restarts: 0,
            last_image: None,
            last_freeze_us: None,
            last_bytes: None,
            next: None,
            gpus: Vec::new(),
            control: None,
            interval: None,
            held: None,
            last_failure: None,
            persisting: None,
            restoring: None,
            persist_failure: None,
            replicating: None,
            last_replicated: None,
            replica_failure: None,
            rehearsal_failure: None,
            not_rehearsed: None,
            deadline: None,
            predicted: None,
            last_end: None,
            metrics: None,
            hang: None,
            gpu_fault: None,
            notice: None,
            group: None,
            boot_id: process::boot_id().unwrap_or_default(),
        }
    }

    /// The same, with the job's name and its store, so a command can find the job through the socket alone, and with its
    /// user.
    pub(super) fn of(self, folder: &JobFolder, user: Option<&Identity>) -> Published {
        let uid = Some(user.map_or_else(|| Uid::effective().as_raw(), |user| user.uid));
        Published { job: Some(folder.name().clone()), store: Some(folder.store().to_owned()), uid, ..self }
    }

    pub(super) fn update(&mut self, state: &State, job: Option<&Job>) {
        if self.state != state.published() {
            self.state = state.published();
            self.since = Utc::now();
        }
        self.pid = job.and_then(Job::main_pid);
    }

    pub(super) fn taken(&mut self, taken: &Taken) {
        self.last_image = Some(taken.image.id);
        self.last_freeze_us = u64::try_from(taken.freeze.as_micros()).ok();
        self.last_failure = None;
        if let Some(manifest) = taken.image.manifest() {
            self.last_bytes = Some(manifest.bytes);
            let used = !manifest.tree.cuda.is_empty();
            self.gpus = manifest.gpus.iter().filter(|_| used).map(|gpu| gpu.name.clone()).collect();
        }
    }

    pub(super) fn due(&mut self, at: Option<Instant>) {
        let left = at.map(|at| at.saturating_duration_since(Instant::now()));
        self.next = left.and_then(|left| Utc::now().checked_add_signed(TimeDelta::from_std(left).ok()?));
    }

    pub(super) fn chosen(&mut self, choice: Option<&Choice>) {
        if let Some(choice) = choice
            && self.interval.as_ref().is_none_or(|before| choice.is_news_after(before))
        {
            crate::routine!("interval {choice}");
        }
        if self.interval.as_ref() != choice {
            self.interval = choice.cloned();
        }
    }

    pub(super) fn snapshot_failed(&mut self, why: String) {
        self.last_failure = Some(why);
    }

    pub(crate) fn write(&self, path: &Beneath) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(self)?;
        durable::replace_file(path, &bytes, 0o600)
    }
}
