//! Which images are removed, and why each is kept or removed: a pure function from facts to a plan.
//!
//! An image is kept if any rule keeps it, as in restic: it is one of the last N; it is the newest of its hour or day,
//! for the last N hours and days that have a good image, in UTC, so that neither a time zone nor daylight saving time
//! moves an image; it is younger than a time; it is pinned. Then the bounds of size apply, which override the rules:
//! bad images are removed first and then the others, the oldest first, and no more than necessary.
//!
//! Invariants:
//! - The newest good image is kept. While there is no good image, all are kept.
//! - The newest good image that is proven is kept until a newer one is proven: the job may be unable to continue from
//!   any of the newer ones.
//! - The newest good image that was rehearsed or restored is kept until a newer one was: that the others can be restored
//!   has not been shown. Where no rehearsal can run, no image has such evidence, and this keeps none.
//! - All three apply separately to the images of the current line: after a rewind, the images of the old line are newer.
//! - The image that will be proven next is kept until it is, unless there is no space: if images are taken faster than
//!   they are proven, none would ever be proven.
//! - No rule and no bound removes a pinned image, or a good one that is a part of a group image.
//! - An image that is being replicated or restored is kept until then, unless a new image has no space otherwise.
//! - Only an image whose manifest was read, and whose content is there, counts as good; an unreadable one is neither
//!   counted nor removed. Bad images, and those that lost content, are kept for a while, not counted, so that a wrong
//!   mark loses nothing at once.
//! - Newer means a higher number, whatever the clock said. Hours and days are those of the clock when the image was
//!   taken; if the clock was set back, images with a later time than now count as young.
//! - After a plan for [`Policy::max_total`] the remaining images are within it, or the plan says that this is
//!   impossible.
//!
//! [`admission`] applies the same rules before an image is written; [`survey`] collects the facts and executes a plan.

pub mod admission;
mod facts;
mod reason;
mod sizes;
pub mod survey;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::id::ImageId;
pub use facts::{FactKind, Facts, Line, Pin, Policy, Proof, Room, Use, Whole, await_proof};
pub(crate) use reason::KeepReason;
pub(crate) use reason::Note;
pub(crate) use reason::RemoveReason;
pub use reason::Verdict;
pub use sizes::{Gathering, Sizes};

/// The decision for each image, newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The decisions, one for each image.
    pub decisions: Vec<Decision>,
    /// Goals that cannot be reached.
    pub notes: Vec<Note>,
}

impl Plan {
    /// The images to be removed, oldest first, which is the order to remove them in.
    pub fn removals(&self) -> impl Iterator<Item = ImageId> {
        self.decisions.iter().rev().filter(|it| it.verdict.is_removal()).map(|it| it.id)
    }
}

/// The decision for an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The image.
    pub id: ImageId,
    /// The decision and its reason.
    pub verdict: Verdict,
}

/// Decides for each image. The order of `facts` does not matter.
#[must_use]
pub fn plan(facts: &[Facts], policy: &Policy, now: DateTime<Utc>, sizes: &Sizes, room: &Room) -> Plan {
    let mut plan = by_rules(facts, policy, now);
    let mut gone: Vec<ImageId> = plan.removals().collect();
    let mut order = expendable(facts, &plan);
    order.retain(|id| !facts.iter().any(|it| it.id == *id && is_needed_now(it)));
    if let Some(max) = policy.max_total {
        let more = first_that(&gone, &order, |gone| sizes.left(gone) <= max);
        // As near as possible: removing images always helps against a limit on their total size.
        gone.extend(more.as_deref().unwrap_or(&order));
        plan.remove(&gone, RemoveReason::MaxTotal(max));
        if more.is_none() {
            plan.notes.push(Note::MaxTotal { left: sizes.left(&gone), max });
        }
    }
    let short = room.short_of(0);
    if sizes.freed(&gone) < short {
        let order: Vec<ImageId> = order.iter().copied().filter(|id| !gone.contains(id)).collect();
        match first_that(&gone, &order, |gone| sizes.freed(gone) >= short) {
            Some(more) => plan.remove(&more, RemoveReason::MinFree(room.min_free)),
            // Other files may fill the file system. Images are not removed if that does not help.
            None => plan.notes.push(Note::MinFree {
                free: room.free,
                min_free: room.min_free,
                freed: sizes.freed(&[gone, order].concat()),
            }),
        }
    }
    plan
}

