//! A job of another user: it gains nothing from a supervisor that is root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use rekindle_store::persist::Progress;
use rekindle_store::unpack::unpack;
use rekindle_store::{BadWhy, Image, Manifest, State};

use crate::kinds::count_on;
use crate::launch::{end, look, run_look};
use crate::supervisor::{Lab, kill};

#[test]
fn a_user_has_no_rights_over_its_supervisor() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("job.no-new-privileges", "true");
    let lab = lab.set("restart.cold-start", "\"never\"");
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
        // The supervisor replaces some just then.
        let Ok(metadata) = fs::symlink_metadata(&entry) else { continue };
        let mode = std::os::unix::fs::MetadataExt::mode(&metadata);
        assert!(mode & 0o077 == 0 || !below_closed(&entry, &lab.store()), "{} has mode {mode:o}", entry.display());
    }
    run.wait_said("the job was restored from image");
    end(&lab, run);
}

#[test]
fn the_rights_of_the_deployment_templates_are_enough() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").with_only(&rights_of_the_template().join(","));
    let (mut run, _) = look(&lab);
    run.snapshot(&lab);
    run.crash(&lab);
    run.wait_said("the job was restored from image");
    end(&lab, run);
}

/// The file is looked at when rekindle starts, and opened each time the job starts from the beginning.
#[test]
fn standard_input_gives_a_user_no_file_of_root() {
    let Some(lab) = Lab::new() else { return };
    let (folder, secret) = (lab.file("theirs"), lab.file("secret"));
    fs::create_dir(&folder).unwrap();
    for (file, text) in [(&secret, "of root"), (&folder.join("unreadable"), "of root"), (&folder.join("in"), "theirs")]
    {
        fs::write(file, text).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
    }
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    for theirs in [&folder, &folder.join("in")] {
        nix::unistd::chown(theirs, Some(nobody.uid), Some(nobody.gid)).unwrap();
    }
    let lab = lab.set("job.user", "\"nobody\"").set_file("job.directory", "theirs").set("restart.max-restarts", "3");
    let lab = lab.set_file("job.stdin", "theirs/unreadable");
    let (_, said) = lab.run(["cat"]).ends_with(2);
    assert!(said.contains("the job's user must be able to read it: Permission denied"), "{said}");

    let lab = lab.set_file("job.stdin", "theirs/in").set("restart.backoff", "\"0s\"");
    let attack = format!("cat; ln -sf {} in; exit 9", secret.display());
    let (out, said) = lab.run(["sh", "-c", &attack]).ends_with(126);
    assert_eq!(out, "theirs");
    let input = folder.join("in");
    let why = format!("cannot open the job's standard input {}: the user it runs as may not", input.display());
    assert!(said.contains(&why), "{said}");
}

