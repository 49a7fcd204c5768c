//! Files are part of the state: before a restore they are put back to their state at the snapshot.
//!
//! A file that grew is cut to its size at the snapshot, and the tail is saved beside it as NAME.rolled-back.N. A small
//! file that is rewritten in place has its content in the image; the present file is saved as NAME.rolled-back.N and
//! replaced. CRIU refuses a file of another size (except those opened to append), and a log with lines from work that
//! is undone would be wrong.
//!
//! A file that does not exist any more is created from its content in the image. If the image does not contain it, or a
//! file is shorter than it was, the image cannot be used here: `check` says so before anything is changed. Missing
//! output files of the job do not prevent a restore.
//!
//! Work on the user's files is done with the user's rights. The user owns the folders, and could otherwise make root
//! change somebody else's file. A job may also have files in folders of other users. So no link of theirs is followed,
//! and no file of theirs is accepted in place of the file at the snapshot (`place`).

mod stand_in;

use std::collections::HashMap;
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::aside::{self, Aside};
use super::content::{self, Keeper, keep_rest};
use super::moved;
use super::place::{Astray, Place, Trusted, find};
use super::rights::{Maker, Rights};
use super::rollback::{Expiry, FileRollback, RollbackError, RolledBack, SWITCH, failed};
use super::tracked;
use crate::launch::identity::Identity;
use crate::launch::output::{Files, Held};
use rekindle_os::beneath::Beneath;
use rekindle_os::identity;
use rekindle_store::manifest::{Fifo, Folder, OpenFile, Owner, SavedLink, Stamp};
use rekindle_store::{Image, JobFolder, JobPath, Manifest};

pub(crate) use stand_in::stand_in;

/// `restart.changed-files`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangedFiles {
    /// Refuses a restore if a file changed whose content is not in the image.
    #[default]
    Refuse,
    /// Only reports the change.
    Warn,
}

/// Whether every file of the image can be put back. Changes nothing.
pub(crate) fn check(
    manifest: &Manifest,
    folder: &JobFolder,
    user: Option<&Identity>,
    changed: ChangedFiles,
) -> Result<(), RollbackError> {
    let trusted = Trusted::of(user);
    let folders = manifest.folders.iter().map(|folder| (&folder.path, folder.uid));
    let fifos = manifest.fifos.iter().map(|fifo| (&fifo.path, fifo.uid));
    for (path, then) in folders.chain(fifos) {
        // The job may have no use for a folder that cannot be reached.
        if let Err(error @ (RollbackError::Owner { .. } | RollbackError::Link { .. })) =
            with_rights(path, user, || present(path, then, trusted))
        {
            return Err(error);
        }
    }
    let files = manifest.open_files.iter().filter(|file| !is_of_the_store(file, manifest, folder));
    let mut theirs = files.filter(|file| moved::log_here(&file.path, manifest, folder).is_none());
    theirs.try_for_each(|file| match with_rights(&file.path, user, || check_one(file, changed, trusted)) {
        // It is moved aside.
        Err(error) if is_other_kind(&error) && can_be_made(file) && is_tracked(file, manifest) => Ok(()),
        checked => checked,
    })
}

fn is_tracked(file: &OpenFile, manifest: &Manifest) -> bool {
    manifest.tracked_folders.iter().any(|folder| file.group.as_ref() == Some(&folder.path))
}

/// Whether it is in the image only because the store is in a tracked folder. An image of an earlier version has such files.
fn is_of_the_store(file: &OpenFile, manifest: &Manifest, folder: &JobFolder) -> bool {
    let store = folder.store();
    file.path.starts_with(store)
        && is_tracked(file, manifest)
        && file.group.as_ref().is_some_and(|it| store.starts_with(it))
}

/// Whether a folder or a link is in the place of a file, or something else in the place of a folder.
fn is_other_kind(error: &RollbackError) -> bool {
    match error {
        RollbackError::NotAFile(_) => true,
        RollbackError::Io { source, .. } => source.kind() == io::ErrorKind::NotADirectory,
        _ => false,
    }
}

