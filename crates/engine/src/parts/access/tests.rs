use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::*;
use crate::launch::identity::lookup;

/// A tree whose root runs `script` and then starts `program` as user nobody. Dropping it ends the tree.
struct Tree(Child);

impl Tree {
    fn start(script: &str, program: &str) -> Tree {
        Tree::start_with(Stdio::null(), script, program)
    }

    fn start_with(input: Stdio, script: &str, program: &str) -> Tree {
        let script = format!("{script}\nsetpriv --reuid=nobody --regid=nogroup --init-groups {program} 60 & wait");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).current_dir("/").stdin(input).stdout(Stdio::null()).stderr(Stdio::null());
        let tree = Tree(shell.spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        let runs = |pid: &i32| process::name(*pid).as_deref() == Some("sleep");
        while !process::children(tree.root()).iter().any(runs) {
            assert!(Instant::now() < deadline, "{program} does not start: {script}");
            std::thread::sleep(Duration::from_millis(1));
        }
        tree
    }

    fn root(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for pid in process::tree(self.root()) {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
        let _ = self.0.wait();
    }
}

fn refused(tree: &Tree, given: &[GivenFile]) -> Option<String> {
    let manifest = Manifest { given_files: given.to_vec(), ..crate::samples::manifest() };
    let nobody = lookup("nobody").unwrap();
    let wanted = Wanted {
        user: Some(&nobody),
        privileges: Privileges::MayGrow,
        manifest: &manifest,
        log_dir: Path::new("/nowhere"),
    };
    let files = check_files(tree.root(), &below(tree.root()), &nobody, &wanted, None);
    files.err().map(|error| error.to_string())
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A folder that everybody can enter, with `closed/inner/data`: everybody may read the file, but not everybody can
/// reach it.
fn ground() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("closed/inner")).unwrap();
    std::fs::write(dir.path().join("closed/inner/data"), "not for all").unwrap();
    // By another process: a file that a child of another test has open for writing cannot be executed. Another test
    // may reap it.
    let sleep = dir.path().join("closed/inner/sleep");
    let _ = Command::new("cp").arg("/bin/sleep").arg(&sleep).status();
    assert!(sleep.exists());
    for (name, bits) in [("", 0o755), ("closed", 0o700), ("closed/inner", 0o755), ("closed/inner/data", 0o644)] {
        mode(&dir.path().join(name), bits);
    }
    dir
}

#[test]
fn a_closed_way_keeps_a_file_from_the_user() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let inner = dir.path().join("closed/inner");
    // For this tree only: one that is not closed at an exec would be inherited by the trees of other tests, too.
    let flags = nix::fcntl::OFlag::O_PATH | nix::fcntl::OFlag::O_CLOEXEC;
    let way = nix::fcntl::open(&inner, flags, nix::sys::stat::Mode::empty()).unwrap();
    let only_a_way = Tree::start_with(Stdio::from(way), "exec 3<&0 0</dev/null", "sleep");
    let shown = inner.display();
    for (what, tree) in [
        ("inner", only_a_way),
        ("data", Tree::start(&format!("exec 3<{shown}/data"), "sleep")),
        ("data", Tree::start(&format!("exec 3>>{shown}/data"), "sleep")),
        ("inner", Tree::start(&format!("cd {shown}"), "sleep")),
    ] {
        let said = refused(&tree, &[]).unwrap_or_else(|| panic!("{what} passed"));
        assert!(said.contains(&format!("{shown}")) && said.contains(what) && said.contains("nobody"), "{said}");
    }
    mode(&dir.path().join("closed"), 0o711);
    let program = Tree::start("true", inner.join("sleep").to_str().unwrap());
    assert_eq!(refused(&program, &[]), None);
    mode(&dir.path().join("closed"), 0o700);
    assert!(refused(&program, &[]).is_some_and(|said| said.contains("sleep")));
}

#[test]
fn files_of_the_kernel_are_not_what_their_mode_says() {
    if !rekindle_testing::root() {
        return;
    }
    // The last case is about the shell, which runs as root and is the root of the tree.
    for (path, name) in [("/proc/kallsyms", "kallsyms"), ("/proc/$$/maps", "maps")] {
        let tree = Tree::start(&format!("exec 3<{path}"), "sleep");
        let said = refused(&tree, &[]).unwrap_or_else(|| panic!("{path} passed"));
        assert!(said.contains("/proc/") && said.contains(name), "{said}");
    }
    let harmless =
        "exec 3</proc/meminfo 4</proc/stat 5</sys/devices/system/cpu/online 6</proc 7</proc/sys/kernel/hostname";
    assert_eq!(refused(&Tree::start(harmless, "sleep"), &[]), None);
}

