//! Removes a folder with everything below it, however deep it is.
//!
//! Others can nest folders deeper than any path is long, than a process may have descriptors, and than a stack has room
//! for. So nothing here is recursive, and only a few folders are open at a time: a folder that is deeper is moved up,
//! to the one that is being removed, and its turn comes later. What a crash leaves is still below that one.
//!
//! Every step is by descriptor and name, and through no link. What is mounted below is not emptied: it is an error.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::{own, unforeseen};

/// Folders that are open at a time. Those of an image are not as deep.
const OPEN: usize = 16;
/// How often something may have changed between two steps: others may add files all the time.
const CHANGES: u32 = 1000;

/// An open folder.
struct Level {
    folder: File,
    /// Its name in the one above.
    name: OsString,
    /// The names in it that are left.
    left: Vec<OsString>,
}

impl Level {
    fn open(above: &File, name: OsString) -> nix::Result<Level> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let folder = File::from(openat(above, name.as_os_str(), flags, Mode::empty())?);
        Ok(Level { folder, name, left: Vec::new() })
    }

    fn list(&mut self) -> io::Result<()> {
        self.left = fs::read_dir(own(&self.folder))?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<_>>()?;
        Ok(())
    }
}

/// What came of an attempt to remove a name.
enum Removed {
    Gone,
    /// It is a folder that is not empty.
    Full,
}

/// Removes what has the name, unless it is a folder with content.
fn remove(folder: &File, name: &OsStr) -> nix::Result<Removed> {
    let as_file = match unlinkat(folder, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(Removed::Gone),
        // Linux says EISDIR, and POSIX has EPERM, which has other reasons, too.
        Err(error @ (Errno::EISDIR | Errno::EPERM)) => error,
        Err(error) => return Err(error),
    };
    match unlinkat(folder, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(Removed::Gone),
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(Removed::Full),
        Err(Errno::ENOTDIR) => Err(as_file),
        Err(error) => Err(error),
    }
}

/// Removes the folder `name` in `parent`, or the link.
pub(super) fn remove_dir_all(parent: &File, name: &OsStr) -> io::Result<()> {
    let is_link = || fs::symlink_metadata(Path::new(&own(parent)).join(name)).is_ok_and(|meta| meta.is_symlink());
    let mut top = match Level::open(parent, name.to_owned()) {
        Err(Errno::ELOOP | Errno::ENOTDIR) if is_link() => {
            return Ok(unlinkat(parent, name, UnlinkatFlags::NoRemoveDir)?);
        }
        top => top?,
    };
    let mut changes = 0..CHANGES;
    loop {
        top.list()?;
        // Those in `top`, which is the lowest, each within the one before it.
        let mut open: Vec<Level> = Vec::new();
        loop {
            let at = open.last_mut().unwrap_or(&mut top);
            let Some(name) = at.left.pop() else {
                let Some(done) = open.pop() else { break };
                let above = open.last_mut().unwrap_or(&mut top);
                match remove(&above.folder, &done.name) {
                    Ok(Removed::Gone) => {}
                    // Others have put something into it.
                    Ok(Removed::Full) | Err(Errno::EISDIR) if changes.next().is_some() => above.left.push(done.name),
                    Ok(Removed::Full) => return Err(Errno::ENOTEMPTY.into()),
                    Err(error) => return Err(error.into()),
                }
                continue;
            };
            match remove(&at.folder, &name) {
                Ok(Removed::Gone) => continue,
                Ok(Removed::Full) => {}
                // Others exchanged it between the two attempts.
                Err(Errno::EISDIR) if changes.next().is_some() => {
                    at.left.push(name);
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            if open.len() < OPEN {
                let opened = Level::open(&open.last().unwrap_or(&top).folder, name);
                match opened {
                    Ok(mut level) => {
                        level.list()?;
                        open.push(level);
                    }
                    // Others moved it away, or put something in its place.
                    Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) if changes.next().is_some() => {}
                    Err(error) => return Err(error.into()),
                }
                continue;
            }
            let new = unforeseen(Path::new(".rm")).into_os_string();
            match renameat(&open.last().unwrap_or(&top).folder, name.as_os_str(), &top.folder, new.as_os_str()) {
                Ok(()) => top.left.push(new),
                Err(Errno::ENOENT) if changes.next().is_some() => {}
                Err(error) => return Err(error.into()),
            }
        }
        match unlinkat(parent, name, UnlinkatFlags::RemoveDir) {
            Err(Errno::ENOTEMPTY | Errno::EEXIST) if changes.next().is_some() => {}
            removed => return Ok(removed?),
        }
    }
}
