use super::*;
use rekindle_store::{Access, Store};

/// A base for work folders, and a job in a store beside it.
struct Home {
    dir: tempfile::TempDir,
    folder: JobFolder,
    lock: WriterLock,
}

impl Home {
    fn new() -> Option<Home> {
        if !rekindle_testing::root() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"train".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        Some(Home { dir, folder, lock })
    }

    fn base(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn make(&self) -> Result<WorkFolder, Error> {
        WorkFolder::make(&self.base(), &self.folder, &self.lock)
    }

    /// Work folders that are mounted in here.
    fn mounted(&self) -> Vec<PathBuf> {
        let all = mounts::of("self").unwrap().into_iter().filter(is_ours);
        all.map(|mount| mount.point).filter(|point| point.starts_with(self.dir.path())).collect()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.mounted().iter().for_each(|left| drop(unmount(left)));
    }
}

/// Names another process as the one that made this folder.
fn give_to(work: &WorkFolder, change: impl FnOnce(&mut serde_json::Value)) {
    let note = work.path().join(OWNER);
    let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&note).unwrap()).unwrap();
    change(&mut value["supervisor"]);
    fs::write(note, value.to_string()).unwrap();
}

fn is_dead(supervisor: &mut serde_json::Value) {
    supervisor["started"] = 1.into();
}

#[test]
fn it_is_made_afresh_and_gone_at_the_end() {
    let Some(home) = Home::new() else { return };
    let work = home.make().unwrap();
    let path = work.path().to_owned();
    assert_eq!(path, home.base().join(format!("{}.run", home.folder.place_name())));
    assert!(is_bin(&work.bin(), "train") && !path.starts_with(home.folder.store()));
    assert_eq!(home.mounted(), std::slice::from_ref(&path));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!([&path, &work.bin()].map(|path| mode(path)), [0o711; 2], "the job's user loads programs from it");
    assert_eq!([work.criu(), work.plugins(), work.view()].map(|path| mode(&path)), [0o700; 3]);
    assert_eq!(mode(&home.base()), 0o755, "and gets to it");
    // A program can be run there.
    let program = super::super::reaper::unpack(&work.bin()).unwrap();
    assert!(std::process::Command::new(&program).status().is_ok());
    drop(work);
    assert!(!path.exists() && home.mounted().is_empty());
}

#[test]
fn what_a_supervisor_that_was_killed_has_left_is_removed_and_a_live_ones_is_not() {
    let Some(home) = Home::new() else { return };
    let left = home.make().unwrap();
    fs::write(left.plugins().join("x.so"), "mischief").unwrap();
    // This process is alive.
    let error = home.make().unwrap_err().to_string();
    assert!(error.contains("has not ended") && error.contains("job train") && error.contains("pid "), "{error}");
    assert!(!remove_left().contains(&left.path));
    give_to(&left, is_dead);
    let path = left.path().to_owned();
    std::mem::forget(left);
    let work = home.make().unwrap();
    assert_eq!(home.mounted(), std::slice::from_ref(&path), "not one over the other");
    assert_eq!(fs::read_dir(work.plugins()).unwrap().count(), 0);
    // The next run of any job finds it.
    give_to(&work, is_dead);
    std::mem::forget(work);
    assert!(remove_left().contains(&path));
    assert!(home.mounted().is_empty() && !path.exists());
    // One in another PID namespace is not seen. Whoever has the lock of its job knows that it has ended.
    let work = home.make().unwrap();
    give_to(&work, |supervisor| {
        is_dead(supervisor);
        supervisor["pid_namespace"] = "pid:[1]".into();
    });
    std::mem::forget(work);
    assert!(!remove_left().contains(&path) && home.mounted() == [path]);
    home.make().unwrap();
}

