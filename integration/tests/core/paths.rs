//! What the job's user puts into its folders between an image and its restore: CRIU works there by name, and may change
//! nothing that the user could not.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::unistd::User;

use crate::supervisor::{LIMIT, Lab, comes};

/// A job of `nobody` with an image, dead; and a folder of root's.
struct Scene {
    lab: Lab,
    /// The user's folder.
    theirs: PathBuf,
    /// Root's folder.
    ours: PathBuf,
    command: Vec<String>,
}

/// What is to be seen of a file: owner, group, mode, size, inode, content.
type Seen = (PathBuf, u32, u32, u32, u64, Vec<u8>);

fn look(folder: &Path) -> Vec<Seen> {
    let mut all = vec![folder.to_path_buf()];
    all.extend(fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()));
    all.sort();
    let seen = all.into_iter().map(|path| {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let content = if metadata.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
        (path, metadata.uid(), metadata.gid(), metadata.mode(), metadata.ino(), content)
    });
    seen.collect()
}

/// When something was last made or removed in the folder.
fn changed(folder: &Path) -> (i64, i64) {
    let metadata = fs::metadata(folder).unwrap();
    (metadata.mtime(), metadata.mtime_nsec())
}

fn give(path: &Path) {
    let nobody = User::from_name("nobody").unwrap().unwrap();
    std::os::unix::fs::lchown(path, Some(nobody.uid.as_raw()), Some(nobody.gid.as_raw())).unwrap();
}

impl Scene {
    fn new(what: &[&str]) -> Option<Scene> {
        let lab = Lab::new()?.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
        let lab = lab.set("restart.max-restarts", "1");
        let (theirs, ours) = (lab.file("theirs"), lab.file("ours"));
        for path in [&theirs, &ours] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        give(&theirs);
        let mut arguments = vec![theirs.to_str().unwrap()];
        arguments.extend(what);
        let command = lab.python_command("bound_job.py", &arguments);
        let mut run = lab.run(&command);
        run.wait_printed("ready");
        run.snapshot(&lab);
        lab.kill_9(run);
        Some(Scene { lab, theirs, ours, command })
    }

    /// Puts a link to root's folder in the place of the user's.
    fn link_to_ours(&self) {
        fs::rename(self.theirs.join("d"), self.theirs.join("away")).unwrap();
        symlink(&self.ours, self.theirs.join("d")).unwrap();
    }

    /// Runs it again: it is restored, or the answer is what was said.
    fn restores(&self) -> Result<(), String> {
        let mut run = self.lab.run(&self.command);
        let said = run.said_so_far();
        assert!(comes(LIMIT, || said().contains("the job was restored from image") || !run.runs()), "{}", said());
        if said().contains("the job was restored from image") {
            let written = || fs::metadata(self.theirs.join("alive")).unwrap().len();
            let before = written();
            // Twice: all that it does in a round.
            assert!(comes(LIMIT, || written() > before + 1), "the job does nothing: {}", said());
            self.lab.kill_9(run);
            return Ok(());
        }
        Err(run.finish(LIMIT).2)
    }
}

#[test]
fn an_untouched_job_is_restored_whole() {
    let Some(scene) = Scene::new(&["socket", "ghost", "hardlink", "log", "cwd"]) else { return };
    let before = changed(&scene.theirs);
    scene.restores().unwrap();
    assert!(changed(&scene.theirs) >= before);
    let socket = fs::symlink_metadata(scene.theirs.join("d/daemon.sock")).unwrap();
    assert_eq!((socket.uid(), socket.mode() & 0o777), (65534, 0o777));
    assert_eq!(fs::read(scene.theirs.join("d/second")).unwrap(), b"linked twice");
    let left: Vec<_> = fs::read_dir(scene.theirs.join("d")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("ghost")), "{left:?}");
}

