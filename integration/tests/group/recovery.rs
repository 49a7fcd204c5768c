//! What is lost comes back as a whole: jobs, supervisors, machines, their network.

use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::lab::{ENDLESS, Lab, gate, wait_for};

const STORED: &str = "was stored in";
const RESTORED: &str = "the job was restored from image";

#[test]
fn all_go_back_together_when_a_process_a_supervisor_or_a_machine_is_lost() {
    if !gate() {
        return;
    }
    let mut lab = Lab::with_spare(3, ENDLESS);
    lab.run_all();
    lab.said(1, STORED, 1);

    let victim = lab.machines[1].process_of_job().expect("a process of the job");
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    (0..3).for_each(|rank| lab.said(rank, RESTORED, 1));

    lab.machines[2].kill();
    lab.run(2, 2, &[]);
    (0..3).for_each(|rank| lab.said(rank, RESTORED, 2));

    // Another machine takes the place of rank 0, with its store: another address, the same connections.
    lab.said(0, STORED, 3);
    lab.machines[0].kill();
    lab.run(3, 0, &[]);
    (0..3).for_each(|rank| lab.said(rank, RESTORED, 3));

    lab.completes(&[1, 2, 3]);
}

#[test]
fn a_stop_is_one_of_all_and_the_next_run_continues() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.run_all();
    lab.said(0, STORED, 1);
    lab.machines[1].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(1), lab.ends(0)), (143, 143));
    lab.run_all();
    lab.said(0, RESTORED, 1);
    // Queued again, on request of one.
    lab.machines[0].signal(Signal::SIGUSR2);
    assert_eq!((lab.ends(0), lab.ends(1)), (75, 75));
    lab.run_all();
    lab.completes(&[0, 1]);
}

#[test]
fn a_machine_that_is_cut_off_ends_its_job_before_its_lease_does() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.run_all();
    lab.said(0, STORED, 2);
    lab.machines[1].cut_off(true);
    // The lease is 5 s, and etcd cannot end it before.
    wait_for("the job ends", || {
        // In this order: time passes between the two on a busy machine.
        let expired = lab.log(1).contains("its lease has expired");
        let ended = lab.machines[1].process_of_job().is_none();
        assert!(ended || !expired, "the job must have ended before");
        ended
    });
    lab.machines[1].cut_off(false);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[0, 1]);
}

#[test]
fn a_supervisor_that_was_killed_and_runs_again_is_not_waited_for() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    // The first start of a group waits for one lease.
    lab.set("group.lease", "\"60s\"");
    lab.run_all();
    lab.said(1, STORED, 2);
    lab.machines[1].kill();
    let began = std::time::Instant::now();
    lab.run(1, 1, &[]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    // Its lease would have lived for longer than this: it is renewed each quarter of its time.
    assert!(began.elapsed() < std::time::Duration::from_secs(45), "{:?}", began.elapsed());
    lab.completes(&[0, 1]);
}

#[test]
fn a_machine_with_an_empty_store_gets_its_part_from_the_replica() {
    if !gate() {
        return;
    }
    let mut lab = Lab::with_spare(2, ENDLESS);
    let replica = format!("\"file://{}\"", lab.path("replica").display());
    std::fs::create_dir(lab.path("replica")).unwrap();
    lab.set("replica.url", &replica);
    lab.run_all();
    lab.said(0, "was replicated", 2);
    // The machine is gone, with its disk and its memory.
    let memory = lab.memory_of(0);
    lab.machines[0].lose(&memory);
    std::fs::rename(lab.path("store0"), lab.path("gone")).unwrap();
    lab.run(2, 0, &[]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[1, 2]);
}

