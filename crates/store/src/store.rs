//! A store: a folder with the folders of jobs.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use super::error::{Error, Result};
use super::folder::JobFolder;
use super::folders::list;
use super::id::JobName;
use super::rights;
use super::trust::Trust;
use rekindle_os::beneath::{Beneath, Owners};
use rekindle_os::durable;

/// The purpose for which a store is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// For reading: a missing store is an error.
    Read,
    /// To run a job: a missing store is created.
    Write,
}

/// A folder with the folders of jobs.
#[derive(Debug, Clone)]
pub struct Store {
    dir: Beneath,
    trust: Trust,
}

impl Store {
    /// Opens a store.
    ///
    /// # Errors
    /// [`Error::NoStore`], [`Error::NotAFolder`], [`Error::Read`], [`Error::Create`]; as root also
    /// [`Error::OthersCanWrite`] and [`Error::OtherOwner`].
    pub fn open(path: &Path, access: Access) -> Result<Store> {
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && access == Access::Write => {
                make_all(path).map_err(|source| Error::CreateStore { path: path.to_owned(), source })?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Error::NoStore(path.to_owned())),
            Err(source) => return Err(Error::Read { path: path.to_owned(), source }),
            Ok(_) => {}
        }
        // A job can change its working directory; the store's paths must stay valid.
        let path = fs::canonicalize(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let dir = Beneath::root(&path, Owners::Ours).map_err(|source| match source.kind() {
            io::ErrorKind::NotADirectory => Error::NotAFolder(path.clone()),
            _ => Error::Read { path: path.clone(), source },
        })?;
        rights::check(&dir)?;
        Ok(Store { dir, trust: Trust::default() })
    }

    /// The same store with these rules of trust. [`Store::open`] alone trusts all content.
    #[must_use]
    pub fn with_trust(self, trust: Trust) -> Store {
        Store { trust, ..self }
    }

    /// The folder: all access to what is in it goes through this.
    #[must_use]
    pub fn dir(&self) -> &Beneath {
        &self.dir
    }

    /// Its path, without symbolic links, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The jobs, sorted by name.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn jobs(&self) -> Result<Vec<JobName>> {
        let mut jobs: Vec<JobName> = list(&self.dir)?.iter().filter_map(|name| name.parse().ok()).collect();
        // A link is no job, and is not passed over: whoever opens it gets an error.
        let is_job = |name: &JobName| self.folder(name).metadata().is_ok_and(|it| it.is_dir() || it.is_symlink());
        jobs.retain(is_job);
        jobs.sort();
        Ok(jobs)
    }

    /// The folder of a job.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::Read`]; as root also [`Error::OthersCanWrite`] and [`Error::OtherOwner`].
    pub fn job(&self, name: &JobName) -> Result<JobFolder> {
        let path = self.folder(name);
        match path.metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::UnknownJob { name: name.clone(), store: self.path().to_owned(), known: self.jobs()? })
            }
            _ => JobFolder::existing(name.clone(), path, &self.trust),
        }
    }

    /// The folder of a job, created if it does not exist.
    ///
    /// # Errors
    /// [`Error::Create`]; as root also [`Error::OthersCanWrite`] and [`Error::OtherOwner`].
    pub fn create_job(&self, name: &JobName) -> Result<JobFolder> {
        JobFolder::create(name.clone(), self.folder(name), &self.trust)
    }

    /// The rules for trusting files.
    pub(super) fn trust(&self) -> &Trust {
        &self.trust
    }

    fn folder(&self, name: &JobName) -> Beneath {
        self.dir.join(name.as_str())
    }
}

/// Creates a folder and its missing parents, durably.
fn make_all(path: &Path) -> io::Result<()> {
    let path = std::path::absolute(path)?;
    let missing: Vec<_> = path.ancestors().take_while(|it| !it.exists()).filter_map(Path::parent).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    missing.into_iter().try_for_each(durable::sync_dir)
}