#[test]
fn what_is_the_users_own_or_given_passes() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let nobody = lookup("nobody").unwrap();
    for name in ["own", "gone", "given"] {
        let path = dir.path().join(name);
        std::fs::write(&path, name).unwrap();
        mode(&path, 0o600);
        if name != "given" {
            std::os::unix::fs::chown(&path, Some(nobody.uid), Some(nobody.gid)).unwrap();
        }
    }
    let shown = dir.path().display();
    let script = format!("exec 3<>{shown}/own 4<>{shown}/gone 5</dev/null; rm {shown}/gone; cd {shown}");
    assert_eq!(refused(&Tree::start(&script, "sleep"), &[]), None);
    let metadata = std::fs::metadata(dir.path().join("given")).unwrap();
    let given = |access| [GivenFile { path: "/given".into(), device: metadata.dev(), inode: metadata.ino(), access }];
    let reads = Tree::start(&format!("exec 3<{shown}/given"), "sleep");
    assert!(refused(&reads, &[]).is_some());
    assert_eq!([None, Some(4), Some(6)].map(|access| refused(&reads, &given(access))), [const { None }; 3]);
    // No more access than it was given for.
    assert!(refused(&reads, &given(Some(2))).is_some());
    assert!(refused(&Tree::start(&format!("exec 3<>{shown}/given"), "sleep"), &given(Some(4))).is_some());
}

#[test]
fn what_a_restore_would_refuse_is_not_taken() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let nobody = lookup("nobody").unwrap();
    let data = dir.path().join("closed/inner/data");
    let tree = Tree::start(&format!("exec 3<{}", data.display()), "sleep");
    foresee(tree.root(), Some(&nobody), Privileges::MayGrow).unwrap();
    let noted = note(tree.root(), Some(&nobody), Privileges::MayGrow).unwrap();
    let metadata = std::fs::metadata(&data).unwrap();
    let given = GivenFile { path: data, device: metadata.dev(), inode: metadata.ino(), access: Some(4) };
    assert_eq!((noted.given.as_slice(), refused(&tree, &noted.given)), ([given].as_slice(), None));
    assert_eq!((noted.rights.uid, noted.rights.no_new_privileges), (nobody.uid, false));
    let mut groups = nobody.groups.clone();
    groups.sort_unstable();
    assert_eq!(noted.rights.groups, groups);
    let kernels = Tree::start("exec 3</proc/kallsyms", "sleep");
    let setuid = Tree::start("sleep 60 &", "sleep");
    for (tree, words, privileges) in [
        (&kernels, "/proc/kallsyms", Privileges::MayGrow),
        (&setuid, "the user ids 0 0 0 0", Privileges::MayGrow),
        (&tree, "no-new-privileges", Privileges::Fixed),
    ] {
        let foreseen = foresee(tree.root(), Some(&nobody), privileges).unwrap_err().to_string();
        let noted = note(tree.root(), Some(&nobody), privileges).unwrap_err().to_string();
        assert!(foreseen.contains(words) && noted.contains(words), "{words}: {foreseen}, {noted}");
    }
}

#[test]
fn only_the_output_itself_is_taken_for_output() {
    let dir = tempfile::tempdir().unwrap();
    let held = |name: &str, options: &mut std::fs::OpenOptions| {
        let path = dir.path().join(name);
        let file = options.open(&path).unwrap();
        let own = std::process::id().cast_signed();
        let found = files::held(&[own], None).unwrap().into_iter().find(|held| held.path == path).unwrap();
        drop(file);
        found
    };
    let append = |name| held(name, std::fs::File::options().append(true).create(true));
    assert!(is_output(&append("stdout.log"), dir.path()) && is_output(&append("stderr.log"), dir.path()));
    assert!(!is_output(&append("events.jsonl"), dir.path()));
    assert!(!is_output(&append("stdout.log"), Path::new("/")));
    assert!(!is_output(&held("stdout.log", std::fs::File::options().read(true).append(true)), dir.path()));
}
