//! A job over several machines: carries out what [`rekindle_group`] orders, and reports to it.
//!
//! ```text
//!   etcd <--> session (thread) --CoordinatorEvent--> Owner --Event--> rekindle_group::Machine
//!                ^                         ^                     |
//!                +-------- Write ----------+------ Order --------+
//!                                          |
//!                        Launch, SnapshotNow, End, Over: state::Machine (led)
//! ```
//!
//! The protocol decides when the job starts and ends, and when a snapshot is taken. Requests of users become requests
//! to the group. Parts of group images are images of this job whose manifest names the group image; they are removed
//! only when the group orders it.

mod costs;
mod ends;
mod fit;
mod memory;
mod orders;
mod replica;
mod requests;
mod requeue;
mod seen;
mod waits;

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use self::costs::Pace;
use self::ends::queued_again;
use self::memory::{Memory, remember};
use self::replica::{Fetched, Listed, Remote};
use self::requests::Requests;
use self::seen::Seen;
use super::images::NO_MORE;
use super::signals::STOPS;
use super::state::{Event, Finish, Obstacle, Standing, State};
use super::{Error, Message, Owner, Setup};
use crate::config::Interval;
use crate::group::{
    Coordinator, CoordinatorEvent, Exchange, Identity, Layout, Loss, Membership, Node, Orders, OwnEtcd, Session, Turn,
    of_member,
};
use crate::published::Forecast;
use crate::telemetry::events::What;
use rekindle_base::interval::Choice;
use rekindle_engine::launch::group::Plan;
use rekindle_group::{
    Action, Blame, Costs, Ending, Epoch, Fault, Goal, Incarnation, LastSnapshot, Local, Machine, Number, Rank,
    StartFailure,
};
use rekindle_os::fence::Fence;
use rekindle_store::ImageId;

/// How long leaving the group may take; then the others wait for the lease to expire.
const LEAVE: Duration = Duration::from_secs(3);

/// How long a stop that is to happen at once waits for the group, which ends it on all machines. Then it happens here,
/// whatever the group does: the group may not hear of it.
const AT_ONCE: Duration = Duration::from_secs(10);

/// How often in the time of a lease its renewal is looked at.
const LOOKS: u32 = 8;

/// What a member of a group is.
#[derive(Debug)]
pub(crate) struct GroupMember {
    /// Where the coordinator is.
    pub(crate) coordinator: Coordinator,
    /// The coordinator, if this member runs it.
    pub(crate) own: Option<OwnEtcd>,
    /// This member.
    pub(crate) identity: Identity,
    /// The settings of the protocol.
    pub(crate) options: rekindle_group::Options,
    /// The network of the job.
    pub(crate) layout: Layout,
    /// Whether the user wants to start from the beginning.
    pub(crate) is_fresh: bool,
    /// Whether parts that are only in the replica are used. They are not if the job has completed elsewhere.
    pub(crate) uses_replica: bool,
}

/// What threads of this supervisor wait for.
#[derive(Default)]
struct Threads {
    /// The group snapshot in progress.
    orders: Option<Orders>,
    /// Its other end, until the thread takes it.
    turn: Option<Turn>,
    /// Lets the job that is being restored run.
    go: Option<mpsc::Sender<()>>,
}

/// This supervisor as a member of a group.
pub(super) struct Member {
    rank: Rank,
    machine: Machine,
    session: Session,
    membership: Option<Membership>,
    nodes: Arc<BTreeMap<Rank, Node>>,
    /// The present epoch, and the member that began the group.
    epoch: (Epoch, Incarnation),
    /// The network of the present epoch.
    network: Option<Arc<Plan>>,
    threads: Threads,
    /// The images that are parts of group images.
    parts: BTreeMap<Number, ImageId>,
    /// Those in the replica.
    remote: Remote,
    requests: Requests,
    /// The interval of the group, and what was reported last of the costs of snapshots here.
    pace: (Pace, Costs),
    /// The group, for those who look at it from outside.
    seen: Seen,
    upkeep: Upkeep,
}

/// What the member has to look after.
struct Upkeep {
    /// The coordinator is another one now: once nothing of the job is left, the member begins again.
    has_moved: bool,
    /// When to look at the lease again.
    looks: Instant,
    /// The other supervisor that has this rank.
    taken_by: Option<Incarnation>,
}

