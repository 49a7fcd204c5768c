//! A disk that is full at different moments.

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::*;
use rekindle_testing::require;

pub(crate) struct SmallDisk(pub(crate) tempfile::TempDir);

impl SmallDisk {
    pub(crate) fn mount(bytes: usize) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={bytes},mode=0700");
        let mounted = mount(Some("rekindle-test"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str()));
        let why = mounted.err().map_or_else(String::new, |error| format!("cannot mount a small tmpfs: {error}"));
        require("root", mounted.is_ok(), &why).then(|| SmallDisk(dir))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_full_disk_leaves_what_was_there_and_says_so() {
    let source = Ground::new();
    let (mut full, mut done) = (0, 0);
    // Everything takes a little more than 8 MiB. The smallest size has no room for a piece, others not for the index or
    // the map.
    for kib in [2048, 6144, 8176, 8192, 8200, 8208, 8212, 8216, 8220, 8224, 8240, 9000, 12288] {
        let Some(disk) = SmallDisk::mount(kib << 10) else { return };
        let ground = Ground::below(tempfile::tempdir_in(disk.0.path()).unwrap());
        let small = source.stage(1, &[("a", noise(1, 1000))]);
        let old = ground.persist(&small).unwrap();
        let large = source.stage(2, &[("a", noise(2, 8 << 20))]);
        match ground.persist(&large) {
            Ok(image) => {
                done += 1;
                assert_eq!(ground.folder.images().unwrap(), [image, old.clone()]);
            }
            Err(error) => {
                full += 1;
                assert!(error.is_full(), "{kib}: {error:?}");
                assert_eq!(ground.folder.images().unwrap(), std::slice::from_ref(&old));
                assert_eq!(fs::read_dir(ground.folder.images_dir()).unwrap().count(), 1);
                assert!(ground.packs("").iter().all(|name| !name.starts_with(".tmp-")), "{:?}", ground.packs(""));
            }
        }
        let into = tempfile::tempdir().unwrap();
        unpack(&old, &ground.folder, &crate::tests::beneath(into.path()), None, 1, &Progress::default(), &|| false)
            .unwrap();
        assert_eq!(fs::read(into.path().join("a")).unwrap(), noise(1, 1000));
    }
    assert!(full > 2 && done > 0, "{full} full, {done} done");
}

#[test]
fn memory_that_is_full_ends_the_unpacking_and_is_no_damage() {
    let ground = Ground::new();
    let content = noise(3, 8 << 20);
    let image = ground.persist(&ground.stage(1, &[("a", content.clone())])).unwrap();
    for (mib, has_room) in [(4, false), (9, true)] {
        let Some(into) = SmallDisk::mount(mib << 20) else { return };
        let done = unpack(
            &image,
            &ground.folder,
            &crate::tests::beneath(into.0.path()),
            None,
            4,
            &Progress::default(),
            &|| false,
        );
        match done {
            Err(error) => {
                let is_full = |source: &std::io::Error| source.kind() == std::io::ErrorKind::StorageFull;
                assert!(!has_room && !error.is_damage(), "{mib}: {error:?}");
                assert!(matches!(&error, unpack::Error::Write { source, .. } if is_full(source)), "{error:?}");
            }
            Ok(()) => {
                assert!(has_room, "{mib}");
                assert_eq!(fs::read(into.0.path().join("a")).unwrap(), content);
            }
        }
    }
}
