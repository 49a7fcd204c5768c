//! A job that uses the job API: its requests are answered, and none harms it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rekindle::telemetry::events::{What, read};

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, kill, wait_for};

fn start(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("job_api_job.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 3);
    run
}

/// Has the job do something.
fn tell(lab: &Lab, name: &str) {
    // Whole at once: the job looks all the time, and may be another user.
    fs::write(lab.file(name), "").unwrap();
}

fn restored(lab: &Lab) -> usize {
    lab.output().lines().filter(|line| line.starts_with("restored ")).count()
}

/// Snapshots and crashes, then the same from a supervisor that was killed: the job counts on and hears of each.
fn lives_on(lab: &Lab, kind: &str) -> Running {
    let mut run = start(lab, kind);
    run.snapshot(lab);
    count_on(lab, &mut run, 3);
    assert_eq!(restored(lab), 0, "it only resumed\n{}", lab.output());
    run.crash(lab);
    run.wait_for("it hears of the restore", || restored(lab) == 1);
    count_on(lab, &mut run, 3);
    // From what was restored, too.
    run.snapshot(lab);
    lab.kill_9(run);
    let mut run = lab.python("job_api_job.py", &[kind, lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image");
    run.wait_for("it hears of the restore", || restored(lab) == 2);
    count_on(lab, &mut run, 3);
    assert!(!run.err().contains("snapshot failed"), "{}", run.err());
    run
}

#[test]
fn a_job_with_the_module_is_told_of_each_restore() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    let run = lives_on(&lab, "module");
    let last = lab.output().lines().rfind(|line| line.starts_with("restored ")).unwrap().to_string();
    let published = lab.published().unwrap();
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let image = lab.images().first().unwrap().id;
    assert_eq!(last, format!("restored 2 {host} {} {image}", published.pid.unwrap()), "counted over supervisors");
    finish(&lab, run);
    assert_eq!(sockets(&lab), Vec::<PathBuf>::new());
}

#[test]
fn a_connected_socket_comes_back() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    finish(&lab, lives_on(&lab, "connected"));
    assert_eq!(lab.output().matches("life ").count(), 3, "{}", lab.output());
}

#[test]
fn in_a_network_of_its_own_the_job_has_a_word_too() {
    for kind in ["module", "connected"] {
        let Some(lab) = Lab::new() else { return };
        let lab = lab.set("restart.cold-start", "\"never\"").set("network.mode", "\"private\"");
        finish(&lab, lives_on(&lab, kind));
        assert_eq!(sockets(&lab), Vec::<PathBuf>::new());
    }
}

#[test]
fn an_unconnected_socket_comes_back() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    finish(&lab, lives_on(&lab, "unconnected"));
    assert_eq!(lab.output().matches("life ").count(), 3, "{}", lab.output());
}

#[test]
fn an_answer_that_was_not_read_comes_back() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    tell(&lab, "wait");
    let run = lives_on(&lab, "unread");
    fs::remove_file(lab.file("wait")).unwrap();
    wait_for("it is read", || lab.output().contains("unread old new"));
    finish(&lab, run);
}

#[test]
fn requests_in_flight_and_a_flood_harm_nobody() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    let mut run = lives_on(&lab, "in-flight");
    let cpu = |pid| rekindle_os::process::cpu_ticks(pid).unwrap();
    let measured = || {
        let (before, since) = (cpu(run.pid()), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        (u128::from(cpu(run.pid()) - before), since.elapsed())
    };
    // In hundredths of a second: a fifth of a processor. This is a build without optimisation. Time that a virtual machine
    // does not get can be counted as used, but not each time.
    let mut all = Vec::new();
    let is_little = (0..5).any(|_| {
        all.push(measured());
        all.last().is_some_and(|(used, since)| *used < since.as_millis() / 50)
    });
    assert!(is_little, "ticks: {all:?}");
    run.wait_said("more than 500 requests a second");
    finish(&lab, run);
}

#[test]
fn one_that_waits_for_an_answer_for_ever_is_dumped() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    finish(&lab, lives_on(&lab, "stale"));
}

