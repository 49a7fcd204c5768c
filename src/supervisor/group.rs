//! A job over several machines: carries out what [`rekindle_group`] orders, and reports to it.
//!
//! ```text
//!   etcd <--> session (thread) --Told--> Owner --Event--> rekindle_group::Machine
//!                ^                         ^                     |
//!                +-------- Write ----------+------ Order --------+
//!                                          |
//!                        Launch, SnapshotNow, End, Over: state::Machine (led)
//! ```
//!
//! The protocol decides when the job starts and ends, and when a snapshot is taken. Requests of users become requests
//! to the group. Parts of group images are images of this job whose manifest names the group image; they are removed
//! only when the group orders it.

mod seen;
mod waits;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGTERM;

use self::seen::Seen;
use super::control::Open;
use super::events::image_of;
use super::signals::STOPS;
use super::state::{self, Event, Finish, Obstacle, Standing, State, Stop, Verdict, Wish};
use super::{Error, Message, Owner, Setup};
use crate::group::{
    Coordinator, Exchange, Identity, Layout, Membership, Node, Orders, OwnEtcd, Session, StartSignal, Told, Turn, Word,
};
use crate::policy::{self, StartPoint};
use crate::telemetry::events::What;
use rekindle_base::chain;
use rekindle_engine::launch::group::Plan;
use rekindle_engine::snapshot::Settled;
use rekindle_group::{
    Action, Ask, End, Ending, Epoch, From, Goal, Incarnation, Last, Local, Machine, Number, Order, Outcome, Part,
    Pending, Progress, Rank, Stored, Then,
};
use rekindle_os::fence::Fence;
use rekindle_os::spawn::Ended;
use rekindle_os::{durable, process};
use rekindle_store::manifest::Reason;
use rekindle_store::{Image, ImageId, JobFolder, LATEST, gc, nth_newest};

/// How long leaving the group may take; then the others wait for the lease to expire.
const LEAVE: Duration = Duration::from_secs(3);

/// How often in the time of a lease its renewal is looked at.
const LOOKS: u32 = 8;

/// What a member of a group is.
#[derive(Debug)]
pub(crate) struct Membered {
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
}

/// What this machine remembers of the group: `group.json` in the job's folder.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Memory {
    /// The last epoch that ran here.
    epoch: u64,
    /// The last membership,
    #[serde(default)]
    membership: Option<u64>,
    /// and the boot of the machine in which it began.
    #[serde(default)]
    boot: String,
    /// Group images before this one are not used: the job has started from the beginning since.
    #[serde(default)]
    floor: u64,
}

impl Memory {
    fn file(folder: &JobFolder) -> PathBuf {
        folder.path().join("group.json")
    }

    /// Without the file, no epoch has run here.
    fn read(path: &Path) -> std::io::Result<Memory> {
        match std::fs::read(path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Memory::default()),
            Err(error) => Err(error),
        }
    }

    /// The membership of a supervisor that was killed. We have the lock of the job's folder, and the kernel ends a job
    /// with its supervisor. After a restart of the machine, or on another one, nothing is certain: the store may be
    /// shared.
    fn former(&self) -> Option<Incarnation> {
        let boot = process::boot_id().ok().filter(|boot| !boot.is_empty() && *boot == self.boot);
        boot.and(self.membership).map(Incarnation)
    }

    fn write(&self, path: &Path) -> std::io::Result<()> {
        durable::replace_file(path, &serde_json::to_vec(self)?, 0o600)
    }
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
    requests: Requests,
    /// The group, for those who look at it from outside.
    seen: Seen,
    /// The coordinator is another one now: once nothing of the job is left, the member begins again.
    has_moved: bool,
    /// When to look at the lease again.
    looks: Instant,
}

