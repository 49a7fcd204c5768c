//! Which requests are served, why others are not, and what becomes of one.

use std::fmt;
use std::sync::Arc;

use crate::documents::{Ask, Asked, End, Ending, Goal, Plan, Report, StartFrom, State, Then, View};
use crate::ids::{Epoch, Incarnation, Rank};
use crate::images;
use crate::reasons::{Reason, RequestRefusal};

/// Whether the leader serves this request, as far as this view tells. A supervisor asks this before it passes a request
/// on; the leader asks it again.
///
/// A snapshot or a suspension that is admitted while the job starts or another snapshot is taken is served when it runs.
///
/// # Errors
///
/// Why it is not served.
pub fn admits(view: &View, ask: &Ask) -> Result<(), RequestRefusal> {
    let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else {
        return match ask {
            Ask::Stop { .. } | Ask::StopNow { .. } => Ok(()),
            _ => Err(RequestRefusal::NotBegun),
        };
    };
    match (ask, &plan.goal) {
        (_, Goal::End(_)) => Err(RequestRefusal::RunOver),
        // Also if it is being stopped already: the newest time limit counts.
        (Ask::Stop { .. } | Ask::StopNow { .. }, _) => Ok(()),
        _ if matches!(plan.then, Then::Stop { .. }) => Err(RequestRefusal::Stopping),
        (Ask::Rewind(to) | Ask::LeaveHang(to), _) => {
            let Some(image) = view.images.get(to) else { return Err(RequestRefusal::NoImage(*to)) };
            if *to < images::floor(view, plan) {
                return Err(RequestRefusal::BeforeFresh(*to));
            }
            let ranks: Vec<Rank> = images::lacking(view, &image.value).collect();
            match ranks.is_empty() {
                true => Ok(()),
                false => Err(RequestRefusal::PartsMissing { image: *to, ranks }),
            }
        }
        (Ask::Resume, Goal::Suspended) => Ok(()),
        (Ask::Resume, _) if plan.then == Then::Suspend => Err(RequestRefusal::StillSuspending),
        (Ask::Resume, _) => Err(RequestRefusal::NotSuspended),
        (Ask::Suspend, Goal::Suspended) => Err(RequestRefusal::SuspendedAlready),
        (Ask::Snapshot, Goal::Suspended) => Err(RequestRefusal::Suspended),
        (Ask::Snapshot, Goal::Gather { .. }) => Err(RequestRefusal::NotRunning),
        (Ask::Snapshot, _) if plan.then == Then::Suspend => Err(RequestRefusal::Suspending),
        (Ask::Suspend, Goal::Gather { .. }) => Ok(()),
        (Ask::Snapshot | Ask::Suspend, _) => {
            completed(view, plan).map_or(Ok(()), |rank| Err(RequestRefusal::Failed(Reason::JobCompleted(rank))))
        }
    }
}

/// A member whose job has completed in this epoch. Its part of the job is in no later group image, so there is none until
/// the end of the run.
pub(crate) fn completed(view: &View, plan: &Plan) -> Option<Rank> {
    let is = |report: &Report| report.epoch == plan.epoch && report.state == State::Over(Ending::Completed);
    let of_crew = |rank: &Rank, report: &Report| plan.crew.get(rank) == Some(&report.incarnation);
    view.members.iter().find(|(rank, report)| of_crew(rank, report) && is(report)).map(|(rank, _)| *rank)
}

/// What has become of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is not decided yet.
    Open,
    /// The job does what was requested, on all machines.
    Done,
    /// It was refused, or the group could not do it.
    Failed(NotDone),
}

/// Why a request was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotDone {
    /// This machine was no longer a member.
    NotAMember,
    /// The run has ended so.
    RunOver(End),
    /// A later request of this machine came before it was served.
    Overtaken,
    /// A later request was served instead.
    Replaced,
    /// It was refused.
    Refused(RequestRefusal),
    /// The group could not do it.
    Failed(Reason),
    /// The job could not be resumed yet.
    NotStarted(Reason),
    /// The job was suspended again.
    SuspendedAgain,
    /// The job goes back to another group image.
    OtherRewind,
}

impl fmt::Display for NotDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotDone::NotAMember => f.write_str(
                "this machine was no longer a member of the group; `rekindle status` shows what the job does",
            ),
            NotDone::RunOver(end) => write!(f, "the run is over: {end}"),
            NotDone::Overtaken => f.write_str("another request came before it was served"),
            NotDone::Replaced => f.write_str("another request took its place"),
            NotDone::Refused(why) => why.fmt(f),
            NotDone::Failed(why) => why.fmt(f),
            NotDone::NotStarted(why) => write!(f, "the job could not be started: {why}. It is tried again"),
            NotDone::SuspendedAgain => f.write_str("the job was suspended again"),
            NotDone::OtherRewind => f.write_str("the job goes back to another group image instead"),
        }
    }
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
    trouble: Option<Reason>,
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
        let is_stop = matches!(self.asked.ask, Ask::Stop { .. } | Ask::StopNow { .. });
        if is_stop && self.served.is_none() && latest == Some(&self.asked) {
            let Some(membership) = membership else { return Outcome::Open };
            self.membership = membership;
        }
        if membership != Some(self.membership) {
            return Outcome::Failed(NotDone::NotAMember);
        }
        let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return Outcome::Open };
        if let Goal::End(end) = &plan.goal {
            return Outcome::Failed(NotDone::RunOver(end.clone()));
        }
        if plan.served.get(&self.membership).is_none_or(|served| *served < self.asked.number) {
            return match latest.is_some_and(|latest| latest.number > self.asked.number) {
                true => Outcome::Failed(NotDone::Overtaken),
                false => Outcome::Open,
            };
        }
        let refused = plan.refused.get(&self.membership).filter(|refusal| refusal.number == self.asked.number);
        let since = *self.served.get_or_insert(plan.epoch);
        if let Goal::Abort { why, .. } | Goal::Gather { why } = &plan.goal {
            self.trouble = Some(why.clone());
        }
        let trouble = || Outcome::Failed(self.trouble.clone().map_or(NotDone::Replaced, NotDone::Failed));
        match (&self.asked.ask, refused) {
            // Two machines may ask for it at the same time.
            // A lost member has ended its job; our own report is awaited.
            (Ask::Suspend, _) if is_suspended(plan) => match rests(view, plan) && is_member(view, self.membership) {
                true => Outcome::Done,
                false => Outcome::Open,
            },
            (_, Some(refused)) => Outcome::Failed(NotDone::Refused(refused.why.clone())),
            (Ask::Suspend, None) if plan.then == Then::Suspend => Outcome::Open,
            (Ask::Suspend, None) => trouble(),
            (Ask::Resume, None) => match &plan.goal {
                Goal::Gather { why } if plan.epoch > since => Outcome::Failed(NotDone::NotStarted(why.clone())),
                Goal::Gather { .. } | Goal::Start(_) => Outcome::Open,
                Goal::Suspended => Outcome::Failed(NotDone::SuspendedAgain),
                _ => Outcome::Done,
            },
            (Ask::Rewind(to) | Ask::LeaveHang(to), None) => match &plan.aim {
                Some(aim) if aim.to == *to => Outcome::Open,
                Some(_) => Outcome::Failed(NotDone::OtherRewind),
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