#[test]
fn a_job_of_another_user_has_a_word_too() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    let theirs = lab.file("theirs");
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::symlink(lab.file("finish"), theirs.join("finish")).unwrap();
    nix::unistd::chown(&theirs, Some(nobody.uid), None).unwrap();
    let arguments = ["connected", theirs.to_str().unwrap()];
    let mut run = lab.python("job_api_job.py", &arguments);
    count_on(&lab, &mut run, 3);
    tell(&lab, "theirs/snapshot");
    run.wait_for("it is answered", || lab.output().contains("snapshot resumed"));
    run.wait_for("it is in the store", || lab.good().len() == 1 && lab.published().unwrap().persisting.is_none());
    lab.kill_9(run);
    let mut run = lab.python("job_api_job.py", &arguments);
    run.wait_for("it hears of the restore", || restored(&lab) == 1 && lab.output().contains("snapshot restored"));
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}

#[test]
fn a_snapshot_that_the_job_asks_for_returns_twice() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    let mut run = start(&lab, "module");
    tell(&lab, "snapshot");
    run.wait_for("it is answered", || lab.output().contains("snapshot resumed"));
    run.wait_for("it is in the store", || lab.good().len() == 1);
    run.crash(&lab);
    run.wait_for("it is answered again", || lab.output().contains("snapshot restored"));
    count_on(&lab, &mut run, 3);
    assert_eq!(restored(&lab), 1);
    finish(&lab, run);
    assert_eq!(lab.output().matches("\nsnapshot ").count(), 1, "the first answer is of a life that is gone");
}

/// What the journal says of holds and snapshots, in order.
fn told(lab: &Lab) -> Vec<String> {
    let name = |what| match what {
        What::SnapshotHeld { reason, .. } => Some(format!("held {reason:?}")),
        What::HoldOver { how, .. } => Some(how),
        What::SnapshotTaken { reason, .. } => Some(format!("taken {reason:?}")),
        _ => None,
    };
    read(&lab.job().log_dir()).unwrap().into_iter().filter_map(|event| name(event.what)).collect()
}

fn holds(lab: &Lab, run: &mut Running, times: usize) {
    tell(lab, "hold-on");
    tell(lab, "hold");
    run.wait_for("it holds", || lab.output().matches("holds True").count() == times);
}

#[test]
fn a_snapshot_waits_until_the_job_lets_go() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("snapshot.interval", "\"1s\"");
    let mut run = start(&lab, "module");
    holds(&lab, &mut run, 1);
    run.wait_said("a snapshot waits: the job blocks it");
    run.wait_for("the state says so, and no image is on its way", || {
        lab.published().is_some_and(|p| p.held.is_some() && p.persisting.is_none())
    });
    let newest = || lab.good().first().copied();
    let before = newest();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(newest(), before);
    fs::remove_file(lab.file("hold-on")).unwrap();
    run.wait_for("it is taken", || told(&lab).iter().any(|what| what == "released"));
    run.wait_for("it is taken", || newest() > before);
    run.wait_for("the state no longer says so", || lab.published().is_some_and(|p| p.held.is_none()));
    let told = told(&lab);
    let held = told.iter().position(|what| what == "held Interval").unwrap();
    assert_eq!(told[held..held + 3], ["held Interval", "released", "taken Interval"]);
    finish(&lab, run);
}

#[test]
fn a_hold_ends_at_its_bound_and_with_the_holder_and_with_the_job() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.variable("REKINDLE_MAX_HOLD", "6s");
    let mut run = start(&lab, "module");
    holds(&lab, &mut run, 1);
    run.signal(Signal::SIGUSR1);
    run.wait_for("it is taken at the bound", || told(&lab).len() == 3);
    assert_eq!(told(&lab), ["held Signal", "expired", "taken Signal"]);
    // The next one is not to be taken for this one.
    run.wait_for("it is stored", || lab.good() == [1]);
    // In the image it still thinks that it holds.
    let pid = run.job_pid(&lab);
    kill(pid, Signal::SIGKILL);
    run.wait_said("the job was restored from image");
    run.snapshot(&lab);
    assert_eq!(told(&lab)[3..], ["taken Signal"], "nobody holds after a restore");
    fs::remove_file(lab.file("hold-on")).unwrap();
    run.wait_for("it goes on", || lab.output().contains("let go"));
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}

