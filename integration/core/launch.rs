//! The job's world: what it can see and do, how it is ended and how that is passed on.

use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::supervisor::{Lab, Running};

/// Starts a job that says what it sees.
fn look(lab: &Lab) -> (Running, Value) {
    let store = lab.store();
    let mut run = lab.python("look.py", &[lab.path().to_str().unwrap(), store.to_str().unwrap()]);
    run.wait_printed("}\n");
    let seen = serde_json::from_str(&run.out()).unwrap();
    (run, seen)
}

fn end(lab: &Lab, run: Running) {
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

#[test]
fn a_world_of_its_own() {
    let Some(lab) = Lab::new() else { return };
    fs::create_dir(lab.file("here")).unwrap();
    let lab = lab
        .set_file("job.directory", "here")
        .set("job.umask", "\"027\"")
        .set("job.limits", "{ nofile = 321, stack = \"4MiB\", core = 0 }")
        .set("job.environment", "{ COLOUR = \"blue\" }");
    // A descriptor that a careless caller lets us inherit must not reach the job.
    let leak = fs::File::open("/etc/passwd").unwrap();
    nix::fcntl::fcntl(&leak, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    assert!(leak.as_raw_fd() > 2);
    let (run, seen) = look(&lab);
    drop(leak);
    assert_eq!((&seen["pid"], &seen["parent"], &seen["session"]), (&1001.into(), &1000.into(), &1000.into()));
    assert_eq!(seen["processes"], serde_json::json!([1, 1000, 1001]), "a /proc of its own");
    assert_eq!(seen["directory"], lab.file("here").to_str().unwrap());
    assert_eq!(seen["umask"], 0o027);
    assert_eq!(seen["nofile"], serde_json::json!([321, 321]));
    assert_eq!(seen["stack"], serde_json::json!([4 << 20, 4 << 20]));
    assert_eq!(seen["core"], serde_json::json!([0, 0]));
    let environment = &seen["environment"];
    assert_eq!((&environment["COLOUR"], &environment["REKINDLE_JOB"]), (&"blue".into(), &"j".into()));
    assert_eq!(environment["REKINDLE_RUN_ID"], lab.published().unwrap().lineage);
    assert_eq!(environment["REKINDLE_LAB"], lab.path().to_str().unwrap(), "inherited");
    let descriptors = seen["descriptors"].as_object().unwrap();
    assert_eq!(descriptors.keys().collect::<Vec<_>>(), ["0", "1", "2"], "{descriptors:?}");
    assert_eq!(descriptors["0"], "/dev/null");
    assert_eq!((&seen["blocked"], &seen["no-new-privileges"]), (&"0000000000000000".into(), &"0".into()));
    // What the caller ignores stays ignored (nohup); Python itself ignores SIGPIPE (13) and SIGXFSZ (25).
    let mine = fs::read_to_string("/proc/self/status").unwrap();
    let mine = mine.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim().to_string();
    let bits = |text: &str| u64::from_str_radix(text, 16).unwrap();
    assert_eq!(bits(seen["ignored"].as_str().unwrap()), bits(&mine) | 0x100_1000);
    end(&lab, run);
}

#[test]
fn a_user_has_no_rights_over_its_supervisor() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("job.no-new-privileges", "true");
    let (mut run, seen) = look(&lab);
    let id = fs::read_to_string("/etc/passwd").unwrap();
    let nobody: Vec<&str> = id.lines().find(|line| line.starts_with("nobody:")).unwrap().split(':').collect();
    assert_eq!(seen["uids"], serde_json::json!(vec![nobody[2]; 4]));
    assert_eq!(seen["gids"], serde_json::json!(vec![nobody[3]; 4]));
    assert!(seen["groups"].as_array().unwrap().iter().all(|group| group != "0"), "{}", seen["groups"]);
    assert_eq!(seen["capabilities"], serde_json::json!(vec!["0000000000000000"; 4]));
    assert_eq!(seen["no-new-privileges"], "1");
    let environment = &seen["environment"];
    assert_eq!((&environment["USER"], &environment["HOME"]), (&"nobody".into(), &nobody[5].into()));
    for what in ["kill parent", "kill init", "become root"] {
        assert_eq!(seen[what], "Operation not permitted", "{what}");
    }
    for what in ["memory of parent", "files of parent", "files of init", "root of parent", "store"] {
        assert_eq!(seen[what], "Permission denied", "{what}");
    }
    // It comes back as the same user.
    run.snapshot(&lab);
    run.crash(&lab);
    let pid = run.job_pid(&lab);
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_string();
    assert_eq!(field("Uid:"), [nobody[2]; 4].join("\t"));
    assert_eq!(field("Gid:"), [nobody[3]; 4].join("\t"));
    assert_eq!((field("CapEff:"), field("NoNewPrivs:")), ("0000000000000000".into(), "1".into()));
    assert!(!field("Groups:").split(' ').any(|group| group == "0"));
    // Folders and files of the store are the supervisor's alone.
    for entry in walk(&lab.store()) {
        let metadata = fs::symlink_metadata(&entry).unwrap();
        let mode = std::os::unix::fs::MetadataExt::mode(&metadata);
        assert!(mode & 0o077 == 0 || !below_closed(&entry, &lab.store()), "{} has mode {mode:o}", entry.display());
    }
    end(&lab, run);
}

/// Whether no folder on the way keeps others out.
fn below_closed(path: &Path, store: &Path) -> bool {
    let folders = path.ancestors().skip(1).take_while(|folder| folder.starts_with(store));
    folders.into_iter().all(|f| std::os::unix::fs::MetadataExt::mode(&fs::metadata(f).unwrap()) & 0o011 != 0)
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut all = vec![folder.to_path_buf()];
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() { all.extend(walk(&entry.path())) } else { all.push(entry.path()) }
    }
    all
}

