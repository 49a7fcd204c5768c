//! `rekindle` as a user runs it: real processes, a store of its own, a limit on every wait.
//!
//! A [`Lab`] is one test's ground. Everything it starts carries its folder's name in an argument, in its environment or
//! in its executable's path, so what was left running can be told from everything else on the machine. A lab that goes
//! out of scope kills what is left, and fails the test if something outlived the supervisor.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]
#![allow(dead_code, reason = "each test binary uses a part")]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use rekindle::published::Published;
use rekindle_store::{Access, Image, JobFolder, Store};

/// How long anything here may take. Far above what it takes on an idle machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Times short enough for a test; a test's own configuration comes after, in sections that TOML lets appear once, so
/// it is given as whole lines `section.key = value`.
const CONFIG: &[(&str, &str)] = &[
    ("snapshot.interval", "\"off\""),
    ("snapshot.grace", "\"20s\""),
    ("snapshot.dump-timeout", "\"20s\""),
    ("snapshot.retry-after", "\"200ms\""),
    ("store.min-free", "\"1MiB\""),
    ("restart.backoff", "\"100ms\""),
    ("restart.backoff-max", "\"200ms\""),
    ("restart.min-uptime", "\"1ms\""),
    ("restart.restore-timeout", "\"20s\""),
];

/// Says SKIP and answers false where something that a test needs is not there; fails where it must be.
pub(crate) fn gate() -> bool {
    rekindle_testing::root()
        && rekindle_testing::criu().is_some()
        && rekindle_testing::require("python", python().is_some(), "there is no python3")
}

/// A Python that other users can run too, where there is one; never a shell script in front of it.
pub(crate) fn python() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let ask = |name: &str| {
        let out = Command::new(name).args(["-Sc", "import sys; print(sys.executable)"]).output().ok()?;
        Some(PathBuf::from(String::from_utf8(out.stdout).ok()?.trim())).filter(|path| path.is_file())
    };
    FOUND.get_or_init(|| ask("/usr/bin/python3").or_else(|| ask("python3"))).as_deref()
}

/// The CRIU under test.
pub(crate) fn criu() -> PathBuf {
    std::env::var_os("REKINDLE_CRIU").unwrap().into()
}

/// A program of `integration/jobs`.
pub(crate) fn job_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs").join(name)
}

/// Waits until `done`, at most [`LIMIT`].
pub(crate) fn wait_for(what: &str, done: impl FnMut() -> bool) {
    assert!(comes(LIMIT, done), "waited {LIMIT:?} in vain until {what}");
}

