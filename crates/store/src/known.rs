//! All images of a job with their copies, in memory and in the store; how a text finds one, and how the next is named.

use std::collections::BTreeSet;
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

    /// A name for the next image, with a number higher than those of all images in the store and in memory, and those of
    /// [`JobFolder::note_elsewhere`]. A number that a name in the folder has is not used again, whatever the name is of; but
    /// what is no image of ours decides no more than that (see [`above`]).
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::NumbersUsedUp`].
    pub fn next_id(&self, now: DateTime<Utc>) -> Result<ImageId> {
        let dir = self.images_dir();
        let (mut stored, mut others) = (BTreeSet::new(), BTreeSet::new());
        for name in list(&dir)? {
            let leftover = name.strip_prefix(TEMP_PREFIX).or_else(|| name.strip_prefix(DELETED_PREFIX));
            match (leftover, leftover.unwrap_or(&name).parse::<ImageId>()) {
                (None, Ok(id)) => drop(stored.insert(id)),
                (Some(_), Ok(id)) => drop(others.insert(id.sequence())),
                (_, Err(_)) => {}
            }
        }
        // The highest that is an image of ours; those below it do not matter.
        let mut highest = None;
        while let Some(id) = stored.pop_last() {
            if Image::load(&dir.join(id.to_string()), id, self.trust()).manifest().is_some() {
                highest = Some(id.sequence());
                break;
            }
            others.insert(id.sequence());
        }
        for image in self.staged() {
            // Others cannot write to memory.
            match image.place == Place::Staged || image.manifest().is_some() {
                true => highest = highest.max(Some(image.id.sequence())),
                false => drop(others.insert(image.id.sequence())),
            }
        }
        let highest = highest.max(Some(self.elsewhere.load(Ordering::Relaxed)).filter(|elsewhere| *elsewhere > 0));
        let next = above(highest, &others).ok_or_else(|| Error::NumbersUsedUp(self.name().clone()))?;
        Ok(ImageId::new(next, now))
    }

    /// This image of the job exists elsewhere: the next one gets a higher number, so that it counts as newer there,
    /// too. This is only in memory.
    pub fn note_elsewhere(&self, id: ImageId) {
        self.elsewhere.fetch_max(id.sequence(), Ordering::Relaxed);
    }
}

/// Numbers that may be missing between an image of ours and one that cannot be read: pruning removes images, and the next
/// one should be newer than a damaged one, too.
const GAP: u32 = 64;

/// The number after the `highest` of our images, and the `others`: damaged images, remains, and whatever else has the name
/// of an image. Anybody who can write to the store can make a folder with the last number that there is, so one of those
/// counts only if its number may follow the others'. Without any image of ours (the key may have changed) those in the lower
/// half count.
fn above(highest: Option<u32>, others: &BTreeSet<u32>) -> Option<u32> {
    let first = others.iter().copied().filter(|_| highest.is_none());
    let mut last = first.take_while(|number| *number < u32::MAX / 2).last().or(highest).unwrap_or(0);
    for number in others.range(last..) {
        if number - last > GAP {
            break;
        }
        last = *number;
    }
    last.checked_add(1)
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
    fn what_is_no_image_of_ours_does_not_use_up_the_numbers() {
        let above = |highest, others: &[u32]| super::above(highest, &others.iter().copied().collect());
        assert_eq!(above(None, &[]), Some(1));
        assert_eq!(above(Some(7), &[u32::MAX]), Some(8));
        assert_eq!(above(None, &[u32::MAX]), Some(1));
        // Damaged images and remains; some are gone.
        assert_eq!(above(Some(7), &[3, 8, 9, 9 + GAP, u32::MAX]), Some(10 + GAP));
        assert_eq!(above(Some(7), &[8 + GAP]), Some(8));
        // Nothing is ours.
        assert_eq!(above(None, &[1000, 2000, u32::MAX]), Some(2001));
        assert_eq!(above(Some(u32::MAX), &[]), None);
    }

    #[test]
    fn a_folder_with_the_last_number_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = crate::Store::open(&dir.path().join("store"), crate::Access::Write).unwrap();
        let folder = store.create_job(&"train".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        let now = DateTime::UNIX_EPOCH;
        let first = folder.begin_image(&lock, now).unwrap().publish_loose(crate::tests::manifest());
        for name in ["", TEMP_PREFIX, DELETED_PREFIX] {
            let name = format!("{name}{}", ImageId::new(u32::MAX, now));
            folder.images_dir().join(name).make_dir(0o700).unwrap();
            assert_eq!((first.id.sequence(), folder.next_id(now).unwrap().sequence()), (1, 2));
        }
        // A damaged image keeps its number.
        folder.images_dir().join(ImageId::new(2, now).to_string()).make_dir(0o700).unwrap();
        assert_eq!(folder.next_id(now).unwrap().sequence(), 3);
        let second = folder.begin_image(&lock, now).unwrap().publish_loose(crate::tests::manifest());
        assert_eq!(second.id.sequence(), 3);
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
