//! The job's world: what it can see and do, how it is ended and how that is passed on.

use std::fs;
use std::os::fd::AsRawFd;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::supervisor::{Lab, Running, criu, kill, python};

/// Starts a job that says what it sees.
pub(crate) fn look(lab: &Lab) -> (Running, Value) {
    let mut run = run_look(lab);
    run.wait_printed("}\n");
    // The job can be quicker than what is published of it.
    run.job_pid(lab);
    let seen = serde_json::from_str(&run.out()).unwrap();
    (run, seen)
}

/// The same, and does not wait for what it says.
pub(crate) fn run_look(lab: &Lab) -> Running {
    let store = lab.store();
    lab.python("look.py", &[lab.path().to_str().unwrap(), store.to_str().unwrap()])
}

pub(crate) fn end(lab: &Lab, run: Running) {
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

#[test]
fn a_world_of_its_own() {
    let Some(lab) = Lab::new() else { return };
    fs::create_dir(lab.file("here")).unwrap();
    let lab = lab
        .with_umask("027")
        .set_file("job.directory", "here")
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
    // Signals 32 and 33 are the C library's own; its posix_spawn makes the child ignore them, or not.
    let bits = |text: &str| u64::from_str_radix(text, 16).unwrap() & !(0b11 << 31);
    assert_eq!(bits(seen["ignored"].as_str().unwrap()), bits(&mine) | 0x100_1000);
    end(&lab, run);
}

#[test]
fn a_clean_environment() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.environment-mode", "\"clean\"").set("job.environment", "{ COLOUR = \"blue\" }");
    let (run, seen) = look(&lab);
    let environment = seen["environment"].as_object().unwrap();
    let known = [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "TZ",
        "COLOUR",
        "REKINDLE_JOB",
        "REKINDLE_RUN_ID",
        "REKINDLE_SOCKET",
        "LC_CTYPE",
        "PYTHONUNBUFFERED",
    ];
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
    // Here it is /dev/null, which can be inherited; a pipe cannot come back and is refused.
    assert_eq!(lab.run_with(&["run", "--fresh", "--name", "j", "--"], ["cat"]).ends_with(0).0, "");
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
    let (script, draft) = (lab.file("x"), lab.file("draft"));
    fs::write(&draft, "#!/no/such/interpreter\n").unwrap();
    lab.install(&draft, &script);
    let (_, said) = lab.run([script.as_os_str()]).ends_with(127);
    assert!(said.contains("the command was not found"), "{said}");
    fs::write(&draft, [0x7f, b'E', b'L', b'F', 0, 0]).unwrap();
    lab.install(&draft, &script);
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
    // A queue would take 75 and 143 for a run that was stopped, and start the job again for ever.
    for (code, ours) in [(1, 1), (3, 3), (75, 1), (143, 1), (255, 255)] {
        let (_, said) = run(&format!("exit {code}")).ends_with(ours);
        assert!(said.contains("restart.max-restarts"), "{said}");
    }
    for signal in ["TERM", "KILL", "SEGV", "INT", "USR1", "QUIT", "ABRT"] {
        let number = signal.parse::<Signal>().or_else(|_| format!("SIG{signal}").parse()).unwrap();
        let ours = if number == Signal::SIGTERM { 1 } else { 128 + number as i32 };
        run(&format!("kill -{signal} $$")).ends_with(ours);
    }
    // A real-time signal has a number and no name.
    run("kill -40 $$").ends_with(128 + 40);
}