/// Somebody removes the records of the group images. The machine that stays has removed its part of the one that is whole in
/// the replica, because a newer one was committed, and then the other machine is lost.
#[test]
fn the_replica_has_all_that_is_left_and_its_record_was_removed() {
    if !gate() {
        return;
    }
    let mut lab = Lab::with_spare(2, ENDLESS);
    let (replica, away) = (lab.path("replica"), lab.path("away"));
    std::fs::create_dir(&replica).unwrap();
    lab.set("replica.url", &format!("\"file://{}\"", replica.display()));
    lab.set("store.keep-last", "1");
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, "was replicated", 1));
    std::fs::rename(&replica, &away).unwrap();
    let is_ours = |line: &&str| line.contains("was replicated");
    let id = |line: &str| line.split("image ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    // One that was on its way is told of a moment later.
    let replicated = || -> Vec<String> { lab.log(1).lines().filter(is_ours).map(id).collect() };
    let removed = lab.cluster.control(0, &["del", "--prefix", "/rekindle/1/ring/images/"]);
    assert_ne!(removed.trim(), "0");
    wait_for("newer images only", || {
        let listed = lab.command(1, 1).args(["list", "ring.1"]).output().unwrap();
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        listed.contains("Z") && replicated().iter().all(|id| !listed.contains(id.as_str()))
    });
    let memory = lab.memory_of(0);
    lab.machines[0].lose(&memory);
    std::fs::rename(lab.path("store0"), lab.path("gone")).unwrap();
    std::fs::rename(&away, &replica).unwrap();
    lab.run(2, 0, &[]);
    (0..2).for_each(|rank| lab.said(rank, "was fetched from the replica", 1));
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[1, 2]);
}

#[test]
fn machines_with_empty_stores_continue_from_the_replica() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    let replica = format!("\"file://{}\"", lab.path("replica").display());
    std::fs::create_dir(lab.path("replica")).unwrap();
    lab.set("replica.url", &replica);
    lab.set("replica.keep-last", "1");
    // The store keeps less than the replica needs time for.
    lab.set("store.keep-last", "1");
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, "was replicated", 3));
    // All machines are gone, with their disks and their memory.
    for rank in 0..2 {
        let memory = lab.memory_of(rank);
        lab.machines[rank].lose(&memory);
        std::fs::rename(lab.path(&format!("store{rank}")), lab.path(&format!("gone{rank}"))).unwrap();
    }
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, "was fetched from the replica", 1));
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[0, 1]);
}

#[test]
fn a_new_coordinator_and_machines_with_empty_stores_continue_from_the_replica() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    let replica = format!("\"file://{}\"", lab.path("replica").display());
    std::fs::create_dir(lab.path("replica")).unwrap();
    lab.set("replica.url", &replica);
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, "was replicated", 1));
    // The last image of the run is sent before the end.
    lab.machines[1].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    for rank in 0..2 {
        std::fs::rename(lab.path(&format!("store{rank}")), lab.path(&format!("gone{rank}"))).unwrap();
        let _ = std::fs::rename(lab.path(&format!("memory{rank}")), lab.path(&format!("gone-memory{rank}")));
    }
    lab.cluster.control(0, &["del", "--prefix", "/rekindle/"]);
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.completes(&[0, 1]);
}

#[test]
fn a_job_whose_supervisor_stands_still_has_ended_before_the_others_continue() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    // So that its init has some seconds on a busy machine.
    lab.set("group.lease", "\"20s\"");
    lab.run_all();
    lab.said(0, STORED, 2);
    lab.machines[1].signal(Signal::SIGSTOP);
    let began = std::time::Instant::now();
    let process = lab.machines[1].process_of_job().expect("a process of the job");
    let has_ended = || !std::fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| !line.is_empty());
    assert!(!has_ended());
    // The others wait for the lease before they begin the next epoch.
    let mut lived = began.elapsed();
    while !has_ended() && began.elapsed() < Duration::from_secs(25) {
        std::thread::sleep(Duration::from_millis(10));
        // Before the look: this test, too, may get no processor for a while.
        let now = began.elapsed();
        if !has_ended() {
            lived = now;
        }
    }
    lab.machines[1].signal(Signal::SIGCONT);
    assert!(lived < Duration::from_secs(20), "the job lived for {lived:?} without its supervisor");
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    lab.said(1, "was ended by its init", 1);
    lab.machines[0].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
    (0..2).for_each(|rank| assert!(!lab.out(rank).contains("WRONG")));
}

