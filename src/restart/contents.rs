//! The content of files, put back as it was at the snapshot.
//!
//! What is replaced is kept beside it as NAME.rolled-back.N: of a large file by its name alone, without a copy, and only
//! the newest of them. What lies in memory (tmpfs) is not kept. Files that appeared since in a tracked folder, or that would
//! be taken for a part of a database, are moved aside.

use std::ffi::OsString;
use std::fs::{self, File, FileTimes, Permissions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::rollback::{MOST_KEPT, RollbackError, RolledBack, failed, keep_rest, no_room, options};
use crate::store::JobPath;
use crate::store::manifest::{OpenFile, TrackedFolder, TrackedKind};
use crate::sys::blocks::Medium;
use crate::sys::durable::{self, Unfinished};
use crate::sys::sparse;

/// A file up to this size is kept by a copy, each time under another name; a larger one by its name alone.
const COPIED_UP_TO: u64 = 4 << 20;
/// Compared at once.
const STRETCH: usize = 1 << 20;

/// Gives a file the content that it had. Answers what of the present one is kept, where that differs.
pub(super) fn replace(
    present: &File,
    file: &OpenFile,
    content: &File,
    aside: Option<&Aside<'_>>,
) -> Result<Option<RolledBack>, RollbackError> {
    let path = &*file.path;
    let metadata = present.metadata().map_err(failed("stat", path))?;
    let size = content.metadata().map_err(failed("stat", path))?.size();
    if metadata.size() == size && is_equal(present, content).map_err(failed("read", path))? {
        return Ok(None);
    }
    let in_memory = Medium::of(present).map_err(failed("stat", path))? == Medium::Memory;
    let kept = if in_memory {
        RolledBack { path: path.clone(), kept: PathBuf::new(), bytes: 0 }
    } else if aside.is_some() || metadata.size() > COPIED_UP_TO && metadata.nlink() == 1 {
        let kept = match aside {
            Some(aside) => aside.place(path)?,
            None => free_name(path)?,
        };
        let kept = RolledBack { path: path.clone(), kept, bytes: metadata.size() };
        let mut new = OsString::from(durable::TEMP_PREFIX);
        new.push(path.file_name().unwrap_or_default());
        new.push(".restored");
        let new = Unfinished::in_place_of_leftover(&path.with_file_name(new)).map_err(no_room(path))?;
        fill(new.file(), path, content, size)?;
        // Only its owner's if we may not give it away: then it is the user's already.
        let _ = std::os::unix::fs::fchown(new.file(), Some(metadata.uid()), Some(metadata.gid()));
        new.file().set_permissions(metadata.permissions()).map_err(failed("chmod", path))?;
        durable::publish_file(path, &kept.kept).map_err(failed("rename", path))?;
        set_times(new.file(), file);
        new.replace(path).map_err(failed("rename", path))?;
        forget_older(path, &kept.kept);
        return Ok(Some(kept));
    } else {
        let (kept, bytes) = keep_rest(present, path, 0)?;
        RolledBack { path: path.clone(), kept, bytes }
    };
    // In place: other names and open descriptors of the file stay with it.
    present.set_len(0).map_err(failed("truncate", path))?;
    fill(present, path, content, size)?;
    set_times(present, file);
    Ok(Some(kept))
}

/// Makes a file that is not here.
pub(super) fn make(file: &OpenFile, content: &File, may_give: bool) -> Result<(), RollbackError> {
    let path = &*file.path;
    let made = options().create_new(true).open(path).map_err(failed("create", path))?;
    let size = content.metadata().map_err(failed("stat", path))?.size();
    fill(&made, path, content, size)?;
    if let Some(owner) = file.owner.filter(|_| may_give) {
        std::os::unix::fs::fchown(&made, Some(owner.uid), Some(owner.gid)).map_err(failed("chown", path))?;
    }
    let mode = Permissions::from_mode(file.mode.unwrap_or_default() & 0o7777);
    made.set_permissions(mode).map_err(failed("chmod", path))?;
    set_times(&made, file);
    Ok(())
}

fn fill(into: &File, path: &Path, content: &File, size: u64) -> Result<(), RollbackError> {
    sparse::copy(content, 0..size, into, 0).map_err(no_room(path))?;
    into.set_len(size).map_err(no_room(path))
}

/// Programs compare it with what they remember. One that does not get it back will do without.
fn set_times(file: &File, wanted: &OpenFile) {
    let Some(stamp) = wanted.stamp else { return };
    let since = Duration::from_nanos(u64::try_from(stamp.modified_ns).unwrap_or_default());
    let _ = file.set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + since));
}

/// Whether two files of one size have the same content.
fn is_equal(mut one: &File, mut other: &File) -> io::Result<bool> {
    let (mut here, mut there) = (vec![0; STRETCH], vec![0; STRETCH]);
    one.seek(SeekFrom::Start(0))?;
    other.seek(SeekFrom::Start(0))?;
    loop {
        let count = one.read(&mut here)?;
        if count == 0 {
            return Ok(true);
        }
        let (here, there) = (here.get(..count).unwrap_or_default(), there.get_mut(..count).unwrap_or_default());
        match other.read_exact(there) {
            Ok(()) if here == there => {}
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error),
            _ => return Ok(false),
        }
    }
}

fn rolled_back(path: &Path, n: u32) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".rolled-back.{n}"));
    PathBuf::from(name)
}

