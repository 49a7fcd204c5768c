//! Draws `top`: turns rows into lines of text with tones. A pure function, so that every size of a terminal can be
//! tested.

use chrono::Local;

use super::watch::Row;
use crate::published::{Condition, ShownState};
use crate::report::words::{share, time, whole};
use crate::telemetry::clean;
use rekindle_base::units::size;

/// The style of a piece of text. Without colour only `Strong` and `Chosen` are visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Soft,
    Strong,
    Good,
    Warn,
    Bad,
    Chosen,
}

/// A line: pieces from left to right.
pub(super) type Line = Vec<(Tone, String)>;

/// What the user is viewing.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    /// The name of the selected job, because rows appear and disappear.
    pub(super) chosen: Option<String>,
    /// Whether its events are shown.
    pub(super) open: bool,
    /// How many events the view is scrolled up.
    pub(super) scrolled: usize,
    /// Whether the help is shown instead.
    pub(super) help: bool,
}

/// The help: keys, then columns.
const HELP: [(&str, &str); 18] = [
    ("q", "quit"),
    ("up, down, k, j", "select a job, or scroll its events"),
    ("Page Up, Page Down", "ten lines at a time"),
    ("Enter", "show the recent events of the selected job"),
    ("Esc", "back to all jobs"),
    ("?", "show or hide this help"),
    ("", ""),
    ("UP", "how long the job has been running without a restart"),
    ("GOODPUT", "useful work as a share of the time"),
    ("FREEZE", "how long the last snapshot froze the job"),
    ("FREEZES", "the last freezes; a higher bar is a longer freeze"),
    ("NEXT", "when the next snapshot is due"),
    ("STORING", "the image that is being stored or restored, and how far"),
    ("STORE", "what the job occupies on the disk: what `rekindle rm` frees"),
    ("RESTARTS", "how often this supervisor has restarted the job"),
    ("GROUP", "machines of the group that are there, and the epoch (e)"),
    ("", ""),
    ("", "`rekindle report JOB` explains where a job's time went"),
];

impl View {
    /// The index of the selected row; the first if it has disappeared.
    pub(super) fn at(&self, rows: &[Row]) -> usize {
        rows.iter().position(|row| Some(&row.job) == self.chosen.as_ref()).unwrap_or(0)
    }

    /// Selects another row, or scrolls.
    pub(super) fn step(&mut self, rows: &[Row], by: isize) {
        if self.open {
            let most = rows.get(self.at(rows)).map_or(0, |row| row.events.len().saturating_sub(1));
            self.scrolled = self.scrolled.saturating_add_signed(by.saturating_neg()).min(most);
        } else {
            let at = self.at(rows).saturating_add_signed(by).min(rows.len().saturating_sub(1));
            self.chosen = rows.get(at).map(|row| row.job.clone());
        }
    }

    /// Shows the events of the selected job, or all jobs again.
    pub(super) fn toggle(&mut self, rows: &[Row]) {
        self.chosen = rows.get(self.at(rows)).map(|row| row.job.clone());
        self.open = !self.open && self.chosen.is_some();
        self.scrolled = 0;
    }
}

/// Returns at most `height` lines of at most `width` characters.
pub(super) fn draw(title: &str, rows: &[Row], view: &View, width: usize, height: usize) -> Vec<Line> {
    let at = view.at(rows);
    let keys = match view {
        View { help: true, .. } => "q quit  ? back",
        View { open: true, .. } => "q quit  ↑↓ scroll  Esc back  ? help",
        _ => "q quit  ↑↓ select  Enter events  ? help",
    };
    let mut lines = match rows.get(at).filter(|_| view.open) {
        _ if view.help => {
            let line =
                |(key, text): &(&str, &str)| vec![(Tone::Strong, format!("{key:<20}")), (Tone::Plain, (*text).into())];
            HELP.iter().map(line).collect()
        }
        Some(row) => events(row, view.scrolled, height.saturating_sub(1)),
        None => {
            let mut lines = vec![vec![(Tone::Strong, title.to_owned())]];
            // Title, header and keys; and details of one job, if there is room.
            let about = rows.get(at).map_or(3, |row| summary(row).len());
            let about = if height >= 6 + about { about } else { 0 };
            lines.extend(table(rows, at, width, height.saturating_sub(3 + about)));
            if about > 0 {
                lines.resize(lines.len().max(height - 1 - about), Line::new());
                lines.extend(rows.get(at).map(summary).unwrap_or_default());
            }
            lines
        }
    };
    lines.resize(lines.len().max(height.saturating_sub(1)), Line::new());
    lines.truncate(height.saturating_sub(1));
    lines.push(vec![(Tone::Soft, keys.to_owned())]);
    lines.truncate(height);
    lines.into_iter().map(|line| cut(line, width)).collect()
}

