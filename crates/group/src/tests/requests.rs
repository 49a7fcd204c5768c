//! What becomes of requests, and of a run that is given up or started from the beginning.

use super::*;
use crate::documents::{Costs, Fault, Fresh, Last, Rewound};
use crate::requests::{NotDone, Outcome, Pending};

fn failed(why: &str) -> Ending {
    Ending::failed(why, Some(Last::Exit(3)))
}

/// A request of a member, and what somebody who waits for it learns.
struct Client {
    at: usize,
    pending: Pending,
}

impl Group {
    fn asks(&mut self, at: usize, ask: Ask) -> Client {
        self.tell(at, Event::Asked(ask));
        let machine = &self.machines[at];
        let (asked, membership) = (machine.asked().unwrap().clone(), machine.report().unwrap().incarnation);
        let mut client = Client { at, pending: Pending::new(asked, membership) };
        assert_eq!(self.learns(&mut client), Outcome::Open);
        client
    }

    fn learns(&self, client: &mut Client) -> Outcome {
        let machine = &self.machines[client.at];
        let membership = machine.report().map(|report| report.incarnation);
        client.pending.look(&self.coordinator.view, membership, machine.asked())
    }

    fn with_images() -> Group {
        let mut group = Group::with(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
        group.wait(TTL);
        group.starts();
        group
    }

    /// Members that were told to start from the beginning, or not.
    fn told(wants: &[bool], parts: &[u64]) -> Group {
        let size = u32::try_from(wants.len()).unwrap();
        let mut group = Group::unjoined(size, &|rank| durable(rank, parts), Epoch(3));
        let told = group.machines.into_iter().zip(wants);
        group.machines = told.map(|(machine, fresh)| machine.starting(*fresh, Number(0))).collect();
        (0..wants.len()).for_each(|at| group.join(at));
        group.wait(TTL);
        group
    }
}

fn why(outcome: Outcome) -> NotDone {
    match outcome {
        Outcome::Failed(why) => why,
        other => panic!("{other:?}"),
    }
}

fn rewind_failed(to: u64, why: Reason) -> NotDone {
    let why = Reason::RewindFailed { to: Number(to), why: Box::new(why) };
    NotDone::Refused(RequestRefusal::Failed(why))
}

#[test]
fn a_suspension_is_answered_when_all_machines_are_at_rest() {
    let mut group = Group::new(2);
    group.starts();
    let mut client = group.asks(0, Ask::Suspend);
    group.settle();
    group.dumps(ONE);
    assert_eq!(group.learns(&mut client), Outcome::Open);
    group.killed();
    group.tell(0, Event::Local(Local::Stored(ONE)));
    group.settle();
    assert_eq!(group.learns(&mut client), Outcome::Open, "rank 1 still stores its part");
    group.tell(1, Event::Local(Local::Stored(ONE)));
    group.settle();
    assert_eq!(group.learns(&mut client), Outcome::Done);

    let mut other = group.asks(1, Ask::Suspend);
    group.settle();
    assert_eq!(group.learns(&mut other), Outcome::Done, "it is suspended already");
    let mut client = group.asks(1, Ask::Resume);
    group.settle();
    assert_eq!(group.learns(&mut client), Outcome::Open);
    group.starts();
    assert_eq!(group.learns(&mut client), Outcome::Done);
}

#[test]
fn a_suspension_whose_snapshot_is_aborted_leaves_all_running_and_says_why() {
    let mut group = Group::new(2);
    group.starts();
    let mut client = group.asks(1, Ask::Suspend);
    group.settle();
    group.tell(0, Event::Local(Local::refused(ONE, "no memory")));
    group.settle();
    assert_eq!(group.learns(&mut client), Outcome::Open);
    group.tell(1, Event::Local(Local::Aborted(ONE)));
    group.settle();
    assert_eq!(group.goal(), Goal::Run);
    assert_eq!(why(group.learns(&mut client)), NotDone::Failed(refused(0, "no memory")));
}

#[test]
fn a_suspension_ends_with_a_job_that_dies_and_a_lost_membership() {
    let mut group = Group::new(2);
    group.starts();
    let mut client = group.asks(1, Ask::Suspend);
    group.settle();
    group.tell(0, Event::Local(Local::Ended(failed("it died"))));
    group.settle();
    assert_eq!(why(group.learns(&mut client)), NotDone::Failed(job_failed(0, "it died")));

    let mut client = group.asks(1, Ask::Rewind(ONE));
    group.tell(1, Event::SessionLost);
    assert_eq!(why(group.learns(&mut client)), NotDone::NotAMember);
}

#[test]
fn a_rewind_is_answered_when_the_job_runs_from_that_image_and_refused_with_a_reason() {
    let mut group = Group::with_images();
    let mut client = group.asks(1, Ask::Rewind(Number(4)));
    group.settle();
    group.killed();
    assert_eq!(group.learns(&mut client), Outcome::Open);
    group.starts();
    assert_eq!(group.learns(&mut client), Outcome::Done);

    let mut client = group.asks(0, Ask::Rewind(Number(9)));
    group.settle();
    assert_eq!(why(group.learns(&mut client)), NotDone::Refused(RequestRefusal::NoImage(Number(9))));
    // Another part of the same name is not the one that is needed.
    group.tell(1, Event::Local(Local::Gone(Number(4))));
    group.settle();
    let mut client = group.asks(0, Ask::Rewind(Number(4)));
    group.settle();
    let refused = RequestRefusal::PartsMissing { image: Number(4), ranks: vec![Rank(1)] };
    assert_eq!(why(group.learns(&mut client)), NotDone::Refused(refused));
    assert_eq!(group.goal(), Goal::Run);
}

fn cannot_go_back(blame: Blame) {
    let mut group = Group::with_images();
    let left = group.plan().left.clone();
    let missing = StartFailure::Other("a file is missing".into());
    let mut client = group.asks(1, Ask::Rewind(Number(4)));
    group.settle();
    group.killed();
    group.tell(1, Event::Local(Local::Ended(Ending::not_started(missing.clone(), blame))));
    group.settle();
    let told = rewind_failed(4, Reason::NotStarted { rank: Rank(1), why: missing });
    assert_eq!(why(group.learns(&mut client)), told);
    assert_eq!((&group.plan().left, &group.plan().aim), (&left, &None));
    assert_eq!((group.plan().in_a_row, group.plan().failures.len()), (0, 0));
    group.tell(0, Event::Local(Local::Ended(failed("killed"))));
    group.settle();
    assert!(
        matches!(group.last(0), Some(Order::Start { from: StartFrom::Image(Number(7)), .. })),
        "{:?}",
        group.last(0)
    );
}

#[test]
fn a_rewind_that_fails_costs_no_group_image() {
    for blame in [Blame::Image, Blame::Machine, Blame::Misfit, Blame::Configuration] {
        cannot_go_back(blame);
    }
}

#[test]
fn a_part_that_is_lost_during_a_rewind_does_not_lead_to_an_older_image() {
    let mut group = Group::with_images();
    let mut client = group.asks(0, Ask::Rewind(Number(7)));
    group.settle();
    group.tell(1, Event::Local(Local::Gone(Number(7))));
    group.settle();
    group.killed();
    assert_eq!(why(group.learns(&mut client)), rewind_failed(7, Reason::PartsGone));
    assert!(matches!(group.last(0), Some(Order::Start { from: StartFrom::Image(Number(4)), .. })), "where it was");
}

#[test]
fn a_request_for_a_snapshot_does_not_replace_another_and_other_requests_do() {
    let mut group = Group::new(2);
    let mut client = group.asks(0, Ask::Suspend);
    group.tell(0, Event::Asked(Ask::Snapshot));
    assert_eq!(group.machines[0].asked().unwrap().ask, Ask::Suspend, "it is served when the job runs");
    group.tell(0, Event::Asked(Ask::StopNow { requeue: true }));
    assert_eq!(why(group.learns(&mut client)), NotDone::Overtaken);
    // The coordinator is slow.
    group.tell(0, Event::Asked(Ask::Rewind(ONE)));
    assert_eq!(group.machines[0].asked().unwrap().ask, Ask::StopNow { requeue: true }, "a deadline comes once");
}

#[test]
fn a_job_that_hangs_after_each_restore_waits_longer_each_time() {
    let mut group = Group::with_images();
    for (times, seconds) in (1..).zip([0, 1, 2, 4, 8, 8]) {
        group.tell(1, Event::Asked(Ask::LeaveHang(Number(7))));
        group.settle();
        assert!(matches!(group.plan().left[..], [left] if left.times == times), "{:?}", group.plan().left);
        group.killed();
        if let Some(almost) = Duration::from_secs(seconds).checked_sub(Duration::from_millis(10)) {
            group.wait(almost);
            assert!(matches!(group.goal(), Goal::Gather { .. }), "{times}");
            group.wait(Duration::from_millis(20));
        }
        assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))), "{times}");
        group.starts();
        // It lives for long enough to be no failure.
        group.wait(Duration::from_secs(3));
    }
}

