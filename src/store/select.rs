//! Which image does a text mean: `latest`, `42`, `000042-20261120T132105Z` or the begin of that.

use super::error::{Error, Result};
use super::id::{ImageId, JobName};
use super::image::Image;

/// The text for the newest good image.
pub const LATEST: &str = "latest";

/// Chooses among `images`, which are sorted newest first.
pub(super) fn select(job: &JobName, images: Vec<Image>, wanted: &str) -> Result<Image> {
    let known = |images: &[Image]| images.iter().map(|image| image.id).collect::<Vec<_>>();
    if wanted == LATEST {
        let all = known(&images);
        let good = images.into_iter().find(Image::is_good);
        return good.ok_or_else(|| Error::NoGoodImage { job: job.clone(), known: all });
    }
    let ids = known(&images);
    let mut matching = matches(&ids, wanted);
    let Some(id) = matching.pop() else {
        return Err(Error::UnknownImage { job: job.clone(), wanted: wanted.to_owned(), known: ids });
    };
    if !matching.is_empty() {
        matching.push(id);
        return Err(Error::AmbiguousImage { job: job.clone(), wanted: wanted.to_owned(), matching });
    }
    let found = images.into_iter().find(|image| image.id == id);
    found.ok_or_else(|| Error::UnknownImage { job: job.clone(), wanted: wanted.to_owned(), known: ids })
}

fn matches(ids: &[ImageId], wanted: &str) -> Vec<ImageId> {
    // "42" is a number; "00004" is the begin of 000040 to 000049.
    if !wanted.starts_with('0')
        && let Ok(number) = wanted.parse::<u32>()
    {
        let same: Vec<_> = ids.iter().copied().filter(|id| id.sequence() == number).collect();
        if !same.is_empty() {
            return same;
        }
    }
    if wanted.is_empty() {
        return Vec::new();
    }
    ids.iter().copied().filter(|id| id.to_string().starts_with(wanted)).collect()
}
