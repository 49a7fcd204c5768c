//! The reasons that the leader writes into plans, and what they tell.
//!
//! They are sentences for people, in the plan's [`Goal`](crate::Goal). A supervisor that reports them must tell a loss
//! from what somebody asked for, and name the machine.

use crate::ids::Rank;

/// The coordinator has no plan yet.
pub(crate) const BEGINS: &str = "the group begins";
/// The last run is over, and the members are new ones.
pub(crate) const NEW_RUN: &str = "a new run";
/// A suspended job continues.
pub(crate) const RESUMED: &str = "resumed";
/// The beginning of the reason of a rewind.
pub(crate) const REWOUND: &str = "rewound to ";

/// Why a member refuses a snapshot while its job holds snapshots.
pub const BLOCKED: &str = "the job blocks snapshots now";

/// Whether the job starts for this reason because something was lost, and not because somebody wants it.
#[must_use]
pub fn is_loss(why: &str) -> bool {
    ![BEGINS, NEW_RUN, RESUMED].contains(&why) && !why.starts_with(REWOUND)
}

/// The machines that a reason names: `rank 1: it died`, `not locked in time: rank 0, rank 2`. Whatever else it has is
/// from a job or a machine, and may name anything.
#[must_use]
pub fn named_ranks(why: &str) -> Vec<Rank> {
    if let Some((rank, _)) = leading_rank(why) {
        return vec![rank];
    }
    let Some((_, list)) = why.split_once(": ") else { return Vec::new() };
    let whole = |text: &str| leading_rank(text).filter(|(_, rest)| rest.is_empty()).map(|(rank, _)| rank);
    list.split(", ").map(whole).collect::<Option<_>>().unwrap_or_default()
}

fn leading_rank(text: &str) -> Option<(Rank, &str)> {
    let rest = text.strip_prefix("rank ")?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, rest) = rest.split_at(end);
    Some((Rank(digits.parse().ok()?), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_of_a_reason_are_found() {
        for (why, ranks) in [
            ("rank 3 is lost", vec![3]),
            ("rank 12: the job ended: exit code 1, rank 4 failed", vec![12]),
            ("not locked in time: rank 0, rank 2", vec![0, 2]),
            ("not running again after a snapshot: rank 1", vec![1]),
            ("not ready in time: the group", vec![]),
            ("the job failed 8 times in a row; the last time: rank 1: it died", vec![]),
            (BEGINS, vec![]),
        ] {
            assert_eq!(named_ranks(why), ranks.into_iter().map(Rank).collect::<Vec<_>>(), "{why}");
        }
    }

    #[test]
    fn what_was_asked_for_is_no_loss() {
        assert!([BEGINS, NEW_RUN, RESUMED, "rewound to group image 4"].iter().all(|why| !is_loss(why)));
        assert!(is_loss("rank 3 is lost"));
    }
}
