//! Space, with images whose content is in packs.

use super::*;
use crate::chunk::CHUNK;
use crate::persist::tests::full::SmallDisk;
use crate::persist::tests::{Ground, noise, packing};
use crate::persist::{self, Progress, persist};
use crate::{JobFolder, chunk::Compression};
use std::fs;

const CHUNKS: u64 = CHUNK as u64;

impl Ground {
    /// Packs an image and ends before it is published: its packs stay, as after a crash.
    fn interrupt(&self, number: u8, chunks: usize) -> Image {
        let staged = self.stage(number.into(), &[("a", noise(number, chunks * CHUNK))]);
        self.interrupt_with(&staged);
        staged
    }

    fn interrupt_with(&self, staged: &Image) {
        let progress = Progress::default();
        let is_packed = || progress.bytes().0 == staged.manifest().unwrap().bytes;
        let packing = packing(Compression::None, None);
        let ended = persist(staged, &self.folder, &self.lock, &packing, &progress, &is_packed);
        assert!(matches!(ended, Err(persist::Error::Cancelled)), "{ended:?}");
    }

    fn ids(&self) -> Vec<u32> {
        self.folder.images().unwrap().iter().map(|image| image.id.sequence()).collect()
    }

    /// The numbers of the images that are removed to store an image of these bytes, if so much must stay free.
    fn room(&self, whole: u64, min_free: u64) -> Result<Vec<u32>, NoRoom> {
        let policy = Policy { keep_last: 9, ..Policy::default() };
        let limits = Limits { policy, min_free, copies: Copies::One };
        let made = make_room(&self.folder, &self.lock, &limits, whole, Written::Packed)?;
        Ok(made.iter().map(|removal| removal.id.sequence()).collect())
    }
}

fn free(folder: &JobFolder) -> u64 {
    free_space(&crate::tests::beneath(folder.path())).unwrap()
}

#[test]
fn packs_of_an_interrupted_persist_make_room_before_an_image_goes() {
    // Once there is room if an image goes, once there would not be any.
    for needed_beside in [CHUNKS, 12 * CHUNKS] {
        let Some(disk) = SmallDisk::mount(16 << 20) else { return };
        let source = Ground::new();
        let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
        let [old, new] = [1, 2].map(|number| source.stage(number.into(), &[("a", noise(number, 8 * CHUNK))]));
        let (old, new) = (ground.persist(&old).unwrap(), ground.persist(&new).unwrap());
        let before = free(&ground.folder);
        ground.interrupt_with(&source.stage(3, &[("a", noise(3, 24 * CHUNK))]));
        assert_eq!(ground.packs(".pack").len(), 3, "its packs stay, for the next try");
        assert!(free(&ground.folder) < before - 24 * CHUNKS);

        let need = Survey::of(&ground.folder, 0).unwrap().need(24 * CHUNKS, Written::Packed).at_first;
        let min_free = free(&ground.folder) + needed_beside - need;
        assert_eq!(ground.room(24 * CHUNKS, min_free).unwrap(), [0; 0]);
        assert_eq!((ground.ids(), ground.packs(".pack").len()), (vec![2, 1], 2));
        ground.assert_holds(&old, &[("a", noise(1, 8 * CHUNK))], None);
        ground.assert_holds(&new, &[("a", noise(2, 8 * CHUNK))], None);
    }
}

#[test]
fn packs_that_are_being_written_are_not_taken_for_left_ones() {
    let ground = Ground::new();
    ground.persist(&ground.stage(1, &[("a", noise(1, CHUNK))])).unwrap();
    ground.interrupt(2, 4);
    let pending = || Survey::of(&ground.folder, 0).unwrap().with_held(&ground.lock).room.pending;
    assert!(pending() > 4 * CHUNKS);
    let writer = ground.lock.packs();
    assert_eq!(pending(), 0, "they may be of an image that is not published yet");
    drop(writer);
    // What an image needs never counts, and nothing does while it is not known what one needs.
    ground.persist(&ground.interrupt(2, 4)).unwrap();
    assert_eq!(pending(), 0);
    ground.interrupt(3, 4);
    assert!(pending() > 4 * CHUNKS);
    let path = ground.folder.images().unwrap()[0].dir.join(crate::manifest::FILE_NAME);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("\"version\": 2", "\"version\": 99", 1)).unwrap();
    assert_eq!(pending(), 0);
}

