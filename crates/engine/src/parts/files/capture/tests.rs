use crate::parts::files::rollback::Expiry;
use crate::samples::job_path;
use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;

use super::*;

fn here() -> View<'static> {
    View { root: std::process::id().cast_signed(), user: None }
}

fn written(paths: &[&Path]) -> Vec<OpenFile> {
    paths.iter().map(|path| OpenFile::new(job_path(path), 0)).collect()
}

fn content(draft: &Path, file: &OpenFile) -> Vec<u8> {
    fs::read(draft.join(file.part.as_ref().unwrap())).unwrap()
}

/// A folder on a disk: the folder for temporary files may be in memory.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap()
}

#[test]
fn a_copy_from_before_the_freeze_is_made_equal_in_it() {
    let (dir, draft) = (on_disk(), tempfile::tempdir().unwrap());
    let [same, changed, holes] = ["same", "changed", "holes"].map(|name| dir.path().join(name));
    let large = vec![7; 3 << 20];
    [&same, &changed, &holes].into_iter().for_each(|path| fs::write(path, &large).unwrap());
    std::thread::sleep(SETTLED + SETTLED);
    let open = [&same, &changed, &holes].map(|path| File::options().append(false).write(true).open(path).unwrap());
    let own = [std::process::id().cast_signed()];
    let mut contents = Contents::new(&[], Vec::new(), 1 << 30);
    assert!(contents.foresee(&own, here()).unwrap() >= 9 << 20);
    contents.copy_ahead(&own, here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    let inode =
        |path: &Path| contents.ahead.get(path).map(|ahead| fs::metadata(draft.path().join(&ahead.part)).unwrap().ino());
    let before = [&same, &changed].map(|path| inode(path).unwrap());
    std::os::unix::fs::FileExt::write_all_at(&open[1], b"new", 1 << 20).unwrap();
    open[2].set_len(1 << 20).unwrap();
    open[2].set_len(2 << 20).unwrap();
    let mut files = written(&[&same, &changed, &holes]);
    let captured =
        contents.capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    contents.complete(&crate::samples::beneath(draft.path())).unwrap();
    assert!(captured.notes.is_empty(), "{captured:?}");
    for (file, path) in files.iter().zip([&same, &changed, &holes]) {
        assert!(content(draft.path(), file) == fs::read(path).unwrap(), "{}", path.display());
        assert_eq!(file.size, fs::metadata(path).unwrap().size());
    }
    let after = [0, 1].map(|n: usize| fs::metadata(draft.path().join(files[n].part.as_ref().unwrap())).unwrap().ino());
    assert_eq!(before, after, "the copies of before are used");
}

/// The kernel notes the time of a write through a mapping only at the first one to a page.
#[test]
fn a_file_that_was_mapped_while_it_was_copied_ahead_is_copied_again() {
    use std::io::{BufRead, BufReader, Write};

    const MAPS: &str = "import mmap, sys\n\
                        for line in sys.stdin:\n\
                        \x20   if line == 'map\\n':\n\
                        \x20       with open(sys.argv[1], 'r+b') as file: memory = mmap.mmap(file.fileno(), 0)\n\
                        \x20       memory[0] = 1\n\
                        \x20   if line == 'unmap\\n':\n\
                        \x20       memory[0] = 2\n\
                        \x20       memory.close()\n\
                        \x20   print('done', flush=True)";
    let (dir, draft) = (on_disk(), tempfile::tempdir().unwrap());
    let path = dir.path().join("data");
    fs::write(&path, vec![7; 3 << 20]).unwrap();
    let _open = File::options().write(true).open(&path).unwrap();
    let mut python = std::process::Command::new("python3");
    let piped = std::process::Stdio::piped;
    let mut child = python.arg("-c").arg(MAPS).arg(&path).stdin(piped()).stdout(piped()).spawn().unwrap();
    let pipes = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let pipes = std::sync::Mutex::new((pipes, Vec::<&str>::new()));
    let tell = |word: &'static str| {
        let ((into, from), told) = &mut *pipes.lock().unwrap();
        if !told.contains(&word) {
            told.push(word);
            writeln!(into, "{word}").unwrap();
            from.read_line(&mut String::new()).unwrap();
            std::thread::sleep(SETTLED + SETTLED);
        }
    };
    let own = [std::process::id().cast_signed()];
    let mut contents = Contents::new(&[], Vec::new(), 1 << 30);
    contents.foresee(&own, here()).unwrap();
    // Asked after the files were examined.
    let map = || {
        tell("map");
        false
    };
    contents.copy_ahead(&own, here(), &crate::samples::beneath(draft.path()), &map).unwrap();
    assert!(contents.ahead.contains_key(&path));
    tell("unmap");
    let mut files = written(&[&path]);
    contents.capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(fs::read(&path).unwrap()[0], 2);
    assert!(content(draft.path(), &files[0]) == fs::read(&path).unwrap(), "the copy is the one from before");
}

