//! The content of a file, as far as this process has copied it there.

use super::kernel::{NAMED, Name};

/// The names of all 256 KiB of a file, and their last words.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) names: Vec<Name>,
    pub(super) words: Vec<u64>,
}

impl Known {
    /// Forgets what is beyond `bytes`.
    pub(super) fn cut(&mut self, bytes: u64) {
        let names = usize::try_from(bytes / NAMED).unwrap_or(usize::MAX);
        self.words.truncate(names);
        self.names.truncate(names);
    }
}
