//! `rekindle prune`: print the plan, and carry it out.

use std::time::Duration;

use chrono::Utc;
use serde::Serialize;

use super::output::{complain, print_table};
use super::{Exit, Global, Misuse, job_args};
use crate::config::{self, SizeLimit};
use rekindle_base::chain;
use rekindle_base::units::size;
use rekindle_store::gc;
use rekindle_store::retention::survey::{self, Survey};
use rekindle_store::retention::{Plan, Policy, Verdict};
use rekindle_store::{ImageId, JobFolder, JobName, Known, Place};

/// What to prune, and by which rules.
#[derive(Debug, clap::Args)]
pub(crate) struct PruneArgs {
    /// The job; by default all jobs
    job: Option<String>,
    /// Print what would be removed and why; remove nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    rules: Rules,
}

/// Values that replace those of the configuration, this once.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Use this once, instead of the configuration")]
struct Rules {
    /// Keep the newest N good images (store.keep-last)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_last: Option<u32>,
    /// Keep the newest good image of each of the last N hours with images (store.keep-hourly)
    #[arg(long, value_name = "N")]
    keep_hourly: Option<u32>,
    /// Keep the newest good image of each of the last N days with images (store.keep-daily)
    #[arg(long, value_name = "N")]
    keep_daily: Option<u32>,
    /// Keep good images younger than this, such as 2h or 7days (store.keep-within)
    #[arg(long, value_name = "TIME")]
    keep_within: Option<humantime::Duration>,
    /// Keep the images of a job below this size, such as 500GB, or unlimited (store.max-total-size)
    #[arg(long, value_name = "SIZE")]
    max_total_size: Option<SizeLimit>,
}

impl Rules {
    fn over(&self, policy: Policy) -> Policy {
        Policy {
            keep_last: self.keep_last.unwrap_or(policy.keep_last),
            keep_hourly: self.keep_hourly.unwrap_or(policy.keep_hourly),
            keep_daily: self.keep_daily.unwrap_or(policy.keep_daily),
            keep_within: self.keep_within.map_or(policy.keep_within, Duration::from),
            max_total: self.max_total_size.map_or(policy.max_total, SizeLimit::bytes),
        }
    }
}

/// One image and what becomes of it.
#[derive(Debug, Serialize)]
struct Row {
    job: JobName,
    image: ImageId,
    action: &'static str,
    /// Of the image by itself.
    bytes: Option<u64>,
    /// What the disk gets back when it goes alone.
    frees: Option<u64>,
    reason: String,
}

pub(super) fn prune(global: &Global, args: &PruneArgs) -> anyhow::Result<Exit> {
    let store = global.open_store()?;
    let config = global.settings(global.overrides())?.store;
    let policy = args.rules.over(config.policy());
    let folders: Vec<JobFolder> = match &args.job {
        Some(job) => {
            let folder = job_args::job(&store, job)?;
            vec![folder.map_or_else(|| Ok(store.job(&job.parse()?)?), Ok::<_, anyhow::Error>)?]
        }
        None => store.jobs()?.iter().map(|name| store.job(name)).collect::<Result<_, _>>()?,
    };
    let mut rows = Vec::new();
    for folder in &folders {
        // Looked at before any of them goes.
        let survey = Survey::of(folder, config.min_free.bytes())?;
        let known = folder.known()?;
        let (plan, gone) = match args.dry_run {
            true => (survey.plan(&policy, Utc::now()), Vec::new()),
            false => carry_out(folder, &policy, &config)?,
        };
        rows.extend(known.iter().filter(|known| known.copy(Place::Stored).is_none()).map(|known| Row {
            job: folder.name().clone(),
            image: known.id(),
            action: "keep",
            bytes: bytes(known),
            frees: None,
            reason: "only in memory: removed when a newer image replaces it".into(),
        }));
        rows.extend(plan.decisions.iter().map(|decision| {
            let (action, reason) = match (&decision.verdict, args.dry_run) {
                (Verdict::Remove(_), true) => ("would remove", decision.verdict.to_string()),
                (Verdict::Remove(_), false) if gone.contains(&decision.id) => ("removed", decision.verdict.to_string()),
                (Verdict::Remove(_), false) => ("keep", "pinned in the meantime".to_owned()),
                (Verdict::Keep(_), _) => ("keep", decision.verdict.to_string()),
            };
            Row {
                job: folder.name().clone(),
                image: decision.id,
                action,
                bytes: known.iter().find(|known| known.id() == decision.id).and_then(bytes),
                frees: Some(survey.sizes().freed(&[decision.id])),
                reason,
            }
        }));
        plan.notes.iter().for_each(|note| complain(&format!("job {}: {note}", folder.name())));
    }
    let or_dash = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), size);
    let cells = rows.iter().map(|row| {
        vec![
            row.job.to_string(),
            row.image.to_string(),
            row.action.into(),
            or_dash(row.bytes),
            or_dash(row.frees),
            row.reason.clone(),
        ]
    });
    print_table(global.format(), &["JOB", "IMAGE", "ACTION", "SIZE", "FREES", "REASON"], cells, &rows)?;
    Ok(Exit::Success)
}

fn bytes(known: &Known) -> Option<u64> {
    known.best().manifest().map(|manifest| manifest.bytes)
}

/// The supervisor of a running job prunes by itself, and is the only one that may.
fn carry_out(folder: &JobFolder, policy: &Policy, config: &config::Store) -> anyhow::Result<(Plan, Vec<ImageId>)> {
    let lock = folder.lock().map_err(|error| match error {
        rekindle_store::Error::Supervised { .. } | rekindle_store::Error::PerhapsSupervised { .. } => {
            anyhow::Error::from(Misuse(format!(
                "{error}. Its supervisor prunes after each snapshot; `--dry-run` shows its plan"
            )))
        }
        other => other.into(),
    })?;
    let done = survey::rotate(folder, &lock, policy, config.min_free.bytes())?;
    // Repacking takes long and needs the key: the supervisor does that in the background.
    let bounds = gc::Bounds { repack: None, ..config.garbage(None) };
    let swept =
        gc::collect(folder, &lock, &bounds, Utc::now(), &|| false).and_then(|first| match first.marked.is_empty() {
            false if config.sweep_after.is_zero() => gc::sweep_now(folder, &lock, config.copies).map(|_| first),
            _ => Ok(first),
        });
    match swept {
        Ok(swept) if !swept.marked.is_empty() && !config.sweep_after.is_zero() => complain(&format!(
            "job {}: the disk space is free in {} (store.sweep-after), after the next sweep by the job's supervisor \
            or `rekindle prune`",
            folder.name(),
            humantime::format_duration(config.sweep_after)
        )),
        Ok(_) => {}
        Err(error) => complain(&format!("job {}: {}", folder.name(), chain(&error))),
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_stand_above_the_configuration_one_by_one() {
        let configured = Policy { keep_last: 3, keep_hourly: 24, max_total: Some(7), ..Policy::default() };
        let rules = Rules { keep_last: Some(1), max_total_size: Some(SizeLimit::Unlimited), ..Rules::default() };
        let policy = rules.over(configured);
        assert_eq!(policy, Policy { keep_last: 1, keep_hourly: 24, max_total: None, ..Policy::default() });
        assert_eq!(Rules::default().over(configured), configured);
    }
}
