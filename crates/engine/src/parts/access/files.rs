//! The files of a process: descriptors, mappings, its program, its working directory and its root.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::launch::identity::Identity;
use rekindle_criu::image::{Known, Unnamed, UnnamedFiles};
use rekindle_os::maps::{self, Mapping};
use rekindle_os::{process, rights};

/// Bits of a permission triple.
pub(crate) const READ: u32 = 4;
pub(crate) const WRITE: u32 = 2;
pub(crate) const EXECUTE: u32 = 1;

/// How a process has a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum How {
    /// A descriptor, including one with O_PATH.
    Open,
    Mapped,
    /// The working directory.
    Directory,
    Root,
    /// The executable.
    Program,
}

/// A file that a process has, under the path that the kernel reports.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Held {
    pub(crate) path: PathBuf,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) how: How,
    /// The access needed to open it in this way: bits of a permission triple, none for O_PATH.
    pub(crate) access: u32,
    pub(crate) mode: u32,
    owner: u32,
    group: u32,
    /// The number of its names.
    links: u64,
    /// What the image says about it, for a restored process.
    pub(crate) known: Known,
}

/// What the kernel adds to the name of a file that has it no more.
const DELETED: &[u8] = b" (deleted)";

impl Held {
    /// Whether its path looks as if it had none: a deleted file, or memory that is in no file system. A file can have
    /// such a name.
    pub(crate) fn seems_nameless(&self) -> bool {
        self.path.as_os_str().as_bytes().ends_with(DELETED)
    }

    /// Whether it is what a restore made for a file that the image has without a name. `memory` are the devices of memory
    /// that is in no file system.
    pub(crate) fn is_made_for(&self, unnamed: &Unnamed, when: When, memory: &[u64]) -> bool {
        let bytes = self.path.as_os_str().as_bytes();
        let Some(path) = bytes.strip_suffix(DELETED).map(|path| Path::new(OsStr::from_bytes(path))) else {
            return false;
        };
        match unnamed {
            Unnamed::Ghost(name) => {
                // Until CRIU has checked everything, it has a name of CRIU's (`NAME.cr.ID.ghost`).
                let most = if when == When::Unfinished { 1 } else { 0 };
                self.links <= most && self.is_named_as(name, path)
            }
            Unnamed::Memory => self.is_memory(memory),
            Unnamed::AioRing => self.how == How::Mapped && path == Path::new("/[aio]"),
            // It has a name.
            Unnamed::Link(_) => false,
        }
    }

    /// Whether it is memory that is in no file system.
    pub(crate) fn is_memory(&self, devices: &[u64]) -> bool {
        self.links == 0 && devices.contains(&self.device)
    }

    /// Whether CRIU has opened a ghost file under this path (criu 4.2, files-reg.c, `open_path`, `create_ghost_dentry`).
    fn is_named_as(&self, name: &Path, path: &Path) -> bool {
        // It takes another name if there is a file of this one.
        let mut instead = name.as_os_str().to_owned();
        instead.push(".cr_link");
        // And the next folder above if that of a folder is gone.
        let is_above = || path.parent().is_some_and(|above| name.starts_with(above));
        path == name || path == instead || (self.is_folder() && path.file_name() == name.file_name() && is_above())
    }

    /// Whether owner, group and mode allow it, as the kernel checks them; access control lists (ACL) are ignored.
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

    fn with(self, known: Known) -> Held {
        Held { known, ..self }
    }

    pub(crate) fn is_folder(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFDIR
    }
}

/// How far a restore is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// The processes have files and mappings of CRIU, too.
    Unfinished,
    /// They have what the image has, and nothing else.
    Finished,
}

/// Descriptors by the pid of their process, as it sees itself.
pub(crate) type Descriptors = BTreeMap<i32, BTreeSet<i32>>;