/// What is at the path of a folder or FIFO, if anything is. It must belong to its owner at the snapshot.
fn present(path: &Path, then: u32, trusted: Trusted) -> Result<Option<File>, RollbackError> {
    match find(path, trusted) {
        Ok(found) => {
            let now = found.metadata().map_err(failed("stat", path))?.uid();
            trusted.check(path, now, Some(then)).map(|()| Some(found))
        }
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(Astray::at("find", path)(error)),
    }
}

/// Warns of changed files that an image of an older rekindle does not put back.
pub(crate) fn warn_of_unknown(manifest: &Manifest, folder: &JobFolder) {
    let taken = SystemTime::from(manifest.taken);
    let theirs = manifest.open_files.iter().filter(|file| moved::log_here(&file.path, manifest, folder).is_none());
    let unknown: Vec<String> =
        theirs.filter(|file| is_unknown(file, taken)).map(|file| file.path.display().to_string()).collect();
    if let Some((named, more)) = unknown.split_at_checked(NAMED.min(unknown.len())).filter(|_| !unknown.is_empty()) {
        let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
        tracing::warn!(
            "image {} was made by an older rekindle, which did not save the content of files that the job rewrites: {}{more} \
             changed after the snapshot and may not match the job's memory",
            manifest.id,
            named.join(", ")
        );
    }
}

/// How many files a message names.
const NAMED: usize = 5;

/// Whether the job rewrites it, an older rekindle recorded neither its content nor its times, and it was changed after
/// the snapshot.
fn is_unknown(file: &OpenFile, taken: SystemTime) -> bool {
    let has_changed = |metadata: Metadata| metadata.modified().is_ok_and(|modified| modified > taken);
    let is_of_the_kernel = ["/proc", "/sys"].iter().any(|folder| file.path.starts_with(folder));
    let is_noted = file.part.is_some() || file.stamp.is_some() || file.append || is_of_the_kernel;
    !is_noted && std::fs::symlink_metadata(&*file.path).is_ok_and(has_changed)
}

fn check_one(file: &OpenFile, changed: ChangedFiles, trusted: Trusted) -> Result<(), RollbackError> {
    let path = &*file.path;
    let found = Place::of(path, trusted)
        .and_then(|place| Ok((std::fs::symlink_metadata(place.here()).map_err(Astray::Io)?, place)));
    let (metadata, place) = match found {
        Ok(found) => found,
        Err(error) if error.is_missing() => {
            return if can_be_made(file) { Ok(()) } else { Err(RollbackError::Gone(path.clone())) };
        }
        Err(error) => return Err(Astray::at("stat", path)(error)),
    };
    if !metadata.is_file() {
        return Err(RollbackError::NotAFile(path.clone()));
    }
    trusted.check_file(path, &metadata, file.owner)?;
    if let Some(then) = file.mode.filter(|then| *then != metadata.mode()) {
        let (before, now) = (then & 0o7777, metadata.mode() & 0o7777);
        // Without its content nothing gives its mode back, and only its owner can. Neither we nor CRIU could open it. Those
        // that the user could not write before either are only compared.
        let keeps = file.part.is_none() || !trusted.is(metadata.uid()) && then & 0o022 != 0;
        let is_closed = || keeps && is_denied(place.find().and_then(|found| found.change()));
        if without_access(then) != without_access(metadata.mode()) || is_closed() {
            return Err(RollbackError::Mode { path: path.clone(), then: before, now });
        }
        if file.part.is_none() {
            tracing::warn!("{} had mode {before:o} at the snapshot and keeps {now:o}", path.display());
        }
    }
    let then = file.stamp.filter(|_| file.part.is_none());
    if then.is_some_and(|then| then.differs(&Stamp::of(&metadata))) {
        match changed {
            ChangedFiles::Refuse => return Err(RollbackError::Changed(path.clone())),
            ChangedFiles::Warn => {
                tracing::warn!(
                    "{} changed after the snapshot and is left as it is (restart.changed-files)",
                    path.display()
                );
            }
        }
    }
    if file.part.is_none() && !file.append && metadata.size() < file.size {
        return Err(RollbackError::Shorter { path: path.clone(), had: file.size, has: metadata.size() });
    }
    Ok(())
}