#[test]
fn only_hangs_count_as_hangs() {
    let mut group = Group::with_images();
    let mut goes_back = |ask: Ask| {
        group.tell(1, Event::Asked(ask));
        group.settle();
        group.killed();
        group.wait(Duration::from_secs(8));
        group.starts();
        group.wait(Duration::from_secs(3));
        group.plan().left[0].times
    };
    let times = [Ask::Rewind(Number(7)), Ask::Rewind(Number(7)), Ask::LeaveHang(Number(7)), Ask::Rewind(Number(7))];
    assert_eq!(times.map(&mut goes_back), [0, 0, 1, 1]);
    assert_eq!(goes_back(Ask::LeaveHang(Number(7))), 2);
    // Somebody who goes back again and again does not wait for it.
    group.tell(1, Event::Asked(Ask::Rewind(Number(7))));
    group.settle();
    group.killed();
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))));
}

#[test]
fn a_group_image_that_cannot_be_restored_after_a_hang_is_not_tried_without_an_end() {
    for (blame, fault, most) in
        [(Blame::Image, Fault::Job, 2), (Blame::Image, Fault::Outside, 4), (Blame::Machine, Fault::Job, 4)]
    {
        let (mut group, no) = (Group::with_images(), StartFailure::Other("no".into()));
        for times in 1..=most {
            assert_eq!(crate::images::trusted(&group.coordinator.view), [7, 4].map(Number), "{times}");
            let mut client = group.asks(1, Ask::LeaveHang(Number(4)));
            group.settle();
            group.killed();
            group.wait(Duration::from_secs(8));
            assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(4))));
            group.tell(1, Event::Local(Local::Ended(Ending::NotStarted { why: no.clone(), blame, fault })));
            group.settle();
            let told = rewind_failed(4, Reason::NotStarted { rank: Rank(1), why: no.clone() });
            assert_eq!(why(group.learns(&mut client)), told);
            assert_eq!((group.plan().in_a_row, group.plan().aim.is_some()), (1, false), "it counts as a restart");
            group.tell(0, Event::Local(Local::Ended(failed("killed"))));
            group.wait(Duration::from_secs(8));
            assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(7))), "where it was");
            group.starts();
            // It is healthy, until it hangs again.
            group.wait(Duration::from_secs(30));
            // No new image: the job holds snapshots.
            if let Goal::Prepare(number) = group.goal() {
                group.all(&|_| Local::Refused(number, SnapshotRefusal::JobBlocks));
            }
        }
        assert_eq!(crate::images::trusted(&group.coordinator.view), [Number(7)]);
    }
}

