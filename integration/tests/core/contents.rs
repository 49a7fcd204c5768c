//! Files that the job changes in place: after a restore they are what its memory says they are.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running};

fn start(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("files.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run
}

/// An image and a crash, three times; each time the job works on after the image, and after the restore too.
fn goes_on(lab: &Lab, mut run: Running) {
    for _ in 0..3 {
        run.snapshot(lab);
        count_on(lab, &mut run, 20);
        run.crash(lab);
        count_on(lab, &mut run, 5);
    }
    run.crash(lab);
    count_on(lab, &mut run, 5);
    finish(lab, run);
}

fn comes_back(kind: &str) {
    let Some(lab) = Lab::new() else { return };
    let run = start(&lab, kind);
    goes_on(&lab, run);
}

macro_rules! contents {
    ($($name:ident: $kind:literal,)*) => {
        $(#[test] fn $name() { comes_back($kind); })*
    };
}

contents! {
    a_database_with_a_write_ahead_log: "sqlite-wal",
    a_database_with_a_rollback_journal: "sqlite-journal",
    a_database_in_the_middle_of_a_transaction: "sqlite-in-a-transaction",
    two_writers_of_one_database: "two-writers",
    an_array_that_is_mapped_and_closed: "array",
    shared_memory_with_a_name: "memory",
    files_that_are_rewritten: "rewritten",
    a_file_with_holes: "sparse",
    a_file_whose_name_is_not_utf8: "not-utf8",
}

/// A shared mapping in /dev/shm is memory: a machine that went down has it no more, and the image has.
#[test]
fn shared_memory_is_made_again_on_a_machine_that_lost_it() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "memory");
    run.snapshot(&lab);
    lab.kill_9(run);
    let name = lab.output().lines().find_map(|line| Some(line.strip_prefix("block ")?.to_owned())).unwrap();
    fs::remove_file(format!("/dev/shm/{name}")).unwrap();
    let run = start(&lab, "memory");
    goes_on(&lab, run);
}

#[test]
fn a_file_whose_name_another_one_took_is_put_back() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "renamed");
    run.snapshot(&lab);
    fs::write(lab.file("rename"), "").unwrap();
    run.wait_for("the other file", || !lab.file("rename").exists());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert!(lab.read("data.rolled-back.1").starts_with("not of this process"), "what was there is kept");
    finish(&lab, run);
}

#[test]
fn a_file_that_was_removed_since_is_made_again() {
    is_made_again("removed");
}

/// And its group has no more rights to it than before.
#[test]
fn a_file_that_is_made_again_has_its_access_control_list() {
    is_made_again("with-a-list");
}

fn is_made_again(kind: &str) {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, kind);
    run.snapshot(&lab);
    fs::write(lab.file("remove"), "").unwrap();
    run.wait_for("its end", || !lab.file("remove").exists());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert!(lab.file("data").exists());
    finish(&lab, run);
}

#[test]
fn files_whose_permissions_somebody_changed_get_them_back() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "rewritten");
    let id = run.snapshot(&lab);
    let before = fs::metadata(lab.file("small")).unwrap().mode();
    for name in ["small", "large"] {
        fs::set_permissions(lab.file(name), fs::Permissions::from_mode(0o444)).unwrap();
    }
    run.crash(&lab);
    run.wait_said(&format!("restored from image {id:06}-"));
    count_on(&lab, &mut run, 5);
    assert_eq!(["small", "large"].map(|name| fs::metadata(lab.file(name)).unwrap().mode()), [before; 2]);
    finish(&lab, run);
}

