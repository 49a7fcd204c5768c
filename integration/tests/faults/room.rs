//! Memory that stays on the GPU and is copied from room on the GPU, behind the job.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rekindle_store::Image;

use crate::rig::{Rig, Supervisor};

const MIB: u64 = 1 << 20;
/// Pieces of 16 MiB. Four at a time are on their way, and are waited for.
const PIECES: u64 = 12;
/// A freeze on a busy machine takes seconds, and all pieces together must take longer.
const SLOW: &str = "0 delay=1000";
/// Until it is cleared.
const NEVER: &str = "hold";
const BEHIND: &str = "the rest of the GPU memory is copied while the job runs";

/// A job on a GPU with so many MiB free.
fn job(free: u64) -> Option<Rig> {
    let mut rig = Rig::new()?;
    let sizes = vec!["16"; usize::try_from(PIECES).unwrap()].join(",");
    rig.kept(&["--mib", &sizes]);
    rig.standin.gpus(&format!("a0 16384 {}\n", 16384 - free));
    Some(rig)
}

fn kept(image: &Image) -> u64 {
    image.manifest().unwrap().kept.iter().flat_map(|kept| &kept.pieces).map(|piece| piece.bytes).sum()
}

/// Asks for a snapshot whose copy continues behind the job once `fail-copier-out` is cleared. Returns the bytes that are
/// left.
fn behind(rig: &Rig, supervisor: &mut Supervisor<'_>) -> u64 {
    rig.standin.fault("fail-copier-out", SLOW);
    supervisor.ask();
    let line = supervisor.said(BEHIND);
    rig.standin.fault("fail-copier-out", NEVER);
    // A job that dies before this has died in the freeze.
    supervisor.said("phase=\"check\"");
    line.split("bytes=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap()
}

/// The files of the processes that copy and are not dead.
fn copiers(rig: &Rig) -> Vec<PathBuf> {
    let entries = fs::read_dir(rig.standin.path()).unwrap().flatten().map(|entry| entry.path());
    let copiers = entries.filter(|path| path.extension().is_some_and(|end| end == "copier"));
    let runs = |path: &PathBuf| {
        let pid = path.file_stem().unwrap().to_str().unwrap();
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("copy-gpu-memory"))
    };
    copiers.filter(runs).collect()
}

/// Bytes of the GPU that they have now.
fn room(rig: &Rig) -> u64 {
    let used = |path| {
        let mut bytes = [0; 8];
        fs::File::open(path).unwrap().read_exact_at(&mut bytes, 16).unwrap();
        u64::from_ne_bytes(bytes)
    };
    copiers(rig).into_iter().map(used).sum()
}

fn has_no_room(rig: &Rig, supervisor: &mut Supervisor<'_>) {
    supervisor.until("the room on the GPU is free", |_| room(rig) == 0);
}

fn ends_well(rig: &Rig, supervisor: &mut Supervisor<'_>) {
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

fn comes_back_and_ends(rig: &Rig, supervisor: &mut Supervisor<'_>) {
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    ends_well(rig, supervisor);
}

#[test]
fn a_copy_that_would_be_waited_for_goes_on_behind_the_job() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    for restarts in 1..=2 {
        let left = behind(&rig, &mut supervisor);
        assert!((16 * MIB..PIECES * 16 * MIB).contains(&left), "{left}");
        supervisor.until("the room is in use", |_| room(&rig) >= 16 * MIB);
        let before = rig.images().first().map(|image| image.id);
        // It changes what is being copied.
        supervisor.counts();
        assert_eq!(rig.images().first().map(|image| image.id), before, "no image before it is whole");
        rig.clear("fail-copier-out");
        let image = supervisor.image();
        assert_eq!(kept(&image), PIECES * 16 * MIB);
        assert!(image.verify().is_sound(), "{:?}", image.verify());
        has_no_room(&rig, &mut supervisor);
        supervisor.kill_job();
        let line = supervisor.said("the job was restored from image");
        assert!(line.contains(&image.id.to_string()), "{line}");
        supervisor.assert_unharmed(1);
        assert_eq!(rig.state().unwrap().restarts, restarts);
    }
    ends_well(&rig, &mut supervisor);
}

#[test]
fn a_copy_that_is_over_in_time_takes_no_room() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    rig.standin.fault("fail-checkpoint", "0 delay=6000");
    // It would be gone if it had been met.
    rig.standin.fault("fail-copier-allocate", "2 times=1");
    supervisor.snapshot();
    assert!(rig.standin.path().join("fail-copier-allocate").exists(), "{}", rig.log());
    assert!(!rig.log().contains(BEHIND), "{}", rig.log());
    supervisor.assert_unharmed(1);
    supervisor.stop();
}

