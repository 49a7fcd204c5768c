//! A process of the job dies, and its launcher would hear of it much later.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rekindle::telemetry::events::{self, What};
use rekindle_base::cause::Cause;
use rekindle_os::exits::Events;

use crate::rig::{Calls, Rig, Supervisor, inner};

/// From the kill until the job was restored: far less than until the launcher hears of it ([`LATE`]).
const AT_ONCE: Duration = Duration::from_secs(60);
/// The launcher hears of a death after so many seconds.
const LATE: [&str; 2] = ["--notice", "120"];
/// In this time nothing happens.
const NOTHING: Duration = Duration::from_millis(1500);

fn job(children: usize, args: &[&str]) -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.launcher(children, &[&LATE[..], args].concat());
    Some(rig)
}

fn start(rig: &Rig, children: usize) -> Supervisor<'_> {
    let mut supervisor = rig.start();
    supervisor.ranks_count(children);
    supervisor
}

/// The children of the launcher, by their number in the job: as we see each.
fn children(rig: &Rig) -> Vec<i32> {
    let launcher = rig.job_pids().into_iter().find(|pid| inner(*pid) == Some(1001)).unwrap();
    let mut children = rekindle_os::process::children(launcher);
    children.sort_by_key(|pid| inner(*pid));
    children
}

