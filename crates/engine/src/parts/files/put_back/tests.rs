use std::path::PathBuf;

use super::super::capture;
use super::*;
use crate::samples::{job_path, part_path};
use rekindle_store::manifest::{TrackedEntry, TrackedFolder, TrackedKind};

fn file(path: &Path, size: u64, append: bool) -> OpenFile {
    OpenFile { append, position: size, ..OpenFile::new(job_path(path), size) }
}

fn root() -> Maker<'static> {
    Maker::plain(true, Trusted::of(None))
}

fn beside() -> Keeper<'static, 'static> {
    Keeper::Beside(Expiry::of_all_but_the_newest())
}

fn put_one_back(file: &OpenFile, content: Option<&[u8]>) -> Result<Option<FileRollback>, RollbackError> {
    let content = content.map(|content| {
        let mut part = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut part, content).unwrap();
        part
    });
    super::put_one_back(file, content.as_ref(), beside(), root(), true)
}

fn check_one(file: &OpenFile) -> Result<(), RollbackError> {
    super::check_one(file, ChangedFiles::Refuse, Trusted::of(None))
}

fn kept(result: Result<Option<FileRollback>, RollbackError>) -> RolledBack {
    match result {
        Ok(Some(FileRollback::Kept(kept))) => kept,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tail_is_kept_and_numbered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    for (round, tail) in [(1, "later"), (2, "again")] {
        std::fs::write(&path, format!("before{tail}")).unwrap();
        let back = kept(put_one_back(&file(&path, 6, true), None));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before");
        assert_eq!(back.kept, dir.path().join(format!("log.rolled-back.{round}")));
        assert_eq!((std::fs::read_to_string(back.kept).unwrap().as_str(), back.bytes), (tail, 5));
    }
    assert_eq!(put_one_back(&file(&path, 6, true), None).unwrap(), None);
}

/// A file that is longer than any disk takes only as much space as its data.
#[test]
fn a_copy_of_a_tail_has_its_holes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    std::fs::write(&path, "before, after").unwrap();
    std::fs::write(dir.path().join(".tmp-data.rolled-back"), "of a crash").unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let back = kept(put_one_back(&file(&path, 6, true), None));
    let meta = std::fs::metadata(&back.kept).unwrap();
    assert_eq!((meta.size(), back.bytes), ((1 << 40) - 6, (1 << 40) - 6));
    assert!(meta.blocks() * 512 < 1 << 20, "{}", meta.blocks());
    let mut begin = [0; 9];
    std::os::unix::fs::FileExt::read_exact_at(&File::open(&back.kept).unwrap(), &mut begin, 0).unwrap();
    assert_eq!(&begin, b", after\0\0");
    assert_eq!(std::fs::read(&path).unwrap(), b"before");
    let names = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with(".tmp-")));
}

/// What is cut is somebody's work: it is not discarded because a disk is full, and the image is not to blame.
#[test]
fn without_room_for_what_is_cut_nothing_is_cut() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let flags = nix::mount::MsFlags::empty();
    let mounted = nix::mount::mount(Some("tmpfs"), dir.path(), Some("tmpfs"), flags, Some("size=1M"));
    if !rekindle_testing::require("root", mounted.is_ok(), &format!("cannot mount a tmpfs: {mounted:?}")) {
        return;
    }
    let path = dir.path().join("data");
    std::fs::write(&path, vec![b'x'; 700 << 10]).unwrap();
    let result = put_one_back(&file(&path, 6, true), None);
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    let size = std::fs::metadata(&path).unwrap().size();
    // A child of another test may have a file open there until it executes its program.
    nix::mount::umount2(dir.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert!(matches!(result, Err(RollbackError::NoRoom { .. })), "{result:?}");
    assert_eq!((names.as_slice(), size), (&["data".into()][..], 700 << 10));
    let error = crate::restore::Error::Rollback(result.unwrap_err());
    assert_eq!(error.blame(), crate::restore::Blame::Machine);
}

#[test]
fn rewritten_content_comes_back_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("progress");
    std::fs::write(&path, "epoch 10, and more").unwrap();
    let inode = std::fs::metadata(&path).unwrap().ino();
    let back = kept(put_one_back(&file(&path, 7, false), Some(b"epoch 7")));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "epoch 7");
    assert_eq!(std::fs::read_to_string(back.kept).unwrap(), "epoch 10, and more");
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), inode);
    assert_eq!(put_one_back(&file(&path, 7, false), Some(b"epoch 7")).unwrap(), None);
}

#[test]
fn a_file_that_is_gone_is_made_from_the_image_with_its_mode() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("progress");
    let part = Some(part_path("files/open-0"));
    let mut wanted = OpenFile { part, mode: Some(0o100_640), ..file(&path, 7, false) };
    check_one(&wanted).unwrap();
    assert_eq!(put_one_back(&wanted, Some(b"epoch 7")).unwrap(), Some(FileRollback::Made(path.clone())));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "epoch 7");
    assert_eq!(std::fs::metadata(&path).unwrap().mode(), 0o100_640);
    check_one(&wanted).unwrap();
    wanted.mode = None;
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(check_one(&wanted), Err(RollbackError::Gone(_))), "CRIU would find another mode");
}

