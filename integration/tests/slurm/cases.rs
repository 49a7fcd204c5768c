//! What Slurm can do to a job. Each case ends the same way: the job is told to finish, and its whole output is that of
//! a run that nobody disturbed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use chrono::Utc;
use rekindle::published::Published;
use rekindle::telemetry::events::{What, read};
use rekindle_store::{Access, JobFolder, Store};

use crate::cluster::Cluster;
use crate::supervisor::{LIMIT, Lab, assert_counts_up, comes, numbers, tail};

/// Slurm looks at time limits every 30 s (PERIODIC_TIMEOUT in its controller.c), and they are whole minutes.
const MINUTES: Duration = Duration::from_secs(300);

/// A case has a node of its own.
pub(crate) struct Case<'a> {
    cluster: &'a Cluster,
    node: &'static str,
    lab: Lab,
}

/// A job that was given to Slurm.
struct Job<'a> {
    case: &'a Case<'a>,
    lab: &'a Lab,
    /// The id that Slurm uses, `JOB` or `JOB_TASK`.
    id: String,
    /// The file with the output of rekindle and Slurm.
    out: String,
}

impl<'a> Case<'a> {
    pub(crate) fn new(cluster: &'a Cluster, node: &'static str) -> Case<'a> {
        Case { cluster, node, lab: Lab::new().unwrap() }
    }

    /// Gives the job script of the documentation to Slurm, with a job that counts.
    fn submit(&'a self, options: &[&str], settings: &[(&str, &str)]) -> Job<'a> {
        let id = self.give(options, settings, "slurm.out");
        Job { case: self, lab: &self.lab, id, out: "slurm.out".into() }
    }

    fn give(&self, options: &[&str], settings: &[(&str, &str)], out: &str) -> String {
        let lab = &self.lab;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/deploy/slurm/job.sbatch");
        let program = Path::new(env!("CARGO_BIN_EXE_rekindle")).parent().unwrap();
        let mut command = Command::new("sbatch");
        command.args(["--parsable", "--nodelist", self.node, "--output"]).arg(lab.file(out));
        command
            .args(options)
            .arg(script)
            .args(lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]));
        command.env("PATH", format!("{}:{}", program.display(), std::env::var("PATH").unwrap()));
        command.envs(lab.variables()).envs(settings.iter().copied()).current_dir(lab.path());
        let id = self.cluster.tell(&mut command);
        assert!(id.parse::<u32>().is_ok(), "{id}");
        id
    }
}

impl Job<'_> {
    /// Its folder in the store, by the name that it gets from Slurm.
    fn path(&self) -> PathBuf {
        self.lab.store().join(format!("slurm-{}", self.id))
    }

    fn folder(&self) -> JobFolder {
        let name = format!("slurm-{}", self.id).parse().unwrap();
        Store::open(&self.lab.store(), Access::Read).unwrap().job(&name).unwrap()
    }

    fn published(&self) -> Option<Published> {
        Published::read(&self.path().join("state.json")).ok()
    }

    fn output(&self) -> String {
        std::fs::read_to_string(self.path().join("log/stdout.log")).unwrap_or_default()
    }

    /// The output of rekindle and Slurm so far.
    fn said(&self) -> String {
        self.lab.read(&self.out)
    }

    /// A field of `scontrol show job`.
    fn field(&self, name: &str) -> String {
        let all = self.case.cluster.ask("scontrol", ["show", "job", &self.id]);
        let mark = format!("{name}=");
        all.split_whitespace().find_map(|word| word.strip_prefix(&mark)).unwrap_or_default().to_owned()
    }

    fn wait(&self, limit: Duration, what: &str, done: impl FnMut() -> bool) {
        let node = self.case.node;
        assert!(
            comes(limit, done),
            "{node}: waited {limit:?} in vain until {what}\n{}\n{}",
            tail(&self.said()),
            self.case.cluster.ask("scontrol", ["show", "job", &self.id])
        );
    }

    /// Waits until it has counted on by some.
    fn counts(&self) {
        let before = numbers(&self.output()).len();
        self.wait(LIMIT, "it counts", || numbers(&self.output()).len() >= before + 10);
    }

    /// Waits until rekindle has said it so many times.
    fn wait_said(&self, limit: Duration, words: &str, times: usize) {
        self.wait(limit, &format!("it is said {times} times: {words}"), || self.said().matches(words).count() >= times);
    }

    fn images(&self) -> usize {
        if self.path().join("images").is_dir() { self.folder().images().unwrap().len() } else { 0 }
    }

    /// Waits until it goes on from an image, after `times` restarts by Slurm.
    fn goes_on(&self, limit: Duration, times: usize) {
        self.wait_said(limit, "the job was restored from image", times);
        self.counts();
        assert_eq!(self.field("Restarts"), times.to_string());
        assert!(!self.said().contains("job starts anew"));
    }

    /// Has it finish; everything must be as if nothing had happened.
    fn finishes(&self) {
        std::fs::write(self.lab.file("finish"), "").unwrap();
        self.wait(LIMIT, "Slurm has it for completed", || self.field("JobState") == "COMPLETED");
        assert_eq!(self.field("ExitCode"), "0:0");
        let output = self.output();
        assert!(output.ends_with("done\n") && output.matches("done").count() == 1, "{}", tail(&output));
        assert_counts_up(&output);
        let starts = format!("job slurm-{} starts", self.id);
        assert_eq!(self.said().matches(&starts).count(), 1, "it began once\n{}", tail(&self.said()));
    }

    fn happened(&self) -> Vec<What> {
        read(&self.folder().log_dir()).unwrap().into_iter().map(|event| event.what).collect()
    }
}

