//! What does not fit is told, and nothing is started half.

use crate::lab::{ENDLESS, Lab, gate, wait_for};

#[test]
fn machines_that_disagree_say_about_what() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, 100);
    // Long enough that each sees the other on a busy machine, once etcd runs.
    lab.set("group.wait", "\"15s\"");
    drop(lab.cluster.client());
    lab.run(0, 0, &[]);
    lab.run(1, 1, &["--nodes", "3"]);
    // Who sees the other first ends. The other may see that too, or wait for it in vain.
    let ends = [lab.ends(0), lab.ends(1)];
    assert!(ends.contains(&78) && ends.iter().all(|code| [75, 78].contains(code)), "{ends:?}");
    for (rank, here, there) in [(0, 2, 3), (1, 3, 2)] {
        let why = format!("the number of machines (group.nodes) is {there} there and {here} here");
        assert!(ends[rank] == 75 || lab.log(rank).contains(&why), "{}", lab.log(rank));
        assert!(!lab.log(rank).contains("the group starts from"));
    }
}

#[test]
fn a_rank_that_is_taken_and_a_machine_that_is_missing_end_with_a_reason() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(3, 100);
    // Long enough that each sees the other on a busy machine, once etcd runs.
    lab.set("group.wait", "\"10s\"");
    drop(lab.cluster.client());
    lab.run(0, 0, &[]);
    lab.run(1, 1, &[]);
    // Nobody is rank 2.
    assert_eq!((lab.ends(0), lab.ends(1)), (75, 75), "to be queued again");
    assert!(lab.log(0).contains("rank 2 did not join in time"), "{}", lab.log(0));
}

#[test]
fn a_rank_that_another_machine_has_is_named_and_the_group_runs_on() {
    if !gate() {
        return;
    }
    let mut lab = Lab::with_spare(2, ENDLESS);
    lab.set("group.lease", "\"12s\"");
    lab.run_all();
    lab.said(0, "was stored in", 1);
    lab.set("group.wait", "\"6s\"");
    let mut third = lab.command(2, 2);
    let output =
        third.args(["run", "--name", "ring", "--nodes", "2", "--node-rank", "1", "--"]).args(lab.ring()).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{said}");
    assert!(said.contains("is rank 1 of the group: waiting until it leaves"), "{said}");
    assert!(said.contains("another supervisor runs as rank 1. Stop it, or give this machine another number"), "{said}");
    assert!(!said.contains("the group starts from"), "{said}");
    lab.machines[0].signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    (0..2).for_each(|rank| assert!(!lab.log(rank).contains("was restored from"), "{}", lab.log(rank)));
}

#[test]
fn a_machine_with_another_version_or_driver_is_named_and_nothing_starts() {
    if !gate() {
        return;
    }
    let versions = [
        (r#""rekindle":"9.9.9","driver":null"#.to_owned(), "the version of rekindle is 9.9.9 there and"),
        (
            format!(r#""network":"vxlan","rekindle":"{}","driver":"1.2""#, env!("CARGO_PKG_VERSION")),
            "the NVIDIA driver is 1.2 there and",
        ),
    ];
    for (other, words) in versions {
        let mut lab = Lab::new(2, 100);
        // As a member of another version writes it.
        let node = format!(
            r#"{{"host":"elsewhere","address":"10.0.0.9","criu":"4.2","size":2,"subnet":"10.213.0.0/16","lease_s":5,{other}}}"#
        );
        lab.cluster.control(0, &["put", "/rekindle/1/ring/nodes/1", &node]);
        lab.run(0, 0, &[]);
        assert_eq!(lab.ends(0), 78, "{}", lab.log(0));
        let log = lab.log(0);
        assert!(log.contains("rank 1 of the group, on elsewhere, does not fit") && log.contains(words), "{log}");
        assert!(log.contains("Make them equal and start the group again"), "{log}");
        assert!(!log.contains("the group starts from") && lab.out(0).is_empty(), "{log}");
    }
}

#[test]
fn a_machine_that_joins_and_does_not_fit_does_not_end_the_run() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.run_all();
    lab.said(0, "was stored in", 2);
    lab.machines[1].kill();
    lab.said(0, "the group has lost rank 1", 1);
    wait_for("the job ends", || lab.machines[0].process_of_job().is_none());
    // As a member of another version writes it.
    let node = r#"{"host":"elsewhere","address":"10.0.0.9","criu":"4.2","size":2,"subnet":"10.213.0.0/16","lease_s":5,
        "rekindle":"9.9.9","driver":null}"#;
    lab.cluster.control(0, &["put", "/rekindle/1/ring/nodes/1", node]);
    lab.said(0, "rank 1 of the group, on elsewhere, does not fit: the version of rekindle is 9.9.9 there", 1);
    lab.said(0, "The run waits for a machine that fits", 1);
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(lab.machines[0].has_ended(), None, "{}", lab.log(0));
    lab.run(1, 1, &[]);
    (0..2).for_each(|rank| lab.said(rank, "the job was restored from image", 1));
    lab.completes(&[0, 1]);
}

