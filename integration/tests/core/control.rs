//! The control socket and the commands that use it: real supervisors, real snapshots.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::process::Output;
use std::time::{Duration, Instant};

use chrono::Utc;
use nix::sys::signal::Signal;
use rekindle::control::server::Server;
use rekindle::published::Published;
use rekindle_store::{Access, ImageId, Store};
use serde_json::{Value, json};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{LIMIT, Lab, Running, alive, assert_counts_up, numbers, wait_for};

fn start(lab: &Lab) -> Running {
    lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()])
}

/// Runs a command with `--json`; what it answered.
fn ask(lab: &Lab, args: &[&str]) -> Value {
    let output = lab.rekindle(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a command that is refused; why.
fn refused(lab: &Lab, args: &[&str], code: i32) -> String {
    let output = lab.rekindle(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
    said(&output)
}

fn state(lab: &Lab) -> String {
    ask(lab, &["status", "j"])["state"].as_str().unwrap().to_owned()
}

#[test]
fn a_snapshot_that_was_asked_for_is_answered_with_its_image() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab);
    count_on(&lab, &mut run, 5);
    let socket = std::fs::symlink_metadata(lab.published().unwrap().control.unwrap()).unwrap();
    assert!(socket.file_type().is_socket() && socket.mode() & 0o777 == 0o600);
    let answer = ask(&lab, &["snapshot", "j"]);
    assert!(answer["snapshot"]["freeze_us"].as_u64().unwrap() > 0, "{answer}");
    run.wait_for("the image is in the store", || lab.good() == [1]);
    let answer = ask(&lab, &["snapshot", "j", "--tag", "best", "--tag", "second"]);
    assert_eq!(answer["snapshot"]["stored"], true);
    let image = lab.job().find("best").unwrap();
    assert_eq!((image.id.sequence(), &lab.images()[0].id), (2, &lab.job().find("second").unwrap().id));
    assert_eq!(format!("{:?}", image.manifest().unwrap().reason), "Request");
    let mut status = Value::Null;
    wait_for("its supervisor answers in time", || {
        status = ask(&lab, &["ps", "j"]);
        status["source"] == "supervisor"
    });
    assert_eq!(status["state"], "running", "{status}");
    assert_eq!(status["pid"].as_i64(), Some(run.job_pid(&lab).into()));
    assert!(status["last_bytes"].as_u64().unwrap() > 0 && status["last_freeze_us"].as_u64().unwrap() > 0);
    let text = lab.rekindle(&["status"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("running") && text.contains("ago") && !text.contains('\x1b'), "{text}");
    assert!(refused(&lab, &["resume", "j"], 2).contains("not suspended"));
    assert!(refused(&lab, &["snapshot", "j", "--tag", "42"], 2).contains("not a tag"));
    let control = lab.file("control");
    finish(&lab, run);
    let left = std::fs::read_dir(control).unwrap().flatten().filter(|e| e.file_type().unwrap().is_socket());
    assert_eq!(left.count(), 0);
    let after = ask(&lab, &["status", "j"]);
    assert_eq!((&after["state"], &after["source"]), (&"completed".into(), &"record".into()));
    assert!(refused(&lab, &["snapshot", "j"], 2).contains("is not running"));
}

#[test]
fn a_snapshot_that_fails_says_why_to_who_asked() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.min-free", "\"1000TB\"").set("snapshot.staging", "\"store\""))
    else {
        return;
    };
    let mut run = start(&lab);
    count_on(&lab, &mut run, 5);
    assert!(refused(&lab, &["snapshot", "j"], 1).contains("min-free"));
    let why = refused(&lab, &["suspend", "j"], 1);
    assert!(why.contains("the job continues") && why.contains("min-free"), "{why}");
    let status = lab.rekindle(&["status", "j"]);
    assert!(String::from_utf8(status.stdout).unwrap().contains("the newest snapshot failed"));
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn stop_waits_until_all_is_over() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab);
    count_on(&lab, &mut run, 5);
    let answer = ask(&lab, &["stop", "j"]);
    assert_eq!((&answer["outcome"], &answer["stored"]), (&"stopped".into(), &true.into()));
    assert_eq!(lab.good(), [1]);
    run.ends_with(143);
    let mut run = start(&lab);
    run.wait_said("continues from image 000001");
    count_on(&lab, &mut run, 5);
    let answer = ask(&lab, &["stop", "--now", "j"]);
    assert_eq!(answer["outcome"], "stopped");
    run.ends_with(143);
    assert_eq!(lab.good(), [1], "no snapshot");
    assert!(refused(&lab, &["stop", "j"], 2).contains("is not running"));
    finish(&lab, start(&lab));
}

