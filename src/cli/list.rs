//! `rekindle list`: jobs, and the images of a job.

use std::path::PathBuf;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use super::find::{self, Finder, Refused};
use super::group::{self, PartOf};
use super::output::{Column, Format, print_note, print_table, print_text, terminal_width};
use super::{Exit, Global, Misuse, complete};
use crate::published::{Group, Persisting, Published, ShownState};
use crate::report;
use rekindle_base::chain;
use rekindle_base::interval::Choice;
use rekindle_base::units::{moment, size};
use rekindle_replica::{Patience, Replica};
use rekindle_store::manifest::Reason;
use rekindle_store::retention::survey::Survey;
use rekindle_store::{
    Access, Error, Evidence, ImageId, JobFolder, JobName, Known, Place, Shown, State, Store, Tag, Tags,
};

/// What to list.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// The job; by default all jobs
    #[arg(add = complete::jobs())]
    job: Option<String>,
    /// List the job's images in the replica, too (replica.url)
    #[arg(long, requires = "job")]
    replica: bool,
}

pub(super) fn list(global: &Global, args: &ListArgs) -> anyhow::Result<Exit> {
    match (&args.job, args.replica) {
        (Some(job), true) => images_with_replica(global, &find::job_name(job)?)?,
        (Some(job), false) => {
            let folder = Finder::with_key(global)?.job(job)?;
            print(folder.name(), &images(&folder)?, global.format())?;
        }
        (None, _) => jobs(&Finder::with_key(global)?, global.format())?,
    }
    Ok(Exit::Success)
}

/// Said of an image that was only taken, if no rehearsal can be expected.
pub(super) const NOT_REHEARSED: &str = "not rehearsed";

/// Packs with which it is computed what a removal would free: at most 128 GiB of content. Their index is read within a
/// tenth of a second.
const MOST_PACKS: usize = 512;

const JOBS: [Column; 7] = [
    Column::whole("JOB"),
    Column::short("STATE"),
    Column::optional("IMAGES", 3),
    Column::optional("NEWEST", 2),
    Column::optional("STORE", 1),
    Column::optional("MEMORY", 4),
    Column::short("COMMAND"),
];

const IMAGES: [Column; 11] = [
    Column::whole("IMAGE"),
    Column::whole("N"),
    Column::optional("AGE", 1),
    // Its name has the time, in UTC.
    Column::optional("TAKEN", 7),
    Column::optional("SIZE", 4),
    Column::optional("FREES", 3),
    Column::optional("FREEZE", 5),
    Column::optional("REASON", 6),
    Column::optional("WHERE", 2),
    Column::short("TAGS"),
    Column::short("STATE"),
];

/// One job.
#[derive(Debug, Serialize)]
struct JobRow {
    job: JobName,
    /// The store that it is in.
    store: PathBuf,
    /// The state of its supervisor, or how its last run ended.
    state: ShownState,
    pid: Option<i32>,
    /// Of its supervisor, or of the last one.
    restarts: u32,
    images: usize,
    newest: Option<ImageId>,
    /// The sum of the sizes of the images in the store, each counted in full.
    bytes: u64,
    /// Bytes that the job takes on the disk: what becomes free without it.
    frees: u64,
    /// Bytes of the images in memory.
    memory_bytes: u64,
    #[serde(flatten)]
    storing: Storing,
    #[serde(flatten)]
    replica: Replicating,
    /// The current interval, if it is chosen automatically.
    interval: Option<Choice>,
    last_failure: Option<String>,
    command: Vec<String>,
}

/// The way of the images into the store.
#[derive(Debug, Default, Serialize)]
struct Storing {
    /// The image that is being stored.
    persisting: Option<Persisting>,
    /// Why the last image was not stored.
    persist_failure: Option<String>,
}

impl Storing {
    fn of(live: &Published) -> Storing {
        Storing { persisting: live.persisting.clone(), persist_failure: live.persist_failure.clone() }
    }

    /// The state of the job, and how far the image is.
    fn after(&self, state: ShownState) -> String {
        match &self.persisting {
            Some(persisting) => {
                let rate = bytesize::ByteSize::b(persisting.rate);
                format!("{state}, storing {} % at {rate}/s", persisting.percent())
            }
            None => state.to_string(),
        }
    }
}

/// The way of the images into the replica.
#[derive(Debug, Default, Serialize)]
struct Replicating {
    /// The image that is being replicated.
    replicating: Option<Persisting>,
    /// The newest image that this supervisor replicated.
    last_replicated: Option<ImageId>,
    /// Why the last image was not replicated.
    replica_failure: Option<String>,
}

