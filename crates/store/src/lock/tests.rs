use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::watch::Watch;
use super::*;
use crate::HEARTBEAT;

const FOLDER: &str = "REKINDLE_TEST_LOCK";

fn job() -> JobName {
    "train".parse().unwrap()
}

fn lock(folder: &Path) -> Result<WriterLock> {
    acquire(&crate::tests::beneath(folder), &job())
}

/// Takes a lock that was given back. A child that another test starts has it, too, until it executes its program.
fn lock_again(folder: &Path) -> WriterLock {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match lock(folder) {
            Err(Error::Supervised { .. }) if Instant::now() < deadline => {}
            lock => return lock.unwrap(),
        }
    }
}

fn named(folder: &Path) -> Option<Holder> {
    read_holder(&crate::tests::beneath(folder).join(FILE_NAME).read().unwrap()).unwrap()
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
    assert!(
        matches!(writer(&crate::tests::beneath(dir.path())).unwrap(), Writer::Known(holder) if holder.pid == child.id())
    );
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(named(dir.path()).unwrap().pid, child.id(), "it could not give it back");
    assert_eq!(writer(&crate::tests::beneath(dir.path())).unwrap(), Writer::Nobody);
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
    assert_eq!(writer(&crate::tests::beneath(dir.path())).unwrap(), Writer::Known(named(dir.path()).unwrap()));
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
    assert_eq!(writer(&crate::tests::beneath(dir.path())).unwrap(), Writer::Nobody);
    let lock = lock(dir.path()).unwrap();
    let (holder, silent) = lock.silent_holder().unwrap();
    assert!(holder.host == "elsewhere" && silent >= STALE, "{holder:?} {silent:?}");
    assert_eq!(named(dir.path()).unwrap().pid, std::process::id());
}

#[test]
fn of_two_that_take_over_at_once_the_last_one_stays() {
    let third = Holder { host: "third".into(), ..elsewhere() };
    let attempt = |folder: &Path| {
        leave(folder, &elsewhere(), ago(2 * STALE));
        thread::scope(|scope| {
            let ours = scope.spawn(|| lock(folder));
            // Its lock does not affect ours, and it writes its name after ours.
            let deadline = Instant::now() + Duration::from_secs(10);
            while named(folder).is_none_or(|holder| holder.pid != std::process::id()) && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            leave(folder, &third, SystemTime::now());
            ours.join().unwrap()
        })
    };
    // On a busy machine its name can come after ours has settled: then it is tried again.
    for last in [false, false, false, false, true] {
        let dir = tempfile::tempdir().unwrap();
        let result = attempt(dir.path());
        if result.is_ok() && !last {
            continue;
        }
        assert!(matches!(&result, Err(Error::TakenOver { holder, .. }) if **holder == third), "{result:?}");
        assert_eq!(named(dir.path()).as_ref(), Some(&third));
        return;
    }
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
    // A recent check is reused, this one for a minute, because the machine may be busy; an older one is not.
    first.confirmed.fetch_add(60_000, Ordering::Relaxed);
    first.still_held().unwrap();
    first.confirmed.fetch_sub(61_000, Ordering::Relaxed);
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
    lock_again(dir.path());
}

#[test]
fn a_process_that_ends_on_a_signal_gives_its_lock_back() {
    let dir = tempfile::tempdir().unwrap();
    let content = || fs::read(dir.path().join(FILE_NAME)).unwrap();
    let first = lock(dir.path()).unwrap();
    let (at_exit, again) = (first.release_at_exit(), first.release_at_exit());
    at_exit.release();
    assert_eq!(content(), b"");
    // But not the lock of another one.
    leave(dir.path(), &elsewhere(), SystemTime::now());
    again.release();
    assert_eq!(named(dir.path()).unwrap().host, "elsewhere");
    drop(first);
    // A lock that was dropped is not held by what is left of it.
    fs::write(dir.path().join(FILE_NAME), "").unwrap();
    let second = lock_again(dir.path());
    again.release();
    assert_eq!(named(dir.path()), Some(second.me.clone()));
}

// ---- waiting for a holder on another machine ----

/// A fraction of the usual time.
const SHORT: Terms = Terms {
    stale: Duration::from_millis(600),
    silent: Duration::from_millis(300),
    look: Duration::from_millis(10),
    gap: Duration::from_secs(20),
};

/// Longer than anything takes on a machine under load.
const LONG: Terms = Terms { stale: Duration::from_secs(60), silent: Duration::from_secs(60), ..SHORT };

