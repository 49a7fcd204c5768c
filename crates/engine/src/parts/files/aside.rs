//! Where what a restore replaces in a tracked folder is kept.
//!
//! It is moved to a folder that the restore creates: beside the tracked folder (`FOLDER.rolled-back.N`), or, if the job's
//! user may create none there or it is on another mount, in the tracked folder, or in the first folder below it where
//! that is possible (`.rekindle.rolled-back.N`). A folder of that name is no part of the tracked one: it is neither captured nor put back.
//!
//! Nobody else can have prepared the folder: it is new, and closed to all others. When everything is in it, it is given to
//! the owner of the folder whose content it has: a program of that owner may have to read all that it has in its folder,
//! as pg_basebackup does.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::{Path, PathBuf};

use super::place::{Astray, Place, Trusted, find, open_folder, own_folder, reached};
use super::rollback::{Expiry, RollbackError, RolledBack, failed, free_names, no_room};
use rekindle_os::durable;
use rekindle_os::mounts::{self, Mount};
use rekindle_os::regular;
use rekindle_store::JobPath;
use rekindle_store::manifest::TrackedFolder;

/// What our folders inside a tracked one are called, as if they were copies of a file of this name.
const WITHIN: &str = ".rekindle";

/// Whether a folder of this name inside a tracked one is ours.
pub(crate) fn is_ours(name: &OsStr) -> bool {
    let rest = name.as_bytes().strip_prefix(WITHIN.as_bytes());
    let number = rest.and_then(|rest| rest.strip_prefix(b".rolled-back."));
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

/// Where a folder of ours is created.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Spot {
    /// Beside the tracked folder.
    Beside,
    /// In it, or in a folder below it.
    In(PathBuf),
}

/// What is kept of a tracked folder.
#[derive(Debug)]
pub(crate) struct Aside<'a> {
    folder: &'a TrackedFolder,
    trusted: Trusted,
    /// The store, which may be in it.
    store: Option<&'a Path>,
    expiry: Expiry,
    /// The folders that this restore has created. There is none where none can be created.
    homes: Vec<(Spot, Option<Home>)>,
}

