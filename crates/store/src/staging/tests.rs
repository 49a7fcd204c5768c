mod planted;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::mount::umount2;

use super::*;
use crate::manifest;
use crate::manifest::{Landing, Reason};
use crate::options::Copies;
use crate::retention::Policy;
use crate::retention::survey::Limits;
use crate::take::TakeError;
use crate::tests::eventually;
use crate::{Access, ImageId, Store, Writer};

/// A job's folder in its own store, and a staging area on a real tmpfs; `None` without root.
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
    let [landing, _] = filling.landing_files(&[(1001, 5 << 20), (77, 1 << 20)]).unwrap().try_into().unwrap();
    let mut with = manifest();
    with.landing = vec![Landing {
        pid: 1001,
        path: area.landing_dir().join("1001").path().into(),
        part: "gpu/1001".into(),
        bytes: 5 << 20,
    }];
    let image = filling.seal(with.clone(), 1).unwrap();
    assert!(image.is_good() && image.is_staged());
    assert_eq!(image.manifest().unwrap().bytes, (5 << 20) + 100, "what nobody uses is not counted and goes");
    assert_eq!(ground.folder.staged(), vec![image.clone()], "others find it by the job's folder");

    // A supervisor that died leaves the tmpfs; the next one uses it.
    drop(area);
    let area = ground.open();
    assert_eq!(area.images(), vec![image]);
    let pages = fs::metadata(&landing).unwrap().ino();
    let again = area.slots()[0].begin(id(2)).unwrap();
    assert!(area.images().is_empty());
    assert_eq!(
        fs::metadata(&again.landing_files(&[(1001, 5 << 20)]).unwrap()[0]).unwrap().ino(),
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

/// Admission counts what a slot has as room for the image that is made in it: it has 64 MiB here.
#[test]
fn landing_files_of_processes_that_are_gone_make_room_for_those_of_new_ones() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let filling = area.slots()[0].begin(id(1)).unwrap();
    filling.landing_files(&[(1, 20 << 20), (2, 24 << 20)]).unwrap();
    fs::write(filling.kept_file(), [1; 4096]).unwrap();
    drop(filling);

    let filling = area.slots()[0].begin(id(2)).unwrap();
    let now = [(2, 8 << 20), (3, 40 << 20)];
    assert!(filling.landing_files(&now).is_err(), "there is no room beside those of the image before");
    filling.free_landing_files(&now, true).unwrap();
    let [cut, new] = filling.landing_files(&now).unwrap().try_into().unwrap();
    assert_eq!([cut, new].map(|path| fs::metadata(path).unwrap().len()), [8 << 20, 40 << 20]);
    assert!(filling.kept_file().is_there());

    // A little more than is expected stays, with its pages.
    filling.free_landing_files(&[(3, 36 << 20)], false).unwrap();
    let left: Vec<_> = fs::read_dir(area.slots()[0].dir().join("gpu")).unwrap().map(|e| e.unwrap()).collect();
    assert_eq!((left.len(), left[0].metadata().unwrap().len()), (1, 40 << 20));
    drop(filling);
    area.close().unwrap();
}

#[test]
fn a_full_tmpfs_is_an_error_and_a_lost_one_is_seen() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let filling = area.slots()[1].begin(id(1)).unwrap();
    let Err(Error::File(FileError { source, path, .. })) = filling.landing_files(&[(1, 1 << 20), (2, 128 << 20)])
    else {
        panic!("it has 64 MiB")
    };
    assert!(path.ends_with("gpu/2"), "{path:?}");
    assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    drop(filling);
    umount2(area.path(), MntFlags::MNT_DETACH).unwrap();
    assert!(!area.is_there());
    assert!(ground.folder.staged().is_empty());
    let anew = ground.open();
    assert!(anew.is_there());
    anew.close().unwrap();
}

