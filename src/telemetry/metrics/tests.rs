//! Facts from invented events, and their text.

use proptest::prelude::*;

use super::*;
use crate::published::{Group, GroupImage, GroupMember};
use crate::report::history::History;
use crate::report::model::Times;
use rekindle_store::manifest::{Phase, Reason};

fn image(n: u32) -> ImageId {
    ImageId::new(n, DateTime::UNIX_EPOCH)
}

fn value(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn events_become_numbers() {
    let begun = Instant::now();
    let mut facts = Facts::new("j", Replicated::Yes, begun);
    let phase = |name: &str| Phase { phase: name.into(), started_us: 0, took_us: 250_000 };
    let taken = |n, names: &[&str]| What::SnapshotTaken {
        image: image(n),
        reason: Reason::Interval,
        freeze_us: 700_000,
        phases: names.iter().map(|name| phase(name)).collect(),
        bytes: 5_000_000_000,
    };
    let ended = |cause| What::Ended { exit_code: None, signal: Some(9), cause: Some(cause) };
    for what in [
        What::Started { pid: Some(7), image: None, took_us: 1, moved: Vec::new(), differences: Vec::new() },
        taken(1, &["lock", "dump"]),
        What::SnapshotFailed { why: "no room".into(), job_lost: false },
        taken(2, &["dump"]),
        What::Stored { image: image(1), took_us: 500_000, written: 1000 },
        What::Stored { image: image(2), took_us: 500_000, written: 24 },
        What::Replicated { image: image(1), took_us: 1, sent: 99 },
        ended(Cause::Signal { signal: 9 }),
        ended(Cause::Requested),
    ] {
        facts.hear(&Event::now("r", what), begun + Duration::from_secs(100));
    }
    let text = facts.text(begun + Duration::from_secs(200), Utc::now());
    for (name, wanted) in [
        ("rekindle_snapshots_taken_total{job=\"j\"}", 2.0),
        ("rekindle_snapshots_failed_total{job=\"j\"}", 1.0),
        ("rekindle_failures_total{job=\"j\"}", 1.0),
        ("rekindle_last_image_bytes{job=\"j\"}", 5e9),
        ("rekindle_last_freeze_phase_seconds{job=\"j\",phase=\"dump\"}", 0.25),
        ("rekindle_last_freeze_phase_seconds{job=\"j\",phase=\"lock\"}", 0.0),
        ("rekindle_freeze_seconds_sum{job=\"j\"}", 1.4),
        ("rekindle_freeze_seconds_bucket{job=\"j\",le=\"0.5\"}", 0.0),
        ("rekindle_freeze_seconds_bucket{job=\"j\",le=\"1.0\"}", 2.0),
        ("rekindle_freeze_seconds_bucket{job=\"j\",le=\"+Inf\"}", 2.0),
        ("rekindle_store_written_bytes_total{job=\"j\"}", 1024.0),
        ("rekindle_replica_sent_bytes_total{job=\"j\"}", 99.0),
    ] {
        assert_eq!(value(&text, name), Some(wanted), "{name} in\n{text}");
    }
    let lag = value(&text, "rekindle_replica_lag_seconds{job=\"j\"}").unwrap();
    assert!((0.0..60.0).contains(&lag) && facts.replica.as_ref().unwrap().waiting.len() == 1);
    assert!(text.ends_with("# EOF\n") && !text.contains("rekindle_job_start_time_seconds"));
}

#[test]
fn names_of_jobs_and_phases_can_not_break_the_text() {
    let now = Instant::now();
    let mut facts = Facts::new("a\"b\\c\nd", Replicated::No, now);
    facts.snapshots.phases.insert("x\"\n} 1".into(), 1.0);
    let text = facts.text(now, Utc::now());
    assert!(text.contains("job=\"a\\\"b\\\\c\\nd\"") && !text.contains("replica"), "{text}");
    assert!(text.lines().all(|line| line.starts_with("# ") || line.starts_with("rekindle_")), "{text}");
}

/// The next event of a job, if it is possible.
#[derive(Debug, Clone, Copy)]
enum Step {
    Snapshot { freeze: u64, heard: u64 },
    Fails,
    Ends { cause: usize },
    Announced,
    Starts { from: usize },
    Suspended,
    Finishes,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..20_000_u64, 0..20_000_u64).prop_map(|(freeze, heard)| Step::Snapshot { freeze, heard }),
        1 => Just(Step::Fails),
        2 => (0..4_usize).prop_map(|cause| Step::Ends { cause }),
        2 => Just(Step::Announced),
        4 => (0..6_usize).prop_map(|from| Step::Starts { from }),
        1 => Just(Step::Suspended),
        1 => Just(Step::Finishes),
    ]
}

