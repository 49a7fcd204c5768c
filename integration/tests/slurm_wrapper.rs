//! `examples/deploy/slurm/rekindle-slurm`, which lets users of Slurm run rekindle as root: what they may and may not do with
//! it. And `rekindle-epilog`, which frees memory. sudo, Slurm and rekindle are stand-ins here, except in the last tests, which run
//! a job.

#![allow(clippy::unwrap_used, reason = "tests: a panic is the report")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/deploy/slurm/rekindle-slurm");
const EPILOG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/deploy/slurm/rekindle-epilog");
/// The user of the tests, `nobody`.
const USER: &str = "65534";

/// A node of a cluster.
struct Node {
    folder: tempfile::TempDir,
}

/// What rekindle was started with.
#[derive(Debug)]
struct Started {
    args: Vec<String>,
    environment: BTreeMap<String, String>,
    directory: String,
}

impl Node {
    fn new() -> Option<Node> {
        if !rekindle_testing::root() {
            return None;
        }
        let node = Node { folder: tempfile::Builder::new().prefix("rekindle-wrapper-").tempdir().unwrap() };
        node.allow("", 0o755);
        for name in ["bin", "stores"] {
            fs::create_dir(node.path(name)).unwrap();
        }
        node.allow("stores", 0o755);
        node.write("rekindle.toml", "version = 1\n");
        let at = node.folder.path().display();
        node.program(
            "rekindle",
            &format!("printf '%s\\0' \"$@\" > {at}/args\nenv -0 > {at}/environment\npwd > {at}/cwd\nexit 7"),
        );
        node.slurm_says(&format!("echo '  {USER} '"));
        node.set("STORES", "stores");
        Some(node)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        fs::write(self.path(name), text).unwrap();
        self.allow(name, 0o644);
        self.path(name)
    }