/// All files with a path that these processes have, each once; if descriptors are given, no others. With what the image
/// of restored processes says about them.
///
/// # Errors
/// When a file of a live process cannot be examined.
pub(crate) fn held(
    tree: &[i32],
    descriptors: Option<&Descriptors>,
    image: Option<&UnnamedFiles>,
) -> Result<BTreeSet<Held>, (i32, io::Error)> {
    let mut all = BTreeSet::new();
    for pid in tree {
        match held_by(*pid, descriptors, image, &mut all) {
            // It has ended or is about to, so it has no files.
            Err(_) if process::has_ended(*pid) => {}
            Err(error) => return Err((*pid, error)),
            Ok(()) => {}
        }
    }
    Ok(all)
}

fn held_by(
    pid: i32,
    descriptors: Option<&Descriptors>,
    image: Option<&UnnamedFiles>,
    all: &mut BTreeSet<Held>,
) -> io::Result<()> {
    let place = PathBuf::from(format!("/proc/{pid}"));
    let inner = process::inner_pid(pid);
    let known =
        |of: &dyn Fn(&UnnamedFiles, i32) -> Known| image.zip(inner).map_or(Known::Nothing, |(it, pid)| of(it, pid));
    let of_it = |all: &Descriptors| inner.and_then(|inner| all.get(&inner).cloned()).unwrap_or_default();
    let wanted = descriptors.map(of_it);
    let program = look(&place.join("exe"), How::Program, EXECUTE)?;
    let program_is = program.as_ref().map(|held| (held.device, held.inode));
    all.extend(program.map(|held| held.with(known(&UnnamedFiles::program))));
    let directory = look(&place.join("cwd"), How::Directory, EXECUTE)?;
    all.extend(directory.map(|held| held.with(known(&UnnamedFiles::directory))));
    all.extend(look(&place.join("root"), How::Root, EXECUTE)?);
    for entry in std::fs::read_dir(place.join("fd"))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if wanted.as_ref().is_some_and(|wanted| !wanted.contains(&number)) {
            continue;
        }
        let Some(flags) = unless_gone(process::open_flags(pid, number))? else { continue };
        let access = access_of(flags);
        let held = look(&entry.path(), How::Open, access)?;
        all.extend(held.map(|held| held.with(known(&|image, pid| image.descriptor(pid, number)))));
    }
    let maps = maps::read(pid)?;
    let shared: BTreeSet<String> =
        maps::mappings(&maps).filter(Mapping::is_shared).map(|mapping| mapping.range()).collect();
    for entry in std::fs::read_dir(place.join("map_files"))? {
        let entry = entry?;
        let Some(link) = unless_gone(std::fs::symlink_metadata(entry.path()))? else { continue };
        // The mode of the link says how the file was opened. Writes to a private mapping do not reach the file.
        let is_shared = entry.file_name().to_str().is_some_and(|range| shared.contains(range));
        let writes = link.permissions().mode() & 0o200 != 0 && is_shared;
        let access = if writes { READ | WRITE } else { READ };
        let held = match look(&entry.path(), How::Mapped, access) {
            // Only root of the initial user namespace can read this link, and no restore works elsewhere.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !rights::over_the_machine() => break,
            held => held?,
        };
        let Some(held) = held else { continue };
        // A program that may be executed need not be readable.
        if access != READ || program_is != Some((held.device, held.inode)) {
            let range = entry.file_name().to_str().and_then(maps::range);
            let of_range = |(start, end)| known(&|image, pid| image.mapping(pid, start, end));
            all.insert(held.with(range.map_or(Known::Nothing, of_range)));
        }
    }
    Ok(())
}

/// `None` for something without a path, such as a socket, and for a file that was closed meanwhile.
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
        links: metadata.nlink(),
        known: Known::Nothing,
    }))
}

/// A running process can close files or end between two calls.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        other => other.map(Some),
    }
}

fn access_of(flags: i32) -> u32 {
    match flags & (libc::O_ACCMODE | libc::O_PATH) {
        libc::O_RDONLY => READ,
        libc::O_WRONLY => WRITE,
        // Nothing can be read or written through it, but it gives access to what is below.
        flags if flags & libc::O_PATH != 0 => 0,
        _ => READ | WRITE,
    }
}
