//! Requests of users: they become requests to the group, and are answered when the group has decided.

use std::time::{Duration, Instant};

use super::{AT_ONCE, Member};
use crate::group::Membership;
use crate::policy::StartPoint;
use crate::supervisor::Owner;
use crate::supervisor::control::Open;
use crate::supervisor::state::{self, Event, Finish, Standing, State, Stop, Wish};
use rekindle_group::{Ask, Goal, Number, Outcome, Pending, Rank, StartFrom, Stored, Then};
use rekindle_store::manifest::Reason;
use rekindle_store::{ImageId, LATEST, nth_newest};

/// What users want of the group, and what it does about that.
pub(super) struct Requests {
    /// A stop that was requested here, for the exit code.
    pub(super) stop: Option<Stop>,
    /// When that stop must be over.
    pub(super) by: Option<Instant>,
    /// When this machine stops although the group has not ordered it.
    pub(super) at_once: Option<Instant>,
    /// Requests that clients of this machine wait for.
    pub(super) pending: Vec<Pending>,
    /// Whether the next start is one that was requested, and no restart.
    pub(super) is_start_requested: bool,
    /// What the state machine knows of the group.
    pub(super) standing: Standing,
}

impl Member {
    /// Whether a client's request is served, as far as is known here; otherwise the reason.
    pub(in crate::supervisor) fn admits(&self, wish: Wish, machine: &state::Machine<'_>) -> Result<(), String> {
        let view = self.machine.view();
        let is_suspended = view.plan.as_ref().is_some_and(|plan| rekindle_group::is_suspended(&plan.value));
        let ask = match wish {
            Wish::Hold => return machine.admits(wish).map_err(Into::into),
            _ if self.membership.is_none() => return Err("this machine is not a member of the group now".into()),
            // The image is not known yet.
            Wish::Rewind => return Ok(()),
            // As on one machine, it is answered that it is.
            Wish::Suspend if is_suspended => return Ok(()),
            Wish::Snapshot => Ask::Snapshot,
            Wish::Suspend => Ask::Suspend,
            Wish::Resume => Ask::Resume,
        };
        rekindle_group::admits(view, &ask).map_err(|why| why.to_string())
    }

    pub(in crate::supervisor) fn admits_rewind(&self, image: ImageId) -> Result<(), String> {
        let number = self.number_of(image);
        let number = number.ok_or_else(|| format!("image {image} is not a part of a group image that can be used"))?;
        rekindle_group::admits(self.machine.view(), &Ask::Rewind(number)).map_err(|why| why.to_string())
    }

    /// The image of this machine that a user names: by a group image, by -N for the Nth newest of them, or by its own
    /// name, which is returned as it is.
    pub(in crate::supervisor) fn named(&self, to: &str) -> Result<String, String> {
        let number = match (nth_newest(to), to.parse::<u64>()) {
            (Some(nth), _) => {
                let usable = rekindle_group::usable(self.machine.view());
                let found = nth.checked_sub(1).and_then(|n| usable.get(n)).copied();
                found.ok_or_else(|| format!("{to}: the group has {} group images that can be used", usable.len()))?
            }
            (None, _) if to == LATEST => {
                let usable = rekindle_group::usable(self.machine.view());
                usable.first().copied().ok_or("there is no group image to rewind to")?
            }
            (None, Ok(number)) => Number(number),
            (None, Err(_)) => return Ok(to.to_owned()),
        };
        rekindle_group::admits(self.machine.view(), &Ask::Rewind(number)).map_err(|why| why.to_string())?;
        let image = self.parts.get(&number).ok_or_else(|| match self.remote.only_has(number) {
            true => format!(
                "the part of this machine of {number} is only in the replica: use `rekindle rewind` on a machine that \
                 has its part"
            ),
            false => format!("this machine does not have its part of {number}"),
        })?;
        Ok(image.to_string())
    }

    /// This machine's parts of the group images that can be used, the newest first. Some may have to be fetched from the
    /// replica.
    pub(in crate::supervisor) fn usable(&self) -> Vec<ImageId> {
        let part = |number: &Number| self.parts.get(number).copied().or_else(|| self.remote.image_of(*number));
        rekindle_group::usable(self.machine.view()).iter().filter_map(part).collect()
    }

    /// The group images that can be used and that no failures count against, the newest first.
    pub(in crate::supervisor) fn trusted(&self) -> Vec<Number> {
        rekindle_group::trusted(self.machine.view())
    }

