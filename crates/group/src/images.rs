//! Group images: which are whole, which one the job goes back to, and which are kept.

use std::collections::BTreeSet;

use crate::documents::{
    End, Goal, GroupImage, Left, Part, Plan, Progress, Replica, Replicated, StartFrom, Stored, Versioned, View,
};
use crate::events::Write;
use crate::ids::{Number, Rank};
use crate::options::Options;
use crate::reasons::{Failure, Missing};

/// A group image with this many points against it is passed over.
pub(crate) const PASSED_OVER: u32 = 4;

/// The members that cannot restore their parts.
pub(crate) fn lacking(view: &View, image: &GroupImage) -> impl Iterator<Item = Rank> {
    let has = |rank: &Rank, part: &Part| {
        let parts = view.members.get(rank).map(|report| &report.parts);
        parts.is_some_and(|parts| parts.values().any(|progress| progress.part == *part))
    };
    image.parts.iter().filter(move |(rank, part)| !has(rank, part)).map(|(rank, _)| *rank)
}

/// Whether the present members can restore all parts.
fn is_there(view: &View, image: &GroupImage) -> bool {
    lacking(view, image).next().is_none()
}

/// Group images before this one were abandoned by a start from the beginning.
pub(crate) fn floor(view: &View, plan: &Plan) -> Number {
    let told = view.members.values().map(|report| report.floor).max().unwrap_or_default();
    told.max(plan.floor)
}

/// Whether a restart may use this group image: no rewind and no start from the beginning has abandoned it.
fn is_on_the_line(view: &View, plan: &Plan, number: Number) -> bool {
    number >= floor(view, plan) && !plan.left.iter().any(|left| left.has(number))
}

/// What rewinds have abandoned, as the members remember it: the coordinator has lost the plan that said so. If they remember
/// several plans, nothing is sure: numbers may have begun again in between.
pub(crate) fn remembered(view: &View) -> Option<&Vec<Left>> {
    let known = || view.members.values().filter_map(|report| report.rewound.as_ref());
    let origin = known().next()?.origin;
    let is_one = known().all(|rewound| rewound.origin == origin);
    // The newest: the numbers of a later rewind are higher.
    let newest = known().max_by_key(|rewound| rewound.left.last().map(|left| left.before));
    newest.filter(|_| is_one).map(|rewound| &rewound.left)
}

/// A member's part of a group image, if it has exactly this one.
fn part_of<'a>(view: &'a View, number: Number, rank: Rank, part: &Part) -> Option<&'a Progress> {
    view.members.get(&rank)?.parts.get(&number).filter(|progress| progress.part == *part)
}

/// Whether no member has to fetch its part.
pub(crate) fn is_here(view: &View, number: Number) -> bool {
    away(view, number).next().is_none()
}

/// The members whose part is only in the replica.
fn away(view: &View, number: Number) -> impl Iterator<Item = Rank> {
    let is_away = move |(rank, part): &(&Rank, &Part)| {
        part_of(view, number, **rank, part).is_some_and(|progress| progress.replicated == Replicated::Only)
    };
    let parts = view.images.get(&number).into_iter().flat_map(|image| &image.value.parts);
    parts.filter(is_away).map(|(rank, _)| *rank)
}

/// The group image that is fetched from the replica before the job starts, and the members that do not have their parts
/// yet.
#[must_use]
pub fn fetching(view: &View) -> Option<(Number, Vec<Rank>)> {
    let plan = &view.plan.as_ref()?.value;
    if !matches!(plan.goal, Goal::Gather { .. }) {
        return None;
    }
    let Ok(StartFrom::Image(number)) = choose(view, plan) else { return None };
    let away: Vec<Rank> = away(view, number).collect();
    (!away.is_empty()).then_some((number, away))
}

/// The newest group image that is committed and that a restart may use.
#[must_use]
pub fn newest_committed(view: &View) -> Option<Number> {
    let plan = &view.plan.as_ref()?.value;
    let mut committed = view.images.iter().rev().filter(|(_, image)| image.value.committed);
    committed.find(|(number, _)| is_on_the_line(view, plan, **number)).map(|(number, _)| *number)
}

