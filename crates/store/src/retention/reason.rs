//! Why an image is kept or removed, in words.

use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;

use super::facts::Policy;

/// Keep or remove. Displayed, it is the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Kept, for at least one reason.
    Keep(Vec<KeepReason>),
    /// Removed.
    Remove(RemoveReason),
}

impl Verdict {
    /// Whether the image is removed.
    #[must_use]
    pub(crate) fn is_removal(&self) -> bool {
        matches!(self, Verdict::Remove(_))
    }
}

/// Why an image is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepReason {
    /// The image that a restart would use.
    NewestGood,
    /// The newest good image of the job's line, from which newer images were abandoned.
    NewestOfLine,
    /// The newest proven image.
    NewestProven,
    /// The newest image that was rehearsed or restored.
    NewestShown,
    /// The image that will be proven next.
    Awaited,
    /// One of this many good images.
    OneOfTheLast(u32),
    /// The newest good image of its hour, and the hour counts.
    NewestOfHour,
    /// The newest good image of its day, and the day counts.
    NewestOfDay,
    /// Younger than this.
    Within(Duration),
    /// Its time is in the future: the clock was set back.
    FromTheFuture,
    /// It is pinned.
    Pinned,
    /// Its tags cannot be read: it may be pinned.
    MaybePinned,
    /// It is a part of a group image.
    PartOfGroup,
    /// It is being replicated or restored.
    Held,
    /// Bad, but one of this many; the mark may be wrong.
    RecentBad(u32),
    /// There is no good image: this may be the only usable one.
    NoGoodImage,
    /// Nothing is known about it.
    Unknown,
}

/// Why an image is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoveReason {
    /// No rule keeps it.
    NotKept(Policy),
    /// There are this many newer bad images.
    OlderBad(u32),
    /// The total size would exceed this.
    MaxTotal(u64),
    /// The file system has less than this free.
    MinFree(u64),
}

/// A goal that a plan cannot reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Note {
    /// The images that must stay exceed the limit.
    MaxTotal {
        /// Bytes of the remaining images.
        left: u64,
        max: u64,
    },
    /// Removing all removable images would not free enough space, so none is removed for that.
    MinFree {
        /// Bytes free.
        free: u64,
        /// Bytes that must be free.
        min_free: u64,
        /// Bytes that would become free.
        freed: u64,
    },
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeepReason::NewestGood => f.write_str("newest good"),
            KeepReason::NewestOfLine => f.write_str("newest since the rewind"),
            KeepReason::Awaited => f.write_str("next to become proven"),
            KeepReason::NewestProven => f.write_str("newest proven"),
            KeepReason::NewestShown => f.write_str("newest that was rehearsed or restored"),
            KeepReason::OneOfTheLast(n) => write!(f, "one of the last {n}"),
            KeepReason::NewestOfHour => f.write_str("newest of its hour"),
            KeepReason::NewestOfDay => f.write_str("newest of its day"),
            KeepReason::Within(age) => write!(f, "younger than {}", humantime::format_duration(*age)),
            KeepReason::FromTheFuture => f.write_str("taken later than now"),
            KeepReason::Pinned => f.write_str("pinned"),
            KeepReason::MaybePinned => f.write_str("tags.json cannot be read, so it counts as pinned"),
            KeepReason::PartOfGroup => f.write_str("part of a group image: the group removes it"),
            KeepReason::Held => f.write_str("being replicated or restored"),
            KeepReason::RecentBad(n) => write!(f, "bad, one of the last {n} bad ones"),
            KeepReason::NoGoodImage => f.write_str("there is no good image"),
            KeepReason::Unknown => f.write_str("cannot be read, so it is left alone"),
        }
    }
}

impl fmt::Display for RemoveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoveReason::NotKept(policy) => not_kept(policy, f),
            RemoveReason::OlderBad(n) => write!(f, "bad, older than the last {n} bad ones"),
            RemoveReason::MaxTotal(max) => {
                write!(f, "beyond store.max-total-size ({})", ByteSize::b(*max))
            }
            RemoveReason::MinFree(keep) => {
                write!(f, "the file system must have {} free (store.min-free)", ByteSize::b(*keep))
            }
        }
    }
}

fn not_kept(policy: &Policy, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "older than the last {}", policy.keep_last.max(1))?;
    match (policy.keep_hourly, policy.keep_daily) {
        (0, 0) => {}
        (hours, 0) => write!(f, ", not the newest in any of the last {hours} hours")?,
        (0, days) => write!(f, ", not the newest in any of the last {days} days")?,
        (hours, days) => write!(f, ", not the newest in any of the last {hours} hours or {days} days")?,
    }
    if policy.keep_within > Duration::ZERO {
        write!(f, ", not younger than {}", humantime::format_duration(policy.keep_within))?;
    }
    Ok(())
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Keep(reasons) => f.pad(&reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
            Verdict::Remove(reason) => f.pad(&reason.to_string()),
        }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::MaxTotal { left, max } => write!(
                f,
                "the images that cannot be removed (the newest good one, the newest proven one, the newest that was rehearsed or restored, pinned and unreadable ones) take {}, more than \
                 store.max-total-size ({}): raise it, or remove pins with `rekindle pin --remove`",
                ByteSize::b(*left),
                ByteSize::b(*max)
            ),
            Note::MinFree { free, min_free, freed } => write!(
                f,
                "the file system has {} free instead of {} (store.min-free), and removing every image that may be removed would free \
                 only {}, so none is removed: free space there",
                ByteSize::b(*free),
                ByteSize::b(*min_free),
                ByteSize::b(*freed)
            ),
        }
    }
}
