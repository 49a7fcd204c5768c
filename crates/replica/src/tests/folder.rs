//! Links in a replica that is a folder.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

use super::*;
use crate::Keep;
use rekindle_testing::require;

const STRANGER: u32 = 65_533;

fn is_root() -> bool {
    require("root", rekindle_os::identity::effective_user() == 0, "links of another user need root")
}

fn all(replica: &Replica) -> Result<usize> {
    Ok(replica.images(&|| false)?.len())
}

/// Replaces a folder by a link of this user to where it is now.
fn link(path: &Path, to: &Path, owner: u32) {
    fs::rename(path, to).unwrap();
    symlink(to, path).unwrap();
    lchown(path, Some(owner), None).unwrap();
}

#[test]
fn a_link_to_the_replica_and_links_of_root_in_it_are_followed() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    symlink(disk.path(), dir.path().join("replica")).unwrap();
    let replica = in_folder(&dir.path().join("replica"));
    let here = Machine::new();
    here.upload(&replica, &here.image(1, &[1])).unwrap();
    assert!(disk.path().join("train/packs").is_dir());
    let user = rekindle_os::identity::effective_user();
    for (n, part) in ["train/packs", "train/images", "train"].into_iter().enumerate() {
        link(&disk.path().join(part), &dir.path().join(format!("larger{n}")), user);
        assert_eq!(all(&replica).unwrap(), n + 1, "{part}");
        let number = u32::try_from(n).unwrap() + 2;
        here.upload(&replica, &here.image(number, &[number])).unwrap();
        Machine::new().fetch(&replica, number).unwrap();
    }
    // One that leads nowhere is not taken for an empty replica.
    fs::rename(dir.path().join("larger1"), dir.path().join("away")).unwrap();
    let error = all(&replica).unwrap_err();
    assert!(error.is_unreachable() && error.to_string().contains("train/images: No such file"), "{error}");
    assert!(replica.retain(Keep::Newest(1), &here.folder, &|| false).is_err());
}

#[test]
fn links_of_another_user_are_errors_that_name_them() {
    if !is_root() {
        return;
    }
    for part in ["train", "train/packs", "train/images", "image", "image/manifest.json"] {
        let (dir, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (replica, here) = (in_folder(dir.path()), Machine::new());
        here.upload(&replica, &here.image(1, &[1])).unwrap();
        let path = dir.path().join(part.replace("image/", &format!("train/images/{}/", id(1))));
        let path = if part == "image" { dir.path().join(format!("train/images/{}", id(1))) } else { path };
        link(&path, &theirs.path().join("there"), STRANGER);
        let before = all_files(theirs.path());
        let said = |result: Result<()>| {
            let error = result.expect_err(part);
            let text = error.to_string();
            assert!(text.contains(&format!("{} is a symbolic link of user {STRANGER}", path.display())), "{text}");
            assert!(error.is_unreachable(), "{text}");
        };
        said(all(&replica).map(drop));
        said(here.upload(&replica, &here.image(2, &[2])).map(drop));
        said(replica.retain(Keep::Newest(1), &here.folder, &|| false).map(drop));
        said(Machine::new().fetch(&replica, 1).map(drop));
        assert_eq!(all_files(theirs.path()), before, "{part}: nothing is written or removed there");
    }
}

fn all_files(dir: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        found.push((path.display().to_string(), meta.len()));
        if meta.is_dir() {
            found.extend(all_files(&path));
        }
    }
    found.sort();
    found
}

#[test]
fn the_folder_of_the_job_is_not_another_users() {
    if !is_root() {
        return;
    }
    let (dir, here) = (tempfile::tempdir().unwrap(), Machine::new());
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let folder = dir.path().join("train");
    fs::create_dir(&folder).unwrap();
    chown(&folder, Some(STRANGER), None).unwrap();
    let replica = in_folder(dir.path());
    let image = here.image(1, &[1]);
    let error = here.upload(&replica, &image).unwrap_err().to_string();
    assert!(error.contains(&format!("train belongs to user {STRANGER}")), "{error}");
    assert!(fs::read_dir(&folder).unwrap().next().is_none());
    // On a file system that has one owner for everything, nothing can be concluded.
    chown(dir.path(), Some(STRANGER), None).unwrap();
    here.upload(&replica, &image).unwrap();
}

#[test]
fn the_store_itself_is_no_replica_of_it() {
    let (dir, here) = (tempfile::tempdir().unwrap(), Machine::new());
    let images = [1, 2].map(|number| here.image(number, &[number]));
    symlink(here.folder.path(), dir.path().join("train")).unwrap();
    for replica in [in_folder(here.folder.store()), in_folder(dir.path())] {
        let error = here.upload(&replica, &images[1]).unwrap_err().to_string();
        assert!(error.contains("the store itself"), "{error}");
        assert!(replica.retain(Keep::Newest(1), &here.folder, &|| false).is_err());
        assert!(here.fetch(&replica, 1).is_err());
    }
    assert_eq!(here.folder.images().unwrap().len(), 2);
}