impl Replicating {
    fn of(live: &Published) -> Replicating {
        Replicating {
            replicating: live.replicating.clone(),
            last_replicated: live.last_replicated,
            replica_failure: live.replica_failure.clone(),
        }
    }
}

fn jobs(finder: &Finder, format: Format) -> anyhow::Result<()> {
    let (folders, mut refused) = finder.jobs()?.all(finder);
    let mut rows = Vec::new();
    for folder in &folders {
        match job_row(folder) {
            Ok(row) => rows.push(row),
            Err(error) => refused.push(Refused { job: folder.name().clone(), store: folder.store().to_owned(), error }),
        }
    }
    rows.extend(refused.iter().map(JobRow::unreadable));
    rows.sort_by(|a, b| (&a.job, &a.store).cmp(&(&b.job, &b.store)));
    if rows.is_empty() && format == Format::Text {
        return Ok(print_text(&find::no_jobs(finder))?);
    }
    let stores = finder.names_stores(rows.iter().map(|row| row.store.as_path()));
    let cells = rows.iter().map(|row| {
        let mut cells = vec![
            row.job.to_string(),
            row.storing.after(row.state),
            if row.state == ShownState::Unreadable { "-".into() } else { row.images.to_string() },
            row.newest.map_or_else(|| "-".into(), |id| id.to_string()),
            if row.state == ShownState::Unreadable { "-".into() } else { size(row.frees) },
            if row.memory_bytes > 0 { size(row.memory_bytes) } else { "-".into() },
            row.command.join(" "),
        ];
        cells.extend(stores.then(|| row.store.display().to_string()));
        cells
    });
    let mut columns = JOBS.to_vec();
    columns.extend(stores.then_some(Column::short("IN STORE")));
    print_table(format, &columns, cells, &rows)?;
    Refused::end(refused)
}

impl JobRow {
    /// The row of a job whose files cannot be read.
    fn unreadable(refused: &Refused) -> JobRow {
        JobRow {
            job: refused.job.clone(),
            store: refused.store.clone(),
            state: ShownState::Unreadable,
            pid: None,
            restarts: 0,
            images: 0,
            newest: None,
            bytes: 0,
            frees: 0,
            memory_bytes: 0,
            storing: Storing::default(),
            replica: Replicating::default(),
            interval: None,
            last_failure: Some(chain(refused.error.as_ref())),
            command: Vec::new(),
        }
    }
}

fn job_row(folder: &JobFolder) -> anyhow::Result<JobRow> {
    let images = folder.known()?;
    let record = folder.record()?;
    // Most published values count only while there is a supervisor.
    let live = Published::live(folder)?;
    let last = live.clone().or_else(|| Published::read(&folder.state_file()).ok());
    let state = report::state(folder, live.as_ref())?;
    let bytes = |place| {
        let copies = images.iter().filter_map(|known| known.copy(place)?.manifest());
        copies.map(|manifest| manifest.bytes).sum()
    };
    Ok(JobRow {
        job: folder.name().clone(),
        store: folder.store().to_owned(),
        state,
        pid: live.as_ref().and_then(|l| l.pid),
        restarts: last.map_or(0, |last| last.restarts),
        images: images.len(),
        newest: images.iter().find(|known| known.best().is_good()).map(Known::id),
        bytes: bytes(Place::Stored),
        frees: report::allocated(folder.dir()),
        memory_bytes: bytes(Place::Staged),
        storing: live.as_ref().map(Storing::of).unwrap_or_default(),
        replica: live.as_ref().map(Replicating::of).unwrap_or_default(),
        interval: live.as_ref().and_then(|l| l.interval.clone()),
        last_failure: live.and_then(|l| l.last_failure),
        command: record.map(|r| r.command).unwrap_or_default(),
    })
}

/// One image.
#[derive(Debug, Serialize)]
struct ImageRow {
    id: ImageId,
    taken: DateTime<Utc>,
    /// In memory, in the store, and in the replica if requested.
    places: Vec<String>,
    /// The progress of storing it.
    persisting: Option<Persisting>,
    /// good, bad or damaged.
    state: &'static str,
    /// Why it is not good.
    detail: Option<String>,
    /// N of `-N`, which names the image if the job can continue from it.
    nth_newest: Option<usize>,
    bytes: Option<u64>,
    /// Bytes that become free if only this image is removed; none if that is unknown, or it is not in the store.
    frees: Option<u64>,
    freeze_us: Option<u64>,
    /// The interval at that time, if it was chosen automatically.
    interval: Option<Choice>,
    reason: Option<Reason>,
    lineage: Option<String>,
    /// What has shown that it can be restored: taken (nothing yet), refused, rehearsed or restored.
    evidence: Evidence,
    /// Whether the job has lived for restart.min-uptime after it was taken or restored.
    proven: bool,
    /// The group image that it is a part of, for a job over several machines.
    group: Option<PartOf>,
    #[serde(flatten)]
    tags: Tagged,
    /// Why its like is not rehearsed, if that is so.
    #[serde(skip)]
    not_rehearsed: Option<String>,
}

