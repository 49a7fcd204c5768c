use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::*;
use crate::launch::identity::lookup;
use rekindle_store::manifest::SavedLink;

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
    refused_of(tree, &manifest, &UnnamedFiles::default())
}

/// The image says that all processes of the tree have these files as these descriptors.
fn refused_as(tree: &Tree, known: &[(i32, Unnamed)]) -> Option<String> {
    let of = |pid: i32| known.iter().map(move |(number, is)| (pid, *number, Some(is.clone())));
    refused_of(tree, &crate::samples::manifest(), &below(tree.root()).into_iter().flat_map(of).collect())
}

fn refused_of(tree: &Tree, manifest: &Manifest, unnamed: &UnnamedFiles) -> Option<String> {
    let nobody = lookup("nobody").unwrap();
    let wanted =
        Wanted { user: Some(&nobody), privileges: Privileges::MayGrow, manifest, unnamed, output: [(0, 0); 2] };
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
    let gone = [(4, Unnamed::Ghost(dir.path().join("gone")))];
    assert_eq!(refused_as(&Tree::start(&script, "sleep"), &gone), None);
    let metadata = std::fs::metadata(dir.path().join("given")).unwrap();
    let given = |access| [GivenFile { path: "/given".into(), device: metadata.dev(), inode: metadata.ino(), access }];
    let reads = Tree::start(&format!("exec 3<{shown}/given"), "sleep");
    assert!(refused(&reads, &[]).is_some());
    assert_eq!([None, Some(4), Some(6)].map(|access| refused(&reads, &given(access))), [const { None }; 3]);
    // No more access than it was given for.
    assert!(refused(&reads, &given(Some(2))).is_some());
    assert!(refused(&Tree::start(&format!("exec 3<>{shown}/given"), "sleep"), &given(Some(4))).is_some());
}

/// A folder was exchanged for a link to a closed one when CRIU opened a file in it, and the file there was replaced since:
/// its owner and its mode allow the access, and it has no path that could be looked up.
#[test]
fn a_deleted_file_that_the_image_does_not_have_as_such_is_refused() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("closed/inner/data");
    let script = format!("exec 3<{0}; echo new > {0}.new; mv {0}.new {0}", data.display());
    let tree = Tree::start(&script, "sleep");
    let said = refused(&tree, &[]).unwrap();
    assert!(said.contains("closed/inner/data (deleted)"), "{said}");
    // The image has a deleted file there, and it was another one, or memory.
    for is in [Unnamed::Ghost(dir.path().join("open/inner/data")), Unnamed::Memory, Unnamed::AioRing] {
        assert!(refused_as(&tree, &[(3, is.clone())]).is_some(), "{is:?}");
    }
    assert!(refused_as(&tree, &[(4, Unnamed::Ghost(data.clone()))]).is_some(), "another descriptor");
    assert_eq!(refused_as(&tree, &[(3, Unnamed::Ghost(data.clone()))]), None);
    // Its owner, group and mode count in any case.
    let tree = Tree::start(&format!("exec 3<>{0}; rm {0}", data.display()), "sleep");
    assert!(refused_as(&tree, &[(3, Unnamed::Ghost(data))]).is_some());
}

#[test]
fn a_name_that_looks_like_that_of_a_deleted_file_is_looked_up() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let data = dir.path().join("closed/inner/data (deleted)");
    std::fs::write(&data, "not for all").unwrap();
    let tree = Tree::start(&format!("exec 3<'{}'", data.display()), "sleep");
    assert!(refused(&tree, &[]).is_some());
    let nobody = lookup("nobody").unwrap();
    let noted = note(tree.root(), Some(&nobody), Privileges::MayGrow).unwrap();
    assert_eq!(noted.given.iter().map(|given| &given.path).collect::<Vec<_>>(), [&data]);
    mode(&dir.path().join("closed"), 0o711);
    assert_eq!(refused(&tree, &[]), None);
}

#[test]
fn memory_without_a_name_is_what_the_image_has_as_such() {
    if !rekindle_testing::root() {
        return;
    }
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let memory = nix::sys::memfd::memfd_create(c"somebody's", flags).unwrap();
    let tree = Tree::start_with(Stdio::from(memory), "exec 3<&0 0</dev/null", "sleep");
    assert!(refused(&tree, &[]).is_some_and(|said| said.contains("/memfd:somebody's")));
    assert!(refused_as(&tree, &[(0, Unnamed::Memory)]).is_some(), "another descriptor");
    assert_eq!(refused_as(&tree, &[(3, Unnamed::Memory)]), None);
}

/// CRIU opens it by a name that is gone afterwards. The image has another one.
#[test]
fn a_deleted_file_with_other_names_is_looked_up_by_one_of_them() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = ground();
    let (gone, saved) = (dir.path().join("gone"), dir.path().join("closed/saved"));
    std::fs::write(&gone, "linked").unwrap();
    std::fs::hard_link(&gone, &saved).unwrap();
    mode(&gone, 0o644);
    let tree = Tree::start(&format!("exec 3<{0}; rm {0}", gone.display()), "sleep");
    let job_path = |path: &Path| rekindle_store::JobPath::new(path.to_path_buf()).unwrap();
    let link = dir.path().join("saved.open");
    let links = vec![SavedLink { link: job_path(&link), saved: job_path(&saved), owner: None, names: Vec::new() }];
    let manifest = Manifest { saved_links: links, ..crate::samples::manifest() };
    let of = |pid: i32| (pid, 3, Some(Unnamed::Link(link.clone())));
    let known = || below(tree.root()).into_iter().map(of).collect::<UnnamedFiles>();
    assert!(refused_of(&tree, &manifest, &known()).is_some(), "the folder is closed");
    mode(&dir.path().join("closed"), 0o711);
    assert_eq!(refused_of(&tree, &manifest, &known()), None);
    std::fs::rename(dir.path().join("closed/inner/data"), &saved).unwrap();
    assert!(refused_of(&tree, &manifest, &known()).is_some(), "another file");
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
        let found = files::held(&[own], None, None).unwrap().into_iter().find(|held| held.path == path).unwrap();
        drop(file);
        found
    };
    let append = |name| held(name, std::fs::File::options().append(true).create(true));
    let (out, other) = (append("stdout.log"), append("events.jsonl"));
    let ours = [(out.device, out.inode), (0, 0)];
    assert!(is_output(&out, &ours) && !is_output(&other, &ours));
    // Another file has its path now, as after a restore through a link.
    std::fs::rename(dir.path().join("stdout.log"), dir.path().join("moved")).unwrap();
    assert!(!is_output(&append("stdout.log"), &ours));
    assert!(!is_output(&held("moved", std::fs::File::options().read(true).append(true)), &ours));
}
