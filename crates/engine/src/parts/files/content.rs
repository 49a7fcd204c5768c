//! Puts the content of files back to its state at the snapshot.
//!
//! Replaced content is saved beside the file as NAME.rolled-back.N. Of a large file only the blocks that differ are
//! saved, in a sparse file, and only the newest copy. Files in memory (tmpfs) are not saved. New files in a tracked
//! folder, or that a database would take for its own, are moved aside.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, FileTimes};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::aside::Aside;
use super::place::{Astray, Place, find, own_folder, reached};
use super::rights::{Maker, Rights, give_same};
use super::rollback::{
    Expiry, RollbackError, RolledBack, UNFORESEEN, failed, free_names, no_copy, no_room, shortened, temporary,
};
use rekindle_os::blocks::Medium;
use rekindle_os::durable::{self, Unfinished};
use rekindle_os::sparse;
use rekindle_store::manifest::{MappedFile, OpenFile};

/// A file up to this size is saved completely, each time under a new name.
const COPIED_UP_TO: u64 = 4 << 20;
/// Unit of comparison and of overwriting.
const BLOCK: usize = 64 << 10;

/// Gives a file the content that it had at the snapshot. Returns where the present content is saved, if it differs. The
/// file is always overwritten in place: other names and open descriptors stay with it, and SQLite compares the inode of
/// a database with the one it remembers.
pub(crate) fn replace(
    present: &File,
    place: &Place<'_>,
    file: &OpenFile,
    content: &File,
    keeper: Keeper<'_, '_>,
) -> Result<Option<RolledBack>, RollbackError> {
    let path = place.path();
    let size = content.metadata().map_err(failed("stat", path))?.size();
    let Some(changed) = Changed::of(present, content, path)? else { return Ok(None) };
    let kept = keeper.keep(present, place, &changed)?;
    for range in &changed.differ {
        overwrite(present, content, range.start..range.end.min(size)).map_err(no_room(path))?;
    }
    present.set_len(size).map_err(failed("truncate", path))?;
    set_times(present, file);
    Ok(Some(kept))
}

/// Where what a file has now is saved.
pub(crate) enum Keeper<'a, 'b> {
    /// Beside it.
    Beside(Expiry),
    /// In the folder for its tracked folder.
    Aside(&'a mut Aside<'b>),
}

impl Keeper<'_, '_> {
    fn keep(self, present: &File, place: &Place<'_>, changed: &Changed) -> Result<RolledBack, RollbackError> {
        let path = place.path();
        let in_memory = Medium::of(present).map_err(failed("stat", path))? == Medium::Memory;
        let (kept, bytes) = match self {
            _ if in_memory => (PathBuf::new(), 0),
            Keeper::Beside(_) if changed.metadata.size() <= COPIED_UP_TO => keep_rest(present, place, 0)?,
            _ => self.keep_blocks(present, place, changed)?,
        };
        Ok(RolledBack { path: path.into(), kept, bytes })
    }

    /// Saves the blocks that differ, each at its offset in a sparse file, on the disk before any of them is overwritten.
    /// This takes as much space as the job has changed since, and older copies are removed.
    fn keep_blocks(
        self,
        present: &File,
        place: &Place<'_>,
        Changed { metadata, differ }: &Changed,
    ) -> Result<(PathBuf, u64), RollbackError> {
        let path = place.path();
        let (within, name, kept, expiry) = match self {
            Keeper::Aside(aside) => {
                let (within, kept) = aside.keep(path)?;
                (Some(within), place.name().to_os_string(), kept, None)
            }
            Keeper::Beside(expiry) => {
                let name = free_name(place)?;
                let kept = path.with_file_name(&name);
                (None, name, kept, Some(expiry))
            }
        };
        let beside =
            |name: &OsStr| within.as_ref().map_or_else(|| place.beside(name), |within| reached(within).join(name));
        let temp = beside(&temporary(place.name(), ".rolled-back"));
        let mut copy = Unfinished::in_place_of_leftover(&temp).map_err(no_copy(path))?;
        let mut bytes = 0;
        for range in differ {
            bytes += sparse::copy(present, range.clone(), copy.file(), range.start).map_err(no_room(path))?;
        }
        copy.file().set_len(metadata.size()).map_err(no_room(path))?;
        give_same(copy.file(), present, metadata, path)?;
        copy.publish(&beside(&name)).map_err(no_room(path))?;
        if let Some(expiry) = expiry {
            forget_older(place, &name, expiry);
        }
        Ok((kept, bytes))
    }
}

/// The same for a name that has been given to another file since, which has other names too: what they have stays as it
/// is, and this name gets a file of its own again.
pub(crate) fn replace_link(
    present: &File,
    place: &Place<'_>,
    file: &OpenFile,
    content: &File,
    maker: Maker<'_>,
    keeper: Keeper<'_, '_>,
) -> Result<Option<RolledBack>, RollbackError> {
    let changed = Changed::of(present, content, place.path())?;
    let kept = changed.map(|changed| keeper.keep(present, place, &changed)).transpose()?;
    make(place, file, content, maker).map(|()| kept)
}