#[test]
fn a_part_alone_is_not_restored() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.run_all();
    lab.said(0, "was stored in", 3);
    lab.machines[0].signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    let output = lab.command(0, 0).args(["restore", "ring.0"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("only restored as a whole"), "{said}");
    // The same command for this machine alone, and rules for one machine.
    for fresh in [&[][..], &["--fresh"]] {
        let ring = lab.ring();
        let run = [&["run", "--name", "ring.0"], fresh, &["--"]].concat();
        let output = lab.command(0, 0).args(run).args(&ring).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("one machine's part of a job over several"), "{said}");
    }
    let parts = || lab.command(0, 0).args(["list", "ring.0", "--json"]).output().unwrap().stdout;
    let before = parts();
    let output = lab.command(0, 0).args(["prune", "ring.0", "--keep-last", "1"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("nothing was removed"), "{said}");
    assert_eq!(parts(), before);
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, "the job was restored from image", 1));
    lab.machines[0].signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    (0..2).for_each(|rank| assert!(!lab.out(rank).contains("WRONG")));
}

#[test]
fn a_group_image_of_another_number_of_machines_is_refused_by_all_and_kept() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(3, ENDLESS);
    lab.run_all();
    lab.said(0, "is committed", 1);
    lab.machines[0].signal(nix::sys::signal::Signal::SIGTERM);
    (0..3).for_each(|machine| assert_eq!(lab.ends(machine), 143));
    lab.resize(2);
    let starts: Vec<usize> = (0..2).map(|rank| lab.log(rank).matches("the group starts from").count()).collect();
    lab.run_all();
    assert_eq!((lab.ends(0), lab.ends(1)), (78, 78));
    for (rank, before) in starts.into_iter().enumerate() {
        let log = lab.log(rank);
        assert!(log.contains("has parts of 3 machines, and the group has 2 (group.nodes)"), "{log}");
        assert_eq!(log.matches("the group starts from").count(), before);
    }
    lab.resize(3);
    lab.run_all();
    (0..3).for_each(|rank| lab.said(rank, "the job was restored from image", 1));
    lab.completes(&[0, 1, 2]);
}

#[test]
fn machines_whose_networks_would_not_meet_start_nothing() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, 100);
    lab.set("group.wait", "\"15s\"");
    drop(lab.cluster.client());
    lab.run(0, 0, &[]);
    lab.joined(0);
    lab.set("group.network", "\"vxlan:4790\"");
    lab.run(1, 1, &[]);
    // As above: the other may wait in vain for the one that has ended.
    let ends = [lab.ends(0), lab.ends(1)];
    assert!(ends.contains(&78) && ends.iter().all(|code| [75, 78].contains(code)), "{ends:?}");
    for (rank, here, there) in [(0, "vxlan", "vxlan:4790"), (1, "vxlan:4790", "vxlan")] {
        let log = lab.log(rank);
        let why = format!("(group.network) is {there} there and {here} here");
        assert!(ends[rank] == 75 || log.contains(&why), "{log}");
        assert!(!log.contains("the group starts from"), "{log}");
    }
}
