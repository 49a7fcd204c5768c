//! One of the two places for an image that is not in the store yet.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{Error, Medium, make};
use crate::files::{self, Entry, Kind};
use crate::id::ImageId;
use crate::image::Image;
use crate::manifest::{self, Manifest, Part};
use crate::paths::PartPath;
use crate::trust::Trust;
use crate::{FileError, failed};
use rekindle_os::beneath::Beneath;
use rekindle_os::{durable, pages};

/// Folders with files of pages, which are kept for the next image.
const LASTING: [&str; 2] = ["gpu", "spool"];

/// A place for one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    dir: Beneath,
    medium: Medium,
    trust: Trust,
}

impl Slot {
    pub(super) fn new(dir: Beneath, medium: Medium, trust: Trust) -> Slot {
        Slot { dir, medium, trust }
    }

    /// Its folder.
    #[must_use]
    pub fn dir(&self) -> &Beneath {
        &self.dir
    }

    /// The image in it, if there is a complete one.
    #[must_use]
    pub fn image(&self) -> Option<Image> {
        Image::load_staged(&self.dir, self.medium.place(), &self.trust)
    }

    /// Bytes that it occupies.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        let mut seen = HashSet::new();
        let files = files::walk(&self.dir).unwrap_or_default().into_iter();
        // In units of 512 bytes (stat(2)).
        files.filter(|entry| seen.insert(entry.meta.ino())).map(|entry| entry.meta.blocks() * 512).sum()
    }

    /// Frees everything that it occupies.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn empty(&self) -> Result<(), Error> {
        self.forget_image()?;
        Ok(LASTING.iter().try_for_each(|name| remove_dir(&self.dir.join(name)))?)
    }

    /// Removes the image, the manifest first, and begins another one.
    ///
    /// # Errors
    /// When the old one cannot be removed, or the folders cannot be created.
    pub(crate) fn begin(&self, id: ImageId) -> Result<Filling, Error> {
        self.forget_image()?;
        make(&self.dir, 0o700)?;
        for name in LASTING.iter().chain(&["criu"]) {
            make(&self.dir.join(name), 0o700)?;
        }
        Ok(Filling { slot: self.clone(), id, whole: false })
    }

    /// Removes everything except the files of pages: remains of a failed snapshot would become part of the next image.
    fn forget_image(&self) -> Result<(), FileError> {
        remove_file(&self.dir.join(manifest::FILE_NAME))?;
        let entries = match self.dir.entries() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed("list", &self.dir))?,
        };
        for (entry, meta) in entries {
            if LASTING.iter().any(|name| entry.file_name() == Some(name.as_ref())) {
                continue;
            }
            // Not followed: a symbolic link itself is removed.
            if meta.is_dir() { remove_dir(&entry)? } else { remove_file(&entry)? }
        }
        Ok(())
    }
}

fn remove_file(file: &Beneath) -> Result<(), FileError> {
    match file.remove_file() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", file)(error)),
        _ => Ok(()),
    }
}

fn remove_dir(dir: &Beneath) -> Result<(), FileError> {
    match dir.remove_dir_all() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", dir)(error)),
        _ => Ok(()),
    }
}

/// A slot while an image is written to it. If this is dropped before the image is complete, the slot contains none.
#[derive(Debug)]
pub struct Filling {
    slot: Slot,
    id: ImageId,
    whole: bool,
}

impl Filling {
    /// The name that the image will have.
    #[must_use]
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// The folder to fill.
    #[must_use]
    pub fn dir(&self) -> &Beneath {
        &self.slot.dir
    }

    /// The folder of the files that receive CRIU's pages.
    #[must_use]
    pub fn spool(&self) -> Beneath {
        self.slot.dir.join("spool")
    }

