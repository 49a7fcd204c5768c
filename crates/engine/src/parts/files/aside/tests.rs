use std::os::unix::fs::{PermissionsExt, chown};

use super::*;
use crate::samples::job_path;
use rekindle_os::identity::with_file_rights;
use rekindle_store::manifest::{Owner, TrackedEntry, TrackedKind};

/// The job's user, and another one.
const ALICE: u32 = 65_534;
const BOB: u32 = 1;

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
    let entry =
        |path: PathBuf| TrackedEntry { path: job_path(path), kind: TrackedKind::Folder { mode: 0o40_755, owner } };
    let entries = [data.to_path_buf()].into_iter().chain(below.iter().map(|name| data.join(name))).map(entry);
    TrackedFolder { path: job_path(data), entries: entries.collect() }
}

fn put_back(tracked: &TrackedFolder) -> Result<Vec<PathBuf>, RollbackError> {
    let mut aside = Aside::of(tracked, Trusted::user(ALICE))?;
    super::super::tracked::put_folder_back(&mut aside, false)?;
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
        assert_eq!(as_alice(|| put_back(&tracked)).unwrap(), [PathBuf::new(); 0]);
        file(&data.join("sub/new"), ALICE);
        let newer = as_alice(|| put_back(&tracked)).unwrap();
        assert!(newer[0].to_str().unwrap().ends_with(".rolled-back.2"), "{newer:?}");
        assert!(!homes[0].exists() && newer[0].exists());
        fs::remove_dir_all(&newer[0]).unwrap();
    }
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
    let mut aside = Aside::of(&tracked, Trusted::user(ALICE)).unwrap();
    let theirs = dir.path().join("data.rolled-back.1");
    folder(&theirs, BOB, 0o777);
    as_alice(|| super::super::tracked::put_folder_back(&mut aside, false)).unwrap();
    assert_eq!(fs::read_dir(&theirs).unwrap().count(), 0);
    assert_eq!(fs::read(dir.path().join("data.rolled-back.2/secret")).unwrap(), b"secret");
    assert_eq!(as_alice(|| aside.finish()), [dir.path().join("data.rolled-back.2")]);
    assert!(theirs.exists());
}
