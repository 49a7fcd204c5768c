//! The members of an epoch: what their reports say of it, and what was lost.

use std::sync::Arc;

use crate::documents::{Blame, End, Ending, Fault, Goal, Last, Part, Plan, Report, State, Then, View};
use crate::ids::{Incarnation, Number, Rank};
use crate::options::Options;
use crate::reasons::{Failure, Mismatch, Phase, Reason};

/// A member of the present epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hand<'a> {
    pub(crate) rank: Rank,
    pub(crate) incarnation: Incarnation,
    /// None if the member is lost.
    pub(crate) report: Option<&'a Report>,
}

/// What happened to the epoch.
pub(crate) enum Loss {
    /// A machine, a supervisor or its connection.
    Member(Reason),
    /// A machine cannot run the job now. Neither the job nor a group image is to blame.
    Machine(Reason),
    /// The job, or the group image that it started from.
    Job(Reason, Option<Last>, Fault),
}

/// The members of the epoch of this plan.
pub(crate) fn hands<'a>(view: &'a View, plan: &Plan) -> Vec<Hand<'a>> {
    let of = |(rank, incarnation): (&Rank, &Incarnation)| {
        let report = view.members.get(rank).filter(|report| report.incarnation == *incarnation);
        Hand { rank: *rank, incarnation: *incarnation, report: report.map(Arc::as_ref) }
    };
    plan.crew.iter().map(of).collect()
}

/// What was lost, if something was.
pub(crate) fn loss(hands: &[Hand<'_>], plan: &Plan) -> Option<Loss> {
    let of = |hand: &Hand<'_>| {
        let rank = hand.rank;
        let Some(report) = hand.report else { return Some(Loss::Member(Reason::MemberLost(rank))) };
        if report.epoch != plan.epoch {
            return None;
        }
        match &report.state {
            State::Over(Ending::Failed { why, last, fault }) => {
                Some(Loss::Job(Reason::JobFailed { rank, why: why.clone() }, *last, *fault))
            }
            State::Over(Ending::NotStarted { why, blame, fault }) => {
                let why = Reason::NotStarted { rank, why: why.clone() };
                Some(if *blame == Blame::Image { Loss::Job(why, None, *fault) } else { Loss::Machine(why) })
            }
            // It could not renew its lease in time.
            State::Idle | State::Ending => Some(Loss::Member(Reason::CoordinatorLost(rank))),
            _ => None,
        }
    };
    // Those that fail because of a loss or a kill can be members with a lower rank.
    let order = |loss: &Loss| match loss {
        Loss::Member(_) => 0,
        Loss::Job(_, _, Fault::Snapshot) => 1,
        Loss::Job(_, _, Fault::Outside) => 2,
        Loss::Machine(_) | Loss::Job(..) => 3,
    };
    hands.iter().filter_map(of).min_by_key(order)
}

/// Why a member has given up the job of this epoch, and how its job ended. The others may have failed before, because of
/// its end.
pub(crate) fn given_up(hands: &[Hand<'_>], plan: &Plan) -> Option<(Failure, Option<Last>)> {
    if matches!(plan.goal, Goal::Suspended | Goal::End(_)) || matches!(plan.then, Then::Stop { .. }) {
        return None;
    }
    let of = |hand: &Hand<'_>| match hand.report.filter(|report| report.epoch == plan.epoch).map(|it| &it.state) {
        Some(State::Over(Ending::GivenUp { why, last })) => {
            Some((Failure::Never { rank: hand.rank, why: why.clone() }, *last))
        }
        _ => None,
    };
    hands.iter().find_map(of)
}

/// Why a member can never start the job from what this plan names. A rewind that fails so costs nothing: the job continues
/// from where it was.
pub(crate) fn misfit(hands: &[Hand<'_>], plan: &Plan) -> Option<End> {
    if !matches!(plan.goal, Goal::Start(_)) || plan.aim.is_some() {
        return None;
    }
    let of = |hand: &Hand<'_>| match hand.report.filter(|report| report.epoch == plan.epoch).map(|it| &it.state) {
        Some(State::Over(Ending::NotStarted { why, blame, .. })) => {
            let (rank, why) = (hand.rank, why.clone());
            match blame {
                Blame::Machine | Blame::Image => None,
                Blame::Misfit => Some(End::Misfit { rank, why }),
                Blame::Configuration => Some(End::Refused { why: Mismatch::Configuration { rank, why } }),
            }
        }
        _ => None,
    };
    hands.iter().find_map(of)
}

/// Why a snapshot cannot continue.
pub(crate) fn refusal(hands: &[Hand<'_>], number: Number) -> Option<Reason> {
    let of = |hand: &Hand<'_>| match &hand.report?.state {
        State::Refused(refused, why) if *refused == number => {
            Some(Reason::Refused { rank: hand.rank, why: why.clone() })
        }
        State::Over(_) => Some(Reason::JobOver(hand.rank)),
        _ => None,
    };
    hands.iter().find_map(of)
}

/// Its part of this snapshot.
pub(crate) fn dumped(hand: Hand<'_>, number: Number) -> Option<(Rank, Part)> {
    match &hand.report?.state {
        State::Dumped(dumped, part) if *dumped == number => Some((hand.rank, part.clone())),
        _ => None,
    }
}

/// The members that have not done what the plan demands, and did not do it in time.
pub(crate) fn late(hands: &[Hand<'_>], plan: &Plan, phase: Phase) -> Reason {
    let is_late = |hand: &&Hand<'_>| {
        let done = |report: &Report| match (&plan.goal, &report.state) {
            _ if report.seen < plan.serial => false,
            (Goal::Start(_), State::Ready) | (Goal::Resume(_) | Goal::Abort { .. }, State::Running) => true,
            (Goal::Prepare(number), State::Locked(locked)) => number == locked,
            (Goal::Pull(number), State::Quiet(quiet)) => number == quiet,
            (Goal::Dump(number), State::Dumped(dumped, _)) => number == dumped,
            _ => false,
        };
        !hand.report.is_some_and(done)
    };
    Reason::TimedOut { phase, ranks: hands.iter().filter(is_late).map(|hand| hand.rank).collect() }
}

/// Whether no process of the epoch exists, and no member will start one for an older plan.
pub(crate) fn nothing_runs(view: &View, plan: &Plan) -> bool {
    let is_over = |report: &Report| report.state.nothing_runs() && report.seen >= plan.serial;
    // A lost member has ended its job before its lease expired.
    view.members.values().all(|report| is_over(report))
}

/// The members that report a job which is not over.
pub(crate) fn still_running(view: &View) -> Vec<Rank> {
    view.members.iter().filter(|(_, report)| !report.state.nothing_runs()).map(|(rank, _)| *rank).collect()
}

/// The members that have not seen this plan, although they have a lease: nothing that they report can be relied on. The
/// limit begins again for a member that has.
pub(crate) fn behind<'a>(view: &'a View, plan: &'a Plan) -> impl Iterator<Item = (Rank, Incarnation)> + 'a {
    let is_behind = move |report: &Report| report.seen < plan.serial && report.state.nothing_runs();
    let behind = view.members.iter().filter(move |(_, report)| is_behind(report));
    behind.map(|(rank, report)| (*rank, report.incarnation))
}

/// The members that are not there.
pub(crate) fn missing(view: &View, options: &Options) -> Vec<Rank> {
    (0..options.size).map(Rank).filter(|rank| !view.members.contains_key(rank)).collect()
}
