//! Marking, removing and copying packs, on real files.

use std::fs;

use super::*;
use crate::chunk::{CHUNK, Compression};
use crate::persist::tests::{Ground, noise, packing};
use crate::{Image, State};

mod killed;

type Parts = [(&'static str, Vec<u8>)];

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

const GRACE: Duration = Duration::from_secs(600);

fn bounds(repack: Option<u64>) -> Bounds<'static> {
    Bounds { sweep_after: GRACE, repack, key: None, copies: Copies::One, min_free: 0 }
}

impl Ground {
    fn collect(&self, seconds: i64) -> Result<Collected, Error> {
        collect(&self.folder, &self.lock, &bounds(None), at(seconds), &|| false)
    }

    fn repack(&self, seconds: i64) -> Result<Collected, Error> {
        collect(&self.folder, &self.lock, &bounds(Some(u64::MAX)), at(seconds), &|| false)
    }

    fn add(&self, number: u32, parts: &Parts) -> Image {
        self.persist(&self.stage(number, parts)).unwrap()
    }

    fn drop_image(&self, image: &Image) {
        self.folder.remove(&self.lock, &image.id).unwrap();
    }
}

fn four(seed: u8) -> Vec<(&'static str, Vec<u8>)> {
    vec![("criu/a", noise(seed, 4 * CHUNK))]
}

#[test]
fn what_no_image_needs_is_marked_and_swept_when_the_grace_period_is_over() {
    let ground = Ground::new();
    let (old, kept) = (ground.add(1, &four(1)), ground.add(2, &four(2)));
    assert_eq!(ground.collect(0).unwrap(), Collected::default(), "everything is needed");
    ground.drop_image(&old);
    let done = ground.collect(0).unwrap();
    assert_eq!((done.marked.len(), done.swept.len()), (1, 0));
    assert_eq!(ground.collect(599).unwrap(), Collected::default());
    let done = ground.collect(600).unwrap();
    assert_eq!((done.swept.len(), done.freed > 4 * CHUNK as u64), (1, true), "{done:?}");
    assert_eq!((ground.packs(".pack").len(), ground.packs(".idx").len(), ground.packs(".gone").len()), (1, 1, 0));
    ground.assert_holds(&kept, &four(2), None);
    let (bytes, needed) = usage(&ground.folder, Copies::One).unwrap();
    assert_eq!(bytes - needed, 64, "all but the header of the pack");
}

#[test]
fn what_is_needed_again_is_not_swept() {
    let ground = Ground::new();
    let old = ground.add(1, &four(1));
    ground.drop_image(&old);
    assert_eq!(ground.collect(0).unwrap().marked.len(), 1);
    let again = ground.add(2, &four(1));
    assert!(ground.packs(".gone").is_empty(), "it was taken back when the content was found");
    assert_eq!(ground.packs(".pack").len(), 1, "and nothing was stored twice");
    assert_eq!(ground.collect(1000).unwrap(), Collected::default());
    // A pack that an image needs, but that is marked, for whatever reason.
    let name: PackName = ground.packs(".pack")[0].strip_suffix(".pack").unwrap().parse().unwrap();
    mark::set(&ground.folder.packs(), name, at(0)).unwrap();
    assert_eq!(ground.collect(5000).unwrap().revived, [name]);
    ground.assert_holds(&again, &four(1), None);
}

#[test]
fn a_clock_that_was_set_back_begins_the_grace_period_again() {
    let ground = Ground::new();
    ground.drop_image(&ground.add(1, &four(1)));
    ground.collect(0).unwrap();
    assert!(ground.collect(-100_000).unwrap().swept.is_empty());
    assert!(ground.collect(-100_000 + 599).unwrap().swept.is_empty());
    assert_eq!(ground.collect(-100_000 + 600).unwrap().swept.len(), 1);

    // A mark that cannot be read has no time.
    ground.drop_image(&ground.add(2, &four(2)));
    ground.collect(0).unwrap();
    let mark = ground.folder.packs().dir().join(&ground.packs(".gone")[0]);
    fs::write(mark, "{").unwrap();
    assert!(ground.collect(10_000).unwrap().swept.is_empty());
    assert_eq!(ground.collect(10_600).unwrap().swept.len(), 1);
}

#[test]
fn nothing_goes_while_something_can_not_be_read() {
    let ground = Ground::new();
    let (old, other) = (ground.add(1, &four(1)), ground.add(2, &four(2)));
    ground.drop_image(&old);
    // A manifest of a newer rekindle: what the image needs is unknown.
    let manifest = other.dir.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replacen("\"version\": 2", "\"version\": 9", 1)).unwrap();
    assert!(matches!(ground.folder.images().unwrap()[0].state, State::Damaged { .. }));
    let error = ground.collect(0).unwrap_err();
    assert!(matches!(error, Error::Image { image, .. } if image == other.id), "{error}");
    fs::write(&manifest, text).unwrap();

    // A pack that is damaged in the middle, with a lost index, may have content that an image needs.
    let packs = ground.folder.packs();
    let place = packs.index().unwrap().get(&chunk_of(&other)).unwrap();
    let (pack, index) = (packs.pack_path(place.pack), packs.index_path(place.pack));
    let (bytes, indexed) = (fs::read(&pack).unwrap(), fs::read(&index).unwrap());
    fs::remove_file(&index).unwrap();
    let mut damaged = bytes.clone();
    damaged[64 + 64 + CHUNK + 3] ^= 1;
    fs::write(&pack, damaged).unwrap();
    let error = ground.collect(0).unwrap_err();
    assert!(matches!(error, Error::Pack { pack, .. } if pack == place.pack), "{error}");
    assert!(ground.packs(".gone").is_empty());

    // With intact records the index is rebuilt, and the round continues.
    fs::write(&pack, bytes).unwrap();
    let done = ground.collect(0).unwrap();
    assert_eq!((done.reindexed, done.marked.len()), (vec![place.pack], 1));
    assert_eq!(fs::read(&index).unwrap(), indexed);
}

