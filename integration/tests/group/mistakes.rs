//! What does not fit is told, and nothing is started half.

use crate::lab::{Lab, gate};

#[test]
fn machines_that_disagree_say_about_what() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, 100);
    lab.set("group.wait", "\"5s\"");
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
    lab.set("group.wait", "\"3s\"");
    lab.run(0, 0, &[]);
    lab.run(1, 1, &[]);
    // Nobody is rank 2.
    assert_eq!((lab.ends(0), lab.ends(1)), (75, 75), "to be queued again");
    assert!(lab.log(0).contains("rank 2 did not join in time"), "{}", lab.log(0));
}

#[test]
fn a_part_alone_is_not_restored() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, 3000);
    lab.run_all();
    lab.said(0, "was stored in", 1);
    lab.machines[0].signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    let output = lab.command(0, 0).args(["restore", "ring.0"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("only restored as a whole"), "{said}");
}