#[test]
fn an_image_on_the_disk_counts_in_this_boot_only() {
    let Some(ground) = Ground::new() else { return };
    let limits = Limits { policy: Policy::default(), min_free: 0, copies: Copies::One };
    let area = || Area::on_disk(&ground.folder, &ground.lock).unwrap();
    let take = |n: u32| area().take_on_disk(&ground.folder, &ground.lock, &limits, id(n), 100).unwrap();
    let slots = ground.folder.path().join("slots");
    let filling = take(1);
    fs::write(filling.dir().join("criu/x.img"), [1; 100]).unwrap();
    assert!(ground.folder.staged().is_empty(), "it is not whole");
    let image = filling.seal(manifest(), 2).unwrap();
    assert_eq!((image.place, image.is_good(), image.is_staged()), (crate::Place::Slot, true, true));
    assert_eq!(ground.folder.staged(), std::slice::from_ref(&image));
    assert_eq!(fs::metadata(&slots).unwrap().permissions().mode() & 0o777, 0o700);
    // The next image goes to the other slot, and a failed one leaves nothing.
    let other = take(2);
    assert_ne!(*other.dir(), image.dir);
    drop(other);
    assert_eq!(ground.folder.staged(), std::slice::from_ref(&image));
    // Wrong data read back from the disk is noticed.
    fs::write(image.dir.join("criu/x.img"), [2; 100]).unwrap();
    let report = image.verify();
    assert!(report.problems().any(|problem| problem.to_string().contains("wrong hash")), "{report:?}");
    // The machine is rebooted.
    fs::write(slots.join("boot"), "another").unwrap();
    assert!(ground.folder.staged().is_empty() && Area::all_of(&ground.folder).is_empty());
    assert!(disk::sweep(&ground.folder, &ground.lock).unwrap() && !slots.exists());
    assert!(!disk::sweep(&ground.folder, &ground.lock).unwrap());
    // The machine went down before the boot was recorded.
    let filling = take(3);
    fs::write(filling.dir().join("criu/x.img"), [1; 100]).unwrap();
    filling.seal(manifest(), 2).unwrap();
    fs::remove_file(slots.join("boot")).unwrap();
    assert!(ground.folder.staged().is_empty());
    assert!(area().images().is_empty() && ground.folder.staged().is_empty());
    area().close().unwrap();
    assert!(!slots.exists());
}

#[test]
fn what_has_no_room_on_the_disk_is_refused_and_costs_nothing() {
    let Some(ground) = Ground::new() else { return };
    let limits = Limits { policy: Policy::default(), min_free: 1 << 60, copies: Copies::One };
    let area = Area::on_disk(&ground.folder, &ground.lock).unwrap();
    let refused = area.take_on_disk(&ground.folder, &ground.lock, &limits, id(1), 100).unwrap_err();
    assert!(matches!(refused, TakeError::DiskFull(_)) && refused.to_string().contains("store.min-free"), "{refused}");
}

#[test]
fn what_is_no_file_is_refused() {
    let Some(ground) = Ground::new() else { return };
    for make in [(|path| std::os::unix::fs::symlink("/etc/passwd", path).unwrap()) as fn(&Path), |path| {
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap()
    }] {
        let area = Area::on_disk(&ground.folder, &ground.lock).unwrap();
        let filling = area.slots()[0].begin(id(1)).unwrap();
        make(filling.dir().join("odd").path());
        let error = filling.seal(manifest(), 1).unwrap_err();
        assert!(matches!(&error, Error::Stray(path) if path.ends_with("odd")), "{error}");
        assert!(ground.folder.staged().is_empty());
    }
}

/// Changes the note of an area about its owner.
fn rewrite_owner(area: &Area, change: impl FnOnce(&mut serde_json::Value)) {
    let path = area.path().join("owner.json");
    let mut owner: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut owner);
    fs::write(path, owner.to_string()).unwrap();
}