#[test]
fn a_clean_environment() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.environment-mode", "\"clean\"").set("job.environment", "{ COLOUR = \"blue\" }");
    let (run, seen) = look(&lab);
    let environment = seen["environment"].as_object().unwrap();
    let known =
        ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "COLOUR", "REKINDLE_JOB", "REKINDLE_RUN_ID", "LC_CTYPE"];
    assert!(environment.keys().all(|name| known.contains(&name.as_str())), "{environment:?}");
    assert_eq!(environment["COLOUR"], "blue");
    end(&lab, run);
}

#[test]
fn standard_input_from_a_file_and_inherited() {
    let Some(lab) = Lab::new() else { return };
    fs::write(lab.file("in"), "from the file\n").unwrap();
    let lab = lab.set_file("job.stdin", "in");
    let (out, _) = lab.run(["cat"]).ends_with(0);
    assert_eq!(out, "from the file\n");
    let lab = lab.set("job.stdin", "\"inherit\"");
    // Here it is /dev/null, which can be inherited; a pipe can not come back and is refused.
    assert_eq!(lab.run(["cat"]).ends_with(0).0, "");
    let inherit = lab.file("rekindle.toml");
    let mut command = lab.command(["--config".as_ref(), inherit.as_os_str()]);
    command.args(["run", "--name", "piped", "--", "cat"]).stdin(std::process::Stdio::piped());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("job.stdin") && said.contains("pipe:"), "{said}");
    command.stdin(fs::File::open(lab.file("in")).unwrap());
    assert_eq!(command.output().unwrap().stdout, b"from the file\n");
}

#[test]
fn commands_that_can_not_be_run() {
    let Some(lab) = Lab::new() else { return };
    let (_, said) = lab.run(["no-such-command"]).ends_with(127);
    assert!(said.contains("command not found: no-such-command"), "{said}");
    lab.run(["./nothing-here"]).ends_with(127);
    let (_, said) = lab.run(["/etc/passwd"]).ends_with(126);
    assert!(said.contains("/etc/passwd") && said.contains("execute permission"), "{said}");
    lab.run(["/etc"]).ends_with(126);
    let script = lab.script("x", "");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    let (_, said) = lab.run([script.as_os_str()]).ends_with(127);
    assert!(said.contains("never-retry-exit-codes"), "{said}");
    fs::write(&script, [0x7f, b'E', b'L', b'F', 0, 0]).unwrap();
    lab.run([script.as_os_str()]).ends_with(126);
    let lab = lab.set("job.user", "\"no-such-user\"");
    let (_, said) = lab.run(["true"]).ends_with(78);
    assert!(said.contains("job.user") && said.contains("no-such-user"), "{said}");
}

#[test]
fn the_end_is_passed_on() {
    let Some(lab) = Lab::new().map(|lab| lab.set("restart.max-restarts", "0")) else { return };
    let run = |text: &str| lab.run_with(&["run", "--fresh", "--name", "j", "--"], ["sh", "-c", text]);
    run("true").ends_with(0);
    for code in [1, 3, 75, 255] {
        let (_, said) = run(&format!("exit {code}")).ends_with(code);
        assert!(said.contains("restart.max-restarts"), "{said}");
    }
    for signal in ["TERM", "KILL", "SEGV", "INT", "USR1", "QUIT", "ABRT"] {
        let number = signal.parse::<Signal>().or_else(|_| format!("SIG{signal}").parse()).unwrap();
        run(&format!("kill -{signal} $$")).ends_with(128 + number as i32);
    }
    // A real-time signal has a number and no name.
    run("kill -40 $$").ends_with(128 + 40);
}

#[test]
fn daemons_end_with_the_job() {
    let Some(lab) = Lab::new() else { return };
    for space in ["\"private\"", "\"host\""] {
        let lab = Lab::new().unwrap().set("job.pid-namespace", space);
        let script = lab.script("job", "setsid sleep 1000 & (setsid sh -c 'sleep 1001 & sleep 1002' &) ; sleep 0.3");
        lab.run([script.as_os_str()]).ends_with(0);
        lab.assert_all_gone(Duration::from_secs(1));
    }
    drop(lab);
}

#[test]
fn other_signals_reach_the_job() {
    let Some(lab) = Lab::new() else { return };
    let script =
        lab.script("job", "trap 'echo quit' QUIT\ntrap 'echo winch' WINCH\necho ready\nwhile :; do sleep 0.05; done");
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.signal(Signal::SIGQUIT);
    run.wait_printed("quit");
    run.signal(Signal::SIGWINCH);
    run.wait_printed("winch");
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
}
