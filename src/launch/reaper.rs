//! The reaper's executable. It is the root of every job's tree, and so part of every image.

use std::path::{Path, PathBuf};

use super::embedded::{Embedded, Error};

/// Built by build.rs from `reaper/`.
pub(super) const REAPER: Embedded = Embedded {
    name: "reaper",
    suffix: "",
    content: include_bytes!(concat!(env!("OUT_DIR"), "/rekindle-reaper")),
    mode: 0o700,
};

/// Makes sure that `dir` holds this version's reaper, whole, and returns its path.
///
/// # Errors
/// When the file can not be read or written.
pub fn unpack(dir: &Path) -> Result<PathBuf, Error> {
    REAPER.unpack(dir)
}

/// Whether this is the path of a reaper, of any version.
#[must_use]
pub fn is_named(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("reaper-"))
}
