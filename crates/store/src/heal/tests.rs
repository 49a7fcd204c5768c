use std::fs;
use std::path::Path;

use super::*;
use crate::Image;
use crate::chunk::CHUNK;
use crate::persist::tests::{Ground, noise, packing};
use crate::persist::{Packing, Progress};
use crate::unpack::Unpacking;
use crate::{Share, check_packs};
use rekindle_base::chain;

type Parts = Vec<(&'static str, Vec<u8>)>;

fn parts(own: u8) -> Parts {
    vec![("criu/shared", noise(100, 8 * CHUNK)), ("criu/own", noise(own, 2 * CHUNK))]
}

fn packed(copies: Copies, key: Option<&Key>) -> Packing {
    Packing { copies, ..packing(Compression::None, key) }
}

/// Three images that share most of their content, in the store and in a replica.
struct Three {
    ground: Ground,
    images: Vec<Image>,
    key: Option<Key>,
    copies: Copies,
    unread: Unread,
    replica: tempfile::TempDir,
}

impl Three {
    fn new(copies: Copies, key: Option<Key>) -> Three {
        let ground = Ground::new();
        let packing = packed(copies, key.as_ref());
        let persist = |n: u8| ground.persist_as(&ground.stage(n.into(), &parts(n)), &packing).unwrap();
        let images: Vec<Image> = (1..=3).map(persist).collect();
        let replica = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(ground.folder.packs().dir()).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, replica.path().join(path.file_name().unwrap())).unwrap();
        }
        Three { ground, images, key, copies, unread: Unread::default(), replica }
    }

    /// Unpacks an image, with healing.
    fn restore(&self, n: u8, replica: Option<&Path>) -> Result<Option<Healed>, crate::unpack::Error> {
        let into = tempfile::tempdir().unwrap();
        let copy = replica.map(Copy);
        let healing = self.healing(copy.as_ref().map(|copy| copy as &dyn ChunkSource));
        let progress = Progress::default();
        let unpacking = Unpacking {
            key: self.key.as_ref(),
            threads: 2,
            progress: &progress,
            cancelled: &|| false,
            healing: Some(&healing),
        };
        let healed = unpacking.unpack(
            &self.images[usize::from(n) - 1],
            &self.ground.folder,
            &crate::tests::beneath(into.path()),
        )?;
        for (path, content) in parts(n) {
            assert!(fs::read(into.path().join(path)).unwrap() == content, "{path}");
        }
        let all = progress.bytes();
        assert_eq!(all.0, all.1);
        Ok(healed)
    }

    fn healing<'a>(&'a self, replica: Option<&'a dyn ChunkSource>) -> Healing<'a> {
        Healing {
            folder: &self.ground.folder,
            lock: &self.ground.lock,
            key: self.key.as_ref(),
            copies: self.copies,
            unread: &self.unread,
            replica,
        }
    }

    fn there(&self) -> Option<&Path> {
        Some(self.replica.path())
    }

    /// All packs are intact, and all images are complete without the replica.
    fn assert_whole(&self) {
        let report =
            check_packs(&self.ground.folder, self.key.as_ref(), Share::ALL, 2, &Progress::default(), &|| false);
        assert!(report.as_ref().unwrap().is_sound(), "{report:?}");
        for (n, image) in (1..).zip(&self.images) {
            self.ground.assert_holds(image, &parts(n), self.key.as_ref());
        }
    }
}

/// A folder with the same packs, as a replica of a store has them.
struct Copy<'a>(&'a Path);

impl ChunkSource for Copy<'_> {
    fn fetch(
        &self,
        wanted: HashSet<ChunkId>,
        _here: &Packs,
        key: Option<&Key>,
        _cancelled: &(dyn Fn() -> bool + Sync),
        put: Put<'_>,
    ) -> Result<(), FetchError> {
        if !self.0.is_dir() {
            return Err(FetchError::Unavailable(format!("cannot read {}", self.0.display())));
        }
        let packs = Packs::new(crate::tests::beneath(self.0));
        let index = packs.index().unwrap();
        let mut stored = Stored::default();
        for id in wanted {
            for at in index.all(&id) {
                let Ok(key) = index.pack(at.pack).unwrap().key_for(key) else { continue };
                if let Ok(header) = stored.read_from_disk(&packs, &id, &at, key) {
                    put(key, &header, stored.body(&header))?;
                    break;
                }
            }
        }
        Ok(())
    }
}

