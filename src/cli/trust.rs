//! Checks, before anything is started or written, whether the images that a run would continue from are trusted.
//!
//! An image without a signature may be from before there was a key, and another key is usually an error in the
//! configuration. Skipping the image would lose work silently; using it could run an image made by an attacker. So the
//! user has to decide, and nothing is changed before.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::replica;
use crate::config::Config;
use rekindle_base::chain;
use rekindle_base::units::moment;
use rekindle_store::image::is_untrusted;
use rekindle_store::{Access, Error, ImageId, JobFolder, JobName, Outcome, Seen, Store};

/// The newest image is not trusted, and it is newer than all trusted ones.
#[derive(Debug, thiserror::Error)]
#[error(
    "image {image} of job {job} is refused: {why}. It is kept unchanged, and nothing was started. `rekindle run \
    --fresh` starts the job from the beginning; `rekindle restore {job}/ID` continues from a signed image"
)]
pub(crate) struct Refused {
    job: JobName,
    image: ImageId,
    why: String,
}

/// The content of the store was encrypted with another key.
#[derive(Debug, thiserror::Error)]
#[error("the key in {} (store.encryption-key) is not the one that the images of job {job} were encrypted with. Set \
    store.encryption-key to that one. Nothing was written", key.display())]
pub(crate) struct WrongKey {
    key: PathBuf,
    job: JobName,
}

/// The job was run with a key, and would now continue without one.
#[derive(Debug, thiserror::Error)]
#[error(
    "job {job} was run with an encryption key, and store.encryption-key is not set: set it to the key that was used \
    then. Nothing was written; `rekindle run --fresh` starts the job from the beginning, without a key"
)]
pub(crate) struct KeyLeftOut {
    job: JobName,
}

/// Refuses before the store is locked or created.
pub(super) fn check(config: &Config, job: &JobName) -> anyhow::Result<()> {
    let trust = config.store.trust()?;
    // Errors of the store are reported when it is opened for writing.
    let here = Store::open(&config.store.directory, Access::Read).map(|store| store.with_trust(trust.clone()));
    let here = here.and_then(|store| store.jobs()?.contains(job).then(|| store.job(job)).transpose());
    match here {
        Ok(Some(folder)) if trust.key().is_none() && folder.has_signed_record() => {
            Err(KeyLeftOut { job: job.clone() }.into())
        }
        Ok(Some(folder)) => check_here(&folder),
        Ok(None) | Err(Error::NoStore(_)) => replica::check_newest(config, job, &trust),
        Err(_) => Ok(()),
    }
}

/// The same for the job's folder here.
pub(super) fn check_here(folder: &JobFolder) -> anyhow::Result<()> {
    let trust = folder.trust();
    let Some((key, path)) = trust.key().zip(trust.key_path()) else { return Ok(()) };
    let ids: BTreeSet<[u8; 16]> = folder.packs().keys()?;
    if !ids.is_empty() && !ids.contains(&key.id()) {
        return Err(WrongKey { key: path.to_owned(), job: folder.name().clone() }.into());
    }
    match folder.record() {
        Ok(Some(record)) if record.outcome == Outcome::Completed => Ok(()),
        // The image's id is more useful than the fact that the record is not trusted.
        record => {
            check_newest(folder)?;
            Ok(record.map(drop)?)
        }
    }
}

/// Refuses if an untrusted image is newer than all good ones.
pub(super) fn check_newest(folder: &JobFolder) -> anyhow::Result<()> {
    let copies = folder.copies()?;
    // There may be two copies: one good copy is enough.
    let best = copies.iter().filter(|image| image.is_good()).map(|image| image.id).max();
    let newer = copies.iter().filter(|image| best.is_none_or(|best| image.id > best));
    match newer.filter_map(|image| Some((image.id, is_untrusted(&image.state)?))).next() {
        Some((image, why)) => Err(Refused { job: folder.name().clone(), image, why: why.to_string() }.into()),
        None => Ok(()),
    }
}

/// An image that the user named and that is not trusted.
pub(super) fn refuse(folder: &JobFolder, image: &rekindle_store::Image) -> anyhow::Result<()> {
    match is_untrusted(&image.state) {
        Some(why) => Err(Refused { job: folder.name().clone(), image: image.id, why: why.to_string() }.into()),
        None => Ok(()),
    }
}

/// This machine's notes about the job's images.
pub(super) fn seen(folder: &JobFolder) -> Option<Seen> {
    Seen::of(folder.name(), folder.trust())
}

/// Warns if the images here are older than ones that this machine has seen.
pub(super) fn look_for_rollback(seen: &Seen, folder: &JobFolder, lineage: Option<&str>) {
    let tell = || -> anyhow::Result<()> {
        let job = folder.name();
        let help = "If you did not restore a backup, lose a disk or remove images, stop the job and find out who can \
            write to the store and the replica";
        let Some(lineage) = lineage else {
            if let Some(last) = seen.runs()?.first() {
                tracing::error!(
                    "this machine has seen image {} of job {job} (noted {}), but no image of that run is left: the \
                    job starts from the beginning. {help}",
                    last.image,
                    moment(last.when)
                );
            }
            return Ok(());
        };
        let Some(last) = seen.newest(lineage)? else { return Ok(()) };
        let copies = folder.copies()?;
        let ours = copies.iter().filter_map(|image| image.manifest()).filter(|manifest| manifest.lineage == lineage);
        let newest = ours.map(|manifest| manifest.id).max();
        if newest.is_none_or(|newest| newest < last.image) {
            let here = newest.map_or_else(
                || "there is no image here".to_owned(),
                |newest| {
                    format!(
                        "the newest image here is \
                    {newest}"
                    )
                },
            );
            tracing::error!(
                "job {job} continues from an older state: this machine has seen image {} (noted {}), and {here}. \
                {help}; `rekindle list {job} --replica` lists the images",
                last.image,
                moment(last.when)
            );
        }
        Ok(())
    };
    if let Err(error) = tell() {
        tracing::warn!("cannot check whether the images of the job are the newest ones: {}", chain(error.as_ref()));
    }
}

/// A note that cannot be changed does not prevent the run.
pub(super) fn forget(seen: &Seen, lineage: &str) {
    if let Err(error) = seen.forget(lineage) {
        tracing::warn!("{}", chain(&error));
    }
}