#[test]
fn no_job_goes_back_to_before_its_new_beginning() {
    let mut group = Group::told(&[true, true], &[4]);
    group.starts();
    let mut client = group.asks(0, Ask::Rewind(Number(4)));
    group.settle();
    assert_eq!(why(group.learns(&mut client)), NotDone::Refused(RequestRefusal::BeforeFresh(Number(4))));
    assert_eq!(group.goal(), Goal::Run);
}

#[test]
fn a_stop_tries_its_final_snapshot_again_while_there_is_time() {
    let stop = Ask::Stop { requeue: true, within: Duration::from_secs(30) };
    let mut group = Group::new(2);
    group.starts();
    // An earlier snapshot is being undone.
    group.wait(INTERVAL);
    group.tell(0, Event::Local(Local::refused(ONE, "no memory")));
    group.settle();
    group.tell(1, Event::Asked(stop));
    group.settle();
    group.tell(1, Event::Local(Local::Aborted(ONE)));
    group.settle();
    // The job holds snapshots for some seconds.
    for number in [2, 3, 4].map(Number) {
        assert_eq!(group.goal(), Goal::Prepare(number));
        group.tell(0, Event::Local(Local::Refused(number, SnapshotRefusal::JobBlocks)));
        group.settle();
        group.tell(1, Event::Local(Local::Aborted(number)));
        group.settle();
        assert_eq!(group.goal(), Goal::Run);
        group.wait(Duration::from_millis(990 << (number.0 - 2)));
        assert_eq!(group.goal(), Goal::Run, "not at once");
        group.wait(Duration::from_millis(200));
    }
    group.dumps(Number(5));
    group.killed();
    group.all(&|_| Local::Stored(Number(5)));
    group.wait(Duration::from_secs(1));
    assert_eq!(group.goal(), Goal::End(End::Stopped { requeue: true }));
    assert!(group.coordinator.view.images.contains_key(&Number(5)));
}

#[test]
fn a_stop_tries_its_final_snapshot_until_its_time_is_over() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Asked(Ask::Stop { requeue: true, within: Duration::from_secs(30) }));
    group.settle();
    // The job holds snapshots for nearly all of that time.
    let (began, mut number) = (group.now, ONE);
    while group.now - began < Duration::from_secs(26) {
        if group.goal() == Goal::Prepare(number) {
            group.tell(0, Event::Local(Local::Refused(number, SnapshotRefusal::JobBlocks)));
            group.settle();
            group.tell(1, Event::Local(Local::Aborted(number)));
            group.settle();
            number = Number(number.0 + 1);
        }
        assert_eq!(group.goal(), Goal::Run, "after {:?}", group.now - began);
        group.wait(Duration::from_secs(1));
    }
    group.wait(Duration::from_secs(3));
    assert_eq!(group.goal(), Goal::Prepare(number));
}

