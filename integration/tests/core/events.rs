//! What the journal of a job says of its life.

use rekindle::telemetry::events::{What, read};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::Lab;

fn names(lab: &Lab) -> Vec<String> {
    let events = read(&lab.job().log_dir()).unwrap();
    let name = |what: &What| serde_json::to_value(what).unwrap()["event"].as_str().unwrap().to_owned();
    events.iter().map(|event| name(&event.what)).collect()
}

#[test]
fn a_life_with_a_crash_and_another_supervisor_is_told_in_order() {
    // A rehearsal would be told between any two of them.
    let Some(lab) = Lab::new().map(|lab| lab.set("snapshot.rehearse", "\"off\"")) else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    run.wait_for("the image in the store", || names(&lab).contains(&"stored".into()));
    run.crash(&lab);
    let first = [
        "supervised",
        "started",
        "snapshot-began",
        "snapshot-taken",
        "stored",
        "ended",
        "restarting",
        "restore-began",
        "started",
    ];
    assert_eq!(names(&lab), first);
    lab.kill_9(run);
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
    let last = names(&lab).split_off(first.len());
    assert_eq!(last, ["supervised", "restore-began", "started", "ended", "finished"]);
    let events = read(&lab.job().log_dir()).unwrap();
    let image = lab.images()[0].id;
    let started: Vec<_> = events
        .iter()
        .filter_map(|event| match &event.what {
            What::Started { image, pid, took_us, .. } => Some((*image, pid.is_some(), *took_us > 0)),
            _ => None,
        })
        .collect();
    assert_eq!(started, [(None, true, true), (Some(image), true, true), (Some(image), true, true)]);
    let ended = |event: &What| matches!(event, What::Ended { signal: Some(9), exit_code: None, .. });
    assert!(events.iter().any(|event| ended(&event.what)));
    let taken = |event: &What| match event {
        What::SnapshotTaken { freeze_us, phases, bytes, .. } => *freeze_us > 0 && phases.len() > 1 && *bytes > 0,
        _ => false,
    };
    assert!(events.iter().any(|event| taken(&event.what)));
    assert!(events.windows(2).all(|pair| pair[0].time <= pair[1].time));
    let done = What::Finished { outcome: "completed".into(), exit_code: Some(0), why: None };
    assert_eq!(events.last().unwrap().what, done);
}

#[test]
fn a_report_adds_up_what_was_told() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    run.wait_for("the image in the store", || names(&lab).contains(&"stored".into()));
    run.crash(&lab);
    lab.kill_9(run);
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
    // The heartbeat of the one that was killed.
    let seen = |event: &What| matches!(event, What::Supervised { last_seen: Some(_), .. });
    assert_eq!(read(&lab.job().log_dir()).unwrap().iter().filter(|event| seen(&event.what)).count(), 1);
    let json: serde_json::Value = serde_json::from_slice(&lab.rekindle(&["report", "j", "--json"]).stdout).unwrap();
    let us = |key: &str| json["times"][key].as_u64().unwrap();
    assert_eq!((&json["state"], &json["failures"], &json["restarts"]), (&"completed".into(), &2.into(), &1.into()));
    assert!(us("useful_us") > 0 && us("lost_us") > 0 && us("frozen_us") > 0 && us("down_us") > 0, "{json:#}");
    let parts = ["useful_us", "frozen_us", "lost_us", "down_us", "away_us"];
    assert_eq!(us("wall_us"), parts.map(us).iter().sum::<u64>());
    assert_eq!(json["images"].as_array().unwrap().len(), lab.images().len());
    assert!(json["images"][0]["stored"].as_u64().unwrap() > 0 && json["disk"].as_u64().unwrap() > 0);
    // The page: to a file, to standard output; a folder or an unknown job is the user's mistake.
    let file = lab.path().join("page.html");
    let out = lab.rekindle(&["report", "j", "--out", file.to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(page.contains("Goodput") && page.contains("SIGKILL") && page.contains("rekindle was killed"));
    let out = lab.rekindle(&["report", "j", "--out", "-", "--since", "1s"]);
    assert!(out.status.success() && out.stdout.starts_with(b"<!DOCTYPE html>"), "{out:?}");
    for wrong in [["report", "j", "--out", "/tmp"], ["report", "nobody", "--out", "-"], ["report", "j", "--since", "x"]]
    {
        assert_eq!(lab.rekindle(&wrong).status.code(), Some(2), "{wrong:?}");
    }
}

/// A program that asked for JSON gets nothing else on standard output.
#[test]
fn run_in_json_prints_its_events_and_not_what_the_job_prints() {
    let Some(lab) = Lab::new() else { return };
    let run = lab.run_with(&["run", "--json", "--name", "j", "--"], ["sh", "-c", "echo words; echo more >&2; exit 0"]);
    let (out, said) = run.ends_with(0);
    let lines: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = lines.iter().map(|line| line["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["supervised", "started", "ended", "finished"], "{out}");
    let journal = std::fs::read_to_string(lab.job().log_dir().join("events.jsonl")).unwrap();
    assert_eq!(out, journal, "the same lines as in the journal");
    assert_eq!(lab.output(), "words\n", "the output is in its file");
    assert!(!said.contains("more"), "{said}");
}