#[test]
fn daemons_end_with_the_job() {
    let Some(lab) = Lab::new() else { return };
    let script = lab.script("job", "setsid sleep 1000 & (setsid sh -c 'sleep 1001 & sleep 1002' &) ; sleep 0.3");
    lab.run([script.as_os_str()]).ends_with(0);
    lab.assert_all_gone();
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

/// One that comes while there is no job that could get it: in a restart, or just before the supervisor knows that the
/// job runs.
#[test]
fn a_signal_that_comes_while_the_job_is_started_reaches_it() {
    let Some(lab) = Lab::new().map(|lab| lab.set_file("criu.path", "criu")) else { return };
    let (real, hold, began) = (criu(), lab.file("hold"), lab.file("began"));
    let text = format!(
        "case \"$*\" in *--version*) exec {real} \"$@\";; esac\n\
         if [ -e {hold} ]; then : > {began}; while [ -e {hold} ]; do sleep 0.01; done; fi\nexec {real} \"$@\"",
        real = real.display(),
        hold = hold.display(),
        began = began.display(),
    );
    lab.script("criu", &text);
    let script = lab.script("job", "trap 'echo winch' WINCH\necho ready\nwhile :; do sleep 0.05; done");
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.snapshot(&lab);
    let pid = run.job_pid(&lab);
    fs::write(&hold, "").unwrap();
    kill(pid, Signal::SIGKILL);
    run.wait_for("the restore is held up", || began.exists());
    run.signal(Signal::SIGWINCH);
    // Time for it to be lost in: this one is handled after it, or just before.
    run.signal(Signal::SIGUSR1);
    run.wait_said_times("received SIGUSR1", 2);
    assert!(!run.out().contains("winch"));
    fs::remove_file(&hold).unwrap();
    run.wait_printed("winch");
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
}

/// A session leader without a terminal that opens one gets it as its own, and SIGHUP when it hangs up. mpirun gives
/// each rank a terminal for its output.
#[test]
fn a_terminal_of_the_job_does_not_become_the_supervisors() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.leading_a_session();
    let job = "import os, time\nends = os.openpty()\nprint('ready', flush=True)\nwhile True: time.sleep(0.1)";
    let mut run = lab.run([python().unwrap().to_str().unwrap(), "-S", "-c", job]);
    run.wait_printed("ready");
    run.snapshot(&lab);
    let stat = fs::read_to_string(format!("/proc/{}/stat", run.pid())).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    assert_eq!(fields[3], run.pid().to_string(), "it leads a session: {stat}");
    assert_eq!(fields[4], "0", "it has a terminal: {stat}");
    run.crash(&lab);
    run.snapshot(&lab);
    run.signal(Signal::SIGTERM);
    run.second_stop(Signal::SIGTERM);
    run.ends_with(128 + 15);
}

/// What a user sees who does not ask for more.
#[test]
fn the_log_is_a_line_for_the_start_each_restore_and_the_end() {
    let Some(lab) = Lab::new().map(|lab| lab.without("log.level")) else { return };
    let mut run =
        lab.run([python().unwrap().to_str().unwrap(), "-Sc", "import time\nprint('begun')\ntime.sleep(1000)"]);
    // Python would hold it back until its buffer is full.
    run.wait_printed("begun\n");
    run.snapshot(&lab);
    run.snapshot(&lab);
    run.crash(&lab);
    run.wait_said("the job was restored from image");
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(143);
    let lines: Vec<&str> = said.lines().filter(|line| line.contains(" INFO ") || line.contains(" WARN ")).collect();
    let wanted = [
        "starts",
        "its store is",
        "the job ended: signal SIGKILL",
        "continuing from",
        "was restored",
        "received SIGTERM",
        "job j stopped",
    ];
    assert!(lines.len() == wanted.len() && lines.iter().zip(wanted).all(|(line, part)| line.contains(part)), "{said}");
    assert!(lines[6].contains("3 snapshots (frozen for ") && lines[6].contains("1 restart; `rekindle run`"), "{said}");

    let Some(lab) = Lab::new().map(|lab| lab.without("log.level")) else { return };
    let mut run = lab.run_with(&["run", "-v", "--fresh", "--name", "j", "--"], ["sleep", "1000"]);
    run.job_pid(&lab);
    run.snapshot(&lab);
    run.wait_said("was stored in");
    lab.kill_9(run);
}