/// What survives the first process of a job removes its temporary files before it dies: orted, gcc, resource trackers.
#[test]
fn temporary_files_that_are_only_read_are_made_again() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "reader");
    let id = run.snapshot(&lab);
    fs::remove_dir_all(lab.file("session")).unwrap();
    run.crash(&lab);
    run.wait_said(&format!("restored from image {id:06}-"));
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// The kernel keeps a link in /proc/PID/map_files with the mode of the mapping that was there first.
#[test]
fn a_writable_mapping_where_a_read_only_one_was() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "mapped-twice");
    // Whoever looks has the kernel keep them: lsof, or the snapshot before.
    let links = fs::read_dir(format!("/proc/{}/map_files", run.job_pid(&lab))).unwrap();
    links.flatten().for_each(|link| drop(link.metadata()));
    run.snapshot(&lab);
    fs::write(lab.file("writable"), "").unwrap();
    run.wait_printed("it is writable");
    let id = run.snapshot(&lab);
    run.crash(&lab);
    run.wait_said(&format!("restored from image {id:06}-"));
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// CRIU takes the lock again, and loses it when it closes the descriptor that it mapped the file with. Two writers of
/// one database would both have the right to write then.
#[test]
fn a_lock_on_a_file_that_is_mapped_is_held_when_the_job_runs_again() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "locked");
    let holder = || {
        let file = fs::File::options().read(true).write(true).open(lab.file("locked")).unwrap();
        let mut lock = libc::flock { l_type: 1, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
        nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_GETLK(&mut lock)).unwrap();
        (lock.l_type == 1).then_some(lock.l_pid)
    };
    assert_eq!(holder(), Some(run.job_pid(&lab)));
    for _ in 0..3 {
        run.snapshot(&lab);
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        assert_eq!(holder(), Some(run.job_pid(&lab)));
        assert!(!run.err().contains("cannot lock"), "another process had it in between:\n{}", run.err());
        assert!(!lab.log().contains("not as before the restore (locks)"), "{}", lab.log());
    }
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(!lab.output().contains("WRONG"), "{}", lab.output());
    finish(&lab, run);
}

/// Its other process tries to take it all the time.
#[test]
fn a_lock_on_a_deleted_file_that_is_mapped_is_held_when_the_job_runs_again() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "locked-deleted");
    for _ in 0..2 {
        run.snapshot(&lab);
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
    }
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(!lab.output().contains("WRONG"), "{}", lab.output());
    finish(&lab, run);
}

#[test]
fn what_does_not_fit_is_named_once_and_is_not_restored_over() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("snapshot.file-limit", "1000000").set("restart.cold-start", "\"never\"");
    let mut run = start(&lab, "rewritten");
    run.snapshot(&lab);
    // What has changed between two snapshots is what the job rewrites.
    count_on(&lab, &mut run, 2);
    run.snapshot(&lab);
    let said = run.said_so_far();
    run.wait_said("the job rewrites ");
    assert_eq!(said().matches("the job rewrites ").count(), 1, "{}", said());
    assert!(said().contains("/large") && !said().contains("/small"), "{}", said());
    count_on(&lab, &mut run, 5);
    crate::supervisor::kill(run.job_pid(&lab), nix::sys::signal::Signal::SIGKILL);
    let (_, said) = run.ends_with(69);
    assert!(said.contains("large changed after the snapshot"), "{said}");
    assert!(said.contains("restart.changed-files"), "{said}");
}

/// A file system of its own in a file. Says SKIP where it cannot be made, or fails where it must be.
struct Disk(std::path::PathBuf);

impl Disk {
    fn mount(lab: &Lab, kind: &str) -> Option<Disk> {
        let (image, folder) = (lab.file("disk.img"), lab.file("disk"));
        fs::create_dir(&folder).unwrap();
        fs::File::create(&image).unwrap().set_len(600 << 20).unwrap();
        let does = |program: &str, arguments: &[&str]| {
            let done = std::process::Command::new(program).args(arguments).output();
            done.is_ok_and(|done| done.status.success())
        };
        let [image, path] = [&image, &folder].map(|path| path.to_str().unwrap());
        if does(&format!("mkfs.{kind}"), &["-q", image]) && does("mount", &["-o", "loop", image, path]) {
            return Some(Disk(folder));
        }
        let why = format!("no {kind} can be made; scripts/deps.sh disks installs the program");
        rekindle_testing::needs("disks", None, &why)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn shares_blocks(kind: &str) {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.level", "\"debug\"")) else { return };
    let Some(disk) = Disk::mount(&lab, kind) else { return };
    for kind in ["rewritten", "sqlite-wal"] {
        let mut run = lab.python("files.py", &[kind, disk.0.to_str().unwrap()]);
        count_on(&lab, &mut run, 5);
        for _ in 0..2 {
            run.snapshot(&lab);
            count_on(&lab, &mut run, 10);
            run.crash(&lab);
            count_on(&lab, &mut run, 5);
        }
        let said = run.err();
        assert!(said.contains("shared=") && !said.contains("shared=0"), "no blocks are shared\n{said}");
        fs::write(disk.0.join("finish"), "").unwrap();
        let (code, _, said) = run.finish(crate::supervisor::LIMIT);
        assert_eq!(code, 0, "{said}");
        fs::remove_file(disk.0.join("finish")).unwrap();
        fs::remove_dir_all(lab.job().path()).unwrap();
    }
}

