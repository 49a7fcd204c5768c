//! Every file is damaged in turn.

use super::*;
use std::fs::OpenOptions;

fn rewrite(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

fn flip(path: &Path, place: usize) {
    rewrite(path, |bytes| bytes[place] ^= 1);
}

/// The one problem of an image.
fn problem(image: &Image) -> (String, Finding) {
    let report = image.verify();
    assert!(!report.is_sound());
    let problems: Vec<_> = report.problems().collect();
    let [problem] = problems[..] else { panic!("{report:?}") };
    (problem.path.to_str().unwrap().to_owned(), problem.finding.clone())
}

#[test]
fn every_damage_of_every_part_is_found() {
    let whole = Home::new().publish(0).manifest().unwrap().parts.clone();
    assert_eq!(whole.len(), 3);
    for part in &whole {
        let damaged = |damage: &dyn Fn(&Path)| {
            let home = Home::new();
            let image = home.publish(0);
            damage(image.dir.join(&part.path).path());
            let (path, finding) = problem(&image);
            assert_eq!(path, part.path.as_str());
            finding
        };
        let size = usize::try_from(part.size).unwrap();
        let resized = |found| Finding::WrongSize { expected: part.size, found };
        for place in [0, size / 2, size.saturating_sub(1)].into_iter().filter(|place| *place < size) {
            assert_eq!(damaged(&|path| flip(path, place)), Finding::WrongHash);
        }
        if size > 0 {
            assert_eq!(damaged(&|path| rewrite(path, |bytes| bytes.truncate(size - 1))), resized(part.size - 1));
            assert_eq!(damaged(&|path| fs::write(path, b"").unwrap()), resized(0));
        }
        assert_eq!(damaged(&|path| rewrite(path, |bytes| bytes.push(0))), resized(part.size + 1));
        assert_eq!(damaged(&|path| fs::remove_file(path).unwrap()), Finding::Missing);
        let odd: [fn(&Path); 3] = [
            |path| fs::create_dir(path).unwrap(),
            |path| std::os::unix::fs::symlink("manifest.json", path).unwrap(),
            |path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        ];
        for make in odd {
            let finding = damaged(&|path| {
                fs::remove_file(path).unwrap();
                make(path);
            });
            assert!(matches!(finding, Finding::Unreadable { .. }), "{finding:?}");
        }
    }
}

#[test]
fn what_does_not_belong_there_is_found() {
    let home = Home::new();
    let image = home.publish(0);
    fs::write(image.dir.join("criu/core-2.img"), b"x").unwrap();
    assert_eq!(problem(&image), ("criu/core-2.img".to_owned(), Finding::Extra));
}

#[test]
fn a_folder_that_became_a_link_is_found() {
    let home = Home::new();
    let image = home.publish(0);
    let elsewhere = home.dir.path().join("elsewhere");
    fs::rename(image.dir.join("criu"), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, image.dir.join("criu")).unwrap();
    let report = image.verify();
    let found = |path: &str| &report.parts.iter().find(|part| part.path == std::path::Path::new(path)).unwrap().finding;
    assert_eq!(found("criu"), &Finding::Extra);
    // The target of a link is not examined.
    assert!(matches!(found("criu/pages-1.img"), Finding::Unreadable { .. }));
}

fn damage_of(home: &Home) -> Damage {
    let images = home.folder.images().unwrap();
    let [Image { state: State::Damaged { why }, .. }] = &images[..] else { panic!("{images:?}") };
    let report = images[0].verify();
    assert!(!report.is_sound());
    assert_eq!(report.manifest.as_ref(), Some(why));
    why.clone()
}

#[test]
fn every_flipped_bit_of_a_manifest_is_found() {
    let home = Home::new();
    let path = home.publish(0).dir.join("manifest.json");
    let whole = fs::read(&path).unwrap();
    for place in 0..whole.len() {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << bit;
            assert!(Manifest::parse(&bytes, &Default::default()).is_err(), "byte {place}, bit {bit}");
        }
    }
    flip(path.path(), whole.len() / 2);
    assert_eq!(damage_of(&home).kind, DamageKind::Broken);
}

#[test]
fn every_cut_of_a_manifest_is_found() {
    let home = Home::new();
    let path = home.publish(0).dir.join("manifest.json");
    let whole = fs::read(&path).unwrap();
    for size in 0..whole.len() {
        assert!(Manifest::parse(&whole[..size], &Default::default()).is_err(), "cut to {size}");
    }
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(damage_of(&home).kind, DamageKind::Broken);
    fs::remove_file(&path).unwrap();
    assert_eq!(damage_of(&home).detail, "it has no manifest.json");
}

#[test]
fn a_newer_version_is_refused_by_name() {
    let home = Home::new();
    let path = home.publish(0).dir.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"version\": 1", "\"version\": 9", 1)).unwrap();
    let damage = damage_of(&home);
    assert_eq!(damage.kind, DamageKind::Newer);
    let known = format!("up to {}", manifest::VERSION);
    assert!(damage.detail.contains("version 9") && damage.detail.contains(&known), "{damage}");
}

#[test]
fn a_huge_manifest_is_not_read() {
    let home = Home::new();
    let path = home.publish(0).dir.join("manifest.json");
    OpenOptions::new().write(true).open(path).unwrap().set_len(manifest::MAX_BYTES + 1).unwrap();
    assert!(damage_of(&home).detail.contains("larger than"));
}

#[test]
fn the_manifest_of_another_image_is_refused() {
    let home = Home::new();
    let first = home.publish(0);
    fs::rename(&first.dir, home.image_path("000009-20270115T080000Z")).unwrap();
    assert!(damage_of(&home).detail.contains("belongs to image 000001-"));
}

#[test]
fn marks_come_and_go() {
    let home = Home::new();
    let older = home.publish(0);
    let mut image = home.publish(1);
    let mark = BadMark { why: BadWhy::DiesAgain, detail: "exit 1 after 2 s".to_owned(), when: at(5) };
    image.mark_bad(mark.clone()).unwrap();
    assert!(matches!(&image.state, State::Bad { mark: found, .. } if *found == mark));
    assert_eq!(home.folder.images().unwrap()[0], image);
    assert_eq!(home.folder.find(LATEST).unwrap(), older);
    assert!(image.verify().is_sound());
    image.clear_bad().unwrap();
    image.clear_bad().unwrap();
    assert_eq!(home.folder.find(LATEST).unwrap(), image);
}

#[test]
fn a_mark_that_cannot_be_read_is_a_mark() {
    let home = Home::new();
    let image = home.publish(0);
    let path = image.dir.join("bad.json");
    fs::write(&path, b"").unwrap();
    assert!(matches!(&home.folder.images().unwrap()[0].state, State::Bad { .. }));
    fs::remove_file(&path).unwrap();
    // It is no damage, and nothing is removed because of it.
    let spoil: [fn(&Path); 2] =
        [|path| fs::create_dir(path).unwrap(), |path| std::os::unix::fs::symlink("bad.json", path).unwrap()];
    for make in spoil {
        make(path.path());
        let image = home.folder.images().unwrap().remove(0);
        assert_eq!(damage_of(&home).kind, DamageKind::Unexpected);
        assert!(!image.is_good() && !image.is_damaged());
        fs::remove_dir(&path).or_else(|_| fs::remove_file(&path)).unwrap();
    }
    assert!(home.folder.images().unwrap()[0].is_good());
}
