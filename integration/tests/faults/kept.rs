//! Memory that stays on the GPU while the job is checkpointed.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rekindle_os::process;
use rekindle_store::{Image, Place};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use crate::rig::{Rig, Supervisor, inner};

const MIB: u64 = 1 << 20;

fn job(args: &[&str]) -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.kept(args);
    Some(rig)
}

/// Bytes of an image that stayed on the GPU, and those that the driver copied.
fn bytes(image: &Image) -> (u64, u64) {
    let manifest = image.manifest().unwrap();
    let kept = manifest.kept.iter().flat_map(|kept| &kept.pieces).map(|piece| piece.bytes).sum();
    (kept, manifest.landing.iter().map(|landing| landing.bytes).sum())
}

#[test]
fn memory_that_stays_is_what_it_was_after_snapshots_deaths_and_from_the_store() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    for round in 1..=2 {
        for _ in 0..3 {
            let image = supervisor.snapshot();
            // 33 MiB take 34. The driver has the small one, too small for a landing file.
            assert_eq!(bytes(&image), (70 * MIB, 0));
            supervisor.assert_unharmed(1);
        }
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
        assert_eq!(rig.state().unwrap().restarts, round);
    }
    let image = supervisor.snapshot();
    supervisor.said("was stored in");
    let (code, said) = rig.ask(&["show", &format!("j/{}", image.id)]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("70.0 MiB of GPU memory of process 1001 stayed on the GPU (3 allocations)"), "{said}");
    let (code, said) = rig.ask(&["verify", "j"]);
    assert_eq!(code, Some(0), "{said}");
    supervisor.kill();
    rig.assert_nothing_left();
    rig.forget_memory();
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

fn fails(supervisor: &mut Supervisor<'_>, words: &str) {
    let why = supervisor.failing_snapshot();
    assert!(why.contains(words), "not {words:?} in {why}");
    assert!(why.contains("the job continues"), "{why}");
}

/// A snapshot that fails with these words and harms nothing; then one that is retried and succeeds.
fn fails_once(rig: &Rig, supervisor: &mut Supervisor<'_>, words: &str) {
    fails(supervisor, words);
    assert_eq!(bytes(&supervisor.image()).0, 70 * MIB);
    supervisor.assert_unharmed(1);
    assert_eq!(rig.state().unwrap().restarts, 0);
}

/// What is in the newest image is what the job had.
fn comes_back(rig: &Rig, supervisor: &mut Supervisor<'_>, restarts: u32) {
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    let log = rig.log();
    let said: Vec<&str> = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
    assert_eq!(rig.state().unwrap().restarts, restarts, "restarts; {said:#?}");
    rig.assert_store_is_whole();
}

