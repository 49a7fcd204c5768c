//! Children of the job that are killed: no image is taken in which the job has yet to hear of that.

use std::time::Duration;

use chrono::TimeDelta;
use nix::sys::signal::Signal;
use rekindle::telemetry::events::{What, read};
use rekindle_os::process;

use crate::kinds::count_on;
use crate::supervisor::{Lab, Running, assert_counts_up, kill, wait_for};

/// Starts the job, which looks for deaths then, and takes the first image.
fn begin(lab: &Lab, looks: &str) -> Running {
    let mut run = lab.python("dead_child.py", &[looks, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    run
}

fn kill_child(lab: &Lab, run: &mut Running) {
    let pid = run.job_pid(lab);
    let child = process::children(pid).pop().unwrap();
    kill(child, Signal::SIGKILL);
    wait_for("the child is dead", || process::ended(child).is_some());
}

fn finish(lab: &Lab, run: Running) {
    std::fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
    assert_counts_up(&lab.output());
}

#[test]
fn no_image_is_taken_of_a_job_that_has_yet_to_hear_of_a_death() {
    let Some(lab) = Lab::new() else { return };
    let mut run = begin(&lab, "told");
    let said = run.said_so_far();
    let times = |words: &str| said().matches(words).count();
    let found = "(python3) was killed by signal SIGKILL, and its parent has not collected its exit status";
    for back in 1..=2 {
        let before = times(found);
        kill_child(&lab, &mut run);
        run.signal(Signal::SIGUSR1);
        run.wait_for("the snapshot finds it", || times(found) > before);
        // The job hears of it and ends; the image has the child alive.
        std::fs::write(lab.file("look"), "").unwrap();
        run.wait_said_times("the job was restored from image 000001", back);
        std::fs::remove_file(lab.file("look")).unwrap();
        assert_eq!(lab.good(), [1], "{}", run.err());
        count_on(&lab, &mut run, 5);
        assert_eq!(process::children(run.job_pid(&lab)).len(), 1);
    }
    run.snapshot(&lab);
    assert_eq!(lab.good(), [2, 1]);
    finish(&lab, run);
}

/// Removes a file that the job needs once its parent is dead, as helpers of MPI and Python do.
const TIDY: &str = r#"
import os, sys, time
folder, n = sys.argv[1], 0
if os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os.remove(folder + "/needed")
    os._exit(0)
while not os.path.exists(folder + "/finish"):
    n += 1
    os.write(1, b"n %d\n" % n)
    time.sleep(0.02)
"#;

#[test]
fn what_outlives_the_job_does_nothing_any_more() {
    let Some(lab) = Lab::new() else { return };
    std::fs::write(lab.file("needed"), "").unwrap();
    let mut run = lab.run(["python3", "-c", TIDY, lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    for back in 1..=2 {
        // However long the supervisor takes to hear of it.
        let pid = run.job_pid(&lab);
        run.signal(Signal::SIGSTOP);
        kill(pid, Signal::SIGKILL);
        std::thread::sleep(Duration::from_millis(2500));
        assert!(lab.file("needed").exists(), "{back}");
        run.signal(Signal::SIGCONT);
        run.wait_said_times("the job was restored from image 000001", back);
        count_on(&lab, &mut run, 5);
    }
    finish(&lab, run);
}

/// The parent of a process, and its nice value.
fn parent_and_nice(pid: i32) -> [i32; 2] {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The 4th field and the 19th; the second is the name, which may have spaces.
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    [fields[1], fields[16]].map(|field| field.parse().unwrap())
}

/// It is the reaper that stops what outlives the job, on a machine whose processors may all be busy.
#[test]
fn the_reaper_comes_before_the_processes_of_the_job() {
    let Some(lab) = Lab::new() else { return };
    let mut run = begin(&lab, "never");
    let [_, ours] = parent_and_nice(std::process::id().cast_signed());
    for restored in [false, true] {
        let job = run.job_pid(&lab);
        let [reaper, _] = parent_and_nice(job);
        let nice = || [reaper, job, process::children(job)[0]].map(|pid| parent_and_nice(pid)[1]);
        // It begins with ours.
        run.wait_for("the reaper comes first", || nice()[0] == -20);
        assert_eq!(nice(), [-20, ours, ours], "restored: {restored}");
        if !restored {
            run.crash(&lab);
        }
    }
    finish(&lab, run);
}

/// Starts a child whose first thread ends before the other: until IS_OVER it is a zombie with threads. Its parent waits for
/// it.
const HALF_DEAD: &str = r#"
import ctypes, os, sys, threading, time
folder, n = sys.argv[1], 0
def other():
    while not (IS_OVER):
        time.sleep(0.01)
    os._exit(0)
while not os.path.exists(folder + "/finish"):
    n += 1
    os.write(1, b"n %d\n" % n)
    if os.path.exists(folder + "/start"):
        os.remove(folder + "/start")
        if os.fork() == 0:
            threading.Thread(target=other).start()
            ctypes.CDLL(None).syscall(60, 0)
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass
    time.sleep(0.02)
"#;

/// A job with a child whose first thread has ended, until something `is_over`, in Python.
fn half_dead(lab: &Lab, is_over: &str) -> Running {
    let text = HALF_DEAD.replace("IS_OVER", is_over);
    let mut run = lab.run(["python3", "-c", &text, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    let job = run.job_pid(lab);
    std::fs::write(lab.file("start"), "").unwrap();
    let is_half_dead = || {
        let mut children = process::children(job).into_iter();
        children.any(|pid| process::state(pid) == Some('Z') && process::threads(pid).len() > 1)
    };
    wait_for("the child is half dead", is_half_dead);
    run
}

#[test]
fn a_snapshot_waits_for_a_process_that_is_ending() {
    let Some(lab) = Lab::new() else { return };
    // While the snapshot waits for it, which is three seconds.
    let state = lab.store().join("j/state.json");
    let mut run = half_dead(&lab, &format!("'\"snapshotting\"' in open({state:?}).read() and not time.sleep(0.3)"));
    run.signal(Signal::SIGUSR1);
    run.wait_for("a snapshot", || !lab.good().is_empty());
    assert!(!run.err().contains("Zombies"), "{}", run.err());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn a_process_whose_first_thread_has_ended_delays_a_snapshot_for_a_moment_only() {
    let lab = Lab::new().map(|lab| lab.variable("REKINDLE_RETRY_AFTER", "1s"));
    let Some(lab) = lab else { return };
    let lab = lab.noting_the_first_dump("tried");
    let mut run = half_dead(&lab, "os.path.exists(folder + '/tried')");
    run.signal(Signal::SIGUSR1);
    // It is named, unless it is over by then.
    run.wait_said("has ended its first thread (pthread_exit in main), while others run");
    run.wait_for("a snapshot", || !lab.good().is_empty());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// How long the newest snapshot took, from its begin until the job ran on.
fn took(lab: &Lab) -> TimeDelta {
    let events = read(&lab.job().log_dir()).unwrap();
    let last = |is: fn(&What) -> bool| events.iter().rfind(|event| is(&event.what)).unwrap().time;
    last(|what| matches!(what, What::SnapshotTaken { .. })) - last(|what| matches!(what, What::SnapshotBegan { .. }))
}

#[test]
fn a_parent_that_never_waits_has_its_images() {
    let Some(lab) = Lab::new() else { return };
    let mut run = begin(&lab, "never");
    kill_child(&lab, &mut run);
    run.snapshot(&lab);
    run.wait_said("the image has dead processes: process 1002");
    // It would be waited for 5 s each time. A busy machine may be slow as well, but not each time.
    let newest = (0..5).find_map(|_| {
        let newest = run.snapshot(&lab);
        (took(&lab) < TimeDelta::seconds(4)).then_some(newest)
    });
    let newest = newest.expect("it is waited for once");
    assert_eq!(run.err().matches("the image has dead processes").count(), 1, "and said once");
    run.crash(&lab);
    run.wait_said(&format!("the job was restored from image {newest:06}"));
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}
