//! Removes the hard links that an image has beside the user's files ([`SavedLink`]).
//!
//! They are in folders of the job's user, who can put other folders and links there at any time. So a link is removed
//! with that user's rights. Best effort: a remaining link costs space, and the image is removed all the same.

use std::io::ErrorKind::NotFound;
use std::path::Path;

use super::manifest::{Manifest, SavedLink};
use rekindle_os::identity;

/// Removes one link, and the name by which CRIU opens it, which a restore leaves if it is killed.
pub(super) fn remove(manifest: &Manifest, link: &SavedLink) {
    remove_one(manifest, &link.saved);
    // In an image of an earlier version it may be the name of another job's file.
    remove_one(manifest, &link.link);
}

fn remove_one(manifest: &Manifest, path: &Path) {
    let name = path.file_name().and_then(|name| name.to_str());
    if !path.is_absolute() || !name.is_some_and(|name| name.starts_with(SavedLink::PREFIX)) {
        return;
    }
    let work = || std::fs::remove_file(path);
    let result = match &manifest.user {
        Some(user) => identity::with_file_rights_of(user, work).and_then(|result| result),
        None => work(),
    };
    if let Err(error) = result
        && error.kind() != NotFound
    {
        tracing::debug!("cannot remove {}: {error}", path.display());
    }
}
