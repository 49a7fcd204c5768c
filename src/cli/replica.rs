//! Before a job continues, a newer image in its replica is fetched.
//!
//! A start from the beginning because the network is down would lose the work in the replica, so it is refused without
//! a local image. With a local image the job continues from that, and the log says that there may be a newer one. If
//! the replica is known to have a newer one that is intact, the job does not continue without it: later images would
//! take its place in the replica.

mod fetch;

use std::time::Duration;

use super::Misuse;
use crate::config::Config;
use rekindle_base::chain;
use rekindle_replica::{Error, Patience, RemoteImage, Replica};
use rekindle_store::image::is_untrusted;
use rekindle_store::{
    self, Access, Image, ImageId, JobFolder, JobName, JobRecord, LATEST, Manifest, Outcome, State, Store, Trust,
    WriterLock,
};

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
#[error(
    "the replica has an image that is not here, and it cannot be fetched. Fix that and run the same command again. To \
    continue from an image that is here all the same, use `rekindle restore JOB/ID`"
)]
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
    let newest = newest_of_line(folder)?;
    let min_free = config.store.min_free.bytes();
    let open = |patience| {
        let replica = Replica::open(url, folder.name(), patience);
        replica.map(|replica| replica.with_min_free(min_free).with_trust(folder.trust()))
    };
    let there = match open(Patience::Little).and_then(|replica| There::ask(&replica)) {
        Ok(there) => there,
        Err(error) => return not_asked(error, newest),
    };
    match open(Patience::Much).and_then(|replica| look(&replica, &there, folder, lock, record.as_ref(), newest)) {
        Ok(None) => Ok(()),
        Ok(Some((image, new))) => Ok(came(folder, lock, &image, new)?),
        Err(error) => not_brought(error, newest),
    }
}

