//! One job under `rekindle run`, with a stand-in driver, a store and a CRIU of its own.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rekindle::published::Published;
use rekindle_cuda::{self as cuda, Driver, Process};
use rekindle_store::{Access, Image, ImageId, JobFolder, Store};

use crate::standin::Standin;

/// Longer than anything here takes, on a machine that does something else besides.
const PATIENCE: Duration = Duration::from_secs(30);

/// A job, and what it is run with.
pub(crate) struct Rig {
    pub(crate) standin: Standin,
    dir: tempfile::TempDir,
    command: Vec<String>,
    settings: Vec<(String, String)>,
    /// The command of rekindle, where it is not `run`.
    instead: Option<String>,
    /// What it gets besides.
    flags: Vec<String>,
    /// The environment, besides.
    environment: Vec<(String, String)>,
    /// The program that is run with rekindle's arguments, and what comes before them.
    wrapper: Vec<PathBuf>,
    /// One test at a time may hold back the machine; each has an end.
    deadline: Instant,
}

impl Rig {
    /// A job of one process. None, with a word, where there is no root or no CRIU.
    pub(crate) fn new() -> Option<Rig> {
        if !rekindle_testing::root() {
            return None;
        }
        let criu = rekindle_testing::criu()?;
        let dir = tempfile::Builder::new().prefix("rekindle-faults-").tempdir().unwrap();
        fs::create_dir(dir.path().join("store")).unwrap();
        fs::set_permissions(dir.path().join("store"), fs::Permissions::from_mode(0o700)).unwrap();
        let standin = Standin::new();
        let fault = dir.path().join("criu-fault");
        let wrapper = dir.path().join("criu");
        // A fault is a piece of shell that runs in CRIU's place; what it does not end goes on to the real one.
        let text = format!(
            "#!/bin/sh\nreal='{}'; store='{}'; memory='{}'\n\
             if [ \"$1\" != --version ] && [ -f '{fault}' ]; then . '{fault}'; fi\nexec \"$real\" \"$@\"\n",
            Path::new(&criu).display(),
            dir.path().join("store").display(),
            dir.path().join("memory").display(),
            fault = fault.display()
        );
        let draft = dir.path().join("criu.draft");
        fs::write(&draft, text).unwrap();
        // By another process: a child that another test forks meanwhile would hold our descriptor for a moment, and a file
        // that is open for writing cannot be executed (ETXTBSY).
        assert!(Command::new("install").args(["-m", "755"]).args([&draft, &wrapper]).status().unwrap().success());
        let settings = [
            ("SNAPSHOT_INTERVAL", "off"),
            ("SNAPSHOT_RETRY_AFTER", "300ms"),
            ("SNAPSHOT_RETRY_MAX", "2s"),
            ("SNAPSHOT_GRACE", "20s"),
            ("STORE_MIN_FREE", "0"),
            ("STORE_DIRECTORY", &dir.path().join("store").display().to_string()),
            ("SNAPSHOT_STAGING_DIRECTORY", &dir.path().join("memory").display().to_string()),
            ("RESTART_BACKOFF", "20ms"),
            ("RESTART_BACKOFF_MAX", "200ms"),
            ("RESTART_MAX_RESTARTS", "1000"),
            ("RESTART_MIN_UPTIME", "0s"),
            ("RESTART_RESTORE_TIMEOUT", "20s"),
            ("CRIU_PATH", &wrapper.display().to_string()),
            ("LOG_LEVEL", "debug"),
        ];
        let settings = settings.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let deadline = Instant::now() + Duration::from_secs(150);
        let wrapper = vec![env!("CARGO_BIN_EXE_rekindle").into()];
        let (flags, environment) = (Vec::new(), Vec::new());
        let (command, instead) = (Vec::new(), None);
        let mut rig = Rig { standin, dir, command, settings, instead, flags, environment, wrapper, deadline };
        rig.job(&[]);
        Some(rig)
    }

    /// A job of one process, with arguments of standin_job.py.
    pub(crate) fn job(&mut self, args: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs/standin_job.py");
        self.set_command(&script, args);
    }

    /// A job of several processes, with arguments of standin_ranks.py after the number.
    pub(crate) fn ranks(&mut self, ranks: usize, args: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs/standin_ranks.py");
        let ranks = ranks.to_string();
        let args: Vec<&str> = std::iter::once(ranks.as_str()).chain(args.iter().copied()).collect();
        self.set_command(&script, &args);
    }

    /// A job of several processes that share memory, with arguments of standin_share.py after the number.
    pub(crate) fn share(&mut self, ranks: usize, args: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs/standin_share.py");
        let (ranks, todo) = (ranks.to_string(), self.todo().display().to_string());
        let args: Vec<&str> = [&*ranks, "--do", &*todo].into_iter().chain(args.iter().copied()).collect();
        self.set_command(&script, &args);
    }

