//! Before a job continues, a newer image in its replica is fetched.
//!
//! A start from the beginning because the network is down would lose the work in the replica, so it is refused without
//! a local image. With a local image the job continues from that, and the log says that there may be a newer one.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::Misuse;
use crate::config::Config;
use crate::supervisor::notify::Notify;
use rekindle_base::chain;
use rekindle_base::units::size;
use rekindle_replica::{Error, Patience, RemoteImage, Replica};
use rekindle_store::chunk::Key;
use rekindle_store::persist::Progress;
use rekindle_store::{
    self, Access, Image, ImageId, JobFolder, JobName, JobRecord, LATEST, Manifest, Outcome, State, Store, Trust,
    WriterLock,
};

/// How often a fetch logs its progress.
const SAY: Duration = Duration::from_secs(3);

/// The replica is needed and cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "no local image of the job, and the replica cannot be checked: {why}. Fix that and run again, or use --fresh to \
    start the job from the beginning"
)]
pub(crate) struct Unknown {
    why: String,
}

/// The replica has a newer image that cannot be fetched now. Continuing from an older one would lose work.
#[derive(Debug, thiserror::Error)]
#[error("the replica has an image that is not here, and it cannot be fetched. Fix that and run the same command again")]
pub(crate) struct NotFetched(#[source] Error);

/// The images of the replica are not trusted, or cannot be decrypted: the configuration must be corrected.
#[derive(Debug, thiserror::Error)]
#[error("no image was fetched, and nothing was changed; `rekindle run --fresh` starts the job from the beginning")]
pub(crate) struct Refused(#[source] Error);

/// The error of a command that needs the replica.
fn refused(error: Error) -> anyhow::Error {
    match error {
        error @ (Error::Untrusted { .. } | Error::Key { .. }) => Refused(error).into(),
        error => error.into(),
    }
}

/// Refuses before anything is written here: for a job that this machine does not know, the newest image there must be
/// trusted. Errors of the replica itself are reported by the fetch.
pub(super) fn check_newest(config: &Config, job: &JobName, trust: &Trust) -> anyhow::Result<()> {
    let (Some(url), Some(_)) = (&config.replica.url, trust.key()) else { return Ok(()) };
    let Ok(replica) = Replica::open(url, job, Patience::Little) else { return Ok(()) };
    let replica = replica.with_trust(trust);
    match replica.newest(&|| false).and_then(|newest| newest.map_or(Ok(()), |image| replica.check_trusted(&image))) {
        Err(error @ Error::Untrusted { .. }) => Err(refused(error)),
        _ => Ok(()),
    }
}

/// Fetches the newest good image of the job if it is newer than all local ones, with the record of its run. Does
/// nothing without `replica.url`, or for a job that is completed.
pub(super) fn bring_newest(config: &Config, folder: &JobFolder, lock: &WriterLock) -> anyhow::Result<()> {
    let Some(url) = &config.replica.url else { return Ok(()) };
    let record = folder.record()?;
    if record.as_ref().is_some_and(|record| record.outcome == Outcome::Completed) {
        return Ok(());
    }
    let newest = folder.copies()?.into_iter().find(Image::is_good).map(|image| image.id);
    let min_free = config.store.min_free.bytes();
    let fetched = Replica::open(url, folder.name(), Patience::Little)
        .map(|replica| replica.with_min_free(min_free).with_trust(folder.trust()))
        .and_then(|replica| look(&replica, folder, lock, folder.trust().key(), record.as_ref(), newest));
    match (fetched, newest) {
        (Ok(None), _) => Ok(()),
        (Ok(Some((image, new))), _) => {
            if let Some(record) = new {
                folder.write_record(lock, &record)?;
            }
            tracing::info!("image {} was fetched from the replica", image.id);
            Ok(())
        }
        (Err(error @ Error::NoRoom { .. }), _) => Err(NotFetched(error).into()),
        (Err(error @ (Error::Untrusted { .. } | Error::Key { .. })), None) => Err(refused(error)),
        (Err(error), Some(newest)) => {
            let why = chain(&error);
            tracing::warn!("cannot check the replica for a newer image: {why}. Continuing from local image {newest}");
            Ok(())
        }
        (Err(error), None) => Err(Unknown { why: chain(&error) }.into()),
    }
}

/// Whether a member of a group may continue from parts in the replica. It may not if the job has completed on another
/// machine. Copies the record of the run, if there is none here.
pub(super) fn may_have_parts(config: &Config, folder: &JobFolder, lock: &WriterLock) -> anyhow::Result<bool> {
    let (Some(url), None) = (&config.replica.url, folder.record()?) else { return Ok(true) };
    let replica = Replica::open(url, folder.name(), Patience::Little).map(|replica| replica.with_trust(folder.trust()));
    let theirs = match replica.and_then(|replica| replica.record(&|| false)) {
        Ok(theirs) => theirs,
        Err(error @ (Error::Untrusted { .. } | Error::Key { .. })) => return Err(refused(error)),
        Err(error) => return Err(Unknown { why: chain(&error) }.into()),
    };
    match theirs {
        Some(theirs) if theirs.outcome == Outcome::Completed => {
            tracing::info!("job {} was completed on another machine", folder.name());
            Ok(false)
        }
        Some(theirs) => {
            folder.write_record(lock, &theirs)?;
            Ok(true)
        }
        None => Ok(true),
    }
}

/// Fetches the image that JOB or JOB/ID names if the replica has it and the store does not; JOB means the newest good
/// one.
pub(super) fn bring_named(config: &Config, text: &str) -> anyhow::Result<()> {
    let Some(url) = &config.replica.url else { return Ok(()) };
    let (job, wanted) = text.split_once('/').unwrap_or((text, LATEST));
    // An id alone is searched only in the store.
    let Ok(name) = job.parse::<JobName>() else { return Ok(()) };
    let trust = config.store.trust()?;
    let here = Store::open(&config.store.directory, Access::Read).map(|store| store.with_trust(trust.clone()));
    let here = match here.and_then(|store| store.jobs()?.contains(&name).then(|| store.job(&name)).transpose()) {
        Err(rekindle_store::Error::NoStore(_)) => None,
        here => here?,
    };
    let found = here.as_ref().and_then(|folder| folder.find(wanted).ok()).map(|image| image.id);
    if found.is_some() && wanted != LATEST {
        return Ok(());
    }
    let unknown = |error: &Error| match found {
        Some(id) => {
            let why = chain(error);
            tracing::warn!("cannot check the replica for an image newer than {id}: {why}");
            Ok(())
        }
        None => Err(Unknown { why: chain(error) }.into()),
    };
    let replica = Replica::open(url, &name, Patience::Little).map(|replica| replica.with_trust(&trust));
    let images = replica.and_then(|replica| Ok((replica.images(&|| false)?, replica)));
    let (images, replica) = match images {
        Ok(found) => found,
        Err(error) => return unknown(&error),
    };
    let is_wanted = |image: &&RemoteImage| match wanted {
        LATEST => image.is_good() && found.is_none_or(|found| image.id > found),
        number if number.parse() == Ok(image.id.sequence()) => true,
        text => !text.is_empty() && image.id.to_string().starts_with(text),
    };
    if wanted == LATEST
        && let Some(newest) = images.first().filter(|newest| found.is_none_or(|found| newest.id > found))
    {
        replica.check_trusted(newest).map_err(refused)?;
    }
    let mut matching = images.iter().filter(is_wanted);
    let (image, more) = (matching.next(), matching.next());
    if wanted != LATEST && more.is_some() {
        return Err(Misuse(format!("{wanted:?} matches several images of the replica: use the full id")).into());
    }
    if let Some(image) = image {
        replica.check_trusted(image).map_err(refused)?;
    }
    // If it is not in the replica either, the store reports it.
    let Some((image, manifest)) = image.and_then(|image| Some((image, image.manifest()?))) else { return Ok(()) };
    let store = Store::open(&config.store.directory, Access::Write)?.with_trust(trust);
    let folder = store.create_job(&name)?;
    let lock = folder.lock()?;
    let replica = replica.with_min_free(config.store.min_free.bytes());
    fetch(&replica, &folder, &lock, folder.trust().key(), image.id).map_err(|error| match error {
        Error::NoRoom { .. } => NotFetched(error).into(),
        error => refused(error),
    })?;
    if folder.record()?.is_none() {
        folder.write_record(&lock, &record_of(manifest))?;
    }
    tracing::info!("image {} was fetched from the replica", image.id);
    Ok(())
}

/// The image that was fetched, and its record if there is no matching one here.
type Brought = Option<(Image, Option<JobRecord>)>;

fn look(
    replica: &Replica,
    folder: &JobFolder,
    lock: &WriterLock,
    key: Option<&Key>,
    record: Option<&JobRecord>,
    newest: Option<ImageId>,
) -> Result<Brought, Error> {
    let never = || false;
    let theirs = replica.record(&never)?;
    if record.is_none() && theirs.as_ref().is_some_and(|theirs| theirs.outcome == Outcome::Completed) {
        tracing::info!("job {} was completed on another machine", folder.name());
        return Ok(None);
    }
    let newer = |image: &RemoteImage| newest.is_none_or(|newest| image.id > newest);
    let mut last = None;
    let here = folder.images()?;
    // A damaged copy here is replaced. Another one that cannot be used here could not be used again either.
    let is_here = |id| here.iter().any(|image| image.id == id && !image.is_damaged());
    let images = replica.images(&never)?;
    // One that cannot be read may have any name.
    images.iter().filter(|image| image.manifest().is_some()).for_each(|image| folder.note_elsewhere(image.id));
    // A machine that does not know the job goes by what the last one did.
    let last_run = record.or(theirs.as_ref());
    let mut left = false;
    for image in images.into_iter().take_while(newer) {
        replica.check_trusted(&image)?;
        if is_here(image.id) {
            continue;
        }
        if let State::Damaged { why } = &image.state {
            tracing::error!("image {} of the replica is skipped: {why}", image.id);
        }
        let Some(manifest) = image.manifest().filter(|_| image.is_good()) else { continue };
        // A run that was started from the beginning after the image was taken has abandoned the image on purpose.
        let is_of = |record: &JobRecord| record.has(image.id, &manifest.lineage);
        if last_run.is_some_and(|record| !is_of(record) && record.created > manifest.taken) {
            left = true;
            continue;
        }
        tracing::info!("fetching image {} from the replica: it is newer than the local images", image.id);
        match fetch(replica, folder, lock, key, image.id) {
            Ok(fetched) => {
                let theirs = theirs.as_ref().filter(|theirs| is_of(theirs)).cloned();
                let new = (!record.is_some_and(is_of)).then(|| theirs.unwrap_or_else(|| record_of(manifest)));
                return Ok(Some((fetched, new)));
            }
            Err(error @ (Error::Damaged { .. } | Error::NotWhole { .. })) => {
                tracing::error!("{}; looking for an older image", chain(&error));
                last = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    if left && record.is_none() && last.is_none() {
        tracing::info!("the images in the replica are not used: the last run left them and started from the beginning");
    }
    last.map_or(Ok(None), Err)
}

/// The record of the run that an image belongs to.
fn record_of(manifest: &Manifest) -> JobRecord {
    JobRecord {
        command: manifest.command.clone(),
        directory: manifest.directory.clone(),
        lineage: manifest.lineage.clone(),
        base: None,
        created: manifest.taken,
        outcome: Outcome::Running,
        exit_code: None,
        uptime: Duration::ZERO,
        failures: 0,
        restores: 0,
    }
}

/// Fetches, and logs the progress every few seconds.
fn fetch(
    replica: &Replica,
    folder: &JobFolder,
    lock: &WriterLock,
    key: Option<&Key>,
    id: ImageId,
) -> Result<Image, Error> {
    let (progress, began) = (Progress::default(), Instant::now());
    let (done, waiting) = mpsc::channel::<()>();
    let manager = Notify::from_environment();
    manager.fetching(id.sequence(), &progress);
    thread::scope(|scope| {
        let progress = &progress;
        let say = move || {
            while waiting.recv_timeout(SAY) == Err(RecvTimeoutError::Timeout) {
                manager.fetching(id.sequence(), progress);
                let (bytes, total) = progress.bytes();
                let rate = bytes / began.elapsed().as_secs().max(1);
                tracing::info!("image {id}: {} of {} fetched, {}/s", size(bytes), size(total), size(rate));
            }
        };
        // If the thread cannot be started, only the progress is missing.
        let _ = thread::Builder::new().name("progress".into()).spawn_scoped(scope, say);
        let fetched = replica.fetch(id, folder, lock, key, progress, &|| false);
        drop(done);
        fetched
    })
}
