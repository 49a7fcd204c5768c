//! `rekindle list`: jobs, and the images of a job.

use rekindle_base::units::size;
use std::collections::BTreeSet;

use chrono::{DateTime, Local, Utc};
use serde::Serialize;

use super::output::{Format, print_table};
use super::{Exit, Global, Misuse};
use crate::published::{Persisting, Published};
use rekindle_base::interval::Choice;
use rekindle_store::manifest::Reason;
use rekindle_store::replica::{Patience, Replica};
use rekindle_store::{Access, Error, ImageId, JobFolder, JobName, Known, Outcome, Place, State, Store, Tag};

/// What to list.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// The job; by default all jobs
    job: Option<String>,
    /// List the job's images in the replica, too (replica.url)
    #[arg(long, requires = "job")]
    replica: bool,
}

pub(super) fn list(global: &Global, args: &ListArgs) -> anyhow::Result<Exit> {
    match (&args.job, args.replica) {
        (Some(job), true) => images_with_replica(global, &job.parse()?)?,
        (Some(job), false) => print(&images(&global.open_store()?.job(&job.parse()?)?)?, global.format())?,
        (None, _) => jobs(&global.open_store()?, global.format())?,
    }
    Ok(Exit::Success)
}

/// One job.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct JobRow {
    job: JobName,
    /// What its supervisor does, or how its last run ended.
    state: String,
    pid: Option<i32>,
    restarts: Option<u32>,
    images: usize,
    newest: Option<ImageId>,
    /// Of the images in the store.
    bytes: u64,
    /// Of those in memory.
    memory_bytes: u64,
    /// The image that is being stored.
    persisting: Option<Persisting>,
    /// Why the last image is not there.
    persist_failure: Option<String>,
    /// The image that is being replicated.
    replicating: Option<Persisting>,
    /// The newest image that this supervisor replicated.
    last_replicated: Option<ImageId>,
    /// Why the last image is not there.
    replica_failure: Option<String>,
    /// The current interval, if it is chosen automatically.
    interval: Option<Choice>,
    last_failure: Option<String>,
    command: Vec<String>,
}

fn jobs(store: &Store, format: Format) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for name in store.jobs()? {
        rows.push(job_row(&store.job(&name)?)?);
    }
    let cells = rows.iter().map(|row| {
        vec![
            row.job.to_string(),
            match &row.persisting {
                Some(persisting) => {
                    let rate = bytesize::ByteSize::b(persisting.rate);
                    format!("{}, storing {} % at {rate}/s", row.state, persisting.percent())
                }
                None => row.state.clone(),
            },
            row.images.to_string(),
            row.newest.map_or_else(|| "-".into(), |id| id.to_string()),
            size(row.bytes),
            if row.memory_bytes > 0 { size(row.memory_bytes) } else { "-".into() },
            row.command.join(" "),
        ]
    });
    let header = ["JOB", "STATE", "IMAGES", "NEWEST", "STORE", "MEMORY", "COMMAND"];
    Ok(print_table(format, &header, cells, &rows)?)
}

fn job_row(folder: &JobFolder) -> anyhow::Result<JobRow> {
    let images = folder.known()?;
    let record = folder.record()?;
    // What a supervisor published counts only while there is one.
    let live = Published::live(folder)?;
    let state = match (&live, record.as_ref().map(|r| &r.outcome)) {
        (Some(live), _) => live.state.to_string(),
        (None, Some(Outcome::Running)) => "interrupted".into(),
        (None, Some(Outcome::Completed)) => "completed".into(),
        (None, Some(Outcome::Failed { .. })) => "failed".into(),
        (None, Some(Outcome::Stopped)) => "stopped".into(),
        (None, None) => "new".into(),
    };
    let bytes = |place| {
        let copies = images.iter().filter_map(|known| known.copy(place)?.manifest());
        copies.map(|manifest| manifest.bytes).sum()
    };
    Ok(JobRow {
        job: folder.name().clone(),
        state,
        pid: live.as_ref().and_then(|l| l.pid),
        restarts: live.as_ref().map(|l| l.restarts),
        images: images.len(),
        newest: images.iter().find(|known| known.best().is_good()).map(Known::id),
        bytes: bytes(Place::Stored),
        memory_bytes: bytes(Place::Staged),
        persisting: live.as_ref().and_then(|l| l.persisting.clone()),
        persist_failure: live.as_ref().and_then(|l| l.persist_failure.clone()),
        replicating: live.as_ref().and_then(|l| l.replicating.clone()),
        last_replicated: live.as_ref().and_then(|l| l.last_replicated),
        replica_failure: live.as_ref().and_then(|l| l.replica_failure.clone()),
        interval: live.as_ref().and_then(|l| l.interval.clone()),
        last_failure: live.and_then(|l| l.last_failure),
        command: record.map(|r| r.command).unwrap_or_default(),
    })
}

