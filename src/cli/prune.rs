//! `rekindle prune`: print the plan, and carry it out.

use std::time::Duration;

use chrono::Utc;
use serde::Serialize;

use super::find::Finder;
use super::list::no_images;
use super::output::{Column, Format, complain, print_note, print_table, print_text, terminal_width};
use super::{Exit, Global, Misuse, complete, exit};
use crate::config::{self, Config, SizeLimit};
use rekindle_base::chain;
use rekindle_base::units::size;
use rekindle_engine::launch::work;
use rekindle_store::gc;
use rekindle_store::retention::survey::{self, Survey};
use rekindle_store::retention::{Plan, Policy, Verdict};
use rekindle_store::staging::leftovers::{self, Leftover, OnlyCopies};
use rekindle_store::{Access, Error, ImageId, JobFolder, JobName, Known, Place, Store, Trust, Writer};

/// What to prune, and the rules for it.
#[derive(Debug, clap::Args)]
pub(crate) struct PruneArgs {
    /// The job; by default all jobs that are not running
    #[arg(add = complete::jobs())]
    job: Option<String>,
    /// Print what would be removed and why; remove nothing
    #[arg(long)]
    dry_run: bool,
    /// Also free memory that a dead supervisor left, even if it contains the only copy of an image; that image is lost
    #[arg(long)]
    discard_memory: bool,
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
    #[arg(long, value_name = "SIZE", value_parser = limit)]
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

fn limit(text: &str) -> Result<SizeLimit, String> {
    text.parse().map_err(|_| "must be unlimited, or a size such as 64MiB or 500GB".to_owned())
}

const COLUMNS: [Column; 6] = [
    Column::whole("JOB"),
    Column::whole("IMAGE"),
    Column::whole("ACTION"),
    Column::optional("SIZE", 2),
    Column::optional("FREES", 1),
    Column::short("REASON"),
];

/// One image and the decision about it.
#[derive(Debug, Serialize)]
struct Row {
    job: JobName,
    /// None for memory that a dead supervisor left.
    image: Option<ImageId>,
    action: &'static str,
    /// The size of the image by itself.
    bytes: Option<u64>,
    /// Bytes that become free if only this image is removed.
    frees: Option<u64>,
    reason: String,
}

pub(super) fn prune(global: &Global, args: &PruneArgs) -> anyhow::Result<Exit> {
    let Config { store: config, snapshot, .. } = global.settings(global.overrides())?;
    let trust = config.trust()?;
    let named = args.job.as_ref().map(|job| Finder::with_key(global)?.only_job(job)).transpose()?;
    let store = match Store::open(&config.directory, Access::Read) {
        Ok(store) => Some(store.with_trust(trust.clone())),
        // There may be memory of another store's jobs, and a job that is named may be running with another store.
        Err(Error::NoStore(_)) if named.is_some() || global.store.is_none() => None,
        Err(error) => return Err(error.into()),
    };
    let policy = args.rules.over(config.policy());
    let mut failed = false;
    let mut fails = |name: &JobName, error: &(dyn std::error::Error + 'static)| {
        complain(&format!("job {name}: {}{}", chain(error), exit::hint(error)));
        failed = true;
    };
    let folders: Vec<JobFolder> = match (&store, named) {
        (_, Some(folder)) => vec![folder],
        (Some(store), None) => {
            let all = store.jobs()?;
            all.iter().filter_map(|name| store.job(name).inspect_err(|error| fails(name, error)).ok()).collect()
        }
        (None, None) => Vec::new(),
    };
    let (mut rows, mut freed) = (Vec::new(), 0);
    for folder in &folders {
        let name = folder.name();
        let is_left = "is running, and its supervisor prunes after each snapshot: left as it is";
        // One that is named is refused below.
        let is_tried = args.dry_run || args.job.is_some();
        if !is_tried && folder.writer().is_ok_and(|writer| writer != Writer::Nobody) {
            complain(&format!("job {name} {is_left}"));
            continue;
        }
        match one(folder, args, &policy, &config) {
            Ok((of_job, bytes)) => {
                rows.extend(of_job);
                freed += bytes;
            }
            Err(error @ (Error::Supervised { .. } | Error::PerhapsSupervised { .. })) if args.job.is_some() => {
                return Err(Misuse(format!(
                    "{error}. Its supervisor prunes after each snapshot; `--dry-run` shows its plan"
                ))
                .into());
            }
            // It started just now.
            Err(Error::Supervised { .. } | Error::PerhapsSupervised { .. }) => {
                complain(&format!("job {name} {is_left}"));
            }
            Err(error) if args.job.is_some() => return Err(error.into()),
            // The others are pruned, and what was removed is told.
            Err(error) => fails(name, &error),
        }
    }
    let mut left = Vec::new();
    for folder in &folders {
        match Leftover::of(folder) {
            Err(error) if args.job.is_none() => fails(folder.name(), &error),
            found => left.extend(found?),
        }
    }
    if !args.dry_run {
        work::remove_left();
    }
    if args.job.is_none() {
        left.extend(leftovers::elsewhere(&snapshot.staging_directory, &config.directory, &trust));
    }
    if let Some(store) = store.as_ref().filter(|_| args.job.is_none()) {
        for job in store.half_removed()? {
            let action = match args.dry_run {
                true => Ok("would remove"),
                false => store.finish_removal(&job).map(|_| "removed"),
            };
            let Ok(action) = action.inspect_err(|error| fails(&job, error)) else { continue };
            let reason = "the rest of a removal that was interrupted".to_owned();
            rows.push(Row { job, image: None, action, bytes: None, frees: None, reason });
        }
    }
    for left in &left {
        let row = memory(left, args, &trust);
        freed += if row.action == "keep" { 0 } else { left.bytes };
        rows.push(row);
    }
    let exit = if failed { Exit::Unsound } else { Exit::Success };
    if rows.is_empty() && global.format() == Format::Text {
        if !failed {
            print_text(&nothing(&folders, args))?;
        }
        return Ok(exit);
    }
    let or_dash = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), size);
    let cells = rows.iter().map(|row| {
        vec![
            row.job.to_string(),
            row.image.map_or_else(|| "-".into(), |image| image.to_string()),
            row.action.into(),
            or_dash(row.bytes),
            or_dash(row.frees),
            row.reason.clone(),
        ]
    });
    print_table(global.format(), &COLUMNS, cells, &rows)?;
    if global.format() == Format::Text {
        if terminal_width().is_some() {
            // What to do about it must not be cut.
            let left = rows.iter().filter(|row| row.image.is_none() && row.action == "keep");
            left.into_iter().try_for_each(|row| print_note(row.job.as_str(), &row.reason))?;
        }
        print_text(&sum(rows.iter().filter(|row| row.action != "keep").count(), freed, args.dry_run))?;
    }
    Ok(exit)
}

