//! Hooks of a real run: what they are told and in which order, and that none of them can harm the job.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::signal::Signal;
use rekindle::telemetry::events::{What, read};
use serde_json::Value;

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{LIMIT, Lab};

const POINTS: [&str; 6] =
    ["before-snapshot", "after-snapshot", "before-restore", "after-restore", "on-failure", "on-completion"];

fn hook(lab: Lab, point: &str, script: &str) -> Lab {
    // The folder is named on the command line, by which one that is left behind would be found.
    let words = ["/bin/sh", "-c", script, lab.path().to_str().unwrap()];
    let value = format!("{words:?}");
    lab.set(&format!("hooks.{point}"), &value)
}

/// Configures all hooks; each appends its standard input to the same file.
fn with_all(mut lab: Lab) -> Lab {
    let out = lab.file("told");
    for point in POINTS {
        lab = hook(lab, point, &format!("cat >>{}", out.display()));
    }
    lab
}

fn told(lab: &Lab) -> Vec<Value> {
    lab.read("told").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn hooks_and_events(lab: &Lab) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    told(lab).iter().map(|document| (text(&document["hook"]), text(&document["event"]))).collect()
}

/// What the journal says of hooks.
fn failed(lab: &Lab) -> Vec<(String, String)> {
    let events = read(&lab.job().log_dir()).unwrap();
    let failed = |what| match what {
        What::HookFailed { hook, why } => Some((hook, why)),
        _ => None,
    };
    events.into_iter().filter_map(|event| failed(event.what)).collect()
}

#[test]
fn hooks_are_told_of_a_whole_life_in_order() {
    let Some(lab) = Lab::new().map(with_all) else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    run.crash(&lab);
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
    let pairs = hooks_and_events(&lab);
    let wanted = [
        ("before-snapshot", "snapshot-began"),
        ("after-snapshot", "snapshot-taken"),
        ("on-failure", "ended"),
        ("before-restore", "restore-began"),
        ("after-restore", "started"),
        ("on-completion", "finished"),
    ];
    let pairs: Vec<(&str, &str)> = pairs.iter().map(|(hook, event)| (hook.as_str(), event.as_str())).collect();
    assert_eq!(pairs, wanted);
    let told = told(&lab);
    let image = lab.images()[0].id.to_string();
    assert!(told.iter().all(|document| document["job"] == "j" && document["run"] == told[0]["run"]));
    assert_eq!(told[0]["reason"], "signal");
    assert_eq!(
        (&told[1]["image"], told[1]["phases"].as_array().is_some_and(|phases| phases.len() > 1)),
        (&Value::from(image.clone()), true)
    );
    assert_eq!(
        (&told[2]["failure"], &told[2]["text"]),
        (&"job-ended".into(), &"job j: signal SIGKILL ended it".into())
    );
    assert_eq!((&told[3]["image"], &told[4]["image"]), (&Value::from(image.clone()), &Value::from(image)));
    assert_eq!(told[5]["outcome"], "completed");
    assert_eq!(failed(&lab), []);
}

#[test]
fn hooks_that_hang_flood_fail_or_are_missing_harm_nothing() {
    let Some(lab) = Lab::new() else { return };
    let lab = hook(lab, "before-snapshot", "yes no; sleep 600");
    let lab = hook(lab, "after-snapshot", "sleep 600 & wait");
    let lab = hook(lab, "before-restore", "echo I do not like it; exit 3");
    let lab = lab.set("hooks.after-restore", "[\"/no/such/hook\"]").set("hooks.timeout", "\"5s\"");
    let mut run = until_after_snapshot(&lab, "plain");
    // What is next would wait for it.
    run.wait_for("the hook after the snapshot is killed", || failed(&lab).len() >= 2);
    run.crash(&lab);
    count_on(&lab, &mut run, 2);
    run.wait_for("all failures are told", || failed(&lab).len() >= 4);
    finish(&lab, run);
    let failed = failed(&lab);
    let said = |hook: &str, words: &str| failed.iter().any(|(name, why)| name == hook && why.contains(words));
    assert!(said("before-snapshot", "; no; no"), "{failed:?}");
    assert!(said("after-snapshot", "killed after 5s"), "{failed:?}");
    assert!(said("before-restore", "exit code 3: I do not like it"), "{failed:?}");
    assert!(said("after-restore", "/no/such/hook"), "{failed:?}");
}

#[test]
fn a_hook_can_refuse_a_snapshot_and_the_job_runs_on() {
    let Some(lab) = Lab::new() else { return };
    let refuses = format!("test -e {}", lab.file("allowed").display());
    let lab = hook(lab, "before-snapshot", &refuses).set("hooks.on-error", "\"refuse\"");
    let lab = lab.set("hooks.timeout", "\"20s\"");
    let heard = format!("cat >>{}", lab.file("told").display());
    let lab = hook(lab, "on-failure", &heard);
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGUSR1);
    run.wait_said("the hook before-snapshot has failed, and hooks.on-error is \"refuse\": it ended with exit code 1");
    run.wait_for("the failure is told", || !told(&lab).is_empty());
    assert_eq!(told(&lab)[0]["failure"], "snapshots-fail");
    assert!(lab.images().is_empty());
    count_on(&lab, &mut run, 2);
    fs::write(lab.file("allowed"), "").unwrap();
    run.wait_for("it is tried again, and taken", || !lab.images().is_empty());
    finish(&lab, run);
}

