//! `rekindle mark --good`: removes marks from images, so that restarts use them again.
//!
//! A mark is the supervisor's guess about the cause of a failure. Needs no lock: the mark is a file that exists or not,
//! and a running supervisor reads it again whenever it chooses an image.

use serde::Serialize;

use super::find::Finder;
use super::output::{Format, print_json, print_text};
use super::{Exit, Global, Misuse, complete};
use rekindle_store::{BadMark, ImageId, JobName, State};

/// Which images.
#[derive(Debug, clap::Args)]
pub(crate) struct MarkArgs {
    /// Remove the bad mark, so that restarts use the images again
    #[arg(long, required = true)]
    good: bool,
    /// JOB/ID, JOB/TAG, JOB/-N or ID
    #[arg(required = true, value_name = "IMAGE", add = complete::images())]
    images: Vec<String>,
}

/// One image, and its former mark.
#[derive(Debug, Serialize)]
struct Row {
    job: JobName,
    image: ImageId,
    /// `None` if it had none.
    mark: Option<BadMark>,
}

pub(super) fn mark(global: &Global, args: &MarkArgs) -> anyhow::Result<Exit> {
    let finder = Finder::with_key(global)?;
    let mut rows = Vec::new();
    for text in &args.images {
        let (folder, image) = finder.image(text)?;
        if image.manifest().is_none() {
            return Err(Misuse(format!(
                "image {} has no mark to remove: its manifest is damaged (run `rekindle verify`)",
                image.id
            ))
            .into());
        }
        let mut taken = None;
        for mut copy in folder.copies()?.into_iter().filter(|copy| copy.id == image.id) {
            if let State::Bad { mark, .. } = &copy.state {
                taken = taken.or_else(|| Some(mark.clone()));
                copy.clear_bad()?;
            }
        }
        rows.push(Row { job: folder.name().clone(), image: image.id, mark: taken });
    }
    match global.format() {
        Format::Json => print_json(&rows)?,
        Format::Text => rows.iter().try_for_each(|row| print_text(&line(row)))?,
    }
    Ok(Exit::Success)
}

fn line(row: &Row) -> String {
    let Row { job, image, mark } = row;
    match mark {
        Some(mark) => format!("{job}/{image}: good again; the mark was \"{}: {}\"", mark.why, mark.detail),
        None => format!("{job}/{image}: not marked"),
    }
}
