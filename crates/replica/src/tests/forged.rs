//! Objects that somebody replaced.

use std::fs;

use super::*;

#[test]
fn a_chunk_map_is_not_read_further_than_the_manifest_says() {
    let dir = tempfile::tempdir().unwrap();
    let (here, replica) = (Machine::new(), in_folder(dir.path()));
    here.upload(&replica, &here.image(1, &[1, 2])).unwrap();
    let map = dir.path().join("train/images").join(id(1).to_string()).join("chunks");
    let file = fs::OpenOptions::new().write(true).open(map).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(1 << 20).unwrap();
    let error = Machine::new().fetch(&replica, 1).unwrap_err().to_string();
    assert!(error.contains(&format!("it has 1048576 bytes, and the maximum is {length}")), "{error}");
    file.set_len(length).unwrap();
    Machine::new().fetch(&replica, 1).unwrap();
}
