//! How many images a replica keeps, and that nothing is removed that one of them needs.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::ground::{Machine, chunks, folder_replica, id};
use rekindle_replica::Keep;

/// Everything that is there came a while ago.
fn age(dir: &Path, by: Duration) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            age(&path, by);
        } else {
            File::open(&path).unwrap().set_modified(SystemTime::now() - by).unwrap();
        }
    }
}

const LONG_AGO: Duration = Duration::from_secs(7200);

fn packs(dir: &Path) -> usize {
    let names = fs::read_dir(dir.join("train/packs")).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path| path.extension().is_some_and(|it| it == "pack")).count()
}

/// More than an hour passes, and something is written.
fn wait(dir: &Path) {
    age(dir, LONG_AGO);
    let record = dir.join("train/job.json");
    fs::write(record, "{}").unwrap();
}

#[test]
fn old_images_go_with_what_only_they_need() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    // The first pack is needed by all, the second by the second only.
    let images = [here.image(1, &chunks(0..3)), here.image(2, &chunks(2..6)), here.image(3, &chunks([0, 9]))];
    for image in &images {
        here.upload(&replica, image).unwrap();
    }
    assert_eq!(packs(dir.path()), 3);
    age(dir.path(), LONG_AGO);
    let nothing = replica.retain(Keep::Newest(3), &here.folder, &|| false).unwrap();
    assert_eq!((nothing.images.len(), nothing.packs), (0, 0));

    // Something young is there: its age is what the others are compared with.
    here.upload(&replica, &here.image(4, &chunks([0, 10]))).unwrap();
    let removed = replica.retain(Keep::Newest(2), &here.folder, &|| false).unwrap();
    assert_eq!((removed.images, removed.packs, removed.blocked), (vec![id(1), id(2)], 0, None));
    assert_eq!(packs(dir.path()), 4, "a listing may not show yet that an image needs them");
    wait(dir.path());
    let removed = replica.retain(Keep::Newest(2), &here.folder, &|| false).unwrap();
    assert_eq!((removed.images.len(), removed.packs, packs(dir.path())), (0, 1, 3));
    let other = Machine::new();
    for (n, content) in [(3, chunks([0, 9])), (4, chunks([0, 10]))] {
        let (image, _) = other.fetch(&replica, id(n)).unwrap();
        assert_eq!(other.content(&image), content);
    }
    // Here the second is still there: what was removed there is sent again.
    let sent = here.upload(&replica, &images[1]).unwrap();
    assert_eq!((sent.packs, sent.present), (1, 1));
    let (image, _) = Machine::new().fetch(&replica, id(2)).unwrap();
    assert_eq!(image.manifest(), images[1].manifest());
}

#[test]
fn a_young_pack_without_an_image_may_belong_to_one_on_its_way() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    let images = [1, 2, 3].map(|n| here.image(n, &chunks([n])));
    for image in &images[..2] {
        here.upload(&replica, image).unwrap();
    }
    age(dir.path(), LONG_AGO);
    // The third has everything but its manifest.
    here.upload(&replica, &images[2]).unwrap();
    fs::remove_file(dir.path().join(format!("train/images/{}/manifest.json", id(3)))).unwrap();
    let removed = replica.retain(Keep::Newest(1), &here.folder, &|| false).unwrap();
    assert_eq!((removed.images, removed.packs), (vec![id(1)], 0));
    let marks = |n| dir.path().join("train/packs").join(here.pack_of(n)).with_extension("gone").exists();
    assert_eq!((marks(1), marks(2), marks(3)), (true, false, false));
    assert_eq!(here.upload(&replica, &images[2]).unwrap().packs, 0, "its pack is used");
}

#[test]
fn nothing_that_may_be_needed_goes_while_something_can_not_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    let images = [1, 2, 3].map(|n| here.image(n, &chunks([n])));
    for image in &images {
        here.upload(&replica, image).unwrap();
    }
    age(dir.path(), LONG_AGO);
    here.upload(&replica, &here.image(4, &chunks([4]))).unwrap();
    // A newer rekindle wrote it: it is not ours to judge.
    let path = dir.path().join(format!("train/images/{}/manifest.json", id(2)));
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"version\": 2", "\"version\": 3", 1)).unwrap();
    let removed = replica.retain(Keep::Newest(1), &here.folder, &|| false).unwrap();
    assert_eq!((removed.images, removed.packs), (vec![id(1), id(3)], 0));
    let why = removed.blocked.unwrap();
    assert!(why.contains(&id(2).to_string()) && why.contains("version 3"), "{why}");
    assert_eq!(packs(dir.path()), 4);

    // A needed pack is not there: something is wrong, and nothing more is removed.
    fs::write(&path, text).unwrap();
    fs::remove_file(dir.path().join(format!("train/images/{}/chunks", id(2)))).unwrap();
    fs::remove_dir_all(here.folder.images_dir().join(id(2).to_string())).unwrap();
    here.upload(&replica, &here.image(5, &chunks([5]))).unwrap();
    age(&dir.path().join("train/images").join(id(4).to_string()), LONG_AGO);
    let removed = replica.retain(Keep::Newest(2), &here.folder, &|| false).unwrap();
    assert_eq!(removed.images, [id(2)], "a broken image that is read as one goes by its manifest");
    assert_eq!(removed.blocked, None);
    wait(dir.path());
    replica.retain(Keep::Newest(2), &here.folder, &|| false).unwrap();
    assert_eq!(packs(dir.path()), 2, "what the fourth and the fifth need");
}