    /// The group image that this image is a part of, also if only the replica has the part.
    pub(in crate::supervisor) fn group_image_of(&self, image: ImageId) -> Option<Number> {
        self.number_of(image).or_else(|| self.remote.number_of(image))
    }

    /// How often in a row the group has gone back to this image because the job hung.
    pub(in crate::supervisor) fn rewinds_to(&self, number: Number) -> u32 {
        let plan = self.machine.view().plan.as_ref();
        let left = plan.and_then(|plan| plan.value.left.iter().find(|left| left.after == number));
        left.map_or(0, |left| left.times)
    }

    /// The requests that are not decided yet.
    pub(in crate::supervisor) fn open(&self) -> Open {
        let any = |is: fn(&Ask) -> bool| self.requests.pending.iter().any(|pending| is(pending.ask()));
        Open {
            snapshot: any(|ask| *ask == Ask::Snapshot),
            suspend: any(|ask| *ask == Ask::Suspend),
            start: any(|ask| matches!(ask, Ask::Resume | Ask::Rewind(_))),
        }
    }

    /// Whether a group snapshot is in progress here.
    pub(in crate::supervisor) fn is_in_snapshot(&self) -> bool {
        self.threads.orders.is_some()
    }

    /// Why the newest group image may be lost, if another machine has not stored its part.
    pub(in crate::supervisor) fn not_stored_elsewhere(&self) -> Option<String> {
        let view = self.machine.view();
        let number = *rekindle_group::usable(view).first()?;
        let lacks = |rank: &Rank| {
            let part = view.members.get(rank).and_then(|report| report.parts.get(&number));
            part.is_none_or(|part| part.stored != Stored::Durable)
        };
        let image = &view.images.get(&number)?.value;
        let rank = image.parts.keys().find(|rank| !image.committed && lacks(rank))?;
        Some(format!("{rank} has not stored its part"))
    }

    /// What the group does, for the state machine.
    pub(super) fn standing(&self) -> Standing {
        let view = self.machine.view();
        let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return Standing::Usual };
        match plan.then {
            Then::Stop { .. } => Standing::Stopping,
            _ if rekindle_group::is_suspended(plan) => {
                Standing::Suspended(match rekindle_group::continues_from(view) {
                    StartFrom::Beginning => StartPoint::Cold,
                    StartFrom::Image(number) => {
                        let part = view.images.get(&number).and_then(|image| image.value.parts.get(&self.rank));
                        let image = part.and_then(|part| part.image.parse().ok());
                        image.map_or(StartPoint::Cold, StartPoint::Image)
                    }
                })
            }
            Then::Suspend if plan.goal.is_alive() => Standing::Suspending,
            _ => Standing::Usual,
        }
    }

    /// What the group is asked for instead of this event, if it is a request.
    pub(super) fn ask(&mut self, event: &Event, grace: Duration, now: Instant) -> Option<Ask> {
        let requeue = |stop: &Stop| *stop == Stop::Requeue;
        Some(match event {
            Event::SnapshotNow(reason) if *reason != Reason::Group => Ask::Snapshot,
            Event::Suspend => Ask::Suspend,
            Event::Resume => Ask::Resume,
            Event::Rewind { image } => Ask::Rewind(self.group_image_of(*image)?),
            Event::Stop(stop) => {
                self.requests.stop = Some(*stop);
                Ask::Stop { requeue: requeue(stop), within: grace }
            }
            Event::StopBy(stop, until) => {
                self.requests.stop = Some(*stop);
                Ask::Stop { requeue: requeue(stop), within: until.saturating_duration_since(now) }
            }
            Event::StopNow(stop) => {
                self.requests.stop = Some(*stop);
                Ask::StopNow { requeue: requeue(stop) }
            }
            _ => return None,
        })
    }
}

impl Member {
    /// Whether a stop is not waited for any more: the coordinator does not answer, and either the time for the stop is
    /// over, or the job is gone and the lease too, so that no snapshot can follow.
    fn is_alone(&self, is_gone: bool, now: Instant) -> bool {
        let is_due = self.requests.by.is_some_and(|by| by <= now);
        // That of a lease that is over is the present.
        let sure_until = || self.membership.as_ref().map(Membership::sure_until);
        let is_expired = || sure_until().is_none_or(|until| until <= Instant::now());
        self.seen.is_away() && (is_due || (is_gone && is_expired()))
    }
}

