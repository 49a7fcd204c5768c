//! What to say about a job that does not run: how its last run ended, and how to continue.

use super::Global;
use super::find::Finder;
use crate::published::Published;
use rekindle_base::units::moment;
use rekindle_store::{JobFolder, Known, Outcome};

/// The end of the last run, as "it was stopped at ...": for the middle of a sentence.
pub(super) fn how(folder: &JobFolder) -> anyhow::Result<String> {
    let Some(record) = folder.record()? else { return Ok("it has not run yet".to_owned()) };
    let last = Published::read(&folder.state_file()).ok().filter(|last| last.lineage == record.lineage);
    let at = last.map_or_else(String::new, |last| format!(" at {}", moment(last.since)));
    Ok(match record.outcome {
        // The file says when its last state began, not when it died.
        Outcome::Running => "its supervisor ended without a final snapshot (interrupted)".to_owned(),
        Outcome::Completed => format!("it completed{at}"),
        Outcome::Failed { .. } => format!("it was given up{at}"),
        Outcome::Stopped => format!("it was stopped{at}"),
    })
}

/// The command that continues it, and from where.
pub(super) fn next(folder: &JobFolder) -> anyhow::Result<String> {
    let name = folder.name();
    let outcome = folder.record()?.map(|record| record.outcome);
    let images = folder.known()?;
    let newest = images.iter().find(|known| known.best().is_good()).map(Known::id);
    Ok(match (outcome, newest) {
        (None, _) => "start it with `rekindle run`".to_owned(),
        (Some(Outcome::Completed), _) => {
            "`rekindle run --fresh` with the same command runs it again from the beginning".to_owned()
        }
        (_, Some(image)) => {
            format!("the same `rekindle run`, or `rekindle restore {name}`, continues it from image {image}")
        }
        (_, None) if images.is_empty() => "the same `rekindle run` starts it from the beginning".to_owned(),
        (_, None) => format!(
            "`rekindle list {name}` shows what is wrong with its images, and `rekindle run --fresh` with the same \
            command starts it from the beginning"
        ),
    })
}

/// Both, for a command that needs an image of a job without any.
pub(super) fn no_image(global: &Global, job: &str) -> Option<String> {
    let folder = Finder::new(global).ok()?.job(job).ok()?;
    let is_live = Published::live(&folder).ok()?.is_some();
    let name = folder.name();
    Some(match is_live {
        true => format!("job {name} is running and has no image yet: `rekindle snapshot {name}` takes one"),
        false => format!("job {name} has no image: {}. {}", how(&folder).ok()?, capital(&next(&folder).ok()?)),
    })
}

/// The text as the beginning of a sentence.
pub(super) fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