#[test]
fn a_file_gets_the_permissions_back_that_somebody_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("progress");
    std::fs::write(&path, "epoch 7").unwrap();
    let mode = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    mode(0o444);
    let part = Some(part_path("files/open-0"));
    let wanted = OpenFile { part, mode: Some(0o100_644), ..file(&path, 7, false) };
    check_one(&wanted).unwrap();
    assert_eq!(put_one_back(&wanted, Some(b"epoch 7")).unwrap(), None);
    assert_eq!(std::fs::metadata(&path).unwrap().mode(), 0o100_644);
    // Without its content it stays as it is: a log that others may read no more.
    mode(0o600);
    let log = OpenFile { part: None, append: true, ..wanted.clone() };
    check_one(&log).unwrap();
    assert_eq!(put_one_back(&log, None).unwrap(), None);
    assert_eq!(std::fs::metadata(&path).unwrap().mode(), 0o100_600);
    // CRIU compares the others.
    mode(0o4644);
    assert!(matches!(check_one(&wanted), Err(RollbackError::Mode { then: 0o644, now: 0o4644, .. })));
}

#[test]
fn what_can_not_be_put_back_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    assert!(matches!(put_one_back(&file(&path, 6, false), None), Err(RollbackError::Gone(_))));
    assert!(matches!(check_one(&file(&path, 6, false)), Err(RollbackError::Gone(_))));
    std::fs::write(&path, "abc").unwrap();
    assert!(matches!(check_one(&file(&path, 6, false)), Err(RollbackError::Shorter { .. })));
    check_one(&file(&path, 6, true)).unwrap();
    assert!(matches!(put_one_back(&file(&path, 6, false), None), Err(RollbackError::Shorter { .. })));
    assert_eq!(put_one_back(&file(&path, 6, true), None).unwrap(), None);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(matches!(put_one_back(&file(&link, 1, false), None), Err(RollbackError::NotAFile(_))));
    assert!(matches!(check_one(&file(&link, 1, false)), Err(RollbackError::NotAFile(_))));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "abc", "nothing was cut through the link");
    assert!(matches!(put_one_back(&file(dir.path(), 1, false), None), Err(RollbackError::NotAFile(_))));
}
/// A second copy of a database at each restart would waste space and time.
#[test]
fn of_a_large_file_only_what_differs_is_kept_and_only_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.db");
    let then = vec![1; 5 << 20];
    for round in 0..3_u8 {
        let mut now = then.clone();
        now[1 << 20..][..10].fill(round + 2);
        now.resize(6 << 20, round + 2);
        std::fs::write(&path, now).unwrap();
        let inode = std::fs::metadata(&path).unwrap().ino();
        let back = kept(put_one_back(&file(&path, then.len() as u64, false), Some(&then)));
        assert!(std::fs::read(&path).unwrap() == then);
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), inode, "it is the same file");
        let kept = std::fs::read(&back.kept).unwrap();
        assert_eq!((kept.len(), &kept[1 << 20..][..11]), (6 << 20, &[&[round + 2; 10][..], &[1]].concat()[..]));
        assert!(kept[..1 << 20].iter().all(|byte| *byte == 0) && kept[5 << 20..].iter().all(|byte| *byte == round + 2));
        assert!(back.bytes < 2 << 20, "{}", back.bytes);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}

#[test]
fn a_file_that_changed_and_is_not_in_the_image_is_refused_or_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("array");
    std::fs::write(&path, "1234").unwrap();
    let stamp = Some(Stamp::of(&std::fs::metadata(&path).unwrap()));
    let wanted = OpenFile { stamp, ..file(&path, 4, false) };
    check_one(&wanted).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&path, "5678").unwrap();
    let error = check_one(&wanted).unwrap_err();
    assert!(matches!(error, RollbackError::Changed(_)), "{error}");
    assert!(error.to_string().contains("restart.changed-files"), "{error}");
    assert_eq!(crate::restore::Error::Rollback(error).blame(), crate::restore::Blame::Here);
    super::check_one(&wanted, ChangedFiles::Warn, Trusted::of(None)).unwrap();
}

