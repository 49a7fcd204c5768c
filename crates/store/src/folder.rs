//! A job's folder: `lock`, `job.json`, `log/`, `bin/`, `images/`, `packs/`.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};

use super::draft::Draft;
use super::error::{Error, Result};
use super::id::{ImageId, JobName};
use super::image::{Image, State};
use super::known::Known;
use super::links;
use super::lock::{self, Writer, WriterLock};
use super::names::DELETED_PREFIX;
use super::pack::Packs;
use super::record::{self, JobRecord};
use super::tag::Tag;
use super::trust::Trust;
use super::{remove, rights, select, staging};
use rekindle_os::durable::{self, TEMP_PREFIX};

/// The folder of one job. Reading needs no lock; functions that change `images/` require the [`WriterLock`].
#[derive(Debug, Clone)]
pub struct JobFolder {
    name: JobName,
    path: PathBuf,
    trust: Trust,
}

impl JobFolder {
    /// Opens an existing folder.
    pub(super) fn existing(name: JobName, path: PathBuf, trust: &Trust) -> Result<JobFolder> {
        rights::check(&path)?;
        let trust = trust.for_job(&name);
        Ok(JobFolder { name, path, trust })
    }

    /// The same folder after it was renamed.
    pub(super) fn renamed(&self, path: PathBuf) -> JobFolder {
        JobFolder { path, ..self.clone() }
    }

    /// Creates the missing parts of the folder.
    pub(super) fn create(name: JobName, path: PathBuf, trust: &Trust) -> Result<JobFolder> {
        make_folder(&path)?;
        let folder = JobFolder::existing(name, path, trust)?;
        for path in [folder.images_dir(), folder.log_dir(), folder.bin_dir(), folder.packs().dir().to_owned()] {
            make_folder(&path)?;
        }
        Ok(folder)
    }

