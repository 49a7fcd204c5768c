//! `rekindle doctor`: what `run` needs of this machine.

use super::output::{Format, print_json, print_table, print_text};
use super::{Exit, Global, named_criu};
use crate::doctor::{self, Report, State};

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
    let rows = report.checks.iter().map(|check| {
        let fix = check.fix.clone().unwrap_or_else(|| "-".into());
        vec![check.check.into(), check.state.as_str().into(), check.found.clone(), fix]
    });
    print_table(Format::Text, &["CHECK", "STATE", "FOUND", "FIX"], rows, report)?;
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