#[test]
fn no_image_goes_while_its_content_would_stay() {
    let Some(disk) = SmallDisk::mount(16 << 20) else { return };
    let source = Ground::new();
    let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
    for number in 1..=3 {
        ground.persist(&source.stage(number.into(), &[("a", noise(number, 8 * CHUNK))])).unwrap();
    }
    // Something is wrong with a pack, so none is removed.
    let strange = ground.folder.packs_dir().join(format!("{}.pack", "0".repeat(32)));
    std::fs::write(&strange, "x").unwrap();
    let need = Survey::of(&ground.folder, 0).unwrap().need(8 * CHUNKS, Written::Packed).at_first;
    let min_free = free(&ground.folder) + CHUNKS - need;
    for _ in 0..2 {
        let error = ground.room(8 * CHUNKS, min_free).unwrap_err();
        assert_eq!(ground.ids(), [3, 2, 1], "{error}");
        let text = rekindle_base::chain(&error);
        assert!(text.contains("store.min-free") && text.contains("rekindle repair"), "{text}");
    }
    let policy = Policy { keep_last: 9, ..Policy::default() };
    let (plan, gone) = rotate(&ground.folder, &ground.lock, &policy, free(&ground.folder) + CHUNKS).unwrap();
    assert_eq!((gone, plan.notes.len()), (Vec::new(), 1));
    // A limit for their total size is about the images.
    let total = Survey::of(&ground.folder, 0).unwrap().sizes().total();
    let policy = Policy { max_total: Some(total), ..policy };
    let limits = Limits { policy, min_free: 0, copies: Copies::One };
    let made = make_room(&ground.folder, &ground.lock, &limits, CHUNKS, Written::Packed).unwrap();
    assert_eq!((made.len(), ground.ids()), (1, vec![3, 2]));

    std::fs::remove_file(strange).unwrap();
    assert_eq!(ground.room(8 * CHUNKS, min_free).unwrap(), [0; 0], "the first one's content comes free now");
}

/// An image adds much more than the one before. Images that may go, go.
#[test]
fn an_image_that_adds_much_more_than_the_one_before_is_stored() {
    let Some(disk) = SmallDisk::mount(24 << 20) else { return };
    let source = Ground::new();
    let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
    // Two large ones, and two that share all but a chunk with the second.
    let base = |number: u8| [noise(2, 24 * CHUNK), noise(number, CHUNK)].concat();
    for (number, content) in [(1, noise(1, 24 * CHUNK)), (2, base(2)), (3, base(3)), (4, base(4))] {
        ground.persist(&source.stage(number, &[("a", content)])).unwrap();
    }
    let limits =
        Limits { policy: Policy { keep_last: 9, ..Policy::default() }, min_free: 1 << 20, copies: Copies::One };
    let packing = packing(Compression::None, None);
    let store = |staged: &Image| {
        let progress = Progress::default();
        persist::store(staged, &ground.folder, &ground.lock, &limits, &packing, &progress, &|| false)
    };
    let large = source.stage(5, &[("a", noise(5, 48 * CHUNK))]);
    let expected = Survey::of(&ground.folder, 0).unwrap().need(48 * CHUNKS, Written::Packed).lasting;
    assert!(expected < CHUNKS * 2 && free(&ground.folder) < 48 * CHUNKS + (1 << 20), "it is thought to fit");
    let stored = store(&large).unwrap();
    assert_eq!(ground.ids(), [5, 4, 3, 2], "no more than necessary");
    assert!(stored.verify_content(None, 2, &Progress::default(), &|| false).unwrap().is_sound());
    let added = stored.manifest().unwrap().chunks.as_ref().unwrap().stored;
    assert!((48 * CHUNKS..50 * CHUNKS).contains(&added), "the next one is expected to add as much: {added}");

    // What can never fit is refused, and nothing goes for it.
    let error = store(&source.stage(6, &[("a", noise(6, 120 * CHUNK))])).unwrap_err();
    assert!(matches!(error, persist::Unstored::NoRoom(NoRoom::Refused(Refusal::Disk { .. }))), "{error:?}");
    assert_eq!(ground.ids(), [5, 4, 3, 2]);
}

