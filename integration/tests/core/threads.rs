//! A limit of threads that the job and the supervisor have together, as in a pod, a unit or a Slurm job.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::supervisor::{LIMIT, Lab, comes};

/// A control group with a limit of processes and threads. Removed when it goes out of scope, once all in it have ended.
struct Limited(PathBuf);

impl Limited {
    fn gate() -> Option<Limited> {
        let name = format!("rekindle-test-{}", std::process::id());
        // cgroup v1 with the controller, or v2 with it delegated.
        let folders = [Path::new("/sys/fs/cgroup/pids"), Path::new("/sys/fs/cgroup")];
        let made = folders.into_iter().map(|folder| folder.join(&name)).find(|group| {
            fs::create_dir(group).is_ok() && (group.join("pids.max").exists() || fs::remove_dir(group).is_err())
        });
        rekindle_testing::needs("groups", made.map(Limited), "no control group with a limit of processes can be made")
    }

    fn set(&self, limit: &str) {
        fs::write(self.0.join("pids.max"), limit).unwrap();
    }

    /// No other process or thread can begin in it, also when one of them ends a moment later.
    fn close(&self) {
        let (mut least, until) = (u64::MAX, Instant::now() + Duration::from_secs(2));
        while Instant::now() < until {
            let current = fs::read_to_string(self.0.join("pids.current")).unwrap();
            least = least.min(current.trim().parse().unwrap());
            self.set(&least.to_string());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        comes(LIMIT, || fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn a_snapshot_waits_for_a_thread_and_the_job_is_not_harmed() {
    let (Some(lab), Some(group)) = (Lab::new(), Limited::gate()) else { return };
    // It waits without a process of its own, which might be counted when the group is closed.
    let pipe = lab.file("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    let script = format!(
        "echo $$ >{}/cgroup.procs; exec 3<>{}; echo ready; while :; do read -t 0.05 -u 3; done",
        group.0.display(),
        pipe.display()
    );
    let mut run = lab.run(["bash", "-c", &script]);
    run.wait_printed("ready");
    run.job_pid(&lab);
    fs::write(group.0.join("cgroup.procs"), run.pid().to_string()).unwrap();
    group.close();
    run.signal(Signal::SIGUSR1);
    run.wait_said("cannot start a thread (snapshot)");
    assert!(run.runs() && lab.images().is_empty());
    group.set("max");
    run.wait_for("an image", || !lab.images().is_empty());
    let said = run.err();
    assert!(!said.contains("the job ended"), "{said}");
    lab.kill_9(run);
}
