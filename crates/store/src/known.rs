//! All images of a job with their copies, in memory and in the store; how a text finds one, and how the next is named.

use std::slice;
use std::sync::atomic::Ordering;

use chrono::{DateTime, Utc};

use super::error::{Error, Result};
use super::folder::JobFolder;
use super::folders::list;
use super::id::ImageId;
use super::image::{Image, Place};
use super::names::DELETED_PREFIX;
use super::select::select;
use super::tag::{Tag, Tags};
use rekindle_os::durable::TEMP_PREFIX;

/// An image with all its copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The copy to use: a good one if there is one; if there are two, the one in the store.
    best: Image,
    other: Option<Image>,
}

impl JobFolder {
    /// Every copy of every image, newest first; one in memory comes before the same in the store.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn copies(&self) -> Result<Vec<Image>> {
        let mut copies: Vec<Image> = self.staged().into_iter().chain(self.images()?).collect();
        // A stable sort: of two with the same name the first stays first.
        copies.sort_by_key(|image| std::cmp::Reverse(image.id));
        Ok(copies)
    }

    /// All images with their places, newest first.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn known(&self) -> Result<Vec<Known>> {
        Ok(Known::gather(self.copies()?))
    }

    /// The image that a user means: `latest` (the newest good one), an id, the beginning of one, a number, a tag, or
    /// `-N`, which counts [`JobFolder::to_continue_from`].
    ///
    /// # Errors
    /// [`Error::UnknownImage`], [`Error::AmbiguousImage`], [`Error::NoGoodImage`], [`Error::NoNthImage`],
    /// [`Error::Read`].
    pub fn find(&self, selector: &str) -> Result<Image> {
        let known = self.known()?;
        let best = known.iter().map(|known| known.best().clone()).collect();
        let tagged = |tag: &Tag| known.iter().filter(|known| known.tags().has(tag)).map(Known::id).collect();
        select(self.name(), best, selector, tagged, || self.to_continue_from(&known))
    }

    /// The good images on the job's current line, newest first: -1 means the first of them, as for a rewind.
    #[must_use]
    pub fn to_continue_from(&self, known: &[Known]) -> Vec<ImageId> {
        let ours = self.line();
        known.iter().filter(|known| known.best().is_good() && ours(known.best())).map(Known::id).collect()
    }

    /// A name for the next image, with a number higher than all numbers in the folder and in memory, and those of
    /// [`JobFolder::note_elsewhere`].
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::NumbersUsedUp`].
    pub fn next_id(&self, now: DateTime<Utc>) -> Result<ImageId> {
        let names = list(&self.images_dir())?;
        let seen = names.iter().filter_map(|name| {
            let id = name.strip_prefix(TEMP_PREFIX).or_else(|| name.strip_prefix(DELETED_PREFIX)).unwrap_or(name);
            id.parse::<ImageId>().ok()
        });
        let staged = self.staged().into_iter().map(|image| image.id);
        let elsewhere = self.elsewhere.load(Ordering::Relaxed);
        let last = seen.chain(staged).map(|id| id.sequence()).max().unwrap_or(0).max(elsewhere);
        let next = last.checked_add(1).ok_or_else(|| Error::NumbersUsedUp(self.name().clone()))?;
        Ok(ImageId::new(next, now))
    }

    /// This image of the job exists elsewhere: the next one gets a higher number, so that it counts as newer there,
    /// too. This is only in memory.
    pub fn note_elsewhere(&self, id: ImageId) {
        self.elsewhere.fetch_max(id.sequence(), Ordering::Relaxed);
    }
}

impl Known {
    /// Groups the copies by image, newest image first.
    fn gather(mut copies: Vec<Image>) -> Vec<Known> {
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
            dir: crate::tests::beneath("/tmp".as_ref()),
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
