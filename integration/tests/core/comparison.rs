//! A restored job is compared with what it was, object by object: what CRIU loses is put back, and what it changes is
//! found.

use std::process::Command;

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, job_file, kill};

fn started(lab: &Lab) -> Running {
    let mut run = lab.python("objects.py", &[lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    run
}

/// Options of sockets, priorities, and what else CRIU 4.2 does not save.
#[test]
fn what_criu_loses_is_put_back() {
    let Some(lab) = Lab::new() else { return };
    let mut run = started(&lab);
    for _ in 0..2 {
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        run.snapshot(&lab);
    }
    let output = lab.output();
    let changed: Vec<&str> = output.lines().filter(|line| line.starts_with("changed")).collect();
    assert_eq!(changed, [""; 0]);
    finish(&lab, run);
}

/// Changes the image in memory as a CRIU would that loses things in silence. Returns what it has changed.
fn lie(lab: &Lab) -> Vec<String> {
    let staged = lab.job().staged().pop().unwrap();
    let folder = staged.dir.path().join("criu");
    let output = Command::new("/usr/bin/python3").arg(job_file("lie.py")).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(ToOwned::to_owned).collect()
}

#[test]
fn a_criu_that_lies_is_found_out() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("log.level", "\"debug\"");
    let mut run = started(&lab);
    let items = lie(&lab);
    assert!(items.len() >= 8, "{items:?}");
    kill(run.job_pid(&lab), Signal::SIGKILL);
    run.wait_said("CRIU reports success, but the restored job is not what it was");
    // All of them are in the log, and the first few in the message.
    for item in &items {
        run.wait_said(&format!("not as before the restore ({item})"));
    }
    run.wait_said("is not marked as bad");
    lab.kill_9(run);
}

#[test]
fn a_job_runs_in_spite_of_differences_if_they_are_only_to_be_told() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.compare", "\"tell\"");
    let mut run = started(&lab);
    let items = lie(&lab);
    kill(run.job_pid(&lab), Signal::SIGKILL);
    for item in &items {
        run.wait_said(&format!("not as before the restore ({item})"));
    }
    lab.kill_9(run);
}

#[test]
fn an_image_without_a_record_is_restored_unless_one_is_required() {
    for (required, says) in [(false, "is not compared with what it was"), (true, "restart.compare is \"required\"")] {
        let Some(mut lab) = Lab::new() else { return };
        if required {
            lab = lab.set("restart.compare", "\"required\"");
        }
        let mut run = started(&lab);
        std::fs::write(lab.job().staged().pop().unwrap().dir.path().join("objects.json"), "{\"format\":").unwrap();
        kill(run.job_pid(&lab), Signal::SIGKILL);
        run.wait_said(says);
        if required {
            lab.kill_9(run);
        } else {
            count_on(&lab, &mut run, 5);
            finish(&lab, run);
        }
    }
}
