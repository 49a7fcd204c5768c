//! Memory that processes share: released for a snapshot and mapped again, or the snapshot is refused.

use std::fs;
use std::path::{Path, PathBuf};

use rekindle_store::Image;

use crate::rig::{Rig, Supervisor};

fn job(ranks: usize, args: &[&str]) -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.share(ranks, args);
    Some(rig)
}

/// Snapshots, kill -9, back from memory and from the store.
fn shares(ranks: usize) {
    let Some(rig) = job(ranks, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(ranks);
    for round in 1..=2 {
        for _ in 0..3 {
            let image = supervisor.snapshot();
            assert_eq!(image.manifest().unwrap().tree.cuda.len(), ranks);
            supervisor.assert_unharmed(ranks);
        }
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(ranks);
        assert_eq!(rig.state().unwrap().restarts, round);
    }
    supervisor.snapshot();
    supervisor.said("was stored in");
    supervisor.kill();
    rig.assert_nothing_left();
    rig.forget_memory();
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(ranks);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn two_ranks_share_memory_across_snapshots_and_deaths() {
    shares(2);
}

#[test]
fn three_ranks_share_memory_across_snapshots_and_deaths() {
    shares(3);
}

/// The driver imports nothing in a process that is moved to a GPU which CUDA_VISIBLE_DEVICES did not name.
#[test]
fn ranks_that_may_use_only_some_gpus_are_told_that_no_others_will_do() {
    let Some(mut rig) = job(2, &[]) else { return };
    rig.standin.add_nvml();
    rig.variable("CUDA_VISIBLE_DEVICES", "0");
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    supervisor.snapshot();
    let note = "CUDA_VISIBLE_DEVICES=0 names only some of this machine's 2 GPUs";
    assert_eq!(rig.log().matches(note).count(), 1, "{}", rig.log());
    supervisor.said("was stored in");
    supervisor.kill();
    drop(supervisor);
    rig.flags(&["--device-map", "0=1"]);
    let mut supervisor = rig.run();
    let why = supervisor.said("cannot restore image");
    assert!(
        why.contains("the driver cannot import memory again (error 3). So it is if a job is restored on other GPUs"),
        "{why}"
    );
    supervisor.kill();
    drop(supervisor);
    assert!(rig.images().iter().all(Image::is_good), "no image is to blame");
    rig.flags(&[]);
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(2);
    supervisor.stop();
    drop(supervisor);
    // All of them.
    let mark = rig.log().len();
    rig.variable("CUDA_VISIBLE_DEVICES", "0,1");
    rig.flags(&["--fresh"]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    assert!(!rig.log()[mark..].contains("names only some of this machine's"), "{}", rig.log());
    supervisor.stop();
}

#[test]
fn what_can_not_be_let_go_is_refused_in_words_and_the_job_goes_on() {
    let Some(mut rig) = job(2, &[]) else { return };
    rig.retry_after("5s");
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let refused = |supervisor: &mut Supervisor<'_>, words: &str| {
        let why = supervisor.failing_snapshot();
        assert!(why.contains("which cannot be restored") && why.contains(words), "{why}");
        assert!(why.contains("the job continues"), "{why}");
        supervisor.assert_unharmed(2);
    };
    supervisor.has_rank(0, "offer");
    supervisor.has_rank(1, "ipc");
    refused(&mut supervisor, "1 pieces by CUDA IPC");
    supervisor.has_rank(1, "close");
    supervisor.image();
    // Its exporter has given it up, and the others go on with it.
    supervisor.has_rank(1, "give-up");
    refused(&mut supervisor, "or to one that has released it");
    supervisor.has_rank(0, "multicast");
    refused(&mut supervisor, "NCCL_NVLS_ENABLE=0");
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(2);
    supervisor.snapshot();
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn ranks_that_share_and_let_go_all_the_time_lose_nothing() {
    let Some(rig) = job(3, &["--churn"]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(3);
    for round in 1..=20 {
        supervisor.snapshot();
        supervisor.assert_running(3);
        // Descriptors are on their way between ranks at many of these moments.
        if round % 5 == 0 {
            supervisor.kill_job();
            supervisor.said("the job was restored from image");
            supervisor.assert_unharmed(3);
        }
    }
    assert_eq!(rig.state().unwrap().restarts, 4);
    supervisor.assert_unharmed(3);
    supervisor.stop();
    rig.assert_sequence();
}

/// As NCCL's do. All threads wait for the lock of the driver's, which is not to be theirs when they are stopped.
#[test]
fn ranks_that_share_and_wait_for_a_late_one_in_collectives_are_locked_soon() {
    for (ranks, late) in [(2, "60"), (3, "0")] {
        let Some(rig) = job(ranks, &["--collective", late]) else { return };
        crate::phases::locked_soon(&rig, ranks);
    }
}

#[test]
fn files_that_ranks_sent_each_other_and_do_not_receive_hold_up_snapshots_only() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    for rank in 0..2 {
        supervisor.has_rank(rank, "post");
    }
    let why = supervisor.failing_snapshot();
    assert!(why.contains("CRIU would lose them or mix them up") && why.contains("the job continues"), "{why}");
    supervisor.assert_unharmed(2);
    for rank in 0..2 {
        supervisor.has_rank(rank, "take");
    }
    supervisor.snapshot();
    supervisor.assert_unharmed(2);
    // One direction is no trouble.
    supervisor.has_rank(1, "post");
    supervisor.snapshot();
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(2);
    supervisor.has_rank(0, "take");
    supervisor.assert_unharmed(2);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_thread_that_stands_with_a_lock_of_the_driver_is_waited_for() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    supervisor.has_rank(1, "hold");
    // The first attempt ends after 5 s, before any memory was released.
    let image = supervisor.snapshot();
    assert!(image.manifest().unwrap().tree.cuda.len() == 2);
    let log = rig.log();
    assert!(!log.contains("the snapshot failed"), "{log}");
    supervisor.assert_unharmed(2);
    supervisor.stop();
    rig.assert_sequence();
}

/// Where ranks wait for each other, the next attempt must not hold those that it has locked: it would take its 10 s.
#[test]
fn an_attempt_that_fails_after_the_lock_does_not_change_how_ranks_are_locked() {
    let Some(rig) = job(2, &["--collective", "60"]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    // Once they are at rest and let go of their memory.
    rig.standin.fault("fail-lock", "600 stopped times=1");
    let image = supervisor.snapshot();
    let manifest = image.manifest().unwrap();
    let lock = manifest.phases.iter().find(|phase| phase.phase == "lock").unwrap();
    let log = rig.log();
    assert!(log.contains("the attempt to lock failed"), "{log}");
    assert!(lock.took_us < 9_000_000, "{lock:?}\n{log}");
    supervisor.assert_unharmed(2);
    supervisor.stop();
    rig.assert_sequence();
}

fn both(rig: &Rig) -> [i32; 2] {
    let mut pids: Vec<i32> = rig.cuda_pids().into_iter().filter_map(crate::rig::inner).collect();
    pids.sort_unstable();
    pids.try_into().unwrap()
}

/// Before CRIU runs once, this file is there.
fn at_the_dump(rig: &Rig, fault: &str, text: &str) {
    let path = rig.standin.path().join(fault);
    rig.criu_fault(&format!("rm -f \"$0-fault\"; echo '{text}' > '{}'", path.display()));
}

#[test]
fn letting_go_fails_in_each_rank_and_the_job_runs_on() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let fails = |supervisor: &mut Supervisor<'_>, call: &str, pid: i32| {
        rig.standin.fault(&format!("fail-keeper-{call}"), &format!("999 times=1 pid={pid}"));
        let why = supervisor.failing_snapshot();
        let words = format!("process {pid}: the driver cannot ");
        assert!(why.contains(&words) && why.contains("(error 999)"), "{call}: {why}");
        assert!(why.contains("the job continues"), "{call}: {why}");
        supervisor.assert_unharmed(2);
    };
    // The first two calls belong to the probe: no memory has been released at that time.
    for call in ["access", "export", "unmap"] {
        for pid in both(&rig) {
            fails(&mut supervisor, call, pid);
            supervisor.image();
        }
    }
    for op in ["lock", "unlock", "checkpoint"] {
        for pid in both(&rig) {
            rig.standin.fault(&format!("fail-{op}"), &format!("304 times=1 pid={pid}"));
            let why = supervisor.failing_snapshot();
            assert!(why.contains("the job continues"), "{op}: {why}");
            supervisor.assert_unharmed(2);
            supervisor.image();
        }
    }
    // From here on there are no snapshots.
    let [_, second] = both(&rig);
    fails(&mut supervisor, "release", second);
    let why = supervisor.said("the snapshot failed");
    assert!(why.contains("the driver did not release GPU memory") && why.contains("`rekindle rewind JOB -1`"), "{why}");
    supervisor.assert_unharmed(2);
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

fn comes_back(rig: &Rig, supervisor: &mut Supervisor<'_>, restarts: u32) {
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(2);
    assert_eq!(rig.state().unwrap().restarts, restarts);
    supervisor.snapshot();
}

#[test]
fn what_can_not_be_taken_again_ends_the_life_and_the_job_comes_back() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let mut restarts = 0;
    for call in ["export", "import", "map", "access"] {
        for pid in both(&rig) {
            at_the_dump(&rig, &format!("fail-keeper-{call}"), &format!("999 times=1 pid={pid}"));
            supervisor.ask();
            let why = supervisor.said("the snapshot failed and the job cannot continue");
            assert!(why.contains(&format!("process {pid}")) && why.contains("(error 999)"), "{call}: {why}");
            restarts += 1;
            comes_back(&rig, &mut supervisor, restarts);
        }
    }
    // The same in a restart, which is tried again.
    for call in ["export", "import", "map", "access"] {
        for pid in both(&rig) {
            rig.standin.fault(&format!("fail-keeper-{call}"), &format!("999 times=1 pid={pid}"));
            supervisor.kill_job();
            let why = supervisor.said("was not restored and is not marked as bad");
            assert!(why.contains(&format!("process {pid}")) && why.contains("(error 999)"), "{call}: {why}");
            restarts += 2;
            comes_back(&rig, &mut supervisor, restarts);
        }
    }
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

/// Another file in the place of /proc/PID/maps, for all but the process itself.
struct Hidden(PathBuf);

impl Hidden {
    /// Without the interposer's table of shared memory, or with one of another version.
    fn table_of(pid: i32, copy: &Path, instead: Option<&str>) -> Hidden {
        let place = PathBuf::from(format!("/proc/{pid}/maps"));
        let name = "/memfd:rekindle-sharing-";
        let text = fs::read_to_string(&place).unwrap();
        let change = |line: &str| match (line.contains(name), instead) {
            (true, None) => String::new(),
            (true, Some(instead)) => line.replace(name, instead) + "\n",
            (false, _) => format!("{line}\n"),
        };
        fs::write(copy, text.lines().map(change).collect::<String>()).unwrap();
        let none = None::<&str>;
        nix::mount::mount(Some(copy), &place, none, nix::mount::MsFlags::MS_BIND, none).unwrap();
        Hidden(place)
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // It is gone if the process is.
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

#[test]
fn no_rank_runs_without_its_memory_because_its_table_is_not_found() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let (dumps, may) = (rig.standin.path().join("dumps"), rig.standin.path().join("may"));
    for (restarts, instead) in [(1, None), (2, Some("/memfd:rekindle-sharing-9"))] {
        let text = format!("while [ ! -e '{}' ]; do sleep 0.01; done", may.display());
        rig.criu_fault(&format!("rm -f \"$0-fault\"; : > '{}'; {text}; rm -f '{}'", dumps.display(), may.display()));
        supervisor.ask();
        supervisor.until("the job is being dumped", |_| dumps.exists());
        fs::remove_file(&dumps).unwrap();
        let copy = rig.standin.path().join("maps");
        let hidden = Hidden::table_of(*rig.cuda_pids().first().unwrap(), &copy, instead);
        fs::write(&may, "").unwrap();
        let why = supervisor.said("the snapshot failed");
        assert!(why.contains("and the job cannot continue") && why.contains("cannot use its GPU again"), "{why}");
        drop(hidden);
        comes_back(&rig, &mut supervisor, restarts);
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_rank_that_dies_at_any_step_takes_the_job_back() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let mut restarts = 0;
    // Rank 0 has given up its reference, and releases what it takes again; the other one lets go of its own.
    let [zero, one] = both(&rig);
    for (pid, before, after) in [(zero, "unlock", "keeper-release"), (one, "keeper-release", "unlock")] {
        for op in ["lock", before, "checkpoint", "restore", "keeper-access", "keeper-unmap"] {
            rig.standin.fault(&format!("die-at-{op}"), &format!("pid={pid}"));
            supervisor.ask();
            restarts += 1;
            comes_back(&rig, &mut supervisor, restarts);
        }
        for op in ["keeper-export", "keeper-import", "keeper-map", after] {
            at_the_dump(&rig, &format!("die-at-{op}"), &format!("pid={pid}"));
            supervisor.ask();
            restarts += 1;
            comes_back(&rig, &mut supervisor, restarts);
        }
    }
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn children_and_a_want_of_descriptors_do_no_harm() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    for _ in 0..3 {
        let answer = supervisor.has_rank(1, "fork");
        assert_eq!(answer, "1 fork: child ended with 0\n");
        supervisor.snapshot();
        supervisor.assert_unharmed(2);
    }
    supervisor.has_rank(1, "crowd");
    let why = supervisor.failing_snapshot();
    assert!(
        why.contains("cannot release GPU memory that is shared or stays on the GPU now")
            && why.contains("the job continues"),
        "{why}"
    );
    supervisor.assert_unharmed(2);
    supervisor.has_rank(1, "room");
    supervisor.image();
    supervisor.assert_unharmed(2);
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.stop();
    rig.assert_sequence();
}