fn waited(folder: &Path, during: impl FnMut(u32, &Waiting<'_>)) -> (Result<WriterLock>, Duration) {
    waited_for(&SHORT, folder, during)
}

/// Waits, and counts how often it was told what is waited for.
fn waited_for(
    terms: &Terms,
    folder: &Path,
    mut during: impl FnMut(u32, &Waiting<'_>),
) -> (Result<WriterLock>, Duration) {
    let (mut told, began) = (0, Instant::now());
    let lock = wait::wait(&crate::tests::beneath(folder), &job(), terms, &mut |waiting| {
        told += 1;
        during(told, waiting);
    });
    (lock, began.elapsed())
}

fn stamp(folder: &Path, time: SystemTime) {
    File::options().write(true).open(folder.join(FILE_NAME)).unwrap().set_modified(time).unwrap();
}

#[test]
fn a_machine_that_shows_no_sign_of_life_is_taken_over_from_whatever_its_clock_says() {
    for heartbeat in [ago(Duration::from_secs(20)), SystemTime::now() + Duration::from_secs(7200)] {
        let dir = tempfile::tempdir().unwrap();
        leave(dir.path(), &elsewhere(), heartbeat);
        let mut first = None;
        let (lock, took) = waited(dir.path(), |_, waiting| {
            assert_eq!((waiting.until, &waiting.holder.host[..]), (Until::TakenOver, "elsewhere"));
            assert_eq!(named(dir.path()).unwrap().host, "elsewhere", "it is left as it was");
            first.get_or_insert(waiting.left);
        });
        let lock = lock.unwrap();
        assert!(took >= SHORT.stale && first.unwrap() == SHORT.stale, "{took:?} {first:?}");
        let (holder, silent) = lock.silent_holder().unwrap();
        assert!(holder.host == "elsewhere" && silent >= SHORT.stale, "{silent:?}");
        assert_eq!(named(dir.path()).unwrap().pid, std::process::id());
    }
}

#[test]
fn a_machine_that_shows_a_sign_of_life_keeps_its_lock() {
    let dir = tempfile::tempdir().unwrap();
    // However old its stamps are by our clock.
    for (before, after) in [(20, 10), (5000, 4970), (10, 20), (0, 400)] {
        leave(dir.path(), &elsewhere(), ago(Duration::from_secs(before)));
        let (lock, _) = waited_for(&LONG, dir.path(), |told, _| {
            if told == 2 {
                stamp(dir.path(), ago(Duration::from_secs(after)));
            }
        });
        assert!(
            matches!(&lock, Err(Error::PerhapsSupervised { holder, .. }) if holder.host == "elsewhere"),
            "{lock:?}"
        );
        assert_eq!(named(dir.path()).unwrap().host, "elsewhere");
    }
    // Another one has taken over in the meantime.
    leave(dir.path(), &elsewhere(), ago(Duration::from_secs(20)));
    let third = Holder { host: "third".into(), ..elsewhere() };
    let (lock, _) = waited_for(&LONG, dir.path(), |told, _| {
        if told == 2 {
            leave(dir.path(), &third, ago(Duration::from_secs(20)));
        }
    });
    assert!(matches!(&lock, Err(Error::PerhapsSupervised { holder, .. }) if **holder == third), "{lock:?}");
    assert_eq!(named(dir.path()), Some(third));
}

#[test]
fn an_old_stamp_is_watched_for_more_than_a_heartbeat() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), &elsewhere(), ago(STALE + Duration::from_secs(60)));
    let (lock, took) = waited(dir.path(), |_, _| {});
    assert!(took >= SHORT.silent && lock.unwrap().silent_holder().unwrap().1 > STALE, "{took:?}");
    assert!(Terms::USUAL.silent > HEARTBEAT && Terms::USUAL.stale == STALE && Terms::USUAL.gap <= HEARTBEAT);
}

#[test]
fn who_waits_continues_at_once_when_the_lock_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), &elsewhere(), ago(Duration::from_secs(20)));
    let (lock, took) = waited_for(&LONG, dir.path(), |told, _| {
        if told == 3 {
            fs::write(dir.path().join(FILE_NAME), "").unwrap();
        }
    });
    assert!(lock.unwrap().silent_holder().is_none() && took < LONG.stale / 2, "{took:?}");
}

#[test]
fn a_lock_that_the_kernel_says_is_held_is_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), &elsewhere(), ago(Duration::from_secs(20)));
    // As of a machine that the locks of the file system reach.
    let theirs = File::open(dir.path().join(FILE_NAME)).unwrap();
    theirs.lock().unwrap();
    let (lock, took) = waited(dir.path(), |_, waiting| assert_eq!(waiting.until, Until::Refused));
    assert!(matches!(&lock, Err(Error::Supervised { holder: Some(h), .. }) if h.host == "elsewhere"), "{lock:?}");
    assert!(took >= SHORT.stale, "{took:?}");
    // It is killed while somebody waits: its server knows that later, and the name stays.
    let mut theirs = Some(theirs);
    let some = Terms { stale: Duration::from_secs(5), ..SHORT };
    let (lock, _) = waited_for(&some, dir.path(), |told, waiting| {
        if told == 3 {
            drop(theirs.take());
        }
        assert!(told <= 3 || waiting.until == Until::TakenOver);
    });
    assert_eq!(lock.unwrap().silent_holder().unwrap().0.host, "elsewhere");
}

