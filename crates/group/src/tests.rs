//! The protocol step by step, without faults of the network: each write is answered at once, each order carried out.

mod failures;
mod requests;
mod snapshots;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::documents::{
    Ask, Blame, End, Ending, Goal, GroupImage, Last, Part, Plan, Progress, Replica, Replicated, Report, StartFrom,
    State, Stored, Versioned,
};
use crate::events::{Action, Answer, Event, Local, Order, Write};
use crate::ids::{Epoch, Incarnation, Number, Rank};
use crate::machine::Machine;
use crate::options::ColdStart;
use crate::reasons::{Failure, Mismatch, Missing, Phase, Reason, RequestRefusal, SnapshotRefusal, StartFailure};
use crate::simulator::coordinator::{Coordinator, TTL};
use crate::simulator::node::options;

/// A group, and the orders that each member got.
struct Group {
    coordinator: Coordinator,
    machines: Vec<Machine>,
    orders: Vec<Vec<Order>>,
    parts: Vec<BTreeMap<Number, Progress>>,
    now: Instant,
    /// What the coordinator refuses to write.
    refuses: fn(&Write) -> bool,
}

impl Group {
    /// All have joined, and the time of leases that a coordinator may have forgotten is over.
    fn new(size: u32) -> Group {
        let mut group = Group::with(size, &|_| BTreeMap::new(), Epoch::default());
        group.wait(TTL);
        group
    }

    fn with(size: u32, parts: &dyn Fn(u32) -> BTreeMap<Number, Progress>, epoch: Epoch) -> Group {
        let mut group = Group::unjoined(size, parts, epoch);
        (0..group.machines.len()).for_each(|at| group.join(at));
        group
    }

    /// The same with this `restart.cold-start`.
    fn cold(size: u32, parts: &dyn Fn(u32) -> BTreeMap<Number, Progress>, allowed: ColdStart) -> Group {
        let mut group = Group::unjoined(size, parts, Epoch::default());
        group.machines = (0..size).map(|rank| machine(rank, size, allowed)).collect();
        (0..group.machines.len()).for_each(|at| group.join(at));
        group.wait(TTL);
        group
    }

    fn unjoined(size: u32, parts: &dyn Fn(u32) -> BTreeMap<Number, Progress>, epoch: Epoch) -> Group {
        let count = usize::try_from(size).unwrap();
        Group {
            coordinator: Coordinator::new(false, None),
            machines: (0..size).map(|rank| Machine::new(options(Rank(rank), size), epoch)).collect(),
            orders: vec![Vec::new(); count],
            parts: (0..size).map(parts).collect(),
            now: Instant::now(),
            refuses: |_| false,
        }
    }

    fn join(&mut self, at: usize) {
        let session = self.coordinator.grant(self.now);
        self.tell(at, Event::Session(session));
        self.tell(at, Event::Sure(self.now + TTL));
        self.settle();
    }

    /// Its supervisor, or another one in its place, has lost its membership and joins again.
    fn comes_back(&mut self, at: usize) {
        self.leaves(at);
        self.tell(at, Event::SessionLost);
        self.settle();
        self.join(at);
    }

    /// Another supervisor takes its place.
    fn is_replaced(&mut self, at: usize, by: Machine) {
        self.leaves(at);
        self.machines[at] = by;
        self.settle();
        self.join(at);
    }

    /// Its membership ends.
    fn leaves(&mut self, at: usize) {
        let rank = Rank(u32::try_from(at).unwrap());
        let former = self.coordinator.view.members.get(&rank).map(|report| report.incarnation);
        former.into_iter().for_each(|former| self.coordinator.revoke(former));
    }

    fn tell(&mut self, at: usize, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.machines[at].step(event.clone(), self.now) {
                match action {
                    Action::Write(write) => events.push(Event::Wrote(self.write(at, write))),
                    Action::Do(order) => {
                        if order == Order::List {
                            events.push(Event::Local(Local::Parts(self.parts[at].clone())));
                        }
                        self.orders[at].push(order);
                    }
                }
            }
        }
    }

    fn write(&mut self, at: usize, write: Write) -> Answer {
        if (self.refuses)(&write) {
            return Answer::Conflict;
        }
        let leader = self.coordinator.view.leader;
        let who = self.machines[at].report().map(|report| report.incarnation).or(leader).unwrap();
        self.coordinator.write(Rank(u32::try_from(at).unwrap()), who, write)
    }

    /// Shows everybody the state of the coordinator until nobody has anything to say.
    fn settle(&mut self) {
        loop {
            let before = self.coordinator.view.revision;
            for at in 0..self.machines.len() {
                let view = Arc::clone(&self.coordinator.view);
                self.tell(at, Event::View(view));
            }
            if self.coordinator.view.revision == before {
                return;
            }
        }
    }

    fn all(&mut self, local: &dyn Fn(u32) -> Local) {
        for at in 0..self.machines.len() {
            self.tell(at, Event::Local(local(u32::try_from(at).unwrap())));
        }
        self.settle();
    }

    /// Time passes; the leases are renewed.
    fn wait(&mut self, time: Duration) {
        self.now += time;
        for at in 0..self.machines.len() {
            self.tell(at, Event::Sure(self.now + TTL));
            self.tell(at, Event::Tick);
        }
        self.settle();
    }

    fn goal(&self) -> Goal {
        self.coordinator.view.plan.as_ref().unwrap().value.goal.clone()
    }

    fn plan(&self) -> &Plan {
        &self.coordinator.view.plan.as_ref().unwrap().value
    }

    /// What was ordered to end ends.
    fn killed(&mut self) {
        self.all(&|_| Local::Ended(Ending::failed("killed", None)));
    }

    fn last(&self, at: usize) -> Option<&Order> {
        self.orders[at].last()
    }

    fn starts(&mut self) {
        self.all(&|_| Local::Started);
        assert_eq!(self.goal(), Goal::Run);
    }

    /// Takes a snapshot up to the decision.
    fn dumps(&mut self, number: Number) {
        self.all(&|_| Local::Locked(number));
        assert_eq!(self.goal(), Goal::Pull(number));
        self.all(&|_| Local::Quiet(number));
        assert_eq!(self.goal(), Goal::Dump(number));
        self.all(&|rank| Local::Dumped(number, part(rank, number)));
    }
}