#[test]
fn a_tracked_folder_is_what_it_was_and_what_was_too_much_lies_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let (data, image) = (dir.path().join("data"), dir.path().join("image"));
    std::fs::create_dir_all(data.join("new/within")).unwrap();
    std::fs::create_dir_all(&image).unwrap();
    std::fs::write(data.join("new/within/file"), "new").unwrap();
    std::fs::write(data.join("journal"), "new").unwrap();
    std::fs::write(data.join("table"), "changed").unwrap();
    std::os::unix::fs::symlink("elsewhere", data.join("link")).unwrap();
    let owner =
        rekindle_store::manifest::Owner { uid: nix::unistd::getuid().as_raw(), gid: nix::unistd::getgid().as_raw() };
    let entry = |name: &str, kind| TrackedEntry { path: job_path(data.join(name)), kind };
    let folder = TrackedFolder {
        path: job_path(&data),
        entries: vec![
            TrackedEntry {
                path: job_path(&data),
                kind: TrackedKind::Folder { mode: 0o40_755, owner, attributes: None },
            },
            entry("sub", TrackedKind::Folder { mode: 0o40_700, owner, attributes: None }),
            entry("sub/gone", TrackedKind::File),
            entry("table", TrackedKind::File),
            entry("link", TrackedKind::Link { target: "table".into(), owner: Some(owner) }),
        ],
    };
    let mut aside = Aside::of(&folder, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap();
    super::super::tracked::put_folder_back(&mut aside, root()).unwrap();
    for (name, content) in [("table", "as it was"), ("sub/gone", "here again")] {
        let mut part = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut part, content.as_bytes()).unwrap();
        let wanted = OpenFile {
            mode: Some(0o100_600),
            part: Some(part_path("files/content-1")),
            group: Some(job_path(&data)),
            ..OpenFile::new(job_path(data.join(name)), content.len() as u64)
        };
        super::put_one_back(&wanted, Some(&part), Keeper::Aside(&mut aside), root(), true).unwrap();
        assert_eq!(std::fs::read_to_string(data.join(name)).unwrap(), content);
    }
    let beside = dir.path().join("data.rolled-back.1");
    assert_eq!(aside.finish(), std::slice::from_ref(&beside));
    let mut names: Vec<_> = std::fs::read_dir(&data).unwrap().flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    assert_eq!(names, ["link", "sub", "table"]);
    assert_eq!(std::fs::read_link(data.join("link")).unwrap(), Path::new("table"));
    assert_eq!(std::fs::read_to_string(beside.join("new/within/file")).unwrap(), "new");
    assert_eq!(std::fs::read_to_string(beside.join("table")).unwrap(), "changed");
    assert!(
        Aside::of(&folder, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap().finish().is_empty(),
        "nothing differs any more"
    );
}

/// As Git makes a folder of a branch's file, and the other way round.
#[test]
fn in_a_tracked_folder_a_file_can_take_the_place_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let (owner, attributes) =
        (Owner { uid: nix::unistd::getuid().as_raw(), gid: nix::unistd::getgid().as_raw() }, None);
    let entry = |name: &str, kind| TrackedEntry { path: job_path(data.join(name)), kind };
    let folder = |name| entry(name, TrackedKind::Folder { mode: 0o40_755, owner, attributes });
    let of_file = |name: &str| OpenFile {
        mode: Some(0o100_644),
        part: Some(part_path("files/content-1")),
        group: Some(job_path(&data)),
        ..file(&data.join(name), 4, false)
    };
    let mut entries = vec![folder(""), folder("a"), folder("a/c")];
    entries.extend(["a/b", "x"].map(|name| entry(name, TrackedKind::File)));
    let tracked_folders = vec![TrackedFolder { path: job_path(&data), entries }];
    let open_files = vec![of_file("a/b"), of_file("x")];
    let folders = ["a", "a/c"].map(|name| data.join(name));
    let Owner { uid, gid } = owner;
    let folders = folders.map(|path| Folder { path: job_path(path), mode: 0o40_755, uid, gid, attributes });
    let folders = folders.to_vec();
    let mut manifest = Manifest { folders, open_files, tracked_folders, ..crate::samples::manifest() };
    std::fs::create_dir_all(data.join("x/y")).unwrap();
    std::fs::write(data.join("a"), "now").unwrap();
    let store = rekindle_store::Store::open(&dir.path().join("store"), rekindle_store::Access::Write).unwrap();
    let job = store.create_job(&"j".parse().unwrap()).unwrap();
    check(&manifest, &job, None, ChangedFiles::Refuse).unwrap();
    assert_eq!(make_folders(&manifest, None).unwrap(), 0);
    let mut aside =
        Aside::of(&manifest.tracked_folders[0], Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap();
    tracked::put_folder_back(&mut aside, root()).unwrap();
    for file in &manifest.open_files {
        put_one_back(file, Some(b"then")).unwrap();
        assert_eq!(std::fs::read(&*file.path).unwrap(), b"then");
    }
    let kept = dir.path().join("data.rolled-back.1");
    assert_eq!(std::fs::read(kept.join("a")).unwrap(), b"now");
    assert!(kept.join("x/y").exists() && data.join("a/c").is_dir());
    // What nothing moves aside is refused.
    manifest.tracked_folders.clear();
    std::fs::remove_file(data.join("x")).unwrap();
    std::fs::create_dir(data.join("x")).unwrap();
    assert!(matches!(check(&manifest, &job, None, ChangedFiles::Refuse), Err(RollbackError::NotAFile(_))));
}

