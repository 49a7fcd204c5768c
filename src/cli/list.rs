//! `rekindle list`: jobs, and the images of a job.

use chrono::{DateTime, Local, Utc};
use serde::Serialize;

use super::output::{Format, print_table};
use super::{Exit, Global};
use crate::store::manifest::Reason;
use crate::store::{Image, ImageId, JobFolder, JobName, Outcome, State, Store, Writer};
use crate::supervisor::Published;

pub(super) fn list(global: &Global, job: Option<&str>) -> anyhow::Result<Exit> {
    let store = global.open_store()?;
    match job {
        Some(job) => images(&store.job(&job.parse()?)?, global.format())?,
        None => jobs(&store, global.format())?,
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
    bytes: u64,
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
            row.state.clone(),
            row.images.to_string(),
            row.newest.map_or_else(|| "-".into(), |id| id.to_string()),
            size(row.bytes),
            row.command.join(" "),
        ]
    });
    Ok(print_table(format, &["JOB", "STATE", "IMAGES", "NEWEST", "SIZE", "COMMAND"], cells, &rows)?)
}

fn job_row(folder: &JobFolder) -> anyhow::Result<JobRow> {
    let images = folder.images()?;
    let record = folder.record()?;
    // What a supervisor published counts only while there is one.
    let live = match folder.writer()? {
        Writer::Nobody => None,
        Writer::Known(_) | Writer::Unnamed => Published::read(&folder.state_file()).ok(),
    };
    let state = match (&live, record.as_ref().map(|r| &r.outcome)) {
        (Some(live), _) => live.state.clone(),
        (None, Some(Outcome::Running)) => "interrupted".into(),
        (None, Some(Outcome::Completed)) => "completed".into(),
        (None, Some(Outcome::Failed { .. })) => "failed".into(),
        (None, Some(Outcome::Stopped)) => "stopped".into(),
        (None, None) => "new".into(),
    };
    Ok(JobRow {
        job: folder.name().clone(),
        state,
        pid: live.as_ref().and_then(|l| l.pid),
        restarts: live.as_ref().map(|l| l.restarts),
        images: images.len(),
        newest: images.iter().find(|i| i.is_good()).map(|i| i.id),
        bytes: images.iter().filter_map(|i| i.manifest()).map(|m| m.bytes).sum(),
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
    /// good, bad or damaged.
    state: &'static str,
    /// Why it is not good.
    detail: Option<String>,
    bytes: Option<u64>,
    freeze_us: Option<u64>,
    reason: Option<Reason>,
    lineage: Option<String>,
}

impl From<&Image> for ImageRow {
    fn from(image: &Image) -> ImageRow {
        let (state, detail) = match &image.state {
            State::Good(_) => ("good", None),
            State::Bad { mark, .. } => ("bad", Some(format!("{}: {}", mark.why, mark.detail))),
            State::Damaged { why } => ("damaged", Some(why.to_string())),
        };
        let manifest = image.manifest();
        ImageRow {
            id: image.id,
            taken: manifest.map_or_else(|| image.id.taken(), |m| m.taken),
            state,
            detail,
            bytes: manifest.map(|m| m.bytes),
            freeze_us: manifest.map(|m| m.freeze_us),
            reason: manifest.map(|m| m.reason),
            lineage: manifest.map(|m| m.lineage.clone()),
        }
    }
}

fn images(folder: &JobFolder, format: Format) -> anyhow::Result<()> {
    let rows: Vec<ImageRow> = folder.images()?.iter().map(ImageRow::from).collect();
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let cells = rows.iter().map(|row| {
        vec![
            row.id.to_string(),
            row.taken.with_timezone(&Local).format("%Y-%m-%d %H:%M:%S").to_string(),
            or_dash(row.bytes.map(size)),
            or_dash(row.freeze_us.map(milliseconds)),
            or_dash(row.reason.map(|r| reason(r).into())),
            row.detail.as_ref().map_or_else(|| row.state.into(), |detail| format!("{}: {detail}", row.state)),
        ]
    });
    Ok(print_table(format, &["IMAGE", "TAKEN", "SIZE", "FREEZE", "REASON", "STATE"], cells, &rows)?)
}

/// Bytes for people.
pub(super) fn size(bytes: u64) -> String {
    bytesize::ByteSize::b(bytes).to_string()
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
