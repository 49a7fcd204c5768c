//! What this supervisor has seen of its group: for the published state, and for events.
//!
//! Nothing is decided from it. Events are the differences between two states of the coordinator. What happens while this
//! supervisor or the coordinator is away is only in the journals of the others.

use std::collections::BTreeMap;
use std::sync::Arc;

use rekindle_group::{Epoch, Goal, Number, Plan, Rank, Reason, StartFrom, View};
use rekindle_store::{ImageId, JobName};

use super::super::remarks::Repeats;
use super::waits::{member, missing, waits_for};
use crate::group::Node;
use crate::published::{Group, GroupFreeze, GroupImage, GroupMember, in_words};
use crate::telemetry::events::What;

/// The group, as it was seen last.
#[derive(Debug)]
pub(super) struct Seen {
    name: JobName,
    size: u32,
    rank: Rank,
    /// None before the coordinator has told of it, or if it is another one now.
    view: Option<Arc<View>>,
    /// Also of members that were lost.
    hosts: BTreeMap<Rank, String>,
    /// Why the coordinator does not answer, if it does not.
    away: Option<String>,
    /// Why the coordinator refuses what this machine writes, if it does.
    refuses: Option<String>,
    /// Why the epoch ended, if something was lost.
    loss: Option<Reason>,
    /// The members that were lost since the last start.
    gone: Vec<GroupMember>,
    /// The last snapshot whose end was reported as an abort.
    aborted: Option<Number>,
    /// Whether the published state is not written yet.
    pub(super) is_unpublished: bool,
}

impl Seen {
    pub(super) fn new(name: JobName, rank: Rank, size: u32) -> Seen {
        let (view, hosts, loss, gone, aborted) = (None, BTreeMap::new(), None, Vec::new(), None);
        let (away, refuses, is_unpublished) = (None, None, false);
        Seen { name, size, rank, view, hosts, away, refuses, loss, gone, aborted, is_unpublished }
    }

    /// Whether the coordinator cannot be reached.
    pub(super) fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Whether the group takes no snapshots at the interval, because they end the job.
    pub(super) fn snapshots_end_the_job(&self) -> bool {
        let plan = self.view.as_ref().and_then(|view| view.plan.as_ref());
        plan.is_some_and(|plan| plan.value.snapshots_end_the_job())
    }

    pub(super) fn away(&mut self, why: Option<String>) {
        self.away = why;
    }

    pub(super) fn refuses(&mut self, why: Option<String>) {
        self.refuses = why;
    }

    /// The coordinator is another one.
    pub(super) fn afresh(&mut self) {
        (self.view, self.away, self.refuses, self.loss, self.aborted) = (None, None, None, None, None);
        self.gone.clear();
    }

    /// This machine, for an event.
    pub(super) fn us(&self) -> GroupMember {
        member(self.rank, &self.hosts)
    }

    /// The published state.
    pub(super) fn group(&self) -> Option<Group> {
        let view = self.view.as_ref()?;
        let plan = view.plan.as_ref().map(|plan| &plan.value);
        let of = |rank| member(rank, &self.hosts);
        let leader = view.members.iter().find(|(_, report)| Some(report.incarnation) == view.leader);
        let images = view.images.iter().rev().map(|(number, image)| GroupImage {
            number: number.0,
            epoch: image.value.epoch.0,
            image: self.part(view, *number),
            committed: image.value.committed,
        });
        let waits_for = match (&self.away, &self.refuses) {
            (Some(why), _) => Some(format!("the coordinator, which does not answer: {why}")),
            (None, Some(why)) => Some(format!("the coordinator, which refuses what this machine writes: {why}")),
            (None, None) => waits_for(view, self.size, &self.hosts),
        };
        let freeze = |(rank, report): (&Rank, &Arc<rekindle_group::Report>)| {
            let freeze_us = u64::try_from(report.costs.freeze?.as_micros()).ok()?;
            Some(GroupFreeze { rank: rank.0, freeze_us })
        };
        Some(Group {
            name: self.name.clone(),
            size: self.size,
            rank: self.rank.0,
            epoch: plan.map_or(0, |plan| plan.epoch.0),
            members: view.members.keys().copied().map(of).collect(),
            missing: missing(view, self.size).map(of).collect(),
            leader: leader.map(|(rank, _)| rank.0),
            images: images.collect(),
            waits_for,
            freezes: view.members.iter().filter_map(freeze).collect(),
        })
    }

    /// The part of this machine.
    fn part(&self, view: &View, number: Number) -> Option<ImageId> {
        view.images.get(&number)?.value.parts.get(&self.rank)?.image.parse().ok()
    }

    fn machines(&self, why: &Reason) -> Vec<GroupMember> {
        why.ranks().iter().map(|rank| member(*rank, &self.hosts)).collect()
    }

