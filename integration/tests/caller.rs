//! Callers that hand down an unusual process: what `rekindle run` makes of it.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rekindle::published::Published;

const LIMIT: Duration = Duration::from_secs(150);

/// A folder with a configuration, a store and a Python that becomes rekindle after it has spoilt something.
struct Bench {
    folder: tempfile::TempDir,
}

/// Returns None if a prerequisite is missing; fails if it is required.
fn bench() -> Option<Bench> {
    let python = Path::new("/usr/bin/python3").exists();
    if !rekindle_testing::root() || !rekindle_testing::require("python", python, "there is no /usr/bin/python3") {
        return None;
    }
    rekindle_testing::criu()?;
    Some(Bench { folder: tempfile::tempdir().unwrap() })
}

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `rekindle run OPTIONS -- sh -c SCRIPT`, started by Python after the statements in `spoil`.
    fn run(&self, spoil: &str, config: &str, script: &str) -> Command {
        let file = self.path("rekindle.toml");
        fs::write(&file, format!("version = 1\n[store]\nmin-free = \"1MB\"\n{config}")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let python = format!("import os, resource, signal, sys\n{spoil}\nos.execv(sys.argv[1], sys.argv[1:])");
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", &python]).arg(env!("CARGO_BIN_EXE_rekindle")).args(["run", "--name", "job", "--config"]);
        command.arg(file).arg("--store").arg(self.path("store")).args(["--", "sh", "-c", script]);
        command.current_dir(self.folder.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("store/job/log/stdout.log")).unwrap_or_default()
    }

    /// Waits until the supervisor knows that the job runs: before, a snapshot that is asked for by a signal is not
    /// taken.
    fn wait_until_it_runs(&self) {
        let deadline = Instant::now() + LIMIT;
        while Published::read(&self.path("store/job/state.json")).map_or(true, |now| now.state.as_str() != "running") {
            assert!(Instant::now() < deadline, "it does not run");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait_for_log(&self, text: &str) {
        let deadline = Instant::now() + LIMIT;
        while !self.log().contains(text) {
            assert!(Instant::now() < deadline, "no {text:?} in {:?}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Waits with a limit; a supervisor that hangs is killed, which ends its job.
fn output(mut child: Child) -> Output {
    let deadline = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it hangs: {:?}", child.wait_with_output().unwrap());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

const ONCE: &str = "[snapshot]\ninterval = \"off\"\n[restart]\nmax-restarts = 0\n";

#[test]
fn how_the_job_ended_is_known_when_the_caller_ignores_sigchld() {
    let Some(bench) = bench() else { return };
    let spoil = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)";
    let done = output(bench.run(spoil, ONCE, "exit 3").spawn().unwrap());
    assert_eq!(done.status.code(), Some(3), "{done:?}");
}

#[test]
fn a_stop_arrives_when_the_caller_had_every_signal_blocked() {
    let Some(bench) = bench() else { return };
    let spoil = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())";
    let child = bench.run(spoil, ONCE, "echo begun; sleep 600").spawn().unwrap();
    bench.wait_for_log("begun");
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let done = output(child);
    assert_eq!(done.status.code(), Some(128 + 15), "{done:?}");
}

#[test]
fn a_hangup_that_the_caller_ignores_ends_nothing() {
    let Some(bench) = bench() else { return };
    let spoil = "signal.signal(signal.SIGHUP, signal.SIG_IGN)";
    let script = "grep SigIgn /proc/self/status; echo begun; while [ ! -e go ]; do sleep .05; done; exit 0";
    let child = bench.run(spoil, ONCE, script).spawn().unwrap();
    bench.wait_for_log("begun");
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGHUP).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    fs::write(bench.path("go"), "").unwrap();
    let done = output(child);
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    // SIGHUP is bit 0: under nohup the job is as it would be without rekindle. The caller of the tests may ignore others.
    let log = bench.log();
    let ignored = log.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect(&log);
    assert_eq!(u64::from_str_radix(ignored.trim(), 16).unwrap() & 1, 1, "{log}");
}

#[test]
fn nobody_needs_to_read_what_rekindle_says() {
    let Some(bench) = bench() else { return };
    let config = "[snapshot]\ninterval = \"100ms\"\n[restart]\nmax-restarts = 0\n";
    let script = "echo words >&2; sleep 1; exit 3";
    for spoil in [
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
        "r, w = os.pipe(); os.dup2(w, 2); os.close(r); os.close(w)",
        "[os.close(fd) for fd in (0, 1, 2)]",
    ] {
        let done = output(bench.run(spoil, config, script).spawn().unwrap());
        assert_eq!(done.status.code(), Some(3), "{spoil}: {done:?}");
        fs::remove_dir_all(bench.path("store")).unwrap();
        // Nor its complaints: the exit code is what is documented.
        let wrong = output(bench.run(spoil, "[nonsense]\n", script).spawn().unwrap());
        assert_eq!(wrong.status.code(), Some(78), "{spoil}: {wrong:?}");
    }
}

#[test]
fn an_end_is_recorded_when_nobody_reads_the_output_and_a_signal_ends_the_wait_for_who_should() {
    let Some(bench) = bench() else { return };
    // Far more than a pipe takes.
    let mut child = bench.run("", ONCE, "head -c 1000000 /dev/zero; exit 0").spawn().unwrap();
    let deadline = Instant::now() + LIMIT;
    while !fs::read_to_string(bench.path("store/job/job.json")).unwrap_or_default().contains("completed") {
        assert!(Instant::now() < deadline, "the end is not recorded");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(child.try_wait().unwrap().is_none(), "it waits for its reader");
    // The wait begins a moment after the end is recorded. In that moment, too, a signal ends it, and the exit code is the job's.
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let done = output(child);
    let ended = (done.status.code(), std::os::unix::process::ExitStatusExt::signal(&done.status));
    assert!([(None, Some(15)), (Some(0), None)].contains(&ended), "{ended:?}");
}

#[test]
fn few_descriptors_are_enough() {
    let Some(bench) = bench() else { return };
    let spoil = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))";
    // They are not enough for CRIU's restore, which `run` tries first.
    let config = ONCE.replace("interval", "rehearse = \"off\"\ninterval");
    let done = output(bench.run(spoil, &config, "ulimit -n").spawn().unwrap());
    assert_eq!((done.status.code(), bench.log().trim()), (Some(0), "64"), "{done:?}");
}

#[test]
fn all_files_of_the_store_are_the_supervisors_alone_and_the_job_keeps_the_callers_umask() {
    let Some(bench) = bench() else { return };
    let config = "[snapshot]\ninterval = \"off\"\n[job]\nstdin = \"null\"\n";
    let script = "umask; exec 5>state; echo x >&5; echo begun; sleep 600";
    let child = bench.run("os.umask(0)", config, script).spawn().unwrap();
    bench.wait_for_log("begun");
    bench.wait_until_it_runs();
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let done = output(child);
    assert_eq!(done.status.code(), Some(128 + 15), "{done:?}");
    assert_eq!(bench.log().lines().next(), Some("0000"));
    let mut open = vec![bench.path("store")];
    let mut image = false;
    while let Some(path) = open.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        // The kernel lets a restored process have it as its program only if the job's user may execute it; the folder
        // that it is in lets nobody else come near.
        let is_reaper = path.file_name().unwrap().to_string_lossy().starts_with("reaper-");
        let others = if is_reaper { 0o055 } else { 0 };
        assert_eq!(metadata.permissions().mode() & 0o077, others, "{}", path.display());
        image |= path.ends_with("manifest.json");
        if metadata.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    assert!(image, "there is no image: {done:?}");
}

#[test]
fn what_the_job_can_not_be_given_is_named() {
    let Some(bench) = bench() else { return };
    nix::unistd::mkfifo(&bench.path("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let fifo = format!("[job]\nstdin = \"{}\"\n", bench.path("fifo").display());
    for (spoil, config, code, words) in [
        ("", fifo.as_str(), 2, "not a regular file"),
        ("", "[job]\nstdin = \"/nowhere/in\"\n", 2, "/nowhere/in"),
        ("", "[job]\ndirectory = \"/nowhere/dir\"\n", 2, "/nowhere/dir"),
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", "", 2, "set job.directory"),
    ] {
        let done = output(bench.run(spoil, config, "true").spawn().unwrap());
        let text = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(code) && text.contains(words), "{config}: {done:?}");
    }
}

#[test]
fn a_script_without_its_first_line_is_explained() {
    let Some(bench) = bench() else { return };
    let script = bench.path("script");
    // By another process: what a child of another test holds open for writing cannot be executed.
    let write = "echo 'echo hello' > \"$1\"; chmod 755 \"$1\"";
    assert!(Command::new("sh").args(["-c", write, "sh"]).arg(&script).status().unwrap().success());
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    command
        .args(["run", "--name", "job", "--interval", "off", "--store"])
        .arg(bench.path("store"))
        .arg("--")
        .arg(script);
    let done = output(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(126) && text.contains("begins with #!"), "{done:?}");
}
