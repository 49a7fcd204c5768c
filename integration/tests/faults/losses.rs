//! Failures that cannot be undone: the life ends, and the supervisor restores the job from the newest image.

use std::fs;

use rekindle_store::Image;

use crate::rig::{Rig, Supervisor};

/// Waits until the job is back from its newest image and unharmed.
fn comes_back(rig: &Rig, supervisor: &mut Supervisor<'_>, ranks: usize, restarts: u32) {
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(ranks);
    assert_eq!(rig.state().unwrap().restarts, restarts);
    rig.assert_store_is_whole();
    supervisor.leaves_no_draft();
}

#[test]
fn a_restore_that_fails_in_a_snapshot_ends_the_life() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(2, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let second = rig.cuda_pids().into_iter().filter_map(crate::rig::inner).max().unwrap();
    for (restarts, pid) in [(1, 1001), (2, second)] {
        rig.standin.fault("fail-restore", &format!("2 times=1 pid={pid}"));
        supervisor.ask();
        let why = supervisor.said("the snapshot failed and the job cannot continue");
        assert!(why.contains("restore: ") && why.contains("the GPU has too little free memory"), "{why}");
        assert!(why.contains(&format!("process {pid} cannot use its GPU again")), "{why}");
        comes_back(&rig, &mut supervisor, 2, restarts);
        supervisor.snapshot();
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn an_unlock_that_keeps_failing_ends_the_life_and_holds_the_next_back() {
    let Some(mut rig) = Rig::new() else { return };
    // The third restart is not before the fault is over.
    rig.restarts_after("4s");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.standin.fault("fail-unlock", "304");
    supervisor.ask();
    let why = supervisor.said("the snapshot failed and the job cannot continue");
    assert!(why.contains("unlock: "), "{why}");
    // It does not come back either while the driver is like this; no image is to blame.
    supervisor.said("cannot restore image");
    supervisor.said("cannot restore image");
    rig.clear("fail-unlock");
    comes_back(&rig, &mut supervisor, 1, 3);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn without_an_image_it_begins_anew() {
    let Some(rig) = Rig::new() else { return };
    let mut supervisor = rig.start();
    supervisor.counts();
    rig.standin.fault("fail-restore", "801 times=1");
    supervisor.ask();
    supervisor.said("the snapshot failed and the job cannot continue");
    supervisor.said("starting again from the beginning");
    supervisor.said("to=\"running\"");
    supervisor.counts();
    supervisor.assert_running(1);
    supervisor.stop();
}

#[test]
fn it_dies_at_any_step_and_comes_back() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(2, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let second = rig.cuda_pids().into_iter().filter_map(crate::rig::inner).max().unwrap();
    let mut restarts = 0;
    for op in ["state", "lock", "checkpoint", "restore", "unlock"] {
        for pid in [1001, second] {
            rig.standin.fault(&format!("die-at-{op}"), &format!("pid={pid}"));
            supervisor.ask();
            restarts += 1;
            comes_back(&rig, &mut supervisor, 2, restarts);
            supervisor.snapshot();
        }
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_restart_whose_cuda_restore_fails_is_tried_again() {
    let Some(mut rig) = Rig::new() else { return };
    // It is not given up before the fault is over.
    rig.restarts_after("2s");
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    rig.standin.fault("fail-restore", "2");
    supervisor.kill_job();
    for _ in 0..3 {
        let why = supervisor.said("cannot restore image");
        assert!(why.contains("the CUDA state of process 1001 was not restored"), "{why}");
        // Nothing half restored is left while it waits.
        supervisor.said("continuing from image");
        let waits = |rig: &Rig| rig.state().filter(|now| now.state.as_str() == "waiting").map(|now| now.since);
        let (before, left, after) = (waits(&rig), rig.cuda_pids(), waits(&rig));
        assert!(before.is_none() || before != after || left.is_empty(), "{left:?}");
    }
    assert!(rig.images().iter().all(rekindle_store::Image::is_good), "the image is as good as it was");
    rig.clear("fail-restore");
    let line = supervisor.said("the job was restored from image");
    assert!(line.contains(&image.id.to_string()), "{line}");
    supervisor.assert_unharmed(1);
    // The same with a process that dies of it, and a CRIU that is killed.
    rig.standin.fault("die-at-restore", "delay=100");
    supervisor.kill_job();
    supervisor.until("it dies of it", |rig| !rig.standin.path().join("die-at-restore").exists());
    // As a failed restore, or as a restored job that ended; the first words are those of the kill.
    supervisor.said("continuing from image");
    supervisor.said("continuing from image");
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    rig.criu_fault("rm -f \"$0-fault\"; kill -9 $$");
    supervisor.kill_job();
    supervisor.said("The job is restored from the same image at once");
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    assert!(rig.images().iter().all(rekindle_store::Image::is_good));
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_machine_that_does_not_get_better_is_given_up_with_a_reason() {
    let Some(rig) = Rig::new() else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.standin.fault("fail-restore", "2");
    supervisor.kill_job();
    assert_eq!(supervisor.wait(), Some(125));
    assert!(rig.log().contains("given up: 5 attempts failed, none because of the image"), "{}", rig.log());
    rig.assert_nothing_left();
    // The next run goes on from the same image.
    rig.clear("fail-restore");
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_driver_that_hangs_in_a_restart_is_not_waited_for() {
    let Some(mut rig) = Rig::new() else { return };
    // Longer than a restore takes on a busy machine.
    rig.set("RESTART_RESTORE_TIMEOUT", "15s");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.standin.fault("fail-restore", "0 delay=30000 times=1");
    supervisor.kill_job();
    let why = supervisor.said("cannot restore image");
    assert!(why.contains("the CUDA driver did not restore the job within 15s"), "{why}");
    comes_back(&rig, &mut supervisor, 1, 2);
    rig.standin.fault("fail-restore", "0 delay=30000 times=1");
    supervisor.kill_job();
    supervisor.until("the driver hangs", |rig| !rig.standin.path().join("fail-restore").exists());
    supervisor.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(supervisor.wait(), Some(143));
    rig.assert_nothing_left();
    rig.assert_sequence();
}

/// Nothing but the image explains it, so an older one is used. The image may still be good for a later version.
#[test]
fn an_image_whose_memory_is_not_that_of_its_processes_is_passed_over() {
    let Some(mut rig) = Rig::new() else { return };
    rig.kept(&[]);
    let mut supervisor = rig.start();
    let older = supervisor.snapshot().id;
    let newest = supervisor.snapshot().id;
    supervisor.said("was stored in");
    supervisor.kill();
    rig.assert_nothing_left();
    for image in rig.copies().into_iter().filter(|image| image.id == newest) {
        let mut manifest = image.manifest().unwrap().clone();
        manifest.kept.as_mut().unwrap().pieces.pop();
        fs::write(image.dir.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
    }
    let mut supervisor = rig.run();
    let why = supervisor.said(&format!("image {newest} was not restored and is not marked as bad"));
    assert!(why.contains("the processes have 3 pieces of such memory, and 2 of the 2 in the image"), "{why}");
    let line = supervisor.said_one_of(&["the job was restored from image", "none because of the image"]);
    assert!(line.contains(&format!("the job was restored from image {older}")), "{line}");
    supervisor.assert_unharmed(1);
    assert!(rig.images().iter().all(Image::is_good), "{}", rig.log());
    supervisor.stop();
}