impl Owner<'_> {
    /// A request becomes one to the group. Returns the event if it is none.
    pub(in crate::supervisor) fn ask_group(&mut self, event: Event) -> Option<Event> {
        let (grace, now) = (self.setup.config.snapshot.grace, Instant::now());
        let Some(member) = &mut self.group else { return Some(event) };
        let Some(ask) = member.ask(&event, grace, now) else { return Some(event) };
        if let (Ask::Stop { .. } | Ask::StopNow { .. }, Some(stop)) = (&ask, member.requests.stop) {
            // Nobody can be asked, and nothing runs here; or the user does not want to wait.
            let at_once = matches!(ask, Ask::StopNow { .. });
            if member.membership.is_none() || (member.seen.is_away() && at_once) {
                return Some(Event::Over(Finish::Stopped(stop)));
            }
        }
        match ask {
            Ask::StopNow { .. } => drop(member.requests.at_once.get_or_insert(now + AT_ONCE)),
            // Without a limit it waits until the job is gone.
            Ask::Stop { within, .. } => member.requests.by = now.checked_add(within),
            _ => {}
        }
        self.pass_on(ask);
        None
    }

    /// Asks the group to go back to this image, because the job hangs.
    pub(in crate::supervisor) fn leave_hang(&mut self, number: Number) {
        self.pass_on(Ask::LeaveHang(number));
    }

    fn pass_on(&mut self, ask: Ask) {
        let Some(member) = &mut self.group else { return };
        if let Err(why) = rekindle_group::admits(member.machine.view(), &ask) {
            tracing::warn!("the group does not serve the request: {why}");
        }
        let membership = member.membership.as_ref().map(Membership::incarnation);
        self.group_step(rekindle_group::Event::Asked(ask.clone()));
        let Some(member) = &mut self.group else { return };
        match (member.machine.asked().filter(|asked| asked.ask == ask), membership) {
            (Some(asked), Some(membership)) => member.requests.pending.push(Pending::new(asked.clone(), membership)),
            _ => self.not_done(&ask, "the group has another request to serve first: try again"),
        }
    }

    /// Ends the run here if the group has not ended it in time, or cannot be asked any more.
    pub(super) fn stop_without_group(&mut self, now: Instant) {
        let is_gone = match self.machine.state() {
            State::Done => return,
            state => matches!(state, State::Idle | State::Suspended { .. }),
        };
        let Some(member) = &mut self.group else { return };
        let is_late = member.requests.at_once.take_if(|at| *at <= now).is_some();
        let plan = member.machine.view().plan.as_ref().map(|plan| &plan.value.goal);
        let Some(stop) = member.requests.stop.filter(|_| !matches!(plan, Some(Goal::End(_)))) else { return };
        let why = match member.is_alone(is_gone, now) {
            _ if is_late => "the group has not answered the request to stop",
            true => "the coordinator is away, so the group cannot be asked to stop",
            false => return,
        };
        tracing::warn!("{why}: stopping on this machine alone");
        self.step(Event::Over(Finish::Stopped(stop)));
    }

    /// Answers the clients whose requests are decided.
    pub(super) fn answer_requests(&mut self) {
        let Some(member) = &mut self.group else { return };
        let machine = &member.machine;
        let membership = member.membership.as_ref().map(Membership::incarnation);
        let mut failed = Vec::new();
        let before = member.requests.pending.len();
        member.requests.pending.retain_mut(|pending| match pending.look(machine.view(), membership, machine.asked()) {
            Outcome::Open => true,
            Outcome::Done => false,
            Outcome::Failed(why) => {
                failed.push((pending.ask().clone(), why));
                false
            }
        });
        let is_news = member.requests.pending.len() < before;
        for (ask, why) in failed {
            self.not_done(&ask, &why.to_string());
        }
        if is_news {
            self.settle();
        }
    }

    pub(super) fn not_done(&mut self, ask: &Ask, why: &str) {
        tracing::warn!("the group has not done what was requested: {why}");
        let control = &mut self.clients.control;
        match ask {
            Ask::Snapshot => control.not_begun(why),
            Ask::Suspend => control.not_suspended(why),
            Ask::Resume | Ask::Rewind(_) => control.not_started(why),
            // Nobody waits for an answer.
            Ask::LeaveHang(_) | Ask::Stop { .. } | Ask::StopNow { .. } => {}
        }
    }

    /// Tells the state machine what the group does. Before the orders: they are carried out in that state.
    pub(super) fn note_standing(&mut self) {
        let Some(member) = &mut self.group else { return };
        let standing = member.standing();
        if member.requests.standing != standing {
            member.requests.standing = standing;
            self.step(Event::Group(standing));
        }
    }
}