/// A job can have thousands of processes.
#[test]
fn looking_at_the_processes_can_be_cancelled() {
    let own = [std::process::id().cast_signed(); 3];
    let asked = std::cell::Cell::new(0);
    let cancelled = || asked.replace(asked.get() + 1) == 1;
    assert!(select::uses_now(&own, &cancelled).is_none());
    assert_eq!(asked.get(), 2, "not after it is cancelled");
    assert!(select::uses_now(&own, &|| false).is_some());
}

/// The job is frozen meanwhile.
#[test]
fn a_copy_in_the_freeze_can_be_stopped() {
    let (dir, draft) = (on_disk(), tempfile::tempdir().unwrap());
    let paths = ["one", "other"].map(|name| dir.path().join(name));
    paths.iter().for_each(|path| fs::write(path, [7; 5000]).unwrap());
    let asked = std::sync::atomic::AtomicU32::new(0);
    for after in 0..3 {
        asked.store(0, std::sync::atomic::Ordering::SeqCst);
        let stopped = || asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) >= after;
        let mut files = written(&[&paths[0], &paths[1]]);
        let mut contents = Contents::new(&[], Vec::new(), 1 << 30);
        let error = contents
            .capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &stopped)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted, "after {after}");
        let _ = fs::remove_dir_all(draft.path().join("files"));
    }
}

#[test]
fn what_is_beyond_the_limit_is_left_out_with_all_that_belongs_to_it_and_named() {
    let (dir, draft) = (on_disk(), tempfile::tempdir().unwrap());
    let [database, log, small] = ["data.db", "data.db-wal", "small"].map(|name| dir.path().join(name));
    fs::write(&database, [&select_magic()[..], &[0; 90 << 10]].concat()).unwrap();
    fs::write(&log, [1; 1 << 10]).unwrap();
    fs::write(&small, "small").unwrap();
    let mut contents = Contents::new(&[], Vec::new(), 80 << 10);
    let mut files = written(&[&database, &small]);
    let captured =
        contents.capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    let part = |path: &Path| files.iter().find(|file| file.path == path).unwrap().part.is_some();
    assert_eq!((part(&database), part(&log), part(&small)), (false, false, true));
    assert!(files.iter().all(|file| file.stamp.is_some()));
    let [note] = captured.notes.as_slice() else { panic!("{captured:?}") };
    assert!(note.contains("data.db") && note.contains("snapshot.file-limit"), "{note}");
    assert!(captured.absent.is_empty(), "nothing is moved aside beside a database that is not put back");
    let (mut all, draft_of_all) = (written(&[&database]), tempfile::tempdir().unwrap());
    let mut unlimited = Contents::new(&[], Vec::new(), 1 << 30);
    let captured = unlimited
        .capture(&mut all, Vec::new(), here(), &crate::samples::beneath(draft_of_all.path()), &|| false)
        .unwrap();
    assert_eq!(
        captured.absent.iter().map(|path| path.to_path_buf()).collect::<Vec<_>>(),
        [dir.path().join("data.db-journal"), dir.path().join("data.db-shm")]
    );
    // A file in memory is kept whatever the limit is.
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let shared = memory.path().join("shared");
    fs::write(&shared, [3; 200 << 10]).unwrap();
    let mut files = written(&[&shared]);
    files[0].append = true;
    let captured = contents
        .capture(&mut files, vec![shared.clone()], here(), &crate::samples::beneath(draft.path()), &|| false)
        .unwrap();
    assert!(captured.notes.is_empty() && content(draft.path(), &files[0]) == fs::read(&shared).unwrap());
}