/// A column: its name, its text for a row, and how early it is left out if there is no room.
struct Column {
    name: &'static str,
    right: bool,
    keep: u8,
    cell: fn(&Row) -> (Tone, String),
}

/// The name of the column that is shown only if a job is a part of a group.
const GROUP: &str = "GROUP";

fn dash(text: Option<String>) -> (Tone, String) {
    text.map_or_else(|| (Tone::Soft, "-".into()), |text| (Tone::Plain, text))
}

const COLUMNS: [Column; 11] = [
    Column { name: "JOB", right: false, keep: 9, cell: |row| (Tone::Strong, row.job.clone()) },
    Column { name: "STATE", right: false, keep: 8, cell: |row| (tone(row.state), row.state.to_string()) },
    Column { name: "UP", right: true, keep: 5, cell: |row| dash(row.work.up_us.map(whole)) },
    Column { name: "GOODPUT", right: true, keep: 7, cell: |row| dash(row.work.goodput_ppm.map(share)) },
    Column { name: "FREEZE", right: true, keep: 6, cell: |row| dash(row.snapshots.freezes.last().copied().map(time)) },
    Column { name: "FREEZES", right: false, keep: 1, cell: |row| (Tone::Good, spark(&row.snapshots.freezes)) },
    Column { name: "NEXT", right: true, keep: 4, cell: |row| dash(row.snapshots.next_us.map(whole)) },
    Column { name: "STORING", right: true, keep: 2, cell: |row| dash(row.moving.text()) },
    Column { name: "STORE", right: true, keep: 3, cell: |row| (Tone::Plain, size(row.disk)) },
    Column {
        name: "RESTARTS",
        right: true,
        keep: 3,
        cell: |row| (if row.restarts > 0 { Tone::Warn } else { Tone::Plain }, row.restarts.to_string()),
    },
    Column {
        name: GROUP,
        right: false,
        keep: 4,
        cell: |row| match &row.group {
            None => dash(None),
            Some(group) => {
                let text = format!("{}/{} e{}", group.there, group.size, group.epoch);
                (if group.there < group.size { Tone::Bad } else { Tone::Plain }, text)
            }
        },
    },
];

fn tone(state: ShownState) -> Tone {
    match state.condition() {
        Condition::Good => Tone::Good,
        Condition::Bad => Tone::Bad,
        Condition::Idle => Tone::Soft,
        Condition::Passing => Tone::Warn,
    }
}

/// The header, and as many rows as fit around the selected one.
fn table(rows: &[Row], at: usize, width: usize, height: usize) -> Vec<Line> {
    if rows.is_empty() {
        return vec![vec![(Tone::Soft, "no jobs".into())]];
    }
    let from = at.saturating_sub(height.saturating_sub(1)).min(rows.len().saturating_sub(height.max(1)));
    let shown = rows.get(from..).unwrap_or_default().iter().take(height);
    let cells: Vec<Vec<(Tone, String)>> = shown.map(|row| COLUMNS.iter().map(|it| (it.cell)(row)).collect()).collect();
    let widest = |n: usize| cells.iter().filter_map(|row| row.get(n)).map(|(_, text)| text.chars().count()).max();
    let mut columns: Vec<(usize, &Column, usize)> = COLUMNS
        .iter()
        .enumerate()
        .filter(|(_, column)| column.name != GROUP || rows.iter().any(|row| row.group.is_some()))
        .map(|(n, column)| (n, column, widest(n).unwrap_or(0).max(column.name.len())))
        .collect();
    while columns.len() > 1 && columns.iter().map(|(_, _, wide)| wide + 2).sum::<usize>() > width + 2 {
        let least = columns.iter().map(|(_, column, _)| column.keep).min();
        let Some(last) = columns.iter().rposition(|(_, column, _)| Some(column.keep) == least) else { break };
        columns.remove(last);
    }
    let pad = |text: &str, column: &Column, wide: usize| {
        if column.right { format!("{text:>wide$}  ") } else { format!("{text:<wide$}  ") }
    };
    let header = columns.iter().map(|(_, column, wide)| (Tone::Soft, pad(column.name, column, *wide)));
    let mut lines = vec![header.collect::<Line>()];
    for (n, row) in cells.iter().enumerate() {
        let chosen = from + n == at;
        let pieces = columns.iter().filter_map(|(n, column, wide)| {
            let (tone, text) = row.get(*n)?;
            Some((if chosen { Tone::Chosen } else { *tone }, pad(text, column, *wide)))
        });
        let mut line: Line = pieces.collect();
        if chosen {
            let used: usize = line.iter().map(|(_, text)| text.chars().count()).sum();
            line.push((Tone::Chosen, " ".repeat(width.saturating_sub(used))));
        }
        lines.push(line);
    }
    lines
}

