//! `result.json` in the job's folder: how a run ended, for whoever started it. It is written durably when a run is
//! over, and removed when one begins. So an existing file is complete and describes the last run.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::Setup;
use super::state::Finish;
use super::times::micros;
use super::work::Work;
use crate::published::{LastEnd, Published};
use rekindle_os::beneath::Beneath;
use rekindle_os::durable;
use rekindle_store::{ImageId, JobFolder};

const FILE_NAME: &str = "result.json";
/// Maximum size of the file. Ours have some kilobytes.
const MAX_BYTES: u64 = 1 << 20;
const VERSION: u32 = 1;

/// How a run ended. Later versions may add fields, and never remove any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// Version of the format: 1.
    pub version: u32,
    /// The job's name.
    pub job: String,
    /// Id of the run that started the job from the beginning; its images have the same.
    pub run: String,
    /// The command line.
    pub command: Vec<String>,
    /// completed, stopped, failed.
    pub outcome: String,
    /// Why it failed, if it did, in words.
    pub why: Option<String>,
    /// The exit code of the job, if it exited.
    pub exit_code: Option<i32>,
    /// How the last life ended; `None` if there was none.
    pub last_end: Option<LastEnd>,
    /// When this supervisor started.
    pub begun: DateTime<Utc>,
    /// When it was over.
    pub ended: DateTime<Utc>,
    /// How often it started or restored the job.
    pub runs: u32,
    /// How often it restored the job after a death.
    pub restarts: u32,
    /// Work that was lost when lives ended, because it was in no image, in microseconds.
    pub lost_us: u64,
    /// The good images of the run, newest first.
    pub images: Vec<ImageId>,
}

/// How a run ended, and why it failed, if it did.
pub(super) fn in_words(finish: &Finish) -> (&'static str, Option<String>) {
    match finish {
        Finish::Completed => ("completed", None),
        Finish::Stopped(_) | Finish::StoppedInMemory { .. } => ("stopped", None),
        Finish::Impossible { why, .. } | Finish::Failed { why, .. } | Finish::NoUsableImage { why } => {
            ("failed", Some(why.clone()))
        }
    }
}

impl RunResult {
    /// The result of a run that ends now. `images` are the good ones, newest first.
    pub(super) fn now(
        setup: &Setup,
        published: &Published,
        work: &Work,
        finish: &Finish,
        exit_code: Option<i32>,
        images: Vec<ImageId>,
    ) -> RunResult {
        let (outcome, why) = in_words(finish);
        RunResult {
            version: VERSION,
            job: setup.folder.name().to_string(),
            run: published.lineage.clone(),
            command: setup.program.launch.command.clone(),
            outcome: outcome.into(),
            why,
            exit_code,
            last_end: published.last_end.clone(),
            begun: published.begun,
            ended: Utc::now(),
            runs: work.lives(),
            restarts: published.restarts,
            lost_us: micros(work.lost()),
            images,
        }
    }

    /// The file.
    #[must_use]
    pub fn file(folder: &JobFolder) -> Beneath {
        folder.dir().join(FILE_NAME)
    }

    /// Reads it.
    ///
    /// # Errors
    /// When there is none, or it cannot be parsed.
    pub fn read(folder: &JobFolder) -> std::io::Result<RunResult> {
        Ok(serde_json::from_slice(&RunResult::file(folder).content(MAX_BYTES)?)?)
    }
}

/// Removes the file of an earlier run.
pub(super) fn forget(folder: &JobFolder) {
    match durable::remove_file(&RunResult::file(folder)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!("cannot remove the result of the previous run: {error}");
        }
        _ => {}
    }
}

/// Writes the file, and logs a failure.
pub(super) fn write(folder: &JobFolder, result: &RunResult) {
    let path = RunResult::file(folder);
    let written = serde_json::to_vec_pretty(result)
        .map_err(Into::into)
        .and_then(|bytes| durable::write_file(&path, &bytes, 0o600));
    if let Err(error) = written {
        tracing::warn!("cannot write the result to {}: {error}", path.display());
    }
}