    fn allow(&self, name: &str, mode: u32) {
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn program(&self, name: &str, text: &str) {
        rekindle_testing::program(&self.path(&format!("bin/{name}")), &format!("#!/bin/sh\n{text}\n"));
    }

    /// What squeue does when it is asked whose a job is. It notes what it is asked, and with which environment.
    fn slurm_says(&self, text: &str) {
        let note = self.path("squeue");
        self.program(
            "squeue",
            &format!(
                "case \"$*\" in *%U*) ;; *) echo UNLIMITED; exit ;; esac\n{{ echo \"$*\"; env; }} > {}\n{text}",
                note.display()
            ),
        );
    }

    /// Installs the script as an administrator does; the folder with the images has this name.
    fn set(&self, line: &str, value: &str) {
        let value = if value.is_empty() { String::new() } else { self.path(value).display().to_string() };
        let of = |name: &str| match name {
            _ if name == line => Some(value.clone()),
            "SLURM_BIN" => Some(self.path("bin").display().to_string()),
            "CONFIG" => Some(self.path("rekindle.toml").display().to_string()),
            "REKINDLE" => Some(self.path("bin/rekindle").display().to_string()),
            "STORES" => Some(self.path("stores").display().to_string()),
            _ => None,
        };
        let script = fs::read_to_string(SCRIPT).unwrap();
        let lines =
            script.lines().map(|line| match line.split_once('=').and_then(|(name, _)| Some((name, of(name)?))) {
                Some((name, value)) => format!("{name}={value}\n"),
                None => format!("{line}\n").replace("sleep 10", "sleep 0"),
            });
        let text: String = lines.collect();
        assert!(
            text.contains("\nSTORES=") && text.contains("\nREKINDLE=/tmp") || !self.folder.path().starts_with("/tmp")
        );
        rekindle_testing::program(&self.path("rekindle-slurm"), &text);
    }

    /// Runs the Epilog as slurmd does, with this line in it.
    fn epilog(&self, line: &str) -> Output {
        let config = format!("CONFIG={}", self.path("rekindle.toml").display());
        let program = format!("REKINDLE={}", self.path("bin/rekindle").display());
        let lines = fs::read_to_string(EPILOG).unwrap();
        let line_of = |text: &str| {
            let name = text.split_once('=').map(|(name, _)| format!("{name}="));
            [line, &config, &program]
                .into_iter()
                .find(|new| name.as_ref().is_some_and(|name| new.starts_with(name)))
                .map_or_else(|| format!("{text}\n"), |new| format!("{new}\n"))
        };
        rekindle_testing::program(&self.path("epilog"), &lines.lines().map(line_of).collect::<String>());
        let mut command = Command::new(self.path("epilog"));
        command.env_clear().env("PATH", "/usr/bin:/bin").env("SLURM_JOB_ID", "7").env("REKINDLE_JOB_USER", "root");
        command.current_dir(self.folder.path()).output().unwrap()
    }

    /// As sudo starts it for a user in a job of Slurm, with these variables besides.
    fn call(&self, variables: &[(&str, &str)], args: &[&str]) -> Output {
        self.call_in(self.folder.path(), variables, args)
    }

    /// The same in this folder.
    fn call_in(&self, folder: &Path, variables: &[(&str, &str)], args: &[&str]) -> Output {
        for name in ["args", "environment", "cwd", "squeue", "evil"] {
            let _ = fs::remove_file(self.path(name));
        }
        let mut command = Command::new(self.path("rekindle-slurm"));
        command.env_clear().env("PATH", "/usr/bin:/bin").env("SUDO_USER", "nobody").env("SUDO_UID", USER);
        command.env("SLURM_JOB_ID", "7").envs(variables.iter().copied());
        let done = command.args(args).current_dir(folder).output().unwrap();
        assert!(!self.path("evil").exists(), "{variables:?} {args:?}: code of the user was run as root");
        done
    }

    /// It starts rekindle with this.
    fn starts(&self, variables: &[(&str, &str)], args: &[&str]) -> Started {
        let done = self.call(variables, args);
        assert_eq!(done.status.code(), Some(7), "{variables:?} {args:?}: {done:?}");
        let fields = |name| {
            let text = fs::read_to_string(self.path(name)).unwrap();
            text.split_terminator('\0').map(str::to_owned).collect::<Vec<_>>()
        };
        let pair =
            |line: String| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap();
        let environment = fields("environment").into_iter().map(pair).collect();
        Started { args: fields("args"), environment, directory: fs::read_to_string(self.path("cwd")).unwrap() }
    }

    /// It starts nothing, and says this.
    fn refuses(&self, variables: &[(&str, &str)], words: &str) {
        let done = self.call(variables, &["true"]);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(69) && said.contains(words), "{variables:?}: {done:?}");
        assert!(!self.path("args").exists(), "{variables:?}: rekindle was started");
    }
}

