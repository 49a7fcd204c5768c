//! The page of a report in a real browser: no word on its console, nothing wider than a telephone, dark where that is
//! wanted.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use chrono::{DateTime, TimeDelta, Utc};
use rekindle::published::{JobState, ShownState};
use rekindle::report::html;
use rekindle::report::model::{Facts, ImageSize, Report};
use rekindle::telemetry::events::{Event, What};
use rekindle_store::ImageId;
use rekindle_store::manifest::{Phase, Reason};

/// The narrowest screen that the page is made for, and a wide one.
const WIDTHS: [u32; 2] = [360, 1280];

fn browser() -> Option<&'static str> {
    let is_there = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    let found = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(is_there);
    rekindle_testing::needs("chromium", found, "there is no Chromium")
}

/// Two weeks with everything that can happen, and the longest words.
fn page() -> String {
    let mut now = DateTime::UNIX_EPOCH + TimeDelta::days(20_000);
    let mut events = Vec::new();
    let mut tell = |after: i64, what| {
        now += TimeDelta::seconds(after);
        events.push(Event { time: now, ..Event::now("run", what) });
    };
    let long = format!("<script>document.title = 1</script> /very{}/long", "long".repeat(200));
    let supervised = |command: &str| What::Supervised {
        supervisor: 1,
        command: vec!["python".into(), command.into()],
        interval: "10m".into(),
        before: None,
        last_seen: None,
    };
    tell(0, supervised(&long));
    tell(
        5,
        What::Started { pid: Some(1), image: None, took_us: 5_000_000, moved: Vec::new(), differences: Vec::new() },
    );
    let mut images = Vec::new();
    for n in 1..=2000_u32 {
        let id = ImageId::new(n, DateTime::UNIX_EPOCH + TimeDelta::days(20_000));
        let phase = |phase: &str| Phase { phase: phase.into(), started_us: 0, took_us: 200_000 };
        let phases = ["lock", "checkpoint", "dump", "restore", "unlock"].map(phase).to_vec();
        let (reason, freeze_us, bytes) = (Reason::Interval, 1_000_000 + u64::from(n % 7) * 1000, 1 << 34);
        tell(600, What::SnapshotBegan { reason });
        tell(2, What::SnapshotTaken { image: id, reason, freeze_us, phases, bytes });
        tell(60, What::Stored { image: id, took_us: 60_000_000, written: 1 << 33 });
        match n % 200 {
            50 => tell(1, What::SnapshotFailed { why: long.clone(), job_lost: false }),
            100 => {
                tell(300, What::Ended { exit_code: Some(1), signal: None, cause: None });
                tell(0, What::Restarting { image: Some(id), after_us: 1 });
                tell(
                    9,
                    What::Started {
                        pid: None,
                        image: Some(id),
                        took_us: 8_000_000,
                        moved: Vec::new(),
                        differences: Vec::new(),
                    },
                );
            }
            150 => {
                tell(5000, supervised(&long));
                tell(
                    9,
                    What::Started {
                        pid: None,
                        image: Some(id),
                        took_us: 8_000_000,
                        moved: Vec::new(),
                        differences: Vec::new(),
                    },
                );
            }
            _ => {}
        }
        images.push(ImageSize { id, good: true, places: "store".into(), bytes, stored: Some(1 << 33) });
    }
    images.reverse();
    let job = "a-job-with-the-longest-name-that-a-job-can-have-which-is-64-long".into();
    let state = ShownState::Live(JobState::Running);
    let facts = Facts { job, state, supervised: true, disk: 1 << 43, images, since: None };
    html::page(&Report::new(&events, facts, Utc::now().min(now)))
}

/// A page around it that measures: the width of what is in it, and its background. In frames it has any width.
fn measured(browser: &str, dir: &Path, page: &str, more: &[&str]) -> (String, String) {
    let escaped = page.replace('&', "&amp;").replace('"', "&quot;");
    let mut text = "<!DOCTYPE html><meta name=color-scheme content='light dark'><body>".to_owned();
    for width in WIDTHS {
        write!(text, "<iframe style='width:{width}px;height:800px;border:0' srcdoc=\"{escaped}\"></iframe>").unwrap();
    }
    text.push_str(
        "<script>onload = () => { let said = '';
        for (const frame of document.querySelectorAll('iframe')) {
            const inner = frame.contentDocument;
            inner.querySelectorAll('details').forEach(it => it.open = true);
            const root = inner.documentElement;
            const colour = frame.contentWindow.getComputedStyle(inner.body).backgroundColor;
            said += `[${frame.clientWidth} ${root.scrollWidth} ${colour}]`;
        }
        document.body.innerHTML = said; }</script>",
    );
    let file = dir.join("frame.html");
    std::fs::write(&file, text).unwrap();
    // A browser that hangs is ended with all of its processes.
    let out = Command::new("timeout")
        .args([
            "-k",
            "5",
            "60",
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ])
        .args(["--no-first-run", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"])
        .args(more)
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .env("HOME", dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    let console: Vec<&str> = said.lines().filter(|line| line.contains("CONSOLE")).collect();
    (String::from_utf8_lossy(&out.stdout).into_owned(), console.join("\n"))
}

#[test]
fn it_renders_without_a_word_on_the_console_and_fits_a_telephone() {
    let Some(browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let page = page();
    let (light, console) = measured(browser, dir.path(), &page, &["--blink-settings=preferredColorScheme=1"]);
    assert_eq!(console, "");
    assert!(light.contains("[360 360 rgb(244, 246, 248)][1280 1280 rgb(244, 246, 248)]"), "{light}");
    let (dark, console) = measured(browser, dir.path(), &page, &["--blink-settings=preferredColorScheme=0"]);
    assert_eq!(console, "");
    assert!(dark.contains("[360 360 rgb(15, 19, 24)][1280 1280 rgb(15, 19, 24)]"), "{dark}");
    // The measure sees what it is for: something wide, and something that the page's policy forbids.
    let wrong = page.replace("<footer>", "<div style=\"width:500px\">x</div><script>x</script><footer>");
    let (wide, console) = measured(browser, dir.path(), &wrong, &[]);
    assert!(wide.contains("[360 5") && console.contains("Content Security Policy"), "{wide}\n{console}");
}
