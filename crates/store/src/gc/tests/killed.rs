//! The process is killed at every numbered step of persist, remove, sweep and repack, and the disk is full at every write.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use super::*;
use crate::{Access, Store, unpack};
use rekindle_testing::points::{self, Fault};

const GROUND: &str = "REKINDLE_TEST_GROUND";
const TEST: &str = "gc::tests::killed::lives";

fn content(number: u32) -> Vec<(&'static str, Vec<u8>)> {
    let seed = u8::try_from(number).unwrap();
    // The first part is the same in all images, the second differs.
    vec![("criu/a", noise(200, 2 * CHUNK)), ("criu/b", noise(seed, 6 * CHUNK + 10))]
}

/// Does what a supervisor does with its store, in the folder that the variable names. Appends the images that were
/// published to `done`.
#[test]
#[ignore = "the tests below start it, and kill it"]
fn lives() {
    rekindle_os::point::inject(|step| points::reached(step == rekindle_os::point::Step::Write));
    let root = std::path::PathBuf::from(std::env::var_os(GROUND).expect("the tests below name it"));
    let ground = Ground::in_folder(&root);
    let note = |number: u32| fs::write(root.join("done"), number.to_string()).unwrap();
    ground.folder.sweep_leftovers(&ground.lock).unwrap();
    let first = ground.folder.images().unwrap().first().map_or(0, |image| image.id.sequence());
    for number in first + 1..=first + 3 {
        let staged = ground.stage(number, &content(number));
        // A full disk refuses; nothing else may fail.
        match ground.persist(&staged) {
            Ok(_) => note(number),
            Err(error) => assert!(error.is_full(), "{error:?}"),
        }
        let images = ground.folder.images().unwrap();
        for old in images.iter().skip(1) {
            if let Err(error) = ground.folder.remove(&ground.lock, &old.id) {
                assert!(rekindle_base::chain(&error).contains("no storage space"), "{error:?}");
            }
        }
        let bounds =
            Bounds { sweep_after: Duration::ZERO, repack: Some(u64::MAX), key: None, copies: Copies::One, min_free: 0 };
        for seconds in 0..3 {
            let _ = collect(&ground.folder, &ground.lock, &bounds, at(i64::from(number) * 10 + seconds), &|| false);
        }
    }
}

/// In all cases images are complete, the newest published one exists, and work can continue.
fn check(path: &Path) {
    let said = fs::read_to_string(path.join("done")).map_or(0, |text| text.parse::<u32>().unwrap());
    let store = Store::open(&path.join("store"), Access::Write).unwrap();
    let folder = store.create_job(&"j".parse().unwrap()).unwrap();
    let lock = folder.lock().unwrap();
    for _ in 0..2 {
        let images = folder.images().unwrap();
        assert!(images.iter().all(Image::is_good), "{images:?}");
        let newest = images.first().map_or(0, |image| image.id.sequence());
        assert!(newest >= said, "image {said} was published, and the newest is {newest}");
        for image in &images {
            let into = tempfile::tempdir_in(path).unwrap();
            let progress = crate::persist::Progress::default();
            unpack::unpack(image, &folder, &crate::tests::beneath(into.path()), None, 1, &progress, &|| false).unwrap();
            for (part, bytes) in content(image.id.sequence()) {
                assert!(fs::read(into.path().join(part)).unwrap() == bytes, "{part} of {}", image.id);
            }
        }
        // The next start, and what it finds.
        folder.sweep_leftovers(&lock).unwrap();
        let bounds =
            Bounds { sweep_after: Duration::ZERO, repack: Some(u64::MAX), key: None, copies: Copies::One, min_free: 0 };
        collect(&folder, &lock, &bounds, at(1000), &|| false).unwrap();
    }
    let (bytes, needed) = usage(&folder, Copies::One).unwrap();
    let packs = folder.packs().index().unwrap().packs().len() as u64;
    assert!(needed == 0 || bytes <= 2 * needed + packs * 64, "{bytes} bytes in packs, {needed} needed");
    let names = |dir: &Path| -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let left = |name: &String| name.starts_with('.');
    assert!(!names(folder.images_dir().path()).iter().any(left), "{:?}", names(folder.images_dir().path()));
    assert!(!names(folder.packs().dir().path()).iter().any(left), "{:?}", names(folder.packs().dir().path()));
}

/// Runs it with the fault at the first point, then the second, and so on until no point is left; always in the same
/// folder, which accumulates leftovers of many crashes.
fn at_every_point(fault: impl Fn(u64) -> Fault, is_over: impl Fn(&std::process::ExitStatus) -> bool) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    for number in 1.. {
        let status = points::run(TEST, fault(number), &[(GROUND, OsStr::new(dir.path()))]);
        if is_over(&status) {
            return number;
        }
        check(dir.path());
        // Numbers of images end at 255 in this test.
        let store = dir.path().join("store/j");
        if number % 20 == 0 {
            fs::remove_dir_all(store).unwrap();
            let _ = fs::remove_file(dir.path().join("done"));
        }
    }
    unreachable!()
}

#[test]
fn killed_at_every_step() {
    let killed = |status: &std::process::ExitStatus| status.signal() == Some(libc::SIGKILL);
    let points = at_every_point(Fault::Kill, |status| {
        assert!(killed(status) || status.success(), "{status}");
        status.success()
    });
    assert!(points > 60, "{points} points only");
}

#[test]
fn the_disk_is_full_at_every_write() {
    for number in 1..60 {
        let dir = tempfile::tempdir().unwrap();
        let status = points::run(TEST, Fault::Full(number), &[(GROUND, OsStr::new(dir.path()))]);
        assert!(status.success(), "{status} at {number}");
        check(dir.path());
    }
}
