use std::os::unix::fs::{PermissionsExt, chown};

use super::super::rights::Maker;
use super::*;
use crate::samples::job_path;
use rekindle_os::identity::with_file_rights;
use rekindle_store::manifest::{Owner, TrackedEntry, TrackedKind};

/// The job's user, and another one.
const ALICE: u32 = 65_534;
const BOB: u32 = 1;

fn alice() -> Maker<'static> {
    Maker::plain(false, Trusted::user(ALICE))
}

fn root() -> Maker<'static> {
    Maker::plain(true, Trusted::of(None))
}

fn as_alice<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    with_file_rights(ALICE, ALICE, &[ALICE], work).unwrap()
}

/// A folder with this owner and mode.
fn folder(path: &Path, owner: u32, mode: u32) {
    fs::create_dir_all(path).unwrap();
    chown(path, Some(owner), Some(owner)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn file(path: &Path, owner: u32) {
    fs::write(path, path.file_name().unwrap().as_bytes()).unwrap();
    chown(path, Some(owner), Some(owner)).unwrap();
}

/// The tracked folder, with what it has: only folders.
fn tracked(data: &Path, below: &[&str]) -> TrackedFolder {
    let owner = Owner { uid: ALICE, gid: ALICE };
    let entry = |path: PathBuf| TrackedEntry {
        path: job_path(path),
        kind: TrackedKind::Folder { mode: 0o40_755, owner, attributes: None },
    };
    let entries = [data.to_path_buf()].into_iter().chain(below.iter().map(|name| data.join(name))).map(entry);
    TrackedFolder { path: job_path(data), entries: entries.collect() }
}

fn put_back(tracked: &TrackedFolder) -> Result<Vec<PathBuf>, RollbackError> {
    let mut aside = Aside::of(tracked, Trusted::user(ALICE), Expiry::of_all_but_the_newest())?;
    super::super::tracked::put_folder_back(&mut aside, alice())?;
    Ok(aside.finish())
}

fn ground() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

#[test]
fn names_of_ours_are_known() {
    for name in [".rekindle.rolled-back.1", ".rekindle.rolled-back.120"] {
        assert!(is_ours(OsStr::new(name)), "{name}");
    }
    for name in [".rekindle.rolled-back.", ".rekindle.rolled-back.1a", "data.rolled-back.1", ".rekindle", "x"] {
        assert!(!is_ours(OsStr::new(name)), "{name}");
    }
}

#[test]
fn what_is_replaced_is_kept_where_the_user_may_create_a_folder() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("data");
    let tracked = tracked(&data, &["sub"]);
    let make = |parent, owner| {
        folder(dir.path(), parent, 0o755);
        folder(&data, owner, 0o755);
        folder(&data.join("sub"), ALICE, 0o755);
        file(&data.join("sub/new"), ALICE);
    };
    for (parent, owner, kept) in [
        (ALICE, ALICE, "data.rolled-back.1/sub/new"),
        (0, ALICE, "data/.rekindle.rolled-back.1/sub/new"),
        (0, 0, "data/sub/.rekindle.rolled-back.1/new"),
    ] {
        make(parent, owner);
        let homes = as_alice(|| put_back(&tracked)).unwrap();
        assert!(matches!(homes.as_slice(), [home] if dir.path().join(kept).starts_with(home)), "{homes:?}");
        assert_eq!(fs::read(dir.path().join(kept)).unwrap(), b"new", "{kept}");
        let home = fs::metadata(&homes[0]).unwrap();
        assert_eq!((home.uid(), home.mode() & 0o7777), (ALICE, 0o700));
        // It is no part of the folder, and the next one replaces it.
        assert!(as_alice(|| put_back(&tracked)).unwrap().is_empty());
        file(&data.join("sub/new"), ALICE);
        let newer = as_alice(|| put_back(&tracked)).unwrap();
        assert!(newer[0].to_str().unwrap().ends_with(".rolled-back.2"), "{newer:?}");
        assert!(!homes[0].exists() && newer[0].exists());
        fs::remove_dir_all(&newer[0]).unwrap();
    }
}

/// The image is restored from this file; a file with the same content would not be the one with the other names.
#[test]
fn names_that_images_have_for_deleted_files_are_not_moved() {
    let dir = ground();
    let data = dir.path().join("data");
    fs::create_dir_all(&data).unwrap();
    let names = [".rekindle-link-000001-theirs", "new"].map(|name| data.join(name));
    names.iter().for_each(|name| fs::write(name, "x").unwrap());
    let tracked = tracked(&data, &[]);
    let mut aside = Aside::of(&tracked, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap();
    super::super::tracked::put_folder_back(&mut aside, root()).unwrap();
    aside.finish();
    assert_eq!(names.map(|name| name.exists()), [true, false]);
}

#[test]
fn what_cannot_be_kept_or_moved_is_named() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("data");
    let tracked = tracked(&data, &[]);
    folder(&data, 0, 0o755);
    file(&data.join("new"), ALICE);
    let error = as_alice(|| put_back(&tracked)).unwrap_err();
    assert!(matches!(&error, RollbackError::NoPlace { path, .. } if *path == data.join("new")), "{error}");
    assert_eq!(crate::restore::Error::Rollback(error).blame(), crate::restore::Blame::Here);
    // A folder of root can be renamed, but not moved.
    fs::remove_file(data.join("new")).unwrap();
    folder(&data, ALICE, 0o755);
    folder(&data.join("root's"), 0, 0o755);
    let error = as_alice(|| put_back(&tracked)).unwrap_err();
    assert!(matches!(&error, RollbackError::Unmovable { path, .. } if *path == data.join("root's")), "{error}");
}

/// In a folder such as /tmp, everybody may create a folder of any name.
#[test]
fn nothing_is_moved_to_a_folder_that_somebody_else_has_prepared() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    folder(dir.path(), 0, 0o1777);
    let data = dir.path().join("data");
    folder(&data, ALICE, 0o700);
    file(&data.join("secret"), ALICE);
    let tracked = tracked(&data, &[]);
    let mut aside = Aside::of(&tracked, Trusted::user(ALICE), Expiry::of_all_but_the_newest()).unwrap();
    let theirs = dir.path().join("data.rolled-back.1");
    folder(&theirs, BOB, 0o777);
    as_alice(|| super::super::tracked::put_folder_back(&mut aside, alice())).unwrap();
    assert_eq!(fs::read_dir(&theirs).unwrap().count(), 0);
    assert_eq!(fs::read(dir.path().join("data.rolled-back.2/secret")).unwrap(), b"secret");
    assert_eq!(as_alice(|| aside.finish()), [dir.path().join("data.rolled-back.2")]);
    assert!(theirs.exists());
}

