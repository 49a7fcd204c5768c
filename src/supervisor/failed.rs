//! How to treat a failed restore: pure functions.

use crate::policy::{Failure, Images};
use rekindle_engine::restore::{self, Blame};
use rekindle_store::ImageId;

/// How to treat a failed restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failed {
    /// It was cancelled, and is tried again.
    CalledOff,
    /// The machine is the cause. It is tried again.
    Machine,
    /// The image does not fit this machine, and that ends the run.
    Misfit,
    /// The image does not fit the configuration, and that ends the run.
    Configuration,
    /// Files of the job are missing here, and no older image works without them: that ends the run.
    NoFiles,
    /// This copy of the image is damaged, and must be marked.
    Damaged,
    /// The policy decides.
    Image(Failure),
}

/// Whether the job has run under this supervisor before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lives {
    /// The job has not run yet.
    None,
    /// The job has run: this machine is one that it ran on just now.
    Some,
}

impl Failed {
    /// Judges an error; `why` is its text. `can_fall_back` tells whether an older image has all its files here.
    pub(super) fn of(
        error: &restore::Error,
        why: String,
        lives: Lives,
        can_fall_back: impl FnOnce() -> bool,
    ) -> Failed {
        match error.blame() {
            Blame::Nobody => Failed::CalledOff,
            // The files that differ were removed by the job since.
            Blame::Here if lives == Lives::Some && error.is_about_files() => Failed::Image(Failure::FilesGone(why)),
            Blame::Here => Failed::Misfit,
            Blame::Configuration => Failed::Configuration,
            Blame::Machine => Failed::Machine,
            Blame::Files if lives == Lives::None && !can_fall_back() => Failed::NoFiles,
            Blame::Files => Failed::Image(Failure::FilesGone(why)),
            Blame::Image => Failed::Image(Failure::Refused(why)),
            Blame::Unknown => Failed::Image(Failure::Unexplained(why)),
            Blame::Slow | Blame::Unread => Failed::Image(Failure::NotNow(why)),
            Blame::Damaged => Failed::Damaged,
        }
    }
}

/// The images that remain after a copy of this image was found damaged. The image is excluded, unless the copy is now
/// marked and another copy is good.
pub(super) fn without_damaged(mut images: Images, id: ImageId, marked: bool) -> Images {
    if !(marked && images.good.contains(&id)) {
        images.good.retain(|other| *other != id);
        images.others = true;
    }
    images
}