#[test]
fn a_suspended_job_gives_all_back_and_comes_back() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab);
    count_on(&lab, &mut run, 5);
    let pid = run.job_pid(&lab);
    let answer = ask(&lab, &["suspend", "j"]);
    assert!(answer["suspended"]["image"].as_str().unwrap().starts_with("000001"), "{answer}");
    assert!(answer["suspended"]["only_in_memory"].is_null());
    assert!(!alive(pid));
    assert_eq!((lab.good(), state(&lab)), (vec![1], "suspended".into()));
    assert!(lab.job().staged().is_empty(), "memory is given back");
    let before = numbers(&lab.output()).len();
    // Again is fine; a snapshot is not; nor does a signal that asks for one do anything.
    ask(&lab, &["suspend", "j"]);
    assert!(refused(&lab, &["snapshot", "j"], 2).contains("resume"));
    run.signal(Signal::SIGUSR1);
    // It would be for the job that runs again.
    run.wait_said("received SIGUSR1");
    let answer = ask(&lab, &["resume", "j"]);
    assert!(answer["running"]["image"].as_str().unwrap().starts_with("000001"), "{answer}");
    count_on(&lab, &mut run, 5);
    assert!(numbers(&lab.output()).len() >= before);
    assert_eq!(lab.published().unwrap().restarts, 0, "nothing has failed");
    // Its supervisor is killed meanwhile: the same command goes on.
    ask(&lab, &["suspend", "j"]);
    lab.kill_9(run);
    assert_eq!(state(&lab), "interrupted");
    let mut run = start(&lab);
    run.wait_said("continues from image 000002");
    count_on(&lab, &mut run, 5);
    // A stop needs nothing more.
    ask(&lab, &["suspend", "j"]);
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    assert_eq!((lab.good(), lab.mounted().len()), (vec![3, 2, 1], 0));
    finish(&lab, start(&lab));
}

#[test]
fn a_rewind_goes_back_and_stays_there() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    let at_first = || lab.images().iter().find(|i| i.id.sequence() == 1).unwrap().id;
    ask(&lab, &["snapshot", "j", "--tag", "good"]);
    count_on(&lab, &mut run, 5);
    ask(&lab, &["snapshot", "j", "--stored"]);
    let far = numbers(&lab.output()).len();
    let answer = ask(&lab, &["rewind", "j", "1"]);
    assert_eq!(answer["running"]["image"], at_first().to_string());
    count_on(&lab, &mut run, 1);
    assert_counts_up(&lab.output());
    assert_eq!((lab.good(), lab.published().unwrap().restarts), (vec![3, 2, 1], 0), "newer images stay");
    // A crash goes back to where it was taken back to, not to what came after that; so does the next run.
    run.crash(&lab);
    run.wait_said_times("the job was restored from image 000001", 2);
    lab.kill_9(run);
    let mut run = start(&lab);
    run.wait_said("continues from image 000001");
    count_on(&lab, &mut run, 2);
    for to in ["77", "nothing", "-2", "-0", "-x"] {
        refused(&lab, &["rewind", "j", to], 2);
    }
    // Other commands count like the rewind: the newer images of the line that was left have no number.
    assert_eq!(ask(&lab, &["show", "j/-1"])["id"], at_first().to_string());
    let listed = ask(&lab, &["list", "j"]);
    let numbered: Vec<_> = listed.as_array().unwrap().iter().map(|row| row["nth_newest"].as_u64()).collect();
    assert_eq!(numbered, [None, None, Some(1)]);
    // By count from the newest of its line, and by tag: on to where it has not been in this line.
    run.wait_for("it is as far as it was", || numbers(&lab.output()).len() >= far);
    assert!(ask(&lab, &["rewind", "j", "-1"])["running"]["image"].as_str().unwrap().starts_with("000001"));
    run.wait_for("it is as far as it was", || numbers(&lab.output()).len() >= far);
    assert!(ask(&lab, &["rewind", "j/good"])["running"]["image"].as_str().unwrap().starts_with("000002"));
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

