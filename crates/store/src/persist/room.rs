//! Stores an image, and makes room for it.
//!
//! How much an image adds is a guess from what the one before it added. One that adds much more fills the disk although
//! room was made. Then more is known: how much was written for the part of the image that is done, and whether a quota
//! allows less than the file system has free. With that, room is made once more, by the same rules. The same happens
//! before it takes space that must stay free.

use std::io;

use super::{Error, Packing, Progress, Reserve, persist_within};
use crate::folder::JobFolder;
use crate::image::Image;
use crate::lock::WriterLock;
use crate::retention::admission::predict;
use crate::retention::survey::{self, Limits, NoRoom, Seen, Written};

/// Why an image could not be stored. It is still in its old place.
#[derive(Debug, thiserror::Error)]
pub enum Unstored {
    /// There is no room for it.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// It could not be packed.
    #[error(transparent)]
    Persist(#[from] Error),
}

/// How often it is tried at once. Each attempt knows more, so the second one is enough unless others use the disk, too.
const ATTEMPTS: u32 = 3;
/// What the files of an image need beside its content, as one part in so many, and at least so many bytes.
const BESIDE: u64 = 64;
const BESIDE_AT_LEAST: u64 = 1 << 20;

/// What an image adds, if the rest of it adds as much as what is done has added. The image can contain holes, and content
/// that is there already: these are done, and add nothing. None if nothing is done.
fn in_all(written: u64, (done, total): (u64, u64)) -> Option<u64> {
    let all = u128::from(written) * u128::from(total.max(done));
    Some(u64::try_from(all.checked_div(done.into())?).unwrap_or(u64::MAX))
}

/// Makes room for a staged image, removing older ones if necessary, and packs it.
///
/// # Errors
/// When there is no room, or as [`persist`](fn@super::persist).
pub fn store(
    image: &Image,
    folder: &JobFolder,
    lock: &WriterLock,
    limits: &Limits,
    packing: &Packing,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Image, Unstored> {
    // Holes take no space.
    let whole = image.data().unwrap_or_else(|_| image.manifest().map_or(0, |manifest| manifest.bytes));
    survey::make_room(folder, lock, limits, whole, Written::Packed)?;
    for _ in 1..ATTEMPTS {
        let free = survey::free_space(folder.dir()).map_err(NoRoom::from)?;
        let predicted = predicted(image, folder)?;
        let error = match attempt(image, folder, lock, limits, packing, predicted, progress, cancelled) {
            Err(error) if error.is_full() => error,
            done => return Ok(done?),
        };
        let is_limited = error.kind() == Some(io::ErrorKind::QuotaExceeded);
        let is_reached = matches!(error, Error::MinFree { .. });
        // There was room for what was predicted, and less was written: others have used the disk.
        let expected = if is_reached && progress.written() < predicted {
            progress.written()
        } else {
            in_all(progress.written(), progress.bytes()).unwrap_or(whole).max(progress.written())
        };
        // On a full disk all that was free and could be used was not enough, unless others filled it. What must stay free
        // is soon reached by others: then only what was written here counts.
        let expected =
            if is_limited || is_reached { expected } else { expected.max(free.saturating_sub(limits.min_free)) };
        let least = expected.min(whole);
        let least = least.saturating_add(least / BESIDE).saturating_add(BESIDE_AT_LEAST);
        tracing::info!("the store is full: image {} needs more than expected", image.id);
        match survey::make_room_again(folder, lock, limits, whole, &Seen { least, is_limited }) {
            // What the file system has free explains nothing.
            Err(NoRoom::Refused(_) | NoRoom::Stuck { .. }) if is_limited => return Err(error.into()),
            made => made?,
        };
    }
    Ok(attempt(image, folder, lock, limits, packing, predicted(image, folder)?, progress, cancelled)?)
}

/// What the image probably adds.
fn predicted(image: &Image, folder: &JobFolder) -> Result<u64, Error> {
    let images = folder.images()?;
    let last = images.iter().filter_map(Image::manifest).find_map(|manifest| manifest.chunks.as_ref());
    let whole = image.manifest().map_or(0, |manifest| manifest.bytes);
    Ok(predict(whole, last.map(|chunks| chunks.stored)))
}

/// Packs the image into what may be used. Second copies get what the image probably does not need.
#[expect(clippy::too_many_arguments, reason = "one more than for all of it")]
fn attempt(
    image: &Image,
    folder: &JobFolder,
    lock: &WriterLock,
    limits: &Limits,
    packing: &Packing,
    predicted: u64,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Image, Error> {
    let packs = folder.packs_dir();
    let needed = limits.min_free.saturating_add(predicted).saturating_add(BESIDE_AT_LEAST);
    let spare = survey::free_space(&packs)?.saturating_sub(needed);
    let reserve = Reserve::new(Some(packs), limits.min_free, spare);
    persist_within(image, folder, lock, packing, reserve, progress, cancelled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_image_adds_follows_from_what_it_has_added() {
        assert_eq!([in_all(20, (250, 500)), in_all(20, (20, 40)), in_all(7, (9, 0))], [Some(40), Some(40), Some(7)]);
        assert_eq!([in_all(0, (0, 40)), in_all(u64::MAX, (1, 3))], [None, Some(u64::MAX)]);
    }
}