    fn todo(&self) -> PathBuf {
        self.standin.path().join("do")
    }

    /// A job of one process that does not use CUDA, with arguments of plain_job.py.
    pub(crate) fn plain(&mut self, args: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs/plain_job.py");
        self.set_command(&script, args);
    }

    /// For a test that takes longer than others.
    pub(crate) fn may_take(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    fn set_command(&mut self, script: &Path, args: &[&str]) {
        let first = ["python3".to_owned(), script.display().to_string(), self.standin.output().display().to_string()];
        self.command = first.into_iter().chain(args.iter().map(|arg| (*arg).to_owned())).collect();
    }

    /// For a job of another user, whose folders have to let it pass.
    pub(crate) fn for_another_user(&mut self) {
        fs::set_permissions(self.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        // One below a home directory is not for others.
        if Path::new("/usr/bin/python3").exists() {
            self.command[0] = "/usr/bin/python3".into();
        }
    }

    /// A setting by its environment name without REKINDLE_.
    pub(crate) fn set(&mut self, key: &str, value: &str) {
        self.settings.retain(|(known, _)| known != key);
        self.settings.push((key.to_owned(), value.to_owned()));
    }

    /// From now on `rekindle VERB j` instead of `run`.
    pub(crate) fn instead(&mut self, verb: &str) {
        self.instead = Some(verb.to_owned());
    }

    /// Its flags from now on.
    pub(crate) fn flags(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    }

    /// A variable of the environment.
    pub(crate) fn variable(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Another command about the job; exit code and standard output.
    pub(crate) fn ask(&self, args: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        for (key, value) in &self.settings {
            command.env(format!("REKINDLE_{key}"), value);
        }
        let output = self.standin.install(&mut command).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    }

    /// What is to happen in CRIU's place, or nothing.
    pub(crate) fn criu_fault(&self, shell: &str) {
        let path = self.dir.path().join("criu-fault");
        if shell.is_empty() {
            let _ = fs::remove_file(path);
        } else {
            // In one step: a CRIU may be starting.
            fs::write(path.with_extension("new"), format!("{shell}\n")).unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        }
    }

    pub(crate) fn clear(&self, fault: &str) {
        let _ = fs::remove_file(self.standin.path().join(fault));
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Starts the supervisor; waits for nothing.
    pub(crate) fn run(&self) -> Supervisor<'_> {
        let log = self.dir.path().join("log");
        let err = fs::OpenOptions::new().append(true).create(true).open(&log).unwrap();
        let from = err.metadata().unwrap().len();
        let (program, first) = self.wrapper.split_first().unwrap();
        let mut command = Command::new(program);
        command.args(first);
        match &self.instead {
            Some(verb) => command.arg(verb).arg("j").args(&self.flags),
            None => command.args(["run", "--name", "j"]).args(&self.flags).arg("--").args(&self.command),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(err).env_remove("RUST_LOG").current_dir(self.dir.path());
        for (key, value) in &self.settings {
            command.env(format!("REKINDLE_{key}"), value);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let child = self.standin.install(&mut command).spawn().unwrap();
        Supervisor { rig: self, child, mark: usize::try_from(from).unwrap() }
    }

    /// Starts it and waits until the job counts.
    pub(crate) fn start(&self) -> Supervisor<'_> {
        let mut supervisor = self.run();
        supervisor.said("to=\"running\"");
        supervisor.counts();
        supervisor
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn folder(&self) -> JobFolder {
        Store::open(&self.dir.path().join("store"), Access::Read).unwrap().job(&"j".parse().unwrap()).unwrap()
    }

    /// Every copy of every image, newest first: in memory and in the store.
    pub(crate) fn copies(&self) -> Vec<Image> {
        self.folder().copies().unwrap()
    }

    /// All images, newest first; one that is in memory and in the store as it is in memory.
    pub(crate) fn images(&self) -> Vec<Image> {
        let mut images = self.copies();
        images.dedup_by_key(|image| image.id);
        images
    }

    /// The places in memory that are mounted.
    pub(crate) fn mounted(&self) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        points.filter(|point| point.starts_with(self.dir.path().join("memory"))).collect()
    }

    /// What a restart of the machine does to images in memory.
    pub(crate) fn forget_memory(&self) {
        for point in self.mounted() {
            nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH).unwrap();
        }
    }

    pub(crate) fn state(&self) -> Option<Published> {
        Published::read(&self.folder().state_file()).ok()
    }

    /// Every image that is listed is whole, be it in memory or in the store, and nothing else is there.
    pub(crate) fn assert_store_is_whole(&self) {
        for image in self.copies() {
            assert!(image.is_good(), "{:?}\n{}", image.state, self.log());
            assert!(image.verify().is_sound(), "image {}: {:?}", image.id, image.verify());
        }
    }

    pub(crate) fn drafts(&self) -> Vec<String> {
        let names = fs::read_dir(self.folder().images_dir()).unwrap().flatten();
        names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.starts_with(".tmp-"))
            .collect()
    }

    /// The output of each rank.
    fn outputs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.standin.path()).unwrap().flatten().map(|entry| entry.path());
        let is_output = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name == "out.txt" || name.strip_prefix("out.txt.").is_some_and(|n| n.parse::<u32>().is_ok())
        };
        entries.filter(is_output).collect()
    }

    /// Whatever happened, the job counted each number once. For a job that began only once.
    pub(crate) fn assert_sequence(&self) {
        for path in self.outputs() {
            let text = fs::read_to_string(&path).unwrap();
            for (line, expected) in text.lines().zip(1u64..) {
                assert_eq!(line.parse(), Ok(expected), "{} does not go on: {text:?}", path.display());
            }
        }
    }

    /// Processes of the job, of its world and of its supervisor, by what they carry of our folders.
    pub(crate) fn processes(&self) -> Vec<(i32, String)> {
        let marks = [self.dir.path(), self.standin.path()].map(|path| path.as_os_str().as_encoded_bytes().to_vec());
        let mut found = Vec::new();
        for pid in pids() {
            let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let text = [read("cmdline"), read("environ"), read("maps")].concat();
            if marks.iter().any(|mark| text.windows(mark.len()).any(|window| window == mark)) {
                found.push((pid, String::from_utf8_lossy(&read("cmdline")).replace('\0', " ")));
            }
        }
        found
    }

    /// The processes of the command, as numbered here, whatever state the job is in.
    pub(crate) fn job_pids(&self) -> Vec<i32> {
        let line = self.command[1..].join(" ");
        let is_job = |(_, text): &(i32, String)| !text.contains("--name") && text.contains(&line);
        self.processes().into_iter().filter(is_job).map(|(pid, _)| pid).collect()
    }

    /// Fails unless all that was started is gone soon: at once, on a machine that does nothing else.
    pub(crate) fn assert_nothing_left(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "still there: {left:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The CUDA processes, as numbered here.
    pub(crate) fn cuda_pids(&self) -> Vec<i32> {
        let folder = self.standin.path().display().to_string();
        let is_control = |line: &str| line.contains(&folder) && line.ends_with(".ctl");
        let has =
            |pid: &i32| fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.lines().any(is_control));
        // A caller maps it too while it asks.
        let ours = Path::new(env!("CARGO_BIN_EXE_rekindle"));
        let is_caller = |pid: &i32| rekindle_os::process::executable(*pid).as_deref() == Some(ours);
        pids().filter(has).filter(|pid| !is_caller(pid)).collect()
    }

    pub(crate) fn driver(&self) -> Driver {
        self.standin.driver()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // A test that failed in the middle leaves nothing either.
        for (pid, _) in self.processes() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
        for point in self.mounted() {
            let _ = nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH);
        }
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "---- log of the supervisor\n{}----", self.log());
        }
    }
}