fn is_denied(opened: io::Result<File>) -> bool {
    opened.is_err_and(|error| error.raw_os_error() == Some(libc::EACCES))
}

/// A mode without the bits that a restore gives back, or CRIU accepts as they are (`skip_file_rwx_check`). A restore that was
/// killed can have left others, too ([`lent`]).
fn without_access(mode: u32) -> u32 {
    mode & !0o777
}

/// The mode of a file while its owner may write it to put it back.
fn lent(mode: u32) -> u32 {
    mode | 0o600
}

/// Whether the file can be created with the mode at the snapshot, whose special bits CRIU compares.
fn can_be_made(file: &OpenFile) -> bool {
    file.part.is_some() && file.mode.is_some()
}

/// Runs `work` with the rights of `user`, if there is one.
fn with_rights<T: Send>(
    path: &Path,
    user: Option<&Identity>,
    work: impl FnOnce() -> Result<T, RollbackError> + Send,
) -> Result<T, RollbackError> {
    match user {
        Some(user) => {
            identity::with_file_rights(user.uid, user.gid, &user.groups, work).map_err(failed(SWITCH, path))?
        }
        None => work(),
    }
}

/// Creates the folders that the image needs and that were removed since; returns how many.
pub(crate) fn make_folders(manifest: &Manifest, user: Option<&Identity>) -> Result<usize, RollbackError> {
    let (mut made, maker) = (0, Maker::of(manifest, user));
    for folder in &manifest.folders {
        made += usize::from(with_rights(&folder.path, user, || make_folder(folder, maker))?);
    }
    Ok(made)
}

/// The place where a folder or FIFO is missing; `None` if something is there, or in the place of a folder above. An
/// existing file or folder is not ours to change: only in a tracked folder it is moved aside, later.
fn missing(path: &Path, then: u32, trusted: Trusted) -> Result<Option<Place<'_>>, RollbackError> {
    match present(path, then, trusted) {
        Ok(None) => {}
        Err(error) if !is_other_kind(&error) => return Err(error),
        Ok(Some(_)) | Err(_) => return Ok(None),
    }
    let place = Place::of(path, trusted).map_err(Astray::at("find", path))?;
    // It may be a link that leads nowhere.
    Ok(std::fs::symlink_metadata(place.here()).is_err().then_some(place))
}

fn make_folder(folder: &Folder, maker: Maker<'_>) -> Result<bool, RollbackError> {
    let path = &*folder.path;
    let Some(place) = missing(path, folder.uid, maker.trusted)? else { return Ok(false) };
    let owner = Some(Owner { uid: folder.uid, gid: folder.gid });
    content::make_folder(&place, Rights { mode: folder.mode, owner, attributes: folder.attributes }, maker)
}

/// Creates the FIFOs that the image needs and that were removed since; returns how many.
pub(crate) fn make_fifos(manifest: &Manifest, user: Option<&Identity>) -> Result<usize, RollbackError> {
    let (mut made, maker) = (0, Maker::of(manifest, user));
    for fifo in &manifest.fifos {
        made += usize::from(with_rights(&fifo.path, user, || make_fifo(fifo, maker))?);
    }
    Ok(made)
}

