//! The replica of one job: its images and its record.

use std::collections::BTreeSet;
use std::ffi::OsString;

use serde::{Deserialize, Serialize};

use crate::client::{Cancelled, Client};
use crate::connect::Patience;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::layout::{self, Inventory, Of};
use crate::read_mark;
use crate::url::ReplicaUrl;
use rekindle_store as store;
use rekindle_store::image::{Damage, DamageKind, is_untrusted};
use rekindle_store::manifest::{self, Manifest, ManifestError};
use rekindle_store::record::{self, JobRecord};
use rekindle_store::{ImageId, JobName, State, Trust};

/// The copies of one job's images at one address.
#[derive(Debug)]
pub struct Replica {
    pub(super) client: Client,
    pub(super) rate: Option<u64>,
    pub(super) min_free: u64,
    pub(super) trust: Trust,
    job: JobName,
}

/// Which image was sent last.
#[derive(Serialize, Deserialize)]
struct Last {
    image: ImageId,
}

/// Maximum size of that; it has some fifty bytes.
const LAST_MAX: u64 = 4 << 10;

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
        Ok(Replica::over(Client::new(url, job, &Environment::new(variables), patience)?, job.clone()))
    }

    /// The same with this client.
    pub(super) fn over(client: Client, job: JobName) -> Replica {
        Replica { client, rate: None, min_free: 0, trust: Trust::default(), job }
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
        let ids = self.ids(cancelled)?.into_iter().rev();
        ids.filter_map(|id| self.look(id, cancelled).transpose()).collect()
    }

    /// The newest image in the replica, in whatever state.
    ///
    /// # Errors
    /// [`Error::Remote`], [`Error::Cancelled`].
    pub fn newest(&self, cancelled: Cancelled<'_>) -> Result<Option<RemoteImage>> {
        let mut ids = self.ids(cancelled)?.into_iter().rev();
        ids.find_map(|id| self.look(id, cancelled).transpose()).transpose()
    }

    /// The images of a listing, and the one that was sent last, which may not be in it yet.
    fn ids(&self, cancelled: Cancelled<'_>) -> Result<BTreeSet<ImageId>> {
        let mut ids: BTreeSet<ImageId> = self.inventory(cancelled)?.published().collect();
        // It is only a hint.
        let last = match self.client.get(layout::NEWEST, LAST_MAX, cancelled) {
            Err(Error::Damaged { .. }) => None,
            last => last?,
        };
        ids.extend(last.and_then(|bytes| serde_json::from_slice::<Last>(&bytes).ok()).map(|last| last.image));
        Ok(ids)
    }

    /// Records which image was sent last.
    pub(super) fn put_last(&self, image: ImageId, cancelled: Cancelled<'_>) -> Result<()> {
        let bytes = serde_json::to_vec(&Last { image }).map_err(std::io::Error::from);
        let bytes = bytes.map_err(|source| Error::Write { path: layout::NEWEST.into(), source })?;
        self.client.put(layout::NEWEST, bytes, cancelled)
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

    pub(super) fn inventory(&self, cancelled: Cancelled<'_>) -> Result<Inventory> {
        Ok(Inventory::of(self.client.list(cancelled)?))
    }

    /// Reads manifest and mark, whatever a listing says about them. `None` if there is no such image.
    pub(super) fn look(&self, id: ImageId, cancelled: Cancelled<'_>) -> Result<Option<RemoteImage>> {
        let found = match self.client.get(&layout::of_image(id, Of::Manifest), manifest::MAX_BYTES, cancelled) {
            Ok(Some(bytes)) => Manifest::parse(&bytes, &self.trust),
            Ok(None) => return Ok(None),
            // Too large for a manifest.
            Err(Error::Damaged { why, .. }) => {
                let why = Damage { kind: DamageKind::Broken, detail: why };
                return Ok(Some(RemoteImage { id, state: State::Damaged { why } }));
            }
            Err(error) => return Err(error),
        };
        let found = found.and_then(|manifest| match manifest.id == id {
            true => Ok(Box::new(manifest)),
            false => Err(ManifestError::OtherImage(manifest.id)),
        });
        let manifest = match found {
            Ok(manifest) => manifest,
            Err(error) => return Ok(Some(RemoteImage { id, state: State::Damaged { why: error.into() } })),
        };
        let mark = self.client.get(&layout::of_image(id, Of::Mark), read_mark::MAX_BYTES, cancelled)?;
        let state = match mark {
            Some(bytes) => State::Bad { mark: read_mark::parse(&bytes, manifest.taken), manifest },
            None => State::Good(manifest),
        };
        Ok(Some(RemoteImage { id, state }))
    }
}