/// The newest group image that is whole in the replica and that a restart may use, as far as it is recorded.
#[must_use]
pub fn whole_in_replica(view: &View) -> Option<Number> {
    let plan = &view.plan.as_ref()?.value;
    let mut whole = view.images.iter().rev().filter(|(_, image)| image.value.replica == Replica::Whole);
    whole.find(|(number, _)| is_on_the_line(view, plan, **number)).map(|(number, _)| *number)
}

/// The next change of what is in the replica, or is to be there. One group image at a time is wanted: the newest that was
/// committed when the one before was whole.
pub(crate) fn replicate(view: &View, plan: &Plan, options: &Options) -> Option<Write> {
    if !options.replicates {
        return None;
    }
    let record = |number: Number, image: &Versioned<GroupImage>, replica| {
        let was = Some(image.revision);
        Some(Write::Record { number, image: GroupImage { replica, ..image.value.clone() }, was })
    };
    let is_sent = |number: Number, (rank, part): (&Rank, &Part)| {
        let progress = part_of(view, number, *rank, part);
        progress.is_some_and(|it| matches!(it.replicated, Replicated::Yes | Replicated::Only))
    };
    // A member that is lost may join again.
    let cannot_be_sent = |number: Number, (rank, part): (&Rank, &Part)| {
        let failed = |it: &Progress| it.replicated == Replicated::Failed;
        view.members.contains_key(rank) && part_of(view, number, *rank, part).is_none_or(failed)
    };
    let committed = || view.images.iter().rev().filter(|(_, image)| image.value.committed);
    // It was whole, and was removed as older than another one that no longer counts, because of a rewind.
    let is_gone = |number: Number, (rank, part): (&Rank, &Part)| {
        part_of(view, number, *rank, part).is_some_and(|it| it.replicated == Replicated::No)
    };
    if let Some((number, image)) = committed().find(|(number, _)| is_on_the_line(view, plan, **number))
        && image.value.replica == Replica::Whole
        && image.value.parts.iter().any(|part| is_gone(*number, part))
    {
        return record(*number, image, Replica::No);
    }
    for (number, image) in committed().take_while(|(_, image)| image.value.replica != Replica::Whole) {
        if image.value.parts.iter().all(|part| is_sent(*number, part)) {
            return record(*number, image, Replica::Whole);
        }
    }
    // What is older than the whole one is removed from the replica again.
    let whole = whole_in_replica(view);
    let is_hopeless = |number: Number, image: &GroupImage| {
        !is_on_the_line(view, plan, number)
            || whole.is_some_and(|whole| number < whole)
            || image.parts.iter().any(|part| cannot_be_sent(number, part))
    };
    if let Some((number, image)) = committed().find(|(_, image)| image.value.replica == Replica::Wanted) {
        return is_hopeless(*number, &image.value).then(|| record(*number, image, Replica::No)).flatten();
    }
    let (number, image) = committed().find(|(number, _)| is_on_the_line(view, plan, **number))?;
    let is_new = image.value.replica == Replica::No && is_there(view, &image.value);
    (is_new && !is_hopeless(*number, &image.value)).then(|| record(*number, image, Replica::Wanted)).flatten()
}

/// The group images that a restart may use and all present members can restore, the newest first.
#[must_use]
pub fn usable(view: &View) -> Vec<Number> {
    let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return Vec::new() };
    let all = view.images.iter().rev().filter(|(number, _)| is_on_the_line(view, plan, **number));
    all.filter(|(_, image)| is_there(view, &image.value)).map(|(number, _)| *number).collect()
}

/// Whether a part of this group image is lost, and a newer one is whole: a restart uses it in no case.
pub(crate) fn is_lost(view: &View, number: Number, lacks: impl FnOnce() -> bool) -> bool {
    let newest = usable(view).first().copied();
    newest.is_some_and(|newest| number < newest) && lacks()
}