#[test]
fn who_is_on_this_machine_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = another(dir.path());
    let none = |_: u32, _: &Waiting<'_>| panic!("it waits");
    let (refused, _) = waited(dir.path(), none);
    assert!(matches!(&refused, Err(Error::Supervised { holder: Some(h), .. }) if h.pid == child.id()), "{refused:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let (lock, _) = waited(dir.path(), none);
    assert!(lock.unwrap().silent_holder().is_none());
    // Nor is a machine that restarted.
    let before = Holder { boot_id: "last".into(), ..Holder::this_process() };
    leave(dir.path(), &before, SystemTime::UNIX_EPOCH);
    assert!(waited(dir.path(), none).0.is_ok());
}

#[test]
fn of_two_that_wait_for_the_same_holder_one_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), &elsewhere(), ago(Duration::from_secs(20)));
    let both = thread::scope(|scope| {
        let one = || scope.spawn(|| waited(dir.path(), |_, _| {}).0);
        [one(), one()].map(|thread| thread.join().unwrap())
    });
    assert_eq!(both.iter().filter(|lock| lock.is_ok()).count(), 1, "{both:?}");
}

#[test]
fn only_time_counts_in_which_it_was_looked_at() {
    let (gap, second) = (Duration::from_secs(30), Duration::from_secs(1));
    let sign = Sign { holder: elsewhere(), stamp: SystemTime::UNIX_EPOCH };
    let begun = Instant::now();
    let mut watch = Watch::begin(sign.clone(), begun);
    assert!((1..=100).all(|look| watch.sees(&sign, gap, begun + second * look)));
    assert_eq!(watch.length(), second * 100);
    // The machine slept, or the file server did not answer.
    assert!(watch.sees(&sign, gap, begun + second * 131));
    assert_eq!(watch.length(), Duration::ZERO);
    assert!(watch.sees(&sign, gap, begun + second * 160));
    assert_eq!(watch.length(), second * 29);
    // It is a proof only for a while, and only for what was seen.
    let proves = |sign: &Sign, later: u32| watch.proves(sign, gap, begun + second * (160 + later));
    assert_eq!((proves(&sign, 30), proves(&sign, 31)), (second * 29, Duration::ZERO));
    let renewed = Sign { stamp: SystemTime::now(), ..sign };
    assert!(proves(&renewed, 1).is_zero() && !watch.sees(&renewed, gap, begun + second * 161));
    assert_eq!(Terms::USUAL.needed(STALE), Terms::USUAL.silent);
    assert_eq!(Terms::USUAL.needed(STALE - second), STALE);
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
fn a_wrong_clock_of_this_machine_ends_no_other_one_with_its_name() {
    let me = Holder::this_process();
    let other = Holder { boot_id: "another".into(), ..me.clone() };
    // The clock of the file system is right.
    let now = SystemTime::now() - Duration::from_secs(10 * 365 * 24 * 3600);
    assert!(rekindle_os::clock::uptime().is_some_and(|uptime| uptime > TEN), "this machine was not booted just now");
    assert_eq!(judge::judge(&other, &Facts::now(&me, now - TEN, now)), Verdict::Alive { silent: TEN });
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

/// `cp -al` makes backups in which files are the same ones. So does whoever wants another file to be written.
#[test]
fn a_lock_with_another_name_is_not_written_there() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, other) = (dir.path().join("j"), dir.path().join("other"));
    fs::create_dir(&folder).unwrap();
    fs::write(&other, "somebody else's").unwrap();
    fs::hard_link(&other, folder.join(FILE_NAME)).unwrap();
    let held = lock(&folder).unwrap();
    assert_eq!(fs::read(&other).unwrap(), b"somebody else's");
    assert_eq!(named(&folder).unwrap().pid, Holder::this_process().pid);

    // A backup of a job that runs: nobody else takes the lock, and its holder keeps it.
    fs::hard_link(folder.join(FILE_NAME), dir.path().join("backup")).unwrap();
    assert!(matches!(lock(&folder), Err(Error::Supervised { .. })));
    held.refresh().unwrap();
    drop(held);
    drop(lock_again(&folder));
}