/// The same where the disk has room, but so much must stay free.
#[test]
fn an_image_that_adds_more_than_was_expected_leaves_free_what_must_stay_free() {
    let Some(disk) = SmallDisk::mount(80 << 20) else { return };
    let source = Ground::new();
    let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
    for (number, chunks) in [(1, 120), (2, 1), (3, 1)] {
        ground.persist(&source.stage(number.into(), &[("a", noise(number, chunks * CHUNK))])).unwrap();
    }
    let policy = Policy { keep_last: 9, ..Policy::default() };
    let limits = Limits { policy, min_free: free(&ground.folder) - (6 << 20), copies: Copies::One };
    let large = source.stage(4, &[("a", noise(4, 128 * CHUNK))]);
    let (packing, progress) = (packing(Compression::None, None), Progress::default());
    persist::store(&large, &ground.folder, &ground.lock, &limits, &packing, &progress, &|| false).unwrap();
    assert_eq!(ground.ids(), [4, 3, 2], "the first one had to go for it");
    assert!(free(&ground.folder) >= limits.min_free);

    // If too little can go, nothing goes, and nothing is stored.
    let limits = Limits { min_free: free(&ground.folder) - (6 << 20), ..limits };
    let large = source.stage(5, &[("a", noise(5, 160 * CHUNK))]);
    let error = persist::store(&large, &ground.folder, &ground.lock, &limits, &packing, &progress, &|| false);
    assert!(matches!(error, Err(persist::Unstored::NoRoom(_))), "{error:?}");
    assert_eq!(ground.ids(), [4, 3, 2]);
}

/// Others use the disk while the last of these images is packed, until 4 MiB are left that it may use. It is so large that
/// the free space is read again after what is written has got to the disk.
fn stores_beside_others(disk: usize, contents: [Vec<u8>; 4]) {
    let Some(disk) = SmallDisk::mount(disk) else { return };
    let source = Ground::new();
    let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
    let [first @ .., last] = contents;
    for (number, content) in (1..).zip(first) {
        ground.persist(&source.stage(number, &[("a", content)])).unwrap();
    }
    let limits =
        Limits { policy: Policy { keep_last: 9, ..Policy::default() }, min_free: 15 << 20, copies: Copies::One };
    let foreign = disk.0.path().join("foreign");
    // All threads that pack ask this, and go on once it is written.
    let begun = std::sync::Mutex::new(());
    let others = || {
        let _begun = begun.lock();
        if !foreign.exists() {
            let bytes = free(&ground.folder) - limits.min_free - (4 << 20);
            fs::write(&foreign, vec![1; usize::try_from(bytes).unwrap()]).unwrap();
        }
        false
    };
    let (packing, progress) = (packing(Compression::None, None), Progress::default());
    let staged = source.stage(4, &[("a", last)]);
    persist::store(&staged, &ground.folder, &ground.lock, &limits, &packing, &progress, &others).unwrap();
    assert_eq!(ground.ids(), [4, 3, 2], "the first one had to go for it");
    assert!(foreign.exists() && free(&ground.folder) >= limits.min_free);
}

/// It needs no more than before.
#[test]
fn no_more_goes_for_an_image_when_others_use_the_disk() {
    let shared = |number: u8, chunks| [noise(9, 80 * CHUNK), noise(number, chunks * CHUNK)].concat();
    stores_beside_others(120 << 20, [noise(1, 120 * CHUNK), shared(2, 1), shared(3, 1), shared(4, 112)]);
}

/// What is written first is new: that says nothing about the rest of the image.
#[test]
fn an_image_whose_beginning_is_new_is_not_refused_when_others_use_the_disk() {
    let shared = |number: u8, chunks| [noise(number, chunks * CHUNK), noise(9, 200 * CHUNK)].concat();
    stores_beside_others(220 << 20, [noise(1, 160 * CHUNK), shared(2, 1), shared(3, 112), shared(4, 112)]);
}

/// `store.copies` was changed to 2, and the disk has no room for all second copies.
#[test]
fn second_copies_take_no_space_that_an_image_needs() {
    let Some(disk) = SmallDisk::mount(20 << 20) else { return };
    let source = Ground::new();
    let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
    let shared = |number: u8| [noise(9, 48 * CHUNK), noise(number, CHUNK)].concat();
    for number in [1, 2] {
        ground.persist(&source.stage(number.into(), &[("a", shared(number))])).unwrap();
    }
    let policy = Policy { keep_last: 9, ..Policy::default() };
    let limits = Limits { policy, min_free: 1 << 20, copies: Copies::Two };
    let packing = persist::Packing { copies: Copies::Two, ..packing(Compression::None, None) };
    let staged = source.stage(3, &[("a", shared(3))]);
    let progress = Progress::default();
    persist::store(&staged, &ground.folder, &ground.lock, &limits, &packing, &progress, &|| false).unwrap();
    assert_eq!(ground.ids(), [3, 2, 1]);
    assert!(free(&ground.folder) >= limits.min_free);
    let images = ground.folder.images().unwrap();
    assert!(images[0].verify_content(None, 2, &progress, &|| false).unwrap().is_sound());
    let twice = ground.places(&images[0]).iter().filter(|places| **places == 2).count();
    assert!((8..30).contains(&twice), "as many as there was room for: {twice}");
}