#[test]
fn while_the_driver_restores_the_job_nothing_is_copied_that_has_room() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    // All copies take 6 s, and would be over when this is.
    rig.standin.fault("fail-copier-out", "0 delay=500");
    rig.standin.fault("fail-restore", "0 delay=9000");
    supervisor.ask();
    supervisor.said(BEHIND);
    rig.clear("fail-restore");
    rig.clear("fail-copier-out");
    assert_eq!(kept(&supervisor.image()), PIECES * 16 * MIB);
    has_no_room(&rig, &mut supervisor);
    comes_back_and_ends(&rig, &mut supervisor);
}

#[test]
fn a_freeze_that_fails_gives_up_what_is_not_copied_yet() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    // All copies would take 24 s, those that are begun 8 s.
    rig.standin.fault("fail-copier-out", "0 delay=2000");
    rig.standin.fault("fail-checkpoint", "304 times=1");
    let began = Instant::now();
    assert!(supervisor.failing_snapshot().contains("the job continues"));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    rig.clear("fail-copier-out");
    assert_eq!(kept(&supervisor.snapshot()), PIECES * 16 * MIB);
    comes_back_and_ends(&rig, &mut supervisor);
}

/// Its context may be of no use any more.
#[test]
fn a_process_whose_copy_had_failed_when_it_was_given_up_copies_no_more() {
    let Some(mut rig) = job(8192) else { return };
    rig.retry_after("5s");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    let before = copiers(&rig);
    assert_eq!(before.len(), 1);
    rig.standin.fault("fail-checkpoint", "hold");
    rig.standin.fault("fail-copier-out", "999 times=1");
    supervisor.ask();
    supervisor.until("a copy has failed", |rig| !rig.standin.path().join("fail-copier-out").exists());
    rig.standin.fault("fail-checkpoint", "304 times=1");
    assert!(supervisor.said("the snapshot failed").contains("the job continues"));
    assert!(copiers(&rig).is_empty(), "{before:?}");
    assert_eq!(kept(&supervisor.snapshot()), PIECES * 16 * MIB);
    comes_back_and_ends(&rig, &mut supervisor);
}

#[test]
fn room_for_a_part_is_used_for_that_part_and_without_room_the_job_waits() {
    // Of that 2 GiB stay free.
    let Some(rig) = job(2048 + 32) else { return };
    let mut supervisor = rig.start();
    assert_eq!(behind(&rig, &mut supervisor), 32 * MIB);
    rig.clear("fail-copier-out");
    assert_eq!(kept(&supervisor.image()), PIECES * 16 * MIB);
    has_no_room(&rig, &mut supervisor);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    let mark = rig.log().len();
    for (fault, text) in [("", ""), ("fail-copier-allocate", "2"), ("fail-copier-info", "999")] {
        rig.standin.gpus(if fault.is_empty() { "a0 16384 14336\n" } else { "a0 16384 0\n" });
        if !fault.is_empty() {
            rig.standin.fault(fault, text);
        }
        // The job waits for all of it.
        rig.standin.fault("fail-copier-out", "0 delay=300");
        let image = supervisor.snapshot();
        assert_eq!(kept(&image), PIECES * 16 * MIB);
        assert!(!rig.log()[mark..].contains(BEHIND), "{fault}: {}", rig.log());
        supervisor.assert_unharmed(1);
        rig.clear(fault);
    }
    comes_back_and_ends(&rig, &mut supervisor);
}

