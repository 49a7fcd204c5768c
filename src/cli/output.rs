//! Tables for people, JSON for programs. All output of commands goes through here, so that text which a job may have
//! chosen does not reach a terminal unchanged ([`clean`]).
//!
//! A table fits the terminal: columns that matter least are left out, long text is shortened, and names never are. What
//! goes into a pipe or a file is complete.

use std::io::{self, IsTerminal, Write};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::{Table, TableStyle};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use crate::telemetry::{clean, log};
use rekindle_base::without_numbers;

/// How a command prints its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// A table, plain if standard output is not a terminal.
    Text,
    /// One JSON document.
    Json,
}

/// What may happen to a column on a narrow terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    /// Nothing: it names something, or is short.
    Whole,
    /// Its text may be cut.
    Short,
    /// It may be left out; the highest number goes first.
    Optional(u8),
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    name: &'static str,
    fit: Fit,
}

impl Column {
    /// One that is always complete.
    pub(crate) const fn whole(name: &'static str) -> Column {
        Column { name, fit: Fit::Whole }
    }

    /// One whose text may be cut.
    pub(crate) const fn short(name: &'static str) -> Column {
        Column { name, fit: Fit::Short }
    }

    /// One that may be left out; the highest `rank` goes first.
    pub(crate) const fn optional(name: &'static str, rank: u8) -> Column {
        Column { name, fit: Fit::Optional(rank) }
    }
}

/// A blank on each side of a cell.
const PADDING: usize = 2;
/// The width of the names in a list of pairs, at least: lists of different jobs look the same.
const NAMES: usize = 10;
/// Before text is cut shorter than this, columns are left out.
const READABLE: usize = 24;
/// Text is never cut shorter than this.
const SHORTEST: usize = 8;

/// Prints `rows` under their `columns`, or the same rows as JSON, made by `json`.
pub(crate) fn print_table<J: Serialize>(
    format: Format,
    columns: &[Column],
    rows: impl IntoIterator<Item = Vec<String>>,
    json: &J,
) -> io::Result<()> {
    if format == Format::Json {
        return print_json(json);
    }
    let rows: Vec<Vec<String>> =
        rows.into_iter().map(|row| row.iter().map(|cell| clean::line(cell).into_owned()).collect()).collect();
    print_text(&table(columns, &rows, terminal_width()))
}

/// The width of the terminal, if standard output is one.
pub(crate) fn terminal_width() -> Option<usize> {
    // comfy-table asks the terminal.
    io::stdout().is_terminal().then(|| Table::new().width().map_or(80, usize::from))
}