/// One image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct ImageRow {
    id: ImageId,
    taken: DateTime<Utc>,
    /// In memory, in the store, and in the replica if that was asked for.
    places: Vec<String>,
    /// How much of it is stored.
    persisting: Option<Persisting>,
    /// good, bad or damaged.
    state: &'static str,
    /// Why it is not good.
    detail: Option<String>,
    bytes: Option<u64>,
    freeze_us: Option<u64>,
    /// The interval at that time, if it was chosen automatically.
    interval: Option<Choice>,
    reason: Option<Reason>,
    lineage: Option<String>,
    /// Whether the job has lived for restart.min-uptime after it was taken or restored.
    proven: bool,
    /// Whether it is pinned: no rule removes it.
    pinned: bool,
    tags: Vec<Tag>,
    /// Both, for people.
    #[serde(skip)]
    said: String,
}

impl ImageRow {
    fn new(known: &Known, live: Option<&Published>, proven: &BTreeSet<ImageId>) -> ImageRow {
        let image = known.best();
        let tags = known.tags();
        ImageRow {
            persisting: live.and_then(|live| live.persisting_image(image.id)).cloned(),
            proven: proven.contains(&image.id),
            pinned: tags.is_pinned(),
            tags: tags.iter().cloned().collect(),
            said: tags.to_string(),
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
            bytes: manifest.map(|m| m.bytes),
            freeze_us: manifest.map(|m| m.freeze_us),
            interval: manifest.and_then(|m| m.interval.clone()),
            reason: manifest.map(|m| m.reason),
            lineage: manifest.map(|m| m.lineage.clone()),
            proven: false,
            pinned: false,
            tags: Vec::new(),
            said: String::new(),
        }
    }
}

fn images(folder: &JobFolder) -> anyhow::Result<Vec<ImageRow>> {
    let (live, proven) = (Published::live(folder)?, folder.proven()?);
    Ok(folder.known()?.iter().map(|known| ImageRow::new(known, live.as_ref(), &proven)).collect())
}

/// On a new machine there is neither the job nor even a store.
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
    print(&rows, global.format())
}

fn print(rows: &[ImageRow], format: Format) -> anyhow::Result<()> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let cells = rows.iter().map(|row| {
        vec![
            row.id.to_string(),
            row.taken.with_timezone(&Local).format("%Y-%m-%d %H:%M:%S").to_string(),
            or_dash(row.bytes.map(size)),
            or_dash(row.freeze_us.map(milliseconds)),
            or_dash(row.reason.map(|r| reason(r).into())),
            whereabouts(&row.places, row.persisting.as_ref()),
            if row.said.is_empty() { "-".into() } else { row.said.clone() },
            state(row),
        ]
    });
    let header = ["IMAGE", "TAKEN", "SIZE", "FREEZE", "REASON", "WHERE", "TAGS", "STATE"];
    Ok(print_table(format, &header, cells, &rows)?)
}

fn state(row: &ImageRow) -> String {
    let proven = if row.proven { ", proven" } else { "" };
    let detail = row.detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default();
    format!("{}{proven}{detail}", row.state)
}

/// Where an image is, for people.
pub(super) fn whereabouts(places: &[impl ToString], persisting: Option<&Persisting>) -> String {
    let mut words: Vec<String> = places.iter().map(ToString::to_string).collect();
    words.extend(persisting.map(|persisting| format!("{} % stored", persisting.percent())));
    words.join(", ")
}

/// Microseconds for people.
pub(super) fn milliseconds(us: u64) -> String {
    format!("{}.{} ms", us / 1000, us % 1000 / 100)
}

fn reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Interval => "interval",
        Reason::Signal => "signal",
        Reason::Final => "final",
        Reason::Request => "request",
    }
}
