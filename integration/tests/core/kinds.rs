//! Jobs of many kinds, each killed with -9 after a snapshot and compared with what it would have become.

use std::fs;
use std::net::UdpSocket;

use nix::sys::signal::Signal;

use crate::supervisor::{LIMIT, Lab, Running, assert_counts_up, job_file, numbers, tail};

/// Starts the job, lets it work, takes a snapshot, lets it work on.
pub(crate) fn until_after_snapshot(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("kinds.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    count_on(lab, &mut run, 5);
    run
}

/// Waits until the job counted on by this much, and its supervisor knows that it runs: a stop before takes no image.
pub(crate) fn count_on(lab: &Lab, run: &mut Running, by: usize) {
    let before = numbers(&lab.output()).len();
    run.job_pid(lab);
    run.wait_for("the job counts", || numbers(&lab.output()).len() >= before + by);
}

/// Lets the job make its last checks.
pub(crate) fn finish(lab: &Lab, run: Running) {
    std::fs::write(lab.file("finish"), "").unwrap();
    let (code, out, said) = run.finish(LIMIT);
    assert_eq!(code, 0, "exit code\n--- output\n{}\n--- messages\n{}", tail(&out), tail(&said));
    let output = lab.output();
    assert!(output.ends_with("done\n"), "{output}");
    assert_eq!(output.matches("done").count(), 1, "it ended twice\n{output}\n{said}");
    assert_counts_up(&output);
}

fn comes_back(kind: &str) -> Option<Lab> {
    let lab = Lab::new()?;
    let mut run = until_after_snapshot(&lab, kind);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
    Some(lab)
}

macro_rules! kinds {
    ($($name:ident: $kind:literal,)*) => {
        $(#[test] fn $name() { comes_back($kind); })*
    };
}

kinds! {
    a_lease_on_a_file: "read-lease",
    what_only_mattered_when_it_was_opened: "opened",
    watches_with_flags: "watch-flags",
    files_without_names_that_are_watched_or_mapped: "nameless-files",
    packets_and_addresses_of_odd_sockets: "odd-sockets",
    connections_that_are_full: "full",
    a_terminal_that_children_have_from_their_session: "inherited-terminal",
    terminals_of_the_job_in_several_sessions: "terminals",
    unix_sockets_whose_paths_were_removed_or_replaced: "moved-sockets",
    a_unix_socket_that_was_renamed: "renamed-socket",
    signals_for_what_arrives: "async-input",
    unix_datagrams_that_wait_with_their_senders: "datagrams",
    unix_datagrams_behind_an_empty_one_in_a_pair: "empty-datagram",
    terminals_with_what_nobody_has_read_yet: "unread-terminals",
    a_filter_that_one_thread_has: "one-thread-filtered",
    a_descriptor_on_its_way_in_one_direction: "sent",
    threads: "threads",
    two_hundred_threads: "200-threads",
    children_and_pipes_in_flight: "pipes",
    a_connection_within_the_job: "tcp-within",
    data_between_processes_that_arrives_during_the_dump: "tcp-flowing",
    a_deleted_file: "ghost",
    timers_and_sleeps: "timers",
    a_timer_whose_ticks_are_read_late: "ticks",
    a_program_whose_file_is_deleted: "deleted-program",
    files_with_several_names: "several-names",
    descriptors_of_its_own_namespaces: "own-namespaces",
    a_signal_handler_on_a_stack_of_its_own: "handler",
    a_program_without_random_addresses: "fixed-addresses",
    timers_of_dead_threads_and_of_cpu_time: "posix-timers",
    threads_of_each_scheduling_policy: "scheduled",
    timers_that_are_descriptors_fire_when_they_are_due: "timerfds",
    threads_that_are_bound_to_processors: "bound",
    signals_blocked_and_pending: "signals",
    short_lived_children: "forks",
    a_big_environment: "environment",
    memory_that_is_rewritten_all_the_time: "memory",
    locks_fifos_and_events: "mixed",
    shared_memory: "shared",
}

/// CRIU adds it with EPOLLERR and EPOLLHUP, which the kernel had taken away.
#[test]
fn an_epoll_set_that_has_reported_a_descriptor_once() {
    let Some(lab) = comes_back("disarmed") else { return };
    assert!(lab.log().contains("not as before the restore (epoll-disarmed)"), "{}", lab.log());
}

/// While a thread stands still, other system calls are made in it: the kernel must not forget that it was in a sequence.
#[test]
fn a_restartable_sequence_is_begun_again() {
    let Some(lab) = Lab::new() else { return };
    let program = lab.file("rseq");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-O1", "-pthread", "-o"]).args([&program, &job_file("rseq.c")]);
    assert!(cc.status().unwrap().success());
    let mut run = lab.run([program.to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    for _ in 0..2 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 5);
    }
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    lab.kill_9(run);
}

/// The port that the job printed.
pub(crate) fn port(lab: &Lab) -> u16 {
    lab.output().lines().find_map(|line| line.strip_prefix("port ")?.parse().ok()).unwrap()
}

#[test]
fn a_udp_server_goes_on_counting() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["udp", lab.path().to_str().unwrap()]);
    run.wait_printed("n 1\n");
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let ask = || {
        client.send_to(b"?", ("127.0.0.1", port(&lab))).unwrap();
        let mut answer = [0; 100];
        let count = client.recv(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..count]).into_owned()
    };
    assert_eq!(ask(), "101");
    run.snapshot(&lab);
    assert_eq!(ask(), "102");
    assert_eq!(ask(), "103");
    for _ in 0..2 {
        run.crash(&lab);
        assert_eq!(ask(), "102", "the counter is that of the image");
    }
    finish(&lab, run);
}

