//! Views of a coordinator, one after the other.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use rekindle_group::{
    Costs, Ending, Fresh, GroupImage, Incarnation, Part, Past, Phase, Progress, Replica, Replicated, Report, State,
    Stored, Then, Versioned,
};

use super::*;

const SIZE: u32 = 3;

fn id(number: u64) -> ImageId {
    format!("{number:06}-20261121T100000Z").parse().unwrap()
}

fn nodes() -> BTreeMap<Rank, Node> {
    let node = |host: &str| Node {
        host: host.into(),
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        rekindle: "1".into(),
        criu: "4".into(),
        driver: None,
        size: SIZE,
        subnet: "10.213.0.0/16".into(),
        lease_s: 30,
        network: "vxlan".into(),
        packet: Some(1450),
        user: 0,
    };
    (0..).map(Rank).zip(["a", "b", "c"].map(node)).collect()
}

/// A group whose job runs. It is changed step by step.
struct Coordinator {
    view: View,
    seen: Seen,
}

impl Coordinator {
    fn running() -> Coordinator {
        let crew: BTreeMap<_, _> = (0..SIZE).map(|rank| (Rank(rank), Incarnation(10 + u64::from(rank)))).collect();
        let report = |incarnation| Report {
            incarnation,
            seen: 5,
            epoch: Epoch(1),
            state: State::Running,
            parts: BTreeMap::new(),
            storing: false,
            costs: Costs::default(),
            done: false,
            asked: None,
            fresh: Fresh::default(),
            floor: Number(0),
            rests: false,
            rewound: None,
            begun: false,
        };
        let plan = Plan {
            origin: Incarnation(10),
            serial: 5,
            epoch: Epoch(1),
            crew: crew.clone(),
            goal: Goal::Run,
            then: Then::RunOn,
            next: Number(1),
            from: StartFrom::Beginning,
            healthy: true,
            failures: BTreeMap::new(),
            proven: BTreeSet::new(),
            in_a_row: 0,
            lost: 0,
            fatal: 0,
            counted: None,
            early_cold: 0,
            last: None,
            past: Past::default(),
            aim: None,
            floor: Number(0),
            left: Vec::new(),
            served: BTreeMap::new(),
            refused: BTreeMap::new(),
        };
        let members = crew.iter().map(|(rank, incarnation)| (*rank, Arc::new(report(*incarnation)))).collect();
        let leader = Some(Incarnation(11));
        let plan = Some(Arc::new(Versioned { value: plan, revision: 1 }));
        let view = View { revision: 1, leader, plan, members, images: BTreeMap::new() };
        let mut it = Coordinator { view, seen: Seen::new("bert".parse().unwrap(), Rank(0), SIZE) };
        assert_eq!(it.show(), []);
        it
    }

    fn show(&mut self) -> Vec<What> {
        self.view.revision += 1;
        self.seen.changed(&Arc::new(self.view.clone()), &nodes())
    }

    fn goal(&mut self, goal: Goal) -> Vec<What> {
        let plan = &mut Arc::make_mut(self.view.plan.as_mut().unwrap()).value;
        plan.serial += 1;
        if matches!(goal, Goal::Start(_)) {
            plan.epoch.0 += 1;
        }
        plan.goal = goal;
        let serial = plan.serial;
        self.view.members.values_mut().for_each(|report| Arc::make_mut(report).seen = serial);
        self.show()
    }

    fn member(&mut self, rank: u32) -> &mut Report {
        Arc::make_mut(self.view.members.get_mut(&Rank(rank)).unwrap())
    }

    fn record(&mut self, number: u64, committed: bool) {
        let part = |rank: u32| Part { image: id(number + u64::from(rank) * 100).to_string(), digest: "x".into() };
        let parts = (0..SIZE).map(|rank| (Rank(rank), part(rank))).collect();
        let image = GroupImage { epoch: Epoch(1), parts, committed, replica: Replica::No };
        self.view.images.insert(Number(number), Arc::new(Versioned { value: image, revision: self.view.revision }));
    }

    fn states(&mut self, states: [State; 3]) {
        self.view.members.values_mut().zip(states).for_each(|(report, state)| Arc::make_mut(report).state = state);
    }