#[test]
fn a_job_runs_as_its_user_with_a_store_of_its_own() {
    let Some(node) = Node::new() else { return };
    let settings = [
        ("REKINDLE_SNAPSHOT_GRACE", "110s"),
        ("REKINDLE_SCHEDULER_REQUEUE", "scontrol"),
        ("SLURM_JOB_END_TIME", "1795327200"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1"),
        ("LANG", "C.UTF-8"),
    ];
    let started = node.starts(&settings, &["python3", "train.py", "--lr", "1 e-4"]);
    let config = node.path("rekindle.toml").display().to_string();
    assert_eq!(started.args, ["--config", &config, "run", "--", "python3", "train.py", "--lr", "1 e-4"]);
    let stores = node.path("stores/nobody").display().to_string();
    let mut wanted: BTreeMap<&str, &str> = settings.into_iter().collect();
    wanted.extend([
        ("HOME", "/root"),
        ("SLURM_JOB_ID", "7"),
        ("REKINDLE_JOB_USER", "nobody"),
        ("REKINDLE_STORE_DIRECTORY", &stores),
        ("REKINDLE_JOB_ENVIRONMENT_MODE", "clean"),
        ("REKINDLE_JOB_PASS_ENVIRONMENT", "SLURM_*"),
        ("REKINDLE_SCHEDULER_PROFILE", "slurm"),
    ]);
    let mut got = started.environment.clone();
    let path = got.remove("PATH").unwrap();
    // The shell of the stand-in sets this one.
    got.remove("PWD");
    assert_eq!(got.iter().map(|(name, value)| (&name[..], &value[..])).collect::<BTreeMap<_, _>>(), wanted);
    assert!(
        path.starts_with(&*node.path("bin").to_string_lossy()) && path.ends_with(":/usr/sbin:/usr/bin:/sbin:/bin"),
        "{path}"
    );
    assert_eq!(Path::new(started.directory.trim()), node.folder.path(), "the job's folder is that of the caller");
    assert!(fs::read_to_string(node.path("squeue")).unwrap().starts_with("--noheader --jobs 7 --format %U\n"));
    // One task of an array, and a job over several nodes.
    let array = [("SLURM_ARRAY_JOB_ID", "5"), ("SLURM_ARRAY_TASK_ID", "2"), ("SLURM_NODEID", "1")];
    let started = node.starts(&array, &["--group", "train"]);
    assert_eq!(started.args[2..], ["run", "--group", "--", "train"]);
    assert!(fs::read_to_string(node.path("squeue")).unwrap().starts_with("--noheader --jobs 5_2 "));
    assert!(array.iter().all(|(name, value)| started.environment[*name] == *value));
}

/// All users share the coordinator: nobody may join or end a group of another user's, such as one that waits in the queue.
#[test]
fn the_name_of_a_group_is_its_users_own() {
    let Some(node) = Node::new() else { return };
    let name = |name: &str, args: &[&str]| {
        let started = node.starts(&[("REKINDLE_JOB_NAME", name)], args);
        started.environment["REKINDLE_JOB_NAME"].clone()
    };
    assert_eq!(name("slurm-8", &["--group", "train"]), format!("{USER}-slurm-8"));
    assert_eq!(name("slurm-8", &["train"]), "slurm-8", "its folder is below the user's own");
    assert!(!node.starts(&[], &["--group", "train"]).environment.contains_key("REKINDLE_JOB_NAME"));
}

#[test]
fn no_argument_is_an_option_of_rekindle() {
    let Some(node) = Node::new() else { return };
    for args in [
        &["--config", "/tmp/evil.toml", "--", "true"][..],
        &["--store", "/etc", "run"],
        &["--accept-user", "root", "--", "true"],
        &["--", "--config", "x"],
        &["-v"],
        &["", "true"],
        &["doctor; touch evil", "$(touch evil)", "`touch evil`", "*"],
    ] {
        let started = node.starts(&[], args);
        assert_eq!(started.args[2..4], ["run", "--"]);
        assert_eq!(started.args[4..], *args);
    }
    let done = node.call(&[], &[]);
    assert_eq!(done.status.code(), Some(2), "{done:?}");
    assert_eq!(node.call(&[], &["--group"]).status.code(), Some(2));
}

#[test]
fn users_choose_no_user_no_file_and_no_program() {
    let Some(node) = Node::new() else { return };
    for name in [
        "REKINDLE_JOB_USER",
        "REKINDLE_STORE_DIRECTORY",
        "REKINDLE_HOOKS_BEFORE_SNAPSHOT",
        "REKINDLE_CRIU_PATH",
        "REKINDLE_CRIU",
        "REKINDLE_CONFIG",
        "REKINDLE_JOB_STDIN",
        "REKINDLE_JOB_ENVIRONMENT",
        "REKINDLE_JOB_NO_NEW_PRIVILEGES",
        "REKINDLE_SNAPSHOT_STAGING_DIRECTORY",
        "REKINDLE_CONTROL_DIRECTORY",
        "REKINDLE_METRICS_TEXTFILE",
        "REKINDLE_GROUP_COORDINATOR",
        "REKINDLE_REPLICA_URL",
        "REKINDLE_",
    ] {
        node.refuses(&[(name, "root")], &format!("{name} is not a setting that users may choose here"));
    }
    for value in ["", "10m\nREKINDLE_JOB_USER=root", "$(touch evil)", "10m;touch evil", "/etc", "10m\u{7f}", "\u{e9}"] {
        node.refuses(&[("REKINDLE_SNAPSHOT_INTERVAL", value)], "has a value that is not taken");
    }
}

#[test]
fn what_is_no_number_of_slurm_goes_nowhere() {
    let Some(node) = Node::new() else { return };
    for job in ["", "7 8", "7,8", "7\n8", "$(touch evil)", "7 --me", "-7", "7_2", "x"] {
        node.refuses(&[("SLURM_JOB_ID", job)], "SLURM_JOB_ID is no number");
    }
    let odd = [
        ("SLURM_CONF", "/tmp/evil.conf"),
        ("SLURM_CLUSTERS", "other"),
        ("SQUEUE_FORMAT", "%j"),
        ("SLURM_NODEID", "0x1"),
        ("SLURM_ARRAY_JOB_ID", "5"),
        ("SLURM_ARRAY_TASK_ID", "2 3"),
        ("SLURM_JOB_NODELIST", "a[1-2]"),
        ("CUDA_VISIBLE_DEVICES", "0;touch evil"),
        ("CUDA_DEVICE_ORDER", "../x"),
        ("LANG", "../../tmp/evil"),
        ("LD_LIBRARY_PATH", "/tmp"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("NOTIFY_SOCKET", "/run/systemd/notify"),
        ("HOME", "/tmp"),
        ("PYTHONPATH", "/tmp"),
    ];
    let started = node.starts(&odd, &["true"]);
    let asked = fs::read_to_string(node.path("squeue")).unwrap();
    for (name, value) in odd {
        let got = started.environment.get(name).map(String::as_str);
        assert!(got.is_none_or(|got| got != value) || name == "SLURM_ARRAY_JOB_ID", "{name} reaches rekindle");
        assert!(!asked.contains(&format!("{name}=")), "{name} reaches squeue: {asked}");
    }
    assert!(asked.starts_with("--noheader --jobs 7 "), "{asked}");
}

#[test]
fn only_a_user_with_a_job_of_its_own_is_served() {
    let Some(node) = Node::new() else { return };
    for (user, number, words) in [
        ("root", "0", "root does not need it"),
        ("", USER, "SUDO_USER names none"),
        ("no-such-user", USER, "there is no user no-such-user"),
        ("-u", USER, "SUDO_USER names none"),
        ("0", "0", "SUDO_USER names none"),
        ("nobody/../root", USER, "SUDO_USER names none"),
        ("..", USER, "SUDO_USER names none"),
        ("nobody\nroot", USER, "SUDO_USER names none"),
        ("nobody root", USER, "SUDO_USER names none"),
        ("nobody", "0", "is not the number of nobody"),
        ("nobody", "", "is not the number of nobody"),
        ("root", USER, "is not the number of root"),
    ] {
        node.refuses(&[("SUDO_USER", user), ("SUDO_UID", number)], words);
    }
    // rekindle asks Slurm to queue a job again as root, who may do that with the jobs of all.
    for says in
        ["echo 1000", "echo 0", "exit 0", "echo slurm is down >&2; exit 1", "echo 65534; echo 65534", "echo 655340"]
    {
        node.slurm_says(says);
        node.refuses(&[], "job 7 of Slurm does not belong to nobody");
        node.refuses(&[("whose", USER), ("known", "0"), ("user", "root")], "job 7 of Slurm does not belong to nobody");
    }
}

/// Without --config rekindle also reads `rekindle.toml` in the caller's folder.
#[test]
fn without_the_configuration_of_the_administrators_nothing_starts() {
    let Some(node) = Node::new() else { return };
    fs::rename(node.path("rekindle.toml"), node.path("moved.toml")).unwrap();
    node.refuses(&[], "rekindle.toml: the administrators must create it");
    fs::create_dir(node.path("rekindle.toml")).unwrap();
    node.refuses(&[], "there is no configuration");
    node.set("CONFIG", "");
    node.refuses(&[], "the administrators must set CONFIG");
    node.set("CONFIG", "moved.toml");
    let config = node.path("moved.toml").display().to_string();
    assert_eq!(node.starts(&[], &["true"]).args, ["--config", &config, "run", "--", "true"]);
}

#[test]
fn neither_the_environment_nor_the_folder_makes_it_run_code() {
    let Some(node) = Node::new() else { return };
    let evil = node.path("evil").display().to_string();
    let file = node.write("evil.sh", &format!("touch {evil}\n")).display().to_string();
    // Programs and a configuration in the caller's folder, which is in its PATH.
    for name in ["id", "env", "stat", "squeue", "printf", "sleep", "rekindle", "true"] {
        node.write(name, &format!("#!/bin/sh\ntouch {evil}\n"));
        node.allow(name, 0o755);
    }
    node.write("cwd.toml", "");
    let function = format!("() {{ touch {evil}; }}");
    let here = node.folder.path().display().to_string();
    let trace = format!("$(touch {evil})");
    let attacks = [
        ("BASH_ENV", &file[..]),
        ("ENV", &file),
        ("BASH_FUNC_id%%", &function),
        ("BASH_FUNC_env%%", &function),
        ("BASH_FUNC_exec%%", &function),
        ("BASH_FUNC_unset%%", &function),
        ("SHELLOPTS", "xtrace:braceexpand"),
        ("PS4", &trace),
        ("BASHOPTS", "extdebug"),
        ("BASH_COMPAT", "3.1"),
        ("POSIXLY_CORRECT", "1"),
        ("IFS", "e"),
        ("CDPATH", "/tmp"),
        ("GLOBIGNORE", "*"),
        ("PATH", &here),
        ("SETTINGS", "JOB_USER"),
        ("STORES", "/tmp"),
        ("REKINDLE", &file),
        ("CONFIG", &file),
        ("SLURM_BIN", &here),
        ("environment", "REKINDLE_JOB_USER=root"),
        ("options", "doctor"),
        ("LC_ALL", "tr_TR.UTF-8"),
    ];
    let calm = node.starts(&[], &["true"]);
    for one in attacks {
        let started = node.starts(&[one], &["true"]);
        assert_eq!((&started.args, &started.environment), (&calm.args, &calm.environment), "{one:?}");
    }
    let started = node.starts(&attacks, &["true"]);
    assert_eq!((started.args, started.environment), (calm.args, calm.environment));
    // Nor do all of them together let a setting through.
    let mut all = attacks.to_vec();
    all.push(("REKINDLE_JOB_USER", "root"));
    node.refuses(&all, "REKINDLE_JOB_USER is not a setting");
}

#[test]
fn the_administrators_must_name_a_folder_that_only_root_may_write() {
    let Some(node) = Node::new() else { return };
    node.set("STORES", "");
    node.refuses(&[], "the administrators must set STORES in");
    node.set("STORES", "nowhere");
    node.refuses(&[], "there is no folder");
    node.set("STORES", "rekindle.toml");
    node.refuses(&[], "must be a folder that belongs to root");
    node.set("STORES", "stores");
    for mode in [0o777, 0o775, 0o1777, 0o757] {
        node.allow("stores", mode);
        node.refuses(&[], "must be a folder that belongs to root");
    }
    node.allow("stores", 0o755);
    node.starts(&[], &["true"]);
    std::os::unix::fs::chown(node.path("stores"), Some(65534), None).unwrap();
    node.refuses(&[], "must be a folder that belongs to root");
    // Who is not root gets no further, whatever sudo is said to have been.
    let script = node.path("rekindle-slurm");
    let done = Command::new("setpriv")
        .args(["--reuid", USER, "--clear-groups", "--"])
        .arg(script)
        .arg("true")
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&done.stderr).contains("run it with sudo"), "{done:?}");
}

