//! Jobs of many processes, and what they share: each killed with -9 after a snapshot, as in [`crate::kinds`].

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use nix::sys::signal::Signal;
use rekindle::telemetry::events::What;
use rekindle_os::rights;

use crate::kinds::{count_on, finish, port};
use crate::launch::{end, look};
use crate::supervisor::{Lab, Running, alive, kill};

fn start_with(lab: &Lab, kind: &str, more: &[&str]) -> Running {
    let mut args = vec![kind, lab.path().to_str().unwrap()];
    args.extend(more);
    let mut run = lab.python("trees.py", &args);
    count_on(lab, &mut run, 5);
    run
}

fn start(lab: &Lab, kind: &str) -> Running {
    start_with(lab, kind, &[])
}

/// Three times an image and a crash, in which the image is of a job that was restored itself from the second on.
fn goes_on(lab: &Lab, mut run: Running) {
    for _ in 0..3 {
        run.snapshot(lab);
        count_on(lab, &mut run, 3);
        run.crash(lab);
        count_on(lab, &mut run, 3);
    }
    // The same image once more.
    run.crash(lab);
    count_on(lab, &mut run, 3);
    finish(lab, run);
}

fn comes_back(kind: &str) {
    let Some(lab) = Lab::new() else { return };
    let run = start(&lab, kind);
    goes_on(&lab, run);
}

macro_rules! trees {
    ($($name:ident: $kind:literal,)*) => {
        $(#[test] fn $name() { comes_back($kind); })*
    };
}

trees! {
    a_chain_of_sixty_processes_and_sessions: "deep",
    children_of_children_that_come_and_go: "comers",
    a_terminal_within_the_job: "terminal",
    shared_memory_without_a_name_and_unnamed_semaphores: "shared-without-name",
    semaphores_by_name: "named-semaphores",
    system_v_memory_semaphores_and_messages: "system-v",
    connections_and_a_port_that_others_of_it_wait_at: "ranks",
}

/// A field of /proc/PID/status.
fn status(pid: i32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap().trim().to_string()
}

/// The filters of a job: against io_uring, and against AMX where the kernel could grant it.
fn filters() -> String {
    (1 + u8::from(rights::amx_can_be_granted())).to_string()
}

#[test]
fn an_io_uring_is_not_there_before_and_after_a_restore() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "uring");
    assert!(lab.output().contains("first -38\n"), "{}", lab.output());
    for _ in 0..3 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 3);
        run.crash(&lab);
        count_on(&lab, &mut run, 3);
        let pid = run.job_pid(&lab);
        assert_eq!((status(pid, "Seccomp_filters"), status(pid, "NoNewPrivs")), (filters(), "0".into()));
    }
    finish(&lab, run);
}

#[test]
fn amx_cannot_be_requested_before_and_after_a_restore() {
    let Some(lab) = Lab::new() else { return };
    if !rekindle_testing::require("kernel", rights::amx_can_be_granted(), "the kernel is older than 5.16") {
        return;
    }
    let mut run = start(&lab, "amx");
    assert!(lab.output().contains("first -95\n"), "{}", lab.output());
    for _ in 0..2 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 3);
        run.crash(&lab);
        count_on(&lab, &mut run, 3);
    }
    finish(&lab, run);
}

#[test]
fn a_job_that_may_use_amx_has_no_filter_for_it() {
    let Some(lab) = Lab::new().map(|lab| lab.set("job.allow", "[\"amx\", \"io-uring\"]")) else {
        return;
    };
    let (mut run, _) = look(&lab);
    assert_eq!(status(run.job_pid(&lab), "Seccomp"), "0");
    end(&lab, run);
}

/// The filter is set while the job is root yet: setuid programs still work.
#[test]
fn a_user_has_no_io_uring_and_keeps_setuid_programs() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("job.no-new-privileges", "false");
    let (mut run, seen) = look(&lab);
    let pid = run.job_pid(&lab);
    assert_eq!((status(pid, "Seccomp"), &seen["no-new-privileges"]), ("2".into(), &"0".into()));
    end(&lab, run);
}

