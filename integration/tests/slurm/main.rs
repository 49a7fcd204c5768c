//! `rekindle` under a real Slurm: whatever Slurm does to a job, it goes on where it stood and ends once.
//!
//! The cluster is one test's own: munged, slurmctld and a slurmd a case, on loopback, in a folder, killed with the
//! test. It needs Debian's packages (scripts/deps.sh slurm), root and CRIU; what is missing is a SKIP, or a failure
//! where REKINDLE_TEST_REQUIRE names it (`slurm`). The job script is the one that users are told to take.

#![allow(clippy::unwrap_used, reason = "tests: a panic is the report")]

#[path = "../support/supervisor.rs"]
mod supervisor;

mod cases;
mod cluster;
#[path = "../../../crates/etcd/tests/etcd/links.rs"]
#[allow(dead_code, reason = "tests of etcd use the rest")]
mod links;
#[path = "../../../crates/etcd/tests/etcd/support.rs"]
#[allow(dead_code, reason = "tests of etcd use the rest")]
mod support;

use cases::Case;
use cluster::Cluster;

/// All at once: most of the time is spent waiting for Slurm, whose time limits are whole minutes.
#[test]
fn whatever_slurm_does_the_job_goes_on_and_ends_once() {
    type Check = fn(&Case<'_>);
    let cases: [(&str, Check); 9] = [
        ("warned", cases::a_signal_before_the_time_limit),
        ("limit", cases::a_time_limit_that_nobody_warns_of),
        ("preempted", cases::preemption),
        ("requeued", cases::an_administrator_who_queues_it_again),
        ("requeues", cases::rekindle_queues_it_again),
        ("array", cases::the_tasks_of_an_array),
        ("node", cases::the_node_restarts),
        ("group", cases::a_group_that_is_queued_again),
        ("groups", cases::a_group_that_queues_itself_again),
    ];
    let nodes = cases.map(|(node, _)| node).into_iter().chain(cases::SECOND);
    let Some(cluster) = Cluster::start(&nodes.collect::<Vec<_>>()) else { return };
    let failed: Vec<&str> = std::thread::scope(|scope| {
        let run = |(node, case): &(&'static str, fn(&Case<'_>))| {
            let (node, case, cluster) = (*node, *case, &cluster);
            (node, scope.spawn(move || case(&Case::new(cluster, node))))
        };
        let running: Vec<_> = cases.iter().map(run).collect();
        running.into_iter().filter_map(|(node, thread)| thread.join().err().map(|_| node)).collect()
    });
    assert!(failed.is_empty(), "failed: {failed:?}\n{}", cluster.log());
}