/// The events of one supervisor, with their times in microseconds.
fn journal(steps: Vec<(u64, Step)>) -> Vec<(u64, What)> {
    let (mut events, mut at, mut up, mut suspended, mut images) = (Vec::new(), 0, false, false, 0);
    let command = vec!["x".into()];
    let begins = What::Supervised { supervisor: 1, command, interval: "1m".into(), before: None, last_seen: None };
    events.push((at, begins));
    for (pause, step) in steps {
        at += pause;
        let image = |back: usize| images_from(images, back);
        match step {
            Step::Snapshot { freeze, heard } if up => {
                images += 1;
                events.push((at, What::SnapshotBegan { reason: Reason::Interval }));
                at += freeze;
                // Another event comes while the job is frozen.
                if heard < freeze {
                    events.push((at - heard, What::HookFailed { hook: "on-failure".into(), why: "away".into() }));
                }
                let (image, phases) = (self::image(images), Vec::new());
                let taken =
                    What::SnapshotTaken { image, reason: Reason::Interval, freeze_us: freeze, phases, bytes: 1 };
                events.push((at, taken));
            }
            Step::Fails if up => events.push((at, What::SnapshotFailed { why: "no room".into(), job_lost: false })),
            Step::Ends { cause } if up => {
                let cause =
                    [Cause::Signal { signal: 9 }, Cause::Suspended, Cause::Rewound, Cause::Requested][cause].clone();
                (up, suspended) = (false, cause == Cause::Suspended);
                events.push((at, What::Ended { exit_code: None, signal: Some(9), cause: Some(cause) }));
            }
            Step::Announced if !up && !suspended => {
                events.push((at, What::Restarting { image: image(1), after_us: 1 }));
            }
            Step::Starts { from } if !up => {
                (up, suspended) = (true, false);
                events.push((
                    at,
                    What::Started {
                        pid: None,
                        image: image(from),
                        took_us: 1,
                        moved: Vec::new(),
                        differences: Vec::new(),
                    },
                ));
            }
            Step::Suspended if suspended => events.push((at, What::Suspended { image: image(1) })),
            Step::Finishes if !up => {
                events.push((at, What::Finished { outcome: "stopped".into(), exit_code: None, why: None }));
                break;
            }
            _ => {}
        }
    }
    events
}

/// The image that is `back` before the newest of this many; `None` before the first.
fn images_from(images: u32, back: usize) -> Option<ImageId> {
    images.checked_sub(u32::try_from(back).unwrap()).filter(|n| *n > 0).map(image)
}

proptest! {
    /// Metrics and report agree about a supervisor at each moment.
    #[test]
    fn goodput_is_what_the_report_says(steps in prop::collection::vec((0..50_000_u64, step()), 0..60), after in 0..50_000_u64) {
        let begun = Instant::now();
        let instant = |us| begun + Duration::from_micros(us);
        let time = |us: u64| DateTime::UNIX_EPOCH + Duration::from_micros(us);
        let mut facts = Facts::new("j", Replicated::No, begun);
        let mut history = History::default();
        for (at, what) in journal(steps) {
            let event = Event { time: time(at), ..Event::now("r", what) };
            facts.hear(&event, instant(at));
            history.add(&event);
            let now = at + after;
            let times = Times::new(history.sums(Some(time(now))));
            let work = &facts.work;
            let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap();
            let known = [work.useful(instant(now)), work.lost(), work.wall(instant(now))].map(micros);
            prop_assert_eq!(known, [times.useful_us, times.lost_us, times.wall_us], "after {:?}", event.what);
        }
    }
}

#[test]
fn a_group_has_metrics_once_it_was_seen() {
    let now = Instant::now();
    let mut facts = Facts::new("bert.1", Replicated::No, now);
    let machine = |rank: u32| GroupMember { rank, host: Some("node".into()) };
    let aborted = || What::GroupAborted { number: 4, why: "rank 0: no room".into(), machines: vec![machine(0)] };
    for what in [
        What::GroupCommitted { number: 3, epoch: 2, image: None },
        aborted(),
        aborted(),
        What::GroupMemberLost { machine: machine(0) },
        What::GroupRestarting {
            number: None,
            image: None,
            epoch: 3,
            why: "rank 0 is lost".into(),
            machines: vec![],
            lost: vec![],
        },
    ] {
        facts.hear(&Event::now("r", what), now);
    }
    let text = |facts: &Facts| facts.text(now, Utc::now());
    assert!(!text(&facts).contains("rekindle_group"), "a job of one machine has none");

    let taken = DateTime::from_timestamp(1_795_327_200, 0).unwrap();
    let image = |number: u32, committed| {
        let image = Some(ImageId::new(number, taken + chrono::TimeDelta::seconds(number.into())));
        GroupImage { number: number.into(), epoch: 2, image, committed }
    };
    let group = Group {
        name: "bert".parse().unwrap(),
        size: 4,
        rank: 1,
        epoch: 3,
        members: vec![machine(1), machine(2), machine(3)],
        missing: vec![machine(0)],
        leader: Some(1),
        images: vec![image(9, false), image(5, true)],
        waits_for: None,
        freezes: Vec::new(),
    };
    let state = r#"{"version": 1, "state": "running", "since": "2026-11-21T10:00:00Z", "begun": "2026-11-21T10:00:00Z",
        "supervisor": 1, "lineage": "r", "restarts": 0}"#;
    let mut published: Published = serde_json::from_str(state).unwrap();
    published.group = Some(group);
    facts.see(&published, None);
    let text = text(&facts);
    for (name, wanted) in [
        ("size", 4.0),
        ("members", 3.0),
        ("leader", 1.0),
        ("epoch", 3.0),
        ("last_image_timestamp_seconds", 1_795_327_205.0),
        ("images_committed_total", 1.0),
        ("snapshots_aborted_total", 2.0),
        ("members_lost_total", 1.0),
        ("restarts_total", 1.0),
    ] {
        let name = format!("rekindle_group_{name}{{job=\"bert.1\"}}");
        assert_eq!(value(&text, &name), Some(wanted), "{name} in\n{text}");
    }
}
