//! Children of the job that are killed: no image is taken in which the job has yet to hear of that.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rekindle::sys::process;

use crate::kinds::count_on;
use crate::supervisor::{Lab, Running, assert_counts_up, comes, kill};

/// Starts the job, which looks for deaths so often, and takes the first image.
fn begin(lab: &Lab, patience: &str) -> Running {
    let mut run = lab.python("dead_child.py", &[patience, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    run
}

fn kill_child(lab: &Lab, run: &mut Running) {
    let pid = run.job_pid(lab);
    let child = process::children(pid).pop().unwrap();
    kill(child, Signal::SIGKILL);
    assert!(comes(Duration::from_secs(5), || process::ended(child).is_some()));
}

fn finish(lab: &Lab, run: Running) {
    std::fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
    assert_counts_up(&lab.output());
}

#[test]
fn no_image_is_taken_of_a_job_that_has_yet_to_hear_of_a_death() {
    let Some(lab) = Lab::new() else { return };
    let mut run = begin(&lab, "2");
    for _ in 0..2 {
        let back = run.err().matches("the job is back from image 000001").count();
        kill_child(&lab, &mut run);
        run.signal(Signal::SIGUSR1);
        run.wait_said("(python3) was ended by signal SIGKILL, and its parent has not waited for it");
        // The job hears of it and ends; the image has the child alive.
        run.wait_said_times("the job is back from image 000001", back + 1);
        assert_eq!(lab.good(), [1], "{}", run.err());
        count_on(&lab, &mut run, 5);
        assert_eq!(process::children(run.job_pid(&lab)).len(), 1);
    }
    run.snapshot(&lab);
    assert_eq!(lab.good(), [2, 1]);
    finish(&lab, run);
}

#[test]
fn a_parent_that_never_waits_has_its_images() {
    let Some(lab) = Lab::new() else { return };
    let mut run = begin(&lab, "never");
    kill_child(&lab, &mut run);
    run.snapshot(&lab);
    assert!(run.err().contains("the image has dead processes: process 1002"), "{}", run.err());
    let begun = Instant::now();
    run.snapshot(&lab);
    assert!(begun.elapsed() < Duration::from_secs(4), "it is waited for once: {:?}", begun.elapsed());
    assert_eq!(run.err().matches("the image has dead processes").count(), 1, "and said once");
    run.crash(&lab);
    run.wait_said("the job is back from image 000003");
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}
