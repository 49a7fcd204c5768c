//! Encrypted packs: what can be checked with the key, without it, and with another one.

use super::*;

fn key() -> Key {
    Key::new(&[7; 32])
}

#[test]
fn without_the_key_it_is_said_what_was_not_checked() {
    let case = Case::new(Some(key()));
    // Inside a body: only the key shows the damage.
    flip(&case.pack(0), 64 + 64 + 50);
    let before = case.bytes();
    for (key, words) in [(None, "to the key file"), (Some(Key::new(&[8; 32])), "another key")] {
        let done = case.repair_with(key.as_ref());
        assert!(case.bytes() == before);
        assert_eq!((done.packs.len(), done.images.len()), (2, 0), "{done:?}");
        assert!(done.packs.iter().all(|it| it.outcome == Outcome::NotChecked && it.what.contains(words)), "{done:?}");
        assert!(!done.is_whole());
    }
    let suffering = case.needing(|n, from, _| n == 0 && from == 64);
    case.check("with the key", &suffering);
}

#[test]
fn without_the_key_nothing_comes_back_that_was_left_out_with_it() {
    let case = Case::new(Some(key()));
    flip(&case.pack(0), 64 + 64 + 50);
    let done = case.repair();
    let after = case.bytes();
    let blind = case.repair_with(None);
    assert!(case.bytes() == after, "{blind:?}");
    assert_eq!(blind.images, done.images);
}

#[test]
fn without_the_key_a_header_that_is_lost_is_known_to_be() {
    let case = Case::new(Some(key()));
    flip(&case.pack(0), 64 + 10);
    let suffering = case.needing(|n, from, _| n == 0 && from == 64);
    let done = case.repair_with(None);
    assert_eq!(done.images.len(), suffering.len());
    assert!(done.packs.iter().any(|it| it.pack == case.packs[0] && it.outcome == Outcome::Lost), "{done:?}");
    case.store_anew("without the key");
}

#[test]
fn a_begin_that_is_lost_needs_the_key() {
    let case = Case::new(Some(key()));
    let mut bytes = fs::read(case.pack(0)).unwrap();
    bytes[..64].fill(0);
    fs::write(case.pack(0), bytes).unwrap();
    let before = case.bytes();
    for key in [None, Some(Key::new(&[8; 32]))] {
        let done = case.repair_with(key.as_ref());
        assert!(case.bytes() == before, "no image is marked for want of a key");
        let left = done.packs.iter().find(|it| it.pack == case.packs[0]).unwrap();
        assert!(left.outcome == Outcome::LeftAlone && left.what.contains("store.encryption-key"), "{left:?}");
        assert!(done.images.iter().all(|it| it.loss == Loss::NotKnown) && done.images.len() == 2, "{done:?}");
    }
    case.check("with the key", &[]);
}

#[test]
fn a_pack_from_before_there_was_a_key_is_checked() {
    let case = Case::new(None);
    flip(&case.pack(0), 64 + 64 + 50);
    let suffering = case.needing(|n, from, _| n == 0 && from == 64);
    let done = case.repair_with(Some(&key()));
    assert_eq!(done.images.len(), suffering.len(), "{done:?}");
    assert_eq!(done.packs.iter().map(|it| it.outcome).collect::<Vec<_>>(), [Outcome::Lost], "{done:?}");

    // The header is damaged too.
    let case = Case::new(None);
    let bytes = fs::read(case.pack(0)).unwrap();
    fs::write(case.pack(0), [&[0; 64], &bytes[64..]].concat()).unwrap();
    assert!(case.repair_with(Some(&key())).is_whole());
    assert!(fs::read(case.pack(0)).unwrap() == bytes);
}