/// An image was fetched; `record` is that of its run, if the one here is of another.
fn came(
    folder: &JobFolder,
    lock: &WriterLock,
    image: &Image,
    record: Option<JobRecord>,
) -> Result<(), rekindle_store::Error> {
    record.map_or(Ok(()), |record| folder.write_record(lock, &record))?;
    tracing::info!("image {} was fetched from the replica", image.id);
    Ok(())
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
/// one of the line that the job is on. Returns the image with the highest number in the replica, if it was asked.
pub(super) fn bring_named(config: &Config, text: &str) -> anyhow::Result<Option<ImageId>> {
    let Some(url) = &config.replica.url else { return Ok(None) };
    let (job, wanted) = text.split_once('/').unwrap_or((text, LATEST));
    // An id alone is searched only in the store.
    let Ok(name) = job.parse::<JobName>() else { return Ok(None) };
    let trust = config.store.trust()?;
    let here = Store::open(&config.store.directory, Access::Read).map(|store| store.with_trust(trust.clone()));
    let here = match here.and_then(|store| store.jobs()?.contains(&name).then(|| store.job(&name)).transpose()) {
        Err(rekindle_store::Error::NoStore(_)) => None,
        here => here?,
    };
    let found = match &here {
        Some(folder) if wanted == LATEST => newest_of_line(folder)?,
        Some(folder) => folder.find(wanted).ok().map(|image| image.id),
        None => None,
    };
    if found.is_some() && wanted != LATEST {
        return Ok(None);
    }
    let record = here.as_ref().and_then(|folder| folder.record().ok().flatten());
    let replica = Replica::open(url, &name, Patience::Little);
    let replica = replica.map(|it| it.with_trust(&trust).with_min_free(config.store.min_free.bytes()));
    // For an image that is named, the last run does not matter.
    let ask = |replica: &Replica| match wanted {
        LATEST => There::ask(replica),
        _ => Ok(There { images: replica.images(&|| false)?, record: None }),
    };
    let (there, replica) = match replica.and_then(|replica| Ok((ask(&replica)?, replica))) {
        Ok(asked) => asked,
        Err(error) => return not_asked(error, found).map(|()| None),
    };
    let highest = there.highest();
    let (newer, named) = match wanted {
        LATEST => (there.newer(record.as_ref(), found).images, None),
        wanted => (Vec::new(), there.named(wanted)?),
    };
    // One that is not trusted is reported before anything is written here.
    let is_taken = |image: &&&RemoteImage| image.is_good() || is_untrusted(&image.state).is_some();
    let first = newer.iter().find(is_taken).copied().or(named);
    first.map_or(Ok(()), |image| replica.check_trusted(image)).map_err(refused)?;
    // If it is not in the replica either, the store reports it.
    if first.and_then(RemoteImage::manifest).is_none() {
        return Ok(highest);
    }
    let store = Store::open(&config.store.directory, Access::Write)?.with_trust(trust);
    let folder = store.create_job(&name)?;
    let lock = folder.lock()?;
    // A record that cannot be read must not be replaced.
    folder.record()?;
    // An interrupted fetch may have left a draft of the image.
    folder.sweep_leftovers(&lock)?;
    let fetched = match named.and_then(|image| Some((image, image.manifest()?))) {
        // The user wants this one, whatever the last run was.
        Some((image, manifest)) => fetch::once(&replica, &folder, &lock, image.id)
            .map(|fetched| Some((fetched, record.is_none().then(|| record_of(manifest))))),
        None => fetch_first(&replica, &newer, &there, &folder, &lock, record.as_ref()),
    };
    match fetched {
        Ok(None) => {}
        Ok(Some((image, new))) => came(&folder, &lock, &image, new)?,
        Err(error @ Error::NoRoom { .. }) => return Err(NotFetched(error).into()),
        Err(error @ (Error::Untrusted { .. } | Error::Key { .. })) => return Err(refused(error)),
        Err(error) if found.is_some() => not_brought(error, found)?,
        Err(error) => return Err(refused(error)),
    }
    Ok(highest)
}

/// The newest good local image that a run would continue from.
fn newest_of_line(folder: &JobFolder) -> Result<Option<ImageId>, rekindle_store::Error> {
    Ok(folder.to_continue_from(&folder.known()?).first().copied())
}

/// The replica does not help: the job continues from the local image, if there is one.
fn not_asked(error: Error, found: Option<ImageId>) -> anyhow::Result<()> {
    match (error, found) {
        (error, Some(found)) => {
            let why = chain(&error);
            tracing::warn!("cannot check the replica for a newer image: {why}. Continuing from local image {found}");
            Ok(())
        }
        (error @ (Error::Untrusted { .. } | Error::Key { .. }), None) => Err(refused(error)),
        (error, None) => Err(Unknown { why: chain(&error) }.into()),
    }
}

/// The replica has newer images, and none was fetched. The job continues from the local image only if that cannot
/// change: none of them is intact, or none is trusted.
fn not_brought(error: Error, found: Option<ImageId>) -> anyhow::Result<()> {
    use Error::{Damaged, Key, NotWhole, Untrusted};
    match (error, found) {
        (error @ (Damaged { .. } | NotWhole { .. } | Untrusted { .. } | Key { .. }), Some(found)) => {
            let why = chain(&error);
            tracing::warn!("no newer image of the replica can be used: {why}. Continuing from local image {found}");
            Ok(())
        }
        (error @ (Damaged { .. } | NotWhole { .. } | Untrusted { .. } | Key { .. }), None) => not_asked(error, None),
        (error, _) => Err(NotFetched(error).into()),
    }
}

/// The image that was fetched, and its record if there is no matching one here.
type Brought = Option<(Image, Option<JobRecord>)>;

/// The content of the replica.
struct There {
    /// Its images, newest first.
    images: Vec<RemoteImage>,
    /// The record of the last run.
    record: Option<JobRecord>,
}

/// Images of the replica that a run could continue from.
struct Newer<'a> {
    /// These, newest first; some may be unusable.
    images: Vec<&'a RemoteImage>,
    /// Whether there are others that the last run has left.
    others: bool,
}