/// What users want of the group, and what it does about that.
struct Requests {
    /// A stop that was requested here, for the exit code.
    stop: Option<Stop>,
    /// Requests that clients of this machine wait for.
    pending: Vec<Pending>,
    /// Whether the next start is one that was requested, and no restart.
    is_start_requested: bool,
    /// What the state machine knows of the group.
    standing: Standing,
}

impl Member {
    /// Connects to the coordinator.
    pub(super) fn start(setup: &Setup, sender: &std::sync::mpsc::Sender<Message>) -> Result<Option<Member>, Error> {
        let Some(group) = &setup.group else { return Ok(None) };
        let io = |what| move |source| Error::Io { what, source };
        let memory = Memory::read(&Memory::file(&setup.folder)).map_err(io("reading group.json"))?;
        let sender = sender.clone();
        let tell = move |told| drop(sender.send(Message::Group(Box::new(News::Told(told)))));
        let identity = Identity { former: memory.former(), ..group.identity.clone() };
        let session = Session::start(group.coordinator.clone(), identity, tell)
            .map_err(io("starting the thread for the group"))?;
        Ok(Some(Member {
            rank: group.options.rank,
            machine: Machine::new(group.options.clone(), Epoch(memory.epoch))
                .starting(group.is_fresh, Number(memory.floor)),
            session,
            membership: None,
            nodes: Arc::default(),
            epoch: (Epoch(memory.epoch), Incarnation(0)),
            network: None,
            threads: Threads::default(),
            parts: BTreeMap::new(),
            requests: Requests {
                stop: None,
                pending: Vec::new(),
                is_start_requested: false,
                standing: Standing::Usual,
            },
            seen: Seen::new(group.identity.group.clone(), group.options.rank, group.options.size),
            has_moved: false,
            looks: Instant::now(),
        }))
    }

    /// The network of the present epoch.
    pub(super) fn network(&self) -> Option<Arc<Plan>> {
        self.network.clone()
    }

    /// The fence of a job that starts now. The supervisor ends the job before, if it can.
    pub(super) fn fence(&self, options: &rekindle_group::Options) -> std::io::Result<Arc<Fence>> {
        let over = || std::io::Error::other("it is no member of the group");
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
        self.machine.deadline().into_iter().chain([self.looks]).min()
    }

    /// The group image that this image is a part of.
    fn number_of(&self, image: ImageId) -> Option<Number> {
        self.parts.iter().find(|(_, id)| **id == image).map(|(number, _)| *number)
    }

    // ---- requests ----

    /// Whether a client's request is served, as far as is known here; otherwise the reason.
    pub(super) fn admits(&self, wish: Wish, machine: &state::Machine<'_>) -> Result<(), String> {
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
        rekindle_group::admits(view, &ask)
    }

    pub(super) fn admits_rewind(&self, image: ImageId) -> Result<(), String> {
        let number = self.number_of(image);
        let number = number.ok_or_else(|| format!("image {image} is not a part of a group image that can be used"))?;
        rekindle_group::admits(self.machine.view(), &Ask::Rewind(number))
    }

    /// The image of this machine that a user names: by a group image, by -N for the Nth newest of them, or by its own
    /// name, which is returned as it is.
    pub(super) fn named(&self, to: &str) -> Result<String, String> {
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
        rekindle_group::admits(self.machine.view(), &Ask::Rewind(number))?;
        let image =
            self.parts.get(&number).ok_or_else(|| format!("this machine does not have its part of {number}"))?;
        Ok(image.to_string())
    }

    /// This machine's parts of the group images that can be used, the newest first.
    pub(super) fn usable(&self) -> Vec<ImageId> {
        rekindle_group::usable(self.machine.view())
            .iter()
            .filter_map(|number| self.parts.get(number).copied())
            .collect()
    }

    /// The requests that are not decided yet.
    pub(super) fn open(&self) -> Open {
        let any = |is: fn(&Ask) -> bool| self.requests.pending.iter().any(|pending| is(pending.ask()));
        Open {
            snapshot: any(|ask| *ask == Ask::Snapshot),
            suspend: any(|ask| *ask == Ask::Suspend),
            start: any(|ask| matches!(ask, Ask::Resume | Ask::Rewind(_))),
        }
    }

