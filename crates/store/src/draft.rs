//! An image that is being made, and its publication.
//!
//! Publishing is steps 5 to 8 of `persist.rs`. After a power cut before the draft has its final name, there is a
//! `.tmp-ID`, which is not an image. After that step the file system decides which name exists; the content is complete
//! in both cases.
//!
//! Images of earlier releases may be loose: their parts are plain files in their folder. They are not written any more,
//! but can be read, and are packed.
//!
//! On every open do: sweep `.tmp-*` and `.del-*` ([`super::JobFolder::sweep_leftovers`]).

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::chunk::map;
use super::error::{Error, Result as StoreResult};
use super::file_error::{FileError, failed};
use super::folder::JobFolder;
use super::folders::remove_all;
use super::id::{ImageId, JobName};
use super::image::Image;
use super::lock::WriterLock;
use super::manifest::{self, Manifest, ManifestError};
use super::mark;
use super::names::DELETED_PREFIX;
use super::tags;
use super::trust::Trust;
use rekindle_os::beneath::Beneath;
use rekindle_os::durable::{self, TEMP_PREFIX};

/// Why a draft did not become an image. Unless noted otherwise there is no image, and the job's older images are
/// unchanged.
#[derive(Debug, Error)]
pub enum PublishError {
    /// The manifest does not match the files.
    #[error("image {id} cannot be described")]
    Describe { id: ImageId, source: ManifestError },
    /// The manifest cannot be written.
    #[error("cannot write {}", .path.display())]
    Write { path: PathBuf, source: io::Error },
    /// The draft cannot get its name; or `images/` cannot be synced: then the image exists, but may be lost in a power
    /// cut.
    #[error("cannot publish {}", .path.display())]
    Publish {
        /// The final name.
        path: PathBuf,
        source: io::Error,
    },
}

impl From<FileError> for PublishError {
    fn from(error: FileError) -> PublishError {
        PublishError::Write { path: error.path, source: error.source }
    }
}

/// An image that is being made. If it is dropped before it is published, its files are removed.
#[derive(Debug)]
pub struct Draft {
    id: ImageId,
    job: JobName,
    dir: Beneath,
    lasting: Beneath,
    trust: Trust,
}

impl JobFolder {
    /// Begins an image with a given name: creates `.tmp-ID`.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Create`].
    pub fn begin_image_as(&self, lock: &WriterLock, id: ImageId) -> StoreResult<Draft> {
        self.check_lock(lock)?;
        let dir = self.images_dir();
        let draft = dir.join(format!("{TEMP_PREFIX}{id}"));
        draft.make_dir(0o700).map_err(|source| Error::Create { path: draft.path().to_owned(), source })?;
        let lasting = dir.join(id.to_string());
        Ok(Draft { id, job: self.name().clone(), dir: draft, lasting, trust: self.trust().clone() })
    }
}

