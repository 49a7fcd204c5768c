//! Groups without an etcd of others: rank 0 runs one.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::lab::{ENDLESS, Lab, gate, wait_for};

const STORED: &str = "was stored in";
const COMMITTED: &str = "is committed";
const RESTORED: &str = "the job was restored from image";

fn lab(members: u32, machines: u32, steps: u32) -> Lab {
    let mut lab = Lab::sharing(members, machines, steps);
    lab.set("group.coordinator", "\"local\"");
    lab
}

#[test]
fn a_process_the_first_supervisor_and_a_whole_run_may_end() {
    if !gate() {
        return;
    }
    let mut lab = lab(2, 2, ENDLESS);
    lab.run_all();
    lab.said(1, STORED, 1);
    assert_eq!(lab.own_etcds().len(), 1);

    let victim = lab.machines[1].process_of_job().expect("a process of the job");
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));

    // Its etcd ends with it, and begins again with its data.
    lab.machines[0].kill();
    wait_for("the end of etcd", || lab.own_etcds().is_empty());
    lab.run(0, 0, &[]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 2));
    assert!(!lab.log(1).contains("is another one now"), "{}", lab.log(1));

    lab.said(1, STORED, 3);
    lab.machines[1].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(1), lab.ends(0)), (143, 143));
    assert!(lab.own_etcds().is_empty() && !lab.job(0).join("coordinator.json").exists());

    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 3));
    lab.completes(&[0, 1]);
    assert!(lab.own_etcds().is_empty());
}

#[test]
fn rank_0_continues_on_another_machine_with_its_store() {
    if !gate() {
        return;
    }
    let mut lab = lab(2, 3, ENDLESS);
    lab.run_all();
    // The other machine has what is stored, and not what is in memory.
    lab.said(1, COMMITTED, 1);
    lab.machines[0].kill();
    lab.run(2, 0, &[]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[1, 2]);
}

#[test]
fn an_etcd_without_data_learns_from_the_members_what_there_was() {
    if !gate() {
        return;
    }
    let mut lab = Lab::with_etcd(2, 3, 0, ENDLESS);
    let file = lab.path("etcd.json");
    lab.set("group.coordinator", &format!("\"local:{}\"", file.display()));
    lab.set("replica.url", &format!("\"file://{}\"", lab.path("replica").display()));
    std::fs::create_dir(lab.path("replica")).unwrap();
    lab.run_all();
    lab.said(0, "was replicated", 2);
    // The machine is gone, with its disk; the file with the address is on another one.
    lab.machines[0].kill();
    std::fs::rename(lab.store_of(0), lab.path("gone")).unwrap();
    lab.run(2, 0, &[]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.said(1, "is another one now", 1);
    lab.completes(&[1, 2]);
}

#[test]
fn what_is_missing_is_named_and_nothing_is_started() {
    if !gate() {
        return;
    }
    let mut lab = lab(2, 2, 100);
    lab.set("group.wait", "\"2s\"");
    // Nobody is rank 0, or its store is another one.
    lab.run(1, 1, &[]);
    assert_eq!(lab.ends(1), 75);
    let log = lab.log(1);
    assert!(log.contains("coordinator.json") && log.contains("--coordinator local:FILE"), "{log}");

    // etcd is not installed.
    let programs = lab.path("programs");
    std::fs::create_dir(&programs).unwrap();
    for program in ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].iter().flat_map(|dir| std::fs::read_dir(dir).unwrap()) {
        let program = program.unwrap();
        if program.file_name() != "etcd" {
            let _ = std::os::unix::fs::symlink(program.path(), programs.join(program.file_name()));
        }
    }
    let mut command = lab.command(0, 0);
    command.env("PATH", programs).args(["run", "--name", "ring", "--node-rank", "0", "--nodes", "2", "--"]);
    let output = command.arg("/bin/true").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(69) && said.contains("package etcd-server"), "{said}");
    assert!(lab.own_etcds().is_empty());
}

#[test]
fn the_address_of_an_earlier_run_is_replaced() {
    if !gate() {
        return;
    }
    let mut lab = lab(2, 3, ENDLESS);
    lab.run_all();
    lab.said(1, COMMITTED, 1);
    lab.machines[0].kill();
    lab.machines[1].kill();
    assert!(lab.job(0).join("coordinator.json").exists());
    // The file leads nowhere until rank 0 is there, on another machine.
    lab.run(1, 1, &[]);
    lab.said(1, "the coordinator does not answer", 1);
    std::thread::sleep(Duration::from_secs(1));
    lab.run(2, 0, &[]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[1, 2]);
}

#[test]
fn a_first_rank_that_is_lost_is_waited_for_and_then_the_run_ends() {
    if !gate() {
        return;
    }
    let mut lab = lab(2, 2, ENDLESS);
    // Their start must not take longer, on a busy machine.
    lab.set("group.wait", "\"20s\"");
    lab.run_all();
    lab.said(1, STORED, 1);
    lab.machines[0].kill();
    wait_for("the job ends", || lab.machines[1].process_of_job().is_none());
    assert_eq!(lab.ends(1), 75);
    assert!(lab.log(1).contains("did not answer in time"), "{}", lab.log(1));
}
