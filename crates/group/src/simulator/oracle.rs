//! The rules that are checked after every event. The oracle sees the whole model, but not what the product remembers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Facts;
use super::coordinator::Coordinator;
use super::node::{Cable, Node, Piece};
use crate::documents::{Ask, End, Goal, GroupImage, Part, Plan, Replica, StartFrom, View};
use crate::ids::{Epoch, Incarnation, Number, Rank};
use crate::images::PASSED_OVER;
use crate::options::ColdStart;
use crate::reasons::{Failure, Missing, Reason};
use crate::requests::Outcome;

/// The longest time without a cable.
const LONGEST_OUT: Duration = Duration::from_secs(75);

/// A disturbance can let a step take too long for this time.
const ECHO: Duration = Duration::from_secs(40);

/// A snapshot. Numbers begin anew if the coordinator loses its data.
type Cut = (Incarnation, Epoch, Number);

/// One dump: its time, and when the cable was pulled.
#[derive(Debug, Clone, Copy)]
struct Dump {
    /// The snapshot that it belongs to.
    cut: Cut,
    out: Option<Instant>,
    at: Instant,
}

/// What outlives a machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stores<'a> {
    pub(super) shared: Option<&'a BTreeMap<(Rank, Number), Piece>>,
    pub(super) replica: Option<&'a BTreeMap<(Rank, Number), Piece>>,
}

impl Stores<'_> {
    fn whole(self, size: u32) -> Option<Number> {
        newest_whole(self.replica?, size)
    }
}

/// The newest group image that is whole in the replica.
pub(super) fn newest_whole(replica: &BTreeMap<(Rank, Number), Piece>, size: u32) -> Option<Number> {
    let numbers: BTreeSet<Number> = replica.keys().map(|(_, number)| *number).collect();
    let is_whole = |number: &Number| {
        let mut parts = (0..size).map(|rank| replica.get(&(Rank(rank), *number)).map(|it| (it.origin, it.epoch)));
        let first = parts.next().flatten();
        first.is_some() && parts.all(|other| other == first)
    };
    numbers.into_iter().rev().find(is_whole)
}

#[derive(Debug)]
pub(super) struct Oracle {
    seen: Option<Arc<View>>,
    /// By rank and digest.
    dumps: BTreeMap<(Rank, String), Dump>,
    /// The ranks that were locked for each snapshot.
    locks: BTreeMap<Cut, BTreeSet<Rank>>,
    /// Broken rules: cables that were pulled although not all were locked, wrong answers to users.
    broken: Vec<String>,
    /// When each cable was plugged in.
    plugs: BTreeMap<Rank, Vec<Instant>>,
    images: Images,
    completed: Option<Epoch>,
    /// Memberships of supervisors that were told to start from the beginning.
    fresh: BTreeSet<Incarnation>,
    failures: Failures,
    cold: Cold,
    losses: Losses,
    ends: Vec<End>,
    disturbed_until: Instant,
    /// After this time, [`one_epoch`] may have another result although no machine has changed.
    due: Option<Instant>,
}

/// Failures of the job.
#[derive(Debug, Default)]
struct Failures {
    count: u64,
    /// Group images whose restore has failed, or after which the job has died.
    blamed: BTreeSet<Number>,
}

/// Whether the job may start from the beginning again.
#[derive(Debug)]
struct Cold {
    allowed: ColdStart,
    /// The processes of supervisors under which the job has run, each with the machine.
    begun: BTreeSet<(usize, u64)>,
}

/// What became of the images.
#[derive(Debug, Default)]
struct Images {
    /// Parts that are stored, by their digest.
    durable: BTreeSet<(Rank, Number, String)>,
    /// All committed group images that the leader has not removed.
    committed: BTreeMap<Number, GroupImage>,
    /// Removed parts, to be compared with the records.
    forgotten: Vec<(Rank, Number)>,
}

/// What was lost by faults, and whether the run ended because of it.
#[derive(Debug, Default)]
struct Losses {
    disk: bool,
    memory: bool,
    /// The coordinator's data was lost.
    records: bool,
    /// Somebody has removed these records, and they are not there again,
    removed: BTreeSet<Number>,
    /// or they are.
    once_removed: BTreeSet<Number>,
    /// A rewind has abandoned group images.
    rewound: bool,
    /// The run ended because parts are missing.
    missing: bool,
}

