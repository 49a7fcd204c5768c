//! Host memory that CUDA makes, and objects that the driver checkpoints and does not restore.

use crate::rig::{Rig, Supervisor};

fn job(memory: &str, args: &[&str]) -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.kept(args);
    rig.set("GPU_MEMORY", memory);
    Some(rig)
}

#[test]
fn host_memory_is_what_it_was_after_snapshots_deaths_and_from_the_store() {
    for (memory, kind) in [("copied", "numa"), ("kept", "numa"), ("copied", "host"), ("kept", "host")] {
        let Some(rig) = job(memory, &["--host", kind]) else { return };
        let mut supervisor = rig.start();
        for restarts in 1..=2 {
            for _ in 0..2 {
                supervisor.snapshot();
                supervisor.assert_unharmed(1);
            }
            supervisor.kill_job();
            supervisor.said("the job was restored from image");
            supervisor.assert_unharmed(1);
            assert_eq!(rig.state().unwrap().restarts, restarts, "{memory} {kind}: {}", rig.log());
            // From now on only a mapping keeps it.
            if restarts == 1 {
                assert_eq!(supervisor.has_done("release"), "release: done\n");
            }
        }
        supervisor.snapshot();
        supervisor.said("was stored in");
        supervisor.kill();
        rig.forget_memory();
        let mut supervisor = rig.run();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
        supervisor.stop();
        rig.assert_sequence();
    }
}

/// A snapshot that is refused with these words while CUDA runs, and harms nothing.
fn refused(rig: &Rig, supervisor: &mut Supervisor<'_>, words: &str) {
    let why = supervisor.failing_snapshot();
    assert!(why.contains(words) && why.contains("process 1001 has "), "not {words:?} in {why}");
    assert!(why.contains("the job continues"), "{why}");
    supervisor.assert_unharmed(1);
    assert_eq!(rig.state().unwrap().restarts, 0);
}

#[test]
fn what_the_driver_would_not_restore_is_refused_by_name_before_anything_is_checkpointed() {
    for memory in ["copied", "kept"] {
        let Some(mut rig) = job(memory, &["--host", "numa"]) else { return };
        rig.retry_after("1s");
        let mut supervisor = rig.start();
        supervisor.snapshot();
        for (make, end, words) in [
            ("sparse", "no-array", "a sparse array (CUDA_ARRAY3D_SPARSE)"),
            ("deferred", "no-array", "CUDA_ARRAY3D_DEFERRED_MAPPING"),
            ("pool", "no-pool", "memory from a pool in host memory"),
        ] {
            supervisor.has_done(make);
            refused(&rig, &mut supervisor, words);
            supervisor.has_done(end);
            supervisor.image();
            supervisor.assert_unharmed(1);
        }
        supervisor.has_done("export");
        refused(&rig, &mut supervisor, "NCCL_CUMEM_HOST_ENABLE=0");
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
        supervisor.stop();
        rig.assert_sequence();
    }
}

#[test]
fn a_failure_while_host_memory_is_released_costs_one_snapshot() {
    let Some(rig) = job("copied", &["--host", "numa"]) else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    // The second unmap is that of the program's mapping.
    for (call, fault) in [("map", "999 times=1"), ("access", "999 times=1"), ("unmap", "999 times=1 skip=1")] {
        rig.standin.fault(&format!("fail-keeper-{call}"), fault);
        let why = supervisor.failing_snapshot();
        assert!(why.contains("the driver cannot") && why.contains("the job continues"), "{call}: {why}");
        supervisor.image();
        supervisor.assert_unharmed(1);
        assert_eq!(rig.state().unwrap().restarts, 0, "{call}: {}", rig.log());
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_thread_that_asks_nvml_which_came_before_cuda_does_not_hold_snapshots_up() {
    let Some(rig) = job("kept", &["--nvml"]) else { return };
    rig.standin.add_nvml();
    rig.standin.gpus("a0 16384 0\n");
    let mut supervisor = rig.start();
    for restarts in 1..=2 {
        for _ in 0..3 {
            supervisor.snapshot();
            supervisor.assert_unharmed(1);
        }
        assert!(!rig.log().contains("the snapshot failed"), "{}", rig.log());
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
        assert_eq!(rig.state().unwrap().restarts, restarts);
    }
    supervisor.stop();
    rig.assert_sequence();
}