/// Images of older versions have neither content nor times.
#[test]
fn what_an_older_image_does_not_put_back_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    std::fs::write(&path, "now").unwrap();
    let changed = std::fs::metadata(&path).unwrap().modified().unwrap();
    let (before, after) = (changed - std::time::Duration::from_secs(1), changed + std::time::Duration::from_secs(1));
    let rewritten = file(&path, 3, false);
    assert!(is_unknown(&rewritten, before));
    assert!(!is_unknown(&rewritten, after), "it is what it was");
    assert!(!is_unknown(&file(&path, 3, true), before), "it is cut");
    let stamp = Some(Stamp::of(&std::fs::metadata(&path).unwrap()));
    assert!(!is_unknown(&OpenFile { stamp, ..rewritten }, before), "the restore is refused");
    assert!(!is_unknown(&file(Path::new("/proc/self/comm"), 0, false), before));
}

/// Users of the machine; bob's files are none of the job's business.
const ALICE: u32 = 65_534;
const BOB: u32 = 1;

fn give(path: &Path, uid: u32) {
    std::os::unix::fs::lchown(path, Some(uid), Some(uid)).unwrap();
}

/// A file that was open in bob's folder, which bob has since replaced by a link to a folder that only root reaches.
fn swapped(dir: &Path) -> (OpenFile, PathBuf) {
    let (shared, secret) = (dir.join("shared"), dir.join("secret"));
    std::fs::create_dir_all(&shared).unwrap();
    std::fs::create_dir_all(&secret).unwrap();
    std::os::unix::fs::symlink(&secret, shared.join("out")).unwrap();
    give(&shared.join("out"), BOB);
    let owner = Some(Owner { uid: BOB, gid: BOB });
    let part = Some(part_path("files/open-0"));
    let wanted = OpenFile { part, owner, mode: Some(0o100_644), ..file(&shared.join("out/passwd"), 4, false) };
    (wanted, secret.join("passwd"))
}

#[test]
fn a_folder_that_became_anothers_link_leads_to_no_file_of_root() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (wanted, target) = swapped(dir.path());
    for is_there in [false, true] {
        if is_there {
            std::fs::write(&target, "root's").unwrap();
            std::fs::set_permissions(&target, Permissions::from_mode(0o644)).unwrap();
        }
        for result in [check_one(&wanted), put_one_back(&wanted, Some(b"evil")).map(drop)] {
            let error = result.unwrap_err();
            assert!(matches!(&error, RollbackError::Link { owner: BOB, .. }), "{error}");
            let link = dir.path().join("shared/out").display().to_string();
            assert!(error.to_string().contains(&link), "{error}");
            assert_eq!(crate::restore::Error::Rollback(error).blame(), crate::restore::Blame::Files);
        }
        assert_eq!(std::fs::read(&target).ok().as_deref(), is_there.then_some(&b"root's"[..]));
    }
    // An administrator moved the folder.
    give(&dir.path().join("shared/out"), 0);
    check_one(&wanted).unwrap();
    put_one_back(&wanted, Some(b"here")).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"here");
}