/// The first name beside a file that nothing has.
fn free_name(path: &Path) -> Result<PathBuf, RollbackError> {
    let mut names = (1..=MOST_KEPT).map(|n| rolled_back(path, n));
    let is_free = |name: &PathBuf| fs::symlink_metadata(name).is_err();
    names.find(is_free).ok_or_else(|| RollbackError::TooMany(path.into()))
}

/// Large ones would fill the disk: a job that is restored every hour has one each time.
fn forget_older(path: &Path, newest: &Path) {
    let older = (1..=MOST_KEPT).map(|n| rolled_back(path, n)).take_while(|name| fs::symlink_metadata(name).is_ok());
    for name in older.filter(|name| name != newest) {
        if fs::symlink_metadata(&name).is_ok_and(|found| found.is_file() && found.size() > COPIED_UP_TO) {
            let _ = fs::remove_file(name);
        }
    }
}

/// Moves a file aside that was not there at the snapshot. Answers where to, if it was there now.
pub(super) fn move_aside(path: &Path) -> Result<Option<RolledBack>, RollbackError> {
    let Some(metadata) = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file) else { return Ok(None) };
    let kept = free_name(path)?;
    durable::publish_file(path, &kept).map_err(failed("rename", path))?;
    Ok(Some(RolledBack { path: path.into(), kept, bytes: metadata.size() }))
}

/// Where what a tracked folder has too much is moved to: a folder beside it.
#[derive(Debug)]
pub(super) struct Aside<'a> {
    folder: &'a TrackedFolder,
    path: PathBuf,
}

impl<'a> Aside<'a> {
    /// It is made when something comes into it.
    pub(super) fn of(folder: &'a TrackedFolder) -> Result<Aside<'a>, RollbackError> {
        Ok(Aside { folder, path: free_name(&folder.path)? })
    }

    /// Whether this is where files of the group go.
    pub(super) fn is_for(&self, group: Option<&JobPath>) -> bool {
        group == Some(&self.folder.path)
    }

    /// The place of something below the folder, which it can be moved to.
    fn place(&self, path: &Path) -> Result<PathBuf, RollbackError> {
        let relative = path.strip_prefix(&**self.folder.path).map_err(|_| RollbackError::NotAFile(path.into()))?;
        let target = self.path.join(relative);
        let within = target.parent().unwrap_or(&self.path);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(within).map_err(no_room(within))?;
        Ok(target)
    }

    fn take(&self, path: &Path) -> Result<(), RollbackError> {
        fs::rename(path, self.place(path)?).map_err(failed("rename", path))
    }

    /// Removes those of earlier restores, where this one has something. Answers where that is.
    pub(super) fn finish(self) -> Option<PathBuf> {
        fs::symlink_metadata(&self.path).ok()?;
        let names = (1..=MOST_KEPT).map(|n| rolled_back(&self.folder.path, n));
        let older = names.take_while(|name| fs::symlink_metadata(name).is_ok()).filter(|name| *name != self.path);
        older.for_each(|name| drop(fs::remove_dir_all(name)));
        Some(self.path)
    }
}

/// Gives a folder the folders and links that it had, and moves aside what appeared in it since. Its files are put back after
/// that, as others are.
pub(super) fn put_folder_back(aside: &Aside<'_>, may_give: bool) -> Result<(), RollbackError> {
    let folder = aside.folder;
    for entry in &folder.entries {
        let path = &*entry.path;
        let present = fs::symlink_metadata(path).ok();
        let is_same = present.as_ref().is_some_and(|present| match &entry.kind {
            TrackedKind::File => present.is_file(),
            TrackedKind::Folder { .. } => present.is_dir(),
            TrackedKind::Link { target } => fs::read_link(path).is_ok_and(|now| now.to_str() == Some(target)),
            TrackedKind::Other => true,
        });
        if is_same {
            continue;
        }
        if present.is_some() {
            aside.take(path)?;
        }
        match &entry.kind {
            TrackedKind::Folder { mode, owner } => {
                fs::DirBuilder::new().mode(0o700).create(path).map_err(failed("mkdir", path))?;
                if may_give {
                    std::os::unix::fs::lchown(path, Some(owner.uid), Some(owner.gid)).map_err(failed("chown", path))?;
                }
                fs::set_permissions(path, Permissions::from_mode(mode & 0o7777)).map_err(failed("chmod", path))?;
            }
            TrackedKind::Link { target } => {
                std::os::unix::fs::symlink(target, path).map_err(failed("link", path))?;
            }
            TrackedKind::File | TrackedKind::Other => {}
        }
    }
    unknown(folder).map_err(failed("list", &folder.path))?.iter().try_for_each(|path| aside.take(path))
}

/// What is in a folder and was not. Of a folder that was not there, the folder alone.
fn unknown(folder: &TrackedFolder) -> io::Result<Vec<PathBuf>> {
    let known: std::collections::HashSet<&Path> = folder.entries.iter().map(|entry| entry.path.as_path()).collect();
    let (mut found, mut left) = (Vec::new(), vec![folder.path.to_path_buf()]);
    while let Some(within) = left.pop() {
        for entry in fs::read_dir(&within)? {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            match known.contains(path.as_path()) {
                true if kind.is_dir() => left.push(path),
                true => {}
                // What belongs to processes, not to the content.
                false if !(kind.is_file() || kind.is_dir() || kind.is_symlink()) => {}
                false => found.push(path),
            }
        }
    }
    Ok(found)
}
