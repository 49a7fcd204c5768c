//! `rekindle` as a user runs it: real processes, a store of its own, a limit on every wait.
//!
//! A [`Lab`] is one test's ground. Everything it starts carries its folder's name in an argument, in its environment or
//! in its executable's path, so what was left running can be told from everything else on the machine. A lab that goes
//! out of scope kills what is left, and fails the test if something outlived the supervisor.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]
#![allow(dead_code, reason = "each test binary uses a part")]

mod running;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use rekindle::published::Published;
use rekindle_store::{Access, Image, JobFolder, Store};
pub(crate) use running::Running;
use running::Text;

/// How long anything here may take. Far above what it takes on an idle machine: an image is stored at a low priority,
/// which took half a minute where others worked on all processors.
pub(crate) const LIMIT: Duration = Duration::from_secs(150);

/// Times short enough for a test; a test's own configuration comes after, in sections that TOML lets appear once, so
/// it is given as whole lines `section.key = value`.
const CONFIG: &[(&str, &str)] = &[
    ("log.level", "\"info\""),
    ("snapshot.interval", "\"off\""),
    // It takes longer than many of the tests; those that are about it turn it on.
    ("snapshot.rehearse", "\"off\""),
    ("snapshot.grace", "\"20s\""),
    ("snapshot.freeze-limit", "\"20s\""),
    ("store.min-free", "\"1MiB\""),
    ("restart.backoff", "\"20ms\""),
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

/// Waits until `done` returns true; false if that takes longer than `limit`.
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
    /// Variables of the environment, besides.
    environment: Vec<(String, String)>,
    /// The program that is run with rekindle's arguments, and what comes before them.
    wrapper: Vec<OsString>,
    /// Other folders by which its processes are known.
    marks: Vec<PathBuf>,
    /// What all supervisors said.
    log: Text,
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
        let wrapper = vec![env!("CARGO_BIN_EXE_rekindle").into()];
        Some(Lab {
            folder,
            config,
            environment: vec![("REKINDLE_RETRY_AFTER".into(), "200ms".into())],
            wrapper,
            marks: Vec::new(),
            log: Text::default(),
        })
    }

    /// A process that carries the name of this folder belongs to the lab, too.
    pub(crate) fn marked_by(mut self, folder: &Path) -> Lab {
        self.marks.push(folder.to_owned());
        self
    }

    /// Has everything run within a control group.
    pub(crate) fn within(mut self, group: &Path) -> Lab {
        let name = format!("within-{}", self.wrapper.len());
        let script = self.script(&name, &format!("echo $$ > {}/cgroup.procs\nexec \"$@\"", group.display()));
        self.wrapper.insert(0, script.into());
        self
    }

    /// The supervisor has only these capabilities, as in a container.
    pub(crate) fn with_only(mut self, capabilities: &str) -> Lab {
        let set = format!("-all,{capabilities}");
        let setpriv = ["setpriv".into(), format!("--bounding-set={set}"), format!("--inh-caps={set}")];
        self.wrapper.splice(0..0, setpriv.map(OsString::from));
        self
    }

    /// The supervisor's caller has this umask.
    pub(crate) fn with_umask(mut self, mask: &str) -> Lab {
        let script = self.script("with-umask", &format!("umask {mask}\nexec \"$@\""));
        self.wrapper.insert(0, script.into());
        self
    }

    /// The supervisor runs on the first processor only.
    pub(crate) fn on_one_processor(mut self) -> Lab {
        self.wrapper.splice(0..0, ["taskset", "-c", "0"].map(OsString::from));
        self
    }

    /// The supervisor is process 1 of a PID namespace, as in a container.
    pub(crate) fn being_process_one(mut self) -> Lab {
        let unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
        self.wrapper.splice(0..0, unshare.map(OsString::from));
        self
    }

    /// The supervisor leads a session of its own, without a terminal.
    pub(crate) fn leading_a_session(mut self) -> Lab {
        self.wrapper.insert(0, "setsid".into());
        self
    }

    /// Sets a key of the configuration, `section.key`, to a TOML value.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Lab {
        self.config.retain(|(known, _)| known != key);
        self.config.push((key.into(), value.into()));
        self
    }

    /// Sets a variable of the environment. One of rekindle's is stronger than the key that it names.
    pub(crate) fn set_variable(&mut self, name: &str, value: &str) {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.into(), value.into()));
    }

    /// The same for a lab that is being made.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Lab {
        self.set_variable(name, value);
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
        rekindle_testing::program(&path, &format!("#!/bin/sh\n{text}\n"));
        path
    }

    /// Has a file of this name come as soon as CRIU has worked for the first time.
    pub(crate) fn noting_the_first_dump(self, name: &str) -> Lab {
        // Only once: what CRIU restores is to be a child of the supervisor's own.
        let once = r#"[ ! -e "$tried" ] || exec "$real" "$@"
case "$*" in *swrk*) ;; *) exec "$real" "$@" ;; esac
"$real" "$@"; code=$?; : > "$tried"; exit $code"#;
        let text = format!("real='{}' tried='{}'\n{once}", criu().display(), self.file(name).display());
        let path = format!("{:?}", self.script("criu", &text));
        self.set("criu.path", &path).set("snapshot.rehearse", "\"off\"")
    }

    /// Copies a file and makes it executable. By another process: a child that another test forks meanwhile would hold
    /// our descriptor for a moment, and a file that is open for writing cannot be executed (ETXTBSY).
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

    /// The standard output of the job, without the part that was rotated away, which is a hole in the file.
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
        command.env("REKINDLE_TEST_SEEN_DIRECTORY", self.file("seen"));
        command.env_remove("REKINDLE_CONFIG");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a command that ends by itself.
    pub(crate) fn rekindle(&self, args: &[&str]) -> Output {
        let config = self.write_config();
        let mut command = self.command(args);
        let running = Running::start(command.arg("--config").arg(config), None);
        let (code, out, err) = running.finish(LIMIT);
        Output { status: ExitStatusExt::from_raw(code << 8), stdout: out.into(), stderr: err.into() }
    }

    /// Supervises `command` as the job `j`.
    pub(crate) fn run<A: AsRef<OsStr>>(&self, command: impl IntoIterator<Item = A>) -> Running {
        self.run_with(&["run", "--name", "j", "--"], command)
    }

    /// `rekindle --config ... HEAD... COMMAND...`.
    pub(crate) fn run_with<A: AsRef<OsStr>>(&self, head: &[&str], command: impl IntoIterator<Item = A>) -> Running {
        self.run_with_environment(head, command, &[])
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
        Running::start(&mut all, Some(&self.log))
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

    /// What all supervisors said, one after the other.
    pub(crate) fn log(&self) -> String {
        self.log.get()
    }

    /// The state that the supervisor published.
    pub(crate) fn published(&self) -> Option<Published> {
        Published::read(&self.store().join("j/state.json")).ok()
    }

    /// Every process that belongs to this lab, but the ones that wait to be reaped.
    pub(crate) fn processes(&self) -> Vec<(i32, String)> {
        let marks: Vec<&[u8]> = self.marks.iter().map(PathBuf::as_path).chain([self.path()]).map(bytes_of).collect();
        let holds = |bytes: &[u8]| marks.iter().any(|mark| bytes.windows(mark.len()).any(|part| part == *mark));
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

    /// Kills the supervisor; everything must be gone soon.
    pub(crate) fn kill_9(&self, run: Running) {
        run.kill_9();
        self.assert_all_gone();
    }

    /// The staging areas that are mounted.
    pub(crate) fn mounted(&self) -> Vec<PathBuf> {
        rekindle_testing::mounts_below(&self.memory()).into_iter().filter(|point| !is_of_run(point)).collect()
    }

    /// The work folders that are mounted, each of a run.
    pub(crate) fn work_folders(&self) -> Vec<PathBuf> {
        rekindle_testing::mounts_below(&self.memory()).into_iter().filter(|point| is_of_run(point)).collect()
    }

    /// Removes the images in memory, as a restart of the machine does.
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
        // Of a supervisor that was killed.
        for point in self.work_folders() {
            let _ = nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH);
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mounted = mounts.contains(self.path().to_str().unwrap());
        if std::thread::panicking() {
            return;
        }
        assert!(left.is_empty(), "left running: {left:#?}");
        assert!(!mounted, "left mounted: {mounts}");
    }
}

fn is_of_run(point: &Path) -> bool {
    point.extension().is_some_and(|extension| extension == "run")
}

fn bytes_of(path: &Path) -> &[u8] {
    path.as_os_str().as_encoded_bytes()
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
