//! The facts for a plan: the images, what must be kept, and the available space.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::id::ImageId;
use crate::image::{DamageKind, Image, State};
use crate::tags::Tags;

/// What a plan has to know of an image. Its tags are not among it: a tag is a name, a pin keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The image.
    pub id: ImageId,
    /// When it was taken, as the clock said then.
    pub taken: DateTime<Utc>,
    /// What is known of it.
    pub kind: FactKind,
    /// Whether somebody pinned it.
    pub pin: Pin,
    /// Whether it is just being read.
    pub in_use: Use,
    /// Whether the job has shown that it can continue from it.
    pub proof: Proof,
    /// Whether it is on the job's current line.
    pub line: Line,
}

/// Whether an image is of the line that the job is on. After a rewind the images that it left behind have higher numbers, and
/// a crash does not go back to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// It is, as far as is known.
    Ours,
    /// It is not.
    Other,
}

/// Whether the job has lived on for `restart.min-uptime` after an image was taken or restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// As far as is known it has not.
    None,
    /// It is the next to be proven by the present life.
    Awaited,
    /// It has.
    Proven,
}

/// Whether an image is just being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// As far as is known it is not.
    None,
    /// It is being replicated.
    Replicating,
}

/// What is known of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactKind {
    /// It can be used.
    Good,
    /// It is marked as bad, or its manifest is broken.
    Bad,
    /// Nothing is known: its manifest cannot be read, or a newer rekindle wrote it.
    Unknown,
}

/// Whether somebody pinned an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// Nobody did.
    None,
    /// Somebody did.
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

/// Records which of these the present life is to prove first: `waiting` are the images of its line, the oldest first,
/// and some of them may be gone. Without this, a job that takes images faster than they are proven would keep none for
/// long enough.
pub fn await_proof(facts: &mut [Facts], waiting: &[ImageId]) {
    let is_there = |id: &ImageId| facts.iter().position(|it| it.id == *id && it.kind == FactKind::Good);
    let first = waiting.iter().find_map(is_there).and_then(|at| facts.get_mut(at));
    if let Some(first) = first.filter(|it| it.proof == Proof::None) {
        first.proof = Proof::Awaited;
    }
}

/// Reads the tags again. An image does not know what is proven, and which line the job is on.
impl From<&Image> for Facts {
    fn from(image: &Image) -> Facts {
        let kind = match &image.state {
            State::Good(_) => FactKind::Good,
            State::Bad { .. } => FactKind::Bad,
            State::Damaged { why } => match why.kind {
                DamageKind::Broken => FactKind::Bad,
                DamageKind::Newer | DamageKind::Unreadable | DamageKind::Untrusted => FactKind::Unknown,
            },
        };
        Facts {
            id: image.id,
            taken: image.id.taken(),
            kind,
            pin: Pin::from(&image.tags()),
            in_use: Use::None,
            proof: Proof::None,
            line: Line::Ours,
        }
    }
}

/// What stays. An image stays that one of these keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    /// So many of the newest good images, and as many bad ones. 0 counts as 1.
    pub keep_last: u32,
    /// The newest good image of each of so many hours of UTC, of those with one.
    pub keep_hourly: u32,
    /// The newest good image of each of so many days of UTC, of those with one.
    pub keep_daily: u32,
    /// Good images that were taken so shortly before now, or after it. Zero keeps none.
    pub keep_within: Duration,
    /// Bytes that all may take, above what the others say.
    pub max_total: Option<u64>,
}

/// The room on the file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes free.
    pub free: u64,
    /// Bytes that nobody needs any more and that are freed without removing another image.
    pub pending: u64,
    /// Bytes that must stay free.
    pub min_free: u64,
}

impl Room {
    /// Bytes that are missing for `need` bytes more.
    pub(super) fn short_of(&self, need: u64) -> u64 {
        need.saturating_add(self.min_free).saturating_sub(self.free.saturating_add(self.pending))
    }
}
