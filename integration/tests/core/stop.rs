//! Signals to the supervisor: a snapshot now, a last one and stop, stop at once, requeue; and its own death, at any
//! moment.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::notify::Stuck;
use crate::supervisor::{Lab, Running, assert_counts_up, comes, criu, numbers};

fn again(lab: &Lab) -> Running {
    lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()])
}

fn reasons(lab: &Lab) -> Vec<String> {
    let images = lab.images();
    images.iter().map(|i| format!("{:?}", i.manifest().unwrap().reason)).collect()
}

#[test]
fn snapshots_on_the_interval() {
    let Some(lab) = Lab::new() else { return };
    // One that was rehearsed would be kept, too.
    let lab = lab.set("snapshot.rehearse", "\"off\"");
    let lab = lab.set("snapshot.interval", "\"300ms\"").set("store.keep-last", "2");
    let mut run = again(&lab);
    run.wait_for("the fifth image is there", || lab.images().first().is_some_and(|i| i.id.sequence() >= 5));
    run.wait_for("old ones go", || lab.images().len() <= 2);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert!(reasons(&lab).iter().all(|reason| reason == "Interval"));
    finish(&lab, run);
}

#[test]
fn sigterm_takes_a_last_snapshot_and_the_next_run_goes_on() {
    let Some(lab) = Lab::new() else { return };
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(143);
    assert!(said.contains("image 000001"), "{said}");
    assert_eq!(reasons(&lab), ["Final"]);
    let mut run = again(&lab);
    run.wait_said("continues from image 000001");
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGINT);
    run.ends_with(130);
    assert_eq!(lab.good(), [2, 1]);
    finish(&lab, again(&lab));
}

/// SIGKILL does not end a process in a frozen group of cgroup v1.
#[test]
fn a_job_that_froze_a_child_is_stopped_at_once() {
    struct Group(std::path::PathBuf);
    impl Drop for Group {
        fn drop(&mut self) {
            let _ = std::fs::write(self.0.join("freezer.state"), "THAWED");
            comes(Duration::from_secs(5), || std::fs::remove_dir(&self.0).is_ok());
        }
    }
    let Some(lab) = Lab::new() else { return };
    let group = Group(format!("/sys/fs/cgroup/freezer/rekindle-{}", std::process::id()).into());
    if std::fs::create_dir(&group.0).is_err() || !group.0.join("freezer.state").exists() {
        println!("SKIP: there is no freezer of cgroup v1");
        return;
    }
    let path = group.0.display();
    let text = format!(
        "sleep 1000 & echo $! > {path}/cgroup.procs && echo FROZEN > {path}/freezer.state && echo frozen; wait"
    );
    let mut run = lab.run(["sh", "-c", &text]);
    run.wait_printed("frozen");
    let begun = Instant::now();
    let stopped = lab.rekindle(&["stop", "--now", "j"]);
    assert!(stopped.status.success(), "{stopped:?}");
    run.finish(Duration::from_secs(20));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    lab.assert_all_gone();
}

#[test]
fn sigusr2_is_for_the_queue() {
    let Some(lab) = Lab::new() else { return };
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR2);
    run.ends_with(75);
    let mut run = again(&lab);
    run.wait_said("continues from image 000001");
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// A drained node ends a pod with the stop signal of its image: that asks for another pod, and the Job grants it.
#[test]
fn a_drained_node_is_for_the_queue() {
    let Some(lab) = Lab::new() else { return };
    let file = |name: &str| std::fs::read_to_string(Path::new("examples/deploy").join(name)).unwrap();
    let image = file("Containerfile");
    let signal = image.lines().find_map(|line| line.strip_prefix("STOPSIGNAL ")).unwrap();
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    run.signal(signal.parse().unwrap());
    let (_, said) = run.ends_with(75);
    assert!(said.contains("image 000001"), "{said}");
    for manifest in ["kubernetes/job.yaml", "helm/rekindle-job/templates/job.yaml"] {
        let text = file(manifest);
        let (before, _) = text.split_once("values: [75, 143]").unwrap();
        assert!(before.rsplit("- action: ").next().unwrap().starts_with("Ignore"), "{manifest}");
    }
    let mut run = again(&lab);
    run.wait_said("continues from image 000001");
    finish(&lab, run);
}

/// A CRIU that does not answer while there is a file; once only if something is in that file. It says that it began in
/// `began`.
fn slow_criu(lab: &Lab, verb: &str) {
    let (real, began) = (criu(), lab.file("began"));
    lab.script(
        "criu",
        &format!(
            "case \"$*\" in *--version*) exec {real} \"$@\";; esac\n\
             if [ -e {slow} ]; then [ ! -s {slow} ] || rm {slow}; echo $$ > {began}; exec sleep 600; fi\nexec {real} \"$@\"",
            real = real.display(),
            began = began.display(),
            slow = lab.file(verb).display(),
        ),
    );
}