#[test]
fn the_file_of_another_user_is_not_taken_for_the_jobs() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    std::fs::write(&path, "bob's").unwrap();
    give(&path, BOB);
    let of = |owner: Option<u32>| OpenFile {
        part: Some(part_path("files/open-0")),
        owner: owner.map(|uid| Owner { uid, gid: uid }),
        ..file(&path, 5, false)
    };
    for (then, name) in [(ALICE, "nobody"), (0, "root")] {
        for result in [check_one(&of(Some(then))), put_one_back(&of(Some(then)), Some(b"inner")).map(drop)] {
            let error = result.unwrap_err();
            assert!(matches!(error, RollbackError::Owner { now: BOB, .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("belongs to user daemon and belonged to user ") && text.contains(name), "{text}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"bob's");
    }
    // It was bob's at the snapshot, or the image is old.
    for then in [Some(BOB), None] {
        check_one(&of(then)).unwrap();
        put_one_back(&of(then), Some(b"as it was")).unwrap();
    }
    // A file of root that bob has given this name, as some kernels let him.
    give(&path, 0);
    std::fs::hard_link(&path, dir.path().join("elsewhere")).unwrap();
    for result in [check_one(&of(Some(BOB))), put_one_back(&of(Some(BOB)), Some(b"inner")).map(drop)] {
        assert!(matches!(result, Err(RollbackError::Owner { now: 0, then: BOB, .. })), "{result:?}");
    }
    std::fs::remove_file(dir.path().join("elsewhere")).unwrap();
    // A backup was put back by root, or the file is the job's user's.
    for now in [0, ALICE] {
        give(&path, now);
        super::check_one(&of(Some(BOB)), ChangedFiles::Refuse, Trusted::user(ALICE)).unwrap();
        let content = File::open(&path).unwrap();
        super::put_one_back(&of(Some(BOB)), Some(&content), beside(), Maker::plain(false, Trusted::user(ALICE)), true)
            .unwrap();
    }
}

#[test]
fn a_fifo_or_folder_of_another_user_is_refused() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (pipe, sub) = (dir.path().join("pipe"), dir.path().join("sub"));
    let fifo = Fifo { path: job_path(&pipe), mode: 0o10_640, uid: ALICE, gid: ALICE, attributes: None };
    let folder = Folder { path: job_path(&sub), mode: 0o40_751, uid: ALICE, gid: ALICE, attributes: None };
    let manifest = Manifest { fifos: vec![fifo.clone()], folders: vec![folder.clone()], ..crate::samples::manifest() };
    assert!(make_fifo(&fifo, root()).unwrap() && make_folder(&folder, root()).unwrap());
    assert_eq!([&pipe, &sub].map(|path| std::fs::metadata(path).unwrap().uid()), [ALICE; 2]);
    assert_eq!([&pipe, &sub].map(|path| std::fs::metadata(path).unwrap().mode()), [0o10_640, 0o40_751]);
    assert!(!make_fifo(&fifo, root()).unwrap() && !make_folder(&folder, root()).unwrap());
    let store = rekindle_store::Store::open(&dir.path().join("store"), rekindle_store::Access::Write).unwrap();
    let job = store.create_job(&"j".parse().unwrap()).unwrap();
    check(&manifest, &job, None, ChangedFiles::Refuse).unwrap();
    for path in [&pipe, &sub] {
        give(path, BOB);
        let error = check(&manifest, &job, None, ChangedFiles::Refuse).unwrap_err();
        assert!(matches!(&error, RollbackError::Owner { path: named, .. } if named == path), "{error}");
    }
    make_fifo(&fifo, root()).unwrap_err();
    make_folder(&folder, root()).unwrap_err();
    // Nothing is created through bob's link.
    let (of_root, link) = (dir.path().join("root"), dir.path().join("link"));
    std::fs::create_dir(&of_root).unwrap();
    std::os::unix::fs::symlink(&of_root, &link).unwrap();
    give(&link, BOB);
    make_fifo(&Fifo { path: job_path(link.join("pipe")), ..fifo }, root()).unwrap_err();
    make_folder(&Folder { path: job_path(link.join("sub")), ..folder }, root()).unwrap_err();
    assert_eq!(std::fs::read_dir(&of_root).unwrap().count(), 0);
}

/// A job of a user works with that user's rights, also on the folders that stay open.
#[test]
fn the_rights_of_the_jobs_user_are_enough_for_its_files() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o711)).unwrap();
    let home = dir.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::fs::set_permissions(&home, Permissions::from_mode(0o700)).unwrap();
    give(&home, ALICE);
    let alice = crate::launch::identity::lookup("nobody").unwrap();
    let owner = Some(Owner { uid: ALICE, gid: ALICE });
    let part = Some(part_path("files/open-0"));
    let wanted = OpenFile { part, owner, mode: Some(0o100_600), ..file(&home.join("state"), 4, false) };
    let mut content = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut content, b"then").unwrap();
    let put = || {
        let maker = Maker::plain(false, Trusted::of(Some(&alice)));
        let put = || super::put_one_back(&wanted, Some(&content), beside(), maker, true);
        with_rights(&wanted.path, Some(&alice), put).unwrap()
    };
    assert_eq!(put(), Some(FileRollback::Made(home.join("state"))));
    std::fs::write(home.join("state"), "later").unwrap();
    assert_eq!(kept(Ok(put())).kept, home.join("state.rolled-back.1"));
    for name in ["state", "state.rolled-back.1"] {
        assert_eq!(std::fs::metadata(home.join(name)).unwrap().uid(), ALICE);
    }
    // Also where the user must first get the right to write.
    let mode = || std::fs::metadata(home.join("state")).unwrap().mode();
    for content in ["then", "later"] {
        std::fs::write(home.join("state"), content).unwrap();
        std::fs::set_permissions(home.join("state"), Permissions::from_mode(0o400)).unwrap();
        assert_eq!(put().is_some(), content == "later");
        assert_eq!((mode(), std::fs::read(home.join("state")).unwrap()), (0o100_600, b"then".to_vec()));
    }
    std::fs::set_permissions(home.join("state"), Permissions::from_mode(0o400)).unwrap();
    let log = OpenFile { part: None, append: true, ..wanted.clone() };
    let maker = Maker::plain(false, Trusted::of(Some(&alice)));
    let error = with_rights(&log.path, Some(&alice), || super::put_one_back(&log, None, beside(), maker, true));
    assert!(matches!(error, Err(RollbackError::Mode { then: 0o600, now: 0o400, .. })), "{error:?}");
}

