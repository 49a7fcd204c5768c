//! `tags.json` in the folder of an image, in the store: the user's names for it, and a pin that no retention removes.
//!
//! - A pin keeps an image; a tag is a name and keeps nothing.
//! - A file that exists and cannot be read counts as a pin: somebody may have set one. A change is then refused.
//! - It is written by whoever may write the folder, without the lock of the one writer, which a supervisor has for
//!   weeks. This is safe because the file is small, is replaced as a whole, and is read again when it matters: the
//!   removal of an image first renames it, after which nobody can set a pin, then reads this file, and renames the
//!   image back if there is a pin (remove.rs). So a pin that was set is either seen or refused.
//! - After a power cut there is the old or the new file, and perhaps a `.tmp-` file, which the next start removes.

use std::collections::BTreeSet;
use std::io;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::image::{Image, Place};
use super::names;
use super::tag::{Change, Tag, Tags};
use rekindle_os::beneath::Beneath;
use rekindle_os::durable;

pub(super) const FILE_NAME: &str = names::TAGS;
const VERSION: u32 = 1;
/// Maximum size; [`Tags::MOST`] tags have some 5 KiB.
const MAX_BYTES: u64 = 64 << 10;

#[derive(Serialize, Deserialize)]
struct OnDisk {
    version: u32,
    pinned: bool,
    tags: BTreeSet<Tag>,
}

/// The tags of the image in `dir`.
pub(super) fn read(dir: &Beneath) -> Tags {
    let illegible = |why: String| Tags { unreadable: Some(why), ..Tags::default() };
    let bytes = match dir.join(FILE_NAME).content(MAX_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Tags::default(),
        Err(error) => return illegible(error.to_string()),
    };
    match serde_json::from_slice::<OnDisk>(&bytes) {
        Ok(OnDisk { version: VERSION, pinned, tags }) => Tags { pinned, tags, unreadable: None },
        Ok(OnDisk { version, .. }) => illegible(format!("it has version {version}")),
        Err(error) => illegible(error.to_string()),
    }
}

impl Image {
    /// Its tags and pin, read from the disk. An image in memory has none, because its folder is reused.
    #[must_use]
    pub fn tags(&self) -> Tags {
        match self.place {
            Place::Stored => read(&self.dir),
            Place::Staged | Place::Slot => Tags::default(),
        }
    }

    /// Changes its tags or pin, durably, and returns the result. Needs no lock, see above.
    ///
    /// # Errors
    /// [`Error::NotStored`] for an image in memory, [`Error::UnreadableTags`], [`Error::TooManyTags`], [`Error::Write`],
    /// [`Error::RemovedMeanwhile`].
    pub fn change_tags(&self, change: Change) -> Result<Tags> {
        if self.is_staged() {
            return Err(Error::NotStored(self.id));
        }
        let path = self.dir.join(FILE_NAME);
        // Of two concurrent changes, the second one reads the result of the first. Best effort: NFS cannot lock a
        // folder.
        let folder = self.dir.open_folder().and_then(|folder| folder.lock().map(|()| folder));
        let found = read(&self.dir);
        if let Some(why) = found.unreadable {
            return Err(Error::UnreadableTags { path: path.path().to_owned(), why });
        }
        let tags = found.with(change);
        if tags.tags.len() > Tags::MOST {
            return Err(Error::TooManyTags(self.id));
        }
        let on_disk = OnDisk { version: VERSION, pinned: tags.pinned, tags: tags.tags.clone() };
        let failed = |source: io::Error| match self.dir.is_there() {
            false => Error::RemovedMeanwhile(self.id),
            true => Error::Write { path: path.path().to_owned(), source },
        };
        let bytes = serde_json::to_vec_pretty(&on_disk).map_err(io::Error::from).map_err(failed)?;
        durable::write_file(&path, &bytes, 0o600).map_err(failed)?;
        drop(folder);
        match path.metadata() {
            Ok(_) => Ok(tags),
            // A concurrent removal will check again for a pin.
            Err(_) => Err(Error::RemovedMeanwhile(self.id)),
        }
    }
}