#[test]
fn a_listening_tcp_socket_accepts_again() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["tcp-listening", lab.path().to_str().unwrap()]);
    run.wait_printed("n 1\n");
    let ask = || {
        let mut answer = String::new();
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port(&lab))).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
        answer
    };
    assert_eq!(ask(), "101");
    run.snapshot(&lab);
    assert_eq!((ask(), ask()), ("102".into(), "103".into()));
    run.crash(&lab);
    assert_eq!(ask(), "102");
    finish(&lab, run);
}

/// The names of the files of ours in the lab's folder.
fn ours(lab: &Lab) -> Vec<String> {
    let names = std::fs::read_dir(lab.path()).unwrap().flatten().map(|e| e.file_name().to_string_lossy().into_owned());
    let links = names.filter(|name| name.contains("link_remap") || name.starts_with(".rekindle-link-"));
    links.filter(|name| !name.contains(".rolled-back.")).collect()
}

#[test]
fn a_name_that_went_while_another_stays() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.keep-last", "2")) else { return };
    let mut run = until_after_snapshot(&lab, "link-remap");
    assert_eq!(ours(&lab).len(), 1, "{:?}", ours(&lab));
    for _ in 0..3 {
        run.crash(&lab);
        count_on(&lab, &mut run, 3);
        assert_eq!(ours(&lab).len(), 1, "the image keeps its link, nothing else stays: {:?}", ours(&lab));
    }
    for _ in 0..3 {
        run.snapshot(&lab);
    }
    // Of the last two images, and of the newest from which the job was restored.
    run.wait_for("old links go with their images", || ours(&lab).len() == 3);
    finish(&lab, run);
}

/// CRIU leaves its names of deleted files if it is killed in a dump, and uses the same names in the next one.
#[test]
fn names_that_a_killed_dump_has_left_do_not_hinder_the_next_one() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "link-remap");
    for number in 1..=100 {
        std::fs::hard_link(lab.path().join("kept"), lab.path().join(format!("link_remap.{number}"))).unwrap();
    }
    run.snapshot(&lab);
    let left: Vec<String> = ours(&lab).into_iter().filter(|name| name.starts_with("link_remap.")).collect();
    assert_eq!(left, [""; 0]);
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}

#[test]
fn folders_that_the_job_removed_since_are_made_again() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "removed");
    for _ in 0..2 {
        std::fs::write(lab.file("remove"), "").unwrap();
        run.wait_for("the folders go", || !lab.file("temporary").exists() && !lab.file("stand").exists());
        std::fs::remove_file(lab.file("remove")).unwrap();
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        assert!(lab.file("temporary/inner/note").exists() && lab.file("stand").exists());
    }
    finish(&lab, run);
}

