//! `rekindle stop`: requests a stop, and waits for it.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::find::Finder;
use super::output::{Format, print_json, print_text};
use super::{Exit, Global, complete, control, progress};
use crate::control::client;
use crate::control::protocol::{self, Request};
use crate::published::Published;
use rekindle_store::{Image, ImageId, JobFolder, JobName, Outcome, Writer};

/// What to stop, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct StopArgs {
    /// The job
    #[arg(add = complete::running_jobs())]
    job: String,
    /// Stop at once, without a final snapshot and without waiting until the last image is stored
    #[arg(long)]
    now: bool,
    /// Do not wait until the supervisor has ended
    #[arg(long)]
    no_wait: bool,
}

/// How often to check whether it has ended.
const LOOK: Duration = Duration::from_millis(50);

/// How it ended.
#[derive(Debug, Serialize)]
struct Stopped<'a> {
    job: &'a JobName,
    /// completed, stopped, failed; nothing if the command did not wait.
    outcome: Option<&'static str>,
    /// The newest good image.
    image: Option<ImageId>,
    /// Whether that image is stored.
    stored: bool,
}

pub(super) fn stop(global: &Global, args: &StopArgs) -> anyhow::Result<Exit> {
    let folder = Finder::new(global)?.job(&args.job)?;
    let path = control::socket(&folder)?;
    let request = Request::Stop(protocol::Stop { now: args.now });
    match client::ask(&path, &request, Some(Instant::now() + control::PATIENCE)) {
        // It ended just now, by itself or because of another request.
        Ok(_) | Err(client::Error::Ended | client::Error::Gone(_)) => {}
        Err(error) => return Err(error.into()),
    }
    if !args.no_wait {
        progress::told("stopping", |tell| wait(&folder, tell))?;
    }
    let newest = folder.known()?.into_iter().map(|known| known.best().clone()).find(Image::is_good);
    let outcome = match folder.record()?.map(|record| record.outcome).filter(|_| !args.no_wait) {
        Some(Outcome::Completed) => Some("completed"),
        Some(Outcome::Failed { .. }) => Some("failed"),
        Some(Outcome::Stopped) => Some("stopped"),
        Some(Outcome::Running) => Some("interrupted"),
        None => None,
    };
    let stored = newest.as_ref().is_some_and(|image| folder.is_stored_besides(image));
    let newest = newest.map(|image| image.id);
    let name = folder.name();
    // An immediate stop does not wait for the store.
    let is_short_of_one = !args.now && is_short_of_one(outcome, newest, stored);
    match (global.format(), outcome) {
        (Format::Json, _) => print_json(&Stopped { job: name, outcome, image: newest, stored })?,
        (Format::Text, None) => print_text(&format!("job {name} is being stopped"))?,
        (Format::Text, Some(outcome)) => {
            let image = match newest {
                Some(image) if stored => format!("; image {image} is in the store"),
                Some(image) => format!(
                    "; image {image} is only in memory and is lost when the machine restarts: free space in the store \
                    and run the job again on this machine"
                ),
                None => "; it has no image".into(),
            };
            print_text(&format!("job {name} is over ({outcome}){}", if outcome == "completed" { "" } else { &image }))?;
        }
    }
    Ok(if is_short_of_one { Exit::OnlyInMemory } else { Exit::Success })
}

/// Whether the job needs its newest image, and it is not in the store. A full store has no room for the record of the
/// stop either, so that the run seems to be interrupted.
fn is_short_of_one(outcome: Option<&str>, newest: Option<ImageId>, stored: bool) -> bool {
    matches!(outcome, Some("stopped" | "interrupted")) && newest.is_some() && !stored
}

/// Waits until the job has no supervisor.
fn wait(folder: &JobFolder, tell: &dyn Fn(String)) -> anyhow::Result<()> {
    while folder.writer()? != Writer::Nobody {
        if let Ok(published) = Published::read(&folder.state_file()) {
            let moving = [(&published.persisting, "stored"), (&published.replicating, "in the replica")];
            let parts = moving.into_iter().filter_map(|(moving, what)| {
                moving.as_ref().map(|it| format!(", image {} is {} % {what}", it.image, it.percent()))
            });
            tell(format!("{}{}", published.state, parts.collect::<String>()));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_is_not_stored_is_told_though_the_stop_could_not_be_recorded() {
        let image = Some(ImageId::new(1, chrono::DateTime::UNIX_EPOCH));
        assert!(is_short_of_one(Some("stopped"), image, false) && is_short_of_one(Some("interrupted"), image, false));
        assert!(!is_short_of_one(Some("completed"), image, false) && !is_short_of_one(None, image, false));
        assert!(!is_short_of_one(Some("stopped"), image, true) && !is_short_of_one(Some("interrupted"), None, false));
    }
}