    /// The job.
    #[must_use]
    pub fn name(&self) -> &JobName {
        &self.name
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The store that it is in.
    #[must_use]
    pub fn store(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// A name for the job's resources outside the store: the job's name for people, and a hash of the folder's path,
    /// because two stores may have jobs of the same name.
    #[must_use]
    pub fn place_name(&self) -> String {
        let hash = blake3::hash(self.path.as_os_str().as_encoded_bytes()).to_hex();
        format!("{}-{}", self.name, hash.get(..8).unwrap_or_default())
    }

    /// The rules for trusting files.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// The folder for the output of the job.
    #[must_use]
    pub fn log_dir(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The folder for rekindle's files that the job runs or maps.
    #[must_use]
    pub fn bin_dir(&self) -> PathBuf {
        self.path.join("bin")
    }

    /// A folder for files that CRIU writes besides its images; none of them is needed later.
    ///
    /// # Errors
    /// [`Error::Create`], [`Error::NotAFolder`].
    pub fn scratch_dir(&self) -> Result<PathBuf> {
        let path = self.path.join("scratch");
        make_folder(&path)?;
        Ok(path)
    }

    /// The folder of the images.
    #[must_use]
    pub fn images_dir(&self) -> PathBuf {
        self.path.join("images")
    }

    /// The folder of the packs.
    #[must_use]
    pub fn packs_dir(&self) -> PathBuf {
        self.path.join("packs")
    }

    /// The packs with the content of packed images.
    #[must_use]
    pub fn packs(&self) -> Packs {
        Packs::new(self.packs_dir())
    }

    /// The file in which the supervisor publishes its state.
    #[must_use]
    pub fn state_file(&self) -> PathBuf {
        self.path.join("state.json")
    }

    /// Takes the lock for writing.
    ///
    /// # Errors
    /// [`Error::Supervised`] if another process has it; [`Error::PerhapsSupervised`] if one on another machine may have
    /// it; [`Error::TakenOver`] if another process was faster; [`Error::Lock`] if the file system cannot lock.
    pub fn lock(&self) -> Result<WriterLock> {
        lock::acquire(&self.path, &self.name)
    }

    /// The present holder of the lock.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Lock`].
    pub fn writer(&self) -> Result<Writer> {
        lock::writer(&self.path)
    }

    /// The record of the last run; `None` before the first.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::ParseRecord`], [`Error::NewerRecord`], [`Error::UntrustedRecord`].
    pub fn record(&self) -> Result<Option<JobRecord>> {
        record::read(&self.path.join(record::FILE_NAME), &self.name, &self.trust)
    }

    /// Whether the record of the last run has a signature, of any key.
    #[must_use]
    pub fn has_signed_record(&self) -> bool {
        record::is_signed(&self.path.join(record::FILE_NAME))
    }

    /// Replaces the record of the last run, durably.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Write`].
    pub fn write_record(&self, lock: &WriterLock, record: &JobRecord) -> Result<()> {
        self.check_lock(lock)?;
        record::write(&self.path.join(record::FILE_NAME), record, &self.name, &self.trust)
    }

    /// All images, newest first. Damaged images are included, and are reported as such.
    ///
    /// # Errors
    /// [`Error::Read`]: a folder that cannot be listed is never treated as empty.
    pub fn images(&self) -> Result<Vec<Image>> {
        let dir = self.images_dir();
        let mut ids: Vec<ImageId> = list(&dir)?.iter().filter_map(|name| name.parse().ok()).collect();
        ids.sort_by(|a, b| b.cmp(a));
        let mut images: Vec<_> =
            ids.into_iter().map(|id| Image::load(&dir.join(id.to_string()), id, &self.trust)).collect();
        // A writer may have removed an image since the folder was listed: that is no damage.
        images.retain(|image| !matches!(image.state, State::Damaged { .. }) || is_there(&image.dir));
        Ok(images)
    }

    /// The image that a user means: `latest` (the newest good one), an id, the beginning of one, a number, a tag, or
    /// `-N`, which counts [`JobFolder::to_continue_from`].
    ///
    /// # Errors
    /// [`Error::UnknownImage`], [`Error::AmbiguousImage`], [`Error::NoGoodImage`], [`Error::NoNthImage`],
    /// [`Error::Read`].
    pub fn find(&self, selector: &str) -> Result<Image> {
        let known = self.known()?;
        let best = known.iter().map(|known| known.best().clone()).collect();
        let tagged = |tag: &Tag| known.iter().filter(|known| known.tags().has(tag)).map(Known::id).collect();
        select::select(&self.name, best, selector, tagged, || self.to_continue_from(&known))
    }

    /// The good images on the job's current line, newest first: -1 means the first of them, as for a rewind.
    #[must_use]
    pub fn to_continue_from(&self, known: &[Known]) -> Vec<ImageId> {
        let ours = self.line();
        known.iter().filter(|known| known.best().is_good() && ours(known.best())).map(Known::id).collect()
    }

    /// Whether the store has the image, good or not. If this is unknown, the answer is no: then the image in memory is
    /// kept.
    #[must_use]
    pub fn is_stored(&self, id: ImageId) -> bool {
        self.images_dir().join(id.to_string()).is_dir()
    }

    /// Complete images in the job's staging areas, newest first. Some of them may also be in the store.
    #[must_use]
    pub fn staged(&self) -> Vec<Image> {
        staging::staged(&self.path, &self.trust)
    }

    /// Whether an image is on the job's current line. After a rewind the newer images of the old line are not. If the
    /// line cannot be read, all images count as on it.
    pub(super) fn line(&self) -> impl Fn(&Image) -> bool {
        let record = self.record().ok().flatten();
        move |image| match (&record, image.manifest()) {
            (Some(record), Some(manifest)) => manifest.lineage == record.lineage || Some(image.id) == record.base,
            _ => true,
        }
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
        staging::admission::proven_only_here(staged, &proven, stored.first().copied())
    }

    /// Every copy of every image, newest first; one in memory comes before the same in the store.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn copies(&self) -> Result<Vec<Image>> {
        let mut copies: Vec<Image> = self.staged().into_iter().chain(self.images()?).collect();
        // A stable sort: of two with the same name the first stays first.
        copies.sort_by_key(|image| std::cmp::Reverse(image.id));
        Ok(copies)
    }

    /// All images with their places, newest first.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn known(&self) -> Result<Vec<Known>> {
        Ok(Known::gather(self.copies()?))
    }

    /// Removes the hard links beside the user's files that belong to the image in a slot, unless the store has that
    /// image and still needs them. Call it before the slot is emptied or overwritten.
    pub fn drop_links(&self, slot: &staging::Slot) {
        let image = slot.image().filter(|image| !self.is_stored(image.id));
        if let Some(manifest) = image.as_ref().and_then(Image::manifest) {
            manifest.saved_links.iter().for_each(|link| links::remove(manifest, link));
        }
    }

    /// A name for the next image, with a number higher than all numbers in the folder and in memory.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::NumbersUsedUp`].
    pub fn next_id(&self, now: DateTime<Utc>) -> Result<ImageId> {
        let names = list(&self.images_dir())?;
        let seen = names.iter().filter_map(|name| {
            let id = name.strip_prefix(TEMP_PREFIX).or_else(|| name.strip_prefix(DELETED_PREFIX)).unwrap_or(name);
            id.parse::<ImageId>().ok()
        });
        let staged = self.staged().into_iter().map(|image| image.id);
        let last = seen.chain(staged).map(|id| id.sequence()).max().unwrap_or(0);
        let next = last.checked_add(1).ok_or_else(|| Error::NumbersUsedUp(self.name.clone()))?;
        Ok(ImageId::new(next, now))
    }

    /// Begins an image with a given name: creates `.tmp-ID`.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Create`].
    pub fn begin_image_as(&self, lock: &WriterLock, id: ImageId) -> Result<Draft> {
        self.check_lock(lock)?;
        let dir = self.images_dir();
        let path = dir.join(format!("{TEMP_PREFIX}{id}"));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|source| Error::Create { path: path.clone(), source })?;
        Ok(Draft::new(id, self.name.clone(), path, dir.join(id.to_string()), self.trust.clone()))
    }