/// Whether `done` comes true in time.
pub(crate) fn comes(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !done() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Sends a signal to one process.
pub(crate) fn kill(pid: i32, signal: Signal) {
    nix::sys::signal::kill(Pid::from_raw(pid), signal).unwrap();
}

/// Whether the process is there and not a zombie.
pub(crate) fn alive(pid: i32) -> bool {
    rekindle_os::process::state(pid).is_some_and(|state| !"ZX".contains(state))
}

/// The ground of one test.
#[derive(Debug)]
pub(crate) struct Lab {
    folder: tempfile::TempDir,
    config: Vec<(String, String)>,
    /// The program that is run with rekindle's arguments, and what comes before them.
    wrapper: Vec<OsString>,
}

impl Lab {
    /// A fresh ground; `None` where the test cannot run here.
    pub(crate) fn new() -> Option<Lab> {
        if !gate() {
            return None;
        }
        let folder = tempfile::Builder::new().prefix("rekindle-core-").tempdir().unwrap();
        // A job may run as another user.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let config = CONFIG.iter().map(|(key, value)| ((*key).to_string(), (*value).to_string())).collect();
        Some(Lab { folder, config, wrapper: vec![env!("CARGO_BIN_EXE_rekindle").into()] })
    }

    /// Has everything run within a control group.
    pub(crate) fn within(mut self, group: &Path) -> Lab {
        let name = format!("within-{}", self.wrapper.len());
        let script = self.script(&name, &format!("echo $$ > {}/cgroup.procs\nexec \"$@\"", group.display()));
        self.wrapper.insert(0, script.into());
        self
    }

    /// Sets a key of the configuration, `section.key`, to a TOML value.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Lab {
        self.config.retain(|(known, _)| known != key);
        self.config.push((key.into(), value.into()));
        self
    }

    /// Leaves a key at what it is by itself.
    pub(crate) fn without(mut self, key: &str) -> Lab {
        self.config.retain(|(known, _)| known != key);
        self
    }

    /// Sets a key to the path of a file in the ground.
    pub(crate) fn set_file(self, key: &str, name: &str) -> Lab {
        let value = format!("{:?}", self.file(name));
        self.set(key, &value)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A file in the ground.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap_or_default()
    }

    /// Writes an executable script.
    pub(crate) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.file(name);
        let draft = self.file(&format!("{name}.draft"));
        fs::write(&draft, format!("#!/bin/sh\n{text}\n")).unwrap();
        self.install(&draft, &path);
        path
    }

    /// Copies a file and makes it executable. By another process: a child that another test forks meanwhile would hold our
    /// descriptor for a moment, and a file that is open for writing cannot be executed (ETXTBSY).
    pub(crate) fn install(&self, from: &Path, to: &Path) {
        let done = Command::new("install").args(["-m", "755"]).args([from, to]).status().unwrap();
        assert!(done.success());
    }

    /// Where images are in memory.
    pub(crate) fn memory(&self) -> PathBuf {
        self.file("memory")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.file("store")
    }

    /// The folder of the job `j`, which must be there.
    pub(crate) fn job(&self) -> JobFolder {
        Store::open(&self.store(), Access::Read).unwrap().job(&"j".parse().unwrap()).unwrap()
    }

    /// The images of the job, newest first; none while there is no job.
    pub(crate) fn images(&self) -> Vec<Image> {
        if self.store().join("j/images").is_dir() { self.job().images().unwrap() } else { Vec::new() }
    }

    /// The numbers of the good images, newest first.
    pub(crate) fn good(&self) -> Vec<u32> {
        self.images().iter().filter(|image| image.is_good()).map(|image| image.id.sequence()).collect()
    }

    /// What the job wrote to its standard output, as far as it is not rotated away: that is a hole.
    pub(crate) fn output(&self) -> String {
        let text = fs::read_to_string(self.store().join("j/log/stdout.log")).unwrap_or_default();
        text.trim_start_matches('\0').to_owned()
    }

    /// The same configuration as variables of the environment.
    pub(crate) fn variables(&self) -> Vec<(String, String)> {
        let name = |key: &str| format!("REKINDLE_{}", key.to_uppercase().replace(['.', '-'], "_"));
        let set = self.config.iter().map(|(key, value)| (name(key), value.trim_matches('"').to_owned()));
        let folders = [("STORE_DIRECTORY", self.store()), ("SNAPSHOT_STAGING_DIRECTORY", self.memory())];
        let folders = folders.map(|(name, path)| (format!("REKINDLE_{name}"), path.display().to_string()));
        set.chain(folders).chain([("REKINDLE_LAB".into(), self.path().display().to_string())]).collect()
    }

    fn write_config(&self) -> PathBuf {
        let path = self.file("rekindle.toml");
        let lines = self.config.iter().map(|(key, value)| format!("{key} = {value}\n"));
        fs::write(&path, "version = 1\n".to_string() + &lines.collect::<String>()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    /// `rekindle ARGS` with the lab's store and configuration, not yet started.
    pub(crate) fn command<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Command {
        let (program, first) = self.wrapper.split_first().unwrap();
        let mut command = Command::new(program);
        command.args(first).args(args).stdin(Stdio::null()).current_dir(self.path());
        command.env("REKINDLE_STORE_DIRECTORY", self.store()).env("REKINDLE_LAB", self.path());
        command.env("REKINDLE_SNAPSHOT_STAGING_DIRECTORY", self.memory());
        command.env("REKINDLE_CONTROL_DIRECTORY", self.file("control"));
        command.env("REKINDLE_STORE_SEEN_DIRECTORY", self.file("seen"));
        command.env_remove("REKINDLE_CONFIG");
        command
    }

    /// Runs a command that ends by itself.
    pub(crate) fn rekindle(&self, args: &[&str]) -> Output {
        let config = self.write_config();
        let mut command = self.command(args);
        let running = Running::start(command.arg("--config").arg(config));
        let (code, out, err) = running.finish(LIMIT);
        Output { status: ExitStatusExt::from_raw(code << 8), stdout: out.into(), stderr: err.into() }
    }

    /// Supervises `command` as the job `j`.
    pub(crate) fn run<A: AsRef<OsStr>>(&self, command: impl IntoIterator<Item = A>) -> Running {
        self.run_with(&["run", "--name", "j", "--"], command)
    }

    /// `rekindle --config ... HEAD... COMMAND...`.
    pub(crate) fn run_with<A: AsRef<OsStr>>(&self, head: &[&str], command: impl IntoIterator<Item = A>) -> Running {
        let config = self.write_config();
        let mut all = self.command(["--config".as_ref(), config.as_os_str()]);
        all.args(head).args(command);
        Running::start(&mut all)
    }

    /// The same with more variables in its environment.
    pub(crate) fn run_with_environment<A: AsRef<OsStr>>(
        &self,
        head: &[&str],
        command: impl IntoIterator<Item = A>,
        variables: &[(String, String)],
    ) -> Running {
        let config = self.write_config();
        let mut all = self.command(["--config".as_ref(), config.as_os_str()]);
        all.args(head).args(command).envs(variables.iter().cloned());
        Running::start(&mut all)
    }

    /// Supervises a Python job of `integration/jobs`.
    pub(crate) fn python(&self, name: &str, args: &[&str]) -> Running {
        self.run(self.python_command(name, args))
    }

    pub(crate) fn python_command(&self, name: &str, args: &[&str]) -> Vec<String> {
        let text = |path: &Path| path.to_str().unwrap().to_string();
        let mut command = vec![text(python().unwrap()), "-S".into(), text(&job_file(name))];
        command.extend(args.iter().map(ToString::to_string));
        command
    }

    /// What its supervisor says of the job.
    pub(crate) fn published(&self) -> Option<Published> {
        Published::read(&self.store().join("j/state.json")).ok()
    }

    /// Every process that belongs to this lab, but the ones that wait to be reaped.
    pub(crate) fn processes(&self) -> Vec<(i32, String)> {
        let mark = self.path().as_os_str().as_encoded_bytes();
        let holds = |bytes: &[u8]| bytes.windows(mark.len()).any(|part| part == mark);
        let all = fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
        let ours = all.filter(|pid| {
            let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            alive(*pid) && (holds(&read("cmdline")) || holds(&read("environ")) || exe.starts_with(self.path()))
        });
        ours.map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            (pid, String::from_utf8_lossy(&line).replace('\0', " "))
        })
        .collect()
    }

    /// Kills the supervisor; everything must be gone soon. In the host's PID namespace a restore needs the
    /// numbers of what was killed: there it waits until pid 1 has reaped them, which takes seconds on some machines.
    pub(crate) fn kill_9(&self, run: Running) {
        run.kill_9();
        self.assert_all_gone();
        if self.config.iter().any(|(key, value)| key == "job.pid-namespace" && value.contains("host")) {
            let images = self.images();
            let ids: Vec<i32> = images.iter().filter_map(|i| Some(i.manifest()?.tree.ids.clone())).flatten().collect();
            let taken = |pid: &i32| Path::new(&format!("/proc/{pid}")).exists();
            assert!(comes(LIMIT, || !ids.iter().any(taken)), "not reaped by pid 1: {ids:?}");
        }
    }

    /// The places in memory that are mounted.
    pub(crate) fn mounted(&self) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        points.filter(|point| point.starts_with(self.memory())).collect()
    }

    /// What a restart of the machine does to images in memory.
    pub(crate) fn forget_memory(&self) {
        for point in self.mounted() {
            nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH).unwrap();
        }
    }

    /// Fails unless every process of the lab is gone soon: at once, on a machine that does nothing else.
    pub(crate) fn assert_all_gone(&self) {
        let gone = comes(LIMIT, || self.processes().is_empty());
        assert!(gone, "still there after {LIMIT:?}: {:#?}", self.processes());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // A supervisor that was dropped without an end was killed just now; the kernel takes its job down.
        let left = if comes(LIMIT / 3, || self.processes().is_empty()) { vec![] } else { self.processes() };
        for (pid, _) in &left {
            let _ = nix::sys::signal::kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        self.forget_memory();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mounted = mounts.contains(self.path().to_str().unwrap());
        if std::thread::panicking() {
            return;
        }
        assert!(left.is_empty(), "left running: {left:#?}");
        assert!(!mounted, "left mounted: {mounts}");
    }
}