#[test]
fn a_stop_ends_at_once_if_no_time_is_left_for_another_final_snapshot() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Asked(Ask::Stop { requeue: true, within: Duration::from_secs(10) }));
    group.settle();
    group.tell(0, Event::Local(Local::refused(ONE, "no memory")));
    group.settle();
    // Another one would begin a second after this one is undone.
    group.wait(Duration::from_millis(9500));
    group.tell(1, Event::Local(Local::Aborted(ONE)));
    group.settle();
    assert_eq!(group.goal(), Goal::End(End::Stopped { requeue: true }));
}

#[test]
fn what_snapshots_cost_is_told_to_another_coordinator() {
    let mut group = Group::new(1);
    let costs = Costs { quiet: true, ..Costs::default() };
    group.tell(0, Event::Local(Local::Costs(costs.clone())));
    let mut again = Group::unjoined(1, &|_| BTreeMap::new(), Epoch(1));
    again.machines = group.machines.iter().map(Machine::afresh).collect();
    again.join(0);
    assert_eq!(again.coordinator.view.members[&Rank(0)].costs, costs);
}

#[test]
fn a_stop_that_is_not_served_outlives_the_membership() {
    let stop = Ask::Stop { requeue: true, within: Duration::from_secs(60) };
    let is_over = |group: &Group| group.goal() == Goal::End(End::Stopped { requeue: true });
    for ask in [stop, Ask::StopNow { requeue: true }] {
        let mut group = Group::new(2);
        group.starts();
        // Its lease is over, and it does not know that yet: what it asks for is not written.
        let lost = group.machines[1].incarnation().unwrap();
        group.coordinator.revoke(lost);
        let mut client = group.asks(1, ask.clone());
        group.tell(1, Event::SessionLost);
        assert_eq!(group.learns(&mut client), Outcome::Open, "it is made again");
        group.settle();
        group.killed();
        assert!(!is_over(&group), "nobody has asked for that");
        group.join(1);
        assert!(is_over(&group), "{ask:?}: {:?}", group.goal());

        // Another coordinator, which knows nothing.
        let mut group = Group::new(2);
        group.starts();
        group.tell(1, Event::SessionLost);
        group.tell(1, Event::Asked(ask));
        let mut again = Group::unjoined(2, &|_| BTreeMap::new(), Epoch(1));
        again.machines = group.machines.iter().map(Machine::afresh).collect();
        (0..2).for_each(|at| again.join(at));
        assert!(is_over(&again), "{:?}", again.goal());
    }
}

#[test]
fn a_request_that_was_served_or_is_no_stop_ends_with_the_membership() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Asked(Ask::Stop { requeue: true, within: Duration::from_secs(60) }));
    group.settle();
    assert_eq!(group.goal(), Goal::Prepare(ONE), "it is served");
    group.tell(1, Event::SessionLost);
    assert_eq!(group.machines[1].asked(), None);
    for ask in [Ask::Snapshot, Ask::Suspend, Ask::Resume, Ask::Rewind(ONE)] {
        let mut group = Group::new(2);
        group.tell(1, Event::Asked(ask));
        group.comes_back(1);
        assert_eq!(group.machines[1].asked(), None);
    }
}

fn suspended() -> Group {
    let mut group = Group::new(2);
    group.starts();
    group.tell(0, Event::Asked(Ask::Suspend));
    group.settle();
    group.dumps(ONE);
    group.killed();
    group.all(&|_| Local::Stored(ONE));
    group.parts = (0..2).map(|rank| durable(rank, &[1])).collect();
    assert_eq!(group.goal(), Goal::Suspended);
    group
}

#[test]
fn a_job_that_is_suspended_before_it_starts_stays_so() {
    // Nobody has run it, or those that did have new memberships.
    for epoch in [0, 1] {
        let mut group = Group::unjoined(2, &|_| BTreeMap::new(), Epoch(0));
        if epoch > 0 {
            (0..2).for_each(|at| group.join(at));
            group.wait(TTL);
            group.starts();
            for at in 0..2 {
                let former = group.machines[at].incarnation().unwrap();
                group.coordinator.revoke(former);
                group.tell(at, Event::SessionLost);
                group.tell(at, Event::Local(Local::Ended(failed("killed"))));
            }
        }
        group.join(0);
        assert!(matches!(group.goal(), Goal::Gather { .. }));
        let mut client = group.asks(0, Ask::Suspend);
        group.settle();
        assert_eq!((group.goal(), group.learns(&mut client)), (Goal::Suspended, Outcome::Done));
        group.join(1);
        group.wait(TTL);
        assert_eq!(group.goal(), Goal::Suspended);
        group.tell(1, Event::Asked(Ask::Resume));
        group.settle();
        group.wait(TTL);
        assert_eq!(group.goal(), Goal::Start(StartFrom::Beginning));
    }
}

