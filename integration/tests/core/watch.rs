//! Jobs that hang, fail and go wrong: what is said of it, and what is done.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use rekindle::supervisor::RunResult;
use rekindle::telemetry::events::{What, read};
use rekindle_base::cause::{Cause, Missing};

use crate::memory_group::MemoryGroup;
use crate::supervisor::{Lab, Running};

pub(crate) fn start(lab: &Lab, kind: &str, argument: &str) -> Running {
    let mut run = lab.python("watch_job.py", &[kind, lab.path().to_str().unwrap(), argument]);
    crate::kinds::count_on(lab, &mut run, 3);
    run
}

pub(crate) fn go_wrong(lab: &Lab) {
    fs::write(lab.file("wrong"), "").unwrap();
}

fn finish(lab: &Lab, run: Running) -> String {
    let _ = fs::remove_file(lab.file("wrong"));
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0).1
}

fn result(lab: &Lab) -> RunResult {
    RunResult::read(&lab.job()).unwrap()
}

/// Why each life ended, in order.
fn causes(lab: &Lab) -> Vec<Cause> {
    let events = read(&lab.job().log_dir()).unwrap();
    events
        .into_iter()
        .filter_map(|event| if let What::Ended { cause, .. } = event.what { cause } else { None })
        .collect()
}

#[test]
fn the_result_tells_how_a_run_ended() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, "sleep", "");
    let image = run.snapshot(&lab);
    run.crash(&lab);
    assert!(!RunResult::file(&lab.job()).is_there(), "it is not over");
    let last = lab.published().unwrap().last_end.unwrap();
    assert_eq!((last.signal, &last.cause), (Some(9), &Cause::Signal { signal: 9 }));
    lab.kill_9(run);

    let run = start(&lab, "sleep", "");
    let before = run.published(&lab).unwrap().last_end.unwrap();
    assert_eq!(before.cause, Cause::SupervisorKilled, "{before:?}");
    finish(&lab, run);
    let result = result(&lab);
    assert_eq!((result.outcome.as_str(), result.exit_code, result.runs, result.restarts), ("completed", Some(0), 1, 0));
    assert_eq!(result.last_end.unwrap().cause, Cause::Completed);
    assert_eq!(result.images.iter().map(|image| image.sequence()).collect::<Vec<_>>(), [image]);
    assert_eq!(causes(&lab), [Cause::Signal { signal: 9 }, Cause::Completed]);

    // The next one begins without it, and ends otherwise.
    let _ = fs::remove_file(lab.file("finish"));
    let command = lab.python_command("watch_job.py", &["leave", lab.path().to_str().unwrap(), "2"]);
    let mut run = lab.run_with(&["run", "--fresh", "--name", "j", "--"], command);
    crate::kinds::count_on(&lab, &mut run, 3);
    assert!(!RunResult::file(&lab.job()).is_there());
    go_wrong(&lab);
    run.ends_with(2);
    let failed = self::result(&lab);
    assert_eq!((failed.outcome.as_str(), failed.exit_code), ("failed", Some(2)));
    assert!(failed.lost_us > 0 && failed.why.unwrap().contains("wrong usage"));
    assert_eq!(failed.last_end.unwrap().cause, Cause::Exit { code: 2 });
}

#[test]
fn a_stop_is_no_failure() {
    let Some(lab) = Lab::new() else { return };
    let run = start(&lab, "sleep", "");
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    let result = result(&lab);
    assert_eq!((result.outcome.as_str(), result.images.len()), ("stopped", 1));
    assert_eq!(result.last_end.unwrap().cause, Cause::Requested);
}

#[test]
fn a_job_that_the_kernel_kills_for_want_of_memory_is_named_so() {
    let Some(lab) = Lab::new() else { return };
    let Some(group) = MemoryGroup::gate(160 << 20) else { return };
    // Rekindle is in the group itself; the kernel takes the largest process.
    let lab = lab.set("restart.max-restarts", "1").within(group.path());
    let run = start(&lab, "eat", "");
    go_wrong(&lab);
    let (_, said) = run.ends_with(137);
    assert!(said.contains("out of memory"), "{said}");
    assert!(causes(&lab).iter().all(|cause| *cause == Cause::OutOfMemory), "{:?}", causes(&lab));
    assert_eq!(result(&lab).last_end.unwrap().cause, Cause::OutOfMemory);
}

