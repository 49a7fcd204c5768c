//! Copies of a job's images in an object store, outside this machine.
//!
//! This crate owns everything below `PATH/JOB` of the address (layout.rs), where it writes and removes only packs,
//! indexes, and files of images. The only asynchronous code for it is in client.rs; its callers
//! block.
//!
//! An image is replicated when its manifest is there, which is sent last:
//!
//! 1. a listing shows which of the needed packs are missing or have another size
//! 2. those are sent, each as a whole or not at all, each followed by its index
//! 3. the chunk map is sent
//! 4. the listing is repeated, and what somebody removed in the meantime is sent again
//! 5. the manifest is sent
//!
//! An image is removed in the reverse order: manifest, map, and then the packs that no other image in the replica
//! needs. If either is interrupted, by a network failure or a power cut, packs without an image remain: the next upload
//! uses them, or the next removal removes them. Nothing that was sent is sent again, except the pack in progress.
//!
//! Two machines that write images of one job to one address are not supported: each would remove the other's images by
//! its own count. They do not damage the images that stay, as long as their clocks differ by less than an hour: names
//! of packs are random, and a pack without an image is left alone for an hour, so that its image can follow.
//!
//! Everything that is fetched is checked as if it came from a stranger: manifests, maps and indexes by their own
//! hashes, the content chunk by chunk (fetch.rs).

mod chunks;
mod client;
mod connect;
mod cover;
mod error;
mod fetch;
mod layout;
mod read_mark;
mod retain;
mod send;
mod spans;
mod upload;
mod url;

use std::ffi::OsString;

pub use chunks::OnDemand;
pub use client::Cancelled;
pub use connect::{Patience, reads_variable};
pub use error::{Error, Failure, Result};
pub use retain::Removed;
pub use upload::Uploaded;
pub use url::{ReplicaUrl, Scheme};

use client::Client;
use connect::Environment;
use layout::{Inventory, Of, RemoteFiles};

use rekindle_store as store;
use rekindle_store::image::{Damage, DamageKind, is_untrusted};
use rekindle_store::manifest::{self, Manifest, ManifestError};
use rekindle_store::record::{self, JobRecord};
use rekindle_store::{ImageId, JobName, State, Trust};

/// The copies of one job's images at one address.
#[derive(Debug)]
pub struct Replica {
    client: Client,
    rate: Option<u64>,
    min_free: u64,
    trust: Trust,
    job: JobName,
}

/// An image in the replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteImage {
    /// Its id.
    pub id: ImageId,
    /// Whether it can be used, as far as its manifest tells.
    pub state: State,
}

impl RemoteImage {
    /// Its manifest, if it can be used.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        match &self.state {
            State::Good(manifest) | State::Bad { manifest, .. } => Some(manifest),
            State::Damaged { .. } => None,
        }
    }

    /// Whether a restart may use it.
    #[must_use]
    pub fn is_good(&self) -> bool {
        matches!(self.state, State::Good(_))
    }
}

