//! The images of all jobs: one folder per job, one image per snapshot.
//!
//! ```text
//! STORE/  0700
//!   JOB/  0700
//!     lock  job.json  state.json  log/  bin/  staging (a link to the images in RAM, see [`staging`])
//!     slots/                           images on the disk that are not in the store yet (see [`staging::disk`])
//!     images/
//!       000042-20261120T132105Z/       an image: manifest.json, where there are any bad.json and tags.json; and parts at any
//!                                      depth (loose) or the chunk map (packed)
//!       .tmp-000043-20261120T132205Z/  a draft
//!       .del-000039-20261120T131805Z/  on its way out
//!     packs/                           the chunks of packed images (see [`pack`])
//!   .del-JOB/                          a job on its way out
//! ```
//!
//! docs/format.md describes every byte. This crate owns everything below `STORE`, except the content of `log/`, `bin/`
//! and `state.json`. Invariants:
//!
//! - A folder with the name of an image was published completely (persist.rs has the protocol). Its files never change
//!   after that; only `bad.json` and `tags.json` are added and removed.
//! - Each job has one writer, ensured by a lock; readers need no lock.
//! - Anything unreadable is an error, or is reported as unreadable. It is never treated as empty, and nothing is
//!   deleted because of it.
//! - Retention ([`retention`]) never removes the newest good image, and nothing removes a pinned image.
//!
//! After a power cut there are complete images and possibly leftovers, whose names begin with a dot. The next start
//! removes them.

pub mod chunk;
mod draft;
mod error;
mod file_error;
mod files;
mod folder;
pub mod format;
pub mod gc;
pub mod heal;
mod hex;
mod holder;
mod id;
pub mod image;
mod known;
mod links;
mod lock;
pub mod manifest;
pub mod mark;
mod names;
pub mod options;
pub mod pack;
mod paths;
pub mod persist;
mod proven;
pub mod record;
mod remove;
pub mod repair;
pub mod retention;
mod rights;
pub mod scrub;
mod seen;
mod select;
pub mod staging;
mod tag;
mod tags;
mod trust;
pub mod unpack;
mod verify;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

pub use draft::{Draft, PublishError};
pub use error::{Error, Result};
pub use file_error::{FileError, failed};
pub use folder::JobFolder;
pub use holder::{HEARTBEAT, Holder};
pub use id::{ImageId, JobName, NameError};
pub use image::{Damage, DamageKind, Form, Image, Place, State};
pub use known::Known;
pub use lock::{Hold, Writer, WriterLock};
pub use manifest::Manifest;
pub use mark::{BadMark, BadWhy};
pub use paths::{GroupPath, JobPath, PartPath, PathError};
pub use record::{JobRecord, Outcome};
pub use remove::Pinned;
pub use seen::{Newest, Seen};
pub use select::nth_newest;
pub use tag::{Change, LATEST, NoTag, Tag, Tags};
pub use trust::{Trust, Unsigned, Untrusted};
pub use verify::{Finding, PackReport, PacksReport, PartReport, Report, Share, check_packs};

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
    path: PathBuf,
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
        rights::check(path)?;
        // A job can change its working directory; the store's paths must stay valid.
        let path = fs::canonicalize(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Ok(Store { path, trust: Trust::default() })
    }

    /// The same store with these rules of trust. [`Store::open`] alone trusts all content.
    #[must_use]
    pub fn with_trust(self, trust: Trust) -> Store {
        Store { trust, ..self }
    }

    /// The folder, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The jobs, sorted by name.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn jobs(&self) -> Result<Vec<JobName>> {
        let mut jobs: Vec<JobName> = folder::list(&self.path)?.iter().filter_map(|name| name.parse().ok()).collect();
        jobs.retain(|name| self.folder(name).is_dir());
        jobs.sort();
        Ok(jobs)
    }

    /// The folder of a job.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::Read`]; as root also [`Error::OthersCanWrite`] and [`Error::OtherOwner`].
    pub fn job(&self, name: &JobName) -> Result<JobFolder> {
        let path = self.folder(name);
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::UnknownJob { name: name.clone(), store: self.path.clone(), known: self.jobs()? })
            }
            _ => JobFolder::existing(name.clone(), path, &self.trust),
        }
    }

    /// The folder of a job, created if it does not exist.
    ///
    /// # Errors
    /// [`Error::Create`], [`Error::NotAFolder`]; as root also [`Error::OthersCanWrite`] and [`Error::OtherOwner`].
    pub fn create_job(&self, name: &JobName) -> Result<JobFolder> {
        JobFolder::create(name.clone(), self.folder(name), &self.trust)
    }

    fn folder(&self, name: &JobName) -> PathBuf {
        self.path.join(name.as_str())
    }
}

/// Creates a folder and its missing parents, durably.
fn make_all(path: &Path) -> io::Result<()> {
    let path = std::path::absolute(path)?;
    let missing: Vec<_> = path.ancestors().take_while(|it| !it.exists()).filter_map(Path::parent).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    missing.into_iter().try_for_each(durable::sync_dir)
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::manifest as sample_manifest;