fn pids() -> impl Iterator<Item = i32> {
    let me = std::process::id();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(move |pid: &i32| pid.unsigned_abs() != me)
}

/// A running `rekindle run`; killed when dropped.
pub(crate) struct Supervisor<'a> {
    rig: &'a Rig,
    child: Child,
    /// The log was read up to here.
    mark: usize,
}

impl Supervisor<'_> {
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&Rig) -> bool) {
        let deadline = (Instant::now() + PATIENCE).min(self.rig.deadline);
        while !done(self.rig) {
            let ended = self.child.try_wait().unwrap();
            assert_eq!(ended, None, "the supervisor ended before {what}");
            assert!(Instant::now() < deadline, "waited in vain until {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for a line of the log after the last one that was waited for.
    pub(crate) fn said(&mut self, words: &str) -> String {
        let mut found = None;
        let mark = self.mark;
        self.until(&format!("it says {words:?}"), |rig| {
            let log = rig.log();
            let news = &log[mark.min(log.len())..];
            let Some(at) = news.find(words) else { return false };
            let end = news[at..].find('\n').map(|end| at + end);
            let Some(end) = end else { return false };
            let start = news[..at].rfind('\n').map_or(0, |start| start + 1);
            found = Some((mark + end, news[start..end].to_owned()));
            true
        });
        let (mark, line) = found.unwrap();
        self.mark = mark;
        line
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// Asks for a snapshot.
    pub(crate) fn ask(&self) {
        self.signal(nix::sys::signal::Signal::SIGUSR1);
    }

    /// Waits for the next image.
    pub(crate) fn image(&mut self) -> Image {
        let line = self.said("the job was frozen for");
        let id = line.split("image ").nth(1).and_then(|rest| rest.split(':').next()).unwrap();
        let id: ImageId = id.parse().unwrap();
        self.rig.images().into_iter().find(|image| image.id == id).unwrap()
    }

    pub(crate) fn snapshot(&mut self) -> Image {
        self.ask();
        self.image()
    }

    /// Asks for a snapshot that fails; what it says of it.
    pub(crate) fn failing_snapshot(&mut self) -> String {
        self.ask();
        self.said("the snapshot failed")
    }

    fn counts_of(rig: &Rig) -> Vec<(PathBuf, u64)> {
        let last = |path: PathBuf| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let number = text.lines().last().and_then(|line| line.parse().ok()).unwrap_or(0);
            (path, number)
        };
        rig.outputs().into_iter().map(last).collect()
    }

    /// Waits until the counter of every rank has moved.
    pub(crate) fn counts(&mut self) {
        let before = Self::counts_of(self.rig);
        self.until("the job counts", |rig| {
            let now = Self::counts_of(rig);
            let went_on = |(path, number): &(PathBuf, u64)| {
                let was = before.iter().find(|(known, _)| known == path).map_or(0, |(_, was)| *was);
                // A restore puts the file back.
                *number != was && *number > 1
            };
            !now.is_empty() && now.iter().all(went_on)
        });
    }

    /// Has a rank of standin_share.py do something; what came of it.
    pub(crate) fn has_rank(&mut self, rank: u32, word: &str) -> String {
        let (todo, done) = (self.rig.todo(), self.rig.todo().with_extension("done"));
        let before = fs::read_to_string(&done).unwrap_or_default();
        fs::write(todo.with_extension("new"), format!("{rank} {word}")).unwrap();
        fs::rename(todo.with_extension("new"), todo).unwrap();
        let mut answer = String::new();
        self.until(&format!("rank {rank} has done {word}"), |_| {
            answer = fs::read_to_string(&done).unwrap_or_default();
            answer.len() > before.len() && answer.ends_with('\n')
        });
        answer.split_off(before.len())
    }

    /// Waits until so many ranks count: from then on an image has the output of each open, and puts it back.
    pub(crate) fn ranks_count(&mut self, ranks: usize) {
        self.until("all ranks count", |rig| {
            Self::counts_of(rig).iter().filter(|(_, number)| *number > 1).count() == ranks
        });
    }

    /// The job runs on: every CUDA process is running, every rank counts, and nothing was restarted.
    pub(crate) fn assert_unharmed(&mut self, ranks: usize) {
        self.assert_running(ranks);
        self.counts();
        self.rig.assert_sequence();
    }

    /// Every CUDA process is running.
    pub(crate) fn assert_running(&mut self, ranks: usize) {
        let pids = self.rig.cuda_pids();
        assert_eq!(pids.len(), ranks, "CUDA processes {pids:?}");
        for pid in pids {
            let process = Process::with_driver(pid, self.rig.driver()).unwrap();
            assert_eq!(process.state().unwrap(), cuda::State::Running, "process {pid}");
        }
    }

    /// The process of the command.
    pub(crate) fn main_pid(&mut self) -> i32 {
        let mut pid = None;
        self.until("the job has a process", |rig| {
            pid = rig.cuda_pids().into_iter().find(|pid| inner(*pid) == Some(1001));
            pid.is_some()
        });
        pid.unwrap()
    }

    /// Kills the process of the command.
    pub(crate) fn kill_job(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.main_pid());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    }

    /// Waits until there is no draft. An image that is on its way to the store has one; what nobody works on stays.
    pub(crate) fn leaves_no_draft(&mut self) {
        self.until("no draft is left", |rig| rig.drafts().is_empty());
    }

    /// Waits until it ends; its exit code, and None when a signal ended it.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let deadline = (Instant::now() + PATIENCE).min(self.rig.deadline);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "waited in vain for the supervisor's end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops it as a service manager does: a last snapshot, nothing left.
    pub(crate) fn stop(&mut self) {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        assert_eq!(self.wait(), Some(143), "exit code");
        self.rig.assert_nothing_left();
    }

    /// kill -9.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

impl Drop for Supervisor<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process's own number of itself.
pub(crate) fn inner(pid: i32) -> Option<i32> {
    rekindle_os::process::inner_pid(pid)
}