#[test]
fn a_suspension_waits_while_a_lost_machine_may_still_run_its_job() {
    let early = |rank| crate::options::Options { leases_end_early: true, ..options(Rank(rank), 2) };
    let mut group = Group::unjoined(2, &|_| BTreeMap::new(), Epoch(0));
    group.machines = (0..2).map(|rank| Machine::new(early(rank), Epoch(0))).collect();
    (0..2).for_each(|at| group.join(at));
    group.wait(TTL);
    group.starts();
    // The coordinator has ended its lease too early.
    let lost = group.machines[1].incarnation().unwrap();
    group.coordinator.revoke(lost);
    group.settle();
    group.tell(0, Event::Local(Local::Ended(failed("killed"))));
    group.settle();
    let mut client = group.asks(0, Ask::Suspend);
    group.settle();
    assert!(matches!(group.goal(), Goal::Gather { .. }));
    assert_eq!(group.learns(&mut client), Outcome::Open);
    group.wait(TTL);
    assert_eq!((group.goal(), group.learns(&mut client)), (Goal::Suspended, Outcome::Done));
}

/// The leases of both are over at once. `is_new`: other supervisors join in their place.
fn both_come_back(group: &mut Group, is_new: bool) {
    for at in 0..2 {
        let former = group.machines[at].incarnation().unwrap();
        group.coordinator.revoke(former);
        group.tell(at, Event::SessionLost);
    }
    if is_new {
        group.machines = (0..2).map(|rank| Machine::new(options(Rank(rank), 2), Epoch(1))).collect();
    }
    group.settle();
    (0..2).for_each(|at| group.join(at));
    group.wait(TTL);
}

#[test]
fn a_suspended_group_of_which_nobody_is_left_is_a_new_run() {
    let mut group = suspended();
    both_come_back(&mut group, true);
    assert!(matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(ONE), .. })), "{:?}", group.goal());

    // All are lost at once. One is there again before the lease of the other has expired.
    let mut group = suspended();
    for at in 0..2 {
        group.machines[at] = Machine::new(options(Rank(u32::try_from(at).unwrap()), 2), Epoch(1));
        group.comes_back(at);
        group.wait(TTL / 2);
    }
    group.wait(TTL);
    assert!(matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(ONE), .. })), "{:?}", group.goal());
}

#[test]
fn a_suspended_job_stays_so_as_long_as_a_process_is_there_that_has_seen_it() {
    // One after the other, or all at once, lose their leases and join again.
    let mut group = suspended();
    for at in [0, 1, 0] {
        group.comes_back(at);
        assert_eq!(group.goal(), Goal::Suspended);
    }
    for _ in 0..2 {
        both_come_back(&mut group, false);
        assert_eq!(group.goal(), Goal::Suspended);
    }
    // Each supervisor is replaced while the other is there.
    for at in 0..2 {
        group.machines[at] = Machine::new(options(Rank(u32::try_from(at).unwrap()), 2), Epoch(1));
        group.comes_back(at);
        group.wait(TTL);
        assert_eq!(group.goal(), Goal::Suspended);
    }
    group.tell(1, Event::Asked(Ask::Resume));
    group.settle();
    assert!(matches!(group.last(0), Some(Order::Start { from: StartFrom::Image(ONE), .. })), "{:?}", group.goal());
    assert!(group.coordinator.view.members.values().all(|report| !report.rests));
}

#[test]
fn a_job_is_suspended_also_if_all_lose_their_leases_before_they_have_seen_it() {
    let mut group = Group::new(2);
    group.starts();
    group.tell(0, Event::Asked(Ask::Suspend));
    group.settle();
    group.all(&|_| Local::Locked(ONE));
    group.all(&|_| Local::Quiet(ONE));
    group.tell(0, Event::Local(Local::Dumped(ONE, part(0, ONE))));
    group.tell(1, Event::Local(Local::Dumped(ONE, part(1, ONE))));
    // Rank 0 leads. Nobody hears of what it writes.
    let view = Arc::clone(&group.coordinator.view);
    group.tell(0, Event::View(view));
    assert_eq!(group.goal(), Goal::Suspended);
    group.parts = (0..2).map(|_| BTreeMap::new()).collect();
    for at in 0..2 {
        let former = group.machines[at].incarnation().unwrap();
        group.coordinator.revoke(former);
        group.tell(at, Event::SessionLost);
        group.tell(at, Event::Local(Local::Ended(failed("killed"))));
    }
    (0..2).for_each(|at| group.join(at));
    group.wait(TTL);
    assert_eq!(group.goal(), Goal::Suspended);
}

