//! Messages that the user gets only once, and failures that repeat, which are logged once and counted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Messages of this run. Clones share them, because several threads log.
#[derive(Debug, Clone, Default)]
pub(super) struct Said(Arc<Mutex<BTreeSet<String>>>);

impl Said {
    /// Whether this text is new and must be logged.
    pub(super) fn is_new(&self, text: String) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(text)
    }
}

/// What is logged about a snapshot that failed; `is_over` if the job has ended meanwhile.
pub(super) fn of_failed_snapshot(why: &str, is_over: bool) -> String {
    let and = if is_over { ", and the job has ended" } else { ", the job continues" };
    format!("the snapshot failed{and}: {why}")
}

/// After this time a failure that still repeats is logged again.
const AGAIN: Duration = Duration::from_secs(3600);

/// Failures that may come at each interval. Clones share them, because several threads log.
#[derive(Debug, Clone, Default)]
pub(super) struct Repeats(Arc<Mutex<BTreeMap<String, Repeated>>>);

/// A failure that was logged.
#[derive(Debug)]
struct Repeated {
    /// The text without its numbers: sizes, times and names of images differ each time.
    form: String,
    logged: Instant,
    /// How often it has come since.
    unsaid: u32,
}

impl Repeats {
    /// The line to log for a failure of `what`; none if the same was logged less than an hour ago.
    pub(super) fn failed(&self, what: &str, text: &str, now: Instant) -> Option<String> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let form = form(text);
        let before = match all.get_mut(what) {
            Some(last) if last.form == form && now.saturating_duration_since(last.logged) < AGAIN => {
                last.unsaid = last.unsaid.saturating_add(1);
                return None;
            }
            Some(last) => std::mem::take(&mut last.unsaid),
            None => 0,
        };
        let is_same = all.get(what).is_some_and(|last| last.form == form);
        all.insert(what.to_owned(), Repeated { form, logged: now, unsaid: 0 });
        Some(match before {
            0 => text.to_owned(),
            n if is_same => format!("{text} (repeated {} since it was last logged)", times(n)),
            n => format!("{text} (the failure logged before this one was repeated {})", times(n)),
        })
    }

    /// Warns of it, unless the same was logged less than an hour ago.
    pub(super) fn warn(&self, what: &str, text: &str) {
        match self.failed(what, text, Instant::now()) {
            Some(line) => tracing::warn!("{line}"),
            None => tracing::debug!("{text}"),
        }
    }

    /// It works again. Returns what to add to the line that says so, if failures were not logged.
    pub(super) fn succeeded(&self, what: &str) -> Option<String> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(what)?;
        (last.unsaid > 0).then(|| format!("the failure logged before this was repeated {}", times(last.unsaid)))
    }
}

fn times(n: u32) -> String {
    if n == 1 { "once".to_owned() } else { format!("{n} times") }
}

/// The text without words that have digits, and without the units after them.
fn form(text: &str) -> String {
    const UNITS: [&str; 9] = ["B", "kB", "MB", "GB", "KiB", "MiB", "GiB", "TiB", "ms"];
    let kept = text.split(' ').filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
    let is_unit = |word: &str| UNITS.contains(&word.trim_end_matches(|c: char| c.is_ascii_punctuation()));
    kept.filter(|word| !is_unit(word)).collect::<Vec<_>>().join(" ")
}

/// Messages that were logged.
#[derive(Debug, Default)]
pub(super) struct Remarks {
    /// Those of this run.
    pub(super) said: Said,
    /// Failures at each interval.
    pub(super) repeats: Repeats,
    /// Whether somebody asked for the snapshot in progress: then its failure is always logged.
    pub(super) is_asked_for: bool,
    /// Notes on the last snapshot.
    notes: Vec<String>,
}

impl Remarks {
    /// The notes of a snapshot that the previous one did not have.
    pub(super) fn news(&mut self, notes: &[String]) -> Vec<String> {
        let before = std::mem::replace(&mut self.notes, notes.to_vec());
        notes.iter().filter(|note| !before.contains(note)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_has_ended_is_not_said_to_continue() {
        assert_eq!(of_failed_snapshot("no room", false), "the snapshot failed, the job continues: no room");
        assert!(!of_failed_snapshot("dump: it is gone", true).contains("continues"));
    }

    #[test]
    fn a_note_is_said_again_only_after_a_snapshot_without_it() {
        let notes = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        let mut remarks = Remarks::default();
        assert_eq!(remarks.news(&notes(&["a", "b"])), ["a", "b"]);
        assert_eq!(remarks.news(&notes(&["b", "c"])), ["c"]);
        assert_eq!(remarks.news(&notes(&["a"])), ["a"]);
    }

    #[test]
    fn a_failure_that_repeats_is_logged_once_and_counted() {
        let repeats = Repeats::default();
        let (began, minute) = (Instant::now(), Duration::from_secs(60));
        let short = |gib: u32| format!("the snapshot failed: the image needs {gib}.7 GiB of memory and 61 GiB is free");
        let failed = |text: &str, minutes: u32| repeats.failed("snapshot", text, began + minute * minutes);
        assert_eq!(failed(&short(98), 0), Some(short(98)));
        for minutes in 1..60 {
            assert_eq!(failed(&short(90 + minutes), minutes), None);
        }
        let again = failed(&short(99), 60).unwrap();
        assert_eq!(again, format!("{} (repeated 59 times since it was last logged)", short(99)));
        assert_eq!(failed(&short(99), 61), None);
        assert_eq!(
            failed("the snapshot failed: CRIU ended", 62).as_deref(),
            Some("the snapshot failed: CRIU ended (the failure logged before this one was repeated once)")
        );
        assert_eq!(
            repeats.failed("hook", "the snapshot failed: CRIU ended", began),
            Some("the snapshot failed: CRIU ended".into())
        );
        assert_eq!(repeats.succeeded("snapshot"), None);
        assert!(failed(&short(1), 63).is_some() && failed(&short(2), 64).is_none());
        assert_eq!(repeats.succeeded("snapshot").as_deref(), Some("the failure logged before this was repeated once"));
        assert!(failed(&short(1), 65).is_some(), "it has worked since");
    }

    #[test]
    fn a_text_is_said_once_by_all_who_share_it() {
        let said = Said::default();
        assert!(said.clone().is_new("x".into()) && !said.is_new("x".into()) && said.is_new("y".into()));
    }
}