impl Replica {
    /// The replica of a job, with credentials from the environment. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open(url: &ReplicaUrl, job: &JobName, patience: Patience) -> Result<Replica> {
        Replica::open_with(url, job, patience, std::env::vars_os())
    }

    /// The same with these variables instead of the environment.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn open_with(
        url: &ReplicaUrl,
        job: &JobName,
        patience: Patience,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Replica> {
        Ok(Replica {
            client: Client::new(url, job, &Environment::new(variables), patience)?,
            rate: None,
            min_free: 0,
            trust: Trust::default(),
            job: job.clone(),
        })
    }

    /// Applies these rules of trust to content of the replica. By default all is trusted.
    #[must_use]
    pub fn with_trust(self, trust: &Trust) -> Replica {
        Replica { trust: trust.for_job(&self.job), ..self }
    }

    /// Limits the bytes sent per second.
    #[must_use]
    pub fn with_rate(self, rate: Option<u64>) -> Replica {
        Replica { rate, ..self }
    }

    /// Fetches only if this many bytes stay free here.
    #[must_use]
    pub fn with_min_free(self, min_free: u64) -> Replica {
        Replica { min_free, ..self }
    }

    /// The images in the replica, newest first.
    ///
    /// # Errors
    /// [`Error::Remote`], [`Error::Cancelled`].
    pub fn images(&self, cancelled: Cancelled<'_>) -> Result<Vec<RemoteImage>> {
        let there = self.inventory(cancelled)?;
        there.published().map(|(id, files)| self.look(id, files, cancelled)).collect()
    }

    /// The newest image in the replica, in whatever state.
    ///
    /// # Errors
    /// [`Error::Remote`], [`Error::Cancelled`].
    pub fn newest(&self, cancelled: Cancelled<'_>) -> Result<Option<RemoteImage>> {
        let there = self.inventory(cancelled)?;
        there.published().next().map(|(id, files)| self.look(id, files, cancelled)).transpose()
    }

    /// Fails if the image cannot be used because it is not trusted.
    ///
    /// # Errors
    /// [`Error::Untrusted`].
    pub fn check_trusted(&self, image: &RemoteImage) -> Result<()> {
        let url = || self.client.shown();
        match is_untrusted(&image.state) {
            Some(why) => {
                Err(Error::Untrusted { url: url(), what: format!("image {}", image.id), why: why.to_string() })
            }
            None => Ok(()),
        }
    }

    /// How the last run of the job ended, as far as the replica knows.
    ///
    /// # Errors
    /// [`Error::Remote`], [`Error::Damaged`], [`Error::Cancelled`].
    pub fn record(&self, cancelled: Cancelled<'_>) -> Result<Option<JobRecord>> {
        let Some(bytes) = self.client.get(layout::RECORD, record::MAX_BYTES, cancelled)? else { return Ok(None) };
        let damaged = |why: String| Error::Damaged { url: self.client.shown(), what: layout::RECORD.into(), why };
        match record::parse(&bytes, std::path::Path::new(layout::RECORD), &self.job, &self.trust) {
            Ok(record) => Ok(Some(record)),
            Err(store::Error::UntrustedRecord { source, .. }) => {
                let why = format!("it {source}");
                Err(Error::Untrusted { url: self.client.shown(), what: layout::RECORD.into(), why })
            }
            Err(error) => Err(damaged(error.to_string())),
        }
    }

    /// Records in the replica how the last run ended: another machine must not continue a completed job.
    ///
    /// # Errors
    /// [`Error::Remote`], [`Error::Cancelled`].
    pub fn put_record(&self, record: &JobRecord, cancelled: Cancelled<'_>) -> Result<()> {
        self.client.prepare()?;
        let bytes = record::to_bytes(record, &self.job, &self.trust)
            .map_err(|source| Error::Write { path: layout::RECORD.into(), source })?;
        self.client.put(layout::RECORD, bytes, cancelled)
    }

    fn inventory(&self, cancelled: Cancelled<'_>) -> Result<Inventory> {
        Ok(Inventory::of(self.client.list(cancelled)?))
    }

    /// Reads manifest and mark.
    fn look(&self, id: ImageId, files: &RemoteFiles, cancelled: Cancelled<'_>) -> Result<RemoteImage> {
        let found = match self.client.get(&layout::of_image(id, Of::Manifest), manifest::MAX_BYTES, cancelled) {
            Ok(Some(bytes)) => Manifest::parse(&bytes, &self.trust),
            Ok(None) => Err(ManifestError::Missing),
            // Too large for a manifest.
            Err(Error::Damaged { why, .. }) => {
                let why = Damage { kind: DamageKind::Broken, detail: why };
                return Ok(RemoteImage { id, state: State::Damaged { why } });
            }
            Err(error) => return Err(error),
        };
        let found = found.and_then(|manifest| match manifest.id == id {
            true => Ok(Box::new(manifest)),
            false => Err(ManifestError::OtherImage(manifest.id)),
        });
        let manifest = match found {
            Ok(manifest) => manifest,
            Err(error) => return Ok(RemoteImage { id, state: State::Damaged { why: error.into() } }),
        };
        let mark = match files.mark {
            Some(_) => self.client.get(&layout::of_image(id, Of::Mark), read_mark::MAX_BYTES, cancelled)?,
            None => None,
        };
        let state = match mark {
            Some(bytes) => State::Bad { mark: read_mark::parse(&bytes, manifest.taken), manifest },
            None => State::Good(manifest),
        };
        Ok(RemoteImage { id, state })
    }
}
