//! Memory that stays on the GPU and has not changed since an earlier snapshot.

use crate::rig::{Rig, Supervisor};

const MIB: u64 = 1 << 20;

/// A job that changes 16 MiB, and other memory never.
fn job(still: &str, full_every: &str) -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.kept(&["--mib", "16", "--still", still]);
    rig.set("GPU_FULL_COPY_EVERY", full_every);
    // The kernel is compiled for GPUs that NVML says the job uses.
    rig.standin.add_nvml();
    rig.standin.gpus("a0 16384 0\n");
    Some(rig)
}

/// How many MiB the next snapshot does not copy from the GPU, of how many.
fn same(supervisor: &mut Supervisor<'_>) -> [u64; 2] {
    supervisor.ask();
    same_of_the_next(supervisor)
}

fn same_of_the_next(supervisor: &mut Supervisor<'_>) -> [u64; 2] {
    let line = supervisor.said("copied GPU memory that stayed on the GPU");
    let number = |name: &str| line.split(name).nth(1).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap() / MIB;
    supervisor.image();
    [number(" same="), number(" bytes=")]
}

fn comes_back(rig: &Rig, supervisor: &mut Supervisor<'_>, restarts: u32) {
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    assert_eq!(rig.state().unwrap().restarts, restarts);
    rig.assert_store_is_whole();
}

fn ends_well(rig: &Rig, supervisor: &mut Supervisor<'_>) {
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn memory_that_has_not_changed_is_not_copied_from_the_gpu_again() {
    let Some(rig) = job("64", "16") else { return };
    let mut supervisor = rig.start();
    assert_eq!(same(&mut supervisor), [0, 80]);
    // From the file of the image before; then from the one that is to be overwritten.
    for _ in 0..3 {
        supervisor.counts();
        let [same, all] = same(&mut supervisor);
        assert!((64..80).contains(&same) && all == 80, "{same} of {all}");
        supervisor.assert_unharmed(1);
    }
    let (code, said) = rig.ask(&["snapshot", "j", "--full"]);
    assert_eq!((code, same_of_the_next(&mut supervisor)), (Some(0), [0, 80]), "{said}");
    assert!(same(&mut supervisor)[0] >= 64, "only one was full");
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    assert!(same(&mut supervisor)[0] >= 64, "the process that copies is the same");
    supervisor.snapshot();
    supervisor.said("was stored in");
    assert_eq!(rig.ask(&["verify", "j", "--read-data"]).0, Some(0));
    supervisor.kill();
    rig.assert_nothing_left();
    rig.forget_memory();
    let mut supervisor = rig.run();
    comes_back(&rig, &mut supervisor, 0);
    // The files are new ones, and so is the process.
    assert_eq!(same(&mut supervisor)[0], 0);
    supervisor.assert_unharmed(1);
    ends_well(&rig, &mut supervisor);
}

#[test]
fn all_of_it_is_copied_every_so_many_snapshots_and_where_the_gpu_cannot_compare() {
    let Some(rig) = job("32", "3") else { return };
    let mut supervisor = rig.start();
    let all: Vec<bool> = (0..6).map(|_| same(&mut supervisor)[0] >= 32).collect();
    assert_eq!(all, [false, true, true, false, true, true]);
    supervisor.kill();
    for fault in ["fail-copier-module", "fail-copier-name", "die-at-copier-name"] {
        rig.standin.fault(fault, "719");
        let mut supervisor = rig.run();
        supervisor.said("the job was restored from image");
        supervisor.ask();
        supervisor
            .said("the GPU cannot tell which memory has changed, so all of it is copied in each snapshot: the process");
        supervisor.image();
        assert_eq!(same(&mut supervisor)[0], 0, "{fault}");
        supervisor.kill_job();
        comes_back(&rig, &mut supervisor, 1);
        supervisor.kill();
        rig.clear(fault);
    }
}

#[test]
fn nothing_is_known_of_a_file_whose_copy_failed() {
    let Some(rig) = job("32", "16") else { return };
    let mut supervisor = rig.start();
    for _ in 0..2 {
        supervisor.snapshot();
    }
    for (fault, words) in [
        ("fail-copier-name", "the process that copies GPU memory cannot copy: "),
        ("fail-copier-write-names", "the process that copies GPU memory cannot copy: the GPU has not named all memory"),
        ("fail-copier-out", "the process that copies GPU memory cannot copy: "),
        ("die-at-copier-name", "the process that copies GPU memory does not answer"),
    ] {
        rig.standin.fault(fault, "700 times=1");
        let why = supervisor.failing_snapshot();
        assert!(why.contains(words) && why.contains("the job continues"), "{why}");
        supervisor.image();
        supervisor.assert_unharmed(1);
        // The process that failed is another one now: it has copied all once.
        let all: Vec<bool> = (0..2).map(|_| same(&mut supervisor)[0] >= 32).collect();
        assert_eq!(all, [true, true], "{fault}");
    }
    supervisor.kill_job();
    comes_back(&rig, &mut supervisor, 1);
    ends_well(&rig, &mut supervisor);
}

#[test]
fn what_a_job_wrote_after_a_freeze_that_failed_is_not_taken_for_what_it_had() {
    let Some(mut rig) = Rig::new() else { return };
    // Each allocation is overwritten with the same two contents in turn, so that old names come back.
    rig.kept(&["--mib", "16,16,16,16", "--turns"]);
    rig.set("GPU_FULL_COPY_EVERY", "16");
    rig.standin.add_nvml();
    rig.standin.gpus("a0 16384 0\n");
    for life in 0..5 {
        // A process that copies knows nothing at first.
        let mut supervisor = if life == 0 { rig.start() } else { rig.run() };
        if life > 0 {
            supervisor.said("the job was restored from image");
        }
        supervisor.assert_unharmed(1);
        // The copy is slow, and goes on while the job runs again after the checkpoint has failed.
        rig.standin.fault("fail-copier-out", "0 delay=100");
        rig.standin.fault("fail-checkpoint", "304 times=1");
        supervisor.failing_snapshot();
        rig.clear("fail-copier-out");
        for restarts in 1..=2 {
            supervisor.image();
            supervisor.kill_job();
            comes_back(&rig, &mut supervisor, restarts);
            supervisor.ask();
        }
        supervisor.image();
        supervisor.kill();
    }
}
