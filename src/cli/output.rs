//! Tables for people, JSON for programs. What a job may have chosen reaches no terminal as it is ([`clean`]): all that
//! commands print goes through here.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Table, TableStyle};
use serde::Serialize;

use crate::telemetry::clean;

/// How a command prints its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A table, plain if standard output is not a terminal.
    Text,
    /// One JSON document.
    Json,
}

/// Prints `rows` under `header`; the same rows as JSON come from `json`.
pub(crate) fn print_table<J: Serialize>(
    format: Format,
    header: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
    json: &J,
) -> io::Result<()> {
    if format == Format::Json {
        return print_json(json);
    }
    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_header(header);
    if !io::stdout().is_terminal() {
        // A pipe has no width: wrapping would break what reads it.
        table.set_content_arrangement(comfy_table::ContentArrangement::Disabled);
    }
    for row in rows {
        table.add_row(row.iter().map(|cell| clean::line(cell)));
    }
    // comfy-table pads the last column as well.
    print_text(&table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n"))
}

/// Prints one pretty JSON document.
pub(crate) fn print_json<J: Serialize>(json: &J) -> io::Result<()> {
    print_text(&clean::json(&serde_json::to_string_pretty(json)?))
}

/// Prints the error. Standard error may be closed or full: `eprintln` would panic then, and the exit code would not be
/// the documented one.
pub(crate) fn complain(text: &str) {
    // A path may have line breaks, and what follows one is no message of ours.
    let text = clean::lines(text).replace('\n', "\n  ");
    let _ = writeln!(io::stderr().lock(), "rekindle: {text}");
}

/// Prints text and a line end. A reader that went away (`| head`) is not an error.
pub(crate) fn print_text(text: &str) -> io::Result<()> {
    match writeln!(io::stdout().lock(), "{}", clean::lines(text)) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
