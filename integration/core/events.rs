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
    let Some(lab) = Lab::new() else { return };
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
            What::Started { image, pid, took_us } => Some((*image, pid.is_some(), *took_us > 0)),
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
