use std::fs;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::HEARTBEAT;

const FOLDER: &str = "REKINDLE_TEST_LOCK";

fn job() -> JobName {
    "train".parse().unwrap()
}

fn lock(folder: &Path) -> Result<WriterLock> {
    acquire(folder, &job())
}

fn named(folder: &Path) -> Option<Holder> {
    read_holder(&open(&folder.join(FILE_NAME), Create::No).unwrap()).unwrap()
}

/// Writes a lock file that nobody has locked.
fn leave(folder: &Path, holder: &Holder, heartbeat: SystemTime) {
    let path = folder.join(FILE_NAME);
    fs::write(&path, serde_json::to_vec(holder).unwrap()).unwrap();
    File::options().write(true).open(path).unwrap().set_modified(heartbeat).unwrap();
}

fn ago(time: Duration) -> SystemTime {
    SystemTime::now() - time
}

fn elsewhere() -> Holder {
    Holder { pid: 77, host: "elsewhere".into(), boot_id: "another".into(), ..Holder::this_process() }
}

/// The holder: holds the lock until it is killed.
#[test]
#[ignore = "runs for ever; the tests below start and kill it"]
fn holder() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("the tests below name the folder"));
    let lock = lock(&folder).unwrap();
    fs::write(folder.join("held"), "").unwrap();
    loop {
        thread::sleep(HEARTBEAT);
        lock.refresh().unwrap();
    }
}

/// Another process that holds the lock.
fn another(folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lock::tests::holder", "--ignored"])
        .env(FOLDER, folder)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !folder.join("held").exists() {
        assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(1));
    }
    child
}

#[test]
fn two_processes_do_not_hold_it_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = another(dir.path());
    let error = lock(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::Supervised { holder: Some(h), .. } if h.pid == child.id()), "{error}");
    assert!(matches!(writer(dir.path()).unwrap(), Writer::Known(holder) if holder.pid == child.id()));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(named(dir.path()).unwrap().pid, child.id(), "it could not give it back");
    assert_eq!(writer(dir.path()).unwrap(), Writer::Nobody);
    let lock = lock(dir.path()).unwrap();
    assert_eq!(lock.silent_holder(), None, "the pid says it all");
    assert_eq!(named(dir.path()).unwrap().pid, std::process::id());
}

#[test]
fn where_locks_do_not_hold_the_name_of_a_live_process_does() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = another(dir.path());
    // As on a file system that grants a lock twice: a file with that name that nobody has locked.
    let name = named(dir.path()).unwrap();
    fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
    leave(dir.path(), &name, ago(HEARTBEAT));
    let error = lock(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::PerhapsSupervised { holder, .. } if **holder == name), "{error}");
    assert_eq!(named(dir.path()), Some(name));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(lock(dir.path()).unwrap().silent_holder(), None);
}

#[test]
fn another_machine_is_believed_while_it_gives_signs_of_life() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), &elsewhere(), ago(Duration::from_secs(45)));
    let error = lock(dir.path()).unwrap_err().to_string();
    assert!(error.contains("may be supervised by pid 77 on host elsewhere"), "{error}");
    assert!(
        error.contains("last heartbeat was 4") && error.contains("is 5m old") && error.contains("/lock to continue"),
        "{error}"
    );
    assert_eq!(writer(dir.path()).unwrap(), Writer::Known(named(dir.path()).unwrap()));
    // A clock that was set back.
    leave(dir.path(), &elsewhere(), SystemTime::now() + Duration::from_secs(7200));
    assert!(matches!(lock(dir.path()), Err(Error::PerhapsSupervised { .. })));
    assert_eq!(named(dir.path()).unwrap().host, "elsewhere", "it is left as it was");
    // Emptied by hand, as the message says.
    fs::write(dir.path().join(FILE_NAME), "").unwrap();
    assert_eq!(lock(dir.path()).unwrap().silent_holder(), None);
}

