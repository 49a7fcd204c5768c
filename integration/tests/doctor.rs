//! `rekindle doctor` as a user runs it.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The user and group that own nothing.
const NOBODY: u32 = 65534;

/// A folder that everybody can reach, with a copy of the program, a configuration and a folder for temporary files.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let bench = Bench { folder };
        fs::set_permissions(bench.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        // By another process: a child that another test forks meanwhile would hold our descriptor for a moment, and a
        // file that is open for writing cannot be executed (ETXTBSY).
        let copied =
            Command::new("cp").arg(env!("CARGO_BIN_EXE_rekindle")).arg(bench.path("rekindle")).status().unwrap();
        assert!(copied.success());
        fs::write(bench.path("rekindle.toml"), "version = 1\n[store]\nmin-free = \"1MB\"\n").unwrap();
        fs::set_permissions(bench.path("rekindle.toml"), fs::Permissions::from_mode(0o644)).unwrap();
        fs::create_dir(bench.path("tmp")).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A program in the place of CRIU.
    fn script(&self, text: &str) -> PathBuf {
        let script = self.path("criu");
        rekindle_testing::program(&script, text);
        script
    }

    fn command(&self, criu: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("rekindle"));
        command.arg("doctor").arg("--config").arg(self.path("rekindle.toml")).arg("--store").arg(self.path("store"));
        command.args(args).env_clear().env("REKINDLE_CRIU", criu).env("TMPDIR", self.path("tmp"));
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
    }
}

/// One row of the report.
#[derive(Debug)]
struct Row {
    state: String,
    found: String,
    fix: Option<String>,
}

fn parse(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}; it said {said}"))
}

fn row(report: &Value, check: &str) -> Row {
    let rows = report["checks"].as_array().unwrap();
    let row = rows.iter().find(|row| row["check"] == check).unwrap_or_else(|| panic!("no row {check}: {report:#}"));
    let text = |key: &str| row[key].as_str().map(str::to_owned);
    Row { state: text("state").unwrap(), found: text("found").unwrap(), fix: text("fix") }
}

use rekindle_testing::{criu, require, root};

const ROWS: [&str; 29] = [
    "kernel.checkpoint-restore",
    "kernel.namespaces",
    "kernel.children",
    "kernel.map-files",
    "kernel.events",
    "kernel.sockets",
    "kernel.time-namespace",
    "kernel.soft-dirty",
    "criu.version",
    "criu.trial",
    "rights.user",
    "rights.capabilities",
    "rights.seccomp",
    "cgroup.memory",
    "cgroup.oom-group",
    "nvidia.driver",
    "nvidia.functions",
    "nvidia.gpus",
    "nvidia.mps",
    "memory.huge-pages",
    "memory.gpu",
    "staging.tmpfs",
    "staging.huge-pages",
    "staging.memory",
    "staging.pipes",
    "staging.interposer",
    "store.permissions",
    "store.file-system",
    "store.space",
];