/// Freezes as bars; the longest one has the full height.
fn spark(freezes: &[u64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let highest = freezes.iter().max().copied().unwrap_or(0).max(1);
    let bar = |us: u64| usize::try_from(us.saturating_mul(8).div_ceil(highest)).ok()?.checked_sub(1);
    freezes.iter().filter_map(|us| BARS.get(bar(*us).unwrap_or(0))).collect()
}

/// The selected job in three lines, and a fourth about its group.
fn summary(row: &Row) -> Vec<Line> {
    let age =
        row.snapshots.age_us.map_or_else(|| "no snapshot yet".into(), |us| format!("last snapshot {} ago", whole(us)));
    let counts = format!("{age}, {} failures, {} of work lost", row.failures, time(row.work.lost_us));
    let last = match (&row.trouble, row.events.last()) {
        (Some(trouble), _) => (Tone::Bad, trouble.clone()),
        (None, Some(event)) => (Tone::Soft, format!("{}: {}", event.event, event.text)),
        (None, None) => (Tone::Soft, "no events".into()),
    };
    let group = row.group.as_ref().map(|group| vec![(Tone::Plain, group.summary.clone())]);
    let command = vec![(Tone::Soft, "$ ".into()), (Tone::Plain, row.command.clone())];
    [command, vec![(Tone::Plain, counts)]].into_iter().chain(group).chain([vec![last]]).collect()
}

/// The details of one job, and its newest events with the newest at the bottom.
fn events(row: &Row, scrolled: usize, height: usize) -> Vec<Line> {
    let mut lines = vec![vec![(Tone::Strong, format!("{}  ", row.job)), (tone(row.state), row.state.to_string())]];
    if height >= 8 {
        lines.extend(summary(row).into_iter().take(2 + usize::from(row.group.is_some())));
        lines.push(Line::new());
    }
    let room = height.saturating_sub(lines.len());
    let end = row.events.len().saturating_sub(scrolled);
    let from = end.saturating_sub(room);
    for event in row.events.get(from..end).unwrap_or_default() {
        let tone = match event.event.as_str() {
            "ended" | "snapshot failed" | "image bad" | "not stored" | "not replicated" => Tone::Bad,
            "restarting" => Tone::Warn,
            "started" | "finished" => Tone::Good,
            _ => Tone::Plain,
        };
        let at = event.at.with_timezone(&Local).format("%m-%d %H:%M:%S  ").to_string();
        lines.push(vec![(Tone::Soft, at), (tone, format!("{:<16}", event.event)), (Tone::Plain, event.text.clone())]);
    }
    if row.events.is_empty() {
        lines.push(vec![(Tone::Soft, "no events".into())]);
    }
    lines
}

/// Cuts a line to this width, and removes characters that would move the cursor.
fn cut(line: Line, width: usize) -> Line {
    let mut left = width;
    let cut = line.into_iter().map(|(tone, text)| {
        let text: String = clean::line(&text).chars().take(left).collect();
        left -= text.chars().count();
        (tone, text)
    });
    cut.filter(|(_, text)| !text.is_empty()).collect()
}

#[cfg(test)]
mod tests;