#[test]
fn a_second_sigterm_stops_at_once() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set_file("criu.path", "criu");
    // Neither ends it before the test gives up.
    let lab = lab.set("snapshot.grace", "\"10m\"").set("snapshot.freeze-limit", "\"10m\"");
    slow_criu(&lab, "slow");
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    std::fs::write(lab.file("slow"), "").unwrap();
    run.signal(Signal::SIGTERM);
    run.wait_for("CRIU hangs", || lab.file("began").exists());
    run.second_stop(Signal::SIGTERM);
    run.ends_with(143);
    lab.assert_all_gone();
    std::fs::remove_file(lab.file("slow")).unwrap();
    let mut run = again(&lab);
    run.wait_said("job j starts");
    count_on(&lab, &mut run, 5);
    assert!(lab.images().is_empty(), "nothing of the snapshot that was called off");
}

/// GNU timeout signals its child and its group, and a scheduler each process.
#[test]
fn signals_that_come_together_are_one_request() {
    let Some(lab) = Lab::new() else { return };
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGTERM);
    // Of signals that are pending at once the kernel delivers SIGINT first.
    run.wait_said("received SIGTERM");
    run.signal(Signal::SIGTERM);
    run.signal(Signal::SIGINT);
    let (_, said) = run.ends_with(143);
    assert!(!said.contains("the job continues"), "{said}");
    let images = lab.images();
    assert_eq!(format!("{:?}", images[0].manifest().unwrap().reason), "Final", "{said}");
    let mut run = again(&lab);
    run.wait_said("the job was restored from image 000001");
    finish(&lab, run);
}

/// What counts is when they came.
#[test]
fn two_stops_are_two_though_a_busy_supervisor_handles_them_together() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set_file("criu.path", "criu");
    // Neither ends it before the test gives up.
    let lab = lab.set("snapshot.grace", "\"10m\"").set("snapshot.freeze-limit", "\"10m\"");
    slow_criu(&lab, "slow");
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    std::fs::write(lab.file("slow"), "").unwrap();
    // The one that the state belongs to is the first.
    let busy = Stuck::thread(run.pid());
    run.signal(Signal::SIGTERM);
    std::thread::sleep(Duration::from_secs(4));
    run.signal(Signal::SIGTERM);
    busy.let_go();
    run.ends_with(143);
    lab.assert_all_gone();
}

/// Ctrl-C and GNU timeout signal the whole process group: CRIU must not be in it.
#[test]
fn a_signal_for_the_group_does_not_end_criu_in_a_dump() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set_file("criu.path", "criu").leading_a_session();
    let (real, slow, began) = (criu(), lab.file("slow"), lab.file("began"));
    lab.script(
        "criu",
        &format!(
            "case \"$*\" in *--version*) exec {real} \"$@\";; esac\n\
             if [ -e {slow} ]; then rm {slow}; echo $$ > {began}; sleep 5; fi\nexec {real} \"$@\"",
            real = real.display(),
            slow = slow.display(),
            began = began.display(),
        ),
    );
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    std::fs::write(&slow, "").unwrap();
    run.signal(Signal::SIGUSR1);
    run.wait_for("CRIU dumps", || began.exists());
    nix::sys::signal::killpg(nix::unistd::Pid::from_raw(run.pid()), Signal::SIGINT).unwrap();
    let (_, said) = run.ends_with(130);
    assert!(!said.contains("the final snapshot failed"), "{said}");
    assert_eq!(lab.good().first(), Some(&1), "{said}");
    finish(&lab, again(&lab));
}

#[test]
fn a_stop_without_an_image_does_not_say_that_the_job_runs_on() {
    let Some(lab) = Lab::new() else { return };
    // The trial at the start would fail.
    let lab = lab.set_file("criu.path", "criu").set("snapshot.rehearse", "\"off\"");
    lab.script("criu", &format!("case \"$*\" in *--version*) exec {0} \"$@\";; esac\nexit 1", criu().display()));
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(143);
    assert!(
        said.contains("the final snapshot failed: dump: CRIU ended") && !said.contains("the job continues"),
        "{said}"
    );
}

#[test]
fn the_grace_period_is_kept() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set_file("criu.path", "criu").set("snapshot.grace", "\"1s\"");
    let lab = lab.set("snapshot.freeze-limit", "\"10m\"");
    slow_criu(&lab, "slow");
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    std::fs::write(lab.file("slow"), "").unwrap();
    let begun = Instant::now();
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    assert!(begun.elapsed() > Duration::from_millis(900), "{:?}", begun.elapsed());
}

