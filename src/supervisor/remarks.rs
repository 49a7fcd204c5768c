//! What the user was told once and is not told again.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Texts that were said in this run. Clones share them: threads say some of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Said(Arc<Mutex<BTreeSet<String>>>);

impl Said {
    /// Whether this text is to be said: it is the first time.
    pub(super) fn is_new(&self, text: String) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(text)
    }
}

/// What was said.
#[derive(Debug, Default)]
pub(super) struct Remarks {
    /// In this run.
    pub(super) said: Said,
    /// About the last snapshot.
    notes: Vec<String>,
}

impl Remarks {
    /// The notes of a snapshot that the one before it had not.
    pub(super) fn news(&mut self, notes: &[String]) -> Vec<String> {
        let before = std::mem::replace(&mut self.notes, notes.to_vec());
        notes.iter().filter(|note| !before.contains(note)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_said_again_only_after_a_snapshot_without_it() {
        let notes = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        let mut remarks = Remarks::default();
        assert_eq!(remarks.news(&notes(&["a", "b"])), ["a", "b"]);
        assert_eq!(remarks.news(&notes(&["b", "c"])), ["c"]);
        assert_eq!(remarks.news(&notes(&["a"])), ["a"]);
    }

    #[test]
    fn a_text_is_said_once_by_all_who_share_it() {
        let said = Said::default();
        assert!(said.clone().is_new("x".into()) && !said.is_new("x".into()) && said.is_new("y".into()));
    }
}
