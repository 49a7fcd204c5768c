//! The page: one file without scripts or external resources. It follows the reader's light or dark theme, and works
//! from a width of 360 pixels.
//!
//! Text from a job or a message is escaped, without control characters, shortened if it is long, and never wider than
//! the page. The policy in the page's head forbids a browser to fetch or run anything.

mod charts;
mod group;
mod parts;

use chrono::{DateTime, Local};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::history::{Kind, Trouble, between};
use super::model::Report;
use super::words::{moment, share, time};
use crate::published::Condition;
use charts::Axis;
use parts::{Extent, dot, foreign, number};
use rekindle_base::units::{counted, size};

const STYLE: &str = include_str!("html/style.css");
/// The end of a page's title: only pages that have it are overwritten.
const TITLE: &str = " · rekindle report";
/// Number of newest snapshots with a row each.
const ROWS: usize = 50;

/// Whether this text begins as a page of a report does.
#[must_use]
pub fn is_page(text: &[u8]) -> bool {
    let head = text.get(..4096).unwrap_or(text);
    String::from_utf8_lossy(head).contains(&format!("{TITLE}</title>"))
}

/// The page of a report.
#[must_use]
pub fn page(report: &Report) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (report.job) (TITLE) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    (header(report))
                    @if let (Some(from), Some(to)) = (report.from, report.to) {
                        (headline(report))
                        (timeline(report, Axis::new(from, to)))
                    } @else {
                        section { p { "The job has no events in this time." } }
                    }
                    @if report.freeze.is_some() { (parts::freezes(report, ROWS)) }
                    @if let Some(cost) = &report.cost { (parts::interval(cost)) }
                    @if !report.images.is_empty() { (parts::store(report)) }
                    @if !report.troubles.is_empty() { (parts::troubles(report)) }
                    @if let Some(happened) = &report.group { (group::group(happened)) }
                    @if !report.events.is_empty() { (parts::events(report)) }
                    (footer())
                }
            }
        }
    }
    .into_string()
}

fn header(report: &Report) -> Markup {
    let zone = DateTime::from_timestamp_micros(report.made).map(|made| made.with_timezone(&Local).format("%:z"));
    let tone = match report.state.condition() {
        Condition::Good => "state good",
        Condition::Bad => "state bad",
        Condition::Idle => "state",
        Condition::Passing => "state warn",
    };
    html! {
        header {
            div.title { h1 { (report.job) } span class=(tone) { (report.state.as_str()) } }
            div.soft.small {
                @if let (Some(from), Some(to)) = (report.from, report.to) { (moment(from)) " to " (moment(to)) " · " }
                "made " (moment(report.made))
                @if let Some(zone) = zone { ", all times UTC" (zone) }
            }
            @if !report.command.is_empty() { code.command { (foreign(&report.command.join(" "))) } }
            @if report.clock_set_back > 0 {
                p.small.soft {
                    "The clock was set back " (counted(report.clock_set_back.into(), "time")) ", by "
                    (time(u64::try_from(report.clock_set_back_us).unwrap_or(0)))
                    " in total. Later events are shown that much later."
                }
            }
        }
    }
}

/// The name of a kind and its meaning.
fn named(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Useful => ("useful", "useful work"),
        Kind::Frozen => ("frozen", "frozen"),
        Kind::Lost => ("lost", "lost work"),
        Kind::Down => ("down", "starting, restarting"),
        Kind::Away => ("away", "no supervisor"),
        Kind::Idle => ("idle", "stopped"),
    }
}

