//! A network of the job's own with a way out of it: `network.mode = "uplink"` with a real slirp4netns.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, alive, kill, wait_for};

/// A lab with an uplink. Says SKIP where slirp4netns is not there, or fails where it must be.
fn lab() -> Option<Lab> {
    let lab = Lab::new()?;
    let found = rekindle_engine::launch::uplink::find();
    let why = found.as_ref().err().map(|missing| format!("{missing}; scripts/deps.sh uplink installs it"));
    rekindle_testing::needs("uplink", found.ok(), &why.unwrap_or_default())?;
    rekindle_testing::needs("uplink", outside(), "the machine has no address but on loopback")?;
    Some(lab.set("network.mode", "\"uplink\""))
}

/// An address of the machine that is not on its loopback device.
fn address() -> Ipv4Addr {
    outside().unwrap()
}

fn outside() -> Option<Ipv4Addr> {
    let table = fs::read_to_string("/proc/net/fib_trie").unwrap();
    let lines: Vec<&str> = table.lines().collect();
    let local = lines.windows(2).filter(|pair| pair[1].trim() == "/32 host LOCAL");
    let mut all = local.filter_map(|pair| pair[0].trim().strip_prefix("|-- ")?.parse::<Ipv4Addr>().ok());
    all.find(|address| !address.is_loopback())
}

/// Answers "!" to each byte, on every connection.
fn server(address: Ipv4Addr) -> u16 {
    let listener = TcpListener::bind((address, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || while stream.read_exact(&mut [0]).is_ok() && stream.write_all(b"!").is_ok() {});
        }
    });
    port
}

/// The job, and the port of its server.
fn start(lab: &Lab) -> (Running, u16) {
    let port = server(address());
    (start_with(lab, port), port)
}

fn start_with(lab: &Lab, port: u16) -> Running {
    let folder = lab.path().to_str().unwrap();
    lab.python("trees.py", &["uplink", folder, &address().to_string(), &port.to_string()])
}

/// The only uplink of the job, a child of the supervisor.
fn uplink(run: &Running) -> i32 {
    let mut found = Vec::new();
    wait_for("there is one uplink", || {
        let children = rekindle_os::process::children(run.pid()).into_iter();
        found = children.filter(|pid| alive(*pid) && has_name(*pid, "slirp4netns")).collect();
        found.len() == 1
    });
    found[0]
}

fn has_name(pid: i32, name: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
}

/// It talks to whatever the job sends: it must be a user of its own, with no right over anything, and know nothing of
/// ours.
fn assert_harmless(pid: i32) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    let ids = rekindle_os::process::user_ids(pid).unwrap();
    let user = ids[0];
    // In a container without such numbers it is another user, and so would be the processes of that one.
    assert!(user > 1 << 31 || !rekindle_os::rights::over_the_machine(), "{user}");
    assert_eq!((ids, rekindle_os::process::group_ids(pid).unwrap()), (vec![user; 4], vec![user; 4]));
    assert_eq!(field("Groups:"), "");
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
    assert_eq!(fs::read(format!("/proc/{pid}/environ")).unwrap(), b"");
    for name in ["net", "user", "pid"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
        assert_eq!(of(&pid.to_string()), of("self"), "{name}");
    }
}

/// Waits until the job has made so many connections to the outside.
fn connected(lab: &Lab, run: &mut Running, times: usize) {
    let said = format!("connections {times}\n");
    run.wait_for("the job reaches the server", || lab.output().contains(&said));
    count_on(lab, run, 3);
}

#[test]
fn a_way_out_before_and_after_each_restore() {
    let Some(lab) = lab() else { return };
    let (mut run, port) = start(&lab);
    connected(&lab, &mut run, 1);
    for crashes in 1..=3 {
        let before = uplink(&run);
        assert_harmless(before);
        let pid = run.job_pid(&lab);
        run.snapshot(&lab);
        count_on(&lab, &mut run, 5);
        assert_eq!(lab.output().matches("lost").count(), crashes - 1, "the running job lost one: {}", lab.output());
        assert_eq!(uplink(&run), before);
        run.crash(&lab);
        // The old connection is seen closed, and there is a new one.
        connected(&lab, &mut run, crashes + 1);
        assert!(lab.output().contains(&format!("lost {crashes} ")), "{}", lab.output());
        assert!(!alive(before) && !alive(pid) && uplink(&run) != before);
    }
    // Its supervisor takes all with it, and the next one goes on from the image.
    let last = uplink(&run);
    lab.kill_9(run);
    wait_for("the uplink is gone", || !alive(last));
    let mut run = start_with(&lab, port);
    run.wait_said("the job was restored from image");
    connected(&lab, &mut run, 4);
    let last = uplink(&run);
    finish(&lab, run);
    wait_for("the uplink is gone", || !alive(last));
    lab.assert_all_gone();
}

#[test]
fn the_uplink_of_nobody_is_another_user() {
    let Some(lab) = lab() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let theirs = lab.file("theirs");
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).unwrap();
    let folder = theirs.to_str().unwrap().to_owned();
    let port = server(address()).to_string();
    let mut run = lab.python("trees.py", &["uplink", &folder, &address().to_string(), &port]);
    connected(&lab, &mut run, 1);
    assert_harmless(uplink(&run));
    // It owns the job's network, and who owns it has all rights there: the job has none.
    let status = fs::read_to_string(format!("/proc/{}/status", run.job_pid(&lab))).unwrap();
    assert!(status.contains("Uid:\t65534") && status.contains("CapEff:\t0000000000000000"), "{status}");
    fs::write(theirs.join("finish"), "").unwrap();
    run.ends_with(0);
}

#[test]
fn an_uplink_that_dies_is_started_again_and_the_job_lives() {
    let Some(lab) = lab() else { return };
    let (mut run, _) = start(&lab);
    connected(&lab, &mut run, 1);
    let pid = run.job_pid(&lab);
    for deaths in 1..=2 {
        let before = uplink(&run);
        kill(before, Signal::SIGKILL);
        run.wait_said_times("the job's uplink works again", deaths);
        connected(&lab, &mut run, deaths + 1);
        assert_ne!(uplink(&run), before);
    }
    assert_eq!(run.job_pid(&lab), pid);
    finish(&lab, run);
}

#[test]
fn without_the_program_nothing_is_started_and_its_package_is_named() {
    let Some(lab) = lab() else { return };
    let config = lab.file("rekindle.toml");
    let command = ["--config", config.to_str().unwrap(), "run", "--name", "j", "--", "/bin/true"];
    // Writes the configuration.
    lab.rekindle(&["config", "check"]);
    let out = lab.command(command).env("PATH", Path::new("/nowhere")).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(69), "{said}");
    assert!(said.contains("package slirp4netns"), "{said}");
    assert!(!lab.store().join("j").exists());
}