/// The line of the job script: USR2 to rekindle some time before the end, exit code 75, RequeueExit.
pub(crate) fn a_signal_before_the_time_limit(case: &Case<'_>) {
    // It comes within 30 s; by itself rekindle would begin after 40.
    let job = case.submit(&["--time=1", "--signal=B:USR2@50"], &[]);
    job.counts();
    job.wait_said(MINUTES, "received SIGUSR2", 1);
    job.goes_on(LIMIT, 1);
    assert!(!job.happened().iter().any(|what| matches!(what, What::LastCall { .. })));
    job.finishes();
}

/// Nobody sends a signal: rekindle asks Slurm for the limit, and stops in time.
pub(crate) fn a_time_limit_that_nobody_warns_of(case: &Case<'_>) {
    let settings = [("REKINDLE_SNAPSHOT_INTERVAL", "5s")];
    let job = case.submit(&["--time=1", "--signal=B:CONT@1"], &settings);
    job.wait(LIMIT, "it runs", || job.field("JobState") == "RUNNING");
    let begun = Utc::now();
    job.counts();
    job.wait(LIMIT, "the deadline is known", || job.published().is_some_and(|now| now.deadline.is_some()));
    let deadline = job.published().unwrap().deadline.unwrap();
    let length = (deadline - begun).num_seconds();
    assert!((30..=62).contains(&length), "{length}");
    job.wait(LIMIT, "a last snapshot is foretold", || job.published().is_some_and(|now| now.predicted.is_some()));
    job.wait_said(MINUTES, "taking a final snapshot, then stopping the job", 1);
    // As it is recorded: this test may be late.
    let events = read(&job.folder().log_dir()).unwrap();
    let last_call = events.iter().find(|event| matches!(event.what, What::LastCall { .. })).unwrap();
    let early = (deadline - last_call.time).num_milliseconds();
    assert!((500..25_000).contains(&early), "{early} ms before the deadline\n{}", tail(&job.said()));
    job.goes_on(LIMIT, 1);
    let said = job.said();
    assert!(!said.contains("TIME LIMIT") && !said.contains("received SIGTERM"), "{}", tail(&said));
    job.finishes();
}

/// One with a higher priority wants the node.
pub(crate) fn preemption(case: &Case<'_>) {
    let job = case.submit(&["--partition=low", "--exclusive"], &[]);
    job.counts();
    let other = case.lab.file("other");
    let mut higher = Command::new("sbatch");
    higher.args(["--parsable", "--partition=high", "--exclusive", "--nodelist", case.node, "--output=/dev/null"]);
    higher.arg("--wrap").arg(format!("touch {}; sleep 1", other.display())).current_dir(case.lab.path());
    case.cluster.tell(&mut higher);
    job.wait_said(LIMIT, "received SIGUSR2", 1);
    job.wait(LIMIT, "the other has run", || other.exists());
    job.goes_on(LIMIT, 1);
    job.finishes();
}

/// `scontrol requeue`: SIGTERM to each process of the job, so that what counts is the image before.
pub(crate) fn an_administrator_who_queues_it_again(case: &Case<'_>) {
    let job = case.submit(&[], &[("REKINDLE_SNAPSHOT_INTERVAL", "300ms")]);
    for times in 1..=2 {
        let before = job.images();
        job.wait(LIMIT, "a new image is there", || job.images() > before.min(2));
        job.counts();
        case.cluster.tell(Command::new("scontrol").args(["requeue", &job.id]));
        job.goes_on(LIMIT, times);
    }
    job.finishes();
}

/// `scheduler.requeue = "scontrol"`, with a deadline of the user's own.
pub(crate) fn rekindle_queues_it_again(case: &Case<'_>) {
    let settings = [
        ("REKINDLE_SCHEDULER_REQUEUE", "scontrol"),
        // The next life has the same time, and completes in it, on a busy machine too.
        ("REKINDLE_SCHEDULER_DEADLINE", "30s"),
        // The deadline must leave more time than a final snapshot may take.
        ("REKINDLE_SNAPSHOT_GRACE", "7s"),
    ];
    let begun = Instant::now();
    let job = case.submit(&[], &settings);
    job.counts();
    job.wait_said(LIMIT, "taking a final snapshot, then stopping the job", 1);
    assert!(begun.elapsed() > Duration::from_secs(14), "it gets half of the time at least");
    job.goes_on(LIMIT, 1);
    assert!(job.said().contains("DUE TO JOB REQUEUE") || case.cluster.log().contains("_job_requeue_op"));
    job.finishes();
}