/// A supervisor that has started nothing, with this `restart.cold-start`.
fn machine(rank: u32, size: u32, allowed: ColdStart) -> Machine {
    let mut options = options(Rank(rank), size);
    options.restart.cold_start = allowed;
    Machine::new(options, Epoch::default())
}

fn part(rank: u32, number: Number) -> Part {
    Part { image: format!("{rank}-{}", number.0), digest: "x".into() }
}

fn durable(rank: u32, numbers: &[u64]) -> BTreeMap<Number, Progress> {
    let of = |number| {
        let number = Number(number);
        let (part, epoch, stored) = (part(rank, number), Epoch(3), Stored::Durable);
        (number, Progress { part, epoch, origin: OLD, stored, size: 0, replicated: Replicated::No })
    };
    numbers.iter().map(|number| of(*number)).collect()
}

const ONE: Number = Number(1);
/// The origin of the plan before the coordinator lost its data.
const OLD: Incarnation = Incarnation(77);
const INTERVAL: Duration = Duration::from_secs(15);

#[test]
fn a_group_starts_together_and_takes_a_snapshot_that_is_committed_when_all_have_stored_it() {
    let mut group = Group::new(2);
    for at in 0..2 {
        assert_eq!(
            group.last(at),
            Some(&Order::Start { epoch: Epoch(1), origin: Incarnation(1), from: StartFrom::Beginning, part: None })
        );
    }
    group.tell(0, Event::Local(Local::Started));
    group.settle();
    assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning), "one is missing");
    group.tell(1, Event::Local(Local::Started));
    group.settle();
    assert!((0..2).all(|at| group.last(at) == Some(&Order::Plug)));

    group.wait(INTERVAL);
    assert!((0..2).all(|at| group.last(at) == Some(&Order::Prepare(ONE))));
    group.dumps(ONE);
    assert!((0..2).all(|at| group.last(at) == Some(&Order::Resume(ONE))));
    assert_eq!(group.goal(), Goal::Run);
    let committed = |group: &Group| group.coordinator.view.images[&ONE].value.committed;
    group.tell(0, Event::Local(Local::Stored(ONE)));
    group.settle();
    assert!(!committed(&group));
    group.tell(1, Event::Local(Local::Stored(ONE)));
    group.settle();
    assert!(committed(&group));
}

#[test]
fn one_that_cannot_aborts_the_snapshot_for_all() {
    let mut group = Group::new(3);
    group.starts();
    group.wait(INTERVAL);
    group.tell(0, Event::Local(Local::Locked(ONE)));
    group.tell(1, Event::Local(Local::refused(ONE, "no memory")));
    group.settle();
    assert_eq!(group.goal(), Goal::Abort { number: ONE, why: refused(1, "no memory") });
    assert_eq!(group.last(0), Some(&Order::Abort(ONE)));
    assert_eq!(group.last(1), Some(&Order::Prepare(ONE)), "it has undone it already");
    group.tell(0, Event::Local(Local::Aborted(ONE)));
    group.tell(2, Event::Local(Local::Aborted(ONE)));
    group.settle();
    assert_eq!((group.goal(), group.coordinator.view.images.len()), (Goal::Run, 0));
    group.wait(Duration::from_secs(4));
    assert_eq!(group.goal(), Goal::Prepare(Number(2)), "a number is not used again");
}

