use chrono::TimeDelta;

use super::*;
use crate::report::at as moment;

fn image(n: u32) -> ImageId {
    ImageId::new(n, moment(0))
}

/// An event at this time in milliseconds.
fn event(ms: i64, what: What) -> Event {
    Event { time: moment(0) + TimeDelta::milliseconds(ms), ..Event::now("run", what) }
}

fn supervised(ms: i64) -> Event {
    event(
        ms,
        What::Supervised {
            supervisor: 1,
            command: vec!["x".into()],
            interval: "10m".into(),
            before: None,
            last_seen: None,
        },
    )
}

fn started(ms: i64, from: Option<u32>) -> Event {
    event(
        ms,
        What::Started {
            pid: None,
            image: from.map(image),
            took_us: 1_000_000,
            moved: Vec::new(),
            differences: Vec::new(),
        },
    )
}

/// A snapshot that froze the job for a second.
fn taken(ms: i64, n: u32) -> Event {
    let reason = Reason::Interval;
    event(ms, What::SnapshotTaken { image: image(n), reason, freeze_us: 1_000_000, phases: Vec::new(), bytes: 9 })
}

fn ended(ms: i64) -> Event {
    event(ms, What::Ended { exit_code: None, signal: Some(9), cause: None })
}

fn restarting(ms: i64, from: Option<u32>) -> Event {
    event(ms, What::Restarting { image: from.map(image), after_us: 0 })
}

fn finished(ms: i64, outcome: &str) -> Event {
    event(ms, What::Finished { outcome: outcome.into(), exit_code: None, why: None })
}

/// Seconds of each kind, in the order of [`Kind::ALL`]: useful, frozen, lost, down, away, idle.
fn seconds(events: &[Event]) -> [u64; 6] {
    History::of(events).sums(None).map(|us| {
        assert_eq!(us % 1_000_000, 0);
        us / 1_000_000
    })
}

#[test]
fn what_was_done_since_the_image_is_lost_by_going_back() {
    let events = [
        supervised(0),
        started(2_000, None),
        taken(13_000, 1),
        taken(24_000, 2),
        ended(31_000),
        restarting(31_000, Some(2)),
        started(34_000, Some(2)),
        taken(45_000, 3),
        ended(50_000),
        restarting(50_000, Some(1)),
        started(52_000, Some(1)),
        ended(60_000),
        finished(62_000, "completed"),
    ];
    // 2 s to start, 3 and 2 s to restart. Useful are the 10 s before the first image and the last 8 s.
    assert_eq!(seconds(&events[..6]), [27, 2, 0, 2, 0, 0]);
    assert_eq!(seconds(&events[..7]), [20, 2, 7, 5, 0, 0]);
    assert_eq!(seconds(&events), [18, 3, 32, 7, 0, 2]);
    let history = History::of(&events);
    let lost: Vec<_> = history.failures().iter().map(|it| (it.what, it.lost_us, it.back_us, it.image)).collect();
    let crash = |lost: u64, back: u64, from| {
        (Trouble::Crash, Some(lost * 1_000_000), Some(back * 1_000_000), Some(image(from)))
    };
    assert_eq!(lost, [crash(7, 3, 2), crash(25, 2, 1)]);
    assert_eq!(history.failures()[0].why, "ended by signal 9 (SIGKILL)");
    assert_eq!(history.restarts().len(), 2);
    // The run time between two snapshots; the first of a life says nothing about the interval.
    let ran: Vec<_> = history.snapshots().iter().map(|it| (it.ran_us / 1_000_000, it.first)).collect();
    assert_eq!(ran, [(10, true), (10, false), (10, true)]);
    let spans = history.until(None);
    assert!(spans.windows(2).all(|pair| pair[0].to == pair[1].from && pair[0].from < pair[0].to), "{spans:?}");
}

#[test]
fn a_new_start_loses_all_of_its_run_and_nothing_of_the_one_before() {
    let fresh = |mut event: Event| {
        event.run = "another".into();
        event
    };
    let events = [
        supervised(0),
        started(1_000, None),
        ended(11_000),
        finished(11_000, "failed"),
        fresh(supervised(20_000)),
        fresh(started(21_000, None)),
        fresh(ended(26_000)),
        fresh(restarting(26_000, None)),
        fresh(started(28_000, None)),
    ];
    assert_eq!(seconds(&events), [10, 0, 5, 4, 0, 9]);
    let whats: Vec<_> = History::of(&events).failures().iter().map(|it| it.what).collect();
    assert_eq!(whats, [Trouble::GivenUp, Trouble::Crash]);
}

#[test]
fn a_new_run_from_an_image_goes_back_to_it_but_undoes_nothing_that_was_completed() {
    let other = |mut event: Event| {
        event.run = "another".into();
        event
    };
    // A rewind: from there on the job belongs to another run.
    let mut events = vec![supervised(0), started(1_000, None), taken(12_000, 1), taken(23_000, 2), ended(30_000)];
    events.push(event(30_000, What::Rewinding { image: image(1) }));
    events.push(other(started(31_000, Some(1))));
    assert_eq!(seconds(&events), [10, 2, 17, 2, 0, 0]);
    events.extend([other(ended(41_000)), other(finished(41_000, "completed"))]);
    events.extend([supervised(50_000), started(51_000, Some(1))]);
    assert_eq!(seconds(&events), [20, 2, 17, 3, 0, 9]);
}