impl Plan {
    /// Changes the verdict of these from keep to remove.
    fn remove(&mut self, gone: &[ImageId], reason: RemoveReason) {
        for decision in self.decisions.iter_mut().filter(|it| gone.contains(&it.id) && !it.verdict.is_removal()) {
            decision.verdict = Verdict::Remove(reason);
        }
    }
}

/// The shortest beginning of `order` with which `enough` holds, together with `gone`; `None` if all are not enough.
fn first_that(gone: &[ImageId], order: &[ImageId], enough: impl Fn(&[ImageId]) -> bool) -> Option<Vec<ImageId>> {
    let mut all = gone.to_vec();
    if enough(&all) {
        return Some(Vec::new());
    }
    for (count, id) in (1..).zip(order) {
        all.push(*id);
        if enough(&all) {
            return order.get(..count).map(<[ImageId]>::to_vec);
        }
    }
    None
}

/// The images kept by rules that size limits may remove, in this order: bad ones before others, the oldest first;
/// last of all those being read.
fn expendable(facts: &[Facts], plan: &Plan) -> Vec<ImageId> {
    let firm = |reason: &KeepReason| match reason {
        KeepReason::NewestGood
        | KeepReason::NewestOfLine
        | KeepReason::NewestProven
        | KeepReason::NewestShown
        | KeepReason::Pinned
        | KeepReason::MaybePinned
        | KeepReason::PartOfGroup
        | KeepReason::NoGoodImage
        | KeepReason::Unknown => true,
        KeepReason::OneOfTheLast(_)
        | KeepReason::NewestOfHour
        | KeepReason::NewestOfDay
        | KeepReason::Within(_)
        | KeepReason::FromTheFuture
        | KeepReason::Awaited
        | KeepReason::Held
        | KeepReason::RecentBad(_) => false,
    };
    let is_expendable = |id: ImageId| {
        let decision = plan.decisions.iter().find(|it| it.id == id);
        matches!(decision.map(|it| &it.verdict), Some(Verdict::Keep(reasons)) if !reasons.iter().any(firm))
    };
    let mut order: Vec<&Facts> = facts.iter().filter(|it| is_expendable(it.id)).collect();
    order.sort_by_key(|it| (is_needed_now(it), it.kind != FactKind::Bad, it.id));
    order.into_iter().map(|it| it.id).collect()
}

/// Whether it becomes expendable soon, but is not yet.
fn is_needed_now(it: &Facts) -> bool {
    it.in_use == Use::Held || it.proof == Proof::Awaited
}