#[test]
fn no_cable_is_pulled_before_all_are_locked() {
    let mut group = Group::new(3);
    group.starts();
    group.wait(INTERVAL);
    group.tell(0, Event::Local(Local::Locked(ONE)));
    group.tell(2, Event::Local(Local::Locked(ONE)));
    group.settle();
    assert_eq!(group.goal(), Goal::Prepare(ONE));
    assert!((0..3).all(|at| group.last(at) == Some(&Order::Prepare(ONE))), "rank 1 may need data from the others");
    group.tell(1, Event::Local(Local::Locked(ONE)));
    group.settle();
    assert!((0..3).all(|at| group.last(at) == Some(&Order::Pull(ONE))));

    // One whose cable does not come out aborts it for all.
    group.tell(0, Event::Local(Local::Quiet(ONE)));
    group.tell(1, Event::Local(Local::Quiet(ONE)));
    group.settle();
    assert_eq!(group.goal(), Goal::Pull(ONE));
    group.wait(options(Rank(0), 3).limits.prepare);
    assert_eq!(
        group.goal(),
        Goal::Abort { number: ONE, why: Reason::TimedOut { phase: Phase::Disconnect, ranks: vec![Rank(2)] } }
    );
    assert!((0..3).all(|at| group.last(at) == Some(&Order::Abort(ONE))));
    group.all(&|_| Local::Aborted(ONE));
    assert_eq!(group.goal(), Goal::Run);
}

#[test]
fn the_death_of_one_takes_all_back_to_the_newest_group_image() {
    let mut group = Group::new(2);
    group.starts();
    group.wait(INTERVAL);
    group.dumps(ONE);
    group.tell(1, Event::Local(Local::Ended(Ending::failed("killed by signal 9", None))));
    group.settle();
    assert_eq!(group.last(0), Some(&Order::Kill));
    assert!(matches!(group.goal(), Goal::Gather { why } if why == job_failed(1, "killed by signal 9")));
    group.tell(0, Event::Local(Local::Ended(Ending::failed("killed", None))));
    group.settle();
    for at in 0..2 {
        let part = Some(part(u32::try_from(at).unwrap(), ONE));
        assert_eq!(
            group.last(at),
            Some(&Order::Start { epoch: Epoch(2), origin: Incarnation(1), from: StartFrom::Image(ONE), part })
        );
    }
}

#[test]
fn a_job_that_must_never_begin_again_is_given_up_if_there_is_no_image() {
    let begun = || {
        let mut group = Group::cold(2, &|_| BTreeMap::new(), ColdStart::Never);
        // The first start is no restart.
        group.starts();
        group
    };
    let dies = |group: &mut Group| {
        let last = Some(Last::Signal(9));
        group.all(&|_| Local::Ended(Ending::failed("it died", last)));
    };
    let why = |last| Failure::NoImage { last };
    let mut group = begun();
    dies(&mut group);
    assert_eq!(
        group.goal(),
        Goal::End(End::Failed { why: why(job_failed(0, "it died")), last: Some(Last::Signal(9)) })
    );
    let mut group = begun();
    group.wait(INTERVAL);
    group.dumps(ONE);
    dies(&mut group);
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(ONE)));
    // The supervisor of one machine is new: the other one has started the job.
    let mut group = begun();
    group.is_replaced(0, machine(0, 2, ColdStart::Never));
    group.tell(1, Event::Local(Local::Ended(Ending::failed("killed", None))));
    group.settle();
    assert_eq!(group.goal(), Goal::End(End::Failed { why: why(Reason::MemberLost(Rank(0))), last: None }));
    // Another machine cannot start it: it has done nothing yet.
    let mut group = Group::cold(2, &|_| BTreeMap::new(), ColdStart::Never);
    group.tell(0, Event::Local(Local::Started));
    group.tell(1, Event::Local(not_started(Blame::Machine)));
    group.settle();
    group.tell(0, Event::Local(Local::Ended(Ending::failed("killed", None))));
    group.settle();
    assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning));
    // It dies by itself before the others are ready.
    group.tell(0, Event::Local(Local::Started));
    group.tell(0, Event::Local(Local::Ended(Ending::failed("it died", None))));
    group.settle();
    group.tell(1, Event::Local(Local::Ended(Ending::failed("killed", None))));
    group.wait(Duration::from_secs(1));
    assert_eq!(group.goal(), Goal::End(End::Failed { why: why(job_failed(0, "it died")), last: None }));
    // All are new: this is another run.
    let mut group = begun();
    (0..2).for_each(|rank| group.leaves(rank));
    (0..2).for_each(|rank| group.machines[rank] = machine(u32::try_from(rank).unwrap(), 2, ColdStart::Never));
    (0..2).for_each(|rank| group.join(rank));
    assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning));
}

#[test]
fn a_job_that_may_always_begin_again_does_not_need_its_images() {
    // Rank 1 has lost its part.
    let parts = |rank| durable(rank, if rank == 0 { &[7] } else { &[] });
    for (allowed, goal) in [
        (ColdStart::NoImages, Goal::End(End::Missing { why: Missing::Record(Number(7)) })),
        (ColdStart::Allow, Goal::Start(StartFrom::Beginning)),
    ] {
        assert_eq!(Group::cold(2, &parts, allowed).goal(), goal);
    }
    let mut group = Group::cold(2, &parts, ColdStart::Allow);
    group.starts();
    group.wait(INTERVAL);
    assert_eq!(group.goal(), Goal::Prepare(Number(8)), "a number is not used again");
}

#[test]
fn a_member_that_hears_nothing_ends_its_job_before_its_lease_runs_out() {
    let mut group = Group::new(2);
    group.starts();
    let fence = options(Rank(0), 2).fence;
    assert_eq!(group.machines[0].deadline(), Some(group.now + TTL - fence));
    group.now += TTL - fence;
    group.tell(0, Event::Tick);
    assert_eq!(group.last(0), Some(&Order::Kill));
    assert_eq!(group.machines[0].report().unwrap().state, State::Ending);
}