fn make_fifo(fifo: &Fifo, maker: Maker<'_>) -> Result<bool, RollbackError> {
    let path = &*fifo.path;
    // CRIU refuses what is there and is no FIFO.
    let Some(place) = missing(path, fifo.uid, maker.trusted)? else { return Ok(false) };
    let unfinished = content::unfinished(&place);
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
    nix::unistd::mkfifo(&unfinished, mode).map_err(io::Error::from).map_err(failed("mkfifo", path))?;
    let finish = || {
        // Another user of the folder can swap it for a link: chmod(2) would follow that.
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        let open = OpenOptions::new().read(true).custom_flags(flags).open(&unfinished).map_err(failed("open", path))?;
        if !open.metadata().map_err(failed("stat", path))?.file_type().is_fifo() {
            return Err(failed("mkfifo", path)(io::ErrorKind::AlreadyExists.into()));
        }
        let owner = Some(Owner { uid: fifo.uid, gid: fifo.gid });
        maker.give(&open, path, Rights { mode: fifo.mode, owner, attributes: fifo.attributes })?;
        match std::fs::hard_link(&unfinished, place.here()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(failed("link", path)(error)),
        }
    };
    let done = finish();
    let _ = std::fs::remove_file(&unfinished);
    done
}

/// Puts every file of the image back.
pub(crate) fn put_back(
    image: &Image,
    manifest: &Manifest,
    folder: &JobFolder,
    user: Option<&Identity>,
    output: &Files,
) -> Result<Vec<FileRollback>, RollbackError> {
    let mut done = Vec::new();
    let maker = Maker::of(manifest, user);
    for file in &manifest.mapped_files {
        let Some(copy) = &file.copy else { continue };
        let path = image.dir.join(&copy.part);
        let content = copy.part.open(&image.dir).map_err(failed("read", path.path()))?;
        let make = || content::make_read(file, &content, maker);
        if with_rights(&file.path, user, make)? {
            done.push(FileRollback::Made(file.path.to_path_buf()));
        }
    }
    let (mut asides, links, expiry) = (Vec::new(), Links::of(manifest), Expiry::of(manifest, folder));
    for tracked in &manifest.tracked_folders {
        let put = || {
            let mut aside = Aside::of(tracked, maker.trusted, expiry)?.without_store(folder.store());
            tracked::put_folder_back(&mut aside, maker).map(|()| aside)
        };
        asides.push(with_rights(&tracked.path, user, put)?);
    }
    for path in &manifest.absent_files {
        let moved = with_rights(path, user, || aside::move_aside(path, maker.trusted, expiry))?;
        done.extend(moved.map(FileRollback::Aside));
    }
    for file in manifest.open_files.iter().filter(|file| !is_of_the_store(file, manifest, folder)) {
        if let Some(path) = moved::log_here(&file.path, manifest, folder) {
            // Locked, so that a terminal shows what is cut before it shows what replaces it.
            let mut held = output.hold();
            done.extend(put_log_back(file, &path, &mut held)?);
            continue;
        }
        let content = match &file.part {
            Some(part) => {
                let path = image.dir.join(part);
                Some(part.open(&image.dir).map_err(failed("read", path.path()))?)
            }
            None => None,
        };
        let aside = asides.iter_mut().find(|aside| aside.is_for(file.group.as_ref()));
        let keeper = aside.map_or(Keeper::Beside(expiry), Keeper::Aside);
        let put = || put_one_back(file, content.as_ref(), keeper, maker, links.is_alone(file));
        done.extend(with_rights(&file.path, user, put)?);
    }
    for (tracked, aside) in manifest.tracked_folders.iter().zip(asides) {
        let path = &tracked.path;
        let kept = with_rights(path, user, || Ok(aside.finish()))?;
        done.retain(|done| !done.is_in(path));
        done.extend(kept.into_iter().map(|kept| FileRollback::Folder { path: path.to_path_buf(), kept }));
    }
    Ok(done)
}

