//! Where a run begins: from nothing, or from which image; and the name of its job where none is given.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::cli::Misuse;
use crate::config::ColdStart;
use crate::policy::StartPoint;
use crate::published::Published;
use crate::supervisor::line::{Begin, Candidate, Line};
use crate::supervisor::state::NO_USABLE_IMAGE;
use rekindle_base::units::moment;
use rekindle_store::manifest::words;
use rekindle_store::record::new_lineage;
use rekindle_store::{DamageKind, Image, ImageId, JobFolder, JobName, JobRecord, Known, Manifest, Outcome, State};

/// There are images to continue from, and none can be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "{why}. `rekindle list {job}` shows what is wrong with each; `rekindle mark --good {job}/ID` removes a mark; `rekindle \
    restore {job}/ID` continues from one image; `rekindle run --fresh` with the same command starts the job from the \
    beginning"
)]
pub(crate) struct NoUsableImage {
    pub(super) job: JobName,
    pub(super) why: String,
}

/// Something else is in place of an image that may be the newest. To go on from an older one would lose work that a moment's
/// look gives back.
#[derive(Debug, thiserror::Error)]
#[error(
    "image {id} of job {job} is newer than what the job could continue from, and {detail}. `rekindle list {job}` shows the \
    other images; `rekindle restore {job}/ID` continues from one of them. Check who can write to the store"
)]
pub(crate) struct Obstructed {
    job: JobName,
    id: ImageId,
    detail: String,
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
    let anew = || Start { from: StartPoint::Cold, lineage: new_lineage(), base: None, named: false };
    let Some(record) = folder.record()? else { return Ok(anew()) };
    if fresh {
        return Ok(anew());
    }
    if record.outcome == Outcome::Completed {
        let done = completed(folder, &record);
        if !is_same(&record.command, command) {
            return Err(Misuse(format!(
                "{done}, and this is another command: give it another name (--name), as each of several commands of one \
                 batch job needs it"
            ))
            .into());
        }
        return Err(Misuse(format!("{done}: use --fresh to run it again from the beginning, or another --name")).into());
    }
    let line = Line::new(record.lineage.clone(), record.base);
    let mut images = folder.copies()?;
    if !is_same(&record.command, command) {
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
    let begin = line.begin(images.iter().map(Candidate::of), cold);
    look_for_newer(folder, &images, &begin)?;
    let from = match begin {
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

/// Looks for images that are newer than the one to begin with, and that cannot be used because of what is in their folders. What
/// is marked as bad was told when it was marked.
fn look_for_newer(folder: &JobFolder, images: &[Image], begin: &Begin) -> Result<(), Obstructed> {
    let from = match begin {
        Begin::With(StartPoint::Image(id)) => Some(*id),
        _ => None,
    };
    for image in images.iter().filter(|image| Some(image.id) > from) {
        let State::Damaged { why } = &image.state else { continue };
        if why.kind == DamageKind::Unexpected {
            return Err(Obstructed { job: folder.name().clone(), id: image.id, detail: why.detail.clone() });
        }
        if let Some(from) = from {
            tracing::warn!("image {} is newer, but {why}. The job continues from image {from}", image.id);
        }
    }
    Ok(())
}

/// The image that `restore JOB` means: the newest good one that the same `run` would continue from. `newest` is the
/// newest good one of all: after a rewind, images that the job has left can have higher numbers.
pub(super) fn newest_of_line(folder: &JobFolder, newest: Image) -> anyhow::Result<Image> {
    let (job, known) = (folder.name(), folder.known()?);
    let Some(id) = folder.to_continue_from(&known).first().copied() else {
        return Err(Misuse(format!(
            "job {job} has no good image since it was last started from the beginning or went back to another image. \
            `rekindle restore {job}/{}` continues from the newest one before that",
            newest.id
        ))
        .into());
    };
    if id == newest.id {
        return Ok(newest);
    }
    tracing::info!(
        "restoring image {id}, the newest one that the job continues from. Image {} is newer, but a rewind or --fresh left \
        it behind: `rekindle restore {job}/{}` continues from that one",
        newest.id,
        newest.id
    );
    let image = known.into_iter().find(|known| known.id() == id).map(|known| known.best().clone());
    Ok(image.unwrap_or(newest))
}

/// The lineage and base of a run that begins with this image.
pub(super) fn line_of(folder: &JobFolder, image: &Image) -> anyhow::Result<(String, Option<ImageId>)> {
    let known = folder.known()?;
    let is_newest = |ids: &[ImageId]| ids.first() == Some(&image.id);
    let lineage = |image: &Image| image.manifest().map(|manifest| manifest.lineage.clone());
    match folder.record().ok().flatten() {
        // The present line goes on.
        Some(record) if is_newest(&folder.to_continue_from(&known)) => Ok((record.lineage, record.base)),
        _ => {
            let good: Vec<ImageId> = known.iter().filter(|known| known.best().is_good()).map(Known::id).collect();
            // Newer images are kept, but a later crash does not use them.
            Ok(match lineage(image).filter(|_| is_newest(&good)) {
                Some(lineage) => (lineage, None),
                None => (new_lineage(), Some(image.id)),
            })
        }
    }
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
        if !is_same(&record.command, command) && !folder.copies()?.is_empty() {
            return Err(Misuse(other_command(&record, folder.name())).into());
        }
    }
    Ok(Start { from: StartPoint::Cold, lineage, base: None, named: false })
}

/// Whether the command is the one of the last run. A restored image runs the command that was started then, whatever is
/// typed now.
fn is_same(recorded: &[String], command: &[OsString]) -> bool {
    words::text_of(command) == recorded
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

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;
    use std::time::Duration;

    use chrono::DateTime;
    use rekindle_store::{Access, Store};

    use super::*;

    fn id(number: u32) -> ImageId {
        ImageId::new(number, DateTime::UNIX_EPOCH)
    }

    /// A job with these images: their numbers and lineages.
    fn job(dir: &Path, images: &[(u32, &str)]) -> JobFolder {
        let store = Store::open(&dir.join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"train".parse().unwrap()).unwrap();
        for (number, lineage) in images {
            let mut manifest: Manifest = serde_json::from_str(rekindle_testing::MANIFEST).unwrap();
            manifest.id = id(*number);
            manifest.lineage = (*lineage).to_owned();
            manifest.parts.clear();
            let dir = folder.images_dir().join(manifest.id.to_string());
            std::fs::create_dir(&dir).unwrap();
            std::fs::write(dir.join("manifest.json"), manifest.to_bytes(folder.trust()).unwrap()).unwrap();
        }
        folder
    }

    fn record(folder: &JobFolder, lineage: &str, base: Option<u32>) {
        let record = JobRecord {
            command: vec!["train".into()],
            directory: "/".parse().unwrap(),
            lineage: lineage.into(),
            base: base.map(id),
            created: DateTime::UNIX_EPOCH,
            outcome: Outcome::Running,
            exit_code: None,
            uptime: Duration::ZERO,
            failures: 0,
            restores: 0,
        };
        folder.write_record(&folder.lock().unwrap(), &record).unwrap();
    }

    #[test]
    fn restore_takes_the_image_that_a_run_would_continue_from() {
        let dir = tempfile::tempdir().unwrap();
        let folder = job(dir.path(), &[(1, "first"), (3, "first"), (4, "first"), (5, "first")]);
        let newest = || newest_of_line(&folder, folder.find("latest").unwrap()).map(|image| image.id);
        assert_eq!(newest().unwrap(), id(5), "nothing is known about its line");
        record(&folder, "first", None);
        assert_eq!(newest().unwrap(), id(5));
        // The job went back to an older one.
        record(&folder, "second", Some(3));
        assert_eq!(newest().unwrap(), id(3));
        let chosen = choose(&folder, &["train".into()], false, ColdStart::Never).unwrap();
        assert_eq!(chosen.from, StartPoint::Image(id(3)));
        let line = |n: u32| line_of(&folder, &folder.find(&n.to_string()).unwrap()).unwrap();
        assert_eq!(line(3), (chosen.lineage, chosen.base));
        assert_eq!(line(5), ("first".to_owned(), None), "who names the newest of all goes back to its line");
        assert_eq!((line(4).1, line(4).0 == "first"), (Some(id(4)), false));
        // It was started from the beginning.
        record(&folder, "third", None);
        let error = newest().unwrap_err().to_string();
        assert!(error.contains(&format!("rekindle restore train/{}", id(5))), "{error}");
    }

    #[test]
    fn a_command_with_other_bytes_is_another_command() {
        let command = |word: &[u8]| [OsString::from("prog"), OsString::from_vec(word.to_vec())];
        let recorded = words::text_of(command(b"\xff"));
        assert!(is_same(&recorded, &command(b"\xff")));
        assert!(!is_same(&recorded, &command(b"\xfe")) && !is_same(&recorded, &command("\u{fffd}".as_bytes())));
    }
}