#[test]
fn a_silent_machine_is_taken_over_from_and_named() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), &elsewhere(), ago(STALE + Duration::from_secs(60)));
    assert_eq!(writer(dir.path()).unwrap(), Writer::Nobody);
    let lock = lock(dir.path()).unwrap();
    let (holder, silent) = lock.silent_holder().unwrap();
    assert!(holder.host == "elsewhere" && silent >= STALE, "{holder:?} {silent:?}");
    assert_eq!(named(dir.path()).unwrap().pid, std::process::id());
}

#[test]
fn of_two_that_take_over_at_once_the_last_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), &elsewhere(), ago(2 * STALE));
    let third = Holder { host: "third".into(), ..elsewhere() };
    let result = thread::scope(|scope| {
        let ours = scope.spawn(|| lock(dir.path()));
        // Its lock does not affect ours, and it writes its name after ours.
        let deadline = Instant::now() + Duration::from_secs(10);
        while named(dir.path()).is_none_or(|holder| holder.pid != std::process::id()) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        leave(dir.path(), &third, SystemTime::now());
        ours.join().unwrap()
    });
    assert!(matches!(&result, Err(Error::TakenOver { holder, .. }) if **holder == third), "{result:?}");
    assert_eq!(named(dir.path()), Some(third));
}

#[test]
fn a_heartbeat_is_a_new_time_stamp() {
    let dir = tempfile::tempdir().unwrap();
    let lock = lock(dir.path()).unwrap();
    let old = ago(STALE);
    lock.file.set_modified(old).unwrap();
    lock.refresh().unwrap();
    let stamp = || lock.file.metadata().unwrap().modified().unwrap();
    assert!(stamp() > old + STALE / 2, "{:?}", stamp());
    // Emptied by somebody who thought that we were dead.
    fs::write(dir.path().join(FILE_NAME), "").unwrap();
    lock.refresh().unwrap();
    assert_eq!(named(dir.path()), Some(lock.me.clone()));
}

#[test]
fn who_was_taken_over_is_told_and_leaves_the_other_name() {
    let dir = tempfile::tempdir().unwrap();
    let lock = lock(dir.path()).unwrap();
    leave(dir.path(), &elsewhere(), SystemTime::now());
    let error = lock.refresh().unwrap_err().to_string();
    assert!(error.contains("taken over by pid 77 on host elsewhere"), "{error}");
    drop(lock);
    assert_eq!(named(dir.path()).unwrap().host, "elsewhere");
}

#[test]
fn every_look_tells_a_lock_that_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    let first = lock(dir.path()).unwrap();
    let lost = |lock: &WriterLock| (lock.confirm().unwrap_err(), lock.refresh().unwrap_err());
    first.confirm().unwrap();
    leave(dir.path(), &elsewhere(), SystemTime::now());
    assert!(matches!(lost(&first), (Error::TakenOver { .. }, Error::TakenOver { .. })));
    // A recent check is reused; an older one is not.
    first.still_held().unwrap();
    first.confirmed.fetch_sub(1000, Ordering::Relaxed);
    assert!(matches!(first.still_held(), Err(Error::TakenOver { .. })));
    assert!(first.unconfirmed() >= CERTAIN);
    // Another file of that name is another lock, even if it names us.
    leave(dir.path(), &first.me, SystemTime::now());
    first.still_held().unwrap();
    fs::remove_file(&path).unwrap();
    assert!(matches!(lost(&first), (Error::Read { .. }, Error::Read { .. })));
    leave(dir.path(), &first.me, SystemTime::now());
    assert!(matches!(lost(&first), (Error::LockReplaced { .. }, Error::LockReplaced { .. })));
    let bytes = fs::read(&path).unwrap();
    drop(first);
    assert_eq!(fs::read(&path).unwrap(), bytes, "it is another's");
}

