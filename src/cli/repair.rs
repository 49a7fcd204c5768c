//! `rekindle repair`: repairs the packs of a job, and names the images that have lost content.

use serde::Serialize;

use super::find::Finder;
use super::list::no_images;
use super::output::{Column, Format, complain, print_json, print_note, print_table, print_text, terminal_width};
use super::{Exit, Global, Misuse, complete, progress};
use rekindle_replica::{self as replica, OnDemand, Patience, Replica};
use rekindle_store::heal::ChunkSource;
use rekindle_store::persist;
use rekindle_store::repair::{self, Loss, Mode, Repaired, Sources};
use rekindle_store::{Error as StoreError, JobFolder, JobName};

/// What to repair.
#[derive(Debug, clap::Args)]
pub(crate) struct RepairArgs {
    /// The job; by default all jobs
    #[arg(add = complete::jobs())]
    job: Option<String>,
    /// Print what would be done; change nothing
    #[arg(long)]
    dry_run: bool,
}

const COLUMNS: [Column; 4] =
    [Column::whole("JOB"), Column::whole("WHAT"), Column::whole("STATE"), Column::short("DETAIL")];

/// The findings for a job.
#[derive(Debug, Serialize)]
struct Row {
    job: JobName,
    whole: bool,
    dry_run: bool,
    #[serde(flatten)]
    repaired: Repaired,
}

pub(super) fn repair(global: &Global, args: &RepairArgs) -> anyhow::Result<Exit> {
    let all = global.settings(global.overrides())?;
    let config = &all.store;
    let trust = config.trust()?;
    let key = trust.key();
    let folders: Vec<JobFolder> = match &args.job {
        Some(job) => vec![Finder::with_key(global)?.only_job(job)?],
        None => {
            let store = global.open_store()?;
            store.jobs()?.iter().map(|name| store.job(name)).collect::<Result<_, _>>()?
        }
    };
    if let [folder] = &folders[..]
        && args.job.is_some()
        && global.format() == Format::Text
        && folder.known()?.is_empty()
    {
        print_text(&no_images(folder.name()))?;
        return Ok(Exit::Success);
    }
    if !args.dry_run {
        // Check at the beginning, because a refusal must not come after hours. The locks are not kept: a lock without
        // heartbeats would count as that of a dead process.
        folders.iter().try_for_each(|folder| lock(folder).map(drop))?;
    }
    let mut rows = Vec::new();
    for folder in &folders {
        let lock = if args.dry_run { None } else { Some(lock(folder)?) };
        let mode = lock.as_ref().map_or(Mode::DryRun, Mode::Repair);
        let what = format!("reading packs of {}", folder.name());
        let there = OnDemand(|| {
            let url = all.replica.url.as_ref().ok_or(replica::Error::Cancelled)?;
            Ok(Replica::open(url, folder.name(), Patience::Little)?.with_trust(folder.trust()))
        });
        let sources =
            Sources { copies: config.copies, replica: all.replica.url.is_some().then_some(&there as &dyn ChunkSource) };
        let repaired = progress::shown(&what, |progress| {
            repair::repair(folder, mode, key, &sources, persist::threads(), progress)
        })?;
        let whole = repaired.is_whole();
        rows.push(Row { job: folder.name().clone(), whole, dry_run: args.dry_run, repaired });
    }
    match global.format() {
        Format::Json => print_json(&rows)?,
        Format::Text => print(&rows)?,
    }
    if args.dry_run && all.replica.url.is_some() && rows.iter().any(|row| !row.whole) {
        complain("the replica was not asked: without --dry-run, lost content is fetched from it if possible");
    }
    Ok(if rows.iter().all(|row| row.whole) { Exit::Success } else { Exit::Unsound })
}

fn print(rows: &[Row]) -> anyhow::Result<()> {
    print_table(Format::Text, &COLUMNS, rows.iter().flat_map(cells), &())?;
    if terminal_width().is_some() {
        // What was lost must not be cut.
        let lossy = rows.iter().filter(|row| !row.whole).flat_map(cells);
        for cells in lossy {
            let [_, what, _, detail] = &cells[..] else { continue };
            print_note(what, detail)?;
        }
    }
    Ok(())
}

/// Takes the lock. If the job has a supervisor, only that may write to the packs.
fn lock(folder: &JobFolder) -> anyhow::Result<rekindle_store::WriterLock> {
    folder.lock().map_err(|error| match error {
        StoreError::Supervised { .. } | StoreError::PerhapsSupervised { .. } => {
            Misuse(format!("{error}. `--dry-run` checks without changing anything")).into()
        }
        other => other.into(),
    })
}

fn cells(row: &Row) -> Vec<Vec<String>> {
    let cells = |what: String, state: &str, detail: &str| vec![row.job.to_string(), what, state.into(), detail.into()];
    let packs = row.repaired.packs.iter().map(|pack| {
        let whole = format!("{}; {} intact records", pack.what, pack.whole);
        cells(format!("pack {}", pack.pack), &format!("{}{}", would(row), pack.outcome), &whole)
    });
    let images = row.repaired.images.iter().map(|image| {
        let state = match image.loss {
            Loss::Certain => format!("{}marked bad", would(row)),
            Loss::NotKnown => "not known".to_owned(),
        };
        cells(format!("image {}", image.image), &state, &image.what)
    });
    let healed = row.repaired.healed.iter().map(|healed| cells("content".into(), "replaced", &healed.to_string()));
    let mut all: Vec<_> = packs.chain(healed).chain(images).collect();
    if all.is_empty() {
        all.push(cells("everything".into(), "whole", "all records were read, and all images are complete"));
    }
    all
}

fn would(row: &Row) -> &'static str {
    if row.dry_run { "would be " } else { "" }
}
