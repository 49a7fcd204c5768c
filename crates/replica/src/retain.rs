//! Limits the number of images in the replica.
//!
//! By count only: images that the rules of the store keep longer are kept in the store. Those of the present run count
//! first: after a start from the beginning with an empty store, the older ones have higher numbers. After the images,
//! packs that no remaining image needs are marked (`NAME.gone`), and removed when the mark is an hour old and still no
//! image needs them: an image that was just sent may need a pack, and not be in the listing yet. An upload removes the
//! mark of a pack that it needs, and looks up whether the pack is still there. A mark stays for another hour after its
//! pack, because a listing may show the pack that long. Parts of group images are counted from the newest whole one on: the
//! others' replicas may not have newer ones yet. What cannot be read in the replica is never removed, and in that case
//! no pack is removed either, because an image may need it. Maps and indexes are read here if they exist here too, so
//! that not all of them are fetched each time.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use crate::client::Cancelled;
use crate::cover::cover;
use crate::error::{Error, Result};
use crate::layout::{self, Inventory, Of, PackFile, RemotePack};
use crate::read::Indexes;
use crate::replica::{RemoteImage, Replica};
use rekindle_store::chunk::{ChunkId, ChunkMap};
use rekindle_store::pack::{PackIndex, PackName};
use rekindle_store::{DamageKind, ImageId, JobFolder, State};

/// Age, by the clock of the replica, below which a pack without an image may belong to one that is being sent, and below
/// which a listing may not show an object.
const GRACE: Duration = Duration::from_secs(3600);
/// The content of a mark. Its time is that of the object.
const MARK: &[u8] = b"{}";

/// Which good images stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// This many of the newest.
    Newest(u32),
    /// This many of the newest parts of group images, counted from the group image that is whole in the replica, and all
    /// newer ones.
    Parts {
        /// How many.
        last: u32,
        /// The number of the newest group image that is whole.
        whole: u64,
    },
}

/// The result: what was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// Images, oldest first.
    pub images: Vec<ImageId>,
    /// Packs.
    pub packs: usize,
    /// Bytes of the packs.
    pub bytes: u64,
    /// The image with the highest number that was there.
    pub highest: Option<ImageId>,
    /// Why no packs were removed, if that should be reported.
    pub blocked: Option<String>,
}

impl Replica {
    /// Removes images until only these good ones are left, and the packs that only the others needed. `folder` is only
    /// read.
    ///
    /// # Errors
    /// [`Error::Store`]: it is unknown which images are of the present run, or proven, or were rehearsed or restored. [`Error::Remote`],
    /// [`Error::Cancelled`].
    pub fn retain(&self, keep: Keep, folder: &JobFolder, cancelled: Cancelled<'_>) -> Result<Removed> {
        self.client.check_is_not(folder.path())?;
        let images = self.images(cancelled)?;
        // One that cannot be read may have any name.
        let highest = images.iter().filter(|image| image.manifest().is_some()).map(|image| image.id).max();
        let mut removed = Removed { highest, ..Removed::default() };
        let record = folder.record()?;
        let is_ours = |image: &RemoteImage| match (&record, image.manifest()) {
            (Some(record), Some(manifest)) => record.has(image.id, &manifest.lineage),
            _ => true,
        };
        for id in expendable(&images, keep, [&folder.proven()?, &folder.evidence()?.with_evidence()], &is_ours) {
            for file in [Of::Manifest, Of::Chunks, Of::Mark] {
                self.client.delete(&layout::of_image(id, file), cancelled)?;
            }
            removed.images.push(id);
        }
        // From here on the present listing is used, because another writer may have changed the replica.
        let there = self.inventory(cancelled)?;
        let old = Old::of(&there);
        self.client.sweep(&|modified| old.is_old(modified))?;
        for (id, files) in there.images.iter().filter(|(_, files)| files.manifest.is_none()) {
            let left = [(Of::Chunks, files.chunks), (Of::Mark, files.mark)];
            let mut left = left.into_iter().filter(|(_, found)| found.is_some_and(|it| old.is_old(it.modified)));
            // The listing may not show yet that the image is complete.
            let manifest = layout::of_image(*id, Of::Manifest);
            if let Some(first) = left.next()
                && self.client.head(&manifest, cancelled)?.is_none()
            {
                for (file, _) in std::iter::once(first).chain(left) {
                    self.client.delete(&layout::of_image(*id, file), cancelled)?;
                }
            }
        }
        let is_old = |pack: &RemotePack| pack.modified().is_some_and(|at| old.is_old(at));
        let is_due = |pack: &RemotePack| match pack.gone {
            Some(mark) => old.is_old(mark.modified),
            None => is_old(pack) && !pack.is_whole(),
        };
        if removed.images.is_empty() && !there.packs.values().any(is_due) {
            // Packs become unneeded only when an image is removed or an upload is given up; the latter wait for the
            // next removal.
            return Ok(removed);
        }
        let needed = match self.needed(&there, &removed.images, folder, cancelled)? {
            Ok(needed) => needed,
            Err(why) => return Ok(Removed { blocked: Some(why), ..removed }),
        };
        let keep = match self.kept(&needed, None, &there, folder, cancelled)? {
            Ok(keep) => keep,
            Err(chunk) => {
                let why = format!("chunk {chunk:?} of an image in the replica is in none of its packs");
                return Ok(Removed { blocked: Some(why), ..removed });
            }
        };
        for (name, pack) in &there.packs {
            let mark = layout::of_pack(*name, PackFile::Gone);
            match (keep.contains(name), pack.gone) {
                (true, None) => {}
                (true, Some(_)) => self.client.delete(&mark, cancelled)?,
                (false, None) if is_old(pack) => self.client.put(&mark, MARK.into(), cancelled)?,
                (false, None) => {}
                (false, Some(_)) => {
                    if let Some(bytes) = self.sweep(*name, pack, &old, cancelled)? {
                        removed.packs += 1;
                        removed.bytes += bytes;
                    }
                }
            }
        }
        Ok(removed)
    }

