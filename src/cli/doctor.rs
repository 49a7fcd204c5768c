//! `rekindle doctor`: checks what `run` needs on this machine.

use super::output::{Column, Format, print_json, print_note, print_sentence, print_table, print_text, terminal_width};
use super::{Exit, Global, named_criu};
use crate::doctor::{self, Counts, Report};
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
    print_sentence(&verdict(report))?;
    print_text("")?;
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
    let unwell = report.checks.iter().filter_map(|check| Some((check, check.fix.as_ref()?)));
    if !is_wide && report.counts.warn + report.counts.missing > 0 {
        print_text("\nWhat to fix:")?;
        for (check, fix) in unwell {
            print_note(check.check, &check.found)?;
            // In one line: it is there to be copied.
            print_text(&format!("   fix: {}", clean::line(fix)))?;
        }
    }
    print_text("\nWhat can run here:")?;
    for it in &report.workloads {
        let words = if it.runs { "yes".to_owned() } else { format!("no, this needs {}", listed(&it.lacks)) };
        print_note(it.what, &words)?;
    }
    Ok(())
}

/// "a", "a and b", "a, b and c".
fn listed(words: &[String]) -> String {
    match words {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        words => words.concat(),
    }
}

/// The sum of all checks, and what it means.
fn verdict(report: &Report) -> String {
    let Counts { ok, not_here, warn, missing } = report.counts;
    let works = match missing {
        0 => "`rekindle run` works here".to_owned(),
        1 => "`rekindle run` cannot work here: 1 requirement is missing".to_owned(),
        _ => format!("`rekindle run` cannot work here: {missing} requirements are missing"),
    };
    let checks = if ok == 1 { "check" } else { "checks" };
    let warnings = if warn == 1 { "warning" } else { "warnings" };
    format!("{works} ({ok} {checks} passed, {warn} {warnings}, {missing} failed, {not_here} not needed here)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_says_whether_run_works() {
        let report = |ok, not_here, warn, missing| Report {
            run_works: missing == 0,
            counts: Counts { ok, not_here, warn, missing },
            checks: Vec::new(),
            workloads: Vec::new(),
        };
        let expected = "`rekindle run` works here (12 checks passed, 1 warning, 0 failed, 3 not needed here)";
        assert_eq!(verdict(&report(12, 3, 1, 0)), expected);
        assert_eq!(listed(&["a", "b", "c"].map(str::to_owned)), "a, b and c");
        let expected = "`rekindle run` cannot work here: 2 requirements are missing (1 check passed, 0 warnings, 2 failed, \
            0 not needed here)";
        assert_eq!(verdict(&report(1, 0, 0, 2)), expected);
    }
}