impl Oracle {
    pub(super) fn new(began: Instant, allowed: ColdStart) -> Oracle {
        Oracle {
            seen: None,
            dumps: BTreeMap::new(),
            locks: BTreeMap::new(),
            broken: Vec::new(),
            plugs: BTreeMap::new(),
            images: Images::default(),
            completed: None,
            fresh: BTreeSet::new(),
            failures: Failures::default(),
            cold: Cold { allowed, begun: BTreeSet::new() },
            losses: Losses::default(),
            ends: Vec::new(),
            disturbed_until: began + Duration::from_secs(5),
            due: None,
        }
    }

    // ---- what happens ----

    pub(super) fn dumps(&mut self, number: Number, part: &Part, node: &Node, at: Instant) {
        let Some(job) = &node.job else { return };
        let out = match job.cable {
            Cable::Out(since) => Some(since),
            Cable::In => None,
        };
        let dump = Dump { cut: (job.origin, job.epoch, number), out, at };
        self.dumps.insert((node.rank, part.digest.clone()), dump);
    }

    pub(super) fn locks(&mut self, number: Number, node: &Node) {
        let Some(job) = &node.job else { return };
        self.locks.entry((job.origin, job.epoch, number)).or_default().insert(node.rank);
    }

    /// Its cable is pulled. Those that were locked may have given up by now: they were at rest all the same.
    pub(super) fn unplugs(&mut self, size: u32, node: &Node) {
        let Some((job, number)) = node.job.as_ref().and_then(|job| Some((job, job.snapshot?))) else { return };
        let locked = self.locks.get(&(job.origin, job.epoch, number));
        if !locked.is_some_and(|ranks| (0..size).all(|rank| ranks.contains(&Rank(rank)))) {
            self.broken.push(format!("{number}: {} pulled its cable before all were locked", node.rank));
        }
    }

    pub(super) fn plugs(&mut self, rank: Rank, at: Instant) {
        self.plugs.entry(rank).or_default().push(at);
    }

    pub(super) fn stored(&mut self, rank: Rank, number: Number, part: &Part) {
        self.images.durable.insert((rank, number, part.digest.clone()));
    }

    pub(super) fn forgets(&mut self, rank: Rank, number: Number) {
        self.images.forgotten.push((rank, number));
    }

    pub(super) fn completes(&mut self, nodes: &[Node]) {
        self.completed = nodes.iter().find_map(|node| node.job.as_ref()).map(|job| job.epoch);
    }

    pub(super) fn joins_fresh(&mut self, membership: Incarnation) {
        self.fresh.insert(membership);
    }

    pub(super) fn begins(&mut self, at: usize, process: u64) {
        self.cold.begun.insert((at, process));
    }

    /// The job has died, or could not be started. `from`: the group image that may be the cause.
    pub(super) fn job_fails(&mut self, from: Option<Number>) {
        self.failures.count += 1;
        self.failures.blamed.extend(from);
    }

    pub(super) fn breaks(&mut self, what: String) {
        self.broken.push(what);
    }

    pub(super) fn loses_disk(&mut self) {
        self.losses.disk = true;
    }

    pub(super) fn loses_memory(&mut self) {
        self.losses.memory = true;
    }

    pub(super) fn loses_records(&mut self) {
        self.losses.records = true;
    }

    /// Somebody removes these records.
    pub(super) fn removes_records(&mut self, numbers: &[Number]) {
        self.losses.records = true;
        self.losses.removed.extend(numbers);
        self.losses.once_removed.extend(numbers);
    }

    pub(super) fn rewinds(&mut self) {
        self.losses.rewound = true;
    }

    fn may_miss_parts(&self) -> bool {
        self.losses.disk
            || (self.losses.rewound && self.losses.memory)
            || (self.losses.records && (self.losses.memory || self.images.committed.is_empty()))
    }

    pub(super) fn is_right_that_parts_are_missing(&self) -> bool {
        self.losses.missing && self.may_miss_parts()
    }

