//! Pictures as the `d` attributes of SVG paths. All numbers are whole, so that the same report gives the same page.
//!
//! A picture always has [`COLUMNS`] columns; things in the same column are drawn with their shares of it. A browser
//! stretches it to the available width (`preserveAspectRatio="none"`), so it contains no text or borders.

use std::fmt::Write;
use std::time::Duration;

use crate::report::history::{Kind, Snapshot, Span, between};
use crate::report::model::Cost;
use rekindle_base::interval;

/// Width of a picture over time.
pub(super) const COLUMNS: usize = 1000;
/// Its height.
pub(super) const HEIGHT: u64 = 100;
/// Units of a column, for shares of it.
const PARTS: u64 = 1000;
/// Maximum number of bars; more snapshots share bars.
const BARS: usize = 160;
/// Bars are never wider than with this many bars.
const FEWEST: usize = 32;

/// A stretch of time that a picture shows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    from: i64,
    length: u64,
}

impl Axis {
    pub(super) fn new(from: i64, to: i64) -> Axis {
        Axis { from, length: between(from, to).max(1) }
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// The moment after this many quarters of the axis.
    pub(super) fn quarter(&self, quarters: u64) -> i64 {
        self.from.saturating_add_unsigned(self.length / 4 * quarters)
    }

    /// The position of a moment, in units of columns.
    fn place(&self, at: i64) -> u64 {
        let whole = u128::from(PARTS) * to_wide(COLUMNS);
        let place = u128::from(between(self.from, at)) * whole / u128::from(self.length);
        u64::try_from(place.min(whole)).unwrap_or(u64::MAX)
    }

    fn column(&self, at: i64) -> usize {
        usize::try_from(self.place(at) / PARTS).unwrap_or(0).min(COLUMNS - 1)
    }

    /// The share of each column that each lane takes.
    fn shares<const N: usize>(&self, stretches: impl Iterator<Item = (usize, i64, i64)>) -> Vec<[u64; N]> {
        let mut columns = vec![[0; N]; COLUMNS];
        for (lane, from, to) in stretches {
            let (from, to) = (self.place(from), self.place(to));
            for (column, begin) in columns.iter_mut().zip((0..).step_by(1000)).skip(to_index(from / PARTS)) {
                if begin >= to {
                    break;
                }
                if let Some(share) = column.get_mut(lane) {
                    *share += to.min(begin + PARTS).saturating_sub(from.max(begin));
                }
            }
        }
        columns
    }

    /// How the time was spent: a path for each kind, stacked.
    pub(super) fn kinds(&self, spans: &[Span]) -> [String; 6] {
        let lane = |kind| Kind::ALL.iter().position(|it| *it == kind).unwrap_or(0);
        stacked(&self.shares(spans.iter().map(|span| (lane(span.kind), span.from, span.to))))
    }

    /// Stretches of time; one that takes only a little of a column is still visible.
    pub(super) fn stretches(&self, stretches: &[(i64, i64)]) -> String {
        let mut columns = self.shares::<1>(stretches.iter().map(|(from, to)| (0, *from, *to)));
        for share in columns.iter_mut().flatten().filter(|share| **share > 0) {
            *share = (*share).max(PARTS / 3);
        }
        let [path] = stacked(&columns);
        path
    }

    /// A stroke for each moment, with a height relative to the highest; in a column the highest counts.
    pub(super) fn strokes(&self, moments: impl Iterator<Item = (i64, u64)>, least: u64) -> String {
        self.strokes_within(moments, least, HEIGHT)
    }

    /// A stroke of this height for each moment.
    pub(super) fn strokes_of(&self, moments: impl Iterator<Item = i64>, height: u64) -> String {
        self.strokes_within(moments.map(|at| (at, 1)), height, height)
    }

    fn strokes_within(&self, moments: impl Iterator<Item = (i64, u64)>, least: u64, most: u64) -> String {
        let mut columns = vec![None; COLUMNS];
        for (at, height) in moments {
            if let Some(column) = columns.get_mut(self.column(at)) {
                *column = (*column).max(Some(height));
            }
        }
        let highest = columns.iter().flatten().max().copied().unwrap_or(0).max(1);
        let count = columns.iter().flatten().count().max(1);
        // A few strokes are wide enough to be visible on a telephone.
        let width = (COLUMNS / count / 4).clamp(1, 4);
        let mut path = String::new();
        for (at, height) in columns.iter().enumerate().filter_map(|(at, height)| Some((at, (*height)?))) {
            let height = least + (most - least) * height / highest;
            rect(&mut path, at.min(COLUMNS - width), width, HEIGHT - height, height);
        }
        path
    }
}

/// A rectangle.
fn rect(path: &mut String, x: usize, width: usize, y: u64, height: u64) {
    let _ = write!(path, "M{x} {y}h{width}v{height}h-{width}z");
}

/// A path for each lane, from shares of columns. Equal neighbours become one rectangle.
fn stacked<const N: usize>(columns: &[[u64; N]]) -> [String; N] {
    let mut lane = 0;
    [(); N].map(|()| {
        let mut path = String::new();
        let mut run: Option<(usize, u64, u64)> = None;
        let of = |column: &[u64; N]| {
            let below: u64 = column.iter().take(lane).map(|share| scaled(*share)).sum();
            (below.min(HEIGHT), scaled(column.get(lane).copied().unwrap_or(0)).min(HEIGHT.saturating_sub(below)))
        };
        for (at, column) in columns.iter().map(of).chain([(0, 0)]).enumerate() {
            if run.is_some_and(|(_, below, height)| (below, height) == column) {
                continue;
            }
            if let Some((from, below, height)) = run.take() {
                rect(&mut path, from, at - from, HEIGHT - below - height, height);
            }
            run = (column.1 > 0).then_some((at, column.0, column.1));
        }
        lane += 1;
        path
    })
}

fn scaled(share: u64) -> u64 {
    (share * HEIGHT + PARTS / 2) / PARTS
}

fn to_index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn to_wide(n: usize) -> u128 {
    u128::try_from(n).unwrap_or(u128::MAX)
}

/// The phases of a freeze, and the rest of it.
pub(super) const PHASES: [&str; 6] = ["lock", "checkpoint", "dump", "restore", "unlock", "other"];

/// How a freeze was spent. Without CUDA only a part of the phase `dump` is freeze, because the job runs while CRIU
/// prepares.
pub(super) fn by_phase(snapshot: &Snapshot) -> [u64; 6] {
    let took = |name: &str| snapshot.phases.iter().filter(|it| it.phase == name).map(|it| it.took_us).sum::<u64>();
    let mut phases = PHASES.map(took);
    let mut left = snapshot.freeze_us;
    // The more reliable values first: those of the driver are measured separately.
    for at in [0, 1, 3, 4, 2] {
        if let Some(phase) = phases.get_mut(at) {
            *phase = (*phase).min(left);
            left -= *phase;
        }
    }
    if let Some(other) = phases.last_mut() {
        *other = left;
    }
    phases
}

/// Bars of snapshots: the time of each phase, and the longest freeze of those that share a bar.
#[derive(Debug, Default)]
pub(super) struct Bars {
    /// A path for each of [`PHASES`].
    pub(super) phases: [String; 6],
    /// A line for the longest freeze in each bar, if several share one.
    pub(super) longest: String,
    /// The value at the full height, in microseconds.
    pub(super) top_us: u64,
    pub(super) width: usize,
    /// How many snapshots share a bar.
    pub(super) each: usize,
}

impl Bars {
    pub(super) fn of(snapshots: &[&Snapshot]) -> Bars {
        const STEP: usize = 10;
        let each = snapshots.len().div_ceil(BARS).max(1);
        let count = snapshots.len().div_ceil(each);
        // On a telephone, gaps between many bars would be narrower than a pixel.
        let bar = if count > 60 { STEP } else { STEP - 2 };
        let top_us = snapshots.iter().map(|it| it.freeze_us).max().unwrap_or(0).max(1);
        let width = count.max(FEWEST) * STEP;
        let mut bars = Bars { top_us, width, each, ..Bars::default() };
        for (at, group) in snapshots.chunks(each).enumerate() {
            let x = at * STEP;
            let share = u64::try_from(group.len()).unwrap_or(1).max(1) * top_us;
            let sums = group.iter().map(|it| by_phase(it)).fold([0; 6], |mut sums, phases| {
                sums.iter_mut().zip(phases).for_each(|(sum, us)| *sum += us);
                sums
            });
            let mut below = 0;
            for (path, sum) in bars.phases.iter_mut().zip(sums) {
                // From sum to sum, so that rounding errors do not add up.
                let (bottom, top) = (below * 1000 / share, (below + sum) * 1000 / share);
                if top > bottom {
                    rect(path, x, bar, 1000 - top, top - bottom);
                }
                below += sum;
            }
            let longest = group.iter().map(|it| it.freeze_us).max().unwrap_or(0) * 1000 / top_us;
            if each > 1 {
                rect(&mut bars.longest, x, bar, (1000 - longest).min(992), 8);
            }
        }
        bars
    }
}

/// The cost of intervals, from a fraction of the shorter of two intervals to a multiple of the longer.
#[derive(Debug)]
pub(super) struct Curve {
    /// Lines for freezes, lost work, and both.
    pub(super) lines: [String; 3],
    /// Positions of the measured and the best interval, in thousandths of the width.
    pub(super) marks: [u32; 2],
    /// The value at the full height, in millionths.
    pub(super) top_ppm: u64,
    /// The range of the width.
    pub(super) range: [Duration; 2],
}

impl Curve {
    pub(super) fn of(cost: &Cost) -> Curve {
        const POINTS: u32 = 100;
        let actual = Duration::from_micros(cost.interval_us.max(1));
        let best = cost.best.interval.max(Duration::from_micros(1));
        let (shorter, longer) = (actual.min(best) / 4, actual.max(best).saturating_mul(4));
        let shorter = shorter.max(Duration::from_micros(1));
        let ratio = longer.as_secs_f64() / shorter.as_secs_f64();
        let at = |share: f64| Duration::try_from_secs_f64(shorter.as_secs_f64() * ratio.powf(share)).unwrap_or(longer);
        let costs = |interval: Duration| {
            let freezes = interval::overhead(interval, cost.best.freeze).as_millionths();
            let lost = interval::loss(interval, cost.best.mtbf).as_millionths();
            [u64::from(freezes), u64::from(lost), u64::from(freezes) + u64::from(lost)]
        };
        // The minimum should be visible, not the height of the slopes.
        let top_ppm = (cost.sum_ppm().max(cost.best_sum_ppm()) * 2).max(1);
        let mut lines = [const { String::new() }; 3];
        for point in 0..=POINTS {
            let costs = costs(at(f64::from(point) / f64::from(POINTS)));
            for (line, ppm) in lines.iter_mut().zip(costs) {
                let y = 1000_i64.saturating_sub_unsigned(ppm * 1000 / top_ppm).max(-1000);
                let _ = write!(line, "{}{} {y}", if point == 0 { 'M' } else { 'L' }, point * 10);
            }
        }
        let mark = |interval: Duration| {
            let share = (interval.as_secs_f64() / shorter.as_secs_f64()).ln() / ratio.ln();
            (0..=1000).find(|n| f64::from(*n) >= share * 1000.0).unwrap_or(1000)
        };
        Curve { lines, marks: [actual, best].map(mark), top_ppm, range: [shorter, longer] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_alike_becomes_one_rectangle() {
        let axis = Axis::new(0, 1_000_000);
        let span = |kind, from, to| Span { kind, from, to };
        let [useful, frozen, lost, ..] = axis.kinds(&[
            span(Kind::Useful, 0, 500_000),
            span(Kind::Frozen, 500_000, 500_500),
            span(Kind::Useful, 500_500, 900_000),
            span(Kind::Lost, 900_000, 1_000_000),
        ]);
        assert_eq!(useful, "M0 0h500v100h-500zM500 50h1v50h-1zM501 0h399v100h-399z");
        assert_eq!(frozen, "M500 0h1v50h-1z");
        assert_eq!(lost, "M900 0h100v100h-100z");
    }

    #[test]
    fn strokes_of_the_edges_are_within() {
        let axis = Axis::new(10, 20);
        assert_eq!(
            axis.strokes([(10, 5), (20, 10), (99, 1), (0, 2)].into_iter(), 20),
            "M0 40h4v60h-4zM996 0h4v100h-4z"
        );
        assert_eq!(axis.strokes([].into_iter(), 20), "");
    }
}
