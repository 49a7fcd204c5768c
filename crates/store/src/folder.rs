//! A job's folder: `lock`, `job.json`, `log/`, `images/`, `packs/`.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::error::{Error, Result};
use super::folders::{list, make_folder};
use super::id::{ImageId, JobName};
use super::image::{Image, State};
use super::lock::{self, Waiting, Writer, WriterLock};
use super::pack::Packs;
use super::record::{self, JobRecord};
use super::rights;
use super::trust::Trust;
use rekindle_os::beneath::Beneath;

/// The folder of the images.
const IMAGES: &str = "images";
/// The folder of the packs.
const PACKS: &str = "packs";

/// The folder of one job. Reading needs no lock; functions that change `images/` require the [`WriterLock`].
#[derive(Debug, Clone)]
pub struct JobFolder {
    name: JobName,
    dir: Beneath,
    trust: Trust,
    /// The highest number of an image that is known to exist elsewhere.
    pub(super) elsewhere: Arc<AtomicU32>,
}

impl JobFolder {
    /// Opens an existing folder.
    pub(super) fn existing(name: JobName, dir: Beneath, trust: &Trust) -> Result<JobFolder> {
        rights::check(&dir)?;
        let trust = trust.for_job(&name);
        Ok(JobFolder { name, dir, trust, elsewhere: Arc::default() })
    }

    /// The same folder after it was renamed.
    pub(super) fn renamed(&self, dir: Beneath) -> JobFolder {
        JobFolder { dir, ..self.clone() }
    }

    /// Creates the missing parts of the folder.
    pub(super) fn create(name: JobName, dir: Beneath, trust: &Trust) -> Result<JobFolder> {
        make_folder(&dir)?;
        let folder = JobFolder::existing(name, dir, trust)?;
        for name in [IMAGES, "log", PACKS] {
            make_folder(&folder.dir.join(name))?;
        }
        Ok(folder)
    }

    /// The job.
    #[must_use]
    pub fn name(&self) -> &JobName {
        &self.name
    }

    /// The folder itself: all access to what is in it goes through this.
    #[must_use]
    pub fn dir(&self) -> &Beneath {
        &self.dir
    }

    /// Its path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The store that it is in.
    #[must_use]
    pub fn store(&self) -> &Path {
        self.path().parent().unwrap_or_else(|| self.path())
    }

    /// A name for the job's resources outside the store: the job's name for people, and a hash of the folder's path,
    /// because two stores may have jobs of the same name.
    #[must_use]
    pub fn place_name(&self) -> String {
        let hash = blake3::hash(self.path().as_os_str().as_encoded_bytes()).to_hex();
        format!("{}-{}", self.name, hash.get(..8).unwrap_or_default())
    }

    /// The rules for trusting files.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// The folder for the output of the job.
    #[must_use]
    pub fn log_dir(&self) -> Beneath {
        self.dir.join("log")
    }

    /// The folder of the images.
    #[must_use]
    pub fn images_dir(&self) -> Beneath {
        self.dir.join(IMAGES)
    }

    /// The folder of the packs.
    #[must_use]
    pub fn packs_dir(&self) -> Beneath {
        self.dir.join(PACKS)
    }

    /// The packs with the content of packed images.
    #[must_use]
    pub fn packs(&self) -> Packs {
        Packs::new(self.packs_dir())
    }

    /// The file in which the supervisor publishes its state.
    #[must_use]
    pub fn state_file(&self) -> Beneath {
        self.dir.join("state.json")
    }

    /// Takes the lock for writing.
    ///
    /// # Errors
    /// [`Error::Supervised`] if another process has it; [`Error::PerhapsSupervised`] if one on another machine may have
    /// it; [`Error::TakenOver`] if another process was faster; [`Error::Lock`] if the file system cannot lock.
    pub fn lock(&self) -> Result<WriterLock> {
        lock::acquire(&self.dir, &self.name)
    }