/// One file of a group from the snapshot and another from the future do not match.
#[test]
fn a_group_with_a_file_that_cannot_be_opened_is_left_out_and_named() {
    /// A lease is broken by an open in any process, also its holder's.
    const LEASE: &str = "import fcntl, os, signal, sys, time\n\
                         signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
                         fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
                         print('held', flush=True)\n\
                         time.sleep(60)";
    struct Holder(std::process::Child);
    impl Drop for Holder {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let dir = on_disk();
    let data = dir.path().join("data");
    fs::create_dir(&data).unwrap();
    let [database, log, one, other] =
        [dir.path().join("data.db"), dir.path().join("data.db-wal"), data.join("one"), data.join("other")];
    fs::write(&database, select_magic()).unwrap();
    [&log, &one, &other].into_iter().for_each(|path| fs::write(path, "content").unwrap());
    let lease = |path: &Path| {
        let mut python = std::process::Command::new("python3");
        let held = python.args(["-c", LEASE]).arg(path).stdout(std::process::Stdio::piped()).spawn();
        let mut held = Holder(held.unwrap());
        let mut said = [0; 5];
        io::Read::read_exact(held.0.stdout.as_mut().unwrap(), &mut said).unwrap();
        held
    };
    for (leased, group) in [(&one, &data), (&database, &database), (&log, &database)] {
        let _held = lease(leased);
        let draft = tempfile::tempdir().unwrap();
        let mut contents = Contents::new(std::slice::from_ref(&data), Vec::new(), 1 << 30);
        let mut files = written(&[&log]);
        let captured = contents
            .capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false)
            .unwrap();
        assert_eq!(files.len(), 4, "{files:?}");
        for file in &files {
            assert!(file.stamp.is_some(), "{file:?}");
            assert_eq!(file.part.is_none(), file.group.as_deref() == Some(group) || file.path == *group, "{file:?}");
        }
        assert_eq!(captured.tracked.is_empty(), *group == data);
        assert_eq!(captured.absent.is_empty(), *group == database);
        let [note] = captured.notes.as_slice() else { panic!("{captured:?}") };
        let named = [group, leased].iter().all(|path| note.contains(path.to_str().unwrap()));
        assert!(named && note.contains("a lease on it") && note.contains("restart.changed-files"), "{note}");
    }
}

/// The folder `lost+found` of a file system is root's.
#[test]
fn a_folder_that_is_closed_to_the_user_is_no_part_of_a_tracked_one() {
    if !rekindle_testing::root() {
        return;
    }
    let nobody = crate::launch::identity::lookup("nobody").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let [lost, list, own] = ["lost+found", "list", "own"].map(|name| data.join(name));
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    [&lost, &list, &own].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
    [data.join("state"), lost.join("x")].iter().for_each(|path| fs::write(path, "content").unwrap());
    [dir.path(), &data, &list].into_iter().for_each(|path| mode(path, 0o755));
    mode(&lost, 0o700);
    std::os::unix::fs::chown(&own, Some(nobody.uid), Some(nobody.gid)).unwrap();
    mode(&own, 0o755);
    let capture = || {
        let draft = tempfile::tempdir().unwrap();
        let view = View { user: Some(&nobody), ..here() };
        let mut contents = Contents::new(std::slice::from_ref(&data), Vec::new(), 1 << 30);
        let mut files = Vec::new();
        contents.capture(&mut files, Vec::new(), view, &crate::samples::beneath(draft.path()), &|| false).unwrap()
    };
    let captured = capture();
    assert!(captured.notes.is_empty(), "{captured:?}");
    let kind = |path: &Path| {
        let entries = &captured.tracked[0].entries;
        entries.iter().find(|entry| entry.path == path).map(|entry| entry.kind.clone())
    };
    assert_eq!((kind(&lost), kind(&lost.join("x"))), (Some(TrackedKind::Other), None));
    assert!(matches!(kind(&list), Some(TrackedKind::Folder { .. })));
    let trusted = crate::parts::files::place::Trusted::of(Some(&nobody));
    let maker = crate::parts::files::rights::Maker::plain(false, trusted);
    let put = || {
        let mut aside =
            crate::parts::files::aside::Aside::of(&captured.tracked[0], trusted, Expiry::of_all_but_the_newest())?;
        crate::parts::files::tracked::put_folder_back(&mut aside, maker)
    };
    identity::with_file_rights(nobody.uid, nobody.gid, &nobody.groups, put).unwrap().unwrap();
    // What the job can change and we cannot see is not kept apart from the rest of the folder.
    for (folder, bits) in [(&list, 0o711), (&own, 0o000)] {
        mode(folder, bits);
        let captured = capture();
        let [note] = captured.notes.as_slice() else { panic!("{captured:?}") };
        assert!(note.contains(folder.to_str().unwrap()) && captured.tracked.is_empty(), "{captured:?}");
        mode(folder, 0o755);
    }
}

