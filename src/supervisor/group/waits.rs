//! What a group waits for, in words.

use std::collections::BTreeMap;

use rekindle_group::{Ending, Goal, Number, Plan, Rank, Report, State, Stored, View};

use crate::published::{GroupMember, in_words};

/// The machine of a rank.
pub(super) fn member(rank: Rank, hosts: &BTreeMap<Rank, String>) -> GroupMember {
    GroupMember { rank: rank.0, host: hosts.get(&rank).cloned() }
}

/// What the next step of the group needs. `None` if the job runs and nothing is to be done.
pub(super) fn waits_for(view: &View, size: u32, hosts: &BTreeMap<Rank, String>) -> Option<String> {
    let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return joining(view, size, hosts) };
    let late = |is_done: &dyn Fn(&State) -> bool| {
        let reports = plan.crew.keys().map(|rank| (rank, view.members.get(rank)));
        let late = reports.filter(|(_, report)| !report.is_some_and(|it| it.seen >= plan.serial && is_done(&it.state)));
        names(late.map(|(rank, _)| *rank), hosts)
    };
    let to = |late: Option<String>, what: String| late.map(|late| format!("{late} to {what}"));
    match &plan.goal {
        Goal::Gather { why } => {
            let first = joining(view, size, hosts).or_else(|| to(running(view, plan, hosts), "end the job".into()));
            let first = first.or_else(|| fetching(view, hosts));
            Some(format!("{}: {why}", first.unwrap_or_else(|| "the next start".into())))
        }
        Goal::Suspended => {
            to(running(view, plan, hosts), "end the job".into()).or_else(|| Some("`rekindle resume`".into()))
        }
        Goal::Start(from) => {
            let is_ready = |state: &State| matches!(state, State::Ready | State::Over(Ending::Completed));
            to(late(&is_ready), format!("start the job from {from}"))
        }
        Goal::Run => {
            let ends = view.members.values().any(|it| it.state == State::Over(Ending::Completed));
            let is_over = |state: &State| *state == State::Over(Ending::Completed);
            let end = ends.then(|| to(late(&is_over), "complete the job".into())).flatten();
            end.or_else(|| storing(view, hosts))
        }
        Goal::Prepare(number) => {
            to(late(&|state| *state == State::Locked(*number)), format!("lock the job for {number}"))
        }
        Goal::Pull(number) => {
            let what = format!("disconnect the job's network for {number}");
            to(late(&|state| *state == State::Quiet(*number)), what)
        }
        Goal::Dump(number) => {
            let is_dumped = |state: &State| matches!(state, State::Dumped(dumped, _) if dumped == number);
            to(late(&is_dumped), format!("dump the job for {number}"))
        }
        Goal::Resume(number) | Goal::Abort { number, .. } => {
            let runs =
                |state: &State| matches!(state, State::Running | State::Refused(..) | State::Over(Ending::Completed));
            to(late(&runs), format!("continue after {number}"))
        }
        Goal::End(_) => {
            to(running(view, plan, hosts), "end the job".into()).or_else(|| Some("all machines to leave".into()))
        }
    }
}

fn names(ranks: impl Iterator<Item = Rank>, hosts: &BTreeMap<Rank, String>) -> Option<String> {
    let members: Vec<GroupMember> = ranks.map(|rank| member(rank, hosts)).collect();
    (!members.is_empty()).then(|| in_words(&members))
}

/// The machines that are missing.
pub(super) fn missing(view: &View, size: u32) -> impl Iterator<Item = Rank> {
    (0..size).map(Rank).filter(|rank| !view.members.contains_key(rank))
}

fn joining(view: &View, size: u32, hosts: &BTreeMap<Rank, String>) -> Option<String> {
    names(missing(view, size), hosts).map(|missing| format!("{missing} to join"))
}

/// The machines on which the job may still run.
fn running(view: &View, plan: &Plan, hosts: &BTreeMap<Rank, String>) -> Option<String> {
    let runs = |report: &Report| report.seen < plan.serial || !report.state.nothing_runs();
    names(view.members.iter().filter(|(_, report)| runs(report)).map(|(rank, _)| *rank), hosts)
}

/// A group image that the job starts from once all have fetched their parts.
fn fetching(view: &View, hosts: &BTreeMap<Rank, String>) -> Option<String> {
    let (number, ranks) = rekindle_group::fetching(view)?;
    let late = names(ranks.into_iter(), hosts)?;
    Some(format!("{late} to fetch {number} from the replica"))
}

/// The newest group image that is not committed yet, if a machine is storing its part.
fn storing(view: &View, hosts: &BTreeMap<Rank, String>) -> Option<String> {
    let (number, image) = view.images.iter().rev().find(|(_, image)| !image.value.committed)?;
    let stores =
        |rank: &Rank| view.members.get(rank).is_some_and(|report| report.storing && !is_durable(report, *number));
    let late = names(image.value.parts.keys().filter(|rank| stores(rank)).copied(), hosts)?;
    Some(format!("{late} to store {number}"))
}

fn is_durable(report: &Report, number: Number) -> bool {
    report.parts.get(&number).is_some_and(|progress| progress.stored == Stored::Durable)
}