/// Prunes a job, or plans that. Returns a row for each of its images, and how many bytes become free.
fn one(
    folder: &JobFolder,
    args: &PruneArgs,
    policy: &Policy,
    config: &config::Store,
) -> rekindle_store::Result<(Vec<Row>, u64)> {
    // Collected before anything is removed.
    let survey = Survey::of(folder, config.min_free.bytes())?;
    let known = folder.known()?;
    let (plan, gone) = match args.dry_run {
        true => (survey.plan(policy, Utc::now()), Vec::new()),
        false => carry_out(folder, policy, config)?,
    };
    let removed = plan.decisions.iter().filter(|decision| match decision.verdict {
        Verdict::Remove(_) => args.dry_run || gone.contains(&decision.id),
        Verdict::Keep(_) => false,
    });
    // Together: images that share content free it only if all of them go.
    let freed = survey.sizes().freed(&removed.map(|decision| decision.id).collect::<Vec<_>>());
    let staged = known.iter().filter(|known| known.copy(Place::Stored).is_none()).map(|known| Row {
        job: folder.name().clone(),
        image: Some(known.id()),
        action: "keep",
        bytes: bytes(known),
        frees: None,
        reason: "only in memory: removed when a newer image replaces it".into(),
    });
    let stored = plan.decisions.iter().map(|decision| {
        let (action, reason) = match (&decision.verdict, args.dry_run) {
            (Verdict::Remove(_), true) => ("would remove", decision.verdict.to_string()),
            (Verdict::Remove(_), false) if gone.contains(&decision.id) => ("removed", decision.verdict.to_string()),
            (Verdict::Remove(_), false) => ("keep", "pinned in the meantime".to_owned()),
            (Verdict::Keep(_), _) => ("keep", decision.verdict.to_string()),
        };
        Row {
            job: folder.name().clone(),
            image: Some(decision.id),
            action,
            bytes: known.iter().find(|known| known.id() == decision.id).and_then(bytes),
            frees: Some(survey.sizes().freed(&[decision.id])),
            reason,
        }
    });
    let rows = staged.chain(stored).collect();
    plan.notes.iter().for_each(|note| complain(&format!("job {}: {note}", folder.name())));
    Ok((rows, freed))
}

