use std::os::unix::fs::OpenOptionsExt;

use super::*;
use crate::parts::files::{aside::Aside, content, place::Place, rollback::Expiry, tracked::put_folder_back};
use crate::samples::{job_path, part_path};
use rekindle_os::identity::with_file_rights;
use rekindle_store::manifest::{OpenFile, TrackedEntry, TrackedFolder, TrackedKind};

/// The job's user, and another one.
const ALICE: u32 = 65_534;
const BOB: u32 = 1;

/// An access control list: what the owner, bob, the group and all others may, and what bob and the group may at most.
fn list(owner: u16, bob: u16, group: u16, mask: u16, others: u16) -> Vec<u8> {
    let none = u32::MAX;
    let entries = [(1, owner, none), (2, bob, BOB), (4, group, none), (0x10, mask, none), (0x20, others, none)];
    let entry =
        |(tag, bits, id): (u16, u16, u32)| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat();
    [2_u32.to_le_bytes().to_vec()].into_iter().chain(entries.map(entry)).collect::<Vec<_>>().concat()
}

/// A file system that has lists and attributes: the folder for temporary files may have none.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()
}

/// A folder that other users reach, too.
fn reachable() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    dir
}

fn file(path: &Path, mode: u32) -> File {
    let file = File::create(path).unwrap();
    file.set_permissions(Permissions::from_mode(mode)).unwrap();
    file
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn acl(path: &Path) -> Option<Vec<u8>> {
    xattr::get(&File::open(path).unwrap(), ACL).unwrap()
}

/// What an image has of this file.
fn captured(path: &Path, table: &mut Table) -> OpenFile {
    let file = File::open(path).unwrap();
    let metadata = file.metadata().unwrap();
    OpenFile {
        mode: Some(metadata.mode()),
        part: Some(part_path("files/open-0")),
        owner: Some(Owner { uid: metadata.uid(), gid: metadata.gid() }),
        attributes: table.add(&file).unwrap(),
        ..OpenFile::new(job_path(path), 0)
    }
}

fn make(path: &Path, wanted: &OpenFile, table: &Table, may_give: bool) -> Result<(), RollbackError> {
    let trusted = Trusted::user(if may_give { 0 } else { ALICE });
    let maker = Maker { may_give, trusted, attributes: Some(table.all()) };
    let place = Place::of(path, trusted).unwrap();
    content::make(&place, wanted, &tempfile::tempfile().unwrap(), maker)
}

#[test]
fn a_new_file_has_the_list_and_the_attributes_that_it_had() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = on_disk();
    let path = dir.path().join("file");
    let old = file(&path, 0o640);
    let wanted_list = list(6, 6, 0, 6, 0);
    xattr::set(&old, ACL, &wanted_list).unwrap();
    for (name, value) in [("user.mime_type", "text"), ("security.rekindle", "x"), ("trusted.rekindle", "x")] {
        xattr::set(&old, name, value.as_bytes()).unwrap();
    }
    assert_eq!(mode(&path), 0o660, "the mask is in the place of the group");
    let mut table = Table::default();
    let wanted = captured(&path, &mut table);
    assert_eq!((table.all().len(), table.note()), (1, None));
    fs::remove_file(&path).unwrap();
    make(&path, &wanted, &table, true).unwrap();
    assert_eq!((acl(&path).unwrap(), mode(&path)), (wanted_list, 0o660));
    let made = File::open(&path).unwrap();
    assert_eq!(xattr::get(&made, "user.mime_type").unwrap().unwrap(), b"text");
    for name in ["security.rekindle", "trusted.rekindle"] {
        assert_eq!(xattr::get(&made, name).unwrap(), None, "{name}");
    }
}

