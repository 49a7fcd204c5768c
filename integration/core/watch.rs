//! Jobs that hang, fail and go wrong: what is said of it, and what is done.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use rekindle::restart::cause::Cause;
use rekindle::supervisor::RunResult;
use rekindle::telemetry::events::{What, read};

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
    assert!(!RunResult::file(&lab.job()).exists(), "it is not over");
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
    let run = start(&lab, "leave", "2");
    assert!(!RunResult::file(&lab.job()).exists());
    go_wrong(&lab);
    run.ends_with(2);
    let failed = self::result(&lab);
    assert_eq!((failed.outcome.as_str(), failed.exit_code), ("failed", Some(2)));
    assert!(failed.lost_us > 0 && failed.why.unwrap().contains("never-retry"));
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

/// A control group with little memory; removed when it goes out of scope, once all in it have ended.
struct SmallGroup(PathBuf);

impl SmallGroup {
    const BYTES: u64 = 160 << 20;

    /// `None` with the reason where none can be made: cgroup v1 with the memory controller, or v2 with it delegated.
    fn new(name: &str) -> Result<SmallGroup, String> {
        let name = format!("rekindle-test-{name}-{}", std::process::id());
        let one = Path::new("/sys/fs/cgroup/memory");
        let (path, limit) = if one.join("memory.limit_in_bytes").exists() {
            (one.join(name), "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup").join(name), "memory.max")
        };
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let group = SmallGroup(path);
        fs::write(group.0.join(limit), Self::BYTES.to_string()).map_err(|error| format!("{limit}: {error}"))?;
        Ok(group)
    }

    fn gate(name: &str) -> Option<SmallGroup> {
        SmallGroup::new(name).map_err(|why| eprintln!("SKIP: no control group can be made: {why}")).ok()
    }
}

impl Drop for SmallGroup {
    fn drop(&mut self) {
        crate::supervisor::comes(crate::supervisor::LIMIT, || fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn a_job_that_the_kernel_kills_for_want_of_memory_is_named_so() {
    let Some(lab) = Lab::new() else { return };
    let Some(group) = SmallGroup::gate("all") else { return };
    // Rekindle is in the group itself; the kernel takes the largest process.
    let lab = lab.set("restart.max-restarts", "1").within(&group.0);
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
    let Some(group) = SmallGroup::gate("child") else { return };
    if !Path::new("/dev/kmsg").exists() {
        return eprintln!("SKIP: there is no /dev/kmsg, the only witness here");
    }
    let lab = lab.set("restart.max-restarts", "0");
    let mut run = start(&lab, "child", group.0.to_str().unwrap());
    // The child is born later: the job's processes are looked at with each snapshot.
    run.snapshot(&lab);
    go_wrong(&lab);
    run.ends_with(1);
    let cause = result(&lab).last_end.unwrap().cause;
    assert!(matches!(cause, Cause::OutOfMemory | Cause::Exit { code: 1 }), "{cause:?}");
}