#[test]
fn sixteen_damaged_bytes_in_one_pack_cost_none_of_three_images() {
    for key in [None, Some(Key::new(&[5; 32]))] {
        let three = Three::new(Copies::One, key);
        let (_, places) = three.ground.first(&three.images[0]);
        assert_eq!(places.len(), 1);
        three.ground.harm(&places[0]);
        for n in 1..=3 {
            let error = three.ground.unpack(&three.images[n - 1], three.key.as_ref()).unwrap_err();
            assert!(error.is_damage(), "{error:?}");
        }
        let healed = three.restore(3, three.there()).unwrap().unwrap();
        assert_eq!((healed.damaged, healed.from_replica, healed.lost.len()), (1, 1, 0), "{healed:?}");
        let said = healed.to_string();
        let pack = three.ground.folder.packs().pack_path(places[0].pack);
        assert!(
            said.starts_with(&format!("1 damaged chunk in {} (byte {}: ", pack.display(), places[0].offset)),
            "{said}"
        );
        assert!(said.ends_with(": 1 taken from the replica and stored again"), "{said}");
        three.assert_whole();
        assert_eq!(three.restore(2, None).unwrap(), None, "nothing is left to be healed");
    }
}

#[test]
fn the_second_copy_serves_and_is_two_again_afterwards() {
    let three = Three::new(Copies::Two, None);
    for which in [0, 1] {
        let (_, places) = three.ground.first(&three.images[0]);
        assert_eq!(places.len(), 2);
        three.ground.harm(&places[which]);
        let mut healed = None;
        // A reader that finds the intact copy first does not notice.
        for n in 1..=3 {
            let this_time = three.restore(n, None).unwrap();
            healed = healed.or(this_time);
        }
        if let Some(healed) = healed {
            assert_eq!((healed.damaged, healed.from_copies, healed.from_replica), (1, 1, 0), "{healed:?}");
            assert!(healed.to_string().ends_with("1 taken from another pack"), "{healed}");
        } else {
            let ids = BTreeSet::from([three.ground.first(&three.images[0]).0]);
            let healed = three.healing(None).heal(&ids, &|| false).unwrap();
            assert_eq!((healed.damaged, healed.from_copies), (1, 1), "{healed:?}");
        }
        assert_eq!(three.ground.first(&three.images[0]).1.len(), 2);
        three.assert_whole();
    }
}

#[test]
fn what_is_whole_nowhere_is_stored_again_by_the_next_image() {
    let three = Three::new(Copies::One, None);
    let (id, places) = three.ground.first(&three.images[0]);
    three.ground.harm(&places[0]);
    // An unavailable replica is reported, and has no other effect.
    let error = three.restore(3, Some(Path::new("/nowhere"))).unwrap_err();
    assert!(error.may_pass() && !error.is_damage(), "{error:?}");
    let said = chain(&error);
    assert!(said.contains("/nowhere") && said.contains("the checksum does not match"), "{said}");
    assert!(three.ground.first(&three.images[0]).1.is_empty(), "no image relies on it any more");
    assert_eq!(missing(&three.ground.folder).unwrap(), BTreeSet::from([id]));
    // Later it is available: although the record was removed from the index here, it is found there.
    let healed = three.restore(2, three.there()).unwrap().unwrap();
    assert_eq!((healed.missing, healed.from_replica), (1, 1), "{healed:?}");
    three.assert_whole();

    let (_, places) = three.ground.first(&three.images[0]);
    three.ground.harm(&places[0]);
    three.restore(3, None).unwrap_err();
    let next = three.ground.persist(&three.ground.stage(4, &parts(4))).unwrap();
    three.ground.assert_holds(&next, &parts(4), None);
    three.assert_whole();
}