/// A folder gives its list to whatever is created in it.
#[test]
fn a_new_file_has_no_list_that_it_did_not_have() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = on_disk();
    let path = dir.path().join("file");
    drop(file(&path, 0o664));
    let mut table = Table::default();
    let wanted = captured(&path, &mut table);
    fs::remove_file(&path).unwrap();
    xattr::set(&File::open(dir.path()).unwrap(), DEFAULT_ACL, &list(7, 7, 7, 7, 0)).unwrap();
    make(&path, &wanted, &table, true).unwrap();
    assert_eq!((acl(&path), mode(&path)), (None, 0o664));
    // Nor has a copy of it.
    let copy = file(&dir.path().join("copy"), 0o600);
    assert!(acl(&dir.path().join("copy")).is_some());
    give_same(&copy, &File::open(&path).unwrap(), &fs::metadata(&path).unwrap(), &path).unwrap();
    assert_eq!((acl(&dir.path().join("copy")), mode(&dir.path().join("copy"))), (None, 0o664));
    // Nor a folder, neither for itself nor for new files.
    let sub = dir.path().join("sub");
    let rights = Rights { mode: 0o40_775, owner: None, attributes: None };
    let maker = Maker { may_give: true, trusted: Trusted::user(0), attributes: Some(&[]) };
    let sub_place = Place::of(&sub, Trusted::user(0)).unwrap();
    assert!(content::make_folder(&sub_place, rights, maker).unwrap());
    let open = File::open(&sub).unwrap();
    assert_eq!([ACL, DEFAULT_ACL].map(|name| xattr::get(&open, name).unwrap()), [None, None]);
    assert_eq!(mode(&sub), 0o775);
    // What an image of an earlier version had is not known: what the folder gives is the best guess.
    let unknown = Maker::plain(true, Trusted::user(0));
    let place = Place::of(&path, Trusted::user(0)).unwrap();
    content::make(&place, &wanted, &tempfile::tempfile().unwrap(), unknown).unwrap();
    assert!(acl(&path).is_some());
}

#[test]
fn folders_and_fifos_have_their_lists() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = on_disk();
    let (sub, pipe) = (dir.path().join("sub"), dir.path().join("pipe"));
    fs::create_dir(&sub).unwrap();
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    let find = |path: &Path| File::options().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
    let lists = [list(7, 7, 0, 7, 0), list(7, 5, 5, 5, 5)];
    xattr::set(&find(&sub), ACL, &lists[0]).unwrap();
    xattr::set(&find(&sub), DEFAULT_ACL, &lists[1]).unwrap();
    xattr::set(&find(&pipe), ACL, &lists[0]).unwrap();
    let mut table = Table::default();
    let numbers = [&sub, &pipe].map(|path| table.add(&find(path)).unwrap());
    let modes = [&sub, &pipe].map(|path| fs::metadata(path).unwrap().mode());
    fs::remove_dir(&sub).unwrap();
    fs::remove_file(&pipe).unwrap();
    let maker = Maker { may_give: true, trusted: Trusted::user(0), attributes: Some(table.all()) };
    let rights = |n: usize| Rights { mode: modes[n], owner: None, attributes: numbers[n] };
    let place = Place::of(&sub, Trusted::user(0)).unwrap();
    assert!(content::make_folder(&place, rights(0), maker).unwrap());
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    maker.give(&find(&pipe), &pipe, rights(1)).unwrap();
    let get = |path: &Path, name| xattr::get(&find(path), name).unwrap();
    assert_eq!(get(&sub, ACL).as_ref(), Some(&lists[0]));
    assert_eq!(get(&sub, DEFAULT_ACL).as_ref(), Some(&lists[1]));
    assert_eq!(get(&pipe, ACL).as_ref(), Some(&lists[0]));
    assert_eq!([&sub, &pipe].map(|path| fs::metadata(path).unwrap().mode()), modes);
}

/// Without the list, the group would have what the mask of the list was.
#[test]
fn a_file_that_cannot_have_its_list_is_not_created() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = on_disk();
    let path = dir.path().join("file");
    xattr::set(&file(&path, 0o600), ACL, &list(6, 6, 0, 6, 0)).unwrap();
    let mut table = Table::default();
    let wanted = captured(&path, &mut table);
    let other = tempfile::tempdir().unwrap();
    // It has no lists.
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("none"), other.path(), Some("ramfs"), flags, None::<&str>).unwrap();
    let elsewhere = other.path().join("file");
    let result = make(&elsewhere, &OpenFile { path: job_path(&elsewhere), ..wanted }, &table, true);
    let left = fs::read_dir(other.path()).unwrap().count();
    // A child of another test may have a file open there until it executes its program.
    nix::mount::umount2(other.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert!(matches!(result, Err(RollbackError::Acl { .. })), "{result:?}");
    assert_eq!(left, 0);
}