    pub(super) fn finishes(&mut self, end: &End) {
        self.losses.missing |= matches!(end, End::Missing { why } if are_parts_missing(why));
        self.ends.push(end.clone());
    }

    /// A user of this machine gets an answer.
    pub(super) fn answers(&mut self, ask: &Ask, outcome: &Outcome, node: &Node) {
        let from = node.job.as_ref().map(|job| job.from.as_ref().map(|(number, _)| *number));
        // A machine that was replaced learns what the group has done, and ends its own job in the same moment.
        if let (Ask::Rewind(to) | Ask::LeaveHang(to), Outcome::Done, Some(from)) = (ask, outcome, from)
            && from != Some(*to)
            && !node.is_out_of_crew()
        {
            self.broken.push(format!("{} is said to have gone back to {to}, and runs from {from:?}", node.rank));
        }
        if let (Ask::Suspend, Outcome::Done, Some(_)) = (ask, outcome, from) {
            self.broken.push(format!("{} is said to be suspended, and runs", node.rank));
        }
    }

    pub(super) fn disturbed(&mut self, until: Instant) {
        self.disturbed_until = self.disturbed_until.max(until);
    }

    // ---- rules ----

    /// After every event. `have_changed`: something of a machine has, as [`super::nodes::Nodes::look`] says it.
    pub(super) fn look(
        &mut self,
        now: Instant,
        nodes: &[Node],
        have_changed: bool,
        coordinator: &Coordinator,
        stores: Stores<'_>,
        facts: &mut Facts,
    ) -> Result<(), String> {
        if have_changed || self.due.is_some_and(|due| now > due) {
            self.due = one_epoch(now, nodes, self.disturbed_until + ECHO)?;
        }
        if let Some(broken) = self.broken.pop() {
            return Err(broken);
        }
        for (rank, number) in self.images.forgotten.drain(..) {
            // It may be recorded again just when a member takes it for an old one.
            if coordinator.view.images.contains_key(&number) && !self.losses.once_removed.contains(&number) {
                return Err(format!("{rank} removed its part of {number}, which is recorded"));
            }
            if self.images.committed.keys().next_back() == Some(&number) {
                return Err(format!("{rank} removed its part of {number}, the newest committed one"));
            }
        }
        for end in std::mem::take(&mut self.ends) {
            match end {
                End::Completed if self.completed.is_none() => return Err("it is said to be completed".into()),
                End::Failed { why: Failure::NoImage { .. }, .. } if self.cold.allowed == ColdStart::Never => {}
                End::Failed { why, .. } if self.failures.count == 0 => {
                    return Err(format!("it is said to have failed: {why}"));
                }
                // Each job of the model ends soon after it is killed. A coordinator that refuses writes may not let that be
                // reported.
                End::Missing { why: why @ Missing::JobEnd(_) } if now > self.disturbed_until + ECHO => {
                    return Err(format!("a job was not ended, or that was not reported: {why}"));
                }
                // The others may have left: they were told to stop while this one was away.
                End::Missing { why: Missing::Members(_) } => {}
                // Two machines claim the rank, because one was believed to be lost.
                End::Missing { why: Missing::Rank(_) } if nodes.iter().any(|it| it.trouble.replaced) => {}
                End::Missing { why: why @ Missing::Parts(_) } if self.is_restorable(nodes, stores, facts) => {
                    return Err(format!("the replica has a whole group image, but: {why}"));
                }
                End::Missing { why }
                    if now > self.disturbed_until + ECHO + Duration::from_secs(120) && !self.may_miss_parts() =>
                {
                    return Err(format!("nothing is missing, but: {why}"));
                }
                _ => {}
            }
        }
        let same = self.seen.as_ref().is_some_and(|seen| seen.revision == coordinator.view.revision);
        if !same {
            let view = Arc::clone(&coordinator.view);
            self.images(&view, nodes, stores, facts)?;
            self.plan(now, &view, nodes, stores, facts)?;
            self.seen = Some(view);
        }
        if !same || have_changed { one_origin(nodes, &coordinator.view) } else { Ok(()) }
    }

