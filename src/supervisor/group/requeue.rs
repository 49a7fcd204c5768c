//! `scheduler.requeue = "scontrol"` in a group: the request ends the processes on all machines, so one machine makes it, and
//! only after all have stored and replicated their parts. The same on a machine whose exit code Slurm ignores
//! ([`crate::supervisor::OomKills`]).
//!
//! Who has done that stays in the group and says so. The lowest rank that is there makes the request, and stays until its
//! lease expires: Slurm has ended all by then. If it dies before, or Slurm refuses, the next one makes the request. Before
//! that it asks Slurm whether the job still runs here. A machine that ends alone leaves the group and makes the request
//! itself, unless another supervisor has its rank: then the run goes on. If the run ends for all meanwhile and is not to be
//! queued again, nobody makes the request.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::GroupEvent;
use crate::config::Requeue;
use crate::group::{CoordinatorEvent, Membership};
use crate::scheduler::Scheduler;
use crate::supervisor::state::Finish;
use crate::supervisor::{Message, Owner};
use rekindle_base::chain;
use rekindle_group::{Action, Event, Goal, Local, Rank};

/// How often the lease is looked at.
const LOOK: Duration = Duration::from_secs(1);

impl Owner<'_> {
    /// Whether this member stays in the group after the end of the run, to have the job queued again.
    pub(in crate::supervisor) fn queues_again(&self, finish: &Finish) -> bool {
        let setup = self.setup;
        let may_ask = || self.group.is_some() && self.lease.is_held() && setup.time.scheduler.is_asked_to_requeue();
        let asks = || setup.config.scheduler.requeue == Requeue::Scontrol || setup.time.oom_kills.went_up();
        finish.is_queued_again() && may_ask() && asks() && !self.is_taken()
    }

    /// Whether another supervisor has this rank: the run goes on with it.
    fn is_taken(&self) -> bool {
        let Some(member) = &self.group else { return false };
        let has_it = member.machine.view().members.get(&member.rank).map(|report| report.incarnation);
        has_it.is_some_and(|has_it| member.membership.as_ref().is_some_and(|us| us.incarnation() != has_it))
    }

    /// Everything is done: has the job queued again, or waits until another machine does. Slurm ends this process.
    pub(in crate::supervisor) fn queue_again(&mut self, messages: &mpsc::Receiver<Message>) {
        let Some(rank) = self.group.as_ref().map(|member| member.rank) else { return };
        tracing::info!("waiting for the other machines of the group, to have Slurm queue the job again");
        self.step_late(vec![Event::Local(Local::Done)]);
        // The others wait for a member that stays, so it does not stay if the run is not over by then.
        let lease = self.setup.group.as_ref().map_or(Duration::ZERO, |group| group.options.lease);
        let alone_from = Instant::now() + lease;
        loop {
            let Some(member) = &mut self.group else { return };
            let Some(us) = member.membership.as_ref().map(Membership::incarnation) else {
                return self.queue_again_alone(rank, "the group's coordinator is away");
            };
            let view = member.machine.view();
            let is_over = view.plan.as_ref().is_some_and(|plan| matches!(plan.value.goal, Goal::End(_)));
            if !is_over && Instant::now() >= alone_from {
                return self.queue_again_alone(rank, "this machine cannot continue");
            }
            if is_over && !rekindle_group::is_of_run(view, rank) {
                return self.queue_again_alone(rank, "the next run of the group does not begin");
            }
            if rekindle_group::is_over_for_good(view, rank) {
                tracing::info!("the run has ended for all machines, and is not to be queued again");
                return self.leave();
            }
            if rekindle_group::has_job_queued_again(member.machine.view(), us) {
                return self.ask_to_requeue();
            }
            match messages.recv_timeout(LOOK) {
                Ok(Message::Group(news)) => self.group_event_after_end(*news),
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => self.step_late(vec![Event::Tick]),
                Err(mpsc::RecvTimeoutError::Disconnected) => member.membership = None,
            }
        }
    }

    /// GroupEvent of the group after the end of the run.
    pub(in crate::supervisor) fn group_event_after_end(&mut self, news: GroupEvent) {
        let event = match news {
            GroupEvent::Coordinator(CoordinatorEvent::Group { view, .. }) => Event::View(view),
            GroupEvent::Coordinator(CoordinatorEvent::Wrote(answer)) => Event::Wrote(answer),
            GroupEvent::Coordinator(
                CoordinatorEvent::Lost(..)
                | CoordinatorEvent::Moved
                | CoordinatorEvent::Missing { .. }
                | CoordinatorEvent::Failed { .. },
            ) => {
                self.group.iter_mut().for_each(|member| member.membership = None);
                Event::SessionLost
            }
            _ => return,
        };
        self.step_late(vec![event]);
    }

    /// Nothing is done any more for a run that is over; what the member has to write is written.
    fn step_late(&mut self, events: Vec<Event>) {
        let Some(member) = &mut self.group else { return };
        let now = Instant::now();
        for action in events.into_iter().flat_map(|event| member.machine.step(event, now)).collect::<Vec<_>>() {
            if let Action::Write(write) = action {
                member.session.write(write);
            }
        }
    }

    /// The machines cannot agree, or this one ends alone. It leaves before it waits: the others would wait for a member that
    /// does nothing more.
    fn queue_again_alone(&mut self, rank: Rank, why: &str) {
        let pause = Scheduler::pause_before(rank.0);
        let after = match pause.is_zero() {
            true => String::new(),
            false => format!(" in {}, unless another one has done it by then", humantime::format_duration(pause)),
        };
        tracing::warn!("{why}: this machine leaves the group, and asks Slurm to queue the job again{after}");
        let before =
            self.group.as_ref().and_then(|member| member.machine.view().plan.as_ref()).map(|it| it.value.clone());
        self.leave();
        // Another machine may have been told to stop meanwhile.
        let is_over = || {
            let group = self.setup.group.as_ref();
            let plan = group.filter(|_| !pause.is_zero()).and_then(|it| it.coordinator.plan(&it.identity.group));
            let is_new = plan.filter(|plan| before.as_ref() != Some(plan));
            is_new.is_some_and(|plan| matches!(plan.goal, Goal::End(end) if !end.is_queued_again()))
        };
        if let Err(error) = self.setup.time.scheduler.requeue_in_turn(rank.0, is_over) {
            tracing::error!("the job is not queued again by this machine: {}", chain(&error));
        }
    }

    fn ask_to_requeue(&mut self) {
        // The membership is not ended if Slurm does it: another machine would take that for a death before the request.
        if let Err(error) = self.setup.time.scheduler.requeue_in_turn(0, || false) {
            tracing::error!("the job is not queued again by this machine: {}", chain(&error));
            self.leave();
        }
    }

    fn leave(&mut self) {
        if let Some(member) = self.group.take() {
            member.session.leave(super::LEAVE);
        }
    }
}
