//! What the search after damage finds, and what it must not trust.

use super::*;
use crate::chunk::{Codec, chunk_id};
use crate::pack::RecordHeader;

/// Content with the header of a record that does not exist, and that would extend far beyond its own chunk.
fn treacherous() -> Vec<u8> {
    let id = chunk_id(None, b"somebody else's");
    let header = RecordHeader { codec: Codec::Raw, raw_len: 1500, stored_len: 1500, id };
    [noise(31, 500), header.to_bytes().to_vec(), noise(32, 300)].concat()
}

#[test]
fn a_header_inside_of_content_does_not_hide_what_follows() {
    for damaged in [3, 64 + 100] {
        let parts = vec![("a", treacherous()), ("b", noise(33, 400)), ("c", noise(34, 3000))];
        let case = Case::of(None, vec![parts]);
        flip(&case.pack(0), 64 + damaged);
        let done = case.dry_run();
        assert_eq!(done.packs[0].whole, 2, "{done:?}");
        case.check("a record in content", &[0]);
    }
}

#[test]
fn several_that_are_damaged_one_after_the_other() {
    let parts: Parts = vec![("a", noise(41, 400)), ("b", noise(42, 400)), ("c", noise(43, 400)), ("d", noise(44, 400))];
    let case = Case::of(None, vec![parts, vec![("d", noise(44, 400))]]);
    let record = 64 + 400;
    for n in 0..3 {
        flip(&case.pack(0), 64 + n * record + 5);
    }
    let done = case.dry_run();
    assert!(done.packs[0].whole == 1 && done.packs[0].what.contains("3 records of its index"), "{done:?}");
    case.check("three of four", &[0]);
}

#[test]
fn behind_more_damage_than_is_searched_at_once() {
    let parts = vec![("a", noise(51, 1 << 20)), ("b", noise(52, (1 << 20) + 777)), ("c", noise(53, 1000))];
    let case = Case::of(None, vec![parts, vec![("c", noise(53, 1000))]]);
    let mut bytes = fs::read(case.pack(0)).unwrap();
    let last = bytes.len() - 1064;
    bytes[64..last].fill(b'R');
    fs::write(case.pack(0), bytes).unwrap();
    case.check("two MiB of R", &[0]);
}
