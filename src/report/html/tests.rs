use std::time::Duration;

use chrono::TimeDelta;
use nix::time::{ClockId, clock_gettime};

use super::*;
use crate::published::{GroupMember, JobState, ShownState};
use crate::report::at;
use crate::report::model::Facts;
use crate::telemetry::events::{self, Event, Journal, What};
use rekindle_os::beneath::Beneath;
use rekindle_store::ImageId;
use rekindle_store::manifest::{Phase, Reason};

/// This many snapshots, 10 minutes apart, with a crash every 100.
fn journal(snapshots: u32) -> Vec<Event> {
    let mut time = at(0);
    let mut events = Vec::new();
    let mut tell = |after: i64, what| {
        time += TimeDelta::seconds(after);
        events.push(Event { time, ..Event::now("run", what) });
    };
    let command = vec!["python".into(), "<script>alert(1)</script>".into(), "a\u{1b}[31m\"'&".into()];
    tell(0, What::Supervised { supervisor: 1, command, interval: "10m".into(), before: None, last_seen: None });
    tell(
        2,
        What::Started { pid: Some(1), image: None, took_us: 1_900_000, moved: Vec::new(), differences: Vec::new() },
    );
    for n in 1..=snapshots {
        let image = ImageId::new(n, at(i64::from(n) * 600));
        tell(595, What::SnapshotBegan { reason: Reason::Interval });
        let took_us = 100_000 + u64::from(n % 17) * 10_000;
        let phase = |name: &str| Phase { phase: name.into(), started_us: 0, took_us };
        let phases = ["preflight", "find", "prepare", "lock", "checkpoint", "dump", "restore", "unlock", "check"];
        tell(
            5,
            What::SnapshotTaken {
                image,
                reason: Reason::Interval,
                freeze_us: took_us * 5,
                phases: phases.map(phase).to_vec(),
                bytes: 1 << 34,
            },
        );
        tell(30, What::Stored { image, took_us: 30_000_000, written: 1 << 33 });
        if n % 100 == 0 {
            tell(100, What::Ended { exit_code: Some(1), signal: None, cause: None });
            tell(0, What::Restarting { image: Some(image), after_us: 1_000_000 });
            tell(
                3,
                What::Started {
                    pid: Some(1),
                    image: Some(image),
                    took_us: 2_000_000,
                    moved: Vec::new(),
                    differences: Vec::new(),
                },
            );
        }
    }
    events
}

fn facts() -> Facts {
    Facts {
        job: "train".into(),
        state: ShownState::Live(JobState::Running),
        supervised: true,
        disk: 1 << 40,
        ..Facts::default()
    }
}

#[test]
fn ten_thousand_snapshots_make_a_page_of_some_hundred_kilobytes_in_no_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut written = Journal::in_folder(&Beneath::at(dir.path()).unwrap());
    journal(10_000).iter().for_each(|event| written.append(event));
    // Of the processor: other tests run on it, too.
    let used = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
    let begun = used();
    let events = events::read(dir.path()).unwrap();
    let report = Report::new(&events, facts(), at(7_000_000));
    let page = page(&report);
    let took = used() - begun;
    assert_eq!((report.snapshots.len(), report.restarts), (10_000, 100));
    assert!(page.len() < 3 << 20, "{} bytes", page.len());
    println!("a report of 10,000 snapshots: {took:?}, {} bytes", page.len());
    // Without optimisation it takes many times as long.
    let limit = if cfg!(debug_assertions) { 10 } else { 1 };
    assert!(took < Duration::from_secs(limit), "{took:?}");
}

#[test]
fn what_is_foreign_stays_text_and_nothing_is_fetched() {
    let mut events = journal(250);
    let why = format!("<img src=x onerror=alert(1)>{}\0", "x".repeat(100_000));
    events.push(Event { time: at(200_000), ..Event::now("run", What::SnapshotFailed { why, job_lost: false }) });
    let page = page(&Report::new(&events, facts(), at(200_100)));
    assert!(is_page(page.as_bytes()) && !is_page(b"<!DOCTYPE html><html>"));
    // Patterns within the page.
    let page = page.replace("url(#", "");
    assert!(page.contains("&lt;script&gt;") && page.contains("&lt;img src=x"));
    for wrong in ["<script", "<img", "<link", "http:", "https:", "url(", "@import", "\u{1b}", "\0", "onerror=\""] {
        assert!(!page.contains(wrong), "{wrong}");
    }
    assert!(page.len() < 200_000, "{}", page.len());
}