    /// Removes packs that were marked long ago, for an image with this map that has no space. No image is removed, and
    /// what the replica has of this one stays. Returns the number of bytes.
    pub(super) fn sweep_for(&self, map: &ChunkMap, folder: &JobFolder, cancelled: Cancelled<'_>) -> Result<u64> {
        let there = self.inventory(cancelled)?;
        let old = Old::of(&there).or_by_our_clock();
        self.client.sweep(&|modified| old.is_old(modified))?;
        let is_due = |pack: &RemotePack| pack.gone.is_some_and(|mark| old.is_old(mark.modified));
        if !there.packs.values().any(is_due) {
            return Ok(0);
        }
        let Ok(needed) = self.needed(&there, &[], folder, cancelled)? else { return Ok(0) };
        let Ok(keep) = self.kept(&needed, Some(map), &there, folder, cancelled)? else { return Ok(0) };
        let mut freed = 0;
        for (name, pack) in there.packs.iter().filter(|(name, pack)| is_due(pack) && !keep.contains(name)) {
            freed += self.sweep(*name, pack, &old, cancelled)?.unwrap_or(0);
        }
        Ok(freed)
    }

    /// Packs that have all of this, and of an image with this map what is there. An error is a chunk that is in none.
    fn kept(
        &self,
        needed: &HashSet<ChunkId>,
        besides: Option<&ChunkMap>,
        there: &Inventory,
        folder: &JobFolder,
        cancelled: Cancelled<'_>,
    ) -> Result<std::result::Result<BTreeSet<PackName>, ChunkId>> {
        let cover = |indexes| -> Result<_> {
            let whole = self.whole(indexes, there, folder, cancelled)?;
            let has: HashSet<ChunkId> = match besides {
                None => HashSet::new(),
                Some(_) => whole.iter().flat_map(|(_, index)| index.entries()).map(|entry| entry.id).collect(),
            };
            let more = besides.iter().flat_map(|map| map.chunks()).map(|(id, _)| id).filter(|id| has.contains(id));
            Ok(cover(needed.iter().copied().chain(more).collect(), &whole))
        };
        match cover(Indexes::Here)? {
            // The pack is damaged here, but not in the replica.
            Err(_) => cover(Indexes::There),
            keep => Ok(keep),
        }
    }

