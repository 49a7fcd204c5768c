//! The files of a process: descriptors, mappings, its program, its working directory and its root.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::launch::identity::Identity;
use rekindle_os::{process, rights};

/// Bits of a permission triple.
pub(crate) const READ: u32 = 4;
pub(crate) const WRITE: u32 = 2;
pub(crate) const EXECUTE: u32 = 1;

/// How a process has a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum How {
    /// A descriptor, one with O_PATH too.
    Open,
    Mapped,
    /// The working directory.
    Directory,
    Root,
    /// The executable.
    Program,
}

/// A file that a process has, under the path that the kernel says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Held {
    pub(crate) path: PathBuf,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) how: How,
    /// What it takes to open it so: bits of a permission triple, none for O_PATH.
    pub(crate) access: u32,
    pub(crate) mode: u32,
    owner: u32,
    group: u32,
}

impl Held {
    /// Whether no path leads to it: what lost its name, and memory that is in no file system.
    pub(crate) fn is_nameless(&self) -> bool {
        self.path.as_os_str().as_bytes().ends_with(b" (deleted)")
    }

    /// By owner, group and others, as the kernel does it; lists of further users (ACL) are not looked at.
    pub(crate) fn lets(&self, user: &Identity) -> bool {
        let bits = if user.uid == self.owner {
            self.mode >> 6
        } else if user.gid == self.group || user.groups.contains(&self.group) {
            self.mode >> 3
        } else {
            self.mode
        };
        bits & self.access == self.access
    }

    pub(crate) fn is_folder(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFDIR
    }
}

/// All that these processes have and that has a path, each once.
///
/// # Errors
/// When something of a process that lives cannot be looked at: then nothing is known of it.
pub(crate) fn held(tree: &[i32]) -> Result<BTreeSet<Held>, (i32, io::Error)> {
    let mut all = BTreeSet::new();
    for pid in tree {
        match held_by(*pid, &mut all) {
            // It has ended, or is about to: it has nothing any more.
            Err(_) if process::state(*pid).is_none_or(|state| matches!(state, 'Z' | 'X')) => {}
            Err(error) => return Err((*pid, error)),
            Ok(()) => {}
        }
    }
    Ok(all)
}

fn held_by(pid: i32, all: &mut BTreeSet<Held>) -> io::Result<()> {
    let place = PathBuf::from(format!("/proc/{pid}"));
    let program = look(&place.join("exe"), How::Program, EXECUTE)?;
    let program_is = program.as_ref().map(|held| (held.device, held.inode));
    all.extend(program);
    all.extend(look(&place.join("cwd"), How::Directory, EXECUTE)?);
    all.extend(look(&place.join("root"), How::Root, EXECUTE)?);
    for entry in std::fs::read_dir(place.join("fd"))? {
        let entry = entry?;
        let access = access_of(&place.join("fdinfo").join(entry.file_name()));
        let Some(access) = unless_gone(access)? else { continue };
        all.extend(look(&entry.path(), How::Open, access)?);
    }
    let shared = shared_ranges(&std::fs::read(place.join("maps"))?);
    for entry in std::fs::read_dir(place.join("map_files"))? {
        let entry = entry?;
        let Some(link) = unless_gone(std::fs::symlink_metadata(entry.path()))? else { continue };
        // The mode of the link is how the file was opened; of a private mapping nothing reaches the file.
        let writes = link.permissions().mode() & 0o200 != 0 && shared.contains(entry.file_name().as_bytes());
        let access = if writes { READ | WRITE } else { READ };
        let held = match look(&entry.path(), How::Mapped, access) {
            // The kernel shows it to root of the machine only, and no restore works elsewhere.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !rights::over_the_machine() => break,
            held => held?,
        };
        let Some(held) = held else { continue };
        // A program that may be executed need not be readable.
        if access != READ || program_is != Some((held.device, held.inode)) {
            all.insert(held);
        }
    }
    Ok(())
}

/// None for a thing without a path, such as a socket, and for what was closed meanwhile.
fn look(link: &Path, how: How, access: u32) -> io::Result<Option<Held>> {
    let Some(path) = unless_gone(std::fs::read_link(link))?.filter(|path| path.is_absolute()) else { return Ok(None) };
    let Some(metadata) = unless_gone(std::fs::metadata(link))? else { return Ok(None) };
    Ok(Some(Held {
        path,
        device: metadata.dev(),
        inode: metadata.ino(),
        how,
        access,
        mode: metadata.mode(),
        owner: metadata.uid(),
        group: metadata.gid(),
    }))
}

/// A process that runs closes files and ends between two looks.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        other => other.map(Some),
    }
}

fn access_of(info: &Path) -> io::Result<u32> {
    let text = std::fs::read_to_string(info)?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    let flags = flags.ok_or_else(|| io::Error::other("/proc/PID/fdinfo has an unexpected form"))?;
    Ok(match flags & (libc::O_ACCMODE | libc::O_PATH) {
        libc::O_RDONLY => READ,
        libc::O_WRONLY => WRITE,
        // Nothing can be read or written through it, but it is a way to what is below.
        flags if flags & libc::O_PATH != 0 => 0,
        _ => READ | WRITE,
    })
}

/// The names in /proc/PID/map_files of shared mappings: as in /proc/PID/maps, without the zeros in front.
fn shared_ranges(maps: &[u8]) -> BTreeSet<Vec<u8>> {
    let range = |line: &[u8]| -> Option<Vec<u8>> {
        let mut fields = line.split(|byte| *byte == b' ');
        let (range, rights) = (std::str::from_utf8(fields.next()?).ok()?, fields.next()?);
        let (from, to) = range.split_once('-')?;
        let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
        rights.ends_with(b"s").then(|| format!("{from:x}-{to:x}").into_bytes())
    };
    maps.split(|byte| *byte == b'\n').filter_map(range).collect()
}

/// The last part of a path; empty if there is none.
pub(crate) fn name_of(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}
