//! Mistakes: what is typed, in which situation, what must be said, and the exit code.
//!
//! Each row is a line for a shell, run in a folder of its own. All rows are run, and every row that fails is printed.
//! A message must name the fix, in one or two sentences, and must not say its cause twice.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{LIMIT, Lab, comes};

/// What is typed, parts of what must be said, exit code.
type Row = (&'static str, &'static [&'static str], i32);

/// There is no store yet.
const ANEW: &[Row] = &[
    // Words of the command line.
    ("rekindle frobnicate", &["unknown command \"frobnicate\"", "`rekindle --help`"], 2),
    ("rekindle stauts", &["did you mean status?"], 2),
    ("rekindle config chek", &["did you mean check?"], 2),
    ("rekindle kill j", &["unknown command \"kill\"", "`rekindle stop JOB`"], 2),
    ("rekindle restart j", &["`rekindle rewind JOB -1`", "`rekindle run`"], 2),
    ("rekindle start j", &["`rekindle run --name JOB -- COMMAND`"], 2),
    ("rekindle delete j", &["`rekindle rm JOB`"], 2),
    ("rekindle attach j", &["`rekindle logs -f JOB`"], 2),
    ("rekindle version", &["`rekindle --version`"], 2),
    ("rekindle run --nmae x -- true", &["unknown option --nmae", "did you mean --name?"], 2),
    ("rekindle run --intervall 5m python train.py", &["did you mean --interval?"], 2),
    ("rekindle --sotre /x list", &["did you mean --store?"], 2),
    ("rekindle run --name", &["--name needs a value"], 2),
    ("rekindle show", &["missing <IMAGE>", "rekindle show <IMAGE>"], 2),
    ("rekindle tag j", &["missing <TAG>", "rekindle tag <IMAGE> <TAG>"], 2),
    ("rekindle doctor x", &["unexpected argument \"x\"", "`rekindle doctor --help`"], 2),
    ("rekindle completions tcsh", &["must be bash", "zsh"], 2),
    ("rekindle cuda lock", &["missing --pid <PID>"], 2),
    ("rekindle cuda lock --pid 0", &["--pid \"0\"", "from 1"], 2),
    // Values of flags.
    ("rekindle run --interval soon -- true", &["--interval \"soon\": must be", "\"10m\""], 2),
    ("rekindle run --interval 10 -- true", &["--interval \"10\": must be", "with a unit"], 2),
    ("rekindle run --interval -5s -- true", &["--interval \"-5s\": must not be negative"], 2),
    ("rekindle run --deadline -1h -- true", &["--deadline \"-1h\": must not be negative"], 2),
    ("rekindle logs -n -5 j", &["-n \"-5\": must not be negative"], 2),
    ("rekindle run --interval 1ms -- true", &["--interval \"1ms\": must be at least 100ms"], 2),
    ("rekindle run --grace 0s -- true", &["--grace \"0s\": must be at least 1s"], 2),
    ("rekindle run --name 'my job' -- true", &["--name \"my job\": must be 1 to 64 characters"], 2),
    ("rekindle run --name ../x -- true", &["--name \"../x\": must be"], 2),
    ("rekindle run --deadline tomorrow -- true", &["--deadline \"tomorrow\": must be", "\"8h\""], 2),
    ("rekindle run --deadline 2020-01-01T00:00:00Z -- true", &["--deadline", "has passed", "later"], 2),
    ("rekindle run --deadline 10s -- true", &["--deadline \"10s\"", "snapshot.grace"], 2),
    ("rekindle run --device-map 0 -- true", &["--device-map", "OLD=NEW"], 2),
    ("rekindle run --accept-unsigned -- true", &["--accept-unsigned needs store.encryption-key"], 2),
    ("rekindle run --accept-user nosuchuser -- true", &["--accept-user \"nosuchuser\"", "no such user"], 2),
    ("rekindle prune --keep-last 0", &["--keep-last \"0\": must be a whole number from 1"], 2),
    ("rekindle prune --keep-daily many", &["--keep-daily \"many\": must be a whole number"], 2),
    ("rekindle prune --keep-within 7", &["--keep-within \"7\": must be a duration with a unit"], 2),
    ("rekindle prune --max-total-size big", &["--max-total-size \"big\": must be", "unlimited"], 2),
    ("rekindle status --every often", &["--every \"often\": must be a duration"], 2),
    ("rekindle status --watch --every 1ms", &["--every \"1ms\": must be at least 100ms"], 2),
    ("rekindle status --every 5s", &["missing --watch"], 2),
    ("rekindle cuda lock --pid 1 --timeout 10x", &["--timeout \"10x\": must be a duration with a unit"], 2),
    ("rekindle cuda lock --pid 1 --timeout 0", &["--timeout \"0\": must be from 1ms"], 2),
    ("rekindle report j --since 2999-01-01", &["--since \"2999-01-01\": must not be in the future"], 2),
    ("rekindle verify --read-data-subset 0%", &["--read-data-subset \"0%\": must be", "100%"], 2),
    ("rekindle verify --read-data --read-data-subset 5%", &["cannot be used with"], 2),
    ("rekindle report j --since yesterday", &["--since \"yesterday\": must be", "24h"], 2),
    ("rekindle snapshot j --tag latest", &["--tag: \"latest\" is not a tag"], 2),
    ("rekindle logs -n few j", &["--lines \"few\": must be a whole number"], 2),
    ("rekindle run --fresh --unless-completed -- true", &["cannot be used with", "leave one of them out"], 2),
    // The command.
    ("rekindle run", &["no command to run", "--"], 2),
    ("rekindle run --name j", &["no command to run", "job.command"], 2),
    ("rekindle run --name j --", &["no command to run"], 2),
    ("rekindle run -- no-such-program", &["command not found: no-such-program"], 127),
    ("rekindle run -- ./no/such/program", &["command not found: ./no/such/program"], 127),
    // Set for the libraries of a job, it must not hide what rekindle says.
    (
        "RUST_LOG=polars=debug REKINDLE_LOG_FORMAT=json rekindle run -- no-such-program",
        &["command not found: no-such-program"],
        127,
    ),
    ("rekindle run -- --lr 1", &["command not found: --lr"], 127),
    ("rekindle run -- /etc", &["cannot execute /etc", "directory"], 126),
    ("rekindle run -- /etc/passwd", &["/etc/passwd", "execute permission", "chmod +x"], 126),
    // CRIU.
    ("REKINDLE_CRIU=/nowhere/criu rekindle run -- true", &["/nowhere/criu", "REKINDLE_CRIU"], 69),
    ("cd bin; REKINDLE_CRIU=../none/criu rekindle run -- true", &["/none/criu)", "REKINDLE_CRIU"], 69),
    ("REKINDLE_CRIU=$PWD/old-criu rekindle run -- true", &["3.17.1", "or newer"], 69),
    ("REKINDLE_CRIU=$PWD/no-criu rekindle run -- true", &["hello"], 69),
    // The store.
    ("rekindle --store $PWD/none list", &["there is no store at", "`rekindle run` creates one"], 2),
    ("rekindle show j", &["there is no store at"], 2),
    ("rekindle restore j", &["there is no store at"], 2),
    ("rekindle --store $PWD/file list", &["is not a folder", "--store"], 2),
    ("rekindle run --store $PWD/file -- true", &["is not a folder", "--store"], 2),
    ("REKINDLE_STORE_DIRECTORY=$PWD/file rekindle run -- true", &["is not a folder"], 78),
    ("rekindle --store $PWD/open list", &["can be written by others", "chmod"], 78),
    ("rekindle --store $PWD/theirs run -- true", &["belongs to user 65534", "chown"], 78),
    ("rekindle --store /proc/rekindle run -- true", &["cannot create the store /proc/rekindle", "--store"], 125),
    ("rekindle --store '' list", &["--store"], 2),
    // The configuration.
    ("rekindle --config /nowhere list", &["cannot read the configuration /nowhere"], 78),
    ("rekindle --config $PWD list", &["not a regular file", "TOML"], 78),
    (
        "rekindle config check key.toml",
        &["key.toml:3: unknown key store.keep-lats", "did you mean store.keep-last?"],
        78,
    ),
    ("rekindle config check table.toml", &["table.toml:2: unknown table [stoer]", "did you mean [store]?"], 78),
    ("rekindle config check section.toml", &["did you mean snapshot.interval?"], 78),
    ("rekindle config check type.toml", &["type.toml:3: store.keep-last = \"three\": must be a whole number"], 78),
    ("rekindle config check none.toml", &["there is no file none.toml"], 2),
    ("rekindle config check version.toml", &["version is missing", "version = 1"], 78),
    ("rekindle config check toml.toml", &["toml.toml:2: not valid TOML"], 78),
    ("rekindle config check open.toml", &["others can write", "chmod go-w"], 78),
    ("rekindle --config type.toml status", &["store.keep-last = \"three\""], 78),
    // Variables.
    ("REKINDLE_STORE_PTH=/x rekindle list", &["unknown variable REKINDLE_STORE_PTH"], 78),
    ("REKINDLE_STROE_DIRECTORY=/x rekindle run -- true", &["did you mean REKINDLE_STORE_DIRECTORY?"], 78),
    ("REKINDLE_STORE_KEEP_LAST=few rekindle status", &["REKINDLE_STORE_KEEP_LAST", "must be a whole number"], 78),
    ("REKINDLE_INTERVAL=5m rekindle config check", &["did you mean REKINDLE_SNAPSHOT_INTERVAL?"], 0),
    ("REKINDLE_JOB_USER=nosuchuser rekindle run -- true", &["job.user", "no such user"], 78),
    ("REKINDLE_JOB_DIRECTORY=/nowhere rekindle run -- true", &["job.directory", "/nowhere"], 2),
    ("REKINDLE_JOB_STDIN=/nowhere rekindle run -- true", &["job.stdin", "/nowhere"], 2),
    // Answers for programs.
    ("rekindle --json --store $PWD/none list", &["{\"code\":2,\"error\":\"there is no store at"], 2),
    ("REKINDLE_INTERVAL=5m rekindle config show --json", &["{\"warning\":\"the variable REKINDLE_INTERVAL"], 0),
    ("rekindle show -1", &["-1 needs a job", "JOB/-1"], 2),
    ("rekindle list --json --nmae", &["{\"code\":2,\"error\":\"unknown option --nmae"], 2),
    // No process has this id, wherever there is a driver.
    ("rekindle cuda state --json --pid 2147483647", &["{\"code\":2,\"error\":\"there is no process 2147483647"], 2),
];

/// The job `train` is completed and has the images 1 to 3; nothing runs.
const COMPLETED: &[Row] = &[
    ("rekindle list trian", &["there is no job \"trian\"", "did you mean train?"], 2),
    ("rekindle show xyz", &["there is no job \"xyz\"", "jobs are train"], 2),
    ("rekindle restore trian", &["did you mean train?"], 2),
    ("rekindle status trian", &["did you mean train?"], 2),
    ("rekindle logs trian", &["did you mean train?"], 2),
    ("rekindle prune trian", &["did you mean train?"], 2),
    ("rekindle verify xyz", &["jobs are train"], 2),
    ("rekindle report 'my job'", &["\"my job\" is not a job name"], 2),
    ("rekindle stop ../train", &["\"../train\" is not a job name"], 2),
    ("rekindle snapshot train", &["job train is not running: it completed at", "`rekindle run --fresh`"], 2),
    ("rekindle suspend train", &["job train is not running"], 2),
    ("rekindle resume train", &["job train is not running"], 2),
    ("rekindle stop train", &["job train is not running"], 2),
    ("rekindle rewind train -1", &["job train is not running"], 2),
    ("rekindle stop train/-1", &["\"train/-1\" is an image", "write train"], 2),
    ("rekindle list train/1", &["\"train/1\" is an image"], 2),
    ("rekindle rm train/-1", &["\"train/-1\" is an image"], 2),
    ("rekindle show 2", &["there is no job \"2\"", "JOB/2"], 2),
    ("rekindle tag --remove train best", &["has no tag best: it has none"], 2),
    ("rekindle tag train good >/dev/null; rekindle tag --remove train best", &["its tags are good"], 2),
    ("rekindle rewind train", &["to which image?", "`rekindle rewind train -2`", "`rekindle list train`"], 2),
    ("rekindle show train/7", &["job \"train\" has no image \"7\"", "images are 000003-"], 2),
    ("rekindle show train/-4", &["has no image -4", "-1 (the newest) to -3"], 2),
    ("rekindle restore train/-9", &["has no image -9", "-1 (the newest) to -3"], 2),
    ("rekindle pin train/best", &["has no image \"best\"", "images are"], 2),
    ("rekindle verify train/0000", &["matches several images", "they are 000003-"], 2),
    ("rekindle mark --good train/x", &["has no image \"x\""], 2),
    ("rekindle tag train 7", &["\"7\" is not a tag"], 2),
    ("rekindle verify train/1 --read-data-subset 5%", &["give a job"], 2),
    ("rekindle list train --replica", &["there is no replica", "replica.url"], 2),
    ("rekindle logs --json train", &["remove --json"], 2),
    ("rekindle report train --out /nowhere/x.html", &["cannot write /nowhere/x.html", "--out"], 2),
    ("rekindle report train --out .", &["is a folder", "file name"], 2),
    ("rekindle list --replica", &["missing <JOB>"], 2),
    ("rekindle show train/7 --json", &["{\"code\":2,\"error\":\"job \\\"train\\\" has no image"], 2),
];

/// The job `j` runs and has the images 1 and 2.
const RUNNING: &[Row] = &[
    (
        "rekindle run --name j -- true",
        &["is supervised by", "`rekindle logs -f j`", "`rekindle stop j`", "another --name"],
        69,
    ),
    ("rekindle restore j", &["is supervised by", "`rekindle stop j`"], 69),
    ("rekindle prune j", &["is supervised by", "--dry-run"], 2),
    ("rekindle prune", &["job j is running, and its supervisor prunes"], 0),
    ("rekindle repair j", &["is supervised by", "--dry-run"], 2),
    ("rekindle resume j", &["not suspended"], 2),
    ("rekindle rewind j 7", &["has no image \"7\"", "images are 000002-"], 2),
    ("rekindle rewind j -3", &["has no image -3", "-1 (the newest) to -2"], 2),
    ("rekindle rewind j/-3", &["has no image -3"], 2),
    ("rekindle rewind j/1 -2", &["names an image already"], 2),
    ("rekindle rewind j best", &["has no image \"best\""], 2),
    ("rekindle rewind j -x", &["has no image \"-x\""], 2),
    ("rekindle snapshot jj", &["there is no job \"jj\"", "did you mean j?"], 2),
];

/// The job `j` was given up and has no image.
const GIVEN_UP: &[Row] = &[
    ("rekindle restore j", &["job j has no image: it was given up at", "The same `rekindle run`"], 2),
    ("rekindle stop j", &["job j is not running: it was given up at"], 2),
    ("rekindle show j", &["has no image"], 2),
    ("rekindle verify j", &[], 0),
    ("rekindle repair j", &[], 0),
    ("rekindle prune j", &[], 0),
];

/// Another user has started the job `j`.
const OF_ANOTHER: &[Row] = &[
    ("rekindle status", &["Permission denied", "Use sudo"], 69),
    ("rekindle status j", &["Permission denied", "Use sudo"], 69),
    ("rekindle list", &["Permission denied", "Use sudo"], 69),
    ("rekindle logs j", &["Permission denied", "Use sudo"], 69),
    ("rekindle stop j", &["Permission denied", "Use sudo"], 69),
    ("rekindle run -- true", &["this needs root", "sudo \"$(command -v rekindle)\""], 69),
];

/// Runs all rows, and fails with those that say something else.
fn try_all(lab: &Lab, rows: &[Row]) {
    let path = format!("{}:{}", link_program(lab).display(), std::env::var("PATH").unwrap());
    let wrong: Vec<String> = rows.iter().filter_map(|row| try_one(lab, &path, row).err()).collect();
    assert!(wrong.is_empty(), "{} of {} rows:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
}

/// The folder of the program, for `PATH`.
fn link_program(lab: &Lab) -> std::path::PathBuf {
    let bin = lab.file("bin");
    if !bin.exists() {
        fs::create_dir(&bin).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rekindle"), bin.join("rekindle")).unwrap();
    }
    bin
}

fn try_one(lab: &Lab, path: &str, &(typed, parts, code): &Row) -> Result<(), String> {
    let mut shell = Command::new("timeout");
    shell.args(["20", "sh", "-c", typed]).current_dir(lab.path()).env("PATH", path).envs(lab.variables());
    shell.env("REKINDLE_CONTROL_DIRECTORY", lab.file("control")).env("REKINDLE_TEST_SEEN_DIRECTORY", lab.file("seen"));
    let done = shell.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    let report = |why: String| Err(format!("$ {typed}\n{}  => {:?}: {why}", said, done.status.code()));
    if done.status.code() != Some(code) {
        return report(format!("the code must be {code}"));
    }
    if let Some(part) = parts.iter().find(|part| !said.contains(*part)) {
        return report(format!("it does not say {part:?}"));
    }
    match sloppy(&said) {
        Some(why) => report(why),
        None => Ok(()),
    }
}

/// What no message of ours may have: types of Rust, more than a few lines, or a cause twice.
fn sloppy(said: &str) -> Option<String> {
    let rust =
        ["(os error", "Some(", "Err(", "None,", "PathBuf", "ParseIntError", "..=", "expected number at", "panicked"];
    if let Some(word) = rust.iter().find(|word| said.contains(**word)) {
        return Some(format!("{word:?} is for programmers"));
    }
    if said.lines().count() > 3 {
        return Some("it has too many lines".to_owned());
    }
    let clauses: Vec<&str> = said.trim().split([':', ';', '\n']).map(str::trim).filter(|it| it.len() > 15).collect();
    let twice = clauses.iter().enumerate().find(|(n, clause)| clauses.iter().take(*n).any(|other| other == *clause));
    twice.map(|(_, clause)| format!("it says {clause:?} twice"))
}

/// Files that the rows name.
fn make_files(lab: &Lab) {
    link_program(lab);
    fs::write(lab.file("file"), "x").unwrap();
    for (name, mode, owner) in [("open", 0o777, None), ("theirs", 0o700, Some(65534))] {
        fs::create_dir(lab.file(name)).unwrap();
        fs::set_permissions(lab.file(name), fs::Permissions::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(lab.file(name), owner, owner).unwrap();
    }
    for (name, text) in [
        ("key.toml", "version = 1\n[store]\nkeep-lats = 3\n"),
        ("table.toml", "version = 1\n[stoer]\nkeep-last = 3\n"),
        ("section.toml", "version = 1\ninterval = \"5m\"\n"),
        ("type.toml", "version = 1\n[store]\nkeep-last = \"three\"\n"),
        ("version.toml", "[store]\nkeep-last = 3\n"),
        ("toml.toml", "version = 1\n[store\n"),
        ("open.toml", "version = 1\n"),
    ] {
        fs::write(lab.file(name), text).unwrap();
        let mode = if name == "open.toml" { 0o666 } else { 0o600 };
        fs::set_permissions(lab.file(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    lab.script("old-criu", "echo Version: 3.17.1");
    lab.script("no-criu", "echo hello");
}

#[test]
fn before_there_is_a_store() {
    let Some(lab) = Lab::new() else { return };
    make_files(&lab);
    try_all(&lab, ANEW);
    assert!(!Path::new(&lab.store()).exists(), "no mistake leaves a store behind");
}

#[test]
fn with_a_completed_job() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    run.snapshot(&lab);
    run.snapshot(&lab);
    finish(&lab, run);
    fs::rename(lab.store().join("j"), lab.store().join("train")).unwrap();
    try_all(&lab, COMPLETED);
}

#[test]
fn with_a_running_job() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    run.snapshot(&lab);
    try_all(&lab, RUNNING);
    assert!(comes(LIMIT, || lab.published().is_some_and(|now| now.state.as_str() == "running")));
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

#[test]
fn with_a_job_that_was_given_up() {
    let Some(lab) = Lab::new() else { return };
    let (_, said) = lab.run(["sh", "-c", "echo no >&2; exit 3"]).ends_with(3);
    assert!(said.contains("starting again from the beginning in "), "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.contains("given up: ") && last.contains("`rekindle logs --stderr j`"), "{said}");
    try_all(&lab, GIVEN_UP);
    for command in ["list", "verify", "repair", "prune"] {
        let done = lab.rekindle(&[command, "j"]);
        assert_eq!(String::from_utf8(done.stdout).unwrap(), "job j has no images\n", "{command}");
    }
    let status = String::from_utf8(lab.rekindle(&["status", "j"]).stdout).unwrap();
    let store = lab.store().display().to_string();
    assert!(status.contains(&store) && status.contains("The same `rekindle run` starts it"), "{status}");
}

#[test]
fn with_a_job_of_another_user() {
    let Some(lab) = Lab::new() else { return };
    lab.run(["true"]).ends_with(0);
    lab.install(env!("CARGO_BIN_EXE_rekindle").as_ref(), &lab.file("rekindle"));
    fs::create_dir(lab.file("bin")).unwrap();
    let text = format!("HOME=/ exec setpriv --reuid 65534 --clear-groups {} \"$@\"", lab.file("rekindle").display());
    lab.script("bin/rekindle", &text);
    try_all(&lab, OF_ANOTHER);
}

/// Each command reads the configuration before it does anything.
#[test]
fn every_command_names_an_unknown_variable_once() {
    let Some(lab) = Lab::new() else { return };
    for command in [
        "run -- true",
        "restore j",
        "status",
        "snapshot j",
        "suspend j",
        "resume j",
        "rewind j -1",
        "stop j",
        "logs j",
        "list",
        "list j",
        "show j",
        "report j",
        "verify",
        "repair",
        "prune",
        "pin j",
        "pin --remove j",
        "tag j x",
        "tag --remove j x",
        "mark --good j/1",
        "doctor",
        "config show",
        "config check",
    ] {
        for (variable, code) in [("REKINDLE_STORE_PTH", Some(78)), ("REKINDLE_INTERVAL", None)] {
            let mut rekindle = lab.command(command.split(' '));
            // Without a store or CRIU no command gets far.
            rekindle.env(variable, "x").env("REKINDLE_CRIU", "/nowhere");
            let done = rekindle.output().unwrap();
            let said = String::from_utf8_lossy(&done.stderr);
            assert_eq!(said.matches(variable).count(), 1, "{command}: {said}");
            assert!(code.is_none() || done.status.code() == code, "{command}: {:?} {said}", done.status);
        }
    }
    assert!(!lab.store().exists());
}

#[test]
fn there_are_enough_rows() {
    assert!(ANEW.len() + COMPLETED.len() + RUNNING.len() >= 60);
}