fn chunk_of(image: &Image) -> crate::chunk::ChunkId {
    image.chunk_map().unwrap().unwrap().chunks().next().unwrap().0
}

#[test]
fn a_damaged_image_keeps_what_its_map_still_names() {
    let ground = Ground::new();
    let image = ground.add(1, &four(1));
    fs::write(image.dir.join("manifest.json"), "{").unwrap();
    assert_eq!(ground.collect(0).unwrap(), Collected::default());
    fs::write(image.dir.join("chunks"), "x").unwrap();
    assert_eq!(ground.collect(0).unwrap().marked.len(), 1, "nobody can put it together any more");
}

#[test]
fn what_is_needed_of_a_pack_that_is_mostly_not_is_copied() {
    let ground = Ground::new();
    let (first, second) = (noise(1, 8 * CHUNK), noise(1, CHUNK));
    let old = ground.add(1, &[("criu/a", first)]);
    let kept = ground.add(2, &[("criu/a", second.clone())]);
    assert_eq!(ground.packs(".pack").len(), 1);
    ground.drop_image(&old);
    let before = ground.packs(".pack");
    let done = ground.repack(0).unwrap();
    assert_eq!((done.repacked.len(), done.copied), (1, (CHUNK + 64) as u64), "{done:?}");
    assert_eq!(ground.packs(".pack").len(), 2);
    assert_eq!(ground.repack(1).unwrap(), Collected::default(), "of two places the one counts that stays");
    assert_eq!(ground.repack(600).unwrap().swept.len(), 1);
    assert_ne!(ground.packs(".pack"), before);
    ground.assert_holds(&kept, &[("criu/a", second)], None);
}

#[test]
fn what_is_encrypted_stays_so_and_is_copied_with_its_key_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    fs::write(&path, [7; 32]).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let key = Key::read(&path).unwrap();
    let ground = Ground::new();
    let with = packing(Compression::None, Some(&key));
    let old = ground.persist_as(&ground.stage(1, &[("criu/a", noise(1, 8 * CHUNK))]), &with).unwrap();
    let kept = ground.persist_as(&ground.stage(2, &[("criu/a", noise(1, CHUNK))]), &with).unwrap();
    ground.drop_image(&old);
    assert_eq!(ground.repack(0).unwrap(), Collected::default(), "without the key it cannot be checked");
    let bounds = Bounds { sweep_after: Duration::ZERO, key: Some(&key), ..bounds(Some(u64::MAX)) };
    let done = collect(&ground.folder, &ground.lock, &bounds, at(0), &|| false).unwrap();
    assert_eq!(done.repacked.len(), 1);
    let done = collect(&ground.folder, &ground.lock, &bounds, at(1), &|| false).unwrap();
    assert_eq!(done.swept.len(), 1);
    ground.assert_holds(&kept, &[("criu/a", noise(1, CHUNK))], Some(&key));
    assert!(ground.unpack(&kept, None).is_err());
}

#[test]
fn a_damaged_record_is_not_copied_and_its_pack_stays() {
    let ground = Ground::new();
    let old = ground.add(1, &[("criu/a", noise(1, 8 * CHUNK))]);
    let kept = ground.add(2, &[("criu/a", noise(1, CHUNK))]);
    ground.drop_image(&old);
    let place = ground.folder.packs().index().unwrap().get(&chunk_of(&kept)).unwrap();
    let path = ground.folder.packs().pack_path(place.pack);
    let mut bytes = fs::read(&path).unwrap();
    bytes[usize::try_from(place.offset).unwrap() + 100] ^= 1;
    fs::write(&path, bytes).unwrap();
    let error = ground.repack(0).unwrap_err();
    assert!(matches!(error, Error::Copy { .. }), "{error}");
    assert_eq!((ground.packs(".pack").len(), ground.packs(".gone").len()), (1, 0));
}