/// A file that differs from its content at the snapshot.
struct Changed {
    metadata: fs::Metadata,
    /// Where, up to the end of the longer one.
    differ: Vec<Range<u64>>,
}

impl Changed {
    /// `None` if it does not differ.
    fn of(present: &File, content: &File, path: &Path) -> Result<Option<Changed>, RollbackError> {
        let metadata = present.metadata().map_err(failed("stat", path))?;
        let size = content.metadata().map_err(failed("stat", path))?.size();
        let differ = differences(present, content, metadata.size().max(size)).map_err(failed("compare", path))?;
        let has_changed = !differ.is_empty() || metadata.size() != size;
        Ok(has_changed.then_some(Changed { metadata, differ }))
    }
}

/// Whether a file has the content that it had at the snapshot. One that cannot be read counts as changed.
pub(crate) fn is_same(present: &File, content: &File) -> bool {
    let sizes = present.metadata().and_then(|present| Ok((present.size(), content.metadata()?.size())));
    sizes.is_ok_and(|(now, then)| {
        now == then && differences(present, content, now).is_ok_and(|differ| differ.is_empty())
    })
}

/// The blocks below `end` that differ. Beyond the end of a file there are zeros: a hole is equal to them, data is not.
fn differences(present: &File, content: &File, end: u64) -> io::Result<Vec<Range<u64>>> {
    let (mut here, mut there) = (vec![0; BLOCK], vec![0; BLOCK]);
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    loop {
        let data = [sparse::first_data(present, at, end)?, sparse::first_data(content, at, end)?];
        let Some(start) = data.into_iter().flatten().min() else { return Ok(found) };
        let block = start..start.saturating_add(BLOCK as u64).min(end);
        read_block(present, &block, &mut here)?;
        read_block(content, &block, &mut there)?;
        if here != there {
            match found.last_mut() {
                Some(last) if last.end == block.start => last.end = block.end,
                _ => found.push(block.clone()),
            }
        }
        at = block.end;
    }
}

