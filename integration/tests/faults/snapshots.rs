//! Cases without a fault: snapshots on an interval, kills, trees of processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::rig::{Rig, Supervisor};

const PHASES: [&str; 10] =
    ["preflight", "find", "prepare", "lock", "checkpoint", "dump", "restore", "unlock", "check", "publish"];

#[test]
fn a_cuda_job_is_snapshotted_on_the_interval_and_comes_back() {
    let Some(mut rig) = Rig::new() else { return };
    rig.set("SNAPSHOT_INTERVAL", "300ms");
    let mut supervisor = rig.start();
    supervisor.image_from_now();
    for restarts in 1..=3 {
        // The next ones, even if this test is late: older ones may be gone.
        supervisor.goes_to_the_end();
        supervisor.image();
        let image = supervisor.image();
        let manifest = image.manifest().unwrap();
        assert_eq!((manifest.tree.job, manifest.tree.cuda.as_slice()), (1001, [1001].as_slice()));
        let phases: Vec<&str> = manifest.phases.iter().map(|phase| phase.phase.as_str()).collect();
        // The phase of publishing ends after the manifest is written.
        assert_eq!(phases, PHASES[..9], "{manifest:?}");
        assert!(manifest.freeze_us > 0);
        assert_eq!(manifest.driver, None, "there is no NVML here");
        let lock = &manifest.phases[3];
        let unlock = &manifest.phases[7];
        assert_eq!(manifest.freeze_us, unlock.started_us + unlock.took_us - lock.started_us);
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.counts();
        supervisor.assert_unharmed(1);
        assert_eq!(rig.state().unwrap().restarts, restarts);
    }
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
    assert!(rig.images().len() <= 3, "store.keep-last");
    assert_eq!(rig.drafts(), Vec::<String>::new());
}

/// A thread is stopped with a lock that the driver's thread waits for: it is let run until it has given it back.
#[test]
fn a_thread_that_is_stopped_with_a_lock_that_the_driver_wants_does_not_hold_the_job_up() {
    let Some(mut rig) = Rig::new() else { return };
    rig.job(&["--occupy-ms", "5"]);
    let mut supervisor = rig.start();
    // How often a thread has the lock at that moment depends on the machine.
    let is_met = |rig: &Rig| rig.log().contains("the driver's thread waits for a stopped one");
    for attempt in 0.. {
        assert!(attempt < 30, "none was met with the lock");
        let image = supervisor.snapshot();
        let freeze = Duration::from_micros(image.manifest().unwrap().freeze_us);
        // An attempt to lock may take 10 s.
        assert!(freeze < Duration::from_secs(9), "the job was frozen for {freeze:?}");
        supervisor.assert_unharmed(1);
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.counts();
        if is_met(supervisor.rig) {
            break;
        }
    }
    supervisor.stop();
    rig.assert_sequence();
}

fn inner_pids(rig: &Rig) -> Vec<i32> {
    let mut pids: Vec<i32> = rig.cuda_pids().into_iter().filter_map(crate::rig::inner).collect();
    pids.sort_unstable();
    pids
}

/// Rank 1 begins to use CUDA when the others have been found and are being locked. With a place in memory it would wait.
fn tree_that_grows(rig: &Rig, supervisor: &mut Supervisor<'_>, ranks: usize, late: &Path) {
    supervisor.until("all but one rank use CUDA", |rig| rig.cuda_pids().len() == ranks - 1);
    rig.standin.fault("fail-lock", "hold pid=1001");
    supervisor.ask();
    supervisor.until("the lock is held up", |rig| rig.standin.path().join("fail-lock.held").exists());
    fs::write(late, "").unwrap();
    supervisor.until("the last rank uses CUDA, too", |rig| rig.cuda_pids().len() == ranks);
    rig.clear("fail-lock");
    let image = supervisor.image();
    let mut cuda = image.manifest().unwrap().tree.cuda.clone();
    cuda.sort_unstable();
    assert_eq!(cuda.len(), ranks, "the one that began late is in it");
    assert_eq!(cuda, inner_pids(rig));
    supervisor.assert_unharmed(ranks);
    supervisor.ranks_count(ranks);
    supervisor.snapshot();
    for _ in 0..2 {
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(ranks);
    }
}

