//! What the replica keeps.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use super::*;
use crate::{Error, Keep};

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
