//! `rekindle snapshot`, `suspend`, `resume` and `rewind`: one request to a job's supervisor, and the answer as text.

use std::path::PathBuf;
use std::time::Duration;

use super::find::Finder;
use super::output::{Format, print_json, print_text};
use super::{Exit, Global, Misuse, complete, ended, progress};
use crate::control::client;
use crate::control::protocol::{Answer, Request, Rewind, Snapshot};
use crate::published::Published;
use rekindle_store::{ImageId, JobFolder, Tag, Writer};

/// A job.
#[derive(Debug, clap::Args)]
pub(crate) struct JobArg {
    /// The job
    #[arg(add = complete::running_jobs())]
    job: String,
}

/// Which job, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct SnapshotArgs {
    /// The job
    #[arg(add = complete::running_jobs())]
    job: String,
    /// Tag the image, to refer to it as JOB/TAG; waits until the image is stored
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<Tag>,
    /// Wait until the image is stored, so that it survives a restart of the machine
    #[arg(long)]
    stored: bool,
    /// Copy all GPU memory of the job on this machine, even what has not changed (see gpu.full-copy-every)
    #[arg(long)]
    full: bool,
}

/// Which job, and which image.
#[derive(Debug, clap::Args)]
pub(crate) struct RewindArgs {
    /// The job; or JOB/ID, JOB/TAG or JOB/-N
    #[arg(add = complete::running_jobs())]
    job: String,
    /// The image: ID (or its number or beginning), TAG, or -N for the Nth newest image (-1 is the newest). For a job over
    /// several machines a number is that of a group image, and -N is the Nth newest of those (`rekindle list` shows them)
    #[arg(allow_hyphen_values = true, value_name = "ID|TAG|-N", add = complete::images_of_job())]
    to: Option<String>,
}

pub(super) fn snapshot(global: &Global, args: &SnapshotArgs) -> anyhow::Result<Exit> {
    let how = Snapshot { tags: args.tags.clone(), stored: args.stored, full: args.full };
    ask(global, &args.job, &Request::Snapshot(how), "taking a snapshot")
}

pub(super) fn suspend(global: &Global, args: &JobArg) -> anyhow::Result<Exit> {
    ask(global, &args.job, &Request::Suspend, "suspending")
}

pub(super) fn resume(global: &Global, args: &JobArg) -> anyhow::Result<Exit> {
    ask(global, &args.job, &Request::Resume, "resuming")
}

pub(super) fn rewind(global: &Global, args: &RewindArgs) -> anyhow::Result<Exit> {
    // JOB/IMAGE names an image in all other commands.
    let (job, to) = match (args.job.split_once('/'), &args.to) {
        (None, Some(to)) => (args.job.as_str(), to.as_str()),
        (Some((job, to)), None) => (job, to),
        (None, None) => {
            return Err(Misuse(format!(
                "to which image? `rekindle rewind {} -2` goes back to the second newest one; `rekindle list {}` lists \
                them",
                args.job, args.job
            ))
            .into());
        }
        (Some(_), Some(_)) => {
            return Err(Misuse(format!(
                "{} names an image already: leave out {}",
                args.job,
                args.to.as_deref().unwrap_or_default()
            ))
            .into());
        }
    };
    ask(global, job, &Request::Rewind(Rewind { to: to.to_owned() }), "rewinding")
}

fn ask(global: &Global, job: &str, request: &Request, doing: &str) -> anyhow::Result<Exit> {
    let folder = Finder::new(global)?.job(job)?;
    let path = socket(&folder)?;
    let answer = progress::waited(doing, || client::ask_one_that_runs(&path, request, PATIENCE))?;
    match global.format() {
        Format::Json => print_json(&answer)?,
        Format::Text => print_text(&words(&folder, &answer))?,
    }
    Ok(Exit::Success)
}

/// How long a supervisor may take to answer: it does so at once, unless it is stuck.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The address of the job's supervisor.
pub(super) fn socket(folder: &JobFolder) -> anyhow::Result<PathBuf> {
    let name = folder.name();
    let published = Published::live(folder)?;
    if let Some(path) = published.as_ref().and_then(|published| published.control.clone()) {
        return Ok(path);
    }
    let here = rekindle_store::Holder::this_process();
    let why = match folder.writer()? {
        Writer::Nobody => {
            let (how, next) = (ended::how(folder)?, ended::capital(&ended::next(folder)?));
            format!("job {name} is not running: {how}. {next}")
        }
        Writer::Known(holder) if holder.boot_id != here.boot_id => {
            format!("job {name} is supervised by {holder}: run this command there")
        }
        _ => format!(
            "the supervisor of job {name} has no control socket: it has just begun, or is about to exit, or its log says \
            why. Try again"
        ),
    };
    Err(Misuse(why).into())
}

fn words(folder: &JobFolder, answer: &Answer) -> String {
    let name = folder.name();
    let from = |image: &Option<ImageId>| image.map_or_else(|| "the beginning".into(), |image| format!("image {image}"));
    match answer {
        Answer::Snapshot(it) => {
            let (freeze, size) = (super::list::milliseconds(it.freeze_us), rekindle_base::units::size(it.bytes));
            let place = if it.stored { "in the store" } else { "being stored" };
            format!("{name}/{}: {size}, the job was frozen for {freeze}; {place}", it.image)
        }
        Answer::Suspended { image, only_in_memory: None } => {
            format!("job {name} is suspended: `rekindle resume {name}` continues from {}", from(image))
        }
        Answer::Suspended { image, only_in_memory: Some(why) } => format!(
            "job {name} is suspended: `rekindle resume {name}` continues from {}, which is only in memory: {why}",
            from(image)
        ),
        Answer::Running { image } => format!("job {name} is running, from {}", from(image)),
        Answer::Stopping {} => format!("job {name} is being stopped"),
        Answer::Status(published) => format!("job {name} is {}", published.state),
    }
}