fn table(columns: &[Column], rows: &[Vec<String>], room: Option<usize>) -> String {
    let natural = |(n, column): (usize, &Column)| {
        let cells = rows.iter().filter_map(|row| row.get(n)).map(|cell| cell.chars().count());
        cells.chain([column.name.len()]).max().unwrap_or_default()
    };
    let natural: Vec<usize> = columns.iter().enumerate().map(natural).collect();
    let widths = widths(columns, &natural, room);
    let cut = |cells: &mut dyn Iterator<Item = &str>| -> Vec<String> {
        cells.zip(&widths).filter_map(|(cell, width)| Some(shortened(cell, (*width)?))).collect()
    };
    let mut table = Table::new();
    // Everything fits, or nothing more can be done: lines are never broken.
    table.load_style(TableStyle::new()).set_content_arrangement(comfy_table::ContentArrangement::Disabled);
    table.set_header(cut(&mut columns.iter().map(|column| column.name)));
    for row in rows {
        table.add_row(cut(&mut row.iter().map(String::as_str)));
    }
    // comfy-table pads the last column as well.
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// How wide each column is; nothing for those that are left out. `natural` is what each needs to be complete.
fn widths(columns: &[Column], natural: &[usize], room: Option<usize>) -> Vec<Option<usize>> {
    let mut widths: Vec<Option<usize>> = natural.iter().copied().map(Some).collect();
    let Some(room) = room else { return widths };
    // The last column needs no blank on its right.
    let needed = |widths: &[Option<usize>], most: usize| {
        let each = columns.iter().zip(widths).filter_map(|(column, width)| {
            let width = (*width)?;
            Some(PADDING + if column.fit == Fit::Short { width.min(most) } else { width })
        });
        each.sum::<usize>().saturating_sub(1)
    };
    while needed(&widths, READABLE) > room {
        let rank = |n: usize| match columns.get(n).map(|column| column.fit) {
            Some(Fit::Optional(rank)) => Some(rank),
            _ => None,
        };
        let kept = (0..widths.len()).filter(|n| widths.get(*n).is_some_and(Option::is_some));
        let Some(least) = kept.filter(|n| rank(*n).is_some()).max_by_key(|n| rank(*n)) else { break };
        widths.iter_mut().skip(least).take(1).for_each(|width| *width = None);
    }
    while needed(&widths, usize::MAX) > room {
        let short = columns.iter().zip(&mut widths).filter(|(column, _)| column.fit == Fit::Short);
        let widest = short.filter_map(|(_, width)| width.as_mut()).max_by_key(|width| **width);
        let Some(widest) = widest.filter(|width| **width > SHORTEST) else { break };
        *widest -= 1;
    }
    widths
}

/// At most `width` characters; cut text ends with an ellipsis.
fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Prints text that follows `name`, broken between words to the width of the terminal and indented there; one line
/// where there is no terminal.
pub(crate) fn print_note(name: &str, text: &str) -> io::Result<()> {
    print_text(&note(name, text, terminal_width()))
}

/// Prints a sentence, broken between words to the width of the terminal.
pub(crate) fn print_sentence(text: &str) -> io::Result<()> {
    let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
    print_text(&broken(first, rest, "   ", terminal_width()))
}

/// Prints a list of names, each followed by what belongs to it, in two columns.
pub(crate) fn print_pairs(pairs: &[(&str, String)]) -> io::Result<()> {
    print_text(&in_pairs(pairs, terminal_width()))
}

fn in_pairs(pairs: &[(&str, String)], room: Option<usize>) -> String {
    let width = pairs.iter().map(|(name, _)| name.chars().count()).fold(NAMES, usize::max);
    let indent = " ".repeat(width + 1);
    let lines: Vec<String> =
        pairs.iter().map(|(name, text)| broken(&format!("{name:<width$}"), text, &indent, room)).collect();
    lines.join("\n")
}

fn note(name: &str, text: &str, room: Option<usize>) -> String {
    broken(&format!("{name}:"), text, "   ", room)
}

/// The text after `first`, in lines that fit the room; all but the first begin with `indent`.
fn broken(first: &str, text: &str, indent: &str, room: Option<usize>) -> String {
    let mut lines = vec![first.to_owned()];
    for word in clean::line(text).split(' ') {
        let line = lines.last_mut().map(|line| (line.chars().count(), line));
        match line {
            Some((length, line)) if room.is_none_or(|room| length + 1 + word.chars().count() <= room) => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(format!("{indent}{word}")),
        }
    }
    lines.join("\n")
}

/// Prints one pretty JSON document.
pub(crate) fn print_json<J: Serialize>(json: &J) -> io::Result<()> {
    print_text(&clean::json(&serde_json::to_string_pretty(json)?))
}

/// Prints an error or a warning, after what was logged. Standard error may be closed or full: `eprintln` would panic then,
/// and the exit code would be wrong.
pub(crate) fn complain(text: &str) {
    if SPEAKS_JSON.load(Ordering::Relaxed) {
        return complain_line(&serde_json::json!({ "warning": without_numbers(text) }));
    }
    // A path may contain line breaks, so continuation lines are indented.
    let text = clean::lines(&without_numbers(text)).replace('\n', "\n  ");
    log::print(&format!("rekindle: {text}\n"));
}

/// Prints the error as one line of JSON, for a program that asked for JSON.
pub(crate) fn complain_json(text: &str, code: u8) {
    complain_line(&serde_json::json!({ "error": without_numbers(text), "code": code }));
}

fn complain_line(line: &serde_json::Value) {
    log::print(&format!("{}\n", clean::json(&line.to_string())));
}

/// Whether this process was asked for JSON.
static SPEAKS_JSON: AtomicBool = AtomicBool::new(false);

/// From now on warnings are JSON, too.
pub(crate) fn speak_json() {
    SPEAKS_JSON.store(true, Ordering::Relaxed);
}

/// Prints text and a line end. A reader that is gone, as in `rekindle list | head`, is not an error.
pub(crate) fn print_text(text: &str) -> io::Result<()> {
    match writeln!(io::stdout().lock(), "{}", clean::lines(text)) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Whether nobody reads what is written here any more, such as to standard output in `rekindle status --watch | head`.
pub(crate) fn is_unread(out: BorrowedFd<'_>) -> bool {
    // These are always reported (poll(2)): of a pipe without a reader, a socket, a terminal that was closed.
    let gone = PollFlags::POLLERR | PollFlags::POLLHUP;
    let mut fds = [PollFd::new(out, PollFlags::empty())];
    let _ = poll(&mut fds, PollTimeout::ZERO);
    fds.iter().any(|fd| fd.revents().is_some_and(|seen| seen.intersects(gone)))
}

/// A duration in seconds. The two largest units are enough.
pub(super) fn time(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match () {
        () if days > 0 => format!("{days}d {}h", hours % 24),
        () if hours > 0 => format!("{hours}h {}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m {}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 5] = [
        Column::whole("JOB"),
        Column::short("STATE"),
        Column::optional("PID", 1),
        Column::optional("SIZE", 2),
        Column::short("COMMAND"),
    ];

    fn shown(room: Option<usize>) -> String {
        let row =
            ["bert-large-uncased-42", "running", "12345", "98.7 GiB", "python3 train.py --config configs/bert.yaml"];
        table(&COLUMNS, &[row.map(str::to_owned).to_vec()], room)
    }

    #[test]
    fn a_table_fits_and_its_names_are_whole() {
        assert!(shown(None).ends_with("configs/bert.yaml") && shown(None) == shown(Some(200)));
        for room in 43..100 {
            let text = shown(Some(room));
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(room), "{room}: {widest:?}\n{text}");
            assert!(text.contains("bert-large-uncased-42"), "{text}");
        }
        // Text is cut first, then the columns go that matter least.
        let wide = shown(Some(90));
        assert!(wide.contains("98.7 GiB") && wide.contains("python3 train.py") && wide.contains('…'), "{wide}");
        let narrow = shown(Some(72));
        assert!(!narrow.contains("SIZE") && narrow.contains("PID"), "{narrow}");
        assert!(!shown(Some(60)).contains("PID"));
        // With less, the names are still whole.
        assert!(shown(Some(10)).contains("bert-large-uncased-42"));
    }

    #[test]
    fn the_reader_of_a_pipe_is_seen_to_leave() {
        use std::os::fd::AsFd;
        let (reader, writer) = io::pipe().unwrap();
        assert!(!is_unread(writer.as_fd()));
        (&writer).write_all(b"x").unwrap();
        assert!(!is_unread(writer.as_fd()), "it may read it later");
        drop(reader);
        // A child that another test starts has it, too, until it executes its program.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !is_unread(writer.as_fd()) && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(is_unread(writer.as_fd()));
        assert!(!is_unread(tempfile::tempfile().unwrap().as_fd()), "a file is there for ever");
    }

    #[test]
    fn notes_are_broken_between_words() {
        assert_eq!(note("j", "the deadline is in 3h", None), "j: the deadline is in 3h");
        assert_eq!(note("j", "the deadline is in 3h", Some(16)), "j: the deadline\n   is in 3h");
        let pairs = [("taken", "a b c".to_owned()), ("by", "d".to_owned())];
        assert_eq!(in_pairs(&pairs, Some(14)), "taken      a b\n           c\nby         d");
    }
}