/// What a restore replaces is kept in a folder that the user must be allowed to create.
#[test]
fn a_file_that_a_restore_could_not_put_back_is_named() {
    if !rekindle_testing::root() {
        return;
    }
    let nobody = crate::launch::identity::lookup("nobody").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let [sub, file, read] = ["sub", "sub/file", "read"].map(|name| data.join(name));
    fs::create_dir_all(&sub).unwrap();
    [&file, &read].into_iter().for_each(|path| fs::write(path, "content").unwrap());
    for path in [dir.path(), &data, &sub] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&read, fs::Permissions::from_mode(0o644)).unwrap();
    let give = |path: &Path, uid| std::os::unix::fs::chown(path, Some(uid), Some(uid)).unwrap();
    let notes = || {
        let draft = tempfile::tempdir().unwrap();
        let view = View { user: Some(&nobody), ..here() };
        let mut contents = Contents::new(std::slice::from_ref(&data), Vec::new(), 1 << 30);
        contents.foresee(&[], view).unwrap();
        contents
            .capture(&mut Vec::new(), Vec::new(), view, &crate::samples::beneath(draft.path()), &|| false)
            .unwrap()
            .notes
    };
    assert_eq!(notes(), [""; 0], "the user can change nothing");
    give(&file, nobody.uid);
    let [note] = &notes()[..] else { panic!("{:?}", notes()) };
    let advice = format!("Let that user write to {}", data.display());
    assert!(note.contains(file.to_str().unwrap()) && note.contains("user nobody") && note.contains(&advice), "{note}");
    for writable in [sub.as_path(), &data, dir.path()] {
        give(writable, nobody.uid);
        assert_eq!(notes(), [""; 0], "{}", writable.display());
        give(writable, 0);
    }
}

/// A job creates such a file with one ftruncate(2). With work for each 16 MiB of its length, this took 8 TiB of memory
/// for the long one, and 2 GB and most of a minute in the freeze for the other one.
#[test]
fn holes_take_neither_memory_nor_time() {
    let (dir, draft) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let [long, longer] = ["long", "longer"].map(|name| dir.path().join(name));
    let open = |path: &Path, length: u64, at: u64| {
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"data", at).unwrap();
        file.set_len(length).unwrap();
        file
    };
    let _open = [open(&long, 1 << 49, 1 << 48), open(&longer, 1 << 62, 0)];
    let own = [std::process::id().cast_signed()];
    let mut contents = Contents::new(&[], Vec::new(), 1 << 30);
    let began = std::time::Instant::now();
    // Tests beside this one have files open, too.
    assert!(contents.foresee(&own, here()).unwrap() < 1 << 30);
    contents.copy_ahead(&own, here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    let mut files = written(&[&long, &longer]);
    let captured =
        contents.capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let copy = File::open(draft.path().join(files[0].part.as_ref().unwrap())).unwrap();
    let mut found = [0; 6];
    std::os::unix::fs::FileExt::read_exact_at(&copy, &mut found, (1 << 48) - 1).unwrap();
    assert_eq!((&found, copy.metadata().unwrap().size()), (b"\0data\0", 1 << 49));
    // A store cannot describe it.
    assert_eq!((&files[1].part, files[1].size), (&None, 1 << 62));
    let [note] = captured.notes.as_slice() else { panic!("{captured:?}") };
    assert!(note.contains("/longer, and") && note.contains("1.0 PiB") && !note.contains("file-limit"), "{note}");
}

