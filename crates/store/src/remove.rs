//! Removes images, in an order that a crash can interrupt:
//!
//! 1. `ID` becomes `.del-ID`, and `images/` is synced. From here on it is not an image, and nobody can pin it any more.
//!    If it is pinned (perhaps since a moment ago), it becomes `ID` again and stays.
//! 2. The hard links that it has beside the user's files are removed, unless another image needs the same one.
//! 3. Its manifest, which names those links, and everything else is removed.
//!
//! After a crash the next start continues there, beginning with the check for a pin. Nothing is removed while
//! `images/`, or a manifest that may need a link, cannot be read.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::error::{Error, Result};
use super::folder::JobFolder;
use super::folders::{list, remove_all};
use super::id::ImageId;
use super::image::{DamageKind, Image, State};
use super::links;
use super::lock::WriterLock;
use super::manifest::Manifest;
use super::names::DELETED_PREFIX;
use super::tags;
use super::trust::Trust;
use rekindle_os::beneath::Beneath;
use rekindle_os::durable::{self, TEMP_PREFIX};

impl JobFolder {
    /// Removes leftovers of crashes: `.tmp-ID` and `.del-ID` in `images/`, and files `.tmp-*` beside `job.json`, in
    /// `bin/` and in images. Nothing else is removed. Returns the removed paths.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Read`] (then nothing was removed), [`Error::Remove`].
    pub fn sweep_leftovers(&self, lock: &WriterLock) -> Result<Vec<PathBuf>> {
        self.check_lock(lock)?;
        sweep(self)
    }

    /// Removes an image, and its hard links beside the user's files; never a pinned image. After a power cut during
    /// this, the image either still exists or is a `.del-ID`.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::UnknownImage`], [`Error::Pinned`], [`Error::Read`], [`Error::Remove`].
    pub fn remove(&self, lock: &WriterLock, id: &ImageId) -> Result<()> {
        self.check_lock(lock)?;
        image(self, *id)
    }
}

fn image(folder: &JobFolder, id: ImageId) -> Result<()> {
    let images = folder.images()?;
    if !images.iter().any(|image| image.id == id) {
        let known = images.iter().map(|image| image.id).collect();
        return Err(Error::UnknownImage { job: folder.name().clone(), wanted: id.to_string(), known });
    }
    let path = folder.images_dir().join(id.to_string());
    let failed = |source| Error::Remove { path: path.path().to_owned(), source };
    path.folder().map_err(failed)?;
    if tags::read(&path).is_pinned() {
        return Err(Error::Pinned(id));
    }
    let doomed = folder.images_dir().join(format!("{DELETED_PREFIX}{id}"));
    durable::publish_dir(&path, &doomed).map_err(failed)?;
    if tags::read(&doomed).is_pinned() {
        durable::publish_dir(&doomed, &path).map_err(|source| Error::Write { path: path.path().to_owned(), source })?;
        return Err(Error::Pinned(id));
    }
    let others: Vec<Image> = images.into_iter().filter(|image| image.id != id).collect();
    finish(&doomed, &others, folder.trust())
}

fn sweep(folder: &JobFolder) -> Result<Vec<PathBuf>> {
    // First, so that it is among the images that may need a link.
    recover_pinned(folder)?;
    // Everything is read before the first thing is removed.
    let images = folder.images()?;
    let leftover = |name: &String, prefix| name.strip_prefix(prefix).is_some_and(|id| id.parse::<ImageId>().is_ok());
    let in_images = |name: String| folder.images_dir().join(name);
    let names = list(&folder.images_dir())?;
    let (doomed, rest): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| leftover(name, DELETED_PREFIX));
    let drafts: Vec<_> = rest.into_iter().filter(|name| leftover(name, TEMP_PREFIX)).map(in_images).collect();
    let mut files = temporary_files(folder.dir())?;
    if folder.packs().dir().is_dir() {
        files.extend(temporary_files(folder.packs().dir())?);
    }
    // An image whose folder cannot be listed is reported elsewhere; it must not prevent a job from starting.
    files.extend(images.iter().filter_map(|image| temporary_files(&image.dir).ok()).flatten());
    let mut removed = Vec::new();
    for image in doomed.into_iter().map(in_images) {
        finish(&image, &images, folder.trust())?;
        removed.push(image.path().to_owned());
    }
    for draft in drafts {
        remove_all(&draft)?;
        removed.push(draft.path().to_owned());
    }
    for file in files {
        file.remove_file().map_err(|source| Error::Remove { path: file.path().to_owned(), source })?;
        removed.push(file.path().to_owned());
    }
    Ok(removed)
}

/// Restores the name of a pinned image: step 1 was interrupted, and nothing was removed yet. A pin that cannot be read
/// does not count here: step 1 had read that there is none, and the rest may be half an image.
fn recover_pinned(folder: &JobFolder) -> Result<()> {
    for name in list(&folder.images_dir())? {
        let Some(id) = name.strip_prefix(DELETED_PREFIX).filter(|id| id.parse::<ImageId>().is_ok()) else { continue };
        let (doomed, lasting) = (folder.images_dir().join(&name), folder.images_dir().join(id));
        let tags = tags::read(&doomed);
        if tags.is_pinned() && tags.unreadable().is_none() && !lasting.is_there() {
            durable::publish_dir(&doomed, &lasting)
                .map_err(|source| Error::Write { path: lasting.path().to_owned(), source })?;
        }
    }
    Ok(())
}

/// Steps 2 and 3.
fn finish(doomed: &Beneath, others: &[Image], trust: &Trust) -> Result<()> {
    if let Ok(manifest) = Manifest::read(doomed, trust) {
        remove_links(&manifest, others);
    }
    remove_all(doomed)
}

/// Removes the hard links. Best effort: a remaining link takes space beside the user's files, and the image must be
/// removed anyway.
pub(super) fn remove_links(manifest: &Manifest, others: &[Image]) {
    let unknown = |image: &Image| matches!(&image.state, State::Damaged { why } if why.kind != DamageKind::Broken);
    if manifest.saved_links.is_empty() || others.iter().any(unknown) {
        return;
    }
    let links = others.iter().filter_map(Image::manifest).flat_map(|manifest| &manifest.saved_links);
    let needed: HashSet<&Path> = links.map(|link| link.saved.as_path()).collect();
    let unneeded = manifest.saved_links.iter().filter(|link| !needed.contains(link.saved.as_path()));
    unneeded.for_each(|link| links::remove(manifest, link));
}

fn temporary_files(dir: &Beneath) -> Result<Vec<Beneath>> {
    let files = list(dir)?.into_iter().filter(|name| name.starts_with(TEMP_PREFIX)).map(|name| dir.join(name));
    Ok(files.filter(|file| file.metadata().is_ok_and(|meta| meta.is_file())).collect())
}
