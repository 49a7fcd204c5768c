//! A job's user who changes everything that can be changed, at random moments, while the job is restored.
//!
//! Each round restores the same image with another seed. Whatever the user does: nothing of root's changes owner, mode
//! or content, and the restore succeeds or says why not. `REKINDLE_SWEEP=1000` runs so many rounds,
//! `REKINDLE_SWEEP_SEED=N` begins with that seed; a failing one is printed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::unistd::User;

use crate::supervisor::{Lab, comes, job_file, python, tail};

/// The files that may not change, by path, with the attributes and the hash that are compared.
pub(crate) type Seen = BTreeMap<PathBuf, (u32, u32, u32, u64, blake3::Hash)>;

pub(crate) fn look(path: &Path, seen: &mut Seen) {
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    let content = match metadata.is_file() {
        true => blake3::hash(&fs::read(path).unwrap()),
        false if metadata.is_symlink() => blake3::hash(fs::read_link(path).unwrap().as_os_str().as_bytes()),
        false => blake3::hash(b""),
    };
    seen.insert(path.into(), (metadata.uid(), metadata.gid(), metadata.mode(), metadata.ino(), content));
    if metadata.is_dir() {
        fs::read_dir(path).unwrap().flatten().for_each(|entry| look(&entry.path(), seen));
    }
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A folder of root's with the names of the job's things in it.
fn make_roots(folder: &Path) {
    fs::create_dir(folder).unwrap();
    for name in ["secret", "log", "data", "first", "second", "ghost", "mapped"] {
        fs::write(folder.join(name), format!("root's {name}")).unwrap();
        mode(&folder.join(name), 0o600);
    }
    drop(std::os::unix::net::UnixListener::bind(folder.join("daemon.sock")).unwrap());
    mode(&folder.join("daemon.sock"), 0o600);
    fs::create_dir_all(folder.join("deep/further")).unwrap();
    mode(&folder.join("deep"), 0o700);
    mode(folder, 0o755);
}

pub(crate) fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(done.success());
}

/// A number from the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Enough to meet each change several times; a thousand take minutes.
const ROUNDS: u64 = 40;
/// How long a round may take: CRIU is given less to restore.
const ROUND: Duration = Duration::from_secs(60);

#[test]
fn whatever_the_user_changes_nothing_of_roots_does() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
    let lab = lab.set("snapshot.staging", "\"store\"").set("restart.max-restarts", "1");
    let lab = lab.set("restart.restore-timeout", "\"10s\"");
    let nobody = User::from_name("nobody").unwrap().unwrap();
    let (theirs, others) = (lab.file("theirs"), lab.file("others"));
    fs::create_dir(&theirs).unwrap();
    nix::unistd::chown(&theirs, Some(nobody.uid), Some(nobody.gid)).unwrap();
    make_roots(&others);
    let all = ["socket", "ghost", "hardlink", "log", "data", "mapped", "cwd"];
    let mut arguments = vec![theirs.to_str().unwrap()];
    arguments.extend(all);
    let command = lab.python_command("bound_job.py", &arguments);
    let mut run = lab.run(&command);
    run.wait_printed("ready");
    run.snapshot(&lab);
    lab.kill_9(run);
    make_roots(&theirs.join("root"));
    let (store, pristine, untouched) = (lab.store(), lab.file("pristine"), lab.file("untouched"));
    copy(&store, &pristine);
    copy(&theirs, &untouched);

    let before = || {
        let mut seen = Seen::new();
        look(&others, &mut seen);
        for path in ["/etc/passwd", "/etc/shadow", "/etc/hosts", "/etc/cron.d", "/dev/null"] {
            look(Path::new(path), &mut seen);
        }
        // Root's folder within the user's may be renamed as a whole, and nothing in it may change.
        for entry in fs::read_dir(&theirs).unwrap().flatten() {
            let metadata = entry.path().symlink_metadata().unwrap();
            if metadata.uid() == 0 {
                let mut within = Seen::new();
                look(&entry.path(), &mut within);
                let inside = |path: &Path| path.strip_prefix(entry.path()).unwrap().to_path_buf();
                seen.extend(within.into_iter().map(|(path, what)| (Path::new("root").join(inside(&path)), what)));
            }
        }
        seen
    };
    let first = number("REKINDLE_SWEEP_SEED").unwrap_or_else(|| u64::from(std::process::id()) * 1_000_000);
    let (mut restored, mut reasons) = (0, BTreeMap::<String, u32>::new());
    let rounds = number("REKINDLE_SWEEP").unwrap_or(ROUNDS);
    for seed in first..first + rounds {
        for (from, to) in [(&pristine, &store), (&untouched, &theirs)] {
            fs::remove_dir_all(to).unwrap();
            copy(from, to);
        }
        let expected = before();
        let mut mutate = Command::new(python().unwrap());
        mutate.arg("-S").arg(job_file("mutate.py")).args([&theirs, &others]).args([&seed.to_string(), "1.5"]);
        mutate.uid(nobody.uid.as_raw()).gid(nobody.gid.as_raw()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mutating = mutate.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(seed % 4 * 60));
        let began = Instant::now();
        let mut run = lab.run(&command);
        let said = run.said_so_far();
        let is_over = comes(ROUND, || said().contains("the job was restored from image") || !run.runs());
        let changes = String::from_utf8(mutating.wait_with_output().unwrap().stdout).unwrap();
        let shown = || format!("seed {seed}, after {:?}\n{changes}\n{}", began.elapsed(), tail(&said()));
        assert!(is_over, "neither restored nor given up: {}", shown());
        if said().contains("the job was restored from image") {
            restored += 1;
        } else {
            let why = said().lines().find_map(|line| Some(line.split_once(" ERROR ")?.1.to_owned()));
            let why = why.unwrap_or_else(|| panic!("it does not say why: {}", shown()));
            assert!(!why.contains("gave no reason"), "{}", shown());
            *reasons.entry(why.split_once(": ").map_or_else(|| why.clone(), |(_, why)| why.to_owned())).or_default() +=
                1;
        }
        run.kill_9();
        lab.assert_all_gone();
        let now = before();
        let changed: Vec<_> = expected.iter().filter(|(path, what)| now.get(*path) != Some(what)).collect();
        let new: Vec<_> = now.keys().filter(|path| !expected.contains_key(*path)).collect();
        assert!(changed.is_empty() && new.is_empty(), "changed {changed:#?}, new {new:#?}: {}", shown());
    }
    eprintln!("{restored} of {rounds} restored; the others: {reasons:#?}");
    fs::remove_dir_all(&theirs).unwrap();
}