impl There {
    fn ask(replica: &Replica) -> Result<There, Error> {
        let never = || false;
        Ok(There { record: replica.record(&never)?, images: replica.images(&never)? })
    }

    /// The image with the highest number. One that cannot be read may have any name.
    fn highest(&self) -> Option<ImageId> {
        self.images.iter().filter(|image| image.manifest().is_some()).map(|image| image.id).max()
    }

    /// The images that are newer than the newest one here, without those that the last run has left: it was started
    /// from the beginning or went back to an older image since. `record` is of the last run here; a machine that does
    /// not know the job goes by what the last one did.
    fn newer(&self, record: Option<&JobRecord>, newest: Option<ImageId>) -> Newer<'_> {
        let last_run = record.or(self.record.as_ref());
        let is_left = |image: &RemoteImage| match (last_run, image.manifest()) {
            (Some(run), Some(manifest)) => run.has_left(image.id, &manifest.lineage, manifest.taken),
            _ => false,
        };
        let newer = self.images.iter().filter(|image| newest.is_none_or(|newest| image.id > newest));
        let (left, images): (Vec<_>, Vec<_>) = newer.partition(|image| is_left(image));
        Newer { images, others: !left.is_empty() }
    }

    /// The image with this number, id, or beginning of an id.
    fn named(&self, wanted: &str) -> Result<Option<&RemoteImage>, Misuse> {
        let is_wanted = |image: &&RemoteImage| match wanted.parse::<u32>() {
            Ok(number) if image.id.sequence() == number => true,
            _ => !wanted.is_empty() && image.id.to_string().starts_with(wanted),
        };
        let mut matching = self.images.iter().filter(is_wanted);
        match (matching.next(), matching.next()) {
            (_, Some(_)) => Err(Misuse(format!("{wanted:?} matches several images of the replica: use the full id"))),
            (image, None) => Ok(image),
        }
    }
}

fn look(
    replica: &Replica,
    there: &There,
    folder: &JobFolder,
    lock: &WriterLock,
    record: Option<&JobRecord>,
    newest: Option<ImageId>,
) -> Result<Brought, Error> {
    if record.is_none() && there.record.as_ref().is_some_and(|theirs| theirs.outcome == Outcome::Completed) {
        tracing::info!("job {} was completed on another machine", folder.name());
        return Ok(None);
    }
    there.highest().into_iter().for_each(|id| folder.note_elsewhere(id));
    let newer = there.newer(record, newest);
    let brought = fetch_first(replica, &newer.images, there, folder, lock, record)?;
    if brought.is_none() && newer.others && record.is_none() {
        tracing::info!("the images in the replica are not used: the last run left them and started from the beginning");
    }
    Ok(brought)
}

