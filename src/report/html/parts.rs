//! Sections of the page, and their elements.

use maud::{Markup, html};
use rekindle_base::units::{counted, size};

use super::charts::{Bars, Curve, HEIGHT, PHASES, by_phase};
use crate::report::history::{Kind, Snapshot};
use crate::report::model::{Cost, Report, Times};
use crate::report::words::{moment, share, time, word};
use crate::telemetry::clean::is_harmful;

/// Longer texts are cut to this length.
const LONGEST: usize = 2000;
/// Number of images with a bar.
const IMAGES: usize = 40;
/// Number of failures with a row.
const TROUBLES: usize = 100;

/// External text, escaped.
pub(super) fn foreign(text: &str) -> Markup {
    let clean = text.chars().take(LONGEST).map(|c| if is_harmful(c) && c != '\n' { '\u{fffd}' } else { c });
    let cut = text.chars().nth(LONGEST).is_some();
    html! { span.foreign { (clean.collect::<String>()) @if cut { "…" } } }
}

/// A coloured dot for the legend, with the texture of what it explains.
pub(super) fn dot(name: &str) -> Markup {
    html! { i.(texture(name).map_or("plain", |texture| texture.class)) style=(format!("--c:var(--{name})")) {} }
}

/// A sample of a line for the legend.
pub(super) fn dash(name: &str) -> Markup {
    html! { i.line.(name) style=(format!("--c:var(--{name})")) {} }
}

/// Lines over a colour, for readers who cannot tell the colours apart. What is beside each other in a picture differs.
struct Texture {
    class: &'static str,
    /// In a square of 8 by 8.
    lines: &'static str,
}

fn texture(name: &str) -> Option<Texture> {
    let (class, lines) = match name {
        "lost" | "checkpoint" => ("rising", "M-2 2L2-2M-2 10L10-2M6 10L10 6"),
        "down" | "restore" => ("falling", "M-2 6L2 10M-2-2L10 10M6-2L10 2"),
        "away" | "lock" => ("flat", "M0 4H8"),
        "unlock" => ("upright", "M4 0V8"),
        "other" => ("crossed", "M0 4H8M4 0V8"),
        _ => return None,
    };
    Some(Texture { class, lines })
}

/// The size of a picture in units of its paths, and its usual height on the screen in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub(super) width: usize,
    pub(super) height: u64,
    pub(super) pixels: u64,
}

