//! Jobs that run before their memory is back (`restart.lazy`).

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use rekindle::sys::process::children;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, alive, kill, numbers, tail};

fn lab() -> Option<Lab> {
    Some(Lab::new()?.set("restart.lazy", "\"on\"").set("restart.cold-start", "\"never\""))
}

/// A job with so many MiB, and an image of it.
fn start(lab: &Lab, mib: &str) -> Running {
    let mut run = lab.python("lazy_job.py", &[lab.path().to_str().unwrap(), mib]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    run
}

/// So many that they are on their way for 200 ms.
const MIB: &str = "512";

/// Kills the job's process.
fn kill_job(lab: &Lab, run: &mut Running) {
    let pid = run.job_pid(lab);
    kill(pid, Signal::SIGKILL);
}

/// Kills the job, and stops what brings its memory back while the job runs already. Answers the pid of that. On a busy
/// machine all can be back before it is seen: then it is tried again, with another image, because a job that dies twice in
/// a short time speaks against the one it came from.
fn crash_and_hold(lab: &Lab, run: &mut Running) -> i32 {
    for _ in 0..20 {
        let before = backs(run);
        kill_job(lab, run);
        if let Some(daemon) = hold(lab, run, before) {
            return daemon;
        }
        run.wait_for("its memory is back", || lab.published().is_some_and(|now| now.loading.is_none()));
        run.snapshot(lab);
    }
    panic!("it was over too soon, each time\n{}", tail(&run.err()));
}

/// CRIU's daemon, stopped; none when it has done its work. A look at all processes would take too long. It is stopped once: in
/// `epoll_wait`, where it is at other times, it would not survive that.
fn hold(lab: &Lab, run: &mut Running, before: usize) -> Option<i32> {
    let (supervisor, said) = (run.pid(), run.said_so_far());
    let is_daemon = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("\0lazy-pages\0")
    };
    let loading = || lab.published().is_some_and(|now| now.loading.is_some());
    let mut daemon = None;
    run.wait_closely("its memory is being brought back", || {
        daemon = daemon.or_else(|| children(supervisor).into_iter().find(is_daemon));
        daemon.is_some() && loading() || said().matches(BACK).count() > before
    });
    let daemon = daemon?;
    let stopped = nix::sys::signal::kill(nix::unistd::Pid::from_raw(daemon), Signal::SIGSTOP).is_ok();
    (stopped && alive(daemon) && loading()).then_some(daemon)
}

const BACK: &str = "all of the job's memory is back";

fn backs(run: &Running) -> usize {
    run.err().matches(BACK).count()
}

#[test]
fn all_memory_is_right() {
    for staging in ["\"ram\"", "\"store\""] {
        let Some(lab) = lab() else { return };
        let lab = lab.set("snapshot.staging", staging);
        let mut run = start(&lab, MIB);
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        run.wait_said(BACK);
        // The next image is made of memory that came lazily.
        run.snapshot(&lab);
        run.crash(&lab);
        finish(&lab, run);
    }
}

#[test]
fn killed_again_while_its_memory_comes() {
    let Some(lab) = lab() else { return };
    let mut run = start(&lab, MIB);
    let daemon = crash_and_hold(&lab, &mut run);
    let before = backs(&run);
    run.crash(&lab);
    assert!(!alive(daemon));
    run.wait_said_times(BACK, before + 1);
    assert!(!run.err().contains("did not come"), "{}", tail(&run.err()));
    finish(&lab, run);
}