    /// Removes a pack whose mark is old enough. Returns its size.
    fn sweep(&self, name: PackName, pack: &RemotePack, old: &Old, cancelled: Cancelled<'_>) -> Result<Option<u64>> {
        let mark = layout::of_pack(name, PackFile::Gone);
        // An upload may have removed it since.
        if !self.client.head(&mark, cancelled)?.is_some_and(|found| old.is_old(found.modified)) {
            return Ok(None);
        }
        if pack.modified().is_none() {
            return self.client.delete(&mark, cancelled).map(|()| None);
        }
        // The index first: a pack without an index does not count.
        self.client.delete(&layout::of_pack(name, PackFile::Index), cancelled)?;
        self.client.delete(&layout::of_pack(name, PackFile::Pack), cancelled)?;
        // Renewed, so that an upload to which a listing still shows the pack does not rely on it.
        self.client.put(&mark, MARK.into(), cancelled)?;
        Ok(Some(pack.pack.map_or(0, |found| found.size)))
    }

    /// The chunks that the images need, or why they are unknown. `gone` were removed, whatever the listing says.
    fn needed(
        &self,
        there: &Inventory,
        gone: &[ImageId],
        folder: &JobFolder,
        cancelled: Cancelled<'_>,
    ) -> Result<std::result::Result<HashSet<ChunkId>, String>> {
        let mut needed = HashSet::new();
        for id in there.published().filter(|id| !gone.contains(id)) {
            let Some(image) = self.look(id, cancelled)? else {
                return Ok(Err(format!("image {id} is in the listing of the replica, and is not there")));
            };
            match self.map_of(&image, folder, cancelled) {
                Ok(map) => needed.extend(map.chunks().map(|(id, _)| id)),
                Err(Error::NotWhole { why, .. } | Error::Damaged { why, .. }) => {
                    return Ok(Err(format!("it is not known which content image {id} in the replica needs: {why}")));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Ok(needed))
    }

    /// The complete packs.
    fn whole(
        &self,
        indexes: Indexes,
        there: &Inventory,
        folder: &JobFolder,
        cancelled: Cancelled<'_>,
    ) -> Result<Vec<(PackName, PackIndex)>> {
        let mut whole = Vec::new();
        for (name, pack) in &there.packs {
            let RemotePack { pack: Some(pack), index: Some(_), .. } = pack else { continue };
            match self.index_by(indexes, *name, *pack, &folder.packs(), cancelled) {
                Ok(index) => whole.push((*name, index)),
                // It counts as missing; its content is then found missing, too.
                Err(Error::Damaged { .. } | Error::NotWhole { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(whole)
    }
}

/// Decides what is old, relative to the newest object there: the clocks of the two sides need not agree.
struct Old(Option<DateTime<Utc>>);

impl Old {
    fn of(there: &Inventory) -> Old {
        let grace = TimeDelta::from_std(GRACE).unwrap_or(TimeDelta::MAX);
        Old(there.newest.and_then(|newest| newest.min(Utc::now()).checked_sub_signed(grace)))
    }

    /// Also what is old by our own clock. To a full replica nothing is sent, so its newest object tells no time. The
    /// clocks agree to about a minute (docs/replica.md); twice the time is certain enough.
    fn or_by_our_clock(self) -> Old {
        let grace = TimeDelta::from_std(2 * GRACE).unwrap_or(TimeDelta::MAX);
        Old(self.0.max(Utc::now().checked_sub_signed(grace)))
    }

    fn is_old(&self, modified: DateTime<Utc>) -> bool {
        self.0.is_some_and(|before| modified < before)
    }
}

/// The images to remove, oldest first: good ones beyond this many, where ours count first, and bad ones beyond as many
/// bad ones, because a mark may be wrong. While there is no good one all are kept. The newest of each of these `sets` (the
/// proven ones; those that were rehearsed or restored) is kept, of all and of ours; an unreadable one is neither counted
/// nor removed.
fn expendable(
    images: &[RemoteImage],
    kept: Keep,
    sets: [&BTreeSet<ImageId>; 2],
    is_ours: &dyn Fn(&RemoteImage) -> bool,
) -> Vec<ImageId> {
    let (Keep::Newest(last) | Keep::Parts { last, .. }) = kept;
    let keep = usize::try_from(last.max(1)).unwrap_or(usize::MAX);
    let is_bad = |image: &&RemoteImage| match &image.state {
        State::Good(_) => false,
        State::Bad { .. } => true,
        State::Damaged { why } => why.kind == DamageKind::Broken,
    };
    let good = images.iter().filter(|image| image.is_good());
    if good.clone().next().is_none() {
        return Vec::new();
    }
    // The job does not go back to one of another line.
    let newest = |set: &BTreeSet<ImageId>| {
        let of = good.clone().filter(|image| set.contains(&image.id));
        [of.clone().map(|image| image.id).max(), of.filter(|image| is_ours(image)).map(|image| image.id).max()]
    };
    let firm = sets.map(newest).concat();
    let number = |image: &RemoteImage| Some(image.manifest()?.group.as_ref()?.number);
    // On a machine with a new store, names of images may begin again. They are the newest first otherwise.
    let counted: Vec<&RemoteImage> = match kept {
        Keep::Newest(_) => {
            let (ours, others): (Vec<_>, Vec<_>) = good.partition(|image| is_ours(image));
            [ours, others].concat()
        }
        Keep::Parts { whole, .. } => {
            let mut parts: Vec<_> = good.filter(|image| number(image).is_none_or(|number| number <= whole)).collect();
            parts.sort_by_key(|image| std::cmp::Reverse(number(image)));
            parts
        }
    };
    let mut gone: Vec<ImageId> = counted
        .into_iter()
        .skip(keep)
        .filter(|image| !firm.contains(&Some(image.id)))
        .chain(images.iter().filter(is_bad).skip(keep))
        .map(|it| it.id)
        .collect();
    gone.sort();
    gone
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_store::image::Damage;
    use rekindle_store::manifest::GroupPart;
    use rekindle_store::{BadMark, BadWhy, Manifest};

    #[derive(Clone, Copy)]
    enum Kind {
        Good,
        Bad,
        Broken,
        Newer,
    }
    use Kind::{Bad, Broken, Good, Newer};

    /// Images of these kinds, newest first and numbered down to 1; returns those to be removed.
    fn gone(kinds: &[Kind], keep_last: u32) -> Vec<u32> {
        gone_but_proven(kinds, keep_last, &[])
    }

    fn gone_but_proven(kinds: &[Kind], keep_last: u32, proven: &[u32]) -> Vec<u32> {
        let proven: BTreeSet<_> = proven.iter().map(|n| ImageId::new(*n, DateTime::UNIX_EPOCH)).collect();
        let damaged = |kind| State::Damaged { why: Damage { kind, detail: String::new() } };
        let state = |kind| {
            let manifest = Box::new(serde_json::from_str::<Manifest>(rekindle_testing::MANIFEST).unwrap());
            match kind {
                Good => State::Good(manifest),
                Bad => {
                    let mark = BadMark { why: BadWhy::DiesAgain, detail: String::new(), when: DateTime::UNIX_EPOCH };
                    State::Bad { manifest, mark }
                }
                Broken => damaged(DamageKind::Broken),
                Newer => damaged(DamageKind::Newer),
            }
        };
        let numbers = (1..=u32::try_from(kinds.len()).unwrap()).rev();
        let images = numbers
            .zip(kinds)
            .map(|(n, kind)| RemoteImage { id: ImageId::new(n, DateTime::UNIX_EPOCH), state: state(*kind) });
        let images: Vec<_> = images.collect();
        let gone = |sets| expendable(&images, Keep::Newest(keep_last), sets, &|_| true);
        let none = BTreeSet::new();
        let gone_of_one = gone([&proven, &none]);
        assert_eq!(gone([&none, &proven]), gone_of_one, "rehearsed or restored ones are kept in the same way");
        gone_of_one.iter().map(ImageId::sequence).collect()
    }

    #[test]
    fn the_newest_proven_image_stays() {
        assert_eq!(gone_but_proven(&[Good; 5], 2, &[1, 2]), [1, 3]);
        assert_eq!(gone_but_proven(&[Good; 5], 2, &[2, 4]), [1, 2, 3]);
        assert_eq!(gone_but_proven(&[Good, Good, Good, Bad, Good], 2, &[2]), [1, 3], "a bad one is of no use");
    }

    #[test]
    fn good_ones_and_bad_ones_are_counted_each_by_themselves() {
        assert_eq!(gone(&[Good, Bad, Good, Broken, Good, Bad], 2), [1, 2]);
        assert_eq!(gone(&[Good, Good, Good], 1), [1, 2]);
        assert_eq!(gone(&[Good, Good, Good], 3), [0; 0]);
        assert_eq!(gone(&[Good, Good], 0), [1], "0 is as good as 1: the newest good one stays");
    }

    #[test]
    fn parts_of_group_images_are_counted_from_the_newest_whole_one() {
        let part = |n: u32, number: u64| {
            let mut manifest = Box::new(serde_json::from_str::<Manifest>(rekindle_testing::MANIFEST).unwrap());
            let part = GroupPart { number, epoch: 1, origin: 1, mark: String::new(), size: 3 };
            manifest.group = Some(part);
            RemoteImage { id: ImageId::new(n, DateTime::UNIX_EPOCH), state: State::Good(manifest) }
        };
        let gone = |images: &[RemoteImage], last, whole| -> Vec<u32> {
            let keep = Keep::Parts { last, whole };
            expendable(images, keep, [&BTreeSet::new(), &BTreeSet::new()], &|_| true)
                .iter()
                .map(ImageId::sequence)
                .collect()
        };
        let images = [part(5, 9), part(4, 8), part(3, 7), part(2, 6), part(1, 5)];
        assert_eq!(gone(&images, 1, 7), [1, 2], "the newer ones are not whole yet");
        assert_eq!(gone(&images, 2, 7), [1]);
        assert_eq!(gone(&images, 1, 9), [1, 2, 3, 4]);
        assert_eq!(gone(&images, 1, 4), [0; 0]);
        // The numbers count, not the names.
        assert_eq!(gone(&[part(3, 5), part(2, 7), part(1, 8)], 1, 7), [3]);
    }

    fn id_of(n: u32) -> ImageId {
        ImageId::new(n, DateTime::UNIX_EPOCH)
    }

    #[test]
    fn images_of_the_present_run_count_first_whatever_their_numbers() {
        let image = |n: u32, lineage: &str| {
            let mut manifest = Box::new(serde_json::from_str::<Manifest>(rekindle_testing::MANIFEST).unwrap());
            manifest.lineage = lineage.into();
            RemoteImage { id: ImageId::new(n, DateTime::UNIX_EPOCH), state: State::Good(manifest) }
        };
        let gone = |images: &[RemoteImage], last| -> Vec<u32> {
            let is_ours = |image: &RemoteImage| image.manifest().unwrap().lineage == "new";
            let gone = expendable(images, Keep::Newest(last), [&BTreeSet::new(), &BTreeSet::new()], &is_ours);
            gone.iter().map(ImageId::sequence).collect()
        };
        // The job went back to an image, and none of those taken since is proven.
        let proven = BTreeSet::from([id_of(4), id_of(9)]);
        let rewound = [image(11, "new"), image(10, "new"), image(9, "old"), image(8, "old"), image(4, "new")];
        let is_ours = |image: &RemoteImage| image.manifest().unwrap().lineage == "new";
        assert_eq!(expendable(&rewound, Keep::Newest(2), [&proven, &BTreeSet::new()], &is_ours), [id_of(8)]);
        let old = [image(102, "old"), image(101, "old"), image(100, "old")];
        assert_eq!(gone(&[&old[..], &[image(1, "new")]].concat(), 2), [100, 101]);
        assert_eq!(gone(&[&old[..], &[image(2, "new"), image(1, "new")]].concat(), 2), [100, 101, 102]);
        assert_eq!(gone(&old, 2), [100]);
    }

    #[test]
    fn what_is_not_known_stays_and_without_a_good_one_all_do() {
        assert_eq!(gone(&[Newer, Good, Newer, Good, Newer], 1), [2]);
        assert_eq!(gone(&[Bad, Broken, Bad, Newer], 1), [0; 0]);
    }
}