/// A quota allows less than the file system has free.
#[test]
fn what_a_quota_allows_is_not_what_is_free() {
    let ground = Ground::new();
    for number in 1..=3 {
        ground.persist(&ground.stage(number.into(), &[("a", noise(number, 8 * CHUNK))])).unwrap();
    }
    let limits = Limits { policy: Policy { keep_last: 9, ..Policy::default() }, min_free: 0, copies: Copies::One };
    let room = |is_limited| {
        let seen = Seen { least: 12 * CHUNKS, is_limited };
        let made = make_room_again(&ground.folder, &ground.lock, &limits, 12 * CHUNKS, &seen).unwrap();
        made.iter().map(|removal| removal.id.sequence()).collect::<Vec<_>>()
    };
    assert_eq!(room(false), [0; 0]);
    assert_eq!(room(true), [1, 2]);
    assert_eq!(ground.ids(), [3]);
}

/// The content of an image that was damaged everywhere is struck from the indexes.
#[test]
fn an_image_that_lost_content_takes_no_place_of_an_intact_one() {
    let ground = Ground::new();
    let images = [1_u8, 2, 3]
        .map(|number| ground.persist(&ground.stage(number.into(), &[("a", noise(number, 2 * CHUNK))])).unwrap());
    ground.folder.note_proven(&ground.lock, [images[0].id, images[2].id]).unwrap();
    let packs = ground.folder.packs();
    for image in &images[1..] {
        let (id, _) = image.chunk_map().unwrap().unwrap().chunks().next().unwrap();
        let place = packs.index().unwrap().get(&id).unwrap();
        crate::pack::strike::strike(&packs, &ground.lock, &[(place.pack, id)]).unwrap();
    }
    let policy = Policy { keep_last: 1, ..Policy::default() };
    let (_, gone) = rotate(&ground.folder, &ground.lock, &policy, 0).unwrap();
    assert_eq!((gone, ground.ids()), (vec![images[1].id], vec![3, 1]), "the first is the only one to go back to");
    // While a pack cannot be read, its content may be there.
    let strange = ground.folder.packs_dir().join(format!("{}.pack", "0".repeat(32)));
    std::fs::write(&strange, "x").unwrap();
    let survey = Survey::of(&ground.folder, 0).unwrap();
    assert!(survey.facts.iter().all(|facts| facts.kind == FactKind::Good));
    std::fs::remove_file(strange).unwrap();
    // The content is stored again.
    ground.persist(&ground.stage(4, &[("a", noise(3, 2 * CHUNK))])).unwrap();
    let survey = Survey::of(&ground.folder, 0).unwrap();
    assert!(survey.facts.iter().all(|facts| facts.kind == FactKind::Good));
}

/// Nobody can put an image together without its map, so no intact image is removed for it.
#[test]
fn an_image_that_lost_its_map_takes_no_place_of_an_intact_one() {
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let delete = |path: &Path| fs::remove_file(path).unwrap();
    // Reading it fails, as on a disk with an unreadable sector.
    let unreadable = |path: &Path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    };
    for (harm, kind) in [
        (&flip as &dyn Fn(&Path), FactKind::Incomplete),
        (&delete, FactKind::Incomplete),
        (&unreadable, FactKind::Unknown),
    ] {
        let ground = Ground::new();
        let images = [1_u8, 2, 3]
            .map(|number| ground.persist(&ground.stage(number.into(), &[("a", noise(number, 2 * CHUNK))])).unwrap());
        harm(images[2].dir.join(crate::chunk::map::FILE_NAME).path());
        let survey = Survey::of(&ground.folder, 0).unwrap();
        assert_eq!(
            survey.facts.iter().map(|facts| facts.kind).collect::<Vec<_>>(),
            [kind, FactKind::Good, FactKind::Good]
        );
        assert_eq!(survey.doubtful.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [images[2].id]);
        let policy = Policy { keep_last: 1, ..Policy::default() };
        let (_, gone) = rotate(&ground.folder, &ground.lock, &policy, 0).unwrap();
        assert_eq!((gone, ground.ids()), (vec![images[0].id], vec![3, 2]), "{kind:?}");
    }
}