/// A `rekindle` that was started; killed when it goes out of scope.
#[derive(Debug)]
pub(crate) struct Running {
    begun: DateTime<Utc>,
    child: Child,
    out: Stream,
    err: Stream,
}

#[derive(Debug)]
struct Stream {
    text: Arc<Mutex<Vec<u8>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Stream {
    fn new(mut from: impl Read + Send + 'static) -> Stream {
        let text = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&text);
        let read = move || {
            let mut buffer = [0; 16384];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                into.lock().unwrap().extend_from_slice(&buffer[..count]);
            }
        };
        Stream { text, reader: Some(std::thread::spawn(read)) }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }
}

impl Running {
    fn start(command: &mut Command) -> Running {
        let begun = Utc::now();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (out, err) = (Stream::new(child.stdout.take().unwrap()), Stream::new(child.stderr.take().unwrap()));
        Running { begun, child, out, err }
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// What was printed so far: the job's output.
    pub(crate) fn out(&self) -> String {
        self.out.text()
    }

    /// What was printed so far to standard error: the job's and rekindle's own messages.
    pub(crate) fn err(&self) -> String {
        self.err.text()
    }

    /// What it published: not what a supervisor before it, killed with -9, left behind.
    pub(crate) fn published(&self, lab: &Lab) -> Option<Published> {
        lab.published().filter(|published| published.begun >= self.begun)
    }

    /// Reads standard error as it is then, for a closure that is handed to one of the waits here.
    pub(crate) fn said_so_far(&self) -> impl Fn() -> String + use<> {
        let text = Arc::clone(&self.err.text);
        move || String::from_utf8_lossy(&text.lock().unwrap()).into_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal);
    }