#[test]
fn a_lock_that_is_given_back_names_nobody() {
    let dir = tempfile::tempdir().unwrap();
    drop(lock(dir.path()).unwrap());
    assert_eq!(fs::read(dir.path().join(FILE_NAME)).unwrap(), b"");
    fs::write(dir.path().join(FILE_NAME), "{ not what we write").unwrap();
    lock(dir.path()).unwrap();
}

// ---- the judgement, without files ----

fn verdict(change: impl FnOnce(&mut Holder, &mut Facts<'_>)) -> Verdict {
    let me = Holder { pid: 10, host: "here".into(), boot_id: "this".into(), started: Some(1), ..elsewhere() };
    let mut holder = Holder { pid: 20, ..me.clone() };
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
    let booted = Some(now - Duration::from_secs(1000));
    let mut facts = Facts { me: &me, lives: |_| true, booted, heartbeat: now - Duration::from_secs(10), now };
    change(&mut holder, &mut facts);
    judge::judge(&holder, &facts)
}

const TEN: Duration = Duration::from_secs(10);

#[test]
fn of_this_boot_the_process_table_knows() {
    assert_eq!(verdict(|_, _| {}), Verdict::Alive { silent: TEN });
    assert_eq!(verdict(|_, facts| facts.lives = |_| false), Verdict::Dead);
    // However long it was stopped.
    let long = 2 * STALE;
    assert_eq!(verdict(|_, facts| facts.heartbeat = facts.now - long), Verdict::Alive { silent: long });
    assert_eq!(verdict(|holder, _| holder.pid_namespace = Some("pid:[1]".into())), Verdict::Dead);
    assert_eq!(verdict(|holder, facts| *holder = facts.me.clone()), Verdict::Dead, "a lock that we had before");
    assert_eq!(verdict(|holder, _| holder.started = None), Verdict::Dead, "an earlier version");
}

#[test]
fn of_another_boot_of_this_machine_nothing_is_left() {
    let other = |holder: &mut Holder| holder.boot_id = "last".into();
    let before = |facts: &mut Facts<'_>| facts.heartbeat = facts.booted.unwrap() - Duration::from_secs(1);
    assert_eq!(verdict(|holder, facts| (other(holder), before(facts)).0), Verdict::Dead);
    // Another machine with our name.
    assert_eq!(verdict(|holder, _| other(holder)), Verdict::Alive { silent: TEN });
    assert_eq!(
        verdict(|holder, facts| {
            other(holder);
            facts.booted = None;
        }),
        Verdict::Alive { silent: TEN }
    );
}

#[test]
fn of_another_machine_the_heartbeat_says_if_it_lives() {
    let far = |heartbeat: fn(SystemTime) -> SystemTime| {
        verdict(|holder, facts| {
            (holder.host, holder.boot_id) = ("there".into(), "that".into());
            facts.lives = |_| false;
            facts.heartbeat = heartbeat(facts.now);
        })
    };
    assert_eq!(far(|now| now), Verdict::Alive { silent: Duration::ZERO });
    let short = STALE - Duration::from_secs(1);
    assert_eq!(far(|now| now - (STALE - Duration::from_secs(1))), Verdict::Alive { silent: short });
    assert_eq!(far(|now| now - STALE), Verdict::Silent(STALE));
    assert_eq!(far(|now| now + STALE), Verdict::Alive { silent: Duration::ZERO }, "a clock that was put back");
}

#[test]
fn a_process_lives_that_has_the_pid_and_the_start() {
    let me = Holder::this_process();
    assert!(me.lives());
    assert!(!Holder { started: me.started.map(|at| at + 1), ..me.clone() }.lives());
    let mut child = Command::new("true").stdout(Stdio::null()).spawn().unwrap();
    let mut dead = Holder { pid: child.id(), ..me };
    let deadline = Instant::now() + Duration::from_secs(10);
    while rekindle_os::process::state(child.id().cast_signed()) != Some('Z') && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    dead.started = rekindle_os::process::start_time(child.id().cast_signed());
    assert!(dead.started.is_some() && !dead.lives(), "a zombie");
    child.wait().unwrap();
}
