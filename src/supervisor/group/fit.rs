//! Members whose settings must be equal, and which of two that differ leaves the group.
//!
//! A machine that joins must not end a run that is there: the members of the run stay, and the other one leaves, because it
//! looks at the same settings.

use std::collections::BTreeMap;

use super::super::Owner;
use super::super::state::{Event, Finish, Obstacle, State};
use crate::group::{Disagreement, Node};
use rekindle_group::Rank;

/// A member that does not fit to this one.
#[derive(Debug, PartialEq, Eq)]
enum Misfit {
    /// This one leaves.
    Ours(Rank, Disagreement),
    /// The other one leaves.
    Theirs(Rank, Disagreement),
}

/// The first member that does not fit. `is_of_run`: whether a member takes part in the present run, or has; `own` is this
/// one. A new member that fits to all of those stays, too.
fn misfit(own: (Rank, &Node), nodes: &BTreeMap<Rank, Node>, is_of_run: &dyn Fn(Rank) -> bool) -> Option<Misfit> {
    let (rank, node) = own;
    let others = || nodes.iter().filter(|(other, _)| **other != rank).map(|(other, it)| (*other, node.disagrees(it)));
    let found = |of_run: bool| {
        let mut those = others().filter(|(other, _)| !of_run || is_of_run(*other));
        those.find_map(|(other, disagreement)| Some((other, disagreement?)))
    };
    if let Some((other, disagreement)) = found(true) {
        return Some(Misfit::Ours(other, disagreement));
    }
    let (other, disagreement) = found(false)?;
    let stays = is_of_run(rank) || others().any(|(other, _)| is_of_run(other));
    Some(if stays { Misfit::Theirs(other, disagreement) } else { Misfit::Ours(other, disagreement) })
}

impl Owner<'_> {
    /// Ends the run if this member has settings that do not fit to the others'. A member whose job runs is not the wrong one.
    pub(super) fn disagrees(&mut self) -> bool {
        let (Some(member), Some(group)) = (&self.group, &self.setup.group) else { return false };
        if *self.machine.state() != State::Idle {
            return false;
        }
        let own = &group.identity;
        let is_of_run = |rank| match rank == own.rank {
            true => member.machine.is_of_run(),
            false => rekindle_group::is_of_run(member.machine.view(), rank),
        };
        let Some(misfit) = misfit((own.rank, &own.node), &member.nodes, &is_of_run) else { return false };
        let (Misfit::Ours(rank, disagreement) | Misfit::Theirs(rank, disagreement)) = &misfit;
        let host = member.nodes.get(rank).map(|node| node.host.as_str()).unwrap_or_default();
        let why = format!("{rank} of the group, on {host}, does not fit: {disagreement}");
        if matches!(misfit, Misfit::Theirs(..)) {
            let text = format!("{why}. The run waits for a machine that fits");
            self.reporting.remarks.repeats.warn("group-fit", &text);
            return false;
        }
        let why = format!("{why}. Make them equal and start the group again");
        self.step(Event::Over(Finish::Impossible { why, obstacle: Obstacle::Configuration }));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::any_node;

    fn node(size: u32) -> Node {
        Node { size, ..any_node() }
    }

    #[test]
    fn who_joins_a_run_and_does_not_fit_leaves_alone() {
        // This member is rank 0, with the settings of a group of three.
        let look = |others: &[(u32, u32)], of_run: &[u32]| {
            let nodes = others.iter().map(|(rank, size)| (Rank(*rank), node(*size))).collect();
            let found = misfit((Rank(0), &node(3)), &nodes, &|rank| of_run.contains(&rank.0));
            found.map(|it| match it {
                Misfit::Ours(rank, _) => ("leaves", rank.0),
                Misfit::Theirs(rank, _) => ("stays", rank.0),
            })
        };
        assert_eq!(look(&[(0, 4), (1, 3), (2, 3)], &[]), None, "the earlier node of this rank does not count");
        // Nothing runs yet: who sees it first ends.
        assert_eq!(look(&[(1, 3), (2, 4)], &[]), Some(("leaves", 2)));
        // The others are the run.
        assert_eq!(look(&[(1, 4), (2, 4)], &[1, 2]), Some(("leaves", 1)));
        // This one is the run, alone or with another one.
        assert_eq!(look(&[(1, 4)], &[0]), Some(("stays", 1)));
        assert_eq!(look(&[(1, 4), (2, 3)], &[0, 2]), Some(("stays", 1)));
        // Both are new, and this one fits.
        assert_eq!(look(&[(1, 4), (2, 3)], &[2]), Some(("stays", 1)));
    }
}