impl<'a> Aside<'a> {
    /// Folders are created when something is moved.
    pub(crate) fn of(folder: &'a TrackedFolder, trusted: Trusted, expiry: Expiry) -> Result<Aside<'a>, RollbackError> {
        Place::of(&folder.path, trusted).map_err(Astray::at("find", &folder.path))?;
        Ok(Aside { folder, trusted, store: None, expiry, homes: Vec::new() })
    }

    /// The same, but the store is not part of the folder: a restore would take newer images away.
    pub(crate) fn without_store(self, store: &'a Path) -> Aside<'a> {
        Aside { store: Some(store), ..self }
    }

    /// Whether it is the store, or in it.
    pub(super) fn is_in_store(&self, path: &Path) -> bool {
        self.store.is_some_and(|store| path.starts_with(store))
    }

    /// Whether the store is below it.
    pub(super) fn leads_to_store(&self, path: &Path) -> bool {
        self.store.is_some_and(|store| store.starts_with(path))
    }

    /// The tracked folder.
    pub(super) fn folder(&self) -> &'a TrackedFolder {
        self.folder
    }

    /// Whether files of the group are moved here.
    pub(crate) fn is_for(&self, group: Option<&JobPath>) -> bool {
        group == Some(&self.folder.path)
    }

    /// The folder to which a copy of this file is written, and its path there, for messages.
    pub(super) fn keep(&mut self, path: &Path) -> Result<(File, PathBuf), RollbackError> {
        for spot in self.spots(path) {
            if let Some(home) = self.home(&spot)? {
                home.is_used = true;
                return home.keep(path);
            }
        }
        Err(self.no_place(path))
    }

    /// Moves something of this path.
    pub(super) fn take(&mut self, path: &Path) -> Result<(), RollbackError> {
        let place = Place::of(path, self.trusted).map_err(Astray::at("find", path))?;
        if let Some(point) = mounts_in(&place).map_err(failed("stat", path))?.into_iter().next() {
            return Err(RollbackError::Mounted(point));
        }
        for spot in self.spots(path) {
            let Some(home) = self.home(&spot)? else { continue };
            let (folder, _) = home.keep(path)?;
            match fs::rename(place.here(), reached(&folder).join(place.name())) {
                // It is on another mount, which can be of the same file system.
                Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {}
                Err(error) if is_busy(&error) => return Err(RollbackError::Mounted(path.into())),
                Err(source) if is_refused(&source) => {
                    return Err(RollbackError::Unmovable { path: path.into(), source });
                }
                renamed => {
                    renamed.map_err(failed("rename", path))?;
                    home.is_used = true;
                    return Ok(());
                }
            }
        }
        Err(self.no_place(path))
    }

    /// Moves something that did not exist. What is mounted there since stays as it is: others may use it, too.
    pub(super) fn take_new(&mut self, path: &Path) -> Result<(), RollbackError> {
        match self.take(path) {
            Err(RollbackError::Mounted(point)) if point == path => {
                tracing::warn!(
                    "{} was mounted after the snapshot: it is left as it is, although {} is put back",
                    path.display(),
                    self.folder.path.display()
                );
                Ok(())
            }
            Err(error @ RollbackError::Mounted(_)) => match regular::Folder::at(path) {
                Ok(folder) => self.empty(path, &folder),
                Err(_) => Err(error),
            },
            taken => taken,
        }
    }

    fn empty(&mut self, path: &Path, folder: &regular::Folder) -> Result<(), RollbackError> {
        for entry in folder.entries().map_err(failed("list", path))?.into_iter().flatten() {
            let entry = entry.map_err(failed("list", path))?;
            if !is_ours(&entry.file_name()) {
                self.take_new(&path.join(entry.file_name()))?;
            }
        }
        Ok(())
    }

    /// Removes outdated folders of earlier restores beside those of this one. Returns the paths of this one's.
    pub(crate) fn finish(self) -> Vec<PathBuf> {
        let homes = self.homes.into_iter().filter_map(|(_, home)| home);
        homes.filter_map(|home| home.finish(self.expiry)).collect()
    }

    /// The places for something of this path, the best first: those on its file system.
    fn spots(&self, path: &Path) -> Vec<Spot> {
        let tracked = &**self.folder.path;
        let above = path.ancestors().skip(1).take_while(|above| above.starts_with(tracked));
        let mut spots: Vec<Spot> = above.map(|above| Spot::In(above.into())).collect();
        spots.push(Spot::Beside);
        spots.reverse();
        let device = |folder: &Path| Some(find(folder, self.trusted).ok()?.metadata().ok()?.dev());
        let own = path.parent().and_then(device);
        spots.sort_by_cached_key(|spot| match spot {
            Spot::Beside => tracked.parent().and_then(device) != own,
            Spot::In(folder) => device(folder) != own,
        });
        spots
    }

    fn no_place(&self, path: &Path) -> RollbackError {
        RollbackError::NoPlace { path: path.into(), folder: self.folder.path.to_path_buf() }
    }

    /// Our folder there; `None` if none can be created.
    fn home(&mut self, spot: &Spot) -> Result<Option<&mut Home>, RollbackError> {
        if !self.homes.iter().any(|(known, _)| known == spot) {
            let home = Home::make(spot, &self.folder.path, self.trusted)?;
            self.homes.push((spot.clone(), home));
        }
        let found = self.homes.iter_mut().find(|(known, _)| known == spot);
        Ok(found.and_then(|(_, home)| home.as_mut()))
    }
}

/// A folder of ours.
#[derive(Debug)]
struct Home {
    /// What it is named after.
    place: Place<'static>,
    name: OsString,
    folder: File,
    /// What is below this folder has the same relative path in ours.
    base: PathBuf,
    /// Whether something was moved to it.
    is_used: bool,
    /// The folders in it, by their relative paths: those that have the same path in the tracked folder.
    below: Vec<PathBuf>,
    trusted: Trusted,
}

impl Home {
    fn make(spot: &Spot, tracked: &Path, trusted: Trusted) -> Result<Option<Home>, RollbackError> {
        let (base, named) = match spot {
            Spot::Beside => (tracked.to_path_buf(), tracked.to_path_buf()),
            Spot::In(folder) => (folder.clone(), folder.join(WITHIN)),
        };
        let place = Place::of_own(named, trusted).map_err(Astray::at("find", tracked))?;
        let made = free_names(&place).find_map(|name| {
            let made = own_folder(&place.beside(&name), trusted).transpose()?;
            Some(made.map(|folder| (name, folder)))
        });
        match made {
            Some(Ok((name, folder))) => {
                Ok(Some(Home { place, name, folder, base, is_used: false, below: Vec::new(), trusted }))
            }
            Some(Err(error)) if is_refused(&error) => Ok(None),
            Some(Err(error)) => Err(no_room(tracked)(error)),
            None => Err(RollbackError::TooMany(tracked.into())),
        }
    }

    fn path(&self) -> PathBuf {
        self.place.path().with_file_name(&self.name)
    }