    /// Whether the group can certainly continue from the replica.
    fn is_restorable(&self, nodes: &[Node], stores: Stores<'_>, facts: &Facts) -> bool {
        let is_simple = facts.fresh == 0 && !self.losses.rewound && !nodes.iter().any(|node| node.trouble.replaced);
        is_simple && stores.whole(ranks(nodes)).is_some()
    }

    fn images(&mut self, view: &View, nodes: &[Node], stores: Stores<'_>, facts: &mut Facts) -> Result<(), String> {
        let before = self.seen.clone().unwrap_or_default();
        for (number, image) in &view.images {
            let old = before.images.get(number);
            if old.is_none() {
                facts.images += 1;
                self.is_consistent(*number, &image.value, nodes)?;
            }
            if let (Replica::Whole, Some(replica)) = (image.value.replica, stores.replica)
                && old.is_none_or(|old| old.value.replica != Replica::Whole)
            {
                facts.replicated += 1;
                let has =
                    |(rank, part): (&Rank, &Part)| replica.get(&(*rank, *number)).is_some_and(|it| it.part == *part);
                if !image.value.parts.iter().all(has) {
                    return Err(format!("{number} is said to be whole in the replica"));
                }
            }
            if image.value.committed && old.is_none_or(|old| !old.value.committed) {
                facts.committed += 1;
                for (rank, part) in &image.value.parts {
                    if !self.images.durable.contains(&(*rank, *number, part.digest.clone())) {
                        return Err(format!("{number} was committed before {rank} had stored its part"));
                    }
                }
                self.images.committed.insert(*number, image.value.clone());
            }
        }
        let newest = before.images.iter().rev().find(|(_, image)| image.value.committed);
        if let (Some((number, _)), Some(_)) = (newest, &view.plan)
            && !view.images.contains_key(number)
            && before.plan.is_some()
            && view.images.keys().all(|other| other < number)
            && !self.losses.rewound
            && !self.losses.removed.contains(number)
            && !view.images.is_empty()
        {
            return Err(format!("{number}, the newest committed one, was removed"));
        }
        if view.plan.is_some() {
            let gone: Vec<Number> = before.images.keys().copied().filter(|it| !view.images.contains_key(it)).collect();
            let gone = gone.iter().filter(|number| !self.losses.removed.contains(number));
            gone.for_each(|number| drop(self.images.committed.remove(number)));
        }
        self.losses.removed.retain(|number| !view.images.contains_key(number));
        Ok(())
    }

    /// Nothing crossed the cut: all cables were out from before the first dump until after the last.
    fn is_consistent(&self, number: Number, image: &GroupImage, nodes: &[Node]) -> Result<(), String> {
        if nodes.iter().any(|node| !image.parts.contains_key(&node.rank)) {
            return Err(format!("{number} has {} parts", image.parts.len()));
        }
        let dumped = |(rank, part): (&Rank, &Part)| Some((*rank, *self.dumps.get(&(*rank, part.digest.clone()))?));
        let dumps: Option<Vec<(Rank, Dump)>> = image.parts.iter().map(dumped).collect();
        let Some(dumps) = dumps else { return Err(format!("{number} has a part that was never dumped")) };
        for (rank, mine) in &dumps {
            for (other, theirs) in &dumps {
                if mine.cut != theirs.cut {
                    return Err(format!("{number} has parts of {:?} and {:?}", mine.cut, theirs.cut));
                }
                let Some(out) = mine.out else { return Err(format!("{number}: {rank} was dumped with its cable in")) };
                if out > theirs.at {
                    return Err(format!("{number}: {rank} still had its cable in when {other} was dumped"));
                }
                let plugs = self.plugs.get(rank).map(Vec::as_slice).unwrap_or_default();
                if plugs.iter().any(|plug| out < *plug && *plug < theirs.at) {
                    return Err(format!("{number}: {rank} had its cable in again before {other} was dumped"));
                }
            }
        }
        Ok(())
    }