#[test]
fn kill_9_takes_the_job_along_and_the_next_run_goes_on() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    for _ in 0..2 {
        lab.kill_9(run);
        run = again(&lab);
        run.wait_said("continues from image 000001");
        count_on(&lab, &mut run, 5);
    }
    finish(&lab, run);
}

#[test]
fn kill_9_in_the_middle_of_a_snapshot() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "memory");
    for wait in [5, 15, 30, 45, 60, 90, 130] {
        run.signal(Signal::SIGUSR1);
        std::thread::sleep(Duration::from_millis(wait));
        lab.kill_9(run);
        assert!(lab.images().iter().all(|image| image.verify().is_sound()), "only whole images");
        run = lab.python("kinds.py", &["memory", lab.path().to_str().unwrap()]);
        run.wait_said("continues from image");
        count_on(&lab, &mut run, 2);
        // But the draft of an image that was in memory and is on its way to the store again.
        run.wait_for("no draft is left", || {
            let mut entries = std::fs::read_dir(lab.job().images_dir()).unwrap().flatten();
            !entries.any(|entry| entry.file_name().to_string_lossy().starts_with('.'))
        });
    }
    finish(&lab, run);
}

#[test]
fn kill_9_in_the_middle_of_a_restore() {
    let Some(lab) = Lab::new() else { return };
    lab.kill_9(until_after_snapshot(&lab, "memory"));
    for wait in [10, 25, 40, 50, 60, 70, 80, 95, 110] {
        let run = lab.python("kinds.py", &["memory", lab.path().to_str().unwrap()]);
        std::thread::sleep(Duration::from_millis(wait));
        lab.kill_9(run);
    }
    let mut run = lab.python("kinds.py", &["memory", lab.path().to_str().unwrap()]);
    run.wait_said("continues from image 000001");
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

#[test]
fn criu_killed_in_a_dump_or_hanging() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set_file("criu.path", "criu").set("snapshot.freeze-limit", "\"12s\"");
    slow_criu(&lab, "slow");
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    // It hangs: the timeout ends it, the job runs on.
    std::fs::write(lab.file("slow"), "").unwrap();
    run.signal(Signal::SIGUSR1);
    run.wait_said("CRIU did not finish within 12s");
    std::fs::remove_file(lab.file("slow")).unwrap();
    count_on(&lab, &mut run, 5);
    let failure = || lab.published().and_then(|now| now.last_failure).unwrap_or_default();
    run.wait_for("the state says so", || failure().contains("12s"));
    assert!(lab.images().is_empty());
    assert!(!lab.processes().iter().any(|(_, line)| line.contains("sleep")), "{:?}", lab.processes());
    run.snapshot(&lab);
    // It is killed in its work, at moments all over it.
    for wait in [2, 6, 10, 15, 20, 30, 45] {
        run.signal(Signal::SIGUSR1);
        let find = || lab.processes().into_iter().find(|(_, line)| line.contains("swrk")).map(|(pid, _)| pid);
        let mut found = None;
        if !comes(Duration::from_secs(10), || {
            found = find();
            found.is_some()
        }) {
            continue;
        }
        std::thread::sleep(Duration::from_millis(wait));
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(found.unwrap()), Signal::SIGKILL);
        count_on(&lab, &mut run, 5);
    }
    // That the last of these failed may be said later.
    let newest = lab.good()[0];
    run.signal(Signal::SIGUSR1);
    run.wait_for("another image", || lab.good()[0] > newest);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn criu_hanging_or_killed_in_a_restore() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set_file("criu.path", "criu").set("restart.restore-timeout", "\"12s\"");
    slow_criu(&lab, "slow");
    let mut run = again(&lab);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    run.snapshot(&lab);
    let newest = numbers(&lab.output()).len();
    std::fs::write(lab.file("slow"), "once").unwrap();
    let pid = run.job_pid(&lab);
    crate::supervisor::kill(pid, Signal::SIGKILL);
    run.wait_said("CRIU did not finish within 12s");
    run.wait_said("the job was restored from image 000001");
    assert_eq!(lab.good(), [2, 1], "that it took too long is no evidence against it");
    // Further than the other image was: a log that is shorter than it was then would be continued with a gap.
    run.wait_for("the job is further than the other image", || numbers(&lab.output()).len() > newest);
    assert!(!lab.processes().iter().any(|(_, line)| line.contains("sleep")), "{:?}", lab.processes());
    run.kill_9();
    // The next run takes it again.
    let mut run = again(&lab);
    run.wait_said("the job was restored from image 000002");
    assert!(numbers(&lab.output()).len() > 3);
    finish(&lab, run);
    assert_counts_up(&lab.output());
}
