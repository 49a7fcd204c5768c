use super::*;
use crate::manifest::{Landing, Reason};
use crate::{Access, ImageId, Store};

/// A job's folder in a store of its own, and a staging area on a real tmpfs; `None` without root.
struct Ground {
    _dir: tempfile::TempDir,
    base: PathBuf,
    folder: JobFolder,
    lock: WriterLock,
}

impl Ground {
    fn new() -> Option<Ground> {
        if !rekindle_testing::root() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = folder.create_job(&"j".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        Some(Ground { base: dir.path().join("run"), _dir: dir, folder, lock })
    }

    fn open(&self) -> Area {
        Area::open(&self.base, &self.folder, &self.lock, 64 << 20).unwrap()
    }
}

fn id(n: u32) -> ImageId {
    ImageId::new(n, chrono::DateTime::UNIX_EPOCH)
}

fn manifest() -> crate::Manifest {
    let mut manifest = crate::tests::manifest();
    manifest.reason = Reason::Interval;
    manifest
}

#[test]
fn an_image_is_there_when_it_was_sealed_and_gone_when_the_slot_begins_again() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    assert!(area.images().is_empty() && area.is_there());
    let filling = area.slots()[0].begin(id(1)).unwrap();
    fs::write(filling.dir().join("criu/x.img"), [1; 100]).unwrap();
    let landing = filling.landing_file(1001, 5 << 20).unwrap();
    filling.landing_file(77, 1 << 20).unwrap();
    let mut with = manifest();
    with.landing = vec![Landing {
        pid: 1001,
        path: area.landing_dir().join("1001").into(),
        part: "gpu/1001".into(),
        bytes: 5 << 20,
    }];
    let image = filling.seal(with.clone()).unwrap();
    assert!(image.is_good() && image.is_staged());
    assert_eq!(image.manifest().unwrap().bytes, (5 << 20) + 100, "what nobody uses is not counted and goes");
    assert_eq!(ground.folder.staged(), vec![image.clone()], "others find it by the job's folder");

    // A supervisor that died leaves the tmpfs; the next one goes on with it.
    drop(area);
    let area = ground.open();
    assert_eq!(area.images(), vec![image]);
    let pages = fs::metadata(&landing).unwrap().ino();
    let again = area.slots()[0].begin(id(2)).unwrap();
    assert!(area.images().is_empty());
    assert_eq!(
        fs::metadata(again.landing_file(1001, 5 << 20).unwrap()).unwrap().ino(),
        pages,
        "its pages are used again"
    );
    drop(again);
    assert!(area.images().is_empty());
    assert!(area.slots()[0].allocated() >= 5 << 20);
    area.slots()[0].empty().unwrap();
    assert!(area.slots()[0].allocated() < 1 << 20);
    area.close().unwrap();
    assert!(ground.folder.staged().is_empty());
}

#[test]
fn a_full_tmpfs_is_an_error_and_a_lost_one_is_seen() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let filling = area.slots()[1].begin(id(1)).unwrap();
    let Err(Error::File(FileError { source, .. })) = filling.landing_file(1, 128 << 20) else {
        panic!("it has 64 MiB")
    };
    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    drop(filling);
    umount2(area.path(), MntFlags::MNT_DETACH).unwrap();
    assert!(!area.is_there());
    assert!(ground.folder.staged().is_empty());
    let anew = ground.open();
    assert!(anew.is_there());
    anew.close().unwrap();
}
