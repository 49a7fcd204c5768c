//! How a job's time was spent: one page for people, one document for programs.
//!
//! Made from the journal of its events and the manifests of its images, and from nothing else; it can be made while the
//! job runs and after it, with or without a supervisor. `docs/report.md` defines each figure.
//!
//! - [`history`]: turns events into stretches of time; also used by the live view.
//! - [`model`]: figures from those.
//! - [`html`]: the page. All external text on it (command lines, messages) is escaped.

pub(crate) mod history;
pub mod html;
pub mod model;
pub(crate) mod words;

use std::io;
use std::os::unix::fs::MetadataExt;

use chrono::{DateTime, Utc};

use crate::published::{Published, ShownState};
use crate::telemetry::events;
use model::{Facts, ImageSize, Report};
use rekindle_os::beneath::Beneath;
use rekindle_store::{self as store, JobFolder, Known, Place};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The journal cannot be read.
    #[error("cannot read the events of {job}")]
    Journal {
        job: store::JobName,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// The present report on a job.
///
/// # Errors
/// When the store or the journal cannot be read.
pub(crate) fn of(folder: &JobFolder, since: Option<DateTime<Utc>>) -> Result<Report, Error> {
    let failed = |source| Error::Journal { job: folder.name().clone(), source };
    let events = events::read(&folder.log_dir()).map_err(failed)?;
    let live = Published::live(folder)?;
    let facts = Facts {
        job: folder.name().to_string(),
        state: state(folder, live.as_ref())?,
        supervised: live.is_some(),
        disk: allocated(folder.dir()),
        images: folder.known()?.iter().map(image_size).collect(),
        since,
    };
    Ok(Report::new(&events, facts, Utc::now()))
}

/// The state of the job's supervisor, or how its last run ended, in one word.
///
/// # Errors
/// When the record cannot be read.
pub(crate) fn state(folder: &JobFolder, live: Option<&Published>) -> Result<ShownState, store::Error> {
    if let Some(live) = live {
        return Ok(ShownState::Live(live.state));
    }
    Ok(ShownState::of(None, folder.record()?.as_ref().map(|record| &record.outcome)))
}

fn image_size(known: &Known) -> ImageSize {
    let manifest = known.best().manifest();
    // A loose image takes its full size in the store.
    let stored = known.copy(Place::Stored).and_then(|copy| copy.manifest());
    ImageSize {
        id: known.id(),
        good: known.best().is_good(),
        places: known.places().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        bytes: manifest.map_or(0, |manifest| manifest.bytes),
        stored: stored.map(|manifest| manifest.chunks.as_ref().map_or(manifest.bytes, |chunks| chunks.stored)),
    }
}

/// Bytes that a folder occupies on the disk. What cannot be examined counts as zero, also what is deeper than a path is
/// long.
#[must_use]
pub(crate) fn allocated(dir: &Beneath) -> u64 {
    let mut open = vec![dir.clone()];
    let mut sum = 0_u64;
    while let Some(folder) = open.pop() {
        for (place, meta) in folder.entries().unwrap_or_default() {
            // In units of 512 bytes, whatever the block size of the file system is (stat(2)).
            sum = sum.saturating_add(meta.blocks().saturating_mul(512));
            if meta.is_dir() {
                open.push(place);
            }
        }
    }
    sum
}

/// A moment, for tests.
#[cfg(test)]
pub(crate) fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + chrono::TimeDelta::seconds(1_800_000_000 + seconds)
}