/// Rotation comes when an image was stored, which may be while the job is brought back from an older one.
#[test]
fn an_image_stays_while_the_job_goes_back_to_it() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.keep-last", "2")) else { return };
    let (begun, go) = (lab.file("begun"), lab.file("go"));
    let script = format!(": >{}; until [ -e {} ]; do sleep 0.05; done", begun.display(), go.display());
    let hook = format!("{:?}", ["/bin/sh", "-c", &script, lab.path().to_str().unwrap()]);
    let lab = lab.set("hooks.before-restore", &hook).set("hooks.timeout", "\"100s\"");
    // Storing takes longer than a command needs to start, on a busy machine too.
    let lab = lab.set("store.persist-rate", "\"8MiB\"");
    let mut run = until_after_snapshot(&lab, "fresh-128");
    ask(&lab, &["snapshot", "j", "--stored"]);
    let newest = ask(&lab, &["snapshot", "j"])["snapshot"]["image"].as_str().unwrap().to_owned();
    let rewinding = lab.run_with(&["rewind", "j"], ["1"]);
    run.wait_for("the restore begins", || begun.exists());
    let stored = format!("image {newest} was stored in");
    run.wait_said(&stored);
    let said = run.err();
    assert!(said.find("rewinding the job") < said.find(&stored), "storing is too fast for this test: {said}");
    std::fs::write(go, "").unwrap();
    rewinding.ends_with(0);
    assert_eq!(lab.good(), [3, 2, 1]);
    run.crash(&lab);
    run.wait_said_times("the job was restored from image 000001", 2);
    finish(&lab, run);
}

#[test]
fn a_supervisor_that_stands_still_is_shown_from_what_it_published() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab);
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGSTOP);
    let begun = Instant::now();
    let status = ask(&lab, &["status", "j"]);
    assert!(begun.elapsed() < LIMIT / 3);
    assert_eq!((&status["state"], &status["source"]), (&"running".into(), &"state-file".into()));
    run.signal(Signal::SIGCONT);
    wait_for("it answers again", || ask(&lab, &["status", "j"])["source"] == "supervisor");
    finish(&lab, run);
}

/// Kills the job, and waits until it is being brought back. It may be back already where this test gets no processor.
fn kill_job(lab: &Lab, run: &mut Running) {
    let pid = run.job_pid(lab);
    crate::supervisor::kill(pid, Signal::SIGKILL);
    run.wait_closely("it comes back", || {
        lab.published().is_some_and(|p| p.state.as_str() != "running" || p.pid != Some(pid))
    });
}

/// Whatever comes while a job is brought back, it is brought back, or stopped as asked.
#[test]
fn requests_and_signals_during_a_restart() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.keep-last", "9")) else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    for _ in 0..2 {
        kill_job(&lab, &mut run);
        for args in [&["snapshot", "j"][..], &["resume", "j"], &["status", "j"]] {
            let _ = lab.rekindle(args);
        }
        run.signal(Signal::SIGUSR1);
        count_on(&lab, &mut run, 2);
    }
    kill_job(&lab, &mut run);
    let image = ask(&lab, &["rewind", "j", "1"])["running"]["image"].clone();
    assert!(image.as_str().unwrap().starts_with("000001"));
    count_on(&lab, &mut run, 2);
    ask(&lab, &["stop", "j"]);
    run.ends_with(143);
    finish(&lab, start(&lab));
}

