//! `scheduler.requeue = "scontrol"`, with stand-ins for Slurm's commands: one machine asks, once, after all are done.

use std::fs;

use nix::sys::signal::Signal;

use crate::lab::{ENDLESS, Lab, gate};

/// A group whose Slurm writes each request to queue the job again into the file `requeued`. `first` is what `scontrol` does
/// before.
fn lab(first: &str) -> Lab {
    let mut lab = Lab::new(3, ENDLESS);
    let file = lab.path("requeued");
    let programs = lab.path("slurm");
    fs::create_dir(&programs).unwrap();
    let program = |name: &str, text: String| {
        rekindle_testing::program(&programs.join(name), &format!("#!/bin/sh\n{text}\n"));
    };
    let (file, folder) = (file.display().to_string(), lab.path("").display().to_string());
    program("scontrol", format!("{first}\necho \"$@\" >>{file}").replace("FOLDER", &folder));
    // %T asks for the state, %L for the time left.
    program(
        "squeue",
        format!("case $* in *%T*) [ -e {file} ] && echo COMPLETING || echo RUNNING;; *) echo UNLIMITED;; esac"),
    );
    lab.environment = vec![
        ("PATH".into(), format!("{}:{}", programs.display(), std::env::var("PATH").unwrap())),
        ("SLURM_JOB_ID".into(), "7".into()),
        ("REKINDLE_SCHEDULER_REQUEUE".into(), "scontrol".into()),
    ];
    lab
}

fn requests(lab: &Lab) -> String {
    fs::read_to_string(lab.path("requeued")).unwrap_or_default()
}

#[test]
fn one_machine_has_the_job_queued_again() {
    if !gate() {
        return;
    }
    let mut lab = lab("");
    lab.run_all();
    lab.said(0, "was stored in", 1);
    lab.machines[1].signal(Signal::SIGUSR2);
    assert_eq!((lab.ends(0), lab.ends(1), lab.ends(2)), (75, 75, 75));
    assert_eq!(requests(&lab), "requeue 7\n");
    assert!(lab.log(0).contains("Slurm queues the job again"), "{}", lab.log(0));
    (1..3).for_each(|rank| assert!(lab.log(rank).contains("queued the job again already"), "{}", lab.log(rank)));
}

#[test]
fn a_machine_that_dies_just_then_is_replaced_by_the_next() {
    if !gate() {
        return;
    }
    // The first supervisor that asks is killed before Slurm has heard of it.
    let mut lab = lab("mkdir FOLDER/asked 2>/dev/null && kill -9 $PPID && exit 1");
    lab.run_all();
    lab.said(0, "was stored in", 1);
    lab.machines[2].signal(Signal::SIGUSR2);
    assert_eq!((lab.ends(0), lab.ends(1), lab.ends(2)), (128 + 9, 75, 75));
    assert_eq!(requests(&lab), "requeue 7\n");
    assert!(lab.log(1).contains("Slurm queues the job again"), "{}", lab.log(1));
}

#[test]
fn a_machine_that_slurm_refuses_leaves_it_to_the_next() {
    if !gate() {
        return;
    }
    let mut lab = lab("mkdir FOLDER/asked 2>/dev/null && echo no right >&2 && exit 1");
    lab.run_all();
    lab.said(0, "was stored in", 1);
    lab.machines[0].signal(Signal::SIGUSR2);
    assert_eq!((lab.ends(0), lab.ends(1), lab.ends(2)), (75, 75, 75));
    assert_eq!(requests(&lab), "requeue 7\n");
    assert!(lab.log(0).contains("not queued again by this machine") && lab.log(0).contains("no right"));
}