#[test]
fn without_criu_it_exits_69_and_says_the_fix() {
    let bench = Bench::new();
    let output = bench.command(Path::new("/nowhere"), &["--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let report = parse(&output);
    assert_eq!(report["run_works"], false);
    for check in ROWS {
        let row = row(&report, check);
        let complains = ["warn", "missing"].contains(&row.state.as_str());
        assert!(complains || ["ok", "not-here"].contains(&row.state.as_str()), "{check}: {row:?}");
        assert_eq!(row.fix.is_some(), complains, "{check}: {row:?}");
        assert!(!row.found.is_empty());
    }
    let version = row(&report, "criu.version");
    assert_eq!(version.state, "missing");
    assert!(version.found.contains("/nowhere"), "{}", version.found);
    let fix = version.fix.unwrap();
    assert!(fix.contains("which contains CRIU") && fix.contains("criu.path") && fix.contains("REKINDLE_CRIU"), "{fix}");
    assert_eq!(row(&report, "criu.trial").state, "not-here");
    assert!(!bench.path("store").exists(), "doctor makes no store");
}

#[test]
fn the_sum_comes_first_and_the_workloads_last() {
    let bench = Bench::new();
    let output = bench.command(Path::new("/nowhere"), &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines();
    let sum = lines.next().unwrap();
    assert!(sum.contains("cannot work here") && sum.contains(" failed, "), "{sum}");
    let header: Vec<&str> = lines.nth(1).unwrap().split_whitespace().collect();
    assert_eq!(header, ["CHECK", "STATE", "FOUND", "FIX"]);
    assert!(text.lines().any(|line| line.contains("criu.version") && line.contains("which contains CRIU")), "{text}");
    assert!(text.contains("\njobs without a GPU: no, this needs criu.version"), "{text}");
}

#[test]
fn a_machine_that_can_run_is_told_so_by_a_job_that_came_back() {
    let (true, Some(criu)) = (root(), criu()) else { return };
    let bench = Bench::new();
    let output = bench.command(&criu, &["--json"]).output().unwrap();
    let report = parse(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    assert_eq!(report["run_works"], true);
    assert_eq!((&report["counts"]["missing"], &report["workloads"][0]["runs"]), (&0.into(), &true.into()));
    for check in ["criu.version", "criu.trial", "rights.user", "store.permissions", "store.space"] {
        let row = row(&report, check);
        assert_eq!(row.state, "ok", "{check}: {row:?}");
    }
    assert!(row(&report, "criu.trial").found.contains("dumped and restored"));
    let left: Vec<_> = fs::read_dir(bench.path("tmp")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!bench.path("store").exists(), "doctor makes no store");
}

#[test]
fn a_tmpfs_is_tried_and_unmounted_again() {
    if !root() {
        return;
    }
    let bench = Bench::new();
    let config = |more: &str| {
        let base = bench.path("run");
        let text = format!("version = 1\n[snapshot]\nstaging-directory = {base:?}\n{more}");
        fs::write(bench.path("rekindle.toml"), text).unwrap();
    };
    let doctor = || bench.command(Path::new("/nowhere"), &["--json"]);
    config("");
    let tmpfs = row(&parse(&doctor().output().unwrap()), "staging.tmpfs");
    assert_eq!(tmpfs.state, "ok", "{tmpfs:?}");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(bench.path("").to_str().unwrap()), "{mounts}");
    assert!(!bench.path("run").exists(), "doctor makes no staging directory");

    let plain = doctor();
    let mut command = Command::new("setpriv");
    command.arg("--bounding-set=-sys_admin").arg(plain.get_program()).args(plain.get_args());
    let report = parse(&command.env("TMPDIR", bench.path("tmp")).output().unwrap());
    let tmpfs = row(&report, "staging.tmpfs");
    assert_eq!(tmpfs.state, "missing", "{tmpfs:?}");
    assert!(tmpfs.fix.unwrap().contains("--cap-add=SYS_ADMIN"));

    // A folder that other users can write to may contain files of theirs.
    fs::create_dir(bench.path("run")).unwrap();
    fs::set_permissions(bench.path("run"), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(row(&parse(&doctor().output().unwrap()), "staging.tmpfs").state, "warn");

    config("staging = \"store\"\n");
    let report = parse(&doctor().output().unwrap());
    for check in ROWS.into_iter().filter(|check| check.starts_with("staging.")) {
        assert_eq!(row(&report, check).state, "not-here", "{check}");
    }
    assert_eq!(fs::read_dir(bench.path("run")).unwrap().count(), 0);
}

/// On a machine with NVIDIA devices (replaced by another device here) the trial uses CRIU's plugin.
#[test]
fn a_criu_that_loads_no_plugin_is_found_by_the_trial() {
    let (true, Some(criu), true) = (root(), criu(), cfg!(debug_assertions)) else { return };
    let bench = Bench::new();
    let trial = |criu: &Path| {
        let mut command = bench.command(criu, &["--json"]);
        row(&parse(&command.env("REKINDLE_TEST_DEVICES", "nvidia=c10:229").output().unwrap()), "criu.trial")
    };
    assert_eq!(trial(&criu).state, "ok");
    let text =
        format!("#!/bin/sh\n[ ! -f \"$5/rekindle.so\" ] || : > \"$5/rekindle.so\"\nexec {} \"$@\"\n", criu.display());
    let trial = trial(&bench.script(&text));
    assert_eq!(trial.state, "missing", "{trial:?}");
    assert!(trial.found.contains("dump failed") && trial.found.contains("Unable to load"), "{trial:?}");
    assert!(trial.fix.unwrap().contains("plugin"));
}

#[test]
fn what_is_no_criu_fails_in_the_trial_and_leaves_nothing() {
    if !root() {
        return;
    }
    let bench = Bench::new();
    let text = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Version: 4.2'\n";
    let trial = row(&parse(&bench.command(&bench.script(text), &["--json"]).output().unwrap()), "criu.trial");
    assert_eq!(trial.state, "missing", "{trial:?}");
    assert!(trial.found.contains("dump failed"), "{trial:?}");
    let left: Vec<_> = fs::read_dir(bench.path("tmp")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn another_user_than_root_is_missing_rights() {
    if !root() {
        return;
    }
    let bench = Bench::new();
    let mut command = bench.command(Path::new("/nowhere"), &["--json"]);
    let output = command.uid(NOBODY).gid(NOBODY).output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let report = parse(&output);
    let user = row(&report, "rights.user");
    assert_eq!(user.state, "missing");
    assert!(user.fix.unwrap().contains("sudo"));
    assert_eq!(row(&report, "store.permissions").state, "missing");
}

#[test]
fn a_right_that_criu_lacks_is_found_by_the_trial_and_named() {
    let (true, Some(criu)) = (root(), criu()) else { return };
    let bench = Bench::new();
    let doctor = bench.command(&criu, &["--json"]);
    let mut command = Command::new("setpriv");
    command.arg("--bounding-set=-net_admin").arg(doctor.get_program()).args(doctor.get_args());
    let output = command.env("REKINDLE_CRIU", &criu).env("TMPDIR", bench.path("tmp")).output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let report = parse(&output);
    let trial = row(&report, "criu.trial");
    assert_eq!(trial.state, "missing");
    assert!(trial.found.starts_with("restore failed"), "{trial:?}");
    let rights = row(&report, "rights.capabilities");
    assert_eq!(rights.state, "missing");
    assert!(rights.fix.unwrap().contains("--cap-add=NET_ADMIN"));
    let left: Vec<_> = fs::read_dir(bench.path("tmp")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_store_that_nothing_can_be_run_from_is_missing_with_the_mount_named() {
    if !root() {
        return;
    }
    let bench = Bench::new();
    fs::create_dir(bench.path("store")).unwrap();
    let doctor = bench.command(Path::new("/nowhere"), &["--json"]);
    let script = "mount -t tmpfs -o noexec,mode=700 none \"$1\" || exit 99; shift; exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(bench.path("store"));
    command.arg(doctor.get_program()).args(doctor.get_args());
    let output = command.output().unwrap();
    if output.status.code() == Some(99) {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        let _ = require("root", false, &format!("nothing can be mounted here: {why}"));
        return;
    }
    assert_eq!(output.status.code(), Some(69));
    let system = row(&parse(&output), "store.file-system");
    assert_eq!(system.state, "missing");
    assert!(system.found.contains("noexec"), "{system:?}");
    let fix = system.fix.unwrap();
    assert!(fix.contains("remount,exec") && fix.contains(bench.path("store").to_str().unwrap()), "{fix}");
}

#[test]
fn a_store_that_others_can_write_is_missing_and_one_that_they_can_read_is_warned_of() {
    if !root() {
        return;
    }
    let bench = Bench::new();
    fs::create_dir(bench.path("store")).unwrap();
    for (mode, state) in [(0o777, "missing"), (0o755, "warn"), (0o700, "ok")] {
        fs::set_permissions(bench.path("store"), fs::Permissions::from_mode(mode)).unwrap();
        let output = bench.command(Path::new("/nowhere"), &["--json"]).output().unwrap();
        let permissions = row(&parse(&output), "store.permissions");
        assert_eq!(permissions.state, state, "{mode:o}: {permissions:?}");
        assert_eq!(permissions.fix.is_some(), state != "ok");
    }
}
