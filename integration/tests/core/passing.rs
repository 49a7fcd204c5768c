//! Descriptors on their way through UNIX sockets at the moment of a snapshot.

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running};

fn start(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("passing.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run
}

/// Lets each process receive what it was sent, which it compares.
fn receive(lab: &Lab, run: &mut Running, by: &[&str]) {
    std::fs::write(lab.file("receive"), "").unwrap();
    for words in by {
        run.wait_printed(words);
    }
    count_on(lab, run, 3);
}

#[test]
fn those_in_one_direction_come_back() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "sent");
    run.snapshot(&lab);
    // The same from an image of a restored job.
    for _ in 0..2 {
        run.crash(&lab);
        count_on(&lab, &mut run, 3);
        run.snapshot(&lab);
    }
    receive(&lab, &mut run, &["has from-child gone 7\n", "has from-brother\n"]);
    std::fs::remove_file(lab.file("receive")).unwrap();
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    receive(&lab, &mut run, &[]);
    let times = |words: &str| lab.output().matches(words).count();
    run.wait_for("all have it again", || times("gone 7\n") == 1 && times("has from-brother\n") == 1);
    assert!(!run.err().contains("trying the snapshot again"), "{}", run.err());
    finish(&lab, run);
}

#[test]
fn those_that_would_be_exchanged_or_lost_are_refused_until_they_are_received() {
    let both = "1 to process 1001 (python3) from process 1002 (python3), 1 to process 1002 (python3) from process 1001";
    let one = "1 to process 1001 (python3) from process 1002 (python3);";
    let unknown = "1 to process 1001 (python3);";
    let kinds = [
        ("both", both, "has from-parent\n"),
        ("pipe", one, "has through-a-pipe\n"),
        ("stream", one, "has from-child\n"),
        ("empty", unknown, "has from-child\n"),
    ];
    for (kind, words, by) in kinds {
        let Some(lab) = Lab::new().map(|lab| lab.variable("REKINDLE_RETRY_AFTER", "1h")) else {
            return;
        };
        let mut run = start(&lab, kind);
        run.signal(Signal::SIGUSR1);
        run.wait_said("snapshot failed, the job continues");
        assert!(run.err().contains(words), "{kind}: {}", run.err());
        assert!(!run.err().contains("trying the snapshot again"), "nothing moves: {}", run.err());
        assert!(lab.good().is_empty());
        count_on(&lab, &mut run, 3);
        receive(&lab, &mut run, &[by]);
        run.signal(Signal::SIGUSR1);
        run.wait_for("a snapshot", || !lab.good().is_empty());
        run.crash(&lab);
        count_on(&lab, &mut run, 3);
        finish(&lab, run);
    }
}

#[test]
fn those_that_are_received_soon_only_delay_it() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.noting_the_first_dump("dumped");
    let mut run = start(&lab, "later");
    run.snapshot(&lab);
    run.wait_said("trying the snapshot again: file descriptors are in flight");
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}
