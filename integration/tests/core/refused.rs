//! What CRIU would lose in silence, or dump and not restore: refused with the process, the object and what to do. The job runs on,
//! and has snapshots once it has given the object up.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish};
use crate::supervisor::Lab;

/// Starts a job of `jobs/refused.py`, whose snapshot fails with these words, and works once it has released what it has.
fn is_refused(kind: &str, words: &[&str]) {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.variable("REKINDLE_RETRY_AFTER", "1h");
    let mut run = lab.python("refused.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_said("the snapshot failed, the job continues");
    for words in words {
        assert!(run.err().contains(words), "{kind}: {words} is not in\n{}", run.err());
    }
    assert!(lab.good().is_empty(), "{kind}");
    count_on(&lab, &mut run, 5);
    fs::write(lab.file("release"), "").unwrap();
    run.wait_for("it is given up", || !lab.file("release").exists());
    run.snapshot(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

macro_rules! refused {
    ($($name:ident: $kind:literal, $words:expr;)*) => {
        $(#[test] fn $name() { is_refused($kind, &$words); })*
    };
}

const OF_THE_JOB: &str = "process 1001 (python3) ";

refused! {
    a_thread_with_a_folder_of_its_own: "thread-folder",
        [OF_THE_JOB, "has a thread (1002) with a working directory", "openat(2)"];
    a_thread_with_descriptors_of_its_own: "thread-descriptors",
        [OF_THE_JOB, "has a thread (1002) with descriptors of its own"];
    a_thread_in_a_network_of_its_own: "thread-network",
        [OF_THE_JOB, "has a thread (1002) with its own network namespace", "(setns)"];
    a_thread_with_a_host_name_of_its_own: "thread-host-name",
        [OF_THE_JOB, "has a thread (1002) with its own host name namespace"];
    a_thread_with_system_v_objects_of_its_own: "thread-ipc",
        [OF_THE_JOB, "has a thread (1002) with its own IPC namespace"];
    a_thread_with_a_namespace_of_control_groups: "thread-cgroup",
        [OF_THE_JOB, "has a thread (1002) with its own control group namespace"];
    a_pid_namespace_for_the_next_child: "pid-for-children",
        ["process 1002 (python3) has left its PID namespace for the children"];
    a_child_whose_end_is_told_nobody: "no-exit-signal",
        ["process 1002 (python3) was started so that its parent gets no signal at its end", "fork(2)"];
    a_child_whose_end_is_told_by_another_signal: "exit-signal",
        ["process 1002 (python3) was started so that its parent gets SIGUSR2 at its end"];
    urgent_data_of_a_connection: "urgent",
        [OF_THE_JOB, "has urgent data that it has not read on its socket (descriptor ", "let it read the data"];
    urgent_data_between_other_data: "urgent-inline",
        [OF_THE_JOB, "has urgent data that it has not read on its socket"];
    urgent_data_of_a_unix_socket: "unix-urgent",
        [OF_THE_JOB, "has urgent data that it has not read on its socket"];
    urgent_data_between_other_data_of_a_unix_socket: "unix-urgent-inline",
        [OF_THE_JOB, "has urgent data that it has not read on its socket"];
    an_error_that_a_look_would_take_from_the_job: "reset",
        [OF_THE_JOB, "has an error that it has not seen yet on its UNIX socket", "ECONNRESET"];
    a_child_that_shares_the_folder_of_its_parent: "shared-folder",
        ["process 1002 (python3) shares its working directory and umask with process 1001 (python3)", "without CLONE_FS"];
    a_timer_on_its_way: "sent-timer",
        ["file descriptors are in flight in UNIX sockets (SCM_RIGHTS)", "1 to process 1001 (python3)"];
    a_removed_folder_with_a_file_that_was_in_it: "removed-folder",
        [OF_THE_JOB, "has the removed folder ", "close the folder before it is removed"];
    a_file_where_the_folder_of_a_deleted_one_was: "in-the-way",
        [OF_THE_JOB, "has the deleted file ", "where its folder was there is the file "];
    a_deleted_file_whose_name_is_too_long: "long-name",
        [OF_THE_JOB, "has a deleted file open whose name has 255 bytes", "up to 241 bytes"];
    more_signals_than_the_limit: "pending-signals",
        [OF_THE_JOB, "has signals that it has not handled", "prlimit --sigpending"];
    a_terminal_that_was_hung_up: "hung-up",
        [OF_THE_JOB, "has a terminal that gives only end of file and errors open", "vhangup(2)"];
    two_processes_in_a_session_without_a_leader: "left-session",
        ["(python3) shares a session or a process group", "`setsid sh -c 'a & b & wait'`"];
    two_groups_in_a_session_without_a_leader: "left-groups",
        ["(python3) shares a session or a process group"];
}

/// CRIU would make it as root.
#[test]
fn a_deleted_fifo_of_another_user() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let theirs = lab.file("theirs");
    fs::create_dir(&theirs).unwrap();
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o777)).unwrap();
    let mut run = lab.python("refused.py", &["deleted-fifo", theirs.to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_said(&format!("{OF_THE_JOB}has the deleted FIFO {} open", theirs.join("fifo").display()));
    count_on(&lab, &mut run, 5);
    fs::write(theirs.join("release"), "").unwrap();
    run.wait_for("it is given up", || !theirs.join("release").exists());
    run.snapshot(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    lab.kill_9(run);
}
