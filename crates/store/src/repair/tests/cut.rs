//! Files that are cut, missing, or somebody else's.

use super::*;

#[test]
fn a_pack_that_is_cut() {
    for key in [None, Some(Key::new(&[7; 32]))] {
        let whole = Case::new(key.clone());
        let length = len(&whole.pack(0));
        let mut ends: Vec<u64> = whole.indexes[0].entries().iter().map(|entry| entry.end()).collect();
        ends.sort_unstable();
        assert_eq!(ends.last(), Some(&length));
        // Nothing, inside the header, only the header, between records, inside a header and a body, the last byte.
        for at in [0, 30, 63, 64, ends[0], ends[1], ends[0] + 20, ends[0] + 64, ends[0] + 300, 100, length - 1] {
            let case = Case::new(key.clone());
            let suffering = case.needing(|n, _, end| n == 0 && end > at);
            assert!(!suffering.is_empty());
            fs::File::options().write(true).open(case.pack(0)).unwrap().set_len(at).unwrap();
            assert!(!case.looks_sound(), "cut at {at}");
            case.check(&format!("cut at {at}"), &suffering);
        }
    }
}

#[test]
fn a_pack_that_has_grown() {
    let case = Case::new(None);
    let mut bytes = fs::read(case.pack(0)).unwrap();
    bytes.extend(noise(9, 500));
    fs::write(case.pack(0), bytes).unwrap();
    assert!(!case.looks_sound());
    case.check("noise follows the last record", &[]);
}

#[test]
fn a_pack_of_noise() {
    let case = Case::new(None);
    fs::write(case.pack(0), noise(9, 5000)).unwrap();
    case.check("all of it is something else", &[0, 1]);
}

#[test]
fn an_index_that_is_missing_or_cut() {
    let case = Case::new(None);
    fs::remove_file(case.index(0)).unwrap();
    fs::write(case.index(1), b"").unwrap();
    assert!(!case.looks_sound());
    case.check("no index", &[]);

    // The pack is damaged too: what follows the damage is found.
    let case = Case::new(None);
    fs::remove_file(case.index(0)).unwrap();
    flip(&case.pack(0), 64);
    let suffering = case.needing(|n, from, _| n == 0 && from == 64);
    let error = case.collect().unwrap_err();
    assert!(error.to_string().contains("rekindle repair"), "{error}");
    case.check("no index, and the first header damaged", &suffering);
}

#[test]
fn a_pack_that_is_missing() {
    let case = Case::new(None);
    fs::remove_file(case.pack(1)).unwrap();
    assert!(!case.looks_sound());
    assert!(case.collect().is_err(), "an index without a pack");
    case.check("only the index is left", &[1]);

    let case = Case::new(None);
    fs::remove_file(case.pack(0)).unwrap();
    fs::remove_file(case.index(0)).unwrap();
    assert!(!case.looks_sound());
    case.check("pack and index are gone", &[0, 1]);
}

#[test]
fn a_chunk_map_or_a_manifest_that_is_missing() {
    for name in ["chunks", "manifest.json"] {
        let case = Case::new(None);
        fs::remove_file(case.images[0].0.dir.join(name)).unwrap();
        assert!(!case.looks_sound());
        case.check(name, &[0]);
        // The map of another image.
        let case = Case::new(None);
        fs::copy(case.images[1].0.dir.join(name), case.images[0].0.dir.join(name)).unwrap();
        assert!(!case.looks_sound());
        case.check(name, &[0]);
    }
}

#[test]
fn an_index_of_another_pack() {
    let case = Case::new(None);
    fs::copy(case.index(1), case.index(0)).unwrap();
    assert!(!case.looks_sound());
    case.check("of another length", &[]);

    // The index of a pack of the same length: only its content differs.
    let other = vec![("x", noise(21, 1000)), ("y", noise(22, 900)), ("z", noise(23, 1100))];
    let case = Case::of(None, vec![first(), other]);
    assert_eq!(len(&case.pack(0)), len(&case.pack(1)));
    fs::copy(case.index(1), case.index(0)).unwrap();
    assert!(!case.looks_sound(), "the chunks of the first pack are in no index");
    let done = case.dry_run();
    assert!(done.packs[0].what.contains("of another pack") && done.packs[0].outcome == Outcome::Repaired, "{done:?}");
    case.check("of the same length", &[]);
}

#[test]
fn a_chunk_that_is_in_two_packs_is_lost_with_both_only() {
    let case = Case::new(None);
    let other = PackName::random().unwrap();
    fs::copy(case.pack(0), case.dir().pack_path(other)).unwrap();
    fs::copy(case.index(0), case.dir().index_path(other)).unwrap();
    flip(&case.pack(0), 64 + 64);
    case.check("one of two", &[]);
}

#[test]
fn a_loose_image_is_looked_at_too() {
    let case = Case::new(None);
    let folder = &case.ground.folder;
    let draft = folder.begin_image(&case.ground.lock, DateTime::UNIX_EPOCH).unwrap();
    fs::write(draft.dir().join("a"), b"one").unwrap();
    let mut manifest = crate::sample_manifest();
    manifest.id = folder.next_id(DateTime::UNIX_EPOCH).unwrap();
    manifest.id = ImageId::new(manifest.id.sequence() - 1, DateTime::UNIX_EPOCH);
    let loose = draft.publish_loose(manifest);
    assert_eq!(case.repair(), Repaired::default());
    fs::write(loose.dir.join("a"), b"two").unwrap();
    let done = case.repair();
    assert_eq!((done.images.len(), done.images[0].image), (1, loose.id));
    assert!(done.images[0].what.contains("a: wrong hash"), "{done:?}");
    assert!(!Image::load(&loose.dir, loose.id, &Default::default()).is_good());
}