#[test]
fn a_member_that_gives_up_ends_the_run_of_all_with_its_reason_and_exit_code() {
    let given_up = || Ending::GivenUp { why: "rule 1: out of memory".into(), last: Some(Last::Exit(9)) };
    let end = || {
        let why = Failure::Never { rank: Rank(1), why: "rule 1: out of memory".into() };
        Order::Finish(End::Failed { why, last: Some(Last::Exit(9)) })
    };
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, Event::Local(Local::Ended(given_up())));
    group.settle();
    assert_eq!(group.last(0), Some(&Order::Kill));
    group.tell(0, Event::Local(Local::Ended(failed("killed"))));
    group.settle();
    assert!((0..2).all(|at| group.last(at) == Some(&end())), "{:?}", group.goal());

    // Its job ends because another one has ended, and the order to end it came first.
    let mut group = Group::new(2);
    group.starts();
    group.tell(0, Event::Local(Local::Ended(failed("the connection was closed"))));
    group.settle();
    assert_eq!(group.last(1), Some(&Order::Kill));
    group.tell(1, Event::Local(Local::Ended(given_up())));
    group.settle();
    assert!((0..2).all(|at| group.last(at) == Some(&end())), "{:?}", group.goal());
}

#[test]
fn a_job_that_dies_too_often_ends_the_run_with_its_last_exit_code() {
    let mut group = Group::new(2);
    group.starts();
    let most = options(Rank(0), 2).restart.max_restarts;
    for count in 1..=most + 1 {
        // It is not the image's fault.
        group.tell(1, Event::Asked(Ask::Snapshot));
        group.settle();
        let number = Number(u64::from(count));
        group.dumps(number);
        group.all(&|_| Local::Stored(number));
        group.tell(0, Event::Local(Local::Ended(failed("it died"))));
        group.settle();
        group.killed();
        if count <= most {
            group.wait(options(Rank(0), 2).restart.max_backoff);
            group.starts();
        }
    }
    let Goal::End(End::Failed { why, last: Some(Last::Exit(3)) }) = group.goal() else { panic!("{:?}", group.goal()) };
    assert_eq!(why, Failure::InARow { times: most + 1, last: job_failed(0, "it died") });
    // Another run tries it again.
    group.parts = (0..2).map(|rank| durable(rank, &[u64::from(most) + 1])).collect();
    (0..2).for_each(|at| group.comes_back(at));
    assert!(matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(_), .. })), "{:?}", group.goal());
}

#[test]
fn a_job_that_dies_at_once_after_each_beginning_is_given_up() {
    let mut group = Group::new(2);
    for _ in 0..options(Rank(0), 2).restart.early_deaths {
        group.starts();
        group.tell(0, Event::Local(Local::Ended(failed("it died"))));
        group.settle();
        group.killed();
        group.wait(options(Rank(0), 2).restart.max_backoff);
    }
    let Goal::End(End::Failed { why, last: Some(Last::Exit(3)) }) = group.goal() else { panic!("{:?}", group.goal()) };
    let restart = options(Rank(0), 2).restart;
    let (times, within, last) = (restart.early_deaths, restart.min_uptime, job_failed(0, "it died"));
    assert_eq!(why, Failure::EarlyDeaths { times, within, last });
}

#[test]
fn all_start_from_the_beginning_together_and_never_from_an_older_image_again() {
    let mut group = Group::told(&[true, true], &[4, 7]);
    let begins = |order: Option<&Order>| matches!(order, Some(Order::Start { from: StartFrom::Beginning, .. }));
    assert!((0..2).all(|at| begins(group.last(at))), "{:?}", group.goal());
    group.starts();
    assert_eq!(group.machines[0].floor(), Number(8));
    assert_eq!(crate::usable(&group.coordinator.view), []);
    // What fails before the first image begins again; the older images are kept until there is one.
    group.tell(0, Event::Local(Local::Ended(failed("it died"))));
    group.settle();
    group.killed();
    assert!(begins(group.last(1)), "{:?}", group.goal());
    group.starts();
    assert!(group.coordinator.view.images.contains_key(&Number(7)));
    group.wait(INTERVAL);
    group.dumps(Number(8));
    group.all(&|_| Local::Stored(Number(8)));
    assert!(!group.coordinator.view.images.contains_key(&Number(7)));

    // The coordinator loses its data, and the machines remember.
    let mut again = Group::unjoined(2, &|rank| durable(rank, &[4, 7]), Epoch(3));
    again.machines = again.machines.into_iter().map(|machine| machine.starting(false, Number(8))).collect();
    (0..2).for_each(|at| again.join(at));
    again.wait(TTL);
    assert!(begins(again.last(0)), "{:?}", again.goal());

    // The coordinator is another one, and the members begin as new ones of it. They do not start anew a second time.
    let mut again = Group::unjoined(2, &|rank| durable(rank, &[4, 7, 8]), Epoch(3));
    again.machines = group.machines.iter().map(Machine::afresh).collect();
    (0..2).for_each(|at| again.join(at));
    again.wait(TTL);
    let from = |order: Option<&Order>| matches!(order, Some(Order::Start { from: StartFrom::Image(Number(8)), .. }));
    assert!(from(again.last(0)), "{:?}", again.goal());
    assert_eq!(again.machines[0].floor(), Number(8));
}