/// Applies the rules, without size limits.
fn by_rules(facts: &[Facts], policy: &Policy, now: DateTime<Utc>) -> Plan {
    let mut facts = facts.to_vec();
    facts.sort_by_key(|it| Reverse(it.id));
    let newest =
        |which: &dyn Fn(&Facts) -> bool| facts.iter().find(|it| it.kind == FactKind::Good && which(it)).map(|it| it.id);
    let is_proven = |it: &Facts| it.proof == Proof::Proven;
    let is_ours = |it: &Facts| it.line == Line::Ours;
    let is_shown = |it: &Facts| it.evidence.is_there();
    let of_all_and_ours = |which: &dyn Fn(&Facts) -> bool| [newest(which), newest(&|it| which(it) && is_ours(it))];
    let (ours, proven, shown) = (newest(&is_ours), of_all_and_ours(&is_proven), of_all_and_ours(&is_shown));
    let any_good = facts.iter().any(|it| it.kind == FactKind::Good);
    let mut rules = Rules::new(policy, now);
    let mut bad = 0_u32;
    let keep = policy.keep_last.max(1);
    let mut decide = |it: &Facts| {
        let (mut reasons, otherwise) = match it.kind {
            FactKind::Unknown => (vec![KeepReason::Unknown], None),
            FactKind::Good => (rules.keep(it.taken), Some(RemoveReason::NotKept(*policy))),
            FactKind::Bad | FactKind::Incomplete if !any_good => (vec![KeepReason::NoGoodImage], None),
            FactKind::Bad | FactKind::Incomplete => {
                bad = bad.saturating_add(1);
                let recent = if bad <= keep { vec![KeepReason::RecentBad(keep)] } else { Vec::new() };
                (recent, Some(RemoveReason::OlderBad(keep)))
            }
        };
        if !reasons.contains(&KeepReason::NewestGood) {
            reasons.extend((ours == Some(it.id)).then_some(KeepReason::NewestOfLine));
            reasons.extend(proven.contains(&Some(it.id)).then_some(KeepReason::NewestProven));
            reasons.extend(shown.contains(&Some(it.id)).then_some(KeepReason::NewestShown));
        }
        if it.kind == FactKind::Good && it.proof == Proof::Awaited {
            reasons.push(KeepReason::Awaited);
        }
        match it.pin {
            Pin::None => {}
            Pin::Pinned => reasons.push(KeepReason::Pinned),
            Pin::Unreadable => reasons.push(KeepReason::MaybePinned),
        }
        if it.kind == FactKind::Good && it.whole == Whole::Group {
            reasons.push(KeepReason::PartOfGroup);
        }
        if it.in_use == Use::Held {
            reasons.push(KeepReason::Held);
        }
        match otherwise.filter(|_| reasons.is_empty()) {
            Some(reason) => Verdict::Remove(reason),
            None => Verdict::Keep(reasons),
        }
    };
    let decisions = facts.iter().map(|it| Decision { id: it.id, verdict: decide(it) }).collect();
    Plan { decisions, notes: Vec::new() }
}

/// The rules for good images, which must be given newest first.
struct Rules<'p> {
    policy: &'p Policy,
    now: DateTime<Utc>,
    good: u32,
    hours: HashSet<i64>,
    days: HashSet<i64>,
}

impl<'p> Rules<'p> {
    fn new(policy: &'p Policy, now: DateTime<Utc>) -> Rules<'p> {
        Rules { policy, now, good: 0, hours: HashSet::new(), days: HashSet::new() }
    }

    /// Why the next image stays; empty if it does not.
    fn keep(&mut self, taken: DateTime<Utc>) -> Vec<KeepReason> {
        let Policy { keep_last, keep_hourly, keep_daily, keep_within, .. } = *self.policy;
        let keep_last = keep_last.max(1);
        self.good = self.good.saturating_add(1);
        let mut reasons = Vec::new();
        match self.good {
            1 => reasons.push(KeepReason::NewestGood),
            n if n <= keep_last => reasons.push(KeepReason::OneOfTheLast(keep_last)),
            _ => {}
        }
        if is_first_of(&mut self.hours, taken.timestamp().div_euclid(3600), keep_hourly) {
            reasons.push(KeepReason::NewestOfHour);
        }
        if is_first_of(&mut self.days, taken.timestamp().div_euclid(24 * 3600), keep_daily) {
            reasons.push(KeepReason::NewestOfDay);
        }
        if keep_within > Duration::ZERO {
            // Negative if the clock was set back.
            match self.now.signed_duration_since(taken).to_std() {
                Ok(age) if age <= keep_within => reasons.push(KeepReason::Within(keep_within)),
                Ok(_) => {}
                Err(_) => reasons.push(KeepReason::FromTheFuture),
            }
        }
        reasons
    }
}

/// Whether this time is new, while fewer than `most` were seen.
fn is_first_of(seen: &mut HashSet<i64>, time: i64, most: u32) -> bool {
    u32::try_from(seen.len()).is_ok_and(|count| count < most) && seen.insert(time)
}

#[cfg(test)]
mod tests;