#[test]
fn an_area_of_another_store_is_left_over_once_its_supervisor_is_dead() {
    use leftovers::{OnlyCopies, elsewhere, strangers};
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let other = Store::open(&ground._dir.path().join("other"), Access::Write).unwrap();
    let find = || elsewhere(&ground.base, other.path(), &Trust::default());
    // It is supervised, as the lock shows.
    assert!(find().is_empty() && strangers(&ground.base, &other).is_empty());
    let filling = area.slots()[0].begin(id(1)).unwrap();
    fs::write(filling.dir().join("criu/x.img"), [1; 100]).unwrap();
    filling.seal(manifest(), 1).unwrap();
    let Ground { _dir: dir, folder, lock, base } = ground;
    let find = || elsewhere(&base, other.path(), &Trust::default());
    drop(lock);
    is_free(&folder);
    let left = find();
    assert_eq!((left.len(), left[0].needed, left[0].store.as_path()), (1, Some(id(1)), folder.store()));
    assert!(elsewhere(&base, folder.store(), &Trust::default()).is_empty(), "the job's folder shows it");
    assert!(!left[0].free(&Trust::default(), OnlyCopies::Keep) && area.is_there());

    // Without the folder only the supervisor counts: this process lives, and one in another namespace may.
    fs::rename(folder.path(), dir.path().join("away")).unwrap();
    assert!(find().is_empty() && strangers(&base, &other).is_empty());
    rewrite_owner(&area, |owner| owner["supervisor"]["pid_namespace"] = "pid:[1]".into());
    assert_eq!((find().len(), strangers(&base, &other)), (0, vec![area.path().to_owned()]));
    rewrite_owner(&area, |owner| {
        owner["supervisor"]["pid_namespace"] = fs::read_link("/proc/self/ns/pid").unwrap().to_str().unwrap().into();
        owner["supervisor"]["started"] = 1.into();
    });
    let left = find();
    assert_eq!((left.len(), left[0].needed), (1, Some(id(1))));
    assert!(!left[0].free(&Trust::default(), OnlyCopies::Keep));
    // Never by force: somebody has a file open there.
    let open = fs::File::open(area.path().join("owner.json")).unwrap();
    assert!(!left[0].free(&Trust::default(), OnlyCopies::Discard) && area.is_there());
    drop(open);
    let path = area.path().to_owned();
    drop(area);
    // A child of another test may have it open until it executes its program.
    eventually(|| left[0].free(&Trust::default(), OnlyCopies::Discard).then_some(()));
    assert!(!path.exists());
}

/// A child of another test may hold the lock until it executes its program.
fn is_free(folder: &JobFolder) {
    eventually(|| (folder.writer().unwrap() == Writer::Nobody).then_some(()));
}

/// The supervisor here was killed, and Slurm has started the job on another node since.
#[test]
fn an_area_of_a_job_that_runs_on_another_machine_is_left_over() {
    use leftovers::{OnlyCopies, elsewhere};
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let filling = area.slots()[0].begin(id(1)).unwrap();
    fs::write(filling.dir().join("criu/x.img"), [1; 100]).unwrap();
    filling.seal(manifest(), 1).unwrap();
    let Ground { _dir: dir, folder, lock, base } = ground;
    let find = || elsewhere(&base, &dir.path().join("nowhere"), &Trust::default());
    let held = folder.path().join("lock");
    let mut holder: serde_json::Value = serde_json::from_slice(&fs::read(&held).unwrap()).unwrap();
    drop(lock);
    holder["boot_id"] = "another".into();
    holder["host"] = "elsewhere".into();
    fs::write(&held, holder.to_string()).unwrap();
    assert!(matches!(folder.writer().unwrap(), crate::lock::Writer::Known(other) if other.host == "elsewhere"));
    assert!(find().is_empty(), "the supervisor here lives");
    rewrite_owner(&area, |owner| owner["supervisor"]["started"] = 1.into());
    let left = find();
    assert_eq!((left.len(), left[0].needed), (1, Some(id(1))), "no newer image is in the store");
    assert_eq!(elsewhere(&base, folder.store(), &Trust::default()).len(), 1, "of the store that is configured, too");
    assert!(!left[0].free(&Trust::default(), OnlyCopies::Keep) && area.is_there());
    // The other machine has stored a newer image.
    let newer = folder.images_dir().join(id(2).to_string());
    fs::create_dir(&newer).unwrap();
    fs::write(newer.join("manifest.json"), {
        let mut manifest = manifest();
        (manifest.id, manifest.parts, manifest.bytes) = (id(2), Vec::new(), 0);
        manifest.to_bytes(folder.trust()).unwrap()
    })
    .unwrap();
    let left = find();
    assert_eq!((left.len(), left[0].needed), (1, None), "{:?}", folder.images());
    // It has it open.
    let path = area.path().to_owned();
    drop(area);
    assert!(left[0].free(&Trust::default(), OnlyCopies::Keep) && !path.exists());
}