#[test]
fn a_job_that_may_have_an_io_uring_is_not_dumped_while_it_has_one() {
    let Some(lab) = Lab::new().map(|lab| lab.set("job.allow", "[\"amx\", \"io-uring\"]")) else {
        return;
    };
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|text| text.trim() != "0");
    if !rekindle_testing::require("io_uring", !disabled, "kernel.io_uring_disabled is set") {
        return;
    }
    let mut run = start(&lab, "uring-open");
    assert!(!lab.output().contains("ring -"), "{}", lab.output());
    assert_eq!(status(run.job_pid(&lab), "Seccomp"), "0");
    run.signal(Signal::SIGUSR1);
    run.wait_said("snapshot failed");
    assert!(run.err().contains("an io_uring") && run.err().contains("job.allow"), "{}", run.err());
    assert!(lab.good().is_empty());
    finish(&lab, run);
}

/// With an interval it would fail for the same reason each time, all night.
#[test]
fn a_snapshot_that_fails_each_time_is_logged_once() {
    let Some(lab) = Lab::new().map(|lab| lab.set("snapshot.memory-reserve", "\"1PiB\"")) else { return };
    let lab = lab.set("snapshot.interval", "\"100ms\"");
    let mut run = start(&lab, "ghost-64");
    let failures = || {
        let events = rekindle::telemetry::events::read(&lab.job().log_dir()).unwrap();
        events.iter().filter(|event| matches!(event.what, What::SnapshotFailed { .. })).count()
    };
    run.wait_for("snapshots have failed", || failures() >= 4);
    assert_eq!(run.err().matches("the snapshot failed").count(), 1, "{}", run.err());
    // Whoever asks for one is told.
    lab.rekindle(&["snapshot", "j"]);
    run.wait_said_times("the snapshot failed", 2);
    lab.kill_9(run);
}

#[test]
fn a_deleted_file_of_64_mib() {
    let Some(lab) = Lab::new() else { return };
    let run = start(&lab, "ghost-64");
    goes_on(&lab, run);
}

/// Answers "!" to each byte, on every connection.
fn server() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let accepting = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        for stream in accepting.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || while stream.read_exact(&mut [0]).is_ok() && stream.write_all(b"!").is_ok() {});
        }
    });
    (listener, port)
}

#[test]
fn connections_inside_are_kept_and_those_to_the_outside_closed() {
    let Some(lab) = Lab::new() else { return };
    let (_listener, port) = server();
    let mut run = start_with(&lab, "inside-and-outside", &[&port.to_string()]);
    for crashes in 1..=3 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 5);
        assert_eq!(lab.output().matches("connections lost").count(), crashes - 1, "the running job lost one");
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        let output = lab.output();
        assert!(output.contains(&format!("connections lost {crashes}\n")), "{output}");
        // Whoever reads until the end must not take the half of an answer for all of it.
        assert!(output.contains("lost Connection reset by peer") && !output.contains("looks complete"), "{output}");
    }
    finish(&lab, run);
}

/// Has CRIU, when it works for the first time, make the file `begun`, not go on before the job has made the file `made`, and
/// make the file `tried` when it is done.
fn with_slow_criu(lab: Lab) -> Lab {
    let lab = lab.noting_the_first_dump("tried");
    let text = format!(
        "case \"$*\" in *swrk*) : > '{0}/begun'; while [ ! -e '{0}/made' ]; do sleep 0.01; done ;; esac\n\
         exec '{0}/criu' \"$@\"",
        lab.path().display()
    );
    let path = format!("{:?}", lab.script("slow-criu", &text));
    lab.set("criu.path", &path)
}

#[test]
fn a_connection_inside_that_is_made_while_a_snapshot_begins_is_not_lost() {
    let Some(lab) = Lab::new().map(with_slow_criu) else { return };
    let (_listener, port) = server();
    let begun = lab.file("begun");
    let mut run = start_with(&lab, "late-connection", &[&port.to_string(), begun.to_str().unwrap()]);
    run.snapshot(&lab);
    run.wait_said("have connected to each other since");
    count_on(&lab, &mut run, 3);
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}

