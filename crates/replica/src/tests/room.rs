//! Room for an image that is fetched.

use std::process::Command;

use super::*;
use crate::error::Error;
use rekindle_store::retention::survey::free_space;
use rekindle_store::{Trust, Unsigned};
use rekindle_testing::require;

/// A file system of this size.
pub(super) struct SmallDisk(pub(super) tempfile::TempDir);

impl SmallDisk {
    pub(super) fn mount(mib: u32) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={mib}m,mode=0700");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "rekindle-test"]).arg(dir.path());
        let mounted = mount.status().is_ok_and(|status| status.success());
        require("root", mounted, "cannot mount a small tmpfs").then(|| SmallDisk(dir))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn content_that_nobody_needs_makes_room_for_a_fetch_and_its_own_stays() {
    let Some(disk) = SmallDisk::mount(16) else { return };
    let dir = tempfile::tempdir().unwrap();
    let replica = in_folder(dir.path());
    let here = Machine::new();
    here.upload(&replica, &here.image(1, &[1, 2, 3])).unwrap();
    here.upload(&replica, &here.image(2, &[4])).unwrap();

    let other = Machine::below(tempfile::tempdir_in(disk.0.path()).unwrap());
    other.fetch(&replica, 2).unwrap();
    // One fetch and one persist were interrupted.
    other.pack(&[noise(1)]);
    other.pack(&(100..150).map(noise).collect::<Vec<_>>());
    let free = || free_space(&rekindle_os::beneath::Beneath::at(other.folder.path()).unwrap()).unwrap();
    let replica = replica.with_min_free(free());
    let progress = Progress::default();
    let fetched = replica.fetch(id(1), &other.folder, &other.lock, None, &progress, &|| false);
    assert!(fetched.is_ok_and(|image| image.is_good()));
    assert_eq!(progress.bytes().0, 2 * 100_064, "what it had is not fetched again");
    assert_eq!(other.folder.packs().names().unwrap().len(), 3);
    let replica = replica.with_min_free(16 << 20);
    here.upload(&replica, &here.image(3, &[7])).unwrap();
    assert!(matches!(other.fetch(&replica, 3), Err(Error::NoRoom { .. })));
    assert_eq!(other.folder.images().unwrap().len(), 2);
}

/// The first bytes of a pack are damaged, and nothing else is.
#[test]
fn the_header_of_a_pack_is_not_needed_to_fetch_its_records() {
    let dir = tempfile::tempdir().unwrap();
    let (replica, here) = (in_folder(dir.path()), Machine::new());
    here.upload(&replica, &here.image(1, &[1, 2])).unwrap();
    let packs = std::fs::read_dir(dir.path().join("train/packs")).unwrap().map(|entry| entry.unwrap().path());
    let pack = packs.into_iter().find(|path| path.extension().is_some_and(|it| it == "pack")).unwrap();
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[20] ^= 1;
    std::fs::write(&pack, &bytes).unwrap();
    // With and without a key that it was not encrypted with.
    let key = rekindle_store::chunk::Key::new(&[7; 32]);
    let accepting = Trust::new(key.clone(), Path::new("/etc/key"), Unsigned::Accepted);
    for (key, is_fetched) in [(None, true), (accepting.key(), true), (Some(&key), false)] {
        let other = Machine::new();
        let fetched = replica.fetch(id(1), &other.folder, &other.lock, key, &Progress::default(), &|| false);
        assert_eq!(fetched.is_ok(), is_fetched, "{fetched:?}");
    }
    // A damaged record is still found.
    bytes[200] ^= 1;
    std::fs::write(&pack, &bytes).unwrap();
    assert!(matches!(Machine::new().fetch(&replica, 1), Err(Error::Damaged { .. })));
}
