//! Processes that are in the middle of cuInit: an image of that could not be restored.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::rig::{Rig, Supervisor, inner};

const AGAIN: &str = "trying the snapshot again: process";

/// A process is in cuInit, and stays there.
const HELD: &str = "fail-init.held";

/// The image is taken once cuInit is over, which lasts until then, and the job lives on from it.
fn is_waited_for(rig: &Rig, supervisor: &mut Supervisor<'_>, pid: i32) {
    supervisor.said(AGAIN);
    rig.clear("fail-init");
    supervisor.image();
    supervisor.counts();
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.counts();
    supervisor.assert_running(1);
    assert!(!rig.log().contains("exit code"), "{}", rig.log());
    let words = format!("{AGAIN} {pid} (python3) is initialising CUDA (cuInit)");
    assert_eq!(rig.log().matches(&words).count(), 1, "{}", rig.log());
    assert!(!rig.log().contains("the snapshot failed"), "{}", rig.log());
}

#[test]
fn a_job_that_begins_with_cuda_is_not_taken_in_the_middle_of_it() {
    let Some(rig) = Rig::new() else { return };
    rig.standin.fault("fail-init", "hold pid=1001");
    let mut supervisor = rig.run();
    supervisor.said("to=\"running\"");
    supervisor.until("it is in cuInit", |rig| rig.standin.path().join(HELD).exists());
    supervisor.ask();
    is_waited_for(&rig, &mut supervisor, 1001);
    supervisor.stop();
}

/// The job's FILE of `--init`.
fn when(rig: &mut Rig, who: &str) -> PathBuf {
    let file = rig.path().join("init");
    rig.job(&["--init", who, file.to_str().unwrap()]);
    file
}

/// No life of the job has heard from cuInit that it failed.
fn is_well(rig: &Rig, mut supervisor: Supervisor<'_>, file: &Path) {
    // It was over when the image was taken; it would fail a little later.
    std::thread::sleep(Duration::from_secs(1));
    let heard = || fs::read_to_string(file.with_extension("done")).unwrap_or_default();
    supervisor.until("cuInit is over", |_| !heard().is_empty());
    assert_eq!(heard(), "0\n");
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_process_that_begins_with_it_when_criu_is_called_is_seen_in_the_image() {
    let Some(mut rig) = Rig::new() else { return };
    // Without a place in memory nothing holds it back.
    rig.set("SNAPSHOT_STAGING", "store");
    let file = when(&mut rig, "child");
    let mut supervisor = rig.start();
    // The newest process; how many came before it depends on what `python3` is.
    let child = rig.job_pids().into_iter().filter_map(inner).max().unwrap();
    rig.standin.fault("fail-init", &format!("hold pid={child}"));
    let held = rig.standin.path().join(HELD);
    let begin = format!(": > '{}'; until [ -e '{}' ]; do sleep 0.01; done", file.display(), held.display());
    rig.criu_fault(&format!("[ -e '{}' ] || {{ {begin}; }}", file.display()));
    supervisor.ask();
    is_waited_for(&rig, &mut supervisor, child);
    is_well(&rig, supervisor, &file);
}

#[test]
fn a_cuda_process_that_does_it_again_before_it_is_locked_is_not_locked() {
    let Some(mut rig) = Rig::new() else { return };
    let file = when(&mut rig, "thread");
    rig.standin.fault("fail-tid", "hold");
    let mut supervisor = rig.start();
    rig.standin.fault("fail-init", "hold pid=1001");
    // To lock it would be a failure, with managed memory among its possible reasons.
    rig.standin.fault("fail-lock", "801");
    let pid = supervisor.main_pid();
    supervisor.ask();
    supervisor.until("it is being looked at", |rig| rig.standin.path().join("fail-tid.held").exists());
    fs::write(&file, "").unwrap();
    supervisor.until("it is in cuInit", |_| rekindle_cuda::is_initializing(pid).unwrap());
    rig.clear("fail-tid");
    supervisor.until("it is seen", |rig| rig.log().contains(AGAIN));
    assert!(!rig.log().contains("managed memory"), "{}", rig.log());
    rig.clear("fail-lock");
    is_waited_for(&rig, &mut supervisor, 1001);
    is_well(&rig, supervisor, &file);
}

#[test]
fn a_process_that_begins_with_it_while_cuda_is_locked_waits_and_is_taken() {
    let Some(mut rig) = Rig::new() else { return };
    let file = when(&mut rig, "child");
    let mut supervisor = rig.start();
    rig.standin.fault("fail-checkpoint", "hold");
    let held = rig.standin.path().join("fail-checkpoint.held");
    supervisor.ask();
    supervisor.until("the job is locked", |_| held.exists());
    fs::write(&file, "").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let heard = || fs::read_to_string(file.with_extension("done")).unwrap_or_default();
    assert_eq!(heard(), "", "it waits");
    rig.clear("fail-checkpoint");
    supervisor.image();
    supervisor.until("cuInit is over", |_| heard() == "0\n");
    assert!(!rig.log().contains("trying the snapshot again"), "{}", rig.log());
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    is_well(&rig, supervisor, &file);
}
