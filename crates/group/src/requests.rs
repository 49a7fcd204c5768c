//! Which requests are served, why others are not, and what becomes of one.

use std::sync::Arc;

use crate::documents::{Ask, Asked, Ending, Goal, Plan, Report, StartFrom, State, Then, View};
use crate::ids::{Epoch, Incarnation, Rank};
use crate::images;

/// Whether the leader serves this request, as far as this view tells. A supervisor asks this before it passes a request
/// on; the leader asks it again.
///
/// A snapshot or a suspension that is admitted while the job starts or another snapshot is taken is served when it runs.
///
/// # Errors
///
/// Why it is not served, in words.
pub fn admits(view: &View, ask: &Ask) -> Result<(), String> {
    let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else {
        return match ask {
            Ask::Stop { .. } | Ask::StopNow { .. } => Ok(()),
            _ => Err("the group has not begun".into()),
        };
    };
    match (ask, &plan.goal) {
        (_, Goal::End(_)) => Err("the run is over".into()),
        // Also if it is being stopped already: the newest time limit counts.
        (Ask::Stop { .. } | Ask::StopNow { .. }, _) => Ok(()),
        _ if matches!(plan.then, Then::Stop { .. }) => Err("the run is being stopped".into()),
        (Ask::Rewind(to) | Ask::LeaveHang(to), _) => {
            let Some(image) = view.images.get(to) else { return Err(format!("there is no {to}")) };
            if *to < images::floor(view, plan) {
                return Err(format!("{to} is from before the job was started from the beginning (--fresh)"));
            }
            let lacking: Vec<String> = images::lacking(view, &image.value).map(|rank| rank.to_string()).collect();
            match lacking.is_empty() {
                true => Ok(()),
                false => Err(format!("{to} cannot be used: the part of {} is not there", lacking.join(", "))),
            }
        }
        (Ask::Resume, Goal::Suspended) => Ok(()),
        (Ask::Resume, _) if plan.then == Then::Suspend => {
            Err("the job is being suspended: try again when it is suspended".into())
        }
        (Ask::Resume, _) => Err("the job is not suspended".into()),
        (Ask::Suspend, Goal::Suspended) => Err("the job is suspended already".into()),
        (Ask::Snapshot, Goal::Suspended) => Err("the job is suspended: resume it first".into()),
        (Ask::Snapshot, Goal::Gather { .. }) => Err("the job does not run: it waits to be started".into()),
        (Ask::Snapshot, _) if plan.then == Then::Suspend => Err("the job is being suspended".into()),
        (Ask::Suspend, Goal::Gather { .. }) => Ok(()),
        (Ask::Snapshot | Ask::Suspend, _) => completed(view, plan).map_or(Ok(()), |rank| Err(without(rank))),
    }
}

/// A member whose job has completed in this epoch. Its part of the job is in no later group image, so there is none until
/// the end of the run.
pub(crate) fn completed(view: &View, plan: &Plan) -> Option<Rank> {
    let is = |report: &Report| report.epoch == plan.epoch && report.state == State::Over(Ending::Completed);
    let of_crew = |rank: &Rank, report: &Report| plan.crew.get(rank) == Some(&report.incarnation);
    view.members.iter().find(|(rank, report)| of_crew(rank, report) && is(report)).map(|(rank, _)| *rank)
}

/// Why there is no snapshot then.
pub(crate) fn without(rank: Rank) -> String {
    format!("the job of {rank} has completed, so no snapshot can be taken")
}

/// What has become of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is not decided yet.
    Open,
    /// The job does what was requested, on all machines.
    Done,
    /// It was refused, or the group could not do it.
    Failed {
        /// The reason, for people.
        why: String,
    },
}

/// A request of this member that somebody waits for.
#[derive(Debug, Clone)]
pub struct Pending {
    asked: Asked,
    /// The membership that makes it. A stop that is not served is made again by the next one.
    membership: Incarnation,
    /// The epoch in which it was served, as far as we saw.
    served: Option<Epoch>,
    /// What went wrong last since then.
    trouble: Option<String>,
}

impl Pending {
    /// A request that was just made.
    #[must_use]
    pub fn new(asked: Asked, membership: Incarnation) -> Pending {
        Pending { asked, membership, served: None, trouble: None }
    }

    /// What is requested.
    #[must_use]
    pub fn ask(&self) -> &Ask {
        &self.asked.ask
    }