/// The user can put a link in the place of the working directory before the job starts from the beginning again.
#[test]
fn a_start_enters_no_folder_that_the_user_may_not() {
    let Some(lab) = Lab::new() else { return };
    let (theirs, closed) = (lab.file("theirs"), lab.file("closed"));
    for folder in [theirs.join("work"), closed.join("inner")] {
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let secret = closed.join("inner/secret");
    fs::write(&secret, "not for all").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let user = |name| nix::unistd::User::from_name(name).unwrap().unwrap();
    nix::unistd::chown(&closed, Some(user("daemon").uid), None).unwrap();
    for path in [&theirs, &theirs.join("work")] {
        nix::unistd::chown(path, Some(user("nobody").uid), None).unwrap();
    }
    let lab = lab.set("job.user", "\"nobody\"").set_file("job.directory", "theirs/work");
    let lab = lab.set("restart.max-restarts", "1").set("restart.backoff", "\"0s\"");
    let link = format!("ln -s {} ../work", closed.join("inner").display());
    let attack = format!("cat secret && exit 0; mv ../work ../moved; {link}; exit 9");
    let (out, said) = lab.run(["sh", "-c", &attack]).ends_with(69);
    assert!(!out.contains("not for all"), "{out}");
    let why = format!("user nobody cannot enter the working directory {}", theirs.join("work").display());
    assert!(said.contains(&why) && said.contains("chmod"), "{said}");
    lab.assert_all_gone();
}

/// Whatever root can do: the job is its user's from the beginning.
#[test]
fn a_working_directory_that_the_user_may_not_enter_is_refused() {
    let Some(lab) = Lab::new() else { return };
    let closed = lab.file("closed");
    fs::create_dir_all(closed.join("inner")).unwrap();
    fs::set_permissions(closed.join("inner"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let lab = lab.set("job.user", "\"nobody\"").set_file("job.directory", "closed/inner");
    let (_, said) = lab.run(["true"]).ends_with(2);
    let inner = closed.join("inner");
    let why = format!("user nobody cannot enter the working directory {}: Permission denied", inner.display());
    assert!(said.contains(&why) && said.contains("chmod") && said.contains("job.directory"), "{said}");
    // So is the folder of the shell that root calls rekindle from.
    let lab = lab.without("job.directory");
    assert!(lab.rekindle(&["config", "check"]).status.success());
    let config = lab.file("rekindle.toml");
    let args = ["--config", config.to_str().unwrap(), "run", "--name", "j", "--", "true"];
    let done = lab.command(args).current_dir(&inner).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(2) && said.contains(&why), "{said}");
}

/// The capabilities in the manifest for Kubernetes.
fn rights_of_the_template() -> Vec<String> {
    let manifest = fs::read_to_string("examples/deploy/kubernetes/job.yaml").unwrap();
    let added = manifest.rsplit("add: [").next().unwrap().split(']').next().unwrap().to_lowercase();
    added.split(", ").map(|name| format!("+{name}")).collect()
}

#[test]
fn a_right_that_is_missing_is_not_the_images_fault() {
    let Some(lab) = Lab::new() else { return };
    let mut rights = rights_of_the_template();
    rights.retain(|right| right != "+dac_read_search");
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"").with_only(&rights.join(","));
    // It is not given up before this test has looked.
    let lab = lab.set("restart.backoff", "\"2s\"");
    let (mut run, _) = look(&lab);
    let image = run.snapshot(&lab);
    kill(run.job_pid(&lab), Signal::SIGKILL);
    run.wait_said(&format!("cannot restore image {image:06}"));
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(143);
    assert!(said.contains("a right is missing") && !said.contains("is marked as bad"), "{said}");
    assert!(lab.images()[0].is_good(), "{said}");
}

/// Whether no folder on the way keeps others out.
fn below_closed(path: &Path, store: &Path) -> bool {
    let folders = path.ancestors().skip(1).take_while(|folder| folder.starts_with(store));
    folders.into_iter().all(|f| fs::metadata(f).is_ok_and(|it| it.permissions().mode() & 0o011 != 0))
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut all = vec![folder.to_path_buf()];
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all.extend(walk(&entry.path()));
        } else {
            all.push(entry.path());
        }
    }
    all
}

/// CRIU opens a job's files as root, by their path. What the user puts there after the snapshot must not come in.
#[test]
fn a_restore_opens_nothing_that_the_user_may_not() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
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
    // With many threads it takes a while from the moment that it belongs to its user to the one that it would run.
    let threads = "import threading as t, time; [t.Thread(target=time.sleep, args=[999]).start() for _ in range(300)]";
    let text = format!("exec 3<{}\nexec python3 -c '{threads}; print(\"ready\", flush=True)'", data.display());
    let script = lab.script("job", &text);
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.job_pid(&lab);
    run.snapshot(&lab);
    lab.kill_9(run);
    fs::remove_file(&data).unwrap();
    std::os::unix::fs::symlink(&secret, &data).unwrap();
    let thief = Thief::begins(&theirs.join("stolen"));
    let (_, said) = lab.run([script.as_os_str()]).ends_with(125);
    drop(thief);
    assert!(said.contains("user nobody may not open it") && said.contains("secret"), "{said}");
    assert_eq!(lab.good().len(), 1, "the user can put the file back: {said}");
    assert!(!theirs.join("stolen").exists(), "another process of the user has read it meanwhile");
    lab.assert_all_gone();
}

