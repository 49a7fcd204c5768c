//! Folders in which root may work by name, because no user can replace anything on the path.

use core::ffi::c_char;

use crate::sys::{self, AT_FDCWD, argument, number};

const O_DIRECTORY: usize = 0o200_000;
const O_NOFOLLOW: usize = 0o400_000;
const O_CLOEXEC: usize = 0o2_000_000;
const O_PATH: usize = 0o10_000_000;

/// Maximum length of a name (`NAME_MAX`).
const NAME: usize = 255;

/// A folder, opened as a path only, and the name of an entry in it.
pub(crate) struct Place {
    pub(crate) folder: i32,
    name: [u8; NAME + 1],
}

impl Place {
    pub(crate) fn name(&self) -> *const c_char {
        self.name.as_ptr().cast()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        sys::close(self.folder);
    }
}

/// The folder of `path`, if every folder above it belongs to root and only root can change it. Links are not followed.
/// A relative path is accepted only if it is a single name, in a folder that was opened before: CRIU has its images and
/// its work files in such. Folders like /tmp, where everybody may create files and nobody can remove others' (the
/// sticky bit), may be parents, but not the folder itself.
pub(crate) fn place(from: i32, path: &[u8]) -> Option<Place> {
    let is_absolute = path.first() == Some(&b'/');
    let mut parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").peekable();
    let mut folder = match (is_absolute, from) {
        (true, _) => open(AT_FDCWD, b"/\0")?,
        (false, AT_FDCWD) => return None,
        (false, from) => open(from, b".\0")?,
    };
    let from_root = is_absolute || is_root(folder);
    loop {
        let (Some(part), Some(stat)) = (parts.next(), sys::stat(folder)) else {
            sys::close(folder);
            return None;
        };
        let is_last = parts.peek().is_none();
        let is_roots = stat.kind() == sys::DIRECTORY && stat.uid == 0;
        let is_closed = stat.mode & 0o022 == 0 || (!is_last && stat.mode & 0o1000 != 0);
        let name = name(part).filter(|_| is_roots && is_closed && (from_root || is_last));
        let Some(name) = name else {
            sys::close(folder);
            return None;
        };
        if is_last {
            return Some(Place { folder, name });
        }
        let next = open(folder, &name);
        sys::close(folder);
        folder = next?;
    }
}

fn open(from: i32, name: &[u8]) -> Option<i32> {
    let arguments = [argument(from), name.as_ptr().addr(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0, 0, 0];
    // SAFETY: the callers' names end with NUL.
    let fd = unsafe { sys::call(number::OPENAT, arguments) };
    (fd >= 0).then_some(fd as i32)
}

fn is_root(folder: i32) -> bool {
    let Some(root) = open(AT_FDCWD, b"/\0") else { return false };
    let same = match (sys::stat(root), sys::stat(folder)) {
        (Some(root), Some(folder)) => (root.device, root.inode) == (folder.device, folder.inode),
        _ => false,
    };
    sys::close(root);
    same
}

fn name(part: &[u8]) -> Option<[u8; NAME + 1]> {
    let mut name = [0; NAME + 1];
    if part == b".." || part.len() > NAME {
        return None;
    }
    name.iter_mut().zip(part).for_each(|(slot, byte)| *slot = *byte);
    Some(name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn is_trusted(path: &str) -> bool {
        place(AT_FDCWD, path.as_bytes()).is_some()
    }

    #[test]
    fn only_what_root_alone_can_change_is_trusted() {
        assert!(is_trusted("/usr/lib/x.cr.1.ghost"));
        assert!(!is_trusted("/tmp/x") && !is_trusted("/usr/../etc/x") && !is_trusted("/") && !is_trusted(""));
        assert!(!is_trusted("/nowhere/x"));
        if !rekindle_testing::root() {
            return;
        }
        let dir = std::env::temp_dir().join(format!("rekindle-plugin-{}", std::process::id()));
        let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
        fs::create_dir(&dir).unwrap();
        fs::create_dir(dir.join("open")).unwrap();
        fs::create_dir(dir.join("theirs")).unwrap();
        fs::create_dir(dir.join("theirs/ours")).unwrap();
        symlink("/etc", dir.join("link")).unwrap();
        let mode = |name: &str, mode| fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
        mode("", 0o755);
        mode("open", 0o775);
        std::os::unix::fs::chown(dir.join("theirs"), Some(65534), Some(65534)).unwrap();
        let own = fs::File::open(dir.join("theirs/ours")).unwrap();
        let found = [
            is_trusted(&path("x")),
            is_trusted(&path("open/x")),
            is_trusted(&path("theirs/x")),
            is_trusted(&path("theirs/ours/x")),
            is_trusted(&path("link/x")),
            place(own.as_raw_fd(), b"x").is_some(),
            place(own.as_raw_fd(), b"x/y").is_some(),
        ];
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, [true, false, false, false, false, true, false]);
    }
}