#[test]
fn a_tracked_folder_is_not_put_back_through_anothers_link() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    std::fs::create_dir_all(real.join("data")).unwrap();
    std::fs::write(real.join("data/new"), "new").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    give(&link, BOB);
    let folder = TrackedFolder { path: job_path(link.join("data")), entries: vec![] };
    let error = Aside::of(&folder, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap_err();
    assert!(matches!(error, RollbackError::Link { .. }), "{error}");
    super::super::aside::move_aside(&link.join("data/new"), Trusted::of(None), Expiry::of_all_but_the_newest())
        .unwrap_err();
    assert!(real.join("data/new").exists());
}

/// A link of root is followed where one of bob is not: bob must not get one with a target of his choice.
#[test]
fn a_link_of_another_user_is_made_again_as_a_link_of_that_user() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (data, link) = (dir.path().join("data"), dir.path().join("data/link"));
    std::fs::create_dir(&data).unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    for of_job in [false, true] {
        std::os::unix::fs::symlink("/etc", &link).unwrap();
        give(&link, BOB);
        let user = of_job.then(|| crate::launch::identity::lookup("nobody").unwrap());
        let view = capture::View { root: std::process::id().cast_signed(), user: user.as_ref() };
        let mut contents = capture::Contents::new(std::slice::from_ref(&data), Vec::new(), 1 << 30);
        let captured = contents
            .capture(&mut Vec::new(), Vec::new(), view, &crate::samples::beneath(dir.path()), &|| false)
            .unwrap();
        std::fs::remove_file(&link).unwrap();
        let maker = Maker::plain(!of_job, Trusted::of(user.as_ref()));
        let mut aside = Aside::of(&captured.tracked[0], maker.trusted, Expiry::of_all_but_the_newest()).unwrap();
        tracked::put_folder_back(&mut aside, maker).unwrap();
        let owner = std::fs::symlink_metadata(&link).map(|link| link.uid()).ok();
        assert_eq!(owner, Some(BOB).filter(|_| !of_job));
        let names: Vec<_> = std::fs::read_dir(&data).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(names.len(), usize::from(!of_job), "{names:?}");
        let _ = std::fs::remove_file(&link);
    }
}

/// CRIU opens whatever has the name, if its size and mode are right.
#[test]
fn a_deleted_file_is_not_opened_by_a_name_that_another_file_has() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [saved, link, other] = [".rekindle-link-1", "link_remap.5", "other"].map(|name| dir.path().join(name));
    std::fs::write(&saved, "of the job").unwrap();
    let owner = Some(Owner { uid: ALICE, gid: ALICE });
    let wanted = SavedLink { link: job_path(&link), saved: job_path(&saved), owner, names: Vec::new() };
    let manifest = Manifest { saved_links: vec![wanted], ..crate::samples::manifest() };
    let put = || put_links_back(&manifest, None);
    give(&saved, BOB);
    assert!(matches!(put(), Err(RollbackError::Owner { now: BOB, then: ALICE, .. })));
    give(&saved, ALICE);
    let is_put = || std::fs::read_to_string(&link).unwrap() == "of the job";
    put().unwrap();
    assert!(is_put());
    put().unwrap();
    assert!(is_put(), "it is the name of a restore that was killed");
    drop_links(&manifest, None);
    assert!(!link.exists() && saved.exists());
    // Another job may be about to open this by the same name.
    std::fs::write(&other, "of another").unwrap();
    std::fs::hard_link(&other, &link).unwrap();
    assert!(matches!(put(), Err(RollbackError::InTheWay(path)) if path == link));
    drop_links(&manifest, None);
    assert_eq!(std::fs::read_to_string(&link).unwrap(), "of another");
    std::fs::remove_file(&saved).unwrap();
    assert!(matches!(put(), Err(RollbackError::Gone(_))));
}

/// The names that the other file has too keep its content.
#[test]
fn a_name_that_was_given_to_another_file_gets_a_file_of_its_own_again() {
    let dir = tempfile::tempdir().unwrap();
    let [best, last] = ["best", "last"].map(|name| dir.path().join(name));
    std::fs::write(&best, "the best").unwrap();
    std::fs::write(&last, "the last").unwrap();
    let recorded = |path: &Path| OpenFile {
        mode: Some(0o100_644),
        part: Some(part_path("files/content-1")),
        stamp: Some(Stamp::of(&std::fs::metadata(path).unwrap())),
        ..file(path, 8, false)
    };
    let files = [&best, &last].map(|path| recorded(path));
    std::fs::write(&last, "the next").unwrap();
    std::fs::remove_file(&best).unwrap();
    std::fs::hard_link(&last, &best).unwrap();
    for (file, content) in files.iter().zip(["the best", "the last"]) {
        let kept = kept(put_one_back(file, Some(content.as_bytes()))).kept;
        assert_eq!(std::fs::read_to_string(kept).unwrap(), "the next");
    }
    assert_eq!([&best, &last].map(|path| std::fs::read_to_string(path).unwrap()), ["the best", "the last"]);
    // What was one file stays one.
    let links = Links::of(&Manifest { open_files: files.to_vec(), ..crate::samples::manifest() });
    assert!(files.iter().all(|file| links.is_alone(file)));
    let one = Links::of(&Manifest { open_files: vec![files[0].clone(); 2], ..crate::samples::manifest() });
    assert!(!one.is_alone(&files[0]));
    // A file of another file system can have the same inode.
    let mut elsewhere = files[0].clone();
    elsewhere.stamp.as_mut().unwrap().changed_ns += 1;
    let two = Links::of(&Manifest { open_files: vec![files[0].clone(), elsewhere], ..crate::samples::manifest() });
    assert!(two.is_alone(&files[0]));
}

