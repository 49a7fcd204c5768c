//! Failures of single files, and how they are told if the disk itself fails.

use std::io;
use std::path::{Path, PathBuf};

use rekindle_os::beneath::Unexpected;
use thiserror::Error;

/// A file or folder could not be created, read, written or removed.
#[derive(Debug, Error)]
#[error("cannot {what} {}{}", path.display(), Failing(source))]
pub struct FileError {
    pub(crate) what: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// The kernel's answer.
    #[source]
    pub source: io::Error,
}

/// A hint for errors of the disk itself, and for what others put into a store: what the error means and what to do. It is
/// shown before the cause. Empty for other errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failing<'a>(pub(crate) &'a io::Error);

impl std::fmt::Display for Failing<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if is_failing(self.0) {
            return f.write_str(
                ", because the disk is failing (see the kernel log, and replace the disk; no image is marked as bad)",
            );
        }
        match Unexpected::in_error(self.0) {
            Some(_) => f.write_str(
                ", because something else was put there (it was neither followed nor changed: remove it, or make it what \
                it should be; then `rekindle repair` says what is missing)",
            ),
            None => Ok(()),
        }
    }
}

/// Whether the disk itself has failed. Content that it did not deliver may be intact.
pub(crate) fn is_failing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// Makes an error of a failed action.
pub fn failed<P: AsRef<Path> + ?Sized>(what: &'static str, path: &P) -> impl FnOnce(io::Error) -> FileError + use<P> {
    let path = path.as_ref().to_owned();
    move |source| FileError { what, path, source }
}
