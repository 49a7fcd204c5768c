//! A job of another user: it gains nothing from a supervisor that is root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::launch::{end, look, run_look};
use crate::kinds::count_on;
use crate::supervisor::Lab;

#[test]
fn a_user_has_no_rights_over_its_supervisor() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("job.no-new-privileges", "true");
    let lab = lab.set("restart.cold-start", "\"never\"").with_limits_of_others(true);
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
    run.snapshot(&lab);
    lab.kill_9(run);

    // Back from the image, it is the same user with the same rights.
    let lab = lab.with_limits_of_others(false);
    let mut run = run_look(&lab);
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
    run.wait_said("the job is back from image");
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

/// CRIU opens a job's files as root, by their path. What the user puts there after the snapshot must not come in.
#[test]
fn a_restore_opens_nothing_that_the_user_may_not() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
    let lab = lab.with_limits_of_others(true);
    let (theirs, secret) = (lab.file("theirs"), lab.file("secret"));
    fs::create_dir(&theirs).unwrap();
    let data = theirs.join("data");
    // Of one size, which is what CRIU compares.
    fs::write(&data, "16 bytes of data").unwrap();
    fs::write(&secret, "16 bytes, hidden").unwrap();
    // And of one mode, which is the user's choice.
    for path in [&data, &secret] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    for path in [&theirs, &data] {
        nix::unistd::chown(path, Some(nobody.uid), Some(nobody.gid)).unwrap();
    }
    let text = format!("exec 3<{}\necho ready\nwhile :; do sleep 0.05; done", data.display());
    let script = lab.script("job", &text);
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.snapshot(&lab);
    lab.kill_9(run);
    fs::remove_file(&data).unwrap();
    std::os::unix::fs::symlink(&secret, &data).unwrap();
    let lab = lab.with_limits_of_others(false);
    let (_, said) = lab.run([script.as_os_str()]).ends_with(125);
    assert!(said.contains("user nobody may not open it") && said.contains("secret"), "{said}");
    assert!(lab.good().is_empty(), "{said}");
    lab.assert_all_gone();
}

/// Jobs of many kinds as another user: CRIU restores them with that user's rights over files.
fn comes_back_as_nobody(job: &str, kind: &str) {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"").with_limits_of_others(true);
    // The job's names in /dev/shm are made from it.
    let theirs = lab.file(&lab.path().file_name().unwrap().to_string_lossy());
    fs::create_dir(&theirs).unwrap();
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    nix::unistd::chown(&theirs, Some(nobody.uid), Some(nobody.gid)).unwrap();
    let command = lab.python_command(job, &[kind, theirs.to_str().unwrap()]);
    let mut run = lab.run(&command);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    lab.kill_9(run);
    let lab = lab.with_limits_of_others(false);
    let mut run = lab.run(&command);
    run.wait_said("the job is back from image");
    count_on(&lab, &mut run, 5);
    fs::write(theirs.join("finish"), "").unwrap();
    let (code, _, said) = run.finish(std::time::Duration::from_secs(120));
    assert_eq!(code, 0, "{said}");
    assert!(lab.output().ends_with("done\n"), "{}\n{said}", lab.output());
}

macro_rules! kinds_of_nobody {
    ($($name:ident: $job:literal $kind:literal,)*) => {
        $(#[test] fn $name() { comes_back_as_nobody($job, $kind); })*
    };
}

kinds_of_nobody! {
    threads_of_a_user: "kinds.py" "threads",
    a_connection_of_a_user: "kinds.py" "tcp-within",
    a_deleted_file_of_a_user: "kinds.py" "ghost",
    forks_of_a_user: "kinds.py" "forks",
    a_file_that_lost_one_of_its_names_of_a_user: "kinds.py" "link-remap",
    a_terminal_of_a_user: "trees.py" "terminal",
    locks_fifos_and_watches_of_a_user: "kinds.py" "mixed",
    shared_memory_of_a_user: "kinds.py" "shared",
    system_v_of_a_user: "trees.py" "system-v",
    memory_of_a_user_that_has_no_name: "trees.py" "shared-without-name",
    semaphores_of_a_user: "trees.py" "named-semaphores",
    pipes_of_a_user: "kinds.py" "pipes",
}
