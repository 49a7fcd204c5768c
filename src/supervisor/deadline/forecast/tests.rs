use chrono::TimeDelta;
use proptest::prelude::*;

use super::*;
use rekindle_store::manifest::Reason;

const BOTH: Route = Route { replica: true };

fn id(n: u32) -> ImageId {
    ImageId::new(n, DateTime::<Utc>::UNIX_EPOCH)
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn at(second: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(second, 0).unwrap()
}

fn event(second: i64, what: What) -> Event {
    Event { version: 1, time: at(second), run: "r".into(), what }
}

/// A snapshot of this size and duration; half of the time is the freeze.
fn snapshot(known: &mut Measured, n: u32, bytes: u64, took: i64) {
    let reason = Reason::Interval;
    known.observe(&event(0, What::SnapshotBegan { reason }));
    let freeze_us = u64::try_from(took * 500_000).unwrap();
    let taken = What::SnapshotTaken { image: id(n), reason, freeze_us, phases: vec![], bytes };
    known.observe(&event(took, taken));
}

fn stored(known: &mut Measured, n: u32, took: u64) {
    known.observe(&event(0, What::Stored { image: id(n), took_us: took * 1_000_000, written: 1 }));
}

#[test]
fn nothing_is_foretold_of_nothing() {
    let mut known = Measured::default();
    assert_eq!(known.forecast(BOTH), None);
    stored(&mut known, 1, 5);
    assert_eq!(known.forecast(BOTH), None, "of an image that nobody knows");
}

#[test]
fn a_measurement_of_a_machine_that_was_stopped_does_not_count() {
    let hours = 8 * 3600;
    let mut known = Measured::default();
    known.observe(&event(0, What::SnapshotBegan { reason: Reason::Interval }));
    known.was_stopped();
    let reason = Reason::Interval;
    let phases = vec![];
    let taken = What::SnapshotTaken { image: id(1), reason, freeze_us: 1_000_000, phases, bytes: 1_000_000_000 };
    known.observe(&event(hours, taken));
    assert_eq!(known.forecast(BOTH), None);
    stored(&mut known, 1, 8 * 3600);
    snapshot(&mut known, 2, 1_000_000_000, 4);
    assert_eq!(known.forecast(BOTH).unwrap().store, seconds(10), "as if it was never measured");
    stored(&mut known, 2, 3);
    assert_eq!(known.forecast(BOTH).unwrap().store, seconds(3));
    // Only the journal is left of an earlier run.
    let mut known = Measured::default();
    for (n, took) in [(1, 4), (2, hours), (3, 5)] {
        snapshot(&mut known, n, 1_000_000_000, took);
        stored(&mut known, n, u64::try_from(took).unwrap());
    }
    let all = known.forecast(BOTH).unwrap();
    assert_eq!((all.snapshot, all.store), (seconds(5), seconds(5)));
    snapshot(&mut known, 4, 1_000_000_000, 30);
    assert_eq!(known.forecast(BOTH).unwrap().snapshot, seconds(30), "that is only slow");
}

#[test]
fn the_slowest_of_the_last_counts_and_grows_with_the_image() {
    let mut known = Measured::default();
    snapshot(&mut known, 1, 1_000_000_000, 4);
    let all = known.forecast(BOTH).unwrap();
    let expected = Forecast { snapshot: seconds(4), store: seconds(10), replica: seconds(10) };
    assert_eq!(all, expected, "at 100 MB/s where nothing is known");
    stored(&mut known, 1, 3);
    known.observe(&event(9, What::Replicated { image: id(1), took_us: 20_000_000, sent: 1 }));
    let all = known.forecast(BOTH).unwrap();
    assert_eq!(all, Forecast { snapshot: seconds(4), store: seconds(3), replica: seconds(20) });
    assert_eq!((all.total(), all.lead()), (seconds(27), seconds(27) + Duration::from_millis(8750)));
    // Twice the size takes twice as long; faster measurements do not count.
    snapshot(&mut known, 2, 2_000_000_000, 1);
    stored(&mut known, 2, 1);
    let all = known.forecast(BOTH).unwrap();
    assert_eq!(all, Forecast { snapshot: seconds(4), store: seconds(6), replica: seconds(40) });
    // Without a replica its time is not counted.
    let only = known.forecast(Route { replica: false }).unwrap();
    assert_eq!(only.total(), seconds(10));
    // Slow measurements are forgotten eventually.
    for n in 3..9 {
        snapshot(&mut known, n, 2_000_000_000, 1);
        stored(&mut known, n, 1);
    }
    assert_eq!(known.forecast(BOTH).unwrap().snapshot, seconds(1));
    assert_eq!(known.forecast(BOTH).unwrap().store, seconds(1));
}

#[test]
fn a_clock_that_is_put_back_makes_no_snapshot_shorter_than_its_freeze() {
    let mut known = Measured::default();
    known.observe(&event(100, What::SnapshotBegan { reason: Reason::Signal }));
    let taken =
        What::SnapshotTaken { image: id(1), reason: Reason::Signal, freeze_us: 7_000_000, phases: vec![], bytes: 1 };
    known.observe(&event(50, taken));
    assert_eq!(known.forecast(BOTH).unwrap().snapshot, seconds(7));
}

#[test]
fn the_last_snapshot_is_begun_so_long_before_the_deadline() {
    assert_eq!(plan(at(0), at(3600), seconds(60)), Plan { at: at(3540), room: Room::Enough });
    // A run whose last snapshot takes longer than its time must still make progress.
    assert_eq!(plan(at(0), at(100), seconds(60)), Plan { at: at(50), room: Room::Short });
    assert_eq!(plan(at(100), at(50), seconds(60)), Plan { at: at(100), room: Room::Short }, "it is over");
    assert_eq!(plan(at(0), at(100), Duration::MAX).room, Room::Short);
}

#[test]
fn a_grace_that_is_too_short_is_told_with_numbers() {
    let forecast = Forecast { snapshot: seconds(20), store: seconds(40), replica: Duration::ZERO };
    assert_eq!(too_short(&forecast, seconds(60), Attended::Yes), None);
    assert_eq!(too_short(&forecast, seconds(30), Attended::No), None, "nobody kills us");
    let text = too_short(&forecast, seconds(30), Attended::Yes).unwrap();
    assert!(
        text.contains("20s, then 40s to store") && text.contains("grace is 30s") && text.contains("1m 17s"),
        "{text}"
    );
    let text = too_short(&forecast, seconds(10), Attended::No).unwrap();
    assert!(text.contains("20s, and snapshot.grace is 10s") && text.contains("without one"), "{text}");
}

#[test]
fn an_image_that_is_on_its_way_has_its_rest_before_it() {
    let seen = |done, rate| Persisting { image: id(1), done, total: 1000, written: 0, rate };
    assert_eq!(left_of(&seen(0, 0), seconds(10)), seconds(10));
    assert_eq!(left_of(&seen(100, 1), seconds(10)), seconds(9), "too early to believe its rate");
    assert_eq!(left_of(&seen(500, 10), seconds(10)), seconds(50), "it is slower than expected");
    assert_eq!(left_of(&seen(500, 1000), seconds(10)), seconds(5));
    assert_eq!(left_of(&seen(1000, 10), seconds(10)), Duration::ZERO);
    assert_eq!(left_of(&Persisting { total: 0, ..seen(0, 0) }, seconds(10)), Duration::ZERO);
}

proptest! {
    #[test]
    fn a_plan_is_within_the_run(begun in 0i64..1_000_000, length in 0i64..1_000_000, lead in 0u64..2_000_000) {
        let end = at(begun + length);
        let found = plan(at(begun), end, seconds(lead));
        prop_assert!(found.at >= at(begun) && found.at <= end);
        let gets = found.at - at(begun);
        prop_assert!(gets + TimeDelta::seconds(1) >= (end - at(begun)) / 2, "the job gets half of it at least");
        if found.room == Room::Enough {
            prop_assert!((end - found.at).to_std().unwrap() >= seconds(lead));
        }
    }
}
