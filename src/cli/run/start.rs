//! Where a run begins: from nothing, or from which image; and the name of its job where none is given.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::cli::Misuse;
use crate::config::ColdStart;
use crate::policy::StartPoint;
use crate::published::Published;
use crate::supervisor;
use crate::supervisor::line::{Begin, Candidate, Line};
use crate::supervisor::state::NO_USABLE_IMAGE;
use rekindle_base::units::moment;
use rekindle_store::{ImageId, JobFolder, JobName, JobRecord, Manifest, Outcome};

/// There are images to continue from, and none can be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "{why}. `rekindle list {job}` shows what is wrong with each; `rekindle unmark {job}/ID` removes a mark; `rekindle \
    restore {job}/ID` continues from one image; `rekindle run --fresh` with the same command starts the job from the \
    beginning"
)]
pub(crate) struct NoUsableImage {
    pub(super) job: JobName,
    pub(super) why: String,
}

/// What a run begins with.
pub(super) struct Start {
    pub(super) from: StartPoint,
    pub(super) lineage: String,
    pub(super) base: Option<ImageId>,
    /// Whether the user named the image.
    pub(super) named: bool,
}

/// Continues from the newest good image of the last run. A completed run is not silently started again, and one
/// without an image takes another command: there is nothing to continue.
pub(super) fn choose(folder: &JobFolder, command: &[OsString], fresh: bool, cold: ColdStart) -> anyhow::Result<Start> {
    let anew = || Start { from: StartPoint::Cold, lineage: supervisor::new_lineage(), base: None, named: false };
    let Some(record) = folder.record()? else { return Ok(anew()) };
    if fresh {
        return Ok(anew());
    }
    if record.outcome == Outcome::Completed {
        let done = completed(folder, &record);
        return Err(Misuse(format!("{done}: use --fresh to run it again from the beginning, or another --name")).into());
    }
    let line = Line::new(record.lineage.clone(), record.base);
    let mut images = folder.copies()?;
    if !is_same(&record, command) {
        // An image that cannot be read may be of this run.
        let is_of_it = |it: &Manifest| record.has(it.id, &it.lineage);
        if images.iter().any(|image| image.manifest().is_none_or(is_of_it)) {
            return Err(Misuse(other_command(&record, folder.name())).into());
        }
        tracing::info!("the last run of job {} left no image, so the job starts with the new command", folder.name());
        return Ok(anew());
    }
    for image in &mut images {
        if line.gives_another_chance(&Candidate::of(&*image)) {
            tracing::info!("image {} could not be restored in an earlier run; trying it again", image.id);
            image.clear_bad()?;
        }
    }
    let from = match line.begin(images.iter().map(Candidate::of), cold) {
        Begin::With(from) => from,
        Begin::OverImages => {
            tracing::warn!(
                "no image of the interrupted run can be used; `rekindle list {}` shows why. The job starts from the \
                beginning (restart.cold-start)",
                folder.name()
            );
            StartPoint::Cold
        }
        Begin::NoUsableImage => {
            return Err(NoUsableImage { job: folder.name().clone(), why: NO_USABLE_IMAGE.into() }.into());
        }
    };
    Ok(Start { from, lineage: record.lineage, base: record.base, named: false })
}

/// The beginning of a member of a group: the group decides what the job starts from.
pub(super) fn of_group(
    folder: &JobFolder,
    command: &[OsString],
    lineage: String,
    fresh: bool,
) -> anyhow::Result<Start> {
    if let Some(record) = folder.record()?.filter(|_| !fresh) {
        if record.outcome == Outcome::Completed {
            let done = completed(folder, &record);
            let text = format!("{done}: use --fresh on all machines to run it again, or another --name");
            return Err(Misuse(text).into());
        }
        if !is_same(&record, command) && !folder.copies()?.is_empty() {
            return Err(Misuse(other_command(&record, folder.name())).into());
        }
    }
    Ok(Start { from: StartPoint::Cold, lineage, base: None, named: false })
}

/// Whether the command is the one of the last run. A restored image runs the command that was started then, whatever is
/// typed now.
fn is_same(record: &JobRecord, command: &[OsString]) -> bool {
    let typed: Vec<String> = command.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    typed == record.command
}

fn other_command(record: &JobRecord, name: &JobName) -> String {
    format!(
        "job {name} was interrupted while it ran {:?}, and this is another command: use --fresh to start from the \
        beginning, or another --name",
        record.command.join(" ")
    )
}

/// What to say instead of a start, for a service manager that starts the same command at every boot.
pub(super) fn nothing_to_do(folder: &JobFolder) -> anyhow::Result<Option<String>> {
    let record = folder.record()?.filter(|record| record.outcome == Outcome::Completed);
    Ok(record.map(|record| format!("{}: nothing to do. --fresh runs it again", completed(folder, &record))))
}

/// The message that the job has completed, and when.
fn completed(folder: &JobFolder, record: &JobRecord) -> String {
    let last = Published::read(&folder.state_file()).ok().filter(|last| last.lineage == record.lineage);
    let at = last.map_or_else(String::new, |last| format!(" at {}", moment(last.since)));
    format!("job {} completed{at}", folder.name())
}

/// The command's name and a hash of all of it with its directory: the same line typed again means the same job.
pub(super) fn default_name(command: &[OsString], directory: &Path) -> anyhow::Result<JobName> {
    let base = Path::new(command.first().map_or_else(|| OsStr::new("job"), OsString::as_os_str));
    let base = base.file_name().unwrap_or_default().to_string_lossy();
    let plain: String = base.chars().filter(|c| c.is_ascii_alphanumeric() || "_-".contains(*c)).take(40).collect();
    let mut hash = blake3::Hasher::new();
    for part in command.iter().map(OsString::as_os_str).chain([directory.as_os_str()]) {
        hash.update(part.as_encoded_bytes()).update(&[0]);
    }
    let plain = if plain.is_empty() || plain.starts_with('-') { "job" } else { &plain };
    Ok(format!("{plain}-{}", hash.finalize().to_hex().get(..8).unwrap_or_default()).parse()?)
}
