//! Requests of users, from any machine: suspend, resume, rewind; a run that is given up, starts anew or has a deadline.

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::lab::{ENDLESS, Lab, gate, wait_for};

const STORED: &str = "was stored in";
const RESTORED: &str = "the job was restored from image";

impl Lab {
    /// A request on the machine of this rank. Returns its exit code, and what it said.
    fn request(&self, rank: usize, args: &[&str]) -> (i32, String) {
        let output = self.command(rank, rank).args(args).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap(), String::from_utf8_lossy(&said).into_owned())
    }

    fn status(&self, rank: usize) -> String {
        self.request(rank, &["status", &format!("ring.{rank}")]).1
    }
}

/// None of the variables that the job has is taken for configuration.
#[test]
fn the_job_can_run_rekindle_itself() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, 0);
    for _ in 0..2 {
        let mut job = Command::new(env!("CARGO_BIN_EXE_rekindle"));
        job.args(["config", "show"]);
        lab.jobs.push(job);
    }
    lab.run_all();
    for rank in 0..2 {
        assert_eq!(lab.ends(rank), 0, "{}", lab.log(rank));
        assert!(!lab.log(rank).contains("unknown variable"), "{}", lab.log(rank));
    }
}

#[test]
fn a_group_is_suspended_and_resumed_from_any_machine() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(3, ENDLESS);
    lab.set("group.lease", "\"12s\"");
    lab.run_all();
    lab.said(0, STORED, 1);
    let (code, said) = lab.request(1, &["resume", "ring.1"]);
    assert!(code != 0 && said.contains("the job is not suspended"), "{said}");
    let (code, said) = lab.request(1, &["suspend", "ring.1"]);
    assert!(code == 0 && said.contains("job ring.1 is suspended: `rekindle resume ring.1` continues from"), "{said}");
    assert!(!said.contains("only in memory"), "{said}");
    for rank in 0..3 {
        assert!(lab.machines[rank].process_of_job().is_none(), "rank {rank} still runs");
        wait_for("all say so", || lab.status(rank).contains("suspended"));
    }
    let (code, said) = lab.request(2, &["suspend", "ring.2"]);
    assert!(code == 0 && said.contains("is suspended"), "a second time: {said}");
    let (code, said) = lab.request(2, &["snapshot", "ring.2"]);
    assert!(code != 0 && said.contains("the job is suspended"), "{said}");
    let (code, said) = lab.request(2, &["resume", "ring.2"]);
    assert!(code == 0 && said.contains("job ring.2 is running, from image"), "{said}");
    (0..3).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[0, 1, 2]);
}

#[test]
fn a_suspension_that_one_machine_cannot_take_part_in_leaves_all_running() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.set("snapshot.interval", "\"off\"");
    lab.environment.push(("REKINDLE_LOCK_TIMEOUT".into(), "60s".into()));
    lab.set("hooks.on-error", "\"refuse\"");
    lab.set("hooks.before-snapshot", "[\"/bin/sh\", \"-c\", \"test $REKINDLE_JOB != ring.1\"]");
    lab.set("group.lease", "\"20s\"");
    lab.run_all();
    (0..2).for_each(|rank| wait_for("it runs", || lab.out(rank).contains("0\n")));
    let began = Instant::now();
    let (code, said) = lab.request(0, &["suspend", "ring.0"]);
    // Not only once the lock gives up.
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert!(code != 0 && said.contains("the job continues") && said.contains("rank "), "{said}");
    (0..2).for_each(|rank| assert!(lab.machines[rank].process_of_job().is_some(), "rank {rank}"));
    (0..2).for_each(|rank| assert!(!lab.out(rank).contains("WRONG") && !lab.log(rank).contains(RESTORED)));
}

#[test]
fn a_group_goes_back_together_to_the_image_that_one_machine_names() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.set("group.lease", "\"20s\"");
    lab.run_all();
    lab.said(0, STORED, 3);
    lab.said(1, STORED, 3);
    let (code, said) = lab.request(1, &["rewind", "ring.1", "99"]);
    assert!(code != 0 && said.contains("there is no group image 99"), "{said}");
    let (code, said) = lab.request(1, &["rewind", "ring.1", "-2"]);
    assert!(code == 0 && said.contains("job ring.1 is running, from image"), "{said}");
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.said(0, STORED, 6);
    let (code, said) = lab.request(0, &["rewind", "ring.0", "-1"]);
    assert!(code == 0 && said.contains("job ring.0 is running, from image"), "{said}");
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 2));
    lab.completes(&[0, 1]);
}

