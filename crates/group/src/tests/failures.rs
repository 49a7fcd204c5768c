//! What failures count against: group images, snapshots, restarts.

use super::*;
use crate::documents::Fault;

impl Group {
    /// The job of rank 0 ends so, and the other ones are ended.
    fn loses(&mut self, fault: Fault) {
        self.tell(0, Event::Local(Local::Ended(Ending::Failed { why: "it died".into(), last: None, fault })));
        self.settle();
        self.killed();
        self.wait(Duration::from_secs(8));
    }
}

#[test]
fn an_image_is_not_passed_over_for_two_kills_from_outside() {
    // How often the job is started from the newest image until an older one is used.
    let tries = |fault: Fault| {
        let mut group = restored();
        let mut tries = 0;
        while group.goal() == Goal::Start(StartFrom::Image(Number(7))) {
            tries += 1;
            assert!(tries < 8, "{:?}", group.plan().failures);
            group.starts();
            group.loses(fault);
        }
        assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(4))));
        assert_eq!(group.plan().in_a_row, tries, "each of them is a restart");
        tries
    };
    assert_eq!(tries(Fault::Job), 2);
    assert_eq!(tries(Fault::Outside), 4, "as on one machine");
}

/// The kernel kills a process of rank 1, and rank 0 ends because its connection is gone. Both are known at once.
#[test]
fn what_follows_from_a_kill_from_outside_is_not_the_cause() {
    let mut group = restored();
    group.starts();
    let ended = |fault| Event::Local(Local::Ended(Ending::Failed { why: "it died".into(), last: None, fault }));
    group.tell(0, ended(Fault::Job));
    group.tell(1, ended(Fault::Outside));
    group.settle();
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
    assert_eq!(group.plan().failures.values().collect::<Vec<_>>(), [&1], "as after a kill alone");
}

#[test]
fn an_image_that_is_not_restored_now_is_passed_over_after_four_tries() {
    let mut group = restored();
    for times in 1..=4 {
        assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))), "try {times}");
        let why = StartFailure::Other("a part of it cannot be read".into());
        let ending = Ending::NotStarted { why, blame: Blame::Image, fault: Fault::Outside };
        group.tell(1, Event::Local(Local::Ended(ending)));
        group.settle();
        group.killed();
        assert!(matches!(group.goal(), Goal::Gather { .. }) || times == 1, "restarts have a pause");
        group.wait(Duration::from_secs(8));
        assert_eq!(group.plan().in_a_row, times);
    }
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(4))));
}

#[test]
fn a_life_that_was_healthy_counts_for_its_image() {
    let uptime = options(Rank(0), 2).restart.min_uptime;
    // What ended it from outside says nothing about the image.
    let mut group = restored();
    group.starts();
    group.wait(uptime);
    assert!(group.plan().healthy);
    group.loses(Fault::Outside);
    assert_eq!(group.plan().failures, BTreeMap::new());
    // The job has lived on from it: if it now dies early, that has another cause.
    for _ in 0..2 {
        assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
        group.starts();
        group.loses(Fault::Job);
    }
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))), "{:?}", group.plan().failures);
    // It may still have become impossible to restore.
    group.tell(1, Event::Local(not_started(Blame::Image)));
    group.settle();
    group.killed();
    group.wait(Duration::from_secs(8));
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(4))), "{:?}", group.plan().failures);
}

#[test]
fn a_lost_machine_does_not_use_up_the_last_restart() {
    let most = options(Rank(0), 2).restart.max_restarts;
    let mut group = restored();
    for _ in 0..most {
        group.tell(1, Event::Local(not_started(Blame::Machine)));
        group.settle();
        group.killed();
        group.wait(Duration::from_secs(8));
    }
    assert_eq!(group.plan().in_a_row, most);
    // The machine of rank 1 is lost, which its lease tells later than the job of rank 0.
    group.tell(0, Event::Local(Local::Ended(Ending::failed("the connection was closed", None))));
    group.settle();
    assert_eq!(group.plan().in_a_row, most + 1);
    assert!(matches!(group.goal(), Goal::Gather { .. }), "{:?}", group.goal());
    group.comes_back(1);
    group.killed();
    group.wait(Duration::from_secs(8));
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
    assert_eq!(group.plan().in_a_row, most);
}

/// Waits until a snapshot is ordered, and returns its number.
fn ordered(group: &mut Group) -> Option<Number> {
    for _ in 0..3 {
        group.wait(INTERVAL);
        if let Goal::Prepare(number) = group.goal() {
            return Some(number);
        }
    }
    None
}