#[test]
fn open_files_are_put_back() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "files");
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    for name in ["w.txt", "a.txt", "large"] {
        let (kept, now) = (lab.read(&format!("{name}.rolled-back.1")), lab.read(name));
        assert!(!kept.is_empty(), "{name} has no tail");
        // What was cut is what a job that was not disturbed writes there: this one wrote or writes the same.
        run.wait_for("it has caught up", || lab.read(name).len() >= now.len().max(kept.len()));
    }
    let kept = lab.read("a.txt.rolled-back.1");
    let first: u64 = kept.lines().next().unwrap().parse().unwrap();
    assert!(first > 5, "{kept}");
    run.wait_for("a.txt is past the tail", || lab.read("a.txt").contains(&kept));
    assert!(lab.read("progress.rolled-back.1").starts_with("epoch "));
    // The same image once more: tails are numbered, none is lost.
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    assert_eq!(lab.read("a.txt.rolled-back.1"), kept);
    assert!(lab.read("a.txt.rolled-back.2").starts_with(&format!("{first}\n")));
    finish(&lab, run);
}

/// Their session has no leader, and has another number in a restored job.
#[test]
fn a_daemon_and_its_worker_stay_in_one_session() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "daemon-with-worker");
    run.crash(&lab);
    run.wait_said("process 1003 (python3): session: was 1002, is 1003 (and 1 more)");
    run.snapshot(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn daemons_are_in_the_image() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "daemon");
    for _ in 0..2 {
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        // In the image of a restored job too.
        run.snapshot(&lab);
        count_on(&lab, &mut run, 5);
    }
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
    assert_counts_up(&lab.read("daemon.txt"));
}

#[test]
fn an_image_is_not_used_up() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "files");
    for _ in 0..3 {
        run.crash(&lab);
        count_on(&lab, &mut run, 2);
        assert_eq!(lab.good(), [1]);
        assert!(lab.images()[0].verify().is_sound());
    }
    finish(&lab, run);
}