    /// Looks at a newer view. `membership` and `latest` are the present membership and its latest request.
    pub fn look(&mut self, view: &View, membership: Option<Incarnation>, latest: Option<&Asked>) -> Outcome {
        let failed = |why: &str| Outcome::Failed { why: why.into() };
        let is_stop = matches!(self.asked.ask, Ask::Stop { .. } | Ask::StopNow { .. });
        if is_stop && self.served.is_none() && latest == Some(&self.asked) {
            let Some(membership) = membership else { return Outcome::Open };
            self.membership = membership;
        }
        if membership != Some(self.membership) {
            return failed(
                "this machine was no longer a member of the group; `rekindle status` shows what the job does",
            );
        }
        let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return Outcome::Open };
        if let Goal::End(end) = &plan.goal {
            return Outcome::Failed { why: format!("the run is over: {end}") };
        }
        if plan.served.get(&self.membership).is_none_or(|served| *served < self.asked.number) {
            return match latest.is_some_and(|latest| latest.number > self.asked.number) {
                true => failed("another request came before it was served"),
                false => Outcome::Open,
            };
        }
        let refused = plan.refused.get(&self.membership).filter(|refusal| refusal.number == self.asked.number);
        let since = *self.served.get_or_insert(plan.epoch);
        if let Goal::Abort { why, .. } | Goal::Gather { why } = &plan.goal {
            self.trouble = Some(why.clone());
        }
        let trouble = || failed(self.trouble.as_deref().unwrap_or("another request took its place"));
        match (&self.asked.ask, refused) {
            // Two machines may ask for it at the same time.
            // A lost member has ended its job; our own report is awaited.
            (Ask::Suspend, _) if is_suspended(plan) => match rests(view, plan) && is_member(view, self.membership) {
                true => Outcome::Done,
                false => Outcome::Open,
            },
            (_, Some(refusal)) => failed(&refusal.why),
            (Ask::Suspend, None) if plan.then == Then::Suspend => Outcome::Open,
            (Ask::Suspend, None) => trouble(),
            (Ask::Resume, None) => match &plan.goal {
                Goal::Gather { why } if plan.epoch > since => {
                    failed(&format!("the job could not be started: {why}. It is tried again"))
                }
                Goal::Gather { .. } | Goal::Start(_) => Outcome::Open,
                Goal::Suspended => failed("the job was suspended again"),
                _ => Outcome::Done,
            },
            (Ask::Rewind(to) | Ask::LeaveHang(to), None) => match &plan.aim {
                Some(aim) if aim.to == *to => Outcome::Open,
                Some(_) => failed("the job goes back to another group image instead"),
                None if runs(plan) && plan.from == StartFrom::Image(*to) => Outcome::Done,
                None => trouble(),
            },
            (Ask::Snapshot | Ask::Stop { .. } | Ask::StopNow { .. }, None) => Outcome::Done,
        }
    }
}

/// Whether this member is the one that asks the scheduler to queue the job again, which ends all of its processes. It has
/// the lowest rank of the members of the run that are still there, and all of those have done what they had to.
///
/// A member that has asked stays until its lease expires. If it dies before, the next one asks.
#[must_use]
pub fn has_job_queued_again(view: &View, us: Incarnation) -> bool {
    let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return false };
    if !matches!(&plan.goal, Goal::End(end) if end.is_queued_again()) {
        return false;
    }
    let is_of_run = |(rank, report): &(&Rank, &Arc<Report>)| plan.crew.get(rank) == Some(&report.incarnation);
    let mut there = view.members.iter().filter(is_of_run).map(|(_, report)| report).peekable();
    let is_first = there.peek().is_some_and(|first| first.incarnation == us);
    is_first && there.all(|report| report.done)
}

/// Whether the run of this member has ended for all, and is not to be queued again. A member that has ended alone may want
/// that, but a later request to stop, or the end of the job, counts for all.
#[must_use]
pub fn is_over_for_good(view: &View, rank: Rank) -> bool {
    let goal = view.plan.as_ref().map(|plan| &plan.value.goal);
    matches!(goal, Some(Goal::End(end)) if !end.is_queued_again()) && is_of_run(view, rank)
}

/// Whether the job is suspended, or is being ended for that with its group image taken.
#[must_use]
pub fn is_suspended(plan: &Plan) -> bool {
    plan.goal == Goal::Suspended && !matches!(plan.then, Then::Stop { .. })
}

/// Whether no member has a job or stores a part.
fn rests(view: &View, plan: &Plan) -> bool {
    view.members.values().all(|it| it.state.nothing_runs() && !it.storing && it.seen >= plan.serial)
}

/// Whether the member of this rank takes part in the present run.
#[must_use]
pub fn is_of_run(view: &View, rank: Rank) -> bool {
    let of_crew = view.plan.as_ref().and_then(|plan| plan.value.crew.get(&rank));
    of_crew.is_some() && view.members.get(&rank).map(|report| &report.incarnation) == of_crew
}

fn is_member(view: &View, membership: Incarnation) -> bool {
    view.members.values().any(|report| report.incarnation == membership)
}

fn runs(plan: &Plan) -> bool {
    plan.goal.is_alive() && !matches!(plan.goal, Goal::Start(_))
}