fn ends(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// The processes whose NCCL operations were called off, as the job sees them.
fn called_off(aborts: &Path) -> BTreeSet<i32> {
    fs::read_to_string(aborts).unwrap().lines().map(|pid| pid.parse().unwrap()).collect()
}

/// Waits until a process has the memory that makes its end slow.
fn has_a_gib(pid: i32) {
    let begun = Instant::now();
    while rekindle_os::process::memory(pid).anonymous < 1 << 30 {
        assert!(begun.elapsed() < AT_ONCE);
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn restarts(rig: &Rig) -> u32 {
    rig.state().unwrap().restarts
}

/// The deaths in the journal: pid, signal, action.
fn told(rig: &Rig) -> Vec<(i32, i32, String)> {
    let events = events::read(&rig.folder().log_dir()).unwrap();
    let death = |what| match what {
        What::ProcessDied { pid, signal, action, .. } => Some((pid, signal, action)),
        _ => None,
    };
    events.into_iter().filter_map(|event| death(event.what)).collect()
}

fn causes(rig: &Rig) -> Vec<Cause> {
    let events = events::read(&rig.folder().log_dir()).unwrap();
    let cause = |what| match what {
        What::Ended { cause, .. } => cause,
        _ => None,
    };
    events.into_iter().filter_map(|event| cause(event.what)).collect()
}

/// Kills a child; the job is restored from its image at once, and unharmed.
fn comes_back(rig: &Rig, supervisor: &mut Supervisor<'_>, child: usize, signal: Signal) -> i32 {
    let pid = children(rig)[child];
    let as_inside = inner(pid).unwrap();
    ends(pid, signal);
    let killed = Instant::now();
    supervisor.said("the job was restored from image");
    assert!(killed.elapsed() < AT_ONCE, "{:?}", killed.elapsed());
    supervisor.counts();
    is_watched(supervisor);
    rig.assert_sequence();
    as_inside
}

/// The restored processes are watched a moment after they run.
fn is_watched(supervisor: &mut Supervisor<'_>) {
    supervisor.until("it runs", |rig| rig.state().is_some_and(|now| now.state.as_str() == "running"));
    std::thread::sleep(Duration::from_millis(100));
}

#[test]
fn a_rank_that_is_killed_takes_the_job_back_at_once() {
    for args in [&[][..], &["--reap"]] {
        let Some(rig) = job(2, args) else { return };
        let mut supervisor = start(&rig, 2);
        supervisor.snapshot();
        let first = comes_back(&rig, &mut supervisor, 1, Signal::SIGKILL);
        supervisor.assert_running(2);
        // The restored processes are watched as well.
        let second = comes_back(&rig, &mut supervisor, 0, Signal::SIGSEGV);
        assert_eq!(restarts(&rig), 2);
        let back = |pid, signal: Signal| (pid, signal as i32, "restart".to_owned());
        assert_eq!(told(&rig), [back(first, Signal::SIGKILL), back(second, Signal::SIGSEGV)]);
        let died = |pid, signal| Cause::ProcessDied { pid, name: "python3".into(), signal };
        assert_eq!(causes(&rig), [died(first, 9), died(second, 11)]);
        supervisor.stop();
        rig.assert_store_is_whole();
    }
}

#[test]
fn a_rank_that_dies_in_a_snapshot_takes_the_job_back_too() {
    let Some(rig) = job(2, &["--reap"]) else { return };
    let mut supervisor = start(&rig, 2);
    let good = supervisor.snapshot().id;
    supervisor.said("was stored in");
    let (held, go) = (rig.path().join("criu.held"), rig.path().join("criu.go"));
    let wait = format!("while [ ! -e '{}' ]; do sleep 0.01; done", go.display());
    rig.criu_fault(&format!("rm -f \"$0-fault\"; touch \"$0.held\"; {wait}"));
    supervisor.ask();
    supervisor.until("CRIU is slow", |_| held.exists());
    ends(children(&rig)[1], Signal::SIGKILL);
    std::thread::sleep(NOTHING);
    fs::write(go, "").unwrap();
    let line = supervisor.said("the job was restored from image");
    assert!(line.contains(&good.to_string()), "no image of a job without the rank: {line}");
    supervisor.assert_unharmed(2);
    supervisor.stop();
}

#[test]
fn a_rank_that_dies_after_the_dump_is_in_the_image() {
    let Some(rig) = job(2, &["--reap"]) else { return };
    let mut supervisor = start(&rig, 2);
    // Nobody watched it before the first image.
    for op in ["restore", "unlock"] {
        let rank = inner(children(&rig)[1]).unwrap();
        rig.standin.fault(&format!("die-at-{op}"), &format!("pid={rank}"));
        let image = supervisor.snapshot().id;
        let died = Instant::now();
        let line = supervisor.said("the job was restored from image");
        assert!(line.contains(&image.to_string()), "{op}: {line}");
        assert!(died.elapsed() < AT_ONCE, "{op}: {}", rig.log());
        supervisor.assert_unharmed(2);
    }
    assert!(!rig.log().contains("the snapshot failed"), "{}", rig.log());
    supervisor.stop();
    rig.assert_store_is_whole();
}

#[test]
fn a_process_that_was_asked_to_end_is_the_jobs_own() {
    let Some(rig) = job(3, &[]) else { return };
    let mut supervisor = start(&rig, 3);
    supervisor.snapshot();
    for (child, signal) in [(1, Signal::SIGTERM), (2, Signal::SIGINT)] {
        let pid = children(&rig)[child];
        ends(pid, signal);
    }
    std::thread::sleep(NOTHING);
    assert_eq!((restarts(&rig), told(&rig)), (0, vec![]));
    supervisor.kill();
}

#[test]
fn without_an_image_a_death_is_left_to_the_job() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = start(&rig, 2);
    ends(children(&rig)[1], Signal::SIGKILL);
    std::thread::sleep(NOTHING);
    assert_eq!(restarts(&rig), 0);
    supervisor.kill();
}

#[test]
fn the_death_of_a_process_without_cuda_is_left_to_the_job() {
    let Some(rig) = job(2, &["--plain"]) else { return };
    let mut supervisor = start(&rig, 2);
    supervisor.snapshot();
    ends(children(&rig)[1], Signal::SIGKILL);
    std::thread::sleep(NOTHING);
    assert_eq!((restarts(&rig), told(&rig)), (0, vec![]));
    supervisor.kill();
}

#[test]
fn with_root_the_launcher_decides() {
    let Some(mut rig) = job(2, &["--notice", "3"]) else { return };
    rig.set("RESTART_ON_PROCESS_DEATH", "root");
    let mut supervisor = start(&rig, 2);
    supervisor.snapshot();
    ends(children(&rig)[1], Signal::SIGKILL);
    supervisor.said("the job ended: exit code 6");
    let first = supervisor.said("shortly before that, process ");
    assert!(first.contains("was killed by signal SIGKILL"), "{first}");
    supervisor.said("the job was restored from image");
    assert_eq!(told(&rig), []);
    supervisor.stop();
}

#[test]
fn with_any_every_process_counts_also_one_that_is_new() {
    let Some(mut rig) = Rig::new() else { return };
    let more = rig.path().join("more");
    rig.launcher(2, &[&LATE[..], &["--plain", "--more", more.to_str().unwrap()]].concat());
    rig.set("RESTART_ON_PROCESS_DEATH", "any");
    let mut supervisor = start(&rig, 2);
    supervisor.snapshot();
    comes_back(&rig, &mut supervisor, 1, Signal::SIGKILL);
    comes_back(&rig, &mut supervisor, 0, Signal::SIGABRT);
    assert_eq!(restarts(&rig), 2);
    if rekindle_os::exits::Events::listen().is_ok() {
        std::fs::write(&more, "").unwrap();
        supervisor.until("there is another child", |rig| children(rig).len() == 3);
        std::fs::remove_file(&more).unwrap();
        let third = children(&rig)[2];
        ends(third, Signal::SIGKILL);
        supervisor.said("the job was restored from image");
        assert_eq!(children(&rig).len(), 2);
    }
    supervisor.stop();
}

#[test]
fn a_process_that_dies_again_is_left_to_the_job() {
    let Some(rig) = job(2, &["--reap"]) else { return };
    let mut supervisor = start(&rig, 2);
    supervisor.snapshot();
    let pid = comes_back(&rig, &mut supervisor, 1, Signal::SIGKILL);
    ends(children(&rig)[1], Signal::SIGKILL);
    let line = supervisor.said("rekindle leaves that to the job");
    assert!(line.contains(&format!("process {pid} ")) && line.contains("restart.on-process-death"), "{line}");
    std::thread::sleep(NOTHING);
    assert_eq!(restarts(&rig), 1);
    // Another one does take it back.
    comes_back(&rig, &mut supervisor, 0, Signal::SIGKILL);
    supervisor.assert_running(2);
    // And so does this one once there is a new image.
    supervisor.snapshot();
    comes_back(&rig, &mut supervisor, 1, Signal::SIGKILL);
    assert_eq!(restarts(&rig), 3);
    supervisor.stop();
}

/// Its parent waits for it at once. The processes were looked for when the supervisor had heard that the job runs: this one
/// was gone by then.
#[test]
fn a_process_that_dies_as_soon_as_it_is_restored_takes_the_job_back_too() {
    // On a busy machine it can die before CRIU has finished, whose restore then fails.
    for _ in 0..5 {
        let Some(mut rig) = Rig::new() else { return };
        let fatal = rig.fatal();
        rig.launcher(1, &["--plain", "--reap", "--fatal", &fatal.display().to_string()]);
        rig.set("RESTART_ON_PROCESS_DEATH", "any");
        let mut supervisor = start(&rig, 1);
        supervisor.snapshot();
        let [.., victim] = children(&rig)[..] else { panic!("it has children") };
        let as_inside = inner(victim).unwrap();
        // The one that is there must not see the file, the restored one sees it at once.
        ends(victim, Signal::SIGSTOP);
        fs::write(&fatal, "").unwrap();
        let launcher = rekindle_os::process::parent(victim).unwrap();
        ends(launcher, Signal::SIGKILL);
        supervisor.said("the job was restored from image");
        if rig.log().contains("cannot restore image") {
            continue;
        }
        supervisor.said("the job was restored from image");
        supervisor.counts();
        assert_eq!(told(&rig), [(as_inside, Signal::SIGKILL as i32, "restart".to_owned())]);
        assert_eq!((restarts(&rig), children(&rig).len()), (2, 2));
        supervisor.stop();
        return;
    }
    panic!("it always died before it was restored");
}

/// A shell that waits for its child ends with it: its exit code is what counts.
#[test]
fn a_job_that_ends_with_its_process_ends_as_before() {
    let Some(mut rig) = job(2, &["--at-once"]) else { return };
    rig.set("RESTART_MAX_RESTARTS", "0");
    // A busy machine may let the shell wait.
    rig.variable("REKINDLE_TEST_MOMENT", "20");
    let mut supervisor = start(&rig, 2);
    supervisor.snapshot();
    ends(children(&rig)[1], Signal::SIGKILL);
    assert_eq!(supervisor.wait(), Some(6));
    assert_eq!(told(&rig), []);
}

/// A line in the kernel's log, as the driver writes it. False where it cannot be written.
fn driver_says(xid: u32, pid: i32, name: &str) -> bool {
    let line =
        format!("rekindle test: NVRM: Xid (PCI:0000:eb:00): {xid}, pid={pid}, name={name}, channel 0x00000008\n");
    let log = std::fs::OpenOptions::new().write(true).open("/dev/kmsg");
    log.and_then(|mut log| std::io::Write::write_all(&mut log, line.as_bytes())).is_ok()
}

#[test]
fn faults_that_follow_a_death_and_those_of_others_are_no_cause() {
    let Some(rig) = job(2, &["--reap"]) else { return };
    let mut supervisor = start(&rig, 2);
    supervisor.snapshot();
    let told = driver_says(31, std::process::id().cast_signed(), "faults");
    if !rekindle_testing::require("kmsg", told, "the kernel's log cannot be written") {
        return;
    }
    let (victim, peer) = (children(&rig)[1], children(&rig)[0]);
    let pid = inner(victim).unwrap();
    ends(victim, Signal::SIGKILL);
    std::thread::sleep(Duration::from_millis(50));
    driver_says(109, peer, "rank");
    supervisor.said("the job was restored from image");
    assert_eq!(causes(&rig), [Cause::ProcessDied { pid, name: "python3".into(), signal: 9 }]);
    // One that comes before the death is what the process died of.
    supervisor.snapshot();
    let victim = children(&rig)[0];
    driver_says(31, victim, "rank");
    // A line counts from when it was read, which is a little later.
    std::thread::sleep(Duration::from_secs(8));
    ends(victim, Signal::SIGABRT);
    supervisor.said("the job was restored from image");
    assert_eq!(causes(&rig)[1], Cause::GpuFault { xid: 31 });
    supervisor.stop();
}

/// A dead process occupies the GPU, so the driver ends processes of the next two lives.
#[test]
fn lives_that_an_occupied_gpu_ends_do_not_count_against_the_image() {
    let Some(mut rig) = job(3, &["--reap"]) else { return };
    // All lives here are short ones.
    rig.set("RESTART_MIN_UPTIME", "60s");
    let mut supervisor = start(&rig, 3);
    supervisor.snapshot();
    let told = driver_says(31, std::process::id().cast_signed(), "faults");
    if !rekindle_testing::require("kmsg", told, "the kernel's log cannot be written") {
        return;
    }
    ends(children(&rig)[2], Signal::SIGKILL);
    for n in 0..2 {
        supervisor.said("the job was restored from image");
        is_watched(&mut supervisor);
        let victim = children(&rig)[n];
        driver_says(109, victim, "rank");
        // A line counts from when it was read, which is a little later.
        std::thread::sleep(Duration::from_secs(1));
        ends(victim, Signal::SIGSEGV);
        supervisor.said("Neither the GPU nor an image is to blame");
    }
    supervisor.said("off the GPUs");
    supervisor.said("continuing from image");
    let asked = Instant::now();
    supervisor.said("the job was restored from image");
    assert!(asked.elapsed() < Duration::from_secs(25), "it waited for the whole pause");
    let causes = causes(&rig);
    assert!(causes.iter().all(|cause| matches!(cause, Cause::ProcessDied { .. })), "{causes:?}");
    assert_eq!(causes.len(), 3);
    supervisor.stop();
}

/// The driver waits for the kernels of a process that it has restored, when that is killed. So those that wait for a dead
/// rank are ended first, and the program sees nothing of it.
#[test]
fn what_waits_for_a_dead_rank_is_called_off_before_the_others_are_killed() {
    let Some(mut rig) = Rig::new() else { return };
    let aborts = rig.path().join("aborts");
    // Rank 0, their launcher, would end with the first of them.
    rig.nccl(4, "split", Calls::BySymbol, &["--survive"]);
    rig.variable("STANDIN_NCCL_ABORTS", aborts.to_str().unwrap());
    rig.variable("REKINDLE_TEST_CALL_OFF", "10");
    rig.variable("REKINDLE_TEST_DRIVER", "580.159.04");
    let mut supervisor = start(&rig, 4);
    supervisor.snapshot();
    let ranks: Vec<i32> = rig.job_pids().into_iter().filter(|pid| inner(*pid).is_some_and(|pid| pid > 1000)).collect();
    let victim = *ranks.last().unwrap();
    let others: BTreeSet<i32> = ranks.iter().filter(|pid| **pid != victim).filter_map(|pid| inner(*pid)).collect();
    ends(victim, Signal::SIGKILL);
    supervisor.said("aborted the NCCL operations");
    supervisor.said("the job was restored from image");
    assert_eq!(called_off(&aborts), others);
    supervisor.assert_unharmed(4);
    supervisor.snapshot();
    // A stop is a kill, too.
    supervisor.stop();
    rig.assert_sequence();
    assert!(!rig.log().contains(" instead of "), "{}", rig.log());
}

fn has_events() -> bool {
    let found = Events::listen();
    let why = format!("there are no process events here: {found:?}");
    rekindle_testing::needs("events", found.ok(), &why).is_some()
}

/// A launcher that kills the other ranks as soon as it hears of a death would be faster than rekindle. It is stopped while
/// a rank dies, so the others are called off first.
#[test]
fn a_launcher_that_kills_the_others_at_once_is_stopped_while_a_rank_dies() {
    let Some(mut rig) = Rig::new().filter(|_| has_events()) else { return };
    let (aborts, heavy) = (rig.path().join("aborts"), rig.path().join("heavy"));
    rig.nccl(3, "split", Calls::BySymbol, &["--launch", "--heavy", heavy.to_str().unwrap()]);
    rig.variable("STANDIN_NCCL_ABORTS", aborts.to_str().unwrap());
    rig.variable("REKINDLE_TEST_CALL_OFF", "10");
    rig.variable("REKINDLE_TEST_DRIVER", "580.159.04");
    let mut supervisor = start(&rig, 3);
    supervisor.snapshot();
    let mut attempts = 1;
    let (pid, others) = loop {
        // As with a GPU, its end takes a while.
        fs::write(&heavy, "").unwrap();
        let victim = children(&rig)[2];
        has_a_gib(victim);
        fs::remove_file(&heavy).unwrap();
        let others: BTreeSet<i32> = children(&rig)[..2].iter().filter_map(|pid| inner(*pid)).collect();
        let pid = inner(victim).unwrap();
        ends(victim, Signal::SIGKILL);
        // On a machine with much else to do it may be over before it is noticed, and the job too.
        let noticed = supervisor.said_one_of(&["its launchers are stopped", "the job ended"]);
        if noticed.contains("launchers=[") && !noticed.contains("launchers=[]") {
            break (pid, others);
        }
        assert!(attempts < 12, "{}", rig.log());
        attempts += 1;
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(3);
        let _ = fs::remove_file(&aborts);
    };
    supervisor.said("aborted the NCCL operations");
    supervisor.said("the job was restored from image");
    assert_eq!(called_off(&aborts), others);
    assert_eq!(causes(&rig).last(), Some(&Cause::ProcessDied { pid, name: "python3".into(), signal: 9 }));
    supervisor.assert_unharmed(3);
    supervisor.snapshot();
    supervisor.stop();
    rig.assert_sequence();
}

/// What is above a rank without a parent in the job is rekindle, and above that whoever started it.
#[test]
fn nobody_outside_the_job_is_stopped_while_a_rank_dies() {
    let Some(mut rig) = Rig::new().filter(|_| has_events()) else { return };
    let heavy = rig.path().join("heavy");
    rig.nccl(2, "split", Calls::BySymbol, &["--orphans", "--heavy", heavy.to_str().unwrap()]);
    rig.variable("REKINDLE_TEST_DRIVER", "580.159.04");
    let mut supervisor = start(&rig, 2);
    let mut attempts = 0;
    // On a machine with much else to do it may be over before it is noticed.
    while !rig.log().contains("launchers=[") {
        assert!(attempts < 12, "{}", rig.log());
        attempts += 1;
        supervisor.snapshot();
        fs::write(&heavy, "").unwrap();
        let victim = rig.job_pids().into_iter().max_by_key(|pid| inner(*pid)).unwrap();
        has_a_gib(victim);
        fs::remove_file(&heavy).unwrap();
        ends(victim, Signal::SIGKILL);
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(2);
    }
    let log = rig.log();
    assert_eq!(log.matches("launchers=[").count(), log.matches("launchers=[]").count(), "{log}");
    supervisor.stop();
    rig.assert_sequence();
}