#[test]
fn a_job_that_does_not_end_is_not_waited_for_without_a_limit() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(0, Event::Local(Local::Ended(Ending::failed("it died", None))));
    group.settle();
    assert_eq!(group.last(1), Some(&Order::Kill));
    let wait = options(Rank(0), 2).limits.wait;
    group.wait(wait - Duration::from_secs(1));
    assert!(matches!(group.goal(), Goal::Gather { .. }));
    // A request is no reason to end it, nor is it waited for again.
    group.tell(0, Event::Asked(Ask::Snapshot));
    group.settle();
    assert!(matches!(group.goal(), Goal::Gather { .. }));
    assert!(group.machines[0].deadline().is_some_and(|at| at <= group.now + Duration::from_secs(1)));
    group.wait(Duration::from_secs(1));
    let end = End::Missing { why: Missing::JobEnd(vec![Rank(1)]) };
    assert_eq!(group.goal(), Goal::End(end.clone()));
    assert_eq!(group.last(0), Some(&Order::Finish(end.clone())));
    assert_eq!(group.last(1), Some(&Order::Kill), "it leaves once its job is over");
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    assert_eq!(group.last(1), Some(&Order::Finish(end)));
}

/// The job has started from group image 7 of 4 and 7.
fn restored() -> Group {
    let mut group = Group::with(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
    group.wait(TTL);
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
    group
}

/// Why a snapshot is aborted that this member refuses.
fn refused(rank: u32, why: &str) -> Reason {
    Reason::Refused { rank: Rank(rank), why: SnapshotRefusal::Other(why.into()) }
}

/// Why the group gathers after the end of the job of this member.
fn job_failed(rank: u32, why: &str) -> Reason {
    Reason::JobFailed { rank: Rank(rank), why: why.into() }
}

fn not_started(blame: Blame) -> Local {
    Local::Ended(Ending::not_started(StartFailure::Other("it does not start".into()), blame))
}

#[test]
fn a_machine_at_fault_does_not_count_against_a_group_image() {
    // Of the restores, and of one that is not ready in time.
    let of_limit = options(Rank(0), 2).limits.start;
    let hindered: [&dyn Fn(&mut Group); 2] =
        [&|group| group.tell(1, Event::Local(not_started(Blame::Machine))), &|group| group.wait(of_limit)];
    for hindered in hindered {
        let mut group = restored();
        for times in 1..=4 {
            hindered(&mut group);
            group.settle();
            group.all(&|_| Local::Ended(Ending::failed("killed", None)));
            assert!(matches!(group.goal(), Goal::Gather { .. }) || times == 1, "restarts have a pause");
            group.wait(Duration::from_secs(8));
            assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))), "try {times}");
            let plan = &group.coordinator.view.plan.as_ref().unwrap().value;
            assert_eq!((plan.in_a_row, plan.failures.len()), (times, 0));
        }
        // But there is a limit.
        for _ in 5..=8 {
            hindered(&mut group);
            group.settle();
            group.all(&|_| Local::Ended(Ending::failed("killed", None)));
            group.wait(Duration::from_secs(8));
        }
        let Goal::End(End::Failed { why, .. }) = group.goal() else { panic!("{:?}", group.goal()) };
        assert!(matches!(why, Failure::InARow { times: 8, .. }), "{why}");
    }
    // An image at fault is passed over.
    let mut group = restored();
    for _ in 0..2 {
        group.tell(1, Event::Local(not_started(Blame::Image)));
        group.settle();
        group.all(&|_| Local::Ended(Ending::failed("killed", None)));
        group.wait(Duration::from_secs(8));
    }
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(4))));
}

#[test]
fn an_image_that_does_not_fit_ends_the_run_and_is_not_passed_over() {
    let (rank, why) = (Rank(1), || StartFailure::Other("it does not start".into()));
    for (blame, end) in [
        (Blame::Misfit, End::Misfit { rank, why: why() }),
        (Blame::Configuration, End::Refused { why: Mismatch::Configuration { rank, why: why() } }),
    ] {
        let mut group = restored();
        group.tell(1, Event::Local(not_started(blame)));
        group.settle();
        assert_eq!(group.goal(), Goal::End(end.clone()));
        group.tell(0, Event::Local(Local::Ended(Ending::failed("killed", None))));
        group.settle();
        assert!((0..2).all(|at| group.last(at) == Some(&Order::Finish(end.clone()))));
    }
}

#[test]
fn a_member_that_has_not_seen_the_plan_is_not_waited_for_without_a_limit() {
    let wait = options(Rank(0), 2).limits.wait;
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Local(Local::Ended(Ending::failed("it died", None))));
    // From now on nothing that rank 1 reports is written, and its lease is renewed.
    group.refuses = |write| matches!(write, Write::Report(report) if report.incarnation == Incarnation(2));
    group.settle();
    group.tell(0, Event::Local(Local::Ended(Ending::failed("killed", None))));
    group.settle();
    group.wait(wait - Duration::from_secs(1));
    // Nobody has seen the plan that answers this request when it is written.
    group.tell(0, Event::Asked(Ask::Snapshot));
    group.settle();
    assert!(matches!(group.goal(), Goal::Gather { .. }));
    group.wait(Duration::from_secs(2));
    let end = End::Missing { why: Missing::Report(vec![Rank(1)]) };
    assert_eq!(group.goal(), Goal::End(end));
}