    /// A second request to stop: signals that come together are one.
    pub(crate) fn second_stop(&self, signal: Signal) {
        std::thread::sleep(Duration::from_millis(2100));
        self.signal(signal);
    }

    /// Whether it still runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits until `done`; fails with what was said when the supervisor ends before or the time is over.
    pub(crate) fn wait_for(&mut self, what: &str, done: impl FnMut() -> bool) {
        self.wait_every(Duration::from_millis(10), what, done);
    }

    /// The same for what is there for a moment only.
    pub(crate) fn wait_closely(&mut self, what: &str, done: impl FnMut() -> bool) {
        self.wait_every(Duration::from_micros(200), what, done);
    }

    fn wait_every(&mut self, pause: Duration, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !done() {
            let said = || format!("--- output\n{}\n--- messages\n{}", tail(&self.out.text()), tail(&self.err.text()));
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(done(), "rekindle ended ({status}) before {what}\n{}", said());
                return;
            }
            assert!(Instant::now() < deadline, "waited {LIMIT:?} in vain until {what}\n{}", said());
            std::thread::sleep(pause);
        }
    }

    /// Waits until standard error holds the words.
    pub(crate) fn wait_said(&mut self, words: &str) {
        let text = Arc::clone(&self.err.text);
        let said = || String::from_utf8_lossy(&text.lock().unwrap()).contains(words);
        self.wait_for(&format!("it says {words:?}"), said);
    }

    /// Waits until standard error holds the words so many times. What is published can be read before what is said.
    pub(crate) fn wait_said_times(&mut self, words: &str, times: usize) {
        let text = Arc::clone(&self.err.text);
        let count = || String::from_utf8_lossy(&text.lock().unwrap()).matches(words).count();
        self.wait_for(&format!("it says {words:?} {times} times"), || count() == times);
    }

    /// Waits until the job printed the words.
    pub(crate) fn wait_printed(&mut self, words: &str) {
        let text = Arc::clone(&self.out.text);
        let said = || String::from_utf8_lossy(&text.lock().unwrap()).contains(words);
        self.wait_for(&format!("the job prints {words:?}"), said);
    }

    /// Takes a snapshot by signal, and waits until it is in the store. Answers its number.
    pub(crate) fn snapshot(&mut self, lab: &Lab) -> u32 {
        let newest = || lab.images().first().map_or(0, |image| image.id.sequence());
        let (before, failed) = (newest(), self.err().matches("snapshot failed").count());
        self.signal(Signal::SIGUSR1);
        let text = Arc::clone(&self.err.text);
        self.wait_for("a new image is there", || {
            let said = String::from_utf8_lossy(&text.lock().unwrap()).into_owned();
            assert!(said.matches("snapshot failed").count() == failed, "{}", tail(&said));
            newest() > before
                && lab.published().is_some_and(|p| p.state.as_str() == "running" && p.persisting.is_none())
        });
        newest()
    }

    /// Waits until the job runs, and answers the pid of its first process.
    pub(crate) fn job_pid(&mut self, lab: &Lab) -> i32 {
        let begun = self.begun;
        let own = || lab.published().filter(|published| published.begun >= begun);
        // Kept as it was seen: a snapshot that begins a moment later changes the state again.
        let mut pid = None;
        self.wait_for("the job runs", || {
            pid = own().filter(|p| p.state.as_str() == "running" && p.pid.is_some_and(alive)).and_then(|p| p.pid);
            pid.is_some()
        });
        pid.unwrap()
    }

    /// Kills the job's first process, and waits until the job is back.
    pub(crate) fn crash(&mut self, lab: &Lab) {
        let pid = self.job_pid(lab);
        let restarts = lab.published().unwrap().restarts;
        kill(pid, Signal::SIGKILL);
        self.wait_for("the job is back", || {
            lab.published()
                .is_some_and(|p| p.restarts > restarts && p.state.as_str() == "running" && p.pid.is_some_and(alive))
        });
        let said = self.err();
        assert!(!said.contains("continuing from the beginning"), "it is not back, it began anew:\n{}", tail(&said));
    }

    /// Waits for the end: exit code (128 + n for a signal), output, messages.
    pub(crate) fn finish(mut self, limit: Duration) -> (i32, String, String) {
        let ended = comes(limit, || !self.runs());
        assert!(ended, "rekindle did not end within {limit:?}\n{}\n{}", tail(&self.out()), tail(&self.err()));
        let status = self.child.wait().unwrap();
        for stream in [&mut self.out, &mut self.err] {
            let reader = stream.reader.take().unwrap();
            assert!(comes(LIMIT, || reader.is_finished()), "something holds rekindle's output open");
        }
        (status.code().unwrap_or_else(|| 128 + status.signal().unwrap()), self.out(), self.err())
    }

    /// Waits for the end with this exit code; answers output and messages.
    pub(crate) fn ends_with(self, code: i32) -> (String, String) {
        let (found, out, err) = self.finish(LIMIT);
        assert_eq!(found, code, "exit code\n--- output\n{}\n--- messages\n{}", tail(&out), tail(&err));
        (out, err)
    }

    /// kill -9 of the supervisor, reaped.
    pub(crate) fn kill_9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The last lines of a text, for a message.
pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(400)..].join("\n")
}

/// The numbers of lines "n NUMBER", in order.
pub(crate) fn numbers(text: &str) -> Vec<u64> {
    text.lines().filter_map(|line| line.strip_prefix("n ")?.parse().ok()).collect()
}

/// Fails unless the numbers are 1, 2, 3 and so on.
pub(crate) fn assert_counts_up(text: &str) {
    let numbers = numbers(text);
    let wrong = numbers.iter().zip(1u64..).find(|(found, wanted)| *found != wanted);
    assert!(wrong.is_none() && !numbers.is_empty(), "{wrong:?} (found, wanted) in\n{}", text.replace('\n', " "));
}
