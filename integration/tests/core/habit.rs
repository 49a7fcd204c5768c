//! What a user types without thinking: jobs are found wherever their store is, and a run says how to look at it.

use std::path::Path;

use serde_json::Value;

use crate::kinds::{count_on, finish};
use crate::supervisor::{LIMIT, Lab, Running, comes, wait_for};

/// Runs a command as another terminal would: nothing names the store. A supervisor that answers late is not found and
/// nothing is asked of it, so the command runs again.
fn elsewhere(lab: &Lab, args: &[&str]) -> (i32, String, String) {
    let mut answer = None;
    comes(LIMIT / 5, || !answer.insert(elsewhere_once(lab, args)).2.contains("does not answer"));
    answer.unwrap()
}

/// The same without patience.
fn elsewhere_once(lab: &Lab, args: &[&str]) -> (i32, String, String) {
    let output = lab.command(args).env_remove("REKINDLE_STORE_DIRECTORY").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// The same for a command that succeeds and answers in JSON.
fn ask(lab: &Lab, args: &[&str]) -> Value {
    let (code, out, err) = elsewhere(lab, &[args, &["--json"]].concat());
    assert_eq!(code, 0, "{args:?}: {err}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args:?}: {error}\n{out}"))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a command where the default store has a job `j` without images: in a mount namespace of its own.
fn default_store_has_one_too(lab: &Lab, line: &str) -> (i32, String) {
    let script = "mkdir -p /var/lib && mount -t tmpfs -o mode=755 tmpfs /var/lib && mkdir -p -m 700 \
        /var/lib/rekindle/j/images && exec \"$@\"";
    let mut command = std::process::Command::new("unshare");
    let rekindle = lab.command(line.split(' ').collect::<Vec<_>>());
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(rekindle.get_program());
    command.args(rekindle.get_args()).envs(rekindle.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.env_remove("REKINDLE_STORE_DIRECTORY").output().unwrap();
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Starts the job `j` with this store.
fn start(lab: &Lab, store: &Path) -> Running {
    let command = lab.python_command("kinds.py", &["plain", text(lab.path())]);
    let mut run = lab.run_with(&["run", "--store", text(store), "--name", "j", "--"], command);
    // It may continue.
    run.wait_printed("\nn ");
    run
}

#[test]
fn a_running_job_is_found_wherever_its_store_is() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, &lab.store());
    let store = lab.store().canonicalize().unwrap();
    count_on(&lab, &mut run, 2);
    let mut row = Value::Null;
    wait_for("its supervisor answers in time", || {
        let rows = ask(&lab, &["status"]);
        let found = rows.as_array().unwrap().iter().find(|row| row["store"] == text(&store));
        row = found.cloned().unwrap_or_default();
        row["source"] == "supervisor"
    });
    assert_eq!((&row["job"], &row["state"]), (&"j".into(), &"running".into()));
    assert_eq!(ask(&lab, &["status", "j"])["pid"], run.job_pid(&lab));
    let listed = ask(&lab, &["list"]);
    assert!(listed.as_array().unwrap().iter().any(|row| row["store"] == text(&store)), "{listed:#}");
    assert_eq!(ask(&lab, &["snapshot", "j", "--stored"])["snapshot"]["stored"], true);
    assert_eq!(ask(&lab, &["list", "j"])[0]["state"], "good");
    assert!(elsewhere(&lab, &["logs", "-n", "1", "j"]).1.starts_with("n "));
    assert!(ask(&lab, &["suspend", "j"])["suspended"]["image"].is_string());
    assert!(ask(&lab, &["resume", "j"])["running"]["image"].is_string());
    assert!(ask(&lab, &["rewind", "j", "-1"])["running"]["image"].is_string());
    count_on(&lab, &mut run, 2);
    // Commands for images, too.
    assert_eq!(ask(&lab, &["show", "j"])["job"], "j");
    assert_eq!(ask(&lab, &["tag", "j/1", "best"])["tags"][0], "best");
    let id = ask(&lab, &["pin", "j/best"])["image"].as_str().unwrap().to_owned();
    assert_eq!(ask(&lab, &["pin", "--remove", &id])["pinned"], false, "by its id alone");
    assert_eq!(ask(&lab, &["mark", "--good", "j/best"])[0]["mark"], Value::Null);
    for args in [&["verify", "j"][..], &["verify", "j/best"], &["verify"], &["repair", "--dry-run", "j"]] {
        assert_eq!(elsewhere(&lab, args).0, 0, "{args:?}");
    }
    assert_eq!(ask(&lab, &["prune", "--dry-run", "j"])[0]["job"], "j");
    for (args, expected, words) in [
        (&["restore", "j"][..], 69, "is supervised by"),
        (&["rm", "--yes", "j"], 2, "rekindle stop j"),
        (&["show", "j/nothing"], 2, "nothing"),
    ] {
        let (code, _, said) = elsewhere(&lab, args);
        assert!(code == expected && said.contains(words), "{args:?}: {code} {said}");
    }
    // The default store may have another one of that name, which does not run. It is the only one for a command that
    // the supervisor answers late.
    wait_for("the one that runs is shown", || default_store_has_one_too(&lab, "status j") == (0, String::new()));
    wait_for("neither is chosen", || {
        let (code, said) = default_store_has_one_too(&lab, "show j");
        let names_both = said.contains("/var/lib/rekindle") && said.contains(text(&store));
        code == 2 && names_both && said.contains("choose one with --store")
    });
    // Another user may not ask its supervisor, and is not told that nothing runs.
    lab.install(env!("CARGO_BIN_EXE_rekindle").as_ref(), &lab.file("rekindle"));
    for (args, expected) in [(&["status"][..], 0), (&["show", "j"], 69)] {
        let rekindle = lab.command(args);
        let mut command = std::process::Command::new(lab.file("rekindle"));
        command.args(rekindle.get_args()).envs(rekindle.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env_remove("REKINDLE_STORE_DIRECTORY").current_dir("/");
        let output = std::os::unix::process::CommandExt::uid(&mut command, 65534).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(
            output.status.code() == Some(expected) && said.contains("of another user: use sudo"),
            "{args:?}: {said}"
        );
    }
    // Two of that name: neither is chosen.
    let other = lab.file("other");
    let mut second = start(&lab, &other);
    let is_refused = |args: &[&str]| {
        let (code, out, said) = elsewhere(&lab, args);
        let names_both = said.contains(text(&store)) && said.contains(text(&other.canonicalize().unwrap()));
        code == 2 && out.is_empty() && names_both && said.contains("--store")
    };
    for args in [&["status", "j"][..], &["logs", "j"]] {
        wait_for("neither is chosen", || is_refused(args));
    }
    let mut attempts = 1;
    while !is_refused(&["stop", "j"]) {
        // If one answers late, the other is the only one. It is over, and starts again.
        assert!(attempts < 5, "one of two was stopped");
        attempts += 1;
        wait_for("one is over", || !run.runs() || !second.runs());
        if run.runs() {
            second = start(&lab, &other);
        } else {
            run = start(&lab, &store);
        }
    }
    let both = elsewhere(&lab, &["status"]).1;
    assert!(both.contains("STORE") && both.contains(text(&store)), "{both}");
    // A store that is named is the only one.
    let of = |store: &Path| ask(&lab, &["status", "--store", text(store)]);
    assert_eq!((of(&store).as_array().unwrap().len(), of(&other).as_array().unwrap().len()), (1, 1));
    assert_eq!(ask(&lab, &["stop", "j", "--store", text(&other)])["outcome"], "stopped");
    second.ends_with(143);
    wait_for("it is said where it runs", || {
        let (code, _, said) = elsewhere(&lab, &["status", "j", "--store", text(&lab.file("none"))]);
        code == 2 && said.contains(&format!("use --store {}", text(&store)))
    });
    assert_eq!(ask(&lab, &["stop", "j"])["outcome"], "stopped");
    run.ends_with(143);
    // It does not run, and the default store does not have it.
    let (code, _, said) = elsewhere(&lab, &["status", "j"]);
    assert!(code == 2 && said.contains("/var/lib/rekindle") && said.contains("use --store DIR"), "{code} {said}");
    finish(&lab, lab.python("kinds.py", &["plain", text(lab.path())]));
}

/// A socket that another user could have made is not asked, and a supervisor that does not answer is named.
#[test]
fn only_supervisors_that_can_be_trusted_are_asked() {
    let Some(lab) = Lab::new() else { return };
    let mut run = start(&lab, &lab.store());
    count_on(&lab, &mut run, 1);
    run.signal(nix::sys::signal::Signal::SIGSTOP);
    let (code, _, said) = elsewhere_once(&lab, &["logs", "j"]);
    assert!(code == 2 && said.contains("does not answer") && said.contains("--store"), "{code} {said}");
    run.signal(nix::sys::signal::Signal::SIGCONT);
    let folder = lab.file("control");
    let open_to = |mode| {
        std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    open_to(0o777);
    let (code, out, said) = elsewhere(&lab, &["logs", "j"]);
    assert!(code == 2 && out.is_empty() && said.contains("others can write"), "{code} {said}");
    open_to(0o755);
    assert_eq!(elsewhere(&lab, &["logs", "j"]).0, 0);
    // A socket of that kind that nobody listens at any more says nothing.
    drop(std::os::unix::net::UnixListener::bind(folder.join("k-01234567.sock")).unwrap());
    assert_eq!(ask(&lab, &["status", "j"])["job"], "j");
    finish(&lab, run);
}

#[test]
fn where_nothing_was_ever_run_there_are_no_jobs() {
    let Some(lab) = Lab::new() else { return };
    for command in ["status", "list"] {
        let output = lab.rekindle(&[command]);
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && out.starts_with("no jobs in "), "{command}: {out}");
        assert_eq!(lab.rekindle(&[command, "--json"]).stdout, b"[]\n");
    }
    assert!(!lab.store().exists());
}

#[test]
fn a_run_says_once_where_it_is_and_how_to_look() {
    let Some(lab) = Lab::new() else { return };
    let (_, said) = lab.run(["true"]).ends_with(0);
    let store = lab.store().canonicalize().unwrap();
    let line = format!("its store is {}; see `rekindle status j` and `rekindle logs -f j`", store.display());
    assert_eq!(said.matches(&line).count(), 1, "{said}");
    // The variable names another store to later commands.
    let other = lab.file("other");
    let (_, said) = lab.run_with(&["run", "--store", text(&other), "--name", "j", "--"], ["true"]).ends_with(0);
    assert!(said.contains(&format!("`rekindle status j --store {}`", other.display())), "{said}");
}

#[test]
fn a_job_that_failed_without_an_image_takes_another_command() {
    let Some(lab) = Lab::new() else { return };
    lab.run(["sh", "-c", "echo n 1; exit 2"]).ends_with(2);
    let (out, said) = lab.run(["sh", "-c", "echo n 2"]).ends_with(0);
    assert!(out == "n 2\n" && said.contains("left no image, so the job starts with the new command"), "{said}");
}

#[test]
fn a_job_is_removed_with_all_that_it_left() {
    let Some(lab) = Lab::new() else { return };
    let mut run = crate::kinds::until_after_snapshot(&lab, "plain");
    let (code, _, said) = elsewhere(&lab, &["rm", "j", "--yes"]);
    assert!(code == 2 && said.contains("is running: stop it first with `rekindle stop j`"), "{code} {said}");
    run.snapshot(&lab);
    lab.kill_9(run);
    assert_eq!(lab.mounted().len(), 1, "its images are in memory, too");
    let rm = |args: &[&str]| {
        let output = lab.rekindle(&[&["rm"], args].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    };
    let (code, _, said) = rm(&["j"]);
    assert!(code == 2 && said.contains("add --yes to remove job j: 2 images, "), "{code} {said}");
    assert!(lab.rekindle(&["pin", "j/1"]).status.success());
    let (code, _, said) = rm(&["j", "--yes"]);
    assert!(code == 2 && said.contains("pinned images (000001-") && said.contains("--force"), "{code} {said}");
    // Nothing is removed if one of several cannot be.
    assert_eq!(rm(&["j", "none", "--yes", "--force"]).0, 2);
    assert_eq!((lab.good(), lab.mounted().len()), (vec![2, 1], 1));
    let (code, out, said) = rm(&["j", "--yes", "--force", "--json"]);
    assert_eq!(code, 0, "{said}");
    let row = &serde_json::from_str::<Value>(&out).unwrap()[0];
    assert!(row["frees"].as_u64() > Some(4096) && row["memory_bytes"].as_u64() > Some(4096), "{row}");
    assert!(lab.mounted().is_empty() && std::fs::read_dir(lab.store()).unwrap().next().is_none());
    assert_eq!(rm(&["j", "--yes"]).0, 2, "there is none any more");

    // A removal that was interrupted after its first step: no job, and its name is not used before it is finished.
    lab.run(["true"]).ends_with(0);
    std::fs::rename(lab.store().join("j"), lab.store().join(".del-j")).unwrap();
    assert_eq!(lab.rekindle(&["list", "--json"]).stdout, b"[]\n");
    assert_eq!(rm(&["j", "--yes"]).0, 0);
    assert!(!lab.store().join(".del-j").exists());
    for (dry_run, is_left) in [("--dry-run", true), ("--json", false)] {
        std::fs::create_dir_all(lab.store().join(".del-j/images")).unwrap();
        let out = String::from_utf8(lab.rekindle(&["prune", dry_run]).stdout).unwrap();
        assert!(out.contains("removal that was interrupted"), "{out}");
        assert_eq!(lab.store().join(".del-j").exists(), is_left);
    }
    lab.run(["true"]).ends_with(0);
    std::fs::rename(lab.store().join("j"), lab.store().join(".del-j")).unwrap();
    let (_, said) = lab.run(["true"]).ends_with(0);
    assert!(
        said.contains("the removal of an earlier job of that name was interrupted")
            && !lab.store().join(".del-j").exists(),
        "{said}"
    );
}

/// Runs rekindle with a terminal that is closed as soon as it has ended; its exit code and what it said.
fn on_a_terminal(lab: &Lab, args: &[&str], command: &[String]) -> (i32, String) {
    let python = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";
    let mut run = lab.command(["--config".as_ref(), lab.file("rekindle.toml").as_os_str()]);
    run.args(args).args(command);
    let mut within = std::process::Command::new(crate::supervisor::python().unwrap());
    within.args(["-c", python]).arg(run.get_program()).args(run.get_args()).current_dir(lab.path());
    within.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?)))).stdin(std::process::Stdio::null());
    let output = within.output().unwrap();
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_detached_run_survives_its_terminal() {
    let Some(lab) = Lab::new() else { return };
    let command = lab.python_command("kinds.py", &["plain", text(lab.path())]);
    // Writes the configuration.
    assert!(lab.rekindle(&["list"]).status.success());
    let (code, said) = on_a_terminal(&lab, &["run", "--detach", "--name", "j", "--"], &command);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("job j runs in the background") && said.contains("rekindle stop j"), "{said}");
    let published = lab.published().unwrap();
    let supervisor = published.supervisor.cast_signed();
    assert!(crate::supervisor::alive(supervisor) && published.pid.is_some_and(crate::supervisor::alive));
    assert_eq!(nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(supervisor))).unwrap().as_raw(), supervisor);
    wait_for("it counts", || lab.output().contains("n 20\n"));
    let log = || std::fs::read_to_string(lab.store().join("j/log/supervisor.log")).unwrap();
    assert!(!log().contains("n 20"), "the job's output is in its own file: {}", log());
    assert_eq!(ask(&lab, &["snapshot", "j", "--stored"])["snapshot"]["stored"], true);
    // A second one says why it does not start, and ends with the same code as in the foreground.
    let args = ["run", "--detach", "--name", "j", "--"];
    let (code, said) = on_a_terminal(&lab, &args, &command);
    assert!(code == 69 && said.contains("is supervised by"), "{code} {said}");
    assert_eq!(ask(&lab, &["stop", "j"])["outcome"], "stopped");
    lab.assert_all_gone();
    // The same line again goes on, and the old part of the log is not shown again.
    let (code, said) = on_a_terminal(&lab, &[&["--json"], &args[..]].concat(), &command);
    // A spinner is on the same terminal.
    let (begin, end) = (said.find('{').unwrap(), said.rfind('}').unwrap());
    let told: Value = serde_json::from_str(&said[begin..=end]).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert!(code == 0 && told["job"] == "j" && told["pid"].as_i64() > Some(0), "{said}");
    std::fs::write(lab.file("finish"), "").unwrap();
    lab.assert_all_gone();
    assert!(log().contains("continues from image") && !log().contains('\x1b'), "{}", log());
    crate::supervisor::assert_counts_up(&lab.output());
    // What is wrong after the folder was opened is in the log, and on the terminal; what is wrong before, there alone.
    let before = log().len();
    let (code, said) = on_a_terminal(&lab, &args, &command);
    assert!(code == 2 && said.contains("use --fresh") && !said.contains("continues from"), "{code} {said}");
    assert!(log()[before..].contains("use --fresh"));
    let (code, said) = on_a_terminal(&lab, &args, &["no-such-command".into()]);
    assert!(code == 127 && said.contains("command not found"), "{code} {said}");
    // An image of it, in the same way.
    std::fs::remove_file(lab.file("finish")).unwrap();
    let (code, said) = on_a_terminal(&lab, &["restore", "--detach", "j"], &[]);
    assert!(code == 0 && said.contains("job j runs in the background"), "{code} {said}");
    assert_eq!(ask(&lab, &["stop", "j"])["outcome"], "stopped");
    lab.assert_all_gone();
}