    /// There is a newer state of the coordinator. Returns what has happened in the meantime.
    pub(super) fn changed(&mut self, view: &Arc<View>, nodes: &BTreeMap<Rank, Node>) -> Vec<What> {
        let before = self.view.replace(Arc::clone(view));
        self.hosts.extend(nodes.iter().map(|(rank, node)| (*rank, node.host.clone())));
        let origin = |view: &View| view.plan.as_ref().map(|plan| plan.value.origin);
        // If the coordinator has lost its data, numbers and epochs may begin again.
        let before = before.filter(|before| origin(before).is_none() || origin(before) == origin(view));
        let mut events = Vec::new();
        if let Some(before) = &before {
            let lost = self.lost(before, view);
            self.gone.extend(lost.iter().cloned());
            events.extend(lost.into_iter().map(|machine| What::GroupMemberLost { machine }));
            events.extend(self.committed(before, view));
        }
        let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return events };
        let former = before.as_ref().and_then(|before| before.plan.as_ref()).map(|plan| &plan.value);
        if former.is_none_or(|former| former.serial != plan.serial) {
            events.extend(self.aborted(former, plan, view));
            events.extend(self.restarting(plan, view));
        }
        events
    }

    /// This machine's own loss is reported when its lease is lost. At the end of a run all leave.
    fn lost(&self, before: &View, view: &View) -> Vec<GroupMember> {
        if view.plan.as_ref().is_some_and(|plan| matches!(plan.value.goal, Goal::End(_))) {
            return Vec::new();
        }
        let now = |rank: &Rank| view.members.get(rank).map(|report| report.incarnation);
        let lost = before.members.iter().filter(|(rank, it)| **rank != self.rank && now(rank) != Some(it.incarnation));
        lost.map(|(rank, _)| member(*rank, &self.hosts)).collect()
    }

    fn committed(&self, before: &View, view: &View) -> Vec<What> {
        let is_committed =
            |view: &View, number: &Number| view.images.get(number).is_some_and(|image| image.value.committed);
        let new = view.images.iter().filter(|(number, _)| is_committed(view, number) && !is_committed(before, number));
        let event = |(number, image): (&Number, &Arc<rekindle_group::Versioned<rekindle_group::GroupImage>>)| {
            let (epoch, image) = (image.value.epoch.0, self.part(view, *number));
            What::GroupCommitted { number: number.0, epoch, image }
        };
        new.map(event).collect()
    }

    fn aborted(&mut self, former: Option<&Plan>, plan: &Plan, view: &View) -> Option<What> {
        let was = former.and_then(|former| snapshot(&former.goal));
        let (number, why) = match &plan.goal {
            Goal::Abort { number, why } => (*number, Some(why)),
            goal if was == snapshot(goal) => return None,
            goal => {
                let number = was.filter(|number| !view.images.contains_key(number))?;
                (number, if let Goal::Gather { why } = goal { Some(why) } else { None })
            }
        };
        if self.aborted == Some(number) {
            return None;
        }
        self.aborted = Some(number);
        let machines = why.map(|why| self.machines(why)).unwrap_or_default();
        let why = match (why, &plan.goal) {
            (Some(why), _) => why.to_string(),
            (None, Goal::End(_)) => "the run ended before".into(),
            (None, _) => "the reason was not seen here".into(),
        };
        Some(What::GroupAborted { number: number.0, why, machines })
    }

    fn restarting(&mut self, plan: &Plan, view: &View) -> Option<What> {
        match &plan.goal {
            // Before the first epoch nothing can be lost.
            Goal::Gather { why } => self.loss = Some(why.clone()).filter(|why| why.is_loss() && plan.epoch > Epoch(0)),
            Goal::Start(from) => {
                let lost = std::mem::take(&mut self.gone);
                let why = self.loss.take()?;
                let number = match from {
                    StartFrom::Beginning => None,
                    StartFrom::Image(number) => Some(*number),
                };
                let image = number.and_then(|number| self.part(view, number));
                let (machines, why) = (self.machines(&why), why.to_string());
                let (number, epoch) = (number.map(|number| number.0), plan.epoch.0);
                return Some(What::GroupRestarting { number, image, epoch, why, machines, lost });
            }
            _ => self.loss = None,
        }
        None
    }
}

/// The group snapshot that this goal is a step of, until all have dumped.
fn snapshot(goal: &Goal) -> Option<Number> {
    match goal {
        Goal::Prepare(number) | Goal::Pull(number) | Goal::Dump(number) => Some(*number),
        _ => None,
    }
}

/// Writes an event to the log.
pub(super) fn log(what: &What, repeats: &Repeats) {
    let from = |number: &Option<u64>| match number {
        Some(number) => format!("group image {number}"),
        None => "the beginning".to_owned(),
    };
    match what {
        What::GroupCommitted { number, .. } => crate::routine!("group image {number} is committed"),
        What::GroupAborted { number, why, machines } => {
            // The number is another one each time.
            tracing::debug!("group snapshot {number} was aborted");
            let text = format!("a group snapshot was aborted: {}", with_hosts(why, machines));
            repeats.warn("group-snapshot", &text);
        }
        What::GroupMemberLost { machine } => tracing::warn!("the group has lost {machine}"),
        What::GroupRestarting { number, why, machines, lost, .. } => {
            let lost: Vec<&GroupMember> = lost.iter().filter(|it| !machines.contains(it)).collect();
            let also = if lost.is_empty() { String::new() } else { format!("; lost: {}", in_words(lost)) };
            tracing::warn!("all machines restart from {}: {}{also}", from(number), with_hosts(why, machines));
        }
        _ => {}
    }
}

/// The reason, and the hosts of the machines that it names.
fn with_hosts(why: &str, machines: &[GroupMember]) -> String {
    let known = in_words(machines.iter().filter(|it| it.host.is_some()));
    if known.is_empty() { why.to_owned() } else { format!("{why} [{known}]") }
}

#[cfg(test)]
mod tests;
