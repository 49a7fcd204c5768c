//! The images of all jobs: one folder a job, one image a snapshot.
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
//! ```
//!
//! docs/format.md has every byte of it. It owns all below `STORE` but the content of `log/`, `bin/` and `state.json`.
//! Invariants:
//!
//! - A folder with the name of an image was published whole (persist.rs has the protocol); its files never change after
//!   that, only `bad.json` and `tags.json` come and go.
//! - One writer a job, by lock; readers at any time, without one.
//! - What cannot be read is an error or says so. It is never taken for empty, and nothing is deleted because of it.
//! - The newest good image is never removed by a plan ([`retention`]), and a pinned one by nobody.
//!
//! When the power goes there are whole images and, perhaps, leftovers with a dot in front, which the next start sweeps.

pub mod chunk;
mod draft;
mod error;
mod files;
mod folder;
pub mod format;
pub mod gc;
pub mod heal;
mod id;
pub mod image;
mod known;
mod links;
mod lock;
pub mod manifest;
mod mark;
pub mod options;
pub mod pack;
mod paths;
pub mod persist;
mod proven;
mod record;
mod remove;
pub mod repair;
pub mod replica;
pub mod retention;
mod rights;
pub mod scrub;
mod seen;
mod select;
pub mod staging;
mod tags;
mod trust;
pub mod unpack;
mod verify;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

pub use draft::{Draft, PublishError};
pub use error::failed;
pub use error::{Error, FileError, Result};
pub use folder::JobFolder;
pub use id::{ImageId, JobName, NameError};
pub use image::{Damage, DamageKind, Form, Image, Place, State};
pub use known::Known;
pub use lock::{HEARTBEAT, Hold, Holder, Writer, WriterLock};
pub use manifest::Manifest;
pub use mark::{BadMark, BadWhy};
pub use paths::{GroupPath, JobPath, PartPath, PathError};
pub use record::{JobRecord, Outcome};
pub use seen::{Newest, Seen};
pub use select::LATEST;
pub use tags::{Change, NoTag, Tag, Tags};
pub use trust::{Trust, Unsigned, Untrusted};
pub use verify::{Finding, PackReport, PacksReport, PartReport, Report, Share, check_packs};

use rekindle_os::durable;

/// How the name of an image starts while it is removed.
const DELETED_PREFIX: &str = ".del-";

/// What a store is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// For reading: a missing store is an error.
    Read,
    /// To run a job: a missing store is created.
    Write,
}

/// A folder with jobs in it.
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
                make_all(path).map_err(|source| Error::Create { path: path.to_owned(), source })?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Error::NoStore(path.to_owned())),
            Err(source) => return Err(Error::Read { path: path.to_owned(), source }),
            Ok(_) => {}
        }
        rights::check(path)?;
        // A job changes its directory; the store's paths must mean the same afterwards.
        let path = fs::canonicalize(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Ok(Store { path, trust: Trust::default() })
    }

    /// The same store, which trusts only that. [`Store::open`] alone trusts all content.
    #[must_use]
    pub fn with_trust(self, trust: Trust) -> Store {
        Store { trust, ..self }
    }

    /// The folder, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The jobs, by name.
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

    /// The folder of a job, made where it is missing.
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

/// Makes a folder and its missing parents, durably.
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
