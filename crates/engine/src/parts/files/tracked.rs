//! Puts a tracked folder back: its folders and links. Its files are put back afterwards, as all others.

use std::fs;
use std::io;
use std::os::unix::fs::{lchown, symlink};
use std::path::{Path, PathBuf};

use super::aside::{Aside, is_ours};
use super::content::make_folder;
use super::nameless::{is_of_a_dump, is_of_an_image};
use super::place::{Astray, Place, Trusted, find, own_folder, reached};
use super::rights::{Maker, Rights};
use super::rollback::{RollbackError, failed, temporary};
use rekindle_os::{durable, regular};
use rekindle_store::manifest::{Owner, TrackedFolder, TrackedKind};

/// Gives a folder the folders and links that it had, and moves aside what is new in it. Its files are put back
/// afterwards, as all others.
pub(crate) fn put_folder_back(aside: &mut Aside<'_>, maker: Maker<'_>) -> Result<(), RollbackError> {
    let (folder, trusted) = (aside.folder(), maker.trusted);
    for entry in &folder.entries {
        let path = &*entry.path;
        if aside.is_in_store(path) {
            continue;
        }
        let place = Place::of(path, trusted).map_err(Astray::at("find", path))?;
        let present = match fs::symlink_metadata(place.here()).ok() {
            // The path of the folder itself may lead through a link.
            Some(present) if present.is_symlink() && entry.path == folder.path => {
                let found = find(path, trusted);
                match found {
                    Err(error) if error.is_missing() => Some(present),
                    found => Some(found.map_err(Astray::at("find", path))?.metadata().map_err(failed("stat", path))?),
                }
            }
            present => present,
        };
        let is_same = present.as_ref().is_some_and(|present| match &entry.kind {
            TrackedKind::File => present.is_file(),
            TrackedKind::Folder { .. } => present.is_dir(),
            TrackedKind::Link { target, .. } => {
                fs::read_link(place.here()).is_ok_and(|now| now.to_str() == Some(target))
            }
            TrackedKind::Other => true,
        });
        if is_same {
            continue;
        }
        if present.is_some() {
            aside.take(path)?;
        }
        match &entry.kind {
            TrackedKind::Folder { mode, owner, attributes } => {
                let rights = Rights { mode: *mode, owner: Some(*owner), attributes: *attributes };
                make_folder(&place, rights, maker)?;
            }
            TrackedKind::Link { target, owner } => {
                make_link(&place, target, maker.owner(*owner), trusted).map_err(failed("link", path))?;
            }
            TrackedKind::File | TrackedKind::Other => {}
        }
    }
    let new = unknown(folder, aside).map_err(failed("list", &folder.path))?;
    new.iter().try_for_each(|path| aside.take_new(path))
}

/// Creates a link. It gets its name only when it has its owner: until then it would be one of root, which everybody
/// follows and whose target another user may have chosen.
fn make_link(place: &Place<'_>, target: &str, owner: Option<Owner>, trusted: Trusted) -> io::Result<()> {
    let Some(owner) = owner else { return symlink(target, place.here()) };
    let temp = durable::unforeseen(&place.beside(&temporary(place.name(), ".restored")));
    let workshop = own_folder(&temp, trusted)?.ok_or(io::ErrorKind::AlreadyExists)?;
    let link = reached(&workshop).join("link");
    let made = symlink(target, &link)
        .and_then(|()| lchown(&link, Some(owner.uid), Some(owner.gid)))
        .and_then(|()| durable::publish_file(&link, &place.here()));
    if made.is_err() {
        let _ = fs::remove_file(&link);
    }
    let _ = fs::remove_dir(&temp);
    made
}

/// What is in a folder now and was not at the snapshot. Of a new folder only the folder itself, without its content.
fn unknown(folder: &TrackedFolder, aside: &Aside<'_>) -> io::Result<Vec<PathBuf>> {
    // What is `Other` was not looked into: sockets, and folders that are closed to the job's user.
    let known: std::collections::HashMap<&Path, bool> =
        folder.entries.iter().map(|entry| (entry.path.as_path(), !matches!(entry.kind, TrackedKind::Other))).collect();
    let has_content = |within: &Path| known.keys().any(|path| path.parent() == Some(within));
    let (mut found, mut left) = (Vec::new(), vec![folder.path.to_path_buf()]);
    while let Some(within) = left.pop() {
        // It stays open while its entries are read.
        let listed = regular::Folder::at(&within).and_then(|open| Ok((open.entries()?, open)));
        let (entries, _open) = match listed {
            // An image of an earlier version has closed folders as any others, without content.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !has_content(&within) => continue,
            listed => listed?,
        };
        for entry in entries.into_iter().flatten() {
            let entry = entry?;
            let (path, kind) = (within.join(entry.file_name()), entry.file_type()?);
            match known.get(path.as_path()) {
                _ if aside.is_in_store(&path) => {}
                None if kind.is_dir() && aside.leads_to_store(&path) => left.push(path),
                Some(true) if kind.is_dir() => left.push(path),
                Some(_) => {}
                None if kind.is_dir() && is_ours(&entry.file_name()) => {}
                // This image, or one of another job, is restored from the file itself: the job writes to its other names.
                // Or another job is being dumped.
                None if !kind.is_dir() && (is_of_an_image(&entry.file_name()) || is_of_a_dump(&entry.file_name())) => {}
                // Sockets, FIFOs and devices belong to processes, not to the content.
                None if !(kind.is_file() || kind.is_dir() || kind.is_symlink()) => {}
                None => found.push(path),
            }
        }
    }
    Ok(found)
}