    fn group(&mut self) -> Group {
        let _ = self.show();
        self.seen.group().unwrap()
    }

    fn waits_for(&mut self) -> Option<String> {
        self.group().waits_for
    }
}

fn machine(rank: u32, host: &str) -> GroupMember {
    GroupMember { rank, host: Some(host.into()) }
}

fn gather(why: Reason) -> Goal {
    Goal::Gather { why }
}

fn failed(rank: u32, why: &str) -> Reason {
    Reason::JobFailed { rank: Rank(rank), why: why.into() }
}

#[test]
fn a_group_image_is_committed_once() {
    let mut it = Coordinator::running();
    let n = Number(1);
    assert_eq!([Goal::Prepare(n), Goal::Pull(n), Goal::Dump(n)].map(|goal| it.goal(goal)), [vec![], vec![], vec![]]);
    it.record(1, false);
    assert_eq!(it.goal(Goal::Resume(n)), []);
    assert_eq!(it.group().newest_committed(), None);
    it.record(1, true);
    assert_eq!(it.show(), [What::GroupCommitted { number: 1, epoch: 1, image: Some(id(1)) }]);
    assert_eq!(it.show(), []);
    assert_eq!(it.group().newest_committed().map(|image| (image.number, image.image)), Some((1, Some(id(1)))));
}

#[test]
fn a_snapshot_is_aborted_by_a_refusal_a_loss_and_the_end() {
    let mut it = Coordinator::running();
    let aborted = |number, why: &str, machines| [What::GroupAborted { number, why: why.into(), machines }];
    let _ = it.goal(Goal::Prepare(Number(1)));
    let why = "not locked in time: rank 0, rank 2";
    let late = Reason::TimedOut { phase: Phase::Lock, ranks: vec![Rank(0), Rank(2)] };
    let abort = Goal::Abort { number: Number(1), why: late };
    assert_eq!(it.goal(abort), aborted(1, why, vec![machine(0, "a"), machine(2, "c")]));
    assert_eq!(it.goal(Goal::Run), []);
    // Dumped here, but not everywhere.
    let _ = it.goal(Goal::Dump(Number(2)));
    it.view.members.remove(&Rank(1));
    let events = it.goal(gather(Reason::MemberLost(Rank(1))));
    assert_eq!(events[0], What::GroupMemberLost { machine: machine(1, "b") });
    assert_eq!(events[1..], aborted(2, "rank 1 is lost", vec![machine(1, "b")]));
    let _ = it.goal(Goal::Prepare(Number(3)));
    let end = Goal::End(rekindle_group::End::Stopped { requeue: false });
    assert_eq!(it.goal(end), aborted(3, "the run ended before", vec![]));
}

#[test]
fn a_restart_names_its_cause_and_its_machine() {
    let mut it = Coordinator::running();
    it.record(4, true);
    let why = failed(2, "the job ended: signal 9");
    assert_eq!(it.goal(gather(why.clone()))[..], [What::GroupCommitted { number: 4, epoch: 1, image: Some(id(4)) }]);
    let (number, image, machines) = (Some(4), Some(id(4)), vec![machine(2, "c")]);
    // It ended because another machine was lost, which is noticed later.
    it.view.members.remove(&Rank(1));
    assert_eq!(it.show(), [What::GroupMemberLost { machine: machine(1, "b") }]);
    let lost = vec![machine(1, "b")];
    let restart = What::GroupRestarting { number, image, epoch: 2, why: why.to_string(), machines, lost };
    assert_eq!(it.goal(Goal::Start(StartFrom::Image(Number(4)))), [restart]);
    assert_eq!(it.goal(Goal::Run), []);
    // What somebody asked for is no restart.
    for wanted in [Reason::Rewound(Number(4)), Reason::Resumed, Reason::NewRun] {
        assert_eq!(it.goal(gather(wanted)), []);
        assert_eq!(it.goal(Goal::Start(StartFrom::Image(Number(4)))), []);
    }
}