#[test]
fn what_is_not_ours_stays() {
    let Some(home) = Home::new() else { return };
    let path = home.base().join(format!("{}.run", home.folder.place_name()));
    fs::create_dir_all(&path).unwrap();
    mount(Some("other"), &path, Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=0755")).unwrap();
    let error = home.make().unwrap_err();
    assert!(matches!(&error, Error::Foreign(at) if *at == path), "{error}");
    assert_eq!(remove_left().iter().filter(|left| **left == path).count(), 0);
    umount2(&path, MntFlags::empty()).unwrap();
    // Somebody else's folder, and a link to one.
    std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
    let error = home.make().unwrap_err().to_string();
    assert!(error.contains("belongs to user 12345") && error.contains("snapshot.staging-directory"), "{error}");
    fs::remove_dir(&path).unwrap();
    std::os::unix::fs::symlink("/", &path).unwrap();
    home.make().unwrap_err();
    fs::remove_file(&path).unwrap();
    fs::set_permissions(home.base(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(home.make(), Err(Error::NotRoots { .. })));
    // As /dev/shm.
    fs::set_permissions(home.base(), fs::Permissions::from_mode(0o1777)).unwrap();
    home.make().unwrap();
}

#[test]
fn a_base_that_ld_preload_cannot_name_is_refused() {
    let Some(home) = Home::new() else { return };
    let error = WorkFolder::make(&home.dir.path().join("two words"), &home.folder, &home.lock).unwrap_err();
    assert!(matches!(error, Error::Unusable(_)), "{error}");
}

#[test]
fn a_job_of_another_place_finds_its_files_there_until_the_run_ends() {
    let Some(home) = Home::new() else { return };
    let work = home.make().unwrap();
    let there = home.dir.path().join("other/train-0123abcd.run");
    work.also_at(&there.join("bin")).unwrap();
    work.also_at(&there.join("bin")).unwrap();
    assert_eq!(work.others(), std::slice::from_ref(&there));
    assert_eq!(home.mounted().len(), 2);
    // The job whose place that is may run on this machine.
    let other = Home::new().unwrap();
    let error = other.make().unwrap().also_at(&there.join("bin")).unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    // A rehearsal makes and removes nothing.
    WorkFolder::of_another_process(work.path().to_owned())
        .also_at(Path::new("/nowhere/train-0123abcd.run/bin"))
        .unwrap();
    assert!(!Path::new("/nowhere").exists());
    drop(work);
    assert!(home.mounted().is_empty() && !there.exists());
}

#[test]
fn only_folders_of_the_form_that_we_make() {
    for good in ["/run/rekindle/train-0123abcd.run/bin", "/memory/train-0123abcd.run/bin"] {
        assert!(is_bin(Path::new(good), "train"), "{good}");
    }
    for bad in [
        "/bin",
        "/run/rekindle/train-0123abcd.run",
        "/run/rekindle/train-0123abcd/bin",
        "/run/rekindle/other-0123abcd.run/bin",
        "/run/rekindle/train-0123ABCD.run/bin",
        "/run/rekindle/train-0123abc.run/bin",
        "/var/lib/rekindle/train/bin",
        "/etc/cron.d",
    ] {
        assert!(!is_bin(Path::new(bad), "train"), "{bad}");
    }
}

#[test]
fn a_folder_that_another_can_change_is_not_ours() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mode, path) =
        (|path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap(), dir.path());
    let bin = path.join("base/place/bin");
    assert_eq!(is_roots(&bin), Ok(()), "what is not there is made");
    fs::create_dir_all(&bin).unwrap();
    for folder in [path, &path.join("base"), &path.join("base/place"), &bin] {
        mode(folder, 0o755);
    }
    assert_eq!(is_roots(&bin), Ok(()));
    for folder in [path.join("base"), path.join("base/place"), bin.clone()] {
        mode(&folder, 0o775);
        let why = is_roots(&bin).unwrap_err();
        assert!(why.contains("others can write") && why.contains(folder.to_str().unwrap()), "{why}");
        mode(&folder, 0o755);
        std::os::unix::fs::chown(&folder, Some(12345), None).unwrap();
        assert!(is_roots(&bin).unwrap_err().contains("user 12345"));
        std::os::unix::fs::chown(&folder, Some(0), None).unwrap();
    }
    mode(&bin, 0o1777);
    assert!(is_roots(&bin).is_err(), "anybody may add a file there");
    mode(&bin, 0o755);
    // A path through a link is judged by its target.
    fs::create_dir(path.join("users")).unwrap();
    fs::rename(path.join("base/place"), path.join("users/place")).unwrap();
    std::os::unix::fs::symlink(path.join("users/place"), path.join("base/place")).unwrap();
    assert_eq!(is_roots(&bin), Ok(()));
    mode(&path.join("users"), 0o777);
    assert!(is_roots(&bin).is_err());
}
