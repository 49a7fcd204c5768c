//! Values for tests.

use std::path::PathBuf;

use rekindle_store::{JobPath, Manifest, PartPath};

/// A minimal manifest.
pub(crate) fn manifest() -> Manifest {
    serde_json::from_str(rekindle_testing::MANIFEST).unwrap()
}

/// A valid path of a job.
pub(crate) fn job_path(path: impl Into<PathBuf>) -> JobPath {
    JobPath::new(path).unwrap()
}

/// A place at a path.
pub(crate) fn beneath(path: &std::path::Path) -> rekindle_os::beneath::Beneath {
    rekindle_os::beneath::Beneath::at(path).unwrap()
}

/// A valid path of a part of an image.
pub(crate) fn part_path(path: &str) -> PartPath {
    path.parse().unwrap()
}