/// 50 jobs: real sockets, locks and files, with a stand-in that only answers on the socket instead of a supervisor.
#[test]
fn status_of_fifty_jobs_is_quick() {
    let Some(lab) = Lab::new() else { return };
    let store = Store::open(&lab.store(), Access::Write).unwrap();
    let image = ImageId::new(42, Utc::now());
    let state = json!({
        "version": 1, "state": "running", "since": Utc::now(), "begun": Utc::now(), "supervisor": std::process::id(),
        "lineage": "l", "pid": 1, "restarts": 3, "last_image": image, "last_freeze_us": 612_000, "last_bytes": 17_179_869_184u64,
        "last_failure": "preflight: not enough memory", "next": Utc::now(), "gpus": ["NVIDIA H100 80GB HBM3"],
    });
    let mut held = Vec::new();
    for n in 0..50 {
        let folder = store.create_job(&format!("job-{n:02}").parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        let record = json!({
            "version": 1, "command": vec!["an argument"; 20], "directory": "/", "lineage": "l", "created": Utc::now(),
            "outcome": "running", "exit_code": null,
        });
        std::fs::write(folder.path().join("job.json"), record.to_string()).unwrap();
        let server = Server::start(&lab.file("control"), &folder.place_name(), Box::new(|_| false)).unwrap();
        let mut published: Published = serde_json::from_value(state.clone()).unwrap();
        published.control = Some(server.path().to_owned());
        std::fs::write(folder.state_file(), serde_json::to_vec_pretty(&published).unwrap()).unwrap();
        server.show(&published);
        held.push((lock, server));
    }
    // A busy machine may be late for an answer; such a round says nothing.
    let mut times: Vec<Duration> = Vec::new();
    let until = Instant::now() + LIMIT;
    for round in 0.. {
        // A few are enough on a machine that does nothing else.
        if round >= 20 && (!times.is_empty() || Instant::now() >= until) {
            break;
        }
        let begun = Instant::now();
        let output = lab.command(["status", "--json"]).output().unwrap();
        let took = begun.elapsed();
        let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = rows.as_array().unwrap();
        assert_eq!(rows.len(), 50);
        times.extend(rows.iter().all(|row| row["source"] == "supervisor").then_some(took));
    }
    times.sort();
    let (Some(first), Some(last)) = (times.first(), times.last()) else { panic!("they never all answered") };
    println!("status of 50 jobs: median {:?}, from {first:?} to {last:?}", times[times.len() / 2]);
    // Far above what it takes on a machine that does nothing else: asked one after the other, with the patience for
    // each that does not answer, it would be 12 s.
    assert!(*first < Duration::from_secs(2), "{times:?}");
}

/// A `logs -f` beside a job that crashes: it sees each number once, in order, and ends with the job.
#[test]
fn logs_follow_through_rotation_and_restarts() {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.max-size", "\"4KiB\"")) else { return };
    let mut run = start(&lab);
    count_on(&lab, &mut run, 5);
    let mut following = lab.run_with(&["logs", "-f", "j"], [""; 0]);
    following.wait_printed("n 5\n");
    for round in 0..3 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 5);
        if round > 0 {
            run.crash(&lab);
        }
        count_on(&lab, &mut run, 5);
    }
    // The file alone may have been rotated once more.
    std::fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
    let (printed, _) = following.ends_with(0);
    assert!(printed.ends_with("done\n") && printed.matches("done").count() == 1, "{printed}");
    assert_counts_up(&printed);
    let again = lab.rekindle(&["logs", "j"]);
    assert_eq!(String::from_utf8(again.stdout).unwrap(), lab.output());
    let last = lab.rekindle(&["logs", "-n", "1", "j"]);
    assert_eq!(last.stdout, b"done\n");
    assert!(lab.rekindle(&["logs", "--stderr", "j"]).stdout.is_empty());
}

#[test]
fn logs_show_what_the_job_wrote_where_it_wrote_it() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.run(["sh", "-c", "echo first; echo second >&2; echo third; while sleep 0.05; do :; done"]);
    run.wait_printed("third\n");
    let logs = |args: &[&str]| {
        let said = lab.rekindle(&[&["logs"], args, &["j"]].concat());
        [said.stdout, said.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    assert_eq!(logs(&[]), ["first\nthird\n", "second\n"]);
    assert_eq!(logs(&["-n", "1"]), ["third\n", "second\n"]);
    assert_eq!(logs(&["--stdout"]), ["first\nthird\n", ""]);
    assert_eq!(logs(&["--stderr"]), ["second\n", ""]);
    let mut following = lab.run_with(&["logs", "-f", "j"], [""; 0]);
    following.wait_printed("third\n");
    following.wait_said("second\n");
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    following.ends_with(0);
}

/// Whoever can write to the folder can put a socket of his own there, which root's commands would talk to.
#[test]
fn a_folder_that_others_can_write_is_not_used() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab);
    count_on(&lab, &mut run, 1);
    let folder = lab.file("control");
    let open_to = |mode| std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode)).unwrap();
    for mode in [0o777, 0o1777, 0o775] {
        open_to(mode);
        let why = refused(&lab, &["snapshot", "j"], 69);
        assert!(why.contains("others can write") && why.contains("chmod go-w"), "{mode:o}: {why}");
    }
    open_to(0o755);
    std::os::unix::fs::chown(&folder, Some(65534), None).unwrap();
    let why = refused(&lab, &["snapshot", "j"], 69);
    assert!(why.contains("belongs to user 65534") && why.contains("chown"), "{why}");
    std::os::unix::fs::chown(&folder, Some(0), None).unwrap();
    assert_eq!(state(&lab), "running");
    finish(&lab, run);

    // Nor is one there for a new supervisor.
    let Some(lab) = Lab::new() else { return };
    let folder = lab.file("control");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
    let mut run = start(&lab);
    run.wait_said("cannot create a control socket in");
    run.wait_said("cannot create the job's REKINDLE_SOCKET");
    assert!(run.err().contains("others can write"), "{}", run.err());
    assert!(std::fs::read_dir(&folder).unwrap().flatten().all(|entry| !entry.file_type().unwrap().is_socket()));
    finish(&lab, run);
}