    /// Removes the files of pages that earlier images left, so that they are created again.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn clear_pages(&self) -> Result<(), Error> {
        for name in LASTING {
            let path = self.slot.dir.join(name);
            remove_dir(&path)?;
            make(&path, 0o700)?;
        }
        Ok(())
    }

    /// The part with the device memory of a process.
    #[must_use]
    pub fn landing_part(pid: i32) -> PartPath {
        PartPath::of_process(pid)
    }

    /// Frees the landing files that this image will not use: those of processes that are gone, and what others have far beyond
    /// these sizes. Admission counts it as free, so it must be free before the image's own memory is made ready. `keeps`
    /// means that device memory is copied by rekindle, too, to [`Filling::kept_file`].
    ///
    /// # Errors
    /// When the files cannot be listed, removed or cut.
    pub fn free_landing_files(&self, processes: &[(i32, u64)], keeps: bool) -> Result<(), Error> {
        let dir = self.slot.dir.join(LASTING[0]);
        for (file, meta) in dir.entries().map_err(failed("list", &dir))? {
            if keeps && file == self.kept_file() {
                continue;
            }
            let own = processes.iter().find(|(pid, _)| self.slot.dir.join(Filling::landing_part(*pid)) == file);
            let Some((_, bytes)) = own else {
                remove_file(&file)?;
                continue;
            };
            // A little more is left: the size that is expected is not exactly the one that is needed.
            if meta.len() > bytes.saturating_add(bytes / 4) {
                let cut = file.change().and_then(|open| open.set_len(*bytes));
                cut.map_err(failed("free memory of", &file))?;
            }
        }
        Ok(())
    }

    /// The landing files of processes, each with memory for at least so many bytes. All are made ready at once.
    ///
    /// # Errors
    /// When one cannot be created, or there is not enough memory.
    pub fn landing_files(&self, processes: &[(i32, u64)]) -> Result<Vec<Beneath>, Error> {
        let files = processes.iter().map(|(pid, _)| self.slot.dir.join(Filling::landing_part(*pid)));
        let files: Vec<Beneath> = files.collect();
        let mut open = Vec::new();
        for (file, (_, len)) in files.iter().zip(processes) {
            open.push((file.change_or_create(0o600).map_err(failed("make room for GPU memory in", file))?, *len));
        }
        let dir = &self.slot.dir;
        pages::make_all_present(open)
            .map_err(|(at, source)| failed("make room for GPU memory in", files.get(at).unwrap_or(dir))(source))?;
        Ok(files)
    }

    /// The part with device memory that rekindle copies.
    #[must_use]
    pub fn kept_part() -> PartPath {
        PartPath::kept()
    }

    /// The file for it, which may have content of an earlier image. Its folder exists.
    #[must_use]
    pub fn kept_file(&self) -> Beneath {
        self.slot.dir.join(Filling::kept_part())
    }

    /// Completes the image: sets `id`, `bytes` and `parts` of the manifest and writes it. Parts on the disk are hashed,
    /// with at most `threads` threads. Parts in memory are not hashed, because their source was in memory too.
    ///
    /// # Errors
    /// When the manifest cannot be written.
    pub fn seal(mut self, mut manifest: Manifest, threads: usize) -> Result<Image, Error> {
        let dir = self.slot.dir.clone();
        let spare = |entry: &Entry| -> bool {
            let path = &entry.relative;
            let lands = manifest.landing.iter().any(|landing| Path::new(landing.part.as_str()) == path)
                || manifest.kept.iter().any(|kept| Path::new(kept.part.as_str()) == path);
            // A page file of CRIU is a spool file under another name.
            let linked = entry.meta.nlink() > 1;
            path.starts_with("gpu") && !lands || path.starts_with("spool") && !linked
        };
        let mut parts = Vec::new();
        for entry in files::walk(&dir).map_err(|(path, source)| failed("list", &path)(source))? {
            let size = match entry.kind {
                Kind::File { size } => size,
                Kind::Folder => continue,
                // The store would refuse it too.
                Kind::Other => return Err(Error::Stray(dir.path().join(&entry.relative))),
            };
            if spare(&entry) {
                // It belongs to a process that does not exist any more.
                let _ = dir.join(&entry.relative).remove_file();
            } else if !entry.relative.starts_with("spool") {
                let path =
                    entry.relative.to_str().and_then(|path| path.parse().ok()).ok_or_else(|| {
                        failed("name", &dir.join(&entry.relative))(io::ErrorKind::InvalidFilename.into())
                    })?;
                parts.push(Part { path, size, blake3: None });
            }
        }
        if self.slot.medium == Medium::Disk {
            parts = hashed(&dir, parts, threads)?;
        }
        manifest.id = self.id;
        manifest.bytes = parts.iter().map(|part| part.size).sum();
        manifest.parts = parts;
        let path = dir.join(manifest::FILE_NAME);
        let content = manifest
            .to_bytes(&self.slot.trust)
            .map_err(io::Error::other)
            .map_err(failed("describe the image in", &path))?;
        durable::replace_file(&path, &content, 0o600).map_err(failed("write", &path))?;
        self.whole = true;
        Ok(self.slot.image().ok_or_else(|| failed("read back", &path)(io::ErrorKind::InvalidData.into()))?)
    }
}

fn hashed(dir: &Beneath, parts: Vec<Part>, threads: usize) -> Result<Vec<Part>, FileError> {
    let sized = parts.into_iter().map(|part| (part.path, part.size)).collect();
    let mut parts = files::in_parallel(sized, threads, |path: PartPath| {
        let hash = path.open(dir).and_then(|file| files::hash(&file));
        let (size, blake3) = hash.map_err(failed("read", &dir.join(&path)))?;
        Ok(Part { path, size, blake3: Some(blake3) })
    })?;
    parts.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(parts)
}

impl Drop for Filling {
    fn drop(&mut self) {
        if !self.whole {
            // The rest has no manifest, and is removed by the next image.
            let _ = self.slot.forget_image();
        }
    }
}