#[test]
fn a_request_after_a_long_wait_does_not_end_the_run() {
    // Rank 0 fetches its part for a long time.
    let parts = |rank: u32| {
        let mut parts = durable(rank, &[7]);
        if rank == 0 {
            parts.values_mut().for_each(|progress| progress.replicated = Replicated::Only);
        }
        parts
    };
    let mut group = Group::with(2, &parts, Epoch(3));
    group.wait(TTL);
    assert_eq!(group.last(0), Some(&Order::Fetch(Number(7))));
    for _ in 0..3 {
        group.wait(options(Rank(0), 2).limits.wait);
        group.tell(0, Event::Asked(Ask::Snapshot));
        group.settle();
        assert!(matches!(group.goal(), Goal::Gather { .. }), "{:?}", group.goal());
    }
    group.tell(0, Event::Local(Local::Fetched(Number(7))));
    group.settle();
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
}

#[test]
fn a_new_run_does_not_wait_without_a_limit_for_a_member_that_cannot_leave() {
    let wait = options(Rank(0), 3).limits.wait;
    let mut group = Group::new(3);
    group.starts();
    group.tell(1, Event::Asked(Ask::StopNow { requeue: true }));
    group.settle();
    // The job of rank 2 does not end. The others leave, and are started again.
    for at in 0..2 {
        group.tell(at, Event::Local(Local::Ended(Ending::failed("killed", None))));
        assert!(matches!(group.last(at), Some(Order::Finish(End::Stopped { requeue: true }))));
    }
    for at in 0..2 {
        let rank = Rank(u32::try_from(at).unwrap());
        group.machines[at] = Machine::new(options(rank, 3), Epoch(1));
        group.comes_back(at);
    }
    group.wait(wait - Duration::from_secs(1));
    let is_over = |group: &Group, at: usize| matches!(group.last(at), Some(Order::Finish(End::Missing { .. })));
    assert!((0..2).all(|at| !is_over(&group, at)));
    assert!((0..2).all(|at| group.machines[at].deadline().is_some_and(|due| due <= group.now + TTL)));
    group.wait(Duration::from_secs(1));
    let end = End::Missing { why: Missing::Departure(vec![Rank(2)]) };
    assert!((0..2).all(|at| group.last(at) == Some(&Order::Finish(end.clone()))));
}

#[test]
fn a_member_whose_rank_is_taken_is_not_woken_again_and_again_while_its_job_does_not_end() {
    let mut group = Group::new(2);
    group.starts();
    // Another supervisor takes its place.
    let (view, other) = (Arc::clone(&group.coordinator.view), group.coordinator.grant(group.now));
    let report = &view.members[&Rank(1)];
    group.coordinator.revoke(report.incarnation);
    let join = Write::Join(Report { incarnation: other, state: State::Idle, ..(**report).clone() });
    assert!(matches!(group.coordinator.write(Rank(1), other, join), Answer::Done(_)));
    group.tell(1, Event::SessionLost);
    assert_eq!(group.last(1), Some(&Order::Kill));
    group.join(1);
    group.wait(options(Rank(0), 2).limits.wait * 2);
    assert_eq!(group.last(1), Some(&Order::Kill));
    assert!(group.machines[1].deadline().is_none_or(|at| at > group.now));
    group.tell(1, Event::Local(Local::Ended(Ending::failed("killed", None))));
    assert!(matches!(group.last(1), Some(Order::Finish(End::Missing { .. }))), "{:?}", group.last(1));
}

#[test]
fn a_record_that_somebody_removes_costs_no_part() {
    let mut group = restored();
    group.starts();
    let removes = |group: &mut Group, gone: &dyn Fn(&Number) -> bool| {
        let view = Arc::make_mut(&mut group.coordinator.view);
        view.revision += 1;
        view.images.retain(|number, _| !gone(number));
        group.settle();
    };
    let forgets = |group: &Group| group.orders.iter().flatten().any(|order| matches!(order, Order::Forget(_)));
    removes(&mut group, &|number| *number == Number(7));
    assert!(!forgets(&group), "it is the newest");
    removes(&mut group, &|_| true);
    assert!(!forgets(&group));
    // Once the job stops, all are recorded again.
    group.tell(0, Event::Local(Local::Ended(Ending::failed("it died", None))));
    group.settle();
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    assert_eq!(group.coordinator.view.images.keys().collect::<Vec<_>>(), [&Number(4), &Number(7)]);
    assert!(group.coordinator.view.images.values().all(|image| image.value.committed));
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
    // As the leader does it: there is a newer one that is committed.
    removes(&mut group, &|number| *number == Number(4));
    assert!(group.orders.iter().all(|orders| orders.contains(&Order::Forget(Number(4)))));
}