#[test]
fn without_events_there_is_a_page_that_says_so() {
    let page = page(&Report::new(&[], facts(), at(0)));
    assert!(page.contains("has no events") && page.ends_with("</html>"), "{page}");
}

#[test]
fn one_snapshot_or_none_is_no_reason_to_fail() {
    for count in 0..3 {
        for cut in 0..journal(count).len() {
            let page = page(&Report::new(&journal(count)[cut..], facts(), at(5_000)));
            assert!(page.ends_with("</html>"));
        }
    }
}

#[test]
fn work_that_a_rewind_lost_is_told_apart() {
    let mut events = journal(100);
    let after = |events: &[Event], seconds| events.last().unwrap().time + TimeDelta::seconds(seconds);
    let shown = page(&Report::new(&events, facts(), after(&events, 10)));
    assert!(shown.contains("Lost work") && !shown.contains("by going back on request"), "all of it is by the failure");
    let image = ImageId::new(99, at(99 * 600));
    events.push(Event { time: after(&events, 20), ..Event::now("run", What::Rewinding { image }) });
    let cause = Some(rekindle_base::cause::Cause::Rewound);
    events.push(Event {
        time: after(&events, 0),
        ..Event::now("run", What::Ended { exit_code: None, signal: Some(9), cause })
    });
    let started = What::Started {
        pid: Some(1),
        image: Some(image),
        took_us: 1_000_000,
        moved: Vec::new(),
        differences: Vec::new(),
    };
    events.push(Event { time: after(&events, 1), ..Event::now("other", started) });
    let shown = page(&Report::new(&events, facts(), after(&events, 10)));
    assert!(shown.contains("by going back on request"), "{shown}");
}

#[test]
fn a_group_has_a_section_with_causes_and_machines() {
    let machine = GroupMember { rank: 2, host: Some("<b>node</b>".into()) };
    let machines = vec![machine.clone()];
    let event = |s: i64, what| Event { time: at(s), ..Event::now("run", what) };
    let why = "rank 2: the job ended: signal 9".to_owned();
    let restart = |number| What::GroupRestarting {
        number,
        image: None,
        epoch: 2,
        why: why.clone(),
        machines: machines.clone(),
        lost: vec![GroupMember { rank: 1, host: None }],
    };
    let (no_room, number) = ("rank 2: no room".to_owned(), 2);
    let events = [
        event(0, What::GroupCommitted { number: 1, epoch: 1, image: None }),
        event(1, What::GroupAborted { number, why: no_room, machines: machines.clone() }),
        event(2, What::GroupMemberLost { machine }),
        event(3, restart(Some(1))),
        event(4, restart(None)),
    ];
    let report = Report::new(&events, facts(), at(9));
    let group = report.group.as_ref().unwrap();
    let sizes = [group.committed.len(), group.aborted.len(), group.lost.len(), group.restarts.len()];
    assert_eq!(sizes, [1, 1, 1, 2]);
    assert_eq!((group.restarts[0].number, group.restarts[0].machines[0].rank), (Some(1), 2));
    let page = page(&report);
    let counts = "1 committed group image, 1 aborted group snapshot, 2 restarts of all machines, 1 lost machine";
    for text in [counts, "restart of all from group image 1", "restart of all from the beginning", &why] {
        assert!(page.contains(text), "{text}");
    }
    assert!(
        page.contains("rank 2 (&lt;b&gt;node&lt;/b&gt;); lost: rank 1") && !page.contains("<b>node"),
        "a host is foreign text"
    );
    // What was before is left out; a job of one machine has no group.
    let since = Some(at(3));
    let late = Report::new(&events, Facts { since, ..facts() }, at(9)).group.unwrap();
    assert_eq!((late.committed.len(), late.aborted.len(), late.restarts.len()), (0, 0, 2));
    let alone = Report::new(&journal(3), facts(), at(99_999));
    assert!(alone.group.is_none() && !super::page(&alone).contains("<h2>Group</h2>"));
}
