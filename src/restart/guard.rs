//! What a restored job of another user has open must be what that user may open.
//!
//! CRIU opens files by their path, as root. The user owns the folders, and could have put a link to somebody else's file
//! in the place of one the job had open, between the snapshot and the restore. So every file of every restored process is
//! looked at before the first instruction of the job runs. What the job was given by root (its output, a standard input)
//! is noted in the image with its inode, and must be that very file.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::launch::identity::Identity;
use crate::store::manifest::GivenFile;
use crate::sys::process;

/// Files that processes of the tree have open or mapped without a right of the user's own.
pub(crate) fn given_files(tree: &[i32], user: &Identity) -> Vec<GivenFile> {
    let mut found: Vec<GivenFile> = Vec::new();
    for (path, file) in tree.iter().flat_map(|pid| open_files(*pid)) {
        let given = GivenFile { path, device: file.metadata.dev(), inode: file.metadata.ino() };
        if !file.is_allowed(user) && !found.contains(&given) {
            found.push(given);
        }
    }
    found
}

/// Checks the restored tree below `root`, the reaper, whose own files are ours.
///
/// # Errors
/// Names the first file that the user may not open, in words.
pub(super) fn check(root: i32, user: &Identity, given: &[GivenFile], log_dir: &Path) -> Result<(), String> {
    let tree: Vec<i32> = process::tree(root).into_iter().filter(|pid| *pid != root).collect();
    for pid in &tree {
        for (path, file) in open_files(*pid) {
            let known = |g: &GivenFile| g.device == file.metadata.dev() && g.inode == file.metadata.ino();
            // On another machine the output has other inodes, but only we can write to its folder.
            if !(file.is_allowed(user)
                || given.iter().any(known)
                || path.starts_with(log_dir)
                || is_about(&path, &tree, user))
            {
                return Err(format!(
                    "{} is open in the restored job, and user {} may not open it: it was replaced since the snapshot; put it back, or take another image",
                    path.display(),
                    user.name
                ));
            }
        }
    }
    Ok(())
}

/// Whether it is an entry of /proc about a process of the tree that the user is. The kernel gives such entries to root
/// until the process has executed a program again (proc(5), `dumpable`).
fn is_about(path: &Path, tree: &[i32], user: &Identity) -> bool {
    let mut parts = path.strip_prefix("/proc").into_iter().flat_map(Path::components);
    let number = parts.next().and_then(|part| part.as_os_str().to_str()?.parse::<i32>().ok());
    let process = tree.iter().find(|pid| number.is_some() && process::inner_pid(**pid) == number);
    process.is_some_and(|pid| process::user_ids(*pid).is_some_and(|ids| ids.iter().all(|id| *id == user.uid)))
}

/// A file that a process has, and the access it has: bits of a permission triple.
struct Had {
    metadata: std::fs::Metadata,
    access: u32,
}

const READ: u32 = 4;
const WRITE: u32 = 2;

impl Had {
    /// By owner, group and others, as the kernel does it; lists of further users (ACL) are not looked at.
    fn is_allowed(&self, user: &Identity) -> bool {
        let mode = self.metadata.mode();
        let bits = if user.uid == self.metadata.uid() {
            mode >> 6
        } else if user.gid == self.metadata.gid() || user.groups.contains(&self.metadata.gid()) {
            mode >> 3
        } else {
            mode
        };
        user.uid == 0 || bits & self.access == self.access
    }
}

/// What a process has open or mapped and that has a path. What can not be looked at any more has gone with its process.
fn open_files(pid: i32) -> Vec<(PathBuf, Had)> {
    let entries = |dir: &str| std::fs::read_dir(format!("/proc/{pid}/{dir}")).into_iter().flatten().flatten();
    let look = |entry: std::fs::DirEntry, access: u32| {
        let path = std::fs::read_link(entry.path()).ok().filter(|path| path.is_absolute())?;
        Some((path, Had { metadata: std::fs::metadata(entry.path()).ok()?, access }))
    };
    let descriptors = entries("fd").filter_map(|entry| {
        let number = entry.file_name();
        look(entry, access_of(pid, &number.to_string_lossy())?)
    });
    let mapped = entries("map_files").filter_map(|entry| look(entry, READ));
    descriptors.chain(mapped).collect()
}

fn access_of(pid: i32, fd: &str) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = i32::from_str_radix(flags.trim(), 8).ok()?;
    Some(match flags & (libc::O_ACCMODE | libc::O_PATH) {
        libc::O_RDONLY => READ,
        libc::O_WRONLY => WRITE,
        libc::O_RDWR => READ | WRITE,
        // O_PATH: nothing can be read or written through it.
        _ => 0,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_of_root_is_seen_in_another_users_hands() {
        if !crate::test_gate::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "root's").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let secret = std::fs::File::open(&path).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").stdin(secret).spawn().unwrap();
        let pid = child.id().cast_signed();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        // Until it has executed its program, it has what this process has.
        while process::name(pid).as_deref() != Some("sleep") && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let nobody = crate::launch::identity::lookup("nobody").unwrap();
        let given = given_files(&[pid], &nobody);
        let is_secret = |g: &GivenFile| g.path == path;
        let own = std::process::id().cast_signed();
        let refused = check(own, &nobody, &[], Path::new("/nowhere"));
        let accepted = given.iter().any(is_secret);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(accepted, "{given:?}");
        assert!(refused.is_err());
        assert!(given_files(&[own], &crate::launch::identity::lookup("root").unwrap()).is_empty());
    }
}
