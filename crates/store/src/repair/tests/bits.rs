//! A bit in every region of every file.

use super::*;

/// The check that finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// The check of the structure.
    Structure,
    /// The check of the content.
    Content,
}

/// Flips a bit in each of these bytes: one for each field of a header of 64 bytes.
fn check_flip(key: Option<&Key>, level: Level, file: impl Fn(&Case) -> PathBuf, at: impl Fn(u64) -> u64, hurt: Hurt) {
    let case = Case::new(key.cloned());
    let path = file(&case);
    let offset = at(len(&path));
    let suffering = match hurt {
        Hurt::Nobody => Vec::new(),
        Hurt::Image(n) => vec![n],
        Hurt::WhoNeedsIt(pack) => case.needing(|n, from, to| n == pack && (from..to).contains(&offset)),
    };
    flip(&path, offset);
    let what = format!("byte {offset} of {}", path.display());
    assert_eq!(case.looks_sound(), level == Level::Content, "{what}");
    assert!(!case.reads_sound(), "{what}");
    case.check(&what, &suffering);
}

#[derive(Debug, Clone, Copy)]
enum Hurt {
    Nobody,
    Image(usize),
    WhoNeedsIt(usize),
}

fn keys() -> [Option<Key>; 2] {
    [None, Some(Key::new(&[7; 32]))]
}

#[test]
fn of_a_manifest() {
    for at in [0, 5, 300, 1000] {
        check_flip(
            None,
            Level::Structure,
            |case| case.images[0].0.dir.join("manifest.json").path().to_owned(),
            |_| at,
            Hurt::Image(0),
        );
    }
    check_flip(
        None,
        Level::Structure,
        |case| case.images[1].0.dir.join("manifest.json").path().to_owned(),
        |len| len - 1,
        Hurt::Image(1),
    );
}

#[test]
fn of_a_chunk_map() {
    // Magic, version, parts, extents, zeros; the number of extents, kind, length and name of the first; the hash.
    for at in [0, 16, 20, 24, 40, 64, 72, 76, 90] {
        check_flip(
            None,
            Level::Structure,
            |case| case.images[1].0.dir.join("chunks").path().to_owned(),
            |_| at,
            Hurt::Image(1),
        );
    }
    for back in [32, 1] {
        check_flip(
            None,
            Level::Structure,
            |case| case.images[0].0.dir.join("chunks").path().to_owned(),
            |len| len - back,
            Hurt::Image(0),
        );
    }
}

#[test]
fn of_an_index() {
    // Magic, version, flags, size of the pack, count, zeros; name, offset, lengths, codec, zeros of the first; the hash.
    for at in [0, 16, 20, 24, 32, 45, 64, 96, 104, 108, 112, 115] {
        check_flip(None, Level::Structure, |case| case.index(0), |_| at, Hurt::Nobody);
    }
    for back in [32, 1] {
        check_flip(None, Level::Structure, |case| case.index(1), |len| len - back, Hurt::Nobody);
    }
}

#[test]
fn of_the_begin_of_a_pack() {
    for key in keys() {
        // Magic, version, flags, id of the key, zeros, check.
        for at in [0, 16, 20, 24, 39, 45, 63] {
            check_flip(key.as_ref(), Level::Structure, |case| case.pack(0), |_| at, Hurt::Nobody);
        }
    }
}

#[test]
fn of_a_record() {
    for key in keys() {
        // Magic, codec, zeros, lengths, name, zeros, check; then the body: the nonce where it is sealed, and what follows.
        for at in [0, 4, 6, 8, 12, 16, 47, 50, 56, 63, 64, 70, 100, 600] {
            check_flip(key.as_ref(), Level::Content, |case| case.pack(0), |_| 64 + at, Hurt::WhoNeedsIt(0));
        }
        check_flip(key.as_ref(), Level::Content, |case| case.pack(0), |len| len - 1, Hurt::WhoNeedsIt(0));
        check_flip(key.as_ref(), Level::Content, |case| case.pack(1), |len| len - 1, Hurt::WhoNeedsIt(1));
    }
}

#[test]
fn of_each_record_of_a_pack() {
    let records = Case::new(None).indexes[0].entries().len();
    assert_eq!(records, 3);
    for n in 0..records {
        // Found by its position, because names are in random order.
        let offset = |case: &Case| {
            let mut all: Vec<u64> = case.indexes[0].entries().iter().map(|entry| entry.offset).collect();
            all.sort_unstable();
            all[n]
        };
        for within in [3, 64 + 20] {
            let at = offset(&Case::new(None)) + within;
            check_flip(None, Level::Content, |case| case.pack(0), |_| at, Hurt::WhoNeedsIt(0));
        }
    }
}

#[test]
fn a_header_that_is_lost_and_a_body_that_is_damaged() {
    for key in keys() {
        let case = Case::new(key);
        let bytes = fs::read(case.pack(0)).unwrap();
        let mut damaged = bytes.clone();
        damaged[..64].fill(0);
        damaged[64 + 64 + 3] ^= 1;
        fs::write(case.pack(0), &damaged).unwrap();
        let suffering = case.needing(|n, from, _| n == 0 && from == 64);
        assert!(!suffering.is_empty() && !case.looks_sound());
        case.check("the begin of a pack is zero", &suffering);
        assert!(fs::read(case.pack(0)).unwrap()[..64] == bytes[..64], "it is as it was");
    }
}

#[test]
fn what_a_newer_rekindle_wrote_is_left_alone() {
    // A complete header of another version.
    let case = Case::new(None);
    let mut pack = fs::read(case.pack(0)).unwrap();
    pack[16] = 2;
    let hash = blake3::hash(&pack[..56]);
    pack[56..64].copy_from_slice(&hash.as_bytes()[..8]);
    fs::write(case.pack(0), &pack).unwrap();
    let before = case.bytes();
    let done = case.repair();
    assert!(case.bytes() == before, "nothing is changed, and no image marked");
    let [left] = &done.packs[..] else { panic!("{done:?}") };
    assert!(left.outcome == Outcome::LeftAlone && left.what.contains("version 2"), "{left:?}");
    assert_eq!(done.images.iter().map(|it| it.loss).collect::<Vec<_>>(), [Loss::NotKnown; 2]);
    assert!(!done.is_whole());
    assert!(case.collect().is_err(), "and nothing of it is swept");

    // The same for a manifest.
    let case = Case::new(None);
    let path = case.images[0].0.dir.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"version\": 2", "\"version\": 9", 1)).unwrap();
    let done = case.repair();
    assert_eq!(done.images.iter().map(|it| (it.image, it.loss)).collect::<Vec<_>>(), [(case.id(0), Loss::NotKnown)]);
    assert!(!done.is_whole() && case.collect().is_err());
}