fn headline(report: &Report) -> Markup {
    let times = &report.times;
    let kinds = Kind::ALL.into_iter().filter(|kind| *kind != Kind::Idle && times.of(*kind) > 0);
    let snapshots = report.snapshots.len();
    let first = report.troubles.iter().rev().find(|it| it.what == Trouble::Crash || it.what == Trouble::Supervisor);
    html! {
        div.top {
            section {
                h2 { "Goodput" }
                div.big { (times.goodput_ppm.map_or_else(|| "–".into(), share)) }
                div.soft.small { "of " (time(times.wall_us)) " was useful work" }
                (parts::whole_bar(times, kinds.clone()))
                ul.key {
                    @for kind in kinds {
                        li { (dot(named(kind).0)) (named(kind).1) " " b { (time(times.of(kind))) } }
                    }
                }
            }
            section {
                dl.facts {
                    (fact("Uptime", &report.up_since.map_or_else(|| "not running".into(), |since| {
                        time(between(since, report.to.unwrap_or(since)))
                    }), Some(&format!("{} running in total", time(times.useful_us + times.lost_us)))))
                    (fact("Lost work", &time(times.lost_us), lost(report).as_deref()))
                    (fact("Restarts", &report.restarts.to_string(), Some(&match (report.failures, first) {
                        (0, _) => "no failures".into(),
                        (n, Some(last)) => format!("{}, last {}", counted(number(n), "failure"), moment(last.at)),
                        (n, None) => counted(number(n), "failure"),
                    })))
                    (fact("Snapshots", &snapshots.to_string(), Some(&match report.snapshots_failed {
                        0 => format!("interval {}", report.interval),
                        n => format!("{n} failed, interval {}", report.interval),
                    })))
                    @if let Some(freeze) = &report.freeze {
                        (fact("Freeze, median", &time(freeze.median_us), Some(&format!(
                            "95 of 100 within {}, longest {}", time(freeze.p95_us), time(freeze.max_us)))))
                    }
                    (fact("Store", &size(report.disk), Some(&counted(number(report.images.len()), "image"))))
                }
            }
        }
    }
}

/// The share of the lost work, and what of it the list of failures does not have.
fn lost(report: &Report) -> Option<String> {
    let share = report.times.share(report.times.lost_us).map(share)?;
    let by_failures = report.troubles.iter().filter_map(|trouble| trouble.lost_us).sum();
    let rewound = report.times.lost_us.saturating_sub(by_failures);
    // Less is due to different clocks.
    Some(if rewound < 100_000 { share } else { format!("{share}, {} by going back on request", time(rewound)) })
}

fn fact(name: &str, value: &str, more: Option<&str>) -> Markup {
    html! { div { dt { (name) } dd { (value) @if let Some(more) = more { small { (more) } } } } }
}

fn timeline(report: &Report, axis: Axis) -> Markup {
    let kinds = axis.kinds(&report.timeline);
    let freezes = axis.strokes(report.snapshots.iter().map(|it| (it.at, it.freeze_us)), 25);
    let at = |what: &[Trouble], height: u64| {
        let chosen = report.troubles.iter().filter(|trouble| what.contains(&trouble.what));
        axis.strokes_of(chosen.map(|trouble| trouble.at), height)
    };
    let deaths = at(&[Trouble::Crash, Trouble::Supervisor, Trouble::GivenUp], 100);
    // Half as high, so that the colour is not the only difference.
    let other = at(&[Trouble::Snapshot, Trouble::Image, Trouble::Store, Trouble::Replica], 50);
    let shown = Kind::ALL.into_iter().filter(|kind| report.times.of(*kind) > 0);
    let kinds = Kind::ALL.map(|kind| named(kind).0).into_iter().zip(kinds);
    html! {
        section {
            h2 { "Timeline" }
            (lane("Job", "lane tall", kinds))
            (lane("Snapshots", "lane", [("frozen", freezes)]))
            (lane("To the store", "lane", [("dump", axis.stretches(&report.persists))]))
            (lane("Failures", "lane", [("down", other), ("lost", deaths)]))
            div.lane {
                span {}
                div.axis { @for quarter in 0..=4 { span { (super::words::tick(axis.quarter(quarter), axis.length())) } } }
            }
            ul.key { @for kind in shown { li { (dot(named(kind).0)) (named(kind).1) } } }
            p.small.soft {
                "Snapshots: a higher bar is a longer freeze. Failures: a full bar if the job died, half a bar if a "
                "snapshot or storing an image failed, or an image is bad."
            }
        }
    }
}

fn lane(name: &str, class: &str, paths: impl IntoIterator<Item = (&'static str, String)>) -> Markup {
    html! {
        div class=(class) {
            span { (name) }
            (parts::picture(Extent { width: charts::COLUMNS, height: charts::HEIGHT, pixels: 30 }, name, paths))
        }
    }
}

fn footer() -> Markup {
    html! {
        footer {
            p {
                "Goodput: the share of useful work in the time in which the job should run. Useful work: running time, "
                "without freezes, that no later restart or rewind has undone. Lost work: running time between an image and "
                "the death or the rewind after which the job was restored from it. If a supervisor was killed, the job's "
                "time after the supervisor's last event is unknown and counts as neither."
            }
            p { "rekindle " (env!("CARGO_PKG_VERSION")) }
        }
    }
}

#[cfg(test)]
mod tests;