/// CRIU dumps it, and refuses to restore it.
#[test]
fn a_connection_that_nobody_outside_accepts_is_refused_while_it_is_there() {
    let Some(lab) = Lab::new().map(|lab| lab.variable("REKINDLE_RETRY_AFTER", "1h")) else {
        return;
    };
    let outside = std::os::unix::net::UnixListener::bind(lab.file("outside")).unwrap();
    let mut run = lab.python("kinds.py", &["outside", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(nix::sys::signal::Signal::SIGUSR1);
    run.wait_said("of process 1001 waits for a program outside the job to accept its connection");
    count_on(&lab, &mut run, 5);
    assert!(lab.good().is_empty());
    std::fs::write(lab.file("close"), "").unwrap();
    run.wait_for("it is closed", || !lab.file("close").exists());
    drop(outside);
    // The tries that follow at once and after a second may take one already. A signal that comes in the last of them would
    // ask for nothing more.
    lab.rekindle(&["snapshot", "j"]);
    run.wait_for("an image", || !lab.good().is_empty());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// To look for a build-id CRIU opens the file, which breaks the lease.
#[test]
fn no_snapshot_breaks_a_write_lease() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["write-lease", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(nix::sys::signal::Signal::SIGUSR1);
    run.wait_said(&format!("has a write lease on {}", lab.file("leased").display()));
    count_on(&lab, &mut run, 5);
    std::fs::write(lab.file("release"), "").unwrap();
    run.wait_for("it is released", || !lab.file("release").exists());
    run.signal(nix::sys::signal::Signal::SIGUSR1);
    run.wait_for("an image", || !lab.good().is_empty());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// CRIU dumps it and cannot restore it.
/// At a restore CRIU breaks it again, and leaves the signal for that to the holder.
#[test]
fn a_lease_that_is_being_broken_is_refused_until_it_is_given_up() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["breaking-lease", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_said(&format!("has a lease on {} (fcntl F_SETLEASE) that another", lab.file("leased").display()));
    fs::write(lab.file("release"), "").unwrap();
    run.wait_for("it is given up", || !lab.file("release").exists());
    run.signal(Signal::SIGUSR1);
    run.wait_for("an image", || !lab.good().is_empty());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn a_program_in_memory_is_refused_until_it_ends() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["from-memory", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_said("runs a program that is in memory and in no file (memfd:program: memfd_create and fexecve)");
    count_on(&lab, &mut run, 5);
    std::fs::write(lab.file("end"), "").unwrap();
    run.wait_for("it has ended", || !lab.file("end").exists());
    run.snapshot(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// CRIU dumps it, and no restore would find it.
#[test]
fn a_watch_on_a_symbolic_link_is_refused_until_it_ends() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["watched-link", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_said("has a watch of inotify on a symbolic link (IN_DONT_FOLLOW), which CRIU dumps and cannot restore");
    count_on(&lab, &mut run, 5);
    std::fs::write(lab.file("end"), "").unwrap();
    run.wait_for("it has ended", || !lab.file("end").exists());
    run.snapshot(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// A restored job would write to the folder below it.
#[test]
fn a_mount_that_the_job_made_is_not_lost_in_silence() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["mounted", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_said(&format!("the job has mounted tmpfs (none) at {} itself", lab.file("mounted").display()));
    assert!(lab.good().is_empty());
    fs::write(lab.file("release"), "").unwrap();
    run.wait_for("it is unmounted", || !lab.file("release").exists());
    run.signal(Signal::SIGUSR1);
    run.wait_for("an image", || !lab.good().is_empty());
    // A restored job has another namespace, with the same mounts.
    run.crash(&lab);
    run.snapshot(&lab);
    finish(&lab, run);
}

/// CRIU cannot save what was sent before a connection by a UNIX socket is accepted.
#[test]
fn a_snapshot_waits_for_a_unix_connection_with_data_to_be_accepted() {
    let Some(lab) = Lab::new() else { return };
    let mut run = lab.python("kinds.py", &["not-accepted", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_said("the snapshot waits a moment: a connection of the job waits to be accepted at the UNIX socket ");
    fs::write(lab.file("accept"), "").unwrap();
    run.wait_for("an image", || !lab.good().is_empty());
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// The machine was booted, or somebody has tidied up, while there was no job.
#[test]
fn a_semaphore_has_its_name_again() {
    let Some(lab) = Lab::new() else { return };
    let run = until_after_snapshot(&lab, "named-semaphore");
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    let saved = |name: &str| name.starts_with(".rekindle-link-") || name.starts_with("link_remap.");
    let links = lab.images().iter().flat_map(|image| image.manifest().unwrap().saved_links.clone()).collect::<Vec<_>>();
    let names: Vec<_> = links.iter().flat_map(|link| &link.names).collect();
    assert!(!names.is_empty() && names.iter().all(|name| !saved(&name.file_name().unwrap().to_string_lossy())));
    for name in names.into_iter().chain(links.iter().map(|link| &link.saved)) {
        let _ = fs::remove_file(name);
    }
    let mut run = lab.python("kinds.py", &["named-semaphore", lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image");
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// Another program takes the number of the job's terminal while there is no job.
#[test]
fn a_terminals_number_is_the_jobs_own() {
    let Some(lab) = Lab::new() else { return };
    let run = until_after_snapshot(&lab, "terminals");
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    let _taken: Vec<_> =
        (0..16).map(|_| fs::File::options().read(true).write(true).open("/dev/ptmx").unwrap()).collect();
    let mut run = lab.python("kinds.py", &["terminals", lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image");
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// A scheduler gives the job other processors than before.
#[test]
fn a_binding_that_is_not_possible_here_is_told() {
    let Some(lab) = Lab::new() else { return };
    let several = std::thread::available_parallelism().is_ok_and(|processors| processors.get() > 1);
    if !rekindle_testing::require("processors", several, "there is only one") {
        return;
    }
    let run = until_after_snapshot(&lab, "bound");
    std::fs::write(lab.file("anywhere"), "").unwrap();
    run.kill_9();
    let lab = lab.on_one_processor();
    let mut run = lab.python("kinds.py", &["bound", lab.path().to_str().unwrap()]);
    run.wait_said("threads of the job were bound to processors ");
    run.wait_said("rekindle may not use them here. They run on processors 0 now");
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}