#[test]
fn a_member_is_lost_unless_all_leave() {
    let mut it = Coordinator::running();
    // The same rank again, before the loss of the former member was seen.
    it.member(2).incarnation = Incarnation(77);
    assert_eq!(it.show(), [What::GroupMemberLost { machine: machine(2, "c") }]);
    it.view.members.remove(&Rank(0));
    assert_eq!(it.show(), [], "this machine has told it when its lease was lost");
    let _ = it.goal(Goal::End(rekindle_group::End::Completed));
    it.view.members.clear();
    assert_eq!(it.show(), []);
}

#[test]
fn a_coordinator_without_its_data_tells_nothing_of_the_one_before() {
    let mut it = Coordinator::running();
    it.record(1, false);
    let _ = it.show();
    Arc::make_mut(it.view.plan.as_mut().unwrap()).value.origin = Incarnation(99);
    it.record(1, true);
    it.view.members.remove(&Rank(1));
    assert_eq!(it.show(), []);
}

#[test]
fn the_group_is_published_with_what_is_missing() {
    let mut it = Coordinator::running();
    let group = it.group();
    assert_eq!((group.leader, group.members.len(), group.missing.len()), (Some(1), 3, 0));
    assert_eq!(group.waits_for, None);
    it.view.members.remove(&Rank(2));
    let group = it.group();
    assert_eq!((group.members, group.missing), (vec![machine(0, "a"), machine(1, "b")], vec![machine(2, "c")]));
}

#[test]
fn what_the_group_waits_for_is_named() {
    let mut it = Coordinator::running();
    let n = Number(7);
    let _ = it.goal(Goal::Prepare(n));
    it.states([State::Locked(n), State::Running, State::Running]);
    let text = "rank 1 (b), rank 2 (c) to lock the job for group image 7";
    assert_eq!(it.waits_for().as_deref(), Some(text));
    let _ = it.goal(Goal::Dump(n));
    let part = Part { image: id(7).to_string(), digest: "x".into() };
    it.states([State::Dumped(n, part.clone()), State::Quiet(n), State::Dumped(n, part.clone())]);
    assert_eq!(it.waits_for().as_deref(), Some("rank 1 (b) to dump the job for group image 7"));

    it.states([State::Running, State::Running, State::Running]);
    it.record(7, false);
    let _ = it.goal(Goal::Run);
    assert_eq!(it.waits_for(), None, "nobody stores it");
    let report = it.member(1);
    report.storing = true;
    let progress = Progress {
        part,
        epoch: Epoch(1),
        origin: Incarnation(10),
        stored: Stored::Staged,
        size: 3,
        replicated: Replicated::No,
    };
    report.parts.insert(n, progress);
    assert_eq!(it.waits_for().as_deref(), Some("rank 1 (b) to store group image 7"));

    it.states([State::Over(Ending::Completed), State::Running, State::Running]);
    assert_eq!(it.waits_for().as_deref(), Some("rank 1 (b), rank 2 (c) to complete the job"));

    it.states([State::Idle, State::Ending, State::Idle]);
    let _ = it.goal(gather(failed(2, "it died")));
    assert_eq!(it.waits_for().as_deref(), Some("rank 1 (b) to end the job: rank 2: it died"));
    it.view.members.remove(&Rank(2));
    assert_eq!(it.waits_for().as_deref(), Some("rank 2 (c) to join: rank 2: it died"));
    let _ = it.goal(Goal::Suspended);
    it.states([State::Idle, State::Idle, State::Idle]);
    assert_eq!(it.waits_for().as_deref(), Some("`rekindle resume`"));
    it.seen.refuses(Some("it is full".into()));
    let text = "the coordinator, which refuses what this machine writes: it is full";
    assert_eq!(it.waits_for().as_deref(), Some(text));
    it.seen.away(Some("no route".into()));
    assert_eq!(it.waits_for().as_deref(), Some("the coordinator, which does not answer: no route"));
}

#[test]
fn snapshots_that_end_the_job_are_seen() {
    let mut it = Coordinator::running();
    let mut after = |fatal| {
        Arc::make_mut(it.view.plan.as_mut().unwrap()).value.fatal = fatal;
        let _ = it.show();
        it.seen.snapshots_end_the_job()
    };
    assert_eq!([0, 2, 3, 4, 0].map(&mut after), [false, false, true, true, false]);
}