/// Those of [`usable`] that a restart would not pass over for their failures.
#[must_use]
pub fn trusted(view: &View) -> Vec<Number> {
    let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return Vec::new() };
    usable(view).into_iter().filter(|number| !is_passed_over(plan, *number)).collect()
}

fn is_passed_over(plan: &Plan, number: Number) -> bool {
    plan.failures.get(&number).is_some_and(|count| *count >= PASSED_OVER)
}

/// The newest group image that a restart may use, and the number of its parts, if the group now has another number of
/// members.
pub(crate) fn of_another_size(view: &View, plan: &Plan, options: &Options) -> Option<(Number, u32)> {
    let recorded = view.images.iter().rev().map(|(number, image)| (*number, u32::try_from(image.value.parts.len())));
    let reported = view.members.values().flat_map(|report| &report.parts);
    // Without a record, a part tells it, if it is from a version that records it.
    let unrecorded = reported.filter(|(number, it)| it.size > 0 && !view.images.contains_key(number));
    let all = recorded.chain(unrecorded.map(|(number, it)| (*number, Ok(it.size))));
    let newest = all.filter(|(number, _)| is_on_the_line(view, plan, *number)).max_by_key(|(number, _)| *number);
    newest.and_then(|(number, size)| Some((number, size.ok()?))).filter(|(_, size)| *size != options.size)
}

/// What the job would start from now.
#[must_use]
pub fn continues_from(view: &View) -> StartFrom {
    let plan = view.plan.as_ref().map(|plan| &plan.value);
    plan.and_then(|plan| choose(view, plan).ok()).unwrap_or(StartFrom::Beginning)
}

/// The newest group image that all members can restore and that has few points against it.
pub(crate) fn choose(view: &View, plan: &Plan) -> Result<StartFrom, End> {
    let usable = view.images.iter().rev().filter(|(number, _)| is_on_the_line(view, plan, **number));
    let (mut passed_over, mut missing) = (None, None);
    for (number, image) in usable {
        if !is_there(view, &image.value) {
            // An image that was not committed is lost with the machine that had a part of it.
            missing = missing.or_else(|| image.value.committed.then_some(*number));
        } else if is_passed_over(plan, *number) {
            passed_over = passed_over.or(Some(*number));
        } else {
            return Ok(StartFrom::Image(*number));
        }
    }
    match (passed_over, missing) {
        (None, None) => match view.images.is_empty().then(|| without_record(view)).and_then(|all| all.first().copied())
        {
            // The coordinator has lost its data, and a machine too.
            Some(number) if number >= floor(view, plan) => Err(End::Missing { why: Missing::Record(number) }),
            _ if view.images.iter().any(|(number, it)| it.value.committed && *number >= floor(view, plan)) => {
                Err(End::Missing { why: Missing::RewoundImage })
            }
            _ => Ok(StartFrom::Beginning),
        },
        (Some(number), _) => Err(End::Failed { why: Failure::EachImage(number), last: plan.last }),
        (None, Some(number)) => Err(End::Missing { why: Missing::Parts(number) }),
    }
}

/// A group image whose parts are all durable.
pub(crate) fn commit(view: &View) -> Option<Write> {
    let is_durable = |number: Number, (rank, part): (&Rank, &Part)| {
        let progress = view.members.get(rank).and_then(|report| report.parts.get(&number));
        progress.is_some_and(|progress| progress.part == *part && progress.stored == Stored::Durable)
    };
    let open = view.images.iter().filter(|(_, image)| !image.value.committed);
    let mut done = open.filter(|(number, image)| image.value.parts.iter().all(|part| is_durable(**number, part)));
    let (number, image) = done.next()?;
    let committed = GroupImage { committed: true, ..image.value.clone() };
    Some(Write::Record { number: *number, image: committed, was: Some(image.revision) })
}

/// Group images that have parts but no record, the newest first.
fn without_record(view: &View) -> Vec<Number> {
    let known = view.members.values().flat_map(|report| report.parts.keys());
    let all: BTreeSet<Number> = known.copied().filter(|number| !view.images.contains_key(number)).collect();
    all.into_iter().rev().collect()
}

