//! A network of the job's own with a way out of it: `network.uplink = "user"` with a real slirp4netns.

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
    if let Err(missing) = rekindle::launch::uplink::find() {
        let required = std::env::var("REKINDLE_TEST_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|it| it == "uplink"), "REKINDLE_TEST_REQUIRE names uplink: {missing}");
        eprintln!("SKIP: {missing}; scripts/deps.sh uplink installs it");
        return None;
    }
    if outside().is_none() {
        eprintln!("SKIP: the machine has no address but on loopback");
        return None;
    }
    Some(lab.set("network.mode", "\"private\"").set("network.uplink", "\"user\""))
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

/// The job's uplink, of which there is one.
fn uplink(lab: &Lab) -> i32 {
    let mut found = Vec::new();
    wait_for("there is one uplink", || {
        found = lab.processes().into_iter().filter(|(_, line)| line.contains("slirp4netns")).collect();
        found.len() == 1
    });
    found[0].0
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
        let before = uplink(&lab);
        let pid = run.job_pid(&lab);
        run.snapshot(&lab);
        count_on(&lab, &mut run, 5);
        assert_eq!(lab.output().matches("lost").count(), crashes - 1, "the running job lost one: {}", lab.output());
        assert_eq!(uplink(&lab), before);
        run.crash(&lab);
        // The old connection is seen closed, and there is a new one.
        connected(&lab, &mut run, crashes + 1);
        assert!(lab.output().contains(&format!("lost {crashes} ")), "{}", lab.output());
        assert!(!alive(before) && !alive(pid) && uplink(&lab) != before);
    }
    // Its supervisor takes all with it, and the next one goes on from the image.
    let last = uplink(&lab);
    lab.kill_9(run);
    wait_for("the uplink is gone", || !alive(last));
    let mut run = start_with(&lab, port);
    run.wait_said("the job is back from image");
    connected(&lab, &mut run, 4);
    let last = uplink(&lab);
    finish(&lab, run);
    assert!(!alive(last));
    lab.assert_all_gone();
}

#[test]
fn an_uplink_that_dies_is_started_again_and_the_job_lives() {
    let Some(lab) = lab() else { return };
    let (mut run, _) = start(&lab);
    connected(&lab, &mut run, 1);
    let pid = run.job_pid(&lab);
    for deaths in 1..=2 {
        let before = uplink(&lab);
        kill(before, Signal::SIGKILL);
        run.wait_said_times("the job's uplink is there again", deaths);
        connected(&lab, &mut run, deaths + 1);
        assert_ne!(uplink(&lab), before);
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