/// What is in memory has no hashes, and its signature is worth nothing on a disk.
#[test]
fn with_a_key_nothing_on_a_disk_is_believed_without_hashes() {
    let Some(ground) = Ground::new() else { return };
    let trust = crate::Trust::new(crate::chunk::Key::new(&[7; 32]), Path::new("/etc/key"), crate::Unsigned::Refused);
    let store = Store::open(ground.folder.store(), Access::Write).unwrap().with_trust(trust.clone());
    let folder = store.job(&"j".parse().unwrap()).unwrap();
    let area = Area::open(&ground.base, &folder, &ground.lock, 1 << 20).unwrap();
    let filling = area.slots()[0].begin(id(1)).unwrap();
    fs::write(filling.dir().join("criu/x.img"), [1; 100]).unwrap();
    let mut ours = manifest();
    ours.job = folder.name().clone();
    let image = filling.seal(ours, 1).unwrap();
    assert!(image.is_good() && folder.staged() == std::slice::from_ref(&image), "memory is believed");
    let signed = fs::read(image.dir.join(manifest::FILE_NAME)).unwrap();
    let plant = |slot: &Path| {
        fs::create_dir_all(slot.join("criu")).unwrap();
        fs::write(slot.join(manifest::FILE_NAME), &signed).unwrap();
        fs::write(slot.join("criu/x.img"), [6; 100]).unwrap();
    };

    // In a slot on the disk.
    let on_disk = Area::on_disk(&folder, &ground.lock).unwrap();
    plant(on_disk.slots()[0].dir().path());
    let planted = &on_disk.images()[0];
    assert!(planted.is_damaged() && planted.id == id(1), "{planted:?}");
    let known = folder.known().unwrap();
    assert_eq!(known.iter().map(|known| &known.best().dir).collect::<Vec<_>>(), [&image.dir]);
    let before = Image { place: crate::Place::Slot, dir: planted.dir.clone(), ..image.clone() };
    assert!(!before.verify().is_sound(), "nor if it was good when it was found");
    on_disk.close().unwrap();
    area.close().unwrap();
}

/// The store lost content of an image that is whole in memory.
#[test]
fn an_image_whose_stored_copy_is_damaged_is_needed_in_memory_and_is_stored_again() {
    use crate::persist::tests::packing;
    use crate::persist::{Progress, persist};
    use crate::tag::Change;
    use crate::{BadMark, BadWhy};
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let filling = area.slots()[0].begin(id(1)).unwrap();
    fs::write(filling.dir().join("criu/x.img"), [1; 100]).unwrap();
    let staged = filling.seal(manifest(), 1).unwrap();
    let folder = ground.folder.clone();
    let store = |lock: &WriterLock| {
        let packing = packing(crate::chunk::Compression::None, None);
        persist(&staged, &folder, lock, &packing, &Progress::default(), &|| false).unwrap()
    };
    let mut stored = store(&ground.lock);
    assert!(ground.folder.is_stored_besides(&staged));
    stored.change_tags(Change::Pin).unwrap();
    let packs = ground.folder.packs();
    let (chunk, _) = stored.chunk_map().unwrap().unwrap().chunks().next().unwrap();
    let lost = packs.index().unwrap().get(&chunk).unwrap();
    fs::write(packs.pack_path(lost.pack), "x").unwrap();
    fs::remove_file(packs.index_path(lost.pack)).unwrap();
    stored.mark_bad(BadMark { why: BadWhy::Damaged, detail: String::new(), when: Default::default() }).unwrap();
    assert!(!ground.folder.is_stored_besides(&staged));
    let Ground { _dir: dir, lock, .. } = ground;
    drop(lock);
    is_free(&folder);
    let whole = Store::open(folder.store(), Access::Write).unwrap();
    assert_eq!(leftovers::find(&whole)[0].needed, Some(id(1)));

    let lock = folder.lock().unwrap();
    let again = store(&lock);
    assert!(again.is_good() && again.tags().is_pinned() && folder.is_stored_besides(&again));
    assert!(again.verify_content(None, 1, &Progress::default(), &|| false).unwrap().is_sound());
    assert_eq!(folder.images().unwrap(), std::slice::from_ref(&again));
    // The same with one that cannot be read.
    let manifest = again.dir.join("manifest.json");
    fs::remove_file(&manifest).unwrap();
    fs::create_dir(&manifest).unwrap();
    assert!(folder.is_stored(id(1)) && !folder.is_stored_besides(&staged));
    let packing = packing(crate::chunk::Compression::None, None);
    persist(&staged, &folder, &lock, &packing, &Progress::default(), &|| false).unwrap_err();
    assert!(manifest.is_dir(), "what others put there is not removed");
    fs::remove_dir(&manifest).unwrap();
    assert!(store(&lock).is_good() && folder.is_stored_besides(&staged));
    area.close().unwrap();
    drop(dir);
}
