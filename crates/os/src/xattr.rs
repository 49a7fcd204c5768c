//! Extended attributes of files (xattr(7)).
//!
//! A descriptor that only finds a file (`O_PATH`) has none (`EBADF`); then they are reached through its name in /proc.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;

use rustix::fs::{
    XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, getxattr, listxattr, removexattr, setxattr,
};
use rustix::io::Errno;

/// The access control list of a file or folder (acl(5)).
pub const ACL: &str = "system.posix_acl_access";
/// The access control list that new files in a folder get.
pub const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The most that the kernel has of a value, and of all names together (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MOST: usize = 64 << 10;
/// Enough for most files.
const USUAL: usize = 1 << 10;

/// The names of those that a file has.
///
/// # Errors
/// That of listxattr(2). A file system without attributes is none.
pub fn names(file: &File) -> io::Result<Vec<OsString>> {
    let list = |buffer: &mut [u8]| match flistxattr(file, &mut *buffer) {
        Err(Errno::BADF) => listxattr(own(file), buffer),
        listed => listed,
    };
    let all = filled(list)?.unwrap_or_default();
    let names = all.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| OsString::from_vec(name.to_vec())).collect())
}

/// The value of one; `None` if the file does not have it.
///
/// # Errors
/// That of getxattr(2).
pub fn get(file: &File, name: &str) -> io::Result<Option<Vec<u8>>> {
    filled(|buffer| match fgetxattr(file, name, &mut *buffer) {
        Err(Errno::BADF) => getxattr(own(file), name, buffer),
        got => got,
    })
}

/// Sets one.
///
/// # Errors
/// That of setxattr(2).
pub fn set(file: &File, name: &str, value: &[u8]) -> io::Result<()> {
    match fsetxattr(file, name, value, XattrFlags::empty()) {
        Err(Errno::BADF) => Ok(setxattr(own(file), name, value, XattrFlags::empty())?),
        set => Ok(set?),
    }
}

/// Removes one, if the file has it.
///
/// # Errors
/// That of removexattr(2).
pub fn remove(file: &File, name: &str) -> io::Result<()> {
    let removed = match fremovexattr(file, name) {
        Err(Errno::BADF) => removexattr(own(file), name),
        removed => removed,
    };
    match removed {
        Err(error) if is_none(error) => Ok(()),
        removed => Ok(removed?),
    }
}

/// What `read` writes to a buffer that is large enough.
fn filled(mut read: impl FnMut(&mut [u8]) -> rustix::io::Result<usize>) -> io::Result<Option<Vec<u8>>> {
    for size in [USUAL, MOST] {
        let mut buffer = vec![0; size];
        match read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(Some(buffer));
            }
            Err(Errno::RANGE) => {}
            Err(error) if is_none(error) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::RANGE.into())
}

/// Whether the error says that there is no such attribute. Some sandboxes do not know the calls.
fn is_none(error: Errno) -> bool {
    matches!(error, Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS)
}

/// The name of a descriptor of ours.
fn own(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn attributes_are_read_and_written_through_any_descriptor() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("file");
        let open = File::create(&path).unwrap();
        let found = File::options().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
        for file in [&open, &found] {
            assert_eq!(get(file, "user.a").unwrap(), None);
            let long = vec![7; 3000];
            set(file, "user.a", b"one").unwrap();
            set(file, "user.b", &long).unwrap();
            let mut all = names(file).unwrap();
            all.sort();
            assert_eq!(all, ["user.a", "user.b"]);
            assert_eq!(get(file, "user.a").unwrap().unwrap(), b"one");
            assert_eq!(get(file, "user.b").unwrap().unwrap(), long);
            for name in ["user.a", "user.b", "user.b"] {
                remove(file, name).unwrap();
            }
            assert_eq!(names(file).unwrap(), [""; 0]);
        }
        // No attributes of this kind.
        let proc = File::open("/proc/self/status").unwrap();
        assert_eq!(get(&proc, ACL).unwrap(), None);
        remove(&proc, ACL).unwrap();
        set(&proc, "user.a", b"").unwrap_err();
    }
}
