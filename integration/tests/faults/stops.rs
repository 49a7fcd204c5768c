//! SIGTERM and kill -9 of the supervisor in each phase, and at random.

use std::time::Duration;

use nix::sys::signal::Signal;
use rekindle_os::process;

use crate::rig::Rig;

/// How each phase is made long: by a fault file of the stand-in, or by a shell command that replaces CRIU.
const PHASES: [(&str, Hold); 8] = [
    ("find", Hold::Driver("fail-state")),
    ("lock", Hold::Driver("fail-lock")),
    ("checkpoint", Hold::Driver("fail-checkpoint")),
    ("before the dump", Hold::Criu("sleep 0.6")),
    ("after the dump", Hold::Criu("\"$real\" \"$@\"; touch \"$0.held\"; sleep 0.6; exit 0")),
    ("restore", Hold::Driver("fail-restore")),
    ("unlock", Hold::Driver("fail-unlock")),
    ("publish", Hold::Said("phase=\"check\"")),
];

#[derive(Clone, Copy)]
enum Hold {
    Driver(&'static str),
    Criu(&'static str),
    Said(&'static str),
}

/// Brings a snapshot to the phase; runs `act` in it.
fn in_phase(rig: &Rig, supervisor: &mut crate::rig::Supervisor<'_>, hold: Hold) {
    match hold {
        Hold::Driver(fault) => {
            rig.standin.fault(fault, "0 delay=600 times=1");
            supervisor.ask();
            supervisor.until("the driver is slow", |rig| !rig.standin.path().join(fault).exists());
        }
        Hold::Criu(shell) => {
            let held = rig.path().join("criu.held");
            let mark = if shell.contains("held") { "" } else { "touch \"$0.held\"; " };
            let _ = std::fs::remove_file(&held);
            rig.criu_fault(&format!("rm -f \"$0-fault\"; {mark}{shell}"));
            supervisor.ask();
            supervisor.until("CRIU is slow", |_| held.exists());
        }
        Hold::Said(words) => {
            supervisor.ask();
            supervisor.said(words);
        }
    }
}

#[test]
fn a_stop_in_each_phase_is_orderly() {
    let Some(rig) = Rig::new() else { return };
    for (phase, hold) in PHASES {
        let mut supervisor = rig.start();
        eprintln!("SIGTERM: {phase}");
        in_phase(&rig, &mut supervisor, hold);
        supervisor.signal(Signal::SIGTERM);
        assert_eq!(supervisor.wait(), Some(143), "{phase}");
        rig.assert_nothing_left();
        rig.assert_store_is_whole();
        assert_eq!(rig.drafts(), Vec::<String>::new(), "{phase}");
        rig.assert_sequence();
    }
    assert!(!rig.images().is_empty());
}

#[test]
fn a_second_stop_in_each_phase_is_at_once() {
    let Some(rig) = Rig::new() else { return };
    for (phase, hold) in PHASES {
        let mut supervisor = rig.start();
        eprintln!("SIGTERM, and stop --now: {phase}");
        in_phase(&rig, &mut supervisor, hold);
        supervisor.signal(Signal::SIGTERM);
        std::thread::sleep(Duration::from_millis(30));
        if !supervisor.has_ended() {
            // As a second signal two seconds later, for which no phase is long enough.
            rig.ask(&["stop", "j", "--now", "--no-wait"]);
        }
        assert_eq!(supervisor.wait(), Some(143), "{phase}");
        rig.assert_nothing_left();
        rig.assert_store_is_whole();
    }
}

#[test]
fn the_supervisor_is_killed_in_each_phase() {
    let Some(rig) = Rig::new() else { return };
    for (phase, hold) in PHASES {
        let mut supervisor = rig.start();
        eprintln!("kill -9: {phase}");
        in_phase(&rig, &mut supervisor, hold);
        supervisor.kill();
        rig.assert_nothing_left();
        // All listed images are complete at any time.
        rig.assert_store_is_whole();
    }
    let mut supervisor = rig.start();
    supervisor.leaves_no_draft();
    supervisor.snapshot();
    supervisor.stop();
}

#[test]
fn the_supervisor_is_killed_and_stopped_during_a_restart() {
    let Some(rig) = Rig::new() else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    supervisor.kill();
    rig.assert_nothing_left();
    for hold in [Hold::Driver("fail-restore"), Hold::Driver("fail-unlock"), Hold::Criu("sleep 0.6")] {
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            let mut supervisor = match hold {
                Hold::Driver(fault) => {
                    rig.standin.fault(fault, "0 delay=2000 times=1");
                    let mut supervisor = rig.run();
                    supervisor.until("the driver is slow", |rig| !rig.standin.path().join(fault).exists());
                    supervisor
                }
                Hold::Criu(shell) | Hold::Said(shell) => {
                    rig.criu_fault(&format!("rm -f \"$0-fault\"; touch \"$0.held\"; {shell}"));
                    let held = rig.path().join("criu.held");
                    let mut supervisor = rig.run();
                    supervisor.until("CRIU is slow", |_| held.exists());
                    let _ = std::fs::remove_file(held);
                    supervisor
                }
            };
            supervisor.signal(signal);
            let code = supervisor.wait();
            assert_eq!(code, (signal == Signal::SIGTERM).then_some(143));
            rig.assert_nothing_left();
            rig.assert_store_is_whole();
        }
    }
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

/// Driver 595 takes the host down with a restored process that is killed while it has its GPU (cuda-checkpoint#53).
#[test]
fn where_the_driver_needs_it_a_process_lets_its_gpu_go_before_a_kill() {
    for (version, parks) in [("595.71.05", true), ("580.159.04", false)] {
        let Some(mut rig) = Rig::new() else { return };
        rig.variable("REKINDLE_TEST_DRIVER", version);
        let fault = rig.standin.path().join("fail-checkpoint");
        for life in ["from the beginning", "from an image"] {
            let mut supervisor = rig.start();
            // One for the last snapshot of the stop, and one before the kill.
            rig.standin.fault("fail-checkpoint", "0 times=2");
            supervisor.signal(Signal::SIGTERM);
            assert_eq!(supervisor.wait(), Some(143), "{version} {life}");
            assert_eq!(!fault.exists(), parks, "{version} {life}");
            rig.clear("fail-checkpoint");
            rig.assert_nothing_left();
        }
        // It is no reason not to end it.
        let mut supervisor = rig.start();
        rig.standin.fault("fail-state", "999");
        supervisor.signal(Signal::SIGTERM);
        supervisor.signal(Signal::SIGTERM);
        assert_eq!(supervisor.wait(), Some(143), "{version}");
        rig.assert_nothing_left();
    }
}

#[test]
fn a_suspended_job_has_nothing_on_the_gpu() {
    let Some(mut rig) = Rig::new() else { return };
    rig.kept(&[]);
    let mut supervisor = rig.start();
    let own = supervisor.pid().cast_signed();
    let is_copier = |pid: &i32| process::text(*pid, "cmdline").is_ok_and(|line| line.contains("copy-gpu-memory"));
    let copiers = || process::children(own).into_iter().filter(is_copier).count();
    for _ in 0..2 {
        supervisor.snapshot();
        assert_eq!(copiers(), 1);
        let (code, said) = rig.ask(&["suspend", "j"]);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(copiers(), 0, "{}", rig.log());
        assert_eq!(rig.cuda_pids(), Vec::<i32>::new());
        let (code, said) = rig.ask(&["resume", "j"]);
        assert_eq!(code, Some(0), "{said}");
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
    }
    supervisor.stop();
    rig.assert_sequence();
}