#[test]
fn a_copy_that_fails_or_whose_process_dies_behind_the_job_costs_one_snapshot() {
    let Some(mut rig) = job(8192) else { return };
    rig.retry_after("3s");
    let mut supervisor = rig.start();
    let mut newest = supervisor.snapshot().id;
    let faults = [
        ("die-at-copier-out", "", "the process that copies GPU memory does not answer (copy)"),
        ("fail-copier-out", "999", "the process that copies GPU memory cannot copy: "),
        ("die-at-copier-free", "", "the process that copies GPU memory does not answer (copy)"),
        ("fail-copier-free", "999", "the process that copies GPU memory cannot copy: cuMemFree failed"),
    ];
    for (fault, text, words) in faults {
        behind(&rig, &mut supervisor);
        rig.standin.fault(fault, text);
        if fault != "fail-copier-out" {
            rig.clear("fail-copier-out");
        }
        let why = supervisor.said("the snapshot failed");
        assert!(why.contains(words) && why.contains("the job continues"), "{fault}: {why}");
        rig.clear(fault);
        assert_eq!(rig.images()[0].id, newest, "{fault}: nothing was published");
        has_no_room(&rig, &mut supervisor);
        supervisor.assert_unharmed(1);
        // The one that is retried starts another process.
        let image = supervisor.image();
        assert_eq!(kept(&image), PIECES * 16 * MIB);
        newest = image.id;
    }
    // In the freeze.
    rig.standin.fault("fail-copier-out", SLOW);
    rig.standin.fault("fail-copier-within", "999 times=1");
    let why = supervisor.failing_snapshot();
    assert!(why.contains("cannot copy: ") && why.contains("the job continues"), "{why}");
    rig.clear("fail-copier-out");
    supervisor.image();
    assert_eq!(rig.state().unwrap().restarts, 0);
    comes_back_and_ends(&rig, &mut supervisor);
}

#[test]
fn a_job_that_dies_while_its_memory_is_copied_behind_it_is_restored_from_that_image() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    behind(&rig, &mut supervisor);
    supervisor.kill_job();
    supervisor.said("the job ended: signal SIGKILL");
    rig.clear("fail-copier-out");
    let image = supervisor.image();
    let line = supervisor.said("the job was restored from image");
    assert!(line.contains(&image.id.to_string()), "{line}");
    supervisor.assert_unharmed(1);
    assert_eq!(kept(&image), PIECES * 16 * MIB);
    // The job was dead when the image was described. Without its thread the job would have run before it had its memory.
    assert_eq!(image.manifest().unwrap().tree.cuda_threads.len(), 1);
    assert!(!rig.log().contains("the driver's thread has waited"), "{}", rig.log());
    has_no_room(&rig, &mut supervisor);
    ends_well(&rig, &mut supervisor);
}

#[test]
fn what_is_asked_for_behind_the_job_is_done_once_the_image_is_whole() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    behind(&rig, &mut supervisor);
    thread::scope(|scope| {
        let asked = scope.spawn(|| rig.ask(&["snapshot", "j"]));
        thread::sleep(Duration::from_millis(500));
        rig.clear("fail-copier-out");
        let first = supervisor.image();
        let second = supervisor.image();
        assert!(second.id > first.id && kept(&first) == kept(&second));
        let (code, said) = asked.join().unwrap();
        assert!(code == Some(0) && said.contains(&second.id.to_string()), "{said}");
    });
    supervisor.assert_unharmed(1);
    behind(&rig, &mut supervisor);
    supervisor.signal(Signal::SIGTERM);
    supervisor.said("received SIGTERM");
    rig.clear("fail-copier-out");
    let last = supervisor.image();
    assert_eq!(supervisor.wait(), Some(143));
    rig.assert_nothing_left();
    let mut supervisor = rig.run();
    let line = supervisor.said("the job was restored from image");
    assert!(line.contains(&last.id.to_string()), "{line}");
    supervisor.assert_unharmed(1);
    ends_well(&rig, &mut supervisor);
}

#[test]
fn a_rewind_behind_the_job_does_not_wait_for_a_slow_copy() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    behind(&rig, &mut supervisor);
    thread::scope(|scope| {
        let asked = scope.spawn(|| rig.ask(&["rewind", "j", "-1"]));
        supervisor.said("the snapshot was cancelled");
        // A copy to the GPU is compared.
        rig.clear("fail-copier-out");
        let (code, said) = asked.join().unwrap();
        assert_eq!(code, Some(0), "{said}");
    });
    has_no_room(&rig, &mut supervisor);
    supervisor.assert_running(1);
    supervisor.counts();
    assert_eq!(rig.images()[0].id, image.id, "nothing was published");
    assert_eq!(kept(&supervisor.snapshot()), PIECES * 16 * MIB);
    ends_well(&rig, &mut supervisor);
}

#[test]
fn a_supervisor_that_is_killed_behind_the_job_leaves_nothing() {
    let Some(rig) = job(8192) else { return };
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    behind(&rig, &mut supervisor);
    supervisor.kill();
    rig.assert_nothing_left();
    assert_eq!(room(&rig), 0);
    rig.clear("fail-copier-out");
    let mut supervisor = rig.run();
    let line = supervisor.said("the job was restored from image");
    assert!(line.contains(&image.id.to_string()), "{line}");
    supervisor.assert_unharmed(1);
    ends_well(&rig, &mut supervisor);
}
