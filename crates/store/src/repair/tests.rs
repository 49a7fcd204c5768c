//! Damage of every kind on real files, and its effect on reading, checking, repairing and storing again.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use chrono::DateTime;

use super::*;
use crate::chunk::{ChunkId, ChunkMap, Compression};
use crate::gc::{self, Bounds};
use crate::options::Copies;
use crate::pack::{PackIndex, Packs};
use crate::persist::tests::{Ground, noise, packing};
use crate::verify::{Share, check_packs};
use crate::{Image, State};

mod bits;
mod cut;
mod keys;
mod killed;
mod search;

type Parts = Vec<(&'static str, Vec<u8>)>;

/// The parts of the first image, all in the first pack.
fn first() -> Parts {
    vec![("criu/a", noise(1, 1000)), ("criu/b", noise(2, 900)), ("gpu/1", noise(3, 1100)), ("zero", vec![0; 5000])]
}

/// The parts of the second image: two chunks of the first pack and one of its own.
fn second() -> Parts {
    vec![("criu/a", noise(1, 1000)), ("criu/c", noise(4, 700)), ("gpu/1", noise(3, 1100))]
}

/// A job with two packed images.
struct Case {
    ground: Ground,
    key: Option<Key>,
    /// The images with their parts.
    images: Vec<(Image, Parts)>,
    /// Their packs.
    packs: Vec<PackName>,
    /// The original content of the packs.
    indexes: Vec<PackIndex>,
}

impl Case {
    fn new(key: Option<Key>) -> Case {
        Case::of(key, vec![first(), second()])
    }

    fn of(key: Option<Key>, all: Vec<Parts>) -> Case {
        let ground = Ground::new();
        let (mut images, mut packs) = (Vec::new(), Vec::<PackName>::new());
        for (number, parts) in (1..).zip(all) {
            let staged = ground.stage(number, &parts);
            let with = packing(Compression::None, key.as_ref());
            images.push((ground.persist_as(&staged, &with).unwrap(), parts));
            let names = ground.folder.packs().names().unwrap();
            packs.extend(names.into_iter().filter(|name| !packs.contains(name)).collect::<Vec<_>>());
        }
        let indexes = packs.iter().map(|name| ground.folder.packs().pack_index(*name).unwrap()).collect();
        Case { ground, key, images, packs, indexes }
    }

    fn dir(&self) -> Packs {
        self.ground.folder.packs()
    }

    fn pack(&self, n: usize) -> PathBuf {
        self.dir().pack_path(self.packs[n]).path().to_owned()
    }

    fn index(&self, n: usize) -> PathBuf {
        self.dir().index_path(self.packs[n]).path().to_owned()
    }

    fn id(&self, n: usize) -> ImageId {
        self.images[n].0.id
    }

    fn repair(&self) -> Repaired {
        self.repair_with(self.key.as_ref())
    }

    fn repair_with(&self, key: Option<&Key>) -> Repaired {
        repair(&self.ground.folder, Mode::Repair(&self.ground.lock), key, &Sources::default(), 2, &Progress::default())
            .unwrap()
    }

    /// With a replica that cannot be reached.
    fn repair_without_the_replica(&self) -> Repaired {
        let sources = Sources { replica: Some(&Away), ..Sources::default() };
        let mode = Mode::Repair(&self.ground.lock);
        repair(&self.ground.folder, mode, self.key.as_ref(), &sources, 2, &Progress::default()).unwrap()
    }

    fn dry_run(&self) -> Repaired {
        repair(&self.ground.folder, Mode::DryRun, self.key.as_ref(), &Sources::default(), 2, &Progress::default())
            .unwrap()
    }

    fn collect(&self) -> Result<gc::Collected, gc::Error> {
        let bounds = Bounds {
            sweep_after: Duration::from_secs(600),
            repack: None,
            key: self.key.as_ref(),
            copies: Copies::One,
            min_free: 0,
        };
        gc::collect(&self.ground.folder, &self.ground.lock, &bounds, DateTime::UNIX_EPOCH, &|| false)
    }

    /// Every file of the job except the lock, byte by byte.
    fn bytes(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut all = BTreeMap::new();
        let mut folders = vec![self.ground.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => folders.push(path),
                    false if path.ends_with("lock") => {}
                    false => drop(all.insert(path.clone(), fs::read(path).unwrap())),
                }
            }
        }
        all
    }

    /// Whether the packs and their content are intact.
    fn packs_are_sound(&self, share: Share) -> bool {
        let report = check_packs(&self.ground.folder, self.key.as_ref(), share, 2, &Progress::default(), &|| false);
        report.unwrap().is_sound()
    }

    /// Whether a check of the structure finds no problem.
    fn looks_sound(&self) -> bool {
        self.images.iter().all(|(image, _)| image.verify().is_sound()) && self.packs_are_sound(Share::NONE)
    }

    /// Whether a check of all content finds no problem.
    fn reads_sound(&self) -> bool {
        let read = |image: &Image| image.verify_content(self.key.as_ref(), 2, &Progress::default(), &|| false).unwrap();
        self.images.iter().all(|(image, _)| read(image).is_sound()) && self.packs_are_sound(Share::ALL)
    }

    /// No image yields other bytes than it was made of. Returns the numbers of those that can be unpacked.
    fn that_unpack(&self) -> Vec<usize> {
        let mut whole = Vec::new();
        for (n, (image, parts)) in self.images.iter().enumerate() {
            let now = Image::load(&image.dir, image.id, &Default::default());
            match self.ground.unpack_any(&now, self.key.as_ref()) {
                Ok(into) => {
                    for (path, content) in parts {
                        assert!(fs::read(into.path().join(path)).unwrap() == *content, "{path} has other bytes");
                    }
                    whole.push(n);
                }
                Err(error) => {
                    let text = rekindle_base::chain(&error);
                    assert!(text.contains(&image.id.to_string()), "{text}");
                    let part = parts.iter().any(|(path, _)| text.contains(&format!("of \"{path}\" cannot be read")));
                    let place = text.contains(".pack") || text.contains("is in no pack");
                    let manifest = now.manifest().is_none();
                    assert!(part && place || text.contains("chunk map") || manifest, "{text}");
                }
            }
        }
        whole
    }

    /// The images with a chunk at such a place.
    fn needing(&self, lies: impl Fn(usize, u64, u64) -> bool) -> Vec<usize> {
        let mut gone = BTreeSet::new();
        for (n, index) in self.indexes.iter().enumerate() {
            gone.extend(index.entries().iter().filter(|it| lies(n, it.offset, it.end())).map(|it| *it.id.as_bytes()));
        }
        let map = |image: &Image| image.chunk_map().unwrap().unwrap();
        let needs = |map: ChunkMap| map.chunks().any(|(id, _)| gone.contains(id.as_bytes()));
        (0..self.images.len()).filter(|n| needs(map(&self.images[*n].0))).collect()
    }

    /// Everything that must hold for damage after which exactly `suffering` cannot be restored.
    fn check(&self, what: &str, suffering: &[usize]) {
        // Images that can be unpacked before the repair can be unpacked after it; all others are reported.
        let before = self.that_unpack();
        assert!(before.iter().all(|n| !suffering.contains(n)), "{what}: {before:?}");
        let bytes = self.bytes();
        let dry = self.dry_run();
        assert!(self.bytes() == bytes, "{what}: a dry run changes nothing");
        let done = self.repair();
        assert_eq!(dry, done, "{what}");
        let named: BTreeSet<ImageId> = done.images.iter().map(|it| it.image).collect();
        let expected: BTreeSet<ImageId> = suffering.iter().map(|n| self.id(*n)).collect();
        assert_eq!(named, expected, "{what}: {done:?}");
        let whole: Vec<usize> = (0..self.images.len()).filter(|n| !suffering.contains(n)).collect();
        assert_eq!(self.that_unpack(), whole, "{what}: {done:?}");
        assert!(self.packs_are_sound(Share::ALL), "{what}: nothing that is left is damaged");
        for (image, _) in &self.images {
            let now = Image::load(&image.dir, image.id, &Default::default());
            let suffers = expected.contains(&image.id);
            assert_eq!(now.is_good(), !suffers, "{what}");
            let certain = done.images.iter().all(|it| it.loss == Loss::Certain);
            assert!(!suffers || certain, "{what}: {done:?}");
        }
        let bytes = self.bytes();
        let again = self.repair();
        assert!(self.bytes() == bytes, "{what}: the second repair changes nothing");
        assert_eq!((again.packs, &again.images), (Vec::new(), &done.images), "{what}");
        self.collect().unwrap();
        self.store_anew(what);
    }

    /// Stores the same content again: what was lost is added.
    fn store_anew(&self, what: &str) {
        for (n, (_, parts)) in (11..).zip(&self.images) {
            let with = packing(Compression::None, self.key.as_ref());
            let image = self.ground.persist_as(&self.ground.stage(n, parts), &with).unwrap();
            assert!(image.verify().is_sound(), "{what}");
            self.ground.assert_holds(&image, parts, self.key.as_ref());
        }
        self.collect().unwrap();
    }
}

