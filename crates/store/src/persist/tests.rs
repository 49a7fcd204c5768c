//! Packing and unpacking, on real files.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::chunk::CHUNK;
use crate::manifest::Part;
use crate::unpack::{self, unpack};
use crate::{Access, BadMark, BadWhy, ImageId, Manifest, Place, State, Store};

mod copies;
mod damage;
pub(crate) mod full;
mod killed;

#[test]
fn threads_leave_the_job_most_processors() {
    for (processors, threads) in [(1, 1), (2, 2), (4, 2), (8, 2), (12, 3), (16, 4), (32, 8), (256, 8)] {
        assert_eq!(threads_among(processors), threads, "{processors}");
    }
}

/// A store, and a folder used as a slot.
pub(crate) struct Ground {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) folder: JobFolder,
    pub(crate) lock: WriterLock,
}

impl Ground {
    pub(crate) fn new() -> Ground {
        Ground::below(tempfile::tempdir().unwrap())
    }

    /// In a folder that is not removed.
    pub(crate) fn in_folder(path: &Path) -> Ground {
        let mut dir = tempfile::tempdir_in(path).unwrap();
        dir.disable_cleanup(true);
        let store = Store::open(&path.join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        Ground { dir, folder, lock }
    }

    pub(crate) fn below(dir: tempfile::TempDir) -> Ground {
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        Ground { dir, folder, lock }
    }

    /// Makes an image "in memory" with this number.
    pub(crate) fn stage(&self, number: u32, parts: &[(&str, Vec<u8>)]) -> Image {
        let slot = self.dir.path().join(format!("slot{number}"));
        let mut manifest = blank(number);
        for (path, content) in parts {
            fs::create_dir_all(slot.join(path).parent().unwrap()).unwrap();
            fs::write(slot.join(path), content).unwrap();
            manifest.parts.push(Part { path: (*path).into(), size: content.len() as u64, blake3: None });
            manifest.bytes += content.len() as u64;
        }
        fs::create_dir_all(&slot).unwrap();
        fs::write(slot.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
        Image {
            id: manifest.id,
            dir: crate::tests::beneath(&slot),
            state: State::Good(Box::new(manifest)),
            place: Place::Staged,
            trust: Default::default(),
        }
    }

    pub(crate) fn persist(&self, image: &Image) -> Result<Image, Error> {
        self.persist_as(image, &plain())
    }

    pub(crate) fn persist_as(&self, image: &Image, packing: &Packing) -> Result<Image, Error> {
        persist(image, &self.folder, &self.lock, packing, &Progress::default(), &|| false)
    }

    pub(crate) fn unpack(&self, image: &Image, key: Option<&Key>) -> Result<tempfile::TempDir, unpack::Error> {
        let into = tempfile::tempdir_in(self.dir.path()).unwrap();
        let progress = Progress::default();
        unpack(image, &self.folder, &crate::tests::beneath(into.path()), key, 2, &progress, &|| false)?;
        let bytes = image.manifest().unwrap().bytes;
        assert_eq!(progress.bytes(), (bytes, bytes));
        Ok(into)
    }

    /// Asserts that the image has these parts, byte by byte.
    pub(crate) fn assert_holds(&self, image: &Image, parts: &[(&str, Vec<u8>)], key: Option<&Key>) {
        let into = self.unpack(image, key).unwrap();
        assert_eq!(image.manifest().unwrap().parts.len(), parts.len());
        for (path, content) in parts {
            assert!(fs::read(into.path().join(path)).unwrap() == *content, "{path}");
        }
    }

    /// Names in `packs/` with this suffix.
    pub(crate) fn packs(&self, suffix: &str) -> Vec<String> {
        let names = fs::read_dir(self.folder.packs().dir()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(suffix)).collect()
    }
}

fn blank(number: u32) -> Manifest {
    let mut manifest = crate::tests::manifest();
    manifest.id = ImageId::new(number, chrono::DateTime::UNIX_EPOCH);
    manifest
}

pub(crate) fn packing(compression: Compression, key: Option<&Key>) -> Packing {
    let bounds = Bounds { rate: None, threads: 2 };
    let (copies, unread) = (Copies::One, Unread::default());
    Packing { compression, key: key.cloned().map(Arc::new), bounds, copies, unread }
}

fn plain() -> Packing {
    packing(Compression::None, None)
}

/// Incompressible bytes, different for each seed.
pub(crate) fn noise(seed: u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new_keyed(&[seed; 32]).finalize_xof().fill(&mut bytes);
    bytes
}

/// Every kind of part.
fn parts() -> Vec<(&'static str, Vec<u8>)> {
    let mut holes = noise(1, 10 * CHUNK);
    holes[CHUNK..4 * CHUNK].fill(0);
    holes[6 * CHUNK + 5..9 * CHUNK].fill(0);
    let twice = [noise(2, 3 * CHUNK), noise(2, 3 * CHUNK), noise(2, CHUNK / 2)].concat();
    let text: Vec<u8> = b"weights and biases ".iter().copied().cycle().take(5 * CHUNK + 77).collect();
    vec![
        ("criu/core-1.img", b"registers".to_vec()),
        ("criu/deep/er/one", vec![9]),
        ("criu/exact", noise(3, 4 * CHUNK)),
        ("criu/holes", holes),
        ("criu/twice", twice),
        ("criu/zeros", vec![0; 7 * CHUNK + 3]),
        ("dump.log", b"".to_vec()),
        // Several spans of a restore, and several pieces of a pack.
        ("gpu/1000", noise(4, (9 << 20) + 4097)),
        ("gpu/1001", text),
    ]
}

#[test]
fn every_kind_of_part_comes_back_as_it_was() {
    let key = Key::new(&[5; 32]);
    for key in [None, Some(&key)] {
        for compression in [Compression::None, Compression::Lz4, Compression::Zstd(3), Compression::Auto] {
            let ground = Ground::new();
            let parts = parts();
            let image = ground.persist_as(&ground.stage(7, &parts), &packing(compression, key)).unwrap();
            assert_eq!((image.place, image.form()), (Place::Stored, Form::Packed));
            assert!(image.is_good());
            ground.assert_holds(&image, &parts, key);
            assert_eq!(ground.packs(".pack").len(), ground.packs(".idx").len());
            assert_eq!(ground.packs("").len(), 2 * ground.packs(".pack").len(), "nothing else is left");
            let wrong = [Some(Key::new(&[6; 32])), None];
            for wrong in wrong.iter().filter(|_| key.is_some()) {
                let error = ground.unpack(&image, wrong.as_ref()).unwrap_err();
                assert!(!error.is_damage(), "{error:?}");
                let expected = if wrong.is_some() { "another key" } else { "to the key file" };
                assert!(rekindle_base::chain(&error).contains(expected), "{error:?}");
            }
        }
    }
}

#[test]
fn holes_are_holes_again() {
    let ground = Ground::new();
    let image = ground.persist(&ground.stage(1, &parts())).unwrap();
    let into = ground.unpack(&image, None).unwrap();
    assert_eq!(fs::metadata(into.path().join("criu/zeros")).unwrap().blocks(), 0);
    let holes = fs::metadata(into.path().join("criu/holes")).unwrap();
    assert!(holes.blocks() * 512 < 6 * CHUNK as u64, "{}", holes.blocks());
}

/// With a piece of work for each 256 KiB of the length, storing this took an hour. A job creates such a file with one
/// ftruncate(2). It was also told to need 512 TiB of free space.
#[test]
fn a_file_of_holes_takes_neither_time_nor_room() {
    let ground = Ground::below(tempfile::tempdir_in("/dev/shm").unwrap());
    let parts = [("files/content-1", b"0123456789".to_vec()), ("other", vec![b'x'; 1000])];
    let mut image = ground.stage(1, &parts);
    let length = 1_u64 << 49;
    let file = fs::File::options().write(true).open(image.dir.join(parts[0].0)).unwrap();
    file.set_len(length).unwrap();
    file.write_all_at(b"middle", 1 << 48).unwrap();
    let mut manifest = image.manifest().unwrap().clone();
    manifest.parts[0].size = length;
    manifest.bytes = length + 1000;
    fs::write(image.dir.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
    image.state = State::Good(Box::new(manifest));
    assert!(image.data().unwrap() < 1 << 20, "{}", image.data().unwrap());
    let began = std::time::Instant::now();
    let stored = ground.persist(&image).unwrap();
    let into = ground.unpack(&stored, None).unwrap();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(stored.data().unwrap() < 2 << 20, "{}", stored.data().unwrap());
    let back = fs::File::open(into.path().join(parts[0].0)).unwrap();
    let mut found = [0; 8];
    back.read_exact_at(&mut found, (1 << 48) - 1).unwrap();
    let meta = back.metadata().unwrap();
    assert_eq!((&found, meta.len(), meta.blocks() * 512 < 2 << 20), (b"\0middle\0", length, true));
}

#[test]
fn what_is_there_is_not_written_again() {
    let ground = Ground::new();
    let progress = Progress::default();
    let mut parts = parts();
    let first = ground.stage(1, &parts);
    let first = persist(&first, &ground.folder, &ground.lock, &plain(), &progress, &|| false).unwrap();
    let bytes = first.manifest().unwrap().bytes;
    assert_eq!(progress.bytes(), (bytes, bytes));
    let packed: u64 = ground.packs(".pack").iter().map(|p| size_of_pack(&ground, p)).sum();
    let packs = u64::try_from(ground.packs(".pack").len()).unwrap();
    let chunks = first.manifest().unwrap().chunks.clone().unwrap();
    // The bytes of the records; zeros and repeated chunks are not included.
    assert_eq!((chunks.stored, chunks.stored), (packed - 64 * packs, progress.written()));
    let once: usize = [9, 1, 4 * CHUNK, 10 * CHUNK - 5 * CHUNK, 3 * CHUNK + CHUNK / 2, (9 << 20) + 4097].iter().sum();
    let text = 5 * CHUNK + 77;
    let records = 1 + 1 + 4 + 5 + 4 + 37 + 6;
    assert!(chunks.stored <= (once + text + 64 * records) as u64, "{} {}", chunks.stored, once + text + 64 * records);

    // Storing the same again takes no space.
    let again = ground.persist(&ground.stage(2, &parts)).unwrap();
    assert_eq!(again.manifest().unwrap().chunks.clone().unwrap().stored, 0);
    assert_eq!(ground.packs(".pack").len() as u64, packs);

    // Changing one byte costs one chunk.
    parts[7].1[5 << 20] ^= 1;
    let third = ground.persist(&ground.stage(3, &parts)).unwrap();
    assert_eq!(third.manifest().unwrap().chunks.clone().unwrap().stored, 64 + CHUNK as u64);
    ground.assert_holds(&third, &parts, None);
    ground.assert_holds(&first, &self::parts(), None);
}

fn size_of_pack(ground: &Ground, name: &str) -> u64 {
    fs::metadata(ground.folder.packs().dir().join(name)).unwrap().len()
}

#[test]
fn a_pack_that_is_on_its_way_out_is_kept_when_it_is_needed() {
    let ground = Ground::new();
    let parts = parts();
    ground.persist(&ground.stage(1, &parts)).unwrap();
    let packs = ground.folder.packs();
    for name in packs.names().unwrap() {
        fs::write(packs.gone_path(name), b"{}").unwrap();
    }
    // Nothing of it is needed, so the marks stay.
    ground.persist(&ground.stage(2, &[("other", noise(99, 3))])).unwrap();
    assert!(!ground.packs(".gone").is_empty());
    let again = ground.persist(&ground.stage(3, &parts)).unwrap();
    assert_eq!(again.manifest().unwrap().chunks.clone().unwrap().stored, 0);
    assert!(ground.packs(".gone").is_empty());
}

#[test]
fn a_loose_image_is_packed_in_its_place() {
    let ground = Ground::new();
    let draft = ground.folder.begin_image_as(&ground.lock, blank(4).id).unwrap();
    let parts = parts();
    for (path, content) in &parts {
        fs::create_dir_all(draft.dir().join(path).parent().unwrap()).unwrap();
        fs::write(draft.dir().join(path), content).unwrap();
    }
    let mut loose = draft.publish_loose(blank(4));
    assert_eq!(loose.form(), Form::Loose);
    let mark = crate::BadMark { why: crate::BadWhy::Damaged, detail: "x".into(), when: chrono::DateTime::UNIX_EPOCH };
    loose.mark_bad(mark).unwrap();
    let packed = ground.persist(&loose).unwrap();
    assert_eq!((packed.id, packed.form(), packed.is_good()), (loose.id, Form::Packed, false));
    ground.assert_holds(&packed, &parts, None);
    assert_eq!(ground.folder.images().unwrap(), std::slice::from_ref(&packed));
    assert_eq!(fs::read_dir(ground.folder.images_dir()).unwrap().count(), 1, "the loose one is gone");
    // Again: there is nothing to do.
    assert_eq!(ground.persist(&packed).unwrap(), packed);
}

#[test]
fn a_mark_that_comes_while_an_image_is_packed_goes_with_it() {
    let ground = Ground::new();
    let image = ground.stage(1, &parts());
    // The restart policy has marked it while it was being packed.
    let mark = BadMark { why: BadWhy::DiesAgain, detail: "twice".into(), when: chrono::DateTime::UNIX_EPOCH };
    image.clone().mark_bad(mark.clone()).unwrap();
    let stored = ground.persist(&image).unwrap();
    assert!(matches!(&stored.state, State::Bad { mark: there, .. } if *there == mark), "{:?}", stored.state);
}

#[test]
fn a_damaged_loose_image_stays_as_it_is() {
    let ground = Ground::new();
    let draft = ground.folder.begin_image_as(&ground.lock, blank(4).id).unwrap();
    fs::write(draft.dir().join("a"), b"one").unwrap();
    let loose = draft.publish_loose(blank(4));
    fs::write(loose.dir.join("a"), b"two").unwrap();
    let result = ground.persist(&loose);
    assert!(matches!(&result, Err(Error::Damaged { what, .. }) if what.contains("a: wrong hash")), "{result:?}");
    assert_eq!(fs::read(loose.dir.join("a")).unwrap(), b"two");
    assert!(ground.packs("").is_empty());
}

#[test]
fn it_keeps_to_its_rate() {
    let ground = Ground::new();
    let image = ground.stage(1, &[("a", noise(1, 3 << 20)), ("zeros", vec![0; 200 << 20])]);
    let mut slow = plain();
    slow.bounds.rate = Some(10 << 20);
    let began = Instant::now();
    ground.persist_as(&image, &slow).unwrap();
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(250), "3 MiB at 10 MiB/s: {took:?}");
    // 203 MiB at that rate would take 20 s. Zeros are not written, and do not count.
    assert!(took < Duration::from_secs(15), "{took:?}");
}

#[test]
fn it_can_be_called_off_at_any_time() {
    let ground = Ground::new();
    let image = ground.stage(1, &parts());
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let mut allowed = 0;
    let stored = loop {
        asked.store(0, std::sync::atomic::Ordering::SeqCst);
        let cancelled = || asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) >= allowed;
        match persist(&image, &ground.folder, &ground.lock, &plain(), &Progress::default(), &cancelled) {
            Ok(stored) => break stored,
            Err(error) => assert!(matches!(error, Error::Cancelled), "{error:?}"),
        }
        assert_eq!(fs::read_dir(ground.folder.images_dir()).unwrap().count(), 0, "no draft is left");
        assert!(ground.packs("").iter().all(|name| !name.starts_with(".tmp-")));
        allowed = allowed * 2 + 1;
    };
    assert!(allowed > 60);
    ground.assert_holds(&stored, &parts(), None);
}

#[test]
fn a_slot_that_was_taken_over_gives_no_image() {
    let ground = Ground::new();
    let image = ground.stage(1, &parts());
    fs::remove_file(image.dir.join("manifest.json")).unwrap();
    let result = ground.persist(&image);
    assert!(matches!(result, Err(Error::Gone(_))), "{result:?}");
    // A file that became shorter while it was being read.
    let image = ground.stage(2, &parts());
    fs::File::options().write(true).open(image.dir.join("gpu/1000")).unwrap().set_len(1 << 20).unwrap();
    let result = ground.persist(&image);
    assert!(matches!(&result, Err(Error::Copy { path, .. }) if path.ends_with("gpu/1000")), "{result:?}");
    assert_eq!(fs::read_dir(ground.folder.images_dir()).unwrap().count(), 0, "no draft is left");
}

#[test]
fn pages_that_come_between_others_cost_little() {
    // Cuts at addresses have their own test; this checks that packing uses them.
    let ground = Ground::new();
    let image = ground.stage(1, &[("a", noise(1, 2 * CHUNK))]);
    let stored = ground.persist(&image).unwrap();
    let map = stored.chunk_map().unwrap().unwrap();
    assert_eq!(map.chunks().map(|(_, len)| len as usize).collect::<Vec<_>>(), [CHUNK, CHUNK]);
}

/// Changes one byte of a file.
fn flip(path: &Path, offset: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}
