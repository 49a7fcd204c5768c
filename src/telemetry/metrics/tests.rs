//! Facts from made-up events, and their text.

use super::*;
use crate::store::manifest::{Phase, Reason};

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
        What::Started { pid: Some(7), image: None, took_us: 1 },
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
    facts.phases.insert("x\"\n} 1".into(), 1.0);
    let text = facts.text(now, Utc::now());
    assert!(text.contains("job=\"a\\\"b\\\\c\\nd\"") && !text.contains("replica"), "{text}");
    assert!(text.lines().all(|line| line.starts_with("# ") || line.starts_with("rekindle_")), "{text}");
}