/// A process of the job's user, outside the job, that takes files from all processes of this user.
struct Thief(std::process::Child);

impl Thief {
    /// Returns once it looks. What it finds hidden goes to `stolen`.
    fn begins(stolen: &Path) -> Thief {
        let program = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/integration/jobs/thief.py")).unwrap();
        let mut thief = std::process::Command::new("setpriv");
        thief
            .args(["--reuid=nobody", "--regid=nogroup", "--clear-groups", "/usr/bin/python3", "-c", &program])
            .arg(stolen);
        let mut thief = thief.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut said = [0; 6];
        std::io::Read::read_exact(thief.stdout.as_mut().unwrap(), &mut said).unwrap();
        assert_eq!(&said, b"looks\n");
        Thief(thief)
    }
}

impl Drop for Thief {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder of nobody's and one that is closed to nobody. In each is `here/data`, which all may read, of one size and one
/// mode: that is what CRIU compares.
fn open_and_closed(lab: &Lab) -> (std::path::PathBuf, std::path::PathBuf) {
    let (theirs, closed) = (lab.file("theirs"), lab.file("closed"));
    for (folder, text) in [(theirs.join("here"), "16 bytes of data"), (closed.join("here"), "16 bytes, hidden")] {
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("data"), text).unwrap();
        fs::set_permissions(folder.join("data"), fs::Permissions::from_mode(0o644)).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o755)).unwrap();
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    for path in [&theirs, &theirs.join("here"), &theirs.join("here/data")] {
        nix::unistd::chown(path, Some(nobody.uid), Some(nobody.gid)).unwrap();
    }
    (theirs, closed)
}

/// CRIU follows links on the way to a file. What is on the way must let the user through, whatever the file's own mode
/// is.
#[test]
fn a_restore_reaches_nothing_through_a_closed_folder() {
    for begin in ["cd here", "exec 3<here/data"] {
        let Some(lab) = Lab::new() else { return };
        let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
        let (theirs, closed) = open_and_closed(&lab);
        let threads =
            "import threading as t, time; [t.Thread(target=time.sleep, args=[999]).start() for _ in range(300)]";
        let text =
            format!("cd {}\n{begin}\nexec python3 -c '{threads}; print(\"ready\", flush=True)'", theirs.display());
        let script = lab.script("job", &text);
        let mut run = lab.run([script.as_os_str()]);
        run.wait_printed("ready");
        run.job_pid(&lab);
        run.snapshot(&lab);
        lab.kill_9(run);
        fs::remove_dir_all(theirs.join("here")).unwrap();
        std::os::unix::fs::symlink(closed.join("here"), theirs.join("here")).unwrap();
        let thief = Thief::begins(&theirs.join("stolen"));
        let (_, said) = lab.run([script.as_os_str()]).ends_with(125);
        drop(thief);
        assert!(!said.contains("the job was restored"), "{begin}: {said}");
        assert!(!theirs.join("stolen").exists(), "{begin}: another process of the user has read it meanwhile");
        lab.assert_all_gone();
    }
}

