//! The size of a job's images if they share content: how much a removal frees depends on which others are kept.
//!
//! Content is summed by the set of images that have it: everything that the images 3, 4 and 5 have and no other is one
//! sum. There are few such sets, however many chunks there are, so a question does not need to read the chunks.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use crate::id::ImageId;

/// The sizes of a job's images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sizes {
    groups: Vec<Group>,
    last_added: Option<u64>,
    /// Whether content stays on the disk even if no image needs it.
    stuck: bool,
}

/// Content that exactly these images have.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    owners: BTreeSet<ImageId>,
    /// Bytes of files of their own, which are removed with the image.
    own: u64,
    /// Bytes in packs.
    packed: u64,
}

impl Group {
    fn bytes(&self) -> u64 {
        self.own.saturating_add(self.packed)
    }
}

impl Sizes {
    /// Bytes of all images together.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.groups.iter().map(Group::bytes).fold(0, u64::saturating_add)
    }

    /// Bytes that become free if all of these are removed. This is at least the sum of what each would free alone.
    #[must_use]
    pub fn freed(&self, gone: &[ImageId]) -> u64 {
        self.only_of(gone, |group| if self.stuck { group.own } else { group.bytes() })
    }

    /// Bytes of the images that remain after all of these are removed.
    #[must_use]
    pub(crate) fn left(&self, gone: &[ImageId]) -> u64 {
        self.total().saturating_sub(self.only_of(gone, Group::bytes))
    }

    /// Sums up what no other image has.
    fn only_of(&self, gone: &[ImageId], bytes: impl Fn(&Group) -> u64) -> u64 {
        let gone: BTreeSet<ImageId> = gone.iter().copied().collect();
        let only = self.groups.iter().filter(|group| group.owners.is_subset(&gone));
        only.map(bytes).fold(0, u64::saturating_add)
    }

    /// The same while no content of packs can be removed.
    #[must_use]
    pub(crate) fn stuck(self) -> Sizes {
        Sizes { stuck: true, ..self }
    }

    /// Bytes that the newest image added, if images share content: approximately what the next one will add. `None` if
    /// each is stored completely.
    #[must_use]
    pub(crate) fn last_added(&self) -> Option<u64> {
        self.last_added
    }
}

/// Collects [`Sizes`]. `K` is the name of a piece of content.
#[derive(Debug)]
pub struct Gathering<K> {
    /// The present group of each piece.
    pieces: HashMap<K, usize>,
    /// The group that results from adding an owner to a group.
    with: HashMap<(usize, ImageId), usize>,
    alone: HashMap<ImageId, usize>,
    sizes: Sizes,
}

impl<K: Eq + Hash> Default for Gathering<K> {
    fn default() -> Gathering<K> {
        Gathering { pieces: HashMap::new(), with: HashMap::new(), alone: HashMap::new(), sizes: Sizes::default() }
    }
}

impl<K: Eq + Hash> Gathering<K> {
    /// Adds bytes that only this image has.
    pub fn own(&mut self, id: ImageId, bytes: u64) {
        let group = self.group_of(id);
        if let Some(group) = self.sizes.groups.get_mut(group) {
            group.own = group.own.saturating_add(bytes);
        }
    }

    /// Adds a piece of this size to an image; other images may have it too. Repetitions do not count.
    pub(crate) fn share(&mut self, id: ImageId, piece: K, bytes: u64) {
        let alone = self.group_of(id);
        let Some(before) = self.pieces.get(&piece).copied() else {
            self.pieces.insert(piece, alone);
            return self.add(alone, bytes);
        };
        let after = self.widened(before, id);
        if after != before {
            self.pieces.insert(piece, after);
            self.add(after, bytes);
            if let Some(group) = self.sizes.groups.get_mut(before) {
                group.packed = group.packed.saturating_sub(bytes);
            }
        }
    }

    /// The result. `last_added` is [`Sizes::last_added`].
    #[must_use]
    pub fn finish(self, last_added: Option<u64>) -> Sizes {
        Sizes { last_added, ..self.sizes }
    }

