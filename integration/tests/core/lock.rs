//! One supervisor a job, also where the kernel's lock does not reach the other one.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use rekindle_store::{HEARTBEAT, Writer};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{LIMIT, Lab, alive, python, wait_for};

#[test]
fn a_supervisor_that_was_taken_over_stops_and_touches_nothing() {
    let Some(lab) = Lab::new() else { return };
    let run = until_after_snapshot(&lab, "plain");
    let file = lab.job().path().join("lock");
    let mut holder: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(holder["pid"], run.pid());
    holder["host"] = "elsewhere".into();
    holder["boot_id"] = "another".into();
    let other = serde_json::to_vec(&holder).unwrap();
    fs::write(&file, &other).unwrap();
    let record = fs::read(lab.job().path().join("job.json")).unwrap();
    let (code, _, said) = run.finish(HEARTBEAT + LIMIT + Duration::from_secs(5));
    assert!(
        code == 125 && said.contains("was taken over by pid") && said.contains("on host elsewhere"),
        "{code} {said}"
    );
    lab.assert_all_gone();
    assert_eq!(fs::read(&file).unwrap(), other, "the name is that of the other one");
    assert_eq!(fs::read(lab.job().path().join("job.json")).unwrap(), record);

    // That one gives another sign of life.
    let stamp = |time| fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
    let again = |lab: &Lab| lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let mut waits = again(&lab);
    waits.wait_said("on host elsewhere");
    waits.wait_said("for its next heartbeat");
    stamp(SystemTime::now());
    let (_, said) = waits.ends_with(69);
    assert!(said.contains("may be supervised by pid") && said.contains("/lock to continue"), "{said}");
    assert!(matches!(lab.job().writer().unwrap(), Writer::Known(holder) if holder.host == "elsewhere"));
    // Other commands do not wait.
    let pruned = lab.rekindle(&["prune", "j"]);
    let said = String::from_utf8_lossy(&pruned.stderr);
    assert!(pruned.status.code() == Some(2) && said.contains("may be supervised by pid"), "{said}");
    stamp(SystemTime::now() - Duration::from_secs(600));
    let mut run = again(&lab);
    run.wait_said("taking the job over");
    run.wait_said("the job was restored from image 000001");
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
    assert_eq!(fs::read(&file).unwrap(), b"", "a supervisor that ends empties it");
}

/// It was killed, with its machine or by who stopped waiting for it, and the next one is elsewhere.
#[test]
fn after_a_supervisor_elsewhere_was_killed_the_next_one_waits_and_does_not_fail() {
    let Some(lab) = Lab::new() else { return };
    let run = until_after_snapshot(&lab, "plain");
    let file = lab.job().path().join("lock");
    let holder = fs::read_to_string(&file).unwrap();
    lab.kill_9(run);
    let mut holder: serde_json::Value = serde_json::from_str(&holder).unwrap();
    holder["host"] = "elsewhere".into();
    holder["boot_id"] = "another".into();
    fs::write(&file, serde_json::to_vec(&holder).unwrap()).unwrap();
    let mut next = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    next.wait_said("for its next heartbeat. Without one this run continues the job");
    std::thread::sleep(Duration::from_secs(3));
    assert!(next.runs() && fs::read(&file).unwrap().starts_with(b"{"), "{}", next.err());
    // As somebody does who knows that it is dead.
    fs::write(&file, "").unwrap();
    next.wait_said("the job was restored from image 000001");
    count_on(&lab, &mut next, 2);
    finish(&lab, next);
}

/// All that is in the job's folder, but for what the job itself writes and the lock.
fn content(lab: &Lab) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![lab.job().path().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let kind = entry.file_type().unwrap();
            match kind.is_dir() {
                true => folders.push(path),
                false if kind.is_symlink() || name == "lock" || name.to_str().unwrap().starts_with("std") => {}
                false => drop(all.insert(path.clone(), fs::read(&path).unwrap())),
            }
        }
    }
    all
}

/// It stood still for longer than the others wait (a machine that slept, a hypervisor that held it), and wakes in the
/// middle of its work.
#[test]
fn a_supervisor_that_slept_while_another_took_over_ends_its_job_and_writes_nothing() {
    let Some(lab) = Lab::new() else { return };
    // Bringing an image to the store takes some 20 s.
    let lab = lab.set("store.persist-rate", "\"1MiB\"").set("store.compression", "\"none\"");
    let program = "import os, time; held = os.urandom(20 << 20); print('ready', flush=True); time.sleep(3600)";
    let mut run = lab.run([python().unwrap().to_str().unwrap(), "-Sc", program]);
    run.wait_printed("ready");
    let pid = run.job_pid(&lab);
    run.signal(Signal::SIGUSR1);
    run.wait_for("the image is on its way", || lab.published().is_some_and(|p| p.persisting.is_some()));
    std::thread::sleep(Duration::from_millis(1500));
    run.signal(Signal::SIGSTOP);
    // All of it: a thread that writes stops when it has written.
    let stands = |thread: i32| rekindle_os::process::state(thread) == Some('T');
    wait_for("it stands", || rekindle_os::process::threads(run.pid()).into_iter().all(stands));
    let file = lab.job().path().join("lock");
    let mut holder: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    holder["host"] = "elsewhere".into();
    holder["boot_id"] = "another".into();
    fs::write(&file, serde_json::to_vec(&holder).unwrap()).unwrap();
    let before = content(&lab);
    // It did not sleep for that long, but it does not know for how long it did.
    std::thread::sleep(Duration::from_secs(3));
    run.signal(Signal::SIGUSR1);
    run.signal(Signal::SIGCONT);
    let mut run = run;
    wait_for("the job has ended", || !alive(pid));
    run.wait_said("was taken over by pid");
    let (_, said) = run.ends_with(125);
    assert!(said.contains("on host elsewhere"), "{said}");
    assert!(!said.contains("was stored in"), "{said}");
    let after = content(&lab);
    let changed = |(path, bytes): &(&PathBuf, &Vec<u8>)| before.get(*path) != Some(*bytes);
    let changed: Vec<_> = after.iter().filter(changed).map(|(path, _)| path).collect();
    assert!(changed.is_empty() && before.len() == after.len(), "it wrote {changed:?}: {said}");
    lab.assert_all_gone();
}

/// The kernel's lock is on a file, and the name may lead to another one.
#[test]
fn a_lock_file_that_was_replaced_is_no_lock() {
    let Some(lab) = Lab::new() else { return };
    let run = until_after_snapshot(&lab, "plain");
    let file = lab.job().path().join("lock");
    let same = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    fs::write(&file, &same).unwrap();
    run.signal(Signal::SIGUSR1);
    let (_, said) = run.ends_with(125);
    assert!(said.contains("was replaced by another file"), "{said}");
    assert_eq!(lab.good(), [1], "{said}");
    lab.assert_all_gone();
}