/// Missing output files, removed or on another machine, must not prevent a restore.
fn put_log_back(file: &OpenFile, place: &Beneath, held: &mut Held<'_>) -> Result<Option<FileRollback>, RollbackError> {
    let path = place.path();
    let open = held.open(place).map_err(failed("open", path))?;
    let size = open.metadata().map_err(failed("stat", path))?.size();
    let rotated = || {
        let mut name = place.file_name().unwrap_or_default().to_owned();
        name.push(".1");
        place.with_file_name(name).is_there()
    };
    match size {
        size if size > file.size => {
            let kept = held.cut(place, file.size).map_err(failed("cut", path))?;
            Ok(kept.map(|kept| FileRollback::Cut(path.into(), kept)))
        }
        0 if file.size > 0 && !rotated() => Ok(Some(FileRollback::Begun(path.into(), file.size))),
        _ => Ok(None),
    }
}

/// How many files of the image had each stamp: those with the same one were names of one file. The inode alone would also be
/// that of a file on another file system.
struct Links(HashMap<(u64, u64, i64, i64), u32>);

impl Links {
    fn of(manifest: &Manifest) -> Links {
        let mut all = HashMap::new();
        for stamp in manifest.open_files.iter().filter_map(|file| file.stamp) {
            *all.entry(Links::key(&stamp)).or_default() += 1;
        }
        Links(all)
    }

    fn key(stamp: &Stamp) -> (u64, u64, i64, i64) {
        (stamp.inode, stamp.size, stamp.modified_ns, stamp.changed_ns)
    }

    fn is_alone(&self, file: &OpenFile) -> bool {
        file.stamp.is_some_and(|stamp| self.0.get(&Links::key(&stamp)).is_none_or(|count| *count < 2))
    }
}

/// Whether its name leads to another file than at the snapshot, which has other names too.
fn is_other_link(file: &OpenFile, now: &Metadata) -> bool {
    now.nlink() > 1 && file.stamp.is_some_and(|then| then.inode != now.ino())
}

fn put_one_back(
    file: &OpenFile,
    content: Option<&File>,
    keeper: Keeper<'_, '_>,
    maker: Maker<'_>,
    is_alone: bool,
) -> Result<Option<FileRollback>, RollbackError> {
    let (path, trusted) = (&*file.path, maker.trusted);
    let place = match Place::of(path, trusted) {
        Ok(place) => place,
        Err(error) if error.is_missing() && !can_be_made(file) => return Err(RollbackError::Gone(path.clone())),
        Err(error) => return Err(Astray::at("open", path)(error)),
    };
    let open = match (place.find().and_then(|found| found.change()), content) {
        (Ok(open), _) => open,
        (Err(error), Some(content)) if error.kind() == io::ErrorKind::NotFound && can_be_made(file) => {
            let made = content::make(&place, file, content, maker);
            return made.map(|()| Some(FileRollback::Made(path.clone())));
        }
        (Err(error), Some(content)) if is_write_protected(&error) => {
            return put_protected_back(&place, file, content, keeper, trusted);
        }
        (Err(source), _) => {
            let now = place.find().and_then(|found| found.metadata()).map(|found| found.mode() & 0o7777).ok();
            let then = file.mode.map(|then| then & 0o7777);
            return Err(match source.raw_os_error() {
                Some(libc::ENOENT) => RollbackError::Gone(path.clone()),
                Some(libc::ELOOP) => RollbackError::NotAFile(path.clone()),
                _ if source.kind() == io::ErrorKind::InvalidInput => RollbackError::NotAFile(path.clone()),
                // Neither could CRIU open it.
                Some(libc::EACCES) if then.is_some() && now.is_some() && then != now => RollbackError::Mode {
                    path: path.clone(),
                    then: then.unwrap_or_default(),
                    now: now.unwrap_or_default(),
                },
                _ => failed("open", path)(source),
            });
        }
    };
    let metadata = open.metadata().map_err(failed("stat", path))?;
    // The check and the changes are of the same open file: another file of that name can appear at any time.
    trusted.check_file(path, &metadata, file.owner)?;
    match content {
        Some(content) if is_alone && is_other_link(file, &metadata) => {
            let replaced = content::replace_link(&open, &place, file, content, maker, keeper)?;
            Ok(replaced.map(FileRollback::Kept))
        }
        Some(content) => {
            let set = |mode| open.set_permissions(Permissions::from_mode(mode));
            // Nobody else may read what is written for a moment. Only its owner can prevent that.
            let narrow = narrowed(file, metadata.mode());
            let is_narrow = narrow != metadata.mode() && set(narrow & 0o7777).is_ok();
            let replaced = content::replace(&open, &place, file, content, keeper);
            match &replaced {
                Ok(_) => give_mode(file, if is_narrow { narrow } else { metadata.mode() }, set),
                // It stays as it was.
                Err(_) if is_narrow => drop(set(metadata.mode() & 0o7777)),
                Err(_) => {}
            }
            Ok(replaced?.map(FileRollback::Kept))
        }
        None if metadata.size() > file.size => match cut(&open, &place, file.size) {
            // Its program appends, whatever its length.
            Err(RollbackError::NoCopy { .. }) if file.append => {
                tracing::warn!(
                    "{} keeps its last {} bytes, which were written after the snapshot: the job's user may create no file \
                     beside it to save them",
                    path.display(),
                    metadata.size() - file.size
                );
                Ok(None)
            }
            cut => cut.map(FileRollback::Kept).map(Some),
        },
        // Its owner rotated or emptied it; a program that appends is not affected.
        None if metadata.size() < file.size && !file.append => {
            Err(RollbackError::Shorter { path: path.clone(), had: file.size, has: metadata.size() })
        }
        None => Ok(None),
    }
}

