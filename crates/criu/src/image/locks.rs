//! File locks that a restore would lose.
//!
//! CRIU (4.2) takes a process's locks again, and after that maps its files with temporary descriptors, which it then
//! closes (`restore_mapping` in criu/pie/restorer.c). A process that closes any descriptor of a file loses all its
//! POSIX locks on that file (fcntl(2)). So locks on files that are also mapped are lost: for example SQLite's on the
//! index of a write-ahead log, and then two processes would write to the same place. `parts::locks` of the engine makes
//! the processes take them again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::descriptors::table_of;
use super::devices::{MM, images};
use super::{Error, FILES, Records, absolute, damaged, names, remaps};
use crate::proto::{FileEntry, FileLockEntry, MmEntry};
use rekindle_os::beneath::Beneath;
use rekindle_os::ptrace::PosixLock;

const FILE_LOCKS: u32 = 0x5432_3616;
/// `FL_POSIX` of criu/include/file-lock.h. Other kinds of locks belong to the open file, and are not lost.
const POSIX: u32 = 1;
/// `VMA_FILE_PRIVATE` and `VMA_FILE_SHARED`.
const OF_A_FILE: u32 = 1 << 6 | 1 << 7;

/// A lock that a restore would lose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostLock {
    /// The pid of the process that has the lock, as it sees itself.
    pub pid: i32,
    /// The process's descriptor of the file.
    pub fd: i32,
    /// The file.
    pub path: PathBuf,
    /// The locks that it has on the file.
    pub lock: PosixLock,
}

/// The locks that a restore loses, and the affected processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LostLocks {
    /// The locks.
    pub locks: Vec<LostLock>,
    /// The pids of the processes that use one of these files, as they see themselves. While a lock is lost, any of them
    /// could take it.
    pub users: BTreeSet<i32>,
}

/// The locks of the image that a restore loses.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn lost_locks(dir: &Beneath) -> Result<LostLocks, Error> {
    let path_of_locks = dir.join("filelocks.img");
    if !path_of_locks.is_there() {
        return Ok(LostLocks::default());
    }
    let locks: Vec<FileLockEntry> = Records::open(path_of_locks.clone(), FILE_LOCKS)?.all()?;
    let locks = locks.into_iter().filter(|lock| lock.flag & POSIX != 0);
    let (mut found, mut files): (Vec<LostLock>, Option<_>) = (Vec::new(), None);
    let mut locked = BTreeSet::new();
    for lock in locks {
        let files = match &files {
            Some(files) => files,
            None => files.insert(all_files(dir)?),
        };
        let file =
            table_of(dir, lock.pid)?.iter().find(|entry| entry.fd.cast_signed() == lock.fd).map(|entry| entry.id);
        let Some(file) = file.and_then(|id| files.get(&id)) else { continue };
        let mapped = mapped_files(dir, lock.pid)?;
        if mapped.iter().filter_map(|id| files.get(id)).any(|mapped| mapped.same == file.same) {
            let kind = i16::try_from(lock.kind).map_err(|error| damaged(&path_of_locks, error.to_string()))?;
            let held = PosixLock { kind, start: lock.start, length: lock.length };
            found.push(LostLock { pid: lock.pid, fd: lock.fd, path: file.path.clone(), lock: held });
            locked.insert(file.same.clone());
        }
    }
    let mut lost = LostLocks { locks: found, users: BTreeSet::new() };
    if let (false, Some(files)) = (lost.locks.is_empty(), files) {
        lost.users = users(dir, &locked, &files)?;
    }
    Ok(lost)
}

/// What tells that two entries are of one file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Same {
    Name(PathBuf),
    /// A deleted file without another name, by the id of its content in the image.
    Ghost(u32),
}

/// A regular file of files.img.
struct File {
    same: Same,
    path: PathBuf,
}

/// All regular files, by their id.
fn all_files(dir: &Beneath) -> Result<BTreeMap<u32, File>, Error> {
    let named = |(id, path): (u32, PathBuf)| (id, File { same: Same::Name(path.clone()), path });
    let mut all: BTreeMap<u32, File> = names(dir)?.into_iter().map(named).collect();
    let ghosts: BTreeMap<u32, u32> =
        remaps(dir)?.iter().filter(|remap| remap.is_ghost()).map(|remap| (remap.orig_id, remap.remap_id)).collect();
    if ghosts.is_empty() {
        return Ok(all);
    }
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    all.extend(entries.iter().filter_map(|entry| {
        let (ghost, reg) = (ghosts.get(&entry.id)?, entry.reg.as_ref()?);
        Some((entry.id, File { same: Same::Ghost(*ghost), path: absolute(&reg.name) }))
    }));
    Ok(all)
}

/// The processes that have one of these files open or mapped.
fn users(dir: &Beneath, locked: &BTreeSet<Same>, files: &BTreeMap<u32, File>) -> Result<BTreeSet<i32>, Error> {
    let is_one = |id: &u32| files.get(id).is_some_and(|file| locked.contains(&file.same));
    let mut users = BTreeSet::new();
    for (pid, _) in images(dir, "ids-")? {
        let Ok(pid) = pid.parse() else { continue };
        if table_of(dir, pid)?.iter().any(|entry| is_one(&entry.id)) || mapped_files(dir, pid)?.iter().any(is_one) {
            users.insert(pid);
        }
    }
    Ok(users)
}

fn mapped_files(dir: &Beneath, pid: i32) -> Result<BTreeSet<u32>, Error> {
    let wanted = pid.to_string();
    let Some((_, path)) = images(dir, "mm-")?.into_iter().find(|(name, _)| *name == wanted) else {
        return Ok(BTreeSet::new());
    };
    let entries: Vec<MmEntry> = Records::open(path, MM)?.all()?;
    let mappings = entries.iter().flat_map(|entry| &entry.vmas).filter(|vma| vma.status & OF_A_FILE != 0);
    Ok(mappings.filter_map(|vma| u32::try_from(vma.shmid).ok()).collect())
}