/// Copied by another process: a child that another test forks meanwhile would have our descriptor for a moment, and a
/// file that is open for writing cannot be executed (ETXTBSY).
fn copy_of_sleep(to: &Path) {
    // Another test may reap it: what counts is the file.
    let _ = std::process::Command::new("cp").arg("/bin/sleep").arg(to).status();
    assert!(to.exists());
}

fn select_magic() -> [u8; 16] {
    *b"SQLite format 3\0"
}

#[test]
fn a_tracked_folder_is_captured_with_the_files_that_nobody_has_open() {
    let (dir, draft) = (on_disk(), tempfile::tempdir().unwrap());
    let data = dir.path().join("data");
    fs::create_dir_all(data.join("base/1")).unwrap();
    fs::write(data.join("base/1/table"), "rows").unwrap();
    std::os::unix::fs::symlink("base", data.join("link")).unwrap();
    // Names of deleted files, in a dump that is under way and in an image.
    for name in ["link_remap.5", ".rekindle-link-000001-link_remap.5"] {
        fs::write(data.join(name), "of another job").unwrap();
    }
    let mut contents = Contents::new(std::slice::from_ref(&data), Vec::new(), 1 << 30);
    let mut files = Vec::new();
    let captured =
        contents.capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    assert_eq!(content(draft.path(), &files[0]), b"rows");
    assert_eq!(files[0].group.as_deref(), Some(&data));
    let [folder] = captured.tracked.as_slice() else { panic!("{captured:?}") };
    let mut names: Vec<_> =
        folder.entries.iter().map(|entry| entry.path.strip_prefix(&data).unwrap().to_owned()).collect();
    names.sort();
    assert_eq!(names, ["", "base", "base/1", "base/1/table", "link"].map(PathBuf::from));
}

/// The type of the file is known from an earlier look; the job's user may have replaced the file since.
#[test]
fn a_fifo_in_place_of_a_file_does_not_hang_the_copy() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("file");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o666)).unwrap();
    let nobody = crate::launch::identity::lookup("nobody").unwrap();
    for user in [None, Some(nobody)] {
        let (draft, path) = (dir.path().join("draft"), path.clone());
        let (sender, done) = mpsc::channel();
        std::thread::spawn(move || {
            let view = View { user: user.as_ref(), ..here() };
            let mut files = written(&[&path]);
            Contents::new(&[], Vec::new(), 1 << 30)
                .capture(&mut files, vec![path], view, &crate::samples::beneath(&draft), &|| false)
                .unwrap();
            let _ = sender.send(files[0].part.clone());
        });
        let part = done.recv_timeout(Duration::from_secs(10));
        assert_eq!(part.expect("it hangs"), None);
    }
}

/// A restore would write it to a file of the link's owner.
#[test]
fn a_file_behind_a_link_of_another_user_is_not_read_with_our_rights() {
    if !rekindle_testing::root() {
        return;
    }
    let (dir, draft) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [theirs, secret] = ["theirs", "secret"].map(|name| dir.path().join(name));
    [&theirs, &secret].into_iter().for_each(|folder| fs::create_dir(folder).unwrap());
    fs::write(secret.join("state"), "root's").unwrap();
    let link = theirs.join("work");
    std::os::unix::fs::symlink(&secret, &link).unwrap();
    let state = link.join("state");
    for tracked in [vec![], vec![link.clone()]] {
        for owner in [1, 0] {
            std::os::unix::fs::lchown(&link, Some(owner), Some(owner)).unwrap();
            let mut contents = Contents::new(&tracked, Vec::new(), 1 << 30);
            contents.foresee(&[], here()).unwrap();
            let mut files = written(&[&state]);
            let captured = contents
                .capture(&mut files, vec![state.clone()], here(), &crate::samples::beneath(draft.path()), &|| false)
                .unwrap();
            assert_eq!(files[0].part.is_none(), owner == 1, "{tracked:?}");
            // An administrator may move a folder.
            assert_eq!(captured.notes.len(), usize::from(owner == 1), "{captured:?}");
            assert!(captured.notes.iter().all(|note| note.contains(link.to_str().unwrap())));
            let _ = fs::remove_dir_all(draft.path().join("files"));
        }
    }
}