/// Each is a job of its own, and finds its own images.
pub(crate) fn the_tasks_of_an_array(case: &Case<'_>) {
    let array = case.give(&["--array=1,7"], &[], "slurm.%a");
    let task = |task: u32| Job { case, lab: &case.lab, id: format!("{array}_{task}"), out: format!("slurm.{task}") };
    let (one, seven) = (task(1), task(7));
    one.counts();
    seven.counts();
    // As examples/deploy/slurm/rekindle-slurm asks.
    assert_eq!(case.cluster.ask("squeue", ["--noheader", "--jobs", &one.id, "--format", "%U"]), "0");
    case.cluster.tell(Command::new("scancel").args(["--signal=USR2", "--batch", &one.id]));
    one.goes_on(LIMIT, 1);
    assert!(!seven.said().contains("SIGUSR2"), "{}", tail(&seven.said()));
    one.finishes();
    seven.finishes();
}

/// The machine goes down with all that is on it, and comes up again.
pub(crate) fn the_node_restarts(case: &Case<'_>) {
    let job = case.submit(&[], &[("REKINDLE_SNAPSHOT_INTERVAL", "300ms")]);
    job.wait(LIMIT, "an image is in the store", || job.images() > 0);
    job.counts();
    case.cluster.kill_node(case.node);
    for (pid, _) in case.lab.processes() {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
    }
    case.lab.assert_all_gone();
    case.lab.forget_memory();
    case.cluster.start_node(case.node);
    job.goes_on(MINUTES, 1);
    job.finishes();
}

/// The second nodes of [`a_group_that_is_queued_again`] and [`a_group_that_queues_itself_again`].
pub(crate) const SECOND: [&str; 2] = ["group2", "groups2"];

/// A job over two nodes stops before its time limit, is queued again, and continues on both.
pub(crate) fn a_group_that_is_queued_again(case: &Case<'_>) {
    a_group(case, SECOND[0], "exit-code");
}

/// The same with `scheduler.requeue = "scontrol"`: one node asks, after both have stored their parts.
pub(crate) fn a_group_that_queues_itself_again(case: &Case<'_>) {
    let said = a_group(case, SECOND[1], "scontrol");
    assert_eq!(said.matches("asking Slurm to queue the job again").count(), 1, "{}", tail(&said));
}

fn a_group(case: &Case<'_>, second: &str, requeue: &str) -> String {
    let bridge = format!("rk{}", case.node);
    if !crate::support::etcd() {
        return "asking Slurm to queue the job again".into();
    }
    let (lab, etcd) = (&case.lab, crate::support::Cluster::start(1));
    let at = |path: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let program = Path::new(env!("CARGO_BIN_EXE_rekindle")).parent().unwrap();
    let mut command = Command::new("sbatch");
    command.args(["--parsable", "--nodes=2", "--nodelist", &format!("{},{second}", case.node)]);
    command.arg("--output").arg(lab.file("slurm.out")).arg(at("examples/deploy/slurm/group.sbatch"));
    // It completes when this test says so.
    command
        .arg("python3")
        .arg(at("integration/jobs/ring.py"))
        .arg(u32::MAX.to_string())
        .env("RING_END", lab.file("end"));
    command.env("PATH", format!("{}:{}", program.display(), std::env::var("PATH").unwrap()));
    command.envs(lab.variables()).current_dir(lab.path());
    command.env("REKINDLE_GROUP_COORDINATOR", &etcd.members[0].client).env("REKINDLE_GROUP_LEASE", "5s");
    command.env("REKINDLE_SCHEDULER_REQUEUE", requeue);
    command.env("REKINDLE_GROUP_NETWORK", format!("bridge:{bridge}")).env("REKINDLE_SNAPSHOT_INTERVAL", "1s");
    let id = case.cluster.tell(&mut command);
    let said = || lab.read("slurm.out");
    let say = |limit, words: &str, times| {
        let done = comes(limit, || said().matches(words).count() >= times);
        assert!(done, "group: waited {limit:?} in vain until {times} times: {words}\n{}", tail(&said()));
    };
    say(LIMIT, "was stored in", 4);
    // As before the time limit.
    case.cluster.ask("scancel", ["--signal=USR2", "--batch", &id]);
    let state = || case.cluster.ask("scontrol", ["show", "job", &id]);
    // On other nodes the next supervisors would wait for those whose names are in the locks.
    let lock = |rank| std::fs::read(lab.store().join(format!("slurm-{id}.{rank}/lock"))).unwrap();
    let given_back = || lock(0).is_empty() && lock(1).is_empty() && state().contains("JobState=PENDING");
    assert!(comes(MINUTES, given_back), "{}\n{}", state(), tail(&said()));
    say(MINUTES, "the job was restored from image", 2);
    std::fs::write(lab.file("end"), "").unwrap();
    say(MINUTES, "done ", 2);
    assert!(comes(LIMIT, || state().contains("JobState=COMPLETED")), "{}\n{}", state(), tail(&said()));
    assert!(state().contains("Restarts=1") && !said().contains("WRONG"), "{}", state());
    let _ = Command::new("ip").args(["link", "del", &bridge]).status();
    said()
}