#[test]
fn a_file_of_the_jobs_user_gives_no_other_group_rights() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = reachable();
    chown(dir.path(), Some(ALICE), Some(ALICE)).unwrap();
    let path = dir.path().join("file");
    let made = |owner: Owner, mode: u32| {
        let wanted = OpenFile { mode: Some(0o100_000 | mode), owner: Some(owner), ..OpenFile::new(job_path(&path), 0) };
        let make = || make(&path, &wanted, &Table::default(), false);
        let result = with_file_rights(ALICE, ALICE, &[ALICE, 7], make).unwrap();
        let rights = fs::metadata(&path).map(|now| (now.uid(), now.gid(), now.mode() & 0o7777)).ok();
        let _ = fs::remove_file(&path);
        assert_eq!(rights.is_none(), matches!(result, Err(RollbackError::NotItsOwner { .. })), "{result:?}");
        rights
    };
    let owner = |uid, gid| Owner { uid, gid };
    // Its own groups, and one that has no more than all others.
    assert_eq!(made(owner(ALICE, ALICE), 0o660), Some((ALICE, ALICE, 0o660)));
    assert_eq!(made(owner(BOB, 7), 0o660), Some((ALICE, 7, 0o660)));
    assert_eq!(made(owner(BOB, BOB), 0o644), Some((ALICE, ALICE, 0o644)));
    for (owner, mode) in [
        (owner(ALICE, BOB), 0o640),
        (owner(ALICE, BOB), 0o604),
        (owner(ALICE, BOB), 0o2755),
        (owner(BOB, ALICE), 0o4755),
    ] {
        assert_eq!(made(owner, mode), None, "{owner:?} {mode:o}");
    }
}

#[test]
fn a_copy_gives_nobody_more_than_the_original() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = reachable();
    chown(dir.path(), Some(ALICE), Some(ALICE)).unwrap();
    let path = dir.path().join("file");
    let original = file(&path, 0o600);
    xattr::set(&original, ACL, &list(6, 6, 0, 6, 0)).unwrap();
    let copy_of = |original: &File| {
        let copy = dir.path().join("copy");
        let made = file(&copy, 0o600);
        give_same(&made, original, &original.metadata().unwrap(), &path).unwrap();
        let rights = (acl(&copy), mode(&copy));
        fs::remove_file(copy).unwrap();
        rights
    };
    assert_eq!(copy_of(&original), (Some(list(6, 6, 0, 6, 0)), 0o660));
    // The user can keep neither the owner nor the group.
    assert_eq!(with_file_rights(ALICE, ALICE, &[], || copy_of(&original)).unwrap().1, 0o600);
}

#[test]
fn attributes_that_are_too_long_for_an_image_are_left_out() {
    let dir = on_disk();
    let mut table = Table { of_programs: ALL_OF_PROGRAMS - 10, ..Table::default() };
    let path = dir.path().join("file");
    let open = file(&path, 0o600);
    xattr::set(&open, "user.a", b"1234").unwrap();
    assert_eq!(table.add(&open).unwrap(), Some(0));
    assert_eq!((table.add(&open).unwrap(), table.note()), (Some(0), None));
    xattr::set(&open, "user.b", b"12345678").unwrap();
    let number = table.add(&open).unwrap().unwrap();
    assert_eq!(table.all()[usize::try_from(number).unwrap()], Attributes::NONE);
    assert!(table.note().unwrap().contains("user.*"));
    if rekindle_testing::root() {
        table.lists = ALL_LISTS;
        xattr::set(&open, ACL, &list(6, 6, 0, 6, 0)).unwrap();
        table.add(&open).unwrap_err();
    }
}

/// The next restore would find it, and not look at its rights.
#[test]
fn a_tracked_folder_that_cannot_have_its_rights_is_not_left_without_them() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = reachable();
    let (data, sub) = (dir.path().join("data"), dir.path().join("data/sub"));
    fs::create_dir(&data).unwrap();
    chown(&data, Some(ALICE), Some(ALICE)).unwrap();
    let entry = |path: &Path, mode, uid| TrackedEntry {
        path: job_path(path),
        kind: TrackedKind::Folder { mode, owner: Owner { uid, gid: uid }, attributes: None },
    };
    let entries = vec![entry(&data, 0o40_755, ALICE), entry(&sub, 0o40_770, BOB)];
    let folder = TrackedFolder { path: job_path(&data), entries };
    let put_back = || {
        let mut aside = Aside::of(&folder, Trusted::user(ALICE), Expiry::of_all_but_the_newest())?;
        put_folder_back(&mut aside, Maker::plain(false, Trusted::user(ALICE)))
    };
    for _ in 0..2 {
        let error = with_file_rights(ALICE, ALICE, &[], put_back).unwrap().unwrap_err();
        assert!(matches!(error, RollbackError::NotItsOwner { .. }), "{error}");
        assert_eq!(fs::read_dir(&data).unwrap().count(), 0);
    }
}
