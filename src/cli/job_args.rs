//! Resolves `JOB`, `JOB/ID`, `JOB/TAG` and `ID` to folders and images.

use super::Misuse;
use rekindle_store::{Image, JobFolder, JobName, LATEST, Store};

/// Finds the image that `text` names: the newest good one of a job, a certain one of a job, or one by its id alone.
pub(super) fn image(store: &Store, text: &str) -> anyhow::Result<(JobFolder, Image)> {
    if let Some((job, id)) = text.split_once('/') {
        let folder = store.job(&job.parse()?)?;
        let image = folder.find(id)?;
        return Ok((folder, image));
    }
    if let Some(folder) = job(store, text)? {
        let image = folder.find(LATEST)?;
        return Ok((folder, image));
    }
    let mut found = Vec::new();
    for name in store.jobs()? {
        let folder = store.job(&name)?;
        // Only complete ids and their beginnings: a bare number counts within one job only.
        let known = folder.known()?;
        let matching = known.iter().filter(|known| known.id().to_string().starts_with(text));
        found.extend(matching.map(|known| (folder.clone(), known.best().clone())));
    }
    match (found.pop(), found.is_empty()) {
        (Some(one), true) => Ok(one),
        (Some(_), false) => Err(Misuse(format!("{text:?} matches several images: use JOB/ID")).into()),
        (None, _) => {
            // It is not the name of a job either; that error lists the existing jobs.
            let name: JobName = text.parse()?;
            store.job(&name)?;
            Err(Misuse(format!("there is no job or image {text:?}")).into())
        }
    }
}

/// Whether the text means the newest good image of that job.
pub(super) fn means_newest(folder: &JobFolder, text: &str) -> bool {
    text == folder.name().as_str() || text.strip_prefix(folder.name().as_str()) == Some("/latest")
}

/// The folder of a job of that name, if there is one.
pub(super) fn job(store: &Store, text: &str) -> anyhow::Result<Option<JobFolder>> {
    let known = store.jobs()?;
    match text.parse::<JobName>() {
        Ok(name) if known.contains(&name) => Ok(Some(store.job(&name)?)),
        _ => Ok(None),
    }
}
