//! What a queue is told: the exit code, and what Slurm is asked for. This Slurm is two scripts.

use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::memory_group::MemoryGroup;
use crate::supervisor::{Lab, Running, python};

/// Puts a Slurm in its PATH that notes what it is asked.
fn under_slurm(lab: &mut Lab) {
    lab.script("scontrol", &format!("echo \"$*\" >> {}/asked", lab.path().display()));
    lab.script("squeue", "echo UNLIMITED");
    lab.set_variable("PATH", &format!("{}:{}", lab.path().display(), std::env::var("PATH").unwrap()));
    lab.set_variable("SLURM_JOB_ID", "7");
}

/// Starts a child that takes more memory than there is, when it is told, and survives it.
fn survivor(lab: &Lab) -> Running {
    let program = "import os, subprocess, sys, time
glutton = 'open(\"/proc/self/oom_score_adj\", \"w\").write(\"1000\"); held = b\"x\" * (4 << 30)'
print('ready', flush=True)
while not os.path.exists('finish'):
    if os.path.exists('eat'):
        os.remove('eat')
        print('ended with', subprocess.call([sys.executable, '-Sc', glutton]), flush=True)
    time.sleep(0.05)
";
    lab.run([python().unwrap().to_str().unwrap(), "-Sc", program])
}

/// Slurm replaces the exit code of a step by OUT_OF_MEMORY if its control group has counted a kill.
#[test]
fn after_a_kill_for_lack_of_memory_slurm_is_asked_to_queue_the_job_again() {
    let Some(lab) = Lab::new() else { return };
    let Some(group) = MemoryGroup::gate(512 << 20) else { return };
    let mut lab = lab.within(group.path());
    under_slurm(&mut lab);
    // Nothing happened: the exit code does it.
    let mut run = survivor(&lab);
    run.wait_printed("ready");
    run.job_pid(&lab);
    run.signal(Signal::SIGUSR2);
    run.ends_with(75);
    assert_eq!(lab.read("asked"), "");

    let mut run = survivor(&lab);
    run.wait_said("the job was restored from image");
    fs::write(lab.file("eat"), "").unwrap();
    run.wait_for("the child is killed", || lab.output().contains("ended with -9"));
    run.signal(Signal::SIGUSR2);
    let (_, said) = run.ends_with(75);
    assert!(said.contains("Slurm will report OUT_OF_MEMORY"), "{said}");
    assert_eq!(lab.read("asked"), "requeue 7\n", "{said}");
}

/// A queue takes these exit codes for a run that was stopped and continues, and would start the job for ever.
#[test]
fn a_job_that_is_given_up_does_not_ask_to_be_queued_again() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.max-restarts", "0");
    for (script, code) in
        [("exit 75", 1), ("exit 69", 1), ("exit 125", 1), ("kill -TERM $$", 1), ("exit 74", 74), ("kill -HUP $$", 129)]
    {
        let run = lab.run_with(&["run", "--name", "j", "--fresh", "--"], ["sh", "-c", script]);
        let (_, said) = run.ends_with(code);
        assert_eq!(said.contains("rekindle exits with 1 instead"), code == 1, "{script}: {said}");
        // What the job itself ended with is kept.
        let result: serde_json::Value =
            serde_json::from_slice(&fs::read(lab.store().join("j/result.json")).unwrap()).unwrap();
        assert_ne!(result["exit_code"], 1, "{script}: {result}");
    }
}

/// A member of a group whose first machine has not come yet.
fn waits_for_the_first_machine(lab: &Lab) -> Running {
    let place = format!("local:{}/none.json", lab.path().display());
    let mut run = lab
        .run_with(&["run", "--name", "j", "--nodes", "2", "--node-rank", "1", "--coordinator", &place, "--"], ["true"]);
    let lock = lab.store().join("j.1/lock");
    run.wait_for("it has the lock", || fs::metadata(&lock).is_ok_and(|file| file.len() > 0));
    // It has taken its place, and waits.
    std::thread::sleep(Duration::from_secs(1));
    run
}

/// Before the job is started a run can wait for minutes.
#[test]
fn a_signal_before_the_job_is_started_ends_the_run_with_its_code_and_gives_the_lock_back() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("group.wait", "\"10m\"");
    let stops = [(Signal::SIGUSR2, 75), (Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129)];
    for (signal, code) in stops {
        let mut run = waits_for_the_first_machine(&lab);
        run.signal(Signal::SIGUSR1);
        run.wait_said("the job does not run yet");
        assert!(run.runs());
        run.signal(signal);
        let (_, said) = run.ends_with(code);
        assert!(said.contains(&format!("received {signal} before the job was started")), "{said}");
        let lock = lab.store().join("j.1/lock");
        assert_eq!(fs::read(lock).unwrap(), b"", "after {signal} another machine waits for who is gone");
    }
}

/// The kernel drops a signal to process 1 of a container that has no handler for it.
#[test]
fn process_one_of_a_container_is_ended_by_a_signal_before_its_job_is_started() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("group.wait", "\"10m\"").being_process_one();
    for (signal, code) in [(Signal::SIGUSR2, 75), (Signal::SIGTERM, 143)] {
        let run = waits_for_the_first_machine(&lab);
        let children = format!("/proc/{0}/task/{0}/children", run.pid());
        let first: i32 = fs::read_to_string(children).unwrap().trim().parse().unwrap();
        crate::supervisor::kill(first, signal);
        run.ends_with(code);
    }
}

/// `scheduler.requeue = "scontrol"`: a run that has no job yet asks as well.
#[test]
fn slurm_is_asked_by_a_run_that_waits_for_the_lock() {
    let Some(lab) = Lab::new() else { return };
    let mut lab = lab.set("scheduler.requeue", "\"scontrol\"");
    under_slurm(&mut lab);
    leave_a_lock(&lab.store().join("j"));
    let mut run = lab.run(["true"]);
    run.wait_said("for its next heartbeat");
    run.signal(Signal::SIGUSR2);
    run.ends_with(75);
    assert_eq!(lab.read("asked"), "requeue 7\n");
    assert!(fs::read(lab.store().join("j/lock")).unwrap().starts_with(b"{"), "the lock is that of the other one");
}

/// A job's folder, with the lock of a supervisor on another machine that lived a moment ago.
fn leave_a_lock(folder: &Path) {
    let holder = serde_json::json!({
        "pid": 77, "host": "elsewhere", "boot_id": "another", "since": "2026-11-22T06:00:00Z", "started": 1,
        "pid_namespace": "pid:[1]"
    });
    fs::create_dir_all(folder).unwrap();
    std::process::Command::new("chmod").args(["-R", "go="]).arg(folder.parent().unwrap()).status().unwrap();
    fs::write(folder.join("lock"), holder.to_string()).unwrap();
}
