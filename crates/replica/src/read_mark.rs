//! Reads a mark in the replica. A mark that cannot be parsed is still a mark, because it was set for a reason.

use chrono::{DateTime, Utc};

use rekindle_store::{BadMark, BadWhy};

/// Maximum size; a mark has some hundred bytes.
pub(super) const MAX_BYTES: u64 = 64 << 10;

pub(super) fn parse(bytes: &[u8], fallback_when: DateTime<Utc>) -> BadMark {
    serde_json::from_slice(bytes).unwrap_or_else(|error| BadMark {
        why: BadWhy::Damaged,
        detail: format!("its mark cannot be read: {error}"),
        when: fallback_when,
    })
}