/// As above, but the folder is exchanged once rekindle has looked, and the file is replaced while CRIU has it open: then it
/// has no name any more that could be judged. The exchange is where CRIU begins, so that the race is won each time.
#[test]
fn a_file_that_lost_its_name_in_a_restore_is_none_of_the_image() {
    let Some(lab) = Lab::new() else { return };
    let ((theirs, closed), armed) = (open_and_closed(&lab), lab.file("armed"));
    let racing = lab.script(
        "racing-criu",
        &format!(
            "case \"$*\" in *swrk*) if [ -e {armed} ] && [ ! -L {here} ]; then mv {here} {here}.old; ln -s {closed}/here {here}; fi;; esac\nexec {criu} \"$@\"",
            armed = armed.display(),
            here = theirs.join("here").display(),
            closed = closed.display(),
            criu = crate::supervisor::criu().display(),
        ),
    );
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
    // A trial at the start would win the race for nothing.
    let lab = lab.set("criu.path", &format!("{racing:?}")).set("snapshot.rehearse", "\"off\"");
    // With many threads it takes a while from the moment that the file is open to the one that the job would run.
    let program = "import os, threading as t, time\n\
        [t.Thread(target=time.sleep, args=[999], daemon=True).start() for _ in range(300)]\n\
        print('ready', flush=True)\n\
        while True: print(os.pread(3, 16, 0), flush=True); time.sleep(0.02)";
    let text = format!("exec 3<{}\nexec python3 -c \"{program}\"", theirs.join("here/data").display());
    let script = lab.script("job", &text);
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("16 bytes of data");
    run.job_pid(&lab);
    run.snapshot(&lab);
    lab.kill_9(run);
    fs::write(&armed, "").unwrap();
    let secret = closed.join("here/data");
    let owner = std::thread::spawn({
        let (secret, folder) = (secret.clone(), closed.join("here"));
        move || {
            let open = |secret: &Path| walk_descriptors().iter().any(|target| target == secret);
            assert!(crate::supervisor::comes(crate::supervisor::LIMIT, || open(&secret)), "CRIU never opened it");
            fs::write(folder.join("new"), "16 bytes of more").unwrap();
            fs::rename(folder.join("new"), secret).unwrap();
        }
    });
    let (_, said) = lab.run([script.as_os_str()]).ends_with(125);
    owner.join().unwrap();
    assert!(!said.contains("hidden") && !said.contains("the job was restored"), "{said}");
    lab.assert_all_gone();
}

/// What all processes have open.
fn walk_descriptors() -> Vec<std::path::PathBuf> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let descriptors = processes.filter_map(|process| fs::read_dir(process.path().join("fd")).ok()).flatten().flatten();
    descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok()).collect()
}

/// Somebody else may close a folder for a moment. That says nothing about the images.
#[test]
fn images_stay_good_while_a_folder_is_closed_to_the_user() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
    // It is not given up before the folder is open again.
    let lab = lab.set("restart.backoff", "\"2s\"");
    let folder = lab.file("shared");
    fs::create_dir(&folder).unwrap();
    let mode = |bits| fs::set_permissions(&folder, fs::Permissions::from_mode(bits)).unwrap();
    mode(0o755);
    let text = format!("cd {}\necho ready\nwhile :; do sleep 0.05; done", folder.display());
    let script = lab.script("job", &text);
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.job_pid(&lab);
    let numbers = [run.snapshot(&lab), run.snapshot(&lab)];
    mode(0o700);
    crate::supervisor::kill(run.job_pid(&lab), nix::sys::signal::Signal::SIGKILL);
    run.wait_said("user nobody may not open it now");
    assert_eq!(lab.good().len(), 2, "{}", run.err());
    mode(0o755);
    run.wait_said(&format!("the job was restored from image {:06}-", numbers[1]));
    lab.kill_9(run);
}

/// An image from before `job.user` was set, or one that somebody added, must not run as root.
#[test]
fn an_image_of_another_user_is_refused_by_name() {
    let Some(lab) = Lab::new() else { return };
    let script = lab.script("job", "echo ready\nwhile :; do sleep 0.05; done");
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.job_pid(&lab);
    let number = run.snapshot(&lab);
    lab.kill_9(run);
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
    let (_, said) = lab.run([script.as_os_str()]).ends_with(78);
    let refused = |said: &str, user: &str| {
        assert!(["root", user, "--accept-user root"].iter().all(|words| said.contains(words)), "{said}");
        assert!(!said.contains("the job was restored"), "{said}");
        assert_eq!(lab.good(), [number], "it is as good as it was: {said}");
        lab.assert_all_gone();
    };
    refused(&said, "nobody");
    let image = format!("j/{}", lab.images()[0].id);
    let (_, said) = lab.run_with(&["restore", &image], [""; 0]).ends_with(78);
    refused(&said, "nobody");
    let (_, said) = lab.run_with(&["run", "--name", "j", "--accept-user", "daemon", "--"], [&script]).ends_with(78);
    refused(&said, "daemon");
    let mut run = lab.run_with(&["run", "--name", "j", "--accept-user", "root", "--"], [&script]);
    run.wait_said("the job was restored");
    let pid = run.job_pid(&lab);
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("Uid:\t0\t0\t0\t0"), "{status}");
    lab.kill_9(run);
}

