//! Which images in memory are needed there: pure functions.

use super::state::Finish;
use rekindle_store::ImageId;

/// Whether `newest`, the newest image in memory, exists nowhere else. An older image that was not stored is of no use
/// once a newer one is stored. `stored` is the newest good image in the store; `is_stored` tells whether the store has
/// an image, good or not, unless its copy there is damaged and the one in memory is good.
pub(super) fn only_there(newest: ImageId, stored: Option<ImageId>, is_stored: impl FnOnce(ImageId) -> bool) -> bool {
    stored.is_none_or(|stored| stored < newest) && !is_stored(newest)
}

/// Images in memory that are kept even if memory is short.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needed {
    /// The newest, if it is not stored.
    pub(super) only_here: Option<ImageId>,
    /// The newest proven image, if no proven image in the store is as new.
    pub(super) proven: Option<ImageId>,
    /// The image that is being stored.
    pub(super) persisting: Option<ImageId>,
}

impl Needed {
    /// Whether the image of a slot is among them.
    pub(super) fn has(&self, image: Option<ImageId>) -> bool {
        image.is_some() && [self.only_here, self.proven, self.persisting].contains(&image)
    }
}

/// Sort key for freeing slots if memory is short: the slot with the newest image comes last.
pub(super) fn turn(image: Option<ImageId>, newest: Option<ImageId>) -> bool {
    image == newest
}

/// What to do with an image that is only in memory when the run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AtTheEnd {
    /// Nothing continues from it.
    NotNeeded,
    /// It stays in memory, without waiting.
    LeftThere,
    /// It is stored.
    Stored,
}

/// Decides what to do with an image that is only in memory when the run ends.
pub(super) fn at_the_end(finish: &Finish, at_once: bool) -> AtTheEnd {
    match (finish, at_once) {
        (Finish::Completed, _) => AtTheEnd::NotNeeded,
        (_, true) => AtTheEnd::LeftThere,
        (_, false) => AtTheEnd::Stored,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_in_memory() {
        let id = |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH);
        let needed = Needed { only_here: Some(id(3)), proven: Some(id(2)), persisting: None };
        assert!(needed.has(Some(id(3))) && needed.has(Some(id(2))));
        assert!(!needed.has(Some(id(1))) && !needed.has(None), "an empty slot holds nothing");
        assert!(only_there(id(3), Some(id(2)), |_| false) && !only_there(id(3), Some(id(4)), |_| false));
        assert!(!only_there(id(3), None, |_| true), "the store has it, and it is marked there");
    }
}