/// Reads a block; the part beyond the end of the file is zero.
fn read_block(file: &File, block: &Range<u64>, buffer: &mut [u8]) -> io::Result<()> {
    buffer.fill(0);
    let length = usize::try_from(block.end - block.start).map_err(io::Error::other)?;
    let mut done = 0;
    while done < length {
        match file.read_at(buffer.get_mut(done..length).unwrap_or_default(), block.start + done as u64) {
            Ok(0) => return Ok(()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn overwrite(present: &File, content: &File, range: Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; BLOCK];
    let mut at = range.start;
    while at < range.end {
        let block = at..at.saturating_add(BLOCK as u64).min(range.end);
        read_block(content, &block, &mut buffer)?;
        let length = usize::try_from(block.end - block.start).map_err(io::Error::other)?;
        present.write_all_at(buffer.get(..length).unwrap_or_default(), at)?;
        at = block.end;
    }
    Ok(())
}

/// Copies what follows `from` to a new file beside `place`, on the disk before anything is cut. Holes stay holes: a job
/// can make a file longer than any disk. An unfinished copy of a crash is replaced by the next.
pub(crate) fn keep_rest(file: &File, place: &Place<'_>, from: u64) -> Result<(PathBuf, u64), RollbackError> {
    let path = place.path();
    let metadata = file.metadata().map_err(failed("stat", path))?;
    let temp = place.beside(&temporary(place.name(), ".rolled-back"));
    let mut copy = Unfinished::in_place_of_leftover(&temp).map_err(no_copy(path))?;
    let bytes = metadata.size().saturating_sub(from);
    sparse::copy(file, from..metadata.size(), copy.file(), 0).map_err(no_room(path))?;
    copy.file().set_len(bytes).map_err(no_room(path))?;
    give_same(copy.file(), file, &metadata, path)?;
    for name in free_names(place) {
        match copy.publish(&place.beside(&name)) {
            Ok(()) => return Ok((path.with_file_name(name), bytes)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(no_room(path)(error)),
        }
    }
    Err(RollbackError::TooMany(path.into()))
}

/// Creates a missing file, or replaces one. It gets its name only when it is complete, with all its rights: nobody reads
/// an incomplete one. If the power fails, it can be without its content; the next restore puts that back.
pub(crate) fn make(place: &Place<'_>, file: &OpenFile, content: &File, maker: Maker<'_>) -> Result<(), RollbackError> {
    write(place, file, content, maker)?.replace(&place.here()).map_err(failed("rename", place.path()))
}

fn write(place: &Place<'_>, file: &OpenFile, content: &File, maker: Maker<'_>) -> Result<Unfinished, RollbackError> {
    let path = place.path();
    let temp = place.beside(&temporary(place.name(), ".restored"));
    let unfinished = Unfinished::in_place_of_leftover(&temp).map_err(failed("create", path))?;
    let made = unfinished.file();
    let size = content.metadata().map_err(failed("stat", path))?.size();
    fill(made, path, content, size)?;
    let rights = Rights { mode: file.mode.unwrap_or_default(), owner: file.owner, attributes: file.attributes };
    maker.give(made, path, rights)?;
    set_times(made, file);
    Ok(unfinished)
}

/// Creates a missing file that the job only reads. Returns whether it was missing.
pub(crate) fn make_read(file: &MappedFile, content: &File, maker: Maker<'_>) -> Result<bool, RollbackError> {
    let Some(copy) = &file.copy else { return Ok(false) };
    let trusted = maker.trusted;
    let place = Place::of(&file.path, trusted).map_err(Astray::at("find", &file.path))?;
    // It was compared with the image before. CRIU opens it through a link, too.
    match find(&file.path, trusted) {
        Ok(present) => {
            let now = present.metadata().map_err(failed("stat", &file.path))?;
            let then = file.owner.unwrap_or(copy.owner);
            return trusted.check(&file.path, now.uid(), Some(then.uid)).map(|()| false);
        }
        // A link that leads nowhere is not ours to change.
        Err(error) if error.is_missing() && fs::symlink_metadata(place.here()).is_ok() => return Ok(false),
        Err(error) if error.is_missing() => {}
        Err(error) => return Err(Astray::at("find", &file.path)(error)),
    }
    let wanted = OpenFile {
        mode: Some(file.mode.unwrap_or(0o100_644)),
        owner: Some(copy.owner),
        stamp: Some(copy.stamp),
        attributes: copy.attributes,
        ..OpenFile::new(file.path.clone(), file.size)
    };
    let made = write(&place, &wanted, content, maker)?;
    // The next restore accepts it only if its content is right.
    made.file().sync_all().map_err(failed("sync", &file.path))?;
    made.replace(&place.here()).map_err(failed("rename", &file.path))?;
    Ok(true)
}

fn fill(into: &File, path: &Path, content: &File, size: u64) -> Result<(), RollbackError> {
    sparse::copy(content, 0..size, into, 0).map_err(no_room(path))?;
    into.set_len(size).map_err(no_room(path))
}

/// Programs compare the time stamp with a stored one. If it cannot be set, the job continues with another one.
fn set_times(file: &File, wanted: &OpenFile) {
    let Some(stamp) = wanted.stamp else { return };
    let since = Duration::from_nanos(u64::try_from(stamp.modified_ns).unwrap_or_default());
    let _ = file.set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + since));
}

/// The first unused name beside a file.
fn free_name(place: &Place<'_>) -> Result<OsString, RollbackError> {
    free_names(place).next().ok_or_else(|| RollbackError::TooMany(place.path().into()))
}

/// Removes older large copies. They would fill the disk: a job that is restored every hour makes one each time.
fn forget_older(place: &Place<'_>, newest: &OsStr, expiry: Expiry) {
    for name in expiry.outdated(place, newest).into_iter().map(|name| place.beside(&name)) {
        if fs::symlink_metadata(&name).is_ok_and(|found| found.is_file() && found.size() > COPIED_UP_TO) {
            let _ = fs::remove_file(name);
        }
    }
}

/// Creates a folder. It gets its name only with all its rights: a restore that finds the name does not look at them.
/// Returns false if something else has the name by now.
pub(super) fn make_folder(place: &Place<'_>, rights: Rights, maker: Maker<'_>) -> Result<bool, RollbackError> {
    let path = place.path();
    let temp = unfinished(place);
    let made = own_folder(&temp, maker.trusted).map_err(failed("mkdir", path))?;
    let made = made.ok_or_else(|| failed("mkdir", path)(io::ErrorKind::AlreadyExists.into()))?;
    let done = maker.give(&made, path, rights).and_then(|()| match durable::publish_dir(&temp, &place.here()) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        published => published.map(|()| true).map_err(failed("rename", path)),
    });
    if !matches!(done, Ok(true)) {
        let _ = fs::remove_dir(&temp);
    }
    done
}

/// The name of a folder or FIFO until it has its rights. Removes the leftover of a crash. What another user has put there
/// in a folder such as /tmp stays.
pub(super) fn unfinished(place: &Place<'_>) -> PathBuf {
    const SUFFIX: &str = ".rekindle";
    let mut name = OsString::from(".");
    name.push(shortened(place.name(), name.len() + SUFFIX.len() + UNFORESEEN));
    name.push(SUFFIX);
    let usual = place.beside(&name);
    let _ = fs::remove_file(&usual);
    let _ = fs::remove_dir(&usual);
    if fs::symlink_metadata(&usual).is_ok() { durable::unforeseen(&usual) } else { usual }
}
