//! Converts the configuration to the options of each part of the program.

use std::sync::Arc;
use std::time::Duration;

use super::group::Group;
use super::model::{Config, Log, Store};
use rekindle_engine::launch::{Privileges, output};
use rekindle_engine::snapshot;
use rekindle_etcd::Secret;
use rekindle_store::chunk::{Key, KeyError};
use rekindle_store::pack::Unread;
use rekindle_store::persist::{self, Packing};
use rekindle_store::retention::Policy;
use rekindle_store::retention::survey::Limits;
use rekindle_store::{Trust, gc};

impl Store {
    /// The rules for keeping images.
    #[must_use]
    pub(crate) fn policy(&self) -> Policy {
        Policy {
            keep_last: self.keep_last,
            keep_hourly: self.keep_hourly,
            keep_daily: self.keep_daily,
            keep_within: self.keep_within,
            max_total: self.max_total_size.bytes(),
        }
    }

    /// The limits that decide whether there is space for an image.
    #[must_use]
    pub(crate) fn limits(&self) -> Limits {
        Limits { policy: self.policy(), min_free: self.min_free.bytes(), copies: self.copies }
    }

    /// How images are packed.
    #[must_use]
    pub(crate) fn packing(&self, trust: &Trust) -> Packing {
        Packing {
            compression: self.compression,
            key: trust.key().cloned().map(Arc::new),
            bounds: persist::Bounds { rate: self.persist_rate.bytes(), threads: persist::threads() },
            copies: self.copies,
            unread: Unread::default(),
        }
    }

    /// How unneeded content is removed.
    #[must_use]
    pub(crate) fn garbage<'k>(&self, key: Option<&'k Key>) -> gc::Bounds<'k> {
        gc::Bounds {
            sweep_after: sweep_after(),
            repack: Some(gc::REPACK),
            key,
            copies: self.copies,
            min_free: self.min_free.bytes(),
        }
    }

    /// The rules for trusting files of the store. Reads the key.
    ///
    /// # Errors
    /// When a key is configured and cannot be used.
    pub(crate) fn trust(&self) -> Result<Trust, KeyError> {
        let Some(path) = &self.encryption_key else { return Ok(Trust::default()) };
        Ok(Trust::new(Key::read(path)?, path, self.unsigned))
    }
}

/// [`gc::SWEEP_AFTER`]; tests name a shorter time.
fn sweep_after() -> Duration {
    let named = cfg!(debug_assertions).then(|| std::env::var("REKINDLE_TEST_SWEEP_AFTER").ok()).flatten();
    named.and_then(|time| humantime::parse_duration(&time).ok()).unwrap_or(gc::SWEEP_AFTER)
}

impl Log {
    /// How much of the job's output is kept.
    #[must_use]
    pub(crate) fn bounds(&self) -> output::Bounds {
        output::Bounds { size: self.max_size.bytes(), keep: self.keep }
    }
}

impl Group {
    /// How to reach these members of etcd. The prefix of the keys is the caller's.
    #[must_use]
    pub(crate) fn etcd(&self, members: &[String]) -> rekindle_etcd::Options {
        let file = |path: &std::path::PathBuf| Secret::File(path.clone());
        rekindle_etcd::Options {
            ca: self.ca.as_ref().map(file),
            identity: self.certificate.as_ref().map(file).zip(self.key.as_ref().map(file)),
            login: self.user.clone().zip(self.password_file.as_ref().map(file)),
            ..rekindle_etcd::Options::new(members, "/")
        }
    }
}

impl Config {
    /// How a snapshot is taken.
    #[must_use]
    pub(crate) fn snapshot_options(&self) -> snapshot::Options {
        let of = &self.snapshot;
        snapshot::Options {
            track: self.files.track.clone(),
            file_limit: of.file_limit.bytes(),
            tcp: of.tcp,
            lock_timeout: of.lock_timeout(),
            lock_limit: of.lock_limit(),
            stop_limit: of.stop_limit(),
            freeze_limit: of.freeze_limit,
            memory: self.gpu.memory,
            full_copy_every: self.gpu.full_copy_every,
            memory_reserve: of.memory_reserve.bytes(),
            limits: self.store.limits(),
            threads: persist::threads(),
            privileges: if self.job.keeps_its_rights() { Privileges::Fixed } else { Privileges::MayGrow },
        }
    }
}
