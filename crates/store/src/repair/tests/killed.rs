//! The process is killed at every numbered step of a repair, or the disk is full there: the next repair has the same
//! result as an uninterrupted one.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::*;
use crate::{Access, Store};
use rekindle_testing::points::{self, Fault};

const GROUND: &str = "REKINDLE_TEST_GROUND";
const TEST: &str = "repair::tests::killed::repairs";

#[test]
#[ignore = "the test below starts it, and kills it"]
fn repairs() {
    rekindle_os::point::inject(|step| points::reached(step == rekindle_os::point::Step::Write));
    let root = PathBuf::from(std::env::var_os(GROUND).expect("the test below names it"));
    // One thread, so that the order of the steps is fixed.
    drop(repair_in(&root));
}

fn repair_in(root: &Path) -> Result<Repaired, Error> {
    let folder = Store::open(&root.join("store"), Access::Write).unwrap().create_job(&"j".parse().unwrap()).unwrap();
    let lock = folder.lock().unwrap();
    folder.sweep_leftovers(&lock).unwrap();
    repair(&folder, Mode::Repair(&lock), None, &Sources::default(), 1, &Progress::default())
}

/// Every kind of work for a repair: headers, indexes, an index to be removed, images to be marked.
fn damaged() -> Case {
    let case = Case::of(None, vec![first(), second(), vec![("x", noise(61, 500))]]);
    let mut pack = fs::read(case.pack(0)).unwrap();
    pack[..64].fill(0);
    pack[64 + 64 + 3] ^= 1;
    fs::write(case.pack(0), pack).unwrap();
    fs::remove_file(case.index(1)).unwrap();
    fs::remove_file(case.pack(2)).unwrap();
    case
}

fn copy(from: &Case) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    let done = Command::new("cp").arg("-a").args([from.ground.dir.path().join("store").as_path(), to.path()]).status();
    assert!(done.unwrap().success());
    // The lock file names the holder of this process.
    fs::write(to.path().join("store/j/lock"), "").unwrap();
    to
}

/// All files below, without the lock and the times in marks.
fn outcome(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![root.join("store")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let short = path.strip_prefix(root).unwrap().to_owned();
            match path.is_dir() {
                true => folders.push(path),
                false if path.ends_with("lock") => {}
                false if path.ends_with("bad.json") => drop(all.insert(short, Vec::new())),
                false => drop(all.insert(short, fs::read(path).unwrap())),
            }
        }
    }
    all
}

#[test]
fn killed_at_every_step_and_full_at_every_write() {
    let case = damaged();
    let whole = copy(&case);
    let images = repair_in(whole.path()).unwrap().images;
    let expected = outcome(whole.path());
    assert!(!images.is_empty() && expected.keys().any(|path| path.ends_with("bad.json")));
    let run = |fault| {
        let ground = copy(&case);
        let status = points::run(TEST, fault, &[(GROUND, OsStr::new(ground.path()))]);
        assert_eq!(repair_in(ground.path()).unwrap().images, images, "{fault:?}");
        assert!(outcome(ground.path()) == expected, "{fault:?}");
        status
    };
    let mut points = 0;
    while run(Fault::Kill(points + 1)).signal() == Some(libc::SIGKILL) {
        points += 1;
    }
    assert!(points >= 8, "{points} points only");
    for point in 1..=points {
        assert!(run(Fault::Full(point)).success(), "{point}");
    }
}