/// A program of the folder's owner may read everything in its folder, as pg_basebackup does. But not what was in a folder
/// that is closed to it.
#[test]
fn what_is_kept_belongs_to_the_owners_of_its_folders() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("data");
    let tracked = tracked(&data, &["sub", "sub/closed"]);
    folder(&data, ALICE, 0o755);
    folder(&data.join("sub"), BOB, 0o755);
    folder(&data.join("sub/closed"), 0, 0o700);
    [data.join("new"), data.join("sub/closed/new")].iter().for_each(|new| file(new, 0));
    let mut aside = Aside::of(&tracked, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap();
    super::super::tracked::put_folder_back(&mut aside, root()).unwrap();
    let kept = dir.path().join("data.rolled-back.1");
    assert_eq!(fs::metadata(&kept).unwrap().uid(), 0, "until it is complete");
    assert_eq!(aside.finish(), std::slice::from_ref(&kept));
    for (name, owner) in [("", ALICE), ("sub", BOB), ("sub/closed", 0), ("new", 0), ("sub/closed/new", 0)] {
        let found = fs::metadata(kept.join(name)).unwrap();
        assert_eq!(found.uid(), owner, "{name}");
        assert!(!found.is_dir() || found.mode() & 0o7777 == 0o700, "{name}");
    }
}

