//! `result.json` in the job's folder: how it ended, for whoever started it. Written durably when a run is over, and removed
//! when one begins: what is there speaks of the last run, and is whole.

use std::path::PathBuf;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::Owner;
use super::events::micros;
use super::state::Finish;
use crate::published::LastEnd;
use rekindle_os::durable;
use rekindle_store::{Image, ImageId, JobFolder};

const FILE_NAME: &str = "result.json";
const VERSION: u32 = 1;

/// How a run ended. Fields are only ever added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// 1.
    pub version: u32,
    /// The job's name.
    pub job: String,
    /// The run that began from nothing; an image has the same.
    pub run: String,
    /// The command line.
    pub command: Vec<String>,
    /// completed, stopped, failed.
    pub outcome: String,
    /// Why, in words, where it failed.
    pub why: Option<String>,
    /// The exit code of the job, where it ended with one.
    pub exit_code: Option<i32>,
    /// How the last life ended; none where there was none.
    pub last_end: Option<LastEnd>,
    /// When this supervisor began.
    pub begun: DateTime<Utc>,
    /// When it was over.
    pub ended: DateTime<Utc>,
    /// How often the job was started or brought back by it.
    pub runs: u32,
    /// How often it was brought back after a death.
    pub restarts: u32,
    /// Work that no image had when a life ended, of all lives, in microseconds.
    pub lost_us: u64,
    /// The good images of the run, newest first.
    pub images: Vec<ImageId>,
}

impl RunResult {
    /// Where it is.
    #[must_use]
    pub fn file(folder: &JobFolder) -> PathBuf {
        folder.path().join(FILE_NAME)
    }

    /// Reads it.
    ///
    /// # Errors
    /// When there is none, or it cannot be understood.
    pub fn read(folder: &JobFolder) -> std::io::Result<RunResult> {
        Ok(serde_json::from_slice(&std::fs::read(RunResult::file(folder))?)?)
    }
}

impl Owner<'_> {
    /// Removes what speaks of an earlier run.
    pub(super) fn forget_result(&self) {
        match durable::remove_file(&RunResult::file(&self.shared.folder)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!("the result of the run before cannot be removed: {error}");
            }
            _ => {}
        }
    }

    pub(super) fn write_result(&self, finish: &Finish, exit_code: Option<i32>) {
        let (outcome, why) = match finish {
            Finish::Completed => ("completed", None),
            Finish::Stopped(_) | Finish::StoppedInMemory { .. } => ("stopped", None),
            Finish::Impossible { why, .. } | Finish::Failed { why, .. } | Finish::NoUsableImage { why } => {
                ("failed", Some(why.clone()))
            }
        };
        let images = self.shared.folder.images().unwrap_or_default();
        let launch = &self.shared.launch;
        let result = RunResult {
            version: VERSION,
            job: self.shared.folder.name().to_string(),
            run: self.line.lineage.clone(),
            command: launch.command.clone(),
            outcome: outcome.into(),
            why,
            exit_code,
            last_end: self.published.last_end.clone(),
            begun: self.published.begun,
            ended: Utc::now(),
            runs: self.watch.lives,
            restarts: self.published.restarts,
            lost_us: micros(self.watch.lost),
            images: images.iter().filter(|image| self.is_usable(image)).map(|image: &Image| image.id).collect(),
        };
        let path = RunResult::file(&self.shared.folder);
        let written = serde_json::to_vec_pretty(&result)
            .map_err(Into::into)
            .and_then(|bytes| durable::write_file(&path, &bytes, 0o600));
        if let Err(error) = written {
            tracing::warn!("the result cannot be written to {}: {error}", path.display());
        }
    }
}