#[test]
fn a_hook_can_refuse_a_restore_which_is_tried_again() {
    let Some(lab) = Lab::new() else { return };
    // The second time it lets it pass.
    let refuses = format!("test -e {0} || {{ touch {0}; exit 1; }}", lab.file("allowed").display());
    let lab = hook(lab, "before-restore", &refuses).set("hooks.on-error", "\"refuse\"");
    let mut run = until_after_snapshot(&lab, "plain");
    run.crash(&lab);
    count_on(&lab, &mut run, 2);
    run.wait_said("not restored now: the hook before-restore has failed, and hooks.on-error is \"refuse\"");
    assert!(lab.images()[0].is_good());
    finish(&lab, run);
}

#[test]
fn a_stop_has_its_image_and_ends_though_every_hook_hangs() {
    let Some(mut lab) = Lab::new() else { return };
    for point in POINTS {
        lab = hook(lab, point, "sleep 600");
    }
    let lab = lab.set("hooks.timeout", "\"2s\"").set("snapshot.grace", "\"30s\"");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(143);
    assert!(said.contains("image 000001"), "{said}");
    assert_eq!(lab.good(), [1]);
    lab.assert_all_gone();
}

/// The snapshot that waits for the hook is the last one.
#[test]
fn a_stop_has_its_image_though_the_hook_of_a_snapshot_before_it_hangs() {
    let Some(lab) = Lab::new() else { return };
    let runs = lab.file("hook-runs");
    let lab = hook(lab, "before-snapshot", &format!(": >{}; sleep 600", runs.display()));
    let lab = lab.set("hooks.timeout", "\"600s\"").set("snapshot.grace", "\"40s\"");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGUSR1);
    run.wait_for("the hook runs", || runs.exists());
    run.signal(Signal::SIGTERM);
    run.wait_said("a stop was requested, and it took too long");
    run.ends_with(143);
    assert_eq!(lab.good(), [1]);
    lab.assert_all_gone();
}

/// Slurm sends SIGTERM at a time limit: to a supervisor that waits for its hooks then.
#[test]
fn a_job_is_queued_again_though_a_signal_ends_the_wait_for_hooks() {
    let Some(lab) = Lab::new() else { return };
    let mut lab = hook(lab, "after-snapshot", "sleep 600").set("hooks.timeout", "\"20s\"");
    let asked = lab.file("requeued");
    lab.script("scontrol", &format!("echo \"$@\" >>{}", asked.display()));
    lab.script("squeue", "echo UNLIMITED");
    let path = format!("{}:{}", lab.path().display(), std::env::var("PATH").unwrap());
    lab.set_variable("PATH", &path);
    lab.set_variable("SLURM_JOB_ID", "7");
    let lab = lab.set("scheduler.requeue", "\"scontrol\"");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGUSR2);
    run.wait_said("job j stopped after");
    // Until it has ended: between its last steps, too.
    while run.runs() {
        run.signal(Signal::SIGUSR1);
        run.signal(Signal::SIGTERM);
        std::thread::sleep(Duration::from_millis(20));
    }
    run.ends_with(75);
    assert_eq!(lab.read("requeued"), "requeue 7\n");
}

/// As with sudo, which drops SLURM_JOB_ID.
#[test]
fn a_job_that_slurm_cannot_be_asked_for_says_so_at_its_start_and_at_its_end() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("scheduler.requeue", "\"scontrol\"");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    run.wait_said("will not be queued again: scheduler.requeue");
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGUSR2);
    run.wait_said("the job is not queued again: scheduler.requeue");
    run.ends_with(75);
}

/// Takes requests and answers each with 200; hands on their bodies.
fn server() -> (u16, mpsc::Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, bodies) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let mut reader = BufReader::new(&stream);
            let mut length = 0;
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                if line.trim().is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let text = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            (&stream).write_all(text.as_bytes()).unwrap();
            let text = || Value::String(String::from_utf8(body.clone()).unwrap());
            if sender.send(serde_json::from_slice(&body).unwrap_or_else(|_| text())).is_err() {
                return;
            }
        }
    });
    (port, bodies)
}

#[test]
fn the_example_tells_other_services_of_a_failure() {
    for service in ["slack", "discord", "teams", "ntfy"] {
        let Some(lab) = Lab::new().map(|lab| lab.set("restart.max-restarts", "0")) else { return };
        let (port, bodies) = server();
        fs::write(lab.file("address"), format!("http://127.0.0.1:{port}/secret\n")).unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/notify.py");
        let hook = ["/usr/bin/python3", "-B", script.to_str().unwrap(), service, lab.file("address").to_str().unwrap()]
            .map(str::to_owned);
        let lab = lab.set("hooks.on-failure", &format!("{hook:?}"));
        let (_, said) = lab.run(["sh", "-c", "exit 3"]).ends_with(3);
        let body = bodies.recv_timeout(LIMIT).unwrap();
        let text = match service {
            "slack" => &body["text"],
            "discord" => &body["content"],
            "teams" => &body["attachments"][0]["content"]["body"][0]["text"],
            _ => &body,
        };
        assert!(text.as_str().is_some_and(|text| text == "job j: it exited with code 3"), "{body}");
        assert!(!said.contains("hook"), "{said}");
    }
}