#[test]
fn a_service_that_has_completed_has_nothing_to_do_at_the_next_boot() {
    let Some(lab) = Lab::new() else { return };
    let socket = std::os::unix::net::UnixDatagram::bind(lab.file("notify")).unwrap();
    let start = || {
        let mut command = lab.command(["run", "--unless-completed", "--name", "j", "--", "sh", "-c", "echo once"]);
        let output = command.env("NOTIFY_SOCKET", lab.file("notify")).output().unwrap();
        let mut told = Vec::new();
        socket.set_nonblocking(true).unwrap();
        let mut buffer = [0; 4096];
        while let Ok(count) = socket.recv(&mut buffer) {
            told.push(String::from_utf8_lossy(&buffer[..count]).into_owned());
        }
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned(), told.concat())
    };
    let (code, said, told) = start();
    assert!(code == Some(0) && told.contains("READY=1"), "{said} {told}");
    let (code, said, told) = start();
    assert!(code == Some(0) && said.contains("completed at") && said.contains("nothing to do"), "{code:?} {said}");
    // Else systemd counts the unit as failed.
    assert!(told.contains("READY=1\nSTATUS=job j completed at") && !told.contains("STOPPING"), "{told}");
    assert_eq!(lab.output(), "once\n", "it ran once");
    // Who types the command wants it to run.
    let (_, said) = lab.run(["sh", "-c", "echo once"]).ends_with(2);
    assert!(said.contains("use --fresh"), "{said}");
}

