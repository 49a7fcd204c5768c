//! What a run did, counted, for the one line at its end.

use std::time::Duration;

use super::times::shown;
use rekindle_base::units::counted;

/// Snapshots of this run.
#[derive(Debug, Default)]
pub(super) struct Tally {
    taken: u32,
    failed: u32,
    /// How long the job was frozen, in all.
    frozen: Duration,
    longest: Duration,
}

impl Tally {
    pub(super) fn snapshot_taken(&mut self, freeze: Duration) {
        self.taken += 1;
        self.frozen += freeze;
        self.longest = self.longest.max(freeze);
    }

    pub(super) fn snapshot_failed(&mut self) {
        self.failed += 1;
    }

    /// The snapshots and the restarts of a run, in words.
    pub(super) fn in_words(&self, restarts: u32) -> String {
        let mut words = counted(self.taken.into(), "snapshot");
        if self.taken > 0 {
            words += &format!(" (frozen for {} in total, {} at most)", shown(self.frozen), shown(self.longest));
        }
        if self.failed > 0 {
            words += &format!(", {} failed", self.failed);
        }
        format!("{words}, {}", counted(restarts.into(), "restart"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_counts_what_there_was() {
        let mut tally = Tally::default();
        assert_eq!(tally.in_words(0), "0 snapshots, 0 restarts");
        tally.snapshot_taken(Duration::from_millis(20));
        assert_eq!(tally.in_words(1), "1 snapshot (frozen for 20ms in total, 20ms at most), 1 restart");
        tally.snapshot_taken(Duration::from_millis(1500));
        tally.snapshot_failed();
        assert_eq!(
            tally.in_words(2),
            "2 snapshots (frozen for 1s 520ms in total, 1s 500ms at most), 1 failed, 2 restarts"
        );
    }
}