#[test]
fn a_machine_whose_network_has_smaller_packets_takes_the_place_of_another() {
    if !gate() {
        return;
    }
    let mut lab = Lab::with_spare(2, ENDLESS);
    lab.machines[2].set_mtu(1300);
    lab.run_all();
    lab.said(1, STORED, 2);
    lab.machines[1].kill();
    lab.run(2, 1, &[]);
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    // Where a bridge has no br_netfilter, larger packets would be dropped, and the connections would stand still.
    for machine in [0, 2] {
        wait_for("small packets on all machines", || lab.machines[machine].device_of_job().contains("mtu 1250 "));
    }
    lab.completes(&[0, 2]);
}

/// The first rank accepts the connection of the second one when it is told to. Each ends with 0 if the other has received
/// what it sent.
const LATE: &str = r#"
import os, socket, time
here, first = os.environ["REKINDLE_GROUP_OWN"], os.environ["REKINDLE_GROUP_FIRST"]
if here == first:
    listener = socket.create_server((here, 5556))
    while not os.path.exists(os.environ["RING_END"] + ".accept"):
        time.sleep(0.02)
    other, _ = listener.accept()
    print("accepted", flush=True)
    assert other.recv(5, socket.MSG_WAITALL) == b"hello"
else:
    while True:
        try:
            other = socket.create_connection((first, 5556))
            break
        except OSError:
            time.sleep(0.05)
    other.sendall(b"hello")
while True:
    # The first rank says which round is the last.
    word = b"final" if here == first and os.path.exists(os.environ["RING_END"]) else b"again"
    other.sendall(word)
    told = other.recv(5, socket.MSG_WAITALL)
    assert told in (b"again", b"final")
    if b"final" in (word, told):
        break
    time.sleep(0.02)
# The second rank ends last: it has received all.
if here == first:
    assert other.recv(3, socket.MSG_WAITALL) == b"bye"
else:
    other.sendall(b"bye")
    time.sleep(2)
"#;

#[test]
fn a_connection_that_is_not_accepted_yet_is_not_lost() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, 0);
    for _ in 0..2 {
        let mut job = Command::new("python3");
        job.args(["-c", LATE]);
        lab.jobs.push(job);
    }
    lab.run_all();
    lab.said(0, "1 connection of the job waits to be accepted at port 5556", 1);
    std::fs::write(lab.path("end.accept"), "").unwrap();
    wait_for("it is accepted", || lab.out(0).contains("accepted"));
    // One that is taken without it, because it has waited for two seconds, is not the newest.
    let stored = |rank| lab.log(rank).matches(STORED).count();
    let before = [0, 1].map(stored);
    (0..2).for_each(|rank| lab.said(rank, STORED, before[rank] + 2));
    let all = lab.machines[1].processes();
    let (process, _) = all.iter().find(|(_, line)| line.contains("5556")).expect("a process of the job");
    kill(Pid::from_raw(*process), Signal::SIGKILL).unwrap();
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    std::fs::write(lab.path("end"), "").unwrap();
    assert_eq!((lab.ends(0), lab.ends(1)), (0, 0));
}

/// The first rank sends more than the second one takes at once, and completes. The second one reads it later.
const LAST_WORDS: &str = r#"
import os, socket, sys, time
here, first = os.environ["REKINDLE_GROUP_OWN"], os.environ["REKINDLE_GROUP_FIRST"]
words = bytes(range(250)) * 800
if here == first:
    listener = socket.create_server((here, 5556))
    other, _ = listener.accept()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(words))
    other.sendall(words)
