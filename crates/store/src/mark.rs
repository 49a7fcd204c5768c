//! `bad.json` in the folder of an image: the image must not be used for a restart, and why.

use std::io::{self, Read};
use std::path::Path;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use rekindle_os::durable;

/// Name of the file.
pub const FILE_NAME: &str = crate::names::MARK;
/// Maximum size of the file; a mark has some hundred bytes.
const MAX_BYTES: u64 = 64 << 10;

/// Why an image is skipped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadMark {
    /// The kind of problem.
    pub why: BadWhy,
    /// The problem in words, such as the last lines of CRIU's log.
    pub detail: String,
    /// When it was found.
    pub when: DateTime<Utc>,
}

/// The kind of problem of a bad image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BadWhy {
    /// Its files differ from what was written.
    Damaged,
    /// CRIU or the driver refused it.
    DoesNotRestore,
    /// The job died again soon after a restore, more than once.
    DiesAgain,
}

impl std::fmt::Display for BadWhy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            BadWhy::Damaged => "damaged",
            BadWhy::DoesNotRestore => "does not restore",
            BadWhy::DiesAgain => "dies again",
        })
    }
}

/// The mark of the image in `dir`, if any. A mark that cannot be read is still a mark, because it was set for a reason.
pub(super) fn read(dir: &Path, fallback_when: DateTime<Utc>) -> Option<BadMark> {
    let illegible = |why: String| BadMark {
        why: BadWhy::Damaged,
        detail: format!("its {FILE_NAME} cannot be read: {why}"),
        when: fallback_when,
    };
    let file = match durable::open_for_reading(&dir.join(FILE_NAME)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return Some(illegible(error.to_string())),
    };
    let mut bytes = Vec::new();
    Some(match file.take(MAX_BYTES).read_to_end(&mut bytes) {
        Ok(_) => serde_json::from_slice(&bytes).unwrap_or_else(|error| illegible(error.to_string())),
        Err(error) => illegible(error.to_string()),
    })
}