#[test]
fn a_damaged_record_keeps_no_other_pack_from_being_copied() {
    let ground = Ground::new();
    let mut kept = Vec::new();
    for (number, seed) in [(1, 1), (3, 2)] {
        let old = ground.add(number, &[("criu/a", noise(seed, 8 * CHUNK))]);
        kept.push(ground.add(number + 1, &[("criu/a", noise(seed, 2 * CHUNK))]));
        ground.drop_image(&old);
    }
    let packs = ground.folder.packs();
    let (last, _) = kept[0].chunk_map().unwrap().unwrap().chunks().last().unwrap();
    let damaged = packs.index().unwrap().get(&last).unwrap();
    let mut bytes = fs::read(packs.pack_path(damaged.pack)).unwrap();
    bytes[usize::try_from(damaged.offset).unwrap() + 100] ^= 1;
    fs::write(packs.pack_path(damaged.pack), bytes).unwrap();
    let whole = packs.index().unwrap().get(&chunk_of(&kept[1])).unwrap().pack;
    for round in 0..2 {
        let error = ground.repack(round).unwrap_err();
        assert!(matches!(error, Error::Copy { pack, .. } if pack == damaged.pack), "{error}");
        assert_eq!(ground.packs(".gone"), [format!("{whole}.gone")]);
        assert_eq!(ground.packs(".pack").len(), 3, "nothing of the damaged one is copied, in no round");
    }
    let index = packs.index().unwrap();
    let new = index.packs().iter().find(|pack| pack.name != damaged.pack && pack.name != whole).unwrap();
    assert_eq!(new.pack_len, 64 + 2 * (64 + CHUNK as u64));
    ground.assert_holds(&kept[1], &[("criu/a", noise(2, 2 * CHUNK))], None);
}

#[test]
fn a_full_disk_has_no_room_for_marks_and_is_swept_all_the_same() {
    let Some(disk) = crate::persist::tests::full::SmallDisk::mount(16 << 20) else { return };
    let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
    let [mut marked, mut due, kept] = [1, 2, 3].map(|n| ground.add(n.into(), &four(n)));
    let pack_of = |image: &Image| ground.folder.packs().index().unwrap().get(&chunk_of(image)).unwrap().pack;
    // The packs are looked at in this order.
    if pack_of(&due) < pack_of(&marked) {
        std::mem::swap(&mut due, &mut marked);
    }
    ground.drop_image(&due);
    assert_eq!(ground.collect(0).unwrap().marked.len(), 1);
    ground.drop_image(&marked);
    let rest = fs::File::create(disk.0.path().join("rest")).unwrap();
    let fill = || {
        let mut size = 1 << 20;
        while size >= 4096 {
            let len = rest.metadata().unwrap().len();
            let filled = nix::fcntl::fallocate(&rest, nix::fcntl::FallocateFlags::empty(), len.cast_signed(), size);
            size = if filled.is_ok() { size } else { size / 2 };
        }
    };
    fill();
    // The mark of the one that was removed last has no room. What is due goes.
    assert!(ground.collect(600).unwrap_err().is_full());
    assert_eq!((ground.packs(".pack").len(), ground.packs(".gone").len()), (2, 0));
    fill();
    assert!(sweep_now(&ground.folder, &ground.lock, Copies::One).unwrap() > 4 * CHUNK as u64);
    assert_eq!(ground.packs(".pack").len(), 1);
    drop(fs::remove_file(disk.0.path().join("rest")));
    drop(rest);
    assert!(kept.verify_content(None, 1, &Default::default(), &|| false).unwrap().is_sound());
}

#[test]
fn nothing_is_copied_into_more_than_half_of_the_space_that_must_stay_free() {
    let ground = Ground::new();
    let old = ground.add(1, &[("a", noise(1, CHUNK)), ("b", noise(2, 4 * CHUNK))]);
    let kept = ground.add(2, &[("a", noise(1, CHUNK))]);
    ground.drop_image(&old);
    let free = folders::free_space(&crate::tests::beneath(ground.folder.path())).unwrap();
    let repack = |min_free| {
        let bounds = Bounds { min_free, ..bounds(Some(u64::MAX)) };
        collect(&ground.folder, &ground.lock, &bounds, at(0), &|| false).unwrap().copied
    };
    assert_eq!(repack(2 * free), 0);
    assert!(repack(0) > CHUNK as u64);
    ground.assert_holds(&kept, &[("a", noise(1, CHUNK))], None);
}