impl Member {
    /// Connects to the coordinator.
    pub(super) fn start(setup: &Setup, sender: &std::sync::mpsc::Sender<Message>) -> Result<Option<Member>, Error> {
        let Some(group) = &setup.group else { return Ok(None) };
        let io = |what| move |source| Error::Io { what, source };
        let memory = Memory::read(&Memory::file(&setup.folder)).map_err(io("reading group.json"))?;
        let sender = sender.clone();
        let tell = move |told| drop(sender.send(Message::Group(Box::new(GroupEvent::Coordinator(told)))));
        let identity = Identity { former: memory.former(), ..group.identity.clone() };
        let session = Session::start(group.coordinator.clone(), identity, tell)
            .map_err(io("starting the thread for the group"))?;
        Ok(Some(Member {
            rank: group.options.rank,
            machine: Machine::new(group.options.clone(), Epoch(memory.epoch))
                .starting(group.is_fresh, Number(memory.floor))
                .remembering(memory.rewound),
            session,
            membership: None,
            nodes: Arc::default(),
            epoch: (Epoch(memory.epoch), Incarnation(0)),
            network: None,
            threads: Threads::default(),
            parts: BTreeMap::new(),
            remote: Remote::default(),
            requests: Requests {
                stop: None,
                by: None,
                at_once: None,
                pending: Vec::new(),
                is_start_requested: false,
                standing: Standing::Usual,
            },
            pace: Default::default(),
            seen: Seen::new(group.identity.group.clone(), group.options.rank, group.options.size),
            upkeep: Upkeep { has_moved: false, looks: Instant::now(), taken_by: None },
        }))
    }

    /// The network of the present epoch.
    pub(super) fn network(&self) -> Option<Arc<Plan>> {
        self.network.clone()
    }

    /// The fence of a job that starts now. The supervisor ends the job before, if it can.
    pub(super) fn fence(&self, options: &rekindle_group::Options) -> std::io::Result<Arc<Fence>> {
        let over = || std::io::Error::other("this machine is not a member of the group");
        self.membership.as_ref().ok_or_else(over)?.fence(options.fence / 2, options.lease)
    }

    /// The end of the snapshot's thread.
    pub(super) fn take_turn(&mut self) -> Option<Turn> {
        self.threads.turn.take()
    }

    fn exchange(&self, rank: Rank, size: u32) -> Exchange {
        let (board, wake) = self.session.board();
        Exchange { rank, size, board, wake: Box::new(wake) }
    }

    /// When the member is to be woken. Renewals of the lease are not reported, and a start waits for one if too little
    /// time is left.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.machine.deadline().into_iter().chain([self.upkeep.looks]).chain(self.requests.at_once).min()
    }

    /// Says that another supervisor has this rank: it may be the one before, and it may be a mistake.
    fn warn_if_taken(&mut self, view: &rekindle_group::View) {
        let Some(ours) = self.membership.as_ref().map(Membership::incarnation) else { return };
        let other = view.members.get(&self.rank).map(|report| report.incarnation).filter(|other| *other != ours);
        if other.is_some() && self.upkeep.taken_by != other {
            let rank = self.rank;
            let host = self.nodes.get(&rank).map(|node| format!(" on {}", node.host)).unwrap_or_default();
            tracing::warn!(
                "another supervisor{host} is {rank} of the group: waiting until it leaves or its lease expires. If it \
                still runs, stop it, or give this machine another number (--node-rank, group.node-rank)"
            );
        }
        self.upkeep.taken_by = other;
    }

    /// The group image that this image is a part of.
    fn number_of(&self, image: ImageId) -> Option<Number> {
        self.parts.iter().find(|(_, id)| **id == image).map(|(number, _)| *number)
    }
}

/// GroupEvent for the member.
pub(super) enum GroupEvent {
    /// From the coordinator.
    Coordinator(CoordinatorEvent),
    /// From the thread that takes a snapshot.
    Local(Local),
    /// The parts in the replica, and the number of the listing.
    Listed(u64, Result<Vec<Listed>, rekindle_replica::Error>),
    /// A part was fetched from the replica, or was not.
    Fetched(Fetched),
}

