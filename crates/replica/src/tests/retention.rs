//! What the replica keeps.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use super::*;
use crate::{Error, Failure, Keep};

#[test]
fn nothing_goes_while_it_is_unknown_which_images_are_of_the_present_run() {
    let dir = tempfile::tempdir().unwrap();
    let (replica, here) = (in_folder(dir.path()), Machine::new());
    for number in 1..=2 {
        here.upload(&replica, &here.image(number, &[number])).unwrap();
    }
    fs::write(here.folder.path().join("job.json"), "{").unwrap();
    let result = replica.retain(Keep::Newest(1), &here.folder, &|| false);
    assert!(matches!(result, Err(Error::Store(_))), "{result:?}");
    assert_eq!(replica.images(&|| false).unwrap().len(), 2);
    fs::remove_file(here.folder.path().join("job.json")).unwrap();
    assert_eq!(replica.retain(Keep::Newest(1), &here.folder, &|| false).unwrap().images, [id(1)]);
}

#[test]
fn what_an_interrupted_upload_left_in_a_folder_is_removed_an_hour_later() {
    let dir = tempfile::tempdir().unwrap();
    let (replica, here) = (in_folder(dir.path()), Machine::new());
    here.upload(&replica, &here.image(1, &[1])).unwrap();
    let packs = dir.path().join("train/packs");
    let [old, young, other] = ["a.pack#1", "b.pack#2", "c.pack#x"].map(|name| packs.join(name));
    for path in [&old, &young, &other] {
        let file = File::create(path).unwrap();
        let age = if *path == young { 0 } else { 2 * 3600 };
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    replica.retain(Keep::Newest(1), &here.folder, &|| false).unwrap();
    assert_eq!([&old, &young, &other].map(|path| path.exists()), [false, true, true]);
}

/// Sets the time of a file in the past.
fn age(path: &Path, hours: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
}

#[test]
fn a_full_replica_gets_room_from_packs_that_were_marked_long_ago() {
    let Some(disk) = room::SmallDisk::mount(1) else { return };
    let (replica, here) = (in_folder(disk.0.path()), Machine::new());
    here.upload(&replica, &here.image(1, &[1, 2, 3, 4])).unwrap();
    here.upload(&replica, &here.image(2, &[5])).unwrap();
    let packs = || {
        let entries = fs::read_dir(disk.0.path().join("train/packs")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        names.sort();
        names
    };
    packs().iter().for_each(|path| age(path, 5));
    replica.retain(Keep::Newest(1), &here.folder, &|| false).unwrap();
    let marks: Vec<_> = packs().into_iter().filter(|path| path.extension().is_some_and(|it| it == "gone")).collect();
    assert_eq!((packs().len(), marks.len()), (5, 1));

    // The mark is young: the pack stays, and the message says what to do.
    let third = here.image(3, &[5, 6, 7, 8, 9, 10, 11]);
    let error = here.upload(&replica, &third).unwrap_err();
    assert!(matches!(&error, Error::Remote { failure: Failure::Full { .. }, .. }), "{error:?}");
    assert!(error.to_string().contains("give it more space"), "{error}");
    age(&marks[0], 3);
    // Nothing new is in the replica for hours: only our own clock tells that.
    for path in ["job.json", "newest.json"].map(|name| disk.0.path().join("train").join(name)) {
        if path.exists() {
            age(&path, 3);
        }
    }
    assert_eq!(here.upload(&replica, &third).unwrap().packs, 1);
    assert_eq!(replica.images(&|| false).unwrap().len(), 2, "no image goes");
    let other = Machine::new();
    assert!(other.fetch(&replica, 3).unwrap().is_good() && other.fetch(&replica, 2).unwrap().is_good());
}

#[test]
fn content_of_the_image_that_is_sent_stays_in_a_full_replica() {
    let dir = tempfile::tempdir().unwrap();
    let (replica, here) = (in_folder(dir.path()), Machine::new());
    here.upload(&replica, &here.image(1, &[1])).unwrap();
    here.upload(&replica, &here.image(2, &[2])).unwrap();
    let packs = dir.path().join("train/packs");
    let all = || fs::read_dir(&packs).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    all().iter().for_each(|path| age(path, 5));
    replica.retain(Keep::Newest(1), &here.folder, &|| false).unwrap();
    all().iter().for_each(|path| age(path, 3));
    let again = here.image(3, &[1, 4]).chunk_map().unwrap().unwrap();
    assert_eq!(replica.sweep_for(&again, &here.folder, &|| false).unwrap(), 0);
    let other = here.image(4, &[4]).chunk_map().unwrap().unwrap();
    assert!(replica.sweep_for(&other, &here.folder, &|| false).unwrap() > 100_000);
}
