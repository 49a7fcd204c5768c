//! `rekindle verify`: is every byte what was written?

use super::output::print_table;
use super::{Exit, Global, job_args};
use crate::store::{Image, JobFolder, Report, Store};

pub(super) fn verify(global: &Global, text: Option<&str>) -> anyhow::Result<Exit> {
    let store = global.open_store()?;
    let mut rows = Vec::new();
    for (folder, images) in chosen(&store, text)? {
        rows.extend(images.iter().map(|image| (folder.name().to_string(), image.verify())));
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
    let with_images = |folder: JobFolder| folder.images().map(|images| (folder, images));
    Ok(folders.into_iter().map(with_images).collect::<Result<_, _>>()?)
}

fn finding(report: &Report) -> String {
    if let Some(damage) = &report.manifest {
        return format!("damaged: {damage}");
    }
    let problems: Vec<String> = report.problems().map(ToString::to_string).collect();
    if problems.is_empty() { format!("ok, {} files", report.parts.len()) } else { problems.join("; ") }
}