#[test]
fn copies_share_blocks_on_xfs() {
    shares_blocks("xfs");
}

#[test]
fn copies_share_blocks_on_btrfs() {
    shares_blocks("btrfs");
}

/// Without a job.user it is root's to open; with one, it is the user's.
#[test]
fn a_database_of_another_user() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    let folder = lab.file("theirs");
    fs::create_dir(&folder).unwrap();
    nix::unistd::chown(&folder, Some(nobody.uid), Some(nobody.gid)).unwrap();
    let mut run = lab.python("files.py", &["sqlite-wal", folder.to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    for _ in 0..2 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 20);
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
    }
    fs::write(folder.join("finish"), "").unwrap();
    finish(&lab, run);
}

#[test]
fn tracked_folders_that_are_empty_or_not_there() {
    let Some(lab) = Lab::new() else { return };
    let folders = ["empty", "missing"].map(|name| lab.file(name));
    let lab = lab.set("files.track", &format!("{folders:?}"));
    let mut run = start(&lab, "tracked");
    run.snapshot(&lab);
    fs::write(lab.file("write"), "").unwrap();
    count_on(&lab, &mut run, 5);
    for _ in 0..2 {
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
    }
    // With what is in them now.
    goes_on(&lab, run);
    let is_kept = |folder: &PathBuf| (1..5).any(|n| folder.with_extension(format!("rolled-back.{n}")).exists());
    assert!(folders.iter().all(is_kept));
}

/// A restore that takes away the name by which the image has the file would give the job a file of its own.
#[test]
fn a_deleted_name_in_a_tracked_folder_leads_to_the_file_of_the_other_name() {
    let Some(lab) = Lab::new() else { return };
    let folder = lab.path().join("tracked");
    let lab = lab.set("files.track", &format!("[{folder:?}]"));
    // Of an image of another job.
    fs::create_dir(&folder).unwrap();
    let theirs = folder.join(".rekindle-link-theirs");
    fs::write(&theirs, "theirs").unwrap();
    let run = start(&lab, "tracked-link");
    goes_on(&lab, run);
    assert!(theirs.exists());
}