#[test]
fn no_more_snapshots_are_taken_at_the_interval_if_each_ends_the_job() {
    // What the group sees of it: the job cannot continue, dies, or does not run again in time.
    type Loses = dyn Fn(&mut Group, Number);
    let lost: [&Loses; 4] = [
        &|group, number| {
            group.tell(0, Event::Local(Local::refused(number, "it cannot continue")));
            group.settle();
            group.all(&|_| Local::Aborted(number));
            assert_eq!(group.goal(), Goal::Run, "the end of the job comes later");
            group.loses(Fault::Snapshot);
        },
        &|group, _| group.loses(Fault::Job),
        &|group, number| {
            group.tell(0, Event::Local(Local::Locked(number)));
            group.settle();
            group.wait(options(Rank(0), 2).limits.prepare);
            assert!(matches!(group.goal(), Goal::Abort { .. }));
            group.loses(Fault::Job);
        },
        &|group, number| {
            group.tell(1, Event::Local(Local::refused(number, "no room")));
            group.settle();
            group.wait(options(Rank(0), 2).limits.start);
            assert!(matches!(group.goal(), Goal::Gather { .. }));
            group.killed();
            group.wait(Duration::from_secs(8));
        },
    ];
    for lost in lost {
        let mut group = restored();
        for times in 1..=3 {
            assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
            group.starts();
            let number = ordered(&mut group).unwrap();
            lost(&mut group, number);
            assert_eq!(group.plan().fatal, times);
        }
        assert_eq!(group.plan().failures, BTreeMap::new(), "the image is not to blame");
        group.starts();
        assert!(group.plan().snapshots_end_the_job());
        assert_eq!(ordered(&mut group), None);
        assert_eq!(group.goal(), Goal::Run);
        // On request, it is tried; one that succeeds lets the interval go on.
        group.tell(1, Event::Asked(Ask::Snapshot));
        group.settle();
        let Goal::Prepare(number) = group.goal() else { panic!("{:?}", group.goal()) };
        group.dumps(number);
        assert_eq!((group.goal(), group.plan().fatal), (Goal::Run, 0));
        group.all(&|_| Local::Stored(number));
        assert!(ordered(&mut group).is_some());
    }
}

#[test]
fn losses_of_machines_have_longer_pauses_and_no_limit() {
    let mut group = restored();
    let mut pauses = Vec::new();
    for _ in 0..12 {
        group.starts();
        group.comes_back(1);
        group.killed();
        let lost = group.now;
        while matches!(group.goal(), Goal::Gather { .. }) {
            group.wait(Duration::from_secs(1));
        }
        pauses.push((group.now - lost).as_secs());
        assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))), "{pauses:?}");
    }
    assert_eq!(pauses[..6], [0, 1, 2, 4, 8, 8]);
    // It was there for long enough.
    group.starts();
    group.wait(options(Rank(0), 2).restart.min_uptime);
    group.comes_back(1);
    group.killed();
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
}

/// All restarts of the test count against `restart.max-restarts`.
fn restored_in_a_long_window() -> Group {
    let mut group = Group::unjoined(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
    let machine = |rank| {
        let mut options = options(Rank(rank), 2);
        options.restart.window = Duration::from_secs(3600);
        Machine::new(options, Epoch(3))
    };
    group.machines = (0..2).map(machine).collect();
    (0..2).for_each(|at| group.join(at));
    group.wait(TTL);
    group
}

#[test]
fn a_job_that_fails_because_a_machine_is_lost_does_not_count() {
    let uptime = options(Rank(0), 2).restart.min_uptime;
    for is_in_snapshot in [false, true] {
        let mut group = restored_in_a_long_window();
        // More often than the restarts in a row that are allowed.
        for times in 1..=10 {
            group.starts();
            if is_in_snapshot {
                group.tell(1, Event::Asked(Ask::Snapshot));
                group.settle();
                assert!(matches!(group.goal(), Goal::Prepare(_)));
            }
            // The supervisor of rank 1 is killed, with its job. The job of rank 0 sees the end of its connection.
            group.tell(0, Event::Local(Local::Ended(Ending::failed("the connection was closed", None))));
            group.settle();
            assert!(matches!(group.goal(), Goal::Gather { .. }));
            group.comes_back(1);
            group.killed();
            group.wait(Duration::from_secs(8));
            assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))), "try {times}");
            let plan = group.plan();
            assert_eq!((plan.failures.len(), plan.in_a_row, plan.fatal, plan.lost), (0, 0, 0, times));
            assert_eq!(plan.counted, None);
        }
        // Nobody is lost any more: it fails by itself.
        group.starts();
        group.wait(uptime);
        group.loses(Fault::Job);
        assert_eq!(group.plan().failures, BTreeMap::from([(Number(7), 1)]));
    }
    // Nor from the beginning.
    let mut group = Group::new(2);
    for _ in 0..10 {
        group.starts();
        group.tell(0, Event::Local(Local::Ended(Ending::failed("the connection was closed", None))));
        group.settle();
        group.comes_back(1);
        group.killed();
        group.wait(Duration::from_secs(8));
        assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning));
    }
}