/// A machine that is away may still have the other parts, until a newer group image is committed.
#[test]
fn parts_of_a_committed_group_image_stay_until_a_newer_one_is_committed() {
    let mut group = Group::cold(2, &|_| BTreeMap::new(), ColdStart::Allow);
    group.starts();
    group.wait(INTERVAL);
    group.dumps(ONE);
    group.all(&|_| Local::Stored(ONE));
    assert!(group.coordinator.view.images[&ONE].value.committed);
    // Somebody removes the record, and another machine comes in the place of one.
    let view = Arc::make_mut(&mut group.coordinator.view);
    view.revision += 1;
    view.images.clear();
    group.settle();
    group.is_replaced(1, machine(1, 2, ColdStart::Allow));
    group.killed();
    group.wait(Duration::from_secs(1));
    assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning));
    group.starts();
    group.wait(INTERVAL);
    let Goal::Prepare(next) = group.goal() else { panic!("{:?}", group.goal()) };
    group.dumps(next);
    assert_eq!((group.goal(), group.coordinator.view.images.contains_key(&next)), (Goal::Run, true));
    assert!(!group.orders[0].contains(&Order::Forget(ONE)), "the newer one may still be lost");
    group.all(&|_| Local::Stored(next));
    assert!(group.orders[0].contains(&Order::Forget(ONE)));
}

#[test]
fn a_job_is_not_frozen_for_ever_by_a_coordinator_that_refuses_to_write() {
    let longest = options(Rank(0), 2).longest_step();
    for steps in 0..4 {
        let mut group = Group::new(2);
        group.starts();
        group.wait(INTERVAL);
        if steps > 0 {
            group.all(&|_| Local::Locked(ONE));
        }
        if steps > 1 {
            group.all(&|_| Local::Quiet(ONE));
        }
        group.refuses = |_| true;
        if steps > 2 {
            group.all(&|rank| Local::Dumped(ONE, part(rank, ONE)));
        }
        let goal = group.goal();
        assert!(group.machines[1].deadline().is_some_and(|at| at <= group.now + longest));
        group.wait(longest - Duration::from_secs(1));
        assert!(group.orders.iter().flatten().all(|order| *order != Order::Kill), "{goal:?}");
        group.wait(Duration::from_secs(1));
        assert!((0..2).all(|at| group.last(at) == Some(&Order::Kill)), "{goal:?}");
        assert_eq!(group.goal(), goal, "nothing was written");
        // Once it can be written, the job starts again.
        group.refuses = |_| false;
        group.all(&|_| Local::Ended(Ending::failed("killed", None)));
        group.wait(Duration::from_secs(1));
        assert!(matches!(group.goal(), Goal::Start(_)), "{:?}", group.goal());
    }
}

#[test]
fn a_restart_that_cannot_be_written_counts_once() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(0, Event::Local(Local::Ended(Ending::failed("it died", None))));
    group.refuses = |write| matches!(write, Write::Plan { .. });
    for _ in 0..10 {
        group.wait(Duration::from_secs(1));
    }
    assert_eq!(group.goal(), Goal::Run);
    group.refuses = |_| false;
    group.wait(Duration::from_secs(1));
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning));
}

#[test]
fn a_snapshot_that_was_requested_is_taken_once_it_can_be_written() {
    let mut group = Group::new(2);
    group.starts();
    group.wait(INTERVAL);
    group.dumps(ONE);
    assert_eq!(group.goal(), Goal::Run);
    group.tell(1, Event::Asked(Ask::Snapshot));
    group.settle();
    assert_eq!(group.goal(), Goal::Run, "parts are being stored");
    group.refuses = |write| matches!(write, Write::Plan { .. });
    group.all(&|_| Local::Stored(ONE));
    group.refuses = |_| false;
    group.wait(Duration::from_secs(1));
    assert_eq!(group.goal(), Goal::Prepare(Number(2)));
}