#[test]
fn what_is_told_while_it_stands_still_does_not_set_it_going() {
    let failed = What::HookFailed { hook: "on-failure".into(), why: "away".into() };
    let events = [supervised(0), started(1_000, None), event(10_600, failed), taken(11_000, 1), ended(20_000)];
    assert_eq!(seconds(&events), [18, 1, 0, 1, 0, 0]);
    let history = History::of(&events);
    assert_eq!(history.snapshots()[0].ran_us, 9_000_000);
}

#[test]
fn what_was_asked_for_is_no_failure() {
    let end = |ms, cause| event(ms, What::Ended { exit_code: None, signal: Some(9), cause: Some(cause) });
    let events = [
        supervised(0),
        started(1_000, None),
        taken(12_000, 1),
        end(15_000, Cause::Rewound),
        started(16_000, Some(1)),
        taken(20_000, 2),
        end(20_000, Cause::Suspended),
        started(100_000, Some(2)),
        end(105_000, Cause::BadTraining { rule: 1 }),
        started(107_000, Some(1)),
    ];
    // While it was suspended it was not supposed to run.
    assert_eq!(seconds(&events), [10, 2, 3 + 3 + 5, 1 + 1 + 1 + 1, 0, 80]);
    let history = History::of(&events);
    let [failure] = history.failures() else { panic!("{:?}", history.failures()) };
    assert_eq!((failure.what, failure.lost_us), (Trouble::Crash, Some(8_000_000)));
    assert!(failure.why.contains("training went wrong, by rule 1"), "{}", failure.why);
}

#[test]
fn what_a_supervisor_without_a_word_did_last_is_not_known() {
    let events = [
        supervised(0),
        started(1_000, None),
        taken(12_000, 1),
        event(15_000, What::Stored { image: image(1), took_us: 1_000_000, written: 5 }),
        // Killed at an unknown time.
        supervised(100_000),
        started(103_000, Some(1)),
    ];
    assert_eq!(seconds(&events), [10, 1, 3, 4, 85, 0]);
    let history = History::of(&events);
    let failure = &history.failures()[0];
    assert_eq!(
        (failure.what, failure.back_us, failure.lost_us),
        (Trouble::Supervisor, Some(88_000_000), Some(3_000_000))
    );
    assert_eq!(history.snapshots()[0].written, Some(5));
    assert_eq!(history.up_since(), Some((moment(0) + TimeDelta::milliseconds(103_000)).timestamp_micros()));
    // Whether the present stretch continues depends on whether there is a supervisor.
    let later = Some(moment(110));
    assert_eq!(history.sums(later)[0], 17_000_000);
    assert_eq!(history.until(later).last().map(|span| (span.kind, span.length())), Some((Kind::Useful, 7_000_000)));
    // The heartbeat of its lock gives more information: it ran for 70 s, and the work after the image is lost.
    let mut seen = events;
    if let What::Supervised { last_seen, .. } = &mut seen[4].what {
        *last_seen = Some(moment(82));
    }
    assert_eq!(seconds(&seen), [10, 1, 70, 4, 18, 0]);
    // A stop leaves no open failure.
    let stopped = [supervised(0), started(1_000, None), ended(2_000), finished(3_000, "stopped"), supervised(9_000)];
    assert_eq!(seconds(&stopped), [1, 0, 0, 1, 0, 7]);
    assert!(History::of(&stopped).failures().is_empty());
}

#[test]
fn a_clock_that_is_set_back_makes_no_time_negative() {
    let events = [
        supervised(0),
        started(1_000, None),
        taken(12_000, 1),
        // The clock is set back an hour, and the event comes 10 s later.
        event(-3_588_000 + 10_000, What::SnapshotBegan { reason: Reason::Interval }),
        event(-3_588_000 + 11_000, What::SnapshotFailed { why: "no".into(), job_lost: false }),
        ended(-3_588_000 + 12_000),
        finished(-3_588_000 + 12_000, "completed"),
    ];
    // The step itself is lost, because its length is unknown.
    assert_eq!(seconds(&events), [12, 1, 0, 1, 0, 0]);
    let history = History::of(&events);
    assert_eq!(history.set_back(), (1, 3_590_000_000));
    assert_eq!(history.failures()[0].what, Trouble::Snapshot);
}

#[test]
fn lines_that_are_missing_do_no_harm() {
    let whole = [
        supervised(0),
        started(2_000, None),
        event(11_000, What::SnapshotBegan { reason: Reason::Interval }),
        taken(13_000, 1),
        ended(31_000),
        restarting(31_000, Some(1)),
        started(34_000, Some(1)),
        event(40_000, What::Unknown),
        finished(50_000, "completed"),
    ];
    for gone in 0..1 << whole.len() {
        let kept: Vec<_> =
            whole.iter().enumerate().filter(|(n, _)| gone >> n & 1 == 0).map(|(_, e)| e.clone()).collect();
        let spans = History::of(&kept).until(Some(moment(60)));
        assert!(spans.windows(2).all(|pair| pair[0].to == pair[1].from), "{spans:?}");
        assert!(spans.iter().all(|span| span.from < span.to));
        let all: u64 = spans.iter().map(Span::length).sum();
        let first = kept.first().map_or(60_000, |event| (event.time - moment(0)).num_milliseconds());
        assert_eq!(all / 1000, 60_000 - u64::try_from(first).unwrap());
    }
    // An image from before the beginning of the journal: its name contains the time.
    let early = ImageId::new(7, moment(5));
    let mut events = vec![supervised(0), started(1_000, None), ended(11_000), restarting(11_000, None)];
    events.push(event(
        12_000,
        What::Started { pid: None, image: Some(early), took_us: 0, moved: Vec::new(), differences: Vec::new() },
    ));
    assert_eq!(seconds(&events), [4, 0, 6, 2, 0, 0]);
}
