//! Damage of packs, indexes and maps is found and reported.

use super::*;
use crate::pack::Packs;
use crate::verify::{Finding, Share, check_packs};
use rekindle_base::chain;

fn one_image() -> (Ground, Image) {
    let ground = Ground::new();
    let image = ground.persist(&ground.stage(1, &[("criu/a", noise(1, 3 * CHUNK)), ("b", noise(2, 100))])).unwrap();
    (ground, image)
}

fn the_pack(packs: &Packs) -> (crate::pack::PackName, std::path::PathBuf) {
    let names = packs.names().unwrap();
    assert_eq!(names.len(), 1);
    (names[0], packs.pack_path(names[0]).path().to_owned())
}

#[test]
fn a_damaged_chunk_is_named_with_its_part_and_its_pack() {
    let (ground, image) = one_image();
    let (name, path) = the_pack(&ground.folder.packs());
    // In the header of the second record, in its bytes, and in the last one.
    let second = 64 + 64 + CHUNK as u64;
    let last = fs::metadata(&path).unwrap().len() - 1;
    for (place, part, offset) in [(second + 20, "criu/a", CHUNK), (second + 64 + 17, "criu/a", CHUNK), (last, "b", 0)] {
        flip(&path, place);
        let error = ground.unpack(&image, None).unwrap_err();
        let text = chain(&error);
        assert!(error.is_damage(), "{text}");
        for word in [format!("\"{part}\""), format!("byte {offset}"), name.to_string()] {
            assert!(text.contains(&word), "{word} in: {text}");
        }
        flip(&path, place);
        ground.unpack(&image, None).unwrap();
    }
}

#[test]
fn a_chunk_that_is_in_another_pack_too_is_taken_from_there() {
    let (ground, image) = one_image();
    let packs = ground.folder.packs();
    let (name, path) = the_pack(&packs);
    let other = crate::pack::PackName::random().unwrap();
    fs::copy(&path, packs.pack_path(other)).unwrap();
    fs::copy(packs.index_path(name), packs.index_path(other)).unwrap();
    for damaged in [name, other] {
        flip(packs.pack_path(damaged).path(), 64 + 64 + 5);
        ground.assert_holds(&image, &[("criu/a", noise(1, 3 * CHUNK)), ("b", noise(2, 100))], None);
        flip(packs.pack_path(damaged).path(), 64 + 64 + 5);
    }
    for damaged in [name, other] {
        flip(packs.pack_path(damaged).path(), 64 + 64 + 5);
    }
    assert!(ground.unpack(&image, None).unwrap_err().is_damage());
}

#[test]
fn a_pack_that_is_cut_or_gone_is_named_and_its_index_is_not_missed() {
    let (ground, image) = one_image();
    let packs = ground.folder.packs();
    let (name, path) = the_pack(&packs);
    let whole = fs::read(&path).unwrap();
    fs::remove_file(packs.index_path(name)).unwrap();
    ground.unpack(&image, None).unwrap();
    fs::write(packs.index_path(name), b"not an index").unwrap();
    ground.unpack(&image, None).unwrap();
    // The second record is cut: its chunk is in no pack.
    fs::write(&path, &whole[..64 + 64 + CHUNK + 100]).unwrap();
    let error = ground.unpack(&image, None).unwrap_err();
    assert!(error.is_damage() && chain(&error).contains("in no pack"), "{}", chain(&error));
    fs::remove_file(&path).unwrap();
    let error = ground.unpack(&image, None).unwrap_err();
    assert!(error.is_damage() && chain(&error).contains("byte 0 of \"criu/a\" cannot be read"), "{}", chain(&error));
}

#[test]
fn a_damaged_map_is_named() {
    let (ground, image) = one_image();
    let path = image.dir.join("chunks");
    let len = fs::metadata(&path).unwrap().len();
    for place in [0, 20, 70, len - 1] {
        flip(path.path(), place);
        let error = ground.unpack(&image, None).unwrap_err();
        assert!(error.is_damage() && chain(&error).contains("chunk map"), "{}", chain(&error));
        flip(path.path(), place);
    }
    fs::remove_file(&path).unwrap();
    let error = ground.unpack(&image, None).unwrap_err();
    assert!(matches!(error, unpack::Error::Map { .. }), "{error:?}");
    assert!(error.is_damage() && chain(&error).contains("chunks"), "{}", chain(&error));
}

#[test]
fn a_place_that_can_not_be_written_is_no_damage() {
    let (ground, image) = one_image();
    let into = tempfile::tempdir().unwrap();
    fs::write(into.path().join("b"), b"in the way").unwrap();
    let error =
        unpack(&image, &ground.folder, &crate::tests::beneath(into.path()), None, 1, &Progress::default(), &|| false)
            .unwrap_err();
    assert!(matches!(&error, unpack::Error::Write { path, .. } if path.ends_with("b")), "{error:?}");
    assert!(!error.is_damage());
}