#[test]
fn parts_are_kept_and_recorded_again_when_the_coordinator_has_lost_its_data() {
    let mut group = Group::with(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
    // Somebody who is not here may still have a lease.
    assert!(group.orders.iter().flatten().all(|order| !matches!(order, Order::Start { .. })));
    group.wait(TTL);
    let part = Some(part(0, Number(7)));
    assert_eq!(
        group.last(0),
        Some(&Order::Start { epoch: Epoch(4), origin: Incarnation(1), from: StartFrom::Image(Number(7)), part })
    );
    group.starts();
    group.wait(INTERVAL);
    assert_eq!(group.goal(), Goal::Prepare(Number(8)));
    assert!(group.orders.iter().flatten().all(|order| !matches!(order, Order::Forget(_))));
}

#[test]
fn parts_of_two_group_images_with_one_number_are_not_put_together() {
    let parts = |rank: u32| {
        let mut parts = durable(rank, &[7]);
        parts.values_mut().for_each(|progress| progress.origin = Incarnation(u64::from(rank)));
        parts
    };
    let mut group = Group::with(2, &parts, Epoch(3));
    group.wait(TTL);
    assert_eq!(group.last(0), Some(&Order::Finish(End::Missing { why: Missing::Record(Number(7)) })));
}

#[test]
fn the_job_does_not_start_from_the_beginning_for_want_of_a_part() {
    let mut group = Group::with(2, &|rank| durable(rank, if rank == 0 { &[7] } else { &[] }), Epoch(3));
    group.wait(TTL);
    assert_eq!(group.last(0), Some(&Order::Finish(End::Missing { why: Missing::Record(Number(7)) })));
}

/// Each member's parts of group image 4, which has parts of this many machines.
fn of(size: u32, rank: u32) -> BTreeMap<Number, Progress> {
    let parts = if rank < size { durable(rank, &[4]) } else { BTreeMap::new() };
    parts.into_iter().map(|(number, progress)| (number, Progress { size, ..progress })).collect()
}

#[test]
fn a_group_image_of_another_number_of_machines_is_not_used() {
    for (now, then) in [(3, 2), (2, 3)] {
        // The coordinator has lost its data, or it knows the group image.
        for is_recorded in [false, true] {
            let mut group = Group::unjoined(now, &|rank| of(then, rank), Epoch(3));
            if is_recorded {
                let parts = (0..then).map(|rank| (Rank(rank), part(rank, Number(4)))).collect();
                let value = GroupImage { epoch: Epoch(3), parts, committed: true, replica: Replica::No };
                let image = Arc::new(Versioned { value, revision: 0 });
                Arc::make_mut(&mut group.coordinator.view).images.insert(Number(4), image);
            }
            (0..group.machines.len()).for_each(|at| group.join(at));
            group.wait(TTL);
            let Goal::End(End::Refused { why }) = group.goal() else { panic!("{:?}", group.goal()) };
            assert_eq!(why, Mismatch::Size { image: Number(4), parts: then, size: now });
            for orders in &group.orders {
                assert!(!orders.iter().any(|order| matches!(order, Order::Start { .. })), "{orders:?}");
                assert!(matches!(orders.last(), Some(Order::Finish(End::Refused { .. }))), "{orders:?}");
            }
        }
    }
}

#[test]
fn a_group_of_another_number_of_machines_can_start_from_the_beginning() {
    let mut group = Group::unjoined(3, &|rank| of(2, rank), Epoch(3));
    group.machines = group.machines.into_iter().map(|machine| machine.starting(true, Number(0))).collect();
    (0..3).for_each(|at| group.join(at));
    group.wait(TTL);
    assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning));
}

#[test]
fn a_rewind_leaves_the_newer_group_images_and_keeps_them_out() {
    let mut group = Group::with(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
    group.wait(TTL);
    group.starts();
    group.tell(1, Event::Asked(Ask::Rewind(Number(4))));
    group.settle();
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    assert!(
        matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(Number(4)), .. })),
        "{:?}",
        group.goal()
    );
    group.starts();
    // What fails now goes back to the same one, not to what was left.
    group.tell(0, Event::Local(Local::Ended(Ending::failed("it failed", None))));
    group.settle();
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    assert!(matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(Number(4)), .. })));
    // One that was left can be gone back to.
    group.starts();
    group.tell(0, Event::Asked(Ask::Rewind(Number(7))));
    group.settle();
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    assert!(
        matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(Number(7)), .. })),
        "{:?}",
        group.goal()
    );
}

#[test]
fn a_rewind_that_is_requested_while_the_job_restarts_counts_at_once() {
    let mut group = Group::with(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
    group.wait(TTL);
    group.starts();
    group.tell(0, Event::Local(Local::Ended(Ending::failed("it failed", None))));
    group.settle();
    group.tell(0, Event::Asked(Ask::Rewind(Number(4))));
    group.tell(1, Event::Local(Local::Ended(Ending::failed("killed", None))));
    group.settle();
    assert!(
        matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(Number(4)), .. })),
        "{:?}",
        group.last(1)
    );
}

#[test]
fn a_removal_and_a_plan_that_comes_of_the_time_before_it_exclude_each_other() {
    let mut group = Group::with(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
    group.wait(TTL);
    group.starts();
    let view = Arc::clone(&group.coordinator.view);
    let (plan, leader) = (Box::new(Versioned::clone(view.plan.as_ref().unwrap())), view.leader.unwrap());
    let rewound = Write::Plan { plan: Box::new(plan.value.clone()), was: Some(plan.revision), image: None };
    let removal = Write::Remove { number: Number(4), was: view.images[&Number(4)].revision, plan };

    let mut removed_first = Coordinator::new(false, None);
    removed_first.view = view;
    while removed_first.grant(group.now) != leader {}
    assert!(matches!(removed_first.write(Rank(0), leader, removal.clone()), Answer::Done(_)));
    assert_eq!(removed_first.write(Rank(0), leader, rewound), Answer::Conflict);

    group.tell(1, Event::Asked(Ask::Rewind(Number(4))));
    group.settle();
    assert_eq!(group.write(0, removal), Answer::Conflict, "a removal that is carried out late");
    assert!(group.coordinator.view.images.contains_key(&Number(4)));
}

#[test]
fn a_stop_ends_with_a_group_image_that_is_stored() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Asked(Ask::Stop { requeue: true, within: Duration::from_secs(60) }));
    group.settle();
    group.dumps(ONE);
    assert_eq!(group.goal(), Goal::Suspended);
    assert!((0..2).all(|at| group.orders[at].ends_with(&[Order::Store(ONE), Order::Kill])));
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    assert_eq!(group.goal(), Goal::Suspended, "the parts are still being stored");
    group.all(&|_| Local::Stored(ONE));
    assert!((0..2).all(|at| group.last(at) == Some(&Order::Finish(End::Stopped { requeue: true }))));
    assert!(group.coordinator.view.images[&ONE].value.committed);
}

