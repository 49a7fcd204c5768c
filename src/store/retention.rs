//! Which images go, and why each stays or goes: a pure function from facts to a plan.
//!
//! Invariants: the newest good image stays. While there is no good image, all stay. Only an image whose manifest was
//! read counts as good; one of which nothing is known is neither counted nor removed. Bad images stay for a while,
//! not counted, so that a wrong mark loses nothing at once.

use std::cmp::Reverse;
use std::fmt;

use super::id::ImageId;
use super::image::{DamageKind, Image, State};

/// What a plan has to know of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Which image.
    pub id: ImageId,
    /// What is known of it.
    pub kind: FactKind,
}

/// What is known of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactKind {
    /// It can be used.
    Good,
    /// It is marked as bad, or its manifest is broken.
    Bad,
    /// Nothing is known: its manifest can not be read, or a newer rekindle wrote it.
    Unknown,
}

impl From<&Image> for Facts {
    fn from(image: &Image) -> Facts {
        let kind = match &image.state {
            State::Good(_) => FactKind::Good,
            State::Bad { .. } => FactKind::Bad,
            State::Damaged { why } => match why.kind {
                DamageKind::Broken => FactKind::Bad,
                DamageKind::Newer | DamageKind::Unreadable => FactKind::Unknown,
            },
        };
        Facts { id: image.id, kind }
    }
}

/// How many stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// So many good images stay, and as many bad ones. 0 counts as 1.
    pub keep_last: u32,
}

/// What happens to each image, newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// One for each image.
    pub decisions: Vec<Decision>,
}

impl Plan {
    /// Those that go, oldest first: the order to remove them in.
    pub fn removals(&self) -> impl Iterator<Item = ImageId> {
        self.decisions.iter().rev().filter(|it| matches!(it.verdict, Verdict::Remove(_))).map(|it| it.id)
    }
}

/// What happens to an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Which image.
    pub id: ImageId,
    /// What happens, and why.
    pub verdict: Verdict,
}

/// Stay or go. Displayed, it is the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It stays.
    Keep(KeepReason),
    /// It goes.
    Remove(RemoveReason),
}

/// Why an image stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepReason {
    /// The one that a restart would take.
    NewestGood,
    /// One of so many good ones.
    OneOfTheLast(u32),
    /// Bad, but one of so many; the mark may be wrong.
    RecentBad(u32),
    /// There is no good one: this may be all that is left.
    NoGoodImage,
    /// Nothing is known of it.
    Unknown,
}

/// Why an image goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoveReason {
    /// There are so many newer good ones.
    OlderThanTheLast(u32),
    /// There are so many newer bad ones.
    OlderBad(u32),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Verdict::Keep(KeepReason::NewestGood) => "newest good",
            Verdict::Keep(KeepReason::OneOfTheLast(n)) => &format!("one of the last {n}"),
            Verdict::Keep(KeepReason::RecentBad(n)) => &format!("bad, one of the last {n} bad ones"),
            Verdict::Keep(KeepReason::NoGoodImage) => "there is no good image",
            Verdict::Keep(KeepReason::Unknown) => "can not be read here, so it is not touched",
            Verdict::Remove(RemoveReason::OlderThanTheLast(n)) => &format!("older than the last {n}"),
            Verdict::Remove(RemoveReason::OlderBad(n)) => &format!("bad, older than the last {n} bad ones"),
        };
        f.pad(text)
    }
}

/// Decides for each image. The order of `facts` does not matter.
#[must_use]
pub fn plan(facts: &[Facts], policy: &Policy) -> Plan {
    let keep = policy.keep_last.max(1);
    let mut facts = facts.to_vec();
    facts.sort_by_key(|it| Reverse(it.id));
    let any_good = facts.iter().any(|it| it.kind == FactKind::Good);
    let (mut good, mut bad) = (0_u32, 0_u32);
    let mut decide = |kind| match kind {
        FactKind::Unknown => Verdict::Keep(KeepReason::Unknown),
        FactKind::Good => {
            good = good.saturating_add(1);
            match good {
                1 => Verdict::Keep(KeepReason::NewestGood),
                n if n <= keep => Verdict::Keep(KeepReason::OneOfTheLast(keep)),
                _ => Verdict::Remove(RemoveReason::OlderThanTheLast(keep)),
            }
        }
        FactKind::Bad if !any_good => Verdict::Keep(KeepReason::NoGoodImage),
        FactKind::Bad => {
            bad = bad.saturating_add(1);
            if bad <= keep {
                Verdict::Keep(KeepReason::RecentBad(keep))
            } else {
                Verdict::Remove(RemoveReason::OlderBad(keep))
            }
        }
    };
    Plan { decisions: facts.iter().map(|it| Decision { id: it.id, verdict: decide(it.kind) }).collect() }
}

#[cfg(test)]
mod tests;