#[test]
fn a_rewind_is_not_undone_by_a_coordinator_that_loses_its_data() {
    let mut group = Group::with_images();
    group.tell(1, Event::Asked(Ask::Rewind(Number(4))));
    group.settle();
    group.killed();
    group.starts();
    let known: Vec<_> = group.machines.iter().map(|machine| machine.rewound().cloned()).collect();
    let begins = |machines: Vec<Machine>| {
        let mut group = Group::unjoined(2, &|rank| durable(rank, &[4, 7]), Epoch(4));
        group.machines = machines;
        (0..2).for_each(|at| group.join(at));
        group
    };
    let from = |group: &mut Group| {
        group.wait(TTL);
        let goal = group.goal();
        match goal {
            Goal::Start(StartFrom::Image(number)) => number,
            other => panic!("{other:?}"),
        }
    };
    // The same processes, or others on these machines; also if one of the machines is new.
    assert_eq!(from(&mut begins(group.machines.iter().map(Machine::afresh).collect())), Number(4));
    let others = |known: Vec<Option<Rewound>>| -> Vec<Machine> {
        let ranks = (0..).map(|rank| Machine::new(options(Rank(rank), 2), Epoch(4)));
        ranks.zip(known).map(|(machine, rewound)| machine.remembering(rewound)).collect()
    };
    assert_eq!(from(&mut begins(others(known.clone()))), Number(4));
    assert_eq!(from(&mut begins(others(vec![None, known[1].clone()]))), Number(4));
    // One was away since before all others were replaced: its numbers are not those of the others.
    let other = Some(Rewound { origin: OLD, left: Vec::new() });
    assert_eq!(from(&mut begins(others(vec![other, known[1].clone()]))), Number(7));

    // What was abandoned can be gone back to.
    let mut again = begins(others(known));
    again.tell(0, Event::Asked(Ask::Rewind(Number(7))));
    again.settle();
    assert_eq!(from(&mut again), Number(7));
    assert!(again.machines.iter().all(|machine| machine.rewound().is_some_and(|it| it.left.len() == 1)));
}

#[test]
fn one_that_alone_is_to_start_from_the_beginning_leaves() {
    let mut group = Group::told(&[false, true], &[4, 7]);
    let end = End::Refused { why: Mismatch::Fresh { with: Rank(1), without: Rank(0) } };
    assert_eq!(group.last(1), Some(&Order::Finish(end)));
    assert!(matches!(group.goal(), Goal::Gather { .. }), "nothing has started");
    // It is started again without the flag.
    group.machines[1] = Machine::new(options(Rank(1), 2), Epoch(3));
    group.comes_back(1);
    assert!(
        matches!(group.last(0), Some(Order::Start { from: StartFrom::Image(Number(7)), .. })),
        "{:?}",
        group.goal()
    );
}

#[test]
fn a_supervisor_that_is_started_again_with_the_flag_does_not_begin_again() {
    let mut group = Group::told(&[true, true], &[4]);
    group.starts();
    group.wait(INTERVAL);
    group.dumps(Number(5));
    group.all(&|_| Local::Stored(Number(5)));
    group.parts[1] = durable(1, &[5]);
    group.machines[1] = Machine::new(options(Rank(1), 2), Epoch(1)).starting(true, Number(5));
    group.comes_back(1);
    group.tell(0, Event::Local(Local::Ended(failed("killed"))));
    group.settle();
    assert!(
        matches!(group.last(1), Some(Order::Start { from: StartFrom::Image(Number(5)), .. })),
        "{:?}",
        group.goal()
    );
    assert_eq!(group.coordinator.view.members[&Rank(0)].fresh, Fresh::Done);
}

#[test]
fn a_completed_job_runs_again_only_if_all_say_so() {
    let completed = |fresh: &[bool]| {
        let mut group = Group::new(2);
        group.starts();
        group.all(&|_| Local::Ended(Ending::Completed));
        assert_eq!(group.last(0), Some(&Order::Finish(End::Completed)));
        for (at, fresh) in fresh.iter().enumerate() {
            let rank = Rank(u32::try_from(at).unwrap());
            // The other one may not have left yet.
            group.machines[at] = Machine::new(options(rank, 2), Epoch(1)).starting(*fresh, Number(0));
            group.comes_back(at);
        }
        group
    };
    let mut group = completed(&[true]);
    assert_eq!(group.goal(), Goal::End(End::Completed), "the other has not come");
    group.wait(options(Rank(0), 2).limits.wait);
    assert!(matches!(group.last(0), Some(Order::Finish(End::Missing { .. }))), "{:?}", group.last(0));
    let group = completed(&[true, true]);
    assert!((0..2).all(|at| matches!(group.last(at), Some(Order::Start { from: StartFrom::Beginning, .. }))));
    let group = completed(&[false]);
    assert_eq!(group.last(0), Some(&Order::Finish(End::Completed)));
}

