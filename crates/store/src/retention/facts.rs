//! The facts for a plan: the images, what must be kept, and the available space.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::evidence::Evidence;
use crate::id::ImageId;
use crate::image::{DamageKind, Image, State};
use crate::tag::Tags;

/// Facts about an image for a plan. Tags are not included: a tag is only a name, but a pin keeps an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The image.
    pub id: ImageId,
    /// When it was taken, by the clock at that time.
    pub taken: DateTime<Utc>,
    /// Its state.
    pub kind: FactKind,
    /// Whether it is pinned.
    pub pin: Pin,
    /// Whether it is being read.
    pub in_use: Use,
    /// Whether the job has shown that it can continue from it.
    pub proof: Proof,
    /// What has shown that it can be restored, under whatever CRIU, kernel and driver.
    pub evidence: Evidence,
    /// Whether it is on the job's current line.
    pub line: Line,
    /// Whether others need it.
    pub whole: Whole,
}

/// Whether an image is restored alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whole {
    /// It is.
    Itself,
    /// It is a part of a group image. What one machine knows is not enough to remove it: it may be needed with older
    /// parts of others. The group removes it.
    Group,
}

/// Whether an image is on the job's current line. After a rewind the images of the old line have higher numbers, but
/// are not used after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// It is, as far as is known.
    Ours,
    /// It is not.
    Other,
}

/// Whether the job has lived for `restart.min-uptime` after an image was taken or restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// It has not, as far as is known.
    None,
    /// It is the image that the present life will prove next.
    Awaited,
    /// It has lived that long.
    Proven,
}

/// Whether an image is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It is not, as far as is known.
    None,
    /// It is being replicated or restored.
    Held,
}

/// The state of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactKind {
    /// It can be used.
    Good,
    /// It is marked as bad, or its manifest is broken.
    Bad,
    /// Some of its content is in no pack: it cannot be restored, unless a later image stores that content again.
    Incomplete,
    /// Unknown: its manifest cannot be read, or a newer rekindle wrote it.
    Unknown,
}

/// Whether an image is pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// It is not pinned.
    None,
    /// It is pinned.
    Pinned,
    /// Its tags cannot be read: it may be pinned.
    Unreadable,
}

impl From<&Tags> for Pin {
    fn from(tags: &Tags) -> Pin {
        match (tags.unreadable(), tags.is_pinned()) {
            (Some(_), _) => Pin::Unreadable,
            (None, true) => Pin::Pinned,
            (None, false) => Pin::None,
        }
    }
}

/// Records which of these the present life will prove first. `waiting` are the images of its line, oldest first; some
/// may not exist any more. Without this, a job that takes images faster than they are proven would keep none
/// for long enough.
pub fn await_proof(facts: &mut [Facts], waiting: &[ImageId]) {
    let is_there = |id: &ImageId| facts.iter().position(|it| it.id == *id && it.kind == FactKind::Good);
    let first = waiting.iter().find_map(is_there).and_then(|at| facts.get_mut(at));
    if let Some(first) = first.filter(|it| it.proof == Proof::None) {
        first.proof = Proof::Awaited;
    }
}

/// Reads the tags again. Proofs, evidence and the job's line are not known from an image.
impl From<&Image> for Facts {
    fn from(image: &Image) -> Facts {
        let kind = match &image.state {
            State::Good(_) => FactKind::Good,
            State::Bad { .. } => FactKind::Bad,
            State::Damaged { why } => match why.kind {
                DamageKind::Broken => FactKind::Bad,
                DamageKind::Newer | DamageKind::Unreadable | DamageKind::Unexpected | DamageKind::Untrusted => {
                    FactKind::Unknown
                }
            },
        };
        Facts {
            id: image.id,
            taken: image.id.taken(),
            kind,
            pin: Pin::from(&image.tags()),
            in_use: Use::None,
            proof: Proof::None,
            evidence: Evidence::Taken,
            line: Line::Ours,
            whole: match image.manifest().and_then(|manifest| manifest.group.as_ref()) {
                Some(_) => Whole::Group,
                None => Whole::Itself,
            },
        }
    }
}

/// Rules for keeping images. An image is kept if any of them applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    /// Number of newest good images, and of newest bad ones. 0 counts as 1.
    pub keep_last: u32,
    /// Number of hours (UTC) with a good image for which the newest good image is kept.
    pub keep_hourly: u32,
    /// Number of days (UTC) with a good image for which the newest good image is kept.
    pub keep_daily: u32,
    /// Good images younger than this are kept. Zero keeps none.
    pub keep_within: Duration,
    /// Limit for the total size, which overrides the other rules.
    pub max_total: Option<u64>,
}

/// Space on the file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes free.
    pub free: u64,
    /// Bytes of unneeded content, which are freed without removing another image.
    pub pending: u64,
    /// Bytes that must stay free.
    pub min_free: u64,
}

impl Room {
    /// Bytes missing to write `need` more bytes.
    pub(super) fn short_of(&self, need: u64) -> u64 {
        need.saturating_add(self.min_free).saturating_sub(self.free.saturating_add(self.pending))
    }
}
