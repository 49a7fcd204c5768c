//! All machines of a history, and what of them the rules look at.

use std::ops::{Deref, Index, IndexMut};
use std::time::Instant;

use super::node::{Cable, Node};
use crate::ids::Rank;

/// One for each rank, then the machines that replaced others. Most events change nothing that a rule looks at: this
/// notices the others. Whoever may change a machine takes it with [`IndexMut`].
#[derive(Debug)]
pub(super) struct Nodes {
    all: Vec<Node>,
    ranks: u32,
    /// Those that may have changed since the last look.
    touched: Vec<usize>,
    /// What the last look saw.
    seen: Vec<Seen>,
    standing: Standing,
}

/// All of a machine that may change the result of [`Nodes::standing`] or of a rule that looks at the machines after every
/// event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    /// With its number: the epoch of a job and what it was restored from never change.
    job: Option<(u64, Cable, bool)>,
    paused_until: Option<Instant>,
    is_replaced: bool,
    has_supervisor: bool,
    is_over_for_good: bool,
}

impl Seen {
    fn of(node: &Node) -> Seen {
        Seen {
            job: node.job.as_ref().map(|job| (job.id, job.cable, job.killed)),
            paused_until: node.trouble.paused_until,
            is_replaced: node.trouble.replaced,
            has_supervisor: node.machine.is_some(),
            is_over_for_good: node.is_over_for_good(),
        }
    }
}

/// What can be said of all machines together.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Standing {
    /// The job of each rank runs.
    pub(super) all_run: bool,
    /// The run is over, and all supervisors have ended.
    pub(super) is_over: bool,
}

impl Nodes {
    pub(super) fn new(all: Vec<Node>) -> Nodes {
        // A group has at most some dozens.
        let (ranks, touched) = (u32::try_from(all.len()).unwrap_or(u32::MAX), (0..all.len()).collect());
        Nodes { all, ranks, touched, seen: Vec::new(), standing: Standing::default() }
    }

    pub(super) fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Another machine for a rank.
    pub(super) fn push(&mut self, node: Node) {
        self.touched.push(self.all.len());
        self.all.push(node);
    }

    /// Whether something that rules look at has changed since the last look.
    pub(super) fn look(&mut self) -> bool {
        let mut has_changed = false;
        for at in self.touched.drain(..) {
            let now = Seen::of(&self.all[at]);
            match self.seen.get_mut(at) {
                Some(seen) if *seen == now => continue,
                Some(seen) => *seen = now,
                // They are touched in this order when they are new.
                None => self.seen.push(now),
            }
            has_changed = true;
        }
        if has_changed {
            self.standing = Standing { all_run: self.all_run(), is_over: self.is_over() };
        }
        has_changed
    }

    /// As of the last look.
    pub(super) fn standing(&self) -> Standing {
        self.standing
    }

    fn all_run(&self) -> bool {
        let runs = |node: &Node| node.job.as_ref().is_some_and(|job| job.cable == Cable::In && !job.killed);
        let (first, others) = self.all.split_at(self.ranks as usize);
        let instead = |rank: Rank| others.iter().any(|node| node.rank == rank && runs(node));
        first.iter().all(|node| runs(node) || instead(node.rank))
    }

    fn is_over(&self) -> bool {
        self.are_over_for_good() && self.all.iter().all(|node| node.trouble.replaced || node.machine.is_none())
    }

    /// A supervisor has ended with a result after which the scheduler does not start it again.
    pub(super) fn are_over_for_good(&self) -> bool {
        self.all.iter().any(Node::is_over_for_good)
    }
}

impl Deref for Nodes {
    type Target = [Node];

    fn deref(&self) -> &[Node] {
        &self.all
    }
}

impl Index<usize> for Nodes {
    type Output = Node;

    fn index(&self, at: usize) -> &Node {
        &self.all[at]
    }
}

impl IndexMut<usize> for Nodes {
    fn index_mut(&mut self, at: usize) -> &mut Node {
        if self.touched.last() != Some(&at) {
            self.touched.push(at);
        }
        &mut self.all[at]
    }
}