#[test]
fn memory_of_a_dead_supervisor_is_found_from_any_store() {
    let Some(lab) = Lab::new() else { return };
    let other = lab.file("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let from_other = |args: &[&str]| {
        let output = lab.rekindle(&[args, &["--store", text(&other)]].concat());
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let die = || {
        let mut run = crate::kinds::until_after_snapshot(&lab, "plain");
        assert!(!from_other(&["status"]).contains("supervisor that is gone"), "it is in use");
        assert_eq!(from_other(&["prune", "--json", "--discard-memory"]), "[]\n");
        run.snapshot(&lab);
        lab.kill_9(run);
        assert_eq!(lab.mounted().len(), 1);
    };
    // Its images are in its store, too.
    die();
    let (code, _, said) = elsewhere(&lab, &["status", "j"]);
    assert!(code == 2 && said.contains(&format!("use --store {}", text(&lab.store()))), "{code} {said}");
    let status = String::from_utf8(lab.rekindle(&["status", "j"]).stdout).unwrap();
    assert!(status.contains("interrupted") && status.contains("`rekindle restore j`"), "{status}");
    let said = from_other(&["status"]);
    assert!(said.contains(&format!("job j in {}", lab.store().display())) && said.contains("rekindle prune"), "{said}");
    let doctor = lab.rekindle(&["doctor", "--store", text(&other)]);
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(doctor.contains("left-behind") && doctor.contains("a dead supervisor left"), "{doctor}");
    let plan: Value = serde_json::from_str(&from_other(&["prune", "--dry-run", "--json"])).unwrap();
    assert_eq!(
        (&plan[0]["job"], &plan[0]["image"], &plan[0]["action"]),
        (&"j".into(), &Value::Null, &"would remove".into())
    );
    assert!(plan[0]["frees"].as_u64() > Some(4096), "{plan}");
    assert_eq!(lab.mounted().len(), 1);
    assert!(from_other(&["prune"]).contains("removed") && lab.mounted().is_empty());
    assert_eq!(lab.good().len(), 2, "the images of the store stay");

    // The only copies, of a job whose folder is gone: they stay unless the user says so.
    std::fs::remove_dir_all(lab.store().join("j")).unwrap();
    die();
    std::fs::remove_dir_all(lab.store().join("j")).unwrap();
    let said = from_other(&["prune"]);
    assert!(said.contains("keep") && said.contains("is only there") && said.contains("--discard-memory"), "{said}");
    assert_eq!(lab.mounted().len(), 1);
    assert!(from_other(&["prune", "--discard-memory"]).contains("removed") && lab.mounted().is_empty());
    assert!(!from_other(&["status"]).contains("supervisor that is gone"));
}

#[test]
fn an_interrupt_while_a_detached_job_starts_is_meant_for_it() {
    let Some(lab) = Lab::new() else { return };
    // The job does not run before the hook has ended.
    let hook = lab.script("hook", &format!("touch {}; sleep 8", text(&lab.file("waits"))));
    let lab = lab.set("hooks.before-restore", &format!("[{hook:?}]"));
    let command = lab.python_command("kinds.py", &["plain", text(lab.path())]);
    let args = ["run", "--detach", "--name", "j", "--"];
    lab.run_with(&args, &command).ends_with(0);
    wait_for("it counts", || lab.output().contains("n 5\n"));
    assert!(lab.rekindle(&["stop", "j"]).status.success());
    let mut again = lab.run_with(&args, &command);
    again.wait_for("the hook runs", || lab.file("waits").exists());
    again.signal(nix::sys::signal::Signal::SIGINT);
    let (code, out, said) = again.finish(LIMIT);
    assert!(code == 143 && !out.contains("runs in the background"), "{code} {out} {said}");
    lab.assert_all_gone();
}