#[test]
fn unpacking_can_be_called_off() {
    let (ground, image) = one_image();
    let into = tempfile::tempdir().unwrap();
    let result =
        unpack(&image, &ground.folder, &crate::tests::beneath(into.path()), None, 1, &Progress::default(), &|| true);
    assert!(matches!(result, Err(unpack::Error::Cancelled)), "{result:?}");
}

fn findings(image: &Image, key: Option<&Key>) -> Vec<(String, Finding)> {
    let report = image.verify_content(key, 2, &Progress::default(), &|| false).unwrap();
    report.problems().map(|part| (part.path.to_str().unwrap().to_owned(), part.finding.clone())).collect()
}

#[test]
fn verify_finds_a_damaged_chunk_when_it_reads_content() {
    let (ground, image) = one_image();
    let (_, path) = the_pack(&ground.folder.packs());
    assert!(image.verify().is_sound());
    assert_eq!(findings(&image, None), []);
    // The bytes of the second and the third record.
    let record = 64 + CHUNK as u64;
    for n in [1, 2] {
        flip(&path, 64 + n * record + 64 + 5);
    }
    assert!(image.verify().is_sound(), "nobody read it");
    let found = findings(&image, None);
    let [(part, Finding::Chunks { count: 2, offset, why })] = &found[..] else { panic!("{found:?}") };
    assert_eq!((part.as_str(), *offset), ("criu/a", CHUNK as u64));
    assert!(why.contains(path.to_str().unwrap()), "{why}");

    let all = |share| check_packs(&ground.folder, None, share, 2, &Progress::default(), &|| false).unwrap();
    let report = all(Share::ALL);
    assert_eq!((report.packs, report.read, report.chunks, report.problems.len()), (1, 1, 2, 1));
    assert_eq!((report.problems[0].chunks, &report.problems[0].path), (2, &path));
    assert!(all(Share::percent(0).unwrap()).is_sound(), "nothing is read");
    assert!(Share::percent(101).is_none());
}

#[test]
fn verify_finds_what_is_in_no_pack_without_reading_content() {
    let (ground, image) = one_image();
    let (_, path) = the_pack(&ground.folder.packs());
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..64 + 2 * (64 + CHUNK) + 10]).unwrap();
    let report = image.verify();
    let problems: Vec<_> = report.problems().collect();
    assert_eq!(problems.len(), 2, "{report:?}");
    assert!(matches!(&problems[0].finding, Finding::Chunks { count: 1, offset: 0, why } if why.contains("no pack")));
    let place = 2 * CHUNK as u64;
    assert!(matches!(&problems[1].finding, Finding::Chunks { count: 1, offset, .. } if *offset == place));
    let report = check_packs(&ground.folder, None, Share::ALL, 2, &Progress::default(), &|| false).unwrap();
    assert!(report.problems[0].why.contains("nothing can be read from byte"), "{report:?}");

    flip(image.dir.join("chunks").path(), 70);
    let report = image.verify();
    let broken = |finding: &Finding| matches!(finding, Finding::Broken { .. });
    assert!(report.problems().any(|part| part.path.ends_with("chunks") && broken(&part.finding)), "{report:?}");
    fs::remove_file(image.dir.join("chunks")).unwrap();
    assert!(image.verify().problems().any(|part| part.finding == Finding::Missing));
    fs::write(image.dir.join("stray"), b"x").unwrap();
    assert!(image.verify().problems().any(|part| part.finding == Finding::Extra));
}

#[test]
fn a_share_of_the_packs_is_chosen_anew_each_time() {
    let ground = Ground::new();
    for number in 1..=10 {
        ground.persist(&ground.stage(number, &[("a", noise(u8::try_from(number).unwrap(), 100))])).unwrap();
    }
    let packs = ground.folder.packs();
    let names = packs.names().unwrap();
    assert_eq!(names.len(), 10);
    names.iter().for_each(|name| flip(packs.pack_path(*name).path(), 64 + 64 + 5));
    let mut seen = std::collections::HashSet::new();
    for _ in 0..200 {
        let share = Share::percent(21).unwrap();
        let report = check_packs(&ground.folder, None, share, 2, &Progress::default(), &|| false).unwrap();
        assert_eq!((report.packs, report.read, report.problems.len()), (10, 3, 3));
        seen.extend(report.problems.into_iter().map(|problem| problem.path));
    }
    assert_eq!(seen.len(), 10);
}
