//! Others can write the job's folder: nothing that they put there leads to memory.

use nix::mount::{MntFlags, MsFlags, mount};

use super::*;
use crate::Pinned;
use crate::record::{JobRecord, Outcome};
use crate::staging::leftovers::{self, Leftover, OnlyCopies};

/// A tmpfs of root, for another purpose. It is unmounted when this is dropped.
struct Roots(PathBuf);

impl Roots {
    fn new(path: PathBuf, source: &str) -> Roots {
        fs::create_dir(&path).unwrap();
        mount(Some(source), &path, Some("tmpfs"), MsFlags::empty(), Some("mode=0755,size=1m")).unwrap();
        fs::write(path.join("its"), "root's").unwrap();
        Roots(path)
    }

    /// Whether it is as it was.
    fn check(&self) {
        let names: Vec<_> = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["its"]);
        assert_eq!(fs::metadata(&self.0).unwrap().mode() & 0o7777, 0o755);
    }
}

impl Drop for Roots {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_link_to_memory_of_root_is_no_area() {
    let Some(ground) = Ground::new() else { return };
    let roots = Roots::new(ground._dir.path().join("roots"), "x");
    // Earlier versions had a link of this name.
    std::os::unix::fs::symlink(&roots.0, ground.folder.path().join("staging")).unwrap();
    assert!(ground.folder.staged().is_empty() && Area::all_of(&ground.folder).is_empty());
    let area = ground.open();
    assert_ne!(area.path(), roots.0);
    roots.check();
    area.close().unwrap();

    let Ground { _dir: dir, folder, lock, base: _ } = ground;
    drop(lock);
    let store = Store::open(folder.store(), Access::Write).unwrap();
    assert_eq!(leftovers::find(&store), []);
    let (freed, left) = leftovers::release(&store, &"other".parse().unwrap());
    assert!(freed.is_empty() && left.is_empty());
    roots.check();
    let lock = eventually(|| folder.lock().ok());
    store.remove_job(&folder, &lock, Pinned::Remove).unwrap();
    assert!(!folder.path().exists());
    roots.check();
    drop(dir);
}

/// Whoever can mount can do anything; but a mount of ours for another job stays that job's.
#[test]
fn the_area_of_another_job_is_not_this_ones() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let store = Store::open(ground.folder.store(), Access::Write).unwrap();
    let other = store.create_job(&"other".parse().unwrap()).unwrap();
    std::os::unix::fs::symlink(area.path(), other.path().join("staging")).unwrap();
    assert!(Area::all_of(&other).is_empty());
    let lock = other.lock().unwrap();
    store.remove_job(&other, &lock, Pinned::Remove).unwrap();
    assert!(area.is_there());
    // Memory without a note, or that others can change, is nobody's.
    fs::remove_file(area.path().join("owner.json")).unwrap();
    assert!(Area::all_of(&ground.folder).is_empty());
    let again = ground.open();
    assert_eq!(again.path(), area.path(), "its run was killed before it wrote its note");
    fs::set_permissions(area.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(Area::all_of(&ground.folder).is_empty() && leftovers::strangers(&ground.base, &store).is_empty());
    fs::set_permissions(area.path(), fs::Permissions::from_mode(0o711)).unwrap();
    again.close().unwrap();
}

/// A removal that was interrupted has given the folder another name.
#[test]
fn memory_is_released_although_the_folder_was_renamed() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    let Ground { _dir: dir, folder, lock, base: _ } = ground;
    drop(lock);
    let doomed = folder.store().join(".del-j");
    fs::rename(folder.path(), &doomed).unwrap();
    let store = Store::open(folder.store(), Access::Write).unwrap();
    eventually(|| store.finish_removal(folder.name()).ok());
    assert!(!area.is_there() && !area.path().exists() && !doomed.exists());
    drop(dir);
}

/// The slots on the disk are in the job's folder, too.
#[test]
fn slots_that_are_a_link_are_left_alone() {
    let Some(ground) = Ground::new() else { return };
    let other = ground._dir.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("its"), "root's").unwrap();
    let slots = ground.folder.path().join("slots");
    std::os::unix::fs::symlink(&other, &slots).unwrap();
    let told = |error: Error| rekindle_base::chain(&error);
    let error = told(disk::sweep(&ground.folder, &ground.lock).unwrap_err());
    assert!(error.contains("slots is a symbolic link, and should be a folder"), "{error}");
    told(Area::on_disk(&ground.folder, &ground.lock).unwrap_err());
    assert!(ground.folder.staged().is_empty() && Area::all_of(&ground.folder).is_empty());
    assert!(slots.is_symlink() && fs::read_dir(&other).unwrap().count() == 1);
    let leftover = Leftover::of(&ground.folder).unwrap();
    assert!(leftover.is_empty() && !leftover.iter().any(|left| left.free(&Trust::default(), OnlyCopies::Discard)));
}

/// The record of a run that ended so.
fn record(ground: &Ground, lineage: &str, outcome: Outcome) {
    let record = JobRecord {
        command: vec!["true".into()],
        directory: "/".parse().unwrap(),
        lineage: lineage.into(),
        base: None,
        created: chrono::DateTime::UNIX_EPOCH,
        outcome,
        exit_code: None,
        uptime: std::time::Duration::ZERO,
        failures: 0,
        restores: 0,
    };
    ground.folder.write_record(&ground.lock, &record).unwrap();
}

/// Whoever can write the store can make a folder with the name of a removal that was interrupted.
#[test]
fn a_removal_that_others_made_up_releases_nothing_of_a_job() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    area.slots()[0].begin(id(1)).unwrap().seal(manifest(), 1).unwrap();
    record(&ground, &manifest().lineage, Outcome::Running);
    fs::create_dir(ground.folder.store().join(".del-j")).unwrap();
    let store = Store::open(ground.folder.store(), Access::Write).unwrap();
    assert!(store.finish_removal(ground.folder.name()).unwrap());
    assert!(!store.is_half_removed(ground.folder.name()));
    assert!(area.is_there() && ground.folder.staged().len() == 1, "the job still has its memory");
    area.close().unwrap();
}

/// An older record is signed, too.
#[test]
fn the_record_of_an_earlier_run_makes_no_later_image_superfluous() {
    let Some(ground) = Ground::new() else { return };
    let area = ground.open();
    area.slots()[0].begin(id(1)).unwrap().seal(manifest(), 1).unwrap();
    let Ground { folder, .. } = &ground;
    record(&ground, &manifest().lineage, Outcome::Completed);
    assert_eq!(Leftover::judge(folder, &area).unwrap().needed, None, "that run is over");
    record(&ground, "of-an-earlier-run", Outcome::Completed);
    assert_eq!(Leftover::judge(folder, &area).unwrap().needed, Some(id(1)));
    area.close().unwrap();
}