#[test]
fn a_file_with_the_longest_name_is_put_back_and_its_content_kept() {
    let dir = tempfile::tempdir().unwrap();
    for length in [226, 241, 255] {
        let path = dir.path().join("n".repeat(length));
        std::fs::write(&path, "before and later").unwrap();
        let back = kept(put_one_back(&file(&path, 6, true), None));
        assert_eq!((std::fs::read_to_string(&path).unwrap(), back.bytes), ("before".into(), 10));
        assert_eq!(std::fs::read_to_string(&back.kept).unwrap(), " and later", "{}", back.kept.display());
        std::fs::write(&path, "before and again").unwrap();
        let again = kept(put_one_back(&file(&path, 6, true), None));
        assert!(again.kept != back.kept && back.kept.exists());
        // One that is gone, too.
        std::fs::remove_file(&path).unwrap();
        let gone =
            OpenFile { mode: Some(0o100_600), part: Some(part_path("files/content-1")), ..file(&path, 4, false) };
        assert!(matches!(put_one_back(&gone, Some(b"here")), Ok(Some(FileRollback::Made(_)))));
    }
}

/// A restore that fails is followed by one of another image. What the job had last must not be lost by that.
#[test]
fn the_first_copy_since_the_newest_image_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large");
    let wanted = OpenFile { part: Some(part_path("files/content-1")), ..file(&path, 5 << 20, false) };
    let put = |byte: u8, expiry| {
        std::fs::write(&path, vec![byte; 5 << 20]).unwrap();
        let mut part = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut part, &vec![9; 5 << 20]).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        kept(super::put_one_back(&wanted, Some(&part), Keeper::Beside(expiry), root(), true)).kept
    };
    let before = put(1, Expiry::of_all_but_the_newest());
    std::thread::sleep(std::time::Duration::from_millis(20));
    let expiry = Expiry::since(SystemTime::now());
    let first = put(2, expiry);
    assert!(!before.exists());
    let [second, third] = [3, 4].map(|byte| put(byte, expiry));
    assert_eq!(std::fs::read(&first).unwrap()[0], 2);
    assert!(!second.exists() || second == third);
    assert_eq!(std::fs::read(&third).unwrap()[0], 4);
    let fourth = put(5, expiry);
    assert_eq!([&first, &fourth].map(|path| std::fs::read(path).unwrap()[0]), [2, 5]);
    assert!(!third.exists());
    let copies = std::fs::read_dir(dir.path()).unwrap().count() - 1;
    assert_eq!(copies, 2);
}

#[test]
fn what_cannot_be_saved_beside_a_file_is_not_overwritten() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("app.log");
    std::fs::write(&path, "before").unwrap();
    give(&path, ALICE);
    let then = Stamp::of(&std::fs::metadata(&path).unwrap());
    std::fs::write(&path, "before and later").unwrap();
    let as_alice = |work: &(dyn Fn() -> Result<(), RollbackError> + Sync)| {
        identity::with_file_rights(ALICE, ALICE, &[ALICE], work).unwrap()
    };
    let trusted = Trusted::user(ALICE);
    let maker = Maker::plain(false, trusted);
    let rewritten = OpenFile { part: Some(part_path("files/content-1")), stamp: Some(then), ..file(&path, 6, false) };
    let mut content = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut content, b"before").unwrap();
    let put = || super::put_one_back(&rewritten, Some(&content), beside(), maker, true).map(drop);
    let refused = as_alice(&put).unwrap_err();
    assert!(matches!(&refused, RollbackError::NoCopy { .. }), "{refused}");
    assert!(refused.to_string().contains(&format!("in {}", dir.path().display())), "{refused}");
    // A log that is only appended to can stay as it is.
    as_alice(&|| super::put_one_back(&file(&path, 6, true), None, beside(), maker, true).map(drop)).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "before and later");
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["app.log"]);
    // Where it can be saved, there is no objection.
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    as_alice(&put).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "before");
    // One that has not changed needs no copy, wherever it is now.
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(&path, dir.path().join("other")).unwrap();
    std::fs::copy(dir.path().join("other"), &path).unwrap();
    give(&path, ALICE);
    as_alice(&put).unwrap();
}