#[test]
fn shellcheck_has_nothing_to_say() {
    let found = Command::new("shellcheck").arg("--version").output().is_ok();
    if rekindle_testing::require("lint", found, "there is no shellcheck: scripts/deps.sh lint") {
        let done = Command::new("shellcheck").args([SCRIPT, EPILOG]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    }
}

/// With rekindle itself: it takes what the script gives it.
#[test]
fn a_job_of_a_user_runs() {
    let Some(node) = Node::new() else { return };
    let Some(criu) = rekindle_testing::criu() else { return };
    let config = format!(
        "version = 1\n[store]\nmin-free = \"1MiB\"\non-success = \"keep\"\n[criu]\npath = {criu:?}\n[control]\ndirectory = {:?}\n\
         [snapshot]\nstaging = \"store\"\ninterval = \"off\"\n",
        node.path("control")
    );
    node.write("rekindle.toml", &config);
    fs::remove_file(node.path("bin/rekindle")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rekindle"), node.path("bin/rekindle")).unwrap();
    let job = ["sh", "-c", "id -u; echo \"$HOME $SLURM_JOB_ID $REKINDLE_JOB\"; pwd; exit 3"];
    let done = node.call(&[("REKINDLE_RESTART_MAX_RESTARTS", "0"), ("SLURM_NNODES", "1")], &job);
    assert_eq!(done.status.code(), Some(3), "{done:?}");
    let printed = fs::read_to_string(node.path("stores/nobody/slurm-7/log/stdout.log")).unwrap();
    let mut lines = printed.lines();
    assert_eq!(lines.next(), Some(USER));
    assert!(lines.next().unwrap().ends_with(" 7 slurm-7"), "{printed}");
    assert_eq!(lines.next().map(Path::new), Some(node.folder.path()));
    let stores = fs::metadata(node.path("stores/nobody")).unwrap();
    assert_eq!(stores.permissions().mode() & 0o777, 0o700);
}

/// With rekindle itself, which starts the job again after the user has put a link in the place of its working directory.
#[test]
fn a_user_enters_no_folder_of_others_by_a_link() {
    let Some(node) = Node::new() else { return };
    let Some(criu) = rekindle_testing::criu() else { return };
    let config = format!(
        "version = 1\n[store]\nmin-free = \"1MiB\"\non-success = \"keep\"\n[criu]\npath = {criu:?}\n[control]\ndirectory = {:?}\n\
         [snapshot]\nstaging = \"store\"\ninterval = \"off\"\n[restart]\nbackoff = \"0s\"\n",
        node.path("control")
    );
    node.write("rekindle.toml", &config);
    fs::remove_file(node.path("bin/rekindle")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rekindle"), node.path("bin/rekindle")).unwrap();
    for folder in ["theirs/work", "home/inner"] {
        fs::create_dir_all(node.path(folder)).unwrap();
        node.allow(folder, 0o755);
    }
    node.write("home/inner/secret", "not for all");
    node.allow("home", 0o700);
    std::os::unix::fs::chown(node.path("home"), Some(1), None).unwrap();
    for theirs in ["theirs", "theirs/work"] {
        std::os::unix::fs::chown(node.path(theirs), Some(65534), None).unwrap();
    }
    let link = format!("ln -s {} ../work", node.path("home/inner").display());
    let attack = format!("cat secret && exit 0; mv ../work ../moved; {link}; exit 9");
    let mut sudo = Command::new(node.path("rekindle-slurm"));
    sudo.env_clear().env("PATH", "/usr/bin:/bin").env("SUDO_USER", "nobody").env("SUDO_UID", USER);
    sudo.env("SLURM_JOB_ID", "7").env("REKINDLE_RESTART_MAX_RESTARTS", "1").args(["sh", "-c", &attack]);
    let done = sudo.current_dir(node.path("theirs/work")).output().unwrap();
    let printed = fs::read_to_string(node.path("stores/nobody/slurm-7/log/stdout.log")).unwrap();
    assert!(!printed.contains("not for all") && !done.status.success(), "{printed} {done:?}");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(said.contains("user nobody cannot enter the working directory"), "{said}");
}

#[test]
fn the_epilog_frees_memory_and_never_drains_the_node() {
    let Some(node) = Node::new() else { return };
    let config = node.path("rekindle.toml").display().to_string();
    let discards = &["--config", &config, "prune", "--discard-memory"][..];
    for (line, args) in [("DISCARD=no", &discards[..3]), ("DISCARD=yes", discards)] {
        // The stand-in ends with 7.
        let done = node.epilog(line);
        assert!(done.status.success() && done.stderr.is_empty() && done.stdout.is_empty(), "{done:?}");
        let got = fs::read_to_string(node.path("args")).unwrap();
        assert_eq!(got.split_terminator('\0').collect::<Vec<_>>(), args);
        let environment = fs::read_to_string(node.path("environment")).unwrap();
        assert!(environment.contains("REKINDLE_STORE_DIRECTORY=/nonexistent\0"), "{environment}");
        assert!(!environment.contains("REKINDLE_JOB_USER"), "{environment}");
    }
    fs::remove_file(node.path("bin/rekindle")).unwrap();
    assert!(node.epilog("DISCARD=no").status.success());
}

/// With rekindle itself, which is killed as by slurmstepd.
#[test]
fn the_epilog_frees_what_a_killed_rekindle_left() {
    let Some(node) = Node::new() else { return };
    let Some(criu) = rekindle_testing::criu() else { return };
    let (memory, store) = (node.path("memory"), node.path("stores/nobody"));
    node.write(
        "rekindle.toml",
        &format!(
            "version = 1\n[store]\nmin-free = \"1MiB\"\n[criu]\npath = {criu:?}\n[control]\ndirectory = {:?}\n\
             [snapshot]\nstaging-directory = {memory:?}\ninterval = \"off\"\n",
            node.path("control")
        ),
    );
    fs::remove_file(node.path("bin/rekindle")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rekindle"), node.path("bin/rekindle")).unwrap();
    let rekindle = |args: &[&str]| {
        let mut command = Command::new(node.path("bin/rekindle"));
        command.arg("--config").arg(node.path("rekindle.toml")).arg("--store").arg(&store).args(args);
        command
    };
    let mounted = || fs::read_to_string("/proc/mounts").unwrap().contains(&*memory.to_string_lossy());
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !done() {
            assert!(std::time::Instant::now() < until, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    };
    /// Ends with the test, also if that fails.
    struct Ends(std::process::Child);
    impl Drop for Ends {
        fn drop(&mut self) {
            let _ = self.0.kill().and_then(|()| self.0.wait());
        }
    }
    let run = Ends(rekindle(&["run", "--name", "j", "--", "sleep", "300"]).spawn().unwrap());
    wait("there is no snapshot", &|| rekindle(&["snapshot", "j"]).output().unwrap().status.success());
    let is_stored = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with("0000");
    wait("it is not stored", &|| fs::read_dir(store.join("j/images")).unwrap().flatten().any(is_stored));
    // Not while it lives.
    assert!(node.epilog("DISCARD=yes").status.success() && mounted());
    drop(run);
    assert!(mounted());
    assert!(node.epilog("DISCARD=no").status.success());
    assert!(!mounted());
}