/// In a folder such as /tmp, the job's user cannot remove what others put there.
#[test]
fn another_user_of_a_folder_does_not_prevent_a_restore() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let folder = lab.file("shared");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
    let mut run = lab.python("files.py", &["rewritten", folder.to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    count_on(&lab, &mut run, 20);
    for name in ["small", "large"] {
        for theirs in [format!(".tmp-{name}.rolled-back"), format!("{name}.rolled-back.1")] {
            let theirs = folder.join(theirs);
            fs::write(&theirs, "of somebody else").unwrap();
            std::os::unix::fs::chown(&theirs, Some(4242), Some(4242)).unwrap();
        }
    }
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    for name in ["small", "large"] {
        assert_eq!(fs::read(folder.join(format!("{name}.rolled-back.1"))).unwrap(), b"of somebody else");
        assert_eq!(fs::metadata(folder.join(format!("{name}.rolled-back.2"))).unwrap().uid(), 65534);
    }
    fs::write(folder.join("finish"), "").unwrap();
    finish(&lab, run);
}

/// In such a folder, too: a database there is in the image although somebody else puts a journal beside it, whose
/// content its user may not read.
#[test]
fn another_user_beside_a_database_does_not_prevent_a_restore() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let folder = lab.file("shared");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
    let mut run = lab.python("files.py", &["sqlite-wal", folder.to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    let theirs = folder.join("data.db-journal");
    fs::write(&theirs, "of somebody else").unwrap();
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&theirs, Some(4242), Some(4242)).unwrap();
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    // It is there at a snapshot.
    run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert_eq!(fs::read(&theirs).unwrap(), b"of somebody else");
    fs::write(folder.join("finish"), "").unwrap();
    finish(&lab, run);
}

/// Git makes the files of its object store read-only, and a folder can have files of root. Nobody changes them: that they
/// cannot be opened for writing prevented every restore.
#[test]
fn tracked_files_that_the_user_may_not_write() {
    let Some(lab) = Lab::new() else { return };
    let folder = lab.file("theirs").join("shared");
    fs::create_dir_all(&folder).unwrap();
    let lab = lab.set("job.user", "\"nobody\"").set("files.track", &format!("[{folder:?}]"));
    let (object, of_root) = (folder.join("object"), folder.join("of-root"));
    for (path, owner, mode) in [(&object, 65534, 0o444), (&of_root, 0, 0o644)] {
        fs::write(path, "as it was").unwrap();
        std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    for path in [&folder, &lab.file("theirs")] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    let command = lab.python_command("files.py", &["rewritten", folder.to_str().unwrap()]);
    let mut run = lab.run(&command);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    // What its owner changes is put back, with its mode.
    fs::write(&object, "as it is now").unwrap();
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert_eq!(fs::read_to_string(&object).unwrap(), "as it was");
    assert_eq!(fs::metadata(&object).unwrap().mode() & 0o7777, 0o444);
    // A restore that is killed leaves it writable.
    fs::set_permissions(&object, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&object, "as it is now").unwrap();
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert_eq!(fs::read_to_string(&object).unwrap(), "as it was");
    assert_eq!(fs::metadata(&object).unwrap().mode() & 0o7777, 0o444);
    // The user cannot put back what root changes.
    fs::write(&of_root, "as it is now").unwrap();
    lab.kill_9(run);
    let (_, said) = lab.run(&command).ends_with(69);
    assert!(said.contains("of-root changed after the snapshot and cannot be written"), "{said}");
    assert_eq!(lab.good().len(), 1, "{said}");
    fs::write(&of_root, "as it was").unwrap();
    let mut run = lab.run(&command);
    count_on(&lab, &mut run, 5);
    fs::write(folder.join("finish"), "").unwrap();
    finish(&lab, run);
}

/// /srv is root's, and /srv/data the user's: what a restore replaces cannot be kept beside it.
#[test]
fn a_tracked_folder_in_a_folder_that_the_user_may_not_write() {
    let Some(lab) = Lab::new() else { return };
    let folder = lab.file("theirs").join("data");
    fs::create_dir_all(&folder).unwrap();
    let (report, new) = (folder.join("report"), folder.join("new"));
    let write = |path: &PathBuf, text: &str| {
        fs::write(path, text).unwrap();
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    };
    write(&report, "as it was");
    std::os::unix::fs::chown(&folder, Some(65534), Some(65534)).unwrap();
    let lab = lab.set("job.user", "\"nobody\"").set("files.track", &format!("[{folder:?}]"));
    let mut run = lab.python("files.py", &["rewritten", folder.to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    let kept = |round: u32| folder.join(format!(".rekindle.rolled-back.{round}"));
    for round in 1..=2 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 5);
        let now = format!("as it is now, in round {round}");
        write(&report, &now);
        write(&new, "new");
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        assert_eq!(fs::read_to_string(&report).unwrap(), "as it was");
        assert!(!new.exists());
        assert_eq!(fs::read_to_string(kept(round).join("report")).unwrap(), now);
        assert_eq!(fs::read_to_string(kept(round).join("new")).unwrap(), "new");
        let metadata = fs::metadata(kept(round)).unwrap();
        assert_eq!((metadata.uid(), metadata.mode() & 0o7777), (65534, 0o700));
    }
    assert!(!kept(1).exists(), "only the newest is kept");
    // What is kept is no part of the folder.
    let images = lab.images();
    let tracked = &images[0].manifest().unwrap().tracked_folders;
    assert!(tracked[0].entries.iter().any(|entry| entry.path == report));
    assert!(!tracked[0].entries.iter().any(|entry| entry.path.starts_with(kept(1))));
    fs::write(folder.join("finish"), "").unwrap();
    finish(&lab, run);
}

/// Nothing can be moved from a mount to the folder beside its mount point.
#[test]
fn a_tracked_folder_that_is_a_mount_point() {
    let Some(lab) = Lab::new() else { return };
    let folder = lab.file("disk");
    fs::create_dir(&folder).unwrap();
    let lab = lab.set("files.track", &format!("[{folder:?}]"));
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("none"), &folder, Some("tmpfs"), flags, None::<&str>).unwrap();
    let disk = Disk(folder);
    let mut run = lab.python("files.py", &["rewritten", disk.0.to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    for round in 1..=2 {
        fs::write(disk.0.join("new"), "new").unwrap();
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        assert!(!disk.0.join("new").exists());
        let kept = disk.0.join(format!(".rekindle.rolled-back.{round}/new"));
        assert_eq!(fs::read_to_string(kept).unwrap(), "new");
    }
    fs::write(disk.0.join("finish"), "").unwrap();
    finish(&lab, run);
}