else:
    while True:
        try:
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            other.connect((first, 5556))
            break
        except OSError:
            time.sleep(0.05)
    time.sleep(2)
    got = b""
    while piece := other.recv(65536):
        got += piece
    assert got == words, len(got)
"#;

#[test]
fn what_a_machine_has_sent_arrives_after_it_has_completed() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, 0);
    lab.set("snapshot.interval", "\"off\"");
    for _ in 0..2 {
        let mut job = Command::new("python3");
        job.args(["-c", LAST_WORDS]);
        lab.jobs.push(job);
    }
    lab.set("group.lease", "\"20s\"");
    lab.run_all();
    assert_eq!((lab.ends(0), lab.ends(1)), (0, 0));
    (0..2).for_each(|rank| assert!(!lab.log(rank).contains("all machines restart"), "{}", lab.log(rank)));
}

#[test]
fn a_machine_that_cannot_restore_now_does_not_take_the_group_to_an_older_image() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    // A hook that refuses as long as this file is there, on all machines.
    let (full, hook) = (lab.path("full"), lab.path("hook"));
    rekindle_testing::program(&hook, &format!("#!/bin/sh\ntest ! -e {}\n", full.display()));
    lab.set("hooks.before-restore", &format!("[{:?}]", hook.display().to_string()));
    lab.set("hooks.on-error", "\"refuse\"");
    lab.set("restart.backoff", "\"1s\"");
    lab.set("group.lease", "\"12s\"");
    // Its newest group image stays the newest.
    lab.set("snapshot.interval", "\"off\"");
    lab.run_all();
    // Not before their connections are accepted.
    wait_for("the jobs to talk", || (0..2).all(|rank| !lab.out(rank).is_empty()));
    for _ in 0..2 {
        let output = lab.command(0, 0).args(["snapshot", "ring.0"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    (0..2).for_each(|rank| lab.said(rank, STORED, 2));
    lab.said(0, "group image 2 is committed", 1);
    std::fs::write(&full, "").unwrap();
    let victim = lab.machines[1].process_of_job().expect("a process of the job");
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    // An image with two such failures would be passed over.
    lab.said(0, "the group starts from group image 2", 4);
    std::fs::remove_file(&full).unwrap();
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    (0..2).for_each(|rank| assert!(!lab.log(rank).contains("starts from group image 1"), "{}", lab.log(rank)));
    lab.completes(&[0, 1]);
}

#[test]
fn a_part_that_is_gone_takes_the_group_to_an_older_image() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.set("group.lease", "\"12s\"");
    lab.set("snapshot.interval", "\"off\"");
    lab.run_all();
    wait_for("the jobs to talk", || (0..2).all(|rank| !lab.out(rank).is_empty()));
    for _ in 0..2 {
        let output = lab.command(0, 0).args(["snapshot", "ring.0"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    (0..2).for_each(|rank| lab.said(rank, STORED, 2));
    lab.said(0, "group image 2 is committed", 1);
    // All copies of one machine's part: a slot in memory without its manifest is empty.
    let mut manifests = Command::new("grep");
    manifests.args(["-rl", "--include=manifest.json", "\"id\": *\"000002-"]);
    let manifests = manifests.arg(lab.job(1)).arg(lab.memory_of(1)).output().unwrap();
    let manifests = String::from_utf8_lossy(&manifests.stdout).into_owned();
    let is_stored = |folder: &std::path::Path| folder.to_string_lossy().contains("/000002-");
    let folders: Vec<_> = manifests.lines().map(|path| std::path::Path::new(path).parent().unwrap()).collect();
    assert!(folders.iter().any(|folder| is_stored(folder)), "{manifests}");
    for folder in folders {
        match is_stored(folder) {
            true => std::fs::remove_dir_all(folder).unwrap(),
            false => std::fs::remove_file(folder.join("manifest.json")).unwrap(),
        }
    }
    let victim = lab.machines[0].process_of_job().expect("a process of the job");
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    (0..2).for_each(|rank| lab.said(rank, RESTORED, 1));
    (0..2).for_each(|rank| lab.said(rank, "the group starts from group image 1", 1));
    lab.completes(&[0, 1]);
}

/// A disk on which a write does not end, whatever kills the process: a file system that is frozen.
struct Disk {
    folder: std::path::PathBuf,
}

impl Disk {
    fn new(lab: &Lab) -> Option<Disk> {
        let (file, folder) = (lab.path("disk"), lab.path("mounted"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let run = |program: &str, args: &[&str]| {
            let output = Command::new(program).args(args).arg(&file).output();
            output.is_ok_and(|output| output.status.success())
        };
        let mounted = run("mkfs.ext4", &["-q"]) && {
            let mount = Command::new("mount").args(["-o", "loop"]).arg(&file).arg(&folder).status();
            mount.is_ok_and(|status| status.success())
        };
        rekindle_testing::require("disks", mounted, "no mkfs.ext4 or no loop devices").then_some(Disk { folder })
    }

    fn freeze(&self, how: &str) -> bool {
        Command::new("fsfreeze").arg(how).arg(&self.folder).status().is_ok_and(|status| status.success())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.freeze("-u");
        let _ = Command::new("umount").arg("-l").arg(&self.folder).status();
    }
}

#[test]
fn a_leader_whose_job_cannot_be_killed_does_not_stop_the_others() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    let Some(disk) = Disk::new(&lab) else { return };
    // Their start must not take longer, on a busy machine.
    lab.set("group.wait", "\"20s\"");
    lab.set("snapshot.interval", "\"off\"");
    // Only the job of rank 0 writes there.
    let (ring, written) = (lab.ring(), disk.folder.join("written"));
    let words = ring.each_ref().map(|word| format!("'{word}'")).join(" ");
    let mut first = Command::new("sh");
    first.args(["-c", &format!("(while :; do echo x > {}; sleep 0.1; done) & exec {words}", written.display())]);
    let mut second = Command::new(&ring[0]);
    second.args(&ring[1..]);
    lab.jobs.extend([first, second]);
    // The first one leads.
    lab.run(0, 0, &[]);
    let leads = || {
        let output = lab.command(0, 0).args(["status", "ring.0"]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).contains("rank 0 (node-0) leads")
    };
    wait_for("a leader", leads);
    lab.run(1, 1, &[]);
    wait_for("a file", || written.exists());
    // The shell of rank 0 has the same words in its command line. The interpreter may be a version manager's, by any path.
    let job = |line: &str| line.contains("ring.py") && !line.starts_with("sh ");
    let runs = |rank: usize| lab.machines[rank].processes().iter().any(|(_, line)| job(line));
    wait_for("the jobs", || (0..2).all(runs));
    assert!(disk.freeze("-f"));
    let is_stuck = |(pid, _): (i32, String)| rekindle_os::process::state(pid) == Some('D');
    std::thread::sleep(Duration::from_secs(1));
    wait_for("a write that does not end", || lab.machines[0].processes().into_iter().any(is_stuck));
    let victim = lab.machines[1].process_of_job().expect("a process of the job");
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    assert_eq!(lab.ends(1), 75, "to be queued again");
    assert!(lab.log(1).contains("rank 0 did not end its job in time"), "{}", lab.log(1));
    // The next run does not wait for ever for the one that cannot leave.
    lab.run(1, 1, &[]);
    assert_eq!(lab.ends(1), 75);
    let why = "rank 0 of the run before did not leave the group in time";
    assert!(lab.log(1).contains(why), "{}", lab.log(1));
    assert_eq!(lab.machines[0].has_ended(), None);
    assert!(disk.freeze("-u"));
    assert_eq!(lab.ends(0), 75);
}