    fn keep(&mut self, path: &Path) -> Result<(File, PathBuf), RollbackError> {
        let relative = path.strip_prefix(&self.base).map_err(|_| RollbackError::NotAFile(path.into()))?;
        let mut at = self.folder.try_clone().map_err(failed("open", path))?;
        let mut shown = PathBuf::new();
        for name in relative.parent().into_iter().flat_map(Path::iter) {
            shown.push(name);
            let below = reached(&at).join(name);
            match DirBuilder::new().mode(0o700).create(&below) {
                Ok(()) => self.below.push(shown.clone()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(no_room(path)(error)),
            }
            at = open_folder(&below).map_err(failed("open", path))?;
        }
        let name = if relative.as_os_str().is_empty() { Path::new(self.place.name()) } else { relative };
        Ok((at, self.path().join(name)))
    }

    fn finish(self, expiry: Expiry) -> Option<PathBuf> {
        if self.is_used {
            remove_other_folders(&self.place, &self.name, expiry);
            // The outermost last: until then nobody else can enter.
            let inner = self.below.iter().map(|below| (reached(&self.folder).join(below), self.base.join(below)));
            for (ours, original) in inner.chain([(reached(&self.folder), self.base.clone())]) {
                let owner = find(&original, self.trusted).ok().and_then(|found| found.metadata().ok());
                // With the rights of the job's user, it belongs to that user.
                let _ = owner.map(|owner| chown(ours, Some(owner.uid()), Some(owner.gid())));
            }
            return Some(self.path());
        }
        let _ = fs::remove_dir_all(self.place.beside(&self.name));
        None
    }
}

/// Whether the error says that none can be created there by us. A name can be too long.
fn is_refused(error: &io::Error) -> bool {
    let codes = [libc::EACCES, libc::EPERM, libc::EROFS, libc::ENAMETOOLONG];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Whether the error says that something is mounted there.
fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}

/// Moves a file or a tracked folder aside that did not exist at the snapshot. Returns its new path, or `None` if there is
/// none. Folders that earlier restores moved aside are removed, as [`Expiry`] says. A folder that cannot be moved stays,
/// without its content.
pub(crate) fn move_aside(path: &Path, trusted: Trusted, expiry: Expiry) -> Result<Option<RolledBack>, RollbackError> {
    let place = match Place::of(path, trusted) {
        Ok(place) => place,
        Err(error) if error.is_missing() => return Ok(None),
        Err(error) => return Err(Astray::at("find", path)(error)),
    };
    let present = fs::symlink_metadata(place.here()).ok();
    let Some(metadata) = present.filter(|found| found.is_file() || found.is_dir()) else { return Ok(None) };
    if !mounts_in(&place).map_err(failed("stat", path))?.is_empty() {
        return move_content(path, trusted, expiry);
    }
    for name in free_names(&place) {
        match durable::publish_file(&place.here(), &place.beside(&name)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            // Of another user, in a folder such as /tmp: it could have been there before the snapshot, too.
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied && !trusted.accepts(metadata.uid(), Some(0)) =>
            {
                tracing::warn!(
                    "{} did not exist at the snapshot and belongs to user {}: it is left as it is",
                    path.display(),
                    metadata.uid()
                );
                return Ok(None);
            }
            Err(error) if metadata.is_dir() && (is_busy(&error) || is_refused(&error)) => {
                return move_content(path, trusted, expiry);
            }
            renamed => renamed.map_err(failed("rename", path))?,
        }
        if metadata.is_dir() {
            remove_other_folders(&place, &name, expiry);
        }
        return Ok(Some(RolledBack { path: path.into(), kept: path.with_file_name(name), bytes: metadata.size() }));
    }
    Err(RollbackError::TooMany(path.into()))
}

fn move_content(path: &Path, trusted: Trusted, expiry: Expiry) -> Result<Option<RolledBack>, RollbackError> {
    let job_path = JobPath::new(path).map_err(|_| RollbackError::NotAFile(path.into()))?;
    let folder = TrackedFolder { path: job_path, entries: Vec::new() };
    let mut aside = Aside::of(&folder, trusted, expiry)?;
    aside.empty(path, &regular::Folder::at(path).map_err(failed("list", path))?)?;
    let kept = aside.finish().into_iter().next();
    Ok(kept.map(|kept| RolledBack { path: path.into(), kept, bytes: 0 }))
}

/// The mount points below a folder: they would move with it, and what is in them would be removed with it.
fn mounts_in(place: &Place<'_>) -> io::Result<Vec<PathBuf>> {
    if !fs::symlink_metadata(place.here()).is_ok_and(|found| found.is_dir()) {
        return Ok(Vec::new());
    }
    mounts_below(&place.real()?).map(|all| all.into_iter().map(|below| place.path().join(below)).collect())
}

/// The same, with their paths from there.
fn mounts_below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let below = |mount: Mount| Some(mount.point.strip_prefix(folder).ok()?.to_path_buf());
    let all = mounts::of("self")?.into_iter().filter_map(below);
    Ok(all.filter(|below| !below.as_os_str().is_empty()).collect())
}

/// Removes folders of this name that earlier restores moved aside. One in which something is mounted stays.
fn remove_other_folders(place: &Place<'_>, newest: &OsStr, expiry: Expiry) {
    for name in expiry.outdated(place, newest) {
        let real = place.real().map(|real| real.with_file_name(&name));
        if real.and_then(|real| mounts_below(&real)).is_ok_and(|mounts| mounts.is_empty()) {
            let _ = fs::remove_dir_all(place.beside(&name));
        }
    }
}

#[cfg(test)]
mod tests;
