//! `rekindle doctor`: checks what `run` needs on this machine.

use super::output::{Column, Format, print_json, print_note, print_table, print_text, terminal_width};
use super::{Exit, Global, named_criu};
use crate::doctor::{self, Report, State};
use crate::telemetry::clean;

pub(super) fn doctor(global: &Global) -> anyhow::Result<Exit> {
    let config = global.settings(global.overrides())?;
    let report = doctor::examine(&config, named_criu(&config));
    match global.format() {
        Format::Json => print_json(&report)?,
        Format::Text => print(&report)?,
    }
    Ok(if report.run_works { Exit::Success } else { Exit::Missing })
}

fn print(report: &Report) -> anyhow::Result<()> {
    // On a terminal there is no room for a fix in the table, and it must not be cut.
    let is_wide = terminal_width().is_none();
    let rows = report.checks.iter().map(|check| {
        let fix = check.fix.clone().unwrap_or_else(|| "-".into());
        let cells = [check.check.into(), check.state.as_str().into(), check.found.clone(), fix];
        cells.into_iter().take(if is_wide { 4 } else { 3 }).collect()
    });
    let columns = [Column::whole("CHECK"), Column::whole("STATE"), Column::short("FOUND"), Column::whole("FIX")];
    let (table, _) = columns.split_at(if is_wide { 4 } else { 3 });
    print_table(Format::Text, table, rows, report)?;
    for check in report.checks.iter().filter(|_| !is_wide) {
        let Some(fix) = &check.fix else { continue };
        print_note(check.check, &check.found)?;
        // In one line: it is there to be copied.
        print_text(&format!("   fix: {}", clean::line(fix)))?;
    }
    Ok(print_text(&format!("\n{}", verdict(report)))?)
}

fn verdict(report: &Report) -> String {
    let warnings = |n: usize| if n == 1 { "1 warning".to_string() } else { format!("{n} warnings") };
    let things = |n: usize| if n == 1 { "1 requirement is".to_string() } else { format!("{n} requirements are") };
    match (report.count(State::Missing), report.count(State::Warn)) {
        (0, 0) => "`rekindle run` works here".into(),
        (0, warned) => format!("`rekindle run` works here; {}", warnings(warned)),
        (missing, _) => format!("`rekindle run` cannot work here: {} missing", things(missing)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_says_whether_run_works() {
        let report = |states: &[State]| Report {
            run_works: !states.contains(&State::Missing),
            checks: states
                .iter()
                .map(|state| doctor::Check { check: "x", state: *state, found: "y".into(), fix: None })
                .collect(),
        };
        assert_eq!(verdict(&report(&[State::Ok])), "`rekindle run` works here");
        assert!(verdict(&report(&[State::Warn])).ends_with("1 warning"));
        assert!(
            verdict(&report(&[State::Missing, State::Missing]))
                .ends_with("cannot work here: 2 requirements are missing")
        );
    }
}
