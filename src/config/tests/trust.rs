//! Which files root trusts.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};

use super::*;
use rekindle_testing::root;

/// A folder with a valid file, both ours alone.
fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rekindle.toml");
    fs::write(&path, "version = 1\n").unwrap();
    mode(&path, 0o644);
    (folder, path)
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn try_load(path: &Path) -> Result<Config, Error> {
    effective(Some(path), std::iter::empty(), &Overrides::default()).map(|read| read.config)
}

#[test]
fn a_file_that_others_can_write_is_refused() {
    if !root() {
        return;
    }
    let (_folder, path) = place();
    try_load(&path).unwrap();
    for writable in [0o664, 0o646] {
        mode(&path, writable);
        let error = try_load(&path).unwrap_err();
        assert!(matches!(&error, Error::Writable { path: named, mode } if *named == path && *mode == writable));
        assert!(error.to_string().ends_with(&format!("Fix it with: chmod go-w {}", path.display())), "{error}");
    }
}

#[test]
fn a_file_in_a_folder_that_others_can_write_is_refused() {
    if !root() {
        return;
    }
    let (folder, path) = place();
    mode(folder.path(), 0o777);
    assert!(matches!(try_load(&path), Err(Error::Writable { path, .. }) if path == folder.path()));
    // Like /tmp: others can add files, but not replace this one.
    mode(folder.path(), 0o1777);
    try_load(&path).unwrap();
}

#[test]
fn a_file_folder_or_link_of_another_user_is_refused() {
    if !root() {
        return;
    }
    let (folder, path) = place();
    let (other, _) = place();
    let link = other.path().join("link.toml");
    symlink(&path, &link).unwrap();
    try_load(&link).unwrap();

    // The link leads into a folder that others can write.
    mode(folder.path(), 0o770);
    assert!(matches!(try_load(&link), Err(Error::Writable { path, .. }) if path == folder.path()));
    mode(folder.path(), 0o700);
    std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
    assert!(matches!(try_load(&link), Err(Error::Foreign { path, owner: 65534 }) if path == link));

    chown(folder.path(), Some(65534), None).unwrap();
    assert!(matches!(try_load(&path), Err(Error::Foreign { path, .. }) if path == folder.path()));
    chown(folder.path(), Some(0), None).unwrap();
    chown(&path, Some(65534), None).unwrap();
    let error = try_load(&path).unwrap_err();
    assert!(error.to_string().ends_with(&format!("chown -h root {}", path.display())), "{error}");
}

#[test]
fn what_is_no_file_or_far_too_large_is_refused() {
    let (folder, path) = place();
    assert!(matches!(try_load(folder.path()), Err(Error::NotAFile { .. })));
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    assert!(matches!(try_load(&pipe), Err(Error::NotAFile { .. })), "a pipe without a writer must not be waited for");
    fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(matches!(try_load(&path), Err(Error::TooLarge { limit: 1_048_576, .. })));
    fs::write(&path, b"version = 1 # \xff\n").unwrap();
    let error = try_load(&path).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error}");
}