#[test]
fn a_pack_that_is_gone_or_of_which_nothing_can_be_used_comes_back_too() {
    for harm in [
        |path: &Path| fs::remove_file(path).unwrap(),
        |path: &Path| fs::write(path, b"REKINDLE PACK").unwrap(),
        |path: &Path| fs::write(path, vec![0; 1 << 20]).unwrap(),
    ] {
        let three = Three::new(Copies::One, None);
        let (_, places) = three.ground.first(&three.images[0]);
        harm(three.ground.folder.packs().pack_path(places[0].pack).path());
        let healed = three.restore(3, three.there()).unwrap().unwrap();
        assert_eq!((healed.missing, healed.from_replica), (8, 8), "{healed:?}");
        three.restore(1, three.there()).unwrap().unwrap();
        for (n, image) in (1..).zip(&three.images) {
            three.ground.assert_holds(image, &parts(n), None);
        }
    }
}

#[test]
fn what_is_not_for_us_is_left_alone_and_what_is_forged_is_not_used() {
    let key = Key::new(&[5; 32]);
    let mut three = Three::new(Copies::One, Some(key.clone()));
    let (id, places) = three.ground.first(&three.images[0]);
    three.ground.harm(&places[0]);
    three.key = Some(Key::new(&[6; 32]));
    let error = three.restore(3, three.there()).unwrap_err();
    assert!(error.is_not_for_us() && !error.is_damage(), "{error:?}");
    let healed = three.healing(None).heal(&BTreeSet::from([id]), &|| false).unwrap();
    assert_eq!(healed.found(), 0, "{healed:?}");
    assert_eq!(three.ground.first(&three.images[0]).1, places);

    // The replica returns other bytes.
    three.key = Some(key);
    let forged = three.replica.path().join(format!("{}.pack", places[0].pack));
    fs::copy(three.ground.folder.packs().pack_path(places[0].pack), forged).unwrap();
    let error = three.restore(3, three.there()).unwrap_err();
    assert!(error.is_damage(), "{error:?}");
    assert!(three.ground.first(&three.images[0]).1.is_empty());
}

#[test]
fn what_the_disk_does_not_give_is_stored_again_and_struck_only_then() {
    let three = Three::new(Copies::One, None);
    let (id, places) = three.ground.first(&three.images[0]);
    three.unread.note((places[0].pack, id));
    let packing = Packing { unread: three.unread.clone(), ..packed(Copies::One, None) };
    assert_eq!(three.ground.first(&three.images[0]).1, places, "it may be whole");
    let next = three.ground.persist_as(&three.ground.stage(4, &parts(3)), &packing).unwrap();
    let now = three.ground.first(&three.images[0]).1;
    assert!(now.len() == 1 && now[0].pack != places[0].pack, "{now:?}");
    assert_eq!(next.manifest().unwrap().chunks.as_ref().unwrap().stored, CHUNK as u64 + 64);
    three.assert_whole();
    let packs = three.ground.packs(".pack").len();
    three.ground.persist_as(&three.ground.stage(5, &parts(3)), &packing).unwrap();
    assert_eq!(three.ground.packs(".pack").len(), packs, "once");
}

#[test]
fn a_record_that_was_struck_does_not_take_the_place_of_the_whole_one_when_its_index_is_lost() {
    let key = Key::new(&[5; 32]);
    for (which, of_store) in (0..2).flat_map(|which| [(which, None), (which, Some(&key))]) {
        let three = Three::new(Copies::Two, of_store.cloned());
        let (_, places) = three.ground.first(&three.images[0]);
        three.ground.harm(&places[which]);
        let ids = BTreeSet::from([three.ground.first(&three.images[0]).0]);
        three.healing(None).heal(&ids, &|| false).unwrap();
        let (lost, packs) = (three.ground.folder.packs().index_path(places[which].pack), three.ground.packs(".pack"));
        fs::remove_file(&lost).unwrap();
        // The round that finds no index does not have the key.
        for (seconds, key) in [(0, None), (700, of_store), (1400, of_store), (2100, of_store)] {
            let bounds = crate::gc::Bounds {
                sweep_after: std::time::Duration::from_secs(600),
                repack: Some(u64::MAX),
                key,
                copies: Copies::One,
                min_free: 0,
            };
            let now = chrono::DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
            crate::gc::collect(&three.ground.folder, &three.ground.lock, &bounds, now, &|| false).unwrap();
            if key.is_none() && of_store.is_some() {
                assert!(!lost.is_there(), "an index must not name what nobody has checked");
                assert_eq!(three.ground.packs(".pack").len(), packs.len(), "nothing goes before it was checked");
            }
        }
        three.assert_whole();
    }
}