#[test]
fn a_child_that_is_killed_for_want_of_memory_explains_the_exit_code() {
    let Some(lab) = Lab::new() else { return };
    let Some(group) = MemoryGroup::gate(160 << 20) else { return };
    // The child's group is not the job's, so that the kernel's log is the only witness. It has the pids of the first
    // PID namespace, whose inode has this number (PROC_PID_INIT_INO in include/linux/proc_ns.h).
    let first = fs::read_link("/proc/self/ns/pid").is_ok_and(|name| name == Path::new("pid:[4026531836]"));
    let told = first && fs::File::open("/dev/kmsg").is_ok();
    if !rekindle_testing::require("kmsg", told, "the kernel's log cannot be read, or names other pids") {
        return;
    }
    let lab = lab.set("restart.max-restarts", "0");
    let mut run = start(&lab, "child", group.path().to_str().unwrap());
    // The child may be born after the life began: the job's processes are looked at with each snapshot.
    run.snapshot(&lab);
    go_wrong(&lab);
    run.ends_with(1);
    assert_eq!(result(&lab).last_end.unwrap().cause, Cause::OutOfMemory);
}

/// What the journal says of hangs and snapshots, in order.
fn told(lab: &Lab) -> Vec<String> {
    let events = read(&lab.job().log_dir()).unwrap();
    let name = |what| match what {
        What::Hung { what, action, .. } => Some(format!("hung {what:?} {action}")),
        What::GoesOn { what } => Some(format!("goes on {what:?}")),
        What::RuleMatched { rule, action, .. } => Some(format!("rule {rule} {action}")),
        What::SnapshotTaken { .. } => Some("snapshot".into()),
        _ => None,
    };
    events.into_iter().filter_map(|event| name(event.what)).collect()
}

/// The stacks that were written down, all in one.
fn stacks(lab: &Lab) -> String {
    let files = fs::read_dir(lab.job().log_dir()).unwrap().flatten();
    let ours = files.filter(|file| file.file_name().to_str().unwrap().starts_with("stacks-"));
    ours.map(|file| fs::read_to_string(file.path()).unwrap()).collect()
}

/// A job that no longer does anything comes back from its image.
fn comes_back_from(kind: &str, state: &str) {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("watch.no-cpu-for", "\"6s\"").set("watch.action", "\"restart\"");
    let mut run = start(&lab, kind, "");
    run.snapshot(&lab);
    assert!(!run.err().contains("hangs"), "{}", run.err());
    go_wrong(&lab);
    run.wait_said("the job hangs: it used neither a processor nor a GPU");
    fs::remove_file(lab.file("wrong")).unwrap();
    run.wait_said("the job was restored from image");
    crate::kinds::count_on(&lab, &mut run, 3);
    finish(&lab, run);
    assert!(told(&lab).contains(&"hung Work restart".into()), "{:?}", told(&lab));
    assert_eq!(causes(&lab).first(), Some(&Cause::Hang { what: Missing::Work }));
    assert_eq!(causes(&lab).last(), Some(&Cause::Completed));
    let stacks = stacks(&lab);
    assert!(stacks.contains("watch_job.py") || stacks.contains("python"), "{stacks}");
    assert!(stacks.contains(&format!("state {state}")), "{stacks}");
    assert!(result(&lab).restarts >= 1);
}

#[test]
fn a_job_that_was_stopped_and_forgotten_comes_back() {
    comes_back_from("stop", "T");
}

#[test]
fn a_job_that_waits_for_a_lock_for_ever_comes_back() {
    comes_back_from("futex", "S");
}

#[test]
fn a_job_that_waits_for_a_pipe_for_ever_comes_back() {
    comes_back_from("pipe", "S");
}

#[test]
fn a_job_that_only_spins_is_told_by_its_silence() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("watch.no-cpu-for", "\"5s\"").set("watch.no-output-for", "\"6s\"");
    let mut run = start(&lab, "spin", "");
    go_wrong(&lab);
    run.wait_for("the state says that it hangs", || lab.published().is_some_and(|p| p.hang.is_some()));
    let hang = lab.published().unwrap().hang.unwrap();
    assert!(hang.starts_with("it printed nothing for"), "{hang}");
    finish(&lab, run);
    // It used a processor all the time, and nothing was done to it.
    assert_eq!(told(&lab), ["hung Output notify"]);
    assert_eq!(causes(&lab), [Cause::Completed]);
}

#[test]
fn a_job_that_goes_on_is_told_so() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("watch.no-output-for", "\"6s\"");
    let mut run = start(&lab, "sleep", "");
    let pid = run.job_pid(&lab);
    crate::supervisor::kill(pid, Signal::SIGSTOP);
    run.wait_said("the job hangs: it printed nothing");
    crate::supervisor::kill(pid, Signal::SIGCONT);
    run.wait_said("the job is making progress again");
    run.wait_for("the state says nothing of it", || lab.published().is_some_and(|p| p.hang.is_none()));
    finish(&lab, run);
    assert_eq!(told(&lab)[..2], ["hung Output notify", "goes on Output"]);
}