#[test]
fn a_rule_that_gives_up_on_one_machine_ends_the_run_on_all_with_the_exit_code() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.set("rules", "[{ match = { signal = \"SIGSEGV\" }, action = \"give-up\" }]");
    lab.set("group.lease", "\"12s\"");
    lab.run_all();
    lab.said(1, STORED, 1);
    kill(Pid::from_raw(lab.machines[1].process_of_job().expect("a process")), Signal::SIGSEGV).unwrap();
    assert_eq!((lab.ends(0), lab.ends(1)), (139, 139));
    (0..2).for_each(|rank| assert!(lab.log(rank).contains("given up: rank 1: rule 1: "), "{}", lab.log(rank)));
    assert!(!lab.log(0).contains(RESTORED));
}

#[test]
fn all_start_from_the_beginning_together_or_it_is_refused() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.run_all();
    lab.said(0, STORED, 1);
    lab.machines[1].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(1), lab.ends(0)), (143, 143));
    lab.run(0, 0, &[]);
    lab.run(1, 1, &["--fresh"]);
    assert_eq!(lab.ends(1), 78);
    assert!(lab.log(1).contains("was started with --fresh and rank 0 was not"));
    lab.machines[0].signal(Signal::SIGTERM);
    assert_eq!(lab.ends(0), 143);
    let stored = lab.log(1).matches(STORED).count();
    (0..2).for_each(|rank| lab.run(rank, rank, &["--fresh"]));
    lab.said(0, "the group starts from the beginning", 2);
    // What is lost now goes back to an image of the new run.
    lab.said(1, STORED, stored + 1);
    lab.machines[1].kill();
    lab.run(1, 1, &["--fresh"]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[0, 1]);
    // A completed job, too.
    lab.run_all();
    assert_eq!((lab.ends(0), lab.ends(1)), (2, 2));
    (0..2).for_each(|rank| lab.run(rank, rank, &["--fresh"]));
    lab.completes(&[0, 1]);
}

const ALONE: &str = "the coordinator is away, so the group cannot be asked to stop";

#[test]
fn a_stop_is_served_while_the_coordinator_is_away_once_the_job_has_ended() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    // Longer than this test.
    lab.set("snapshot.grace", "\"1h\"");
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, STORED, 1));
    lab.cluster.stop(0);
    // One machine is told while its job runs. It ends its job before its lease (5 s) can expire.
    lab.machines[0].signal(Signal::SIGTERM);
    lab.said(1, "the coordinator does not answer", 1);
    wait_for("the end of the job", || lab.machines[1].process_of_job().is_none());
    lab.machines[1].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    (0..2).for_each(|rank| lab.said(rank, ALONE, 1));
}

#[test]
fn a_stop_whose_time_is_over_does_not_wait_for_the_coordinator() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.set("snapshot.grace", "\"1s\"");
    lab.set("group.lease", "\"20s\"");
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, STORED, 1));
    lab.cluster.stop(0);
    (0..2).for_each(|rank| lab.machines[rank].signal(Signal::SIGTERM));
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    for rank in 0..2 {
        lab.said(rank, ALONE, 1);
        assert!(!lab.log(rank).contains("order=Kill"), "the job still ran: {}", lab.log(rank));
    }
}

#[test]
fn the_deadline_of_one_machine_ends_the_run_of_all_with_a_last_image() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.set("snapshot.interval", "\"off\"");
    lab.set("snapshot.grace", "\"16s\"");
    let began = Instant::now();
    lab.run(0, 0, &["--deadline", "40s"]);
    lab.run(1, 1, &[]);
    assert_eq!((lab.ends(0), lab.ends(1)), (75, 75), "to be queued again");
    assert!(began.elapsed() < Duration::from_secs(42), "{:?}", began.elapsed());
    (0..2).for_each(|rank| assert_eq!(lab.log(rank).matches(STORED).count(), 1, "{}", lab.log(rank)));
}