impl Owner<'_> {
    /// Whether a group decides about this job.
    pub(super) fn is_in_group(&self) -> bool {
        self.group.is_some()
    }

    pub(super) fn group_event(&mut self, news: GroupEvent) {
        match news {
            GroupEvent::Coordinator(told) => self.coordinator_event(told),
            GroupEvent::Local(local) => self.group_step(rekindle_group::Event::Local(local)),
            GroupEvent::Listed(listing, listed) => self.listed(listing, listed),
            GroupEvent::Fetched(fetched) => self.fetched(fetched),
        }
    }

    fn coordinator_event(&mut self, told: CoordinatorEvent) {
        let Some(member) = &mut self.group else { return };
        let event = match told {
            CoordinatorEvent::Group { view, nodes } => {
                let was_deadly = member.seen.snapshots_end_the_job();
                let news = member.seen.changed(&view, &nodes);
                if !was_deadly
                    && member.seen.snapshots_end_the_job()
                    && self.setup.config.snapshot.interval != Interval::Off
                {
                    tracing::error!("a group snapshot has ended the job; {NO_MORE}");
                }
                member.nodes = nodes;
                member.warn_if_taken(&view);
                self.group_is_seen(news);
                rekindle_group::Event::View(view)
            }
            CoordinatorEvent::Joined(membership) => {
                let incarnation = membership.incarnation();
                // Without it, the next supervisor waits for the lease to expire.
                if let Err(error) = remember(self.setup, member.epoch.0, Some(&membership), &member.machine) {
                    tracing::warn!("cannot record the membership in the group: {error}");
                }
                member.membership = Some(membership);
                // The group may have been told of before.
                let view = member.machine.view().clone();
                member.warn_if_taken(&view);
                rekindle_group::Event::Session(incarnation)
            }
            CoordinatorEvent::Lost(incarnation, loss) => {
                match loss {
                    Loss::Expired => {
                        tracing::error!("this machine is no longer a member of the group: its lease has expired");
                    }
                    Loss::NotReported => {
                        let group = self.setup.group.as_ref();
                        let key = group.map(|group| of_member(&group.identity.group, member.rank)).unwrap_or_default();
                        tracing::error!(
                            "this machine is no longer a member of the group: its key in the coordinator, {key}, was \
                             removed or overwritten. The job ends here, and this machine joins again. If its lease has \
                             not expired, something else writes to the keys of this group: give only the group's \
                             supervisors the right to"
                        );
                    }
                    Loss::Hangs(since) => {
                        tracing::error!(
                            "this machine is no longer a member of the group: its supervisor did nothing for {}, so its \
                            lease was not renewed. Does the store or a disk not answer? The job ends here, and this \
                            machine joins again",
                            humantime::format_duration(Duration::from_secs(since.as_secs()))
                        );
                    }
                }
                member.membership = member.membership.take().filter(|it| it.incarnation() != incarnation);
                let machine = member.seen.us();
                self.tell(What::GroupMemberLost { machine });
                rekindle_group::Event::SessionLost
            }
            CoordinatorEvent::Wrote(answer) => rekindle_group::Event::Wrote(answer),
            CoordinatorEvent::Away { why } => {
                tracing::warn!(
                    "the coordinator does not answer: {why}. The job is ended if it does not answer before the lease \
                     expires"
                );
                member.seen.away(Some(why));
                return self.publish_group();
            }
            CoordinatorEvent::Back => {
                tracing::info!("the coordinator answers again");
                member.seen.away(None);
                return self.publish_group();
            }
            CoordinatorEvent::Refuses { why } => {
                let text = format!(
                    "the coordinator refuses what this machine writes: {why}. The job runs on; until that is repaired, \
                     the group takes no snapshot and restarts nothing"
                );
                self.reporting.remarks.repeats.warn("group-write", &text);
                member.seen.refuses(Some(why));
                return self.publish_group();
            }
            CoordinatorEvent::Accepts => {
                tracing::info!("the coordinator accepts again what this machine writes");
                member.seen.refuses(None);
                return self.publish_group();
            }
            CoordinatorEvent::Moved => {
                tracing::warn!("the group's coordinator is another one now: this machine joins again");
                member.upkeep.has_moved = true;
                member.seen.afresh();
                self.group_step(rekindle_group::Event::SessionLost);
                return self.begin_afresh();
            }
            CoordinatorEvent::Missing { why } => {
                let why = format!("the group's coordinator did not answer in time: {why}");
                return self.step(Event::Over(queued_again(why)));
            }
            CoordinatorEvent::Failed { why } => {
                let why = format!("the group's coordinator: {why}");
                return self.step(Event::Over(Finish::Impossible { why, obstacle: Obstacle::Machine }));
            }
        };
        if self.disagrees() {
            return;
        }
        self.group_step(event);
        // Nobody waits for this: a frozen job might wait for what comes before.
        self.publish_group();
    }

    /// Reports what has happened in the group.
    fn group_is_seen(&mut self, news: Vec<What>) {
        for what in news {
            seen::log(&what, &self.reporting.remarks.repeats);
            self.tell(what);
        }
    }

    /// Publishes the group if it has changed. What it waits for changes with each report of a member, also while jobs are
    /// frozen: this alone is published with the next change, or at the next look at the lease.
    fn publish_group(&mut self) {
        let Some(member) = &mut self.group else { return };
        let Some(group) = member.seen.group() else { return };
        let published = &mut self.reporting.published.group;
        if published.as_ref() == Some(&group) {
            return;
        }
        member.seen.is_unpublished = true;
        let is_news = published.as_ref().is_none_or(|before| !before.differs_only_in_the_wait(&group));
        *published = Some(group);
        if is_news {
            self.publish_group_now();
        }
    }

    fn publish_group_now(&mut self) {
        if self.group.as_mut().is_some_and(|member| std::mem::take(&mut member.seen.is_unpublished)) {
            self.publish();
        }
    }

    /// Begins as a new member of the coordinator that is there now. What the one before said does not count: its
    /// revisions may be higher.
    fn begin_afresh(&mut self) {
        let is_idle = matches!(self.machine.state(), State::Idle | State::Suspended { .. });
        let Some(member) = &mut self.group else { return };
        if !member.upkeep.has_moved || !is_idle || member.threads.orders.is_some() {
            return;
        }
        member.upkeep.has_moved = false;
        member.machine = member.machine.afresh();
        member.nodes = Arc::default();
        member.session.afresh(member.membership.take().map(|membership| membership.incarnation()));
    }

    /// Wakes the member when it is due.
    pub(super) fn check_group(&mut self) {
        self.group.iter().for_each(|member| member.session.beats());
        self.begin_afresh();
        let now = Instant::now();
        self.stop_without_group(now);
        if self.group.as_ref().and_then(Member::deadline).is_some_and(|at| at <= now) {
            let lease = self.setup.group.as_ref().map_or(LEAVE, |group| group.options.lease);
            self.group.iter_mut().for_each(|member| member.upkeep.looks = now + lease / LOOKS);
            self.group_step(rekindle_group::Event::Tick);
            self.publish_group_now();
        }
    }

    fn group_step(&mut self, event: rekindle_group::Event) {
        self.pace_of_group();
        let Some(member) = &mut self.group else { return };
        let now = Instant::now();
        let sure = member.membership.as_ref().map(|membership| rekindle_group::Event::Sure(membership.sure_until()));
        let events = sure.into_iter().chain([event]);
        let actions: Vec<Action> = events.flat_map(|event| member.machine.step(event, now)).collect();
        let plan = member.machine.view().plan.as_ref().map(|plan| &plan.value);
        member.requests.is_start_requested |=
            plan.is_some_and(|plan| plan.goal == Goal::Suspended || plan.aim.is_some());
        self.note_standing();
        for action in actions {
            match action {
                Action::Write(write) => {
                    if let Some(member) = &self.group {
                        member.session.write(write);
                    }
                }
                Action::Do(order) => self.ordered(order),
            }
        }
        self.answer_requests();
    }

    /// Chooses the interval, if it is chosen automatically. It counts if this member leads.
    fn pace_of_group(&mut self) {
        let config = &self.setup.config.snapshot;
        let age = self.machine.state().life().map_or(Duration::ZERO, |life| life.since.elapsed());
        let Some(member) = self.group.as_mut().filter(|_| config.interval == Interval::Auto) else { return };
        let interval = member.pace.0.interval(member.machine.view(), config, age);
        member.machine.set_interval(Some(interval));
    }

    /// The interval of the group, or that of this machine, if it is chosen automatically.
    pub(super) fn chosen_interval(&self) -> Option<Choice> {
        match &self.group {
            Some(member) => member.pace.0.choice().cloned(),
            None => self.machine.choice().cloned(),
        }
    }

    /// Reports what snapshots cost here, if that has changed.
    pub(super) fn report_costs(&mut self, last: Option<Forecast>) {
        let (freeze, store) = self.machine.measured();
        let lease = self.setup.group.as_ref().map(|group| group.options.lease).unwrap_or_default();
        // It is not asked again before.
        let quiet = self.machine.is_quiet(Instant::now() + lease / LOOKS);
        let last = last.map(|Forecast { snapshot, store, replica }| LastSnapshot { snapshot, store, replica });
        let costs = Costs { freeze, store, last, quiet };
        // A report in the middle of a snapshot would delay it.
        let Some(member) = self.group.as_mut().filter(|member| !member.is_in_snapshot()) else { return };
        if member.pace.1 != costs {
            member.pace.1 = costs.clone();
            self.report_to_group(Local::Costs(costs));
        }
    }

    /// The time for the final snapshot of the group, from that of this machine.
    pub(super) fn last_of_all(&self, own: Option<Forecast>) -> Option<Forecast> {
        match &self.group {
            Some(member) => costs::last_of_all(own, member.machine.view(), member.rank),
            None => own,
        }
    }

    /// How long other machines may still need to store their parts.
    pub(super) fn others_store(&self) -> Duration {
        let view = self.group.as_ref().map(|member| (member.machine.view(), member.rank));
        view.map_or(Duration::ZERO, |(view, rank)| costs::others_store(view, rank))
    }

    /// Reports to the group.
    fn report_to_group(&mut self, local: Local) {
        self.group_step(rekindle_group::Event::Local(local));
    }

    pub(super) fn group_started(&mut self) {
        self.report_to_group(Local::Started);
    }

    pub(super) fn group_not_started(&mut self, why: String, (blame, fault): (Blame, Fault)) {
        self.report_to_group(Local::Ended(Ending::NotStarted { why: StartFailure::Other(why.into()), blame, fault }));
    }

    /// A snapshot was taken.
    pub(super) fn group_snapped(&mut self, image: ImageId) {
        let Some(member) = &mut self.group else { return };
        if let Some(orders) = member.threads.orders.take() {
            member.parts.insert(orders.number, image);
            self.look_for_lost_parts();
        }
    }

    /// A snapshot failed, and is undone.
    pub(super) fn group_not_snapped(&mut self, why: String) {
        let Some(orders) = self.group.as_mut().and_then(|member| member.threads.orders.take()) else { return };
        if orders.is_kept {
            self.report_to_group(Local::Gone(orders.number));
        }
        self.report_to_group(Local::refused(orders.number, why));
    }

    /// It is tried again to store an image: meanwhile the group takes no snapshot.
    pub(super) fn group_stores(&mut self, image: ImageId) {
        if let Some(number) = self.group.as_ref().and_then(|member| member.number_of(image)) {
            self.report_to_group(Local::Storing(number));
        }
    }

    /// An image was stored, or was not.
    pub(super) fn group_persisted(&mut self, image: ImageId, stored: bool) {
        let Some(number) = self.group.as_ref().and_then(|member| member.number_of(image)) else { return };
        self.report_to_group(if stored { Local::Stored(number) } else { Local::NotStored(number) });
        self.look_for_lost_parts();
    }

    /// Reports parts that exist no more: the slot of one that could not be stored is used again.
    pub(super) fn look_for_lost_parts(&mut self) {
        let Ok(copies) = self.setup.folder.copies() else { return };
        let Some(member) = &mut self.group else { return };
        let exists = |id: &ImageId| copies.iter().any(|image| image.id == *id);
        let lost: Vec<Number> = member.parts.iter().filter(|(_, id)| !exists(id)).map(|(number, _)| *number).collect();
        for number in lost {
            if let Some(member) = &mut self.group {
                member.parts.remove(&number);
            }
            self.report_to_group(Local::Gone(number));
        }
    }

    /// The run is over here: what follows takes any time.
    pub(super) fn group_is_at_the_end(&self) {
        self.group.iter().for_each(|member| member.session.is_at_the_end());
    }

    /// Leaves the group, so that the others need not wait.
    pub(super) fn leave_group(&mut self, messages: &mpsc::Receiver<Message>) {
        if let Some(member) = self.group.take() {
            member.remote.call_off();
            member.session.leave(LEAVE);
        }
        self.leave_etcd(messages);
    }

    /// Ends the group's etcd, if it runs here, once the others have left.
    pub(super) fn leave_etcd(&self, messages: &mpsc::Receiver<Message>) {
        let Some(group) = &self.setup.group else { return };
        if let Some(own) = &group.own {
            let is_stop = |message| matches!(message, Message::Signal(signal, _) if STOPS.contains(&signal));
            own.see_off(&group.identity.group, group.options.limits.store, || messages.try_iter().any(is_stop));
        }
    }
}