    /// Removes leftovers of crashes: `.tmp-ID` and `.del-ID` in `images/`, and files `.tmp-*` beside `job.json`, in
    /// `bin/` and in images. Nothing else is removed. Returns the removed paths.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Read`] (then nothing was removed), [`Error::Remove`].
    pub fn sweep_leftovers(&self, lock: &WriterLock) -> Result<Vec<PathBuf>> {
        self.check_lock(lock)?;
        remove::sweep(self)
    }

    /// Removes an image, and its hard links beside the user's files; never a pinned image. After a power cut during
    /// this, the image either still exists or is a `.del-ID`.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::UnknownImage`], [`Error::Pinned`], [`Error::Read`], [`Error::Remove`].
    pub fn remove(&self, lock: &WriterLock, id: &ImageId) -> Result<()> {
        self.check_lock(lock)?;
        remove::image(self, *id)
    }

    /// Checks that the lock is one of this job, and that it is still held.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::TakenOver`], [`Error::LockReplaced`].
    pub fn check_lock(&self, lock: &WriterLock) -> Result<()> {
        if lock.guards(&self.path) { lock.confirm() } else { Err(Error::WrongLock(self.name.clone())) }
    }
}

/// The names in a folder. Names that are not UTF-8 are not ours and are skipped.
pub(super) fn list(dir: &Path) -> Result<Vec<String>> {
    let failed = |source| Error::Read { path: dir.to_owned(), source };
    let entries = fs::read_dir(dir).map_err(failed)?.collect::<io::Result<Vec<_>>>().map_err(failed)?;
    Ok(entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Whether the path exists; an unclear answer counts as yes.
fn is_there(path: &Path) -> bool {
    !fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn make_folder(path: &Path) -> Result<()> {
    let failed = |source| Error::Create { path: path.to_owned(), source };
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => durable::sync_dir(path.parent().unwrap_or(path)).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(Error::NotAFolder(path.to_owned())),
        Err(source) => Err(failed(source)),
    }
}