/// The paths of a picture, which is stretched.
pub(super) fn picture(extent: Extent, label: &str, paths: impl IntoIterator<Item = (&'static str, String)>) -> Markup {
    let Extent { width, height, pixels } = extent;
    let id = |colour: &str| format!("{}-{colour}", label.to_lowercase().replace(' ', "-"));
    // About 8 pixels on a page of the usual width, whatever the picture is stretched to.
    let (across, down) = (width * 8, height * 64);
    let scale = format!(
        "scale({}.{:03} {}.{:03})",
        across / 7200,
        across % 7200 * 1000 / 7200,
        down / (pixels * 64),
        down % (pixels * 64) * 1000 / (pixels * 64)
    );
    html! {
        svg viewBox=(format!("0 0 {width} {height}")) preserveAspectRatio="none" shape-rendering="crispEdges" role="img"
            aria-label=(label) {
            @for (colour, path) in paths.into_iter().filter(|(_, path)| !path.is_empty()) {
                path fill=(format!("var(--{colour})")) d=(path) {}
                @if let Some(texture) = texture(colour) {
                    pattern id=(id(colour)) width="8" height="8" patternUnits="userSpaceOnUse" patternTransform=(scale) {
                        path.texture d=(texture.lines) {}
                    }
                    path fill=(format!("url(#{})", id(colour))) d=(path) {}
                }
            }
        }
    }
}

/// How the total time was spent, in one bar.
pub(super) fn whole_bar(times: &Times, kinds: impl Iterator<Item = Kind>) -> Markup {
    let mut at = 0;
    let paths = kinds.map(|kind| {
        let ppm = times.share(times.of(kind)).unwrap_or(0);
        // Every existing kind is visible.
        let width = (ppm / 1000).max(3).min(1000_u64.saturating_sub(at));
        let path = format!("M{at} 0h{width}v{HEIGHT}h-{width}z");
        at += width;
        (super::named(kind).0, path)
    });
    let bar = picture(Extent { width: 1000, height: HEIGHT, pixels: 14 }, "share of the time by kind", paths);
    html! { div.bar style="overflow:hidden" { div style="height:100%" { (bar) } } }
}

/// A count, as [`counted`] takes it.
pub(super) fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

pub(super) fn freezes(report: &Report, rows: usize) -> Markup {
    let measured: Vec<&Snapshot> = report.snapshots.iter().filter(|it| it.freeze_us > 0).collect();
    let bars = Bars::of(&measured);
    let sums = measured.iter().map(|it| by_phase(it)).fold([0_u64; 6], |mut sums, phases| {
        sums.iter_mut().zip(phases).for_each(|(sum, us)| *sum += us);
        sums
    });
    let count = u64::try_from(measured.len()).unwrap_or(1).max(1);
    let all: u64 = sums.iter().sum();
    let Bars { phases, longest, top_us, width, each } = bars;
    let paths = PHASES.into_iter().zip(phases).chain([("soft", longest)]);
    let newest = report.snapshots.iter().rev().take(rows);
    html! {
        section {
            h2 { "Freezes by phase" }
            div.chart {
                div.y { span { (time(top_us)) } span { (time(top_us / 2)) } span { "0" } }
                div.plot { (picture(Extent { width, height: 1000, pixels: 180 }, "how long each snapshot froze the job", paths)) }
                div.axis {
                    span { (measured.first().map(|it| moment(it.at)).unwrap_or_default()) }
                    @if width == measured.len().div_ceil(each) * 10 {
                        span {} span { (measured.last().map(|it| moment(it.at)).unwrap_or_default()) }
                    }
                }
            }
            ul.key {
                @for (name, sum) in PHASES.into_iter().zip(sums).filter(|(_, sum)| *sum > all / 200) {
                    li { (dot(name)) (name) " " b { (time(sum / count)) } }
                }
            }
            p.small.soft {
                "Upwards: how long the job was frozen, by phase; the legend has the mean of each. "
                @if each > 1 {
                    "Each bar is the mean of " (each) " consecutive snapshots, the line is their longest freeze. "
                }
                "The oldest snapshot is on the left."
            }
            details open[report.snapshots.len() <= 12] {
                summary {
                    @if report.snapshots.len() > rows { "The newest " (rows) " of " (report.snapshots.len()) " snapshots" }
                    @else { "All " (report.snapshots.len()) " snapshots" }
                }
                div.scroll { table {
                    thead { tr {
                        th { "Image" } th { "Taken" } th.wide { "Reason" } th.n { "Freeze" }
                        @for phase in &PHASES[..5] { th.n.wide { (phase) } }
                        th.n { "Size" } th.n.wide { "Written" } th.n.wide { "Stored in" }
                    } }
                    tbody { @for snapshot in newest { (row(snapshot)) } }
                } }
            }
        }
    }
}

fn row(snapshot: &Snapshot) -> Markup {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "–".into());
    let [phases @ .., _] = by_phase(snapshot);
    html! {
        tr {
            td.t { code { (format!("{:06}", snapshot.image.sequence())) } }
            td.t { (moment(snapshot.at)) }
            td.t.wide { (word(&snapshot.reason)) }
            td.n { b { (time(snapshot.freeze_us)) } }
            @for us in phases { td.n.wide { @if us > 0 { (time(us)) } @else { "–" } } }
            td.n { (size(snapshot.bytes)) }
            td.n.wide { (or_dash(snapshot.written.map(size))) }
            td.n.wide { (or_dash(snapshot.stored_us.map(time))) }
        }
    }
}

pub(super) fn interval(cost: &Cost) -> Markup {
    let curve = Curve::of(cost);
    let [actual, best] = curve.marks;
    let millis = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let overhead = u64::from(cost.overhead_ppm);
    let [best_overhead, best_loss] =
        [cost.best.expected_overhead, cost.best.expected_loss].map(|it| u64::from(it.as_millionths()));
    let saved = cost.sum_ppm().saturating_sub(cost.best_sum_ppm());
    html! {
        section {
            h2 { "What the interval costs" }
            p {
                "A snapshot came after " b { (time(cost.interval_us)) } " of running (median). Freezes and lost work "
                "cost " b { (share(cost.sum_ppm())) } "; the minimum by Young and Daly is "
                b { (share(cost.best_sum_ppm())) }
                ", with an interval of " b { (time(millis(cost.best.interval))) } "."
                @if saved >= 1000 { " Another interval would save " b { (share(saved)) } " of the time." }
                @else { " No other interval is clearly better." }
            }
            div.chart {
                div.y { span { (share(curve.top_ppm)) } span { (share(curve.top_ppm / 2)) } span { "0" } }
                div.plot {
                    svg.curve viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="cost by interval" {
                        @for (colour, line) in ["frozen", "lost", "ink"].into_iter().zip(&curve.lines) {
                            path.(colour) stroke=(format!("var(--{colour})")) d=(line) {}
                        }
                        @for (colour, x) in [("useful", best), ("down", actual)] {
                            line stroke=(format!("var(--{colour})")) x1=(x) x2=(x) y1="0" y2="1000" {}
                        }
                    }
                    @for (name, x) in [("best", best), ("actual", actual)] {
                        // On the side of its line where there is room.
                        @let (side, at) = if x > 500 { ("right", 1000 - x) } else { ("left", x) };
                        span.mark style=(format!("{side}:{}.{}%", at / 10, at % 10)) { (name) }
                    }
                }
                div.axis {
                    span { (time(millis(curve.range[0]))) }
                    span { "interval between snapshots" }
                    span { (time(millis(curve.range[1]))) }
                }
            }
            p.small.soft { "Upwards: the share of the time that it costs." }
            ul.key { li { (dash("frozen")) "freezes" } li { (dash("lost")) "lost work" } li { (dash("ink")) "both" } }
            div.scroll { table {
                thead { tr { th {} th.n { "Interval" } th.n { "Freezes" } th.n { "Lost work" } th.n { "Both" } } }
                tbody {
                    tr {
                        td { "actual" } td.n { (time(cost.interval_us)) } td.n { (share(overhead)) }
                        td.n { (share(u64::from(cost.loss_ppm))) } td.n { b { (share(cost.sum_ppm())) } }
                    }
                    tr {
                        td { "best" } td.n { (time(millis(cost.best.interval))) } td.n { (share(best_overhead)) }
                        td.n { (share(best_loss)) } td.n { b { (share(cost.best_sum_ppm())) } }
                    }
                }
            } }
            p.small.soft.foreign { (cost.arithmetic) }
        }
    }
}

