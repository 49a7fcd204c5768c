use super::super::watch::{Machines, Snapshots, Work};
use super::*;
use crate::published::JobState;
use crate::report::model::EventLine;

const RUNNING: ShownState = ShownState::Live(JobState::Running);

fn row(job: &str, state: ShownState) -> Row {
    let event =
        |n: u32| EventLine { at: crate::report::at(n.into()), event: "stored".into(), text: format!("event {n}") };
    Row {
        job: job.into(),
        state,
        work: Work { up_us: Some(3_725_000_000), goodput_ppm: Some(987_654), lost_us: 0 },
        snapshots: Snapshots {
            freezes: vec![100_000, 200_000, 800_000],
            next_us: Some(61_900_000),
            ..Snapshots::default()
        },
        disk: 5 << 30,
        restarts: 2,
        command: "train\u{1b}[2J\n".into(),
        events: (0..40).map(event).collect(),
        ..Row::default()
    }
}

fn text(lines: &[Line]) -> Vec<String> {
    lines.iter().map(|line| line.iter().map(|(_, text)| text.as_str()).collect()).collect()
}

#[test]
fn a_wide_terminal_shows_everything() {
    let rows = [row("a", RUNNING), row("b", ShownState::Failed)];
    let lines = text(&draw("title", &rows, &View::default(), 120, 12));
    assert_eq!(lines.len(), 12);
    let columns: Vec<&str> = lines[1].split_whitespace().collect();
    let names = ["JOB", "STATE", "UP", "GOODPUT", "FREEZE", "FREEZES", "NEXT", "STORING", "STORE", "RESTARTS"];
    assert_eq!(columns, names);
    assert!(lines[2].starts_with("a    running  1 h 2 min  98.77 %  800 ms  ▁▂█"), "{}", lines[2]);
    assert!(lines[2].contains("1 min 1 s") && lines[2].contains("5.0 GiB"), "{}", lines[2]);
    assert!(lines[8].starts_with("$ train\\x1b[2J\\x0a"), "what would move the cursor is gone: {:?}", lines[8]);
    assert!(lines[10].contains("event 39") && lines[11].starts_with("q quit"), "{lines:?}");
}

#[test]
fn a_job_over_several_machines_shows_its_group() {
    let summary = "group a: 2 of 3 machines, epoch 4; group image 17, 4m 12s ago".to_owned();
    let group = Some(Machines { there: 2, size: 3, epoch: 4, summary });
    let rows = [Row { group, ..row("a.1", RUNNING) }, row("b", RUNNING)];
    let lines = text(&draw("title", &rows, &View::default(), 140, 12));
    assert!(lines[1].trim_end().ends_with("RESTARTS  GROUP"), "{}", lines[1]);
    assert!(lines[2].contains("2/3 e4") && lines[3].trim_end().ends_with('-'), "{lines:?}");
    assert!(lines[9].starts_with("group a: 2 of 3 machines") && lines[10].contains("event 39"), "{lines:?}");
    let open = text(&draw("title", &rows, &View { open: true, ..View::default() }, 140, 12));
    assert!(open[3].starts_with("group a:"), "{open:?}");
}

#[test]
fn the_help_names_every_key_and_column() {
    let view = View { help: true, ..View::default() };
    let lines = text(&draw("title", &[row("a", RUNNING)], &view, 80, 24));
    for name in COLUMNS.iter().map(|column| column.name).filter(|name| !["JOB", "STATE"].contains(name)) {
        assert!(lines.iter().any(|line| line.starts_with(&format!("{name} "))), "{name}: {lines:?}");
    }
    assert!(lines.iter().all(|line| line.chars().count() <= 80) && lines[23].contains("? back"), "{lines:?}");
    let small = text(&draw("title", &[], &view, 20, 5));
    assert!(small.len() == 5 && small[4] == "q quit  ? back", "{small:?}");
}

#[test]
fn no_size_is_too_small() {
    let rows: Vec<Row> = (0..30).map(|n| row(&format!("job-{n}"), ShownState::Live(JobState::Restoring))).collect();
    for open in [false, true] {
        for chosen in [None, Some("job-17".to_owned()), Some("gone".to_owned())] {
            let view = View { chosen, open, scrolled: 7, help: false };
            for (width, height) in (0..60).flat_map(|width| (0..15).map(move |height| (width * 3, height))) {
                for rows in [&rows[..], &rows[..1], &[]] {
                    let lines = text(&draw("title", rows, &view, width, height));
                    assert!(lines.len() <= height && lines.iter().all(|line| line.chars().count() <= width));
                }
            }
        }
    }
    // The selected job is always among those that are shown.
    let view = View { chosen: Some("job-17".into()), ..View::default() };
    for height in 4..40 {
        let lines = text(&draw("title", &rows, &view, 40, height));
        assert!(lines.iter().any(|line| line.starts_with("job-17")), "{height}: {lines:?}");
    }
}

#[test]
fn keys_move_within_what_there_is() {
    let rows: Vec<Row> = (0..3).map(|n| row(&n.to_string(), RUNNING)).collect();
    let mut view = View::default();
    view.step(&rows, -1);
    assert_eq!(view.at(&rows), 0);
    view.step(&rows, 1);
    view.step(&rows, 9);
    assert_eq!((view.at(&rows), view.at(&rows[..2])), (2, 0));
    view.toggle(&rows);
    assert!(view.open && view.chosen.as_deref() == Some("2"));
    view.step(&rows, -5);
    assert!(text(&draw("t", &rows, &view, 80, 12)).iter().any(|line| line.contains("event 34")));
    view.step(&rows, -500);
    assert_eq!(view.scrolled, 39);
    view.step(&rows, 500);
    view.toggle(&rows);
    assert!(!view.open && view.scrolled == 0);
    let mut view = View::default();
    view.toggle(&[]);
    view.step(&[], 1);
    assert!(!view.open);
}