    fn add(&mut self, group: usize, bytes: u64) {
        if let Some(group) = self.sizes.groups.get_mut(group) {
            group.packed = group.packed.saturating_add(bytes);
        }
    }

    fn group_of(&mut self, id: ImageId) -> usize {
        match self.alone.get(&id) {
            Some(group) => *group,
            None => {
                let group = self.group(BTreeSet::from([id]));
                self.alone.insert(id, group);
                group
            }
        }
    }

    /// The group with the same owners and this one.
    fn widened(&mut self, group: usize, id: ImageId) -> usize {
        if let Some(known) = self.with.get(&(group, id)) {
            return *known;
        }
        let mut owners = self.sizes.groups.get(group).map(|group| group.owners.clone()).unwrap_or_default();
        let wider = if owners.insert(id) { self.group(owners) } else { group };
        self.with.insert((group, id), wider);
        wider
    }

    fn group(&mut self, owners: BTreeSet<ImageId>) -> usize {
        let groups = &mut self.sizes.groups;
        groups.iter().position(|group| group.owners == owners).unwrap_or_else(|| {
            groups.push(Group { owners, own: 0, packed: 0 });
            groups.len() - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::at;
    use proptest::prelude::*;

    fn id(n: u32) -> ImageId {
        ImageId::new(n, at(0))
    }

    #[test]
    fn a_piece_comes_free_with_the_last_image_that_has_it() {
        let mut gathering = Gathering::default();
        gathering.own(id(1), 1000);
        for (image, piece, bytes) in [(1, 'a', 5), (2, 'a', 5), (2, 'b', 7), (2, 'b', 7), (1, 'a', 5), (3, 'a', 5)] {
            gathering.share(id(image), piece, bytes);
        }
        let sizes = gathering.finish(Some(7));
        assert_eq!((sizes.total(), sizes.last_added()), (1012, Some(7)));
        let freed = |gone: &[u32]| sizes.freed(&gone.iter().map(|n| id(*n)).collect::<Vec<_>>());
        assert_eq!((freed(&[]), freed(&[1]), freed(&[2]), freed(&[3])), (0, 1000, 7, 0));
        assert_eq!((freed(&[1, 2]), freed(&[1, 2, 3]), freed(&[3, 3, 9])), (1007, 1012, 0));
        assert_eq!(sizes.left(&[id(1)]), 12);
        // Its files go, and its content stays.
        let stuck = sizes.stuck();
        assert_eq!((stuck.freed(&[id(1), id(2), id(3)]), stuck.left(&[id(1), id(2)]), stuck.total()), (1000, 5, 1012));
    }

    proptest! {
        #[test]
        fn it_is_what_counting_every_piece_says(
            images in prop::collection::vec(prop::collection::vec(0_u8..40, 0..30), 0..8),
            gone in prop::collection::vec(0_u32..9, 0..9),
        ) {
            let bytes = |piece: u8| 1 + u64::from(piece) * 3;
            let mut gathering = Gathering::default();
            // Sorted, because the order is not guaranteed.
            for at in 0..30 {
                for (n, pieces) in (0..).zip(&images) {
                    if let Some(piece) = pieces.get(at) {
                        gathering.share(id(n), *piece, bytes(*piece));
                    }
                }
            }
            let sizes = gathering.finish(None);
            let count = |which: &dyn Fn(u32) -> bool| -> u64 {
                let chosen = (0..).zip(&images).filter(|(n, _)| which(*n));
                let all: BTreeSet<u8> = chosen.flat_map(|(_, pieces)| pieces.iter().copied()).collect();
                all.into_iter().map(bytes).sum()
            };
            let ids: Vec<ImageId> = gone.iter().map(|n| id(*n)).collect();
            prop_assert_eq!(sizes.total(), count(&|_| true));
            prop_assert_eq!(sizes.left(&ids), count(&|n| !gone.contains(&n)));
        }
    }
}
