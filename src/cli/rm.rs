//! `rekindle rm`: removes whole jobs. Everything is checked, and every lock taken, before the first job is removed.

use std::io::{self, BufRead, IsTerminal, Write};

use serde::Serialize;

use super::find::{self, Finder};
use super::output::{Format, complain, print_json, print_text};
use super::{Exit, Global, Misuse, complete, progress, trust};
use crate::config::Config;
use crate::report;
use rekindle_base::units::{counted, size};
use rekindle_engine::launch::work;
use rekindle_store::{self as store, Access, ImageId, JobFolder, JobName, Pinned, Seen, Store, WriterLock};

/// Which jobs, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct RmArgs {
    /// The jobs
    #[arg(required = true, value_name = "JOB", add = complete::jobs_at_rest())]
    jobs: Vec<String>,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    /// Remove jobs that have pinned images, too
    #[arg(long)]
    force: bool,
}

/// A job that can be removed.
struct Doomed {
    row: Row,
    /// None if an earlier removal was interrupted: it no longer counts as a job, and the rest of it is removed.
    whole: Option<(JobFolder, WriterLock)>,
    store: Store,
}

/// What removing a job frees.
#[derive(Debug, Serialize)]
struct Row {
    job: JobName,
    images: usize,
    /// Bytes on the disk.
    frees: u64,
    memory_bytes: u64,
}

impl Row {
    fn in_words(&self) -> String {
        let images = counted(u64::try_from(self.images).unwrap_or(u64::MAX), "image");
        let memory = match self.memory_bytes {
            0 => String::new(),
            bytes => format!(" and {} of memory", size(bytes)),
        };
        format!("{images}, {} on the disk{memory}", size(self.frees))
    }
}

pub(super) fn rm(global: &Global, args: &RmArgs) -> anyhow::Result<Exit> {
    let config = global.settings(global.overrides())?;
    let finder = Finder::new(global)?;
    let mut names = args.jobs.clone();
    names.sort();
    names.dedup();
    let doomed = names.iter().map(|text| look(&config, &finder, text, args.force));
    let doomed = doomed.collect::<anyhow::Result<Vec<_>>>()?;
    if !args.yes {
        ask(&doomed)?;
    }
    let pinned = if args.force { Pinned::Remove } else { Pinned::Keep };
    let mut rows = Vec::new();
    for Doomed { row, whole, store } in doomed {
        progress::waited(&format!("removing {}", row.job), || match &whole {
            Some((folder, lock)) => remove(&store, folder, lock, pinned),
            None => store.finish_removal(&row.job).map(drop),
        })?;
        if global.format() == Format::Text {
            print_text(&format!("job {} is removed: {}", row.job, row.in_words()))?;
        }
        rows.push(row);
    }
    if config.replica.url.is_some() {
        complain("copies of the images in the replica stay (replica.url)");
    }
    if global.format() == Format::Json {
        print_json(&rows)?;
    }
    Ok(Exit::Success)
}

/// Finds the job, takes its lock, and refuses what must stay.
fn look(config: &Config, finder: &Finder, text: &str, force: bool) -> anyhow::Result<Doomed> {
    let name = find::job_name(text)?;
    if let Ok(store) = Store::open(finder.store(), Access::Read)
        && store.is_half_removed(&name)
        && matches!(store.job(&name), Err(store::Error::UnknownJob { .. }))
    {
        let row = Row { job: name, images: 0, frees: 0, memory_bytes: 0 };
        return Ok(Doomed { row, whole: None, store });
    }
    let folder = finder.only_job(text)?;
    // Names of links beside the user's files are believed only of images that are trusted. A key that cannot be used is
    // no reason to keep a job.
    let trust = config.store.trust().unwrap_or_default();
    let store = Store::open(folder.store(), Access::Read)?.with_trust(trust);
    let folder = store.job(&name)?;
    let lock = folder.lock().map_err(|error| match error {
        store::Error::Supervised { .. } => {
            anyhow::Error::from(Misuse(format!("job {name} is running: stop it first with `rekindle stop {name}`")))
        }
        store::Error::PerhapsSupervised { .. } => Misuse(error.to_string()).into(),
        other => other.into(),
    })?;
    if !force {
        let pinned = folder.pinned()?;
        if !pinned.is_empty() {
            let images = pinned.iter().map(ImageId::to_string).collect::<Vec<_>>().join(", ");
            let why = format!("job {name} has pinned images ({images}): use --force to remove it with them");
            return Err(Misuse(why).into());
        }
    }
    let row = Row {
        job: name,
        images: folder.known().map_or(0, |known| known.len()),
        frees: report::allocated(folder.dir()),
        memory_bytes: folder.memory(),
    };
    Ok(Doomed { row, whole: Some((folder, lock)), store })
}

/// Asks on a terminal; without one, the flag is needed.
fn ask(doomed: &[Doomed]) -> anyhow::Result<()> {
    let jobs: Vec<String> = doomed.iter().map(|it| format!("job {}: {}", it.row.job, it.row.in_words())).collect();
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let why =
            format!("`rekindle rm` asks first, and there is no terminal: add --yes to remove {}", jobs.join("; "));
        return Err(Misuse(why).into());
    }
    let mut err = io::stderr().lock();
    jobs.iter().try_for_each(|job| writeln!(err, "{job}"))?;
    write!(err, "Remove {} for good? [y/N] ", if jobs.len() == 1 { "it" } else { "them" })?;
    err.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Misuse("nothing was removed".into()).into()),
    }
}

fn remove(store: &Store, folder: &JobFolder, lock: &WriterLock, pinned: Pinned) -> Result<(), store::Error> {
    let seen = trust::seen(folder);
    work::remove_left();
    store.remove_job(folder, lock, pinned)?;
    // Images that were removed on purpose are not missed by a later job of that name.
    for run in seen.iter().flat_map(|seen: &Seen| seen.runs().unwrap_or_default()) {
        seen.iter().for_each(|seen| trust::forget(seen, &run.lineage));
    }
    Ok(())
}