/// Nothing is put back then.
#[test]
fn a_file_that_the_user_may_write_no_more_is_refused_before_anything_is_changed() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("app.log");
    std::fs::write(&path, "before").unwrap();
    give(&path, ALICE);
    let log = OpenFile { mode: Some(0o100_644), ..file(&path, 6, true) };
    let with_content = OpenFile { part: Some(part_path("files/content-1")), ..log.clone() };
    let check = |file: &OpenFile| {
        let check = || super::check_one(file, ChangedFiles::Refuse, Trusted::user(ALICE));
        identity::with_file_rights(ALICE, ALICE, &[ALICE], check).unwrap()
    };
    for mode in [0o644, 0o600] {
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        check(&log).unwrap();
    }
    std::fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    assert!(matches!(check(&log), Err(RollbackError::Mode { then: 0o644, now: 0o444, .. })));
    // Its mode is given back with its content.
    check(&with_content).unwrap();
    // Not one that belongs to somebody else, if the user could write it then.
    give(&path, 0);
    let shared = OpenFile { mode: Some(0o100_666), ..with_content.clone() };
    assert!(matches!(check(&shared), Err(RollbackError::Mode { then: 0o666, now: 0o444, .. })));
    check(&with_content).unwrap();
}

#[test]
fn a_file_that_others_may_read_now_is_for_its_owner_before_it_gets_its_content() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("token");
    std::fs::write(&path, "new").unwrap();
    give(&path, ALICE);
    std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let secret = OpenFile { part: Some(part_path("files/content-1")), mode: Some(0o100_600), ..file(&path, 6, false) };
    assert_eq!(super::narrowed(&secret, 0o100_644), 0o100_600);
    assert_eq!(super::narrowed(&secret, 0o100_444), 0o100_400, "and no more than now");
    let mut content = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut content, b"before").unwrap();
    let maker = Maker::plain(false, Trusted::user(ALICE));
    let put = || super::put_one_back(&secret, Some(&content), beside(), maker, true).map(drop);
    let put = || identity::with_file_rights(ALICE, ALICE, &[ALICE], put).unwrap();
    let mode = || std::fs::metadata(&path).unwrap().mode() & 0o7777;
    // One whose newer content can be kept nowhere stays as it was.
    assert!(matches!(put(), Err(RollbackError::NoCopy { .. })));
    assert_eq!((mode(), std::fs::read_to_string(&path).unwrap().as_str()), (0o644, "new"));
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    put().unwrap();
    assert_eq!((mode(), std::fs::read_to_string(&path).unwrap().as_str()), (0o600, "before"));
}

#[test]
fn a_protected_file_that_is_not_put_back_stays_protected() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("object");
    std::fs::write(&path, "changed").unwrap();
    give(&path, ALICE);
    std::fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    let part = Some(part_path("files/content-1"));
    let wanted = OpenFile { part, mode: Some(0o100_640), ..file(&path, 6, false) };
    let mut content = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut content, b"before").unwrap();
    let maker = Maker::plain(false, Trusted::user(ALICE));
    let put = || super::put_one_back(&wanted, Some(&content), beside(), maker, true).map(drop);
    let put = || identity::with_file_rights(ALICE, ALICE, &[ALICE], put).unwrap();
    // Its content can be kept nowhere.
    assert!(matches!(put(), Err(RollbackError::NoCopy { .. })));
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o444);
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    put().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
}

/// The newer images would be gone, and with them the lock.
#[test]
fn the_store_in_a_tracked_folder_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let store = data.join("deep/store");
    std::fs::create_dir_all(store.join("images/1")).unwrap();
    std::fs::write(data.join("table"), "as it was").unwrap();
    let here = capture::View { root: std::process::id().cast_signed(), user: None };
    let draft = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    let mut contents = capture::Contents::new(std::slice::from_ref(&data), Vec::new(), 1 << 30).without_store(&store);
    let captured =
        contents.capture(&mut files, Vec::new(), here, &crate::samples::beneath(draft.path()), &|| false).unwrap();
    assert_eq!(files.iter().map(|file| file.path.to_path_buf()).collect::<Vec<_>>(), [data.join("table")]);
    let known: Vec<_> = captured.tracked[0].entries.iter().map(|entry| entry.path.to_path_buf()).collect();
    assert!(known.iter().all(|path| !path.starts_with(&store)), "{known:?}");
    std::fs::create_dir_all(store.join("images/2")).unwrap();
    std::fs::write(data.join("new"), "new").unwrap();
    for is_known in [true, false] {
        let mut folder = captured.tracked[0].clone();
        // On another machine the store can be in a new folder.
        folder.entries.retain(|entry| is_known || entry.path != data.join("deep"));
        let aside = Aside::of(&folder, Trusted::of(None), Expiry::of_all_but_the_newest()).unwrap();
        let mut aside = aside.without_store(&store);
        tracked::put_folder_back(&mut aside, root()).unwrap();
        aside.finish();
        assert!(store.join("images/1").is_dir() && store.join("images/2").is_dir());
        assert!(!data.join("new").exists());
    }
}