    /// Whether a group snapshot is in progress here.
    pub(super) fn is_in_snapshot(&self) -> bool {
        self.threads.orders.is_some()
    }

    /// Why the newest group image may be lost, if another machine has not stored its part.
    pub(super) fn not_stored_elsewhere(&self) -> Option<String> {
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
    fn standing(&self) -> Standing {
        let view = self.machine.view();
        let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else { return Standing::Usual };
        match plan.then {
            Then::Stop { .. } => Standing::Stopping,
            _ if rekindle_group::is_suspended(plan) => {
                Standing::Suspended(match rekindle_group::continues_from(view) {
                    From::Beginning => StartPoint::Cold,
                    From::Image(number) => {
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
    fn ask(&mut self, event: &Event, grace: Duration, now: Instant) -> Option<Ask> {
        let requeue = |stop: &Stop| *stop == Stop::Requeue;
        Some(match event {
            Event::SnapshotNow(reason) if *reason != Reason::Group => Ask::Snapshot,
            Event::Suspend => Ask::Suspend,
            Event::Resume => Ask::Resume,
            Event::Rewind { image } => Ask::Rewind(self.number_of(*image)?),
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

/// News for the member.
pub(super) enum News {
    /// From the coordinator.
    Told(Told),
    /// From the thread that takes a snapshot.
    Local(Local),
}

impl Owner<'_> {
    /// Whether a group decides about this job.
    pub(super) fn is_in_group(&self) -> bool {
        self.group.is_some()
    }

    /// A request becomes one to the group. Returns the event if it is none.
    pub(super) fn ask_group(&mut self, event: Event) -> Option<Event> {
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
        if let Err(why) = rekindle_group::admits(member.machine.view(), &ask) {
            tracing::warn!("the group does not serve the request: {why}");
        }
        let membership = member.membership.as_ref().map(Membership::incarnation);
        self.group_step(rekindle_group::Event::Asked(ask.clone()));
        let Some(member) = &mut self.group else { return None };
        match (member.machine.asked().filter(|asked| asked.ask == ask), membership) {
            (Some(asked), Some(membership)) => member.requests.pending.push(Pending::new(asked.clone(), membership)),
            _ => self.not_done(&ask, "the group has another request to serve first: try again"),
        }
        None
    }

    /// Answers the clients whose requests are decided.
    fn answer_requests(&mut self) {
        let Some(member) = &mut self.group else { return };
        let machine = &member.machine;
        let membership = member.membership.as_ref().map(Membership::incarnation);
        let mut failed = Vec::new();
        let before = member.requests.pending.len();
        member.requests.pending.retain_mut(|pending| match pending.look(machine.view(), membership, machine.asked()) {
            Outcome::Open => true,
            Outcome::Done => false,
            Outcome::Failed { why } => {
                failed.push((pending.ask().clone(), why));
                false
            }
        });
        let is_news = member.requests.pending.len() < before;
        for (ask, why) in failed {
            self.not_done(&ask, &why);
        }
        if is_news {
            self.settle();
        }
    }

    fn not_done(&mut self, ask: &Ask, why: &str) {
        tracing::warn!("the group has not done what was requested: {why}");
        let control = &mut self.clients.control;
        match ask {
            Ask::Snapshot => control.not_begun(why),
            Ask::Suspend => control.not_suspended(why),
            Ask::Resume | Ask::Rewind(_) => control.not_started(why),
            Ask::Stop { .. } | Ask::StopNow { .. } => {}
        }
    }

    /// Tells the state machine what the group does. Before the orders: they are carried out in that state.
    fn note_standing(&mut self) {
        let Some(member) = &mut self.group else { return };
        let standing = member.standing();
        if member.requests.standing != standing {
            member.requests.standing = standing;
            self.step(Event::Group(standing));
        }
    }

    pub(super) fn group_news(&mut self, news: News) {
        match news {
            News::Told(told) => self.group_told(told),
            News::Local(local) => self.group_step(rekindle_group::Event::Local(local)),
        }
    }

    fn group_told(&mut self, told: Told) {
        let Some(member) = &mut self.group else { return };
        let event = match told {
            Told::Group { view, nodes } => {
                let news = member.seen.changed(&view, &nodes);
                member.nodes = nodes;
                self.group_is_seen(news);
                rekindle_group::Event::View(view)
            }
            Told::Joined(membership) => {
                let incarnation = membership.incarnation();
                // Without it, the next supervisor waits for the lease to expire.
                if let Err(error) = remember(self.setup, member.epoch.0, Some(&membership), member.machine.floor()) {
                    tracing::warn!("cannot record the membership in the group: {error}");
                }
                member.membership = Some(membership);
                rekindle_group::Event::Session(incarnation)
            }
            Told::Lost(incarnation) => {
                tracing::error!("this machine is no longer a member of the group: its lease has expired");
                member.membership = member.membership.take().filter(|it| it.incarnation() != incarnation);
                let machine = member.seen.us();
                self.tell(What::GroupMemberLost { machine });
                rekindle_group::Event::SessionLost
            }
            Told::Wrote(answer) => rekindle_group::Event::Wrote(answer),
            Told::Away { why } => {
                tracing::warn!(
                    "the coordinator does not answer: {why}. The job is ended if it does not answer before the lease \
                     expires"
                );
                member.seen.away(Some(why));
                return self.publish_group();
            }
            Told::Back => {
                tracing::info!("the coordinator answers again");
                member.seen.away(None);
                return self.publish_group();
            }
            Told::Moved => {
                tracing::warn!("the group's coordinator is another one now: this machine joins again");
                member.has_moved = true;
                member.seen.afresh();
                self.group_step(rekindle_group::Event::SessionLost);
                return self.begin_afresh();
            }
            Told::Missing { why } => {
                let why = format!("the group's coordinator did not answer in time: {why}");
                return self.step(Event::Over(finish(End::Missing { why }, None)));
            }
            Told::Failed { why } => {
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
        let is_idle = *self.machine.state() == State::Idle;
        let (Some(member), Some(group)) = (&mut self.group, &self.setup.group) else { return };
        if !member.has_moved || !is_idle || member.threads.orders.is_some() {
            return;
        }
        member.has_moved = false;
        member.machine = Machine::new(group.options.clone(), member.epoch.0);
        member.nodes = Arc::default();
        member.session.afresh(member.membership.take().map(|membership| membership.incarnation()));
    }

    /// Ends the run if another member has settings that must be equal. A member whose job runs is not the wrong one.
    fn disagrees(&mut self) -> bool {
        let (Some(member), Some(group)) = (&self.group, &self.setup.group) else { return false };
        if *self.machine.state() != State::Idle {
            return false;
        }
        let own = &group.identity;
        let others = member.nodes.iter().filter(|(rank, _)| **rank != own.rank);
        let found = others.filter_map(|(rank, node)| Some((rank, node, own.node.disagrees(node)?))).next();
        let Some((rank, node, disagreement)) = found else { return false };
        let why = format!(
            "{rank} of the group, on {}, does not fit: {disagreement}. Make them equal and start the group again",
            node.host
        );
        self.step(Event::Over(Finish::Impossible { why, obstacle: Obstacle::Configuration }));
        true
    }

    /// Wakes the member when it is due.
    pub(super) fn check_group(&mut self) {
        self.begin_afresh();
        let now = Instant::now();
        if self.group.as_ref().and_then(Member::deadline).is_some_and(|at| at <= now) {
            let lease = self.setup.group.as_ref().map_or(LEAVE, |group| group.options.lease);
            self.group.iter_mut().for_each(|member| member.looks = now + lease / LOOKS);
            self.group_step(rekindle_group::Event::Tick);
            self.publish_group_now();
        }
    }

    fn group_step(&mut self, event: rekindle_group::Event) {
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

    /// Reports to the group.
    fn report_to_group(&mut self, local: Local) {
        self.group_step(rekindle_group::Event::Local(local));
    }

    // ---- orders ----

    fn ordered(&mut self, order: Order) {
        tracing::debug!(?order, "the group orders");
        match order {
            Order::List => self.list_parts(),
            Order::Start { epoch, origin, from, part } => self.start_epoch(epoch, origin, from, part.as_ref()),
            Order::Plug => {
                let go = self.group.as_mut().and_then(|member| member.threads.go.take());
                match (self.life.job(), go) {
                    // It plugs its cable in itself.
                    (None, Some(go)) => drop(go.send(())),
                    _ => self.plug(),
                }
            }
            Order::Prepare(number) => self.prepare_part(number),
            Order::Pull(_) => self.give(Word::Pull),
            Order::Dump(_) => self.give(Word::Dump),
            Order::Resume(_) => self.give(Word::Keep(Settled::RunOn)),
            Order::Store(_) => self.give(Word::Keep(Settled::End)),
            Order::Abort(number) => {
                let in_progress = self.group.as_ref().and_then(|member| member.threads.orders.as_ref());
                match in_progress.is_some_and(|orders| orders.number == number) {
                    // The thread ends, and that is reported.
                    true => self.give(Word::Abort),
                    false => self.report_to_group(Local::Aborted(number)),
                }
            }
            Order::Kill => self.step(Event::End),
            Order::Forget(number) => self.forget_part(number),
            Order::Finish(end) => {
                let stop = self.group.as_ref().and_then(|member| member.requests.stop);
                self.step(Event::Over(finish(end, stop)));
            }
        }
    }

    fn plug(&self) {
        if let Some(cable) = self.life.job().and_then(|job| job.world.cable())
            && let Err(error) = cable.plug()
        {
            tracing::error!("the job does not reach the other machines: {}", chain(&error));
        }
    }

    /// What the job that is started next waits for before it runs, if it is restored.
    pub(super) fn group_start_signal(&mut self) -> Option<StartSignal> {
        let (sender, member) = (self.sender.clone(), self.group.as_mut()?);
        let ready = move || drop(sender.send(Message::Group(Box::new(News::Local(Local::Started)))));
        let (signal, go) = StartSignal::new(ready);
        member.threads.go = Some(go);
        Some(signal)
    }

    fn give(&mut self, word: Word) {
        if let Some(orders) = self.group.as_mut().and_then(|member| member.threads.orders.as_mut()) {
            orders.give(word);
        }
    }

    fn list_parts(&mut self) {
        let copies = match self.setup.folder.copies() {
            Ok(copies) => copies,
            Err(error) => {
                // Without the list this machine cannot join.
                let why = format!("the images cannot be read: {}", chain(&error));
                return self.step(Event::Over(Finish::Impossible { why, obstacle: Obstacle::Machine }));
            }
        };
        let mut listed: BTreeMap<Number, Progress> = BTreeMap::new();
        let Some(member) = &mut self.group else { return };
        member.parts.clear();
        for image in copies.iter().filter(|image| image.is_good()) {
            let Some((number, progress)) = progress(image) else { continue };
            member.parts.insert(number, image.id);
            // Of two copies the one in the store counts.
            if progress.stored == Stored::Durable || !listed.contains_key(&number) {
                listed.insert(number, progress);
            }
        }
        self.report_to_group(Local::Parts(listed));
    }

    fn start_epoch(&mut self, epoch: Epoch, origin: Incarnation, from: From, part: Option<&Part>) {
        let setup = Arc::clone(self.setup);
        let (Some(member), Some(group)) = (&mut self.group, &setup.group) else { return };
        let written = remember(&setup, epoch, member.membership.as_ref(), member.machine.floor())
            .map_err(|error| error.to_string());
        let point = match part.map(|part| part.image.parse::<ImageId>()) {
            None => Ok(StartPoint::Cold),
            Some(Ok(image)) => Ok(StartPoint::Image(image)),
            Some(Err(error)) => Err(error.to_string()),
        };
        let point = match written.and(point) {
            Ok(point) => point,
            Err(why) => return self.report_to_group(Local::Ended(Ending::NotStarted { why })),
        };
        member.epoch = (epoch, origin);
        member.network = Some(Arc::new(group.layout.plan(origin, epoch, &member.nodes)));
        tracing::info!("the group starts from {from} ({epoch})");
        let is_requested = std::mem::take(&mut member.requests.is_start_requested);
        if self.life.number() > 0 && !is_requested {
            self.reporting.published.restarts += 1;
            self.tell(What::Restarting { image: image_of(point), after_us: 0 });
        }
        self.step(Event::Launch(point));
    }

    fn prepare_part(&mut self, number: Number) {
        let refused = match self.machine.state() {
            State::Running(_) if self.machine.held().is_some() => Some("the job blocks snapshots now".to_owned()),
            State::Running(_) => None,
            state => Some(format!("the job is {}", state.name())),
        };
        let sender = self.sender.clone();
        let tell = move |local| drop(sender.send(Message::Group(Box::new(News::Local(local)))));
        let (Some(member), Some(group)) = (&mut self.group, &self.setup.group) else { return };
        let (rank, size) = (group.options.rank, group.options.size);
        let turn = match refused {
            Some(why) => Err(why),
            None => Turn::new(number, member.epoch, member.exchange(rank, size), tell)
                .map_err(|error| format!("no random number: {error}")),
        };
        match turn {
            Ok((turn, orders)) => {
                (member.threads.turn, member.threads.orders) = (Some(turn), Some(orders));
                self.step(Event::SnapshotNow(Reason::Group));
            }
            Err(why) => self.report_to_group(Local::Refused(number, why)),
        }
    }

    fn forget_part(&mut self, number: Number) {
        let Some(image) = self.group.as_mut().and_then(|member| member.parts.remove(&number)) else { return };
        let (setup, bounds) = (Arc::clone(self.setup), self.setup.config.store.copies);
        self.spawn("forget", move || {
            for slot in setup.images.staging.iter().flat_map(|area| area.slots()) {
                if slot.image().is_some_and(|staged| staged.id == image) {
                    setup.folder.drop_links(&slot);
                    if let Err(error) = slot.empty() {
                        tracing::warn!("cannot free memory of image {image}: {}", chain(&error));
                    }
                }
            }
            match setup.folder.remove(&setup.lock, &image) {
                Ok(()) | Err(rekindle_store::Error::UnknownImage { .. }) => {}
                Err(error) => tracing::warn!("cannot remove image {image}: {}", chain(&error)),
            }
            if let Err(error) = gc::sweep_now(&setup.folder, &setup.lock, bounds) {
                tracing::warn!("unneeded content was not swept: {}", chain(&error));
            }
        });
    }

    // ---- reports ----

    pub(super) fn group_started(&mut self) {
        self.report_to_group(Local::Started);
    }

    pub(super) fn group_not_started(&mut self, why: String) {
        self.report_to_group(Local::Ended(Ending::NotStarted { why }));
    }

    /// The job has ended, and this was decided about it. It is reported once nothing of it is left, so not in the middle
    /// of a snapshot.
    pub(super) fn group_ended(&mut self, ended: Ended, verdict: Option<Verdict>) {
        if !matches!(self.machine.state(), State::Idle | State::Suspended { .. }) {
            return;
        }
        let last = Some(match (ended, &verdict) {
            (_, Some(Verdict::Died(signal))) => Last::Signal(*signal),
            (Ended::Exit(code), _) => Last::Exit(code),
            (Ended::Signal(signal), _) => Last::Signal(signal),
        });
        let never = policy::never_again(ended, &self.setup.config.restart).filter(|_| verdict.is_none());
        let ending = match (ended, verdict, never) {
            (Ended::Exit(0), None, _) => Ending::Completed,
            (_, Some(Verdict::GiveUp { why }), _) | (_, None, Some(why)) => Ending::GivenUp { why, last },
            (ended, None, None) => Ending::Failed { why: format!("the job ended: {ended}"), last },
            (_, Some(verdict), _) => {
                // The request comes first: the group must not restart the job otherwise.
                match &verdict {
                    Verdict::Stop => self.step(Event::Stop(Stop::Requeue)),
                    Verdict::Rewind(image) => self.step(Event::Rewind { image: *image }),
                    _ => {}
                }
                Ending::Failed { why: verdict.in_words(), last }
            }
        };
        self.report_to_group(Local::Ended(ending));
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
        self.report_to_group(Local::Refused(orders.number, why));
    }

    /// An image was stored, or was not.
    pub(super) fn group_persisted(&mut self, image: ImageId, stored: bool) {
        let Some(number) = self.group.as_ref().and_then(|member| member.number_of(image)) else { return };
        self.report_to_group(if stored { Local::Stored(number) } else { Local::NotStored(number) });
        self.look_for_lost_parts();
    }

    /// Reports parts that exist no more: the slot of one that could not be stored is used again.
    fn look_for_lost_parts(&mut self) {
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

    /// Leaves the group, so that the others need not wait.
    pub(super) fn leave_group(&mut self, messages: &mpsc::Receiver<Message>) {
        if let Some(member) = self.group.take() {
            member.session.leave(LEAVE);
        }
        let Some(group) = &self.setup.group else { return };
        if let Some(own) = &group.own {
            let is_stop = |message| matches!(message, Message::Signal(signal) if STOPS.contains(&signal));
            own.see_off(&group.identity.group, group.options.limits.store, || messages.try_iter().any(is_stop));
        }
    }
}

/// Records what the next supervisor must know.
fn remember(setup: &Setup, epoch: Epoch, membership: Option<&Membership>, floor: Number) -> std::io::Result<()> {
    let membership = membership.map(|membership| membership.incarnation().0);
    let memory = Memory { epoch: epoch.0, membership, boot: process::boot_id().unwrap_or_default(), floor: floor.0 };
    memory.write(&Memory::file(&setup.folder))
}

/// The group image that this image is a part of.
fn progress(image: &Image) -> Option<(Number, Progress)> {
    let part = image.manifest()?.group.as_ref()?;
    let stored = if image.is_staged() { Stored::Staged } else { Stored::Durable };
    let progress = Progress {
        part: Part { image: image.id.to_string(), digest: part.mark.clone() },
        epoch: Epoch(part.epoch),
        origin: Incarnation(part.origin),
        stored,
    };
    Some((Number(part.number), progress))
}

/// The end of this run; `stop` was requested here.
fn finish(end: End, stop: Option<Stop>) -> Finish {
    match end {
        End::Completed => Finish::Completed,
        End::Stopped { requeue: true } => Finish::Stopped(Stop::Requeue),
        End::Stopped { requeue: false } => {
            Finish::Stopped(stop.filter(|stop| *stop != Stop::Requeue).unwrap_or(Stop::Signal(SIGTERM)))
        }
        End::Missing { why } => {
            tracing::error!("the group's run ends, to be queued again: {why}");
            Finish::Stopped(Stop::Requeue)
        }
        End::Failed { why, last } => {
            let last = last.map(|last| match last {
                Last::Exit(code) => Ended::Exit(code),
                Last::Signal(signal) => Ended::Signal(signal),
            });
            Finish::Failed { why, last }
        }
        End::Refused { why } => Finish::Impossible { why, obstacle: Obstacle::Configuration },
    }
}