#[test]
fn a_holder_that_dies_holds_no_longer() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "dies");
    tell(&lab, "child");
    run.wait_for("it holds", || lab.output().contains("child holds"));
    run.signal(Signal::SIGUSR1);
    run.wait_said("waits: the job blocks it");
    tell(&lab, "kill");
    run.wait_for("it is taken, though nobody has reaped the dead", || told(&lab).len() == 3);
    assert_eq!(told(&lab), ["held Signal", "holder-died", "taken Signal"]);
    tell(&lab, "reap");
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}

#[test]
fn a_stop_waits_for_the_job_to_let_go_within_its_grace() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("snapshot.grace", "\"30s\"");
    let mut run = start(&lab, "module");
    holds(&lab, &mut run, 1);
    run.signal(Signal::SIGTERM);
    run.wait_said("the final snapshot waits: the job blocks it, for at most ");
    run.ends_with(143);
    let waited = read(&lab.job().log_dir()).unwrap().into_iter().find_map(|event| match event.what {
        What::HoldOver { waited_us, .. } => Some(Duration::from_micros(waited_us)),
        _ => None,
    });
    // Half of the grace, because nothing was measured. It is counted from when the supervisor waits, and what comes after may
    // take longer on a busy machine.
    assert!((10.0..28.0).contains(&waited.unwrap().as_secs_f64()), "{waited:?}");
    assert_eq!(told(&lab), ["held Final", "expired", "taken Final"]);
    // It goes on, and lets go of what it does not hold.
    fs::remove_file(lab.file("hold-on")).unwrap();
    let mut run = lab.python("job_api_job.py", &["module", lab.path().to_str().unwrap()]);
    run.wait_for("it goes on", || lab.output().contains("let go"));
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}

fn sockets(lab: &Lab) -> Vec<PathBuf> {
    let entries = fs::read_dir(lab.file("control")).unwrap().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|ending| ending == "word")).collect()
}

#[test]
fn garbage_floods_and_strangers_leave_the_supervisor_well() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "module");
    let socket = sockets(&lab).remove(0);
    let pid = run.pid();
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
    let files = || fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    // What begins with the job may still be under way.
    let mut before = (threads(), files());
    run.wait_for("it has what it needs", || {
        std::thread::sleep(Duration::from_secs(1));
        std::mem::replace(&mut before, (threads(), files())) == before
    });
    let client = UnixDatagram::unbound().unwrap();
    client.set_nonblocking(true).unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    let odd: [&[u8]; 5] = [b"", b"\xff\x00{", br#"{"version":1,"request":"release"}"#, &[b'['; 3000], &[b'x'; 100_000]];
    let mut sent = 0;
    for text in odd.iter().cycle() {
        match client.send_to(text, &socket) {
            Ok(_) => sent += 1,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
        if Instant::now() > until {
            break;
        }
    }
    // What is read in that time, and what waits in the socket.
    assert!(sent < 3000, "{sent} in 3 s");
    // The job is heard among them, and others are too.
    tell(&lab, "snapshot");
    run.wait_for("it is answered", || lab.output().contains("snapshot resumed"));
    run.wait_for("nothing of it stays", || threads() <= before.0 && files() <= before.1 + 3);
    assert!(lab.rekindle(&["status", "--json"]).status.success());
    let stranger = "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n\
                    try:\n  s.sendto(b'{}', sys.argv[1])\nexcept PermissionError:\n  print('refused')";
    let python = crate::supervisor::python().unwrap();
    let said = std::process::Command::new(python).args(["-Sc", stranger]).arg(&socket).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "refused\n", "{said:?}");
    finish(&lab, run);
}

#[test]
fn without_a_place_for_the_socket_the_job_runs_all_the_same() {
    let Some(lab) = Lab::new() else { return };
    let long = lab.file(&"d".repeat(90));
    let variables = [
        ("REKINDLE_CONTROL_DIRECTORY".to_string(), long.to_str().unwrap().to_string()),
        ("REKINDLE_SOCKET".into(), "/of/a/rekindle/around".into()),
    ];
    let command = ["sh", "-c", "echo socket: $REKINDLE_SOCKET."];
    let (out, said) = lab.run_with_environment(&["run", "--name", "j", "--"], command, &variables).ends_with(0);
    assert_eq!(out, "socket: .\n");
    assert!(said.contains("cannot create the job's REKINDLE_SOCKET in"), "{said}");
}
