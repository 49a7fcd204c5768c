//! `bad.json` in the folder of an image: the image must not be used for a restart, and why.

use std::io;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use rekindle_os::beneath::{Beneath, Unexpected};

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
///
/// # Errors
/// When something else was put there.
pub(super) fn read(dir: &Beneath, fallback_when: DateTime<Utc>) -> Result<Option<BadMark>, Unexpected> {
    let illegible = |why: String| BadMark {
        why: BadWhy::Damaged,
        detail: format!("its {FILE_NAME} cannot be read: {why}"),
        when: fallback_when,
    };
    Ok(match dir.join(FILE_NAME).content(MAX_BYTES) {
        Ok(bytes) => Some(serde_json::from_slice(&bytes).unwrap_or_else(|error| illegible(error.to_string()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => match Unexpected::in_error(&error) {
            Some(unexpected) => return Err(unexpected.clone()),
            None => Some(illegible(error.to_string())),
        },
    })
}
