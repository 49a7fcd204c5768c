//! Finds the rule (`[[rules]]`) for an end, a hang or a fault: the first that matches. A pure function.

use crate::config::{CauseName, Match, Rule};
use rekindle_base::cause::Cause;
use rekindle_os::spawn::Ended;

/// The facts that rules are compared with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case<'a> {
    /// Why the job ended, or will be ended.
    pub(crate) cause: &'a Cause,
    /// How it ended; `None` while it runs.
    pub(crate) ended: Option<Ended>,
    /// The last lines of its output.
    pub(crate) lines: &'a [Vec<u8>],
}

/// The first matching rule, counted from 0.
#[must_use]
pub(crate) fn first<'a>(rules: &'a [Rule], case: &Case<'_>) -> Option<(usize, &'a Rule)> {
    rules.iter().enumerate().find(|(_, rule)| fits(&rule.matches, case))
}

fn fits(matches: &Match, case: &Case<'_>) -> bool {
    let code = match case.ended {
        Some(Ended::Exit(code)) => u8::try_from(code).ok(),
        _ => None,
    };
    let signal = match case.ended {
        Some(Ended::Signal(signal)) => Some(signal),
        _ => None,
    };
    let signal = match case.cause {
        Cause::ProcessDied { signal, .. } => Some(*signal),
        _ => signal,
    };
    let xid = match case.cause {
        Cause::GpuFault { xid } => Some(*xid),
        _ => None,
    };
    matches.exit_code.allows(|wanted| Some(*wanted) == code)
        && matches.signal.allows(|wanted| Some(wanted.number()) == signal)
        && matches.cause.allows(|wanted| is(*wanted, case.cause))
        && matches.xid.allows(|wanted| Some(*wanted) == xid)
        && (matches.log.is_none() || case.lines.iter().any(|line| matches.line(line)))
        && !matches.is_empty()
}

fn is(name: CauseName, cause: &Cause) -> bool {
    match name {
        CauseName::Exit => matches!(cause, Cause::Exit { .. }),
        CauseName::Signal => matches!(cause, Cause::Signal { .. }),
        CauseName::ProcessDied => matches!(cause, Cause::ProcessDied { .. }),
        CauseName::OutOfMemory => *cause == Cause::OutOfMemory,
        CauseName::GpuFault => matches!(cause, Cause::GpuFault { .. }),
        CauseName::Hang => matches!(cause, Cause::Hang { .. }),
        CauseName::SnapshotLost => *cause == Cause::SnapshotLost,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;
    use rekindle_base::cause::Missing;

    fn rules(matches: &[&str]) -> Vec<Rule> {
        let text: String =
            matches.iter().map(|m| format!("[[rules]]\nmatch = {{ {m} }}\naction = 'restart'\n")).collect();
        toml::from_str::<Config>(&text).unwrap().rules
    }

    fn lines(text: &str) -> Vec<Vec<u8>> {
        text.lines().map(|line| line.as_bytes().to_vec()).collect()
    }

    fn case<'a>(cause: &'a Cause, ended: Ended, lines: &'a [Vec<u8>]) -> Case<'a> {
        Case { cause, ended: Some(ended), lines }
    }

    #[test]
    fn all_that_is_named_has_to_hold_and_the_first_rule_wins() {
        let rules = rules(&[
            "exit-code = [3, 4], log = 'NCCL'",
            "signal = 'SIGSEGV'",
            "cause = 'gpu-fault', xid = [79, 48]",
            "exit-code = 3",
            "cause = ['hang', 'out-of-memory']",
        ]);
        let number = |case: &Case<'_>| first(&rules, case).map(|(n, _)| n);
        let said = lines("step 1\nNCCL error\n");
        let exit = |code| Cause::Exit { code };
        assert_eq!(number(&case(&exit(3), Ended::Exit(3), &said)), Some(0));
        assert_eq!(number(&case(&exit(3), Ended::Exit(3), &[])), Some(3));
        assert_eq!(number(&case(&exit(5), Ended::Exit(5), &said)), None);
        assert_eq!(number(&case(&Cause::Signal { signal: 11 }, Ended::Signal(11), &said)), Some(1));
        assert_eq!(number(&case(&Cause::GpuFault { xid: 48 }, Ended::Exit(1), &[])), Some(2));
        assert_eq!(number(&case(&Cause::GpuFault { xid: 31 }, Ended::Exit(1), &[])), None);
        assert_eq!(number(&case(&Cause::OutOfMemory, Ended::Signal(9), &[])), Some(4));
        let hang = Cause::Hang { what: Missing::Work };
        assert_eq!(number(&Case { cause: &hang, ended: None, lines: &[] }), Some(4));
    }

    proptest! {
        #[test]
        fn a_rule_that_names_something_else_never_fits(code in 1i32..256, wanted in 1u8..255, signal in 1i32..32) {
            let named = rules(&[&format!("exit-code = {wanted}")]);
            let cause = Cause::Exit { code };
            prop_assert_eq!(first(&named, &case(&cause, Ended::Exit(code), &[])).is_some(), code == i32::from(wanted));
            let cause = Cause::Signal { signal };
            prop_assert!(first(&named, &case(&cause, Ended::Signal(signal), &[])).is_none());
            let runs = Case { cause: &cause, ended: None, lines: &[] };
            prop_assert!(first(&named, &runs).is_none());
        }
    }
}
