//! When the next snapshot is taken, and what becomes of group images that nobody can commit.

use super::*;
use crate::documents::Costs;

/// Whether a snapshot begins within this time, and after how many seconds.
fn begins_within(group: &mut Group, seconds: u64) -> Option<u64> {
    (0..=seconds).find(|second| {
        if *second > 0 {
            group.wait(Duration::from_secs(1));
        }
        matches!(group.goal(), Goal::Prepare(_))
    })
}

#[test]
fn each_aborted_snapshot_in_a_row_doubles_the_pause() {
    let mut group = Group::new(2);
    group.starts();
    group.wait(INTERVAL);
    let mut pauses = Vec::new();
    let aborts = |group: &mut Group, undone_after: u64| {
        let Goal::Prepare(number) = group.goal() else { panic!("{:?}", group.goal()) };
        group.tell(0, Event::Local(Local::refused(number, "no room")));
        group.settle();
        // The other machine undoes it, which may take longer than the pause.
        group.wait(Duration::from_secs(undone_after));
        assert!(matches!(group.goal(), Goal::Abort { .. }));
        group.tell(1, Event::Local(Local::Aborted(number)));
        group.settle();
        assert_eq!(group.goal(), Goal::Run);
        begins_within(group, 60)
    };
    for undone_after in [0, 5, 0, 7, 0] {
        pauses.push(aborts(&mut group, undone_after));
    }
    assert_eq!(pauses, [3, 6, 12, 15, 15].map(Some), "retry_after, up to the interval");
    let Goal::Prepare(number) = group.goal() else { panic!("{:?}", group.goal()) };
    group.dumps(number);
    group.all(&|_| Local::Stored(number));
    assert_eq!(begins_within(&mut group, 60), Some(INTERVAL.as_secs()));
    assert_eq!(aborts(&mut group, 0), Some(3), "in a row");
}

#[test]
fn the_pause_does_not_grow_while_the_job_blocks_snapshots() {
    let mut group = Group::new(2);
    group.starts();
    group.wait(INTERVAL);
    for _ in 0..5 {
        let Goal::Prepare(number) = group.goal() else { panic!("{:?}", group.goal()) };
        group.tell(0, Event::Local(Local::Refused(number, SnapshotRefusal::JobBlocks)));
        group.settle();
        group.tell(1, Event::Local(Local::Aborted(number)));
        group.settle();
        assert_eq!(begins_within(&mut group, 60), Some(3), "retry_after");
    }
}

#[test]
fn no_snapshot_is_taken_at_the_interval_right_before_the_final_one() {
    let mut group = Group::new(2);
    group.starts();
    let costs = |quiet| Event::Local(Local::Costs(Costs { quiet, ..Costs::default() }));
    group.tell(1, costs(true));
    group.settle();
    assert_eq!(begins_within(&mut group, 60), None);
    // It is on request, and the final one is.
    group.tell(0, Event::Asked(Ask::Stop { requeue: true, within: Duration::from_secs(60) }));
    group.settle();
    assert_eq!(group.goal(), Goal::Prepare(ONE));
    // The deadline was moved.
    let mut group = Group::new(2);
    group.starts();
    group.tell(1, costs(true));
    group.settle();
    assert_eq!(begins_within(&mut group, 60), None);
    group.tell(1, costs(false));
    group.settle();
    assert_eq!(group.goal(), Goal::Prepare(ONE));
}

#[test]
fn group_images_that_one_machine_cannot_store_do_not_pile_up() {
    let mut group = Group::new(2);
    let keep = options(Rank(0), 2).keep;
    group.starts();
    let mut gone: Option<Number> = None;
    for at in 1..=10 {
        let number = Number(at);
        assert!(begins_within(&mut group, 60).is_some(), "{number}");
        group.dumps(number);
        // There is room for two in memory.
        group.tell(0, Event::Local(Local::Stored(number)));
        group.tell(1, Event::Local(Local::NotStored(number)));
        if let Some(gone) = gone.replace(number) {
            group.tell(1, Event::Local(Local::Gone(gone)));
        }
        group.settle();
        let images = &group.coordinator.view.images;
        assert!(images.len() <= keep, "{:?}", images.keys());
        let parts = group.machines[0].report().unwrap().parts;
        assert_eq!(parts.keys().collect::<Vec<_>>(), images.keys().collect::<Vec<_>>(), "the others drop theirs");
        assert_eq!(images.keys().last(), Some(&number));
    }
    // The newest is still there to continue from.
    group.tell(0, Event::Local(Local::Ended(Ending::failed("it died", None))));
    group.settle();
    group.killed();
    group.wait(Duration::from_secs(8));
    assert_eq!(group.goal(), Goal::Start(StartFrom::Image(Number(10))));
}

#[test]
fn a_group_image_that_is_not_whole_stays_while_no_newer_one_is() {
    let mut group = Group::new(2);
    group.starts();
    for number in [ONE, Number(2)] {
        assert!(begins_within(&mut group, 60).is_some());
        group.dumps(number);
        group.tell(0, Event::Local(Local::Stored(number)));
        group.tell(1, Event::Local(Local::NotStored(number)));
        group.settle();
    }
    // The other machine loses both: it may be another one, whose store comes back.
    for number in [Number(2), ONE] {
        group.tell(1, Event::Local(Local::Gone(number)));
    }
    group.settle();
    assert_eq!(group.coordinator.view.images.len(), 2);
    assert_eq!(group.machines[0].report().unwrap().parts.len(), 2);
}