/// Its present mode without the permissions that nobody had at the snapshot.
fn narrowed(file: &OpenFile, now: u32) -> u32 {
    now & (file.mode.unwrap_or(now) | !0o777)
}

/// Gives a file with content the mode of the snapshot. Only its owner can; CRIU opens it with another one, too.
fn give_mode(file: &OpenFile, now: u32, set: impl FnOnce(u32) -> io::Result<()>) {
    let Some(then) = file.mode.map(|then| then & 0o7777).filter(|then| *then != now & 0o7777) else { return };
    if let Err(error) = set(then) {
        let now = now & 0o7777;
        tracing::warn!("{} had mode {then:o} at the snapshot and keeps {now:o}: {error}", file.path.display());
    }
}

/// Whether a file that refuses to be opened for writing with this error may still be readable.
fn is_write_protected(error: &io::Error) -> bool {
    use io::ErrorKind::{ExecutableFileBusy, PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem | ExecutableFileBusy)
}

/// A file that cannot be opened for writing, as those of Git's object store or what root put into a tracked folder. The
/// job could not change it either; only if somebody else has is there something to do.
fn put_protected_back(
    place: &Place<'_>,
    file: &OpenFile,
    content: &File,
    keeper: Keeper<'_, '_>,
    trusted: Trusted,
) -> Result<Option<FileRollback>, RollbackError> {
    let path = place.path();
    let found = place.find().map_err(failed("open", path))?;
    let metadata = found.metadata().map_err(failed("stat", path))?;
    trusted.check_file(path, &metadata, file.owner)?;
    if found.read().is_ok_and(|present| content::is_same(&present, content)) {
        give_mode(file, metadata.mode(), |mode| found.set_mode(mode));
        return Ok(None);
    }
    // Its owner can lend the right to write it.
    let refused = |source| RollbackError::Protected { path: path.into(), source };
    found.set_mode(lent(narrowed(file, metadata.mode()))).map_err(refused)?;
    let replaced = match found.change() {
        Ok(open) => content::replace(&open, place, file, content, keeper),
        Err(error) => Err(refused(error)),
    };
    let then = file.mode.filter(|_| replaced.is_ok());
    found.set_mode(then.unwrap_or_else(|| metadata.mode())).map_err(failed("chmod", path))?;
    Ok(replaced?.map(FileRollback::Kept))
}

fn cut(file: &File, place: &Place<'_>, size: u64) -> Result<RolledBack, RollbackError> {
    let path = place.path();
    let (kept, bytes) = keep_rest(file, place, size)?;
    file.set_len(size).map_err(failed("truncate", path))?;
    Ok(RolledBack { path: path.into(), kept, bytes })
}