    fn plan(
        &mut self,
        now: Instant,
        view: &View,
        nodes: &[Node],
        stores: Stores<'_>,
        facts: &mut Facts,
    ) -> Result<(), String> {
        let old = self.seen.as_ref().and_then(|seen| seen.plan.as_ref());
        let Some(plan) = view.plan.as_ref().filter(|plan| old.is_none_or(|old| old.revision != plan.revision)) else {
            return Ok(());
        };
        let Plan { goal, floor, crew, .. } = &plan.value;
        if let Some(old) = old.filter(|old| old.value.floor != *floor && old.value.origin == plan.value.origin) {
            facts.fresh += 1;
            if *floor < old.value.floor || crew.is_empty() || !crew.values().all(|it| self.fresh.contains(it)) {
                return Err(format!("the job starts from the beginning, and not all want that: {crew:?}"));
            }
        }
        match goal {
            Goal::Start(from) => {
                facts.epochs += 1;
                if let StartFrom::Image(number) = from
                    && plan.value.left.iter().any(|left| left.has(*number))
                {
                    return Err(format!("{number} was left by a rewind, and the job starts from it"));
                }
                if let StartFrom::Image(number) = from
                    && *number < *floor
                {
                    return Err(format!("{number} was left by a start from the beginning, and the job starts from it"));
                }
                if let Some(old) = old
                    && old.value.epoch > plan.value.epoch
                {
                    return Err(format!("{} after {}", plan.value.epoch, old.value.epoch));
                }
                if let (StartFrom::Image(from), false) = (from, self.losses.rewound)
                    && let Some((number, _)) = self.good(view, &plan.value).find(|(number, image)| {
                        **number > *from
                            && !self.failures.blamed.contains(number)
                            && exists(view, nodes, stores, **number, image)
                    })
                {
                    return Err(format!("the job goes back to {from}, and nothing is wrong with {number}"));
                }
                if *from == StartFrom::Beginning {
                    self.has_nothing_else(view, &plan.value, nodes, stores, facts)?;
                    let of_crew =
                        |node: &Node| node.session.is_some_and(|session| crew.values().any(|it| *it == session));
                    let has_begun =
                        |(at, node): (usize, &Node)| of_crew(node) && self.cold.begun.contains(&(at, node.process));
                    // Not the same start with another request that was served.
                    let is_new = old.is_none_or(|old| old.value.goal != *goal || old.value.epoch != plan.value.epoch);
                    if self.cold.allowed == ColdStart::Never && is_new && nodes.iter().enumerate().any(has_begun) {
                        return Err("the job starts from the beginning again, which is never allowed".into());
                    }
                }
            }
            Goal::End(End::Failed { why: Failure::NoImage { .. }, .. }) => {
                self.has_nothing_else(view, &plan.value, nodes, stores, facts)?;
            }
            Goal::Abort { .. } => facts.aborted += 1,
            Goal::Gather { why } if is_timeout(why) && now > self.disturbed_until + ECHO => {
                return Err(format!("the job was harmed without a reason: {why}"));
            }
            _ => {}
        }
        Ok(())
    }
}

impl Oracle {
    /// The committed group images that no start from the beginning has left.
    fn good(&self, view: &View, plan: &Plan) -> impl Iterator<Item = (&Number, &GroupImage)> + Clone {
        let told = floor(view, plan);
        self.images.committed.iter().filter(move |(number, _)| **number >= told)
    }

    /// The job starts from the beginning, or is given up because it must not: there is nothing to continue from.
    fn has_nothing_else(
        &self,
        view: &View,
        plan: &Plan,
        nodes: &[Node],
        stores: Stores<'_>,
        facts: &Facts,
    ) -> Result<(), String> {
        // The job failed again and again after these, or was taken back to an older one.
        let is_useless = |number: &Number| {
            let is_passed_over = plan.failures.get(number).is_some_and(|points| *points >= PASSED_OVER);
            let is_left = plan.left.iter().any(|left| left.has(*number));
            self.cold.allowed == ColdStart::Allow && (is_passed_over || is_left)
        };
        let told = floor(view, plan);
        let mut good = self.good(view, plan).filter(|(number, _)| !is_useless(number));
        let whole = stores.whole(ranks(nodes)).filter(|number| !is_useless(number));
        if told == Number::default() && whole.is_some() && self.is_restorable(nodes, stores, facts) {
            return Err("the job starts from the beginning although the replica has a whole image".into());
        }
        if let Some((number, _)) = good.find(|(number, image)| exists(view, nodes, stores, **number, image)) {
            return Err(format!("the job starts from the beginning although there is {number}"));
        }
        Ok(())
    }
}