#[test]
fn a_job_that_no_longer_says_that_it_lives_is_saved_and_stopped() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("watch.no-notify-for", "\"6s\"").set("watch.action", "\"snapshot-and-stop\"");
    let mut run = start(&lab, "notify", "");
    run.snapshot(&lab);
    run.crash(&lab);
    // What came back says so to the same socket.
    crate::kinds::count_on(&lab, &mut run, 100);
    assert_eq!(told(&lab), ["snapshot"], "{}", run.err());
    go_wrong(&lab);
    let (_, said) = run.ends_with(75);
    assert!(said.contains("it sent no WATCHDOG=1"), "{said}");
    assert_eq!(told(&lab), ["snapshot", "hung Notify snapshot-and-stop", "snapshot"]);
    let result = result(&lab);
    assert_eq!((result.outcome.as_str(), result.images.len()), ("stopped", 2));
    assert_eq!(result.last_end.unwrap().cause, Cause::Hang { what: Missing::Notify });
}

#[test]
fn a_snapshot_that_takes_longer_than_the_limit_is_no_hang() {
    let Some(lab) = Lab::new() else { return };
    // The clock stands still from the begin of the snapshot to its end.
    let criu = crate::supervisor::criu();
    let slow = lab.script(
        "slow-criu",
        &format!("[ \"$1\" = --version ] || [ \"$1\" = check ] || sleep 10\nexec {} \"$@\"", criu.display()),
    );
    let lab = lab.set("watch.no-output-for", "\"6s\"").set("criu.path", &format!("{slow:?}"));
    let lab = lab.set("snapshot.rehearse", "\"off\"");
    let mut run = start(&lab, "futex", "");
    run.signal(Signal::SIGUSR1);
    go_wrong(&lab);
    run.wait_said("the job hangs: it printed nothing");
    run.wait_for("the journal has both", || told(&lab) == ["snapshot", "hung Output notify"]);
    run.signal(Signal::SIGTERM);
    run.wait_said("received SIGTERM");
    run.second_stop(Signal::SIGTERM);
    run.ends_with(143);
}

#[test]
fn rules_decide_before_the_policy_does() {
    let Some(lab) = Lab::new() else { return };
    let rules = r#"[
        { match = { exit-code = 9, log = "disk is on fire" }, action = "snapshot-and-stop" },
        { match = { exit-code = [2, 9] }, action = "restart" },
    ]"#;
    let lab = lab.set("rules", &rules.replace('\n', " ").replace("}, ]", "} ]")).set("restart.max-restarts", "1");
    let run = start(&lab, "last-words", "");
    go_wrong(&lab);
    let (_, said) = run.ends_with(75);
    assert!(said.contains("rule 1 (snapshot-and-stop): it exited with code 9"), "{said}");
    assert_eq!(told(&lab), ["rule 1 snapshot-and-stop"]);

    // 2 is never worth another try by itself; by the rule it is, once.
    let run = lab.run_with(
        &["run", "--name", "j", "--fresh", "--"],
        lab.python_command("watch_job.py", &["leave", lab.path().to_str().unwrap(), "2"]),
    );
    let (_, said) = run.ends_with(2);
    assert!(said.contains("rule 2 (restart)") && said.contains("restart.max-restarts"), "{said}");
}

#[test]
fn training_that_goes_wrong_is_sent_back_and_in_the_end_given_up() {
    let Some(lab) = Lab::new() else { return };
    let rule = r#"[{ match = { log = "loss (\\S+)", above = { group = 1, value = 10.0 } }, action = "rewind", images = 2, max-rewinds = 1 }]"#;
    let lab = lab.set("rules", rule);
    let mut run = start(&lab, "nan", "");
    let first = run.snapshot(&lab);
    crate::kinds::count_on(&lab, &mut run, 3);
    let second = run.snapshot(&lab);
    go_wrong(&lab);
    run.wait_said("rule 1 (rewind): step ");
    run.wait_said("the job was restored from image");
    // It goes on from before, in a file that ends there, and the job has taken away what made it go wrong.
    crate::kinds::count_on(&lab, &mut run, 5);
    assert!(!lab.output().contains("nan"), "{}", lab.output());
    crate::supervisor::assert_counts_up(&lab.output());
    assert!(run.err().contains(&format!("rewinding to image {first:06}-")), "{}", run.err());
    assert_eq!(lab.good(), [second, first]);
    assert_eq!(causes(&lab), [Cause::BadTraining { rule: 1 }]);

    go_wrong(&lab);
    let (_, said) = run.ends_with(137);
    // What is newer stays, and is not what it goes on from.
    assert_eq!(result(&lab).images.iter().map(|image| image.sequence()).collect::<Vec<_>>(), [first]);
    assert!(said.contains("rule 1 has already rewound the job 1 times (max-rewinds) and matches again"), "{said}");
    assert_eq!(result(&lab).last_end.unwrap().cause, Cause::BadTraining { rule: 1 });
}
