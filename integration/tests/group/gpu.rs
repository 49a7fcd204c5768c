//! Jobs that use CUDA, with the stand-in for the driver.

use std::fs;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::lab::{Lab, gate, wait_for};
use crate::standin::Standin;

/// Appends the time to a file in each round.
const JOB: &str = r#"
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
while True:
    with open(sys.argv[1], "a") as out:
        out.write(f"{time.time()}\n")
    time.sleep(0.01)
"#;

/// Two machines with a driver each. Both jobs have the same pids, and the stand-in is controlled by pid.
fn two_machines() -> (Lab, [Standin; 2]) {
    let (mut lab, standins) = (Lab::new(2, 0), [Standin::new(), Standin::new()]);
    for standin in &standins {
        let mut job = Command::new("python3");
        job.args(["-c", JOB]).arg(standin.output());
        standin.install(&mut job);
        lab.jobs.push(job);
    }
    (lab, standins)
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

/// When a job ran, in whole lines.
fn times(standin: &Standin) -> Vec<Duration> {
    let text = fs::read_to_string(standin.output()).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().filter_map(|line| line.parse().ok().map(Duration::from_secs_f64)).collect()
}

/// When a job ran again after it had stood, since a time.
fn ran_again(standin: &Standin, since: Duration) -> Duration {
    let times = times(standin);
    let gaps = times.windows(2).filter(|pair| pair[1] > since);
    gaps.max_by_key(|pair| pair[1] - pair[0]).expect("it runs")[1]
}

/// A rank that runs waits for the others on the GPU. Where machines share a driver, that does not get on with their restores
/// meanwhile, and ends the rank after some seconds.
#[test]
fn no_rank_runs_while_the_driver_restores_another() {
    if !gate() {
        return;
    }
    const SLOW: Duration = Duration::from_secs(12);
    // Later than this, the other one's word was not waited for. A process may get no processor for a while.
    const AFTER: Duration = Duration::from_secs(8);
    let (mut lab, standins) = two_machines();
    lab.set("snapshot.interval", "\"off\"");
    lab.run_all();
    wait_for("both jobs to run", || standins.iter().all(|standin| !times(standin).is_empty()));
    // With code 0 it only takes its time.
    standins[1].fault("fail-restore", &format!("0 delay={}", SLOW.as_millis()));

    let began = now();
    let output = lab.command(0, 0).args(["snapshot", "ring.0"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let both_ran = |since| {
        let ran = |standin| times(standin).last().is_some_and(|last| *last > since + SLOW);
        wait_for("both jobs to run again", || standins.iter().all(ran));
        standins.each_ref().map(|standin| ran_again(standin, since))
    };
    let [first, slow] = both_ran(began);
    assert!(slow - began > SLOW, "the snapshot: the second restores in {:?}", slow - began);
    assert!(first + AFTER > slow && first < slow + AFTER, "the snapshot: {:?}, {:?}", first - began, slow - began);

    lab.said(0, "group image 1 is committed", 1);
    let victim = lab.machines[1].process_of_job().expect("a process of the job");
    let killed = now();
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    let [first, slow] = both_ran(killed);
    assert!(slow - killed > SLOW, "the restart: the second restores in {:?}", slow - killed);
    assert!(first + AFTER > slow && first < slow + AFTER, "the restart: {:?}, {:?}", first - killed, slow - killed);
    for machine in [0, 1] {
        lab.machines[machine].kill();
    }
}

/// A rank that runs waits for the others on the GPU, and the driver ends it after some seconds.
#[test]
fn no_rank_runs_before_all_are_restored() {
    if !gate() {
        return;
    }
    let (mut lab, standins) = two_machines();
    // The second machine is slow.
    lab.set("hooks.before-restore", r#"["sh", "-c", "case $REKINDLE_JOB in *.1) sleep 3;; esac"]"#);
    lab.run_all();
    lab.said(0, "was stored in", 2);
    let last = |rank: usize| times(&standins[rank]).last().copied();
    let victim = lab.machines[1].process_of_job().expect("a process of the job");
    let killed = now();
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    lab.said(0, "the group starts from group image", 1);
    // A line from before its end may be there.
    let ended = now();
    wait_for("the first machine to run", || last(0).is_some_and(|time| time > ended));
    let first = last(0).unwrap() - killed;
    assert!(first > Duration::from_millis(2900), "the first rank ran {first:?} after the loss");
    wait_for("the second machine to run", || last(1).is_some_and(|time| time > ended));
    assert!(last(1).unwrap() - killed > Duration::from_millis(2900));
    for machine in [0, 1] {
        lab.machines[machine].signal(Signal::SIGTERM);
    }
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
}

/// The same if the snapshot fails on one machine: the other one may still be restoring.
#[test]
fn no_rank_runs_before_all_are_restored_after_a_snapshot_that_failed() {
    if !gate() {
        return;
    }
    const SLOW: Duration = Duration::from_secs(12);
    let (mut lab, standins) = two_machines();
    let (criu, fails) = (lab.path("criu"), lab.path("criu-fails"));
    let real = std::env::var("REKINDLE_CRIU").unwrap_or_else(|_| "criu".into());
    let script = format!(
        "#!/bin/sh\n[ \"$1\" != --version ] && [ -e {fails}.$(hostname) ] && exit 1\nexec {real} \"$@\"\n",
        fails = fails.display()
    );
    rekindle_testing::program(&criu, &script);
    lab.environment.push(("REKINDLE_CRIU".into(), criu.display().to_string()));
    lab.set("snapshot.interval", "\"off\"");
    lab.run_all();
    wait_for("both jobs to run", || standins.iter().all(|standin| !times(standin).is_empty()));
    standins[1].fault("fail-restore", &format!("0 delay={}", SLOW.as_millis()));
    fs::write(lab.path("criu-fails.node-0"), "").unwrap();

    let began = now();
    let output = lab.command(1, 1).args(["snapshot", "ring.1"]).output().unwrap();
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    wait_for("both jobs to run again", || {
        standins.iter().all(|standin| times(standin).last().is_some_and(|last| *last > began + SLOW))
    });
    let [first, slow] = standins.each_ref().map(|standin| ran_again(standin, began));
    assert!(slow - began > SLOW, "the second restores in {:?}", slow - began);
    assert!(first + Duration::from_secs(8) > slow, "{:?}, {:?}", first - began, slow - began);
    for machine in [0, 1] {
        lab.machines[machine].kill();
    }
}
