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

/// A rank that runs waits for the others on the GPU, and the driver ends it after some seconds.
#[test]
fn no_rank_runs_before_all_are_restored() {
    if !gate() {
        return;
    }
    // Both jobs have the same pids, and the stand-in is controlled by pid.
    let (mut lab, standins) = (Lab::new(2, 0), [Standin::new(), Standin::new()]);
    for standin in &standins {
        let mut job = Command::new("python3");
        job.args(["-c", JOB]).arg(standin.output());
        standin.install(&mut job);
        lab.jobs.push(job);
    }
    // The second machine is slow.
    lab.set("hooks.before-restore", r#"["sh", "-c", "case $REKINDLE_JOB in *.1) sleep 3;; esac"]"#);
    lab.run_all();
    lab.said(0, "was stored in", 2);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let last = |rank: usize| -> Option<Duration> {
        let times = fs::read_to_string(standins[rank].output()).ok()?;
        times.lines().last()?.parse().ok().map(Duration::from_secs_f64)
    };
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