/// What all of it frees.
fn sum(removed: usize, freed: u64, dry_run: bool) -> String {
    match (removed, dry_run) {
        (0, true) => "nothing would be removed".to_owned(),
        (0, false) => "nothing was removed".to_owned(),
        (1, true) => format!("1 removal would free {}", size(freed)),
        (n, true) => format!("{n} removals would free {}", size(freed)),
        (1, false) => format!("1 removal frees {}", size(freed)),
        (n, false) => format!("{n} removals free {}", size(freed)),
    }
}

fn nothing(folders: &[JobFolder], args: &PruneArgs) -> String {
    match folders {
        [folder] if args.job.is_some() => no_images(folder.name()),
        _ => "there is nothing to prune".to_owned(),
    }
}

/// Frees what a dead supervisor left, if it may go.
fn memory(left: &Leftover, args: &PruneArgs, trust: &Trust) -> Row {
    let only = if args.discard_memory { OnlyCopies::Discard } else { OnlyCopies::Keep };
    let may_go = left.needed.is_none() || args.discard_memory;
    let action = match (may_go, args.dry_run) {
        (true, true) => "would remove",
        (true, false) if left.free(trust, only) => "removed",
        _ => "keep",
    };
    let advice = if action == "keep" { format!(": {}", left.advice()) } else { String::new() };
    let reason = format!("{left} (store {}){advice}", left.store.display());
    Row { job: left.job.clone(), image: None, action, bytes: None, frees: Some(left.bytes), reason }
}

fn bytes(known: &Known) -> Option<u64> {
    known.best().manifest().map(|manifest| manifest.bytes)
}

/// Removes the images, unless the job has a supervisor, which prunes by itself.
fn carry_out(
    folder: &JobFolder,
    policy: &Policy,
    config: &config::Store,
) -> rekindle_store::Result<(Plan, Vec<ImageId>)> {
    let lock = folder.lock()?;
    // As at the start of a run: a crash may have left files, and an image that is pinned under another name.
    folder.sweep_leftovers(&lock)?;
    let done = survey::rotate(folder, &lock, policy, config.min_free.bytes())?;
    // Repacking takes long: the supervisor does it in the background.
    let bounds = gc::Bounds { repack: None, ..config.garbage(folder.trust().key()) };
    let swept = match gc::collect(folder, &lock, &bounds, Utc::now(), &|| false) {
        // There is no room for the marks, so there will be none after the time that they wait either.
        Err(error) if error.is_full() => gc::sweep_now(folder, &lock, config.copies).map(|_| gc::Collected::default()),
        swept => swept,
    };
    match swept {
        Ok(swept) if !swept.marked.is_empty() => complain(&format!(
            "job {}: the disk space is free in {}, after the next sweep by the job's supervisor or `rekindle prune`",
            folder.name(),
            humantime::format_duration(bounds.sweep_after)
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

    #[test]
    fn what_a_crash_left_is_removed_and_a_pinned_image_is_one_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let unfinished = folder.packs_dir().join(".tmp-x.pack");
        std::fs::write(&unfinished, "x").unwrap();
        let mut manifest: rekindle_store::Manifest = serde_json::from_str(rekindle_testing::MANIFEST).unwrap();
        manifest.parts.clear();
        // Its removal was interrupted when it had just been pinned.
        let half = folder.images_dir().join(format!(".del-{}", manifest.id));
        std::fs::create_dir(&half).unwrap();
        std::fs::write(half.join("manifest.json"), manifest.to_bytes(folder.trust()).unwrap()).unwrap();
        std::fs::write(half.join("tags.json"), "{\"version\":1,\"pinned\":true,\"tags\":[]}").unwrap();
        let (plan, _) = carry_out(&folder, &Policy::default(), &Config::default().store).unwrap();
        assert!(!unfinished.is_there());
        assert_eq!(plan.decisions.iter().map(|it| it.id).collect::<Vec<_>>(), [manifest.id]);
    }
}