/// Group images before this one are not used.
fn floor(view: &View, plan: &Plan) -> Number {
    view.members.values().map(|report| report.floor).max().unwrap_or_default().max(plan.floor)
}

/// Whether all parts of a group image are with members, or in the replica.
fn exists(view: &View, nodes: &[Node], stores: Stores<'_>, number: Number, image: &GroupImage) -> bool {
    let is_member = |node: &Node| {
        let member = view.members.get(&node.rank).map(|report| report.incarnation);
        member.is_some() && member == node.session
    };
    image.parts.iter().all(|(rank, part)| {
        let node = nodes.iter().find(|node| node.rank == *rank && is_member(node));
        let here = node.and_then(|node| node.piece(number)).is_some_and(|piece| piece.part == *part);
        here || stores.shared.is_some_and(|shared| shared.contains_key(&(*rank, number)))
    })
}

/// The size of the group.
fn ranks(nodes: &[Node]) -> u32 {
    nodes.iter().map(|node| node.rank.0 + 1).max().unwrap_or_default()
}

/// Whether a run ends because a group image, or a part of one, is not there.
fn are_parts_missing(why: &Missing) -> bool {
    matches!(why, Missing::Record(_) | Missing::Parts(_) | Missing::RewoundImage)
}

/// Whether the job is ended because a member was late.
fn is_timeout(why: &Reason) -> bool {
    match why {
        Reason::RewindFailed { why, .. } => is_timeout(why),
        why => matches!(why, Reason::TimedOut { .. }),
    }
}

/// No two epochs run at once, and no cable stays out. Returns the time after which that must be looked at again although no
/// machine has changed.
fn one_epoch(now: Instant, nodes: &[Node], disturbed_until: Instant) -> Result<Option<Instant>, String> {
    let mut first: Option<(Rank, Epoch)> = None;
    let mut due: Option<Instant> = None;
    let mut again_after = |time: Instant| due = Some(due.map_or(time, |due| due.min(time)));
    for node in nodes {
        // A paused machine does nothing.
        if node.is_paused(now) {
            node.trouble.paused_until.into_iter().for_each(&mut again_after);
            continue;
        }
        let Some(job) = node.job.as_ref().filter(|_| !node.is_stuck()) else { continue };
        match first {
            Some((rank, epoch)) if epoch != job.epoch => {
                return Err(format!("{rank} runs {epoch}, and {} runs {}", node.rank, job.epoch));
            }
            _ => first = Some((node.rank, job.epoch)),
        }
        if let Cable::Out(since) = job.cable {
            // A job that was started and waits for the others does so as long as the coordinator refuses to write that all
            // are ready. It does not run yet.
            let until = since + LONGEST_OUT;
            let until = if job.snapshot.is_none() { until.max(disturbed_until) } else { until };
            if now > until {
                return Err(format!("{} has had its cable out for {:?}", node.rank, now - since));
            }
            again_after(until);
        }
    }
    Ok(due)
}

/// All jobs of an epoch were restored from the parts of one group image.
fn one_origin(nodes: &[Node], view: &View) -> Result<(), String> {
    let mut first: BTreeMap<Epoch, Option<Number>> = BTreeMap::new();
    for (node, job) in nodes.iter().filter_map(|node| Some((node, node.job.as_ref()?))) {
        let number = job.from.as_ref().map(|(number, _)| *number);
        let others = *first.entry(job.epoch).or_insert(number);
        if others != number {
            return Err(format!("{} was restored from {number:?}, and others from {others:?}", node.rank));
        }
        if let Some((number, part)) = &job.from
            && let Some(image) = view.images.get(number)
            && image.value.parts.get(&node.rank) != Some(part)
        {
            return Err(format!("{} was restored from another part than that of {number}", node.rank));
        }
    }
    Ok(())
}