pub(super) fn store(report: &Report) -> Markup {
    let largest =
        report.images.iter().map(|image| image.bytes.max(image.stored.unwrap_or(0))).max().unwrap_or(0).max(1);
    let percent = |bytes: u64| format!("width:{}%", u128::from(bytes) * 100 / u128::from(largest));
    let stored: u64 = report.images.iter().filter_map(|image| image.stored).sum();
    let rest = report.images.get(IMAGES..).unwrap_or_default();
    html! {
        section {
            h2 { "Store" }
            p {
                b { (size(report.disk)) } " on disk in total. Storing the " (counted(number(report.images.len()), "existing image")) " added "
                b { (size(stored)) } "."
            }
            @for image in report.images.iter().take(IMAGES) {
                div.size {
                    span.t { code { (format!("{:06}", image.id.sequence())) } " " span.soft {
                        (moment(image.id.taken().timestamp_micros()).get(..16).unwrap_or_default())
                        @if !image.good { " · bad" }
                    } }
                    span.whole {
                        i style=(percent(image.bytes)) {}
                        @if let Some(stored) = image.stored { u style=(percent(stored)) {} }
                    }
                    span.n {
                        @match image.stored { Some(stored) => b { (size(stored)) }, None => "in memory" }
                        span.soft { " of " (size(image.bytes)) }
                    }
                }
            }
            @if !rest.is_empty() {
                p.small.soft {
                    "Also " (counted(number(rest.len()), "older image")) ", which added "
                    (size(rest.iter().filter_map(|image| image.stored).sum())) "."
                }
            }
            ul.key {
                li { (dot("frozen")) "added to the store: content that no older image has, compressed" }
                li { (dot("away")) "size of the image" }
            }
        }
    }
}

pub(super) fn troubles(report: &Report) -> Markup {
    let newest = report.troubles.iter().rev().take(TROUBLES);
    let or_dash = |us: Option<u64>| us.map_or_else(|| "–".into(), time);
    html! {
        section {
            h2 { "Failures" }
            @if report.troubles.len() > TROUBLES {
                p.small.soft { "The newest " (TROUBLES) " of " (report.troubles.len()) "." }
            }
            div.scroll { table {
                thead { tr { th { "When" } th { "What" } th { "Why" } th.n.wide { "Restored after" }
                    th.n.wide { "Lost work" } th.wide { "From" } } }
                tbody { @for trouble in newest { tr {
                    td.t { (moment(trouble.at)) }
                    td.t { (dot(if trouble.what.is_death() { "lost" } else { "down" })) (word(&trouble.what)) }
                    td.why { (foreign(&trouble.why)) }
                    td.n.wide { (or_dash(trouble.back_us)) }
                    td.n.wide { (or_dash(trouble.lost_us)) }
                    td.t.wide {
                        @match (trouble.image, trouble.back_us) {
                            (Some(image), _) => code { (format!("{:06}", image.sequence())) },
                            (None, Some(_)) => "the beginning",
                            (None, None) => "–",
                        }
                    }
                } } }
            } }
        }
    }
}

pub(super) fn events(report: &Report) -> Markup {
    html! {
        section {
            h2 { "Events" }
            details open[report.events.len() <= 20] {
                summary {
                    @if report.events_in_all > report.events.len() {
                        "The newest " (report.events.len()) " of " (report.events_in_all)
                    } @else { "All " (report.events_in_all) }
                }
                div.scroll { table { tbody { @for event in report.events.iter().rev() { tr {
                    td.t { (moment(event.at.timestamp_micros())) }
                    td.t { b { (event.event) } }
                    td.why { (foreign(&event.text)) }
                } } } } }
            }
        }
    }
}