/// The tags of an image.
#[derive(Debug, Default, Serialize)]
struct Tagged {
    /// Whether it is pinned: no rule removes it.
    pinned: bool,
    tags: Vec<Tag>,
    /// Pin and tags, for people.
    #[serde(skip)]
    said: String,
}

impl Tagged {
    fn of(tags: &Tags) -> Tagged {
        Tagged { pinned: tags.is_pinned(), tags: tags.iter().cloned().collect(), said: tags.to_string() }
    }
}

impl ImageRow {
    fn new(known: &Known, live: Option<&Published>, evidence: &Shown, group: Option<&Group>) -> ImageRow {
        let image = known.best();
        let part = image.manifest().and_then(|manifest| manifest.group.as_ref());
        ImageRow {
            group: part.map(|part| PartOf::new(image.id, part, group)),
            persisting: storing(known, live).cloned(),
            evidence: evidence.of(&image.id),
            tags: Tagged::of(&known.tags()),
            ..ImageRow::of(image.id, &image.state, known.places().iter().map(ToString::to_string).collect())
        }
    }

    fn of(id: ImageId, state: &State, places: Vec<String>) -> ImageRow {
        let manifest = match state {
            State::Good(manifest) | State::Bad { manifest, .. } => Some(manifest),
            State::Damaged { .. } => None,
        };
        let (state, detail) = match state {
            State::Good(_) => ("good", None),
            State::Bad { mark, .. } => ("bad", Some(format!("{}: {}", mark.why, mark.detail))),
            State::Damaged { why } => (why.kind.word(), Some(why.to_string())),
        };
        ImageRow {
            id,
            taken: manifest.map_or_else(|| id.taken(), |m| m.taken),
            places,
            persisting: None,
            state,
            detail,
            nth_newest: None,
            bytes: manifest.map(|m| m.bytes),
            frees: None,
            freeze_us: manifest.map(|m| m.freeze_us),
            interval: manifest.and_then(|m| m.interval.clone()),
            reason: manifest.map(|m| m.reason),
            lineage: manifest.map(|m| m.lineage.clone()),
            evidence: Evidence::Taken,
            proven: false,
            group: manifest.and_then(|m| Some(PartOf::new(id, m.group.as_ref()?, None))),
            tags: Tagged::default(),
            not_rehearsed: None,
        }
    }

    /// What has shown that it can be restored, for people.
    fn evidence_in_words(&self) -> Option<&'static str> {
        match self.evidence {
            _ if self.state != "good" => None,
            Evidence::Taken if self.not_rehearsed.is_some() => Some(NOT_REHEARSED),
            evidence => Some(evidence.as_str()),
        }
    }
}

fn images(folder: &JobFolder) -> anyhow::Result<Vec<ImageRow>> {
    let (live, known) = (Published::live(folder)?, folder.known()?);
    let (evidence, proven) = (folder.evidence()?, folder.proven()?);
    let line = folder.to_continue_from(&known);
    let group = group::published(folder);
    // A store that is damaged is listed, too. A list is not worth reading the index of all packs of a large one.
    let is_small = folder.packs().names().is_ok_and(|packs| packs.len() <= MOST_PACKS);
    let survey = is_small.then(|| Survey::of(folder, 0).ok()).flatten();
    let last = live.clone().or_else(|| Published::read(&folder.state_file()).ok());
    let not_rehearsed = last.and_then(|last| last.not_rehearsed);
    let row = |known: &Known| ImageRow {
        not_rehearsed: not_rehearsed.clone(),
        nth_newest: line.iter().position(|id| *id == known.id()).map(|n| n + 1),
        frees: survey
            .as_ref()
            .filter(|_| known.copy(Place::Stored).is_some())
            .map(|it| it.sizes().freed(&[known.id()])),
        proven: proven.contains(&known.id()),
        ..ImageRow::new(known, live.as_ref(), &evidence, group.as_ref())
    };
    Ok(known.iter().map(row).collect())
}