/// The record of a group image whose parts are all there: the coordinator has lost its data. Members only have parts of
/// group images that were recorded once. After a record was removed, a part may be left on a machine that was away,
/// but never on all: the leader that removed the record has also removed its own part.
///
/// That is not so in the replica, which may have more group images than the stores. One of those is recorded again only
/// if there is nothing else to continue from.
pub(crate) fn rebuilt(view: &View, plan: &Plan, options: &Options) -> Option<Write> {
    let part = |rank: Rank, number| Some((rank, view.members.get(&rank)?.parts.get(&number)?));
    let whole = |number: Number| {
        let of_all = (0..options.size).map(|rank| part(Rank(rank), number));
        let parts = of_all.collect::<Option<Vec<_>>>()?;
        let origin = parts.first()?.1.origin;
        // A machine that was away since before an earlier loss has parts of other group images with these numbers.
        let is_one = parts.iter().all(|(_, progress)| progress.origin == origin);
        // The same job may have run on more machines: then these are not all of its parts.
        let is_one = is_one && parts.iter().all(|(_, progress)| [0, options.size].contains(&progress.size));
        let is_stored = parts.iter().all(|(_, progress)| progress.replicated != Replicated::Only);
        let is_last_resort = || {
            let chosen = choose(view, plan);
            let nothing_else = matches!(chosen, Ok(StartFrom::Beginning) | Err(End::Missing { .. }));
            nothing_else && is_on_the_line(view, plan, number)
        };
        (is_one && (is_stored || is_last_resort()))
            .then(|| (number, parts.into_iter().map(|(rank, progress)| (rank, progress.part.clone())).collect()))
    };
    let (number, parts) = without_record(view).into_iter().find_map(whole)?;
    let image = GroupImage { epoch: plan.epoch, parts, committed: false, replica: Replica::No };
    Some(Write::Record { number, image, was: None })
}

/// A group image that is not kept: its record is removed first, then each member removes its part.
///
/// The group keeps the newest `keep` committed images that no rewind has abandoned, all images that are newer and not lost,
/// the image that the job was started from, the one that it would continue from, the one that is being sent to the
/// replica, and the newest one that is whole there.
///
/// While a machine is missing, nothing is removed: what it has may decide what the job continues from.
pub(crate) fn unneeded(view: &View, present: &Versioned<Plan>, options: &Options) -> Option<Write> {
    if (0..options.size).any(|rank| !view.members.contains_key(&Rank(rank))) {
        return None;
    }
    let plan = &present.value;
    let on_the_line = |number: &Number| is_on_the_line(view, plan, *number);
    let committed = view.images.iter().rev().filter(|(_, image)| image.value.committed).map(|(number, _)| *number);
    let committed: Vec<Number> = committed.filter(on_the_line).collect();
    let newest = committed.first().copied();
    let mut kept: BTreeSet<Number> = committed.into_iter().take(options.keep.max(1)).collect();
    if let StartFrom::Image(number) = plan.from {
        kept.insert(number);
    }
    // It may be older than those, if their parts are lost.
    if let Ok(StartFrom::Image(number)) = choose(view, plan) {
        kept.insert(number);
    }
    let wanted = view.images.iter().filter(|(_, it)| options.replicates && it.value.replica == Replica::Wanted);
    kept.extend(wanted.map(|(number, _)| *number));
    // A machine that is replaced has only this one, and the others must still have their parts.
    kept.extend(whole_in_replica(view).filter(|_| options.replicates));
    // If a machine cannot store its parts, none is committed any more.
    let is_lost = |number: Number, image: &GroupImage| {
        !image.committed && is_lost(view, number, || lacking(view, image).next().is_some())
    };
    let is_old = |number: Number| newest.is_some_and(|newest| number < newest);
    let mut others = view.images.iter().filter(|(number, _)| !kept.contains(number));
    let (number, image) = others.find(|(number, image)| is_old(**number) || is_lost(**number, &image.value))?;
    Some(Write::Remove { number: *number, was: image.revision, plan: Box::new(present.clone()) })
}
