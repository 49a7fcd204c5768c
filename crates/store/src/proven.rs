//! `proven.json` in the job's folder: the images after which the job has lived for `restart.min-uptime`.
//!
//! - A life proves an image if it lasted that long after the image was taken or restored. This shows that a job can
//!   continue from the state in the image; checking its bytes cannot.
//! - Retention keeps the newest proven image until a newer one is proven ([`super::retention`]). So a series of images
//!   from which the job cannot continue never removes the last good one.
//! - It is not part of the manifest, which is signed and final when the image is published.
//! - An image that is not named there is not proven, including those of an older rekindle. A file that cannot be parsed
//!   proves nothing, and the next proof replaces it. A file that cannot be read is an error: then nothing is removed.
//! - After a power cut there is the old file or the new one.

use std::collections::BTreeSet;
use std::io;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::folder::JobFolder;
use super::id::ImageId;
use super::image::Image;
use super::lock::WriterLock;
use super::staging::admission;
use rekindle_os::beneath::Beneath;
use rekindle_os::durable;

const FILE_NAME: &str = "proven.json";
const VERSION: u32 = 1;
/// Maximum size: an entry has some 30 bytes, and only existing images are in the file.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
struct OnDisk {
    version: u32,
    images: BTreeSet<ImageId>,
}

impl JobFolder {
    /// The images that are proven. Some of them may not exist any more.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn proven(&self) -> Result<BTreeSet<ImageId>> {
        let path = self.proven_file();
        let bytes = match path.content(MAX_BYTES) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::FileTooLarge) => {
                return Ok(BTreeSet::new());
            }
            bytes => bytes.map_err(|source| Error::Read { path: path.path().to_owned(), source })?,
        };
        Ok(match serde_json::from_slice(&bytes) {
            Ok(OnDisk { version: VERSION, images }) => images,
            Ok(_) | Err(_) => BTreeSet::new(),
        })
    }

    /// Records durably that these are proven. Images that do not exist any more are removed from the file.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Read`], [`Error::Write`].
    pub fn note_proven(&self, lock: &WriterLock, ids: impl IntoIterator<Item = ImageId>) -> Result<()> {
        self.check_lock(lock)?;
        let before = self.proven()?;
        let mut images: BTreeSet<ImageId> = before.iter().copied().chain(ids).collect();
        if images == before {
            return Ok(());
        }
        let there: BTreeSet<ImageId> = self.copies()?.into_iter().map(|image| image.id).collect();
        images.retain(|id| there.contains(id));
        let path = self.proven_file();
        let failed = |source| Error::Write { path: path.path().to_owned(), source };
        let bytes =
            serde_json::to_vec(&OnDisk { version: VERSION, images }).map_err(io::Error::from).map_err(failed)?;
        durable::write_file(&path, &bytes, 0o600).map_err(failed)
    }

    /// The newest image of the job's line that it has proven, if it is in memory and the store has none that is as new.
    /// An unreadable image in the store counts as missing: then the one in memory is kept.
    #[must_use]
    pub fn proven_in_memory_only(&self) -> Option<ImageId> {
        let ours = self.line();
        let good = |images: Vec<Image>| {
            let good = images.into_iter().filter(|image| image.is_good() && ours(image));
            good.map(|image| image.id).collect::<Vec<_>>()
        };
        let (staged, stored) = (self.staged(), self.images().unwrap_or_default());
        let (staged, stored) = (good(staged), good(stored));
        // If the proofs cannot be read, any image may be proven. The newest is kept anyway.
        let proven = self.proven().unwrap_or_else(|_| staged.last().copied().into_iter().collect());
        admission::proven_only_here(staged, &proven, stored.first().copied())
    }

    fn proven_file(&self) -> Beneath {
        self.dir().join(FILE_NAME)
    }
}
