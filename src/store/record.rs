//! `job.json`: what a later `run` of the same name has to know of the last one.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::id::ImageId;
use super::{micros, paths};
use crate::sys::durable;

pub(super) const FILE_NAME: &str = "job.json";
const VERSION: u32 = 1;
/// execve(2) takes at most 6 MiB of arguments (three quarters of `_STK_LIM`, fs/exec.c); JSON makes at most six bytes
/// of one.
pub(super) const MAX_BYTES: u64 = 64 << 20;

/// The last run of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The command line; bytes that are not UTF-8 are replaced.
    pub command: Vec<String>,
    /// The working directory.
    #[serde(with = "paths")]
    pub directory: PathBuf,
    /// See [`super::Manifest::lineage`].
    pub lineage: String,
    /// The image of another lineage that this one began from (`rekindle restore`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<ImageId>,
    /// When the run began.
    pub created: DateTime<Utc>,
    /// How it ended, if it did.
    pub outcome: Outcome,
    /// What the job exited with, if it did.
    pub exit_code: Option<i32>,
    /// How long the job has run in all, under every supervisor, up to the last change of this record: written at the begin
    /// and the end of a run, at a death and at each snapshot.
    #[serde(rename = "uptime_us", default, with = "micros")]
    pub uptime: Duration,
    /// How often it failed in that time; see [`crate::supervisor::interval::Failures`].
    #[serde(default)]
    pub failures: u32,
    /// How often this run was brought back from an image.
    #[serde(default)]
    pub restores: u32,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It did not, or the supervisor was killed before it could say so.
    Running,
    /// The job exited with 0.
    Completed,
    /// Given up.
    Failed {
        /// In words.
        why: String,
    },
    /// Stopped by a signal or a command, to be continued.
    Stopped,
}

#[derive(Serialize, Deserialize)]
struct OnDisk<R> {
    version: u32,
    #[serde(flatten)]
    record: R,
}

#[derive(Deserialize)]
struct Header {
    version: u32,
}

pub(super) fn read(path: &Path) -> Result<Option<JobRecord>> {
    let file = match durable::open_for_reading(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Read { path: path.to_owned(), source }),
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    parse(&bytes, path).map(Some)
}

/// Reads what [`to_bytes`] wrote; the path is for messages.
pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<JobRecord> {
    let parse = |source| Error::ParseRecord { path: path.to_owned(), source };
    match serde_json::from_slice(bytes).map_err(parse)? {
        Header { version } if version > VERSION => Err(Error::NewerRecord { path: path.to_owned(), version }),
        Header { .. } => serde_json::from_slice::<OnDisk<JobRecord>>(bytes).map(|it| it.record).map_err(parse),
    }
}

pub(super) fn to_bytes(record: &JobRecord) -> io::Result<Vec<u8>> {
    serde_json::to_vec_pretty(&OnDisk { version: VERSION, record }).map_err(io::Error::from)
}

pub(super) fn write(path: &Path, record: &JobRecord) -> Result<()> {
    let failed = |source| Error::Write { path: path.to_owned(), source };
    durable::write_file(path, &to_bytes(record).map_err(failed)?, 0o600).map_err(failed)
}