#[test]
fn a_stop_whose_time_is_over_does_not_wait_for_a_snapshot() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Asked(Ask::Stop { requeue: false, within: Duration::from_secs(5) }));
    group.settle();
    assert_eq!(group.goal(), Goal::Prepare(ONE));
    group.wait(Duration::from_secs(5));
    assert_eq!(group.goal(), Goal::End(End::Stopped { requeue: false }));
    assert!((0..2).all(|at| group.last(at) == Some(&Order::Kill)));
}

#[test]
fn a_stop_may_take_any_time() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Asked(Ask::Stop { requeue: false, within: Duration::MAX }));
    group.settle();
    assert_eq!(group.goal(), Goal::Prepare(ONE));
}

#[test]
fn a_suspended_job_runs_on_after_it_is_resumed() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(0, Event::Asked(Ask::Suspend));
    group.settle();
    group.dumps(ONE);
    group.all(&|_| Local::Ended(Ending::failed("killed", None)));
    group.all(&|_| Local::Stored(ONE));
    group.wait(Duration::from_secs(600));
    assert_eq!(group.goal(), Goal::Suspended);
    group.tell(1, Event::Asked(Ask::Resume));
    group.settle();
    assert!(matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(ONE), .. })));
    group.starts();
    group.wait(Duration::from_secs(1));
    assert_eq!(group.goal(), Goal::Run);
}

#[test]
fn a_request_that_is_not_admitted_changes_nothing() {
    let stop = Ask::Stop { requeue: false, within: Duration::from_secs(60) };
    let now = Ask::StopNow { requeue: false };
    let all = [Ask::Snapshot, Ask::Suspend, Ask::Resume, Ask::Rewind(ONE), Ask::Rewind(Number(9)), stop, now];
    type Reach = dyn Fn(&mut Group);
    let steps: [(&str, &Reach); 6] = [
        ("runs", &|_| {}),
        ("prepares", &|group| group.wait(INTERVAL)),
        ("has an image", &|group| {
            group.wait(INTERVAL);
            group.dumps(ONE);
            group.all(&|_| Local::Stored(ONE));
        }),
        ("suspended", &|group| {
            group.tell(0, Event::Asked(Ask::Suspend));
            group.settle();
            group.dumps(ONE);
        }),
        ("gathers", &|group| {
            group.tell(0, Event::Local(Local::Ended(Ending::failed("it failed", None))));
            group.settle();
        }),
        ("is over", &|group| {
            group.tell(0, Event::Asked(Ask::StopNow { requeue: false }));
            group.settle();
        }),
    ];
    let mut seen = Vec::new();
    for (step, reach) in steps {
        for ask in &all {
            let mut group = Group::new(2);
            group.starts();
            reach(&mut group);
            let admitted = crate::admits(&group.coordinator.view, ask);
            let plan = |group: &Group| {
                let plan = group.coordinator.view.plan.as_ref().unwrap().value.clone();
                crate::documents::Plan { serial: 0, served: BTreeMap::new(), refused: BTreeMap::new(), ..plan }
            };
            let before = plan(&group);
            group.tell(1, Event::Asked(ask.clone()));
            group.settle();
            let present = &group.coordinator.view.plan.as_ref().unwrap().value;
            let (who, is_over) = (Incarnation(2), matches!(present.goal, Goal::End(_)));
            let waits = !is_over && !present.served.contains_key(&who);
            assert_eq!(admitted.is_ok(), waits || plan(&group) != before, "{ask:?} when it {step}: {admitted:?}");
            let told = present.refused.get(&who).map(|refusal| refusal.why.clone());
            assert!(is_over || told == admitted.clone().err(), "{ask:?} when it {step}: {told:?}");
            seen.extend(admitted.err().map(|why| why.to_string()));
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(
        seen,
        [
            "the job does not run: it waits to be started",
            "the job is not suspended",
            "the job is suspended already",
            "the job is suspended: resume it first",
            "the run is over",
            "there is no group image 1",
            "there is no group image 9",
        ]
    );
}

#[test]
fn documents_are_json_that_reads_back() {
    let mut group = Group::new(2);
    group.starts();
    group.wait(INTERVAL);
    group.dumps(ONE);
    let plan = &group.coordinator.view.plan.as_ref().unwrap().value;
    let text = serde_json::to_string(plan).unwrap();
    assert_eq!(&serde_json::from_str::<crate::documents::Plan>(&text).unwrap(), plan);
    let report = &*group.coordinator.view.members[&Rank(1)];
    let text = serde_json::to_string(report).unwrap();
    assert!(text.contains(r#""parts":{"1":{"part":{"image":"1-1","digest":"x"},"#), "{text}");
    assert_eq!(&serde_json::from_str::<crate::documents::Report>(&text).unwrap(), report);
}
