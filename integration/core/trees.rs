//! Jobs of many processes, and what they share: each killed with -9 after a snapshot, as in [`crate::kinds`].

use std::fs;

use crate::kinds::{count_on, finish};
use crate::launch::{end, look};
use crate::supervisor::{Lab, Running};

fn start(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("trees.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run
}

/// A field of /proc/PID/status.
fn status(pid: i32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap().trim().to_string()
}

#[test]
fn an_io_uring_is_not_there_before_and_after_a_restore() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "uring");
    assert!(lab.output().contains("first -38\n"), "{}", lab.output());
    for _ in 0..3 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 3);
        run.crash(&lab);
        count_on(&lab, &mut run, 3);
        let pid = run.job_pid(&lab);
        assert_eq!((status(pid, "Seccomp_filters"), status(pid, "NoNewPrivs")), ("1".into(), "0".into()));
    }
    finish(&lab, run);
}

/// The filter is set while the job is root yet: setuid programs still work.
#[test]
fn a_user_has_no_io_uring_and_keeps_setuid_programs() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let (mut run, seen) = look(&lab);
    let pid = run.job_pid(&lab);
    assert_eq!((status(pid, "Seccomp"), &seen["no-new-privileges"]), ("2".into(), &"0".into()));
    end(&lab, run);
}

#[test]
fn a_job_that_may_have_an_io_uring_is_not_dumped_while_it_has_one() {
    let Some(lab) = Lab::new().map(|lab| lab.set("job.allow-io-uring", "true")) else { return };
    if fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|text| text.trim() != "0") {
        return eprintln!("SKIP: kernel.io_uring_disabled is set");
    }
    let mut run = start(&lab, "uring-open");
    assert!(!lab.output().contains("ring -"), "{}", lab.output());
    assert_eq!(status(run.job_pid(&lab), "Seccomp"), "0");
    run.signal(nix::sys::signal::Signal::SIGUSR1);
    run.wait_said("snapshot failed");
    assert!(run.err().contains("an io_uring") && run.err().contains("job.allow-io-uring"), "{}", run.err());
    assert!(lab.good().is_empty());
    finish(&lab, run);
}
