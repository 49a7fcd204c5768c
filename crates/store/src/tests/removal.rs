//! The removal of a whole job: all of it or nothing that counts as a job, wherever it is interrupted.

use super::*;
use crate::names::DELETED_PREFIX;
use manifest::SavedLink;
use rekindle_testing::points::{self, Fault};
use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;

const GROUND: &str = "REKINDLE_TEST_GROUND";

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_removed_job_leaves_nothing() {
    let home = Home::new();
    home.publish(0);
    // A link beside the user's files.
    let saved = home.dir.path().join(".rekindle-link-own");
    fs::write(&saved, "theirs").unwrap();
    let draft = home.folder.begin_image(&home.lock, at(1)).unwrap();
    fill(draft.dir());
    let link = SavedLink { link: "/gone".into(), saved: saved.clone().into(), owner: None, names: Vec::new() };
    draft.publish_loose(Manifest { saved_links: vec![link], ..manifest() });
    home.store.remove_job(&home.folder, &home.lock, Pinned::Keep).unwrap();
    assert_eq!(names(home.store.path()), [""; 0]);
    assert!(!saved.exists());
    assert!(matches!(home.store.job(home.folder.name()), Err(Error::UnknownJob { .. })));
    // The name is free for a new one, and the old lock says nothing about it.
    let folder = home.store.create_job(home.folder.name()).unwrap();
    let lock = folder.lock().unwrap();
    drop(home.lock);
    lock.confirm().unwrap();
}

#[test]
fn a_pinned_image_keeps_its_job() {
    let home = Home::new();
    let image = home.publish(0);
    image.change_tags(Change::Pin).unwrap();
    assert_eq!(home.folder.pinned().unwrap(), [image.id]);
    let error = home.store.remove_job(&home.folder, &home.lock, Pinned::Keep).unwrap_err();
    assert!(matches!(error, Error::Pinned(id) if id == image.id), "{error}");
    assert_eq!(home.folder.images().unwrap(), [image]);
    home.store.remove_job(&home.folder, &home.lock, Pinned::Remove).unwrap();
    assert_eq!(names(home.store.path()), [""; 0]);
}

#[test]
fn memory_is_released_with_the_job() {
    if !rekindle_testing::root() {
        return;
    }
    let home = Home::new();
    let base = home.dir.path().join("memory");
    let area = staging::Area::open(&base, &home.folder, &home.lock, 1 << 20).unwrap();
    fs::write(area.path().join("slots/0/gpu"), vec![1; 8192]).unwrap();
    assert!(home.folder.memory() >= 8192);
    home.store.remove_job(&home.folder, &home.lock, Pinned::Keep).unwrap();
    assert!(!area.path().exists());
}

#[test]
fn two_do_not_remove_at_once() {
    let home = Home::new();
    let name = home.folder.name();
    let doomed = home.store.path().join(format!("{DELETED_PREFIX}{name}"));
    fs::rename(home.folder.path(), &doomed).unwrap();
    assert!(home.store.is_half_removed(name));
    assert_eq!(home.store.half_removed().unwrap().as_slice(), std::slice::from_ref(name));
    // The lock file moved with the folder, and is held.
    assert!(matches!(home.store.finish_removal(name), Err(Error::BeingRemoved(_))));
    drop(home.lock);
    // A child forked by another test has the lock until it calls exec.
    assert!(eventually(|| match home.store.finish_removal(name) {
        Err(Error::BeingRemoved(_)) => None,
        done => Some(done.unwrap()),
    }));
    assert!(!home.store.finish_removal(name).unwrap() && !home.store.is_half_removed(name));
}

/// Removes the job in the folder that the variable names.
#[test]
#[ignore = "the test below starts it, and kills it"]
fn removes() {
    let root = PathBuf::from(std::env::var_os(GROUND).expect("the test below names it"));
    let store = Store::open(&root, Access::Write).unwrap();
    let folder = store.job(&name("train")).unwrap();
    let lock = folder.lock().unwrap();
    rekindle_os::point::inject(|step| points::reached(step == rekindle_os::point::Step::Write));
    store.remove_job(&folder, &lock, Pinned::Keep).unwrap();
}

#[test]
fn a_half_removed_job_is_no_job_and_the_next_removal_finishes() {
    let mut interrupted = 0;
    for number in 1.. {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), Access::Write).unwrap();
        let folder = store.create_job(&name("train")).unwrap();
        let draft = folder.begin_image(&folder.lock().unwrap(), at(0)).unwrap();
        fill(draft.dir());
        draft.publish_loose(manifest());
        let variables = [(GROUND, OsStr::new(dir.path()))];
        let ended = points::run("tests::removal::removes", Fault::Kill(number), &variables);
        if ended.success() {
            break;
        }
        assert_eq!(ended.signal(), Some(9), "{ended}");
        match store.jobs().unwrap().is_empty() {
            // It was not begun: all of it is there.
            false => {
                let images = store.job(&name("train")).unwrap().images().unwrap();
                assert!(images.len() == 1 && images[0].verify().is_sound(), "{images:?}");
            }
            true => {
                let left = store.is_half_removed(&name("train"));
                interrupted += u32::from(left);
                assert!(matches!(store.job(&name("train")), Err(Error::UnknownJob { .. })));
                assert_eq!(store.finish_removal(&name("train")).unwrap(), left);
                assert_eq!(names(dir.path()), [""; 0]);
            }
        }
    }
    assert!(interrupted >= 2, "{interrupted} points after the rename");
}
