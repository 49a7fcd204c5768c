//! Is there space in the store for the next image, and what must be removed first? Decides, and changes nothing.
//!
//! Images that no rule keeps are removed first, then bad images, then the others, the oldest first, and no more than
//! necessary. The newest good image, the newest proven one, the newest one that was rehearsed or restored, pinned and
//! unreadable ones are never removed; if that leaves too little space, nothing is removed at all.

use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use chrono::{DateTime, Utc};

use super::{Facts, Policy, Room, Sizes, by_rules, expendable, first_that};
use crate::id::ImageId;

/// The space that an image needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Bytes that it adds to the total size while it is kept.
    pub lasting: u64,
    /// Bytes that must be free to write it. More, if its files are written first and packed afterwards.
    pub at_first: u64,
}

impl From<u64> for Need {
    fn from(bytes: u64) -> Need {
        Need { lasting: bytes, at_first: bytes }
    }
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// There is space.
    Admit,
    /// There is space once these images (in this order) and unneeded content are removed.
    AfterRemoving(Vec<Removal>),
    /// There is not enough space.
    Refuse(Refusal),
}

/// An image to be removed for the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// The image.
    pub id: ImageId,
    pub(crate) why: Why,
}

/// Why an image is removed for the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// The total size would exceed its limit.
    MaxTotal,
    /// The file system is too full.
    MinFree,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Why::MaxTotal => "to free space for the next image (store.max-total-size)",
            Why::MinFree => "to free space for the next image (store.min-free)",
        })
    }
}

/// Why there is no space.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// On the file system.
    #[error("the image needs about {need}, and {path} has {free} free, and {keep} must stay free (store.min-free){freed}: free space there, or choose another store.directory", need = ByteSize::b(*need), free = ByteSize::b(*free), keep = ByteSize::b(*keep), path = path.display(), freed = would_free(*freed))]
    Disk {
        /// Bytes the image is likely to need.
        need: u64,
        /// Bytes free.
        free: u64,
        /// Bytes that must stay free.
        keep: u64,
        /// Bytes that would become free if all removable images were removed.
        freed: u64,
        /// The store.
        path: PathBuf,
    },
    /// Older images were removed, and the file system has not freed their space yet.
    #[error("the image needs about {need}, and {path} has {free} free, and {keep} must stay free (store.min-free); the space of removed images is not free yet, or is used by others: rekindle tries again with the next image", need = ByteSize::b(*need), free = ByteSize::b(*free), keep = ByteSize::b(*keep), path = path.display())]
    NotYetFree {
        /// Bytes the image is likely to need.
        need: u64,
        /// Bytes free.
        free: u64,
        /// Bytes that must stay free.
        keep: u64,
        /// The store.
        path: PathBuf,
    },
    /// Below the limit for the total size.
    #[error("the image needs about {need}, and the images that cannot be removed take {stay} (the newest good one, the newest proven one, the newest that was rehearsed or restored, pinned and unreadable ones), more than store.max-total-size ({max}) together: raise it to {enough} or more, or remove pins with `rekindle pin --remove`", need = ByteSize::b(*need), stay = ByteSize::b(*stay), max = ByteSize::b(*max), enough = ByteSize::b(need.saturating_add(*stay)))]
    MaxTotal {
        /// Bytes the image is likely to need.
        need: u64,
        /// Bytes of the images that must stay.
        stay: u64,
        /// The limit for all images.
        max: u64,
    },
}

fn would_free(bytes: u64) -> String {
    match bytes {
        0 => ", and no image may be removed for it".to_owned(),
        bytes => format!(", and removing every image that may be removed would free only {}", ByteSize::b(bytes)),
    }
}

/// The bytes that the next image will probably add to the store: `whole` if images share nothing; else what the last
/// one added plus a quarter, because images differ.
#[must_use]
pub(crate) fn predict(whole: u64, last_added: Option<u64>) -> u64 {
    last_added.map_or(whole, |last| last.saturating_add(last / 4).min(whole))
}

/// Checks whether one more image fits. `path` is the store, for messages.
#[must_use]
pub fn admit(
    need: impl Into<Need>,
    facts: &[Facts],
    policy: &Policy,
    now: DateTime<Utc>,
    sizes: &Sizes,
    room: &Room,
    path: &Path,
) -> Admission {
    let Need { lasting, at_first } = need.into();
    let plan = by_rules(facts, policy, now);
    let order: Vec<ImageId> = plan.removals().chain(expendable(facts, &plan)).collect();
    let within = |gone: &[ImageId]| policy.max_total.is_none_or(|max| sizes.left(gone).saturating_add(lasting) <= max);
    let short = room.short_of(at_first);
    let Some(for_total) = first_that(&[], &order, within) else {
        let max = policy.max_total.unwrap_or(u64::MAX);
        return Admission::Refuse(Refusal::MaxTotal { need: lasting, stay: sizes.left(&order), max });
    };
    let Some(for_disk) = first_that(&[], &order, |gone| sizes.freed(gone) >= short) else {
        let Room { free, min_free: keep, .. } = *room;
        let freed = sizes.freed(&order);
        return Admission::Refuse(Refusal::Disk { need: at_first, free, keep, freed, path: path.to_owned() });
    };
    // Both are beginnings of the same order.
    let removal = |(at, id): (usize, &ImageId)| Removal {
        id: *id,
        why: if at < for_total.len() { Why::MaxTotal } else { Why::MinFree },
    };
    let count = for_total.len().max(for_disk.len());
    let removals: Vec<Removal> = order.iter().enumerate().take(count).map(removal).collect();
    let fits_now = at_first.saturating_add(room.min_free) <= room.free;
    if removals.is_empty() && fits_now { Admission::Admit } else { Admission::AfterRemoving(removals) }
}
#[cfg(test)]
mod tests;