#[test]
fn the_daemon_is_killed() {
    let Some(lab) = lab() else { return };
    // A job that dies so soon would speak against its image.
    let lab = lab.set("restart.min-uptime", "\"30s\"");
    let mut run = start(&lab, MIB);
    for times in 1..=2 {
        let daemon = crash_and_hold(&lab, &mut run);
        let restarts = lab.published().unwrap().restarts;
        kill(daemon, Signal::SIGKILL);
        run.wait_for("the job is started again", || {
            lab.published().is_some_and(|now| now.restarts > restarts && now.state == "running")
        });
        run.wait_said_times("the rest of the job's memory did not come", times);
        count_on(&lab, &mut run, 5);
        if times == 1 {
            run.wait_for("its memory is back", || lab.published().is_some_and(|now| now.loading.is_none()));
            // An image of its own for the second life: a kill speaks against the one that it died from.
            run.snapshot(&lab);
        }
    }
    run.wait_said("from now on the job's memory is brought back before it runs");
    let before = backs(&run);
    assert_eq!(lab.good().len(), lab.images().len(), "{}", tail(&run.err()));
    run.snapshot(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert_eq!(backs(&run), before, "it was lazy again");
    finish(&lab, run);
}

#[test]
fn a_snapshot_and_a_stop_wait() {
    let Some(lab) = lab() else { return };
    let mut run = start(&lab, MIB);
    let taken = |run: &Running| run.err().matches("the job stood still").count();
    let newest = || lab.good().first().copied();
    let daemon = crash_and_hold(&lab, &mut run);
    let before = (newest(), taken(&run), backs(&run));
    let received = run.err().matches("received SIGUSR1").count();
    run.signal(Signal::SIGUSR1);
    run.wait_said_times("received SIGUSR1", received + 1);
    // The job itself may have to wait for its memory: it does not count.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((newest(), taken(&run), backs(&run)), before);
    kill(daemon, Signal::SIGCONT);
    run.wait_said_times(BACK, before.2 + 1);
    run.wait_for("the image that waited", || newest() > before.0);
    // A stop, with its last image.
    let daemon = crash_and_hold(&lab, &mut run);
    let before = newest();
    run.signal(Signal::SIGTERM);
    std::thread::sleep(Duration::from_millis(300));
    assert!(run.runs());
    kill(daemon, Signal::SIGCONT);
    run.ends_with(143);
    assert!(newest() > before);
    finish(&lab, lab.python("lazy_job.py", &[lab.path().to_str().unwrap(), MIB]));
}

#[test]
fn the_supervisor_is_killed_while_memory_comes() {
    let Some(lab) = lab() else { return };
    let mut run = start(&lab, MIB);
    crash_and_hold(&lab, &mut run);
    lab.kill_9(run);
    let run = lab.python("lazy_job.py", &[lab.path().to_str().unwrap(), MIB]);
    finish(&lab, run);
}

#[test]
fn in_the_hosts_namespace_it_is_restored_as_ever() {
    let Some(lab) = lab() else { return };
    let lab = lab.set("job.pid-namespace", "\"host\"").set("restart.max-restarts", "100");
    let mut run = start(&lab, "4");
    run.crash(&lab);
    run.wait_said("restart.lazy has no effect");
    count_on(&lab, &mut run, 5);
    assert!(!run.err().contains(BACK));
    finish(&lab, run);
}

/// Not a test: prints how long a job with 1 GiB is away, with and without.
#[test]
#[ignore = "measures"]
fn measure() {
    for lazy in ["\"off\"", "\"on\"", "\"off\"", "\"on\""] {
        let Some(lab) = lab() else { return };
        let lab = lab.set("restart.lazy", lazy).set("restart.backoff", "\"0s\"").set("restart.backoff-max", "\"0s\"");
        let mut run = start(&lab, "1024");
        kill_job(&lab, &mut run);
        let (began, before) = (Instant::now(), numbers(&lab.output()).len());
        run.wait_for("the next step", || numbers(&lab.output()).len() > before);
        eprintln!("lazy = {lazy}: {:?} from the kill to the next step", began.elapsed());
        std::thread::sleep(Duration::from_secs(5));
        eprintln!("{}", run.err().lines().filter(|l| l.contains("back")).collect::<Vec<_>>().join("\n"));
        finish(&lab, run);
    }
}