impl Draft {
    /// The name that the image will have.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn id(&self) -> ImageId {
        self.id
    }

    /// The folder to fill, with files and folders of any depth. Only root or the user of the supervisor can enter it.
    #[must_use]
    pub fn dir(&self) -> &Beneath {
        &self.dir
    }

    /// Makes it an image whose content is in packs: steps 5 to 8 of `persist.rs`. `from` is the image that was packed.
    /// A loose one is replaced; marks on it, or on an image in memory, are kept. An image in memory replaces a damaged copy,
    /// as in [`Draft::publish_copy`]. Sets `id` and `job` of the manifest.
    ///
    /// # Errors
    /// One for each step; the draft is removed then.
    pub(super) fn publish_packed(
        self,
        mut manifest: Manifest,
        map: &[u8],
        from: &Image,
    ) -> Result<Image, PublishError> {
        manifest.id = self.id;
        manifest.job = self.job.clone();
        let bytes = manifest.to_bytes(&self.trust).map_err(|source| PublishError::Describe { id: self.id, source })?;
        let write = |name: &str, bytes: &[u8]| {
            let file = self.dir.join(name);
            let failed = |source| PublishError::Write { path: file.path().to_owned(), source };
            durable::write_file(&file, bytes, 0o600).map_err(failed)
        };
        write(map::FILE_NAME, map)?;
        let loose = !from.is_staged();
        carry_over(&from.dir, &self.dir, &BESIDE)?;
        write(manifest::FILE_NAME, &bytes)?;
        let publish = |source| PublishError::Publish { path: self.lasting.path().to_owned(), source };
        match loose {
            true => durable::exchange_dirs(&self.dir, &self.lasting).map_err(publish)?,
            false if self.is_for_a_damaged_one() => self.replace_damaged()?,
            false => durable::publish_dir(&self.dir, &self.lasting).map_err(publish)?,
        }
        // Repeated, because somebody may have tagged or marked it just before the names were exchanged.
        carry_over(if loose { &self.dir } else { &from.dir }, &self.lasting, &BESIDE)?;
        if loose {
            // If it cannot be removed now, the next sweep removes it.
            let _ = remove_all(&self.dir);
        }
        Ok(Image::load(&self.lasting, self.id, &self.trust))
    }

    /// Makes it an image that another store has, too. It takes the place of a damaged copy here, whose tags it gets;
    /// no other one is replaced. The draft must be complete and synced.
    ///
    /// # Errors
    /// One for each step; the draft is removed then.
    pub fn publish_copy(self) -> Result<Image, FileError> {
        match self.is_for_a_damaged_one() {
            true => self.replace_damaged()?,
            false => durable::publish_dir(&self.dir, &self.lasting).map_err(failed("write", &self.lasting))?,
        }
        Ok(Image::load(&self.lasting, self.id, &self.trust))
    }

    /// Whether the store has a damaged copy of the image.
    fn is_for_a_damaged_one(&self) -> bool {
        self.lasting.is_dir() && Image::load(&self.lasting, self.id, &self.trust).is_damaged()
    }

    /// Takes the place of the damaged copy, and its tags.
    fn replace_damaged(&self) -> Result<(), FileError> {
        carry_over(&self.lasting, &self.dir, &[tags::FILE_NAME])?;
        let replaced = self.replace(durable::exchange_dirs).map_err(failed("write", &self.lasting))?;
        // Repeated, because somebody may have tagged it just before.
        carry_over(&replaced, &self.lasting, &[tags::FILE_NAME])?;
        // If it cannot be removed now, the next sweep removes it.
        let _ = replaced.remove_dir_all();
        Ok(())
    }

    /// Gives it the name of the damaged copy; returns where that is now. Where two names cannot be exchanged (NFS), there is
    /// a moment without the image: after a power cut then, there is neither. The replica still has it, if it is from there.
    pub(crate) fn replace(&self, exchange: impl FnOnce(&Beneath, &Beneath) -> io::Result<()>) -> io::Result<Beneath> {
        match exchange(&self.dir, &self.lasting) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            exchanged => return exchanged.map(|()| self.dir.clone()),
        }
        let replaced = self.lasting.with_file_name(format!("{DELETED_PREFIX}{}", self.id));
        durable::publish_dir(&self.lasting, &replaced)?;
        if let Err(error) = durable::publish_dir(&self.dir, &self.lasting) {
            let _ = durable::publish_dir(&replaced, &self.lasting);
            return Err(error);
        }
        Ok(replaced)
    }
}

/// What is stored beside the manifest of an image.
const BESIDE: [&str; 2] = [mark::FILE_NAME, tags::FILE_NAME];
/// Maximum size of these files: larger ones are not read.
const MAX_BYTES: u64 = 64 << 10;

/// Copies these files of an image, unless they are the same already.
fn carry_over(from: &Beneath, to: &Beneath, names: &[&str]) -> Result<(), FileError> {
    for name in names {
        let path = to.join(name);
        let Ok(bytes) = from.join(name).content(MAX_BYTES) else { continue };
        if path.content(MAX_BYTES).ok().as_ref() != Some(&bytes) {
            durable::write_file(&path, &bytes, 0o600).map_err(failed("write", &path))?;
        }
    }
    Ok(())
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After publishing no folder has this name. If it cannot be removed, the next sweep removes it.
        let _ = self.dir.remove_dir_all();
    }
}
