//! Memory that processes share: let go for a snapshot, taken again, and refused where that can not be.

use crate::rig::Rig;

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
        supervisor.said("the job is back from image");
        supervisor.assert_unharmed(ranks);
        assert_eq!(rig.state().unwrap().restarts, round);
    }
    supervisor.snapshot();
    supervisor.said("is in the store");
    supervisor.kill();
    rig.assert_nothing_left();
    rig.forget_memory();
    let mut supervisor = rig.run();
    supervisor.said("the job is back from image");
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

#[test]
fn what_can_not_be_let_go_is_refused_in_words_and_the_job_goes_on() {
    let Some(rig) = job(2, &[]) else { return };
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let refused = |supervisor: &mut crate::rig::Supervisor<'_>, words: &str| {
        let why = supervisor.failing_snapshot();
        assert!(why.contains("which its restore would not survive") && why.contains(words), "{why}");
        assert!(why.contains("the job runs on"), "{why}");
        supervisor.assert_unharmed(2);
    };
    supervisor.has_rank(0, "offer");
    supervisor.has_rank(1, "ipc");
    refused(&mut supervisor, "1 pieces by CUDA IPC");
    supervisor.has_rank(1, "close");
    supervisor.image();
    // Its exporter has given it up, and the others go on with it.
    supervisor.has_rank(1, "give-up");
    refused(&mut supervisor, "or one that has given it up");
    supervisor.has_rank(0, "multicast");
    refused(&mut supervisor, "NCCL_NVLS_ENABLE=0");
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.kill_job();
    supervisor.said("the job is back from image");
    supervisor.assert_unharmed(2);
    supervisor.snapshot();
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn ranks_that_share_and_let_go_all_the_time_lose_nothing() {
    let Some(mut rig) = job(3, &["--churn"]) else { return };
    rig.may_take(std::time::Duration::from_secs(200));
    let mut supervisor = rig.start();
    supervisor.ranks_count(3);
    for _ in 0..50 {
        supervisor.snapshot();
        supervisor.assert_running(3);
    }
    supervisor.counts();
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.kill_job();
    supervisor.said("the job is back from image");
    supervisor.assert_unharmed(3);
    supervisor.stop();
    rig.assert_sequence();
}