/// On a new machine neither the job nor the store exists.
fn images_with_replica(global: &Global, job: &JobName) -> anyhow::Result<()> {
    let config = global.settings(global.overrides())?;
    let url =
        config.replica.url.as_ref().ok_or_else(|| Misuse("there is no replica: replica.url is not set".into()))?;
    let trust = config.store.trust()?;
    let there = Replica::open(url, job, Patience::Little)?.with_trust(&trust).images(&|| false)?;
    let here = match Store::open(&config.store.directory, Access::Read).map(|store| store.with_trust(trust)) {
        Ok(store) => store.jobs()?.contains(job).then(|| store.job(job)).transpose()?,
        Err(Error::NoStore(_)) => None,
        Err(error) => return Err(error.into()),
    };
    let mut rows = here.as_ref().map(images).transpose()?.unwrap_or_default();
    for image in there {
        match rows.iter_mut().find(|row| row.id == image.id) {
            Some(row) => row.places.push("replica".into()),
            None => rows.push(ImageRow::of(image.id, &image.state, vec!["replica".into()])),
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.id));
    print(job, &rows, global.format())
}

/// The answer of commands about the images of a job, if there are none.
pub(super) fn no_images(job: &JobName) -> String {
    format!("job {job} has no images")
}

fn print(job: &JobName, rows: &[ImageRow], format: Format) -> anyhow::Result<()> {
    if rows.is_empty() && format == Format::Text {
        return Ok(print_text(&no_images(job))?);
    }
    let (or_dash, now) = (|text: Option<String>| text.unwrap_or_else(|| "-".into()), Utc::now());
    let grouped = rows.iter().any(|row| row.group.is_some());
    let mut columns = IMAGES.to_vec();
    if grouped {
        columns.insert(columns.len() - 1, Column::short("GROUP IMAGE"));
    }
    let cells = rows.iter().map(|row| {
        let mut cells = vec![
            row.id.to_string(),
            row.nth_newest.map_or_else(|| "-".into(), |nth| format!("-{nth}")),
            age(now - row.taken),
            moment(row.taken),
            or_dash(row.bytes.map(size)),
            or_dash(row.frees.map(size)),
            or_dash(row.freeze_us.map(milliseconds)),
            or_dash(row.reason.map(|r| reason(r).into())),
            whereabouts(&row.places, row.persisting.as_ref()),
            if row.tags.said.is_empty() { "-".into() } else { row.tags.said.clone() },
        ];
        cells.extend(grouped.then(|| or_dash(row.group.as_ref().map(PartOf::short))));
        cells.push(state(row));
        cells
    });
    print_table(format, &columns, cells, &rows)?;
    if format == Format::Text
        && let Some(why) = rows.iter().find(|row| row.evidence_in_words() == Some(NOT_REHEARSED))
    {
        why.not_rehearsed.iter().try_for_each(|why| print_note(NOT_REHEARSED, why))?;
    }
    if format == Format::Text && terminal_width().is_some() {
        // What is wrong must not be cut.
        let unsound = rows.iter().filter_map(|row| Some((row.id.to_string(), row.detail.as_ref()?)));
        unsound.into_iter().try_for_each(|(id, detail)| print_note(&id, detail))?;
    }
    Ok(())
}

/// How long ago, in the largest unit.
fn age(age: TimeDelta) -> String {
    let seconds = age.num_seconds().max(0);
    match () {
        () if seconds < 120 => format!("{seconds}s ago"),
        () if seconds < 7200 => format!("{}m ago", seconds / 60),
        () if seconds < 172_800 => format!("{}h ago", seconds / 3600),
        () => format!("{}d ago", seconds / 86400),
    }
}

fn state(row: &ImageRow) -> String {
    // What is wrong with an image counts more than what was shown before.
    let evidence = row.evidence_in_words().map(|words| format!(", {words}")).unwrap_or_default();
    let proven = if row.proven { ", proven" } else { "" };
    let detail = row.detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default();
    format!("{}{evidence}{proven}{detail}", row.state)
}

/// How far the image is on its way to the store. The supervisor publishes this for a moment after the image is there.
pub(super) fn storing<'a>(known: &Known, live: Option<&'a Published>) -> Option<&'a Persisting> {
    live.filter(|_| known.copy(Place::Stored).is_none())?.persisting_image(known.id())
}

/// The places of an image, for people.
pub(super) fn whereabouts(places: &[impl ToString], persisting: Option<&Persisting>) -> String {
    let mut words: Vec<String> = places.iter().map(ToString::to_string).collect();
    words.extend(persisting.map(|persisting| format!("{} % stored", persisting.percent())));
    words.join(", ")
}

/// Microseconds as milliseconds, for people.
pub(super) fn milliseconds(us: u64) -> String {
    format!("{}.{} ms", us / 1000, us % 1000 / 100)
}

fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Interval => "interval",
        Reason::Signal => "signal",
        Reason::Final => "final",
        Reason::Request => "request",
        Reason::Group => "group",
    }
}
