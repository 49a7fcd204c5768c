//! Two copies of chunks that several images use.

use super::*;
use crate::chunk::{ChunkId, Extent};
use crate::gc::{self, collect, usage};
use crate::options::Copies;
use crate::pack::{Location, PackName};
use crate::retention::survey::Survey;
use chrono::{DateTime, Utc};
use proptest::prelude::*;

fn two() -> Packing {
    Packing { copies: Copies::Two, ..plain() }
}

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

type Parts = Vec<(&'static str, Vec<u8>)>;

/// Parts that all images share, and a part of this one only.
fn shared_and(own: u8) -> Parts {
    vec![("criu/shared", noise(100, 8 * CHUNK)), ("criu/own", noise(own, 2 * CHUNK))]
}

impl Ground {
    fn add_as(&self, number: u32, parts: &Parts, packing: &Packing) -> Image {
        self.persist_as(&self.stage(number, parts), packing).unwrap()
    }

    /// In how many packs each chunk of the image is.
    pub(crate) fn places(&self, image: &Image) -> Vec<usize> {
        let index = self.folder.packs().index().unwrap();
        assert!(index.problems().is_empty(), "{:?}", index.problems());
        let map = image.chunk_map().unwrap().unwrap();
        let count = |id: &ChunkId| {
            let packs: std::collections::BTreeSet<PackName> =
                index.all(id).filter(|at| !index.is_gone(at.pack)).map(|at| at.pack).collect();
            packs.len()
        };
        map.parts
            .iter()
            .flatten()
            .filter_map(|extent| if let Extent::Chunk { id, .. } = extent { Some(count(id)) } else { None })
            .collect()
    }

    fn gc(&self, seconds: i64, copies: Copies) -> gc::Collected {
        let bounds = gc::Bounds {
            sweep_after: Duration::from_secs(600),
            repack: Some(u64::MAX),
            key: None,
            copies,
            min_free: 0,
        };
        collect(&self.folder, &self.lock, &bounds, at(seconds), &|| false).unwrap()
    }

    fn bytes_of_packs(&self) -> u64 {
        self.packs(".pack").iter().map(|name| size_of_pack(self, name)).sum()
    }

    /// Damages 16 bytes of one copy of a chunk.
    pub(crate) fn harm(&self, at: &Location) {
        let path = self.folder.packs().pack_path(at.pack);
        let file = fs::File::options().read(true).write(true).open(path).unwrap();
        file.write_all_at(b"sixteen bad ones", at.offset + 64 + 1000).unwrap();
    }

    /// The places of the first chunk of the image, in packs that are not marked.
    pub(crate) fn first(&self, image: &Image) -> (ChunkId, Vec<Location>) {
        let index = self.folder.packs().index().unwrap();
        let id = image.chunk_map().unwrap().unwrap().chunks().next().unwrap().0;
        (id, index.all(&id).filter(|at| !index.is_gone(at.pack)).collect())
    }
}

#[test]
fn what_three_images_share_outlives_damage_to_one_pack() {
    let ground = Ground::new();
    let images: Vec<Image> = (1..=3).map(|n| ground.add_as(n, &shared_and(u8::try_from(n).unwrap()), &two())).collect();
    let (_, places) = ground.first(&images[0]);
    assert_eq!(places.len(), 2);
    for place in places {
        let path = ground.folder.packs().pack_path(place.pack);
        let whole = fs::read(&path).unwrap();
        ground.harm(&place);
        for (n, image) in (1..).zip(&images) {
            ground.assert_holds(image, &shared_and(n), None);
        }
        fs::write(path, whole).unwrap();
    }
}

#[test]
fn a_second_copy_is_written_with_the_second_image_and_no_third() {
    let ground = Ground::new();
    let first = ground.add_as(1, &shared_and(1), &two());
    assert_eq!(ground.places(&first), [1; 10]);
    let before = ground.bytes_of_packs();
    let second = ground.add_as(2, &shared_and(2), &two());
    assert_eq!(ground.places(&second), [2, 2, 2, 2, 2, 2, 2, 2, 1, 1]);
    let record = CHUNK as u64 + 64;
    assert_eq!(ground.bytes_of_packs() - before, 10 * record + 2 * 64, "in a pack of its own");
    let stored = second.manifest().unwrap().chunks.clone().unwrap().stored;
    assert_eq!(stored, 10 * record, "what the image took is told");
    let packs = ground.packs(".pack").len();
    let third = ground.add_as(3, &shared_and(2), &two());
    assert_eq!(ground.places(&third), [2; 10]);
    assert_eq!(ground.packs(".pack").len(), packs + 1);
    let fourth = ground.add_as(4, &shared_and(2), &two());
    assert_eq!((ground.places(&fourth), ground.packs(".pack").len()), (vec![2; 10], packs + 1), "nothing is new");
}

#[test]
fn what_is_twice_in_one_image_is_not_shared_and_a_copy_that_no_image_came_to_is_not_either() {
    let ground = Ground::new();
    let twice = vec![("a", noise(1, 4 * CHUNK)), ("b", noise(1, 4 * CHUNK))];
    let image = ground.add_as(1, &twice, &two());
    assert_eq!(ground.places(&image), [1; 8]);
    // As an interrupted packing leaves it: packs, and no image.
    ground.folder.remove(&ground.lock, &image.id).unwrap();
    let image = ground.add_as(2, &twice, &two());
    assert_eq!(ground.places(&image), [1; 8]);
}

#[test]
fn both_copies_go_when_no_image_needs_them_and_stay_until_then() {
    let ground = Ground::new();
    let first = ground.add_as(1, &shared_and(1), &two());
    let second = ground.add_as(2, &shared_and(2), &two());
    assert_eq!(ground.gc(0, Copies::Two), gc::Collected::default());
    let survey = Survey::of(&ground.folder, 0).unwrap();
    assert!(survey.sizes().total() >= ground.bytes_of_packs() - 64 * 3, "second copies are counted");
    ground.folder.remove(&ground.lock, &first.id).unwrap();
    ground.gc(1, Copies::Two);
    ground.gc(700, Copies::Two);
    assert_eq!(ground.places(&second)[..8], [2; 8], "one image is enough to keep both");
    ground.assert_holds(&second, &shared_and(2), None);
    ground.folder.remove(&ground.lock, &second.id).unwrap();
    ground.gc(701, Copies::Two);
    ground.gc(1400, Copies::Two);
    assert!(ground.packs("").is_empty(), "{:?}", ground.packs(""));
}

#[test]
fn a_store_goes_from_one_copy_to_two_and_back() {
    let ground = Ground::new();
    ground.add_as(1, &shared_and(1), &plain());
    let second = ground.add_as(2, &shared_and(2), &plain());
    assert_eq!(ground.places(&second), [1; 10]);
    let one = ground.bytes_of_packs();
    let third = ground.add_as(3, &shared_and(2), &two());
    assert_eq!(ground.places(&third), [2; 10]);
    for seconds in [0, 600, 1200] {
        ground.gc(seconds, Copies::One);
    }
    // Which pack keeps a chunk is random, as their names are: two of the chunks can remain in a pack with eight needed
    // ones, which is not worth copying.
    let (bytes, places) = (ground.bytes_of_packs(), ground.places(&third));
    assert_eq!(places[..8], [1; 8]);
    assert!(bytes <= one + 2 * (CHUNK as u64 + 64) + 64, "{bytes} {one} {places:?}");
    ground.assert_holds(&second, &shared_and(2), None);
    assert_eq!(ground.gc(1201, Copies::One), gc::Collected::default());
    let (bytes, needed) = usage(&ground.folder, Copies::One).unwrap();
    assert!(bytes - needed <= 2 * (CHUNK as u64 + 64) + 64 * 3, "{bytes} {needed}");
}

#[test]
fn a_damaged_copy_is_not_what_a_repack_copies() {
    let ground = Ground::new();
    let old = ground.add_as(1, &vec![("a", noise(1, 8 * CHUNK))], &two());
    let kept = ground.add_as(2, &vec![("a", noise(1, CHUNK))], &two());
    let (_, places) = ground.first(&kept);
    let first = places.iter().find(|at| ground.packs_of(&old) == [at.pack]);
    let first = *first.unwrap_or(&places[0]);
    ground.harm(&first);
    ground.folder.remove(&ground.lock, &old.id).unwrap();
    ground.gc(0, Copies::Two);
    ground.gc(600, Copies::Two);
    ground.assert_holds(&kept, &[("a", noise(1, CHUNK))], None);
    assert_eq!(ground.places(&kept), [2]);
}

impl Ground {
    /// The packs with chunks that only this image has.
    fn packs_of(&self, image: &Image) -> Vec<PackName> {
        let index = self.folder.packs().index().unwrap();
        let map = image.chunk_map().unwrap().unwrap();
        let mut only: Vec<PackName> = map
            .chunks()
            .filter_map(|(id, _)| (index.all(&id).count() == 1).then(|| index.get(&id)).flatten())
            .map(|at| at.pack)
            .collect();
        only.sort();
        only.dedup();
        only
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Add an image with these chunks.
    Add(Vec<u8>),
    /// Remove an image: the oldest but this many.
    Remove(usize),
    /// A round of garbage collection, this much later.
    Collect(i64),
}

fn steps() -> impl Strategy<Value = Vec<(Step, bool)>> {
    let step = prop_oneof![
        3 => prop::collection::vec(0_u8..12, 1..8).prop_map(Step::Add),
        2 => (0_usize..4).prop_map(Step::Remove),
        3 => prop::sample::select(vec![0_i64, 300, 700]).prop_map(Step::Collect),
    ];
    prop::collection::vec((step, any::<bool>()), 1..14)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever is packed, removed, swept and copied, with one copy or two in turn: every image is complete; with two
    /// copies no round removes one of a chunk that an image needs; without images nothing remains.
    #[test]
    fn copies_are_kept_as_long_as_they_are_needed(steps in steps(), constant in any::<bool>()) {
        let ground = Ground::new();
        let mut images: Vec<(Image, Parts)> = Vec::new();
        let (mut number, mut now) = (0, 0);
        for (step, two_now) in steps {
            let copies = if constant || two_now { Copies::Two } else { Copies::One };
            match step {
                Step::Add(seeds) => {
                    number += 1;
                    let content: Vec<u8> = seeds.iter().flat_map(|seed| noise(*seed, CHUNK)).collect();
                    let parts: Parts = vec![("a", content)];
                    let packing = Packing { copies, ..plain() };
                    let image = ground.add_as(number, &parts, &packing);
                    if copies == Copies::Two {
                        let others: std::collections::HashSet<ChunkId> =
                            images.iter().flat_map(|(other, _)| ids(other)).collect();
                        for (id, places) in ids(&image).into_iter().zip(ground.places(&image)) {
                            prop_assert!(places >= 2 || !others.contains(&id));
                        }
                    }
                    images.push((image, parts));
                }
                Step::Remove(at) if at < images.len() => {
                    let (image, _) = images.remove(at);
                    ground.folder.remove(&ground.lock, &image.id).unwrap();
                }
                Step::Remove(_) => {}
                Step::Collect(later) => {
                    now += later;
                    let before: Vec<Vec<usize>> = images.iter().map(|(image, _)| ground.places(image)).collect();
                    ground.gc(now, copies);
                    for ((image, _), before) in images.iter().zip(before) {
                        for (places, before) in ground.places(image).into_iter().zip(before) {
                            prop_assert!(places >= before.min(copies.count()), "{places} of {before}");
                        }
                    }
                }
            }
            for (image, parts) in &images {
                ground.assert_holds(image, parts, None);
            }
        }
        for (image, _) in images {
            ground.folder.remove(&ground.lock, &image.id).unwrap();
        }
        ground.gc(now + 1, Copies::Two);
        ground.gc(now + 700, Copies::Two);
        prop_assert!(ground.packs("").is_empty(), "{:?}", ground.packs(""));
    }
}

fn ids(image: &Image) -> Vec<ChunkId> {
    image.chunk_map().unwrap().unwrap().chunks().map(|(id, _)| id).collect()
}
