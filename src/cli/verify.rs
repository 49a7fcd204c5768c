//! `rekindle verify`: is every byte what was written? An image in memory has no checksums before it is stored: of one that
//! is only there, the sizes.

use super::output::print_table;
use super::{Exit, Global, job_args};
use crate::store::{Image, JobFolder, Known, Place, Report, Store};

pub(super) fn verify(global: &Global, text: Option<&str>) -> anyhow::Result<Exit> {
    let store = global.open_store()?;
    let mut rows = Vec::new();
    for (folder, images) in chosen(&store, text)? {
        for image in images {
            let report = image.verify();
            // The next image took its place meanwhile: that is no damage.
            let replaced = || !folder.staged().iter().any(|other| other.id == image.id);
            if report.is_sound() || !image.is_staged() || !replaced() {
                rows.push((folder.name().to_string(), report));
            }
        }
    }
    let sound = rows.iter().all(|(_, report)| report.is_sound());
    let cells = rows.iter().map(|(job, report)| vec![job.clone(), report.image.to_string(), finding(report)]);
    let json: Vec<&Report> = rows.iter().map(|(_, report)| report).collect();
    print_table(global.format(), &["JOB", "IMAGE", "FINDING"], cells, &json)?;
    Ok(if sound { Exit::Success } else { Exit::Unsound })
}

fn chosen(store: &Store, text: Option<&str>) -> anyhow::Result<Vec<(JobFolder, Vec<Image>)>> {
    let folders = match text {
        None => store.jobs()?.iter().map(|name| store.job(name)).collect::<Result<Vec<_>, _>>()?,
        Some(text) => match job_args::job(store, text)? {
            Some(folder) => vec![folder],
            None => {
                let (folder, image) = job_args::image(store, text)?;
                return Ok(vec![(folder, vec![image])]);
            }
        },
    };
    let stored_or_only = |known: &Known| known.copy(Place::Stored).unwrap_or_else(|| known.best()).clone();
    let with_images = |folder: JobFolder| folder.known().map(|all| (folder, all.iter().map(stored_or_only).collect()));
    Ok(folders.into_iter().map(with_images).collect::<Result<_, _>>()?)
}

fn finding(report: &Report) -> String {
    if let Some(damage) = &report.manifest {
        return format!("damaged: {damage}");
    }
    let problems: Vec<String> = report.problems().map(ToString::to_string).collect();
    match (problems.is_empty(), report.place) {
        (false, _) => problems.join("; "),
        (true, Place::Stored) => format!("ok, {} files", report.parts.len()),
        (true, Place::Staged) => format!(
            "ok, the sizes of {} files in memory; there are no checksums before it is stored",
            report.parts.len()
        ),
    }
}
