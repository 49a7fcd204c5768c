//! Nothing unreadable is deleted. Root can read despite permissions, so other obstacles are used.

use super::*;
use retention::survey::{self, Survey};
use retention::{FactKind, Facts, Policy};
use std::os::unix::fs::{PermissionsExt, symlink};

const OBSTACLES: [fn(&Path); 2] = [|path| fs::write(path, b"x").unwrap(), |path| symlink(path, path).unwrap()];

#[test]
fn an_unreadable_folder_is_never_empty() {
    for obstacle in OBSTACLES {
        let home = Home::new();
        let image = home.publish(0);
        fs::create_dir(home.image_path(".tmp-000002-20270115T080000Z")).unwrap();
        fs::write(home.folder.path().join(".tmp-job.json-1-1"), b"x").unwrap();
        fs::rename(home.folder.images_dir(), home.folder.path().join("away")).unwrap();
        obstacle(home.folder.images_dir().path());
        let before = snapshot(home.store.path());
        assert!(matches!(home.folder.images(), Err(Error::Read { .. })));
        assert!(matches!(home.folder.find(LATEST), Err(Error::Read { .. })));
        assert!(matches!(home.folder.sweep_leftovers(&home.lock), Err(Error::Read { .. })));
        assert!(matches!(home.folder.remove(&home.lock, &image.id), Err(Error::Read { .. })));
        assert!(matches!(home.folder.begin_image(&home.lock, at(0)), Err(Error::Read { .. })));
        assert_eq!(snapshot(home.store.path()), before);
    }
}

#[test]
fn an_unreadable_manifest_protects_its_image() {
    let obstacles: [fn(&Path); 3] = [
        OBSTACLES[1],
        |path| fs::create_dir(path).unwrap(),
        |path| {
            nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        },
    ];
    for obstacle in obstacles {
        let home = Home::new();
        for seconds in 0..3 {
            let path = home.publish(seconds).dir.join("manifest.json");
            fs::remove_file(&path).unwrap();
            obstacle(path.path());
        }
        home.publish(3);
        nothing_goes(&home, 3);
    }
}

#[test]
fn a_file_or_a_loop_in_place_of_an_image_is_left_alone() {
    for obstacle in OBSTACLES {
        let home = Home::new();
        home.publish(0);
        obstacle(home.image_path("000009-20270115T080000Z").path());
        nothing_goes(&home, 1);
    }
}

/// Neither the strictest plan nor a sweep removes anything.
fn nothing_goes(home: &Home, unknown: usize) {
    let before = snapshot(home.store.path());
    let facts: Vec<Facts> = home.folder.images().unwrap().iter().map(Facts::from).collect();
    assert_eq!(facts.iter().filter(|it| it.kind == FactKind::Unknown).count(), unknown);
    let strictest = Policy { max_total: Some(0), ..Policy::default() };
    let survey = Survey::of(&home.folder, u64::MAX).unwrap();
    assert_eq!(survey.plan(&strictest, at(0)).removals().count(), 0);
    assert!(home.folder.sweep_leftovers(&home.lock).unwrap().is_empty());
    assert_eq!(snapshot(home.store.path()), before);
}

#[test]
fn removing_needs_the_image_to_be_there() {
    let home = Home::new();
    home.publish(0);
    let before = snapshot(home.store.path());
    let other = "000007-20270115T080000Z".parse().unwrap();
    assert!(matches!(home.folder.remove(&home.lock, &other), Err(Error::UnknownImage { .. })));
    assert_eq!(snapshot(home.store.path()), before);
}

#[test]
fn a_plan_is_carried_out() {
    let home = Home::new();
    let images: Vec<_> = (0..5).map(|seconds| home.publish(seconds)).collect();
    let policy = Policy { keep_last: 2, ..Policy::default() };
    let (_, gone) = survey::rotate(&home.folder, &home.lock, &policy, 0).unwrap();
    assert_eq!(gone, [images[0].id, images[1].id, images[2].id]);
    assert_eq!(home.ids(), [images[4].id.to_string(), images[3].id.to_string()]);
    assert!(home.folder.images().unwrap().iter().all(|image| image.verify().is_sound()));
    assert!(home.folder.sweep_leftovers(&home.lock).unwrap().is_empty());
}

#[test]
fn a_store_is_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"x").unwrap();
    for access in [Access::Read, Access::Write] {
        assert!(matches!(Store::open(&file, access), Err(Error::NotAFolder(_))));
        assert!(matches!(Store::open(&file.join("below"), access), Err(Error::Read { .. })));
    }
}

#[test]
fn root_refuses_what_others_can_write() {
    if !require("root", nix::unistd::geteuid().is_root(), "only root is told about the rights of others") {
        return;
    }
    let home = Home::new();
    for path in [home.folder.path(), home.store.path()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o770)).unwrap();
        let open = || Store::open(home.store.path(), Access::Read)?.job(home.folder.name());
        let error = open().unwrap_err();
        assert!(matches!(&error, Error::OthersCanWrite(at) if at == path), "{error}");
        assert!(error.to_string().contains(&format!("chmod 0700 '{}'", path.display())), "{error}");
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
        open().unwrap();
    }
}