#[test]
fn a_copy_that_fails_or_whose_process_dies_costs_one_snapshot() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    for call in ["import", "map", "out"] {
        rig.standin.fault(&format!("fail-copier-{call}"), "2 times=1");
        fails_once(&rig, &mut supervisor, "the process that copies GPU memory cannot copy: ");
        rig.standin.fault(&format!("die-at-copier-{call}"), "delay=20");
        fails_once(&rig, &mut supervisor, "the process that copies GPU memory does not answer (copy)");
    }
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn without_the_process_that_copies_the_driver_copies_until_memory_has_stayed_once() {
    let Some(mut rig) = job(&[]) else { return };
    rig.retry_after("5s");
    let mut supervisor = rig.start();
    rig.standin.fault("die-at-copier-init", "");
    let image = supervisor.snapshot();
    let (kept, landed) = bytes(&image);
    assert!(kept == 0 && landed >= 70 * MIB, "{kept} {landed}");
    assert!(rig.log().contains("GPU memory cannot stay on the GPU in this snapshot: the process that copies"));
    supervisor.assert_unharmed(1);
    assert_eq!(bytes(&supervisor.snapshot()).0, 70 * MIB);
    // Now the driver cannot take it any more. The process starts again after a copy that fails.
    rig.standin.fault("fail-copier-out", "2 times=1");
    rig.standin.fault("fail-copier-init", "999");
    fails(&mut supervisor, "the process that copies GPU memory cannot copy: ");
    let why = supervisor.said("the snapshot failed");
    assert!(why.contains("since an earlier snapshot, and cannot be copied now"), "{why}");
    assert!(why.contains("the job continues"), "{why}");
    supervisor.assert_unharmed(1);
    // So it is if the GPU lets only one process use it.
    rig.clear("fail-copier-init");
    rig.standin.fault("fail-copier-context", "46 times=1");
    let why = supervisor.failing_snapshot();
    assert!(
        why.contains("(error 46): a GPU may let only one process use it: set its compute mode to DEFAULT"),
        "{why}"
    );
    supervisor.assert_unharmed(1);
    // Memory that cannot be registered is copied more slowly.
    rig.standin.fault("fail-copier-register", "999");
    assert_eq!(bytes(&supervisor.image()).0, 70 * MIB);
    supervisor.assert_unharmed(1);
    rig.clear("fail-copier-register");
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_restore_that_finds_the_gpu_full_or_cannot_copy_is_tried_again() {
    let Some(mut rig) = job(&[]) else { return };
    // It is not given up before the fault is over.
    rig.restarts_after("2s");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    let faults = [
        ("fail-keeper-create", "2", "the driver cannot allocate memory that stays on the GPU (error 2)"),
        ("fail-copier-in", "2", "the process that copies GPU memory cannot copy: "),
        ("die-at-copier-in", "delay=20", "the process that copies GPU memory does not answer"),
    ];
    for (fault, text, words) in faults {
        rig.standin.fault(fault, text);
        supervisor.kill_job();
        let why = supervisor.said("cannot restore image");
        assert!(why.contains(words), "{why}");
        rig.clear(fault);
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
        assert!(rig.images().iter().all(Image::is_good), "no image is to blame");
        supervisor.snapshot();
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_call_of_the_driver_that_fails_before_the_checkpoint_costs_one_snapshot() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    let zero = supervisor.main_pid();
    let inner = inner(zero).unwrap();
    // Each snapshot first exports and imports other memory for a try. After the first one the driver cannot copy this memory
    // any more, so that an import that fails is no reason to let it.
    let faults = [("export", 1), ("export", 0), ("import", 0), ("access", 0), ("unmap", 0)];
    for (call, skip) in faults {
        rig.standin.fault(&format!("fail-keeper-{call}"), &format!("999 times=1 skip={skip} pid={inner}"));
        fails_once(&rig, &mut supervisor, "the driver cannot ");
        if call == "export" {
            // From now on it has descriptors.
            supervisor.snapshot();
        }
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn memory_that_cannot_be_mapped_again_ends_the_life_and_is_restored_from_the_image() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    // The first import is only a try.
    for (restarts, call, skip) in [(1, "import", 1), (2, "map", 0)] {
        rig.standin.fault(&format!("fail-keeper-{call}"), &format!("2 times=1 skip={skip}"));
        supervisor.ask();
        supervisor.said("the snapshot failed and the job cannot continue");
        comes_back(&rig, &mut supervisor, restarts);
        supervisor.snapshot();
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn memory_that_the_driver_would_not_import_again_is_copied_from_then_on() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    rig.standin.fault("fail-keeper-import", "3");
    fails(&mut supervisor, "a try has shown that the driver could not import the memory again that stays on the GPU");
    for restarts in 1..=2 {
        let (kept, landed) = bytes(&supervisor.snapshot());
        assert!(kept == 0 && landed >= 70 * MIB, "{kept} {landed}");
        supervisor.assert_unharmed(1);
        supervisor.kill_job();
        comes_back(&rig, &mut supervisor, restarts);
    }
    supervisor.stop();
    rig.assert_sequence();
}

/// After a move to a GPU that CUDA_VISIBLE_DEVICES did not name the driver imports nothing.
#[test]
fn a_job_that_was_moved_to_a_gpu_that_it_could_not_use_is_copied_from_then_on() {
    let Some(mut rig) = job(&[]) else { return };
    rig.standin.add_nvml();
    rig.variable("CUDA_VISIBLE_DEVICES", "0");
    let mut supervisor = rig.start();
    assert_eq!(bytes(&supervisor.snapshot()).0, 70 * MIB);
    supervisor.said("was stored in");
    supervisor.kill();
    drop(supervisor);
    rig.flags(&["--device-map", "0=1"]);
    let mut supervisor = rig.run();
    supervisor.said("GPU memory of the job cannot stay on the GPU any more");
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    let (kept, landed) = bytes(&supervisor.snapshot());
    assert!(kept == 0 && landed >= 70 * MIB, "{kept} {landed}");
    supervisor.assert_unharmed(1);
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    drop(supervisor);
    // Once it can use all of them, the memory stays there.
    rig.variable("CUDA_VISIBLE_DEVICES", "0,1");
    rig.flags(&["--fresh"]);
    let mut supervisor = rig.start();
    assert_eq!(bytes(&supervisor.snapshot()).0, 70 * MIB);
    supervisor.stop();
}

#[test]
fn an_allocation_that_cannot_stay_goes_the_drivers_way_in_the_same_snapshot() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    for (number, call) in (1..).zip(["reserve", "create", "map", "access"]) {
        rig.standin.fault(&format!("fail-job-{call}"), "2 times=1");
        assert_eq!(supervisor.has_done("more"), "more: done\n");
        let (kept, landed) = bytes(&supervisor.snapshot());
        assert_eq!(kept, 70 * MIB, "{call}");
        assert!(landed >= number * 16 * MIB, "{call}: {landed}");
        supervisor.assert_unharmed(1);
    }
    assert_eq!(supervisor.has_done("more"), "more: done\n");
    assert_eq!(bytes(&supervisor.snapshot()).0, 86 * MIB);
    assert_eq!(supervisor.has_done("free"), "free: done\n");
    assert_eq!(bytes(&supervisor.snapshot()).0, 70 * MIB);
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_job_that_allocates_and_frees_all_the_time_loses_nothing() {
    let Some(rig) = job(&["--churn"]) else { return };
    let mut supervisor = rig.start();
    for round in 1..=12 {
        supervisor.snapshot();
        supervisor.assert_running(1);
        if round % 4 == 0 {
            supervisor.kill_job();
            supervisor.said("the job was restored from image");
            supervisor.assert_unharmed(1);
        }
    }
    assert_eq!(rig.state().unwrap().restarts, 3);
    supervisor.stop();
    rig.assert_sequence();
}

/// A free is recorded before the driver does it. If CUDA is locked in between, the process has memory that the driver
/// would not restore, and its table says nothing of it.
#[test]
fn a_snapshot_waits_until_the_last_memory_that_stays_is_freed() {
    let Some(rig) = job(&["--mib", "16"]) else { return };
    let mut supervisor = rig.start();
    assert_eq!(bytes(&supervisor.snapshot()).0, 16 * MIB);
    rig.standin.fault("fail-job-unmap", "hold");
    supervisor.begins("first");
    supervisor.until("the job unmaps it", |rig| rig.standin.path().join("fail-job-unmap.held").exists());
    supervisor.ask();
    supervisor.said("snapshot phase phase=\"prepare\"");
    // Longer than such calls are waited for. Then the lock waits for this one, and is the next that gets the gate.
    std::thread::sleep(Duration::from_secs(3));
    rig.clear("fail-job-unmap");
    assert_eq!(bytes(&supervisor.image()).0, 0);
    let log = rig.log();
    assert!(log.contains("a driver call on memory that has to be released is in progress"), "{log}");
    supervisor.assert_unharmed(1);
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_supervisor_that_is_killed_while_memory_is_copied_leaves_nothing() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    // Until the kill, however late that comes.
    rig.standin.fault("fail-copier-out", "hold");
    supervisor.ask();
    supervisor.said("released GPU memory of other processes, and what stays");
    supervisor.kill();
    // Neither the job nor the process that copies, and so none of the memory.
    rig.assert_nothing_left();
    rig.clear("fail-copier-out");
    let mut supervisor = rig.run();
    let line = supervisor.said("the job was restored from image");
    assert!(line.contains(&image.id.to_string()), "{line}");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_child_has_no_descriptor_of_it_and_a_refused_handle_is_told_once() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    // The stand-in's own three are in both.
    assert_eq!(supervisor.has_done("fork"), "fork: 6 here, 3 in the child\n");
    // The driver refuses it; the stand-in would not.
    rig.standin.fault("fail-job-ipc", "1 times=1");
    assert_eq!(supervisor.has_done("ipc"), "ipc: 1\n");
    supervisor.snapshot();
    supervisor.snapshot();
    let told = rig.log().matches("the driver refused the job a handle for CUDA IPC").count();
    assert_eq!(told, 1, "{}", rig.log());
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn memory_that_the_driver_does_not_release_ends_snapshots_until_a_rewind() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    let inner = inner(supervisor.main_pid()).unwrap();
    // The first two releases are of memory that was made for a try.
    for (skip, words) in [(0, "use memory that has to be released"), (2, "release memory")] {
        rig.standin.fault("fail-keeper-release", &format!("999 times=1 skip={skip} pid={inner}"));
        fails(&mut supervisor, &format!("the driver cannot {words} (error 999)"));
        let why = supervisor.said("the snapshot failed");
        assert!(why.contains("the driver did not release GPU memory in an earlier snapshot"), "{why}");
        assert!(
            why.contains("`rekindle rewind JOB -1` restores the job") && why.contains("the job continues"),
            "{why}"
        );
        supervisor.assert_unharmed(1);
        assert_eq!(rig.state().unwrap().restarts, 0);
        let (code, said) = rig.ask(&["rewind", "j", "-1"]);
        assert_eq!(code, Some(0), "{said}");
        supervisor.assert_unharmed(1);
        assert_eq!(bytes(&supervisor.snapshot()).0, 70 * MIB);
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn an_attempt_that_a_process_held_up_leaves_nothing_in_the_image() {
    let Some(rig) = job(&["--ranks", "2", "--mib", "16"]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    let zero = supervisor.main_pid();
    let second = rig.cuda_pids().into_iter().find(|pid| *pid != zero).and_then(inner).unwrap();
    // The first attempt ends after 5 s. The other process has handed its memory over by then. The first export is of other
    // memory, for a try.
    rig.standin.fault("fail-keeper-export", &format!("0 times=1 skip=1 delay=6000 pid={second}"));
    let image = supervisor.snapshot();
    let kept = image.manifest().unwrap().kept.as_ref().unwrap();
    assert_eq!(kept.pieces.len(), 2, "{kept:?}");
    supervisor.assert_unharmed(2);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(2);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_freeze_that_fails_waits_for_its_copy() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.standin.fault("fail-copier-out", "0 times=1 delay=1500");
    rig.standin.fault("fail-checkpoint", "304 times=1");
    let began = Instant::now();
    fails_once(&rig, &mut supervisor, "checkpoint");
    assert!(began.elapsed() >= Duration::from_millis(1500), "the next image may be in the same slot");
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn images_on_the_disk_have_it_too() {
    let Some(mut rig) = job(&[]) else { return };
    rig.set("SNAPSHOT_STAGING", "store");
    let mut supervisor = rig.start();
    // The GPU's writes to pages of a disk's file could be lost.
    let slow = "GPU memory is copied more slowly: the driver does not register all of the file registered=0";
    for restarts in 1..=3 {
        supervisor.ask();
        supervisor.said(slow);
        let image = supervisor.image();
        assert_ne!(image.place, Place::Staged);
        assert_eq!(bytes(&image).0, 70 * MIB);
        assert!(image.verify().is_sound(), "{:?}", image.verify());
        supervisor.assert_unharmed(1);
        supervisor.kill_job();
        comes_back(&rig, &mut supervisor, restarts);
    }
    supervisor.snapshot();
    supervisor.said("was stored in");
    supervisor.kill();
    rig.assert_nothing_left();
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

/// A job on a GPU that NVML shows: its images say which GPU has what.
fn job_on_a_gpu(args: &[&str]) -> Option<Rig> {
    let rig = job(args)?;
    rig.standin.add_nvml();
    rig.standin.gpus("a0 16384 0\n");
    Some(rig)
}

const AHEAD: &str = "GPU memory was filled while CRIU worked";
const NOT_AHEAD: &str = "GPU memory was not filled before its processes existed";

#[test]
fn the_process_that_copies_fills_memory_while_criu_works() {
    for (ranks, args) in [(1, &[][..]), (2, &["--ranks", "2", "--mib", "16"])] {
        let Some(rig) = job_on_a_gpu(args) else { return };
        let mut supervisor = rig.start();
        supervisor.ranks_count(ranks);
        for restarts in 1..=3 {
            // After a restore the processes have memory that they have not made.
            for _ in 0..2 {
                let image = supervisor.snapshot();
                let kept = image.manifest().unwrap().kept.as_ref().unwrap();
                assert!(kept.pieces.iter().all(|piece| piece.gpu == Some(0)), "{kept:?}");
                supervisor.assert_unharmed(ranks);
            }
            supervisor.kill_job();
            supervisor.said(AHEAD);
            supervisor.said("the job was restored from image");
            supervisor.assert_unharmed(ranks);
            assert_eq!(rig.state().unwrap().restarts, restarts);
        }
        supervisor.snapshot();
        supervisor.said("was stored in");
        supervisor.kill();
        rig.assert_nothing_left();
        // Nothing copies in a new run yet, so nothing is made before there are processes.
        let mut supervisor = rig.run();
        let mark = rig.log().len();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(ranks);
        assert!(!rig.log()[mark..].contains(AHEAD), "{}", rig.log());
        supervisor.stop();
        rig.assert_sequence();
    }
}

#[test]
fn where_the_process_that_copies_cannot_make_memory_the_job_does() {
    let Some(rig) = job_on_a_gpu(&[]) else { return };
    let mut supervisor = rig.start();
    let faults = [
        ("fail-copier-create", "2 times=1", "cuMemCreate failed"),
        ("fail-copier-map", "2 times=1", "cuMemMap failed"),
        ("fail-copier-in", "2 times=1", "the copy failed"),
        ("fail-copier-export", "999 times=1", "cuMemExportToShareableHandle failed"),
        ("die-at-copier-in", "", "does not answer"),
    ];
    for (restarts, (fault, text, words)) in (1..).zip(faults) {
        supervisor.snapshot();
        rig.standin.fault(fault, text);
        supervisor.kill_job();
        let why = supervisor.said(NOT_AHEAD);
        assert!(why.contains(words), "{why}");
        // In the same attempt.
        comes_back(&rig, &mut supervisor, restarts);
        assert!(!rig.log().contains("cannot restore image"), "{}", rig.log());
    }
    // Once it is there again, it does.
    supervisor.snapshot();
    supervisor.kill_job();
    supervisor.said(AHEAD);
    comes_back(&rig, &mut supervisor, 6);
    // Memory that a process cannot use is not made a second time.
    supervisor.snapshot();
    rig.standin.fault("fail-keeper-import", "2 times=1");
    supervisor.kill_job();
    let why = supervisor.said("cannot restore image");
    assert!(why.contains("the driver cannot import memory again"), "{why}");
    let mark = rig.log().len();
    // With the attempt that failed.
    comes_back(&rig, &mut supervisor, 8);
    assert!(rig.images().iter().all(Image::is_good), "no image is to blame");
    supervisor.snapshot();
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 9);
    assert!(!rig.log()[mark..].contains(AHEAD), "{}", rig.log());
    supervisor.stop();
    rig.assert_sequence();
}

/// The end of the job does not end a copy into its memory.
#[test]
fn a_stop_does_not_wait_until_memory_is_filled() {
    let Some(rig) = job_on_a_gpu(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.standin.fault("fail-copier-in", "0 delay=50000 times=1");
    supervisor.kill_job();
    supervisor.said("part=\"memory\"");
    // By then CRIU is done, and only the copy is waited for.
    std::thread::sleep(Duration::from_secs(2));
    let began = Instant::now();
    supervisor.stop();
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[test]
fn a_supervisor_that_is_killed_while_memory_is_filled_leaves_nothing() {
    let Some(rig) = job_on_a_gpu(&[]) else { return };
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    rig.standin.fault("fail-copier-in", "0 delay=1000");
    supervisor.kill_job();
    supervisor.said("part=\"memory\"");
    std::thread::sleep(Duration::from_millis(300));
    supervisor.kill();
    rig.assert_nothing_left();
    rig.clear("fail-copier-in");
    let mut supervisor = rig.run();
    let line = supervisor.said("the job was restored from image");
    assert!(line.contains(&image.id.to_string()), "{line}");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

/// A GPU can have more memory than the host. What stays there is written to the disk piece by piece.
#[test]
fn memory_that_has_no_room_in_the_hosts_is_written_to_the_disk() {
    let Some(mut rig) = job(&[]) else { return };
    // More than the machine has.
    rig.set("SNAPSHOT_MEMORY_RESERVE", "100TiB");
    let mut supervisor = rig.start();
    for restarts in 1..=2 {
        supervisor.ask();
        let why = supervisor.said("this image goes to a slot on the disk, and the job is frozen longer: an image of");
        assert!(why.contains("does not fit into memory"), "{why}");
        let image = supervisor.image();
        assert_eq!(image.place, Place::Slot);
        assert_eq!(bytes(&image).0, 70 * MIB);
        assert!(image.verify().is_sound(), "{:?}", image.verify());
        supervisor.assert_unharmed(1);
        supervisor.kill_job();
        comes_back(&rig, &mut supervisor, restarts);
    }
    // The driver copies only to the host's memory.
    rig.standin.fault("fail-copier-out", "2 times=1");
    rig.standin.fault("fail-copier-init", "999");
    fails(&mut supervisor, "the process that copies GPU memory cannot copy: ");
    let why = supervisor.said("the snapshot failed");
    assert!(why.contains("does not fit into the free host memory") && why.contains("the job continues"), "{why}");
    rig.clear("fail-copier-init");
    let image = supervisor.image_from_now();
    supervisor.said("was stored in");
    supervisor.kill();
    rig.assert_nothing_left();
    rig.forget_memory();
    let mut supervisor = rig.run();
    supervisor.said(&format!("the job was restored from image {}", image.id));
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn memory_that_the_program_makes_itself_goes_the_drivers_way_beside_it() {
    for args in [&["--own", "18"][..], &["--own", "18", "--churn"]] {
        let Some(rig) = job(args) else { return };
        let mut supervisor = rig.start();
        for restarts in 1..=2 {
            for _ in 0..2 {
                let (kept, landed) = bytes(&supervisor.snapshot());
                assert!(args.len() > 2 || (kept, landed) == (70 * MIB, 20 * MIB), "{kept} {landed}");
                supervisor.assert_unharmed(1);
            }
            supervisor.kill_job();
            comes_back(&rig, &mut supervisor, restarts);
        }
        supervisor.stop();
        rig.assert_sequence();
    }
}

/// A snapshot in which the job has given its memory up and is being unlocked, until `fail-unlock` is cleared.
fn is_being_unlocked(rig: &Rig, supervisor: &mut Supervisor<'_>) {
    // The first time it is unlocked to give its memory up.
    rig.standin.fault("fail-unlock", "hold skip=1");
    supervisor.ask();
    supervisor.said("phase=\"copy\"");
    supervisor.until("it is being unlocked", |rig| rig.standin.path().join("fail-unlock.held").exists());
}

#[test]
fn a_process_that_is_resumed_before_it_has_its_memory_is_lost() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    is_being_unlocked(&rig, &mut supervisor);
    kill_process(Pid::from_raw(supervisor.main_pid()).unwrap(), Signal::CONT).unwrap();
    rig.clear("fail-unlock");
    // On a busy machine it ends by itself first, because it misses its memory.
    let own_end = "the job ended: exit code 5";
    let why = supervisor.said_one_of(&["the snapshot failed and the job cannot continue", own_end]);
    assert!(why.contains("was resumed before its GPU memory was restored") || why.contains(own_end), "{why}");
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_signal_for_the_job_waits_until_its_snapshot_is_over() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    is_being_unlocked(&rig, &mut supervisor);
    // As a shell does for `fg`. It would run without its memory.
    supervisor.signal(nix::sys::signal::Signal::SIGCONT);
    // It comes meanwhile, if the supervisor has a processor.
    std::thread::sleep(Duration::from_secs(1));
    rig.clear("fail-unlock");
    assert_eq!(bytes(&supervisor.image()).0, 70 * MIB);
    supervisor.assert_unharmed(1);
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn an_image_that_does_not_name_the_thread_of_the_driver_is_not_used() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    let older = supervisor.snapshot().id;
    let newest = supervisor.snapshot().id;
    supervisor.said("was stored in");
    supervisor.kill();
    rig.assert_nothing_left();
    for image in rig.copies().into_iter().filter(|image| image.id == newest) {
        let mut manifest = image.manifest().unwrap().clone();
        manifest.tree.cuda_threads.clear();
        fs::write(image.dir.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
    }
    let mut supervisor = rig.run();
    let why = supervisor.said(&format!("image {newest} is marked as bad"));
    assert!(why.contains("the image does not say which thread of process 1001 belongs to the CUDA driver"), "{why}");
    supervisor.said(&format!("the job was restored from image {older}"));
    supervisor.assert_unharmed(1);
    assert!(!rig.log().contains("the driver's thread has waited"), "{}", rig.log());
    supervisor.stop();
}

#[test]
fn images_of_both_kinds_are_restored_with_either_setting() {
    for first in ["kept", "copied"] {
        let Some(mut rig) = job(&[]) else { return };
        rig.set("GPU_MEMORY", first);
        let mut image = {
            let mut supervisor = rig.start();
            let image = supervisor.snapshot();
            supervisor.assert_unharmed(1);
            supervisor.kill();
            rig.assert_nothing_left();
            image
        };
        for memory in ["copied", "kept", "copied", "kept"] {
            rig.set("GPU_MEMORY", memory);
            let mut supervisor = rig.run();
            supervisor.said(&format!("the job was restored from image {}", image.id));
            supervisor.assert_unharmed(1);
            // The interposer of a job that began without it makes no such allocations.
            let stays = if first == "kept" && memory == "kept" { 70 * MIB } else { 0 };
            for _ in 0..2 {
                image = supervisor.snapshot();
                let (kept, landed) = bytes(&image);
                assert!(kept == stays && (kept > 0 || landed >= 69 * MIB), "{first} {memory}: {kept} {landed}");
                supervisor.assert_unharmed(1);
            }
            supervisor.kill();
            rig.assert_nothing_left();
        }
        rig.assert_sequence();
        rig.assert_store_is_whole();
    }
}

/// The process that copies fills memory for the first restore here, and runs then: that of the second one must not be
/// memory of that process, which stays on the GPU and could not be copied.
#[test]
fn a_job_whose_memory_is_to_be_copied_from_now_on_comes_back_twice() {
    let Some(mut rig) = job_on_a_gpu(&[]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    supervisor.kill();
    rig.assert_nothing_left();
    rig.set("GPU_MEMORY", "copied");
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    assert_eq!(bytes(&supervisor.snapshot()).0, 0, "nothing stays on the GPU");
    supervisor.assert_unharmed(1);
    supervisor.stop();
}

/// Sets the soft limit of descriptors of a process; the one before.
fn limit(pid: i32, soft: u64) -> u64 {
    let limits = process::text(pid, "limits").unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let [before, hard] = [0, 1].map(|at| line.split_whitespace().nth(at).unwrap().parse::<u64>().unwrap());
    prlimit(Pid::from_raw(pid), Resource::Nofile, Rlimit { current: Some(soft), maximum: Some(hard) }).unwrap();
    before
}

#[test]
fn a_job_that_closes_its_descriptors_or_may_have_fewer_loses_snapshots_only() {
    let Some(mut rig) = job(&[]) else { return };
    rig.retry_after("5s");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    // Its numbers are above that.
    let pid = supervisor.main_pid();
    let before = limit(pid, 64);
    fails(&mut supervisor, "cannot open enough descriptors");
    supervisor.assert_unharmed(1);
    // A socket needs two.
    let is_free = |number: &u64| !Path::new(&format!("/proc/{pid}/fd/{number}")).exists();
    limit(pid, (0..).find(is_free).unwrap() + 1);
    fails(&mut supervisor, "it cannot open a socket; raise its limit (ulimit -n; job.limits.nofile)");
    supervisor.assert_unharmed(1);
    limit(pid, before);
    supervisor.image();
    assert_eq!(supervisor.has_done("close"), "close: done\n");
    fails(&mut supervisor, "process 1001 has no descriptor any more of GPU memory that stays on the GPU");
    let opened = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let high = |name: &str| name.parse::<u32>().is_ok_and(|number| number > 100);
    assert_eq!(opened.filter(|entry| high(entry.file_name().to_str().unwrap())).count(), 3, "the job's own files");
    supervisor.assert_unharmed(1);
    assert_eq!(rig.state().unwrap().restarts, 0);
    let (code, said) = rig.ask(&["rewind", "j", "-1"]);
    assert_eq!(code, Some(0), "{said}");
    supervisor.assert_unharmed(1);
    assert_eq!(bytes(&supervisor.snapshot()).0, 70 * MIB);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn the_process_that_copies_keeps_no_memory_of_files_that_are_gone() {
    let Some(rig) = job(&["--mib", "16"]) else { return };
    let mut supervisor = rig.start();
    let own = i32::try_from(supervisor.pid()).unwrap();
    let few = limit(own, 256);
    supervisor.snapshot();
    limit(own, few);
    supervisor.snapshot();
    let is_copier = |pid: &i32| process::text(*pid, "cmdline").is_ok_and(|line| line.contains("copy-gpu-memory"));
    let copier = process::children(own).into_iter().find(is_copier).unwrap();
    assert!(limit(copier, 1024) > 256, "it has a descriptor for each piece of memory");
    let has = |end: &str| process::text(copier, "maps").unwrap().lines().filter(|line| line.ends_with(end)).count();
    assert!(has("gpu/kept") > 0);
    assert_eq!(supervisor.has_done("first"), "first: done\n");
    for _ in 0..2 {
        assert_eq!(bytes(&supervisor.snapshot()).0, 0);
    }
    supervisor.until("both files are forgotten", |_| has("gpu/kept") == 0 && has("gpu/kept (deleted)") == 0);
    supervisor.assert_unharmed(1);
    assert_eq!(supervisor.has_done("more"), "more: done\n");
    assert_eq!(bytes(&supervisor.snapshot()).0, 16 * MIB);
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}