/// Other users' files are not read with our rights, whatever their names are.
#[test]
fn a_file_that_the_jobs_user_may_not_read_is_not_copied() {
    if !rekindle_testing::root() {
        return;
    }
    let (dir, draft) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("secret");
    fs::write(&path, "root's").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let nobody = crate::launch::identity::lookup("nobody").unwrap();
    let view = View { user: Some(&nobody), ..here() };
    let mut files = written(&[&path]);
    Contents::new(&[], Vec::new(), 1 << 30)
        .capture(&mut files, vec![path], view, &crate::samples::beneath(draft.path()), &|| false)
        .unwrap();
    assert_eq!(files[0].part, None);
}

/// The threads of this process may pass the links of /proc/PID whatever rights they have; the job's user may not.
#[test]
fn a_link_of_proc_leads_the_capture_to_nothing_that_the_jobs_user_cannot_reach() {
    if !rekindle_testing::root() {
        return;
    }
    let [dir, secret, draft] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let folder = secret.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("key"), "root's").unwrap();
    mode(&folder.join("key"), 0o644);
    mode(&folder, 0o755);
    mode(secret.path(), 0o700);
    mode(dir.path(), 0o755);
    let open = File::open(&folder).unwrap();
    let own = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&open));
    let nobody = crate::launch::identity::lookup("nobody").unwrap();
    let view = View { user: Some(&nobody), ..here() };
    let program = secret.path().join("postgres");
    copy_of_sleep(&program);
    fs::write(dir.path().join("PG_VERSION"), "15\n").unwrap();
    fs::create_dir(dir.path().join("pg_tblspc")).unwrap();
    std::os::unix::fs::symlink(&own, dir.path().join("pg_tblspc/1")).unwrap();
    let log = dir.path().join("pg_wal");
    for target in [own.as_str(), "/proc", "/sys/kernel"] {
        std::os::unix::fs::symlink(target, &log).unwrap();
        let mut server = std::process::Command::new(&program).arg("60").current_dir(dir.path()).spawn().unwrap();
        let mut contents = Contents::new(&[PathBuf::from("/sys/fs")], Vec::new(), 1 << 30);
        let foreseen = contents.foresee(&[server.id().cast_signed()], view);
        let mut files = written(&[&Path::new(&own).join("key")]);
        let captured =
            contents.capture(&mut files, Vec::new(), view, &crate::samples::beneath(draft.path()), &|| false).unwrap();
        server.kill().unwrap();
        let _ = server.wait();
        assert!(foreseen.unwrap() > 0, "the server was found");
        let folders: Vec<_> = captured.tracked.iter().map(|folder| folder.path.as_path()).collect();
        assert_eq!(folders, [dir.path()], "{target}");
        let kept: Vec<_> = files.iter().filter(|file| file.part.is_some()).map(|file| file.path.as_path()).collect();
        assert_eq!(kept, [dir.path().join("PG_VERSION")], "{target}");
        fs::remove_file(&log).unwrap();
        fs::remove_dir_all(draft.path().join("files")).unwrap();
    }
}

/// A server in this folder. Its program is `sleep`.
struct Server {
    process: std::process::Child,
    _programs: tempfile::TempDir,
}

impl Server {
    fn start(name: &str, folder: &Path) -> Server {
        let programs = tempfile::tempdir().unwrap();
        let program = programs.path().join(name);
        copy_of_sleep(&program);
        let process = std::process::Command::new(&program).arg("60").current_dir(folder).spawn().unwrap();
        Server { process, _programs: programs }
    }