/// A replica that cannot be reached.
struct Away;

impl ChunkSource for Away {
    fn fetch(
        &self,
        _: HashSet<ChunkId>,
        _: &Packs,
        _: Option<&Key>,
        _: &(dyn Fn() -> bool + Sync),
        _: heal::Put<'_>,
    ) -> Result<(), heal::FetchError> {
        Err(heal::FetchError::Unavailable("no route to it".into()))
    }
}

impl Ground {
    fn unpack_any(&self, image: &Image, key: Option<&Key>) -> Result<tempfile::TempDir, crate::unpack::Error> {
        let into = tempfile::tempdir_in(self.dir.path()).unwrap();
        crate::unpack::unpack(
            image,
            &self.folder,
            &crate::tests::beneath(into.path()),
            key,
            1,
            &Progress::default(),
            &|| false,
        )?;
        Ok(into)
    }
}

/// Changes one byte of a file.
fn flip(path: &Path, offset: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    // The version is at offset 16: 3 is a harder case than 0, because it may be a newer one.
    let bit = if offset == 16 { 2 } else { 1 };
    file.write_all_at(&[byte[0] ^ bit], offset).unwrap();
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

#[test]
fn what_is_whole_stays_as_it_is() {
    let case = Case::new(None);
    assert_eq!(case.packs.len(), 2);
    let bytes = case.bytes();
    assert_eq!((case.dry_run(), case.repair()), (Repaired::default(), Repaired::default()));
    assert!(case.repair().is_whole());
    assert!(case.bytes() == bytes);
    assert!(case.looks_sound() && case.reads_sound());
}

#[test]
fn nothing_is_marked_while_the_replica_can_not_be_asked() {
    let case = Case::new(None);
    let at = case.indexes[0].entries()[0];
    flip(&case.pack(0), at.offset + 100);
    let is_good = |n: usize| Image::load(&case.images[n].0.dir, case.id(n), &Default::default()).is_good();
    for _ in 0..2 {
        let done = case.repair_without_the_replica();
        assert!(!done.is_whole() && !done.images.is_empty(), "{done:?}");
        for image in &done.images {
            let why = "the replica could not be asked: no route to it";
            assert!(image.loss == Loss::NotKnown && image.what.ends_with(why), "{image:?}");
        }
        assert!(is_good(0) && is_good(1));
    }
    // It is known without a replica.
    let done = case.repair();
    assert!(done.images.iter().all(|image| image.loss == Loss::Certain && image.what.contains("are lost")), "{done:?}");
    assert!(!is_good(0));
}

#[test]
fn who_was_taken_over_writes_nothing_more() {
    let case = Case::new(None);
    fs::remove_file(case.index(0)).unwrap();
    let file = case.ground.folder.path().join("lock");
    let holder = fs::read_to_string(&file).unwrap();
    let mut other: serde_json::Value = serde_json::from_str(&holder).unwrap();
    other["host"] = "elsewhere".into();
    fs::write(&file, other.to_string()).unwrap();
    let before = case.bytes();
    let done = repair(
        &case.ground.folder,
        Mode::Repair(&case.ground.lock),
        None,
        &Sources::default(),
        2,
        &Progress::default(),
    );
    assert!(matches!(done, Err(Error::Store(StoreError::TakenOver { .. }))), "{done:?}");
    assert!(case.bytes() == before);
}

#[test]
fn a_damaged_image_goes_in_its_time_and_holds_up_nothing() {
    let case = Case::new(None);
    flip(case.images[1].0.dir.join("chunks").path(), 70);
    case.repair();
    let marked = Image::load(&case.images[1].0.dir, case.id(1), &Default::default());
    let State::Bad { mark, .. } = &marked.state else { panic!("{marked:?}") };
    assert_eq!(mark.why, crate::BadWhy::Damaged);
    // Nobody needs its own pack: its map does not name the original chunks.
    assert_eq!(case.collect().unwrap().marked, [case.packs[1]]);
    assert_eq!(case.that_unpack(), [0]);
    let policy = crate::retention::Policy { keep_last: 1, ..Default::default() };
    let rotate = || crate::retention::survey::rotate(&case.ground.folder, &case.ground.lock, &policy, 0).unwrap();
    assert_eq!(rotate().1, [], "a bad one stays for a while");
    // A newer bad image replaces it.
    let third = case.ground.persist(&case.ground.stage(3, &second())).unwrap();
    flip(third.dir.join("chunks").path(), 70);
    case.repair();
    assert_eq!(rotate().1, [case.id(1)]);
    assert!(!case.images[1].0.dir.is_there());
    case.collect().unwrap();
}
