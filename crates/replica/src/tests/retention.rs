//! What the replica keeps.

use std::fs;

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
