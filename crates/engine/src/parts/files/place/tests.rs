use std::os::unix::fs::{lchown, symlink};

use super::*;

fn is_same(path: &Path, found: &File) -> bool {
    let (one, other) = (std::fs::metadata(path).unwrap(), found.metadata().unwrap());
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

#[test]
fn links_of_root_and_of_the_jobs_user_are_followed_and_no_others() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir_all(at("a/b")).unwrap();
    std::fs::write(at("a/b/file"), "").unwrap();
    symlink("../a/./b", at("a/relative")).unwrap();
    symlink(at("a/relative"), at("absolute")).unwrap();
    symlink("loop", at("loop")).unwrap();
    let job = Trusted::user(65_534);
    for owner in [0, 65_534] {
        lchown(at("a/relative"), Some(owner), None).unwrap();
        for path in ["a/b/file", "a/relative/file", "absolute/file"] {
            assert!(is_same(&at("a/b/file"), &find(&at(path), job).unwrap()), "{path}");
        }
    }
    assert!(is_same(Path::new("/"), &find(Path::new("/"), job).unwrap()));
    lchown(at("a/relative"), Some(1), None).unwrap();
    find(&at("a/b/file"), job).unwrap();
    for path in ["a/relative", "a/relative/file", "absolute/file"] {
        match find(&at(path), job) {
            Err(Astray::Link { link, owner: 1 }) => assert_eq!(link, at("a/relative")),
            other => panic!("{path}: {other:?}"),
        }
        find(&at(path), None).unwrap();
    }
    assert!(find(&at("a/none/file"), job).unwrap_err().is_missing());
    assert!(matches!(find(&at("loop"), job), Err(Astray::Io(error)) if error.raw_os_error() == Some(libc::ELOOP)));
    assert!(
        matches!(find(&at("a/b/file/x"), job), Err(Astray::Io(error)) if error.kind() == io::ErrorKind::NotADirectory)
    );
}

/// What is checked and what is changed are in the same folder.
#[test]
fn a_place_stays_in_the_folder_that_was_found() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("file"), "found").unwrap();
    let path = folder.join("file");
    let place = Place::of(&path, Trusted::of(None)).unwrap();
    std::fs::rename(&folder, dir.path().join("moved")).unwrap();
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(&path, "another").unwrap();
    assert_eq!(std::fs::read(place.here()).unwrap(), b"found");
    std::fs::write(place.beside(OsStr::new("beside")), "").unwrap();
    assert!(dir.path().join("moved/beside").exists());
}