/// A protobuf message, field by field: its number and a varint or content.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Result<u64, Vec<u8>>)> {
    let varint = |bytes: &mut &[u8]| {
        let length = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
        let (read, rest) = bytes.split_at(length);
        *bytes = rest;
        read.iter().rev().fold(0u64, |value, byte| value << 7 | u64::from(byte & 0x7f))
    };
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = varint(&mut bytes);
        let value = match key & 7 {
            0 => Ok(value),
            2 => {
                let (content, rest) = bytes.split_at(usize::try_from(value).unwrap());
                bytes = rest;
                Err(content.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        found.push((key >> 3, value));
    }
    found
}

fn message(fields: &[(u64, Result<u64, Vec<u8>>)]) -> Vec<u8> {
    fn varint(mut value: u64, bytes: &mut Vec<u8>) {
        while value >= 0x80 {
            bytes.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
            value >>= 7;
        }
        bytes.push(u8::try_from(value).unwrap());
    }
    let mut bytes = Vec::new();
    for (number, value) in fields {
        varint(number << 3 | if value.is_ok() { 0 } else { 2 }, &mut bytes);
        match value {
            Ok(value) => varint(*value, &mut bytes),
            Err(content) => {
                varint(u64::try_from(content.len()).unwrap(), &mut bytes);
                bytes.extend(content);
            }
        }
    }
    bytes
}

type Fields = Vec<(u64, Result<u64, Vec<u8>>)>;

/// A change to credentials.
type Forgery<'a> = (&'a str, &'a dyn Fn(&mut Fields));

/// Changes the credentials (`creds_entry`) in a `core-N.img`.
fn forge(core: &Path, change: &dyn Fn(&mut Fields)) {
    let bytes = fs::read(core).unwrap();
    // Two magic numbers and the length of the only record.
    let mut record = fields(&bytes[12..]);
    for (number, thread) in &mut record {
        let (5, Err(content)) = (*number, &mut *thread) else { continue };
        let mut thread = fields(content);
        for (number, creds) in &mut thread {
            let (10, Err(content)) = (*number, &mut *creds) else { continue };
            let mut creds = fields(content);
            change(&mut creds);
            *content = message(&creds);
        }
        *content = message(&thread);
    }
    let record = message(&record);
    let length = u32::try_from(record.len()).unwrap().to_le_bytes();
    fs::write(core, [&bytes[..8], &length, &record].concat()).unwrap();
}

/// Puts an image of plain files in the place of a packed one, with `change` to its core images and hashes that are
/// right.
fn put_forged(lab: &Lab, image: &Image, plain: &Path, change: &dyn Fn(&mut Fields)) {
    let copy = |from: &Path, to: &Path| {
        let _ = fs::remove_dir_all(to);
        assert!(std::process::Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
    };
    copy(plain, image.dir.path());
    let manifest = image.manifest().unwrap();
    let job = |part: &PathBuf| {
        let number = part.file_stem().unwrap().to_str().unwrap().strip_prefix("core-").unwrap().to_owned();
        number != manifest.tree.root.to_string()
    };
    let cores = fs::read_dir(image.dir.join("criu")).unwrap().map(|entry| entry.unwrap().path());
    let cores = cores.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("core-"));
    cores.filter(job).for_each(|core| forge(&core, change));
    let mut forged = Manifest { chunks: None, ..manifest.clone() };
    for part in &mut forged.parts {
        let bytes = fs::read(image.dir.join(&part.path)).unwrap();
        (part.size, part.blake3) = (bytes.len() as u64, Some(blake3::hash(&bytes)));
    }
    fs::write(image.dir.join("manifest.json"), forged.to_bytes(&Default::default()).unwrap()).unwrap();
    lab.forget_memory();
}

/// A restored process has the rights that a start gives it, whatever the image says.
#[test]
fn an_image_with_more_rights_than_a_start_gives_is_refused() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("job.no-new-privileges", "true");
    let lab = lab.set("restart.cold-start", "\"never\"");
    let script = lab.script("job", "echo ready\nwhile :; do sleep 0.05; done");
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.job_pid(&lab);
    run.snapshot(&lab);
    lab.kill_9(run);
    lab.forget_memory();
    let image = lab.images().remove(0);
    let plain = lab.file("plain");
    fs::create_dir(&plain).unwrap();
    unpack(
        &image,
        &lab.job(),
        &rekindle_os::beneath::Beneath::at(&plain).unwrap(),
        None,
        1,
        &Progress::default(),
        &|| false,
    )
    .unwrap();

    let everybody = |creds: &mut Fields| {
        creds.iter_mut().filter(|(number, _)| (1..=8).contains(number)).for_each(|(_, id)| *id = Ok(0));
    };
    let group = |creds: &mut Fields| creds.push((14, Ok(0)));
    let privileges = |creds: &mut Fields| creds.retain(|(number, _)| *number != 18);
    let forgeries: [Forgery<'_>; 3] = [("user", &everybody), ("group", &group), ("no-new-privileges", &privileges)];
    for (words, change) in forgeries {
        put_forged(&lab, &image, &plain, change);
        let (_, said) = lab.run([script.as_os_str()]).ends_with(125);
        assert!(said.contains(words) && !said.contains("the job was restored"), "{words}: {said}");
        let State::Bad { mark, .. } = &lab.images()[0].state else { panic!("{words}: not marked: {said}") };
        assert_eq!(mark.why, BadWhy::DoesNotRestore, "{words}");
        lab.assert_all_gone();
    }

    // As it was, it is restored.
    put_forged(&lab, &image, &plain, &|_| {});
    let mut run = lab.run([script.as_os_str()]);
    run.wait_said("the job was restored");
    lab.kill_9(run);
}

/// Jobs of many kinds as another user: CRIU restores them with that user's rights over files.
fn comes_back_as_nobody(job: &str, kind: &str) {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
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
    let mut run = lab.run(&command);
    run.wait_said("the job was restored from image");
    count_on(&lab, &mut run, 5);
    fs::write(theirs.join("finish"), "").unwrap();
    let (code, _, said) = run.finish(crate::supervisor::LIMIT);
    assert_eq!(code, 0, "{said}");
    assert!(lab.output().ends_with("done\n"), "{}\n{said}", lab.output());
}

/// Its own program and its working directory: CRIU makes them from the image.
#[test]
fn a_removed_program_and_working_directory_of_a_user() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set_file("job.directory", "theirs");
    let lab = lab.set("restart.cold-start", "\"never\"");
    let theirs = lab.file("theirs");
    fs::create_dir(&theirs).unwrap();
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    nix::unistd::chown(&theirs, Some(nobody.uid), Some(nobody.gid)).unwrap();
    let text = "rm program; mkdir gone; cd gone; rmdir ../gone; echo ready; while :; do sleep 0.05; done";
    let script = lab.script("job", &format!("cp /bin/sh program\nexec ./program -c '{text}'"));
    let mut run = lab.run([script.as_os_str()]);
    run.wait_printed("ready");
    run.job_pid(&lab);
    run.snapshot(&lab);
    lab.kill_9(run);
    let mut run = lab.run([script.as_os_str()]);
    run.wait_said("the job was restored from image");
    let pid = run.job_pid(&lab);
    for (link, name) in [("exe", "program"), ("cwd", "gone")] {
        let leads = fs::read_link(format!("/proc/{pid}/{link}")).unwrap();
        assert_eq!(leads, PathBuf::from(format!("{} (deleted)", theirs.join(name).display())));
    }
    lab.kill_9(run);
}

macro_rules! kinds_of_nobody {
    ($($name:ident: $job:literal $kind:literal,)*) => {
        $(#[test] fn $name() { comes_back_as_nobody($job, $kind); })*
    };
}

kinds_of_nobody! {
    files_of_a_user: "kinds.py" "files",
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
