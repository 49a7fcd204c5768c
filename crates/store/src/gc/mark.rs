//! The mark of a pack that no image needs: `NAME.gone`, one JSON object with the time.

use std::io;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::pack::PackName;
use crate::pack::set::Packs;
use crate::{FileError, failed};
use rekindle_os::durable;

/// Maximum size of the file; a mark has some fifty bytes.
const MAX_BYTES: u64 = 4 << 10;

#[derive(Debug, Serialize, Deserialize)]
struct Mark {
    when: DateTime<Utc>,
}

pub(super) fn set(packs: &Packs, pack: PackName, now: DateTime<Utc>) -> Result<(), FileError> {
    let path = packs.gone_path(pack);
    let bytes = serde_json::to_vec(&Mark { when: now }).map_err(io::Error::from);
    bytes.and_then(|bytes| durable::write_file(&path, &bytes, 0o600)).map_err(failed("write", &path))
}

/// Removes the mark durably: from then on the pack counts again.
pub(super) fn unmark(packs: &Packs, pack: PackName) -> Result<(), FileError> {
    let path = packs.gone_path(pack);
    durable::remove_file(&path).map_err(failed("remove", &path))
}

/// Whether the mark is old enough. A mark that cannot be read, or that is from the future because the clock was set
/// back, is renewed: the grace period begins again.
pub(super) fn is_due(packs: &Packs, pack: PackName, grace: Duration, now: DateTime<Utc>) -> Result<bool, FileError> {
    let since = read(packs, pack).and_then(|mark| now.signed_duration_since(mark.when).to_std().ok());
    match since {
        Some(since) => Ok(since >= grace),
        None if grace.is_zero() => Ok(true),
        None => set(packs, pack, now).map(|()| false),
    }
}

fn read(packs: &Packs, pack: PackName) -> Option<Mark> {
    serde_json::from_slice(&packs.gone_path(pack).content(MAX_BYTES).ok()?).ok()
}