/// Fetches the first of these images that can be used and is not here.
fn fetch_first(
    replica: &Replica,
    images: &[&RemoteImage],
    there: &There,
    folder: &JobFolder,
    lock: &WriterLock,
    record: Option<&JobRecord>,
) -> Result<Brought, Error> {
    let mut last = None;
    let here = folder.images()?;
    // A damaged copy here is replaced. Another one that cannot be used here could not be used again either.
    let is_here = |id| here.iter().any(|image| image.id == id && !image.is_damaged());
    for image in images {
        replica.check_trusted(image)?;
        if is_here(image.id) {
            continue;
        }
        if let State::Damaged { why } = &image.state {
            tracing::error!("image {} of the replica is skipped: {why}", image.id);
        }
        let Some(manifest) = image.manifest().filter(|_| image.is_good()) else { continue };
        tracing::info!("fetching image {} from the replica: it is newer than the local images", image.id);
        match fetch::patiently(replica, folder, lock, image.id) {
            Ok(fetched) => {
                let is_of = |record: &JobRecord| record.has(image.id, &manifest.lineage);
                let theirs = there.record.as_ref().filter(|theirs| is_of(theirs)).cloned();
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

#[cfg(test)]
mod tests {
    use chrono::{DateTime, TimeDelta, Utc};
    use rekindle_store::chunk::Compression;
    use rekindle_store::options::Copies;
    use rekindle_store::pack::Unread;
    use rekindle_store::persist::{Bounds, Packing, Progress, persist};
    use rekindle_store::record::new_lineage;
    use rekindle_store::retention::{Policy, survey::Limits};
    use rekindle_store::staging::Area;

    use rekindle_replica::Failure;

    use super::*;
    use crate::cli::exit::{Exit, of_error};

    fn id(number: u32) -> ImageId {
        ImageId::new(number, DateTime::UNIX_EPOCH)
    }

    /// An image of this lineage, taken so many seconds ago.
    fn image(number: u32, lineage: &str, seconds: i64) -> RemoteImage {
        let mut manifest: Box<Manifest> = serde_json::from_str(rekindle_testing::MANIFEST).unwrap();
        manifest.id = id(number);
        manifest.lineage = lineage.into();
        manifest.taken = Utc::now() - TimeDelta::seconds(seconds);
        RemoteImage { id: id(number), state: State::Good(manifest) }
    }

    fn record(lineage: &str, base: Option<u32>, seconds: i64) -> JobRecord {
        let mut record = record_of(image(1, lineage, seconds).manifest().unwrap());
        record.base = base.map(id);
        record
    }

    /// The numbers of the images that may be fetched.
    fn newer(there: &There, record: Option<&JobRecord>, newest: Option<u32>) -> Vec<u32> {
        there.newer(record, newest.map(id)).images.iter().map(|image| image.id.sequence()).collect()
    }

    #[test]
    fn images_that_the_last_run_has_left_are_not_fetched_whatever_their_numbers() {
        let images = vec![image(9, "first", 50), image(8, "first", 60), image(3, "first", 70)];
        let there = There { images: images.clone(), record: Some(record("first", None, 100)) };
        assert_eq!(newer(&there, None, None), [9, 8, 3]);
        assert_eq!(newer(&there, None, Some(8)), [9]);
        // The job went back to the third, in a run that began long ago. The record in the replica is older than that.
        let rewound = record(&new_lineage(), Some(3), 100);
        assert_eq!(newer(&there, Some(&rewound), None), [3]);
        assert_eq!(newer(&there, Some(&rewound), Some(3)), [0; 0]);
        let there = There { images: [vec![image(10, &rewound.lineage, -1)], images].concat(), record: None };
        assert_eq!(newer(&there, Some(&rewound), Some(3)), [10]);
        // A machine that does not know the job goes by the record in the replica.
        let there = There { record: Some(rewound), ..there };
        assert_eq!((newer(&there, None, None), there.newer(None, None).others), (vec![10, 3], true));
        // Another machine took one since.
        let there = There { images: vec![image(11, "other", -5)], ..there };
        assert_eq!(newer(&there, Some(&record("first", None, 100)), Some(9)), [11]);
        assert_eq!(there.highest(), Some(id(11)));
    }

    #[test]
    fn an_image_is_named_by_its_number_or_the_beginning_of_its_id() {
        let there = There { images: vec![image(12, "", 1), image(1, "", 1)], record: None };
        let named = |wanted: &str| there.named(wanted).map(|image| image.map(|image| image.id.sequence()));
        assert_eq!((named("1").unwrap(), named("12").unwrap(), named("7").unwrap()), (Some(1), Some(12), None));
        let whole = id(12).to_string();
        assert_eq!(named(&whole).unwrap(), Some(12));
        assert!(named("0000").is_err());
    }

    /// Stores an image and sends it to the replica.
    fn replicated(number: u32, folder: &JobFolder, lock: &WriterLock, replica: &Replica) -> Image {
        let limits = Limits { policy: Policy::default(), min_free: 0, copies: Copies::One };
        let area = Area::on_disk(folder, lock).unwrap();
        let filling = area.take_on_disk(folder, lock, &limits, id(number), 100).unwrap();
        std::fs::write(filling.dir().join("criu/core-1.img"), format!("registers {number}")).unwrap();
        let State::Good(manifest) = image(number, "first", 0).state else { unreachable!() };
        let staged = filling.seal(*manifest, 1).unwrap();
        let (bounds, copies) = (Bounds { rate: None, threads: 1 }, Copies::One);
        let packing = Packing { compression: Compression::None, key: None, bounds, copies, unread: Unread::default() };
        let stored = persist(&staged, folder, lock, &packing, &Progress::default(), &|| false).unwrap();
        area.close().unwrap();
        replica.upload(&stored, folder, &Progress::default(), &|| false).unwrap();
        stored
    }

    #[test]
    fn a_newer_image_that_can_not_be_fetched_is_not_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        let there = dir.path().join("replica");
        std::fs::create_dir(&there).unwrap();
        let mut config = Config::default();
        config.replica.url = Some(format!("file://{}", there.display()).parse().unwrap());
        let url = config.replica.url.as_ref().unwrap();
        let replica = Replica::open(url, folder.name(), Patience::Little).unwrap();
        replicated(1, &folder, &lock, &replica);
        let lost = replicated(2, &folder, &lock, &replica);
        folder.write_record(&lock, &record("first", None, 100)).unwrap();
        std::fs::remove_dir_all(&lost.dir).unwrap();

        // Somebody has put a file there.
        let (packs, away) = (folder.packs_dir(), dir.path().join("packs"));
        std::fs::rename(&packs, &away).unwrap();
        std::fs::write(&packs, "no folder").unwrap();
        let error = bring_newest(&config, &folder, &lock).unwrap_err();
        assert!(error.is::<NotFetched>() && of_error(&error, false) == Exit::Config, "{error:#}");
        assert_eq!(folder.images().unwrap().len(), 1);

        // It is damaged in the replica: no more waiting helps.
        std::fs::remove_file(&packs).unwrap();
        std::fs::create_dir(&packs).unwrap();
        let images = there.join("j/images").join(id(2).to_string());
        let chunks = std::fs::read(images.join("chunks")).unwrap();
        std::fs::write(images.join("chunks"), "damaged").unwrap();
        bring_newest(&config, &folder, &lock).unwrap();
        assert_eq!(folder.images().unwrap().len(), 1);

        // All is well again.
        std::fs::write(images.join("chunks"), chunks).unwrap();
        bring_newest(&config, &folder, &lock).unwrap();
        assert_eq!(folder.images().unwrap()[0].id, id(2));
    }

    #[test]
    fn the_local_image_is_continued_from_only_if_no_newer_one_is_intact() {
        let url = || "s3://b/p".to_owned();
        let busy = Failure::Status { status: 503, code: None };
        let busy = || Error::Remote { url: url(), action: "read x from".into(), failure: busy.clone() };
        assert!(not_asked(busy(), Some(id(1))).is_ok(), "whether there is one is not known");
        assert!(not_brought(busy(), Some(id(1))).unwrap_err().is::<NotFetched>());
        assert!(not_brought(busy(), None).unwrap_err().is::<NotFetched>());
        let full = Error::Write { path: "/p".into(), source: std::io::ErrorKind::StorageFull.into() };
        assert!(not_brought(full, Some(id(1))).unwrap_err().is::<NotFetched>());
        let damaged = || Error::Damaged { url: url(), what: "a chunk".into(), why: "its hash is wrong".into() };
        assert!(not_brought(damaged(), Some(id(1))).is_ok());
        assert!(not_brought(damaged(), None).unwrap_err().is::<Unknown>());
    }
}