#[test]
fn clients_of_a_restored_socket_see_the_user_as_its_server() {
    let Some(scene) = Scene::new(&["socket"]) else { return };
    let mut run = scene.lab.run(&scene.command);
    run.wait_said("the job was restored from image");
    let client = std::os::unix::net::UnixStream::connect(scene.theirs.join("d/daemon.sock")).unwrap();
    let server = nix::sys::socket::getsockopt(&client, nix::sys::socket::sockopt::PeerCredentials).unwrap();
    assert_eq!(server.uid(), 65534);
    scene.lab.kill_9(run);
}

/// CRIU unlinks the socket and binds it anew: through a link that would be root's.
#[test]
fn a_socket_of_roots_is_not_taken_through_a_link() {
    let Some(scene) = Scene::new(&["socket"]) else { return };
    let socket = scene.ours.join("daemon.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o600)).unwrap();
    let before = look(&scene.ours);
    scene.link_to_ours();
    let refused = scene.restores().unwrap_err();
    assert_eq!(look(&scene.ours), before, "{refused}");
}

/// For a descriptor with an owner for signals, CRIU takes other ids, and is root again afterwards.
#[test]
fn no_socket_comes_into_a_folder_of_roots_after_a_descriptor_with_an_owner() {
    let Some(scene) = Scene::new(&["owner", "socket"]) else { return };
    let before = (look(&scene.ours), changed(&scene.ours));
    scene.link_to_ours();
    let refused = scene.restores().unwrap_err();
    assert_eq!((look(&scene.ours), changed(&scene.ours)), before, "{refused}");
}

/// Root's session keyring, as a login gives it, stays root's.
#[test]
fn the_keys_of_roots_session_are_not_the_jobs() {
    if !rekindle_testing::keys::begin_session() {
        return;
    }
    let Some(scene) = Scene::new(&["keys", "owner"]) else { return };
    let seen = || fs::read_to_string(scene.theirs.join("keys")).unwrap_or_default();
    assert_eq!(seen().trim(), "0", "at its start");
    fs::remove_file(scene.theirs.join("keys")).unwrap();
    scene.restores().unwrap();
    assert_eq!(seen().trim(), "0", "after a restore");
}

/// The same without a link: a folder of root's within the user's is given the name.
#[test]
fn a_socket_of_roots_is_not_taken_by_another_name_of_its_folder() {
    let Some(scene) = Scene::new(&["socket"]) else { return };
    let ours = scene.theirs.join("root");
    fs::create_dir(&ours).unwrap();
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o755)).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(ours.join("daemon.sock")).unwrap();
    fs::set_permissions(ours.join("daemon.sock"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(scene.theirs.join("d"), scene.theirs.join("away")).unwrap();
    fs::rename(&ours, scene.theirs.join("d")).unwrap();
    let before = look(&scene.theirs.join("d"));
    let refused = scene.restores().unwrap_err();
    assert_eq!(look(&scene.theirs.join("d")), before, "{refused}");
}

/// A file without a name gets one while CRIU makes it.
#[test]
fn no_file_of_the_job_comes_into_a_folder_of_roots() {
    let Some(scene) = Scene::new(&["ghost"]) else { return };
    fs::write(scene.ours.join("other"), "root's").unwrap();
    let before = (look(&scene.ours), changed(&scene.ours));
    scene.link_to_ours();
    let refused = scene.restores().unwrap_err();
    assert_eq!((look(&scene.ours), changed(&scene.ours)), before, "{refused}");
}

/// Links in the place of the name itself.
#[test]
fn a_log_that_became_a_link_is_not_written() {
    let Some(scene) = Scene::new(&["log"]) else { return };
    let secret = scene.ours.join("secret");
    fs::write(&secret, "root's").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let before = (look(&scene.ours), changed(&scene.ours));
    let log = scene.theirs.join("d/log");
    fs::remove_file(&log).unwrap();
    symlink(&secret, &log).unwrap();
    let refused = scene.restores().unwrap_err();
    assert_eq!((look(&scene.ours), changed(&scene.ours)), before, "{refused}");
}