#[test]
fn an_event_that_comes_while_a_snapshot_begins_is_not_lost() {
    let Some(lab) = Lab::new().map(with_slow_criu) else { return };
    let begun = lab.file("begun");
    let mut run = start_with(&lab, "late-event", &[begun.to_str().unwrap()]);
    run.snapshot(&lab);
    run.wait_said("file events (inotify, fanotify) that process 1001");
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    run.wait_for("it has learnt of it", || lab.output().contains("learnt"));
    finish(&lab, run);
}

#[test]
fn tcp_close_closes_all() {
    let Some(lab) = Lab::new().map(|lab| lab.set("snapshot.tcp", "\"close\"")) else { return };
    let lab = lab.set("restart.cold-start", "\"never\"").set("restart.max-restarts", "1");
    let mut run = start(&lab, "ranks");
    run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    let pid = run.job_pid(&lab);
    kill(pid, Signal::SIGKILL);
    // It does not cope: each life ends with its first word to the other side.
    let (_, said) = run.ends_with(1);
    assert!(said.contains("the job was restored from image"), "{said}");
}

#[test]
fn connections_that_wait_to_be_accepted_are_not_in_the_way() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "waiting");
    let outside = TcpStream::connect(("127.0.0.1", port(&lab))).unwrap();
    run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    drop(outside);
    finish(&lab, run);
}

/// The image is as good as before, and is tried again.
#[test]
fn a_port_that_another_program_has_costs_no_image() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.backoff", "\"5s\"");
    // There is a pause, in which the port is taken.
    let lab = lab.set("restart.min-uptime", "\"1m\"");
    let mut run = start(&lab, "ranks");
    run.snapshot(&lab);
    let pid = run.job_pid(&lab);
    kill(pid, Signal::SIGKILL);
    let mut taken = None;
    run.wait_for("the port is taken", || {
        let dead = rekindle_os::sock_diag::ownerless().unwrap();
        dead.iter().filter(|c| c.local.port() == port(&lab)).for_each(|c| rekindle_os::sock_diag::destroy(c).unwrap());
        taken = TcpListener::bind(("127.0.0.1", port(&lab))).ok();
        taken.is_some()
    });
    run.wait_said("cannot restore image");
    assert!(run.err().contains("the port is in use"), "{}", run.err());
    drop(taken);
    run.wait_said("the job was restored from image");
    count_on(&lab, &mut run, 3);
    assert_eq!(lab.good(), [1]);
    finish(&lab, run);
}

/// Somebody else's connection in TIME_WAIT on the same machine is left alone.
#[test]
fn connections_of_others_are_not_touched() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "ranks");
    run.snapshot(&lab);
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(other.local_addr().unwrap()).unwrap();
    let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
    drop((client, other.accept().unwrap()));
    let waits = || {
        let all = rekindle_os::sock_diag::ownerless().unwrap();
        all.iter().any(|found| (found.local, found.remote) == ends || (found.remote, found.local) == ends)
    };
    assert!(waits());
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    assert!(waits());
    finish(&lab, run);
}

#[test]
fn a_network_of_its_own() {
    let Some(lab) = Lab::new().map(|lab| lab.set("network.mode", "\"private\"")) else { return };
    let mut run = start(&lab, "ranks");
    let link = |pid: i32, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
    let own = std::process::id().cast_signed();
    // Another program may have it already.
    let taken = TcpListener::bind(("127.0.0.1", port(&lab))).ok();
    for _ in 0..3 {
        let pid = run.job_pid(&lab);
        assert!(alive(pid) && link(pid, "net") != link(own, "net") && link(pid, "ipc") != link(own, "ipc"));
        run.snapshot(&lab);
        count_on(&lab, &mut run, 3);
        // The port is taken on the machine all the time.
        run.crash(&lab);
        count_on(&lab, &mut run, 3);
    }
    drop(taken);
    lab.kill_9(run);
    let mut run = lab.python("trees.py", &["ranks", lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image");
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}
