//! What a process has set once, which CRIU loses or cannot restore.

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running};

fn until_after_snapshot(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("settings.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    count_on(lab, &mut run, 5);
    run
}

/// Restored twice: the second time from an image of the restored job.
fn is_restored(kind: &str) {
    let Some(lab) = Lab::new() else { return };
    is_restored_in(lab.set("restart.compare", "\"on\""), kind);
}

fn is_restored_in(lab: Lab, kind: &str) {
    let mut run = until_after_snapshot(&lab, kind);
    for _ in 0..2 {
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        run.snapshot(&lab);
    }
    finish(&lab, run);
}

#[test]
fn eventfds_that_are_semaphores() {
    is_restored("semaphores");
    let Some(lab) = Lab::new() else { return };
    is_restored_in(lab.set("restart.compare", "\"on\"").set("job.user", "\"nobody\""), "semaphores");
}

#[test]
fn multicast_groups_of_sockets() {
    is_restored("multicast");
}

/// Personality and memory policy, which only a thread itself can set.
#[test]
fn what_threads_set_for_themselves() {
    is_restored("of-threads");
}

/// The kernel gives it back to nobody.
#[test]
fn a_lost_undo_list_of_semaphores_is_told() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "undo");
    run.crash(&lab);
    run.wait_said("not as before the restore (undo-list): process 1001 (python3): whether its end undoes operations");
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}
