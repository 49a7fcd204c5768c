use chrono::TimeDelta;

use super::*;
use crate::report::at;
use crate::telemetry::events::What;
use rekindle_store::manifest::Reason;

/// A life with three snapshots of a second each, ten minutes apart, a crash, and one more snapshot.
fn events() -> Vec<Event> {
    let event = |s: i64, what| Event { time: at(s), ..Event::now("run", what) };
    let taken = |s: i64, n: u32| {
        let (reason, phases) = (Reason::Interval, Vec::new());
        let image = ImageId::new(n, at(s));
        event(s, What::SnapshotTaken { image, reason, freeze_us: u64::from(n) * 1_000_000, phases, bytes: 9 })
    };
    let image = Some(ImageId::new(3, at(1810)));
    vec![
        event(
            0,
            What::Supervised {
                supervisor: 1,
                command: vec!["x".into()],
                interval: "10m".into(),
                before: None,
                last_seen: None,
            },
        ),
        event(
            4,
            What::Started { pid: None, image: None, took_us: 4_000_000, moved: Vec::new(), differences: Vec::new() },
        ),
        taken(605, 1),
        taken(1207, 2),
        taken(1810, 3),
        event(1900, What::Ended { exit_code: Some(1), signal: None, cause: None }),
        event(1900, What::Restarting { image, after_us: 0 }),
        event(1906, What::Started { pid: None, image, took_us: 1, moved: Vec::new(), differences: Vec::new() }),
        event(2106, What::Ended { exit_code: Some(0), signal: None, cause: None }),
        event(2106, What::Finished { outcome: "completed".into(), exit_code: Some(0), why: None }),
    ]
}

#[test]
fn goodput_is_what_was_run_and_stands_of_all_the_time() {
    let report = Report::new(&events(), Facts::default(), at(9999));
    let s = |n: u64| n * 1_000_000;
    let times =
        Times { wall_us: s(2106), useful_us: s(2000), frozen_us: s(6), lost_us: s(90), down_us: s(10), ..report.times };
    assert_eq!(report.times, times);
    assert_eq!((times.away_us, times.idle_us, times.goodput_ppm), (0, 0, Some(949_667)));
    assert_eq!((report.restarts, report.failures, report.snapshots_failed), (1, 1, 0));
    let freeze = report.freeze.unwrap();
    assert_eq!((freeze.median_us, freeze.p95_us, freeze.max_us, freeze.sum_us), (s(2), s(3), s(3), s(6)));
    // Between the snapshots of one life: 600 s, twice.
    let cost = report.cost.unwrap();
    assert_eq!((cost.interval_us, cost.overhead_ppm), (s(600), 3_322));
    let mtbf = TimeDelta::from_std(cost.best.mtbf).unwrap();
    assert_eq!(mtbf, (TimeDelta::days(1) + TimeDelta::seconds(2090)) / 2);
    assert!(cost.best_sum_ppm() <= cost.sum_ppm() && cost.arithmetic.contains("by Daly"));
}

#[test]
fn what_was_before_is_left_out_but_known() {
    let since = Some(at(1850));
    let report = Report::new(&events(), Facts { since, ..Facts::default() }, at(9999));
    let times = report.times;
    assert_eq!((times.lost_us, times.useful_us, times.down_us), (50_000_000, 200_000_000, 6_000_000));
    assert_eq!((report.from, report.failures, report.events_in_all), (Some(at(1850).timestamp_micros()), 1, 5));
    assert!(report.snapshots.is_empty() && report.freeze.is_none() && report.cost.is_none());
    let never = Report::new(&events(), Facts { since: Some(at(99_999)), ..Facts::default() }, at(9999));
    assert_eq!((never.from, never.times), (None, Times::default()));
}

#[test]
fn quantiles_are_of_those_that_there_are() {
    assert_eq!(Freezes::of([0, 0].into_iter()), None);
    let of = |n: u64| Freezes::of(1..=n).map(|it| (it.median_us, it.p95_us, it.max_us));
    assert_eq!((of(1), of(2), of(100)), (Some((1, 1, 1)), Some((1, 2, 2)), Some((50, 95, 100))));
}