#[test]
fn a_stop_does_not_wait_behind_a_request_that_is_not_served_yet() {
    // Rank 0 asks while the job starts, or while another snapshot is taken.
    for ask in [Ask::Snapshot, Ask::Suspend] {
        let mut group = Group::new(2);
        assert!(matches!(group.goal(), Goal::Start(_)));
        group.tell(0, Event::Asked(ask));
        group.settle();
        group.tell(1, Event::Asked(Ask::StopNow { requeue: true }));
        group.settle();
        assert_eq!(group.goal(), Goal::End(End::Stopped { requeue: true }));
    }
    let mut group = Group::new(2);
    group.starts();
    group.wait(INTERVAL);
    assert_eq!(group.goal(), Goal::Prepare(ONE));
    group.tell(0, Event::Asked(Ask::Snapshot));
    group.settle();
    group.tell(1, Event::Asked(Ask::StopNow { requeue: true }));
    group.settle();
    assert_eq!(group.goal(), Goal::End(End::Stopped { requeue: true }));
}

#[test]
fn a_stop_at_once_does_not_wait_for_the_end_of_an_abort() {
    let mut group = Group::new(2);
    group.starts();
    group.wait(INTERVAL);
    group.tell(0, Event::Local(Local::refused(ONE, "no memory")));
    group.settle();
    assert!(matches!(group.goal(), Goal::Abort { .. }));
    group.tell(1, Event::Asked(Ask::StopNow { requeue: false }));
    group.settle();
    assert_eq!(group.goal(), Goal::End(End::Stopped { requeue: false }));
}

#[test]
fn no_snapshot_is_promised_once_the_job_of_one_machine_has_completed() {
    let mut group = Group::new(2);
    group.starts();
    let mut early = group.asks(0, Ask::Suspend);
    // It completes before the leader has seen the request.
    group.tell(1, Event::Local(Local::Ended(Ending::Completed)));
    group.settle();
    let completed = || RequestRefusal::Failed(Reason::JobCompleted(Rank(1)));
    assert_eq!(why(group.learns(&mut early)), NotDone::Refused(completed()));
    assert_eq!(group.goal(), Goal::Run);
    for ask in [Ask::Snapshot, Ask::Suspend] {
        let mut late = group.asks(0, ask);
        group.settle();
        assert_eq!(why(group.learns(&mut late)), NotDone::Refused(completed()));
    }
    assert!(!group.orders.iter().flatten().any(|order| matches!(order, Order::Prepare(_))));
}

#[test]
fn a_suspension_is_given_up_when_the_job_of_one_machine_completes() {
    let mut group = Group::new(2);
    group.starts();
    // The part of an earlier snapshot is being stored: no other one is taken until then.
    group.wait(INTERVAL);
    group.dumps(ONE);
    group.settle();
    assert_eq!(group.goal(), Goal::Run);
    let mut client = group.asks(0, Ask::Suspend);
    group.settle();
    assert_eq!(group.learns(&mut client), Outcome::Open);
    group.tell(1, Event::Local(Local::Ended(Ending::Completed)));
    // Its supervisor sees each plan before it reports that it has.
    let view = Arc::clone(&group.coordinator.view);
    group.tell(0, Event::View(view));
    assert!(matches!(group.goal(), Goal::Abort { .. }));
    assert_eq!(group.learns(&mut client), Outcome::Open);
    group.settle();
    assert_eq!(why(group.learns(&mut client)), NotDone::Failed(Reason::JobCompleted(Rank(1))));
    assert_eq!((group.goal(), group.plan().then), (Goal::Run, crate::documents::Then::RunOn));
}

#[test]
fn a_run_that_is_stopped_for_all_is_not_queued_again_by_a_machine_that_had_ended_alone() {
    use crate::requests::{has_job_queued_again, is_over_for_good};
    for (requeue, asks) in [(true, true), (false, false)] {
        let mut group = Group::new(2);
        group.starts();
        // Its supervisor has ended the run here, to be queued again, and waits for the others.
        group.tell(1, Event::Local(Local::Ended(failed("its part cannot be fetched"))));
        group.settle();
        let us = group.machines[1].incarnation().unwrap();
        let wants = |group: &Group| {
            let view = &group.coordinator.view;
            (has_job_queued_again(view, us), is_over_for_good(view, Rank(1)))
        };
        assert_eq!(wants(&group), (false, false), "the run is not over");
        group.tell(0, Event::Asked(Ask::StopNow { requeue }));
        group.settle();
        group.killed();
        assert_eq!(group.goal(), Goal::End(End::Stopped { requeue }));
        group.tell(1, Event::Local(Local::Done));
        group.leaves(0);
        assert_eq!(wants(&group), (asks, !asks));
        // The end of an earlier run says nothing.
        group.comes_back(1);
        let us = group.machines[1].incarnation().unwrap();
        let view = &group.coordinator.view;
        assert!(!has_job_queued_again(view, us) && !is_over_for_good(view, Rank(1)));
    }
}
