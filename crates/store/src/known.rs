//! An image with all its copies, in memory and in the store.

use std::slice;

use super::id::ImageId;
use super::image::{Image, Place};
use super::tag::Tags;

/// An image with all its copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The copy to use: a good one if there is one; if there are two, the one in the store.
    best: Image,
    other: Option<Image>,
}

impl Known {
    /// Groups the copies by image, newest image first.
    pub(super) fn gather(mut copies: Vec<Image>) -> Vec<Known> {
        let worth = |image: &Image| (image.id, image.is_good(), image.place);
        copies.sort_by_key(|image| std::cmp::Reverse(worth(image)));
        let mut all: Vec<Known> = Vec::new();
        for image in copies {
            match all.last_mut().filter(|last| last.id() == image.id) {
                // Two slots never contain the same image: the first copy of each place counts.
                Some(last) if last.best.place != image.place => last.other = last.other.take().or(Some(image)),
                Some(_) => {}
                None => all.push(Known { best: image, other: None }),
            }
        }
        all
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> ImageId {
        self.best.id
    }

    /// The copy to use: a good one if there is one; if there are two, the one in the store.
    #[must_use]
    pub fn best(&self) -> &Image {
        &self.best
    }

    /// All copies, the best first.
    pub fn copies(&self) -> impl Iterator<Item = &Image> {
        slice::from_ref(&self.best).iter().chain(&self.other)
    }

    /// The copy at `place`.
    #[must_use]
    pub fn copy(&self, place: Place) -> Option<&Image> {
        self.copies().find(|image| image.place == place)
    }

    /// The places of the copies, memory first.
    #[must_use]
    pub fn places(&self) -> Vec<Place> {
        [Place::Staged, Place::Slot, Place::Stored].into_iter().filter(|place| self.copy(*place).is_some()).collect()
    }

    /// The user's tags and pin; only the copy in the store has them.
    #[must_use]
    pub fn tags(&self) -> Tags {
        self.copy(Place::Stored).map(Image::tags).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{Damage, DamageKind, State};

    fn image(n: u32, place: Place, good: bool) -> Image {
        let state = match good {
            true => State::Good(Box::new(crate::tests::manifest())),
            false => State::Damaged { why: Damage { kind: DamageKind::Broken, detail: String::new() } },
        };
        Image {
            id: ImageId::new(n, chrono::DateTime::UNIX_EPOCH),
            dir: "/".into(),
            state,
            place,
            trust: Default::default(),
        }
    }

    #[test]
    fn copies_come_together_and_a_good_one_is_the_best() {
        let known = Known::gather(vec![
            image(1, Place::Stored, true),
            image(3, Place::Staged, true),
            image(2, Place::Staged, true),
            image(2, Place::Stored, true),
            image(1, Place::Staged, false),
        ]);
        let ids: Vec<u32> = known.iter().map(|known| known.id().sequence()).collect();
        assert_eq!(ids, [3, 2, 1]);
        assert_eq!(known[0].places(), [Place::Staged]);
        assert_eq!((known[0].best().place, known[1].best().place), (Place::Staged, Place::Stored));
        assert_eq!(known[1].places(), [Place::Staged, Place::Stored]);
        assert_eq!(known[2].copies().count(), 2);

        let damaged = Known::gather(vec![image(1, Place::Stored, false), image(1, Place::Staged, true)]);
        assert_eq!(damaged[0].best().place, Place::Staged, "what lasts and is damaged helps nobody");
    }
}
