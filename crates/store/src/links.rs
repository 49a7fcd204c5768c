//! Removes the hard links that an image has beside the user's files ([`SavedLink`]).
//!
//! They are in folders of the job's user, who can put other folders and links there at any time. So a link is removed
//! with that user's rights. Best effort: a remaining link costs space, and the image is removed all the same.

use super::manifest::{Manifest, SavedLink};
use rekindle_os::identity;

/// Removes one link.
pub(super) fn remove(manifest: &Manifest, link: &SavedLink) {
    let name = link.saved.file_name().and_then(|name| name.to_str());
    if !link.saved.is_absolute() || !name.is_some_and(|name| name.starts_with(SavedLink::PREFIX)) {
        return;
    }
    let work = || std::fs::remove_file(&link.saved);
    let result = match &manifest.user {
        Some(user) => identity::with_file_rights_of(user, work).and_then(|result| result),
        None => work(),
    };
    if let Err(error) = result {
        tracing::debug!("cannot remove {}: {error}", link.saved.display());
    }
}