/// A mount that ends with the test.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Mounts a folder, or a new tmpfs, on `at`, which is created.
fn mount(from: Option<&PathBuf>, at: &Path) -> Mounted {
    fs::create_dir_all(at).unwrap();
    let flags = if from.is_some() { nix::mount::MsFlags::MS_BIND } else { nix::mount::MsFlags::empty() };
    let source = from.map_or_else(|| Path::new("none"), PathBuf::as_path);
    nix::mount::mount(Some(source), at, Some("tmpfs"), flags, None::<&str>).unwrap();
    Mounted(at.into())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

/// Nothing can be moved from one mount to another, not even from one of the same file system.
#[test]
fn what_is_replaced_on_a_mount_is_kept_on_it() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("data");
    let tracked = tracked(&data, &["sub"]);
    let [other, third] = ["other", "third"].map(|name| dir.path().join(name));
    [&other, &third].into_iter().for_each(|folder| fs::create_dir(folder).unwrap());
    for is_other_file_system in [true, false] {
        let from = |folder| Some(folder).filter(|_| !is_other_file_system);
        let _data = mount(from(&other), &data);
        let _sub = mount(from(&third), &data.join("sub"));
        [data.join("new"), data.join("sub/new")].iter().for_each(|new| file(new, 0));
        let mut aside = Aside::of(&tracked, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap();
        super::super::tracked::put_folder_back(&mut aside, root()).unwrap();
        let homes = [data.join(".rekindle.rolled-back.1"), data.join("sub/.rekindle.rolled-back.1")];
        assert_eq!(aside.finish(), homes);
        for home in &homes {
            assert_eq!(fs::read(home.join("new")).unwrap(), b"new");
        }
        assert_eq!(names(dir.path()), ["data", "other", "third"], "an empty folder is left");
    }
}

/// Others may use what is mounted there.
#[test]
fn what_was_mounted_since_is_neither_moved_nor_removed() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("data");
    let tracked = tracked(&data, &[]);
    fs::create_dir(&data).unwrap();
    let inputs = data.join("inputs");
    fs::create_dir(&inputs).unwrap();
    let set = mount(None, &inputs.join("set"));
    let _new = mount(None, &data.join("new"));
    let put_back = || {
        let mut aside = Aside::of(&tracked, Trusted::of(None), Expiry::of_all_but_the_newest())?;
        super::super::tracked::put_folder_back(&mut aside, root())?;
        Ok::<_, RollbackError>(aside.finish())
    };
    let mounted = [inputs.join("set/file"), data.join("new/file")];
    for round in 1..=3 {
        mounted.iter().for_each(|path| file(path, 0));
        file(&inputs.join("list"), 0);
        let kept = put_back().unwrap();
        assert_eq!(kept, [dir.path().join(format!("data.rolled-back.{}", 1 + (round + 1) % 2))]);
        assert_eq!(fs::read(kept[0].join("inputs/list")).unwrap(), b"list");
        assert!(mounted.iter().all(|path| fs::read(path).unwrap() == b"file"), "round {round}");
    }
    assert!(put_back().unwrap().is_empty());
    // The tracked folder itself: what is mounted below it stays, too.
    file(&inputs.join("list"), 0);
    let kept = move_aside(&inputs, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap().unwrap();
    assert_eq!(fs::read(kept.kept.join("list")).unwrap(), b"list");
    assert!(mounted[0].exists());
    // What an earlier version has moved with a mount in it.
    drop(set);
    let old = dir.path().join("data.rolled-back.9");
    let _moved = mount(None, &old.join("set"));
    file(&old.join("set/file"), 0);
    (1..9).for_each(|n| drop(fs::create_dir(dir.path().join(format!("data.rolled-back.{n}")))));
    file(&data.join("more"), 0);
    put_back().unwrap();
    assert!(old.join("set/file").exists());
    // What was something else cannot be made.
    let entries = vec![TrackedEntry { path: job_path(data.join("new")), kind: TrackedKind::File }];
    let tracked = TrackedFolder { entries, ..tracked.clone() };
    let mut aside = Aside::of(&tracked, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap();
    let error = super::super::tracked::put_folder_back(&mut aside, root()).unwrap_err();
    assert!(matches!(&error, RollbackError::Mounted(path) if *path == data.join("new")), "{error}");
}

/// It is tracked, so what is in it is the job's.
#[test]
fn a_tracked_mount_point_that_did_not_exist_loses_its_content_and_stays() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let new = dir.path().join("new");
    let _new = mount(None, &new);
    file(&new.join("file"), 0);
    let kept = move_aside(&new, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap().unwrap();
    assert_eq!(kept.kept, new.join(".rekindle.rolled-back.1"));
    assert_eq!(fs::read(kept.kept.join("file")).unwrap(), b"file");
    assert_eq!(move_aside(&new, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap(), None);
}

/// The user may write to it, and not to the folder above.
#[test]
fn a_folder_that_did_not_exist_and_cannot_be_moved_loses_its_content() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("data");
    folder(&data, ALICE, 0o755);
    file(&data.join("new"), ALICE);
    let kept = as_alice(|| move_aside(&data, Trusted::user(ALICE), Expiry::of_all_but_the_newest())).unwrap().unwrap();
    assert_eq!(kept.kept, data.join(".rekindle.rolled-back.1"));
    assert_eq!(fs::read(kept.kept.join("new")).unwrap(), b"new");
}