    /// The same for who has time: waits while another machine may have it and shows no sign of life, and takes over from
    /// it at the end. `tell` is called every few seconds in the meantime.
    ///
    /// # Errors
    /// As [`JobFolder::lock`]; [`Error::Supervised`] and [`Error::PerhapsSupervised`] only for a holder on this machine, for
    /// one that shows a sign of life, and for one that has the kernel's lock all the time.
    pub fn lock_or_wait(&self, tell: &mut dyn FnMut(&Waiting<'_>)) -> Result<WriterLock> {
        lock::acquire_or_wait(&self.dir, &self.name, tell)
    }

    /// The present holder of the lock.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Lock`].
    pub fn writer(&self) -> Result<Writer> {
        lock::writer(&self.dir)
    }

    /// The record of the last run; `None` before the first.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::ParseRecord`], [`Error::NewerRecord`], [`Error::UntrustedRecord`].
    pub fn record(&self) -> Result<Option<JobRecord>> {
        record::read(&self.dir.join(record::FILE_NAME), &self.name, &self.trust)
    }

    /// Whether the record of the last run has a signature, of any key.
    #[must_use]
    pub fn has_signed_record(&self) -> bool {
        record::is_signed(&self.dir.join(record::FILE_NAME))
    }

    /// Replaces the record of the last run, durably.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Write`].
    pub fn write_record(&self, lock: &WriterLock, record: &JobRecord) -> Result<()> {
        self.check_lock(lock)?;
        record::write(&self.dir.join(record::FILE_NAME), record, &self.name, &self.trust)
    }

    /// All images, newest first. Damaged images are included, and are reported as such.
    ///
    /// # Errors
    /// [`Error::Read`]: a folder that cannot be listed is never treated as empty.
    pub fn images(&self) -> Result<Vec<Image>> {
        let dir = self.images_dir();
        let names = match list(&dir) {
            // No job has ever run here: somebody created the folder, or a run was interrupted at its very beginning.
            Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound && self.is_bare() => Vec::new(),
            names => names?,
        };
        let mut ids: Vec<ImageId> = names.iter().filter_map(|name| name.parse().ok()).collect();
        ids.sort_by(|a, b| b.cmp(a));
        let mut images: Vec<_> =
            ids.into_iter().map(|id| Image::load(&dir.join(id.to_string()), id, &self.trust)).collect();
        // A writer may have removed an image since the folder was listed: that is no damage.
        images.retain(|image| !matches!(image.state, State::Damaged { .. }) || image.dir.is_there());
        Ok(images)
    }

    /// Whether a run of the job has begun.
    pub(super) fn has_run(&self) -> bool {
        self.dir.join(record::FILE_NAME).is_there()
    }

    /// Whether it is there and has nothing of a job. If a file system was unmounted, nothing is there.
    fn is_bare(&self) -> bool {
        self.dir.is_dir() && !self.dir.join(record::FILE_NAME).is_there() && !self.packs_dir().is_there()
    }

    /// Whether the store has the image, good or not. If this is unknown, the answer is no: then the image in memory is
    /// kept.
    #[must_use]
    pub fn is_stored(&self, id: ImageId) -> bool {
        self.images_dir().join(id.to_string()).is_dir()
    }

    /// Whether the store has the image that this copy in memory or in a slot is of. A damaged one does not count while
    /// this copy is good: it is the only one to continue from.
    #[must_use]
    pub fn is_stored_besides(&self, copy: &Image) -> bool {
        let stored = || Image::load(&self.images_dir().join(copy.id.to_string()), copy.id, &self.trust);
        self.is_stored(copy.id) && !(copy.is_good() && stored().is_in_doubt())
    }

    /// Whether an image is on the job's current line. After a rewind the newer images of the old line are not. If the
    /// line cannot be read, all images count as on it.
    pub(super) fn line(&self) -> impl Fn(&Image) -> bool {
        let record = self.record().ok().flatten();
        move |image| match (&record, image.manifest()) {
            (Some(record), Some(manifest)) => record.has(image.id, &manifest.lineage),
            _ => true,
        }
    }

    /// Checks that the lock is one of this job, and that it is still held.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::TakenOver`], [`Error::LockReplaced`].
    pub fn check_lock(&self, lock: &WriterLock) -> Result<()> {
        if lock.guards(&self.dir) { lock.confirm() } else { Err(Error::WrongLock(self.name.clone())) }
    }
}
