//! Files that are mapped, without a driver.

use std::os::unix::fs::FileExt;

use super::mapped::GRANULE;
use super::*;
use crate::copier::{Reused, Way};

/// A file in memory that is mapped in two parts.
fn mapped() -> Mapped {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(5 * GRANULE).unwrap();
    let mut mapped = Mapped::new(file, [0, 0]).unwrap();
    mapped.ranges = vec![(0, 3 * GRANULE, false), (3 * GRANULE, 5 * GRANULE, false)];
    mapped.length = 5 * GRANULE;
    mapped.map_all().unwrap();
    mapped
}

#[test]
fn a_piece_is_cut_where_registered_parts_meet() {
    let mapped = mapped();
    assert_eq!(mapped.stretches(0, 8), [(0, 8)]);
    let across = mapped.stretches(2 * GRANULE, 2 * GRANULE);
    assert_eq!(across, [(2 * GRANULE, GRANULE), (3 * GRANULE, GRANULE)]);
    assert_eq!(mapped.stretches(4 * GRANULE, GRANULE), [(4 * GRANULE, GRANULE)]);
    assert_eq!(mapped.stretches(5 * GRANULE, GRANULE), []);
}

#[test]
fn each_page_that_was_not_written_is_noticed() {
    let mapped = mapped();
    let (offset, bytes, mark) = (GRANULE, 3 * GRANULE, 0x1234_5678_9abc_def0);
    mapped.mark(offset, bytes, mark);
    assert!(mapped.check_marks(offset, bytes, mark).is_err());
    for page in 1..=3 {
        assert!(mapped.check_marks(offset, bytes, mark).is_err(), "page {page}");
        mapped.file.write_all_at(&[0; 8], offset + page * GRANULE - 8).unwrap();
    }
    mapped.check_marks(offset, bytes, mark).unwrap();
    // Only the piece's own.
    let mut word = [1; 8];
    mapped.file.read_exact_at(&mut word, GRANULE - 8).unwrap();
    assert_eq!(word, [0; 8]);
}

#[test]
fn a_copy_into_a_file_that_is_not_known_or_too_short_fails_at_its_end_in_words() {
    let mut server = Server { gpus: None, files: Vec::new(), copy: None };
    assert_eq!(server.finish(true).unwrap_err(), "no copy has begun");
    server.copy = Some(Copy::begin(Way::Out, [1, 2], Reused::Files, &mut []));
    server.piece(None, 0, 8);
    server.piece(None, 8, 8);
    assert_eq!(server.finish(true).unwrap_err(), "no memory came with the request");
    let file = tempfile::tempfile().unwrap();
    file.set_len(7).unwrap();
    server.copy = Some(Copy::begin(Way::Out, [1, 2], Reused::Files, &mut []));
    assert_eq!(server.file(Some(file.try_clone().unwrap().into()), 7).unwrap_err(), "a copy is under way");
    server.copy = None;
    assert_eq!(server.file(Some(file.into()), 8).unwrap_err(), "the file has 7 bytes and not 8");
}

#[test]
fn files_that_are_forgotten_give_their_addresses_back() {
    // Together they would need more than a process has.
    for _ in 0..100 {
        mapped();
    }
}
