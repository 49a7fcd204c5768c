//! Where the configuration is read from when no file is named.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use rekindle_testing::root;

fn write(path: &Path, interval: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("version = 1\n[snapshot]\ninterval = \"{interval}\"\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
}

/// The interval and its source, and what was said.
fn shown(home: &Path, directory: &Path) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    let command =
        command.args(["config", "show"]).current_dir(directory).env("HOME", home).env_remove("XDG_CONFIG_HOME");
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.trim_start().starts_with("snapshot.interval ")).unwrap();
    (line.split_whitespace().collect::<Vec<_>>().join(" "), said)
}

#[test]
fn the_users_file_and_that_of_the_working_directory_are_read_unless_others_could_have_written_them() {
    if !root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (home, project) = (folder.path().join("home"), folder.path().join("project"));
    fs::create_dir_all(&project).unwrap();
    assert_eq!(shown(&home, &project).0, "snapshot.interval \"10m\" default");
    let users = home.join(".config/rekindle/rekindle.toml");
    write(&users, "20m");
    assert_eq!(shown(&home, &project).0, format!("snapshot.interval \"20m\" {}:3", users.display()));
    let own = project.join("rekindle.toml");
    write(&own, "30m");
    assert_eq!(shown(&home, &project).0, "snapshot.interval \"30m\" rekindle.toml:3");

    // Somebody else leaves a file where root will be: it is neither followed nor does it stop root.
    chown(&own, Some(12345), None).unwrap();
    let (line, said) = shown(&home, &project);
    assert!(line.starts_with("snapshot.interval \"20m\" "), "{line}");
    assert!(said.contains("rekindle.toml is ignored: ") && said.contains("belongs to user 12345"), "{said}");
    chown(&own, Some(0), None).unwrap();
    fs::set_permissions(&project, fs::Permissions::from_mode(0o777)).unwrap();
    let (line, said) = shown(&home, &project);
    assert!(line.starts_with("snapshot.interval \"20m\" ") && said.contains("others can write"), "{line} {said}");
}

/// What a command answers in this folder, called by sudo for `daemon`.
fn by_sudo(directory: &Path, line: &str) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    command.args(line.split(' ')).current_dir(directory).env("HOME", "/nowhere").env_remove("XDG_CONFIG_HOME");
    let store = directory.join("store");
    command
        .env("SUDO_UID", "1")
        .env("SUDO_GID", "1")
        .env("SUDO_USER", "daemon")
        .env("REKINDLE_STORE_DIRECTORY", &store);
    let output = command.output().unwrap();
    assert!(!store.exists(), "{line} must not begin");
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// The file may say as which user the job runs.
#[test]
fn a_job_does_not_start_without_what_a_file_says_that_is_not_trusted() {
    if !root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let project = folder.path();
    let own = project.join("rekindle.toml");
    write(&own, "30m");
    for path in [&own, project] {
        chown(path, Some(1), Some(1)).unwrap();
    }
    for (owner, way) in
        [(1, "To use it: --config rekindle.toml"), (12345, "chown -h root rekindle.toml. To use another")]
    {
        chown(&own, Some(owner), None).unwrap();
        for line in ["run -- true", "run --detach -- true", "restore j", "config check"] {
            let (code, said) = by_sudo(project, line);
            assert!(
                code == 78 && said.contains(way) && said.contains("does not start without"),
                "{line}: {code} {said}"
            );
        }
        // Commands that only look go on.
        let (code, said) = by_sudo(project, "status");
        assert!(code == 0 && said.contains("rekindle.toml is ignored: ") && said.contains(way), "{code} {said}");
        let named = by_sudo(project, "--config rekindle.toml config check").0;
        assert_eq!(named, if owner == 1 { 0 } else { 78 }, "the caller may name their own file, and no one else's");
    }
    chown(&own, Some(1), None).unwrap();
    // With umask 002: the group has only that user in it.
    for (mode, group, expected) in [(0o664, 1, 0), (0o664, 2, 78), (0o664, 0, 78), (0o666, 1, 78)] {
        chown(&own, None, Some(group)).unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(mode)).unwrap();
        let (code, said) = by_sudo(project, "config check rekindle.toml");
        assert_eq!(code, expected, "{mode:o} {group}: {said}");
    }
}

/// A home on a file system that gives root no rights (NFS with root_squash): root without those rights stands in for it.
#[test]
fn a_user_runs_jobs_in_a_home_that_root_cannot_enter() {
    let Some(criu) = rekindle_testing::criu().filter(|_| root()) else { return };
    let lab = tempfile::tempdir().unwrap();
    let (home, stores) = (lab.path().join("home"), lab.path().join("stores"));
    fs::set_permissions(lab.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(&home).unwrap();
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    for (name, text, mode) in [("job", "#!/bin/sh\npwd; id -u; cat\n", 0o700), ("in", "input\n", 0o600)] {
        rekindle_testing::program(&home.join(name), text);
        fs::set_permissions(home.join(name), fs::Permissions::from_mode(mode)).unwrap();
        chown(home.join(name), Some(nobody.uid.as_raw()), None).unwrap();
    }
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
    chown(&home, Some(nobody.uid.as_raw()), None).unwrap();
    let without = "-dac_override,-dac_read_search";
    let run = |name: &str, from: &Path, settings: &[(&str, &Path)], command: &str| {
        let mut line = Command::new("setpriv");
        line.args(["--bounding-set", without, "--inh-caps", without, "--", env!("CARGO_BIN_EXE_rekindle")]);
        line.args(["run", "--name", name, "--", command]).current_dir(from).env("REKINDLE_CRIU_PATH", &criu);
        line.env("HOME", "/nowhere").env_remove("XDG_CONFIG_HOME").env("REKINDLE_JOB_USER", "nobody");
        line.env("REKINDLE_STORE_DIRECTORY", &stores).env("REKINDLE_STORE_MIN_FREE", "1MiB");
        line.env("REKINDLE_CONTROL_DIRECTORY", lab.path().join("control")).env("REKINDLE_SNAPSHOT_STAGING", "store");
        line.envs(settings.iter().copied());
        let done = line.output().unwrap();
        assert!(done.status.success(), "{name}: {}", String::from_utf8_lossy(&done.stderr));
        fs::read_to_string(stores.join(name).join("log/stdout.log")).unwrap()
    };
    let (at, uid) = (home.display(), nobody.uid);
    assert_eq!(run("a", &home, &[], "./job"), format!("{at}\n{uid}\n"));
    let input = home.join("in");
    let settings = [("REKINDLE_JOB_DIRECTORY", &*home), ("REKINDLE_JOB_STDIN", &input)];
    assert_eq!(run("b", lab.path(), &settings, "./job"), format!("{at}\n{uid}\ninput\n"));
}
