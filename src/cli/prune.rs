//! `rekindle prune`: print the plan, and carry it out.

use serde::Serialize;

use super::output::print_table;
use super::{Exit, Global, Misuse, job_args};
use crate::store::retention::{self, Facts, Plan, Policy, Verdict};
use crate::store::{ImageId, JobFolder, JobName, Known, Place};

/// What to prune.
#[derive(Debug, clap::Args)]
pub(crate) struct PruneArgs {
    /// The job; all jobs without it
    job: Option<String>,
    /// Print what would go and why, and remove nothing
    #[arg(long)]
    dry_run: bool,
}

/// One image and what becomes of it.
#[derive(Debug, Serialize)]
struct Row {
    job: JobName,
    image: ImageId,
    action: &'static str,
    reason: String,
}

pub(super) fn prune(global: &Global, args: &PruneArgs) -> anyhow::Result<Exit> {
    let store = global.open_store()?;
    let policy = Policy { keep_last: global.settings(global.overrides())?.store.keep_last };
    let folders: Vec<JobFolder> = match &args.job {
        Some(job) => {
            let folder = job_args::job(&store, job)?;
            vec![folder.map_or_else(|| Ok(store.job(&job.parse()?)?), Ok::<_, anyhow::Error>)?]
        }
        None => store.jobs()?.iter().map(|name| store.job(name)).collect::<Result<_, _>>()?,
    };
    let mut rows = Vec::new();
    for folder in &folders {
        let plan = if args.dry_run { plan(folder, &policy)? } else { carry_out(folder, &policy)? };
        let only_in_memory = |known: &&Known| known.copy(Place::Stored).is_none();
        rows.extend(folder.known()?.iter().filter(only_in_memory).map(|known| Row {
            job: folder.name().clone(),
            image: known.id(),
            action: "keep",
            reason: "in memory only: it goes when a newer one takes its place".into(),
        }));
        rows.extend(plan.decisions.iter().map(|decision| Row {
            job: folder.name().clone(),
            image: decision.id,
            action: match (decision.verdict, args.dry_run) {
                (Verdict::Keep(_), _) => "keep",
                (Verdict::Remove(_), true) => "would remove",
                (Verdict::Remove(_), false) => "removed",
            },
            reason: decision.verdict.to_string(),
        }));
    }
    let cells = rows.iter().map(|r| vec![r.job.to_string(), r.image.to_string(), r.action.into(), r.reason.clone()]);
    print_table(global.format(), &["JOB", "IMAGE", "ACTION", "REASON"], cells, &rows)?;
    Ok(Exit::Success)
}

fn plan(folder: &JobFolder, policy: &Policy) -> anyhow::Result<Plan> {
    let facts: Vec<Facts> = folder.images()?.iter().map(Facts::from).collect();
    Ok(retention::plan(&facts, policy))
}

/// The supervisor of a running job prunes by itself, and is the only one that may.
fn carry_out(folder: &JobFolder, policy: &Policy) -> anyhow::Result<Plan> {
    let lock = folder.lock().map_err(|error| match error {
        crate::store::Error::Supervised { .. } | crate::store::Error::PerhapsSupervised { .. } => anyhow::Error::from(
            Misuse(format!("{error}; its supervisor prunes after each snapshot, and `--dry-run` shows its plan")),
        ),
        other => other.into(),
    })?;
    let plan = plan(folder, policy)?;
    for id in plan.removals() {
        // Large images take a while to go.
        lock.refresh()?;
        folder.remove(&lock, &id)?;
    }
    Ok(plan)
}