    fn folders(&self) -> Vec<PathBuf> {
        let servers = select::servers(&[self.process.id().cast_signed()]);
        here().with(|way| select::data_folders(servers, way)).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        let _ = self.process.wait();
    }
}

#[test]
fn only_a_server_of_postgresql_has_a_data_folder_and_only_folders_of_its_user_belong_to_it() {
    let all = tempfile::tempdir().unwrap();
    let at = |name: &str| all.path().join(name);
    for name in ["data", "data/pg_tblspc", "space", "wal", "shared"] {
        fs::create_dir(at(name)).unwrap();
        fs::set_permissions(at(name), fs::Permissions::from_mode(0o700)).unwrap();
    }
    fs::set_permissions(at("shared"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(at("data/PG_VERSION"), "15\n").unwrap();
    std::os::unix::fs::symlink("../../space", at("data/pg_tblspc/1")).unwrap();
    std::os::unix::fs::symlink(at("shared"), at("data/pg_tblspc/2")).unwrap();
    std::os::unix::fs::symlink("../wal", at("data/pg_wal")).unwrap();
    assert_eq!(Server::start("sleep", &at("data")).folders(), [] as [PathBuf; 0], "a program that was started there");
    let server = Server::start("postgres", &at("data"));
    assert_eq!(server.folders(), [at("space"), at("wal"), at("data")]);
    if rekindle_testing::root() {
        std::os::unix::fs::chown(at("space"), Some(65534), None).unwrap();
        assert_eq!(server.folders(), [at("wal"), at("data")]);
        std::os::unix::fs::chown(at("data/PG_VERSION"), Some(65534), None).unwrap();
        assert_eq!(server.folders(), [] as [PathBuf; 0]);
        std::os::unix::fs::chown(at("data/PG_VERSION"), Some(0), None).unwrap();
    }
    // Anybody could have put a link there.
    fs::set_permissions(at("data"), fs::Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(server.folders(), [] as [PathBuf; 0]);
}

/// As posix_fallocate(3) leaves it: the blocks are there, and lseek(2) has a hole.
#[test]
fn zeros_of_allocated_blocks_replace_what_was_copied_ahead() {
    let (dir, draft) = (on_disk(), tempfile::tempdir().unwrap());
    let path = dir.path().join("table");
    fs::write(&path, vec![7; 4 << 20]).unwrap();
    let open = File::options().write(true).open(&path).unwrap();
    let own = [std::process::id().cast_signed()];
    let mut contents = Contents::new(&[], Vec::new(), 1 << 30);
    contents.foresee(&own, here()).unwrap();
    contents.copy_ahead(&own, here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    open.set_len(2 << 20).unwrap();
    nix::fcntl::fallocate(&open, nix::fcntl::FallocateFlags::empty(), 0, 4 << 20).unwrap();
    let mut files = written(&[&path]);
    contents.capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    contents.complete(&crate::samples::beneath(draft.path())).unwrap();
    assert!(content(draft.path(), &files[0]) == [vec![7; 2 << 20], vec![0; 2 << 20]].concat());
}

/// A journal that appears later would be played into the restored database.
#[test]
fn an_encrypted_database_has_its_missing_journals_recorded() {
    let (dir, draft) = (on_disk(), tempfile::tempdir().unwrap());
    let [encrypted, text] = ["secret.db", "text"].map(|name| dir.path().join(name));
    fs::write(&encrypted, [0x5a; 4096]).unwrap();
    fs::write(&text, "text").unwrap();
    let mut files = written(&[&encrypted, &text]);
    let mut contents = Contents::new(&[], Vec::new(), 1 << 30);
    let captured =
        contents.capture(&mut files, Vec::new(), here(), &crate::samples::beneath(draft.path()), &|| false).unwrap();
    let absent: Vec<_> = captured.absent.iter().map(|path| path.to_path_buf()).collect();
    assert_eq!(absent, ["-journal", "-shm", "-wal"].map(|end| dir.path().join(format!("secret.db{end}"))));
}