/// Gives deleted files the name by which CRIU will open them.
pub(crate) fn put_links_back(manifest: &Manifest, user: Option<&Identity>) -> Result<(), RollbackError> {
    let trusted = Trusted::of(user);
    let put = |link: &SavedLink| with_rights(&link.link, user, || put_link_back(link, trusted));
    let done = manifest.saved_links.iter().try_for_each(put);
    if done.is_err() {
        drop_links(manifest, user);
    }
    done
}

fn put_link_back(link: &SavedLink, trusted: Trusted) -> Result<(), RollbackError> {
    let [saved, place] = places(link, trusted)?;
    let owner = saved.find().and_then(|found| found.metadata()).map(|metadata| metadata.uid());
    match owner {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(RollbackError::Gone(link.saved.to_path_buf()));
        }
        owner => {
            let owner = owner.map_err(failed("stat", &link.saved))?;
            trusted.check(&link.saved, owner, link.owner.map(|owner| owner.uid))?;
        }
    }
    match std::fs::hard_link(saved.here(), place.here()) {
        // What a restore of this image has left, which was killed. Another file is never replaced: images of earlier
        // versions have the same names, and a restore of another job may be about to open this one.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_same_file(&saved, &place) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(RollbackError::InTheWay(link.link.to_path_buf()))
        }
        made => made.map_err(failed("link", &link.link)),
    }
}

/// Gives files the names back that the job had given them, where nothing else has such a name. A failure does not prevent the job
/// from running, and is reported.
pub(crate) fn put_names_back(manifest: &Manifest, user: Option<&Identity>) {
    let trusted = Trusted::of(user);
    for link in &manifest.saved_links {
        for name in &link.names {
            if let Err(error) = with_rights(name, user, || put_name_back(link, name, trusted)) {
                tracing::warn!("other processes of the job do not find {}: {error}", name.display());
            }
        }
    }
}

fn put_name_back(link: &SavedLink, name: &JobPath, trusted: Trusted) -> Result<(), RollbackError> {
    // Only beside the file itself.
    if name.parent() != link.saved.parent() {
        return Ok(());
    }
    let saved = Place::of(&link.saved, trusted).map_err(Astray::at("find", &link.saved))?;
    let place = Place::of(name, trusted).map_err(Astray::at("find", name))?;
    match std::fs::hard_link(saved.here(), place.here()) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !is_same_file(&saved, &place) => {
            tracing::warn!("{} is another file now: other processes of the job do not find theirs", name.display());
            Ok(())
        }
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed("link", name)(error)),
        _ => Ok(()),
    }
}

fn places(link: &SavedLink, trusted: Trusted) -> Result<[Place<'_>; 2], RollbackError> {
    let saved = Place::of(&link.saved, trusted).map_err(Astray::at("find", &link.saved))?;
    let place = Place::of(&link.link, trusted).map_err(Astray::at("find", &link.link))?;
    Ok([saved, place])
}

fn is_same_file(one: &Place<'_>, other: &Place<'_>) -> bool {
    let id = |place: &Place<'_>| {
        let metadata = place.find().and_then(|found| found.metadata()).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    id(one).is_some_and(|one| id(other) == Some(one))
}

/// Removes the names of [`put_links_back`].
pub(crate) fn drop_links(manifest: &Manifest, user: Option<&Identity>) {
    let trusted = Trusted::of(user);
    for link in &manifest.saved_links {
        let remove = || {
            let [saved, place] = places(link, trusted)?;
            match is_same_file(&saved, &place) {
                true => std::fs::remove_file(place.here()).map_err(failed("remove", &link.link)),
                false => Ok(()),
            }
        };
        // CRIU has removed it, or we may not remove it.
        let _ = with_rights(&link.link, user, remove);
    }
}

#[cfg(test)]
mod tests;
