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
            Some(there) if there.is_owner() => {
                write!(f, ", because it belongs to somebody else (it was not changed: {})", there.advice())
            }
            Some(there) => write!(
                f,
                ", because something else was put there (it was neither followed nor changed: {}; then `rekindle \
                repair` says what is missing)",
                there.advice()
            ),
            None => Ok(()),
        }
    }
}

/// Whether the disk itself has failed. Content that it did not deliver may be intact.
pub(crate) fn is_failing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// The same error once more, with what the kernel, or [`Unexpected`], says.
pub(crate) fn again(error: &io::Error) -> io::Error {
    match Unexpected::in_error(error) {
        Some(unexpected) => unexpected.clone().into(),
        None => error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error),
    }
}

/// Makes an error of a failed action.
pub fn failed<P: AsRef<Path> + ?Sized>(what: &'static str, path: &P) -> impl FnOnce(io::Error) -> FileError + use<P> {
    let path = path.as_ref().to_owned();
    move |source| FileError { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_another_owner_is_not_to_be_removed() {
        let said = |is: &str, want| {
            let there = Unexpected { path: "/s/j/packs".into(), is: is.into(), want };
            rekindle_base::chain(&failed("list", Path::new("/s/j/packs"))(there.into()))
        };
        let owner = said("the property of user 1234", "root's");
        assert!(owner.contains("check its content, then run `chown root /s/j/packs`"), "{owner}");
        assert!(!owner.contains("remove"), "{owner}");
        let link = said("a symbolic link", "a folder");
        assert!(link.contains("remove it, or make it what it should be; then `rekindle repair`"), "{link}");
    }

    #[test]
    fn an_error_is_the_same_when_it_is_told_again() {
        let there = Unexpected { path: "/s/j/packs/p".into(), is: "a FIFO".into(), want: "a regular file" };
        for error in [there.into(), io::Error::from_raw_os_error(libc::EIO), io::ErrorKind::InvalidData.into()] {
            assert_eq!(again(&error).to_string(), error.to_string());
            assert_eq!(again(&error).kind(), error.kind());
        }
    }
}
