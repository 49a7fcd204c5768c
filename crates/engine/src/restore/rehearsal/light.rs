//! Makes an image light in the view of a rehearsal: the processes never run, so what they would read need not be there.
//!
//! Memory is left out of CRIU's files, landing files are empty, and the files of the job that CRIU opens are sparse
//! ([`stand_in`]). So a rehearsal costs the same for a job of any size.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::PathBuf;

use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, fstatfs};

use super::failure::Failure;
use crate::parts::files::moved::log_here;
use crate::parts::files::put_back::{self as files, stand_in};
use crate::restore::{Error, Request, recreate};
use crate::snapshot::CRIU_DIR;
use rekindle_criu as criu;
use rekindle_os::beneath::{Beneath, OWN_PREFIX};
use rekindle_store::{JobFolder, Manifest};

/// Takes the memory out of the image, which must be in the view.
pub(super) fn without_memory(images: &Beneath) -> Result<(), Failure> {
    let in_view = || -> io::Result<bool> { Ok(fstatfs(images.folder()?)?.filesystem_type() == OVERLAYFS_SUPER_MAGIC) };
    match in_view() {
        Ok(true) => criu::image::without_memory(images).map_err(Failure::of_image),
        // A change would be one of the image itself.
        Ok(false) => Err(Failure::NotTried(format!("no overlay can be mounted over {}", images.display()))),
        Err(error) => Err(Failure::NotTried(format!("cannot inspect {}: {error}", images.display()))),
    }
}

/// Puts empty files in the places of the job's logs: to open them for writing would be to copy them.
pub(super) fn empty_logs(manifest: &Manifest, folder: &JobFolder) -> Result<(), Failure> {
    let logs = manifest.open_files.iter().filter_map(|file| log_here(&file.path, manifest, folder));
    let output = ["stdout.log", "stderr.log"].map(OsString::from);
    let names: BTreeSet<OsString> = logs.filter_map(|log| Some(log.file_name()?.to_owned())).chain(output).collect();
    for log in names.iter().map(|name| folder.log_dir().join(name)) {
        empty(&log)
            .map_err(|error| Failure::NotTried(format!("cannot replace {} in the view: {error}", log.display())))?;
    }
    Ok(())
}

fn empty(log: &Beneath) -> io::Result<()> {
    let metadata = match log.metadata() {
        Ok(metadata) if metadata.is_file() => metadata,
        // Whoever opens it says so.
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let new = log.with_file_name(format!("{OWN_PREFIX}rehearsed"));
    let file = new.create_new(0o600)?;
    file.set_len(metadata.size())?;
    fchown(&file, Some(metadata.uid()), Some(metadata.gid()))?;
    file.set_permissions(std::fs::Permissions::from_mode(metadata.mode() & 0o7777))?;
    new.rename(log)
}

/// Puts in place what CRIU opens by a path.
pub(super) fn put_files_in_place(request: &Request<'_>, manifest: &Manifest) -> Result<(), Error> {
    recreate(request, manifest)?;
    files::make_folders(manifest, request.identity)?;
    files::make_fifos(manifest, request.identity)?;
    let images = request.image.dir.join(CRIU_DIR);
    let opened = criu::image::open_files(&images).map_err(criu::RunError::Image)?;
    let mapped = criu::image::written_by_mappings(&images).map_err(criu::RunError::Image)?;
    let opened: BTreeSet<PathBuf> = opened.into_iter().map(|file| file.path).chain(mapped).collect();
    Ok(stand_in(request.image, manifest, request.folder, request.identity, &opened)?)
}

/// The manifest as it is in the view: files that root gave to the job are known by device and inode, and an overlay has
/// others.
pub(super) fn manifest_in_view(manifest: &Manifest) -> Manifest {
    let mut seen = manifest.clone();
    for given in &mut seen.given_files {
        if let Ok(now) = std::fs::metadata(&given.path) {
            (given.device, given.inode) = (now.dev(), now.ino());
        }
    }
    seen
}