#[test]
fn two_cuda_processes_one_of_which_begins_late() {
    let Some(mut rig) = Rig::new() else { return };
    let late = rig.path().join("late");
    rig.ranks(2, &["--late", late.to_str().unwrap()]);
    rig.set("SNAPSHOT_STAGING", "store");
    let mut supervisor = rig.start();
    tree_that_grows(&rig, &mut supervisor, 2, &late);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn four_cuda_processes_one_of_which_begins_late() {
    let Some(mut rig) = Rig::new() else { return };
    let late = rig.path().join("late");
    rig.ranks(4, &["--late", late.to_str().unwrap()]);
    rig.set("SNAPSHOT_STAGING", "store");
    let mut supervisor = rig.start();
    tree_that_grows(&rig, &mut supervisor, 4, &late);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

/// A rank ends while `hold` holds up the snapshot.
fn rank_that_leaves(hold: &str, holder: usize) {
    let Some(mut rig) = Rig::new() else { return };
    let leave = rig.path().join("leave");
    rig.ranks(4, &["--leave", leave.to_str().unwrap()]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(4);
    let pids = inner_pids(&rig);
    rig.standin.fault(hold, &format!("hold pid={}", pids[holder]));
    supervisor.ask();
    supervisor.until("the snapshot is held up", |rig| rig.standin.path().join(hold).with_extension("held").exists());
    fs::write(&leave, "").unwrap();
    supervisor.until("the rank has left", |rig| rig.cuda_pids().len() == 3);
    rig.clear(hold);
    let image = supervisor.image();
    let cuda = &image.manifest().unwrap().tree.cuda;
    assert!(cuda.len() == 3 && !cuda.contains(&pids[2]), "{cuda:?} of {pids:?}");
    assert!(!rig.log().contains("the snapshot failed"), "an end is no failure");
    supervisor.assert_running(3);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_running(3);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn one_of_many_ranks_that_fails_sets_all_going() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(4, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(4);
    supervisor.snapshot();
    // The others have done it when the last fails.
    let last = inner_pids(&rig).pop().unwrap();
    rig.standin.fault("fail-checkpoint", &format!("2 delay=300 pid={last}"));
    let why = supervisor.failing_snapshot();
    assert!(why.contains("checkpoint: ") && why.contains("the job continues"), "{why}");
    rig.clear("fail-checkpoint");
    supervisor.assert_unharmed(4);
    supervisor.image();
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(4);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn a_rank_ends_between_the_look_and_the_lock() {
    // The look goes by pid: it has found the one that leaves when it waits for the last.
    rank_that_leaves("fail-state", 3);
}

#[test]
fn a_rank_ends_while_it_is_locked() {
    rank_that_leaves("fail-lock", 0);
}

#[test]
fn a_kernel_that_is_longer_than_the_lock_timeout_refuses_the_snapshot() {
    let Some(mut rig) = Rig::new() else { return };
    // So long that no delay of ours reaches the pause after it.
    rig.job(&["--busy-ms", "8000"]);
    rig.set("LOCK_TIMEOUT", "20ms");
    let mut supervisor = rig.start();
    // It has just written; now it is in the next kernel.
    std::thread::sleep(Duration::from_millis(100));
    let why = supervisor.failing_snapshot();
    assert!(why.contains("lock: ") && why.contains("did not pause in time"), "{why}");
    supervisor.assert_unharmed(1);
    supervisor.signal(nix::sys::signal::Signal::SIGINT);
    // While the lock of the last snapshot is tried again and again.
    supervisor.said("received SIGINT");
    std::thread::sleep(Duration::from_millis(2100));
    supervisor.signal(nix::sys::signal::Signal::SIGINT);
    assert_eq!(supervisor.wait(), Some(130));
    rig.assert_nothing_left();
}

#[test]
fn a_pause_between_kernels_that_are_longer_than_the_lock_timeout_is_met() {
    let Some(mut rig) = Rig::new() else { return };
    rig.job(&["--busy-ms", "2000", "--sleep-ms", "1500"]);
    rig.set("LOCK_TIMEOUT", "50ms");
    rig.retry_after("10m");
    let mut supervisor = rig.start();
    for _ in 0..2 {
        // It has just written, and pauses; then it is in the next kernel.
        supervisor.assert_unharmed(1);
        std::thread::sleep(Duration::from_millis(1900));
        supervisor.snapshot();
    }
    assert!(rig.log().contains("the GPUs of the job are busy"), "{}", rig.log());
    assert!(!rig.log().contains("the snapshot failed"), "{}", rig.log());
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_restore_goes_on_without_a_process_that_was_about_to_end() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(3, &["--leave", rig.path().join("leave").to_str().unwrap()]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(3);
    supervisor.snapshot();
    let pids = inner_pids(&rig);
    rig.standin.fault("exit-at-restore", &format!("pid={}", pids[1]));
    supervisor.kill_job();
    supervisor.said(&format!("process {} of the image ended as soon as it was restored", pids[1]));
    supervisor.said("the job was restored from image");
    supervisor.assert_running(2);
    assert_eq!(rig.state().unwrap().restarts, 1);
    supervisor.image_from_now();
    // One that is killed there did not end by itself.
    rig.standin.fault("die-at-restore", &format!("pid={}", pids[2]));
    supervisor.kill_job();
    supervisor.said("cannot restore image");
    supervisor.said("the job was restored from image");
    supervisor.assert_running(2);
    supervisor.stop();
    rig.assert_store_is_whole();
}

#[test]
fn a_snapshot_whose_criu_is_killed_is_tried_again_at_once() {
    let Some(mut rig) = Rig::new() else { return };
    rig.retry_after("10m");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.criu_fault("rm -f \"$0-fault\"; kill -9 $$");
    supervisor.snapshot();
    // Each time of an attempt: it fails, and there is another one.
    let three =
        "echo >> \"$0-kills\"; [ $(wc -l < \"$0-kills\") -lt 3 ] || rm -f \"$0-fault\" \"$0-kills\"; kill -9 $$";
    rig.criu_fault(three);
    let why = supervisor.failing_snapshot();
    assert!(why.contains("CRIU was killed (signal SIGKILL)"), "{why}");
    supervisor.image();
    // The last one of a stop has its second try too.
    rig.criu_fault(three);
    supervisor.stop();
    let reason = rig.images()[0].manifest().unwrap().reason;
    assert_eq!(reason, rekindle_store::manifest::Reason::Final, "the stop has its image");
    rig.assert_store_is_whole();
}

/// They stop themselves when their child is stopped, and a shell with job control goes on without it.
#[test]
fn programs_above_the_job_do_not_notice_that_it_is_stopped() {
    for words in [&["runuser", "-u", "root", "--"][..], &["bash", "-c", "set -m; \"$@\"; exit $?", "bash"]] {
        let Some(mut rig) = Rig::new() else { return };
        let finish = rig.path().join("finish");
        rig.job(&["--finish", finish.to_str().unwrap()]);
        rig.below(words);
        let mut supervisor = rig.start();
        supervisor.snapshot();
        supervisor.assert_unharmed(1);
        let image = supervisor.image_from_now();
        assert_eq!(image.manifest().unwrap().tree.stopped, [0; 0]);
        supervisor.assert_unharmed(1);
        let pid = rig.cuda_pids()[0];
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
        fs::write(finish, "").unwrap();
        assert_eq!(supervisor.wait(), Some(0), "{words:?}");
        rig.assert_sequence();
    }
}
